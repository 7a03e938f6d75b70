"""Where the chosen values of a dataset's shards lie: in the shards, in a spool, or in a copy of what is far away.

A spool holds values that had to be decoded or fetched, on disk until the table that names them is forgotten. What only
pyarrow can decode is written to one a few rows at a time.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from brim import partition as cuts
from brim.errors import BrimError, DestinationUnavailableError
from brim.file_set import NO_CONTENT, Bools, FileSet, Ints, RangeSetBuilder, Segments
from brim.formats.file_views import FileView
from brim.formats.nested_values import assemble_leaf, map_leaves
from brim.formats.parquet_footer import Leaf
from brim.formats.parquet_levels import levels_of
from brim.formats.parquet_values import ChunkReader, FoundValues, NotLocated, PageSpan, Spooling
from brim.formats.range_readers import Readable
from brim.formats.shard_listing import ListedValues, locate_listed
from brim.records import dataclass
from brim.sources.dataset_files import RemoteShard
from brim.sources.dataset_shard import BROKEN, ContentColumn, DatasetShard, NestedLeaf, broken
from brim.sources.file_table import FileTable, contents_of, one_array
from brim.sources.remote_values import ChunkShape, FarChunk, FarCopy, fetched_ranges, in_pieces
from brim.state.scratch import scratch_folder
from brim.storage.reading import fetch_ranges, fetch_together

_HERE = "/proc/self/fd"


class ValueSpool:
    """A file without a name where the system can open such a one by its number: then a kill leaves nothing behind."""

    name = "the spool"

    def __init__(self, folder: str | None = None) -> None:
        self.descriptor, path = tempfile.mkstemp(prefix="brim-spool-", dir=folder or scratch_folder())
        nameless = os.path.isdir(_HERE)
        self.path = f"{_HERE}/{self.descriptor}" if nameless else path
        self._finalizer = weakref.finalize(self, _remove, self.descriptor, None if nameless else path)
        if nameless:
            os.unlink(path)
        self.size = 0

    def append(self, data: Any) -> int:
        """Where the data begins."""
        start = self.size
        self.write_at(start, data)
        return start

    def write_at(self, offset: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.size = max(self.size, offset + len(view))
        with _failures():
            while view:
                step = os.pwrite(self.descriptor, view, offset)
                view, offset = view[step:], offset + step

    def extend(self, size: int) -> None:
        """Make the file at least this large; what is not written takes no disk."""
        with _failures():
            os.ftruncate(self.descriptor, max(size, self.size))
        self.size = max(size, self.size)

    def read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self.descriptor, size, offset)

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        raise NotImplementedError  # values of a spool go into splices

    def stat(self, mtime_ns: int) -> os.stat_result:
        """What the spool is, with the date of what was spooled: a job that is run again knows it by that."""
        os.utime(self.descriptor, ns=(mtime_ns, mtime_ns))
        return os.fstat(self.descriptor)

    def close(self) -> None:
        self._finalizer()


def _remove(descriptor: int, path: str | None) -> None:
    os.close(descriptor)
    if path is not None:
        os.unlink(path)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DestinationUnavailableError(
            f"{scratch_folder()!r}, the folder for temporary files, cannot be written to: {error.strerror}.",
            hint="Free disk space there, or set TMPDIR to another folder.",
        ) from error


_ROWS = 16


def decode_chunk(file: Readable, group: int, leaf: Leaf, spool: Spooling) -> FoundValues:
    """All values of one column chunk, as ranges of the spool."""
    rows, repetition, definition, starts, sizes = [], [], [], [], []
    before = 0
    with pq.ParquetFile(FileView(file), pre_buffer=False, buffer_size=1 << 20) as parquet:
        for batch in parquet.reader.iter_batches(_ROWS, [group], [leaf.number], use_threads=False):
            field, array = batch.schema.field(0), batch.column(0)
            levels = levels_of(array, field.nullable)
            rows.append(before + np.cumsum(levels.repetition == 0) - 1)
            repetition.append(levels.repetition.astype(np.uint8))
            definition.append(levels.definition.astype(np.uint8))
            before += len(array)
            for value in _values(array).drop_null():
                data = value.as_buffer()
                starts.append(spool.append(data) if data is not None else 0)
                sizes.append(0 if data is None else data.size)
    none = np.zeros(0, np.int64)
    pieces = Segments(np.zeros(1, np.int64), none, none)
    return FoundValues(
        np.concatenate([none, *rows]), np.concatenate([none.astype(np.uint8), *repetition]),
        np.concatenate([none.astype(np.uint8), *definition]),
        np.ones(len(sizes), bool), np.array(starts, np.int64), np.array(sizes, np.int64), pieces,
    )  # fmt: skip


def _values(array: Any) -> Any:
    """The bytes inside of a column, without what is null around them."""
    while not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
        array = array.drop_null()
        array = array.field(0) if pa.types.is_struct(array.type) else array.flatten()
    return array


FETCHED_BYTES = 256_000_000  # of the chosen pages of a shard that is far away: so many are fetched and kept on disk
COPIED_BYTES = 4_000_000_000  # of all of them
_BATCH_BYTES, _BATCH_ROWS = 16_000_000, 1024
_LOOKING = 32  # pages in which lengths are followed at a time


def with_content(table: FileTable, names: Collection[str]) -> FileTable:
    """The table with the bytes of some nested columns in them: on disk, for a source that has no numbers there."""
    kinds = {name: table.nested[name] for name in names}
    spool, schema = ValueSpool(), pa.schema([pa.field(name, kind) for name, kind in kinds.items()])
    sizes = sum((table.cell_bytes(name, table.files.sizes) for name in kinds), np.zeros(len(table), np.int64))

    def filled(cells: Any, kind: pa.DataType) -> pa.Array:
        return pa.array(contents_of(table.files, cells), kind)

    with open(spool.descriptor, "wb", closefd=False) as sink, pa.ipc.new_stream(sink, schema) as writer:
        for start, stop in itertools.pairwise(cuts.fill(sizes, _BATCH_BYTES, _BATCH_ROWS).tolist()):
            rows = table.rows.slice(start, stop - start)
            arrays = [map_leaves(one_array(rows.column(name)), kind, kind, filled) for name, kind in kinds.items()]
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    spool.size = os.fstat(spool.descriptor).st_size
    read, rows = pa.ipc.open_stream(pa.memory_map(spool.path)).read_all(), table.rows
    for name, kind in kinds.items():
        at = rows.column_names.index(name)
        rows = rows.set_column(at, rows.schema.field(name).with_type(kind), read.column(name))
    nested = {name: kind for name, kind in table.nested.items() if name not in kinds}
    return table.replace(rows=rows, nested=nested, held=(*table.held, spool))


def numbers_type(kind: pa.DataType) -> pa.DataType:
    return pa.large_list(pa.int64()) if pa.types.is_large_list(kind) else pa.list_(pa.int64())


class ValuePlaces:
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


class Finder:
    """Finds the values of one shard, of all rows or of some (`rows`, in order)."""

    def __init__(
        self, open_shard: Callable[[], Readable], note: Callable[[str], None], shard: DatasetShard, places: ValuePlaces,
        rows: Ints | None, names: Iterable[str],
    ) -> None:  # fmt: skip
        self._open, self._note = open_shard, note
        self._shard, self._places, self._rows = shard, places, rows
        self._names = set(names)
        self._opened = open_shard()
        self._spool = places.spool
        self._copy: FarCopy | None = None
        self._looked: dict[tuple[int, int], Future[FoundValues]] = {}
        self._holder: int | None = None
        places.newest_ns = max(places.newest_ns, shard.file.stat.st_mtime_ns)
        listing = shard.file.listing
        self._listed: dict[int, ListedValues | None] = {}  # by the number of the leaf
        for name in self._names:
            if listing is None:
                break
            if name in shard.leaf_of:
                self._listed[shard.leaf_of[name].number] = listing.values(shard.leaf_of[name])
            for number, of in enumerate(shard.nested.get(name, ())):
                self._listed[of.leaf.number] = listing.values(of.leaf, number)

    @property
    def told(self) -> bool:
        """Whether values are found without a look at their pages."""
        return bool(self._listed) and None not in self._listed.values()

    @property
    def remote(self) -> RemoteShard | None:
        return self._opened if isinstance(self._opened, RemoteShard) else None

    def index_ranges(self) -> list[tuple[int, int]]:
        return self._shard.index_ranges([leaf.number for leaf in self._shard.content_leaves(self._names)])

    def needed(self) -> list[tuple[int, int]]:
        """Of a shard far away, the pages with chosen values: their lengths are in there."""
        found: list[tuple[int, int]] = []
        for group in range(len(self._shard.groups)):
            rows = self._in_group(group)
            if rows is not None and not len(rows):
                continue
            for leaf in self._unlisted():
                found += fetched_ranges(self._shape(group, leaf.number), rows)
        return found

    def _unlisted(self) -> list[Leaf]:
        """The leaves of which no manifest tells the sizes."""
        leaves = self._shard.content_leaves(self._names)
        return [leaf for leaf in leaves if self._listed.get(leaf.number) is None]

    def _told(self, group: int, leaf: Leaf) -> FoundValues | None:
        """The values of a row group as a manifest and the page index tell, without a look at the pages."""
        listed = self._listed.get(leaf.number)
        meta = self._shard.meta(group, leaf.number)
        if listed is None or meta[4][1] != 0 or 11 in meta:
            return None
        pages = self._shard.pages(self._opened, group, leaf.number)
        first, last = self._shard.edges[group : group + 2].tolist()
        return None if pages is None else locate_listed(listed, leaf.max_definition, pages, first, last)

    def copied(self, copy: FarCopy) -> None:
        """What was needed of the shard is in the copy now."""
        self._copy = copy

    def look(self, pool: ThreadPoolExecutor) -> None:
        """Begin to look for values in the chunks in which that takes requests."""
        for group, rows, _ in self._groups():
            for leaf in self._unlisted():
                if rows is not None and self._shape(group, leaf.number).follows:
                    self._looked[group, leaf.number] = pool.submit(self._located, group, leaf, rows)

    def _shape(self, group: int, leaf: int) -> ChunkShape:
        meta = self._shard.meta(group, leaf)
        start = min(int(meta[n][1]) for n in (9, 11) if n in meta and meta[n][1])
        pages = self._shard.pages(self._opened, group, leaf)
        rows, slots = int(self._shard.groups[group][3][1]), int(meta[5][1])
        return ChunkShape(start, start + int(meta[7][1]), rows, slots, int(meta[4][1]) == 0, pages)

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
        leaf = self._shard.leaf_of[column.name]
        names = None
        if paths is not None:
            names = one_array(paths if self._rows is None else paths.take(pa.array(self._rows)))
            names = names.flatten() if column.is_list else names
            names = pc.struct_field(names, "path")
        parts, before = [], 0
        with self._failures():
            for group, rows, count in self._groups():
                slots = _chosen_slots(self._chunk(group, leaf, rows), leaf.max_definition, rows, count)
                part, used = self._cells(slots, leaf, column, names, before)
                parts.append(part)
                before += used
        kind = numbers_type(column.kind) if column.is_list else pa.int64()
        return pa.concat_arrays([pa.array([], kind), *parts])

    def nested(self, of: NestedLeaf, field: pa.Field) -> pa.Array:
        """The numbers of the values of one leaf inside of a column, in the shape that it has there."""
        none = np.zeros(0, np.int64)
        parts = [assemble_leaf(field, of.path, none, none, pa.array(none))]
        with self._failures():
            for group, rows, count in self._groups():
                slots = _chosen_slots(self._chunk(group, of.leaf, rows, of.levels), len(of.levels), rows, count)
                full = slots.definition == len(of.levels)
                every = np.ones(int(full.sum()), bool)
                numbers = np.zeros(len(full), np.int64)
                numbers[full] = self._numbers(slots.found, slots.value_of[full], every, every, None, 0)
                cells = pa.array(numbers, mask=~full)
                parts.append(assemble_leaf(field, of.path, slots.repetition, slots.definition, cells))
        return pa.concat_arrays(parts)

    def _groups(self) -> Iterator[tuple[int, Ints | None, int]]:
        """The row groups with a row that is wanted: number, rows, how many."""
        for group in range(len(self._shard.groups)):
            rows = self._in_group(group)
            count = int(self._shard.groups[group][3][1]) if rows is None else len(rows)
            if count:
                yield group, rows, count

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except BrimError:
            raise
        except BROKEN as error:
            raise broken(self._shard.file, error) from error

    def _chunk(self, group: int, leaf: Leaf, rows: Ints | None, levels: tuple[int, ...] | None = None) -> FoundValues:
        """All values of a column chunk, or of the pages with some rows. `levels` is what the leaf should have."""
        told = self._told(group, leaf)
        if told is not None:
            return told
        spooled = self._spool.size
        try:
            if levels not in (None, leaf.levels):
                raise NotLocated("its lists")
            looked = self._looked.get((group, leaf.number))
            found = self._located(group, leaf, rows) if looked is None else looked.result()
        except NotLocated as error:
            self._note(f"values of {leaf.path[0]!r} are decoded to disk: {error} needs it")
            return self._decoded(group, leaf)
        if self._spool.size > spooled:
            self._note(f"compressed values of {leaf.path[0]!r} are decoded to disk")
        return found

    def _located(self, group: int, leaf: Leaf, rows: Ints | None) -> FoundValues:
        meta, total = self._shard.meta(group, leaf.number), int(self._shard.groups[group][3][1])
        pages = None if rows is None else self._shard.pages(self._opened, group, leaf.number)
        if self._copy is None:
            reader = ChunkReader(self._opened, meta, leaf, total, self._spool)
        else:
            chunk = FarChunk(self._copy, self._places.copy)
            reader = ChunkReader(chunk, meta, leaf, total, self._spool, chunk.has)
        if pages is None or rows is None:
            return reader.find(rows=rows)
        return reader.find(_with_rows(pages, rows), min((page.offset for page in pages), default=0), rows)

    def _decoded(self, group: int, leaf: Leaf) -> FoundValues:
        """By pyarrow, a few rows at a time."""

        source = self._open()
        try:
            return decode_chunk(source, group, leaf, self._spool)
        finally:
            if self._shard.file.remote is None:
                source.close()

    def _cells(self, slots: _Slots, leaf: Leaf, column: ContentColumn, names: Any, before: int) -> tuple[pa.Array, int]:
        """The numbers of the values of a row group, and how many names they took."""
        definition, slot_rows = slots.definition, slots.rows
        element = definition >= leaf.repeated  # a place in a list, or the row itself
        inside = definition[element]
        full = inside == leaf.max_definition
        exists = full if column.bare else inside >= leaf.max_definition - leaf.optional
        numbers = self._numbers(slots.found, slots.value_of[element][full], full[exists], exists, names, before)
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
        if self._copy is not None and len(own):
            # What is in pieces was fetched as a whole.
            here = (starts[own] < 0) | self._copy.contains(starts[own], starts[own] + sizes[own])
            copied, own = own[here], own[~here]
            holders[copied] = self._places.in_copy
            starts[copied] = np.where(starts[copied] < 0, starts[copied], starts[copied] + self._copy.base)
            pieces = None if pieces is None else replace(pieces, starts=pieces.starts + self._copy.base)
        if len(own):
            holders[own] = self._own_holder()
        if names is None:
            paths = pa.nulls(total, pa.large_string())
        else:
            if before + len(exists) > len(names):
                raise ValueError("a column has fewer paths than values")
            paths = names.slice(before, len(exists)).filter(pa.array(exists))
        return self._places.ranges.add(paths, holders, starts, sizes, pieces)

    def _own_holder(self) -> int:
        if self._holder is None:
            file = self._shard.file
            self._holder = self._places.ranges.container(file.path, file.stat, file.remote)
        return self._holder

    def close(self) -> None:
        if self._shard.file.remote is None:
            self._opened.close()


def fetch_chosen(finders: Sequence[Finder], places: ValuePlaces) -> None:
    """Of shards far away of which no manifest tells where values lie, these are found by a look at their pages: few
    are fetched at once, several shards together, and kept on disk."""
    far = [(finder, remote) for finder in finders if (remote := finder.remote) is not None]
    fetch_together([(remote, finder.index_ranges()) for finder, remote in far])
    copy, left = places.copy, COPIED_BYTES
    wanted: list[tuple[RemoteShard, list[tuple[int, int]]]] = []
    copies: dict[int, FarCopy] = {}
    looking = []
    for finder, remote in far:
        if finder.told:
            continue
        needed = finder.needed()
        size = sum(stop - start for start, stop in needed)
        left -= size
        if left < 0 or size > FETCHED_BYTES:
            continue  # it is read where it is
        copies[id(remote)] = FarCopy(remote, copy.size, needed)
        copy.extend(copy.size + remote.size)
        for start, data in remote.kept():
            copy.write_at(copies[id(remote)].base + start, data)
        looking.append((finder, copies[id(remote)]))
        wanted.append((remote, in_pieces(needed)))
    for remote, start, data in fetch_ranges(wanted):
        copy.write_at(copies[id(remote)].base + start, data)
    with ThreadPoolExecutor(_LOOKING, "brim-look") as pool:
        for finder, of in looking:
            finder.copied(of)
            finder.look(pool)


@dataclass(frozen=True, slots=True)
class _Slots:
    """The slots of the chosen rows of a row group, and for those that are values which of the values found."""

    found: FoundValues
    rows: Ints
    repetition: Ints
    definition: Ints
    value_of: Ints


def _chosen_slots(found: FoundValues, full: int, rows: Ints | None, count: int) -> _Slots:
    value_of = np.cumsum(found.definition == full) - 1
    kept: Any = slice(None) if rows is None else np.isin(found.rows, rows)
    slots = _Slots(found, found.rows[kept], found.repetition[kept], found.definition[kept], value_of[kept])
    if np.count_nonzero(np.diff(slots.rows, prepend=-1)) != count:
        raise ValueError("a column has other rows than its row group")
    return slots


def _with_rows(pages: list[PageSpan], rows: Ints) -> list[PageSpan]:
    firsts = np.array([page.first for page in pages], np.int64)
    chosen = np.unique(np.searchsorted(firsts, rows, side="right") - 1)
    return [pages[number] for number in chosen.tolist() if number >= 0]
