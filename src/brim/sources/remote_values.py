"""Where values lie in shards far away that others wrote, by few bytes and few requests.

No list tells their sizes: these stand before the values, so that where one begins is told by all that come before it in
its page. Pages of small values, and those of which most is wanted, are fetched. In others lengths are followed, a tiny
request each, many pages at once. What is cheaper is decided page by page: a request costs as much as some bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from brim.file_set import Bools, Ints
from brim.formats.parquet_values import PageSpan
from brim.records import dataclass
from brim.sources.dataset_files import Range, RemoteShard
from brim.storage.reading import join_ranges

REQUEST_BYTES = 64 << 10  # what a request costs that is on its way with others: join_ranges takes as much between two
_WAIT_BYTES = 192 << 10  # and one of many that each wait for the one before: 20 ms of a line of 80 Mbit/s
_FEW = 32
_SLACK = 1.02  # values of one page are about of one size
_HEAD_BYTES = 4096  # the header of a page and its levels
_TINY_BYTES = 512
_PIECE_BYTES = 16 << 20  # of what is fetched, in one request


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """A column chunk: where it is, how many rows and slots it has, and its pages if there is an index."""

    start: int
    stop: int
    rows: int
    slots: int
    plain: bool  # not compressed
    pages: Sequence[PageSpan] | None

    @property
    def follows(self) -> bool:
        """Whether its lengths can be followed, and its values are so large that it may pay."""
        return self.plain and self.slots > 0 and (self.stop - self.start) // self.slots >= REQUEST_BYTES


def fetched_ranges(chunk: ChunkShape, rows: Ints | None) -> list[Range]:
    """What is fetched of a chunk to find the values of some rows (in order), or of all."""
    if rows is None or (chunk.pages is None and not chunk.follows):
        return [(chunk.start, chunk.stop)]
    pages = chunk.pages
    if pages is None:
        pages = [PageSpan(chunk.start, chunk.stop - chunk.start, 0, chunk.rows)]
    found: list[Range] = []
    wanted = _wanted_of(pages, rows)
    for page, of in zip(pages, wanted, strict=True):
        if not len(of):
            continue
        size = page.size if not chunk.follows else _up_to(page, of)
        beside = bool(found) and found[-1][1] == page.offset
        if not chunk.follows or size + (0 if beside else REQUEST_BYTES) <= _followed(page, of):
            found.append((page.offset, page.offset + size))
    first = min((page.offset for page in pages), default=chunk.start)
    return [(chunk.start, first), *found] if chunk.start < first and found and not chunk.follows else found


def _wanted_of(pages: Sequence[PageSpan], rows: Ints) -> list[Ints]:
    edges = np.searchsorted(rows, [page.first for page in pages])
    return np.split(rows, edges[1:])


def _row_bytes(page: PageSpan) -> float:
    return page.size / max(page.stop - page.first, 1)


def _up_to(page: PageSpan, rows: Ints) -> int:
    """About how much of a page holds the values up to the last one that is wanted."""
    count = int(rows[-1]) - page.first + 1
    return min(page.size, int(count * _row_bytes(page) * _SLACK) + _HEAD_BYTES)


def _followed(page: PageSpan, rows: Ints) -> float:
    """What it costs to follow the lengths to the last value that is wanted, and to ask for these values then."""
    hops = int(rows[-1]) - page.first + 2
    return hops * (REQUEST_BYTES if hops <= _FEW else _WAIT_BYTES) + len(rows) * _row_bytes(page)


def in_pieces(ranges: Sequence[Range]) -> list[Range]:
    """Ranges that are held one at a time while they come."""
    return [
        (at, min(at + _PIECE_BYTES, stop)) for start, stop in ranges for at in range(start, stop, _PIECE_BYTES)
    ]  # fmt: skip


class FarCopy:
    """What was fetched of a shard far away: in a file, at its own places behind `base`."""

    def __init__(self, remote: RemoteShard, base: int, ranges: Sequence[Range]) -> None:
        self.remote, self.base = remote, base
        kept = [(start, start + len(data)) for start, data in remote.kept()]
        self._present = join_ranges([*ranges, *kept], gap=0, most_bytes=None)
        self._starts = np.array([start for start, _ in self._present], np.int64)
        self._stops = np.array([stop for _, stop in self._present], np.int64)

    def holds(self, starts: Ints, stops: Ints) -> Bools:
        """Which ranges are in the copy as a whole."""
        if not len(self._starts):
            return np.zeros(len(starts), bool)
        at = np.searchsorted(self._starts, starts, side="right") - 1
        return np.asarray((at >= 0) & (stops <= self._stops[at]), bool)


class Spool(Protocol):
    def read_at(self, offset: int, size: int) -> bytes: ...


class FarChunk:
    """A shard to look for values in: what was fetched from the copy, the rest by tiny requests. For one thread."""

    def __init__(self, copy: FarCopy, spool: Spool) -> None:
        self._copy, self._spool = copy, spool
        self.name, self.size = copy.remote.name, copy.remote.size
        self._at, self._window = 0, b""

    def has(self, start: int, stop: int) -> bool:
        return bool(self._copy.holds(np.array([start]), np.array([stop]))[0])

    def read_at(self, offset: int, size: int) -> bytes:
        size = max(min(size, self.size - offset), 0)
        if self.has(offset, offset + size):
            return self._spool.read_at(self._copy.base + offset, size)
        begin = offset - self._at
        if begin < 0 or begin + size > len(self._window):
            stop = min(offset + max(size, _TINY_BYTES), self.size)
            self._at, self._window, begin = offset, self._copy.remote.fetch(offset, stop), 0
        return self._window[begin : begin + size]

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        raise NotImplementedError  # values of a copy go into splices

    def close(self) -> None:
        return None
