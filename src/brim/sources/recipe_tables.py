"""What a recipe reads at once: texts, and tables to join (CSV, TSV, spreadsheets).

They are small and are held in memory. Files of the dataset itself are never read here.
"""

from __future__ import annotations

import csv
import math
import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree.ElementTree import ParseError

from brim.errors import SourceError
from brim.extras import missing
from brim.sources.file_table import Refused
from brim.sources.folder_tree import MAX_POINTER_BYTES, Folder, Tree, Walk, pointer_kind
from brim.sources.recipe import Key, Recipe, RecipeTable, TableColumn
from brim.sources.table_memory import check_joined_table_fits

_MAX_TEXT_BYTES = 16 << 20
_MAX_TEXTS_BYTES = 256 << 20
_MAX_FLOAT = {"float32": 3.4028235e38, "float64": math.inf}
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

Lines = Iterator[tuple[int, Sequence[Any]]]


class SmallFiles:
    """Files that are read here and now. What cannot be read is refused, not fatal: see `walk.refused`."""

    def __init__(self, tree: Tree, memory: str | int | float | None = None) -> None:
        self.tree, self.walk, self.memory = tree, Walk.through(tree), memory
        self._text_bytes = 0

    def is_data(self, path: str, may_be_empty: bool = True) -> bool:
        """Whether the file can be read; if it only stands for data, is unreadable or empty, that is noted."""
        found = self.walk.find(path, path)
        if found is None:
            if path in self.walk.loops:
                self.walk.refused.append(Refused("missing", path))
            return False
        if isinstance(found, Folder):
            self.walk.refused.append(Refused("folder", path))
        elif not self.tree.may_read(path):
            self.walk.refused.append(Refused("unreadable", path))
        elif found.st_size == 0 and not may_be_empty:
            self.walk.refused.append(Refused("empty", path))
        elif found.st_size <= MAX_POINTER_BYTES and (kind := pointer_kind(self.tree.head(path))) is not None:
            self.walk.refused.append(Refused(kind, path))
        else:
            return True
        return False

    def text(self, path: str) -> str | None:
        """A file's content, or None after noting why it cannot be had."""
        return self._text(path) if self.is_data(path) else None

    def _text(self, path: str) -> str:
        size = self.tree.size(path)
        self._text_bytes += size
        if size > _MAX_TEXT_BYTES or self._text_bytes > _MAX_TEXTS_BYTES:
            raise SourceError(
                f"{path!r} makes a column of texts too long for memory.",
                hint='Set type = "file" for its column in the recipe.',
                path=path,
            )
        try:
            with self.tree.text(path, encoding="utf-8", newline="") as file:
                return file.read()
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{path!r} is not UTF-8 text (byte {error.start}).",
                hint='Set type = "file" for its column in the recipe.',
                path=path,
            ) from error


