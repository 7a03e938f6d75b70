"""What an experiment has seen, and how it is shown: a table of steps, a chart, two sentences.

It is also written down as a log, its parts one after the other, so that it can have a report.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from brim.memory.limit import watch_limit
from brim.memory.meter import Usage, boot_id, machine_facts, versions
from brim.monitor.log_writer import LogWriter
from brim.records import dataclass
from brim.sizes import format_size

_WIDTH, _HEIGHT = 56, 6
_SAMPLES_TOLD = 200
_HELD, _FILES = "█", "░"


@dataclass(frozen=True, slots=True)
class ExperimentStep:
    """A moment that the child has named."""

    name: str
    seconds: float
    usage: Usage
    peak_bytes: int  # the most that could not be taken back, since the step before
    machine_bytes: int

    @property
    def rss_bytes(self) -> int:
        return self.usage.anon_bytes + self.usage.shmem_bytes + self.usage.file_bytes

    @property
    def percent(self) -> float:
        return 100 * self.rss_bytes / self.machine_bytes

    def facts(self) -> dict[str, Any]:
        return {
            "step": self.name,
            "seconds": round(self.seconds, 3),
            "rss_bytes": self.rss_bytes,
            **asdict(self.usage),
            "peak_bytes": self.peak_bytes,
            "percent_of_machine": round(self.percent, 2),
        }


@dataclass(frozen=True, slots=True)
class LabSample:
    """A moment between steps."""

    seconds: float
    held_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class ExperimentPart:
    """One process of an experiment, from its start to its end."""

    name: str
    steps: tuple[ExperimentStep, ...]
    samples: tuple[LabSample, ...]
    told: tuple[dict[str, Any], ...] = ()
    interrupted: bool = False

    @property
    def peak_bytes(self) -> int:
        return max((sample.held_bytes for sample in self.samples), default=0)

    @property
    def base_bytes(self) -> int:
        """What it held at its first step, before the work."""
        return self.steps[0].usage.total_bytes if self.steps else 0

    @property
    def work_bytes(self) -> int:
        """What the work added at its peak."""
        return self.peak_bytes - self.base_bytes

    @property
    def seconds(self) -> float:
        return self.samples[-1].seconds if self.samples else 0.0

    def facts(self) -> dict[str, Any]:
        every = max(len(self.samples) // _SAMPLES_TOLD, 1)
        return {
            "part": self.name,
            "seconds": round(self.seconds, 3),
            "peak_bytes": self.peak_bytes,
            "base_bytes": self.base_bytes,
            "interrupted": self.interrupted,
            "steps": [step.facts() for step in self.steps],
            "samples": [[round(s.seconds, 3), s.held_bytes, s.file_bytes] for s in self.samples[::every]],
        }


# Called with the part's name and each step as it is measured.
Watch = Callable[[str, ExperimentStep], None]


@dataclass(frozen=True, slots=True)
class Experiment:
    """All parts, and what they mean."""

    name: str
    parts: tuple[ExperimentPart, ...]
    seen: tuple[str, str]
    packages: tuple[str, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        return {
            "experiment": self.name,
            "parts": [part.facts() for part in self.parts],
            "seen": list(self.seen),
            "versions": installed_versions(self.packages),
            **self.numbers,
        }

    def text(self) -> str:
        """All that comes after the table of steps, which was shown while it ran."""
        top = max(_sum(sample) for part in self.parts for sample in part.samples)
        charts = [line for part in self.parts for line in ("", *chart(part, top))]
        shown = ", ".join(f"{name} {number}" for name, number in installed_versions(self.packages).items())
        legend = f"{_HELD} cannot be taken back   {_FILES} file pages, which the kernel takes back"
        return "\n".join([*charts, legend, "", *self.seen, "", shown])


def heading(part: str) -> str:
    """The first line of a part's table."""
    return f"{part:<34}{'RSS':>9}{'anonymous':>11}{'file-backed':>13}{'of machine':>12}{'peak':>10}"


