"""Cut the rows of a file table into shards by the true size of their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
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
    """How the user wants the shards. One of size, number and rows; `shard_by` goes with size or number.

    `num_shards` is the number for each split, or a number by name of split; splits that are not named are
    cut by the default size.
    """

    shard_bytes: int | None = None
    num_shards: int | Mapping[str, int] | None = None
    rows_per_shard: int | None = None
    shard_by: str | None = None

    def __post_init__(self) -> None:
        chosen = [n for n in (self.shard_bytes, self.num_shards, self.rows_per_shard) if n is not None]
        if len(chosen) > 1:
            raise InputError("Choose one of --shard-size, --num-shards and --rows-per-shard.")
        counts = [n for one in chosen for n in (one.values() if isinstance(one, Mapping) else [one])]
        if any(not isinstance(n, int) or not 0 < n < 2**62 for n in counts):
            raise InputError("--num-shards and --rows-per-shard take a number above zero.")
        if self.shard_by is not None and self.rows_per_shard is not None:
            raise InputError("--shard-by keeps all rows of a value together, so --rows-per-shard cannot hold.")

    def count_of(self, split: str) -> int | None:
        """The number of shards asked for in a split."""
        return self.num_shards.get(split) if isinstance(self.num_shards, Mapping) else self.num_shards

    def facts(self) -> dict[str, Any]:
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in chosen.items()}
        return {name: value for name, value in plain.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows `start` to `stop` of the plan's table, and the file they become.

    `value_bytes` is what the other columns take before they are compressed.
    """

    name: str
    split: str
    start: int
    stop: int
    file_bytes: int
    value_bytes: int = 0

    @property
    def rows(self) -> int:
        return self.stop - self.start


def cut_shards(
    table: FileTable, extension: str, options: CutOptions, max_rows: int | None = None, folder: str = "data"
) -> tuple[FileTable, tuple[Shard, ...], str]:
    """The table in the order of its shards, the shards, and why there are so many."""
    table, groups = _grouped(table, options.shard_by)
    values_before = cuts.running(metadata_bytes(table))
    total = cuts.running(table.file_bytes())
    total += values_before  # so that a table of long texts is cut as well
    pieces = [(split, groups[slice(*np.searchsorted(groups, [split.start, split.stop + 1]))]) for split in table.splits]
    boundaries, why = _boundaries(pieces, total, options, max_rows)
    shards = []
    for split, edges in zip(table.splits, boundaries, strict=True):
        if split.start == split.stop:  # `datasets` gives a split without rows a shard all the same
            edges = np.array([split.start, split.stop], np.int64)
        count = len(edges) - 1
        for number, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
            name = f"{folder}/{split.name}-{number:05d}-of-{count:05d}{extension}"
            in_values = int(values_before[stop] - values_before[start])
            in_files = int(total[stop] - total[start]) - in_values
            shards.append(Shard(name, split.name, start, stop, in_files, in_values))
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
    pieces: list[tuple[Split, Ints]], total: Ints, options: CutOptions, max_rows: int | None
) -> tuple[list[Ints], str]:
    """For each split, the rows at which its shards begin and end; `total` is the running sum of rows' bytes."""

    def by_size(limit: int) -> list[Ints]:
        return [edges[cuts.fill_all([(total[edges], limit)], max_rows)] for _, edges in pieces]

    if options.num_shards is not None:
        return _by_number(pieces, total, options, by_size(DEFAULT_SHARD_BYTES))
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


def _by_number(
    pieces: list[tuple[Split, Ints]], total: Ints, options: CutOptions, otherwise: list[Ints]
) -> tuple[list[Ints], str]:
    """Splits cut into as many shards as asked for; those of which no number was said, as `otherwise` has it."""
    asked = options.num_shards
    if isinstance(asked, Mapping) and (strange := sorted(set(asked) - {split.name for split, _ in pieces})):
        names = ", ".join(split.name for split, _ in pieces)
        raise InputError(
            f"--num-shards names the split {strange[0]!r}, which is not there.", hint=f"There are: {names}."
        )
    found = []
    for (split, edges), default in zip(pieces, otherwise, strict=True):
        count, rows = options.count_of(split.name), len(edges) - 1
        if count is None or rows == 0:
            found.append(default)
            continue
        if count > rows:
            what = f"values of {options.shard_by}" if options.shard_by else "rows"
            raise InputError(f"--num-shards {count} is more than the {rows} {what} of the split {split.name!r}.")
        found.append(edges[cuts.share(np.diff(total[edges]), count)])
    if isinstance(asked, Mapping):
        return found, "--num-shards " + ", ".join(f"{name}={count}" for name, count in asked.items())
    return found, f"--num-shards {asked}" + (" for each split" if len(pieces) > 1 else "")
