"""Why did it die? Finds out-of-memory kills on this machine or in given logs, and explains them.

    print(brim.why())
    report = brim.why(1540763, logs=["/var/log/kern.log"], since="3d")

Every source is optional: what could not be read is listed in the report with the reason.

It is a report for people: the last kill in full, those before it in a line each, then what was read.
"""

from __future__ import annotations

import html
import re
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from os import PathLike, uname
from pathlib import Path
from typing import Any

from brim.choices import at_least
from brim.errors import InputError
from brim.memory.meter import boot_id
from brim.oom import brim_log, explain, this_machine
from brim.oom.kills import Evidence, Kill, MachineRoom, Restart, Source, gap_s, less_counted, merged
from brim.oom.scan_log import LogFindings, scan_file, why_unreadable
from brim.records import dataclass
from brim.sizes import format_size
from brim.watching.run_log import log_folder
from brim.wording import Described

_LABEL = 9
_QUOTES = 3
_QUOTED = 260
# What stands before a message: a date, a host, the kernel's name, seconds since boot.
_STAMP = re.compile(
    r"^(?:\d{4}-\d\d-\d\d[T ]\S+|\[[^\]]*\d:\d\d[^\]]*\]|[^\W\d_]{3,5}\.? +\d+ [\d:.]{8,})?"
    r"(?: ?\S+ kernel:)?\s*(?:\[\s*[\d.]+\])?\s*"
)
_SHORT = 8
_NODES = re.compile(r",nodemask=.*?,mems_allowed=[^,]*,")


def kill_lines(kill: Kill, now: datetime, width: int) -> list[str]:
    """One kill, in full."""
    rows = [("when", explain.when_text(kill, now) + (f", on {kill.host}" if kill.host else ""))]
    if kill.command:
        rows.append(("command", kill.command))
    if text := explain.sizes_text(kill):
        rows.append(("held", text))
    if kill.bound.bytes is not None:
        used = f", {format_size(kill.bound.usage_bytes)} in use" if kill.bound.usage_bytes is not None else ""
        where = f" of {kill.bound.group}" if kill.bound.group else ""
        rows.append(("limit", f"{format_size(kill.bound.bytes)} ({kill.bound.kind or 'memory'}){where}{used}"))
    elif kill.bound.text and kill.killer not in ("systemd-oomd", "program"):
        rows.append(("limit", kill.bound.text))
    if text := explain.contents_text(kill):
        rows.append(("filled by", text))
    if text := explain.room_text(kill):
        rows.append(("machine", text))
    if len(kill.tasks) > 1:
        rows.append(("largest", ", ".join(_task(task.name, task.pid, task.sizes.held_bytes) for task in kill.tasks)))
    if text := explain.curve_text(kill.curve, max(min(width - 45, 40), 10)):
        rows.append(("before", text))
    rows += [("note", note) for note in kill.notes]
    rows.append(("sure", f"{kill.sure}: {kill.reason}" if kill.reason else kill.sure))
    rows += [("quoted", quote) for quote in _quotes(kill)]
    rows.append(("try", kill.advice))
    lines = textwrap.wrap(explain.headline(kill), width)
    last = ""
    for label, text in rows:
        lines += _row("" if label == last == "quoted" else label, text, width)
        last = label
    return lines


def _row(label: str, text: str, width: int) -> list[str]:
    indent = " " * (_LABEL + 2)
    wrapped = textwrap.wrap(text, max(width - len(indent), 20), break_on_hyphens=False) or [""]
    return [f"{label:>{_LABEL}}  {wrapped[0]}", *(indent + line for line in wrapped[1:])]


def _task(name: str, pid: int, held: int | None) -> str:
    return f"{name} ({pid}) {format_size(held)}" if held is not None else f"{name} ({pid})"


