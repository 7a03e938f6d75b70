"""Measure stop requests: do leaks get one in time, and do programs without a leak get none?

    python benchmarks/stop.py [--each 14] [--flat 60] [--live 60] [--tuning] [--only slow,leaks,large,flat,live]
                              [--json FILE]

Simulated curves go through the real guard with an injected clock, at the intervals of the real sampler. Results are
for seeds from 1000 on; the constants of memory/prediction.py and memory/thresholds.py were chosen on seeds below 100
(`--tuning` uses those).

- slow: a climb from 60 % to the kill threshold takes four leads or more; a stop request is in time if it comes a full
  lead before the kill.
- leaks: every shape; a stop request is in time if it comes at least one second before the kill.
- large: leaks in steps of 10 % of the limit and more. Below the stop threshold they look like a model that is loaded in
  two to eight shards, which must not be stopped; no goal.
- flat: programs that stay below the stop threshold; every stop request is a false alarm.
- live: real processes under `brim run`: training loops, children, growing and noisy memory, and programs that follow
  curves of the other parts (slow ones ten times faster, with a lead of 3 s). Programs that leak ignore the stop request
  and SIGTERM, so that the warning is the time between the log's entries about the stop request and about the kill.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from stop_curves import (
    LEVELLING,
    REACHING,
    STEP_S,
    Curve,
    Shape,
    blocks_above_the_stop,
    child_by_child,
    curve,
    exponential_steps,
    fast_climb,
    large_steps,
    stepped_climb,
)
from tables import (
    Goal,
    Part,
    at_least,
    at_most,
    comma_list,
    machine,
    print_goals,
    print_machine,
    print_part,
    progress,
    write_json,
)

from brim.memory.sampler import Pace
from brim.memory.thresholds import DEFAULT_LEAD_S, Guard, Level, standard_thresholds

LIMIT_BYTES = 64_000_000_000
KILL, CLIMB_FROM, SLOW_LEADS, LARGE_STEP = 0.97, 0.6, 4, 0.1
SAMPLE_COST_S = 0.002
FASTER = 10
LIVE_LIMIT_BYTES = 400_000_000
GOAL_SHARE, MOST_FALSE, ENOUGH_S = 97, 2, 1.0

_STEPPED = {
    f"steps of {step} s, {climb} s": (step, climb) for step in (0.1, 0.5, 1, 2, 3) for climb in (40, 20, 15, 10, 7, 5)
}
_IS_LARGE = {name: step / climb >= LARGE_STEP / (KILL - CLIMB_FROM) for name, (step, climb) in _STEPPED.items()}
SLOW: dict[str, Shape] = {shape.__name__: shape for shape in REACHING}
# Climbs start at 60 % and end at the kill threshold.
FAST: dict[str, Shape] = {
    **{f"smooth, {seconds} s": fast_climb(seconds) for seconds in (80, 40, 20, 10, 7, 5)},
    **{name: stepped_climb(*numbers) for name, numbers in _STEPPED.items() if not _IS_LARGE[name]},
    "8 to 20 % more every second": exponential_steps,
    "child by child": child_by_child,
}
LARGE: dict[str, Shape] = {
    **{name: stepped_climb(*numbers) for name, numbers in _STEPPED.items() if _IS_LARGE[name]},
    "a quarter of the limit per step": large_steps,
}
FLAT: dict[str, Shape] = {shape.__name__: shape for shape in (*LEVELLING, blocks_above_the_stop)}
SHAPES = {**SLOW, **FAST, **LARGE, **FLAT}


class Outcome(NamedTuple):
    """The guard's decision on one curve. `warning_s` is the time from the stop request to the kill threshold."""

    seed: int
    climb_s: float | None
    stopped_s: float | None
    warning_s: float
    announced: bool
    top: float


def simulate(name: str, seed: int) -> Outcome:
    """Follow one curve until a stop request or a kill."""
    followed = curve(SHAPES[name], seed, name)
    guard = Guard(LIMIT_BYTES, standard_thresholds(Level(0.8), Level(0.9), Level(KILL)))
    pace, now, announced, stopped_s = Pace(), 0.0, False, None
    while now < followed.seconds and stopped_s is None:
        used = int(followed.at(now) * LIMIT_BYTES)
        kinds = [alarm.kind for alarm in guard.observe(now, used)]
        announced = announced or "exhaustion" in kinds
        if "kill" in kinds:
            break
        if "stop" in kinds:
            stopped_s = now
        now += pace.pause_s(now, used, LIMIT_BYTES, SAMPLE_COST_S)
    kill_s = followed.first_at(KILL)
    warning_s = 0.0 if stopped_s is None or kill_s is None else max(kill_s - stopped_s, 0.0)
    return Outcome(seed, followed.climb_s(CLIMB_FROM, KILL), stopped_s, warning_s, announced, max(followed.values))


