"""Arrow files, in the form of a stream (what `datasets` writes) or of a file: their batches without their data.

The header of each batch tells its rows and where it ends, so a file is walked in no memory, and a worker starts at
any batch. Buffers that are mapped are read when they are used; those of an object come a batch at a time.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pyarrow as pa

from brim.compute.rows.open_files import AnyFile, open_forward, open_random
from brim.errors import InputError
from brim.formats.file_views import FileView
from brim.state.atomic_files import open_regular
from brim.storage.reading import ForwardFile, RemoteFile

_NEAR_BYTES = 2 << 20  # to read so much takes no longer than to ask for a place behind it


class Batches(Protocol):
    """What is asked for goes forwards."""

    size: int

    def head(self, place: int, size: int) -> Any:
        """The bytes of a header; less at the end of the file."""

    def batch(self, place: int, size: int) -> pa.Buffer: ...

    def source(self, place: int) -> Any:
        """From a place on, for pyarrow's own readers."""

    def stream(self) -> Any:
        """All of it in order, for pyarrow's own reader."""

    def expect(self, start: int, end: int) -> None:
        """All of these batches will be asked for."""

    def close(self) -> None: ...


class MappedBatches:
    """A file of this machine."""

    def __init__(self, path: str) -> None:
        self.size = os.path.getsize(path)
        if self.size:
            os.close(open_regular(path))  # pyarrow would wait for a FIFO for ever
            mapped = pa.memory_map(path)
            self._bytes = mapped.read_buffer(mapped.size())
            self._view = memoryview(self._bytes).cast("B")

    def head(self, place: int, size: int) -> Any:
        return self._view[place : place + size]

    def batch(self, place: int, size: int) -> pa.Buffer:
        return self._bytes.slice(place, size)

    def source(self, place: int) -> Any:
        return self._bytes.slice(place)

    def stream(self) -> Any:
        return self._bytes

    def expect(self, start: int, end: int) -> None:
        return None

    def close(self) -> None:
        return None


class RemoteBatches:
    """An object. Headers that lie near each other are read with what is between them, as a stream."""

    def __init__(self, file: RemoteFile) -> None:
        self.size = file.size
        self._file = file
        self._places = open_random(file)
        self._stream: ForwardFile | None = None
        self._last = self._passed = 0
        self._second: ForwardFile | None = None
        self._near = 0  # how many headers in a row were near the one before

    def head(self, place: int, size: int) -> Any:
        if self._stream is None and place > self._last:
            self._near = self._near + 1 if place - self._last < _NEAR_BYTES else 0
            if self._near > 8:  # two looks for each header
                self.expect(place, self.size)
        self._last = place
        if self._stream is None:
            return self._places.read_at(place, size)
        if place > self._passed + 8:  # a batch is asked for from its mark on, which is before its header
            self._stream.release(place - 8)
            self._passed = place
        return self._stream.read_at(place, size)

    def batch(self, place: int, size: int) -> pa.Buffer:
        if self._stream is None or place < self._stream.first:
            return pa.py_buffer(self._places.read_at(place, size))
        return pa.py_buffer(self._stream.read_at(place, size))

    def source(self, place: int) -> Any:
        return pa.PythonFile(FileView(self._places, 0, self.size, position=place), "r")

    def stream(self) -> Any:
        self._second = open_forward(self._file, 0, self.size)
        return pa.PythonFile(FileView(self._second, 0, self.size, release=self._second.release), "r")

    def expect(self, start: int, end: int) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = open_forward(self._file, start, end)

    def close(self) -> None:
        self._places.close()
        for stream in (self._stream, self._second):
            if stream is not None:
                stream.close()


_MAGIC = b"ARROW1\0\0"
_RECORDS = 3  # of the kinds of messages


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
        self.has_dictionaries = any(_holds_dictionary(field.type) for field in self.schema)

    def _broken(self, place: int, why: str) -> InputError:
        return InputError(
            f"{self.shown!r} is not a complete Arrow file: {why} (byte {place:,}).",
            hint="Write it again.",
            path=self.shown,
        )

    def batches(self, place: int | None = None) -> Iterator[tuple[int, int, int]]:
        """(place, rows, bytes) of each batch, in order; of those from a place on where one starts."""
        content, size = self._content, self._content.size
        place = self._start if place is None else place
        while place + 4 <= size:
            mark = content.head(place, 8)
            (length,) = struct.unpack_from("<i", mark)
            head = place + 4
            if length == -1:
                if place + 8 > size:
                    raise self._broken(place, "it breaks off")
                (length,) = struct.unpack_from("<i", mark, 4)
                head = place + 8
            if length == 0:
                return
            if length < 0 or head + length > size:
                raise self._broken(place, "it breaks off")
            try:
                kind, body, rows = _header(content.head(head, length))
            except (struct.error, IndexError) as error:
                raise self._broken(place, "the header of a batch is damaged") from error
            end = head + length + body
            if body < 0 or end > size:
                raise self._broken(place, "it breaks off inside of a batch")
            if kind == _RECORDS:
                yield place, rows, end - place
            place = end

    def read(
        self, start: int, end: int, near: tuple[int, int, int] | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The batches that hold rows from `start` up to `end`, uncut, each with the number of its first row.

        `near` is what `Span.batches` says.
        """
        decode = self._decoder() if self.has_dictionaries else None
        first, begin = 0, None
        if near is not None and decode is None:
            first, begin, stop = near
            self._content.expect(begin, stop)
        for number, (place, rows, size) in enumerate(self.batches(begin)):
            if first >= end:
                return
            wanted, batch = first + rows > start, None
            if decode is not None and (wanted or not self.is_file):
                batch = self._decoded(decode, number, place)
            elif wanted:
                batch = self._batch(place, size)
            if batch is not None and wanted and rows:
                yield first, batch
            first += rows
            if first >= end:
                return  # without a look at the header of the next

    def close(self) -> None:
        self._content.close()

    def _batch(self, place: int, size: int) -> pa.RecordBatch:
        try:
            return pa.ipc.read_record_batch(self._content.batch(place, size), self.schema)
        except (pa.ArrowException, OSError) as error:
            raise self._broken(place, f"a batch is damaged ({error})") from error

    def _decoder(self) -> Callable[[int], pa.RecordBatch]:
        """Any batch (of a stream: the next) by way of pyarrow's reader, which knows the dictionaries between them."""
        try:
            if self.is_file:
                return pa.ipc.open_file(self._content.source(0)).get_batch  # type: ignore[no-any-return]
            stream = iter(pa.ipc.open_stream(self._content.stream()))
        except (pa.ArrowException, OSError) as error:
            raise self._broken(0, f"it cannot be opened ({error})") from error
        return lambda number: next(stream)

    def _decoded(self, decode: Callable[[int], pa.RecordBatch], number: int, place: int) -> pa.RecordBatch:
        try:
            return decode(number)
        except (pa.ArrowException, OSError) as error:
            raise self._broken(place, f"a batch is damaged ({error})") from error


def rows_between(batch: pa.RecordBatch, first: int, start: int, end: int) -> pa.RecordBatch:
    """The rows from `start` up to `end` of a batch whose first row is number `first`."""
    low, high = max(start - first, 0), min(end - first, batch.num_rows)
    return batch if high - low == batch.num_rows else batch.slice(low, high - low)


def _header(view: Any) -> tuple[int, int, int]:
    """Kind, bytes of the body and rows: the three fields that are needed of a flatbuffer."""
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


def _holds_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(_holds_dictionary(kind.field(number).type) for number in range(kind.num_fields))
