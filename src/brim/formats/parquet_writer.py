"""Write the spliced Parquet shard: pyarrow writes the small columns, the bytes of files are not copied.

pyarrow writes a *skeleton*, in which every file is an empty value. Its footer is decoded; the chunks of the file
columns' `bytes` leaves are replaced by plain pages of lengths and file segments; all other chunks are moved; and the
footer and page index are written again to match. The result is an ordinary Parquet file whose size is known before a
source file is opened.

docs/reference/file-formats.md explains the byte layout. parquet_reader.py locates the files in such a shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim import partition as cuts
from brim.file_set import FileSet, Ints
from brim.formats import thrift
from brim.formats.parquet_footer import schema_leaves
from brim.formats.parquet_levels import Levels, byte_leaves, encode_levels, levels_of
from brim.formats.splice import Splice, SpliceBuilder
from brim.formats.thrift import I32, I64, LIST, STRUCT, Struct
from brim.partition import HELD_VALUE_BYTES
from brim.records import dataclass
from brim.state.scratch import Scratch

LEAF = "bytes"
# Constant, so that the bytes depend on the format and not on the release; the shape "NAME version X.Y.Z
# (build B)" is what parquet-java parses.
CREATED_BY = b"brim version 1.0.0 (build 1)"

ROW_GROUP_BYTES = 100_000_000  # readers load a row group; the Hub's viewer refuses more than about 300 MB
ROW_GROUP_ROWS = 1_048_576
PAGE_BYTES = 1 << 20
PAGE_ROWS = 20_000
MAX_PAGE_BYTES = 2**31 - 1
_BATCH_VALUES = 8192  # values, or pages, whose segments are computed at once
# The most bytes of one row in one file column. 2,147,483,630 bytes read back everywhere, 2,147,483,640 not.
MAX_CELL_BYTES = 2_147_483_630


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A Parquet file with empty files, in memory or in a scratch file."""

    content: memoryview | Scratch
    size: int

    def read(self, start: int, size: int) -> bytes:
        if isinstance(self.content, Scratch):
            return self.content.read(start, size)
        return bytes(self.content[start : start + size])

    def move(self, out: SpliceBuilder, start: int, size: int) -> None:
        """Append a range of the skeleton to a splice."""
        if isinstance(self.content, Scratch):
            out.scratch(start, size)
        else:
            out.literal(self.read(start, size))


def write_skeleton(
    table: pa.Table, groups: Ints, value_bytes: int, folder: str | None, huge: Collection[str] = ()
) -> Skeleton:
    """Write the rows, one row group per range of `groups`; `value_bytes` decides between memory and disk.

    Columns of `huge` values get no dictionary and no statistics: pyarrow would hold such a value eight times.
    """
    options: dict[str, Any] = {"compression": "snappy", "write_page_index": True}
    if huge:
        empty = pa.BufferOutputStream()
        pq.write_table(table.slice(0, 0), empty)
        schema = pq.ParquetFile(pa.BufferReader(empty.getvalue())).schema
        paths = [schema.column(number).path for number in range(len(schema.names))]
        small = [path for path in paths if not any(path == name or path.startswith(f"{name}.") for name in huge)]
        options |= {"use_dictionary": small or False, "write_statistics": small or False}

    def write(sink: object) -> None:
        with pq.ParquetWriter(sink, table.schema, **options) as writer:
            for start, end in itertools.pairwise(groups.tolist()):
                writer.write_table(table.slice(start, end - start), row_group_size=end - start)

    if value_bytes <= HELD_VALUE_BYTES:
        memory = pa.BufferOutputStream()
        write(memory)
        data = memoryview(memory.getvalue()).cast("B")
        return Skeleton(data, len(data))
    scratch = Scratch(folder)
    with open(scratch.descriptor, "wb", closefd=False) as file:
        write(file)
        return Skeleton(scratch, file.tell())


def cell_bytes(sizes: Ints) -> Ints:
    """Return the bytes of files of these sizes in a page: each has a four-byte length."""
    return sizes + 4


def is_of_files(kind: pa.DataType) -> bool:
    """Return whether a column has nothing except files and their paths, so that its other values need no memory."""
    inner = kind.value_type if hasattr(kind, "value_type") else kind
    return {inner.field(number).name for number in range(inner.num_fields)} in (set(), {LEAF, "path"})


