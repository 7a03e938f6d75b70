"""Measure stop requests: do leaks get one in time, and do programs without a leak get none?

    python benchmarks/stop.py [--each 14] [--live 20] [--tuning] [--only slow,leaks,large,flat,live] [--json FILE]

Simulated curves go through the real guard with an injected clock, at the intervals of the real sampler. Results are
for seeds from 1000 on; the constants of memory/prediction.py and memory/thresholds.py were chosen on seeds below 100
(`--tuning` runs those).

- slow: a climb from 60 % to the kill threshold takes four leads or more; a stop request is in time if it comes a full
  lead before the kill.
- leaks: every shape; a stop request is in time if it comes at least one second before the kill.
- large: leaks in steps of 10 % of the limit and more. Until they reach the stop threshold they cannot be told from a
  model that is loaded in two to eight shards, which must not be stopped; no goal.
- flat: programs that stay below the stop threshold; every stop request is a false alarm.
- live: real processes under `brim run`, which follow curves of the other parts. Slow curves run ten times faster, with
  a lead of 3 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stop_curves import (
    LEVELLING,
    REACHING,
    Curve,
    Shape,
    blocks_above_the_stop,
    blocks_then_flat,
    child_by_child,
    curve,
    exponential_steps,
    fast_climb,
    flat_noise_50_to_85,
    large_steps,
    ramp_to_below_the_stop,
    stepped_climb,
)
from tables import Goal, Part, at_least, at_most, machine, print_goals, print_machine, print_part, progress, write_json

from brim.memory.sampler import Pace
from brim.memory.thresholds import DEFAULT_LEAD_S, Guard, Level, standard_thresholds

LIMIT_BYTES = 64_000_000_000
KILL, CLIMB_FROM, SLOW_LEADS, LARGE_STEP = 0.97, 0.6, 4, 0.1
SAMPLE_COST_S = 0.002
FASTER = 10
LIVE_LIMIT_BYTES = 400_000_000

FOLLOW = """
import json, mmap, os, sys, time
values, limit, stop, faster, step = json.loads(open(sys.argv[1]).read())
block = mmap.mmap(-1, int(1.2 * limit), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
base = int(open("/proc/self/status").read().partition("RssAnon:")[2].split()[0]) * 1024
held, page, begin = 0, b"x" * 4096, time.monotonic()
while not os.path.exists(stop):
    number = int((time.monotonic() - begin) * faster / step)
    if number >= len(values):
        break
    wanted = max(int(values[number] * limit) - base, 0) // 4096 * 4096
    while held < wanted:
        block[held : held + 4096] = page
        held += 4096
    if wanted < held:
        block.madvise(mmap.MADV_DONTNEED, wanted, held - wanted)
        held = wanted
    time.sleep(0.01)
"""


def leak_shapes() -> dict[str, Shape]:
    """Return every shape of growth that reaches the limit, by name. Climbs are from 60 % to the kill threshold."""
    smooth = {f"smooth, {seconds} s": fast_climb(seconds) for seconds in (80, 40, 20, 10, 7, 5)}
    steps = {
        f"steps of {step} s, {climb} s": stepped_climb(step, climb)
        for step in (0.5, 1, 2)
        for climb in (40, 20, 15, 10, 7, 5)
        if step / climb < LARGE_STEP / (KILL - CLIMB_FROM)
    }
    others = {"8 to 20 % more every second": exponential_steps, "child by child": child_by_child}
    return {shape.__name__: shape for shape in REACHING} | smooth | steps | others


def large_step_shapes() -> dict[str, Shape]:
    shapes = {f"steps of 2 s, {climb} s": stepped_climb(2, climb) for climb in (7, 5)}
    return {**shapes, "a quarter of the limit per step": large_steps}


def first_alarm(followed: Curve, kinds: tuple[str, ...] = ("stop", "kill")) -> tuple[str, float] | None:
    """Return kind and time of the first alarm of one of the kinds."""
    guard = Guard(LIMIT_BYTES, standard_thresholds(Level(0.8), Level(0.9), Level(KILL)))
    pace, now = Pace(), 0.0
    while now < followed.seconds:
        used = int(followed.at(now) * LIMIT_BYTES)
        for alarm in guard.observe(now, used):
            if alarm.kind in kinds:
                return alarm.kind, now
        now += pace.pause_s(now, used, LIMIT_BYTES, SAMPLE_COST_S)
    return None


def warning_s(followed: Curve) -> float:
    """Return the seconds from the stop request to the kill threshold; 0 if there was none."""
    alarm, kill_s = first_alarm(followed), followed.first_at(KILL)
    assert kill_s is not None
    return max(kill_s - alarm[1], 0.0) if alarm and alarm[0] == "stop" else 0.0


def measure_leaks(title: str, shapes: dict[str, list[Curve]], enough_s: float, at_least_count: int) -> Part:
    part = Part(title, ["shape", "in time", "median", "least (s before the kill)"])
    total = in_time = 0
    for name, curves in shapes.items():
        warnings = sorted(map(warning_s, curves))
        good = sum(one >= enough_s for one in warnings)
        total, in_time = total + len(warnings), in_time + good
        part.runs[name] = [{"warning_s": one} for one in warnings]
        if warnings:
            median, least = warnings[len(warnings) // 2], warnings[0]
            part.rows.append([name, f"{good}/{len(warnings)}", f"{median:.1f}", f"{least:.1f}"])
    part.rows.append(["all", f"{in_time}/{total}", "", ""])
    if at_least_count:
        part.goals.append(at_least(title, 100 * in_time / total, 97, " %"))
        part.goals.append(Goal(f"of at least {at_least_count} curves", total >= at_least_count, str(total)))
    return part


def slow(seeds: range) -> Part:
    curves = {shape.__name__: [curve(shape, seed) for seed in seeds] for shape in REACHING}
    least_s = SLOW_LEADS * DEFAULT_LEAD_S
    chosen = {n: [c for c in cs if (c.climb_s(CLIMB_FROM, KILL) or 0.0) >= least_s] for n, cs in curves.items()}
    return measure_leaks("Slow leaks asked to stop a full lead before the kill", chosen, DEFAULT_LEAD_S, 60)


def leaks(seeds: range) -> Part:
    curves = {name: [curve(shape, seed, name) for seed in seeds] for name, shape in leak_shapes().items()}
    return measure_leaks("Leaks asked to stop at least 1 s before the kill", curves, 1.0, 250)


def large(seeds: range) -> Part:
    curves = {name: [curve(shape, seed, name) for seed in seeds] for name, shape in large_step_shapes().items()}
    return measure_leaks("Leaks in large steps asked to stop at least 1 s before the kill", curves, 1.0, 0)


def flat(seeds: range) -> Part:
    title = "Programs below the stop threshold: false alarms"
    part = Part(title, ["shape", "stop requests", '"memory runs out"'])
    wrong, total, worst = [], 0, 0.0
    for shape in LEVELLING:
        curves = [curve(shape, seed) for seed in seeds]
        stopped = [(c, alarm) for c in curves if (alarm := first_alarm(c)) is not None]
        announced = sum(first_alarm(c, ("exhaustion",)) is not None for c in curves)
        total, worst = total + len(curves), max(worst, len(stopped) / len(curves))
        wrong += [f"{c.kind} seed {c.seed} (top {100 * max(c.values):.0f} %, at {at:.0f} s)" for c, (_, at) in stopped]
        part.rows.append([shape.__name__, f"{len(stopped)}/{len(curves)}", f"{announced}/{len(curves)}"])
        part.runs[shape.__name__] = [{"seed": c.seed, "stopped_s": alarm[1]} for c, alarm in stopped]
    part.rows.append(["all", f"{len(wrong)}/{total}", ""])
    above = sum(first_alarm(curve(blocks_above_the_stop, seed)) is not None for seed in seeds)
    part.notes.append(f"false alarms: {'; '.join(wrong) or 'none'}")
    part.notes.append(f"blocks that end at 90 to 95 %, above the stop threshold: {above} of {len(seeds)} stopped")
    part.goals.append(at_most("false alarms, all shapes", 100 * len(wrong) / total, 2, " %"))
    part.goals.append(at_most("false alarms, worst shape", 100 * worst, 2, " %"))
    part.goals.append(Goal("of at least 250 curves", total >= 250, str(total)))
    return part


def live_runs(count: int, first_seed: int) -> list[tuple[str, Curve, bool, float]]:
    """Return name, curve, whether it leaks, and speed. Every third is a slow leak, a fast leak, a flat program."""
    fast = {n: s for n, s in leak_shapes().items() if n not in {shape.__name__ for shape in REACHING}}
    quiet: list[Shape] = [blocks_then_flat, ramp_to_below_the_stop, flat_noise_50_to_85, *LEVELLING]
    chosen: list[tuple[str, Curve, bool, float]] = []
    seed = first_seed
    while len(chosen) < count:
        name = list(fast)[(seed - first_seed) % len(fast)]
        chosen.append((name, curve(fast[name], seed, name), True, 1.0))
        followed = curve(quiet[(seed - first_seed) % len(quiet)], seed)
        chosen.append((followed.kind, followed, False, FASTER))
        followed = curve(REACHING[seed % len(REACHING)], seed)
        if followed.seconds < 900 and (followed.climb_s(CLIMB_FROM, KILL) or 0.0) >= SLOW_LEADS * DEFAULT_LEAD_S:
            chosen.append((followed.kind, followed, True, FASTER))
        seed += 1
    return chosen[:count]


def live(count: int, first_seed: int) -> Part:
    part = Part(
        f"Live: {count} programs of up to 400 MB", ["program", "seed", "outcome", "warning before the kill", ""]
    )
    in_time = leaking = alarms = 0
    runs = live_runs(count, first_seed)
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda run: follow(run[1], run[3]), runs)
        for (name, followed, leaks_memory, _), (outcome, warning) in zip(runs, results, strict=True):
            leaking += leaks_memory
            in_time += leaks_memory and outcome == "stopped" and (warning or 0.0) >= 1
            alarms += not leaks_memory and outcome != "finished"
            good = (outcome == "stopped" and (warning or 0.0) >= 1) if leaks_memory else outcome == "finished"
            when = "" if warning is None else f"{warning:.1f} s"
            part.rows.append([name, str(followed.seed), outcome, when, "" if good else "MISS"])
            part.runs[f"{name} {followed.seed}"] = [{"good": good, "warning_s": warning or 0.0}]
            progress(" ".join(part.rows[-1]))
    part.notes.append(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the end")
    part.goals.append(at_least("live leaks asked 1 s before", 100 * in_time / max(leaking, 1), 97, " %"))
    part.goals.append(Goal("live false alarms", alarms == 0, f"{alarms} of {count - leaking}"))
    return part


def follow(followed: Curve, faster: float) -> tuple[str, float | None]:
    """Run a process that follows a curve. Return how it ended, and the seconds from the stop request to the kill."""
    with tempfile.TemporaryDirectory() as folder:
        orders, stop, log = (Path(folder) / name for name in ("curve.json", "stop", "log.jsonl"))
        orders.write_text(json.dumps([followed.values, LIVE_LIMIT_BYTES, str(stop), faster, 0.25]))
        lead_s = DEFAULT_LEAD_S / faster
        command = [sys.executable, "-m", "brim", "run", "-q", "--no-cgroup", "--memory", str(LIVE_LIMIT_BYTES)]
        command += ["--lead", str(lead_s), "--stop-file", str(stop), "--log", str(log), "--", sys.executable, "-c"]
        begin = time.time()
        subprocess.run([*command, FOLLOW, str(orders)], stderr=subprocess.DEVNULL, timeout=1200)
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    begin = next((e["t"] for e in entries if e.get("kind") == "start"), begin)
    end = next(e for e in entries if e["type"] == "end")
    asked = next((e["t"] for e in entries if e.get("kind") == "stop"), None)
    kill_s = followed.first_at(KILL)
    warning = None if asked is None or kill_s is None else kill_s / faster - (asked - begin)
    return {"stop": "stopped", "kill": "killed", None: "finished"}.get(end["stopped"], str(end["stopped"])), warning


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure stop requests: in time, and false alarms.")
    parser.add_argument("--each", type=int, default=14, help="curves per shape")
    parser.add_argument("--live", type=int, default=20, help="live processes; 0 for none")
    parser.add_argument("--tuning", action="store_true", help="use the seeds that the constants were chosen on")
    parser.add_argument("--only", default="slow,leaks,large,flat,live")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    first = 0 if arguments.tuning else 1000
    seeds, chosen = range(first, first + arguments.each), arguments.only.split(",")
    facts = machine(Path(tempfile.gettempdir()), [])
    parts: dict[str, Part] = {}
    simulated: dict[str, Callable[[range], Part]] = {"slow": slow, "leaks": leaks, "large": large, "flat": flat}
    for name, make in simulated.items():
        if name in chosen:
            parts[name] = make(seeds)
            print_part(parts[name])
    if arguments.live and "live" in chosen:
        parts["live"] = live(arguments.live, first)
        print_part(parts["live"])
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


if __name__ == "__main__":
    main()
