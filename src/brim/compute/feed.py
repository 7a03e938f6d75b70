"""Units made ahead of the workers, by a thread: some have to be decompressed or converted first."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from brim.sources.rows.unit import Unit


class Feed:
    """The units of a source, a few ahead. Closing it ends the thread, whatever the source is doing."""

    def __init__(self, units: Iterator[Unit], ahead: int) -> None:
        self._units = units
        self._queue: queue.Queue[Unit | BaseException | None] = queue.Queue(max(ahead, 1))
        self._closed = threading.Event()
        self.exhausted = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="units", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for unit in self._units:
                if not self._put(unit):
                    return
            self._ended = True
            self._put(None)
        except BaseException as error:  # noqa: BLE001  it is raised where units are taken
            self._put(error)

    def _put(self, item: Unit | BaseException | None) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    @property
    def waiting(self) -> bool:
        """Whether units are made and not taken."""
        return self._queue.qsize() > self._ended

    def take(self) -> Unit | None:
        """The next unit, if there is one yet."""
        if self.exhausted:
            return None
        try:
            item = self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, BaseException):
            self.exhausted = True
            raise item
        self.exhausted = item is None
        return item

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5.0)
