"""The spliced Parquet shard: pyarrow writes the small columns, the file bytes are left where they are.

pyarrow writes a *skeleton* (`skeleton.py`), in which every file is an empty value. Its footer is decoded,
the chunks of the file columns' `bytes` leaves are replaced by plain pages made of lengths and file segments,
all others are moved to their new places, and the footer and page index are written again to match. The
result is an ordinary Parquet file whose size is known before a source file is opened.

Byte layout and the reasons for it: docs/internals.md. Reading such a shard back: parquet_index.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim import cuts
from brim.cuts import HELD_VALUE_BYTES
from brim.file_set import FileSet, Ints
from brim.formats import thrift
from brim.formats.nested_values import byte_leaves
from brim.formats.parquet_levels import Levels, encode_levels, levels_of
from brim.formats.parquet_values import leaves_of
from brim.formats.splice import Splice, SpliceBuilder
from brim.formats.thrift import I32, I64, LIST, STRUCT, Struct
from brim.records import dataclass
from brim.state.scratch import Scratch


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A Parquet file, in memory or in a scratch file."""

    held: memoryview | Scratch
    size: int

    @property
    def scratch(self) -> Scratch | None:
        return self.held if isinstance(self.held, Scratch) else None

    def read(self, start: int, size: int) -> bytes:
        if isinstance(self.held, Scratch):
            return self.held.read(start, size)
        return bytes(self.held[start : start + size])

    def move(self, out: SpliceBuilder, start: int, size: int) -> None:
        """Let a range of it be the next part of a splice."""
        if isinstance(self.held, Scratch):
            out.scratch(start, size)
        else:
            out.literal(self.read(start, size))


def write_skeleton(
    table: pa.Table, groups: Ints, value_bytes: int, folder: str | None, huge: Collection[str] = ()
) -> Skeleton:
    """Write the rows, a row group for each run of `groups`; `value_bytes` says whether to do it on disk.

    Columns of `huge` values get no dictionary and no statistics: pyarrow would hold such a value eight times.
    """
    options = _options(table, huge)
    if value_bytes <= HELD_VALUE_BYTES:
        sink = pa.BufferOutputStream()
        _write(sink, table, groups, options)
        data = memoryview(sink.getvalue()).cast("B")
        return Skeleton(data, len(data))
    scratch = Scratch(folder)
    with open(scratch.descriptor, "wb", closefd=False) as file:
        _write(file, table, groups, options)
        return Skeleton(scratch, file.tell())


def _options(table: pa.Table, huge: Collection[str]) -> dict[str, Any]:
    if not huge:
        return {}
    empty = pa.BufferOutputStream()
    pq.write_table(table.slice(0, 0), empty)
    schema = pq.ParquetFile(pa.BufferReader(empty.getvalue())).schema
    leaves = [schema.column(number).path for number in range(len(schema.names))]
    others = [leaf for leaf in leaves if not any(leaf == name or leaf.startswith(f"{name}.") for name in huge)]
    return {"use_dictionary": others or False, "write_statistics": others or False}


def _write(sink: object, table: pa.Table, groups: Ints, options: dict[str, Any]) -> None:
    with pq.ParquetWriter(sink, table.schema, compression="snappy", write_page_index=True, **options) as writer:
        for start, end in zip(groups[:-1].tolist(), groups[1:].tolist(), strict=True):
            writer.write_table(table.slice(start, end - start), row_group_size=end - start)


LEAF = "bytes"
# Constant, so that the bytes depend on the format and not on the release; the shape "NAME version X.Y.Z
# (build B)" is what parquet-java parses.
CREATED_BY = b"brim version 1.0.0 (build 1)"

ROW_GROUP_BYTES = 100_000_000  # readers hold a row group; the Hub's viewer refuses more than about 300 MB
ROW_GROUP_ROWS = 1_048_576
PAGE_BYTES = 1 << 20
PAGE_ROWS = 20_000
MAX_PAGE_BYTES = 2**31 - 1
_TOGETHER = 8192  # values of pages, or pages, whose segments are made at a time
# The most one row may hold in one file column. 2,147,483,630 bytes read back everywhere, 2,147,483,640 not.
MAX_CELL_BYTES = 2_147_483_630


