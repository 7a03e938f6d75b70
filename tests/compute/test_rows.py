"""For every kind of source, the rows of its units equal the rows that other readers return."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.read_unit import cut_batches, describe_row, read_unit
from brim.compute.rows.row_files import RowOptions
from brim.compute.rows.schemas import cast, unify
from brim.compute.rows.unit import RowSource, Unit
from brim.errors import InputError, SourceChangedError

ROWS = [
    {"n": n, "text": f"row {n} ü" * (n % 5), "day": "2024-01-02", "l": [n, None] if n % 3 else None, "s": {"x": n / 2}}
    for n in range(2500)
]


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def units_of(source: RowSource, align: int = 100, **options: Any) -> list[Unit]:
    return list(source.units(align, **options))


def table_of(source: RowSource, units: list[Unit]) -> pa.Table:
    tables = [table for unit in units for table in read_unit(source.reading, unit, 1 << 14)]
    schema = unify([source.schema, *(table.schema for table in tables)])
    return pa.concat_tables([cast(table, schema) for table in tables])


def aligned(units: list[Unit], align: int, rows: int) -> bool:
    firsts = [unit.first_row for unit in units]
    return all(first is not None and first % align == 0 for first in firsts) and sum(u.rows or 0 for u in units) == rows


def test_json_lines_keep_their_types(tmp_path: Path) -> None:
    """Dates stay texts, nested values are complete, and a folder of files is one table."""
    write_jsonl(tmp_path / "a.jsonl", ROWS[:1700])
    write_jsonl(tmp_path / "b.jsonl", ROWS[1700:])
    (tmp_path / "README.md").write_text("about this")
    source = open_rows(tmp_path, RowOptions(unit_size=20_000))
    units = units_of(source)
    assert len(units) > 5
    assert units[0].first_row is None
    assert table_of(source, units).to_pylist() == ROWS
    assert source.schema.field("day").type == pa.string()


def test_late_columns_and_types(tmp_path: Path) -> None:
    """Floats, columns, fields and values that appear after the samples of the plan are not lost."""
    rows: list[dict[str, Any]] = [{"a": n, "b": None, "c": {"x": 1}, "pad": "x" * 3000} for n in range(6000)]
    rows[2200] |= {"a": 2.5, "new": [1], "b": "2020-01-01", "c": {"x": None, "y": "z"}}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    source = open_rows(path, RowOptions(unit_size=5_000_000, columns=("a", "b", "c")))
    assert source.schema.field("b").type == pa.null()
    actual = table_of(source, units_of(source)).to_pylist()
    assert actual[2200] == {"a": 2.5, "b": "2020-01-01", "c": {"x": None, "y": "z"}}
    assert [row["a"] for row in actual] == [row["a"] for row in rows]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (b'{"a": 1}\n{"a": \n', r"a\.jsonl, line 4,002 \(byte 36,009\): this is not a row of JSON"),
        (b'{"a": "x"}\n', r"a\.jsonl, line 4,001 \(byte 36,000\): the column 'a' is string here and int64 before"),
        (b'{"a":\n 1}\n', r"a\.jsonl, line 4,001"),
        (b'{"a": 1} {"a": 2}\n', r"a\.jsonl, line 4,001"),
        (b'{"a": "\xff"}\n', r"'a\.jsonl' is not UTF-8 text \(byte 36,007\)"),
        (b"[1]\n", r"a\.jsonl, line 4,001 .*an array, not an object"),
    ],
)
def test_broken_json_lines(tmp_path: Path, broken: bytes, message: str) -> None:
    """A line that is not a row is an error with its byte offset."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 4000 + broken + b'{"a": 3}\n')
    with pytest.raises(InputError, match=message):
        table_of(source := open_rows(path, RowOptions(unit_size=10_000)), units_of(source))


