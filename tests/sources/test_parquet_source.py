"""Values are located in Parquet files of every writer, and equal the values that pyarrow reads."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from brim.errors import BrimError, InputError
from brim.formats.splice import SpliceBuilder
from brim.sources.file_table import FileTable
from brim.sources.open_source import open_dataset

CODECS = ["none", "snappy", "zstd", "gzip", "brotli", "lz4"]
FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def content_of(table: FileTable, number: int) -> bytes:
    value = SpliceBuilder(table.files)
    value.value(number)
    with value.finish() as splice:
        return splice.read_at(0, splice.size)


def cell_of(table: FileTable, name: str, cell: Any) -> Any:
    """Return a cell of a file column as pyarrow returns it."""
    if cell is None:
        return None
    if isinstance(cell, list):
        return [cell_of(table, name, item) for item in cell]
    present = table.files.has_content(np.array([cell]))[0]
    data = content_of(table, cell) if present else None
    stored = table.columns[name].stored
    while stored is not None and hasattr(stored, "value_type"):
        stored = stored.value_type
    if stored is not None and not pa.types.is_struct(stored):
        return data
    return {"bytes": data, "path": table.files.paths[cell].as_py()}


def nested_of(table: FileTable, kind: pa.DataType, value: Any) -> Any:
    """Return a value of a nested column with its bytes."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: nested_of(table, field.type, value[field.name]) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [nested_of(table, kind.value_type, item) for item in value]
    return content_of(table, value) if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else value


def rows_of(table: FileTable) -> list[dict[str, Any]]:
    """Return every row with the content of its files."""

    def full(name: str, value: Any) -> Any:
        if name in table.nested:
            return nested_of(table, table.nested[name], value)
        return cell_of(table, name, value) if name in table.columns else value

    return [{name: full(name, value) for name, value in row.items()} for row in table.rows.to_pylist()]


def noise(rng: random.Random, size: int) -> bytes:
    return rng.randbytes(size)


def sample_table(seed: int, rows: int = 60) -> pa.Table:
    """Return a table with files, lists of files and plain bytes: null, empty, repeated and of many sizes."""
    rng = random.Random(seed)

    def one() -> bytes | None:
        kind = rng.randrange(8)
        sizes = [0, 1, 10, 1000, 70_000, 200_000]
        if kind == 0:
            return None
        if kind == 1:
            return b"again" * 30
        size = rng.choice(sizes)
        return b"\0" * size if kind == 2 else noise(rng, size)

    def file() -> dict[str, Any] | None:
        return None if rng.random() < 0.1 else {"bytes": one(), "path": rng.choice([None, "a.png", "b/c.png"])}

    def files() -> list[Any] | None:
        return None if rng.random() < 0.1 else [file() for _ in range(rng.randrange(4))]

    return pa.table(
        {
            "n": pa.array(range(rows)),
            "image": pa.array([file() for _ in range(rows)], FILE),
            "text": pa.array([rng.choice([None, "x", "y" * 50]) for _ in range(rows)]),
            "images": pa.array([files() for _ in range(rows)], pa.list_(FILE)),
            "raw": pa.array([one() for _ in range(rows)], pa.binary()),
            "raws": pa.array([[one() for _ in range(rng.randrange(3))] for _ in range(rows)], pa.list_(pa.binary())),
            "deep": pa.array([{"image": file(), "label": n} for n in range(rows)]),
        }
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_pyarrow_files(tmp_path: Path, codec: str, version: str, dictionary: bool) -> None:
    """Files of pyarrow are read: all codecs, both versions of data pages, dictionaries, row groups and checksums."""
    table = sample_table(1)
    pq.write_table(
        table, tmp_path / "a.parquet", compression=codec, data_page_version=version, use_dictionary=dictionary,
        row_group_size=23, data_page_size=50_000, write_page_index=dictionary, write_page_checksum=True,
    )  # fmt: skip
    actual = open_dataset(tmp_path / "a.parquet").table()
    assert {"image", "images", "raw", "raws"} <= set(actual.columns)
    assert rows_of(actual) == table.to_pylist()


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "PLAIN"])
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
def test_encodings(tmp_path: Path, encoding: str, codec: str) -> None:
    """Delta encodings are read: lengths in one block, and values with shared prefixes."""
    table = sample_table(2).select(["image", "raw"])
    leaf_values = {"image.bytes": encoding, "raw": encoding}
    pq.write_table(table, tmp_path / "a.parquet", compression=codec, use_dictionary=False, column_encoding=leaf_values)
    assert rows_of(open_dataset(tmp_path / "a.parquet").table()) == table.to_pylist()


