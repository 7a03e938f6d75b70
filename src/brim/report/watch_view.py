"""A watch as it goes: a gauge in a terminal, a line now and then elsewhere, JSON lines for programs.

When it has ended, one screen about it is made from its log alone, so that it can be had again from the file, after a
crash of everything too.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any, Self

from brim.memory.guard import Point, Trend, judge, span_text, sparkline
from brim.records import dataclass
from brim.sizes import format_size
from brim.watching.launch import Board
from brim.watching.run_log import read_log
from brim.wording import drawing_stream

_KINDS = ("anon_bytes", "shmem_bytes", "swap_bytes", "file_bytes", "total_bytes", "peak_bytes")


class NoView:
    """Nothing."""

    every_s = 1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, board: Board) -> None: ...


class JsonView(NoView):
    """One object a second."""

    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit

    def show(self, board: Board) -> None:
        self._emit("sample", t=board.get("t_ns") / 1e9, **{kind: board.get(kind) for kind in _KINDS})


class PlainView(NoView):
    """A line every ten seconds."""

    every_s = 10.0

    def __init__(self, limit_bytes: int, tell: Callable[[str], None]) -> None:
        self._limit_bytes, self._tell = limit_bytes, tell

    def show(self, board: Board) -> None:
        self._tell(f"brim: {_text(board, self._limit_bytes)}")


class TerminalView(NoView):
    """One line that is drawn again and again: the last two minutes, now, the peak, the limit."""

    every_s = 0.5

    def __init__(self, limit_bytes: int, history_s: float = 120.0) -> None:
        from rich.console import Console
        from rich.live import Live

        self._limit_bytes, self._history_s = limit_bytes, history_s
        self._points: deque[Point] = deque()
        console = Console(file=drawing_stream())
        self._width = max(min(console.width - 75, 40), 10)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, board: Board) -> None:
        from rich.text import Text

        now = time.monotonic()
        self._points.append((now, board.get("total_bytes")))
        while now - self._points[0][0] > self._history_s:
            self._points.popleft()
        bars = sparkline(list(self._points), self._width, top=self._limit_bytes)
        text = Text.assemble((bars, "cyan"), " ", _text(board, self._limit_bytes), no_wrap=True, overflow="ellipsis")
        self._live.update(text, refresh=True)


def _text(board: Board, limit_bytes: int) -> str:
    facts: dict[str, Any] = {kind: board.get(kind) for kind in _KINDS}
    share = 100 * facts["total_bytes"] / max(limit_bytes, 1)
    return (
        f"{format_size(facts['total_bytes'])} of {format_size(limit_bytes)} ({share:.0f} %), "
        f"peak {format_size(facts['peak_bytes'])}, file pages {format_size(facts['file_bytes'])}"
    )


_SPARK = 48
_TOLD = ("alert", "exhaustion", "swap", "system", "stop", "term", "kill", "oom", "refused")


@dataclass(frozen=True, slots=True)
class Summary:
    """What a log says. `end` is empty if the watch was cut off."""

    path: Path
    head: dict[str, Any]
    end: dict[str, Any]
    memory: list[Point]
    files: list[Point]
    trend: Trend
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        first = self.memory[0][0] if self.memory else self.end.get("t", 0.0)
        last = self.end.get("t") or (self.memory[-1][0] if self.memory else first)
        return float(max(last - first, 0.0))

    @property
    def peak(self) -> tuple[float, int]:
        if self.end:
            return self.end["peak_t"], self.end["peak_bytes"]
        at, size = max(self.memory, key=lambda point: point[1], default=(0.0, 0.0))
        return at, int(size)

    @property
    def told(self) -> list[dict[str, Any]]:
        """What people were told of; kills elsewhere on the machine are only evidence."""
        return [event for event in self.events if event.get("kind") in _TOLD and not event.get("machine")]

    def facts(self) -> dict[str, Any]:
        """For programs."""
        peak_t, peak_bytes = self.peak
        return {
            **{key: value for key, value in self.end.items() if key not in ("type", "t")},
            "seconds": round(self.seconds, 3),
            "peak_bytes": peak_bytes,
            "peak_t": peak_t,
            "limit": self.head.get("limit"),
            "trend": self.trend.verdict,
            "floor_bytes_per_min": round(self.trend.floor_bytes_per_min),
            "file_bytes_per_min": round(self.trend.file_bytes_per_min),
            "alerts": self.told,
            "log": str(self.path),
        }


def summarise(path: Path) -> Summary:
    head: dict[str, Any] = {}
    end: dict[str, Any] = {}
    memory: list[Point] = []
    files: list[Point] = []
    events = []
    for entry in read_log(path):
        if entry["type"] == "sample":
            memory.append((entry["t"], entry["total_bytes"]))
            files.append((entry["t"], entry["file_bytes"]))
        elif entry["type"] == "event":
            events.append(entry)
        elif entry["type"] == "head":
            head, end = entry, {}
        elif entry["type"] == "end":
            end = entry
    return Summary(path, head, end, memory, files, judge(memory, files), events)


def screen(summary: Summary, postmortem: list[str] | None = None) -> list[tuple[str, str]]:
    """Labels and texts."""
    limit = summary.head.get("limit", {})
    limit_bytes = limit.get("bytes", 0)
    peak_t, peak_bytes = summary.peak
    began = summary.memory[0][0] if summary.memory else peak_t
    share = f", {100 * peak_bytes / limit_bytes:.0f} % of the limit" if limit_bytes else ""
    peak = f"{format_size(peak_bytes)} at {_clock(peak_t)}, {_took(peak_t - began)} in{share}"
    if summary.end.get("peak_from", "samples") != "samples":
        peak += f" (by {summary.end['peak_from']})"
    lines = [
        ("ended", f"{ending(summary.end)} after {_took(summary.seconds)}"),
        ("peak", peak if peak_bytes else "ended before it was seen"),
        (
            "limit",
            f"{format_size(limit_bytes)}: {limit.get('why', '')}; {limit.get('enforced', '')}{_overshoot(summary)}",
        ),
    ]
    if len(summary.memory) > 2:
        bars = sparkline(summary.memory, _SPARK)
        lines.append(("memory", f"{bars} 0 to {format_size(peak_bytes)} in {_took(summary.seconds)}"))
    files = max((size for _, size in summary.files), default=0)
    lines.append(("trend", summary.trend.text))
    if files > peak_bytes / 4:
        lines.append(("files", f"up to {format_size(files)} of file pages beside it, which the kernel takes back"))
    told = summary.told
    if told:
        latest = told[-1]
        more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
        lines.append(("alerts", f"{_clock(latest['t'])} {latest['text']}{more}"))
    lines += _used(summary.end) + _left(summary.end)
    lines += [("" if number else "why", text) for number, text in enumerate(postmortem or [])]
    lines.append(("log", str(summary.path)))
    return lines


def _used(end: dict[str, Any]) -> list[tuple[str, str]]:
    usage = end.get("usage")
    if not usage:
        return []
    cpu = usage["user_s"] + usage["system_s"]
    text = f"{cpu:.1f} s of processor time ({usage['user_s']:.1f} user, {usage['system_s']:.1f} system)"
    moved = [f"{format_size(usage[f'{way}_bytes'])} {way}" for way in ("read", "written") if usage[f"{way}_bytes"]]
    text += f"; disk: {', '.join(moved)}" if moved else ""
    text += f"; {usage['major_faults']} pages waited for the disk" if usage["major_faults"] else ""
    if usage["max_rss_bytes"] > usage["own_rss_bytes"]:
        text += f"; largest process {format_size(usage['max_rss_bytes'])} resident, file pages included"
    return [("used", text)]


def _left(end: dict[str, Any]) -> list[tuple[str, str]]:
    """What is still there: processes, and files in memory."""
    lines, left = [], end.get("left") or []
    if left:
        held = ", still held to the limit by their cgroup" if end.get("left_limited") else ""
        numbers = ", ".join(map(str, left[:8]))
        lines.append(("left", f"{len(left)} of its processes go on, no longer watched{held}: {numbers}"))
    files = end.get("left_files") or []
    if files:
        total = format_size(sum(size for _, size in files))
        names = ", ".join(f"{path} ({format_size(size)})" for path, size in files[:4])
        lines.append(("left", f"{total} of memory in files that nobody gives back: {names}"))
    return lines


def ending(end: dict[str, Any]) -> str:
    """How it ended, in words."""
    if not end:
        return "unknown, for the log was cut off,"
    how, why = end.get("stopped"), end.get("why")
    if how == "oom":
        return f"killed by the kernel at its own limit ({why})"
    if how == "kill":
        return f"killed by brim ({why})"
    exited = "watch ended"
    if end.get("signal"):
        exited = f"ended by {_signal_name(end['signal'])}"
    elif end.get("exit_code") is not None:
        exited = f"exit code {end['exit_code']}"
    return f"stopped by brim ({why}), {exited}" if how == "stop" else exited


def evidence(end: dict[str, Any]) -> list[str]:
    """What is known by the counters alone about a command that died of SIGKILL; nothing about others."""
    if end.get("signal") != signal.SIGKILL or end.get("stopped"):
        return []
    if end.get("machine_oom_kills"):
        return [
            f"killed by SIGKILL, and the kernel counted {end['machine_oom_kills']} kill for memory on this machine "
            "meanwhile: most likely out of memory"
        ]
    return ["killed by SIGKILL, and the kernel counted no kill for memory: somebody else sent it, cause unproven"]


def _overshoot(summary: Summary) -> str:
    over = summary.end.get("overshoot_bytes", 0)
    if over:
        return f", exceeded by {format_size(over)}"
    return ", never exceeded" if summary.end.get("stopped") else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))


def _took(seconds: float) -> str:
    return f"{max(seconds, 0.0):.1f} s" if seconds < 10 else span_text(seconds)
