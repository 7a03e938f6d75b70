"""brim's own logs (JSON lines: head, sample, event, end) read as evidence.

A log without an end tells by its boot id whether the machine went down under the run or only the watcher did.
Unknown entries and fields are passed over, as are lines that were torn.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Any

from brim.memory.leaks import classify_trend
from brim.memory.meter import Usage
from brim.monitor.oom.kills import (
    LEAK,
    Bound,
    CurvePoint,
    Effect,
    Evidence,
    Kill,
    Killer,
    ListedTask,
    MachineRoom,
    Sizes,
    Sure,
)
from brim.monitor.oom.log_lines import UNREADABLE, blocks_of, lines_of
from brim.monitor.watching.run_log import End, Head, LogEvent, LogSample, Record, parse_record, size
from brim.records import dataclass
from brim.redact import redact

_CURVE_S = 60.0
_STILL_WRITTEN_S = 30.0
_NEARLY_NOTHING = 0.05  # of the RAM


@dataclass(slots=True)
class LoggedRun:
    """What a run log says, without its middle."""

    path: Path
    name: str
    head: Mapping[str, Any] = field(default_factory=dict)
    facts: Head = field(default_factory=Head)
    end: End | None = None
    events: list[tuple[int, LogEvent]] = field(default_factory=list)
    last: LogSample | None = None
    at_act: LogSample | None = None  # the last sample before brim stopped or killed it
    last_line: int = 0
    pids: set[int] = field(default_factory=set)
    first_t: float | None = None

    @property
    def pid(self) -> int | None:
        return self.facts.pid

    @property
    def command(self) -> str | None:
        return redact(" ".join(self.facts.command)) or None

    @property
    def last_t(self) -> float | None:
        return (self.end.t if self.end else None) or (self.last.t if self.last else None)


@dataclass(frozen=True, slots=True)
class Present:
    """What a log is compared with: this boot, and now."""

    boot_id: str | None
    now: float

    def alive(self, pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            return True
        return True


def is_run_log(path: Path) -> bool:
    """Check whether a file begins as run logs do."""
    try:
        start = next(iter(blocks_of(path)), b"")[:65536]
    except UNREADABLE:
        return False
    return isinstance(parse_record(start.split(b"\n", 1)[0]), Head)


def records(path: Path) -> Iterator[tuple[int, Record]]:
    """Read (line, record) of a log, which may be compressed; what cannot be read ends it."""
    try:
        for number, text in lines_of(blocks_of(path)):
            record = parse_record(text)
            if record is not None:
                yield number, record
    except UNREADABLE:
        return


def read_run(path: Path, name: str) -> LoggedRun:
    run = LoggedRun(path, name)
    for number, record in records(path):
        if isinstance(record, Head):
            if not run.head:
                run.head, run.facts = record.raw, record
        elif isinstance(record, LogSample):
            run.last, run.last_line = record, number
            run.first_t = run.first_t or record.t
            run.pids.update(process.pid for process in record.processes or ())
        elif isinstance(record, LogEvent):
            run.events.append((number, record))
            if record.kind in ("stop", "kill") and run.at_act is None:
                run.at_act = run.last
        else:
            run.end = record
    if run.pid is not None:
        run.pids.add(run.pid)
    return run


def curve(path: Path, until: float) -> tuple[CurvePoint, ...]:
    """Return the last minute before a time."""
    points: deque[CurvePoint] = deque(maxlen=6000)
    for _, record in records(path):
        if isinstance(record, LogSample):
            if record.t > until:
                break
            points.append(CurvePoint(record.t, record.total_bytes, record.available_bytes))
    return tuple(point for point in points if point.t >= until - _CURVE_S)


def kills_of(run: LoggedRun, present: Present) -> list[Kill]:
    """Return what happened to a run, if its log shows that something did."""
    acts = [(number, event) for number, event in run.events if event.kind in ("stop", "kill")]
    killed = any(event.kind == "kill" for _, event in acts)
    ooms = [(number, event) for number, event in run.events if event.kind == "oom" and not event.elsewhere]
    if not ooms and not killed and _died_of_a_kill(run, present):
        ooms = [(number, event) for number, event in run.events if event.kind == "oom"]  # of any process
    if ooms and (not acts or ooms[0][0] < acts[0][0]):  # what brim did after it was to clear away the rest
        return [_kill(run, "kernel", "likely", "brim saw the kernel's count of kills rise", ooms)]
    if acts:
        return [
            _kill(run, "brim", "certain", "brim's log says so", acts, effect="killed" if killed else "asked to end")
        ]
    if run.end is not None:
        if _died_of_a_kill(run, present):
            reason = "it was killed by SIGKILL; brim saw no kill counted, so memory is not proved"
            return [_kill(run, "unknown", "possible", reason, [])]
        return []
    return _cut(run, present)


def _died_of_a_kill(run: LoggedRun, present: Present) -> bool:
    """Check for SIGKILL; a log without an end that nobody writes any more may mean the same."""
    if run.end is None:
        return bool(_cut(run, present))
    return run.end.signal == 9 or run.end.exit_code in (137, -9)


def _cut(run: LoggedRun, present: Present) -> list[Kill]:
    """Explain a log without an end."""
    last, boot = run.last_t, run.head.get("boot_id")
    if last is None or not isinstance(boot, str) or present.boot_id is None:
        return []
    if boot != present.boot_id:
        available, ram = run.last.available_bytes if run.last else None, run.facts.ram_bytes
        free = (available or 0) + ((run.last.swap_free_bytes if run.last else None) or 0)
        starved = available is not None and ram is not None and free < _NEARLY_NOTHING * ram
        reason = "the log has no end, and the machine has another boot id since: it went down under the run" + (
            ", with almost no memory left" if starved else "; the last sample shows no lack of memory"
        )
        return [_kill(run, "unknown", "likely" if starved else "possible", reason, [], effect="restarted")]
    pid = size(run.head.get("watcher_pid")) or run.pid
    if present.now - last < _STILL_WRITTEN_S or (pid is not None and present.alive(pid)):
        return []
    reason = "the log has no end, and the machine is the same boot: the watcher was killed with what it watched"
    return [_kill(run, "unknown", "possible", reason, [])]


def _kill(
    run: LoggedRun,
    killer: Killer,
    sure: Sure,
    reason: str,
    events: list[tuple[int, LogEvent]],
    effect: Effect = "killed",
) -> Kill:
    # While a stopped process exits it gives its memory back: what it held is what it held when it was asked.
    sample = run.at_act if killer == "brim" and run.at_act else run.last
    usage = sample.usage if sample else None
    limited = killer == "brim" or (killer == "kernel" and "cgroup" in run.facts.enforced)  # by brim's own limit
    until = (events[0][1].t if events else None) or run.last_t
    quotes = [Evidence(run.name, number, redact(event.text[:300])) for number, event in events]
    if not quotes:
        quotes = [Evidence(run.name, run.last_line or None, "the last sample" if run.end is None else "the end")]
    return Kill(
        killer,
        "process" if killer == "brim" else "cgroup" if limited else "unknown",
        effect,
        sure,
        reason,
        pid=run.pid,
        name=run.facts.command[0].split()[0].rsplit("/", 1)[-1] if "".join(run.facts.command[:1]).strip() else None,
        command=run.command,
        signal=(run.end.signal if run.end else None) or (9 if effect == "killed" else None),
        when=_moment(until),
        sizes=_sizes(usage) if usage else Sizes(),
        bound=Bound(
            run.facts.limit_bytes if limited else None,
            sample.total_bytes if sample else None,
            "brim's limit" if limited else "",
            text=run.facts.limit_why if limited else "",
        ),
        room=MachineRoom(
            run.facts.ram_bytes,
            run.facts.swap_bytes,
            sample.swap_free_bytes if sample else None,
            sample.available_bytes if sample else None,
        ),
        tasks=_largest(sample),
        curve=curve(run.path, until) if until is not None else (),
        evidence=tuple(quotes),
        notes=(LEAK,) if killer == "brim" and _leaks(run.path) else (),
    )


def _leaks(path: Path) -> bool:
    """Check whether memory grew over the whole run without leveling off."""
    memory = [(record.t, float(record.total_bytes)) for _, record in records(path) if isinstance(record, LogSample)]
    return classify_trend(memory, []).verdict == "leak"


def _sizes(usage: Usage) -> Sizes:
    return Sizes(usage.anon_bytes, usage.shmem_bytes, usage.file_bytes, usage.swap_bytes)


def _largest(sample: LogSample | None) -> tuple[ListedTask, ...]:
    processes = (sample.processes if sample else None) or ()
    tasks = [ListedTask(process.pid, process.name, 0, _sizes(process.usage)) for process in processes]
    return tuple(sorted(tasks, key=lambda task: task.sizes.held_bytes or 0, reverse=True)[:5])


def _moment(t: float | None) -> datetime | None:
    try:
        return None if t is None else datetime.fromtimestamp(t).astimezone()
    except (OverflowError, OSError, ValueError):
        return None
