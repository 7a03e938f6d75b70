"""Columns of paths: find the folder or bucket that all of them are in, and replace paths by numbers of files.

Published paths start at that folder, so it is never one that would publish the home folder of a user.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from brim import partition as cuts
from brim.errors import SourceError
from brim.file_set import FileSet, FileSetBuilder, Stat
from brim.sources.file_table import Refused, one_array
from brim.sources.folder_tree import Folder, LocalTree, Tree, Walk
from brim.sources.remote_tree import ObjectTree
from brim.storage.location import BUCKET_ADDRESSES, Access, Location, is_object_address, parse_location

_HOME = re.compile(r"(?:/[^/]+)?/(?:home|homes|Users)/[^/]+(?=/)")  # /home/alice, /Users/alice, /var/home/alice
_HOME_DEPTH = 3  # slashes of the longest folder that can hold home folders, as in /var/home/


class Base:
    """Where the relative paths of a table start. A bucket is listed when that is needed, once."""

    def __init__(self, location: Location) -> None:
        self.location = location

    @cached_property
    def tree(self) -> Tree:
        return LocalTree(str(self.location)) if self.location.is_local else ObjectTree.listed(self.location)

    def has_file(self, path: str) -> bool:
        try:
            return self.tree.exists(path) and not self.tree.is_folder(path)
        except ValueError:  # a zero byte in the text
            return False


def has_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return has_text(kind.value_type)
    return str(kind) in ("string", "large_string", "string_view")


def has_text_lists(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)) and has_text(kind.value_type)


class _Paths:
    """The distinct paths of a column, and where they are. An empty path is null."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        array = one_array(column)
        self._lists = None
        if has_text_lists(array.type):
            self._lists = array.cast(pa.list_(array.type.value_type))
            array = self._lists.flatten()
        array = array.cast(pa.large_string())
        texts = pc.if_else(pc.equal(array, ""), pa.scalar(None, pa.large_string()), array)
        self._encoded = texts.dictionary_encode()

    @cached_property
    def distinct(self) -> list[str]:
        return self._encoded.dictionary.to_pylist()  # type: ignore[no-any-return]

    def map(self, function: Callable[[str], Any], kind: pa.DataType) -> pa.Array:
        """Return the column with another value for each path."""
        cells = pa.array([function(path) for path in self.distinct], kind).take(self._encoded.indices)
        if self._lists is None:
            return cells
        # Null lists count as empty, whatever values they have.
        lengths = pc.list_value_length(self._lists).fill_null(0).to_numpy(zero_copy_only=False)
        offsets = pa.array(cuts.running(lengths)).cast(pa.int32())
        mask = self._lists.is_null() if self._lists.null_count else None
        return pa.ListArray.from_arrays(offsets, cells, mask=mask)


def in_one_tree(
    rows: pa.Table, columns: Iterable[str], base: Base, fixed: bool, access: Access
) -> tuple[pa.Table, Tree]:
    """Return the rows, and the tree that the paths of their file columns are relative to.

    Local paths stay as they are. For objects it is the base, or the folder that all have in common if some are outside
    of it; `fixed` means that the user named the base.
    """
    names, home = list(columns), None if base.location.is_local else base.location
    if home is None and not any(_has_addresses(rows.column(name)) for name in names):
        return rows, base.tree
    cells = {name: _Paths(rows.column(name)) for name in names}
    paths = dict.fromkeys(path for own in cells.values() for path in own.distinct if path)
    addresses = [path for path in paths if is_object_address(path)]
    if home is None and len(addresses) < len(paths):
        local = next(path for path in paths if not is_object_address(path))
        raise SourceError(
            f"The table names objects, such as {addresses[0]!r}, and files of this machine, such as {local!r}.",
            hint="Copy them to one location, or make two tables.",
        )
    bucket, keys = home, dict[str, str]()
    for path in paths:
        if is_object_address(path):
            address = parse_location(path, access)
            bucket = bucket or address
            if (address.scheme, address.container) != (bucket.scheme, bucket.container):
                raise SourceError(
                    f"The table names objects of several buckets: {bucket.container!r} and {address.container!r}.",
                    hint="Make a table for each bucket.",
                )
            keys[path] = address.prefix
        elif home is not None and not path.startswith("/") and "://" not in path:
            key = posixpath.normpath(home.key(path))
            if not key.startswith("../"):
                keys[path] = key
    assert bucket is not None
    root = None if home is None else home.prefix
    outside = [path for path, key in keys.items() if root is None or (root and not key.startswith(f"{root}/"))]
    if outside and fixed:
        raise SourceError(f"{outside[0]!r} is outside --root.", hint="Use a folder above it.")
    if root is None or outside:
        root = posixpath.commonpath([posixpath.dirname(key) for key in keys.values()])
    tree = base.tree if home is not None and root == home.prefix else ObjectTree.listed(replace(bucket, prefix=root))
    inside = {path: posixpath.relpath(key, root or ".") for path, key in keys.items()}
    for name in names:
        paths_of = cells[name].map(lambda path: inside.get(path, path), pa.string())
        field = pa.field(name, paths_of.type, rows.schema.field(name).nullable)
        rows = rows.set_column(rows.column_names.index(name), field, paths_of)
    return rows, tree


