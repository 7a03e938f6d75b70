"""Requests to the Hub and to plain web servers: redirects, the token, rate limits, pages.

The Hub redirects requests for large files to its storage. The token goes to the Hub's own address and nowhere else,
wherever a redirect leads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_session

from brim.errors import InputError
from brim.state.retry import RATE_LIMITED, asked_s, capped_wait, interruptible, pause
from brim.storage.hub_private import hub_token
from brim.storage.storage_error import StorageError, classify

_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2")
_REDIRECTS = (301, 302, 303, 307, 308)
_HOPS = 5
_TIMEOUT_S = 60.0
_LOGGER = logging.getLogger("huggingface_hub")  # prints warnings, or sends them to the notes of a job


def hub_endpoint() -> str:
    return str(constants.ENDPOINT).rstrip("/")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def hub_headers(url: str, token: str | None = None) -> dict[str, str]:
    """Return the headers with the token, for the Hub itself; none for another host."""
    if _origin(url) != _origin(hub_endpoint()):
        return {}
    return dict(build_hf_headers(token=hub_token(token) or False, library_name="brim"))


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
        if name == "UnsupportedProtocol":
            raise InputError(f"HF_ENDPOINT is not the address of a Hub: {text}") from None
        cause = name if "://" in text or not text else text
        raise StorageError("no_connection", detail=f"{urlsplit(url).netloc} {cause}", is_transient=True) from None


def ask(
    method: str,
    url: str,
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
    *,
    token: str | None = None,
    is_streamed: bool = False,
) -> tuple[Any, str, str]:
    """Follow redirects; return the answer, its address, and the Xet hash that the Hub sent before.

    If it is streamed, its body is not read yet, unless it is a refusal; close it.
    """

    def send() -> Any:
        session = get_session()
        sent = {**hub_headers(url, token), **(headers or {})}
        request = session.build_request(method, url, headers=sent, content=body, timeout=_TIMEOUT_S)
        answer = session.send(request, stream=True, follow_redirects=False)
        if not is_streamed or answer.status_code >= 300:
            try:
                answer.read()
            finally:
                answer.close()
        return answer

    xet_hash = ""
    for _ in range(_HOPS):
        with web_errors(url):
            answer = interruptible(send)
        if answer.status_code == RATE_LIMITED and (wait_s := asked_s(answer.status_code, answer.headers)):
            wait_s, shown = capped_wait(wait_s)
            _LOGGER.warning("%s answered 429; waiting %s", urlsplit(url).hostname, shown)
            pause(wait_s)
            continue
        if _origin(url) == _origin(hub_endpoint()):
            xet_hash = answer.headers.get("X-Xet-Hash") or xet_hash
        if answer.status_code not in _REDIRECTS or "Location" not in answer.headers:
            return answer, url, xet_hash
        target = urljoin(url, answer.headers["Location"])
        if not target.startswith(("https://", "http://")) or (url.startswith("https://") and target[:5] == "http:"):
            raise StorageError("denied", 403)  # it leads to an address that is not safe
        url = target
    if answer.status_code == RATE_LIMITED:
        raise classify(RATE_LIMITED)
    raise StorageError("denied", 403)  # a loop of redirects


def checked(answer: Any) -> Any:
    """Return the answer, or raise what its refusal means."""
    if answer.status_code >= 400:
        raise classify(answer.status_code, answer.headers.get("X-Error-Code") or "")
    return answer


@contextmanager
def readable_answer() -> Iterator[None]:
    """Raise errors in reading JSON as StorageError: another server than the Hub answers in its place.

    Only JSON that does not parse may have been cut on the way, and is requested again.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        is_cut = isinstance(error, ValueError)
        raise StorageError("transient", detail="no store", is_transient=is_cut) from error


def read_pages(url: str, token: str | None = None, missing_code: str = "") -> Iterator[dict[str, Any]]:
    """Yield the entries of a listing. A mirror of the Hub may name the Hub as the next page, and is asked itself.

    A listing that is missing with this code is empty.
    """
    next_url: str | None = url
    while next_url:
        answer, _, _ = ask("GET", next_url, token=token)
        if missing_code and answer.status_code == 404 and answer.headers.get("X-Error-Code") == missing_code:
            return
        with readable_answer():
            yield from checked(answer).json()
            next_url = answer.links.get("next", {}).get("url")
        if next_url is not None and _origin(next_url) != _origin(hub_endpoint()):
            parts = urlsplit(next_url)
            next_url = f"{hub_endpoint()}{parts.path}?{parts.query}"
