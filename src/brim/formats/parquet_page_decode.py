"""Describe the bytes of one Parquet page as ranges of its file, and decode the numbers of its encodings.

Media files do not compress, so snappy stores them as literals and zstd as raw blocks: both are ranges of the file. A
page that is really compressed is not described here; its reader must decompress it. Pages are not trusted: every number
is compared with the available bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from brim.file_set import Ints
from brim.formats.parquet_levels import Damaged, read_varint, unpack_bits
from brim.records import dataclass

_MIN_RANGE_BYTES = 512  # on average: with shorter ranges, decompressing is cheaper
_WINDOW_BYTES = 4096
_MAX_VARINT_BYTES = 10
_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_ID_BYTES, _ZSTD_SIZE_BYTES = (0, 1, 2, 4), (0, 2, 4, 8)

Fetch = Callable[[int, int], bytes]  # (offset, size) -> bytes of the file; fewer only at its end


@dataclass(frozen=True, slots=True)
class PageBody:
    """The uncompressed bytes of a page: those from `ends[n - 1]` to `ends[n]` are the file's from `starts[n]` on.

    `data` is the stored page if it was read; otherwise `fetch` reads the requested ranges.
    """

    data: bytes | memoryview
    ends: list[int]
    starts: list[int]
    fetch: Fetch

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, size: int) -> bytes:
        """Read bytes of the page; fewer only at its end."""
        size = max(min(size, self.size - start), 0)
        if self.data and len(self.ends) == 1:
            return bytes(self.data[start : start + size])
        ranges = self.ranges(start, start + size)
        out = self.fetch(*ranges[0]) if len(ranges) == 1 else b"".join(self.fetch(*each) for each in ranges)
        if len(out) != size:
            raise Damaged("a page is cut off")
        return out

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges (offset, size) of the file with the bytes from `start` to `stop` of the page."""
        ranges: list[tuple[int, int]] = []
        number = bisect_right(self.ends, start)
        while start < stop:
            before = self.ends[number - 1] if number else 0
            size = min(stop, self.ends[number]) - start
            offset = self.starts[number] + start - before
            if ranges and sum(ranges[-1]) == offset:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + size)
            else:
                ranges.append((offset, size))
            start, number = start + size, number + 1
        return ranges


def plain_body(data: bytes | memoryview, offset: int, size: int, fetch: Fetch) -> PageBody:
    """Describe a page that is not compressed; `data` is all of it, or empty."""
    return PageBody(data, [size], [offset], fetch)


class _Cursor:
    """Read the few bytes between literals, which may be megabytes, through a small window."""

    def __init__(self, fetch: Fetch, position: int, end: int) -> None:
        self._fetch, self.position, self.end = fetch, position, end
        self._window, self._window_start = b"", position

    def take(self, size: int) -> int:
        """Read the next bytes as a number."""
        start = self.position - self._window_start
        if start < 0 or start + size > len(self._window):
            self._window = self._fetch(self.position, min(_WINDOW_BYTES, self.end - self.position))
            self._window_start, start = self.position, 0
        if start + size > len(self._window):
            raise Damaged("a compressed page ends early")
        self.position += size
        return int.from_bytes(self._window[start : start + size], "little")


def snappy_body(fetch: Fetch, offset: int, length: int, size: int) -> PageBody | None:
    """Describe a page compressed by snappy; return None if it has many short ranges."""
    if not length:
        raise Damaged("a compressed page ends early")
    stored_size, used = read_varint(fetch(offset, min(_MAX_VARINT_BYTES, length)), 0)
    cursor = _Cursor(fetch, offset + used, offset + length)
    if stored_size != size:
        raise Damaged("a compressed page has another size than its header says")
    ends: list[int] = []
    starts: list[int] = []
    position, max_ranges = 0, 64 + size // _MIN_RANGE_BYTES
    while cursor.position < cursor.end:
        tag = cursor.take(1)
        kind, run = tag & 3, (tag >> 2) + 1
        if kind == 0:  # a literal
            run = cursor.take(run - 60) + 1 if run > 60 else run
            position += run
            ends.append(position)
            starts.append(cursor.position)
            cursor.position += run
        else:  # a copy of earlier bytes, which are ranges of the file as well
            if kind == 1:
                run, back = ((tag >> 2) & 7) + 4, (tag >> 5 << 8) | cursor.take(1)
            else:
                back = cursor.take(2 if kind == 2 else 4)
            if not 0 < back <= position:
                raise Damaged("a compressed page refers to what is not there")
            while run > 0:
                number = bisect_right(ends, position - back)
                before = ends[number - 1] if number else 0
                step = min(run, ends[number] - position + back, back)
                starts.append(starts[number] + position - back - before)
                position += step
                ends.append(position)
                run -= step
        if len(ends) > max_ranges:
            return None
    if position != size or cursor.position != cursor.end:
        raise Damaged("a compressed page has another size than its header says")
    return PageBody(b"", ends, starts, fetch)


