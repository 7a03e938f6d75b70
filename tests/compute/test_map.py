"""`brim map` and `brim.map` end to end: real workers, every kind of source, and comparison with `Dataset.map`."""

from __future__ import annotations

import functools
import gzip
import io
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import brim
from brim.jobs.cache_entries import list_caches
from brim.state.lock import locked
from tests.conftest import brim as run_brim
from tests.conftest import tree_digest
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Machine, shards

ROWS = 3000

ROOM = "600MB"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("map")
    lines = [json.dumps({"id": n, "text": f"row {n} " * (n % 7 + 1)}) for n in range(ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "steps.py").write_text(
        textwrap.dedent("""
        import os
        import pyarrow.compute as pc

        def counted(row):
            open(os.path.join(os.environ["TMPDIR"], "called"), "w").close()
            return row

        def length(row):
            print("hello") if row["id"] == 7 else None
            return {"length": len(row["text"])}

        def grouped(batch):
            return {"ids": [batch["id"][at : at + 7] for at in range(0, len(batch["id"]), 7)]}

        def arrow(table):
            return table.append_column("length", pc.utf8_length(table["text"]))
        """)
    )
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(out.glob("data/*.parquet")) for row in pq.read_table(path).to_pylist()]


def map_command(work: Path, out: Path, fn: str, *extra: str) -> subprocess.CompletedProcess[str]:
    arguments = ["map", "rows.jsonl", str(out), "--fn", fn, "--unit-size", "20KB", "--memory", "600MB", *extra]
    return run_brim(*arguments, cwd=work)


def test_the_command(work: Path, tmp_path: Path) -> None:
    """The output loads and verifies, a second run computes nothing, and prints of the function are shown."""
    out = tmp_path / "out"
    result = map_command(work, out, "steps.py:length")
    assert re.search(r"worker [12]: hello", result.stderr)
    rows = read(out)
    assert [row["id"] for row in rows] == list(range(ROWS))
    assert all(row["length"] == len(row["text"]) for row in rows)
    assert run_brim("verify", out).stdout.startswith("complete")
    loaded = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "hf"))
    assert loaded.num_rows == ROWS
    assert str(loaded.features["length"]) == "Value('int64')"
    assert "nothing to do" in map_command(work, out, "steps.py:length").stdout


def test_the_output_does_not_depend_on_workers(work: Path, tmp_path: Path) -> None:
    for workers in ("1", "3"):
        map_command(work, tmp_path / workers, "steps:arrow", "--batched", "--input", "arrow", "--workers", workers)
    assert tree_digest(tmp_path / "1") == tree_digest(tmp_path / "3")


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_rows_per_shard(work: Path, tmp_path: Path, format: str) -> None:
    out = tmp_path / "out"
    map_command(work, out, "steps:length", "--rows-per-shard", "700", "--format", format, "--split", "test")
    names = sorted(path.name for path in (out / "data").iterdir())
    assert names == [f"test-{n:05d}-of-00005.{format}" for n in range(5)]
    loaded = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "hf"))["test"]
    assert loaded["id"][:] == list(range(ROWS))
    assert run_brim("verify", out).stdout.startswith("complete  5 shards, 3,000 rows")


def test_to_the_hub(work: Path, tmp_path: Path) -> None:
    """Rows computed locally are published to the Hub, verify, and are not computed again."""
    with TestHub(tmp_path / "hub") as hub:
        machine = Machine(hub, tmp_path / "machine")
        arguments = ["map", str(work / "rows.jsonl"), DEST, "--fn", f"{work}/steps.py:length", "--unit-size", "60KB"]
        result = machine.run(*arguments)
        assert result.returncode == 0, result.stderr
        assert "verified" in result.stdout
        repeated = machine.run(*arguments)
        assert (repeated.returncode, "nothing to do" in repeated.stdout) == (0, True), repeated.stderr
        code = f"import datasets; print(datasets.load_dataset('{DEST.split('datasets/')[1]}')['train'].num_rows)"
        assert machine.python(code).stdout.strip() == str(ROWS)


