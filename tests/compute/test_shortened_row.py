"""A line of JSON with long texts is parsed without them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from brim.compute.rows import cut_text
from brim.compute.rows.cut_text import shortened_row

TEXTS = st.text(st.sampled_from('ab"\\\n\t/é😀\u2028{}[],:'), max_size=40)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=5), st.integers(1, 30), st.booleans())
@example({"a": "\\"}, 1, True)
@example({"a": '\\"' * 30}, 1, True)
def test_a_shortened_row_has_the_row_without_its_long_texts(row: dict[str, Any], size: int, ascii: bool) -> None:
    """For any blocks, short texts stay, long ones are replaced, and no byte of the next row is read."""

    def encoded(text: str) -> bytes:
        return json.dumps(text, ensure_ascii=ascii).encode()[1:-1]

    def short(value: Any) -> Any:
        if isinstance(value, str):
            return cut_text._STAND_IN.decode() if len(encoded(value)) > 16 else value
        if isinstance(value, list):
            return [short(each) for each in value]
        return {short(key): short(each) for key, each in value.items()} if isinstance(value, dict) else value

    data = json.dumps(row, ensure_ascii=ascii).encode() + b'\n{"next": 1}\n'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_text, "_LONG_STRING", 16)
        actual = shortened_row(data[index : index + size] for index in range(0, len(data), size))
    assert json.loads(actual) == short(row)
