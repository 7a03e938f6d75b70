"""A table that names files: find the file columns, look at every file, number them.

The files are below a folder, or in a bucket. A table names objects by paths relative to itself (if it lies in a bucket,
or --root names one), or by addresses. Addresses become paths below the folder that all of them share, as absolute local
paths do.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim import partition as cuts
from brim.errors import InputError, SourceError
from brim.file_set import FileSet, FileSetBuilder, Stat
from brim.sources.features import (
    NoFeature,
    as_feature_dict,
    cast_to_feature,
    feature_of,
    feature_of_type,
    kind_of,
    kind_of_feature,
)
from brim.sources.file_table import FileColumn, FileTable, Refused, Split, Unmatched, collect_unmatched, one_array
from brim.sources.folder_tree import Folder, LocalTree, Tree, Walk, passed_over
from brim.sources.read_table import as_table, read_table
from brim.sources.remote_tree import ObjectTree
from brim.sources.source_options import SourceOptions, check_split
from brim.sources.table_spool import mapped_columns, spooled
from brim.storage.listing import stat_file
from brim.storage.location import BUCKET_ADDRESSES, Access, Location, folder_location, is_object_address, parse_location


class Base:
    """Where a table's relative paths start. A bucket is listed when that is needed, once."""

    def __init__(self, place: Location) -> None:
        self.place = place
        self._tree: Tree | None = None

    @property
    def tree(self) -> Tree:
        if self._tree is None:
            self._tree = LocalTree(str(self.place)) if self.place.is_local else ObjectTree.listed(self.place)
        return self._tree


def base_of(root: str, access: Access) -> Base:
    """The base that --root names."""
    return Base(parse_location(root, access) if is_object_address(root) else folder_location(root))


def table_at(address: Location) -> tuple[str, ObjectTree]:
    """The name of a table that is an object, and a tree of its folder that holds nothing else."""
    found = stat_file(address)
    if found is None:
        raise SourceError(f"{address} does not exist.", hint="Check the bucket and the prefix.", path=str(address))
    name = address.prefix.rpartition("/")[2]
    return name, ObjectTree.of(address.parent, [(name, found)])


