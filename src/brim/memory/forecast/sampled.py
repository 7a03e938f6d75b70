"""The shape `sampled`: a command was run on parts of its data; what will it take on all of it?

A straight line with a fixed part, fitted so that one odd run does not decide (Theil–Sen: the median of the
slopes between all pairs). The forecast starts from the largest part that was run, and its range is the spread of
those slopes. Where the points bend upwards a line is too low: then the high end follows the bend.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from statistics import median, quantiles
from typing import Any

from brim.errors import InputError
from brim.memory.forecast.model import Component, Forecast, Reasons
from brim.memory.limit import watch_limit
from brim.sizes import format_size, parse_size

# Two parts lie on a line whatever they are: their own error cannot be seen, so it is assumed.
_ASSUMED_SPREAD = 0.25
_ENOUGH_PAIRS = 10  # from here on single odd pairs are left out of the range
_BEND = 1.25  # how much steeper the upper half must be
_NOISE = 0.02  # of the highest peak: what two runs of the same part may differ by
_FAR = 8


@dataclass(frozen=True, slots=True)
class Point:
    """A run: what part of the data, the highest memory it held, and a doubt about that number if there is one."""

    fraction: float
    peak_bytes: int
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through points: bytes for no data, and bytes for all of it, with the range of the slope."""

    fixed_bytes: float
    slope: float
    slope_low: float
    slope_high: float


def sampled(
    *,
    points: Iterable[str | tuple[float | str, str | int | float]] = (),
    logs: Iterable[str | os.PathLike[str]] = (),
    at: float | str = 1,
    memory: str | int | float | None = None,
) -> Forecast:
    """The peak at the fraction `at` of the data (1: all of it), from runs at smaller ones.

    `points` are pairs of fraction and peak, or texts like "1/32=1.2GB"; `logs` are files of `brim run`.
    """
    runs = [*map(_point, points), *map(read_point, logs)]
    goal = parse_fraction(at)
    fractions = sorted({run.fraction for run in runs})
    if len(fractions) < 2:
        raise InputError(
            f"A line needs two different fractions, and there is {len(fractions) or 'none'}.",
            hint="Run the command at two or more, for instance: brim run --fraction 1/32 -- COMMAND, then 1/8.",
        )
    fit = theil_sen(runs)
    top = fractions[-1]
    start = round(median(run.peak_bytes for run in runs if run.fraction == top))
    rest = goal - top
    low, high = sorted((fit.slope_low * rest, fit.slope_high * rest))
    bend = upper_bend(runs, goal)
    if bend is not None:
        high = max(high, bend - start)
    if rest > 0:
        low, high = max(low, 0.0), max(high, 0.0)
    more = "more" if rest >= 0 else "less"
    parts = (
        Component.exactly("measured", start, f"the peak at {_shown(top)} of the data"),
        Component("the rest", math.floor(low), math.ceil(high), f"{_shown(abs(rest))} of the data {more}, by the line"),
    )
    reasons = Reasons(tuple(_risks(runs, fractions, goal, bend)), tuple(_comforts(runs, fractions, bend)))
    details = {
        "points": [{"fraction": run.fraction, "peak_bytes": run.peak_bytes} for run in runs],
        "fit": {"fixed_bytes": round(fit.fixed_bytes), "bytes_for_all": round(fit.slope)},
        "at": goal,
        "curves_upwards": bend is not None,
    }
    line = f"{format_size(fit.fixed_bytes)} + {format_size(fit.slope)} × fraction, fitted to {len(runs)} runs"
    moment = "with all the data" if goal == 1 else f"with {_shown(goal)} of the data"
    return Forecast("sampled", parts, watch_limit(memory), reasons, moment, ("line", line), details)


def theil_sen(points: Sequence[Point]) -> Fit:
    """The median of the slopes between all pairs, the median of what is left, and the spread of the slopes."""
    slopes = [
        (b.peak_bytes - a.peak_bytes) / (b.fraction - a.fraction)
        for a, b in combinations(points, 2)
        if a.fraction != b.fraction
    ]
    slope = median(slopes)
    if len(slopes) == 1:
        spread = _ASSUMED_SPREAD * abs(slope)
        low, high = slope - spread, slope + spread
    elif len(slopes) < _ENOUGH_PAIRS:
        low, high = min(slopes), max(slopes)
    else:
        tenths = quantiles(slopes, n=10, method="inclusive")
        low, high = tenths[0], tenths[-1]
    fixed = median(point.peak_bytes - slope * point.fraction for point in points)
    # Points may lie on a line by luck: what a peak may be wrong by tilts it.
    fractions = [point.fraction for point in points]
    tilt = _NOISE * max(point.peak_bytes for point in points) / (max(fractions) - min(fractions))
    return Fit(fixed, slope, min(low, slope - tilt), max(high, slope + tilt))


