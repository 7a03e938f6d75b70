"""A folder of files as a source: one file per row, or the rows of metadata files, as `datasets` has it.

Subfolders train/, validation/ and test/ (and their usual other names) are splits.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import InputError, SourceError
from brim.file_set import FileSetBuilder, Ints
from brim.formats.card_configs import SPLIT_NAMES
from brim.sources.features import KINDS, is_companion, kind_of
from brim.sources.file_table import FileColumn, FileTable, Split, collect_unmatched, one_array
from brim.sources.folder_tree import Tree, Walk
from brim.sources.read_table import read_table
from brim.sources.remote_tree import tree_of
from brim.sources.source_options import SourceOptions
from brim.sources.table_source import describe, encode_labels, limit_rows, make_file_table

_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_SPLIT_OF = {folder: split for split, folders in SPLIT_NAMES for folder in folders}
_SPLIT_CODES = {folder: code for code, (_, folders) in enumerate(SPLIT_NAMES, 1) for folder in folders}
_COMPANION = 255
_TAKE_ALL = "--files file:file takes every file as it is; --exclude leaves files out."
_LABELED_KINDS = ("image", "audio", "video")  # scans are in folders by subject, not by class
_MOST_CLASS_FOLDERS = 1000
_BLOCK = 10_000


def folder_source(folder: str | Tree, options: SourceOptions) -> FileTable:
    """Make the file table of a folder of files."""
    _check_options(options)
    tree = tree_of(folder, options.access)
    walk = Walk(tree, keys=True)
    is_selected = options.selects()
    allowed = SourceOptions(exclude=options.exclude).selects()
    refused_before_limit: int | None = None
    builder = FileSetBuilder(tree.root, tree.bucket)
    kinds, tops = array("B"), array("B")  # one byte per file: a million files must stay small
    metadata: list[str] = []
    for path, stat in walk:
        if path.rsplit("/", 1)[-1] in _METADATA and allowed(path):
            metadata.append(path)
        elif is_selected(path):
            builder.add(path, stat)
            kind = kind_of(path)
            kinds.append(_COMPANION if kind == "file" and is_companion(path) else KINDS.index(kind))
            tops.append(_SPLIT_CODES.get(path.split("/", 1)[0], 0) if "/" in path else 0)
            if len(builder) == options.limit:
                refused_before_limit = len(walk.refused)
    refused = tuple(r for r in walk.refused[:refused_before_limit] if is_selected(r.path))
    warnings = []
    if walk.loops:
        loops = f"{len(walk.loops)} symbolic link(s) lead back to themselves and were not followed: {walk.loops[0]}"
        warnings.append(loops)
    if walk.outputs:
        warnings.append(f"the folder {walk.outputs[0]}/ was built by brim and is passed over")
    files = builder.finish()
    if metadata:
        return _with_metadata(tree, metadata, files.paths.to_pylist(), options, tuple(warnings))
    if not len(files) and not refused:
        filters = " that --include and --exclude leave" if options.include or options.exclude else ""
        raise SourceError(f"{tree.shown or tree.root!r} has no files{filters}.", path=tree.root)
    codes = np.frombuffer(kinds, np.uint8)
    name, column = _column(codes, options)
    numbers = np.arange(len(files), dtype=np.int64)
    unmatched: list[str] = []
    if column.kind != "file" and column.guessed:
        is_of_kind = codes == KINDS.index(column.kind)
        unmatched = files.paths.take(pa.array(numbers[~is_of_kind])).to_pylist()
        numbers = numbers[is_of_kind]
    numbers, splits = _split(numbers, np.frombuffer(tops, np.uint8)[numbers], files.paths, options)
    if len(numbers) < len(files) or len(splits) > 1:
        files = files.take(numbers)
    rows = pa.table({name: pa.array(np.arange(len(files), dtype=np.int64))})
    if options.limit is not None:
        rows, splits = limit_rows(rows, splits, options.limit)
        files = files.take(np.arange(len(rows), dtype=np.int64))
    labels: dict[str, Any] = {}
    if options.label_from:
        rows, labels["label"] = _label(rows, name, files.paths, options)
    elif column.kind in _LABELED_KINDS:
        has_split_folders = options.split is None and any(tops)
        warnings += _class_folders_note(files.paths, depth=2 if has_split_folders else 1)
    return FileTable(
        rows=rows,
        columns={name: column},
        files=files,
        features=describe(rows.schema, {name: column}, labels)[0],
        splits=splits,
        refused=refused,
        warnings=tuple(warnings),
        recipe=options.recipe(),
        unmatched=None if options.limit else collect_unmatched(unmatched, hint=_TAKE_ALL),
    )


def _check_options(options: SourceOptions) -> None:
    if options.split_by:
        raise InputError(
            "--split-by can only be used with a table.",
            hint="Splits of a folder are its subfolders train/, validation/ and test/.",
        )
    if options.drop:
        raise InputError(
            "--drop can only be used with a table: a folder has no columns to leave out.",
            hint="--exclude leaves out files.",
        )
    if options.root:
        raise InputError(
            "--root can only be used with a table.", hint="Leave it out: the paths of a folder start at the folder."
        )


def _class_folders_note(paths: pa.Array, depth: int) -> list[str]:
    """Return a hint at --label-from if the folders look like classes.

    They do if every file is directly in a folder of the given depth, and there are several of them with several files
    each. Paths are read in blocks, because a copy of a million paths takes memory.
    """
    if not pc.all(pc.equal(pc.count_substring(paths, "/"), depth)).as_py():
        return []
    names: set[str] = set()
    for first in range(0, len(paths), _BLOCK):
        names |= {path.split("/")[-2] for path in paths.slice(first, _BLOCK).to_pylist()}
        if len(names) > _MOST_CLASS_FOLDERS:
            return []
    if len(names) < 2 or len(paths) < 2 * len(names):
        return []
    shown = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
    return [
        f"the files are in {len(names):,} folders ({shown}). Add --label-from=parent to store the folder names as "
        "class labels."
    ]


def _column(codes: np.ndarray[Any, np.dtype[np.uint8]], options: SourceOptions) -> tuple[str, FileColumn]:
    """Return the file column and its name, by the kinds of all files."""
    if options.renamed_columns():
        raise InputError(
            "--files NAME=COLUMN can only be used with a table.", hint="For a folder of files, use --files NAME[:TYPE]."
        )
    file_columns = options.file_columns()
    if len(file_columns) > 1:
        raise InputError("A folder of files has one file column, so --files can only be used once.")
    groups = set(np.flatnonzero(np.bincount(codes)).tolist()) - {_COMPANION}
    kind = KINDS[groups.pop()] if len(groups) == 1 else "file"
    for name, requested_kind in file_columns.items():
        return name, FileColumn(requested_kind or kind, is_list=False, guessed=requested_kind is None)
    return kind, FileColumn(kind, is_list=False, guessed=True)


def _split(
    numbers: Ints, tops: np.ndarray[Any, np.dtype[np.uint8]], paths: pa.Array, options: SourceOptions
) -> tuple[Ints, tuple[Split, ...]]:
    """Sort files by split. `tops` has the code of the split folder of each file, 0 for files outside of them."""
    counts = np.bincount(tops, minlength=len(SPLIT_NAMES) + 1)
    present = [code for code in range(1, len(counts)) if counts[code]]
    if options.split is not None or not present:
        return numbers, (Split(options.split or "train", 0, len(numbers)),)
    names = [split for split, _ in SPLIT_NAMES]
    outside = numbers[tops == 0]
    if len(outside):
        raise SourceError(
            f"The folder has splits ({', '.join(names[code - 1] for code in present)}), but {len(outside)} file(s) are "
            f"outside them, for example {paths[int(outside[0])].as_py()!r}.",
            hint="Move them, leave them out with --exclude, or put all into one split with --split=train.",
        )
    ends = np.cumsum(counts[present]).tolist()
    splits = [Split(names[c - 1], start, end) for c, start, end in zip(present, [0, *ends], ends, strict=False)]
    return numbers[np.argsort(tops, kind="stable")], tuple(splits)


def _label(rows: pa.Table, column: str, paths: pa.Array, options: SourceOptions) -> tuple[pa.Table, dict[str, Any]]:
    """Add the name of the folder of each file as a class label; null for files in the top folder."""
    if options.label_from != "parent":
        raise InputError(
            f"--label-from={options.label_from} names a column, but a folder of files has none.",
            hint="Use --label-from=parent to store the folder names as class labels.",
        )
    if "label" in rows.column_names:
        raise SourceError("--label-from=parent cannot add the column 'label': it already exists.")
    parts = [(path or "").split("/") for path in paths.take(one_array(rows.column(column))).to_pylist()]
    depth = 1 if options.split is None and any(p[0] in _SPLIT_OF and len(p) > 1 for p in parts) else 0
    labels = pa.array([p[-2] if len(p) > depth + 1 else None for p in parts], pa.string())
    names = sorted(pc.unique(labels.drop_null()).to_pylist())
    if not names:
        raise SourceError("--label-from=parent needs files in subfolders, but all files are at the top.")
    numbers = pc.index_in(labels, pa.array(names, pa.string())).cast(pa.int64())
    return rows.append_column("label", numbers), {"names": names, "_type": "ClassLabel"}


def _with_metadata(
    tree: Tree, metadata: list[str], paths: list[str], options: SourceOptions, warnings: tuple[str, ...]
) -> FileTable:
    """Make the file table of the rows of metadata files, of which each names files relative to itself."""
    tree.expect(metadata)
    tables = [_read_metadata(tree, path, options) for path in metadata]
    try:
        rows = pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as error:
        raise SourceError(
            f"The metadata files {', '.join(metadata)} have columns that do not match: {error}."
        ) from error
    split_column = "\0split"
    rows = rows.append_column(split_column, pa.array(_row_splits(rows, options), pa.string()))
    columns = _metadata_columns(rows, options)
    rows = rows.rename_columns([columns.get(name, (name, None))[0] for name in rows.column_names])
    file_columns = dict(columns.values())
    labels: dict[str, Any] = {}
    if options.label_from not in (None, "parent"):
        rows, labels[options.label_from] = encode_labels(rows, options.label_from, [*file_columns, split_column])
    file_paths = {path for name in file_columns for path in _flat(rows.column(name))}
    unnamed = (path for path in paths if path not in file_paths)
    unmatched = collect_unmatched(unnamed, hint=f"Name them in {metadata[0]}, or leave them out with --exclude.")
    reading = SourceOptions(
        include=options.include, exclude=options.exclude, limit=options.limit, split_by=split_column, root=tree.root
    )
    table = make_file_table(rows, file_columns, tree, reading, labels, warnings)
    table = table.replace(recipe=options.recipe(), unmatched=None if options.limit else unmatched)
    if options.label_from == "parent":
        single = next((name for name, column in table.columns.items() if not column.is_list), None)
        if single is None:
            raise SourceError("--label-from=parent needs a column with one file per row.")
        rows, label = _label(table.rows, single, table.files.paths, options)
        table = table.replace(
            rows=rows, features=None if table.features is None else {**table.features, "label": label}
        )
    return table


def _is_of_names(column: str) -> bool:
    return column in ("file_name", "file_names") or column.endswith(("_file_name", "_file_names"))


def _flat(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column, out of their lists, without those that are null or empty."""
    cells = (cell if isinstance(cell, list) else [cell] for cell in column.to_pylist())
    return [value for cell in cells for value in cell if value]


