"""Reports on existing datasets: which configs and splits are complete, unfinished or foreign, and which parts exist."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import brim as api
from brim.errors import VerificationError
from brim.state.record_log import record_line, record_of
from tests.conftest import random_bytes, write_files
from tests.destinations import BucketDestination, run
from tests.forked import brim
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Machine, put_by_hand
from tests.s3 import FaultProxy, S3Server

EACH = ("--rows-per-shard", "1")


def test_unfinished_by_direct(hub: TestHub, machine: Machine, tmp_path: Path) -> None:
    """verify and unpack of an unfinished `--direct` build exit with 3; they and info report its progress and the next
    step."""
    items = write_files(tmp_path / "many", {f"f{i:03d}.bin": random_bytes(300, i) for i in range(200)})
    small = write_files(tmp_path / "small", {"s.bin": random_bytes(300, 500)})
    machine.publish(small, "--config", "small")
    hub.faults.add("commit", nth=3, times=None, status=413)
    machine.publish(items, *EACH, "--direct", check=2)
    hub.faults.clear()
    arguments = "unfinished: 100 of 200 shards; run the same build to finish"
    result = machine.run("verify", DEST)
    assert (result.returncode, f"train: {arguments}" in result.stderr) == (3, True), result.stderr
    assert "small/train: complete" in result.stderr
    assert "not built by brim" not in result.stderr
    result = machine.run("unpack", DEST, str(tmp_path / "files"))
    assert (result.returncode, arguments in result.stderr) == (3, True), result.stderr
    assert not list((tmp_path / "files").rglob("*.bin"))
    assert arguments in machine.run("info", DEST).stdout
    completed = machine.run("unpack", DEST, str(tmp_path / "files"), "--from-config", "small")
    assert (completed.returncode, [path.name for path in (tmp_path / "files").iterdir()]) == (0, ["s.bin"]), (
        completed.stderr
    )
    assert machine.run("verify", DEST, "--from-config", "small").returncode == 0
    machine.publish(items, *EACH, "--direct")
    assert machine.run("verify", DEST).returncode == 0


def test_begun_and_nothing_there(hub: TestHub, machine: Machine, source: Path) -> None:
    """A build without any shard yet is reported as unfinished, not as "no dataset"."""
    hub.create(REPO)
    hub.faults.add("batch", times=None, status=413)
    machine.publish(source, *EACH, "--direct", check=2)
    hub.faults.clear()
    result = machine.run("verify", DEST)
    assert (result.returncode, "unfinished: 0 shards; run the same build" in result.stderr) == (3, True), result.stderr


def test_unfinished_folder(source: Path, tmp_path: Path) -> None:
    """verify and unpack report a stopped build in a folder as unfinished."""
    out = tmp_path / "out"
    brim("build", source, out, *EACH, "--quiet")
    ledger = out / ".brim" / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:4]))
    for remaining in sorted((out / "data").iterdir())[3:]:
        remaining.unlink()
    arguments = "unfinished: 3 of 5 shards; run the same build to finish"
    assert f"train: {arguments}" in brim("verify", out, check=3).stderr
    assert arguments in brim("unpack", out, tmp_path / "files", check=3).stderr


def parquet(rows: int) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"n": list(range(rows))}), out)
    return out.getvalue()


def test_states_of_all_parts(hub: TestHub, machine: Machine, source: Path) -> None:
    """verify reports each config and split as complete or foreign, and info lists the same states."""
    machine.publish(source)
    put_by_hand(hub, {"other/train-00000-of-00001.parquet": parquet(3)})
    result = machine.run("verify", DEST)
    assert result.returncode == 0, result.stderr
    assert "complete  1 shard, 5 rows" in result.stdout  # not in any card, so it does not belong to the dataset
    card = hub.read(REPO, "README.md").decode()
    entry = "configs:\n- config_name: other\n  data_files:\n  - split: train\n    path: other/*.parquet\n"
    put_by_hand(hub, {"README.md": card.replace("configs:\n", entry, 1).encode()})
    result = machine.run("verify", DEST)
    assert result.returncode == 0, result.stderr
    assert "other/train  not brim's" in result.stdout
    events = [json.loads(line) for line in machine.run("verify", DEST, "--json").stdout.splitlines()]
    assert events[-1]["subsets"] == {"train": "whole", "other/train": "not brim's"}
    splits = json.loads(machine.run("info", DEST, "--json").stdout)["splits"]
    assert {(s["config"], s["state"]) for s in splits} == {("default", "whole"), ("other", "not brim's")}
    put_by_hand(hub, {"other/train-00000-of-00001.parquet": b"PAR1"})
    assert "other/train-00000-of-00001.parquet: is not a Parquet file" in machine.run("verify", DEST).stderr


COUNT, LARGE = 58, 200_000


def test_requests_of_a_verification(hub: TestHub, machine: Machine, tmp_path: Path) -> None:
    """Without --deep, verify reads 64 KB or the footer of each shard with two requests: to the Hub and to its
    storage."""
    source = write_files(tmp_path / "files", {f"f{i:02d}.bin": random_bytes(LARGE, i) for i in range(COUNT)})
    machine.publish(source, *EACH)
    before, sent = len(hub.log), hub.counters.bytes_sent
    assert machine.run("verify", DEST).returncode == 0
    requested = [line for line in hub.log[before:] if ".parquet" in line or "/object/" in line]
    assert len(requested) <= 2 * COUNT, requested
    report = COUNT * 2_000  # lines of the manifest and of listings
    assert hub.counters.bytes_sent - sent <= COUNT * (64 << 10) + report


def test_requests_of_a_verification_of_a_bucket(
    s3: S3Server, s3_proxy: FaultProxy, s3_prefix: str, tmp_path: Path
) -> None:
    """In a bucket, verify reads the same bytes with one request per shard."""
    destination = BucketDestination(s3, tmp_path / "machine", s3_prefix.rstrip("/"), s3_proxy)
    source = write_files(tmp_path / "files", {f"f{i:02d}.bin": random_bytes(LARGE, i) for i in range(COUNT)})
    run(destination, "build", source, destination.address, "--quiet", *EACH)
    before = len(s3_proxy.requests)
    run(destination, "verify", destination.address)
    requested = [request for request in s3_proxy.requests[before:] if request.path.endswith(".parquet")]
    assert 0 < len(requested) <= 2 * COUNT
    assert max(item.received_bytes for item in requested) <= 64 << 10
    assert sum(one.received_bytes for one in s3_proxy.requests[before:]) <= COUNT * (64 << 10) + 200_000


@pytest.mark.parametrize(
    ("old", "new", "arguments"),
    [
        ("dtype: string", "dtype: int64", "says .*int64.* of the column 'file', the shards .*string"),
        ("num_examples: 5", "num_examples: 6", "says 6 rows of train, the shards hold 5"),
        ("split: train", "split: test", "names the splits test, the shards are of train"),
        ("- name: file", "- name: lost", "does not name the column 'file' of the shards"),
    ],
)
def test_the_card_is_proved(source: Path, tmp_path: Path, old: str, new: str, arguments: str) -> None:
    """A card with other types, rows, splits, columns or bytes than the shards is an error."""
    out = tmp_path / "out"
    brim("build", source, out, "--quiet")
    card = out / "README.md"
    text = card.read_text()
    assert old in text, text
    card.write_text(text.replace(old, new))
    with pytest.raises(VerificationError, match=arguments):
        api.verify(out)


def test_the_bytes_of_the_card(source: Path, tmp_path: Path) -> None:
    brim("build", source, tmp_path / "out", "--quiet")
    card = tmp_path / "out" / "README.md"
    size = yaml.safe_load(card.read_text().split("---\n")[1])["dataset_info"]["download_size"]
    card.write_text(card.read_text().replace(f"download_size: {size}", f"download_size: {size + 1}"))
    with pytest.raises(VerificationError, match="bytes to download of default"):
        api.verify(tmp_path / "out")


def test_the_line_of_the_job(source: Path, tmp_path: Path) -> None:
    """Damage to the job record of a finished ledger is found, even if the record's own checksum matches."""
    out = tmp_path / "out"
    brim("build", source, out, "--quiet")
    ledger = out / ".brim" / "ledger.jsonl"
    good = ledger.read_bytes()
    job, _, remainder = good.partition(b"\n")
    record = record_of(job)
    assert record is not None
    record["facts"]["rows"] += 1
    for bad, arguments in (
        (job.replace(b'"rows"', b'"sowr"') + b"\n" + remainder, "its line 1 is damaged"),
        (remainder, "the record of the job is missing"),
        (record_line(record) + remainder, "does not match its fingerprint"),
    ):
        ledger.write_bytes(bad)
        with pytest.raises(VerificationError, match=arguments):
            api.verify(out)
    ledger.write_bytes(good)
    assert api.verify(out).subsets == {"train": "whole"}


