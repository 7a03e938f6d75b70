"""Bytes that are uploaded: their source, their watcher, and the memory that holds them."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np


class Buffers:
    """Give out buffers of one size. A buffer returns when the last view of it is gone."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()

    def take(self) -> memoryview:
        with self._lock:
            memory = self._free.pop() if self._free else None
        if memory is None:
            memory = mmap.mmap(-1, self._size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The array represents all views of the memory: it is collected after the last of them.
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._free.append, memory).atexit = False
        return memoryview(array)  # type: ignore[arg-type]


class UploadContent(Protocol):
    """Bytes that can be read more than once: a splice, or a few bytes in memory."""

    size: int

    @property
    def path(self) -> Path | None:
        """Return the finished local file that holds these bytes, if there is one: it is linked, not copied."""

    def chunks(
        self,
        start: int = 0,
        stop: int | None = None,
        buffer_bytes: int = ...,
        *,
        keep: Buffers | None = None,
        as_they_come: bool = False,
    ) -> Iterator[memoryview]: ...


class UploadWatcher(Protocol):
    """Counts the bytes of an upload, and may raise to drop it."""

    def hashed(self, size: int) -> None: ...
    def sent(self, size: int) -> None: ...


class SilentWatcher:
    """Ignores the bytes of an upload."""

    def hashed(self, size: int) -> None: ...
    def sent(self, size: int) -> None: ...
