"""The walk over shards returns results in order, looks ahead a limited distance, and cancels running calls on a
stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from brim.errors import StoppedError
from brim.verification import walk
from brim.verification.walk import walk_shards

Advance = Callable[[int], None]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "usable_cores", lambda: 2)


def test_results_come_in_order_of_the_names() -> None:
    def inspect(name: str, advance: Advance) -> str:
        time.sleep(0.05 if name == "a" else 0)
        return name.upper()

    assert list(walk_shards(["a", "b", "c"], inspect, is_remote=True)) == [("a", "A"), ("b", "B"), ("c", "C")]
    assert list(walk_shards([], inspect, is_remote=False)) == []


@pytest.mark.parametrize(("is_remote", "reads", "threads"), [(False, True, 2), (True, True, 2), (True, False, 8)])
def test_as_many_calls_run_as_the_location_takes(is_remote: bool, reads: bool, threads: int) -> None:
    """Local walks run one call per core, remote ones eight small requests; at most three rounds are started ahead."""
    lock, running, maximum, started = threading.Lock(), 0, 0, 0

    def inspect(name: str, advance: Advance) -> None:
        nonlocal running, maximum, started
        with lock:
            running, started = running + 1, started + 1
            maximum = max(maximum, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    shards = walk_shards([str(n) for n in range(60)], inspect, is_remote=is_remote, reads_content=reads)
    for number, _ in enumerate(shards):
        assert started <= number + 1 + 3 * threads
    assert maximum == threads


def test_an_error_of_one_shard_ends_the_others() -> None:
    """After an error, running calls end when they next report bytes, and waiting calls are not started."""
    started_at: list[str] = []
    ended: list[str] = []

    def inspect(name: str, advance: Advance) -> None:
        started_at.append(name)
        if name == "bad":
            raise ValueError("broken")
        try:
            while True:
                advance(1)
                time.sleep(0.001)
        except StoppedError:
            ended.append(name)
            raise

    names = [f"endless {number}" for number in range(30)]
    with pytest.raises(ValueError, match="broken"):
        list(walk_shards(["bad", *names], inspect, is_remote=False))
    assert sorted(ended) == sorted(started_at[1:])
    assert len(started_at) < 8


def test_bytes_are_reported_to_the_caller() -> None:
    observed: list[int] = []

    def inspect(name: str, advance: Advance) -> None:
        advance(3)

    list(walk_shards(["a", "b"], inspect, is_remote=False, advance=observed.append))
    assert observed == [3, 3]
