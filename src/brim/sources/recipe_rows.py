"""Rows from a folder, as a recipe says: find each row's files, read its texts, join its tables.

Every folder is listed once, whatever the number of patterns that look into it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import Any

import pyarrow as pa

from brim.errors import InputError, SourceError
from brim.options.groups import BidsOptions
from brim.records import dataclass
from brim.sources.file_table import FileColumn, FileTable, Finding, Refused, RowFault, Unmatched, collect_unmatched
from brim.sources.folder_tree import Tree, every_file, natural
from brim.sources.recipe import (
    VALUE_TYPES,
    Counted,
    EntityColumn,
    Key,
    Recipe,
    RecipeColumn,
    expectation_findings,
    has_glob,
    path_regex,
    required_findings,
)
from brim.sources.recipe_tables import Join, SmallFiles
from brim.sources.remote_tree import tree_of
from brim.sources.source_options import SourceOptions
from brim.sources.table_source import make_file_table

_SHOWN = 3
_HINT = "Add a column for them to the recipe, or leave them out with --exclude."
ONE_FILE, PARTNERS, VALUES = "one file where one is expected", "partners are there", "entities are known"

Cell = list[str | None]  # the paths of a row's files; None for a partner that may be missing


def recipe_source(folder: str | Tree, recipe: Recipe, options: SourceOptions) -> FileTable:
    """The file table of a folder: a row for each key that the recipe finds, in natural order.

    `include` and `exclude` choose files; a row that loses its last file by them goes as well, and what lies beside a
    file goes with it.
    """
    if options.files or options.split_by or options.drop or options.label_from or options.root:
        raise InputError("--files, --drop, --split-by, --label-from and --root cannot be used with a recipe.")
    if options.bids != BidsOptions():
        raise InputError("BIDS options cannot be used with a recipe: the recipe defines the rows.")
    finder = _Finder(tree_of(folder, options.access), recipe)
    keys = finder.keys()
    if not keys:
        raise SourceError(
            f"The recipe {recipe.name!r} finds no row: no folder matches {' or '.join(recipe.rows)} in {finder.shown}.",
            hint="Use the folder that contains them.",
            path=finder.tree.root,
        )
    cells = _Cells(finder, keys, options)
    if not cells.kept:
        raise SourceError("No row of the folder is left after --include and --exclude.")
    if cells.faults and not options.lenient:
        raise _broken_rows(cells.faults)
    partly = [f"--{name}" for name in ("include", "exclude", "limit") if getattr(options, name)]
    warnings = () if partly else _strays(finder, cells)
    small = SmallFiles(finder.tree, options.memory)
    columns: dict[str, pa.Array] = {
        name: pa.array([key[i] for key in cells.kept], pa.string()) for i, name in enumerate(recipe.key)
    }
    columns |= cells.arrays(small)
    joined = _Joined(finder, small, cells.kept)
    columns |= joined.columns
    warnings += () if partly else joined.warnings
    reading = SourceOptions(split=options.split, root=finder.tree.root)
    made = make_file_table(pa.table(columns), cells.file_columns(), finder.tree, reading, {}, warnings)
    refused = dict.fromkeys([*made.refused, *small.walk.refused, *finder.refused])
    counted = _counted(recipe, cells, columns)
    numbers = expectation_findings(recipe, counted, options.tolerance, partly)
    expected: list[Finding] = [*required_findings(recipe, finder.tree), *numbers]
    return made.replace(
        refused=tuple(refused),
        recipe=options.recipe(),
        faults=tuple(cells.faults),
        unmatched=None if options.limit else _unmatched(finder, cells, joined.paths, options),
        expected=tuple(expected),
        beside={name: of for name, of in recipe.besides().items() if name in columns},
    )


class _Finder:
    """Finds paths below the folder by pattern; each folder is listed once."""

    def __init__(self, tree: Tree, recipe: Recipe) -> None:
        for root in recipe.roots:
            if tree.is_folder(root):
                tree = tree.below(root) if root else tree
                break
        self.tree, self.recipe = tree, recipe
        top = tree.root
        self.prefix = f"{recipe.root}/" if recipe.root else ""
        self.shown = repr(os.path.join(tree.shown, recipe.root).rstrip("/") or top)
        self.refused: list[Refused] = []
        self._names: dict[str, list[str]] = {}
        if not tree.is_folder(recipe.root):
            if not tree.is_folder(""):
                raise SourceError(f"The source {top!r} is not a folder.", path=top)
            raise SourceError(
                f"The recipe {recipe.name!r} reads the folder {recipe.root!r}, which {tree.shown!r} does not have.",
                hint=f"Use the folder that contains {recipe.root!r}.",
                path=top,
            )

    def keys(self) -> list[Key]:
        """The row keys of all folders that match."""
        found: set[Key] = set()
        for glob in self.recipe.rows:
            at = [i for i, part in enumerate(glob.split("/")) if has_glob(part)]
            for path in self.paths(glob):
                if self.tree.is_folder(path):
                    parts = path.removeprefix(self.prefix).split("/")
                    found.add(tuple(parts[i] for i in at))
        return sorted(found, key=lambda key: [natural(part) for part in key])

    def paths(self, pattern: str, key: Key = (), more: Mapping[str, str] | None = None) -> list[str]:
        """What matches, relative to the folder, in natural order."""
        names = dict(zip(self.recipe.key, key, strict=False)) | dict(more or {})
        parts = [(has_glob(part), part.format_map(names)) for part in pattern.split("/")]
        found = list(self._below(self.prefix, parts))
        return sorted(found, key=natural) if len(found) > 1 else found

    def _below(self, prefix: str, parts: list[tuple[bool, str]]) -> Iterator[str]:
        (globbed, part), rest = parts[0], parts[1:]
        if globbed:
            matches = _matcher(part)
            names = [n for n in self._list(prefix) if matches.match(n) and self._is_utf8(prefix + n)]
        else:
            names = [part] if rest or self.tree.exists(prefix + part) else []
        for name in names:
            if rest:
                yield from self._below(f"{prefix}{name}/", rest)
            else:
                yield prefix + name

    def _list(self, prefix: str) -> list[str]:
        if prefix in self._names:
            return self._names[prefix]
        names: list[str] = []
        try:
            names = self.tree.names(prefix)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            self.refused.append(Refused("unreadable", prefix))
        self._names[prefix] = [name for name in names if not name.startswith(".")]
        return self._names[prefix]

    def _is_utf8(self, path: str) -> bool:
        try:
            path.encode()
        except UnicodeEncodeError:
            self.refused.append(Refused("name", path.encode("utf-8", "backslashreplace").decode()))
            return False
        return True


@functools.lru_cache(maxsize=4096)
def _matcher(part: str) -> re.Pattern[str]:
    return path_regex(part)


class _Cells:
    """The rows that are kept, and for each column that the recipe makes of files the paths in each row.

    `found` has them by the columns of the recipe, `paths` by those of the table: one may be split into several.
    """

    def __init__(self, finder: _Finder, keys: list[Key], options: SourceOptions) -> None:
        self.finder, self.recipe = finder, finder.recipe
        self.kept: list[Key] = []
        self.found: dict[str, list[Cell]] = {column.name: [] for column in self.recipe.of_files}
        self.faults: list[RowFault] = []
        own = [column for column in self.recipe.of_files if not column.beside]
        selected = options.selects()
        for key in keys:
            if len(self.kept) == options.limit:
                break
            there = [self._own(column, key) for column in own]
            chosen = [[path for path in paths if selected(path)] for paths in there]
            if any(there) and not any(chosen):
                continue
            self.kept.append(key)
            for column, paths in zip(own, chosen, strict=True):
                self.found[column.name].append(list(paths))
                if len(paths) > 1 and not column.is_list and not column.split:
                    self._crowded(column.name, key, paths)
        for column in self.recipe.of_files:
            if column.beside:
                self.found[column.name] = self._beside(column)
        self.columns: dict[str, RecipeColumn] = {}
        self.paths: dict[str, list[Cell]] = {}
        for column in self.recipe.of_files:
            for name, cells in self._split(column) if column.split else [(column.name, self.found[column.name])]:
                if name in self.paths or name in self.recipe.key:
                    raise InputError(f"The recipe makes two columns named {name!r}.", hint="Rename one of them.")
                self.columns[name], self.paths[name] = column, cells
        said = [column for column in self.recipe.columns if isinstance(column, EntityColumn)]
        self.said = {column.name: self._entities(column) for column in said}

    def _own(self, column: RecipeColumn, key: Key) -> list[str]:
        for pattern in (column.pattern, *column.fallback):
            if paths := self.finder.paths(pattern, key):
                return paths
        return []

    def _crowded(self, name: str, key: Key, paths: list[str]) -> None:
        what = f"{name} of {self.recipe.row_name(key)} has {len(paths)}: {', '.join(paths)}"
        self.faults += [RowFault(ONE_FILE, path, what) for path in paths]

    def _beside(self, column: RecipeColumn) -> list[Cell]:
        """For each file of the other column its partner."""
        cells: list[Cell] = []
        for key, files in zip(self.kept, self.found[column.beside], strict=True):
            near: dict[str, list[str]] = {}  # what lies about a row's files is looked for once
            cells.append([self._partner(column, key, path, near) for path in files if path is not None])
        return cells

    def _partner(self, column: RecipeColumn, key: Key, path: str, near: dict[str, list[str]]) -> str | None:
        stem = _stem(path)
        entities = {"entities": stem.rpartition("_")[0] or stem}
        for pattern in (column.pattern, *column.fallback):
            if "{entities}" in pattern:
                found = self.finder.paths(pattern, key, entities)
            else:
                if pattern not in near:
                    near[pattern] = self.finder.paths(pattern, key)
                found = [other for other in near[pattern] if _stem(other) == stem]
            if len(found) > 1:
                what = f"{path} has several partners for {column.name!r}: {', '.join(found)}"
                self.faults.append(RowFault(PARTNERS, path, what))
            if found:
                return found[0]
        if column.missing == "error":
            names = dict(zip(self.recipe.key, key, strict=True)) | entities
            wanted = column.pattern.format_map(names)
            what = f"{path} has no partner for {column.name!r}: there is no {_named(wanted, stem)}"
            self.faults.append(RowFault(PARTNERS, path, what))
        return None

    def _split(self, column: RecipeColumn) -> list[tuple[str, list[Cell]]]:
        """A column for each value of an entity; a value that the recipe does not know is a fault."""
        values: dict[str, list[Cell]] = {value: [] for value in column.values}
        if not values:
            met = {_entity(path, column.split) for cell in self.found[column.name] for path in cell if path}
            values = {value: [] for value in sorted((v for v in met if v is not None), key=natural)}
        for key, files in zip(self.kept, self.found[column.name], strict=True):
            row: dict[str, list[str]] = {value: [] for value in values}
            for path in filter(None, files):
                value = _entity(path, column.split)
                if value is not None and value in row:
                    row[value].append(path)
                else:
                    said = f"{column.split}-{value}" if value else f"no {column.split}- in its name"
                    what = f"{path} has {said}, and {column.name!r} knows {', '.join(values) or 'none'}"
                    self.faults.append(RowFault(VALUES, path, what))
            for value, paths in row.items():
                if len(paths) > 1 and not column.is_list:
                    self._crowded(column.split_name(value), key, paths)
                values[value].append(list(paths))
        return [(column.split_name(value), cells) for value, cells in values.items()]

    def file_columns(self) -> dict[str, FileColumn]:
        return {n: FileColumn(c.type, c.is_list) for n, c in self.columns.items() if c.type != "text"}

    def arrays(self, small: SmallFiles) -> dict[str, pa.Array]:
        """The columns in the order of the recipe: paths of files, texts, what names say."""
        arrays: dict[str, pa.Array] = {}
        for column in self.recipe.columns:
            if isinstance(column, EntityColumn):
                arrays[column.name] = self.said[column.name]
                continue
            for name in [name for name, of in self.columns.items() if of is column]:
                cells: list[list[Any]] = [list(cell) for cell in self.paths[name]]
                if column.type == "text":
                    self.finder.tree.expect(path for cell in self.paths[name] for path in cell if path)
                    cells = [[self._text(small, column, path) for path in cell] for cell in self.paths[name]]
                if column.is_list:
                    arrays[name] = pa.array(cells, pa.list_(pa.string()))
                else:
                    arrays[name] = pa.array([cell[0] if cell else None for cell in cells], pa.string())
        return arrays

    def _text(self, small: SmallFiles, column: RecipeColumn, path: str | None) -> str | None:
        text = None if path is None else small.text(path)
        return text if text is None or column.final_newline else text.rstrip("\r\n")

    def _entities(self, column: EntityColumn) -> pa.Array:
        """What names say; a value that the map does not have stays as it is."""

        def value(path: str) -> str | None:
            said = _entity(path, column.entity)
            return None if said is None else column.map.get(said, said)

        cells = [[value(path) for path in cell if path] for cell in self.found[column.of]]
        if column.is_list:
            return pa.array(cells, pa.list_(pa.string()))
        for cell, files in zip(cells, self.found[column.of], strict=True):
            if len(set(cell)) > 1:
                said = ", ".join(f"{path} ({one})" for path, one in zip(files, cell, strict=True))
                what = f"{column.name!r} holds one value, and the files of its row say several: {said}"
                self.faults += [RowFault(VALUES, path, what) for path in files if path]
        return pa.array([cell[0] if cell else None for cell in cells], pa.string())


def _stem(path: str) -> str:
    """A name up to its first dot."""
    return path.rsplit("/", 1)[-1].partition(".")[0]


def _named(pattern: str, stem: str) -> str:
    """The partner that a pattern means: with the stem of its file in place of a wildcard."""
    folder, _, name = pattern.rpartition("/")
    if has_glob(name) and "." in name:
        name = f"{stem}.{name.partition('.')[2]}"
    return f"{folder}/{name}" if folder else name


def _entity(path: str, entity: str) -> str | None:
    """The value of an entity in a file's name, or None."""
    for part in _stem(path).split("_"):
        name, dash, value = part.partition("-")
        if dash and name == entity:
            return value
    return None


