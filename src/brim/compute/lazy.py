"""A row or a batch as the function sees it: a mapping that turns a column into Python when it is first asked for.

As in `datasets`, a column that the function does not touch is passed on as it is, never decoded. Values that
cannot be changed in place (numbers, strings) may be read and still count as untouched.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import pyarrow as pa

_FIXED = (type(None), bool, int, float, str, bytes, datetime.datetime, datetime.date)
Decode = Callable[[pa.Table], list[Any]]  # a table of one column, as Python values


class Rows:
    """The columns of consecutive rows, as Python lists, made on demand."""

    __slots__ = ("_decoders", "_made", "names", "table")

    def __init__(self, table: pa.Table, decoders: Mapping[str, Decode]) -> None:
        self.table = table
        self.names = dict.fromkeys(table.column_names)
        self._decoders = decoders
        self._made: dict[str, list[Any]] = {}

    def stored(self, name: str) -> list[Any]:
        """A column as it is stored, not decoded."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self.table.column(name).to_pylist()
        return made

    def value(self, name: str, row: int) -> Any:
        """One value. Images and the like are decoded one by one, for they are large."""
        decode = self._decoders.get(name)
        if decode is None:
            return self.stored(name)[row]
        return decode(self.table.select([name]).slice(row, 1))[0]

    def column(self, name: str) -> list[Any]:
        """A whole column, for the function to keep or change."""
        decode = self._decoders.get(name)
        return self.table.column(name).to_pylist() if decode is None else decode(self.table.select([name]))


class LazyRow(MutableMapping[str, Any]):
    """One row. `touched` holds what was set, and what was read and could have been changed in place."""

    __slots__ = ("_row", "_rows", "gone", "touched")

    def __init__(self, rows: Rows, row: int) -> None:
        self._rows, self._row = rows, row
        self.touched: dict[str, Any] = {}
        self.gone: set[str] | None = None

    def _read(self, key: str) -> Any:
        value = self._rows.value(key, self._row)
        if type(value) not in _FIXED:
            self.touched[key] = value
        return value

    def __getitem__(self, key: str) -> Any:
        if key in self.touched:
            return self.touched[key]
        if key not in self._rows.names or (self.gone is not None and key in self.gone):
            raise KeyError(key)
        return self._read(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.touched[key] = value

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self.touched.pop(key, None)
        if key in self._rows.names:
            self.gone = (self.gone or set()) | {key}

    def __contains__(self, key: object) -> bool:
        return key in self.touched or (key in self._rows.names and (self.gone is None or key not in self.gone))

    def __iter__(self) -> Iterator[str]:
        for name in self._rows.names:
            if self.gone is None or name not in self.gone or name in self.touched:
                yield name
        yield from [name for name in self.touched if name not in self._rows.names]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> LazyRow:
        """Another mapping over the same row."""
        made = type(self)(self._rows, self._row)
        made.touched = dict(self.touched)
        made.gone = None if self.gone is None else set(self.gone)
        return made

    __copy__ = copy

    def __or__(self, other: Mapping[str, Any]) -> LazyRow:
        if not isinstance(other, Mapping):
            return NotImplemented
        made = self.copy()
        made.touched.update(other)
        return made

    def __ror__(self, other: Mapping[str, Any]) -> LazyRow:
        if not isinstance(other, Mapping):
            return NotImplemented
        made = self.copy()
        made.touched.update({key: value for key, value in other.items() if key not in self})
        return made

    def __ior__(self, other: Mapping[str, Any]) -> LazyRow:
        self.touched.update(other)
        return self


class LazyBatch(LazyRow):
    """Rows together: each value is the list of a column's values."""

    __slots__ = ()

    def __init__(self, rows: Rows, row: int = 0) -> None:
        super().__init__(rows, row)

    def _read(self, key: str) -> Any:
        value = self.touched[key] = self._rows.column(key)
        return value
