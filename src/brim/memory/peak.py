"""Sample the memory of this process in the background, for the peak that a command reports."""

from __future__ import annotations

import os
import threading

from brim.memory.meter import process_bytes

_INTERVAL_S = 0.02


class PeakSampler:
    """Measures within a `with` block. `peak_bytes` is the highest sample."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak", daemon=True)

    def _sample(self) -> None:
        pid, has_ended = os.getpid(), False
        while not has_ended:
            self.peak_bytes = max(self.peak_bytes, process_bytes(pid))
            has_ended = self._ended.wait(_INTERVAL_S)

    def __enter__(self) -> PeakSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
