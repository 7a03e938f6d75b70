"""Results of an experiment: its parts with their steps and samples, as a table, a chart and two sentences."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from brim.memory.limit import watch_limit
from brim.memory.meter import Machine, Usage, versions
from brim.monitor.log_writer import LogWriter, head_entry, sample_entry
from brim.records import dataclass
from brim.sizes import format_size

_WIDTH, _HEIGHT = 56, 6
_MOST_SAMPLES = 200  # in --json
_MEMORY_BAR, _FILE_BAR = "█", "░"
_BETWEEN_PARTS_S = 0.5


@dataclass(frozen=True, slots=True)
class ExperimentStep:
    """A measurement that the child process requested. `peak_bytes` is the highest memory since the step before."""

    name: str
    seconds: float
    usage: Usage
    peak_bytes: int
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
    """The memory between steps."""

    seconds: float
    memory_bytes: int
    file_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.memory_bytes + self.file_bytes


@dataclass(frozen=True, slots=True)
class ExperimentPart:
    """One process of an experiment. `messages` are facts that it has reported."""

    name: str
    steps: tuple[ExperimentStep, ...]
    samples: tuple[LabSample, ...]
    messages: tuple[dict[str, Any], ...] = ()
    interrupted: bool = False

    @property
    def peak_bytes(self) -> int:
        """The highest memory of all samples and steps."""
        samples = [sample.memory_bytes for sample in self.samples]
        return max([*samples, *(step.peak_bytes for step in self.steps)], default=0)

    @property
    def base_bytes(self) -> int:
        """The memory at the first step, before the work."""
        return self.steps[0].usage.total_bytes if self.steps else 0

    @property
    def work_bytes(self) -> int:
        """The memory that the work added at its peak."""
        return self.peak_bytes - self.base_bytes

    @property
    def seconds(self) -> float:
        return self.samples[-1].seconds if self.samples else 0.0

    def facts(self) -> dict[str, Any]:
        samples = self.samples[:: max(len(self.samples) // _MOST_SAMPLES, 1)]
        return {
            "part": self.name,
            "seconds": round(self.seconds, 3),
            "peak_bytes": self.peak_bytes,
            "base_bytes": self.base_bytes,
            "interrupted": self.interrupted,
            "steps": [step.facts() for step in self.steps],
            "samples": [[round(sample.seconds, 3), sample.memory_bytes, sample.file_bytes] for sample in samples],
        }


# Called with the part's name and each step as it is measured.
Watch = Callable[[str, ExperimentStep], None]


@dataclass(frozen=True, slots=True)
class Experiment:
    """All parts, and two sentences about them."""

    name: str
    parts: tuple[ExperimentPart, ...]
    sentences: tuple[str, str]
    packages: tuple[str, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        return {
            "experiment": self.name,
            "parts": [part.facts() for part in self.parts],
            "seen": list(self.sentences),
            "versions": installed_versions(self.packages),
            **self.numbers,
        }

    def text(self) -> str:
        """Return the text after the table of steps, which was printed while the experiment ran."""
        top = max(sample.total_bytes for part in self.parts for sample in part.samples)
        charts = [line for part in self.parts for line in ("", *chart(part, top))]
        shown = ", ".join(f"{name} {number}" for name, number in installed_versions(self.packages).items())
        legend = f"{_MEMORY_BAR} memory   {_FILE_BAR} file pages, which the kernel reclaims"
        return "\n".join([*charts, legend, "", *self.sentences, "", shown])

    def write_log(self, path: Path) -> None:
        """Write the parts one after the other as a run log, for a report."""
        path.unlink(missing_ok=True)
        log = LogWriter(path)
        t = start = time.time() - sum(part.seconds + _BETWEEN_PARTS_S for part in self.parts)
        command = ["brim", "lab", self.name]
        log.write("head", head_entry("experiment", command, watch_limit(), "nothing: an experiment", time_s=start))
        peak, peak_t = 0, start
        for part in self.parts:
            log.write("event", {"t": t, "kind": "start", "text": part.name})
            for sample in part.samples:
                usage = Usage(anon_bytes=sample.memory_bytes, file_bytes=sample.file_bytes)
                log.write("sample", sample_entry(t + sample.seconds, usage, Machine()))
                if sample.memory_bytes > peak:
                    peak, peak_t = sample.memory_bytes, t + sample.seconds
            for step in part.steps:
                log.write("event", {"t": t + step.seconds, "kind": "mark", "text": f"{part.name}: {step.name}"})
            t += part.seconds + _BETWEEN_PARTS_S
        for sentence in self.sentences:
            log.write("event", {"t": t, "kind": "note", "text": sentence})
        log.write("end", {"t": t, "exit_code": 0, "signal": None, "peak_bytes": peak, "peak_t": peak_t})
        log.close()


def heading(part: str) -> str:
    """Return the first line of a part's table."""
    return f"{part:<34}{'RSS':>9}{'anonymous':>11}{'file-backed':>13}{'of machine':>12}{'peak':>10}"


def row(step: ExperimentStep) -> str:
    """Return a step as a row under `heading`. Shared memory counts as anonymous: neither can be reclaimed."""
    return (
        f"  {step.name:<32}{format_size(step.rss_bytes):>9}{format_size(step.usage.total_bytes):>11}"
        f"{format_size(step.usage.file_bytes):>13}{f'{step.percent:.1f} %':>12}{format_size(step.peak_bytes):>10}"
    )


def chart(part: ExperimentPart, top: int) -> list[str]:
    """Draw memory over time, with file pages above it; `top` is a full column."""
    span = part.seconds / _WIDTH or 1.0
    highest: dict[int, LabSample] = {}  # of each span of time
    for sample in part.samples:
        number = min(int(sample.seconds / span), _WIDTH - 1)
        if number not in highest or sample.total_bytes > highest[number].total_bytes:
            highest[number] = sample
    columns, last = [], LabSample(0.0, 0, 0)
    for number in range(_WIDTH):  # an empty span repeats the one before
        last = highest.get(number, last)
        columns.append(last)
    lines = [f"{part.name}, peak {format_size(part.peak_bytes)}"]
    for level in range(_HEIGHT, 0, -1):
        border = (level - 0.5) / _HEIGHT * top
        cells = (
            _MEMORY_BAR if column.memory_bytes >= border else _FILE_BAR if column.total_bytes >= border else " "
            for column in columns
        )
        lines.append(f"{format_size(top) if level == _HEIGHT else '':>8} ┤{''.join(cells)}")
    return [*lines, f"{'0':>8} └{'─' * _WIDTH} {part.seconds:.1f} s"]


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python, brim and the packages that an experiment used."""
    installed = {"Python": platform.python_version(), "brim": versions()["brim"]}
    for name in packages:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "not installed"
    return installed
