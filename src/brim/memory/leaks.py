"""Classify the memory of a finished or running process: steady, leaking, growing, or only mapping files.

The floor decides, that is the lowest reading of each of twelve equal spans of time: what a program still holds after
its garbage collector has run. See docs/how-to/find-a-leak.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from brim.memory.prediction import Point, median, theil_sen_slope
from brim.records import dataclass
from brim.sizes import format_size

_SPANS = 12
_ENOUGH_S = 60.0  # every program that is still loading looks like a leak
_NOTABLE = 0.02  # growth below this share of the level is noise


@dataclass(frozen=True, slots=True)
class Trend:
    """What the memory of a run did. `verdict`: steady, leak, mapping, growing or short."""

    verdict: str
    floor_bytes_per_min: float
    file_bytes_per_min: float
    text: str


def find_floors(points: Sequence[Point], count: int = _SPANS) -> list[Point]:
    """Return the lowest point of each of `count` equal spans of time."""
    if not points:
        return []
    begin, span = points[0][0], (points[-1][0] - points[0][0]) / count
    if span <= 0:
        return [min(points, key=lambda point: point[1])]
    lowest: dict[int, Point] = {}
    for point in points:
        number = min(int((point[0] - begin) / span), count - 1)
        if number not in lowest or point[1] < lowest[number][1]:
            lowest[number] = point
    return [lowest[number] for number in sorted(lowest)]


def classify_trend(memory: Sequence[Point], files: Sequence[Point]) -> Trend:
    """Distinguish a rising floor (a leak, unless it levels off) from rising file pages (a memory map, harmless).

    The first fifth of the run is ignored: loading is not leaking.
    """
    if not memory or memory[-1][0] - memory[0][0] < _ENOUGH_S:
        return Trend("short", 0.0, 0.0, "too short a run to distinguish a leak from loading")
    settled = memory[0][0] + (memory[-1][0] - memory[0][0]) / 5
    low = find_floors([point for point in memory if point[0] >= settled])
    low_files = find_floors([point for point in files if point[0] >= settled])
    rate, file_rate = theil_sen_slope(low), theil_sen_slope(low_files)
    per_min, files_per_min = 60 * rate, 60 * file_rate
    if _is_rising(low, rate):
        half = len(low) // 2
        first, second = theil_sen_slope(low[: half + 1]), theil_sen_slope(low[half:])
        # In a staircase of few steps the median slope of a half may be 0. Then the rise of each half decides.
        if first <= 0 or second <= 0:
            first, second = low[half][1] - low[0][1], low[-1][1] - low[half][1]
        if first > 0 and second >= first / 3:
            rise = f"the floor rises by {format_size(per_min)} per minute"
            text = f"{rise} and does not level off: this looks like a leak"
            return Trend("leak", per_min, files_per_min, text)
        text = f"the floor rose by {format_size(per_min)} per minute and is leveling off"
        return Trend("growing", per_min, files_per_min, text)
    if _is_rising(low_files, file_rate):
        text = (
            f"file pages grow by {format_size(files_per_min)} per minute, memory does not: a memory-mapped file or the "
            "page cache, which the kernel reclaims; no leak"
        )
        return Trend("mapping", per_min, files_per_min, text)
    return Trend("steady", per_min, files_per_min, "the floor is level: no leak")


def _is_rising(low: Sequence[Point], rate: float) -> bool:
    """Check for more than noise, with the last third above the first. One low floor may be the exit of the process."""
    if len(low) < 4:
        return False
    third = max(len(low) // 3, 1)
    first, last = median(size for _, size in low[:third]), median(size for _, size in low[-third:])
    notable = max(_NOTABLE * max(size for _, size in low), 1e6)
    return last > first and rate * (low[-1][0] - low[0][0]) > notable
