"""A source that is rewritten with the same size after a job: the next job never returns the old content."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim as library
from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.read_unit import name_of_span, read_unit
from brim.compute.rows.row_files import RowOptions
from brim.compute.rows.source_hash import SourceHash, hash_unit
from tests.conftest import brim, write_files
from tests.hub import TestHub
from tests.publishing import DEST, Machine
from tests.s3 import S3Server
from tests.s3.server import PRIVATE

Write = Callable[[Path, str], str]  # takes a folder and a word of three letters, returns the source to map
ROWS = 20


def values(text: str) -> list[str]:
    return [text] * ROWS


def write_jsonl(folder: Path, text: str) -> str:
    write_files(folder, {"x.jsonl": "".join(json.dumps({"text": value}) + "\n" for value in values(text)).encode()})
    return str(folder / "x.jsonl")


def write_csv(folder: Path, text: str) -> str:
    write_files(folder, {"x.csv": ("n,text\n" + "".join(f"{n},{v}\n" for n, v in enumerate(values(text)))).encode()})
    return str(folder / "x.csv")


def write_parquet(folder: Path, text: str) -> str:
    pq.write_table(pa.table({"text": values(text)}), folder / "x.parquet", row_group_size=7, compression="none")
    return str(folder / "x.parquet")


def write_glob(folder: Path, text: str) -> str:
    for name, own in (("a", "one"), ("b", text), ("c", "one")):
        pq.write_table(pa.table({"text": values(own)}), folder / f"{name}.parquet", compression="none")
    return str(folder / "*.parquet")


def write_saved(folder: Path, text: str) -> str:
    shutil.rmtree(folder / "saved", ignore_errors=True)
    datasets.Dataset.from_dict({"text": values(text)}).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def write_text(folder: Path, text: str) -> str:
    write_files(folder, {"x.txt": "".join(f"{value}\n" for value in values(text)).encode()})
    return str(folder / "x.txt")


def write_gzip(folder: Path, text: str) -> str:
    rows = "".join(json.dumps({"text": value}) + "\n" for value in values(text)).encode()
    write_files(folder, {"x.jsonl.gz": gzip.compress(rows, mtime=0)})
    return str(folder / "x.jsonl.gz")


SOURCES: dict[str, Write] = {
    "jsonl": write_jsonl,
    "csv": write_csv,
    "parquet": write_parquet,
    "glob": write_glob,
    "save_to_disk": write_saved,
    "text": write_text,
    "gzip": write_gzip,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BRIM_MEMORY", "1GB")
    return tmp_path / "cache"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def sizes(folder: Path) -> dict[str, int]:
    data = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json")
    return {str(path): path.stat().st_size for path in data}


def rewrite(write: Write, folder: Path, text: str) -> None:
    """Rewrite the source with other content of the same size and another modification time."""
    before = sizes(folder)
    write(folder, text)
    assert sizes(folder) == before, "the fault is about files that keep their size"
    touch(folder)


def touch(folder: Path) -> None:
    for path in folder.rglob("*"):
        actual = path.stat()
        os.utime(path, ns=(actual.st_atime_ns, actual.st_mtime_ns + 5_000_000_000))


def texts(created: Any) -> list[str]:
    return list(created["text"])


@pytest.mark.parametrize("kind", SOURCES)
def test_map_reads_a_rewritten_source_again(kind: str, work: Path) -> None:
    source = SOURCES[kind](work, "one")
    first = library.map(source, None, progress=False)
    assert set(texts(first)) == {"one"}
    rewrite(SOURCES[kind], work, "two")
    second = library.map(source, None, progress=False)
    assert "two" in texts(second)
    assert texts(second) == texts(datasets.Dataset.from_list(list(library.map(source, None, fresh=True))))
    assert first._fingerprint != second._fingerprint, "a result computed from it would be taken from the cache"
    assert set(texts(first)) == {"one"}, "an open dataset does not change"


@pytest.mark.parametrize("kind", SOURCES)
def test_map_of_a_touched_source_computes_nothing_again(kind: str, work: Path, tmp_path: Path) -> None:
    source, calls = SOURCES[kind](work, "one"), tmp_path / "calls"

    def counted(row: dict[str, Any]) -> dict[str, Any]:
        with open(calls, "a") as file:
            file.write("+")
        return row

    first = library.map(source, counted, progress=False)
    result = calls.stat().st_size
    for _ in range(2):
        touch(work)
        repeated = library.map(source, counted, progress=False)
        assert texts(repeated) == texts(first)
        assert repeated._fingerprint == first._fingerprint
    assert calls.stat().st_size == result


def test_filter_reads_a_rewritten_source_again(work: Path) -> None:
    source = write_jsonl(work, "one")
    assert len(library.filter(source, lambda row: row["text"] == "one", progress=False)) == ROWS
    rewrite(write_jsonl, work, "two")
    assert len(library.filter(source, lambda row: row["text"] == "one", progress=False)) == 0


def test_where_reads_a_rewritten_source_again(work: Path) -> None:
    source = write_parquet(work, "one")
    assert len(library.map(source, None, where='text != "zzz"', progress=False)) == ROWS
    rewrite(write_parquet, work, "two")
    assert set(texts(library.map(source, None, where='text != "zzz"', progress=False))) == {"two"}


def test_map_reads_a_rewritten_folder_of_files_again(work: Path) -> None:
    """`map` reads a rewritten folder of whole files again, although names and sizes are the same."""

    def read() -> set[bytes]:
        mapped = library.map(library.files(work), lambda row: {"word": row["file"]["bytes"]}, progress=False)
        return set(mapped["word"])

    write_files(work, {f"{number}.bin": b"one" for number in range(3)})
    assert read() == {b"one"}
    write_files(work, {f"{number}.bin": b"two" for number in range(3)})
    touch(work)
    assert read() == {b"two"}


def test_map_with_indices_counts_the_rows_of_a_rewritten_source(work: Path) -> None:
    """After an added line in the first unit, the indices of all later rows change."""
    source = work / "x.jsonl"
    line = '{"text": "%s"}\n'
    source.write_text("".join(line % ("x" * 43) for _ in range(300)))
    options: dict[str, Any] = {"with_indices": True, "unit_size": "4KB", "progress": False}
    assert library.map(str(source), lambda row, n: {"n": n}, **options)["n"][:] == list(range(300))
    short = "".join(line % ("x" * 15) for _ in range(2))
    source.write_text(short + "".join(line % ("x" * 43) for _ in range(299)))
    assert source.stat().st_size == 300 * len(line % ("x" * 43))
    touch(work)
    assert library.map(str(source), lambda row, n: {"n": n}, **options)["n"][:] == list(range(301))


def commands(work: Path) -> dict[str, tuple[str, list[str], Callable[[Path], Any]]]:
    """Return target, arguments and reader of the result for each command."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.save(str(work.parent / "t.json"))
    shutil.copy(Path(__file__).parents[1] / "embed_models.py", work.parent)
    (work.parent / "steps.py").write_text("def same(row):\n    return row\n")

    def table(out: Path) -> Any:
        return [pq.read_table(path).to_pylist() for path in sorted(out.glob("data/*.parquet"))]

    return {
        "map": ("out", ["--fn", "steps.py:same"], table),
        "tokenize": ("out", ["--tokenizer", "t.json"], table),
        "embed": ("v.npy", ["--model", "embed_models:hashing", "--column", "text"], lambda out: np.load(out).tolist()),
    }


