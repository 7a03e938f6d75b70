"""A table that names files as a source: find the file columns, look at every file, number them.

The files are below a folder, or in a bucket. A table names objects by paths relative to itself (if it is in a bucket,
or --root names one), or by addresses. Addresses become paths below the folder that all of them share, as absolute local
paths do. Published paths start at the folder that all files are in, so it is never one that would publish the home
folder of a user.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import InputError, SourceError
from brim.file_set import FileSet, FileSetBuilder, Stat
from brim.formats.parquet_levels import list_array, nulls_of
from brim.partition import list_lengths
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
from brim.sources.spools import mapped_columns, spooled
from brim.storage.listing import stat_file
from brim.storage.location import BUCKET_ADDRESSES, Access, Location, folder_location, is_object_address, parse_location

_SAMPLE = 64
_MOST_CLASSES = 100_000  # their names are written to every shard
_SPLIT_ORDER = ("train", "validation", "test")


def table_source(source: Any, options: SourceOptions, features: Any = None) -> FileTable:
    """Make the file table of a table on disk, in a bucket or in memory."""
    rows, base = _read(source, options)
    if rows.num_rows == 0:
        raise SourceError("The table has no rows.", hint="There is nothing to build.")
    if options.root:
        root = str(options.root)
        base = Base(parse_location(root, options.access) if is_object_address(root) else folder_location(root))
    for name in options.drop:
        _need_column(rows, name, "--drop")
    rows = rows.drop_columns(list(options.drop)) if options.drop else rows
    renamed = options.renamed_columns(rows.column_names)
    file_columns = {renamed.get(name, name): kind for name, kind in options.file_columns(rows.column_names).items()}
    for old, new in renamed.items():
        _need_column(rows, old, "--files")
        if new in rows.column_names:
            raise SourceError(
                f"--files {new}={old} cannot rename the column {old!r}: the table already has a column {new!r}.",
                hint=f"Choose another name, or leave the other column out with --drop={new}.",
            )
    rows = rows.rename_columns([renamed.get(name, name) for name in rows.column_names]) if renamed else rows
    given_features = dict(as_feature_dict(features)) if features is not None else {}
    columns = _named_columns(rows, file_columns, given_features) or _guess_columns(rows, base)
    for name, feature in given_features.items():
        if name not in columns:
            cast = cast_to_feature(rows.column(name), feature, name)
            rows = rows.set_column(rows.column_names.index(name), name, cast)
    if options.label_from:
        rows, given_features[options.label_from] = encode_labels(rows, options.label_from, [*columns, options.split_by])
    rows, tree = in_one_tree(rows, columns, base, options.root is not None, options.access)
    table = make_file_table(rows, columns, tree, options, given_features)
    return table.replace(can_drop=True, unmatched=None if options.limit else _unnamed_files(table, source, options))


def _read(source: Any, options: SourceOptions) -> tuple[pa.Table, Base]:
    """Return a table, and where its relative paths start."""
    if not isinstance(source, str | os.PathLike):
        return as_table(source), Base(folder_location(os.getcwd()))
    text = os.fspath(source)
    if not is_object_address(text):
        path = os.path.abspath(text)
        return read_table(path, memory=options.memory), Base(folder_location(os.path.dirname(path)))
    address = parse_location(text, options.access)
    stat = stat_file(address)
    if stat is None:
        raise SourceError(f"{address} does not exist.", hint="Check the bucket and the prefix.", path=str(address))
    name, folder = address.prefix.rpartition("/")[2], address.parent
    return read_table(name, ObjectTree.of(folder, [(name, stat)]), options.memory), Base(folder)


def _unnamed_files(table: FileTable, source: Any, options: SourceOptions) -> Unmatched | None:
    """Return the files that no row names, next to those that rows name. Other folders may have anything."""
    files = table.files
    if files.bucket is not None:
        return None  # only the objects that are named were listed
    named_paths = set(files.paths.to_pylist()) | {refused.path for refused in table.refused}
    own = os.path.abspath(os.fspath(source)) if isinstance(source, str | os.PathLike) else ""
    is_selected = options.selects()

    def unnamed() -> Iterator[str]:
        for folder in sorted({path.rpartition("/")[0] for path in named_paths}):
            with contextlib.suppress(OSError), os.scandir(os.path.join(files.root, folder)) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    path = f"{folder}/{entry.name}" if folder else entry.name
                    if path in named_paths or passed_over(entry.name) or entry.path == own or entry.is_dir():
                        continue
                    if is_selected(path):
                        yield path

    return collect_unmatched(unnamed(), hint="Name them in the table, or leave them out with --exclude.")


def make_file_table(
    rows: pa.Table,
    columns: Mapping[str, FileColumn],
    tree: Tree,
    options: SourceOptions,
    given_features: Mapping[str, Any],
    warnings: tuple[str, ...] = (),
) -> FileTable:
    """Make the file table of rows whose file columns have paths relative to the top of `tree`."""
    if rows.num_rows == 0:
        raise SourceError("The table has no rows.", hint="There is nothing to build.")
    if options.split_by in columns:
        raise InputError(f"--split-by={options.split_by} names a column of files.")
    rows = _select(rows, columns, options, tree.root)
    rows, splits = _split(rows, options)
    if options.limit is not None:
        rows, splits = limit_rows(rows, splits, options.limit)
    rows, files, refused = number_files(rows, columns, tree, fixed_root=options.root is not None)
    features, unknown = describe(rows.schema, columns, given_features)
    return FileTable(
        rows=rows,
        columns=dict(columns),
        files=files,
        features=features,
        splits=splits,
        refused=refused,
        warnings=warnings + unknown,
        recipe=options.recipe(),
        borrowed=mapped_columns(rows),
    )


def describe(
    schema: pa.Schema, columns: Mapping[str, FileColumn], given_features: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Return the features of all columns; or None and a warning if `datasets` has no feature for a type."""
    features: dict[str, Any] = {}
    for field in schema:
        if field.name in given_features:
            features[field.name] = given_features[field.name]
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
    """Return the first `limit` rows, and the splits that they are in."""
    remaining = tuple(Split(s.name, s.start, min(s.stop, limit)) for s in splits if s.start < limit)
    return rows.slice(0, limit), remaining


