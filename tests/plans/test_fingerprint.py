"""The digest of a table depends on its values and types, not on their layout in memory."""

from __future__ import annotations

import decimal
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim import partition as cuts
from brim.plans import fingerprint
from brim.plans.fingerprint import changes_between, digest_ints, digest_items, digest_json, digest_table

_N = 24
COLUMNS = {
    "text": pa.array(["a", "bb", None, "dddd"] * (_N // 4)),
    "list": pa.array([[1, 2], None, [], [3]] * (_N // 4), pa.list_(pa.int16())),
    "struct": pa.array([{"a": "x", "b": [1.0]}, None, {"a": None, "b": None}, {"a": "q", "b": []}] * (_N // 4)),
    "dictionary": pa.array(["a", "bb", None, "dddd"] * (_N // 4)).dictionary_encode(),
    "bool": pa.array([True, None, False, True] * (_N // 4)),
    "bools": pa.array([[True, False, None], None, [True] * 9, []] * (_N // 4)),
    "deep": pa.array([[["a"], []], None, [], [None, ["bb", "c"]]] * (_N // 4)),
    "decimal": pa.array([decimal.Decimal("1.1"), None, None, decimal.Decimal("2")] * (_N // 4)),
    "vector": pa.array([[1.0, 2.0], None, [2.0, 3.0], [4.0, 5.0]] * (_N // 4), pa.list_(pa.float32(), 2)),
    "view": pa.array(["a", "b" * 40, None, "x"] * (_N // 4), pa.string_view()),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", None, "[1]", "2"] * (_N // 4))),
    "null": pa.nulls(_N),
}
# Digests of the first implementation, which read whole columns. Changing one would change every fingerprint.
EXPECTED = {
    "text": "ba0709a28b627c55",
    "struct": "8288c550e94dcdc8",
    "bools": "09ea57c083b7eda7",
    "decimal": "74287e7f48bd99d6",
    "vector": "1dd5d94dbcbeacad",
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("deep", [False, True])
def test_pieces_and_chunks_do_not_count(name: str, deep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of a column does not depend on its chunks or on the block size of the computation."""
    if name == "json" and not deep:
        return
    array = COLUMNS[name]
    whole = digest_table(pa.table({"x": array}), deep=deep)
    chunked = pa.chunked_array([array.slice(0, 3), array.slice(3, 0), array.slice(3, 8), array.slice(11)])
    monkeypatch.setattr(fingerprint, "_PIECE_BYTES", 10)
    assert digest_table(pa.table({"x": chunked}), deep=deep) == whole
    second = pa.table({"x": chunked}).slice(0, _N - 1)
    assert digest_table(second, deep=deep) != whole


@pytest.mark.parametrize("name", EXPECTED)
def test_digests_are_what_they_were(name: str) -> None:
    """Digests stay the same across versions, so existing datasets are recognized."""
    assert digest_table(pa.table({"x": COLUMNS[name]}))[:16] == EXPECTED[name]


@given(st.lists(st.lists(st.booleans(), max_size=20), max_size=8))
def test_bits_are_packed_across_parts(parts: list[list[bool]]) -> None:
    """Bits are packed across the borders of parts of any length."""
    digest = hashlib.sha256()
    fingerprint._hash_bits(digest, (np.array(part, bool) for part in parts))
    whole = np.array([bit for part in parts for bit in part], bool)
    assert digest.hexdigest() == hashlib.sha256(np.packbits(whole).tobytes()).hexdigest()


@pytest.mark.parametrize("name", COLUMNS)
def test_weights_do_not_depend_on_chunks(name: str) -> None:
    """The size of a value does not depend on its position or chunk."""
    array = COLUMNS[name]
    whole = cuts.column_bytes(pa.chunked_array([array]))
    chunked = pa.chunked_array([array.slice(0, 5), array.slice(5, 0), array.slice(5)])
    assert cuts.column_bytes(chunked).tolist() == whole.tolist()
    assert (whole > 0).all()


FACTS: dict[str, Any] = {
    "format": "parquet",
    "rows": 1000,
    "files": 10,
    "bytes": 5_000_000,
    "columns": {"a": "int64", "b": "string"},
    "cut": {},
    "shards": 3,
    "features": "f",
}


@pytest.mark.parametrize(
    ("second", "arguments"),
    [
        ({}, ["names of files or values of its table changed"]),
        ({"format": "webdataset"}, ["its format was parquet and is now webdataset"]),
        ({"rows": 2000, "files": 9}, ["it had 1,000 rows and would have 2,000", "it had 10 files and would have 9"]),
        ({"bytes": 6_000_000}, ["its files were 5.00 MB and are 6.00 MB"]),
        (
            {"columns": {"b": "int64", "c": "string", "d": "string"}},
            [
                "the column 'a' is gone",
                "the column 'c' is new",
                "the column 'd' is new",
                "the column 'b' has another type",
            ],
        ),
        ({"cut": {"num_shards": 4}}, ["names of files or values of its table changed"]),
        ({"shards": 4}, ["names of files or values of its table changed"]),
        (
            {"cut": {"num_shards": 4, "shard_by": "x"}, "shards": 4},
            ["its shards were cut by the default size and would be by num shards 4, shard by x"],
        ),
        ({"features": "g"}, ["the types of its columns for `datasets` changed"]),
        ({"features": "g", "rows": 999}, ["it had 1,000 rows and would have 999"]),
    ],
)
def test_what_changed_is_said(second: dict[str, Any], arguments: list[str]) -> None:
    """All differences between two datasets are listed, and the list is never empty."""
    assert changes_between(FACTS, FACTS | second) == arguments


def test_a_build_where_rows_were_computed() -> None:
    """A dataset of computed rows (here tokens) differs in its command, without further details."""
    computed = {"kind": "tokenize", "version": 1, "source": {}, "step": {}, "output": {}}
    assert changes_between(computed, FACTS) == ["it was made by another command"]


def test_digests_of_facts() -> None:
    """Digests use JSON with sorted keys, lists can be digested in blocks, and integers do not depend on their width."""
    assert digest_json({"b": 1, "a": [2]}) == hashlib.sha256(b'{"a": [2], "b": 1}').hexdigest()
    assert digest_json({"path": Path("/a")}) == hashlib.sha256(b'{"path": "/a"}').hexdigest()
    assert digest_ints(np.array([1, 2], np.int32)) == hashlib.sha256(np.array([1, 2], "<i8").tobytes()).hexdigest()
    for count in (0, 1, 9_999, 10_000, 10_001, 20_000):
        assert digest_items(iter(range(count))) == digest_json(list(range(count))), count
    assert digest_items([{"b": 1, "a": 2}, "x"]) == digest_json([{"a": 2, "b": 1}, "x"])
    assert fingerprint._BLOCK == 10_000


def digest_of(array: Any, deep: bool = False) -> str:
    return digest_table(pa.table({"x": array}), deep=deep)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.array(["ab", "c"]), pa.array(["a", "bc"])),
        (pa.array([None, "a"]), pa.array(["a", None])),
        (pa.array([[1], [2, 3]]), pa.array([[1, 2], [3]])),
        (pa.array([[], None]), pa.array([None, []])),
        (pa.array([1, 2]), pa.array([1, 3])),
        (pa.array([True, False]), pa.array([True, True])),
        (pa.array([b"a", b""]), pa.array([b"", b"a"])),
        (pa.array([{"a": 1}, None]), pa.array([{"a": None}, None])),
        (pa.array([decimal.Decimal("1.1")]), pa.array([decimal.Decimal("1.2")])),
        (pa.array([1], pa.int32()), pa.array([1], pa.int64())),
        (pa.array([["a"], ["b"]], pa.large_list(pa.string())), pa.array([["a"], ["c"]], pa.large_list(pa.string()))),
        (pa.array([b"a"], pa.large_binary()), pa.array([b"b"], pa.large_binary())),
    ],
    ids=str,
)
def test_other_values_have_another_digest(first: Any, second: Any) -> None:
    """Other values, another order or another type change the digest. A slice has the digest of its values."""
    assert digest_of(first) != digest_of(second)
    if first.type == second.type:
        both = pa.concat_arrays([second, first, second])
        assert digest_of(both.slice(len(second), len(first))) == digest_of(first)


def test_names_and_rules_count() -> None:
    array = pa.array([1, 2])
    plain = pa.table({"x": array})
    required = pa.table({"x": array}, schema=pa.schema([pa.field("x", pa.int64(), nullable=False)]))
    assert len({digest_table(t) for t in (plain, plain.rename_columns(["y"]), required, plain.slice(0, 1))}) == 4
    assert digest_table(pa.table({"a": array, "b": array})) == digest_table(pa.table({"a": array, "b": array}))


def test_deep_digests_look_into_lists_and_extensions() -> None:
    """Deep digests differ from those of the text form, and distinguish values in lists and extension types."""
    for kind in ("vector", "json"):
        array = COLUMNS[kind]
        assert digest_of(array, True) != digest_of(array) if kind == "vector" else True
        assert digest_of(array, True) != digest_of(array.slice(2), True)
    vectors = [pa.array([[1.0, value]], pa.list_(pa.float32(), 2)) for value in (2.0, 3.0)]
    assert digest_of(vectors[0], True) != digest_of(vectors[1], True)


# Digests of earlier versions. Changing one would change every fingerprint.
ALL_KNOWN = "e98a33dbdcd9cb26"
BYTES = ["392e98abdf55a28c", "7768975ae9ca1fd1"]


def test_all_digests_are_what_they_were() -> None:
    table = pa.table({name: array for name, array in COLUMNS.items() if name not in ("json", "view")})
    assert digest_table(table, deep=True)[:16] == ALL_KNOWN
    assert digest_table(pa.table({"dictionary": COLUMNS["dictionary"]})) != digest_table(
        pa.table({"dictionary": COLUMNS["text"]})
    )


def test_deep_is_deep_inside_of_others() -> None:
    """Deep digests include vectors in lists, structs and dictionaries."""
    vectors = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
    nested = [
        pa.ListArray.from_arrays([0, 1, 2], vectors),
        pa.StructArray.from_arrays([vectors], ["v"]),
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), vectors),
    ]
    for array in nested:
        assert digest_of(array, True) != digest_of(array)


def test_digests_of_bytes_are_what_they_were() -> None:
    assert [digest_of(pa.array([b"a", b"", None], kind))[:16] for kind in (pa.binary(), pa.large_binary())] == BYTES