@pytest.mark.parametrize("command", ["map", "tokenize", "embed"])
def test_commands_read_a_rewritten_source_again(command: str, work: Path, tmp_path: Path) -> None:
    """Every command reads a rewritten source again: a folder of shards and a single file of vectors."""
    target, arguments, read = commands(work)[command]
    source = write_jsonl(work, "one")

    def run(out: Path) -> str:
        return brim(command, source, out, *arguments, cwd=tmp_path).stdout

    out = tmp_path / target
    run(out)
    first = read(out)
    touch(work)
    assert "nothing to do" in run(out)
    assert "nothing to do" in run(out)
    if out.is_dir():
        assert brim("verify", out).stdout.startswith("complete")
    rewrite(write_jsonl, work, "two")
    assert "nothing to do" not in run(out)
    fresh = tmp_path / "fresh" / target
    run(fresh)
    assert read(out) == read(fresh) != first
    assert "nothing to do" in run(out)
    if out.is_dir():
        assert brim("verify", out).stdout.startswith("complete")


def test_a_run_that_was_interrupted_starts_over_with_a_rewritten_source(work: Path, tmp_path: Path) -> None:
    source = work / "x.jsonl"
    source.write_text("".join(json.dumps({"n": n, "text": "one"}) + "\n" for n in range(1000, 3000)))
    (tmp_path / "steps.py").write_text(
        "import os\n"
        "def late(row):\n"
        "    if row['n'] == 2500 and not os.path.exists('go'):\n"
        "        raise ValueError('not yet')\n"
        "    return row\n"
    )
    arguments = ["map", source, tmp_path / "out", "--fn", "steps.py:late", "--unit-size", "10KB", "--workers", "1"]
    assert "not yet" in brim(*arguments, check=2, cwd=tmp_path).stderr
    (tmp_path / "go").touch()
    source.write_text(source.read_text().replace("one", "two"))
    touch(work)
    brim(*arguments, cwd=tmp_path)
    rows = [row for path in sorted(tmp_path.glob("out/data/*")) for row in pq.read_table(path).to_pylist()]
    assert [row["n"] for row in rows] == list(range(1000, 3000))
    assert {row["text"] for row in rows} == {"two"}


