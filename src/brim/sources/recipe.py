"""Recipes: small TOML files that say how a folder becomes rows and columns, and what to expect of it.

This module reads and checks recipes, and compares a table with what its recipe expects. `recipe_rows`
walks the folder; docs/recipes.md describes every key.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from brim.buckets.listing import stat_object
from brim.errors import InputError
from brim.sources.features import KINDS
from brim.sources.file_table import FileColumn, FileTable, one_array
from brim.state.durable import reason

Span = tuple[int, int]  # lowest and highest


class TomlTable:
    """The values of a table, of which only some keys are `allowed`; `shown` is where it stands."""

    def __init__(self, values: Any, shown: str, allowed: tuple[str, ...]) -> None:
        if not isinstance(values, dict):
            raise InputError(f"{shown} must be a table of keys, not {values!r}.", hint=f"Keys: {', '.join(allowed)}.")
        unknown = [key for key in values if key not in allowed]
        if unknown:
            raise InputError(f"{shown}: unknown key {unknown[0]!r}.", hint=f"Allowed: {', '.join(allowed)}.")
        self.values, self.shown = values, shown

    def wrong(self, key: str, what: str) -> InputError:
        return InputError(f"{self.shown}: {key} {what}, not {self.values.get(key)!r}.")

    def _value(self, key: str, default: Any) -> Any:
        if key not in self.values and default is None:
            raise InputError(f"{self.shown}: {key} is missing.", hint="`brim recipes arc` shows a whole recipe.")
        return self.values.get(key, default)

    def text(self, key: str, default: str | None = None, allowed: tuple[str, ...] = ()) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "must be a text")
        if allowed and value not in allowed:
            raise self.wrong(key, f"must be one of {', '.join(allowed)}")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        value = self._value(key, default)
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "must be a list of texts")
        return tuple(value)

    def tables(self, key: str) -> list[Any]:
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise InputError(f"{self.shown}: {key} must be written as [[{key}]].")
        return value

    def span(self, key: str) -> Span | None:
        value = self.values.get(key)
        if value is None:
            return None
        pair = value if isinstance(value, list) else [value, value]
        if len(pair) != 2 or not all(type(n) is int and n >= 0 for n in pair) or pair[0] > pair[1]:
            raise self.wrong(key, "must be a number or [lowest, highest]")
        return pair[0], pair[1]


COLUMN_TYPES = (*KINDS, "text")
VALUE_TYPES = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}
TABLE_EXTENSIONS = (".csv", ".tsv", ".xlsx")
_NULLS = ("n/a", "")
_TOLERANCE = 0.1
_PLACEHOLDER = re.compile(r"\{(\w+)\}")

Key = tuple[str, ...]  # what tells a row from all others, such as its subject and session


@dataclass(frozen=True)
class RecipeColumn:
    """A column of files: `pattern` finds a row's, `type` "text" takes their content as a string."""

    name: str
    pattern: str
    type: str
    is_list: bool = False


@dataclass(frozen=True)
class TableColumn:
    """A column taken from a joined table. An `optional` one may be absent from the table."""

    source: str
    name: str
    type: str
    optional: bool = False


@dataclass(frozen=True)
class RecipeTable:
    """A table to join. `key` maps names of the row key to columns of the table; without it the table,
    found for each row, has a single row of its own. Cells that read as one of `null` are null."""

    pattern: str
    columns: tuple[TableColumn, ...]
    key: Mapping[str, str] = field(default_factory=dict)
    null: tuple[str, ...] = _NULLS


