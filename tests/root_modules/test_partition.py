import datetime
import decimal
import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim import partition as cuts
from brim.partition import column_bytes, fill, fill_all, row_bytes, running, share

_weights = st.lists(st.integers(0, 100), min_size=1, max_size=60)


@given(_weights, st.integers(1, 150), st.one_of(st.none(), st.integers(1, 10)))
def test_runs_are_full_and_within_the_limit(weights: list[int], limit: int, most: int | None) -> None:
    """A run is within the limit unless it is one large item, and the next item would exceed the limit."""
    edges = fill(np.array(weights), limit, most).tolist()
    assert edges[0] == 0
    assert edges[-1] == len(weights)
    for start, end in itertools.pairwise(edges):
        assert end > start
        assert sum(weights[start:end]) <= limit or end == start + 1
        assert most is None or end - start <= most
        full = end == len(weights) or sum(weights[start : end + 1]) > limit or end - start == most
        assert full


@given(_weights, _weights, st.integers(1, 150))
def test_added_items_leave_earlier_runs_alone(weights: list[int], more: list[int], limit: int) -> None:
    """Adding items at the end changes only the last run."""
    before = fill(np.array(weights), limit).tolist()
    after = fill(np.array(weights + more), limit).tolist()
    assert after[: len(before) - 1] == before[:-1]


@given(_weights, st.integers(1, 60))
def test_shared_runs_are_as_many_as_asked_for(weights: list[int], count: int) -> None:
    """share() returns exactly the requested number of runs, and none is empty."""
    count = min(count, len(weights))
    edges = share(np.array(weights), count).tolist()
    assert len(edges) == count + 1
    assert (edges[0], edges[-1]) == (0, len(weights))
    assert all(end > start for start, end in itertools.pairwise(edges))


@pytest.mark.parametrize(
    ("weights", "limit", "maximum", "edges"),
    [
        ([5, 5, 5], 10, None, [0, 2, 3]),  # exactly at the limit
        ([5, 5, 5], 9, None, [0, 1, 2, 3]),
        ([20, 1, 1], 10, None, [0, 1, 3]),  # a larger item forms a run alone
        ([0, 0, 0], 10, 2, [0, 2, 3]),
        ([3, 3, 3, 3], 6, 2, [0, 2, 4]),
        ([], 10, None, [0]),
    ],
)
def test_where_runs_end(weights: list[int], limit: int, maximum: int | None, edges: list[int]) -> None:
    assert fill(np.array(weights, np.int64), limit, maximum).tolist() == edges


def test_several_limits_hold_at_once() -> None:
    """A run ends at the limit that is reached first."""
    files, values = running(np.array([1, 1, 1, 9, 1])), running(np.array([5, 5, 5, 5, 5]))
    assert fill_all([(files, 10), (values, 15)]).tolist() == [0, 3, 5]
    assert fill_all([(files, 2), (values, 15)]).tolist() == [0, 2, 3, 4, 5]
    assert fill_all([(files, 10), (values, 15)], 1).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("weights", "count", "edges"),
    [
        ([1, 1, 1, 1], 2, [0, 2, 4]),
        ([1, 1, 1, 1], 4, [0, 1, 2, 3, 4]),
        ([9, 1, 1, 1], 2, [0, 1, 4]),
        ([1, 1, 1, 9], 2, [0, 3, 4]),
        ([0, 0, 0], 3, [0, 1, 2, 3]),
        ([9, 9, 0, 0, 0], 4, [0, 1, 2, 3, 5]),
        ([2, 2, 2, 2, 2, 2], 3, [0, 2, 4, 6]),
        ([1, 2, 3], 1, [0, 3]),
    ],
)
def test_shares_are_about_equal(weights: list[int], count: int, edges: list[int]) -> None:
    assert share(np.array(weights, np.int64), count).tolist() == edges


STRUCT = pa.struct([("a", pa.string()), ("b", pa.int32())])


@pytest.mark.parametrize(
    ("array", "sizes"),
    [
        (pa.array(["a", None, "ccc", ""]), [5, 4, 7, 4]),
        (pa.array([b"a", None, b"ccc"], pa.large_binary()), [5, 4, 7]),
        (pa.array(["a", None, "c" * 40], pa.string_view()), [5, 4, 44]),
        (pa.array([b"a", b"c" * 40], pa.binary_view()), [5, 44]),
        (pa.array([], pa.string_view()), []),
        (pa.array([1, None, 3], pa.int32()), [4, 4, 4]),
        (pa.array([1, 2], pa.int64()), [8, 8]),
        (pa.array([True, None]), [1, 1]),
        (pa.nulls(2), [16, 16]),
        (pa.array([[1, 2], None, []], pa.list_(pa.int16())), [8, 4, 4]),
        (pa.array([[1, 2], None, []], pa.large_list(pa.int64())), [20, 4, 4]),
        (pa.array([["a", "bb"], None, [], [None]]), [15, 4, 4, 8]),
        (pa.array([[[1], []], [[2, 3]]], pa.list_(pa.list_(pa.int32()))), [16, 16]),
        (pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)), [8, 8]),
        (pa.array([["a", "bb"], ["ccc", None]], pa.list_(pa.string(), 2)), [11, 11]),
        (pa.array([{"a": "x", "b": 1}, None, {"a": None, "b": None}], STRUCT), [9, 8, 8]),
        (pa.array(["a", "bb", None, "a"]).dictionary_encode(), [5, 6, 4, 5]),
        (pa.array([None, None], pa.dictionary(pa.int8(), pa.string())), [4, 4]),
        (pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", None])), [6, 4]),
        (pa.array([decimal.Decimal("1.5")]), [16]),
        (pa.array([datetime.datetime(2020, 1, 1)]), [8]),
    ],
    ids=str,
)
def test_what_values_weigh(array: pa.Array, sizes: list[int]) -> None:
    """Text and lists weigh their lengths plus four bytes each, also in slices of a larger array."""
    assert column_bytes(pa.chunked_array([array])).tolist() == sizes
    if len(array) > 1:
        assert column_bytes(pa.chunked_array([array.slice(1), array.slice(0, 1)])).tolist() == [*sizes[1:], sizes[0]]
    table = pa.table({"x": array, "y": range(len(array))})
    assert row_bytes(table).tolist() == [size + 8 for size in sizes]


def test_nothing_weighs_nothing() -> None:
    assert column_bytes(pa.chunked_array([], pa.string())).tolist() == []
    assert row_bytes(pa.table({})).tolist() == []
    assert running(np.array([3, 4])).tolist() == [0, 3, 7]
    assert running(np.zeros(0, np.int64)).dtype == np.int64


def test_the_bounds_are_those_of_the_format() -> None:
    """The limits are part of the data format: a change would cut every dataset into other shards."""
    assert (cuts.GROUP_VALUE_BYTES, cuts.HELD_VALUE_BYTES) == (32_000_000, 16_000_000)


def test_what_arrow_data_takes() -> None:
    """Sizes equal those of pyarrow; string views work too, which old versions of pyarrow cannot measure."""
    table = pa.table({"a": pa.array([1, 2, 3], pa.int64()), "b": ["x", "yy", "zzz"]})
    assert cuts.arrow_bytes(table) == table.nbytes
    assert cuts.arrow_bytes(table["a"]) == 24

    class Old:
        @property
        def nbytes(self) -> int:
            raise pa.ArrowTypeError("views")

        def get_total_buffer_size(self) -> int:
            return 7

    assert cuts.arrow_bytes(Old()) == 7  # type: ignore[arg-type]
