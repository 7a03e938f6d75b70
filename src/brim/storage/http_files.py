"""Files of web servers, to read: each request by a redirect that is remembered, each range of the listed version."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any

from brim.errors import DestinationUnavailableError
from brim.state.atomic_files import write_all
from brim.state.retry import check_stop
from brim.state.scratch import Scratch, scratch_folder
from brim.storage.event_loop import in_thread, submit_all
from brim.storage.hub_api import ask, checked, web_errors
from brim.storage.storage import TO_END, UNDATED, Answers, ByteRange, FileInfo, Storage
from brim.storage.storage_error import StorageError

_LOCK = threading.Lock()
_TARGETS: dict[str, tuple[str, str]] = {}  # where the Hub redirected us for a file, and the hash of its content
_COPIES: dict[str, _Copy] = {}
_COPYING: dict[str, threading.Lock] = {}
_MOST_COPIES = 16  # of files at a time: each takes disk
_COPY_BYTES = 1 << 18


class HttpStorage(Storage):
    """Files of a web server, which lists none."""

    can_list = False
    is_redirect_versioned = False  # whether redirects state the version of the file

    def _url(self, name: str, version: str | None) -> str:
        return f"{self.location.root}/{self.location.key(name)}"

    def _version(self, answer: Any, requested: str | None, xet_hash: str) -> str | None:
        """Return the version of the file in an answer, as far as it says."""
        etag: str | None = answer.headers.get("ETag")
        return etag

    def _stat(self, name: str) -> FileInfo | None:
        answer, _, _ = ask("HEAD", self._url(name, None), {"Accept-Encoding": "identity"})
        if answer.status_code in (404, 410):
            return None
        size = checked(answer).headers.get("Content-Length")
        if size is None:
            raise StorageError("unsupported", 501)  # the server does not state the size
        return FileInfo(int(size), answer.headers.get("ETag") or _dated(answer))

    def stat(self, names: Iterable[str]) -> Iterator[FileInfo | None]:
        yield from (self.tries().call(partial(self._stat, name)) for name in names)

    def fetch(self, ranges: Sequence[ByteRange]) -> Future[Answers]:
        return submit_all([in_thread(self._read, entry) for entry in ranges])

    def _read(self, byte_range: ByteRange) -> bytes:
        name, start, stop, version = byte_range.name, byte_range.start, byte_range.stop, byte_range.version
        if start == stop:
            info = next(iter(self.stat([name]))) if version else FileInfo(0)
            if info is None or info.st_size:
                raise StorageError("changed")
            return b""
        url = self._url(name, version)
        copy = _COPIES.get(url)
        if copy is not None and stop != TO_END and copy.version == (version or copy.version):
            data, found_version = copy.read(start, stop), copy.etag
        else:
            data, found_version = self._request(url, byte_range)
        if version and not version.startswith(UNDATED) and found_version not in (None, version):
            raise StorageError("changed")
        return data

    def _request(self, url: str, byte_range: ByteRange) -> tuple[bytes, str | None]:
        """Return a range and the version of the file.

        The address that a redirect led to is used for later requests, until the server refuses it.
        """
        start, stop, version = byte_range.start, byte_range.stop, byte_range.version
        headers = {} if stop == TO_END else {"Range": f"bytes={start}-{stop - 1}"}
        target, xet_hash = _TARGETS.get(url, ("", ""))
        if self.is_redirect_versioned and version and xet_hash != version:
            target = ""  # the file may have been replaced
        if target:
            answer, address, _ = ask("GET", target, headers, token=self._token, is_streamed=True)
        if not target or answer.status_code in (401, 403, 404, 410):
            _TARGETS.pop(url, None)
            answer, address, xet_hash = ask("GET", url, headers, token=self._token, is_streamed=True)
        with closing(checked(answer)), web_errors(address):
            found_version = self._version(answer, version, xet_hash)
            is_complete = start == 0 and answer.headers.get("Content-Length") == str(stop)
            if answer.status_code == 200 and stop != TO_END and not is_complete:
                copy = _copy_of(url, answer, found_version)
                if version and copy.version != version:
                    raise StorageError("changed")
                return copy.read(start, stop), found_version
            data = answer.read()
        if address != url:
            with _LOCK:
                _TARGETS[url] = address, xet_hash
        return data, found_version


class _Copy:
    """A file of a server that does not send ranges: all of it on disk until the process ends, to read ranges from."""

    def __init__(self, answer: Any, etag: str | None) -> None:
        self.etag, self.version = etag, etag or _dated(answer)
        self._size = 0
        try:
            self._scratch = Scratch()
            for block in answer.iter_bytes(_COPY_BYTES):
                check_stop()
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
    """Return the copy of an answer with the complete file. Other requests for the same file wait for it."""
    with _LOCK:
        lock = _COPYING.setdefault(url, threading.Lock())
    with lock:
        copy = _COPIES.get(url)
        if copy is None or copy.version != (etag or _dated(answer)):
            _COPIES.pop(url, None)
            copy = _Copy(answer, etag)
            while len(_COPIES) >= _MOST_COPIES:
                _COPIES.pop(next(iter(_COPIES)), None)  # its readers keep it
            _COPIES[url] = copy
        return copy


def _dated(answer: Any) -> str:
    """Return what replaces the ETag of a server that gives none."""
    return f"{UNDATED}{answer.headers.get('Last-Modified')}"
