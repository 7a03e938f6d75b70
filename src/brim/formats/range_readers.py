"""Read ranges of files: shards to read at any offset, views of them as files, and copies inside the kernel.

Remote shards: storage/reading.py. This module imports nothing large, because every worker loads it.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from brim.records import dataclass
from brim.state.atomic_files import BUFFER_BYTES, open_regular, pread_all, reading, write_all

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


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


class Seekable(io.IOBase):
    """A file with a position. A subclass has `_size`."""

    _position = 0

    def _size(self) -> int:
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size()}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}")
        self._position = base + offset
        return self._position


class FileView(Seekable, io.RawIOBase):
    """A range of `source`, which has `read_at`, as a separate file; without `size`, all of a source with a size.

    Reading begins at `position`. With `release`, it is read forwards only, and `release` is called with each position.
    Closing the view leaves the source open, unless `owned`.
    """

    def __init__(
        self,
        source: Any,
        start: int = 0,
        size: int | None = None,
        *,
        position: int = 0,
        release: Callable[[int], None] | None = None,
        owned: bool = False,
    ) -> None:
        self._source, self._start, self._position = source, start, position
        self._length = source.size - start if size is None else size
        self._release, self._owned = release, owned

    def _size(self) -> int:
        return int(self._length)

    def seekable(self) -> bool:
        return self._release is None

    def read(self, size: int | None = -1, /) -> bytes:
        available = max(self._length - self._position, 0)
        size = available if size is None or size < 0 else min(size, available)
        data: bytes = self._source.read_at(self._start + self._position, size) if size else b""
        self._position += len(data)
        if self._release is not None:
            self._release(self._position)
        return data

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if self._owned and not self.closed:
            self._source.close()
        super().close()


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Unreadable(OSError):
    """The source of a copy cannot be read; its destination is not the cause."""


def copy_range(source: int, offset: int, size: int, target: int) -> None:
    """Copy a range of one descriptor to the position of another, inside the kernel if possible."""
    in_kernel = hasattr(os, "copy_file_range")
    buffer: memoryview | None = None
    while size > 0:
        if in_kernel:
            try:
                step = os.copy_file_range(source, target, min(size, 1 << 30), offset)
            except OSError as error:
                if error.errno in _FULL:
                    raise
                step = 0
            if step == 0:
                # Not supported, or an error that some file systems report as 0 bytes. A separate read and write shows
                # which of the two files causes it.
                in_kernel = False
                continue
        else:
            buffer = buffer or memoryview(bytearray(BUFFER_BYTES))
            try:
                step = os.preadv(source, [buffer[: min(size, BUFFER_BYTES)]], offset)
            except OSError as error:
                raise Unreadable(error.errno, error.strerror) from error
            if step == 0:
                raise Unreadable(errno.EIO, "the file is shorter than its recorded size")
            write_all(target, buffer[:step])
        offset, size = offset + step, size - step
