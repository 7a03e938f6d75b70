"""Bytes inside of structs and lists to any depth, as numbers of values that lie elsewhere.

A column that holds bytes somewhere inside is a tree. In a file table it has the same shape, with a number where its
bytes would be (`numbered_type`); in a skeleton it has empty bytes there (`emptied`). `assembled` makes the shape of one
leaf from the levels of its Parquet column, `merged` puts leaves that were made or read apart together again.

Columns of one file a row, or of one list of them, are not made here: sources/value_places.py. What has maps or lists of
fixed length on the way to its bytes is not taken apart, and is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.file_set import Ints

Path = tuple[str, ...]  # the names of the struct fields on the way from a column to a leaf
OPTIONAL, REPEATED = 1, 2  # as Parquet numbers what adds a level


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def byte_leaves(kind: pa.DataType, nullable: bool = True) -> list[tuple[Path, tuple[int, ...]]] | None:
    """The leaves of bytes below a column, with what adds a level on the way; None if one cannot be taken apart."""
    own = (OPTIONAL,) if nullable else ()
    if _is_bytes(kind):
        return [((), own)]
    if pa.types.is_struct(kind):
        parts = [(field.name, byte_leaves(field.type, field.nullable)) for field in kind]
        if any(leaves is None for _, leaves in parts) or len({field.name for field in kind}) < kind.num_fields:
            return None
        return [((name, *path), own + levels) for name, leaves in parts for path, levels in leaves or ()]
    if _is_list(kind):
        leaves = byte_leaves(kind.value_type, kind.value_field.nullable)
        return None if leaves is None else [(path, (*own, REPEATED, *levels)) for path, levels in leaves]
    if any(byte_leaves(kind.field(number).type) != [] for number in range(kind.num_fields)):
        return None
    return None if pa.types.is_dictionary(kind) and byte_leaves(kind.value_type) != [] else []


def _with(kind: pa.DataType, inner: pa.Field) -> pa.DataType:
    return pa.large_list(inner) if pa.types.is_large_list(kind) else pa.list_(inner)


def numbered_type(kind: pa.DataType) -> pa.DataType:
    """The same type with numbers in the place of bytes."""
    if _is_bytes(kind):
        return pa.int64()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(numbered_type(field.type)) for field in kind])
    return _with(kind, kind.value_field.with_type(numbered_type(kind.value_type))) if _is_list(kind) else kind


def _lengths(array: Any) -> Ints:
    return np.asarray(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64)


def _absent(array: Any) -> Any:
    return array.is_null() if array.null_count else None


def _listed(kind: pa.DataType, lengths: Ints, values: Any, absent: Any) -> Any:
    large = pa.types.is_large_list(kind)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64() if large else pa.int32())
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, values, type=kind, mask=absent)


def leaf_cells(array: Any, kind: pa.DataType, rows: Ints | None = None) -> Iterator[tuple[Any, Ints]]:
    """The numbers of each leaf of bytes, nulls among them, and the row of each. `kind` is the type with bytes."""
    rows = np.arange(len(array), dtype=np.int64) if rows is None else rows
    if _is_bytes(kind):
        yield array, rows
    elif pa.types.is_struct(kind):
        for field, child in zip(kind, array.flatten(), strict=True):
            yield from leaf_cells(child, field.type, rows)
    elif _is_list(kind):
        yield from leaf_cells(array.flatten(), kind.value_type, np.repeat(rows, _lengths(array)))


def changed(array: Any, kind: pa.DataType, out: pa.DataType, change: Callable[[Any, pa.DataType], Any]) -> Any:
    """The same shape with other leaves: `change` is given the numbers of a leaf and the type that it has in `out`."""
    if _is_bytes(kind):
        return change(array, out)
    if pa.types.is_struct(kind) and kind.num_fields:
        children = zip(kind, out, array.flatten(), strict=True)
        parts = [changed(child, field.type, made.type, change) for field, made, child in children]
        return pa.StructArray.from_arrays(parts, fields=list(out), mask=_absent(array))
    if _is_list(kind):
        values = changed(array.flatten(), kind.value_type, out.value_type, change)
        return _listed(out, _lengths(array), values, _absent(array))
    return array


def emptied(array: Any, kind: pa.DataType) -> Any:
    """With empty bytes where there are numbers."""

    def empty(cells: Any, of: pa.DataType) -> Any:
        none = pa.scalar(None, pa.binary())
        return pc.if_else(cells.is_valid(), pa.scalar(b"", pa.binary()), none).cast(of)

    return changed(array, kind, kind, empty)


def without_bytes(array: Any) -> Any | None:
    """A column as it is read without its leaves of bytes; None if nothing is left."""
    kind = array.type
    if pa.types.is_struct(kind):
        found = [(field, without_bytes(array.field(at))) for at, field in enumerate(kind)]
        kept = [(field, child) for field, child in found if child is not None]
        fields = [field.with_type(child.type) for field, child in kept]
        made = pa.StructArray.from_arrays([child for _, child in kept], fields=fields, mask=_absent(array))
        return made if kept or not kind.num_fields else None
    if _is_list(kind):
        inner = without_bytes(array.flatten())
        if inner is None:
            return None
        return _listed(_with(kind, kind.value_field.with_type(inner.type)), _lengths(array), inner, _absent(array))
    return None if _is_bytes(kind) else array


def assembled(field: pa.Field, path: Path, repetition: Ints, definition: Ints, numbers: pa.Array) -> pa.Array:
    """One leaf of a column in its shape, other leaves left out, by the levels of its slots; `numbers` has one for each.

    Levels are those of the types, as `byte_leaves` has them.
    """

    def made(field: pa.Field, path: Path, slots: Ints, depth: int, defined: int) -> Any:
        kind = field.type
        defined += field.nullable
        here = definition[slots]
        absent = None if (here >= defined).all() else pa.array(here < defined)
        if _is_bytes(kind):
            cells = numbers.take(pa.array(slots))
            return cells if absent is None else pc.if_else(absent, pa.scalar(None, pa.int64()), cells)
        if pa.types.is_struct(kind):
            inner = kind.field(path[0])
            child = made(inner, path[1:], slots, depth, defined)
            return pa.StructArray.from_arrays([child], fields=[inner.with_type(child.type)], mask=absent)
        inside = np.flatnonzero((repetition <= depth + 1) & (definition > defined))
        edges = np.searchsorted(inside, np.append(slots, len(definition)))
        child = made(kind.value_field, path, inside, depth + 1, defined + 1)
        return _listed(_with(kind, kind.value_field.with_type(child.type)), np.diff(edges), child, absent)

    return made(field, path, np.flatnonzero(repetition == 0), 0, 0)


def merged(kind: pa.DataType, parts: Sequence[Any]) -> Any:
    """Leaves of one column that were made or read apart, put together as `kind`. ValueError if they do not fit."""
    first = parts[0]
    if any(len(part) != len(first) for part in parts):
        raise ValueError("the columns of a struct have other rows")
    if pa.types.is_struct(kind) and kind.num_fields:
        children = []
        for field in kind:
            own = [part.field(at) for part in parts if (at := part.type.get_field_index(field.name)) >= 0]
            children.append(merged(field.type, own))
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=_absent(first))
    if _is_list(kind) and len(parts) > 1:
        lengths = _lengths(first)
        if any((_lengths(part) != lengths).any() for part in parts[1:]):
            raise ValueError("the lists of a struct have other lengths")
        return _listed(kind, lengths, merged(kind.value_type, [part.flatten() for part in parts]), _absent(first))
    return first
