"""Summarize a run in texts: how it ended, its key figures, and the lines for the screen and for programs.

Everything is made from the log alone, so that it can also be made after a crash.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Mapping
from typing import Any

from brim.errors import StoppedError
from brim.monitor.log_records import End
from brim.monitor.run_log import RunLog
from brim.monitor.text_formats import date_time, percent, sparkline, stamp
from brim.records import dataclass
from brim.sizes import format_duration, format_size

_NEAR_LIMIT = 0.8  # of the limit
_WARNINGS = ("alert", "exhaustion", "stop")
_ACTIONS = ("alert", "exhaustion", "swap", "system", "stop", "term", "kill", "oom", "refused")
_MAY_STILL_RUN_S = 60.0
_DAY_S = 86_400
_SPARK_WIDTH = 48


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """`grade` is fine, near, failed, stopped, killed or cut; `badge` is a short form, `sentence` has the details."""

    grade: str
    badge: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A key figure."""

    label: str
    value: str
    detail: str = ""


def name_of(run: RunLog) -> str:
    """Return the command, process or log as one line."""
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
    """Return the peak and its time of day; the end of the log also counts samples that were not logged."""
    logged = run.peak
    if run.end is not None and run.end.peak_bytes > (logged.total_bytes if logged else 0):
        return run.end.peak_bytes, run.end.peak_t
    return (logged.total_bytes, logged.t) if logged else (0, None)


def _highest_peak(run: RunLog) -> int:
    """Return the peak of the machine that the log is of, or of the fullest node of its cluster."""
    return max([peak_of(run)[0], *run.node_peaks.values()])


def _limit_share(run: RunLog) -> float:
    return _highest_peak(run) / run.head.limit_bytes if run.head.limit_bytes else 0.0


def _came_near(run: RunLog) -> bool:
    return _limit_share(run) >= _NEAR_LIMIT or any(run.event_counts.get(kind) for kind in _WARNINGS)


def verdict_of(run: RunLog, now: float) -> RunVerdict:
    """Return the verdict of a run that has ended or whose log was cut off."""
    end, peak = run.end, _peak_text(run)
    if end is None:
        text, last = "The log has no end: the watch was killed, or the whole machine went down.", run.last_t
        if last is not None and 0 <= now - last < _MAY_STILL_RUN_S:
            age = format_duration(now - last)
            text += f" Or it still runs: the last entry was {age} old when this page was made."
        elif last is not None:
            text += f" The last entry is from {date_time(last)}."
        return RunVerdict("cut", "cut off", f"{text} {peak}".strip())
    ended = ending(end)
    sentence = f"{ended[:1].upper()}{ended[1:]} after {format_duration(run.seconds)}. {peak}".strip()
    if end.stopped in ("oom", "kill"):
        return RunVerdict("killed", "killed" if end.stopped == "oom" else "killed by brim", sentence)
    if end.stopped:
        return RunVerdict("stopped", "stopped by brim", sentence)
    if end.signal:
        is_kill = end.signal == signal.SIGKILL
        return RunVerdict("killed" if is_kill else "failed", "killed" if is_kill else "ended", sentence)
    if end.exit_code == StoppedError.exit_code and run.head.watched == "job":
        return RunVerdict("stopped", "stopped", f"{sentence} Run the same command to continue.")
    if end.exit_code:
        return RunVerdict("failed", "failed", sentence)
    return RunVerdict("near", "came near", sentence) if _came_near(run) else RunVerdict("fine", "fine", sentence)


def live_verdict(run: RunLog) -> RunVerdict:
    """Return the verdict of a running command."""
    sentences = [f"It uses {format_size(run.samples[-1].total_bytes)}."] if run.samples else []
    sentences.append(_peak_text(run))
    if run.outlook:
        rate, left_s = run.outlook
        remaining = format_duration(left_s)
        sentences.append(
            f"It grows by {format_size(60 * rate)} a minute: at this rate the limit is reached in {remaining}."
        )
    return RunVerdict("near" if _came_near(run) else "fine", "running", " ".join(filter(None, sentences)))


