"""When memory is a reason to act: lines with hysteresis, and the time until there is no more.

Knows nothing of processes and takes no clock: `Guard.observe(now, used)` is given both and answers with what has just
become true. Whoever owns the processes does something about it; map and tokenize workers use the same guard. A stop is
said as soon as less than the lead remains until the kill line. Times and levels are those that do not cry wolf
(docs/run.md, benchmarks/stop.py).

When memory will reach a line is predicted from readings alone, without randomness. The past is kept as the highest and
the lowest reading of every short span. A prediction looks at spans of several lengths, because a climb may be smooth,
come in steps or hide under teeth: a length suits if, cut that way, both the peaks and the floors only rise. Peaks then
say when the line is hit; floors say that it is not merely a matter of taller bursts. What rises in one jump is a step
and no climb, and what grows ever slower is taken at its latest pace. Lengths are in units of the lead, so that a short
lead sees short pasts.

Fast climbs are another matter: they end before there is a past to judge by. Above the stop line `rush` looks at the
last seconds; `staircase` knows a leak that comes in steps, as that of a training loop does, and sees that the next step
does not fit.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import pairwise

from brim.errors import InputError
from brim.records import dataclass
from brim.sizes import format_size, parse_size

Point = tuple[float, float]

_SPANS = (4, 6, 9, 13, 20, 30, 45, 70, 105, 160, 240)  # thirtieths of the lead
_BINS = 5
_MOST_BINS = 1500
_TOLERANCE, _SHARE_OF_RISE = 0.003, 0.2  # how far a peak or floor may fall back: of the limit, of the whole rise
_NOTABLE = 0.02  # growth below this share of the level or limit is noise
_FLOORS_FOLLOW = 0.4  # of what the peaks rise, the floors rise too
_STILL_RISING = 3  # of the steps between spans, so many must rise
_GAP_BINS = 60  # after a longer silence (a suspended machine) the past says nothing
_RUSH_BINS = 4
_RUSH_LENGTHS = (1, 2, 4, 8, 12)  # fast bins
_STAIRS, _STAIRS_BINS = 9, 240  # jumps, and the fast bins in which they are looked for
_STANDSTILL = 1.5
_REMEMBERED = 900  # bins: what was survived longer ago is forgotten


def _median(values: Iterable[float]) -> float:
    """Of one at least. That of `statistics` loads decimals and fractions, which takes 5 ms of every command."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def slope(points: Sequence[Point]) -> float:
    """Bytes per second: the median of the slopes between all pairs (Theil–Sen)."""
    pairs = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
        if later[0] > earlier[0]
    ]
    return _median(pairs) if pairs else 0.0


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


def rush(past: Past, line: float, lengths: Sequence[int] = _RUSH_LENGTHS) -> Prediction | None:
    """Predict when the line is reached by a climb of the last seconds, smooth or in steps of up to 3 s.

    It is a climb if every one of the last spans was higher than the one before, for spans of any of some lengths.
    """
    for length in lengths:
        window = past.peaks[-(_RUSH_BINS + 1) * length :]
        if len(window) < (_RUSH_BINS + 1) * length:
            return None
        peaks = [max(window[start : start + length]) for start in range(0, len(window), length)]
        steps = [later - earlier for earlier, later in pairwise(peaks)]
        mean = (peaks[-1] - peaks[0]) / len(steps)
        if mean > 0 and min(steps) >= mean / 4:
            pace = mean / (length * past.bin_s)
            return Prediction(max(line - peaks[-1], 0.0) / pace, pace, len(steps) * length * past.bin_s)
    return None


