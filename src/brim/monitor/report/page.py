"""The report: one self-contained HTML page, made from a run's log.

Texts, tables and figures are plain HTML, so that the page can be read, printed and searched without a script; the
script draws the curve. All texts of the log are escaped, and the page's own policy allows no other script and no
network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from brim.errors import InputError
from brim.monitor.log_records import LogEvent, WorkState
from brim.monitor.report import run_summary
from brim.monitor.run_log import RunLog, read_run
from brim.monitor.text_formats import date_time, percent, stamp
from brim.sizes import format_duration, format_size
from brim.state.atomic_files import failures, write_whole

_SCRIPTS = ("scale.js", "chart.js", "cursor.js", "live.js")
_PARTS = (
    *("header", "figures", "chart", "work", "stacks", "nodes", "forecast", "postmortem", "events", "processes"),
    *("remarks", "footer"),
)
_MOST_STACKS = 3
_MOST_PROCESSES, _MOST_EVENTS, _MOST_TASKS, _TABLE_ROWS = 40, 300, 200, 24
_LONG_DETAIL, _LONG_NAME = 60, 160
_SIZE_AND_STATE = re.compile(r"(?:([\d.,]+ [KMGTPE]?i?B) )?(.+)")  # of a finished shard
_IN_OTHER_SECTIONS = ("postmortem", "shard")  # kinds of events
_LABELLED = re.compile(r" {0,12}(\w[\w ]{1,12}?) {2}(\S.*)$")
# All other kinds of events are quiet: listed, and a tick on the axis.
_WEIGHTS = {
    **dict.fromkeys(("kill", "oom", "stop", "term", "refused", "error"), "grave"),
    **dict.fromkeys(("alert", "exhaustion", "swap", "system"), "warn"),
    "mark": "mark",
}
_PAGE_MARK = b"; script-src 'sha256-"  # in the head of every page


def check_page(html: Path) -> None:
    """Refuse to replace a file that is neither empty nor a page of brim."""
    if html.is_dir() or not html.absolute().parent.is_dir():
        raise InputError(f"The report {str(html)!r} cannot be written.", hint="Name a file in an existing folder.")
    if not os.path.lexists(html):
        return
    try:
        start = None
        if html.is_file():
            with open(html, "rb") as file:
                start = file.read(1000)
    except OSError:
        start = None
    if start is None or (start and _PAGE_MARK not in start):
        raise InputError(f"{str(html)!r} exists and is not a report of brim.", hint="Name a new file for the report.")


def write_page(log: Path, html: Path) -> None:
    """Write the page about a log atomically."""
    run = read_run(log)
    if not run.good_lines:
        problem = f"none of its {run.bad_lines:,} lines is brim's" if run.bad_lines else "it is empty"
        raise InputError(
            f"{str(log)!r} is not a log of a run: {problem}.", hint="brim run --log FILE.jsonl writes one."
        )
    if html.exists() and html.samefile(log):
        raise InputError("The page would replace its log.", hint="Give the page another name.")
    check_page(html)
    with failures(html.absolute().parent):
        write_whole(html.absolute(), render(run, time.time()).encode(), private=True)


def write_side_by_side(logs: Sequence[Path], html: Path) -> None:
    """Write one page about several runs: how each ended, its figures, its curve, drawn to one scale."""
    check_page(html)
    runs = [read_run(log) for log in logs]
    peaks = [max(run_summary.peak_of(run)[0], run.head.limit_bytes or 0) for run in runs]
    top, span = max([*peaks, 1]), max([run.seconds for run in runs] + [1e-3])
    for depth in range(1, 10):  # as many folders of the names as make them distinct
        names = ["/".join(run.path.absolute().parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            break
    else:
        names = [f"{run.path} ({number})" for number, run in enumerate(runs, 1)]
    now = time.time()
    columns = "".join(_column(run, name, now, top, span) for run, name in zip(runs, names, strict=True))
    values = [{figure.label: figure.value for figure in run_summary.figures_of(run)} for run in runs]
    labels = list(dict.fromkeys(label for figures in values for label in figures))
    rows = [(label, *(figures.get(label, "–") for figures in values)) for label in labels]
    table = _table([(name, "number") for name in ("", *names)], [("", map(escape, row)) for row in rows])
    title = f"{len(runs)} runs side by side"
    parts = {
        **dict.fromkeys(_PARTS, ""),
        "header": f'<p class="made">made {escape(date_time(now))}</p><h1>{title}</h1>',
        "figures": f'<div class="columns">{columns}</div><section><h2>Figures</h2>{table}</section>',
        "title": title,
    }
    with failures(html.absolute().parent):
        write_whole(html.absolute(), _fill(parts, "null", live=False)[0].encode(), private=True)


def _column(run: RunLog, name: str, now: float, top: int, span: float) -> str:
    verdict = run_summary.verdict_of(run, now)
    points = " ".join(f"{300 * s.x / span:.1f},{120 - 110 * s.total_bytes / top:.1f}" for s in run.samples)
    line = ""
    if limit := run.head.limit_bytes:
        y = 120 - 110 * limit / top
        line = f'<line class="limit" x1="0" x2="300" y1="{y:.1f}" y2="{y:.1f}"/>'
        line += f'<text class="axis" x="298" y="{y - 2 if y > 12 else y + 9:.1f}" text-anchor="end">limit</text>'
    axes = (
        f'<text class="axis" x="2" y="9">{escape(format_size(top))}</text><text class="axis" x="2" y="134">0 s</text>'
        f'<text class="axis" x="298" y="134" text-anchor="end">{escape(format_duration(span))}</text>'
    )
    summary = f"memory up to {format_size(run_summary.peak_of(run)[0])} in {format_duration(run.seconds)}"
    return (
        f"<section><h2>{escape(name)}</h2><p><code>{escape(run_summary.name_of(run)[:_LONG_NAME])}</code></p>"
        f'{_verdict(verdict)}<svg viewBox="0 0 300 138" role="img" aria-label="{escape(summary)}">'
        '<rect class="ground" width="300" height="124"/>'
        f'<polyline class="small-curve" points="{points}"/>{line}{axes}</svg></section>'
    )


def render(run: RunLog, now: float) -> str:
    """Return the page as text; `now` is the time at which it is made."""
    made_text = f"brim report, made {date_time(now)} {time.strftime('%Z', time.localtime(now))}"
    return _fill(_parts(run, now, made_text, live=False), _data(run), live=False)[0]


def live_shell() -> tuple[str, str]:
    """Return the empty page of a running command, which its script fills, and its policy."""
    return _fill({**dict.fromkeys(_PARTS, ""), "title": "brim"}, "null", live=True)


def live_parts(run: RunLog, now: float) -> dict[str, Any]:
    """Return the present parts of the live page."""
    live = run.end is None
    parts = _parts(run, now, "brim, live" if live else "brim, live until its end", live)
    return {**parts, "data": json.loads(_data(run)) if run.samples else None, "over": not live}


def _fill(parts: Mapping[str, str], data: str, live: bool) -> tuple[str, str]:
    """Return the page with its parts, and its policy."""

    def read(name: str) -> str:
        return files("brim.monitor.report").joinpath(name).read_text(encoding="utf-8")

    script = "\n".join(["(() => {", '"use strict";', *map(read, _SCRIPTS), "})();"])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    connection = ""
    if live:
        policy += "; connect-src 'self'; base-uri 'none'; form-action 'none'"
        connection = '<p id="connection" class="connection" role="status">connecting</p>'
    texts = {"title": escape(parts["title"]), "css": read("page.css"), "dark_css": read("dark.css")}
    values = {**parts, **texts, "connection": connection, "data": data, "script": script, "policy": policy}
    return Template(read("page.html")).substitute(values), f"{policy}; frame-ancestors 'none'"


def _parts(run: RunLog, now: float, made_text: str, live: bool) -> dict[str, str]:
    """Return every part of the page as HTML in which all texts of the log are escaped, and its title as text."""
    verdict = run_summary.live_verdict(run) if live else run_summary.verdict_of(run, now)
    name = run_summary.name_of(run)
    figures = ""
    for figure in run_summary.figures_of(run):
        detail = f'<dd class="detail">{escape(figure.detail)}</dd>' if figure.detail else ""
        wide = ' class="wide"' if len(figure.detail) > _LONG_DETAIL else ""
        figures += f"<div{wide}><dt>{escape(figure.label)}</dt><dd>{escape(figure.value)}</dd>{detail}</div>"
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in run_summary.remarks_of(run))
    return {
        "title": f"{name[:80]}: {'live' if live else verdict.badge}",
        "header": _header(run, name, verdict, made_text, live),
        "figures": f'<section aria-label="Key figures"><dl class="figures">{figures}</dl></section>',
        "chart": _chart(run) if run.samples else "",
        "work": _work(run, live),
        "stacks": _stacks(run),
        "forecast": _forecast(run),
        "postmortem": "" if live else _postmortem(run_summary.postmortem_of(run, now)),
        "events": _events(run),
        "nodes": _nodes(run),
        "processes": _processes(run),
        "remarks": f'<section aria-label="Remarks"><ul class="remarks">{remarks}</ul></section>' if remarks else "",
        "footer": _footer(run),
    }


def _section(name: str, title: str, body: str, kind: str = "") -> str:
    return f'<section aria-labelledby="{name}"{_class(kind)}><h2 id="{name}">{title}</h2>\n{body}</section>'


def _table(columns: Sequence[tuple[str, str]], rows: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Return a table; `columns` are labels and classes, `rows` are classes and cells of HTML."""

    def line(tag: str, row_class: str, cells: Iterable[str]) -> str:
        inside = "".join(f"<{tag}{_class(kind)}>{cell}</{tag}>" for cell, (_, kind) in zip(cells, columns, strict=True))
        return f"<tr{_class(row_class)}>{inside}</tr>"

    head = line("th", "", (escape(label) for label, _ in columns))
    body = "".join(line("td", row_class, cells) for row_class, cells in rows)
    return f'<div class="scroll" tabindex="0"><table><thead>{head}</thead>\n<tbody>{body}</tbody></table></div>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _verdict(verdict: run_summary.RunVerdict) -> str:
    return f'<p class="verdict {verdict.grade}"><strong>{escape(verdict.badge)}</strong> {escape(verdict.sentence)}</p>'


