"""Class labels: from folders, from columns of tables, in appended rows, and in `brim info`."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import brim as api
from brim.errors import BrimError, InputError, SourceError
from tests.conftest import write_files
from tests.forked import brim

HINT = "Add --label-from parent to store the folder names as class labels."
CLASSES = {f"{name}/{number}.png": f"{name}{number}".encode() for name in ("cat", "dog", "bird") for number in range(2)}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder of class folders."""
    return write_files(tmp_path / "photos", CLASSES)


@pytest.fixture
def table(photos: Path, tmp_path: Path) -> Path:
    """Return a CSV file that names the files and their classes."""
    rows = "".join(f"photos/{path},{path.split('/')[0]},{number}\n" for number, path in enumerate(CLASSES))
    return write_files(tmp_path, {"t.csv": f"path,kind,number\n{rows}".encode()}) / "t.csv"


def labels(folder: Path, column: str = "label") -> list[int]:
    tables = [pq.read_table(path, columns=[column]) for path in sorted((folder / "data").iterdir())]
    return [label for table in tables for label in table.column(column).to_pylist()]


def test_plan_and_build_hint_at_labels_for_class_folders(photos: Path, tmp_path: Path) -> None:
    assert HINT in brim("plan", photos).stdout
    assert HINT in brim("build", photos, tmp_path / "out").stderr
    assert HINT not in brim("plan", photos, "--label-from", "parent").stdout
    assert "label_from='parent'" in str(api.plan(photos))


@pytest.mark.parametrize(
    "paths",
    [
        ["a.png", "b.png", "c.png", "d.png"],
        ["x/a.png", "x/b.png", "y/c.png", "d.png"],  # one file is outside of all folders
        ["x/y/a.png", "x/y/b.png", "x/z/a.png", "x/z/b.png"],  # not folders of the first level
        ["x/a.png", "x/b.png"],  # a single folder
        ["x/a.png", "y/a.png", "z/a.png"],  # one file per folder, as in folders by person
        ["train/a.png", "train/b.png", "test/a.png", "test/b.png"],  # splits
        ["x/a.bin", "x/b.bin", "y/a.bin", "y/b.bin"],  # not media
    ],
)
def test_no_label_hint_where_folders_are_not_classes(paths: list[str], tmp_path: Path) -> None:
    source = write_files(tmp_path / "in", {path: path.encode() for path in paths})
    assert "label" not in brim("plan", source).stdout


def test_label_hint_for_classes_in_splits(tmp_path: Path) -> None:
    paths = [f"{split}/{name}/{i}.png" for split in ("train", "test") for name in "xy" for i in range(2)]
    source = write_files(tmp_path / "in", {path: path.encode() for path in paths})
    assert "2 folders (x, y)" in brim("plan", source).stdout


def test_table_column_is_renamed_and_encoded_as_class_label(table: Path, tmp_path: Path) -> None:
    brim("build", table, tmp_path / "out", "--files", "image=path", "--label-from", "kind", "--quiet")
    schema = pq.read_schema(tmp_path / "out" / "data" / "train-00000-of-00001.parquet")
    assert schema.names == ["image", "kind", "number"]
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert features["kind"] == {"names": ["bird", "cat", "dog"], "_type": "ClassLabel"}
    assert features["image"] == {"_type": "Image"}
    assert labels(tmp_path / "out", "kind") == [1, 1, 2, 2, 0, 0]
    brim("verify", tmp_path / "out", table)
    typed = api.plan(table, files=["scan=path:file"])
    assert typed.facts["columns"]["scan"]["type"] == "file"


def test_metadata_column_is_renamed_and_encoded_as_class_label(photos: Path) -> None:
    rows = "".join(f"{path},{path.split('/')[0]}\n" for path in CLASSES)
    write_files(photos, {"metadata.csv": f"file_name,kind\n{rows}".encode()})
    table = api.files(photos, column="photo=file_name", label_from="kind")  # type: ignore[arg-type]
    assert table.rows.column_names == ["photo", "kind"]
    assert table.features is not None
    assert table.features["kind"]["names"] == ["bird", "cat", "dog"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--files kind=path", "already has a column 'kind'"),
        ("--files image=paths", "'paths', which the table does not have"),
        ("--label-from number", "holds int64, not texts"),
        ("--label-from path", "holds files or splits"),
        ("--label-from kind --split-by kind", "holds files or splits"),
        ("--label-from parent", "'parent', which the table does not have"),
    ],
)
def test_columns_that_cannot_be_renamed_or_labels(options: str, message: str, table: Path, tmp_path: Path) -> None:
    assert message in brim("build", table, tmp_path / "out", *options.split(), check=2).stderr


