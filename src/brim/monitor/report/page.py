"""The report: one HTML page that needs nothing else, made from a run's log.

Texts, tables and figures are plain HTML, so that the page can be read, printed and searched without a script;
the script draws the curve. All texts of the log are escaped here, and the page's own policy allows no
script but the one it was made with, and no network.
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
from brim.monitor.report import run_texts
from brim.monitor.report.log_series import Event, RunLog, read_run
from brim.monitor.watching.run_log import WorkState
from brim.sizes import format_size
from brim.state.atomic_files import failures, write_whole

_SCRIPTS = ("scale.js", "chart.js", "cursor.js", "live.js")
_PARTS = (
    "header", "figures", "chart", "work", "stacks", "nodes", "forecast", "postmortem", "events", "processes", "remarks",
    "footer",
)  # fmt: skip
_STACKED = 3  # processes whose stacks are shown
_MOST_PROCESSES, _MOST_EVENTS, _MOST_TASKS, _TABLE_ROWS = 40, 300, 200, 24
_LONG_DETAIL, _LONG_NAME = 60, 160
_SIZED = re.compile(r"(?:([\d.,]+ [KMGTPE]?i?B) )?(.+)")  # of a shard that is done: its size, and how
_ELSEWHERE = ("postmortem", "shard")  # kinds of events that have a place of their own on the page
_LABELLED = re.compile(r" {0,12}(\w[\w ]{1,12}?) {2}(\S.*)$")
# Anything else that a log may hold is quiet: it is listed, and a tick on the axis.
_WEIGHTS = {
    **dict.fromkeys(("kill", "oom", "stop", "term", "refused", "error"), "grave"),
    **dict.fromkeys(("alert", "exhaustion", "swap", "system"), "warn"),
    "mark": "mark",
}


_MARK = b"; script-src 'sha256-"  # in the head of every page


def check_page(html: Path) -> None:
    """Refuse a page that would take the place of something else: there may be nothing, nothing in it, or a page."""
    if html.is_dir() or not html.absolute().parent.is_dir():
        raise InputError(
            f"The report {str(html)!r} cannot be written there.", hint="Name a file in an existing folder."
        )
    if os.path.lexists(html) and not _is_page(html):
        raise InputError(f"{str(html)!r} exists and is not a report of brim.", hint="Name a new file for the report.")


def _is_page(html: Path) -> bool:
    if not html.is_file():
        return False
    try:
        with open(html, "rb") as file:
            begin = file.read(1000)
    except OSError:
        return False
    return not begin or _MARK in begin


def write_page(log: Path, html: Path) -> None:
    """Write the page about a log. It appears whole or not at all."""
    run = read_run(log)
    if not run.good_lines:
        what = f"none of its {run.bad_lines:,} lines is brim's" if run.bad_lines else "it is empty"
        raise InputError(f"{str(log)!r} is not a log of a run: {what}.", hint="brim run --log FILE.jsonl writes one.")
    if html.exists() and html.samefile(log):
        raise InputError("The page would take the place of its log.", hint="Give the page another name.")
    check_page(html)
    with failures(html.absolute().parent):
        write_whole(html.absolute(), render(run, time.time()).encode(), private=True)


def write_side_by_side(logs: Sequence[Path], html: Path) -> None:
    """One page about several runs, drawn to one scale."""
    check_page(html)
    with failures(html.absolute().parent):
        page = side_by_side([read_run(log) for log in logs], time.time())
        write_whole(html.absolute(), page.encode(), private=True)


def side_by_side(runs: Sequence[RunLog], now: float) -> str:
    """Runs in columns: how each ended, its figures, its curve. Time and memory have the same scale in all."""
    top = max([most for run in runs for most in (run_texts.peak_of(run)[0], run.head.limit_bytes or 0)] + [1])
    span = max([run.seconds for run in runs] + [1e-3])
    names = _distinct_names(runs)
    columns = "".join(_column(run, name, now, top, span) for run, name in zip(runs, names, strict=True))
    labels = list(dict.fromkeys(figure.label for run in runs for figure in run_texts.figures_of(run)))
    rows = [[label, *(_value(run, label) for run in runs)] for label in labels]
    table = _table(["", *names], rows)
    parts = {
        **dict.fromkeys(_PARTS, ""),
        "header": f'<p class="made">made {escape(run_texts.clock(now))}</p><h1>{len(runs)} runs side by side</h1>',
        "figures": f'<div class="columns">{columns}</div><section><h2>Figures</h2>{table}</section>',
        "title": f"{len(runs)} runs side by side",
    }
    return _filled(parts, "null", live=False)[0]


def _distinct_names(runs: Sequence[RunLog]) -> list[str]:
    """Return the names of the logs, with as many folders in front as make them distinct."""
    for parts in range(1, 10):
        names = ["/".join(run.path.absolute().parts[-parts:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{run.path} ({number})" for number, run in enumerate(runs, 1)]


def _column(run: RunLog, name: str, now: float, top: int, span: float) -> str:
    verdict = run_texts.verdict_of(run, now)
    points = " ".join(f"{300 * s.x / span:.1f},{120 - 110 * s.total_bytes / top:.1f}" for s in run.samples)
    limit = run.head.limit_bytes
    y = 120 - 110 * limit / top if limit else 0
    line = f'<line class="limit" x1="0" x2="300" y1="{y:.1f}" y2="{y:.1f}"/>' if limit else ""
    if limit:
        line += f'<text class="axis" x="298" y="{y - 2 if y > 12 else y + 9:.1f}" text-anchor="end">limit</text>'
    axes = (
        f'<text class="axis" x="2" y="9">{escape(format_size(top))}</text><text class="axis" x="2" y="134">0 s</text>'
        f'<text class="axis" x="298" y="134" text-anchor="end">{escape(run_texts.took(span))}</text>'
    )
    summary = f"memory up to {format_size(run_texts.peak_of(run)[0])} in {run_texts.took(run.seconds)}"
    return (
        f"<section><h2>{escape(name)}</h2><p><code>{escape(run_texts.name_of(run)[:_LONG_NAME])}</code></p>"
        f'<p class="verdict {verdict.grade}"><strong>{escape(verdict.word)}</strong> {escape(verdict.sentence)}</p>'
        f'<svg viewBox="0 0 300 138" role="img" aria-label="{escape(summary)}">'
        '<rect class="ground" width="300" height="124"/>'
        f'<polyline class="small-curve" points="{points}"/>{line}{axes}</svg></section>'
    )


def _value(run: RunLog, label: str) -> str:
    return next((figure.value for figure in run_texts.figures_of(run) if figure.label == label), "–")


def render(run: RunLog, now: float) -> str:
    """The page as text; `now` is when it is made."""
    made = f"brim report, made {run_texts.clock(now)} {time.strftime('%Z', time.localtime(now))}"
    return _filled(
        {**_parts(run, now, made, live=False), "title": _title(run, now, live=False)}, _data(run), live=False
    )[0]


def live_shell() -> tuple[str, str]:
    """Return the empty page of a running command, which its script fills, and its policy."""
    return _filled({**dict.fromkeys(_PARTS, ""), "title": "brim"}, "null", live=True)


def live_parts(run: RunLog, now: float) -> dict[str, Any]:
    """What the live page shows at this moment."""
    live = run.end is None
    parts: dict[str, Any] = dict(_parts(run, now, "brim, live" if live else "brim, live until its end", live))
    title = _title(run, now, live)
    return {**parts, "title": title, "data": json.loads(_data(run)) if run.samples else None, "over": not live}


def _filled(parts: Mapping[str, str], data: str, live: bool) -> tuple[str, str]:
    script = "\n".join(["(() => {", '"use strict";', *map(_part, _SCRIPTS), "})();"])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    connection = ""
    if live:
        policy += "; connect-src 'self'; base-uri 'none'; form-action 'none'"
        connection = '<p id="connection" class="connection" role="status">connecting</p>'
    text = Template(_part("page.html")).substitute(
        {name: "" if name == "title" else part for name, part in parts.items()},
        title=escape(parts["title"]),
        connection=connection,
        css=_part("page.css"),
        dark_css=_part("dark.css"),
        data=data,
        script=script,
        policy=policy,
    )
    return text, f"{policy}; frame-ancestors 'none'"


def _title(run: RunLog, now: float, live: bool) -> str:
    word = "live" if live else run_texts.verdict_of(run, now).word
    return f"{run_texts.name_of(run)[:80]}: {word}"


def _parts(run: RunLog, now: float, made: str, live: bool) -> dict[str, str]:
    """Return every part of the page as HTML in which all texts of the log are escaped."""
    verdict, name = run_texts.live_verdict(run) if live else run_texts.verdict_of(run, now), run_texts.name_of(run)
    shown = escape(name if len(name) <= _LONG_NAME else name[:_LONG_NAME] + "…")
    header = (
        f'<p class="made">{escape(made)}</p><h1><code>{shown}</code></h1>{_whole_name(run, name)}'
        f'<p class="verdict {verdict.grade}"><strong>{escape(verdict.word)}</strong> {escape(verdict.sentence)}</p>'
    )
    figures = "".join(map(_figure, run_texts.figures_of(run)))
    return {
        "header": header + (_stop_command(run) if live else ""),
        "figures": f'<section aria-label="Key figures"><dl class="figures">{figures}</dl></section>',
        "chart": _chart(run) if run.samples else "",
        "work": _work(run, live),
        "stacks": _stacks(run),
        "forecast": _forecast(run),
        "postmortem": "" if live else _postmortem(run_texts.postmortem_of(run, now)),
        "events": _events(run),
        "nodes": _nodes(run),
        "processes": _processes(run),
        "remarks": _remarks(run_texts.remarks_of(run)),
        "footer": _footer(run),
    }


def _stop_command(run: RunLog) -> str:
    """Return the command that stops the run, to copy: the page itself cannot stop it."""
    if not run.head.stop_file:
        return ""
    command = escape(f"touch {shlex.quote(run.head.stop_file)}", quote=True)
    return f'<p class="stop">To stop it: <code>{command}</code> <button data-copy="{command}">copy</button></p>'


def _work(run: RunLog, live: bool) -> str:
    """The shards or units of a job, with their state."""
    finished = [event for event in run.events if event.kind == "shard"]
    if run.work is None and not finished:
        return ""
    work = run.work or WorkState(done=run.event_counts.get("shard", 0))
    summary, count = f"{work.done:,}{f' of {work.total:,}' if work.total else ''} done", len(work.running)
    if live:
        summary += f", {count + work.more_running:,} under way"
        waiting = (work.total or 0) - work.done - count - work.more_running
        summary += f", {waiting:,} waiting" if waiting > 0 else ""
    summary = f"{work.what}: {summary}" if work.what else summary
    rows = "".join(
        f'<tr class="{kind}"><td class="name">{escape(name)}</td><td class="state">{escape(state)}</td>'
        f'<td class="number">{escape(amount)}</td><td class="number">{escape(when)}</td></tr>'
        for kind, name, state, amount, when in [
            *_tasks(run, work, live),
            *map(_done, reversed(finished[-_MOST_TASKS:])),
        ]
    )
    left_out = run.event_counts.get("shard", 0) - min(len(finished), _MOST_TASKS)
    more = f"<p>{left_out:,} more that are done are in the log.</p>" if left_out > 0 else ""
    share = min(work.done / work.total, 1.0) if work.total else 0.0
    bar = f'<progress max="1" value="{share:.4f}" aria-label="{escape(summary)}"></progress>' if work.total else ""
    return f"""<section aria-labelledby="work"><h2 id="work">Shards and units</h2>
