"""What every file-like view has in common: a position in something whose size is known."""

from __future__ import annotations

import io
import os


class Seekable(io.IOBase):
    """`_at` is where the next read begins; whoever inherits says how large it is."""

    _at = 0

    def _size(self) -> int:
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size()}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}")
        self._at = base + offset
        return self._at