def in_one_tree(
    rows: pa.Table, columns: Iterable[str], base: Base, fixed: bool, access: Access
) -> tuple[pa.Table, Tree]:
    """The rows and the tree that the paths of their file columns are relative to.

    Local paths stay as they are. For objects it is the base, or what all have in common if some lie elsewhere; `fixed`
    says that the user named the base.
    """
    names = list(columns)
    home = None if base.place.is_local else base.place
    if home is None and not any(_holds_addresses(rows.column(name)) for name in names):
        return rows, base.tree
    paths = {path: None for name in names for path in _distinct(rows.column(name))}
    addresses = [path for path in paths if is_object_address(path)]
    if home is None and len(addresses) < len(paths):
        other = next(path for path in paths if not is_object_address(path))
        raise SourceError(
            f"The table names objects, such as {addresses[0]!r}, and files of this machine, such as {other!r}.",
            hint="Copy them to one location, or make two tables.",
        )
    bucket = home
    keys: dict[str, str] = {}
    for path in paths:
        if is_object_address(path):
            there = parse_location(path, access)
            bucket = bucket or there
            if (there.scheme, there.container) != (bucket.scheme, bucket.container):
                raise SourceError(
                    f"The table names objects of several buckets: {bucket.container!r} and {there.container!r}.",
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
            raise SourceError(f"{outside!r} is outside --root.", hint="Use a folder above it.")
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
    pattern = f"^({'|'.join(BUCKET_ADDRESSES)})"
    texts = (_texts(pa.chunked_array([chunk])).cast(pa.large_string()) for chunk in column.chunks)
    return any(pc.any(pc.match_substring_regex(some, pattern)).as_py() for some in texts)


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


_SAMPLE = 64
_MOST_CLASSES = 100_000  # their names are written to every shard
_SPLIT_ORDER = ("train", "validation", "test")


def table_source(source: Any, options: SourceOptions, features: Any = None) -> FileTable:
    """Rows from a table on disk or in memory."""
    rows, base = _read(source, options)
    if rows.num_rows == 0:
        raise SourceError("The table has no rows.", hint="There is nothing to build.")
    base = base_of(str(options.root), options.access) if options.root else base
    rows = _drop(rows, options.drop)
    renamed = options.renamed_columns(rows.column_names)
    named = {renamed.get(name, name): kind for name, kind in options.file_columns(rows.column_names).items()}
    rows = _rename(rows, renamed)
    given = dict(as_feature_dict(features)) if features is not None else {}
    columns = _file_columns(rows, base, named, given)
    for name, feature in given.items():
        if name not in columns:
            cast = cast_to_feature(rows.column(name), feature, name)
            rows = rows.set_column(rows.column_names.index(name), name, cast)
    if options.label_from:
        rows, given[options.label_from] = encode_labels(rows, options.label_from, [*columns, options.split_by])
    rows, tree = in_one_tree(rows, columns, base, options.root is not None, options.access)
    made = make_file_table(rows, columns, tree, options, given)
    return made.replace(can_drop=True, unmatched=None if options.limit else _unnamed(made, source, options))


def _unnamed(table: FileTable, source: Any, options: SourceOptions) -> Unmatched | None:
    """Files that no row names, in the folders that hold those which rows name: what else there is may be anything."""
    files = table.files
    if files.bucket is not None:
        return None  # of a bucket, only the objects that are named were asked for
    named = set(files.paths.to_pylist()) | {refused.path for refused in table.refused}
    own = os.path.abspath(os.fspath(source)) if isinstance(source, str | os.PathLike) else ""
    folders = sorted({path.rpartition("/")[0] for path in named})
    allowed = options.selects()

    def left() -> Iterator[str]:
        for folder in folders:
            with contextlib.suppress(OSError), os.scandir(os.path.join(files.root, folder)) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    if path in named or passed_over(entry.name) or entry.path == own or entry.is_dir():
                        continue
                    if allowed(path):
                        yield path

    return collect_unmatched(left(), hint="Name them in the table, or leave them out with --exclude.")


def _read(source: Any, options: SourceOptions) -> tuple[pa.Table, Base]:
    """A table, and where its relative paths start."""
    if not isinstance(source, str | os.PathLike):
        return as_table(source), Base(folder_location(os.getcwd()))
    text = os.fspath(source)
    if is_object_address(text):
        name, folder = table_at(parse_location(text, options.access))
        assert folder.bucket is not None
        return read_table(name, folder, options.memory), Base(folder.bucket)
    path = os.path.abspath(text)
    return read_table(path, memory=options.memory), Base(folder_location(os.path.dirname(path)))


def make_file_table(
    rows: pa.Table,
    columns: Mapping[str, FileColumn],
    tree: Tree,
    options: SourceOptions,
    given: Mapping[str, Any],
    warnings: tuple[str, ...] = (),
) -> FileTable:
    """The file table of rows whose file columns hold paths relative to the top of `tree`."""
    if rows.num_rows == 0:
        raise SourceError("The table has no rows.", hint="There is nothing to build.")
    if options.split_by in columns:
        raise InputError(f"--split-by={options.split_by} names a column of files.")
    rows = _select(rows, columns, options, tree.root)
    rows, splits = _split(rows, options)
    if options.limit is not None:
        rows, splits = limit_rows(rows, splits, options.limit)
    rows, files, refused = _number_files(rows, columns, tree, fixed_root=options.root is not None)
    described, unknown = describe(rows.schema, columns, given)
    return FileTable(
        rows=rows,
        columns=dict(columns),
        files=files,
        features=described,
        splits=splits,
        refused=refused,
        warnings=warnings + unknown,
        recipe=options.recipe(),
        borrowed=mapped_columns(rows),
    )


def describe(
    schema: pa.Schema, columns: Mapping[str, FileColumn], given: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The features of all columns, or None and a warning where `datasets` knows no feature for one."""
    features: dict[str, Any] = {}
    for field in schema:
        if field.name in given:
            features[field.name] = given[field.name]
        elif field.name in columns:
            column = columns[field.name]
            inner = feature_of(column.kind)
            features[field.name] = {"feature": inner, "_type": "List"} if column.is_list else inner
        else:
            try:
                features[field.name] = feature_of_type(field.type)
            except NoFeature as error:
                return None, (
                    f"column {field.name!r} has the Arrow type {error}, which `datasets` cannot read; other "
                    f"readers can. --drop {field.name} leaves it out.",
                )
    return features, ()


def limit_rows(rows: pa.Table, splits: tuple[Split, ...], limit: int) -> tuple[pa.Table, tuple[Split, ...]]:
    """The first `limit` rows, with the splits that are left."""
    cut = tuple(Split(s.name, s.start, min(s.stop, limit)) for s in splits if s.start < limit)
    return rows.slice(0, limit), cut


def _drop(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    for name in names:
        _need_column(rows, name, "--drop")
    return rows.drop_columns(list(names)) if names else rows


def _rename(rows: pa.Table, names: Mapping[str, str]) -> pa.Table:
    """Rename the columns of --files NAME=COLUMN."""
    for old, new in names.items():
        _need_column(rows, old, "--files")
        if new in rows.column_names:
            raise SourceError(
                f"--files {new}={old} cannot rename the column {old!r}: the table already has a column {new!r}.",
                hint=f"Choose another name, or leave the other column out with --drop={new}.",
            )
    return rows.rename_columns([names.get(name, name) for name in rows.column_names]) if names else rows


def encode_labels(rows: pa.Table, name: str, other_uses: Collection[str | None]) -> tuple[pa.Table, dict[str, Any]]:
    """Replace the texts of a column by class numbers. Return the rows and the ClassLabel feature.

    Classes are numbered in the order of their sorted names; null and empty texts have no class.
    """
    _need_column(rows, name, "--label-from")
    column = rows.column(name)
    if name in other_uses or not _holds_text(column.type):
        what = "files or splits" if name in other_uses else str(column.type)
        raise SourceError(
            f"--label-from names the column {name!r}, which holds {what}, not texts.",
            hint="Name a column with one class name per row.",
        )
    texts = column.cast(pa.large_string())
    names = sorted(text for text in pc.unique(texts).to_pylist() if text)
    if not names or len(names) > _MOST_CLASSES:
        raise SourceError(
            f"--label-from names the column {name!r}, which has {len(names):,} distinct texts.",
            hint=f"Name a column with 1 to {_MOST_CLASSES:,} class names.",
        )
    numbers = pc.index_in(texts, pa.array(names, pa.large_string())).cast(pa.int64())
    rows = rows.set_column(rows.column_names.index(name), name, numbers)
    return rows, {"names": names, "_type": "ClassLabel"}


def _need_column(rows: pa.Table, name: str, option: str) -> None:
    if name not in rows.column_names:
        raise SourceError(
            f"{option} names the column {name!r}, which the table does not have.",
            hint=f"Its columns are: {', '.join(rows.column_names)}.",
        )


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _holds_text(kind.value_type)
    return str(kind) in ("string", "large_string", "string_view")


def _is_text_list(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_text(kind.value_type)
    return False


def _file_columns(
    rows: pa.Table, base: Base, named: dict[str, str | None], given: Mapping[str, Any]
) -> dict[str, FileColumn]:
    columns: dict[str, FileColumn] = {}
    for name, feature in given.items():
        _need_column(rows, name, "features=")
        media = kind_of_feature(feature)
        if media is not None:
            named[name] = media[0]
    for name, kind in named.items():
        _need_column(rows, name, "--files")
        column_type = rows.schema.field(name).type
        if not _holds_text(column_type) and not _is_text_list(column_type):
            raise SourceError(
                f"The column {name!r} holds {column_type}, not paths of files.",
                hint="Name a column of paths, or of lists of paths.",
            )
        is_list = not _holds_text(column_type)
        media = kind_of_feature(given[name]) if name in given else None
        if media is not None and media[1] != is_list:
            said, has = ("lists of files", "one per row") if media[1] else ("one file per row", "lists")
            raise SourceError(f"features= has {said} for the column {name!r}, but the table has {has}.")
        columns[name] = FileColumn(kind or _kind_of_sample(_sample(rows.column(name))), is_list)
    if columns:
        return columns
    return _guess(rows, base)


def _guess(rows: pa.Table, base: Base) -> dict[str, FileColumn]:
    columns: dict[str, FileColumn] = {}
    absent: list[str] = []
    for field in rows.schema:
        if not _holds_text(field.type) and not _is_text_list(field.type):
            continue
        sample = _sample(rows.column(field.name))
        here = [path for path in sample if is_object_address(path) or _is_there(base, path)]
        if sample and 2 * len(here) >= len(sample):
            columns[field.name] = FileColumn(_kind_of_sample(sample), not _holds_text(field.type), guessed=True)
        elif sample and all(kind_of(path) != "file" for path in sample):
            absent.append(field.name)
    if columns:
        return columns
    if absent:
        raise SourceError(
            f"The column {absent[0]!r} looks like file names, but the files do not exist, for example "
            f"{_sample(rows.column(absent[0]))[0]!r}.",
            hint="Paths are relative to the table; --root=DIR sets another folder.",
        )
    raise SourceError(
        f"No column of the table names files. Its columns are: {', '.join(rows.column_names)}.",
        hint="Name the column with --files=COLUMN[:TYPE].",
    )


def _is_there(base: Base, path: str) -> bool:
    try:
        return base.tree.exists(path) and not base.tree.is_folder(path)
    except ValueError:  # a zero byte in the text
        return False


def _sample(column: pa.ChunkedArray) -> list[str]:
    """Some of the non-empty texts, spread over the column."""
    flat: list[str] = []
    for row in range(0, len(column), max(1, len(column) // _SAMPLE)):
        value = column[row].as_py()  # `take` would copy the whole column
        flat.extend(value if isinstance(value, list) else [value])
    return [text for text in flat if text][:_SAMPLE]


def _kind_of_sample(paths: list[str]) -> str:
    kinds = Counter(kind_of(path) for path in paths)
    return next(iter(kinds)) if len(kinds) == 1 else "file"


def _paths(column: pa.ChunkedArray) -> tuple[pa.Array, pa.Array | None]:
    """The flat paths of a column (empty text is null), and the lists they come in if it is one of lists."""
    array = one_array(column)
    lists = None
    if _is_text_list(array.type):
        lists = array.cast(pa.list_(array.type.value_type))
        array = lists.flatten()
    array = array.cast(pa.large_string())
    return pc.if_else(pc.equal(array, ""), pa.scalar(None, pa.large_string()), array), lists


def _select(rows: pa.Table, columns: Mapping[str, FileColumn], options: SourceOptions, base: str) -> pa.Table:
    """The rows with a file that `include` matches (if given) and none that `exclude` matches."""
    if not options.include and not options.exclude:
        return rows
    included = SourceOptions(include=options.include).selects()
    allowed = SourceOptions(exclude=options.exclude).selects()
    cells = [rows.column(name).to_pylist() for name in columns]
    keep = []
    for row in zip(*cells, strict=True):
        cells_paths = [p for cell in row for p in (cell if isinstance(cell, list) else [cell]) if p]
        paths = [p.removeprefix(base + "/") for p in cells_paths]
        keep.append(all(map(allowed, paths)) and (not options.include or any(map(included, paths))))
    mask = pa.array(keep, pa.bool_())
    rows = spooled(rows, lambda columns: columns.filter(mask))
    if rows.num_rows == 0:
        raise SourceError("No row of the table is left after --include and --exclude.")
    return rows


def _split(rows: pa.Table, options: SourceOptions) -> tuple[pa.Table, tuple[Split, ...]]:
    if options.split_by is None:
        return rows, (Split(options.split or "train", 0, rows.num_rows),)
    _need_column(rows, options.split_by, "--split-by")
    values = [str(value) if value is not None else None for value in rows.column(options.split_by).to_pylist()]
    if None in values:
        raise SourceError(f"The column {options.split_by!r} does not name a split in every row.")
    names = sorted(set(values), key=lambda n: (_SPLIT_ORDER.index(n) if n in _SPLIT_ORDER else 3, str(n)))
    rank = {name: number for number, name in enumerate(names)}
    ranks = np.array([rank[value] for value in values])
    order = np.argsort(ranks, kind="stable")
    ends = np.cumsum(np.bincount(ranks, minlength=len(names))).tolist()
    splits = []
    for name, start, stop in zip(names, [0, *ends], ends, strict=False):
        check_split(str(name))
        splits.append(Split(str(name), start, stop))
    indices = pa.array(order)
    return spooled(rows.drop_columns([options.split_by]), lambda columns: columns.take(indices)), tuple(splits)


def _number_files(
    rows: pa.Table, columns: Mapping[str, FileColumn], tree: Tree, fixed_root: bool
) -> tuple[pa.Table, FileSet, tuple[Refused, ...]]:
    """Replace paths by file numbers; each distinct path is looked at once."""
    found: dict[str, Stat] = {}
    walk = Walk.through(tree, keys=True)
    encoded = {}
    for name in columns:
        flat, lists = _paths(rows.column(name))
        encoded[name] = (flat.dictionary_encode(), lists)
        for path in encoded[name][0].dictionary.to_pylist():
            if path not in found:
                stat_result = _look(walk, path)
                if stat_result is not None:
                    found[path] = stat_result
    places = {path: tree.canonical_path(path) for path in found}
    root = tree.root if tree.bucket is not None else _root(tree.root, list(places.values()), fixed_root)
    builder = FileSetBuilder(root, tree.bucket)
    number: dict[str, int] = {}
    by_place: dict[str, int] = {}  # two spellings of a path are one file
    for path, place in places.items():
        relative = place if tree.bucket is not None else os.path.relpath(place, root)
        if relative not in by_place:
            by_place[relative] = builder.add(relative, found[path])
        number[path] = by_place[relative]
    for name, (flat, lists) in encoded.items():
        numbers = pa.array([number.get(path) for path in flat.dictionary.to_pylist()], pa.int64())
        cells = numbers.take(flat.indices)
        if lists is not None:
            cells = pa.ListArray.from_arrays(
                pc.cast(_compact_offsets(lists), pa.int32()),
                cells,
                mask=lists.is_null() if lists.null_count else None,
            )
        at = rows.column_names.index(name)
        nullable = rows.schema.field(name).nullable or cells.null_count > 0
        field = pa.field(name, cells.type, nullable=nullable)
        rows = rows.set_column(at, field, cells)
    return rows, builder.finish(), tuple(walk.refused)


def _compact_offsets(lists: pa.Array) -> pa.Array:
    """Offsets into the flattened values: null lists count as empty, whatever lies behind them."""
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    return pa.array(cuts.running(lengths))


def _look(walk: Walk, path: str) -> Stat | None:
    if "://" in path:
        walk.refused.append(Refused("url", path))
        return None
    if "\0" in path:
        walk.refused.append(Refused("missing", path.replace("\0", "\\0")))
        return None
    found = walk.find(path, path)
    if isinstance(found, Folder):
        walk.refused.append(Refused("folder", path))
        return None
    if found is None and path in walk.loops:
        walk.refused.append(Refused("missing", path))
    return found


def _root(base: str, full: list[str], fixed: bool) -> str:
    """The folder that published paths start from: the table's, or what all files have in common.

    Without --root, no such folder is taken above a home folder: the name of a user would be published.
    """
    if all(path.startswith(base.rstrip("/") + "/") for path in full):
        if not fixed:
            _refuse_home_folders(base, full)
        return base
    if fixed:
        outside = next(path for path in full if not path.startswith(base + os.sep))
        raise SourceError(f"{os.path.basename(outside)!r} is outside --root.", hint="Use a folder above it.")
    root = os.path.commonpath([os.path.dirname(path) for path in full])
    _refuse_home_folders(root, full)
    if root == "/":
        raise SourceError(
            f"The files of the table have only {root!r} in common, so their published paths would reveal "
            "folders of this machine.",
            hint="Put them below one folder (links are enough) and name it with --root=DIR.",
        )
    return root


_HOME = re.compile(r"(?:/[^/]+)?/(?:home|homes|Users)/[^/]+(?=/)")  # /home/alice, /Users/alice, /var/home/alice


def _refuse_home_folders(root: str, full: list[str]) -> None:
    """SourceError if paths relative to `root` would name a home folder, and with it a user of this machine."""
    above, own = root.rstrip("/") + "/", os.path.expanduser("~").rstrip("/")
    if above.count("/") > _HOME_DEPTH and not own.startswith(above):
        return
    beside = os.path.dirname(own) + "/"
    for path in full:
        match = _HOME.match(path)
        found = match[0] if match else own if path.startswith(own + "/") else ""
        if not found and above == beside != "/":
            found = beside + path[len(beside) :].partition("/")[0]
        if found.startswith(above):
            raise SourceError(
                f"Relative to {root!r}, the paths of the table's files would name the home folder {found!r}, and be "
                "published.",
                hint="Put the files below one folder (links are enough) and name it with --root=DIR.",
            )


_HOME_DEPTH = 3  # slashes of the longest folder that can hold home folders, as in /var/home/
