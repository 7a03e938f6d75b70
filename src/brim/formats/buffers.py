"""Memory for chunks that outlive the next one, used again as soon as nobody looks at them any more.

Fresh memory for every part of an upload would cost a page fault for each 4 kB; from the heap it would come back late.
"""

from __future__ import annotations

import mmap
import threading
import weakref

import numpy as np


class Buffers:
    """Gives out buffers of one size. One comes back by itself when the last view of it is gone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self) -> memoryview:
        with self._lock:
            memory = self._free.pop() if self._free else None
        if memory is None:
            memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The array stands for all views of the memory: when it goes, nobody has one.
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return memoryview(array)  # type: ignore[arg-type]
