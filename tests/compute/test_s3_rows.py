"""Rows in a bucket give the same rows, units and output as a local copy, also with faults on the connection."""

from __future__ import annotations

import csv
import io
import json
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim as library
from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.read_unit import describe_row, read_unit
from brim.compute.rows.row_files import RowOptions
from brim.compute.rows.schemas import cast, unify
from brim.compute.rows.unit import RowSource, Unit
from brim.compute.steps.embed_step import EmbedStep, EmbedStepOptions
from brim.compute.steps.step import BadRow, RowBatch
from brim.errors import InputError, MissingDependencyError, SourceChangedError
from brim.sources.open_source import open_dataset
from brim.storage.location import Access
from tests.conftest import brim, tree_digest, write_files
from tests.s3 import FaultProxy, S3Server
from tests.s3.server import PRIVATE, PUBLIC

ROWS = [
    {"n": n, "text": f"row {n} ü" * (n % 9), "l": [n, None] if n % 3 else None, "s": {"x": n / 2}} for n in range(6000)
]
TABLE = pa.Table.from_pylist(ROWS)
NOISE = np.random.default_rng(1).bytes(4_000_000).hex()  # 8 MB that barely compress


def json_lines(rows: list[dict[str, Any]] = ROWS) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def comma_separated() -> bytes:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["n", "text"])
    writer.writerows([row["n"], row["text"] + ('\n"quoted"' if row["n"] % 7 == 0 else "")] for row in ROWS)
    return text.getvalue().encode()


def parquet(rows_in_group: int, table: pa.Table = TABLE) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=rows_in_group)
    return sink.getvalue()


def arrow(make: Any, table: pa.Table = TABLE) -> bytes:
    sink = io.BytesIO()
    with make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=400)
    return sink.getvalue()


def large_parquet() -> bytes:
    """Return two row groups with a large column and three small ones: more than is read ahead of each."""
    values = [NOISE[index : index + 4000] for index in range(0, len(NOISE), 4000)] * 2
    small = list(range(len(values)))
    return parquet(2000, pa.table({"a": small, "text": values, "b": small, "c": small}))


def squeezed(data: bytes, codec: str) -> bytes:
    return bytes(pa.Codec(codec).compress(data, asbytes=True))


def contents() -> dict[str, bytes]:
    names = TABLE.append_column("word", TABLE["text"].dictionary_encode())
    return {
        "jsonl/a.jsonl": json_lines(),
        "jsonl/sub-1/b.jsonl": json_lines(ROWS[:700]),
        "jsonl/sub/c.jsonl": json_lines(ROWS[700:]),
        "jsonl/.hidden/d.jsonl": b"not rows",
        "jsonl/README.md": b"# about",
        "jsonl/built/.brim/ledger.jsonl": b"not rows",
        "jsonl/built/e.jsonl": json_lines(ROWS[:5]),
        "s*r [x]/a.jsonl": json_lines(),
        "gz/a.jsonl.gz": squeezed(json_lines(), "gzip"),
        "zst/a.jsonl.zst": squeezed(json_lines(), "zstd"),
        "zst/b.jsonl.zst": squeezed(json_lines(ROWS[:999]), "zstd"),
        "csv/a.csv": comma_separated(),
        "csv/b.csv": comma_separated(),
        "parquet/0.parquet": parquet(6000),
        "parquet/1.parquet": parquet(500),
        "shards/data/test-00000-of-00001.parquet": parquet(500, TABLE.slice(0, 900)),
        "shards/data/train-00000-of-00001.parquet": parquet(500),
        "hive/g=1/h=a b/0.parquet": parquet(500, TABLE.slice(0, 900)),
        "hive/g=2/h=c%2Fd/0.parquet": parquet(500),
        "large/0.parquet": large_parquet(),
        "arrow/file.arrow": arrow(pa.ipc.new_file),
        "arrow/stream.arrow": arrow(pa.ipc.new_stream),
        "words/file.arrow": arrow(pa.ipc.new_file, names),
        "words/stream.arrow": arrow(pa.ipc.new_stream, names),
        **{f"text/{n:03}.txt": f"document {n} ü\r\nline\n".encode() * (n % 9 + 1) for n in range(60)},
        "saved/dataset_info.json": b"{}",
        "saved/state.json": json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}).encode(),
        "saved/data-0.arrow": arrow(pa.ipc.new_stream),
        "saved/cache-1.arrow": b"another program",
    }


@dataclass(frozen=True)
class Sources:
    """The same files in a folder and in a bucket."""

    folder: Path
    prefix: str

    @property
    def address(self) -> str:
        return f"s3://{PRIVATE}/{self.prefix}"


