"""The bytes of one Parquet page as pieces of the file it lies in, and what its encodings say of lengths.

Media do not compress, so snappy keeps them as literals and zstd as raw blocks: both are ranges of the file as it is.
A page that is compressed in earnest is not described here; whoever reads it has to decompress it. Nothing here trusts
what a page says of itself: every number is compared with the bytes there are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from brim.file_set import Ints
from brim.records import dataclass

_LEAST_PIECE_BYTES = 512  # on average: below it, decompressing is cheaper than as many pieces
_WINDOW_BYTES = 4096
_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_ID_BYTES, _ZSTD_SIZE_BYTES = (0, 1, 2, 4), (0, 2, 4, 8)


class Damaged(ValueError):
    """A page is not what its header says."""


Fetch = Callable[[int, int], bytes]  # bytes of the file: from where, how many; fewer only at its end


@dataclass(frozen=True, slots=True)
class PageBody:
    """What a page holds, uncompressed: from `ends[n - 1]` to `ends[n]` it is the file from `starts[n]` on.

    `data` is the page as it lies in the file, if it was read; else `fetch` reads what is asked for.
    """

    data: bytes | memoryview
    ends: list[int]
    starts: list[int]
    fetch: Fetch

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, size: int) -> bytes:
        """Some bytes of the page; fewer only at its end."""
        size = max(min(size, self.size - start), 0)
        if self.data and len(self.ends) == 1:
            return bytes(self.data[start : start + size])
        found = self.pieces(start, start + size)
        out = self.fetch(*found[0]) if len(found) == 1 else b"".join(self.fetch(*piece) for piece in found)
        if len(out) != size:
            raise Damaged("a page is cut off")
        return out

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Where in the file the bytes from `start` to `stop` of the page lie: (start, size) in order."""
        found: list[tuple[int, int]] = []
        number = bisect_right(self.ends, start)
        while start < stop:
            before = self.ends[number - 1] if number else 0
            size = min(stop, self.ends[number]) - start
            at = self.starts[number] + start - before
            if found and sum(found[-1]) == at:
                found[-1] = (found[-1][0], found[-1][1] + size)
            else:
                found.append((at, size))
            start, number = start + size, number + 1
        return found


def plain_body(data: bytes | memoryview, at: int, size: int, fetch: Fetch) -> PageBody:
    """The body of a page that is not compressed and begins at byte `at`; `data` is all of it, or nothing."""
    return PageBody(data, [size], [at], fetch)


class _Cursor:
    """Reads the few bytes between literals, which may be megabytes, through a small window."""

    def __init__(self, fetch: Fetch, at: int, end: int) -> None:
        self._fetch, self.at, self.end = fetch, at, end
        self._window, self._from = b"", at

    def take(self, size: int) -> int:
        """The number that the next bytes are."""
        begin = self.at - self._from
        if begin < 0 or begin + size > len(self._window):
            self._window, self._from, begin = self._fetch(self.at, min(_WINDOW_BYTES, self.end - self.at)), self.at, 0
        if begin + size > len(self._window):
            raise Damaged("a compressed page ends early")
        self.at += size
        return int.from_bytes(self._window[begin : begin + size], "little")

    def varint(self) -> int:
        value = shift = 0
        while shift < 64:
            byte = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise Damaged("a number in a page does not end")


def snappy_body(fetch: Fetch, at: int, length: int, size: int) -> PageBody | None:
    """The pieces of a page that snappy compressed; None if they are many and small. Damaged if it is not one."""
    cursor = _Cursor(fetch, at, at + length)
    if cursor.varint() != size:
        raise Damaged("a compressed page has another size than its header says")
    ends: list[int] = []
    starts: list[int] = []
    out, most = 0, 64 + size // _LEAST_PIECE_BYTES
    while cursor.at < cursor.end:
        tag = cursor.take(1)
        kind, run = tag & 3, (tag >> 2) + 1
        if kind == 0:
            run = cursor.take(run - 60) + 1 if run > 60 else run
            out += run
            ends.append(out)
            starts.append(cursor.at)
            cursor.at += run
        else:
            if kind == 1:
                run, back = ((tag >> 2) & 7) + 4, (tag >> 5 << 8) | cursor.take(1)
            else:
                back = cursor.take(2 if kind == 2 else 4)
            if not 0 < back <= out:
                raise Damaged("a compressed page refers to what is not there")
            out = _copy(ends, starts, out, back, run)
        if len(ends) > most:
            return None
    if out != size or cursor.at != cursor.end:
        raise Damaged("a compressed page has another size than its header says")
    return PageBody(b"", ends, starts, fetch)


def _copy(ends: list[int], starts: list[int], out: int, back: int, length: int) -> int:
    """Add what snappy takes from before: it is a range of the file as well."""
    while length > 0:
        place = out - back
        number = bisect_right(ends, place)
        before = ends[number - 1] if number else 0
        step = min(length, ends[number] - place, back)
        starts.append(starts[number] + place - before)
        out += step
        ends.append(out)
        length -= step
    return out


