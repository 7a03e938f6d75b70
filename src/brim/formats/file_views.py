"""Anything with bytes at offsets as the file that pyarrow, tarfile and io.BufferedReader need."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


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
