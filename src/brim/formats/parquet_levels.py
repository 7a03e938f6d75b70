"""Dremel levels: how Parquet says which values are null, empty, or in a list.

`levels_of` walks an Arrow array down to one leaf and gives each slot its repetition and definition level;
`encode_levels` and `decode_levels` are the RLE / bit-packed hybrid of a data page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from brim.file_set import Ints
from brim.records import dataclass


@dataclass(frozen=True, slots=True)
class Levels:
    """One entry a slot. `index` is the leaf's position of the slot's value, or -1 where there is none."""

    repetition: Ints
    definition: Ints
    index: Ints
    max_repetition: int
    max_definition: int


def levels_of(array: Any, nullable: bool, path: Sequence[str] = ()) -> Levels:
    """The levels of one leaf below a column: `path` names the children of the structs on the way, if they have several.

    Below a column may be lists of lists of structs to any depth. Nullability comes from the types, as it does in the
    Parquet schema.
    """
    names = iter(path)
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = array.chunk(0) if array.num_chunks else pa.array([], array.type)
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
        if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            max_definition += 1
            max_repetition += 1
            offsets = array.offsets.to_numpy().astype(np.int64)
            live = index >= 0
            lengths = np.zeros(len(index), np.int64)
            lengths[live] = offsets[index[live] + 1] - offsets[index[live]]
            slots = np.maximum(lengths, 1)  # an empty or null list still takes a slot
            first = np.cumsum(slots) - slots
            within = np.arange(slots.sum(), dtype=np.int64) - np.repeat(first, slots)
            filled = np.repeat(lengths > 0, slots)
            begin = np.zeros(len(index), np.int64)
            begin[live] = offsets[index[live]]
            index = np.where(filled, np.repeat(begin, slots) + within, -1)
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
    """The level block of a V1 data page: its length, then one run or one stretch of packed bits."""
    if maximum == 0:
        return b""
    width = maximum.bit_length()
    if len(levels) and (levels == levels[0]).all():
        body = _varint(len(levels) << 1) + int(levels[0]).to_bytes((width + 7) // 8, "little")
    else:
        groups = -(-len(levels) // 8)
        padded = np.zeros(groups * 8, np.int64)
        padded[: len(levels)] = levels
        bits = (padded[:, None] >> np.arange(width)) & 1
        packed = np.packbits(bits.astype(np.uint8).ravel(), bitorder="little")
        body = _varint(groups << 1 | 1) + packed.tobytes()
    return len(body).to_bytes(4, "little") + body


def decode_levels(data: bytes | memoryview, count: int, maximum: int) -> tuple[Ints, int]:
    """`count` levels, and how many bytes they took."""
    if maximum == 0:
        return np.zeros(count, np.int64), 0
    width = maximum.bit_length()
    end = 4 + int.from_bytes(data[:4], "little")
    at = 4
    parts: list[Ints] = []
    have = 0
    while have < count:
        if at >= end or end > len(data):
            raise ValueError("a level block ends early")
        head, at = _read_varint(data, at)
        if head & 1:
            size = (head >> 1) * width
            bits = np.unpackbits(np.frombuffer(data[at : at + size], np.uint8), bitorder="little")
            part = (bits.reshape(-1, width).astype(np.int64) << np.arange(width)).sum(axis=1)
        else:
            size = (width + 7) // 8
            run = min(head >> 1, count)
            part = np.full(run, int.from_bytes(data[at : at + size], "little"), np.int64)
        at += size
        if not len(part):
            raise ValueError("a level block holds an empty run")
        parts.append(part)
        have += len(part)
    return np.concatenate(parts or [np.zeros(0, np.int64)])[:count], end


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
