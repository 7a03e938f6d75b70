"""The file table of a BIDS dataset: a column for each suffix, split where one name would mean two things.

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
from dataclasses import asdict, fields, replace
from typing import Any

import pyarrow as pa

from brim.errors import InputError, SourceError
from brim.file_set import FileSetBuilder
from brim.options.groups import BidsOptions
from brim.records import dataclass
from brim.sources import bids_sidecars
from brim.sources.bids_layout import BidsLayout, Item, file_kind, is_text, parse_name, read_layout
from brim.sources.bids_sidecars import Sidecars, is_private
from brim.sources.features import KINDS
from brim.sources.file_table import FileColumn, FileTable, Split, Unmatched, collect_unmatched
from brim.sources.folder_tree import Tree, every_file
from brim.sources.remote_tree import tree_of
from brim.sources.source_options import SourceOptions
from brim.sources.table_memory import check_joined_table_fits
from brim.sources.table_source import describe

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
            f"The recipe of a BIDS dataset is not valid: {error}.", hint="Save it again with brim plan."
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


Key = tuple[str, str | None]
_LOOKED_AT = 5  # subjects, to tell whether a folder is BIDS


def is_bids(tree: Tree) -> bool:
    """Whether a folder says that it is BIDS, or has subjects with files that are named that way."""
    if tree.is_file("dataset_description.json"):
        return True
    subjects = [name for name in tree.names("") if name.startswith("sub-") and tree.is_folder(name)]
    for subject in sorted(subjects)[:_LOOKED_AT]:
        for _, _, names in tree.walk(subject):
            if any(name.startswith(f"{subject}_") and parse_name(name) for name in names):
                return True
    return False


def bids_source(folder: str | Tree, options: SourceOptions, schema: Schema | None = None) -> FileTable:
    """Rows by session, subject or file; columns by suffix, or as a saved schema says."""
    for option, value in (("--files", options.files), ("--label-from", options.label_from), ("--root", options.root)):
        if value:
            raise InputError(
                f"{option} cannot be used with a BIDS dataset.",
                hint="Use --recipe=files to read the folder as plain files.",
            )
    if options.split_by:
        raise InputError(
            "--split-by can only be used with a table.", hint="Use --split=NAME to put all rows into one split."
        )
    bids = options.bids
    if schema is not None:
        bids = replace(
            bids,
            rows=schema.rows,  # type: ignore[arg-type]  # checked by BidsOptions
            sidecars=schema.sidecars,  # type: ignore[arg-type]  # checked by BidsOptions
            derivatives=schema.derivatives,
            phenotype=schema.phenotype,
        )
    tree = tree_of(folder, options.access)
    layout = read_layout(tree, bids)
    selected = options.selects()
    items = [item for item in layout.items if selected(item.path)]
    if not items and not layout.refused:
        raise SourceError(
            "No file of the subjects has a BIDS name and was selected.",
            hint="Use --recipe=files to package every file of the folder as it is.",
        )
    phenotypes = [f"phenotype/{name}" for name in tree.names("phenotype")] if bids.phenotype else []
    for path in ["participants.tsv", *phenotypes]:
        if path.endswith(".tsv") and tree.is_file(path):
            check_joined_table_fits(path, options.memory, tree.size(path))
    reader = _Reader(layout, items, bids, schema)
    rows = reader.rows(options.limit)
    for name in options.drop:
        if name not in rows.column_names:
            raise SourceError(
                f"--drop names {name!r}, which is not a column.", hint=f"Columns: {', '.join(rows.column_names)}."
            )
    rows = rows.drop_columns(list(options.drop))
    columns = {name: column for name, column in reader.file_columns.items() if name in rows.column_names}
    features, unknown = describe(rows.schema, columns, {})
    return FileTable(
        rows=rows,
        columns=columns,
        files=reader.builder.finish(),
        features=features,
        splits=(Split(options.split or "train", 0, rows.num_rows),),
        refused=tuple(r for r in layout.refused if selected(r.path)),
        warnings=(*reader.warnings, *_left_out(layout), *unknown),
        recipe=options.recipe(),
        about=_about(tree, rows.column_names),
        unmatched=None if options.limit else _unmatched(reader, layout, bids, selected),
        beside=reader.besides(),
        saved=write_schema(reader.columns, bids, reader.metadata_types),
    )


class _Reader:
    """Turns a layout into an Arrow table, numbering files as they come."""

    def __init__(self, layout: BidsLayout, items: list[Item], options: BidsOptions, schema: Schema | None) -> None:
        self.layout, self.options, self.schema = layout, options, schema
        self.sidecars = Sidecars(layout, safe=options.sidecars != "full")
        self.builder = FileSetBuilder(layout.tree.root, layout.tree.bucket)
        self.file_columns: dict[str, FileColumn] = {}
        self.metadata_types: dict[str, str] = {}
        self.warnings: list[str] = []
        self.scans = bids_sidecars.scans(layout.tree, layout.tables)
        taken = {path for item in items if not is_text(item.name) and (path := self.sidecars.events_path(item))}
        data = is_data(items, taken)
        self.items = [item for item in items if data(item)]
        self.columns: list[BidsColumn] = []
        self._numbers: dict[str, int] = {}

    def rows(self, limit: int | None) -> pa.Table:
        arrays = self._rows_by_file(limit) if self.options.rows == "file" else self._rows_by_folder(limit)
        removed = self.sidecars.removed
        if removed:
            keys = ", ".join(key for key, _ in removed.most_common(4)) + (", …" if len(removed) > 4 else "")
            self.warnings.append(
                f"{removed.total()} private fields were left out of sidecars and tables ({keys}); "
                "--sidecars full keeps them"
            )
        if self.sidecars.broken:
            broken = self.sidecars.broken
            self.warnings.append(f"{len(broken)} sidecar(s) cannot be read and are left out, for example {broken[0]}")
        if self.layout.loops:
            self.warnings.append(
                f"{len(self.layout.loops)} symbolic link(s) lead back to themselves: {self.layout.loops[0]}"
            )
        return pa.table(arrays)

    def _rows_by_folder(self, limit: int | None) -> dict[str, pa.Array]:
        by_subject = self.options.rows == "subject"
        keys: list[Key] = (
            list(dict.fromkeys((s, None) for s, _ in self.layout.keys)) if by_subject else self.layout.keys
        )
        row_of: Callable[[Item], Hashable] = (lambda i: i.subject) if by_subject else (lambda i: (i.subject, i.session))
        if self.schema is None:
            found = find_columns(self.items, row_of, frozenset(["sub"] if by_subject else ["sub", "ses"]))
            self.columns = [self._with_extras(c, [i for i in self.items if c.holds(i)]) for c in found]
        else:
            self.columns = self.schema.columns
            unknown = [item for item in self.items if not any(column.holds(item) for column in self.columns)]
            if unknown:
                self.warnings.append(
                    f"{len(unknown)} file(s) are not in the recipe and are left out, for example {unknown[0].path}"
                )
        if limit is not None:
            keys = keys[:limit]
        arrays: dict[str, pa.Array] = {"subject_id": pa.array([subject for subject, _ in keys], pa.string())}
        if not by_subject:
            arrays["session_id"] = pa.array([session for _, session in keys], pa.string())
        values: dict[str, pa.Array] = {}
        for column in self.columns:
            held: dict[Hashable, list[Item]] = {}
            for item in self.items:
                if column.holds(item):
                    held.setdefault(row_of(item), []).append(item)
            wanted = [sorted(held.get(key[0] if by_subject else key, []), key=_order) for key in keys]
            values |= self._values(column, wanted, keys)
        return arrays | self._metadata(keys, set(arrays) | set(values)) | values

    def _with_extras(self, column: BidsColumn, items: list[Item]) -> BidsColumn:
        """The parallel columns that this one has: only those that some file needs."""
        extras = []
        if self.options.sidecars != "none" and column.kind != "text":
            for extra in ("json", "events", "bval", "bvec"):
                if any(self._extra(extra, item) is not None for item in items):
                    extras.append(extra)
        said: dict[str, list[str | None]] = {}
        for item in items:
            for name, value in self.scans.get(item.path.rstrip("/"), {}).items():
                said.setdefault(name, []).append(value)
        scans = [
            f"{name}:{bids_sidecars.typed(values).type}" for name, values in said.items() if not self._is_private(name)
        ]
        return replace(column, extras=tuple(extras), scans=tuple(scans))

    def _is_private(self, name: str) -> bool:
        private = self.options.sidecars != "full" and is_private(name)
        self.sidecars.removed.update([name] if private else [])
        return private

    def _extra(self, extra: str, item: Item) -> str | None:
        if extra == "json":
            return self.sidecars.json(item)
        return self.sidecars.events(item) if extra == "events" else self.sidecars.nearest(item, f".{extra}")

    def _values(self, column: BidsColumn, wanted: list[list[Item]], keys: list[Key]) -> dict[str, pa.Array]:
        """The arrays of a column and of those parallel to it."""
        arrays: dict[str, pa.Array] = {}

        def add(name: str, value: Callable[[Item], Any], kind: pa.DataType) -> None:
            if column.is_list:
                cells: list[Any] = [[value(item) for item in items] for items in wanted]
                arrays[name] = pa.array(cells, pa.list_(kind))
            else:
                ones = [single(items, column, _row(key)) for items, key in zip(wanted, keys, strict=True)]
                arrays[name] = pa.array([None if item is None else value(item) for item in ones], kind)

        read = [item for items in wanted for item in items]
        if column.kind == "text":
            self.sidecars.expect("text", read)
            add(column.name, lambda item: self.sidecars.text(item.path), pa.string())
        else:
            self.file_columns[column.name] = FileColumn(column.kind, column.is_list)
            add(column.name, self._number, pa.int64())
        if column.entities:
            kind = pa.struct([(entity, pa.string()) for entity in column.entities])
            add(f"{column.name}_entities", lambda item: {e: item.name.get(e) for e in column.entities}, kind)
        for extra in column.extras:
            self.sidecars.expect(extra, read)
            add(f"{column.name}_{extra}", lambda item, extra=extra: self._extra(extra, item), pa.string())  # type: ignore[misc]
        if column.scans:
            parts = [entry.rpartition(":") for entry in column.scans]
            scan_types = {name: pa.type_for_alias(kind) for name, _, kind in parts}
            add(f"{column.name}_scans", lambda item: self._scan(item, scan_types), pa.struct(list(scan_types.items())))
        return arrays

    def held(self) -> list[Item]:
        """The files and texts that are values of a column."""
        by_file = self.options.rows == "file"
        if by_file:
            return [item for item in self.items if item.members is not None or not is_text(item.name)]
        return [item for item in self.items if any(column.holds(item) for column in self.columns)]

    def besides(self) -> dict[str, str]:
        """Columns that go element by element with another one."""
        found: dict[str, str] = {}
        for column in self.columns:
            if column.is_list:
                names = [
                    *column.extras,
                    *(["entities"] if column.entities else []),
                    *(["scans"] if column.scans else []),
                ]
                found |= {f"{column.name}_{name}": column.name for name in names}
        return found

    def _scan(self, item: Item, types: dict[str, pa.DataType]) -> dict[str, Any]:
        said = self.scans.get(item.path.rstrip("/"), {})
        return {name: _as_type(said.get(name), kind, item.path) for name, kind in types.items()}

    def _number(self, item: Item) -> int:
        if item.path not in self._numbers:
            if item.members is not None:
                number = self.builder.add_bundle(item.path, sorted(item.members))
            else:
                assert item.stat is not None
                number = self.builder.add(item.path, item.stat)
            self._numbers[item.path] = number
        return self._numbers[item.path]

    def _metadata(self, keys: list[Key], taken: set[str]) -> dict[str, pa.Array]:
        """participants.tsv, sessions.tsv and, if asked for, phenotype, joined to the rows."""
        subjects = list(dict.fromkeys(subject for subject, _ in self.layout.keys))
        position = {subject: number for number, subject in enumerate(subjects)}
        order = pa.array([position[subject] for subject, _ in keys], pa.int64())
        joined: dict[str, pa.Array] = {}
        found, warnings = bids_sidecars.participants(self.layout.tree, subjects)
        if not self.options.subjects:
            self.warnings += warnings
        sources = [("participant", found, order)]
        if self.options.phenotype:
            for name in sorted(self.layout.tree.names("phenotype")):
                if name.endswith(".tsv"):
                    path = f"phenotype/{name}"
                    measured, _ = bids_sidecars.keyed_table(self.layout.tree, path, "participant_id", "sub-", subjects)
                    shown = {key: value for key, value in measured.items() if not self._is_private(key)}
                    renamed = {f"{name.removesuffix('.tsv')}_{key}": value for key, value in shown.items()}
                    sources.append(("phenotype", renamed, order))
        said = bids_sidecars.sessions(self.layout.tree, self.layout.tables, self.layout.keys)
        if said and self.options.rows != "subject":
            at = {key: number for number, key in enumerate(self.layout.keys)}
            typed = {name: self._typed(name, texts) for name, texts in said.items()}
            sources.append(("session", typed, pa.array([at[key] for key in keys], pa.int64())))
        for prefix, columns, take in sources:
            for name, values in columns.items():
                if self._is_private(name):
                    continue
                unique = name
                while unique in taken or unique in joined:
                    unique = f"{prefix}_{unique}"
                joined[unique] = self._as_saved(unique, values.take(take))
        if self.schema is not None:  # exactly the columns of the schema: those that are absent here are null
            absent = {name: pa.nulls(len(keys), pa.type_for_alias(kind)) for name, kind in self.schema.metadata.items()}
            joined = {name: joined.get(name, nulls) for name, nulls in absent.items()}
        self.metadata_types = {name: str(array.type) for name, array in joined.items()}
        return joined

    def _typed(self, name: str, texts: list[str | None]) -> pa.Array:
        """Texts by what they look like; as text where the schema says so, whatever these look like."""
        kind = None if self.schema is None else self.schema.metadata.get(name)
        return pa.array(texts, pa.string()) if kind == "string" else bids_sidecars.typed(texts)

    def _as_saved(self, name: str, array: pa.Array) -> pa.Array:
        kind = None if self.schema is None else self.schema.metadata.get(name)
        if kind is None or kind == str(array.type):
            return array
        try:
            return array.cast(pa.type_for_alias(kind))
        except (pa.ArrowException, ValueError) as error:
            raise SourceError(
                f"The column {name!r} does not have the type {kind} that the recipe names: {error}."
            ) from error

    def _rows_by_file(self, limit: int | None) -> dict[str, pa.Array]:
        items = [item for item in self.items if item.members is not None or not is_text(item.name)]
        order = {key: number for number, key in enumerate(self.layout.keys)}
        items = sorted(
            items, key=lambda i: (order.get((i.subject, i.session), len(order)), i.datatype, i.name.suffix, _order(i))
        )
        items = items[:limit]
        kinds = {"file" if item.members is not None else file_kind(item.name) for item in items}
        keys = [(item.subject, item.session) for item in items]
        entities = dict.fromkeys(e for item in items for e, _ in item.name.entities if e not in ("sub", "ses"))
        kind = kinds.pop() if len(kinds) == 1 else "file"
        texts = len(self.items) - len([item for item in self.items if not is_text(item.name) or item.members])
        if texts:
            self.warnings.append(f"{texts} text file(s) have no row of their own with --rows file and are left out")
        column = BidsColumn("file", "", "", "", kind, False, "", tuple(entities))
        column = self._with_extras(column, items) if self.schema is None else self.schema.columns[0]
        arrays = {
            "subject_id": pa.array([subject for subject, _ in keys], pa.string()),
            "session_id": pa.array([session for _, session in keys], pa.string()),
            "datatype": pa.array([item.datatype for item in items], pa.string()),
            "suffix": pa.array([item.name.suffix for item in items], pa.string()),
        }
        values = self._values(column, [[item] for item in items], keys)
        self.columns = [column]
        return arrays | self._metadata(keys, set(arrays) | set(values)) | values


def _order(item: Item) -> tuple[object, ...]:
    return (item.name.sort_key(), item.path)


def _row(key: Key) -> str:
    return f"{key[0]} {key[1]}" if key[1] else key[0]


def _as_type(value: str | None, kind: pa.DataType, shown: str) -> Any:
    if value is None or pa.types.is_string(kind):
        return value
    try:
        return int(value) if pa.types.is_integer(kind) else float(value)
    except ValueError as error:
        raise SourceError(f"scans.tsv has {value!r} for {shown}, where a number is expected.") from error


def _left_out(layout: BidsLayout) -> list[str]:
    """What of the dataset is not in the rows, and how to have it."""
    lines = []
    for why, count in layout.left_out.most_common():
        example = layout.examples.get(why)
        lines.append(
            f"left out: {why}" if example is None else f"left out: {count} file(s), {why}, for example {example}"
        )
    return lines


def _unmatched(
    reader: _Reader, layout: BidsLayout, options: BidsOptions, selected: Callable[[str], bool]
) -> Unmatched | None:
    """The files of the whole dataset that are in no column, and went into none as text."""
    if options.subjects or options.sessions or options.suffixes:
        return None  # a part was asked for
    held = reader.held()
    taken = {item.path for item in held} | reader.sidecars.read | set(layout.tables)
    taken |= {path for item in held for _, path, _ in item.members or ()}
    taken |= {"participants.tsv", "participants.json", "dataset_description.json"}
    folder = "phenotype/" if options.phenotype else None
    left = (
        path
        for path in every_file(layout.tree)
        if path not in taken and selected(path) and not (folder and path.startswith(folder))
    )
    hint = "--derivatives, --suffixes and --recipe take more; --exclude leaves files out."
    return collect_unmatched((path for path in left if not _in_bundle(path, taken)), hint=hint)


def _in_bundle(path: str, taken: set[str]) -> bool:
    """Whether a file is inside of a folder that is one value."""
    parts = path.split("/")
    return any("/".join(parts[:depth]) + "/" in taken for depth in range(1, len(parts)))


def _about(tree: Tree, columns: list[str]) -> dict[str, Any]:
    """What dataset_description.json and participants.json say, for the card."""
    about: dict[str, Any] = {}
    description = _read_json(tree, "dataset_description.json")
    for key in ("Name", "Authors", "License", "DatasetDOI", "HowToAcknowledge", "Funding", "BIDSVersion"):
        if description.get(key):
            about[key] = description[key]
    said = _read_json(tree, "participants.json")
    about["columns"] = {
        name: value["Description"]
        for name, value in said.items()
        if name in columns and isinstance(value, dict) and isinstance(value.get("Description"), str)
    }
    return about


def _read_json(tree: Tree, path: str) -> dict[str, Any]:
    try:
        with tree.text(path) as file:
            content = json.load(file)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
