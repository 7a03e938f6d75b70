"""Forecasts from measurements: a running process and its next step, and runs on parts of the data.

`sampled` fits a straight line with a fixed part, such that one odd run does not decide (Theil–Sen: the median of the
slopes between all pairs). The forecast starts from the largest part that was run, and its range is the spread of
those slopes. If the points bend upwards, a line is too low: then the high end follows the bend.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles

from brim.errors import InputError
from brim.memory.limit import Limit, cgroups, watch_limit
from brim.memory.meter import (
    Machine,
    Usage,
    all_pids,
    largest_first,
    machine_now,
    meminfo,
    proportional_usage,
    read_process,
    resident_tree,
    tree,
)
from brim.monitor.forecasts.shapes import Component, Forecast, Reasons, Size, concat
from brim.monitor.run_log import read_run
from brim.monitor.watching.find_processes import ProcessNames
from brim.records import dataclass
from brim.sizes import format_size, parse_size

_TOO_LARGE_TO_COUNT = 20 * 10**9  # counting page by page makes the processes wait: seconds at 200 GB
_SHOWN_PROCESSES = 5
_ALLOCATIONS = (
    "free memory need not be contiguous; allocations fail because of overcommit "
    "(vm.overcommit_memory=2), huge pages, address-space limits (ulimit -v) and CUDA's own memory"
)


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """The memory of a process tree; a range if forked processes share pages that were not counted individually."""

    pid: int
    name: str
    processes: int
    usage: Usage
    low_bytes: int

    @property
    def high_bytes(self) -> int:
        return self.usage.total_bytes


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The machine or a cgroup around a process. `used_bytes` includes the process itself."""

    used_bytes: int
    limit: Limit


def pid(
    *,
    pid: int,
    adds: Size | None = None,
    rows: int | str | None = None,
    dims: int | str | Sequence[int | str] | None = None,
    dtype: str = "float32",
    memory: Size | None = None,
) -> Forecast:
    """Forecast the memory of a running process and its descendants after its next step.

    The step adds `adds`, or the copy that concatenating `rows` vectors of `dims` makes: the pieces exist already.
    """
    step = Component.exactly("next step", 0, "unknown")
    if rows is not None or dims is not None:
        if adds is not None or rows is None or dims is None:
            raise InputError("Give the size of the next step: --adds SIZE, or --rows and --dims.", hint="Not both.")
        components = concat(rows=rows, dims=dims, dtype=dtype).components
        data = next(part for part in components if part.name == "pieces in lists")
        step = Component.exactly("next step", data.high_bytes, f"the joined copy: {data.why}")
    elif adds is not None:
        step = Component.exactly("next step", parse_size(adds), "--adds")
    used, machine = tree_usage(pid), machine_now()
    if memory is not None:
        around = Surroundings(0, Limit(parse_size(memory), "--memory, for this process and its children"))
        return forecast_step(used, step, around, machine, is_own_limit=True)
    candidates = surroundings(pid, machine)
    if not candidates:
        raise InputError("The memory of this system is not known.", hint="Give the limit with --memory.")
    tightest = max(candidates, key=lambda each: (each.used_bytes + step.high_bytes) / max(each.limit.bytes, 1))
    return replace(forecast_step(used, step, tightest, machine), notes=breakdown(machine))


