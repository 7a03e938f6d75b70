"""brim's own logs (JSON lines: head, sample, event, end) read as evidence.

A log without an end tells by its boot id whether the machine went down under the run or only the watcher did.
Unknown entries and fields are passed over, as are lines that were torn.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Any

from brim.memory.guard import judge
from brim.oom.kills import LEAK, Bound, CurvePoint, Effect, Evidence, Kill, Killer, ListedTask, MachineRoom, Sizes, Sure
from brim.oom.log_lines import UNREADABLE, blocks_of, lines_of
from brim.records import dataclass
from brim.redact import redact

_CURVE_S = 60.0
_STILL_WRITTEN_S = 30.0
_NEARLY_NOTHING = 0.05  # of the RAM
Entry = dict[str, Any]


@dataclass(slots=True)
class LoggedRun:
    """What a log says, without its middle."""

    path: Path
    name: str
    head: Entry = field(default_factory=dict)
    end: Entry | None = None
    events: list[tuple[int, Entry]] = field(default_factory=list)
    last: Entry = field(default_factory=dict)  # the last sample
    at_act: Entry = field(default_factory=dict)  # the last sample before brim stopped or killed it
    last_line: int = 0
    pids: set[int] = field(default_factory=set)
    first_t: float | None = None

    @property
    def pid(self) -> int | None:
        return _int(self.head.get("pid"))

    @property
    def command(self) -> str | None:
        words = self.head.get("command")
        if isinstance(words, list):
            return redact(" ".join(map(str, words))) or None
        return redact(words) if isinstance(words, str) else None

    @property
    def last_t(self) -> float | None:
        return _float((self.end or {}).get("t")) or _float(self.last.get("t"))


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
    """Whether a file begins as brim's logs do."""
    try:
        start = next(iter(blocks_of(path)), b"")[:65536]
    except UNREADABLE:
        return False
    entry = _entry(start.split(b"\n", 1)[0].decode("utf-8", "replace"))
    return entry is not None and entry.get("type") == "head"


def entries(path: Path) -> Iterator[tuple[int, Entry]]:
    """(line, entry); what cannot be read ends it."""
    try:
        for number, text in lines_of(blocks_of(path)):
            entry = _entry(text)
            if entry is not None:
                yield number, entry
    except UNREADABLE:
        return


def read_run(path: Path, name: str) -> LoggedRun:
    run = LoggedRun(path, name)
    for number, entry in entries(path):
        kind = entry["type"]
        if kind == "head":
            run.head = run.head or entry
        elif kind == "sample":
            run.last, run.last_line = entry, number
            run.first_t = run.first_t or _float(entry.get("t"))
            run.pids.update(pid for process in _processes(entry) if (pid := _int(process.get("pid"))) is not None)
        elif kind == "event":
            run.events.append((number, entry))
            if entry.get("kind") in ("stop", "kill") and not run.at_act:
                run.at_act = run.last
        elif kind == "end":
            run.end = entry
    if run.pid is not None:
        run.pids.add(run.pid)
    return run


def curve(path: Path, until: float) -> tuple[CurvePoint, ...]:
    """The last minute before a time."""
    points: deque[CurvePoint] = deque(maxlen=6000)
    for _, entry in entries(path):
        t, total = _float(entry.get("t")), _int(entry.get("total_bytes"))
        if entry["type"] != "sample" or t is None or total is None:
            continue
        if t > until:
            break
        points.append(CurvePoint(t, total, _int(entry.get("available_bytes"))))
    return tuple(point for point in points if point.t >= until - _CURVE_S)


def kills_of(run: LoggedRun, present: Present) -> list[Kill]:
    """What happened to a run, if its log shows that something did."""
    acts = [(number, event) for number, event in run.events if event.get("kind") in ("stop", "kill")]
    ooms = [(number, event) for number, event in run.events if event.get("kind") == "oom" and not event.get("machine")]
    if not ooms and _died_of_a_kill(run, present) and not any(event.get("kind") == "kill" for _, event in acts):
        ooms = [(number, event) for number, event in run.events if event.get("kind") == "oom"]  # of anybody's
    if ooms and (not acts or ooms[0][0] < acts[0][0]):  # what brim did after it was to clear away the rest
        return [_kill(run, "kernel", "likely", "brim saw the kernel's count of kills rise", ooms)]
    if acts:
        killed = any(event.get("kind") == "kill" for _, event in acts)
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
    """Or may have, because the log has no end and nobody writes it any more."""
    if run.end is None:
        return bool(_cut(run, present))
    return _int(run.end.get("signal")) == 9 or _int(run.end.get("exit_code")) in (137, -9)