def _read_metadata(tree: Tree, path: str, options: SourceOptions) -> pa.Table:
    """Read a metadata file, and make its paths relative to the root instead of the file."""
    rows, folder = read_table(path, tree, options.memory), path.rpartition("/")[0]
    columns = [name for name in rows.column_names if _is_of_names(name)]
    if not columns:
        raise SourceError(
            f"{path!r} has no column 'file_name'.",
            hint="Name the files there (file_name, or NAME_file_name for several), as imagefolder has it.",
        )

    def join(value: Any) -> Any:
        return [join(item) for item in value] if isinstance(value, list) else f"{folder}/{value}" if value else value

    for name in columns if folder else ():
        values = pa.array([join(value) for value in rows.column(name).to_pylist()], rows.schema.field(name).type)
        rows = rows.set_column(rows.column_names.index(name), name, values)
    return rows


def _row_splits(rows: pa.Table, options: SourceOptions) -> list[str]:
    """Return the split of each row: the top folder of its first file."""
    if options.split is not None:
        return [options.split] * rows.num_rows
    cells = rows.column(next(filter(_is_of_names, rows.column_names))).to_pylist()
    firsts = [cell[0] if isinstance(cell, list) and cell else cell for cell in cells]
    tops = [first.split("/", 1)[0] if isinstance(first, str) and "/" in first else "" for first in firsts]
    splits = [_SPLIT_OF.get(top) for top in tops]
    if set(splits) - {None} and None in splits:
        raise SourceError(
            f"The metadata names files in splits, and {splits.count(None)} outside them, such as "
            f"{firsts[splits.index(None)]!r}.",
            hint="Move them, or put all into one split with --split=train.",
        )
    return [split or "train" for split in splits]


