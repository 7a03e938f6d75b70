"""Read source files in the order of a splice, one open at a time; of files that hold many values, several.

Consecutive segments of one file share its descriptor, and small consecutive ranges of a file are read ahead together:
the values of a memory-mapped Arrow file are a million adjacent ranges of one file, and a system call for each would
take longer than the copy.

Remote files are requested ahead of the reading; of those that hold many values, ranges near each other are joined.
`open_file` opens one file to look into it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np

from brim.file_set import FileSet
from brim.formats.range_readers import FileView, Seekable
from brim.memory.release import keep_heap_small
from brim.state.atomic_files import open_regular, reason, refuse_more_files
from brim.storage.reading import JOINED_BYTES, RANGE_BYTES, RandomFile, RangeStream, RemoteFile, fetch_ranges
from brim.storage.storage import ByteRange

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_NONE = -1
_AHEAD_BYTES = 256 * 1024
_SMALL_BYTES = 64 * 1024  # a larger range is read by one system call
_MOST_OPEN = 64  # of files that hold many values
_JOINED_SEGMENTS = 256  # at a time: the gaps between them take memory too
_NEAR_BYTES = 4096  # between values of an Arrow file there may be a few other bytes
_BLOCK_BYTES = 256 * 1024  # a smaller block is copied: handing it on costs more
_OTHER_OBJECT = "is not the object that was planned, or is gone"


class Reader:
    """Reads a splice's source files in order. Use it in one thread."""

    def turn_to(self, source: int) -> int:
        """Continue with that file. Return its descriptor, if it has one."""
        raise NotImplementedError

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill as much of `target` as one read gives, from byte `offset` of the file."""
        raise NotImplementedError

    def take_block(self, offset: int, size: int) -> memoryview | None:
        """Return received bytes from `offset` on, in memory that stays as it is; None if `read_into` is as good."""
        return None

    def leave(self) -> None:
        """Check the files that are open. The version of remote ones was checked with each answer."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reader_of(files: FileSet, segments: Iterable[tuple[int, int, int]], total_bytes: int) -> Reader:
    """Return a reader of these files. `segments` are (source, start, size) of what will be read, in order."""
    if files.remotes:
        return JoinedReader(files, segments)
    return SourceReader(files, total_bytes) if files.bucket is None else ObjectReader(files, segments)