<p>{escape(summary)}</p>{bar}
<div class="scroll" tabindex="0"><table><thead><tr><th>name</th><th>state</th><th class="number">size</th>
<th class="number">when</th></tr></thead><tbody>{rows}</tbody></table></div>{more}</section>"""


def _tasks(run: RunLog, work: WorkState, live: bool) -> Iterator[tuple[str, str, str, str, str]]:
    """Those under way, then those that wait to be tried again."""
    now = run.last_t or 0.0
    for task in work.running:
        state = "under way" if live else "begun and not finished"
        state += f", tried {task.tries + 1} times" if task.tries else ""
        when = f"for {run_texts.took(max(now - task.t, 0))}" if live else ""
        yield "running", task.name, state, format_size(task.bytes), when
    for name, tries in work.again:
        yield "again", name, f"to be tried again (tried {tries}×)", "", ""


def _done(event: Event) -> tuple[str, str, str, str, str]:
    name, _, rest = event.text.rpartition(": ")
    sized = _SIZED.fullmatch(rest)
    amount, how = (sized[1] or "", sized[2]) if sized and name else ("", "done")
    kind = "damaged" if how == "damaged" else "done"
    return kind, name or event.text, how, amount, f"at {run_texts.stamp(event.x)}"


def _stacks(run: RunLog) -> str:
    """Return the stacks of Python processes at the alarm."""
    summary = [event for event in run.events if event.kind == "stacks"]
    if not summary:
        return ""
    shown = "".join(
        f"<details{' open' if number == 0 else ''}><summary>{run_texts.stamp(event.x)}: {escape(event.text)}</summary>"
        f'<pre tabindex="0">{escape(chr(10).join(event.lines))}</pre></details>'
        for number, event in enumerate(reversed(summary[-_STACKED:]))
    )
    return f'<section aria-labelledby="doing"><h2 id="doing">Stacks of its Python processes</h2>{shown}</section>'


def _part(name: str) -> str:
    return files("brim.monitor.report").joinpath(name).read_text(encoding="utf-8")


def _whole_name(run: RunLog, name: str) -> str:
    if len(name) <= _LONG_NAME:
        return ""
    words = escape("\n".join(run.head.command) or name)
    return f'<details><summary>The whole command</summary><pre tabindex="0">{words}</pre></details>'


def _figure(figure: run_texts.Figure) -> str:
    detail = f'<dd class="detail">{escape(figure.detail)}</dd>' if figure.detail else ""
    wide = ' class="wide"' if len(figure.detail) > _LONG_DETAIL else ""
    return f"<div{wide}><dt>{escape(figure.label)}</dt><dd>{escape(figure.value)}</dd>{detail}</div>"


def _chart(run: RunLog) -> str:
    first, last = run.samples[0], run.samples[-1]
    peak, _ = run_texts.peak_of(run)
    summary = (
        f"Memory over {run_texts.took(run.seconds)}: {format_size(first.total_bytes)} at first, "
        f"{format_size(peak)} at most, {format_size(last.total_bytes)} at last"
        + (f"; the limit is {format_size(run.head.limit_bytes)}" if run.head.limit_bytes else "")
    )
    step = max(len(run.samples) // _TABLE_ROWS, 1)
    rows = [
        [
            run_texts.stamp(s.x),
            *map(format_size, (s.total_bytes, s.anon_bytes, s.shmem_bytes, s.swap_bytes, s.file_bytes)),
        ]
        for s in run.samples[::step]
    ]
    labels = ("time", "memory", "anonymous", "shared", "swap", "file pages")
    return f"""<section aria-labelledby="over-time"><h2 id="over-time">Memory over time</h2>
