"""The output of benchmarks: tables, goals with their numbers, and the machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

MB, GB = 10**6, 10**9


def comma_list(*allowed: str) -> Callable[[str], str]:
    """Return an argparse type for values separated by commas that refuses unknown ones."""

    def check(text: str) -> str:
        unknown = sorted(set(text.split(",")) - {*allowed})
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown value {unknown[0]!r}, choose from {', '.join(allowed)}")
        return text

    return check


@dataclass(frozen=True, slots=True)
class Goal:
    text: str
    reached: bool
    numbers: str


@dataclass(slots=True)
class Part:
    """The results of one part: a table, the goals, and every single run for --json."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    runs: dict[str, list[dict[str, float]]] = field(default_factory=dict)


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def at_most(text: str, value: float, limit: float, unit: str) -> Goal:
    return Goal(f"{text} ≤ {limit:g}{unit}", value <= limit, f"{value:.2f}{unit}")


def at_least(text: str, value: float, limit: float, unit: str) -> Goal:
    return Goal(f"{text} ≥ {limit:g}{unit}", value >= limit, f"{value:.2f}{unit}")


def machine(folder: Path, packages: Sequence[str]) -> dict[str, str]:
    """Return a description of the machine on which the benchmark ran."""
    cpu = next((line.split(":", 1)[1].strip() for line in lines_of("/proc/cpuinfo") if "model name" in line), "unknown")
    ram = next(int(line.split()[1]) * 1024 for line in lines_of("/proc/meminfo") if line.startswith("MemTotal"))
    return {
        "CPU": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "RAM": f"{ram / GB:.1f} GB",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "kernel": os.uname().release,
        "filesystem": filesystem(folder),
        "Python": sys.version.split()[0],
        **{name: metadata.version(name) for name in packages},
    }


def filesystem(folder: Path) -> str:
    """Return the file system type of the mount that contains the folder."""
    mounts = [line.split()[1:3] for line in lines_of("/proc/self/mounts")]
    above = [
        (len(index), number, kind)
        for number, (index, kind) in enumerate(mounts)
        if folder.resolve().is_relative_to(index)
    ]
    return max(above)[2]


def lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def print_part(part: Part) -> None:
    print(f"\n### {part.title}\n")
    for cells in (part.header, ["---"] * len(part.header), *part.rows):
        print(f"| {' | '.join(cells)} |")
    for note in part.notes:
        print(f"\n{note}")
    sys.stdout.flush()


def print_goals(parts: dict[str, Part]) -> None:
    print("\n### goals\n")
    for name, part in parts.items():
        for goal in part.goals:
            print(f"- {'reached' if goal.reached else 'MISSED'}: {name}: {goal.text}: {goal.numbers}")


def print_machine(facts: dict[str, str]) -> None:
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))


def write_json(path: str | Path | None, facts: dict[str, str], parts: dict[str, Part]) -> None:
    """Write tables, goals and every single run for --json FILE, from which page.py makes docs/benchmarks/results.md."""
    if path is not None:
        records = {"machine": facts, "parts": {name: asdict(part) for name, part in parts.items()}}
        Path(path).write_text(json.dumps(records, indent=1) + "\n")
