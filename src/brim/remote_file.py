"""Files that are elsewhere, to read from: any range of one, or all of it forwards and hashed on the way.

Whoever inherits says how bytes are fetched: from the Hub, from a bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from brim.state.durable import write_all

_WINDOW_BYTES = 1 << 18  # what is small and near each other
_TAIL_BYTES = 1 << 16  # of a Parquet file: its footer, nearly always
_KEEP_BYTES = 8 << 20  # what a stream can go back: more than the largest page that is read whole
_COPY_BYTES = 1 << 20


class _Remote:
    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def read_at(self, offset: int, size: int) -> bytes:
        """Fewer bytes only at the end."""
        raise NotImplementedError

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        """Write a range at the descriptor's position."""
        while size > 0:
            data = self.read_at(offset, min(size, _COPY_BYTES))
            if not data:
                raise ValueError(f"{self.name} is shorter than it says")
            offset, size = offset + len(data), size - len(data)
            write_all(descriptor, data)


class WindowFile(_Remote):
    """Any range, by one request each; small reads near each other share one.

    The end of a Parquet file is its footer: it takes one request, and one more for what is longer than 64 KB, and is
    kept while the file is open.
    """

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name, size)
        self._at, self._window = 0, b""
        self._tail = b""

    def _fetch(self, start: int, stop: int) -> bytes:
        raise NotImplementedError

    def read_at(self, offset: int, size: int) -> bytes:
        size = max(min(size, self.size - offset), 0)
        if self._at <= offset <= offset + size <= self._at + len(self._window):
            return self._window[offset - self._at : offset - self._at + size]
        if self.name.endswith(".parquet") and offset >= self._footer_at(offset):
            begin = offset - (self.size - len(self._tail))
            return self._tail[begin : begin + size]
        stop = min(max(offset + size, offset + _WINDOW_BYTES), self.size)
        self._at, self._window = offset, self._fetch(offset, stop)
        return self._window[:size]

    def _footer_at(self, offset: int) -> int:
        """Where the part of the end begins that is here; the footer is, if a read goes there."""
        near = max(self.size - _TAIL_BYTES, 0)
        if not self._tail and offset >= near and self.size:
            self._tail = self._fetch(near, self.size)
        if self._tail[-4:] == b"PAR1":
            start = self.size - 8 - int.from_bytes(self._tail[-8:-4], "little")
            have = self.size - len(self._tail)
            if 0 <= start <= offset < have:
                self._tail = self._fetch(start, have) + self._tail
        return self.size - len(self._tail) if self._tail else self.size + 1

    def close(self) -> None:
        self._window = self._tail = b""


class ForwardFile(_Remote):
    """Forwards, hashed on the way. A little of what was read can be read again."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name, size)
        self._digest = hashlib.sha256()
        self._kept = bytearray()  # the bytes before `_end`
        self._end = 0

    def _next_block(self) -> bytes:
        """What comes next; never empty."""
        raise NotImplementedError

    def read_at(self, offset: int, size: int) -> bytes:
        size = max(min(size, self.size - offset), 0)
        if offset < self._end - len(self._kept):
            raise ValueError(f"{self.name} is read forwards only")
        while self._end < offset + size:
            self._advance(offset)
        begin = offset - (self._end - len(self._kept))
        return bytes(self._kept[begin : begin + size])

    def _advance(self, needed_from: int) -> None:
        block = self._next_block()
        self._digest.update(block)
        self._kept += block
        self._end += len(block)
        spare = min(len(self._kept) - _KEEP_BYTES, needed_from - (self._end - len(self._kept)))
        if spare > _KEEP_BYTES // 2:
            del self._kept[:spare]

    def sha256(self, advance: Callable[[int], None] = lambda size: None) -> str:
        """Of everything: what was not read yet is read now, and not kept."""
        self._kept = bytearray()
        while self._end < self.size:
            block = self._next_block()
            self._digest.update(block)
            self._end += len(block)
            advance(len(block))
        return self._digest.hexdigest()
