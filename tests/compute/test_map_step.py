"""A map gives the same result as `Dataset.map` with the same arguments."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brim.compute.steps.map_options import MapStepOptions
from brim.compute.steps.map_step import MapStep
from brim.compute.steps.row_features import is_plain, merge_features, tagged
from brim.compute.steps.step import BadRow, RowBatch
from brim.errors import InputError, VerificationError
from brim.jobs.cache_entries import open_dataset
from tests.compute.map_cases import BATCH_CASES, ROW_CASES, Case, matrices, plain

datasets.disable_progress_bars()


def source_table(ds: Dataset) -> pa.Table:
    return ds.with_format("arrow")[:].replace_schema_metadata(ds.features.arrow_schema.metadata)


def mapped(ds: Dataset, function: Callable[..., Any] | None, small: bool = False, **options: Any) -> pa.Table:
    """Run batches through a pickled step and unify all tables, like the engine."""
    if ds.format["type"] is not None:
        options |= {"format_type": ds.format["type"], "format_kwargs": ds.format["format_kwargs"]}
    step = pickle.loads(pickle.dumps(MapStep(function, MapStepOptions(**options))))
    table = source_table(ds)
    step.open(table.schema)
    created: list[pa.Table] = []
    for start in range(0, len(table), step.batch_rows):
        first = start if step.indices else None
        created += step.apply(RowBatch(table.slice(start, step.batch_rows), start, first), small)
    step.close()
    if not created:
        return step.empty_schema(table.schema, had_rows=len(table) > 0).empty_table()
    whole = pa.concat_tables([item.replace_schema_metadata(None) for item in created], promote_options="permissive")
    return tagged(whole, merge_features([entry.schema for entry in created], whole.schema))


def check(case: Case, small: bool) -> None:
    ds = case.data()
    expected = ds.map(case.function, load_from_cache_file=False, **case.options)
    actual = mapped(ds, case.function, small, **case.options)
    assert Features.from_arrow_schema(actual.schema) == expected.features
    assert actual.column_names == expected.column_names
    stored = expected.with_format("arrow")[:]
    for name in actual.column_names:
        assert str(actual[name].to_pylist()) == str(stored[name].to_pylist()), name


@pytest.mark.parametrize("small", [False, True], ids=["", "small"])
@pytest.mark.parametrize("case", ROW_CASES, ids=lambda case: case.name)
def test_rows(case: Case, small: bool) -> None:
    """Row functions give the same features and rows, in chunks and row by row."""
    check(case, small)


@pytest.mark.parametrize("case", BATCH_CASES, ids=lambda case: case.name)
def test_batches(case: Case) -> None:
    """Batched functions give the same features and rows."""
    check(case, small=False)


LATE = [
    ("null, then text", lambda i: None if i < 10 else "x", "string"),
    ("int, then float", lambda i: i if i < 10 else i + 0.5, "double"),
    ("int, then whole floats", lambda i: i if i < 10 else float(i), "int64"),
    ("text, then int", lambda i: "x" if i < 10 else i, "string"),
    ("small int, then large", lambda i: i if i < 10 else 2**40 + i, "int64"),
    ("empty list, then text", lambda i: [] if i < 10 else ["x"], "list<element: string>"),
]


@pytest.mark.parametrize(("name", "value", "kind"), LATE, ids=[name for name, _, _ in LATE])
def test_types_that_appear_late(name: str, value: Callable[[int], Any], kind: str) -> None:
    """The first batch fixes the types; later values are converted if possible, and never lost."""
    ds = Dataset.from_dict({"n": list(range(20))})
    options = MapStepOptions(batched=True, batch_size=5)
    step = MapStep(lambda b: {"y": [value(n) for n in b["n"]]}, options)
    step.open(ds.data.schema)
    created = list(step.apply(RowBatch(ds.data.table.slice(0, 5), 0, None)))
    step.settle(created[0].schema)
    for start in range(5, 20, 5):
        created += step.apply(RowBatch(ds.data.table.slice(start, 5), start, None))
    whole = pa.concat_tables(created, promote_options="permissive")
    assert str(whole.schema.field("y").type).replace("item", "element") == kind
    read = {"string": str, "int64": int, "double": float}.get(kind, list)
    assert whole["y"].to_pylist() == [None if value(n) is None else read(value(n)) for n in range(20)]
    try:
        expected = ds.map(lambda b: {"y": [value(n) for n in b["n"]]}, batched=True, batch_size=5, writer_batch_size=5)
    except (TypeError, ValueError):
        return  # where `datasets` fails, brim chooses the wider type
    assert expected.data.table["y"].to_pylist() == whole["y"].to_pylist()
    assert str(expected.data.schema.field("y").type) == str(whole.schema.field("y").type)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(values, min_size=1, max_size=8), st.booleans())
def test_any_values(found: list[Any], small: bool) -> None:
    """Any nested values that a function returns have the same result as with `datasets`."""
    ds = Dataset.from_dict({"n": list(range(len(found)))})

    def function(row: Any) -> dict[str, Any]:
        return {"y": found[row["n"]]}

    try:
        expected = ds.map(function, new_fingerprint="x")
    except Exception:  # noqa: BLE001  its own limits; ours may be wider
        return
    if small and not is_plain(expected.features.to_dict()["y"]):
        return  # mixed types: the type of a row may only follow from other rows
    result = mapped(ds, function, small)
    assert Features.from_arrow_schema(result.schema) == expected.features
    assert str(result["y"].to_pylist()) == str(expected.with_format("arrow")[:]["y"].to_pylist())


def test_arrow_and_numpy_batches() -> None:
    """input="arrow" passes the table itself, input="numpy" arrays of the columns' own types."""
    ds = Dataset.from_dict(
        {"n": list(range(6)), "v": [[i, i + 1] for i in range(6)], "r": [[0.5] * i for i in range(6)]},
        features=Features({"n": Value("int16"), "v": List(Value("float32")), "r": List(Value("float64"))}),
    )

    def arrow(table: pa.Table) -> pa.Table:
        return table.append_column("m", pc.negate(table["n"]))

    assert mapped(ds, arrow, batched=True, input="arrow")["m"].to_pylist() == [0, -1, -2, -3, -4, -5]
    assert mapped(ds, lambda t: t.select(["n"]), input="arrow").column_names == ["n"]

    def arrays(batch: dict[str, Any]) -> dict[str, Any]:
        return {
            "kinds": [f"{batch['n'].dtype} {batch['v'].dtype} {batch['v'].shape}"] * 3,
            "sums": [float(r.sum()) for r in batch["r"]],
            "v": batch["v"] * 2,
        }

    actual = mapped(ds, arrays, batched=True, batch_size=3, input="numpy")
    assert actual["kinds"][0].as_py() == "int16 float32 (3, 2)"
    assert actual["sums"].to_pylist() == [0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert actual.schema.field("v").type == pa.list_(pa.float32())
    assert actual["n"].to_pylist() == list(range(6))
    assert mapped(ds, lambda r: {"k": int(r["n"]) + len(r["r"])}, input="numpy")["k"].to_pylist() == [0, 2, 4, 6, 8, 10]


def test_pieces_give_the_same_rows() -> None:
    """A splittable batch runs in parts when memory is short, and in smaller parts if that fails."""
    ds = plain()

    def function(batch: Any, index: list[int]) -> dict[str, Any]:
        if len(index) > 2:
            raise MemoryError
        return {"i": index, "rows": [len(index)] * len(index)}

    actual = mapped(ds, function, small=True, batched=True, batch_size=23, with_indices=True, splittable=True)
    assert actual["i"].to_pylist() == list(range(23))
    assert actual["text"].to_pylist() == ds["text"][:]
    assert actual["rows"].to_pylist()[:4] == [1, 2, 2, 1]
    with pytest.raises(MemoryError):
        mapped(ds, function, small=True, batched=True, with_indices=True)


def fails(error: BaseException) -> Callable[[Any], Any]:
    def function(row: Any) -> dict[str, Any]:
        if row["n"] in (17, [15, 16, 17, 18, 19]):
            raise error
        return {"y": 1 if isinstance(row["n"], int) else [1] * len(row["n"])}

    return function


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3)], ids=["ValueError", "SystemExit"])
def test_the_row_to_blame(error: BaseException) -> None:
    """The error names the row of a row function or the batch of a batched one, and contains the exception."""
    for small in (False, True):
        with pytest.raises(BadRow) as caught:
            mapped(plain(), fails(error), small)
        assert (caught.value.row, caught.value.rows) == (17, 1)
        assert type(caught.value.__cause__) is type(error)
    with pytest.raises(BadRow) as caught:
        mapped(plain(), fails(error), batched=True, batch_size=5)
    assert (caught.value.row, caught.value.rows) == (0, 5)


