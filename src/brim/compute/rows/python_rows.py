"""Convert Python rows to Arrow tables. Types are inferred row by row only if pyarrow cannot infer them at once."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import pyarrow as pa

from brim.compute.rows.schemas import TypesDiffer, contains_type, merged, merged_type
from brim.errors import InputError
from brim.sources.exact_values import InexactInteger, exact, json_as_text

Refuse = Callable[[int, str], None]  # number of a row, reason why it is skipped


class _BadValue(Exception):
    """A value that its column cannot store. The message is data: quarantine.parquet has it, and its bytes stay."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def table_of(
    rows: Sequence[Any],
    describe_row: Callable[[int], str],
    schema: pa.Schema | None = None,
    refuse: Refuse | None = None,
) -> pa.Table:
    """Convert dicts to a table. `describe_row(number)` names a row in errors; values must fit the types of `schema`.

    With `refuse`, rows that do not fit the table are skipped, and each is reported with the reason.
    """
    numbers = list(range(len(rows)))
    while True:
        table, bad = _built([rows[number] for number in numbers], schema, refuse is not None)
        if not bad:
            assert table is not None
            return table
        if refuse is None:
            first = min(bad)
            column, error = bad[first]
            raise InputError(
                f"{describe_row(first)}: {error}.", hint=error.hint, **({"column": column} if column else {})
            )
        for number, (_, error) in sorted(bad.items()):
            refuse(numbers[number], str(error))
        numbers = [row for number, row in enumerate(numbers) if number not in bad]


_Bad = dict[int, tuple[str, _BadValue]]  # by row number: the column and the error


def _built(rows: Sequence[Any], schema: pa.Schema | None, may_leave_out: bool) -> tuple[pa.Table | None, _Bad]:
    """Return the table, or the rows that prevent it."""
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
        own = schema.field(name).type if schema is not None and name in schema.names else pa.null()
        array, wrong = _array(values, name, own, may_leave_out and pa.types.is_null(own))
        bad |= {number: (name, error) for number, error in wrong.items() if number not in bad}
        columns[name] = array
    return (None, bad) if bad else (pa.table(columns), bad)


_FAILURES = (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError)


def _array(values: list[Any], name: str, known_type: pa.DataType, is_voted: bool) -> tuple[Any, dict[int, _BadValue]]:
    """Return the values as Arrow, or the errors of values whose type differs from most, or from earlier ones."""
    try:
        array = pa.array(values)
        kind = merged_type(known_type, array.type, name)
        if kind.equals(array.type) or not contains_type(kind, pa.types.is_floating):
            return array, {}
        return pa.array([exact(value, kind) for value in values], kind), {}
    except (*_FAILURES, TypesDiffer):
        pass
    types: dict[int, pa.DataType] = {}
    bad: dict[int, _BadValue] = {}
    kind = known_type
    for number, value in enumerate(values):
        try:
            if value is not None:
                types[number] = _type_of(value, known_type)
                kind = kind if is_voted else merged_type(kind, types[number], name)
        except (*_FAILURES, TypesDiffer) as error:
            bad[number] = _explain(error, name)
    if is_voted:
        kind = vote(name, [(own, 1) for own in types.values()])
        for number, own in types.items():
            try:
                merged_type(kind, own, name)
            except TypesDiffer as error:
                bad[number] = _explain(error, name)
    if bad:
        return None, bad
    fitting = []
    for number, value in enumerate(values):
        try:
            fitting.append(exact(value, kind))
            pa.array(fitting[-1:], kind)
        except _FAILURES as error:
            bad[number] = _explain(error, name)
    return (None, bad) if bad else (pa.array(fitting, kind), bad)


def vote(name: str, types: Iterable[tuple[pa.DataType, int]]) -> pa.DataType:
    """Return the type that holds the values of most rows, from pairs (type, rows); the first if several do."""
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


def _type_of(value: Any, known_type: pa.DataType) -> pa.DataType:
    """Return the type of one value. In a float column, an integer of more than 64 bits may be a float."""
    try:
        return pa.array([value]).type
    except OverflowError:
        if not pa.types.is_floating(known_type):
            raise
        exact(value, known_type)
        return known_type


def _explain(error: Exception, name: str) -> _BadValue:
    if isinstance(error, TypesDiffer):
        message = f"the column {error.column!r} is {error.second} here and {error.first} before"
        return _BadValue(message, "Use one type for the column in all rows.")
    if isinstance(error, UnicodeEncodeError):
        hint = "Correct the text, as with text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')."
        return _BadValue(f"the column {name!r} holds half of a surrogate pair, which is not text", hint)
    if isinstance(error, OverflowError | InexactInteger):
        why = str(error) if isinstance(error, InexactInteger) else "an integer has more than 64 bits"
        return _BadValue(f"in the column {name!r}, {why}", "Write such values as text, in quotes.")
    first_line = (
        str(error)
        .strip()
        .split(
            "\
"
        )[0]
        .rstrip(".")
    )
    hint = "Give plain values: numbers, texts, bytes, lists and dicts of them."
    return _BadValue(f"the column {name!r} holds what Arrow has no type for: {first_line}", hint)


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
    """Yield tables: dicts in batches, tables and record batches unchanged."""
    pending: list[dict[str, Any]] = []
    size = first = 0
    schema: pa.Schema | None = None
    for row in rows:
        if isinstance(row, pa.Table | pa.RecordBatch):
            yield pa.Table.from_batches([row]) if isinstance(row, pa.RecordBatch) else row
            continue
        if not isinstance(row, dict):
            raise InputError(
                f"{name}, row {first + len(pending):,}: this is a {type(row).__name__}, not a dict.",
                hint="An iterator must yield dicts, Arrow tables or record batches.",
            )
        pending.append(row)
        size += _weight(row)
        if size >= _BLOCK_BYTES or len(pending) >= _BLOCK_ROWS:
            table = _block(pending, name, first, schema)
            try:
                schema = table.schema if schema is None else merged(schema, table.schema)
            except TypesDiffer as error:  # table_of has compared them value by value
                raise AssertionError(str(error)) from error
            first += len(pending)
            pending, size = [], 0
            yield table
    if pending:
        yield _block(pending, name, first, schema)


def _block(rows: list[dict[str, Any]], name: str, first: int, schema: pa.Schema | None) -> pa.Table:
    return table_of(rows, lambda number: f"{name}, row {first + number:,}", schema)


def _weight(value: Any) -> int:
    """Estimate the bytes that a value takes in Arrow."""
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
