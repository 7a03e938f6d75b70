"""The file table: rows that name files, with the size of every file known and none of them read.

Files of a source that no column takes are counted by kind, with an example of each, so that nothing is left out
without notice. Sidecars (small texts next to data) and documentation are counted apart from data: only data is worth
an error. Files that the user left out by an option are not counted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim import partition as cuts
from brim.errors import InputError
from brim.file_set import FileSet, Ints
from brim.formats.parquet_levels import is_list_type, leaf_cells, map_leaves, single_array
from brim.formats.splice import SpliceBuilder
from brim.records import dataclass
from brim.sources.features import extension_of, is_companion
from brim.sources.spools import TableSpool
from brim.wording import worded

Group = Literal["data", "sidecars", "documentation"]
GROUPS: tuple[Group, ...] = ("data", "sidecars", "documentation")
_SIDECARS = frozenset(".json .tsv .csv .xlsx .bval .bvec .txt .xml .yaml .yml .toml".split())  # noqa: SIM905
_DOCUMENTS = frozenset(".md .rst .pdf .html .docx .odt .bib .cff".split())  # noqa: SIM905
_DOCUMENT_NAMES = ("README", "CHANGES", "LICENSE", "LICENCE", "CITATION", "AUTHORS", "NOTICE", "COPYING")
_SHOWN_KINDS = 3
_SHOWN_ROWS = 100  # that are not aligned, of one column


@dataclass(frozen=True, slots=True)
class UnmatchedKind:
    """Files with the same suffix, such as `_asl.nii.gz`."""

    group: Group
    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Unmatched:
    """The files that no column takes. `is_error` means that the recipe allows no data among them."""

    kinds: tuple[UnmatchedKind, ...] = ()
    is_error: bool = False
    hint: str = ""

    def count(self, group: Group | None = None) -> int:
        return sum(kind.count for kind in self.kinds if group in (None, kind.group))

    def examples(self, group: Group) -> str:
        """Describe the kinds of a group, the most frequent first, each with one of its files."""
        kinds = sorted((kind for kind in self.kinds if kind.group == group), key=lambda kind: -kind.count)
        shown = [f"{kind.count:,} {kind.kind}, for example {kind.example}" for kind in kinds[:_SHOWN_KINDS]]
        remaining = sum(kind.count for kind in kinds[_SHOWN_KINDS:])
        return "; ".join([*shown, *([f"and {remaining:,} more"] if remaining else [])])

    def lines(self) -> list[str]:
        """Describe each group that has files."""
        names = {"data": "data file(s)", "sidecars": "sidecars", "documentation": "file(s) of documentation"}
        counts = {group: self.count(group) for group in GROUPS}
        return [
            f"{count:,} {names[group]} that no column takes: {self.examples(group)}"
            for group, count in counts.items()
            if count
        ]

    def facts(self) -> dict[str, Any]:
        """Return the counts for `--json`."""
        counts: dict[str, Any] = {group: self.count(group) for group in GROUPS}
        return {"files": self.count(), **counts, "kinds": [dataclasses.asdict(kind) for kind in self.kinds]}


def group_of_file(path: str) -> Group:
    """Return what a file is, by its name and folder."""
    name = path.rsplit("/", 1)[-1]
    extension = extension_of(name).lower()
    if name.upper().startswith(_DOCUMENT_NAMES) or name == "dataset_description.json" or path.startswith("code/"):
        return "documentation"
    if extension in _DOCUMENTS:
        return "documentation"
    return "sidecars" if extension in _SIDECARS or is_companion(path) else "data"


def kind_of_name(path: str) -> str:
    """Return a name for similar files: the suffix of names that have entities, otherwise the extension."""
    name = path.rsplit("/", 1)[-1]
    stem, dot, extensions = name.partition(".")
    if "-" in stem and "_" in stem:
        return f"_{stem.rpartition('_')[2]}{dot}{extensions}"
    return extension_of(name) or name


def collect_unmatched(paths: Iterable[str], is_error: bool = False, hint: str = "") -> Unmatched:
    """Count files by kind. Only the kinds are held in memory."""
    counts: dict[tuple[Group, str], list[Any]] = {}
    for path in paths:
        counts.setdefault((group_of_file(path), kind_of_name(path)), [0, path])[0] += 1
    kinds = [UnmatchedKind(group, kind, count, example) for (group, kind), (count, example) in counts.items()]
    return Unmatched(tuple(sorted(kinds, key=lambda k: (GROUPS.index(k.group), -k.count, k.kind))), is_error, hint)


Reason = Literal[
    "missing", "folder", "special", "unreadable", "annex", "lfs", "url", "name", "empty", "oversize", "twin"
]


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that cannot be packaged, and the reason."""

    reason: Reason
    path: str


@dataclass(frozen=True, slots=True)
class RowFault:
    """A file that breaks its row. `check` is the name of the fault in `brim check`."""

    check: str
    path: str
    what: str


