"""Unreadable rows with --on-error are left out with file and line, and every other row is kept."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim
from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.read_unit import read_unit
from brim.compute.rows.row_files import RowOptions
from brim.compute.rows.unit import UnreadableRow
from brim.errors import InputError
from tests.forked import brim as command

BAD_JSON = {
    5: (b'{"id": 5, "text": "cut', "not a row of JSON"),
    40: (b'{"id": 40, "text": "\\ud83d"}', "half of a surrogate pair"),
    41: (b'{"id": 41, "text": "\xff"}', "not UTF-8"),
    77: (b'{"id": 77, "text": 77}', "the column 'text' is int64"),
    78: (b'{"id": "78", "text": "x"}', "the column 'id' is string"),
    90: (b"[1]", "an array, not an object"),
    91: (b"null", "null, not an object"),
    92: (b'{"id": 92, "id": 93, "text": "x"}', "'id' occurs twice"),
    99: (b'{"id": 12345678901234567890, "text": "x"}', "more than 64 bits"),
    118: (b'{"id": 118} {"id": 118}', "not a row of JSON"),
    119: (b'{"\\ud83d": 1}', "half of a surrogate pair"),
}
BAD_CSV = {
    5: (b"5", "1 values, and the header names 2"),
    41: (b"41,\xff", "not UTF-8"),
    42: (b"42,a,b", "3 values, and the header names 2"),
    43: (b'43,"a\nb",c', "3 values, and the header names 2"),
}
BAD_LINES = {0: (b"\xff", "not UTF-8"), 41: (b"41 \xfe\xfe", "not UTF-8"), 119: (b"\xc3", "not UTF-8")}
ROWS = 120


def write_source(folder: Path, kind: str) -> tuple[Path, dict[int, int]]:
    """Write a file with bad rows; return the line number of each. Except in text files,
    every tenth row is followed by a blank line."""
    bad = {"jsonl": BAD_JSON, "csv": BAD_CSV, "txt": BAD_LINES}[kind]
    content, lines = (b"id,text\r\n" if kind == "csv" else b""), {}
    for number in range(ROWS):
        lines[number] = content.count(b"\n") + 1
        good = {"jsonl": b'{"id": %d, "text": "t%d"}', "csv": b'%d,"t%d"', "txt": b"%d t%d"}[kind] % (number, number)
        content += bad[number][0] if number in bad else good
        content += b"\n\n" if number % 10 == 9 and kind != "txt" else b"\n"
    path = folder / f"a.{kind}"
    path.write_bytes(content)
    return path, {number: lines[number] for number in bad}


def read(source: Any, tmp_path: Path, **options: Any) -> tuple[list[dict[str, Any]], list[tuple[int, UnreadableRow]]]:
    """Return the rows, and the left-out rows with their numbers in the source."""
    reader = open_rows(source, RowOptions(leave_out_unreadable=True, **options))
    rows: list[dict[str, Any]] = []
    left_out: list[tuple[int, UnreadableRow]] = []
    for unit in reader.units(1, indices=True, spool=tmp_path / "spool"):
        own: list[UnreadableRow] = []
        for table in read_unit(reader.reading, unit, 300, own.append):
            rows += table.to_pylist()
        left_out += [((unit.first_row or 0) + row.offset, row) for row in own]
    return rows, left_out


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt"])
@pytest.mark.parametrize("unit_bytes", [700, 1_000_000])
@pytest.mark.parametrize("zipped", [False, True])
def test_unreadable_rows_are_reported_with_file_line_and_content(
    tmp_path: Path, kind: str, unit_bytes: int, zipped: bool
) -> None:
    path, lines = write_source(tmp_path, kind)
    content = path.read_bytes()
    bad = {"jsonl": BAD_JSON, "csv": BAD_CSV, "txt": BAD_LINES}[kind]
    if zipped:
        path = path.rename(f"{path}.gz")
        path.write_bytes(gzip.compress(content))
    rows, left_out = read(path, tmp_path, unit_size=unit_bytes)
    if kind == "txt":
        assert [row["text"] for row in rows] == [f"{n} t{n}" for n in range(ROWS) if n not in bad]
    else:
        assert rows == [{"id": n, "text": f"t{n}"} for n in range(ROWS) if n not in bad]
    assert [number for number, _ in left_out] == list(bad)
    for number, row in left_out:
        assert row.file == path.name
        assert row.line == lines[number]
        assert row.content.rstrip(b"\r\n") == bad[number][0]
        assert bad[number][1] in row.reason
        if not zipped:
            assert row.byte is not None
            assert content[row.byte :].startswith(bad[number][0])


@pytest.mark.parametrize("first", [b'{"a": "x"}\n', b'{"a": 1.5}\n{"a": "x"}\n{"a": "x"}\n', b'{"a": [1]}\n'])
def test_the_type_of_most_rows_decides_which_rows_are_wrong(tmp_path: Path, first: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(first + b'{"a": 1}\n' * 50)
    (tmp_path / "b.jsonl").write_bytes(b'{"a": 2}\n' * 50)
    rows, left_out = read(tmp_path, tmp_path / "x")
    assert len(rows) == 100 + first.count(b"1.5")
    assert len(left_out) == first.count(b"\n") - first.count(b"1.5")
    rows, left_out = read([str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")], tmp_path / "x")
    assert len(left_out) == first.count(b"\n") - first.count(b"1.5")


@pytest.mark.long
def test_csv_values_behind_the_samples_that_would_change_are_left_out(tmp_path: Path) -> None:
    """An integer widens to a float; 007, 0x10 and digits that a float would lose do not count as numbers."""
    good = b"1,2.5," + b"x" * 1000 + b"\n"
    odd = b"7.5,1,x\n007,1,x\n0x10,1,x\n1,12345678901234567,x\n1,1e999,x\nabc,1,x\n"
    (tmp_path / "a.csv").write_bytes(b"a,b,c\n" + good * 4000 + odd + good * 9000)
    rows, left_out = read(tmp_path / "a.csv", tmp_path, unit_size=10_000_000)
    assert len(rows) == 13_001
    assert rows[4000]["a"] == 7.5
    assert [row.content for _, row in left_out] == odd.splitlines(keepends=True)[1:]
    source = open_rows(tmp_path / "a.csv")
    with pytest.raises(InputError, match=r"would be changed|, and int64 before"):
        list(itertools.chain.from_iterable(read_unit(source.reading, unit) for unit in source.units(1)))


def test_documents_that_are_not_text_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name, content in {"a.txt": b"one", "b.txt": b"\xff", "c.txt": b"three"}.items():
        (folder / name).write_bytes(content)
    rows, left_out = read(folder, tmp_path, text="document")
    assert [row["text"] for row in rows] == ["one", "three"]
    assert [(number, row.file, row.line) for number, row in left_out] == [(1, "b.txt", None)]


STEPS = """
def length(row):
    if row["text"] == "t50":
        raise ValueError("not this one")
    return {"n": len(row["text"])}

