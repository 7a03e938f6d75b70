"""Merge the schemas of parts of the same data, and cast tables to the merged schema.

Allowed differences: null and any type, integers and floats of any width, small and large texts and binaries, lists and
structs of those, missing columns and struct fields. Everything else is a conflict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import InputError

_INTEGERS = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
_UNSIGNED = {8: pa.uint8(), 16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}
_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
_BINARIES = (pa.binary(), pa.large_binary(), pa.binary_view())
_FEATURES = b"huggingface"
_UNITS = ("s", "ms", "us", "ns")


class TypesDiffer(Exception):
    """Two types that cannot be merged. `column` is a path: `a.b[]`."""

    def __init__(self, column: str, first: pa.DataType, second: pa.DataType) -> None:
        super().__init__(column, first, second)
        self.column, self.first, self.second = column, first, second

    def __str__(self) -> str:
        return f"the column {self.column!r} is {self.first} in one place and {self.second} in another"


def unify(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Merge schemas. Columns stay in the order in which they first appear."""
    whole: pa.Schema | None = None
    for schema in schemas:
        try:
            whole = schema if whole is None else merged(whole, schema)
        except TypesDiffer as error:
            raise InputError(
                f"{str(error).capitalize()}, and no type can store both.",
                hint="Use one type for the column.",
                column=error.column,
            ) from error
    return pa.schema([]) if whole is None else whole


