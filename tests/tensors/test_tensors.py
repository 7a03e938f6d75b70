"""Tensors written batch by batch equal the files of the libraries, for any batches, format and interruptions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim
from brim.errors import (
    DestinationError,
    InputError,
    MissingDependencyError,
    PlanMismatchError,
    SourceError,
    VerificationError,
)
from brim.tensors import tensor_writer
from brim.tensors.tensor_reader import ShardedTensor

numpy_safetensors = pytest.importorskip(
    "safetensors.numpy", reason="byte identity with safetensors is not proved here: not installed"
)

TYPES = ["float32", "float16", "int64", "bool", "uint8", "float64"]
SPEC = {"text": (7, "float32"), "vision": (2, 3, "float16"), "seen": "bool", "id": "int64"}


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="byte identity with torch's save_file is not proved here: no torch")


def numbers(rows: int, *dims: int, dtype: str = "float32", seed: int = 0) -> Any:
    return (np.random.default_rng(seed).random((rows, *dims)) * 100).astype(dtype)


def arrays(rows: int) -> dict[str, Any]:
    return {
        "text": numbers(rows, 7),
        "vision": numbers(rows, 2, 3, dtype="float16", seed=1),
        "seen": numbers(rows, seed=2) > 50,
        "id": np.arange(rows) * 3,
    }


def batches(whole: dict[str, Any], step: int, start: int = 0) -> Iterator[dict[str, Any]]:
    rows = len(next(iter(whole.values())))
    for index in range(start, rows, step):
        yield {name: array[index : index + step] for name, array in whole.items()}


def write(path: Path, whole: dict[str, Any], spec: dict[str, Any], step: int = 13, **options: Any) -> None:
    with brim.TensorWriter(path, tensors=spec, **options) as writer:
        for batch in batches(whole, step):
            writer.append(batch)


@pytest.mark.parametrize("is_known", [True, False], ids=["rows known", "rows unknown"])
@pytest.mark.parametrize("rows", [0, 1, 100, 131])
def test_safetensors_is_what_the_library_saves(tmp_path: Path, rows: int, is_known: bool) -> None:
    """For several tensors, no rows, one row and odd sizes, the file equals save_file of the complete tensors."""
    whole = arrays(rows)
    numpy_safetensors.save_file(whole, tmp_path / "theirs.safetensors", metadata={"by": "test"})
    path = tmp_path / "ours.safetensors"
    write(path, whole, SPEC, rows=rows if is_known else None, metadata={"by": "test"})
    assert path.read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    for name, array in numpy_safetensors.load_file(path).items():
        np.testing.assert_array_equal(array, whole[name])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ours.safetensors", "theirs.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("is_known", [True, False], ids=["rows known", "rows unknown"])
def test_safetensors_is_what_torch_saves(tmp_path: Path, torch: Any, dtype: str, is_known: bool) -> None:
    """The file of torch batches is byte-identical to save_file({…: torch.cat(…)}), which it replaces."""
    from safetensors.torch import load_file, save_file

    for rows in (0, 1, 100, 131):
        vision = [(torch.randn(part, 5) * 3).to(getattr(torch, dtype)) for part in _parts(rows)]
        text = [torch.randn(2, 3, part).permute(2, 1, 0) for part in _parts(rows)]  # not contiguous
        whole = {"vision": torch.cat(vision), "text": torch.cat(text)}
        save_file(whole, tmp_path / "theirs.safetensors")
        path = tmp_path / "ours.safetensors"
        options = {"rows": rows if is_known else None, "overwrite": True}
        with brim.TensorWriter(path, vision=(5, whole["vision"].dtype), text=(3, 2, "float32"), **options) as writer:
            for v, t in zip(vision, text, strict=True):
                writer.append(vision=v.requires_grad_() if v.is_floating_point() else v, text=t)
        assert path.read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
        loaded, mapped = load_file(path), brim.open_tensors(path, "torch")
        assert all(torch.equal(loaded[name], whole[name]) for name in whole)
        assert all(torch.equal(mapped[name], whole[name]) and mapped[name].dtype == whole[name].dtype for name in whole)


def test_save_file_is_what_torch_saves(tmp_path: Path, torch: Any) -> None:
    """save_file takes lists and generators of torch batches, and empties the lists."""
    from safetensors.torch import save_file

    vision, text = torch.randn(100, 5).bfloat16(), torch.randn(33, 4)
    save_file({"vision": vision, "text": text}, tmp_path / "theirs.safetensors", metadata={"a": "b"})
    lists = {"vision": list(vision.split(7)), "text": (part for part in text.split(5))}
    brim.save_file(lists, tmp_path / "ours.safetensors", metadata={"a": "b"})
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    assert lists["vision"] == []


def _parts(rows: int) -> list[int]:
    return [rows] if rows < 2 else [1, rows // 3, 0, rows - 1 - rows // 3]


@pytest.mark.parametrize("kind", ["list", "tuple", "generator", "one array", "mixed"])
@pytest.mark.parametrize("sync_bytes", [tensor_writer.SYNC_BYTES, 100])
def test_save_file(tmp_path: Path, kind: str, sync_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any container of batches and any row counts, the bytes equal save_file of the complete tensors."""
    monkeypatch.setattr(tensor_writer, "SYNC_BYTES", sync_bytes)
    whole = {"text": numbers(50, 7), "vision": numbers(31, 2, dtype="float16")}
    numpy_safetensors.save_file(whole, tmp_path / "theirs.safetensors")
    split = {name: np.array_split(array, 6) for name, array in whole.items()}
    inputs: dict[str, Any] = {
        "list": split,
        "tuple": {name: tuple(parts) for name, parts in split.items()},
        "generator": {name: iter(parts) for name, parts in split.items()},
        "one array": whole,
        "mixed": {"text": split["text"], "vision": iter(split["vision"])},
    }[kind]
    (tmp_path / "ours.safetensors").write_bytes(b"an earlier one")
    brim.save_file(inputs, tmp_path / "ours.safetensors")
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    if kind in ("list", "mixed"):
        assert inputs["text"] == []
    assert not (tmp_path / "ours.safetensors.partial").exists()


