"""The one place that opens the files of a source: on a disk, or objects of a store.

A file is a path, or a `Remote`. Files of a disk are read where they lie. Objects are read by ranges: a run of bytes a
few requests ahead, places here and there by one request each. Every request names the ETag that was planned, so an
object that became another one is SourceChangedError; nobody has to look before and after.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import pyarrow as pa

from brim.compute.rows.unit import Span, changed
from brim.errors import InputError
from brim.formats.file_views import FileView
from brim.records import dataclass
from brim.state.atomic_files import open_regular, pread_all
from brim.storage.location import Access, Location, parse_object_address
from brim.storage.reading import Changed, ObjectFile, ObjectPiece, RangeRun, cut

_BLOCK_BYTES = 1 << 20


def decompressed(file: AnyFile, codec: str, shown: str) -> Iterator[bytes]:
    """Blocks of what is inside. Damage is an InputError that says how far the file could be read."""
    place = 0
    try:
        with as_arrow_file(file) as opened, pa.CompressedInputStream(opened, codec) as stream:
            while block := stream.read(_BLOCK_BYTES):
                place += len(block)
                yield block
    except (pa.ArrowException, OSError) as error:
        reason = str(error).replace(str(file), shown).split("\n")[0].rstrip(".")
        raise InputError(
            f"{shown!r} is damaged or cut off after byte {place:,} of its decompressed content: {reason}.",
            hint="Download or write the file again.",
            path=shown,
        ) from error


_HEAD_BYTES = 1 << 16
# Of one request of a stream. Stores keep objects in parts of about this size, and some read a whole part for less.
STREAM_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """An object: its bucket, its key, what it was when it was listed, and its name for people."""

    bucket: Location
    key: str
    size: int
    etag: str
    shown: str

    def __str__(self) -> str:
        return f"{self.bucket}/{self.key}"

    def pieces(self, start: int, end: int, piece_bytes: int = STREAM_BYTES) -> Iterator[ObjectPiece]:
        return cut(self.key, start, min(end, self.size), self.etag, piece_bytes)


AnyFile = str | RemotePlace


def located(span: Span, shown: str, options: Mapping[str, Any]) -> AnyFile:
    """The file of a span, for whoever has nothing but a unit and how to read it."""
    if span.version is None:
        return span.path
    endpoint, anonymous = options["access"]
    address = parse_object_address(span.path, Access(endpoint, anonymous))
    size, etag = span.version
    return RemotePlace(replace(address, prefix=""), address.prefix, size, etag, shown)


def as_option(access: Access) -> list[Any]:
    """How an access travels among the options of a Reading; `located` reads it. It holds no secret."""
    return [access.endpoint, access.anonymous]


class FileContent(Protocol):
    """The bytes of a file. Less than was asked for is the end."""

    def read_at(self, offset: int, size: int) -> bytes: ...

    def passed(self, offset: int) -> None:
        """Nothing before this place will be asked for again."""

    def close(self) -> None: ...


@contextmanager
def looked_into(file: AnyFile) -> Iterator[FileContent]:
    """A file to look into here and there."""
    content: FileContent = open_places(file) if isinstance(file, RemotePlace) else _Local(file)
    try:
        yield content
    finally:
        content.close()


@contextmanager
def streamed(file: AnyFile, start: int, end: int, spans: Spans | None = None) -> Iterator[FileContent]:
    """A part of a file to read from its start to its end. `spans` has it on its way already."""
    if not isinstance(file, RemotePlace):
        content: FileContent = _Local(file)
    elif spans is not None:
        content = spans.content(file, start)
    else:
        content = Forward(RangeRun(file.bucket, file.pieces(start, end)), file, start)
    try:
        yield content
    finally:
        content.close()


class _Local:
    """A file of this machine."""

    def __init__(self, path: str) -> None:
        self._path, self._number = path, open_regular(path)

    def read_at(self, offset: int, size: int) -> bytes:
        try:
            return pread_all(self._number, size, offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error

    def passed(self, offset: int) -> None:
        return None

    def close(self) -> None:
        os.close(self._number)


def open_places(file: RemotePlace) -> ObjectFile:
    """Open an object to read here and there: places near each other share a request."""
    return ObjectFile(file.bucket, file.key, file.size, file.etag, lambda: changed(file.shown))


class Forward:
    """A run of consecutive pieces of an object, of which is kept what was not passed."""

    def __init__(self, run: RangeRun, file: RemotePlace, start: int, *, owned: bool = True) -> None:
        self._run, self._file, self._owned = run, file, owned
        self._kept: list[memoryview] = []
        self._starts: list[int] = []
        self.first = self.end = start  # what is kept begins and ends there

    def read_at(self, offset: int, size: int) -> bytes:
        stop = min(offset + size, self._file.size)
        while self.end < stop and self._advance():
            pass
        return self._joined(offset, min(stop, self.end))

    def _advance(self) -> bool:
        with watched(self._file):
            taken = self._run.take()
        if taken is None:
            return False
        self._kept.append(memoryview(taken[1]))
        self._starts.append(self.end)
        self.end += len(taken[1])
        return True

    def _joined(self, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""
        first = bisect_right(self._starts, start) - 1
        if first < 0:
            raise ValueError(f"{self._file.shown} can only be read forwards")
        parts = []
        for at, view in zip(self._starts[first:], self._kept[first:], strict=True):
            if at >= stop:
                break
            parts.append(view[max(start - at, 0) : stop - at])
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def passed(self, offset: int) -> None:
        while self._kept and self._starts[0] + len(self._kept[0]) <= offset:
            self.first = self._starts[0] + len(self._kept[0])
            del self._kept[0], self._starts[0]

    def close(self) -> None:
        self._kept.clear()
        self._starts.clear()
        if self._owned:
            self._run.close()


class Spans:
    """The parts of objects that a unit is made of, as one run of requests: small objects wait for the line together.

    They are read in order, each to its end.
    """

    def __init__(self, parts: Iterable[tuple[RemotePlace, int, int]]) -> None:
        self._parts = list(parts)
        bucket = self._parts[0][0].bucket
        self._run = RangeRun(bucket, (piece for file, start, end in self._parts for piece in file.pieces(start, end)))
        self._next = 0
        self._last: _Part | None = None

    def content(self, file: RemotePlace, start: int) -> Forward:
        own, begin, end = self._parts[self._next]
        assert (own.key, begin) == (file.key, start)
        self._next += 1
        if self._last is not None:
            self._last.skip()
        self._last = _Part(self._run, file, start, end)
        return self._last

    def close(self) -> None:
        self._run.close()


class _Part(Forward):
    """One of the parts of a run that goes on behind it."""

    def __init__(self, run: RangeRun, file: RemotePlace, start: int, end: int) -> None:
        super().__init__(run, file, start, owned=False)
        self._stop = min(end, file.size)

    def _advance(self) -> bool:
        return self.end < self._stop and super()._advance()

    def skip(self) -> None:
        """Nobody wanted the rest, but the next part lies behind it."""
        while self._advance():
            self.passed(self.end)


@contextmanager
def watched(file: RemotePlace) -> Iterator[None]:
    """What the store says of a changed object, in words."""
    try:
        yield
    except Changed:
        raise changed(file.shown) from None


def head_of(content: FileContent, end: int) -> Iterator[bytes]:
    """The start of a file in growing blocks, for whoever wants its first row."""
    seen, size = 0, _HEAD_BYTES
    while seen < end:
        block = content.read_at(0, min(size, end))
        if len(block) <= seen:
            return
        yield block[seen:]
        seen, size = len(block), 4 * size


@contextmanager
def as_arrow_file(file: AnyFile, spans: Spans | None = None) -> Iterator[Any]:
    """A file for pyarrow, to be read in order."""
    import pyarrow as pa

    if not isinstance(file, RemotePlace):
        os.close(open_regular(file))  # pyarrow would wait for a FIFO for ever
        with pa.OSFile(file) as opened:
            yield opened
        return
    with streamed(file, 0, file.size, spans) as content:
        yield pa.PythonFile(FileView(content, 0, file.size, passed=content.passed), "r")
