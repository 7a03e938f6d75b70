"""brim.Loader: sources, batches, states, changes of ranks, errors, memory and the bytes that are read."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim
from tests.conftest import brim as run_brim
from tests.generators.tokenizers import made_tokenizers


def write_rows(folder: Path, counts: list[int], group: int = 10, **extra: Any) -> Path:
    """Write files of rows with these numbers; `id` counts over all files."""
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for number, count in enumerate(counts):
        ids = np.arange(start, start + count)
        tokens = pa.array([[int(row), int(row) + 1, 7] for row in ids], pa.list_(pa.int32()))
        table = pa.table({"id": ids, "tokens": tokens, "text": [f"row {row}" for row in ids]})
        pq.write_table(table, folder / f"part-{number:03d}.parquet", row_group_size=group, **extra)
        start += count
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows", [37, 0, 55, 108])


def ids_of(batches: Any) -> list[int]:
    return [int(row) for batch in batches for row in batch["id"]]


def test_batches_have_arrays_of_numbers_lists_and_texts(rows: Path) -> None:
    batches = list(brim.Loader(rows, batch_size=8, last="keep"))
    assert ids_of(batches) == list(range(200))
    assert batches[0]["tokens"].shape == (8, 3)
    assert batches[0]["tokens"].dtype == np.int32
    assert list(batches[0]["text"][:2]) == ["row 0", "row 1"]
    assert [batch.steps for batch in batches] == list(range(1, 26))


def test_columns_arrow_and_transform(rows: Path) -> None:
    tables = list(brim.Loader(rows, batch_size=50, columns=["text", "id"], format="arrow"))
    assert [table.column_names for table in tables] == [["text", "id"]] * 4
    doubled = brim.Loader(rows, batch_size=50, columns=["id"], transform=lambda batch: {"twice": batch["id"] * 2})
    assert [int(value) for batch in doubled for value in batch["twice"]] == list(range(0, 400, 2))


def test_epochs_have_the_same_rows_in_another_order(rows: Path) -> None:
    loader = brim.Loader(rows, batch_size=10, shuffle=True, shuffle_window=20)
    first, second = ids_of(loader), ids_of(loader)
    assert loader.epoch == 2
    assert sorted(first) == sorted(second) == list(range(200))
    assert len({tuple(first), tuple(second), tuple(range(200))}) == 3
    loader.set_epoch(0)
    assert ids_of(loader) == first


@pytest.mark.parametrize("last", ["drop", "pad", "keep"])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_share_an_epoch(rows: Path, ranks: int, last: Any) -> None:
    loaders = [
        brim.Loader(rows, batch_size=7, shuffle=True, shuffle_window=30, rank=rank, world_size=ranks, last=last)
        for rank in range(ranks)
    ]
    expected = [len(loader) for loader in loaders]
    actual = [list(loader) for loader in loaders]
    assert [len(batches) for batches in actual] == expected
    assert last == "keep" or len(set(expected)) == 1
    ids = [row for batches in actual for row in ids_of(batches)]
    if last == "drop":
        assert len(ids) == len(set(ids)) == 200 // (ranks * 7) * ranks * 7 or len(set(ids)) == len(ids)
    else:
        assert set(ids) == set(range(200))
        assert last == "pad" or len(ids) == 200
    if last != "keep":
        assert {len(batch["id"]) for batches in actual for batch in batches} == {7}


def test_pad_with_fewer_rows_than_ranks(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "few", [2])
    actual = [list(brim.Loader(source, batch_size=4, rank=rank, world_size=5, last="pad")) for rank in range(5)]
    assert [len(batches) for batches in actual] == [1] * 5
    assert {len(batch["id"]) for batches in actual for batch in batches} == {4}
    assert {row for batches in actual for row in ids_of(batches)} == {0, 1}


@pytest.mark.parametrize("seed", range(20))
def test_state_continues_exactly_on_other_ranks(tmp_path: Path, seed: int) -> None:
    """2 ranks, then 4, then 3: each run stops after some batches, and the last one reads the remaining rows."""
    rng = random.Random(seed)
    source = write_rows(tmp_path / "data", [rng.randint(0, 90) for _ in range(6)], group=rng.randint(1, 40))
    options: dict[str, Any] = {"shuffle": True, "seed": seed, "shuffle_window": rng.randint(1, 60), "last": "keep"}
    state, consumed = None, list[int]()
    for ranks in (2, 4, 3):
        size = rng.randint(1, 9)
        loaders = [
            brim.Loader(source, batch_size=size, rank=rank, world_size=ranks, **options) for rank in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        least = min(len(loader) for loader in loaders)
        steps = max(rng.randint(0, least) - 1, 0) if ranks != 3 else None
        states = []
        for loader in loaders:
            consumed += ids_of(itertools.islice(loader, steps))
            states.append(loader.state_dict())
        if steps is not None:
            assert all(each == states[0] for each in states)
            state = states[0]
            assert state["samples_seen"] == len(consumed)
            assert len(json.dumps(state)) < 1000
    assert sorted(consumed) == list(range(loaders[0].rows))


def test_resumed_run_equals_one_without_interruption(rows: Path) -> None:
    def loader() -> brim.Loader:
        return brim.Loader(rows, batch_size=4, shuffle=True, shuffle_window=16)

    whole, stopped, resumed = loader(), loader(), loader()
    expected = ids_of(whole) + ids_of(whole)
    actual = ids_of(itertools.islice(stopped, 13))
    resumed.load_state_dict(stopped.state_dict())
    actual += ids_of(resumed) + ids_of(resumed)
    assert actual == expected


def test_steps_run_over_the_end_of_an_epoch(rows: Path) -> None:
    loader = brim.Loader(rows, batch_size=10, shuffle=True)
    assert loader.state_dict(steps=20)["epoch"] == 1
    state = loader.state_dict(steps=47)
    assert (state["epoch"], state["samples_seen"]) == (2, 70)
    second = brim.Loader(rows, batch_size=10, shuffle=True)
    second.load_state_dict(state)
    assert len(second) == 13


def test_changed_dataset_is_refused(rows: Path) -> None:
    loader = brim.Loader(rows, batch_size=10)
    state = loader.state_dict(steps=3)
    table = pq.read_table(rows / "part-000.parquet")
    changed = table.set_column(0, "id", pa.array(np.arange(37) + 1))
    pq.write_table(changed, rows / "part-000.parquet", row_group_size=10)
    with pytest.raises(brim.PlanMismatchError, match="not the one that the state was saved with"):
        brim.Loader(rows, batch_size=10).load_state_dict(state)
    with pytest.raises(brim.InputError, match="not the state of a"):
        loader.load_state_dict({"epoch": 1})
    with pytest.raises(brim.PlanMismatchError, match="lanes=64"):
        brim.Loader(rows, batch_size=10, lanes=8).load_state_dict(state)


def test_appended_rows_join_at_the_next_epoch_if_allowed(rows: Path) -> None:
    loader = brim.Loader(rows, batch_size=10, shuffle=True, shuffle_window=20, last="keep")
    actual = ids_of(itertools.islice(loader, 5))
    state = loader.state_dict()
    table = pa.table({"id": np.arange(200, 230), "tokens": [[1, 2, 3]] * 30, "text": ["new"] * 30})
    table = table.set_column(1, "tokens", table.column("tokens").cast(pa.list_(pa.int32())))
    pq.write_table(table, rows / "part-100.parquet")
    grown = brim.Loader(rows, batch_size=10, shuffle=True, shuffle_window=20, last="keep")
    with pytest.raises(brim.PlanMismatchError, match="allow_appended=True"):
        grown.load_state_dict(state)
    grown.load_state_dict(state, allow_appended=True)
    assert sorted(actual + ids_of(grown)) == list(range(200))
    assert sorted(ids_of(grown)) == list(range(230))


def test_sources_globs_splits_selections_and_concatenated_selections(tmp_path: Path, rows: Path) -> None:
    assert ids_of(brim.Loader(str(rows / "part-00[02].parquet"), batch_size=1)) == [*range(37), *range(37, 92)]
    assert len(brim.Loader(rows / "part-002.parquet", batch_size=1)) == 55
    selection = brim.dataset(rows).where('id > 30 and text != "row 77"')
    expected = [row for row in range(200) if row > 30 and row != 77]
    assert ids_of(brim.Loader(selection, batch_size=1)) == expected
    assert sorted(ids_of(brim.Loader(selection, batch_size=3, shuffle=True, last="keep"))) == expected
    mixed = brim.dataset(rows).shuffle(1)
    with pytest.raises(brim.InputError, match="order of its own"):
        brim.Loader(mixed, batch_size=1)
    assert sorted(ids_of(brim.Loader(mixed, batch_size=1, shuffle=True))) == list(range(200))
    both = (
        brim.dataset(rows)
        .where("id < 5")
        .concat(brim.dataset(rows).where("id > 195").columns(["id", "tokens", "text"]))
    )
    assert ids_of(brim.Loader(both, batch_size=1)) == [*range(5), *range(196, 200)]
    parts = brim.dataset(rows).split(train=0.8, test=0.2)
    with pytest.raises(brim.InputError, match="from_split"):
        brim.Loader(parts, batch_size=1)
    halves = [ids_of(brim.Loader(parts, batch_size=1, from_split=name)) for name in ("train", "test")]
    assert len(halves[0]) > len(halves[1]) > 0
    assert sorted(halves[0] + halves[1]) == list(range(200))


def test_columns_of_folders_and_wider_types(tmp_path: Path) -> None:
    for year, kind in ((2024, pa.int32()), (2025, pa.int64())):
        folder = tmp_path / "hive" / f"year={year}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": pa.array([year * 2, year * 2 + 1], kind)}), folder / "a.parquet")
    batches = list(brim.Loader(tmp_path / "hive", batch_size=2))
    assert [batch["year"].tolist() for batch in batches] == [[2024] * 2, [2025] * 2]
    assert batches[0]["id"].dtype == np.int64
    only = list(brim.Loader(tmp_path / "hive", batch_size=3, columns=["year"], last="keep"))
    assert [len(batch["year"]) for batch in only] == [3, 1]


def test_packed_tokens_and_built_files(tmp_path: Path, many_files: Any) -> None:
    texts = [json.dumps({"text": f"row {n} of a small corpus with a few words"}) for n in range(100)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts) + "\n")
    tokenizer = next(iter(made_tokenizers(tmp_path).values()))
    options = ["--tokenizer", tokenizer, "--pack", "16", "--eos", "</s>", "--memory", "600MB", "-q"]
    run_brim("tokenize", tmp_path / "texts.jsonl", tmp_path / "tokens", *options)
    batches = list(brim.Loader(tmp_path / "tokens", columns=["input_ids"], batch_size=4, shuffle=True))
    assert batches
    assert all(batch["input_ids"].shape == (4, 16) for batch in batches)
    run_brim("build", many_files(12, 3000), tmp_path / "built", "-q")
    (batch,) = brim.Loader(tmp_path / "built", batch_size=12, shuffle=True)
    column = next(name for name, values in batch.items() if isinstance(values[0], dict))
    assert {len(value["bytes"]) for value in batch[column]} == {3000 + 37 * n for n in range(12)}


def test_large_row_groups_are_read_a_few_pages_at_a_time(tmp_path: Path) -> None:
    values = [random.Random(n).randbytes(100_000) for n in range(300)]
    table = pa.table({"id": np.arange(300), "image": values})
    pq.write_table(table, tmp_path / "one.parquet", row_group_size=300)
    loader = brim.Loader(tmp_path / "one.parquet", batch_size=7, shuffle=True, shuffle_window=40, last="keep")
    actual = {int(row): value for batch in loader for row, value in zip(batch["id"], batch["image"], strict=True)}
    assert [actual[number] for number in range(300)] == values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size="),
        ({"batch_size": 2, "last": "all"}, "last="),
        ({"batch_size": 2, "columns": ["nothing"]}, "no column 'nothing'"),
        ({"batch_size": 2, "rank": 1}, "together"),
        ({"batch_size": 2, "rank": 3, "world_size": 2}, "below world_size"),
        ({"batch_size": 2, "shuffle": True, "shuffle_window": 200, "memory": "1MB"}, "does not fit"),
    ],
)
def test_invalid_arguments_are_named(rows: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(brim.BrimError, match=message):
        brim.Loader(rows, **arguments)


def test_memory_error_says_what_each_reader_takes(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brim.loader.loader.process_bytes", lambda pid: 300_000_000)
    with pytest.raises(
        brim.MemoryLimitError, match=r"^Each of 32 readers takes .* \(300 MB for its process\)"
    ) as caught:
        brim.Loader(rows, batch_size=2, rank=0, world_size=32, memory="5GB")
    assert caught.value.facts["limit_bytes"] == 5_000_000_000
    assert caught.value.facts["need_bytes"] > 32 * 300_000_000
    with pytest.raises(brim.MemoryLimitError, match=r"shuffle window of 200 rows.* or shuffle_window=\d+ or smaller"):
        brim.Loader(rows, batch_size=2, shuffle=True, shuffle_window=200, memory=308_400_000)
    brim.Loader(rows, batch_size=2, rank=0, world_size=32, memory="10GB")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_environment_without_a_number_is_named(rows: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "first")
    with pytest.raises(brim.InputError, match=f"{name} must be a whole number, not 'first'"):
        brim.Loader(rows, batch_size=2)


def test_other_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(brim.InputError, match="no Parquet"):
        brim.Loader(tmp_path, batch_size=1)
    with pytest.raises(brim.InputError, match="reads Parquet files"):
        brim.Loader(pa.table({"a": [1]}), batch_size=1)


def test_vanished_and_changed_files_are_named(rows: Path) -> None:
    loader = brim.Loader(rows, batch_size=10)
    (rows / "part-002.parquet").unlink()
    with pytest.raises(brim.SourceChangedError, match=r"part-002\.parquet"):
        list(loader)
    loader = brim.Loader(rows, batch_size=10)
    os.utime(rows / "part-003.parquet", (1, 1))
    with pytest.raises(brim.SourceChangedError, match=r"part-003\.parquet"):
        list(loader)


def test_loader_can_be_pickled(rows: Path) -> None:
    loader = brim.Loader(rows, batch_size=10, shuffle=True)
    assert ids_of(pickle.loads(pickle.dumps(loader))) == ids_of(loader)


ENDLESS = """
import sys, time, brim
loader = brim.Loader(sys.argv[1], batch_size=1)
while True:
    for batch in loader:
        print("batch", flush=True)
        time.sleep(0.05)
"""


def test_ctrl_c_ends_a_loop_at_once(rows: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(rows)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "batch\n"
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = process.communicate(timeout=30)
        assert time.monotonic() - began < 5
    assert "KeyboardInterrupt" in errors
    assert process.returncode in (-signal.SIGINT, 1, 130)


WITHOUT_PANDAS = """
import importlib.util, sys, brim
loader = brim.Loader(sys.argv[1], batch_size=10, shuffle=True)
print(sum(len(batch["id"]) for batch in loader), "pandas" in sys.modules)
assert importlib.util.find_spec("pandas") is not None and "pandas" not in sys.modules
import pandas, pyarrow
print(pyarrow.array(pandas.Series([1.0, float("nan")])).null_count, len(pyarrow.table({"a": [1]}).to_pandas()))
"""


def test_reading_does_without_pandas_until_the_user_imports_it(rows: Path) -> None:
    """pyarrow would import pandas for the first batch; it still takes the pandas that the user imports later."""
    pytest.importorskip("pandas", reason="needs pandas")
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PANDAS, str(rows)], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "200 False\n1 1\n", result.stderr
