"""A cache is synced after its result is used: what its files are worth in this boot, in another, and on a bad disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from brim.jobs.caches import make_last
from brim.state.deferred_sync import boot_here
from brim.state.ledger import LEDGER, Ledger
from tests.faults.injection import Fault, Shim

ROWS = 4000
# Every unit that is computed leaves a mark, so that the next run tells which were done again.
SCRIPT = """
import os, pathlib, sys, time, brim, brim.jobs.caches, brim.execution.run_units, brim.state.deferred_sync
after, boot, later_s = sys.argv[1:]
if boot:
    brim.state.ledger.boot_id = brim.state.deferred_sync.boot_id = lambda: boot
brim.execution.run_units._LATER_S = float(later_s)
brim.jobs.caches._AT_ONCE_BYTES = int(os.environ["AT_ONCE"])
if after == "die":  # before the disk was heard of
    brim.jobs.caches.later = lambda work: None
def add(batch, numbers):
    if numbers[0] % 1000 == 0:
        open(f"marks/{numbers[0]}-{os.urandom(4).hex()}", "w").close()
    if os.environ["AFTER"] == "crash" and numbers[0] >= 3000:
        ledger, = pathlib.Path("cache").glob("*/units/ledger.jsonl")
        while ledger.read_text().count('"shard"') < int(os.environ["RECEIPTS"]):
            time.sleep(0.01)
        os.kill(os.getppid(), 9)
    return {"twice": [2 * number for number in batch["number"]]}
made = brim.map("rows.parquet", add, batched=True, batch_size=1000, with_indices=True, unit_size="8KB", num_proc=1,
                cache_dir="cache", memory="700MB")
assert made["twice"] == [2 * number for number in range(4000)]
if after == "die":
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"number": range(ROWS)}), tmp_path / "rows.parquet", row_group_size=1000)
    (tmp_path / "marks").mkdir()
    if not boot_here(tmp_path):
        pytest.skip("a later sync is not proved here: the folder of tests is not on a disk of this machine alone")
    return tmp_path


def run(work: Path, after: str = "", boot: str = "", later_s: float = 30, **environment: str) -> tuple[int, str, int]:
    """How it ended, what it said, and how many units were computed."""
    own = {"AFTER": after, "AT_ONCE": "0", "RECEIPTS": "3" if later_s else "6"}  # no matter of the function's
    environment = {**os.environ, **own, **environment}
    command = [sys.executable, "-c", SCRIPT, after, boot, str(later_s)]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=60)
    marks = list((work / "marks").iterdir())
    for mark in marks:
        mark.unlink()
    return done.returncode, done.stderr, len(marks)


def units_of(work: Path) -> Path:
    return next((work / "cache").glob("*/units"))


def boots(work: Path) -> int:
    """How many receipts count in one boot alone, and one more if the job is done for that one alone."""
    lines = (units_of(work) / LEDGER).read_text().splitlines()
    records = [json.loads(line.partition(" ")[2]) for line in lines]
    kinds = ("shard", "done", "done for now")
    last = {record.get("name", "done"): record for record in records if record["type"] in kinds}
    return sum("boot" in record for record in last.values())


def test_a_program_that_ends_leaves_a_cache_that_lasts(work: Path) -> None:
    """Its end waits for the disk: the ledger is the one that is written for good, and any boot takes it."""
    assert run(work) == (0, "", 4)
    assert boots(work) == 0
    assert Ledger(units_of(work)).done
    assert run(work, boot="another") == (0, "", 0)


def test_a_result_counts_though_its_program_was_killed(work: Path) -> None:
    """In this boot nothing is computed again, and the next run makes it last."""
    code, _, computed = run(work, "die")
    assert (code, computed) == (-9, 4)
    assert boots(work) == 5  # four units, and that the job is done
    assert run(work) == (0, "", 0)
    assert boots(work) == 0


def test_a_machine_that_stopped_before_the_sync(work: Path) -> None:
    """In another boot, what was not synced is computed again, whatever its files look like."""
    run(work, "die")
    for unit in units_of(work).glob("*.arrow"):
        unit.write_bytes(bytes(unit.stat().st_size))  # as a power cut may leave it
    assert run(work, boot="another") == (0, "", 4)
    assert boots(work) == 0


def test_a_long_job_is_synced_while_it_runs(work: Path) -> None:
    """What was done a while before the machine stops is kept; of a job that was killed the rest counts in its boot."""
    assert run(work, "crash", later_s=0)[::2] == (-9, 4)
    assert boots(work) == 0
    assert len(Ledger(units_of(work)).receipts) == 3
    assert run(work, boot="another") == (0, "", 1)


def test_a_crash_before_the_sync(work: Path) -> None:
    """Killed in the middle: units count in this boot, and not in another."""
    assert run(work, "crash")[::2] == (-9, 4)
    assert boots(work) == 3
    assert run(work, boot="another")[::2] == (0, 4)


@pytest.fixture
def shim(work: Path) -> Shim:
    made = Shim.build(work)
    if made is None:
        pytest.skip("calls that fail are not proved here: that takes Linux and a C compiler")
    return made


FAILS = Fault("fsync", 1, "EIO", "*/units/*.arrow")


def test_a_disk_that_fails_later(work: Path, shim: Shim) -> None:
    """The program is told that its result cannot be relied on, and it is computed again the next time."""
    code, said, computed = run(work, **shim.variables(FAILS, [work / "cache"]))
    assert (code, computed) == (0, 4)
    assert "could not be written to disk" in said
    assert "Traceback" not in said
    assert run(work) == (0, "", 4)


@pytest.mark.parametrize("later_s", [30, 0], ids=["at the end", "while it runs"])
def test_a_disk_that_fails_before_the_call_returns(work: Path, shim: Shim, later_s: float) -> None:
    """The call fails, and what the disk has lost is computed again: the disk says so once, and not to the next run."""
    variables = shim.variables(FAILS, [work / "cache"]) | {"AT_ONCE": str(64 << 20)}
    code, said, _ = run(work, later_s=later_s, **variables)
    assert (code, "Input/output error" in said) == (1, True)
    kept = sum(len(Ledger(units).receipts) for units in (work / "cache").glob("*/units"))  # no folder: nothing is kept
    assert kept == 0 or later_s == 0
    assert run(work) == (0, "", 4 - kept)


def test_files_that_changed_meanwhile_are_not_called_synced(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wrote them syncs them: they are told by more than their names."""
    run(work, "die")
    folder, unit = units_of(work).parent, units_of(work) / "00000002.arrow"

    def replaced(path: Path) -> None:
        other = unit.with_name("other")
        other.write_bytes(unit.read_bytes())
        other.replace(unit)

    monkeypatch.setattr("brim.jobs.caches.sync_folder", replaced)
    make_last(folder)
    assert boots(work) == 5
    monkeypatch.undo()
    make_last(folder)
    assert boots(work) == 0


def test_a_cache_that_is_gone_needs_no_sync(tmp_path: Path) -> None:
    """Who removes it does not wait for the disk, and hears of nothing."""
    make_last(tmp_path / "removed")
    assert not (tmp_path / "removed").exists()
