"""The file table: rows that name files, with the size of every file known and none of them read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim import cuts
from brim.file_set import FileSet, Ints
from brim.records import dataclass
from brim.sources.unmatched import Unmatched

_NAMED = 100  # rows that are out of line, of one column

Reason = Literal[
    "missing", "folder", "special", "unreadable", "annex", "lfs", "url", "name", "empty", "oversize", "twin"
]


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that cannot be packaged, and why."""

    reason: Reason
    path: str


@dataclass(frozen=True, slots=True)
class RowFault:
    """A file that breaks its row, and what is wrong with it; `check` is what `brim check` calls that."""

    check: str
    path: str
    what: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One expectation of a recipe, and whether it holds; `skipped` if it could not be compared."""

    name: str
    ok: bool
    detail: str
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class FileColumn:
    """A column that holds files. `guessed` says that brim chose it, not the user.

    `stored` is the type that it has in shards, where that is not a struct of bytes and path, or lists of it.
    """

    kind: str
    is_list: bool
    guessed: bool = False
    stored: pa.DataType | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """Rows `start` to `stop` of the table."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class FileTable:
    """Rows and the files they name.

    In `rows` a file column holds numbers of `files` (int64, or lists of it). `features` is the datasets
    feature of each column, or None where the table holds a type that `datasets` does not know.
    `recipe` says how the source was read, so that the same can be done again. A `verbatim` table is
    published as it stands: whatever its texts say, and if it has no rows.
    """

    rows: pa.Table
    columns: Mapping[str, FileColumn]
    files: FileSet
    features: Mapping[str, Any] | None
    splits: tuple[Split, ...]
    refused: tuple[Refused, ...] = ()
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # paths of files too large for the format, dropped on request
    recipe: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)  # what the source says of itself, for the card
    faults: tuple[RowFault, ...] = ()  # what breaks rows (only if read leniently: otherwise it is an error)
    unmatched: Unmatched | None = None  # files that no column takes; None if nobody looked
    expected: tuple[Finding, ...] = ()  # what a recipe says of the whole dataset, compared
    beside: Mapping[str, str] = field(default_factory=dict)  # columns whose lists go with those of another
    absent: tuple[str, ...] = ()  # files whose content git-annex keeps elsewhere; their sizes are known
    saved: str | None = None  # the columns found, as a recipe that fixes them
    verbatim: bool = False
    far: tuple[str, ...] = ()  # addresses of the shards that its rows were read from, if they are not here
    borrowed: frozenset[str] = frozenset()  # columns that lie in memory-mapped files, or in the caller's memory
    held: tuple[object, ...] = ()  # what must live as long as the table: spools that hold its values
    shards_read: int = 0  # of a dataset: how many hold a chosen row
    within: tuple[str, ...] = ()  # folders here of which all shards are read: no job writes there
    query: tuple[tuple[str, str], ...] = ()  # how its rows were chosen, as (label, text) for people

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def file_bytes(self) -> Ints:
        """The bytes of each row's files, summed over its file columns."""
        total = np.zeros(len(self), np.int64)
        for name in self.columns:
            total += self.cell_bytes(name, self.files.sizes)
        return total

    def cell_bytes(self, name: str, weights: Ints) -> Ints:
        """The sum of the files' weights in each row of one file column."""
        column = self.rows.column(name)
        return cell_sums(column, weights)

    def file_count(self) -> int:
        return sum(len(flat_numbers(self.rows.column(name))) for name in self.columns)

    def notes(self) -> list[str]:
        """All that is worth a word before a build: warnings, expectations that do not hold, files that are left."""
        unmet = [f"{finding.name}: {finding.detail}" for finding in self.expected if not finding.ok]
        return [*self.warnings, *unmet, *(self.unmatched.lines() if self.unmatched is not None else [])]

    def column_counts(self, name: str) -> tuple[int, int]:
        """The rows that hold something in a column, and how many values (files, texts) all of them hold."""
        array = one_array(self.rows.column(name))
        if not is_list(array.type):
            there = len(array) - array.null_count
            return there, there
        inner = array.flatten()
        return int(pc.sum(pc.greater(pc.list_value_length(array), 0)).as_py() or 0), len(inner) - inner.null_count

    def misaligned(self) -> list[str]:
        """Rows in which a column does not go element by element with the one that it is beside, in words."""
        found = []
        for name, other in self.beside.items():
            if name in self.rows.column_names and other in self.rows.column_names:
                mine, its = _lengths(self.rows.column(name)), _lengths(self.rows.column(other))
                for row in np.flatnonzero(mine != its)[:_NAMED].tolist():
                    found.append(f"row {row}: {name!r} holds {mine[row]} and {other!r}, which it is beside, {its[row]}")
        return found

    def replace(self, **changes: Any) -> FileTable:
        return dataclasses.replace(self, **changes)


def _lengths(column: pa.ChunkedArray) -> Ints:
    """How many values each row has; one that is no list has one or none."""
    array = one_array(column)
    lengths = pc.list_value_length(array).fill_null(0) if is_list(array.type) else array.is_valid().cast(pa.int64())
    return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)


def is_list(kind: pa.DataType) -> bool:
    """Whether a file column of this type holds lists of files."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column as a single array that starts at its own beginning."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    return pa.concat_arrays([array, pa.array([], array.type)]) if array.offset else array


def flat_numbers(column: pa.ChunkedArray) -> Ints:
    """The file numbers of a file column in row order, nulls left out."""
    array = one_array(column)
    if is_list(array.type):
        array = array.flatten()
    return np.asarray(array.drop_null().to_numpy(zero_copy_only=False), np.int64)


def cell_sums(column: pa.ChunkedArray, weights: Ints) -> Ints:
    """For each row, the sum of `weights` over the files its cell names."""
    array = one_array(column)
    if is_list(array.type):
        lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
        inner = array.flatten()
    else:
        lengths = np.ones(len(array), np.int64)
        inner = array
    numbers = inner.fill_null(-1).to_numpy(zero_copy_only=False)
    values = np.where(numbers >= 0, np.append(weights, 0)[numbers], 0)
    before = cuts.running(values)
    ends = np.cumsum(lengths)
    return np.asarray(before[ends] - before[ends - lengths], np.int64)