@pytest.fixture(scope="module")
def sources(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    actual = Sources(tmp_path_factory.mktemp("rows"), f"rows-{secrets.token_hex(4)}")
    for name, data in contents().items():
        write_files(actual.folder, {name: data})
        s3.write(PRIVATE, f"{actual.prefix}/{name}", data)
    return actual


@pytest.fixture(autouse=True)
def _credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("BRIM_STALL_SECONDS", "20")


def table_of(source: RowSource, units: list[Unit]) -> pa.Table:
    tables = [table for unit in units for table in read_unit(source.reading, unit, 1 << 16)]
    schema = unify([source.schema, *(table.schema for table in tables)])
    return pa.concat_tables([cast(table, schema) for table in tables])


def known(source: str, options: RowOptions, spool: Path) -> dict[str, Any]:
    """Return all properties of a source that a job reads."""
    rows = open_rows(source, options)
    units = list(rows.units(100, spool=spool))
    return {
        "schema": rows.schema,
        "facts": rows.facts,
        "totals": (rows.total_bytes, rows.total_rows),
        "units": [(unit.key, unit.bytes, unit.first_row, unit.rows, len(unit.spans)) for unit in units],
        "rows": table_of(rows, units),
        "where": [describe_row(unit, rows.reading, 1) for unit in (units[0], units[-1])],
    }


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("jsonl", {}),
        ("jsonl/a.jsonl", {}),
        ("jsonl/**/*.jsonl", {"limit": 6500}),
        ("jsonl/sub*/*.jsonl", {"columns": ("s", "n")}),
        ("s*r [x]", {}),
        ("gz", {}),
        ("zst/*.zst", {}),
        ("csv", {}),
        ("csv/*.csv", {"limit": 6100, "as_text": ("n",)}),
        ("parquet", {}),
        ("parquet/?.parquet", {"columns": ("s", "n"), "limit": 9000}),
        ("shards", {"from_split": "test", "unit_size": 20_000}),
        ("shards/data/*.parquet", {"from_split": "train", "from_config": "default"}),
        ("hive", {"unit_size": 20_000}),
        ("hive", {"unit_size": 20_000, "columns": ("h", "n")}),
        ("large", {"unit_size": 6_000_000}),
        ("arrow", {}),
        ("arrow/*", {"limit": 7300}),
        ("words", {"unit_size": 400_000}),
        ("text", {"unit_size": 500}),
        ("text", {"text": "document"}),
        ("saved", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "plain",
)
def test_the_same_rows_and_units_as_from_a_copy(
    sources: Sources, tmp_path: Path, source: str, options: dict[str, Any]
) -> None:
    """Names, order, facts, cuts, keys, rows, and the row numbers in errors are the same."""
    reading = RowOptions(**{"unit_size": 60_000, **options})
    local = known(f"{sources.folder}/{source}", reading, tmp_path / "a")
    remote = known(f"{sources.address}/{source}", reading, tmp_path / "b")
    assert remote == local
    assert len(local["units"]) > 1 or "text" in options


def test_partition_columns_of_objects_are_read_and_choose_rows(sources: Sources) -> None:
    for where_it_is in (str(sources.folder), sources.address):
        selection = open_dataset(f"{where_it_is}/hive").where("g == 2").table().rows
        assert selection.num_rows == TABLE.num_rows
        assert set(selection["h"].to_pylist()) == {"c/d"}
        assert set(selection["g"].to_pylist()) == {2}


def test_marks_of_folders(s3: S3Server, s3_prefix: str) -> None:
    """An empty object with the name of a folder is not one of its rows, wherever it is in the listing."""
    for name in ("at", "at/part.jsonl", "at/part.jsonl.old", "at/part.jsonl/a.jsonl"):
        s3.write(PRIVATE, s3_prefix + name, json_lines(ROWS[:5]) if name.endswith("a.jsonl") else b"")
    source = open_rows(f"s3://{PRIVATE}/{s3_prefix}at")
    assert table_of(source, list(source.units(1)))["n"].to_pylist() == [*range(5)]


def test_many_small_objects_wait_together(sources: Sources, s3_proxy: FaultProxy) -> None:
    """Sixty documents are requested in advance, several at a time, and none is requested twice."""
    source = open_rows(f"{sources.address}/text", RowOptions(text="document", access=Access(s3_proxy.endpoint)))
    requested = s3_proxy.count("GET", ".txt")
    s3_proxy.stall(0.5, contains=".txt", times=60)  # long enough that all concurrent requests are seen together
    assert table_of(source, list(source.units(1))).num_rows == 60
    assert (requested, s3_proxy.count("GET", ".txt"), s3_proxy.count("HEAD", ".txt")) == (0, 60, 0)
    assert s3_proxy.most_at_once > 8


def test_small_columns_are_one_request(sources: Sources, s3_proxy: FaultProxy) -> None:
    """A footer is read, then each small row group with one request, and no unused columns."""
    access = Access(s3_proxy.endpoint)
    source = open_rows(f"{sources.address}/large", RowOptions(columns=("a", "c"), access=access, unit_size=1 << 30))
    before = s3_proxy.count("GET", ".parquet")
    (unit,) = source.units(1)
    assert table_of(source, [unit])["c"].to_pylist() == [*range(4000)]
    assert s3_proxy.count("GET", ".parquet") - before <= 1 + 2 * 2
    assert s3_proxy.received_bytes < 2_000_000


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "csv", "zst"])
@pytest.mark.parametrize("is_gone", [False, True], ids=["changed", "gone"])
def test_an_object_that_changed(s3: S3Server, s3_prefix: str, tmp_path: Path, kind: str, is_gone: bool) -> None:
    """An object that changes after planning is a SourceChangedError that names it, even if its size is the same."""
    data = {
        "jsonl": json_lines(), "parquet": parquet(500), "arrow": arrow(pa.ipc.new_stream), "csv": comma_separated(),
        "zst": squeezed(json_lines(), "zstd"),
    }[kind]  # fmt: skip
    key = f"{s3_prefix}a.{'jsonl.zst' if kind == 'zst' else kind}"
    s3.write(PRIVATE, key, data)
    source = open_rows(f"s3://{PRIVATE}/{key}", RowOptions(unit_size=50_000))
    units = source.units(100, spool=tmp_path)
    plan = [] if kind == "zst" else list(units)
    if is_gone:
        s3.delete(PRIVATE, key)
    else:
        s3.write(PRIVATE, key, data[:-1] + b" ")
    with pytest.raises(SourceChangedError) as caught:
        table_of(source, plan or list(units))
    assert caught.value.facts["path"] == key.removeprefix(s3_prefix)


