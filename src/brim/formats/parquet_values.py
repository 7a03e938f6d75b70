"""Where the values of a byte column lie inside a Parquet file that anybody wrote, without holding them.

Cheapest way first: ranges where pages are not compressed (PLAIN, dictionary, DELTA_LENGTH), pieces where snappy or zstd
left the bytes as they are, and else the page is decompressed to a spool, of which the values are ranges. What no page
by page reading here knows (LZO, Hadoop's LZ4, encryption) is NotLocated: pyarrow has to decode it.

A damaged file is an error, and takes no more memory than its bytes and some megabytes. For the shards that brim wrote,
where the whole of a shard is walked to prove or unpack it: parquet_index.py.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from brim.file_set import Ints, Pieces
from brim.formats import thrift
from brim.formats.parquet_levels import decode_levels
from brim.formats.parquet_pages import (
    Damaged,
    PageBody,
    delta_bytes,
    delta_ints,
    plain_body,
    runs,
    snappy_body,
    zstd_body,
)
from brim.formats.readable import LocalFile, Readable
from brim.formats.thrift import Struct
from brim.records import dataclass

PLAIN, PLAIN_DICTIONARY, DELTA_LENGTH, DELTA_BYTES, RLE_DICTIONARY = 0, 2, 6, 7, 8
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_BYTE_ARRAY = 6
_STREAMED = {2: "gzip", 4: "brotli", 6: "zstd"}
_AT_ONCE = {1: ("snappy", 22), 7: ("lz4_raw", 256)}  # the codec, and how much smaller than its content it can be
_HEADER_BYTES = (1 << 10, 1 << 16, 1 << 22)
_WHOLE_PAGE_BYTES = 4 << 20  # of larger pages that are not compressed, only lengths are read
_BLOCK_BYTES = 1 << 20
_CHASED_BYTES = 256 << 10  # read at a time to find lengths; larger ones do not stay in the cache
_MOST_SLOTS = 1 << 22  # of a page: its levels take 64 MB at most while they are decoded
_SMALL_BYTES, _SMALL_BYTES_FAR = 6 << 10, 32 << 10
_DELTA_HEAD_BYTES = 40
_LENGTH = struct.Struct("<I")


class NotLocated(Exception):
    """A column chunk is stored in a way that only pyarrow reads."""


class Spooling(Protocol):
    """Where pages go that had to be decompressed."""

    def append(self, data: Any) -> int:
        """Where the data begins."""

    def read_at(self, offset: int, size: int) -> bytes: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Leaf:
    """A column of a Parquet file. `repeated` is the definition level of its list, 0 if it is in none."""

    number: int
    path: tuple[str, ...]
    is_bytes: bool
    max_repetition: int
    max_definition: int
    repeated: int
    optional: bool  # whether the value itself may be null inside of what is around it
    is_raw: bool  # bytes that nobody said to be text or anything else
    levels: tuple[int, ...]  # what adds a level on the way to it: 1 what may be null, 2 what is repeated


def leaves_of(footer: Struct) -> list[Leaf]:
    """All leaves of the schema, in the order of the column chunks."""
    elements: list[Struct] = footer[2][1].items
    found: list[Leaf] = []
    at = 1

    def walk(prefix: tuple[str, ...], levels: tuple[int, ...], repeated: int) -> None:
        nonlocal at
        element = elements[at]
        at += 1
        kind = element[3][1] if 3 in element else 0  # 0 required, 1 optional, 2 repeated
        path = (*prefix, element[4][1].decode())
        levels = (*levels, kind) if kind else levels
        repetition, definition = levels.count(2), len(levels)
        repeated = definition if kind == 2 else repeated
        children = element[5][1] if 5 in element else 0
        if len(path) > 64 or children < 0:
            raise Damaged("the schema is broken")
        if not children:
            is_bytes = 1 in element and element[1][1] == _BYTE_ARRAY
            raw = is_bytes and 6 not in element and 10 not in element
            found.append(Leaf(len(found), path, is_bytes, repetition, definition, repeated, kind == 1, raw, levels))
        for _ in range(children):
            walk(path, levels, repeated)

    for _ in range(elements[0][5][1] if 5 in elements[0] else 0):
        walk((), (), 0)
    return found


@dataclass(frozen=True, slots=True)
class PageSpan:
    """A data page, as the page index has it: where it is, with its header, and the rows from `first` to `stop`."""

    offset: int
    size: int
    first: int
    stop: int


def page_spans(index: bytes, rows: int) -> list[PageSpan]:
    """The pages of a column chunk by its offset index."""
    locations = thrift.decode(index)[0][1][1].items
    firsts = [int(location[3][1]) for location in locations]
    spans = []
    for location, first, stop in zip(locations, firsts, [*firsts[1:], rows], strict=True):
        if not 0 <= first <= stop <= rows:
            raise Damaged("the page index is broken")
        spans.append(PageSpan(int(location[1][1]), int(location[2][1]), first, stop))
    return spans


@dataclass(frozen=True, slots=True)
class FoundValues:
    """The slots of the pages that were looked at, and the places of the values in them.

    A slot has the row it belongs to and its levels. A value (a slot of the highest level) is in the file, or
    in the spool where `spooled`; a start below zero, -1 - n, means the n-th of `pieces`.
    """

    rows: Ints
    repetition: Ints
    definition: Ints
    spooled: np.ndarray[Any, np.dtype[np.bool_]]
    starts: Ints
    sizes: Ints
    pieces: Pieces


class _Collected:
    """Values as they are found."""

    def __init__(self) -> None:
        self.rows: list[Ints] = []
        self.repetition: list[Ints] = []
        self.definition: list[Ints] = []
        self.spooled: list[Any] = []
        self.starts: list[Ints] = []
        self.sizes: list[Ints] = []
        self.edges, self.piece_starts, self.piece_sizes = [0], [], []  # type: ignore[var-annotated]

    def finish(self) -> FoundValues:
        def one(parts: list[Any], kind: Any) -> Any:
            return np.concatenate([np.zeros(0, kind), *parts]).astype(kind, copy=False)

        pieces = Pieces(*(np.array(of, np.int64) for of in (self.edges, self.piece_starts, self.piece_sizes)))
        return FoundValues(
            one(self.rows, np.int64), one(self.repetition, np.uint8), one(self.definition, np.uint8),
            one(self.spooled, bool),
            one(self.starts, np.int64), one(self.sizes, np.int64), pieces,
        )  # fmt: skip

    def place(self, body: PageBody, begins: Ints, sizes: Ints) -> Ints:
        """Where values lie that begin at these places of a page."""
        if len(body.ends) == 1:
            return begins + body.starts[0]
        starts = np.zeros(len(begins), np.int64)
        for number, (begin, size) in enumerate(zip(begins.tolist(), sizes.tolist(), strict=True)):
            pieces = body.pieces(begin, begin + size)
            if len(pieces) <= 1:
                starts[number] = pieces[0][0] if pieces else 0
                continue
            starts[number] = -len(self.edges)
            self.piece_starts += [start for start, _ in pieces]
            self.piece_sizes += [length for _, length in pieces]
            self.edges.append(len(self.piece_starts))
        return starts


@dataclass(slots=True)
class _Dictionary:
    spooled: bool
    starts: Ints
    sizes: Ints


def _lengths(body: PageBody, position: int, end: int, count: int) -> tuple[Ints, Ints]:
    """Where values begin in a page that is a range of a file, and how long they are; only their lengths are read."""
    sizes, read, at, last = [0] * count, body.fetch, body.starts[0] + position, body.starts[0] + end - 4
    for number in range(count):  # a hundred thousand times: nothing is done here that can be done behind
        if at > last:
            raise Damaged("the lengths of a page do not add up to its size")
        length = read(at, 4)
        if len(length) < 4:
            raise Damaged("a page is cut off")
        sizes[number] = size = int.from_bytes(length, "little")
        at += size + 4
    if at > last + 4:
        raise Damaged("the lengths of a page do not add up to its size")
    found = np.array(sizes, np.int64)
    return position + np.cumsum(found + 4) - found, found


class ChunkReader:
    """Finds the values of one column chunk."""

    def __init__(
        self, file: Readable, meta: Struct, leaf: Leaf, rows: int, spool: Spooling,
        near: Callable[[int, int], bool] = lambda start, stop: True,
    ) -> None:  # fmt: skip
        self._file, self._leaf, self._rows, self._spool = file, leaf, rows, spool
        self._near = near  # whether a range of the file costs no more than a read
        self._codec = int(meta[4][1])
        self._slots = int(meta[5][1])
        first = int(meta[9][1])
        dictionary = int(meta[11][1]) if 11 in meta else 0
        self._start = min(first, dictionary) if dictionary else first
        self._end = self._start + int(meta[7][1])
        if not 4 <= self._start <= self._end <= file.size or rows < 0 or self._slots < 0:
            raise Damaged("a column lies outside of the file")
        if self._codec not in (0, *_STREAMED, *_AT_ONCE):
            raise NotLocated("its codec")
        self._dictionary: _Dictionary | None = None
        self._dictionary_page: tuple[Struct, int] | None = None
        self._dictionary_body: tuple[PageBody, bool] | None = None
        self._before = False  # whether a page comes before those of data, at which nobody looked
        self._wanted: Ints | None = None
        self._out = _Collected()

    def find(self, pages: list[PageSpan] | None = None, first: int = 0, rows: Ints | None = None) -> FoundValues:
        """All values, or those of some pages; `first` is where the first of all data pages begins.

        With `rows`, in order, what is not wanted for the values of these rows may be left out.
        """
        self._wanted = rows
        if pages is None:
            row, slots = -1, 0
            for at, header, body_at in self._walk(self._start, self._end):
                if self._is_enough(row):
                    return self._out.finish()
                row, slots = self._page(at, header, body_at, row, slots)
            if row + 1 != self._rows or slots != self._slots:
                raise Damaged("a column has another number of rows than its row group")
            return self._out.finish()
        self._before = self._start < first
        for page in pages:
            if not self._start <= page.offset <= page.offset + page.size <= self._end:
                raise Damaged("the page index is broken")
            row = page.first - 1
            for at, header, body_at in self._walk(page.offset, page.offset + page.size):
                row, _ = self._page(at, header, body_at, row, 0)
            if row + 1 != page.stop:
                raise Damaged("the page index is broken")
        return self._out.finish()

    def _is_enough(self, row: int) -> bool:
        """Whether no wanted row comes after this one; a row of a list may go on in the next page."""
        wanted = self._wanted
        return wanted is not None and (not len(wanted) or row >= int(wanted[-1]) + (self._leaf.max_repetition > 0))

    def _is_passed(self, row: int, rows: int) -> bool:
        """Whether none of the rows after this one is wanted, of which each is a value."""
        if self._wanted is None or self._leaf.max_repetition:
            return False
        low, high = np.searchsorted(self._wanted, [row + 1, row + 1 + rows])
        return bool(low == high)

    def _walk(self, at: int, end: int) -> Iterator[tuple[int, Struct, int]]:
        while at < end:
            header, used = self._header(at, end)
            size = int(header[3][1])
            if size < 0 or at + used + size > end:
                raise Damaged("a page runs past its column")
            yield at, header, at + used
            at += used + size

    def _header(self, at: int, end: int) -> tuple[Struct, int]:
        for most in _HEADER_BYTES:
            try:
                return thrift.decode(self._file.read_at(at, min(most, end - at)))
            except thrift.ThriftError:
                if most >= end - at or most == _HEADER_BYTES[-1]:
                    raise
        raise AssertionError

    def _level_blocks(self, body: PageBody, count: int) -> bytes:
        """The levels before the values of a page, and what came with them. Each block tells its length: DuckDB packs
        256 levels at a time, however few there are."""
        head: bytes = body.read(0, min(body.size, 64 + 4 * count))
        end = 0
        for maximum in (self._leaf.max_repetition, self._leaf.max_definition):
            end += 4 + int.from_bytes(head[end : end + 4], "little") if maximum else 0
            if len(head) < min(end + 4, body.size):
                head = body.read(0, min(end + 4, body.size))
        return head

    def _page(self, at: int, header: Struct, body_at: int, row: int, slots: int) -> tuple[int, int]:
        """Take a page; the last row and the number of slots up to here."""
        kind, size, plain_size = int(header[1][1]), int(header[3][1]), int(header[2][1])
        if plain_size < 0:
            raise Damaged("a page has a size below zero")
        if kind == _DICTIONARY:
            self._dictionary_page = (header, body_at)
            if self._wanted is None:
                self._read_dictionary(self._count(header[7][1][1][1]))
            return row, slots
        if kind not in (_DATA, _DATA_V2):
            return row, slots
        own = header[5 if kind == _DATA else 8][1]
        count = self._count(own[1][1])
        if self._is_passed(row, count):
            return row + count, slots + count
        if kind == _DATA:
            encoding = own[2][1]
            body, spooled = self._body(body_at, size, plain_size, header, self._codec)
            head = self._level_blocks(body, count)
            repetition, used = decode_levels(head, count, self._leaf.max_repetition)
            definition, more = decode_levels(memoryview(head)[used:], count, self._leaf.max_definition)
            position = used + more
        else:
            encoding, levels = own[4][1], (int(own[6][1]), int(own[5][1]))
            if min(levels) < 0 or sum(levels) > min(size, plain_size):
                raise Damaged("the levels of a page are longer than it")
            head = self._file.read_at(body_at, sum(levels))
            repetition = self._levels(head[: levels[0]], count, self._leaf.max_repetition)
            definition = self._levels(head[levels[0] :], count, self._leaf.max_definition)
            codec = self._codec if 7 not in own or own[7][1] else 0
            rest = size - sum(levels)
            body, spooled = self._body(body_at + sum(levels), rest, plain_size - sum(levels), {}, codec)
            position = 0
        if count and (definition.max() > self._leaf.max_definition or repetition.max() > self._leaf.max_repetition):
            raise Damaged("a level is higher than its schema has it")
        if count and row < 0 and repetition[0]:
            raise Damaged("a column begins inside of a list")
        rows = row + np.cumsum(repetition == 0)
        last = int(rows[-1]) if count else row
        full = definition == self._leaf.max_definition
        there, chosen = int(np.count_nonzero(full)), None
        if self._wanted is not None and encoding == PLAIN:
            before = int(np.searchsorted(self._wanted, last, side="right"))
            kept = int(np.searchsorted(rows, self._wanted[before - 1], side="right")) if before else 0
            rows, repetition, definition = rows[:kept], repetition[:kept], definition[:kept]
            there = int(np.count_nonzero(full[:kept]))
        elif self._wanted is not None and encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY):
            mask = np.isin(rows, self._wanted)
            chosen = np.flatnonzero(mask[full])
            rows, repetition, definition = rows[mask], repetition[mask], definition[mask]
        self._take(encoding, body, spooled, position, there, chosen)
        self._out.rows.append(rows.astype(np.int64))
        self._out.repetition.append(repetition.astype(np.uint8))
        self._out.definition.append(definition.astype(np.uint8))
        return last, slots + count

    def _read_dictionary(self, count: int) -> _Dictionary:
        """The first `count` values of the dictionary."""
        if self._before:
            header, used = self._header(self._start, self._end)
            self._before, size = False, int(header[3][1])
            if size < 0 or self._start + used + size > self._end or int(header[2][1]) < 0:
                raise Damaged("a page runs past its column")
            if header[1][1] == _DICTIONARY:
                self._dictionary_page = (header, self._start + used)
        if self._dictionary_page is None:
            raise Damaged("a page refers to a dictionary that is not there")
        header, body_at = self._dictionary_page
        own, size, plain_size = header[7][1], int(header[3][1]), int(header[2][1])
        if count > self._count(own[1][1]):
            raise Damaged("a page refers to what its dictionary does not have")
        if self._dictionary is None or len(self._dictionary.sizes) < count:
            if own[2][1] not in (PLAIN, PLAIN_DICTIONARY):
                raise NotLocated("its dictionary")
            body, spooled = self._dictionary_body or self._body(body_at, size, plain_size, header, self._codec)
            self._dictionary_body = (body, spooled)
            begins, sizes = self._chase(body, 0, body.size, count)
            self._dictionary = _Dictionary(spooled, self._out.place(body, begins, sizes), sizes)
        return self._dictionary

    def _count(self, said: Any) -> int:
        if not 0 <= int(said) <= _MOST_SLOTS:
            raise Damaged("a page says that it holds more values than a page does")
        return int(said)

    @staticmethod
    def _levels(data: bytes, count: int, maximum: int) -> Ints:
        if not maximum:
            return np.zeros(count, np.int64)
        return runs(data, maximum.bit_length(), count)

    def _body(self, at: int, size: int, plain_size: int, header: Struct, codec: int) -> tuple[PageBody, bool]:
        """The page's bytes, and whether they had to go to the spool."""
        data = b""
        if size <= _WHOLE_PAGE_BYTES and self._near(at, at + size):
            data = self._file.read_at(at, size)
            if len(data) != size:
                raise Damaged("a page is cut off")
            self._compare(data, header)
        if codec == 0:
            if size != plain_size:
                raise Damaged("a page that is not compressed has two sizes")
            return plain_body(data, at, size, self._file.read_at), False
        if not size and not plain_size:
            return plain_body(b"", at, 0, self._file.read_at), False
        fetch = self._file.read_at if not data else lambda start, count: data[start - at : start - at + count]
        body = None
        if codec == 1:
            body = snappy_body(fetch, at, size, plain_size)
        elif codec == 6:
            body = zstd_body(fetch, at, size, plain_size)
        if body is not None:
            return body, False
        return self._spooled(data or self._file.read_at(at, size), plain_size, codec), True

    @staticmethod
    def _compare(data: bytes, header: Struct) -> None:
        """With the page's checksum, if it has one. Of large pages, only lengths are read."""
        if 4 in header and zlib.crc32(data) != header[4][1] & 0xFFFFFFFF:
            raise Damaged("a page does not have the checksum that it should")

    def _spooled(self, data: bytes, size: int, codec: int) -> PageBody:
        start = self._spool.size
        if codec in _AT_ONCE:
            name, ratio = _AT_ONCE[codec]
            if size > ratio * len(data) + 64:
                raise Damaged("a compressed page says that it is larger than it can be")
            plain = pa.Codec(name).decompress(data, size)
            if len(plain) != size:
                raise Damaged("a compressed page has another size than its header says")
            self._spool.append(memoryview(plain))
        else:
            done = 0
            with pa.CompressedInputStream(pa.BufferReader(data), _STREAMED[codec]) as stream:
                while block := stream.read(_BLOCK_BYTES):
                    done += len(block)
                    if done > size:
                        break
                    self._spool.append(block)
            if done != size:
                raise Damaged("a compressed page has another size than its header says")
        return plain_body(b"", start, size, self._spool.read_at)

    def _chase(self, body: PageBody, position: int, end: int, count: int) -> tuple[Ints, Ints]:
        """From length to length: where values begin in a page, and how long they are."""
        begins, sizes = [0] * count, [0] * count
        whole: bytes | memoryview = b""
        if len(body.ends) == 1 and body.fetch == self._file.read_at:
            start = body.starts[0]
            if not self._near(start + position, start + end):
                return _lengths(body, position, end, count)
        if len(body.ends) == 1 and body.data:
            whole = memoryview(body.data)
        elif len(body.ends) == 1 and end - position <= _WHOLE_PAGE_BYTES:
            whole = bytes(position) + body.read(position, end - position)
        # Between small values more is read than their lengths: one call takes as long as some thousand bytes.
        local = isinstance(self._file, LocalFile)
        if end - position < count * (_SMALL_BYTES if local else _SMALL_BYTES_FAR):
            step = _CHASED_BYTES if local else _BLOCK_BYTES
        elif len(body.ends) == 1 and not whole:
            return _lengths(body, position, end, count)
        else:
            step = 4
        window, window_at = b"", 0
        for number in range(count):
            if position + 4 > end:
                raise Damaged("the lengths of a page do not add up to its size")
            if not whole and not window_at <= position <= window_at + len(window) - 4:
                window, window_at = body.read(position, min(step, end - position)), position
            (size,) = _LENGTH.unpack_from(whole or window, position - (0 if whole else window_at))
            position += 4
            begins[number], sizes[number] = position, size
            position += size
        if position > end:
            raise Damaged("the lengths of a page do not add up to its size")
        return np.array(begins, np.int64), np.array(sizes, np.int64)

    def _take(
        self, encoding: int, body: PageBody, spooled: bool, position: int, count: int, chosen: Ints | None
    ) -> None:
        """Find the values of a data page, or of one with a dictionary only those that are chosen."""
        out = self._out
        if encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY):
            data = body.read(position, body.size - position)
            if not data and count:
                raise Damaged("the numbers of a page end early")
            numbers = runs(data[1:], data[0], count) if count else np.zeros(0, np.int64)
            numbers = numbers if chosen is None else numbers[chosen]
            starts, sizes = numbers, numbers
            if len(numbers):
                known = self._read_dictionary(int(numbers.max()) + 1)
                starts, sizes, spooled = known.starts[numbers], known.sizes[numbers], known.spooled
        elif encoding == PLAIN:
            begins, sizes = self._chase(body, position, body.size, count)
            starts = out.place(body, begins, sizes)
        elif encoding == DELTA_LENGTH:
            sizes, used = self._delta(body, position, count)
            begins = position + used + np.cumsum(sizes) - sizes
            if count and (sizes.min() < 0 or begins[-1] + sizes[-1] > body.size):
                raise Damaged("the lengths of a page do not add up to its size")
            starts = out.place(body, begins, sizes)
        elif encoding == DELTA_BYTES:
            starts, sizes = self._rebuilt(body, position, count)
            spooled = True
        else:
            raise NotLocated("its encoding")
        out.starts.append(starts)
        out.sizes.append(sizes)
        out.spooled.append(np.full(len(sizes), spooled))

    def _delta(self, body: PageBody, position: int, count: int) -> tuple[Ints, int]:
        return delta_ints(body.read(position, delta_bytes(body.read(position, _DELTA_HEAD_BYTES), count)), count)

    def _rebuilt(self, body: PageBody, position: int, count: int) -> tuple[Ints, Ints]:
        """Values that share their beginnings with the one before: they go to the spool, each whole."""
        shared, used = self._delta(body, position, count)
        sizes, more = self._delta(body, position + used, count)
        at, last = position + used + more, b""
        starts, whole = np.zeros(count, np.int64), shared + sizes
        for number, (keep, size) in enumerate(zip(shared.tolist(), sizes.tolist(), strict=True)):
            if not 0 <= keep <= len(last) or size < 0 or at + size > body.size:
                raise Damaged("the lengths of a page do not add up to its size")
            last = last[:keep] + body.read(at, size)
            starts[number] = self._spool.append(last)
            at += size
        return starts, whole
