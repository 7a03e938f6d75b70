"""Random selections from random tables of every writer give the rows that pyarrow selects."""

from __future__ import annotations

import io
import json
import random
import shlex
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import brim as library
from brim.errors import BrimError, InputError
from brim.sources.open_source import open_dataset
from brim.sources.selection import Selection, keyed
from tests.forked import brim
from tests.sources.test_parquet_source import FILE, rows_of

Writer = Callable[[pa.Table, Path, random.Random], None]


def random_table(rng: random.Random, rows: int) -> pa.Table:
    """Return a table with columns for conditions, files and plain bytes: null, empty, repeated, small and large."""

    def content() -> bytes | None:
        kind = rng.randrange(6)
        size = rng.choice([0, 1, 40, 3000, 90_000])
        return None if kind == 0 else b"again" * 9 if kind == 1 else b"\0" * size if kind == 2 else rng.randbytes(size)

    def file(n: int) -> dict[str, Any] | None:
        return None if rng.random() < 0.1 else {"bytes": content(), "path": rng.choice([None, f"{n}.png"])}

    return pa.table(
        {
            "n": pa.array(range(rows), pa.int64()),
            "age": pa.array([rng.choice([None, rng.randrange(90)]) for _ in range(rows)], pa.int64()),
            "name": pa.array([rng.choice([None, "ada", "Bo", "cé"]) for _ in range(rows)], pa.string()),
            "image": pa.array([file(n) for n in range(rows)], FILE),
            "raw": pa.array([content() for _ in range(rows)], pa.binary()),
        }
    )


def by_pyarrow(table: pa.Table, path: Path, rng: random.Random) -> None:
    pq.write_table(
        table, path, compression=rng.choice(["none", "snappy", "zstd", "gzip", "brotli", "lz4"]),
        data_page_version=rng.choice(["1.0", "2.0"]), use_dictionary=rng.choice([True, False]),
        row_group_size=rng.randrange(1, 40), data_page_size=rng.choice([100, 10_000, 1 << 20]),
        write_page_index=rng.choice([True, False]), write_page_checksum=rng.choice([True, False]),
        version=rng.choice(["1.0", "2.4", "2.6"]),
    )  # fmt: skip


def by_polars(table: pa.Table, path: Path, rng: random.Random) -> None:
    import polars

    codec = rng.choice(["zstd", "snappy", "uncompressed", "lz4", "gzip"])
    polars.from_arrow(table).write_parquet(path, row_group_size=rng.randrange(5, 40), compression=codec)


def by_duckdb(table: pa.Table, path: Path, rng: random.Random) -> None:
    import duckdb

    rows = table  # noqa: F841 - DuckDB finds it by its name
    version, codec = rng.choice(["v1", "v2"]), rng.choice(["snappy", "zstd", "uncompressed"])
    duckdb.sql(f"COPY (SELECT * FROM rows ORDER BY n) TO '{path}' (PARQUET_VERSION {version}, CODEC {codec})")


def by_datafusion(table: pa.Table, path: Path, rng: random.Random) -> None:
    import datafusion

    context = datafusion.SessionContext()
    frame = context.create_dataframe([table.combine_chunks().to_batches()]).sort(datafusion.col("n"))
    frame.write_parquet(str(path), compression=rng.choice(["zstd", "snappy", "uncompressed", "lz4_raw"]))
    if path.is_dir():
        (part,) = path.glob("*.parquet")
        moved_path = path.with_suffix(".moved")
        part.rename(moved_path)
        shutil.rmtree(path)
        moved_path.rename(path)


def by_datasets(table: pa.Table, path: Path, rng: random.Random) -> None:
    import datasets

    whole = [row for row in table.to_pylist() if row["image"] is None or row["image"]["bytes"] is not None]
    columns = {"n": "int64", "age": "int64", "name": "string", "raw": "binary"}
    features = {name: datasets.Value(kind) for name, kind in columns.items()} | {"image": datasets.Image()}
    values = {name: [row[name] for row in whole] for name in features}  # from_list creates no columns without rows
    datasets.Dataset.from_dict(values, datasets.Features(features)).to_parquet(str(path))


