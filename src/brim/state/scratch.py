"""A scratch file: temporary bytes on disk that nobody else sees and that cannot be left behind."""

from __future__ import annotations

import os
import tempfile
import weakref

from brim.state.atomic_files import file_system

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


class Scratch:
    """A file without a name: it is gone when closed, when forgotten, and when the process ends in any way."""

    def __init__(self, folder: str | None = None) -> None:
        self.descriptor, path = tempfile.mkstemp(prefix="brim-", dir=folder or scratch_folder())
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        os.unlink(path)

    def read_into(self, target: memoryview, at: int) -> int:
        step = os.preadv(self.descriptor, [target], at)
        if step == 0:
            raise ValueError("a scratch file is shorter than what was written to it")
        return step

    def read(self, at: int, size: int) -> bytes:
        data = bytearray(size)
        done = 0
        while done < size:
            done += self.read_into(memoryview(data)[done:], at + done)
        return bytes(data)

    def close(self) -> None:
        self._finalizer()


def scratch_folder() -> str:
    """The folder for temporary files, or /var/tmp where that one is kept in memory: its files would count."""
    folder = tempfile.gettempdir()
    if is_in_memory(folder) and os.access("/var/tmp", os.W_OK) and not is_in_memory("/var/tmp"):
        return "/var/tmp"
    return folder


def is_in_memory(folder: str) -> bool:
    return file_system(folder) in _IN_MEMORY