def _header(run: RunLog, name: str, verdict: run_summary.RunVerdict, made_text: str, live: bool) -> str:
    shown = escape(name if len(name) <= _LONG_NAME else name[:_LONG_NAME] + "…")
    header = f'<p class="made">{escape(made_text)}</p><h1><code>{shown}</code></h1>'
    if len(name) > _LONG_NAME:
        command = escape("\n".join(run.head.command) or name)
        header += f'<details><summary>The full command</summary><pre tabindex="0">{command}</pre></details>'
    header += _verdict(verdict)
    if live and run.head.stop_file:  # a command to copy, because the page itself cannot stop the run
        command = escape(f"touch {shlex.quote(run.head.stop_file)}", quote=True)
        button = f'<button data-copy="{command}">copy</button>'
        header += f'<p class="stop">To stop it: <code>{command}</code> {button}</p>'
    return header


def _work(run: RunLog, live: bool) -> str:
    """Return the shards or units of a job, with their states."""
    finished = [event for event in run.events if event.kind == "shard"]
    if run.work is None and not finished:
        return ""
    work = run.work or WorkState(finished=run.event_counts.get("shard", 0))
    summary, running = f"{work.finished:,}{f' of {work.total:,}' if work.total else ''} done", len(work.running)
    if live:
        summary += f", {running + work.more_running:,} under way"
        waiting = (work.total or 0) - work.finished - running - work.more_running
        summary += f", {waiting:,} waiting" if waiting > 0 else ""
    summary = escape(f"{work.phase}: {summary}" if work.phase else summary)
    columns = [("name", "name"), ("state", "state"), ("size", "number"), ("when", "number")]
    rows = [*_unfinished(run, work, live), *map(_finished, reversed(finished[-_MOST_TASKS:]))]
    omitted = run.event_counts.get("shard", 0) - min(len(finished), _MOST_TASKS)
    footnote = f"<p>{omitted:,} more that are done are in the log.</p>" if omitted > 0 else ""
    progress = min(work.finished / work.total, 1.0) if work.total else 0.0
    bar = f'<progress max="1" value="{progress:.4f}" aria-label="{summary}"></progress>' if work.total else ""
    table = _table(columns, [(kind, map(escape, cells)) for kind, *cells in rows])
    return _section("work", "Shards and units", f"<p>{summary}</p>{bar}\n{table}{footnote}")


