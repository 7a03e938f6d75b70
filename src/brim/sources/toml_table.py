"""A table of a TOML file that knows where it stands, so that every mistake is told with its place."""

from __future__ import annotations

from typing import Any

from brim.errors import InputError

Span = tuple[int, int]  # lowest and highest


class TomlTable:
    """The values of a table, of which only some keys are `allowed`; `shown` is where it stands."""

    def __init__(self, values: Any, shown: str, allowed: tuple[str, ...]) -> None:
        if not isinstance(values, dict):
            raise InputError(f"{shown} must be a table of keys, not {values!r}.", hint=f"Keys: {', '.join(allowed)}.")
        unknown = [key for key in values if key not in allowed]
        if unknown:
            raise InputError(f"{shown}: unknown key {unknown[0]!r}.", hint=f"Allowed: {', '.join(allowed)}.")
        self.values, self.shown = values, shown

    def wrong(self, key: str, what: str) -> InputError:
        return InputError(f"{self.shown}: {key} {what}, not {self.values.get(key)!r}.")

    def _value(self, key: str, default: Any) -> Any:
        if key not in self.values and default is None:
            raise InputError(f"{self.shown}: {key} is missing.", hint="`brim recipes arc` shows a whole recipe.")
        return self.values.get(key, default)

    def text(self, key: str, default: str | None = None, allowed: tuple[str, ...] = ()) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "must be a text")
        if allowed and value not in allowed:
            raise self.wrong(key, f"must be one of {', '.join(allowed)}")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def texts(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        value = self._value(key, default)
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "must be a list of texts")
        return tuple(value)

    def tables(self, key: str) -> list[Any]:
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise InputError(f"{self.shown}: {key} must be written as [[{key}]].")
        return value

    def span(self, key: str) -> Span | None:
        value = self.values.get(key)
        if value is None:
            return None
        pair = value if isinstance(value, list) else [value, value]
        if len(pair) != 2 or not all(type(n) is int and n >= 0 for n in pair) or pair[0] > pair[1]:
            raise self.wrong(key, "must be a number or [lowest, highest]")
        return pair[0], pair[1]
