"""Rows that a program hands over one by one or in tables, as a stream of tables of about a megabyte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import pyarrow as pa

from brim.errors import InputError
from brim.sources.rows.objects import table_of
from brim.sources.rows.schemas import TypesDiffer, merged

_BLOCK_BYTES = 1 << 20
_BLOCK_ROWS = 1000


def tables_of(rows: Iterable[Any], name: str) -> Iterator[pa.Table]:
    """Dicts in batches, tables and record batches as they are; no mixture of them."""
    held: list[dict[str, Any]] = []
    size = first = 0
    known: pa.Schema | None = None
    for row in rows:
        if isinstance(row, pa.Table | pa.RecordBatch):
            yield pa.Table.from_batches([row]) if isinstance(row, pa.RecordBatch) else row
            continue
        if not isinstance(row, dict):
            raise InputError(
                f"{name}, row {first + len(held) + 1:,}: this is a {type(row).__name__}, not a dict.",
                hint="An iterator must give dicts, or Arrow tables or record batches.",
            )
        held.append(row)
        size += _weight(row)
        if size >= _BLOCK_BYTES or len(held) >= _BLOCK_ROWS:
            table = _block(held, name, first, known)
            known = _known(known, table)
            first += len(held)
            held, size = [], 0
            yield table
    if held:
        yield _block(held, name, first, known)


def _block(rows: list[dict[str, Any]], name: str, first: int, known: pa.Schema | None) -> pa.Table:
    return table_of(rows, lambda number: f"{name}, row {first + number + 1:,}", known)


def _known(known: pa.Schema | None, table: pa.Table) -> pa.Schema:
    try:
        return table.schema if known is None else merged(known, table.schema)
    except TypesDiffer as error:  # table_of has compared them value by value
        raise AssertionError(str(error)) from error


def _weight(value: Any) -> int:
    """About how many bytes a value takes in Arrow."""
    if isinstance(value, str | bytes | bytearray):
        return len(value) + 4
    if isinstance(value, dict):
        return sum(map(_weight, value.values()), 16)
    if isinstance(value, list | tuple):
        sample = value[:16]
        return len(value) * (sum(map(_weight, sample)) // max(len(sample), 1)) + 4
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    return len(value) if isinstance(value, Sized) else 8