def index(row, number):
    return {"number": number}

def batch(rows):
    return {"n": [len(text) for text in rows["text"]]}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "steps.py").write_text(STEPS)
    write_source(tmp_path, "jsonl")
    write_source(tmp_path, "csv")
    return tmp_path


def shard_rows(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((out / "data").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_map_quarantines_unreadable_and_failing_rows_in_one_file(work: Path, kind: str) -> None:
    path, lines = write_source(work, kind)
    arguments = ["map", path, work / "out", "--fn", "steps.py:length", "--unit-size", "1KB"]
    assert "--on-error" in command(*arguments, check=2, cwd=work).stderr
    result = command(*arguments, "--on-error", "quarantine", "--fresh", cwd=work)
    assert f"{len(lines) + 1} rows" in result.stdout + result.stderr
    assert [row["id"] for row in shard_rows(work / "out")] == [n for n in range(ROWS) if n not in lines and n != 50]
    remaining = pq.read_table(work / "out" / "quarantine.parquet").to_pylist()
    assert [(row["brim_file"], row["brim_line"]) for row in remaining if row["brim_file"]] == [
        (path.name, line) for line in lines.values()
    ]
    (failed,) = [row for row in remaining if row["brim_file"] is None]
    assert failed["text"] == "t50"
    assert failed["brim_error"] == "ValueError: not this one"
    plain = command(*arguments[:2], work / "plain", *arguments[3:], "--on-error", "skip", cwd=work)
    assert f"{len(lines) + 1} rows" in plain.stdout + plain.stderr
    assert shard_rows(work / "plain") == shard_rows(work / "out")
    assert not (work / "plain" / "quarantine.parquet").exists()


@pytest.mark.parametrize("extra", [[], ["--unit-size", "700"], ["--where", "id >= 40"]])
def test_indices_count_unreadable_rows(work: Path, extra: list[str]) -> None:
    """Rows keep their number in the source, unless rows were selected, which are renumbered."""
    arguments = [
        "map",
        "a.jsonl",
        "out",
        "--fn",
        "steps.py:index",
        "--with-indices",
        "--on-error",
        "quarantine",
        *extra,
    ]
    command(*arguments, cwd=work)
    actual = shard_rows(work / "out")
    good = [n for n in range(ROWS) if n not in BAD_JSON and (not extra or "--where" not in extra or n >= 40)]
    assert [row["id"] for row in actual] == good
    assert [row["number"] for row in actual] == (list(range(len(good))) if "--where" in extra else good)
    remaining = pq.read_table(work / "out" / "quarantine.parquet")
    assert len(remaining) == len(BAD_JSON)
    if "--where" not in extra:
        assert remaining["brim_row"].to_pylist() == list(BAD_JSON)


def test_map_of_batches_reads_on_behind_an_unreadable_row(work: Path) -> None:
    arguments = ["map", "a.jsonl", "out", "--fn", "steps.py:batch", "--batched", "--batch-size", "16"]
    command(*arguments, "--on-error", "skip", cwd=work)
    assert [row["id"] for row in shard_rows(work / "out")] == [n for n in range(ROWS) if n not in BAD_JSON]


def test_tokenize_leaves_out_unreadable_rows(work: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "t1": 1}, unk_token="[UNK]"))
    tokenizer.save(str(work / "t.json"))
    arguments = ["tokenize", "a.jsonl", "out", "--tokenizer", "t.json", "--on-error", "quarantine", "--keep", "id"]
    command(*arguments, cwd=work)
    assert [row["id"] for row in shard_rows(work / "out")] == [n for n in range(ROWS) if n not in BAD_JSON]
    assert len(pq.read_table(work / "out" / "quarantine.parquet")) == len(BAD_JSON)


