"""The shape `sampled`: a command was run on parts of its data; what will it take on all of it?

A straight line with a fixed part, fitted so that one odd run does not decide (Theil–Sen: the median of the
slopes between all pairs). The forecast starts from the largest part that was run, and its range is the spread of
those slopes. Where the points bend upwards a line is too low: then the high end follows the bend.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles

from brim.errors import InputError
from brim.memory.limit import Limit, cgroups, watch_limit
from brim.memory.meter import (
    Machine,
    Process,
    Usage,
    machine_now,
    meminfo,
    proportional_usage,
    read_process,
    resident_tree,
    tree,
)
from brim.monitor.forecasts.shapes import Component, Forecast, Reasons, concat
from brim.monitor.run_log import read_run
from brim.monitor.watching.find_processes import ProcessNames
from brim.records import dataclass
from brim.sizes import format_size, parse_size

# Counting page by page holds the processes up: seconds at 200 GB.
_TOO_LARGE_TO_COUNT = 20 * 10**9


@dataclass(frozen=True, slots=True)
class Held:
    """The memory of a process tree; a range where forked processes share pages that were not counted individually."""

    pid: int
    name: str
    processes: int
    usage: Usage
    low_bytes: int

    @property
    def high_bytes(self) -> int:
        return self.usage.total_bytes

    def component(self) -> Component:
        usage = self.usage
        kinds = (("anonymous", usage.anon_bytes), ("shared", usage.shmem_bytes), ("swap", usage.swap_bytes))
        said = ", ".join(f"{kind} {format_size(size)}" for kind, size in kinds if size)
        file_pages = f"; {format_size(usage.file_bytes)} of file pages do not count" if usage.file_bytes else ""
        many = f" and {self.processes - 1} that it started" if self.processes > 1 else ""
        text = f"{self.name}{many}: {said}{file_pages}"
        return Component(f"process {self.pid}", self.low_bytes, self.high_bytes, text)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What stands around a process: the machine or a cgroup. `used_bytes` includes the process itself."""

    used_bytes: int
    limit: Limit


def pid(
    *,
    pid: int,
    adds: str | int | float | None = None,
    rows: int | str | None = None,
    dims: int | str | Sequence[int | str] | None = None,
    dtype: str = "float32",
    memory: str | int | float | None = None,
) -> Forecast:
    """A process that runs, and everything it started, now and after its next step.

    The step adds `adds`, or the copy that joining `rows` vectors of `dims` makes: the pieces exist already.
    """
    held = tree_held(pid)
    machine = machine_now()
    step = _step_of(adds, rows, dims, dtype)
    if memory is not None:
        made = alone(held, step.high_bytes, Limit(parse_size(memory), "--memory, for this process and its children"))
    else:
        around = _tightest(surroundings(pid, machine), step.high_bytes)
        made = among_others(held, step.high_bytes, around, machine)
        made = replace(made, notes=breakdown(machine))
    return replace(made, components=(*made.components[:-1], step), details={**made.details, "step": step.why})


def _step_of(
    adds: str | int | float | None, rows: int | str | None, dims: int | str | Sequence[int | str] | None, dtype: str
) -> Component:
    if rows is None and dims is None:
        return _next_step(0 if adds is None else parse_size(adds))
    if adds is not None or rows is None or dims is None:
        raise InputError("Give the size of the next step: --adds SIZE, or --rows and --dims.", hint="Not both.")
    joined = next(
        part for part in concat(rows=rows, dims=dims, dtype=dtype).components if part.name == "pieces in lists"
    )
    return Component.exactly("next step", joined.high_bytes, f"the joined copy: {joined.why}")


_SHOWN_PROCESSES = 5
_ALLOCATIONS = (
    "free memory need not be contiguous; allocations fail because of overcommit "
    "(vm.overcommit_memory=2), huge pages, address-space limits (ulimit -v) and CUDA's own memory"
)