def forecast_step(
    used: TreeUsage, step: Component, around: Surroundings, machine: Machine, *, is_own_limit: bool = False
) -> Forecast:
    """Compare a process after its next step with its own limit, or all of the memory in use with that around it.

    The sum of all memory in use is known exactly, however the processes share their pages.
    """
    usage, added = used.usage, step.high_bytes
    kinds = (("anonymous", usage.anon_bytes), ("shared", usage.shmem_bytes), ("swap", usage.swap_bytes))
    by_kind = ", ".join(f"{kind} {format_size(size)}" for kind, size in kinds if size)
    file_pages = f"; {format_size(usage.file_bytes)} of file pages do not count" if usage.file_bytes else ""
    children = {1: "", 2: " and a child process"}.get(used.processes, f" and {used.processes - 1} child processes")
    own = Component(
        f"process {used.pid}", used.low_bytes, used.high_bytes, f"{used.name}{children}: {by_kind}{file_pages}"
    )
    details = {
        "pid": used.pid,
        "process": used.name,
        "processes": used.processes,
        "anon_bytes": usage.anon_bytes,
        "shared_bytes": usage.shmem_bytes,
        "swap_bytes": usage.swap_bytes,
        "file_bytes": usage.file_bytes,
        "adds_bytes": added,
        "step": step.why,
    }
    risks = () if added else ("the memory that its next step adds is not counted: give --adds, for instance 19GB",)
    if is_own_limit:
        reasons = Reasons(for_crash=risks)
        return Forecast("pid", (own, step), around.limit, reasons, "after its next step", details=details)
    counted, swap_free = min(used.high_bytes, around.used_bytes), machine.swap_free_bytes or 0
    other_memory = Component.exactly("others", around.used_bytes - counted, "all other memory that cannot be reclaimed")
    return Forecast(
        "pid",
        (Component.exactly(own.name, counted, own.why), other_memory, step),
        around.limit,
        Reasons(
            for_crash=(*risks, "others may grow too, and so may it before its next step"),
            against=(f"{format_size(swap_free)} of swap are free: slower, but no crash",) if swap_free else (),
        ),
        "after its next step",
        remark=("sum", addition(around.used_bytes, added, around.limit.bytes)),
        details={**details, "others_bytes": other_memory.high_bytes, "used_bytes": around.used_bytes},
    )


def breakdown(machine: Machine) -> tuple[tuple[str, str], ...]:
    """Describe where the machine's memory is: the largest processes, and free memory before and after reclaim."""
    processes = largest_first(process for process in map(read_process, all_pids()) if process is not None)
    names = ProcessNames()
    largest = ", ".join(
        f"{names.of(process.pid, process.name)} ({process.pid}) {format_size(process.usage.total_bytes)}"
        for process in processes[:_SHOWN_PROCESSES]
    )
    free, available = format_size(meminfo().get("MemFree", 0)), format_size(machine.available_bytes or 0)
    lines = [
        ("largest", largest),
        ("page cache", f"{format_size(machine.file_bytes)}; shared memory {format_size(machine.shmem_bytes)}"),
        ("free", f"{free} at once, {available} after the kernel has taken page cache back"),
        ("in one piece", _ALLOCATIONS),
    ]
    return tuple(line for line in lines if line[1])


def addition(now: int, added: int, limit: int) -> str:
    """Format "162 + 19 = 181 of 188 GB", rounded so that it adds up."""
    unit, name = (10**9, "GB") if limit >= 10**10 else (10**6, "MB")
    digits = 0 if limit >= 100 * unit else 1
    step, total = round(added / unit, digits), round((now + added) / unit, digits)
    first, second, third, fourth = (f"{x:.{digits}f}" for x in (total - step, step, total, limit / unit))
    return f"{first} + {second} = {third} of {fourth} {name}: in use now + the next step"


def tree_usage(pid: int) -> TreeUsage:
    """Measure a process and its descendants."""
    if sys.platform == "linux":
        members = [process for process in map(read_process, tree([pid])) if process is not None]
    else:
        members = resident_tree([pid])
    if not members:
        raise InputError(
            f"Process {pid} does not exist, or this user may not inspect it.",
            hint="`brim watch --match NAME` finds one.",
        )
    total = sum((member.usage for member in members), Usage())
    low = total.total_bytes
    if len(members) > 1:
        low = max(member.usage.total_bytes for member in members)
        if total.total_bytes <= _TOO_LARGE_TO_COUNT:
            counted = [usage for member in members if (usage := proportional_usage(member.pid)) is not None]
            if len(counted) == len(members):
                exact = sum(counted, Usage())
                total = replace(exact, file_bytes=total.file_bytes)
                low = exact.total_bytes
    return TreeUsage(pid, members[0].name, len(members), total, low)


def surroundings(pid: int, machine: Machine, root: Path = Path("/")) -> list[Surroundings]:
    """Return the machine and every limited cgroup above the process, each with all memory in use."""
    surrounding = []
    if machine.total_bytes is not None:
        surrounding.append(Surroundings(machine.used_bytes, Limit(machine.total_bytes, "all of this machine's memory")))
    for group, limit, usage, reclaimable in cgroups(root, pid):
        if machine.total_bytes is None or limit < machine.total_bytes:
            surrounding.append(
                Surroundings(max(usage - reclaimable, 0), Limit(limit, f"the limit of the cgroup {group}"))
            )
    return surrounding


