"""Storage buckets of the Hub (hf://buckets/ORG/NAME/PREFIX) as destination and source, with the real clients."""

from __future__ import annotations

import gzip
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peak import measure
from brim.errors import InputError
from brim.storage.location import is_dataset_address, is_object_address, parse_location, split_address
from brim.storage.xet import SEGMENT_BYTES
from tests.conftest import random_bytes, tree_digest, write_files
from tests.destinations import FolderDestination, HubBucketDestination, listing, run, start
from tests.forked import Process, brim
from tests.generators.small_jobs import MODEL, TOKENIZER
from tests.hub import TestHub
from tests.publishing import Machine
from tests.s3 import FaultProxy

BUCKET = "ada/things"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TestHub]:
    with TestHub(tmp_path / "hub", xet=True, page_size=3) as hub:
        yield hub


@pytest.fixture
def destination(hub: TestHub, tmp_path: Path) -> HubBucketDestination:
    return HubBucketDestination(hub, tmp_path / "machine")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_files(tmp_path / "source", {f"f{i}.bin": random_bytes(300_000 + i, i) for i in range(8)})


ROWS = ("--rows-per-shard", "2")


def test_built_verified_unpacked(destination: HubBucketDestination, source: Path, tmp_path: Path) -> None:
    """A bucket gets the same files as a folder, and verifies, unpacks and loads like one.

    The token is sent only to the Hub: the test server of its storage refuses it.
    """
    result = run(destination, "build", source, destination.address, *ROWS)
    assert f"made the private bucket hf://buckets/{BUCKET}" in result.stderr
    assert "heeds no conditions" in result.stderr
    assert destination.hub.buckets[BUCKET].private
    local = FolderDestination(tmp_path / "out")
    run(local, "build", source, local.address, "--quiet", *ROWS)
    assert listing(destination) == listing(local)
    reread = json.loads(run(destination, "build", source, destination.address, "--json", *ROWS).stdout.splitlines()[-1])
    assert (reread["written"], reread["kept"]) == (0, 4)
    assert "sizes and ETags are those noted" in run(destination, "verify", destination.address).stdout
    deep = run(destination, "verify", destination.address, source, "--deep", "--json")
    assert json.loads(deep.stdout.splitlines()[-1])["files_compared"] == 8
    run(destination, "unpack", destination.address, tmp_path / "back", "--quiet")
    assert tree_digest(tmp_path / "back") == tree_digest(source)
    assert not any("/.brim/check-" in name for name in destination.hub.buckets[BUCKET].files)
    load = next(line for line in result.stdout.splitlines() if " load " in line).split("load  ")[1]
    observed = Machine(destination.hub, destination.folder, more={"HF_HUB_DISABLE_XET": "0"}).python(f"""
        import datasets
        print(*[cell["path"] for cell in {load}["train"]["file"]])
    """)
    assert observed.stdout.split() == [f"f{i}.bin" for i in range(8)]


def stalled(destination: HubBucketDestination, source: Path) -> Process:
    """Start a build that has uploaded shards and waits for a silent Hub."""
    destination.hub.faults.add("bucket-batch", nth=7, action="stall", seconds=60)
    process = start(destination, "build", source, destination.address, "--quiet", *ROWS, "--workers", "1")
    until = time.monotonic() + 60
    while destination.hub.counters.requests["bucket-batch"] < 7 and time.monotonic() < until:
        time.sleep(0.05)
    return process


def test_stopped_while_the_hub_is_silent(destination: HubBucketDestination, source: Path) -> None:
    process = stalled(destination, source)
    process.send_signal(signal.SIGTERM)
    requested_at = time.monotonic()
    assert process.wait(60) == 6
    assert time.monotonic() - requested_at < 6  # 2 s on an idle machine