def _peak_text(run: RunLog) -> str:
    peak, limit = _highest_peak(run), run.head.limit_bytes
    if not peak:
        return "No memory was measured." if not run.sample_count else ""
    subject = "The fullest of its machines" if run.node_peaks else "It"
    if limit is None:
        return f"{subject} used {format_size(peak)} at most."
    over = f", {format_size(peak - limit)} over" if peak > limit else ""
    return f"{subject} used {format_size(peak)} at most, {percent(peak / limit)} of its limit{over}."


def figures_of(run: RunLog) -> Iterator[Figure]:
    head, (peak, peak_t) = run.head, peak_of(run)
    if run.peak is not None:
        peak_time = date_time(peak_t or run.peak.t)
        label = "driver's peak" if run.node_peaks else "peak"
        yield Figure(
            label,
            format_size(peak),
            f"{stamp(run.peak.x)} in, at {peak_time if run.seconds > _DAY_S else peak_time[11:]}",
        )
    if run.node_peaks:
        name, highest = max(run.node_peaks.items(), key=lambda node: node[1])
        yield Figure("fullest node", format_size(highest), f"{name}, of {len(run.node_peaks):,}")
    if head.limit_bytes is not None:
        over = run.end.overshoot_bytes if run.end else max(peak - head.limit_bytes, 0)
        is_enforced = head.enforced.startswith("cgroup")
        enforced = f"enforced by the kernel ({head.enforced})" if is_enforced else head.enforced
        nodes = "on every node" if run.node_peaks else ""
        details = [head.limit_why, nodes, enforced, f"exceeded by {format_size(over)}" if over else ""]
        yield Figure("limit", format_size(head.limit_bytes), "; ".join(filter(None, details)))
        if run.peak is not None:
            headroom = head.limit_bytes - _highest_peak(run)
            detail = f"{format_size(headroom)} left at the peak" if headroom >= 0 else f"{format_size(-headroom)} over"
            yield Figure("of the limit", percent(_limit_share(run)), detail)
    samples = f"{run.sample_count:,} sample{'' if run.sample_count == 1 else 's'}"
    yield Figure("took", format_duration(run.seconds), samples)
    if run.sample_count > 1:
        slope = f"{format_size(run.trend.floor_bytes_per_min)}/min"
        values = {"short": "–", "steady": "level", "mapping": "level"}
        yield Figure("growth", values.get(run.trend.verdict, slope), run.trend.text)
    if run.file_peak_bytes:
        yield Figure("file pages", format_size(run.file_peak_bytes), "at most, in addition; the kernel reclaims them")
    if run.least_available_bytes is not None:
        ram = f" of {format_size(head.ram_bytes)}" if head.ram_bytes else ""
        yield Figure("machine's least", format_size(run.least_available_bytes), f"available{ram}")
    if run.pressure is not None:
        latest, most_pressure = run.pressure
        yield Figure("pressure", f"{latest:.0f} %", f"of 10 s waited for memory; {most_pressure:.0f} % at most")
    for index, (used, total) in sorted(run.gpu_peaks.items()):
        yield Figure(f"GPU {index}", format_size(used), f"at most, of {format_size(total)}" if total else "at most")


def remarks_of(run: RunLog) -> Iterator[str]:
    """Yield remarks about the log itself."""
    if run.bad_lines:
        yield f"{run.bad_lines:,} of the log's lines could not be read and are left out."
    if run.earlier_runs:
        yield f"The log contains {run.earlier_runs + 1:,} runs; this is the last of them."
    if not run.sample_count:
        yield "The log has no samples, so the page has no curve."
    elif run.sample_count > len(run.samples):
        yield f"The curve shows {len(run.samples):,} of {run.sample_count:,} samples; every peak is among them."
    for x, step in run.clock_jumps[:5]:
        change = f"back by {format_duration(-step)}" if step < 0 else f"ahead by {format_duration(step)}"
        yield f"The machine's clock went {change}, {stamp(x)} in; the curve ignores that."
    for first, last in run.gaps[:5]:
        gap = format_duration(last - first)
        yield f"No samples for {gap}, from {stamp(first)} in: the machine or the watch was suspended."
    yield from run.head.not_seen


