"""The file table: rows that name files, with the size of every file known and none of them read.

Files of a source that no column takes are counted by kind, with an example of each, so that nothing is left out in
silence. Sidecars (small texts beside data) and documentation are told apart from data: only data is worth an error.
What the user left out by an option is not counted here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim import partition as cuts
from brim.errors import InputError
from brim.file_set import FileSet, Ints
from brim.formats.nested_values import leaf_cells
from brim.formats.splice import SpliceBuilder
from brim.records import dataclass
from brim.sources.features import extension_of, is_companion
from brim.wording import worded

Group = Literal["data", "sidecars", "documentation"]
GROUPS: tuple[Group, ...] = ("data", "sidecars", "documentation")
_SIDECARS = frozenset(".json .tsv .csv .xlsx .bval .bvec .txt .xml .yaml .yml .toml".split())  # noqa: SIM905
_DOCUMENTS = frozenset(".md .rst .pdf .html .docx .odt .bib .cff".split())  # noqa: SIM905
_DOCUMENT_NAMES = ("README", "CHANGES", "LICENSE", "LICENCE", "CITATION", "AUTHORS", "NOTICE", "COPYING")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class UnmatchedKind:
    """Files of one kind, such as `_asl.nii.gz`."""

    group: Group
    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Unmatched:
    """All of them. `hint` says how to take or to leave them; `is_error`, that the recipe wants none of data."""

    kinds: tuple[UnmatchedKind, ...] = ()
    is_error: bool = False
    hint: str = ""

    def count(self, group: Group | None = None) -> int:
        return sum(kind.count for kind in self.kinds if group in (None, kind.group))

    def examples(self, group: Group) -> str:
        """The kinds of a group, the most frequent first, each with one of its files."""
        found = sorted((kind for kind in self.kinds if kind.group == group), key=lambda kind: -kind.count)
        shown = [f"{kind.count:,} {kind.kind}, for example {kind.example}" for kind in found[:_SHOWN]]
        rest = sum(kind.count for kind in found[_SHOWN:])
        return "; ".join([*shown, *([f"and {rest:,} more"] if rest else [])])

    def lines(self) -> list[str]:
        """In words, a line for each group; none if every file is taken."""
        said = []
        for group in GROUPS:
            if count := self.count(group):
                of = "data file(s)" if group == "data" else f"file(s) of {group}" if group == "documentation" else group
                said.append(f"{count:,} {of} that no column takes: {self.examples(group)}")
        return said

    def facts(self) -> dict[str, Any]:
        """For programs."""
        counts: dict[str, Any] = {group: self.count(group) for group in GROUPS}
        kinds = [
            {"group": kind.group, "kind": kind.kind, "count": kind.count, "example": kind.example}
            for kind in self.kinds
        ]
        return {"files": self.count(), **counts, "kinds": kinds}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], is_error: bool, hint: str) -> Unmatched:
        return cls(tuple(UnmatchedKind(**kind) for kind in facts["kinds"]), is_error, hint)


def group_of_file(path: str) -> Group:
    """What a file is, by its name and place."""
    name = path.rsplit("/", 1)[-1]
    extension = extension_of(name).lower()
    if name.upper().startswith(_DOCUMENT_NAMES) or name == "dataset_description.json" or path.startswith("code/"):
        return "documentation"
    if extension in _DOCUMENTS:
        return "documentation"
    return "sidecars" if extension in _SIDECARS or is_companion(path) else "data"


def kind_of_name(path: str) -> str:
    """Files that are alike: by their suffix where names have entities, else by their extension."""
    name = path.rsplit("/", 1)[-1]
    stem, dot, rest = name.partition(".")
    if "-" in stem and "_" in stem:
        return f"_{stem.rpartition('_')[2]}{dot}{rest}"
    return extension_of(name) or name


def collect_unmatched(paths: Iterable[str], is_error: bool = False, hint: str = "") -> Unmatched:
    """What these files are. Only the kinds are held."""
    counts: dict[tuple[Group, str], list[Any]] = {}
    for path in paths:
        found = counts.setdefault((group_of_file(path), kind_of_name(path)), [0, path])
        found[0] += 1
    kinds = [UnmatchedKind(group, kind, count, example) for (group, kind), (count, example) in counts.items()]
    return Unmatched(tuple(sorted(kinds, key=lambda k: (GROUPS.index(k.group), -k.count, k.kind))), is_error, hint)


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
    A `nested` column has its own type (here by name) with a number where there are bytes, which are no files.
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
    aligned_with: Mapping[str, str] = field(default_factory=dict)  # columns whose lists match those of another one
    absent: tuple[str, ...] = ()  # files whose content git-annex keeps elsewhere; their sizes are known
    saved: str | None = None  # the columns found, as a recipe that fixes them
    verbatim: bool = False
    far: tuple[str, ...] = ()  # addresses of the shards that its rows were read from, if they are not here
    borrowed: frozenset[str] = frozenset()  # columns that lie in memory-mapped files, or in the caller's memory
    held: tuple[object, ...] = ()  # what must live as long as the table: spools that hold its values
    shards_read: int = 0  # of a dataset: how many hold a chosen row
    within: tuple[str, ...] = ()  # folders here of which all shards are read: no job writes there
    nested: Mapping[str, pa.DataType] = field(default_factory=dict)  # columns with values of `files` deep inside
    query: tuple[tuple[str, str], ...] = ()  # how its rows were chosen, as (label, text) for people
    can_drop: bool = False  # whether --drop can leave out columns of the source

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def file_bytes(self) -> Ints:
        """The bytes of each row's files, summed over its file columns."""
        total = np.zeros(len(self), np.int64)
        for name in (*self.columns, *self.nested):
            total += self.cell_bytes(name, self.files.sizes)
        return total

    def cell_bytes(self, name: str, weights: Ints) -> Ints:
        """The sum of the files' weights in each row of one column."""
        column = self.rows.column(name)
        if name not in self.nested:
            return cell_sums(column, weights)
        total = np.zeros(len(self), np.int64)
        for numbers, rows in nested_numbers(column, self.nested[name]):
            np.add.at(total, rows, weights[numbers])
        return total

    def file_count(self) -> int:
        return sum(len(self.numbers_of(name)) for name in (*self.columns, *self.nested))

    def numbers_of(self, name: str, rows: pa.Table | None = None) -> Ints:
        """The file numbers of a column in the order of its rows, those of one leaf after the other; or of some rows."""
        column = (self.rows if rows is None else rows).column(name)
        if name not in self.nested:
            return flat_numbers(column)
        return np.concatenate([numbers for numbers, _ in nested_numbers(column, self.nested[name])])

    def notes(self) -> list[str]:
        """Return what the user should read before a build: warnings, unmet expectations, files that no column takes."""
        unmet = [f"{finding.name}: {finding.detail}" for finding in self.expected if not finding.ok]
        return [*map(worded, self.warnings), *unmet, *(self.unmatched.lines() if self.unmatched is not None else [])]

    def column_counts(self, name: str) -> tuple[int, int]:
        """The rows that hold something in a column, and how many values (files, texts) all of them hold."""
        column = self.rows.column(name)
        if not is_list(column.type):
            there = len(column) - column.null_count
            return there, there
        rows = values = 0
        for chunk in column.chunks:
            inner = chunk.flatten()
            rows += int(pc.sum(pc.greater(pc.list_value_length(chunk), 0)).as_py() or 0)
            values += len(inner) - inner.null_count
        return rows, values

    def misaligned(self) -> list[str]:
        """Describe rows in which two aligned columns have different numbers of elements."""
        found = []
        for name, other in self.aligned_with.items():
            if name in self.rows.column_names and other in self.rows.column_names:
                mine, its = _lengths(self.rows.column(name)), _lengths(self.rows.column(other))
                for row in np.flatnonzero(mine != its)[:_NAMED].tolist():
                    found.append(
                        f"row {row}: {name!r} holds {mine[row]} and {other!r}, which it must match, {its[row]}"
                    )
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


