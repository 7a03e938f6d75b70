"""Kills with SIGKILL at random times."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from brim.state.ledger import Ledger
from tests.conftest import brim, random_bytes, tree_digest, write_files
from tests.forked import start
from tests.killing import kills

MOMENTS = kills(14)
OPTIONS = ["--rows-per-shard", "1", "--quiet"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kill") / "source"
    return write_files(folder, {f"f{i:02d}.bin": random_bytes(400_000 + i, i) for i in range(60)})


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> dict[str, str]:
    brim("build", source, source.parent / "whole", *OPTIONS)
    return tree_digest(source.parent / "whole")


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "3"])
def test_killed_at_random_moments(source: Path, undisturbed: dict[str, str], tmp_path: Path, workers: str) -> None:
    """After every kill, a rerun gives the bytes of an undisturbed build.

    It does not write shards with a receipt again.
    """
    moments = random.Random(f"brim{workers}")
    landed = 0
    for number in range(MOMENTS // 2):
        out = tmp_path / "out"
        waits_for = ".brim" if number % 3 == 0 else "data/*.parquet"  # the start of the run, or the start of writing
        arguments = ["build", source, out, *OPTIONS, "--workers", workers]
        process = start(*arguments)
        while process.poll() is None and not list(out.glob(waits_for)):
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.25))
        process.kill()
        process.wait()
        receipts = Ledger(out / ".brim").receipts
        landed += 0 < len(receipts) < 60
        before = {name: _identity(out / name) for name in receipts}
        for name, receipt in receipts.items():
            assert (out / name).stat().st_size == receipt.size
        brim(*arguments)
        assert tree_digest(out) == undisturbed
        assert {name: _identity(out / name) for name in receipts} == before
        shutil.rmtree(out)
    assert landed > MOMENTS // 6, "too few kills fell into the writing of shards to prove anything"


def test_killed_again_and_again(source: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    """A build that is killed ten times in a row still completes."""
    out = tmp_path / "out"
    arguments = ["build", source, out, *OPTIONS, "--workers", "1"]
    for _ in range(10):
        process = start(*arguments)
        time.sleep(0.2)
        process.kill()
        process.wait()
    brim(*arguments)
    assert tree_digest(out) == undisturbed
    brim("verify", out, source)


def _identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns
