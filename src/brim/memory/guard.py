"""When memory is a reason to act: thresholds with hysteresis, and the time until there is no more.

Knows nothing of processes and takes no clock: `Guard.observe(now, used)` is given both and answers with what
has just become true. Whoever owns the processes does something about it; map and tokenize workers use the
same guard. Times and levels are those that do not cry wolf (docs/run.md).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from brim.errors import InputError
from brim.sizes import format_size, parse_size

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


_SHORT_S, _LONG_S = 10.0, 60.0
_REPEAT_S = 300.0
_CAME_DOWN, _HIGHER = 0.9, 1.02
_FLOORS_SHORT, _FLOORS_LONG = 5, 3  # teeth of up to 20 s have a floor in every span
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
    """A line that was crossed, or memory that will run out in `left_s`."""

    kind: str
    used_bytes: int
    limit_bytes: int
    level_bytes: int
    left_s: float | None = None
    bytes_per_s: float | None = None

    @property
    def text(self) -> str:
        used, limit = format_size(self.used_bytes), format_size(self.limit_bytes)
        if self.kind == "exhaustion":
            rate = format_size(60 * (self.bytes_per_s or 0.0))
            return f"{used} of {limit}, growing by {rate} a minute: full in {span_text(self.left_s or 0.0)}"
        return f"{used} of {limit} ({100 * self.used_bytes / max(self.limit_bytes, 1):.0f} %)"


@dataclass(slots=True)
class _State:
    """How one line stands."""

    since: float | None = None
    said: float | None = None


@dataclass(slots=True)
class Guard:
    """Watches one number against one limit."""

    limit_bytes: int
    lines: Sequence[Line]
    horizon_s: float = 600.0
    min_growth: float = 0.02
    _states: dict[str, _State] = field(default_factory=dict)
    _points: deque[Point] = field(default_factory=deque)
    _forecast_said: float | None = None
    _peak_bytes: int = 0
    _survived_bytes: int = 0

    def lowest_bytes(self) -> int:
        """Below this nothing will be said, so that it need not be known exactly."""
        return min((line.level.of(self.limit_bytes) for line in self.lines), default=self.limit_bytes)

    def observe(self, now: float, used_bytes: int) -> list[Alarm]:
        """What this reading makes true, the gravest first."""
        alarms = [alarm for line in self.lines if (alarm := self._cross(line, now, used_bytes)) is not None]
        alarms.sort(key=lambda alarm: -alarm.level_bytes)
        exhaustion = self._exhaustion(now, used_bytes)
        return [*alarms, exhaustion] if exhaustion else alarms

    def _cross(self, line: Line, now: float, used_bytes: int) -> Alarm | None:
        state = self._states.setdefault(line.kind, _State())
        level = line.level.of(self.limit_bytes)
        if used_bytes < level - line.hysteresis * self.limit_bytes:
            state.since = state.said = None
        if used_bytes < level:
            if state.said is None:
                state.since = None
            return None
        state.since = now if state.since is None else state.since
        if now - state.since < line.after_s:
            return None
        if state.said is not None and (line.repeat_s is None or now - state.said < line.repeat_s):
            return None
        state.said = now
        return Alarm(line.kind, used_bytes, self.limit_bytes, level)

    def _exhaustion(self, now: float, used_bytes: int) -> Alarm | None:
        self._remember(now, used_bytes)
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        if used_bytes < _CAME_DOWN * self._peak_bytes:
            self._survived_bytes = self._peak_bytes
        if used_bytes < _HIGHER * self._survived_bytes:
            return None  # it has been this high before and came down again
        rate = self.growth(now)
        left_s = (self.limit_bytes - used_bytes) / rate if rate > 0 else None
        if left_s is None or not 0 < left_s <= self.horizon_s:
            return None
        if self._forecast_said is not None and now - self._forecast_said < _REPEAT_S:
            return None
        self._forecast_said = now
        return Alarm("exhaustion", used_bytes, self.limit_bytes, self.limit_bytes, left_s, rate)

    def _remember(self, now: float, used_bytes: int) -> None:
        """Four points a second are enough, and keep a long watch cheap."""
        if not self._points or now - self._points[-1][0] >= 0.25:
            self._points.append((now, float(used_bytes)))
        while self._points and now - self._points[0][0] > _LONG_S:
            self._points.popleft()

    def growth(self, now: float) -> float:
        """Bytes per second by which the floor rises, 0 unless it does so over 10 s and over 60 s, notably.

        Before a minute has passed there is no long view and nothing is said: a program that loads grows.
        """
        if not self._points or now - self._points[0][0] < _LONG_S - 5:
            return 0.0
        points = list(self._points)
        low = floors(points, _FLOORS_LONG)
        if low[-1][1] - low[0][1] <= self.min_growth * self.limit_bytes:
            return 0.0
        long = slope(low)
        short = slope(floors([point for point in points if now - point[0] <= _SHORT_S], _FLOORS_SHORT))
        return min(long, short) if long > 0 and short > 0 else 0.0


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
