"""Divide the rows of an epoch among ranks and workers, now and after any number of changes of their numbers.

Rows are positions in the order of the epoch. What is left of it is a list of ranges. Each rank takes an equal part of
what is left, in order, and each of its workers a part of that, so that every reader reads one range from its start.
Worker k mod W of a rank makes its batch k, as a DataLoader takes them.

The rows that a run has consumed follow from how many batches each rank took, under which numbers of ranks and workers:
a list of `Leg`, which is all that a checkpoint has to hold.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from brim.records import dataclass

Range = tuple[int, int]
Last = Literal["drop", "pad", "keep"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks and workers read, what a batch is, and what becomes of rows that do not fill one."""

    ranks: int
    workers: int
    batch_size: int
    last: Last


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of an epoch under one layout: how many batches each rank took."""

    layout: Layout
    batches: int


class Shares:
    """What each rank and worker reads of the ranges that are left of an epoch."""

    def __init__(self, ranges: Sequence[Range], layout: Layout) -> None:
        self._ranges, self.layout = [(start, stop) for start, stop in ranges if stop > start], layout
        self._before = [0, *accumulate(stop - start for start, stop in self._ranges)]
        self.rows = self._before[-1]

    def batches(self, rank: int) -> int:
        """Return how many batches a rank takes. It is the same for all, except with last="keep"."""
        size = self.layout.batch_size
        if self.layout.last == "drop":
            return self.rows // self.layout.ranks // size
        if self.layout.last == "pad":
            return math.ceil(math.ceil(self.rows / self.layout.ranks) / size)
        return -(-self._rank_rows(rank) // size)

    def _rank_start(self, rank: int) -> int:
        return -(-rank * self.rows // self.layout.ranks)  # as the lanes of the order are cut

    def _rank_rows(self, rank: int) -> int:
        return self._rank_start(rank + 1) - self._rank_start(rank)

    def _reader(self, rank: int, worker: int) -> Range:
        """Return the range of a worker of a rank, in positions among the rows that are left of the epoch."""
        size, workers = self.layout.batch_size, self.layout.workers
        batches, rows = self.batches(rank), self._rank_rows(rank)
        start = self._rank_start(rank)
        stop = start + min(batches * size, rows)
        owner_of_last = (batches - 1) % workers
        missing = max(batches * size - rows, 0)  # rows that the last batch is short of
        for number in range(worker + 1):
            quota = _turns(batches, number, workers) * size - (missing if number == owner_of_last and batches else 0)
            end = min(start + quota, stop)
            if number == worker:
                return start, end
            start = end
        return start, start

    def ranges(self, rank: int, worker: int, batches_done: int = 0) -> list[Range]:
        """Return what a reader has left after its rank has taken some batches."""
        start, stop = self._reader(rank, worker)
        done = _turns(min(batches_done, self.batches(rank)), worker, self.layout.workers)
        return self._cut(min(start + done * self.layout.batch_size, stop), stop)

    def left(self, batches_done: int) -> list[Range]:
        """Return the ranges that no reader has consumed after each rank has taken some batches."""
        if not batches_done:
            return self._ranges
        left: list[Range] = []
        for rank in range(self.layout.ranks):
            for worker in range(self.layout.workers):
                left += self.ranges(rank, worker, batches_done)
            _, read = self._reader(rank, self.layout.workers - 1)
            left += self._cut(read, self._rank_start(rank + 1))
        return _merged(left)

    def _cut(self, start: int, stop: int) -> list[Range]:
        """Return the ranges of the epoch that are these rows of what is left."""
        found = []
        number = bisect_right(self._before, start) - 1
        while start < stop:
            first, end = self._ranges[number][0] - self._before[number], min(stop, self._before[number + 1])
            if end > start:
                found.append((first + start, first + end))
            start, number = end, number + 1
        return found


def _turns(batches: int, worker: int, workers: int) -> int:
    """Return how many of the first batches of a rank a worker makes."""
    return max(batches - worker + workers - 1, 0) // workers


def _merged(ranges: Sequence[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def ranges_left(rows: int, legs: Sequence[Leg]) -> list[Range]:
    """Return what is left of an epoch after these legs."""
    ranges: list[Range] = [(0, rows)] if rows else []
    for leg in legs:
        ranges = Shares(ranges, leg.layout).left(leg.batches)
    return ranges


def current_shares(rows: int, legs: Sequence[Leg], layout: Layout) -> tuple[Shares, int]:
    """Return the shares under a layout, and how many batches each rank has taken of them.

    If it is the layout of the last leg, that leg continues: the order is that of a run without an interruption.
    """
    if legs and legs[-1].layout == layout:
        return Shares(ranges_left(rows, legs[:-1]), layout), legs[-1].batches
    return Shares(ranges_left(rows, legs), layout), 0
