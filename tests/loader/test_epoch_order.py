"""The order of an epoch and its division among ranks and workers: every row exactly once under all changes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brim.loader.epoch_order import EpochOrder
from brim.loader.row_batches import stretches_of
from brim.loader.row_shares import Layout, Leg, Shares, current_shares, ranges_left

ROWS = st.lists(st.integers(0, 40), min_size=1, max_size=12)
LAYOUT = st.tuples(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.sampled_from(["drop", "pad", "keep"])
).map(lambda values: Layout(*values))


def order_of(rows: list[int], *, seed: int = 0, epoch: int = 0, window: int = 7, lanes: int = 4) -> EpochOrder:
    return EpochOrder(np.array(rows, np.int64), seed=seed, epoch=epoch, window=window, lanes=lanes, shuffle=True)


def rows_in_order(order: EpochOrder, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (row group, row) for the rows of ranges, read exactly as the epoch order specifies."""
    read = [
        (stretch.block, row) for stretch in stretches_of(order, ranges) for row in range(stretch.start, stretch.stop)
    ]
    actual, position = [], 0
    for start, stop in ranges:
        offset = start
        while offset < stop:
            first, last = order.window(offset)
            window, position = read[position : position + last - first], position + last - first
            numbers = order.shuffled(first, last)[offset - first : min(stop, last) - first]
            actual += [window[number] for number in numbers.tolist()]
            offset += len(numbers)
    assert position == len(read)
    return actual


@given(rows=ROWS, window=st.integers(1, 50), lanes=st.integers(1, 9), epoch=st.integers(0, 3))
def test_epoch_order_has_every_row_once(rows: list[int], window: int, lanes: int, epoch: int) -> None:
    order = order_of(rows, window=window, lanes=lanes, epoch=epoch)
    expected = [(block, row) for block, count in enumerate(rows) for row in range(count)]
    actual = rows_in_order(order, [(0, order.rows)] if order.rows else [])
    assert sorted(actual) == expected


@given(rows=ROWS, cut=st.floats(0, 1), window=st.integers(1, 50))
def test_epoch_order_is_the_same_when_read_in_parts(rows: list[int], cut: float, window: int) -> None:
    order = order_of(rows, window=window)
    position = int(cut * order.rows)
    parts = [part for part in [(0, position), (position, order.rows)] if part[0] < part[1]]
    assert rows_in_order(order, parts) == rows_in_order(order, [(0, order.rows)] if order.rows else [])


def test_epoch_order_changes_with_seed_and_epoch() -> None:
    actual = {
        tuple(rows_in_order(order_of([30] * 20, seed=seed, epoch=epoch), [(0, 600)]))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(actual) == 4


def test_epoch_order_never_changes_between_versions() -> None:
    """A state that an earlier version saved continues with the same rows."""
    assert rows_in_order(order_of([3, 2, 4], seed=5, epoch=1, window=4, lanes=2), [(0, 9)]) == EXPECTED


EXPECTED = [(0, 2), (0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3), (2, 0), (2, 1)]


def test_windows_do_not_cross_lanes() -> None:
    order = order_of([10] * 10, window=9, lanes=8)
    edges = {-(-lane * 100 // 8) for lane in range(9)}
    for position in range(100):
        start, stop = order.window(position)
        assert start <= position < stop
        assert not any(start < edge < stop for edge in edges)


@given(layout=LAYOUT, ranges=st.lists(st.integers(0, 30), max_size=6), rounds=st.integers(0, 12))
def test_shares_are_disjoint_and_complete(layout: Layout, ranges: list[int], rounds: int) -> None:
    edges = list(itertools.accumulate(ranges, initial=0))
    all_ranges = [(a * 2, a * 2 + b - a) for a, b in itertools.pairwise(edges)]
    all_values = {row for start, stop in all_ranges for row in range(start, stop)}
    shares = Shares(all_ranges, layout)

    def rows_of(parts: list[tuple[int, int]]) -> list[int]:
        return [row for start, stop in parts for row in range(start, stop)]

    every_reader = list(itertools.product(range(layout.ranks), range(layout.workers)))
    read = [row for rank, worker in every_reader for row in rows_of(shares.ranges(rank, worker))]
    assert len(read) == len(set(read))
    assert set(read) <= all_values
    if layout.last != "drop":
        assert set(read) == all_values
        assert len({shares.batches(rank) for rank in range(layout.ranks)}) == 1 or layout.last == "keep"
    else:
        assert len(read) == shares.batches(0) * layout.ranks * layout.batch_size
    later_value = [row for rank, worker in every_reader for row in rows_of(shares.ranges(rank, worker, rounds))]
    remaining = rows_of(shares.left(rounds))
    assert remaining == sorted(set(remaining))
    assert set(later_value) <= set(remaining)
    assert all_values - set(remaining) == set(read) - set(later_value)


@settings(max_examples=500)
@given(
    rows=ROWS,
    layouts=st.lists(LAYOUT, min_size=1, max_size=4),
    window=st.integers(1, 40),
    lanes=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_epoch_is_exact_over_checkpoints_and_changes_of_ranks(
    rows: list[int], layouts: list[Layout], window: int, lanes: int, seed: int
) -> None:
    """Each run stops after some batches and resumes with another layout; the last run keeps all rows."""
    order, rng = order_of(rows, window=window, lanes=lanes, seed=seed), random.Random(seed)
    legs: tuple[Leg, ...] = ()
    consumed: list[tuple[int, int]] = []
    for number, layout in enumerate(layouts):
        is_last = number == len(layouts) - 1
        if is_last:
            layout = Layout(layout.ranks, layout.workers, layout.batch_size, "keep")
        shares, result = current_shares(order.rows, legs, layout)
        maximum = max(shares.batches(rank) for rank in range(layout.ranks))
        stop = maximum if is_last else rng.randint(result, max(maximum, result))
        if layout.last != "keep" and stop == maximum:
            # padding would repeat rows, and with "drop" the rest of the epoch is not read
            stop = max(maximum - 1, result)
        for rank in range(layout.ranks):
            for worker in range(layout.workers):
                before, after = shares.ranges(rank, worker, result), shares.ranges(rank, worker, stop)
                subset = sum(b - a for a, b in before) - sum(b - a for a, b in after)
                consumed += rows_in_order(order, before)[:subset]
        legs = (*(legs[:-1] if result or (legs and legs[-1].layout == layout) else legs), Leg(layout, stop))
    assert ranges_left(order.rows, legs) == []
    assert sorted(consumed) == [(block, row) for block, count in enumerate(rows) for row in range(count)]


@pytest.mark.parametrize("last", ["drop", "pad"])
def test_ranks_have_equal_numbers_of_batches(last: str) -> None:
    for rows, ranks, size in itertools.product(range(0, 40), (1, 2, 3, 8), (1, 4)):
        shares = Shares([(0, rows)] if rows else [], Layout(ranks, 2, size, last))  # type: ignore[arg-type]
        assert len({shares.batches(rank) for rank in range(ranks)}) == 1
