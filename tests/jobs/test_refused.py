"""A refused job leaves no files at its destination, and the error names the actual cause."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import brim
from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.row_files import RowOptions
from brim.errors import BrimError, DestinationError, InputError, MemoryLimitError, SourceError

ROWS = "".join(f'{{"text": "row {number}"}}\n' for number in range(1000))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.bin").write_bytes(b"a" * 100)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    (tmp_path / "same.py").write_text("def same(row):\n    return row\n")
    (tmp_path / "model.py").write_text("def make(**options):\n    raise ValueError('no')\n")
    return tmp_path


def everything(folder: Path) -> dict[str, bytes | None]:
    """Return all names below a folder with the content of the files."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def brim_command(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "brim", *arguments]
    return subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("build files ./new/DEST --stop-file files", 2),
        ("build files ./new/DEST --state rows.jsonl", 2),
        ("build files ./new/DEST --memory 1MB", 4),
        ("map rows.jsonl ./new/DEST --fn same.py:same --memory 1MB", 4),
        ("map rows.jsonl ./new/DEST --fn same.py:same --stop-file files", 2),
        ("embed rows.jsonl ./new/DEST --column text --model model.py:make", 2),
        ("embed rows.jsonl DEST.npy --column text --model model.py:make", 2),
        ("unpack files ./new/DEST", 2),
    ],
)
def test_what_is_refused_leaves_nothing(home: Path, arguments: str, code: int) -> None:
    """A refused job creates neither the destination, nor its parent folders, nor a ledger next to it."""
    before = everything(home)
    result = brim_command(home, *arguments.split())
    assert result.returncode == code, result.stderr
    before_names = {name for name in before if "__pycache__" not in name}
    assert {name for name in everything(home) if "__pycache__" not in name} == before_names


@pytest.mark.parametrize("arguments", ["build files DEST", "map rows.jsonl DEST --fn same.py:same"])
def test_a_stranger_with_the_name_of_a_shard_stays(home: Path, arguments: str) -> None:
    """A foreign file is not replaced, even if it has the name of the first shard."""
    theirs = home / "DEST" / "data" / "train-00000-of-00001.parquet"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"not brim's")
    result = brim_command(home, *arguments.split())
    assert result.returncode == 2, result.stderr
    assert "did not write" in result.stderr
    assert theirs.read_bytes() == b"not brim's"


@pytest.mark.parametrize(
    "arguments",
    ["build files DEST", "map rows.jsonl DEST --fn same.py:same", "build files files", "map rows.jsonl files"],
)
def test_a_folder_with_something_else_stays_as_it_is(home: Path, arguments: str) -> None:
    """Foreign files among the shards, or the source itself, are refused, and nothing is written next to them."""
    (home / "DEST" / "data").mkdir(parents=True)
    (home / "DEST" / "data" / "other.parquet").write_bytes(b"another program")
    command = [*arguments.split(), *(["--fn", "same.py:same"] if arguments.endswith("jsonl files") else [])]
    before = {location: everything(home / location) for location in ("DEST", "files")}
    if arguments.endswith("jsonl files"):
        shutil.copy(home / "rows.jsonl", home / "files" / "rows.jsonl")
        (home / "files" / "a.bin").unlink()
        command[1], before["files"] = "files", everything(home / "files")
    result = brim_command(home, *command)
    assert result.returncode == 2, result.stderr
    assert {address: everything(home / address) for address in ("DEST", "files")} == before


def test_another_dataset_stays_as_it_is(home: Path) -> None:
    """A job that may not replace a finished dataset leaves it unchanged."""
    brim.build(home / "files", home / "DEST")
    before = everything(home / "DEST")
    (home / "files" / "b.bin").write_bytes(b"b")
    with pytest.raises(DestinationError):
        brim.build(home / "files", home / "DEST")
    result = brim_command(home, "map", "rows.jsonl", "DEST", "--fn", "same.py:same")
    assert result.returncode == 2, result.stderr
    assert everything(home / "DEST") == before


