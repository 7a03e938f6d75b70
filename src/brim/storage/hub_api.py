"""Requests to the Hub and to plain web servers: redirects, the token, rate limits, pages.

The Hub sends whoever asks for a large file on to its storage. The token goes to the Hub's own address and nowhere else,
wherever a redirect leads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

from brim.state.retry import RATE_LIMITED, asked_s, capped_wait, interruptible, pause
from brim.storage.storage_error import StorageError, classify

_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2")
_HOPS = 5
_TIMEOUT_S = 60.0
_LOGGER = logging.getLogger("huggingface_hub")  # prints warnings, or leads them to the notes of a job


def hub_endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT).rstrip("/")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def hub_headers(url: str) -> dict[str, str]:
    """The token, for the Hub itself."""
    if _origin(url) != _origin(hub_endpoint()):
        return {}
    from huggingface_hub import get_token
    from huggingface_hub.utils import build_hf_headers

    return dict(build_hf_headers(token=get_token() or False, library_name="brim"))


@contextmanager
def web_errors(url: str) -> Iterator[None]:
    """Raise errors of the connection as StorageError with the host and the cause, without signed addresses."""
    try:
        yield
    except Exception as error:
        package = type(error).__module__.split(".")[0]
        if not isinstance(error, OSError | RuntimeError) and package not in _HTTP_LIBRARIES:
            raise
        name, text = type(error).__name__, str(error)
        if name == "OfflineModeIsEnabled":
            raise StorageError("offline") from None
        cause = name if "://" in text or not text else text
        raise StorageError("no_connection", detail=f"{urlsplit(url).netloc} {cause}", is_transient=True) from None


def ask(method: str, url: str, headers: dict[str, str], body: bytes | None = None, *, streams: bool = False) -> Any:
    """An answer that is no redirect, the address that gave it, and the hash that a bucket told on the way there.

    With `streams` its body is not read yet, unless it is a refusal; close it.
    """
    from huggingface_hub.utils import get_session

    def send() -> Any:
        session = get_session()
        sent = {**hub_headers(url), **headers}
        request = session.build_request(method, url, headers=sent, content=body, timeout=_TIMEOUT_S)
        answer = session.send(request, stream=True, follow_redirects=False)
        if not streams or answer.status_code >= 300:
            try:
                answer.read()
            finally:
                answer.close()
        return answer

    told: str | None = None
    for _ in range(_HOPS):
        with web_errors(url):
            answer = interruptible(send)
        if answer.status_code == RATE_LIMITED and (wait_s := asked_s(answer.status_code, answer.headers)):
            wait_s, said = capped_wait(wait_s)
            _LOGGER.warning("%s answered 429; waiting %s", urlsplit(url).hostname, said)
            pause(wait_s)
            continue
        if _origin(url) == _origin(hub_endpoint()):
            told = answer.headers.get("X-Xet-Hash") or told
        if answer.status_code not in (301, 302, 303, 307, 308) or "Location" not in answer.headers:
            return answer, url, told
        to = urljoin(url, answer.headers["Location"])
        if not to.startswith(("https://", "http://")) or (url.startswith("https://") and to.startswith("http://")):
            raise StorageError("denied", 403)  # it leads to an address that is not safe
        url = to
    if answer.status_code == RATE_LIMITED:
        raise classify(RATE_LIMITED)
    raise StorageError("denied", 403)  # it leads from one address to another without end


def checked(answer: Any) -> Any:
    """Return the answer, or raise what its refusal means."""
    if answer.status_code >= 400:
        raise classify(answer.status_code, answer.headers.get("X-Error-Code") or "")
    return answer


@contextmanager
def readable_answer() -> Iterator[None]:
    """Raise errors in reading JSON as StorageError: something else than the Hub answers in its stead."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise StorageError("transient", detail="no store") from error


def next_page(answer: Any) -> str | None:
    """Where a listing goes on; None at its end. A mirror of the Hub may name the Hub, and is asked itself."""
    url: str | None = answer.links.get("next", {}).get("url")
    if url is None or _origin(url) == _origin(hub_endpoint()):
        return url
    parts = urlsplit(url)
    return f"{hub_endpoint()}{parts.path}?{parts.query}"
