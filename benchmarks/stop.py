"""Does the stop come in time? Generated curves through the guard, and live processes that follow some of them.

    python benchmarks/stop.py [--each 14] [--live 20] [--tuning] [--only reaching,…] [--json FILE]

Figures are for seeds from 1000 on; the constants of memory/guard.py and memory/guard.py were chosen on seeds
below 100 (`--tuning` runs those). A curve counts among those that reach the limit if its last climb from 60 % to the
kill line takes three leads or more; it is in time if the stop is said a full lead before the kill line. Readings are
taken at the pace of the real sampler. Live: a process follows a curve under `brim run --lead 3`, ten times faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stop_curves import (
    LEVELLING,
    REACHING,
    Curve,
    Shape,
    child_by_child,
    curve,
    exponential_steps,
    fast_climb,
    stepped_climb,
)
from tables import Goal, Part, at_least, at_most, machine, print_goals, print_machine, print_part, progress, write_json

from brim.memory.guard import DEFAULT_LEAD_S, Guard, Level, standard_lines
from brim.memory.sampler import Pace

LIMIT_BYTES = 64_000_000_000
KILL, CLIMB_FROM, CLIMB_LEADS = 0.97, 0.6, 3
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


def first_word(followed: Curve, lead_s: float = DEFAULT_LEAD_S) -> tuple[str, float] | None:
    """The first stop or kill that the guard says, and when."""
    guard = Guard(LIMIT_BYTES, standard_lines(Level(0.8), Level(0.9), Level(KILL)), lead_s=lead_s)
    pace, now = Pace(), 0.0
    while now < followed.seconds:
        used = int(followed.at(now) * LIMIT_BYTES)
        for alarm in guard.observe(now, used):
            if alarm.kind in ("stop", "kill"):
                return alarm.kind, now
        now += pace.pause_s(now, used, LIMIT_BYTES, SAMPLE_COST_S)
    return None


def counted(shape: Shape, seeds: Iterable[int]) -> list[Curve]:
    """Those that climb slowly enough to be counted."""
    curves = (curve(shape, seed) for seed in seeds)
    return [c for c in curves if (c.climb_s(CLIMB_FROM, KILL) or 0.0) >= CLIMB_LEADS * DEFAULT_LEAD_S]


def reaching(seeds: range) -> Part:
    title = f"Reach the limit (60 % to the kill line in {CLIMB_LEADS} leads or more): stopped a full lead before it"
    part = Part(title, ["kind", "in time", "earliest", "median", "latest (s before the kill line)"])
    misses, all_curves, in_time = [], 0, 0
    for shape in REACHING:
        curves, early = counted(shape, seeds), []
        for followed in curves:
            said, kill_s = first_word(followed), followed.first_at(KILL)
            assert kill_s is not None
            early.append(kill_s - said[1] if said else 0.0)
            if early[-1] < DEFAULT_LEAD_S:
                misses.append(f"{followed.kind} seed {followed.seed}: {early[-1]:.0f} s before")
        part.runs[shape.__name__] = [{"seed": c.seed, "early_s": s} for c, s in zip(curves, early, strict=True)]
        good, early = sum(one >= DEFAULT_LEAD_S for one in early), sorted(early)
        all_curves, in_time = all_curves + len(curves), in_time + good
        ends = [f"{seconds:.0f}" for seconds in (early[-1], early[len(early) // 2], early[0])]
        part.rows.append([shape.__name__, f"{good}/{len(curves)}", *ends])
    part.rows.append(["all", f"{in_time}/{all_curves}", "", "", ""])
    part.notes.append(f"misses: {'; '.join(misses) or 'none'}")
    part.goals.append(at_least("stopped a full lead before", 100 * in_time / all_curves, 97, " %"))
    part.goals.append(Goal("of at least 100 curves", all_curves >= 100, str(all_curves)))
    return part


def levelling(seeds: range) -> Part:
    part = Part("Level off below the stop line: stopped all the same", ["kind", "stopped"])
    wrong, all_curves = [], 0
    for shape in LEVELLING:
        curves = [curve(shape, seed) for seed in seeds]
        stopped = [(c, said) for c in curves if (said := first_word(c)) is not None]
        all_curves += len(curves)
        wrong += [
            f"{c.kind} seed {c.seed} (top {100 * max(c.values):.0f} %, at {said[1]:.0f} s)" for c, said in stopped
        ]
        part.rows.append([shape.__name__, f"{len(stopped)}/{len(curves)}"])
        part.runs[shape.__name__] = [{"seed": c.seed, "stopped_s": said[1]} for c, said in stopped]
    part.rows.append(["all", f"{len(wrong)}/{all_curves}"])
    part.notes.append(f"stopped without need: {'; '.join(wrong) or 'none'}")
    part.goals.append(at_most("stopped", 100 * len(wrong) / all_curves, 2, " %"))
    part.goals.append(Goal("of at least 100 curves", all_curves >= 100, str(all_curves)))
    return part


def fast(seeds: range) -> Part:
    part = Part("Faster climbs (60 % to the limit): the stop before the kill line", ["climb", "median", "latest"])
    for seconds in (80, 60, 40, 20, 10, 5, 2, 1):
        early = []
        for seed in seeds:
            followed = curve(fast_climb(seconds), seed)
            said, kill_s = first_word(followed), followed.first_at(KILL)
            assert kill_s is not None
            early.append(kill_s - said[1] if said and said[0] == "stop" else 0.0)
        part.runs[f"{seconds} s"] = [{"early_s": one} for one in early]
        early.sort()
        part.rows.append([f"{seconds} s", f"{early[len(early) // 2]:.1f} s", f"{early[0]:.1f} s"])
    return part


def steps(seeds: range) -> Part:
    """Leaks that come in steps, as those of training loops do."""
    title = "Leaks in steps (60 % to the kill line): asked to stop at least 1 s before the kill line"
    part = Part(title, ["shape", "asked", "median", "latest (s before)"])
    shapes = {
        f"{step} s steps, {climb} s": stepped_climb(step, climb) for step in (0.5, 1, 2) for climb in (10, 20, 40)
    }
    shapes |= {"8 to 20 % more every second": exponential_steps, "child by child": child_by_child}
    asked = total = 0
    for name, shape in shapes.items():
        early = []
        for seed in seeds:
            followed = curve(shape, seed)
            said, kill_s = first_word(followed), followed.first_at(KILL)
            assert kill_s is not None
            early.append(kill_s - said[1] if said and said[0] == "stop" else 0.0)
        part.runs[name] = [{"early_s": one} for one in early]
        good, early = sum(one >= 1 for one in early), sorted(early)
        asked, total = asked + good, total + len(early)
        part.rows.append([name, f"{good}/{len(early)}", f"{early[len(early) // 2]:.1f}", f"{early[0]:.1f}"])
    part.goals.append(at_least("asked a second before", 100 * asked / total, 97, " %"))
    return part


def live(count: int, first_seed: int) -> Part:
    """Half of them reach the limit, half do not."""
    chosen: list[tuple[Curve, bool]] = []
    seed = first_seed
    while len(chosen) < count:
        for shapes, reaches in ((REACHING, True), (LEVELLING, False)):
            followed = curve(shapes[seed % len(shapes)], seed)
            climb_s = followed.climb_s(CLIMB_FROM, KILL) or 0.0
            if followed.seconds < 900 and (not reaches or climb_s >= CLIMB_LEADS * DEFAULT_LEAD_S):
                chosen.append((followed, reaches))
        seed += 1
    lead_s = DEFAULT_LEAD_S / FASTER
    title = f"Live: {count} processes of up to 400 MB, {FASTER} times as fast, lead {lead_s:g} s"
    part = Part(title, ["", "kind", "seed", "ended", "the stop before the kill line"])
    good = 0
    with ThreadPoolExecutor(4) as pool:
        for (followed, reaches), (ended, early) in zip(chosen, pool.map(follow, [c for c, _ in chosen]), strict=True):
            fine = ended == "stopped" and early is not None and early >= 0 if reaches else ended == "ran on"
            good += fine
            when = "" if early is None else f"{early + lead_s:.1f} s"
            part.rows.append(["ok" if fine else "MISS", followed.kind, str(followed.seed), ended, when])
            part.runs[f"{followed.kind} {followed.seed}"] = [{"fine": fine, "early_s": early or 0.0}]
            progress(" ".join(part.rows[-1]))
    part.notes.append(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the end")
    part.goals.append(Goal("live processes as they should", good == count, f"{good} of {count}"))
    return part


def follow(followed: Curve) -> tuple[str, float | None]:
    """How it ended, and how much earlier than a lead before the kill line the stop was said."""
    with tempfile.TemporaryDirectory() as folder:
        orders, stop, log = (Path(folder) / name for name in ("curve.json", "stop", "log.jsonl"))
        facts = [followed.values, LIVE_LIMIT_BYTES, str(stop), FASTER, 0.25]
        orders.write_text(json.dumps(facts))
        lead_s = DEFAULT_LEAD_S / FASTER
        command = [sys.executable, "-m", "brim", "run", "-q", "--no-cgroup", "--memory", str(LIVE_LIMIT_BYTES)]
        command += ["--lead", str(lead_s), "--stop-file", str(stop), "--log", str(log), "--", sys.executable, "-c"]
        begin = time.time()
        subprocess.run([*command, FOLLOW, str(orders)], stderr=subprocess.DEVNULL, timeout=600)
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    begin = next((e["t"] for e in entries if e.get("kind") == "start"), begin)
    end = next(e for e in entries if e["type"] == "end")
    said = next((e["t"] for e in entries if e.get("kind") == "stop"), None)
    kill_s = followed.first_at(KILL)
    early = None if said is None or kill_s is None else kill_s / FASTER - (said - begin) - lead_s
    return {"stop": "stopped", "kill": "killed", None: "ran on"}.get(end["stopped"], str(end["stopped"])), early


def main() -> None:
    parser = argparse.ArgumentParser(description="Does the stop come in time?")
    parser.add_argument("--each", type=int, default=14, help="curves of each kind")
    parser.add_argument("--live", type=int, default=20, help="live processes; 0 for none")
    parser.add_argument("--tuning", action="store_true", help="the seeds that the constants were chosen on")
    parser.add_argument("--only", default="reaching,levelling,fast,steps,live")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    first = 0 if arguments.tuning else 1000
    seeds, chosen = range(first, first + arguments.each), arguments.only.split(",")
    facts = machine(Path(tempfile.gettempdir()), [])
    parts: dict[str, Part] = {}
    for name, make in (("reaching", reaching), ("levelling", levelling), ("fast", fast), ("steps", steps)):
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
