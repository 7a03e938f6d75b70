"""Locate the values of a byte column inside a Parquet file of any writer, without loading them.

The cheapest way is used first: ranges of the file if pages are not compressed (PLAIN, dictionary, DELTA_LENGTH),
several ranges per value if snappy or zstd stored the bytes unchanged, and otherwise the page is decompressed to a
spool, of which the values are ranges. Chunks that only pyarrow can decode (LZO, Hadoop's LZ4, encryption) raise
NotLocated.

A damaged file raises an error, and never takes more memory than its bytes and some megabytes. Shards that brim wrote
are read by parquet_reader.py to verify and unpack them.

`ChunkReader` walks the pages of a column chunk and matches their values with rows; `_PageReader` reads the bytes of a
page, `_Dictionary` the values of a dictionary page.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from brim.file_set import Ints, Segments
from brim.formats import thrift
from brim.formats.parquet_footer import Leaf
from brim.formats.parquet_levels import Damaged, decode_levels
from brim.formats.parquet_page_decode import (
    Fetch,
    PageBody,
    decode_delta,
    decode_runs,
    max_delta_bytes,
    plain_body,
    snappy_body,
    zstd_body,
)
from brim.formats.range_readers import LocalFile, Readable
from brim.formats.thrift import Struct
from brim.records import dataclass
from brim.state.scratch import ValueSpool

PLAIN, PLAIN_DICTIONARY, DELTA_LENGTH, RLE_DICTIONARY = 0, 2, 6, 8
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_STREAMED = {2: "gzip", 4: "brotli", 6: "zstd"}
_AT_ONCE = {1: ("snappy", 22), 7: ("lz4_raw", 256)}  # codec, and the most times that its output is larger
_HEADER_BYTES = (1 << 10, 1 << 16, 1 << 22)
_WHOLE_PAGE_BYTES = 4 << 20  # of larger uncompressed pages, only the lengths of values are read
_BLOCK_BYTES = 1 << 20
_WINDOW_BYTES = 256 << 10  # read at once to find lengths; a larger block does not stay in the cache
_MAX_SLOTS = 1 << 22  # of a page: its levels take 64 MB at most while they are decoded
_SMALL_VALUE_BYTES, _SMALL_REMOTE_VALUE_BYTES = 6 << 10, 32 << 10
_DELTA_HEAD_BYTES = 40
_LENGTH = struct.Struct("<I")


class NotLocated(Exception):
    """A column chunk is stored in a way that only pyarrow reads."""


@dataclass(frozen=True, slots=True)
class PageSpan:
    """A data page of the page index: its offset and size, header included, and its rows from `first` to `stop`."""

    offset: int
    size: int
    first: int
    stop: int


def page_spans(index: bytes, rows: int) -> list[PageSpan]:
    """Read the pages of a column chunk from its offset index."""
    locations = thrift.decode(index)[0][1][1].items
    firsts = [int(location[3][1]) for location in locations]
    spans = []
    for location, first, stop in zip(locations, firsts, [*firsts[1:], rows], strict=True):
        if not 0 <= first <= stop <= rows:
            raise Damaged("the page index is damaged")
        spans.append(PageSpan(int(location[1][1]), int(location[2][1]), first, stop))
    return spans


@dataclass(frozen=True, slots=True)
class FoundValues:
    """The slots of the pages that were read, and the locations of their values.

    A slot has its row and its levels. A value (a slot of the highest definition level) is in the file, or in the spool
    if `spooled`; a negative start, -1 - n, refers to the n-th entry of `pieces`.
    """

    rows: Ints
    repetition: Ints
    definition: Ints
    spooled: np.ndarray[Any, np.dtype[np.bool_]]
    starts: Ints
    sizes: Ints
    pieces: Segments


@dataclass(frozen=True, slots=True)
class DataPage:
    """A data page: its levels, its uncompressed bytes, and the position of the first value in them."""

    encoding: int
    repetition: Ints
    definition: Ints
    body: PageBody
    is_spooled: bool
    position: int


class PageReader:
    """Read the pages of one column chunk. Pages that have to be decompressed are written to the spool.

    `is_cheap` returns whether a range of the file can be read without a request.
    """

    def __init__(
        self, file: Readable, codec: int, leaf: Leaf, spool: ValueSpool, is_cheap: Callable[[int, int], bool]
    ) -> None:
        self._file, self._codec, self._leaf, self.spool, self._is_cheap = file, codec, leaf, spool, is_cheap
        self._is_local = isinstance(file, LocalFile)

    def headers(self, position: int, end: int) -> Iterator[tuple[Struct, int]]:
        """Yield the header of each page between two offsets, and the offset of its body."""
        while position < end:
            for limit in _HEADER_BYTES:
                try:
                    header, used = thrift.decode(self._file.read_at(position, min(limit, end - position)))
                    break
                except thrift.ThriftError:
                    if limit >= end - position or limit == _HEADER_BYTES[-1]:
                        raise
            size = int(header[3][1])
            if size < 0 or position + used + size > end:
                raise Damaged("a page runs past its column")
            if int(header[2][1]) < 0:
                raise Damaged("a page has a size below zero")
            yield header, position + used
            position += used + size

    def body(
        self, offset: int, size: int, plain_size: int, header: Struct, is_compressed: bool = True
    ) -> tuple[PageBody, bool]:
        """Return the uncompressed bytes of a page, and whether they were written to the spool."""
        codec, fetch, data = self._codec if is_compressed else 0, self._file.read_at, b""
        if size <= _WHOLE_PAGE_BYTES and self._is_cheap(offset, offset + size):
            data = fetch(offset, size)
            if len(data) != size:
                raise Damaged("a page is cut off")
            if 4 in header and zlib.crc32(data) != header[4][1] & 0xFFFFFFFF:
                raise Damaged("a page does not have the checksum that it should")
        if codec == 0 or not (size or plain_size):
            if size != plain_size:
                raise Damaged("a page that is not compressed has two sizes")
            return plain_body(data, offset, size, fetch), False
        describe = {1: snappy_body, 6: zstd_body}.get(codec)
        if describe is not None:
            of_data: Fetch = lambda start, count: data[start - offset : start - offset + count]  # noqa: E731
            body = describe(of_data if data else fetch, offset, size, plain_size)
            if body is not None:
                return body, False
        start = self.spool.size
        _decompress(data or fetch(offset, size), plain_size, codec, self.spool)
        return plain_body(b"", start, plain_size, self.spool.read_at), True

    def data_page(self, header: Struct, offset: int, count: int) -> DataPage:
        """Read the levels of a data page with `count` slots."""
        size, plain_size = int(header[3][1]), int(header[2][1])
        maxima = (self._leaf.max_repetition, self._leaf.max_definition)
        if int(header[1][1]) == _DATA:
            body, is_spooled = self.body(offset, size, plain_size, header)
            # Each block of levels begins with its length: DuckDB packs 256 levels at a time, however few there are.
            head: bytes = body.read(0, min(body.size, 64 + 4 * count))
            end = 0
            for maximum in maxima:
                end += 4 + int.from_bytes(head[end : end + 4], "little") if maximum else 0
                if len(head) < min(end + 4, body.size):
                    head = body.read(0, min(end + 4, body.size))
            repetition, used = decode_levels(head, count, maxima[0])
            definition, used_more = decode_levels(memoryview(head)[used:], count, maxima[1])
            return DataPage(header[5][1][2][1], repetition, definition, body, is_spooled, used + used_more)
        v2 = header[8][1]
        lengths = (int(v2[6][1]), int(v2[5][1]))
        if min(lengths) < 0 or sum(lengths) > min(size, plain_size):
            raise Damaged("the levels of a page are longer than it")
        head = self._file.read_at(offset, sum(lengths))
        repetition, definition = (
            decode_runs(data, maximum.bit_length(), count) if maximum else np.zeros(count, np.int64)
            for data, maximum in zip((head[: lengths[0]], head[lengths[0] :]), maxima, strict=True)
        )
        is_compressed = 7 not in v2 or bool(v2[7][1])
        sizes = (size - sum(lengths), plain_size - sum(lengths))
        body, is_spooled = self.body(offset + sum(lengths), *sizes, {}, is_compressed)
        return DataPage(v2[4][1], repetition, definition, body, is_spooled, 0)

    def plain_values(self, body: PageBody, position: int, count: int) -> tuple[Ints, Ints]:
        """Return the starts and sizes of PLAIN values in a page, in which each value follows its length."""
        end, is_range = body.size, len(body.ends) == 1
        first = body.starts[0] if is_range else 0
        if is_range and body.fetch == self._file.read_at and not self._is_cheap(first + position, first + end):
            return _follow_lengths(body, position, count)
        window: bytes | memoryview = b""
        window_start = window_end = 0
        if is_range and body.data:
            window, window_end = memoryview(body.data), end
        elif is_range and end - position <= _WHOLE_PAGE_BYTES:
            window, window_start, window_end = body.read(position, end - position), position, end
        # Among small values more is read than their lengths: one call takes as long as some thousand bytes.
        if end - position < count * (_SMALL_VALUE_BYTES if self._is_local else _SMALL_REMOTE_VALUE_BYTES):
            step = _WINDOW_BYTES if self._is_local else _BLOCK_BYTES
        elif is_range and not window:
            return _follow_lengths(body, position, count)
        else:
            step = 4
        starts, sizes = [0] * count, [0] * count
        for number in range(count):
            if position + 4 > end:
                raise Damaged("the lengths of a page do not add up to its size")
            if not window_start <= position <= window_end - 4:
                window, window_start = body.read(position, min(step, end - position)), position
                window_end = position + len(window)
            (size,) = _LENGTH.unpack_from(window, position - window_start)
            position += 4
            starts[number], sizes[number] = position, size
            position += size
        if position > end:
            raise Damaged("the lengths of a page do not add up to its size")
        return np.array(starts, np.int64), np.array(sizes, np.int64)


def _decompress(data: bytes, size: int, codec: int, spool: ValueSpool) -> None:
    """Decompress a page to the spool, a block at a time where the codec allows it."""
    wrong_size = Damaged("a compressed page has another size than its header says")
    if codec in _AT_ONCE:
        name, ratio = _AT_ONCE[codec]
        if size > ratio * len(data) + 64:
            raise Damaged("a compressed page says that it is larger than it can be")
        plain = pa.Codec(name).decompress(data, size)
        if len(plain) != size:
            raise wrong_size
        spool.append(memoryview(plain))
        return
    written = 0
    with pa.CompressedInputStream(pa.BufferReader(data), _STREAMED[codec]) as stream:
        while block := stream.read(_BLOCK_BYTES):
            written += len(block)
            if written > size:
                break
            spool.append(block)
    if written != size:
        raise wrong_size


def _follow_lengths(body: PageBody, position: int, count: int) -> tuple[Ints, Ints]:
    """Return the starts and sizes of PLAIN values in a page that is one range of a file, reading only lengths."""
    lengths, read, offset, last = [0] * count, body.fetch, body.starts[0] + position, body.starts[0] + body.size - 4
    for number in range(count):  # a hundred thousand times, so everything else is done after the loop
        if offset > last:
            raise Damaged("the lengths of a page do not add up to its size")
        length = read(offset, 4)
        if len(length) < 4:
            raise Damaged("a page is cut off")
        lengths[number] = size = int.from_bytes(length, "little")
        offset += size + 4
    if offset > last + 4:
        raise Damaged("the lengths of a page do not add up to its size")
    sizes = np.array(lengths, np.int64)
    return position + np.cumsum(sizes + 4) - sizes, sizes


_COLUMN_TYPES = {
    "rows": np.int64, "repetition": np.uint8, "definition": np.uint8,
    "spooled": np.bool_, "starts": np.int64, "sizes": np.int64,
}  # fmt: skip


class _Collected:
    """Slots and values that were located, page after page."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Any]] = {name: [] for name in _COLUMN_TYPES}
        self._edges, self._range_starts, self._range_sizes = [0], list[int](), list[int]()

    def add(self, **columns: Any) -> None:
        for name, values in columns.items():
            self._parts[name].append(values.astype(_COLUMN_TYPES[name], copy=False))

    def locate(self, body: PageBody, starts: Ints, sizes: Ints) -> Ints:
        """Turn starts in a page into starts in the file. A value of several ranges gets a negative start."""
        if len(body.ends) == 1:
            return starts + body.starts[0]
        located = np.zeros(len(starts), np.int64)
        for number, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            ranges = body.ranges(start, start + size)
            if len(ranges) <= 1:
                located[number] = ranges[0][0] if ranges else 0
                continue
            located[number] = -len(self._edges)
            self._range_starts += [offset for offset, _ in ranges]
            self._range_sizes += [length for _, length in ranges]
            self._edges.append(len(self._range_starts))
        return located

    def finish(self) -> FoundValues:
        columns = {
            name: np.concatenate([np.zeros(0, kind), *self._parts[name]]) for name, kind in _COLUMN_TYPES.items()
        }
        edges, starts, sizes = (np.array(n, np.int64) for n in (self._edges, self._range_starts, self._range_sizes))
        return FoundValues(**columns, pieces=Segments(edges, starts, sizes))