class OutOfMemoryError(RuntimeError):
    """Stand-in for torch's error of this name."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), MemoryError),
        (pa.ArrowMemoryError("x"), MemoryError),
        (OutOfMemoryError("CUDA"), MemoryError),
    ],
)
def test_memory_is_not_the_functions_fault(error: BaseException, kind: type[BaseException]) -> None:
    """Running out of memory does not count as a failing row."""
    with pytest.raises(kind):
        mapped(plain(), fails(error))
    with pytest.raises(kind):
        mapped(plain(), fails(error), batched=True, batch_size=5)


NUMBERS = {"features": Features({"n": Value("int8")}), "input_columns": "n"}
NUMBERS["remove_columns"] = ["x", "text", "tags", "box"]
BAD = [
    ("not a dict", lambda r: 5, {}, "returned a int", (0, 1)),
    ("not always", lambda r: {} if r["n"] < 12 else None, {}, "None for one row", (12, 1)),
    ("no list", lambda b: {"y": 5}, {"batched": True}, "must be a list or an array", (0, 23)),
    ("lengths", lambda b: {"y": [1]}, {"batched": True}, "'n' has 23 rows, 'y' has 1", (0, 23)),
    ("fit", lambda n: {"n": 300 if n == 14 else n}, NUMBERS, "The column 'n'", (14, 1)),
    ("no text", lambda r: {"y": "\ud800" if r["n"] == 9 else "a"}, {}, "The column 'y': 'utf-8' codec can't", (9, 1)),
    ("two rows", lambda r: pa.table({"y": [1, 2]}), {}, "tables of one row", (0, 1)),
    ("features", lambda r: {"y": 1}, {"features": Features({"n": Value("int8")})}, "does not have", (0, 1)),
]


@pytest.mark.parametrize(("name", "function", "options", "report", "where"), BAD, ids=[bad[0] for bad in BAD])
def test_bad_results(name: str, function: Any, options: dict[str, Any], report: str, where: tuple[int, int]) -> None:
    """An invalid return value is an error that names the row."""
    with pytest.raises(BadRow) as caught:
        mapped(plain(), function, **options)
    assert report in str(caught.value.__cause__)
    assert (caught.value.row, caught.value.rows) == where


def test_bad_options() -> None:
    """Invalid combinations of options are refused before anything runs."""
    with pytest.raises(InputError, match="on_mixed_types"):
        MapStepOptions(on_mixed_types="guess")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"input= takes .*, not 'torch'"):
        MapStepOptions(input="torch")  # type: ignore[arg-type]
    for option in ("remove_columns", "input_columns"):
        with pytest.raises(InputError, match="names 'zzz', which is not a column"):
            mapped(plain(), None, **{option: ["n", "zzz"]})


def test_rows_with_other_keys_lose_nothing() -> None:
    """A key that only some rows have becomes a column with nulls; `datasets` drops it or fails."""
    actual = mapped(plain(), lambda r: {"even": r["n"]} if r["n"] % 2 == 0 else {"odd": r["n"]})
    assert actual["even"].to_pylist()[:3] == [0, None, 2]
    assert actual["odd"].to_pylist()[:3] == [None, 1, None]


def test_dictionary_columns_are_plain_text() -> None:
    """Dictionary-encoded columns, which `datasets` does not support, are read as their values."""
    table = pa.table({"k": pa.array(["a", "b", "a"]).dictionary_encode()})
    step = MapStep(lambda r: {"y": r["k"] * 2})
    step.open(table.schema)
    (actual,) = step.apply(RowBatch(table, 0, None))
    assert actual.schema.types == [pa.string(), pa.string()]
    assert actual.to_pylist()[2] == {"k": "a", "y": "aa"}


STORED = """
import sys, pickle, pyarrow as pa
from brim.compute.steps.step import RowBatch
table = pa.ipc.open_stream(sys.argv[1]).read_all()
assert "datasets" not in sys.modules
step = pickle.load(sys.stdin.buffer)
step.open(table.schema)
(found,) = step.apply(RowBatch(table, 0, None))
from datasets import Features
print(found["s"].to_pylist(), Features.from_arrow_schema(found.schema)["m"])
"""


def test_special_types_come_back_from_files(tmp_path: Path) -> None:
    """Columns with types of `datasets` are recognized even if the worker read them before importing it."""
    table = source_table(matrices())
    with pa.OSFile(str(tmp_path / "a"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec("def total(row): return {'s': sum(map(sum, row['m']))}", scope)
    sent = pickle.dumps(MapStep(scope["total"]))
    command = [sys.executable, "-c", STORED, str(tmp_path / "a")]
    result = subprocess.run(command, input=sent, capture_output=True, check=False)
    report = "[0.0, 6.0, 12.0, 18.0, 24.0] Array2D(shape=(2, 3), dtype='float32')"
    assert result.stdout.decode().strip() == report, result.stderr


def test_facts_say_what_decides() -> None:
    """Facts change with every option that changes the rows, and with no other."""

    def facts(k: int, **options: Any) -> dict[str, Any]:
        return MapStep(lambda b: {"y": [k]}, MapStepOptions(**options)).facts

    assert (
        facts(1, batched=True) == facts(1, batched=True, splittable=True) == facts(1, batched=True, writer_batch_size=5)
    )
    assert facts(1) == facts(1, batch_size=7)
    different = [facts(1), facts(2), facts(1, batched=True), facts(1, fn_kwargs={"a": 1}), facts(1, remove_columns="n")]
    different += [
        facts(1, features=Features({"y": Value("int8")})),
        facts(1, with_indices=True),
        facts(1, input="arrow"),
    ]
    assert len({json.dumps(item) for item in different}) == len(different)


LIGHT = """
import sys, pickle, numpy as np, pyarrow as pa
from brim.compute.steps.step import RowBatch
step = pickle.load(sys.stdin.buffer)
table = pa.table({"n": [1, 2, 3], "text": ["a", "b", None], "tags": [["x"], [], None]})
step.open(table.schema)
print([t.to_pylist() for t in step.apply(RowBatch(table, 0, None))][0][0], "datasets" in sys.modules)
"""
LIGHT_FUNCTION = """
import numpy as np
def light(row):
    row["tags"] = [*(row["tags"] or []), "new"]
    return {"y": {"a": [row["n"]]}, "n": row["n"] + 0.5, "v": np.ones((1, 2)), "text": None, "input_ids": [1]}