def _broken_rows(faults: list[RowFault]) -> SourceError:
    """What breaks rows, by what is wrong."""
    heads = {
        ONE_FILE: "Where the recipe expects one file, there are several:",
        PARTNERS: "Files lack what the recipe puts beside them:",
        VALUES: "The names of files say what the recipe does not know:",
    }
    hints = {
        ONE_FILE: "give the column list = true or a narrower pattern in the recipe, or leave files out with --exclude",
        PARTNERS: 'restore what is missing, leave the file out with --exclude, or allow it with missing = "null"',
        VALUES: "add the value to the recipe, or leave the files out with --exclude",
    }
    text, todo = [], []
    for check, head in heads.items():
        lines = list(dict.fromkeys(fault.what for fault in faults if fault.check == check))
        if lines:
            more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            text += [head, *(f"  {line}" for line in [*lines[:_SHOWN], *more])]
            todo.append(hints[check])
    hint = "; ".join(todo)
    return SourceError(
        "\n".join(text),
        hint=f"{hint[0].upper()}{hint[1:]}. brim check --list names them all.",
        faults=[{"check": fault.check, "path": fault.path, "what": fault.what} for fault in faults],
    )


@dataclass
class _Joined:
    """The tables of a recipe, joined to the rows; `paths` are the files that were read for it."""

    finder: _Finder
    small: SmallFiles
    kept: list[Key]
    columns: dict[str, pa.Array] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    paths: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        recipe = self.finder.recipe
        for table in recipe.tables:
            join = Join(recipe, table, self.small)
            own = [self.finder.paths(table.pattern, key) for key in self.kept]
            self.paths.update(path for paths in own for path in paths)
            self.finder.tree.expect(path for paths in own for path in paths)
            taken = [join.values(key, paths) for key, paths in zip(self.kept, own, strict=True)]
            for i, value in enumerate(table.columns):
                self.columns[value.name] = pa.array([row[i] for row in taken], VALUE_TYPES[value.type])
            self.warnings += join.warnings(self.kept)


