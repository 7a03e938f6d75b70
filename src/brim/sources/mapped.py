"""Find the file, and the place in it, that a piece of memory is a view of.

A dataset of `datasets` is Arrow files mapped into memory. A value in it need not be copied to be published:
the address of its buffer says which bytes of which file it is. What is not found here (no Linux, a file that
was deleted, a table that was computed) has to be written to a file first.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from brim.durable import pread_all

_MAPS = "/proc/self/maps"
_PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    end: int
    offset: int
    path: str


class Mappings:
    """The files that are mapped into this process, as of when this was made."""

    def __init__(self) -> None:
        self._mappings = sorted(_read_maps(), key=lambda mapping: mapping.start)
        self._starts = [mapping.start for mapping in self._mappings]

    def find(self, buffer: Any) -> tuple[str, int] | None:
        """The absolute path of the file that an Arrow buffer is a view of, and where in it the buffer starts."""
        number = bisect_right(self._starts, buffer.address) - 1
        if number < 0 or buffer.size == 0:
            return None
        first = mapping = self._mappings[number]
        while mapping.end < buffer.address + buffer.size:  # the kernel may have cut a mapping into several
            number += 1
            following = self._mappings[number] if number < len(self._mappings) else None
            if following is None or not _continues(mapping, following):
                return None
            mapping = following
        at = first.offset + buffer.address - first.start
        return (first.path, at) if _is_the_same(first.path, at, buffer) else None


def _continues(mapping: _Mapping, following: _Mapping) -> bool:
    adjacent = mapping.end == following.start and mapping.path == following.path
    return adjacent and mapping.offset + mapping.end - mapping.start == following.offset


def _read_maps() -> Iterator[_Mapping]:
    try:
        with open(_MAPS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.readlines()
    except OSError:
        return
    for line in lines:
        parts = line.rstrip("\n").split(maxsplit=5)
        # A file that was deleted since has a name that leads nowhere, or to another file.
        if len(parts) == 6 and parts[5].startswith("/") and not parts[5].endswith(" (deleted)"):
            start, end = (int(part, 16) for part in parts[0].split("-"))
            yield _Mapping(start, end, int(parts[2], 16), parts[5].replace("\\012", "\n"))


def _is_the_same(path: str, at: int, buffer: Any) -> bool:
    """Whether the file holds what memory does, at both ends: device and inode differ on layered file systems."""
    size = min(_PROBE_BYTES, buffer.size)
    tail = buffer.size - size
    view = memoryview(buffer).cast("B")  # Arrow's own view is one of signed numbers
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return pread_all(descriptor, size, at) == view[:size] and pread_all(descriptor, size, at + tail) == view[tail:]
    finally:
        os.close(descriptor)
