"""Read a run log (docs/reference/run-log.md) into a `RunLog` for reports, the live page and the screen, in one pass.

A log may be cut in the middle of a line, contain lines that are not brim's, lack any field, be a gigabyte long and span
a change of the clock. Lines that cannot be read are counted. If several runs were appended to one file, the last is
read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.memory.leaks import Trend, classify_trend
from brim.monitor.watching.run_log import (
    End,
    Head,
    LogEvent,
    LoggedProcess,
    LogSample,
    Record,
    WorkState,
    objects,
    read_records,
    size,
    text,
)
from brim.records import dataclass
from brim.state.atomic_files import reason


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """Memory at one moment: `x` seconds after the beginning by a clock that never goes back, `t` as logged."""

    x: float
    t: float
    anon_bytes: int = 0
    shmem_bytes: int = 0
    swap_bytes: int = 0
    file_bytes: int = 0
    total_bytes: int = 0
    available_bytes: int | None = None


_HIGHEST = tuple(map(attrgetter, ("total_bytes", "anon_bytes", "shmem_bytes", "swap_bytes", "file_bytes")))
_LOWEST = attrgetter("total_bytes")


def thin(samples: Sequence[SeriesPoint], most: int) -> list[SeriesPoint]:
    """Return about `most` of the samples at most, in order.

    Spans are powers of two seconds, counted from zero: wider ones are made of narrower ones, so that thinning
    twice loses nothing that thinning once would have kept.
    """
    if len(samples) <= most:
        return list(samples)
    span = max(samples[-1].x - samples[0].x, 1e-3)
    power = math.floor(math.log2(span / most))
    while True:
        kept = _thin_by(samples, 2.0**power)
        if len(kept) <= most or 2.0**power > 2 * span:
            return kept
        power += 1


def _thin_by(samples: Sequence[SeriesPoint], width: float) -> list[SeriesPoint]:
    kept = {0, len(samples) - 1}
    begin = 0
    for number in range(1, len(samples) + 1):
        if number == len(samples) or samples[number].x // width != samples[begin].x // width:
            kept.update(_extremes(samples, range(begin, number)))
            begin = number
    return [samples[number] for number in sorted(kept)]


def _extremes(samples: Sequence[SeriesPoint], numbers: range) -> set[int]:
    if len(numbers) == 1:
        return set(numbers)
    extremes = {max(numbers, key=lambda number: series(samples[number])) for series in _HIGHEST}
    extremes.add(min(numbers, key=lambda number: _LOWEST(samples[number])))
    return extremes


MOST_SAMPLES = 2000
_MOST_EVENTS, _MOST_KINDS = 400, 40  # events of each kind
_MOST_PROCESSES = 1000
_MOST_SERIES, _MOST_POINTS = 8, 400
_MOST_REMARKS = 100
_MOST_NODES = 200
_STEP_BACK_S, _LEAP_S, _LEAP_SHOWN_S = 5.0, 86_400.0, 60.0
_GAP_S, _GAP = 60.0, 10  # a pause at least that long, and that many times the usual one


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; `elsewhere`: on the machine, maybe to another. `lines` is a text of many lines."""

    x: float
    t: float
    kind: str
    text: str
    lines: tuple[str, ...] = ()
    elsewhere: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessPeak:
    """The highest memory of a process, shared pages included; `last_bytes` is None once it was not listed."""

    pid: int
    name: str
    peak_bytes: int
    peak_x: float
    last_bytes: int | None


@dataclass(frozen=True, slots=True)
class RunLog:
    """A run, from its log. `end` is None if the log was cut off."""

    path: Path
    head: Head
    end: End | None
    samples: tuple[SeriesPoint, ...]
    outlook: tuple[float, float] | None  # bytes per second and seconds left, as of the last sample
    pressure: tuple[float, float] | None  # PSI: per cent of 10 s in which tasks waited for memory, last and most
    events: tuple[Event, ...]
    event_counts: Mapping[str, int]
    processes: tuple[ProcessPeak, ...]
    process_series: Mapping[int, tuple[tuple[float, int], ...]]  # of the largest: (x, bytes); 0: not listed
    trend: Trend
    peak: SeriesPoint | None
    file_peak_bytes: int
    least_available_bytes: int | None
    gpu_peaks: Mapping[int, tuple[int, int]]
    node_peaks: Mapping[str, int]  # of the cluster that the job ran on
    work: WorkState | None  # tasks of a brim job at the last sample
    seconds: float
    sample_count: int
    gaps: tuple[tuple[float, float], ...]
    clock_jumps: tuple[tuple[float, float], ...]
    bad_lines: int
    good_lines: int
    earlier_runs: int

    @property
    def last_t(self) -> float | None:
        times = [sample.t for sample in self.samples[-1:]] + [event.t for event in self.events[-1:]]
        return max(times, default=None)


