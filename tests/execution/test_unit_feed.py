"""The unit feed, which reads units ahead of the workers, and the positions of workers, which survive a kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from brim.compute.rows.unit import Unit
from brim.execution.unit_receipts import UnitFeed
from brim.execution.worker_messages import RowRange, WorkerPositions


def units(count: int, error: Exception | None = None) -> Iterator[Unit]:
    for number in range(count):
        yield Unit(number, (), 1, "")
    if error is not None:
        raise error


def take_all(unit_feed: UnitFeed, subset: list[int]) -> None:
    for unit in unit_feed:
        if unit is not None:
            subset.append(unit.number)


def test_the_end_of_nothing() -> None:
    subset: list[int] = []
    take_all(UnitFeed(units(0), 1), subset)
    assert not subset


def test_an_error_before_the_first_unit() -> None:
    with pytest.raises(ValueError, match="broken"):
        take_all(UnitFeed(units(0, ValueError("broken")), 1), [])


@pytest.mark.parametrize("ahead", [1, 3])
def test_all_units_then_the_error(ahead: int) -> None:
    """The feed returns all units before it raises the error of the source."""
    unit_feed = UnitFeed(units(7, ValueError("broken")), ahead)
    subset: list[int] = []
    with pytest.raises(ValueError, match="broken"):
        take_all(unit_feed, subset)
    assert subset == list(range(7))


def test_closing_ends_the_thread() -> None:
    unit_feed = UnitFeed(units(1000), 1)
    unit_feed.close()
    assert not unit_feed._thread.is_alive()


def test_where_a_worker_is_is_known_when_it_is_gone(tmp_path: Path) -> None:
    """The position of a killed worker can be read by slot and unit, and clearing the slot removes it."""
    ours = WorkerPositions(tmp_path / "whereabouts", 3)
    theirs = WorkerPositions(tmp_path / "whereabouts")
    assert [ours.find(slot, 0) for slot in range(3)] == [None] * 3
    theirs.note(2, 7, RowRange(3000, 1000, 1 << 40))
    theirs.note(0, 0, RowRange(0, 25, 0))
    assert ours.find(2, 7) == RowRange(3000, 1000, 1 << 40)
    assert ours.find(0, 0) == RowRange(0, 25, 0)
    assert [ours.find(slot, unit) for slot, unit in ((1, 0), (2, 6), (0, 7))] == [None] * 3
    ours.clear(2)
    assert ours.find(2, 7) is None
    ours.remove()
    assert not (tmp_path / "whereabouts").exists()
