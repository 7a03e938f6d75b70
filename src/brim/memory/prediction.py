"""Predict from readings when memory will reach a target. Nothing is known about the process.

The history consists of the highest and lowest reading of each short bin of time. Three kinds of growth are recognized:

- `predict_growth`: slow growth, smooth or hidden by a sawtooth. It compares windows of several lengths. A length is
  usable if both the peaks and the floors of its windows only rise: the peaks give the time of arrival, the floors show
  that bursts are not merely getting taller. A single jump is not growth, and growth that slows down is extrapolated
  at its latest rate.
- `predict_rush`: a climb within the last seconds, which ends before slow growth can be recognized.
- `predict_staircase`: steps of similar size at regular intervals, as a training loop leaks.

Window lengths are fractions of the lead time, so that a short lead uses a short history.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import pairwise

from brim.records import dataclass

Point = tuple[float, float]

_WINDOW_LENGTHS = (4, 6, 9, 13, 20, 30, 45, 70, 105, 160, 240)  # thirtieths of the lead
_WINDOWS = 5
_MAX_BINS = 1500
_TOLERANCE, _TOLERATED_SHARE = 0.003, 0.2  # by how much a peak or floor may fall: share of the limit, of the mean rise
_NOTABLE = 0.02  # growth below this share of the limit is noise
_FLOORS_FOLLOW = 0.4  # of the rise of the peaks, the floors rise by at least this share
_RISING_WINDOWS = 3
_GAP_BINS = 60  # after a longer silence (a suspended machine) the history is dropped
_RUSH_WINDOWS = 4
RUSH_LENGTHS = (1, 2, 4, 8, 12)  # bins per window
_STANDSTILL = 1.5
_REMEMBERED_BINS = 900  # an earlier peak is forgotten after this many bins
_MANY_STEPS, _FEW_STEPS, _STAIRCASE_BINS = 9, 5, 240
_SMALL_STEP, _HIGH_LEVEL = 0.09, 0.8  # shares of the limit


def median(values: Iterable[float]) -> float:
    """Return the median of at least one value. `statistics` would add 5 ms to the start of every command."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def theil_sen_slope(points: Sequence[Point]) -> float:
    """Return the median slope between all pairs of points, in bytes per second; 0 without a pair."""
    slopes = [
        (second[1] - first[1]) / (second[0] - first[0])
        for number, first in enumerate(points)
        for second in points[number + 1 :]
        if second[0] > first[0]
    ]
    return median(slopes) if slopes else 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The target is reached in `left_s` at the rate of the last `seen_s`; `step_s` is the interval of a staircase."""

    left_s: float
    bytes_per_s: float
    seen_s: float
    step_s: float = 0.0


@dataclass(slots=True)
class MemoryHistory:
    """The highest and lowest reading of each bin of `bin_s`; a bin without a reading repeats the previous one."""

    bin_s: float
    peaks: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    _first_bin: int = 0
    _last_used: float = 0.0

    def add(self, now: float, used: float) -> bool:
        """Add a reading. Return whether it starts a new bin."""
        number = int(now // self.bin_s)
        new_bins = number - (self._first_bin + len(self.peaks) - 1) if self.peaks else 0
        last_used, self._last_used = self._last_used, used
        if not self.peaks or new_bins > _GAP_BINS or new_bins < 0:
            self.peaks, self.floors, self._first_bin = [used], [used], number
            return True
        if new_bins == 0:
            self.peaks[-1] = max(self.peaks[-1], used)
            self.floors[-1] = min(self.floors[-1], used)
            return False
        self.peaks += [last_used] * (new_bins - 1) + [used]
        self.floors += [last_used] * (new_bins - 1) + [used]
        surplus = len(self.peaks) - _MAX_BINS
        if surplus > 0:
            del self.peaks[:surplus], self.floors[:surplus]
            self._first_bin += surplus
        return True

    def seconds_above(self, level: float) -> float:
        """Return for how long all readings have been at this level or above; at most the length of the history."""
        for age, floor in enumerate(reversed(self.floors)):
            if floor < level:
                return age * self.bin_s
        return len(self.floors) * self.bin_s

    def windows(self, length: int) -> tuple[list[Point], list[Point]] | None:
        """Return peaks and floors, with their times, of the last windows of `length` bins; None if history is short."""
        first = len(self.peaks) - _WINDOWS * length
        if first < 0:
            return None
        high, low = [], []
        for start in range(first, len(self.peaks), length):
            peaks, floors = self.peaks[start : start + length], self.floors[start : start + length]
            highest, lowest = max(peaks), min(floors)
            # The last of equal peaks: a plateau lasts until then.
            high.append(((start + length - 1 - peaks[::-1].index(highest)) * self.bin_s, highest))
            low.append(((start + floors.index(lowest)) * self.bin_s, lowest))
        return high, low

    def has_stalled(self, length: int, notable: float) -> bool:
        """Check whether the present plateau is longer than every earlier one in the last windows of `length` bins."""
        longest = plateau = 0
        highest = -math.inf
        for peak in self.peaks[-_WINDOWS * length :]:
            if peak > highest + notable:
                longest, plateau, highest = max(longest, plateau), 0, peak
            else:
                plateau += 1
        return plateau > _STANDSTILL * longest + 2


def predict_growth(history: MemoryHistory, target: float, limit: float, lead_s: float) -> list[Prediction]:
    """Return the prediction of each usable window length, the shortest first."""
    predictions = []
    for thirtieths in _WINDOW_LENGTHS:
        length = max(round(thirtieths * lead_s / 30 / history.bin_s), 2)
        windows = history.windows(length)
        if windows is None:
            break
        high, low = windows
        first = len(history.peaks) - _WINDOWS * length
        earlier_peak = max(history.peaks[max(first - _REMEMBERED_BINS, 0) : first], default=0.0)
        if max(high[-1][1], high[-2][1]) < earlier_peak + _TOLERANCE * limit:
            continue  # it has been this high before, and came down again
        if not _is_growth(high, low, limit) or history.has_stalled(length, _TOLERANCE * limit):
            continue
        left_s = _time_to(target, high, (len(history.peaks) - 1) * history.bin_s)
        if left_s is not None:
            window_s = length * history.bin_s
            rate = (target - high[-1][1]) / max(left_s, window_s / 100)
            predictions.append(Prediction(left_s, rate, _WINDOWS * window_s))
    return predictions


def _is_growth(high: list[Point], low: list[Point], limit: float) -> bool:
    """Check that peaks and floors rise by a notable amount, in several windows, and do not fall back."""
    rise = high[-1][1] - high[0][1]
    if rise < _NOTABLE * limit or low[-1][1] - low[0][1] < _FLOORS_FOLLOW * rise:
        return False
    slack = _TOLERANCE * limit + _TOLERATED_SHARE * rise / (_WINDOWS - 1)
    if any(second[1] < first[1] - slack for points in (high, low) for first, second in pairwise(points)):
        return False
    steps = [second[1] - first[1] for first, second in pairwise(high)]
    return steps[-1] > 0 and sum(step > rise / (3 * len(steps)) for step in steps) >= _RISING_WINDOWS


def _time_to(target: float, high: list[Point], end_s: float) -> float | None:
    """Return the seconds from `end_s` until the peaks reach the target; None if they do not rise.

    If they rose faster in the second half of the windows than in the first, they are taken to accelerate further.
    """
    half = _WINDOWS // 2
    first, second = theil_sen_slope(high[: half + 1]), theil_sen_slope(high[half:])
    if second <= 0:
        return None
    apart_s = (high[-1][0] - high[0][0]) / 2
    gain = (second - first) / apart_s if apart_s > 0 else 0.0
    rate = max(second + gain * apart_s / 2, second / 4) if gain < 0 else second + gain * apart_s / 2
    missing = target - high[-1][1]
    if gain > 0:
        left_s = (math.sqrt(rate * rate + 2 * gain * missing) - rate) / gain if missing > 0 else 0.0
    else:
        left_s = missing / rate
    return max(left_s - (end_s - high[-1][0]), 0.0)


def predict_rush(history: MemoryHistory, target: float, lengths: Sequence[int] = RUSH_LENGTHS) -> Prediction | None:
    """Predict the arrival of a climb of the last seconds, smooth or in steps of up to 3 s.

    It is a climb if each of the last windows was higher than the one before, for windows of any of the lengths.
    """
    for length in lengths:
        recent = history.peaks[-(_RUSH_WINDOWS + 1) * length :]
        if len(recent) < (_RUSH_WINDOWS + 1) * length:
            return None
        peaks = [max(recent[start : start + length]) for start in range(0, len(recent), length)]
        steps = [second - first for first, second in pairwise(peaks)]
        mean = (peaks[-1] - peaks[0]) / len(steps)
        if mean > 0 and min(steps) >= mean / 4:
            rate = mean / (length * history.bin_s)
            return Prediction(max(target - peaks[-1], 0.0) / rate, rate, len(steps) * length * history.bin_s)
    return None


def predict_staircase(history: MemoryHistory, target: float, limit: float) -> Prediction | None:
    """Predict the arrival of a climb in steps of similar or growing size at regular intervals.

    Nine steps are required, because a model that is loaded in a few large shards looks the same until it ends. Five
    are enough for small steps at a high level, which no model of up to eight shards makes.
    """
    peaks = history.peaks[-_STAIRCASE_BINS:]
    rises = [second - first for first, second in pairwise(peaks)]
    steps: list[tuple[int, float]] = []  # the last bin of each step, and its size; a step may span two bins
    for number, rise in enumerate(rises):
        if rise > _TOLERANCE * limit:
            if steps and steps[-1][0] == number - 1:
                steps[-1] = number, steps[-1][1] + rise
            else:
                steps.append((number, rise))
    is_small = all(size < _SMALL_STEP * limit for _, size in steps[-_FEW_STEPS:])
    is_high = peaks[-1] >= _HIGH_LEVEL * limit
    needed = _FEW_STEPS if is_small and is_high and len(steps) < _MANY_STEPS else _MANY_STEPS
    if len(steps) < needed:
        return None
    steps = steps[-needed:]
    intervals = [second[0] - first[0] for first, second in pairwise(steps)]
    sizes = [size for _, size in steps]
    interval, since = median(intervals), len(rises) - 1 - steps[-1][0]
    fallen = -sum(rise for rise in rises[steps[0][0] :] if rise < 0)
    ratios = [second / first for first, second in pairwise(sizes)]
    if interval < 2 or max(intervals) > 2 * interval + 1 or since > 1.5 * interval + 1:
        return None
    if max(ratios) > 3 or min(ratios) < 1 / 3 or fallen > sum(sizes) / 10:
        return None
    growth = min(max(median(ratios), 1.0), 2.0)
    size, level, count = max(median(sizes), sizes[-1] * growth), peaks[-1], 0
    while level + size / 10 < target and count < _STAIRCASE_BINS:
        level, size, count = level + size, size * growth, count + 1
    interval_s = interval * history.bin_s
    left_s = max(count * interval_s - since * history.bin_s, 0.0)
    rate = (level - peaks[-1]) / (max(count, 1) * interval_s)
    return Prediction(left_s, rate, len(steps) * interval_s, interval_s)
