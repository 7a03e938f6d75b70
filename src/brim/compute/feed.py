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
        self._queue: queue.Queue[Unit] = queue.Queue(max(ahead, 1))
        self._closed = threading.Event()
        self._made = self._taken = 0  # each is counted by one thread alone
        self._over = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="units", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for unit in self._units:
                self._made += 1
                if not self._put(unit):
                    return
        except BaseException as error:  # noqa: BLE001  it is raised where units are taken
            self._failed = error
        self._over = True

    def _put(self, unit: Unit) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(unit, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    @property
    def ahead(self) -> int:
        """How many units are made and not taken."""
        return self._made - self._taken

    @property
    def exhausted(self) -> bool:
        """Whether there is none left and none will come. Raises what ended the source, once all before it is taken."""
        if not self._over or self.ahead:
            return False
        if self._failed is not None:
            raise self._failed
        return True

    def take(self) -> Unit | None:
        """The next unit, if there is one yet."""
        try:
            unit = self._queue.get_nowait()
        except queue.Empty:
            return None
        self._taken += 1
        return unit

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5.0)
