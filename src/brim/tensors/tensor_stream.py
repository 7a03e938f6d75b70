"""The bytes of a tensor, in order, wherever they lie in the files of an unfinished job.

What is put into a stream counts when it is committed: a write that failed half-way is done again at the same
place. The checksum of what is put is computed on a thread beside the write, which takes about as long.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from brim.records import dataclass
from brim.state.durable import BUFFER_BYTES, write_all

_OPEN_FILES = 64
_BESIDE_BYTES = 128 * 1024  # less than this is checked sooner than handed over


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A range of a file in the folder. `file_bytes` is the size that the file has from the start, 0 if it grows."""

    file: str
    offset: int
    size: int
    file_bytes: int = 0


Place = Callable[[int, int], Iterator[FileSpan]]


class Files:
    """The files of an unfinished job: a few of them open, and which have to be synced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}
        self._changed: set[str] = set()

    def descriptor(self, name: str, file_bytes: int = 0) -> int:
        """Open for reading and writing; a new file gets its size at once."""
        if name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self.close()
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._open[name] = descriptor
            if file_bytes and os.fstat(descriptor).st_size != file_bytes:
                os.ftruncate(descriptor, file_bytes)
        return self._open[name]

    def write(self, span: FileSpan, data: memoryview) -> None:
        descriptor = self.descriptor(span.file, span.file_bytes)
        self._changed.add(span.file)
        write_all(descriptor, data, span.offset)

    def crc(self, span: FileSpan, crc: int) -> int | None:
        """The checksum goes on over a range; None if the file ends before."""
        buffer = memoryview(bytearray(min(BUFFER_BYTES, span.size)))
        descriptor, offset, left = self.descriptor(span.file, span.file_bytes), span.offset, span.size
        while left:
            step = os.preadv(descriptor, [buffer[: min(left, len(buffer))]], offset)
            if step == 0:
                return None
            crc = zlib.crc32(buffer[:step], crc)
            offset, left = offset + step, left - step
        return crc

    def take_changed(self) -> set[str]:
        """What was written since the last time, and has to be synced."""
        taken, self._changed = self._changed, set()
        return taken

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def sync_file(path: Path) -> None:
    """With a descriptor of its own, so that another thread may write meanwhile."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Checker:
    """CRC-32 on a thread beside the writes; zlib and the kernel both leave Python free meanwhile."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, data: memoryview, crc: int) -> Future[int]:
        if len(data) < _BESIDE_BYTES:
            done: Future[int] = Future()
            done.set_result(zlib.crc32(data, crc))
            return done
        self._pool = self._pool or ThreadPoolExecutor(1, "brim-checksum")
        return self._pool.submit(zlib.crc32, data, crc)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class Stream:
    """One run of bytes. `end` is how many are committed."""

    def __init__(self, files: Files, checker: Checker, place: Place) -> None:
        self.place = place
        self.end = 0
        self._files = files
        self._checker = checker
        self._crc = 0
        self._put = (0, 0)

    def put(self, blocks: Iterable[memoryview]) -> None:
        """Write after what is committed."""
        end, crc = self.end, self._crc
        for block in blocks:
            checked = self._checker.begin(block, crc)
            try:
                at = 0
                for span in self.place(end, len(block)):
                    self._files.write(span, block[at : at + span.size])
                    at += span.size
            finally:
                crc = checked.result()
            end += len(block)
        self._put = (end, crc)

    def commit(self) -> None:
        self.end, self._crc = self._put

    def block(self) -> tuple[int, int]:
        """Where the stream ends, and the checksum of what was committed since the last receipt."""
        return self.end, self._crc

    def begin_block(self, end: int) -> None:
        """Everything up to here is safe, and nothing behind it counts."""
        self.end, self._crc = end, 0

    def holds(self, start: int, end: int, crc: int) -> bool:
        """Whether the bytes on disk have this checksum."""
        found = 0
        for span in self.place(start, end - start):
            further = self._files.crc(span, found)
            if further is None:
                return False
            found = further
        return found == crc
