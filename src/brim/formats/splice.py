"""A shard as a recipe: an ordered list of segments, each a literal, a range of a source file or of a scratch file.

The size of a splice is known before a byte is read, any range of it can be read at any time, and reading
it twice gives the same bytes. Segments are columns of numbers, not objects: a million files in one shard
must stay small. Every source file is checked against the plan when it is opened and again when it has
been read (`formats/source_reader.py`); a difference is SourceChanged.

What a splice means (Parquet, tar) is decided in the modules beside this one.
"""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from brim.file_set import END, FileSet, Ints, member_header, padding
from brim.formats.source_reader import Buffers, Seekable, SourceReader, reader_of
from brim.state.durable import BUFFER_BYTES, write_all
from brim.state.scratch import Scratch

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_LITERAL, _SCRATCH = -1, -2
_BLOCK = 16384  # segments turned into Python numbers at a time
_ZERO = np.zeros(1, np.int64)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Unreadable(OSError):
    """What is copied cannot be read; where it goes is not to blame."""


class Splice:
    """Bytes that exist only as a list of segments. Safe to read from several threads.

    `files` are the files that are opened. Close it when it has been read for the last time: it may own a
    scratch file, which takes disk until then.
    """

    __slots__ = ("_ends", "_literals", "_scratch", "_sources", "_starts", "files", "size")

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
        """Give back what the splice holds beside memory; it cannot be read any more if that was something."""
        if self._scratch is not None:
            self._scratch.close()

    def _segments(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(source, start in the source, size) of what lies between `start` and `stop`.

        Zero-byte files inside the range are segments too, so that they are checked like the others.
        """
        first = int(np.searchsorted(self._ends, start, side="left" if start == 0 else "right"))
        last = int(np.searchsorted(self._ends, stop, side="right" if stop >= self.size else "left"))
        last = min(last + 1, len(self._ends))
        for block in range(first, last, _BLOCK):
            cut = slice(block, min(block + _BLOCK, last))
            ends = self._ends[cut]
            begins = np.concatenate([self._ends[block - 1 : block] if block else _ZERO, ends[:-1]])
            skips = np.maximum(start - begins, 0)
            sizes = np.minimum(ends, stop) - begins - skips
            at = self._starts[cut] + skips
            yield from zip(self._sources[cut].tolist(), at.tolist(), sizes.tolist(), strict=True)

    def chunks(
        self,
        start: int = 0,
        stop: int | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        *,
        keep: Buffers | None = None,
        as_they_come: bool = False,
    ) -> Iterator[memoryview]:
        """The bytes from `start` to `stop`. A chunk is valid until the next one is asked for.

        With `keep`, which has buffers of `buffer_bytes`, a chunk is valid for as long as somebody holds it. With that
        and `as_they_come`, large pieces of objects are handed on as they were received, and chunks are of any size.
        """
        stop = self.size if stop is None else min(stop, self.size)
        room = max(1, min(buffer_bytes, stop - start))
        buffer = _page_aligned(room) if keep is None else keep.take()[:room]
        filled, literals = 0, self._literals
        with reader_of(self.files, self._segments(start, stop), stop - start) as reader:
            for source, at, size in self._segments(start, stop):
                if source == _LITERAL and filled + size < room:  # half of all segments: the length of a value
                    buffer[filled : filled + size] = literals[at : at + size]
                    filled += size
                    continue
                if source >= 0:
                    reader.turn_to(source)  # a file of zero bytes is looked at too
                while size > 0:
                    if as_they_come and source >= 0 and (piece := reader.piece(at, size)) is not None:
                        if filled:
                            assert keep is not None
                            yield buffer[:filled]
                            buffer, filled = keep.take()[:room], 0
                        yield piece
                        at, size = at + len(piece), size - len(piece)
                        continue
                    target = buffer[filled : filled + min(size, room - filled)]
                    if source >= 0:
                        step = reader.read_into(target, at)
                    elif source == _LITERAL:
                        step = len(target)
                        target[:] = literals[at : at + step]
                    else:
                        assert self._scratch is not None
                        step = self._scratch.read_into(target, at)
                    at, size, filled = at + step, size - step, filled + step
                    if filled == room:
                        yield buffer
                        filled = 0
                        buffer = buffer if keep is None else keep.take()[:room]
            reader.leave()
        if filled:
            yield buffer[:filled]

    def read_at(self, offset: int, size: int) -> bytes:
        return b"".join(bytes(chunk) for chunk in self.chunks(offset, offset + max(size, 0)))

    def sha256(self, advance: Callable[[int], None] | None = None) -> str:
        """`advance` is told of bytes, and may raise to stop."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
            if advance is not None:
                advance(len(chunk))
        return digest.hexdigest()

    def copy_to(self, descriptor: int) -> None:
        """Write everything at the descriptor's position, through the kernel where it can.

        Not for a copy that is hashed as well: the bytes then come through this process anyway, and one
        pass of small reads beats a kernel copy plus a second read.
        """
        if self.files.bucket is not None or self.files.remotes:
            for chunk in self.chunks():
                write_all(descriptor, chunk)
            return
        with SourceReader(self.files, 0) as reader:
            for source, at, size in self._segments(0, self.size):
                if source == _LITERAL:
                    write_all(descriptor, self._literals[at : at + size])
                elif self._scratch is not None and source == _SCRATCH:
                    copy_range(self._scratch.descriptor, at, size, descriptor)
                else:
                    copy_range(reader.turn_to(source), at, size, descriptor)
            reader.leave()

    def open(self) -> SpliceFile:
        return SpliceFile(self)

    def __enter__(self) -> Splice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SpliceFile(Seekable, io.BufferedIOBase):
    """A splice as a seekable binary file, for clients that want one."""

    def __init__(self, splice: Splice) -> None:
        self._splice = splice

    def _size(self) -> int:
        return self._splice.size

    def read(self, size: int | None = -1, /) -> bytes:
        if self.closed:
            raise ValueError("read of a closed file")
        rest = max(self._splice.size - self._at, 0)
        data = self._splice.read_at(self._at, rest if size is None or size < 0 else min(size, rest))
        self._at += len(data)
        return data

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(BUFFER_BYTES if size < 0 else size)

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


class SpliceBuilder:
    """Collects the segments of a splice in order."""

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
        """A range of the scratch file."""
        if size:
            self._add([size], [_SCRATCH], [start])

    def file(self, number: int, start: int = 0, size: int | None = None) -> None:
        """A value (a source file, or a part of one), or a range of it."""
        _, holders, starts, sizes = self._files.places(np.array([number]))
        if len(holders) == 1:
            sizes = sizes - start if size is None else np.array([size])
            self._add(sizes, holders, starts + start)
            return
        stop = int(self._files.sizes[number]) if size is None else start + size
        ends = np.cumsum(sizes)
        low, high = np.maximum(ends - sizes, start), np.minimum(ends, stop)
        there = low < high
        self._add((high - low)[there], holders[there], (starts + low - ends + sizes)[there])

    def value(self, number: int) -> None:
        """A source file, or the tar of a folder that is packed as one value."""
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
        """The first literal, the first value, the second literal, the second value, and so on."""
        count = len(files)
        if self._files.bundles and not self._files.bundles.keys().isdisjoint(files.tolist()):
            ends = np.cumsum(literal_sizes).tolist()
            for start, end, number in zip([0, *ends], ends, files.tolist(), strict=False):
                self.literal(literals[start:end])
                self.value(number)
            return
        counts, holders, begins, lengths = self._files.places(files)
        total = count + len(holders)
        sizes, sources, starts = (np.zeros(total, np.int64) for _ in range(3))
        literal = np.zeros(total, bool)
        literal[np.cumsum(counts + 1) - counts - 1] = True  # before the pieces of each value
        sizes[literal], sizes[~literal] = literal_sizes, lengths
        sources[literal], sources[~literal] = _LITERAL, holders
        starts[literal], starts[~literal] = self._literal_bytes + np.cumsum(literal_sizes) - literal_sizes, begins
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


def _page_aligned(size: int) -> memoryview:
    """A buffer that direct writes accept."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def copy_range(source: int, at: int, size: int, target: int) -> None:
    """Copy a range of one descriptor to the position of another, inside the kernel where it can."""
    kernel = hasattr(os, "copy_file_range")
    buffer: memoryview | None = None
    while size > 0:
        if kernel:
            try:
                step = os.copy_file_range(source, target, min(size, 1 << 30), at)
            except OSError as error:
                if error.errno in _FULL:
                    raise
                kernel = False  # it cannot, or something is wrong: read and written apart, it is known with which file
                continue
            if step == 0:  # some file systems answer 0 instead of an error: the plain read decides
                kernel = False
                continue
        else:
            buffer = buffer or memoryview(bytearray(BUFFER_BYTES))
            try:
                step = os.preadv(source, [buffer[: min(size, BUFFER_BYTES)]], at)
            except OSError as error:
                raise Unreadable(error.errno, error.strerror) from error
            if step == 0:
                raise Unreadable(errno.EIO, "the file is shorter than its recorded size")
            write_all(target, buffer[:step])
        at, size = at + step, size - step


class FileSplice(Splice):
    """All of one file, which a folder on the same disk may take as it is instead of a copy."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        stat = path.stat()
        size, mtime, inode = (np.array([value], np.int64) for value in (stat.st_size, stat.st_mtime_ns, stat.st_ino))
        builder = SpliceBuilder(FileSet(str(path.parent), pa.array([path.name]), size, mtime, inode))
        builder.file(0)
        whole = builder.finish()
        super().__init__(whole.files, b"", whole._ends, whole._sources, whole._starts)
        self.path = path
