"""Ranges of remote files, a few requests ahead of the reader, and files to read on top of them.

One request at a time would wait for the network again and again: a bucket answers after tens of milliseconds, and one
connection carries a part of the bandwidth. So ranges are requested ahead, in order, and yielded in order. Each request
names the version that was planned: a file that was replaced is noticed by the store itself.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Self, TypeVar

from brim.errors import InputError, SourceError
from brim.records import dataclass
from brim.state.atomic_files import write_all
from brim.state.retry import pause, wait_for
from brim.storage.explain_error import explain
from brim.storage.location import Location
from brim.storage.storage import TO_END, Answers, ByteRange, Storage, open_storage
from brim.storage.storage_error import StorageError

RANGE_BYTES = 4 << 20
AHEAD_BYTES = 3 * RANGE_BYTES  # requested and not yielded yet, by one reader
JOINED_BYTES = 8 << 20  # of ranges that are near each other, in one request
_AHEAD_REQUESTS = 32  # small files: their number is the limit
_GROUP, _SMALL_BYTES = 16, 64 << 10
_WINDOW_BYTES = 1 << 18  # small reads near each other share one request
_TAIL_BYTES = 1 << 16  # of a Parquet file: it contains the footer, nearly always
_KEEP_BYTES = 8 << 20  # before the position of a ForwardFile, to read again: more than the largest page
_COPY_BYTES = 1 << 20
Offsets = tuple[int, int]  # start and stop


class FileReplacedError(InputError):
    """A file is not the one that was listed, or is gone. Callers with a better name for it raise their own error."""


def _replaced_error(location: Location, byte_range: ByteRange) -> Exception:
    key = location.key(byte_range.name)
    return FileReplacedError(
        f"The object {key!r} is not the one that was listed, or is gone.",
        hint="Wait until nothing changes the files, then run the same command again.",
        path=key,
    )


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a remote location, as it was listed. `shown` is its name for users."""

    location: Location
    name: str
    size: int
    version: str
    shown: str = ""

    def __str__(self) -> str:
        return str(self.location.child(self.name))

    def ranges(self, start: int, stop: int, range_bytes: int = RANGE_BYTES) -> Iterator[ByteRange]:
        """Yield a range as requests, cut at multiples of their size: stores have cut the file there too."""
        stop = min(stop, self.size)
        while start < stop:
            end = min((start // range_bytes + 1) * range_bytes, stop)
            yield ByteRange(self.name, start, end, self.version)
            start = end


class RangeStream:
    """Iterate over (range, bytes) in order; a few ranges are requested before they are taken.

    Small ones are requested in groups: handing each to the thread of the requests takes longer than its bytes. The
    bytes are in the memory that received them. `replaced_error` makes the error for a file with another version.
    """

    def __init__(
        self,
        location: Location | Storage,
        ranges: Iterable[ByteRange],
        *,
        requests: int = _AHEAD_REQUESTS,
        ahead_bytes: int = AHEAD_BYTES,
        replaced_error: Callable[[ByteRange], Exception] | None = None,
    ) -> None:
        self._storage = location if isinstance(location, Storage) else open_storage(location)
        self._replaced_error = replaced_error or partial(_replaced_error, self._storage.location)
        self._requests, self._ahead_bytes = requests, ahead_bytes
        self._group = max(min(_GROUP, requests // 2), 1)
        self._ranges = iter(ranges)
        self._next = next(self._ranges, None)
        self._waiting: deque[tuple[ByteRange, Future[Answers], int]] = deque()  # range, answers, its index in them
        self._requested = 0

    def start(self) -> Self:
        """Request the next ranges."""
        while self._next is not None and self._fits(self._next):
            is_small = _weight(self._next) <= _SMALL_BYTES
            if is_small and len(self._waiting) > self._requests - self._group:
                break  # wait until several small ranges fit: they are requested together
            group = [self._next]
            self._requested += _weight(self._next)
            while (follows := next(self._ranges, None)) is not None and is_small and len(group) < self._group:
                if _weight(follows) > _SMALL_BYTES or not self._fits(follows, len(group)):
                    break
                group.append(follows)
                self._requested += _weight(follows)
            self._next = follows
            answers = self._storage.fetch(group)
            self._waiting.extend((entry, answers, number) for number, entry in enumerate(group))
        return self

    def _fits(self, byte_range: ByteRange, grouped: int = 0) -> bool:
        waiting = len(self._waiting) + grouped
        return not waiting or (self._requested + _weight(byte_range) <= self._ahead_bytes and waiting < self._requests)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[ByteRange, memoryview]:
        self.start()
        if not self._waiting:
            raise StopIteration
        byte_range, answers, number = self._waiting.popleft()
        view = memoryview(self._answer(byte_range, answers, number))
        self._requested -= _weight(byte_range)
        return byte_range, view

    def _answer(self, byte_range: ByteRange, answers: Future[Answers], number: int) -> Any:
        """Return the bytes of a range, and do not keep them; a transient failure is retried."""
        retry = self._storage.tries()
        while True:
            try:
                data, answers.result()[number] = wait_for(answers)[number], None
                if isinstance(data, BaseException):
                    raise data
            except CancelledError as error:
                raise SourceError("A request to an object store was dropped.") from error
            except StorageError as error:
                if error.kind == "changed" or (error.is_missing and error.kind != "no_container"):
                    raise self._replaced_error(byte_range) from None
                if (wait_s := retry.after(error)) is None and not self._storage.explains_errors:
                    raise
                if wait_s is None:
                    raise explain(error, self._storage.location.child(byte_range.name), "read") from None
            else:
                if byte_range.stop == TO_END or len(data) == byte_range.stop - byte_range.start:
                    return data
                if (wait_s := retry.next_s()) is None:
                    raise self._replaced_error(byte_range)
            pause(wait_s)
            answers, number = self._storage.fetch([byte_range]), 0

    def close(self) -> None:
        for _, answers, _ in self._waiting:
            answers.cancel()
        self._waiting.clear()
        self._next = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _weight(byte_range: ByteRange) -> int:
    """Return the bytes that a range takes, as far as they are known."""
    return RANGE_BYTES // 2 if byte_range.stop == TO_END else byte_range.stop - byte_range.start


class _RemoteReader:
    """A remote file to read. `replaced_error` makes the error for another version of it."""

    def __init__(
        self,
        file: RemoteFile,
        replaced_error: Callable[[], Exception] | None = None,
        storage: Storage | None = None,
    ) -> None:
        self.file, self.name, self.size = file, file.name, file.size
        self.storage = storage or open_storage(file.location)
        self.replaced_error: Callable[[ByteRange], Exception] = (
            partial(_replaced_error, file.location) if replaced_error is None else lambda _: replaced_error()
        )

    def read_at(self, offset: int, size: int) -> bytes:
        """Return a range; fewer bytes only at the end."""
        raise NotImplementedError

    def release(self, offset: int) -> None:
        """Forget the bytes before an offset: they are not read again."""

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        """Write a range at the descriptor's position."""
        while size > 0:
            data = self.read_at(offset, min(size, _COPY_BYTES))
            if not data:
                raise ValueError(f"{self.name} is shorter than its size")
            offset, size = offset + len(data), size - len(data)
            write_all(descriptor, data)


class RandomFile(_RemoteReader):
    """Any range of a remote file; small reads near each other share one request.

    The end of a Parquet file is its footer: it takes one request, and one more for the part beyond 64 KB. It is kept
    while the file is open, as are the ranges of `fetch_together`.
    """

    def __init__(
        self,
        file: RemoteFile,
        replaced_error: Callable[[], Exception] | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(file, replaced_error, storage)
        self._ranges: list[tuple[int, bytes]] = []
        self._window: tuple[int, bytes] = (0, b"")
        self._tail_at = max(self.size - _TAIL_BYTES, 0)

    def fetch(self, start: int, stop: int) -> bytes:
        """Return a range by its own request, from any thread; a large one by several."""
        range_bytes = self.size if stop - start <= JOINED_BYTES else RANGE_BYTES
        ranges = self.file.ranges(start, stop, range_bytes)
        with RangeStream(self.storage, ranges, replaced_error=self.replaced_error) as stream:
            return b"".join(view for _, view in stream)

    def read_at(self, offset: int, size: int) -> bytes:
        size = max(min(size, self.size - offset), 0)
        if not size:
            return b""
        if (data := self._find(offset, size)) is not None:
            return data
        if self.name.endswith(".parquet"):
            if offset >= self._tail_at:
                self.keep(self._tail_at, self.fetch(self._tail_at, self.size))
                return self.read_at(offset, size)
            if (start := self.footer_start()) is not None and start <= offset:
                self.keep(start, self.fetch(start, self._tail_at))
                return self.read_at(offset, size)
        stop = min(offset + max(size, _WINDOW_BYTES), self.size)
        self._window = offset, self.fetch(offset, stop)
        return self._window[1][:size]

    def _find(self, offset: int, size: int) -> bytes | None:
        for start, data in (self._window, *self._ranges):
            if start <= offset and offset + size <= start + len(data):
                return data[offset - start : offset - start + size]
        return None

    def footer_start(self) -> int | None:
        """Return where the footer of a Parquet file begins, if it is longer than the tail, which is known."""
        mark = self._find(self.size - 8, 8) if self.size >= 8 else None
        if mark is None or mark[4:] != b"PAR1":
            return None
        start = self.size - 8 - int.from_bytes(mark[:4], "little")
        return start if 0 <= start < self._tail_at else None

    def tail(self) -> Offsets:
        return self._tail_at, self.size

    def missing(self, ranges: Iterable[Offsets]) -> list[ByteRange]:
        """Return the requests for ranges that are not kept."""
        inside = ((max(start, 0), min(stop, self.size)) for start, stop in ranges)
        requests = join_ranges((start, stop) for start, stop in inside if self._find(start, stop - start) is None)
        return [ByteRange(self.name, start, stop, self.file.version) for start, stop in requests if start < stop]

    def keep(self, start: int, data: bytes) -> None:
        """Keep a range for later reads. The rest of a footer is joined with its tail, with which it is read."""
        tail = next((entry for entry in self._ranges if entry[0] == self._tail_at == start + len(data)), None)
        if tail is not None:
            self._ranges.remove(tail)
        self._ranges.append((start, data if tail is None else data + tail[1]))

    def kept_blocks(self) -> list[tuple[int, bytes]]:
        return self._ranges

    def close(self) -> None:
        self._window, self._ranges = (0, b""), []


_File = TypeVar("_File", bound=RandomFile)


def join_ranges(
    ranges: Iterable[Offsets], gap: int = 64 * 1024, most_bytes: int | None = JOINED_BYTES
) -> list[Offsets]:
    """Return ranges in order, those with little between them as one: the gap costs less than a request."""
    merged: list[Offsets] = []
    for start, stop in sorted(ranges):
        fits = bool(merged) and (most_bytes is None or max(stop, merged[-1][1]) - merged[-1][0] <= most_bytes)
        if fits and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def fetch_ranges(ranges_of: Sequence[tuple[_File, Iterable[Offsets]]]) -> Iterator[tuple[_File, int, bytes]]:
    """Yield (file, start, bytes) of ranges of several files, requested together, in order."""
    requests = [(file, request) for file, ranges in ranges_of for request in file.missing(ranges)]
    for location in dict.fromkeys(file.file.location for file, _ in requests):
        own = [(file, request) for file, request in requests if file.file.location == location]
        by_name = {file.name: file for file, _ in own}
        stream = RangeStream(
            location,
            [request for _, request in own],
            replaced_error=lambda entry, files=by_name: files[entry.name].replaced_error(entry),  # type: ignore[misc]
        )
        with stream:
            for file, request in own:
                yield file, request.start, bytes(next(stream)[1])


def fetch_together(ranges_of: Sequence[tuple[_File, Iterable[Offsets]]]) -> None:
    """Request ranges of several files together and keep them."""
    for file, start, data in fetch_ranges(ranges_of):
        file.keep(start, data)


def keep_footers(files: Sequence[RandomFile]) -> None:
    """Request the footers of several Parquet files together and keep them."""
    fetch_together([(file, [file.tail()]) for file in files])
    longer = [(file, start) for file in files if (start := file.footer_start()) is not None]
    fetch_together([(file, [(start, file.tail()[0])]) for file, start in longer])


class ForwardFile(_RemoteReader):
    """A range of a remote file, read once from its start, a few requests ahead.

    Bytes can be read again until they are released, or until a few megabytes more were read. A `stream` belongs to the
    caller: it has the ranges of several files one after the other.
    """

    def __init__(
        self,
        file: RemoteFile,
        start: int = 0,
        stop: int | None = None,
        *,
        range_bytes: int = RANGE_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
        replaced_error: Callable[[], Exception] | None = None,
        storage: Storage | None = None,
        stream: RangeStream | None = None,
        is_hashed: bool = False,
    ) -> None:
        super().__init__(file, replaced_error, storage)
        self._stop, self._owns_stream = min(self.size if stop is None else stop, self.size), stream is None
        ranges = file.ranges(start, self._stop, range_bytes)
        self._stream = stream or RangeStream(
            self.storage, ranges, ahead_bytes=ahead_bytes, replaced_error=self.replaced_error
        )
        self._digest = hashlib.sha256() if is_hashed else None
        self._views: list[memoryview] = []
        self._starts: list[int] = []
        self.first = self.end = start  # of the bytes that are kept

    def start(self) -> Self:
        """Send the first requests."""
        self._stream.start()
        return self

    def read_at(self, offset: int, size: int) -> bytes:
        stop = min(offset + size, self.size)
        while self.end < stop and (view := self._next()) is not None:
            self._views.append(view)
            self._starts.append(self.end - len(view))
            self.release(min(offset, self.end - _KEEP_BYTES))
        stop = min(stop, self.end)
        if offset >= stop:
            return b""
        number = bisect_right(self._starts, offset) - 1
        if number < 0:
            raise ValueError(f"{self.name} can only be read forwards")
        parts = []
        for start, view in zip(self._starts[number:], self._views[number:], strict=True):
            if start >= stop:
                break
            parts.append(view[max(offset - start, 0) : stop - start])
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def _next(self) -> memoryview | None:
        """Return the next bytes; None at the end of the range."""
        if self.end >= self._stop:
            return None
        view = next(self._stream)[1]
        if self._digest is not None:
            self._digest.update(view)
        self.end += len(view)
        return view

    def release(self, offset: int) -> None:
        while self._views and self._starts[0] + len(self._views[0]) <= offset:
            self.first = self._starts.pop(0) + len(self._views.pop(0))

    def skip(self) -> None:
        """Read the rest and forget it: the ranges of the next file follow in the stream."""
        self._views, self._starts = [], []
        while self._next() is not None:
            pass
        self.first = self.end

    def sha256(self, advance: Callable[[int], None] = lambda size: None) -> str:
        """Return the hash of all bytes; those that were not read yet are read now, and not kept."""
        assert self._digest is not None
        self._views, self._starts = [], []
        while (view := self._next()) is not None:
            advance(len(view))
        self.first = self.end
        return self._digest.hexdigest()

    def close(self) -> None:
        self._views, self._starts = [], []
        if self._owns_stream:
            self._stream.close()
