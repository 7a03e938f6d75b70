"""Python rows as Arrow tables: types found out row by row only where pyarrow cannot tell them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import pyarrow as pa

from brim.errors import InputError
from brim.rows.schemas import TypesDiffer, merged, merged_type

_INT64 = range(-(2**63), 2**63)


def table_of(rows: Sequence[dict[str, Any]], where: Callable[[int], str], known: pa.Schema | None = None) -> pa.Table:
    """A table of dicts. `where(number)` names a row in errors; values must go with the types of `known`."""
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise InputError(f"{where(number)}: this is a {type(row).__name__}, not a row with named values.")
    names = dict.fromkeys(name for row in rows for name in row)
    if not names:
        return pa.Table.from_batches([pa.RecordBatch.from_struct_array(pa.array(list(rows), pa.struct([])))])
    odd = next((name for name in names if not isinstance(name, str)), None)
    if odd is not None:
        raise InputError(f"The name of a column is {odd!r}, which is not text.", hint="Give columns text names.")
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        own = known.field(name).type if known is not None and name in known.names else pa.null()
        columns[name] = _array(values, name, where, own)
    return pa.table(columns)


def _array(values: list[Any], name: str, where: Callable[[int], str], known: pa.DataType) -> Any:
    try:
        array = pa.array(values)
        merged_type(known, array.type, name)
        return array
    except (pa.ArrowException, TypesDiffer, TypeError, ValueError, OverflowError, AttributeError):
        pass
    kind = known
    for number, value in enumerate(values):
        if value is None:
            continue
        try:
            own = pa.array([value]).type
            kind = merged_type(kind, own, name)
        except OverflowError:
            kind = merged_type(kind, pa.float64(), name)
        except TypesDiffer as error:
            raise InputError(
                f"{where(number)}: the column {error.column!r} is {error.second} here and {error.first} before.",
                hint="Give the column one type in all rows.",
                column=name,
            ) from error
        except UnicodeEncodeError as error:
            raise InputError(
                f"{where(number)}: the column {name!r} holds half of a surrogate pair, which is not text.",
                hint="Mend the text, as with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace').",
                column=name,
            ) from error
        except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{where(number)}: the column {name!r} holds what Arrow has no type for: {_line(error)}.",
                hint="Give plain values: numbers, texts, bytes, lists and dicts of them.",
                column=name,
            ) from error
    try:
        return pa.array([_fitting(value) for value in values] if pa.types.is_floating(kind) else values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{where(0)}: the column {name!r} cannot be turned into {kind}: {_line(error)}.") from error


def _fitting(value: Any) -> Any:
    return float(value) if isinstance(value, int) and value not in _INT64 else value


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


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
