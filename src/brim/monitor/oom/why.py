"""Find the out-of-memory kills of this machine or in log files, and explain them.

    print(brim.why())
    report = brim.why(1540763, logs=["/var/log/kern.log"], since="3d")

Every source is optional: the report lists the sources that could not be read, with the reason. The text of a report
shows the last kill in full, earlier ones in one line each, then the sources.
"""

from __future__ import annotations

import html
import re
import textwrap
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from os import PathLike, uname
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.memory.meter import boot_id, meminfo
from brim.monitor.log_records import is_run_log
from brim.monitor.log_writer import log_folder, recent_logs
from brim.monitor.oom import brim_log, explain, this_machine
from brim.monitor.oom.kills import Evidence, Kill, MachineRoom, Restart, Source
from brim.monitor.oom.merge_kills import gap_s, in_order, merge, uncounted
from brim.monitor.oom.scan_log import LogFindings, reading_problem, scan_file
from brim.monitor.run_log import RunLog, read_runs
from brim.records import dataclass
from brim.sizes import format_size
from brim.wording import Described

_LABEL_WIDTH = 11
_QUOTES = 3
_QUOTE_WIDTH = 260
# The prefix of a message: a date, a host, the kernel's name, seconds since boot.
_PREFIX = re.compile(
    r"^(?:\d{4}-\d\d-\d\d[T ]\S+|\[[^\]]*\d:\d\d[^\]]*\]|[^\W\d_]{3,5}\.? +\d+ [\d:.]{8,})?"
    r"(?: ?\S+ kernel:)?\s*(?:\[\s*[\d.]+\])?\s*"
)
_SHORT_LINES = 8
_NODES = re.compile(r",nodemask=.*?,mems_allowed=[^,]*,")
_QUOTE_ORDER = ("Killed process", "oom-kill:", "limit", "ill process")


def kill_lines(kill: Kill, now: datetime, width: int) -> list[str]:
    """Return the full text of one kill."""
    bound = kill.bound
    in_use = f", {format_size(bound.usage_bytes)} in use" if bound.usage_bytes is not None else ""
    limit = ""
    if bound.bytes is not None:
        group = f" of {bound.group}" if bound.group else ""
        limit = f"{format_size(bound.bytes)} ({bound.kind or 'memory'}){group}{in_use}"
    elif bound.text and kill.killer not in ("systemd-oomd", "program"):
        limit = bound.text + in_use
    tasks = [
        f"{task.name} ({task.pid})" + (f" {format_size(size)}" if (size := task.sizes.held_bytes) is not None else "")
        for task in kill.tasks
    ]
    memory = explain.memory_rows(kill)
    rows = [
        ("when", explain.when_text(kill, now) + (f", on {kill.host}" if kill.host else "")),
        ("command", kill.command or ""),
        ("memory used", memory["memory used"]),
        ("limit", limit),
        ("breakdown", memory["breakdown"]),
        ("machine", memory["machine"]),
        ("largest", ", ".join(tasks) if len(tasks) > 1 else ""),
        ("before", explain.curve_text(kill.curve, max(min(width - 47, 40), 10))),
        *(("note", note) for note in kill.notes),
        ("confidence", f"{kill.sure}: {kill.reason}" if kill.reason else kill.sure),
        *(("evidence" if number == 0 else "", quote) for number, quote in enumerate(_quotes(kill))),
        ("suggestion", kill.advice),
    ]
    lines = textwrap.wrap(explain.headline(kill), width)
    for label, text in rows:
        if text:
            lines += _row(label, text, width)
    return lines


def _row(label: str, text: str, width: int) -> list[str]:
    indent = " " * (_LABEL_WIDTH + 2)
    wrapped = textwrap.wrap(text, max(width - len(indent), 20), break_on_hyphens=False) or [""]
    return [f"{label:>{_LABEL_WIDTH}}  {wrapped[0]}", *(indent + line for line in wrapped[1:])]


def _quotes(kill: Kill) -> list[str]:
    """Return the most important lines of the evidence, without their prefixes."""

    def rank(quote: Evidence) -> int:
        ranks = [number for number, phrase in enumerate(_QUOTE_ORDER) if phrase in quote.text]
        return ranks[0] if ranks else 9 if "reaped" in quote.text or "invoked" in quote.text else len(_QUOTE_ORDER)

    shown, source = [], ""
    quotes = sorted(kill.evidence, key=rank)[:_QUOTES]
    for quote in sorted(quotes, key=lambda quote: (quote.source, quote.line or 0)):
        position = f"line {quote.line}" if quote.line is not None else ""
        if quote.source != source:
            source = quote.source
            position = f"{source.rsplit('/', 1)[-1]} {position}".strip()
        text = _NODES.sub(",…,", _PREFIX.sub("", " ".join(quote.text.split())))
        shown.append(f"{position}: {text if len(text) <= _QUOTE_WIDTH else text[: _QUOTE_WIDTH - 1] + '…'}")
    return shown


