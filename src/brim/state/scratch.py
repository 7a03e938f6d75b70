"""Temporary bytes on disk in files without a name: no other process sees them, and a crash leaves none."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from brim.errors import DestinationUnavailableError
from brim.state.atomic_files import file_system

_DESCRIPTORS = "/proc/self/fd"
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


class Scratch:
    """A file without a name: it is gone when it is closed or collected, and when the process ends in any way.

    `needs_path`: it is also opened by its path; where no system path names a descriptor, it keeps its name until then.
    """

    def __init__(self, folder: str | None = None, *, needs_path: bool = False) -> None:
        self.descriptor, path = tempfile.mkstemp(prefix="brim-", dir=folder or scratch_folder())
        is_nameless = not needs_path or os.path.isdir(_DESCRIPTORS)
        self.path = f"{_DESCRIPTORS}/{self.descriptor}" if is_nameless else path
        self._finalizer = weakref.finalize(self, _remove, self.descriptor, None if is_nameless else path)
        if is_nameless:
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


class ValueSpool(Scratch):
    """A temporary file of values, which shards read like a file of the source."""

    def __init__(self, folder: str | None = None) -> None:
        super().__init__(folder, needs_path=True)
        self.size = 0

    def append(self, data: Any) -> int:
        """Append data, and return its offset."""
        start = self.size
        self.write_at(start, data)
        return start

    def write_at(self, offset: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.size = max(self.size, offset + len(view))
        with scratch_failures():
            while view:
                step = os.pwrite(self.descriptor, view, offset)
                view, offset = view[step:], offset + step

    def extend(self, size: int) -> None:
        """Make the file at least this large. Bytes that are not written take no disk."""
        with scratch_failures():
            os.ftruncate(self.descriptor, max(size, self.size))
        self.size = max(size, self.size)

    def read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self.descriptor, size, offset)

    def stat(self, mtime_ns: int) -> os.stat_result:
        """Return the state of the file, with the time of its source: a repeated job recognizes the spool by it."""
        os.utime(self.descriptor, ns=(mtime_ns, mtime_ns))
        return os.fstat(self.descriptor)


def _remove(descriptor: int, path: str | None) -> None:
    os.close(descriptor)
    if path is not None:
        os.unlink(path)


def scratch_folder() -> str:
    """Return the folder for temporary files: the default, or /var/tmp if files in the default one would take memory."""
    folder = tempfile.gettempdir()
    if is_in_memory(folder) and os.access("/var/tmp", os.W_OK) and not is_in_memory("/var/tmp"):
        return "/var/tmp"
    return folder


@contextmanager
def scratch_failures() -> Iterator[None]:
    """Turn errors of the system about temporary files into errors that name their folder."""
    try:
        yield
    except OSError as error:
        raise DestinationUnavailableError(
            f"{scratch_folder()!r}, the folder for temporary files, cannot be written to: {error.strerror}.",
            hint="Free disk space there, or set TMPDIR to another folder.",
        ) from error


def is_in_memory(folder: str) -> bool:
    return file_system(folder) in _IN_MEMORY