def _unfinished(run: RunLog, work: WorkState, live: bool) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield running tasks, then those that wait for a retry, as class and cells."""
    now = run.last_t or 0.0
    for task in work.running:
        state = "under way" if live else "begun and not finished"
        state += f", tried {task.tries + 1} times" if task.tries else ""
        when = f"for {format_duration(now - task.t)}" if live else ""
        yield "running", task.name, state, format_size(task.bytes), when
    for name, tries in work.retries:
        yield "again", name, f"to be tried again (tried {tries}×)", "", ""


def _finished(event: LogEvent) -> tuple[str, str, str, str, str]:
    name, _, details = event.text.rpartition(": ")
    match = _SIZE_AND_STATE.fullmatch(details)
    size, state = (match[1] or "", match[2]) if match and name else ("", "done")
    return "damaged" if state == "damaged" else "done", name or event.text, state, size, f"at {stamp(event.x)}"


def _stacks(run: RunLog) -> str:
    """Return the stacks of Python processes at the alarm."""
    events = [event for event in run.events if event.kind == "stacks"]
    if not events:
        return ""
    shown = "".join(
        f"<details{' open' if number == 0 else ''}><summary>{stamp(event.x)}: {escape(event.text)}</summary>"
        f'<pre tabindex="0">{escape(chr(10).join(event.lines))}</pre></details>'
        for number, event in enumerate(reversed(events[-_MOST_STACKS:]))
    )
    return _section("stacks", "Stacks of its Python processes", shown)


def _chart(run: RunLog) -> str:
    first, last = run.samples[0], run.samples[-1]
    summary = (
        f"Memory over {format_duration(run.seconds)}: {format_size(first.total_bytes)} at first, "
        f"{format_size(run_summary.peak_of(run)[0])} at most, {format_size(last.total_bytes)} at last"
        + (f"; the limit is {format_size(run.head.limit_bytes)}" if run.head.limit_bytes else "")
    )
    columns = [(label, "number") for label in ("time", "memory", "anonymous", "shared", "swap", "file pages")]
    samples = run.samples[:: max(len(run.samples) // _TABLE_ROWS, 1)]
    sizes = [(s.total_bytes, s.anon_bytes, s.shmem_bytes, s.swap_bytes, s.file_bytes) for s in samples]
    rows = [("", (stamp(s.x), *map(format_size, row))) for s, row in zip(samples, sizes, strict=True)]
    body = f"""<figure id="chart"><div class="controls" hidden></div>
