"""Write a file past the page cache.

A shard is written once, synced and not read again soon, so caching it costs a copy of every byte and
throws out of memory what the user's other programs have there. Direct writes save both: in
benchmarks/package.py they halve the system time of a build. They need aligned buffers and lengths, so the
last piece of a file, and file systems that refuse them, go through the cache as usual.
"""

from __future__ import annotations

import errno
import fcntl
import os

ALIGNMENT = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it


class DirectFile:
    """A new file to be written front to back."""

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._direct = bool(_DIRECT)
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = False
            self._descriptor = os.open(path, flags, 0o644)

    def write(self, data: memoryview) -> None:
        if self._direct and len(data) % ALIGNMENT:
            self._leave_direct()
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._leave_direct()

    def _leave_direct(self) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        self._direct = False

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
