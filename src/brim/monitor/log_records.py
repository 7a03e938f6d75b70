"""Read run logs (docs/reference/run-log.md) as typed records.

Nothing in a log is trusted: fields of a wrong type count as missing, and texts contain only characters that can be
shown. A log may be cut or damaged, contain lines that are not brim's, and be compressed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.memory.meter import Process, Usage
from brim.memory.thresholds import parse_level
from brim.monitor.log_files import UNREADABLE, open_decompressed
from brim.progress import RunningTask
from brim.records import dataclass

_LAST_SECOND = 253_402_214_400.0  # a day before the year 10000, where calendars end, in any time zone
_LARGEST = 1 << 62
_MOST_TEXTS = 500
_LONGEST_LINE = 8 << 20
# Characters that must not be shown: controls, marks of text direction, unpaired surrogates.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LoggedForecast:
    """The forecast that was made before the run."""

    low_bytes: int
    high_bytes: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Head:
    """The first record of a run. Empty or None: the log does not contain it."""

    command: tuple[str, ...] = ()
    watched: str = ""
    pid: int | None = None
    limit_bytes: int | None = None
    limit_why: str = ""
    enforced: str = ""
    thresholds: tuple[tuple[str, int], ...] = ()
    ram_bytes: int | None = None
    swap_bytes: int | None = None
    cpus: int | None = None
    kernel: str = ""
    boot_id: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    not_seen: tuple[str, ...] = ()
    forecast: LoggedForecast | None = None
    stop_file: str = ""
    raw: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkState:
    """The shards or units of a job. `total` is None while it is unknown."""

    phase: str = ""
    total: int | None = None
    finished: int = 0
    running: tuple[RunningTask, ...] = ()
    more_running: int = 0
    retries: tuple[tuple[str, int], ...] = ()  # tasks that will be retried, and how often they were tried


@dataclass(frozen=True, slots=True)
class LogSample:
    """The memory at one time. `processes` is None if the sample does not list them; shared pages count for each."""

    t: float
    usage: Usage
    total_bytes: int
    raw: Mapping[str, Any]
    available_bytes: int | None = None
    swap_free_bytes: int | None = None
    left_s: int | None = None
    bytes_per_s: int | None = None
    pressure: float | None = None
    processes: tuple[Process, ...] | None = None
    work: WorkState | None = None


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Something that happened; `elsewhere`: on the machine, perhaps to another process.

    `x` is the time since the start of the run, which `run_log` adds, and `line` the line of the log.
    """

    t: float
    kind: str
    text: str
    lines: tuple[str, ...] = ()
    elsewhere: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)
    x: float = 0.0
    line: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """The last record of a watch that was not killed."""

    t: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    stopped: str | None = None
    why: str | None = None
    has_process_ended: bool = False
    overshoot_bytes: int = 0
    oom_kills: int = 0
    machine_oom_kills: int = 0
    peak_bytes: int = 0
    peak_t: float | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)


Record = Head | LogSample | LogEvent | End


def read_records(path: Path) -> Iterator[tuple[int, Record | None]]:
    """Yield the number and the record of each line of a log; the record is None if the line is not one.

    A damaged compressed file is read up to the damage.

    Raises:
        OSError: The file cannot be read at all.
    """
    with open_decompressed(path) as (file, is_compressed):
        number = 0
        try:
            while line := file.readline(_LONGEST_LINE):
                number += 1
                if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                    while (remainder := file.readline(_LONGEST_LINE)) and not remainder.endswith(b"\n"):
                        pass
                    yield number, None
                elif line.strip():
                    yield number, parse_record(line)
        except UNREADABLE:
            if not is_compressed:
                raise


def is_run_log(path: Path) -> bool:
    """Check whether a file starts as run logs do."""
    try:
        with open_decompressed(path) as (file, _):
            return isinstance(parse_record(file.readline(1 << 16)), Head)
    except UNREADABLE:
        return False