def splice_parquet(
    table: pa.Table, files: FileSet, numbers: Mapping[str, Ints], scratch_folder: str | None = None
) -> Splice:
    """Return the shard with the rows of `table` and the files of `numbers` in its file columns.

    A file column has bytes, or a struct with a `bytes` leaf, or lists of such; or it has several leaves of bytes
    (parquet_levels.py). Its bytes are empty in `table`; `numbers` gives for each file column the file numbers of its
    values that are not null, in order, those of one leaf after the other.
    `scratch_folder` is used for a skeleton that is too large for memory, until the splice is closed.
    """
    columns = {name: _file_leaves(table, name, files, numbers[name]) for name in numbers}
    file_leaves = [leaf for each in columns.values() for leaf in each]
    file_bytes = cuts.running(sum((leaf.row_bytes for leaf in file_leaves), np.zeros(len(table), np.int64)))
    # The running sum of the other values, and the columns that have a value larger than a row group.
    value_bytes, huge = np.zeros(len(table) + 1, np.int64), []
    for field in table.schema:
        if field.name not in columns or not is_of_files(field.type):
            sizes = cuts.column_bytes(table.column(field.name))
            value_bytes[1:] += sizes
            if len(sizes) and sizes.max() > cuts.GROUP_VALUE_BYTES:
                huge.append(field.name)
    np.cumsum(value_bytes, out=value_bytes)
    limits = [(file_bytes, ROW_GROUP_BYTES), (value_bytes, cuts.GROUP_VALUE_BYTES)]
    groups = cuts.fill_all(limits, ROW_GROUP_ROWS)
    # pyarrow's work and brim's at once. A worker writes all its shards in its main thread: Arrow's allocator keeps tens
    # of megabytes for each thread that has written, even after that thread has ended.
    with ThreadPoolExecutor(1, "pages") as executor:
        making = executor.submit(lambda: [_make_pages(leaf, files, groups) for leaf in file_leaves])
        skeleton = write_skeleton(table, groups, int(value_bytes[-1]), scratch_folder, huge)
        pages = {id(leaf): leaf_pages for leaf, leaf_pages in zip(file_leaves, making.result(), strict=True)}
    length = int.from_bytes(skeleton.read(skeleton.size - 8, 4), "little")
    footer, _ = thrift.decode(skeleton.read(skeleton.size - 8 - length, length))

    out = SpliceBuilder(files, skeleton.content if isinstance(skeleton.content, Scratch) else None)
    out.literal(b"PAR1")
    chunks: list[_Chunk] = []
    raw = [leaf.number for leaf in schema_leaves(footer) if leaf.is_raw and leaf.path[0] in columns]
    in_order = (leaf for name in table.column_names for leaf in columns.get(name, ()))
    spliced = dict(zip(raw, in_order, strict=True))
    for group_number, group in enumerate(footer[4][1].items):
        for number, entry in enumerate(group[1][1].items):
            if number in spliced:
                leaf = spliced[number]
                chunks.append(_splice_chunk(out, entry, leaf, files, pages[id(leaf)][group_number]))
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


@dataclass(frozen=True, slots=True)
class _FileLeaf:
    """A leaf of bytes of a file column: its levels, the first slot of each row, and the bytes of each row."""

    levels: Levels
    row_starts: Ints  # one more than rows
    values_before: Ints  # file values before each slot; one more than slots
    numbers: Ints
    row_bytes: Ints


def _file_leaves(table: pa.Table, name: str, files: FileSet, numbers: Ints) -> list[_FileLeaf]:
    """Return the leaves of bytes of a file column, in the order of the schema."""
    field = table.schema.field(name)
    paths = [path for path, _ in byte_leaves(field.type, field.nullable) or ()]
    all_levels = [levels_of(table.column(name), field.nullable, path) for path in paths]
    counts = [int(np.count_nonzero(levels.definition == levels.max_definition)) for levels in all_levels]
    if sum(counts) != len(numbers):
        raise ValueError(f"column {name!r} has {sum(counts)} values and {len(numbers)} files")
    file_leaves = []
    for levels, own in zip(all_levels, np.split(numbers, np.cumsum(counts)[:-1]), strict=True):
        values_before = cuts.running((levels.definition == levels.max_definition).astype(np.int64))
        row_starts = np.append(np.flatnonzero(levels.repetition == 0), len(levels.repetition))
        bytes_before = cuts.running(cell_bytes(files.sizes[own]))[values_before]
        file_leaves.append(_FileLeaf(levels, row_starts, values_before, own, np.diff(bytes_before[row_starts])))
    return file_leaves