def _quotes(kill: Kill) -> list[str]:
    """The lines it rests on: where they stand, and what they say behind their stamps."""
    quotes = sorted(kill.evidence, key=_rank)[:_QUOTES]
    shown, source = [], ""
    for quote in sorted(quotes, key=lambda quote: (quote.source, quote.line or 0)):
        where = f"line {quote.line}" if quote.line is not None else ""
        if quote.source != source:
            source = quote.source
            where = f"{source.rsplit('/', 1)[-1]} {where}".strip()
        text = _NODES.sub(",…,", _STAMP.sub("", " ".join(quote.text.split())))
        shown.append(f"{where}: {text if len(text) <= _QUOTED else text[: _QUOTED - 1] + '…'}")
    return shown


def _rank(quote: Evidence) -> int:
    """The lines that name the victim and the limit first, those that only accompany them last."""
    for rank, word in enumerate(("Killed process", "oom-kill:", "limit", "ill process")):
        if word in quote.text:
            return rank
    return 9 if "reaped" in quote.text or "invoked" in quote.text else 4


def short_line(kill: Kill, width: int) -> str:
    when = f"{kill.when:%Y-%m-%d %H:%M}" if kill.when else f"{kill.boot_s:,.0f} s" if kill.boot_s is not None else "?"
    text = f"{when:>16}  {explain.brief(kill)}"
    return text if len(text) <= width else text[: width - 1] + "…"


def report_text(
    kills: Sequence[Kill],
    restarts: Sequence[Restart],
    sources: Sequence[Source],
    remarks: Sequence[str],
    now: datetime,
    width: int = 80,
) -> str:
    """The whole report."""
    lines: list[str] = []
    if kills:
        lines += kill_lines(kills[-1], now, width)
        if len(kills) > 1:
            lines += ["", f"Before that ({len(kills) - 1}):"]
            lines += [short_line(kill, width) for kill in reversed(kills[-1 - _SHORT : -1])]
            if len(kills) > _SHORT + 1:
                lines.append(f"{'':>16}  … and {len(kills) - _SHORT - 1} older (--json has them all)")
        if text := explain.summary(kills):
            lines += ["", *textwrap.wrap(f"In all: {text}.", width)]
    else:
        lines.append("No record of an out-of-memory kill was found.")
    for restart in restarts[-3:]:
        lines += textwrap.wrap(f"• {restart_text(restart)}", width, subsequent_indent="  ")
    for remark in remarks:
        lines += textwrap.wrap(f"• {remark}", width, subsequent_indent="  ")
    lines += ["", *_sources(sources, width)]
    return "\n".join(lines)


def restart_text(restart: Restart) -> str:
    last = f"{restart.last_sign:%Y-%m-%d %H:%M:%S}" if restart.last_sign else "an unknown time"
    return (
        f"The machine came up again without having been shut down: its last sign of life was at {last} "
        f"({restart.source}). Power, a panic or memory; there is no record."
    )


def _sources(sources: Sequence[Source], width: int) -> list[str]:
    read = [source for source in sources if not source.problem]
    failed = [source for source in sources if source.problem]
    lines = []
    if read:
        names = ", ".join(source.name + (f" ({source.note})" if source.note else "") for source in read)
        lines += _row("read", names, width)
    for source in failed:
        label = "not read" if not source.found else "cut"
        lines += _row(label, f"{source.name}: {source.problem}", width)
    return lines


_AGO = re.compile(r"(\d{1,6})\s*(s|m|min|h|d|w)")
_SAME_DEATH_S = 60.0
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True, slots=True, repr=False)
class WhyReport(Described):
    """Kills, oldest first, and what they were found in. As text it is for people; `facts` is for programs."""

    kills: tuple[Kill, ...]
    restarts: tuple[Restart, ...]
    sources: tuple[Source, ...]
    summary: str
    remarks: tuple[str, ...]
    made: datetime

    def text(self, width: int = 80) -> str:
        return report_text(self.kills, self.restarts, self.sources, self.remarks, self.made, width)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text(100))}</pre>"

    @property
    def facts(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "kills": [_facts(kill) for kill in self.kills],
            "restarts": [_plain(asdict(restart)) for restart in self.restarts],
            "sources": [asdict(source) for source in self.sources],
            "summary": self.summary,
            "remarks": list(self.remarks),
        }


