"""The guarantees of every destination: a folder, a repository on the Hub, a bucket, and a bucket on the Hub."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import random_bytes, tree_digest, write_files
from tests.destinations import (
    BucketDestination,
    Destination,
    FolderDestination,
    HubBucketDestination,
    HubDestination,
    Listing,
    listing,
    run,
    start,
)
from tests.hub import TestHub
from tests.s3 import S3Server

SHARDS = ("--shard-size", "1MB")


@pytest.fixture(params=["folder", "hub", "bucket", "hubbucket"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Destination]:
    if request.param == "folder":
        yield FolderDestination(tmp_path / "out")
    elif request.param == "hub":
        with TestHub(tmp_path / "hub") as hub:
            yield HubDestination(hub, tmp_path / "machine")
    elif request.param == "hubbucket":
        with TestHub(tmp_path / "hub", xet=True) as hub:
            yield HubBucketDestination(hub, tmp_path / "machine")
    else:
        server: S3Server = request.getfixturevalue("s3")
        yield BucketDestination(server, tmp_path / "machine", request.getfixturevalue("s3_prefix").rstrip("/"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ten files that fill five shards of two files each."""
    contents = {f"{n}.bin": random_bytes(400_000, n) for n in range(10)}
    return write_files(tmp_path_factory.mktemp("source"), contents)


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Listing:
    destination = FolderDestination(tmp_path_factory.mktemp("expected") / "out")
    run(destination, "build", source, destination.address, "--quiet", *SHARDS)
    return listing(destination)


class TestEveryDestination:
    """Every destination builds, updates, verifies, unpacks, resumes and refuses foreign files in the same way."""

    def test_build_again_verify_unpack(
        self, destination: Destination, source: Path, expected: Listing, tmp_path: Path
    ) -> None:
        first = run(destination, "build", source, destination.address, "--json", *SHARDS)
        assert listing(destination) == expected
        assert json.loads(first.stdout.splitlines()[-1])["written"] == 5
        before = destination.content()
        reread = json.loads(
            run(destination, "build", source, destination.address, "--json", *SHARDS).stdout.splitlines()[-1]
        )
        assert (reread["written"], reread["kept"]) == (0, 5)
        assert destination.content() == before
        result = run(destination, "verify", destination.address, source, "--deep", "--json")
        assert json.loads(result.stdout.splitlines()[-1])["files_compared"] == 10
        run(destination, "unpack", destination.address, tmp_path / "back")
        assert tree_digest(tmp_path / "back") == tree_digest(source)

    def test_update_keeps_what_is_unchanged(self, destination: Destination, source: Path, tmp_path: Path) -> None:
        grown = write_files(tmp_path / "grown", {path.name: path.read_bytes() for path in source.iterdir()})
        run(destination, "build", grown, destination.address, "--quiet", *SHARDS)
        # sorts into the middle, so later shards change their names
        write_files(grown, {"a.bin": random_bytes(700_000, 77)})
        refused = run(destination, "build", grown, destination.address, *SHARDS, check=2)
        assert "--update" in refused.stderr
        updated = run(destination, "build", grown, destination.address, "--update", "--json", *SHARDS)
        assert json.loads(updated.stdout.splitlines()[-1])["kept"] >= 4
        run(destination, "verify", destination.address, grown, "--deep", "--quiet")
        fresh = FolderDestination(tmp_path / "fresh")
        run(fresh, "build", grown, fresh.address, "--quiet", *SHARDS)
        assert listing(destination) == listing(fresh)

    def test_killed_and_run_again(self, destination: Destination, source: Path, expected: Listing) -> None:
        for pause_s in (0.75, 0.95, 1.15):
            process = start(destination, "build", source, destination.address, "--quiet", *SHARDS)
            time.sleep(pause_s)
            process.send_signal(signal.SIGKILL)
            process.wait()
        run(destination, "build", source, destination.address, "--quiet", *SHARDS)
        assert listing(destination) == expected
        run(destination, "verify", destination.address, source, "--quiet")

    @pytest.mark.parametrize("name", ["data/theirs.parquet", "data/train-00001-of-00005.parquet"])
    def test_strangers_are_refused(self, destination: Destination, source: Path, name: str) -> None:
        """A build refuses a destination with foreign files, even if one of them has the name of a planned shard."""
        destination.plant(name, b"theirs")
        refused = run(destination, "build", source, destination.address, *SHARDS, check=2)
        assert name in refused.stderr
        assert {path: size for path, (size, _) in listing(destination).items()} == {name: len(b"theirs")}

    def test_damage_is_found(self, destination: Destination, source: Path) -> None:
        run(destination, "build", source, destination.address, "--quiet", *SHARDS)
        name, data = next((n, d) for n, d in destination.content().items() if n.startswith("data/"))
        destination.plant(name, data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
        actual = run(destination, "verify", destination.address, check=3)
        assert name in actual.stderr
        assert "1 problem found" in actual.stderr

    def test_changed_source_is_not_committed(self, destination: Destination, source: Path, tmp_path: Path) -> None:
        """A file that changes between planning and reading is an error, and its shard is not committed."""
        moving = write_files(tmp_path / "moving", {path.name: path.read_bytes() for path in source.iterdir()})
        code = (
            "import brim, sys\n"
            "plan = brim.plan(sys.argv[1], sys.argv[2], shard_size='1MB')\n"
            "open(sys.argv[1] + '/9.bin', 'ab').write(b'more')\n"
            "try:\n    plan.run()\nexcept brim.errors.SourceChangedError as error:\n    sys.exit(error.facts['path'])\n"
        )
        completed = subprocess.run(
            [sys.executable, "-c", code, str(moving), destination.address],
            env=destination.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert completed.stderr.strip().splitlines()[-1] == "9.bin"
        assert not any("00004-of" in name for name in destination.content())