def test_the_hub_is_looked_at_before_the_work(work: Path, tmp_path: Path) -> None:
    """Rows that another machine has published are not computed again; another dataset is refused without --fresh."""
    with TestHub(tmp_path / "hub") as hub:
        machine, second = Machine(hub, tmp_path / "machine"), Machine(hub, tmp_path / "other")
        arguments = ["map", str(work / "rows.jsonl"), DEST, "--unit-size", "200KB", "--fn"]
        published = machine.run(*arguments, f"{work}/steps.py:length")
        assert published.returncode == 0, published.stderr
        head = hub.head(REPO)
        repeated = second.run(*arguments, f"{work}/steps.py:length")
        assert (repeated.returncode, "nothing to do" in repeated.stdout) == (0, True), repeated.stderr
        for item in (machine, second, Machine(hub, tmp_path / "third")):
            refused = item.run(*arguments, f"{work}/steps.py:counted")
            assert (refused.returncode, "has another dataset" in refused.stderr) == (2, True), refused.stderr
        assert not list(tmp_path.rglob("called"))
        assert not (tmp_path / "third" / "state" / "brim" / "hub").exists()
        assert hub.head(REPO) == head
        fresh = second.run(*arguments, f"{work}/steps.py:length", "--fresh", "--rows-per-shard", "1000")
        assert fresh.returncode == 0, fresh.stderr
        assert sorted(shards(hub)) == [f"data/train-{n:05d}-of-00003.parquet" for n in range(3)]


def test_bad_commands(work: Path, tmp_path: Path) -> None:
    """Each is refused with a clear message before any work."""
    for arguments, says in [
        (["rows.jsonl", "--fn", "steps:nothing"], "steps has no 'nothing'"),
        (["rows.jsonl", "--fn", "nowhere:f"], "No module named 'nowhere'"),
        (["rows.jsonl", "--fn", "steps"], "does not name a function"),
        (["missing.jsonl", "--fn", "steps:length"], "missing.jsonl"),
        (["rows.jsonl", "--fn", "steps:length", "--remove-columns", "texts"], "'texts', which is not a column"),
        (["rows.jsonl", "--fn", "steps:length", "--on-error", "ignore"], "stop, skip or quarantine"),
        (["rows.jsonl", "--fn", "steps:length", "--format", "csv"], "parquet"),
    ]:
        refused = run_brim("map", arguments[0], tmp_path / "out", *arguments[1:], cwd=work, check=2)
        assert says in refused.stderr, refused.stderr


def test_a_script_without_a_main_guard(work: Path, tmp_path: Path, cache: Path) -> None:
    """A plain script may use a closure and a lambda, and a second run reads the cache."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import brim
        factor = 3
        def f(row):
            return {{"three": factor * row["id"]}}
        ds = brim.map({str(work / "rows.jsonl")!r}, f, memory="600MB")
        ds = brim.map(ds, lambda batch: {{"six": [2 * n for n in batch["three"]]}}, batched=True, memory="600MB")
        assert ds["six"][:5] == [0, 6, 12, 18, 24], ds["six"][:5]
        print(ds.num_rows)
        """)
    )
    for _ in range(2):
        result = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        assert result.stdout.strip() == str(ROWS), result.stderr
    assert len(list_caches(cache)) == 2
    script.write_text(
        script.read_text().replace("factor = 3", "factor = 5").replace("[0, 6, 12, 18, 24]", "[0, 10, 20, 30, 40]")
    )
    assert subprocess.run([sys.executable, script], capture_output=True, check=False).returncode == 0
    assert len(list_caches(cache)) == 4


def _counted(n: int) -> Iterator[dict[str, Any]]:
    for number in range(n):
        yield {"a": number, "late": None if number < 1500 else number / 2}


