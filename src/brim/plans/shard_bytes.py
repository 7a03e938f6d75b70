"""From a plan's shard to its bytes: the one place where plans and formats meet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.file_set import FileSet, Ints
from brim.formats.file_views import FileView
from brim.formats.parquet_footer import open_parquet
from brim.formats.parquet_locate import locate_parquet
from brim.formats.parquet_writer import splice_parquet
from brim.formats.range_readers import Readable, ShardFile
from brim.formats.splice import FileSplice, Splice
from brim.formats.tar_shard import locate_tar, splice_tar, tar_rows
from brim.plans.cut_shards import Shard
from brim.plans.plan import Format, Plan
from brim.records import dataclass

_EMPTY_PAGE_BYTES, _EMPTY_VALUE_BYTES = 128, 5


class Slice(Protocol):
    """The part of a job that one shard needs: it can be pickled, and makes the shard's bytes on any machine."""

    def splice(self) -> Splice:
        """The bytes of the shard. Close it after use."""


@dataclass(frozen=True, slots=True)
class PlanSlice:
    """A shard's rows, with the files of each file column in order: numbers in `files`."""

    format: Format
    table: pa.Table
    files: FileSet
    numbers: Mapping[str, Ints]
    first_row: int  # of the shard in its split

    def splice(self, scratch_folder: str | None = None) -> Splice:
        """Close it after use: what is too large to hold lies in `scratch_folder` until then."""
        if self.format == "parquet":
            return splice_parquet(self.table, self.files, self.numbers, scratch_folder)
        return splice_tar(self.table, self.files, self.numbers, self.first_row)

    def __reduce__(self) -> tuple[Any, ...]:
        """Only the files of this shard travel, and of a table that is a part of another one only that part."""
        every = np.unique(np.concatenate([np.zeros(0, np.int64), *self.numbers.values()]))
        numbers = {name: np.searchsorted(every, of) for name, of in self.numbers.items()}
        columns = [_packed(self.table, name) for name in range(self.table.num_columns)]
        schema = self.table.schema.serialize().to_pybytes()
        rest = (self.format, schema, columns, self.files.take(every).anywhere(), numbers, self.first_row)
        return _unpacked, rest


@dataclass(frozen=True, slots=True)
class FileSlice:
    """A shard that is a file already, at a place that every machine sees."""

    path: Path

    def splice(self) -> Splice:
        return FileSplice(self.path)


def _packed(table: pa.Table, column: int) -> bytes:
    """One column, chunk by chunk: how a table is cut into chunks decides where the pages of its Parquet end."""
    out, schema = pa.BufferOutputStream(), pa.schema([table.schema.field(column)])
    with pa.ipc.new_stream(out, schema) as stream:
        for chunk in table.column(column).chunks:
            stream.write_batch(pa.record_batch([chunk], schema=schema))
    return bytes(memoryview(out.getvalue()))


def _unpacked(
    format: Format, schema: bytes, columns: list[bytes], files: FileSet, numbers: dict[str, Ints], first: int
) -> PlanSlice:
    fields = pa.ipc.read_schema(pa.py_buffer(schema))
    arrays = []
    for field, data in zip(fields, columns, strict=True):
        batches = list(pa.ipc.open_stream(data))
        arrays.append(pa.chunked_array([batch.column(0) for batch in batches], field.type))
    return PlanSlice(format, pa.Table.from_arrays(arrays, schema=fields), files, numbers, first)


def slice_of(plan: Plan, shard: Shard) -> PlanSlice:
    """What of a plan one shard needs."""
    table, numbers = plan.shard_table(shard)
    split = next((split for split in plan.table.splits if split.name == shard.split), None)
    first = 0 if split is None else shard.start - split.start
    return PlanSlice(plan.format, table, plan.table.files, numbers, first)


def splice_of(plan: Plan, shard: Shard, scratch_folder: str | None = None) -> Splice:
    """The bytes of a shard. Close it after use: what is too large to hold lies in `scratch_folder` until then."""
    return slice_of(plan, shard).splice(scratch_folder)


def locate(shard: Readable, footer_of: Readable | None = None) -> Iterator[ShardFile]:
    """Every file inside a shard. One that only goes forwards needs its footer from elsewhere."""
    return locate_tar(shard) if shard.name.endswith(".tar") else locate_parquet(shard, footer_of)


def count_rows(shard: Readable) -> int | None:
    """From the footer; a tar or an Arrow stream has none, and is read through its headers. None: it has no rows."""
    if shard.name.endswith(".tar"):
        return tar_rows(shard)
    if shard.name.endswith(".arrow"):
        with pa.ipc.open_stream(FileView(shard)) as stream:
            return sum(int(batch.num_rows) for batch in stream)
    if not shard.name.endswith(".parquet"):
        return None
    with open_parquet(shard) as parquet:
        return int(parquet.metadata.num_rows)


def hollow_in(file: pq.ParquetFile) -> list[str]:
    """File columns of a Parquet shard in which no file has any content: only paths were uploaded."""
    content: dict[str, bool] = {}
    footer = file.metadata
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        chunks = [row_group.column(number) for number in range(row_group.num_columns)]
        columns = {chunk.path_in_schema: number for number, chunk in enumerate(chunks)}
        for path, number in columns.items():
            stem, _, leaf = path.rpartition(".")
            if leaf == "bytes" and f"{stem}.path" in columns:
                content[stem] = content.get(stem, False) or not _is_hollow(file, group, number)
    return [stem.removesuffix(".list.element") for stem, has in content.items() if not has and footer.num_rows]


def _is_hollow(file: pq.ParquetFile, group: int, number: int) -> bool:
    """Whether all values are absent or empty, by what the footer says of them, else by their size, else by reading."""
    chunk = file.metadata.row_group(group).column(number)
    statistics = chunk.statistics
    if statistics is not None and statistics.has_null_count and statistics.null_count == chunk.num_values:
        return True
    if statistics is not None and statistics.has_min_max:
        return bool(statistics.max in (b"", ""))
    # Without statistics, as brim writes: empty and absent values take their levels and lengths alone.
    if chunk.total_uncompressed_size > _EMPTY_PAGE_BYTES + _EMPTY_VALUE_BYTES * chunk.num_values:
        return False
    import pyarrow.compute as pc  # of use where files are a few bytes long

    values = file.reader.read_row_group(group, column_indices=[number], use_threads=False).column(0)
    while not pa.types.is_binary(values.type) and not pa.types.is_large_binary(values.type):
        if pa.types.is_struct(values.type):
            values = pa.chunked_array([chunk.flatten()[0] for chunk in values.chunks], values.type.field(0).type)
        elif pa.types.is_nested(values.type):
            values = pc.list_flatten(values)
        else:
            return False  # texts under that name: nothing that a file would be
    return not pc.any(pc.greater(pc.binary_length(values), 0)).as_py()
