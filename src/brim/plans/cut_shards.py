"""Cut the rows of a file table into shards by the true size of their files."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np
import pyarrow as pa

from brim import partition as cuts
from brim.errors import InputError
from brim.file_set import Ints
from brim.options.groups import ShardOptions
from brim.records import dataclass
from brim.safe_names import stays_below
from brim.sizes import format_size
from brim.sources.file_table import FileTable, Split
from brim.sources.table_spool import mapped_columns, spooled


def metadata_bytes(table: FileTable) -> Ints:
    """The bytes of each row's values outside of file columns."""
    total = np.zeros(len(table), np.int64)
    for name in table.rows.column_names:
        if name not in table.columns:
            total += cuts.column_bytes(table.rows.column(name))
    return total


DEFAULT_SHARD_BYTES = 500_000_000
MOST_SHARDS = 5_000  # by default; the Hub takes 10,000 entries a folder
_BLOCK = 10_000  # shards made at a time when all are asked for


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


def shard_name(folder: str, split: str, number: int, count: int, extension: str) -> str:
    """The Hub's convention, with more than five digits where five do not do.

    All numbers of a split have the same width: readers sort by name, and `datasets` would take a mixture of widths
    for those with five digits alone.
    """
    width = max(5, len(str(count - 1)))
    name = f"{folder}/{split}-{number:0{width}d}-of-{count:05d}{extension}"
    if "/" in split or not stays_below(name):
        raise InputError(
            f"The split name {split!r} cannot be part of a file name.",
            hint="Read one split with --from-split, and name it with --split.",
        )
    return name


@dataclass(frozen=True, slots=True, eq=False)
class Shards(Sequence[Shard]):
    """The shards of a plan, kept in columns: a million of them as Python objects take 300 MB.

    A split's shards stand together; `counts` says how many each split has.
    """

    folder: str
    extension: str
    splits: tuple[str, ...]
    counts: tuple[int, ...]
    starts: Ints
    stops: Ints
    file_bytes: Ints
    value_bytes: Ints

    @property
    def rows(self) -> Ints:
        """How many rows each has."""
        return self.stops - self.starts

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, at: int) -> Shard: ...
    @overload
    def __getitem__(self, at: slice) -> list[Shard]: ...
    def __getitem__(self, at: int | slice) -> Shard | list[Shard]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        ends = list(itertools.accumulate(self.counts))
        split = bisect_right(ends, number)
        first = ends[split] - self.counts[split]
        return next(self._made(split, first, number, number + 1))

    def __iter__(self) -> Iterator[Shard]:
        first = 0
        for split, count in enumerate(self.counts):
            for begin in range(first, first + count, _BLOCK):
                yield from self._made(split, first, begin, min(begin + _BLOCK, first + count))
            first += count

    def _made(self, split: int, first: int, begin: int, end: int) -> Iterator[Shard]:
        """Shards of one split, which begins at `first`."""
        name, count = self.splits[split], self.counts[split]
        columns = (self.starts, self.stops, self.file_bytes, self.value_bytes)
        values = (column[begin:end].tolist() for column in columns)
        for number, place in zip(range(begin - first, end - first), zip(*values, strict=True), strict=True):
            yield Shard(shard_name(self.folder, name, number, count, self.extension), name, *place)


def cut_shards(
    table: FileTable, extension: str, options: ShardOptions, max_rows: int | None = None, folder: str = "data"
) -> tuple[FileTable, Shards, str]:
    """The table in the order of its shards, the shards, and why there are so many."""
    table, groups = _grouped(table, options.shard_by)
    if new := [note for note in options.notes if note not in table.warnings]:
        table = table.replace(warnings=(*table.warnings, *new))
    values_before = cuts.running(metadata_bytes(table))
    total = cuts.running(table.file_bytes())
    total += values_before  # so that a table of long texts is cut as well
    pieces = [(split, groups[slice(*np.searchsorted(groups, [split.start, split.stop + 1]))]) for split in table.splits]
    boundaries, why = _boundaries(pieces, total, options, max_rows)
    # `datasets` gives a split without rows a shard all the same.
    edges = [
        np.array([split.start, split.stop], np.int64) if split.start == split.stop else found
        for split, found in zip(table.splits, boundaries, strict=True)
    ]
    none = np.zeros(0, np.int64)
    starts = np.concatenate([none, *(each[:-1] for each in edges)])
    stops = np.concatenate([none, *(each[1:] for each in edges)])
    in_values = values_before[stops] - values_before[starts]
    in_files = total[stops] - total[starts] - in_values
    splits, counts = tuple(split.name for split in table.splits), tuple(len(each) - 1 for each in edges)
    return table, Shards(folder, extension, splits, counts, starts, stops, in_files, in_values), why


def _grouped(table: FileTable, column: str | None) -> tuple[FileTable, Ints]:
    """Rows of one value brought together (in order of first appearance), and where the groups begin and end."""
    if column is None:
        return table, np.arange(len(table) + 1, dtype=np.int64)
    if column not in table.rows.column_names or column in table.columns:
        names = [name for name in table.rows.column_names if name not in table.columns]
        raise InputError(
            f"--shard-by names {column!r}, which is not a column that rows can be grouped by.",
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
    indices = pa.array(order)
    rows = spooled(table.rows, lambda columns: columns.take(indices))
    borrowed = mapped_columns(rows) if table.borrowed else table.borrowed
    return table.replace(rows=rows, borrowed=borrowed), groups


def _boundaries(
    pieces: list[tuple[Split, Ints]], total: Ints, options: ShardOptions, max_rows: int | None
) -> tuple[list[Ints], str]:
    """For each split, the rows at which its shards begin and end; `total` is the running sum of rows' bytes."""

    def by_size(limit: int) -> list[Ints]:
        return [edges[cuts.fill_all([(total[edges], limit)], max_rows)] for _, edges in pieces]

    if options.num_shards is not None:
        return _by_number(pieces, total, options, by_size(DEFAULT_SHARD_BYTES))
    if options.rows_per_shard is not None:
        step = options.rows_per_shard
        stepped = [np.append(np.arange(s.start, s.stop, step, dtype=np.int64), s.stop) for s, _ in pieces]
        return stepped, f"{step:,} rows each" if step > 1 else "one row each"
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
    pieces: list[tuple[Split, Ints]], total: Ints, options: ShardOptions, otherwise: list[Ints]
) -> tuple[list[Ints], str]:
    """Splits cut into as many shards as asked for; those of which no number was said, as `otherwise` has it."""
    asked = options.num_shards
    if isinstance(asked, Mapping) and (strange := sorted(set(asked) - {split.name for split, _ in pieces})):
        names = ", ".join(split.name for split, _ in pieces)
        raise InputError(
            f"--num-shards names the split {strange[0]!r}, which does not exist.", hint=f"The splits are: {names}."
        )
    found = []
    for (split, edges), default in zip(pieces, otherwise, strict=True):
        count, rows = options.shard_count(split.name), len(edges) - 1
        if count is None or rows == 0:
            found.append(default)
            continue
        if count > rows:
            what = f"values of {options.shard_by}" if options.shard_by else "rows"
            raise InputError(f"--num-shards={count} is more than the {rows} {what} of the split {split.name!r}.")
        found.append(edges[cuts.share(np.diff(total[edges]), count)])
    if isinstance(asked, Mapping):
        return found, "--num-shards " + ", ".join(f"{name}={count}" for name, count in asked.items())
    return found, f"--num-shards {asked}" + (" for each split" if len(pieces) > 1 else "")
