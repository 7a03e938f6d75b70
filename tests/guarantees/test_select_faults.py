"""brim select after kills, stops and a full disk: it resumes to the same bytes as a build."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brim.state.ledger import Ledger
from tests.conftest import started, tree_digest
from tests.forked import brim, start
from tests.guarantees.test_disk_full import grow

FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
OPTIONS = ["--where", "n > 4", "--shuffle", "3", "--rows-per-shard", "1", "--quiet"]


@pytest.fixture(params=["none", "snappy", "gzip", "nested"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Create values that are stored as ranges, in pieces, compressed (decoded to a spool file), or nested."""
    rng = random.Random(1)
    files = [{"bytes": rng.randbytes(300_000), "path": f"{n}.bin"} for n in range(45)]
    table = pa.table({"n": range(45), "file": pa.array(files, FILE)})
    nested = request.param == "nested"
    if nested:
        table = pa.table({"n": range(45), "deep": pa.array([{"label": n, "files": [f]} for n, f in enumerate(files)])})
    codec = "snappy" if nested else request.param
    pq.write_table(table, tmp_path / "in.parquet", compression=codec, row_group_size=10)
    return iter([tmp_path / "in.parquet"])


def test_killed_and_stopped(source: Iterator[Path], tmp_path: Path) -> None:
    """After kill -9 and after a stop file, a rerun gives the bytes of an undisturbed run."""
    path = next(source)
    brim("select", path, tmp_path / "whole", *OPTIONS)
    out, stop = tmp_path / "out", tmp_path / "stop"
    arguments = ["select", path, out, *OPTIONS, "--workers", "1"]
    process = start(*arguments)
    while process.poll() is None and len(list(out.glob("data/*.parquet"))) < 3:
        time.sleep(0.005)
    process.kill()
    process.wait()
    result = Ledger(out / ".brim").receipts
    before = {name: (out / name).stat().st_ino for name in result}
    with open(tmp_path / "said", "wb") as message:
        process = start(*arguments, "--stop-file", stop, outputs=(message.fileno(), message.fileno()))
    while process.poll() is None and len(list(out.glob("data/*.parquet"))) <= len(result) + 1:
        time.sleep(0.005)
    stop.touch()
    assert process.wait() in (0, 6)  # 0 if it finished before it checked the stop file
    assert process.returncode == 0 or "un the same command to continue" in (tmp_path / "said").read_text()
    brim(*arguments)
    assert tree_digest(out) == tree_digest(tmp_path / "whole")
    assert {name: (out / name).stat().st_ino for name in result} == before
    brim("verify", out, path)


def test_full_disk(source: Iterator[Path], tmp_path: Path, small_disk: Path) -> None:
    """A selection that cannot fit is refused before the first byte; with free space it succeeds."""
    path = next(source)
    assert "Free disk space" in brim("select", path, small_disk / "out", *OPTIONS, check=5).stderr
    grow(small_disk, 40)
    brim("select", path, small_disk / "out", *OPTIONS)
    brim("verify", small_disk / "out", path)


def test_no_room_for_the_spool(tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that have to be decoded need disk space: without it the run exits with code 5 and names the folder."""
    rng = random.Random(2)
    files = [{"bytes": rng.randbytes(1_000_000), "path": f"{n}.bin"} for n in range(12)]
    pq.write_table(pa.table({"file": pa.array(files, FILE)}), tmp_path / "in.parquet", compression="gzip")
    monkeypatch.setenv("TMPDIR", str(small_disk))
    monkeypatch.setattr("brim.state.scratch.is_in_memory", lambda folder: False)
    from brim import dataset
    from brim.errors import DestinationUnavailableError
    from brim.sources import spools
    from brim.state import scratch

    for module in (spools, scratch):
        monkeypatch.setattr(module, "scratch_folder", lambda: str(small_disk))
    with pytest.raises(DestinationUnavailableError, match="cannot be written to"):
        dataset(tmp_path / "in.parquet").table()


@pytest.mark.long
def test_unreachable_hub_is_named_with_its_cause(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    result = started("select", "hf://datasets/me/x", tmp_path / "out", check=2, env=environment)
    assert "Unset HF_HUB_OFFLINE" in result.stderr
    environment["HF_HUB_OFFLINE"] = "0"
    result = started("select", "hf://datasets/me/x", tmp_path / "out", check=5, env=environment)
    assert "The connection to 127.0.0.1:9 failed" in result.stderr
    assert "Connection refused" in result.stderr
