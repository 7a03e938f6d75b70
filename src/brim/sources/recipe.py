"""Recipes: how a folder becomes rows and columns, and which files and counts the complete dataset should have.

A recipe is a small TOML file (docs/reference/recipes.md describes every key), or is derived from a BIDS folder by
bids_recipe.py. It is data and cannot name code. recipe_rows.py makes the rows.

Covered: the parts of a recipe, reading them from TOML, and comparing expected counts with those that were found.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, replace
from importlib import resources
from typing import Any, TypeVar, get_args, get_type_hints

import pyarrow as pa

from brim.errors import InputError
from brim.options.groups import BidsOptions
from brim.records import dataclass
from brim.sources.features import KINDS
from brim.sources.file_table import Finding
from brim.sources.folder_tree import Tree
from brim.state.atomic_files import reason

COLUMN_TYPES = (*KINDS, "text")
VALUE_TYPES = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}
TABLE_EXTENSIONS = (".csv", ".tsv", ".xlsx")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_OTHER_KEYS = {"beside": "aligned_with", "list": "is_list"}  # an earlier spelling; the other kind of recipe

Key = tuple[str | None, ...]  # the identity of a row, such as its subject and session
Span = tuple[int, int]  # lowest and highest
T = TypeVar("T")


def toml_key(name: str, default: Any = MISSING) -> Any:
    """Return a field whose key in TOML is not its name."""
    return field(default=default, metadata={"key": name})


def one_of(choices: Sequence[str], default: Any = MISSING) -> Any:
    """Return a field whose value is one of some texts."""
    return field(default=default, metadata={"choices": tuple(choices)})


@dataclass(frozen=True, kw_only=True)
class RecipeColumn:
    """A column of files, or of their texts (type "text").

    `pattern` finds the files of a row. If a row has none, the patterns of `fallback` are tried in turn. A column that
    is `aligned_with` another has for each file of that one its partner; without a partner `missing` decides between an
    error and null. `split` makes a column for each value of that entity in the file names, which must be one of
    `values` if there are any.
    """

    name: str
    pattern: str
    type: str = one_of(COLUMN_TYPES)
    is_list: bool = toml_key("list", False)
    fallback: tuple[str, ...] = ()
    aligned_with: str = ""
    missing: str = one_of(("error", "null"), "error")
    split: str = ""
    values: tuple[str, ...] = ()
    final_newline: bool = True

    def split_name(self, value: str) -> str:
        return f"{self.name}_{re.sub('[^0-9A-Za-z]+', '_', value)}"


@dataclass(frozen=True, kw_only=True)
class EntityColumn:
    """A column with the value of an `entity` in the names of the files of column `of`, renamed by `map`."""

    name: str
    entity: str
    of: str
    map: Mapping[str, str] = field(default_factory=dict)
    type: str = one_of(("string",), "string")
    is_list: bool = toml_key("list", False)


@dataclass(frozen=True, kw_only=True)
class BidsColumn:
    """A column of the files of one suffix in a BIDS dataset, and the columns that are aligned with it.

    `group` is the type of the files, or their extension if no type decodes it. `extras` are sidecars (json, events,
    bval, bvec), `scans` columns of scans.tsv as "name:type".
    """

    name: str
    suffix: str
    datatype: str = ""  # empty for files above the folders of datatypes
    group: str
    kind: str = one_of(COLUMN_TYPES)
    is_list: bool
    derivative: str = ""
    entities: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    scans: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column of a joined table, by its name there (`source`). An `optional` column may be absent from the table."""

    source: str
    name: str = ""
    type: str = one_of(tuple(VALUE_TYPES))
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class RecipeTable:
    """A table to join. `key` maps names of the row key to columns of the table.

    Without `key`, each row has a table with a single line. Cells that read as one of `null` are null.
    """

    pattern: str
    key: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[TableColumn, ...]
    null: tuple[str, ...] = ("n/a", "")


