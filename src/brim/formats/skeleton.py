"""The skeleton of a Parquet shard: what pyarrow writes before the files are spliced in.

Small ones stay in memory. One of long texts goes to a scratch file, row group by row group, so that a shard
costs the memory of a row group however large it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from brim.cuts import HELD_VALUE_BYTES
from brim.fileset import Ints
from brim.formats.scratch import Scratch
from brim.formats.splice import SpliceBuilder


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A Parquet file, in memory or in a scratch file."""

    held: memoryview | Scratch
    size: int

    @property
    def scratch(self) -> Scratch | None:
        return self.held if isinstance(self.held, Scratch) else None

    def read(self, start: int, size: int) -> bytes:
        if isinstance(self.held, Scratch):
            return self.held.read(start, size)
        return bytes(self.held[start : start + size])

    def move(self, out: SpliceBuilder, start: int, size: int) -> None:
        """Let a range of it be the next part of a splice."""
        if isinstance(self.held, Scratch):
            out.scratch(start, size)
        else:
            out.literal(self.read(start, size))


def write_skeleton(
    table: pa.Table, groups: Ints, value_bytes: int, folder: str | None, huge: Collection[str] = ()
) -> Skeleton:
    """Write the rows, a row group for each run of `groups`; `value_bytes` says whether to do it on disk.

    Columns of `huge` values get no dictionary and no statistics: pyarrow would hold such a value eight times.
    """
    options = _options(table, huge)
    if value_bytes <= HELD_VALUE_BYTES:
        sink = pa.BufferOutputStream()
        _write(sink, table, groups, options)
        data = memoryview(sink.getvalue()).cast("B")
        return Skeleton(data, len(data))
    scratch = Scratch(folder)
    with open(scratch.descriptor, "wb", closefd=False) as file:
        _write(file, table, groups, options)
        return Skeleton(scratch, file.tell())


def _options(table: pa.Table, huge: Collection[str]) -> dict[str, Any]:
    if not huge:
        return {}
    empty = pa.BufferOutputStream()
    pq.write_table(table.slice(0, 0), empty)
    schema = pq.ParquetFile(pa.BufferReader(empty.getvalue())).schema
    leaves = [schema.column(number).path for number in range(len(schema.names))]
    others = [leaf for leaf in leaves if not any(leaf == name or leaf.startswith(f"{name}.") for name in huge)]
    return {"use_dictionary": others or False, "write_statistics": others or False}


def _write(sink: object, table: pa.Table, groups: Ints, options: dict[str, Any]) -> None:
    with pq.ParquetWriter(sink, table.schema, compression="snappy", write_page_index=True, **options) as writer:
        for start, end in zip(groups[:-1].tolist(), groups[1:].tolist(), strict=True):
            writer.write_table(table.slice(start, end - start), row_group_size=end - start)
