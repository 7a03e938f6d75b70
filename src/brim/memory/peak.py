"""Sample the memory of this process in the background, for the peak that a command reports."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from brim.memory.meter import process_bytes

_INTERVAL_S = 0.02


class PeakSampler:
    """Measures from its start to its end. `peak_bytes` is the most that was seen."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak", daemon=True)

    def _sample(self) -> None:
        pid = os.getpid()
        while True:
            self.peak_bytes = max(self.peak_bytes, process_bytes(pid))
            if self._ended.wait(_INTERVAL_S):
                return

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