def by_fastparquet(table: pa.Table, path: Path, rng: random.Random) -> None:
    import fastparquet

    frame = table.select(["n", "raw"]).to_pandas()
    codec = rng.choice(["UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD", "BROTLI", "LZ4"])
    options = {"object_encoding": {"raw": "bytes"}, "has_nulls": True}
    fastparquet.write(str(path), frame, compression=codec, row_group_offsets=rng.randrange(5, 40), **options)


WRITERS: list[Writer] = [by_pyarrow, by_polars, by_duckdb, by_datafusion, by_datasets, by_fastparquet]
Query = tuple[Callable[[Selection], Selection], Callable[[pa.Table], pa.Table]]


def steps_of(names: list[str]) -> list[Query]:
    """Return selection steps, each with the same operation in pyarrow. `__row` is the row number in the source."""

    def kept(expression: pc.Expression) -> Callable[[pa.Table], pa.Table]:
        return lambda table: table.filter(expression)

    def shuffled(seed: int) -> Callable[[pa.Table], pa.Table]:
        return lambda table: table.take(
            pa.array(np.argsort(keyed(table["__row"].to_numpy().astype(np.int64), seed, "shuffle"), kind="stable"))
        )

    def by_two(table: pa.Table) -> pa.Table:
        keys = [("name", "ascending"), ("age", "descending"), ("__at", "ascending")]
        return table.append_column("__at", pa.array(range(len(table)))).sort_by(keys).drop_columns(["__at"])

    age, lowered = pc.field("age"), pc.utf8_lower(pc.field("name"))
    steps: list[Query] = [
        (lambda rows: rows.where("n > 3 and n < 40"), kept((pc.field("n") > 3) & (pc.field("n") < 40))),
        (lambda rows: rows.shuffle(5), shuffled(5)),
        (lambda rows: rows.sort("n", descending=True), lambda table: table.sort_by([("n", "descending")])),
        (lambda rows: rows.limit(9), lambda table: table.slice(0, 9)),
        (lambda rows: rows.columns(["raw", "n"]), lambda table: table.select(["raw", "n", "__row"])),
        (lambda rows: rows.where("n in [1, 5, 7, 50]"), kept(pc.field("n").isin([1, 5, 7, 50]))),
    ]
    if "age" in names:
        steps += [
            (lambda rows: rows.where("age is None or age >= 30"), kept(pc.is_null(age) | (age >= 30))),
            (lambda rows: rows.where("not age < 50"), kept(~(age < 50))),
            (lambda rows: rows.where("name.lower() in ['ada', 'bo']"), kept(lowered.isin(["ada", "bo"]))),
            (lambda rows: rows.sort(["name", "-age"]), by_two),
        ]
    return steps


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.data(), seed=st.integers(0, 10**6), writer=st.sampled_from(WRITERS), rows=st.integers(1, 60),
    as_if_far=st.booleans(),
)  # fmt: skip
def test_random_queries(
    tmp_path: Path, data: st.DataObject, seed: int, writer: Writer, rows: int, as_if_far: bool
) -> None:
    """Random selections from shards of every writer give the rows and values of pyarrow, in order.

    If the shards are treated as remote, statistics exclude row groups, and small columns are read by row group.
    """
    rng = random.Random(seed)
    folder = tmp_path / "in"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    table = random_table(rng, rows)
    cut = rng.randrange(rows + 1)
    parts = [part for part in (table.slice(0, cut), table.slice(cut)) if len(part)]
    for number, part in enumerate(parts):
        writer(part, folder / f"train-{number:05d}-of-{len(parts):05d}.parquet", rng)
    read = [pq.read_table(file, use_threads=False) for file in sorted(folder.iterdir())]
    expected = pa.concat_tables([item.replace_schema_metadata(None) for item in read])
    expected = expected.append_column("__row", pa.array(range(len(expected)), pa.int64()))
    actual = open_dataset(folder)
    vars(actual.origin)["_far"] = as_if_far
    for _ in range(data.draw(st.integers(0, 3))):
        names = [name for name in expected.column_names if name != "__row"]
        mine, its = data.draw(st.sampled_from(steps_of(names)))
        actual, expected = mine(actual), its(expected)
        if "raw" not in actual.column_names or len(actual.column_names) < 3:
            break
    assert rows_of(actual.table()) == expected.drop_columns(["__row"]).to_pylist()


