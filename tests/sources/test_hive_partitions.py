"""Folders of the form key=value become columns, with the types that pyarrow infers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.read_unit import read_unit
from brim.compute.rows.row_files import RowOptions
from brim.sources.hive_partitions import partition_fields, partition_values
from brim.sources.open_source import open_dataset
from tests.forked import brim as command

TABLE = pa.table(
    {
        "n": list(range(8)),
        "text": [f"t{n}" for n in range(8)],
        "year": [2023, 2023, 2024, 2024, None, None, 2025, 2025],
        "g": ["a b", "c/d", "é", "x=y", "a b", None, "1", "2"],
    }
)


@pytest.fixture
def hive(tmp_path: Path) -> Path:
    pq.write_to_dataset(TABLE, str(tmp_path / "hive"), partition_cols=["year", "g"])
    return tmp_path / "hive"


def expected(folder: Path) -> list[dict[str, Any]]:
    actual = ds.dataset(folder, partitioning=ds.HivePartitioning.discover()).to_table()
    assert actual.schema.field("year").type == pa.int32()
    return sorted(actual.to_pylist(), key=lambda row: row["n"])


def rows_of(out: Path) -> list[dict[str, Any]]:
    actual = [row for path in sorted((out / "data").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    return sorted(actual, key=lambda row: row["n"])


def write(folder: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        pq.write_table(pa.table({"n": [number, -number]}), folder / name / "part.parquet")
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ["g=1", "g=2"],
        ["g=01", "g=2"],
        ["g=a", "g=1"],
        ["g=3000000000", "g=1"],
        ["g=-1", "g=+1"],
        ["g=1.5", "g=true"],
        ["g=", "g=1"],
        ["g=__HIVE_DEFAULT_PARTITION__", "g=1"],
        ["g=a%20b", "g=c%2Fd"],
        ["g=1", "g=2/h=x"],
        ["g=a=b", "g=c"],
    ],
)
def test_partition_columns_have_the_values_and_types_of_pyarrow(tmp_path: Path, names: list[str]) -> None:
    folder = write(tmp_path / "in", names)
    reference = ds.dataset(folder, partitioning=ds.HivePartitioning.discover()).to_table()
    source = open_rows(folder)
    assert {f.name: f.type for f in source.schema} == {f.name: f.type for f in reference.schema}
    actual = [row for unit in source.units(1) for table in read_unit(source.reading, unit) for row in table.to_pylist()]
    order = sorted(reference.to_pylist(), key=lambda row: row["n"])
    assert sorted(actual, key=lambda row: row["n"]) == order
    selection = open_dataset(folder).table().rows
    assert sorted(selection.to_pylist(), key=lambda row: row["n"]) == order
    assert selection.schema.field("g").type == reference.schema.field("g").type


def test_hexadecimal_names_and_columns_of_the_files_are_kept(tmp_path: Path) -> None:
    assert partition_fields(["g=0x10/a", "g=1/b"], []) == [pa.field("g", pa.string())]
    assert partition_fields(["g=1/a.parquet"], ["g"]) == []
    assert partition_values("=x/y/k=v/name=1.parquet") == {"k": "v"}
    assert partition_fields(["g=__HIVE_DEFAULT_PARTITION__/a"], []) == [pa.field("g", pa.string())]


def test_select_and_map_read_partition_columns(hive: Path, tmp_path: Path) -> None:
    command("select", hive, tmp_path / "selected", cwd=tmp_path)
    assert rows_of(tmp_path / "selected") == expected(hive)
    (tmp_path / "steps.py").write_text("def f(row):\n    return {'label': f\"{row['year']} {row['g']}\"}\n")
    command("map", hive, tmp_path / "mapped", "--fn", "steps.py:f", cwd=tmp_path)
    actual = rows_of(tmp_path / "mapped")
    assert [row.pop("label") for row in actual] == [f"{row['year']} {row['g']}" for row in expected(hive)]
    assert actual == expected(hive)


@pytest.mark.parametrize(
    ("where", "numbers"),
    [
        ("year == 2024", [2, 3]),
        ("g == 'a b'", [0, 4]),
        ("year is None", [4, 5]),
        ("year == 2025 and g == '2'", [7]),
        ("g == 'é' or n == 1", [1, 2]),
    ],
)
def test_where_chooses_by_partition_columns(hive: Path, tmp_path: Path, where: str, numbers: list[int]) -> None:
    (tmp_path / "steps.py").write_text("def f(row):\n    return {}\n")
    command("select", hive, tmp_path / "selected", "--where", where, cwd=tmp_path)
    assert [row["n"] for row in rows_of(tmp_path / "selected")] == numbers
    command("map", hive, tmp_path / "mapped", "--where", where, "--fn", "steps.py:f", cwd=tmp_path)
    assert rows_of(tmp_path / "mapped") == [row for row in expected(hive) if row["n"] in numbers]


def test_select_takes_and_drops_partition_columns(hive: Path, tmp_path: Path) -> None:
    command("select", hive, tmp_path / "a", "--columns", "n,g", cwd=tmp_path)
    assert rows_of(tmp_path / "a") == [{"n": row["n"], "g": row["g"]} for row in expected(hive)]
    command("select", hive, tmp_path / "b", "--drop", "year,g,text", "--sort-by", "year", cwd=tmp_path)
    assert rows_of(tmp_path / "b") == [{"n": n} for n in range(8)]


@pytest.mark.parametrize("columns", [("year",), ("n", "g"), ("g", "year")])
def test_only_the_columns_that_are_asked_for_are_read(hive: Path, columns: tuple[str, ...]) -> None:
    source = open_rows(hive, RowOptions(columns=columns))
    actual = [row for unit in source.units(1) for table in read_unit(source.reading, unit) for row in table.to_pylist()]
    required = [tuple(row[name] for name in columns) for row in expected(hive)]
    assert sorted(map(str, (tuple(row.values()) for row in actual))) == sorted(map(str, required))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt", "jsonl.gz"])
def test_partition_columns_of_text_files_are_read(tmp_path: Path, kind: str) -> None:
    import gzip

    for value in ("1", "2"):
        folder = tmp_path / "in" / f"g={value}"
        folder.mkdir(parents=True)
        content = {"jsonl": f'{{"n": {value}}}\n', "csv": f"n\n{value}\n", "txt": f"{value}\n"}[kind.split(".")[0]]
        (folder / f"part.{kind}").write_bytes(gzip.compress(content.encode()) if "gz" in kind else content.encode())
    for columns in (None, ("g",)):
        source = open_rows(tmp_path / "in", RowOptions(columns=columns))
        units = source.units(1, spool=tmp_path / "spool")
        actual = [row for unit in units for table in read_unit(source.reading, unit) for row in table.to_pylist()]
        assert [row["g"] for row in actual] == [1, 2]
        assert list(actual[0]) == list(source.schema.names)
    documents = open_rows(tmp_path / "in", RowOptions(text="document", columns=("g",))) if kind == "txt" else None
    for unit in documents.units(1) if documents is not None else ():
        assert [row for table in read_unit(documents.reading, unit) for row in table.to_pylist()] == [
            {"g": 1},
            {"g": 2},
        ]


def test_tokenize_and_embed_keep_partition_columns(hive: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "t.json"))
    keep = ["--keep", "n", "--keep", "g", "--keep", "year"]
    arguments = ["tokenize", hive, tmp_path / "tokens", "--tokenizer", "t.json", *keep]
    command(*arguments, cwd=tmp_path)
    required = [(row["g"], row["year"]) for row in expected(hive)]
    assert [(row["g"], row["year"]) for row in rows_of(tmp_path / "tokens")] == required
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\ndef factory():\n    return lambda b: {'text': np.ones((len(b['text']), 2), 'float32')}\n"
    )
    arguments = ["embed", hive, f"{tmp_path}/vectors", "--model", "mine:factory", "--column", "text", *keep]
    command(*arguments, cwd=tmp_path)
    assert [(row["g"], row["year"]) for row in rows_of(tmp_path / "vectors")] == required


def test_a_glob_of_partitions_has_their_columns(hive: Path, tmp_path: Path) -> None:
    command("select", f"{hive}/year=*/*/*.parquet", tmp_path / "a", "--where", "year == 2023", "--json", cwd=tmp_path)
    assert [row["year"] for row in rows_of(tmp_path / "a")] == [2023, 2023]
    card = (tmp_path / "a" / "README.md").read_text()
    assert "name: year" in card
    assert json.dumps(str(tmp_path)) not in card
