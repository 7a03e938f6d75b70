"""Bytes on their way to a storage, and the memory they lie in meanwhile."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

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


class UploadContent(Protocol):
    """Bytes that can be read more than once: a splice, or a few bytes in memory."""

    size: int

    def chunks(
        self,
        start: int = 0,
        stop: int | None = None,
        buffer_bytes: int = ...,
        *,
        keep: Buffers | None = None,
        as_they_come: bool = False,
    ) -> Iterator[memoryview]: ...