@dataclass(frozen=True, kw_only=True)
class Expect:
    """Files and numbers that the complete dataset should have. `snapshot` names the version that the numbers are of.

    `counts` are rows that have something in a column, `files` the files in it.
    """

    required: tuple[str, ...] = ()
    rows: Span | None = None
    subjects: Span | None = None
    sessions: Span | None = None
    counts: Mapping[str, Span] = field(default_factory=dict)
    files: Mapping[str, Span] = field(default_factory=dict)
    snapshot: str = ""
    tolerance: float = 0.1
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All parts of a recipe. Of several `roots`, the first that exists is read. `toml` is the text."""

    name: str
    title: str = ""
    rows: tuple[str, ...]
    key: tuple[str, ...]
    columns: tuple[RecipeColumn | EntityColumn | BidsColumn, ...] = ()
    root: str = ""
    roots: tuple[str, ...] = ()
    tables: tuple[RecipeTable, ...] = ()
    expect: Expect = field(default_factory=Expect)
    unmatched: str = one_of(("report", "error"), "report")
    bids: BidsOptions | None = None  # of a BIDS dataset
    metadata: Mapping[str, str] = field(default_factory=dict)  # types of the columns that its tables add
    toml: str = field(default="", repr=False)

    @property
    def file_columns(self) -> list[RecipeColumn]:
        """The columns of files found by patterns, or of their texts."""
        return [column for column in self.columns if isinstance(column, RecipeColumn)]

    def row_name(self, key: Key) -> str:
        """Return the name of a row in messages, from the values of its key."""
        return " ".join(f"{name}={value}" for name, value in zip(self.key, key, strict=True) if value is not None)

    def value_columns(self) -> list[TableColumn]:
        """The columns that tables add to the rows."""
        return [column for table in self.tables for column in table.columns]

    def aligned_columns(self) -> dict[str, str]:
        """Return the columns that have an element for each element of another column."""
        pairs = {column.name: column.aligned_with for column in self.file_columns if column.aligned_with}
        for column in self.columns:
            if isinstance(column, EntityColumn) and column.is_list:
                pairs[column.name] = column.of
            elif isinstance(column, BidsColumn) and column.is_list:
                extras = [*column.extras, *(["entities"] if column.entities else []), *(["scans"] * bool(column.scans))]
                pairs |= {f"{column.name}_{extra}": column.name for extra in extras}
        return pairs


def builtin_recipes() -> list[Recipe]:
    """Return the recipes that are part of brim, sorted by name."""
    return [parse_recipe(text, f"{name}.toml") for name, text in sorted(_builtin_texts().items())]


def _builtin_texts() -> dict[str, str]:
    files = [file for file in (resources.files("brim.sources") / "recipes").iterdir() if file.name.endswith(".toml")]
    return {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in files}


def load_recipe(name_or_path: str) -> Recipe:
    """Return a built-in recipe by its name, or read one from a file that ends in .toml."""
    if not name_or_path.endswith(".toml"):
        texts = _builtin_texts()
        if name_or_path not in texts:
            raise InputError(
                f"Unknown recipe {name_or_path!r}. The built-in recipes are: {', '.join(sorted(texts))}.",
                hint="Use one of them, or a file that ends in .toml.",
            )
        return parse_recipe(texts[name_or_path], f"{name_or_path}.toml")
    return parse_recipe(recipe_file_text(name_or_path), os.path.basename(name_or_path))


def recipe_file_text(path: str) -> str:
    """Read the text of a recipe's file."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        hint = "brim recipes lists the built-in ones."
        raise InputError(f"The recipe {path!r} cannot be read: {reason(error)}.", hint=hint) from error
    except UnicodeDecodeError as error:
        message = f"The recipe {os.path.basename(path)!r} is not UTF-8 text (byte {error.start})."
        raise InputError(message, hint="Save it as UTF-8.") from error


