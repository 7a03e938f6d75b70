"""Find kills in the logs of runs that brim watched.

A log without an end shows by its boot id whether the machine went down during the run or only the watcher was killed.
"""

from __future__ import annotations

import os
from collections import deque
from datetime import datetime
from pathlib import Path

from brim.memory.meter import Usage
from brim.monitor.log_records import LogEvent, LogSample, read_records, size
from brim.monitor.oom.kills import (
    LEAK,
    UNKNOWN_TREND,
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
from brim.monitor.run_log import RunLog
from brim.records import dataclass
from brim.redact import redact

_TREND_NOTES = (("leak", LEAK), ("short", UNKNOWN_TREND))
_CURVE_S = 60.0
_STILL_WRITTEN_S = 30.0
_NEARLY_NOTHING = 0.05  # of the RAM


@dataclass(frozen=True, slots=True)
class Present:
    """The present boot and time, with which a log is compared."""

    boot_id: str | None
    now: float

    def is_running(self, pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            return True
        return True


def command_of(run: RunLog) -> str | None:
    return redact(" ".join(run.head.command)) or None


def curve(path: Path, until: float) -> tuple[CurvePoint, ...]:
    """Return the last minute before a time."""
    points: deque[CurvePoint] = deque(maxlen=6000)
    for _, record in read_records(path):
        if isinstance(record, LogSample):
            if record.t > until:
                break
            points.append(CurvePoint(record.t, record.total_bytes, record.available_bytes))
    return tuple(point for point in points if point.t >= until - _CURVE_S)


def kills_of(run: RunLog, present: Present) -> list[Kill]:
    """Return the kill or stop of a run, if its log shows one."""
    acts = [event for event in run.events if event.kind in ("stop", "kill")]
    is_killed = any(event.kind == "kill" for event in acts)
    unended = [] if run.end is not None else _explain_cut(run, present)
    died = bool(unended) if run.end is None else run.end.signal == 9 or run.end.exit_code in (137, -9)
    by_any = not is_killed and died and all(e.elsewhere for e in run.events if e.kind == "oom")
    ooms = [event for event in run.events if event.kind == "oom" and (by_any or not event.elsewhere)]
    if ooms and (not acts or ooms[0].line < acts[0].line):  # brim only killed the rest of it afterwards
        return [_kill(run, "kernel", "likely", "the kernel's count of kills rose while brim was watching", ooms)]
    if acts:
        effect: Effect = "killed" if is_killed else "asked to end"
        return [_kill(run, "brim", "certain", "brim logged it", acts, effect)]
    if run.end is not None and died:
        reason = "SIGKILL ended it, and no kill for memory was counted, so memory is not proved"
        return [_kill(run, "unknown", "possible", reason, [])]
    return unended


def _explain_cut(run: RunLog, present: Present) -> list[Kill]:
    """Explain a log without an end."""
    last, head = run.last_sample, run.head
    if last is None or not head.boot_id or present.boot_id is None:
        return []
    if head.boot_id != present.boot_id:
        free = (last.available_bytes or 0) + (last.swap_free_bytes or 0)
        is_starved = (
            last.available_bytes is not None and head.ram_bytes is not None and free < _NEARLY_NOTHING * head.ram_bytes
        )
        reason = "the log has no end, and the machine has another boot id since: it went down under the run" + (
            ", with almost no memory left" if is_starved else "; the last sample shows no lack of memory"
        )
        return [_kill(run, "unknown", "likely" if is_starved else "possible", reason, [], effect="restarted")]
    pid = size(head.raw.get("watcher_pid")) or head.pid
    if present.now - last.t < _STILL_WRITTEN_S or (pid is not None and present.is_running(pid)):
        return []
    reason = "the log has no end, and the machine was not restarted: the watcher was killed together with the run"
    return [_kill(run, "unknown", "possible", reason, [])]


def _kill(
    run: RunLog, killer: Killer, sure: Sure, reason: str, events: list[LogEvent], effect: Effect = "killed"
) -> Kill:
    # A stopped process frees its memory while it exits, so the sample at the request counts.
    sample = run.sample_at_stop if killer == "brim" and run.sample_at_stop else run.last_sample
    head, end = run.head, run.end
    is_limited = killer == "brim" or (killer == "kernel" and "cgroup" in head.enforced)  # by brim's own limit
    until = events[0].t if events else (end.t if end else None) or (sample.t if sample else None)
    quotes = [Evidence(run.path.name, event.line, redact(event.text[:300])) for event in events]
    if not quotes:
        quotes = [Evidence(run.path.name, run.last_line or None, "the last sample" if end is None else "the end")]
    tasks = [ListedTask(p.pid, p.name, 0, _sizes(p.usage)) for p in (sample.processes if sample else None) or ()]
    try:
        when = None if until is None else datetime.fromtimestamp(until).astimezone()
    except (OverflowError, OSError, ValueError):
        when = None
    return Kill(
        killer,
        "process" if killer == "brim" else "cgroup" if is_limited else "unknown",
        effect,
        sure,
        reason,
        pid=head.pid,
        name=head.command[0].split()[0].rsplit("/", 1)[-1] if "".join(head.command[:1]).strip() else None,
        command=command_of(run),
        signal=(end.signal if end else None) or (9 if effect == "killed" else None),
        when=when,
        sizes=_sizes(sample.usage) if sample else Sizes(),
        bound=Bound(
            head.limit_bytes if is_limited else None,
            sample.total_bytes if sample else None,
            "brim's limit" if is_limited else "",
            text=head.limit_why if is_limited else "",
        ),
        room=MachineRoom(
            head.ram_bytes,
            head.swap_bytes,
            sample.swap_free_bytes if sample else None,
            sample.available_bytes if sample else None,
        ),
        tasks=tuple(sorted(tasks, key=lambda task: task.sizes.held_bytes or 0, reverse=True)[:5]),
        curve=curve(run.path, until) if until is not None else (),
        evidence=tuple(quotes),
        notes=tuple(note for verdict, note in _TREND_NOTES if killer == "brim" and run.trend.verdict == verdict),
    )


def _sizes(usage: Usage) -> Sizes:
    return Sizes(usage.anon_bytes, usage.shmem_bytes, usage.file_bytes, usage.swap_bytes)
