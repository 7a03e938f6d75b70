"""Make the bytes of a plan's shards. The only module that connects plans and formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.file_set import FileSet, Ints
from brim.formats.parquet_footer import open_parquet
from brim.formats.parquet_reader import locate_parquet
from brim.formats.parquet_writer import splice_parquet
from brim.formats.range_readers import FileView, Readable, ShardFile
from brim.formats.splice import FileSplice, Splice
from brim.formats.tar_shard import locate_tar, splice_tar, tar_rows
from brim.plans.cut_shards import Shard
from brim.plans.plan import Format, Plan
from brim.records import dataclass

_EMPTY_PAGE_BYTES, _EMPTY_VALUE_BYTES = 128, 5


class Slice(Protocol):
    """The part of a plan for one shard. It can be pickled, and makes the shard's bytes on any machine."""

    def splice(self) -> Splice:
        """Return the bytes of the shard. Close the splice after use."""


@dataclass(frozen=True, slots=True)
class PlanSlice:
    """A shard's rows, with the files of each file column in order: numbers in `files`."""

    format: Format
    table: pa.Table
    files: FileSet
    numbers: Mapping[str, Ints]
    first_row: int  # of the shard in its split

    def splice(self, scratch_folder: str | None = None) -> Splice:
        """Return the bytes of the shard. Close it after use: large values are in `scratch_folder` until then."""
        if self.format == "parquet":
            return splice_parquet(self.table, self.files, self.numbers, scratch_folder)
        return splice_tar(self.table, self.files, self.numbers, self.first_row)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the files of this shard, and only its part of the table."""
        every = np.unique(np.concatenate([np.zeros(0, np.int64), *self.numbers.values()]))
        numbers = {name: np.searchsorted(every, column_numbers) for name, column_numbers in self.numbers.items()}
        columns = [_serialize_column(self.table, name) for name in range(self.table.num_columns)]
        schema = self.table.schema.serialize().to_pybytes()
        arguments = (self.format, schema, columns, self.files.take(every).anywhere(), numbers, self.first_row)
        return _restore_slice, arguments


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A shard that is already a file, on a disk that every machine sees."""

    path: Path

    def splice(self) -> Splice:
        return FileSplice(self.path)


def _serialize_column(table: pa.Table, column: int) -> bytes:
    """Serialize a column with its chunks, which determine where the pages of its Parquet file end."""
    out, schema = pa.BufferOutputStream(), pa.schema([table.schema.field(column)])
    with pa.ipc.new_stream(out, schema) as stream:
        for chunk in table.column(column).chunks:
            stream.write_batch(pa.record_batch([chunk], schema=schema))
    return bytes(memoryview(out.getvalue()))


def _restore_slice(
    format: Format, schema: bytes, columns: list[bytes], files: FileSet, numbers: dict[str, Ints], first: int
) -> PlanSlice:
    fields = pa.ipc.read_schema(pa.py_buffer(schema))
    arrays = []
    for field, data in zip(fields, columns, strict=True):
        batches = list(pa.ipc.open_stream(data))
        arrays.append(pa.chunked_array([batch.column(0) for batch in batches], field.type))
    return PlanSlice(format, pa.Table.from_arrays(arrays, schema=fields), files, numbers, first)


def slice_of(plan: Plan, shard: Shard) -> PlanSlice:
    """Return the part of a plan for one shard."""
    table, numbers = plan.shard_table(shard)
    split = next((split for split in plan.table.splits if split.name == shard.split), None)
    first = 0 if split is None else shard.start - split.start
    return PlanSlice(plan.format, table, plan.table.files, numbers, first)


def splice_of(plan: Plan, shard: Shard, scratch_folder: str | None = None) -> Splice:
    """Return the bytes of a shard. Close the splice after use: large values are in `scratch_folder` until then."""
    return slice_of(plan, shard).splice(scratch_folder)


def locate(shard: Readable, footer_of: Readable | None = None) -> Iterator[ShardFile]:
    """Yield every file inside a shard. A forward-only reader needs a second one for the footer."""
    return locate_tar(shard) if shard.name.endswith(".tar") else locate_parquet(shard, footer_of)


def count_rows(shard: Readable) -> int | None:
    """Count rows by the footer; of a tar or an Arrow stream by its headers. None for files without rows."""
    if shard.name.endswith(".tar"):
        return tar_rows(shard)
    if shard.name.endswith(".arrow"):
        with pa.ipc.open_stream(FileView(shard)) as stream:
            return sum(int(batch.num_rows) for batch in stream)
    if not shard.name.endswith(".parquet"):
        return None
    with open_parquet(shard) as parquet:
        return int(parquet.metadata.num_rows)


def columns_without_content(file: pq.ParquetFile) -> list[str]:
    """Return the file columns of a Parquet shard that have paths only: none of their files has content."""
    content: dict[str, bool] = {}
    footer = file.metadata
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        chunks = [row_group.column(number) for number in range(row_group.num_columns)]
        columns = {chunk.path_in_schema: number for number, chunk in enumerate(chunks)}
        for path, number in columns.items():
            stem, _, leaf = path.rpartition(".")
            if leaf == "bytes" and f"{stem}.path" in columns:
                content[stem] = content.get(stem, False) or not _has_no_content(file, group, number)
    return [
        stem.removesuffix(".list.element")
        for stem, has_content in content.items()
        if not has_content and footer.num_rows
    ]


def _has_no_content(file: pq.ParquetFile, group: int, number: int) -> bool:
    """Return whether all values are absent or empty, by the footer's statistics, else by size, else by reading."""
    chunk = file.metadata.row_group(group).column(number)
    statistics = chunk.statistics
    if statistics is not None and statistics.has_null_count and statistics.null_count == chunk.num_values:
        return True
    if statistics is not None and statistics.has_min_max:
        return bool(statistics.max in (b"", ""))
    # Without statistics, as brim writes: empty and absent values have only levels and lengths.
    if chunk.total_uncompressed_size > _EMPTY_PAGE_BYTES + _EMPTY_VALUE_BYTES * chunk.num_values:
        return False
    import pyarrow.compute as pc  # only needed for files of a few bytes

    values = file.reader.read_row_group(group, column_indices=[number], use_threads=False).column(0)
    while not pa.types.is_binary(values.type) and not pa.types.is_large_binary(values.type):
        if pa.types.is_struct(values.type):
            values = pa.chunked_array([chunk.flatten()[0] for chunk in values.chunks], values.type.field(0).type)
        elif pa.types.is_nested(values.type):
            values = pc.list_flatten(values)
        else:
            return False  # a text column of that name is not a file
    return not pc.any(pc.greater(pc.binary_length(values), 0)).as_py()
