"""Read source files in the order of a splice, one open at a time; of files that hold many values, several.

Consecutive segments of one file share its descriptor, and small ranges that follow each other in a file are
read ahead together: the values of a memory-mapped Arrow file are a million ranges of one file, side by
side, and a system call for each would take longer than the copy.

Objects of a bucket are asked for ahead of the reading; ranges of objects that hold many values are joined where they
are near each other. `open_file` is for those who look into one file.
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Protocol, Self

import numpy as np

from brim.file_set import FileSet
from brim.formats.file_views import FileView, Seekable
from brim.memory.release import keep_heap_small
from brim.records import dataclass
from brim.state.atomic_files import open_regular, reason, refuse_more_files
from brim.storage.location import Location
from brim.storage.reading import PIECE_BYTES, Changed, ObjectFile, ObjectPiece, ahead, as_they_come, cut

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_NONE = -1
_AHEAD_BYTES = 256 * 1024
_SMALL_BYTES = 64 * 1024  # a larger range is worth a system call of its own
_MOST_OPEN = 64  # of files that hold many values
_JOINED_BYTES = 8 << 20  # of an object that holds many values, in one request, and of all before they are used
_JOINED_SEGMENTS = 256  # at a time: what lies between them is held as well
_NEAR_BYTES = 4096  # values of an Arrow file may have a little of something else between them
_WORTH_BYTES = 256 * 1024  # a smaller piece is copied: handing it on costs more
_OTHER_OBJECT = "is not the object that was planned, or is gone"


class Reader(Protocol):
    """Reads a splice's source files in order. `leave()` it to have the last file checked."""

    def turn_to(self, source: int) -> int:
        """From now on that file is read. Returns its descriptor, if it has one."""

    def read_into(self, target: memoryview, at: int) -> int:
        """Fill as much of `target` as one read gives, from byte `at` of the file."""

    def piece(self, at: int, most: int) -> memoryview | None:
        """Bytes from `at` on that are there already, in memory that stays as it is; None if `read_into` is as good."""

    def leave(self) -> None: ...
    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


def reader_of(files: FileSet, segments: Iterable[tuple[int, int, int]], wanted_bytes: int) -> Reader:
    """What reads these files. `segments` are (source, start, size) of what will be asked for, in order."""
    if files.remotes:
        return JoinedReader(files, segments)
    return SourceReader(files, wanted_bytes) if files.bucket is None else ObjectReader(files, segments)


