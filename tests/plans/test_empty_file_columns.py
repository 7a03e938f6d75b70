"""File columns without content are distinguished from columns with files of a few bytes."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brim.plans.shard_bytes import columns_without_content

FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize(
    ("cells", "empty"),
    [
        ([{"bytes": b"1", "path": "a"}], False),
        ([None, {"bytes": b"xx", "path": "b"}], False),
        ([{"bytes": None, "path": "a"}], True),
        ([{"bytes": b"", "path": "a"}, None], True),
    ],
)
def test_content_of_any_size_is_content(
    cells: list[dict[str, object] | None], empty: bool, in_list: bool, statistics: bool
) -> None:
    array = pa.array([cells] if in_list else cells, pa.list_(FILE) if in_list else FILE)
    out = io.BytesIO()
    pq.write_table(pa.table({"file": array}), out, write_statistics=statistics)
    assert columns_without_content(pq.ParquetFile(out)) == (["file"] if empty else [])
