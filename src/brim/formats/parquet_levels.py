"""Nulls, lists and structs of a Parquet column: its levels, and columns with bytes at any depth.

Repetition and definition levels mark the nulls, empty lists and list elements of a leaf. `levels_of` computes them from
an Arrow array. `encode_levels` and `decode_levels` write and read the level block of a data page, a mix of runs and
packed bits (RLE hybrid).

A column with bytes somewhere inside is a tree. A file table has a column of the same shape with a number instead of
each value (`numbered_type`); a skeleton has empty bytes (`with_empty_bytes`). `assemble_leaf` builds the shape of one
leaf from its levels, `merge_leaves` combines leaves that were built or read separately. Columns with maps or lists of
fixed length above their bytes are not supported (`byte_leaves` returns None) and are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.file_set import Ints
from brim.formats.thrift import write_varint
from brim.partition import list_lengths, running
from brim.records import dataclass

OPTIONAL, REPEATED = 1, 2  # fields that add a level, as Parquet numbers them


class Damaged(ValueError):
    """A page contradicts its header."""


@dataclass(frozen=True, slots=True)
class Levels:
    """One entry per slot. `index` is the position of the slot's value in the leaf, or -1 if it has none."""

    repetition: Ints
    definition: Ints
    index: Ints
    max_repetition: int
    max_definition: int


