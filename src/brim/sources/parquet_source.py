"""Parquet shards that anybody wrote as a source: small columns are read, large values stay where they are.

`ParquetOrigin` reads footers and small columns first; the values of the rows that were chosen are found when they are
(`locate`), so that one subject of a dataset far away costs its own bytes. Which shards there are: dataset_files.py;
which rows are chosen: selection.py; how values are found: formats/parquet_values.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from brim.errors import BrimError, DamageFound, SourceError
from brim.file_set import NO_CONTENT, Bools, FileSet, Ints, RangeSetBuilder
from brim.formats import thrift
from brim.formats.parquet_index import read_footer
from brim.formats.parquet_values import (
    ChunkReader,
    FoundValues,
    Leaf,
    NotLocated,
    PageSpan,
    leaves_of,
    page_spans,
)
from brim.formats.readable import LocalFile, Readable, ReadableFile
from brim.formats.source_reader import join_ranges
from brim.formats.thrift import Struct
from brim.formats.value_spool import ValueSpool
from brim.sources.dataset_files import DatasetFile, RemoteShard
from brim.sources.features import NoFeature, feature_of, feature_of_type, kind_of, kind_of_feature
from brim.sources.file_table import FileColumn, FileTable, Split, is_list, one_array

HELD_BYTES = 64_000_000  # of small columns; more goes to disk
FETCHED_BYTES = 256_000_000  # of chosen values that are far away: so many are fetched at once and kept on disk
_BATCH_ROWS = 1024
_BROKEN = (
    thrift.ThriftError, ValueError, KeyError, IndexError, TypeError, OverflowError, OSError, UnicodeDecodeError,
    RecursionError, MemoryError, AttributeError, pa.ArrowException,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ContentColumn:
    """A column whose values are found and not read: files, or plain bytes, alone or in lists."""

    name: str
    kind: pa.DataType
    is_list: bool
    bare: bool


def content_column(field: pa.Field) -> ContentColumn | None:
    """What of an Arrow field is left where it lies; None for a column that is read."""
    kind, many = field.type, is_list(field.type)
    inner = kind.value_type if many else kind
    if pa.types.is_binary(inner) or pa.types.is_large_binary(inner):
        return ContentColumn(field.name, kind, many, bare=True)
    if pa.types.is_struct(inner) and {part.name for part in inner} == {"bytes", "path"} and len(inner) == 2:
        types = {part.name: part.type for part in inner}
        texts = pa.types.is_string(types["path"]) or pa.types.is_large_string(types["path"])
        if texts and (pa.types.is_binary(types["bytes"]) or pa.types.is_large_binary(types["bytes"])):
            return ContentColumn(field.name, kind, many, bare=False)
    return None


class _Shard:
    """One Parquet file: its footer, and what is found in it."""

    def __init__(self, file: DatasetFile, opened: Readable) -> None:
        self.file = file
        try:
            self.footer: Struct = read_footer(opened)
            self.leaves = leaves_of(self.footer)
            with pq.ParquetFile(ReadableFile(opened), pre_buffer=False) as parquet:
                self.schema: pa.Schema = parquet.schema_arrow
                self.rows = int(parquet.metadata.num_rows)
            self.groups: list[Struct] = self.footer[4][1].items if 4 in self.footer else []
            counts = [int(group[3][1]) for group in self.groups]
            if sum(counts) != self.rows or min(counts, default=0) < 0:
                raise ValueError("its row groups have other rows than it says")
            self.edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(counts, np.int64))])
            for group in self.groups:
                if len(group[1][1].items) != len(self.leaves):
                    raise ValueError("a row group has other columns than the file")
            self.content = {c.name: c for field in self.schema if (c := content_column(field)) is not None}
            self.leaf_of = {name: self._leaf(column) for name, column in self.content.items()}
        except BrimError:
            raise
        except _BROKEN as error:
            raise broken(file, error) from error

    def _leaf(self, column: ContentColumn) -> Leaf:
        for leaf in self.leaves:
            if leaf.path[0] == column.name and leaf.is_bytes and (column.bare or leaf.path[-1] == "bytes"):
                return leaf
        raise ValueError(f"the column {column.name!r} has no bytes")

    def small_leaves(self, names: Iterable[str]) -> list[int]:
        """The numbers of the leaves of some columns, without those that hold content."""
        left = {leaf.number for leaf in self.leaf_of.values()}
        wanted = set(names)
        return [leaf.number for leaf in self.leaves if leaf.path[0] in wanted and leaf.number not in left]

    def meta(self, group: int, leaf: int) -> Struct:
        entry = self.groups[group][1][1].items[leaf]
        return dict(entry[3][1])

    def ranges_of(self, leaves: Sequence[int]) -> list[tuple[int, int]]:
        """Where the chunks of some leaves lie."""
        found = []
        for group in range(len(self.groups)):
            for leaf in leaves:
                meta = self.meta(group, leaf)
                start = min(int(meta[n][1]) for n in (9, 11) if n in meta and meta[n][1])
                found.append((start, start + int(meta[7][1])))
        return found

    def index_ranges(self, leaves: Sequence[int]) -> list[tuple[int, int]]:
        entries = [group[1][1].items[leaf] for group in self.groups for leaf in leaves]
        return [(int(e[4][1]), int(e[4][1]) + int(e[5][1])) for e in entries if 4 in e and 5 in e]

    def pages(self, opened: Readable, group: int, leaf: int) -> list[PageSpan] | None:
        """By the page index, if the file has one."""
        entry = self.groups[group][1][1].items[leaf]
        if 4 not in entry or 5 not in entry:
            return None
        start, size = int(entry[4][1]), int(entry[5][1])
        if not 0 < size <= opened.size - start:
            raise ValueError("the page index is broken")
        return page_spans(opened.read_at(start, size), int(self.groups[group][3][1]))


def broken(file: DatasetFile, error: BaseException) -> DamageFound:
    reason = " ".join(str(error).split()) or type(error).__name__
    return DamageFound(
        f"{file.shown} is not a Parquet file that brim can read: {reason[:300]}.", hint="Get or write the file again."
    )


class ParquetOrigin:
    """The rows of Parquet shards, in order. `about` is what the dataset says of itself, `features` its card's."""

    def __init__(
        self, name: str, files: Sequence[DatasetFile], about: Mapping[str, Any], features: Mapping[str, Any] | None
    ) -> None:
        self.name, self.files, self.about = name, files, about
        self._card_features = features
        self._opened: dict[int, Readable] = {}
        self._shards = [_Shard(file, self._open(number)) for number, file in enumerate(files)]
        if not self._shards:
            raise SourceError(f"{name} holds no Parquet files.")
        self.schema = self._one_schema()
        self.edges = np.cumsum([0, *(shard.rows for shard in self._shards)]).astype(np.int64)
        self.held: list[object] = []
        self.notes: list[str] = []

    def __len__(self) -> int:
        return int(self.edges[-1])

    def _open(self, number: int) -> Readable:
        """The shard; of one far away its end is asked for at once, and kept."""
        if number not in self._opened:
            file = self.files[number]
            try:
                opened: Readable = LocalFile(file.path) if file.remote is None else RemoteShard(file)
            except OSError as error:
                raise SourceError(f"{file.shown!r} cannot be read: {error.strerror}.", path=file.shown) from error
            if file.remote is None:
                return opened
            self._opened[number] = opened
        return self._opened[number]

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()

    def _one_schema(self) -> pa.Schema:
        first = self._shards[0]
        for shard in self._shards[1:]:
            if shard.schema.remove_metadata() != first.schema.remove_metadata():
                names = {*first.schema.names} ^ {*shard.schema.names}
                differs = sorted(names) or [
                    field.name for field in shard.schema if field != first.schema.field(field.name)
                ] or ["their order"]  # fmt: skip
                raise SourceError(
                    f"{shard.file.shown} has other columns than {first.file.shown}: {differs[0]}.",
                    hint="Name one config with --from-config, or give a glob of files that belong together.",
                )
        return first.schema

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    @property
    def file_columns(self) -> list[str]:
        return list(self.content)

    @property
    def content(self) -> Mapping[str, ContentColumn]:
        return self._shards[0].content

    @property
    def splits(self) -> tuple[Split, ...]:
        """Shards of one split follow each other."""
        found: list[Split] = []
        for file, start, stop in zip(self.files, self.edges[:-1].tolist(), self.edges[1:].tolist(), strict=True):
            if found and found[-1].name == file.split:
                found[-1] = Split(file.split, found[-1].start, stop)
            else:
                found.append(Split(file.split, start, stop))
        return tuple(found)

    @cached_property
    def features(self) -> dict[str, Any] | None:
        """What `datasets` makes of the columns: as the files say, else the card, else by what is there."""
        said = (self.schema.metadata or {}).get(b"huggingface")
        known: Mapping[str, Any] = self._card_features or {}
        if said is not None:
            try:
                known = json.loads(said)["info"]["features"]
            except (ValueError, KeyError, TypeError):
                known = {}
        features = {}
        try:
            for field in self.schema:
                features[field.name] = known[field.name] if field.name in known else self._guess(field)
        except NoFeature:
            return None
        return features

    def _guess(self, field: pa.Field) -> Any:
        column = self.content.get(field.name)
        if column is None or column.bare:
            return feature_of_type(field.type)
        names = self.small([field.name]).column(field.name).slice(0, 100)
        array = one_array(names)
        array = array.flatten() if is_list(array.type) else array
        kinds = {kind_of(path) for path in array.field("path").drop_null().to_pylist()}
        kind = kinds.pop() if len(kinds) == 1 else "file"
        if kind == "file":
            return feature_of_type(field.type)
        feature: Any = feature_of(kind)
        return (
            {"feature": feature, "_type": "LargeList" if pa.types.is_large_list(field.type) else "List"}
            if (column.is_list)
            else feature
        )

    # Small columns

    @cached_property
    def readable(self) -> list[str]:
        """The columns that `small` gives: of files their paths, nothing of plain bytes."""
        return [name for name in self.schema.names if not (name in self.content and self.content[name].bare)]

    def small(self, names: Iterable[str] | None = None) -> pa.Table:
        """Columns without their content. What is large in sum is mapped from disk."""
        names = [name for name in self.readable if names is None or name in set(names)]
        if not hasattr(self, "_read"):
            self._read: dict[str, Any] = {}
        missing = [name for name in names if name not in self._read]
        if missing:
            table = self._read_small(missing)
            self._read |= {name: table.column(name) for name in missing}
        if not names:
            return pa.table({}).select([]) if not len(self) else pa.table({"": pa.nulls(len(self))}).select([])
        return pa.table({name: self._read[name] for name in names})

    def _read_small(self, names: list[str]) -> pa.Table:
        total, leaves = 0, []
        for shard in self._shards:
            leaves.append(shard.small_leaves(names))
            for group in range(len(shard.groups)):
                total += sum(int(shard.meta(group, leaf)[6][1]) for leaf in leaves[-1])
        self._fetch_small(leaves)
        spool = ValueSpool() if total > HELD_BYTES else None
        tables: list[pa.Table] = []
        writer: Any = None
        sink = None
        for number, shard in enumerate(self._shards):
            try:
                for table in self._tables(number, shard, leaves[number], spool is not None):
                    if spool is None:
                        tables.append(table)
                        continue
                    if writer is None:
                        sink = open(spool.descriptor, "wb", closefd=False)  # noqa: SIM115  # closed below
                        writer = pa.ipc.new_stream(sink, table.schema)
                    writer.write_table(table)
            except BrimError:
                raise
            except _BROKEN as error:
                raise broken(shard.file, error) from error
        if spool is not None and writer is not None and sink is not None:
            writer.close()
            sink.close()
            self.held.append(spool)
            self.notes.append("large columns of text are kept on disk while rows are chosen")
            return pa.ipc.open_stream(pa.memory_map(spool.path)).read_all()
        return pa.concat_tables(tables)

    def _fetch_small(self, leaves: list[list[int]]) -> None:
        """Of shards far away, the small columns of all by few requests."""
        for number, shard in enumerate(self._shards):
            opened = self._opened.get(number)
            if isinstance(opened, RemoteShard):
                opened.fetch(shard.ranges_of(leaves[number]))

    def _tables(self, number: int, shard: _Shard, leaves: list[int], in_batches: bool) -> Iterable[pa.Table]:
        opened = self._open(number)
        try:
            with pq.ParquetFile(ReadableFile(opened), pre_buffer=False, buffer_size=1 << 20) as parquet:
                if in_batches:
                    groups = list(range(len(shard.groups)))
                    for batch in parquet.reader.iter_batches(_BATCH_ROWS, groups, leaves, use_threads=False):
                        yield pa.Table.from_batches([batch]).replace_schema_metadata(None)
                    return
                table = parquet.reader.read_all(column_indices=leaves, use_threads=False)
                if table.num_rows != shard.rows:
                    raise ValueError("its columns have other rows than it says")
                yield table.replace_schema_metadata(None)
        finally:
            if shard.file.remote is None:
                opened.close()

    # Values

    def locate(self, rows: Ints | None = None, names: Sequence[str] | None = None) -> FileTable:
        """The file table of some rows, in their order, and of some columns: their values found, none of them read."""
        names = [name for name in self.schema.names if names is None or name in set(names)]
        wanted = np.arange(len(self), dtype=np.int64) if rows is None else np.unique(rows)
        places = _Places()
        found = {name: self.content[name] for name in names if name in self.content}
        cells: dict[str, list[pa.Array]] = {name: [] for name in found}
        small = self.small([name for name in names if not (name in found and found[name].bare)])
        paths = {name: small.column(name) for name in found if not found[name].bare}
        held: list[object] = list(self.held)
        if found:
            for number, shard in enumerate(self._shards):
                low, high = np.searchsorted(wanted, self.edges[number : number + 2])
                if low == high and rows is not None:
                    continue
                own = wanted[low:high] - self.edges[number]
                finder = _Finder(self, number, shard, places, None if rows is None else own, found)
                for name, column in found.items():
                    of = paths[name].slice(int(self.edges[number]), shard.rows) if name in paths else None
                    cells[name].append(finder.column(column, of))
                finder.close()
        columns = {}
        order = None if rows is None else np.searchsorted(wanted, rows)
        for name in names:
            if name in found:
                kind = pa.int64() if not found[name].is_list else _numbers_type(found[name].kind)
                chunked = pa.chunked_array(cells[name], kind)
                columns[name] = chunked if order is None else chunked.combine_chunks().take(pa.array(order))
            else:
                columns[name] = small.column(name) if rows is None else taken(small.column(name), rows, held)
        fields = [pa.field(name, columns[name].type, nullable=self.schema.field(name).nullable) for name in names]
        features = self.features
        return FileTable(
            rows=pa.table(columns, schema=pa.schema(fields)),
            columns={name: self._file_column(name) for name in found},
            files=places.finish(held),
            features=None if features is None else {name: features[name] for name in names},
            splits=self.splits if rows is None else (Split(self.splits[0].name, 0, len(rows)),),
            far=tuple(file.path for file in self.files if file.remote is not None),
            about=self.about,
            verbatim=True,
            held=tuple(held),
        )

    def _file_column(self, name: str) -> FileColumn:
        column = self.content[name]
        if column.bare:
            return FileColumn("binary", column.is_list, stored=column.kind)
        features = self.features
        known = None if features is None else kind_of_feature(features[name])
        return FileColumn("file" if known is None else known[0], column.is_list, stored=column.kind)


