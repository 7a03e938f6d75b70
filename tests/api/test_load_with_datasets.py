"""Datasets that brim built load and decode with `datasets`, in memory and streaming."""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
from pathlib import Path
from typing import Any

import datasets
import nibabel
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import brim
from tests.conftest import random_bytes, write_files


def nifti(seed: int) -> tuple[bytes, np.ndarray[Any, Any]]:
    volume = np.random.default_rng(seed).integers(0, 1000, (5, 6, 7)).astype(np.int16)
    return gzip.compress(nibabel.Nifti1Image(volume, np.diag([2.0, 2, 2, 1])).to_bytes(), mtime=0), volume


def png(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (9, 8, 3)).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Return a table of four subjects: a NIfTI file, a list of pictures, and metadata."""
    contents = {f"scans/s{i}.nii.gz": nifti(i)[0] for i in range(4)}
    contents |= {f"pictures/p{i}.png": png(i) for i in range(5)}
    return write_files(tmp_path / "source", contents)


def scan_table(scans: Path, **options: Any) -> Any:
    rows = {
        "subject": ["007", "008", "009", "010"],
        "t1w": ["scans/s0.nii.gz", "scans/s1.nii.gz", None, "scans/s3.nii.gz"],
        "pictures": [["pictures/p0.png", "pictures/p1.png"], [], None, ["pictures/p2.png"]],
        "age": [34, None, 50, 61],
    }
    return brim.table(pa.table(rows), files=["t1w:nifti", "pictures:image"], root=scans, **options)


@pytest.mark.parametrize("streaming", [False, True])
def test_media_columns_decode(scans: Path, tmp_path: Path, streaming: bool) -> None:
    """NIfTI files decode to the values that nibabel reads from the source, and pictures to those of Pillow."""
    brim.build(scan_table(scans), tmp_path / "out", rows_per_shard=2)
    loaded = datasets.load_dataset(str(tmp_path / "out"), split="train", streaming=streaming)
    assert loaded.features["t1w"] == datasets.Nifti()
    assert loaded.features["pictures"] == datasets.List(datasets.Image())
    rows = list(loaded)
    assert [row["subject"] for row in rows] == ["007", "008", "009", "010"]
    assert [row["age"] for row in rows] == [34, None, 50, 61]
    for number in (0, 1, 3):
        source = nibabel.load(scans / f"scans/s{number}.nii.gz")
        assert np.array_equal(rows[number]["t1w"].get_fdata(), source.get_fdata())
        assert np.array_equal(rows[number]["t1w"].affine, source.affine)
    assert rows[2]["t1w"] is None
    assert [None if row["pictures"] is None else len(row["pictures"]) for row in rows] == [2, 0, None, 1]
    assert np.array_equal(np.asarray(rows[0]["pictures"][1]), np.asarray(Image.open(scans / "pictures/p1.png")))


@pytest.mark.parametrize("streaming", [False, True])
def test_bytes_and_paths_without_decoding(scans: Path, tmp_path: Path, streaming: bool) -> None:
    """An undecoded cell has the source's bytes and its relative path; .nii.gz stays compressed."""
    brim.build(scan_table(scans), tmp_path / "out")
    loaded = datasets.load_dataset(str(tmp_path / "out"), split="train", streaming=streaming)
    loaded = loaded.cast_column("t1w", datasets.Nifti(decode=False))
    row = next(iter(loaded))
    assert row["t1w"]["bytes"] == (scans / "scans/s0.nii.gz").read_bytes()
    assert row["t1w"]["path"] == "scans/s0.nii.gz"


def test_splits_labels_and_metadata_of_an_imagefolder(tmp_path: Path) -> None:
    """The folders train/ and test/ become splits, and parent folders become class labels."""
    names = ["train/cat/a.png", "train/dog/b.png", "train/cat/c.png", "test/dog/d.png"]
    source = write_files(tmp_path / "source", {name: png(i) for i, name in enumerate(names)})
    write_files(source, {"._junk": b"x", ".DS_Store": b"x", ".git/config": b"x", "README.md": b"about"})
    table = brim.files(source, label_from="parent", exclude=["README.md"])
    brim.build(table, tmp_path / "out")
    loaded = datasets.load_dataset(str(tmp_path / "out"))
    assert {name: len(split) for name, split in loaded.items()} == {"train": 3, "test": 1}
    label = loaded["train"].features["label"]
    assert label.names == ["cat", "dog"]
    assert [label.int2str(x) for x in loaded["train"]["label"]] == ["cat", "cat", "dog"]
    assert loaded["test"][0]["image"].size == (8, 9)


