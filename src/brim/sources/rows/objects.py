"""Python rows as Arrow tables: types found out row by row only where pyarrow cannot tell them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from brim.errors import InputError
from brim.sources.rows.schemas import TypesDiffer, merged_type

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
