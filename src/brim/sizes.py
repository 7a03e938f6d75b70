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


_COUNT = re.compile(r"(\d{1,3}(?:[,_ ]\d{3})+|\d+(?:_\d+)*)?(\.\d+)?(?:[eE]\+?(\d{1,2}))?\s*([kKMGBT]?)")
_COUNT_UNITS = {"": 0, "K": 3, "M": 6, "G": 9, "B": 9, "T": 12}


def parse_count(text: str | int) -> int:
    """Parse a whole number as people write it: 2857545, "2,857,545", "3M", "1.5k", "1e6".

    Raises:
        InputError: It is not a whole number, is negative, or has more than 18 digits.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        count = text
    else:
        match = _COUNT.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or not (match[1] or match[2]):
            raise InputError(f"{text!r} is not a number.", hint="Write it like 3000000, 3,000,000, 3M or 3e6.")
        digits, decimals = re.sub("[,_ ]", "", match[1] or ""), (match[2] or "")[1:].rstrip("0")
        power = int(match[3] or 0) + _COUNT_UNITS[match[4].upper()] - len(decimals)
        if power < 0:
            raise InputError(f"{text!r} is not a whole number.", hint="Write it like 3000000, 3,000,000, 3M or 3e6.")
        count = int(f"{digits}{decimals}") * 10**power if len(digits) + power < 40 else 10**18
    if not 0 <= count < 10**18:
        raise InputError(f"{text!r} is not a number between 0 and 10¹⁸.")
    return count


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


def format_duration(seconds: float) -> str:
    """Format a duration with at most two units: "4.2 s", "45 s", "12 min", "3 h 20 min", "2 d 4 h", "3.1 years"."""
    seconds = max(seconds, 0.0)
    if seconds < 100:
        return f"{f'{seconds:.1f}'.removesuffix('.0') if seconds < 9.95 else f'{seconds:.0f}'} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    if days >= 730:
        return f"{days / 365.25:.1f} years"
    return f"{days} d {hours} h" if hours and days < 60 else f"{days} d"
