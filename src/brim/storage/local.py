"""Folders of this machine. A file appears complete, under its name, and survives a crash; or it does not appear."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from brim.errors import DestinationError
from brim.state.atomic_files import BUFFER_BYTES, failures, free_bytes, open_regular, pread_all, rename, write_whole
from brim.state.retry import check_stop
from brim.storage.storage import ANY_VERSION, TO_END, Answers, ByteRange, FileInfo, PutResult, Storage, open_storage
from brim.storage.storage_error import StorageError
from brim.storage.upload_content import Buffers, UploadContent, UploadWatcher

ALIGNMENT = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it
_AHEAD_CHUNKS = 2  # read before the previous ones are written and hashed


class DirectFile:
    """A new file to be written front to back, past the page cache where the system can."""

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._is_direct = bool(_DIRECT)
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._is_direct:
                raise
            self._is_direct = False
            self._descriptor = os.open(path, flags, 0o644)

    def write(self, data: memoryview) -> None:
        if self._is_direct and len(data) % ALIGNMENT:
            self._use_page_cache()
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._use_page_cache()

    def _use_page_cache(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        self._is_direct = False

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


class _ChunkThread:
    """A thread that does one thing with each chunk, in order. An executor's future per chunk takes ten times as long
    as handing it over, with the interpreter's lock, which readers need after each value."""

    def __init__(self, name: str, handle: Callable[[memoryview], None]) -> None:
        self._handle = handle
        self._chunks: SimpleQueue[memoryview | None] = SimpleQueue()
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name)

    def _work(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            failure: BaseException | None = None
            try:
                self._handle(chunk)
            except BaseException as error:  # noqa: BLE001  the thread that gave the chunk raises it
                failure = error
            del chunk  # its buffer is used again
            self._results.put(failure)

    def give(self, chunk: memoryview) -> None:
        self._chunks.put(chunk)

    def wait(self) -> None:
        """Wait for the oldest chunk that was not waited for; raise its failure."""
        failure = self._results.get()
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._chunks.put(None)
        self._thread.join()


def _write_and_hash(file: DirectFile, content: UploadContent, advance: Callable[[int], None]) -> str:
    """Write and hash in one pass: two threads do so with a chunk while the next ones are read."""
    digest = hashlib.sha256()
    written = 0
    sizes: deque[int] = deque()

    def wait(remaining: int) -> None:
        nonlocal written
        while len(sizes) > remaining:
            hasher.wait()
            writer.wait()
            size = sizes.popleft()
            written += size
            check_stop()
            advance(size)

    with _ChunkThread("hash", digest.update) as hasher, _ChunkThread("write", file.write) as writer:
        for chunk in content.chunks(keep=Buffers(BUFFER_BYTES)):
            hasher.give(chunk)
            writer.give(chunk)
            sizes.append(len(chunk))
            wait(_AHEAD_CHUNKS)
        wait(0)
    if written != content.size:
        raise ValueError(f"a splice of {content.size} bytes gave {written}")
    return digest.hexdigest()


class LocalStorage(Storage):
    """A folder of this machine."""

    is_remote = False

    @property
    def root(self) -> Path:
        return self.location.path

    def __reduce__(self) -> tuple[Any, ...]:
        return open_storage, (self.location,), {"marker": self.marker}

    def list(self, prefix: str = "") -> Iterator[tuple[str, FileInfo]]:
        for top, _, names in os.walk(self.root / prefix):
            for name in names:
                if not (name.startswith(".") and name.endswith(".tmp")):  # a file that is being written
                    path = os.path.join(top, name)
                    yield os.path.relpath(path, self.root), _info(os.stat(path))

    def stat(self, names: Iterable[str]) -> Iterator[FileInfo | None]:
        for name in names:
            try:
                yield _info(os.stat(self.root / name))
            except (FileNotFoundError, NotADirectoryError):
                yield None

    def fetch(self, ranges: Sequence[ByteRange]) -> Future[Answers]:
        """Read at once: a disk is not waited for in another thread."""
        answers: Future[Answers] = Future()
        answers.set_result([self._read(entry) for entry in ranges])
        return answers

    def _read(self, byte_range: ByteRange) -> bytes | StorageError:
        try:
            descriptor = open_regular(self.root / byte_range.name)
        except (FileNotFoundError, NotADirectoryError):
            return StorageError("missing", 404)
        except OSError as error:
            return StorageError("denied", code=error.strerror or "")
        try:
            info = _info(os.fstat(descriptor))
            stop = info.st_size if byte_range.stop == TO_END else byte_range.stop
            data = pread_all(descriptor, stop - byte_range.start, byte_range.start)
            is_same = byte_range.version in (None, info.etag) and info == _info(os.fstat(descriptor))
        finally:
            os.close(descriptor)
        return data if is_same and len(data) == stop - byte_range.start else StorageError("changed")

    def put(self, name: str, content: UploadContent, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        """Write in one pass. A finished file on this disk is linked and not copied."""
        target = self.root / name
        # Each writer has its own name: a machine that was given up may still write the same file.
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")
        if sha256 is not None and content.path is not None and self._link(content.path, temporary, target):
            watcher.sent(content.size)
            return PutResult(sha256)
        with failures(self.root):
            file = DirectFile(str(temporary))
            try:
                digest = _write_and_hash(file, content, watcher.sent)
                file.sync()
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                file.close()
            rename(temporary, target)
        return PutResult(digest)

    def _link(self, source: Path, temporary: Path, target: Path) -> bool:
        """Give a finished file a second name here; return False where the file system cannot."""
        try:
            os.link(source, temporary)
        except OSError:
            return False
        with failures(self.root):
            rename(temporary, target)
            temporary.unlink(missing_ok=True)  # two names of one file: then the system leaves both as they are
        return True

    def put_bytes(self, name: str, data: bytes | memoryview, expected: FileInfo | None = ANY_VERSION) -> FileInfo:
        if expected is not ANY_VERSION:
            raise StorageError("unsupported", detail="a folder is locked, not written under conditions")
        with failures(self.root):
            if "/" in name:
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.root / name, bytes(data))
            return _info(os.stat(self.root / name))

    def move(self, source: str, target: str) -> FileInfo:
        with failures(self.root):
            rename(self.root / source, self.root / target)
            return _info(os.stat(self.root / target))

    def delete(self, names: Sequence[str]) -> None:
        with failures(self.root):
            for name in names:
                (self.root / name).unlink(missing_ok=True)

    def abort_uploads(self, prefix: str, is_own: Callable[[str], bool]) -> int:
        """Remove the temporary files that a killed run left in a folder; `is_own` gets the final name."""
        # By the name that a temporary file of `put` would have got.
        files = {path: f"{prefix}/{path.name[1:].rsplit('.', 2)[0]}" for path in (self.root / prefix).glob(".*.tmp")}
        stale = [path for path, name in files.items() if is_own(name)]
        for path in stale:
            path.unlink(missing_ok=True)
        return len(stale)

    def check_access(self) -> None:
        if self.marker and not (self.root / self.marker).exists():
            raise DestinationError(
                f"The destination {str(self.root)!r} is not there, or is another folder of that name.",
                hint="Choose a folder on a disk that every node shares under the same path.",
            )
        trial = self.root / "data" / f".{uuid.uuid4().hex[:12]}.tmp"
        with failures(self.root):
            trial.touch()
            trial.unlink()

    def free_bytes(self) -> int | None:
        return free_bytes(self.root)


def _info(stat: os.stat_result) -> FileInfo:
    return FileInfo(stat.st_size, f"{stat.st_mtime_ns}-{stat.st_ino}-{stat.st_size}", st_ino=stat.st_ino)