def staircase(past: Past, line: float, limit: float) -> Prediction | None:
    """Predict when the line is reached by jumps of about one size at regular intervals; None: it is no staircase.

    More jumps are needed than a program makes that loads a model of a few shards, with level ground between them.
    """
    peaks = past.peaks[-_STAIRS_BINS:]
    rises = [later - earlier for earlier, later in pairwise(peaks)]
    jumps = [(number, rise) for number, rise in enumerate(rises) if rise > _TOLERANCE * limit][-_STAIRS:]
    if len(jumps) < _STAIRS:
        return None
    times, sizes = [number for number, _ in jumps], [size for _, size in jumps]
    intervals = [later - earlier for earlier, later in pairwise(times)]
    usual = _median(intervals)
    since, fallen = len(rises) - 1 - times[-1], -sum(rise for rise in rises[times[0] :] if rise < 0)
    regular = usual >= 2 and max(intervals) <= 2 * usual + 1 and since <= 1.5 * usual + 1
    if not regular or max(sizes) > 4 * min(sizes) or fallen > sum(sizes) / 4:
        return None
    growth = max(_median(later / earlier for earlier, later in pairwise(sizes)), 1.0)
    size, interval_s = max(_median(sizes), sizes[-1] * growth), usual * past.bin_s
    stairs_left = math.ceil(max(line - peaks[-1], 0.0) / size - 0.1)
    left_s = max(stairs_left * interval_s - since * past.bin_s, 0.0)
    return Prediction(left_s, size / interval_s, len(jumps) * interval_s)


_FLOORS = 12
_ENOUGH_S = 60.0  # below a minute every program looks like a leak: it is still loading
_BARS = "▁▂▃▄▅▆▇█"


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
    higher = _median(size for _, size in low[-third:]) > _median(size for _, size in low[:third])
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


_REPEAT_S = 300.0
_FORGET = 20  # time below a line takes back a twentieth of as much time above it
_LONGEST_LOOK_S = 2.0  # a longer silence between readings is no time above a line
_CLIMB_FROM = 0.6  # of the limit: below it nothing is stopped for what is predicted
_CLIMB_LEADS = 2.9  # a climb from there that takes less is a rush: loading looks the same until it ends
_RUSH_MARGIN = 0.04  # of the limit: so far below the stop line a rush is stopped that has a moment left
_LAST_MOMENT_S = 2.4
_AGREE = 2  # lengths of spans by which less than the lead must be left
_LEAD_MARGIN = 1.05
_SHORTEST_BIN_S, _LONGEST_BIN_S, _FAST_BIN_S = 0.2, 2.0, 0.25
DEFAULT_LEAD_S = 30.0
_RECENT_BINS = 90
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Level:
    """A threshold as people write it: a share of the limit, or bytes."""

    share: float | None = None
    bytes: int | None = None

    def of(self, limit_bytes: int) -> int:
        return self.bytes if self.bytes is not None else round((self.share or 0.0) * limit_bytes)


def parse_level(text: str) -> Level | None:
    """A level from "80%" or "40GB"; None for "off"."""
    if text.strip().lower() in ("off", "never", "none"):
        return None
    match = _PERCENT.fullmatch(text)
    if match is None:
        return Level(bytes=parse_size(text))
    if not 0 < float(match[1]) <= 100:
        raise InputError(f"{text!r} is not a share between 0 % and 100 %.", hint="Write it like 80% or 40GB.")
    return Level(share=float(match[1]) / 100)


@dataclass(frozen=True, slots=True)
class Line:
    """Something to say once `level` has been passed for `after_s`, and again every `repeat_s` while it lasts."""

    kind: str
    level: Level
    after_s: float = 0.0
    repeat_s: float | None = _REPEAT_S
    hysteresis: float = 0.05


@dataclass(frozen=True, slots=True)
class Alarm:
    """A line that was crossed, or that will be in `left_s` at the present rate."""

    kind: str
    used_bytes: int
    limit_bytes: int
    level_bytes: int
    left_s: float | None = None
    bytes_per_s: float | None = None

    @property
    def text(self) -> str:
        used, limit = format_size(self.used_bytes), format_size(self.limit_bytes)
        return f"{used} of {limit} ({100 * self.used_bytes / max(self.limit_bytes, 1):.0f} %)"

    def outlook(self, clock_s: float | None) -> str:
        """The forecast in words; `clock_s` is the time of day at which the reading was taken. Empty: there is none."""
        if self.left_s is None:
            return ""
        when = "" if clock_s is None else f"at {time.strftime('%H:%M', time.localtime(clock_s + self.left_s))}, "
        rate = format_size(60 * (self.bytes_per_s or 0.0))
        return f"growing by {rate} a minute: at this rate the limit is reached {when}in {span_text(self.left_s)}"