<figure id="chart"><div class="controls" hidden></div>
<div class="plot" tabindex="0" role="slider" aria-label="{escape(summary)}. Arrow keys read values."
 aria-valuemin="0" aria-valuemax="{run.seconds:.0f}" aria-valuenow="0"><noscript>{escape(summary)}.</noscript></div>
<div class="readout" hidden></div><ul class="legend"></ul>
<figcaption>From {escape(run_texts.clock(first.t))} to {escape(run_texts.clock(last.t))}. Memory that counts is
anonymous, shared and swapped; file pages are shown in addition: the kernel reclaims them when it needs memory.
</figcaption></figure>
<details><summary>The curve as a table</summary>{_table(labels, rows)}</details></section>"""


def _forecast(run: RunLog) -> str:
    forecast, (peak, _) = run.head.forecast, run_texts.peak_of(run)
    if forecast is None:
        return ""
    limit = run.head.limit_bytes or 0
    top = 1.05 * max(forecast.high_bytes, peak, limit, 1)

    def at(size: int) -> str:
        return f"{100 * size / top:.2f}%"

    width = max(forecast.high_bytes - forecast.low_bytes, top / 200)
    line = f'<line class="limit" x1="{at(limit)}" x2="{at(limit)}" y1="0" y2="44"/>' if limit else ""
    return f"""<section aria-labelledby="forecast"><h2 id="forecast">Forecast against fact</h2>