def why(
    pid: int | None = None,
    *,
    logs: Iterable[str | PathLike[str]] = (),
    since: str | datetime | None = None,
    boot: int | None = None,
    runs: Iterable[str | PathLike[str]] = (),
    root: Path = Path("/"),
) -> WhyReport:
    """Explain the out-of-memory kills of this machine, or those in `logs` ("-" is stdin) and nothing else.

    `since` is "today", "yesterday", "2h", "3d" or a time; `boot` is 0 for this boot, -1 for the one before;
    `runs` are logs of brim that lie elsewhere than in its own folder.
    """
    at_least("pid", pid, 1)
    now = datetime.now().astimezone()
    begin = parse_since(since, now) if isinstance(since, str) else since
    begin = begin.astimezone() if begin is not None else None
    present = brim_log.Present(boot_id(root / "proc"), time.time())
    paths = [Path("/dev/stdin" if log == "-" else log) for log in logs]
    remarks: list[str] = []
    if paths:
        found, watched = _given(paths)
        counted: list[Kill] = []
    else:
        found, watched, counted = _here(begin, boot, root, present, remarks)
        watched += [
            brim_log.read_run(Path(path), Path(path).name) for path in runs if Path(path).parent != log_folder()
        ]
    for run in watched:
        found.kills += _of_run(run, present, found.kills)
    kills = merged(_completed(kill, root, bool(paths)) for kill in found.kills)
    kills = merged([*kills, *less_counted(counted, kills)])
    kills = [_with_curve(kill, watched) for kill in kills]
    if begin is not None:
        kills = [kill for kill in kills if kill.when is None or kill.when >= begin]
    if boot is not None:
        kills = [kill for kill in kills if kill.boot == boot]
    if pid is not None:
        kills = _only(pid, kills, present, remarks)
    restarts = [r for r in found.restarts if begin is None or r.first_sign is None or r.first_sign >= begin]
    explained = tuple(explain.explained(kill) for kill in kills)
    return WhyReport(explained, tuple(restarts), tuple(found.sources), explain.summary(explained), tuple(remarks), now)


def parse_since(text: str, now: datetime) -> datetime:
    """The time that a person means by "today", "2h" or an ISO date."""
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if text in ("today", "yesterday"):
        return midnight - timedelta(days=text == "yesterday")
    if match := _AGO.fullmatch(text.strip().lower()):
        return now - timedelta(seconds=int(match[1]) * _SECONDS[match[2]])
    try:
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise InputError(
            f"{text!r} is not a time.", hint="Write today, yesterday, 2h, 3d, or 2026-05-31T14:00."
        ) from None


def _given(paths: list[Path]) -> tuple[LogFindings, list[brim_log.LoggedRun]]:
    """What the given files say. A file that is not there is the caller's mistake, not a finding."""
    found, runs = LogFindings(), []
    for path in paths:
        _must_be_readable(path)
        if path.is_file() and brim_log.is_run_log(path):  # a pipe can be read only once
            runs.append(brim_log.read_run(path, str(path)))
            found.sources.append(Source(str(path), note="a log of brim"))
        else:
            one = scan_file(path, str(path), terminals=True)
            problem = one.sources[0].problem
            if problem and not one.kills:
                raise InputError(f"{path} cannot be read: {problem}.", path=str(path))
            found.add(one)
    return found, runs


def _must_be_readable(path: Path) -> None:
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder.", hint="Name the log files in it.", path=str(path))
        if path.is_file() or not path.exists():
            with open(path, "rb"):
                pass
    except OSError as error:
        hint = "Try it as root (sudo)." if isinstance(error, PermissionError) else "Check the name."
        raise InputError(f"{path} cannot be read: {why_unreadable(error)}.", hint=hint, path=str(path)) from None


