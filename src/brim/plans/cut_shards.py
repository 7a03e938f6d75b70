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
from brim.sources.spools import mapped_columns, spooled


def metadata_bytes(table: FileTable) -> Ints:
    """Return the bytes of each row's values outside of file columns."""
    total = np.zeros(len(table), np.int64)
    for name in table.rows.column_names:
        if name not in table.columns:
            total += cuts.column_bytes(table.rows.column(name))
    return total


DEFAULT_SHARD_BYTES = 500_000_000
MOST_SHARDS = 5_000  # by default; the Hub allows 10,000 entries per folder
_BLOCK = 10_000  # shards that an iteration makes at a time


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows `start` to `stop` of the plan's table, and the file they become.

    `value_bytes` is the uncompressed size of the other columns.
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
    """Return a shard's name by the Hub's convention, with more than five digits if needed.

    All numbers of a split have the same width: readers sort by name, and of mixed widths `datasets` would read only
    those with five digits.
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

    The shards of a split follow each other; `counts` has their number per split.
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
        """The number of rows of each shard."""
        return self.stops - self.starts

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> list[Shard]: ...
    def __getitem__(self, index: int | slice) -> Shard | list[Shard]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        ends = list(itertools.accumulate(self.counts))
        split = bisect_right(ends, number)
        first = ends[split] - self.counts[split]
        return next(self._shards_of(split, first, number, number + 1))

    def __iter__(self) -> Iterator[Shard]:
        first = 0
        for split, count in enumerate(self.counts):
            for start in range(first, first + count, _BLOCK):
                yield from self._shards_of(split, first, start, min(start + _BLOCK, first + count))
            first += count

    def _shards_of(self, split: int, first: int, start: int, stop: int) -> Iterator[Shard]:
        """Yield shards `start` to `stop` of a split whose first shard is `first`; all three count over all splits."""
        name, count = self.splits[split], self.counts[split]
        columns = (self.starts, self.stops, self.file_bytes, self.value_bytes)
        values = (column[start:stop].tolist() for column in columns)
        for number, range_values in zip(range(start - first, stop - first), zip(*values, strict=True), strict=True):
            yield Shard(shard_name(self.folder, name, number, count, self.extension), name, *range_values)


def cut_shards(
    table: FileTable, extension: str, options: ShardOptions, max_rows: int | None = None, folder: str = "data"
) -> tuple[FileTable, Shards, str]:
    """Cut a table; return it in the order of its shards, the shards, and the reason for their number."""
    table, groups = _grouped(table, options.shard_by)
    if new := [note for note in options.notes if note not in table.warnings]:
        table = table.replace(warnings=(*table.warnings, *new))
    values_before = cuts.running(metadata_bytes(table))
    total = cuts.running(table.file_bytes())
    total += values_before  # so that a table of long texts is cut as well
    grouped = [
        (split, groups[slice(*np.searchsorted(groups, [split.start, split.stop + 1]))]) for split in table.splits
    ]
    boundaries, why = _boundaries(grouped, total, options, max_rows)
    # A split without rows gets one shard, as in `datasets`.
    edges = [
        np.array([split.start, split.stop], np.int64) if split.start == split.stop else cut
        for split, cut in zip(table.splits, boundaries, strict=True)
    ]
    none = np.zeros(0, np.int64)
    starts = np.concatenate([none, *(each[:-1] for each in edges)])
    stops = np.concatenate([none, *(each[1:] for each in edges)])
    in_values = values_before[stops] - values_before[starts]
    in_files = total[stops] - total[starts] - in_values
    splits, counts = tuple(split.name for split in table.splits), tuple(len(each) - 1 for each in edges)
    return table, Shards(folder, extension, splits, counts, starts, stops, in_files, in_values), why


def _grouped(table: FileTable, column: str | None) -> tuple[FileTable, Ints]:
    """Sort rows by the values of a column, in order of first appearance; return the boundaries of the groups too."""
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
    grouped: list[tuple[Split, Ints]], total: Ints, options: ShardOptions, max_rows: int | None
) -> tuple[list[Ints], str]:
    """Return the row boundaries of the shards of each split; `total` is the running sum of rows' bytes."""

    def by_size(limit: int) -> list[Ints]:
        return [edges[cuts.fill_all([(total[edges], limit)], max_rows)] for _, edges in grouped]

    if options.num_shards is not None:
        return _by_number(grouped, total, options, by_size(DEFAULT_SHARD_BYTES))
    if options.rows_per_shard is not None:
        step = options.rows_per_shard
        stepped = [np.append(np.arange(s.start, s.stop, step, dtype=np.int64), s.stop) for s, _ in grouped]
        return stepped, f"{step:,} rows each" if step > 1 else "one row each"
    if options.shard_bytes is not None:
        suffix = f", rows of one {options.shard_by} kept together" if options.shard_by else ""
        return by_size(options.shard_bytes), f"rows in order, up to {format_size(options.shard_bytes)} a shard{suffix}"
    if options.shard_by is not None and sum(len(edges) - 1 for _, edges in grouped) <= MOST_SHARDS:
        return [edges for _, edges in grouped], f"one for each {options.shard_by}"
    limit = DEFAULT_SHARD_BYTES
    cuts_by_split = by_size(limit)
    while sum(len(edges) - 1 for edges in cuts_by_split) > MOST_SHARDS:
        limit *= 2  # doubling, so that a dataset that grows a little keeps its boundaries
        cuts_by_split = by_size(limit)
    why = f"rows in order, up to {format_size(limit)} a shard"
    if max_rows is not None:
        why += f" and {max_rows:,} rows"
    if limit > DEFAULT_SHARD_BYTES:
        why += f" (larger than {format_size(DEFAULT_SHARD_BYTES)}, to stay below {MOST_SHARDS} files)"
    if options.shard_by is not None:
        why += f", rows of one {options.shard_by} kept together"
    return cuts_by_split, why


def _by_number(
    grouped: list[tuple[Split, Ints]], total: Ints, options: ShardOptions, otherwise: list[Ints]
) -> tuple[list[Ints], str]:
    """Cut splits into the requested numbers of shards; others are cut as in `otherwise`."""
    requested = options.num_shards
    if isinstance(requested, Mapping) and (strange := sorted(set(requested) - {split.name for split, _ in grouped})):
        names = ", ".join(split.name for split, _ in grouped)
        raise InputError(
            f"--num-shards names the split {strange[0]!r}, which does not exist.", hint=f"The splits are: {names}."
        )
    boundaries = []
    for (split, edges), default in zip(grouped, otherwise, strict=True):
        count, rows = options.shard_count(split.name), len(edges) - 1
        if count is None or rows == 0:
            boundaries.append(default)
            continue
        if count > rows:
            unit = f"values of {options.shard_by}" if options.shard_by else "rows"
            raise InputError(f"--num-shards={count} is more than the {rows} {unit} of the split {split.name!r}.")
        boundaries.append(edges[cuts.share(np.diff(total[edges]), count)])
    if isinstance(requested, Mapping):
        return boundaries, "--num-shards " + ", ".join(f"{name}={count}" for name, count in requested.items())
    return boundaries, f"--num-shards {requested}" + (" for each split" if len(grouped) > 1 else "")
