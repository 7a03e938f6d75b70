"""Locate the chosen values of a dataset's shards: in the shards, in a spool, or in a copy of fetched ranges.

`ChunkLocator` answers where the values of a column chunk are: by the listing in a manifest, else by the pages of the
chunk, else by decoding it to a spool. `ShardValues` makes columns of numbers of values from that, for some rows.

`fetch_chosen` fetches the pages of remote shards beforehand, those of several shards together. If no listing has the
sizes of values, each precedes its value, so that the offset of a value depends on all previous ones in its page. Pages
of small values, and those of which most is needed, are fetched. In other pages the lengths are followed by a tiny
request each, in many pages at once. The cheaper way is chosen per page: a request costs as much as some bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from brim.errors import BrimError
from brim.file_set import NO_CONTENT, Bools, FileSet, Ints, RangeSetBuilder, Segments
from brim.formats.parquet_footer import Leaf
from brim.formats.parquet_levels import assemble_leaf, levels_of, list_array
from brim.formats.parquet_values import ChunkReader, FoundValues, NotLocated, PageSpan
from brim.formats.range_readers import FileView, Readable
from brim.formats.shard_listing import ListedValues, locate_listed
from brim.records import dataclass
from brim.sources.dataset_files import Range, RemoteShard
from brim.sources.file_table import one_array
from brim.sources.parquet_shards import BROKEN, ContentColumn, DatasetShard, NestedLeaf, broken
from brim.state.scratch import ValueSpool
from brim.storage.reading import fetch_ranges, fetch_together, join_ranges

FETCHED_BYTES = 256_000_000  # at most, of the chosen pages of a remote shard
COPIED_BYTES = 4_000_000_000  # at most, of those of all shards
_THREADS = 32  # pages in which lengths are followed at a time


class ValueStores:
    """The files that hold values: shards, a spool of decoded values, and a copy of the fetched parts of shards."""

    def __init__(self) -> None:
        self.ranges = RangeSetBuilder()
        self.spool, self.copy = ValueSpool(), ValueSpool()
        self.in_spool, self.in_copy = self.ranges.promised(), self.ranges.promised()
        self.newest_ns = 0

    def finish(self, spools: list[object]) -> FileSet:
        """Return the values; `spools` gets the spools that must exist as long as they do."""
        for spool, promise in ((self.spool, self.in_spool), (self.copy, self.in_copy)):
            if spool.size:
                self.ranges.keep(promise, spool.path, spool.stat(self.newest_ns))
                spools.append(spool)
            else:
                spool.close()
        return self.ranges.finish()


class ChunkLocator:
    """Locates the values of column chunks of one shard, in the cheapest way."""

    def __init__(
        self, open_shard: Callable[[], Readable], note: Callable[[str], None], shard: DatasetShard, stores: ValueStores,
        names: Iterable[str],
    ) -> None:  # fmt: skip
        self._open, self._note, self._stores = open_shard, note, stores
        self.shard, self.names = shard, set(names)
        self.source = open_shard()
        self.copy: FarCopy | None = None  # of the fetched parts, if the shard is remote
        self._started: dict[tuple[int, int], Future[FoundValues]] = {}
        self._listed: dict[int, ListedValues | None] = {}  # by the number of the leaf
        listing = shard.file.listing
        for name in self.names:
            if listing is None:
                break
            if name in shard.leaf_of:
                self._listed[shard.leaf_of[name].number] = listing.values(shard.leaf_of[name])
            for number, nested in enumerate(shard.nested.get(name, ())):
                self._listed[nested.leaf.number] = listing.values(nested.leaf, number)

    @property
    def unlisted_leaves(self) -> list[Leaf]:
        """The leaves whose values no manifest lists."""
        leaf_numbers = self.shard.content_leaves(self.names)
        return [leaf for leaf in leaf_numbers if self._listed.get(leaf.number) is None]

    def shape(self, group: int, leaf: int) -> ChunkShape:
        meta = self.shard.meta(group, leaf)
        start = min(int(meta[n][1]) for n in (9, 11) if n in meta and meta[n][1])
        pages = self.shard.pages(self.source, group, leaf)
        rows, slots = int(self.shard.groups[group][3][1]), int(meta[5][1])
        return ChunkShape(start, start + int(meta[7][1]), rows, slots, int(meta[4][1]) == 0, pages)

    def start(self, pool: ThreadPoolExecutor, group: int, leaf: Leaf, rows: Ints) -> None:
        """Begin to locate values in another thread, because it takes many requests."""
        self._started[group, leaf.number] = pool.submit(self._in_pages, group, leaf, rows)

    def locate(self, group: int, leaf: Leaf, rows: Ints | None, levels: tuple[int, ...] | None = None) -> FoundValues:
        """Return the values of a chunk, or at least those of some rows. `levels` are the expected ones."""
        located = self._in_manifest(group, leaf)
        if located is not None:
            return located
        spool, size = self._stores.spool, self._stores.spool.size
        try:
            if levels not in (None, leaf.levels):
                raise NotLocated("its lists")
            started = self._started.get((group, leaf.number))
            located = self._in_pages(group, leaf, rows) if started is None else started.result()
        except NotLocated as error:
            self._note(f"values of {leaf.path[0]!r} are decoded to disk: {error} needs it")
            source = self._open()
            try:
                return decode_chunk(source, group, leaf, spool)
            finally:
                if self.shard.file.remote is None:
                    source.close()
        if spool.size > size:
            self._note(f"compressed values of {leaf.path[0]!r} are decoded to disk")
        return located

    def _in_manifest(self, group: int, leaf: Leaf) -> FoundValues | None:
        """Locate values by their sizes in a manifest and the page index, without reading pages."""
        listed, meta = self._listed.get(leaf.number), self.shard.meta(group, leaf.number)
        if listed is None or meta[4][1] != 0 or 11 in meta:
            return None
        pages = self.shard.pages(self.source, group, leaf.number)
        first, last = self.shard.edges[group : group + 2].tolist()
        return None if pages is None else locate_listed(listed, leaf.max_definition, pages, first, last)

    def _in_pages(self, group: int, leaf: Leaf, rows: Ints | None) -> FoundValues:
        meta, total = self.shard.meta(group, leaf.number), int(self.shard.groups[group][3][1])
        pages = None if rows is None else self.shard.pages(self.source, group, leaf.number)
        if self.copy is None:
            reader = ChunkReader(self.source, meta, leaf, total, self._stores.spool)
        else:
            chunk = FarChunk(self.copy, self._stores.copy)
            reader = ChunkReader(chunk, meta, leaf, total, self._stores.spool, chunk.has)
        if pages is None or rows is None:
            return reader.find(rows=rows)
        firsts = np.array([page.first for page in pages], np.int64)
        with_rows = np.unique(np.searchsorted(firsts, rows, side="right") - 1)
        row_pages = [pages[number] for number in with_rows.tolist() if number >= 0]
        return reader.find(row_pages, min((page.offset for page in pages), default=0), rows)


class ShardValues:
    """The values of one shard, of all rows or of some (`rows`, in order), as columns of numbers."""

    def __init__(self, chunks: ChunkLocator, stores: ValueStores, rows: Ints | None) -> None:
        self.chunks, self._stores, self._rows = chunks, stores, rows
        self._shard = chunks.shard
        self._own_holder: int | None = None
        stores.newest_ns = max(stores.newest_ns, self._shard.file.stat.st_mtime_ns)

    def groups(self) -> Iterator[tuple[int, Ints | None, int]]:
        """Yield the row groups with a chosen row: number, the rows in it (None for all), and how many."""
        for group in range(len(self._shard.groups)):
            rows, count = None, int(self._shard.groups[group][3][1])
            if self._rows is not None:
                start, stop = self._shard.edges[group : group + 2]
                low, high = np.searchsorted(self._rows, [start, stop])
                rows, count = self._rows[low:high] - start, int(high - low)
            if count:
                yield group, rows, count

    def column(self, column: ContentColumn, paths: pa.ChunkedArray | None) -> pa.Array:
        """Return the numbers of a column's values. `paths` are those of all its rows, if it has files."""
        leaf, names, parts = self._shard.leaf_of[column.name], None, []
        if paths is not None:
            cells = one_array(paths if self._rows is None else paths.take(pa.array(self._rows)))
            names = pc.struct_field(cells.flatten() if column.is_list else cells, "path")
        with self._failures():
            for slots in self._slots(leaf, leaf.max_definition):
                definition = slots.definition
                is_element = definition >= leaf.repeated  # an element of a list, or the row itself
                inside = definition[is_element]
                is_value = inside == leaf.max_definition
                exists = is_value if column.bare else inside >= leaf.max_definition - leaf.optional
                own_names = None
                if names is not None:
                    if len(inside) > len(names):
                        raise ValueError("a column has fewer paths than values")
                    own_names, names = names.slice(0, len(inside)), names.slice(len(inside))
                    own_names = own_names.filter(pa.array(exists))
                values = slots.value_of[is_element][is_value]
                numbers = np.zeros(len(inside), np.int64)
                numbers[exists] = self._add(slots.found, values, is_value[exists], own_names)
                array = pa.array(numbers, mask=~exists)
                if column.is_list:
                    starts = np.flatnonzero(np.diff(slots.rows, prepend=-1))
                    lengths = np.add.reduceat(is_element.astype(np.int64), starts)
                    is_null = definition[starts] < leaf.repeated - 1
                    mask = pa.array(is_null) if is_null.any() else None
                    array = list_array(numbers_type(column.kind), lengths, array, mask)
                parts.append(array)
        kind = numbers_type(column.kind) if column.is_list else pa.int64()
        return pa.concat_arrays([pa.array([], kind), *parts])

    def nested(self, leaf: NestedLeaf, field: pa.Field) -> pa.Array:
        """Return the numbers of the values of a leaf inside of a column, in the shape that it has there."""
        none = np.zeros(0, np.int64)
        parts = [assemble_leaf(field, leaf.path, none, none, pa.array(none))]
        with self._failures():
            for slots in self._slots(leaf.leaf, len(leaf.levels), leaf.levels):
                is_value = slots.definition == len(leaf.levels)
                numbers = np.zeros(len(is_value), np.int64)
                numbers[is_value] = self._add(
                    slots.found, slots.value_of[is_value], np.ones(is_value.sum(), bool), None
                )
                cells = pa.array(numbers, mask=~is_value)
                parts.append(assemble_leaf(field, leaf.path, slots.repetition, slots.definition, cells))
        return pa.concat_arrays(parts)

    def _slots(self, leaf: Leaf, max_definition: int, levels: tuple[int, ...] | None = None) -> Iterator[_Slots]:
        """Yield the slots of the chosen rows of each row group."""
        for group, rows, count in self.groups():
            cells = self.chunks.locate(group, leaf, rows, levels)
            value_of = np.cumsum(cells.definition == max_definition) - 1
            mask: Any = slice(None) if rows is None else np.isin(cells.rows, rows)
            slots = _Slots(cells, cells.rows[mask], cells.repetition[mask], cells.definition[mask], value_of[mask])
            if np.count_nonzero(np.diff(slots.rows, prepend=-1)) != count:
                raise ValueError("a column has other rows than its row group")
            yield slots

    def _add(self, located: FoundValues, values: Ints, has_bytes: Bools, names: Any) -> Ints:
        """Add files to the set of values, and return their numbers.

        `has_bytes` has an entry for each file, and `values` the number in `located` of each that has bytes.
        """
        total, stores, copy = len(has_bytes), self._stores, self.chunks.copy
        holders = np.full(total, NO_CONTENT, np.int64)
        starts, sizes = np.zeros(total, np.int64), np.zeros(total, np.int64)
        starts[has_bytes], sizes[has_bytes] = located.starts[values], located.sizes[values]
        segments, starts = located.pieces.take(starts) if (starts < 0).any() else (None, starts)
        in_spool, files = located.spooled[values], np.flatnonzero(has_bytes)
        holders[files[in_spool]] = stores.in_spool
        own = files[~in_spool]
        if copy is not None and len(own):
            # All pieces of a value were fetched with its page.
            is_copied = (starts[own] < 0) | copy.contains(starts[own], starts[own] + sizes[own])
            copied, own = own[is_copied], own[~is_copied]
            holders[copied] = stores.in_copy
            starts[copied] = np.where(starts[copied] < 0, starts[copied], starts[copied] + copy.base)
            segments = None if segments is None else replace(segments, starts=segments.starts + copy.base)
        if len(own):
            if self._own_holder is None:
                file = self._shard.file
                self._own_holder = stores.ranges.container(file.path, file.stat, file.remote)
            holders[own] = self._own_holder
        paths = pa.nulls(total, pa.large_string()) if names is None else names
        return stores.ranges.add(paths, holders, starts, sizes, segments)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except BrimError:
            raise
        except BROKEN as error:
            raise broken(self._shard.file, error) from error

    def close(self) -> None:
        if self._shard.file.remote is None:
            self.chunks.source.close()


