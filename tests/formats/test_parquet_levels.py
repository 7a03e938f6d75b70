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
    """Encoding and decoding levels returns the same levels."""
    maximum, levels = case
    data = encode_levels(np.array(levels, np.int64), maximum)
    decoded, used = decode_levels(data + b"more", len(levels), maximum)
    assert decoded.tolist() == levels
    assert used == len(data)


def test_no_levels_take_no_bytes() -> None:
    """A required leaf has no levels, which take no bytes."""
    assert encode_levels(np.zeros(5, np.int64), 0) == b""


@pytest.mark.parametrize("data", [b"", b"\x01\x00\x00\x00", b"\xff\xff\xff\xff\x02\x01", b"\x02\x00\x00\x00\x00\x01"])
def test_broken_levels_are_refused(data: bytes) -> None:
    """A level block that ends early or is empty raises ValueError instead of looping forever."""
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
    """The numbers of slots and nulls are those that pyarrow counts for the same column."""
    table = pa.table({"x": pa.array(rows, pa.list_(pa.list_(_FILE)))})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=max(len(rows), 1))
    levels = levels_of(table.column("x"), True, ("bytes",))
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


@pytest.mark.parametrize(
    ("levels", "maximum", "data"),
    [
        ([1, 1, 1], 1, b"\x02\0\0\0\x06\x01"),  # a run of three levels
        ([0], 1, b"\x02\0\0\0\x02\x00"),
        ([3] * 64, 3, b"\x03\0\0\0\x80\x01\x03"),
        ([1, 0, 1], 1, b"\x02\0\0\0\x03\x05"),  # a packed group of eight bits
        ([0, 1, 2, 3, 0, 1, 2, 3, 1], 3, b"\x05\0\0\0\x05\xe4\xe4\x01\x00"),
        ([256, 256], 256, b"\x03\0\0\0\x04\x00\x01"),
        ([], 1, b"\x01\0\0\0\x01"),
    ],
)
def test_the_bytes_are_those_of_the_format(levels: list[int], maximum: int, data: bytes) -> None:
    """Equal levels are encoded as one run and others as packed bits, each with a length prefix."""
    assert encode_levels(np.array(levels, np.int64), maximum) == data
    assert decode_levels(data, len(levels), maximum)[0].tolist() == levels
    assert decode_levels(data, len(levels), maximum)[1] == len(data)
    assert decode_levels(memoryview(data), 1 if levels else 0, maximum)[0].tolist() == levels[:1]


def test_runs_and_packed_bits_of_others_are_read() -> None:
    """Blocks of other writers, with several runs and packed groups or more levels than requested, are decoded."""
    data = b"\x07\0\0\0" + b"\x06\x02" + b"\x03\x1b\x00" + b"\x80\x01\x01"[:2]
    assert decode_levels(data + b"\x01", 9, 3)[0].tolist() == [2, 2, 2, 3, 2, 1, 0, 0, 0]
    assert decode_levels(b"\x03\0\0\0\x80\x10\x01", 3, 1) == (pytest.approx([1, 1, 1]), 7)
    assert decode_levels(b"", 4, 0)[0].tolist() == [0] * 4
    assert decode_levels(b"rest", 4, 0)[1] == 0


@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        (b"\x02\0\0\0\x02\x01", "ends early"),  # contains one level of two
        (b"\x03\0\0\0\x04\x01", "ends early"),  # the block is truncated
        (b"\x04\0\0\0\x00\x01\x04\x01", "empty run"),
    ],
)
def test_what_is_wrong_with_levels_is_said(data: bytes, arguments: str) -> None:
    with pytest.raises(ValueError, match=arguments):
        decode_levels(data, 2, 1)


REQUIRED = pa.struct([pa.field("bytes", pa.binary(), nullable=False), ("path", pa.string())])


@pytest.mark.parametrize(
    ("rows", "kind", "nullable", "repetition", "definition", "index", "maximum"),
    [
        ([{"bytes": b""}, None, {"bytes": None}], _FILE, True, [0, 0, 0], [2, 0, 1], [0, -1, -1], (0, 2)),
        ([{"bytes": b""}, {"bytes": b""}], REQUIRED, False, [0, 0], [0, 0], [0, 1], (0, 0)),
        ([{"bytes": b""}, None], REQUIRED, True, [0, 0], [1, 0], [0, -1], (0, 1)),
        (
            [[{"bytes": b""}, None, {"bytes": None}], [], None, [{"bytes": b""}]],
            *(pa.list_(_FILE), True),
            *([0, 1, 1, 0, 0, 0], [4, 2, 3, 1, 0, 4], [0, -1, -1, -1, -1, 3], (1, 4)),
        ),
        (
            [[[b"", b""], []], [[b""]]],
            *(pa.list_(pa.large_list(pa.binary())), True),
            *([0, 2, 1, 0], [5, 5, 3, 5], [0, 1, -1, 2], (2, 5)),
        ),
        ([], pa.list_(_FILE), True, [], [], [], (1, 4)),
    ],
)
def test_what_levels_say(
    rows: list[Any],
    kind: pa.DataType,
    nullable: bool,
    repetition: list[int],
    definition: list[int],
    index: list[int],
    maximum: tuple[int, int],
) -> None:
    """Null, empty and absent values have different levels at every depth, independent of chunks and slices."""
    array = pa.array(rows, kind)
    halves = pa.chunked_array([array[: len(rows) // 2], array[len(rows) // 2 :]], kind)
    for column in (array, pa.chunked_array([array], kind), halves):
        levels = levels_of(column, nullable, ("bytes",))
        assert (levels.repetition.tolist(), levels.definition.tolist()) == (repetition, definition)
        assert (levels.max_repetition, levels.max_definition) == maximum
    assert levels_of(array, nullable, ("bytes",)).index.tolist() == index
    if rows:
        longer = pa.array([rows[0], *rows, rows[0]], kind).slice(1, len(rows))
        assert levels_of(longer, nullable, ("bytes",)).definition.tolist() == definition
    none = levels_of(pa.chunked_array([], kind), nullable, ("bytes",))
    assert none.definition.tolist() == []
    assert (none.max_repetition, none.max_definition) == maximum


def test_a_column_without_the_leaf_is_refused() -> None:
    with pytest.raises(ValueError, match="has no single child 'other'"):
        levels_of(pa.array([None], _FILE), True, ("other",))


def test_many_levels_that_differ() -> None:
    """A group count that needs two bytes is encoded and decoded."""
    levels = [0, 1] * 600
    data = encode_levels(np.array(levels, np.int64), 1)
    assert data[4:6] == b"\xad\x02"
    assert decode_levels(data, len(levels), 1)[0].tolist() == levels


def test_a_struct_of_one_child_needs_no_name() -> None:
    """The name of the leaf may be omitted in a struct with one child. With several children it is required."""
    first = pa.array([{"bytes": b"a"}, None, {"bytes": None}], pa.struct([("bytes", pa.binary())]))
    levels = levels_of(first, True)
    assert (levels.definition.tolist(), levels.max_definition) == ([2, 0, 1], 2)
    assert levels.index.tolist() == [0, -1, -1]
    with pytest.raises(ValueError, match="no single child"):
        levels_of(pa.array([None], _FILE), True)