def postmortem_of(run: RunLog, now: float) -> list[str]:
    """Return why it died: the post-mortem, or else the evidence of the log. Empty if it did not die."""
    lines = [line for event in run.events if event.kind == "postmortem" for line in event.lines or (event.text,)]
    if lines or verdict_of(run, now).grade not in ("killed", "stopped", "cut"):
        return lines
    lines = evidence(run.end) if run.end else []
    if run.end is not None and run.end.oom_kills:
        lines.append(f"The kernel killed {run.end.oom_kills} of its processes at the limit.")
    lines += [f"{date_time(e.t)}  {e.text}" for e in run.events if e.kind in (*_ACTIONS, "error")][-5:]
    if run.samples:
        last = run.samples[-1]
        available = f"; the machine had {format_size(last.available_bytes)} left" if last.available_bytes else ""
        lines.append(f"The last sample, at {date_time(last.t)}: {format_size(last.total_bytes)}{available}.")
    if run.end is None or not run.end.stopped:
        pid = f" {run.head.pid}" if run.head.pid is not None else ""
        lines.append(f"To search the system's own logs: brim why{pid}")
    return lines


def forecast_text(run: RunLog) -> str:
    """Compare the forecast with the measurement; empty if there was none."""
    forecast, (peak, _) = run.head.forecast, peak_of(run)
    if forecast is None:
        return ""
    low, high = forecast.low_bytes, forecast.high_bytes
    span = format_size(high) if low == high else f"{format_size(low)} to {format_size(high)}"
    text = f"Forecast: {span}{f' ({forecast.verdict})' if forecast.verdict else ''}."
    if not peak:
        return text
    if peak > high:
        difference = f"{percent(peak / high - 1)} more than that" if high else "more than that"
    elif low <= peak or low == high:
        difference = "within that" if low != high else f"{percent(peak / high)} of that"
    else:
        difference = f"{percent(1 - peak / low)} less than that"
    return f"{text} Measured: {format_size(peak)}, {difference}."


def ending(end: End | None) -> str:
    """Describe how a run ended."""
    if end is None:
        return "unknown, for the log was cut off,"
    if end.stopped == "oom":
        return f"killed by the kernel at its own limit ({end.why})"
    if end.stopped == "kill":
        return f"killed by brim ({end.why})"
    exited = "watch ended"
    if end.has_process_ended:
        exited = "the process has ended (brim did not start it, so its exit code is not known)"
        if end.machine_oom_kills:
            exited += "; the kernel has killed a process for memory during the watch: see brim why"
    if end.signal:
        try:
            exited = f"died of {signal.Signals(end.signal).name}"
        except ValueError:
            exited = f"died of signal {end.signal}"
    elif end.exit_code is not None:
        exited = f"exit code {end.exit_code}"
    return f"stopped by brim ({end.why}), {exited}" if end.stopped == "stop" else exited


def evidence(end: End) -> list[str]:
    """Return the evidence of the counters about a command that died of SIGKILL."""
    if end.signal != signal.SIGKILL or end.stopped:
        return []
    if end.machine_oom_kills:
        return [
            f"killed by SIGKILL, and the kernel counted {end.machine_oom_kills} kill for memory on this machine "
            "during the run: most likely out of memory"
        ]
    return ["killed by SIGKILL, and the kernel counted no kill for memory: another process sent it, cause unproven"]


def summary_facts(run: RunLog) -> dict[str, Any]:
    """Return the keys of `--json` of a finished run."""
    peak, peak_t = peak_of(run)
    alerts = [event for event in run.events if event.kind in _ACTIONS and not event.elsewhere]
    return {
        **{key: value for key, value in (run.end.raw if run.end else {}).items() if key not in ("type", "t")},
        "seconds": round(run.seconds, 3),
        "peak_bytes": peak,
        "peak_t": peak_t or 0.0,
        "limit": run.head.raw.get("limit"),
        "trend": run.trend.verdict,
        "floor_bytes_per_min": round(run.trend.floor_bytes_per_min),
        "file_bytes_per_min": round(run.trend.file_bytes_per_min),
        "alerts": [dict(event.raw) for event in alerts],
        "log": str(run.path),
    }