class Join:
    """One `[[tables]]` of a recipe: takes each row's values from the table that is its own, or everyone's."""

    def __init__(self, recipe: Recipe, table: RecipeTable, small: SmallFiles) -> None:
        self.recipe, self.table, self.small = recipe, table, small
        self._loaded: dict[str, dict[Key, list[Any]]] = {}
        self._unlisted = 0

    def values(self, key: Key, paths: list[str]) -> list[Any]:
        """The values of one row from the table at `paths`, which should be one; None where there is none."""
        nothing = [None] * len(self.table.columns)
        pattern = self.table.pattern
        if len(paths) > 1:
            raise SourceError(
                f"{self.recipe.row_name(key)} has several tables where one is expected: {', '.join(paths)}.",
                hint=f"Narrow the pattern {pattern!r} in the recipe.",
            )
        if not paths and "{" in pattern:
            return nothing
        # A table for all rows is looked for even if nothing matched, so that its absence is noted.
        path = paths[0] if paths else os.path.join(self.recipe.root, pattern)
        if path not in self._loaded:
            self._loaded[path] = self._load(path) if self.small.is_data(path, may_be_empty=False) else {}
        rows = self._loaded[path]
        self._unlisted += bool(rows) and self._key(key) not in rows
        return rows.get(self._key(key), nothing)

    def warnings(self, keys: list[Key]) -> tuple[str, ...]:
        """What the tables list and the folder lacks, and the other way round."""
        if not self.table.key:
            return ()
        present = {self._key(key) for key in keys}
        absent = [key for rows in self._loaded.values() for key in rows if key not in present]
        pattern, said = self.table.pattern, []
        if absent:
            said.append(f"{len(absent)} row(s) of {pattern} have no folder, for example {' '.join(absent[0])}")
        if self._unlisted:
            said.append(f"{self._unlisted} row(s) are not listed in {pattern} and have nulls for what it says")
        return tuple(said)

    def _key(self, key: Key) -> Key:
        names = dict(zip(self.recipe.key, key, strict=True))
        return tuple(names[name] for name in self.table.key)

    def _load(self, path: str) -> dict[Key, list[Any]]:
        check_joined_table_fits(path, self.small.memory, self.small.tree.size(path))
        lines = _read_lines(self.small.tree, path)
        _, header = next(lines, (0, ()))
        places = _places(header, self.table, path)
        rows: dict[Key, list[Any]] = {}
        first: dict[Key, int] = {}
        for number, line in lines:
            cell = {source: line[at] if at < len(line) else None for source, at in places.items()}
            key = tuple(_as_text(cell[source]) for source in self.table.key.values())
            if key in rows:
                what = f"lists {' '.join(key)} twice" if key else "should have a single row and has more"
                raise SourceError(
                    f"{path!r} {what}: {_line_or_row(path)}s {first[key]} and {number}.",
                    hint="Remove one of them." if key else "Add key to the recipe to choose one.",
                    path=path,
                )
            rows[key] = [self._value(cell, column, path, number) for column in self.table.columns]
            first[key] = number
        return rows

    def _value(self, cell: dict[str, Any], column: TableColumn, path: str, number: int) -> Any:
        value = cell.get(column.source)
        try:
            return _parse_value(value, column.type, self.table.null)
        except ValueError as error:
            raise SourceError(
                f"{path!r}, {_line_or_row(path)} {number}: {column.source} is {value!r}, which is not {error}.",
                hint="Fix it, or change its type or the table's null in the recipe.",
                path=path,
            ) from error


def _line_or_row(path: str) -> str:
    """What the numbers of a table count, from 1: lines of a text, or rows of a sheet as it shows them."""
    return "row" if path.lower().endswith((".xlsx", ".xls")) else "line"


def _places(header: Sequence[Any], table: RecipeTable, path: str) -> dict[str, int]:
    """Where each wanted column stands. Names are compared without regard to case and blanks."""
    there = {_folded(name): at for at, name in reversed(list(enumerate(header)))}
    optional = {column.source for column in table.columns if column.optional}
    wanted = [*table.key.values(), *(column.source for column in table.columns)]
    for source in wanted:
        if _folded(source) not in there and source not in optional:
            raise SourceError(
                f"{path!r} has no column {source!r}.",
                hint=f"Its columns are: {', '.join(map(_as_text, header))}. "
                "If it may be missing, set optional = true in the recipe.",
                path=path,
            )
    return {source: there[_folded(source)] for source in wanted if _folded(source) in there}


def _folded(name: Any) -> str:
    return " ".join(_as_text(name).split()).casefold()


def _as_text(value: Any) -> str:
    """A cell as text; a spreadsheet's 71.0 is 71."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value).strip()


def _parse_value(value: Any, kind: str, null: tuple[str, ...]) -> Any:
    """A cell in its type, or None. ValueError says what it should have been."""
    text = _as_text(value)
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


def _read_lines(tree: Tree, path: str) -> Lines:
    """(number, cells) of each line that is not blank; the first is the header."""
    try:
        lines = _spreadsheet(tree, path) if path.lower().endswith(".xlsx") else _delimited(tree, path)
        for number, line in lines:
            if any(_as_text(cell) for cell in line):
                yield number, line
    except (UnicodeDecodeError, csv.Error, zipfile.BadZipFile, ParseError, KeyError, ValueError, OSError) as error:
        raise SourceError(f"The table {path!r} cannot be read: {error}.", path=path) from error


def _delimited(tree: Tree, path: str) -> Lines:
    with tree.text(path, newline="") as file:
        reader = csv.reader(file, delimiter="\t" if path.lower().endswith(".tsv") else ",")
        for line in reader:
            yield reader.line_num, line


def _spreadsheet(tree: Tree, path: str) -> Lines:
    """The first sheet."""
    try:
        import openpyxl
    except ImportError as error:
        raise missing("neuro", "Reading spreadsheets needs openpyxl.", "openpyxl") from error
    with warnings.catch_warnings(), tree.open(path) as file:
        warnings.simplefilter("ignore")  # about styles, which nobody needs here
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        try:
            yield from enumerate(book.worksheets[0].iter_rows(values_only=True), start=1)
        finally:
            book.close()