def test_csv_is_what_pyarrow_reads(tmp_path: Path) -> None:
    """Numbers, texts with line breaks, and ids that are not numbers are correct; files may order columns
    differently."""
    text = "".join(f'{n},"line {n}\nnext",{n / 4},00{n},2024-01-02\n' for n in range(3000))
    (tmp_path / "a.csv").write_text("n,t,f,id,day\n" + text)
    (tmp_path / "b.csv").write_text("t,n,f,day,id\nz,5,6,d,7\n")
    source = open_rows(tmp_path / "*.csv", RowOptions(unit_size=9000))
    assert source.schema == pa.schema(
        [("n", pa.int64()), ("t", pa.string()), ("f", pa.float64()), ("id", pa.string()), ("day", pa.string())]
    )
    convert = arrow_csv.ConvertOptions(column_types={"id": pa.string(), "day": pa.string()})
    parse = arrow_csv.ParseOptions(newlines_in_values=True)
    expected = arrow_csv.read_csv(tmp_path / "a.csv", parse_options=parse, convert_options=convert).to_pylist()
    expected.append({"n": 5, "t": "z", "f": 6.0, "id": "7", "day": "d"})
    units = units_of(source, indices=True)
    assert table_of(source, units).to_pylist() == expected
    assert sum(unit.rows or 0 for unit in units) == 3001


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"7\n", r"a\.csv, line 400,002 \(byte 2,400,004\): this row has 1 values, and the header names 2"),
        (b"007,1\n", r"a\.csv, after byte .*the column 'a' holds '007', which would be changed as int64"),
        (b"x,1\n", r"a\.csv, line 400,002 .*the column 'a' holds 'x', and int64 before"),
    ],
)
def test_broken_csv(tmp_path: Path, row: bytes, message: str) -> None:
    """The error names a row with wrong fields, and its unit returns no rows."""
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n" + b"12,yz\n" * 400_000 + row + b"12,yz\n" * 900_000)
    source = open_rows(path, RowOptions(unit_size=1_000_000))
    with pytest.raises(InputError, match=message):
        table_of(source, units_of(source))


def test_open_quote(tmp_path: Path) -> None:
    """A quote that is never closed is an error, and does not silently swallow the rest of the file."""
    (tmp_path / "a.csv").write_text('a,b\n1,2\n3,"4\n5,6\n')
    with pytest.raises(InputError, match=r"'a\.csv' has a quote after byte 4 that is never closed"):
        table_of(source := open_rows(tmp_path), units_of(source))


def write_kinds(folder: Path, kind: str) -> Path:
    table = pa.Table.from_pylist(ROWS)
    path = folder / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=300)
    elif kind == "feather":
        feather.write_feather(table, str(path), chunksize=77)
    else:
        coded = table.append_column("code", pa.array(["x", "y"] * 1250).dictionary_encode())
        with pa.ipc.new_stream(str(path), coded.schema) as writer:
            writer.write_table(coded, max_chunksize=77)
    return path


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow"])
@pytest.mark.parametrize("align", [1, 7, 100, 1000])
def test_rows_that_can_be_addressed(tmp_path: Path, kind: str, align: int) -> None:
    """Units start at multiples of the batch size, also across files, and no row is lost."""
    path = write_kinds(tmp_path, kind)
    (tmp_path / f"b.{kind}").write_bytes(path.read_bytes())
    source = open_rows(tmp_path, RowOptions(unit_size=12_000))
    units = units_of(source, align)
    assert aligned(units, align, 5000)
    assert len(units) == 5 if align == 1000 else len(units) > 5
    actual = table_of(source, units)
    assert actual.drop_columns(["code"] if kind == "arrow" else []).to_pylist() == ROWS + ROWS
    assert source.total_rows == 5000
    assert describe_row(units[-1], source.reading, 0).startswith(f"b.{kind}, row ")


@pytest.mark.parametrize("kind", ["parquet", "feather", "arrow"])
def test_broken_tables(tmp_path: Path, kind: str) -> None:
    """A truncated file is refused when the job is planned."""
    path = write_kinds(tmp_path, kind)
    path.write_bytes(path.read_bytes()[:-40] if kind == "parquet" else path.read_bytes()[:30_000])
    with pytest.raises(InputError, match=rf"'a\.{kind}' is not a complete"):
        open_rows(path)


def test_damaged_page(tmp_path: Path) -> None:
    """Damage inside a Parquet file is an error that names the file when the unit is read."""
    path = write_kinds(tmp_path, "parquet")
    content = bytearray(path.read_bytes())
    content[200:4000] = b"\xff" * 3800
    path.write_bytes(content)
    source = open_rows(path)
    with pytest.raises(InputError, match=r"'a\.parquet' cannot be read as Parquet"):
        table_of(source, units_of(source))


