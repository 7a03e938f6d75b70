"""The operations of every location with bytes: list, stat and fetch files; some also put, move and delete them.

`open_storage` imports the backend; no other module does. Names are relative to the location. Methods fail with
StorageError, except `put` and `check_access`: these are whole uploads, and fail with an error for users.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from brim.errors import InputError
from brim.extras import missing
from brim.records import dataclass
from brim.state.retry import Retry, wait_for
from brim.storage.location import Location
from brim.storage.storage_error import StorageError

if TYPE_CHECKING:
    from brim.storage.upload_content import UploadContent, UploadWatcher

T = TypeVar("T")
PART_BYTES = 8 << 20
_MOST_PARTS = 10_000
_PATIENCE_S = 180.0  # for all tries of one request; obstore signs it once
UNDATED = "modified "  # precedes a date that replaces an ETag: some stores give none
TO_END = 1 << 62
Answers = list[Any]  # per range its bytes, or the exception


def part_bytes(size: int) -> int:
    """Return how large the parts of an object are. It depends on the size alone, so that its ETag does too."""
    least = -(-size // _MOST_PARTS)
    return max(PART_BYTES, -(-least // (1 << 20)) << 20)


def patience_s(most_s: float = _PATIENCE_S, default_s: float | None = None) -> float:
    """Return for how long a request that fails is tried again: BRIM_STALL_SECONDS, or the default."""
    text = os.environ.get("BRIM_STALL_SECONDS")
    try:
        seconds = float(text) if text else default_s or most_s
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InputError(f"BRIM_STALL_SECONDS is a number of seconds above zero, not {text!r}.")
    return min(seconds, most_s)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    return isinstance(error, StorageError) and error.is_transient


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as a location lists it, with the names of `os.stat_result`, so that both can be used alike.

    The ETag names exactly these bytes: of a repository it is the commit, of a folder date, inode and size.
    """

    st_size: int
    etag: str = ""
    sha256: str = ""
    blob: str = ""  # git's hash of a file in a repository
    condition: tuple[str, str] = ("", "")  # ETag and generation as the store wrote them: it compares these
    st_ino: int = 0

    @property
    def st_mtime_ns(self) -> int:
        """Return a number that replaces the date: it changes with the content, and is the same for a copy."""
        return int.from_bytes(hashlib.sha256(self.etag.encode()).digest()[:7]) if self.etag else 0


ANY_VERSION = FileInfo(-1)


