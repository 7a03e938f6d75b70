"""Arrow files, in the form of a stream (what `datasets` writes) or of a file: their batches without their data.

The header of each batch tells its rows and where it ends, so a file is walked in no memory, and a worker starts at
any batch. Buffers that are mapped are read when they are used.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from brim.errors import InputError

_MAGIC = b"ARROW1\0\0"
_RECORDS = 3  # of the kinds of messages


class ArrowFile:
    """One file, mapped. `shown` is its name in errors."""

    def __init__(self, path: str, shown: str) -> None:
        self.shown = shown
        try:
            self._map = pa.memory_map(path) if os.path.getsize(path) else None
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{shown!r} cannot be read: {error}.", path=path) from error
        if self._map is None:
            raise InputError(f"{shown!r} is empty.", path=path)
        self._bytes = self._map.read_buffer(self._map.size())
        self._view = memoryview(self._bytes).cast("B")
        self.is_file = bytes(self._view[:8]) == _MAGIC
        self._start = len(_MAGIC) if self.is_file else 0
        try:
            self.schema: pa.Schema = pa.ipc.open_stream(self._bytes.slice(self._start)).schema
        except (pa.ArrowException, OSError) as error:
            raise self._broken(0, "it does not start with a schema") from error
        self.has_dictionaries = any(_holds_dictionary(field.type) for field in self.schema)

    def _broken(self, place: int, why: str) -> InputError:
        return InputError(
            f"{self.shown!r} is not a whole Arrow file: {why} (byte {place:,}).",
            hint="Write it again.",
            path=self.shown,
        )

    def batches(self) -> Iterator[tuple[int, int, int]]:
        """(place, rows, bytes) of each batch, in order."""
        place, size = self._start, len(self._view)
        while place + 4 <= size:
            (length,) = struct.unpack_from("<i", self._view, place)
            head = place + 4
            if length == -1:
                if place + 8 > size:
                    raise self._broken(place, "it breaks off")
                (length,) = struct.unpack_from("<i", self._view, place + 4)
                head = place + 8
            if length == 0:
                return
            if length < 0 or head + length > size:
                raise self._broken(place, "it breaks off")
            try:
                kind, body, rows = _header(self._view[head : head + length])
            except (struct.error, IndexError) as error:
                raise self._broken(place, "the header of a batch is damaged") from error
            end = head + length + body
            if body < 0 or end > size:
                raise self._broken(place, "it breaks off inside of a batch")
            if kind == _RECORDS:
                yield place, rows, end - place
            place = end

    def read(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """The rows from `start` up to `end`."""
        first = 0
        batches = self._decoded() if self.has_dictionaries else None
        for place, rows, size in self.batches():
            if first >= end:
                return
            batch = None
            if batches is not None:
                batch = next(batches)
            elif first + rows > start:
                batch = self._batch(place, size)
            if batch is not None and first + rows > start and rows:
                low, high = max(start - first, 0), min(end - first, rows)
                yield batch if high - low == rows else batch.slice(low, high - low)
            first += rows

    def _batch(self, place: int, size: int) -> pa.RecordBatch:
        try:
            return pa.ipc.read_record_batch(self._bytes.slice(place, size), self.schema)
        except (pa.ArrowException, OSError) as error:
            raise self._broken(place, f"a batch is damaged ({error})") from error

    def _decoded(self) -> Iterator[Any]:
        """Every batch by way of pyarrow's reader, which knows the dictionaries that stand between them."""
        try:
            if self.is_file:
                reader = pa.ipc.open_file(self._bytes)
                yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                yield from pa.ipc.open_stream(self._bytes)
        except (pa.ArrowException, OSError) as error:
            raise self._broken(0, f"a batch is damaged ({error})") from error


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