def read_run(path: Path) -> RunLog:
    """The last run in a log; an InputError if the file cannot be read."""
    if not path.exists():
        raise InputError(f"The log {str(path)!r} does not exist.", hint="brim run --log FILE.jsonl writes one.")
    if not path.is_file():
        raise InputError(f"{str(path)!r} is not a file.", hint="Give a log that brim run has written.")
    run, earlier, bad, good = _Reading(Head()), 0, 0, 0
    try:
        for record in read_records(path):
            if record is None:
                bad += 1
                continue
            if isinstance(record, Head):
                earlier += run.taken > 0
                run = _Reading(record)
            run.take(record)
            good += 1
    except OSError as error:
        raise InputError(f"The log {str(path)!r} cannot be read: {reason(error)}.") from error
    return run.finish(path, bad, good, earlier)


class _Clock:
    """Seconds since the first entry. The clock of the machine may be set back or leap; this one does not."""

    def __init__(self) -> None:
        self.x = 0.0
        self._zero: float | None = None
        self._last_t = 0.0
        self.stopped = False
        self.jumps: list[tuple[float, float]] = []

    def at(self, t: float) -> float:
        if self.stopped:  # a post-mortem, which is added after the end, does not make the run longer
            return self.x
        if self._zero is None:
            self._zero = self._last_t = t
        step = t - self._last_t
        if step < -_STEP_BACK_S or step > _LEAP_S:
            self.x += _LEAP_SHOWN_S if step > 0 else 0.0
            self._zero = t - self.x
            if len(self.jumps) < _MOST_REMARKS:
                self.jumps.append((self.x, step))
        self._last_t = t
        self.x = max(self.x, t - self._zero)
        return self.x


class _Alike:
    """Events of the same kind: all, or every second, fourth … one when there are many, and the last."""

    def __init__(self) -> None:
        self._every: list[Event] = []
        self._stride, self._count = 1, 0
        self._last: Event | None = None

    def add(self, event: Event) -> None:
        if self._count % self._stride == 0:
            self._every.append(event)
            self._last = None
        else:
            self._last = event
        self._count += 1
        if len(self._every) > _MOST_EVENTS:
            self._last = self._every[-1] if len(self._every) % 2 == 0 else None
            del self._every[1::2]
            self._stride *= 2

    @property
    def kept(self) -> list[Event]:
        return [*self._every, *([self._last] if self._last else [])]