<div class="plot" tabindex="0" role="slider" aria-label="{escape(summary)}. Arrow keys read values."
 aria-valuemin="0" aria-valuemax="{run.seconds:.0f}" aria-valuenow="0"><noscript>{escape(summary)}.</noscript></div>
<div class="readout" hidden></div><ul class="legend"></ul>
<figcaption>From {escape(date_time(first.t))} to {escape(date_time(last.t))}. Memory that counts is
anonymous, shared and swapped; file pages are shown in addition: the kernel reclaims them when it needs memory.
</figcaption></figure>
<details><summary>The curve as a table</summary>{_table(columns, rows)}</details>"""
    return _section("over-time", "Memory over time", body)


def _forecast(run: RunLog) -> str:
    forecast, (peak, _) = run.head.forecast, run_summary.peak_of(run)
    if forecast is None:
        return ""
    limit = run.head.limit_bytes or 0
    top = 1.05 * max(forecast.high_bytes, peak, limit, 1)

    def position(size: int) -> str:
        return f"{100 * size / top:.2f}%"

    width = max(forecast.high_bytes - forecast.low_bytes, top / 200)
    line = f'<line class="limit" x1="{position(limit)}" x2="{position(limit)}" y1="0" y2="44"/>' if limit else ""
    limit_key = '<span class="key limit"></span>limit' if limit else ""
    body = f"""<p>{escape(run_summary.forecast_text(run))}</p>