def is_list_type(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def single_array(column: Any) -> Any:
    """Combine the chunks of a column."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
    return array


def levels_of(array: Any, nullable: bool, path: Sequence[str] = ()) -> Levels:
    """Compute the levels of one leaf of a column; `path` names the children of structs that have several.

    The column may have lists and structs at any depth. Nullability comes from the types, as in the Parquet schema.
    """
    names = iter(path)
    array = single_array(array)
    index = np.arange(len(array), dtype=np.int64)
    repetition = np.zeros(len(array), np.int64)
    definition = np.zeros(len(array), np.int64)
    max_repetition = max_definition = 0
    while True:
        if nullable:
            max_definition += 1
            live = index >= 0
            valid = np.zeros(len(index), bool)
            if live.any():
                valid[live] = array.is_valid().to_numpy(zero_copy_only=False)[index[live]]
            definition += valid
            index = np.where(valid, index, -1)
        if is_list_type(array.type):
            max_definition += 1
            max_repetition += 1
            offsets = array.offsets.to_numpy().astype(np.int64)
            live = index >= 0
            lengths = np.zeros(len(index), np.int64)
            lengths[live] = offsets[index[live] + 1] - offsets[index[live]]
            slots = np.maximum(lengths, 1)  # an empty or null list still takes a slot
            first_slots = np.cumsum(slots) - slots
            within = np.arange(slots.sum(), dtype=np.int64) - np.repeat(first_slots, slots)
            filled = np.repeat(lengths > 0, slots)
            starts = np.zeros(len(index), np.int64)
            starts[live] = offsets[index[live]]
            index = np.where(filled, np.repeat(starts, slots) + within, -1)
            definition = np.repeat(definition, slots) + filled
            repetition = np.where(within > 0, max_repetition, np.repeat(repetition, slots))
            nullable = array.type.value_field.nullable
            array = array.values
        elif pa.types.is_struct(array.type):
            name = next(names, None)
            number = array.type.get_field_index(name) if name is not None else array.type.num_fields - 1
            if number < 0 or (name is None and number):
                raise ValueError(f"{array.type} has no single child {name!r}")
            nullable = array.type.field(number).nullable
            array = array.field(number)
        else:
            return Levels(repetition, definition, index, max_repetition, max_definition)


def encode_levels(levels: Ints, maximum: int) -> bytes:
    """Encode the level block of a V1 data page: its length, then one run or one sequence of packed bits."""
    if maximum == 0:
        return b""
    width = maximum.bit_length()
    body = bytearray()
    if len(levels) and (levels == levels[0]).all():
        write_varint(body, len(levels) << 1)
        body += int(levels[0]).to_bytes((width + 7) // 8, "little")
    else:
        groups = -(-len(levels) // 8)
        padded = np.zeros(groups * 8, np.int64)
        padded[: len(levels)] = levels
        bits = (padded[:, None] >> np.arange(width)) & 1
        write_varint(body, groups << 1 | 1)
        body += np.packbits(bits.astype(np.uint8).ravel(), bitorder="little").tobytes()
    return len(body).to_bytes(4, "little") + body


def decode_levels(data: bytes | memoryview, count: int, maximum: int) -> tuple[Ints, int]:
    """Decode `count` levels; return the number of bytes that they took too."""
    if maximum == 0:
        return np.zeros(count, np.int64), 0
    width = maximum.bit_length()
    end = 4 + int.from_bytes(data[:4], "little")
    position = 4
    parts = [np.zeros(0, np.int64)]
    decoded = 0
    while decoded < count:
        if position >= end or end > len(data):
            raise ValueError("a level block ends early")
        head, position = read_varint(data, position)
        if head & 1:
            size = (head >> 1) * width
            packed = data[position : position + size]
            part = unpack_bits(packed, width, len(packed) * 8 // width)
        else:
            size = (width + 7) // 8
            level = int.from_bytes(data[position : position + size], "little")
            part = np.full(min(head >> 1, count), level, np.int64)
        position += size
        if not len(part):
            raise ValueError("a level block holds an empty run")
        parts.append(part)
        decoded += len(part)
    return np.concatenate(parts)[:count], end


def unpack_bits(data: bytes | memoryview, width: int, count: int) -> Ints:
    """Unpack `count` unsigned numbers of `width` bits each, at most 64."""
    if not width:
        return np.zeros(count, np.int64)
    padded_width = next(size for size in (8, 16, 32, 64) if width <= size)
    bits = np.zeros((count, padded_width), np.uint8)
    unpacked = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    bits[:, :width] = unpacked[: count * width].reshape(count, width)
    return np.packbits(bits, bitorder="little").view(f"<u{padded_width // 8}").astype(np.int64)


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Read a number of at most 64 bits; return the position after it too."""
    value = shift = 0
    while shift < 64 and position < len(data):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7
    raise Damaged("a number in a page does not end")


Path = tuple[str, ...]  # the names of the struct fields from a column down to a leaf


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _list_type(kind: pa.DataType, element: pa.DataType) -> pa.DataType:
    """Return the list type with other elements."""
    field = kind.value_field.with_type(element)
    return pa.large_list(field) if pa.types.is_large_list(kind) else pa.list_(field)


def byte_leaves(kind: pa.DataType, nullable: bool = True) -> list[tuple[Path, tuple[int, ...]]] | None:
    """Return the path and levels of each leaf of bytes in a column; None if a leaf is not supported."""
    own = (OPTIONAL,) if nullable else ()
    if _is_bytes(kind):
        return [((), own)]
    if pa.types.is_struct(kind):
        parts = [(field.name, byte_leaves(field.type, field.nullable)) for field in kind]
        if any(leaves is None for _, leaves in parts) or len({field.name for field in kind}) < kind.num_fields:
            return None
        return [((name, *path), own + levels) for name, leaves in parts for path, levels in leaves or ()]
    if is_list_type(kind):
        elements = byte_leaves(kind.value_type, kind.value_field.nullable)
        return None if elements is None else [(path, (*own, REPEATED, *levels)) for path, levels in elements]
    if any(byte_leaves(kind.field(number).type) != [] for number in range(kind.num_fields)):
        return None
    return None if pa.types.is_dictionary(kind) and byte_leaves(kind.value_type) != [] else []


def map_type(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Replace the types inside structs, lists and maps."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(map_type(field.type, change)) for field in kind])
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(map_type(kind.value_type, change)), kind.list_size)
    if is_list_type(kind):
        return _list_type(kind, map_type(kind.value_type, change))
    if pa.types.is_map(kind):
        inside = map_type(kind.key_type, change), map_type(kind.item_type, change)
        return kind if inside == (kind.key_type, kind.item_type) else pa.map_(*inside, kind.keys_sorted)
    return change(kind)


def plain_type(kind: pa.DataType, text: pa.DataType | None = None, binary: pa.DataType | None = None) -> pa.DataType:
    """Return a type without views of texts and binaries, which few functions of pyarrow take."""
    text, binary = text or pa.string(), binary or pa.binary()
    replaced = {pa.string_view(): text, pa.binary_view(): binary}
    return map_type(kind, lambda inner: replaced.get(inner, inner))


def numbered_type(kind: pa.DataType) -> pa.DataType:
    """Return the same type with numbers instead of bytes."""
    return map_type(kind, lambda inner: pa.int64() if _is_bytes(inner) else inner)


def nulls_of(array: Any) -> Any:
    """Return which values of an array are null, as the mask that pyarrow's constructors take; None if none is."""
    return array.is_null() if array.null_count else None


def list_array(kind: pa.DataType, lengths: Ints, values: Any, null_mask: Any = None) -> Any:
    """Return an array of lists, of a list type, with these lengths and values."""
    is_large = pa.types.is_large_list(kind)
    offsets = pa.array(running(lengths), pa.int64() if is_large else pa.int32())
    return (pa.LargeListArray if is_large else pa.ListArray).from_arrays(offsets, values, type=kind, mask=null_mask)


def leaf_cells(array: Any, kind: pa.DataType, rows: Ints | None = None) -> Iterator[tuple[Any, Ints]]:
    """Yield the numbers of each leaf, with nulls, and the row of each. `kind` is the type with bytes."""
    rows = np.arange(len(array), dtype=np.int64) if rows is None else rows
    if _is_bytes(kind):
        yield array, rows
    elif pa.types.is_struct(kind):
        for field, child in zip(kind, array.flatten(), strict=True):
            yield from leaf_cells(child, field.type, rows)
    elif is_list_type(kind):
        yield from leaf_cells(array.flatten(), kind.value_type, np.repeat(rows, list_lengths(array)))


def map_leaves(array: Any, kind: pa.DataType, out: pa.DataType, change: Callable[[Any, pa.DataType], Any]) -> Any:
    """Replace the leaves: `change` gets the numbers of a leaf and its type in `out`. `kind` is the type with bytes."""
    if _is_bytes(kind):
        return change(array, out)
    if pa.types.is_struct(kind) and kind.num_fields:
        children = zip(kind, out, array.flatten(), strict=True)
        parts = [map_leaves(child, field.type, new_field.type, change) for field, new_field, child in children]
        return pa.StructArray.from_arrays(parts, fields=list(out), mask=nulls_of(array))
    if is_list_type(kind):
        values = map_leaves(array.flatten(), kind.value_type, out.value_type, change)
        return list_array(out, list_lengths(array), values, nulls_of(array))
    return array


def with_empty_bytes(array: Any, kind: pa.DataType) -> Any:
    """Replace numbers by empty bytes, nulls by nulls."""
    null, empty = pa.scalar(None, pa.binary()), pa.scalar(b"", pa.binary())
    return map_leaves(array, kind, kind, lambda cells, out: pc.if_else(cells.is_valid(), empty, null).cast(out))


def without_bytes(array: Any) -> Any | None:
    """Remove the leaves of bytes from a column; return None if nothing remains."""
    kind = array.type
    if pa.types.is_struct(kind):
        children = [(field, without_bytes(array.field(number))) for number, field in enumerate(kind)]
        remaining = [(field, child) for field, child in children if child is not None]
        if not remaining and kind.num_fields:
            return None
        fields = [field.with_type(child.type) for field, child in remaining]
        return pa.StructArray.from_arrays([child for _, child in remaining], fields=fields, mask=nulls_of(array))
    if is_list_type(kind):
        elements = without_bytes(array.flatten())
        if elements is None:
            return None
        return list_array(_list_type(kind, elements.type), list_lengths(array), elements, nulls_of(array))
    return None if _is_bytes(kind) else array


def assemble_leaf(field: pa.Field, path: Path, repetition: Ints, definition: Ints, numbers: pa.Array) -> pa.Array:
    """Build the shape of a column with one leaf from the levels of its slots; `numbers` has one entry per slot.

    The levels are those of the types, as `byte_leaves` returns them.
    """

    def build(field: pa.Field, path: Path, slots: Ints, list_depth: int, defined: int) -> Any:
        kind = field.type
        defined += field.nullable
        is_null = definition[slots] < defined
        null_mask = pa.array(is_null) if is_null.any() else None
        if _is_bytes(kind):
            cells = numbers.take(pa.array(slots))
            return cells if null_mask is None else pc.if_else(null_mask, pa.scalar(None, pa.int64()), cells)
        if pa.types.is_struct(kind):
            child_field = kind.field(path[0])
            child = build(child_field, path[1:], slots, list_depth, defined)
            return pa.StructArray.from_arrays([child], fields=[child_field.with_type(child.type)], mask=null_mask)
        elements = np.flatnonzero((repetition <= list_depth + 1) & (definition > defined))
        edges = np.searchsorted(elements, np.append(slots, len(definition)))
        child = build(kind.value_field, path, elements, list_depth + 1, defined + 1)
        return list_array(_list_type(kind, child.type), np.diff(edges), child, null_mask)

    return build(field, path, np.flatnonzero(repetition == 0), 0, 0)


def merge_leaves(kind: pa.DataType, parts: Sequence[Any]) -> Any:
    """Combine leaves of one column that were built or read separately. Raises ValueError if their shapes differ."""
    first = parts[0]
    if any(len(part) != len(first) for part in parts):
        raise ValueError("the columns of a struct have other rows")
    if pa.types.is_struct(kind) and kind.num_fields:
        children = []
        for field in kind:
            numbers = [part.type.get_field_index(field.name) for part in parts]
            own = [part.field(number) for part, number in zip(parts, numbers, strict=True) if number >= 0]
            children.append(merge_leaves(field.type, own))
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=nulls_of(first))
    if is_list_type(kind) and len(parts) > 1:
        lengths = list_lengths(first)
        if any((list_lengths(part) != lengths).any() for part in parts[1:]):
            raise ValueError("the lists of a struct have different lengths")
        elements = merge_leaves(kind.value_type, [part.flatten() for part in parts])
        return list_array(kind, lengths, elements, nulls_of(first))
    return first