def parse_recipe(text: str, label: str = "the recipe") -> Recipe:
    """Parse and check a recipe. Errors call it `label`."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"The recipe {label!r} is not valid TOML: {error}.") from error
    several_roots = isinstance(values.get("root", ""), list)
    if several_roots:
        values = {("roots" if key == "root" else key): value for key, value in values.items()}
    recipe = read_fields(Recipe, values, label, ("bids", "metadata", "toml") + (() if several_roots else ("roots",)))
    for glob in recipe.rows:
        _check_pattern(glob, (), f"{label}: rows")
        if not 0 < sum(map(has_glob, glob.split("/"))) == len(recipe.key):
            parts = sum(map(has_glob, glob.split("/")))
            raise InputError(
                f"{label}: rows {glob!r} has {parts} part(s) with a *, but key names {len(recipe.key)}.",
                hint='Each such part becomes a column: rows = "sub-*/ses-*", key = ["subject_id", "session_id"].',
            )
    roots = tuple("" if root == "." and several_roots else root for root in recipe.roots)
    for root in (recipe.root, *roots):
        if root:
            _check_pattern(root, (), f"{label}: root")
        if has_glob(root):
            raise InputError(f"{label}: root must name one folder, not {root!r}.")
    if all(isinstance(column, EntityColumn) or column.type == "text" for column in recipe.file_columns):
        raise InputError(
            f"{label}: no column of files is defined.", hint="Add [[columns]] with name, pattern and type."
        )
    columns = tuple(_checked_column(c, recipe, f"{label}, columns[{i}]") for i, c in enumerate(recipe.columns))
    tables = tuple(_checked_table(table, recipe.key, f"{label}, tables[{i}]") for i, table in enumerate(recipe.tables))
    title = recipe.title or recipe.name
    recipe = replace(recipe, title=title, roots=roots, columns=columns, tables=tables, toml=text)
    names = [*recipe.key]
    for column in recipe.columns:
        is_split = isinstance(column, RecipeColumn) and column.split
        names += [column.split_name(value) for value in column.values] if is_split else [column.name]  # type: ignore[union-attr]
    names += [column.name for column in recipe.value_columns()]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise InputError(f"{label}: two columns are named {twice!r}.", hint="Rename one of them.")
    _check_expect(recipe, names[len(recipe.key) :], f"{label}, expect")
    return recipe


def read_fields(kind: type[T], values: Any, label: str, hidden: Sequence[str] = (), **given: Any) -> T:
    """Make a dataclass of a TOML table: keys are the names of its fields, types their annotations.

    Args:
        kind: The dataclass.
        values: The table, as tomllib reads it.
        where: What errors call the table.
        hidden: Fields that the table cannot have.
        given: Values of other fields.

    Raises:
        InputError: A key is unknown or missing, or a value has another type.
    """
    fields_by_key = {f.metadata.get("key", f.name): f for f in fields(kind) if f.name not in (*hidden, *given)}  # type: ignore[arg-type]
    allowed = f"Allowed: {', '.join(fields_by_key)}."
    if not isinstance(values, dict):
        raise InputError(f"{label} must be a table of keys, not {values!r}.", hint=allowed)
    types = get_type_hints(kind)
    for key, value in values.items():
        entry = fields_by_key.get(key) or fields_by_key.get(_OTHER_KEYS.get(key, ""))
        if entry is None:
            similar = difflib.get_close_matches(key, fields_by_key, 1)
            suggestion = f"Did you mean {similar[0]!r}? " if similar else ""
            raise InputError(f"{label}: unknown key {key!r}.", hint=f"{suggestion}{allowed}")
        if entry.name in given:
            raise InputError(f"{label}: {key} and another name of it cannot both be given.")
        given[entry.name] = _read_value(types[entry.name], value, label, key, entry.metadata.get("choices", ()))
    for key, entry in fields_by_key.items():
        if entry.name not in given and entry.default is MISSING and entry.default_factory is MISSING:
            raise InputError(f"{label}: {key} is missing.", hint="`brim recipes arc` shows a complete recipe.")
    return kind(**given)


_EXPECTED = {
    str: "a text",
    bool: "true or false",
    float: "a number",
    tuple[str, ...]: "a list of texts",
    Mapping[str, str]: "a table of texts",
    Span | None: "a number or [lowest, highest]",
}


def _read_value(kind: Any, value: Any, label: str, key: str, choices: Sequence[str]) -> Any:
    inner = get_args(kind)
    if is_dataclass(kind):
        return read_fields(kind, value, f"{label}, {key}")  # type: ignore[arg-type]
    if kind == Mapping[str, Span] and isinstance(value, dict):
        return {name: _read_value(Span | None, span, f"{label}.{key}", name, ()) for name, span in value.items()}
    if inner[:1] == (TableColumn,) and isinstance(value, dict) and value:
        return tuple(read_fields(TableColumn, entry, f"{label}, {key}.{n}", source=n) for n, entry in value.items())
    if inner[1:] == (...,) and inner[0] is not str and isinstance(value, list):
        kinds = get_args(inner[0]) or inner[:1]  # of columns: those with an entity are the second kind
        return tuple(
            read_fields(kinds[len(kinds) > 1 and isinstance(entry, dict) and "entity" in entry], entry, entry_location)
            for entry, entry_location in zip(value, (f"{label}, {key}[{i}]" for i in range(len(value))), strict=True)
        )
    if kind == tuple[str, ...]:
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return tuple(value)
    elif kind == Mapping[str, str]:
        if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
            return value
    elif kind == Span | None:
        span = value if isinstance(value, list) else [value, value]
        if len(span) == 2 and all(type(n) is int and n >= 0 for n in span) and span[0] <= span[1]:
            return span[0], span[1]
    elif (type(value) is kind or (kind is float and type(value) is int)) and value in (choices or [value]):
        return value
    expected = f"one of {', '.join(choices)}" if choices and type(value) is str else _EXPECTED.get(kind)
    raise InputError(f"{label}: {key} must be {expected or f'written as [[{key}]]'}, not {value!r}.")


def has_glob(part: str) -> bool:
    return "*" in part or "?" in part


@functools.lru_cache(maxsize=4096)
def path_regex(pattern: str) -> re.Pattern[str]:
    """Return what a pattern matches with any row key. `*` stays within a folder."""
    text = re.escape(_PLACEHOLDER.sub("*", pattern))
    return re.compile(text.replace(r"\*", "[^/]*").replace(r"\?", "[^/]") + r"\Z")


def _check_pattern(pattern: str, placeholders: Sequence[str], label: str) -> None:
    """Raise InputError unless a pattern is a relative path with * and ? and these placeholders."""
    parts = pattern.split("/")
    if not pattern or pattern.startswith("/") or "\\" in pattern or any(part in ("", ".", "..") for part in parts):
        raise InputError(f"{label} must be a relative path with / between its parts, not {pattern!r}.")
    if "**" in pattern or "[" in pattern:
        raise InputError(
            f"{label} {pattern!r}: only the wildcards * and ? are allowed, each within one part of the path."
        )
    unknown = [name for name in _PLACEHOLDER.findall(pattern) if name not in placeholders]
    if unknown or re.search("[{}]", _PLACEHOLDER.sub("", pattern)):
        allowed = ", ".join(f"{{{name}}}" for name in placeholders) or "none here"
        bad = f"{{{unknown[0]}}}" if unknown else "a brace"
        raise InputError(f"{label} {pattern!r}: {bad} is not a placeholder.", hint=f"Placeholders: {allowed}.")


def _checked_column(column: Any, recipe: Recipe, label: str) -> RecipeColumn | EntityColumn:
    """Return a column after a check of its patterns and of the column that it refers to."""
    if isinstance(column, EntityColumn):
        if not re.fullmatch(r"[A-Za-z0-9]+", column.entity):
            rule = "must be the name of an entity, such as acq for acq-spc3"
            raise InputError(f"{label}: entity {rule}, not {column.entity!r}.")
        key, name = "of", column.of
    else:
        placeholders = (*recipe.key, "entities") if column.aligned_with else recipe.key
        _check_pattern(column.pattern, placeholders, f"{label}: pattern")
        for pattern in column.fallback:
            _check_pattern(pattern, placeholders, f"{label}: fallback")
        if column.missing != "error" and not column.aligned_with:
            raise InputError(f"{label}: missing can only be used with aligned_with.")
        if column.values and not column.split:
            raise InputError(f"{label}: values can only be used with split.")
        if not column.final_newline and column.type != "text":
            raise InputError(f'{label}: final_newline can only be used with type = "text".')
        if column.split and column.aligned_with:
            raise InputError(f"{label}: a column cannot have both split and aligned_with.")
        key, name = "aligned_with", column.aligned_with
    if not name:
        return column  # type: ignore[no-any-return]
    own = [c for c in recipe.file_columns if not c.aligned_with and not c.split and c.type != "text"]
    partner = next((c for c in own if c.name == name), None)
    if partner is None:
        raise InputError(
            f"{label}: {key} names {name!r}, which is not a column of files.",
            hint=f"Columns of files are: {', '.join(c.name for c in own) or 'none'}.",
        )
    if column.is_list and not partner.is_list:
        raise InputError(f"{label}: {column.name!r} is a list, and {name!r}, which it must match, is not.")
    return column if isinstance(column, EntityColumn) else replace(column, is_list=partner.is_list)


def _checked_table(table: RecipeTable, key: tuple[str, ...], label: str) -> RecipeTable:
    _check_pattern(table.pattern, key, f"{label}: pattern")
    if not table.pattern.lower().endswith(TABLE_EXTENSIONS):
        raise InputError(f"{label}: pattern must end in {', '.join(TABLE_EXTENSIONS)}, not {table.pattern!r}.")
    if unknown := [name for name in table.key if name not in key]:
        raise InputError(f"{label}: key: unknown key {unknown[0]!r}.", hint=f"Allowed: {', '.join(key)}.")
    if not table.key and not _PLACEHOLDER.search(table.pattern):
        raise InputError(
            f"{label}: {table.pattern!r} is one table for all rows, so key must name the column to join by.",
            hint=f'Add key = {{{key[0]} = "NAME_OF_ITS_COLUMN"}}, or a placeholder like {{{key[0]}}} to the pattern.',
        )
    columns = tuple(replace(column, name=column.name or column.source) for column in table.columns)
    return replace(table, columns=columns, null=tuple(text.casefold() for text in table.null))


def _check_expect(recipe: Recipe, names: list[str], label: str) -> None:
    for path in recipe.expect.required:
        _check_pattern(path, (), f"{label}: required")
    split = [column for column in recipe.file_columns if column.split]
    allowed = [*names, *(column.name for column in split)]
    found_later = tuple(f"{column.name}_" for column in split if not column.values)
    for key, counts in (("counts", recipe.expect.counts), ("files", recipe.expect.files)):
        unknown = [name for name in counts if name not in allowed and not name.startswith(found_later or "\0")]
        if unknown:
            raise InputError(f"{label}.{key}: unknown key {unknown[0]!r}.", hint=f"Allowed: {', '.join(allowed)}.")
    if not 0 <= recipe.expect.tolerance < 1:
        raise InputError(f"{label}: tolerance must be a number from 0 to below 1, not {recipe.expect.tolerance!r}.")


@dataclass
class Counted:
    """The numbers that were found: rows with something in a column, and the files in it, by the column's name."""

    rows: int = 0
    subjects: int = 0
    sessions: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)


