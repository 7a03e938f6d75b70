"""What takes long before there is progress to show is told of."""

from __future__ import annotations

import threading

import pytest

from brim import progress


def test_only_what_is_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait is told of while it lasts; one that is over in time is not."""
    messages: list[str] = []
    was_received = threading.Event()

    def say(text: str) -> None:
        messages.append(text)
        was_received.set()

    with progress.notify_if_slow(say, "quick"):
        pass
    monkeypatch.setattr("brim.progress._SLOW_S", 0.01)
    with progress.notify_if_slow(say, "slow"):
        assert was_received.wait(30)
    assert messages == ["slow"]
