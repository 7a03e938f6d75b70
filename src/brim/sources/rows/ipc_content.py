"""The bytes of an Arrow file: mapped, or of an object, where headers are looked at and batches come in a stream."""

from __future__ import annotations

import os
from typing import Any, Protocol

import pyarrow as pa

from brim.objects.reading import Run
from brim.sources.rows.opening import Forward, Places, Remote, Seekable

_NEAR_BYTES = 2 << 20  # to read so much takes no longer than to ask for a place behind it


class Batches(Protocol):
    """What is asked for goes forwards."""

    size: int

    def head(self, place: int, size: int) -> Any:
        """The bytes of a header; less at the end of the file."""

    def batch(self, place: int, size: int) -> pa.Buffer: ...

    def source(self, place: int) -> Any:
        """From a place on, for pyarrow's own readers."""

    def stream(self) -> Any:
        """All of it in order, for pyarrow's own reader."""

    def expect(self, start: int, end: int) -> None:
        """All of these batches will be asked for."""

    def close(self) -> None: ...


class MappedBatches:
    """A file of this machine."""

    def __init__(self, path: str) -> None:
        self.size = os.path.getsize(path)
        if self.size:
            mapped = pa.memory_map(path)
            self._bytes = mapped.read_buffer(mapped.size())
            self._view = memoryview(self._bytes).cast("B")

    def head(self, place: int, size: int) -> Any:
        return self._view[place : place + size]

    def batch(self, place: int, size: int) -> pa.Buffer:
        return self._bytes.slice(place, size)

    def source(self, place: int) -> Any:
        return self._bytes.slice(place)

    def stream(self) -> Any:
        return self._bytes

    def expect(self, start: int, end: int) -> None:
        return None

    def close(self) -> None:
        return None


class RemoteBatches:
    """An object. Headers that lie near each other are read with what is between them, as a stream."""

    def __init__(self, file: Remote) -> None:
        self.size = file.size
        self._file = file
        self._places = Places(file)
        self._stream: Forward | None = None
        self._last = self._passed = 0
        self._second: Forward | None = None
        self._near = 0  # how many headers in a row were near the one before

    def head(self, place: int, size: int) -> Any:
        if self._stream is None and place > self._last:
            self._near = self._near + 1 if place - self._last < _NEAR_BYTES else 0
            if self._near > 8:  # two looks for each header
                self.expect(place, self.size)
        self._last = place
        if self._stream is None:
            return self._places.read_at(place, size)
        if place > self._passed + 8:  # a batch is asked for from its mark on, which is before its header
            self._stream.passed(place - 8)
            self._passed = place
        return self._stream.read_at(place, size)

    def batch(self, place: int, size: int) -> pa.Buffer:
        if self._stream is None or place < self._stream.first:
            return pa.py_buffer(self._places.read_at(place, size))
        return pa.py_buffer(self._stream.read_at(place, size))

    def source(self, place: int) -> Any:
        return pa.PythonFile(Seekable(self._places, self.size, place), "r")

    def stream(self) -> Any:
        self._second = self._forward(0, self.size)
        return pa.PythonFile(Seekable(self._second, self.size, in_order=True), "r")

    def expect(self, start: int, end: int) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = self._forward(start, end)

    def _forward(self, start: int, end: int) -> Forward:
        return Forward(Run(self._file.bucket, self._file.pieces(start, end)), self._file, start)

    def close(self) -> None:
        self._places.close()
        for stream in (self._stream, self._second):
            if stream is not None:
                stream.close()
