"""Renderers of a job's progress: a bar in a terminal or notebook, plain lines for log files, JSON lines for programs.

All but JSON write to stderr, so that stdout stays free for results. The run log is a renderer too (`recording.py`).
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from brim.progress import ProgressSnapshot, Renderer
from brim.sizes import format_size, plural
from brim.wording import drawing_stream, escape_controls

_MIN_BAR, _MAX_BAR = 6, 40
_NODES_FROM_COLUMNS = 110


class JsonLines(Renderer):
    """One JSON object per line on stdout."""

    interval_s = 1.0

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def draw(self, state: ProgressSnapshot) -> None:
        facts: dict[str, Any] = {"bytes": state.bytes, "total_bytes": state.total_bytes}
        if state.hashed_bytes:
            facts["hashed_bytes"] = state.hashed_bytes
        if state.rows:
            facts["rows"] = state.rows
        if state.nodes:
            facts["nodes"] = state.nodes
        self.event("progress", state, **facts, memory_bytes=state.memory_bytes)

    def event(self, name: str, state: ProgressSnapshot, /, **facts: Any) -> None:
        if name != "finish":
            self._out.write(json.dumps({"event": name, **facts}) + "\n")
            self._out.flush()


class NotesOnly(Renderer):
    """Only what the user should know."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr

    def event(self, name: str, state: ProgressSnapshot, /, **facts: Any) -> None:
        if name == "note":
            self.write(f"brim: {facts['text']}")

    def write(self, line: str) -> None:
        """Write a line at once, so that lines of several threads do not mix."""
        self._out.write(f"{line}\n")
        self._out.flush()


class PlainLines(NotesOnly):
    """A line every ten seconds, for log files."""

    interval_s = 10.0

    def draw(self, state: ProgressSnapshot) -> None:
        percent = f"{100 * state.done_bytes / state.total_bytes:.0f} %" if state.total_bytes else ""
        texts = [
            percent,
            _amount(state),
            f"{format_size(state.hashed_bytes)} hashed" if state.hashed_bytes else "",
            f"{state.shards_done} of {state.shards} shards" if state.shards else "",
            plural(state.rows, "row") if state.rows else "",
            f"{state.commits} commits" if state.commits else "",
            f"{format_size(state.rate)}/s",
            f"{format_clock(state.left_s)} left" if state.left_s is not None else "",
            f"memory {format_size(state.memory_bytes)} of {format_size(state.limit_bytes)}",
            _nodes_text(state.nodes),
        ]
        self.write(f"{state.phase}: {', '.join(filter(None, texts))}")


class TerminalBar(Renderer):
    """A line with a bar, bytes, rate, time left and memory against the limit, and as much more as fits."""

    interval_s = 0.5

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=drawing_stream())
        self._live = Live(console=self._console, transient=True, auto_refresh=False)
        self._columns = self._console.width

    def draw(self, state: ProgressSnapshot) -> None:
        from rich.text import Text

        columns = self._console.width
        if columns < self._columns and self._console.is_terminal:
            # The terminal has wrapped the longer line: erase its first rows, of which rich does not know.
            self._console.file.write(f"\x1b[{-(-self._columns // columns) - 1}A\r\x1b[J")
        self._columns = columns
        gauge, texts = self._fit(state, columns - len(state.phase) - _MIN_BAR - len(" 100 %") - 2)
        percent = f"{100 * state.done_bytes / state.total_bytes:>3.0f} %" if state.total_bytes else ""
        texts = [percent, *texts]
        used = len(state.phase) + len(gauge) + sum(len(text) + 1 for text in texts if text) + 2
        width = min(max(columns - used, _MIN_BAR), _MAX_BAR)
        filled = width * state.done_bytes // state.total_bytes if state.total_bytes else 0
        line = Text(no_wrap=True, overflow="crop", end="")
        line.append(f"{state.phase} ").append("━" * filled, "green").append("━" * (width - filled), "bright_black")
        line.append("".join(f" {text}" for text in texts if text)).append(f" {gauge}", "cyan")
        self._live.update(line, refresh=True)

    def _fit(self, state: ProgressSnapshot, columns: int) -> tuple[str, list[str]]:
        """Return the memory gauge and the texts that fit, the most important first."""
        memory, limit, nodes = format_size(state.memory_bytes), format_size(state.limit_bytes), _nodes_text(state.nodes)
        gauges = [f"memory {memory} of {limit}", f"mem {memory}/{limit}"]
        if nodes:
            narrow = f"node max {format_size(max(state.nodes.values()))}"
            wide = self._console.width >= _NODES_FROM_COLUMNS
            gauges = [f"memory {memory} of {limit}, {nodes}", f"memory {memory}, {nodes}"] if wide else [narrow]
        amount = _amount(state)
        rate = f"{format_size(state.rate)}/s" if state.rate > 1 else ""
        remaining = f"{format_clock(state.left_s)} left" if state.left_s else ""
        optional = [
            plural(state.rows, "row") if state.rows else "",
            f"{state.shards_done}/{state.shards} shards" if state.shards else "",
            f"{format_size(state.hashed_bytes)} hashed" if state.hashed_bytes else "",
            f"{state.commits} commits" if state.commits else "",
        ]
        first = [amount, rate, remaining]
        needed = sum(len(text) + 1 for text in first if text)
        gauge = next((text for text in gauges if len(text) + needed <= columns), gauges[-1])
        space, selected = columns - len(gauge), []
        for text in [*first, *(f" {text}" for text in optional if text)]:
            if text and len(text) + 1 <= space:
                space -= len(text) + 1
                selected.append(text)
        return gauge, selected

    def event(self, name: str, state: ProgressSnapshot, /, **facts: Any) -> None:
        if name == "start":
            self._live.start()
        if name in ("start", "shard"):
            self.draw(state)
        elif name == "note":
            self._console.print(escape_controls(facts["text"]), markup=False, highlight=False)
        elif name == "finish":
            self._live.stop()