@pytest.mark.parametrize("kind", ["jsonl", "zst", "large", "arrow"])
def test_faults_on_the_way(sources: Sources, s3_proxy: FaultProxy, tmp_path: Path, kind: str) -> None:
    """A busy store, broken connections and a slow one give the same rows."""
    options = RowOptions(unit_size=300_000, access=Access(s3_proxy.endpoint))
    expected = known(f"{sources.folder}/{kind}", options, tmp_path / "a")
    s3_proxy.fail(503, times=3, method="GET", skip=2)
    cut = s3_proxy.cut(20_000, times=3, method="GET", answer=True, skip=4)
    s3_proxy.slow(20_000_000, times=5)
    assert known(f"{sources.address}/{kind}", options, tmp_path / "b") == expected
    assert cut.fired


def test_what_cannot_be_read(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each error states the next step."""
    for source, arguments in (
        ("s3://nobody-has-this/x", "does not exist"),
        (f"{sources.address}/nothing", "There is nothing at"),
        (f"{sources.address}/nothing/*.jsonl", "Nothing was found"),
        (f"{sources.address}/zst/*.csv", "Nothing was found"),
        ("s3://", "names no bucket"),
        (f"{sources.address}/**/*.*", "different formats"),
    ):
        with pytest.raises(InputError, match=arguments):
            open_rows(source)
    with pytest.raises(InputError, match="partly in a bucket"):
        open_rows([str(sources.folder), sources.address])
    with pytest.raises(InputError, match="may not read"):
        open_rows(f"{sources.address}/jsonl", RowOptions(access=Access(anonymous=True)))
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    monkeypatch.delitem(sys.modules, "brim.storage.objects", raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install .*obstore"):
        open_rows(f"{sources.address}/jsonl", RowOptions(access=Access("http://127.0.0.1:1")))


def test_a_public_bucket_needs_no_credentials(s3: S3Server, s3_prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--anonymous works for a list of objects of one bucket."""
    for name in s3.environment:
        monkeypatch.delenv(name)
    for name in ("x/a.jsonl", "y/b.jsonl"):
        s3.write(PUBLIC, s3_prefix + name, json_lines(ROWS[:50]))
    access = Access(s3.endpoint, anonymous=True)
    source = open_rows([f"s3://{PUBLIC}/{s3_prefix}{name}" for name in ("x", "y/b.jsonl")], RowOptions(access=access))
    (unit,) = source.units(1)
    assert table_of(source, [unit])["n"].to_pylist() == 2 * [*range(50)]
    assert describe_row(unit, source.reading, 60).startswith("y/b.jsonl, row 10")


def test_marks_of_folders_are_no_files(s3: S3Server, s3_prefix: str) -> None:
    """An empty object data.parquet/, as Spark creates it, is skipped, and the rows below it are read."""
    s3.write(PRIVATE, f"{s3_prefix}data.parquet/", b"")
    s3.write(PRIVATE, f"{s3_prefix}data.parquet/part-0.parquet", parquet(6000))
    for source in ("", "data.parquet", "**/*.parquet"):
        assert open_rows(f"s3://{PRIVATE}/{s3_prefix}{source}").total_rows == len(ROWS)


def test_memory_does_not_grow_with_the_object(s3: S3Server, s3_prefix: str) -> None:
    """A unit of 120 MB streams through a process that only holds the data in transfer."""
    line = ("x" * 999 + "\n").encode()
    s3.write(PRIVATE, f"{s3_prefix}small.txt", line * 1000)
    s3.write(PRIVATE, f"{s3_prefix}large.txt", line * 120_000)
    code = """
import os, sys, threading
from brim.memory.meter import process_bytes
from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.read_unit import read_unit
from brim.compute.rows.row_files import RowOptions
def count(name):
    source = open_rows(sys.argv[1] + name, RowOptions(unit_size=1 << 30))
    return sum(table.num_rows for unit in source.units(1) for table in read_unit(source.reading, unit))
count("small.txt")
before, peak, done = process_bytes(os.getpid()), 0, threading.Event()
def look():
    global peak
    while not done.wait(0.005):
        peak = max(peak, process_bytes(os.getpid()))
thread = threading.Thread(target=look)
thread.start()
rows = count("large.txt")
done.set(); thread.join()
print(rows, peak - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, f"s3://{PRIVATE}/{s3_prefix}"],
        env=os.environ | {"MALLOC_ARENA_MAX": "2"}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    rows, grown_bytes = map(int, result.stdout.split())
    assert rows == 120_000
    assert grown_bytes < 90_000_000


def test_images_of_a_bucket(s3: S3Server, s3_prefix: str) -> None:
    """Image paths may be relative to a prefix in a bucket or full addresses; a missing image is an error of its row."""
    image = pytest.importorskip("PIL.Image")
    colours = [(n, 2 * n, 255 - n) for n in range(20)]
    for number, colour in enumerate(colours):
        content = io.BytesIO()
        image.new("RGB", (5, 4), colour).save(content, "PNG")
        s3.write(PRIVATE, f"{s3_prefix}p/{number}.png", content.getvalue())
    root = f"s3://{PRIVATE}/{s3_prefix}p"
    names = [f"{number}.png" if number % 2 else f"{root}/{number}.png" for number in range(20)]
    options = EmbedStepOptions(
        "tests.embed_models:mean_colour", image="image", batch_size=8, image_root=root,
        image_access=Access(s3.endpoint),
    )  # fmt: skip
    step = EmbedStep(options)
    table = pa.table({"image": names})
    step.open(table.schema)
    try:
        (created,) = step.apply(RowBatch(table, 0, None), False)
        assert created["vision"].to_pylist() == [list(colour) for colour in colours]
        with pytest.raises(BadRow) as caught:
            list(step.apply(RowBatch(pa.table({"image": [*names[:3], "none.png"]}), 0, None), False))
        assert caught.value.row == 3
        assert "not in the bucket" in str(caught.value.__cause__)
    finally:
        step.close()


def test_map_from_a_bucket(sources: Sources, tmp_path: Path) -> None:
    """The real command with two workers writes the same shard bytes."""
    (tmp_path / "steps.py").write_text("def longer(row):\n    return {'m': row['text'] + '!'}\n")
    common = ("--fn", f"{tmp_path}/steps.py:longer", "--unit-size", "600kB", "--memory", "1GB", "--workers", "2", "-q")
    brim("map", f"{sources.address}/parquet", tmp_path / "remote", *common)
    brim("map", sources.folder / "parquet", tmp_path / "local", *common)
    assert tree_digest(tmp_path / "remote/data") == tree_digest(tmp_path / "local/data")


def test_map_in_python(sources: Sources, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    options: dict[str, Any] = {"remove_columns": ["l", "s"], "cache_dir": tmp_path, "memory": "1GB"}
    remote = library.map(f"{sources.address}/parquet", _longer, endpoint_url=s3.endpoint, **options)
    assert remote.to_list() == library.map(str(sources.folder / "parquet"), _longer, **options).to_list()


def _longer(row: dict[str, Any]) -> dict[str, Any]:
    return {"m": row["text"] + "!"}


def test_tokenize_from_a_bucket(sources: Sources, tmp_path: Path, s3: S3Server) -> None:
    """The real command over compressed objects, with --endpoint-url, gives the same token ids."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["row"], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    common = ("--tokenizer", tmp_path / "tokenizer.json", "--unit-size", "300kB", "--memory", "1GB", "-q")
    without = {name: value for name, value in os.environ.items() if name != "AWS_ENDPOINT_URL"}
    glob = f"{sources.address}/zst/*.jsonl.zst"
    brim("tokenize", glob, tmp_path / "remote", *common, "--endpoint-url", s3.endpoint, env=without)
    brim("tokenize", f"{sources.folder}/zst/*.jsonl.zst", tmp_path / "local", *common)
    assert tree_digest(tmp_path / "remote/data") == tree_digest(tmp_path / "local/data")


def test_no_rows(s3: S3Server, s3_prefix: str, tmp_path: Path) -> None:
    """A dataset without rows has no shards, is complete, and is not built again."""
    s3.write(PRIVATE, f"{s3_prefix}none.parquet", parquet(1, TABLE.slice(0, 0)))
    (tmp_path / "steps.py").write_text("def same(row):\n    return row\n")
    source, created = f"s3://{PRIVATE}/{s3_prefix}none.parquet", f"s3://{PRIVATE}/{s3_prefix}made"
    for _ in range(2):
        brim("map", source, created, "--fn", f"{tmp_path}/steps.py:same", "--state", tmp_path / "state")
    assert "0 rows" in brim("verify", created).stdout


@pytest.mark.parametrize(
    ("command", "dest", "message"),
    [
        (("map", "--fn", "fn.py:same"), "s3://nowhere/out", "does not exist"),
        (("map", "--fn", "fn.py:same"), "hf://datasets/ada/out", "The token for the Hub is missing"),
        (("map", "--fn", "fn.py:same"), f"s3://{PRIVATE}/PREFIX", "that brim did not write"),
        (("embed", "--model", "fn:same", "--column", "text"), "s3://nowhere/out.npy", "does not exist"),
    ],
)
def test_a_destination_that_cannot_be_used(
    command: tuple[str, ...], dest: str, message: str, s3: S3Server, s3_prefix: str, tmp_path: Path
) -> None:
    """The error comes before the first unit is computed."""
    source = (
        write_files(tmp_path, {"rows.jsonl": b'{"text": "a"}\n', "fn.py": b"def same(row): return row"}) / "rows.jsonl"
    )
    s3.write(PRIVATE, f"{s3_prefix}data/mine.parquet", b"not brim's")
    own = {"HF_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"} | s3.environment | own
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tmp_path), environment.get("PYTHONPATH")]))
    verb, *options = command
    dest = dest.replace("PREFIX", s3_prefix.rstrip("/"))
    result = brim(verb, source, dest, *options, "--json", check=2, env=environment, cwd=tmp_path)
    assert message in result.stdout
    assert "computed" not in result.stdout