def taken(column: pa.ChunkedArray, rows: Ints, held: list[object]) -> pa.ChunkedArray:
    """Rows of a column; those of one that is large go to disk, a batch at a time."""
    if column.nbytes <= HELD_BYTES:
        return column.take(pa.array(rows))
    spool = ValueSpool()
    schema = pa.schema([pa.field("", column.type)])
    with open(spool.descriptor, "wb", closefd=False) as sink, pa.ipc.new_stream(sink, schema) as writer:
        for start in range(0, len(rows), _BATCH_ROWS):
            part = column.take(pa.array(rows[start : start + _BATCH_ROWS]))
            writer.write_table(pa.table([part], schema=schema))
    held.append(spool)
    return pa.ipc.open_stream(pa.memory_map(spool.path)).read_all().column(0)


def _numbers_type(kind: pa.DataType) -> pa.DataType:
    return pa.large_list(pa.int64()) if pa.types.is_large_list(kind) else pa.list_(pa.int64())


class _Places:
    """Where values lie: in shards, in a spool of what was decoded, in a copy of what was far away."""

    def __init__(self) -> None:
        self.ranges = RangeSetBuilder()
        self.spool, self.copy = ValueSpool(), ValueSpool()
        self.in_spool, self.in_copy = self.ranges.promised(), self.ranges.promised()
        self.newest_ns = 0

    def finish(self, held: list[object]) -> FileSet:
        for spool, promise in ((self.spool, self.in_spool), (self.copy, self.in_copy)):
            if spool.size:
                self.ranges.keep(promise, spool.path, spool.stat(self.newest_ns))
                held.append(spool)
            else:
                spool.close()
        return self.ranges.finish()


