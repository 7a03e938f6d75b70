"""Find values of JSON lines and CSV that pyarrow's readers would change, so that they are refused or kept as text.

pyarrow makes a float of a JSON integer that has more than 64 bits or stands among floats, and reads `null` as a row.
In CSV it reads 0x10 as 16 and 007 as 7. The checks of JSON are per line and slow, so callers run them only on text
that pyarrow refused or that `may_differ` suspects.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

LONG_NUMBER = 1e15  # a number below it has at most 15 digits before its point, which a float64 holds
# CSV values that are other numbers, or other texts, once they are read as numbers: 007, 0x10, more digits than a float
# holds, and exponents that become infinite. Columns with such values stay text.
CHANGES_AS_NUMBER = r"^[+-]?(0[0-9xX]|[0-9]{16,}\.?[0-9]*$|[0-9.]+[eE]\+?0*(309|3[1-9][0-9]|[4-9][0-9]{2}|[0-9]{4,})$)"
_EXACT_IN_FLOAT = 2**53  # integers up to here have a float64 of the same value
_STARTS_WITH_NULL = re.compile(rb"[ \t\r\n]*n")
_NULL_LINE = re.compile(rb"^[ \t\r]*null", re.MULTILINE)


class _RepeatedKeys(dict[str, Any]):
    """An object in which a key occurs twice."""

    key = ""


def load_row(line: bytes, columns: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Parse a line that must be one JSON object with distinct keys. Raise ValueError for others.

    Keys that repeat outside of `columns` do not matter: nothing of them is read.
    """
    try:
        row = json.loads(line.decode(), object_pairs_hook=_as_dict, parse_float=_as_float)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"this is not UTF-8 text (character {error.start + 1:,} of the line)") from None
    except UnicodeEncodeError:
        raise ValueError("a key holds half of a surrogate pair, which is not text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not a row of JSON: {error.msg} (character {error.pos + 1:,} of the line)") from None
    if not isinstance(row, dict):
        raise ValueError(f"this is {_JSON_NAMES.get(type(row).__name__, 'a value')}, not an object")
    read = row if columns is None else {name: row[name] for name in columns if name in row}
    if isinstance(row, _RepeatedKeys) and (columns is None or row.key in columns):
        raise ValueError(f"the key {row.key!r} occurs twice")
    if (repeated := _repeated_key(list(read.values()))) is not None:
        raise ValueError(f"the key {repeated!r} occurs twice in one object")
    return read


def json_as_text(row: dict[str, Any], columns: Collection[str]) -> dict[str, Any]:
    """Return the row with the values of some columns as JSON texts; null and missing values stay as they are."""
    return {
        name: json.dumps(value, ensure_ascii=False) if name in columns and value is not None else value
        for name, value in row.items()
    }


_JSON_NAMES = {
    "list": "an array",
    "str": "a text",
    "int": "a number",
    "float": "a number",
    "bool": "true or false",
    "NoneType": "null",
}


def _as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        row = _RepeatedKeys(row)
        row.key = next(name for name in names if names.count(name) > 1)
    for name in row:
        if not name.isascii():
            name.encode()  # half of a surrogate pair is a UnicodeEncodeError
    return row


def _as_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large for a number of 64 bits")
    return value


def _repeated_key(values: list[Any]) -> str | None:
    for value in values:
        if isinstance(value, _RepeatedKeys):
            return value.key
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if inner and (repeated := _repeated_key(list(inner))) is not None:
            return repeated
    return None


def is_parseable(text: bytes) -> bool:
    """Return whether pyarrow's reader takes a block of text: it crashes where the first value is null."""
    return _STARTS_WITH_NULL.match(text) is None


def may_differ(text: bytes, table: pa.Table) -> bool:
    """Return whether a line may say something else than the table that pyarrow made of the text."""
    if all(column.null_count for column in table.columns) and _NULL_LINE.search(text):
        return True
    return any(_has_large_float(chunk) for column in table.columns for chunk in column.chunks)


def reaches(array: Any, limit: float) -> bool:
    """Return whether a number is as large as a limit, or as small as its negative."""
    smallest, largest = pc.min_max(array).as_py().values()
    return largest is not None and (largest >= limit or smallest <= -limit)


def _has_large_float(array: Any) -> bool:
    """Return whether a float is so large that it may stand for an integer that float64 cannot represent."""
    kind = array.type
    if pa.types.is_floating(kind):
        return reaches(array, _EXACT_IN_FLOAT)
    if pa.types.is_struct(kind):
        return any(_has_large_float(field) for field in array.flatten())
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _has_large_float(array.flatten())


class InexactInteger(ValueError):
    """An integer that would become another number."""


def exact(value: Any, kind: pa.DataType) -> Any:
    """Convert integers to floats where the type is a float; raise InexactInteger if that would change one."""
    if pa.types.is_floating(kind) and isinstance(value, int) and not isinstance(value, bool):
        try:
            converted = float(value)
        except OverflowError:
            fault = f"the integer {str(value)[:40]} would be changed: no number of 64 bits holds it"
            raise InexactInteger(fault) from None
        if int(converted) != value:
            raise InexactInteger(f"the integer {str(value)[:40]} would be changed: {kind} does not hold it")
        return converted
    if pa.types.is_struct(kind) and isinstance(value, dict):
        return {
            name: exact(own, kind.field(name).type) for name, own in value.items() if kind.get_field_index(name) >= 0
        }
    if isinstance(value, list | tuple) and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return [exact(item, kind.value_type) for item in value]
    return value