def screen(run: RunLog, postmortem: list[str] | None = None) -> list[tuple[str, str]]:
    """Return labels and texts about a finished run."""
    head, end, limit_bytes, (peak, peak_t) = run.head, run.end, run.head.limit_bytes or 0, peak_of(run)
    took = format_duration(run.seconds)
    peak_text = "ended before it was seen"
    if peak and peak_t is not None:
        start = run.samples[0].t if run.samples else peak_t
        of_limit = f", {100 * peak / limit_bytes:.0f} % of the limit" if limit_bytes else ""
        peak_text = f"{format_size(peak)} at {date_time(peak_t)[11:]}, {format_duration(peak_t - start)} in{of_limit}"
        if end is not None and (measured := end.raw.get("peak_from", "samples")) != "samples":
            peak_text += f" (by {measured})"
    overshoot = ""
    if end is not None and end.overshoot_bytes:
        overshoot = f", exceeded by {format_size(end.overshoot_bytes)}"
    elif end is not None and end.stopped:
        overshoot = ", never exceeded"
    lines = [
        ("ended", f"{ending(end)} after {took}"),
        ("peak", peak_text),
        ("limit", f"{format_size(limit_bytes)}: {head.limit_why}; {head.enforced}{overshoot}"),
    ]
    if len(run.samples) > 2:
        bars = sparkline([(sample.x, sample.total_bytes) for sample in run.samples], _SPARK_WIDTH)
        lines.append(("memory", f"{bars} 0 to {format_size(peak)} in {took}"))
    lines.append(("trend", run.trend.text))
    if run.file_peak_bytes > peak / 4:
        lines.append(
            ("files", f"up to {format_size(run.file_peak_bytes)} of file pages in addition, which the kernel reclaims")
        )
    alerts = [event for event in run.events if event.kind in _ACTIONS and not event.elsewhere]
    if alerts:
        suffix = f" (and {len(alerts) - 1} more)" if len(alerts) > 1 else ""
        lines.append(("alerts", f"{date_time(alerts[-1].t)[11:]} {alerts[-1].text}{suffix}"))
    if end is not None:
        lines += _resource_lines(end.raw)
    lines += [("" if number else "why", text) for number, text in enumerate(postmortem or [])]
    lines.append(("log", str(run.path)))
    return lines


def _resource_lines(end: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the command used, and the processes and files in memory that outlive it."""
    if usage := end.get("usage"):
        cpu_s = usage["user_s"] + usage["system_s"]
        text = f"{cpu_s:.1f} s of processor time ({usage['user_s']:.1f} user, {usage['system_s']:.1f} system)"
        disk = [
            f"{format_size(usage[f'{name}_bytes'])} {name}" for name in ("read", "written") if usage[f"{name}_bytes"]
        ]
        text += f"; disk: {', '.join(disk)}" if disk else ""
        text += f"; {usage['major_faults']} pages waited for the disk" if usage["major_faults"] else ""
        if usage["max_rss_bytes"] > usage["own_rss_bytes"]:
            text += f"; largest process {format_size(usage['max_rss_bytes'])} resident, file pages included"
        yield "used", text
    if pids := end.get("left"):
        limited = ", still limited by their cgroup" if end.get("left_limited") else ""
        shown = ", ".join(map(str, pids[:8]))
        yield "left", f"{len(pids)} of its processes still run, no longer watched{limited}: {shown}"
    if files := end.get("left_files"):
        total = format_size(sum(size for _, size in files))
        names = ", ".join(f"{path} ({format_size(size)})" for path, size in files[:4])
        yield "left", f"{total} of memory in files that remain: {names}"