class _Copied:
    """The copy of a shard far away: what was fetched of it, at its own places behind `base`."""

    def __init__(self, spool: ValueSpool, base: int, name: str, size: int) -> None:
        self._spool, self._base, self.name, self.size = spool, base, name, size

    def read_at(self, offset: int, size: int) -> bytes:
        return self._spool.read_at(self._base + offset, min(size, self.size - offset))

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        raise NotImplementedError  # values of a copy go into splices

    def close(self) -> None:
        return None


class _Finder:
    """Finds the values of one shard, of all rows or of some (`rows`, in order)."""

    def __init__(
        self, origin: ParquetOrigin, number: int, shard: _Shard, places: _Places, rows: Ints | None,
        names: Iterable[str],
    ) -> None:  # fmt: skip
        self._origin, self._shard, self._places, self._rows = origin, shard, places, rows
        self._number, self._names = number, set(names)
        self._opened = origin._open(number)
        self._spool = places.spool
        self._base: int | None = None  # of the copy of this shard
        self._holder: int | None = None
        places.newest_ns = max(places.newest_ns, shard.file.stat.st_mtime_ns)
        if isinstance(self._opened, RemoteShard):
            self._fetch(self._opened)

    def _fetch(self, opened: RemoteShard) -> None:
        """Of a shard far away, few chosen values are fetched with their pages: their lengths come along."""
        shard = self._shard
        leaves = [leaf.number for name, leaf in shard.leaf_of.items() if name in self._names]
        opened.fetch(shard.index_ranges(leaves))
        needed: list[tuple[int, int]] = []
        for group in range(len(shard.groups)):
            rows = self._in_group(group)
            if rows is not None and not len(rows):
                continue
            for leaf in leaves:
                needed += self._page_ranges(opened, group, leaf, rows)
        if sum(stop - start for start, stop in needed) > FETCHED_BYTES:
            return
        copy = self._places.copy
        self._base = copy.size
        copy.extend(self._base + opened.size)
        for start, data in opened.kept():
            copy.write_at(self._base + start, data)
        for start, data in opened.blocks(join_ranges(needed)):
            copy.write_at(self._base + start, data)
        self._opened = _Copied(copy, self._base, opened.name, opened.size)

    def _page_ranges(self, opened: Readable, group: int, leaf: int, rows: Ints | None) -> list[tuple[int, int]]:
        pages = self._shard.pages(opened, group, leaf)
        meta = self._shard.meta(group, leaf)
        start = min(int(meta[n][1]) for n in (9, 11) if n in meta and meta[n][1])
        if pages is None or rows is None:
            return [(start, start + int(meta[7][1]))]
        chosen = [(page.offset, page.offset + page.size) for page in _with_rows(pages, rows)]
        first = min((page.offset for page in pages), default=start)
        return [(start, first), *chosen] if start < first and chosen else chosen

    def _in_group(self, group: int) -> Ints | None:
        """The chosen rows of a row group, counted in it; None for all."""
        if self._rows is None:
            return None
        start, stop = self._shard.edges[group : group + 2]
        low, high = np.searchsorted(self._rows, [start, stop])
        rows: Ints = self._rows[low:high] - start
        return rows

    def column(self, column: ContentColumn, paths: pa.ChunkedArray | None) -> pa.Array:
        """The numbers of a column's values."""
        shard, leaf = self._shard, self._shard.leaf_of[column.name]
        names = None
        if paths is not None:
            names = one_array(paths if self._rows is None else paths.take(pa.array(self._rows)))
            names = names.flatten() if column.is_list else names
            names = pc.struct_field(names, "path")
        parts, before = [], 0
        try:
            for group in range(len(shard.groups)):
                rows = self._in_group(group)
                count = int(self._shard.groups[group][3][1]) if rows is None else len(rows)
                if not count:
                    continue
                found = self._chunk(group, leaf, rows)
                part, used = self._cells(found, leaf, column, rows, count, names, before)
                parts.append(part)
                before += used
        except BrimError:
            raise
        except _BROKEN as error:
            raise broken(shard.file, error) from error
        kind = _numbers_type(column.kind) if column.is_list else pa.int64()
        return pa.concat_arrays([pa.array([], kind), *parts])

    def _chunk(self, group: int, leaf: Leaf, rows: Ints | None) -> FoundValues:
        meta = self._shard.meta(group, leaf.number)
        total = int(self._shard.groups[group][3][1])
        spooled = self._spool.size
        try:
            reader = ChunkReader(self._opened, meta, leaf, total, self._spool)
            pages = None if rows is None else self._shard.pages(self._opened, group, leaf.number)
            if pages is None or rows is None:
                found = reader.find()
            else:
                found = reader.find(_with_rows(pages, rows), min((page.offset for page in pages), default=0))
        except NotLocated as error:
            self._origin.notes.append(f"{self._shard.file.shown}: {error} needs decoding, by way of the disk")
            return self._decoded(group, leaf)
        if self._spool.size > spooled:
            note = f"{self._shard.file.shown}: compressed values of {leaf.path[0]!r} are decoded to disk"
            if note not in self._origin.notes:
                self._origin.notes.append(note)
        return found

    def _decoded(self, group: int, leaf: Leaf) -> FoundValues:
        """By pyarrow, a few rows at a time."""
        from brim.formats.parquet_decode import decode_chunk

        source = self._origin._open(self._number)
        try:
            return decode_chunk(source, group, leaf, self._spool)
        finally:
            if self._shard.file.remote is None:
                source.close()

    def _cells(
        self, found: FoundValues, leaf: Leaf, column: ContentColumn, rows: Ints | None, count: int,
        names: Any, before: int,
    ) -> tuple[pa.Array, int]:  # fmt: skip
        """The numbers of the values of a row group, and how many names they took."""
        definition, slot_rows = found.definition, found.rows
        value_of = np.cumsum(definition == leaf.max_definition) - 1
        if rows is not None:
            kept = np.isin(slot_rows, rows)
            definition, slot_rows, value_of = definition[kept], slot_rows[kept], value_of[kept]
        if np.count_nonzero(np.diff(slot_rows, prepend=-1)) != count:
            raise ValueError("a column has other rows than its row group")
        element = definition >= leaf.repeated  # a place in a list, or the row itself
        inside = definition[element]
        full = inside == leaf.max_definition
        exists = full if column.bare else inside >= leaf.max_definition - leaf.optional
        numbers = self._numbers(found, value_of[element][full], full[exists], exists, names, before)
        values = np.zeros(len(inside), np.int64)
        values[exists] = numbers
        cells = pa.array(values, mask=~exists)
        used = len(inside)
        if not column.is_list:
            return cells, used
        starts = np.flatnonzero(np.diff(slot_rows, prepend=-1))
        lengths = np.add.reduceat(element.astype(np.int64), starts)
        there = definition[starts] >= leaf.repeated - 1
        large = pa.types.is_large_list(column.kind)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64() if large else pa.int32())
        absent = pa.array(~there) if not there.all() else None
        return (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, cells, mask=absent), used

    def _numbers(self, found: FoundValues, values: Ints, full: Bools, exists: Bools, names: Any, before: int) -> Ints:
        total = int(exists.sum())
        holders, starts, sizes = (
            np.full(total, NO_CONTENT, np.int64),
            np.zeros(total, np.int64),
            np.zeros(total, np.int64),
        )
        spooled = found.spooled[values]
        starts[full], sizes[full] = found.starts[values], found.sizes[values]
        pieces, starts = found.pieces.take(starts) if (starts < 0).any() else (None, starts)
        own = np.flatnonzero(full)[~spooled]
        holders[np.flatnonzero(full)[spooled]] = self._places.in_spool
        if len(own):
            holders[own] = self._own_holder()
            if self._base is not None:
                starts[own] = np.where(starts[own] < 0, starts[own], starts[own] + self._base)
                pieces = None if pieces is None else replace(pieces, starts=pieces.starts + self._base)
        if names is None:
            paths = pa.nulls(total, pa.large_string())
        else:
            if before + len(exists) > len(names):
                raise ValueError("a column has fewer paths than values")
            paths = names.slice(before, len(exists)).filter(pa.array(exists))
        return self._places.ranges.add(paths, holders, starts, sizes, pieces)

    def _own_holder(self) -> int:
        if self._base is not None:
            return self._places.in_copy
        if self._holder is None:
            file = self._shard.file
            self._holder = self._places.ranges.container(file.path, file.stat, file.remote)
        return self._holder

    def close(self) -> None:
        if self._shard.file.remote is None:
            self._opened.close()


def _with_rows(pages: list[PageSpan], rows: Ints) -> list[PageSpan]:
    firsts = np.array([page.first for page in pages], np.int64)
    chosen = np.unique(np.searchsorted(firsts, rows, side="right") - 1)
    return [pages[number] for number in chosen.tolist() if number >= 0]
