from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from brim.memory.guard import Point, floors, judge, slope, sparkline

MB = 1e6


def curve(seconds: int, value: object, every: float = 1.0) -> list[Point]:
    return [(i * every, value(i * every)) for i in range(int(seconds / every))]  # type: ignore[operator]


FLAT = curve(600, lambda t: 50 * MB)


def test_the_slope_ignores_spikes() -> None:
    """A third of the points may lie anywhere; the slope is that of the others."""
    noise = random.Random(1)
    points = [(t, 3 * MB * t if t % 3 else noise.uniform(0, 1e9)) for t in range(60)]
    assert abs(slope(points) - 3 * MB) < 0.5 * MB


def test_floors_are_the_lowest_of_equal_spans() -> None:
    """Twelve spans, twelve lows, in order."""
    points = curve(120, lambda t: 10 + t % 10)
    low = floors(points, 12)
    assert [size for _, size in low] == [10] * 12
    assert low == sorted(low)


def test_a_leak_is_called_one() -> None:
    """A floor that rises under a sawtooth and does not level off is a leak's shape."""
    trend = judge(curve(600, lambda t: 100 * MB + 0.5 * MB * t + (t % 20) * 3 * MB), FLAT)
    assert trend.verdict == "leak"
    assert 25 * MB < trend.floor_bytes_per_min < 35 * MB


def test_the_exit_does_not_hide_a_leak() -> None:
    """A program that is seen while it gives everything back at its end has leaked all the same."""
    leak = curve(600, lambda t: 100 * MB + 0.5 * MB * t)
    assert judge([*leak, (600.0, 0.0)], FLAT).verdict == "leak"
    assert judge([*leak, (600.0, 60 * MB), (600.1, 0.0)], FLAT).verdict == "leak"
    mapped = curve(600, lambda t: t * 10 * MB)
    assert judge(FLAT, [*mapped, (600.0, 0.0)]).verdict == "mapping"


def test_a_memory_map_is_called_one() -> None:
    """File pages that grow while memory does not are harmless, and said to be."""
    trend = judge(FLAT, curve(600, lambda t: t * 10 * MB))
    assert trend.verdict == "mapping"
    assert "no leak" in trend.text


def test_loading_is_no_leak() -> None:
    """What rises at the beginning and then stays is steady."""
    assert judge(curve(600, lambda t: min(t * 20, 900) * MB), FLAT).verdict == "steady"


def test_levelling_off_is_no_leak() -> None:
    """A cache that fills up grows ever more slowly."""
    assert judge(curve(600, lambda t: 100 * MB + 900 * MB * (1 - 2 ** (-t / 100))), FLAT).verdict == "growing"


def test_a_sawtooth_is_steady() -> None:
    """Teeth on a level floor are the garbage collector's."""
    assert judge(curve(600, lambda t: 100 * MB + (t % 30) * 10 * MB), FLAT).verdict == "steady"


def test_less_than_a_minute_says_nothing() -> None:
    """Everything grows while it loads."""
    assert judge(curve(30, lambda t: t * 10 * MB), FLAT).verdict == "short"
    assert judge([], []).verdict == "short"


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e12)), max_size=50), st.integers(1, 80))
def test_a_sparkline_has_its_width(points: list[Point], width: int) -> None:
    """Whatever the points, the line is as wide as asked and has its highest bar."""
    points.sort()
    line = sparkline(points, width)
    assert len(line) == (width if points else 0)
    if any(size > 1 for _, size in points):
        assert "█" in line
    assert judge(points, points).verdict