def test_save_file_checks_lists_before_it_writes(tmp_path: Path) -> None:
    """A wrong batch at the end of a list is found before anything is written, and the list is unchanged."""
    batches = [numbers(5, 7), numbers(5, 7), numbers(5, 8)]
    with pytest.raises(InputError, match=r"\(8,\).*\(7,\)"):
        brim.save_file({"text": batches}, tmp_path / "a.safetensors")
    assert len(batches) == 3
    assert not list(tmp_path.iterdir())
    for wrong in ({}, {"a": []}, {"a": 5}, {"a": [3]}):
        with pytest.raises(InputError):
            brim.save_file(wrong, tmp_path / "a.safetensors")


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
def test_npy_is_what_numpy_saves(tmp_path: Path, dtype: str, is_known: bool) -> None:
    """One tensor gives one .npy file and several give one file per tensor, without optional libraries."""
    whole = {"text": numbers(100, 7, dtype=dtype), "n": numbers(100, dtype=dtype)}
    np.save(tmp_path / "theirs.npy", whole["text"])
    rows = 100 if is_known else None
    write(tmp_path / "one.npy", {"text": whole["text"]}, {"text": (7, dtype)}, rows=rows)
    assert (tmp_path / "one.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()
    write(tmp_path / "two.npy", whole, {"text": (7, dtype), "n": dtype}, rows=rows)
    assert (tmp_path / "two.text.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()
    np.testing.assert_array_equal(np.load(tmp_path / "two.n.npy"), whole["n"])
    for path in (tmp_path / "one.npy", tmp_path / "two.npy"):
        tensors = brim.open_tensors(path)
        np.testing.assert_array_equal(tensors.get("text", tensors.get("one")), whole["text"])


@pytest.mark.parametrize("rows", [0, 1, 500])
def test_parquet(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are fixed-size lists next to ids, in several row groups; the bytes depend only on the values."""
    monkeypatch.setattr("brim.tensors.tensor_files.ROW_GROUP_BYTES", 20_000)
    whole = {"key": np.array([f"é{i}" * (i % 3) for i in range(rows)], dtype=object), **arrays(rows)}
    spec = {"key": "string", **SPEC}
    write(tmp_path / "a.parquet", whole, spec, rows=rows, metadata={"model": "m"})
    write(tmp_path / "b.parquet", whole, spec, step=101)
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.schema.field("text").type == pa.list_(pa.field("element", pa.float32()), 7)
    assert table.schema.metadata == {b"model": b"m"}
    assert table["key"].to_pylist() == list(whole["key"])
    for name in SPEC:
        actual = table[name].to_pylist()
        np.testing.assert_array_equal(np.array(actual, whole[name].dtype).reshape(whole[name].shape), whole[name])
    assert pq.read_table(tmp_path / "b.parquet").equals(table)
    if rows == 500:
        assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 2
        import duckdb

        first = duckdb.sql(f"select text[7], key from '{tmp_path}/a.parquet' where id = 300").fetchall()
        assert first == [(whole["text"][100][6], "é100")]


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(("rows", "shards"), [(0, 1), (9, 1), (10, 1), (95, 10)])
def test_shards(tmp_path: Path, rows: int, shards: int, is_known: bool) -> None:
    """Shards hold complete rows, each is a file that the library could have written, and an index lists them."""
    whole = arrays(rows)
    path = tmp_path / "emb.safetensors"
    row_bytes = 7 * 4 + 6 * 2 + 1 + 8
    write(path, whole, SPEC, rows=rows if is_known else None, shard_size=10 * row_bytes + 3)
    index = json.loads((tmp_path / "emb.safetensors.index.json").read_bytes())
    assert index["rows"] == rows
    assert len(index["shards"]) == shards
    for number, shard in enumerate(index["shards"]):
        part = {name: array[number * 10 : number * 10 + 10] for name, array in whole.items()}
        numpy_safetensors.save_file(part, tmp_path / "theirs.safetensors")
        assert shard["file"] == f"emb-{number + 1:05d}-of-{shards:05d}.safetensors"
        assert shard["rows"] == len(part["id"])
        assert (tmp_path / shard["file"]).read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
    tensors = brim.open_tensors(path)
    for name, array in whole.items():
        np.testing.assert_array_equal(tensors[name][:], array)
        assert tensors[name].shape == array.shape


def test_rows_of_shards_are_read_like_an_array(tmp_path: Path) -> None:
    """Rows, slices, steps, lists and masks work across files, and are views if they lie in one file."""
    whole = {"text": numbers(95, 7)}
    write(tmp_path / "emb.safetensors", whole, {"text": (7, "float32")}, shard_size=10 * 28)
    text, array = brim.open_tensors(tmp_path / "emb.safetensors")["text"], whole["text"]
    mask = array[:, 0] > 50
    choices = [5, -1, slice(3, 8), slice(8, 33), slice(None, None, -7), [94, 0, -2, 50, 50], np.arange(95), mask]
    for choice in choices:
        np.testing.assert_array_equal(text[choice], array[choice])
    assert text[[]].shape == (0, 7)
    np.testing.assert_array_equal(np.asarray(text), array)
    np.testing.assert_array_equal(np.stack(list(text)), array)
    assert isinstance(text[3:8].base, np.memmap) or isinstance(text[3:8], np.memmap)
    for wrong in (95, -96, [1, 95], np.ones(94, bool), [1.5], (0, 1, [2])):
        with pytest.raises((IndexError, ValueError)):
            text[wrong]


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    """Missing, unfinished and damaged files are errors that name the problem."""
    with pytest.raises(SourceError, match="no "):
        brim.open_tensors(tmp_path / "a.safetensors")
    with pytest.raises(SourceError):
        brim.open_tensors(tmp_path / "a.npy")
    with pytest.raises(InputError, match="pyarrow"):
        brim.open_tensors(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="numpy or torch"):
        brim.open_tensors(tmp_path / "a.npy", "jax")  # type: ignore[arg-type]
    (tmp_path / "a.npy").write_bytes(b"x")
    with pytest.raises(VerificationError):
        brim.open_tensors(tmp_path / "a.npy")
    write(tmp_path / "s.safetensors", {"t": numbers(30, 2)}, {"t": (2, "float32")}, shard_size=80)
    (tmp_path / "s-00002-of-00003.safetensors").unlink()
    with pytest.raises(VerificationError, match="s-00002-of-00003"):
        brim.open_tensors(tmp_path / "s.safetensors")


def test_a_file_of_others_is_read(tmp_path: Path) -> None:
    """Scalars and empty tensors, which brim does not write, can be read."""
    theirs = {"scale": np.full((), 3.0), "none": np.zeros((0, 4), np.int8), "w": numbers(3, 4)}
    numpy_safetensors.save_file(theirs, tmp_path / "a.safetensors")
    for name, array in brim.open_tensors(tmp_path / "a.safetensors").items():
        np.testing.assert_array_equal(array, theirs[name])
        assert array.shape == theirs[name].shape


INDEXES: list[Any] = [
    (12, slice(None, 4)),
    (-1, 3),
    (np.int64(7), slice(None), 2),
    (slice(5, 31), 1),
    (slice(None, None, 3), slice(1, None), 0),
    ([3, 88, 3, -1], 2),
    ([3, 88, 20], [0, 2, 1]),
    ([3, 88], slice(None), [0, 2]),
    (Ellipsis, 2),
    (Ellipsis,),
    Ellipsis,
    (12,),
    (),
    (slice(8, 12), Ellipsis, 0),
    (np.arange(95) % 2 == 0, 1),
    (4, None, slice(None)),
]


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_sharded_rows_take_indexes_as_numpy_does(tmp_path: Path, index: Any) -> None:
    whole = {"t": numbers(95, 4, 3)}
    write(tmp_path / "a.safetensors", whole, {"t": (4, 3, "float32")}, shard_size=10 * 48)
    rows = brim.open_tensors(tmp_path / "a.safetensors")["t"]
    assert isinstance(rows, ShardedTensor)
    assert np.array_equal(rows[index], whole["t"][index])
    for wrong in ((95,), (0, 9), (0, 0, 0, 0)):
        with pytest.raises(IndexError):
            rows[wrong]


def test_sharded_rows_become_an_array(tmp_path: Path) -> None:
    whole = {"t": numbers(30, 2, dtype="float16")}
    write(tmp_path / "a.safetensors", whole, {"t": (2, "float16")}, shard_size=40)
    rows = brim.open_tensors(tmp_path / "a.safetensors")["t"]
    assert np.array_equal(np.asarray(rows), whole["t"])
    assert np.asarray(rows).dtype == np.float16
    assert np.asarray(rows, np.float32).dtype == np.float32


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_sharded_rows_of_torch_are_tensors_where_torch_asks(tmp_path: Path, torch: Any, dtype: str) -> None:
    whole = torch.randn(95, 7).to(getattr(torch, dtype))
    path = tmp_path / "a.safetensors"
    write(path, {"text": whole}, {"text": (7, dtype)}, shard_size=10 * whole.element_size() * 7)
    rows = brim.open_tensors(path, "torch")["text"]
    assert isinstance(rows, ShardedTensor)
    assert torch.equal(rows[12, :4], whole[12, :4])
    assert torch.equal(rows[5:31, 1], whole[5:31, 1])
    assert torch.equal(rows[[3, 88, 20], [0, 2, 1]], whole[[3, 88, 20], [0, 2, 1]])
    assert torch.equal(torch.as_tensor(rows), whole)
    assert torch.equal(torch.cat([whole[:1], torch.as_tensor(rows)])[1:], whole)
    if dtype != "bfloat16":  # a type that NumPy does not have
        assert np.array_equal(np.asarray(rows), whole.numpy())


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy", "a.parquet"])
@pytest.mark.parametrize("is_known", [True, False])
def test_resume(tmp_path: Path, name: str, is_known: bool) -> None:
    """An error in the caller's loop loses no rows: the job resumes after rows_done, and the final bytes are the
    same."""
    whole = arrays(100) | ({"key": [f"k{i}" for i in range(100)]} if name == "a.parquet" else {})
    spec = SPEC | ({"key": "string"} if name == "a.parquet" else {})
    rows = 100 if is_known else None
    write(tmp_path / f"whole{Path(name).suffix}", whole, spec, rows=rows)
    path = tmp_path / name
    with pytest.raises(ZeroDivisionError):
        _fail_after(60, path, whole, spec, rows=rows, checkpoint_rows=20)
    assert not path.exists()
    with pytest.raises(DestinationError, match=r"65 rows.*resume=True.*overwrite=True"):
        brim.TensorWriter(path, rows, tensors=spec)
    with brim.TensorWriter(path, rows, tensors=spec, resume=True) as writer:
        assert writer.rows_done == 65
        for batch in batches(whole, 7, start=65):
            writer.append(batch)
    created = [file for file in tmp_path.iterdir() if not file.name.startswith("complete")]
    for file in created:
        assert file.read_bytes() == (tmp_path / file.name.replace("a.", "whole.", 1)).read_bytes()
    resumed = brim.TensorWriter(path, rows, tensors=spec, resume=True)
    assert (resumed.finished, resumed.rows_done) == (True, 100)
    resumed.close()
    with pytest.raises(InputError, match="finished"):
        resumed.append(next(batches(whole, 1)))
    with pytest.raises(DestinationError, match="exists already"):
        brim.TensorWriter(path, rows, tensors=spec)
    second = {"text": (8, "float32")} | {name: SPEC[name] for name in list(SPEC)[1:]}
    with pytest.raises(DestinationError, match="other tensors or rows"):
        brim.TensorWriter(path, rows, tensors=second, resume=True)


def _fail_after(completed: int, path: Path, whole: dict[str, Any], spec: dict[str, Any], **options: Any) -> None:
    with brim.TensorWriter(path, tensors=spec, **options) as writer:
        for batch in batches(whole, 13):
            writer.append(batch)
            if writer.rows_done > completed:
                raise ZeroDivisionError


def test_a_changed_request_does_not_go_on(tmp_path: Path) -> None:
    """Resuming with other rows or shapes is an error that states the earlier and the present description."""
    path = tmp_path / "a.safetensors"
    writer = brim.TensorWriter(path, 50, text=(7, "float32"))
    writer.append(text=numbers(10, 7))
    with pytest.raises(DestinationError, match="another writer"):
        brim.TensorWriter(path, 50, text=(7, "float32"), resume=True)
    with pytest.raises(InputError):
        writer.close()
    with pytest.raises(PlanMismatchError, match="rows: 50 before, 40 now"):
        brim.TensorWriter(path, 40, text=(7, "float32"), resume=True)
    with pytest.raises(PlanMismatchError, match=r"text=\(7, float32\) before, text=\(8, float32\) now"):
        brim.TensorWriter(path, 50, text=(8, "float32"), resume=True)
    with pytest.raises(PlanMismatchError, match="metadata: nothing before, by=me now"):
        brim.TensorWriter(path, 50, text=(7, "float32"), metadata={"by": "me"}, resume=True)
    with pytest.raises(InputError, match="Choose one"):
        brim.TensorWriter(path, 50, text=(7, "float32"), resume=True, overwrite=True)
    assert brim.TensorWriter(path, 50, text=(7, "float32"), resume=True).rows_done == 10


def test_columns_in_another_order_do_not_go_on(tmp_path: Path) -> None:
    """Resuming with columns in another order is an error."""
    spec = {"a": "int64", "b": "int64"}
    writer = brim.TensorWriter(tmp_path / "x.parquet", tensors=spec)
    writer.append(a=np.arange(3), b=np.arange(3))
    with pytest.raises(ZeroDivisionError), writer:
        raise ZeroDivisionError
    with pytest.raises(PlanMismatchError, match=r"a=\(int64\), b=\(int64\) before, b=\(int64\), a=\(int64\) now"):
        brim.TensorWriter(tmp_path / "x.parquet", tensors=dict(reversed(spec.items())), resume=True)


@pytest.mark.parametrize("name", ["a.safetensors", "a.npy", "a.parquet", "shards"])
def test_fewer_rows_than_promised(tmp_path: Path, name: str) -> None:
    """Closing with too few rows is an error that keeps the data and explains how to resume; truncate finishes the file
    with the written rows."""
    path = tmp_path / ("a.safetensors" if name == "shards" else name)
    options = {"shard_size": 30 * 28} if name == "shards" else {}
    text = numbers(70, 7)
    with pytest.raises(InputError, match=r"100 rows and has 70.*a\.\w+\.partial.*resume=True.*truncate") as caught:
        write(path, {"text": text}, {"text": (7, "float32")}, rows=100, **options)
    assert caught.value.facts == {"rows": 100, "rows_done": 70}
    assert not path.exists()
    writer = brim.TensorWriter(path, 100, text=(7, "float32"), resume=True, **options)
    writer.append(text=text[:5])
    with pytest.raises(InputError, match="75"):
        writer.close()
    with pytest.raises(InputError, match="closed"):
        writer.append(text=text[:5])
    writer.truncate()
    writer.truncate()
    assert writer.finished
    expected = np.concatenate([text, text[:5]])
    if name == "a.parquet":
        np.testing.assert_array_equal(np.array(pq.read_table(path)["text"].to_pylist(), np.float32), expected)
    else:
        [tensors] = brim.open_tensors(path).values()
        np.testing.assert_array_equal(tensors[:], expected)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("batch", "arguments"),
    [
        ({"a": numbers(3, 4), "b": numbers(3, 3)}, r"'b' has rows of shape \(3,\)"),
        ({"a": numbers(3, 4), "b": numbers(3, 2, dtype="float64")}, "float64"),
        ({"a": numbers(3, 4), "b": numbers(4, 2)}, "different rows: a 3, b 4"),
        ({"a": numbers(3, 4)}, "lacks b"),
        ({"a": numbers(3, 4), "b": numbers(3, 2), "c": numbers(3, 2)}, "has c"),
        ({"a": numbers(9, 4), "b": numbers(9, 2)}, "more than the 10"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_whole(tmp_path: Path, batch: dict[str, Any], arguments: str) -> None:
    """A batch that does not fit is refused completely, and the next batch is accepted."""
    path = tmp_path / "x.safetensors"
    a, b = numbers(10, 4), numbers(10, 2)
    with brim.TensorWriter(path, 10, a=(4, "float32"), b=(2, "float32")) as writer:
        writer.append(a=a[:5], b=b[:5])
        with pytest.raises(InputError, match=arguments):
            writer.append(batch)
        assert writer.rows_done == 5
        writer.append(a=a[5:], b=b[5:])
    np.testing.assert_array_equal(brim.open_tensors(path)["a"], a)
    np.testing.assert_array_equal(brim.open_tensors(path)["b"], b)


@pytest.mark.parametrize(
    ("path", "options", "arguments"),
    [
        ("a.bin", {}, r"\.safetensors, \.npy, \.parquet"),
        ("a.npy", {"shard_size": "1MB"}, "not cut into shards"),
        ("a.npy", {"metadata": {"a": "b"}}, "metadata"),
        ("a.npy", {"t": (2, "bfloat16")}, "no bfloat16"),
        ("a.npy", {"t": "string"}, "no string"),
        ("a.npy", {"tensors": {"a/b": "int8"}}, "'a/b'"),
        ("a.parquet", {"t": (2, "bfloat16")}, "no bfloat16"),
        ("a.safetensors", {"t": "string"}, "strings of 't'"),
        ("a.safetensors", {"rows": -1}, "-1"),
        ("a.safetensors", {"rows": 1.5}, "1.5"),
        ("a.safetensors", {"checkpoint_rows": 0}, "checkpoint_rows"),
        ("a.safetensors", {"metadata": {"a": 1}}, "Metadata"),
        ("a.safetensors", {"shard_size": "many"}, "'many'"),
        ("a.safetensors", {"tensors": {"n": "int8"}}, "named twice"),
    ],
)
def test_requests_that_cannot_be(tmp_path: Path, path: str, options: dict[str, Any], arguments: str) -> None:
    """Impossible requests are refused before any file is created."""
    with pytest.raises(InputError, match=arguments):
        brim.TensorWriter(tmp_path / path, **{"n": "int8", **options})
    assert not list(tmp_path.iterdir())


def test_overwrite_replaces_all_of_an_earlier_result(tmp_path: Path) -> None:
    """Overwriting removes shards of the earlier result that the new one does not have, and a single file that became
    shards."""
    path, spec = tmp_path / "a.safetensors", {"t": (2, "float32")}
    write(path, {"t": numbers(50, 2)}, spec, shard_size=80)
    write(path, {"t": numbers(30, 2, seed=1)}, spec, shard_size=80, overwrite=True)
    names = ["a-00001-of-00003", "a-00002-of-00003", "a-00003-of-00003"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *(f"{name}.safetensors" for name in names),
        "a.safetensors.index.json",
    ]
    write(path, {"t": numbers(20, 2, seed=2)}, spec, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
    write(path, {"t": numbers(30, 2, seed=1)}, spec, shard_size=80, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 4
    np.testing.assert_array_equal(brim.open_tensors(path)["t"][:], numbers(30, 2, seed=1))


def test_a_file_that_is_being_replaced_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    """An overwriting job that is interrupted before its first receipt starts from zero, not from the old file."""
    path, spec = tmp_path / "a.safetensors", {"t": (2, "float32")}
    write(path, {"t": numbers(20, 2)}, spec, rows=20)
    with pytest.raises(ZeroDivisionError), brim.TensorWriter(path, 20, tensors=spec, overwrite=True):
        raise ZeroDivisionError
    with brim.TensorWriter(path, 20, tensors=spec, resume=True) as writer:
        assert writer.rows_done == 0
        assert not writer.finished
        writer.append(t=numbers(20, 2, seed=1))
    np.testing.assert_array_equal(brim.open_tensors(path)["t"], numbers(20, 2, seed=1))


def test_without_the_optional_libraries(tmp_path: Path) -> None:
    """.npy and .parquet need neither torch nor safetensors; for .safetensors the error names the package to install."""
    code = """
import sys
sys.modules["safetensors"] = sys.modules["torch"] = None
import numpy as np, brim
for name in ("a.npy", "a.parquet", "a.safetensors"):
    try:
        with brim.TensorWriter(name, 3, t=(2, "float32")) as writer:
            writer.append(t=np.zeros((3, 2), np.float32))
    except brim.BrimError as error:
        print(type(error).__name__, error)
try:
    brim.open_tensors("a.npy", "torch")
except brim.BrimError as error:
    print(type(error).__name__, error)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    needs, torch = result.stdout.splitlines()
    assert needs.startswith(
        f"{MissingDependencyError.__name__} Writing .safetensors needs the safetensors library. Install it"
    )
    assert torch.startswith("MissingDependencyError torch is not installed. Install it with: pip install 'brim[embed]'")
    assert re.search(r"pip install 'torch>=[\d.]+'", torch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "a.parquet"]
