import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from brim.cuts import fill, share

_weights = st.lists(st.integers(0, 100), min_size=1, max_size=60)


@given(_weights, st.integers(1, 150), st.one_of(st.none(), st.integers(1, 10)))
def test_runs_are_full_and_within_the_limit(weights: list[int], limit: int, most: int | None) -> None:
    """A run is within the limit unless it is one heavy item, and could not take the next item."""
    cuts = fill(np.array(weights), limit, most).tolist()
    assert cuts[0] == 0
    assert cuts[-1] == len(weights)
    for start, end in itertools.pairwise(cuts):
        assert end > start
        assert sum(weights[start:end]) <= limit or end == start + 1
        assert most is None or end - start <= most
        full = end == len(weights) or sum(weights[start : end + 1]) > limit or end - start == most
        assert full


@given(_weights, _weights, st.integers(1, 150))
def test_added_items_leave_earlier_runs_alone(weights: list[int], more: list[int], limit: int) -> None:
    """All runs but the last are the same after items were added at the end."""
    before = fill(np.array(weights), limit).tolist()
    after = fill(np.array(weights + more), limit).tolist()
    assert after[: len(before) - 1] == before[:-1]


@given(_weights, st.integers(1, 60))
def test_shared_runs_are_as_many_as_asked_for(weights: list[int], count: int) -> None:
    """share() makes exactly that many runs and none is empty."""
    count = min(count, len(weights))
    cuts = share(np.array(weights), count).tolist()
    assert len(cuts) == count + 1
    assert (cuts[0], cuts[-1]) == (0, len(weights))
    assert all(end > start for start, end in itertools.pairwise(cuts))
