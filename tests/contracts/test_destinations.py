"""What every destination promises, whichever it is: a folder, the Hub, a bucket."""

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
from tests.hub import TestHub
from tests.places import BucketPlace, FolderPlace, HubBucketPlace, HubPlace, Listing, Place, listing, run, start
from tests.s3 import S3Server

SHARDS = ("--shard-size", "1MB")


@pytest.fixture(params=["folder", "hub", "bucket", "hubbucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "folder":
        yield FolderPlace(tmp_path / "out")
    elif request.param == "hub":
        with TestHub(tmp_path / "hub") as hub:
            yield HubPlace(hub, tmp_path / "machine")
    elif request.param == "hubbucket":
        with TestHub(tmp_path / "hub", xet=True) as hub:
            yield HubBucketPlace(hub, tmp_path / "machine")
    else:
        server: S3Server = request.getfixturevalue("s3")
        yield BucketPlace(server, tmp_path / "machine", request.getfixturevalue("s3_prefix").rstrip("/"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards of two files each."""
    contents = {f"{n}.bin": random_bytes(400_000, n) for n in range(10)}
    return write_files(tmp_path_factory.mktemp("source"), contents)


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Listing:
    place = FolderPlace(tmp_path_factory.mktemp("expected") / "out")
    run(place, "build", source, place.address, "--quiet", *SHARDS)
    return listing(place)


class TestEveryDestination:
    """The contract of sinks."""

    def test_build_again_verify_unpack(self, place: Place, source: Path, expected: Listing, tmp_path: Path) -> None:
        first = run(place, "build", source, place.address, "--json", *SHARDS)
        assert listing(place) == expected
        assert json.loads(first.stdout.splitlines()[-1])["written"] == 5
        before = place.content()
        again = json.loads(run(place, "build", source, place.address, "--json", *SHARDS).stdout.splitlines()[-1])
        assert (again["written"], again["kept"]) == (0, 5)
        assert place.content() == before
        done = run(place, "verify", place.address, source, "--deep", "--json")
        assert json.loads(done.stdout.splitlines()[-1])["files_compared"] == 10
        run(place, "unpack", place.address, tmp_path / "back")
        assert tree_digest(tmp_path / "back") == tree_digest(source)

    def test_update_keeps_what_is_unchanged(self, place: Place, source: Path, tmp_path: Path) -> None:
        grown = write_files(tmp_path / "grown", {path.name: path.read_bytes() for path in source.iterdir()})
        run(place, "build", grown, place.address, "--quiet", *SHARDS)
        write_files(grown, {"a.bin": random_bytes(700_000, 77)})  # in the middle: later shards change their names
        refused = run(place, "build", grown, place.address, *SHARDS, check=2)
        assert "--update" in refused.stderr
        updated = run(place, "build", grown, place.address, "--update", "--json", *SHARDS)
        assert json.loads(updated.stdout.splitlines()[-1])["kept"] >= 4
        run(place, "verify", place.address, grown, "--deep", "--quiet")
        fresh = FolderPlace(tmp_path / "fresh")
        run(fresh, "build", grown, fresh.address, "--quiet", *SHARDS)
        assert listing(place) == listing(fresh)

    def test_killed_and_run_again(self, place: Place, source: Path, expected: Listing) -> None:
        for pause_s in (0.75, 0.95, 1.15):
            process = start(place, "build", source, place.address, "--quiet", *SHARDS)
            time.sleep(pause_s)
            process.send_signal(signal.SIGKILL)
            process.wait()
        run(place, "build", source, place.address, "--quiet", *SHARDS)
        assert listing(place) == expected
        run(place, "verify", place.address, source, "--quiet")

    @pytest.mark.parametrize("name", ["data/theirs.parquet", "data/train-00001-of-00005.parquet"])
    def test_strangers_are_refused(self, place: Place, source: Path, name: str) -> None:
        """Also where they are called as a shard will be."""
        place.plant(name, b"theirs")
        refused = run(place, "build", source, place.address, *SHARDS, check=2)
        assert name in refused.stderr
        assert {path: size for path, (size, _) in listing(place).items()} == {name: len(b"theirs")}

    def test_damage_is_found(self, place: Place, source: Path) -> None:
        run(place, "build", source, place.address, "--quiet", *SHARDS)
        name, data = next((n, d) for n, d in place.content().items() if n.startswith("data/"))
        place.plant(name, data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
        found = run(place, "verify", place.address, check=3)
        assert name in found.stderr
        assert "1 problem found" in found.stderr

    def test_changed_source_is_not_committed(self, place: Place, source: Path, tmp_path: Path) -> None:
        """The plan is made; a file changes before its shard is read."""
        moving = write_files(tmp_path / "moving", {path.name: path.read_bytes() for path in source.iterdir()})
        code = (
            "import brim, sys\n"
            "plan = brim.plan(sys.argv[1], sys.argv[2], shard_size='1MB')\n"
            "open(sys.argv[1] + '/9.bin', 'ab').write(b'more')\n"
            "try:\n    plan.run()\nexcept brim.errors.SourceChangedError as error:\n    sys.exit(error.facts['path'])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(moving), place.address],
            env=place.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stderr.strip().splitlines()[-1] == "9.bin"
        assert not any("00004-of" in name for name in place.content())