class NotebookBar(NotesOnly):
    """A bar as HTML that is replaced in its cell and needs no widgets: Jupyter, VS Code and Colab show it.

    Front ends without HTML show the same as a line of text.
    """

    interval_s = 0.3  # a job that ends before shows nothing

    def __init__(self, display: Any = None) -> None:
        super().__init__()
        self._display = display or sys.modules["IPython"].display.display
        self._handle: Any = None
        self._job: tuple[str, int] | None = None  # the first phase and its total

    def draw(self, state: ProgressSnapshot, ended: bool = False) -> None:
        phase, total = self._job if ended and self._job else (state.phase, state.total_bytes)
        done_bytes = total or state.bytes if ended else state.done_bytes
        seconds = state.job_s if ended else state.elapsed_s
        texts = [f"{format_size(done_bytes)} of {format_size(total)}" if total else format_size(done_bytes)]
        texts.append(f"{format_size(done_bytes / max(seconds, 1e-6))}/s")
        if ended:
            texts.append(format_clock(seconds))
        elif state.left_s:
            texts.append(f"{format_clock(state.left_s)} left")
        texts.append(f"memory {format_size(state.memory_bytes)} of {format_size(state.limit_bytes)}")
        value = f' value="{1.0 if ended else done_bytes / total:.4f}"' if ended or total else ""
        line = (
            '<div style="display:flex;gap:1em;align-items:center;font-family:monospace">'
            f'<span>{html.escape(phase)}</span><progress style="flex:1;max-width:30em"{value} max="1"></progress>'
            f"<span>{html.escape(' · '.join(texts))}</span></div>"
        )
        bundle = {"text/plain": f"{phase}: {', '.join(texts)}", "text/html": line}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
            self.interval_s = 0.5
        else:
            self._handle.update(bundle, raw=True)

    def event(self, name: str, state: ProgressSnapshot, /, **facts: Any) -> None:
        super().event(name, state, **facts)
        if name == "start":
            self._job = self._job or (state.phase, state.total_bytes)
        elif name == "finish":
            if self._handle is not None and self._job is not None:
                self.draw(state, ended=True)
            self._job = None


def in_notebook() -> bool:
    """Check whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def format_clock(seconds: float) -> str:
    """Format a duration as 1:02 or 1:02:03."""
    minutes, remainder = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"


def _amount(state: ProgressSnapshot) -> str:
    amount = format_size(state.done_bytes)
    return f"{amount} of {format_size(state.total_bytes)}" if state.total_bytes else amount


def _nodes_text(memory_by_node: Mapping[str, int]) -> str:
    """Return how many nodes there are, and the memory of the node that uses most."""
    return (
        f"{plural(len(memory_by_node), 'node')} up to {format_size(max(memory_by_node.values()))}"
        if memory_by_node
        else ""
    )
