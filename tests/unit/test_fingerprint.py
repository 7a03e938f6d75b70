"""The digest of a table depends on its values and on nothing else."""

from __future__ import annotations

import decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim import cuts
from brim.plans import fingerprint
from brim.plans.fingerprint import digest_table

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
# As digest_table gave them when it looked at whole columns; a change would make every dataset another one.
KNOWN = {
    "text": "ba0709a28b627c55",
    "struct": "8288c550e94dcdc8",
    "bools": "09ea57c083b7eda7",
    "decimal": "74287e7f48bd99d6",
    "vector": "1dd5d94dbcbeacad",
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("deep", [False, True])
def test_pieces_and_chunks_do_not_count(name: str, deep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However a column is cut, in memory or for digesting, its digest is the same."""
    if name == "json" and not deep:
        return
    array = COLUMNS[name]
    whole = digest_table(pa.table({"x": array}), deep=deep)
    chunked = pa.chunked_array([array.slice(0, 3), array.slice(3, 0), array.slice(3, 8), array.slice(11)])
    monkeypatch.setattr(fingerprint, "_PIECE_BYTES", 10)
    assert digest_table(pa.table({"x": chunked}), deep=deep) == whole
    other = pa.table({"x": chunked}).slice(0, _N - 1)
    assert digest_table(other, deep=deep) != whole


@pytest.mark.parametrize("name", KNOWN)
def test_digests_are_what_they_were(name: str) -> None:
    """Datasets that were built before are still known."""
    assert digest_table(pa.table({"x": COLUMNS[name]}))[:16] == KNOWN[name]


@given(st.lists(st.lists(st.booleans(), max_size=20), max_size=8))
def test_bits_are_packed_across_parts(parts: list[list[bool]]) -> None:
    """Parts of any length are packed as if they were one."""
    import hashlib

    digest = hashlib.sha256()
    fingerprint._feed_bits(digest, (np.array(part, bool) for part in parts))
    whole = np.array([bit for part in parts for bit in part], bool)
    assert digest.hexdigest() == hashlib.sha256(np.packbits(whole).tobytes()).hexdigest()


@pytest.mark.parametrize("name", COLUMNS)
def test_weights_do_not_depend_on_chunks(name: str) -> None:
    """Each value weighs the same wherever it stands."""
    array = COLUMNS[name]
    whole = cuts.column_bytes(pa.chunked_array([array]))
    chunked = pa.chunked_array([array.slice(0, 5), array.slice(5, 0), array.slice(5)])
    assert cuts.column_bytes(chunked).tolist() == whole.tolist()
    assert (whole > 0).all()