<svg class="forecast" width="100%" height="44" aria-hidden="true"><rect class="ground" width="100%" height="44"/>
<rect class="foretold up-to" y="4" width="{position(forecast.low_bytes)}" height="16"/>
<rect class="foretold" x="{position(forecast.low_bytes)}" y="4" width="{100 * width / top:.2f}%" height="16"/>
<rect class="fact" x="0" y="24" width="{position(peak)}" height="16"/>{line}</svg>
<p class="keys"><span class="key foretold"></span>forecast <span class="key fact"></span>measured {limit_key}</p>"""
    return _section("forecast", "Forecast and measurement", body)


def _postmortem(lines: list[str]) -> str:
    """Return labels and indented lines of a terminal as a list of labels and sentences."""
    rows: list[tuple[str, str]] = []
    for line in lines:
        if match := _LABELLED.match(line):
            rows.append((match[1], match[2]))
        elif line.strip() and rows and line.startswith(" "):
            rows[-1] = rows[-1][0], f"{rows[-1][1]} {line.strip()}"
        elif line.strip():
            rows.append(("", line.strip()))
    if not rows:
        return ""
    items = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(text)}</dd></div>" if label else f"<p>{escape(text)}</p>"
        for label, text in rows
    )
    return _section("died", "Why it ended", f'<div class="why"><dl>{items}</dl></div>', "postmortem")


def _events(run: RunLog) -> str:
    events = _limit_events(event for event in run.events if event.kind not in _IN_OTHER_SECTIONS)
    if not events:
        return ""
    rows = [
        (_weight(e), (f'<button data-x="{e.x:.3f}">{stamp(e.x)}</button>', escape(e.kind), escape(e.text)))
        for e in events
    ]
    elsewhere = sum(run.event_counts.get(kind, 0) for kind in _IN_OTHER_SECTIONS)
    omitted = sum(run.event_counts.values()) - len(events) - elsewhere
    footnote = f"<p>{omitted:,} more are in the log.</p>" if omitted > 0 else ""
    return _section("events", "What happened", _table([("time", ""), ("what", "kind"), ("", "text")], rows) + footnote)


def _limit_events(events: Iterable[LogEvent]) -> list[LogEvent]:
    """Return events for display: of too many, every second one of the commonest kind is left out."""
    shown = [event for event in events if event.kind != "postmortem"]
    while len(shown) > _MOST_EVENTS:
        commonest, _ = Counter(event.kind for event in shown).most_common(1)[0]
        dropped = {*[number for number, event in enumerate(shown) if event.kind == commonest][1::2]}
        shown = [event for number, event in enumerate(shown) if number not in dropped]
    return shown


def _weight(event: LogEvent) -> str:
    weight = _WEIGHTS.get(event.kind, "quiet")
    return "warn" if weight == "grave" and event.elsewhere else weight


def _nodes(run: RunLog) -> str:
    """Return the memory of the job on the nodes of a cluster."""
    if not run.node_peaks:
        return ""
    limit, top = run.head.limit_bytes, max(*run.node_peaks.values(), 1)
    rows = [
        ("", (escape(name), format_size(peak), _bar(peak, top), percent(peak / limit) if limit else "–"))
        for name, peak in sorted(run.node_peaks.items(), key=lambda pair: -pair[1])
    ]
    table = _table([("node", "name"), ("peak", "number"), ("", "bar"), ("of the limit", "number")], rows)
    note = "The memory of this job's tasks on each node, sampled twice a second. The curve above is that of the driver."
    return _section("nodes", "Nodes", f'{table}\n<p class="note">{note}</p>\n')


def _bar(size: int, top: int) -> str:
    return (
        f'<svg width="100%" height="10" aria-hidden="true">'
        f'<rect class="fact" width="{100 * size / top:.1f}%" height="10"/></svg>'
    )


def _processes(run: RunLog) -> str:
    shown = run.processes[:_MOST_PROCESSES]
    if not shown:
        return ""
    top = max(shown[0].peak_bytes, 1)
    columns = [
        ("pid", "number"),
        ("name", "name"),
        ("peak", "number"),
        ("", "bar"),
        ("at", "number"),
        ("last", "number"),
    ]
    rows = []
    for process in shown:
        last = format_size(process.last_bytes) if process.last_bytes is not None else "–"
        peak = format_size(process.peak_bytes), _bar(process.peak_bytes, top), stamp(process.peak_x)
        rows.append(("", (str(process.pid), escape(process.name), *peak, last)))
    omitted = len(run.processes) - len(shown)
    suffix = f" {omitted:,} smaller ones are left out." if omitted else ""
    note = f"""Pages that several processes share count for each, so the sum may exceed the curve. Processes are listed