def test_types_of_files_conflict(tmp_path: Path) -> None:
    """The error names two files whose types have no common schema."""
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"'a' is int64 in 'a\.parquet' and string in 'b\.parquet'"):
        open_rows(tmp_path)


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    """They are refused when the source is opened, as in CSV; the other columns can be selected."""
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array([1]), pa.array([2])], names=["text", "a", "a"])
    pq.write_table(table, tmp_path / "a.parquet")
    for source in (tmp_path / "a.parquet", [table]):
        with pytest.raises(InputError, match="several columns named 'a'"):
            open_rows(source)
        with pytest.raises(InputError, match="several columns named 'a'"):
            open_rows(source, RowOptions(columns=("a",)))
    with pytest.raises(InputError, match="names a column twice"):
        RowOptions(columns=("text", "text"))
    selection = open_rows(tmp_path / "a.parquet", RowOptions(columns=("text",)))
    assert table_of(selection, units_of(selection)).to_pylist() == [{"text": "x"}]


@pytest.mark.parametrize("codec", ["gz", "zst"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt"])
def test_compressed(tmp_path: Path, codec: str, kind: str) -> None:
    """Compressed files are spooled in units of whole batches; a finished unit is skipped and keeps its key."""
    data = tmp_path / "data"
    data.mkdir()
    expected: list[Any] = []
    for number in range(3):
        rows = [
            {"n": n, "t": f"ü\n{n}" if kind == "csv" else f"ü {n}"} for n in range(number * 1111, 1111 + number * 1111)
        ]
        expected += rows if kind != "txt" else [{"text": str(row)} for row in rows]
        if kind == "jsonl":
            text = "".join(json.dumps(row) + "\n\n" for row in rows)
        elif kind == "csv":
            text = "n,t\r\n" + "".join(f'{row["n"]},"{row["t"]}"\r\n' for row in rows).removesuffix("\r\n")
        else:
            text = "\n".join(map(str, rows))
        with pa.CompressedOutputStream(
            str(data / f"{number}.{kind}.{codec}"), "gzip" if codec == "gz" else "zstd"
        ) as out:
            out.write(text.encode())
    source = open_rows(data, RowOptions(unit_size=5000))
    spool = tmp_path / "spool"
    rows = []
    units = []
    for unit in source.units(50, spool=spool):
        assert len(list(spool.iterdir())) == len(unit.spans)
        rows += table_of(source, [unit]).to_pylist()
        units.append(unit)
        for span in unit.spans:
            os.unlink(span.path)
    assert rows == expected
    assert aligned(units, 50, 3333)
    assert len(units) > 5
    repeated = units_of(source, 50, spool=spool, skip=lambda number: number != 2)
    assert [unit.key for unit in repeated] == [unit.key for unit in units]
    assert {path.name.split("-")[0] for path in spool.iterdir()} == {"00000002"}
    shown, before, _ = repeated[2].origins[0]
    assert describe_row(repeated[2], source.reading, 3) == f"{shown}, row {before + 3:,}"
    limited = units_of(open_rows(data, RowOptions(unit_size=5000, limit=1234)), 50, spool=tmp_path / "other")
    assert sum(unit.rows or 0 for unit in limited) == 1234


def test_cut_off_gzip(tmp_path: Path) -> None:
    """A truncated compressed file is an error that names it, not fewer rows."""
    path = tmp_path / "a.jsonl.gz"
    content = "".join(json.dumps({"a": n, "b": str(n * 7919)}) + "\n" for n in range(100_000)).encode()
    path.write_bytes(gzip.compress(content)[:-1000])
    source = open_rows(path)
    with pytest.raises(InputError, match=r"'a\.jsonl\.gz' is damaged or cut off"):
        units_of(source, spool=tmp_path / "spool")


def test_documents(tmp_path: Path) -> None:
    """Each file is a row of its text and name, compressed or not."""
    (tmp_path / "x").mkdir()
    for name, text in (("a.md", "one\n"), ("b.md", ""), ("x/c.md", "drei ü")):
        (tmp_path / name).write_text(text)
    source = open_rows(tmp_path, RowOptions(text="document"))
    units = units_of(source)
    assert aligned(units, 1000, 3)
    assert table_of(source, units).to_pylist() == [
        {"text": "one\n", "path": "a.md"},
        {"text": "", "path": "b.md"},
        {"text": "drei ü", "path": "x/c.md"},
    ]


def late(count: int) -> Iterator[dict[str, Any]]:
    """Yield rows whose types change late."""
    for n in range(count):
        row: dict[str, Any] = {"n": n, "v": None if n < 3000 else float(n), "s": {"x": "a" * 500}}
        if n >= 4000:
            row["s"]["y"] = [n]
            row["new"] = b"z"
        yield row


def test_iterator(tmp_path: Path) -> None:
    """Rows of an iterator are spooled in order; late types widen the column, and no value is lost."""
    source = open_rows(lambda: late(5000), RowOptions(unit_size=400_000, name="mine"))
    assert source.facts == {"iterator": True, "name": "mine", "options": {"unit_bytes": 400_000}}
    units = units_of(source, 300, spool=tmp_path)
    assert aligned(units, 300, 5000)
    actual = table_of(source, units).to_pylist()
    expected = [{"new": None, **row, "s": {"y": None, **row["s"]}} for row in late(5000)]
    assert actual == expected
    assert [unit.key for unit in units_of(source, 300, spool=tmp_path, skip=lambda number: True)] == [
        unit.key for unit in units
    ]
    once = open_rows(late(10))
    assert len(units_of(once, spool=tmp_path)) == 1
    with pytest.raises(InputError, match=r"already consumed|already in memory"):
        list(once.units(1, spool=tmp_path))


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: rows,
        lambda rows: pa.Table.from_pylist(rows),
        lambda rows: iter(pa.Table.from_pylist(rows).to_batches(max_chunksize=100)),
        lambda rows: pa.Table.from_pylist(rows).to_reader(),
        lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
        lambda rows: datasets.Dataset.from_list(rows).to_pandas(),
    ],
    ids=["list", "table", "batches", "reader", "stream", "pandas"],
)
def test_things_in_memory(tmp_path: Path, make: Any) -> None:
    """Any iterable of rows or tables is accepted as an iterator."""
    rows = [{"a": n, "t": "x" * (n % 9)} for n in range(1500)]
    source = open_rows(make(rows), RowOptions(unit_size=5000))
    units = units_of(source, 40, spool=tmp_path)
    assert aligned(units, 40, 1500)
    assert table_of(source, units).to_pylist() == rows


