"""Read a run log into a `RunLog`, for `why`, reports, the live page, forecasts and the screen: streamed and thinned.

A log may be a gigabyte long, span a change of the clock, and contain several runs. Its size does not decide how much
memory reading takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path

from brim.errors import InputError
from brim.memory.leaks import Trend, classify_trend
from brim.memory.meter import Process
from brim.monitor.log_records import (
    End,
    Head,
    LogEvent,
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

MOST_SAMPLES = 2000
_MOST_EVENTS, _MOST_KINDS = 400, 40  # events of each kind
_MOST_PROCESSES, _MOST_SERIES, _MOST_POINTS = 1000, 8, 400
_MOST_REMARKS, _MOST_NODES, _MOST_GPUS = 100, 200, 64
_STEP_BACK_S, _LEAP_S, _LEAP_SHOWN_S = 5.0, 86_400.0, 60.0
_GAP_S, _GAP = 60.0, 10  # a pause at least that long, and that many times the usual one


@dataclass(frozen=True, slots=True)
class SeriesPoint:
    """Memory at one time: `x` seconds after the start by a clock that never goes back, `t` as logged."""

    x: float
    t: float
    anon_bytes: int = 0
    shmem_bytes: int = 0
    swap_bytes: int = 0
    file_bytes: int = 0
    total_bytes: int = 0
    available_bytes: int | None = None


_SERIES = ("total_bytes", "anon_bytes", "shmem_bytes", "swap_bytes", "file_bytes")


def thin(samples: Sequence[SeriesPoint], max_samples: int) -> list[SeriesPoint]:
    """Return about `max_samples` of the samples, in order, with the highest of each series in each span of time.

    Spans are powers of two seconds, counted from zero, so that wider spans consist of narrower ones: thinning twice
    loses nothing that thinning once would have preserved.
    """
    if len(samples) <= max_samples:
        return list(samples)
    span = max(samples[-1].x - samples[0].x, 1e-3)
    width = 2.0 ** math.floor(math.log2(span / max_samples))
    columns = [[getattr(sample, name) for sample in samples] for name in _SERIES]
    while True:
        numbers, start = {0, len(samples) - 1}, 0
        for end in range(1, len(samples) + 1):
            if end == len(samples) or samples[end].x // width != samples[start].x // width:
                numbers.update(max(range(start, end), key=column.__getitem__) for column in columns)
                numbers.add(min(range(start, end), key=columns[0].__getitem__))
                start = end
        if len(numbers) <= max_samples or width > 2 * span:
            return [samples[number] for number in sorted(numbers)]
        width *= 2


@dataclass(frozen=True, slots=True)
class ProcessPeak:
    """The highest memory of a process, shared pages included; `last_bytes` is None once it was not listed."""

    pid: int
    name: str
    peak_bytes: int
    peak_x: float
    last_bytes: int | None


class _ThinnedEvents:
    """Events of one kind: all, or every second, fourth … one if there are many, and the last."""

    def __init__(self) -> None:
        self._events: list[LogEvent] = []
        self._stride, self._count = 1, 0
        self._last: LogEvent | None = None

    def add(self, event: LogEvent) -> None:
        if self._count % self._stride == 0:
            self._events.append(event)
            self._last = None
        else:
            self._last = event
        self._count += 1
        if len(self._events) > _MOST_EVENTS:
            self._last = self._events[-1] if len(self._events) % 2 == 0 else None
            del self._events[1::2]
            self._stride *= 2

    def __iter__(self) -> Iterator[LogEvent]:
        yield from self._events
        if self._last is not None:
            yield self._last


@dataclass
class RunLog:
    """A run, from its log. `end` is None if the log was cut off. `add` fills it record by record."""

    path: Path
    head: Head = Head()
    end: End | None = None
    samples: list[SeriesPoint] = field(default_factory=list)
    last_sample: LogSample | None = None
    sample_at_stop: LogSample | None = None  # of those when brim stopped and when it killed the run, the larger one
    last_line: int = 0
    outlook: tuple[float, float] | None = None  # bytes per second and seconds left, at the last sample
    pressure: tuple[float, float] | None = None  # PSI: per cent of 10 s in which tasks waited for memory, last and most
    events: list[LogEvent] = field(default_factory=list)
    event_counts: dict[str, int] = field(default_factory=dict)
    processes: list[ProcessPeak] = field(default_factory=list)  # the largest first
    process_series: dict[int, list[tuple[float, int]]] = field(default_factory=dict)  # (x, bytes); 0: not listed
    peak: SeriesPoint | None = None
    file_peak_bytes: int = 0
    least_available_bytes: int | None = None
    gpu_peaks: dict[int, tuple[int, int]] = field(default_factory=dict)
    node_peaks: dict[str, int] = field(default_factory=dict)  # of the cluster that the job ran on
    work: WorkState | None = None  # tasks of a brim job at the last sample
    first_t: float | None = None  # of the samples
    seconds: float = 0.0
    sample_count: int = 0
    gaps: list[tuple[float, float]] = field(default_factory=list)
    clock_jumps: list[tuple[float, float]] = field(default_factory=list)
    bad_lines: int = 0
    good_lines: int = 0
    earlier_runs: int = 0
    _clock_zero: float | None = None
    _clock_t: float = 0.0
    _first_x: float = 0.0
    _last_x: float = 0.0
    _kill_t: float = 0.0
    _events_by_kind: dict[str, _ThinnedEvents] = field(default_factory=dict)
    _peaks_by_pid: dict[int, ProcessPeak] = field(default_factory=dict)

    @property
    def last_t(self) -> float | None:
        times = [sample.t for sample in self.samples[-1:]] + [event.t for event in self.events[-1:]]
        return max(times, default=None)

    @property
    def pids(self) -> set[int]:
        """Return the processes that the log lists."""
        return {process.pid for process in self.processes} | ({self.head.pid} if self.head.pid is not None else set())

    @cached_property
    def trend(self) -> Trend:
        memory = [(sample.x, sample.total_bytes) for sample in self.samples]
        return classify_trend(memory, [(sample.x, sample.file_bytes) for sample in self.samples])

    def add(self, line: int, record: Record) -> None:
        """Add a record of the log."""
        if isinstance(record, Head):
            self.head = record
        elif isinstance(record, LogSample):
            self.last_line = line
            self._add_sample(record)
            if record.t <= self._kill_t:  # the kill was not delayed by writing the sample that led to it
                self._note_stop(record)
        elif isinstance(record, LogEvent):
            if record.kind in ("stop", "kill"):
                self._note_stop(self.last_sample)
                self._kill_t = record.t if record.kind == "kill" else self._kill_t
            kind = record.kind
            if kind not in self.event_counts and len(self.event_counts) >= _MOST_KINDS:
                kind = "other"
            self.event_counts[kind] = self.event_counts.get(kind, 0) + 1
            event = replace(record, kind=kind, x=self._time_of(record.t), line=line)
            self._events_by_kind.setdefault(kind, _ThinnedEvents()).add(event)
        else:
            if record.t is not None:
                self._time_of(record.t)
            self.end = record

    def _note_stop(self, sample: LogSample | None) -> None:
        if sample is not None and (self.sample_at_stop is None or sample.total_bytes > self.sample_at_stop.total_bytes):
            self.sample_at_stop = sample

    def finish(self) -> RunLog:
        """Thin and sort, after the last record."""
        self.samples = thin(self.samples, MOST_SAMPLES)
        self.events = sorted((event for kind in self._events_by_kind.values() for event in kind), key=lambda e: e.x)
        self.processes = sorted(self._peaks_by_pid.values(), key=lambda process: -process.peak_bytes)
        self.process_series = {pid: self.process_series[pid] for pid in self._largest_series(_MOST_SERIES)}
        return self

    def _time_of(self, t: float) -> float:
        """Return seconds since the first record, also if the clock of the machine was set back or leaped."""
        if self.end is not None:  # a post-mortem, which is added after the end, does not make the run longer
            return self.seconds
        if self._clock_zero is None:
            self._clock_zero = self._clock_t = t
        step = t - self._clock_t
        if step < -_STEP_BACK_S or step > _LEAP_S:
            self.seconds += _LEAP_SHOWN_S if step > 0 else 0.0
            self._clock_zero = t - self.seconds
            if len(self.clock_jumps) < _MOST_REMARKS:
                self.clock_jumps.append((self.seconds, step))
        self._clock_t = t
        self.seconds = max(self.seconds, t - self._clock_zero)
        return self.seconds

    def _add_sample(self, sample: LogSample) -> None:
        x, usage, available = self._time_of(sample.t), sample.usage, sample.available_bytes
        point = SeriesPoint(
            x, sample.t, usage.anon_bytes, usage.shmem_bytes, usage.swap_bytes, usage.file_bytes, sample.total_bytes,
            available,
        )  # fmt: skip
        if self.sample_count == 0:
            self._first_x, self.first_t = x, sample.t
        else:
            usual = (self._last_x - self._first_x) / self.sample_count
            if x - self._last_x > max(_GAP_S, _GAP * usual) and len(self.gaps) < _MOST_REMARKS:
                self.gaps.append((self._last_x, x))
        self._last_x = x
        self.sample_count += 1
        self.last_sample = sample
        if sample.pressure is not None:
            self.pressure = sample.pressure, max(sample.pressure, self.pressure[1] if self.pressure else 0.0)
        rate, left_s = sample.bytes_per_s, sample.left_s
        self.outlook = (float(rate), float(left_s)) if rate and left_s is not None else None
        if self.peak is None or point.total_bytes > self.peak.total_bytes:
            self.peak = point
        self.file_peak_bytes = max(self.file_peak_bytes, point.file_bytes)
        if available is not None:
            self.least_available_bytes = min(available, self.least_available_bytes or available)
        self.samples.append(point)
        if len(self.samples) >= 4 * MOST_SAMPLES:
            self.samples = thin(self.samples, MOST_SAMPLES)
        if sample.processes is not None:
            self._add_processes(sample.processes, x)
        self.work = sample.work or self.work
        for gpu in objects(sample.raw.get("gpus")):
            index, used, total = (size(gpu.get(name)) for name in ("index", "used_bytes", "total_bytes"))
            if index is not None and used is not None and (index in self.gpu_peaks or len(self.gpu_peaks) < _MOST_GPUS):
                self.gpu_peaks[index] = max(self.gpu_peaks.get(index, (0, 0)), (used, total or 0))
        for node in objects(sample.raw.get("nodes")):
            name, peak = text(node.get("name"), 80), size(node.get("peak_bytes"))
            if name and peak is not None and (name in self.node_peaks or len(self.node_peaks) < _MOST_NODES):
                self.node_peaks[name] = max(self.node_peaks.get(name, 0), peak)

    def _add_processes(self, listed: Sequence[Process], x: float) -> None:
        before, peaks = self._peaks_by_pid, {}
        for process in listed:
            total, previous = process.usage.total_bytes, before.get(process.pid)
            peak, peak_x = (
                (previous.peak_bytes, previous.peak_x) if previous and previous.peak_bytes >= total else (total, x)
            )
            peaks[process.pid] = ProcessPeak(process.pid, process.name, peak, peak_x, total)
        for pid, process_peak in before.items():
            if pid not in peaks:
                is_new = process_peak.last_bytes is not None
                peaks[pid] = replace(process_peak, last_bytes=None) if is_new else process_peak
        if len(peaks) > 2 * _MOST_PROCESSES:
            largest = sorted(peaks.values(), key=lambda process: -process.peak_bytes)
            peaks = {process.pid: process for process in largest[:_MOST_PROCESSES]}
        self._peaks_by_pid = peaks
        sizes = {pid: process.last_bytes for pid, process in peaks.items() if process.last_bytes is not None}
        for pid in {*self.process_series, *sizes}:
            points = self.process_series.setdefault(pid, [])
            if pid in sizes or (points and points[-1][1]):
                points.append((round(x, 3), sizes.get(pid, 0)))
            if len(points) > _MOST_POINTS:
                del points[1::2]
        if len(self.process_series) > 4 * _MOST_SERIES:
            self.process_series = {pid: self.process_series[pid] for pid in self._largest_series(2 * _MOST_SERIES)}

    def _largest_series(self, count: int) -> list[int]:
        peaks = {pid: max((size for _, size in points), default=0) for pid, points in self.process_series.items()}
        return sorted(peaks, key=lambda pid: -peaks[pid])[:count]


def read_runs(path: Path) -> Iterator[RunLog]:
    """Read the runs of a log, in order. The last one has the numbers of lines and runs.

    Raises:
        OSError: The log cannot be read.
    """
    run, started, bad_lines, good_lines, earlier_runs = RunLog(path), False, 0, 0, 0
    for number, record in read_records(path):
        if record is None:
            bad_lines += 1
            continue
        good_lines += 1
        if isinstance(record, Head) and started:
            earlier_runs += 1
            yield run.finish()
            run = RunLog(path)
        started = True
        run.add(number, record)
    run.bad_lines, run.good_lines, run.earlier_runs = bad_lines, good_lines, earlier_runs
    yield run.finish()


def read_run(path: Path) -> RunLog:
    """Read the last run of a log.

    Raises:
        InputError: The log does not exist or cannot be read.
    """
    if not path.exists():
        raise InputError(f"The log {str(path)!r} does not exist.", hint="brim run --log FILE.jsonl writes one.")
    if not path.is_file():
        raise InputError(f"{str(path)!r} is not a file.", hint="Give a log that brim run has written.")
    try:
        for run in read_runs(path):
            last = run
    except OSError as error:
        raise InputError(f"The log {str(path)!r} cannot be read: {reason(error)}.") from error
    return last
