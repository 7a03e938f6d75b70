"""Long waits before the first progress are announced by a message."""

from __future__ import annotations

import threading

import pytest

from brim import progress


def test_message_appears_only_for_slow_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message appears during a long wait, and none for a short one."""
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