def test_what_others_published_since(s3: S3Server, s3_prefix: str, tmp_path: Path) -> None:
    """The existing result in the bucket decides, not the local state: it is reused, and refused if it is another
    dataset."""
    files = {"rows.jsonl": b'{"text": "a"}\n', "fn.py": b"def same(row): return row\ndef bad(row): 1 / 0"}
    source, created = write_files(tmp_path, files) / "rows.jsonl", f"s3://{PRIVATE}/{s3_prefix}made"

    def at(machine: str, *options: str, check: int = 0) -> str:
        own = {**os.environ, **s3.environment, "XDG_STATE_HOME": str(tmp_path / machine)}
        result = brim("map", source, created, *options, "--json", check=check, env=own, cwd=tmp_path)
        return result.stdout

    at("first", "--fn", "fn.py:bad", check=2)  # started and not finished
    at("second", "--fn", "fn.py:same")
    assert '"computed": 0' in at("third", "--fn", "fn.py:same")
    for machine in ("first", "first", "fourth"):
        message = at(machine, "--fn", "fn.py:bad", check=2)
        assert "has another dataset" in message
        assert "--update" not in message
    assert "1 row," in brim("verify", created, env=os.environ | s3.environment).stdout
    assert "was computed" in brim("verify", created, source, check=2, env=os.environ | s3.environment).stderr
    assert "was computed" in brim("unpack", created, tmp_path / "out", check=2, env=os.environ | s3.environment).stderr
