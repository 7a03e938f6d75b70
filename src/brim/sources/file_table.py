"""The file table: rows that name files, with the size of every file known and none of them read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim import cuts
from brim.file_set import FileSet, Ints

Reason = Literal[
    "missing", "folder", "special", "unreadable", "annex", "lfs", "url", "name", "empty", "oversize", "twin"
]


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that cannot be packaged, and why."""

    reason: Reason
    path: str


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
    crowded: tuple[str, ...] = ()  # files of cells that hold several where one is expected (only if read leniently)
    saved: str | None = None  # the columns found, as a recipe that fixes them
    verbatim: bool = False
    borrowed: frozenset[str] = frozenset()  # columns that lie in memory-mapped files, or in the caller's memory
    held: tuple[object, ...] = ()  # what must live as long as the table: spools that hold its values
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

    def replace(self, **changes: Any) -> FileTable:
        return dataclasses.replace(self, **changes)


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