def test_column_that_shows_late_and_changes(tmp_path: Path) -> None:
    """A column that only a later CSV file has keeps one type within a unit."""
    for number in range(20):
        (tmp_path / f"{number:02}.csv").write_text("a\n1\n" if number < 18 else f"a,b\n1,{'x' * (number - 18) or 5}\n")
    with pytest.raises(InputError, match=r"19\.csv, line 2 .*the column 'b' holds 'x', and int64 before"):
        table_of(source := open_rows(tmp_path), units_of(source))


def test_iterator_with_a_conflict(tmp_path: Path) -> None:
    """The error names the number of the row whose type conflicts with earlier ones."""
    rows = [{"a": n} for n in range(2500)] + [{"a": "x"}]
    with pytest.raises(InputError, match="row 2,500: the column 'a' is string here and int64 before"):
        units_of(open_rows(iter(rows)), spool=tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    features = datasets.Features({"n": datasets.Value("int32"), "c": datasets.ClassLabel(names=["x", "y"])})
    dataset = datasets.Dataset.from_dict({"n": range(3000), "c": [0, 1, 1] * 1000}, features=features)
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(10))}).save_to_disk(
        str(folder / "ds"), num_shards={"train": 3, "test": 1}
    )
    return folder / "ds"


def test_saved_dataset(saved: Path) -> None:
    """A folder that `datasets` saved is read without that library, one split at a time."""
    with pytest.raises(InputError, match=r"several splits.*train, test"):
        open_rows(saved)
    source = open_rows(saved, RowOptions(from_split="train", unit_size=9000))
    units = units_of(source, 100)
    assert aligned(units, 100, 3000)
    assert table_of(source, units).column("n").to_pylist() == list(range(3000))
    assert datasets.Features.from_arrow_schema(source.schema)["c"].names == ["x", "y"]


