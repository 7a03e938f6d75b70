"""A watch as it goes: a gauge in a terminal, a line now and then elsewhere, JSON lines for programs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from brim.memory.guard import sparkline
from brim.memory.prediction import Point
from brim.sizes import format_size
from brim.watching.launch import Board
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
