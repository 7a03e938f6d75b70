"""Find the rows of a plan that a dataset already has, so that --append adds only new ones.

A row exists if the dataset has, in the same split, a row with the same values whose files have the same paths and the
same bytes. Paths are compared first; only files with the path and the size of one in the dataset are read, and compared
in chunks. Values without meaningful file names (of `select` and `push_to_hub`) are not compared.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import InputError
from brim.file_set import Bools, FileSet, Ints
from brim.formats.parquet_levels import is_list_type
from brim.formats.range_readers import Readable, ShardFile
from brim.formats.splice import SpliceBuilder
from brim.plans.plan import Plan, make_plan
from brim.progress import Advance
from brim.records import dataclass
from brim.sources.file_table import FileTable, Split, flat_numbers, one_array

if TYPE_CHECKING:
    from brim.formats.shard_listing import ShardListing
    from brim.sources.dataset_files import DatasetFile

_SHARDS_AT_ONCE = 16
Note = Callable[[str], None]


def with_known_classes(table: FileTable, features: Mapping[str, Any]) -> FileTable:
    """Convert a table's class labels to the class numbers in `features`.

    A few files have few of the classes, so their numbers differ. Raise InputError for a class that the dataset does not
    have.
    """
    own = dict(table.features or {})
    for name, feature in own.items():
        existing: Any = features.get(name)
        if not (is_class_label(feature) and is_class_label(existing)) or feature["names"] == existing["names"]:
            continue
        unknown = [name_of_class for name_of_class in feature["names"] if name_of_class not in existing["names"]]
        if unknown:
            hint = "--append cannot add classes. Build the dataset again from all rows."
            if label_from := table.recipe.get("label_from"):
                hint = "--append cannot add classes. Put the new files next to the old ones and run: "
                hint += f"brim build SOURCE DEST --label-from {label_from} --update"
            raise InputError(
                f"The column {name!r} has new classes: {_list_some(unknown)}. Those of the dataset are: "
                f"{_list_some(existing['names'])}.",
                hint=hint,
                classes=unknown,
            )
        numbers = pa.array([existing["names"].index(name_of_class) for name_of_class in feature["names"]], pa.int64())
        column = one_array(table.rows.column(name))
        index, kind = table.rows.column_names.index(name), table.rows.schema.field(name)
        rows = table.rows.set_column(index, kind, numbers.take(column).cast(kind.type))
        own[name] = existing
        table = table.replace(rows=rows, features=own)
    return table


def _list_some(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:10])) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")


def is_class_label(feature: Any) -> bool:
    return isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel" and isinstance(feature["names"], list)


def plan_for_rows(plan: Plan, table: FileTable) -> Plan:
    """Return the plan for other rows, cut in the same way."""
    return plan if table is plan.table else make_plan(table, plan.format, plan.cut, plan.shards.folder)


@dataclass(slots=True)
class _ExistingFiles:
    """Which files of a plan a dataset has, by number, and which rows, by digest."""

    equal: Bools
    differs: Bools
    rows: set[bytes] = field(default_factory=set)


def without_known_rows(
    plan: Plan, shards: Sequence[DatasetFile], allow_duplicate_paths: bool, note: Note, check: Callable[[], None]
) -> tuple[FileTable, int]:
    """Return the table of a plan without the rows that shards have, and their number. `check` may raise to stop.

    Raises:
        InputError: A file has the path of one in the dataset and other content, and that is not allowed.
    """
    table, files = plan.table, plan.table.files
    if not table.columns or table.nested:
        return table, 0
    existing = {s.name: _ExistingFiles(np.zeros(len(files), bool), np.zeros(len(files), bool)) for s in table.splits}
    is_noted = False
    for name, rows in _rows_with_paths(shards, files.paths, list(table.columns)):
        check()
        if name in existing:
            if not is_noted:
                note("comparing files with those of the same path in the dataset")
            is_noted = True
            _compare(rows, table, existing[name], check)
    _refuse_other_content(table, existing, allow_duplicate_paths)
    keep = np.ones(len(table), bool)
    for split in table.splits:
        rows_of_split = np.arange(split.start, split.stop)
        whole = rows_of_split[_holds_only(table, split, existing[split.name].equal)]
        if len(whole):
            digests = _digests(table.replace(rows=table.rows.take(pa.array(whole))), list(table.columns))
            keep[whole] = [digest not in existing[split.name].rows for digest in digests]
    if keep.all():
        return table, 0
    return _keep_rows(table, keep), int((~keep).sum())


def _rows_with_paths(
    shards: Sequence[DatasetFile], paths: pa.Array, columns: list[str]
) -> Iterator[tuple[str, FileTable]]:
    """Yield, with their split, the rows of shards in which a file has one of the paths."""
    from brim.sources.parquet_source import ParquetOrigin  # other builds read no dataset
    from brim.sources.webdataset_source import webdataset_table

    for first in range(0, len(shards), _SHARDS_AT_ONCE):
        group = shards[first : first + _SHARDS_AT_ONCE]
        for split in dict.fromkeys(shard.split for shard in group):
            own = [shard for shard in group if shard.split == split]
            if own[0].shown.endswith(".tar"):
                yield split, webdataset_table(own, {})
                continue
            if all(shard.listing is not None and not _lists_one(shard.listing, paths, columns) for shard in own):
                continue  # known from the manifest, without a request
            origin = ParquetOrigin("the dataset", own, {}, None)
            small = origin.small([name for name in columns if name in origin.content])
            has_path = np.zeros(len(origin), bool)
            for name in small.column_names:
                has_path |= _have_paths(one_array(small.column(name)), paths)
            if has_path.any():
                yield split, origin.locate(np.flatnonzero(has_path))


def _lists_one(listing: ShardListing, paths: pa.Array, columns: list[str]) -> bool:
    """Return whether a file of a shard has one of the paths, according to its manifest."""
    small = [listing.small.column(name) for name in columns if name in listing.small.column_names]
    return any(_have_paths(one_array(column), paths).any() for column in small)


def _have_paths(cells: pa.Array, paths: pa.Array) -> Bools:
    """Return for each row whether its file, or one of its list of files, has one of the paths."""
    inner = cells.flatten() if is_list_type(cells.type) else cells
    names = inner.field("path") if pa.types.is_struct(inner.type) else inner
    is_known = pc.is_in(names.cast(paths.type), value_set=paths).to_numpy(zero_copy_only=False)
    if not is_list_type(cells.type):
        return np.asarray(is_known, bool)
    has_known = np.zeros(len(cells), bool)
    parents = pc.list_parent_indices(cells).to_numpy(zero_copy_only=False)
    has_known[np.asarray(parents, np.int64)[is_known]] = True
    return has_known


def _compare(theirs: FileTable, ours: FileTable, existing: _ExistingFiles, check: Callable[[], None]) -> None:
    """Record which new files have the path and the bytes of an existing one, or only the path."""
    names = [name for name in ours.columns if name in theirs.columns]
    old = np.unique(np.concatenate([np.zeros(0, np.int64), *(flat_numbers(theirs.rows.column(n)) for n in names)]))
    new = pc.index_in(theirs.files.paths.take(pa.array(old)).cast(ours.files.paths.type), value_set=ours.files.paths)
    is_known = np.asarray(new.is_valid().to_numpy(zero_copy_only=False), bool)
    old, numbers = old[is_known], np.asarray(new.drop_null().to_numpy(zero_copy_only=False), np.int64)
    alike = theirs.files.sizes[old] == ours.files.sizes[numbers]
    existing.differs[numbers[~alike]] = True
    old, numbers = old[alike], numbers[alike]
    for number, same in zip(numbers.tolist(), _same_bytes(theirs.files, old, ours.files, numbers, check), strict=True):
        existing.equal[number] |= same
        existing.differs[number] |= not same
    existing.rows.update(_digests(theirs, list(ours.columns), ours.rows.column_names))


def _same_bytes(
    old_files: FileSet, old: Ints, new_files: FileSet, new: Ints, check: Callable[[], None]
) -> Iterator[bool]:
    """Yield for each pair of files of equal size whether they have the same bytes."""
    first_builder, second_builder = SpliceBuilder(old_files), SpliceBuilder(new_files)
    for number, partner in zip(old.tolist(), new.tolist(), strict=True):
        first_builder.value(number)
        second_builder.value(partner)
    with first_builder.finish() as first, second_builder.finish() as second:
        mine, its = first.chunks(), second.chunks()
        a = b = memoryview(b"")
        for size in new_files.sizes[new].tolist():
            same = True
            while size:
                a, b = a or next(mine), b or next(its)
                step = min(size, len(a), len(b))
                same = same and a[:step] == b[:step]
                a, b, size = a[step:], b[step:], size - step
                check()
            yield same


def has_equal_bytes(shard: Readable, file: ShardFile, table: FileTable, number: int, advance: Advance) -> bool:
    """Return whether the content of a file in a shard equals that of source file `number`, byte by byte."""
    value = SpliceBuilder(table.files)
    value.value(number)
    offset = file.offset
    for chunk in value.finish().chunks():
        if shard.read_at(offset, len(chunk)) != chunk:
            return False
        offset += len(chunk)
        advance(len(chunk))
    return True


def _digests(table: FileTable, columns: list[str], names: Sequence[str] | None = None) -> Iterator[bytes]:
    """Yield a digest of the values of each row, with the paths of its files."""
    names = names or table.rows.column_names
    for batch in table.rows.to_batches(max_chunksize=1000):
        for row in batch.to_pylist():
            values = [_paths(row.get(name), table.files) if name in columns else row.get(name) for name in names]
            yield hashlib.blake2b(json.dumps(values, default=str).encode(), digest_size=16).digest()


def _paths(cell: Any, files: FileSet) -> Any:
    if isinstance(cell, list):
        return [_paths(item, files) for item in cell]
    return None if cell is None else files.paths[cell].as_py()


def _refuse_other_content(table: FileTable, existing: Mapping[str, _ExistingFiles], allowed: bool) -> None:
    if allowed:
        return
    numbers = np.unique(np.concatenate([np.flatnonzero(split.differs & ~split.equal) for split in existing.values()]))
    if len(numbers):
        path = table.files.path(int(numbers[0]))
        raise InputError(
            f"{len(numbers):,} file(s) of the source have the path of a file in the dataset and other content, such as "
            f"{path!r}.",
            hint="Rename them, or use --update with the whole source; --allow-duplicate-paths appends them anyway.",
            path=path,
        )


def _holds_only(table: FileTable, split: Split, equal: Bools) -> Bools:
    """Return which rows of a split have files that all exist in the dataset."""
    rows = table.rows.slice(split.start, split.stop - split.start)
    part = table.replace(rows=rows)
    every = sum(part.cell_bytes(name, np.ones(len(equal), np.int64)) for name in table.columns)
    existing_count = sum(part.cell_bytes(name, equal.astype(np.int64)) for name in table.columns)
    return np.asarray((every > 0) & (every == existing_count), bool)


def _keep_rows(table: FileTable, keep: Bools) -> FileTable:
    """Keep some rows of a table; drop splits that lose all rows."""
    splits, start = [], 0
    for split in table.splits:
        count = int(keep[split.start : split.stop].sum())
        if count or split.start == split.stop:
            splits.append(Split(split.name, start, start + count))
            start += count
    return table.replace(rows=table.rows.filter(pa.array(keep)), splits=tuple(splits))