@pytest.mark.parametrize("index", [True, False])
def test_some_rows(tmp_path: Path, index: bool) -> None:
    """Selected rows and columns of several shards are read in the requested order."""
    table = sample_table(3, 90)
    for number in range(3):
        name = f"train-{number:05d}-of-00003.parquet"
        pq.write_table(table.slice(number * 30, 30), tmp_path / name, row_group_size=7, write_page_index=index)
    rows = [80, 3, 4, 31, 5, 59, 60, 0]
    actual = open_dataset(tmp_path).take(rows).columns(["images", "n", "raw"]).table()
    assert rows_of(actual) == table.select(["images", "n", "raw"]).take(rows).to_pylist()


def written_by_polars(table: pa.Table, path: Path) -> None:
    import polars

    polars.from_arrow(table.select(["n", "image", "raw", "text"])).write_parquet(path, row_group_size=20)


def written_by_duckdb(table: pa.Table, path: Path) -> None:
    import duckdb

    t = table.select(["n", "image", "raw", "text"])  # noqa: F841 - DuckDB finds it by its name
    duckdb.sql(f"COPY (SELECT * FROM t ORDER BY n) TO '{path}' (FORMAT parquet)")


def written_by_duckdb_v2(table: pa.Table, path: Path) -> None:
    import duckdb

    t = table.select(["n", "image", "raw", "text"])  # noqa: F841 - DuckDB finds it by its name
    duckdb.sql(f"COPY (SELECT * FROM t ORDER BY n) TO '{path}' (FORMAT parquet, PARQUET_VERSION v2)")


def written_by_datafusion(table: pa.Table, path: Path) -> None:
    import datafusion

    context = datafusion.SessionContext()
    batches = table.select(["n", "image", "raw", "text"]).combine_chunks().to_batches()
    context.create_dataframe([batches]).sort(datafusion.col("n")).write_parquet(str(path))


def written_by_datasets(table: pa.Table, path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"n": datasets.Value("int64"), "image": datasets.Image(), "raw": datasets.Value("binary")}
    )
    rows = table.select(["n", "image", "raw"]).to_pylist()
    rows = [row for row in rows if row["image"] is None or row["image"]["bytes"] is not None]
    datasets.Dataset.from_list(rows, features).to_parquet(str(path))


@pytest.mark.parametrize(
    "write",
    [written_by_polars, written_by_duckdb, written_by_duckdb_v2, written_by_datafusion, written_by_datasets],
)
def test_other_writers(tmp_path: Path, write: Any) -> None:
    """Files of other writers are read as pyarrow reads them."""
    path = tmp_path / "a.parquet"
    write(sample_table(4), path)
    if path.is_dir():  # DataFusion writes a folder
        (path,) = path.glob("*.parquet")
    expected = pq.read_table(path, use_threads=False)
    actual = open_dataset(path).table()
    assert actual.columns
    assert rows_of(actual) == expected.to_pylist()


def test_media_stay_in_the_file(tmp_path: Path) -> None:
    """Incompressible values are located as ranges of the file, without decoding anything to disk."""
    rng = random.Random(5)
    table = pa.table({"image": pa.array([{"bytes": noise(rng, 300_000), "path": f"{n}.jpg"} for n in range(9)], FILE)})
    for codec in ("snappy", "zstd"):
        pq.write_table(table, tmp_path / "a.parquet", compression=codec, use_dictionary=False)
        actual = open_dataset(tmp_path / "a.parquet").table()
        assert actual.files.on_disk.paths.to_pylist() == [str(tmp_path / "a.parquet")]
        assert not actual.held
        assert actual.files.ranges is not None
        assert actual.files.ranges.segments is not None
        assert rows_of(actual) == table.to_pylist()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6), codec=st.sampled_from(CODECS), group=st.integers(1, 40), page=st.integers(100, 10**6)
)
@example(seed=0, codec="snappy", group=1, page=100)
def test_random_tables(tmp_path: Path, seed: int, codec: str, group: int, page: int) -> None:
    """Values of random tables are located for all sizes of row groups and pages."""
    table = sample_table(seed, 20)
    path = tmp_path / f"{seed}-{codec}-{group}-{page}.parquet"
    pq.write_table(table, path, compression=codec, row_group_size=group, data_page_size=page, write_page_index=True)
    rng = random.Random(seed)
    rows = [rng.randrange(20) for _ in range(5)]
    assert rows_of(open_dataset(path).take(rows).table()) == table.take(rows).to_pylist()
    path.unlink()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), codec=st.sampled_from(CODECS), version=st.sampled_from(["1.0", "2.0"]))