def test_a_run_that_was_interrupted_keeps_units_of_a_touched_source(work: Path, tmp_path: Path) -> None:
    source = work / "x.jsonl"
    source.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(1000, 3000)))
    (tmp_path / "steps.py").write_text(
        "import os\n"
        "def late(row):\n"
        "    if row['n'] == 2500 and not os.path.exists('go'):\n"
        "        raise ValueError('not yet')\n"
        "    return row\n"
    )
    arguments = ["map", source, tmp_path / "out", "--fn", "steps.py:late", "--unit-size", "4KB", "--workers", "1"]
    assert "not yet" in brim(*arguments, check=2, cwd=tmp_path).stderr
    (tmp_path / "go").touch()
    touch(work)
    assert "kept" in brim(*arguments, cwd=tmp_path).stdout


def test_parts_of_a_plan_are_computed_again_if_their_source_was_rewritten(work: Path, tmp_path: Path) -> None:
    source, plan, out = work / "x.jsonl", tmp_path / "a.plan", tmp_path / "out"
    source.write_text("".join(json.dumps({"n": n, "text": "one"}) + "\n" for n in range(1000, 3000)))
    (tmp_path / "steps.py").write_text("def same(row):\n    return row\n")
    brim("map", source, out, "--fn", "steps.py:same", "--unit-size", "10KB", "--save", plan, cwd=tmp_path)
    for part in ("1/2", "2/2"):
        brim("map", "--plan", plan, "--part", part, cwd=tmp_path)
    touch(work)
    finished = brim("map", "--plan", plan, "--finish", cwd=tmp_path)
    assert "0 done" in finished.stdout
    source.write_text(source.read_text().replace("one", "two"))
    touch(work)
    for part in ("1/2", "2/2"):
        brim("map", "--plan", plan, "--part", part, cwd=tmp_path)
    brim("map", "--plan", plan, "--finish", cwd=tmp_path)
    rows = [row for path in sorted(out.glob("data/*")) for row in pq.read_table(path).to_pylist()]
    assert {row["text"] for row in rows} == {"two"}


def test_the_hub_gets_the_rows_of_a_rewritten_source(work: Path, tmp_path: Path) -> None:
    """The rows of a rewritten source are published, also from a machine without local state.

    The published ledger contains the hashes of the source instead of its dates.
    """
    source = write_jsonl(work, "one")
    (tmp_path / "steps.py").write_text("def same(row):\n    return row\n")
    with TestHub(tmp_path / "hub") as hub:
        machine, second = Machine(hub, tmp_path / "machine"), Machine(hub, tmp_path / "other")
        arguments = ["map", source, DEST, "--fn", f"{tmp_path}/steps.py:same"]
        assert machine.run(*arguments).returncode == 0
        touch(work)
        for item in (machine, second):
            repeated = item.run(*arguments)
            assert (repeated.returncode, "nothing to do" in repeated.stdout) == (0, True), repeated.stderr
        rewrite(write_jsonl, work, "two")
        assert "nothing to do" not in second.run(*arguments).stdout
        code = f"import datasets; print(set(datasets.load_dataset('{DEST.split('datasets/')[1]}')['train']['text']))"
        assert machine.python(code).stdout.strip() == "{'two'}"


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_map_reads_an_object_with_another_etag_again(
    write: Write, work: Path, s3: S3Server, s3_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    name = Path(write(work, "one")).name

    def put(text: str) -> None:
        write(work, text)
        s3.write(PRIVATE, f"{s3_prefix}{name}", (work / name).read_bytes())

    put("one")
    address = f"s3://{PRIVATE}/{s3_prefix}{name}"
    assert set(texts(library.map(address, None, progress=False))) == {"one"}
    put("two")
    assert set(texts(library.map(address, None, progress=False))) == {"two"}


@pytest.mark.parametrize("columns", [None, ("text",)])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "glob", "save_to_disk", "text", "documents"])
def test_hash_while_reading_is_the_hash_of_the_files(kind: str, columns: tuple[str, ...] | None, work: Path) -> None:
    options = RowOptions(unit_size=100, columns=columns)
    if kind == "documents":
        source = write_text(work, "one")
        options = RowOptions(text="document", columns=columns)
    else:
        source = SOURCES[kind](work, "one")
    rows = open_rows(source, options)
    for unit in rows.units(3):
        actual = SourceHash(rows.reading)
        assert sum(table.num_rows for table in read_unit(rows.reading, unit, block_bytes=16, hashed=actual))
        names = [name_of_span(unit, rows.reading, number) for number in range(len(unit.spans))]
        assert hash_unit(rows.reading, unit, names.__getitem__, lambda size: None) == actual.hexdigest() != ""


def test_hash_of_dictionary_columns_has_their_values(work: Path) -> None:
    hashes = []
    for text in ("one", "two"):
        table = pa.table({"text": pa.array(values(text)).dictionary_encode()})
        with pa.ipc.new_stream(str(work / "x.arrow"), table.schema) as writer:
            writer.write_table(table)
        rows = open_rows(str(work / "x.arrow"))
        (unit,) = rows.units(1)
        hashes.append(hash_unit(rows.reading, unit, str, lambda size: None))
    assert hashes[0] != hashes[1]
