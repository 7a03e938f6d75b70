"""Describe a dataset, written by brim or another program: rows, splits, columns with their types and stored bytes.

Only footers, the card and the manifest are read, and for the first rows the headers of their files. Not covered:
checksums, which `verify` compares, and expectations, which `check` tests.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import field
from typing import Any

import numpy as np
import pyarrow as pa

from brim.errors import BrimError, InputError, VerificationError
from brim.formats.card import CARD, read_card
from brim.formats.file_headers import shape_of
from brim.formats.parquet_levels import is_list_type
from brim.formats.parquet_reader import ParquetColumns, is_file_type, locate_parquet
from brim.formats.range_readers import FileView, Readable
from brim.options.check_options import InfoOptions
from brim.plans.cut_shards import shard_name
from brim.plans.known_rows import is_class_label
from brim.plans.shard_bytes import count_rows
from brim.records import dataclass
from brim.sizes import format_size, plural
from brim.sources.features import fits_type, kind_of_feature
from brim.storage.location import Access
from brim.verification.published import SHARD_NAME, Published, missing_numbers, open_published
from brim.verification.walk import walk_shards
from brim.wording import Described

_SHOWN_CLASSES = 10
_CARD_FIELDS = ("pretty_name", "license", "license_name", "language", "task_categories", "tags")
_MOST_VALUE_BYTES = 64_000_000  # of media in an encoded column, which must be decoded to be shown


@dataclass(frozen=True, slots=True)
class ColumnInfo:
    """A column: its type as text, whether it contains files, and its stored bytes."""

    name: str
    type: str
    is_file: bool
    bytes: int
    classes: tuple[str, ...] = ()  # names of a ClassLabel

    @property
    def text(self) -> str:
        """The type as text, with the first class names."""
        if not self.classes:
            return self.type
        suffix = ", …" if len(self.classes) > _SHOWN_CLASSES else ""
        return f"ClassLabel({len(self.classes):,}: {', '.join(self.classes[:_SHOWN_CLASSES])}{suffix})"


@dataclass(frozen=True, slots=True)
class SplitInfo:
    """A split of a config."""

    config: str
    split: str
    rows: int
    shards: int
    bytes: int
    state: str = ""


@dataclass(repr=False)
class DatasetInfo(Described):
    """The facts of a dataset. `whole` is None if the expected shards are unknown; if it is False, see `problems`."""

    address: str
    rows: int = 0
    bytes: int = 0
    shards: int = 0
    shard_bytes: tuple[int, int, int] = (0, 0, 0)  # smallest, median, largest
    splits: list[SplitInfo] = field(default_factory=list)
    columns: list[ColumnInfo] = field(default_factory=list)
    card: dict[str, Any] | None = None
    writers: list[str] = field(default_factory=list)
    whole: bool | None = None
    problems: list[str] = field(default_factory=list)
    head: list[dict[str, Any]] = field(default_factory=list)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The facts as text lines, without the first rows."""
        smallest, median, largest = map(format_size, self.shard_bytes)
        lines = [("dataset", self.address), ("rows", f"{self.rows:,}")]
        for split in self.splits:
            name = split.split if split.config == "default" else f"{split.config}/{split.split}"
            contents = f"{plural(split.rows, 'row')}, {plural(split.shards, 'shard')}, {format_size(split.bytes)}"
            contents += "" if split.state in ("", "whole") else f", {split.state}"
            lines.append(("split", f"{name}: {contents}"))
        lines.append(("size", format_size(self.bytes)))
        lines.append(("shards", f"{self.shards:,}: {smallest} / {median} / {largest}  (smallest / median / largest)"))
        lines += [("column", f"{c.name}: {c.text}, {format_size(c.bytes)}") for c in self.columns]
        if self.card is None:
            lines.append(("card", "none"))
        else:
            texts = {name: value if isinstance(value, list) else [value] for name, value in self.card.items()}
            fields = [f"{name} {', '.join(map(str, value))}" for name, value in texts.items()]
            lines.append(("card", "; ".join(fields) or "README.md"))
        lines.append(("written by", ", ".join(self.writers) or "unknown"))
        complete: dict[bool | None, str] = {True: "yes, as its manifest or its file names say", False: "no"}
        lines.append(("complete", complete.get(self.whole, "unknown, it has no manifest")))
        lines += [("problem", problem) for problem in self.problems[:10]]
        if len(self.problems) > 10:
            lines.append(("problem", f"and {len(self.problems) - 10:,} more"))
        return lines


