"""Python rows as Arrow tables: types found out row by row only where pyarrow cannot tell them at once."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import pyarrow as pa

from brim.compute.rows.schemas import TypesDiffer, holds_float, merged, merged_type
from brim.errors import InputError
from brim.sources.exact_values import InexactInteger, exact, json_as_text

Refuse = Callable[[int, str], None]  # the number of a row, and why it is left out


class _BadValue(Exception):
    """A value that its column cannot store. The message is data: quarantine.parquet has it, and its bytes stay."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def table_of(
    rows: Sequence[Any],
    where: Callable[[int], str],
    known: pa.Schema | None = None,
    refuse: Refuse | None = None,
) -> pa.Table:
    """A table of dicts. `where(number)` names a row in errors; values must go with the types of `known`.

    With `refuse`, rows that have no place in the table are left out, and each is reported with the reason.
    """
    numbers = list(range(len(rows)))
    while True:
        table, bad = _built([rows[number] for number in numbers], known, refuse is not None)
        if not bad:
            assert table is not None
            return table
        if refuse is None:
            first = min(bad)
            column, error = bad[first]
            raise InputError(f"{where(first)}: {error}.", hint=error.hint, **({"column": column} if column else {}))
        for number, (_, error) in sorted(bad.items()):
            refuse(numbers[number], str(error))
        numbers = [row for number, row in enumerate(numbers) if number not in bad]


_Bad = dict[int, tuple[str, _BadValue]]  # by the number of the row: the column, and what is wrong


def _built(rows: Sequence[Any], known: pa.Schema | None, may_leave_out: bool) -> tuple[pa.Table | None, _Bad]:
    """The table, or the rows that prevent it."""
    bad: _Bad = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            bad[number] = ("", _BadValue(f"this is a {type(row).__name__}, not a row with named values", ""))
    if bad:
        return None, bad
    names = dict.fromkeys(name for row in rows for name in row)
    if not names:
        return pa.Table.from_batches([pa.RecordBatch.from_struct_array(pa.array(list(rows), pa.struct([])))]), bad
    odd = next((name for name in names if not isinstance(name, str)), None)
    if odd is not None:
        raise InputError(f"The column name {odd!r} is not text.", hint="Use text as column names.")
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        own = known.field(name).type if known is not None and name in known.names else pa.null()
        array, wrong = _array(values, name, own, may_leave_out and pa.types.is_null(own))
        bad |= {number: (name, error) for number, error in wrong.items() if number not in bad}
        columns[name] = array
    return (None, bad) if bad else (pa.table(columns), bad)


_FAILURES = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError)


def _array(values: list[Any], name: str, known: pa.DataType, is_voted: bool) -> tuple[Any, dict[int, _BadValue]]:
    """The values as Arrow, or which of them prevent that: those that differ from most, or from the ones before."""
    try:
        array = pa.array(values)
        kind = merged_type(known, array.type, name)
        if kind.equals(array.type) or not holds_float(kind):
            return array, {}
        return pa.array([exact(value, kind) for value in values], kind), {}
    except (*_FAILURES, TypesDiffer):
        pass
    types: dict[int, pa.DataType] = {}
    bad: dict[int, _BadValue] = {}
    kind = known
    for number, value in enumerate(values):
        try:
            if value is not None:
                types[number] = _type_of(value, known)
                kind = kind if is_voted else merged_type(kind, types[number], name)
        except (*_FAILURES, TypesDiffer) as error:
            bad[number] = _explained(error, name)
    if is_voted:
        kind = vote(name, [(own, 1) for own in types.values()])
        for number, own in types.items():
            try:
                merged_type(kind, own, name)
            except TypesDiffer as error:
                bad[number] = _explained(error, name)
    if bad:
        return None, bad
    fitting = []
    for number, value in enumerate(values):
        try:
            fitting.append(exact(value, kind))
            pa.array(fitting[-1:], kind)
        except _FAILURES as error:
            bad[number] = _explained(error, name)
    return (None, bad) if bad else (pa.array(fitting, kind), bad)


def vote(name: str, types: Iterable[tuple[pa.DataType, int]]) -> pa.DataType:
    """The type that holds the values of most rows, of (type, rows); the first of several."""
    groups: list[tuple[pa.DataType, int]] = []
    for own, rows in types:
        for number, (kind, count) in enumerate(groups):
            try:
                groups[number] = merged_type(kind, own, name), count + rows
                break
            except TypesDiffer:
                continue
        else:
            groups.append((own, rows))
    return max(groups, key=lambda group: group[1])[0] if groups else pa.null()


def _type_of(value: Any, known: pa.DataType) -> pa.DataType:
    """The type of one value. Among floats, an integer of more than 64 bits may be one, too."""
    try:
        return pa.array([value]).type
    except OverflowError:
        if not pa.types.is_floating(known):
            raise
        exact(value, known)
        return known


def _explained(error: Exception, name: str) -> _BadValue:
    if isinstance(error, TypesDiffer):
        message = f"the column {error.column!r} is {error.second} here and {error.first} before"
        return _BadValue(message, "Use one type for the column in all rows.")
    if isinstance(error, UnicodeEncodeError):
        hint = "Correct the text, as with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')."
        return _BadValue(f"the column {name!r} holds half of a surrogate pair, which is not text", hint)
    if isinstance(error, OverflowError | InexactInteger):
        why = str(error) if isinstance(error, InexactInteger) else "an integer has more than 64 bits"
        return _BadValue(f"in the column {name!r}, {why}", "Write such values as text, in quotes.")
    hint = "Give plain values: numbers, texts, bytes, lists and dicts of them."
    return _BadValue(f"the column {name!r} holds what Arrow has no type for: {_line(error)}", hint)


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def peek(rows: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
    """Return the first row (None if there is none), and all rows."""
    iterator = iter(rows)
    first = list(itertools.islice(iterator, 1))
    return (first[0] if first else None), itertools.chain(first, iterator)


def rows_as_json(rows: Iterable[Any], columns: tuple[str, ...]) -> Iterator[Any]:
    """Yield dicts with the values of some columns as JSON texts, so that rows may differ in what is inside of them."""
    for row in rows:
        yield json_as_text(row, columns) if columns and isinstance(row, dict) else row


def digest_of_tables(tables: Iterable[pa.Table]) -> str:
    """Return a digest of all rows."""
    digest = hashlib.sha256()
    for table in tables:
        with pa.BufferOutputStream() as sink:
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table, max_chunksize=10_000)
            digest.update(memoryview(sink.getvalue()))
    return digest.hexdigest()[:32]


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
                f"{name}, row {first + len(held):,}: this is a {type(row).__name__}, not a dict.",
                hint="An iterator must yield dicts, Arrow tables or record batches.",
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
    return table_of(rows, lambda number: f"{name}, row {first + number:,}", known)


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