def upper_bend(points: Sequence[Point], goal: float) -> float | None:
    """Bytes at `goal` if the points bend upwards: a parabola through the first, the middle and the last part."""
    peaks: dict[float, list[int]] = {}
    for point in points:
        peaks.setdefault(point.fraction, []).append(point.peak_bytes)
    if len(peaks) < 3:
        return None
    curve = [(fraction, median(peaks[fraction])) for fraction in sorted(peaks)]
    (x0, y0), (x1, y1), (x2, y2) = curve[0], curve[len(curve) // 2], curve[-1]
    lower, upper = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    noise = max(_NOISE * y2, *(max(sizes) - min(sizes) for sizes in peaks.values()))
    if upper <= _BEND * max(lower, 0.0) or (upper - lower) * (x2 - x1) <= 2 * noise:
        return None
    return y0 + lower * (goal - x0) + (upper - lower) / (x2 - x0) * (goal - x0) * (goal - x1)


def _risks(runs: Sequence[Point], fractions: Sequence[float], goal: float, bend: float | None) -> Iterable[str]:
    if bend is not None:
        yield (
            "the points bend upwards: memory grows faster than the data, and a line is too low. "
            "The high end follows the bend; run a larger part to be sure"
        )
    if goal / fractions[-1] >= _FAR:
        yield f"the forecast reaches {goal / fractions[-1]:.0f} times beyond the largest part that was run"
    if len(fractions) == 2:
        yield "two fractions lie on a line whatever they are" + (
            f": ± {_ASSUMED_SPREAD:.0%} of the slope is assumed. A third one would show it" if len(runs) == 2 else ""
        )
    for run in runs:
        if run.doubt:
            yield f"the run at {_shown(run.fraction)} {run.doubt}, so its peak may be too low"


def _comforts(runs: Sequence[Point], fractions: Sequence[float], bend: float | None) -> Iterable[str]:
    if len(fractions) > 2 and bend is None:
        yield f"the {len(runs)} runs do not bend upwards"


def parse_fraction(text: float | str) -> float:
    """A part from "1/32", "0.03", "3%" or a number; above zero."""
    try:
        if isinstance(text, str):
            cut = text.strip().removesuffix("%")
            above, slash, below = cut.partition("/")
            value = float(above) / (float(below) if slash else 1) / (100 if "%" in text else 1)
        else:
            value = float(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        value = math.nan
    if not 0 < value < 1e6:
        raise InputError(f"{text!r} is not a fraction above zero.", hint="Write it like 1/32, 0.03 or 3%.")
    return value


def _point(given: str | tuple[float | str, str | int | float]) -> Point:
    if not isinstance(given, str):
        return Point(parse_fraction(given[0]), parse_size(given[1]))
    fraction, equals, peak = given.partition("=")
    if not equals:
        raise InputError(f"{given!r} is not a point.", hint="Write it like 1/32=1.2GB.")
    return Point(parse_fraction(fraction), parse_size(peak))


def read_point(log: str | os.PathLike[str]) -> Point:
    """The last run in a log of `brim run --fraction F`: its head says the fraction, its end the peak."""
    head: dict[str, Any] = {}
    end: dict[str, Any] = {}
    try:
        with open(log, "rb") as lines:
            for line in lines:
                entry = _entry(line)
                if entry.get("type") == "head":
                    head, end = entry, {}
                elif entry.get("type") == "end":
                    end = entry
    except OSError as error:
        raise InputError(f"{os.fspath(log)} cannot be read: {error.strerror}.") from error
    name = os.fspath(log)
    if not head:
        raise InputError(f"{name} is not a log of brim run.", hint="Make one with: brim run --log FILE -- COMMAND")
    if head.get("fraction") is None:
        raise InputError(
            f"{name} does not say what part of the data was run.",
            hint="Run it with --fraction, or give the point as --point=1/32=1.2GB.",
        )
    if not isinstance(end.get("peak_bytes"), int) or end["peak_bytes"] < 1:
        raise InputError(f"{name} was cut off: its peak is not known.", hint="Run that part again, or leave it out.")
    return Point(parse_fraction(head["fraction"]), end["peak_bytes"], _doubt(end))


def _entry(line: bytes) -> dict[str, Any]:
    """A line of a log; empty if it is torn or none of brim's."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _doubt(end: dict[str, Any]) -> str:
    if end.get("stopped"):
        return "was stopped for its memory"
    if end.get("signal"):
        return f"was ended by signal {end['signal']}"
    return f"ended with exit code {end['exit_code']}" if end.get("exit_code") else ""


def _shown(fraction: float) -> str:
    near = Fraction(fraction).limit_denominator(1024)
    exact = near and abs(float(near) - fraction) < 1e-9
    return str(near) if exact else f"{fraction:.3g}"