def _counted(recipe: Recipe, cells: _Cells, columns: Mapping[str, pa.Array]) -> Counted:
    """Rows and files by column. What is there but cannot be packaged (its content is elsewhere) counts as there."""
    counts = {name: len(array) - array.null_count for name, array in columns.items()}
    files: dict[str, int] = {}
    for name, found in {**cells.found, **cells.paths}.items():
        counts[name] = sum(any(path is not None for path in cell) for cell in found)
        files[name] = sum(path is not None for cell in found for path in cell)
    for column in recipe.columns:
        if isinstance(column, EntityColumn) and column.is_list:
            counts[column.name] = counts[column.of]
    distinct = len({key[0] for key in cells.kept})
    return Counted(len(cells.kept), distinct, len({key[:2] for key in cells.kept}), counts, files)


def _unmatched(finder: _Finder, cells: _Cells, tables: set[str], options: SourceOptions) -> Unmatched:
    """The files of the whole source that the recipe has no use for."""
    recipe = finder.recipe
    taken = {path for found in cells.found.values() for cell in found for path in cell if path} | tables
    taken |= {f"{finder.prefix}{path}" for path in recipe.expect.required}
    selected: Callable[[str], bool] = options.selects()
    left = (path for path in every_file(finder.tree) if path not in taken and selected(path))
    return collect_unmatched(left, recipe.unmatched_is_error, _HINT)


def _strays(finder: _Finder, cells: _Cells) -> tuple[str, ...]:
    """A warning for each column whose pattern matches files that no row has, or nothing that they are beside."""
    warnings = []
    for column in finder.recipe.of_files:
        claimed = {path for cell in cells.found[column.name] for path in cell}
        anywhere = re.sub(r"\{\w+\}", "*", column.pattern)
        stray = [path for path in finder.paths(anywhere) if path not in claimed]
        if stray:
            shown = ", ".join(stray[:_SHOWN]) + (" …" if len(stray) > _SHOWN else "")
            where = f"and lie beside no file of {column.beside!r}" if column.beside else "and belong to no row"
            warnings.append(f"{len(stray)} file(s) look like {column.name!r} {where}: {shown}")
    return tuple(warnings)
