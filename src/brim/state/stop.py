"""Asked to stop: Ctrl-C, SIGTERM, SIGUSR1 (batch systems warn with it) or a stop file."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from brim.errors import Stopped
from brim.state.stop_file import forget_run, note_run, settle_stop_file

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LOOK_EVERY_S = 0.2


class Stop:
    """A flag that workers look at between chunks."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files
        self._why: str | None = None
        self._looked = 0.0
        self._event = threading.Event()

    def request(self, why: str) -> None:
        self._why = self._why or why
        self._event.set()

    def check(self) -> None:
        """Raise Stopped if someone asked."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY_S:
            self._looked = now
            for file in self._files:
                if file.exists():
                    self.request(f"the stop file {file.name}")
        if self._event.is_set():
            raise Stopped(
                f"Stopped by {self._why}; finished shards are kept.", hint="Run the same command to continue."
            )


@contextmanager
def stoppable(*files: Path) -> Iterator[Stop]:
    """Turn signals and stop files into a flag. A second Ctrl-C ends the process at once.

    A stop file that is there already is refused, or removed if it is stale; one that comes goes at the end.
    """
    for file in files:
        if note := settle_stop_file(file):
            sys.stderr.write(f"brim: {note}\n")
    ours = [file for file in files if note_run(file)]
    stop = Stop(files)

    def on_signal(number: int, _frame: FrameType | None) -> None:
        stop.request({signal.SIGINT: "Ctrl-C"}.get(signal.Signals(number), signal.Signals(number).name))
        signal.signal(number, signal.SIG_DFL)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for file in ours:
            forget_run(file)
        for number, handler in before.items():
            signal.signal(number, handler)