@dataclass(frozen=True, slots=True)
class PutResult:
    """The hash of a file that was put, and whether its bytes had to be sent. No ETag: it does not identify content."""

    sha256: str
    sent: bool = True
    etag: str = ""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of a file; `stop` is TO_END for all of a file whose size is not known.

    Without a version, any is taken. An empty range with a version checks that the file is still empty.
    """

    name: str
    start: int
    stop: int
    version: str | None = None


class Storage:
    """A location. What a backend cannot do is a StorageError of the kind "unsupported". It can be pickled."""

    is_remote = can_list = True
    explains_errors = True  # whether readers raise errors for users; else StorageError, which the caller explains
    waits_s: tuple[float, ...] = (0.2, 1.0, 3.0)  # between the tries of a request
    marker = ""  # a file in a folder that shows another machine that it sees the same folder

    def __init__(self, location: Location, token: str | None = None, parts_in_flight: int = 2) -> None:
        self.location, self._token, self._parts_in_flight = location, token, parts_in_flight

    def __reduce__(self) -> tuple[Any, ...]:
        return open_storage, (self.location, self._token, self._parts_in_flight)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location})"  # and never the token

    def tries(self) -> Retry:
        """Return the tries of one request. If obstore has retried it until its own limit, there are no more."""
        return Retry(self.waits_s, is_transient, patience_s=patience_s() / 2)

    def list(self, prefix: str = "") -> Iterator[tuple[str, FileInfo]]:
        """Yield (name, info) of every file below a prefix, in any order, without marks of folders.

        A listing that breaks begins again: then some files come twice, because stores sort in several ways.
        """
        self.pinned_revision()  # has retries of its own, which would multiply with those of the listing
        retry = self.tries()
        while True:
            try:
                for key, info in self._list(self.location.child(prefix).prefix, retry.begin):
                    if name := self.location.name_of(key):
                        yield name, info
                return
            except StorageError as error:
                if not retry.wait_to_retry(error):
                    raise

    def _list(self, prefix: str, page_done: Callable[[], None]) -> Iterator[tuple[str, FileInfo]]:
        """Yield (key, info) of every file below a prefix of the container. `page_done` is called between pages."""
        raise StorageError("unsupported")

    def stat(self, names: Iterable[str]) -> Iterator[FileInfo | None]:
        """Yield the info of each of these files, in order; None for a missing one."""
        raise StorageError("unsupported")

    def fetch(self, ranges: Sequence[ByteRange]) -> Future[Answers]:
        """Start requests for ranges: each answer is bytes or an exception. Cancel the future to drop them.

        A StorageError of the kind "changed" means that the file has another version.
        """
        raise StorageError("unsupported")

    def read(self, name: str, version: str | None = None) -> bytes | None:
        """Return all of a small file; None if it is missing."""

        def ask() -> bytes | None:
            (answer,) = wait_for(self.fetch([ByteRange(name, 0, TO_END, version)]))
            if isinstance(answer, StorageError) and answer.is_missing:
                return None
            if isinstance(answer, BaseException):
                raise answer
            return bytes(answer)

        return self.tries().call(ask)

    def pinned_revision(self) -> str | None:
        """Return the commit at which files are read, if the location has commits."""
        return None

    def exists(self) -> bool:
        """Return whether the container exists, as far as it matters before anything is read from it."""
        return True

    def create(self) -> bool:
        """Create the container if brim may do that; return whether it was created."""
        return False

    def put(self, name: str, content: UploadContent, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        """Upload a file, which appears complete or not at all. The watcher may raise to drop it."""
        raise StorageError("unsupported")

    def put_bytes(self, name: str, data: bytes | memoryview, expected: FileInfo | None = ANY_VERSION) -> FileInfo:
        """Write a small file: over any version, over the expected one alone, or only as a new file (None)."""
        raise StorageError("unsupported")

    def move(self, source: str, target: str) -> FileInfo:
        raise StorageError("unsupported")

    def delete(self, names: Sequence[str]) -> None:
        """Remove files; missing ones are fine."""
        raise StorageError("unsupported")

    def abort_uploads(self, prefix: str, is_own: Callable[[str], bool]) -> int:
        """Abort uploads that a killed run began below a prefix, if `is_own` of the name; return how many there were.

        A StorageError of the kind "unsupported" says in `detail` why they cannot be found.
        """
        return 0

    def drop_upload(self, name: str) -> None:
        """Abort unfinished uploads under a name."""

    def check_access(self) -> None:
        """Check that this machine may write here."""
        raise StorageError("unsupported")

    def free_bytes(self) -> int | None:
        """Return how much fits, or None where it cannot be known."""
        return None


def open_storage(location: Location, token: str | None = None, parts_in_flight: int = 2) -> Storage:
    """Return the storage of a location. The token is for the Hub alone."""
    backend: type[Storage]
    if location.is_local:
        from brim.storage.local import LocalStorage as backend
    elif location.is_hub_bucket:
        from brim.storage.hub_bucket import HubBucketStorage as backend
    elif location.is_repository:
        from brim.storage.hub_repository import HubRepository as backend
    elif location.is_bucket:
        try:
            from brim.storage.objects import ObjectStorage as backend
        except ImportError as error:
            raise missing("s3", f"{location.scheme}:// needs obstore.") from error
    else:
        from brim.storage.http_files import HttpStorage as backend
    return backend(location, token, parts_in_flight)