def merged(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Merge two schemas; raise TypesDiffer if types conflict."""
    if first.equals(second, check_metadata=True):
        return first
    return pa.schema(_merged_fields(list(first), list(second), ""), _merged_metadata(first, second))


def _merged_metadata(first: pa.Schema, second: pa.Schema) -> dict[bytes, bytes] | None:
    """Return equal metadata, or equal `datasets` features without the fingerprint, which differs per file."""
    if first.metadata == second.metadata:
        return first.metadata  # type: ignore[no-any-return]
    features = [stored_features(schema) for schema in (first, second)]
    if features[0] is None or features[0] != features[1] or first.names != second.names:
        return None
    return {_FEATURES: json.dumps({"info": {"features": features[0]}}).encode()}


def stored_features(schema: pa.Schema) -> Any:
    """Return the `datasets` features in a schema's metadata, or None."""
    try:
        return json.loads((schema.metadata or {})[_FEATURES])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return None


def _merged_fields(first: list[pa.Field], second: list[pa.Field], above: str) -> list[pa.Field]:
    second_by_name = {field.name: field for field in second}
    first_names = {field.name for field in first}
    fields = []
    for field in first:
        second_field = second_by_name.get(field.name)
        if second_field is None:
            fields.append(field.with_nullable(True))
        elif field.equals(second_field, check_metadata=True):
            fields.append(field)
        else:
            kind = merged_type(field.type, second_field.type, above + field.name)
            metadata = field.metadata if field.metadata == second_field.metadata else None
            fields.append(pa.field(field.name, kind, field.nullable or second_field.nullable, metadata))
    return fields + [field.with_nullable(True) for field in second if field.name not in first_names]


def merged_type(first: pa.DataType, second: pa.DataType, column: str) -> pa.DataType:
    """Merge two types; raise TypesDiffer if they conflict."""
    if first.equals(second) or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if pa.types.is_dictionary(first) or pa.types.is_dictionary(second):
        return _merged_dictionary(first, second, column)
    for family in (_TEXTS, _BINARIES):
        if first in family and second in family:
            return family[1]
    if _is_number(first) and _is_number(second):
        return _merged_number(first, second)
    if _is_list(first) and _is_list(second):
        return _merged_list(first, second, column)
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        return pa.struct(_merged_fields(list(first), list(second), column + "."))
    if pa.types.is_timestamp(first) and pa.types.is_timestamp(second) and first.tz == second.tz:
        return pa.timestamp(max(first.unit, second.unit, key=_UNITS.index), first.tz)
    raise TypesDiffer(column, first, second)


def contains_type(kind: pa.DataType, test: Callable[[pa.DataType], bool]) -> bool:
    """Return whether a type, or a type nested in it, passes a test such as `pa.types.is_floating`."""
    return test(kind) or any(contains_type(kind.field(number).type, test) for number in range(kind.num_fields))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _merged_number(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    if pa.types.is_floating(first) and pa.types.is_floating(second):
        return max(first, second, key=lambda kind: kind.bit_width)
    if pa.types.is_floating(first) or pa.types.is_floating(second):
        return pa.float64()
    signed = [pa.types.is_signed_integer(kind) for kind in (first, second)]
    width = max(first.bit_width, second.bit_width)
    if all(signed) or not any(signed):
        return _INTEGERS[width] if signed[0] else _UNSIGNED[width]
    unsigned = second if signed[0] else first
    width = max(width, 2 * unsigned.bit_width)
    return _INTEGERS.get(width, pa.float64())


def _merged_list(first: pa.DataType, second: pa.DataType, column: str) -> pa.DataType:
    item = first.value_field.with_type(merged_type(first.value_type, second.value_type, column + "[]"))
    item = item.with_nullable(first.value_field.nullable or second.value_field.nullable)
    fixed = pa.types.is_fixed_size_list
    if fixed(first) and fixed(second) and first.list_size == second.list_size:
        return pa.list_(item, first.list_size)
    large = pa.types.is_large_list(first) or pa.types.is_large_list(second)
    return pa.large_list(item) if large else pa.list_(item)


def _merged_dictionary(first: pa.DataType, second: pa.DataType, column: str) -> pa.DataType:
    if pa.types.is_dictionary(first) and pa.types.is_dictionary(second):
        index = _merged_number(first.index_type, second.index_type)
        value = merged_type(first.value_type, second.value_type, column)
        if pa.types.is_integer(index):
            return pa.dictionary(index, value, first.ordered and second.ordered)
        return value
    plain = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (first, second)]
    return merged_type(plain[0], plain[1], column)


def cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast a table to a schema: same order, missing columns and struct fields null, types widened.

    Columns that are not in the schema are dropped.
    """
    if table.schema.equals(schema, check_metadata=True):
        return table
    columns = []
    for field in schema:
        index = table.schema.get_field_index(field.name)
        try:
            if index < 0:
                columns.append(pa.nulls(table.num_rows, field.type))
            elif (column := table.column(index)).type.equals(field.type):
                columns.append(column)
            else:
                chunks = [_cast_array(chunk, field.type) for chunk in column.chunks]
                columns.append(pa.chunked_array(chunks, field.type))
        except pa.ArrowInvalid as error:
            raise InputError(
                f"The column {field.name!r} is {table.schema.field(index).type} in some rows and {field.type} in "
                f"others: its values would change.",
                hint="Use one type for the column in all rows.",
                column=field.name,
            ) from error
    if not columns:
        return table.select([]).replace_schema_metadata(schema.metadata)
    return pa.Table.from_arrays(columns, schema=schema)


def _cast_array(array: Any, kind: pa.DataType) -> Any:
    own = array.type
    if own.equals(kind):
        return array
    if pa.types.is_null(own):
        return pa.nulls(len(array), kind)
    if pa.types.is_dictionary(own) and not pa.types.is_dictionary(kind):
        return _cast_array(array.dictionary_decode(), kind)
    if pa.types.is_struct(own) and pa.types.is_struct(kind):
        return _cast_struct(array, kind)
    if _is_list(own) and _is_list(kind) and not pa.types.is_fixed_size_list(kind):
        return _cast_list(array, kind)
    if pa.types.is_integer(own) and pa.types.is_floating(kind):
        floats = array.cast(kind, safe=False)
        if not floats.cast(own).equals(array):  # or ArrowInvalid, where it is too large
            raise pa.ArrowInvalid(f"{kind} does not hold all of its integers")
        return floats
    return array.cast(kind)


def _cast_struct(array: Any, kind: pa.DataType) -> Any:
    names = {field.name: number for number, field in enumerate(array.type)}
    parts = array.flatten()  # honours the offset, and the nulls of the struct
    children = [
        _cast_array(parts[names[field.name]], field.type) if field.name in names else pa.nulls(len(array), field.type)
        for field in kind
    ]
    mask = array.is_null() if array.null_count else None
    if not children:
        return pa.array([None if absent else {} for absent in array.is_null().to_pylist()], kind)
    return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)


def _cast_list(array: Any, kind: pa.DataType) -> Any:
    values = _cast_array(array.flatten(), kind.value_type)  # without the values of null lists
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(array.type):
        lengths = np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    large = pa.types.is_large_list(kind)
    array_class = pa.LargeListArray if large else pa.ListArray
    mask = array.is_null() if array.null_count else None
    return array_class.from_arrays(pa.array(offsets, pa.int64() if large else pa.int32()), values, type=kind, mask=mask)
