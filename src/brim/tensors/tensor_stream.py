"""Write the bytes of a tensor in order, wherever they belong in the files of an unfinished job.

Bytes put into a stream count only when they are committed: a write that failed half-way is repeated at the same offset.
The checksum is computed on a second thread during the write, because both take about as long.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from brim.records import dataclass
from brim.state.atomic_files import BUFFER_BYTES, write_all

_OPEN_FILES = 64
_THREAD_BYTES = 128 * 1024  # the checksum of a smaller block takes less time than handing it to a thread


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A range of a file in the folder. `file_bytes` is the size that the file has from the start, 0 if it grows."""

    file: str
    offset: int
    size: int
    file_bytes: int = 0


FindSpans = Callable[[int, int], Iterator[FileSpan]]  # (start in the stream, size) -> ranges of files


class Files:
    """The files of an unfinished job. Keeps at most 64 of them open and remembers which must be synced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}
        self.changed: set[str] = set()  # files that must be synced

    def descriptor(self, name: str, file_bytes: int = 0) -> int:
        """Open a file for reading and writing; a new file gets its final size immediately."""
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
        self.changed.add(span.file)
        write_all(descriptor, data, span.offset)

    def crc(self, span: FileSpan, crc: int) -> int | None:
        """Extend a CRC-32 by a range of a file; return None if the file is too short."""
        buffer = memoryview(bytearray(min(BUFFER_BYTES, span.size)))
        descriptor, offset, remaining = self.descriptor(span.file, span.file_bytes), span.offset, span.size
        while remaining:
            step = os.preadv(descriptor, [buffer[: min(remaining, len(buffer))]], offset)
            if step == 0:
                return None
            crc = zlib.crc32(buffer[:step], crc)
            offset, remaining = offset + step, remaining - step
        return crc

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def sync_file(path: Path) -> None:
    """Sync a file through a separate descriptor, so that another thread can write at the same time."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Stream:
    """One sequence of bytes. `end` is the number of committed bytes, `crc` their CRC-32 since the last receipt."""

    def __init__(self, files: Files, checksums: ThreadPoolExecutor, find_spans: FindSpans) -> None:
        self.end = 0
        self.crc = 0
        self._files = files
        self._checksums = checksums
        self._find_spans = find_spans
        self._uncommitted = (0, 0)

    def put(self, blocks: Iterable[memoryview]) -> None:
        """Write after the committed bytes."""
        end, crc = self.end, self.crc
        for block in blocks:
            # zlib and the kernel both release Python's lock.
            is_large = len(block) >= _THREAD_BYTES
            checksum: Future[int] | None = self._checksums.submit(zlib.crc32, block, crc) if is_large else None
            try:
                written = 0
                for span in self._find_spans(end, len(block)):
                    self._files.write(span, block[written : written + span.size])
                    written += span.size
            finally:
                crc = zlib.crc32(block, crc) if checksum is None else checksum.result()
            end += len(block)
        self._uncommitted = (end, crc)

    def commit(self) -> None:
        self.end, self.crc = self._uncommitted

    def start_block(self, end: int) -> None:
        """Continue at `end`: the bytes before it have a receipt, and any after it are ignored."""
        self.end, self.crc = end, 0

    def has_checksum(self, start: int, end: int, crc: int) -> bool:
        """Compare a range on disk with its CRC-32."""
        actual = 0
        for span in self._find_spans(start, end - start):
            extended = self._files.crc(span, actual)
            if extended is None:
                return False
            actual = extended
        return actual == crc
