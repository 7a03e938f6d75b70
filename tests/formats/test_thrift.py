from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.formats import thrift
from brim.formats.thrift import BINARY, BYTE, DOUBLE, I16, I32, I64, LIST, STRUCT, TRUE, List, ThriftError

_scalars: dict[int, st.SearchStrategy[Any]] = {
    TRUE: st.booleans(),
    BYTE: st.integers(0, 255),
    I16: st.integers(-(2**15), 2**15 - 1),
    I32: st.integers(-(2**31), 2**31 - 1),
    I64: st.integers(-(2**63), 2**63 - 1),
    DOUBLE: st.floats(allow_nan=False),
    BINARY: st.binary(max_size=40),
}
_field = st.sampled_from(sorted(_scalars)).flatmap(lambda kind: st.tuples(st.just(kind), _scalars[kind]))
_list = st.sampled_from(sorted(_scalars)).flatmap(
    lambda kind: st.lists(_scalars[kind], max_size=20).map(lambda items: (LIST, List(kind, items)))
)
_struct = st.recursive(
    st.dictionaries(st.integers(1, 300), st.one_of(_field, _list), max_size=6),
    lambda inner: st.dictionaries(
        st.integers(1, 40),
        st.one_of(
            _field,
            inner.map(lambda fields: (STRUCT, fields)),
            st.lists(inner, max_size=17).map(lambda items: (LIST, List(STRUCT, items))),
        ),
        max_size=5,
    ),
    max_leaves=12,
)


@given(_struct)
def test_structs_come_back_as_they_were(fields: thrift.Struct) -> None:
    """Encoding and decoding a struct returns the same struct and finds its end."""
    data = thrift.encode(fields)
    decoded, end = thrift.decode(data + b"rest")
    assert (decoded, end) == (fields, len(data))


@given(_struct, st.integers(0, 10_000))
def test_cut_data_is_an_error_and_nothing_else(fields: thrift.Struct, cut: int) -> None:
    """A truncated struct raises ThriftError and no other error."""
    data = thrift.encode(fields)
    with pytest.raises(ThriftError):
        thrift.decode(data[: cut % len(data)])


@given(st.binary(max_size=200))
def test_noise_is_decoded_or_refused(data: bytes) -> None:
    """Arbitrary bytes are decoded or raise ThriftError."""
    try:
        thrift.decode(data)
    except ThriftError:
        pass


def test_a_real_footer_is_kept_to_the_byte() -> None:
    """Decoding and encoding a footer of pyarrow returns the same bytes."""
    table = pa.table({"a": [1, None, 3], "b": [["x"], [], None], "c": [{"d": 1.5}, None, {"d": None}]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_index=True)
    data = sink.getvalue().to_pybytes()
    length = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - length : -8]
    decoded, end = thrift.decode(footer)
    assert end == length
    assert thrift.encode(decoded) == footer


@pytest.mark.parametrize(
    ("fields", "wire"),
    [
        ({}, b"\x00"),
        ({0: (BYTE, 7)}, b"\x03\x00\x07\x00"),
        # Lists with fifteen or more items have a separate count after the header.
        ({1: (LIST, List(BYTE, [7] * 14))}, b"\x19\xe3" + b"\x07" * 14 + b"\x00"),
        ({1: (LIST, List(BYTE, [7] * 15))}, b"\x19\xf3\x0f" + b"\x07" * 15 + b"\x00"),
        ({1: (LIST, List(BYTE, [7] * 16))}, b"\x19\xf3\x10" + b"\x07" * 16 + b"\x00"),
        ({1: (LIST, List(BYTE, []))}, b"\x19\x03\x00"),
        # A field id up to fifteen above the previous one is part of the header; others follow it.
        ({15: (BYTE, 1), 30: (BYTE, 2)}, b"\xf3\x01\xf3\x02\x00"),
        ({16: (BYTE, 1), 32: (BYTE, 2)}, b"\x03\x20\x01\x03\x40\x02\x00"),
        ({1: (TRUE, True), 2: (TRUE, False)}, b"\x11\x12\x00"),
        ({1: (LIST, List(TRUE, [True, False]))}, b"\x19\x21\x01\x02\x00"),
        (
            {1: (I32, 0), 2: (I32, -1), 3: (I32, 1), 4: (I64, -64), 5: (I64, 64)},
            b"\x15\x00\x15\x01\x15\x02\x16\x7f\x16\x80\x01\x00",
        ),
        ({1: (I64, 2**62)}, b"\x16" + b"\x80" * 9 + b"\x01\x00"),
        ({1: (BINARY, b"a" * 127)}, b"\x18\x7f" + b"a" * 127 + b"\x00"),
        ({1: (BINARY, b"a" * 128)}, b"\x18\x80\x01" + b"a" * 128 + b"\x00"),
        ({1: (DOUBLE, 1.0)}, b"\x17" + b"\x00" * 6 + b"\xf0\x3f\x00"),
        ({2: (STRUCT, {1: (I16, 5)})}, b"\x2c\x14\x0a\x00\x00"),
    ],
)
def test_the_bytes_are_those_of_the_protocol(fields: thrift.Struct, wire: bytes) -> None:
    """The encoding follows the compact protocol, and decoding works at any offset."""
    assert thrift.encode(fields) == wire
    assert thrift.decode(wire) == (fields, len(wire))
    assert thrift.decode(b"??" + wire + b"?", 2) == (fields, 2 + len(wire))


@pytest.mark.parametrize(
    ("wire", "arguments"),
    [
        (b"\x16" + b"\x80" * 10 + b"\x01\x00", "a number is too long at byte 11"),
        (b"\x18\x05abc\x00", "a string runs past the end"),
        (b"\x1b\x00", "type 11 does not occur in Parquet, at byte 1"),
        (b"\x19\xf3\x7f\x00", "a list is longer than the data at byte 3"),
        (b"\x15", "cut short or broken at byte 1"),
        (b"\x1c" * 100_000, "cut short or broken"),
    ],
)
def test_what_is_broken_is_said(wire: bytes, arguments: str) -> None:
    with pytest.raises(ThriftError, match=arguments):
        thrift.decode(wire)


def test_what_just_fits_is_no_error() -> None:
    """A string up to the last byte and a list as long as the data are valid."""
    with pytest.raises(ThriftError, match="cut short"):
        thrift.decode(b"\x18\x03abc")
    assert thrift._Reader(memoryview(b"\x03abc"), 0).value(BINARY) == b"abc"
    assert thrift._Reader(memoryview(b"\x23\x01\x02"), 0).value(LIST) == List(BYTE, [1, 2])
    with pytest.raises(ThriftError, match="type 11 does not occur in Parquet"):
        thrift.encode({1: (11, 0)})
