"""Files of plain web servers and of repositories on the Hub, to read.

A repository at a commit cannot change: its ETags are the commit. The address to which the Hub sends whoever asks for a
large file expires; it is kept until it is refused.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

from brim.errors import DestinationUnavailableError
from brim.state.atomic_files import write_all
from brim.state.retry import look
from brim.state.scratch import Scratch, scratch_folder
from brim.storage.hub_api import ask, checked, hub_endpoint, next_page, readable_answer, web_errors
from brim.storage.requests import beside, tries
from brim.storage.storage import DATED, ObjectStat, Storage
from brim.storage.storage_error import StorageError

_LOCK = threading.Lock()
_PLACES: dict[str, tuple[str, str | None]] = {}  # where the Hub sent us for a file, and what it said of its content
_COMMITS: dict[str, str] = {}
_COPIES: dict[str, _Copy] = {}
_COPYING: dict[str, threading.Lock] = {}
_MOST_COPIES = 16  # of files at a time: each takes disk
_COPY_BYTES = 1 << 18


class HttpStorage(Storage):
    """Files of a web server, which lists none."""

    heads_at_once = 1
    version_is_told = False  # whether the Hub says, with each redirect, what the file is

    def url(self, key: str, etag: str | None) -> str:
        return f"{self.location.scheme}://{self.location.bucket}/{key}"

    def version_of(self, answer: Any, etag: str | None, told: str | None) -> str | None:
        """Return the version of a file that was answered; `told` is what the Hub said of it on the way there."""
        found: str | None = answer.headers.get("ETag")
        return found

    def head(self, key: str) -> ObjectStat | None:
        answer, _, _ = ask("HEAD", self.url(key, None), {"Accept-Encoding": "identity"})
        if answer.status_code in (404, 410):
            return None
        size = checked(answer).headers.get("Content-Length")
        if size is None:
            raise StorageError("unsupported", 501)  # the server does not say how large it is
        return ObjectStat(int(size), answer.headers.get("ETag") or _dated(answer))

    def heads(self, keys: Sequence[str]) -> Mapping[str, ObjectStat]:
        """Return what is known of those of the files that exist."""
        return {key: found for key in keys if (found := self.head(key)) is not None}

    def stat(self, keys: Iterable[str]) -> Iterator[ObjectStat | None]:
        asked = iter(keys)
        while some := list(itertools.islice(asked, self.heads_at_once)):
            try:
                found = tries().call(partial(self.heads, some))
            except StorageError as error:
                if not error.is_missing:
                    raise
                found = {}
            yield from (found.get(key) for key in some)

    async def fetch(self, key: str, start: int, stop: int | None, etag: str | None) -> bytes:
        return await beside(self._fetch, key, start, stop, etag)

    def _fetch(self, key: str, start: int, stop: int | None, etag: str | None) -> bytes:
        if start == stop:
            found = self.head(key)
            if found is None or found.st_size:
                raise StorageError("changed")
            return b""
        data, version = self.read_range(key, start, stop, etag)
        if etag and not etag.startswith(DATED) and version not in (None, etag):
            raise StorageError("changed")
        return data

    def read_range(self, key: str, start: int, stop: int | None, etag: str | None) -> tuple[bytes, str | None]:
        """Return bytes of a file and the version it has now; all of it without `stop`."""
        url = self.url(key, etag)
        if stop is not None and (copy := _COPIES.get(url)) is not None and copy.version == (etag or copy.version):
            return copy.read(start, stop), copy.etag
        headers = {} if stop is None else {"Range": f"bytes={start}-{stop - 1}"}
        known, told = _PLACES.get(url, (None, None))
        if self.version_is_told and etag and told != etag:
            known = None  # what is there may have become something else
        if known:
            answer, place, _ = ask("GET", known, headers, streams=True)
        if not known or answer.status_code in (401, 403, 404, 410):
            _PLACES.pop(url, None)
            answer, place, told = ask("GET", url, headers, streams=True)
        with closing(checked(answer)), web_errors(place):
            found = self.version_of(answer, etag, told)
            is_complete = start == 0 and answer.headers.get("Content-Length") == str(stop)
            if answer.status_code == 200 and stop is not None and not is_complete:
                copy = _copy_of(url, answer, found)
                if etag and copy.version != etag:
                    raise StorageError("changed")
                return copy.read(start, stop), found
            data = answer.read()
        if place != url:
            with _LOCK:
                _PLACES[url] = (place, told)
        return data, found


class HubRepository(HttpStorage):
    """A repository at one commit."""

    heads_at_once = 1 << 20  # one listing answers for all

    def url(self, key: str, etag: str | None) -> str:
        at = quote(etag or self.commit(), safe="")
        return f"{hub_endpoint()}/datasets/{self.location.repository}/resolve/{at}/{quote(key)}"

    def version_of(self, answer: Any, etag: str | None, told: str | None) -> str | None:
        return etag

    def commit(self) -> str:
        """Return the commit that the revision is now: the same for as long as this process lives."""
        repo, revision = self.location.repository, unquote(self.location.revision)
        name = f"{hub_endpoint()} {repo} {revision}"
        if name not in _COMMITS:
            answer, _, _ = ask("GET", f"{hub_endpoint()}/api/datasets/{repo}/revision/{quote(revision, safe='')}", {})
            with readable_answer():
                _COMMITS[name] = str(checked(answer).json()["sha"])
        return _COMMITS[name]

    def heads(self, keys: Sequence[str]) -> Mapping[str, ObjectStat]:
        return dict(self._tree(self.location.prefix))

    def head(self, key: str) -> ObjectStat | None:
        return self.heads([key]).get(key)

    def list(self, page_done: Callable[[], None]) -> Iterator[tuple[str, ObjectStat]]:
        yield from list(self._tree(self.location.prefix))

    def _tree(self, prefix: str) -> Iterator[tuple[str, ObjectStat]]:
        commit = self.commit()
        below = f"/{quote(prefix)}" if prefix else ""
        start = f"{hub_endpoint()}/api/datasets/{self.location.repository}/tree/{commit}{below}?recursive=true"
        url: str | None = start
        while url:
            answer, _, _ = ask("GET", url, {})
            if answer.status_code == 404 and prefix:  # a file has no tree
                folder = prefix.rpartition("/")[0]
                yield from (found for found in self._tree(folder) if found[0] == prefix)
                return
            with readable_answer():
                for entry in checked(answer).json():
                    if entry.get("type") == "file":
                        lfs = entry.get("lfs") or {}
                        size, sha256 = int(lfs.get("size", entry["size"])), str(lfs.get("oid", ""))
                        yield str(entry["path"]), ObjectStat(size, commit, sha256=sha256)
            url = next_page(answer)


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
            raise DestinationUnavailableError(
                f"A copy of what {answer.url.host} sends cannot be written to {scratch_folder()}: {error.strerror}.",
                hint="The server does not send ranges, so that a copy is needed. Set TMPDIR to a folder with room.",
            ) from error

    def read(self, start: int, stop: int) -> bytes:
        if self._size < stop:
            raise StorageError("unsupported", 501)  # the server does not send ranges
        return self._scratch.read(start, stop - start)


def _copy_of(url: str, answer: Any, etag: str | None) -> _Copy:
    """Return the copy that an answer with the whole file leads to. Others who ask for the same file wait for it."""
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
    """Return what stands for the ETag of a server that gives none."""
    return f"{DATED}{answer.headers.get('Last-Modified')}"