def test_a_split_of_shards(tmp_path: Path) -> None:
    """For shards in a folder, a glob or a file, only the named split and config are read, never all rows instead."""
    for split, rows in (("train", 30), ("test", 4)):
        path = tmp_path / "ds" / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": range(rows)}), path)
    for source in (tmp_path / "ds", tmp_path / "ds" / "data" / "*.parquet"):
        assert open_rows(source, RowOptions(from_split="test", from_config="default")).total_rows == 4
        for names, message in (
            (RowOptions(from_split="dev"), "no split 'dev'"),
            (RowOptions(from_config="x"), "no config 'x'"),
        ):
            with pytest.raises(InputError, match=message):
                open_rows(source, names)
    with pytest.raises(InputError, match="no split 'train'"):
        open_rows(tmp_path / "ds" / "data" / "test-00000-of-00001.parquet", RowOptions(from_split="train"))


@pytest.mark.parametrize(
    "messages", [{"from_split": "train"}, {"from_config": "x"}, {"delimiter": ";"}, {"text": "document"}], ids=str
)
def test_options_that_say_nothing_about_a_source(tmp_path: Path, saved: Path, messages: dict[str, Any]) -> None:
    """Such options are refused for files and for rows in memory; otherwise an ignored split would return all rows."""
    first = datasets.load_from_disk(str(saved))["train"]
    first.save_to_disk(str(tmp_path / "one"))
    for source in (write_jsonl(tmp_path / "a.jsonl"), [{"a": 1}], first, pa.table({"a": [1]}), lambda: iter(ROWS)):
        with pytest.raises(InputError, match=r"can only be used with"):
            open_rows(source, RowOptions(**messages))
    if "split" in messages:
        with pytest.raises(InputError, match="no split 'dev'"):
            open_rows(tmp_path / "one", RowOptions(from_split="dev"))


@pytest.mark.parametrize(
    ("change", "mapped"),
    [
        (lambda ds: ds, True),
        (lambda ds: ds.select(range(150, 2700)).rename_column("n", "m"), True),
        (lambda ds: ds.remove_columns("n"), True),
        (lambda ds: datasets.concatenate_datasets([ds, ds.select(range(100))]), True),
        (lambda ds: ds.shuffle(seed=3), False),
        (lambda ds: ds.filter(lambda n: n % 7 == 0, input_columns="n"), False),
        (lambda ds: ds.add_column("z", list(range(3000))), False),
        (lambda ds: datasets.Dataset.from_dict({"a": ["x", None] * 700, "l": [[1.5]] * 1400}), False),
    ],
)
def test_dataset(saved: Path, tmp_path: Path, change: Any, mapped: bool) -> None:
    """A dataset's rows are read in order: from its files if it contains exactly them, otherwise from a spool."""
    dataset = change(datasets.load_from_disk(str(saved))["train"])
    source = open_rows(dataset, RowOptions(unit_size=4000))
    units = units_of(source, 50, spool=tmp_path)
    assert {unit.spooled for unit in units} == {not mapped}
    assert aligned(units, 50, len(dataset))
    assert table_of(source, units).to_pylist() == dataset.with_format(None).to_list()
    assert source.schema == dataset.features.arrow_schema
    assert source.facts["fingerprint"] == dataset._fingerprint
    first = dataset.column_names[0]
    single = open_rows(dataset, RowOptions(columns=(first,), limit=120, unit_size=4000))
    assert table_of(single, units_of(single, 50, spool=tmp_path)).to_pylist() == [
        {first: value} for value in dataset.with_format(None)[:120][first]
    ]


def test_changed_source(tmp_path: Path) -> None:
    """A file that changes after planning is an error, and its new rows are not read."""
    path = write_jsonl(tmp_path / "a.jsonl")
    source = open_rows(path)
    units = units_of(source)
    os.utime(path, ns=(1, 1))
    with pytest.raises(SourceChangedError, match=r"'a\.jsonl' was written to"):
        table_of(source, units)
    path.unlink()
    with pytest.raises(SourceChangedError, match="cannot be read any more"):
        table_of(source, units)