def breakdown(machine: Machine) -> tuple[tuple[str, str], ...]:
    """Describe where the machine's memory is: the largest processes, and free memory before and after reclaim."""
    everyone = [process for process in map(read_process, _everyone()) if process is not None]
    largest = sorted(everyone, key=lambda process: -process.usage.total_bytes)[:_SHOWN_PROCESSES]
    names = ProcessNames()
    who = ", ".join(
        f"{names.of(one.pid, one.name)} ({one.pid}) {format_size(one.usage.total_bytes)}" for one in largest
    )
    free = meminfo().get("MemFree", 0)
    available = machine.available_bytes or 0
    lines = [
        ("largest", who),
        ("page cache", f"{format_size(machine.file_bytes)}; shared memory {format_size(machine.shmem_bytes)}"),
        ("free", f"{format_size(free)} at once, {format_size(available)} after the kernel has taken page cache back"),
        ("in one piece", _ALLOCATIONS),
    ]
    return tuple(line for line in lines if line[1])


def _everyone() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def alone(held: Held, added: int, limit: Limit) -> Forecast:
    """Compare with its own limit: the memory of others does not matter."""
    parts = (held.component(), _next_step(added))
    reasons = Reasons(for_crash=_unknown_step(added))
    return Forecast("pid", parts, limit, reasons, "after its next step", details=_details(held, added))


def among_others(held: Held, added: int, around: Surroundings, machine: Machine) -> Forecast:
    """Judged by what all together hold of what there is: that sum is known, however the tree shares its pages."""
    own = held.component()
    counted = min(held.high_bytes, around.used_bytes)
    others = around.used_bytes - counted
    parts = (
        Component.exactly(own.name, counted, own.why),
        Component.exactly("others", others, "everything else that cannot be taken back"),
        _next_step(added),
    )
    swap_free = machine.swap_free_bytes or 0
    reasons = Reasons(
        for_crash=(*_unknown_step(added), "others may grow too, and so may it before its next step"),
        against=(f"{format_size(swap_free)} of swap are free: slower, but no crash",) if swap_free else (),
    )
    return Forecast(
        "pid",
        parts,
        around.limit,
        reasons,
        "after its next step",
        remark=("sum", addition(around.used_bytes, added, around.limit.bytes)),
        details={**_details(held, added), "others_bytes": others, "used_bytes": around.used_bytes},
    )


def addition(now: int, added: int, limit: int) -> str:
    """ "162 + 19 = 181 of 188 GB", rounded so that it adds up."""
    unit, name = (10**9, "GB") if limit >= 10**10 else (10**6, "MB")
    digits = 0 if limit >= 100 * unit else 1
    step, total = round(added / unit, digits), round((now + added) / unit, digits)
    first, second, third, fourth = (f"{x:.{digits}f}" for x in (total - step, step, total, limit / unit))
    return f"{first} + {second} = {third} of {fourth} {name}: in use now + the next step"


def tree_held(pid: int) -> Held:
    """What a process and everything it started hold now."""
    members = _members(pid)
    if not members:
        raise InputError(
            f"Process {pid} does not exist, or this user may not inspect it.",
            hint="`brim watch --match NAME` finds one.",
        )
    each = sum((member.usage for member in members), Usage())
    low = each.total_bytes
    if len(members) > 1:
        low = max(member.usage.total_bytes for member in members)
        if each.total_bytes <= _TOO_LARGE_TO_COUNT:
            counted = [proportional_usage(member.pid) for member in members]
            if all(usage is not None for usage in counted):
                true = sum((usage for usage in counted if usage is not None), Usage())
                each, low = Usage(true.anon_bytes, true.shmem_bytes, true.swap_bytes, each.file_bytes), true.total_bytes
    return Held(pid, members[0].name, len(members), each, low)


def _members(pid: int) -> list[Process]:
    if sys.platform != "linux":
        return resident_tree([pid])
    return [process for process in map(read_process, tree([pid])) if process is not None]


def surroundings(pid: int, machine: Machine, root: Path = Path("/")) -> list[Surroundings]:
    """The machine and every limited cgroup above the process, each with all that is used of it."""
    found = []
    if machine.total_bytes is not None:
        total = machine.total_bytes
        found.append(Surroundings(machine.used_bytes, Limit(total, "all of this machine's memory")))
    for group, limit, usage, reclaimable in cgroups(root, pid):
        if machine.total_bytes is None or limit < machine.total_bytes:
            found.append(Surroundings(max(usage - reclaimable, 0), Limit(limit, f"the limit of the cgroup {group}")))
    return found


