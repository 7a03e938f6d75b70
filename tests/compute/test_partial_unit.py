"""The log of an unfinished unit contains exactly the data in its receipt."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from brim.compute.outputs.partial_unit import PartialUnit, partial_files, remove_partial

SINGLE, TWO, BAD = pa.table({"a": [1, 2]}), pa.table({"a": ["x"], "b": [None]}), pa.table({"why": ["no"]})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRIM_PARTIAL_UNIT_SECONDS", "1e-9")
    log = PartialUnit(tmp_path, 7, "job")
    log.add(SINGLE, [], 10, [0, 0, 0])
    log.add(None, [BAD], 20, [10, 0, 0])
    log.add(TWO, [BAD], 30, [11, 0, 0])
    return tmp_path


def test_a_resumed_log_holds_what_the_last_receipt_says(folder: Path) -> None:
    log = PartialUnit(folder, 7, "job")
    assert (log.rows, log.counts) == (30, [11, 0, 0])
    assert (list(log.results()), log.left_out()) == ([SINGLE, TWO], [BAD, BAD])
    assert PartialUnit(folder, 8, "job").rows == 0


def test_results_after_the_last_receipt_are_truncated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_PARTIAL_UNIT_SECONDS", "3600")
    PartialUnit(folder, 7, "job").add(SINGLE, [BAD], 40, [12, 0, 0])
    results = partial_files(folder, 7)[0]
    results.write_bytes(results.read_bytes() + b"torn")
    log = PartialUnit(folder, 7, "job")
    assert (log.rows, list(log.results()), log.left_out()) == (30, [SINGLE, TWO], [BAD, BAD])
    log.add(TWO, [], 50, [12, 0, 0])
    assert list(log.results()) == [SINGLE, TWO, TWO]


def test_receipts_wait_for_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIM_PARTIAL_UNIT_SECONDS", "3600")
    PartialUnit(tmp_path, 7, "job").add(SINGLE, [], 10, [0, 0, 0])
    assert not partial_files(tmp_path, 7)[2].exists()
    assert PartialUnit(tmp_path, 7, "job").rows == 0


@pytest.mark.parametrize(
    "fault", ["identity", "short log", "no log", "short left-out", "torn receipt", "empty receipt"]
)
def test_a_log_that_cannot_be_trusted_is_begun_again(folder: Path, fault: str) -> None:
    results, left_out, receipt = partial_files(folder, 7)
    if fault == "short log":
        results.write_bytes(results.read_bytes()[:-1])
    elif fault == "no log":
        results.unlink()
    elif fault == "short left-out":
        left_out.write_bytes(left_out.read_bytes()[:-1])
    elif fault.endswith("receipt"):
        receipt.write_bytes(receipt.read_bytes()[: 20 if fault.startswith("torn") else 0])
    log = PartialUnit(folder, 7, "other job" if fault == "identity" else "job")
    assert (log.rows, log.counts, list(log.results()), log.left_out()) == (0, [], [], [])
    assert not receipt.exists()


def test_removing_a_log_leaves_no_file(folder: Path) -> None:
    remove_partial(folder, 7)
    remove_partial(folder, 7)
    assert list(folder.iterdir()) == []
