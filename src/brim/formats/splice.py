"""Describe a shard as an ordered list of segments: literals, and ranges of source files or of a scratch file.

The size of a splice is known before a byte is read, any range of it can be read at any time, and reading it twice gives
the same bytes. Segments are columns of numbers, not objects: a million files in one shard must need little memory.
Every source file is compared with the plan when it is opened and again after it was read (`formats/source_reader.py`);
a difference raises SourceChangedError.

The formats that are spliced: parquet_writer.py, tar_shard.py.
"""

from __future__ import annotations

import hashlib
import io
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from brim.file_set import END, FileSet, Ints, member_header, padding
from brim.formats.range_readers import Seekable, copy_range
from brim.formats.source_reader import SourceReader, reader_of
from brim.state.atomic_files import BUFFER_BYTES, write_all
from brim.state.scratch import Scratch
from brim.storage.upload_content import Buffers

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_LITERAL, _SCRATCH = -1, -2
_BLOCK = 16384  # segments turned into Python numbers at a time
_ZERO = np.zeros(1, np.int64)


class Splice:
    """Bytes that exist only as a list of segments. Safe to read from several threads.

    `files` are the files that are opened. Close the splice after its last use: it may own a scratch file, which takes
    disk space until then.
    """

    __slots__ = ("_ends", "_literals", "_scratch", "_sources", "_starts", "files", "size")
    path: Path | None = None  # of a complete file with these bytes

    def __init__(
        self, files: FileSet, literals: bytes, ends: Ints, sources: Ints, starts: Ints, scratch: Scratch | None = None
    ) -> None:
        self.files = files
        self.size = int(ends[-1]) if len(ends) else 0
        self._literals = memoryview(literals)
        self._ends = ends
        self._sources = sources
        self._starts = starts
        self._scratch = scratch

    def close(self) -> None:
        """Remove the scratch file, if any; such a splice cannot be read any more."""
        if self._scratch is not None:
            self._scratch.close()

    def _segments(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (source, start in the source, size) of each segment between `start` and `stop`.

        Zero-byte files inside the range are segments too, so that they are checked like the others.
        """
        first = int(np.searchsorted(self._ends, start, side="left" if start == 0 else "right"))
        last = int(np.searchsorted(self._ends, stop, side="right" if stop >= self.size else "left"))
        last = min(last + 1, len(self._ends))
        for block in range(first, last, _BLOCK):
            cut = slice(block, min(block + _BLOCK, last))
            ends = self._ends[cut]
            positions = np.concatenate([self._ends[block - 1 : block] if block else _ZERO, ends[:-1]])
            skips = np.maximum(start - positions, 0)
            sizes = np.minimum(ends, stop) - positions - skips
            offsets = self._starts[cut] + skips
            yield from zip(self._sources[cut].tolist(), offsets.tolist(), sizes.tolist(), strict=True)

    def chunks(
        self,
        start: int = 0,
        stop: int | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        *,
        keep: Buffers | None = None,
        as_they_come: bool = False,
    ) -> Iterator[memoryview]:
        """Yield the bytes from `start` to `stop`. A chunk is valid until the next one is requested.

        With `keep`, whose buffers have `buffer_bytes`, a chunk is valid as long as it is referenced. With
        `as_they_come` too, large parts of objects are yielded as they were received, and chunks have any size.
        """
        stop = self.size if stop is None else min(stop, self.size)
        limit = max(1, min(buffer_bytes, stop - start))
        if keep is not None:
            buffer = keep.take()[:limit]
        else:  # aligned to pages, as direct writes require
            buffer = memoryview(mmap.mmap(-1, limit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        filled, literals = 0, self._literals
        with reader_of(self.files, self._segments(start, stop), stop - start) as reader:
            for source, offset, size in self._segments(start, stop):
                if source == _LITERAL and filled + size < limit:  # half of all segments: the length of a value
                    buffer[filled : filled + size] = literals[offset : offset + size]
                    filled += size
                    continue
                if source >= 0:
                    reader.turn_to(source)  # also opens and checks a file of zero bytes
                while size > 0:
                    if as_they_come and source >= 0 and (part := reader.take_block(offset, size)) is not None:
                        if filled:
                            assert keep is not None
                            yield buffer[:filled]
                            buffer, filled = keep.take()[:limit], 0
                        yield part
                        offset, size = offset + len(part), size - len(part)
                        continue
                    target = buffer[filled : filled + min(size, limit - filled)]
                    if source >= 0:
                        step = reader.read_into(target, offset)
                    elif source == _LITERAL:
                        step = len(target)
                        target[:] = literals[offset : offset + step]
                    else:
                        assert self._scratch is not None
                        step = self._scratch.read_into(target, offset)
                    offset, size, filled = offset + step, size - step, filled + step
                    if filled == limit:
                        yield buffer
                        filled = 0
                        buffer = buffer if keep is None else keep.take()[:limit]
            reader.leave()
        if filled:
            yield buffer[:filled]

    def read_at(self, offset: int, size: int) -> bytes:
        return b"".join(bytes(chunk) for chunk in self.chunks(offset, offset + max(size, 0)))

    def sha256(self, advance: Callable[[int], None] | None = None) -> str:
        """Hash all bytes. `advance` is called with the number of bytes after each chunk, and may raise to stop."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
            if advance is not None:
                advance(len(chunk))
        return digest.hexdigest()

    def copy_to(self, descriptor: int) -> None:
        """Write everything at the descriptor's position, by copies inside the kernel if possible.

        Not for a copy that is hashed as well: its bytes pass through this process anyway, and one pass of small reads
        is faster than a kernel copy plus a second read.
        """
        if self.files.bucket is not None or self.files.remotes:
            for chunk in self.chunks():
                write_all(descriptor, chunk)
            return
        with SourceReader(self.files, 0) as reader:
            for source, offset, size in self._segments(0, self.size):
                if source == _LITERAL:
                    write_all(descriptor, self._literals[offset : offset + size])
                elif self._scratch is not None and source == _SCRATCH:
                    copy_range(self._scratch.descriptor, offset, size, descriptor)
                else:
                    copy_range(reader.turn_to(source), offset, size, descriptor)
            reader.leave()

    def open(self) -> SpliceFile:
        return SpliceFile(self)

    def __enter__(self) -> Splice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SpliceFile(Seekable, io.BufferedIOBase):
    """A splice as a seekable binary file, for clients that need one."""

    def __init__(self, splice: Splice) -> None:
        self._splice = splice

    def _size(self) -> int:
        return self._splice.size

    def read(self, size: int | None = -1, /) -> bytes:
        if self.closed:
            raise ValueError("read of a closed file")
        remaining = max(self._splice.size - self._position, 0)
        data = self._splice.read_at(self._position, remaining if size is None or size < 0 else min(size, remaining))
        self._position += len(data)
        return data

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(BUFFER_BYTES if size < 0 else size)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


class SpliceBuilder:
    """Collect the segments of a splice in order."""

    def __init__(self, files: FileSet, scratch: Scratch | None = None) -> None:
        self._files = files
        self._scratch = scratch
        self._literals: list[bytes] = []
        self._literal_bytes = 0
        self._sizes: list[Ints] = []
        self._sources: list[Ints] = []
        self._starts: list[Ints] = []
        self.position = 0

    def literal(self, data: bytes) -> None:
        if data:
            self._add([len(data)], [_LITERAL], [self._literal_bytes])
            self._keep(data)

    def scratch(self, start: int, size: int) -> None:
        """Append a range of the scratch file."""
        if size:
            self._add([size], [_SCRATCH], [start])

    def file(self, number: int, start: int = 0, size: int | None = None) -> None:
        """Append a value (a source file, or a part of one), or a range of it."""
        _, holders, starts, sizes = self._files.places(np.array([number]))
        if len(holders) == 1:
            sizes = sizes - start if size is None else np.array([size])
            self._add(sizes, holders, starts + start)
            return
        stop = int(self._files.sizes[number]) if size is None else start + size
        ends = np.cumsum(sizes)
        low, high = np.maximum(ends - sizes, start), np.minimum(ends, stop)
        is_inside = low < high
        self._add((high - low)[is_inside], holders[is_inside], (starts + low - ends + sizes)[is_inside])

    def value(self, number: int) -> None:
        """Append a source file, or the tar of a folder that is packed as one value."""
        bundle = self._files.bundles.get(number)
        if bundle is None:
            self.file(number)
            return
        for name, member in zip(bundle.names, bundle.numbers, strict=True):
            size = int(self._files.sizes[member])
            self.literal(member_header(name, size))
            self.file(member)
            self.literal(padding(size))
        self.literal(END)

    def interleave(self, literals: bytes, literal_sizes: Ints, files: Ints) -> None:
        """Append the first literal, the first value, the second literal, the second value, and so on."""
        count = len(files)
        if self._files.bundles and not self._files.bundles.keys().isdisjoint(files.tolist()):
            ends = np.cumsum(literal_sizes).tolist()
            for start, end, number in zip([0, *ends], ends, files.tolist(), strict=False):
                self.literal(literals[start:end])
                self.value(number)
            return
        counts, holders, offsets, lengths = self._files.places(files)
        total = count + len(holders)
        sizes, sources, starts = (np.zeros(total, np.int64) for _ in range(3))
        literal = np.zeros(total, bool)
        literal[np.cumsum(counts + 1) - counts - 1] = True  # before the segments of each value
        sizes[literal], sizes[~literal] = literal_sizes, lengths
        sources[literal], sources[~literal] = _LITERAL, holders
        starts[literal], starts[~literal] = self._literal_bytes + np.cumsum(literal_sizes) - literal_sizes, offsets
        self._add(sizes, sources, starts)
        self._keep(literals)

    def _keep(self, data: bytes) -> None:
        self._literals.append(data)
        self._literal_bytes += len(data)

    def _add(self, sizes: Ints | list[int], sources: Ints | list[int], starts: Ints | list[int]) -> None:
        self._sizes.append(np.asarray(sizes, np.int64))
        self._sources.append(np.asarray(sources, np.int32))  # half the memory of int64
        self._starts.append(np.asarray(starts, np.int64))
        self.position += int(self._sizes[-1].sum())

    def finish(self) -> Splice:
        empty = [np.zeros(0, np.int64)]
        ends = np.cumsum(np.concatenate(self._sizes or empty))
        sources, starts = np.concatenate(self._sources or empty), np.concatenate(self._starts or empty)
        return Splice(self._files.on_disk, b"".join(self._literals), ends, sources, starts, self._scratch)


class FileSplice(Splice):
    """One complete file, which a folder on the same disk can move into place instead of copying it."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        stat = path.stat()
        size, mtime, inode = (np.array([value], np.int64) for value in (stat.st_size, stat.st_mtime_ns, stat.st_ino))
        builder = SpliceBuilder(FileSet(str(path.parent), pa.array([path.name]), size, mtime, inode))
        builder.file(0)
        splice = builder.finish()
        super().__init__(splice.files, b"", splice._ends, splice._sources, splice._starts)
        self.path = path
