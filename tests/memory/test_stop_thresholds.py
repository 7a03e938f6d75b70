"""Warning, stop and kill thresholds.

The tests set clock and readings by hand: nothing is allocated and nothing sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.errors import InputError
from brim.memory.thresholds import Alarm, Guard, Level, Threshold, check_order, parse_level, standard_thresholds
from brim.sizes import format_duration

LIMIT = 1_000_000_000
MB = 1_000_000


def guard(**levels: str) -> Guard:
    selection = {"alert": "80%", "stop": "90%", "kill": "97%", **levels}
    return Guard(LIMIT, standard_thresholds(*(parse_level(selection[kind]) for kind in ("alert", "stop", "kill"))))


def feed(watched: Guard, *steps: tuple[float, float], every: float = 0.5) -> list[tuple[float, str]]:
    """Hold each (fraction of the limit, seconds) in sequence; return pairs of time and action."""
    message, now = [], 0.0
    for fraction, seconds in steps:
        end = now + seconds
        while now < end:
            message += [(now, alarm.kind) for alarm in watched.observe(now, int(fraction * LIMIT))]
            now += every
    return message


def kinds(messages: list[tuple[float, str]]) -> list[str]:
    return [kind for _, kind in messages]


def test_below_the_lines_nothing_is_said() -> None:
    """79 % of the limit for an hour causes no action."""
    assert feed(guard(), (0.79, 3600), every=5) == []


def test_a_warning_takes_ten_seconds() -> None:
    """80 % for 9 s is a spike and for 10 s a warning."""
    assert feed(guard(), (0.82, 9.5), (0.5, 5)) == []
    assert feed(guard(), (0.82, 11)) == [(10.0, "alert")]


def test_a_crossing_that_comes_again_is_a_warning() -> None:
    """A short dip does not restart the ten seconds; spikes that are far apart are forgotten."""
    assert feed(guard(), (0.82, 9.5), (0.5, 5), (0.82, 9.5)) == [(15.5, "alert")]
    assert feed(guard(), *[(0.82, 0.5), (0.5, 30)] * 20) == []


def test_a_stop_takes_three_seconds_and_a_kill_none() -> None:
    """90 % stops after 3 s; 97 % kills immediately."""
    assert feed(guard(), (0.92, 4)) == [(3.0, "stop")]
    assert feed(guard(), (0.1, 1), (0.98, 0.5)) == [(1.0, "kill")]


def test_a_warning_is_repeated_every_five_minutes() -> None:
    """A warning is repeated every five minutes while the condition lasts, and not more often."""
    message = feed(guard(), (0.85, 700))
    assert kinds(message) == ["alert"] * 3
    assert [round(when) for when, _ in message] == [10, 310, 610]


def test_wavering_around_a_line_is_one_warning() -> None:
    """However often memory crosses the threshold, the warning is repeated after five minutes and not earlier."""
    wavering = [(0.81, 12), (0.77, 2)] * 8
    assert kinds(feed(guard(), *wavering)) == ["alert"]
    assert kinds(feed(guard(), *[(0.81, 12), (0.74, 2)] * 25)) == ["alert", "alert"]


def test_a_line_without_delay_is_said_at_every_crossing() -> None:
    """A warning without delay is repeated after memory fell by the hysteresis, and not after a smaller dip."""
    watched = Guard(LIMIT, [Threshold("hard", Level(0.9), repeat_s=100.0)], horizon_s=0.0, lead_s=0.0)
    assert feed(watched, (0.95, 2), (0.88, 2), (0.95, 2), (0.8, 2), (0.95, 2)) == [(0.0, "hard"), (8.0, "hard")]


def test_a_stop_is_said_once() -> None:
    """The stop action is reported once; repeating it would not stop a program sooner."""
    assert kinds(feed(guard(alert="off"), (0.92, 1000))) == ["stop"]


def test_levels_can_be_off_or_absolute() -> None:
    """A threshold is a fraction, a size, or off."""
    assert feed(guard(alert="off", stop="off", kill="off"), (0.99, 30)) == []
    assert kinds(feed(guard(alert="400MB"), (0.45, 11))) == ["alert"]
    assert parse_level("40 GB") == Level(bytes=40 * 10**9)


@pytest.mark.parametrize("text", ["0%", "101%", "much", "-5%", ""])
def test_a_wrong_level_is_said(text: str) -> None:
    """An invalid threshold is an input error."""
    with pytest.raises(InputError):
        parse_level(text)


def test_lines_out_of_order_are_refused() -> None:
    """A stop threshold above the kill threshold is refused, because it would never be reached."""
    with pytest.raises(InputError, match="above the kill"):
        check_order(standard_thresholds(Level(0.8), Level(0.98), Level(0.97)), LIMIT)


def exhaustion(points: list[tuple[float, float]]) -> list[Alarm]:
    watched = Guard(LIMIT, [])
    return [alarm for now, used in points for alarm in watched.observe(now, int(used))]


def test_steady_growth_is_seen_before_the_line_is_near() -> None:
    """Growth of 1 MB/s towards 1 GB is predicted ten minutes before the limit, with the right time."""
    first = exhaustion([(t / 2, 100 * MB + t / 2 * MB) for t in range(0, 1000)])[0]
    assert first.kind == "exhaustion"
    assert first.used_bytes < 0.5 * LIMIT
    assert first.left_s == pytest.approx((LIMIT - first.used_bytes) / MB, rel=0.05)


def test_a_sawtooth_is_judged_by_its_floors() -> None:
    """Sawteeth of a garbage collector are not growth; the same teeth on a rising floor are."""
    teeth = [(t / 2, 300 * MB + (t % 40) * 5 * MB) for t in range(0, 600)]
    assert exhaustion(teeth) == []
    rising = [(position, used + position * MB) for position, used in teeth]
    assert exhaustion(rising)


def test_teeth_of_minutes_are_known_after_the_first() -> None:
    """An epoch that fills memory and frees it is predicted at most once, not every time."""
    teeth = [(t / 2, 300 * MB + (t % 360) * 1.5 * MB) for t in range(0, 4000)]
    assert len(exhaustion(teeth)) <= 1


def test_a_step_is_no_growth() -> None:
    """Loading a model is a step: nothing is predicted after it has ended."""
    assert exhaustion([(t / 2, (100 if t < 20 else 700) * MB) for t in range(0, 600)]) == []


def test_slow_growth_is_noise() -> None:
    """Growth of less than 2 % of the limit in a minute is too small for a prediction."""
    assert exhaustion([(t / 2, 900 * MB + t * 0.05 * MB) for t in range(0, 600)]) == []


@given(st.lists(st.floats(0, 1.2), max_size=200), st.floats(0.02, 5))
def test_no_reading_is_too_strange(shares: list[float], every: float) -> None:
    """For all readings, a kill is requested if and only if one exceeded the kill threshold, and nothing raises."""
    watched = guard()
    messages = [a.kind for i, fraction in enumerate(shares) for a in watched.observe(i * every, int(fraction * LIMIT))]
    assert ("kill" in messages) == any(int(part * LIMIT) >= 0.97 * LIMIT for part in shares)


def test_a_gap_in_time_does_not_count_as_time_above() -> None:
    """After the machine was suspended, a single reading above the threshold does not count as ten seconds above it."""
    watched = Guard(LIMIT, [Threshold("alert", Level(0.8), after_s=10.0)])
    assert watched.observe(0.0, 100) == []
    assert watched.observe(30_000.0, int(0.85 * LIMIT)) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.04, "0 s"), (0.3, "0.3 s"), (5, "5 s"), (45, "45 s"), (720, "12 min"), (12000, "3 h 20 min")),
        *((7200, "2 h"), (187200, "2 d 4 h"), (8 * 86400, "8 d"), (2.6 * 365.25 * 86400, "2.6 years")),
    ],
)
def test_spans_of_time(seconds: float, text: str) -> None:
    """Durations are formatted with at most two units."""
    assert format_duration(seconds) == text


def stop_at(shares: Callable[[float], float], seconds: float, lead_s: float = 30.0) -> tuple[float, Alarm] | None:
    """Return the first stop or kill alarm and its time, or None."""
    lines = standard_thresholds(Level(0.8), Level(0.9), Level(0.97))
    watched, now = Guard(LIMIT, lines, lead_s=lead_s), 0.0
    while now < seconds:
        for alarm in watched.observe(now, int(shares(now) * LIMIT)):
            if alarm.kind in ("stop", "kill"):
                return now, alarm
        now += 0.1
    return None


@pytest.mark.parametrize("lead_s", [5.0, 30.0, 120.0])
def test_a_steady_climb_is_stopped_a_lead_before_the_kill_line(lead_s: float) -> None:
    """A steady climb is stopped the configured lead before the kill threshold, and not much earlier."""
    rate = 0.37 / (4 * lead_s)
    kill_s = (0.97 - 0.2) / rate
    actual = stop_at(lambda t: 0.2 + rate * t, 2 * kill_s, lead_s)
    assert actual is not None
    assert lead_s <= kill_s - actual[0] <= 1.3 * lead_s
    assert actual[1].kind == "stop"


def test_teeth_over_a_leak_are_stopped_in_time() -> None:
    """Sawteeth of 20 % of the limit over a leak of 0.1 %/s are stopped in time.

    Every dip is below the thresholds, so the peaks decide.
    """
    actual = stop_at(lambda t: 0.3 + 0.001 * t + 0.2 * ((t % 7) / 7), 1000)
    kill_s = (0.97 - 0.5) / 0.001
    assert actual is not None
    assert 30 <= kill_s - actual[0] <= 120


def test_a_rush_is_stopped_before_it_is_killed() -> None:
    """Growth of 7.5 % of the limit per second is stopped more than one second before the kill threshold."""
    actual = stop_at(lambda t: 0.1 + 0.075 * t, 30)
    assert actual is not None
    assert actual[1].kind == "stop"
    assert (0.97 - 0.1) / 0.075 - actual[0] > 1.0


@pytest.mark.parametrize("step_s", [0.5, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("climb_s", [10, 15, 20, 40])
def test_leak_in_steps_is_stopped_a_second_before_the_kill(step_s: float, climb_s: float) -> None:
    """A leak in steps, as in a training loop, is stopped at least one second before the kill threshold."""
    rate = 0.37 / climb_s
    actual = stop_at(lambda t: 0.2 + rate * step_s * (t // step_s), 4 * climb_s)
    kill_s = next(n * step_s for n in range(10_000) if 0.2 + rate * step_s * n >= 0.97)
    assert actual is not None
    assert actual[1].kind == "stop"
    assert kill_s - actual[0] >= 1.0


def test_leak_that_doubles_is_stopped_a_second_before_the_kill() -> None:
    """A leak whose growth increases by 12 % every second is stopped one second before the kill threshold."""
    actual = stop_at(lambda t: 0.05 * 1.12 ** (t // 1), 60)
    assert actual is not None
    assert actual[1].kind == "stop"
    assert next(n for n in range(100) if 0.05 * 1.12**n >= 0.97) - actual[0] >= 1.0


@pytest.mark.parametrize("growth", [1.08, 1.15, 1.2])
def test_steps_that_grow_are_stopped_a_second_before_the_kill(growth: float) -> None:
    actual = stop_at(lambda t: 0.05 * growth ** (t // 1), 60)
    assert actual is not None
    assert actual[1].kind == "stop"
    assert next(n for n in range(100) if 0.05 * growth**n >= 0.97) - actual[0] >= 1.0


@pytest.mark.parametrize("step_s", [0.5, 1.0])
def test_steps_of_a_fast_leak_are_stopped_a_second_before_the_kill(step_s: float) -> None:
    """A leak from 45 % to the kill threshold within about 7 s needs only five small steps above 80 % for a stop."""
    rate = 0.37 / 5
    actual = stop_at(lambda t: 0.45 + rate * step_s * (t // step_s), 30)
    kill_s = next(n * step_s for n in range(1000) if 0.45 + rate * step_s * n >= 0.97)
    assert actual is not None
    assert actual[1].kind == "stop"
    assert kill_s - actual[0] >= 1.0


@pytest.mark.parametrize("seed", range(4))
def test_flat_noise_is_neither_stopped_nor_said_to_run_out(seed: int) -> None:
    """Random values between 65 and 80 % every 0 to 10 s cause neither a stop nor a prediction within ten minutes."""
    random, values = Random(seed), list[float]()
    while len(values) < 6000:
        values += [random.uniform(0.65, 0.8)] * random.randint(1, 100)
    watched = Guard(LIMIT, standard_thresholds(Level(0.8), Level(0.9), Level(0.97)))
    messages = [alarm.kind for n in range(6000) for alarm in watched.observe(n / 10, int(values[n] * LIMIT))]
    assert messages == []


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("top", [0.7, 0.82, 0.89])
def test_loading_a_model_of_some_shards_is_not_stopped(count: int, top: float) -> None:
    """Equal blocks, one every two seconds, followed by a constant level, do not cause a stop."""
    assert stop_at(lambda t: 0.02 + (top - 0.02) * min(t // 2, count) / count, 200) is None


@pytest.mark.parametrize("top", [0.81, 0.84, 0.87, 0.895])
def test_ramp_that_ends_below_the_stop_line_is_not_stopped(top: float) -> None:
    assert stop_at(lambda t: 0.1 + (top - 0.1) * min(t / 25, 1), 200) is None


@pytest.mark.parametrize("climb_s", [3, 20, 60, 200])
def test_loading_that_ends_is_not_stopped(climb_s: float) -> None:
    """A climb of any speed to 84 %, followed by a constant level, does not cause a stop."""
    assert stop_at(lambda t: 0.1 + 0.74 * min(t / climb_s, 1), climb_s + 600) is None


def test_without_a_lead_only_the_line_stops() -> None:
    """With a lead of 0 nothing is predicted and only the threshold stops."""
    actual = stop_at(lambda t: 0.2 + 0.001 * t, 1000, lead_s=0.0)
    assert actual is not None
    assert actual[1].used_bytes >= 0.9 * LIMIT


def test_a_forecast_in_words() -> None:
    """A prediction states the rate, the time of day at which the limit is reached, and the time left."""
    noon = time.mktime((2026, 5, 31, 14, 26, 0, 0, 0, -1))
    alarm = Alarm("alert", 800 * MB, LIMIT, 800 * MB, left_s=360.0, bytes_per_s=LIMIT * 0.2 / 360)
    assert alarm.outlook(noon) == "growing by 33.3 MB per minute: at this rate the limit is reached at 14:32, in 6 min"
    assert Alarm("alert", 800 * MB, LIMIT, 800 * MB).outlook(noon) == ""
