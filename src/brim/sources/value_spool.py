"""Values that had to be decoded or fetched, on disk as long as the table that refers to them exists."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim import partition as cuts
from brim.file_set import Segments
from brim.formats.file_views import FileView
from brim.formats.nested_values import map_leaves
from brim.formats.parquet_footer import Leaf
from brim.formats.parquet_levels import levels_of
from brim.formats.parquet_values import FoundValues, Spooling
from brim.formats.range_readers import Readable
from brim.sources.file_table import FileTable, contents_of, one_array
from brim.sources.table_spool import TableSpool
from brim.state.scratch import Scratch, scratch_failures

DECODED_ROWS = 16  # of a column of bytes, decoded at a time
_BATCH_BYTES, _BATCH_ROWS = 16_000_000, 1024


class ValueSpool(Scratch):
    """A temporary file of values, which shards read like a file of the source."""

    name = "the spool"

    def __init__(self, folder: str | None = None) -> None:
        super().__init__(folder, needs_path=True)
        self.size = 0

    def append(self, data: Any) -> int:
        """Append data, and return its offset."""
        start = self.size
        self.write_at(start, data)
        return start

    def write_at(self, offset: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.size = max(self.size, offset + len(view))
        with scratch_failures():
            while view:
                step = os.pwrite(self.descriptor, view, offset)
                view, offset = view[step:], offset + step

    def extend(self, size: int) -> None:
        """Make the file at least this large. Bytes that are not written take no disk."""
        with scratch_failures():
            os.ftruncate(self.descriptor, max(size, self.size))
        self.size = max(size, self.size)

    def read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self.descriptor, size, offset)

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        raise NotImplementedError  # values of a spool are written by splices

    def stat(self, mtime_ns: int) -> os.stat_result:
        """Return the state of the file, with the time of its source: a repeated job recognizes the spool by it."""
        os.utime(self.descriptor, ns=(mtime_ns, mtime_ns))
        return os.fstat(self.descriptor)


def decode_chunk(file: Readable, group: int, leaf: Leaf, spool: Spooling) -> FoundValues:
    """Decode all values of a column chunk to the spool with pyarrow, a few rows at a time."""
    parts: list[list[Any]] = [[], [], []]  # rows and levels
    starts, sizes, row_count = list[int](), list[int](), 0
    with pq.ParquetFile(FileView(file), pre_buffer=False, buffer_size=1 << 20) as parquet:
        for batch in parquet.reader.iter_batches(DECODED_ROWS, [group], [leaf.number], use_threads=False):
            field, array = batch.schema.field(0), batch.column(0)
            levels = levels_of(array, field.nullable)
            rows = row_count + np.cumsum(levels.repetition == 0) - 1
            for part, values in zip(parts, (rows, levels.repetition, levels.definition), strict=True):
                part.append(values)
            row_count += len(array)
            while not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
                array = array.drop_null()  # only lists and structs that hold values are looked into
                array = array.field(0) if pa.types.is_struct(array.type) else array.flatten()
            for value in array.drop_null():
                data = value.as_buffer()
                starts.append(spool.append(data) if data is not None else 0)
                sizes.append(0 if data is None else data.size)
    none = np.zeros(0, np.int64)
    columns = [np.concatenate([none, *part]) for part in parts]
    return FoundValues(
        columns[0], columns[1].astype(np.uint8), columns[2].astype(np.uint8), np.ones(len(sizes), bool),
        np.array(starts, np.int64), np.array(sizes, np.int64), Segments(np.zeros(1, np.int64), none, none),
    )  # fmt: skip


def with_content(table: FileTable, names: Collection[str]) -> FileTable:
    """Return a table with the bytes of some nested columns in them, on disk, for a source that has no numbers there."""
    kinds = {name: table.nested[name] for name in names}
    schema = pa.schema([pa.field(name, kind) for name, kind in kinds.items()])
    sizes = sum((table.cell_bytes(name, table.files.sizes) for name in kinds), np.zeros(len(table), np.int64))

    def fill(cells: Any, kind: pa.DataType) -> pa.Array:
        return pa.array(contents_of(table.files, cells), kind)

    def batches() -> Iterator[pa.RecordBatch]:
        for start, stop in itertools.pairwise(cuts.fill(sizes, _BATCH_BYTES, _BATCH_ROWS).tolist()):
            rows = table.rows.slice(start, stop - start)
            arrays = [map_leaves(one_array(rows.column(name)), kind, kind, fill) for name, kind in kinds.items()]
            yield pa.record_batch(arrays, schema=schema)

    spool = TableSpool()
    spool.write(schema, batches())
    (filled,), rows = spool.tables(), table.rows
    for name, kind in kinds.items():
        index = rows.column_names.index(name)
        rows = rows.set_column(index, rows.schema.field(name).with_type(kind), filled.column(name))
    nested = {name: kind for name, kind in table.nested.items() if name not in kinds}
    return table.replace(rows=rows, nested=nested)