@dataclass(frozen=True)
class Expect:
    """What the published dataset is said to hold: numbers are lowest and highest."""

    required: tuple[str, ...] = ()
    rows: Span | None = None
    subjects: Span | None = None
    counts: Mapping[str, Span] = field(default_factory=dict)
    tolerance: float = _TOLERANCE
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """Everything a recipe says. `toml` is its text."""

    name: str
    title: str
    rows: tuple[str, ...]
    key: tuple[str, ...]
    columns: tuple[RecipeColumn, ...]
    root: str = ""
    tables: tuple[RecipeTable, ...] = ()
    expect: Expect = field(default_factory=Expect)
    toml: str = field(default="", repr=False)

    def file_columns(self) -> dict[str, FileColumn]:
        return {c.name: FileColumn(c.type, c.is_list) for c in self.columns if c.type != "text"}

    def row_name(self, key: Key) -> str:
        return " ".join(f"{name}={value}" for name, value in zip(self.key, key, strict=True))

    def value_columns(self) -> list[TableColumn]:
        return [column for table in self.tables for column in table.columns]


@dataclass(frozen=True, slots=True)
class Finding:
    """One expectation, and whether it holds."""

    name: str
    ok: bool
    detail: str


def builtin_recipes() -> list[Recipe]:
    """The recipes that come with brim, by name."""
    return [parse_recipe(text, f"{name}.toml") for name, text in sorted(_builtin_texts().items())]


