"""Arrow files, in the form of a stream (what `datasets` writes) or of a file: their batches without their data.

The header of each batch tells its rows and where it ends, so a file is walked in no memory, and a worker starts at
any batch. Buffers that are mapped are read when they are used; those of an object come a batch at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from brim.errors import InputError
from brim.sources.rows.ipc_content import Batches, MappedBatches, RemoteBatches
from brim.sources.rows.opening import AnyFile, Remote

_MAGIC = b"ARROW1\0\0"
_RECORDS = 3  # of the kinds of messages


class ArrowFile:
    """One file. `shown` is its name in errors."""

    def __init__(self, file: AnyFile, shown: str) -> None:
        self.shown = shown
        try:
            self._content: Batches = RemoteBatches(file) if isinstance(file, Remote) else MappedBatches(file)
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
            f"{self.shown!r} is not a whole Arrow file: {why} (byte {place:,}).",
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

    def read(self, start: int, end: int, near: tuple[int, int, int] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows from `start` up to `end`. `near` is what `Span.batches` says."""
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
                low, high = max(start - first, 0), min(end - first, rows)
                yield batch if high - low == rows else batch.slice(low, high - low)
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
