"""Recipes: small TOML files that say how a folder becomes rows and columns, and what to expect of it.

This module reads and checks recipes. `recipe_rows` walks the folder; docs/reference/recipes.md describes every key. A
recipe is data: it cannot name code.

What it expects of a whole dataset is held against what was found: in a folder, or in what is published. Whoever looked
hands over numbers; nothing is read here but the files that a recipe requires.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from importlib import resources
from typing import Any

import pyarrow as pa

from brim.errors import InputError
from brim.records import dataclass
from brim.sources.features import KINDS
from brim.sources.file_table import Finding
from brim.sources.folder_tree import Tree
from brim.state.atomic_files import reason

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
            raise InputError(f"{self.shown}: {key} is missing.", hint="`brim recipes arc` shows a complete recipe.")
        return self.values.get(key, default)

    def text(self, key: str, default: str | None = None, allowed: tuple[str, ...] = ()) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "must be a text")
        if allowed and value not in allowed:
            raise self.wrong(key, f"must be one of {', '.join(allowed)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
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

    def mapping(self, key: str) -> dict[str, str]:
        value = self.values.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise self.wrong(key, "must be a table of texts")
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
    """A column of files: `pattern` finds a row's, `type` "text" takes their content as a string.

    Where a row has none, the patterns of `fallback` are tried in turn. A column that is `beside` another holds for
    each file of that one its partner, and null where there is none if `missing` says so. With `split`, a column for
    each value of that entity in the names of the files; `values` are those that may occur.
    """

    name: str
    pattern: str
    type: str
    is_list: bool = False
    fallback: tuple[str, ...] = ()
    beside: str = ""
    missing: str = "error"
    split: str = ""
    values: tuple[str, ...] = ()
    final_newline: bool = True

    def split_name(self, value: str) -> str:
        return f"{self.name}_{re.sub('[^0-9A-Za-z]+', '_', value)}"


@dataclass(frozen=True)
class EntityColumn:
    """A column of what the names of the files in column `of` say: the value of `entity`, by `map` if it is in it."""

    name: str
    entity: str
    of: str
    map: Mapping[str, str] = field(default_factory=dict)
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
    """What the published dataset is said to hold, and the `snapshot` of it that is meant: numbers are lowest and
    highest. `counts` are of rows that have a column, `files` of the files in it."""

    required: tuple[str, ...] = ()
    rows: Span | None = None
    subjects: Span | None = None
    sessions: Span | None = None
    counts: Mapping[str, Span] = field(default_factory=dict)
    files: Mapping[str, Span] = field(default_factory=dict)
    snapshot: str = ""
    tolerance: float = _TOLERANCE
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """Everything a recipe says. `toml` is its text. Of several `roots`, the first that is there is read."""

    name: str
    title: str
    rows: tuple[str, ...]
    key: tuple[str, ...]
    columns: tuple[RecipeColumn | EntityColumn, ...]
    root: str = ""
    roots: tuple[str, ...] = ()
    tables: tuple[RecipeTable, ...] = ()
    expect: Expect = field(default_factory=Expect)
    unmatched_is_error: bool = False
    toml: str = field(default="", repr=False)

    @property
    def of_files(self) -> list[RecipeColumn]:
        """The columns that take files, or their texts."""
        return [column for column in self.columns if isinstance(column, RecipeColumn)]

    def row_name(self, key: Key) -> str:
        return " ".join(f"{name}={value}" for name, value in zip(self.key, key, strict=True))

    def value_columns(self) -> list[TableColumn]:
        return [column for table in self.tables for column in table.columns]

    def besides(self) -> dict[str, str]:
        """Columns that go element by element with another one."""
        found = {column.name: column.beside for column in self.of_files if column.beside}
        lists = [column for column in self.columns if isinstance(column, EntityColumn) and column.is_list]
        return found | {column.name: column.of for column in lists}


def builtin_recipes() -> list[Recipe]:
    """The recipes that come with brim, by name."""
    return [parse_recipe(text, f"{name}.toml") for name, text in sorted(_builtin_texts().items())]


def load_recipe(name_or_path: str) -> Recipe:
    """A built-in recipe by name, or one from a file that ends in .toml."""
    if not name_or_path.endswith(".toml"):
        texts = _builtin_texts()
        if name_or_path not in texts:
            raise InputError(
                f"Unknown recipe {name_or_path!r}. The built-in recipes are: {', '.join(sorted(texts))}.",
                hint="Use one of them, or a file that ends in .toml.",
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
    allowed = ("name", "title", "root", "rows", "key", "columns", "tables", "expect", "unmatched")
    top = TomlTable(given, shown, allowed)
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
    if all(isinstance(column, EntityColumn) or column.type == "text" for column in columns):
        raise InputError(
            f"{shown}: no column of files is defined.", hint="Add [[columns]] with name, pattern and type."
        )
    columns = tuple(_with_partner(column, columns, f"{shown}, columns[{i}]") for i, column in enumerate(columns))
    names = [*key, *_names(columns), *(c.name for table in tables for c in table.columns)]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{shown}: two columns are named {twice!r}.", hint="Rename one of them.")
    root, roots = _roots(top, shown)
    name = top.text("name")
    return Recipe(
        name,
        top.text("title", name),
        rows,
        key,
        columns,
        root,
        roots,
        tables,
        _expect(top.values.get("expect", {}), f"{shown}, expect", names[len(key) :], columns),
        top.text("unmatched", "report", ("report", "error")) == "error",
        text,
    )


def _names(columns: tuple[RecipeColumn | EntityColumn, ...]) -> list[str]:
    """The names that columns will have; those of a split without values are found with the files."""
    names: list[str] = []
    for column in columns:
        split = isinstance(column, RecipeColumn) and column.split
        names += [column.split_name(value) for value in column.values] if split else [column.name]  # type: ignore[union-attr]
    return names


def _roots(top: TomlTable, shown: str) -> tuple[str, tuple[str, ...]]:
    """The folder that is read, or those of which the first that is there is; "." is the source itself."""
    given = top.values.get("root", "")
    several = isinstance(given, list)
    roots = [
        "" if several and root == "." else _pattern(root, (), f"{shown}: root")
        for root in top.texts("root", ())
        if root
    ]
    for root in roots:
        if has_glob(root):
            raise InputError(f"{shown}: root must name one folder, not {root!r}.")
    return ("", tuple(roots)) if several else (roots[0] if roots else "", ())


def _column(item: Any, shown: str, key: tuple[str, ...]) -> RecipeColumn | EntityColumn:
    if isinstance(item, dict) and "entity" in item:
        return _entity_column(item, shown)
    allowed = ("name", "pattern", "type", "list", "fallback", "beside", "missing", "split", "values", "final_newline")
    place = TomlTable(item, shown, allowed)
    beside, kind = place.text("beside", ""), place.text("type", None, COLUMN_TYPES)
    known = (*key, "entities") if beside else key
    pattern = _pattern(place.text("pattern"), known, f"{shown}: pattern")
    fallback = tuple(_pattern(glob, known, f"{shown}: fallback") for glob in place.texts("fallback", ()))
    split, values = place.text("split", ""), place.texts("values", ())
    for option, needs, there in (
        ("missing", "beside", beside),
        ("values", "split", split),
    ):
        if option in place.values and not there:
            raise InputError(f"{shown}: {option} can only be used with {needs}.")
    if "final_newline" in place.values and kind != "text":
        raise InputError(f'{shown}: final_newline can only be used with type = "text".')
    if split and beside:
        raise InputError(f"{shown}: a column cannot have both split and beside.")
    return RecipeColumn(
        place.text("name"),
        pattern,
        kind,
        place.flag("list"),
        fallback,
        beside,
        place.text("missing", "error", ("error", "null")),
        split,
        values,
        place.flag("final_newline", True),
    )


def _entity_column(item: Any, shown: str) -> EntityColumn:
    place = TomlTable(item, shown, ("name", "entity", "of", "map", "type", "list"))
    place.text("type", "string", ("string",))
    entity = place.text("entity")
    if not re.fullmatch(r"[A-Za-z0-9]+", entity):
        raise place.wrong("entity", "must be the name of an entity, such as acq for acq-spc3")
    return EntityColumn(place.text("name"), entity, place.text("of"), place.mapping("map"), place.flag("list"))


def _with_partner(
    column: RecipeColumn | EntityColumn, columns: tuple[RecipeColumn | EntityColumn, ...], shown: str
) -> RecipeColumn | EntityColumn:
    """A column that goes with another, checked: that one holds files of its own, and says whether both are lists."""
    key, name = ("of", column.of) if isinstance(column, EntityColumn) else ("beside", column.beside)
    if not name:
        return column
    own = [c for c in columns if isinstance(c, RecipeColumn) and not c.beside and not c.split and c.type != "text"]
    partner = next((c for c in own if c.name == name), None)
    if partner is None:
        raise InputError(
            f"{shown}: {key} names {name!r}, which is not a column of files.",
            hint=f"Columns of files are: {', '.join(c.name for c in own) or 'none'}.",
        )
    if isinstance(column, EntityColumn):
        if column.is_list and not partner.is_list:
            raise InputError(f"{shown}: {column.name!r} is a list, and {name!r} is not.")
        return column
    if column.is_list and not partner.is_list:
        raise InputError(f"{shown}: {column.name!r} is a list, and {name!r}, which it must match, is not.")
    return replace(column, is_list=partner.is_list)


def _table(item: Any, shown: str, key: tuple[str, ...]) -> RecipeTable:
    place = TomlTable(item, shown, ("pattern", "key", "columns", "null"))
    pattern = _pattern(place.text("pattern"), key, f"{shown}: pattern")
    if not pattern.lower().endswith(TABLE_EXTENSIONS):
        raise place.wrong("pattern", f"must end in {', '.join(TABLE_EXTENSIONS)}")
    match = TomlTable(place.values.get("key", {}), f"{shown}: key", key)
    joined = {name: match.text(name) for name in match.values}
    if not joined and not _PLACEHOLDER.search(pattern):
        raise InputError(
            f"{shown}: {pattern!r} is one table for all rows, so key must name the column to join by.",
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


def _expect(item: Any, shown: str, names: list[str], columns: tuple[RecipeColumn | EntityColumn, ...]) -> Expect:
    allowed = ("required", "rows", "subjects", "sessions", "counts", "files", "snapshot", "tolerance", "note")
    place = TomlTable(item, shown, allowed)
    required = tuple(_pattern(path, (), f"{shown}: required") for path in place.texts("required", ()))
    split = [column for column in columns if isinstance(column, RecipeColumn) and column.split]
    groups = [column.name for column in split]  # any of the columns that one is split into
    spans = {}
    for key in ("counts", "files"):
        given = place.values.get(key, {})
        found = [n for n in given if any(c.split and not c.values and n.startswith(f"{c.name}_") for c in split)]
        numbers = TomlTable(given, f"{shown}.{key}", (*names, *groups, *found))
        spans[key] = {name: numbers.span(name) or (0, 0) for name in numbers.values}
    tolerance = place.values.get("tolerance", _TOLERANCE)
    if type(tolerance) not in (int, float) or not 0 <= tolerance < 1:
        raise place.wrong("tolerance", "must be a number from 0 to below 1")
    rows, subjects, sessions = place.span("rows"), place.span("subjects"), place.span("sessions")
    snapshot, note = place.text("snapshot", ""), place.text("note", "")
    counts, files = spans["counts"], spans["files"]
    return Expect(required, rows, subjects, sessions, counts, files, snapshot, float(tolerance), note)


def has_glob(part: str) -> bool:
    return "*" in part or "?" in part


def _pattern(pattern: str, key: tuple[str, ...], shown: str) -> str:
    """A relative pattern whose placeholders are names of the row key."""
    parts = pattern.split("/")
    if not pattern or pattern.startswith("/") or "\\" in pattern or any(part in ("", ".", "..") for part in parts):
        raise InputError(f"{shown} must be a relative path with / between its parts, not {pattern!r}.")
    if "**" in pattern or "[" in pattern:
        raise InputError(
            f"{shown} {pattern!r}: only the wildcards * and ? are allowed, each within one part of the path."
        )
    unknown = [name for name in _PLACEHOLDER.findall(pattern) if name not in key]
    if unknown or re.search("[{}]", _PLACEHOLDER.sub("", pattern)):
        allowed = ", ".join(f"{{{name}}}" for name in key) or "none here"
        what = f"{{{unknown[0]}}}" if unknown else "a brace"
        raise InputError(f"{shown} {pattern!r}: {what} is not a placeholder.", hint=f"Placeholders: {allowed}.")
    return pattern


@dataclass
class Counted:
    """What was found: rows that hold something in a column, and files in it; both by the column's name."""

    rows: int = 0
    subjects: int = 0
    sessions: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)


