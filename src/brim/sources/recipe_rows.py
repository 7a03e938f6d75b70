"""Rows from a folder, as a recipe says: find each row's files, read its texts, join its tables.

Every folder is listed once, whatever the number of patterns that look into it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator

import pyarrow as pa

from brim.errors import InputError, SourceError
from brim.sources.bucket_tree import tree_of
from brim.sources.file_table import FileTable, Refused
from brim.sources.folder_tree import Tree, natural
from brim.sources.recipe import VALUE_TYPES, Key, Recipe, RecipeColumn, has_glob, path_regex
from brim.sources.recipe_tables import Join, SmallFiles
from brim.sources.source_options import BidsOptions, SourceOptions
from brim.sources.table_source import make_file_table

_SHOWN = 3


def recipe_source(folder: str | Tree, recipe: Recipe, options: SourceOptions) -> FileTable:
    """The file table of a folder: a row for each key that the recipe finds, in natural order.

    `include` and `exclude` choose files; a row that loses its last file by them goes as well.
    """
    if options.files or options.split_by or options.drop or options.label_from or options.root:
        raise InputError("With a recipe, --files, --drop, --split-by, --label-from and --root have no place.")
    if options.bids != BidsOptions():
        raise InputError("With a recipe, the options of BIDS have no place: the recipe says what the rows are.")
    finder = _Finder(tree_of(folder, options.access), recipe)
    keys = finder.keys()
    if not keys:
        raise SourceError(
            f"The recipe {recipe.name!r} finds no row: no folder matches {' or '.join(recipe.rows)} in {finder.shown}.",
            hint="Give the folder that holds them.",
            path=finder.tree.root,
        )
    kept, cells = _cells(finder, keys, options)
    if not kept:
        raise SourceError("No row of the folder is left after --include and --exclude.")
    whole = not (options.include or options.exclude or options.limit)
    warnings = _strays(finder, cells) if whole else ()
    columns: dict[str, pa.Array] = {
        name: pa.array([key[i] for key in kept], pa.string()) for i, name in enumerate(recipe.key)
    }
    small = SmallFiles(finder.tree)
    for column in recipe.columns:
        found = cells[column.name]
        if column.type == "text":
            finder.tree.expect(path for paths in found for path in paths)
        values = [small.texts(paths) for paths in found] if column.type == "text" else found
        if column.is_list:
            columns[column.name] = pa.array(values, pa.list_(pa.string()))
        else:
            columns[column.name] = pa.array([cell[0] if cell else None for cell in values], pa.string())
    for table in recipe.tables:
        join = Join(recipe, table, small)
        own = [finder.paths(table.pattern, key) for key in kept]
        finder.tree.expect(path for paths in own for path in paths)
        taken = [join.values(key, paths) for key, paths in zip(kept, own, strict=True)]
        for i, value in enumerate(table.columns):
            columns[value.name] = pa.array([row[i] for row in taken], VALUE_TYPES[value.type])
        warnings += join.warnings(kept) if whole else ()
    reading = SourceOptions(split=options.split, root=finder.tree.root)
    made = make_file_table(pa.table(columns), recipe.file_columns(), finder.tree, reading, {}, warnings)
    refused = dict.fromkeys([*made.refused, *small.walk.refused, *finder.refused])
    singles = [column.name for column in recipe.columns if not column.is_list]
    crowded = [path for name in singles for cell in cells[name] if len(cell) > 1 for path in cell]
    return made.replace(refused=tuple(refused), recipe=options.recipe(), crowded=tuple(crowded))


class _Finder:
    """Finds paths below the folder by pattern; each folder is listed once."""

    def __init__(self, tree: Tree, recipe: Recipe) -> None:
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
                f"The recipe {recipe.name!r} reads the folder {recipe.root!r}, which {tree.shown!r} lacks.",
                hint=f"Give the folder that holds {recipe.root!r}.",
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

    def paths(self, pattern: str, key: Key = ()) -> list[str]:
        """What matches, relative to the folder, in natural order."""
        names = dict(zip(self.recipe.key, key, strict=False))
        parts = [(has_glob(part), part.format_map(names)) for part in pattern.split("/")]
        return sorted(self._below(self.prefix, parts), key=natural)

    def _below(self, prefix: str, parts: list[tuple[bool, str]]) -> Iterator[str]:
        (globbed, part), rest = parts[0], parts[1:]
        if globbed:
            matches = _matcher(part)
            names = [n for n in self._list(prefix) if matches.match(n) and self._is_utf8(prefix + n)]
        else:
            names = [part] if rest or self.tree.is_there(prefix + part) else []
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


def _cells(finder: _Finder, keys: list[Key], options: SourceOptions) -> tuple[list[Key], dict[str, list[list[str]]]]:
    """The rows that are kept, and the paths of each of their cells."""
    columns = finder.recipe.columns
    selected = options.selects()
    kept: list[Key] = []
    cells: dict[str, list[list[str]]] = {column.name: [] for column in columns}
    crowded: list[tuple[Key, RecipeColumn, list[str]]] = []
    for key in keys:
        if len(kept) == options.limit:
            break
        found = [finder.paths(column.pattern, key) for column in columns]
        chosen = [[path for path in paths if selected(path)] for paths in found]
        if any(found) and not any(chosen):
            continue
        kept.append(key)
        for column, paths in zip(columns, chosen, strict=True):
            cells[column.name].append(paths)
            if len(paths) > 1 and not column.is_list:
                crowded.append((key, column, paths))
    if crowded and not options.lenient:
        raise _too_many(crowded, finder.recipe)
    return kept, cells


def _too_many(crowded: list[tuple[Key, RecipeColumn, list[str]]], recipe: Recipe) -> SourceError:
    lines = [
        f"{column.name} of {recipe.row_name(key)} has {len(paths)}: {', '.join(paths)}"
        for key, column, paths in crowded
    ]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    names = ", ".join(dict.fromkeys(repr(column.name) for _, column, _ in crowded))
    return SourceError(
        "Where the recipe expects one file, there are several:\n"
        + "\n".join(f"  {line}" for line in [*lines[:_SHOWN], *more]),
        hint=f"Give {names} list = true or a narrower pattern in the recipe, or leave files out with --exclude.",
        cells=[{"row": list(key), "column": column.name, "paths": paths} for key, column, paths in crowded],
    )


def _strays(finder: _Finder, cells: dict[str, list[list[str]]]) -> tuple[str, ...]:
    """A warning for each column whose pattern matches files that no row has."""
    warnings = []
    for column in finder.recipe.columns:
        claimed = {path for cell in cells[column.name] for path in cell}
        anywhere = re.sub(r"\{\w+\}", "*", column.pattern)
        stray = [path for path in finder.paths(anywhere) if path not in claimed]
        if stray:
            shown = ", ".join(stray[:_SHOWN]) + (" …" if len(stray) > _SHOWN else "")
            warnings.append(f"{len(stray)} file(s) look like {column.name!r} and belong to no row: {shown}")
    return tuple(warnings)