def _cut(run: LoggedRun, present: Present) -> list[Kill]:
    """A log without an end."""
    last, boot = run.last_t, run.head.get("boot_id")
    if last is None or not isinstance(boot, str) or present.boot_id is None:
        return []
    if boot != present.boot_id:
        available, ram = _int(run.last.get("available_bytes")), _int(_map(run.head.get("machine")).get("ram_bytes"))
        free = (available or 0) + (_int(run.last.get("swap_free_bytes")) or 0)
        starved = available is not None and ram is not None and free < _NEARLY_NOTHING * ram
        reason = "the log has no end, and the machine has another boot id since: it went down under the run" + (
            ", with almost no memory left" if starved else "; the last sample shows no lack of memory"
        )
        return [_kill(run, "unknown", "likely" if starved else "possible", reason, [], effect="restarted")]
    pid = _int(run.head.get("watcher_pid")) or run.pid
    if present.now - last < _STILL_WRITTEN_S or (pid is not None and present.alive(pid)):
        return []
    reason = "the log has no end, and the machine is the same boot: the watcher was killed with what it watched"
    return [_kill(run, "unknown", "possible", reason, [])]


def _kill(
    run: LoggedRun, killer: Killer, sure: Sure, reason: str, events: list[tuple[int, Entry]], effect: Effect = "killed"
) -> Kill:
    # While a stopped process exits it gives its memory back: what it held is what it held when it was asked.
    sample = run.at_act if killer == "brim" and run.at_act else run.last
    machine, limit = _map(run.head.get("machine")), _map(run.head.get("limit"))
    held = killer == "brim" or (killer == "kernel" and "cgroup" in str(limit.get("enforced")))  # brim's own limit
    t = _float(events[0][1].get("t")) if events else None
    until = t or run.last_t
    quotes = [
        Evidence(run.name, number, redact(str(event.get("text") or event.get("kind"))[:300]))
        for number, event in events
    ]
    if not quotes:
        quotes = [Evidence(run.name, run.last_line or None, "the last sample" if run.end is None else "the end")]
    return Kill(
        killer,
        "process" if killer == "brim" else "cgroup" if held else "unknown",
        effect,
        sure,
        reason,
        pid=run.pid,
        name=_program(run.head.get("command")),
        command=run.command,
        signal=_int((run.end or {}).get("signal")) or (9 if effect == "killed" else None),
        when=_moment(until),
        sizes=Sizes(
            _int(sample.get("anon_bytes")),
            _int(sample.get("shmem_bytes")),
            _int(sample.get("file_bytes")),
            _int(sample.get("swap_bytes")),
        ),
        bound=Bound(
            _int(limit.get("bytes")) if held else None,
            _int(sample.get("total_bytes")),
            "brim's limit" if held else "",
            text=str(limit.get("why") or "") if held else "",
        ),
        room=MachineRoom(
            _int(machine.get("ram_bytes")),
            _int(machine.get("swap_bytes")),
            _int(sample.get("swap_free_bytes")),
            _int(sample.get("available_bytes")),
        ),
        tasks=_largest(sample),
        curve=curve(run.path, until) if until is not None else (),
        evidence=tuple(quotes),
        notes=(LEAK,) if killer == "brim" and _leaks(run.path) else (),
    )


def _leaks(path: Path) -> bool:
    """Whether memory grew over the whole run without levelling off."""
    memory = [
        (t, float(total))
        for _, entry in entries(path)
        if entry["type"] == "sample"
        and (t := _float(entry.get("t"))) is not None
        and (total := _int(entry.get("total_bytes"))) is not None
    ]
    return judge(memory, []).verdict == "leak"


def _largest(sample: Entry) -> tuple[ListedTask, ...]:
    tasks = [
        ListedTask(
            _int(process.get("pid")) or 0,
            str(process.get("name") or "?"),
            _int(process.get("uid")) or 0,
            Sizes(*(_int(process.get(f"{key}_bytes")) for key in ("anon", "shmem", "file", "swap"))),
        )
        for process in _processes(sample)
    ]
    return tuple(sorted(tasks, key=lambda task: task.sizes.held_bytes or 0, reverse=True)[:5])


def _processes(entry: Entry) -> list[Entry]:
    found = entry.get("processes")
    return [process for process in found if isinstance(process, dict)] if isinstance(found, list) else []


def _program(command: object) -> str | None:
    words = command if isinstance(command, list) else str(command or "").split()
    return str(words[0]).rsplit("/", 1)[-1] if words else None


def _entry(text: str) -> Entry | None:
    if not text.startswith("{"):
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("type"), str) else None


def _moment(t: float | None) -> datetime | None:
    try:
        return None if t is None else datetime.fromtimestamp(t).astimezone()
    except (OverflowError, OSError, ValueError):
        return None


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _int(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18 else None


def _float(value: object) -> float | None:
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12 else None
    )
