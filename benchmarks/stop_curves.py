"""Curves of memory over time for benchmarks/stop.py: fractions of a limit, four per second.

Each is made by one generator and one seed. `reaching` curves end at the limit, `levelling` ones stay at or below 85 %,
or below the stop threshold if their name contains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

STEP_S = 0.25
HIGHEST = 0.85
Shape = Callable[[Random], list[float]]


@dataclass(frozen=True)
class Curve:
    kind: str
    seed: int
    values: list[float]
    stepped: bool = False  # values are held until the next one; otherwise they are interpolated

    def at(self, t: float) -> float:
        destination = t / STEP_S
        number = int(destination)
        if number + 1 >= len(self.values):
            return self.values[-1]
        if self.stepped:
            return self.values[number]
        part = destination - number
        return self.values[number] * (1 - part) + self.values[number + 1] * part

    @property
    def seconds(self) -> float:
        return len(self.values) * STEP_S

    def first_at(self, level: float) -> float | None:
        return next((number * STEP_S for number, value in enumerate(self.values) if value >= level), None)

    def climb_s(self, start: float, end: float) -> float | None:
        """Return the seconds of the last climb from `start` to the first reading at `end`."""
        hit = next((number for number, value in enumerate(self.values) if value >= end), None)
        if hit is None:
            return None
        low = next((number for number in range(hit, -1, -1) if self.values[number] < start), 0)
        return (hit - low) * STEP_S


def _grow(random: Random, rate: Callable[[float], float], base: float, most_s: float = 5400.0) -> list[float]:
    values, level = [], base
    while level < 1.03 and len(values) * STEP_S < most_s:
        values.append(level)
        level += rate(level) * STEP_S
    return [*_load(random, base), *values, level]


def _load(random: Random, base: float) -> list[float]:
    """Simulate the start of a program: up to its base in a few seconds, then constant for a while."""
    rise, remainder = random.uniform(2, 20), random.uniform(5, 60)
    steps = int(rise / STEP_S)
    return [0.02 + (base - 0.02) * number / steps for number in range(steps)] + [base] * int(remainder / STEP_S)


def _slow(random: Random) -> float:
    """Return a rate at which memory takes 95 s to half an hour from 60 % to the limit."""
    return 0.4 / math.exp(random.uniform(math.log(95), math.log(1800)))


def _base(random: Random) -> float:
    return random.uniform(0.1, 0.5)


def _jitter(random: Random, values: list[float], size: float) -> list[float]:
    return [max(value + random.gauss(0, size), 0.0) for value in values]


def steady(random: Random) -> list[float]:
    rate = _slow(random)
    return _jitter(random, _grow(random, lambda _: rate, _base(random)), 0.0005)


def accelerating(random: Random) -> list[float]:
    """Grow exponentially, or with a power of time between 1.3 and 2.5 from a point below 60 %."""
    base = _base(random)
    if random.random() < 0.5:
        rate = math.log(1 / 0.6) / math.exp(random.uniform(math.log(100), math.log(1200)))
        values = _grow(random, lambda level: rate * level, base)
    else:
        power, last_s = random.uniform(1.3, 2.5), math.exp(random.uniform(math.log(200), math.log(1500)))
        count = int(last_s / STEP_S)
        climb = [base + (1.03 - base) * (number / count) ** power for number in range(count + 1)]
        values = [*_load(random, base), *climb]
    return _jitter(random, values, 0.0005)


def stepwise(random: Random) -> list[float]:
    values, level, rate = _load(random, base := _base(random)), base, _slow(random)
    size = random.uniform(0.01, 0.05)
    while level < 1.03:
        values += [level] * max(int(size / rate * random.uniform(0.7, 1.3) / STEP_S), 1)
        level += size * random.uniform(0.7, 1.3)
    return _jitter(random, [*values, level], 0.0005)


def _teeth(
    random: Random, period: tuple[float, float], height: tuple[float, float], rate: float, top: float
) -> list[float]:
    base, high, length = _base(random), random.uniform(*height), random.uniform(*period)
    if not rate:
        base = top - high
    values = _load(random, base)
    wobble = random.uniform(0, 0.05)
    since = 0.0
    while (values[-1] < 1.03 if rate else since < 1500) and len(values) * STEP_S < 7200:
        this, tall = length * random.uniform(1 - wobble, 1 + wobble), high * random.uniform(1 - wobble, 1)
        count = max(int(this / STEP_S), 2)
        for number in range(count):
            values.append(base + rate * since + tall * number / (count - 1))
            since += STEP_S
            if values[-1] >= 1.03:
                break
    return values


def short_teeth(random: Random) -> list[float]:
    return _jitter(random, _teeth(random, (2, 20), (0.05, 0.25), _slow(random), 0), 0.0005)


def long_teeth(random: Random) -> list[float]:
    return _jitter(random, _teeth(random, (60, 300), (0.1, 0.3), _slow(random) / 3, 0), 0.0005)


def _bursts(random: Random, values: list[float], tallest: float) -> list[float]:
    """Add short peaks above the curve at irregular times."""
    values, position = list(values), 0.0
    pause = random.uniform(5, 60)
    while (position := position + random.expovariate(1 / pause)) < len(values) * STEP_S:
        tall, start = random.uniform(0.3, 1) * tallest, int(position / STEP_S)
        end = min(start + int(random.uniform(1, 10) / STEP_S), len(values))
        for number in range(start, end):
            values[number] += tall
        position = end * STEP_S
    return values


def bursts(random: Random) -> list[float]:
    rate = _slow(random)
    return _bursts(
        random, _jitter(random, _grow(random, lambda _: rate, _base(random)), 0.001), random.uniform(0.03, 0.15)
    )


def _batches(random: Random, rate: float, top: float, seconds: float) -> list[float]:
    """Allocate and free memory in every batch; a collection every few batches frees the rest."""
    base, work, litter = _base(random), random.uniform(0.02, 0.08), random.uniform(0.002, 0.01)
    batch_s, every = random.uniform(0.5, 5), random.randint(5, 40)
    if not rate:
        base = top - work - litter * every
    values, since, batches = _load(random, base), 0.0, 0
    while (values[-1] < 1.03 if rate else since < seconds) and len(values) * STEP_S < 7200:
        count = max(int(batch_s * random.uniform(0.8, 1.2) / STEP_S), 2)
        for number in range(count):
            retained = work * min(2 * number / count, 1) + litter * (batches % every)
            values.append(base + rate * since + retained)
            since += STEP_S
        batches += 1
    return values


def batches_with_gc(random: Random) -> list[float]:
    return _jitter(random, _batches(random, _slow(random), 0, 0), 0.0005)


def noise(random: Random) -> list[float]:
    rate = _slow(random)
    return _jitter(random, _grow(random, lambda _: rate, _base(random)), random.uniform(0.003, 0.02))


def load_then_leak(random: Random) -> list[float]:
    """Climb quickly to at most 75 %, pause, then leak."""
    rate = _slow(random)
    return _jitter(random, _grow(random, lambda _: rate, random.uniform(0.4, 0.75)), 0.001)


def _top(random: Random) -> float:
    return random.uniform(0.4, HIGHEST)


def _flat(random: Random, top: float, climb: Callable[[float], float], climb_s: float) -> list[float]:
    """Evaluate `climb` from 0 to 1 over `climb_s`, then stay constant."""
    base = random.uniform(0.02, 0.3) * top
    count = max(int(climb_s / STEP_S), 1)
    rise = [base + (top - base) * climb(number / count) for number in range(count)]
    return rise + [top] * int(random.uniform(300, 900) / STEP_S)


def load_then_flat(random: Random) -> list[float]:
    climb_s = math.exp(random.uniform(math.log(2), math.log(300)))
    return _jitter(random, _flat(random, _top(random), lambda part: part, climb_s), 0.001)


def cache_levels_off(random: Random) -> list[float]:
    top, tau = _top(random), math.exp(random.uniform(math.log(15), math.log(600)))
    seconds = min(6 * tau, 3000.0)
    if random.random() < 0.5:
        values = [top * (1 - math.exp(-number * STEP_S / tau)) for number in range(int(seconds / STEP_S))]
    else:  # new entries become rare, so growth is logarithmic in time
        scale = top / math.log1p(seconds / tau)
        values = [scale * math.log1p(number * STEP_S / tau) for number in range(int(seconds / STEP_S))]
    return _jitter(random, values, 0.001)


def s_curve(random: Random) -> list[float]:
    """Climb slowly, fast, then slowly again, like a program that reads a dataset."""
    climb_s = math.exp(random.uniform(math.log(30), math.log(900)))
    return _jitter(random, _flat(random, _top(random), lambda part: part * part * (3 - 2 * part), climb_s), 0.001)


def steps_then_flat(random: Random) -> list[float]:
    top, base, count = _top(random), random.uniform(0.1, 0.3), random.randint(2, 10)
    pause = math.exp(random.uniform(math.log(3), math.log(120)))
    values = []
    for number in range(count):
        level = base + (top - base) * number / (count - 1)
        values += [level] * int(pause * random.uniform(0.7, 1.3) / STEP_S)
    return _jitter(random, values + [top] * int(600 / STEP_S), 0.001)


def flat_short_teeth(random: Random) -> list[float]:
    return _jitter(random, _teeth(random, (2, 20), (0.05, 0.35), 0.0, _top(random)), 0.001)


def flat_long_teeth(random: Random) -> list[float]:
    return _jitter(random, _teeth(random, (60, 300), (0.1, 0.38), 0.0, _top(random)), 0.001)


def flat_bursts(random: Random) -> list[float]:
    tall, top = random.uniform(0.03, 0.3), _top(random)
    values = _load(random, top - tall) + [top - tall] * int(1500 / STEP_S)
    return _bursts(random, _jitter(random, values, 0.001), tall)


def flat_batches_with_gc(random: Random) -> list[float]:
    return _jitter(random, _batches(random, 0.0, max(_top(random), 0.6), 1500.0), 0.0005)


def flat_noise(random: Random) -> list[float]:
    top, size = _top(random), random.uniform(0.003, 0.02)
    values = _jitter(random, _load(random, top) + [top] * int(1500 / STEP_S), size)
    return [min(value, HIGHEST) for value in values]


def page_cache(random: Random) -> list[float]:
    """File pages fill the machine but do not count: the counted memory stays constant with small changes."""
    top = _top(random)
    stir = random.uniform(0.001, 0.01)
    values = _load(random, top - stir) + [top - stir] * int(1500 / STEP_S)
    return [value + stir * math.sin(number / 40) * random.random() for number, value in enumerate(values)]


def blocks_then_flat(random: Random) -> list[float]:
    """Load a model of two to eight shards, to between 60 % and the stop threshold."""
    count, top, base = random.randint(2, 8), random.uniform(0.6, 0.9), random.uniform(0.01, 0.05)
    pause = math.exp(random.uniform(math.log(0.5), math.log(20)))
    values = [base] * 8
    for number in range(1, count + 1):
        values += [base + (top - base) * number / count] * max(int(pause / STEP_S), 1)
    return values + [top] * int(300 / STEP_S)


def ramp_to_below_the_stop(random: Random) -> list[float]:
    """Climb to between 80 and 90 %."""
    climb_s = math.exp(random.uniform(math.log(3), math.log(300)))
    return _jitter(random, _flat(random, random.uniform(0.8, 0.895), lambda part: part, climb_s), 0.0005)


def blocks_above_the_stop(random: Random) -> list[float]:
    """Load a model of two to eight shards, to between 90 and 95 %, above the stop threshold."""
    count, top, base = random.randint(2, 8), random.uniform(0.9, 0.95), random.uniform(0.01, 0.05)
    pause = math.exp(random.uniform(math.log(0.5), math.log(20)))
    values = [base] * 8
    for number in range(1, count + 1):
        values += [base + (top - base) * number / count] * max(int(pause / STEP_S), 1)
    return values + [top] * int(300 / STEP_S)


def _dwelling_noise(random: Random, low: float, high: float, longest_s: float) -> list[float]:
    """Return values between `low` and `high` without growth, each held for up to `longest_s`."""
    values: list[float] = []
    while len(values) * STEP_S < 1800:
        values += [random.uniform(low, high)] * max(int(random.uniform(0, longest_s) / STEP_S), 1)
    return values


def flat_noise_60_to_80(random: Random) -> list[float]:
    return _dwelling_noise(random, 0.6, 0.8, 20)


def flat_noise_65_to_80(random: Random) -> list[float]:
    return _dwelling_noise(random, 0.65, 0.8, 10)


def flat_noise_70_to_80(random: Random) -> list[float]:
    return _dwelling_noise(random, 0.7, 0.8, 10)


def flat_noise_50_to_85(random: Random) -> list[float]:
    """Return 300 MB plus 0 to 200 MB of a 600 MB limit, with a new value every 0 to 1.5 s."""
    return _dwelling_noise(random, 0.5, 0.85, 1.5)


def stepped_climb(step_s: float, seconds: float) -> Shape:
    """Climb from 60 % to the kill threshold in this many seconds, in jumps with constant parts between them."""

    def stepped(random: Random) -> list[float]:
        base, start = random.uniform(0.1, 0.5), random.uniform(3, 20)
        size, number, values = 0.37 / seconds * step_s, 0, []
        while not values or values[-1] < 1.03:
            position = number * STEP_S
            values.append(base if position < start else base + size * math.floor((position - start) / step_s))
            number += 1
        return values

    return stepped


def large_steps(random: Random) -> list[float]:
    """Grow by a quarter of the limit every 3 to 10 s."""
    pause, values, level = random.uniform(3, 10), [], random.uniform(0.02, 0.25)
    while not values or values[-1] < 1.03:
        values += [level] * int(pause / STEP_S)
        level += 0.25
    return values


def exponential_steps(random: Random) -> list[float]:
    """Grow by 8 to 20 % every second."""
    base, growth = random.uniform(0.02, 0.1), random.uniform(1.08, 1.2)
    values = [base] * int(random.uniform(2, 10) / STEP_S)
    while values[-1] < 1.03:
        values += [values[-1] * growth] * int(1 / STEP_S)
    return values


def child_by_child(random: Random) -> list[float]:
    """Start another process of 1 to 3 % of the limit at irregular times."""
    size, pause, values = random.uniform(0.01, 0.03), random.uniform(0.4, 1.5), [0.05] * 12
    while values[-1] < 1.03:
        values += [values[-1]] * max(round(pause * random.uniform(0.7, 1.3) / STEP_S) - 1, 0) + [values[-1] + size]
    return values


REACHING: list[Shape] = [
    steady, accelerating, stepwise, short_teeth, long_teeth, bursts, batches_with_gc, noise, load_then_leak,
]  # fmt: skip
LEVELLING: list[Shape] = [
    load_then_flat, cache_levels_off, s_curve, steps_then_flat, flat_short_teeth, flat_long_teeth, flat_bursts,
    flat_batches_with_gc, flat_noise, page_cache, blocks_then_flat, ramp_to_below_the_stop, flat_noise_60_to_80,
    flat_noise_65_to_80, flat_noise_70_to_80, flat_noise_50_to_85,
]  # fmt: skip
STEPPED = (
    "stepped", "large_steps", "exponential_steps", "child_by_child", "blocks_then_flat", "blocks_above_the_stop",
    "flat_noise_60_to_80", "flat_noise_65_to_80", "flat_noise_70_to_80", "flat_noise_50_to_85",
)  # fmt: skip


def fast_climb(seconds: float) -> Shape:
    """Climb from 60 % to the limit in this many seconds."""

    def climb(random: Random) -> list[float]:
        return _jitter(random, _grow(random, lambda _: 0.4 / seconds, _base(random)), 0.0005)

    return climb


def curve(shape: Shape, seed: int, name: str | None = None) -> Curve:
    values = shape(Random(f"{name or shape.__name__} {seed}"))
    return Curve(name or shape.__name__, seed, values, shape.__name__ in STEPPED)
