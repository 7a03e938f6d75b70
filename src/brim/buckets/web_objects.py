"""Files of the Hub and of plain https servers, read like the objects of a bucket; and the Hub's own buckets.

A repository at a commit is a bucket whose keys are paths and whose ETags are the commit: it cannot change. A bucket of
the Hub has no commits; its ETags are the hashes by which Xet knows content. The Hub sends whoever asks for a large file
on to its storage, with an address that expires; it is kept until it is refused. The token goes to the Hub's own address
and nowhere else, wherever a redirect leads.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from brim.buckets.bucket_address import BucketAddress
from brim.buckets.bucket_client import AnotherObject, WebFailed
from brim.errors import SinkFailed
from brim.state.durable import write_all
from brim.state.retry import RATE_LIMITED, asked_s, capped_wait, interruptible, look, pause
from brim.state.scratch import Scratch, scratch_folder

_HOPS = 5
_PATHS = 1000  # that may be asked about at once
_TIMEOUT_S = 60.0
_LOCK = threading.Lock()
_LOGGER = logging.getLogger("huggingface_hub")  # prints warnings, or leads them to the notes of a job
_PLACES: dict[str, tuple[str, str | None]] = {}  # where the Hub sent us for a file, and what it said of its content
_COMMITS: dict[str, str] = {}
_COPIES: dict[str, _Copy] = {}
_COPYING: dict[str, threading.Lock] = {}
_MOST_COPIES = 16  # of files at a time: each takes disk
_COPY_BYTES = 1 << 18


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT).rstrip("/")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _headers(url: str) -> dict[str, str]:
    """The token, for the Hub itself."""
    if _origin(url) != _origin(_endpoint()):
        return {}
    from huggingface_hub import get_token
    from huggingface_hub.utils import build_hf_headers

    return dict(build_hf_headers(token=get_token() or False, library_name="brim"))


@contextmanager
def _web_errors() -> Iterator[None]:
    """Make errors of the connection WebFailed."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise WebFailed(f"{type(error).__name__}") from None
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2"):
            raise
        raise WebFailed(f"{type(error).__name__}") from None


def _ask(method: str, url: str, headers: dict[str, str], body: bytes | None = None, *, streams: bool = False) -> Any:
    """An answer that is no redirect, the address that gave it, and the hash that a bucket told on the way there.

    With `streams` its body is not read yet, unless it is a refusal; close it.
    """
    from huggingface_hub.utils import get_session

    def send() -> Any:
        session = get_session()
        sent = {**_headers(url), **headers}
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
        with _web_errors():
            answer = interruptible(send)
        if answer.status_code == RATE_LIMITED and (wait_s := asked_s(answer.status_code, answer.headers)):
            wait_s, said = capped_wait(wait_s)
            _LOGGER.warning("%s answered 429; waiting %s", urlsplit(url).hostname, said)
            pause(wait_s)
            continue
        if _origin(url) == _origin(_endpoint()):
            told = answer.headers.get("X-Xet-Hash") or told
        if answer.status_code not in (301, 302, 303, 307, 308) or "Location" not in answer.headers:
            return answer, url, told
        to = urljoin(url, answer.headers["Location"])
        if not to.startswith(("https://", "http://")) or (url.startswith("https://") and to.startswith("http://")):
            raise WebFailed("status code: 403 (it leads to an address that is not safe)")
        url = to
    if answer.status_code == RATE_LIMITED:
        raise WebFailed("status code: 429 Too Many Requests")
    raise WebFailed("status code: 403 (it leads from one address to another without end)")


def _checked(answer: Any) -> Any:
    if answer.status_code >= 400:
        code = answer.headers.get("X-Error-Code") or ""
        raise WebFailed(
            f"status code: {answer.status_code} {answer.reason_phrase}" + f" <Code>{code}</Code>" * bool(code)
        )
    return answer


