"""SIGKILL between a shard and its receipt: the file counts as brim's own, and every option can resume from it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from brim.state.ledger import JobRecord, Ledger
from tests.conftest import random_bytes, write_files
from tests.destinations import BucketDestination, Destination, FolderDestination, HubDestination, listing, run

OPTIONS = ("--rows-per-shard", "2", "--workers", "1", "--quiet")
KILL = """
import os, signal, sys
from brim.state.ledger import Ledger
real, left = Ledger.add, [int(sys.argv[1])]
def add(self, receipt):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, receipt)
Ledger.add = add
sys.argv = ["brim", *sys.argv[2:]]
from brim.cli import main
main()
"""


def files(folder: Path, start: int, stop: int, seed: int = 0) -> Path:
    return write_files(folder, {f"f{i:03d}.bin": random_bytes(5000 + i, seed + i) for i in range(start, stop)})


@pytest.fixture(params=["folder", "bucket", "hub"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> Destination:
    if request.param == "folder":
        return FolderDestination(tmp_path / "out")
    if request.param == "hub":
        return HubDestination(request.getfixturevalue("hub"), tmp_path / "machine")
    prefix = request.getfixturevalue("s3_prefix").rstrip("/")
    return BucketDestination(request.getfixturevalue("s3"), tmp_path / "machine", prefix)


def killed(destination: Destination, receipts: int, *arguments: str | Path) -> None:
    """Run a command that is killed after this number of receipts, when the next shard already has its name."""
    command = [sys.executable, "-c", KILL, str(receipts), *map(str, arguments)]
    result = subprocess.run(
        command, env=destination.environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == -signal.SIGKILL, result.stderr


def expected(tmp_path: Path, source: Path, *options: str) -> dict[str, tuple[int, str]]:
    whole = FolderDestination(tmp_path / "whole")
    run(whole, "build", source, whole.address, *(options or OPTIONS))
    return listing(whole)


@pytest.mark.parametrize("receipts", [0, 3])
@pytest.mark.parametrize("option", ["--fresh", "--update"])
def test_fresh_and_update_continue_from_a_shard_without_receipt(
    destination: Destination, option: str, receipts: int, tmp_path: Path
) -> None:
    """--fresh and --update replace the shards, also with another number of rows per shard."""
    source = files(tmp_path / "source", 0, 10)
    killed(destination, receipts, "build", source, destination.address, *OPTIONS)
    if not isinstance(destination, HubDestination):
        assert len(listing(destination)) == receipts + 1
    second = ("--rows-per-shard", "3", "--quiet")
    run(destination, "build", source, destination.address, *second, option)
    assert listing(destination) == expected(tmp_path, source, *second)
    run(destination, "verify", destination.address, source, "--quiet")


@pytest.mark.parametrize("destination", ["folder", "bucket"], indirect=True)
def test_fresh_continues_after_two_kills_in_a_row(destination: Destination, tmp_path: Path) -> None:
    source = files(tmp_path / "source", 0, 10)
    killed(destination, 2, "build", source, destination.address, *OPTIONS)
    killed(destination, 1, "build", source, destination.address, "--rows-per-shard", "3", "--workers", "1", "--update")
    run(destination, "build", source, destination.address, "--rows-per-shard", "4", "--quiet", "--fresh")
    assert listing(destination) == expected(tmp_path, source, "--rows-per-shard", "4", "--quiet")


def test_append_of_other_rows_continues_from_a_shard_without_receipt(destination: Destination, tmp_path: Path) -> None:
    run(destination, "build", files(tmp_path / "old", 0, 4), destination.address, *OPTIONS)
    killed(destination, 1, "build", files(tmp_path / "new", 4, 10), destination.address, *OPTIONS, "--append")
    run(destination, "build", files(tmp_path / "other", 20, 22), destination.address, *OPTIONS, "--append")
    back = tmp_path / "back"
    run(destination, "unpack", destination.address, back, "--quiet")
    assert sorted(path.name for path in back.iterdir()) == [f"f{i:03d}.bin" for i in (0, 1, 2, 3, 20, 21)]
    run(destination, "verify", destination.address, "--quiet")


@pytest.mark.parametrize("destination", ["folder", "bucket"], indirect=True)
def test_map_fresh_continues_from_a_shard_without_receipt(destination: Destination, tmp_path: Path) -> None:
    """--fresh with another number of rows per shard gives the new number of shards."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(30)))
    (tmp_path / "step.py").write_text("def same(row):\n    return row\n")
    arguments = ("map", tmp_path / "rows.jsonl", destination.address, "--fn", tmp_path / "step.py:same", "--quiet")
    killed(destination, 2, *arguments, "--rows-per-shard", "5", "--workers", "1")
    assert listing(destination)
    run(destination, *arguments, "--rows-per-shard", "7", "--fresh")
    assert {name.split("-of-")[1] for name in listing(destination)} == {"00005.parquet"}
    run(destination, "verify", destination.address, "--quiet")


@pytest.mark.parametrize("destination", ["folder", "bucket"], indirect=True)
@pytest.mark.parametrize("option", ["--fresh", "--update"])
def test_foreign_file_is_refused_before_anything_is_removed(
    destination: Destination, option: str, tmp_path: Path
) -> None:
    source = files(tmp_path / "source", 0, 10)
    run(destination, "build", source, destination.address, *OPTIONS)
    destination.plant("data/mine.parquet", b"mine")
    before = destination.content()
    result = run(destination, "build", source, destination.address, "--rows-per-shard", "3", option, check=2)
    assert "brim did not write" in result.stderr
    assert destination.content() == before


def test_shards_of_an_earlier_version_are_known_by_its_receipts(tmp_path: Path) -> None:
    """--fresh accepts a shard without a receipt next to a ledger that does not list the planned names.

    The ledger has the job and 29 receipts of 40 shards; the 30th shard has no receipt.
    """
    source, out = files(tmp_path / "source", 0, 40), tmp_path / "out"
    destination = FolderDestination(out)
    run(destination, "build", source, out, "--rows-per-shard", "1", "--quiet")
    ledger = out / ".brim" / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:30]))
    for number in range(30, 40):
        (out / "data" / f"train-{number:05d}-of-00040.parquet").unlink()
    (out / "README.md").unlink()
    run(destination, "build", source, out, *OPTIONS, "--fresh")
    assert listing(destination) == expected(tmp_path, source)


def test_ledger_tells_planned_names_from_others(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    names = [f"data/train-{number:05d}-of-00003.parquet" for number in range(3)]
    ledger.start_job(JobRecord("f" * 64, {}, {}), names)
    foreign = ["data/train-00003-of-00003.parquet", "data/train-00000-of-00002.parquet", "data/x.parquet"]
    assert Ledger(tmp_path).planned_names([*names, *foreign]) == names
    ledger.finish([])
    assert Ledger(tmp_path).planned_names(names) == []


@pytest.mark.parametrize("destination", ["folder", "bucket"], indirect=True)
@pytest.mark.parametrize("option", ["--append", "--update", "--fresh"])
def test_refused_for_an_unreadable_card_changes_nothing(destination: Destination, option: str, tmp_path: Path) -> None:
    run(destination, "build", files(tmp_path / "old", 0, 4), destination.address, *OPTIONS)
    readable = destination.content()["README.md"]
    destination.plant("README.md", b"\xff\xfe")
    before = destination.content()
    run(destination, "build", files(tmp_path / "new", 4, 8), destination.address, *OPTIONS, option, check=2)
    assert destination.content() == before
    destination.plant("README.md", readable)
    run(destination, "verify", destination.address, tmp_path / "old", "--quiet")