@dataclass(frozen=True, slots=True)
class _Page:
    """A page before its values are appended: `head` is its header and levels."""

    head: bytes
    size: int  # with the header
    first_row: int  # in its row group
    slots: int
    first_value: int  # of the leaf
    last_value: int


def _make_pages(leaf: _FileLeaf, files: FileSet, groups: Ints) -> list[list[_Page]]:
    """Return the pages of each row group of a leaf."""
    levels, result = leaf.levels, []
    for group_start, group_end in itertools.pairwise(groups.tolist()):
        page_cuts = cuts.fill(leaf.row_bytes[group_start:group_end], PAGE_BYTES, PAGE_ROWS) + group_start
        rows = (page_cuts[:-1] - group_start).tolist()
        pages = []
        for row, (first, last) in zip(rows, itertools.pairwise(leaf.row_starts[page_cuts].tolist()), strict=True):
            level_bytes = encode_levels(levels.repetition[first:last], levels.max_repetition)
            level_bytes += encode_levels(levels.definition[first:last], levels.max_definition)
            first_value, last_value = leaf.values_before[[first, last]].tolist()
            values = cell_bytes(files.sizes[leaf.numbers[first_value:last_value]])
            size = len(level_bytes) + int(values.sum())
            if size > MAX_PAGE_BYTES:
                raise ValueError(f"a row of {size} bytes in one column does not fit a Parquet page")
            kind = {1: (I32, last - first), 2: (I32, 0), 3: (I32, 3), 4: (I32, 3)}
            header = thrift.encode({1: (I32, 0), 2: (I32, size), 3: (I32, size), 5: (STRUCT, kind)})
            head = header + level_bytes
            pages.append(_Page(head, len(header) + size, row, last - first, first_value, last_value))
        result.append(pages)
    return result


@dataclass(slots=True)
class _Chunk:
    """A column chunk in the shard: how far it was moved, or its new pages."""

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


def _splice_chunk(out: SpliceBuilder, entry: Struct, leaf: _FileLeaf, files: FileSet, pages: list[_Page]) -> _Chunk:
    """Append pages with the contents of files, and describe them in the footer's entry of the chunk."""
    start = out.position
    offsets = cuts.running(np.array([page.size for page in pages], np.int64)) + start
    counts = np.array([page.last_value - page.first_value for page in pages], np.int64)
    for first, last in itertools.pairwise(cuts.fill(counts, _BATCH_VALUES, _BATCH_VALUES).tolist()):
        _splice_pages(out, leaf, files, pages[first:last])
    meta = entry[3][1]
    for field in (8, 10, 11, 12, 14, 15, 16):  # they described the empty values
        meta.pop(field, None)
    meta[2] = (LIST, thrift.List(I32, [0, 3]))  # PLAIN, RLE
    meta[4] = (I32, 0)  # uncompressed
    meta[5] = (I64, sum(page.slots for page in pages))
    meta[6] = meta[7] = (I64, out.position - start)
    meta[9] = (I64, start)
    meta[13] = (LIST, thrift.List(STRUCT, [{1: (I32, 0), 2: (I32, 0), 3: (I32, len(pages))}]))
    located = zip(offsets[:-1].tolist(), pages, strict=True)
    return _Chunk(entry, pages=[(offset, page.size, page.first_row) for offset, page in located])


def _splice_pages(out: SpliceBuilder, leaf: _FileLeaf, files: FileSet, pages: list[_Page]) -> None:
    """Append consecutive pages. Before each value is its length, and before that the head of a page that starts."""
    numbers = leaf.numbers[pages[0].first_value : pages[-1].last_value]
    sizes = files.sizes[numbers].astype("<u4").tobytes()
    lengths, literals, before = np.full(len(numbers), 4, np.int64), [], 0
    for page in pages:
        before += len(page.head)  # that of a page without values goes before the next page
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
    """Append the column indexes, then the offset indexes of all chunks."""
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
            locations = [{1: (I64, offset), 2: (I32, size), 3: (I64, row)} for offset, size, row in chunk.pages]
            index: Struct = {1: (LIST, thrift.List(STRUCT, locations))}
        elif 4 in entry:
            # These offsets are absolute. With wrong ones pyarrow, DuckDB and Polars would still work, but DataFusion
            # would read the wrong bytes.
            index, _ = thrift.decode(skeleton.read(entry[4][1], entry[5][1]))
            for location in index[1][1].items:
                location[1] = (I64, location[1][1] + chunk.shift)
        else:
            continue
        data = thrift.encode(index)
        entry[4], entry[5] = (I64, out.position), (I32, len(data))
        out.literal(data)