<p>{escape(run_texts.forecast_text(run))}</p>
<svg class="forecast" width="100%" height="44" aria-hidden="true"><rect class="ground" width="100%" height="44"/>
<rect class="foretold up-to" y="4" width="{at(forecast.low_bytes)}" height="16"/>
<rect class="foretold" x="{at(forecast.low_bytes)}" y="4" width="{100 * width / top:.2f}%" height="16"/>
<rect class="fact" x="0" y="24" width="{at(peak)}" height="16"/>{line}</svg>
<p class="keys"><span class="key foretold"></span>forecast <span class="key fact"></span>fact
{'<span class="key limit"></span>limit' if limit else ""}</p></section>"""


def _postmortem(lines: list[str]) -> str:
    """A terminal's labels and indented lines as a list of labels and sentences."""
    rows: list[tuple[str, str]] = []
    for line in lines:
        match = _LABELLED.match(line)
        if match:
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
    return f"""<section aria-labelledby="died" class="postmortem"><h2 id="died">Why it ended</h2>
<div class="why"><dl>{items}</dl></div></section>"""


def _events(run: RunLog) -> str:
    events = _listed(run.events)
    if not events:
        return ""
    rows = "".join(
        f'<tr class="{_weight(event)}"><td><button data-x="{event.x:.3f}">{run_texts.stamp(event.x)}</button></td>'
        f'<td class="kind">{escape(event.kind)}</td><td class="text">{escape(event.text)}</td></tr>'
        for event in events
    )
    left_out = sum(run.event_counts.values()) - len(events) - sum(run.event_counts.get(k, 0) for k in _ELSEWHERE)
    more = f"<p>{left_out:,} more are in the log.</p>" if left_out > 0 else ""
    return f"""<section aria-labelledby="events"><h2 id="events">What happened</h2>
<div class="scroll" tabindex="0"><table><thead><tr><th>time</th><th>what</th><th></th></tr></thead>
<tbody>{rows}</tbody></table></div>{more}</section>"""


