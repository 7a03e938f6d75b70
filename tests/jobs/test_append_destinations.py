"""`--append` wherever it goes: a folder, a bucket, the Hub, a bucket of the Hub. Killed, beside others, and polled."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import random_bytes, write_files
from tests.forked import Process, start
from tests.guarantees.injection import Fault, Shim
from tests.hub import TestHub
from tests.places import BucketPlace, FolderPlace, HubBucketPlace, HubPlace, Place, listing, run
from tests.s3 import FaultProxy, S3Server

ROWS = ("--rows-per-shard", "2", "--workers", "1")
PLACES = ("folder", "bucket", "hub", "hubbucket")
RECEIPT = 5  # which line of the ledger a run is held at: some new shards are there, others are not


def files(folder: Path, start: int, stop: int, size: int = 20_000) -> Path:
    return write_files(folder, {f"f{i:03d}.bin": random_bytes(size + i, i) for i in range(start, stop)})


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TestHub]:
    with TestHub(tmp_path / "hub", xet=True) as hub:
        yield hub


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return FolderPlace(tmp_path / "out")
    if request.param == "hub":
        return HubPlace(request.getfixturevalue("hub"), tmp_path / "machine")
    if request.param == "hubbucket":
        return HubBucketPlace(request.getfixturevalue("hub"), tmp_path / "machine")
    prefix = request.getfixturevalue("s3_prefix").rstrip("/")
    return BucketPlace(request.getfixturevalue("s3"), tmp_path / "machine", prefix)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    shim = Shim.build(tmp_path_factory.mktemp("shim"))
    if shim is None:
        pytest.skip("jobs that are caught in their middle are not proved here: that takes Linux and a C compiler")
    return shim


def shown_by(content: dict[str, bytes]) -> list[str]:
    """The shards that whoever reads the card loads; a name that is not there is an error, as for `load_dataset`."""
    front = yaml.safe_load(content["README.md"].decode().split("---\n")[1])
    found: list[str] = []
    for entry in front["configs"][0]["data_files"]:
        for pattern in entry["path"] if isinstance(entry["path"], list) else [entry["path"]]:
            start, star, end = pattern.partition("*")
            names = [n for n in content if n.startswith(start) and n.endswith(end)] if star else [pattern]
            assert names, pattern
            assert all(name in content for name in names), names
            found += names
    return sorted(found)


def test_a_bucket(s3: S3Server, s3_proxy: FaultProxy, s3_prefix: str, tmp_path: Path) -> None:
    """From another machine, without the old source: old shards stay as they are, numbers go on, only new bytes are
    sent, of the old ones a footer is read; rows and card are those of a build of everything; nothing twice."""
    prefix = s3_prefix.rstrip("/")
    place = BucketPlace(s3, tmp_path / "machine", prefix)
    run(place, "build", files(tmp_path / "old", 0, 4, 900_000), place.address, *ROWS, "--quiet")
    before = listing(place)
    other = BucketPlace(s3, tmp_path / "other", prefix, s3_proxy)
    new = files(tmp_path / "new", 4, 7, 900_000)
    run(other, "build", new, other.address, *ROWS, "--append", "--quiet")
    after = listing(place)
    assert before.items() < after.items()
    assert sorted(after.keys() - before) == [f"data/train-0000{i}-of-00004.parquet" for i in (2, 3)]
    new_bytes = sum(after[name][0] for name in after.keys() - before)
    sent = sum(one.sent_bytes for one in s3_proxy.requests)
    assert new_bytes <= sent <= 1.01 * new_bytes
    read = [one for one in s3_proxy.requests if one.method == "GET" and one.path.endswith(".parquet")]
    assert sum(one.received_bytes for one in read) <= 64 << 10
    every = FolderPlace(tmp_path / "every")
    run(every, "build", files(tmp_path / "all", 0, 7, 900_000), every.address, *ROWS, "--quiet")
    assert [told for _, told in sorted(after.items())] == [told for _, told in sorted(listing(every).items())]
    assert place.content()["README.md"] == every.content()["README.md"]
    again = run(other, "build", new, other.address, *ROWS, "--append")
    assert "these rows exist already" in again.stderr
    assert listing(place) == after
    run(other, "verify", other.address, new, "--deep", "--quiet")
    run(other, "verify", other.address, tmp_path / "old", "--quiet")


def test_killed_and_continued(place: Place, shim: Shim, tmp_path: Path) -> None:
    """Killed while it notes a receipt: readers have the old rows, and the same command does the rest."""
    run(place, "build", files(tmp_path / "old", 0, 4), place.address, *ROWS, "--quiet")
    before = shown_by(place.content())
    new = files(tmp_path / "new", 4, 16)
    process = caught(place, shim, "build", new, place.address, *ROWS, "--append", "--quiet")
    process.kill()
    process.wait()
    assert shown_by(place.content()) == before
    done = run(place, "build", new, place.address, *ROWS, "--append", "--json")
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["shards"] == 8
    assert 2 < told["kept"] < 8, "what the killed run had done"
    assert len(shown_by(place.content())) == 8
    every = FolderPlace(tmp_path / "every")
    run(every, "build", files(tmp_path / "all", 0, 16), every.address, *ROWS, "--quiet")
    assert sorted(listing(place).values()) == sorted(listing(every).values())
    run(place, "verify", place.address, new, "--deep", "--quiet")


def test_readers(place: Place, tmp_path: Path) -> None:
    """Whoever polls while rows are appended loads the old shards or all of them, and never another number."""
    run(place, "build", files(tmp_path / "old", 0, 4), place.address, *ROWS, "--quiet")
    seen: list[int] = []
    over = threading.Event()

    def poll() -> None:
        while not over.is_set():
            seen.append(len(shown_by(place.content())))

    failed: list[BaseException] = []
    reader = threading.Thread(target=told(poll, failed))
    reader.start()
    run(place, "build", files(tmp_path / "new", 4, 24), place.address, *ROWS, "--append", "--quiet")
    over.set()
    reader.join()
    assert not failed, failed
    assert set(seen) <= {2, 12}
    assert seen[0] == 2
    assert len(shown_by(place.content())) == 12


@pytest.mark.long
@pytest.mark.parametrize("place", ["folder", "bucket", "hubbucket"], indirect=True)  # of the Hub: test_append.py
def test_two_writers(place: Place, shim: Shim, tmp_path: Path) -> None:
    """While one appends, another is told so, and can go on afterwards: no row is lost or twice."""
    run(place, "build", files(tmp_path / "old", 0, 4), place.address, *ROWS, "--quiet")
    one, two = files(tmp_path / "one", 4, 12), files(tmp_path / "two", 12, 16)
    process = caught(place, shim, "build", one, place.address, *ROWS, "--append", "--quiet")
    try:
        second = elsewhere(place, tmp_path)
        said = run(second, "build", two, place.address, *ROWS, "--append", check=2).stderr
        assert "Another brim" in said, said
    finally:
        shim.release()
    assert process.wait() == 0
    run(elsewhere(place, tmp_path), "build", two, place.address, *ROWS, "--append", "--quiet")
    assert len(shown_by(place.content())) == 8
    back = tmp_path / "back"
    run(place, "unpack", place.address, back, "--quiet")
    assert sorted(path.name for path in back.iterdir()) == [f"f{i:03d}.bin" for i in range(16)]
    run(place, "verify", place.address, "--quiet")


def caught(place: Place, shim: Shim, *words: str | Path) -> Process:
    """A command that is held while it notes a receipt."""
    folder = place.folder  # type: ignore[attr-defined]
    variables = shim.variables(Fault("fsync", RECEIPT, "hold", "*/ledger.jsonl"), [folder])
    process = start(*words, env=place.environment | variables, preload=str(shim.library))
    until = time.monotonic() + 60
    while not shim.fired:
        assert process.poll() is None, "it ended before its first receipt"
        assert time.monotonic() < until, "it came to no receipt"
        time.sleep(0.01)
    return process


def elsewhere(place: Place, tmp_path: Path) -> Place:
    """The same place, from another machine; a folder is on this one."""
    if isinstance(place, BucketPlace):
        return BucketPlace(place.server, tmp_path / "other", place.prefix)
    if isinstance(place, HubBucketPlace):
        return HubBucketPlace(place.hub, tmp_path / "other", place.prefix)
    return place


def told(work: Callable[[], None], failed: list[BaseException]) -> Callable[[], None]:
    def run_it() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  what a thread raises is the test's to tell
            failed.append(error)

    return run_it
