"""What encoding gives: the ids of all texts in one array, and where each text ends in it. No Python lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.records import dataclass

Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Text `n` has `values[offsets[n] : offsets[n + 1]]`."""

    offsets: npt.NDArray[np.int64]
    values: Ids

    @classmethod
    def of(cls, parts: Sequence[Ids]) -> Encoded:
        return cls(offsets_of(list(map(len, parts))), np.concatenate(parts) if parts else np.empty(0, np.uint32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Ids:
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    def with_others(self, rows: npt.NDArray[np.int64], others: Encoded) -> Encoded:
        """These and others in one: `rows` are the places of the others, in the order of the result."""
        if not len(rows):
            return self
        count = len(self) + len(rows)
        places = np.zeros(count, bool)
        places[rows] = True
        lengths = np.empty(count, np.int64)
        lengths[places], lengths[~places] = others.lengths, self.lengths
        values = np.empty(len(self.values) + len(others.values), np.uint32)
        theirs = np.repeat(places, lengths)
        values[theirs], values[~theirs] = others.values, self.values
        return Encoded(offsets_of(lengths), values)

    def cut(self, most: int) -> Encoded:
        """No text has more than so many ids: those at its start."""
        lengths = self.lengths
        if not len(lengths) or lengths.max() <= most:
            return self
        place = np.arange(len(self.values)) - np.repeat(self.offsets[:-1], lengths)
        return Encoded(offsets_of(np.minimum(lengths, most)), self.values[place < most])

    def framed(self, before: Sequence[int], after: Sequence[int], rows: npt.NDArray[np.bool_]) -> Encoded:
        """With the same ids before and after each of the texts that `rows` says."""
        if not (before or after) or not rows.any():
            return self
        lengths = self.lengths + rows * (len(before) + len(after))
        offsets = offsets_of(lengths)
        values = np.empty(int(offsets[-1]), np.uint32)
        inside = np.ones(len(values), bool)
        starts, ends = offsets[:-1][rows], offsets[1:][rows]
        for number, one in enumerate(before):
            values[starts + number], inside[starts + number] = one, False
        for number, one in enumerate(reversed(after), 1):
            values[ends - number], inside[ends - number] = one, False
        values[inside] = self.values
        return Encoded(offsets, values)


class Encoder(Protocol):
    """Who turns texts into ids, without special tokens around them. Texts are strings of Arrow without nulls."""

    @property
    def encoder(self) -> str:
        """What encodes, for people."""

    def encode(self, texts: pa.Array) -> Encoded: ...


def offsets_of(lengths: Any) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
