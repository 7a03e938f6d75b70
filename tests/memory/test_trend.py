from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.memory.leaks import classify_trend, find_floors
from brim.memory.prediction import Point, theil_sen_slope
from brim.monitor.text_formats import sparkline

MB = 1e6


def curve(seconds: int, value: object, every: float = 1.0) -> list[Point]:
    return [(i * every, value(i * every)) for i in range(int(seconds / every))]  # type: ignore[operator]


FLAT = curve(600, lambda t: 50 * MB)


def test_the_slope_ignores_spikes() -> None:
    """The slope is that of the other points, even if a third of the points are outliers."""
    noise = random.Random(1)
    points = [(t, 3 * MB * t if t % 3 else noise.uniform(0, 1e9)) for t in range(60)]
    assert abs(theil_sen_slope(points) - 3 * MB) < 0.5 * MB


def test_floors_are_the_lowest_of_equal_spans() -> None:
    """The lowest value of each of twelve equal spans is returned in order."""
    points = curve(120, lambda t: 10 + t % 10)
    low = find_floors(points, 12)
    assert [size for _, size in low] == [10] * 12
    assert low == sorted(low)


def test_a_leak_is_called_one() -> None:
    """A rising floor under a sawtooth that does not level off is classified as a leak."""
    trend = classify_trend(curve(600, lambda t: 100 * MB + 0.5 * MB * t + (t % 20) * 3 * MB), FLAT)
    assert trend.verdict == "leak"
    assert 25 * MB < trend.floor_bytes_per_min < 35 * MB


def test_the_exit_does_not_hide_a_leak() -> None:
    """A program that frees all memory at its exit is still classified as a leak."""
    leak = curve(600, lambda t: 100 * MB + 0.5 * MB * t)
    assert classify_trend([*leak, (600.0, 0.0)], FLAT).verdict == "leak"
    assert classify_trend([*leak, (600.0, 60 * MB), (600.1, 0.0)], FLAT).verdict == "leak"
    mapped = curve(600, lambda t: t * 10 * MB)
    assert classify_trend(FLAT, [*mapped, (600.0, 0.0)]).verdict == "mapping"


def test_a_memory_map_is_called_one() -> None:
    """Growing file pages with constant memory are classified as a harmless memory map."""
    trend = classify_trend(FLAT, curve(600, lambda t: t * 10 * MB))
    assert trend.verdict == "mapping"
    assert "no leak" in trend.text


@pytest.mark.parametrize("every_s", [5, 10, 20])
@pytest.mark.parametrize("seconds", [72, 120, 300])
def test_constant_staircase_is_a_leak(every_s: int, seconds: int) -> None:
    """110 MB more at regular intervals do not level off and are classified as a leak."""
    assert classify_trend(curve(seconds, lambda t: 110 * MB * (1 + t // every_s), 0.2), []).verdict == "leak"


def test_loading_is_no_leak() -> None:
    """Memory that rises at the beginning and then stays constant is steady."""
    assert classify_trend(curve(600, lambda t: min(t * 20, 900) * MB), FLAT).verdict == "steady"


def test_levelling_off_is_no_leak() -> None:
    """A cache whose growth slows down is not a leak."""
    assert classify_trend(curve(600, lambda t: 100 * MB + 900 * MB * (1 - 2 ** (-t / 100))), FLAT).verdict == "growing"


def test_a_sawtooth_is_steady() -> None:
    """Sawteeth on a constant floor come from the garbage collector and are steady."""
    assert classify_trend(curve(600, lambda t: 100 * MB + (t % 30) * 10 * MB), FLAT).verdict == "steady"


def test_less_than_a_minute_says_nothing() -> None:
    """Less than a minute of samples gives no verdict, because memory always grows during loading."""
    assert classify_trend(curve(30, lambda t: t * 10 * MB), FLAT).verdict == "short"
    assert classify_trend([], []).verdict == "short"


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e12)), max_size=50), st.integers(1, 80))
def test_a_sparkline_has_its_width(points: list[Point], width: int) -> None:
    """For all points, the sparkline has the requested width and contains the highest bar."""
    points.sort()
    line = sparkline(points, width)
    assert len(line) == (width if points else 0)
    if any(size > 1 for _, size in points):
        assert "█" in line
    assert classify_trend(points, points).verdict
