"""Weigh rows, and cut a row of weights into consecutive runs: rows into shards, row groups and pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.file_set import Ints

# What the columns of a row group other than those of files may take: pyarrow holds them while it writes.
GROUP_VALUE_BYTES = 32_000_000
# Values of a shard that take more than this are written by way of the disk.
HELD_VALUE_BYTES = 16_000_000
_OTHER_BYTES = 16  # of a value whose size is not worth finding out


def running(values: Ints) -> Ints:
    """The sum of all values before each place; one longer than the values."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(values)]).astype(np.int64)


def fill(weights: Ints, limit: int, max_count: int | None = None) -> Ints:
    """Boundaries of runs, each as long as its weight stays within `limit`; a heavier item stands alone.

    A cut depends only on what comes before it, so items added at the end leave earlier runs as they are.
    """
    return fill_all([(running(weights), limit)], max_count)


def fill_all(totals: list[tuple[Ints, int]], max_count: int | None = None) -> Ints:
    """Boundaries of runs that stay within several limits at once, each with running sums of its own."""
    count = len(totals[0][0]) - 1
    cuts = [0]
    while cuts[-1] < count:
        start = cuts[-1]
        end = min(int(np.searchsorted(total, total[start] + limit, side="right")) - 1 for total, limit in totals)
        if max_count is not None:
            end = min(end, start + max_count)
        cuts.append(min(max(end, start + 1), count))
    return np.array(cuts, np.int64)


def share(weights: Ints, count: int) -> Ints:
    """Boundaries of exactly `count` runs of about equal weight, none empty (so `count` ≤ items)."""
    total = np.cumsum(weights)
    goal = total[-1] * np.arange(1, count, dtype=np.float64) / count
    cuts = np.concatenate([[0], np.searchsorted(total, goal, side="left") + 1, [len(weights)]])
    for i in range(1, count):  # heavy items pull neighbouring cuts together: push them apart again
        cuts[i] = min(max(cuts[i], cuts[i - 1] + 1), len(weights) - (count - i))
    return cuts.astype(np.int64)


def list_lengths(lists: Any) -> Ints:
    """Return how many elements each list has; 0 for null."""
    return np.asarray(pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False), np.int64)


def row_bytes(table: pa.Table) -> Ints:
    """About how many bytes each row takes."""
    columns = (column_bytes(column) for column in table.columns)
    return sum(columns, np.zeros(len(table), np.int64))


def column_bytes(column: pa.ChunkedArray) -> Ints:
    """About how many bytes each value of a column takes, chunk by chunk: nothing is copied but lengths."""
    return np.concatenate([np.zeros(0, np.int64), *(_value_bytes(chunk) for chunk in column.chunks)])


def _value_bytes(array: Any) -> Ints:
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return _value_bytes(array.storage)
    if pa.types.is_dictionary(kind):
        sizes = np.append(_value_bytes(array.dictionary), _value_bytes(pa.nulls(1, kind.value_type)))
        codes = array.indices.cast(pa.int64()).fill_null(len(sizes) - 1)
        return np.asarray(sizes[codes.to_numpy(zero_copy_only=False)], np.int64)
    if str(kind) in ("string", "large_string", "binary", "large_binary"):
        return np.asarray(pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64) + 4
    if len(array) and (pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)):  # no kernel tells their lengths
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)[array.offset : array.offset + len(array)]
        return np.where(array.is_valid().to_numpy(zero_copy_only=False), views[:, 0], 0).astype(np.int64) + 4
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = list_lengths(array)
        if pa.types.is_primitive(kind.value_type):
            return lengths * _width(kind.value_type) + 4
        before = running(_value_bytes(array.flatten()))
        ends = np.cumsum(lengths)
        return np.asarray(before[ends] - before[ends - lengths], np.int64) + 4
    if pa.types.is_fixed_size_list(kind):
        if pa.types.is_primitive(kind.value_type):
            return np.full(len(array), kind.list_size * _width(kind.value_type), np.int64)
        values = array.values.slice(array.offset * kind.list_size, len(array) * kind.list_size)
        return np.asarray(_value_bytes(values).reshape(len(array), kind.list_size).sum(axis=1, dtype=np.int64))
    if pa.types.is_struct(kind):
        return sum((_value_bytes(child) for child in array.flatten()), np.zeros(len(array), np.int64))
    return np.full(len(array), _width(kind), np.int64)


def _width(kind: pa.DataType) -> int:
    return max(kind.bit_width // 8, 1) if pa.types.is_primitive(kind) else _OTHER_BYTES


def arrow_bytes(data: pa.Table | pa.RecordBatch | pa.ChunkedArray | pa.Array) -> int:
    """What Arrow data takes. pyarrow below 24 cannot weigh views of strings by their part: by their buffers then."""
    try:
        return int(data.nbytes)
    except pa.ArrowTypeError:
        return int(data.get_total_buffer_size())