def test_damage(tmp_path: Path, data: st.DataObject, codec: str, version: str) -> None:
    """A damaged file raises a brim error, or returns the values that pyarrow reads from it."""
    path = tmp_path / f"{codec}-{version}.parquet"
    if not path.exists():
        pq.write_table(sample_table(6, 12), path, compression=codec, data_page_version=version, write_page_index=True)
    whole = path.read_bytes()
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        low = len(whole) - footer if data.draw(st.booleans()) else 0
        broken[data.draw(st.integers(low, len(whole) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.integers(0, 9)) == 0:
        broken = broken[: data.draw(st.integers(0, len(broken)))]
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(broken)
    try:
        rows = rows_of(open_dataset(damaged).table())
    except BrimError:
        return
    try:
        expected = pq.read_table(damaged, use_threads=False).to_pylist()
    except (pa.ArrowException, OSError, ValueError):
        return
    assert rows == expected


def test_features_travel(tmp_path: Path) -> None:
    """Features stored in a file are used for the table. Without them, images are recognized by file name."""
    table = sample_table(7).select(["n", "image"])
    messages = {"info": {"features": {"n": {"dtype": "int64", "_type": "Value"}, "image": {"_type": "Image"}}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(messages)}), tmp_path / "a.parquet")
    pq.write_table(table, tmp_path / "b.parquet")
    assert open_dataset(tmp_path / "a.parquet").features == messages["info"]["features"]
    assert open_dataset(tmp_path / "b.parquet").features == messages["info"]["features"]


VALUE = {"dtype": "int64", "_type": "Value"}


@pytest.mark.parametrize(
    "message",
    [
        {"n": {"dtype": "string", "_type": "Value"}},
        {"n": {"_type": "Image"}, "gone": VALUE},
        {"n": {"feature": VALUE, "_type": "List"}},
        {"n": None},
        {"n": {"_type": "ClassLabel"}},
        {},
        None,
        ["n"],
        "n",
    ],
)
def test_features_that_are_not_those_of_the_columns(tmp_path: Path, message: Any) -> None:
    """Stored features that do not fit a column are ignored, as in `datasets`: the file may have been changed."""
    records = {"huggingface": json.dumps({"info": {"features": message}})}
    pq.write_table(pa.table({"n": [1, 2]}).replace_schema_metadata(records), tmp_path / "a.parquet")
    rows = open_dataset(tmp_path / "a.parquet").where("n > 1")
    assert rows.table().features == {"n": VALUE}
    unknown = {"n": {"_type": "Newer"}}
    records = {"huggingface": json.dumps({"info": {"features": unknown}})}
    pq.write_table(pa.table({"n": [1, 2]}).replace_schema_metadata(records), tmp_path / "a.parquet")
    assert open_dataset(tmp_path / "a.parquet").features == unknown


def test_joined_types(tmp_path: Path) -> None:
    """Columns of one type in `datasets` can be concatenated, however they are stored. Others are refused by name."""
    maps = {kind: pa.array([[("k", None)]] * 2, pa.map_(pa.string(), kind)) for kind in (pa.int32(), pa.string())}
    words = pa.array(["b", "a"])
    always = pa.schema([pa.field("w", pa.string(), nullable=False)])
    tables = {
        "plain": pa.table({"w": words}),
        "always": pa.table({"w": words}, schema=always),
        "coded": pa.table({"w": words.dictionary_encode()}),
        "short": pa.table({"w": words.dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string()))}),
        "map": pa.table({"w": words, "m": maps[pa.int32()]}),
        "other": pa.table({"w": words, "m": maps[pa.string()]}),
    }
    reader = {}
    for name, table in tables.items():
        pq.write_table(table, tmp_path / f"{name}.parquet")
        reader[name] = open_dataset(tmp_path / f"{name}.parquet")
    for item, two in itertools.permutations(["plain", "always", "coded", "short"], 2):
        combined = reader[item].concat(reader[two])
        assert combined.table().rows.column("w").to_pylist() == ["b", "a"] * 2
        assert combined.sort("w").table().rows.column("w").to_pylist() == ["a", "a", "b", "b"]
        assert len(combined.where("w == 'a'")) == 2
    assert reader["coded"].concat(reader["coded"]).table().rows.schema.field("w").type == tables["coded"]["w"].type
    with pytest.raises(InputError, match="'m' has different types in map"):
        reader["map"].concat(reader["other"]).table()
    assert len(reader["map"].concat(reader["other"]).where("w == 'a'").columns("w").table()) == 2
