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
    """Whatever is encoded is decoded to the same, and its end is found."""
    data = thrift.encode(fields)
    decoded, end = thrift.decode(data + b"rest")
    assert (decoded, end) == (fields, len(data))


@given(_struct, st.integers(0, 10_000))
def test_cut_data_is_an_error_and_nothing_else(fields: thrift.Struct, cut: int) -> None:
    """A struct that ends early raises ThriftError."""
    data = thrift.encode(fields)
    with pytest.raises(ThriftError):
        thrift.decode(data[: cut % len(data)])


@given(st.binary(max_size=200))
def test_noise_is_decoded_or_refused(data: bytes) -> None:
    """Arbitrary bytes never raise anything but ThriftError."""
    try:
        thrift.decode(data)
    except ThriftError:
        pass


def test_a_real_footer_is_kept_to_the_byte() -> None:
    """pyarrow's own footer, decoded and encoded again, is the same bytes."""
    table = pa.table({"a": [1, None, 3], "b": [["x"], [], None], "c": [{"d": 1.5}, None, {"d": None}]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_index=True)
    data = sink.getvalue().to_pybytes()
    length = int.from_bytes(data[-8:-4], "little")
    footer = data[-8 - length : -8]
    decoded, end = thrift.decode(footer)
    assert end == length
    assert thrift.encode(decoded) == footer
