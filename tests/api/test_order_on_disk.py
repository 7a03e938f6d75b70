"""brim.sort, shuffle, train_test_split and flatten_indices on datasets on disk, with all arguments of the originals."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import brim
from brim.errors import ArgumentError

ROWS = 30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BRIM_MEMORY", "1GB")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    return tmp_path / "cache"


def in_memory() -> datasets.Dataset:
    numbers = np.random.default_rng(1).permutation(ROWS)
    return datasets.Dataset.from_dict({"x": numbers, "y": [f"row {n}" for n in numbers], "z": numbers % 2}).cast_column(
        "z", datasets.ClassLabel(names=["even", "odd"])
    )


def loaded(folder: Path) -> datasets.Dataset:
    in_memory().to_parquet(str(folder / "in.parquet"))
    return datasets.load_dataset(
        "parquet", data_files=str(folder / "in.parquet"), split="train", cache_dir=str(folder / "hf")
    )


def saved(folder: Path) -> datasets.Dataset:
    in_memory().save_to_disk(str(folder / "saved"))
    return datasets.load_from_disk(str(folder / "saved"))


def mapped(folder: Path) -> datasets.Dataset:
    return brim.map(in_memory(), lambda row: row, progress=False)


ON_DISK: dict[str, Callable[[Path], datasets.Dataset]] = {
    "load_dataset": loaded,
    "load_from_disk": saved,
    "brim.map": mapped,
    "reordered": lambda folder: loaded(folder).shuffle(seed=4),
    "in memory": lambda folder: in_memory(),
}


@pytest.mark.parametrize("kind", ON_DISK)
def test_sort_and_split_of_a_dataset_give_the_rows_of_the_originals(kind: str, tmp_path: Path) -> None:
    rows = ON_DISK[kind](tmp_path)
    for order in ({"column_names": "x"}, {"column_names": ["z", "x"], "reverse": [True, False]}):
        ordered: Any = brim.sort(rows, **order, progress=False)
        assert ordered.to_list() == rows.sort(**order).to_list()
        assert ordered._indices is None
    for method in ({"test_size": 7, "seed": 0}, {"shuffle": False}, {"stratify_by_column": "z", "seed": 2}):
        mine, theirs = brim.train_test_split(rows, **method, progress=False), rows.train_test_split(**method)
        assert {name: part.to_list() for name, part in mine.items()} == {
            name: part.to_list() for name, part in theirs.items()
        }


def test_sort_of_a_datasetdict_on_disk(tmp_path: Path) -> None:
    several = datasets.DatasetDict(a=loaded(tmp_path), b=saved(tmp_path))
    ordered = brim.sort(several, "x", progress=False)
    assert {name: ordered[name]["x"][:] for name in ordered} == {"a": list(range(ROWS)), "b": list(range(ROWS))}


def test_shuffle_of_a_datasetdict_takes_seeds_and_generators(tmp_path: Path) -> None:
    several = datasets.DatasetDict(a=loaded(tmp_path), b=saved(tmp_path))

    def generators() -> dict[str, Any]:
        return {"a": np.random.default_rng(1), "b": np.random.default_rng(2)}

    for mine, theirs in (
        ({"seeds": 3}, {"seeds": 3}),
        ({"seeds": {"a": 1, "b": 2}}, {"seeds": {"a": 1, "b": 2}}),
        ({"seed": 3}, {"seed": 3}),
        ({"generators": generators()}, {"generators": generators()}),
        ({"generator": generators()}, {"generators": generators()}),
    ):
        created, expected = brim.shuffle(several, **mine, progress=False), several.shuffle(**theirs)
        assert {name: created[name]["x"][:] for name in created} == {name: expected[name]["x"][:] for name in expected}


def test_shuffle_refuses_arguments_of_the_other_kind(tmp_path: Path) -> None:
    rows = in_memory()
    for inputs, words in (
        ((rows, {"seeds": 3}), "with a DatasetDict"),
        ((datasets.DatasetDict(a=rows), {"generator": np.random.default_rng(1)}), "one generator per split"),
        ((datasets.DatasetDict(a=rows), {"seed": 1, "seeds": 2}), "cannot be used with"),
    ):
        with pytest.raises(ArgumentError, match=words):
            brim.shuffle(inputs[0], **inputs[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sort", "shuffle", "train_test_split", "flatten_indices"])
def test_arguments_are_those_of_the_originals(name: str) -> None:
    ours = inspect.signature(getattr(brim, name)).parameters
    theirs = list(inspect.signature(getattr(datasets.Dataset, name)).parameters.values())[1:]
    positional = [p for p in ours.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][1:]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in theirs]
    if hasattr(datasets.DatasetDict, name):
        several = inspect.signature(getattr(datasets.DatasetDict, name)).parameters
        assert not several.keys() - ours.keys() - {"self"}


def test_cache_arguments_are_accepted_and_decide_no_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = loaded(tmp_path)
    indices = str(tmp_path / "i.arrow")
    common: dict[str, Any] = {"keep_in_memory": True, "writer_batch_size": 7}
    ordered = brim.sort(rows, "x", indices_cache_file_name=indices, new_fingerprint="sorted", **common)
    assert (ordered["x"][:], ordered._fingerprint) == (list(range(ROWS)), "sorted")
    output = capfd.readouterr().err
    assert "keep_in_memory and indices_cache_file_name and writer_batch_size have no effect" in output
    shuffled = brim.shuffle(rows, 3, None, False, False, indices, 1000, "mixed")
    assert (shuffled["x"][:], shuffled._fingerprint) == (rows.shuffle(3)["x"][:], "mixed")
    parts = brim.train_test_split(
        rows, seed=1, train_indices_cache_file_name=indices, train_new_fingerprint="t1", test_new_fingerprint="t2"
    )
    assert (parts["train"]._fingerprint, parts["test"]._fingerprint) == ("t1", "t2")
    flat = brim.flatten_indices(
        rows.select([4, 2]), num_proc=2, disable_nullable=True, new_fingerprint="flat", **common
    )
    assert (flat["x"][:], flat._fingerprint) == (rows.select([4, 2])["x"][:], "flat")
    assert not Path(indices).exists()


def test_load_from_cache_file_false_writes_the_rows_again(tmp_path: Path, cache: Path) -> None:
    rows = loaded(tmp_path)
    brim.sort(rows, "x", progress=False)
    (file,) = cache.glob("*/rows.arrow")
    first = file.stat().st_ino
    brim.sort(rows, "x", progress=False)
    assert file.stat().st_ino == first
    brim.sort(rows, "x", load_from_cache_file=False, progress=False)
    assert file.stat().st_ino != first


def test_flatten_indices_writes_the_features_that_are_asked_for(tmp_path: Path) -> None:
    rows = loaded(tmp_path).select([3, 1, 2])
    features = datasets.Features({**rows.features, "x": datasets.Value("float64")})
    created = brim.flatten_indices(rows, features=features, progress=False)
    assert created.features == features
    assert created.to_list() == rows.flatten_indices(features=features).to_list()
    assert brim.flatten_indices(rows, progress=False).features == rows.features


@pytest.mark.parametrize("index", [None, "a"])
def test_map_and_filter_take_a_pandas_table(index: str | None) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1, 2, 3], "b": ["x", "y", "z"]})
    table = table if index is None else table.set_index(index)
    result = brim.map(table, lambda row: {"c": row["b"] * 2}, progress=False)
    assert (result["a"][:], result["c"][:]) == ([1, 2, 3], ["xx", "yy", "zz"])
    remaining = brim.filter(table, lambda row: row["b"] != "y", progress=False)
    assert remaining["b"][:] == ["x", "z"]
    assert brim.map(pandas.DataFrame({"a": [1, 2]}), lambda row: row, progress=False)["a"][:] == [1, 2]