def test_metadata_csv(tmp_path: Path) -> None:
    """metadata.csv assigns metadata to files, and brim builds the same dataset from the folder as `datasets`."""
    source = write_files(tmp_path / "source", {f"{i}.png": png(i) for i in range(3)})
    (source / "metadata.csv").write_text("file_name,caption,mask_file_name\n1.png,one,0.png\n0.png,zero,2.png\n")
    brim.build(brim.files(source), tmp_path / "out")
    ours = datasets.load_dataset(str(tmp_path / "out"), split="train")
    theirs = datasets.load_dataset("imagefolder", data_dir=str(source), split="train")
    assert list(ours.features) == list(theirs.features)
    assert ours.features["mask"] == theirs.features["mask"] == datasets.Image()
    assert ours["caption"][:] == theirs["caption"][:] == ["one", "zero"]
    for column in ("image", "mask"):
        for a, b in zip(ours[column], theirs[column], strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))


def test_metadata_columns_of_any_type(tmp_path: Path) -> None:
    """Nested, decimal, timestamp, dictionary and dotted columns keep their types and values."""
    source = write_files(tmp_path / "source", {"a.bin": b"aaa", "b.bin": b"b"})
    rows = pa.table(
        {
            "file": ["a.bin", "b.bin"],
            "a.b": pa.array([1, None], pa.int16()),
            "price": pa.array([decimal.Decimal("1.10"), None], pa.decimal128(8, 2)),
            "when": pa.array([datetime.datetime(2026, 1, 2, 3), None], pa.timestamp("us", tz="UTC")),
            "day": pa.array([datetime.date(2026, 1, 2), None], pa.date32()),
            "kind": pa.array(["x", "y"]).dictionary_encode(),
            "nested": pa.array([{"x": [1, 2], "y": {"z": "deep"}}, None]),
            "vector": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
            "raw": pa.array([b"\x00\xff", None], pa.large_binary()),
            "half": pa.array(np.array([1.5, 2.5], np.float16)),
            "texts": pa.array([["a", None], []], pa.large_list(pa.large_string())),
        }
    )
    brim.build(brim.table(rows, files=["file:file"], root=source), tmp_path / "out")
    loaded = datasets.load_dataset(str(tmp_path / "out"), split="train")
    expected = rows.drop_columns(["file"]).to_pylist()
    for got, want in zip(loaded, expected, strict=True):
        for name, value in want.items():
            assert got[name] == value, name
    assert loaded[0]["file"] == {"bytes": b"aaa", "path": "a.bin"}


def test_features_given_by_the_user(scans: Path, tmp_path: Path) -> None:
    """`features=` sets the types of file columns and of other columns."""
    features = datasets.Features({"t1w": datasets.Nifti(), "age": datasets.Value("int64")})
    table = brim.table([{"t1w": "scans/s0.nii.gz", "age": 3}], features=features, root=scans)
    brim.build(table, tmp_path / "out")
    assert datasets.load_dataset(str(tmp_path / "out"), split="train").features == features


def test_pandas_and_polars_tables(tmp_path: Path) -> None:
    """brim accepts pandas and polars tables directly."""
    import pandas
    import polars

    source = write_files(tmp_path / "source", {"a.png": png(1), "b.png": png(2)})
    rows = {"image": ["a.png", "b.png"], "n": [1, 2]}
    for number, frame in enumerate((pandas.DataFrame(rows, index=[7, 9]), polars.DataFrame(rows))):
        out = tmp_path / f"out{number}"
        brim.build(brim.table(frame, root=source), out)
        loaded = datasets.load_dataset(str(out), split="train")
        assert loaded.column_names == ["image", "n"]
        assert loaded[1]["image"].size == (8, 9)


def test_an_unfinished_dataset_does_not_load(tmp_path: Path) -> None:
    """While shards are missing, load_dataset raises an error instead of loading a smaller dataset."""
    source = write_files(tmp_path / "source", {f"{i}.bin": random_bytes(1000, i) for i in range(4)})
    stop = brim.Stop()
    stop.request()
    with pytest.raises(brim.BrimError) as caught:
        brim.build(source, tmp_path / "out", rows_per_shard=1, stop=stop)
    assert caught.value.exit_code == 6
    with pytest.raises(Exception, match=r"unfinished|Unable to find"):
        datasets.load_dataset(str(tmp_path / "out"))
    brim.build(source, tmp_path / "out", rows_per_shard=1)
    assert len(datasets.load_dataset(str(tmp_path / "out"), split="train")) == 4
