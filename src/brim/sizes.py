"""Sizes as people write them: "2GB" is 2 × 10⁹ bytes, "2GiB" is 2 × 2³⁰, a bare number is bytes."""

from __future__ import annotations

import math
import re

from brim.errors import InputError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[_letter] = _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power

_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int | float) -> int:
    """Bytes from "500MB", "1.5 GiB" or a number; at least 1."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        size = round(text) if math.isfinite(text) else 0
    else:
        match = _PATTERN.fullmatch(text) if isinstance(text, str) else None
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise InputError(f"{text!r} is not a size.", hint="Write it like 500MB, 2GB or 2GiB.")
        size = round(float(match[1]) * unit) if len(match[1]) < 30 else 0
    if not 0 < size < 2**62:
        raise InputError(f"{text!r} is not a size above zero and below 4 EB.", hint="Write it like 500MB, 2GB or 2GiB.")
    return size


def format_size(size: int | float) -> str:
    """Three significant digits with a decimal unit: "58.3 MB"."""
    return _scaled(size, 1000, ("B", "KB", "MB", "GB", "TB", "PB"))


def format_both(low: int | float, high: int | float | None = None) -> str:
    """A size, or a range of sizes, in decimal and binary units: "20.5 GB (19.1 GiB)"."""
    decimal = _between(format_size(low), format_size(low if high is None else high))
    binary = _between(_binary(low), _binary(low if high is None else high))
    return f"{decimal} ({binary})"


def _between(low: str, high: str) -> str:
    if low == high:
        return low
    number, unit = low.split(" ")
    return f"{number} to {high}" if high.endswith(f" {unit}") else f"{low} to {high}"


def _binary(size: int | float) -> str:
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def _scaled(size: int | float, step: int, units: tuple[str, ...]) -> str:
    value, unit = float(size), units[0]
    for larger in units[1:]:
        if abs(value) < step - 0.5:
            break
        value, unit = value / step, larger
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def plural(number: int, what: str) -> str:
    """1 row, 1,234 rows."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
