"""Shards of brim are read byte for byte by every Parquet reader."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datafusion
import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.formats import parquet_writer
from brim.formats.parquet_reader import locate_parquet
from brim.formats.parquet_writer import splice_parquet
from brim.formats.range_readers import LocalFile
from tests.conftest import file_set, random_bytes

CONTENTS = {f"d/f{i}.bin": random_bytes(size, i) for i, size in enumerate((0, 1, 5_000, 1_200_000, 300, 70_000))}
CONTENTS["ünï côdé 'quoted'.bin"] = b"odd"
PATHS = list(CONTENTS)


def leaf_type(required: bool) -> pa.StructType:
    return pa.struct([pa.field("bytes", pa.binary(), nullable=not required), pa.field("path", pa.string())])


def cell(path: str | None, content: bool = True) -> dict[str, Any] | None:
    return None if path is None else {"bytes": b"" if content else None, "path": path}


def files_in(value: Any) -> Iterator[str]:
    """Return the paths of the existing files of a cell, in order."""
    if isinstance(value, list):
        for element in value:
            yield from files_in(element)
    elif value is not None and value["bytes"] is not None:
        yield value["path"]


def filled(value: Any) -> Any:
    """Return a cell with the content that readers must return."""
    if isinstance(value, list):
        return [filled(element) for element in value]
    if value is None:
        return None
    return {"bytes": None if value["bytes"] is None else CONTENTS[value["path"]], "path": value["path"]}


def write(root: Path, table: pa.Table, columns: list[str]) -> Path:
    files = file_set(root / "files", CONTENTS)
    numbers = {
        name: np.array([PATHS.index(p) for value in table.column(name).to_pylist() for p in files_in(value)], np.int64)
        for name in columns
    }
    splice = splice_parquet(table, files, numbers)
    path = root / "shard.parquet"
    with open(path, "wb") as file:
        for chunk in splice.chunks():
            file.write(chunk)
    assert path.stat().st_size == splice.size
    return path


def expected(table: pa.Table, columns: list[str]) -> list[dict[str, Any]]:
    return [
        {name: filled(value) if name in columns else value for name, value in row.items()} for row in table.to_pylist()
    ]


def mixed_table() -> pa.Table:
    """Return a table with every kind of missing value in a scalar and a list column, between small columns."""
    scalars = [cell(p) for p in PATHS] + [None, cell("gone", content=False), cell(PATHS[0])]
    lists = [
        [cell(PATHS[0]), cell(PATHS[1])],
        [],
        None,
        [None],
        [None, cell("gone", content=False), cell(PATHS[2])],
        [cell(PATHS[3])] * 3,
        [cell(PATHS[6])],
        [cell(PATHS[4]), None, cell(PATHS[4])],
        [],
        [cell(PATHS[5])],
    ]
    return pa.table(
        {
            "id": pa.array(range(10)),
            "image.raw": pa.array(scalars, leaf_type(False)),
            "name": pa.array([f"row {i}" if i % 3 else None for i in range(10)]),
            "scans": pa.array(lists, pa.list_(leaf_type(False))),
        }
    )


def read_pyarrow(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path, page_checksum_verification=True).to_pylist()


def read_batches(path: Path) -> list[dict[str, Any]]:
    return [row for batch in pq.ParquetFile(path).iter_batches(batch_size=2) for row in batch.to_pylist()]


def read_dataset(path: Path) -> list[dict[str, Any]]:
    return pyarrow.dataset.dataset(path).to_table().to_pylist()


def read_duckdb(path: Path) -> list[dict[str, Any]]:
    return duckdb.sql(f"select * from read_parquet('{path}')").to_arrow_table().to_pylist()


def read_polars(path: Path) -> list[dict[str, Any]]:
    return polars.read_parquet(path).to_dicts()


def read_polars_lazily(path: Path) -> list[dict[str, Any]]:
    return polars.scan_parquet(path).collect().to_dicts()


def read_datafusion(path: Path) -> list[dict[str, Any]]:
    context = datafusion.SessionContext()
    return context.read_parquet(str(path)).to_arrow_table().to_pylist()


READERS = [read_pyarrow, read_batches, read_dataset, read_duckdb, read_polars, read_polars_lazily, read_datafusion]


@pytest.mark.parametrize("read", READERS)
def test_every_reader_gets_every_byte(tmp_path: Path, read: Any) -> None:
    """Every reader distinguishes a null row, an empty list, a null element, null bytes and an empty file."""
    table = mixed_table()
    path = write(tmp_path, table, ["image.raw", "scans"])
    assert read(path) == expected(table, ["image.raw", "scans"])


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("outer", ["required", "optional"])
@pytest.mark.parametrize("inner", ["required", "optional"])
def test_required_and_optional_nesting(tmp_path: Path, read: Any, outer: str, inner: str) -> None:
    """Definition levels follow the schema: required structs, elements and bytes need fewer levels."""
    leaf = leaf_type(inner == "required")
    element = pa.field("element", leaf, nullable=inner == "optional")
    schema = pa.schema(
        [
            pa.field("one", leaf, nullable=outer == "optional"),
            pa.field("many", pa.list_(element), nullable=outer == "optional"),
        ]
    )
    ones = [cell(PATHS[i % len(PATHS)]) for i in range(10)]
    manys: list[Any] = [[cell(PATHS[j]) for j in range(i % 4)] for i in range(10)]
    if outer == "optional":
        ones[3], manys[4] = None, None
    if inner == "optional":
        manys[7][0] = None
    table = pa.table({"one": ones, "many": manys}, schema=schema)
    path = write(tmp_path, table, ["one", "many"])
    assert read(path) == expected(table, ["one", "many"])
    assert pq.read_schema(path).equals(schema)


def test_lists_of_lists(tmp_path: Path) -> None:
    """Files in lists of lists are read."""
    rows = [[[cell(PATHS[1])], [], None], None, [], [[None, cell(PATHS[4])], [cell(PATHS[2])]]]
    table = pa.table({"deep": pa.array(rows, pa.list_(pa.list_(leaf_type(False))))})
    path = write(tmp_path, table, ["deep"])
    for read in READERS:
        assert read(path) == expected(table, ["deep"])


def test_no_rows(tmp_path: Path) -> None:
    """A shard without rows is read with its schema."""
    table = mixed_table().slice(0, 0)
    path = write(tmp_path, table, ["image.raw", "scans"])
    assert pq.read_schema(path).equals(table.schema)
    for read in READERS:
        assert read(path) == []


def test_only_nulls(tmp_path: Path) -> None:
    """A file column with only nulls is read."""
    table = pa.table(
        {"x": pa.array([None] * 5, leaf_type(False)), "y": pa.array([[], None] * 2 + [[]], pa.list_(leaf_type(False)))}
    )
    path = write(tmp_path, table, ["x", "y"])
    for read in READERS:
        assert read(path) == expected(table, ["x", "y"])


@pytest.mark.long
def test_thousands_of_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of row groups with one row each are read."""
    monkeypatch.setattr(parquet_writer, "ROW_GROUP_BYTES", 1)
    rows = 3000
    table = pa.table(
        {
            "id": pa.array(range(rows)),
            "x": pa.array([cell(PATHS[1 + i % 2 * 3]) for i in range(rows)], leaf_type(False)),
        }
    )
    path = write(tmp_path, table, ["x"])
    assert pq.read_metadata(path).num_row_groups == rows
    for read in READERS:
        assert read(path) == expected(table, ["x"])


