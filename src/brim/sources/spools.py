"""Tables and values kept in temporary files, as long as something refers to them.

The pages of a memory-mapped file are file-backed: the kernel drops them when memory is short, and they do not count
against a limit. A table is read back with the same chunks, because the chunks of a table decide where the pages of its
Parquet shards end.
"""

from __future__ import annotations

import itertools
import mmap
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from brim.file_set import Bools, Ints
from brim.memory.release import give_back_heap
from brim.partition import arrow_bytes
from brim.state.scratch import scratch_failures, scratch_folder

SMALL_TABLE_BYTES = 8_000_000  # tables up to here stay in memory
_ALIGNMENT = 64
_RELEASE_BYTES = 1 << 20
_HELD_BYTES = 1 << 20  # of a buffer that grows, before it goes to a file
_MOST_OFFSET = 2**31 - 1

_mappings: list[tuple[weakref.ref[mmap.mmap], int, int]] = []  # scratch files: (mapping, first address, end)


class TableSpool:
    """Arrow tables that are written one after the other and are read back memory-mapped."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="brim-", dir=scratch_folder())  # noqa: SIM115 - closed by tables()
        self._starts: list[int] = []

    def write(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        """Write a table. Memory is returned to the system between batches."""
        with scratch_failures():
            self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
            self._starts.append(self._file.tell())
            writer, unreleased = pa.ipc.new_stream(self._file, schema), 0
        for batch in batches:
            with scratch_failures():
                writer.write_batch(batch)
            unreleased += arrow_bytes(batch)
            del batch
            if unreleased >= _RELEASE_BYTES:  # Arrow would keep several times as much
                unreleased = 0
                pa.default_memory_pool().release_unused()
                give_back_heap()
        with scratch_failures():
            writer.close()

    def tables(self) -> list[pa.Table]:
        """Map the tables that were written. The mapping exists as long as one of them."""
        self._file.flush()
        mapping = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._file.close()
        mapped = pa.py_buffer(mapping)
        _mappings[:] = [entry for entry in _mappings if entry[0]() is not None]
        _mappings.append((weakref.ref(mapping), mapped.address, mapped.address + mapped.size))
        return [pa.ipc.open_stream(pa.BufferReader(mapped.slice(start))).read_all() for start in self._starts]


def mapped_columns(table: pa.Table) -> frozenset[str]:
    """Return the columns that are in a spool and therefore take no memory."""
    ranges = [(start, end) for mapping, start, end in _mappings if mapping() is not None]

    def is_mapped(column: pa.ChunkedArray) -> bool:
        buffers = [b for chunk in column.chunks for b in chunk.buffers() if b is not None and b.size]
        return bool(buffers) and all(any(start <= b.address < end for start, end in ranges) for b in buffers)

    return frozenset(name for name in table.column_names if ranges and is_mapped(table.column(name)))


def collect_batches(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """Make a table of at least one batch: in memory if it is small, otherwise in a spool."""
    pending: list[pa.RecordBatch] = []
    size, remaining = 0, iter(batches)
    for batch in remaining:
        pending.append(batch)
        size += arrow_bytes(batch)
        if size > SMALL_TABLE_BYTES:
            schema = batch.schema
            del batch
            spool = TableSpool()
            # Each batch is released as soon as it is written.
            spool.write(schema, itertools.chain((pending.pop(0) for _ in range(len(pending))), remaining))
            return spool.tables()[0]
    return pa.Table.from_batches(pending)


def spooled(table: pa.Table, make: Callable[[pa.Table], pa.Table]) -> pa.Table:
    """Return what `make` returns for the table. If the table is in a spool, so is the result, column by column."""
    if not mapped_columns(table):
        return make(table)
    spool = TableSpool()
    for name in table.column_names:
        column = make(table.select([name]))
        spool.write(column.schema, column.to_batches())
    parts = spool.tables()
    schema = pa.schema([part.schema.field(0) for part in parts])
    return pa.Table.from_arrays([part.column(0) for part in parts], schema=schema)


class GrowingArray:
    """Builds a contiguous array from parts, with its buffers in temporary files."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind, self.length, self._nulls = kind, 0, 0
        self._validity: _Bits | None = None  # until there is a null
        self._values: _Bits | _GrowingBuffer = _Bits() if pa.types.is_boolean(kind) else _GrowingBuffer()
        self._offsets = _GrowingBuffer()
        self._end = 0  # the last offset
        self._children = [GrowingArray(kind.field(number).type) for number in range(kind.num_fields)]
        if _offset_type(kind) is not None:
            self._offsets.write(np.zeros(1, _offset_type(kind)))

    @staticmethod
    def takes(kind: pa.DataType) -> bool:
        """Return whether arrays of a type can be put together: not dictionaries, views, unions and extensions."""
        if isinstance(kind, pa.BaseExtensionType) or pa.types.is_dictionary(kind) or pa.types.is_union(kind):
            return False
        is_fixed = pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind)
        if kind.num_fields and (_offset_type(kind) is not None or is_fixed):
            return all(GrowingArray.takes(kind.field(number).type) for number in range(kind.num_fields))
        return _offset_type(kind) is not None or _width(kind) > 0 or bool(pa.types.is_boolean(kind))

    def has_room(self, array: Any) -> bool:
        """Return whether the offsets of an array fit after those of the earlier ones."""
        if _offset_type(array.type) == np.int32:
            offsets = _offsets(array)
            if self._end + int(offsets[-1] - offsets[0]) > _MOST_OFFSET:
                return False
        return all(child.has_room(part) for child, part in zip(self._children, _children(array), strict=True))

    def append(self, array: Any) -> None:
        kind = self.kind
        if self._validity is None and array.null_count:
            self._validity = _Bits()
            self._validity.write(np.ones(self.length, bool))
        if self._validity is not None:
            self._validity.write(np.asarray(array.is_valid().to_numpy(zero_copy_only=False), bool))
        self.length += len(array)
        self._nulls += array.null_count
        if isinstance(self._values, _Bits):
            self._values.write(np.asarray(array.fill_null(False).to_numpy(zero_copy_only=False), bool))
        elif (offset_type := _offset_type(kind)) is not None:
            offsets = _offsets(array)
            self._offsets.write((offsets[1:].astype(np.int64) - int(offsets[0]) + self._end).astype(offset_type))
            self._end += int(offsets[-1] - offsets[0])
            if not self._children and len(array):
                self._values.write(memoryview(array.buffers()[2] or b"")[int(offsets[0]) : int(offsets[-1])])
        elif width := _width(kind):
            data, start, size = array.buffers()[1], array.offset * width, len(array) * width
            self._values.write(bytes(size) if data is None else memoryview(data)[start : start + size])
        for child, part in zip(self._children, _children(array), strict=True):
            child.append(part)

    def finish(self) -> Any:
        """Return the array. Its buffers are memory-mapped if they are large."""
        buffers: list[Any] = [None if self._validity is None else self._validity.finish()]
        if _offset_type(self.kind) is not None:
            buffers.append(self._offsets.finish())
        if not self._children:
            buffers.append(self._values.finish())
        children = [child.finish() for child in self._children]
        return pa.Array.from_buffers(self.kind, self.length, buffers, self._nulls, children=children or None)


