"""The one way in which brim asks again: what may pass, after waits that a stop ends, until waits or patience are over.

How the answer of a server is found in an error is for whoever asks to say (`passing`): a store's errors are known where
that store is. Whether such an answer may pass is said here, for the Hub and for buckets (`may_pass`): what may not is
an error that ends a run for good. What a library tries again by itself is not counted here.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_CHECK_S = 0.2
_LEAVE_S = 0.5
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529})
RATE_LIMITED = 429
MOST_ASKED_S = 300.0  # the Hub counts requests over five minutes
CONFLICTS = frozenset({409, 412})  # somebody else was quicker: whoever looks again may go on
_PASSING_CODES = frozenset(
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
_LASTING_CODES = frozenset(
    {"AccessDenied", "InsufficientStorage", "NotImplemented", "QuotaExceeded", "XMinioStorageFull"}
)


def may_pass(status: int | None, code: str = "") -> bool:
    """Whether a request that was answered like this may be answered otherwise later. The code says more than the
    status; without either there was no answer, and there may be one."""
    if code in _PASSING_CODES:
        return True
    return code not in _LASTING_CODES and (status is None or status in _PASSING or status in CONFLICTS)


def _no_check() -> None:
    """Nobody can stop this thread."""


class _Here(threading.local):
    check: Callable[[], None] = staticmethod(_no_check)
    abandonable = False  # another thread waits for this one, and hears a stop


_HERE = _Here()


def asked_s(status: int, headers: Mapping[str, str]) -> float:
    """Return for how long an answer asks to wait: Retry-After, or the Hub's own limits: `"api";r=0;t=57`.

    The value is the server's: wait for `capped_wait(...)` of it.
    """
    said = re.fullmatch(r"\s*(\d+)\s*", headers.get("Retry-After", ""))
    if said is None and status == RATE_LIMITED:
        said = re.search(r"\bt=(\d+)", headers.get("RateLimit", ""))
    return float(said[1]) if said else 0.0


@contextmanager
def interrupted_by(check: Callable[[], None]) -> Iterator[None]:
    """Whoever waits in this thread calls `check` now and then, and it may raise to end the waiting.

    A setting of the thread, because readers of files in between know nothing of waiting.
    """
    before, _HERE.check = _HERE.check, check
    try:
        yield
    finally:
        _HERE.check = before


@contextmanager
def leaving(seconds: float = 1.0) -> Iterator[None]:
    """For what is cleaned up behind a stop: the waiting goes on for a moment before `check` is asked again."""
    check, until = _HERE.check, time.monotonic() + seconds
    with interrupted_by(lambda: check() if time.monotonic() > until else None):
        yield


def look() -> None:
    """Raises if somebody asked this thread to stop."""
    _HERE.check()


def capped_wait(asked_for_s: float) -> tuple[float, str]:
    """Return how long to wait if a server asks for this long, and how to say it: no server may stop a job for a day."""
    if asked_for_s <= MOST_ASKED_S:
        return asked_for_s, f"{asked_for_s:g} s"
    return MOST_ASKED_S, f"{MOST_ASKED_S:g} s, not the {asked_for_s:g} s that it asks for"


@contextmanager
def abandoned_when(check: Callable[[], None]) -> Iterator[None]:
    """Mark a thread that its caller may abandon: `look()` raises what `check` raises, requests are plain calls."""
    _HERE.abandonable = True
    with interrupted_by(check):
        yield


def interruptible(request: Callable[[], T]) -> T:
    """Call what waits for a server in its own way, but stop waiting when this thread is asked to stop.

    The call runs in a daemon thread that hears the same stop. If it does not return, because the server is silent, it
    is abandoned: Python does not wait for it at its end. Without anybody who could ask, it is a plain call.
    """
    check = _HERE.check
    if check is _no_check or _HERE.abandonable:
        return request()
    result: Future[T] = Future()

    def run() -> None:
        with abandoned_when(check):
            try:
                result.set_result(request())
            except BaseException as error:  # noqa: BLE001  whoever waits for it gets it
                result.set_exception(error)

    thread = threading.Thread(target=run, name="request", daemon=True)
    thread.start()
    try:
        while not _is_finished(result):
            check()
    except BaseException:
        thread.join(_LEAVE_S)  # a call that is not stuck hears the stop too, and lets go of what it uses
        raise
    return result.result()


def _is_finished(result: Future[T]) -> bool:
    wait([result], _CHECK_S)
    return result.done()


def pause(seconds: float, check: Callable[[], None] = lambda: None) -> None:
    """Wait, and hear a stop meanwhile. `check` is asked too."""
    until = time.monotonic() + seconds
    while (left_s := until - time.monotonic()) > 0:
        _HERE.check()
        check()
        time.sleep(min(left_s, _CHECK_S))


class Retry:
    """The tries of one request. `patience_s` is how long they may take together, counted from `begin`."""

    def __init__(
        self,
        waits_s: Iterable[float],
        passing: Callable[[BaseException], bool],
        *,
        patience_s: float = math.inf,
        wait: Callable[[BaseException, float], None] = lambda error, wait_s: pause(wait_s),
    ) -> None:
        self._waits, self._passing, self._patience_s, self._wait = iter(waits_s), passing, patience_s, wait
        self.begin()

    def begin(self) -> None:
        """What took long was answered: the next part of it has the patience anew."""
        self._until = time.monotonic() + self._patience_s

    def next_s(self) -> float | None:
        """How long to wait before the next try; None if there is none."""
        return next(self._waits, None) if time.monotonic() < self._until else None

    def after(self, error: BaseException) -> float | None:
        """The same, if it failed like this."""
        return self.next_s() if self._passing(error) else None

    def again(self, error: BaseException) -> bool:
        """Whether to try again, once the wait is over."""
        wait_s = self.after(error)
        if wait_s is not None:
            self._wait(error, wait_s)
        return wait_s is not None

    def call(self, ask: Callable[[], T]) -> T:
        """What `ask` brings, asked for again as long as that may help."""
        while True:
            try:
                return ask()
            except Exception as error:
                if not self.again(error):
                    raise