MODEL = """
import numpy as np

def factory():
    return lambda batch: {"text": np.array([[len(text), int(text[1:])] for text in batch["text"]], "float32")}
"""


def test_embed_leaves_out_unreadable_rows(work: Path) -> None:
    (work / "mine.py").write_text(MODEL)
    arguments = ["embed", "a.jsonl", "v.npy", "--model", "mine:factory", "--column", "text", "--keep", "id"]
    command(*arguments, "--on-error", "quarantine", cwd=work)
    good = [n for n in range(ROWS) if n not in BAD_JSON]
    assert np.load(work / "v.npy")[:, 1].tolist() == good
    assert len(pq.read_table(work / "v.npy.quarantine.parquet")) == len(BAD_JSON)


def test_map_in_python_leaves_out_unreadable_rows(work: Path) -> None:
    with pytest.raises(InputError, match="on_error"):
        brim.map(str(work / "a.jsonl"), len_of, cache_dir=work / "cache")
    actual = brim.map(str(work / "a.jsonl"), len_of, cache_dir=work / "cache", on_error="skip")
    assert actual["id"][:] == [n for n in range(ROWS) if n not in BAD_JSON]


def len_of(row: dict[str, Any]) -> dict[str, Any]:
    return {"n": len(row["text"])}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'id,text\n1,a\n2,"b\n3,c\n', "a quote after byte"),
        ("a.csv", b"id,text\xff\n1,a\n", "UTF-8"),
        ("a.parquet", b"PAR1 not at all", "Parquet"),
        ("a.jsonl.gz", gzip.compress(b'{"id": 1, "text": "a"}\n' * 5000)[:-40], "a.jsonl.gz"),
        ("a.jsonl", b'{"id": 1\n{"id": 2\n', "no rows"),
    ],
)
def test_files_that_are_broken_as_a_whole_stay_an_error(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "steps.py").write_text(STEPS)
    result = command("map", name, "out", "--fn", "steps.py:length", "--on-error", "skip", check=2, cwd=tmp_path)
    assert message in result.stderr


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("pattern", ["in", "in/*"])
def test_an_empty_file_among_others_is_left_out_with_a_note(tmp_path: Path, kind: str, pattern: str) -> None:
    (tmp_path / "steps.py").write_text("def f(row):\n    return {}\n")
    (tmp_path / "in").mkdir()
    for name in ("a", "c"):
        path = tmp_path / "in" / f"{name}.{kind}"
        if kind == "parquet":
            pq.write_table(pa.table({"x": [1, 2]}), path)
        else:
            path.write_text('{"x": 1}\n{"x": 2}\n' if kind == "jsonl" else "x\n1\n2\n")
    (tmp_path / "in" / f"b.{kind}").touch()
    result = command("map", pattern, "out", "--fn", "steps.py:f", cwd=tmp_path)
    assert f"b.{kind}" in result.stderr
    assert [row["x"] for row in shard_rows(tmp_path / "out")] == [1, 2, 1, 2]
    assert "is empty" in command("map", f"in/b.{kind}", "o2", "--fn", "steps.py:f", check=2, cwd=tmp_path).stderr


