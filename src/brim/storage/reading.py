"""Ranges of objects, a few requests ahead of whoever reads them.

One request at a time would wait for the line again and again: a bucket answers after tens of milliseconds, and one
connection carries a part of what a line can. So pieces are asked for ahead, in order, and given in order. Each request
names the ETag that was planned: an object that became another one is noticed by the store itself.

`WindowFile` and `ForwardFile` are files that are elsewhere, to read from: any range, or all of it forwards and hashed
on the way. Whoever inherits says how bytes are fetched: from the Hub, from a bucket.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from brim.errors import InputError, SourceError
from brim.records import dataclass
from brim.state.atomic_files import write_all
from brim.state.retry import pause
from brim.storage.explain_error import explain
from brim.storage.location import Location
from brim.storage.requests import result_of, submit, tries
from brim.storage.storage import open_storage
from brim.storage.storage_error import StorageError

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

    def passed(self, offset: int) -> None:
        """Learn that nothing before this offset will be asked for again."""

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

    def _next_block(self) -> bytes | memoryview:
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


PIECE_BYTES = 4 << 20
TO_END = 1 << 62
AHEAD_BYTES = 3 * PIECE_BYTES  # asked for and not taken yet, by one reader
_AHEAD_REQUESTS = 32  # small objects: their number is what counts
_TOGETHER, _SMALL_BYTES = 16, 64 << 10


class Changed(InputError):
    """An object is not what it was when it was listed, or is gone. Whoever has a better name for it says that."""


def _changed(key: str) -> Changed:
    return Changed(
        f"The object {key!r} is not the one that was listed, or is gone.",
        hint="Let what is there come to rest, then run the same command again.",
        path=key,
    )


@dataclass(frozen=True, slots=True)
class ObjectPiece:
    """A range of an object; `stop` is TO_END for all of one whose size is not known.

    Without an ETag it is taken as it is. An empty one asks whether the object is empty still.
    """

    key: str
    start: int
    stop: int
    etag: str | None = None

    @property
    def is_small(self) -> bool:
        return self.weight <= _SMALL_BYTES

    @property
    def weight(self) -> int:
        """The bytes that it takes, as far as they are known."""
        return PIECE_BYTES // 2 if self.stop == TO_END else self.stop - self.start


def fetch(address: Location, piece: ObjectPiece) -> bytes:
    """The bytes of one piece."""
    return next(iter(ahead(address, [piece])))[1]


def ahead(
    address: Location, pieces: Iterable[ObjectPiece], *, requests: int = _AHEAD_REQUESTS
) -> Iterator[tuple[ObjectPiece, bytes]]:
    """The bytes of pieces in order.

    `requests` is how many are under way at most, if they are so small that their bytes set no limit.
    """
    run = RangeRun(address, pieces, requests=requests)
    try:
        while (taken := run.take()) is not None:
            yield taken
    finally:
        run.close()


def as_they_come(address: Location, pieces: Iterable[ObjectPiece]) -> Iterator[tuple[ObjectPiece, memoryview]]:
    """The bytes of pieces in order, in the memory that they were received into."""
    run = RangeRun(address, pieces)
    try:
        while (taken := run.take_view()) is not None:
            piece, held = taken[0], [taken[1]]
            del taken
            yield piece, held.pop()  # whoever takes it is the last to hold it
    finally:
        run.close()


class RangeRun:
    """Pieces in order, of which a few are asked for before they are taken. `start` asks for the first ones.

    Small ones are asked for several together: handing each to the thread of the requests takes longer than its bytes.
    """

    def __init__(
        self,
        address: Location,
        pieces: Iterable[ObjectPiece],
        *,
        requests: int = _AHEAD_REQUESTS,
        most_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._address, self._most_bytes, self._requests = address, most_bytes, requests
        self._together = max(min(_TOGETHER, requests // 2), 1)
        self._pieces = iter(pieces)
        self._next = next(self._pieces, None)
        self._waiting: deque[tuple[ObjectPiece, _Answers | None]] = deque()
        self._asked = 0

    def start(self) -> None:
        while self._next is not None and self._fits(self._next):
            if not (self._next.weight or self._next.etag):
                self._wait_for(None)
                continue
            if self._next.is_small and len(self._waiting) > self._requests - self._together:
                return  # until there is room for several
            answers = _Answers()
            group = [self._wait_for(answers)]
            while group[-1].is_small and len(group) < self._together and self._follows():
                group.append(self._wait_for(answers))
            answers.future = submit(_get_all(self._address, group))

    def _wait_for(self, answers: _Answers | None) -> ObjectPiece:
        piece = self._next
        assert piece is not None
        self._waiting.append((piece, answers))
        self._asked += piece.weight
        self._next = next(self._pieces, None)
        return piece

    def _follows(self) -> bool:
        """Whether the next piece can be asked for with those before it."""
        piece = self._next
        return piece is not None and piece.is_small and bool(piece.weight or piece.etag) and self._fits(piece)

    def take(self) -> tuple[ObjectPiece, bytes] | None:
        """The next piece; None behind the last. While it is used, others are on their way."""
        taken = self.take_view()
        return None if taken is None else (taken[0], bytes(taken[1]))

    def take_view(self) -> tuple[ObjectPiece, memoryview] | None:
        """The same in the memory that it was received into."""
        self.start()
        if not self._waiting:
            return None
        piece, answers = self._waiting.popleft()
        view = memoryview(b"" if answers is None else _result(answers.next, self._address, piece))
        self._asked -= piece.weight
        return piece, view

    def close(self) -> None:
        for _, answers in self._waiting:
            if answers is not None:
                answers.future.cancel()
        self._waiting.clear()
        self._next = None

    def _fits(self, piece: ObjectPiece) -> bool:
        waiting = len(self._waiting)
        return not waiting or (self._asked + piece.weight <= self._most_bytes and waiting < self._requests)


class _Answers:
    """Those to pieces that were asked for together, taken one by one."""

    def __init__(self) -> None:
        self.future: Future[list[Any]] = Future()
        self._taken = 0

    def next(self) -> Any:
        answers = result_of(self.future)
        answer, answers[self._taken] = answers[self._taken], None  # its bytes are whoever's takes them
        self._taken += 1
        if isinstance(answer, BaseException):
            raise answer
        return answer


async def _get_all(address: Location, pieces: Sequence[ObjectPiece]) -> list[Any]:
    """Return what each brings: its bytes, or why there are none."""
    import asyncio

    storage = open_storage(address)
    requests = [
        storage.fetch(piece.key, piece.start, None if piece.stop == TO_END else piece.stop, piece.etag)
        for piece in pieces
    ]
    return await asyncio.gather(*requests, return_exceptions=True)


def _result(answer: Callable[[], Any], address: Location, piece: ObjectPiece) -> Any:
    retry = tries()
    while True:
        try:
            data = answer()
        except CancelledError as error:
            raise SourceError("A request to an object store was dropped.") from error
        except StorageError as error:
            if error.is_changed or error.is_missing:
                raise _changed(piece.key) from None
            if (wait_s := retry.after(error)) is None:
                raise explain(error, replace(address, prefix=piece.key), reading=True) from None
        else:
            if piece.stop == TO_END or len(data) == piece.stop - piece.start:
                return data
            if (wait_s := retry.next_s()) is None:
                raise _changed(piece.key)
        pause(wait_s)
        again = _Answers()
        again.future = submit(_get_all(address, [piece]))
        answer = again.next


def cut(key: str, start: int, stop: int, etag: str | None, piece_bytes: int = PIECE_BYTES) -> Iterator[ObjectPiece]:
    """A range as pieces of one request each, cut at multiples of their size: there stores have cut the object too."""
    while start < stop:
        end = min((start // piece_bytes + 1) * piece_bytes, stop)
        yield ObjectPiece(key, start, end, etag)
        start = end


class ObjectFile(WindowFile):
    """Any range of an object."""

    def __init__(
        self,
        address: Location,
        name: str,
        size: int,
        etag: str | None,
        changed: Callable[[], Exception] | None = None,
    ) -> None:
        super().__init__(name, size)
        self.address, self.key, self.etag, self.changed = address, address.key(name), etag, changed

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise what `changed` makes of it if the object is another one now."""
        try:
            yield
        except Changed:
            if self.changed is None:
                raise
            raise self.changed() from None

    def _fetch(self, start: int, stop: int) -> bytes:
        with self.watched():
            pieces = cut(self.key, start, stop, self.etag)
            return b"".join(data for _, data in ahead(self.address, pieces))


class ObjectStream(ForwardFile):
    """All of an object, a few requests ahead."""

    def __init__(self, address: Location, name: str, size: int, etag: str | None) -> None:
        super().__init__(name, size)
        self._blocks = as_they_come(address, cut(address.key(name), 0, size, etag))

    def _next_block(self) -> memoryview:
        return next(self._blocks)[1]

    def close(self) -> None:
        self._blocks.close()  # type: ignore[attr-defined]