at some of the samples. “–”: ended, or no longer among the largest.{suffix}"""
    return _section("processes", "Processes", f'{_table(columns, rows)}\n<p class="note">{note}\n</p>\n')


def _footer(run: RunLog) -> str:
    head = run.head
    machine = [
        f"{format_size(head.ram_bytes)} of RAM" if head.ram_bytes else "",
        f"{format_size(head.swap_bytes)} of swap" if head.swap_bytes else "no swap" if head.swap_bytes == 0 else "",
        f"{head.cpus} CPUs" if head.cpus else "",
        head.kernel,
        f"boot {head.boot_id}" if head.boot_id else "",
    ]
    versions = ", ".join(f"{name} {version}" for name, version in head.versions)
    lines = [", ".join(filter(None, machine)), versions, f"made from {run.path.name}"]
    return "".join(f"<p>{escape(line)}</p>" for line in lines if line)


def _data(run: RunLog) -> str:
    """Return what the script draws, as JSON in which nothing can end the element that contains it."""
    names = {process.pid: process.name for process in run.processes}
    columns = ("anon", "shmem", "swap", "file", "total", "available")
    data = {
        "x": [round(sample.x, 3) for sample in run.samples],
        "t": [round(sample.t, 3) for sample in run.samples],
        **{name: [getattr(sample, f"{name}_bytes") for sample in run.samples] for name in columns},
        "seconds": run.seconds,
        "zone_s": time.localtime(run.samples[0].t if run.samples else 0).tm_gmtoff,
        "peak": {"x": run.peak.x, "bytes": run_summary.peak_of(run)[0]} if run.peak else None,
        "limit": run.head.limit_bytes,
        "thresholds": [{"name": name, "bytes": size} for name, size in run.head.thresholds],
        "events": [{"x": e.x, "kind": e.kind, "text": e.text, "weight": _weight(e)} for e in _limit_events(run.events)],
        "gaps": run.gaps,
        "outlook": run.outlook if run.end is None else None,
        "processes": [
            {"pid": pid, "name": names.get(pid, "?"), "points": points} for pid, points in run.process_series.items()
        ],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