def _tightest(around: list[Surroundings], added: int) -> Surroundings:
    if not around:
        raise InputError("The memory of this system is not known.", hint="Give the limit with --memory.")
    return max(around, key=lambda one: (one.used_bytes + added) / max(one.limit.bytes, 1))


def _next_step(added: int) -> Component:
    return Component.exactly("next step", added, "--adds" if added else "nothing was said about it")


def _unknown_step(added: int) -> tuple[str, ...]:
    return () if added else ("what its next step adds is not counted: give --adds, for instance 19GB",)


def _details(held: Held, added: int) -> dict[str, object]:
    return {
        "pid": held.pid,
        "process": held.name,
        "processes": held.processes,
        "anon_bytes": held.usage.anon_bytes,
        "shared_bytes": held.usage.shmem_bytes,
        "swap_bytes": held.usage.swap_bytes,
        "file_bytes": held.usage.file_bytes,
        "adds_bytes": added,
    }


# Two parts are always on a line: their error cannot be measured, so it is assumed.
_ASSUMED_SPREAD = 0.25
_ENOUGH_PAIRS = 10  # from here on single odd pairs are left out of the range
_BEND = 1.25  # how much steeper the upper half must be
_NOISE = 0.02  # of the highest peak: what two runs of the same part may differ by
_FAR = 8


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
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
        # More data does not need less memory than a run on less data has needed.
        low, high = max(low, 0.0), max(high, 0.0, float(max(run.peak_bytes for run in runs) - start))
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


def theil_sen(points: Sequence[MeasuredPoint]) -> Fit:
    """Return the median slope between all pairs, the median of the rest, and the spread of the slopes."""
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


def upper_bend(points: Sequence[MeasuredPoint], goal: float) -> float | None:
    """Bytes at `goal` if the points bend upwards: a parabola through the first, the middle and the last part, and what
    an error in each of these peaks would make of it."""
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


def _risks(runs: Sequence[MeasuredPoint], fractions: Sequence[float], goal: float, bend: float | None) -> Iterable[str]:
    if bend is not None:
        yield (
            "the points bend upwards: memory grows faster than the data, and a line is too low. "
            "The high end follows the bend; run a larger part to be sure"
        )
    if goal / fractions[-1] >= _FAR:
        yield f"the forecast reaches {goal / fractions[-1]:.0f} times beyond the largest part that was run"
    highest = max(runs, key=lambda run: run.peak_bytes)
    if highest.fraction < fractions[-1]:
        yield (
            f"the run at {_shown(highest.fraction)} needed {format_size(highest.peak_bytes)}, more than the run at "
            f"{_shown(fractions[-1])}: the high end is at least that"
        )
    if len(fractions) == 2:
        yield "two fractions are always on a line" + (
            f": ± {_ASSUMED_SPREAD:.0%} of the slope is assumed. A third one would show it" if len(runs) == 2 else ""
        )
    for run in runs:
        if run.doubt:
            yield f"the run at {_shown(run.fraction)} {run.doubt}, so its peak may be too low"


def _comforts(runs: Sequence[MeasuredPoint], fractions: Sequence[float], bend: float | None) -> Iterable[str]:
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


def _point(given: str | tuple[float | str, str | int | float]) -> MeasuredPoint:
    if not isinstance(given, str):
        return MeasuredPoint(parse_fraction(given[0]), parse_size(given[1]))
    fraction, equals, peak = given.partition("=")
    if not equals:
        raise InputError(f"{given!r} is not a point.", hint="Write it like 1/32=1.2GB.")
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
    end = run.end
    if end is None or not end.peak_bytes:
        raise InputError(f"{name} was cut off: its peak is not known.", hint="Run that part again, or leave it out.")
    doubt = ""
    if end.stopped:
        doubt = "was stopped for its memory"
    elif end.signal:
        doubt = f"died of signal {end.signal}"
    elif end.exit_code:
        doubt = f"ended with exit code {end.exit_code}"
    return MeasuredPoint(parse_fraction(run.head.raw["fraction"]), end.peak_bytes, doubt)


def _shown(fraction: float) -> str:
    near = Fraction(fraction).limit_denominator(1024)
    exact = near and abs(float(near) - fraction) < 1e-9
    return str(near) if exact else f"{fraction:.3g}"
