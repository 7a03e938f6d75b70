"""Temporary bytes on disk in a file without a name: no other process sees it, and none is left by a crash."""

from __future__ import annotations

import os
import tempfile
import weakref

from brim.state.atomic_files import file_system

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


class Scratch:
    """A file without a name: it is gone when it is closed or collected, and when the process ends in any way."""

    def __init__(self, folder: str | None = None) -> None:
        self.descriptor, path = tempfile.mkstemp(prefix="brim-", dir=folder or scratch_folder())
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        os.unlink(path)

    def read_into(self, target: memoryview, offset: int) -> int:
        size = os.preadv(self.descriptor, [target], offset)
        if size == 0:
            raise ValueError("a scratch file is shorter than the bytes written to it")
        return size

    def read(self, offset: int, size: int) -> bytes:
        data = bytearray(size)
        filled = 0
        while filled < size:
            filled += self.read_into(memoryview(data)[filled:], offset + filled)
        return bytes(data)

    def close(self) -> None:
        self._finalizer()


def scratch_folder() -> str:
    """Return the folder for temporary files; /var/tmp if that one is in memory, where its files would count."""
    folder = tempfile.gettempdir()
    if is_in_memory(folder) and os.access("/var/tmp", os.W_OK) and not is_in_memory("/var/tmp"):
        return "/var/tmp"
    return folder


def is_in_memory(folder: str) -> bool:
    return file_system(folder) in _IN_MEMORY
