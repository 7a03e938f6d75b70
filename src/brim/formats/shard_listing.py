"""What a manifest tells of a shard, so that rows are chosen from afar without asking for the shard itself.

Its small columns as they are, and the sizes of the values of its file columns: these lie between the values, and could
only be read with them. A shard stays byte for byte what it is. Written where a manifest is published, beside the
receipts, as records that readers who do not know them pass over.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from brim.file_set import Ints
from brim.formats.nested_values import byte_leaves, without_bytes
from brim.formats.parquet_levels import Levels, decode_levels, encode_levels, levels_of
from brim.formats.parquet_shard import is_of_files
from brim.formats.parquet_values import Leaf, PageSpan
from brim.records import dataclass

LISTING = "listing"  # the type of the record
MOST_LISTING_BYTES = 6_000_000  # of all listings of a split: the Hub takes no larger text
_MOST_UNPACKED = 64_000_000
_LEAST_HEAD, _MOST_HEAD = 8, 4096  # what stands before the first value of a page: its header and levels


@dataclass(frozen=True, slots=True)
class ListedValues:
    """The slots of a file column, and the sizes of those that are values."""

    repetition: Ints
    definition: Ints
    sizes: Ints


@dataclass(frozen=True)
class ShardListing:
    """What a manifest tells of one shard."""

    rows: int
    record: Mapping[str, Any]

    @cached_property
    def small(self) -> pa.Table:
        """The columns that are not bytes; of files, their paths."""
        with pa.ipc.open_stream(_unpacked(self.record["rows"])) as stream:
            table = stream.read_all()
        table.validate(full=True)
        if table.num_rows != self.rows:
            raise ValueError("a manifest lists other rows than a shard has")
        return table

    def values(self, leaf: Leaf, inside: int | None = None) -> ListedValues | None:
        """Of the column that a leaf belongs to, if it is listed and the leaf is as it was.

        `inside` counts the leaves of bytes of a column that has them deep inside, of which this is one.
        """
        if inside is None:
            said = self.record["values"].get(leaf.path[0])
        else:
            several = self.record.get("inside", {}).get(leaf.path[0], [])
            said = several[inside] if inside < len(several) else None
        if said is None or said["levels"] != [leaf.max_repetition, leaf.max_definition]:
            return None
        slots = int(said["slots"])
        if not 0 <= slots <= _MOST_UNPACKED // 8:
            raise ValueError("a manifest lists more values than a shard holds")
        repetition, definition = (
            decode_levels(_unpacked(text), slots, maximum)[0]
            for text, maximum in zip(said["slot_levels"], said["levels"], strict=True)
        )
        sizes = np.cumsum(np.frombuffer(_unpacked(said["sizes"]), "<i8"))
        return ListedValues(repetition, definition, sizes)


def listing_record(name: str, table: pa.Table, sizes: Mapping[str, Ints]) -> dict[str, Any]:
    """The record of a shard: `table` is its rows with empty files, `sizes` those of the values of its file columns,
    one leaf of bytes after the other."""
    values: dict[str, Any] = {}
    inside: dict[str, Any] = {}
    for column, of in sizes.items():
        field, used, leaves = table.schema.field(column), 0, []
        for path, _ in byte_leaves(field.type, field.nullable) or ():
            levels = levels_of(table.column(column), field.nullable, path)
            count = int(np.count_nonzero(levels.definition == levels.max_definition))
            leaves.append(_values_record(levels, of[used : used + count]))
            used += count
        if is_of_files(field.type):
            (values[column],) = leaves
        else:
            inside[column] = leaves
    out = pa.BufferOutputStream()
    small = _without_bytes(table, sizes)
    with pa.ipc.new_stream(out, small.schema) as stream:
        stream.write_table(small)
    told = {"type": LISTING, "name": name, "rows": _packed(memoryview(out.getvalue())), "values": values}
    return told | ({"inside": inside} if inside else {})


def _values_record(levels: Levels, sizes: Ints) -> dict[str, Any]:
    steps = np.diff(sizes, prepend=0).astype("<i8")
    return {
        "levels": [levels.max_repetition, levels.max_definition],
        "slots": len(levels.definition),
        "slot_levels": [
            _packed(encode_levels(levels.repetition, levels.max_repetition)),
            _packed(encode_levels(levels.definition, levels.max_definition)),
        ],
        "sizes": _packed(steps.tobytes()),
    }


def _without_bytes(table: pa.Table, files: Mapping[str, Any]) -> pa.Table:
    columns, fields = [], []
    for field in table.schema:
        array = table.column(field.name).combine_chunks()
        array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
        if field.name in files:
            found = without_bytes(array)
            if found is not None:
                columns.append(found)
                fields.append(pa.field(field.name, found.type, field.nullable))
        elif not holds_bytes(field.type):
            columns.append(array)
            fields.append(field.remove_metadata())
    if not columns:
        return pa.table({"": pa.nulls(len(table))})
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def holds_bytes(kind: pa.DataType) -> bool:
    """Whether there are bytes in values of a type, that nobody said to be text."""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return True
    return any(holds_bytes(kind.field(number).type) for number in range(kind.num_fields))


def _packed(data: bytes | memoryview) -> str:
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _unpacked(text: str) -> bytes:
    """A manifest may come from a stranger: no more than some megabytes are made of it."""
    stream = zlib.decompressobj()
    data = stream.decompress(base64.b64decode(text, validate=True), _MOST_UNPACKED)
    if not stream.eof:
        raise ValueError("a manifest is larger than it can be")
    return data


@dataclass(frozen=True, slots=True)
class ListedPlaces:
    """The slots of a row group, and where its values are in the file."""

    rows: Ints
    repetition: Ints
    definition: Ints
    starts: Ints
    sizes: Ints


def places_in_pages(
    listed: ListedValues, full: int, pages: list[PageSpan], first_row: int, last_row: int
) -> ListedPlaces | None:
    """Where the values of a row group lie, by their sizes and the pages of an uncompressed column; None if they cannot
    be what lies there. `full` is the definition level of a value; rows are counted from the row group's first."""
    row_of = np.cumsum(listed.repetition == 0) - 1
    is_value = listed.definition == full
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_value)])
    if before[-1] != len(listed.sizes) or (len(listed.sizes) and listed.sizes.min() < 0):
        return None
    low, high = np.searchsorted(row_of, [first_row, last_row])
    rows, definition = row_of[low:high] - first_row, listed.definition[low:high]
    sizes = listed.sizes[before[low] : before[high]]
    value_rows = rows[definition == full]
    starts = np.zeros(len(sizes), np.int64)
    for page in pages:
        a, b = np.searchsorted(value_rows, [page.first, page.stop])
        slots = int(np.diff(np.searchsorted(rows, [page.first, page.stop]))[0])
        own = sizes[a:b] + 4
        head = page.size - int(own.sum())
        if not _LEAST_HEAD <= head <= _MOST_HEAD + slots:
            return None
        starts[a:b] = page.offset + head + np.cumsum(own) - sizes[a:b]
    return ListedPlaces(rows, listed.repetition[low:high], definition, starts, sizes)