def zstd_body(fetch: Fetch, offset: int, length: int, size: int) -> PageBody | None:
    """Describe a page of which zstd compressed no block; return None if it compressed one."""
    cursor = _Cursor(fetch, offset, offset + length)
    if length < 9 or cursor.take(4) != _ZSTD_MAGIC:
        return None
    flags = cursor.take(1)
    is_single = flags >> 5 & 1
    cursor.position += (not is_single) + _ZSTD_ID_BYTES[flags & 3] + (_ZSTD_SIZE_BYTES[flags >> 6] or is_single)
    ends: list[int] = []
    starts: list[int] = []
    position, is_last = 0, False
    while not is_last:
        if cursor.position + 3 > cursor.end:
            return None
        block = cursor.take(3)
        run, is_last = block >> 3, bool(block & 1)
        if block >> 1 & 3 or cursor.position + run > cursor.end:
            return None
        if run:
            position += run
            ends.append(position)
            starts.append(cursor.position)
        cursor.position += run
    checksum_bytes = 4 if flags >> 2 & 1 else 0  # may follow; another frame may not
    if position != size or cursor.end - cursor.position != checksum_bytes:
        return None
    return PageBody(b"", ends, starts, fetch)


def max_delta_bytes(head: bytes, count: int) -> int:
    """Return the most bytes that `count` numbers of DELTA_BINARY_PACKED take, from their first bytes."""
    block, position = read_varint(head, 0)
    miniblocks, _ = read_varint(head, position)
    if not 0 < miniblocks <= 512 or not 0 < block <= 1 << 20:
        raise Damaged("the lengths of a page are broken")
    values = block // miniblocks  # of a miniblock; the last one is stored completely
    return 64 + (count // max(values, 1) + 1) * values * 8 + (count // block + 1) * (10 + miniblocks)


def decode_delta(data: bytes, count: int) -> tuple[Ints, int]:
    """Decode `count` numbers of DELTA_BINARY_PACKED; return the number of bytes that they took too."""
    block, position = read_varint(data, 0)
    miniblocks, position = read_varint(data, position)
    total, position = read_varint(data, position)
    first, position = read_varint(data, position)
    if (
        total != count
        or not 0 < miniblocks <= 512
        or not 0 < block <= 1 << 20
        or block % miniblocks
        or block // miniblocks % 8
    ):
        raise Damaged("the lengths of a page are broken")
    values = block // miniblocks
    if not count:
        return np.zeros(0, np.int64), position
    deltas = [np.array([_zigzag(first)], np.int64)]
    decoded = 1
    while decoded < count:
        least, position = read_varint(data, position)
        widths = data[position : position + miniblocks]
        position += miniblocks
        for width in widths:
            if decoded >= count:
                break
            size = values * width // 8
            if width > 64 or position + size > len(data):
                raise Damaged("the lengths of a page end early")
            part = unpack_bits(data[position : position + size], width, values)
            deltas.append(part[: count - decoded] + _zigzag(least))
            position += size
            decoded += len(deltas[-1])
        if len(widths) < miniblocks:
            raise Damaged("the lengths of a page end early")
    return np.cumsum(np.concatenate(deltas)), position


def _zigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def decode_runs(data: bytes, width: int, count: int) -> Ints:
    """Decode `count` numbers of `width` bits from the mix of runs and packed bits of levels and dictionary numbers."""
    parts, decoded, position = [np.zeros(0, np.int64)], 0, 0
    if width > 32:
        raise Damaged("the numbers of a page are too wide")
    while decoded < count:
        head, position = read_varint(data, position)
        if head & 1:
            length = min((head >> 1) * 8, count - decoded + 7 & ~7)
            if position + length * width // 8 > len(data):
                # Writers may omit the end of the last group.
                length = (len(data) - position) * 8 // width if width else 0
                length = length if length >= count - decoded else 0
            part = unpack_bits(data[position : position + -(-length * width // 8)], width, length)
            position += (head >> 1) * width
        else:
            size = (width + 7) // 8
            value = int.from_bytes(data[position : position + size], "little")
            part = np.full(min(head >> 1, count - decoded), value, np.int64)
            position += size
            if position > len(data):
                raise Damaged("the numbers of a page end early")
        if not len(part):
            raise Damaged("the numbers of a page end early")
        parts.append(part)
        decoded += len(part)
    return np.concatenate(parts)[:count]