def zstd_body(fetch: Fetch, at: int, length: int, size: int) -> PageBody | None:
    """The raw blocks of a page that zstd did not manage to compress; None if it compressed one of them."""
    cursor = _Cursor(fetch, at, at + length)
    if length < 9 or cursor.take(4) != _ZSTD_MAGIC:
        return None
    head = cursor.take(1)
    single = head >> 5 & 1
    cursor.at += (not single) + _ZSTD_ID_BYTES[head & 3] + (_ZSTD_SIZE_BYTES[head >> 6] or single)
    ends: list[int] = []
    starts: list[int] = []
    out, last = 0, False
    while not last:
        if cursor.at + 3 > cursor.end:
            return None
        block = cursor.take(3)
        run, last = block >> 3, bool(block & 1)
        if block >> 1 & 3 or cursor.at + run > cursor.end:
            return None
        if run:
            out += run
            ends.append(out)
            starts.append(cursor.at)
        cursor.at += run
    if out != size or cursor.end - cursor.at != (4 if head >> 2 & 1 else 0):  # a checksum may follow, no other frame
        return None
    return PageBody(b"", ends, starts, fetch)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        if at >= len(data):
            break
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise Damaged("a number in a page does not end")


def _zigzag(value: int) -> int:
    return (value >> 1) ^ -(value & 1)


def delta_bytes(head: bytes, count: int) -> int:
    """The most that `count` numbers of DELTA_BINARY_PACKED take, by their first bytes: parts of a block are whole."""
    block, at = _read_varint(head, 0)
    parts, _ = _read_varint(head, at)
    if not 0 < parts <= 512 or not 0 < block <= 1 << 20:
        raise Damaged("the lengths of a page are broken")
    in_part = block // parts
    return 64 + (count // max(in_part, 1) + 1) * in_part * 8 + (count // block + 1) * (10 + parts)


def delta_ints(data: bytes, count: int) -> tuple[Ints, int]:
    """`count` numbers of DELTA_BINARY_PACKED, and how many bytes they took."""
    block, at = _read_varint(data, 0)
    parts, at = _read_varint(data, at)
    total, at = _read_varint(data, at)
    first, at = _read_varint(data, at)
    if total != count or not 0 < parts <= 512 or not 0 < block <= 1 << 20 or block % parts or block // parts % 8:
        raise Damaged("the lengths of a page are broken")
    in_part = block // parts
    values = np.zeros(count, np.int64)
    if not count:
        return values, at
    deltas = [np.array([_zigzag(first)], np.int64)]
    have = 1
    while have < count:
        least, at = _read_varint(data, at)
        widths = data[at : at + parts]
        at += parts
        for width in widths:
            if have >= count:
                break
            size = in_part * width // 8
            if width > 64 or at + size > len(data):
                raise Damaged("the lengths of a page end early")
            deltas.append(_unpacked(data[at : at + size], width, in_part)[: count - have] + _zigzag(least))
            at += size
            have += len(deltas[-1])
        if len(widths) < parts:
            raise Damaged("the lengths of a page end early")
    np.cumsum(np.concatenate(deltas), out=values)
    return values, at


def _unpacked(data: bytes, width: int, count: int) -> Ints:
    """Numbers of `width` bits each."""
    if not width:
        return np.zeros(count, np.int64)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").reshape(count, width)
    return np.asarray((bits.astype(np.uint64) << np.arange(width, dtype=np.uint64)).sum(axis=1).astype(np.int64))


def runs(data: bytes, width: int, count: int) -> Ints:
    """`count` numbers of `width` bits in the hybrid of runs and packed bits, as levels and dictionary numbers are."""
    values, have, at = [np.zeros(0, np.int64)], 0, 0
    if width > 32:
        raise Damaged("the numbers of a page are too wide")
    while have < count:
        head, at = _read_varint(data, at)
        if head & 1:
            length = min((head >> 1) * 8, count - have + 7 & ~7)
            size = length * width // 8
            if at + size > len(data):
                # Writers may leave out the end of the last group.
                length = (len(data) - at) * 8 // width if width else 0
                size = length * width // 8
                length = length if length >= count - have else 0
            part = _unpacked_any(data[at : at + size], width, length)
            at += (head >> 1) * width
        else:
            size = (width + 7) // 8
            part = np.full(min(head >> 1, count - have), int.from_bytes(data[at : at + size], "little"), np.int64)
            at += size
            if at > len(data):
                raise Damaged("the numbers of a page end early")
        if not len(part):
            raise Damaged("the numbers of a page end early")
        values.append(part)
        have += len(part)
    return np.concatenate(values)[:count]


def _unpacked_any(data: bytes, width: int, count: int) -> Ints:
    if not width:
        return np.zeros(count, np.int64)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: count * width].reshape(count, width)
    out = np.zeros(count, np.int64)
    for place in range(width):
        out |= bits[:, place].astype(np.int64) << place
    return out
