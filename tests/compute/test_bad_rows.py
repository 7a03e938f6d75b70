"""Failing rows with --on-error skip and quarantine: only these rows are left out, for any batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import brim
from tests.forked import brim as forked

MODEL = """
import os, signal, zlib
import numpy as np

class LengthsModel:
    '''Cannot tell the length of a text that holds FAIL.'''

    def lengths(self, texts):
        if any("FAIL" in text for text in texts):
            raise RuntimeError("no length")
        return [len(text) for text in texts]

    def encode(self, given):
        return np.array([[len(text)] for text in given["text"]], "float32")

class Model:
    '''Fails on texts that hold FAIL. A vector depends, slightly, on the longest text of its batch, as with padding.'''

    def __init__(self, prepare_fails, most, kill):
        self.prepare_fails, self.most, self.kill = prepare_fails, most, kill

    def check(self, texts):
        for text in texts:
            if "FAIL" in text:
                raise RuntimeError(f"cannot embed {text.split()[0]}")
        if len(texts) > self.most:
            raise RuntimeError("too many texts")

    def prepare(self, given):
        if self.prepare_fails:
            self.check(given["text"])
        return given["text"]

    def encode(self, texts):
        if self.kill and any(text.startswith("kill ") for text in texts) and not os.path.exists("killed"):
            open("killed", "w").close()
            if self.kill == "memory":
                hungry = [np.ones(20_000_000) for _ in range(10)]
            os.kill(os.getpid(), signal.SIGKILL)
        if not self.prepare_fails:
            self.check(texts)
        longest = max(map(len, texts))
        return np.array([[zlib.crc32(text.encode()) / 2**32 + longest, len(text)] for text in texts], "float32")

def factory(prepare_fails=0, most=10**9, kill=""):
    return Model(prepare_fails, most, kill)
