"""Storage buckets of the Hub, hf://buckets/ORG/NAME/PREFIX, as destination and as source, by the real clients."""

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
from tests.forked import Process, brim
from tests.generators.small_jobs import MODEL, TOKENIZER
from tests.hub import TestHub
from tests.places import FolderPlace, HubBucketPlace, listing, run, start
from tests.publishing import Machine
from tests.s3 import FaultProxy

BUCKET = "ada/things"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TestHub]:
    with TestHub(tmp_path / "hub", xet=True, page_size=3) as hub:
        yield hub


@pytest.fixture
def place(hub: TestHub, tmp_path: Path) -> HubBucketPlace:
    return HubBucketPlace(hub, tmp_path / "machine")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_files(tmp_path / "source", {f"f{i}.bin": random_bytes(300_000 + i, i) for i in range(8)})


ROWS = ("--rows-per-shard", "2")


def test_built_verified_unpacked(place: HubBucketPlace, source: Path, tmp_path: Path) -> None:
    """The bytes of a folder; known again; verified by what it lists and by content; taken back; and the real client
    sees the same. The token went to the Hub alone: its storage refuses it."""
    done = run(place, "build", source, place.address, *ROWS)
    assert f"made the private bucket hf://buckets/{BUCKET}" in done.stderr
    assert "heeds no conditions" in done.stderr
    assert place.hub.buckets[BUCKET].private
    here = FolderPlace(tmp_path / "out")
    run(here, "build", source, here.address, "--quiet", *ROWS)
    assert listing(place) == listing(here)
    again = json.loads(run(place, "build", source, place.address, "--json", *ROWS).stdout.splitlines()[-1])
    assert (again["written"], again["kept"]) == (0, 4)
    assert "sizes and ETags are those noted" in run(place, "verify", place.address).stdout
    deep = run(place, "verify", place.address, source, "--deep", "--json")
    assert json.loads(deep.stdout.splitlines()[-1])["files_compared"] == 8
    run(place, "unpack", place.address, tmp_path / "back", "--quiet")
    assert tree_digest(tmp_path / "back") == tree_digest(source)
    assert not any("/.brim/check-" in name for name in place.hub.buckets[BUCKET].files)
    load = next(line for line in done.stdout.splitlines() if " load " in line).split("load  ")[1]
    seen = Machine(place.hub, place.folder, more={"HF_HUB_DISABLE_XET": "0"}).python(f"""
        import datasets
        print(*[cell["path"] for cell in {load}["train"]["file"]])
    """)
    assert seen.stdout.split() == [f"f{i}.bin" for i in range(8)]


def stalled(place: HubBucketPlace, source: Path) -> Process:
    """A build that has sent shards, and now waits for a Hub that says nothing."""
    place.hub.faults.add("bucket-batch", nth=7, action="stall", seconds=60)
    process = start(place, "build", source, place.address, "--quiet", *ROWS, "--workers", "1")
    until = time.monotonic() + 60
    while place.hub.counters.requests["bucket-batch"] < 7 and time.monotonic() < until:
        time.sleep(0.05)
    return process


def test_stopped_while_the_hub_is_silent(place: HubBucketPlace, source: Path) -> None:
    process = stalled(place, source)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert process.wait(60) == 6
    assert time.monotonic() - asked < 6  # two seconds on a machine that has nothing else to do


def test_by_way_of_a_mirror(place: HubBucketPlace, source: Path, tmp_path: Path) -> None:
    """What it lists goes on at the Hub's own address; nothing is left out for that."""
    run(place, "build", source, place.address, "--quiet", "--rows-per-shard", "1")
    with FaultProxy(place.hub.endpoint) as mirror:
        at = Machine(place.hub, place.folder, more={"HF_ENDPOINT": mirror.endpoint})
        brim("unpack", place.address, tmp_path / "back", "--quiet", env=at.environment)
    assert tree_digest(tmp_path / "back") == tree_digest(source)


def test_killed_and_continued(place: HubBucketPlace, source: Path, tmp_path: Path) -> None:
    """What a killed run has sent stays; a reader sees a card that loads nothing until the last shard is there."""
    process = stalled(place, source)
    process.send_signal(signal.SIGKILL)
    process.wait()
    place.hub.faults.clear()
    assert "unfinished" in run(place, "verify", place.address, check=3).stderr
    done = json.loads(run(place, "build", source, place.address, "--json", *ROWS).stdout.splitlines()[-1])
    assert done["kept"] > 0
    here = FolderPlace(tmp_path / "out")
    run(here, "build", source, here.address, "--quiet", *ROWS)
    assert listing(place) == listing(here)
    run(place, "verify", place.address, source, "--quiet")