def _has_addresses(column: pa.ChunkedArray) -> bool:
    pattern = f"^({'|'.join(BUCKET_ADDRESSES)})"
    chunks = (chunk.flatten() if has_text_lists(chunk.type) else chunk for chunk in column.chunks)
    texts = (chunk.cast(pa.large_string()) for chunk in chunks)
    return any(pc.any(pc.match_substring_regex(some, pattern)).as_py() for some in texts)


def number_files(
    rows: pa.Table, columns: Iterable[str], tree: Tree, fixed_root: bool
) -> tuple[pa.Table, FileSet, tuple[Refused, ...]]:
    """Replace paths by numbers of files. Each distinct path is looked at once."""
    walk = Walk.through(tree, keys=True)
    cells = {name: _Paths(rows.column(name)) for name in columns}
    stats: dict[str, Stat] = {}
    for path in dict.fromkeys(path for own in cells.values() for path in own.distinct):
        if "://" in path or "\0" in path:
            shown = path.replace("\0", "\\0")
            walk.refused.append(Refused("url" if "://" in path else "missing", shown))
            continue
        stat = walk.find(path, path)
        if isinstance(stat, Folder):
            walk.refused.append(Refused("folder", path))
        elif stat is not None:
            stats[path] = stat
        elif path in walk.loops:
            walk.refused.append(Refused("missing", path))
    canonical = {path: tree.canonical_path(path) for path in stats}
    root = tree.root if tree.bucket is not None else published_root(tree.root, list(canonical.values()), fixed_root)
    builder = FileSetBuilder(root, tree.bucket)
    numbers: dict[str, int] = {}  # two spellings of a path are one file
    for path, target in canonical.items():
        if target not in numbers:
            numbers[target] = builder.add(
                target if tree.bucket is not None else os.path.relpath(target, root), stats[path]
            )
    for name, own in cells.items():
        array = own.map(lambda path: numbers[canonical[path]] if path in canonical else None, pa.int64())
        field = pa.field(name, array.type, nullable=rows.schema.field(name).nullable or array.null_count > 0)
        rows = rows.set_column(rows.column_names.index(name), field, array)
    return rows, builder.finish(), tuple(walk.refused)


def published_root(base: str, paths: list[str], is_fixed: bool) -> str:
    """Return the folder that published paths start from: the table's, or the one that all files have in common.

    Without --root, no such folder is above a home folder: the name of a user would be published.
    """
    outside = [path for path in paths if not path.startswith(base.rstrip("/") + "/")]
    if not outside:
        if not is_fixed:
            _check_home_folders(base, paths)
        return base
    if is_fixed:
        raise SourceError(f"{os.path.basename(outside[0])!r} is outside --root.", hint="Use a folder above it.")
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    _check_home_folders(root, paths)
    if root == "/":
        raise SourceError(
            f"The files of the table have only {root!r} in common, so their published paths would reveal "
            "folders of this machine.",
            hint="Put them below one folder (links are enough) and name it with --root=DIR.",
        )
    return root


def _check_home_folders(root: str, paths: list[str]) -> None:
    """Raise SourceError if paths relative to `root` would name a home folder, and with it a user of this machine."""
    above, own = root.rstrip("/") + "/", os.path.expanduser("~").rstrip("/")
    if above.count("/") > _HOME_DEPTH and not own.startswith(above):
        return
    homes = os.path.dirname(own) + "/"
    for path in paths:
        match = _HOME.match(path)
        home = match[0] if match else own if path.startswith(own + "/") else ""
        if not home and above == homes != "/":
            home = homes + path[len(homes) :].partition("/")[0]
        if home.startswith(above):
            raise SourceError(
                f"Relative to {root!r}, the paths of the table's files would name the home folder {home!r}, and be "
                "published.",
                hint="Put the files below one folder (links are enough) and name it with --root=DIR.",
            )
