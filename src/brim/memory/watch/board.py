"""The newest numbers of a watch, where another process reads them in a microsecond.

A page of shared memory with one 64-bit number a field. The watcher writes, anyone who was given the file
reads; a reader may see one field newer than the next, which is of no matter here.
"""

from __future__ import annotations

import mmap
import tempfile
from typing import IO

_FIELDS = ("t_ns", "total_bytes", "anon_bytes", "shmem_bytes", "swap_bytes", "file_bytes", "peak_bytes", "stop")
_SIZE = 4096


class Board:
    """Numbers by name. Make one and hand its `descriptor` to a child, or open one by descriptor."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._file: IO[bytes] | None = None
        if descriptor is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            self._file.truncate(_SIZE)
            descriptor = self._file.fileno()
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, _SIZE)
        self._numbers = memoryview(self._page).cast("q")

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self._numbers[_FIELDS.index(name)] = value

    def get(self, name: str) -> int:
        return self._numbers[_FIELDS.index(name)]

    def close(self) -> None:
        self._numbers.release()
        self._page.close()
        if self._file is not None:
            self._file.close()