"""


def write_texts(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)))


def captions(count: int) -> list[str]:
    return [f"{number} " + "caption " * (number % 40) for number in range(count)]


def embed_words(dest: str, *extra: str) -> list[str]:
    return ["embed", "rows.jsonl", dest, "--model", "mine.py:factory", "--column", "text", "--keep", "id",
            "--memory", "500MB", *extra]  # fmt: skip


def result_of(command: list[str], work: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in forked(*command, "--json", cwd=work).stdout.splitlines()]
    return next(line for line in lines if line.get("event") == "done" or "bad_rows" in line)


def expected_vectors(texts: list[str], bad: set[int], batch: int = 32, window: int = 1024) -> dict[int, list[float]]:
    """Return the vectors of the planned batches without their bad rows."""
    import zlib

    actual: dict[int, list[float]] = {}
    for start in range(0, len(texts), window):
        rows = range(start, min(start + window, len(texts)))
        order = sorted(rows, key=lambda row: -len(texts[row]))
        for index in range(0, len(order), batch):
            good = [row for row in order[index : index + batch] if row not in bad]
            longest = max((len(texts[row]) for row in good), default=0)
            for row in good:
                vector = np.array([zlib.crc32(texts[row].encode()) / 2**32 + longest, len(texts[row])], "float32")
                actual[row] = vector.tolist()
    return actual


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODEL)
    return tmp_path


@pytest.mark.parametrize(("rows", "bad_row"), [(5_000, 2_500), (20_000, 1_000), (300, 150)])
@pytest.mark.parametrize("on_error", ["skip", "quarantine"])
def test_embed_leaves_out_one_row_where_one_row_fails(work: Path, rows: int, bad_row: int, on_error: str) -> None:
    texts = captions(rows)
    texts[bad_row] = f"{bad_row} FAIL " + "long " * 600
    write_texts(work / "rows.jsonl", texts)
    result = result_of(embed_words("out.npy", "--on-error", on_error), work)
    assert (result["bad_rows"], result["rows"]) == (1, rows - 1)
    ids = pq.read_table(work / "out.npy.rows.parquet")["id"].to_pylist()
    assert ids == [number for number in range(rows) if number != bad_row]


@pytest.mark.parametrize("dest", ["out.npy", "out.safetensors", "out.parquet", "out"])
@pytest.mark.parametrize("prepare_fails", [0, 1])
def test_embed_result_depends_only_on_which_rows_are_bad(work: Path, dest: str, prepare_fails: int) -> None:
    """Bad rows may share a batch, lie in several batches and windows, fill a batch, and include empty texts."""
    texts = captions(2_600)
    longest = sorted(range(1024), key=lambda row: -len(texts[row]))[:32]
    bad = {5, 6, 900, 1023, 1024, 1700, 2599, *longest}
    for row in bad:
        texts[row] = f"{row} FAIL" + texts[row][len(f"{row} FAIL") :].ljust(8)
    empty = {77, 1500}
    for row in empty:
        texts[row] = ""
    write_texts(work / "rows.jsonl", texts)
    options = ("--on-error", "quarantine", "--argument", f"prepare_fails={prepare_fails}")
    result = result_of(embed_words(dest, *options), work)
    assert result["bad_rows"] == len(bad | empty)
    assert read_vectors(work / dest) == expected_vectors(texts, bad | empty)
    concurrent = work / "out" / "quarantine.parquet" if dest == "out" else work / f"{dest}.quarantine.parquet"
    remaining = pq.read_table(concurrent).to_pylist()
    assert [row["text"] for row in remaining] == [texts[row] for row in sorted(bad | empty)]
    assert [row["brim_offset"] for row in remaining] == sorted(bad | empty)
    for row in remaining:
        fault = "is empty" if row["brim_offset"] in empty else f"RuntimeError: cannot embed {row['brim_offset']}"
        assert fault in row["brim_error"]


def read_vectors(dest: Path) -> dict[int, list[float]]:
    if dest.suffix in (".npy", ".safetensors"):
        ids = pq.read_table(dest.with_name(f"{dest.name}.rows.parquet"))["id"].to_pylist()
        vectors = np.load(dest) if dest.suffix == ".npy" else brim.open_tensors(dest)["embedding"]
        return dict(zip(ids, np.asarray(vectors).tolist(), strict=True))
    table = pq.read_table(dest if dest.is_file() else dest / "data")
    return dict(zip(table["id"].to_pylist(), table["embedding"].to_pylist(), strict=True))


def test_embed_leaves_out_the_row_whose_length_cannot_be_told(work: Path) -> None:
    texts = captions(100)
    texts[40], texts[41] = "40 FAIL", ""
    write_texts(work / "rows.jsonl", texts)
    command = [argument.replace("factory", "LengthsModel") for argument in embed_words("out.npy", "--on-error", "skip")]
    assert result_of(command, work)["bad_rows"] == 2
    strict = [option for option in command if option not in ("--on-error", "skip")]
    failed = forked(*strict, "--empty", "keep", "--fresh", cwd=work, check=2)
    assert "failed at rows.jsonl, row 40 " in failed.stderr


def test_embed_names_the_row_that_fails_without_on_error(work: Path) -> None:
    texts = captions(1_200)
    texts[1_000] = "1000 FAIL " + "caption " * 20
    write_texts(work / "rows.jsonl", texts)
    failed = forked(*embed_words("out.npy"), cwd=work, check=2)
    assert "failed at rows.jsonl, row 1,000 " in failed.stderr
    assert "RuntimeError: cannot embed 1000" in failed.stderr


def test_embed_stops_where_a_batch_fails_and_none_of_its_rows_alone(work: Path) -> None:
    """No row alone causes the failure, so none is left out, and the error names the batch."""
    write_texts(work / "rows.jsonl", captions(100))
    for on_error in ("stop", "skip"):
        command = embed_words("out.npy", "--argument", "most=20", "--on-error", on_error)
        failed = forked(*command, cwd=work, check=2)
        assert "failed in a batch of 32 rows, and on none of them alone" in failed.stderr
        assert "--batch-size" in failed.stderr
        assert not (work / "out.npy").exists()


@pytest.mark.parametrize(("unit_size", "kill"), [("1MB", "crash"), ("4KB", "crash"), ("4KB", "memory")])
def test_embed_leaves_out_the_same_rows_after_its_worker_was_killed(work: Path, unit_size: str, kill: str) -> None:
    """A repeated unit counts its bad rows once, whether its worker died or exceeded the memory limit."""
    texts = captions(400)
    for row in (3, 111, 399):
        texts[row] = f"{row} FAIL"
    texts[200] = "kill me"
    write_texts(work / "rows.jsonl", texts)
    options = ("--on-error", "quarantine", "--batch-size", "8", "--unit-size", unit_size)
    if kill == "memory":
        options += ("--workers", "2")  # a worker that already runs alone is not retried
    result = result_of(embed_words("out.parquet", *options, "--argument", f"kill={kill}"), work)
    assert (work / "killed").exists()
    assert (result["bad_rows"], result["retries"]) == (3, 1)
    assert pq.read_table(work / "out.parquet.quarantine.parquet")["id"].to_pylist() == [3, 111, 399]
    assert pq.read_table(work / "out.parquet")["id"].to_pylist() == [n for n in range(400) if n not in (3, 111, 399)]


FUNCTIONS = """
def halve(batch):
    for text in batch["text"]:
        if "FAIL" in text:
            raise ValueError(f"cannot halve {text}")
    return {"half": [number / 2 for number in batch["id"]]}