def row(step: ExperimentStep) -> str:
    """A step as a row under `heading`. Shared memory counts as anonymous: it cannot be taken back either."""
    return (
        f"  {step.name:<32}{format_size(step.rss_bytes):>9}{format_size(step.usage.total_bytes):>11}"
        f"{format_size(step.usage.file_bytes):>13}{f'{step.percent:.1f} %':>12}{format_size(step.peak_bytes):>10}"
    )


def chart(part: ExperimentPart, top: int) -> list[str]:
    """Memory over time, what is held at the bottom and file pages on it; `top` is a full column."""
    columns = _columns(part.samples)
    lines = []
    for level in range(_HEIGHT, 0, -1):
        border = (level - 0.5) / _HEIGHT * top
        cells = (_HELD if held >= border else _FILES if held + files >= border else " " for held, files in columns)
        label = format_size(top) if level == _HEIGHT else ""
        lines.append(f"{label:>8} ┤{''.join(cells)}")
    lines.append(f"{'0':>8} └{'─' * _WIDTH} {part.seconds:.1f} s")
    return [f"{part.name}, peak {format_size(part.peak_bytes)}", *lines]


def _columns(samples: Sequence[LabSample]) -> list[tuple[int, int]]:
    """The highest sample of each of `_WIDTH` spans of time; an empty span repeats the one before."""
    columns = [(0, 0)] * _WIDTH
    if not samples:
        return columns
    span = samples[-1].seconds / _WIDTH or 1.0
    best: dict[int, LabSample] = {}
    for sample in samples:
        number = min(int(sample.seconds / span), _WIDTH - 1)
        if number not in best or _sum(sample) > _sum(best[number]):
            best[number] = sample
    last = (0, 0)
    for number in range(_WIDTH):
        if number in best:
            last = (best[number].held_bytes, best[number].file_bytes)
        columns[number] = last
    return columns


def _sum(sample: LabSample) -> int:
    return sample.held_bytes + sample.file_bytes


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """What is installed of what the experiment used."""
    found = {"Python": platform.python_version()}
    for name in ("brim", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = _own_version() if name == "brim" else "not installed"
    return found


def _own_version() -> str:
    """brim's own, also where it runs from a source tree and is not installed."""
    from brim import __version__

    return __version__


_BETWEEN_S = 0.5


def write_log(seen: Experiment, path: Path) -> None:
    """A line for every sample; a mark for every step."""
    path.unlink(missing_ok=True)
    log = LogWriter(path)
    at = began = time.time() - sum(part.seconds + _BETWEEN_S for part in seen.parts)
    limit = watch_limit()
    log.write(
        "head",
        {
            "time": datetime.fromtimestamp(began, UTC).isoformat(timespec="milliseconds"),
            "boot_id": boot_id(),
            "machine": machine_facts(),
            "limit": {"bytes": limit.bytes, "why": limit.reason, "enforced": "nothing: an experiment"},
            "watched": "experiment",
            "command": ["brim", "lab", seen.name],
            "versions": versions(),
        },
    )
    peak, peak_t = 0, began
    for part in seen.parts:
        log.write("event", {"t": at, "kind": "start", "text": part.name})
        for sample in part.samples:
            t = at + sample.seconds
            held = {"anon_bytes": sample.held_bytes, "shmem_bytes": 0, "swap_bytes": 0}
            log.write("sample", {"t": t, **held, "file_bytes": sample.file_bytes, "total_bytes": sample.held_bytes})
            if sample.held_bytes > peak:
                peak, peak_t = sample.held_bytes, t
        for step in part.steps:
            log.write("event", {"t": at + step.seconds, "kind": "mark", "text": f"{part.name}: {step.name}"})
        at += part.seconds + _BETWEEN_S
    for sentence in seen.seen:
        log.write("event", {"t": at, "kind": "note", "text": sentence})
    log.write("end", {"t": at, "exit_code": 0, "signal": None, "peak_bytes": peak, "peak_t": peak_t})
    log.close()
