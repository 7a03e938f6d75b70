"""Tables that are joined to the rows of a folder: those of a recipe, and participants.tsv and the like of BIDS.

They are CSV, TSV or spreadsheets. Lines are read a few thousand at a time and values are kept as Arrow, on disk if the
table is large, so that a table with a million lines needs little memory.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import ParseError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import SourceError
from brim.extras import missing
from brim.sources.file_table import one_array
from brim.sources.folder_tree import COMMANDS, Tree, pointer_kind
from brim.sources.recipe import VALUE_TYPES, Key, Recipe, RecipeTable, TableColumn
from brim.sources.spools import collect_batches

LINE, KEY = "\0line", "\0key"  # columns with the numbers of lines, and with the texts of keys
BIDS_NULLS = ("", "n/a", "N/A", "NA", "nan", "NaN")
_BATCH_LINES = 5_000
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_MAX_FLOAT = {"float32": 3.4028235e38, "float64": math.inf}
_INTEGER = r"^[+-]?(0|[1-9][0-9]*)$"
_NUMBER = r"^[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"

Cells = Sequence[Any]
Lines = Iterator[tuple[int, Cells]]


def _read_lines(tree: Tree, path: str, is_quoted: bool = True) -> Lines:
    """Yield number and cells of each line that is not blank; the first is the header."""
    try:
        lines = _read_sheet(tree, path) if path.lower().endswith(".xlsx") else _read_text(tree, path, is_quoted)
        for number, cells in lines:
            if any(as_text(cell) for cell in cells):
                yield number, cells
    except (UnicodeDecodeError, csv.Error, zipfile.BadZipFile, ParseError, KeyError, ValueError, OSError) as error:
        raise SourceError(f"The table {path!r} cannot be read: {error}.", path=path) from error


def _read_text(tree: Tree, path: str, is_quoted: bool) -> Lines:
    with tree.text(path, newline="" if is_quoted else None) as file:
        if not is_quoted:
            yield from enumerate((line.rstrip("\n").split("\t") for line in file), 1)
            return
        reader = csv.reader(file, delimiter="\t" if path.lower().endswith(".tsv") else ",")
        for cells in reader:
            yield reader.line_num, cells


def _read_sheet(tree: Tree, path: str) -> Lines:
    try:
        import openpyxl
    except ImportError as error:
        raise missing("neuro", "Reading spreadsheets needs openpyxl.", "openpyxl") from error
    with warnings.catch_warnings(), tree.open(path) as file:
        warnings.simplefilter("ignore")  # about styles
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        try:
            yield from enumerate(book.worksheets[0].iter_rows(values_only=True), start=1)
        finally:
            book.close()


def as_text(value: Any) -> str:
    """Return a cell as text. The 71.0 of a spreadsheet is 71."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value).strip()


def _collect(lines: Lines, columns: Mapping[str, tuple[pa.DataType, Callable[[int, Cells], Any]]]) -> pa.Table:
    """Make a table of lines: of each column the type, and a function from a line's number and cells to the value."""
    schema = pa.schema([(name, kind) for name, (kind, _) in columns.items()] + [(LINE, pa.int64())])

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([], schema=schema)
        while block := list(itertools.islice(lines, _BATCH_LINES)):
            arrays = [pa.array([value(*line) for line in block], kind) for kind, value in columns.values()]
            yield pa.record_batch([*arrays, pa.array([number for number, _ in block], pa.int64())], schema=schema)

    return collect_batches(batches())


def read_tsv(tree: Tree, path: str) -> pa.Table:
    """Read a TSV of BIDS: all columns as texts, and LINE. It has no quotes."""
    try:
        kind = pointer_kind(tree.head(path))
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}.", path=path) from error
    if kind is not None:
        raise SourceError(f"{path} is a pointer, not data.", hint=f"Fetch it with: {COMMANDS[kind]}", path=path)
    lines = _read_lines(tree, path, is_quoted=False)
    header = [as_text(name) for name in next(lines, (0, ()))[1]]
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise SourceError(f"{path} has two columns named {twice[0]!r}.", hint="Rename one of them.", path=path)

    def cell(position: int) -> Callable[[int, Cells], str | None]:
        def text(number: int, cells: Cells) -> str | None:
            if len(cells) > len(header) and any(cells[len(header) :]):
                message = f"{path} line {number} has {len(cells)} cells, the header has {len(header)}."
                raise SourceError(message, path=path)
            cell_text = as_text(cells[position]) if position < len(cells) else ""
            return None if cell_text in BIDS_NULLS else cell_text

        return text

    return _collect(lines, {name: (pa.string(), cell(i)) for i, name in enumerate(header) if name})


