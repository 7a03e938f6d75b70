"""Locate values in remote shards of other programs, with few bytes and few requests.

No list has their sizes: these precede the values, so that the offset of a value depends on all previous ones in its
page. Pages of small values, and those of which most is needed, are fetched. In other pages the lengths are followed by
a tiny request each, in many pages at once. The cheaper way is chosen per page: a request costs as much as some bytes.
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


class Spool(Protocol):
    def read_at(self, offset: int, size: int) -> bytes: ...


class FarChunk:
    """A shard to find values in: fetched ranges from the copy, others by tiny requests. For one thread."""

    def __init__(self, copy: FarCopy, spool: Spool) -> None:
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
