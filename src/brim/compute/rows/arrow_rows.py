"""Find the batches of Arrow files, in stream form (as `datasets` writes them) or file form, without reading their data.

The header of each batch has its number of rows and its length, so walking a file takes almost no memory, and a worker
can start at any batch. Mapped buffers are read when they are used; those of an object are read one batch at a time.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pyarrow as pa

from brim.compute.rows.open_files import AnyFile, open_forward, open_random
from brim.compute.rows.schemas import contains_type
from brim.errors import InputError
from brim.formats.range_readers import FileView
from brim.state.atomic_files import open_regular
from brim.storage.reading import ForwardFile, RemoteFile

_NEAR_BYTES = 2 << 20  # reading so much takes no longer than another request


class Batches(Protocol):
    """The bytes of an Arrow file. Requested offsets only increase."""

    size: int

    def head(self, offset: int, size: int) -> Any:
        """Return the bytes of a header; fewer at the end of the file."""

    def batch(self, offset: int, size: int) -> pa.Buffer: ...

    def source(self, offset: int) -> Any:
        """Return the file from an offset on, for pyarrow's readers."""

    def stream(self) -> Any:
        """Return the whole file in order, for pyarrow's reader."""

    def expect(self, start: int, end: int) -> None:
        """Announce that all batches in this range will be requested."""

    def close(self) -> None: ...


class MappedBatches:
    """A mapped local file."""

    def __init__(self, path: str) -> None:
        self.size = os.path.getsize(path)
        if self.size:
            os.close(open_regular(path))  # pyarrow would wait for a FIFO for ever
            mapped = pa.memory_map(path)
            self._bytes = mapped.read_buffer(mapped.size())
            self._view = memoryview(self._bytes).cast("B")

    def head(self, offset: int, size: int) -> Any:
        return self._view[offset : offset + size]

    def batch(self, offset: int, size: int) -> pa.Buffer:
        return self._bytes.slice(offset, size)

    def source(self, offset: int) -> Any:
        return self._bytes.slice(offset)

    def stream(self) -> Any:
        return self._bytes

    def expect(self, start: int, end: int) -> None:
        return None

    def close(self) -> None:
        return None


class RemoteBatches:
    """An object. If many headers follow each other closely, the file is read as one stream."""

    def __init__(self, file: RemoteFile) -> None:
        self.size = file.size
        self._file = file
        self._random = open_random(file)
        self._stream: ForwardFile | None = None
        self._last = self._passed = 0
        self._second: ForwardFile | None = None
        self._near_count = 0  # consecutive headers close to the one before

    def head(self, offset: int, size: int) -> Any:
        if self._stream is None and offset > self._last:
            self._near_count = self._near_count + 1 if offset - self._last < _NEAR_BYTES else 0
            if self._near_count > 8:  # two reads per header
                self.expect(offset, self.size)
        self._last = offset
        if self._stream is None:
            return self._random.read_at(offset, size)
        if offset > self._passed + 8:  # a batch starts at its marker, 8 bytes before its header
            self._stream.release(offset - 8)
            self._passed = offset
        return self._stream.read_at(offset, size)

    def batch(self, offset: int, size: int) -> pa.Buffer:
        if self._stream is None or offset < self._stream.first:
            return pa.py_buffer(self._random.read_at(offset, size))
        return pa.py_buffer(self._stream.read_at(offset, size))

    def source(self, offset: int) -> Any:
        return pa.PythonFile(FileView(self._random, 0, self.size, position=offset), "r")

    def stream(self) -> Any:
        self._second = open_forward(self._file, 0, self.size)
        return pa.PythonFile(FileView(self._second, 0, self.size, release=self._second.release), "r")

    def expect(self, start: int, end: int) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = open_forward(self._file, start, end)

    def close(self) -> None:
        self._random.close()
        for stream in (self._stream, self._second):
            if stream is not None:
                stream.close()


_MAGIC = b"ARROW1\0\0"
_RECORDS = 3  # the message kind of a record batch