@dataclass(slots=True)
class _State:
    """How one line stands: how much time was spent above it lately, and when that was last said."""

    above_s: float = 0.0
    said: float | None = None
    armed: bool = True


@dataclass(slots=True)
class Guard:
    """Watches one number against one limit. `lead_s` of 0 predicts no stop, `horizon_s` of 0 announces nothing."""

    limit_bytes: int
    lines: Sequence[Line]
    horizon_s: float = 600.0
    lead_s: float = DEFAULT_LEAD_S
    _states: dict[str, _State] = field(default_factory=dict)
    _last: float | None = None
    _past: Past = field(init=False)
    _fast: Past = field(init=False)
    _outlook: list[Prediction] = field(default_factory=list)
    _outlook_at: float = 0.0
    _announced: float | None = None

    def __post_init__(self) -> None:
        bin_s = min(max((self.lead_s or DEFAULT_LEAD_S) / 30, _SHORTEST_BIN_S), _LONGEST_BIN_S)
        self._past, self._fast = Past(bin_s), Past(_FAST_BIN_S)

    def lowest_bytes(self) -> int:
        """Below this nothing will be said, so that it need not be known exactly."""
        return min((line.level.of(self.limit_bytes) for line in self.lines), default=self.limit_bytes)

    def observe(self, now: float, used_bytes: int) -> list[Alarm]:
        """What this reading makes true, the gravest first."""
        passed_s = 0.0 if self._last is None else now - self._last
        self._last = now
        if self.horizon_s or self.lead_s:
            self._fast.add(now, used_bytes)
            if self._past.add(now, used_bytes):
                self._outlook = predict(self._past, self._end_bytes(), self.limit_bytes, self.lead_s or DEFAULT_LEAD_S)
                self._outlook_at = now
        alarms = [alarm for line in self.lines if (alarm := self._cross(line, now, used_bytes, passed_s)) is not None]
        if not any(alarm.kind == "stop" for alarm in alarms):
            alarms += self._foresee(now, used_bytes)
        alarms.sort(key=lambda alarm: -alarm.level_bytes)
        return [*alarms, *self._announce(now, used_bytes)]

    def forecast(self, now: float) -> Prediction | None:
        """What the shortest past that shows a climb says: when the kill line, or else the limit, is reached."""
        if not self._outlook:
            return None
        first = self._outlook[0]
        return Prediction(max(first.left_s - (now - self._outlook_at), 0.0), first.bytes_per_s, first.seen_s)

    def _cross(self, line: Line, now: float, used_bytes: int, passed_s: float) -> Alarm | None:
        state = self._states.setdefault(line.kind, _State())
        level = line.level.of(self.limit_bytes)
        if used_bytes < level - line.hysteresis * self.limit_bytes:
            state.armed = True
        if used_bytes < level:
            state.above_s = max(state.above_s - passed_s / _FORGET, 0.0)
            return None
        state.above_s = min(state.above_s + (passed_s if passed_s <= _LONGEST_LOOK_S else 0.0), line.after_s)
        if state.above_s < line.after_s:
            return None
        if state.said is not None and not self._again(line, state, now):
            return None
        state.said, state.armed = now, False
        return self._alarm(line.kind, used_bytes, level, self.forecast(now))

    def _alarm(self, kind: str, used_bytes: int, level: int, coming: Prediction | None) -> Alarm:
        """With the time until the limit itself: what is predicted is the kill line, which lies a little before it."""
        if coming is None or coming.bytes_per_s <= 0:
            return Alarm(kind, used_bytes, self.limit_bytes, level)
        left_s = coming.left_s + (self.limit_bytes - self._end_bytes()) / coming.bytes_per_s
        return Alarm(kind, used_bytes, self.limit_bytes, level, left_s, coming.bytes_per_s)

    def _again(self, line: Line, state: _State, now: float) -> bool:
        """What takes time to be said is repeated seldom, however often it comes and goes."""
        assert state.said is not None
        waited = line.repeat_s is not None and now - state.said >= line.repeat_s
        return waited or (state.armed and not line.after_s)

    def _end_bytes(self) -> int:
        """Where it is over: the kill line, or the limit."""
        return min(
            (line.level.of(self.limit_bytes) for line in self.lines if line.kind == "kill"), default=self.limit_bytes
        )

    def _foresee(self, now: float, used_bytes: int) -> list[Alarm]:
        """A stop before its line is reached, because there would be too little time after."""
        stop = next((line for line in self.lines if line.kind == "stop"), None)
        if stop is None or not self.lead_s:
            return []
        state = self._states.setdefault("stop", _State())
        if state.said is not None:
            return []
        reason = self._too_late(now, used_bytes, stop.level.of(self.limit_bytes))
        if reason is None:
            return []
        state.said = now
        return [self._alarm("stop", used_bytes, self._end_bytes(), reason)]

    def _too_late(self, now: float, used_bytes: int, stop_bytes: int) -> Prediction | None:
        """The prediction by which less than the lead is left, if there is one to rely on."""
        end, begin = self._end_bytes(), _CLIMB_FROM * self.limit_bytes
        if used_bytes >= stop_bytes - _RUSH_MARGIN * self.limit_bytes:
            above = used_bytes >= stop_bytes
            quick = rush(self._fast, end, _RUSH_LENGTHS if above else _RUSH_LENGTHS[:1])
            if quick is not None and quick.left_s < (self.lead_s if above else min(_LAST_MOMENT_S / 2, self.lead_s)):
                return quick
        if used_bytes >= begin:
            stairs = staircase(self._fast, end, self.limit_bytes)
            if stairs is not None and stairs.left_s < max(stairs.seen_s / _STAIRS, _LAST_MOMENT_S):
                return stairs  # the next step does not fit, or is about to be the last
        if max(self._past.peaks[-_RECENT_BINS:]) < begin:
            return None
        aged_s, climbed_s = now - self._outlook_at, self._past.below_s(begin)
        agreeing = []
        for found in self._outlook:
            left_s = found.left_s - aged_s
            if left_s > _LEAD_MARGIN * self.lead_s + self._past.bin_s:
                continue
            slow = found.bytes_per_s * _CLIMB_LEADS * self.lead_s <= end - begin
            if slow or climbed_s + left_s >= _CLIMB_LEADS * self.lead_s:
                agreeing.append(Prediction(max(left_s, 0.0), found.bytes_per_s, found.seen_s))
        # By chance one length of spans sees a climb in noise; two hardly ever do.
        return agreeing[0] if len(agreeing) >= _AGREE else None

    def _announce(self, now: float, used_bytes: int) -> list[Alarm]:
        """That memory will run out, long before it does. Only what a past of two leads and more shows."""
        coming = next((found for found in self._outlook if found.seen_s >= 2 * (self.lead_s or DEFAULT_LEAD_S)), None)
        if coming is None or not 0 < coming.left_s <= self.horizon_s:
            return []
        if self._announced is not None and now - self._announced < _REPEAT_S:
            return []
        self._announced = now
        return [self._alarm("exhaustion", used_bytes, self._end_bytes(), coming)]


def standard_lines(
    alert: Level | None, stop: Level | None, kill: Level | None, alert_after_s: float = 10.0, stop_after_s: float = 3.0
) -> list[Line]:
    """Warn, stop, kill; a level of None is never said. Stop and kill are said once."""
    wanted = [
        ("alert", alert, alert_after_s, _REPEAT_S),
        ("stop", stop, stop_after_s, None),
        ("kill", kill, 0.0, None),
    ]
    return [Line(kind, level, after, repeat) for kind, level, after, repeat in wanted if level is not None]


def span_text(seconds: float) -> str:
    """A duration for people: "45 s", "12 min", "3 h 20 min", "2 d 4 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h"


def check_order(lines: Iterable[Line], limit_bytes: int) -> None:
    """A stop above the kill would never happen: refuse it."""
    levels = {line.kind: line.level.of(limit_bytes) for line in lines}
    for lower, upper in (("alert", "stop"), ("stop", "kill"), ("alert", "kill")):
        if lower in levels and upper in levels and levels[lower] > levels[upper]:
            raise InputError(
                f"The {lower} at {format_size(levels[lower])} lies above the {upper} at {format_size(levels[upper])}.",
                hint="Order them: alert, stop, kill.",
            )
