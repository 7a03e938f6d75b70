"""Fewer samples, the same picture: of every span of time, the highest of each series and the lowest total.

So no peak that could be seen at this resolution is lost, nor a floor by which a leak is judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory at one moment: `x` seconds after the beginning by a clock that never goes back, `t` as logged."""

    x: float
    t: float
    anon_bytes: int = 0
    shmem_bytes: int = 0
    swap_bytes: int = 0
    file_bytes: int = 0
    total_bytes: int = 0
    available_bytes: int | None = None


_HIGHEST = tuple(map(attrgetter, ("total_bytes", "anon_bytes", "shmem_bytes", "swap_bytes", "file_bytes")))
_LOWEST = attrgetter("total_bytes")


def thin(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most about `most` of the samples, in their order.

    Spans are powers of two seconds, counted from zero: wider ones are made of narrower ones, so that thinning
    what was thinned before loses nothing that thinning once would have kept.
    """
    if len(samples) <= most:
        return list(samples)
    span = max(samples[-1].x - samples[0].x, 1e-3)
    power = math.floor(math.log2(span / most))
    while True:
        kept = _thin_by(samples, 2.0**power)
        if len(kept) <= most or 2.0**power > 2 * span:
            return kept
        power += 1


def _thin_by(samples: Sequence[Sample], width: float) -> list[Sample]:
    kept = {0, len(samples) - 1}
    begin = 0
    for number in range(1, len(samples) + 1):
        if number == len(samples) or samples[number].x // width != samples[begin].x // width:
            kept.update(_extremes(samples, range(begin, number)))
            begin = number
    return [samples[number] for number in sorted(kept)]


def _extremes(samples: Sequence[Sample], numbers: range) -> set[int]:
    if len(numbers) == 1:
        return set(numbers)
    extremes = {max(numbers, key=lambda number: series(samples[number])) for series in _HIGHEST}
    extremes.add(min(numbers, key=lambda number: _LOWEST(samples[number])))
    return extremes