def cell_bytes(sizes: Ints) -> Ints:
    """What files of these sizes take inside a page: each carries a four-byte length."""
    return sizes + 4


def splice_parquet(
    table: pa.Table, files: FileSet, numbers: Mapping[str, Ints], scratch_folder: str | None = None
) -> Splice:
    """The shard that holds `table`, with the files of `numbers` as the content of its file columns.

    A file column is bytes, or a struct with a `bytes` leaf, or lists of such; or it has several leaves of bytes inside
    (nested_values.py). Its present bytes are empty; `numbers` gives for each file column the file numbers of its
    present values, in order, those of one leaf after the other.
    `scratch_folder` is for what is too large to hold in memory, until the splice is closed.
    """
    columns = {name: _columns_of(table, name, files, numbers[name]) for name in numbers}
    every = [column for leaves in columns.values() for column in leaves]
    files_before = cuts.running(sum((column.row_bytes for column in every), np.zeros(len(table), np.int64)))
    plain = [field.name for field in table.schema if field.name not in columns or not is_of_files(field.type)]
    values_before, huge = _weigh(table, plain)
    limits = [(files_before, ROW_GROUP_BYTES), (values_before, cuts.GROUP_VALUE_BYTES)]
    groups = cuts.fill_all(limits, ROW_GROUP_ROWS)
    # pyarrow's work and ours at once. A worker writes all its shards in its own thread: Arrow's allocator keeps tens of
    # megabytes for each thread that has written, also after that thread has ended.
    with ThreadPoolExecutor(1, "pages") as beside:
        making = beside.submit(lambda: {id(column): _pages_of(column, files, groups) for column in every})
        skeleton = write_skeleton(table, groups, int(values_before[-1]), scratch_folder, huge)
        pages = making.result()
    length = int.from_bytes(skeleton.read(skeleton.size - 8, 4), "little")
    footer, _ = thrift.decode(skeleton.read(skeleton.size - 8 - length, length))

    out = SpliceBuilder(files, skeleton.scratch)
    out.literal(b"PAR1")
    chunks: list[_Chunk] = []
    raw = [leaf.number for leaf in leaves_of(footer) if leaf.is_raw and leaf.path[0] in columns]
    spliced = dict(zip(raw, (one for name in table.column_names for one in columns.get(name, ())), strict=True))
    for number, group in enumerate(footer[4][1].items):
        for leaf, entry in enumerate(group[1][1].items):
            if leaf in spliced:
                column = spliced[leaf]
                chunks.append(_splice_chunk(out, entry, column, files, pages[id(column)][number]))
            else:
                chunks.append(_move_chunk(out, entry, skeleton))
        metas = [entry[3][1] for entry in group[1][1].items]
        group[2] = (I64, sum(meta[6][1] for meta in metas))
        group[6] = (I64, sum(meta[7][1] for meta in metas))
        group[5] = (I64, min(_first_page(meta) for meta in metas))
    _write_page_index(out, chunks, skeleton)
    footer[6] = (thrift.BINARY, CREATED_BY)
    tail = thrift.encode(footer)
    out.literal(tail + len(tail).to_bytes(4, "little") + b"PAR1")
    return out.finish()


def _weigh(table: pa.Table, names: list[str]) -> tuple[Ints, list[str]]:
    """The running sum of what rows take in some columns, and which of these hold a value larger than a row group."""
    total = np.zeros(len(table) + 1, np.int64)
    huge = []
    for name in names:
        sizes = cuts.column_bytes(table.column(name))
        total[1:] += sizes
        if len(sizes) and sizes.max() > cuts.GROUP_VALUE_BYTES:
            huge.append(name)
    return np.cumsum(total, out=total), huge


