"""From a plan's shard to its bytes: the one place where plans and formats meet."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from brim.formats.found import Found
from brim.formats.parquet import splice_parquet
from brim.formats.parquet_index import locate_parquet
from brim.formats.readable import Readable, ReadableFile
from brim.formats.splice import Splice
from brim.formats.tar import locate_tar, splice_tar, tar_rows
from brim.plans.cut import Shard
from brim.plans.plan import Plan

_EMPTY_PAGE_BYTES, _EMPTY_VALUE_BYTES = 128, 5


def splice_of(plan: Plan, shard: Shard, scratch_folder: str | None = None) -> Splice:
    """The bytes of a shard. Close it after use: what is too large to hold lies in `scratch_folder` until then."""
    table, numbers = plan.shard_table(shard)
    if plan.format == "parquet":
        return splice_parquet(table, plan.table.files, numbers, scratch_folder)
    split = next(split for split in plan.table.splits if split.name == shard.split)
    return splice_tar(table, plan.table.files, numbers, shard.start - split.start)


def locate(shard: Readable, footer_of: Readable | None = None) -> Iterator[Found]:
    """Every file inside a shard. One that only goes forwards needs its footer from elsewhere."""
    return locate_tar(shard) if shard.name.endswith(".tar") else locate_parquet(shard, footer_of)


def count_rows(shard: Readable) -> int | None:
    """From the footer; a tar or an Arrow stream has none, and is read through its headers. None: it has no rows."""
    if shard.name.endswith(".tar"):
        return tar_rows(shard)
    if shard.name.endswith(".arrow"):
        with pa.ipc.open_stream(ReadableFile(shard)) as stream:
            return sum(int(batch.num_rows) for batch in stream)
    return int(pq.read_metadata(ReadableFile(shard)).num_rows) if shard.name.endswith(".parquet") else None


def hollow_columns(shard: Readable) -> list[str]:
    """File columns of a Parquet shard in which no file has any content: only paths were uploaded."""
    if not shard.name.endswith(".parquet"):
        return []
    footer = pq.read_metadata(ReadableFile(shard))
    content: dict[str, bool] = {}
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        chunks = [row_group.column(number) for number in range(row_group.num_columns)]
        columns = {chunk.path_in_schema: chunk for chunk in chunks}
        for path, chunk in columns.items():
            stem, _, leaf = path.rpartition(".")
            if leaf == "bytes" and f"{stem}.path" in columns:
                content[stem] = content.get(stem, False) or not _is_hollow(chunk)
    return [stem.removesuffix(".list.element") for stem, has in content.items() if not has and footer.num_rows]


def _is_hollow(chunk: pq.ColumnChunkMetaData) -> bool:
    """Whether all values are absent or empty, by what the footer says of them, else by their size."""
    statistics = chunk.statistics
    if statistics is not None and statistics.has_null_count and statistics.null_count == chunk.num_values:
        return True
    if statistics is not None and statistics.has_min_max:
        return bool(statistics.max in (b"", ""))
    # Without statistics, as brim writes: empty and absent values take their levels and lengths alone.
    return bool(chunk.total_uncompressed_size <= _EMPTY_PAGE_BYTES + _EMPTY_VALUE_BYTES * chunk.num_values)
