"""Work beside the thread that makes it: several at a time, the results in the order in which they were given.

For what Arrow, NumPy and hashing do outside of Python's lock. At most so many wait or run, which bounds memory;
with none, everything is done at once by the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Beside:
    """`threads` may be 0. Close it, whatever happened."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name) if threads > 0 else None
        self._most = threads + 1
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def do(self, work: Callable[[], Any], take: Callable[[Any], None]) -> None:
        """Have `work` done; its result is taken by the caller's thread, now or in a later call."""
        if self._pool is None:
            take(work())
            return
        while len(self._waiting) >= self._most:
            self._take()
        self._waiting.append((self._pool.submit(work), take))

    def settle(self) -> None:
        """All that was given is done and taken."""
        while self._waiting:
            self._take()

    def _take(self) -> None:
        future, take = self._waiting.popleft()
        take(future.result())

    def close(self) -> None:
        """Nothing more is taken: after an error, what was not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._waiting.clear()