@pytest.mark.parametrize("writer", WRITERS)
def test_built_and_read_by_others(tmp_path: Path, writer: Writer) -> None:
    """A selection that is written again has the values and columns that pyarrow reads from the source."""
    rng = random.Random(8)
    writer(random_table(rng, 50), tmp_path / "in.parquet", rng)
    library.select(tmp_path / "in.parquet", tmp_path / "out", where="n >= 10", num_shards=2)
    expected = pq.read_table(tmp_path / "in.parquet", use_threads=False).filter(pc.field("n") >= 10)
    table = [pq.read_table(file) for file in sorted((tmp_path / "out" / "data").iterdir())]
    assert pa.concat_tables(table).to_pylist() == expected.to_pylist()
    assert [field.name for field in table[0].schema] == [field.name for field in expected.schema]


def _tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, body in members:
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return path


def test_tars_in_any_order(tmp_path: Path) -> None:
    """JSON members are read at any position within a row, and numbers may be negative.

    Members without a key are reported.
    """
    members = [
        ("0.JPG", b"x"),
        ("._0.jpg", b"mac"),
        ("0.json", b'{"age": 3, "txt": "no"}'),
        ("0.txt", b"a"),
        ("0.cls", b"-1"),
    ]
    members += [("README", b"hi"), ("1.cls", b"2"), ("1.json", b'{"age": 4, "__columns__": 1}'), ("1.jpg", b"y")]
    actual = library.dataset(_tar(tmp_path / "a.tar", members))
    assert actual.column_names == ["__key__", "age", "txt", "cls", "jpg", "__columns__"]
    table = actual.where("age > 3 or cls == -1").table()
    assert table.warnings == ("2 member(s) of the tars without a key and an extension are left out, such as '._0.jpg'",)
    assert table.rows.drop_columns(["jpg"]).to_pylist() == [
        {"__key__": "0", "age": 3, "txt": "a", "cls": -1, "__columns__": None},
        {"__key__": "1", "age": 4, "txt": None, "cls": 2, "__columns__": 1},
    ]
    assert table.files.paths.to_pylist() == ["0.JPG", "1.jpg"]


@pytest.mark.parametrize(
    ("members", "arguments"),
    [
        ([("0.jpg", b"x"), ("0.jpg", b"y")], "0.jpg comes twice"),
        ([("0.json", b'{"a": 99999999999999999999}')], "too large"),
        ([("0.json", b'{"a": "\\ud800"}')], "surrogates not allowed"),
    ],
)
def test_tars_that_cannot_be_rows(tmp_path: Path, members: list[tuple[str, bytes]], arguments: str) -> None:
    """Tars that cannot be read as rows are refused with a clear error, and nothing is skipped silently."""
    with pytest.raises(BrimError, match=arguments):
        library.dataset(_tar(tmp_path / "a.tar", members))


