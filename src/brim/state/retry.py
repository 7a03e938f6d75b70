"""Retry transient failures with backoff, and wait in a way that a stop request ends.

One policy for the Hub and for object stores: a stop ends a wait within 0.2 s. Each storage finds the status and the
code of an error; `may_pass` decides here, for all of them, whether the same request may succeed later. Retries inside a
library are not counted here.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from typing import TypeVar

T = TypeVar("T")
_CHECK_S = 0.2
_LEAVE_S = 0.5
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529})
RATE_LIMITED = 429
MOST_ASKED_S = 300.0  # the Hub counts requests over five minutes
CONFLICTS = frozenset({409, 412})  # another client was quicker: the next try reads its version
_TRANSIENT_CODES = frozenset(
    {
        "RequestTimeout",  # a 400
        "RequestTimeoutException",
        "SlowDown",
        "InternalError",
        "ServiceUnavailable",
        "ServerBusy",
        "OperationTimedOut",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "OperationAborted",
        "ConditionalRequestConflict",
        "BadDigest",
        "XAmzContentSHA256Mismatch",
        "IncompleteBody",
    }
)
_PERMANENT_CODES = frozenset(
    {"AccessDenied", "InsufficientStorage", "NotImplemented", "QuotaExceeded", "XMinioStorageFull"}
)


def may_pass(status: int | None, code: str = "") -> bool:
    """Return whether a request with this answer may succeed later; without a status, if no answer came.

    The code is more specific than the status.
    """
    if code in _TRANSIENT_CODES:
        return True
    return code not in _PERMANENT_CODES and (status is None or status in _TRANSIENT or status in CONFLICTS)


def _no_check() -> None:
    """Do nothing: this thread cannot be stopped."""


class _ThreadState(threading.local):
    check: Callable[[], None] = staticmethod(_no_check)
    is_abandonable = False  # another thread waits for this one, and checks for a stop


_THREAD = _ThreadState()


def check_stop() -> None:
    """Raise an error if this thread was asked to stop."""
    _THREAD.check()


@contextmanager
def interrupted_by(check: Callable[[], None]) -> Iterator[None]:
    """Have every wait of this thread call `check` periodically, which may raise to interrupt it.

    It is a setting of the thread, because readers of files have no parameter for it.
    """
    before, _THREAD.check = _THREAD.check, check
    try:
        yield
    finally:
        _THREAD.check = before


@contextmanager
def stop_delayed(seconds: float = 1.0) -> Iterator[None]:
    """Delay a stop briefly, to clean up."""
    check, until = _THREAD.check, time.monotonic() + seconds
    with interrupted_by(lambda: check() if time.monotonic() > until else None):
        yield


def pause(seconds: float, check: Callable[[], None] = lambda: None) -> None:
    """Wait; a stop, or an error of `check`, interrupts it."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        _THREAD.check()
        check()
        time.sleep(min(left_s, _CHECK_S))


def wait_for(future: Future[T]) -> T:
    """Return the result of a future. A stop ends the wait; then the future is cancelled."""
    try:
        while True:
            try:
                return future.result(_CHECK_S)
            except NotYet:
                if future.done():
                    raise
                _THREAD.check()
    finally:
        future.cancel()


def start_call(request: Callable[[], T], check: Callable[[], None] = _no_check) -> tuple[Future[T], threading.Thread]:
    """Call a function that waits for a server in its own way, in a daemon thread; cancel the future to abandon it.

    Python does not wait for the thread at its end, because the server may be silent. In the thread, `check_stop()`
    raises what `check` raises, and raises once the call is abandoned.
    """
    result: Future[T] = Future()

    def check_abandoned() -> None:
        check()
        if result.cancelled():
            raise CancelledError

    def run() -> None:
        _THREAD.check, _THREAD.is_abandonable = check_abandoned, True
        try:
            answer = request()
        except BaseException as error:  # noqa: BLE001  the waiting thread raises it
            with suppress(InvalidStateError):
                result.set_exception(error)
        else:
            with suppress(InvalidStateError):
                result.set_result(answer)

    thread = threading.Thread(target=run, name="request", daemon=True)
    thread.start()
    return result, thread


def interruptible(request: Callable[[], T]) -> T:
    """Call a function that waits for a server in its own way, but stop waiting when this thread is asked to stop.

    Where nothing can ask for a stop, it is a plain call.
    """
    check = _THREAD.check
    if check is _no_check or _THREAD.is_abandonable:
        return request()
    result, thread = start_call(request, check)
    try:
        return wait_for(result)
    finally:
        thread.join(_LEAVE_S)  # after a stop, a call that is not stuck cleans up


def asked_s(status: int, headers: Mapping[str, str]) -> float:
    """Return for how long an answer asks to wait: Retry-After, or the Hub's own limits: `"api";r=0;t=57`.

    The value is the server's: wait for `capped_wait(...)` of it.
    """
    match = re.fullmatch(r"\s*(\d+)\s*", headers.get("Retry-After", ""))
    if match is None and status == RATE_LIMITED:
        match = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
    return float(match[1]) if match else 0.0


def capped_wait(asked_for_s: float) -> tuple[float, str]:
    """Return the wait that a server asks for, limited to `MOST_ASKED_S`, and a text about it for messages."""
    if asked_for_s <= MOST_ASKED_S:
        return asked_for_s, f"{asked_for_s:g} s"
    return MOST_ASKED_S, f"{MOST_ASKED_S:g} s, not the {asked_for_s:g} s that it asks for"


class Retry:
    """The tries of one request. `patience_s` is how long they may take together, counted from `begin`."""

    def __init__(
        self,
        waits_s: Iterable[float],
        is_transient: Callable[[BaseException], bool],
        *,
        patience_s: float = math.inf,
        wait: Callable[[BaseException, float], None] = lambda error, wait_s: pause(wait_s),
    ) -> None:
        self._delays, self._is_transient = iter(waits_s), is_transient
        self._patience_s, self._wait = patience_s, wait
        self.begin()

    def begin(self) -> None:
        """Start the clock again: an answer came, and its next part may take as long."""
        self._until = time.monotonic() + self._patience_s

    def next_s(self) -> float | None:
        """Return how long to wait before the next try; None after the last."""
        return next(self._delays, None) if time.monotonic() < self._until else None

    def after(self, error: BaseException) -> float | None:
        """Return how long to wait before the next try after this error; None after the last."""
        return self.next_s() if self._is_transient(error) else None

    def wait_to_retry(self, error: BaseException) -> bool:
        """Wait, and return whether to try again."""
        wait_s = self.after(error)
        if wait_s is not None:
            self._wait(error, wait_s)
        return wait_s is not None

    def call(self, ask: Callable[[], T]) -> T:
        """Call a function, again as long as its failures are transient."""
        while True:
            try:
                return ask()
            except Exception as error:
                if not self.wait_to_retry(error):
                    raise