def test_random_numbers_are_the_same_in_every_run(tmp_path: Path, cache: Path) -> None:
    """Random numbers do not depend on the workers or a killed worker. Another job has other numbers."""

    def draw(row: dict[str, Any]) -> dict[str, Any]:
        import random

        import numpy  # imports numpy.random on first use, in the middle of a batch

        return {"a": random.random(), "b": float(numpy.random.rand()), "c": int(numpy.random.randint(1 << 30))}

    def draw_batch(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        drawn = [draw({"n": n}) for n in rows["n"]]
        return {name: [row[name] for row in drawn] for name in "abc"}

    def draw_and_die_once(row: dict[str, Any], marker: str) -> dict[str, Any]:
        import os

        if row["n"] == 250 and not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(1)
        return draw(row)

    source, marker = tmp_path / "rows.jsonl", str(tmp_path / "died")
    source.write_text("".join(f'{{"n": {n}}}\n' for n in range(400)))
    method: dict[str, Any] = {"memory": ROOM, "unit_size": "1KB", "batch_size": 10, "fresh": True, "progress": False}
    kinds: list[dict[str, Any]] = [
        {"function": draw},
        {"function": draw_batch, "batched": True},
        {"function": draw_and_die_once, "fn_kwargs": {"marker": marker}},
    ]
    actual = []
    for kind in kinds:
        first, second = (brim.map(str(source), **kind, **method, workers=workers).to_list() for workers in (2, 1))
        assert first == second
        assert all(len({row[column] for row in first}) == 400 for column in "abc")
        actual.append(first)
    assert Path(marker).exists()
    assert actual[0] != actual[1] != actual[2] != actual[0]


DECORATED = """
import functools, brim

K, TABLE = 7, {"a": 1}

@functools.lru_cache(maxsize=None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

@functools.cache
def plus(x):
    return x + K

@functools.singledispatch
def shape(value):
    return "other"

@shape.register
def _(value: int):
    return "int"

@shape.register(list)
def _(value):
    return [shape(item) for item in value]

class Words:
    def __init__(self, text):
        self.text = text
    @functools.cached_property
    def count(self):
        return len(self.text.split())
    @functools.lru_cache
    def longest(self):
        return max(self.text.split(), key=len)

def closure():
    @functools.lru_cache(maxsize=3, typed=True)
    def inner(x):
        return x * 2
    return lambda row: {"inner": inner(row["n"]), "size": inner.cache_parameters()["maxsize"]}

def work(row):
    words = Words(row["text"])
    return {
        "fib": fib(row["n"]), "plus": plus(row["n"]), "shape": shape([1, "a"]), "count": words.count,
        "longest": words.longest(), "text_of_name": globals()["TABLE"]["a"], "eval": eval("K + 1"),
    }

rows = [{"n": n, "text": "one three"} for n in range(20)]
made = brim.map(rows, work, memory="600MB", progress=False)
assert made[19] == {
    "n": 19, "text": "one three", "fib": 4181, "plus": 26, "shape": ["int", "other"], "count": 2, "longest": "three",
    "text_of_name": 1, "eval": 8,
}, made[19]
assert brim.map(rows, closure(), memory="600MB", progress=False)[3]["inner"] == 6
print("whole")
"""


def test_functions_of_a_script_may_be_decorated_by_functools(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "script.py").write_text(DECORATED)
    result = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "whole\n"), result.stderr


def test_any_iterator(cache: Path) -> None:
    """As a replacement for list and from_list, rows are streamed, and types may appear late."""
    ds = brim.map(lambda: _counted(2000), lambda row: {"b": str(row["a"])}, memory=ROOM, name="numbers")
    assert (ds.num_rows, ds[1999]) == (2000, {"a": 1999, "late": 999.5, "b": "1999"})


def _makers() -> dict[str, Callable[[int], Any]]:
    """Return iterables of two rows from a number on, each created in another way."""

    def around(first: int) -> Any:
        return lambda: ({"a": n} for n in range(first, first + 2))

    def generator(first: int) -> Any:
        yield from ({"a": n} for n in range(first, first + 2))

    class Rows:
        def __init__(self, first: int) -> None:
            self.first = first

        def __iter__(self) -> Iterator[dict[str, int]]:
            return iter([{"a": self.first}, {"a": self.first + 1}])

    return {
        "function": around,
        "partial": lambda first: functools.partial(generator, first),
        "generator": generator,
        "iterable": Rows,
        "list": lambda first: [{"a": first}, {"a": first + 1}],
        "table": lambda first: pa.table({"a": [first, first + 1]}),
    }