def test_by_way_of_a_mirror(destination: HubBucketDestination, source: Path, tmp_path: Path) -> None:
    """A listing through a mirror continues at the address of the Hub without missing files."""
    run(destination, "build", source, destination.address, "--quiet", "--rows-per-shard", "1")
    with FaultProxy(destination.hub.endpoint) as mirror:
        position = Machine(destination.hub, destination.folder, more={"HF_ENDPOINT": mirror.endpoint})
        brim("unpack", destination.address, tmp_path / "back", "--quiet", env=position.environment)
    assert tree_digest(tmp_path / "back") == tree_digest(source)


def test_killed_and_continued(destination: HubBucketDestination, source: Path, tmp_path: Path) -> None:
    """Uploads of a killed run are kept. Until the build is complete, `brim verify` reports it as unfinished."""
    process = stalled(destination, source)
    process.send_signal(signal.SIGKILL)
    process.wait()
    destination.hub.faults.clear()
    assert "unfinished" in run(destination, "verify", destination.address, check=3).stderr
    content = json.loads(
        run(destination, "build", source, destination.address, "--json", *ROWS).stdout.splitlines()[-1]
    )
    assert content["kept"] > 0
    local = FolderDestination(tmp_path / "out")
    run(local, "build", source, local.address, "--quiet", *ROWS)
    assert listing(destination) == listing(local)
    run(destination, "verify", destination.address, source, "--quiet")


def test_selected_mapped_appended(destination: HubBucketDestination, source: Path, tmp_path: Path) -> None:
    """Rows can be selected from a bucket, mapped into one, and appended to one."""
    run(destination, "build", source, destination.address, "--quiet", *ROWS)
    run(destination, "select", destination.address, tmp_path / "some", "--limit", "3", "--quiet")
    run(destination, "unpack", tmp_path / "some", tmp_path / "back", "--quiet")
    first = {f"f{i}.bin": (source / f"f{i}.bin").read_bytes() for i in range(3)}
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == first

    write_files(tmp_path, {"steps.py": b"def longer(row):\n    return {'length': len(row['text'])}\n"})
    write_files(tmp_path, {"rows.jsonl": b"".join(b'{"text": "row %d"}\n' % n for n in range(100))})
    function = ("--fn", f"{tmp_path / 'steps.py'}:longer", "--quiet", "--memory", "600MB")
    local, existing = (
        FolderDestination(tmp_path / "mapped"),
        HubBucketDestination(destination.hub, destination.folder, "mapped"),
    )
    run(local, "map", tmp_path / "rows.jsonl", local.address, *function)
    run(existing, "map", tmp_path / "rows.jsonl", existing.address, *function)
    assert listing(existing) == listing(local)

    before = listing(destination)
    more_files = write_files(tmp_path / "more", {f"g{i}.bin": random_bytes(1000, 90 + i) for i in range(2)})
    received_bytes = destination.hub.counters.bytes_received
    run(destination, "build", more_files, destination.address, "--append", "--quiet", *ROWS)
    after = listing(destination)
    assert before.items() < after.items()
    assert len(after) == 5
    assert destination.hub.counters.bytes_received - received_bytes < 50_000
    run(destination, "verify", destination.address, "--quiet")
    run(destination, "verify", destination.address, more_files, "--quiet")


@pytest.mark.slow
def test_rows_from_there_to_there(destination: HubBucketDestination, tmp_path: Path) -> None:
    """Tokens and vectors of rows in a bucket equal those of a local run, and verify."""
    rows = b"".join(b'{"id": %d, "text": "row %d word"}\n' % (n, n) for n in range(300))
    first = rows[: rows.index(b"\n") + 1]
    inputs = {"in/a.jsonl": rows, "in/b c.jsonl": first, "packed/d.jsonl.gz": gzip.compress(rows)}
    destination.plant_all(inputs)
    write_files(tmp_path / "here", inputs)
    write_files(tmp_path, {"model.py": MODEL, "tokenizer.json": TOKENIZER})
    token = ("--tokenizer", tmp_path / "tokenizer.json", "--quiet", "--memory", "600MB")
    vector = ("--model", f"{tmp_path / 'model.py'}:factory", "--column", "text", "--quiet", "--memory", "600MB")
    for verb, rows_of, to, arguments in (
        ("tokenize", "in/*.jsonl", "tokens", token),
        ("tokenize", "packed", "unpacked", token),
        ("embed", "in", "vectors", vector),
    ):
        local, existing = (
            FolderDestination(tmp_path / to),
            HubBucketDestination(destination.hub, destination.folder, f"made/{to}"),
        )
        run(existing, verb, f"{destination.address}/{rows_of}", existing.address, *arguments)
        run(local, verb, tmp_path / "here" / rows_of, local.address, *arguments)
        assert listing(existing) == listing(local)
        run(existing, "verify", existing.address, "--deep", "--quiet")
    run(destination, "embed", f"{destination.address}/in", f"{destination.address}/v.npy", *vector)
    run(destination, "embed", tmp_path / "here" / "in", tmp_path / "v.npy", *vector)
    assert destination.content()["v.npy"] == (tmp_path / "v.npy").read_bytes()