@dataclass(frozen=True, slots=True)
class Finding:
    """An expectation of a recipe, and whether it holds; `skipped` if it could not be compared."""

    name: str
    ok: bool
    detail: str
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class FileColumn:
    """A column of files. `guessed` means that brim chose it, not the user.

    `stored` is its type in shards, if that is not a struct of bytes and path, or lists of it.
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

    In `rows` a file column has numbers of `files` (int64, or lists of it). `features` is the datasets feature of each
    column, or None if the table has a type that `datasets` does not know. A `nested` column has its own type (given
    here by name) with a number in place of bytes, which are not files. `recipe` is how the source was read, so that it
    can be read again. A `verbatim` table is published unchanged: with any texts, and also without rows.
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
    about: Mapping[str, Any] = field(default_factory=dict)  # how the source describes itself, for the card
    faults: tuple[RowFault, ...] = ()  # only if read leniently: otherwise they are an error
    unmatched: Unmatched | None = None  # files that no column takes; None if they were not looked for
    expected: tuple[Finding, ...] = ()  # the expectations of a recipe for the complete dataset, compared
    aligned_with: Mapping[str, str] = field(default_factory=dict)  # columns whose lists match those of another one
    absent: tuple[str, ...] = ()  # files whose content git-annex keeps elsewhere; their sizes are known
    saved: str | None = None  # the columns found, as a recipe that fixes them
    verbatim: bool = False
    far: tuple[str, ...] = ()  # addresses of the remote shards that its rows were read from
    borrowed: frozenset[str] = frozenset()  # columns in memory-mapped files, or in the caller's memory
    held: tuple[object, ...] = ()  # spools with its values, which must exist as long as the table
    shards_read: int = 0  # of a dataset: the number of shards with a chosen row
    within: tuple[str, ...] = ()  # local folders of which all shards are read: no job writes there
    nested: Mapping[str, pa.DataType] = field(default_factory=dict)  # columns with values of `files` deep inside
    query: tuple[tuple[str, str], ...] = ()  # how its rows were chosen, as (label, text)
    can_drop: bool = False  # whether --drop can leave out columns of the source

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def file_bytes(self) -> Ints:
        """Return the bytes of each row's files, summed over its file columns."""
        sizes = (self.cell_bytes(name, self.files.sizes) for name in (*self.columns, *self.nested))
        return sum(sizes, np.zeros(len(self), np.int64))

    def cell_bytes(self, name: str, weights: Ints) -> Ints:
        """Return the sum of the files' weights in each row of one column."""
        column = self.rows.column(name)
        if name not in self.nested:
            return cell_sums(column, weights)
        total = np.zeros(len(self), np.int64)
        for numbers, rows in nested_numbers(column, self.nested[name]):
            np.add.at(total, rows, weights[numbers])
        return total

    def file_count(self) -> int:
        """Return the number of files in all columns."""
        return sum(len(self.numbers_of(name)) for name in (*self.columns, *self.nested))

    def numbers_of(self, name: str, rows: pa.Table | None = None) -> Ints:
        """Return the file numbers of a column of all rows or some, in order; of a nested column leaf by leaf."""
        column = (self.rows if rows is None else rows).column(name)
        if name not in self.nested:
            return flat_numbers(column)
        return np.concatenate([numbers for numbers, _ in nested_numbers(column, self.nested[name])])

    def notes(self) -> list[str]:
        """Return what the user should read before a build: warnings, unmet expectations, files that no column takes."""
        unmet = [f"{finding.name}: {finding.detail}" for finding in self.expected if not finding.ok]
        return [*map(worded, self.warnings), *unmet, *(self.unmatched.lines() if self.unmatched is not None else [])]

    def column_counts(self, name: str) -> tuple[int, int]:
        """Return the rows that have something in a column, and the number of values (files, texts) in them."""
        column = self.rows.column(name)
        if not is_list_type(column.type):
            return (len(column) - column.null_count,) * 2
        lengths, values = pc.list_value_length(column), pc.list_flatten(column)
        return int(pc.sum(pc.greater(lengths, 0)).as_py() or 0), len(values) - values.null_count

    def misaligned(self) -> list[str]:
        """Describe rows in which two aligned columns have different numbers of elements."""

        def lengths(name: str) -> Ints:
            array = one_array(self.rows.column(name))
            if is_list_type(array.type):
                return cuts.list_lengths(array)
            return np.asarray(array.is_valid().to_numpy(zero_copy_only=False), np.int64)

        described = []
        for name, base in self.aligned_with.items():
            if name in self.rows.column_names and base in self.rows.column_names:
                own, base_lengths = lengths(name), lengths(base)
                for row in np.flatnonzero(own != base_lengths)[:_SHOWN_ROWS].tolist():
                    match = f"{name!r} holds {own[row]} and {base!r}, which it must match, {base_lengths[row]}"
                    described.append(f"row {row}: {match}")
        return described

    def replace(self, **changes: Any) -> FileTable:
        """Return a table with other values of some fields."""
        return dataclasses.replace(self, **changes)


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as a single array without an offset."""
    array = single_array(column)
    return pa.concat_arrays([array, pa.array([], array.type)]) if array.offset else array


def flat_numbers(column: pa.ChunkedArray) -> Ints:
    """Return the file numbers of a file column in row order, without nulls."""
    array = one_array(column)
    array = array.flatten() if is_list_type(array.type) else array
    return np.asarray(array.drop_null().to_numpy(zero_copy_only=False), np.int64)


def nested_numbers(column: pa.ChunkedArray, kind: pa.DataType) -> Iterator[tuple[Ints, Ints]]:
    """Yield the file numbers of each leaf of bytes inside a column, and their rows, without nulls."""
    for cells, rows in leaf_cells(one_array(column), kind):
        is_valid = np.asarray(cells.is_valid().to_numpy(zero_copy_only=False), bool)
        yield np.asarray(cells.drop_null().to_numpy(zero_copy_only=False), np.int64), rows[is_valid]


def contents_of(files: FileSet, cells: Any) -> list[bytes | None]:
    """Read the files of some numbers; None for those that are null, or have no content."""
    numbers = cells.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    has_content = np.asarray(cells.is_valid().to_numpy(zero_copy_only=False), bool)
    has_content[has_content] = files.has_content(numbers[has_content])
    values, ends = SpliceBuilder(files), [0]
    for number in numbers[has_content].tolist():
        values.value(number)
        ends.append(values.position)
    with values.finish() as splice:
        data = splice.read_at(0, splice.size)
    parts = iter([data[start:end] for start, end in itertools.pairwise(ends)])
    return [next(parts) if is_present else None for is_present in has_content.tolist()]


def comparable(table: pa.Table) -> pa.Table:
    """Return columns as their values, where pyarrow cannot compare them in the type that they are stored in."""
    for number, (name, kind) in enumerate(zip(table.schema.names, table.schema.types, strict=True)):
        if pa.types.is_dictionary(kind):
            table = table.set_column(number, name, table.column(number).cast(kind.value_type))
        elif pa.types.is_float16(kind):
            table = table.set_column(number, name, table.column(number).cast(pa.float32()))
    return table


def stacked(tables: Sequence[pa.Table], names: Sequence[str]) -> pa.Table:
    """Put tables with the same columns one after the other. Dictionaries that differ become their values."""
    first = tables[0].schema
    for name in first.names:
        kinds = [table.schema.field(name).type for table in tables]
        if len(set(kinds)) == 1:
            continue
        plain = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in kinds]
        for kind, other_names in zip(plain, names, strict=True):
            if kind != plain[0]:
                raise type_conflict_error(name, names[0], other_names)
        index, field = first.get_field_index(name), pa.field(name, plain[0])
        tables = [table.set_column(index, field, table.column(name).cast(plain[0])) for table in tables]
    return pa.concat_tables(tables, promote_options="default")


def no_rows_error(table: FileTable, verb: str) -> InputError:
    steps = "; ".join(f"{label} {text}" for label, text in table.query)
    return InputError("No row was selected.", hint=f"There is nothing to {verb}: {steps}.")


def type_conflict_error(column: str, first: str, other: str) -> InputError:
    return InputError(
        f"The column {column!r} has different types in {first} and in {other}.",
        hint="Leave it out with --drop, or choose others with --columns.",
    )


def cell_sums(column: pa.ChunkedArray, weights: Ints) -> Ints:
    """Return for each row the sum of `weights` over its files."""
    array = one_array(column)
    lengths, inner = np.ones(len(array), np.int64), array
    if is_list_type(array.type):
        lengths, inner = cuts.list_lengths(array), array.flatten()
    numbers = inner.fill_null(-1).to_numpy(zero_copy_only=False)
    before = cuts.running(np.where(numbers >= 0, np.append(weights, 0)[numbers], 0))
    ends = np.cumsum(lengths)
    return np.asarray(before[ends] - before[ends - lengths], np.int64)


_BATCH_BYTES, _BATCH_ROWS = 16_000_000, 1024


def with_content(table: FileTable, names: Collection[str]) -> FileTable:
    """Return a table with the bytes of some nested columns in them, on disk, for a source that has no numbers there."""
    kinds = {name: table.nested[name] for name in names}
    schema = pa.schema([pa.field(name, kind) for name, kind in kinds.items()])
    sizes = sum((table.cell_bytes(name, table.files.sizes) for name in kinds), np.zeros(len(table), np.int64))

    def fill(cells: Any, kind: pa.DataType) -> pa.Array:
        return pa.array(contents_of(table.files, cells), kind)

    def batches() -> Iterator[pa.RecordBatch]:
        for start, stop in itertools.pairwise(cuts.fill(sizes, _BATCH_BYTES, _BATCH_ROWS).tolist()):
            rows = table.rows.slice(start, stop - start)
            arrays = [map_leaves(one_array(rows.column(name)), kind, kind, fill) for name, kind in kinds.items()]
            yield pa.record_batch(arrays, schema=schema)

    spool = TableSpool()
    spool.write(schema, batches())
    (filled,), rows = spool.tables(), table.rows
    for name, kind in kinds.items():
        index = rows.column_names.index(name)
        rows = rows.set_column(index, rows.schema.field(name).with_type(kind), filled.column(name))
    nested = {name: kind for name, kind in table.nested.items() if name not in kinds}
    return table.replace(rows=rows, nested=nested)
