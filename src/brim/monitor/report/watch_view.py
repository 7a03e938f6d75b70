"""Show a running watch: a gauge in a terminal, a line every ten seconds elsewhere, JSON lines for programs.

The summary at the end is made from the log alone, so that it can also be made after a crash.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from brim.memory.prediction import Point
from brim.monitor.report.log_series import Event, RunLog, read_run
from brim.monitor.watching.launch import Board
from brim.monitor.watching.run_log import End
from brim.records import dataclass
from brim.sizes import format_duration, format_size
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


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(points: Sequence[Point], width: int = 60, top: float = 0.0) -> str:
    """Draw the highest value of each span of time as a bar; `top` is the value of a full bar."""
    if not points:
        return ""
    begin, end = points[0][0], points[-1][0]
    span = (end - begin) / width or 1.0
    highest: list[float | None] = [None] * width
    for when, size in points:
        number = min(int((when - begin) / span), width - 1)
        highest[number] = max(highest[number] or 0.0, size)
    top = max(top, max(size for _, size in points), 1.0)
    bars, last = [], 0.0
    for value in highest:
        last = last if value is None else value
        bars.append(_BARS[min(int(last / top * len(_BARS)), len(_BARS) - 1)])
    return "".join(bars)


_SPARK = 48
_TOLD = ("alert", "exhaustion", "swap", "system", "stop", "term", "kill", "oom", "refused")


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run log says, for the screen and for programs."""

    run: RunLog

    @property
    def peak(self) -> tuple[float, int]:
        """When the most memory was held, and how much that was."""
        run = self.run
        if run.end is not None:
            return run.end.peak_t or 0.0, run.end.peak_bytes
        return (run.peak.t, run.peak.total_bytes) if run.peak else (0.0, 0)

    @property
    def alerts(self) -> list[Event]:
        """The warnings and actions; kills elsewhere on the machine are only evidence."""
        return [event for event in self.run.events if event.kind in _TOLD and not event.elsewhere]

    def facts(self) -> dict[str, Any]:
        """Return the keys of `--json`."""
        run, (peak_t, peak_bytes) = self.run, self.peak
        end = run.end.raw if run.end else {}
        return {
            **{key: value for key, value in end.items() if key not in ("type", "t")},
            "seconds": round(run.seconds, 3),
            "peak_bytes": peak_bytes,
            "peak_t": peak_t,
            "limit": run.head.raw.get("limit"),
            "trend": run.trend.verdict,
            "floor_bytes_per_min": round(run.trend.floor_bytes_per_min),
            "file_bytes_per_min": round(run.trend.file_bytes_per_min),
            "alerts": [dict(event.raw) for event in self.alerts],
            "log": str(run.path),
        }


def summarise(path: Path) -> Summary:
    return Summary(read_run(path))


def screen(summary: Summary, postmortem: list[str] | None = None) -> list[tuple[str, str]]:
    """Return labels and texts about a finished run."""
    run, (peak_t, peak_bytes) = summary.run, summary.peak
    head, limit_bytes = run.head, run.head.limit_bytes or 0
    began = run.samples[0].t if run.samples else peak_t
    share = f", {100 * peak_bytes / limit_bytes:.0f} % of the limit" if limit_bytes else ""
    peak = f"{format_size(peak_bytes)} at {_clock(peak_t)}, {_took(peak_t - began)} in{share}"
    measured = run.end.raw.get("peak_from", "samples") if run.end else "samples"
    if measured != "samples":
        peak += f" (by {measured})"
    lines = [
        ("ended", f"{ending(run.end)} after {_took(run.seconds)}"),
        ("peak", peak if peak_bytes else "ended before it was seen"),
        ("limit", f"{format_size(limit_bytes)}: {head.limit_why}; {head.enforced}{_overshoot(run.end)}"),
    ]
    if len(run.samples) > 2:
        bars = sparkline([(sample.x, sample.total_bytes) for sample in run.samples], _SPARK)
        lines.append(("memory", f"{bars} 0 to {format_size(peak_bytes)} in {_took(run.seconds)}"))
    lines.append(("trend", run.trend.text))
    if run.file_peak_bytes > peak_bytes / 4:
        lines.append(
            ("files", f"up to {format_size(run.file_peak_bytes)} of file pages in addition, which the kernel reclaims")
        )
    alerts = summary.alerts
    if alerts:
        more = f" (and {len(alerts) - 1} more)" if len(alerts) > 1 else ""
        lines.append(("alerts", f"{_clock(alerts[-1].t)} {alerts[-1].text}{more}"))
    if run.end is not None:
        lines += _used(run.end.raw) + _left(run.end.raw)
    lines += [("" if number else "why", text) for number, text in enumerate(postmortem or [])]
    lines.append(("log", str(run.path)))
    return lines


def _used(end: Mapping[str, Any]) -> list[tuple[str, str]]:
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


def _left(end: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the processes and files in memory that outlive the command."""
    lines, left = [], end.get("left") or []
    if left:
        limited = ", still limited by their cgroup" if end.get("left_limited") else ""
        numbers = ", ".join(map(str, left[:8]))
        lines.append(("left", f"{len(left)} of its processes still run, no longer watched{limited}: {numbers}"))
    files = end.get("left_files") or []
    if files:
        total = format_size(sum(size for _, size in files))
        names = ", ".join(f"{path} ({format_size(size)})" for path, size in files[:4])
        lines.append(("left", f"{total} of memory in files that remain: {names}"))
    return lines


def ending(end: End | None) -> str:
    """Describe how a run ended."""
    if end is None:
        return "unknown, for the log was cut off,"
    if end.stopped == "oom":
        return f"killed by the kernel at its own limit ({end.why})"
    if end.stopped == "kill":
        return f"killed by brim ({end.why})"
    exited = "watch ended"
    if end.gone:
        exited = "the process has ended (brim did not start it, so its exit code is not known)"
        if end.machine_oom_kills:
            exited += "; the kernel has killed a process for memory during the watch: see brim why"
    if end.signal:
        exited = f"died of {_signal_name(end.signal)}"
    elif end.exit_code is not None:
        exited = f"exit code {end.exit_code}"
    return f"stopped by brim ({end.why}), {exited}" if end.stopped == "stop" else exited


def evidence(end: End) -> list[str]:
    """Return what counters alone show about a command that died of SIGKILL; nothing about others."""
    if end.signal != signal.SIGKILL or end.stopped:
        return []
    if end.machine_oom_kills:
        return [
            f"killed by SIGKILL, and the kernel counted {end.machine_oom_kills} kill for memory on this machine "
            "during the run: most likely out of memory"
        ]
    return ["killed by SIGKILL, and the kernel counted no kill for memory: another process sent it, cause unproven"]


def _overshoot(end: End | None) -> str:
    if end is not None and end.overshoot_bytes:
        return f", exceeded by {format_size(end.overshoot_bytes)}"
    return ", never exceeded" if end is not None and end.stopped else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t))


def _took(seconds: float) -> str:
    return f"{max(seconds, 0.0):.1f} s" if seconds < 10 else format_duration(seconds)
