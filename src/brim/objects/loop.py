"""One thread for all requests to object stores: they wait there together, and can be dropped at any time."""

from __future__ import annotations

import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

_LOCK = threading.Lock()
_LOOP: tuple[int, asyncio.AbstractEventLoop] | None = None


def submit(request: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a request; cancel the future to drop it."""
    import asyncio

    return asyncio.run_coroutine_threadsafe(request, _loop())


def _loop() -> asyncio.AbstractEventLoop:
    import asyncio

    global _LOOP
    with _LOCK:
        if _LOOP is None or _LOOP[0] != os.getpid():  # a fork has the loop and not its thread
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="objects", daemon=True).start()
            _LOOP = (os.getpid(), loop)
        return _LOOP[1]