def test_pages_are_full_and_end_with_rows(tmp_path: Path) -> None:
    """Small files share pages of up to a megabyte, and a larger row gets a separate page."""
    cells = [cell(PATHS[2])] * 500 + [cell(PATHS[3])] + [cell(PATHS[2])] * 3
    path = write(tmp_path, pa.table({"x": pa.array(cells, leaf_type(False))}), ["x"])
    sizes = [parquet_writer.cell_bytes(np.array([len(CONTENTS[PATHS[2]])]))[0]]
    per_page = (1 << 20) // int(sizes[0])
    actual = list(locate_parquet(LocalFile(path)))
    gaps = [b.offset - a.offset - a.size for a, b in itertools.pairwise(actual)]
    headers = sum(gap > 4 for gap in gaps)
    assert headers == -(-500 // per_page) - 1 + 2


def test_a_point_look_up_uses_the_page_index(tmp_path: Path) -> None:
    """DataFusion, which relies on offset indexes, finds one row among many pages of every column."""
    rows = 4000
    table = pa.table(
        {
            "id": pa.array(range(rows)),
            "text": pa.array([f"{'x' * (i % 50)}{i}" for i in range(rows)]),
            "x": pa.array([cell(PATHS[1 + i % 6]) for i in range(rows)], leaf_type(False)),
            "y": pa.array([[cell(PATHS[4])] * (i % 3) for i in range(rows)], pa.list_(leaf_type(False))),
        }
    )
    path = write(tmp_path, table, ["x", "y"])
    config = datafusion.SessionConfig().set("datafusion.execution.parquet.pushdown_filters", "true")
    context = datafusion.SessionContext(config)
    context.register_parquet("t", str(path))
    for required in (0, 1, 777, 2500, rows - 1):
        got = context.sql(f"select * from t where id = {required}").to_arrow_table().to_pylist()
        assert got == expected(table.slice(required, 1), ["x", "y"])
    metadata = pq.read_metadata(path)
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            assert chunk.has_offset_index
            assert chunk.has_column_index == (not chunk.path_in_schema.endswith("bytes"))


def test_the_shard_can_be_read_without_the_plan(tmp_path: Path) -> None:
    """`locate_parquet` finds every file by its bytes from the shard alone, without the plan."""
    table = mixed_table()
    path = write(tmp_path, table, ["image.raw", "scans"])
    data = path.read_bytes()
    for column in ("image.raw", "scans"):
        actual = [f for f in locate_parquet(LocalFile(path)) if f.column == column]
        required = [(row, p) for row, value in enumerate(table.column(column).to_pylist()) for p in files_in(value)]
        assert [(f.row, f.path) for f in actual] == required
        assert all(data[f.offset : f.offset + f.size] == CONTENTS[f.path or ""] for f in actual)


_values = st.one_of(st.none(), st.integers(-1, len(PATHS) - 1))


@st.composite
def _tables(draw: st.DrawFn) -> tuple[pa.Table, list[str]]:
    rows = draw(st.integers(0, 12))

    def to_cell(number: int | None) -> dict[str, Any] | None:
        return None if number is None else cell("gone", content=False) if number < 0 else cell(PATHS[number])

    arrays: dict[str, pa.Array] = {}
    files = []
    for i in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["int", "text", "one", "many"]))
        name = f"{kind}.{i}"
        if kind == "int":
            arrays[name] = pa.array(
                draw(st.lists(st.one_of(st.none(), st.integers(0, 9)), min_size=rows, max_size=rows)), pa.int64()
            )
        elif kind == "text":
            arrays[name] = pa.array(
                draw(st.lists(st.one_of(st.none(), st.text(max_size=5)), min_size=rows, max_size=rows)), pa.string()
            )
        elif kind == "one":
            cells = draw(st.lists(_values, min_size=rows, max_size=rows))
            arrays[name] = pa.array([to_cell(c) for c in cells], leaf_type(False))
            files.append(name)
        else:
            lists = draw(st.lists(st.one_of(st.none(), st.lists(_values, max_size=4)), min_size=rows, max_size=rows))
            created = [None if cells is None else [to_cell(c) for c in cells] for cells in lists]
            arrays[name] = pa.array(created, pa.list_(leaf_type(False)))
            files.append(name)
    return pa.table(arrays), files


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(
    _tables(), st.sampled_from([1, 6_000, 100_000, parquet_writer.ROW_GROUP_BYTES]), st.sampled_from([1, 400, 1 << 20])
)
def test_random_tables_read_back(
    tmp_path: Path, case: tuple[pa.Table, list[str]], group_bytes: int, page_bytes: int
) -> None:
    """Random tables with random sizes of row groups and pages are read by all readers."""
    table, columns = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_writer, "ROW_GROUP_BYTES", group_bytes)
        patch.setattr(parquet_writer, "PAGE_BYTES", page_bytes)
        path = write(tmp_path, table, columns)
    assert read_pyarrow(path) == expected(table, columns)
    assert read_batches(path) == expected(table, columns)
    reader = random.Random(table.num_rows).choice([read_duckdb, read_polars, read_datafusion])
    assert reader(path) == expected(table, columns)


