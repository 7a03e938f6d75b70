"""Bytes inside structs and lists of any depth are located in the file and equal the values that pyarrow reads."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import brim as library
from brim.formats.parquet_levels import (
    assemble_leaf,
    byte_leaves,
    leaf_cells,
    levels_of,
    merge_leaves,
    numbered_type,
    with_empty_bytes,
)
from brim.sources.open_source import open_dataset
from tests.sources.test_parquet_source import FILE, rows_of
from tests.sources.test_select_writers import (
    WRITERS,
    Writer,
    by_datafusion,
    by_datasets,
    by_duckdb,
    by_fastparquet,
    by_polars,
    by_pyarrow,
)

LEAVES = [pa.binary(), pa.large_binary(), pa.string(), pa.int64(), pa.bool_(), FILE]


def kinds(depth: int) -> st.SearchStrategy[pa.DataType]:
    """Generate types with bytes, texts and numbers in structs and lists."""
    if not depth:
        return st.sampled_from(LEAVES)
    inner = kinds(depth - 1)
    fields = st.lists(st.tuples(inner, st.booleans()), min_size=1, max_size=3)
    structs = fields.map(
        lambda source: pa.struct([pa.field(f"f{n}", k, nullable=null) for n, (k, null) in enumerate(source)])
    )
    items = st.tuples(inner, st.booleans()).map(lambda owner: pa.field("element", owner[0], nullable=owner[1]))
    return st.one_of(inner, structs, items.map(pa.list_), items.map(pa.large_list))


def value_of(rng: random.Random, kind: pa.DataType, nullable: bool = True) -> Any:
    if nullable and rng.random() < 0.2:
        return None
    if pa.types.is_struct(kind):
        return {field.name: value_of(rng, field.type, field.nullable) for field in kind}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [value_of(rng, kind.value_type, kind.value_field.nullable) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
    if pa.types.is_int64(kind) or pa.types.is_boolean(kind):
        return rng.choice([0, 1]) if pa.types.is_int64(kind) else rng.random() < 0.5
    if pa.types.is_string(kind):
        return rng.choice(["", "a", "é" * 9])
    size = rng.choice([0, 1, 30, 2000, 70_000 if rng.random() < 0.1 else 5])
    return rng.choice([b"again", b"\0" * size, rng.randbytes(size), rng.randbytes(size)])


def has_bytes(kind: pa.DataType) -> bool:
    return bool(byte_leaves(kind))


NESTED = kinds(3).filter(has_bytes)
TWO = pa.struct([("a", pa.binary()), ("b", pa.large_binary()), ("c", pa.struct([("d", pa.binary())]))])
STRICT = pa.struct([pa.field("a", pa.binary(), nullable=False), pa.field("n", pa.int64())])


@settings(max_examples=60, deadline=None)
@given(kind=NESTED, nullable=st.booleans(), seed=st.integers(0, 10**6), rows=st.integers(0, 12))
@example(kind=pa.list_(pa.list_(TWO)), nullable=False, seed=1, rows=9)
@example(kind=pa.list_(STRICT), nullable=True, seed=2, rows=9)
def test_levels_make_the_shape_again(kind: pa.DataType, nullable: bool, seed: int, rows: int) -> None:
    """Splitting a column into the levels of its leaves and merging them returns the same column."""
    rng = random.Random(seed)
    array = pa.array([value_of(rng, kind, nullable) for _ in range(rows)], kind)
    parts, expected = [], []
    for path, steps in byte_leaves(kind, nullable) or ():
        levels = levels_of(array, nullable, path)
        numbers = pa.array(range(len(levels.index)), pa.int64(), mask=levels.definition < levels.max_definition)
        assert levels.max_definition == len(steps)
        parts.append(assemble_leaf(pa.field("x", kind, nullable), path, levels.repetition, levels.definition, numbers))
        expected.append(int((levels.definition == levels.max_definition).sum()))
    small = _without_bytes(array)
    whole = merge_leaves(numbered_type(kind), [*parts, *([] if small is None else [small])])
    whole.validate(full=True)
    assert whole.type == numbered_type(kind)
    assert [len(cells.drop_null()) for cells, _ in leaf_cells(whole, kind)] == expected
    empty = with_empty_bytes(whole, kind)
    assert empty.type == kind
    assert empty.to_pylist() == [_emptied(item) for item in array.to_pylist()]


def _emptied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _emptied(item) for name, item in value.items()}
    return (
        [_emptied(entry) for entry in value] if isinstance(value, list) else b"" if isinstance(value, bytes) else value
    )


def _without_bytes(array: pa.Array) -> pa.Array | None:
    """Return a column as pyarrow reads it when only its leaves without bytes are requested."""
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        return None
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": array}), sink)
    file = pq.ParquetFile(pa.BufferReader(sink.getvalue()))
    leaf_values = [n for n in range(len(file.schema.names)) if file.schema.column(n).physical_type != "BYTE_ARRAY"]
    leaf_values += [n for n in range(len(file.schema.names)) if file.schema.column(n).logical_type.type == "STRING"]
    return file.reader.read_all(column_indices=sorted(leaf_values)).column(0).combine_chunks() if leaf_values else None


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=NESTED, nullable=st.booleans(), seed=st.integers(0, 10**6), rows=st.integers(1, 40),
    writer=st.sampled_from([by_pyarrow, by_pyarrow, by_polars, by_duckdb, by_datafusion]), as_if_far=st.booleans(),
)  # fmt: skip
def test_random_nested_tables(
    tmp_path: Path, kind: pa.DataType, nullable: bool, seed: int, rows: int, writer: Writer, as_if_far: bool
) -> None:
    """Random nested tables of every writer are read as by pyarrow, without decoding anything to disk."""
    rng = random.Random(seed)
    path = tmp_path / "a.parquet"
    path.unlink(missing_ok=True)
    values = [value_of(rng, kind, nullable) for _ in range(rows)]
    fields = [pa.field("n", pa.int64()), pa.field("x", kind, nullable=nullable)]
    writer(pa.table([pa.array(range(rows)), pa.array(values, kind)], schema=pa.schema(fields)), path, rng)
    expected = pq.read_table(path, use_threads=False)
    actual = open_dataset(path)
    vars(actual.origin)["_far"] = as_if_far
    table = actual.table()
    assert rows_of(table) == expected.to_pylist()
    assert not [note for note in table.notes() if "needs it" in note or "inside of" in note]
    some = [n for n in range(rows) if rng.random() < 0.5]
    rng.shuffle(some)
    assert rows_of(actual.take(some).table()) == [expected.to_pylist()[n] for n in some]


def test_levels_that_take_more_than_their_values(tmp_path: Path) -> None:
    """Level blocks are as long as they state: DuckDB packs 256 levels even for three of them."""
    for nullable in (True, False):
        path, kind = tmp_path / f"{nullable}.parquet", pa.list_(pa.field("element", pa.binary()))
        fields = [pa.field("n", pa.int64()), pa.field("x", kind, nullable=nullable)]
        table = pa.table([pa.array([0, 1]), pa.array([[b"1" * 5, b"2" * 30], []], kind)], schema=pa.schema(fields))
        by_duckdb(table, path, random.Random(0))
        assert rows_of(open_dataset(path).table()) == table.to_pylist()


@pytest.mark.parametrize("writer", [item for item in WRITERS if item not in (by_datasets, by_fastparquet)])
def test_nested_columns_are_written_again(tmp_path: Path, writer: Writer) -> None:
    """Nested columns can be selected, shuffled, concatenated and sharded again with the same types.

    The result verifies and is a source for another selection.
    """
    rng = random.Random(4)
    kind = pa.struct([("image", FILE), ("more", pa.list_(TWO)), ("site", pa.string())])
    values = {"x": [value_of(rng, kind) for _ in range(60)], "deep": [value_of(rng, pa.list_(kind)) for _ in range(60)]}
    table = pa.table({"n": pa.array(range(60)), "x": pa.array(values["x"], kind), "deep": pa.array(values["deep"])})
    writer(table, tmp_path / "in.parquet", rng)
    source = pq.read_table(tmp_path / "in.parquet", use_threads=False)
    rows = open_dataset(tmp_path / "in.parquet").where("n >= 10").shuffle(2)
    order = rows.small(["n"]).column("n").to_pylist()
    library.build(rows.concat(open_dataset(tmp_path / "in.parquet").where("n < 10")), tmp_path / "out", num_shards=3)
    combined = pa.concat_tables([pq.read_table(file) for file in sorted((tmp_path / "out" / "data").iterdir())])
    expected = source.take(pa.array([*order, *range(10)]))
    assert combined.to_pylist() == expected.to_pylist()
    library.verify(tmp_path / "out")
    library.select(tmp_path / "out", tmp_path / "again", sort_by="n")
    (repeated,) = (tmp_path / "again" / "data").iterdir()
    assert pq.read_table(repeated).to_pylist() == source.to_pylist()
    library.verify(tmp_path / "again", open_dataset(tmp_path / "out").sort("n"))


def test_structs_of_datasets(tmp_path: Path) -> None:
    """Images in structs and in lists of structs that `datasets` wrote are selected and loaded by `datasets` again."""
    import datasets

    rng = random.Random(6)
    inner = {"picture": datasets.Image(decode=False), "label": datasets.Value("int64")}
    features = datasets.Features({"n": datasets.Value("int64"), "one": inner, "many": datasets.List(inner)})

    def value() -> dict[str, Any]:
        return {"picture": {"bytes": rng.randbytes(500), "path": "a.png"}, "label": rng.randrange(9)}

    rows = {"n": list(range(20)), "one": [value() for _ in range(20)], "many": [[value()] * (n % 3) for n in range(20)]}
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "in.parquet")
    library.select(tmp_path / "in.parquet", tmp_path / "out", where="one.label < 5", shuffle=1)
    cache = str(tmp_path / "cache")
    ordered = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=cache).sort("n")
    source = datasets.load_dataset("parquet", data_files=str(tmp_path / "in.parquet"), split="train", cache_dir=cache)
    assert ordered.features == source.features
    expected = [row for row in source if row["one"]["label"] < 5]
    assert list(ordered) == expected
    # An open dataset holds bytes where a file source has numbers of values.
    whole, reader = library.dataset(tmp_path / "in.parquet"), datasets.Dataset.from_dict(rows, features)
    for name, combined in (("a", whole.concat(library.dataset(reader))), ("b", library.dataset(reader).concat(whole))):
        library.build(combined, tmp_path / name)
        (file,) = (tmp_path / name / "data").iterdir()
        assert pq.read_table(file).to_pylist() == reader.to_list() * 2
    shutil.rmtree(cache)