class SourceReader(Reader):
    """Local source files."""

    def __init__(self, files: FileSet, total_bytes: int) -> None:
        self._files = files
        self._source = _NONE
        self._descriptor = _NONE
        self._open: dict[int, int] = {}  # by number, in the order of opening
        self._open_limit = _MOST_OPEN if files.holding else 1
        self._ahead_limit = min(_AHEAD_BYTES, total_bytes)
        self._buffer: memoryview | None = None
        self._ahead_start = self._ahead_size = 0
        self._end = _NONE  # where the last read from this file ended

    def turn_to(self, source: int) -> int:
        """Return the descriptor of a file, after a check that it is the planned one."""
        if source != self._source:
            if source not in self._open:
                while len(self._open) >= self._open_limit:
                    self._check(next(iter(self._open)))
                self._open[source] = open_source(self._files, source)
            self._descriptor = self._open[source]
            self._source = source
            self._end, self._ahead_size = _NONE, 0
        return self._descriptor

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill as much of `target` as one read gives, from a byte of the file; SourceChangedError if it ended."""
        size = len(target)
        start = offset - self._ahead_start
        follows = 0 <= offset - self._end <= _NEAR_BYTES
        self._end = offset + size
        try:
            if start < 0 or start + size > self._ahead_size:
                if size > _SMALL_BYTES or size > self._ahead_limit or not follows:
                    step = os.preadv(self._descriptor, [target], offset)
                    self._end = offset + step
                    return step or self._ended()
                self._buffer = self._buffer or memoryview(bytearray(self._ahead_limit))
                self._ahead_start, self._ahead_size = offset, 0
                self._ahead_size = os.preadv(self._descriptor, [self._buffer], offset)
                start, size = 0, min(size, self._ahead_size) or self._ended()
        except OSError as error:
            raise self._files.changed(self._source, f"cannot be read ({reason(error)})") from error
        assert self._buffer is not None
        target[:size] = self._buffer[start : start + size]
        return size

    def _ended(self) -> int:
        raise self._files.changed(self._source, "became shorter while it was read")

    def _check(self, source: int) -> None:
        """Close a file, after a check that it is still the planned one."""
        descriptor = self._open.pop(source)
        try:
            self._files.check(source, os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def leave(self) -> None:
        self._source = _NONE
        while self._open:
            self._check(next(iter(self._open)))

    def close(self) -> None:
        self._source = _NONE
        while self._open:
            os.close(self._open.popitem()[1])


class JoinedReader(Reader):
    """Values of files of which some are remote. The next segments are requested together.

    Ranges of one object that are near each other are one request: it costs as much as some ten thousand bytes.
    """

    def __init__(self, files: FileSet, segments: Iterable[tuple[int, int, int]]) -> None:
        keep_heap_small()
        self._files = files
        self._local = SourceReader(files, _AHEAD_BYTES)
        self._segments = (one for one in segments if one[0] in files.remotes and one[2])
        self._next = next(self._segments, None)
        self._blocks: dict[int, list[tuple[int, bytes]]] = {}  # per source, with the start of each
        self._source = _NONE

    def turn_to(self, source: int) -> int:
        self._source = source
        return _NONE if source in self._files.remotes else self._local.turn_to(source)

    def read_into(self, target: memoryview, offset: int) -> int:
        if self._source not in self._files.remotes:
            return self._local.read_into(target, offset)
        while True:
            for start, data in self._blocks.get(self._source, ()):
                if start <= offset < start + len(data):
                    step = min(len(target), start + len(data) - offset)
                    target[:step] = data[offset - start : offset - start + step]
                    return step
            self._fetch()

    def _fetch(self) -> None:
        """Request the next segments, up to a few megabytes."""
        ranges_of: dict[int, list[tuple[int, int]]] = {}
        size = count = 0
        while self._next is not None and size < JOINED_BYTES and count < _JOINED_SEGMENTS:
            count += 1
            source, start, length = self._next
            step = min(length, JOINED_BYTES - size)
            ranges_of.setdefault(source, []).append((start, start + step))
            size += step
            self._next = (source, start + step, length - step) if step < length else next(self._segments, None)
        if not ranges_of:
            raise ValueError("a range is read that was not announced")
        changed, remotes = self._files.changed, self._files.remotes
        files = {source: RandomFile(remotes[source], partial(changed, source, _OTHER_OBJECT)) for source in ranges_of}
        sources = {id(file): source for source, file in files.items()}
        self._blocks = {}
        for file, start, data in fetch_ranges([(files[source], ranges) for source, ranges in ranges_of.items()]):
            self._blocks.setdefault(sources[id(file)], []).append((start, data))

    def leave(self) -> None:
        self._local.leave()

    def close(self) -> None:
        self._local.close()


class ObjectReader(Reader):
    """Files of a remote location, requested ahead of the reading. The store compares their versions with the plan."""

    def __init__(self, files: FileSet, segments: Iterable[tuple[int, int, int]]) -> None:
        assert files.bucket is not None
        # Ranges come and go in obstore's threads. Their memory is used again: cleared for each, it would cost as much
        # as receiving them.
        keep_heap_small(large_bytes=2 * RANGE_BYTES)
        self._files = files
        self._source = _NONE
        self._stream = RangeStream(
            files.bucket,
            self._ranges(segments),
            replaced_error=lambda _: files.changed(self._source, _OTHER_OBJECT),
        )
        self._stop = 0  # where the block in `_data` ends
        self._data = memoryview(b"")

    def _ranges(self, segments: Iterable[tuple[int, int, int]]) -> Iterator[ByteRange]:
        for source, start, size in segments:
            if source >= 0:
                file = remote_file(self._files, source)
                yield from file.ranges(start, start + size) if file.size else [ByteRange(file.name, 0, 0, file.version)]

    def turn_to(self, source: int) -> int:
        self._source = source
        if not self._files.sizes[source]:
            self._take()
        return _NONE

    def _take(self) -> None:
        """Receive the next block; of an empty file, whether it is still empty."""
        wanted, self._data = next(self._stream)
        self._stop = wanted.stop

    def read_into(self, target: memoryview, offset: int) -> int:
        self._need(offset)
        step = min(len(target), len(self._data))
        target[:step] = self._data[:step]
        self._data = self._data[step:]
        return step

    def take_block(self, offset: int, size: int) -> memoryview | None:
        if size < _BLOCK_BYTES:
            return None
        self._need(offset)
        if len(self._data) < _BLOCK_BYTES:
            return None
        block, self._data = self._data[:size], self._data[size:]
        return block

    def _need(self, offset: int) -> None:
        if not self._data:
            self._take()
        start = self._stop - len(self._data)
        if start != offset:
            raise ValueError(f"byte {offset} of an object is read where byte {start} is next")

    def close(self) -> None:
        self._stream.close()


def remote_file(files: FileSet, number: int) -> RemoteFile:
    """Return a file of a remote location, as it was planned."""
    assert files.bucket is not None
    version = "" if files.etags is None else str(files.etags[number].as_py() or "")
    return RemoteFile(files.bucket, files.path(number), int(files.sizes[number]), version)


def open_source(files: FileSet, number: int) -> int:
    """Return the descriptor of a source file, after a check that it is the planned one."""
    try:
        descriptor = open_regular(files.full_path(number))
    except OSError as error:
        refuse_more_files(error)
        raise files.changed(number, f"can no longer be opened ({reason(error)})") from error
    try:
        files.check(number, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(files: FileSet, number: int, *, whole: bool = False) -> BinaryIO:
    """Open a file to look into it; `whole` means that it will be read from its beginning to its end."""
    if files.ranges is not None:
        return io.BufferedReader(_Value(files, number))
    if files.bucket is None:
        return open(open_regular(files.full_path(number)), "rb")
    file = remote_file(files, number)
    content = RandomFile(file, lambda: files.changed(number, _OTHER_OBJECT))
    if not whole:
        return io.BufferedReader(FileView(content))
    return io.BufferedReader(FileView(_ObjectInOrder(content), 0, file.size, owned=True), _AHEAD_BYTES)


class _Value(Seekable, io.RawIOBase):
    """A value that is a part of another file, or several parts of it."""

    def __init__(self, files: FileSet, number: int) -> None:
        self._files = files.on_disk
        _, self._holders, self._starts, sizes = files.places(np.array([number]))
        self._ends = np.cumsum(sizes)
        self._begins = self._ends - sizes

    def _size(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def readinto(self, buffer: WriteableBuffer) -> int:
        part = int(np.searchsorted(self._ends, self._position, side="right"))
        view = memoryview(buffer).cast("B")
        if part >= len(self._ends) or self._holders[part] < 0:
            return 0
        view = view[: int(self._ends[part]) - self._position]
        source, offset = int(self._holders[part]), int(self._starts[part] + self._position - self._begins[part])
        with reader_of(self._files, [(source, offset, len(view))], len(view)) as reader:
            reader.turn_to(source)
            step = reader.read_into(view, offset)
        self._position += step
        return step


class _ObjectInOrder:
    """All of a remote file, requested ahead. Reading anywhere but at the next byte takes further requests."""

    def __init__(self, file: RandomFile) -> None:
        self._file = file
        self._stream = RangeStream(
            file.file.location, file.file.ranges(0, file.size), replaced_error=file.replaced_error
        )
        self._block, self._streamed = memoryview(b""), 0

    def read_at(self, offset: int, size: int) -> bytes | memoryview:
        if offset != self._streamed:
            return self._file.read_at(offset, size)
        if not self._block:
            self._block = next(self._stream, (None, memoryview(b"")))[1]
        data, self._block = self._block[:size], self._block[size:]
        self._streamed += len(data)
        return data

    def close(self) -> None:
        self._stream.close()
