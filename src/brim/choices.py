"""What an option may be: one of some words, a number that is large enough, a time. Every option is checked here.

The name of an option is the terminal's (`on-error`); `wording` makes the reader's of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from brim.errors import ArgumentError


def one_of(option: str, value: Any, allowed: Collection[Any]) -> None:
    """ArgumentError unless the value is among those allowed."""
    if value in [*allowed]:  # which compares also what has no hash
        return
    words = [str(word) for word in allowed if word is not None]
    listed = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    raise ArgumentError(f"--{option} takes {listed}, not {value!r}.", hint="", option=option)


def at_least(option: str, value: Any, least: int, most: int = 2**62) -> None:
    """ArgumentError unless the value is a whole number from `least` on; None is an option that was not given."""
    if value is None:
        return
    whole = hasattr(value, "__index__") and not isinstance(value, bool)
    if not whole or not least <= value.__index__() < most:
        what = "a number above zero" if least == 1 else f"a number of at least {least}"
        raise ArgumentError(f"--{option} takes {what}, not {value!r}.", option=option)


def switches(**given: Any) -> None:
    """ArgumentError unless each is True or False: of a text like "no", Python makes a yes. None was not given."""
    for name, value in given.items():
        if value not in (None, True, False):
            raise ArgumentError(f"{name}= takes True or False, not {value!r}.", option=name)


def seconds(option: str, value: Any) -> None:
    """ArgumentError unless the value is a number of seconds that will pass."""
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ArgumentError(f"--{option} takes seconds, not {value!r}.", option=option)


def whole(option: str, value: Any) -> int:
    """The value as a whole number, or an ArgumentError."""
    try:
        number = int(value)
        if isinstance(value, bool) or (number != value and not isinstance(value, str)):
            raise ValueError(value)
        return number
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"--{option} takes a whole number, not {value!r}.", option=option) from error
