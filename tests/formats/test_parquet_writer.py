"""The bytes of a spliced shard: every offset and size in its footer and page index is correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brim import partition as cuts
from brim.file_set import FileSet
from brim.formats import parquet_writer, thrift
from brim.formats.parquet_levels import decode_levels, encode_levels
from brim.formats.parquet_writer import MAX_CELL_BYTES, splice_parquet
from tests.conftest import file_set, random_bytes

FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SIZES = (0, 1, 3000, 200, 40_000, 7)


@pytest.fixture
def files(tmp_path: Path) -> FileSet:
    return file_set(tmp_path / "files", {f"f{n}": random_bytes(size, n) for n, size in enumerate(SIZES)})


def cell(number: int | None) -> dict[str, Any] | None:
    return None if number is None else {"bytes": b"", "path": f"f{number}"}


def mixed() -> tuple[pa.Table, dict[str, np.ndarray[Any, Any]]]:
    first = [0, 1, None, 2, 4, 4, 3, 5]
    items: list[Any] = [[1, 2], [], None, [None, 4], [3], [5, 5, 5], [0], [2]]
    table = pa.table(
        {
            "id": pa.array(range(8)),
            "one": pa.array([cell(n) for n in first], FILE),
            "name": pa.array([f"row {n}" if n % 3 else None for n in range(8)]),
            "many": pa.array([None if row is None else [cell(n) for n in row] for row in items], pa.list_(FILE)),
        }
    )
    numbers = {
        "one": np.array([n for n in first if n is not None]),
        "many": np.array([n for row in items for n in row or [] if n is not None]),
    }
    return table, numbers


def content(value: Any) -> Any:
    if isinstance(value, list):
        return [content(each) for each in value]
    if value is None:
        return None
    number = int(value["path"][1:])
    return {"bytes": random_bytes(SIZES[number], number), "path": value["path"]}


def parts(data: bytes) -> tuple[thrift.Struct, int]:
    """Return the footer and its offset."""
    assert data[:4] == data[-4:] == b"PAR1"
    length = int.from_bytes(data[-8:-4], "little")
    footer, end = thrift.decode(data[-8 - length : -8])
    assert end == length
    return footer, len(data) - 8 - length


def shard(table: pa.Table, files: FileSet, numbers: dict[str, Any]) -> bytes:
    splice = splice_parquet(table, files, numbers)
    data = splice.read_at(0, splice.size)
    assert len(data) == splice.size
    return data


def test_readers_get_every_byte(files: FileSet) -> None:
    table, numbers = mixed()
    data = shard(table, files, numbers)
    read = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
    expected = [row | {name: content(row[name]) for name in ("one", "many")} for row in table.to_pylist()]
    assert read.to_pylist() == expected
    assert read.schema.names == table.schema.names
    assert pq.read_metadata(pa.BufferReader(data)).created_by == "brim version 1.0.0 (build 1)"


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_the_footer_says_what_lies_there(files: FileSet, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Column chunks are contiguous, and sizes, values and the page index match the pages."""
    monkeypatch.setattr(parquet_writer, "ROW_GROUP_ROWS", rows)
    monkeypatch.setattr(parquet_writer, "PAGE_ROWS", 2)
    table, numbers = mixed()
    data = shard(table, files, numbers)
    footer, footer_at = parts(data)
    position = 4
    column_indexes, offset_indexes = [], []
    for group in footer[4][1].items:
        metas = [entry[3][1] for entry in group[1][1].items]
        assert group[5] == (thrift.I64, position)
        assert group[2] == (thrift.I64, sum(meta[6][1] for meta in metas))
        assert group[6] == (thrift.I64, sum(meta[7][1] for meta in metas))
        for entry, meta in zip(group[1][1].items, metas, strict=True):
            spliced = meta[3][1].items[-1] == b"bytes"
            first = meta[11][1] if 11 in meta and meta[11][1] else meta[9][1]
            assert first == position
            locations = _pages(data, position, meta[7][1], len(meta[3][1].items) if spliced else 0)
            index, end = thrift.decode(data[entry[4][1] : entry[4][1] + entry[5][1]])
            assert end == entry[5][1]
            messages = [tuple(destination[field][1] for field in (1, 2, 3)) for destination in index[1][1].items]
            assert [location[:2] for location in messages] == [target[:2] for target in locations]
            offset_indexes.append((entry[4][1], entry[5][1]))
            if 6 in entry:
                column_indexes.append((entry[6][1], entry[7][1]))
                bounds, end = thrift.decode(data[entry[6][1] : entry[6][1] + entry[7][1]])
                assert end == entry[7][1]
                assert len(bounds[2][1].items) == len(bounds[3][1].items) == len(messages)
            assert spliced != (6 in entry)
            assert (7 in entry) == (6 in entry)
            if spliced:
                assert [place[2] for place in messages] == [place[2] for place in locations]
                assert len(messages) == -(-group[3][1] // 2)
                _spliced_meta(meta, locations)
            position += meta[7][1]
    for start, size in [*column_indexes, *offset_indexes]:
        assert start == position
        position += size
    assert position == footer_at


def _pages(data: bytes, position: int, size: int, depth: int) -> list[tuple[int, int, int, int]]:
    """Return offset, size with header, first row and values of each data page; `depth` is for spliced chunks."""
    actual, end, row = [], position + size, 0
    while position < end:
        header, start = thrift.decode(data, position)
        length = header[3][1]
        if header[1][1] == 0:
            actual.append((position, start + length - position, row, header[5][1][1][1]))
            if depth:
                assert header[2][1] == length
                assert {n: header[5][1][n] for n in (2, 3, 4)} == dict.fromkeys((3, 4), (5, 3)) | {2: (5, 0)}
                body, count = data[start : start + length], header[5][1][1][1]
                row += _whole_page(body, count, depth > 2)
        position = start + length
    assert position == end
    return actual


def _whole_page(body: bytes, count: int, is_list: bool) -> int:
    """Return the number of rows that start in a page, after checking that it contains only levels and values."""
    repetition, position = decode_levels(body, count, 1 if is_list else 0)
    definition, used = decode_levels(body[position:], count, 4 if is_list else 2)
    position += used
    for _ in range(int((definition == (4 if is_list else 2)).sum())):
        position += 4 + int.from_bytes(body[position : position + 4], "little")
    assert position == len(body)
    for block, maximum in ((body, 1), (body[decode_levels(body, count, 1)[1] :], 4)) if is_list else ((body, 2),):
        assert len(encode_levels(decode_levels(block, count, maximum)[0], maximum)) == 4 + int.from_bytes(
            block[:4], "little"
        )
    return int((repetition == 0).sum())


def _spliced_meta(meta: thrift.Struct, locations: list[tuple[int, int, int, int]]) -> None:
    assert meta[2][1].items == [0, 3]
    assert meta[4] == (thrift.I32, 0)
    assert meta[2][1].kind == thrift.I32
    assert meta[5] == (thrift.I64, sum(destination[3] for destination in locations))
    assert meta[6] == meta[7]
    assert meta[13][1].items == [{1: (5, 0), 2: (5, 0), 3: (5, len(locations))}]
    assert not {8, 10, 11, 12, 14, 15, 16} & meta.keys()


def test_rows_are_grouped_by_the_bytes_of_their_files(files: FileSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups and pages end before their files, with four bytes for each length, exceed the limit."""
    monkeypatch.setattr(parquet_writer, "ROW_GROUP_BYTES", 6008)
    monkeypatch.setattr(parquet_writer, "PAGE_BYTES", 3004)
    table = pa.table({"one": pa.array([cell(2)] * 5 + [cell(4), cell(0)], FILE)})
    numbers = {"one": np.array([2, 2, 2, 2, 2, 4, 0])}
    data = shard(table, files, numbers)
    metadata = pq.read_metadata(pa.BufferReader(data))
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [2, 2, 1, 1, 1]
    footer, _ = parts(data)
    pages = [group[1][1].items[0][3][1][13][1].items[0][3][1] for group in footer[4][1].items]
    assert pages == [2, 2, 1, 1, 1]
    assert pq.read_table(pa.BufferReader(data)).to_pylist() == [{"one": content(v["one"])} for v in table.to_pylist()]


def test_the_bounds_are_those_of_the_format() -> None:
    """The limits are part of the format, because changing one of them would change every shard."""
    assert parquet_writer.ROW_GROUP_BYTES == 100_000_000
    assert parquet_writer.ROW_GROUP_ROWS == 1 << 20
    assert (parquet_writer.PAGE_BYTES, parquet_writer.PAGE_ROWS) == (1 << 20, 20_000)
    assert (parquet_writer.MAX_PAGE_BYTES, MAX_CELL_BYTES) == (2**31 - 1, 2_147_483_630)
    assert parquet_writer.cell_bytes(np.array([0, 5])).tolist() == [4, 9]


def test_a_page_that_is_too_large_is_refused(files: FileSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of one byte more than the limit, including levels and lengths, is refused."""
    table = pa.table({"one": pa.array([cell(4)], FILE)})
    size = 4 + 2 + 4 + SIZES[4]
    monkeypatch.setattr(parquet_writer, "MAX_PAGE_BYTES", size)
    shard(table, files, {"one": np.array([4])})
    monkeypatch.setattr(parquet_writer, "MAX_PAGE_BYTES", size - 1)
    with pytest.raises(ValueError, match=f"a row of {size} bytes in one column does not fit a Parquet page"):
        shard(table, files, {"one": np.array([4])})


def test_files_and_values_have_to_agree(files: FileSet) -> None:
    table = pa.table({"one": pa.array([cell(4), None], FILE)})
    with pytest.raises(ValueError, match="column 'one' has 1 values and 2 files"):
        splice_parquet(table, files, {"one": np.array([4, 4])})


def test_columns_of_bytes_alone(files: FileSet) -> None:
    """Columns of plain bytes, without a path and in lists, are written with the content of their files."""
    table = pa.table(
        {
            "raw": pa.array([b"", None, b""], pa.binary()),
            "raws": pa.array([[b"", b""], [], [b""]], pa.list_(pa.binary())),
            "n": [1, 2, 3],
        }
    )
    data = shard(table, files, {"raw": np.array([1, 2]), "raws": np.array([3, 5, 2])})
    expected = [random_bytes(SIZES[n], n) for n in range(6)]
    assert pq.read_table(pa.BufferReader(data)).to_pydict() == {
        "raw": [expected[1], None, expected[2]],
        "raws": [[expected[3], expected[5]], [], [expected[2]]],
        "n": [1, 2, 3],
    }


def test_required_columns_have_no_levels(files: FileSet) -> None:
    kind = pa.struct([pa.field("bytes", pa.binary(), nullable=False), pa.field("path", pa.string())])
    schema = pa.schema([pa.field("one", kind, nullable=False)])
    table = pa.table({"one": pa.array([cell(1), cell(2)], kind)}, schema=schema)
    data = shard(table, files, {"one": np.array([1, 2])})
    assert pq.read_table(pa.BufferReader(data)).column("one").to_pylist() == [content(cell(1)), content(cell(2))]


def test_nothing_but_nulls(files: FileSet) -> None:
    """A file column with only nulls is written as pages without files."""
    table = pa.table({"one": pa.array([None, None], FILE), "n": [1, 2]})
    data = shard(table, files, {"one": np.zeros(0, np.int64)})
    assert pq.read_table(pa.BufferReader(data)).to_pylist() == [{"one": None, "n": 1}, {"one": None, "n": 2}]


@pytest.mark.parametrize("together", [1, 2, 3, 8192])
def test_pages_with_and_without_files(files: FileSet, monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """The bytes do not depend on the batch size in which segments are created, even with pages without files."""
    monkeypatch.setattr(parquet_writer, "PAGE_ROWS", 2)
    own = [None, None, 1, 2, None, None, None, None, 3, None, None, 5, 4, 4, None, None]
    table = pa.table({"one": pa.array([cell(n) for n in own], FILE)})
    numbers = {"one": np.array([n for n in own if n is not None])}
    expected = shard(table, files, numbers)
    monkeypatch.setattr(parquet_writer, "_BATCH_VALUES", together)
    assert shard(table, files, numbers) == expected
    read = pq.read_table(pa.BufferReader(expected)).to_pylist()
    assert read == [{"one": content(cell(n))} for n in own]


def test_large_values_of_other_columns(files: FileSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the columns with values above the limit are written without dictionary and statistics.

    Columns are identified by their full path.
    """
    monkeypatch.setattr(cuts, "GROUP_VALUE_BYTES", 1004)
    for size, plain in ((1000, True), (1001, False)):
        table = pa.table({"text": ["x" * size], "text2": ["y"], "deep": [{"text": "z"}]})
        metadata = pq.read_metadata(pa.BufferReader(shard(table, files, {})))
        chunks = [metadata.row_group(0).column(n) for n in range(3)]
        assert [chunk.is_stats_set for chunk in chunks] == [plain, True, True]
        assert [chunk.has_dictionary_page for chunk in chunks] == [plain, True, True]
    single = pa.table({"text": ["x" * 2000]})
    chunk = pq.read_metadata(pa.BufferReader(shard(single, files, {}))).row_group(0).column(0)
    assert (chunk.is_stats_set, chunk.has_dictionary_page) == (False, False)
    deep = pa.table({"deep": [{"a": "x" * 2000, "b": 1}], "n": [1]})
    metadata = pq.read_metadata(pa.BufferReader(shard(deep, files, {})))
    assert [metadata.row_group(0).column(n).is_stats_set for n in range(3)] == [False, False, True]


def test_values_go_by_the_disk_above_the_bound(files: FileSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values above the limit pass through a scratch file in the specified folder, and the bytes stay the same."""
    table, numbers = mixed()
    expected = shard(table, files, numbers)
    values = int(cuts.row_bytes(table.select(["id", "name"])).sum())
    created: list[str | None] = []
    plain = parquet_writer.Scratch

    def scratch(folder: str | None) -> Any:
        created.append(folder)
        return plain(folder)

    monkeypatch.setattr(parquet_writer, "Scratch", _Watched(scratch, plain))
    for bound, folders in ((values, []), (values - 1, [str(tmp_path)])):
        monkeypatch.setattr(parquet_writer, "HELD_VALUE_BYTES", bound)
        with splice_parquet(table, files, numbers, str(tmp_path)) as splice:
            assert splice.read_at(0, splice.size) == expected
        assert created == folders


class _Watched(type):
    """A replacement for the class `Scratch` that counts calls and keeps `isinstance` working."""

    def __new__(cls, make: Any, real: type) -> Any:
        return super().__new__(cls, "Scratch", (), {"make": staticmethod(make), "real": real})

    def __init__(cls, make: Any, real: type) -> None:
        super().__init__("Scratch", (), {})

    def __call__(cls, *arguments: Any) -> Any:
        return cls.make(*arguments)  # type: ignore[attr-defined]

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.real)  # type: ignore[attr-defined]
