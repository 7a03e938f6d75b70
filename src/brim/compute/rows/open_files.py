"""The only module that opens the files of a source of rows: on a disk, or remote.

A file is a path, or a `RemoteFile`. Files of a disk are read where they lie. Remote ones are read by ranges: in order,
a few requests ahead, or here and there by one request each. Every request names the version that was planned, so a file
that was replaced is SourceChangedError; no caller has to check before and after.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import pyarrow as pa

from brim.compute.rows.unit import Span, changed
from brim.errors import InputError
from brim.formats.range_readers import FileView
from brim.state.atomic_files import open_regular, pread_all
from brim.storage.location import Access, split_address
from brim.storage.reading import AHEAD_BYTES, ForwardFile, RandomFile, RangeStream, RemoteFile
from brim.storage.storage import ByteRange

_BLOCK_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16
# Bytes per request. Stores keep objects in parts of about this size, and some read a complete part for less.
STREAM_BYTES = 8 << 20
AnyFile = str | RemoteFile


def decompressed(file: AnyFile, codec: str, shown: str) -> Iterator[bytes]:
    """Yield blocks of the content. Damage is an InputError with the last readable byte."""
    position = 0
    try:
        with as_arrow_file(file) as source, pa.CompressedInputStream(source, codec) as stream:
            while block := stream.read(_BLOCK_BYTES):
                position += len(block)
                yield block
    except (pa.ArrowException, OSError) as error:
        reason = str(error).replace(str(file), shown).split("\n")[0].rstrip(".")
        raise InputError(
            f"{shown!r} is damaged or cut off after byte {position:,} of its decompressed content: {reason}.",
            hint="Download or write the file again.",
            path=shown,
        ) from error


def located(span: Span, shown: str, options: Mapping[str, Any]) -> AnyFile:
    """Return the file of a span, from the options of its Reading."""
    if span.version is None:
        return span.path
    endpoint, anonymous = options["access"]
    location = split_address(span.path, Access(endpoint, anonymous))
    size, version = span.version
    return RemoteFile(replace(location, prefix=""), location.prefix, size, version, shown)


def as_option(access: Access) -> list[Any]:
    """Return an access as an option of a Reading; `located` reads it. It holds no secret."""
    return [access.endpoint, access.anonymous]


class FileContent(Protocol):
    """The bytes of a file. Fewer than requested mean its end."""

    def read_at(self, offset: int, size: int) -> bytes: ...

    def release(self, offset: int) -> None:
        """Forget what precedes this offset: it is not read again."""

    def close(self) -> None: ...


class _LocalContent:
    """A file of this machine."""

    def __init__(self, path: str) -> None:
        self._path, self._number = path, open_regular(path)

    def read_at(self, offset: int, size: int) -> bytes:
        try:
            return pread_all(self._number, size, offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error

    def release(self, offset: int) -> None:
        return None

    def close(self) -> None:
        os.close(self._number)


def open_random(file: RemoteFile) -> RandomFile:
    """Open a remote file to read here and there: offsets near each other share a request."""
    return RandomFile(file, partial(changed, file.shown))


def open_forward(
    file: RemoteFile, start: int, stop: int, range_bytes: int = STREAM_BYTES, ahead_bytes: int = AHEAD_BYTES
) -> ForwardFile:
    """Open a range of a remote file to read from its start."""
    error = partial(changed, file.shown)
    return ForwardFile(file, start, stop, range_bytes=range_bytes, ahead_bytes=ahead_bytes, replaced_error=error)


@contextmanager
def looked_into(file: AnyFile) -> Iterator[FileContent]:
    """Open a file to read here and there."""
    content: FileContent = open_random(file) if isinstance(file, RemoteFile) else _LocalContent(file)
    try:
        yield content
    finally:
        content.close()


@contextmanager
def streamed(file: AnyFile, start: int, end: int, spans: Spans | None = None) -> Iterator[FileContent]:
    """Open a part of a file to read from its start. `spans` may have requested it already."""
    if not isinstance(file, RemoteFile):
        content: FileContent = _LocalContent(file)
    else:
        content = open_forward(file, start, end) if spans is None else spans.content(file, start)
    try:
        yield content
    finally:
        content.close()


class Spans:
    """The parts of remote files that a unit is made of, as one stream: small files wait for the network together.

    They are read in order, each to its end.
    """

    def __init__(self, parts: Iterable[tuple[RemoteFile, int, int]]) -> None:
        self._parts = list(parts)
        files = {file.name: file for file, _, _ in self._parts}

        def replaced_error(byte_range: ByteRange) -> Exception:
            return changed(files[byte_range.name].shown)

        ranges = (entry for file, start, end in self._parts for entry in file.ranges(start, end, STREAM_BYTES))
        self._stream = RangeStream(self._parts[0][0].location, ranges, replaced_error=replaced_error)
        self._next = 0
        self._last: ForwardFile | None = None

    def content(self, file: RemoteFile, start: int) -> ForwardFile:
        own, own_start, end = self._parts[self._next]
        assert (own.name, own_start) == (file.name, start)
        self._next += 1
        if self._last is not None:
            self._last.skip()
        self._last = ForwardFile(file, start, end, stream=self._stream)
        return self._last

    def close(self) -> None:
        self._stream.close()


def head_of(content: FileContent, end: int) -> Iterator[bytes]:
    """Yield the start of a file in growing blocks, to find its first row."""
    yielded, size = 0, _HEAD_BYTES
    while yielded < end:
        block = content.read_at(0, min(size, end))
        if len(block) <= yielded:
            return
        yield block[yielded:]
        yielded, size = len(block), 4 * size


@contextmanager
def as_arrow_file(file: AnyFile, spans: Spans | None = None) -> Iterator[Any]:
    """Open a file for pyarrow, to be read in order."""
    if not isinstance(file, RemoteFile):
        os.close(open_regular(file))  # pyarrow would wait for a FIFO for ever
        with pa.OSFile(file) as local:
            yield local
        return
    with streamed(file, 0, file.size, spans) as content:
        yield pa.PythonFile(FileView(content, 0, file.size, release=content.release), "r")