def _listed(events: Iterable[Event]) -> list[Event]:
    """Those that are shown: if there are too many, every second one of the commonest kind is left out."""
    return _ticks(event for event in events if event.kind not in _ELSEWHERE)


def _ticks(events: Iterable[Event]) -> list[Event]:
    """Those that are marks on the curve."""
    shown = [event for event in events if event.kind != "postmortem"]
    while len(shown) > _MOST_EVENTS:
        commonest, _ = Counter(event.kind for event in shown).most_common(1)[0]
        alike = [number for number, event in enumerate(shown) if event.kind == commonest]
        dropped = set(alike[1::2])
        shown = [event for number, event in enumerate(shown) if number not in dropped]
    return shown


def _weight(event: Event) -> str:
    weight = _WEIGHTS.get(event.kind, "quiet")
    return "warn" if weight == "grave" and event.elsewhere else weight


def _nodes(run: RunLog) -> str:
    """What the job held on the nodes of a cluster."""
    if not run.node_peaks:
        return ""
    limit, top = run.head.limit_bytes, max(*run.node_peaks.values(), 1)
    rows = "".join(
        f'<tr><td class="name">{escape(name)}</td><td class="number">{format_size(peak)}</td>{_bar(peak, top)}'
        f'<td class="number">{run_texts.percent(peak / limit) if limit else "–"}</td></tr>'
        for name, peak in sorted(run.node_peaks.items(), key=lambda pair: -pair[1])
    )
    return f"""<section aria-labelledby="nodes"><h2 id="nodes">Nodes</h2>
<div class="scroll" tabindex="0"><table><thead><tr><th>node</th><th class="number">peak</th><th class="bar"></th>
<th class="number">of the limit</th></tr></thead>
<tbody>{rows}</tbody></table></div>
<p class="note">What this job's tasks held on each, looked at twice a second. The curve above is the driver's own.</p>
</section>"""


