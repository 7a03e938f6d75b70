"""When will memory reach a line? From readings alone: no clock, no processes, no randomness.

The past is kept as the highest and the lowest reading of every short span. A prediction looks at spans of
several lengths, because a climb may be smooth, come in steps or hide under teeth: a length suits if, cut that
way, both the peaks and the floors only rise. Peaks then say when the line is hit; floors say that it is not
merely a matter of taller bursts. What rises in one jump is a step and no climb, and what grows ever slower is
taken at its latest pace. Lengths are in units of the lead, so that a short lead sees short pasts.

Fast climbs are another matter: they end before there is a past to judge by. `rush` looks at the last seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from itertools import pairwise
from statistics import median

from brim.records import dataclass

Point = tuple[float, float]

_SPANS = (4, 6, 9, 13, 20, 30, 45, 70, 105, 160, 240)  # thirtieths of the lead
_BINS = 5
_MOST_BINS = 1500
_TOLERANCE, _SHARE_OF_RISE = 0.003, 0.2  # how far a peak or floor may fall back: of the limit, of the whole rise
_NOTABLE = 0.02  # of the limit: less is noise
_FLOORS_FOLLOW = 0.4  # of what the peaks rise, the floors rise too
_STILL_RISING = 3  # of the steps between spans, so many must rise
_GAP_BINS = 60  # after a longer silence (a suspended machine) the past says nothing
_RUSH_BINS = 4
_STANDSTILL = 1.5
_REMEMBERED = 900  # bins: what was survived longer ago is forgotten


def slope(points: Sequence[Point]) -> float:
    """Bytes per second: the median of the slopes between all pairs (Theil–Sen)."""
    pairs = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
        if later[0] > earlier[0]
    ]
    return median(pairs) if pairs else 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The line is reached in `left_s`, at the pace of the last `seen_s`."""

    left_s: float
    bytes_per_s: float
    seen_s: float