def test_folder_takes_no_columns_of_tables(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can only be used with a table"):
        api.build(photos, tmp_path / "out", files=["image=path"])
    assert "--label-from parent" in brim("plan", photos, "--label-from", "kind", check=2).stderr


def test_appended_table_rows_use_the_classes_of_the_dataset(table: Path, tmp_path: Path) -> None:
    brim("build", table, tmp_path / "out", "--label-from", "kind", "--quiet")
    write_files(tmp_path, {"photos/dog/9.png": b"9", "u.csv": b"path,kind,number\nphotos/dog/9.png,dog,7\n"})
    brim("build", tmp_path / "u.csv", tmp_path / "out", "--label-from", "kind", "--append", "--quiet")
    assert labels(tmp_path / "out", "kind") == [1, 1, 2, 2, 0, 0, 2]
    brim("verify", tmp_path / "out", tmp_path / "u.csv")


def test_append_names_all_new_classes_and_the_command_that_adds_them(photos: Path, tmp_path: Path) -> None:
    brim("build", photos, tmp_path / "out", "--label-from", "parent", "--quiet")
    new = write_files(tmp_path / "new", {"fox/1.png": b"f", "ape/1.png": b"a", "cat/9.png": b"c"})
    result = brim("build", new, tmp_path / "out", "--label-from", "parent", "--append", check=2)
    assert "'label' has new classes: ape, fox." in result.stderr
    assert "--drop" not in result.stderr
    assert "brim build SOURCE DEST --label-from parent --update" in result.stderr
    write_files(photos, {"fox/1.png": b"f"})
    brim("build", photos, tmp_path / "out", "--label-from", "parent", "--update", "--quiet")
    assert labels(tmp_path / "out") == [0, 0, 1, 1, 2, 2, 3]


def test_append_without_labels_hints_at_label_from_not_at_drop(photos: Path, tmp_path: Path) -> None:
    """A hint for appending to labeled data suggests --label-from and not --drop, which is refused for a folder."""
    brim("build", photos, tmp_path / "out", "--label-from", "parent", "--quiet")
    result = brim("build", photos, tmp_path / "out", "--append", check=2)
    assert "--drop" not in result.stderr
    assert "--label-from parent" in result.stderr
    brim("build", photos, tmp_path / "plain", "--quiet")
    result = brim("build", photos, tmp_path / "plain", "--append", "--label-from", "parent", check=2)
    assert "--drop" not in result.stderr
    assert "Leave out --label-from" in result.stderr


def test_append_of_a_table_hints_at_drop(table: Path, tmp_path: Path) -> None:
    brim("build", table, tmp_path / "out", "--drop", "number", "--quiet")
    with pytest.raises(BrimError, match="'number' is new") as caught:
        api.build(table, tmp_path / "out", append=True)
    assert "drop='number'" in caught.value.hint


def test_info_shows_class_names(photos: Path, tmp_path: Path) -> None:
    api.build(photos, tmp_path / "out", label_from="parent")
    actual = api.info(tmp_path / "out", head=3)
    assert "label: ClassLabel(3: bird, cat, dog)" in str(actual)
    assert [row["label"] for row in actual.head] == ["bird", "bird", "cat"]
    column = json.loads(brim("info", tmp_path / "out", "--json").stdout)["columns"][1]
    assert column["type"] == "int64"  # the type is unchanged, and the names are added to it
    assert column["classes"] == ["bird", "cat", "dog"]


def test_too_many_or_no_class_names(table: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("brim.sources.table_source._MOST_CLASSES", 2)
    with pytest.raises(SourceError, match="3 distinct texts"):
        api.plan(table, label_from="kind")  # type: ignore[arg-type]


def test_shard_size_below_1_mb_is_noted(photos: Path, tmp_path: Path) -> None:
    note = "--shard-size 100 is 100 bytes. Did you mean 100MB?"
    assert note in brim("plan", photos, "--shard-size", "100").stdout
    assert note in brim("build", photos, tmp_path / "out", "--shard-size", "100").stderr
    assert "below 1.00 MB are slow" in brim("plan", photos, "--shard-size", "500KB").stdout
    assert "Did you mean" not in brim("plan", photos, "--shard-size", "1MB").stdout