def parse_record(line: bytes | str) -> Record | None:
    """Parse one line of a run log. Fields that are missing or of a wrong type are empty; None: it is not a record."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    kind, t = entry.get("type"), time_of_day(entry.get("t"))
    if kind == "head":
        return _parse_head(entry)
    if kind == "end":
        return parse_end(entry)
    if kind == "sample" and t is not None:
        return _parse_sample(entry, t)
    if kind == "event" and t is not None:
        name = text(entry.get("kind"), 40) or "event"
        shown = text(entry.get("text"), 1000) or name
        return LogEvent(t, name, shown, texts(entry.get("lines"), 1000), bool(entry.get("machine")), entry)
    return None


def _parse_head(entry: dict[str, Any]) -> Head:
    limit, machine, versions, levels, forecast = (
        value if isinstance(value := entry.get(name), dict) else {}
        for name in ("limit", "machine", "versions", "ladder", "forecast")
    )
    limit_bytes = size(limit.get("bytes")) or None
    thresholds = []
    for name in ("alert", "stop", "kill"):
        try:
            level = parse_level(text(levels.get(name), 40))
        except InputError:
            continue
        if level is not None and (level.bytes is not None or limit_bytes is not None):
            thresholds.append((name, level.in_bytes(limit_bytes or 0)))
    command = entry.get("command")
    ends = [end for name in ("low_bytes", "high_bytes") if (end := size(forecast.get(name))) is not None]
    return Head(
        command=(text(command, 5000),) if isinstance(command, str) else texts(command, 5000),
        watched=text(entry.get("watched"), 40),
        pid=size(entry.get("pid")),
        limit_bytes=limit_bytes,
        limit_why=text(limit.get("why"), 200),
        enforced=text(limit.get("enforced"), 200),
        thresholds=tuple(thresholds),
        ram_bytes=size(machine.get("ram_bytes")),
        swap_bytes=size(machine.get("swap_bytes")),
        cpus=size(machine.get("cpus")),
        kernel=" ".join(filter(None, (text(machine.get("system"), 40), text(machine.get("kernel"), 80)))),
        boot_id=text(entry.get("boot_id"), 80),
        versions=tuple((text(name, 40), text(version, 80)) for name, version in list(versions.items())[:20]),
        not_seen=texts(entry.get("not_seen"), 300),
        forecast=LoggedForecast(min(ends), max(ends), text(forecast.get("verdict"), 40)) if ends else None,
        stop_file=text(levels.get("stop_file"), 1000),
        raw=entry,
    )


def _parse_usage(entry: Mapping[str, Any]) -> Usage:
    return Usage(*(size(entry.get(f"{kind}_bytes")) or 0 for kind in ("anon", "shmem", "swap", "file")))


def _parse_sample(entry: dict[str, Any], t: float) -> LogSample:
    usage, total = _parse_usage(entry), size(entry.get("total_bytes"))
    if total is None:
        total = usage.total_bytes
    elif not usage.total_bytes:
        usage = Usage(total, 0, 0, usage.file_bytes)  # a log without the kinds of memory
    pressure, processes, work = (entry.get(name) for name in ("psi_some_avg10", "processes", "work"))
    listed = None
    if isinstance(processes, list):
        listed = tuple(
            Process(pid, text(process.get("name"), 80) or "?", _parse_usage(process))
            for process in objects(processes)
            if (pid := size(process.get("pid"))) is not None
        )
    return LogSample(
        t=t,
        usage=usage,
        total_bytes=total,
        raw=entry,
        available_bytes=size(entry.get("available_bytes")),
        swap_free_bytes=size(entry.get("swap_free_bytes")),
        left_s=size(entry.get("left_s")),
        bytes_per_s=size(entry.get("bytes_per_s")),
        pressure=float(pressure) if isinstance(pressure, int | float) and 0 <= pressure <= 100 else None,
        processes=listed,
        work=_parse_work(work) if isinstance(work, dict) else None,
    )


def _parse_work(entry: dict[str, Any]) -> WorkState:
    running = [
        RunningTask(name, size(task.get("bytes")) or 0, t, size(task.get("tries")) or 0)
        for task in objects(entry.get("running"))
        if (name := text(task.get("name"), 300)) and (t := time_of_day(task.get("t"))) is not None
    ]
    return WorkState(
        phase=text(entry.get("what"), 40),
        total=size(entry.get("total")),
        finished=size(entry.get("done")) or 0,
        running=tuple(running),
        more_running=size(entry.get("more_running")) or 0,
        retries=tuple(
            (text(task.get("name"), 300), size(task.get("tries")) or 1) for task in objects(entry.get("again"))
        ),
    )


def parse_end(entry: dict[str, Any]) -> End:
    return End(
        t=time_of_day(entry.get("t")),
        exit_code=_integer(entry.get("exit_code")),
        signal=_integer(entry.get("signal")),
        stopped=text(entry.get("stopped"), 40) or None,
        why=text(entry.get("why"), 300) or None,
        has_process_ended=bool(entry.get("gone")),
        overshoot_bytes=size(entry.get("overshoot_bytes")) or 0,
        oom_kills=size(entry.get("oom_kills")) or 0,
        machine_oom_kills=size(entry.get("machine_oom_kills")) or 0,
        peak_bytes=size(entry.get("peak_bytes")) or 0,
        peak_t=time_of_day(entry.get("peak_t")),
        raw=entry,
    )


def time_of_day(value: object) -> float | None:
    """Return seconds since 1970, within the range of calendars."""
    number = _number(value)
    return number if number is not None and 0 <= number < _LAST_SECOND else None


def size(value: object) -> int | None:
    """Return a number of bytes, a count or a process number; None if it is not one."""
    number = _integer(value)
    return number if number is not None and number >= 0 else None


def _integer(value: object) -> int | None:
    number = _number(value)
    return round(number) if number is not None else None


def _number(value: object) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None  # not a number (NaN is not smaller than anything), or too large to be one that was measured
    return value


def text(value: object, max_length: int) -> str:
    """Return a text that can be shown, cut to `max_length` characters; empty if it is not a text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value:g}" if isinstance(value, float) else str(value)[:max_length]
    if not isinstance(value, str):
        return ""
    shown = value if len(value) <= max_length else value[: max_length - 1] + "…"
    return _UNFIT.sub("\ufffd", shown)


def texts(value: object, max_length: int) -> tuple[str, ...]:
    """Return the texts of a list, each cut to `max_length` characters."""
    return tuple(text(item, max_length) for item in value[:_MOST_TEXTS]) if isinstance(value, list) else ()


def objects(value: object) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list."""
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())
