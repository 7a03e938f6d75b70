"""Texts about a run for its page: the verdict, the key figures, why it died."""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Iterator

from brim.errors import StoppedError
from brim.monitor.report.log_series import RunLog
from brim.monitor.report.watch_view import ending, evidence
from brim.records import dataclass
from brim.sizes import format_duration, format_size

NEAR = 0.8  # of the limit
_WARNINGS = ("alert", "exhaustion", "stop")
_MAY_STILL_RUN_S = 60.0
_DAY_S = 86_400
_LAST_WORDS = ("alert", "exhaustion", "swap", "system", "stop", "term", "kill", "oom", "refused", "error")


@dataclass(frozen=True, slots=True)
class StoryVerdict:
    """`grade` is fine, near, failed, stopped, killed or cut; `word` is for a badge, `sentence` says it all."""

    grade: str
    word: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A number worth a large print."""

    label: str
    value: str
    detail: str = ""


def name_of(run: RunLog) -> str:
    """What ran, as one line."""
    head = run.head
    if head.command:
        return " ".join(shlex.join(head.command).split()) if len(head.command) > 1 else head.command[0]
    if head.watched == "machine":
        return "the whole machine"
    if head.pid is not None:
        names = [process.name for process in run.processes if process.pid == head.pid]
        return f"process {head.pid}{f' ({names[0]})' if names else ''}"
    return run.path.name


def peak_of(run: RunLog) -> tuple[int, float | None]:
    """The most it held, and the time of day; the end counts samples too that were not worth a line."""
    seen = run.peak
    if run.end is not None and run.end.peak_bytes > (seen.total_bytes if seen else 0):
        return run.end.peak_bytes, run.end.peak_t
    return (seen.total_bytes, seen.t) if seen else (0, None)


def most_held(run: RunLog) -> int:
    """By any of its machines: the one that the log is of, or a node of a cluster."""
    return max([peak_of(run)[0], *run.node_peaks.values()])


def verdict_of(run: RunLog, now: float) -> StoryVerdict:
    end = run.end
    if end is None:
        return StoryVerdict("cut", "cut off", f"{_cut_text(run, now)} {_peak_text(run)}".strip())
    ended = ending(end)
    said = f"{ended[:1].upper()}{ended[1:]} after {took(run.seconds)}. {_peak_text(run)}".strip()
    if end.stopped in ("oom", "kill"):
        return StoryVerdict("killed", "killed" if end.stopped == "oom" else "killed by brim", said)
    if end.stopped:
        return StoryVerdict("stopped", "stopped by brim", said)
    if end.signal:
        killed = end.signal == signal.SIGKILL
        return StoryVerdict("killed" if killed else "failed", "killed" if killed else "ended", said)
    if end.exit_code == StoppedError.exit_code and run.head.watched == "job":
        return StoryVerdict("stopped", "stopped", f"{said} Run the same command to continue.")
    if end.exit_code:
        return StoryVerdict("failed", "failed", said)
    if _share(run) >= NEAR or any(run.event_counts.get(kind) for kind in _WARNINGS):
        return StoryVerdict("near", "came near", said)
    return StoryVerdict("fine", "fine", said)


def live_verdict(run: RunLog) -> StoryVerdict:
    """Return the verdict of a running command."""
    near = _share(run) >= NEAR or any(run.event_counts.get(kind) for kind in _WARNINGS)
    last = run.samples[-1] if run.samples else None
    now = f"It holds {format_size(last.total_bytes)}. " if last else ""
    outlook = ""
    if run.outlook:
        rate, left_s = run.outlook
        outlook = (
            f" It grows by {format_size(60 * rate)} a minute: at this rate the limit is reached in {took(left_s)}."
        )
    return StoryVerdict("near" if near else "fine", "running", f"{now}{_peak_text(run)}{outlook}".strip())


def _cut_text(run: RunLog, now: float) -> str:
    text = "The log has no end: the watch was killed, or the whole machine went down."
    last = run.last_t
    if last is not None and 0 <= now - last < _MAY_STILL_RUN_S:
        return f"{text} Or it still runs: the last entry was {took(now - last)} old when this page was made."
    return f"{text} The last entry is from {clock(last)}." if last is not None else text


def _peak_text(run: RunLog) -> str:
    peak, limit = most_held(run), run.head.limit_bytes
    if not peak:
        return "No memory was seen." if not run.sample_count else ""
    who = "The fullest of its machines" if run.node_peaks else "It"
    if limit is None:
        return f"{who} held {format_size(peak)} at most."
    over = f", {format_size(peak - limit)} over" if peak > limit else ""
    return f"{who} held {format_size(peak)} at most, {percent(peak / limit)} of its limit{over}."


def _share(run: RunLog) -> float:
    return most_held(run) / run.head.limit_bytes if run.head.limit_bytes else 0.0


def figures_of(run: RunLog) -> Iterator[Figure]:
    head, (peak, peak_t) = run.head, peak_of(run)
    if run.peak is not None:
        at = clock(peak_t or run.peak.t)
        label = "driver's peak" if run.node_peaks else "peak"
        yield Figure(label, format_size(peak), f"{stamp(run.peak.x)} in, at {at if run.seconds > _DAY_S else at[11:]}")
    if run.node_peaks:
        name, most = max(run.node_peaks.items(), key=lambda node: node[1])
        yield Figure("fullest node", format_size(most), f"{name}, of {len(run.node_peaks):,}")
    if head.limit_bytes is not None:
        over = run.end.overshoot_bytes if run.end else max(peak - head.limit_bytes, 0)
        held = f"held by the kernel ({head.enforced})" if head.enforced.startswith("cgroup") else head.enforced
        everywhere = "on every node" if run.node_peaks else ""
        details = [head.limit_why, everywhere, held, f"exceeded by {format_size(over)}" if over else ""]
        yield Figure("limit", format_size(head.limit_bytes), "; ".join(filter(None, details)))
        if run.peak is not None:
            left = head.limit_bytes - most_held(run)
            detail = f"{format_size(left)} left at the peak" if left >= 0 else f"{format_size(-left)} over"
            yield Figure("of the limit", percent(_share(run)), detail)
    yield Figure("took", took(run.seconds), f"{run.sample_count:,} sample{'' if run.sample_count == 1 else 's'}")
    if run.sample_count > 1:
        slope = run.trend.floor_bytes_per_min
        value = "level" if run.trend.verdict in ("steady", "mapping") else f"{format_size(slope)}/min"
        yield Figure("growth", "–" if run.trend.verdict == "short" else value, run.trend.text)
    if run.file_peak_bytes:
        yield Figure("file pages", format_size(run.file_peak_bytes), "at most, in addition; the kernel reclaims them")
    if run.least_available_bytes is not None:
        ram = f" of {format_size(head.ram_bytes)}" if head.ram_bytes else ""
        yield Figure("machine's least", format_size(run.least_available_bytes), f"available{ram}")
    if run.pressure is not None:
        yield Figure(
            "pressure", f"{run.pressure[0]:.0f} %", f"of 10 s waited for memory; {run.pressure[1]:.0f} % at most"
        )
    for index, (used, whole) in sorted(run.gpu_peaks.items()):
        yield Figure(f"GPU {index}", format_size(used), f"at most, of {format_size(whole)}" if whole else "at most")


def remarks_of(run: RunLog) -> Iterator[str]:
    """What a reader should know about the log itself."""
    if run.bad_lines:
        yield f"{run.bad_lines:,} of the log's lines could not be read and are left out."
    if run.earlier_runs:
        yield f"The log holds {run.earlier_runs + 1:,} runs; this is the last of them."
    if not run.sample_count:
        yield "The log has no samples, so the page has no curve."
    elif run.sample_count > len(run.samples):
        yield f"The curve shows {len(run.samples):,} of {run.sample_count:,} samples; every peak is among them."
    for x, step in run.clock_jumps[:5]:
        way = f"back by {took(-step)}" if step < 0 else f"ahead by {took(step)}"
        yield f"The machine's clock went {way}, {stamp(x)} in; the curve ignores that."
    for begin, end in run.gaps[:5]:
        yield f"No samples for {took(end - begin)}, from {stamp(begin)} in: the machine or the watch stood still."
    yield from run.head.not_seen


def postmortem_of(run: RunLog, now: float) -> list[str]:
    """Return why it died: the post-mortem, or else the evidence of the log. Empty if it did not die."""
    found = [line for event in run.events if event.kind == "postmortem" for line in event.lines or (event.text,)]
    if found:
        return found
    grade = verdict_of(run, now).grade
    if grade not in ("killed", "stopped", "cut"):
        return []
    lines = evidence(run.end) if run.end else []
    if run.end is not None and run.end.oom_kills:
        lines.append(f"The kernel killed {run.end.oom_kills} of its processes at the limit.")
    lines += [f"{clock(e.t)}  {e.text}" for e in run.events if e.kind in _LAST_WORDS][-5:]
    if run.samples:
        last = run.samples[-1]
        available = f"; the machine had {format_size(last.available_bytes)} left" if last.available_bytes else ""
        lines.append(f"The last sample, at {clock(last.t)}: {format_size(last.total_bytes)}{available}.")
    if run.end is None or not run.end.stopped:
        pid = f" {run.head.pid}" if run.head.pid is not None else ""
        lines.append(f"What the system's own logs say about it: brim why{pid}")
    return lines


def forecast_text(run: RunLog) -> str:
    """Forecast against fact in a sentence; empty if there was none."""
    forecast, (peak, _) = run.head.forecast, peak_of(run)
    if forecast is None:
        return ""
    low, high = forecast.low_bytes, forecast.high_bytes
    span = format_size(high) if low == high else f"{format_size(low)} to {format_size(high)}"
    said = f"Foretold: {span}{f' ({forecast.verdict})' if forecast.verdict else ''}."
    if not peak:
        return said
    if peak > high:
        fact = f"{percent(peak / high - 1)} more than that" if high else "more than that"
    elif low <= peak or low == high:
        fact = "within that" if low != high else f"{percent(peak / high)} of that"
    else:
        fact = f"{percent(1 - peak / low)} less than that"
    return f"{said} In fact: {format_size(peak)}, {fact}."


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0095 or share <= 0 else f"{100 * share:.1f} %"


def took(seconds: float) -> str:
    """A duration, with a decimal where seconds are few."""
    return f"{max(seconds, 0.0):.1f} s" if seconds < 10 else format_duration(seconds)


def stamp(seconds: float) -> str:
    """Format a time since the beginning: "4.2 s", "7:35 min", "1:02:03 h", "4 d 1:02 h"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24}:{minutes:02d} h"
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def clock(t: float | None) -> str:
    """The time of day where the page is made."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)) if t is not None else "an unknown time"