def halve_table(table):
    import pyarrow.compute as pc
    halve(table.to_pydict())
    return table.append_column("half", pc.divide(table["id"], 2.0))

def numbered(batch, indices):
    halve(batch)
    return {"half": [number / 2 for number in indices]}

def together(batch):
    if len(batch["id"]) > 300:
        raise ValueError("too many rows")
    return halve(batch)
"""


def map_words(*extra: str) -> list[str]:
    return ["map", "rows.jsonl", "out", "--batched", "--memory", "600MB", *extra]


@pytest.fixture
def map_work(tmp_path: Path) -> Path:
    (tmp_path / "steps.py").write_text(FUNCTIONS)
    return tmp_path


@pytest.mark.parametrize("bad", [[1_234], [0, 1, 999, 1_000, 1_001, 2_499], list(range(1_000, 2_000))])
@pytest.mark.parametrize(
    ("function", "options"), [("halve", []), ("halve_table", ["--input", "arrow"]), ("numbered", ["--with-indices"])]
)
def test_map_leaves_out_only_the_rows_that_fail_where_splittable(
    map_work: Path, bad: list[int], function: str, options: list[str]
) -> None:
    write_texts(map_work / "rows.jsonl", [f"{n} FAIL" if n in bad else f"{n}" for n in range(2_500)])
    command = map_words("--fn", f"steps.py:{function}", "--splittable", "--on-error", "quarantine", *options)
    result = forked(*command, cwd=map_work)
    rows = pq.read_table(map_work / "out" / "data").to_pylist()
    assert [(row["id"], row["half"]) for row in rows] == [(n, n / 2) for n in range(2_500) if n not in bad]
    assert f"{len(bad):,} row{'s' if len(bad) > 1 else ''} that failed" in result.stdout
    remaining = pq.read_table(map_work / "out" / "quarantine.parquet").to_pylist()
    assert [row["id"] for row in remaining] == bad
    assert [row["brim_error"] for row in remaining] == [f"ValueError: cannot halve {n} FAIL" for n in bad]


@pytest.mark.parametrize("on_error", ["skip", "quarantine"])
def test_map_says_that_a_batch_is_left_out_where_not_splittable(map_work: Path, on_error: str) -> None:
    write_texts(map_work / "rows.jsonl", [f"{n} FAIL" if n == 1_234 else f"{n}" for n in range(2_500)])
    result = forked(*map_words("--fn", "steps.py:halve", "--on-error", on_error), cwd=map_work)
    output = " ".join(result.stdout.split())
    assert "skipped 1 batch of 1,000 rows that failed" in output
    assert "--splittable" in output
    assert pq.read_table(map_work / "out" / "data").num_rows == 1_500


def test_map_says_how_many_batches_are_left_out_after_a_resume(map_work: Path) -> None:
    """The count covers two batches of different sizes in two units, both done before the run that prints it."""
    texts = [f"{n} FAIL" if n in (700, 2_499) else f"{n} " + "x" * 100 for n in range(2_500)]
    write_texts(map_work / "rows.jsonl", texts)
    command = map_words("--fn", "steps.py:halve", "--on-error", "skip", "--unit-size", "130KB")
    die = "import os; from brim.jobs.compute import ComputeRun; ComputeRun._finish = lambda *_: os._exit(9)"
    forked(*command, cwd=map_work, before=die, check=9)
    output = " ".join(forked(*command, cwd=map_work).stdout.split())
    lost = 2_500 - pq.read_table(map_work / "out" / "data").num_rows
    assert 1_000 < lost < 2_000
    assert f"skipped 2 batches, {lost:,} rows together, that failed" in output
    assert "units 0 done" in output


def test_map_keeps_rows_whose_batch_fails_only_as_a_whole_where_splittable(map_work: Path) -> None:
    """Parts of a splittable batch give the same rows, so only the failing row is left out."""
    write_texts(map_work / "rows.jsonl", [f"{n} FAIL" if n == 1_234 else f"{n}" for n in range(2_500)])
    forked(*map_words("--fn", "steps.py:together", "--splittable", "--on-error", "skip"), cwd=map_work)
    rows = pq.read_table(map_work / "out" / "data")["id"].to_pylist()
    assert rows == [n for n in range(2_500) if n != 1_234]


def test_map_stop_names_the_row_of_a_splittable_batch(map_work: Path) -> None:
    write_texts(map_work / "rows.jsonl", [f"{n} FAIL" if n == 1_234 else f"{n}" for n in range(2_500)])
    failed = forked(*map_words("--fn", "steps.py:halve", "--splittable"), cwd=map_work, check=2)
    assert "failed at rows.jsonl, row 1,234 " in failed.stderr