_AGO = re.compile(r"(\d{1,6})\s*(s|m|min|h|d|w)")
_SAME_DEATH_S = 60.0
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True, slots=True, repr=False)
class WhyReport(Described):
    """Kills, oldest first, and the sources that were read. `str()` is for people, `facts` for programs."""

    kills: tuple[Kill, ...]
    restarts: tuple[Restart, ...]
    sources: tuple[Source, ...]
    summary: str
    remarks: tuple[str, ...]
    made: datetime

    def text(self, width: int = 80) -> str:
        """Return the report as text of at most `width` characters per line."""
        kills = self.kills
        if not kills:
            lines = ["No record of an out-of-memory kill was found."]
        else:
            lines = kill_lines(kills[-1], self.made, width)
            if len(kills) > 1:
                lines += ["", f"Before that ({len(kills) - 1}):"]
                for kill in reversed(kills[-1 - _SHORT_LINES : -1]):
                    boot_time = f"{kill.boot_s:,.0f} s" if kill.boot_s is not None else "?"
                    when = f"{kill.when:%Y-%m-%d %H:%M}" if kill.when else boot_time
                    line = f"{when:>16}  {explain.brief(kill)}"
                    lines.append(line if len(line) <= width else line[: width - 1] + "…")
                if len(kills) > _SHORT_LINES + 1:
                    lines.append(f"{'':>16}  … and {len(kills) - _SHORT_LINES - 1} earlier (--json lists all)")
            if self.summary:
                lines += ["", *textwrap.wrap(f"In total: {self.summary}.", width)]
        remarks = []
        for restart in self.restarts[-3:]:
            last = f"{restart.last_sign:%Y-%m-%d %H:%M:%S}" if restart.last_sign else "an unknown time"
            remarks.append(
                f"The machine booted without a shutdown before; its last log entry was at {last} ({restart.source}). "
                "A power failure, a panic or a lack of memory can be the reason; the log does not show it."
            )
        for remark in (*remarks, *self.remarks):
            lines += textwrap.wrap(f"• {remark}", width, subsequent_indent="  ")
        lines.append("")
        names = [
            source.name + (f" ({source.note})" if source.note else "") for source in self.sources if not source.problem
        ]
        if names:
            lines += _row("read", ", ".join(names), width)
        for source in self.sources:
            if source.problem:
                label = "partly read" if source.found else "not read"
                lines += _row(label, f"{source.name}: {source.problem}", width)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text(100))}</pre>"

    @property
    def facts(self) -> dict[str, Any]:
        """The report as plain values, as `--json` prints it."""

        def plain(facts: dict[str, Any]) -> dict[str, Any]:
            return {key: value.isoformat() if isinstance(value, datetime) else value for key, value in facts.items()}

        kills = [{**plain(asdict(kill)), "headline": explain.headline(kill)} for kill in self.kills]
        for facts, kill in zip(kills, self.kills, strict=True):
            facts["sizes"]["held_bytes"] = kill.sizes.held_bytes
        return {
            "kills": kills,
            "restarts": [plain(asdict(restart)) for restart in self.restarts],
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
    """Explain the out-of-memory kills of this machine, or only those in `logs`.

    Args:
        pid: Report only kills of this process.
        logs: Read these files and not the machine; "-" is stdin.
        since: Ignore earlier kills: "today", "yesterday", "2h", "3d" or a time.
        boot: Report only one boot: 0 is the current one, -1 the previous one.
        runs: Further logs of `brim run` and `brim watch`, in other folders.
        root: The root folder of the machine.

    Returns:
        The kills, each with its evidence and a suggestion, and the sources that were read.

    Raises:
        InputError: A log does not exist, or `since` is not a time.

    Examples:
        >>> import brim
        >>> print(brim.why(logs=["tests/fixtures/oom/k3.13_memcg.log"]).kills[0].name)
        tokenise
    """
    now = datetime.now().astimezone()
    start = parse_since(since, now) if isinstance(since, str) else since
    start = start.astimezone() if start is not None else None
    present = brim_log.Present(boot_id(root / "proc"), time.time())
    paths = [Path("/dev/stdin" if log == "-" else log) for log in logs]
    remarks: list[str] = []
    counters: list[Kill] = []
    if paths:
        findings, watched = _read_logs(paths)
    else:
        findings, watched, counters = _read_machine(start, boot, root, present, remarks)
        watched += [run for path in runs if Path(path).parent != log_folder() for run in _read_runs(Path(path))]
    for run in watched:
        findings.kills += _kills_of_run(run, present, findings.kills)
    reports, host, sizes = [], uname().nodename, meminfo(root / "proc/meminfo")
    here = MachineRoom(sizes.get("MemTotal"), sizes.get("SwapTotal"))
    for kill in findings.kills:  # a record on this machine may lack the memory of the machine
        is_local = not paths or kill.host in (host, host.split(".")[0])
        if is_local and kill.scope != "gpu" and kill.room == MachineRoom():
            kill = replace(kill, room=here)
        reports.append(kill)
    kills = merge(reports)
    kills = [_with_curve(kill, watched) for kill in in_order([*kills, *uncounted(counters, kills)])]
    kills = [
        kill
        for kill in kills
        if (start is None or kill.when is None or kill.when >= start) and (boot is None or kill.boot == boot)
    ]
    if pid is not None:
        all_kills, kills = kills, [kill for kill in kills if pid in (kill.pid, kill.chosen_pid)]
        if not kills:
            state = "is running" if present.is_running(pid) else "is not running"
            hint = f" Kills of other processes: {len(all_kills)} (run brim why without a PID)." if all_kills else ""
            remarks.append(f"No kill of process {pid} is recorded; it {state}.{hint}")
            listing = next((kill for kill in reversed(all_kills) if any(task.pid == pid for task in kill.tasks)), None)
            if listing is not None:
                remarks.append(f"It was one of the largest processes when {explain.victim(listing)} was killed.")
    restarts = [r for r in findings.restarts if start is None or r.first_sign is None or r.first_sign >= start]
    results = tuple(explain.explain(kill) for kill in kills)
    return WhyReport(results, tuple(restarts), tuple(findings.sources), explain.summary(results), tuple(remarks), now)


def parse_since(text: str, now: datetime) -> datetime:
    """Return the time that "today", "2h" or an ISO date means."""
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


def _read_logs(paths: list[Path]) -> tuple[LogFindings, list[RunLog]]:
    """Read log files; a missing file is an error of the caller, not a finding."""
    findings, runs = LogFindings(), []
    for path in paths:
        try:
            if path.is_dir():
                raise InputError(f"{path} is a folder.", hint="Name the log files in it.", path=str(path))
            if path.is_file() or not path.exists():
                with open(path, "rb"):
                    pass
        except OSError as error:
            hint = "Try it as root (sudo)." if isinstance(error, PermissionError) else "Check the name."
            raise InputError(f"{path} cannot be read: {reading_problem(error)}.", hint=hint, path=str(path)) from None
        if path.is_file() and is_run_log(path):  # a pipe can be read only once
            runs += _read_runs(path)
            findings.sources.append(Source(str(path), note="a log of brim"))
        else:
            scanned = scan_file(path, str(path), terminals=True)
            if scanned.sources[0].problem and not scanned.kills:
                raise InputError(f"{path} cannot be read: {scanned.sources[0].problem}.", path=str(path))
            findings.add(scanned)
    return findings, runs


def _read_machine(
    start: datetime | None, boot: int | None, root: Path, present: brim_log.Present, remarks: list[str]
) -> tuple[LogFindings, list[RunLog], list[Kill]]:
    """Read all sources of this machine; return the findings, brim's run logs and the kills that counters show."""
    findings = this_machine.ring_buffer(root) if boot in (None, 0) else LogFindings()
    findings.add(this_machine.journal(start, boot))
    findings.add(this_machine.log_files(root, start))
    runs: list[RunLog] = []
    problem = ""
    try:
        oldest_t = 0.0 if start is None else start.timestamp()
        paths = [path for path in reversed(recent_logs()) if path.stat().st_mtime >= oldest_t]
        runs = [run for path in paths for run in _read_runs(path)]
    except OSError as error:
        problem = reading_problem(error)
    runs = [run for run in runs if boot != 0 or run.head.boot_id == present.boot_id]
    findings.sources.append(Source(str(log_folder()), problem, len(runs), f"{len(runs)} logs of brim"))
    counters: list[Kill] = []
    if boot in (None, 0):
        counters, sources, total = this_machine.counters(root)
        findings.sources += sources
        pids = {kill.pid for kill in findings.kills if kill.killer == "kernel" and kill.boot == 0 and kill.pid}
        if total and total > len(pids) and start is None:
            remarks.append(
                f"The kernel counted {total} kills since boot (/proc/vmstat); records of {len(pids)} could be read."
            )
    return findings, runs, counters


def _read_runs(path: Path) -> list[RunLog]:
    """Return the runs of a log; none if it cannot be read."""
    try:
        return list(read_runs(path))
    except OSError:
        return []


def _kills_of_run(run: RunLog, present: brim_log.Present, kills: list[Kill]) -> list[Kill]:
    """Return the kills in a run log without those that a kernel record of one of its processes reports."""
    reported = []
    for kill in brim_log.kills_of(run, present):
        by_kernel = kill.killer in ("kernel", "unknown") and kill.effect == "killed"
        if by_kernel and any(
            record.killer == "kernel" and record.pid in run.pids and (gap_s(record, kill) or 0) < _SAME_DEATH_S
            for record in kills
        ):
            continue
        reported.append(replace(kill, boot=0 if run.head.boot_id == present.boot_id else None))
    return reported


def _with_curve(kill: Kill, runs: list[RunLog]) -> Kill:
    """Add the minute before a kill, if brim was watching."""
    if kill.curve or kill.when is None or kill.pid is None:
        return kill
    timestamp = kill.when.timestamp()
    for run in runs:
        first, last = run.first_t, run.last_t
        if kill.pid in run.pids and first is not None and last is not None and first - 60 <= timestamp <= last + 60:
            return replace(
                kill, curve=brim_log.curve(run.path, timestamp), command=kill.command or brim_log.command_of(run)
            )
    return kill
