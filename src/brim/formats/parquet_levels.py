"""Repetition and definition levels, which mark the nulls, empty lists and list elements of a Parquet column.

`levels_of` computes the levels of one leaf of an Arrow array. `encode_levels` and `decode_levels` write and read the
level block of a data page, a mix of runs and packed bits (RLE hybrid).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from brim.file_set import Ints
from brim.formats.thrift import write_varint
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