@pytest.mark.parametrize("kind", _makers())
def test_name_of_an_iterator_is_not_all_that_it_is_known_by(kind: str, cache: Path, tmp_path: Path) -> None:
    """Other rows under the same name are computed; equal rows are read from the cache."""
    make, calls = _makers()[kind], tmp_path / "calls"

    def counted(row: dict[str, int]) -> dict[str, int]:
        with open(calls, "a") as file:
            file.write("+")
        return row

    actual = [brim.map(make(first), counted, memory=ROOM, name="rec")["a"][:] for first in (1, 3, 1)]
    assert actual == [[1, 2], [3, 4], [1, 2]]
    assert len(calls.read_text()) == 4


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".csv", ".parquet"])
def test_kinds_of_files(tmp_path: Path, cache: Path, suffix: str) -> None:
    table = pa.table({"id": list(range(500)), "text": [f'a "quoted"\nline {n}' for n in range(500)]})
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pq.write_table(table, path, row_group_size=64)
    elif suffix == ".csv":
        import pyarrow.csv

        pyarrow.csv.write_csv(table, path)
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()))
    ds = brim.map(path, lambda row, index: {"index": index}, with_indices=True, memory=ROOM)
    assert ds["text"][:] == table["text"].to_pylist()
    assert ds["index"][:] == list(range(500))


def test_the_same_as_dataset_map(work: Path, cache: Path) -> None:
    """Batches that depend on their limits, a shuffled dataset, images and a DatasetDict give the same result."""
    ds = datasets.Dataset.from_json(str(work / "rows.jsonl"), cache_dir=str(cache / "hf"))
    group = {"batched": True, "batch_size": 100, "remove_columns": ["id", "text"]}

    def grouped(batch: dict[str, list[int]]) -> dict[str, list[list[int]]]:
        return {"ids": [batch["id"][index : index + 7] for index in range(0, len(batch["id"]), 7)]}

    for source in (ds, ds.shuffle(seed=1), ds.select(range(5, 2500, 3))):
        ours, theirs = brim.map(source, grouped, memory=ROOM, **group), source.map(grouped, **group)  # type: ignore[arg-type]
        assert ours.features == theirs.features
        assert ours[:] == theirs[:]
    parts = brim.map(datasets.DatasetDict(a=ds.select(range(10)), b=ds.select(range(20))), memory=ROOM)
    assert parts.num_rows == {"a": 10, "b": 20}


def test_images_are_decoded_in_the_function(cache: Path) -> None:
    def png(n: int) -> bytes:
        Image.fromarray(np.full((4, 4, 3), n, np.uint8)).save(sink := io.BytesIO(), "png")
        return sink.getvalue()

    column = [{"bytes": png(n), "path": None} for n in range(30)]
    ds = datasets.Dataset.from_dict({"image": column}, features=datasets.Features({"image": datasets.Image()}))
    mapped = brim.map(ds, lambda row: {"mean": float(np.asarray(row["image"]).mean())}, memory=ROOM)
    assert mapped["mean"][:] == [float(n) for n in range(30)]
    assert mapped.features["image"] == datasets.Image()
    assert mapped.cast_column("image", datasets.Image(decode=False))[3]["image"]["bytes"] == png(3)


def test_first_and_second_run_cost_the_same_memory(work: Path, tmp_path: Path, cache: Path) -> None:
    """A cached result is memory-mapped: reading it takes no more anonymous memory than computing it."""
    code = f"""
import brim, os
from brim.memory.meter import process_bytes
ds = brim.map({str(work / "rows.jsonl")!r}, lambda row: {{"long": row["text"] * 500}}, memory="600MB")
total = sum(len(row) for row in ds.with_format("arrow").data.column("long").to_pylist()[:10])
print(process_bytes(os.getpid()), ds.data.nbytes)
"""
    first, second = (
        [
            int(n)
            for n in subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout.split()
        ]
        for _ in range(2)
    )
    assert first[1] == second[1] > 30e6
    assert abs(first[0] - second[0]) < 25e6, "one of the runs holds what the other does not"