def _bar(part: int, whole: int) -> str:
    return (
        f'<td class="bar"><svg width="100%" height="10" aria-hidden="true">'
        f'<rect class="fact" width="{100 * part / whole:.1f}%" height="10"/></svg></td>'
    )


def _processes(run: RunLog) -> str:
    shown = run.processes[:_MOST_PROCESSES]
    if not shown:
        return ""
    top = max(shown[0].peak_bytes, 1)
    rows = "".join(
        f'<tr><td class="number">{process.pid}</td><td class="name">{escape(process.name)}</td>'
        f'<td class="number">{format_size(process.peak_bytes)}</td>{_bar(process.peak_bytes, top)}'
        f'<td class="number">{run_texts.stamp(process.peak_x)}</td>'
        f'<td class="number">{format_size(process.last_bytes) if process.last_bytes is not None else "–"}</td></tr>'
        for process in shown
    )
    more = f" {len(run.processes) - len(shown):,} smaller ones are left out." if len(run.processes) > len(shown) else ""
    return f"""<section aria-labelledby="processes"><h2 id="processes">Processes</h2>
<div class="scroll" tabindex="0"><table><thead><tr><th class="number">pid</th><th>name</th><th class="number">peak</th>
<th class="bar"></th><th class="number">at</th><th class="number">last</th></tr></thead>
<tbody>{rows}</tbody></table></div>
<p class="note">Pages that several processes share count for each, so these do not add up to the
curve; and as they were listed, which is not at every sample. “–”: ended, or no longer among the largest.{more}
</p></section>"""


def _remarks(remarks: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    return f'<section aria-label="Remarks"><ul class="remarks">{items}</ul></section>' if items else ""


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


def _table(labels: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def line(tag: str, cells: Iterable[str]) -> str:
        inside = "".join(f'<{tag} class="number">{escape(cell)}</{tag}>' for cell in cells)
        return f"<tr>{inside}</tr>"

    head, body = line("th", labels), "".join(line("td", row) for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _data(run: RunLog) -> str:
    """What the script draws, as JSON in which nothing can end the element that holds it."""
    peak, _ = run_texts.peak_of(run)
    columns = ("anon", "shmem", "swap", "file", "total", "available")
    names = {process.pid: process.name for process in run.processes}
    series = {name: [getattr(sample, f"{name}_bytes") for sample in run.samples] for name in columns}
    data = {
        "x": [round(sample.x, 3) for sample in run.samples],
        "t": [round(sample.t, 3) for sample in run.samples],
        **series,
        "seconds": run.seconds,
        "zone_s": time.localtime(run.samples[0].t if run.samples else 0).tm_gmtoff,
        "peak": {"x": run.peak.x, "bytes": peak} if run.peak else None,
        "limit": run.head.limit_bytes,
        "thresholds": [{"name": name, "bytes": size} for name, size in run.head.thresholds],
        "events": [{"x": e.x, "kind": e.kind, "text": e.text, "weight": _weight(e)} for e in _ticks(run.events)],
        "gaps": run.gaps,
        "outlook": run.outlook if run.end is None else None,
        "processes": [
            {"pid": pid, "name": names.get(pid, "?"), "points": points} for pid, points in run.process_series.items()
        ],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