def encode_labels(rows: pa.Table, name: str, other_uses: Collection[str | None]) -> tuple[pa.Table, dict[str, Any]]:
    """Replace the texts of a column by class numbers. Return the rows and the ClassLabel feature.

    Classes are numbered in the order of their sorted names; null and empty texts have no class.
    """
    _need_column(rows, name, "--label-from")
    column = rows.column(name)
    if name in other_uses or not has_text(column.type):
        subject = "files or splits" if name in other_uses else str(column.type)
        raise SourceError(
            f"--label-from names the column {name!r}, which holds {subject}, not texts.",
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


def _named_columns(
    rows: pa.Table, kinds: Mapping[str, str | None], features: Mapping[str, Any]
) -> dict[str, FileColumn]:
    """Return the file columns that --files or features= name."""
    for name in features:
        _need_column(rows, name, "features=")
    media = {name: entry for name, feature in features.items() if (entry := kind_of_feature(feature)) is not None}
    columns: dict[str, FileColumn] = {}
    for name, kind in {**kinds, **{name: entry[0] for name, entry in media.items()}}.items():
        _need_column(rows, name, "--files")
        column_type = rows.schema.field(name).type
        is_list = has_text_lists(column_type)
        if not is_list and not has_text(column_type):
            raise SourceError(
                f"The column {name!r} holds {column_type}, not paths of files.",
                hint="Name a column of paths, or of lists of paths.",
            )
        if name in media and media[name][1] != is_list:
            expected, actual = ("lists of files", "one per row") if media[name][1] else ("one file per row", "lists")
            raise SourceError(f"features= has {expected} for the column {name!r}, but the table has {actual}.")
        columns[name] = FileColumn(kind or _kind_of(_sample(rows.column(name))), is_list)
    return columns


def _guess_columns(rows: pa.Table, base: Base) -> dict[str, FileColumn]:
    """Return the columns of texts of which at least half name existing files."""
    columns: dict[str, FileColumn] = {}
    absent: list[tuple[str, str]] = []
    for field in rows.schema:
        if not has_text(field.type) and not has_text_lists(field.type):
            continue
        sample = _sample(rows.column(field.name))
        existing = [path for path in sample if is_object_address(path) or base.has_file(path)]
        if sample and 2 * len(existing) >= len(sample):
            columns[field.name] = FileColumn(_kind_of(sample), has_text_lists(field.type), guessed=True)
        elif sample and all(kind_of(path) != "file" for path in sample):
            absent.append((field.name, sample[0]))
    if not columns and absent:
        raise SourceError(
            f"The column {absent[0][0]!r} looks like file names, but the files do not exist, for example "
            f"{absent[0][1]!r}.",
            hint="Paths are relative to the table; --root=DIR sets another folder.",
        )
    if not columns:
        raise SourceError(
            f"No column of the table names files. Its columns are: {', '.join(rows.column_names)}.",
            hint="Name the column with --files=COLUMN[:TYPE].",
        )
    return columns


def _sample(column: pa.ChunkedArray) -> list[str]:
    """Return some of the texts that are not empty, from all over the column."""
    flat: list[str] = []
    for row in range(0, len(column), max(1, len(column) // _SAMPLE)):
        value = column[row].as_py()  # `take` would copy the column
        flat.extend(value if isinstance(value, list) else [value])
    return [text for text in flat if text][:_SAMPLE]


def _kind_of(paths: list[str]) -> str:
    kinds = Counter(kind_of(path) for path in paths)
    return next(iter(kinds)) if len(kinds) == 1 else "file"


def _select(rows: pa.Table, columns: Mapping[str, FileColumn], options: SourceOptions, base: str) -> pa.Table:
    """Return the rows with a file that `include` matches (if given) and none that `exclude` matches."""
    if not options.include and not options.exclude:
        return rows
    included = SourceOptions(include=options.include).selects()
    allowed = SourceOptions(exclude=options.exclude).selects()
    keep = []
    for row in zip(*(rows.column(name).to_pylist() for name in columns), strict=True):
        cells = [cell if isinstance(cell, list) else [cell] for cell in row]
        paths = [path.removeprefix(f"{base}/") for cell in cells for path in cell if path]
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
    ends = np.cumsum(np.bincount(ranks, minlength=len(names))).tolist()
    splits = []
    for name, start, stop in zip(names, [0, *ends], ends, strict=False):
        check_split(str(name))
        splits.append(Split(str(name), start, stop))
    order = pa.array(np.argsort(ranks, kind="stable"))
    return spooled(rows.drop_columns([options.split_by]), lambda columns: columns.take(order)), tuple(splits)


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
        return list_array(pa.list_(kind), list_lengths(self._lists), cells, nulls_of(self._lists))


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
    walk = Walk(tree, keys=True)
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
