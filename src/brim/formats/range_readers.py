"""Shards to read at any offset: a local file here, remote ones in storage/reading.py."""

from __future__ import annotations

import os
from typing import Protocol, Self, runtime_checkable

from brim.formats.splice import Unreadable, copy_range
from brim.records import dataclass
from brim.state.atomic_files import open_regular, pread_all, reading


@dataclass(frozen=True, slots=True)
class ShardFile:
    """`row` counts within the shard; `offset` and `size` are the bytes of the shard that are the file."""

    column: str
    row: int
    path: str | None
    offset: int
    size: int


class Readable(Protocol):
    """A shard to read. Some are read forwards only: then bytes far before the position cannot be read again."""

    name: str
    size: int

    def read_at(self, offset: int, size: int) -> bytes:
        """Return a range; fewer bytes only at the end."""

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        """Write a range at the descriptor's position."""

    def close(self) -> None: ...


@runtime_checkable
class Hashing(Protocol):
    """A shard that is hashed while it is read."""

    def sha256(self) -> str:
        """Return the hash of all bytes: those that were not read yet are read now."""


class LocalFile:
    """A file on disk. A failure to read it is VerificationError."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.path.basename(path)
        with reading(self.name):
            self._descriptor = open_regular(path)
        self.size = os.fstat(self._descriptor).st_size

    def read_at(self, offset: int, size: int) -> bytes:
        try:
            data = os.pread(self._descriptor, size, offset)
        except OSError:
            with reading(self.name):
                raise
        if len(data) == size:  # nearly always: lengths are found by a hundred thousand reads of a few bytes
            return data
        with reading(self.name):
            return pread_all(self._descriptor, size, offset)

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        try:
            copy_range(self._descriptor, offset, size, descriptor)
        except Unreadable as error:
            with reading(self.name):
                raise error

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