@pytest.mark.parametrize(
    ("files", "source", "message"),
    [
        ({}, "nowhere.jsonl", "does not exist"),
        ({"a.bin": b"x"}, ".", r"Nothing was found at .*looked for files that end in \.jsonl"),
        ({"a.jsonl": b"{}", "b.csv": b"x"}, ".", "different formats: 'a.jsonl' and 'b.csv'"),
        ({"b.jsonl": b"", "c.jsonl": b""}, ".", "'b.jsonl' is empty"),
        ({"a.json": b' [{"a": 1}]'}, "a.json", "one JSON array, not JSON lines.*jq"),
        ({"a.csv": b"a,a\n1,2\n"}, "a.csv", "several columns named 'a'"),
        ({"a.parquet": b"PAR1"}, "a.parquet", "not a complete Parquet file"),
        ({"a.bin": b"x"}, "a.bin", "name without a known suffix"),
    ],
)
def test_refused(tmp_path: Path, files: dict[str, bytes], source: str, message: str) -> None:
    """Unreadable sources are refused on opening, with a clear message."""
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        open_rows(tmp_path / source)


def test_limit(tmp_path: Path) -> None:
    """The first rows of a file that is cut by bytes are read, and no further ones."""
    path = write_jsonl(tmp_path / "a.jsonl")
    source = open_rows(path, RowOptions(limit=1234, unit_size=10_000))
    assert table_of(source, units_of(source)).to_pylist() == ROWS[:1234]


_PEAK = """
import resource, sys
import pyarrow as pa
from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.read_unit import read_unit
from brim.compute.rows.row_files import RowOptions
source = open_rows(sys.argv[1], RowOptions())
def used():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
before = peak = used()
rows = 0
for unit in source.units(1000):
    for table in read_unit(source.reading, unit):
        rows += table.num_rows
        peak = max(peak, used())
print(rows, (peak - before) // 1024)
"""


def test_memory_of_one_row_group(tmp_path: Path) -> None:
    """A Parquet file with a single row group of 150 MB is not decoded as a whole."""
    random = np.random.default_rng(1)
    texts = pa.array([random.bytes(750).hex() for _ in range(100_000)])
    pq.write_table(pa.table({"t": texts}), tmp_path / "a.parquet", row_group_size=1_000_000, use_dictionary=False)
    result = subprocess.run(
        [sys.executable, "-c", _PEAK, tmp_path / "a.parquet"], capture_output=True, text=True, check=True
    )
    rows, megabytes = map(int, result.stdout.split())
    assert rows == 100_000
    assert megabytes < 80  # mostly memory that the allocator keeps, which does not grow with the row group


def test_batches_of_a_unit_stream(tmp_path: Path) -> None:
    """Batches of an addressable source equal those of the complete source."""
    path = write_kinds(tmp_path, "parquet")
    source = open_rows(path, RowOptions(unit_size=10_000))
    batches = [
        batch.num_rows for unit in source.units(64) for batch in cut_batches(read_unit(source.reading, unit), 64, 0)
    ]
    assert batches == [64] * 39 + [4]


def test_a_unit_of_arrow_begins_at_its_own_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading starts at the unit, not at the start of the file, which would be scanned for each unit; also for a
    selection."""
    from brim.compute.rows import arrow_rows

    table = pa.table({"n": list(range(1000))})
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    whole = datasets.Dataset.from_file(str(tmp_path / "rows.arrow"))
    usual, looks = arrow_rows._header, list[int]()
    monkeypatch.setattr(arrow_rows, "_header", lambda view: looks.append(1) or usual(view))
    for dataset in (whole, whole.select(range(100, 903)), datasets.concatenate_datasets([whole, whole])):
        rows = open_rows(dataset, RowOptions(unit_size=1000))
        units = list(rows.units(1))
        assert len(units) > 20
        looks.clear()
        actual = [value for unit in units for part in read_unit(rows.reading, unit) for value in part["n"].to_pylist()]
        assert actual == dataset["n"][:]
        assert len(looks) < 2 * 300 + 2 * len(units)