def test_every_verb_chooses_by_the_same_words(tmp_path: Path) -> None:
    """Conditions on label names and string views work in every command, and a selection without rows is an error."""
    messages = {"n": {"dtype": "int64", "_type": "Value"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    files = pa.array([{"bytes": bytes([n]), "path": f"{n}.bin"} for n in range(4)], FILE)
    table = pa.table({"n": range(4), "label": [0, 1, 1, 0], "t": pa.array(list("abcd"), pa.string_view()), "f": files})
    path = tmp_path / "in.parquet"
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": messages}})}), path)
    rows = library.dataset(path)

    def twice(row: dict[str, Any]) -> dict[str, Any]:
        return {"twice": 2 * row["n"]}

    location = "label == 'dog' and t.startswith('c')"
    library.map(path, twice, destination=tmp_path / "out", where=location)
    (created,) = (tmp_path / "out" / "data").glob("*.parquet")
    assert pq.read_table(created)["twice"].to_pylist() == [4]
    assert rows.where(location).small(["n"])["n"].to_pylist() == [2]
    none = rows.where("n > 9")
    for verb in (
        lambda: library.map(path, twice, destination=tmp_path / "no", where="n > 9"),
        lambda: library.map(none, twice, destination=tmp_path / "no"),
        lambda: library.unpack(path, tmp_path / "no", where="n > 9"),
        lambda: library.check(none),
        lambda: library.build(none, tmp_path / "no"),
    ):
        with pytest.raises(InputError, match="No row was selected"):
            verb()
    assert not (tmp_path / "no").exists()


NARROW = pa.table(
    {"a": pa.array([1, 2], pa.int32()), "b": pa.array([1.5, 2], pa.float32()), "s": ["x", "y"], "z": pa.nulls(2)}
)
WIDE = pa.table(
    {
        "z": [1, None],
        "a": pa.array([2**40, 4], pa.int64()),
        "b": pa.array([3, 4], pa.int64()),
        "s": pa.array(["u", "v"], pa.large_string()),
    }
)


@pytest.mark.parametrize("narrow_first", [True, False])
def test_select_reads_shards_whose_numbers_have_several_widths(tmp_path: Path, narrow_first: bool) -> None:
    (tmp_path / "in").mkdir()
    for number, table in enumerate([NARROW, WIDE] if narrow_first else [WIDE, NARROW]):
        pq.write_table(table, tmp_path / "in" / f"{number}.parquet")
    brim("select", tmp_path / "in", tmp_path / "out", "--where", "a >= 2 and b > 1", "--sort-by", "b")
    actual = pq.read_table(next((tmp_path / "out" / "data").iterdir()))
    assert actual.select(["a", "b", "s", "z"]).to_pylist() == [
        {"a": 2, "b": 2.0, "s": "y", "z": None},
        {"a": 2**40, "b": 3.0, "s": "u", "z": 1},
        {"a": 4, "b": 4.0, "s": "v", "z": None},
    ]
    types = [actual.schema.field(name).type for name in ("a", "b", "s", "z")]
    assert types == [pa.int64(), pa.float64(), pa.large_string(), pa.int64()]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (pa.array([1, 2]), pa.array(["1", "2"]), "has different columns"),
        (pa.array([2**53 + 1, 2]), pa.array([0.5, 1.5]), "would change"),
        (pa.array([2**64 - 1], pa.uint64()), pa.array([-1]), "would change"),
    ],
)
def test_select_refuses_shards_whose_values_no_type_holds(
    tmp_path: Path, first: pa.Array, second: pa.Array, message: str
) -> None:
    (tmp_path / "in").mkdir()
    for number, array in enumerate((first, second)):
        pq.write_table(pa.table({"a": array}), tmp_path / "in" / f"{number}.parquet")
    assert message in brim("select", tmp_path / "in", tmp_path / "out", check=2).stderr


@pytest.mark.parametrize("kind", ["jsonl", "csv", "arrow", "folder", "glob"])
def test_select_names_a_command_that_makes_parquet_of_text(tmp_path: Path, kind: str) -> None:
    """`brim select` refuses rows of text and names the command that converts them to Parquet, which works."""
    (tmp_path / "in").mkdir()
    ending = kind if kind in ("jsonl", "csv", "arrow") else "jsonl"
    path = tmp_path / "in" / f"a.{ending}"
    if kind == "arrow":
        with pa.ipc.new_file(str(path), pa.schema([("a", pa.int64())])) as writer:
            writer.write_table(pa.table({"a": [1, 2]}))
    else:
        path.write_text('{"a": 1}\n{"a": 2}\n' if ending == "jsonl" else "a\n1\n2\n")
    source = {"folder": "in", "glob": "in/*.jsonl"}.get(kind, f"in/a.{ending}")
    refused = brim("select", source, "out", check=2, cwd=tmp_path).stderr
    names = refused[refused.index("brim map") :].split("\n")[0]
    brim(*shlex.split(names)[1:], cwd=tmp_path)
    brim("select", "shards/", "out", "--where", "a == 2", cwd=tmp_path)
    assert pq.read_table(next((tmp_path / "out" / "data").iterdir()))["a"].to_pylist() == [2]
