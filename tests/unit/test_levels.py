from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.formats.parquet_levels import decode_levels, encode_levels, levels_of


@given(st.integers(1, 9).flatmap(lambda top: st.tuples(st.just(top), st.lists(st.integers(0, top), min_size=1))))
def test_levels_come_back_as_they_were(case: tuple[int, list[int]]) -> None:
    """What encode_levels writes, decode_levels reads."""
    maximum, levels = case
    data = encode_levels(np.array(levels, np.int64), maximum)
    decoded, used = decode_levels(data + b"more", len(levels), maximum)
    assert decoded.tolist() == levels
    assert used == len(data)


def test_no_levels_take_no_bytes() -> None:
    """A required leaf has no levels."""
    assert encode_levels(np.zeros(5, np.int64), 0) == b""


@pytest.mark.parametrize("data", [b"", b"\x01\x00\x00\x00", b"\xff\xff\xff\xff\x02\x01", b"\x02\x00\x00\x00\x00\x01"])
def test_broken_levels_are_refused(data: bytes) -> None:
    """A level block that ends early or holds nothing is a ValueError, not a loop."""
    with pytest.raises((ValueError, IndexError)):
        decode_levels(data, 10, 1)


_FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_cell = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"bytes": st.one_of(st.none(), st.just(b"")), "path": st.one_of(st.none(), st.just("p"))},
    ),
)
_deep = st.one_of(st.none(), st.lists(st.one_of(st.none(), st.lists(_cell, max_size=4)), max_size=4))


@given(st.lists(_deep, max_size=8))
def test_levels_agree_with_pyarrow(rows: list[Any]) -> None:
    """The number of slots and of nulls is what pyarrow counts for the same column."""
    table = pa.table({"x": pa.array(rows, pa.list_(pa.list_(_FILE)))})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=max(len(rows), 1))
    levels = levels_of(table.column("x"), True, "bytes")
    metadata = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    if not rows:
        assert len(levels.definition) == 0
        return
    chunk = metadata.row_group(0).column(0)
    assert chunk.path_in_schema == "x.list.element.list.element.bytes"
    assert chunk.num_values == len(levels.definition)
    assert chunk.statistics.null_count == int((levels.definition < levels.max_definition).sum())
    leaf = metadata.schema.column(0)
    assert (leaf.max_definition_level, leaf.max_repetition_level) == (levels.max_definition, levels.max_repetition)