def _metadata_columns(rows: pa.Table, options: SourceOptions) -> dict[str, tuple[str, FileColumn]]:
    """Return the new name and the file column of each column of names.

    `file_name` gets the name of its kind, `mask_file_name` becomes `mask`.
    """
    file_columns, renamed = options.file_columns(), options.renamed_columns()
    columns: dict[str, tuple[str, FileColumn]] = {}
    for old in filter(_is_of_names, rows.column_names):
        is_list = old.endswith("file_names")
        values = _flat(rows.column(old))
        if not all(isinstance(value, str) for value in values):
            raise SourceError(f"The column {old!r} of the metadata does not have file names.")
        kinds = {kind_of(value) for value in values}
        kind = kinds.pop() if len(kinds) == 1 else "file"
        new = old.removesuffix("_file_names" if is_list else "_file_name")
        if old in renamed:
            new, kind = renamed[old], file_columns[old] or kind
        elif old in ("file_name", "file_names"):
            new = next((name for name in file_columns if name not in renamed), kind + "s" if is_list else kind)
            kind = file_columns.get(new) or kind
        if new in rows.column_names:
            raise SourceError(f"The metadata has both {old!r} and {new!r}.", hint="Rename one of them.")
        columns[old] = (new, FileColumn(kind, is_list, guessed=new not in file_columns and old not in renamed))
    return columns