class SourceReader:
    """The source files that are open. Use it in one thread, and `leave()` it to have them checked."""

    def __init__(self, files: FileSet, wanted_bytes: int) -> None:
        self._files = files
        self._source = _NONE
        self._descriptor = _NONE
        self._open: dict[int, int] = {}  # by number, the one that was opened first in front
        self._most = _MOST_OPEN if files.holding else 1
        self._room = min(_AHEAD_BYTES, wanted_bytes)
        self._buffer: memoryview | None = None
        self._ahead_at = self._ahead_size = 0
        self._end = _NONE  # where the last read from this file ended

    def turn_to(self, source: int) -> int:
        """The descriptor of a file that is still what was planned."""
        if source != self._source:
            if source not in self._open:
                while len(self._open) >= self._most:
                    self._check(next(iter(self._open)))
                self._open[source] = open_source(self._files, source)
            self._descriptor = self._open[source]
            self._source = source
            self._end, self._ahead_size = _NONE, 0
        return self._descriptor

    def read_into(self, target: memoryview, at: int) -> int:
        """Fill as much of `target` as one read gives, from byte `at` of the file; SourceChangedError if it ended."""
        size = len(target)
        start = at - self._ahead_at
        follows = 0 <= at - self._end <= _NEAR_BYTES
        self._end = at + size
        try:
            if start < 0 or start + size > self._ahead_size:
                if size > _SMALL_BYTES or size > self._room or not follows:
                    step = os.preadv(self._descriptor, [target], at)
                    self._end = at + step
                    return step or self._ended()
                self._buffer = self._buffer or memoryview(bytearray(self._room))
                self._ahead_at, self._ahead_size = at, 0
                self._ahead_size = os.preadv(self._descriptor, [self._buffer], at)
                start, size = 0, min(size, self._ahead_size) or self._ended()
        except OSError as error:
            raise self._files.changed(self._source, f"cannot be read ({reason(error)})") from error
        assert self._buffer is not None
        target[:size] = self._buffer[start : start + size]
        return size

    def piece(self, at: int, most: int) -> None:
        """A file is read where its bytes are wanted."""

    def _ended(self) -> int:
        raise self._files.changed(self._source, "became shorter while it was read")

    def _check(self, source: int) -> None:
        """Close a file, after a look whether it is still what was planned."""
        descriptor = self._open.pop(source)
        try:
            self._files.check(source, os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def leave(self) -> None:
        """Close the files, after a look whether they are still what was planned."""
        self._source = _NONE
        while self._open:
            self._check(next(iter(self._open)))

    def _close(self) -> None:
        self._source = _NONE
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


@dataclass(frozen=True, slots=True)
class _Joined:
    """A range of an object with several segments in it, and its bytes."""

    start: int
    data: bytes


class JoinedReader:
    """Values of files of which some are far away. Those of the next segments are asked for together.

    Ranges of one object that are near each other are one request: a request costs as much as some ten thousand bytes.
    """

    def __init__(self, files: FileSet, segments: Iterable[tuple[int, int, int]]) -> None:
        keep_heap_small()
        self._files = files
        self._local = SourceReader(files, _AHEAD_BYTES)
        self._coming = (one for one in segments if one[0] in files.remotes and one[2])
        self._next = next(self._coming, None)
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._blocks: dict[int, list[_Joined]] = {}
        self._source = _NONE

    def turn_to(self, source: int) -> int:
        self._source = source
        return _NONE if source in self._files.remotes else self._local.turn_to(source)

    def read_into(self, target: memoryview, at: int) -> int:
        if self._source not in self._files.remotes:
            return self._local.read_into(target, at)
        while True:
            for block in self._blocks.get(self._source, ()):
                begin = at - block.start
                if 0 <= begin < len(block.data):
                    step = min(len(target), len(block.data) - begin)
                    target[:step] = block.data[begin : begin + step]
                    return step
            self._fetch()

    def piece(self, at: int, most: int) -> None:
        """What was joined is held for several segments."""

    def _fetch(self) -> None:
        """Ask for what comes next, up to a few megabytes."""
        wanted: dict[int, list[tuple[int, int]]] = {}
        size = count = 0
        while self._next is not None and size < _JOINED_BYTES and count < _JOINED_SEGMENTS:
            count += 1
            source, start, length = self._next
            step = min(length, _JOINED_BYTES - size)
            wanted.setdefault(source, []).append((start, start + step))
            size += step
            self._next = (source, start + step, length - step) if step < length else next(self._coming, None)
        if not wanted:
            raise ValueError("a range is read that was not announced")
        self._blocks = {}
        pieces: dict[Location, list[tuple[int, ObjectPiece]]] = {}
        for source, ranges in wanted.items():
            remote = self._files.remotes[source]
            for start, stop in join_ranges(ranges):
                piece = ObjectPiece(remote.key, start, stop, remote.etag)
                pieces.setdefault(remote.address, []).append((source, piece))
        for address, asked in pieces.items():
            coming = ahead(address, (piece for _, piece in asked))
            for source, piece in asked:
                try:
                    _, data = next(coming)
                except Changed:
                    raise self._files.changed(source, _OTHER_OBJECT) from None
                self._blocks.setdefault(source, []).append(_Joined(piece.start, data))

    def leave(self) -> None:
        self._local.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._local.__exit__(kind, error, trace)


def join_ranges(
    ranges: Iterable[tuple[int, int]], gap: int = 64 * 1024, most_bytes: int | None = _JOINED_BYTES
) -> list[tuple[int, int]]:
    """Ranges in order, those with little between them as one. What is between costs less than a request."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        fits = bool(joined) and (most_bytes is None or max(stop, joined[-1][1]) - joined[-1][0] <= most_bytes)
        if fits and start <= joined[-1][1] + gap:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


class ObjectReader:
    """Objects of a bucket, asked for ahead of the reading. The store compares each with what was planned."""

    def __init__(self, files: FileSet, segments: Iterable[tuple[int, int, int]]) -> None:
        assert files.bucket is not None
        # Pieces come and go in obstore's threads. Their memory is used again: cleared anew for each, it would cost as
        # much as receiving them.
        keep_heap_small(large_bytes=2 * PIECE_BYTES)
        self._files, self._bucket = files, files.bucket
        self._source = _NONE
        self._blocks = as_they_come(files.bucket, self._asked(segments))
        self._piece = ObjectPiece("", 0, 0)
        self._data = memoryview(b"")

    def _asked(self, segments: Iterable[tuple[int, int, int]]) -> Iterator[ObjectPiece]:
        etags = self._files.etags
        for source, start, size in segments:
            if source < 0:
                continue
            etag = None if etags is None else etags[source].as_py() or None
            key = self._bucket.key(self._files.path(source))
            if self._files.sizes[source]:
                yield from cut(key, start, start + size, etag)
            else:
                yield ObjectPiece(key, 0, 0, etag)

    def turn_to(self, source: int) -> int:
        self._source = source
        if not self._files.sizes[source]:
            self._take()
        return _NONE

    def _take(self) -> None:
        """The next block of what was asked for; of an empty object, whether it is empty still."""
        try:
            self._piece, self._data = next(self._blocks)
        except Changed:
            raise self._files.changed(self._source, _OTHER_OBJECT) from None

    def read_into(self, target: memoryview, at: int) -> int:
        self._need(at)
        step = min(len(target), len(self._data))
        target[:step] = self._data[:step]
        self._data = self._data[step:]
        return step

    def piece(self, at: int, most: int) -> memoryview | None:
        if most < _WORTH_BYTES:
            return None
        self._need(at)
        if len(self._data) < _WORTH_BYTES:
            return None
        given, self._data = self._data[:most], self._data[most:]
        return given

    def _need(self, at: int) -> None:
        if not self._data:
            self._take()
        start = self._piece.stop - len(self._data)
        if start != at:
            raise ValueError(f"byte {at} of an object is read where byte {start} is next")

    def leave(self) -> None:
        """Each answer was compared with what was planned."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.close()  # type: ignore[attr-defined]


def open_source(files: FileSet, number: int) -> int:
    """A descriptor of a source file that is still what was planned."""
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
    """A file to look into; `whole` says that it will be read from its beginning to its end."""
    if files.ranges is not None:
        return io.BufferedReader(_Value(files, number))
    if files.bucket is None:
        return open(open_regular(files.full_path(number)), "rb")
    assert files.etags is not None
    size, etag, path = int(files.sizes[number]), files.etags[number].as_py(), files.path(number)
    file = ObjectFile(files.bucket, path, size, etag, lambda: files.changed(number, _OTHER_OBJECT))
    if not whole:
        return io.BufferedReader(FileView(file))
    pieces = ahead(files.bucket, cut(files.bucket.key(path), 0, size, etag))
    return io.BufferedReader(FileView(_ObjectInOrder(file, pieces), 0, size, owned=True), _AHEAD_BYTES)


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
        piece = int(np.searchsorted(self._ends, self._at, side="right"))
        view = memoryview(buffer).cast("B")
        if piece >= len(self._ends) or self._holders[piece] < 0:
            return 0
        view = view[: int(self._ends[piece]) - self._at]
        source, at = int(self._holders[piece]), int(self._starts[piece] + self._at - self._begins[piece])
        with reader_of(self._files, [(source, at, len(view))], len(view)) as reader:
            reader.turn_to(source)
            step = reader.read_into(view, at)
        self._at += step
        return step


class _ObjectInOrder:
    """All of an object, asked for ahead. Going elsewhere than on takes requests of its own."""

    def __init__(self, file: ObjectFile, pieces: Iterator[tuple[ObjectPiece, bytes]]) -> None:
        self._file, self._pieces = file, pieces
        self._left, self._streamed = memoryview(b""), 0

    def read_at(self, offset: int, size: int) -> bytes | memoryview:
        if offset != self._streamed:
            return self._file.read_at(offset, size)
        if not self._left:
            with self._file.watched():
                self._left = memoryview(next(self._pieces, (None, b""))[1])
        data, self._left = self._left[:size], self._left[size:]
        self._streamed += len(data)
        return data

    def close(self) -> None:
        self._pieces.close()  # type: ignore[attr-defined]