def expectation_findings(
    recipe: Recipe, counted: Counted, tolerance: float | None = None, partly: Sequence[str] = ()
) -> list[Finding]:
    """Every number that the recipe expects. They are not compared if the source was read `partly`, by these options."""
    expect = recipe.expect
    share = expect.tolerance if tolerance is None else tolerance
    if not 0 <= share <= 1:
        raise InputError(f"--tolerance takes a share from 0 to 1, not {share}.")
    numbers: list[tuple[str, Span | None, int]] = [
        ("rows", expect.rows, counted.rows),
        (f"distinct {recipe.key[0]}", expect.subjects, counted.subjects),
        ("sessions", expect.sessions, counted.sessions),
    ]
    numbers += [(f"rows with {name}", span, counted.counts.get(name, 0)) for name, span in expect.counts.items()]
    numbers += [(f"files in {name}", span, counted.files.get(name, 0)) for name, span in expect.files.items()]
    wanted = [(name, span, count) for name, span, count in numbers if span is not None]
    if wanted and partly:
        detail = f"not compared: the source was read with {', '.join(partly)}"
        return [Finding("numbers", True, detail, skipped=True)]
    return [_compared(name, span, count, share, expect) for name, span, count in wanted]


def required_findings(recipe: Recipe, tree: Tree) -> list[Finding]:
    """Every file that the recipe says must be there."""
    return [_required(tree, path, recipe.root) for path in recipe.expect.required]


def _required(tree: Tree, path: str, root: str) -> Finding:
    full = f"{root}/{path}" if root else path
    if tree.is_file(full):
        size = tree.size(full)
        return Finding(f"file {path}", size > 0, "is there" if size else "is empty (0 bytes)")
    what = "is a link that leads nowhere: its content is not here" if tree.is_link(full) else "is missing"
    return Finding(f"file {path}", False, what)


def _compared(name: str, span: Span, count: int, tolerance: float, expect: Expect) -> Finding:
    low = math.ceil(round(span[0] * (1 - tolerance), 6))
    high = math.floor(round(span[1] * (1 + tolerance), 6))
    expected = f"{span[0]:,}" if span[0] == span[1] else f"{span[0]:,} to {span[1]:,}"
    room = f", {low:,} to {high:,} with a tolerance of {tolerance:g}" if tolerance else ""
    of = f" in {expect.snapshot}" if expect.snapshot else ""
    return Finding(name, low <= count <= high, f"{count:,}; expected {expected}{room}{of}")