@pytest.mark.slow
def test_a_cell_just_under_two_gib_is_read(tmp_path: Path) -> None:
    """pyarrow reads a cell of the maximum size that plans allow (just under 2 GiB, here as a sparse file)."""
    import psutil

    if psutil.virtual_memory().available < 7 * 10**9:
        pytest.skip("reading a 2 GiB cell takes 7 GB of free memory, which this machine does not have")
    big = tmp_path / "files" / "big.bin"
    big.parent.mkdir()
    with open(big, "wb") as file:
        file.truncate(parquet_writer.MAX_CELL_BYTES)
        file.seek(parquet_writer.MAX_CELL_BYTES - 3)
        file.write(b"end")
    import os

    from brim.file_set import FileSetBuilder

    builder = FileSetBuilder(str(tmp_path / "files"))
    builder.add("big.bin", os.stat(big))
    table = pa.table({"x": pa.array([cell("big.bin")], leaf_type(False))})
    splice = splice_parquet(table, builder.finish(), {"x": np.array([0])})
    path = tmp_path / "big.parquet"
    with open(path, "wb") as out:
        splice.copy_to(out.fileno())
    column = pq.read_table(path).column("x").chunk(0).field("bytes")
    value = column[0].as_buffer()
    assert value.size == parquet_writer.MAX_CELL_BYTES
    assert value[value.size - 3 :].to_pybytes() == b"end"
