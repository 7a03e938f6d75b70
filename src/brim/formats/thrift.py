"""Thrift's compact protocol, without schemas: enough to rewrite a Parquet footer and lose nothing.

A struct is a dict of field id to `(type, value)`, a list is a `List` with its element type. A boolean has
the type TRUE and its value; on the wire the type is the value. Every field is kept, known or not, so a
footer that is decoded and encoded again is the same footer. Maps and sets do not occur in Parquet footers
and are refused.
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
    """The struct at `start`, and the position after it."""
    reader = _Reader(memoryview(data), start)
    try:
        return reader.struct(), reader.at
    except (IndexError, struct.error, RecursionError) as error:
        raise ThriftError(f"cut short or broken at byte {reader.at}") from error


def encode(fields: Struct) -> bytes:
    out = bytearray()
    _write_struct(out, fields)
    return bytes(out)


class _Reader:
    def __init__(self, data: memoryview, at: int) -> None:
        self.data, self.at = data, at

    def byte(self) -> int:
        value = self.data[self.at]
        self.at += 1
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
                raise ThriftError(f"a number is too long at byte {self.at}")

    def zigzag(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def struct(self) -> Struct:
        fields: Struct = {}
        last = 0
        while head := self.byte():
            kind = head & 0x0F
            last = last + (head >> 4) if head >> 4 else self.zigzag()
            fields[last] = (TRUE, kind == TRUE) if kind in (TRUE, FALSE) else (kind, self.value(kind))
        return fields

    def value(self, kind: int) -> Any:
        if kind in (I16, I32, I64):
            return self.zigzag()
        if kind == BINARY:
            size = self.varint()
            self.at += size
            if self.at > len(self.data):
                raise ThriftError("a string runs past the end")
            return bytes(self.data[self.at - size : self.at])
        if kind == STRUCT:
            return self.struct()
        if kind == LIST:
            return self.list()
        if kind in (TRUE, FALSE):  # inside a list
            return self.byte() == TRUE
        if kind == BYTE:
            return self.byte()
        if kind == DOUBLE:
            self.at += 8
            return struct.unpack("<d", self.data[self.at - 8 : self.at])[0]
        raise ThriftError(f"type {kind} does not occur in Parquet, at byte {self.at}")

    def list(self) -> List:
        head = self.byte()
        size = head >> 4
        if size == 15:
            size = self.varint()
        if size > len(self.data):
            raise ThriftError(f"a list is longer than the data at byte {self.at}")
        kind = head & 0x0F
        return List(kind, [self.value(kind) for _ in range(size)])


def _write_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _write_zigzag(out: bytearray, value: int) -> None:
    _write_varint(out, value << 1 if value >= 0 else (-value << 1) - 1)


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
        _write_varint(out, len(value))
        out += value
    elif kind == STRUCT:
        _write_struct(out, value)
    elif kind == LIST:
        count = len(value.items)
        if count < 15:
            out.append(count << 4 | value.kind)
        else:
            out.append(0xF0 | value.kind)
            _write_varint(out, count)
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
