"""Which way memory goes: slopes that one spike cannot bend, floors of a sawtooth, leak or mapping, a sparkline.

Pure functions of (seconds, bytes) points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from brim.sizes import format_size

Point = tuple[float, float]

_FLOORS = 12
_ENOUGH_S = 60.0  # below a minute every program looks like a leak: it is still loading
_NOTABLE = 0.02  # growth below this share of the level is noise
_BARS = "▁▂▃▄▅▆▇█"


def slope(points: Sequence[Point]) -> float:
    """Bytes per second: the median of the slopes between all pairs (Theil–Sen)."""
    pairs = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
        if later[0] > earlier[0]
    ]
    return median(pairs) if pairs else 0.0


def floors(points: Sequence[Point], count: int = _FLOORS) -> list[Point]:
    """The lowest point of each of `count` equal spans of time."""
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


@dataclass(frozen=True, slots=True)
class Trend:
    """What a run's memory did. `verdict`: steady, leak, mapping, growing or short."""

    verdict: str
    floor_bytes_per_min: float
    file_bytes_per_min: float
    text: str


def judge(memory: Sequence[Point], files: Sequence[Point]) -> Trend:
    """Tell a floor that rises (a leak, if it never stops) from file pages that do (a memory map, harmless).

    The first fifth is left out: loading is not leaking.
    """
    if not memory or memory[-1][0] - memory[0][0] < _ENOUGH_S:
        return Trend("short", 0.0, 0.0, "too short a run to tell a leak from loading")
    settled = memory[0][0] + (memory[-1][0] - memory[0][0]) / 5
    low = floors([point for point in memory if point[0] >= settled])
    low_files = floors([point for point in files if point[0] >= settled])
    rise, file_rise = slope(low), slope(low_files)
    per_min, files_per_min = 60 * rise, 60 * file_rise
    if _rises(low, rise):
        half = len(low) // 2
        first, second = slope(low[: half + 1]), slope(low[half:])
        if first > 0 and second >= first / 3:
            text = f"the floor rises by {format_size(per_min)} a minute and does not level off: that is a leak's shape"
            return Trend("leak", per_min, files_per_min, text)
        text = f"the floor rose by {format_size(per_min)} a minute and is levelling off"
        return Trend("growing", per_min, files_per_min, text)
    if _rises(low_files, file_rise):
        text = (
            f"file pages grow by {format_size(files_per_min)} a minute, memory does not: a memory-mapped file or the "
            "page cache, which the kernel takes back; no leak"
        )
        return Trend("mapping", per_min, files_per_min, text)
    return Trend("steady", per_min, files_per_min, "the floor is level: no leak")


def _rises(low: Sequence[Point], rise: float) -> bool:
    """More than noise, and the last third above the first. One low does not decide: the last may be the exit."""
    if len(low) < 4:
        return False
    level = max(size for _, size in low)
    third = max(len(low) // 3, 1)
    higher = median(size for _, size in low[-third:]) > median(size for _, size in low[:third])
    return higher and rise * (low[-1][0] - low[0][0]) > max(_NOTABLE * level, 1e6)


def sparkline(points: Sequence[Point], width: int = 60, top: float = 0.0) -> str:
    """The highest value of each span of time as a bar; `top` is what a full bar stands for."""
    if not points:
        return ""
    begin, end = points[0][0], points[-1][0]
    span = (end - begin) / width or 1.0
    highest: list[float | None] = [None] * width
    for at, size in points:
        number = min(int((at - begin) / span), width - 1)
        highest[number] = max(highest[number] or 0.0, size)
    top = max(top, max(size for _, size in points), 1.0)
    bars, last = [], 0.0
    for value in highest:
        last = last if value is None else value
        bars.append(_BARS[min(int(last / top * len(_BARS)), len(_BARS) - 1)])
    return "".join(bars)