def infer_type(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return texts as whole numbers, numbers or texts. Leading zeros stay text: 007 is a name."""
    if texts.null_count == len(texts):
        return texts
    numbers = pc.replace_substring_regex(texts, r"^\+", "", max_replacements=1)
    for pattern, kind in ((_INTEGER, pa.int64()), (_NUMBER, pa.float64())):
        if pc.all(pc.match_substring_regex(texts, pattern)).as_py():
            try:
                converted = numbers.cast(kind)
            except pa.ArrowInvalid:  # too many digits: a name
                return texts
            return converted if kind == pa.int64() or pc.all(pc.is_finite(converted)).as_py() else texts
    return texts


def join_by_key(
    tree: Tree, path: str, key: str, prefix: str, ids: Sequence[str]
) -> tuple[dict[str, pa.Array], list[str]]:
    """Join a TSV of BIDS to rows: return its columns for `ids`, and warnings about keys without a match.

    `prefix` (such as sub-) may be left out in the table. The type of a column is inferred from the whole table.
    """
    if not tree.is_file(path):
        return {}, []
    table = read_tsv(tree, path)
    if key not in table.column_names:
        return {}, [f"{path} has no column {key} and is not joined"] if table.num_columns > 1 else []
    keys = table.column(key)
    keys = one_array(
        pc.if_else(pc.starts_with(keys, pattern=prefix), keys, pc.binary_join_element_wise(prefix, keys, ""))
    )
    folders, listed = pa.array(ids, pa.string()), pc.unique(keys.drop_null())
    joined = []
    if len(absent := _without(listed, folders)):
        joined.append(f"{len(absent)} of {path} have no folder, for example {pc.min(absent)}")
    if len(unlisted := _without(folders, listed)):
        joined.append(f"{len(unlisted)} with a folder are not in {path}, for example {pc.min(unlisted)}")
    if repeated := len(keys) - keys.null_count - len(listed):
        joined.append(f"{repeated} of {path} are listed twice; the last line counts")
    last_first = pc.take(keys, pa.array(np.arange(len(keys))[::-1]))
    rows = pc.subtract(len(keys) - 1, pc.index_in(folders, last_first))
    columns = [name for name in table.column_names if name not in (key, LINE)]
    return {name: one_array(infer_type(table.column(name)).take(rows)) for name in columns}, joined


def _without(values: pa.Array, excluded: pa.Array) -> pa.Array:
    return values.filter(pc.invert(pc.is_in(values, value_set=excluded)))


class TableJoin:
    """One [[tables]] of a recipe: finds the values of each row in the table of all rows, or in the row's own table."""

    def __init__(self, recipe: Recipe, table: RecipeTable) -> None:
        self.recipe, self.table = recipe, table
        self.warnings: list[str] = []

    def join(self, tree: Tree, keys: Sequence[Key], paths: Sequence[str | None]) -> dict[str, pa.Array]:
        """Return a column for each value, with null for rows that have no table or are not listed in it."""
        own_names = [self.recipe.key.index(name) for name in self.table.key]
        row_keys = ["\0".join(str(key[i]) for i in own_names) for key in keys]
        rows_of: dict[str, list[int]] = {}
        for row, path in enumerate(paths):
            if path is not None:
                rows_of.setdefault(path, []).append(row)
        values = {c.name: [pa.array([], VALUE_TYPES[c.type])] for c in self.table.columns}
        position = np.full(len(keys), -1, np.int64)  # of a row's values among those that are found
        count = unlisted = absent = 0
        example = ""
        for path, rows in rows_of.items():
            table = self._read(tree, path)
            row_key_array = pa.array([row_keys[row] for row in rows], pa.string())
            listed = one_array(table.column(KEY))
            not_found = _without(listed, pa.array(row_keys, pa.string()))
            absent, example = absent + len(not_found), example or (not_found[0].as_py() if len(not_found) else "")
            positions = pc.index_in(row_key_array, listed)
            unlisted += positions.null_count if len(listed) else 0
            has_values = np.asarray(positions.is_valid(), bool)
            position[np.array(rows)[has_values]] = count + np.arange(has_values.sum())
            count += int(has_values.sum())
            for name in values:
                values[name].append(one_array(table.column(name).take(positions.drop_null())))
        if self.table.key:
            pattern = self.table.pattern
            if absent:
                shown = example.replace("\0", " ")
                self.warnings.append(f"{absent} row(s) of {pattern} have no folder, for example {shown}")
            if unlisted:
                self.warnings.append(f"{unlisted} row(s) are not listed in {pattern} and have nulls in its columns")
        order = pa.array(position, mask=position < 0)
        return {name: pa.concat_arrays(arrays).take(order) for name, arrays in values.items()}

    def _read(self, tree: Tree, path: str) -> pa.Table:
        """Read a table: the values in their types, and KEY."""
        lines = _read_lines(tree, path)
        positions = self._positions(next(lines, (0, ()))[1], path)
        key_positions = [positions[source] for source in self.table.key.values()]

        def key(number: int, cells: Cells) -> str:
            return "\0".join(as_text(cells[i]) if i < len(cells) else "" for i in key_positions)

        columns: dict[str, Any] = {
            c.name: (VALUE_TYPES[c.type], self._parser(c, positions, path)) for c in self.table.columns
        }
        table = _collect(lines, {**columns, KEY: (pa.string(), key)})
        codes = one_array(table.column(KEY)).dictionary_encode().indices.to_numpy()
        _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        repeated = np.flatnonzero(first[inverse] != np.arange(len(codes)))
        if len(repeated):
            pair = [int(first[inverse[repeated[0]]]), int(repeated[0])]
            numbers = [table.column(LINE)[row].as_py() for row in pair]
            name = table.column(KEY)[pair[0]].as_py().replace("\0", " ")
            problem = f"lists {name} twice" if self.table.key else "should have a single row and has more"
            raise SourceError(
                f"{path!r} {problem}: {_line_or_row(path)}s {numbers[0]} and {numbers[1]}.",
                hint="Remove one of them." if self.table.key else "Add key to the recipe to choose one.",
                path=path,
            )
        return table

    def _positions(self, header: Cells, path: str) -> dict[str, int]:
        """Return where each column is. Names are compared without regard to case and blanks."""

        def folded(name: Any) -> str:
            return " ".join(as_text(name).split()).casefold()

        positions = {folded(name): position for position, name in reversed(list(enumerate(header)))}
        optional = {column.source for column in self.table.columns if column.optional}
        sources = [*self.table.key.values(), *(column.source for column in self.table.columns)]
        for source in sources:
            if folded(source) not in positions and source not in optional:
                raise SourceError(
                    f"{path!r} has no column {source!r}.",
                    hint=f"Its columns are: {', '.join(map(as_text, header))}. "
                    "If it may be missing, set optional = true in the recipe.",
                    path=path,
                )
        return {source: positions[folded(source)] for source in sources if folded(source) in positions}

    def _parser(self, column: TableColumn, positions: Mapping[str, int], path: str) -> Callable[[int, Cells], Any]:
        position = positions.get(column.source, math.inf)

        def parse(number: int, cells: Cells) -> Any:
            value = cells[int(position)] if position < len(cells) else None
            try:
                return _parse_value(value, column.type, self.table.null)
            except ValueError as error:
                raise SourceError(
                    f"{path!r}, {_line_or_row(path)} {number}: {column.source} is {value!r}, which is not {error}.",
                    hint="Fix it, or change its type or the table's null in the recipe.",
                    path=path,
                ) from error

        return parse


def _line_or_row(path: str) -> str:
    """Return what the numbers of a table count: lines of a text, or rows of a spreadsheet."""
    return "row" if path.lower().endswith(".xlsx") else "line"


def _parse_value(value: Any, kind: str, null: tuple[str, ...]) -> Any:
    """Return a cell in its type, or None. Raise ValueError if it has another type."""
    text = as_text(value)
    if value is None or text.casefold() in null:
        return None
    if kind == "string":
        return text
    if kind == "bool":
        if text.casefold() not in _BOOLS:
            raise ValueError("true or false")
        return _BOOLS[text.casefold()]
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text):
        raise ValueError("a number")
    if kind == "int64":
        number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,19}", text) else float(text)
        if number != int(number) or not -(2**63) <= number < 2**63:
            raise ValueError("a whole number of 64 bits")
        return int(number)
    if not abs(float(text)) <= _MAX_FLOAT[kind]:
        raise ValueError(f"a {kind}")
    return float(text)
