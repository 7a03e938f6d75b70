"""Walk over the shards of a published dataset: several at a time, with a bounded look-ahead, and results in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from brim.errors import StoppedError
from brim.memory.limit import usable_cores
from brim.progress import Advance
from brim.state.retry import interrupted_by

_REQUESTS = 8  # small requests at a time, to the Hub or a bucket
_STREAMS = 4  # whole shards at a time, from the Hub or a bucket: some 20 MB each
T = TypeVar("T")


def walk_shards(
    names: Sequence[str],
    inspect: Callable[[str, Advance], T],
    *,
    is_remote: bool,
    reads_content: bool = False,
    advance: Advance = lambda size: None,
) -> Iterator[tuple[str, T]]:
    """Yield each name with the result of `inspect`, which is called in threads.

    `inspect` gets a name and a function, which it must call with the number of bytes that it has read. When the caller
    stops or an error is raised, calls that are running end at their next report or network request.
    """
    threads = usable_cores()
    if is_remote:
        threads = min(threads, _STREAMS) if reads_content else _REQUESTS
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise StoppedError("Stopped.")

    def report(size: int) -> None:
        check()
        advance(size)

    def run(name: str) -> T:
        check()
        with interrupted_by(check):
            return inspect(name, report)

    running: deque[tuple[str, Future[T]]] = deque()
    with ThreadPoolExecutor(threads, "shard") as pool:
        try:
            for name in names:
                running.append((name, pool.submit(run, name)))
                if len(running) > 2 * threads:
                    first, future = running.popleft()
                    yield first, future.result()
            while running:
                first, future = running.popleft()
                yield first, future.result()
        finally:
            stopped.set()