@dataclass(frozen=True, slots=True)
class _Column:
    """A leaf of bytes of a file column: its levels, the slot where each row starts, and the bytes of each row."""

    levels: Levels
    row_starts: Ints  # one more than rows
    values_before: Ints  # file values before each slot; one more than slots
    numbers: Ints
    row_bytes: Ints

    @classmethod
    def of(cls, levels: Levels, files: FileSet, numbers: Ints) -> _Column:
        values_before = cuts.running((levels.definition == levels.max_definition).astype(np.int64))
        row_starts = np.append(np.flatnonzero(levels.repetition == 0), len(levels.repetition))
        bytes_before = cuts.running(cell_bytes(files.sizes[numbers]))[values_before]
        row_bytes = np.diff(bytes_before[row_starts])
        return cls(levels, row_starts, values_before, numbers, row_bytes)


def _columns_of(table: pa.Table, name: str, files: FileSet, numbers: Ints) -> list[_Column]:
    """The leaves of bytes of a file column, in the order of the schema."""
    field = table.schema.field(name)
    paths = [path for path, _ in byte_leaves(field.type, field.nullable) or ()]
    leaves = [levels_of(table.column(name), field.nullable, path) for path in paths]
    counts = [int(np.count_nonzero(levels.definition == levels.max_definition)) for levels in leaves]
    if sum(counts) != len(numbers):
        raise ValueError(f"column {name!r} has {sum(counts)} values and {len(numbers)} files")
    own = np.split(numbers, np.cumsum(counts)[:-1])
    return [_Column.of(levels, files, some) for levels, some in zip(leaves, own, strict=True)]


def is_of_files(kind: pa.DataType) -> bool:
    """Whether a column has nothing beside its files that is worth to be weighed."""
    inner = kind.value_type if hasattr(kind, "value_type") else kind
    return {inner.field(number).name for number in range(inner.num_fields)} in (set(), {LEAF, "path"})


@dataclass(slots=True)
class _Chunk:
    """A column chunk that has been placed: how far it moved, or the pages it was given."""

    entry: Struct
    shift: int = 0
    pages: list[tuple[int, int, int]] | None = None  # offset, size with header, first row


def _first_page(meta: Struct) -> int:
    dictionary = meta[11][1] if 11 in meta else 0
    return int(dictionary or meta[9][1])


def _move_chunk(out: SpliceBuilder, entry: Struct, skeleton: Skeleton) -> _Chunk:
    meta = entry[3][1]
    start = _first_page(meta)
    shift = out.position - start
    skeleton.move(out, start, meta[7][1])
    for field in (9, 10, 11):  # data, index and dictionary page
        if field in meta and meta[field][1]:
            meta[field] = (I64, meta[field][1] + shift)
    return _Chunk(entry, shift=shift)


@dataclass(frozen=True, slots=True)
class _Page:
    """A page that is to be made of `head`, its header and levels, and of values with their lengths."""

    head: bytes
    size: int  # with the header
    first_row: int  # in its row group
    slots: int
    first_value: int  # of the column
    last_value: int


def _pages_of(column: _Column, files: FileSet, groups: Ints) -> list[list[_Page]]:
    """The pages of a leaf, row group by row group."""
    found = []
    for first, last in zip(groups[:-1].tolist(), groups[1:].tolist(), strict=True):
        page_cuts = cuts.fill(column.row_bytes[first:last], PAGE_BYTES, PAGE_ROWS) + first
        slots = column.row_starts[page_cuts].tolist()
        rows = (page_cuts[:-1] - first).tolist()
        found.append([_page_of(column, files, row, *of) for row, *of in zip(rows, slots[:-1], slots[1:], strict=True)])
    return found


