"""`--append` to a folder, a bucket, the Hub and a bucket on the Hub: killed, concurrent, and while readers poll."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import random_bytes, write_files
from tests.destinations import (
    BucketDestination,
    Destination,
    FolderDestination,
    HubBucketDestination,
    HubDestination,
    listing,
    run,
)
from tests.forked import Process, start
from tests.guarantees.injection import Fault, Shim
from tests.hub import TestHub
from tests.s3 import FaultProxy, S3Server

ROWS = ("--rows-per-shard", "2", "--workers", "1")
DESTINATIONS = ("folder", "bucket", "hub", "hubbucket")
RECEIPT = 5  # the number of the receipt at which a run is held, between its new shards


def files(folder: Path, start: int, stop: int, size: int = 20_000) -> Path:
    return write_files(folder, {f"f{i:03d}.bin": random_bytes(size + i, i) for i in range(start, stop)})


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TestHub]:
    with TestHub(tmp_path / "hub", xet=True) as hub:
        yield hub


@pytest.fixture(params=DESTINATIONS)
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> Destination:
    if request.param == "folder":
        return FolderDestination(tmp_path / "out")
    if request.param == "hub":
        return HubDestination(request.getfixturevalue("hub"), tmp_path / "machine")
    if request.param == "hubbucket":
        return HubBucketDestination(request.getfixturevalue("hub"), tmp_path / "machine")
    prefix = request.getfixturevalue("s3_prefix").rstrip("/")
    return BucketDestination(request.getfixturevalue("s3"), tmp_path / "machine", prefix)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    shim = Shim.build(tmp_path_factory.mktemp("shim"))
    if shim is None:
        pytest.skip("jobs that are caught in their middle are not proved here: that takes Linux and a C compiler")
    return shim


def shown_by(content: dict[str, bytes]) -> list[str]:
    """Return the shards that the card loads. A missing shard is an error, as for `load_dataset`."""
    front = yaml.safe_load(content["README.md"].decode().split("---\n")[1])
    actual: list[str] = []
    for entry in front["configs"][0]["data_files"]:
        for pattern in entry["path"] if isinstance(entry["path"], list) else [entry["path"]]:
            start, star, end = pattern.partition("*")
            names = [n for n in content if n.startswith(start) and n.endswith(end)] if star else [pattern]
            assert names, pattern
            assert all(name in content for name in names), names
            actual += names
    return sorted(actual)


def test_a_bucket(s3: S3Server, s3_proxy: FaultProxy, s3_prefix: str, tmp_path: Path) -> None:
    """An append to a bucket uploads only new shards and gives the rows and the card of one complete build.

    It works from another machine without the old source, and of the old shards it reads only a footer.
    """
    prefix = s3_prefix.rstrip("/")
    destination = BucketDestination(s3, tmp_path / "machine", prefix)
    run(destination, "build", files(tmp_path / "old", 0, 4, 900_000), destination.address, *ROWS, "--quiet")
    before = listing(destination)
    second = BucketDestination(s3, tmp_path / "other", prefix, s3_proxy)
    new = files(tmp_path / "new", 4, 7, 900_000)
    run(second, "build", new, second.address, *ROWS, "--append", "--quiet")
    after = listing(destination)
    assert before.items() < after.items()
    assert sorted(after.keys() - before) == [f"data/train-0000{i}-of-00004.parquet" for i in (2, 3)]
    new_bytes = sum(after[name][0] for name in after.keys() - before)
    sent = sum(request.sent_bytes for request in s3_proxy.requests)
    assert new_bytes <= sent <= 1.01 * new_bytes
    read = [one for one in s3_proxy.requests if one.method == "GET" and one.path.endswith(".parquet")]
    assert sum(item.received_bytes for item in read) <= 64 << 10
    every = FolderDestination(tmp_path / "every")
    run(every, "build", files(tmp_path / "all", 0, 7, 900_000), every.address, *ROWS, "--quiet")
    assert [message for _, message in sorted(after.items())] == [entry for _, entry in sorted(listing(every).items())]
    assert destination.content()["README.md"] == every.content()["README.md"]
    repeated = run(second, "build", new, second.address, *ROWS, "--append")
    assert "these rows exist already" in repeated.stderr
    assert listing(destination) == after
    run(second, "verify", second.address, new, "--deep", "--quiet")
    run(second, "verify", second.address, tmp_path / "old", "--quiet")


def test_killed_and_continued(destination: Destination, shim: Shim, tmp_path: Path) -> None:
    """After a kill, readers still get the old rows, and the same command appends the rest."""
    run(destination, "build", files(tmp_path / "old", 0, 4), destination.address, *ROWS, "--quiet")
    before = shown_by(destination.content())
    new = files(tmp_path / "new", 4, 16)
    process = caught(destination, shim, "build", new, destination.address, *ROWS, "--append", "--quiet")
    process.kill()
    process.wait()
    assert shown_by(destination.content()) == before
    result = run(destination, "build", new, destination.address, *ROWS, "--append", "--json")
    output = json.loads(result.stdout.splitlines()[-1])
    assert output["shards"] == 8
    assert 2 < output["kept"] < 8, "what the killed run had done"
    assert len(shown_by(destination.content())) == 8
    every = FolderDestination(tmp_path / "every")
    run(every, "build", files(tmp_path / "all", 0, 16), every.address, *ROWS, "--quiet")
    assert sorted(listing(destination).values()) == sorted(listing(every).values())
    run(destination, "verify", destination.address, new, "--deep", "--quiet")


def test_readers(destination: Destination, tmp_path: Path) -> None:
    """While rows are appended, readers load either the old shards or all shards."""
    run(destination, "build", files(tmp_path / "old", 0, 4), destination.address, *ROWS, "--quiet")
    observed: list[int] = []
    over = threading.Event()

    def poll() -> None:
        while not over.is_set():
            observed.append(len(shown_by(destination.content())))

    failed: list[BaseException] = []
    reader = threading.Thread(target=told(poll, failed))
    reader.start()
    run(destination, "build", files(tmp_path / "new", 4, 24), destination.address, *ROWS, "--append", "--quiet")
    over.set()
    reader.join()
    assert not failed, failed
    assert set(observed) <= {2, 12}
    assert observed[0] == 2
    assert len(shown_by(destination.content())) == 12


@pytest.mark.long
@pytest.mark.parametrize("destination", ["folder", "bucket", "hubbucket"], indirect=True)  # of the Hub: test_append.py
def test_two_writers(destination: Destination, shim: Shim, tmp_path: Path) -> None:
    """While one run appends, a second one is refused. Repeated afterwards, it appends its rows exactly once."""
    run(destination, "build", files(tmp_path / "old", 0, 4), destination.address, *ROWS, "--quiet")
    first, two = files(tmp_path / "one", 4, 12), files(tmp_path / "two", 12, 16)
    process = caught(destination, shim, "build", first, destination.address, *ROWS, "--append", "--quiet")
    try:
        second = elsewhere(destination, tmp_path)
        error_output = run(second, "build", two, destination.address, *ROWS, "--append", check=2).stderr
        assert "Another brim" in error_output, error_output
    finally:
        shim.release()
    assert process.wait() == 0
    run(elsewhere(destination, tmp_path), "build", two, destination.address, *ROWS, "--append", "--quiet")
    assert len(shown_by(destination.content())) == 8
    back = tmp_path / "back"
    run(destination, "unpack", destination.address, back, "--quiet")
    assert sorted(path.name for path in back.iterdir()) == [f"f{i:03d}.bin" for i in range(16)]
    run(destination, "verify", destination.address, "--quiet")


def caught(destination: Destination, shim: Shim, *arguments: str | Path) -> Process:
    """Start a command and return its process once it is held at the receipt."""
    folder = destination.folder  # type: ignore[attr-defined]
    variables = shim.variables(Fault("fsync", RECEIPT, "hold", "*/ledger.jsonl"), [folder])
    process = start(*arguments, env=destination.environment | variables, preload=str(shim.library))
    until = time.monotonic() + 60
    while not shim.fired:
        assert process.poll() is None, "it ended before its first receipt"
        assert time.monotonic() < until, "it came to no receipt"
        time.sleep(0.01)
    return process


def elsewhere(destination: Destination, tmp_path: Path) -> Destination:
    """Return the same destination as seen from another machine, except for a folder."""
    if isinstance(destination, BucketDestination):
        return BucketDestination(destination.server, tmp_path / "other", destination.prefix)
    if isinstance(destination, HubBucketDestination):
        return HubBucketDestination(destination.hub, tmp_path / "other", destination.prefix)
    return destination


def told(work: Callable[[], None], failed: list[BaseException]) -> Callable[[], None]:
    def run_it() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  what a thread raises is the test's to tell
            failed.append(error)

    return run_it