@pytest.mark.slow
def test_parts(destination: HubBucketDestination, source: Path, tmp_path: Path) -> None:
    """Saved plans of files and of rows are computed in parts by machines that share only the bucket."""
    destination.plant("notes.txt", b"a bucket that is there: saving a plan makes none")
    machines = [HubBucketDestination(destination.hub, tmp_path / f"machine{n}") for n in range(3)]
    write_files(tmp_path, {"steps.py": b"def longer(row):\n    return {'length': len(row['text'])}\n"})
    write_files(tmp_path, {"rows.jsonl": b"".join(b'{"text": "row %d"}\n' % n for n in range(400))})
    mapped = (tmp_path / "rows.jsonl", "--fn", f"{tmp_path / 'steps.py'}:longer", "--unit-size", "2KB")
    for verb, arguments, save in (("build", (source, *ROWS), "plan"), ("map", mapped, "map")):
        existing = HubBucketDestination(destination.hub, destination.folder, f"some/{verb}")
        plan = f"hf://buckets/ada/things/{verb}.plan"
        first, *options = arguments
        run(machines[0], save, first, existing.address, *options, "--save", plan)
        for number in (1, 2):
            run(machines[number], verb, "--plan", plan, "--part", f"{number}/2", "--quiet")
        repeated = run(machines[0], verb, "--plan", plan, "--part", "2/2", "--json")
        assert json.loads(repeated.stdout.splitlines()[-1])["written"] == 0
        run(machines[0], verb, "--plan", plan, "--finish", "--quiet")
        local = FolderDestination(tmp_path / f"{verb}-here")
        run(local, verb, first, local.address, *options, "--quiet")
        assert listing(existing) == listing(local)


def test_moved_by_the_hub(destination: HubBucketDestination, source: Path) -> None:
    """A shard with a new number is renamed by the Hub without another upload."""
    run(destination, "build", source, destination.address, "--quiet", *ROWS)
    write_files(source, {"a0.bin": random_bytes(5000, 50), "a1.bin": random_bytes(5000, 51)})
    received_bytes = destination.hub.counters.bytes_received
    run(destination, "build", source, destination.address, "--update", "--quiet", *ROWS)
    assert destination.hub.counters.bytes_received - received_bytes < 100_000
    assert not any("/keep/" in name for name in destination.hub.buckets[BUCKET].files)
    run(destination, "verify", destination.address, source, "--deep", "--quiet")


def test_damage_and_another_object(destination: HubBucketDestination, source: Path) -> None:
    """A replaced object is found by the listing of the bucket."""
    run(destination, "build", source, destination.address, "--quiet", *ROWS)
    name = next(iter(listing(destination)))
    destination.plant(name, b"something else")
    assert name in run(destination, "verify", destination.address, check=3).stderr