@dataclass(slots=True)
class Past:
    """Highest and lowest reading of each span of `bin_s`; spans without a reading repeat the one before."""

    bin_s: float
    peaks: list[float] = field(default_factory=list)
    floors: list[float] = field(default_factory=list)
    _first: int = 0  # the number of the first span that is kept
    _last_used: float = 0.0

    def add(self, now: float, used: float) -> bool:
        """True if a new span has begun."""
        number = int(now // self.bin_s)
        ahead = number - (self._first + len(self.peaks) - 1) if self.peaks else 0
        if not self.peaks or ahead > _GAP_BINS or ahead < 0:
            self.peaks, self.floors, self._first = [used], [used], number
            self._last_used = used
            return True
        if ahead == 0:
            self.peaks[-1] = max(self.peaks[-1], used)
            self.floors[-1] = min(self.floors[-1], used)
        else:
            self.peaks += [self._last_used] * (ahead - 1) + [used]
            self.floors += [self._last_used] * (ahead - 1) + [used]
            if len(self.peaks) > _MOST_BINS:
                cut = len(self.peaks) - _MOST_BINS
                del self.peaks[:cut], self.floors[:cut]
                self._first += cut
        self._last_used = used
        return ahead > 0

    def below_s(self, level: float) -> float:
        """How long ago a reading was last below this level; all of the past if none was."""
        for back, floor in enumerate(reversed(self.floors)):
            if floor < level:
                return back * self.bin_s
        return len(self.floors) * self.bin_s

    def spans(self, length: int) -> tuple[list[Point], list[Point]] | None:
        """Peaks and floors of the last spans of `length` bins, with when they were; None: too short a past."""
        if len(self.peaks) < _BINS * length:
            return None
        begin = len(self.peaks) - _BINS * length
        high, low = [], []
        for at in range(begin, len(self.peaks), length):
            peaks, floors = self.peaks[at : at + length], self.floors[at : at + length]
            highest, lowest = max(peaks), min(floors)
            # The latest of equal peaks: a level that is held is held until then.
            high.append(((at + length - 1 - peaks[::-1].index(highest)) * self.bin_s, highest))
            low.append(((at + floors.index(lowest)) * self.bin_s, lowest))
        return high, low

    def before(self, length: int) -> float:
        """The highest before the last spans of `length` bins."""
        begin = len(self.peaks) - _BINS * length
        return max(self.peaks[max(begin - _REMEMBERED, 0) : begin], default=0.0)

    def stands_still(self, length: int, notable: float) -> bool:
        """Has it been longer without a new height than ever before within the last spans of `length` bins?"""
        longest = since = 0
        highest = -math.inf
        for peak in self.peaks[-_BINS * length :]:
            if peak > highest + notable:
                longest, since, highest = max(longest, since), 0, peak
            else:
                since += 1
        return since > _STANDSTILL * longest + 2

    @property
    def end_s(self) -> float:
        return (len(self.peaks) - 1) * self.bin_s


def predict(past: Past, line: float, limit: float, lead_s: float) -> list[Prediction]:
    """What each length of spans that suits says, the shortest first."""
    found = []
    for thirtieths in _SPANS:
        length = max(round(thirtieths * lead_s / 30 / past.bin_s), 2)
        spans = past.spans(length)
        if spans is None:
            break
        if max(spans[0][-1][1], spans[0][-2][1]) < past.before(length) + _TOLERANCE * limit:
            continue  # it has been this high before, and came down again
        prediction = _judge(*spans, past.end_s, line, limit, length * past.bin_s)
        if prediction is not None and not past.stands_still(length, _TOLERANCE * limit):
            found.append(prediction)
    return found


def _judge(
    high: list[Point], low: list[Point], end_s: float, line: float, limit: float, span_s: float
) -> Prediction | None:
    rise = high[-1][1] - high[0][1]
    if rise < _NOTABLE * limit:
        return None
    slack = _TOLERANCE * limit + _SHARE_OF_RISE * rise / (_BINS - 1)
    if not (_only_rises(high, slack) and _only_rises(low, slack)):
        return None
    if low[-1][1] - low[0][1] < _FLOORS_FOLLOW * rise:
        return None
    steps = [later[1] - earlier[1] for earlier, later in pairwise(high)]
    if sum(step > rise / (3 * len(steps)) for step in steps) < _STILL_RISING or steps[-1] <= 0:
        return None
    left_s = _time_to(line, high, end_s)
    if left_s is None:
        return None
    return Prediction(left_s, (line - high[-1][1]) / max(left_s, span_s / 100), _BINS * span_s)


def _only_rises(points: list[Point], slack: float) -> bool:
    return all(later[1] >= earlier[1] - slack for earlier, later in pairwise(points))


def _time_to(line: float, high: list[Point], end_s: float) -> float | None:
    """Seconds from the end until the peaks reach the line; they may speed up, or slow down."""
    half = _BINS // 2
    first, second = slope(high[: half + 1]), slope(high[half:])
    if second <= 0:
        return None
    apart_s = (high[-1][0] - high[0][0]) / 2
    gain = (second - first) / apart_s if apart_s > 0 else 0.0
    pace = max(second + gain * apart_s / 2, second / 4) if gain < 0 else second + gain * apart_s / 2
    missing = line - high[-1][1]
    since_s = end_s - high[-1][0]
    if gain > 0:
        left_s = (math.sqrt(pace * pace + 2 * gain * missing) - pace) / gain if missing > 0 else 0.0
    else:
        left_s = missing / pace
    return max(left_s - since_s, 0.0)


def rush(past: Past, line: float) -> Prediction | None:
    """The last spans, if every one was higher than the one before: how long until the line at that pace."""
    peaks = past.peaks[-_RUSH_BINS - 1 :]
    if len(peaks) <= _RUSH_BINS:
        return None
    steps = [later - earlier for earlier, later in pairwise(peaks)]
    mean = (peaks[-1] - peaks[0]) / len(steps)
    if mean <= 0 or min(steps) < mean / 4:
        return None
    pace = mean / past.bin_s
    return Prediction(max(line - peaks[-1], 0.0) / pace, pace, len(steps) * past.bin_s)
