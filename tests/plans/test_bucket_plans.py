"""Failures with plans and datasets in buckets: concurrent parts, stops, and unfinished destinations."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

import brim as library
from brim.errors import DestinationError, InputError, VerificationError
from brim.formats.card import write_unfinished_card
from brim.jobs.plan_storage import Part, open_place
from brim.jobs.saved_plans import SavedBuild, SavedSettings
from brim.storage.location import Access
from tests.conftest import brim, random_bytes, write_files
from tests.destinations import BucketDestination, run, start
from tests.s3 import FaultProxy, S3Server
from tests.s3.rules import Rule
from tests.s3.server import PRIVATE, PUBLIC

FILES = {f"{n}.bin": random_bytes(5_000, n) for n in range(4)}


@pytest.fixture
def server(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in {**s3.environment, "XDG_STATE_HOME": str(tmp_path / "state")}.items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_files(tmp_path / "source", FILES)


def test_parts_that_start_together(server: S3Server, s3_prefix: str, source: Path, tmp_path: Path) -> None:
    """Concurrent parts of one machine all read the plan, and a truncated local copy is downloaded again."""
    plan = f"s3://private/{s3_prefix}a.plan"
    library.plan(source, f"s3://private/{s3_prefix}out").save(plan)
    saved = server.read(PRIVATE, f"{s3_prefix}a.plan")
    together = Barrier(8)

    def fetch(_: int) -> bytes:
        together.wait()
        return open_place(plan).path.read_bytes()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(fetch, range(8))) == {saved}
    (copy,) = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    copy.write_bytes(b"")
    assert open_place(plan).path.read_bytes() == saved


def test_a_machine_that_keeps_nothing(
    server: S3Server, s3_prefix: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a usable home folder, the error names the variable to set."""
    plan = f"s3://private/{s3_prefix}a.plan"
    library.plan(source, f"s3://private/{s3_prefix}out").save(plan)
    monkeypatch.setenv("XDG_STATE_HOME", str(source / "0.bin"))
    with pytest.raises(DestinationError, match="cannot be used") as refused:
        SavedBuild(plan)
    assert "XDG_STATE_HOME" in refused.value.hint


