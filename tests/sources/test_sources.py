"""Folders and tables as sources: values that must not be lost, mixed up or guessed wrongly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim as api
from brim.errors import InputError, SourceError
from tests.conftest import random_bytes, started, tree_digest, write_files
from tests.forked import brim


def rows_of(out: Path) -> list[dict[str, Any]]:
    return pq.read_table(out / "data").to_pylist()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    names = [f"{split}/{kind}/{i}.png" for split in ("train", "test") for kind in ("cat", "dog") for i in range(2)]
    return write_files(tmp_path / "pictures", {name: name.encode() for name in names})


def test_labels_beside_metadata(pictures: Path, tmp_path: Path) -> None:
    """With metadata.csv, labels come from the file of each row, whichever column is first."""
    lines = [f"{9 - i},{path.relative_to(pictures)}" for i, path in enumerate(sorted(pictures.rglob("*.png")))]
    for header in ("id,file_name", "caption,file_name"):
        (pictures / "metadata.csv").write_text(header + "\n" + "\n".join(lines) + "\n")
        out = tmp_path / header.split(",")[0]
        brim("build", pictures, out, "--label-from", "parent")
        for row in rows_of(out):
            assert ["cat", "dog"][row["label"]] == row["image"]["path"].split("/")[1]


def test_splits_of_a_metadata_file_at_the_top(pictures: Path) -> None:
    """Rows belong to the split of the folder that contains their file."""
    paths = sorted(str(path.relative_to(pictures)) for path in pictures.rglob("*.png"))
    (pictures / "metadata.csv").write_text("file_name\n" + "\n".join(paths) + "\n")
    assert json.loads(brim("plan", pictures, "--json").stdout)["splits"] == {"train": 4, "test": 4}
    entry = json.loads(brim("plan", pictures, "--json", "--split", "train").stdout)
    assert entry["splits"] == {"train": 8}


def test_files_without_a_row_are_counted(tmp_path: Path) -> None:
    """Files that metadata.csv does not list are reported as left out, also text files."""
    source = write_files(tmp_path / "source", {f"{i}.txt": b"x" * 9 for i in range(4)})
    (source / "metadata.csv").write_text("file_name\n1.txt\n2.txt\n")
    assert "2 sidecars that no column takes: 2 .txt, for example 0.txt" in brim("plan", source).stdout
    assert json.loads(brim("plan", source, "--json", "--exclude", "metadata.csv").stdout)["rows"] == 4


def test_an_open_quote_loses_no_rows(tmp_path: Path) -> None:
    """An unclosed quote is an error. A quote inside a cell is allowed."""
    source = write_files(tmp_path / "source", {"a.bin": b"a", "b.bin": b"b"})
    (source / "t.csv").write_text('f,n\na.bin,"x\nb.bin,y\n')
    assert "never closed" in brim("plan", source / "t.csv", check=2).stderr
    (source / "t.csv").write_text('f,n\na.bin,5" pipe\nb.bin,y\n')
    assert json.loads(brim("plan", source / "t.csv", "--json").stdout)["rows"] == 2


def test_ids_keep_their_digits(tmp_path: Path) -> None:
    """Numbers that would lose digits stay text."""
    source = write_files(tmp_path / "source", {"a.bin": b"a", "b.bin": b"b"})
    (source / "t.csv").write_text(
        "f,long,zero,plain\na.bin,12345678901234567890,007,1.5\nb.bin,12345678901234567891,12.5,2\n"
    )
    brim("build", source / "t.csv", tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert [row["long"] for row in rows] == ["12345678901234567890", "12345678901234567891"]
    assert [row["zero"] for row in rows] == ["007", "12.5"]
    assert [row["plain"] for row in rows] == [1.5, 2.0]


def test_unreachable_links_are_refused(tmp_path: Path) -> None:
    """A link through a path that is not a folder counts as missing, and the walk does not loop."""
    source = write_files(tmp_path / "source", {"a.bin": b"a"})
    (source / "broken.bin").symlink_to("a.bin/nothing")
    assert "broken.bin" in brim("build", source, tmp_path / "out", check=2).stderr
    assert json.loads(brim("plan", source, "--limit", "1", "--json").stdout)["rows"] == 1


def test_the_python_interface_takes_one_or_many(tmp_path: Path) -> None:
    """Arguments accept a single string or a list, and rows as dicts may have different keys."""
    source = write_files(tmp_path / "source", {"a.png": b"a", "b.jpg": b"b"})
    assert len(api.files(source, include="*.jpg")) == 1
    assert len(api.files(source, exclude="*.jpg")) == 1
    table = api.table([{"file": "a.png"}, {"file": "b.jpg", "caption": "x"}], files="file", root=source)
    assert table.rows.column("caption").to_pylist() == [None, "x"]
    import pandas

    frame = pandas.DataFrame({"file": ["a.png"]}, index=pandas.Index(["s1"], name="subject"))
    assert api.table(frame, root=source).rows.column("subject").to_pylist() == ["s1"]


def test_columns_that_look_like_files(tmp_path: Path) -> None:
    """Columns with the structure or a name like a file column stay metadata if they are not declared as files."""
    source = write_files(tmp_path / "source", {"a.bin": b"aaa", "b.bin": b"bb"})
    rows = pa.table(
        {
            "file.path": ["x", "y"],
            "thumb": pa.array(
                [{"bytes": b"t", "path": "p"}, None], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            ),
            "odd": pa.array(
                [{"bytes": 1, "path": "p"}, None], pa.struct([("bytes", pa.int64()), ("path", pa.string())])
            ),
            "a": pa.array([{"b.path": "q"}, None]),
            "file": ["a.bin", "b.bin"],
            "a.b": ["b.bin", "a.bin"],
        }
    )
    pq.write_table(rows, source / "t.parquet")
    out = tmp_path / "out"
    brim("build", source / "t.parquet", out, "--files", "file", "--files", "a.b")
    assert "4 files are inside" in brim("verify", out, source / "t.parquet").stdout
    brim("unpack", out, tmp_path / "back")
    assert set(tree_digest(tmp_path / "back")) == {"a.bin", "b.bin"}
    assert rows_of(out)[0]["thumb"] == {"bytes": b"t", "path": "p"}


def test_two_spellings_of_a_path(tmp_path: Path) -> None:
    """a.bin and ./a.bin are the same file, and `..` after a link is resolved as by the kernel."""
    source = write_files(tmp_path / "source", {"a.bin": b"outer", "deep/sub/x": b"x", "deep/a.bin": b"inner"})
    (source / "link").symlink_to("deep/sub")
    (source / "t.csv").write_text("f\na.bin\n./a.bin\nlink/../a.bin\n")
    brim("build", source / "t.csv", tmp_path / "out")
    brim("verify", tmp_path / "out", source / "t.csv")
    assert [row["f"]["bytes"] for row in rows_of(tmp_path / "out")] == [b"outer", b"outer", b"inner"]


def test_the_printed_command_works(tmp_path: Path) -> None:
    """The printed command for verifying a build can be pasted, also with --root and spaces in names."""
    files = write_files(tmp_path / "my files", {"a.bin": b"a"})
    (tmp_path / "my table.csv").write_text("f\na.bin\n")
    result = brim("build", "my table.csv", "my out", "--root", files, cwd=tmp_path)
    command = next(line.split("verify with", 1)[1] for line in result.stdout.splitlines() if "verify with" in line)
    program = f"{sys.executable} -m {command.strip()}"
    assert subprocess.run(program, shell=True, cwd=tmp_path, check=False).returncode == 0


def test_nested_paths_stay_home(tmp_path: Path) -> None:
    """Absolute paths inside lists, structs, dictionaries and texts are refused too."""
    source = write_files(tmp_path / "source", {"a.bin": b"a"})
    destination = f"{source}/a.bin"
    for values in (
        pa.array([[destination]]),
        pa.array([{"x": destination}]),
        pa.array([destination]).dictionary_encode(),
        pa.array([f"src={destination}"]),
    ):
        table = api.table(pa.table({"f": ["a.bin"], "origin": values}), files="f", root=source)
        with pytest.raises(InputError, match="origin"):
            api.plan(table)
    with pytest.raises(InputError, match="relative"):
        api.files(source, exclude=[f"{source}/a*"])


def test_appended_rows_leave_the_cuts_alone(tmp_path: Path) -> None:
    """Appended rows with longer texts do not move the cuts between earlier shards."""
    source = write_files(tmp_path / "source", {"a.bin": random_bytes(20)})
    rows = [{"f": "a.bin", "text": "x" * (i % 50)} for i in range(1000)]
    out = tmp_path / "out"
    first = api.build(api.table(rows, files="f", root=source), out, shard_size="20KB")
    extra = [*rows, *({"f": "a.bin", "text": "y" * 900} for _ in range(30))]
    second = api.build(api.table(extra, files="f", root=source), out, shard_size="20KB", update=True)
    assert second.kept >= first.shards - 1


def test_bytes_depend_on_values_alone(tmp_path: Path) -> None:
    """Other dictionary orders, chunks or slices of the same values give the same bytes."""
    source = write_files(tmp_path / "source", {"a.bin": b"a", "b.bin": b"b"})
    indices = [0, 1]
    tables = [
        pa.table({"f": ["a.bin", "b.bin"], "k": pa.DictionaryArray.from_arrays(indices, ["x", "y"])}),
        pa.table({"f": ["a.bin", "b.bin"], "k": pa.DictionaryArray.from_arrays([2, 0], ["y", "unused", "x"])}),
    ]
    tables.append(pa.concat_tables([tables[0].slice(0, 1), tables[0].slice(1, 1)]))
    observed = []
    for number, table in enumerate(tables):
        plan = api.plan(api.table(table, files="f:file", root=source), tmp_path / f"out{number}")
        plan.run()
        observed.append((plan.plan.fingerprint, tree_digest(tmp_path / f"out{number}")))
    assert observed[0] == observed[1] == observed[2]


def test_required_columns_views_and_odd_names(tmp_path: Path) -> None:
    """Required columns with empty cells, lists of views, and column names with special characters are read."""
    source = write_files(tmp_path / "source", {"a.bin": b"a"})
    schema = pa.schema([pa.field("a: b", pa.string(), nullable=False), pa.field("v", pa.list_(pa.string_view()))])
    rows = pa.table({"a: b": ["a.bin", ""], "v": [["x"], []]}, schema=schema)
    api.build(api.table(rows, files=["a: b"], root=source), tmp_path / "out")
    assert rows_of(tmp_path / "out")[1] == {"a: b": None, "v": []}
    with pytest.raises(InputError, match="column of files"):
        api.table(rows, files=["a: b"], root=source, split_by="a: b")


def test_features_are_obeyed_or_refused(tmp_path: Path) -> None:
    """Values are cast to the specified features, and features that do not fit are refused."""
    source = write_files(tmp_path / "source", {"a.png": b"a"})
    rows = [{"f": "a.png", "n": "3", "kind": "dog"}]
    features = {
        "f": {"_type": "Image"},
        "n": {"dtype": "int32", "_type": "Value"},
        "kind": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    }
    api.build(api.table(rows, features=features, root=source), tmp_path / "out")
    assert rows_of(tmp_path / "out")[0]["n"] == 3
    assert rows_of(tmp_path / "out")[0]["kind"] == 1
    wrong: list[dict[str, Any]] = [
        {"f": {"feature": {"_type": "Image"}, "_type": "List"}},
        {"f": {"_type": "Image"}, "kind": {"dtype": "int64", "_type": "Value"}},
        {"f": {"_type": "Image"}, "kind": {"names": ["cat"], "_type": "ClassLabel"}},
    ]
    for case in wrong:
        with pytest.raises((InputError, SourceError)):
            api.table(rows, features=case, root=source)


def test_webdataset_of_odd_values(tmp_path: Path) -> None:
    """In WebDataset shards, nanoseconds and times become text, and reserved column names are refused."""
    source = write_files(tmp_path / "source", {"a.bin": b"a"})
    rows = pa.table(
        {
            "f": ["a.bin"],
            "when": pa.array([1], pa.timestamp("ns")),
            "long": pa.array([5], pa.duration("ns")),
            "clock": pa.array([7], pa.time64("ns")),
        }
    )
    pq.write_table(rows, source / "t.parquet")
    brim("build", source / "t.parquet", tmp_path / "out", "--format", "webdataset")
    brim("verify", tmp_path / "out", source / "t.parquet")
    pq.write_table(rows.append_column("__files__", pa.array(["x"])), source / "t.parquet")
    assert "__files__" in brim("plan", source / "t.parquet", "--format", "webdataset", check=2).stderr


def test_cards_in_other_forms(tmp_path: Path) -> None:
    """`brim verify` finds cards that `load_dataset` cannot read, and the same build repairs them."""
    source, out = write_files(tmp_path / "source", {"a.bin": b"a"}), tmp_path / "out"
    brim("build", source, out)
    card = out / "README.md"
    for front in (
        "configs:\n- data_files: data/*.parquet\n",
        "configs: 5\n",
        "dataset_info:\n- splits: []\n",
        "[1, 2]\n",
    ):
        card.write_text(f"---\n{front}---\ntext\n")
        assert "README.md" in brim("verify", out, check=3).stderr
        brim("build", source, out)
        brim("verify", out)
    card.write_bytes(b"\xef\xbb\xbf---\nlicense: mit\n---\nMine\n")
    brim("build", source, out)
    assert card.read_text().startswith("---\nlicense: mit\n")
    card.write_bytes(b"\xff\xfe")
    assert "README.md" in brim("build", source, out, check=2).stderr
    card.unlink()
    card.mkdir()
    assert "README.md" in brim("build", source, out, check=2).stderr


def test_state_that_cannot_be_used(tmp_path: Path) -> None:
    """A state folder that is a file, or a destination below a file, is an input error."""
    source = write_files(tmp_path / "source", {"a.bin": b"a"})
    (tmp_path / "file").write_bytes(b"x")
    assert "--state" in brim("build", source, tmp_path / "out", "--state", tmp_path / "file", check=2).stderr
    brim("build", source, tmp_path / "file" / "below", check=2)
    (tmp_path / "linked").symlink_to(source)
    assert "source itself" in brim("build", source, tmp_path / "linked", check=2).stderr
    assert "is a folder" in brim("build", source, tmp_path / "new", "--stop-file", tmp_path, check=2).stderr


def test_a_destination_inside_the_source_with_its_ledger_elsewhere(tmp_path: Path) -> None:
    """A destination inside the source is not packaged by the next run, even with a separate state folder."""
    source = write_files(tmp_path / "source", {"a.bin": b"a"})
    for _ in range(2):
        brim("build", source, source / "out", "--state", tmp_path / "state")
    assert len(rows_of(source / "out")) == 1


def test_streams_that_go_away(tmp_path: Path) -> None:
    """A closed pipe or closed streams do not stop a build, and terminals with ASCII encoding work."""
    source = write_files(tmp_path / "source", {f"{i}.bin": b"a" for i in range(40)})
    program = f"{sys.executable} -m brim"
    out = tmp_path / "out"
    pipe = f"set -o pipefail; {program} build {source} {out} --json --rows-per-shard 1 | head -1"
    assert subprocess.run(["bash", "-c", pipe], capture_output=True, check=False).returncode == 0
    brim("verify", out)
    for closed in ("2>&-", ">&-", "--json >&-"):
        shell = f"{program} build {source} {tmp_path / 'two'} {closed}"
        assert subprocess.run(["bash", "-c", shell], capture_output=True, check=False).returncode == 0
    plain = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert "2 to 3 ?" in started("plan", source, env=plain).stdout


@pytest.mark.parametrize(
    "options",
    [["--limit", "9" * 20], ["--shard-size", "9" * 17 + "PB"], ["--memory", "9" * 400], ["--rows-per-shard", "9" * 30]],
)
def test_absurd_numbers(tmp_path: Path, options: list[str]) -> None:
    """Numbers that are too large for any machine are input errors."""
    source = write_files(tmp_path / "source", {"a.bin": b"a"})
    brim("plan", source, *options, check=2)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    """A table in Latin-1 is refused instead of being read as bytes."""
    source = write_files(tmp_path / "source", {"a.bin": b"a", "t.csv": "f,name\na.bin,Jos\xe9\n".encode("latin-1")})
    assert "UTF-8" in brim("plan", source / "t.csv", check=2).stderr


def test_reserved_split_names(tmp_path: Path) -> None:
    """A split name that `datasets` cannot load is refused."""
    source = write_files(tmp_path / "source", {"a.bin": b"a"})
    assert "'all'" in brim("plan", source, "--split", "all", check=2).stderr