def test_what_killed_processes_left_in_caches_goes(work: Path, cache: Path) -> None:
    """The next call of any map removes temporary files of dead processes, but no finished files or files in use."""
    brim.map(str(work / "rows.jsonl"), _same)
    (result,) = list_caches(cache)
    for name in ("dead", "alive"):
        (cache / name / "units" / "spool").mkdir(parents=True)
        (cache / name / "about.json").write_text("{}")
        for remaining in ("spool/a.arrow", ".00000001.arrow.7.0.tmp", "gate", "setup.pickle", "00000000.arrow"):
            (cache / name / "units" / remaining).write_bytes(b"x")
    with locked(cache / "alive"):
        brim.map(str(work / "rows.jsonl"), _same)
    assert [path.name for path in (cache / "dead" / "units").iterdir()] == ["00000000.arrow"]
    assert len(list((cache / "alive" / "units").iterdir())) == 5
    assert result.folder in [cached.folder for cached in list_caches(cache)]


def _same(row: dict[str, Any]) -> dict[str, Any]:
    return row


def test_caches_are_listed_and_removed(work: Path, cache: Path) -> None:
    brim.map(work / "rows.jsonl", lambda row: {"n": 1}, memory=ROOM)
    output = run_brim("clean").stdout
    assert "3,000 rows" in output
    assert "<lambda> of" in output
    assert "Nothing is cached" in run_brim("clean", "--older-than", "3").stdout
    assert "freed" in run_brim("clean", "--remove").stdout
    assert not list_caches(cache)


def test_a_mended_function_keeps_what_was_done(tmp_path: Path, cache: Path) -> None:
    """With keep_done=True, units finished before the error are not computed again."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n, "text": "x" * 9000}) + "\n" for n in range(3000)))
    calls = tmp_path / "calls"

    def broken(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 2900:
            raise ValueError("not this one")
        return {"twice": 2 * row["n"]}

    def mended(row: dict[str, Any]) -> dict[str, Any]:
        with open(calls, "a") as file:
            file.write("x")
        return {"twice": 2 * row["n"]}

    with pytest.raises(ValueError, match=r"(?s)not this one.*rows.jsonl, row 2,900"):
        brim.map(path, broken, memory=ROOM, num_proc=1)
    ds = brim.map(path, mended, memory=ROOM, num_proc=1, keep_done=True)
    assert ds["twice"][:] == [2 * n for n in range(3000)]
    assert calls.stat().st_size < 2000


def test_the_format_of_the_dataset_stays(cache: Path) -> None:
    """The format is kept as with `Dataset.map`, including new columns; hidden columns stay hidden."""
    ds = datasets.Dataset.from_dict({"id": [1, 2], "text": ["a", "b"]})
    for formatted in (ds.with_format("numpy", columns=["id"]), ds.with_format(None, columns=["id"])):
        mapped = brim.map(formatted, lambda row: {"y": row["id"]}, memory=ROOM)
        assert mapped.format == formatted.map(lambda row: {"y": row["id"]}).format


def test_no_rows_in_and_none_out(cache: Path) -> None:
    ds = datasets.Dataset.from_dict({"id": [1], "text": ["a"]}).select([])
    for _ in range(2):
        mapped = brim.map(ds, lambda row: {"y": 1}, remove_columns="text", memory=ROOM)
        assert mapped.features == ds.map(lambda row: {"y": 1}, remove_columns="text").features


def test_rows_are_written_as_they_are_without_a_function(tmp_path: Path) -> None:
    """CSV becomes Parquet; counts may be written as people write them."""
    (tmp_path / "rows.csv").write_text("n,text\n" + "".join(f"{n},row {n}\n" for n in range(30)))
    result = run_brim("map", tmp_path / "rows.csv", tmp_path / "out", "--limit", "2e1", "--memory", "1GB")
    assert "load  datasets.load_dataset(" in result.stdout
    (shard,) = (tmp_path / "out" / "data").iterdir()
    assert pq.read_table(shard).to_pylist() == [{"n": n, "text": f"row {n}"} for n in range(20)]
