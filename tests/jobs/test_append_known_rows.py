"""`--append` with a source that overlaps with the dataset: only missing rows are added."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import brim as api
from brim.errors import InputError
from tests.conftest import random_bytes, write_files
from tests.destinations import BucketDestination, Destination, FolderDestination, HubDestination, run
from tests.forked import brim
from tests.guarantees.test_kill_before_receipt import killed

ROWS = ("--rows-per-shard", "2", "--quiet")


@pytest.fixture(params=["folder", "bucket", "hub"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> Destination:
    if request.param == "folder":
        return FolderDestination(tmp_path / "out")
    if request.param == "hub":
        return HubDestination(request.getfixturevalue("hub"), tmp_path / "machine")
    prefix = request.getfixturevalue("s3_prefix").rstrip("/")
    return BucketDestination(request.getfixturevalue("s3"), tmp_path / "machine", prefix)


def files(folder: Path, start: int, stop: int) -> Path:
    return write_files(folder, {f"d{i % 2}/{i}.bin": random_bytes(3000 + i, i) for i in range(start, stop)})


def unpacked(destination: Destination, back: Path) -> dict[str, bytes]:
    shutil.rmtree(back, ignore_errors=True)
    run(destination, "unpack", destination.address, back, "--quiet")
    return {str(path.relative_to(back)): path.read_bytes() for path in back.rglob("*") if path.is_file()}


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_append_of_a_grown_folder_adds_only_the_new_rows(destination: Destination, tmp_path: Path, format: str) -> None:
    source = files(tmp_path / "in", 0, 3)
    run(destination, "build", source, destination.address, *ROWS, "--format", format)
    files(source, 3, 4)
    result = run(destination, "build", source, destination.address, "--append", "--format", format, "--json")
    output = [json.loads(line) for line in result.stdout.splitlines()]
    assert output[-1]["rows"] == 4
    assert any("3 rows of 4 already in the dataset" in item.get("text", "") for item in output)
    assert unpacked(destination, tmp_path / "back") == {
        str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*.bin")
    }
    repeated = run(destination, "build", source, destination.address, "--append", "--format", format, "--json")
    assert json.loads(repeated.stdout.splitlines()[-1])["rows"] == 4
    if isinstance(destination, FolderDestination):
        assert "4 files are inside" in run(destination, "verify", destination.address, source).stdout


@pytest.mark.parametrize("change", ["size", "content"])
def test_append_refuses_a_path_with_other_content(destination: Destination, tmp_path: Path, change: str) -> None:
    source = files(tmp_path / "in", 0, 3)
    run(destination, "build", source, destination.address, *ROWS)
    before = destination.content()
    data = (source / "d1" / "1.bin").read_bytes()
    (source / "d1" / "1.bin").write_bytes(data + b"x" if change == "size" else data[:-1] + bytes([data[-1] ^ 1]))
    files(source, 3, 4)
    result = run(destination, "build", source, destination.address, "--append", check=2)
    assert "'d1/1.bin'" in result.stderr
    assert "--allow-duplicate-paths" in result.stderr
    assert destination.content() == before
    run(destination, "verify", destination.address, "--quiet")
    output = run(
        destination, "build", source, destination.address, "--append", "--allow-duplicate-paths", "--json"
    ).stdout
    assert json.loads(output.splitlines()[-1])["rows"] == 5
    run(destination, "verify", destination.address, "--quiet")


def test_append_compares_files_of_one_split_only(tmp_path: Path) -> None:
    source, out = files(tmp_path / "in", 0, 2), tmp_path / "out"
    api.build(source, out, split="train")
    assert api.build(source, out, split="test", append=True).rows == 4


def test_append_keeps_rows_of_a_table_that_name_a_known_file_with_other_values(tmp_path: Path) -> None:
    """A row with a known file and other values (annotations of an image) is appended. Only equal rows are skipped."""
    source, out = files(tmp_path / "in", 0, 2), tmp_path / "out"
    (source / "t.csv").write_text("f,note\nd0/0.bin,a\nd1/1.bin,b\n")
    api.build(source / "t.csv", out)
    (source / "t.csv").write_text("f,note\nd0/0.bin,a\nd1/1.bin,c\nd1/1.bin,b\n")
    assert api.build(source / "t.csv", out, append=True).rows == 3
    rows = [row for path in sorted((out / "data").iterdir()) for row in pq.read_table(path).to_pylist()]
    assert [row["note"] for row in rows] == ["a", "b", "c"]


def test_append_of_lists_of_files_skips_rows_that_are_there(tmp_path: Path) -> None:
    source, out = files(tmp_path / "in", 0, 4), tmp_path / "out"
    rows = [{"f": ["d0/0.bin", "d1/1.bin"]}, {"f": []}, {"f": ["d0/2.bin"]}]
    api.build(api.table(rows, files="f:file", root=source), out)
    extra = [*rows, {"f": ["d0/0.bin"]}, {"f": ["d1/3.bin", "d0/0.bin"]}]
    # Rows without files are never treated as equal.
    assert api.build(api.table(extra, files="f:file", root=source), out, append=True).rows == 6


def test_append_of_a_killed_append_continues_with_the_same_rows(tmp_path: Path) -> None:
    source, out = files(tmp_path / "in", 0, 4), tmp_path / "out"
    api.build(source, out, rows_per_shard=2)
    files(source, 4, 10)
    killed(FolderDestination(out), 1, "build", source, out, "--append", *ROWS, "--workers", "1")
    built = api.build(source, out, append=True, rows_per_shard=2)
    assert (built.rows, built.shards, built.written) == (10, 5, 2)
    api.verify(out)


def test_append_to_webdataset_of_others_is_refused(tmp_path: Path) -> None:
    import tarfile

    shard = tmp_path / "out" / "data" / "train-00000-of-00001.tar"
    shard.parent.mkdir(parents=True)
    source = files(tmp_path / "in", 0, 1)
    with tarfile.open(shard, "w") as archive:
        archive.add(source / "d0" / "0.bin", "0.bin")
    result = brim("build", source, tmp_path / "out", "--append", "--format", "webdataset", check=2)
    assert "bug" not in result.stderr


def test_allow_duplicate_paths_needs_append(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="append"):
        api.build(files(tmp_path / "in", 0, 1), tmp_path / "out", allow_duplicate_paths=True)


def test_append_maps_labels_onto_the_classes_of_the_dataset(tmp_path: Path) -> None:
    """Labels of appended files are mapped to the classes of the dataset, even if only some classes occur."""
    old = write_files(tmp_path / "old", {f"{name}/{i}.bin": random_bytes(50, i) for i, name in enumerate("abc")})
    new = write_files(tmp_path / "new", {"c/9.bin": b"9", "b/8.bin": b"8"})
    arguments = ("--label-from", "parent", "--quiet")
    brim("build", old, tmp_path / "out", *arguments)
    brim("build", new, tmp_path / "out", *arguments, "--append")
    tables = [pq.read_table(path, columns=["label"]) for path in sorted((tmp_path / "out" / "data").iterdir())]
    assert [label for table in tables for label in table.column("label").to_pylist()] == [0, 1, 2, 1, 2]
    brim("verify", tmp_path / "out", new)
    brim("verify", tmp_path / "out", old)


def test_append_to_webdataset_refuses_other_classes(tmp_path: Path) -> None:
    """WebDataset shards store label numbers without names, so an append with other classes is refused."""
    old = write_files(tmp_path / "old", {f"{name}/{i}.bin": b"1" for i, name in enumerate("ab")})
    arguments = ("--label-from", "parent", "--format", "webdataset")
    brim("build", old, tmp_path / "out", *arguments, "--quiet")
    new = write_files(tmp_path / "new", {"b/9.bin": b"9"})
    assert "names of classes" in brim("build", new, tmp_path / "out", *arguments, "--append", check=2).stderr
    write_files(new, {"a/8.bin": b"8"})
    brim("build", new, tmp_path / "out", *arguments, "--append", "--quiet")
    brim("verify", tmp_path / "out", new)


def test_append_refuses_a_new_class(tmp_path: Path) -> None:
    old = write_files(tmp_path / "old", {f"{name}/{i}.bin": b"1" for i, name in enumerate("ab")})
    new = write_files(tmp_path / "new", {"a/9.bin": b"9", "z/8.bin": b"8"})
    brim("build", old, tmp_path / "out", "--label-from", "parent", "--quiet")
    result = brim("build", new, tmp_path / "out", "--label-from", "parent", "--append", check=2)
    assert "has new classes: z." in result.stderr
    assert "--update" in result.stderr
    assert "a, b" in result.stderr
    brim("verify", tmp_path / "out", old)
