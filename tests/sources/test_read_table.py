"""Reading a table in blocks gives the same types, values and chunks as reading the whole file with pyarrow."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import csv, json
from pyarrow import parquet as pq

from brim.errors import SourceError
from brim.sources import read_table as table_reader
from brim.sources import spools
from brim.sources.read_table import read_table
from brim.sources.spools import GrowingArray, mapped_columns, spooled

CHUNK = 512


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks of 64 bytes, chunks of 512 bytes, and spool tables from 256 bytes."""
    monkeypatch.setattr(table_reader, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(table_reader, "_CSV_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(table_reader, "_JSON_CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(table_reader, "_BATCH_ROWS", 7)
    monkeypatch.setattr(table_reader, "SMALL_TABLE_BYTES", 256)
    monkeypatch.setattr(spools, "SMALL_TABLE_BYTES", 256)
    monkeypatch.setattr(spools, "_HELD_BYTES", 32)


def lengths(table: pa.Table) -> list[list[int]]:
    return [[len(chunk) for chunk in column.chunks if len(chunk)] for column in table.columns]


VALUES = {
    "int": ["1", "23", "-4", ""],
    "bool": ["true", "false", "1", "0"],
    "date": ["2024-01-02", ""],
    "time": ["10:11:12", "10:11"],
    "seconds": ["2024-01-02 10:11:12", "2024-01-02"],
    "nanoseconds": ["2024-01-02 10:11:12.123456789"],
    "float": ["1.5", "-2e3", "nan"],
    "text": ["a", "b c", '"x, y"', '"line\nbreak"', '5" disk', '"he said ""no"""', "", "NA"],
    "null": ["", "NA"],
}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.usefixtures("small_blocks")
def test_csv_in_blocks_has_the_types_values_and_chunks_of_the_whole_file(tmp_path: Path, seed: int) -> None:
    """CSV columns that change the kind of their values at random rows are read as from the whole file."""
    generator = random.Random(seed)
    columns = []
    rows = generator.randrange(1, 120)
    for _ in range(generator.randrange(2, 6)):
        kinds = [generator.choice(list(VALUES))]
        column = []
        for _ in range(rows):
            if generator.random() < 0.03:
                kinds.append(generator.choice(list(VALUES)))
            column.append(generator.choice(VALUES[kinds[-1]]))
        columns.append(column)
    lines = [",".join(f"c{number}" for number in range(len(columns)))]
    lines += [",".join(row) for row in zip(*columns, strict=True)]
    text = (
        generator.choice(["", "\ufeff"])
        + generator.choice(["\n", "\r\n"]).join(lines)
        + generator.choice(["", "\n", "\n\n"])
    )
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    whole = csv.read_csv(
        io.BytesIO(text.encode()),
        csv.ReadOptions(use_threads=False, block_size=CHUNK),
        csv.ParseOptions(newlines_in_values=True),
    )
    actual = read_table(str(path))
    assert actual.schema == whole.schema
    assert actual.equals(whole) or "nan" in text
    assert actual.to_pydict().__repr__() == whole.to_pydict().__repr__()
    assert lengths(actual) == lengths(whole)


@pytest.mark.usefixtures("small_blocks")
def test_csv_number_that_would_lose_digits_in_a_late_block_makes_its_column_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "".join(f"{n},{n}\n" for n in range(200)) + "NA,1\n007,2\n")
    actual = read_table(str(path))
    assert actual.schema.types == [pa.string(), pa.int64()]
    assert actual.column("a").to_pylist() == [*map(str, range(200)), None, "007"]


@pytest.mark.usefixtures("small_blocks")
def test_csv_error_names_the_row_of_the_file(tmp_path: Path) -> None:
    text = "a,b\n" + "".join(f"{n},{n}\n" for n in range(200)) + "1,2,3\n"
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(pa.ArrowInvalid) as whole:
        csv.read_csv(io.BytesIO(text.encode()), csv.ReadOptions(use_threads=False))
    with pytest.raises(SourceError, match="is not valid") as caught:
        read_table(str(path))
    assert str(whole.value).strip() in str(caught.value)


ROWS = {
    "int": ['"a": 1', '"a": -5'],
    "float": ['"a": 1.5', '"a": 2e3'],
    "null": ['"a": null', '"c": 1'],
    "text": ['"b": "x"', '"b": "longer text"'],
    "time": ['"b": "2024-01-02"', '"b": "2024-01-02 10:11:12"'],
    "list": ['"l": [1, 2]', '"l": [2.5, null]', '"l": []'],
    "struct": ['"s": {"x": 1}', '"s": {"y": "u", "x": 2}', '"s": null', '"s": {"z": [1]}'],
}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.usefixtures("small_blocks")
def test_jsonl_in_blocks_has_the_types_values_and_chunks_of_the_whole_file(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    kinds = [generator.choice(list(ROWS))]
    lines = []
    for _ in range(generator.randrange(1, 150)):
        if generator.random() < 0.1:
            kinds.append(generator.choice(list(ROWS)))
        lines.append("{" + f'"n": {generator.randrange(9)}, ' + generator.choice(ROWS[kinds[-1]]) + "}")
    if generator.random() < 0.2:
        lines.insert(generator.randrange(len(lines)), '{"b": "' + "x" * generator.randrange(3000) + '"}')
    text = generator.choice(["\n", "\r\n"]).join(lines) + generator.choice(["", "\n", "\n\n"])
    path = tmp_path / "t.jsonl"
    path.write_bytes(text.encode())
    block = CHUNK
    while True:
        try:
            whole = json.read_json(io.BytesIO(text.encode()), json.ReadOptions(use_threads=False, block_size=block))
            break
        except pa.ArrowNotImplementedError:  # a struct that is null in the first of several blocks
            assert read_table(str(path)).num_rows == len(lines)
            return
        except pa.ArrowInvalid:  # a line longer than a block
            block *= 8
    actual = read_table(str(path))
    assert actual.schema == whole.schema
    assert actual.equals(whole)
    assert lengths(actual) == lengths(whole)


@pytest.mark.usefixtures("small_blocks")
def test_jsonl_refuses_a_column_that_is_text_and_number(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": "x"}\n' * 100 + '{"a": 1}\n' * 100)
    with pytest.raises(SourceError, match=r"Column\(/a\) changed from string|the column 'a' holds string"):
        read_table(str(path))


NESTED = pa.table(
    {
        "i": pa.array([1, None, 3] * 40, pa.int32()),
        "d": pa.array([1.5, 2.5, None] * 40),
        "s": ["a", None, "längere"] * 40,
        "ls": pa.array(["x", "yy", None] * 40, pa.large_string()),
        "b": [b"\0", b"", None] * 40,
        "bool": [True, None, False] * 40,
        "list": [[1, 2], None, []] * 40,
        "texts": pa.array([["a", None], ["b"], None] * 40, pa.large_list(pa.string())),
        "struct": [{"x": 1, "y": "a"}, None, {"x": None, "y": ""}] * 40,
        "deep": [[{"x": [1]}], [], None] * 40,
        "when": pa.array([1, 2, None] * 40, pa.timestamp("us", "UTC")),
        "dec": pa.array([1, 2, None] * 40, pa.decimal128(10, 2)),
        "fixed": pa.array([b"ab", b"cd", None] * 40, pa.binary(2)),
        "vector": pa.array([[1, 2], [5, 6], [3, 4]] * 40, pa.list_(pa.float32(), 2)),
        "dict": pa.array(["u", "v", None] * 40).dictionary_encode(),
        "map": pa.array([[("k", 1)], [], None] * 40, pa.map_(pa.string(), pa.int64())),
        "nulls": pa.array([[1.5, None], None, [3, 4]] * 40, pa.list_(pa.float32(), 2)),
        "nothing": pa.nulls(120),
        "a.b": list(range(120)),
    }
)


@pytest.mark.usefixtures("small_blocks")
def test_parquet_by_columns_has_the_types_values_and_chunks_of_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    nested = NESTED
    try:
        pq.write_table(nested, path, row_group_size=11)
    except pa.ArrowNotImplementedError:  # pyarrow 21 cannot write null lists of a fixed length
        nested = nested.drop_columns(["nulls"])
        pq.write_table(nested, path, row_group_size=11)
    whole = pq.ParquetFile(path).read()
    actual = read_table(str(path))
    assert actual.schema == whole.schema
    assert actual.equals(whole)
    assert lengths(actual) == lengths(whole)
    assert mapped_columns(actual) == set(nested.column_names) - {"dict", "nothing"}


@pytest.mark.usefixtures("small_blocks")
def test_growing_array_takes_slices(tmp_path: Path) -> None:
    for column in NESTED.columns:
        if GrowingArray.takes(column.type):
            growing = GrowingArray(column.type)
            for start in range(0, 120, 13):
                growing.append(column.chunk(0).slice(start, 13))
            created = growing.finish()
            created.validate(full=True)
            assert created.equals(column.chunk(0))


@pytest.mark.usefixtures("small_blocks")
def test_rows_of_a_spool_stay_in_a_spool_when_they_are_chosen_and_ordered(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "".join(f"{n},x{n}\n" for n in range(300)))
    table = read_table(str(path))
    assert mapped_columns(table) == {"a", "b"}
    order = pa.array(range(299, -1, -2))
    actual = spooled(table, lambda columns: columns.take(order))
    assert actual.equals(table.take(order))
    assert mapped_columns(actual) == {"a", "b"}
    assert mapped_columns(table.take(order)) == frozenset()
