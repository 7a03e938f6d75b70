"""Rows of text are cut only at row ends; schemas widen and tables are cast to them."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.compute.rows.cut_text import BOM, RowScanner, count_rows
from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.read_unit import cut_batches, describe_row, read_unit
from brim.compute.rows.row_files import RowOptions
from brim.compute.rows.schemas import cast, unify
from brim.compute.rows.unit import Unit
from brim.errors import InputError

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r\n"), max_size=12)
CELL = st.lists(st.sampled_from(["a", "é", "😀", '"', ",", "\n", "\r\n", " ", "7", "x"]), max_size=8).map("".join)
ENDS = st.sampled_from([b"\n", b"\r\n"])


def rows_of(path: Path, unit_bytes: int, block_bytes: int = 64, **options: Any) -> tuple[list[Unit], list[Any]]:
    """Return the units of a file, and the rows read from them one unit at a time."""
    source = open_rows(path, RowOptions(unit_size=unit_bytes, **options))
    units = list(source.units(1, indices=True))
    rows = []
    for unit in units:
        own = [row for table in read_unit(source.reading, unit, block_bytes) for row in table.to_pylist()]
        assert unit.rows == len(own)
        assert unit.first_row == len(rows)
        rows += own
    return units, rows


@given(lines=st.lists(TEXT, min_size=1), end=ENDS, bom=st.booleans(), last=st.booleans(), unit=st.integers(1, 60))
def test_lines(tmp_path_factory: Any, lines: list[str], end: bytes, bom: bool, last: bool, unit: int) -> None:
    """The lines of all units are the lines of the file, including blank ones."""
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    lines = [*lines, "x"] if not last or not any(lines) else lines
    path.write_bytes(BOM * bom + end.join(line.encode() for line in lines) + end * last)
    _, rows = rows_of(path, unit)
    assert [row["text"] for row in rows] == lines


@given(
    values=st.lists(st.one_of(TEXT, st.none()), min_size=1),
    end=ENDS,
    blank=st.sampled_from([b"", b"\n", b" \r\n"]),
    bom=st.booleans(),
    last=st.booleans(),
    unit=st.integers(1, 90),
)
def test_json_lines(
    tmp_path_factory: Any, values: list[str | None], end: bytes, blank: bytes, bom: bool, last: bool, unit: int
) -> None:
    """The rows of all units are the rows of the file, without blank lines."""
    path = tmp_path_factory.mktemp("json") / "a.jsonl"
    rows = [{"n": number, "v": value} for number, value in enumerate(values)]
    lines = [json.dumps(row, ensure_ascii=bool(row["n"] % 2)).encode() for row in rows]
    path.write_bytes(BOM * bom + (end + blank).join(lines) + end * last)
    units, actual = rows_of(path, unit)
    assert actual == rows
    assert len({unit.key for unit in units}) == len(units)


@given(
    cells=st.lists(st.tuples(CELL, CELL), min_size=1),
    end=ENDS,
    bom=st.booleans(),
    last=st.booleans(),
    unit=st.integers(1, 90),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
)
def test_csv(
    tmp_path_factory: Any,
    cells: list[tuple[str, str]],
    end: bytes,
    bom: bool,
    last: bool,
    unit: int,
    quoting: Any,
) -> None:
    """A line break inside quotes does not end a row, for any limits of units and blocks."""
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    text = io.StringIO()
    writer = csv.writer(text, quoting=quoting, lineterminator=end.decode())
    writer.writerow(["na,me", "b"])
    writer.writerows(cells)
    content = BOM * bom + text.getvalue().encode()
    path.write_bytes(content if last else content.removesuffix(end))
    units, rows = rows_of(path, unit, as_text=("na,me", "b"))
    assert [(row["na,me"], row["b"]) for row in rows] == cells
    assert sum(unit.bytes for unit in units) == path.stat().st_size


@given(cells=st.lists(CELL, min_size=1), cut=st.integers(0, 200))
def test_quotes_do_not_depend_on_blocks(cells: list[str], cut: int) -> None:
    """A scanner finds the same row ends in one block and in two; quotes within plain values are ordinary characters."""
    plain = [re.sub(r"[,\r\n]", "", cell).lstrip('"') for cell in cells]
    quoted = [cell.replace('"', '""') for cell in cells]
    text = "".join(f'{first},"{second}"\n' for first, second in zip(plain, quoted, strict=True))
    content = text.encode()
    whole = RowScanner("csv").feed(content).tolist()
    assert len(whole) == len(cells)
    scanner = RowScanner("csv")
    first = scanner.feed(content[:cut]).tolist()
    cut = min(cut, len(content))
    assert first + (scanner.feed(content[cut:]) + cut).tolist() == whole


def test_quote_inside_a_plain_value(tmp_path: Path) -> None:
    """The quote in `5" disk` opens no quoted value, and a quoted line break after it belongs to its row."""
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n" + b'5" disk,"x\ny"\n' * 40)
    _, rows = rows_of(path, 37)
    assert rows == [{"a": '5" disk', "b": "x\ny"}] * 40


def test_small_files_share_a_unit(tmp_path: Path) -> None:
    """Files are taken in order; several small files form one unit, a large one several."""
    for number in range(20):
        (tmp_path / f"{number:02}.jsonl").write_text(f'{{"a": {number}}}\n' * 3)
    source = open_rows(tmp_path, RowOptions(unit_size=100))
    units = list(source.units(1000))
    assert [len(unit.spans) for unit in units] == [3, 3, 3, 3, 3, 3, 2]
    rows = [row["a"] for unit in units for table in read_unit(source.reading, unit) for row in table.to_pylist()]
    assert rows == [number for number in range(20) for _ in range(3)]


def test_keys_hold_elsewhere(tmp_path: Path) -> None:
    """Keys and facts contain names and sizes, not the location of the files."""
    created = []
    for destination in ("here", "there"):
        (tmp_path / destination / "x").mkdir(parents=True)
        (tmp_path / destination / "x" / "a.jsonl").write_text('{"a": 1}\n' * 50)
        source = open_rows(tmp_path / destination, RowOptions(unit_size=100))
        created.append((source.facts, [unit.key for unit in source.units(1)]))
    assert created[0] == created[1]
    assert str(tmp_path) not in json.dumps(created)


def test_unify_widens() -> None:
    """Null widens to any type, numbers and texts widen, structs and lists gain fields."""
    first = pa.schema([("a", pa.null()), ("b", pa.int8()), ("c", pa.struct([("x", pa.int64())])), ("d", pa.string())])
    second = pa.schema(
        [
            ("b", pa.uint8()),
            ("c", pa.struct([("y", pa.list_(pa.float32())), ("x", pa.float64())])),
            ("a", pa.list_(pa.int32())),
            ("d", pa.large_string()),
            ("e", pa.bool_()),
        ]
    )
    assert unify([first, second]) == pa.schema(
        [
            ("a", pa.list_(pa.int32())),
            ("b", pa.int16()),
            ("c", pa.struct([("x", pa.float64()), ("y", pa.list_(pa.float32()))])),
            ("d", pa.large_string()),
            ("e", pa.bool_()),
        ]
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pa.int64(), pa.string()),
        (pa.bool_(), pa.int64()),
        (pa.string(), pa.binary()),
        (pa.list_(pa.int64()), pa.int64()),
        (pa.struct([("x", pa.int64())]), pa.struct([("x", pa.string())])),
    ],
)
def test_unify_refuses(first: pa.DataType, second: pa.DataType) -> None:
    """Types without a common type are an error that names the column."""
    with pytest.raises(InputError, match="column 'a"):
        unify([pa.schema([("a", first)]), pa.schema([("a", second)])])


def test_unify_keeps_features() -> None:
    """Features of `datasets` are kept if all files have the same, whatever their fingerprints."""
    messages = [
        pa.schema(
            [("a", pa.int64())], {"huggingface": json.dumps({"info": {"features": {"a": 1}}, "fingerprint": mark})}
        )
        for mark in ("x", "y")
    ]
    metadata = unify(messages).metadata
    assert json.loads(metadata[b"huggingface"]) == {"info": {"features": {"a": 1}}}


def test_cast_follows() -> None:
    """Casting keeps values, also in slices and after nulls; missing values become null."""
    rows = [
        {"s": {"x": 1}, "l": [1, None]},
        {"s": None, "l": None},
        {"s": {"x": None}, "l": []},
        {"s": {"x": 4}, "l": [5]},
    ]
    table = pa.Table.from_pylist(rows).slice(1)
    wide = pa.schema(
        [
            ("new", pa.string()),
            ("l", pa.large_list(pa.float64())),
            ("s", pa.struct([("y", pa.list_(pa.int8())), ("x", pa.float64())])),
        ]
    )
    actual = cast(table, wide)
    actual.validate(full=True)
    assert actual.schema == wide
    expected = []
    for row in rows[1:]:
        own = row["s"]
        expected.append({"new": None, "l": row["l"], "s": None if own is None else {"y": None, "x": own["x"]}})
    assert actual.to_pylist() == expected


@given(sizes=st.lists(st.integers(0, 40), max_size=12), rows=st.integers(1, 50))
def test_batches_are_exact(sizes: list[int], rows: int) -> None:
    """For any input tables, batches have the requested number of rows, in order."""
    values = iter(range(sum(sizes)))
    tables = [pa.table({"a": pa.array([next(values) for _ in range(size)], pa.int64())}) for size in sizes]
    batches = [batch.column("a").to_pylist() for batch in cut_batches(iter(tables), rows, 0)]
    assert [value for batch in batches for value in batch] == list(range(sum(sizes)))
    assert all(len(batch) == rows for batch in batches[:-1])
    assert not batches or 0 < len(batches[-1]) <= rows


@given(
    lengths=st.lists(st.integers(0, 50), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    limit=st.integers(1, 120),
    rows=st.none() | st.integers(1, 9),
)
def test_batches_by_bytes(lengths: list[int], cuts: list[int], limit: int, rows: int | None) -> None:
    """Batches by bytes depend on the rows, not on the input tables, and hold at least one row."""
    whole = pa.table({"a": pa.array(["x" * length for length in lengths], pa.string())})
    edges = sorted({0, len(lengths), *(min(cut, len(lengths)) for cut in cuts)})
    segments = [whole.slice(low, high - low) for low, high in itertools.pairwise(edges)]
    batches = [batch.column("a").to_pylist() for batch in cut_batches(iter(segments), rows, limit)]
    repeated = [batch.column("a").to_pylist() for batch in cut_batches(iter([whole]), rows, limit)]
    assert all(len(batch) <= (rows or 40) for batch in batches)
    assert batches == repeated
    assert [len(value) for batch in batches for value in batch] == lengths
    assert all(len(batch) == 1 or sum(len(value) + 4 for value in batch) <= limit for batch in batches)


def test_where_names_the_row(tmp_path: Path) -> None:
    """An error about a row of a unit states its file, its row number in the file and its byte offset."""
    path = tmp_path / "a.jsonl"
    lines = [b'{"a": %d}\n' % number for number in range(100)]
    path.write_bytes(b"".join(lines))
    source = open_rows(path, RowOptions(unit_size=300))
    unit = list(source.units(1, indices=True))[1]
    assert unit.first_row is not None
    row = unit.first_row + 3
    assert describe_row(unit, source.reading, 3) == f"a.jsonl, row {row} (byte {len(b''.join(lines[:row]))})"


def test_rows_are_counted_by_blocks(tmp_path: Path) -> None:
    """The row count is the same with and without a final line break, and blank lines of JSON do not count."""
    path = tmp_path / "a"
    path.write_bytes(b'\n{"a": 1}\n\n  \r\n{"a": 2}')
    size = path.stat().st_size
    assert count_rows(str(path), "jsonl", 0, size) == 2
    assert count_rows(str(path), "lines", 0, size) == 5
    assert np.array_equal(RowScanner("lines").feed(b"a\n\nb"), [2, 3])