def _page_of(column: _Column, files: FileSet, first_row: int, first: int, last: int) -> _Page:
    levels = column.levels
    level_bytes = encode_levels(levels.repetition[first:last], levels.max_repetition) + encode_levels(
        levels.definition[first:last], levels.max_definition
    )
    first_value, last_value = column.values_before[[first, last]].tolist()
    values = cell_bytes(files.sizes[column.numbers[first_value:last_value]])
    size = len(level_bytes) + int(values.sum())
    if size > MAX_PAGE_BYTES:
        raise ValueError(f"a row of {size} bytes in one column does not fit a Parquet page")
    kind = {1: (I32, last - first), 2: (I32, 0), 3: (I32, 3), 4: (I32, 3)}
    header = thrift.encode({1: (I32, 0), 2: (I32, size), 3: (I32, size), 5: (STRUCT, kind)})
    return _Page(header + level_bytes, len(header) + size, first_row, last - first, first_value, last_value)


def _splice_chunk(out: SpliceBuilder, entry: Struct, column: _Column, files: FileSet, pages: list[_Page]) -> _Chunk:
    start = out.position
    ends = cuts.running(np.array([page.size for page in pages], np.int64)) + start
    counts = np.array([page.last_value - page.first_value for page in pages], np.int64)
    for begin, end in itertools.pairwise(cuts.fill(counts, _TOGETHER, _TOGETHER).tolist()):
        _splice_pages(out, column, files, pages[begin:end])
    size = out.position - start
    meta = entry[3][1]
    for field in (8, 10, 11, 12, 14, 15, 16):  # what described the empty values
        meta.pop(field, None)
    meta[2] = (LIST, thrift.List(I32, [0, 3]))  # PLAIN, RLE
    meta[4] = (I32, 0)  # uncompressed
    meta[5] = (I64, sum(page.slots for page in pages))
    meta[6] = meta[7] = (I64, size)
    meta[9] = (I64, start)
    meta[13] = (LIST, thrift.List(STRUCT, [{1: (I32, 0), 2: (I32, 0), 3: (I32, len(pages))}]))
    places = zip(ends[:-1].tolist(), pages, strict=True)
    return _Chunk(entry, pages=[(offset, page.size, page.first_row) for offset, page in places])


def _splice_pages(out: SpliceBuilder, column: _Column, files: FileSet, pages: list[_Page]) -> None:
    """Pages that follow each other. What stands before a value is its length, and the head of the page it begins."""
    numbers = column.numbers[pages[0].first_value : pages[-1].last_value]
    sizes = files.sizes[numbers].astype("<u4").tobytes()
    lengths, literals, before = np.full(len(numbers), 4, np.int64), [], 0
    for page in pages:
        before += len(page.head)  # that of a page without values goes before the next one
        literals.append(page.head)
        first, last = page.first_value - pages[0].first_value, page.last_value - pages[0].first_value
        if first < last:
            lengths[first] += before
            before = 0
            literals.append(sizes[4 * first : 4 * last])
    data = b"".join(literals)
    if len(numbers):
        out.interleave(data[: len(data) - before], lengths, numbers)
    out.literal(data[len(data) - before :])


def _write_page_index(out: SpliceBuilder, chunks: list[_Chunk], skeleton: Skeleton) -> None:
    for chunk in chunks:
        entry = chunk.entry
        if chunk.pages is None and 6 in entry:
            start, size = entry[6][1], entry[7][1]
            entry[6] = (I64, out.position)
            skeleton.move(out, start, size)
        else:
            entry.pop(6, None), entry.pop(7, None)
    for chunk in chunks:
        entry = chunk.entry
        if chunk.pages is not None:
            index: Struct = {1: (LIST, thrift.List(STRUCT, [_location(*page) for page in chunk.pages]))}
        elif 4 in entry:
            # Offsets here are absolute. Left alone, pyarrow, DuckDB and Polars would not notice, and
            # DataFusion would read the wrong bytes.
            index, _ = thrift.decode(skeleton.read(entry[4][1], entry[5][1]))
            for location in index[1][1].items:
                location[1] = (I64, location[1][1] + chunk.shift)
        else:
            continue
        data = thrift.encode(index)
        entry[4], entry[5] = (I64, out.position), (I32, len(data))
        out.literal(data)


def _location(offset: int, size: int, first_row: int) -> dict[int, tuple[int, Any]]:
    return {1: (I64, offset), 2: (I32, size), 3: (I64, first_row)}
