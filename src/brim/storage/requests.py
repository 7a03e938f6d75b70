"""Requests that wait in one thread, where they can be dropped at any time, and how often they are made again."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from typing import TYPE_CHECKING, Any, TypeVar, cast

from brim.errors import InputError
from brim.state.retry import Retry, abandoned_when, look
from brim.storage.storage_error import StorageError

if TYPE_CHECKING:
    import asyncio

_PATIENCE_S = 180.0  # for one request, all its tries together; obstore signs it once


def patience_s() -> float:
    """Return for how long a request that fails is tried again."""
    said = os.environ.get("BRIM_STALL_SECONDS")
    try:
        seconds = float(said) if said else _PATIENCE_S
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InputError(f"BRIM_STALL_SECONDS is a number of seconds above zero, not {said!r}.")
    return min(seconds, _PATIENCE_S)


_WAITS_S = (0.2, 1.0, 3.0)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    return isinstance(error, StorageError) and error.is_transient


def tries() -> Retry:
    """Return the attempts of one request. What obstore has retried until its own limit is not asked for again."""
    return Retry(_WAITS_S, is_transient, patience_s=patience_s() / 2)


T = TypeVar("T")

_CHECK_S = 0.2
_DROP_S, _REST_S = 5.0, 2.0
_LOOKS, _LOOK_S = 4, 0.01
_LOOP_LOCK = threading.Lock()
_LOOP: tuple[int, asyncio.AbstractEventLoop] | None = None
_BESIDE = min(32, (os.cpu_count() or 1) + 4)  # threads that wait for servers, at a time
_ROOM: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}


def submit(request: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a request; cancel the future to drop it."""
    import asyncio

    return asyncio.run_coroutine_threadsafe(request, _loop())


def call_soon(function: Callable[[T], object], given: T) -> None:
    """Have a function called on the thread of the requests."""
    _loop().call_soon_threadsafe(function, given)


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
                look()
    finally:
        future.cancel()


async def beside(function: Callable[..., T], *given: Any) -> T:
    """What a function brings that waits for a server in its own way, in a thread, a few at a time.

    Python waits for the threads of asyncio.to_thread before it ends; for these it does not: the server may be silent.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    brought: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: Exception | None) -> None:
        if brought.cancelled():
            return
        if error is not None:
            brought.set_exception(error)
        else:
            brought.set_result(cast(T, result))

    def check() -> None:
        if brought.cancelled():
            raise CancelledError

    def run() -> None:
        try:
            with abandoned_when(check):
                told: tuple[T | None, Exception | None] = (function(*given), None)
        except Exception as error:  # noqa: BLE001  whoever waits for it gets it
            told = (None, error)
        loop.call_soon_threadsafe(tell, *told)

    async with _ROOM[loop]:
        threading.Thread(target=run, name="beside", daemon=True).start()
        return await brought


def _loop() -> asyncio.AbstractEventLoop:
    import asyncio

    global _LOOP
    with _LOOP_LOCK:
        if _LOOP is None or _LOOP[0] != os.getpid():  # a fork has the loop and not its thread
            loop = asyncio.new_event_loop()
            _ROOM[loop] = asyncio.Semaphore(_BESIDE)
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
