"""Datasets published by the real command to the test Hub, and loaded by the real clients."""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest

from brim.state.ledger import Ledger
from tests.conftest import random_bytes, write_files
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Listing, Machine, add_files, built, card, put_by_hand, shards

ROWS = ("--rows-per-shard", "2")
EACH = ("--rows-per-shard", "1")
FILE_COUNT = 150  # more shards than fit in one commit


@pytest.fixture(scope="module")
def large_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return more files than one commit has shards."""
    contents = {f"f{i:03d}.bin": random_bytes(500 + i, i) for i in range(FILE_COUNT)}
    return write_files(tmp_path_factory.mktemp("publish") / "many", contents)


@pytest.fixture(scope="module")
def all_of_them(large_source: Path) -> Listing:
    return built(large_source, large_source.parent / "out", *EACH)


def interrupt(hub: TestHub, machine: Machine, source: Path, nth: int, *options: str) -> None:
    """Run a build that fails when the Hub refuses the token at the nth shard."""
    rule = hub.faults.add("batch", nth=nth, status=401)
    machine.publish(source, *options, check=2)
    assert rule.fired == 1
    hub.faults.clear()


# Destinations


def test_first_publish_makes_a_private_repository(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """A missing repository is created as private, and the output reports this and the shards listed by the Hub."""
    result = machine.publish(source, *ROWS)
    assert "created the private repository ada/data" in result.stderr
    assert "hf://datasets/ada/data (private)" in result.stdout
    assert "the Hub lists all 3 shards with the right size and SHA-256" in result.stdout
    assert hub.repos.get("datasets", REPO).private
    assert shards(hub) == built(source, tmp_path / "out", *ROWS)
    assert hub.history(REPO) == ["Publish with brim", "initial commit"]


def test_public(hub: TestHub, machine: Machine, source: Path) -> None:
    """--public applies to a new repository only. An existing one stays as it is, with a note."""
    result = machine.publish(source, "--public")
    assert "created the public repository" in result.stderr
    assert "(public)" in result.stdout
    assert not hub.repos.get("datasets", REPO).private
    hub.create("ada/old", private=True)
    result = machine.publish(source, "--public", to="hf://datasets/ada/old")
    assert "ada/old exists and stays private" in result.stderr
    assert hub.repos.get("datasets", "ada/old").private


def test_branch(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """A branch in the address is created from main if it is missing, and main stays unchanged."""
    hub.create(REPO)
    before = hub.files(REPO)
    result = machine.publish(source, to=f"{DEST}@try/one")
    assert "revision='try/one'" in result.stdout
    assert shards(hub, "try/one") == built(source, tmp_path / "out")
    assert hub.files(REPO) == before


def test_a_commit_is_no_branch(hub: TestHub, machine: Machine, source: Path) -> None:
    """Publishing to a commit is refused before anything is uploaded."""
    machine.publish(source)
    add_files(source, 5, 6)
    puts = hub.counters.puts
    result = machine.publish(source, "--update", to=f"{DEST}@{hub.head(REPO)}", check=2)
    assert "is a commit or a tag of ada/data, and only a branch can be published to" in result.stderr
    assert hub.counters.puts == puts


def test_many_shards_on_a_branch(hub: TestHub, machine: Machine, large_source: Path, all_of_them: Listing) -> None:
    """Many shards on a branch are published in one commit, because pull requests can only be merged into main."""
    hub.create(REPO)
    before = hub.files(REPO)
    machine.publish(large_source, *EACH, to=f"{DEST}@side")
    assert shards(hub, "side") == all_of_them
    assert hub.history(REPO, "side") == ["Publish with brim", "initial commit"]
    assert hub.files(REPO) == before
    assert [pull.status for pull in hub.repos.get("datasets", REPO).discussions.values()] == ["closed"]


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("hf://ada/data", "Write hf://datasets/ada/data."),
        ("hf://models/ada/data", "Write hf://datasets/ORG/NAME"),
        ("hf://datasets/data", "Write hf://datasets/ORG/NAME"),
        ("hf://datasets/ada/data@", "Write hf://datasets/ORG/NAME"),
        (
            "https://huggingface.co/datasets/ada/data",
            "Give a folder, hf://datasets/ORG/NAME, hf://buckets/ORG/NAME, or s3://",
        ),
    ],
)
def test_addresses_that_are_refused(hub: TestHub, machine: Machine, source: Path, address: str, hint: str) -> None:
    """Malformed addresses of a dataset are refused with a suggestion and without a request."""
    assert hint in machine.publish(source, to=address, check=2).stderr
    assert not hub.log
    assert not (machine.folder / "ada").exists()


def test_commit_message(hub: TestHub, machine: Machine, source: Path, large_source: Path) -> None:
    """--commit-message appears in the history of main, also if a pull request is merged."""
    machine.publish(source, "--commit-message", "The first five")
    assert hub.history(REPO)[0] == "The first five"
    machine.publish(large_source, *EACH, "--fresh", "--commit-message", "All of them")
    assert hub.history(REPO)[0].startswith("All of them")


def test_who_may_not(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """A read-only, missing or wrong token is reported before anything is uploaded."""
    hub.create(REPO, private=True)
    for token, arguments in (
        ("hf_read", "no right to write to ada/data"),
        (None, "token for the Hub is missing"),
        ("hf_no", "not accept"),
    ):
        result = Machine(hub, tmp_path / "other", token).publish(source, check=2)
        assert arguments in result.stderr
    result = Machine(hub, tmp_path / "other", "hf_read").publish(source, to="hf://datasets/ada/new", check=2)
    assert "no right to write to ada/new" in result.stderr
    assert hub.counters.puts == hub.counters.commits == 0


# Existing content


def test_second_run_does_nothing(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """Running the same command again, also on another machine, uploads and commits nothing."""
    machine.publish(source, *ROWS)
    head, received_bytes = hub.head(REPO), hub.counters.bytes_received
    for each in (machine, Machine(hub, tmp_path / "other")):
        result = each.publish(source, *ROWS)
        assert "3 (0 sent, 0 B, 3 kept) in 0 commits" in result.stdout
    assert (hub.head(REPO), hub.counters.bytes_received) == (head, received_bytes)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_update(hub: TestHub, machine: Machine, source: Path, tmp_path: Path, elsewhere: bool) -> None:
    """--update uploads only changed shards, renames others without uploading, and keeps files that brim did not write.

    Obsolete shards are deleted in the same commit. The ledger of another machine is not needed.
    """
    machine.publish(source, *ROWS)
    put_by_hand(hub, {"notes/by-hand.txt": b"mine", "data.txt": b"mine too"})
    second = Machine(hub, tmp_path / "other") if elsewhere else machine
    old = shards(hub)
    add_files(source, 5, 6)
    refused = second.publish(source, *ROWS, check=2)
    assert "it had 5 rows and would have 6" in refused.stderr
    assert "--update" in refused.stderr
    assert "--fresh" in refused.stderr
    result = second.publish(source, *ROWS, "--update")
    assert "3 (1 sent" in result.stdout
    new = shards(hub)
    assert {name for name in old if old[name] != new[name]} == {"data/train-00002-of-00003.parquet"}
    sent = hub.counters.bytes_received
    for name in ("f004.bin", "f005.bin"):
        (source / name).unlink()
    result = second.publish(source, *ROWS, "--update")
    assert "2 (0 sent, 0 B, 2 kept) in 1 commit" in result.stdout
    assert hub.counters.bytes_received == sent
    assert shards(hub) == built(source, tmp_path / "out", *ROWS)
    assert list(shards(hub).values()) == list(old.values())[:2]
    assert set(hub.files(REPO)) - set(shards(hub)) == {
        ".brim/default/train.jsonl",
        ".gitattributes",
        "README.md",
        "data.txt",
        "notes/by-hand.txt",
    }
    assert len(hub.history(REPO)) == 5


def test_fresh(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """--fresh replaces another dataset in one commit, without uploading files that the Hub already has."""
    machine.publish(source, *EACH)
    received_bytes = hub.counters.bytes_received
    result = machine.publish(source, *EACH, "--fresh")
    assert "in 0 commits" in result.stdout
    assert hub.counters.bytes_received == received_bytes
    machine.publish(source, *ROWS, check=2)
    machine.publish(source, *ROWS, "--fresh")
    assert shards(hub) == built(source, tmp_path / "out", *ROWS)
    assert len(hub.history(REPO)) == 3


def test_strangers(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """Foreign files in data/ are refused, because they would become part of the dataset. --fresh replaces them."""
    hub.create(REPO)
    put_by_hand(hub, {"data/train-00000-of-00001.csv": b"a,b\n", "data/deep/er.txt": b"x", "elsewhere.txt": b"y"})
    refused = machine.publish(source, *ROWS, check=2)
    assert "2 foreign file(s) that brim did not write" in refused.stderr
    assert "--fresh replaces them" in refused.stderr
    assert hub.counters.puts == hub.counters.commits == 0
    machine.publish(source, *ROWS, "--fresh")
    assert shards(hub) == built(source, tmp_path / "out", *ROWS)
    assert "elsewhere.txt" in hub.files(REPO)


# Configs, splits and cards


def test_configs_and_splits(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """Publishing one config or split, also repeatedly, leaves the others loadable."""
    other_files = write_files(tmp_path / "other", {f"g{i}.bin": random_bytes(700, 50 + i) for i in range(3)})
    machine.publish(source, *ROWS, "--split", "train")
    machine.publish(other_files, "--split", "test")
    machine.publish(other_files, "--config", "extra")
    before = hub.files(REPO)
    write_files(other_files, {"g3.bin": random_bytes(700, 53)})
    machine.publish(other_files, "--split", "test", "--update")
    after = hub.files(REPO)
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert changed == {"data/test-00000-of-00001.parquet", ".brim/default/test.jsonl", "README.md"}
    infos = {info["config_name"]: info for info in card(hub)["dataset_info"]}  # type: ignore[attr-defined]
    records = {name: [(s["name"], s["num_examples"]) for s in info["splits"]] for name, info in infos.items()}
    assert records == {"default": [("train", 5), ("test", 4)], "extra": [("train", 3)]}
    text = hub.read(REPO, "README.md").decode()
    assert re.search(r"\| train \| 5 \|", text)
    assert re.search(r"\| test \| 4 \|", text)
    machine.python("""
        from datasets import load_dataset
        counts = {name: split.num_rows for name, split in load_dataset("ada/data").items()}
        assert counts == {"train": 5, "test": 4}, counts
        assert load_dataset("ada/data", "extra", split="train").num_rows == 3
    """)


def test_parts_are_proved_by_their_own_sources(
    hub: TestHub, machine: Machine, source: Path, many_files: Callable[..., Path]
) -> None:
    """Splits and configs from several sources are each verified by their own source."""
    other_files = many_files(3, 2000, name="other")
    machine.publish(source, "--split", "train")
    machine.publish(other_files, "--split", "test")
    machine.publish(other_files, "--config", "second")
    for deep in ((), ("--deep",)):
        assert "5 files are inside" in machine.run("verify", DEST, str(source), *deep).stdout
        assert "6 files are inside" in machine.run("verify", DEST, str(other_files), *deep).stdout
    (other_files / "f000.bin").write_bytes(b"another")
    result = machine.run("verify", DEST, str(other_files))
    assert (result.returncode, "not what any of the 3 parts here" in result.stderr) == (3, True)


def test_split_with_other_columns(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """A split with other columns than its config is refused before anything is uploaded."""
    machine.publish(source, "--split", "train")
    (source / "t.csv").write_text("scan,n\nf000.bin,1\nf001.bin,2\n")
    puts = hub.counters.puts
    result = machine.publish(source / "t.csv", "--split", "test", "--files", "scan:file", check=2)
    assert "different columns or types" in result.stderr
    assert "--config" in result.stderr
    assert hub.counters.puts == puts
    assert len(hub.history(REPO)) == 2


# Many shards: pull requests


def test_pull_request(hub: TestHub, machine: Machine, large_source: Path, source: Path, all_of_them: Listing) -> None:
    """More than 100 shards are committed in groups to a draft pull request, which is then merged.

    Readers see the old or the new dataset and never a part.
    """
    machine.publish(source, *EACH)
    old = hub.files(REPO)
    observed, finished = [old], threading.Event()

    def read() -> None:
        while not finished.is_set():
            observed.append(hub.files(REPO))
            time.sleep(0.002)

    reader = threading.Thread(target=read)
    reader.start()
    result = machine.publish(large_source, *EACH, "--fresh")
    finished.set()
    reader.join()
    new = hub.files(REPO)
    assert [files for files in observed if files not in (old, new)] == []
    assert len(observed) > 20
    assert shards(hub) == all_of_them
    assert "filling pull request 1" in result.stderr
    assert "by pull request 1" in result.stdout
    (pull,) = hub.repos.get("datasets", REPO).discussions.values()
    assert re.fullmatch(r"150 rows in 150 shards \[brim [0-9a-f]{16}\]", pull.title)
    events = [(event["type"], event["data"].get("status")) for event in pull.events]
    assert events == [
        ("comment", None),
        *[("commit", None)] * 3,
        ("status-change", "open"),
        ("status-change", "merged"),
    ]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_pull_request_is_found_again(
    hub: TestHub, machine: Machine, large_source: Path, all_of_them: Listing, tmp_path: Path, elsewhere: bool
) -> None:
    """An interrupted run finds its pull request by the ledger, and on another machine by the mark in its title."""
    interrupt(hub, machine, large_source, 130, *EACH)
    (number, pull), *none = hub.repos.get("datasets", REPO).discussions.items()
    (folder,) = machine.ledgers
    mark = re.search(r"\[(.*)\]", pull.title)
    assert mark is not None
    assert Ledger(folder).recall("pull request") == [mark[1], number]
    assert (pull.status, len(shards(hub, "refs/pr/1")), len(shards(hub)), none) == ("draft", 100, 0, [])
    listed = hub.counters.requests["discussions"]
    second = Machine(hub, tmp_path / "other") if elsewhere else machine
    second.publish(large_source, *EACH)
    assert hub.counters.requests["discussions"] - listed == elsewhere
    assert len(hub.repos.get("datasets", REPO).discussions) == 1
    assert pull.status == "merged"
    assert shards(hub) == all_of_them
    assert hub.counters.bytes_repeated <= 8 * 2000


def test_pull_request_of_another_publication(hub: TestHub, machine: Machine, source: Path) -> None:
    """A pull request under review is reused by the same call, but not by another publication of the same data."""
    push = """
        import brim, datasets
        for options in ({"create_pr": True}, {"create_pr": True}, {"revision": "dev"}, {}):
            print(brim.push_to_hub(datasets.Dataset.from_dict({"a": [1]}), "ada/data", **options).pull_request)
    """
    result = machine.python(push)
    assert result.stdout.split() == ["1", "1", "0", "0"]
    assert "filling pull request 1, which is left open" in result.stderr
    (pull,) = hub.repos.get("datasets", REPO).discussions.values()
    assert pull.status == "open"
    assert len(shards(hub)) == len(shards(hub, "dev")) == len(shards(hub, "refs/pr/1")) == 1


def test_card_edited_while_the_pull_request_is_open(
    hub: TestHub, machine: Machine, large_source: Path, source: Path, all_of_them: Listing
) -> None:
    """If an edit on main conflicts with the pull request, one commit publishes the dataset and keeps the edit."""
    machine.publish(source, *EACH)
    interrupt(hub, machine, large_source, 130, *EACH, "--fresh")
    edited = hub.read(REPO, "README.md").replace(b"---\n<!--", b"---\nNew prose.\n<!--")
    put_by_hand(hub, {"README.md": edited})
    result = machine.publish(large_source, *EACH)
    assert "cannot be merged as it is: publishing in one commit instead" in result.stderr
    assert shards(hub) == all_of_them
    assert b"\nNew prose.\n" in hub.read(REPO, "README.md")
    assert hub.history(REPO)[:2] == ["Publish with brim", "by hand"]
    assert [pull.status for pull in hub.repos.get("datasets", REPO).discussions.values()] == ["closed"]


def test_direct(hub: TestHub, machine: Machine, large_source: Path, all_of_them: Listing) -> None:
    """--direct commits groups of shards to the branch and the card last. Until then, loading fails."""
    interrupt(hub, machine, large_source, 130, *EACH, "--direct")
    assert len(shards(hub)) == 100
    load = """
        from datasets import load_dataset
        print(len(list(load_dataset("ada/data", split="train", streaming=True))), flush=True)
        __import__("os")._exit(0)  # threads of the libraries sometimes abort a Python that ends
    """
    halfway = machine.python(load, check=False)
    assert halfway.returncode != 0
    assert "unfinished-run-brim-build-again" in halfway.stderr
    machine.publish(large_source, *EACH, "--direct")
    assert shards(hub) == all_of_them
    assert hub.history(REPO)[:4] == ["Publish with brim", "Add shards", "Add shards", "Begin to publish"]
    assert not hub.repos.get("datasets", REPO).discussions
    assert hub.counters.bytes_repeated <= 8 * 2000
    assert machine.python(load).stdout.strip() == "150"


def test_direct_leaves_other_splits(hub: TestHub, machine: Machine, source: Path) -> None:
    """Publishing a split with --direct keeps the entries of other splits in the card."""
    machine.publish(source, "--split", "train")
    machine.publish(source, "--config", "extra")
    interrupt(hub, machine, source, 3, "--split", "test", "--direct", *EACH)
    machine.publish(source, "--split", "test", "--direct", *EACH)
    configs = {c["config_name"]: c["data_files"] for c in card(hub)["configs"]}  # type: ignore[attr-defined]
    assert {name: [entry["path"] for entry in files] for name, files in configs.items()} == {
        "default": ["data/train-*.parquet", "data/test-*.parquet"],
        "extra": ["extra/train-*.parquet"],
    }


# Resuming


@pytest.mark.parametrize("elsewhere", [False, True])
def test_resume_sends_nothing_again(
    hub: TestHub, machine: Machine, many_files: Callable[..., Path], tmp_path: Path, elsewhere: bool
) -> None:
    """A resumed run does not repeat finished uploads, with the ledger or without it."""
    source = many_files(20, 3000)
    interrupt(hub, machine, source, 15, *EACH, "--workers", "2")
    assert not shards(hub)
    sent = hub.counters.bytes_received
    (Machine(hub, tmp_path / "other") if elsewhere else machine).publish(source, *EACH)
    expected = built(source, tmp_path / "out", *EACH)
    assert shards(hub) == expected
    total = sum(size for size, _ in expected.values())
    assert 0 < sent < total
    assert hub.counters.bytes_received - hub.counters.bytes_repeated == total
    assert hub.counters.bytes_repeated <= 2 * max(size for size, _ in expected.values())


@pytest.mark.parametrize(("nth", "elsewhere"), [(60, False), (130, False), (130, True)])
def test_objects_collected_between_runs(
    hub: TestHub, machine: Machine, large_source: Path, all_of_them: Listing, tmp_path: Path, nth: int, elsewhere: bool
) -> None:
    """Uploads that the Hub deleted before they were committed are repeated, even if they have receipts."""
    interrupt(hub, machine, large_source, nth, *EACH)
    assert hub.collect_garbage(REPO)
    result = (Machine(hub, tmp_path / "other") if elsewhere else machine).publish(large_source, *EACH)
    assert ("the destination no longer has" in result.stderr) == (not elsewhere)
    assert shards(hub) == all_of_them


@pytest.mark.parametrize("elsewhere", [False, True])
def test_few_objects_collected_between_runs(
    hub: TestHub, machine: Machine, source: Path, tmp_path: Path, elsewhere: bool
) -> None:
    """Deleted uploads are also repeated if one commit contains all shards."""
    interrupt(hub, machine, source, 4, *EACH, "--workers", "1")
    assert len(hub.collect_garbage(REPO)) == 3
    result = (Machine(hub, tmp_path / "other") if elsewhere else machine).publish(source, *EACH)
    assert ("the destination no longer has 3 shard(s): sending them again" in result.stderr) == (not elsewhere)
    assert len(shards(hub)) == 5
    assert hub.counters.puts == 3 + 5


def test_old_receipts_are_not_trusted(hub: TestHub, machine: Machine, many_files: Callable[..., Path]) -> None:
    """A receipt of an upload without a commit is valid for 12 hours. After that, brim asks the Hub.

    Only the uploads that the Hub has deleted are repeated.
    """
    source = many_files(20, 3000)
    interrupt(hub, machine, source, 15, *EACH, "--workers", "1")
    ledger = Ledger(machine.ledgers[0])
    assert len(ledger.receipts) == 14
    for number, receipt in enumerate(list(ledger.receipts.values())):
        ledger.add(replace(receipt, staged_at=receipt.staged_at - (3600 * 13 if number < 4 else 3600 * 11)))
    ledger.close()
    repo = hub.repos.get("datasets", REPO)
    lost = next(iter(ledger.receipts.values())).sha256
    repo.objects.discard(lost)
    batches, puts = hub.counters.requests["batch"], hub.counters.puts
    result = machine.publish(source, *EACH)
    assert "no longer has" not in result.stderr
    assert hub.counters.requests["batch"] - batches == 4 + 6
    assert hub.counters.puts - puts == 1 + 6
    assert len(shards(hub)) == 20


# Xet


def test_xet(tmp_path: Path, source: Path) -> None:
    """--via xet uploads each shard once by Xet with correct pointers, and the real client reads it."""
    with TestHub(tmp_path / "hub", xet=True) as hub:
        machine = Machine(hub, tmp_path / "machine", more={"HF_HUB_DISABLE_XET": "0"})
        machine.publish(source, *ROWS, "--via", "xet")
        assert shards(hub) == built(source, tmp_path / "out", *ROWS)
        assert hub.counters.requests["put"] == 0
        assert hub.counters.requests["xorb"] > 0
        received_bytes = hub.counters.bytes_received
        machine.publish(source, *ROWS, "--via", "xet", "--fresh")
        assert hub.counters.bytes_received == received_bytes
        machine.python(f"""
            from datasets import load_dataset
            rows = list(load_dataset("ada/data", split="train"))
            assert [row["file"]["path"] for row in rows] == [f"f{{i:03d}}.bin" for i in range(5)]
            assert all(row["file"]["bytes"] == open({str(source)!r} + "/" + row["file"]["path"], "rb").read()
                       for row in rows)
        """)
        # hf_xet stores a log and known chunks in the caches of the library.
        assert written(machine, "home/datasets", "home/hub", "home/xet") == ["ledger.jsonl", "lock"]
        assert not [p for p in (machine.folder / "home/xet").rglob("*.*") if b"hf_write" in p.read_bytes()]


@pytest.mark.parametrize(("options", "by_xet"), [((), True), (("--via", "lfs"), False), (("--memory", "100MB"), False)])
def test_an_update_goes_by_xet(tmp_path: Path, options: tuple[str, ...], by_xet: bool) -> None:
    """A changed shard is uploaded by LFS first, and later only its new chunks by Xet if memory suffices."""
    source = write_files(tmp_path / "source", {f"f{i}.bin": random_bytes(1_000_000, i) for i in range(4)})
    with TestHub(tmp_path / "hub", xet=True) as hub:
        machine = Machine(hub, tmp_path / "machine")
        machine.publish(source)
        assert (hub.counters.requests["put"], hub.counters.requests["xorb"]) == (1, 0)
        for number in range(2):
            (source / "f3.bin").write_bytes(random_bytes(900_000, 9 + number))
            received_bytes = hub.counters.bytes_received
            machine.publish(source, "--update", *options)
        assert (hub.counters.requests["put"], hub.counters.requests["xorb"] > 0) == (1 if by_xet else 3, by_xet)
        if by_xet:  # this machine knows the chunks of the second version, and one file changed in the third
            assert hub.counters.bytes_received - received_bytes < 1_100_000
        assert shards(hub) == built(source, tmp_path / "out")
        assert machine.run("verify", DEST, "--deep").returncode == 0


def test_no_xet_on_the_server(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """If the server does not support Xet, --via xet prints a note and uploads by LFS."""
    result = machine.publish(source, *ROWS, "--via", "xet")
    assert "the server has no Xet storage: sending by LFS instead" in result.stderr
    assert shards(hub) == built(source, tmp_path / "out", *ROWS)
    assert hub.counters.requests["put"] == 3


# Local files


def written(machine: Machine, *but: str) -> list[str]:
    """Return the names of all files on a machine, except in some folders."""
    remaining = [path for path in machine.folder.rglob("*") if path.is_file()]
    return sorted(p.name for p in remaining if not str(p.relative_to(machine.folder)).startswith(but or ("\0",)))


@pytest.mark.parametrize("count", [5, FILE_COUNT])
def test_nothing_is_written_but_the_ledger(
    hub: TestHub, machine: Machine, many_files: Callable[..., Path], count: int
) -> None:
    """After a run, the temporary, state and cache folders contain only the ledger, which only its owner can read."""
    machine.publish(many_files(count, 3000), *EACH)
    assert written(machine) == ["ledger.jsonl", "lock"]
    (folder,) = machine.ledgers
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "ledger.jsonl").stat().st_size < 1000 * (count + 2)


def test_nothing_is_written_meanwhile(hub: TestHub, machine: Machine, many_files: Callable[..., Path]) -> None:
    """During an upload, only the ledger grows, and no other file is open for writing.

    The only other file is the note about the run that obeys a stop file.
    """
    source = many_files(6, 3_000_000)
    hub.faults.add("put", nth=3, times=None, action="stall", after_bytes=1_000_000, seconds=0.4)
    process = machine.start(source, *EACH)
    observed, reader = set(), set()
    while process.poll() is None:
        observed |= set(written(machine))
        reader |= files_open_for_writing(process.pid)
        time.sleep(0.02)
    assert process.returncode == 0
    notes = {name for name in observed if re.fullmatch(r"[0-9a-f]{32}\.json", name)}
    assert len(notes) <= 1
    assert observed - notes <= {"ledger.jsonl", "lock", ".ledger.jsonl.tmp"}
    assert {Path(name).name for name in reader} <= {"ledger.jsonl", "lock", ".ledger.jsonl.tmp", "null"}


def files_open_for_writing(pid: int) -> set[str]:
    actual = set()
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{number}")
            flags = Path(f"/proc/{pid}/fdinfo/{number}").read_text().split("flags:\t")[1].split("\n")[0]
            if target.startswith("/") and int(flags, 8) & (os.O_WRONLY | os.O_RDWR):
                actual.add(target)
    except (FileNotFoundError, ProcessLookupError):
        pass
    return actual


def test_tokens_stay_secret(tmp_path: Path, large_source: Path) -> None:
    """No token and no signature of a URL is printed or written, for any failure and any verbosity."""
    token = "hf_" + "VerySecret0123456789"
    with TestHub(tmp_path / "hub", tokens={token: {"user": "ada", "can_write": True}}) as hub:
        machine = Machine(hub, tmp_path / "machine", token)
        hub.faults.add("put", nth=2, status=403)
        hub.faults.add("put", nth=20, action="cut")
        hub.faults.add("batch", nth=30, status=429, retry_after=0)
        hub.faults.add("commit", status=500)
        hub.faults.add("put", nth=130, times=None, status=403)
        message = machine.publish(large_source, *EACH, "--json", check=2)
        hub.faults.clear()
        hub.faults.add("batch", times=None, status=401)
        outputs = [message.stdout, message.stderr]
        for options in (("--json",), ("--debug",), ()):
            result = machine.run("build", str(large_source), DEST, *EACH, *options)
            assert result.returncode != 0
            outputs += [result.stdout, result.stderr]
        hub.faults.clear()
        outputs += [machine.publish(large_source, *EACH).stdout]
        outputs += [path.read_text() for path in machine.folder.rglob("*") if path.is_file()]
        outputs += [hub.read(REPO, name).decode() for name in hub.files(REPO) if not name.endswith(".parquet")]
        assert "Traceback" in "".join(outputs)
        for output in outputs:
            assert token not in output
            assert "signature" not in output
            assert "Bearer" not in output


def test_json(hub: TestHub, machine: Machine, source: Path) -> None:
    """--json ends with the uploaded bytes, the number of commits and the state of the repository."""
    events = [json.loads(line) for line in machine.publish(source, *ROWS, "--json").stdout.splitlines()]
    assert [event["how"] for event in events if event["event"] == "shard"] == ["sent"] * 3
    result = events[-1]
    assert (result["event"], result["shards"], result["written"], result["commits"]) == ("done", 3, 3, 1)
    assert (result["visibility"], result["pull_request"], result["kept"]) == ("private", 0, 0)
    assert result["sent_bytes"] == result["bytes"] == hub.counters.bytes_received


def test_two_runs_at_once(hub: TestHub, machine: Machine, source: Path) -> None:
    """While one run publishes, a second run for the same config is refused. One for another config is not."""
    hub.faults.add("put", action="stall", seconds=4)
    first = machine.start(source, *ROWS)
    while not hub.counters.puts:
        time.sleep(0.02)
    refused = machine.publish(source, *ROWS, check=2)
    assert "Another brim is building at this destination." in refused.stderr
    machine.publish(source, "--config", "extra")
    assert first.wait() == 0
    assert len(shards(hub)) == 3
    assert len(shards(hub, folder="extra")) == 1
    assert {c["config_name"] for c in card(hub)["configs"]} == {"default", "extra"}  # type: ignore[attr-defined]


# Loading


def test_nifti_columns_load(hub: TestHub, machine: Machine, tmp_path: Path) -> None:
    """load_dataset, plain and streaming, returns images that are equal to the sources."""
    scans = tmp_path / "scans"
    scans.mkdir()
    for i in range(4):
        volume = np.random.default_rng(i).integers(0, 1000, (5, 6, 7)).astype(np.int16)
        nibabel.save(nibabel.Nifti1Image(volume, np.diag([2.0, 2, 2, 1])), scans / f"s{i}.nii.gz")
    (scans / "t.csv").write_text("subject,t1w\n" + "".join(f"{i:03d},s{i}.nii.gz\n" for i in range(4)) + "009,\n")
    machine.publish(scans / "t.csv", "--files", "t1w:nifti", *ROWS)
    machine.python(f"""
        import nibabel, numpy
        from datasets import Nifti, load_dataset
        for streaming in (False, True):
            loaded = load_dataset("ada/data", split="train", streaming=streaming)
            assert loaded.features["t1w"] == Nifti(), loaded.features
            rows = list(loaded)
            assert [row["subject"] for row in rows] == ["000", "001", "002", "003", "009"]
            assert rows[4]["t1w"] is None
            for i in range(4):
                original = nibabel.load({str(scans)!r} + f"/s{{i}}.nii.gz")
                assert numpy.array_equal(rows[i]["t1w"].get_fdata(), original.get_fdata())
                assert numpy.array_equal(rows[i]["t1w"].affine, original.affine)
    """)


# Foreign datasets and unreadable ones


def test_reading_without_permission(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """Reading a gated repository without access is reported as such, and not as a missing write permission."""
    machine.publish(source)
    hub.repos.get("datasets", REPO).private, hub.repos.get("datasets", REPO).gated = False, "manual"
    for token, actor in (("hf_read", "this token"), (None, "anyone without a token")):
        for command in (("verify", DEST), ("unpack", DEST, str(tmp_path / "back"))):
            result = Machine(hub, tmp_path / "other", token).run(*command)
            assert (result.returncode, f"does not let {actor} read" in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("HF_TOKEN", "h\u00e9", "holds characters that no token has"),
        ("HF_ENDPOINT", "huggingface.co", "HF_ENDPOINT is not the address of a Hub"),
        ("BRIM_STALL_SECONDS", "nan", "BRIM_STALL_SECONDS is a number"),
        ("BRIM_STALL_SECONDS", "long", "BRIM_STALL_SECONDS is a number"),
    ],
)
def test_settings_that_cannot_be(
    hub: TestHub, machine: Machine, source: Path, name: str, value: str, says: str
) -> None:
    """Invalid tokens, addresses and time limits are refused at once with a clear error."""
    odd = replace(machine, more={name: value})
    for message in (odd.publish(source, check=2), odd.run("verify", DEST)):
        assert (message.returncode, says in message.stderr) == (2, True), message.stderr


def test_what_others_published(hub: TestHub, machine: Machine, tmp_path: Path) -> None:
    """Shards of a repository without a card are found, and unpacking content without file names is an error."""
    push = """
        import datasets, io, brim, pyarrow.parquet as pq
        from huggingface_hub import HfApi
        content = datasets.Dataset.from_dict({"image": [{"bytes": b"1", "path": None}]})
        content = content.cast_column("image", datasets.Image(decode=False))
        pq.write_table(content.data.table, sink := io.BytesIO())
        HfApi().create_repo("ada/loose", repo_type="dataset")
        HfApi().upload_file(
            path_or_fileobj=sink.getvalue(), path_in_repo="a/b.parquet", repo_id="ada/loose", repo_type="dataset"
        )
        brim.push_to_hub(content, "ada/data")
    """
    machine.python(push)
    result = machine.run("verify", "hf://datasets/ada/loose")
    assert (result.returncode, "README.md: is missing" in result.stderr) == (3, True)
    for destination in ("hf://datasets/ada/loose", DEST):
        result = machine.run("unpack", destination, str(tmp_path / "back"))
        assert (result.returncode, "content without a file name" in result.stderr) == (2, True), result.stderr


def test_threads_publish_at_once(hub: TestHub, machine: Machine) -> None:
    """Concurrent calls of push_to_hub do not disturb each other, and leave the settings of the library unchanged."""
    push = """
        import logging, threading, brim, datasets
        from huggingface_hub.utils import _http
        state = lambda: (_http._GLOBAL_CLIENT_FACTORY, logging.getLogger("huggingface_hub").handlers[:])
        before = state()
        one = lambda n: brim.push_to_hub(datasets.Dataset.from_dict({"a": [n] * 2000}), f"ada/d{n}", num_shards=5)
        threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert state() == before
    """
    result = machine.python(push)
    assert all(line.startswith("brim: created") for line in result.stderr.splitlines()), result.stderr
    assert [len(hub.files(f"ada/d{n}")) for n in range(4)] == [8] * 4
