"""The order of one epoch: which rows follow each other. It depends on the dataset, the seed and the epoch alone.

Row groups are put in an order that (seed, epoch) decides. Their rows, one row group after the other, are cut into
lanes of equal length, and each lane into windows (if a window is larger than a lane, there are fewer lanes). Rows are
shuffled inside their window. A reader takes a range of this order: it holds one window at a time, and reads its row
groups once.

Which rank and worker takes which range: `row_shares`. Reading the rows: `row_group_reader`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from brim.file_set import Ints
from brim.records import dataclass
from brim.sources.selection import keyed


@dataclass(frozen=True, slots=True)
class Stretch:
    """Successive rows of one row group: `start` and `stop` count its rows, or the selected ones of them."""

    block: int
    start: int
    stop: int


class EpochOrder:
    """The order of one epoch of row groups with these numbers of rows. Without `shuffle`, that of the files."""

    def __init__(self, rows: Ints, *, seed: int, epoch: int, window: int, lanes: int, shuffle: bool) -> None:
        self._seed, self._epoch, self._shuffle = seed, epoch, shuffle
        numbers = np.arange(len(rows), dtype=np.int64)
        if shuffle:
            numbers = numbers[np.argsort(keyed(numbers, seed, f"row groups of epoch {epoch}"), kind="stable")]
        self._blocks = numbers
        self._edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows[numbers], dtype=np.int64)])
        self.rows = int(self._edges[-1])
        self._window = max(window, 1)
        # A lane is not smaller than a window: then fewer lanes, whose number divides the one that was asked for.
        most = max(self.rows // self._window, 1)
        self._lanes = max(number for number in range(1, min(lanes, most) + 1) if lanes % number == 0)

    def window(self, position: int) -> tuple[int, int]:
        """Return the range of the window that contains a position; it never crosses the edge of a lane."""
        if not self._shuffle:
            return position, position + 1
        lane = position * self._lanes // self.rows
        start, stop = -(-lane * self.rows // self._lanes), -(-(lane + 1) * self.rows // self._lanes)
        first = start + (position - start) // self._window * self._window
        return first, min(first + self._window, stop)

    def shuffled(self, start: int, stop: int) -> Ints:
        """Return the order of the rows of a window, counted from its first row."""
        keys = keyed(np.arange(start, stop, dtype=np.int64), self._seed, f"rows of epoch {self._epoch}")
        return np.argsort(keys, kind="stable").astype(np.int64)

    @property
    def is_shuffled(self) -> bool:
        return self._shuffle

    def stretches(self, start: int, stop: int) -> Iterator[Stretch]:
        """Yield where the rows of a range lie, before they are shuffled inside their windows."""
        number = int(np.searchsorted(self._edges, start, side="right")) - 1
        while start < stop:
            first, last = int(self._edges[number]), int(self._edges[number + 1])
            end = min(stop, last)
            if end > start:
                yield Stretch(int(self._blocks[number]), start - first, end - first)
            start, number = end, number + 1