def _offset_type(kind: pa.DataType) -> Any:
    if any(test(kind) for test in (pa.types.is_string, pa.types.is_binary, pa.types.is_list, pa.types.is_map)):
        return np.int32
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_large_list(kind)
    return np.int64 if large else None


def _width(kind: pa.DataType) -> int:
    """Return the bytes of a value of fixed width; 0 for other types."""
    fixed = pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind)
    return int(kind.bit_width) // 8 if fixed and not pa.types.is_boolean(kind) else 0


def _offsets(array: Any) -> Ints:
    if not len(array):
        return np.zeros(1, np.int64)
    return np.frombuffer(array.buffers()[1], _offset_type(array.type))[array.offset : array.offset + len(array) + 1]


def _children(array: Any) -> list[Any]:
    """Return the arrays inside of an array, cut to its rows."""
    kind = array.type
    if pa.types.is_struct(kind):
        return [array.field(number) for number in range(kind.num_fields)]
    if pa.types.is_fixed_size_list(kind):
        return [array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)]
    if kind.num_fields:
        offsets = _offsets(array)
        return [array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))]
    return []


class _GrowingBuffer:
    """Bytes in a temporary file, or in memory as long as they are few."""

    def __init__(self) -> None:
        self._file: Any = tempfile.SpooledTemporaryFile(_HELD_BYTES, dir=scratch_folder())  # noqa: SIM115
        self._size = 0

    def write(self, data: Any) -> None:
        content = memoryview(data).cast("B") if len(data) else b""
        with scratch_failures():
            self._file.write(content)
        self._size += len(content)

    def finish(self) -> Any:
        if not self._size:
            return pa.py_buffer(b"")
        self._file.flush()
        if self._size <= _HELD_BYTES:
            self._file.seek(0)
            return pa.py_buffer(self._file.read())
        return pa.py_buffer(mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_READ))


class _Bits:
    """Bits, eight to a byte. Parts may end inside a byte."""

    def __init__(self) -> None:
        self._buffer, self._remainder = _GrowingBuffer(), np.zeros(0, bool)

    def write(self, bits: Bools) -> None:
        bits = np.concatenate([self._remainder, bits])
        complete = len(bits) & ~7
        self._buffer.write(np.packbits(bits[:complete], bitorder="little"))
        self._remainder = bits[complete:]

    def finish(self) -> Any:
        self._buffer.write(np.packbits(self._remainder, bitorder="little"))
        return self._buffer.finish()


def contiguous(field: pa.Field, arrays: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """Put the arrays of a column together, to one or as few as the offsets of its type allow."""
    schema, growing = pa.schema([field]), GrowingArray(field.type)
    for array in arrays:
        if not growing.has_room(array):
            yield pa.record_batch([growing.finish()], schema=schema)
            growing = GrowingArray(field.type)
        growing.append(array)
    yield pa.record_batch([growing.finish()], schema=schema)