@pytest.mark.parametrize(
    "arguments", ["build files DEST", "embed rows.jsonl DEST --column text --model model.py:make2"]
)
def test_what_another_verb_made_is_named_in_a_line(home: Path, arguments: str) -> None:
    """A dataset of another command is reported in one line, because its fingerprint inputs cannot be compared."""
    (home / "model.py").write_text("def make2(**options):\n    return lambda texts: [[1.0] for _ in texts]\n")
    brim.map(home / "rows.jsonl", None, destination=home / "DEST", state=home / "books")
    result = brim_command(home, *arguments.split(), "--state", "books")
    assert result.returncode == 2, result.stderr
    assert "another dataset: it was made by another command.\n" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "map rows.jsonl DEST --fn same.py:same --report rows.html",  # the log of this report would be rows.jsonl
        "build files DEST --report same.py",
        "build files DEST --report rows.jsonl",
        "run --report same.py -- true",
        "lab map --report rows.html",
        "report run.jsonl rows.jsonl same.py",
        "map rows.jsonl DEST --fn same.py:same --save rows.jsonl",
        "plan files DEST --save files/a.bin",
        "plan bids DEST --save-recipe bids/participants.tsv",
    ],
)
def test_reports_logs_and_plans_replace_nothing_else(home: Path, arguments: str) -> None:
    """Reports, logs and plans never replace a source or a foreign file, even if only the log would have its name."""
    (home / "bids" / "sub-1" / "anat").mkdir(parents=True)
    (home / "bids" / "sub-1" / "anat" / "sub-1_T1w.nii").write_bytes(b"a")
    (home / "bids" / "dataset_description.json").write_text('{"Name": "n", "BIDSVersion": "1.8.0"}')
    (home / "bids" / "participants.tsv").write_text("participant_id\nsub-1\n")
    before = everything(home)
    result = brim_command(home, *arguments.split())
    assert result.returncode == 2, result.stderr
    assert {name: data for name, data in everything(home).items() if name in before} == before


def test_a_busy_destination_is_left_to_who_has_it(home: Path) -> None:
    """A run that does not get the lock of a new destination removes nothing that the other run created."""
    from brim.jobs.destination_paths import dataset_paths
    from brim.jobs.job_lock import CreatedFolders, make_folders
    from brim.jobs.publish_options import PublishOptions
    from brim.state.lock import locked
    from brim.storage.location import folder_location

    dest = home / "DEST"
    paths = dataset_paths(folder_location(dest), None, PublishOptions())
    late = CreatedFolders(paths)  # checks for folders before the other run creates them
    make_folders(paths)
    with locked(dest / ".brim"):
        before = everything(dest)
        with pytest.raises(DestinationError, match="Another brim"):
            brim.build(home / "files", dest)
        late.remove_empty()
        assert {*before} - {*everything(dest)} <= {"data"}  # the next writer creates it again


def test_a_limit_that_is_too_small_leaves_nothing(home: Path) -> None:
    """A limit that is too small is refused without leaving files, also from Python."""
    with pytest.raises(MemoryLimitError):
        brim.build(home / "files", home / "new" / "DEST", memory="1MB")
    assert not (home / "new").exists()


def test_a_source_that_goes_is_blamed_itself(home: Path) -> None:
    """If a source file disappears while units are read, the error names the source file."""
    rows = open_rows(home / "rows.jsonl", RowOptions(unit_size=1000))
    (home / "rows.jsonl").unlink()
    with pytest.raises(SourceError, match=r"rows\.jsonl.* cannot be read"):
        list(rows.units(1))


def test_rows_that_fail_to_come_are_blamed_themselves(home: Path) -> None:
    """An operating system error in an iterator of the caller is reported as an error of the source."""

    def rows():  # type: ignore[no-untyped-def]
        yield from ({"n": n, "text": "x" * 1000} for n in range(20_000))
        raise PermissionError(13, os.strerror(13), "/somewhere/else")

    with pytest.raises(InputError, match="cannot be read") as caught:
        brim.map(rows, lambda row: row, cache_dir=home / "cache", name="mine")
    assert "destination" not in str(caught.value)


