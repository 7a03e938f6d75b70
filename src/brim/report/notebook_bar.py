"""The bar in a notebook: HTML that is written again in its place, so that it needs no widgets.

Jupyter, VS Code and Colab show it; where a front end has no HTML, the same as a line of text.
"""

from __future__ import annotations

import html
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from brim.memory.meter import tree_bytes
from brim.report.bars import clock_text
from brim.sizes import format_size

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