class _Dictionary:
    """Locate the values of a dictionary page, as many as are needed.

    `page` is its header and the offset of its body. `unread` is where a page was skipped that may be the dictionary.
    """

    def __init__(self, pages: PageReader, out: _Collected) -> None:
        self.page: tuple[Struct, int] | None = None
        self.unread: tuple[int, int] | None = None
        self._pages, self._out = pages, out
        self._body: tuple[PageBody, bool] | None = None
        self._starts = self._sizes = np.zeros(0, np.int64)

    def locate(self, count: int) -> tuple[Ints, Ints, bool]:
        """Return the starts and sizes of at least the first `count` values, and whether they are in the spool."""
        if self.unread is not None:
            skipped, self.unread = next(self._pages.headers(*self.unread), None), None
            if skipped is not None and skipped[0][1][1] == _DICTIONARY:
                self.page = skipped
        if self.page is None:
            raise Damaged("a page refers to a dictionary that is not there")
        header, offset = self.page
        if count > _checked_count(header[7][1][1][1]):
            raise Damaged("a page refers to what its dictionary does not have")
        if self._body is None:
            if header[7][1][2][1] not in (PLAIN, PLAIN_DICTIONARY):
                raise NotLocated("its dictionary")
            self._body = self._pages.body(offset, int(header[3][1]), int(header[2][1]), header)
        if len(self._sizes) < count:
            starts, self._sizes = self._pages.plain_values(self._body[0], 0, count)
            self._starts = self._out.locate(self._body[0], starts, self._sizes)
        return self._starts, self._sizes, self._body[1]