def test_selected_mapped_appended(place: HubBucketPlace, source: Path, tmp_path: Path) -> None:
    """Rows chosen from there, rows through a function to there, and more rows behind those that are there."""
    run(place, "build", source, place.address, "--quiet", *ROWS)
    run(place, "select", place.address, tmp_path / "some", "--limit", "3", "--quiet")
    run(place, "unpack", tmp_path / "some", tmp_path / "back", "--quiet")
    first = {f"f{i}.bin": (source / f"f{i}.bin").read_bytes() for i in range(3)}
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == first

    write_files(tmp_path, {"steps.py": b"def longer(row):\n    return {'length': len(row['text'])}\n"})
    write_files(tmp_path, {"rows.jsonl": b"".join(b'{"text": "row %d"}\n' % n for n in range(100))})
    function = ("--fn", f"{tmp_path / 'steps.py'}:longer", "--quiet", "--memory", "600MB")
    here, there = FolderPlace(tmp_path / "mapped"), HubBucketPlace(place.hub, place.folder, "mapped")
    run(here, "map", tmp_path / "rows.jsonl", here.address, *function)
    run(there, "map", tmp_path / "rows.jsonl", there.address, *function)
    assert listing(there) == listing(here)

    before = listing(place)
    more = write_files(tmp_path / "more", {f"g{i}.bin": random_bytes(1000, 90 + i) for i in range(2)})
    received = place.hub.counters.bytes_received
    run(place, "build", more, place.address, "--append", "--quiet", *ROWS)
    after = listing(place)
    assert before.items() < after.items()
    assert len(after) == 5
    assert place.hub.counters.bytes_received - received < 50_000
    run(place, "verify", place.address, "--quiet")
    run(place, "verify", place.address, more, "--quiet")


@pytest.mark.slow
def test_rows_from_there_to_there(place: HubBucketPlace, tmp_path: Path) -> None:
    """Tokens and vectors of rows in a bucket, into it: the bytes that the same rows give here; and they are proved."""
    rows = b"".join(b'{"id": %d, "text": "row %d word"}\n' % (n, n) for n in range(300))
    first = rows[: rows.index(b"\n") + 1]
    given = {"in/a.jsonl": rows, "in/b c.jsonl": first, "packed/d.jsonl.gz": gzip.compress(rows)}
    place.plant_all(given)
    write_files(tmp_path / "here", given)
    write_files(tmp_path, {"model.py": MODEL, "tokenizer.json": TOKENIZER})
    token = ("--tokenizer", tmp_path / "tokenizer.json", "--quiet", "--memory", "600MB")
    vector = ("--model", f"{tmp_path / 'model.py'}:factory", "--column", "text", "--quiet", "--memory", "600MB")
    for verb, rows_of, to, words in (
        ("tokenize", "in/*.jsonl", "tokens", token),
        ("tokenize", "packed", "unpacked", token),
        ("embed", "in", "vectors", vector),
    ):
        here, there = FolderPlace(tmp_path / to), HubBucketPlace(place.hub, place.folder, f"made/{to}")
        run(there, verb, f"{place.address}/{rows_of}", there.address, *words)
        run(here, verb, tmp_path / "here" / rows_of, here.address, *words)
        assert listing(there) == listing(here)
        run(there, "verify", there.address, "--deep", "--quiet")
    run(place, "embed", f"{place.address}/in", f"{place.address}/v.npy", *vector)
    run(place, "embed", tmp_path / "here" / "in", tmp_path / "v.npy", *vector)
    assert place.content()["v.npy"] == (tmp_path / "v.npy").read_bytes()


@pytest.mark.slow
def test_parts(place: HubBucketPlace, source: Path, tmp_path: Path) -> None:
    """A saved plan and its parts, of files and of rows: machines that share nothing but the bucket."""
    place.plant("notes.txt", b"a bucket that is there: saving a plan makes none")
    machines = [HubBucketPlace(place.hub, tmp_path / f"machine{n}") for n in range(3)]
    write_files(tmp_path, {"steps.py": b"def longer(row):\n    return {'length': len(row['text'])}\n"})
    write_files(tmp_path, {"rows.jsonl": b"".join(b'{"text": "row %d"}\n' % n for n in range(400))})
    mapped = (tmp_path / "rows.jsonl", "--fn", f"{tmp_path / 'steps.py'}:longer", "--unit-size", "2KB")
    for verb, words, save in (("build", (source, *ROWS), "plan"), ("map", mapped, "map")):
        there = HubBucketPlace(place.hub, place.folder, f"some/{verb}")
        plan = f"hf://buckets/ada/things/{verb}.plan"
        first, *options = words
        run(machines[0], save, first, there.address, *options, "--save", plan)
        for number in (1, 2):
            run(machines[number], verb, "--plan", plan, "--part", f"{number}/2", "--quiet")
        again = run(machines[0], verb, "--plan", plan, "--part", "2/2", "--json")
        assert json.loads(again.stdout.splitlines()[-1])["written"] == 0
        run(machines[0], verb, "--plan", plan, "--finish", "--quiet")
        here = FolderPlace(tmp_path / f"{verb}-here")
        run(here, verb, first, here.address, *options, "--quiet")
        assert listing(there) == listing(here)


