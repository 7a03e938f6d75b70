"""How a running job shows itself: a bar in a terminal or a notebook, a line now and then elsewhere, or JSON lines.

Everything but JSON goes to stderr, so that stdout stays for results.

In a notebook it is HTML that is written again in its place, so that it needs no widgets.
Jupyter, VS Code and Colab show it; where a front end has no HTML, the same as a line of text.
"""

from __future__ import annotations

import html
import json
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, TextIO

from brim.memory.meter import tree_bytes
from brim.sizes import format_size, plural
from brim.wording import drawing_stream, escape_controls

_PLAIN_EVERY_S = 10.0
_JSON_EVERY_S = 1.0
_GAUGE_EVERY_S = 0.5
_WIDE_COLUMNS = 110  # for what nodes hold
_BAR_COLUMNS = 17  # a short bar, the percentage, and what stands between columns


class JsonLines:
    """One JSON object a line on stdout."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._lock, self._counting = threading.Lock(), threading.Lock()
        self._done = self._total = self._hashed = self._rows = 0
        self._said = 0.0
        self._nodes: Mapping[str, int] = {}

    def emit(self, event: str, **facts: Any) -> None:
        with self._lock:
            self._out.write(json.dumps({"event": event, **facts}) + "\n")
            self._out.flush()

    def start(self, what: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
        self._done, self._total, self._hashed, self._said = 0, total_bytes, 0, time.monotonic()
        self._rows = 0
        self.emit("start", what=what, total_bytes=total_bytes, shards=shards, limit_bytes=limit_bytes)

    def advance(self, size: int) -> None:
        with self._counting:
            self._done += size
            due = time.monotonic() - self._said >= _JSON_EVERY_S
            if due:
                self._said = time.monotonic()
        if due:
            more: dict[str, Any] = {"hashed_bytes": self._hashed} if self._hashed else {}
            if self._rows:
                more["rows"] = self._rows
            if self._nodes:
                more["nodes"] = dict(self._nodes)
            self.emit("progress", bytes=self._done, total_bytes=self._total, **more, memory_bytes=tree_bytes())

    def hashed(self, size: int) -> None:
        with self._counting:
            self._hashed += size
        self.advance(0)

    def rows(self, count: int) -> None:
        with self._counting:
            self._rows += count

    def committed(self) -> None:
        self.emit("commit")

    def shard(self, name: str, size: int, sha256: str, how: str) -> None:
        self.emit("shard", name=name, bytes=size, sha256=sha256, how=how)

    def note(self, text: str) -> None:
        self.emit("note", text=text)

    def nodes(self, held: Mapping[str, int]) -> None:
        self._nodes = held
        self.advance(0)

    def finish(self) -> None:
        pass


def _say(out: TextIO, line: str) -> None:
    """A line in one write: those of several threads do not run into each other."""
    out.write(f"{line}\n")
    out.flush()


class NotesOnly:
    """No progress, but what the user should know."""

    def start(self, what: str, total_bytes: int, shards: int, limit_bytes: int) -> None: ...
    def advance(self, size: int) -> None: ...
    def hashed(self, size: int) -> None: ...
    def committed(self) -> None: ...
    def shard(self, name: str, size: int, sha256: str, how: str) -> None: ...
    def nodes(self, held: Mapping[str, int]) -> None: ...
    def finish(self) -> None: ...

    def note(self, text: str) -> None:
        _say(sys.stderr, f"brim: {text}")


class PlainLines:
    """For logs: a line when it starts, and every ten seconds."""

    def __init__(self, out: TextIO | None = None, clock: Any = time.monotonic) -> None:
        self._out, self._clock = out or sys.stderr, clock
        self._lock = threading.Lock()
        self._what = ""
        self._done = self._total = self._limit = self._hashed = self._commits = 0
        self._shards = self._shards_done = self._rows = 0
        self._began = self._said = self._looked = 0.0
        self._nodes: Mapping[str, int] = {}
        self.peak_bytes = self.node_peak_bytes = 0

    def start(self, what: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
        self._what, self._total, self._shards, self._limit = what, total_bytes, shards, limit_bytes
        self._done = self._shards_done = self._hashed = self._rows = 0
        self._began = self._said = self._clock()

    def advance(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = self._clock()
            if now - self._looked >= _GAUGE_EVERY_S:
                self._looked = now
                self.peak_bytes = max(self.peak_bytes, tree_bytes())
            if now - self._said >= _PLAIN_EVERY_S:
                self._said = now
                self._line(now)

    def hashed(self, size: int) -> None:
        with self._lock:
            self._hashed += size
        self.advance(0)

    def rows(self, count: int) -> None:
        with self._lock:
            self._rows += count

    def committed(self) -> None:
        with self._lock:
            self._commits += 1

    def _line(self, now: float) -> None:
        self.peak_bytes = max(self.peak_bytes, memory := tree_bytes())
        rate = self._done / max(now - self._began, 1e-6)
        rest = max(self._total - self._done, 0)
        left = f"{clock_text(rest / max(rate, 1.0))} left, " if self._done and self._total else ""  # no guess at first
        percent = 100 * self._done / max(self._total, 1)
        _say(
            self._out,
            f"{self._what}: {f'{min(percent, 100):.0f} %, ' if self._total else ''}{_amount(self._done, self._total)}, "
            f"{f'{format_size(self._hashed)} hashed, ' if self._hashed else ''}"
            f"{f'{self._shards_done} of {self._shards} shards, ' if self._shards else ''}"
            f"{plural(self._rows, 'row') + ', ' if self._rows else ''}"
            f"{f'{self._commits} commits, ' if self._commits else ''}"
            f"{format_size(rate)}/s, {left}"
            f"memory {format_size(memory)} of {format_size(self._limit)}{_nodes_text(self._nodes)}",
        )

    def shard(self, name: str, size: int, sha256: str, how: str) -> None:
        with self._lock:
            self._shards_done += 1

    def note(self, text: str) -> None:
        _say(self._out, f"brim: {text}")

    def nodes(self, held: Mapping[str, int]) -> None:
        self._nodes, self.node_peak_bytes = held, max([self.node_peak_bytes, *held.values()])
        self.advance(0)

    def finish(self) -> None:
        self.peak_bytes = max(self.peak_bytes, tree_bytes())


class Bar:
    """A bar with bytes, rate, time left, rows, shards, and memory against the limit."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        console = Console(file=drawing_stream())
        self._columns = console.width
        fixed = Column(no_wrap=True, overflow="ellipsis")
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=7)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
            TextColumn("{task.percentage:>3.0f} %", table_column=Column(no_wrap=True, min_width=5)),
            TextColumn("{task.fields[amount]}", table_column=fixed),
            TextColumn("[cyan]{task.fields[memory]}", table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            expand=True,
            auto_refresh=False,
        )
        self._lock = threading.Lock()
        self._task: Any = None
        self._what = ""
        self._done = self._total = self._limit = self._shards = self._shards_done = self._hashed = self._commits = 0
        self._rows = 0
        self._began = self._drawn = 0.0
        self._nodes: Mapping[str, int] = {}
        self.peak_bytes = self.node_peak_bytes = 0

    def start(self, what: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._what = f"{what:<7}"
        self._done = self._shards_done = self._hashed = self._rows = 0
        self._total, self._shards, self._limit = total_bytes, shards, limit_bytes
        self._began = time.monotonic()
        fields = {"amount": "", "memory": ""}
        total = total_bytes or None  # a bar that only moves, where nobody knows the end
        self._task = self._progress.add_task(what, total=total, **fields)  # type: ignore[arg-type]
        self._progress.start()
        self._draw()

    def advance(self, size: int) -> None:
        with self._lock:
            self._done += size
            if time.monotonic() - self._drawn >= _GAUGE_EVERY_S:
                self._draw()

    def hashed(self, size: int) -> None:
        with self._lock:
            self._hashed += size
        self.advance(0)

    def rows(self, count: int) -> None:
        with self._lock:
            self._rows += count

    def committed(self) -> None:
        with self._lock:
            self._commits += 1

    def _draw(self) -> None:
        self._drawn = now = time.monotonic()
        self.peak_bytes = max(self.peak_bytes, memory := tree_bytes())
        rate = self._done / max(now - self._began, 1e-6)
        rest = max(self._total - self._done, 0)
        done = f"{format_size(min(self._done, self._total))} of {format_size(self._total)}"
        moved = rate > 1  # before that a guess would be about nothing
        left = f" {clock_text(rest / rate)} left" if moved and rest else ""
        speed = f" {format_size(rate)}/s" if moved else ""
        gauge, amount = f"memory {format_size(memory)}", done if self._total else format_size(self._done)
        if self._rows and len(plural(self._rows, "row")) + 2 > self._room(f"{amount}{speed}{left}", gauge):
            speed = ""  # rows tell more
        amount, gauge = self._fitted(f"{amount}{speed}{left}", gauge)
        completed = min(self._done, self._total) if self._total else self._done
        self._progress.update(self._task, completed=completed, amount=amount, memory=gauge)
        self._progress.refresh()

    def _room(self, *texts: str) -> int:
        return self._columns - _BAR_COLUMNS - len(self._what) - sum(map(len, texts))

    def _fitted(self, amount: str, gauge: str) -> tuple[str, str]:
        """With as much more as there is room for, what matters most first."""
        room = self._room(amount, gauge)
        nodes = _nodes_text(self._nodes)
        if nodes and (self._columns < _WIDE_COLUMNS or len(nodes) > room):
            return amount, f"node max {format_size(max(self._nodes.values()))}"
        room -= len(nodes)
        limit = f" of {format_size(self._limit)}"
        more = (
            f"  {plural(self._rows, 'row')}" if self._rows else "",
            f"  {self._shards_done}/{self._shards} shards" if self._shards else "",
            limit,
            f"  {format_size(self._hashed)} hashed" if self._hashed else "",
            f"  {self._commits} commits" if self._commits else "",
        )
        for text in more:
            if len(text) <= room:
                room -= len(text)
                amount, gauge = (amount, gauge + text) if text is limit else (amount + text, gauge)
        return amount, gauge + nodes

    def shard(self, name: str, size: int, sha256: str, how: str) -> None:
        with self._lock:
            self._shards_done += 1
            self._draw()

    def note(self, text: str) -> None:
        self._progress.console.print(escape_controls(text), markup=False, highlight=False)

    def nodes(self, held: Mapping[str, int]) -> None:
        self._nodes, self.node_peak_bytes = held, max([self.node_peak_bytes, *held.values()])
        self.advance(0)

    def finish(self) -> None:
        self.peak_bytes = max(self.peak_bytes, tree_bytes())
        self._progress.stop()


def _nodes_text(held: Mapping[str, int]) -> str:
    """The fullest of the nodes, for all of them do not fit a line."""
    if not held:
        return ""
    return f", {len(held)} node{'' if len(held) == 1 else 's'} up to {format_size(max(held.values()))}"


def _amount(done: int, total: int) -> str:
    """The total counts files, what is done counts shards, which are a little larger."""
    return f"{format_size(min(done, total))} of {format_size(total)}" if total else format_size(done)


def clock_text(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_DRAW_EVERY_S = 0.5
_SLOW_S = 0.3  # what is over before shows nothing


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


class NotebookBar:
    """A bar with bytes, rate, time left, and memory against the limit."""

    def __init__(self, display: Any = None) -> None:
        self._display = display or sys.modules["IPython"].display.display
        self._handle: Any = None
        self._lock = threading.Lock()
        self._what = ""
        self._done = self._total = self._limit = 0
        self._began = self._drawn = 0.0
        self._first: tuple[str, int, float] | None = None  # what it was about, when it ends
        self.peak_bytes = 0

    def start(self, what: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
        with self._lock:
            self._what, self._total, self._limit, self._done = what, total_bytes, limit_bytes, 0
            self._began = self._drawn = time.monotonic()
            self._first = self._first or (what, total_bytes, self._began)

    def advance(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now - self._drawn >= (_SLOW_S if self._handle is None else _DRAW_EVERY_S):
                self._drawn = now
                self._draw(now)

    def _draw(self, now: float, ended: bool = False) -> None:
        self.peak_bytes = max(self.peak_bytes, memory := tree_bytes())
        done = min(self._done, self._total) if self._total else self._done
        rate = self._done / max(now - self._began, 1e-6)
        words = [f"{format_size(done)} of {format_size(self._total)}" if self._total else format_size(done)]
        words.append(f"{format_size(rate)}/s")
        if ended:
            words.append(f"{clock_text(now - self._began)}")
        elif rate > 1 and self._total > done:
            words.append(f"{clock_text((self._total - done) / rate)} left")
        words.append(f"memory {format_size(memory)} of {format_size(self._limit)}")
        share = (done / self._total if self._total else None) if not ended else 1.0
        self._show({"text/plain": f"{self._what}: {', '.join(words)}", "text/html": _bar(self._what, share, words)})

    def _show(self, bundle: dict[str, str]) -> None:
        """In its own place; before the first time there is none."""
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def hashed(self, size: int) -> None:
        self.advance(0)

    def committed(self) -> None: ...
    def shard(self, name: str, size: int, sha256: str, how: str) -> None: ...

    def note(self, text: str) -> None:
        sys.stderr.write(f"brim: {text}\n")
        sys.stderr.flush()

    def nodes(self, held: Mapping[str, int]) -> None:
        self.advance(0)

    def finish(self) -> None:
        with self._lock:
            if self._handle is not None and self._first is not None:
                self._what, self._total, self._began = self._first
                self._done = self._total or self._done
                self._draw(time.monotonic(), ended=True)
            self._first = None


def _bar(what: str, share: float | None, words: list[str]) -> str:
    """One line. The front end's own colours, so that it is read on dark ground too."""
    value = "" if share is None else f' value="{share:.4f}"'
    return (
        '<div style="display:flex;gap:1em;align-items:center;font-family:monospace">'
        f'<span>{html.escape(what)}</span><progress style="flex:1;max-width:30em"{value} max="1"></progress>'
        f"<span>{html.escape(' · '.join(words))}</span></div>"
    )
