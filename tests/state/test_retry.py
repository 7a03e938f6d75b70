"""Retrying transient failures: how often, how long, and for which errors."""

from __future__ import annotations

import time

import pytest

from brim.state.retry import Retry, interrupted_by, may_pass, pause
from brim.storage.explain_error import explain
from brim.storage.hub_session import HubAnswer, explained_answer
from brim.storage.location import Access, Location
from brim.storage.storage import Storage
from brim.storage.storage_error import classify

STORAGE = Storage(Location("s3", "b", "", Access()))


class Passing(Exception):
    """An error that the policy of these tests treats as transient."""


def of(*waits_s: float) -> Retry:
    return Retry(waits_s, lambda error: isinstance(error, Passing))


def test_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to an object store are retried three times, with growing waits."""
    monkeypatch.delenv("BRIM_STALL_SECONDS", raising=False)
    retry = STORAGE.tries()
    assert [retry.next_s() for _ in range(4)] == [0.2, 1.0, 3.0, None]


def test_never_when_patience_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is retried once the time limit is over, because obstore has already used it for its own retries."""
    monkeypatch.setenv("BRIM_STALL_SECONDS", "1e-9")
    assert STORAGE.tries().next_s() is None
    now = [0.0]
    monkeypatch.setattr("brim.state.retry.time.monotonic", lambda: now[0])
    retry = Retry((0.2, 1.0), lambda error: True, patience_s=5.0)
    now[0] = 5.0
    assert retry.next_s() is None
    retry.begin()  # the next page of a listing starts with a new time limit
    assert retry.next_s() == 0.2


def test_only_what_may_succeed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that are not transient are not retried."""
    monkeypatch.delenv("BRIM_STALL_SECONDS", raising=False)
    assert STORAGE.tries().after(ValueError("no answer of a store")) is None
    assert not of(0.0, 0.0).wait_to_retry(ValueError())


def test_as_often_as_there_are_waits() -> None:
    """A call runs once and again after each wait. Then its last error is raised."""
    requested: list[int] = []

    def ask() -> int:
        requested.append(len(requested))
        if len(requested) < 3:
            raise Passing(str(len(requested)))
        return len(requested)

    assert of(0.0, 0.0).call(ask) == 3
    requested.clear()
    with pytest.raises(Passing, match="2"):
        of(0.0).call(ask)
    assert len(requested) == 2


def test_a_stop_ends_a_wait() -> None:
    """A stop request interrupts a wait, but only in the thread and block for which it was registered."""

    def stop() -> None:
        raise KeyboardInterrupt

    started_at = time.monotonic()
    with pytest.raises(KeyboardInterrupt), interrupted_by(stop):
        pause(60.0)
    with pytest.raises(KeyboardInterrupt):
        pause(60.0, stop)
    pause(0.01)
    assert time.monotonic() - started_at < 30.0


@pytest.mark.parametrize(
    ("status", "code", "passes"),
    [
        (None, "", True),
        *((status, "", True) for status in (408, 409, 412, 425, 429, 500, 502, 503, 504, 529)),
        *((status, "", False) for status in (400, 401, 402, 403, 404, 405, 410, 413, 416, 422, 501, 507)),
        (400, "RequestTimeout", True),
        (400, "EntityTooLarge", False),
        (403, "RequestTimeTooSkewed", False),
        (503, "SlowDown", True),
        (503, "QuotaExceeded", False),
    ],
)
def test_what_may_pass(status: int | None, code: str, passes: bool) -> None:
    """Answers of the Hub and of buckets share one list of transient errors.

    Transient errors have exit code 5 and a hint to run the same command again. All others have exit code 2 and no such
    hint.
    """
    assert may_pass(status, code) == passes
    if status is not None:
        for by_hub in (True, False):
            report = explained_answer(HubAnswer(status, code, "", by_hub), "ada/data")
            assert report.exit_code == (5 if passes else 2)
            assert ("same command" in report.hint) == passes
        error = classify(status, code)
        assert explain(error, Location("s3", "b", "", Access())).exit_code == (5 if passes else 2)