def test_messages_about_a_plan_in_a_bucket(
    server: S3Server, s3_prefix: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suggested commands contain the endpoint, and errors name the bucket instead of the local state folder."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    plan, dest = f"s3://private/{s3_prefix}a.plan", f"s3://private/{s3_prefix}out"
    library.plan(source, dest, rows_per_shard=1, endpoint_url=server.endpoint).save(plan)
    access = Access(server.endpoint)
    saved = SavedBuild(plan, SavedSettings(access=access))
    assert saved.part(Part(1, 2)).next == f"brim build --plan {plan} --finish --endpoint-url {server.endpoint}"
    with pytest.raises(InputError) as refused:
        saved.part(Part(1, 3))
    assert f"'{plan}.parts'" in refused.value.hint
    server.write(PRIVATE, f"{s3_prefix}b.plan", b"no plan")
    with pytest.raises(InputError, match=f"'s3://private/{s3_prefix}b.plan' is not a plan"):
        SavedBuild(f"s3://private/{s3_prefix}b.plan", SavedSettings(access=access))
    arguments = ("--plan", plan, "--finish", "--endpoint-url", server.endpoint, "--anonymous")
    assert "--anonymous cannot be used with --plan" in brim("build", *arguments, check=2).stderr


def test_parts_that_were_taken_away(server: S3Server, s3_prefix: str, source: Path, tmp_path: Path) -> None:
    """After PLAN.parts is deleted, another plan can be saved under the same name.

    This also works on a machine that built parts of the first plan.
    """
    plan, dest = f"s3://private/{s3_prefix}a.plan", f"s3://private/{s3_prefix}out"
    library.plan(source, dest, rows_per_shard=1).save(plan)
    SavedBuild(plan).part(Part(1, 2))
    for key in server.objects(PRIVATE, f"{s3_prefix}a.plan.parts/"):
        server.delete(PRIVATE, key)
    other_files = write_files(tmp_path / "other", {"9.bin": b"another file", "8.bin": b"one more"})
    library.plan(other_files, f"{dest}2", rows_per_shard=1).save(plan)
    assert SavedBuild(plan).part(Part(1, 2)).written == 1


@pytest.mark.parametrize("arguments", [("--part", "1/2"), ()], ids=["part", "all"])
def test_stopped_while_the_store_is_silent(
    arguments: tuple[str, ...], server: S3Server, s3_prefix: str, s3_proxy: FaultProxy, tmp_path: Path
) -> None:
    """A stop does not wait for a silent object store: neither for the lock of the plan nor for unfinished uploads.

    Local receipts are kept.
    """
    destination = BucketDestination(server, tmp_path, f"{s3_prefix}out", s3_proxy)
    source = write_files(tmp_path / "large", {f"{n}.bin": random_bytes(20_000_000, n) for n in range(2)})
    plan = f"s3://private/{s3_prefix}a.plan"
    run(destination, "plan", source, destination.address, "--rows-per-shard", "1", "--save", plan)
    s3_proxy.stall(60, contains="partNumber=2")
    process = start(destination, "build", "--plan", plan, *arguments, "--workers", "1", "--quiet")
    until = time.monotonic() + 30
    while not s3_proxy.count("PUT", "partNumber=2") and time.monotonic() < until:
        time.sleep(0.05)
    for answer in (False, True):
        s3_proxy.stall(60, times=None, answer=answer)
    process.send_signal(signal.SIGTERM)
    requested_at = time.monotonic()
    assert process.wait(30) == 6
    assert time.monotonic() - requested_at < 6  # 2 s on an idle machine
    s3_proxy.clear()
    run(destination, "build", "--plan", plan, "--quiet")
    run(destination, "verify", destination.address, source, "--quiet")


def test_root_is_for_folders(server: S3Server, s3_prefix: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="root= must be a folder of this machine"):
        SavedSettings(root="s3://private/elsewhere")
    for name, data in FILES.items():
        server.write(PRIVATE, f"{s3_prefix}raw/{name}", data)
    library.plan(f"s3://private/{s3_prefix}raw", tmp_path / "out").save(tmp_path / "a.plan")
    with pytest.raises(InputError, match="source of this plan is in a bucket"):
        SavedBuild(tmp_path / "a.plan", SavedSettings(root=str(source))).run()


def test_public_source_and_private_destination(server: S3Server, s3_prefix: str) -> None:
    """`brim verify` with --anonymous reads only the source without credentials, as the printed command needs."""
    for name, data in FILES.items():
        server.write(PUBLIC, f"{s3_prefix}raw/{name}", data)
    source, dest = f"s3://public/{s3_prefix}raw", f"s3://private/{s3_prefix}out"
    library.build(source, dest, anonymous=True)
    assert library.verify(dest, source, anonymous=True).files_compared == len(FILES)
    with pytest.raises(InputError, match="may not read"):
        library.verify(dest, anonymous=True)


def test_unfinished_place(server: S3Server, s3_prefix: str, source: Path, tmp_path: Path) -> None:
    """A destination that was killed before publication is reported as unfinished, and the same build completes it."""
    dest = f"s3://private/{s3_prefix}out"
    library.build(source, dest)
    server.write(PRIVATE, f"{s3_prefix}out/README.md", write_unfinished_card(None).encode())
    server.delete(PRIVATE, f"{s3_prefix}out/.brim/default/train.jsonl")
    with pytest.raises(VerificationError, match="unfinished") as caught:
        library.verify(dest)
    assert "Run the command that built it again" in caught.value.hint
    assert "unfinished" in brim("unpack", dest, tmp_path / "files", check=3).stderr
    library.build(source, dest)
    assert library.verify(dest, source).rows == len(FILES)


@pytest.mark.parametrize("args", [("verify", "--deep"), ("unpack", "files"), ("plan", "--plan")], ids=lambda w: w[0])
def test_an_object_that_changes_while_it_is_read(
    args: tuple[str, str], server: S3Server, s3_prefix: str, s3_proxy: FaultProxy, source: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    destination = BucketDestination(server, tmp_path, f"{s3_prefix}out", s3_proxy)
    verb, text = args
    if verb == "plan":
        key = f"{s3_prefix}a.plan"
        run(destination, verb, source, destination.address, "--save", f"s3://private/{key}")
        arguments = (verb, text, f"s3://private/{key}")
    else:
        run(destination, "build", source, destination.address, "--quiet")
        key = f"{s3_prefix}out/data/train-00000-of-00001.parquet"
        arguments = (verb, destination.address, str(tmp_path / text) if verb == "unpack" else text)
    take = s3_proxy.take

    def replaced(method: str, target: str) -> Rule | None:
        if method == "GET" and target.partition("?")[0].endswith(key):
            server.write(PRIVATE, key, b"something else")
        return take(method, target)

    monkeypatch.setattr(s3_proxy, "take", replaced)
    refused = run(destination, *arguments, check=2)
    assert f"The object '{key}' is not the one that was listed, or is gone." in refused.stderr


def test_large_shards_have_large_parts(
    server: S3Server, s3_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload never has more parts than S3 allows, and the forecast includes the larger parts."""
    monkeypatch.setattr("brim.storage.storage._MOST_PARTS", 2)
    source = write_files(tmp_path / "large", {"a.bin": random_bytes(20_000_000, 1)})
    job = library.plan(source, f"s3://private/{s3_prefix}out")
    assert job.forecast.worker > 3 * (10 << 20)
    job.run()
    [(_, etag)] = server.objects(PRIVATE, f"{s3_prefix}out/data/").values()
    assert etag.strip('"').endswith("-2")


def test_options_of_the_hub(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="upload_with= can only be used with the Hub"):
        library.plan(source, tmp_path / "out", via="xet")
