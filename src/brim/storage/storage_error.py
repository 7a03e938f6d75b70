"""The only exception of a storage: what a failed request means, whatever library made it.

Each backend translates the errors of its library in one function; `classify` holds what a status and a code mean, for
all of them. `explain_error` makes an error for users of it.
"""

from __future__ import annotations

from typing import Literal

from brim.state.retry import may_pass

Kind = Literal[
    "missing",
    "changed",  # a condition did not hold: another version is under this name
    "no_container",  # no such bucket or repository
    "no_revision",
    "no_credentials",
    "bad_credentials",
    "denied",
    "other_region",
    "bad_name",  # the library cannot express the name; `detail` is the name
    "upload_gone",
    "certificate",
    "no_ranges",  # all of a file was sent instead of a range
    "unsupported",  # `detail` may name the missing ability
    "offline",  # huggingface_hub is in offline mode
    "no_connection",  # `detail` is the host, a blank and the cause
    "transient",
    "refused",
]
_NO_CONTAINER = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted")
_CODES: dict[str, Kind] = {
    "RepoNotFound": "no_container",
    "RevisionNotFound": "no_revision",
    "PermanentRedirect": "other_region",
    "AuthorizationHeaderMalformed": "other_region",
    "NoSuchUpload": "upload_gone",
    **dict.fromkeys(_NO_CONTAINER, "no_container"),
    **dict.fromkeys(
        (
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "ExpiredToken",
            "InvalidToken",
            "AuthenticationFailed",
            "InvalidAuthenticationInfo",
        ),
        "bad_credentials",
    ),
}
_STATUSES: dict[int | None, Kind] = {
    301: "other_region",
    307: "other_region",
    401: "denied",
    403: "denied",
    404: "missing",
    410: "missing",
}
_MISSING = (404, 410)
_UNSUPPORTED = 501


class StorageError(Exception):
    """A failed request. `detail` is for `explain_error`; it never holds an answer's text, which may hold secrets."""

    def __init__(
        self,
        kind: Kind,
        status: int | None = None,
        code: str = "",
        detail: str = "",
        *,
        is_transient: bool | None = None,
    ) -> None:
        super().__init__(kind, status, code, detail)
        self.kind, self.status, self.code, self.detail = kind, status, code, detail
        self.is_transient = kind == "transient" if is_transient is None else is_transient

    def __reduce__(self) -> tuple[object, ...]:
        return StorageError, (self.kind, self.status, self.code, self.detail), {"is_transient": self.is_transient}

    def __str__(self) -> str:
        return f"{self.kind} ({self.code or self.status or self.detail})"

    @property
    def is_missing(self) -> bool:
        return self.status in _MISSING and self.kind in ("missing", "no_container", "no_revision", "upload_gone")

    @property
    def is_unsupported(self) -> bool:
        return self.kind == "unsupported" or self.status == _UNSUPPORTED


def classify(status: int | None, code: str = "", text: str = "", detail: str = "") -> StorageError:
    """Return the error that a status and a code stand for. `text` is searched for names of errors without a code."""
    is_missing = status in _MISSING
    is_transient = not is_missing and may_pass(status, code)
    kind: Kind = _CODES.get(code) or _STATUSES.get(status) or ("transient" if is_transient else "refused")
    if is_missing and any(name in text for name in _NO_CONTAINER):
        kind = "no_container"
    return StorageError(kind, status, code, detail, is_transient=is_transient)