@contextmanager
def _readable() -> Iterator[None]:
    """Make errors in reading JSON WebFailed: something else than the Hub answers in its stead."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise WebFailed(f"Got invalid JSON ({type(error).__name__})") from error


def _following(answer: Any) -> str | None:
    """Where a listing goes on; None at its end. A mirror of the Hub may name the Hub, and is asked itself."""
    url: str | None = answer.links.get("next", {}).get("url")
    if url is None or _origin(url) == _origin(_endpoint()):
        return url
    parts = urlsplit(url)
    return f"{_endpoint()}{parts.path}?{parts.query}"


def _repo(address: BucketAddress) -> tuple[str, str]:
    repo, _, revision = address.bucket.removeprefix("datasets/").partition("@")
    return repo, unquote(revision) or "main"


def url_of(address: BucketAddress, key: str, etag: str | None) -> str:
    """Where an object is asked for."""
    if address.scheme != "hf":
        return f"{address.scheme}://{address.bucket}/{key}"
    if address.on_hub:
        return f"{_endpoint()}/{address.bucket}/resolve/{quote(key, safe='')}"
    repo, revision = _repo(address)
    at = etag or commit_of(address)
    return f"{_endpoint()}/datasets/{repo}/resolve/{quote(at or revision, safe='')}/{quote(key)}"


def commit_of(address: BucketAddress) -> str:
    """The commit that the revision of an address is now; the same for as long as this process lives."""
    repo, revision = _repo(address)
    name = f"{_endpoint()} {repo} {revision}"
    if name not in _COMMITS:
        answer, _, _ = _ask("GET", f"{_endpoint()}/api/datasets/{repo}/revision/{quote(revision, safe='')}", {})
        with _readable():
            _COMMITS[name] = str(_checked(answer).json()["sha"])
    return _COMMITS[name]


def get_range(
    address: BucketAddress, key: str, start: int, stop: int | None, etag: str | None
) -> tuple[bytes, str | None]:
    """Bytes of an object and the ETag it has now; all of it without `stop`."""
    url = url_of(address, key, etag)
    if stop is not None and (copy := _COPIES.get(url)) is not None and copy.version == (etag or copy.version):
        return copy.read(start, stop), copy.etag
    headers = {} if stop is None else {"Range": f"bytes={start}-{stop - 1}"}
    known, told = _PLACES.get(url, (None, None))
    if address.on_hub and etag and told != etag:
        known = None  # what is there may have become something else
    if known:
        answer, place, _ = _ask("GET", known, headers, streams=True)
    if not known or answer.status_code in (401, 403, 404, 410):
        _PLACES.pop(url, None)
        answer, place, told = _ask("GET", url, headers, streams=True)
    with closing(_checked(answer)), _web_errors():
        found = etag if address.scheme == "hf" and not address.on_hub else answer.headers.get("ETag")
        if address.on_hub:
            found = told
        is_whole = start == 0 and answer.headers.get("Content-Length") == str(stop)
        if answer.status_code == 200 and stop is not None and not is_whole:
            copy = _copy_of(url, answer, found)
            if etag and copy.version != etag:
                raise AnotherObject(f"{key} was replaced")
            return copy.read(start, stop), found
        data = answer.read()
    if place != url:
        with _LOCK:
            _PLACES[url] = (place, told)
    return data, found


class _Copy:
    """A file of a server that does not send ranges: all of it on disk, to cut ranges from, until the process ends."""

    def __init__(self, answer: Any, etag: str | None) -> None:
        self.etag, self.version = etag, etag or _dated(answer)
        self._size = 0
        try:
            self._scratch = Scratch()
            for block in answer.iter_bytes(_COPY_BYTES):
                look()
                write_all(self._scratch.descriptor, block)
                self._size += len(block)
        except OSError as error:
            raise SinkFailed(
                f"A copy of what {answer.url.host} sends cannot be written to {scratch_folder()}: {error.strerror}.",
                hint="The server does not send ranges, so that a copy is needed. Set TMPDIR to a folder with room.",
            ) from error

    def read(self, start: int, stop: int) -> bytes:
        if self._size < stop:
            raise WebFailed("status code: 501 (the server does not send ranges)")
        return self._scratch.read(start, stop - start)


def _copy_of(url: str, answer: Any, etag: str | None) -> _Copy:
    """The copy that an answer with the whole file leads to. Others who ask for the same file wait for it."""
    with _LOCK:
        lock = _COPYING.setdefault(url, threading.Lock())
    with lock:
        copy = _COPIES.get(url)
        if copy is None or copy.version != (etag or _dated(answer)):
            _COPIES.pop(url, None)
            copy = _Copy(answer, etag)
            while len(_COPIES) >= _MOST_COPIES:
                _COPIES.pop(next(iter(_COPIES)), None)  # whoever reads from it keeps it
            _COPIES[url] = copy
        return copy


def _dated(answer: Any) -> str:
    """What stands for the ETag of a server that gives none."""
    return f"modified {answer.headers.get('Last-Modified')}"


def head(address: BucketAddress, key: str) -> tuple[int, str] | None:
    """The size of an object and its ETag; None if it is not there."""
    if address.on_hub:
        return hub_heads(address, [key]).get(key)
    if address.scheme == "hf":
        listed = {path: size for path, size, _ in listing(address)}
        return (listed[key], commit_of(address)) if key in listed else None
    answer, _, _ = _ask("HEAD", url_of(address, key, None), {"Accept-Encoding": "identity"})
    if answer.status_code in (404, 410):
        return None
    size = _checked(answer).headers.get("Content-Length")
    if size is None:
        raise WebFailed("status code: 501 (the server does not say how large it is)")
    return int(size), answer.headers.get("ETag") or _dated(answer)


def hub_address(address: BucketAddress, what: str) -> tuple[str, dict[str, str]]:
    """Where the Hub is asked about one of its buckets, and as whom."""
    url = f"{_endpoint()}/api/{address.bucket}{what}"
    return url, _headers(url)


def who() -> tuple[str, str]:
    """Which Hub, and whose token."""
    return _endpoint(), _headers(_endpoint()).get("authorization", "")


def hub_request(
    address: BucketAddress,
    method: str,
    what: str,
    body: bytes | None = None,
    *,
    kind: str = "application/json",
    also: tuple[int, ...] = (),
) -> Any:
    """What the Hub answers about one of its buckets; `also` are refusals that the caller reads."""
    url, _ = hub_address(address, what)
    answer, _, _ = _ask(method, url, {} if body is None else {"Content-Type": kind}, body)
    found = answer if answer.status_code in also else _checked(answer)
    with _readable():
        return found.json() if found.content else {}


def hub_heads(address: BucketAddress, keys: list[str]) -> dict[str, tuple[int, str]]:
    """The sizes and hashes of objects of a bucket of the Hub, as far as they are there."""
    found = {}
    for start in range(0, len(keys), _PATHS):
        body = json.dumps({"paths": keys[start : start + _PATHS]}).encode()
        with _readable():
            for entry in hub_request(address, "POST", "/paths-info", body):
                if entry.get("type") == "file":
                    found[str(entry["path"])] = (int(entry["size"]), str(entry["xetHash"]))
    return found


def hub_listing(address: BucketAddress) -> Iterator[tuple[str, int, str]]:
    """(path, size, hash) of every object below an address in a bucket of the Hub, which goes by the first letters."""
    below = f"/{quote(address.prefix, safe='')}" if address.prefix else ""
    url: str | None = f"{_endpoint()}/api/{address.bucket}/tree{below}?recursive=true"
    while url:
        answer, _, _ = _ask("GET", url, {})
        if answer.status_code == 404 and answer.headers.get("X-Error-Code") == "EntryNotFound":
            return
        with _readable():
            for entry in _checked(answer).json():
                if entry.get("type") == "file" and f"{entry['path']}/".startswith(f"{address.prefix}/" * bool(below)):
                    yield str(entry["path"]), int(entry["size"]), str(entry["xetHash"])
        url = _following(answer)


def listing(address: BucketAddress) -> Iterator[tuple[str, int, str]]:
    """(path, size, SHA-256 if the Hub has it) of every file below an address, at its commit."""
    repo, _ = _repo(address)
    below = f"/{quote(address.prefix)}" if address.prefix else ""
    url: str | None = f"{_endpoint()}/api/datasets/{repo}/tree/{commit_of(address)}{below}?recursive=true"
    while url:
        answer, _, _ = _ask("GET", url, {})
        if answer.status_code == 404 and address.prefix:  # a file has no tree
            yield from _one_file(address)
            return
        with _readable():
            for entry in _checked(answer).json():
                if entry.get("type") == "file":
                    lfs = entry.get("lfs") or {}
                    yield str(entry["path"]), int(lfs.get("size", entry["size"])), str(lfs.get("oid", ""))
        url = _following(answer)


def _one_file(address: BucketAddress) -> Iterator[tuple[str, int, str]]:
    folder, _, _ = address.prefix.rpartition("/")
    parent = BucketAddress(address.scheme, address.bucket, folder, address.access)
    yield from (found for found in listing(parent) if found[0] == address.prefix)
