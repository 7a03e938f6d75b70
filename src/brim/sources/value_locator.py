"""Locate the chosen values of a dataset's shards: in the shards, in a spool, or in a copy of fetched ranges.

`ChunkLocator` answers where the values of a column chunk are: by the listing in a manifest, else by the pages of the
chunk, else by decoding it to a spool. `ShardValues` makes columns of numbers of values from that, for some rows.
`fetch_chosen` fetches the pages of remote shards beforehand, those of several shards together.
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

from brim.errors import BrimError
from brim.file_set import NO_CONTENT, Bools, FileSet, Ints, RangeSetBuilder
from brim.formats.nested_values import assemble_leaf
from brim.formats.parquet_footer import Leaf
from brim.formats.parquet_values import ChunkReader, FoundValues, NotLocated
from brim.formats.range_readers import Readable
from brim.formats.shard_listing import ListedValues, locate_listed
from brim.records import dataclass
from brim.sources.dataset_files import RemoteShard
from brim.sources.dataset_shard import BROKEN, ContentColumn, DatasetShard, NestedLeaf, broken
from brim.sources.file_table import one_array
from brim.sources.remote_values import ChunkShape, FarChunk, FarCopy, fetched_ranges, in_pieces
from brim.sources.value_spool import ValueSpool, decode_chunk
from brim.storage.reading import fetch_ranges, fetch_together

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

    def needed_ranges(self) -> list[tuple[int, int]]:
        """Return the pages with chosen values of a remote shard: the lengths of the values are in them."""
        chunks = self.chunks
        leaf_numbers = chunks.unlisted_leaves
        shapes = ((chunks.shape(g, leaf.number), rows) for g, rows, _ in self.groups() for leaf in leaf_numbers)
        return [byte_range for shape, rows in shapes for byte_range in fetched_ranges(shape, rows)]

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
                    is_large = pa.types.is_large_list(column.kind)
                    edges = np.concatenate([[0], np.cumsum(lengths)])
                    offsets = pa.array(edges, pa.int64() if is_large else pa.int32())
                    mask = pa.array(is_null) if is_null.any() else None
                    array = (pa.LargeListArray if is_large else pa.ListArray).from_arrays(offsets, array, mask=mask)
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
    """Fetch the pages with chosen values of remote shards, and begin to follow lengths in their other pages.

    If a manifest lists the values of a shard, or a shard needs too much, nothing is fetched here.
    """
    remotes = [(s, s.chunks.source) for s in shards if isinstance(s.chunks.source, RemoteShard)]
    chunks = [(source, values.chunks) for values, source in remotes]
    fetch_together([(source, c.shard.index_ranges(c.shard.content_leaves(c.names))) for source, c in chunks])
    remaining = COPIED_BYTES
    requests: list[tuple[RemoteShard, list[tuple[int, int]]]] = []
    bases: dict[RemoteShard, int] = {}
    for values, remote in remotes:
        if not values.chunks.unlisted_leaves:
            continue
        needed = values.needed_ranges()
        size = sum(stop - start for start, stop in needed)
        remaining -= size
        if remaining < 0 or size > FETCHED_BYTES:
            continue  # it is read where it is
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
