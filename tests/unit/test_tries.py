"""How often brim itself asks again."""

from __future__ import annotations

import pytest

from brim.buckets.requests import Tries


def test_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRIM_STALL_SECONDS", raising=False)
    tries = Tries()
    assert [tries.next_s() for _ in range(4)] == [0.2, 1.0, 3.0, None]


def test_never_when_patience_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore has had all of it: a store that stays away is not waited for several times over."""
    monkeypatch.setenv("BRIM_STALL_SECONDS", "1e-9")
    tries = Tries()
    assert tries.next_s() is None
    monkeypatch.delenv("BRIM_STALL_SECONDS")
    tries.begin()  # the next page of a listing, however long those before took
    assert tries.next_s() == 0.2


def test_only_what_may_succeed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRIM_STALL_SECONDS", raising=False)
    assert Tries().after(ValueError("no answer of a store")) is None
