"""Decide when memory is a reason to warn, to request a stop or to kill.

Covers thresholds with durations and hysteresis, and stop requests by prediction (`memory/prediction.py`). Does not know
processes or clocks: `Guard.observe(now, used)` gets both and returns the alarms that have become true; the caller acts
on them. `brim run`, `brim watch` and the workers of map and tokenize use the same guard.

The constants are a compromise between stop requests that come in time and false alarms. `make bench-stop` measures
both for each shape of growth; docs/concepts/stop-prediction.md has the results.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import field

from brim.errors import InputError
from brim.memory.prediction import (
    RUSH_LENGTHS,
    MemoryHistory,
    Prediction,
    predict_growth,
    predict_rush,
    predict_staircase,
)
from brim.records import dataclass
from brim.sizes import format_duration, format_size, parse_size

DEFAULT_LEAD_S = 30.0
_REPEAT_S = 300.0
_DECAY = 20  # time below a threshold cancels a twentieth as much time above it
_MAX_INTERVAL_S = 2.0  # a longer pause between readings does not count as time above a threshold
_PREDICT_FROM = 0.6  # of the limit: below it no prediction causes a stop
_SLOW_CLIMB_LEADS = 4.0  # a climb from there that takes less is left to the stop threshold: loading looks the same
_RUSH_MARGIN = 0.012  # of the limit: this far below the stop threshold a rush causes a stop
_RUSH_LEFT_S, _STAIRCASE_LEFT_S = 1.2, 2.4
_AGREEING = 2  # by chance one window length sees growth in noise, two hardly ever do
_SEEN_LEADS = 1.5  # the longest of these windows spans so many leads
_LEAD_MARGIN = 1.05
_MIN_BIN_S, _MAX_BIN_S, _FAST_BIN_S = 0.2, 2.0, 0.25
_RECENT_BINS = 90
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class Level:
    """An amount of memory as a share of the limit or in bytes."""

    share: float | None = None
    bytes: int | None = None

    def in_bytes(self, limit_bytes: int) -> int:
        return self.bytes if self.bytes is not None else round((self.share or 0.0) * limit_bytes)


def parse_level(text: str) -> Level | None:
    """Parse a level like "80%" or "40GB"; "off" gives None."""
    if text.strip().lower() in ("off", "never", "none"):
        return None
    match = _PERCENT.fullmatch(text)
    if match is None:
        return Level(bytes=parse_size(text))
    if not 0 < float(match[1]) <= 100:
        raise InputError(f"{text!r} is not a share between 0 % and 100 %.", hint="Write it like 80% or 40GB.")
    return Level(share=float(match[1]) / 100)


@dataclass(frozen=True, slots=True)
class Threshold:
    """A level that raises an alarm after `after_s` above it, and again every `repeat_s` while that lasts."""

    kind: str
    level: Level
    after_s: float = 0.0
    repeat_s: float | None = _REPEAT_S
    hysteresis: float = 0.05


def standard_thresholds(
    alert: Level | None, stop: Level | None, kill: Level | None, alert_after_s: float = 10.0, stop_after_s: float = 3.0
) -> list[Threshold]:
    """Return the thresholds to warn, stop and kill, without those whose level is None. Stop and kill do not repeat."""
    rows = (("alert", alert, alert_after_s, _REPEAT_S), ("stop", stop, stop_after_s, None), ("kill", kill, 0.0, None))
    return [Threshold(kind, level, after, repeat) for kind, level, after, repeat in rows if level is not None]


def check_order(thresholds: Iterable[Threshold], limit_bytes: int) -> None:
    """Refuse a stop above the kill: it would never happen."""
    levels = {threshold.kind: threshold.level.in_bytes(limit_bytes) for threshold in thresholds}
    for lower, upper in (("alert", "stop"), ("stop", "kill"), ("alert", "kill")):
        if lower in levels and upper in levels and levels[lower] > levels[upper]:
            raise InputError(
                f"The {lower} level {format_size(levels[lower])} is above the {upper} level "
                f"{format_size(levels[upper])}.",
                hint="Order them: alert, stop, kill.",
            )


@dataclass(frozen=True, slots=True)
class Alarm:
    """A threshold that was passed, or that will be reached in `left_s` at the present rate."""

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
        """Return the prediction as text, or an empty text; `clock_s` is the time of day of the reading."""
        if self.left_s is None:
            return ""
        when = "" if clock_s is None else f"at {time.strftime('%H:%M', time.localtime(clock_s + self.left_s))}, "
        rate = format_size(60 * (self.bytes_per_s or 0.0))
        left = format_duration(self.left_s)
        return f"growing by {rate} per minute: at this rate the limit is reached {when}in {left}"


@dataclass(slots=True)
class _State:
    """How much time was spent above one threshold lately, and when its alarm was last raised."""

    above_s: float = 0.0
    raised: float | None = None
    armed: bool = True


@dataclass(slots=True)
class Guard:
    """Watch one number against one limit. `lead_s` 0 predicts no stop, `horizon_s` 0 announces no exhaustion."""

    limit_bytes: int
    thresholds: Sequence[Threshold]
    horizon_s: float = 600.0
    lead_s: float = DEFAULT_LEAD_S
    _states: dict[str, _State] = field(default_factory=dict)
    _last: float | None = None
    _history: MemoryHistory = field(init=False)
    _fast: MemoryHistory = field(init=False)
    _predictions: list[Prediction] = field(default_factory=list)
    _predicted: float = 0.0
    _announced: float | None = None

    def __post_init__(self) -> None:
        bin_s = min(max((self.lead_s or DEFAULT_LEAD_S) / 30, _MIN_BIN_S), _MAX_BIN_S)
        self._history, self._fast = MemoryHistory(bin_s), MemoryHistory(_FAST_BIN_S)

    def level_bytes(self, kind: str) -> int | None:
        """Return the level of the threshold of this kind; None without such a threshold."""
        levels = (each.level.in_bytes(self.limit_bytes) for each in self.thresholds if each.kind == kind)
        return min(levels, default=None)

    @property
    def end_bytes(self) -> int:
        """The level at which the process dies: the kill threshold, or else the limit."""
        kill = self.level_bytes("kill")
        return self.limit_bytes if kill is None else kill

    def observe(self, now: float, used_bytes: int) -> list[Alarm]:
        """Return the alarms that this reading raises, the gravest first."""
        passed_s = 0.0 if self._last is None else now - self._last
        self._last = now
        stop_bytes, state = self.level_bytes("stop"), self._states.setdefault("stop", _State())
        is_due = False  # within a bin only a higher reading can be the reason for a stop
        if self.horizon_s or (self.lead_s and stop_bytes is not None):
            peak = self._fast.peaks[-1] if self._fast.peaks else 0
            is_due = self._fast.add(now, used_bytes) or used_bytes > peak
            if self._history.add(now, used_bytes):
                lead_s = self.lead_s or DEFAULT_LEAD_S
                self._predictions = predict_growth(self._history, self.end_bytes, self.limit_bytes, lead_s)
                self._predicted = now
        alarms = [alarm for each in self.thresholds if (alarm := self._cross(each, now, used_bytes, passed_s))]
        if is_due and stop_bytes is not None and self.lead_s and state.raised is None:
            reason = self._stop_reason(now, used_bytes, stop_bytes)
            if reason is not None:
                state.raised = now
                alarms.append(self._alarm("stop", used_bytes, self.end_bytes, reason))
        alarms.sort(key=lambda alarm: -alarm.level_bytes)
        # Exhaustion is announced long before it happens, and only if two leads of history or more show it.
        long = [each for each in self._predictions if each.seen_s >= 2 * (self.lead_s or DEFAULT_LEAD_S)]
        may_announce = self._announced is None or now - self._announced >= _REPEAT_S
        if may_announce and len(self._predictions) >= _AGREEING and long and 0 < long[0].left_s <= self.horizon_s:
            self._announced = now
            alarms.append(self._alarm("exhaustion", used_bytes, self.end_bytes, long[0]))
        return alarms

    def prediction(self, now: float) -> Prediction | None:
        """Return when the kill threshold, or else the limit, will be reached; None unless two window lengths agree."""
        if len(self._predictions) < _AGREEING:
            return None
        first = self._predictions[0]
        return Prediction(max(first.left_s - (now - self._predicted), 0.0), first.bytes_per_s, first.seen_s)

    def _cross(self, threshold: Threshold, now: float, used_bytes: int, passed_s: float) -> Alarm | None:
        state = self._states.setdefault(threshold.kind, _State())
        level = threshold.level.in_bytes(self.limit_bytes)
        if used_bytes < level - threshold.hysteresis * self.limit_bytes:
            state.armed = True
        if used_bytes < level:
            state.above_s = max(state.above_s - passed_s / _DECAY, 0.0)
            return None
        state.above_s = min(state.above_s + (passed_s if passed_s <= _MAX_INTERVAL_S else 0.0), threshold.after_s)
        if state.above_s < threshold.after_s:
            return None
        if state.raised is not None:
            repeats = threshold.repeat_s is not None and now - state.raised >= threshold.repeat_s
            # A threshold with a duration repeats at its interval only, however often it is crossed.
            if not repeats and (threshold.after_s or not state.armed):
                return None
        state.raised, state.armed = now, False
        return self._alarm(threshold.kind, used_bytes, level, self.prediction(now))

    def _alarm(self, kind: str, used_bytes: int, level: int, prediction: Prediction | None) -> Alarm:
        """Add the time until the limit itself: predictions are for the kill threshold, which is a little lower."""
        if prediction is None or prediction.bytes_per_s <= 0:
            return Alarm(kind, used_bytes, self.limit_bytes, level)
        left_s = prediction.left_s + (self.limit_bytes - self.end_bytes) / prediction.bytes_per_s
        return Alarm(kind, used_bytes, self.limit_bytes, level, left_s, prediction.bytes_per_s)

    def _stop_reason(self, now: float, used_bytes: int, stop_bytes: int) -> Prediction | None:
        """Return the prediction that is the reason to request the stop now; None if there is no reason."""
        end, start = self.end_bytes, _PREDICT_FROM * self.limit_bytes
        if used_bytes >= stop_bytes - _RUSH_MARGIN * self.limit_bytes:
            is_above = used_bytes >= stop_bytes
            climb = predict_rush(self._fast, end, RUSH_LENGTHS if is_above else RUSH_LENGTHS[:1])
            if climb is not None and climb.left_s < (self.lead_s if is_above else min(_RUSH_LEFT_S, self.lead_s)):
                return climb
        if used_bytes >= start:
            stairs = predict_staircase(self._fast, end, self.limit_bytes)
            if stairs is not None and stairs.left_s <= max(stairs.step_s, _STAIRCASE_LEFT_S):
                return stairs  # the end is at most one step, or a few seconds, away
        if max(self._history.peaks[-_RECENT_BINS:]) < start:
            return None
        aged_s, soon_s = now - self._predicted, _LEAD_MARGIN * self.lead_s + self._history.bin_s
        soon = [
            Prediction(max(each.left_s - aged_s, 0.0), each.bytes_per_s, each.seen_s)
            for each in self._predictions
            if each.left_s - aged_s <= soon_s
        ]
        if len(soon) < _AGREEING:
            return None
        slow_s, climbed_s = _SLOW_CLIMB_LEADS * self.lead_s, self._history.seconds_above(start)
        agreeing = [p for p in soon if p.bytes_per_s * slow_s <= end - start or climbed_s + p.left_s >= slow_s]
        has_lasted = agreeing and agreeing[-1].seen_s >= _SEEN_LEADS * self.lead_s
        return agreeing[0] if has_lasted and len(agreeing) >= _AGREEING else None