def expectation_findings(
    recipe: Recipe, counted: Counted, tolerance: float | None = None, partly: Sequence[str] = ()
) -> list[Finding]:
    """Compare every number that a recipe expects; none if only a part was read, by the options in `partly`."""
    expect = recipe.expect
    margin = expect.tolerance if tolerance is None else tolerance
    if not 0 <= margin <= 1:
        raise InputError(f"--tolerance takes a share from 0 to 1, not {margin}.")
    numbers: list[tuple[str, Span | None, int]] = [
        ("rows", expect.rows, counted.rows),
        (f"distinct {recipe.key[0]}", expect.subjects, counted.subjects),
        ("sessions", expect.sessions, counted.sessions),
    ]
    numbers += [(f"rows with {name}", span, counted.counts.get(name, 0)) for name, span in expect.counts.items()]
    numbers += [(f"files in {name}", span, counted.files.get(name, 0)) for name, span in expect.files.items()]
    findings = []
    for name, span, count in numbers:
        if span is None:
            continue
        if partly:
            detail = f"not compared: the source was read with {', '.join(partly)}"
            return [Finding("numbers", True, detail, skipped=True)]
        low, high = (
            math.ceil(round(span[0] * (1 - margin), 6)),
            math.floor(round(span[1] * (1 + margin), 6)),
        )
        expected = f"{span[0]:,}" if span[0] == span[1] else f"{span[0]:,} to {span[1]:,}"
        accepted = f", {low:,} to {high:,} with a tolerance of {margin:g}" if margin else ""
        snapshot = f" in {expect.snapshot}" if expect.snapshot else ""
        findings.append(Finding(name, low <= count <= high, f"{count:,}; expected {expected}{accepted}{snapshot}"))
    return findings


def required_findings(recipe: Recipe, tree: Tree) -> list[Finding]:
    """Look for every file that a recipe requires."""
    findings = []
    for path in recipe.expect.required:
        full = f"{recipe.root}/{path}" if recipe.root else path
        if tree.is_file(full):
            is_empty = tree.size(full) == 0
            findings.append(Finding(f"file {path}", not is_empty, "is empty (0 bytes)" if is_empty else "is there"))
        else:
            broken = "is a link that leads nowhere: its content is not here"
            findings.append(Finding(f"file {path}", False, broken if tree.is_link(full) else "is missing"))
    return findings
