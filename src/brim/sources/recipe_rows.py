"""Make rows of a folder by a recipe: find the files of each row, read its texts, join its tables.

`FolderRows` makes the file table of any recipe. `PatternRows` finds files by the patterns of a recipe; those of a BIDS
dataset are found by bids_recipe.py.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from brim.errors import InputError, SourceError
from brim.file_set import AbsentStat, FileSetBuilder
from brim.options.groups import BidsOptions
from brim.sources.file_table import (
    FileColumn,
    FileTable,
    Finding,
    Refused,
    RowFault,
    Split,
    Unmatched,
    collect_unmatched,
)
from brim.sources.folder_tree import MAX_POINTER_BYTES, Folder, Tree, Walk, every_file, natural, pointer_kind
from brim.sources.joined_tables import TableJoin
from brim.sources.recipe import (
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
from brim.sources.remote_tree import tree_of
from brim.sources.source_options import SourceOptions
from brim.sources.table_source import describe

MAX_TEXT_BYTES = 16 << 20
_MAX_TEXTS_BYTES = 256 << 20
_SHOWN = 3
# By the check that finds them: what faults have in common, and how to fix them.
_FAULTS = {
    "one file where one is expected": (
        "Where the recipe expects one file, there are several:",
        "give the column list = true or a narrower pattern in the recipe, or leave files out with --exclude",
    ),
    "partners are there": (
        "Files lack a partner that the recipe expects:",
        'restore what is missing, leave the file out with --exclude, or allow it with missing = "null"',
    ),
    "entities are known": (
        "File names have values that the recipe does not know:",
        "add the value to the recipe, or leave the files out with --exclude",
    ),
}
ONE_FILE, PARTNERS, VALUES = _FAULTS

Cell = list[str | None]  # the paths of a row's files in one column; None for a partner that is missing


class FolderRows:
    """The rows of a folder and their columns. A subclass finds the keys of the rows and the files of the columns."""

    def __init__(self, tree: Tree, recipe: Recipe, options: SourceOptions) -> None:
        self.tree, self.recipe, self.options = tree, recipe, options
        self.keys: list[Key] = []
        self.columns: dict[str, pa.Array] = {}
        self.file_columns: dict[str, FileColumn] = {}
        self.faults: list[RowFault] = []
        self.warnings: list[str] = []
        self.walk = Walk(tree, keys=True)
        self.files = FileSetBuilder(tree.root, tree.bucket)
        self._numbers: dict[str, int | None] = {}

    def find_rows(self) -> None:
        """Find the keys of all rows, and their files."""
        raise NotImplementedError

    def add_columns(self) -> None:
        """Fill `columns` and `file_columns`."""
        raise NotImplementedError

    def unmatched_files(self) -> Unmatched | None:
        """Return the files of the folder that are in no column."""
        raise NotImplementedError

    def refused(self) -> list[Refused]:
        """Return the files that cannot be read."""
        return self.walk.refused

    def expectations(self) -> list[Finding]:
        """Compare the rows with what the recipe expects."""
        return []

    def about(self) -> dict[str, Any]:
        """Return how the folder describes itself, for the dataset card."""
        return {}

    def saved_columns(self) -> str | None:
        """Return the columns that were found as the text of a recipe."""
        return None

    def file_table(self) -> FileTable:
        self.find_rows()
        if self.faults and not self.options.lenient:
            raise _broken_rows(self.faults)
        self.add_columns()
        for name in self.options.drop:
            if name not in self.columns:
                hint = f"Columns: {', '.join(self.columns)}."
                raise SourceError(f"--drop names {name!r}, which is not a column.", hint=hint)
        rows = pa.table({name: array for name, array in self.columns.items() if name not in self.options.drop})
        columns = {name: column for name, column in self.file_columns.items() if name in rows.column_names}
        features, unknown = describe(rows.schema, columns, {})
        aligned = {name: base for name, base in self.recipe.aligned_columns().items() if name in self.columns}
        return FileTable(
            rows=rows,
            columns=columns,
            files=self.files.finish(),
            features=features,
            splits=(Split(self.options.split or "train", 0, rows.num_rows),),
            refused=tuple(dict.fromkeys(self.refused())),
            warnings=(*self.warnings, *unknown),
            recipe=self.options.recipe(),
            about=self.about(),
            faults=tuple(self.faults),
            unmatched=None if self.options.limit else self.unmatched_files(),
            expected=tuple(self.expectations()),
            aligned_with=aligned,
            saved=self.saved_columns(),
        )

    def add(
        self, name: str, cells: Sequence[Cell], value: Callable[[str], Any], kind: pa.DataType, is_list: bool
    ) -> None:
        """Add a column with a value for each file: of all files of a row if it is a list, otherwise of the first."""
        if is_list:
            values: list[Any] = [[None if path is None else value(path) for path in cell] for cell in cells]
        else:
            firsts = [cell[0] if cell else None for cell in cells]
            values = [None if path is None else value(path) for path in firsts]
        self.columns[name] = pa.array(values, pa.list_(kind) if is_list else kind)

    def add_files(self, name: str, cells: Sequence[Cell], kind: str, is_list: bool) -> None:
        """Add a column of files."""
        self.file_columns[name] = FileColumn(kind, is_list)
        self.add(name, cells, self._number, pa.int64(), is_list)

    def add_file(self, path: str) -> int | None:
        """Add a file, and return its number; None after a note why it cannot be read."""
        entry = self.walk.find(path, path)
        if isinstance(entry, Folder):
            self.walk.refused.append(Refused("folder", path))
        elif entry is not None:
            return self.files.add(path, entry)
        elif path in self.walk.loops:
            self.walk.refused.append(Refused("missing", path))
        return None

    def _number(self, path: str) -> int | None:
        if path not in self._numbers:
            self._numbers[path] = self.add_file(path)
        return self._numbers[path]

    def report_crowded(self, name: str, key: Key, cell: Sequence[str | None]) -> None:
        """Report the files of a row in a column that holds only one."""
        paths = [path for path in cell if path is not None]
        problem = f"{name} of {self.recipe.row_name(key)} has {len(paths)}: {', '.join(paths)}"
        self.faults += [RowFault(ONE_FILE, path, problem) for path in paths]


def _broken_rows(faults: Sequence[RowFault]) -> SourceError:
    text, hints = [], []
    for check, (title, hint) in _FAULTS.items():
        lines = list(dict.fromkeys(fault.what for fault in faults if fault.check == check))
        if lines:
            suffix = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
            text += [title, *(f"  {line}" for line in [*lines[:_SHOWN], *suffix])]
            hints.append(hint)
    hint = "; ".join(hints)
    return SourceError(
        "\n".join(text),
        hint=f"{hint[0].upper()}{hint[1:]}. brim check --list names them all.",
        faults=[{"check": fault.check, "path": fault.path, "what": fault.what} for fault in faults],
    )


def recipe_source(folder: str | Tree, recipe: Recipe, options: SourceOptions) -> FileTable:
    """Make the file table of a folder by the patterns of a recipe: a row for each key, in natural order.

    `include` and `exclude` choose files. A row that loses its last file by them is left out, and the partners of a file
    are left out with it.
    """
    if options.files or options.split_by or options.drop or options.label_from or options.root:
        raise InputError("--files, --drop, --split-by, --label-from and --root cannot be used with a recipe.")
    if options.bids != BidsOptions():
        raise InputError("BIDS options cannot be used with a recipe: the recipe defines the rows.")
    return PatternRows(tree_of(folder, options.access), recipe, options).file_table()


class PatternRows(FolderRows):
    """Rows whose files are found by the patterns of a recipe. Each folder is listed once."""

    def __init__(self, tree: Tree, recipe: Recipe, options: SourceOptions) -> None:
        for root in recipe.roots:
            if tree.is_folder(root):
                tree = tree.below(root) if root else tree
                break
        super().__init__(tree, recipe, options)
        self._prefix = f"{recipe.root}/" if recipe.root else ""
        self._names: dict[str, list[str]] = {}  # of each folder that was listed
        self._matches: dict[str, list[Cell]] = {}  # by column of the recipe
        self._cells: dict[str, tuple[RecipeColumn, list[Cell]]] = {}  # by column of the rows
        self._table_paths: set[str] = set()
        self._text_bytes = 0
        self._partly = [f"--{name}" for name in ("include", "exclude", "limit") if getattr(options, name)]
        if not tree.is_folder(recipe.root):
            if not tree.is_folder(""):
                raise SourceError(f"The source {tree.root!r} is not a folder.", path=tree.root)
            raise SourceError(
                f"The recipe {recipe.name!r} reads the folder {recipe.root!r}, which {tree.shown!r} does not have.",
                hint=f"Use the folder that contains {recipe.root!r}.",
                path=tree.root,
            )

    def _all_keys(self) -> list[Key]:
        """Return the keys of all folders that match, in natural order."""
        keys: set[tuple[str, ...]] = set()
        for glob in self.recipe.rows:
            positions = [i for i, part in enumerate(glob.split("/")) if has_glob(part)]
            folders = [path for path in self._paths(glob) if self.tree.is_folder(path)]
            split = [path.removeprefix(self._prefix).split("/") for path in folders]
            keys |= {tuple(parts[i] for i in positions) for parts in split}
        if not keys:
            shown = repr(os.path.join(self.tree.shown, self.recipe.root).rstrip("/") or self.tree.root)
            globs = " or ".join(self.recipe.rows)
            raise SourceError(
                f"The recipe {self.recipe.name!r} finds no row: no folder matches {globs} in {shown}.",
                hint="Use the folder that contains them.",
                path=self.tree.root,
            )
        return sorted(keys, key=lambda key: [natural(str(part)) for part in key])

    def find_rows(self) -> None:
        is_selected = self.options.selects()
        own = [column for column in self.recipe.file_columns if not column.aligned_with]
        self._matches = {column.name: [] for column in own}
        for key in self._all_keys():
            if len(self.keys) == self.options.limit:
                break
            patterns = [(column.pattern, *column.fallback) for column in own]
            matches = [next(filter(None, (self._paths(each, key) for each in some)), []) for some in patterns]
            selected_paths = [[path for path in paths if is_selected(path)] for paths in matches]
            if any(matches) and not any(selected_paths):
                continue
            self.keys.append(key)
            for column, paths in zip(own, selected_paths, strict=True):
                self._matches[column.name].append(list(paths))
                if len(paths) > 1 and not column.is_list and not column.split:
                    self.report_crowded(column.name, key, paths)
        if not self.keys:
            raise SourceError("No row of the folder is left after --include and --exclude.")
        for column in self.recipe.file_columns:
            if column.aligned_with:
                self._matches[column.name] = self._partners(column)
        for column in self.recipe.file_columns:
            found_cells = self._matches[column.name]
            for name, cells in self._split(column) if column.split else [(column.name, found_cells)]:
                if name in self._cells or name in self.recipe.key:
                    raise InputError(f"The recipe makes two columns named {name!r}.", hint="Rename one of them.")
                self._cells[name] = (column, cells)
        for entity in self.recipe.columns:
            if isinstance(entity, EntityColumn) and not entity.is_list:
                self._check_one_value(entity)
        if not self._partly:
            self._report_strays()

    def _check_one_value(self, column: EntityColumn) -> None:
        for files in self._matches[column.of]:
            values = {path: _mapped_entity(column, path) for path in files if path}
            if len(set(values.values())) > 1:
                problem = f"{column.name!r} holds one value, but the names of the row's files have several: "
                problem += ", ".join(f"{path} ({value})" for path, value in values.items())
                self.faults += [RowFault(VALUES, path, problem) for path in values]

    def _paths(self, pattern: str, key: Key = (), entities: str = "") -> list[str]:
        """Return what matches a pattern, relative to the folder, in natural order."""
        values = dict(zip(self.recipe.key, key, strict=False)) | {"entities": entities}
        prefixes = [self._prefix]
        parts = pattern.split("/")
        for depth, part in enumerate(parts, 1):
            name, is_last = part.format_map(values), depth == len(parts)
            paths = []
            for prefix in prefixes:
                if has_glob(part):
                    matches = path_regex(name).match
                    names = [n for n in self._list(prefix) if matches(n) and self._is_utf8(prefix + n)]
                else:
                    names = [name] if not is_last or self.tree.exists(prefix + name) else []
                paths += [prefix + n if is_last else f"{prefix}{n}/" for n in names]
            prefixes = paths
        return sorted(prefixes, key=natural) if len(prefixes) > 1 else prefixes

    def _list(self, prefix: str) -> list[str]:
        if prefix not in self._names:
            names: list[str] = []
            try:
                names = self.tree.names(prefix)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError:
                self.walk.refused.append(Refused("unreadable", prefix))
            self._names[prefix] = [name for name in names if not name.startswith(".")]
        return self._names[prefix]

    def _is_utf8(self, path: str) -> bool:
        try:
            path.encode()
        except UnicodeEncodeError:
            self.walk.refused.append(Refused("name", path.encode("utf-8", "backslashreplace").decode()))
            return False
        return True

    def _partners(self, column: RecipeColumn) -> list[Cell]:
        """Return for each file of the other column its partner."""
        cells: list[Cell] = []
        for key, files in zip(self.keys, self._matches[column.aligned_with], strict=True):
            names_by_pattern: dict[str, list[str]] = {}  # of a row, by pattern: listed once for all its files
            cell: Cell = []
            for path in filter(None, files):
                stem, partners = _stem(path), list[str]()
                entities = stem.rpartition("_")[0] or stem
                for pattern in (column.pattern, *column.fallback):
                    if "{entities}" in pattern:
                        partners = self._paths(pattern, key, entities)
                    else:
                        if pattern not in names_by_pattern:
                            names_by_pattern[pattern] = self._paths(pattern, key)
                        partners = [candidate for candidate in names_by_pattern[pattern] if _stem(candidate) == stem]
                    if partners:
                        break
                if len(partners) > 1:
                    problem = f"{path} has several partners for {column.name!r}: {', '.join(partners)}"
                    self.faults.append(RowFault(PARTNERS, path, problem))
                if not partners and column.missing == "error":
                    values = dict(zip(self.recipe.key, key, strict=True)) | {"entities": entities}
                    folder, slash, name = column.pattern.format_map(values).rpartition("/")
                    if has_glob(name) and "." in name:
                        name = f"{stem}.{name.partition('.')[2]}"
                    problem = f"{path} has no partner for {column.name!r}: there is no {folder}{slash}{name}"
                    self.faults.append(RowFault(PARTNERS, path, problem))
                cell.append(partners[0] if partners else None)
            cells.append(cell)
        return cells

    def _split(self, column: RecipeColumn) -> list[tuple[str, list[Cell]]]:
        """Make a column for each value of an entity. A value that the recipe does not know is a fault."""
        matches = self._matches[column.name]
        values = list(column.values)
        if not values:
            present = {_entity(path, column.split) for cell in matches for path in cell if path}
            values = sorted((value for value in present if value is not None), key=natural)
        columns: dict[str, list[Cell]] = {value: [[] for _ in matches] for value in values}
        for row, (key, files) in enumerate(zip(self.keys, matches, strict=True)):
            for path in filter(None, files):
                value = _entity(path, column.split)
                if value is not None and value in columns:
                    columns[value][row].append(path)
                    continue
                entity = f"{column.split}-{value}" if value else f"no {column.split}- in its name"
                problem = f"{path} has {entity}, and {column.name!r} knows {', '.join(columns) or 'none'}"
                self.faults.append(RowFault(VALUES, path, problem))
            for value, cells in columns.items():
                if len(cells[row]) > 1 and not column.is_list:
                    self.report_crowded(column.split_name(value), key, cells[row])
        return [(column.split_name(value), cells) for value, cells in columns.items()]

    def _report_strays(self) -> None:
        """Warn about files that a pattern matches with any key, and that no row has."""
        for column in self.recipe.file_columns:
            claimed = {path for cell in self._matches[column.name] for path in cell}
            stray = [path for path in self._paths(re.sub(r"\{\w+\}", "*", column.pattern)) if path not in claimed]
            if stray:
                shown = ", ".join(stray[:_SHOWN]) + (" …" if len(stray) > _SHOWN else "")
                partner = f"match no file of {column.aligned_with!r}" if column.aligned_with else "belong to no row"
                self.warnings.append(f"{len(stray)} file(s) look like {column.name!r} and {partner}: {shown}")

    def add_columns(self) -> None:
        for i, name in enumerate(self.recipe.key):
            self.columns[name] = pa.array([key[i] for key in self.keys], pa.string())
        for column in self.recipe.columns:
            if isinstance(column, EntityColumn):
                value = functools.partial(_mapped_entity, column)
                self.add(column.name, self._matches[column.of], value, pa.string(), column.is_list)
                continue
            for name, (origin, cells) in self._cells.items():
                if origin is column and origin.type == "text":
                    self.tree.expect(path for cell in cells for path in cell if path)
                    self.add(name, cells, functools.partial(self._text, origin), pa.string(), origin.is_list)
                elif origin is column:
                    self.add_files(name, cells, origin.type, origin.is_list)
        for table in self.recipe.tables:
            own = [self._paths(table.pattern, key) for key in self.keys]
            self._table_paths.update(path for paths in own for path in paths)
            self.tree.expect(path for paths in own for path in paths)
            for key, paths in zip(self.keys, own, strict=True):
                if len(paths) > 1:
                    raise SourceError(
                        f"{self.recipe.row_name(key)} has several tables where one is expected: {', '.join(paths)}.",
                        hint=f"Narrow the pattern {table.pattern!r} in the recipe.",
                    )
            # A missing table of all rows is looked for too, so that its absence is reported.
            absent = None if "{" in table.pattern else os.path.join(self.recipe.root, table.pattern)
            of_row = [paths[0] if paths else absent for paths in own]
            readable = {path for path in dict.fromkeys(of_row) if path and self._is_readable(path, may_be_empty=False)}
            join = TableJoin(self.recipe, table)
            self.columns |= join.join(self.tree, self.keys, [path if path in readable else None for path in of_row])
            self.warnings += [] if self._partly else join.warnings

    def _is_readable(self, path: str, may_be_empty: bool = True) -> bool:
        """Return whether a small file can be read now. If not, the reason is noted in `walk`."""
        entry = self.walk.find(path, path)
        reason: Any = None
        if entry is None:
            reason = "missing" if path in self.walk.loops else None
        elif isinstance(entry, Folder):
            reason = "folder"
        elif isinstance(entry, AbsentStat):
            reason = "annex"
        elif not self.tree.may_read(path):
            reason = "unreadable"
        elif entry.st_size == 0 and not may_be_empty:
            reason = "empty"
        elif entry.st_size > MAX_POINTER_BYTES or (reason := pointer_kind(self.tree.head(path))) is None:
            return True
        self.walk.refused += [] if reason is None else [Refused(reason, path)]
        return False

    def _text(self, column: RecipeColumn, path: str) -> str | None:
        if not self._is_readable(path):
            return None
        hint = 'Set type = "file" for its column in the recipe.'
        size = self.tree.size(path)
        self._text_bytes += size
        if size > MAX_TEXT_BYTES or self._text_bytes > _MAX_TEXTS_BYTES:
            raise SourceError(f"{path!r} makes a column of texts too long for memory.", hint=hint, path=path)
        try:
            with self.tree.text(path, encoding="utf-8", newline="") as file:
                text = file.read()
        except UnicodeDecodeError as error:
            raise SourceError(f"{path!r} is not UTF-8 text (byte {error.start}).", hint=hint, path=path) from error
        return text if column.final_newline else text.rstrip("\r\n")

    def expectations(self) -> list[Finding]:
        """Files whose content is elsewhere (git-annex) count too."""
        counts = {name: len(array) - array.null_count for name, array in self.columns.items()}
        files: dict[str, int] = {}
        for name, cells in {**self._matches, **{name: cells for name, (_, cells) in self._cells.items()}}.items():
            counts[name] = sum(any(path is not None for path in cell) for cell in cells)
            files[name] = sum(path is not None for cell in cells for path in cell)
        for column in self.recipe.columns:
            if isinstance(column, EntityColumn) and column.is_list:
                counts[column.name] = counts[column.of]
        subjects, sessions = (len({key[:depth] for key in self.keys}) for depth in (1, 2))
        counted = Counted(len(self.keys), subjects, sessions, counts, files)
        findings = expectation_findings(self.recipe, counted, self.options.tolerance, self._partly)
        return [*required_findings(self.recipe, self.tree), *findings]

    def unmatched_files(self) -> Unmatched:
        used_paths = {path for cells in self._matches.values() for cell in cells for path in cell if path}
        used_paths |= self._table_paths | {f"{self._prefix}{path}" for path in self.recipe.expect.required}
        is_selected = self.options.selects()
        unused_paths = (path for path in every_file(self.tree) if path not in used_paths and is_selected(path))
        hint = "Add a column for them to the recipe, or leave them out with --exclude."
        return collect_unmatched(unused_paths, self.recipe.unmatched == "error", hint)


def _stem(path: str) -> str:
    """Return a name up to its first dot."""
    return path.rsplit("/", 1)[-1].partition(".")[0]


def _entity(path: str, entity: str) -> str | None:
    """Return the value of an entity in a file's name."""
    for part in _stem(path).split("_"):
        name, dash, value = part.partition("-")
        if dash and name == entity:
            return value
    return None


def _mapped_entity(column: EntityColumn, path: str) -> str | None:
    value = _entity(path, column.entity)
    return None if value is None else column.map.get(value, value)