def test_files_there_as_source(destination: HubBucketDestination, source: Path, tmp_path: Path) -> None:
    """Objects of another client are packaged as files, also with names that need escapes."""
    names = ["a b.bin", "ü+%25.bin", "c#?=&.bin"]
    destination.plant_all({f"in/{name}": name.encode() * 100 for name in names})
    result = run(destination, "build", f"{destination.address}/in", tmp_path / "out", "--json")
    assert json.loads(result.stdout.splitlines()[-1])["files"] == 3
    run(destination, "unpack", tmp_path / "out", tmp_path / "back", "--quiet")
    assert {p.name: p.read_bytes() for p in (tmp_path / "back").iterdir()} == {n: n.encode() * 100 for n in names}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
@pytest.mark.parametrize("to", ["hf://buckets/ada/things/x", "hf://datasets/ada/data"])
def test_in_pieces(destination: HubBucketDestination, tmp_path: Path, to: str) -> None:
    """A large shard is uploaded once by Xet, in one object, with default settings and less than 150 MB of memory."""
    size, each = 8 * SEGMENT_BYTES, 4 * SEGMENT_BYTES
    source = write_files(tmp_path / "large", {f"{n}.bin": random_bytes(each, n) for n in range(2)})
    via = ["--via", "xet"] if "datasets" in to else []
    result = measure(
        [sys.executable, "-m", "brim", "build", str(source), to, *ROWS[:1], "1", "--quiet", *via],
        env=destination.environment,
    )
    assert result.exit_code == 0, result.output
    assert result.peak_bytes <= 150_000_000
    assert size <= destination.hub.counters.bytes_received < 1.03 * size
    run(destination, "verify", to, source, "--deep", "--quiet")


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ({"status": 403}, 2, "You may not write to"),
        ({"status": 503}, 5, "Run the same command to continue"),
    ],
)
def test_refused(
    destination: HubBucketDestination, source: Path, fault: dict[str, int], code: int, message: str
) -> None:
    """A permanent error has exit code 2 and a transient one exit code 5, after a limited number of attempts."""
    destination.hub.faults.add("bucket-batch", times=99, **fault)  # type: ignore[arg-type]
    result = run(destination, "build", source, destination.address, check=code)
    assert message in result.stderr
    assert "hf_write" not in result.stderr


def test_asked_to_wait(destination: HubBucketDestination, source: Path) -> None:
    """After "too many requests", brim waits as long as the Hub asks, and continues."""
    destination.hub.faults.add("bucket-batch", times=4, status=429, retry_after=1)
    destination.hub.faults.add("bucket-paths", times=2, status=429, retry_after=1)
    run(destination, "build", source, destination.address, "--quiet")
    run(destination, "verify", destination.address, source, "--quiet")


def test_no_such_bucket(destination: HubBucketDestination, tmp_path: Path) -> None:
    assert (
        "The bucket hf://buckets/ada/things does not exist"
        in run(destination, "verify", destination.address, check=2).stderr
    )
    assert "does not exist" in run(destination, "build", destination.address, tmp_path / "out", check=2).stderr
    bad = Machine(destination.hub, destination.folder, token="hf_read")
    source = write_files(tmp_path / "source", {"a": b"1"})
    assert "You may not write" in bad.publish(source, to=destination.address, check=2).stderr


def test_addresses() -> None:
    """Addresses of buckets on the Hub are parsed like other buckets and are not repositories."""
    actual = parse_location("hf://buckets/me/mine/a/b/")
    assert (str(actual), actual.container, actual.prefix, actual.is_hub_bucket) == (
        "hf://buckets/me/mine/a/b",
        "buckets/me/mine",
        "a/b",
        True,
    )
    assert (
        str(split_address("hf://buckets/me/mine/a b.txt", actual.access).child("c")) == "hf://buckets/me/mine/a b.txt/c"
    )
    assert is_object_address("hf://buckets/me/mine")
    assert not is_dataset_address("hf://buckets/me/mine")
    assert not is_object_address("hf://datasets/me/mine")
    for wrong in (
        "hf://buckets/me",
        "hf://buckets/",
        "hf://buckets/me/a@main/x",
        "hf://buckets/me/..",
        "hf://buckets/me/a/../b",
    ):
        with pytest.raises(InputError):
            parse_location(f"hf://buckets/{wrong}")