class ArrowFile:
    """One file. `shown` is its name in errors."""

    def __init__(self, file: AnyFile, shown: str) -> None:
        self.shown = shown
        try:
            self._content: Batches = RemoteBatches(file) if isinstance(file, RemoteFile) else MappedBatches(file)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{shown!r} cannot be read: {error}.", path=str(file)) from error
        if not self._content.size:
            raise InputError(f"{shown!r} is empty.", path=str(file))
        self.is_file = bytes(self._content.head(0, 8)) == _MAGIC
        self._start = len(_MAGIC) if self.is_file else 0
        try:
            self.schema: pa.Schema = pa.ipc.open_stream(self._content.source(self._start)).schema
        except (pa.ArrowException, OSError) as error:
            raise self._broken(0, "it does not start with a schema") from error
        self.has_dictionaries = any(contains_type(kind, pa.types.is_dictionary) for kind in self.schema.types)

    def _broken(self, offset: int, why: str) -> InputError:
        return InputError(
            f"{self.shown!r} is not a complete Arrow file: {why} (byte {offset:,}).",
            hint="Write it again.",
            path=self.shown,
        )

    def batches(self, offset: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield (offset, rows, bytes) of each batch in order, from `offset` on, where a batch must start."""
        content, size = self._content, self._content.size
        offset = self._start if offset is None else offset
        while offset + 4 <= size:
            mark = content.head(offset, 8)
            (length,) = struct.unpack_from("<i", mark)
            head = offset + 4
            if length == -1:
                if offset + 8 > size:
                    raise self._broken(offset, "it breaks off")
                (length,) = struct.unpack_from("<i", mark, 4)
                head = offset + 8
            if length == 0:
                return
            if length < 0 or head + length > size:
                raise self._broken(offset, "it breaks off")
            try:
                kind, body, rows = _header(content.head(head, length))
            except (struct.error, IndexError) as error:
                raise self._broken(offset, "the header of a batch is damaged") from error
            end = head + length + body
            if body < 0 or end > size:
                raise self._broken(offset, "it breaks off inside of a batch")
            if kind == _RECORDS:
                yield offset, rows, end - offset
            offset = end

    def read(
        self, start: int, end: int, batch_range: tuple[int, int, int] | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the uncut batches with rows from `start` to `end`, each with the number of its first row.

        `batch_range` is `Span.batches`.
        """
        decode = self._decoder() if self.has_dictionaries else None
        first, first_offset = 0, None
        if batch_range is not None and decode is None:
            first, first_offset, stop = batch_range
            self._content.expect(first_offset, stop)
        for number, (offset, rows, size) in enumerate(self.batches(first_offset)):
            if first >= end:
                return
            is_needed, batch = first + rows > start, None
            if decode is not None and (is_needed or not self.is_file):
                batch = self._decoded(decode, number, offset)
            elif is_needed:
                batch = self._batch(offset, size)
            if batch is not None and is_needed and rows:
                yield first, batch
            first += rows
            if first >= end:
                return  # without reading the next header

    def close(self) -> None:
        self._content.close()

    def _batch(self, offset: int, size: int) -> pa.RecordBatch:
        try:
            return pa.ipc.read_record_batch(self._content.batch(offset, size), self.schema)
        except (pa.ArrowException, OSError) as error:
            raise self._broken(offset, f"a batch is damaged ({error})") from error

    def _decoder(self) -> Callable[[int], pa.RecordBatch]:
        """Return a function that reads a batch (of a stream: the next) and the dictionaries before it."""
        try:
            if self.is_file:
                return pa.ipc.open_file(self._content.source(0)).get_batch  # type: ignore[no-any-return]
            stream = iter(pa.ipc.open_stream(self._content.stream()))
        except (pa.ArrowException, OSError) as error:
            raise self._broken(0, f"it cannot be opened ({error})") from error
        return lambda number: next(stream)

    def _decoded(self, decode: Callable[[int], pa.RecordBatch], number: int, offset: int) -> pa.RecordBatch:
        try:
            return decode(number)
        except (pa.ArrowException, OSError) as error:
            raise self._broken(offset, f"a batch is damaged ({error})") from error


def rows_between(batch: pa.RecordBatch, first: int, start: int, end: int) -> pa.RecordBatch:
    """Return the rows from `start` to `end` of a batch whose first row is number `first`."""
    low, high = max(start - first, 0), min(end - first, batch.num_rows)
    return batch if high - low == batch.num_rows else batch.slice(low, high - low)


def _header(view: Any) -> tuple[int, int, int]:
    """Return kind, bytes of the body and rows of the message in a flatbuffer."""
    (root,) = struct.unpack_from("<I", view, 0)
    kind_at, header_at, body_at = (_field(view, root, number) for number in (1, 2, 3))
    kind = view[kind_at] if kind_at else 0
    body = struct.unpack_from("<q", view, body_at)[0] if body_at else 0
    rows = 0
    if kind == _RECORDS and header_at:
        table = header_at + struct.unpack_from("<I", view, header_at)[0]
        rows_at = _field(view, table, 0)
        rows = struct.unpack_from("<q", view, rows_at)[0] if rows_at else 0
    return kind, body, rows


def _field(view: Any, table: int, number: int) -> int:
    vtable = table - struct.unpack_from("<i", view, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", view, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", view, vtable + 4 + 2 * number)[0]
    return table + offset if offset else 0