class ChunkReader:
    """Locate the values of one column chunk, page by page.

    `is_cheap` returns whether a range of the file can be read without a request; elsewhere only lengths are read.
    """

    def __init__(
        self, file: Readable, meta: Struct, leaf: Leaf, rows: int, spool: ValueSpool,
        is_cheap: Callable[[int, int], bool] = lambda start, stop: True,
    ) -> None:  # fmt: skip
        self._leaf, self._row_count = leaf, rows
        codec, self._slot_count, data_start = int(meta[4][1]), int(meta[5][1]), int(meta[9][1])
        dictionary_start = int(meta[11][1]) if 11 in meta else 0
        self._start = min(data_start, dictionary_start) if dictionary_start else data_start
        self._end = self._start + int(meta[7][1])
        if not 4 <= self._start <= self._end <= file.size or rows < 0 or self._slot_count < 0:
            raise Damaged("a column lies outside of the file")
        if codec not in (0, *_STREAMED, *_AT_ONCE):
            raise NotLocated("its codec")
        self._out = _Collected()
        self._pages = PageReader(file, codec, leaf, spool, is_cheap)
        self._dictionary = _Dictionary(self._pages, self._out)
        self._wanted_rows: Ints | None = None

    def find(self, pages: list[PageSpan] | None = None, first: int = 0, rows: Ints | None = None) -> FoundValues:
        """Locate all values, or those of some pages; `first` is the offset of the chunk's first data page.

        With `rows`, in order, values of other rows may be left out.
        """
        self._wanted_rows = rows
        if pages is None:
            row, slots = -1, 0
            for header, offset in self._pages.headers(self._start, self._end):
                # A row of a list may continue in the next page.
                if rows is not None and (not len(rows) or row >= int(rows[-1]) + (self._leaf.max_repetition > 0)):
                    return self._out.finish()
                row, count = self._read_page(header, offset, row)
                slots += count
            if row + 1 != self._row_count or slots != self._slot_count:
                raise Damaged("a column has another number of rows than its row group")
            return self._out.finish()
        self._dictionary.unread = (self._start, self._end) if self._start < first else None
        for page in pages:
            if not self._start <= page.offset <= page.offset + page.size <= self._end:
                raise Damaged("the page index is damaged")
            row = page.first - 1
            for header, offset in self._pages.headers(page.offset, page.offset + page.size):
                row, _ = self._read_page(header, offset, row)
            if row + 1 != page.stop:
                raise Damaged("the page index is damaged")
        return self._out.finish()

    def _read_page(self, header: Struct, offset: int, row: int) -> tuple[int, int]:
        """Locate the values of a page that follows `row`; return its last row and its number of slots."""
        kind, wanted_rows, leaf = int(header[1][1]), self._wanted_rows, self._leaf
        if kind == _DICTIONARY:
            self._dictionary.page = (header, offset)
            if wanted_rows is None:
                self._dictionary.locate(_checked_count(header[7][1][1][1]))
        if kind not in (_DATA, _DATA_V2):
            return row, 0
        count = _checked_count(header[5 if kind == _DATA else 8][1][1][1])
        if wanted_rows is not None and not leaf.max_repetition:  # each slot is a row
            low, high = np.searchsorted(wanted_rows, [row + 1, row + 1 + count])
            if low == high:
                return row + count, count
        page = self._pages.data_page(header, offset, count)
        repetition, definition = page.repetition, page.definition
        if count and (definition.max() > leaf.max_definition or repetition.max() > leaf.max_repetition):
            raise Damaged("a level is higher than its schema has it")
        if count and row < 0 and repetition[0]:
            raise Damaged("a column begins inside of a list")
        rows = row + np.cumsum(repetition == 0)
        last_row = int(rows[-1]) if count else row
        # Lengths of PLAIN values are read one after the other, up to the last row that is wanted. Of a page with a
        # dictionary, only the values of wanted rows are located.
        kept: Any = slice(None)
        if wanted_rows is not None and page.encoding == PLAIN:
            before = int(np.searchsorted(wanted_rows, last_row, side="right"))
            kept = slice(int(np.searchsorted(rows, wanted_rows[before - 1], side="right")) if before else 0)
        elif wanted_rows is not None and page.encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY):
            kept = np.isin(rows, wanted_rows)
        is_value = definition == leaf.max_definition
        value_numbers = (np.cumsum(is_value) - 1)[kept][is_value[kept]]
        starts, sizes, is_spooled = self._locate_values(page, int(np.count_nonzero(is_value)), value_numbers)
        self._out.add(rows=rows[kept], repetition=repetition[kept], definition=definition[kept])
        self._out.add(starts=starts, sizes=sizes, spooled=np.full(len(sizes), is_spooled))
        return last_row, count

    def _locate_values(self, page: DataPage, total: int, numbers: Ints) -> tuple[Ints, Ints, bool]:
        """Return the starts and sizes of the values with some numbers, out of all in a page, and whether in the spool.

        The numbers begin with 0 and have no gaps, unless the page refers to a dictionary.
        """
        body, position, count = page.body, page.position, len(numbers)
        if page.encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY):
            data = body.read(position, body.size - position)
            if not data and total:
                raise Damaged("the numbers of a page end early")
            entries = decode_runs(data[1:], data[0], total)[numbers] if total else numbers
            if not count:
                return numbers, numbers, page.is_spooled
            starts, sizes, is_spooled = self._dictionary.locate(int(entries.max()) + 1)
            return starts[entries], sizes[entries], is_spooled
        if page.encoding == PLAIN:
            starts, sizes = self._pages.plain_values(body, position, count)
            return self._out.locate(body, starts, sizes), sizes, page.is_spooled
        if page.encoding == DELTA_LENGTH:
            head = body.read(position, _DELTA_HEAD_BYTES)
            sizes, used = decode_delta(body.read(position, max_delta_bytes(head, count)), count)
            starts = position + used + np.cumsum(sizes) - sizes
            if count and (sizes.min() < 0 or starts[-1] + sizes[-1] > body.size):
                raise Damaged("the lengths of a page do not add up to its size")
            return self._out.locate(body, starts, sizes), sizes, page.is_spooled
        raise NotLocated("its encoding")


def _checked_count(stored: Any) -> int:
    if not 0 <= int(stored) <= _MAX_SLOTS:
        raise Damaged("a page says that it holds more values than a page does")
    return int(stored)
