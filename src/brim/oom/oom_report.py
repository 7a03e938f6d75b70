"""A report for people: the last kill in full, those before it in a line each, then what was read."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from datetime import datetime

from brim.oom import explain
from brim.oom.kills import Evidence, Kill, Restart, Source
from brim.sizes import format_size

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
