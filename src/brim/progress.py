"""What a running job tells whoever watches it. The terminal, JSON lines and tests each listen in their way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

Advance = Callable[[int], None]
Watch = Callable[["Progress | bool | None"], "Progress"]
_SLOW_S = 10.0


@contextmanager
def told_if_slow(say: Callable[[str], None], text: str) -> Iterator[None]:
    """Say something if what is inside takes long: for a wait that comes before there is progress to show."""
    timer = threading.Timer(_SLOW_S, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Progress(Protocol):
    """Called from several threads; must be quick and must not raise.

    `nodes`: what the job holds now on other machines, by their names.
    """

    def start(self, what: str, total_bytes: int, shards: int, limit_bytes: int) -> None: ...
    def advance(self, size: int) -> None: ...
    def hashed(self, size: int) -> None: ...
    def committed(self) -> None: ...
    def shard(self, name: str, size: int, sha256: str, how: str) -> None: ...
    def note(self, text: str) -> None: ...
    def nodes(self, held: Mapping[str, int]) -> None: ...
    def finish(self) -> None: ...


@runtime_checkable
class HearsTasks(Protocol):
    """Progress that also wants to know which shards or units are under way."""

    def begin(self, name: str, size: int) -> None:
        """Somebody works on it from now on."""

    def again(self, name: str) -> None:
        """It was lost, and will be begun once more."""


def tell_begin(progress: Progress, name: str, size: int) -> None:
    if isinstance(progress, HearsTasks):
        progress.begin(name, size)


def tell_again(progress: Progress, name: str) -> None:
    if isinstance(progress, HearsTasks):
        progress.again(name)


def given_or_silent(progress: Progress | bool | None) -> Progress:
    """Who watches, if somebody does."""
    return Silent() if progress is None or isinstance(progress, bool) else progress


@runtime_checkable
class CountsRows(Protocol):
    """Progress that also wants to know how many rows are done."""

    def rows(self, count: int) -> None:
        """So many more."""


def tell_rows(progress: Progress, count: int) -> None:
    if isinstance(progress, CountsRows):
        progress.rows(count)


class Silent:
    """Nobody watches."""

    def start(self, what: str, total_bytes: int, shards: int, limit_bytes: int) -> None: ...
    def advance(self, size: int) -> None: ...
    def hashed(self, size: int) -> None: ...
    def committed(self) -> None: ...
    def shard(self, name: str, size: int, sha256: str, how: str) -> None: ...
    def note(self, text: str) -> None: ...
    def nodes(self, held: Mapping[str, int]) -> None: ...
    def finish(self) -> None: ...
