"""Which columns a BIDS dataset has: one for each suffix, split where one name would mean two things.

A column is named after its suffix (`t1w`, `bold`). Where a suffix occurs in two datatypes the datatype
stands before it; where it has several kinds of file (`.eeg`, `.vhdr`, `.vmrk`) the kind stands after it.
It is a list if any row has several files. A saved schema fixes all that, so that a pilot and the whole
dataset agree.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, fields
from typing import Any

import pyarrow as pa

from brim.errors import InputError, SourceError
from brim.records import dataclass
from brim.sources.bids_layout import Item, file_kind, is_text
from brim.sources.features import KINDS
from brim.sources.source_options import BidsOptions

SCHEMA_KIND = "bids"


@dataclass(frozen=True, slots=True)
class BidsColumn:
    """A column and the files that belong to it. `kind` is of file, or "text"."""

    name: str
    suffix: str
    datatype: str  # "" for what lies above the datatypes
    group: str  # the kind, or the extension where nothing decodes it
    kind: str
    is_list: bool
    derivative: str = ""
    entities: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()  # of json, events, bval, bvec
    scans: tuple[str, ...] = ()  # columns of scans.tsv, as "name:type"

    def holds(self, item: Item) -> bool:
        mine = (self.suffix, self.derivative, self.datatype, self.group)
        return mine == (item.name.suffix, item.derivative, item.datatype, group_of(item))


def group_of(item: Item) -> str:
    """Files of one group may share a column."""
    kind = "file" if item.members is not None else file_kind(item.name)
    return item.name.extension.lower() if kind == "file" else kind


def find_columns(items: Iterable[Item], row_of: Callable[[Item], Hashable], of_row: frozenset[str]) -> list[BidsColumn]:
    """The columns of these files, in the order of their names. Entities `of_row` are those of the whole row."""
    groups: dict[tuple[str, str, str, str], list[Item]] = {}
    for item in items:
        groups.setdefault((item.derivative, item.name.suffix, item.datatype, group_of(item)), []).append(item)
    columns = []
    for (derivative, suffix, datatype, group), members in groups.items():
        alike = [key for key in groups if key[0] == derivative and key[1].lower() == suffix.lower()]
        datatypes, kinds = {key[2] for key in alike}, {key[3] for key in alike if key[2] == datatype}
        name = _plain(suffix)
        if len(datatypes) > 1:
            name = f"{_plain(datatype) or 'top'}_{name}"
        if len(kinds) > 1:
            name += f"_{_plain(group)}"
        if derivative:
            name = f"{_plain(derivative)}_{name}"
        rows = [row_of(item) for item in members]
        entities = dict.fromkeys(e for item in members for e, _ in item.name.entities if e not in of_row)
        kind = "text" if is_text(members[0].name) else "file" if group.startswith(".") or not group else group
        columns.append(
            BidsColumn(name, suffix, datatype, group, kind, len(set(rows)) < len(rows), derivative, tuple(entities))
        )
    return _distinct(sorted(columns, key=lambda column: (column.derivative, column.name)))


def _plain(text: str) -> str:
    return re.sub(r"[^0-9a-z]+", "_", text.lower()).strip("_") or text.lower()


def _distinct(columns: list[BidsColumn]) -> list[BidsColumn]:
    """Suffixes that differ by case only would share a name."""
    seen: set[str] = set()
    for number, column in enumerate(columns):
        name = column.name
        while name in seen:
            name += "_"
        seen.add(name)
        columns[number] = BidsColumn(**{**asdict(column), "name": name})
    return columns


def is_data(items: list[Item], taken: set[str]) -> Callable[[Item], bool]:
    """Whether a file is a value of its own, and not what travels with another one. `taken` are paths that do."""
    recorded = {item.name.suffix for item in items if not is_text(item.name)}
    tables = {item.name.suffix for item in items if item.name.extension == ".tsv"}

    def test(item: Item) -> bool:
        extension, suffix = item.name.extension, item.name.suffix
        if item.members is not None or not is_text(item.name):
            return True
        if extension == ".json":
            return suffix not in recorded and suffix not in tables
        if extension == ".tsv":
            return item.path not in taken
        return suffix not in recorded  # gradients without an image

    return test


def write_schema(columns: list[BidsColumn], options: BidsOptions, metadata: dict[str, str]) -> str:
    """The columns as TOML; JSON's strings and lists are TOML's."""
    lines = ["# The columns of a BIDS dataset, as brim found them.", f'kind = "{SCHEMA_KIND}"']
    lines += [f'rows = "{options.rows}"', f'sidecars = "{options.sidecars}"']
    lines += [f"derivatives = {json.dumps(list(options.derivatives))}", f"phenotype = {json.dumps(options.phenotype)}"]
    lines += ["", "[metadata]  # name = type"]
    lines += [f"{json.dumps(name)} = {json.dumps(kind)}" for name, kind in metadata.items()]
    for column in columns:
        lines += ["", "[[columns]]"]
        for name, value in asdict(column).items():
            if value not in ("", ()) or name in ("suffix", "group"):
                lines.append(f"{name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Schema:
    """A saved schema: the columns, the types of the joined metadata, and the options that go with them."""

    columns: list[BidsColumn]
    metadata: dict[str, str]
    rows: str
    sidecars: str
    derivatives: tuple[str, ...]
    phenotype: bool


def read_schema(text: str) -> Schema:
    try:
        content = tomllib.loads(text)
        columns = [_read_column(entry) for entry in content["columns"]]
        metadata = {str(name): str(kind) for name, kind in content.get("metadata", {}).items()}
        for kind in [*metadata.values(), *(s.rpartition(":")[2] for column in columns for s in column.scans)]:
            pa.type_for_alias(kind)
        names = ["subject_id", "session_id", *metadata, *(column.name for column in columns)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise KeyError(f"two columns are named {twice[0]!r}")
        derivatives = tuple(map(str, content.get("derivatives", [])))
        return Schema(
            columns, metadata, content["rows"], content["sidecars"], derivatives, bool(content.get("phenotype"))
        )
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"The recipe of a BIDS dataset is broken: {error}.", hint="Save it again with brim plan."
        ) from error


def _read_column(entry: dict[str, Any]) -> BidsColumn:
    known = {field.name for field in fields(BidsColumn)}
    if unknown := sorted(set(entry) - known):
        raise KeyError(f"a column has the unknown key {unknown[0]!r}")
    if entry.get("kind") not in (*KINDS, "text"):
        raise KeyError(f"a column has the unknown kind {entry.get('kind')!r}")
    defaults: dict[str, Any] = {"datatype": ""}
    return BidsColumn(**{**defaults, **{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}})


def single(items: list[Item], column: BidsColumn, row: str) -> Item | None:
    """The one file of a row; two are an error that names both."""
    if len(items) > 1:
        raise SourceError(
            f"{row} has two files for the single column {column.name!r}: {items[0].path} and {items[1].path}.",
            hint="Set is_list = true for it in the recipe, or leave one out with --exclude.",
        )
    return items[0] if items else None
