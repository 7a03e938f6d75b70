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

from brim.errors import InputError
from brim.memory.watch.trend import Point, floors, slope
from brim.sizes import format_size, parse_size

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
