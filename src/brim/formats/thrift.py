"""Decode and encode Thrift's compact protocol without schemas, to rewrite Parquet footers without losses.

A struct is a dict from field id to `(type, value)`, a list is a `List` with its element type. A boolean has the type
TRUE and its value; in the encoded bytes the type is the value. Unknown fields are kept, so that a footer that is
decoded and encoded again has the same bytes. Maps and sets do not occur in Parquet footers and are refused.
"""

from __future__ import annotations

import struct
from typing import Any

from brim.records import dataclass

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 12

Struct = dict[int, tuple[int, Any]]


@dataclass(slots=True)
class List:
    """A Thrift list: the type of its elements, and the elements."""

    kind: int
    items: list[Any]


class ThriftError(ValueError):
    """The bytes are not a compact-protocol struct."""


def decode(data: bytes | memoryview, start: int = 0) -> tuple[Struct, int]:
    """Decode the struct at `start`; return the position after it too."""
    reader = _Reader(memoryview(data), start)
    try:
        return reader.struct(), reader.position
    except (IndexError, struct.error, RecursionError) as error:
        raise ThriftError(f"cut short or broken at byte {reader.position}") from error


def encode(fields: Struct) -> bytes:
    out = bytearray()
    _write_struct(out, fields)
    return bytes(out)


class _Reader:
    def __init__(self, data: memoryview, position: int) -> None:
        self.data, self.position = data, position

    def byte(self) -> int:
        value = self.data[self.position]
        self.position += 1
        return int(value)

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ThriftError(f"a number is too long at byte {self.position}")

    def zigzag(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def struct(self) -> Struct:
        fields: Struct = {}
        number = 0
        while head := self.byte():
            kind = head & 0x0F
            number = number + (head >> 4) if head >> 4 else self.zigzag()
            fields[number] = (TRUE, kind == TRUE) if kind in (TRUE, FALSE) else (kind, self.value(kind))
        return fields

    def value(self, kind: int) -> Any:
        if kind in (I16, I32, I64):
            return self.zigzag()
        if kind == BINARY:
            size = self.varint()
            self.position += size
            if self.position > len(self.data):
                raise ThriftError("a string runs past the end")
            return bytes(self.data[self.position - size : self.position])
        if kind == STRUCT:
            return self.struct()
        if kind == LIST:
            head = self.byte()
            size = head >> 4 if head >> 4 < 15 else self.varint()
            if size > len(self.data):
                raise ThriftError(f"a list is longer than the data at byte {self.position}")
            item_kind = head & 0x0F
            return List(item_kind, [self.value(item_kind) for _ in range(size)])
        if kind in (TRUE, FALSE):  # inside a list
            return self.byte() == TRUE
        if kind == BYTE:
            return self.byte()
        if kind == DOUBLE:
            self.position += 8
            return struct.unpack("<d", self.data[self.position - 8 : self.position])[0]
        raise ThriftError(f"type {kind} does not occur in Parquet, at byte {self.position}")


def write_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _write_zigzag(out: bytearray, value: int) -> None:
    write_varint(out, value << 1 if value >= 0 else (-value << 1) - 1)


def _write_struct(out: bytearray, fields: Struct) -> None:
    last = 0
    for number in sorted(fields):
        kind, value = fields[number]
        if kind in (TRUE, FALSE):
            kind = TRUE if value else FALSE
        if 0 < number - last <= 15:
            out.append((number - last) << 4 | kind)
        else:
            out.append(kind)
            _write_zigzag(out, number)
        last = number
        if kind not in (TRUE, FALSE):
            _write_value(out, kind, value)
    out.append(0)


def _write_value(out: bytearray, kind: int, value: Any) -> None:
    if kind in (I16, I32, I64):
        _write_zigzag(out, value)
    elif kind == BINARY:
        write_varint(out, len(value))
        out += value
    elif kind == STRUCT:
        _write_struct(out, value)
    elif kind == LIST:
        count = len(value.items)
        if count < 15:
            out.append(count << 4 | value.kind)
        else:
            out.append(0xF0 | value.kind)
            write_varint(out, count)
        for item in value.items:
            _write_value(out, value.kind, item)
    elif kind in (TRUE, FALSE):
        out.append(TRUE if value else FALSE)
    elif kind == BYTE:
        out.append(value)
    elif kind == DOUBLE:
        out += struct.pack("<d", value)
    else:
        raise ThriftError(f"type {kind} does not occur in Parquet")
