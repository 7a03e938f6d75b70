"""The event loop of requests: one thread, where each request can be dropped at any time. For backends only."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

from brim.state.retry import start_call, wait_for

T = TypeVar("T")

_DROP_S, _REST_S = 5.0, 2.0
_CHECKS, _CHECK_S = 4, 0.01
_LOCK = threading.Lock()
_CALLS = min(32, (os.cpu_count() or 1) + 4)  # threads that wait for servers at a time
_LOOP: tuple[int, asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None


def submit(request: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a request; cancel the future to drop it."""
    return asyncio.run_coroutine_threadsafe(request, _loop()[1])


def submit_all(requests: Iterable[Coroutine[Any, Any, Any]]) -> Future[list[Any]]:
    """Start requests together: handing each to the loop would take longer. The result has answers and exceptions."""

    async def gather() -> list[Any]:
        return await asyncio.gather(*requests, return_exceptions=True)

    return submit(gather())


def run(request: Coroutine[Any, Any, T]) -> T:
    """Return what a request answers. obstore's own waiting does not react to Ctrl-C until it is over; this does."""
    return wait_for(submit(request))


def call_soon(function: Callable[[T], object], argument: T) -> None:
    """Have a function called on the thread of the requests."""
    _loop()[1].call_soon_threadsafe(function, argument)


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Return the result of a function that waits for a server in its own way; a few run at a time.

    asyncio.to_thread would do, but Python waits for its threads at the end, and the server may be silent.
    """
    async with _loop()[2]:
        return await asyncio.wrap_future(start_call(lambda: function(*arguments))[0])


def _loop() -> tuple[int, asyncio.AbstractEventLoop, asyncio.Semaphore]:
    global _LOOP
    with _LOCK:
        if _LOOP is None or _LOOP[0] != os.getpid():  # a fork has the loop and not its thread
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="objects", daemon=True).start()
            _LOOP = os.getpid(), loop, asyncio.Semaphore(_CALLS)
            atexit.register(_end, os.getpid(), loop)
        return _LOOP


def _end(process: int, loop: asyncio.AbstractEventLoop) -> None:
    """Drop all requests before Python ends: obstore's threads would return to it, and abort the process.

    They finish their last answers shortly after these were given: wait until all of them sleep.
    """

    async def drop() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    if process != os.getpid():
        return
    try:
        asyncio.run_coroutine_threadsafe(drop(), loop).result(_DROP_S)
    except NotYet:
        return
    quiet, until = 0, time.monotonic() + _REST_S
    while quiet < _CHECKS and time.monotonic() < until:
        time.sleep(_CHECK_S)  # without Python's lock, which the threads need
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