def test_a_model_that_cannot_be_read_is_not_the_destination(home: Path) -> None:
    """An operating system error in a worker blames the destination only if it concerns the output."""
    (home / "model.py").write_text("def make(**options):\n    open('/nowhere/at/all')\n")
    result = brim_command(home, "embed", "rows.jsonl", "DEST", "--column", "text", "--model", "model.py:make")
    assert result.returncode == 2, result.stderr
    assert "/nowhere/at/all" in result.stderr
    assert "destination" not in result.stderr


def test_check_takes_a_path(home: Path) -> None:
    """`brim.check` accepts paths of folders and tables, as the command does, and finds missing files."""
    assert brim.check(home / "files").ok
    (home / "t.csv").write_text("f\nfiles/a.bin\nfiles/b.bin\n")
    report = brim.check(str(home / "t.csv"))
    assert [item.name for item in report.failed] == ["exists and can be read"]
    assert report.failed[0].failed == ["files/b.bin"]
    with pytest.raises(BrimError, match="does not exist"):
        brim.check(home / "nothing")


def test_a_waiting_stop_file_is_refused_before_a_source_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command with a stop file refuses an existing one before it reads the source.

    The sources of this test do not exist. Planning alone ignores stop files.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    requested, own, concurrent = (
        tmp_path / "asked",
        tmp_path / "out" / ".brim" / "stop",
        tmp_path / ".v.npy.brim" / "stop",
    )
    calls = [
        lambda to, **o: brim.build("none", to, **o),
        lambda to, **o: brim.select("none", to, **o),
        lambda to, **o: brim.map("none.jsonl", "none:f", destination=to, **o),
        lambda to, **o: brim.tokenize("none.jsonl", "none.json", destination=to, **o),
        lambda to, **o: brim.embed("none.jsonl", "none:f", destination=to, column="text", **o),
    ]
    for file in (requested, own, concurrent):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for call in calls:
        with pytest.raises(InputError, match=r"The stop file .*asked.* already exists"):
            call("new", stop_file=requested)
        with pytest.raises(InputError, match=r"The stop file .*out.*stop.* already exists"):
            call("out")
    with pytest.raises(InputError, match=r"The stop file .*v\.npy\.brim.* already exists"):
        calls[-1]("v.npy")
    with pytest.raises(InputError, match="asked"):
        brim.open_plan("none.plan", stop_file=requested)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.bin").write_bytes(b"a")
    assert len(brim.plan("files", "out").plan.shards) == 1
    assert [path.exists() for path in (requested, own, concurrent)] == [True] * 3


def test_the_state_of_another_unfinished_job(home: Path) -> None:
    """A --state folder with an unfinished job for another destination is refused.

    It can be used with --fresh, or after that job has finished.
    """
    arguments = (
        "map rows.jsonl DEST --fn late.py:late --unit-size 4KB --batch-size 50 --workers 1 --state books --quiet"
    )
    (home / "late.py").write_text(
        "import os\ndef late(row):\n    assert row['text'] != 'row 999' or os.path.exists('go')\n    return row\n"
    )

    def run(destination: str, *more: str) -> subprocess.CompletedProcess[str]:
        return brim_command(home, *arguments.replace("DEST", destination).split(), *more)

    assert run("first").returncode == 2
    refused = run("second")
    assert refused.returncode == 2
    assert f"unfinished job for '{home / 'first'}'" in refused.stderr
    assert "another --state" in refused.stderr
    assert not (home / "second").exists()
    (home / "go").touch()
    assert run("first").returncode == 0
    assert run("second", "--fresh").returncode == 0
    assert everything(home / "second" / "data") == everything(home / "first" / "data")