@dataclass(frozen=True, slots=True)
class _Slots:
    """The slots of some rows of a row group, and for each slot the number of its value, or of the one before."""

    found: FoundValues
    rows: Ints
    repetition: Ints
    definition: Ints
    value_of: Ints


def numbers_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column of lists with numbers in place of files."""
    return pa.large_list(pa.int64()) if pa.types.is_large_list(kind) else pa.list_(pa.int64())


def fetch_chosen(shards: Sequence[ShardValues], stores: ValueStores) -> None:
    """Fetch the pages of remote shards that have chosen values, or begin to follow lengths in them if that is cheaper.

    Shards whose values a manifest lists, and those that need too many bytes, are skipped.
    """
    remotes = [(s, s.chunks.source) for s in shards if isinstance(s.chunks.source, RemoteShard)]
    chunks = [(source, values.chunks) for values, source in remotes]
    fetch_together([(source, c.shard.index_ranges(c.shard.content_leaves(c.names))) for source, c in chunks])
    remaining = COPIED_BYTES
    requests: list[tuple[RemoteShard, list[tuple[int, int]]]] = []
    bases: dict[RemoteShard, int] = {}
    for values, remote in remotes:
        leaves, shape = values.chunks.unlisted_leaves, values.chunks.shape
        if not leaves:
            continue
        # The pages with chosen values: the lengths of the values are in them.
        shapes = [(shape(group, leaf.number), rows) for group, rows, _ in values.groups() for leaf in leaves]
        needed = [byte_range for chunk, rows in shapes for byte_range in fetched_ranges(chunk, rows)]
        size = sum(stop - start for start, stop in needed)
        remaining -= size
        if remaining < 0 or size > FETCHED_BYTES:
            continue  # too much to copy: its values are read from the shard itself
        copy = values.chunks.copy = FarCopy(remote, stores.copy.size, needed)
        stores.copy.extend(stores.copy.size + remote.size)
        for start, data in remote.kept_blocks():
            stores.copy.write_at(copy.base + start, data)
        bases[remote] = copy.base
        requests.append((remote, in_pieces(needed)))
    for remote, start, data in fetch_ranges(requests):
        stores.copy.write_at(bases[remote] + start, data)
    with ThreadPoolExecutor(_THREADS, "brim-look") as pool:
        for values, remote in remotes:
            for group, rows, _ in values.groups() if remote in bases else ():
                for leaf in values.chunks.unlisted_leaves:
                    if rows is not None and values.chunks.shape(group, leaf.number).follows:
                        values.chunks.start(pool, group, leaf, rows)


DECODED_ROWS = 16  # of a column of bytes, decoded at a time


def decode_chunk(file: Readable, group: int, leaf: Leaf, spool: ValueSpool) -> FoundValues:
    """Decode all values of a column chunk to the spool with pyarrow, a few rows at a time."""
    parts: list[list[Any]] = [[], [], []]  # rows and levels
    starts, sizes, row_count = list[int](), list[int](), 0
    with pq.ParquetFile(FileView(file), pre_buffer=False, buffer_size=1 << 20) as parquet:
        for batch in parquet.reader.iter_batches(DECODED_ROWS, [group], [leaf.number], use_threads=False):
            field, array = batch.schema.field(0), batch.column(0)
            levels = levels_of(array, field.nullable)
            rows = row_count + np.cumsum(levels.repetition == 0) - 1
            for part, values in zip(parts, (rows, levels.repetition, levels.definition), strict=True):
                part.append(values)
            row_count += len(array)
            while not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
                array = array.drop_null()  # only lists and structs that hold values are looked into
                array = array.field(0) if pa.types.is_struct(array.type) else array.flatten()
            for value in array.drop_null():
                data = value.as_buffer()
                starts.append(spool.append(data) if data is not None else 0)
                sizes.append(0 if data is None else data.size)
    none = np.zeros(0, np.int64)
    columns = [np.concatenate([none, *part]) for part in parts]
    return FoundValues(
        columns[0], columns[1].astype(np.uint8), columns[2].astype(np.uint8), np.ones(len(sizes), bool),
        np.array(starts, np.int64), np.array(sizes, np.int64), Segments(np.zeros(1, np.int64), none, none),
    )  # fmt: skip


REQUEST_BYTES = 64 << 10  # the cost of a request among others; join_ranges fetches as large a gap between two
_WAIT_BYTES = 192 << 10  # of one among many that each wait for the previous one: 20 ms of 80 Mbit/s
_FEW_HOPS = 32
_SLACK = 1.02  # values of one page are about of one size
_HEAD_BYTES = 4096  # the header of a page and its levels
_TINY_BYTES = 512
_REQUEST_BYTES = 16 << 20  # at most, of fetched pages


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """A column chunk: its range, how many rows and slots it has, and its pages if there is an index."""

    start: int
    stop: int
    rows: int
    slots: int
    plain: bool  # not compressed
    pages: Sequence[PageSpan] | None

    @property
    def follows(self) -> bool:
        """Return whether its lengths can be followed, and its values are so large that it may be cheaper."""
        return self.plain and self.slots > 0 and (self.stop - self.start) // self.slots >= REQUEST_BYTES


def fetched_ranges(chunk: ChunkShape, rows: Ints | None) -> list[Range]:
    """Return the ranges of a chunk to fetch for the values of some rows (in order), or of all."""
    if rows is None or (chunk.pages is None and not chunk.follows):
        return [(chunk.start, chunk.stop)]
    pages = chunk.pages
    if pages is None:
        pages = [PageSpan(chunk.start, chunk.stop - chunk.start, 0, chunk.rows)]
    ranges: list[Range] = []
    edges = np.searchsorted(rows, [page.first for page in pages])
    for page, chosen_rows in zip(pages, np.split(rows, edges[1:]), strict=True):
        if not len(chosen_rows):
            continue
        size = page.size
        if chunk.follows:
            # About how much of the page holds the values up to the last chosen one; or the cost to follow the lengths
            # to it, and to request the values then.
            count, row_bytes = int(chosen_rows[-1]) - page.first + 1, page.size / max(page.stop - page.first, 1)
            size = min(page.size, int(count * row_bytes * _SLACK) + _HEAD_BYTES)
            hop_bytes = REQUEST_BYTES if count + 1 <= _FEW_HOPS else _WAIT_BYTES
            request = 0 if ranges and ranges[-1][1] == page.offset else REQUEST_BYTES
            if size + request > (count + 1) * hop_bytes + len(chosen_rows) * row_bytes:
                continue
        ranges.append((page.offset, page.offset + size))
    first = min((page.offset for page in pages), default=chunk.start)
    return [(chunk.start, first), *ranges] if chunk.start < first and ranges and not chunk.follows else ranges


def in_pieces(ranges: Sequence[Range]) -> list[Range]:
    """Cut ranges into requests, of which one is held at a time."""
    step = _REQUEST_BYTES
    return [(first, min(first + step, stop)) for start, stop in ranges for first in range(start, stop, step)]


class FarCopy:
    """The fetched ranges of a remote shard: in a file, at their offsets in the shard plus `base`."""

    def __init__(self, remote: RemoteShard, base: int, ranges: Sequence[Range]) -> None:
        self.remote, self.base = remote, base
        copied = [(start, start + len(data)) for start, data in remote.kept_blocks()]
        self._present = join_ranges([*ranges, *copied], gap=0, most_bytes=None)
        self._starts = np.array([start for start, _ in self._present], np.int64)
        self._stops = np.array([stop for _, stop in self._present], np.int64)

    def contains(self, starts: Ints, stops: Ints) -> Bools:
        """Return which ranges are in the copy completely."""
        if not len(self._starts):
            return np.zeros(len(starts), bool)
        index = np.searchsorted(self._starts, starts, side="right") - 1
        return np.asarray((index >= 0) & (stops <= self._stops[index]), bool)


class FarChunk:
    """A shard to find values in: fetched ranges from the copy, others by tiny requests. For one thread."""

    def __init__(self, copy: FarCopy, spool: ValueSpool) -> None:
        self._copy, self._spool = copy, spool
        self.name, self.size = copy.remote.name, copy.remote.size
        self._window_start, self._window = 0, b""

    def has(self, start: int, stop: int) -> bool:
        return bool(self._copy.contains(np.array([start]), np.array([stop]))[0])

    def read_at(self, offset: int, size: int) -> bytes:
        size = max(min(size, self.size - offset), 0)
        if self.has(offset, offset + size):
            return self._spool.read_at(self._copy.base + offset, size)
        if not self._window_start <= offset <= offset + size <= self._window_start + len(self._window):
            stop = min(offset + max(size, _TINY_BYTES), self.size)
            self._window_start, self._window = offset, self._copy.remote.fetch(offset, stop)
        start = offset - self._window_start
        return self._window[start : start + size]

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        raise NotImplementedError  # values of a copy go into splices

    def close(self) -> None:
        return None