@dataclass(slots=True)
class _Shard:
    rows: int
    columns: dict[str, int]
    types: dict[str, tuple[str, bool]]
    writer: str
    classes: dict[str, tuple[str, ...]] = field(default_factory=dict)


def info(options: InfoOptions) -> DatasetInfo:
    """Describe a dataset from its footers, its card and its manifest."""
    dataset, head, access = options.dataset, options.head, Access(options.endpoint_url, options.anonymous)
    with open_published(
        dataset, options.state_dir, lambda _: None, access, options.from_config, options.from_split
    ) as published:
        result = _describe(os.fspath(dataset), published)
        first = next((name for name in sorted(published.sizes) if name.endswith(".parquet")), None)
        if head and first is not None:
            try:
                with closing(published.open(first)) as shard:
                    result.head = list(first_rows(shard, head))
            except VerificationError as error:
                result.problems.append(f"{first}: its first rows cannot be read ({error.words[0]})")
                result.whole = False
        return result


def _describe(address: str, published: Published) -> DatasetInfo:
    names = sorted(published.sizes)
    result = DatasetInfo(address, shards=len(names), bytes=sum(published.sizes.values()))
    shards: dict[str, _Shard] = {}
    for name, shard in walk_shards(names, lambda name, _: _read_shard(published, name), is_remote=published.remote):
        if isinstance(shard, str):
            result.problems.append(f"{name}: {shard}")
        else:
            shards[name] = shard
    if names:
        sizes = sorted(published.sizes.values())
        result.shard_bytes = (sizes[0], int(np.median(sizes)), sizes[-1])
    result.rows = sum(shard.rows for shard in shards.values())
    result.splits = _splits(published, shards)
    total: dict[str, int] = {}
    types: dict[str, tuple[str, bool]] = {}
    classes: dict[str, tuple[str, ...]] = {}
    for shard in shards.values():
        classes |= shard.classes
        for name, size in shard.columns.items():
            total[name] = total.get(name, 0) + size
            types.setdefault(name, shard.types[name])
    result.columns = [ColumnInfo(name, *types[name], size, classes.get(name, ())) for name, size in total.items()]
    built = {f"brim {job.versions.get('brim', '?')}" for job in published.record.jobs}
    result.writers = sorted(built | {shard.writer for shard in shards.values() if shard.writer and not built})
    result.problems += list(missing_parts(published))
    is_known = bool(published.record.jobs) or any(SHARD_NAME.fullmatch(name) for name in names)
    result.whole = False if result.problems else True if is_known else None
    try:
        text = published.card()
        fields = {} if text is None else read_card(text)
        result.card = None if text is None else {name: fields[name] for name in _CARD_FIELDS if name in fields}
    except (BrimError, UnicodeDecodeError, OSError) as error:
        result.problems.append(f"{CARD}: {error}")
    return result


def _read_shard(published: Published, name: str) -> _Shard | str:
    """Return the facts of a footer, or why it cannot be read."""
    try:
        with closing(published.open(name)) as shard:
            if not name.endswith(".parquet"):
                return _Shard(count_rows(shard) or 0, {}, {}, "")
            with ParquetColumns(shard) as columns:
                features = columns.features()
                types = {
                    column.name: (describe_type(column.type, features.get(column.name)), is_file_type(column.type))
                    for column in columns.schema
                }
                writer = str(columns.footer.created_by or "")
                return _Shard(columns.rows, columns.column_bytes(), types, writer, _class_names(columns))
    except (pa.ArrowException, BrimError, ValueError) as error:
        return f"cannot be read ({str(error).splitlines()[0]})"


def _class_names(columns: ParquetColumns) -> dict[str, tuple[str, ...]]:
    """Return the class names of each ClassLabel column whose stored type fits its feature."""
    labels = {name: feature for name, feature in columns.features().items() if is_class_label(feature)}
    schema = columns.schema
    return {
        name: tuple(map(str, feature["names"]))
        for name, feature in labels.items()
        if name in schema.names and fits_type(feature, schema.field(name).type)
    }


def describe_type(kind: pa.DataType, feature: Any = None) -> str:
    """Describe a type as text; a file column by its kind of media."""
    if is_file_type(kind):
        media = kind_of_feature(feature) if feature is not None else None
        return f"{'list of ' if is_list_type(kind) else ''}{media[0] if media else 'file'}"
    return f"list of {kind.value_type}" if is_list_type(kind) else str(kind)