def _here(
    begin: datetime | None, boot: int | None, root: Path, present: brim_log.Present, remarks: list[str]
) -> tuple[LogFindings, list[brim_log.LoggedRun], list[Kill]]:
    """Everything this machine has, and the kills that only counters know."""
    found = this_machine.ring_buffer(root) if boot in (None, 0) else LogFindings()
    found.add(this_machine.journal(begin, boot))
    found.add(this_machine.log_files(root, begin))
    runs, problem = _runs(begin, present, boot)
    found.sources.append(Source(str(log_folder()), problem, len(runs), f"{len(runs)} logs of brim"))
    counted: list[Kill] = []
    if boot in (None, 0):
        counted, sources, total = this_machine.counters(root)
        found.sources += sources
        known = len({kill.pid for kill in found.kills if kill.killer == "kernel" and kill.boot == 0 and kill.pid})
        if total and total > known and begin is None:
            remarks.append(
                f"The kernel counted {total} kills since boot (/proc/vmstat); records of {known} could be read."
            )
    return found, runs, counted


def _runs(begin: datetime | None, present: brim_log.Present, boot: int | None) -> tuple[list[brim_log.LoggedRun], str]:
    folder = log_folder()
    try:
        paths = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    except OSError as error:
        return [], why_unreadable(error)
    if begin is not None:
        paths = [path for path in paths if path.stat().st_mtime >= begin.timestamp()]
    runs = [brim_log.read_run(path, path.name) for path in paths]
    return [run for run in runs if boot != 0 or run.head.get("boot_id") == present.boot_id], ""


def _of_run(run: brim_log.LoggedRun, present: brim_log.Present, kills: list[Kill]) -> list[Kill]:
    """What a log of brim tells that the kernel's records do not: they know which of its processes it was."""
    told = []
    for kill in brim_log.kills_of(run, present):
        by_kernel = kill.killer in ("kernel", "unknown") and kill.effect == "killed"
        if by_kernel and any(
            record.killer == "kernel" and record.pid in run.pids and (gap_s(record, kill) or 0) < _SAME_DEATH_S
            for record in kills
        ):
            continue
        told.append(replace(kill, boot=0 if run.head.get("boot_id") == present.boot_id else None))
    return told


def _completed(kill: Kill, root: Path, given: bool) -> Kill:
    """A kill on this machine with the machine's memory, where its record does not say it."""
    here = not given or (kill.host is not None and kill.host in (uname().nodename, uname().nodename.split(".")[0]))
    if here and kill.scope != "gpu" and kill.room.ram_bytes is None and kill.room == MachineRoom():
        return replace(kill, room=this_machine.room(root))
    return kill


def _with_curve(kill: Kill, runs: list[brim_log.LoggedRun]) -> Kill:
    """The minute before a kill, if brim was watching."""
    if kill.curve or kill.when is None or kill.pid is None:
        return kill
    at = kill.when.timestamp()
    for run in runs:
        first, last = run.first_t, run.last_t
        if kill.pid in run.pids and first is not None and last is not None and first - 60 <= at <= last + 60:
            return replace(kill, curve=brim_log.curve(run.path, at), command=kill.command or run.command)
    return kill


def _only(pid: int, kills: list[Kill], present: brim_log.Present, remarks: list[str]) -> list[Kill]:
    chosen = [kill for kill in kills if pid in (kill.pid, kill.chosen_pid)]
    if not chosen:
        state = "is running" if present.alive(pid) else "is not running"
        others = f" Kills of other processes: {len(kills)} (run brim why without a PID)." if kills else ""
        remarks.append(f"No kill of process {pid} is recorded; it {state}.{others}")
        seen = next((kill for kill in reversed(kills) if any(task.pid == pid for task in kill.tasks)), None)
        if seen is not None:
            remarks.append(f"It was among the largest when {explain.victim(seen)} was killed.")
    return chosen


def _facts(kill: Kill) -> dict[str, Any]:
    facts = _plain(asdict(kill))
    facts["headline"] = explain.headline(kill)
    facts["sizes"]["held_bytes"] = kill.sizes.held_bytes
    return facts


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Dates as text, tuples as lists."""
    return {key: value.isoformat() if isinstance(value, datetime) else value for key, value in facts.items()}