def nested_numbers(column: pa.ChunkedArray, kind: pa.DataType) -> Iterator[tuple[Ints, Ints]]:
    """The file numbers of each leaf of bytes inside of a column, and their rows; nulls left out."""
    for cells, rows in leaf_cells(one_array(column), kind):
        there = np.asarray(cells.is_valid().to_numpy(zero_copy_only=False), bool)
        yield np.asarray(cells.drop_null().to_numpy(zero_copy_only=False), np.int64), rows[there]


def contents_of(files: FileSet, cells: Any) -> list[bytes | None]:
    """What the files of these numbers hold; None for those that are null, or have no content."""
    numbers = cells.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    there = np.asarray(cells.is_valid().to_numpy(zero_copy_only=False), bool)
    there[there] = files.has_content(numbers[there])
    values, sizes = SpliceBuilder(files), []
    for number in numbers[there].tolist():
        begin = values.position
        values.value(number)
        sizes.append(values.position - begin)
    with values.finish() as splice:
        data = splice.read_at(0, splice.size)
    ends = np.cumsum(np.array(sizes, np.int64)).tolist()
    parts = iter([data[end - size : end] for size, end in zip(sizes, ends, strict=True)])
    return [next(parts) if one else None for one in there.tolist()]


def comparable(table: pa.Table) -> pa.Table:
    """With columns as what their values are, where pyarrow cannot compare them as they are stored."""
    for number, (name, kind) in enumerate(zip(table.schema.names, table.schema.types, strict=True)):
        if pa.types.is_dictionary(kind):
            table = table.set_column(number, name, table.column(number).cast(kind.value_type))
        elif pa.types.is_float16(kind):
            table = table.set_column(number, name, table.column(number).cast(pa.float32()))
    return table


def stacked(tables: Sequence[pa.Table], names: Sequence[str]) -> pa.Table:
    """Tables with the same columns one below the other. What is null in one is in all; dictionaries that differ are
    what they stand for."""
    first = tables[0].schema
    differ = [n for n in first.names if any(one.schema.field(n).type != first.field(n).type for one in tables[1:])]
    for name in differ:
        kinds = [one.schema.field(name).type for one in tables]
        plain = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in kinds]
        for kind, other in zip(plain, names, strict=True):
            if kind != plain[0]:
                raise other_type(name, names[0], other)
        at, field = first.get_field_index(name), pa.field(name, plain[0])
        tables = [one.set_column(at, field, one.column(name).cast(plain[0])) for one in tables]
    return pa.concat_tables(tables, promote_options="default")


def nothing_chosen(table: FileTable, verb: str) -> InputError:
    how = "; ".join(f"{label} {text}" for label, text in table.query)
    return InputError("No row was selected.", hint=f"There is nothing to {verb}: {how}.")


def other_type(column: str, first: str, other: str) -> InputError:
    return InputError(
        f"The column {column!r} has different types in {first} and in {other}.",
        hint="Leave it out with --drop, or choose others with --columns.",
    )


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