def simulate_all(shapes: dict[str, Shape], seeds: range) -> dict[str, list[Outcome]]:
    names = [name for name in shapes for _ in seeds]
    with ProcessPoolExecutor() as pool:
        outcomes = list(pool.map(simulate, names, [seed for _ in shapes for seed in seeds], chunksize=4))
    return {name: [o for n, o in zip(names, outcomes, strict=True) if n == name] for name in shapes}


def leak_part(title: str, actual: dict[str, list[Outcome]], enough_s: float, least_count: int) -> Part:
    part = Part(title, ["shape", "in time", "median", "least (s before the kill)"])
    total = in_time = 0
    for name, outcomes in actual.items():
        warnings = sorted(outcome.warning_s for outcome in outcomes)
        good = sum(warning >= enough_s for warning in warnings)
        total, in_time = total + len(warnings), in_time + good
        part.runs[name] = [{"seed": outcome.seed, "warning_s": outcome.warning_s} for outcome in outcomes]
        if warnings:
            median, least = warnings[len(warnings) // 2], warnings[0]
            part.rows.append([name, f"{good}/{len(warnings)}", f"{median:.1f}", f"{least:.1f}"])
    part.rows.append(["all", f"{in_time}/{total}", "", ""])
    if least_count:
        part.goals.append(at_least(title, 100 * in_time / total, GOAL_SHARE, " %"))
        part.goals.append(Goal(f"of at least {least_count} curves", total >= least_count, str(total)))
    return part


def slow(each: int, first: int) -> Part:
    actual = simulate_all(SLOW, range(first, first + 2 * each))
    least_s = SLOW_LEADS * DEFAULT_LEAD_S
    selection = {name: [o for o in outcomes if (o.climb_s or 0.0) >= least_s] for name, outcomes in actual.items()}
    return leak_part("Slow leaks asked to stop a full lead before the kill", selection, DEFAULT_LEAD_S, 60)


def leaks(each: int, first: int) -> Part:
    actual = simulate_all({**SLOW, **FAST}, range(first, first + each))
    return leak_part("Leaks asked to stop at least 1 s before the kill", actual, ENOUGH_S, 250)


def large(each: int, first: int) -> Part:
    actual = simulate_all(LARGE, range(first, first + each))
    return leak_part("Leaks in large steps asked to stop at least 1 s before the kill", actual, ENOUGH_S, 0)


def flat(each: int, first: int) -> Part:
    actual = simulate_all(FLAT, range(first, first + each))
    above = actual.pop(blocks_above_the_stop.__name__)
    part = Part("Programs below the stop threshold: false alarms", ["shape", "stop requests", '"memory runs out"'])
    wrong, worst = [], 0.0
    for name, outcomes in actual.items():
        stopped = [o for o in outcomes if o.stopped_s is not None]
        announced = sum(o.announced for o in outcomes)
        worst = max(worst, len(stopped) / len(outcomes))
        wrong += [f"{name} seed {o.seed} (top {100 * o.top:.0f} %, at {o.stopped_s:.0f} s)" for o in stopped]
        part.rows.append([name, f"{len(stopped)}/{len(outcomes)}", f"{announced}/{len(outcomes)}"])
        part.runs[name] = [{"seed": o.seed, "stopped_s": o.stopped_s or 0.0} for o in stopped]
    total = each * len(actual)
    part.rows.append(["all", f"{len(wrong)}/{total}", ""])
    stopped_above = sum(o.stopped_s is not None for o in above)
    part.notes.append(f"false alarms: {'; '.join(wrong) or 'none'}")
    part.notes.append(f"blocks that end at 90 to 95 %, above the stop threshold: {stopped_above} of {each} stopped")
    part.goals.append(at_most("false alarms, all shapes", 100 * len(wrong) / total, MOST_FALSE, " %"))
    part.goals.append(at_most("false alarms, worst shape", 100 * worst, MOST_FALSE, " %"))
    part.goals.append(Goal("of at least 250 curves", total >= 250, str(total)))
    return part


_STUBBORN = """
import json, mmap, os, random, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
MB, keep = 1_000_000, []
"""
_LOOP = "while True: keep.append(bytearray(b'x') * int({0})); time.sleep({1})"
# name: (program, limit in MB, whether it leaks in unpredictable steps, whether it leaks)
PROGRAMS = {
    "loop: 20 MB per 1 s": (_LOOP.format("20 * MB", 1), 600, False, True),
    "loop: 12 MB per 0.5 s": (_LOOP.format("12 * MB", 0.5), 600, False, True),
    "loop: 15 % more per 1 s": (
        "size = 25.0 * MB\nwhile True: keep.append(bytearray(b'x') * int(size * 0.15)); size *= 1.15; time.sleep(1)",
        600, False, True,
    ),
    "a child of 12 MB per 0.7 s": (
        "CHILD = 'import signal, time; signal.signal(15, signal.SIG_IGN); x = bytes([1]) * 7_000_000; time.sleep(99)'\n"
        "while True: subprocess.Popen([sys.executable, '-S', '-c', CHILD]); time.sleep(0.7)",
        600, False, True,
    ),
    "smooth: 30 MB/s": (_LOOP.format("0.6 * MB", 0.02), 600, False, True),
    "/dev/shm: 30 MB/s": (
        "with open(f'/dev/shm/brim-bench-{os.getpid()}', 'wb') as out:\n"
        "  os.unlink(out.name)\n"
        "  while True: out.write(b'x' * MB); out.flush(); time.sleep(1 / 30)",
        600, False, True,
    ),
    "loop: 150 MB per 3 s": (_LOOP.format("150 * MB", 3), 600, True, True),
    "noise: 300 MB and 0 to 200 MB": (
        "random.seed(int(sys.argv[2])); base, end = bytearray(b'x') * (300 * MB), time.monotonic() + 45\n"
        "while time.monotonic() < end:\n"
        "  keep = None; keep = bytearray(b'x') * random.randrange(200 * MB); time.sleep(random.random() * 1.5)",
        600, False, False,
    ),
    "model: 6 blocks to 85 %": (
        "for block in range(6): keep.append(bytearray(b'x') * (83 * MB)); time.sleep(1.5)\ntime.sleep(15)",
        600, False, False,
    ),
}  # fmt: skip
_FOLLOW = """
values, limit, faster, step = json.loads(open(sys.argv[1]).read())
block = mmap.mmap(-1, int(1.2 * limit), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
base = int(open("/proc/self/status").read().partition("RssAnon:")[2].split()[0]) * 1024
held, page, begin = 0, b"x" * 4096, time.monotonic()
while (number := int((time.monotonic() - begin) * faster / step)) < len(values):
    wanted = max(int(values[number] * limit) - base, 0) // 4096 * 4096
    while held < wanted:
        block[held : held + 4096] = page
        held += 4096
    if wanted < held:
        block.madvise(mmap.MADV_DONTNEED, wanted, held - wanted)
        held = wanted
    time.sleep(0.01)
"""


class LiveRun(NamedTuple):
    name: str
    seed: int
    leaks: bool
    counts: bool  # for the goal: excludes leaks in large steps
    program: str
    limit_bytes: int = LIVE_LIMIT_BYTES
    followed: Curve | None = None
    faster: float = 1.0


def live_runs(count: int, first: int) -> list[LiveRun]:
    """Return every program twice; the rest are a fast leak, a flat program and a slow leak in turn."""
    selection = [
        LiveRun(name, seed, leaks, not is_large, text, limit * 1_000_000)
        for seed in (first, first + 1)
        for name, (text, limit, is_large, leaks) in PROGRAMS.items()
    ]
    quiet = list(FLAT)[: len(LEVELLING)]
    fast, number = list(FAST), 0
    while len(selection) < count:
        seed = first + number
        name = fast[7 * number % len(fast)]
        selection.append(LiveRun(name, seed, True, True, _FOLLOW, followed=curve(FAST[name], seed, name)))
        name = quiet[number % len(quiet)]
        selection.append(
            LiveRun(name, seed, False, True, _FOLLOW, LIVE_LIMIT_BYTES, curve(FLAT[name], seed, name), FASTER)
        )
        name = list(SLOW)[number % len(SLOW)]
        slow_curve = curve(SLOW[name], seed, name)
        if slow_curve.seconds < 900 and (slow_curve.climb_s(CLIMB_FROM, KILL) or 0.0) >= SLOW_LEADS * DEFAULT_LEAD_S:
            selection.append(LiveRun(name, seed, True, True, _FOLLOW, LIVE_LIMIT_BYTES, slow_curve, FASTER))
        number += 1
    return selection[:count]


def run_live(run: LiveRun) -> tuple[str, float | None]:
    """Return the outcome, and the seconds from the stop request to the kill."""
    with tempfile.TemporaryDirectory() as folder:
        orders, stop, log = (Path(folder) / name for name in ("curve.json", "stop", "log.jsonl"))
        values = [] if run.followed is None else run.followed.values
        orders.write_text(json.dumps([values, run.limit_bytes, run.faster, STEP_S]))
        command = [sys.executable, "-m", "brim", "run", "-q", "--no-cgroup", "--memory", str(run.limit_bytes)]
        command += ["--stop-lead", str(DEFAULT_LEAD_S / run.faster), "--grace", "300", "--stop-file", str(stop)]
        command += ["--log", str(log), "--", sys.executable, "-c", _STUBBORN + run.program, str(orders), str(run.seed)]
        subprocess.run(command, stderr=subprocess.DEVNULL, timeout=1200)
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    requested, killed = (next((e["t"] for e in entries if e.get("kind") == kind), None) for kind in ("stop", "kill"))
    if killed is None:
        return ("finished" if requested is None else "asked"), None
    return ("killed" if requested is None else "asked"), max(killed - (requested or killed), 0.0)


def live(count: int, first: int) -> Part:
    title = f"Live: {count} programs of up to 600 MB"
    part = Part(title, ["program", "seed", "outcome", "seconds from the stop request to the kill", ""])
    in_time = leaking = false_alarms = quiet = 0
    runs = live_runs(count, first)
    with ThreadPoolExecutor(3) as pool:
        for run, (outcome, warning_s) in zip(runs, pool.map(run_live, runs), strict=True):
            good = (warning_s or 0.0) >= ENOUGH_S if run.leaks else outcome == "finished"
            if run.counts:
                leaking, in_time = leaking + run.leaks, in_time + (run.leaks and good)
            quiet, false_alarms = quiet + (not run.leaks), false_alarms + (not run.leaks and not good)
            mark = "" if good else "late" if run.counts else "large steps"
            warning = "" if warning_s is None else f"{warning_s:.1f}"
            part.rows.append([run.name, str(run.seed), outcome, warning, mark])
            part.runs[f"{run.name} {run.seed}"] = [{"good": good, "warning_s": warning_s or 0.0}]
            progress(" ".join(part.rows[-1]))
    part.notes.append(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the end")
    part.goals.append(at_least("live leaks asked 1 s before", 100 * in_time / max(leaking, 1), GOAL_SHARE, " %"))
    part.goals.append(Goal("live false alarms", false_alarms == 0, f"{false_alarms} of {quiet}"))
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure stop requests: in time, and false alarms.")
    parser.add_argument("--each", type=int, default=14, help="curves per shape that leaks")
    parser.add_argument("--flat", type=int, default=60, help="curves per shape that does not leak")
    parser.add_argument("--live", type=int, default=60, help="live processes")
    parser.add_argument("--tuning", action="store_true", help="use the seeds that the constants were chosen on")
    names = ("slow", "leaks", "large", "flat", "live")
    parser.add_argument("--only", type=comma_list(*names), default=",".join(names))
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    first = 0 if arguments.tuning else 1000
    facts = machine(Path(tempfile.gettempdir()), [])
    counts: dict[str, tuple[Callable[[int, int], Part], int]] = {
        "slow": (slow, arguments.each),
        "leaks": (leaks, arguments.each),
        "large": (large, arguments.each),
        "flat": (flat, arguments.flat),
        "live": (live, arguments.live),
    }
    parts: dict[str, Part] = {}
    for name in arguments.only.split(","):
        make, count = counts[name]
        parts[name] = make(count, first)
        print_part(parts[name])
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


if __name__ == "__main__":
    main()