def test_the_ledger_counts_unreadable_rows_of_units_that_are_kept(work: Path) -> None:
    """Repeating the command computes nothing and reports the same rows."""
    arguments = ["map", "a.jsonl", "out", "--fn", "steps.py:batch", "--batched", "--on-error", "skip", "--json"]
    first = json.loads(command(*arguments, cwd=work).stdout.splitlines()[-1])
    assert first["bad_rows"] == len(BAD_JSON)
    assert json.loads(command(*arguments, cwd=work).stdout.splitlines()[-1])["rows"] == ROWS - len(BAD_JSON)


def test_messages_and_quarantine_number_rows_alike(tmp_path: Path) -> None:
    """Rows count from 0 in the error, its attributes and quarantine.parquet; lines count from 1."""
    (tmp_path / "steps.py").write_text("def f(row):\n    return {'y': 1 / (row['x'] - 7)}\n")
    pq.write_table(pa.table({"x": list(range(10))}), tmp_path / "a.parquet")
    arguments = ["map", "a.parquet", "out", "--fn", "steps.py:f"]
    assert "a.parquet, row 7 " in command(*arguments, check=2, cwd=tmp_path).stderr
    command(*arguments, "--on-error", "quarantine", "--fresh", cwd=tmp_path)
    remaining = pq.read_table(tmp_path / "out" / "quarantine.parquet").to_pylist()
    assert [(row["x"], row["brim_row"], row["brim_offset"]) for row in remaining] == [(7, 7, 7)]
    with pytest.raises(InputError, match=r"row 2: this is a list"):
        brim.map(lambda: iter([{"x": 1}, {"x": 2}, [3]]), len, cache_dir=tmp_path / "cache")
