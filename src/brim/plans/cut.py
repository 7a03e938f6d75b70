"""Cut the rows of a file table into shards by the true size of their files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from brim import cuts
from brim.errors import InputError
from brim.fileset import Ints
from brim.plans.weights import metadata_bytes
from brim.sizes import format_size
from brim.sources.filetable import FileTable, Split

DEFAULT_SHARD_BYTES = 500_000_000
MOST_SHARDS = 5_000  # by default; the Hub takes 10,000 entries a folder


@dataclass(frozen=True, slots=True)
class CutOptions:
    """How the user wants the shards. One of size, number and rows; `shard_by` goes with size or number."""

    shard_bytes: int | None = None
    num_shards: int | None = None
    rows_per_shard: int | None = None
    shard_by: str | None = None

    def __post_init__(self) -> None:
        chosen = [n for n in (self.shard_bytes, self.num_shards, self.rows_per_shard) if n is not None]
        if len(chosen) > 1:
            raise InputError("Choose one of --shard-size, --num-shards and --rows-per-shard.")
        if any(not 0 < n < 2**62 for n in chosen):
            raise InputError("--num-shards and --rows-per-shard take a number above zero.")
        if self.shard_by is not None and self.rows_per_shard is not None:
            raise InputError("--shard-by keeps all rows of a value together, so --rows-per-shard cannot hold.")

    def facts(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows `start` to `stop` of the plan's table, and the file they become."""

    name: str
    split: str
    start: int
    stop: int
    file_bytes: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def cut_shards(
    table: FileTable, extension: str, options: CutOptions, max_rows: int | None = None, folder: str = "data"
) -> tuple[FileTable, tuple[Shard, ...], str]:
    """The table in the order of its shards, the shards, and why there are so many."""
    table, groups = _grouped(table, options.shard_by)
    file_bytes = table.file_bytes()
    weights = file_bytes + metadata_bytes(table)  # so that a table of long texts is cut as well
    pieces = [(split, groups[(groups >= split.start) & (groups <= split.stop)]) for split in table.splits]
    boundaries, why = _boundaries(pieces, weights, options, max_rows)
    before = cuts.running(file_bytes)
    shards = []
    for split, edges in zip(table.splits, boundaries, strict=True):
        count = len(edges) - 1
        for number, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
            name = f"{folder}/{split.name}-{number:05d}-of-{count:05d}{extension}"
            shards.append(Shard(name, split.name, start, stop, int(before[stop] - before[start])))
    return table, tuple(shards), why


def _grouped(table: FileTable, column: str | None) -> tuple[FileTable, Ints]:
    """Rows of one value brought together (in order of first appearance), and where the groups begin and end."""
    if column is None:
        return table, np.arange(len(table) + 1, dtype=np.int64)
    if column not in table.rows.column_names or column in table.columns:
        names = [name for name in table.rows.column_names if name not in table.columns]
        raise InputError(
            f"--shard-by names {column!r}, which is not a column to group by.",
            hint=f"Columns are: {', '.join(names) or '(none)'}.",
        )
    values = table.rows.column(column).combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0)
    try:
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        codes = values.dictionary_encode(null_encoding="encode").indices.to_numpy().astype(np.int64)
    except pa.ArrowException as error:
        raise InputError(f"--shard-by cannot group by {column!r}, which holds {values.type}.") from error
    order = np.concatenate(
        [split.start + np.argsort(codes[split.start : split.stop], kind="stable") for split in table.splits]
    )
    codes = codes[order]
    starts = {0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), *(split.start for split in table.splits)}
    groups = np.array(sorted(starts | {len(table)}), np.int64)
    return table.replace(rows=table.rows.take(pa.array(order))), groups


def _boundaries(
    pieces: list[tuple[Split, Ints]], weights: Ints, options: CutOptions, max_rows: int | None
) -> tuple[list[Ints], str]:
    """For each split, the rows at which its shards begin and end."""
    total = cuts.running(weights)

    def by_size(limit: int) -> list[Ints]:
        return [edges[cuts.fill(np.diff(total[edges]), limit, max_rows)] for _, edges in pieces]

    if options.num_shards is not None:
        for split, edges in pieces:
            if options.num_shards > len(edges) - 1:
                what = f"values of {options.shard_by}" if options.shard_by else "rows"
                raise InputError(
                    f"--num-shards {options.num_shards} is more than the {len(edges) - 1} {what} of the split "
                    f"{split.name!r}.",
                )
        shared = [edges[cuts.share(np.diff(total[edges]), options.num_shards)] for _, edges in pieces]
        return shared, f"--num-shards {options.num_shards}" + (" for each split" if len(pieces) > 1 else "")
    if options.rows_per_shard is not None:
        step = options.rows_per_shard
        stepped = [np.append(np.arange(s.start, s.stop, step, dtype=np.int64), s.stop) for s, _ in pieces]
        return stepped, f"--rows-per-shard {step}"
    if options.shard_bytes is not None:
        kept = f", rows of one {options.shard_by} kept together" if options.shard_by else ""
        return by_size(options.shard_bytes), f"rows in order, up to {format_size(options.shard_bytes)} a shard{kept}"
    if options.shard_by is not None and sum(len(edges) - 1 for _, edges in pieces) <= MOST_SHARDS:
        return [edges for _, edges in pieces], f"one for each {options.shard_by}"
    limit = DEFAULT_SHARD_BYTES
    found = by_size(limit)
    while sum(len(edges) - 1 for edges in found) > MOST_SHARDS:
        limit *= 2  # in steps, so that a dataset that grows a little keeps its cuts
        found = by_size(limit)
    why = f"rows in order, up to {format_size(limit)} a shard"
    if max_rows is not None:
        why += f" and {max_rows:,} rows"
    if limit > DEFAULT_SHARD_BYTES:
        why += f" (larger than {format_size(DEFAULT_SHARD_BYTES)}, to stay below {MOST_SHARDS} files)"
    if options.shard_by is not None:
        why += f", rows of one {options.shard_by} kept together"
    return found, why