def test_splits_whose_files_share_names(tmp_path: Path) -> None:
    """Splits or configs with equal file names are unpacked into separate folders."""
    write_files(tmp_path / "in", {f"{name}.bin": name.encode() for name in "abc"})
    (tmp_path / "in" / "t.csv").write_text("file,part\na.bin,train\nb.bin,train\na.bin,test\nc.bin,test\n")
    brim("build", tmp_path / "in" / "t.csv", tmp_path / "both", "--files", "file", "--split-by", "part", "--quiet")
    result = api.unpack(tmp_path / "both", tmp_path / "files")
    actual = {str(path.relative_to(tmp_path / "files")) for path in (tmp_path / "files").rglob("*.bin")}
    assert (result.files, actual) == (4, {"train/a.bin", "train/b.bin", "test/a.bin", "test/c.bin"})
    assert api.unpack(tmp_path / "both", tmp_path / "one", from_split="test").files == 2
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["a.bin", "c.bin"]
    selection = api.unpack(tmp_path / "both", tmp_path / "some", columns="file")
    assert (selection.files, (tmp_path / "some" / "test" / "a.bin").read_bytes()) == (4, b"a")


def test_a_split_named_like_a_config(hub: TestHub, machine: Machine, source: Path, tmp_path: Path) -> None:
    """A split named like a config has a separate folder from that config."""
    for config, split in (("default", "train"), ("default", "b"), ("b", "train")):
        machine.publish(source, "--config", config, "--split", split, "--quiet")
    result = machine.run("unpack", DEST, str(tmp_path / "back"))
    assert result.returncode == 0, result.stderr
    folders = {str(path.parent.relative_to(tmp_path / "back")) for path in (tmp_path / "back").rglob("*.bin")}
    assert folders == {"default/train", "default/b", "b/train"}
    only = machine.run("unpack", DEST, str(tmp_path / "b"), "--from-config", "b", "--from-split", "train")
    assert only.returncode == 0, only.stderr
    assert not [path for path in (tmp_path / "b").iterdir() if path.is_dir()]