_ASSUMED_SPREAD = 0.25  # two parts are always on a line: their error cannot be measured
_ENOUGH_PAIRS = 10  # from here on single odd pairs are left out of the range
_BEND = 1.25  # how much steeper the upper half must be
_NOISE = 0.02  # of the highest peak: by how much two runs of the same part may differ
_FAR_FACTOR = 8


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """A run: the part of the data, its peak, and a doubt about that number if there is one."""

    fraction: float
    peak_bytes: int
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through points: bytes for no data, and additional bytes for all of it, with the range of the slope."""

    fixed_bytes: float
    slope: float
    slope_low: float
    slope_high: float


def sampled(
    *,
    points: Iterable[str | tuple[float | str, Size]] = (),
    logs: Iterable[str | os.PathLike[str]] = (),
    at: float | str = 1,
    memory: Size | None = None,
) -> Forecast:
    """Forecast the peak at the fraction `at` of the data (1: all of it), from runs at smaller ones.

    `points` are pairs of fraction and peak, or texts like "1/32=1.2GB"; `logs` are files of `brim run`.
    """
    runs = [*map(_parse_point, points), *map(read_point, logs)]
    goal = parse_fraction(at)
    fractions = sorted({run.fraction for run in runs})
    if len(fractions) < 2:
        raise InputError(
            f"A line needs two different fractions, and there is {len(fractions) or 'none'}.",
            hint="Run the command at two or more, for instance: brim run --fraction 1/32 -- COMMAND, then 1/8.",
        )
    fit, top = theil_sen(runs), fractions[-1]
    measured = round(median(run.peak_bytes for run in runs if run.fraction == top))
    distance = goal - top
    low, high = sorted((fit.slope_low * distance, fit.slope_high * distance))
    bend = upper_bend(runs, goal)
    if bend is not None:
        high = max(high, bend - measured)
    if distance > 0:
        # More data does not need less memory than a run on less data has needed.
        low, high = max(low, 0.0), max(high, 0.0, float(max(run.peak_bytes for run in runs) - measured))
    change = f"{_format_fraction(abs(distance))} of the data {'more' if distance >= 0 else 'less'}, by the line"
    parts = (
        Component.exactly("measured", measured, f"the peak at {_format_fraction(top)} of the data"),
        Component("the rest", math.floor(low), math.ceil(high), change),
    )
    comforts = (f"the {len(runs)} runs do not bend upwards",) if len(fractions) > 2 and bend is None else ()
    reasons = Reasons(tuple(_risks(runs, fractions, goal, bend)), comforts)
    details = {
        "points": [{"fraction": run.fraction, "peak_bytes": run.peak_bytes} for run in runs],
        "fit": {"fixed_bytes": round(fit.fixed_bytes), "bytes_for_all": round(fit.slope)},
        "at": goal,
        "curves_upwards": bend is not None,
    }
    sign = "-" if fit.slope < 0 else "+"
    line = f"{format_size(fit.fixed_bytes)} {sign} {format_size(abs(fit.slope))} × fraction, fitted to {len(runs)} runs"
    when = "with all the data" if goal == 1 else f"with {_format_fraction(goal)} of the data"
    return Forecast("sampled", parts, watch_limit(memory), reasons, when, ("line", line), details)


def theil_sen(points: Sequence[MeasuredPoint]) -> Fit:
    """Return the median slope between all pairs, the median of the intercepts, and the spread of the slopes."""
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
    # Points may be on a line by chance: the possible error of a peak tilts it.
    fractions = [point.fraction for point in points]
    tilt = _NOISE * max(point.peak_bytes for point in points) / (max(fractions) - min(fractions))
    return Fit(fixed, slope, min(low, slope - tilt), max(high, slope + tilt))


def upper_bend(points: Sequence[MeasuredPoint], goal: float) -> float | None:
    """Return the bytes at `goal` if the points bend upwards, else None.

    They are those of a parabola through the first, the middle and the last part, with the possible error of each peak.
    """
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
    parabola = y0 + lower * (goal - x0) + (upper - lower) / (x2 - x0) * (goal - x0) * (goal - x1)
    weights = (
        (goal - x1) * (goal - x2) / ((x0 - x1) * (x0 - x2)),
        (goal - x0) * (goal - x2) / ((x1 - x0) * (x1 - x2)),
        (goal - x0) * (goal - x1) / ((x2 - x0) * (x2 - x1)),
    )
    return parabola + _NOISE * sum(abs(weight) * peak for weight, peak in zip(weights, (y0, y1, y2), strict=True))


def _risks(runs: Sequence[MeasuredPoint], fractions: Sequence[float], goal: float, bend: float | None) -> Iterator[str]:
    if bend is not None:
        yield (
            "the points bend upwards: memory grows faster than the data, and a line is too low. "
            "The high end follows the bend; run a larger part to be sure"
        )
    if goal / fractions[-1] >= _FAR_FACTOR:
        yield f"the forecast is for {goal / fractions[-1]:.0f} times the largest part that was run"
    highest = max(runs, key=lambda run: run.peak_bytes)
    if highest.fraction < fractions[-1]:
        yield (
            f"the run at {_format_fraction(highest.fraction)} needed {format_size(highest.peak_bytes)}, more than the "
            f"run at {_format_fraction(fractions[-1])}: the high end is at least that"
        )
    if len(fractions) == 2:
        yield "two fractions are always on a line" + (
            f": ± {_ASSUMED_SPREAD:.0%} of the slope is assumed. A third one would show it" if len(runs) == 2 else ""
        )
    for run in runs:
        if run.doubt:
            yield f"the run at {_format_fraction(run.fraction)} {run.doubt}, so its peak may be too low"


def parse_fraction(text: float | str) -> float:
    """Parse a part such as "1/32", "0.03", "3%" or a number; above zero."""
    try:
        if isinstance(text, str):
            above, slash, below = text.strip().removesuffix("%").partition("/")
            value = float(above) / (float(below) if slash else 1) / (100 if "%" in text else 1)
        else:
            value = float(text)
    except (ValueError, ZeroDivisionError, OverflowError):
        value = math.nan
    if not 0 < value < 1e6:
        raise InputError(f"{text!r} is not a fraction above zero.", hint="Write it like 1/32, 0.03 or 3%.")
    return value


def _format_fraction(fraction: float) -> str:
    nearest = Fraction(fraction).limit_denominator(1024)
    return str(nearest) if nearest and abs(float(nearest) - fraction) < 1e-9 else f"{fraction:.3g}"


def _parse_point(point: str | tuple[float | str, Size]) -> MeasuredPoint:
    if not isinstance(point, str):
        return MeasuredPoint(parse_fraction(point[0]), parse_size(point[1]))
    fraction, equals, peak = point.partition("=")
    if not equals:
        raise InputError(f"{point!r} is not a point.", hint="Write it like 1/32=1.2GB.")
    return MeasuredPoint(parse_fraction(fraction), parse_size(peak))


def read_point(log: str | os.PathLike[str]) -> MeasuredPoint:
    """Read the fraction and the peak of the last run in a log of `brim run --fraction F`."""
    name, run = os.fspath(log), read_run(Path(log))
    if not run.head.raw:
        raise InputError(f"{name} is not a log of brim run.", hint="Make one with: brim run --log FILE -- COMMAND")
    if run.head.raw.get("fraction") is None:
        raise InputError(
            f"{name} has no fraction of the data.",
            hint="Run it with --fraction, or give the point as --point=1/32=1.2GB.",
        )
    end, doubt = run.end, ""
    if end is None or not end.peak_bytes:
        raise InputError(f"{name} was cut off: its peak is not known.", hint="Run that part again, or leave it out.")
    if end.stopped:
        doubt = "was stopped for its memory"
    elif end.signal:
        doubt = f"died of signal {end.signal}"
    elif end.exit_code:
        doubt = f"ended with exit code {end.exit_code}"
    return MeasuredPoint(parse_fraction(run.head.raw["fraction"]), end.peak_bytes, doubt)
