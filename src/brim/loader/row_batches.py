"""Make batches from the rows of ranges: shuffle them inside their windows, cut them, convert them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.file_set import Ints
from brim.loader.epoch_order import EpochOrder, Stretch
from brim.loader.row_shares import Range
from brim.memory.meter import process_bytes

_LARGE_ROW_BYTES = 16 << 10  # rows from this size on are copied one by one, so that a window is not copied as a whole


def stretches_of(order: EpochOrder, ranges: Sequence[Range]) -> Iterator[Stretch]:
    """Yield what has to be read for ranges of the order: complete windows, because rows are shuffled inside them."""
    for start, stop in ranges:
        yield from order.stretches(order.window(start)[0], order.window(stop - 1)[1])


class _Rows:
    """Tables that follow each other, from which rows are taken in any number."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables, self._held = tables, list[pa.Table]()

    def take(self, rows: int, *, at_least_one: bool = False) -> list[pa.Table]:
        """Return the next `rows` rows; with `at_least_one`, those of the next table only, which may be fewer."""
        parts, found = [], 0
        while found < rows:
            table = self._held.pop() if self._held else next(self._tables)
            if len(table) > rows - found:
                self._held.append(table.slice(rows - found))
                table = table.slice(0, rows - found)
            parts.append(table)
            found += len(table)
            if at_least_one:
                break
        return parts


def batches_of(
    order: EpochOrder, ranges: Sequence[Range], tables: Iterable[pa.Table], batch_size: int, most_held_bytes: int
) -> Iterator[pa.Table]:
    """Yield the rows of ranges in batches; the last may be smaller. `tables` has the rows of `stretches_of`.

    `most_held_bytes`: between two windows, a larger process gives memory that pyarrow keeps for later back.
    """
    parts, missing = list[pa.Table](), batch_size
    for table in _in_order(order, ranges, _Rows(iter(tables)), batch_size, most_held_bytes):
        start = 0
        while len(table) - start >= missing:
            parts.append(table.slice(start, missing))
            start, missing = start + missing, batch_size
            yield _joined(parts)
            parts = []
        if start < len(table):
            parts.append(table.slice(start))
            missing -= len(table) - start
        del table
    if parts:
        yield _joined(parts)


def _joined(parts: list[pa.Table]) -> pa.Table:
    return parts[0] if len(parts) == 1 else pa.concat_tables(parts)


def _in_order(
    order: EpochOrder, ranges: Sequence[Range], rows: _Rows, most_rows: int, most_held_bytes: int
) -> Iterator[pa.Table]:
    """Yield the rows of ranges in their order, a batch or less at a time."""
    for start, stop in ranges:
        position = start
        while position < stop:
            if not order.is_shuffled:
                (table,) = rows.take(stop - position, at_least_one=True)
                position += len(table)
                yield table
                continue
            first, last = order.window(position)
            window = pa.concat_tables(rows.take(last - first))
            numbers = order.shuffled(first, last)[position - first : min(stop, last) - first]
            position += len(numbers)
            window_rows = _Window(window)
            for cut in range(0, len(numbers), most_rows):
                yield window_rows.pick(numbers[cut : cut + most_rows])
            del window_rows
            del window
            if process_bytes(os.getpid()) > most_held_bytes:
                pa.default_memory_pool().release_unused()  # it keeps the memory of each window for the next


class _Window:
    """Rows that are held to take any of them.

    Lists of equal length are NumPy arrays of two dimensions, of which rows are copied ten times faster than by pyarrow.
    """

    def __init__(self, rows: pa.Table) -> None:
        self._schema = rows.schema
        self._is_large = rows.nbytes > _LARGE_ROW_BYTES * len(rows)
        self._arrays: dict[str, Any] = {}
        for name in rows.column_names:
            if _is_list(rows.schema.field(name).type) and (array := _dense(rows.column(name))) is not None:
                self._arrays[name] = array
        others = rows.drop_columns(list(self._arrays))
        self._others = others if self._is_large else others.combine_chunks()

    def pick(self, numbers: Ints) -> pa.Table:
        """Return some rows, in this order."""
        if not self._others.num_columns:
            others = None
        elif self._is_large:  # nothing is copied yet
            others = pa.concat_tables([self._others.slice(number, 1) for number in numbers.tolist()])
        else:
            others = self._others.take(pa.array(numbers))
        columns = []
        for field in self._schema:
            if others is not None and field.name not in self._arrays:
                columns.append(others.column(field.name))
                continue
            values = self._arrays[field.name][numbers]
            flat = pa.array(values.reshape(-1))
            if pa.types.is_fixed_size_list(field.type):
                columns.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type))
                continue
            is_wide = pa.types.is_large_list(field.type)
            offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int64 if is_wide else np.int32)
            kind = pa.LargeListArray if is_wide else pa.ListArray
            columns.append(kind.from_arrays(pa.array(offsets), flat, type=field.type))
        return pa.Table.from_arrays(columns, schema=self._schema)


def _dense(column: Any) -> Any:
    """Return a column of lists of numbers as one array of two dimensions, if all have one length and none is null."""
    parts: list[Any] = []
    for chunk in column.chunks:
        values = chunk.flatten()
        kind = values.type
        if chunk.null_count or values.null_count or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            return None
        lengths = pc.unique(pc.list_value_length(chunk))
        if len(lengths) != 1 or not lengths[0].as_py() or (parts and parts[0].shape[1] != lengths[0].as_py()):
            return None
        parts.append(values.to_numpy().reshape(len(chunk), -1))
    return (parts[0] if len(parts) == 1 else np.concatenate(parts)) if parts else None


def as_arrays(table: pa.Table) -> dict[str, Any]:
    """Return columns as NumPy arrays: lists of equal length as one array of two dimensions, bytes and texts as objects.

    A column with null values has objects or, if it has numbers, floats with NaN. The arrays can be written to, as torch
    requires of memory that it takes over.
    """
    arrays = {name: _array(column) for name, column in zip(table.column_names, table.columns, strict=True)}
    return {name: array if array.flags.writeable else array.copy() for name, array in arrays.items()}


def _array(column: Any) -> Any:
    if isinstance(column, pa.ChunkedArray):
        if not _is_list(column.type):
            return column.to_numpy()  # of many chunks, without joining them
        column = column.combine_chunks()
    if not _is_list(column.type):
        return column.to_numpy(zero_copy_only=False)
    if column.null_count == 0 and len(column):
        lengths = pc.list_value_length(column)
        if pc.all(pc.equal(lengths, lengths[0])).as_py():
            values = column.flatten()
            if values.null_count == 0 and (_is_list(values.type) or _is_number(values.type)):
                inner = _array(values)
                if inner.dtype != object:
                    return inner.reshape(len(column), lengths[0].as_py(), *inner.shape[1:])
    found = np.empty(len(column), object)
    for number, value in enumerate(column):
        found[number] = None if value.values is None else _array(value.values).copy()
    return found


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
