"""List the contents of a shard in its manifest, so that rows can be selected remotely without reading the shard.

A listing has the small columns and the sizes of the values of file columns, which in the shard are between the values.
Shards do not change. Listings are records of a published manifest next to the receipts; readers that do not know them
skip them.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from brim.file_set import Ints, Segments
from brim.formats.parquet_footer import Leaf
from brim.formats.parquet_levels import byte_leaves, decode_levels, encode_levels, levels_of, without_bytes
from brim.formats.parquet_values import FoundValues, PageSpan
from brim.formats.parquet_writer import is_of_files
from brim.records import dataclass

LISTING = "listing"  # the type of the record
MOST_LISTING_BYTES = 6_000_000  # of all listings of a split: the Hub accepts no larger text file
_MAX_UNPACKED_BYTES = 64_000_000
_MIN_HEAD_BYTES, _MAX_HEAD_BYTES = 8, 4096  # the header and levels of a page, before its first value


@dataclass(frozen=True, slots=True)
class ListedValues:
    """The slots of a file column, and the sizes of its values."""

    repetition: Ints
    definition: Ints
    sizes: Ints


@dataclass(frozen=True)
class ShardListing:
    """The listing of one shard."""

    rows: int
    record: Mapping[str, Any]

    @cached_property
    def small(self) -> pa.Table:
        """The columns without bytes; of file columns, the paths."""
        with pa.ipc.open_stream(_unpacked(self.record["rows"])) as stream:
            table = stream.read_all()
        table.validate(full=True)
        if table.num_rows != self.rows:
            raise ValueError("a manifest lists other rows than a shard has")
        return table

    def values(self, leaf: Leaf, inside: int | None = None) -> ListedValues | None:
        """Return the values of a leaf if its column is listed with the same levels.

        `inside` is the number of the leaf among the leaves of bytes of a nested column.
        """
        if inside is None:
            listed = self.record["values"].get(leaf.path[0])
        else:
            nested = self.record.get("inside", {}).get(leaf.path[0], [])
            listed = nested[inside] if inside < len(nested) else None
        if listed is None or listed["levels"] != [leaf.max_repetition, leaf.max_definition]:
            return None
        slots = int(listed["slots"])
        if not 0 <= slots <= _MAX_UNPACKED_BYTES // 8:
            raise ValueError("a manifest lists more values than a shard holds")
        repetition, definition = (
            decode_levels(_unpacked(text), slots, maximum)[0]
            for text, maximum in zip(listed["slot_levels"], listed["levels"], strict=True)
        )
        sizes = np.cumsum(np.frombuffer(_unpacked(listed["sizes"]), "<i8"))
        return ListedValues(repetition, definition, sizes)


def listing_record(name: str, table: pa.Table, sizes: Mapping[str, Ints]) -> dict[str, Any]:
    """Make the listing of a shard.

    `table` has its rows with empty files, `sizes` the sizes of the values of each file column, one leaf after another.
    """
    values: dict[str, Any] = {}
    inside: dict[str, Any] = {}
    for column, all_sizes in sizes.items():
        field, used, records = table.schema.field(column), 0, []
        for path, _ in byte_leaves(field.type, field.nullable) or ():
            levels = levels_of(table.column(column), field.nullable, path)
            count = int(np.count_nonzero(levels.definition == levels.max_definition))
            steps = np.diff(all_sizes[used : used + count], prepend=0).astype("<i8")
            records.append(
                {
                    "levels": [levels.max_repetition, levels.max_definition],
                    "slots": len(levels.definition),
                    "slot_levels": [
                        _packed(encode_levels(levels.repetition, levels.max_repetition)),
                        _packed(encode_levels(levels.definition, levels.max_definition)),
                    ],
                    "sizes": _packed(steps.tobytes()),
                }
            )
            used += count
        if is_of_files(field.type):
            (values[column],) = records
        else:
            inside[column] = records
    out = pa.BufferOutputStream()
    small = _small_columns(table, sizes)
    with pa.ipc.new_stream(out, small.schema) as stream:
        stream.write_table(small)
    record = {"type": LISTING, "name": name, "rows": _packed(memoryview(out.getvalue())), "values": values}
    return record | ({"inside": inside} if inside else {})


def _small_columns(table: pa.Table, files: Mapping[str, Any]) -> pa.Table:
    """Return the columns without bytes; of file columns, the part without bytes."""
    columns, fields = [], []
    for field in table.schema:
        array = table.column(field.name).combine_chunks()
        array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
        if field.name in files:
            small = without_bytes(array)
            if small is not None:
                columns.append(small)
                fields.append(pa.field(field.name, small.type, field.nullable))
        elif not _has_bytes(field.type):
            columns.append(array)
            fields.append(field.remove_metadata())
    if not columns:
        return pa.table({"": pa.nulls(len(table))})
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _has_bytes(kind: pa.DataType) -> bool:
    """Return whether values of a type contain bytes that are not declared as text."""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return True
    return any(_has_bytes(kind.field(number).type) for number in range(kind.num_fields))


def _packed(data: bytes | memoryview) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _unpacked(text: str) -> bytes:
    """Unpack at most 64 MB, because a manifest may come from anyone."""
    stream = zlib.decompressobj()
    data = stream.decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED_BYTES)
    if not stream.eof:
        raise ValueError("a manifest is larger than it can be")
    return data


def locate_listed(
    listed: ListedValues, full: int, pages: list[PageSpan], first_row: int, last_row: int
) -> FoundValues | None:
    """Locate the values of a row group from their sizes and the pages of an uncompressed column.

    `full` is the definition level of a value; rows are counted from the first row of the row group. Returns None if the
    listing contradicts the pages.
    """
    row_of_slot = np.cumsum(listed.repetition == 0) - 1
    is_value = listed.definition == full
    values_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_value)])
    if values_before[-1] != len(listed.sizes) or (len(listed.sizes) and listed.sizes.min() < 0):
        return None
    low, high = np.searchsorted(row_of_slot, [first_row, last_row])
    rows, definition = row_of_slot[low:high] - first_row, listed.definition[low:high]
    sizes = listed.sizes[values_before[low] : values_before[high]]
    value_rows = rows[definition == full]
    starts = np.zeros(len(sizes), np.int64)
    for page in pages:
        first, last = np.searchsorted(value_rows, [page.first, page.stop])
        slots = int(np.diff(np.searchsorted(rows, [page.first, page.stop]))[0])
        cells = sizes[first:last] + 4
        head = page.size - int(cells.sum())
        if not _MIN_HEAD_BYTES <= head <= _MAX_HEAD_BYTES + slots:
            return None
        starts[first:last] = page.offset + head + np.cumsum(cells) - sizes[first:last]
    no_ranges = Segments(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64))
    spooled = np.zeros(len(sizes), bool)
    return FoundValues(rows, listed.repetition[low:high], definition, spooled, starts, sizes, no_ranges)
