"""One thread for all requests to object stores: they wait there together, and can be dropped at any time."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from brim.buckets.bucket_client import patience_s
from brim.buckets.bucket_errors import is_passing

if TYPE_CHECKING:
    import asyncio


_WAITS_S = (0.2, 1.0, 3.0)


class Tries:
    """Of one request. What obstore has asked for in vain until its patience ended is not asked for again."""

    def __init__(self) -> None:
        self._waits = iter(_WAITS_S)
        self.begin()

    def begin(self) -> None:
        """What took long was answered: the next part of it has obstore's patience anew."""
        self._until = time.monotonic() + patience_s() / 2

    def next_s(self) -> float | None:
        """How long to wait before the next try; None if there is none."""
        return next(self._waits, None) if time.monotonic() < self._until else None

    def after(self, error: BaseException) -> float | None:
        """The same, if it failed like this."""
        return self.next_s() if is_passing(error) else None


T = TypeVar("T")

_CHECK_S = 0.2
_DROP_S, _REST_S = 5.0, 2.0
_LOOKS, _LOOK_S = 4, 0.01
_LOCK = threading.Lock()
_LOOP: tuple[int, asyncio.AbstractEventLoop] | None = None


def submit(request: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a request; cancel the future to drop it."""
    import asyncio

    return asyncio.run_coroutine_threadsafe(request, _loop())


class _Here(threading.local):
    check: Callable[[], None] = staticmethod(lambda: None)


_HERE = _Here()


@contextmanager
def interrupted_by(check: Callable[[], None]) -> Iterator[None]:
    """Whoever waits for a store in this thread calls `check` now and then, and it may raise to end the waiting.

    A setting of the thread, because readers of files in between know nothing of waiting.
    """
    before, _HERE.check = _HERE.check, check
    try:
        yield
    finally:
        _HERE.check = before


def wait(request: Coroutine[Any, Any, T]) -> T:
    """What a request brings. obstore's own waiting does not hear Ctrl-C until it is over; this does."""
    return result_of(submit(request))


def result_of(future: Future[T]) -> T:
    """What a request that was started brings; it is dropped if the waiting ends."""
    try:
        while True:
            try:
                return future.result(_CHECK_S)
            except NotYet:
                if future.done():
                    raise
                _HERE.check()
    finally:
        future.cancel()


def pause(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        _HERE.check()
        time.sleep(min(left_s, _CHECK_S))


def _loop() -> asyncio.AbstractEventLoop:
    import asyncio

    global _LOOP
    with _LOCK:
        if _LOOP is None or _LOOP[0] != os.getpid():  # a fork has the loop and not its thread
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="objects", daemon=True).start()
            _LOOP = (os.getpid(), loop)
            atexit.register(_end, *_LOOP)
        return _LOOP[1]


def _end(process: int, loop: asyncio.AbstractEventLoop) -> None:
    """Drop what is under way before Python ends: obstore's threads would come back to it, and abort the process."""
    import asyncio

    async def drop() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    if process != os.getpid():
        return
    try:
        asyncio.run_coroutine_threadsafe(drop(), loop).result(_DROP_S)
    except NotYet:
        return
    _let_threads_rest()


def _let_threads_rest() -> None:
    """The threads are done with their last answers a moment after those were given: wait until all of them sleep."""
    quiet, until = 0, time.monotonic() + _REST_S
    while quiet < _LOOKS and time.monotonic() < until:
        time.sleep(_LOOK_S)  # without Python's lock, which is what they want
        quiet = quiet + 1 if _others_sleep() else 0


def _others_sleep() -> bool:
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/stat", encoding="latin-1") as file:
                if int(thread) != threading.get_native_id() and file.read().rpartition(")")[2].split()[0] == "R":
                    return False
    except OSError:  # a thread that has just ended; another system than Linux
        pass
    return True