def _splits(published: Published, shards: dict[str, _Shard]) -> list[SplitInfo]:
    """Return the splits of the readable shards."""
    splits = []
    for subset in published.subsets:
        names = [name for name in subset.names if name in shards]
        rows, size = sum(shards[name].rows for name in names), sum(published.sizes[name] for name in names)
        if names:
            splits.append(SplitInfo(subset.config, subset.split, rows, len(names), size, subset.state))
    return splits


def missing_parts(published: Published) -> Iterator[str]:
    """Yield missing or damaged parts, found by the receipts, or without them by the names of shards."""
    record = published.record
    for subset in published.subsets:
        if subset.state == "unfinished":
            yield f"{subset.name}: {subset.state_text}"
    if record.unfinished and not any(subset.state == "unfinished" for subset in published.subsets):
        yield "unfinished: 0 shards; run the same build to finish"
    yield from record.damaged
    for name, receipt in record.receipts.items():
        size = published.sizes.get(name)
        if size is None:
            yield f"{name}: is missing"
        elif size != receipt.size:
            yield f"{name}: has {size:,} bytes instead of {receipt.size:,}"
    if not record.receipts and not record.unfinished:
        for folder, split, number, count, extension in missing_numbers(list(published.sizes)):
            yield f"{shard_name(folder, split, number, count, extension)}: is missing"


def first_rows(shard: Readable, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first rows of a shard, with descriptions in place of files."""
    with ParquetColumns(shard) as columns:
        count = min(count, columns.footer.row_group(0).num_rows) if columns.footer.num_row_groups else 0
        if not count:
            return
        features = columns.features()
        files = [column.name for column in columns.schema if is_file_type(column.type)]
        shown = {name: _media(shard, columns, name, features.get(name), count) for name in files}
        values = {n: columns.cells(0, n).slice(0, count).to_pylist() for n in columns.schema.names if n not in files}
        for name, classes in _class_names(columns).items():
            valid = range(len(classes))
            values[name] = [classes[number] if number in valid else number for number in values[name]]
        for row in range(count):
            yield {name: (shown.get(name) or values[name])[row] for name in columns.schema.names}


def _media(shard: Readable, columns: ParquetColumns, name: str, feature: Any, count: int) -> list[Any]:
    """Describe the files of the first rows; None for a row without one."""
    media = kind_of_feature(feature) if feature is not None else None
    kind = media[0] if media else "file"
    is_list = is_list_type(columns.schema.field(name).type)
    cells: list[Any] = [[] for _ in range(count)]
    for row, path, value, size in values_of(shard, columns, name, count):
        shape = None if value is None else shape_of(value, path or "", kind)
        cells[row].append({"type": kind, "path": path, "shape": shape, "bytes": size})
    if is_list:
        return cells
    return [cell[0] if cell else None for cell in cells]


def values_of(
    shard: Readable, columns: ParquetColumns, name: str, rows: int | None = None
) -> Iterator[tuple[int, str | None, io.BufferedIOBase | None, int]]:
    """Yield (row, path, content, size) of each file of a column, of the first rows or of all.

    Shards of brim are read in ranges; encoded columns of other programs are decoded in batches, which is an InputError
    for a row that is too large.
    """
    if not columns.is_spliced:
        yield from _decoded(columns, name, rows)
        return
    for file in locate_parquet(shard, first_rows=rows, column=name):
        if rows is None or file.row < rows:
            content = io.BufferedReader(FileView(shard, file.offset, file.size), 1 << 18)
            yield file.row, file.path, content, file.size


def _decoded(
    columns: ParquetColumns, name: str, rows: int | None
) -> Iterator[tuple[int, str | None, io.BufferedIOBase | None, int]]:
    footer, first = columns.footer, 0
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        heavy = sum(row_group.column(n).total_uncompressed_size for n in columns.column_leaves(name))
        max_rows = max(1, int(_MOST_VALUE_BYTES / max(heavy / max(row_group.num_rows, 1), 1)))
        if heavy / max(row_group.num_rows, 1) > _MOST_VALUE_BYTES:
            raise InputError(f"A row of {name!r} is too large to be decoded.")
        for batch in columns.file.iter_batches(batch_size=min(max_rows, 256), row_groups=[group], columns=[name]):
            for cell in batch.column(0).to_pylist():
                for value in cell if isinstance(cell, list) else [cell]:
                    if value is not None and value.get("bytes") is not None:
                        yield first, value.get("path"), io.BytesIO(value["bytes"]), len(value["bytes"])
                first += 1
                if rows is not None and first >= rows:
                    return