"""


def test_plain_rows_do_without_datasets() -> None:
    """A worker with plain columns and results does not import `datasets`, which takes 30 MB and a second."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(LIGHT_FUNCTION, scope)
    sent = pickle.dumps(MapStep(scope["light"]))
    result = subprocess.run([sys.executable, "-c", LIGHT], input=sent, capture_output=True, check=True)
    row = {"n": 1.5, "text": None, "tags": ["x", "new"], "y": {"a": [1]}, "v": [[1.0, 1.0]], "input_ids": [1]}
    assert result.stdout.decode().strip() == f"{row} False"


MAPPED = """
import sys, json
from pathlib import Path
import datasets, pyarrow as pa
from brim.jobs.cache_entries import open_dataset
def anonymous():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) // 1000
files = sorted(Path(sys.argv[1]).glob("*.arrow"))
schema = pa.ipc.open_stream(files[0]).schema
open_dataset(files[:1], schema)
before = anonymous()
ds = open_dataset(files, schema, "f")
total = sum(len(b["x"][0].as_buffer()) for b in ds.with_format("arrow").iter(1))
print(len(ds), total, anonymous() - before < 8)
"""


def test_results_are_mapped_from_disk(tmp_path: Path) -> None:
    """Many files, some empty, open as one dataset without loading their 80 MB."""
    schema = Features({"x": Value("binary"), "k": ClassLabel(names=["a", "b"])}).arrow_schema
    first = pa.table([pa.array([b"x" * 500_000] * 2), pa.array([0, 1])], schema=schema)
    for number in range(100):
        with pa.OSFile(str(tmp_path / f"{number:03}.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            if number % 5:
                writer.write_table(first)
    result = subprocess.run([sys.executable, "-c", MAPPED, str(tmp_path)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"160 {160 * 500_000} True"


def test_a_dataset_keeps_its_info(tmp_path: Path) -> None:
    """Features, description, split and a separate deterministic name are kept."""
    schema = Features({"k": ClassLabel(names=["a", "b"])}).arrow_schema
    path = tmp_path / "0.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(pa.table([pa.array([0, 1])], schema=schema))
    info = datasets.DatasetInfo(description="about")
    ds = open_dataset([path, path], schema, "f", info=info, split=datasets.Split.TEST)
    assert ds.features["k"].names == ["a", "b"]
    assert (ds.info.description, ds.split, len(ds)) == ("about", "test", 4)
    assert [Path(item["filename"]) for item in ds.cache_files] == [path, path]
    assert (
        ds._fingerprint == open_dataset([path], schema, "f")._fingerprint != open_dataset([path], schema)._fingerprint
    )
    assert pickle.loads(pickle.dumps(ds))[3]["k"] == 1
    assert open_dataset([], schema).features == ds.features
    assert ds.map(lambda r: {"k2": r["k"]})[1] == {"k": 1, "k2": 1}
    path.write_bytes(b"no")
    with pytest.raises(VerificationError, match="cannot be read"):
        open_dataset([path], schema)