@pytest.mark.parametrize("verb", ["verify", "check", "info", "unpack"])
def test_parts_that_are_not_there(source: Path, tmp_path: Path, verb: str) -> None:
    """A config or split that a dataset does not have is an error that lists the existing ones."""
    brim("build", source, tmp_path / "out", "--quiet")
    extra = [tmp_path / "files"] if verb == "unpack" else []
    result = brim(verb, tmp_path / "out", *extra, "--from-split", "tset", check=2)
    assert "has no split 'tset'" in result.stderr
    assert "It has: train." in result.stderr
    assert "has no config" in brim(verb, tmp_path / "out", *extra, "--from-config", "x", check=2).stderr
    brim(verb, tmp_path / "out", *extra, "--from-config", "default", "--from-split", "train")


@pytest.mark.parametrize("arguments", [("verify",), ("info",), ("check",), ("unpack", "out"), ("select", "out")])
def test_what_is_missing_is_told_apart(hub: TestHub, machine: Machine, arguments: tuple[str, ...]) -> None:
    """A missing dataset, branch or permission, and a server that is not a Hub, have separate messages in every
    command."""
    hub.create(REPO, private=True)
    pq.write_table(pa.table({"n": [1]}), shard := io.BytesIO())
    put_by_hand(hub, {"data/train-00000-of-00001.parquet": shard.getvalue()})
    verb, *extra = arguments
    records = {
        "hf://datasets/ada/none": "There is no dataset ada/none on the Hub",
        f"{DEST}@nope": "has no (such )?branch or commit",
    }
    for address, message in records.items():
        result = machine.run(verb, address, *extra)
        assert (result.returncode, bool(re.search(message, result.stderr))) == (2, True), result.stderr
    hub.repos.get("datasets", REPO).private, hub.repos.get("datasets", REPO).gated = False, "manual"
    result = replace(machine, token="hf_read").run(verb, DEST, *extra)
    assert result.returncode == 2, result.stderr
    assert re.search("does not let|may not read", result.stderr), result.stderr
    assert "There is no dataset" not in result.stderr