def load_recipe(name_or_path: str) -> Recipe:
    """A built-in recipe by name, or one from a file that ends in .toml."""
    if not name_or_path.endswith(".toml"):
        texts = _builtin_texts()
        if name_or_path not in texts:
            raise InputError(
                f"There is no recipe {name_or_path!r}. The built-in ones are: {', '.join(sorted(texts))}.",
                hint="Use one of them, or give a file that ends in .toml.",
            )
        return parse_recipe(texts[name_or_path], f"{name_or_path}.toml")
    shown = os.path.basename(name_or_path)
    try:
        with open(name_or_path, encoding="utf-8-sig") as file:
            return parse_recipe(file.read(), shown)
    except OSError as error:
        raise InputError(f"The recipe {name_or_path!r} cannot be read: {reason(error)}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"The recipe {shown!r} is not UTF-8 text (byte {error.start}).") from error


def expectation_findings(table: FileTable, recipe: Recipe, folder: str, tolerance: float | None) -> list[Finding]:
    """Every expectation of the recipe held against the table and the folder it was read from.

    Files that are there but cannot be packaged (annex links whose content is elsewhere) count as there.
    Numbers are not compared if the table was read in part, with --include, --exclude or --limit.
    """
    expect = recipe.expect
    share = expect.tolerance if tolerance is None else tolerance
    if not 0 <= share <= 1:
        raise InputError(f"--tolerance takes a share from 0 to 1, not {share}.")
    findings = [_required(table, folder, path, recipe.root) for path in expect.required]
    numbers: list[tuple[str, Span, int]] = []
    if expect.rows is not None:
        numbers.append(("rows", expect.rows, len(table)))
    if expect.subjects is not None:
        distinct = pc.count_distinct(table.rows.column(recipe.key[0])).as_py()
        numbers.append((f"distinct {recipe.key[0]}", expect.subjects, distinct))
    counts = _counts(table, recipe) if expect.counts else {}
    numbers += [(f"rows with {name}", span, counts[name]) for name, span in expect.counts.items()]
    part = [f"--{option}" for option in ("include", "exclude", "limit") if table.recipe.get(option)]
    if numbers and part:
        return [*findings, Finding("numbers", True, f"not compared: the source was read with {', '.join(part)}")]
    return findings + [_compared(name, span, count, share) for name, span, count in numbers]


def _required(table: FileTable, folder: str, path: str, root: str) -> Finding:
    full = os.path.join(folder, root, path)
    if table.files.bucket is not None:
        found = stat_object(table.files.bucket.below(f"{root}/{path}" if root else path))
        size = None if found is None else found.st_size
    else:
        size = os.path.getsize(full) if os.path.isfile(full) else None
    if size is not None:
        return Finding(f"file {path}", size > 0, "is there" if size else "is empty (0 bytes)")
    what = "is a link that leads nowhere: its content is not here" if os.path.islink(full) else "is missing"
    return Finding(f"file {path}", False, what)


def _compared(name: str, span: Span, count: int, tolerance: float) -> Finding:
    low = math.ceil(round(span[0] * (1 - tolerance), 6))
    high = math.floor(round(span[1] * (1 + tolerance), 6))
    expected = f"{span[0]:,}" if span[0] == span[1] else f"{span[0]:,} to {span[1]:,}"
    room = f", {low:,} to {high:,} with a tolerance of {tolerance:g}" if tolerance else ""
    return Finding(name, low <= count <= high, f"{count:,}; expected {expected}{room}")


def _counts(table: FileTable, recipe: Recipe) -> dict[str, int]:
    """For each column the rows that hold something in it."""
    numbered = set(table.files.paths.to_pylist()) if table.refused else set()
    absent = [r.path for r in table.refused if r.path not in numbered]
    counts = {}
    for column in recipe.columns:
        array = one_array(table.rows.column(column.name))
        if column.is_list:
            counts[column.name] = int(pc.sum(pc.greater(pc.list_value_length(array), 0)).as_py() or 0)
        else:
            pattern = path_regex(f"{recipe.root}/{column.pattern}" if recipe.root else column.pattern)
            counts[column.name] = len(array) - array.null_count + sum(bool(pattern.match(path)) for path in absent)
    for value in recipe.value_columns():
        array = table.rows.column(value.name)
        counts[value.name] = len(array) - array.null_count
    return counts


def path_regex(pattern: str) -> re.Pattern[str]:
    """What a pattern matches with any row key. `*` stays within a folder."""
    text = re.escape(_PLACEHOLDER.sub("*", pattern))
    return re.compile(text.replace(r"\*", "[^/]*").replace(r"\?", "[^/]") + r"\Z")


def _builtin_texts() -> dict[str, str]:
    folder = resources.files("brim.sources") / "recipes"
    return {
        item.name.removesuffix(".toml"): item.read_text(encoding="utf-8")
        for item in folder.iterdir()
        if item.name.endswith(".toml")
    }


def parse_recipe(text: str, shown: str = "the recipe") -> Recipe:
    """A recipe from its text; `shown` is what errors call it."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"The recipe {shown!r} is not valid TOML: {error}.") from error
    top = TomlTable(given, shown, ("name", "title", "root", "rows", "key", "columns", "tables", "expect"))
    key = top.texts("key")
    rows = tuple(_pattern(glob, (), f"{shown}: rows") for glob in top.texts("rows"))
    for glob in rows:
        parts = sum(has_glob(part) for part in glob.split("/"))
        if not parts or parts != len(key):
            raise InputError(
                f"{shown}: rows {glob!r} has {parts} part(s) with a *, but key names {len(key)}.",
                hint='Each such part becomes a column: rows = "sub-*/ses-*", key = ["subject_id", "session_id"].',
            )
    columns = tuple(_column(item, f"{shown}, columns[{i}]", key) for i, item in enumerate(top.tables("columns")))
    tables = tuple(_table(item, f"{shown}, tables[{i}]", key) for i, item in enumerate(top.tables("tables")))
    root = _pattern(top.text("root"), (), f"{shown}: root") if top.text("root", "") else ""
    if has_glob(root):
        raise InputError(f"{shown}: root must name one folder, not {root!r}.")
    if all(column.type == "text" for column in columns):
        raise InputError(f"{shown}: there is no column of files.", hint="Add [[columns]] with name, pattern and type.")
    names = [*key, *(c.name for c in columns), *(c.name for table in tables for c in table.columns)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{shown}: two columns are named {twice!r}.", hint="Rename one of them.")
    expect = _expect(top.values.get("expect", {}), f"{shown}, expect", names[len(key) :])
    name = top.text("name")
    return Recipe(name, top.text("title", name), rows, key, columns, root, tables, expect, text)


def _column(item: Any, shown: str, key: tuple[str, ...]) -> RecipeColumn:
    place = TomlTable(item, shown, ("name", "pattern", "type", "list"))
    pattern = _pattern(place.text("pattern"), key, f"{shown}: pattern")
    return RecipeColumn(place.text("name"), pattern, place.text("type", None, COLUMN_TYPES), place.flag("list"))


def _table(item: Any, shown: str, key: tuple[str, ...]) -> RecipeTable:
    place = TomlTable(item, shown, ("pattern", "key", "columns", "null"))
    pattern = _pattern(place.text("pattern"), key, f"{shown}: pattern")
    if not pattern.lower().endswith(TABLE_EXTENSIONS):
        raise place.wrong("pattern", f"must end in {', '.join(TABLE_EXTENSIONS)}")
    match = TomlTable(place.values.get("key", {}), f"{shown}: key", key)
    joined = {name: match.text(name) for name in match.values}
    if not joined and not _PLACEHOLDER.search(pattern):
        raise InputError(
            f"{shown}: {pattern!r} is one table for all rows, and key does not say how to join it.",
            hint=f'Add key = {{{key[0]} = "NAME_OF_ITS_COLUMN"}}, or a placeholder like {{{key[0]}}} to the pattern.',
        )
    given = place.values.get("columns")
    if not isinstance(given, dict) or not given:
        raise InputError(
            f"{shown}: columns is missing.", hint='Write [tables.columns] and "Age" = {name = "age", ...}.'
        )
    columns = []
    for source, about in given.items():
        cell = TomlTable(about, f"{shown}, columns.{source}", ("name", "type", "optional"))
        kind = cell.text("type", None, tuple(VALUE_TYPES))
        columns.append(TableColumn(source, cell.text("name", source), kind, cell.flag("optional")))
    null = tuple(text.casefold() for text in place.texts("null", _NULLS))
    return RecipeTable(pattern, tuple(columns), joined, null)


def _expect(item: Any, shown: str, names: list[str]) -> Expect:
    place = TomlTable(item, shown, ("required", "rows", "subjects", "counts", "tolerance", "note"))
    required = tuple(_pattern(path, (), f"{shown}: required") for path in place.texts("required", ()))
    counts = TomlTable(place.values.get("counts", {}), f"{shown}.counts", tuple(names))
    spans = {name: counts.span(name) or (0, 0) for name in counts.values}
    tolerance = place.values.get("tolerance", _TOLERANCE)
    if type(tolerance) not in (int, float) or not 0 <= tolerance < 1:
        raise place.wrong("tolerance", "must be a number from 0 to below 1")
    rows, subjects = place.span("rows"), place.span("subjects")
    return Expect(required, rows, subjects, spans, float(tolerance), place.text("note", ""))


def has_glob(part: str) -> bool:
    return "*" in part or "?" in part


def _pattern(pattern: str, key: tuple[str, ...], shown: str) -> str:
    """A relative pattern whose placeholders are names of the row key."""
    parts = pattern.split("/")
    if not pattern or pattern.startswith("/") or "\\" in pattern or any(part in ("", ".", "..") for part in parts):
        raise InputError(f"{shown} must be a relative path with / between its parts, not {pattern!r}.")
    if "**" in pattern or "[" in pattern:
        raise InputError(f"{shown} {pattern!r}: only * and ? are understood, each within one part of the path.")
    unknown = [name for name in _PLACEHOLDER.findall(pattern) if name not in key]
    if unknown or re.search("[{}]", _PLACEHOLDER.sub("", pattern)):
        allowed = ", ".join(f"{{{name}}}" for name in key) or "none here"
        what = f"{{{unknown[0]}}}" if unknown else "a brace"
        raise InputError(f"{shown} {pattern!r}: {what} stands for nothing.", hint=f"Placeholders: {allowed}.")
    return pattern
