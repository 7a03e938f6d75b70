"""Where the files of a table are: below a folder, or in a bucket.

A table names objects by paths relative to itself (if it lies in a bucket, or --root names one), or by addresses.
Addresses become paths below the folder that all of them share, as absolute local paths do.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from brim.buckets.bucket_address import ADDRESSES, Access, BucketAddress, is_bucket_address, parse_bucket_address
from brim.buckets.listing import stat_object
from brim.errors import SourceError
from brim.sources.bucket_tree import ObjectTree
from brim.sources.folder_tree import LocalTree, Tree


class Base:
    """Where a table's relative paths start. A bucket is listed when that is needed, once."""

    def __init__(self, place: str | BucketAddress) -> None:
        self.place = place
        self._tree: Tree | None = None

    @property
    def tree(self) -> Tree:
        if self._tree is None:
            local = isinstance(self.place, str)
            self._tree = LocalTree(str(self.place)) if local else ObjectTree.listed(self.place)  # type: ignore[arg-type]
        return self._tree


def base_of(root: str, access: Access) -> Base:
    """The base that --root names."""
    if is_bucket_address(root):
        return Base(parse_bucket_address(root, access))
    return Base(os.path.abspath(root))


def table_at(address: BucketAddress) -> tuple[str, ObjectTree]:
    """The name of a table that is an object, and a tree of its folder that holds nothing else."""
    found = stat_object(address)
    if found is None:
        raise SourceError(f"There is nothing at {address}.", hint="Check the bucket and the prefix.", path=str(address))
    folder, _, name = address.prefix.rpartition("/")
    return name, ObjectTree.of(replace(address, prefix=folder), [(name, found)])


def in_one_tree(
    rows: pa.Table, columns: Iterable[str], base: Base, fixed: bool, access: Access
) -> tuple[pa.Table, Tree]:
    """The rows and the tree that the paths of their file columns are relative to.

    Local paths stay as they are. For objects it is the base, or what all have in common if some lie elsewhere; `fixed`
    says that the user named the base.
    """
    names = list(columns)
    home = base.place if isinstance(base.place, BucketAddress) else None
    if home is None and not any(_holds_addresses(rows.column(name)) for name in names):
        return rows, base.tree
    paths = {path: None for name in names for path in _distinct(rows.column(name))}
    addresses = [path for path in paths if is_bucket_address(path)]
    if home is None and len(addresses) < len(paths):
        other = next(path for path in paths if not is_bucket_address(path))
        raise SourceError(
            f"The table names objects, such as {addresses[0]!r}, and files of this machine, such as {other!r}.",
            hint="Bring them to one place, or make two tables of it.",
        )
    bucket = home
    keys: dict[str, str] = {}
    for path in paths:
        if is_bucket_address(path):
            there = parse_bucket_address(path, access)
            bucket = bucket or there
            if (there.scheme, there.bucket) != (bucket.scheme, bucket.bucket):
                raise SourceError(
                    f"The table names objects of several buckets: {bucket.bucket!r} and {there.bucket!r}.",
                    hint="Make a table for each bucket.",
                )
            keys[path] = there.prefix
        elif home is not None and not path.startswith("/") and "://" not in path:
            key = posixpath.normpath(home.key(path))
            if not key.startswith("../"):
                keys[path] = key
    assert bucket is not None
    root = home.prefix if home is not None else None
    if root is None or not all(_is_below(key, root) for key in keys.values()):
        if fixed:
            outside = next(path for path, key in keys.items() if root is None or not _is_below(key, root))
            raise SourceError(f"{outside!r} lies outside of --root.", hint="Give a folder above it.")
        root = posixpath.commonpath([posixpath.dirname(key) for key in keys.values()])
    tree = base.tree if home is not None and root == home.prefix else ObjectTree.listed(replace(bucket, prefix=root))
    inside = {path: posixpath.relpath(key, root or ".") for path, key in keys.items()}
    return _replaced(rows, names, inside), tree


def _is_below(key: str, root: str) -> bool:
    return not root or key.startswith(f"{root}/")


def _texts(array: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of paths as plain texts, out of their lists."""
    return pc.list_flatten(array) if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) else array


def _holds_addresses(column: pa.ChunkedArray) -> bool:
    found = pc.match_substring_regex(_texts(column).cast(pa.large_string()), f"^({'|'.join(ADDRESSES)})")
    return bool(pc.any(found).as_py())


def _distinct(column: pa.ChunkedArray) -> list[str]:
    found = pc.unique(_texts(column).cast(pa.large_string()))
    return [path for path in found.to_pylist() if path]


def _replaced(rows: pa.Table, names: list[str], inside: Mapping[str, str]) -> pa.Table:
    for name in names:
        field = rows.schema.field(name)
        values = [
            [inside.get(path, path) for path in cell] if isinstance(cell, list) else inside.get(cell, cell)
            for cell in rows.column(name).to_pylist()
        ]
        is_list = pa.types.is_list(field.type) or pa.types.is_large_list(field.type)
        kind = pa.list_(pa.string()) if is_list else pa.string()
        at = rows.column_names.index(name)
        rows = rows.set_column(at, pa.field(name, kind, field.nullable), pa.array(values, kind))
    return rows
