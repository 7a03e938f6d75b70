"""Derive a recipe from a BIDS dataset: a column for each suffix, split where one name would mean two things.

A column is named after its suffix (`t1w`, `bold`). If a suffix occurs in two datatypes, the datatype is put before it;
if it has several types of file (`.eeg`, `.vhdr`, `.vmrk`), the type is put after it. It is a list if any row has
several files. A saved recipe fixes all that, so that a pilot and the complete dataset agree.

Which files there are, and the sidecars of an image: bids_layout.py.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from typing import Any

import pyarrow as pa

from brim.errors import InputError, SourceError
from brim.options.groups import BidsOptions
from brim.records import dataclass
from brim.sources.bids_layout import (
    BidsLayout,
    Item,
    Sidecars,
    file_kind,
    is_text,
    parse_name,
    read_scans,
    read_sessions,
)
from brim.sources.file_table import FileTable, Refused, Unmatched, collect_unmatched
from brim.sources.folder_tree import Tree, every_file, natural
from brim.sources.joined_tables import infer_type, join_by_key
from brim.sources.recipe import BidsColumn, Key, Recipe, read_fields
from brim.sources.recipe_rows import Cell, FolderRows
from brim.sources.remote_tree import tree_of
from brim.sources.source_options import SourceOptions

SCHEMA_KIND = "bids"
_SUBJECTS_LOOKED_AT = 5


def is_bids(tree: Tree) -> bool:
    """Return whether a folder declares itself as BIDS, or has subjects with files that are named that way."""
    if tree.is_file("dataset_description.json"):
        return True
    subjects = [name for name in tree.names("") if name.startswith("sub-") and tree.is_folder(name)]
    for subject in sorted(subjects)[:_SUBJECTS_LOOKED_AT]:
        for _, _, names in tree.walk(subject):
            if any(name.startswith(f"{subject}_") and parse_name(name) for name in names):
                return True
    return False


def bids_source(folder: str | Tree, options: SourceOptions, recipe: Recipe | None = None) -> FileTable:
    """Make the file table of a BIDS dataset, with the columns that are found or those of a saved recipe."""
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
    return BidsRows(tree_of(folder, options.access), recipe, options).file_table()


def find_columns(items: Iterable[Item], row_of: Callable[[Item], Hashable], of_row: frozenset[str]) -> list[BidsColumn]:
    """Return the columns of some files, sorted by name. `of_row` are the entities that all files of a row share."""
    groups: dict[tuple[str, ...], list[Item]] = {}
    for item in items:
        groups.setdefault(_group(item), []).append(item)

    def plain(text: str) -> str:
        return re.sub(r"[^0-9a-z]+", "_", text.lower()).strip("_") or text.lower()

    columns = []
    for (suffix, derivative, datatype, group), members in groups.items():
        alike = [key for key in groups if key[1] == derivative and key[0].lower() == suffix.lower()]
        name = plain(suffix)
        if len({key[2] for key in alike}) > 1:
            name = f"{plain(datatype) or 'top'}_{name}"
        if len({key[3] for key in alike if key[2] == datatype}) > 1:
            name += f"_{plain(group)}"
        if derivative:
            name = f"{plain(derivative)}_{name}"
        kind = "text" if is_text(members[0].name) else "file" if group.startswith(".") or not group else group
        columns.append(
            BidsColumn(
                name=name,
                suffix=suffix,
                datatype=datatype,
                group=group,
                kind=kind,
                derivative=derivative,
                is_list=len({row_of(item) for item in members}) < len(members),
                entities=tuple(dict.fromkeys(e for item in members for e, _ in item.name.entities if e not in of_row)),
            )
        )
    columns.sort(key=lambda column: (column.derivative, column.name))
    for number, column in enumerate(columns):  # suffixes that differ by case only would have the same name
        while column.name in {earlier.name for earlier in columns[:number]}:
            column = columns[number] = replace(column, name=f"{column.name}_")
    return columns


@dataclass(frozen=True, kw_only=True)
class _SavedRecipe:
    """The keys of a saved recipe in TOML."""

    kind: str
    rows: str
    sidecars: str
    derivatives: tuple[str, ...] = ()
    phenotype: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[BidsColumn, ...] = ()


def read_bids_recipe(text: str) -> Recipe:
    """Read a recipe that `brim plan --save-recipe` wrote for a BIDS dataset."""
    try:
        saved = read_fields(_SavedRecipe, tomllib.loads(text), "the recipe")
        scans = [entry.rpartition(":")[2] for column in saved.columns for entry in column.scans]
        for kind in [*saved.metadata.values(), *scans]:
            pa.type_for_alias(kind)
        names = ["subject_id", "session_id", *saved.metadata, *(column.name for column in saved.columns)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two columns are named {twice[0]!r}")
        bids = BidsOptions(
            rows=saved.rows,  # type: ignore[arg-type]  # checked by BidsOptions
            sidecars=saved.sidecars,  # type: ignore[arg-type]  # checked by BidsOptions
            derivatives=saved.derivatives,
            phenotype=saved.phenotype,
        )
    except (tomllib.TOMLDecodeError, InputError, ValueError) as error:
        reason = error.message if isinstance(error, InputError) else str(error)
        hint = "Save it again with brim plan."
        raise InputError(f"The recipe of a BIDS dataset is not valid: {reason.rstrip('.')}.", hint=hint) from error
    return _recipe(bids, saved.columns, saved.metadata)


def write_bids_recipe(recipe: Recipe) -> str:
    """Return a recipe as TOML, of which JSON texts and lists are a part."""
    bids = recipe.bids or BidsOptions()
    lines = ["# The columns of a BIDS dataset, as brim found them.", f'kind = "{SCHEMA_KIND}"']
    lines += [f'rows = "{bids.rows}"', f'sidecars = "{bids.sidecars}"']
    lines += [f"derivatives = {json.dumps(list(bids.derivatives))}", f"phenotype = {json.dumps(bids.phenotype)}"]
    lines += ["", "[metadata]  # name = type"]
    lines += [f"{json.dumps(name)} = {json.dumps(kind)}" for name, kind in recipe.metadata.items()]
    for column in recipe.columns:
        lines += ["", "[[columns]]"]
        for name, value in asdict(column).items():
            if value not in ("", ()) or name in ("suffix", "group"):
                lines.append(f"{name} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
    return "\n".join(lines) + "\n"


def _recipe(bids: BidsOptions, columns: Sequence[BidsColumn], metadata: Mapping[str, str]) -> Recipe:
    key = ("subject_id",) if bids.rows == "subject" else ("subject_id", "session_id")
    return Recipe(name="bids", rows=(), key=key, columns=tuple(columns), bids=bids, metadata=metadata)


class BidsRows(FolderRows):
    """The rows of a BIDS dataset: sessions, subjects or files."""

    def __init__(self, tree: Tree, recipe: Recipe | None, options: SourceOptions) -> None:
        bids = options.bids
        self._is_saved = recipe is not None
        if recipe is not None and recipe.bids is not None:
            saved = recipe.bids
            bids = replace(
                bids, rows=saved.rows, sidecars=saved.sidecars, derivatives=saved.derivatives, phenotype=saved.phenotype
            )  # fmt: skip
        super().__init__(tree, _recipe(bids, (), {}) if recipe is None else replace(recipe, bids=bids), options)
        self.bids, self.layout = bids, BidsLayout(tree, bids)
        self.sidecars = Sidecars(self.layout, is_safe=bids.sidecars != "full")
        self._scans = read_scans(tree, self.layout.tables)
        self._items: list[Item] = []  # that are values
        self._cells: list[list[Cell]] = []  # of each column of the recipe
        self._by_path: dict[str, Item] = {}

    def find_rows(self) -> None:
        is_selected = self.options.selects()
        items = [item for item in self.layout.items if is_selected(item.path)]
        if not items and not self.layout.refused:
            raise SourceError(
                "No file of the subjects has a BIDS name and was selected.",
                hint="Use --recipe=files to package every file of the folder as it is.",
            )
        # Events and sidecars of an image, and gradients, are values of the image and not files of their own.
        used_paths = {path for item in items if not is_text(item.name) for path in self.sidecars.paths("events", item)}
        recorded = {item.name.suffix for item in items if not is_text(item.name)}
        tables = {item.name.suffix for item in items if item.name.extension == ".tsv"}

        def is_value(item: Item) -> bool:
            extension, suffix = item.name.extension, item.name.suffix
            if item.members is not None or not is_text(item.name):
                return True
            if extension == ".tsv":
                return item.path not in used_paths
            return suffix not in recorded and not (extension == ".json" and suffix in tables)

        self._items = [item for item in items if is_value(item)]
        columns = self._find_file_rows() if self.bids.rows == "file" else self._find_folder_rows()
        self.recipe = replace(self.recipe, columns=tuple(columns))

    def _find_folder_rows(self) -> Sequence[BidsColumn]:
        """Find rows that are subjects or sessions, and the files of each column in each row."""
        by_subject = self.bids.rows == "subject"

        def row_of(item: Item) -> Key:
            return (item.subject,) if by_subject else (item.subject, item.session)

        keys = [(subject,) for subject, _ in self.layout.keys] if by_subject else self.layout.keys
        self.keys = list(dict.fromkeys(keys))[: self.options.limit]
        groups: dict[tuple[str, ...], list[Item]] = {}
        for item in self._items:
            groups.setdefault(_group(item), []).append(item)
        columns: Sequence[Any] = self.recipe.columns
        if not self._is_saved:
            found_columns = find_columns(self._items, row_of, frozenset(["sub"] if by_subject else ["sub", "ses"]))
            columns = [self._with_aligned(column, groups[_column_group(column)]) for column in found_columns]
        in_columns = {_column_group(column) for column in columns}
        unknown = [item for item in self._items if _group(item) not in in_columns]
        if unknown:
            example = unknown[0].path
            self.warnings.append(
                f"{len(unknown)} file(s) are not in the recipe and are left out, for example {example}"
            )
        self._items = [item for item in self._items if _group(item) in in_columns]
        for column in columns:
            rows: dict[Key, list[Item]] = {}
            for item in groups.get(_column_group(column), ()):
                rows.setdefault(row_of(item), []).append(item)
            cells: list[Cell] = [[item.path for item in sorted(rows.get(key, ()), key=_order)] for key in self.keys]
            self._cells.append(cells)
            for key, cell in zip(self.keys, cells, strict=True):
                if len(cell) > 1 and not column.is_list:
                    self.report_crowded(column.name, key, cell)
        return columns

    def _find_file_rows(self) -> Sequence[BidsColumn]:
        """Make a row of each file that is not a text."""
        items = [item for item in self._items if item.members is not None or not is_text(item.name)]
        if texts := len(self._items) - len(items):
            self.warnings.append(f"{texts} text file(s) have no row of their own with --rows file and are left out")
        order = {key: number for number, key in enumerate(self.layout.keys)}
        self._items = sorted(
            items,
            key=lambda i: (order.get((i.subject, i.session), len(order)), i.datatype, i.name.suffix, _order(i)),
        )
        items = self._items[: self.options.limit]
        self.keys = [(item.subject, item.session) for item in items]
        self._cells = [[[item.path] for item in items]]
        if self._is_saved:
            return self.recipe.columns[:1]  # type: ignore[return-value]
        kinds = {"file" if item.members is not None else file_kind(item.name) for item in items}
        entities = dict.fromkeys(e for item in items for e, _ in item.name.entities if e not in ("sub", "ses"))
        kind = kinds.pop() if len(kinds) == 1 else "file"
        column = BidsColumn(name="file", suffix="", group="", kind=kind, is_list=False, entities=tuple(entities))
        return [self._with_aligned(column, items)]

    def _with_aligned(self, column: BidsColumn, items: Sequence[Item]) -> BidsColumn:
        """Return a column with those aligned columns that some of its files need."""
        extras = []
        if self.bids.sidecars != "none" and column.kind != "text":
            for extra in ("json", "events", "bval", "bvec"):
                if any(self.sidecars.extra(extra, item) is not None for item in items):
                    extras.append(extra)
        values: dict[str, list[str | None]] = {}
        for item in items:
            for name, value in self._scans.get(item.path.rstrip("/"), {}).items():
                values.setdefault(name, []).append(value)
        types = {name: infer_type(pa.chunked_array([texts], pa.string())).type for name, texts in values.items()}
        scans = [f"{name}:{kind}" for name, kind in types.items() if not self.sidecars.removes(name)]
        return replace(column, extras=tuple(extras), scans=tuple(scans))

    def add_columns(self) -> None:
        items = self._by_path = {item.path: item for item in self._items}
        for column, cells in zip(self.recipe.columns, self._cells, strict=True):
            assert isinstance(column, BidsColumn)
            self._add_column(column, cells, items)
        values, self.columns = self.columns, {}
        for i, name in enumerate(self.recipe.key):
            self.columns[name] = pa.array([key[i] for key in self.keys], pa.string())
        if self.bids.rows == "file":
            own = [items[str(cell[0])] for cell in self._cells[0]]
            self.columns["datatype"] = pa.array([item.datatype for item in own], pa.string())
            self.columns["suffix"] = pa.array([item.name.suffix for item in own], pa.string())
        metadata = self._metadata(self.columns.keys() | values.keys())
        self.columns |= metadata | values
        self.recipe = replace(self.recipe, metadata={name: str(array.type) for name, array in metadata.items()})
        self._add_warnings()

    def _add_column(self, column: BidsColumn, cells: Sequence[Cell], items: Mapping[str, Item]) -> None:
        def add(name: str, value: Callable[[Item], Any], kind: pa.DataType) -> None:
            self.add(name, cells, lambda path: value(items[path]), kind, column.is_list)

        own = [items[path] for cell in cells for path in cell if path is not None]
        if column.kind == "text":
            self.sidecars.prefetch("text", own)
            add(column.name, lambda item: self.sidecars.text(item.path), pa.string())
        else:
            self.add_files(column.name, cells, column.kind, column.is_list)
        if column.entities:
            kind = pa.struct([(entity, pa.string()) for entity in column.entities])
            add(f"{column.name}_entities", lambda item: {e: item.name.get(e) for e in column.entities}, kind)
        for extra in column.extras:
            self.sidecars.prefetch(extra, own)
            add(f"{column.name}_{extra}", functools.partial(self.sidecars.extra, extra), pa.string())
        if column.scans:
            parts = [entry.rpartition(":") for entry in column.scans]
            types = {name: pa.type_for_alias(kind) for name, _, kind in parts}

            def scan(item: Item) -> dict[str, Any]:
                texts = self._scans.get(item.path.rstrip("/"), {})
                return {name: _as_type(texts.get(name), kind, item.path) for name, kind in types.items()}

            add(f"{column.name}_scans", scan, pa.struct(list(types.items())))

    def add_file(self, path: str) -> int | None:
        item = self._by_path[path]
        if item.members is not None:
            return self.files.add_bundle(path, sorted(item.members))
        return None if item.stat is None else self.files.add(path, item.stat)

    def _metadata(self, used: Iterable[str]) -> dict[str, pa.Array]:
        """Join participants.tsv, sessions.tsv and, if asked for, the tables of phenotype/ to the rows."""
        subjects = list(dict.fromkeys(subject for subject, _ in self.layout.keys))
        position = {subject: number for number, subject in enumerate(subjects)}
        rows = pa.array([position[str(key[0])] for key in self.keys], pa.int64())
        columns, warnings = join_by_key(self.tree, "participants.tsv", "participant_id", "sub-", subjects)
        self.warnings += [] if self.bids.subjects else warnings
        sources = [("participant", columns, rows)]
        for name in sorted(self.tree.names("phenotype")) if self.bids.phenotype else []:
            if name.endswith(".tsv"):
                columns, _ = join_by_key(self.tree, f"phenotype/{name}", "participant_id", "sub-", subjects)
                shown = {key: values for key, values in columns.items() if not self.sidecars.removes(key)}
                stem = name.removesuffix(".tsv")
                sources.append(("phenotype", {f"{stem}_{key}": values for key, values in shown.items()}, rows))
        texts = read_sessions(self.tree, self.layout.tables, self.layout.keys)
        if texts and self.bids.rows != "subject":
            row_numbers = {key: number for number, key in enumerate(self.layout.keys)}
            columns = {name: pa.array(values, pa.string()) for name, values in texts.items()}
            for name, array in columns.items():
                if self.recipe.metadata.get(name) != "string":  # else it is text regardless of its values
                    columns[name] = infer_type(pa.chunked_array([array])).combine_chunks()
            sources.append(("session", columns, pa.array([row_numbers[key] for key in self.keys], pa.int64())))  # type: ignore[index]
        used = set(used)
        merged: dict[str, pa.Array] = {}
        for prefix, columns, indices in sources:
            for name, values in columns.items():
                if self.sidecars.removes(name):
                    continue
                while name in used:
                    name = f"{prefix}_{name}"
                used.add(name)
                merged[name] = self._as_saved(name, values.take(indices))
        if not self._is_saved:
            return merged
        # Exactly the columns of the recipe: those that this folder does not have are null.
        types = self.recipe.metadata
        return {n: merged[n] if n in merged else pa.nulls(len(self.keys), pa.type_for_alias(types[n])) for n in types}

    def _as_saved(self, name: str, array: pa.Array) -> pa.Array:
        kind = self.recipe.metadata.get(name, str(array.type))
        try:
            return array if kind == str(array.type) else array.cast(pa.type_for_alias(kind))
        except (pa.ArrowException, ValueError) as error:
            raise SourceError(
                f"The column {name!r} does not have the type {kind} that the recipe names: {error}."
            ) from error

    def _add_warnings(self) -> None:
        removed, broken, loops = self.sidecars.removed, self.sidecars.broken, self.layout.loops
        if removed:
            keys = ", ".join(key for key, _ in removed.most_common(4)) + (", …" if len(removed) > 4 else "")
            self.warnings.append(
                f"{removed.total()} private fields were left out of sidecars and tables ({keys}); "
                "--sidecars full keeps them"
            )
        if broken:
            self.warnings.append(f"{len(broken)} sidecar(s) cannot be read and are left out, for example {broken[0]}")
        if loops:
            self.warnings.append(f"{len(loops)} symbolic link(s) lead back to themselves: {loops[0]}")
        for why, count in self.layout.left_out.most_common():
            example = self.layout.examples.get(why)
            counted = why if example is None else f"{count} file(s), {why}, for example {example}"
            self.warnings.append(f"left out: {counted}")

    def refused(self) -> list[Refused]:
        is_selected = self.options.selects()
        return [refused for refused in self.layout.refused if is_selected(refused.path)]

    def unmatched_files(self) -> Unmatched | None:
        """Return the files that are in no column, and whose text is in none; None if only a part was asked for."""
        if self.bids.subjects or self.bids.sessions or self.bids.suffixes:
            return None
        used_paths = {item.path for item in self._items} | self.sidecars.read | set(self.layout.tables)
        used_paths |= {path for item in self._items for _, path, _ in item.members or ()}
        used_paths |= {"participants.tsv", "participants.json", "dataset_description.json"}
        is_selected = self.options.selects()

        def unmatched() -> Iterator[str]:
            for path in every_file(self.tree):
                parts = path.split("/")
                in_recording = any("/".join(parts[:depth]) + "/" in used_paths for depth in range(1, len(parts)))
                is_joined = self.bids.phenotype and path.startswith("phenotype/")
                if path not in used_paths and is_selected(path) and not in_recording and not is_joined:
                    yield path

        hint = "--derivatives, --suffixes and --recipe take more; --exclude leaves files out."
        return collect_unmatched(unmatched(), hint=hint)

    def about(self) -> dict[str, Any]:
        """Read dataset_description.json and participants.json."""
        description, participants = (self._json(f"{name}.json") for name in ("dataset_description", "participants"))
        keys = ("Name", "Authors", "License", "DatasetDOI", "HowToAcknowledge", "Funding", "BIDSVersion")
        about: dict[str, Any] = {key: description[key] for key in keys if description.get(key)}
        about["columns"] = {
            name: value["Description"]
            for name, value in participants.items()
            if name in self.columns and isinstance(value, dict) and isinstance(value.get("Description"), str)
        }
        return about

    def _json(self, path: str) -> dict[str, Any]:
        try:
            with self.tree.text(path) as file:
                content = json.load(file)
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def saved_columns(self) -> str:
        return write_bids_recipe(self.recipe)


def _group(item: Item) -> tuple[str, ...]:
    """Return what the files of one column have in common: suffix, derivative, datatype, and type or extension."""
    kind = "file" if item.members is not None else file_kind(item.name)
    return item.name.suffix, item.derivative, item.datatype, item.name.extension.lower() if kind == "file" else kind


def _column_group(column: BidsColumn) -> tuple[str, ...]:
    return column.suffix, column.derivative, column.datatype, column.group


def _order(item: Item) -> tuple[object, ...]:
    return tuple((entity, natural(value)) for entity, value in item.name.entities), item.path


def _as_type(value: str | None, kind: pa.DataType, path: str) -> Any:
    if value is None or pa.types.is_string(kind):
        return value
    try:
        return int(value) if pa.types.is_integer(kind) else float(value)
    except ValueError as error:
        raise SourceError(f"scans.tsv has {value!r} for {path}, where a number is expected.") from error
