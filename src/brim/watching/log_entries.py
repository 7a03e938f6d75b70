"""The fields of a log's entries as typed values. Nothing in a log is trusted: what is not as it should be is absent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from brim.errors import InputError
from brim.memory.guard import parse_level
from brim.records import dataclass

_LAST_SECOND = 253_402_214_400.0  # a day before the year 10000, where calendars end, whatever the time zone
_LARGEST = 1 << 62
_MOST_WORDS = 500
# Characters that are nothing to look at: controls, marks that turn the direction of text around, halves of pairs.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class LoggedForecast:
    """What was foretold before it ran."""

    low_bytes: int
    high_bytes: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Head:
    """What was known at the beginning. Empty or None: the log does not say."""

    command: tuple[str, ...] = ()
    watched: str = ""
    pid: int | None = None
    limit_bytes: int | None = None
    limit_why: str = ""
    enforced: str = ""
    thresholds: tuple[tuple[str, int], ...] = ()
    ram_bytes: int | None = None
    swap_bytes: int | None = None
    cpus: int | None = None
    kernel: str = ""
    boot_id: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    not_seen: tuple[str, ...] = ()
    forecast: LoggedForecast | None = None
    stop_file: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """The last line of a watch that came to its end."""

    exit_code: int | None = None
    signal: int | None = None
    stopped: str | None = None
    why: str | None = None
    overshoot_bytes: int = 0
    oom_kills: int = 0
    machine_oom_kills: int = 0
    peak_bytes: int = 0
    peak_t: float | None = None


def head_of(entry: dict[str, Any]) -> Head:
    limit, machine, versions = (_object(entry.get(name)) for name in ("limit", "machine", "versions"))
    limit_bytes = size(limit.get("bytes")) or None
    command = entry.get("command")
    return Head(
        command=(text(command, 5000),) if isinstance(command, str) else texts(command, 5000),
        watched=text(entry.get("watched"), 40),
        pid=size(entry.get("pid")),
        limit_bytes=limit_bytes,
        limit_why=text(limit.get("why"), 200),
        enforced=text(limit.get("enforced"), 200),
        thresholds=tuple(_thresholds(_object(entry.get("ladder")), limit_bytes)),
        ram_bytes=size(machine.get("ram_bytes")),
        swap_bytes=size(machine.get("swap_bytes")),
        cpus=size(machine.get("cpus")),
        kernel=" ".join(filter(None, (text(machine.get("system"), 40), text(machine.get("kernel"), 80)))),
        boot_id=text(entry.get("boot_id"), 80),
        versions=tuple((text(name, 40), text(version, 80)) for name, version in list(versions.items())[:20]),
        not_seen=texts(entry.get("not_seen"), 300),
        forecast=_forecast(_object(entry.get("forecast"))),
        stop_file=text(_object(entry.get("ladder")).get("stop_file"), 1000),
    )


def _thresholds(ladder: dict[str, Any], limit_bytes: int | None) -> Iterator[tuple[str, int]]:
    for name in ("alert", "stop", "kill"):
        try:
            level = parse_level(text(ladder.get(name), 40))
        except InputError:
            continue
        if level is not None and (level.bytes is not None or limit_bytes is not None):
            yield name, level.of(limit_bytes or 0)


def _forecast(facts: dict[str, Any]) -> LoggedForecast | None:
    low, high = size(facts.get("low_bytes")), size(facts.get("high_bytes"))
    low, high = low if low is not None else high, high if high is not None else low
    if low is None or high is None:
        return None
    return LoggedForecast(min(low, high), max(low, high), text(facts.get("verdict"), 40))


def end_of(entry: dict[str, Any]) -> End:
    return End(
        exit_code=_whole(entry.get("exit_code")),
        signal=_whole(entry.get("signal")),
        stopped=text(entry.get("stopped"), 40) or None,
        why=text(entry.get("why"), 300) or None,
        overshoot_bytes=size(entry.get("overshoot_bytes")) or 0,
        oom_kills=size(entry.get("oom_kills")) or 0,
        machine_oom_kills=size(entry.get("machine_oom_kills")) or 0,
        peak_bytes=size(entry.get("peak_bytes")) or 0,
        peak_t=time_of_day(entry.get("peak_t")),
    )


def time_of_day(value: object) -> float | None:
    """Seconds since 1970, within what calendars can show."""
    number = _number(value)
    return number if number is not None and 0 <= number < _LAST_SECOND else None


def size(value: object) -> int | None:
    """A whole number that is not negative: bytes, a count, a process."""
    number = _whole(value)
    return number if number is not None and number >= 0 else None


def _whole(value: object) -> int | None:
    number = _number(value)
    return round(number) if number is not None else None


def _number(value: object) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None  # not a number (NaN is not smaller than anything), or none that could be meant
    return value


def text(value: object, most: int) -> str:
    """A text that can be shown, cut to `most` characters; empty if it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = f"{value:g}" if isinstance(value, float) else str(value)[:most]
    if not isinstance(value, str):
        return ""
    shown = value if len(value) <= most else value[: most - 1] + "…"
    return _UNFIT.sub("\ufffd", shown)


def texts(value: object, most: int) -> tuple[str, ...]:
    """A list of texts, each cut to `most` characters."""
    return tuple(text(word, most) for word in value[:_MOST_WORDS]) if isinstance(value, list) else ()


def objects(value: object) -> Iterator[dict[str, Any]]:
    """The objects in a list."""
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