class _Reading:
    """The state of reading a run; its size does not grow with the log."""

    def __init__(self, head: Head) -> None:
        self.taken = 0
        self._head = head
        self._end: End | None = None
        self._clock = _Clock()
        self._samples: list[SeriesPoint] = []
        self._outlook: tuple[float, float] | None = None
        self._pressure: tuple[float, float] | None = None
        self._sample_count = 0
        self._first_x = self._last_x = 0.0
        self._gaps: list[tuple[float, float]] = []
        self._peak: SeriesPoint | None = None
        self._file_peak = 0
        self._least_available: int | None = None
        self._gpu_peaks: dict[int, tuple[int, int]] = {}
        self._node_peaks: dict[str, int] = {}
        self._work: WorkState | None = None
        self._events: dict[str, _Alike] = {}
        self._event_counts: dict[str, int] = {}
        self._processes: dict[int, ProcessPeak] = {}
        self._series: dict[int, list[tuple[float, int]]] = {}

    def take(self, record: Record) -> None:
        self.taken += 1
        if isinstance(record, End):
            if record.t is not None:
                self._clock.at(record.t)
            self._clock.stopped = True
            self._end = record
        elif isinstance(record, LogSample):
            self._take_sample(record)
        elif isinstance(record, LogEvent):
            self._take_event(record)

    def _take_sample(self, logged: LogSample) -> None:
        x, usage = self._clock.at(logged.t), logged.usage
        sample = SeriesPoint(
            x,
            logged.t,
            usage.anon_bytes,
            usage.shmem_bytes,
            usage.swap_bytes,
            usage.file_bytes,
            logged.total_bytes,
            logged.available_bytes,
        )
        self._see_gap(x)
        self._sample_count += 1
        if logged.pressure is not None:
            self._pressure = logged.pressure, max(logged.pressure, self._pressure[1] if self._pressure else 0.0)
        rate, left_s = logged.bytes_per_s, logged.left_s
        self._outlook = (float(rate), float(left_s)) if rate and left_s is not None else None
        if self._peak is None or sample.total_bytes > self._peak.total_bytes:
            self._peak = sample
        self._file_peak = max(self._file_peak, sample.file_bytes)
        if sample.available_bytes is not None:
            least = self._least_available
            self._least_available = sample.available_bytes if least is None else min(least, sample.available_bytes)
        self._samples.append(sample)
        if len(self._samples) >= 4 * MOST_SAMPLES:
            self._samples = thin(self._samples, MOST_SAMPLES)
        if logged.processes is not None:
            self._take_processes(logged.processes, x)
        for gpu in objects(logged.raw.get("gpus")):
            index, used, whole = (size(gpu.get(name)) for name in ("index", "used_bytes", "total_bytes"))
            if index is not None and used is not None and (index in self._gpu_peaks or len(self._gpu_peaks) < 64):
                self._gpu_peaks[index] = max(self._gpu_peaks.get(index, (0, 0)), (used, whole or 0))
        self._work = logged.work or self._work
        for node in objects(logged.raw.get("nodes")):
            name, peak = text(node.get("name"), 80), size(node.get("peak_bytes"))
            if name and peak is not None and (name in self._node_peaks or len(self._node_peaks) < _MOST_NODES):
                self._node_peaks[name] = max(self._node_peaks.get(name, 0), peak)

    def _see_gap(self, x: float) -> None:
        if self._sample_count == 0:
            self._first_x = x
        else:
            usual = (self._last_x - self._first_x) / self._sample_count
            if x - self._last_x > max(_GAP_S, _GAP * usual) and len(self._gaps) < _MOST_REMARKS:
                self._gaps.append((self._last_x, x))
        self._last_x = x

    def _take_processes(self, listed: tuple[LoggedProcess, ...], x: float) -> None:
        before, now = self._processes, {}
        for process in listed:
            total, known = process.usage.total_bytes, before.get(process.pid)
            peak, peak_x = (known.peak_bytes, known.peak_x) if known and known.peak_bytes >= total else (total, x)
            now[process.pid] = ProcessPeak(process.pid, process.name, peak, peak_x, total)
        gone = (
            replace(old, last_bytes=None) if old.last_bytes is not None else old
            for pid, old in before.items()
            if pid not in now
        )
        now.update({process.pid: process for process in gone})
        if len(now) > 2 * _MOST_PROCESSES:
            largest = sorted(now.values(), key=lambda process: -process.peak_bytes)
            now = {process.pid: process for process in largest[:_MOST_PROCESSES]}
        self._processes = now
        self._follow_processes({pid: one.last_bytes for pid, one in now.items() if one.last_bytes is not None}, x)

    def _take_event(self, logged: LogEvent) -> None:
        kind = logged.kind
        if kind not in self._event_counts and len(self._event_counts) >= _MOST_KINDS:
            kind = "other"
        event = Event(self._clock.at(logged.t), logged.t, kind, logged.text, logged.lines, logged.elsewhere, logged.raw)
        self._event_counts[kind] = self._event_counts.get(kind, 0) + 1
        self._events.setdefault(kind, _Alike()).add(event)

    def _follow_processes(self, held: Mapping[int, int], x: float) -> None:
        """What each listed process held; every second point goes when there are too many."""
        for pid in {*self._series, *held}:
            line = self._series.setdefault(pid, [])
            if pid in held or (line and line[-1][1]):
                line.append((round(x, 3), held.get(pid, 0)))
            if len(line) > _MOST_POINTS:
                del line[1::2]
        if len(self._series) > 4 * _MOST_SERIES:
            kept = sorted(self._series, key=lambda pid: -self._peak_of(pid))[: 2 * _MOST_SERIES]
            self._series = {pid: self._series[pid] for pid in kept}

    def _peak_of(self, pid: int) -> int:
        return max((size for _, size in self._series[pid]), default=0)

    def _largest_series(self) -> dict[int, tuple[tuple[float, int], ...]]:
        largest = sorted(self._series, key=lambda pid: -self._peak_of(pid))[:_MOST_SERIES]
        return {pid: tuple(self._series[pid]) for pid in largest}

    def finish(self, path: Path, bad: int, good: int, earlier: int) -> RunLog:
        samples = tuple(thin(self._samples, MOST_SAMPLES))
        events = sorted((event for alike in self._events.values() for event in alike.kept), key=lambda event: event.x)
        trend = classify_trend([(s.x, s.total_bytes) for s in samples], [(s.x, s.file_bytes) for s in samples])
        return RunLog(
            path=path,
            head=self._head,
            end=self._end,
            samples=samples,
            outlook=self._outlook,
            pressure=self._pressure,
            events=tuple(events),
            event_counts=self._event_counts,
            process_series=self._largest_series(),
            processes=tuple(sorted(self._processes.values(), key=lambda process: -process.peak_bytes)),
            trend=trend,
            peak=self._peak,
            file_peak_bytes=self._file_peak,
            least_available_bytes=self._least_available,
            gpu_peaks=self._gpu_peaks,
            node_peaks=self._node_peaks,
            work=self._work,
            seconds=self._clock.x,
            sample_count=self._sample_count,
            gaps=tuple(self._gaps),
            clock_jumps=tuple(self._clock.jumps),
            bad_lines=bad,
            good_lines=good,
            earlier_runs=earlier,
        )