def test_moved_by_the_hub(place: HubBucketPlace, source: Path) -> None:
    """A shard whose number changes gets its other name from the Hub: nothing is sent again."""
    run(place, "build", source, place.address, "--quiet", *ROWS)
    write_files(source, {"a0.bin": random_bytes(5000, 50), "a1.bin": random_bytes(5000, 51)})
    received = place.hub.counters.bytes_received
    run(place, "build", source, place.address, "--update", "--quiet", *ROWS)
    assert place.hub.counters.bytes_received - received < 100_000
    assert not any("/keep/" in name for name in place.hub.buckets[BUCKET].files)
    run(place, "verify", place.address, source, "--deep", "--quiet")


def test_damage_and_another_object(place: HubBucketPlace, source: Path) -> None:
    """An object that somebody replaced is found by what the bucket lists."""
    run(place, "build", source, place.address, "--quiet", *ROWS)
    name = next(iter(listing(place)))
    place.plant(name, b"something else")
    assert name in run(place, "verify", place.address, check=3).stderr


def test_files_there_as_source(place: HubBucketPlace, source: Path, tmp_path: Path) -> None:
    """Objects that another client put there are files to package; names that need escapes among them."""
    names = ["a b.bin", "ü+%25.bin", "c#?=&.bin"]
    place.plant_all({f"in/{name}": name.encode() * 100 for name in names})
    done = run(place, "build", f"{place.address}/in", tmp_path / "out", "--json")
    assert json.loads(done.stdout.splitlines()[-1])["files"] == 3
    run(place, "unpack", tmp_path / "out", tmp_path / "back", "--quiet")
    assert {p.name: p.read_bytes() for p in (tmp_path / "back").iterdir()} == {n: n.encode() * 100 for n in names}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux")
@pytest.mark.parametrize("to", ["hf://buckets/ada/things/x", "hf://datasets/ada/data"])
def test_in_pieces(place: HubBucketPlace, tmp_path: Path, to: str) -> None:
    """By Xet, with the usual settings: a large shard is one object, its bytes go once, and 150 MB are enough."""
    size, each = 8 * SEGMENT_BYTES, 4 * SEGMENT_BYTES
    source = write_files(tmp_path / "large", {f"{n}.bin": random_bytes(each, n) for n in range(2)})
    via = ["--via", "xet"] if "datasets" in to else []
    done = measure(
        [sys.executable, "-m", "brim", "build", str(source), to, *ROWS[:1], "1", "--quiet", *via], env=place.environment
    )
    assert done.exit_code == 0, done.output
    assert done.peak_bytes <= 150_000_000
    assert size <= place.hub.counters.bytes_received < 1.03 * size
    run(place, "verify", to, source, "--deep", "--quiet")


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ({"status": 403}, 2, "You may not write to"),
        ({"status": 503}, 5, "Run the same command to continue"),
    ],
)
def test_refused(place: HubBucketPlace, source: Path, fault: dict[str, int], code: int, said: str) -> None:
    """What lasts is exit 2, what may pass exit 5: a loop ends."""
    place.hub.faults.add("bucket-batch", times=99, **fault)  # type: ignore[arg-type]
    done = run(place, "build", source, place.address, check=code)
    assert said in done.stderr
    assert "hf_write" not in done.stderr


def test_asked_to_wait(place: HubBucketPlace, source: Path) -> None:
    """A Hub that is asked too often says for how long to wait; then it goes on."""
    place.hub.faults.add("bucket-batch", times=4, status=429, retry_after=1)
    place.hub.faults.add("bucket-paths", times=2, status=429, retry_after=1)
    run(place, "build", source, place.address, "--quiet")
    run(place, "verify", place.address, source, "--quiet")


def test_no_such_bucket(place: HubBucketPlace, tmp_path: Path) -> None:
    assert "The bucket hf://buckets/ada/things does not exist" in run(place, "verify", place.address, check=2).stderr
    assert "does not exist" in run(place, "build", place.address, tmp_path / "out", check=2).stderr
    bad = Machine(place.hub, place.folder, token="hf_read")
    source = write_files(tmp_path / "source", {"a": b"1"})
    assert "You may not write" in bad.publish(source, to=place.address, check=2).stderr


def test_addresses() -> None:
    """A bucket of the Hub is a bucket like others; a repository is none."""
    found = parse_location("hf://buckets/me/mine/a/b/")
    assert (str(found), found.container, found.prefix, found.is_hub_bucket) == (
        "hf://buckets/me/mine/a/b",
        "buckets/me/mine",
        "a/b",
        True,
    )
    assert (
        str(split_address("hf://buckets/me/mine/a b.txt", found.access).child("c")) == "hf://buckets/me/mine/a b.txt/c"
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
