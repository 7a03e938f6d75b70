"""Columns that are in the names of folders: g=1/part.parquet, as Spark, pyarrow, Polars and DuckDB write them.

Types are those of pyarrow: int32 if every value is one, else text; 0x10 stays text. A column that the files have
themselves is read from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

import pyarrow as pa

_NULL = "__HIVE_DEFAULT_PARTITION__"


def partition_values(name: str) -> dict[str, str | None]:
    """Return the values in the folders of a file's name, which is relative to the source."""
    values: dict[str, str | None] = {}
    for folder in name.split("/")[:-1]:
        key, equals, value = folder.partition("=")
        if key and equals:
            values[unquote(key)] = None if value == _NULL else unquote(value)
    return values


def partition_fields(names: Iterable[str], existing: Iterable[str]) -> list[pa.Field]:
    """Return the columns that folders add to existing ones, in the order in which they first appear."""
    values: dict[str, set[str]] = {}
    for name in names:
        for key, value in partition_values(name).items() if "=" in name else ():
            values.setdefault(key, set()).update(() if value is None else (value,))
    skipped = set(existing)
    return [pa.field(key, _type_of(texts)) for key, texts in values.items() if key not in skipped]


def _type_of(values: set[str]) -> pa.DataType:
    if not values or any(value[:2].lower() == "0x" for value in values):
        return pa.string()
    try:
        pa.array(sorted(values)).cast(pa.int32())
    except pa.ArrowInvalid:
        return pa.string()
    return pa.int32()


def partition_array(name: str, field: pa.Field, rows: int) -> pa.Array:
    """Return the column for the rows of one file. Files outside of such a folder have null."""
    value = partition_values(name).get(field.name)
    return pa.repeat(pa.scalar(value, pa.string()).cast(field.type), rows)
