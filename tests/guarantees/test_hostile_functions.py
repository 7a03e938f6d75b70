"""User functions that start processes, print without limit or fill memory on import, and their leftovers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import brim

ROWS = 300
STEPS = """
import os, signal, subprocess, time

def orphan(row):
    if row["id"] == 150:
        child = os.fork()
        if child == 0:
            time.sleep(100)
            os._exit(0)
        with open("pids", "a") as file:
            file.write(f"{child}\\n")
        time.sleep(0.6)  # the memory limiter measures at least five times per second
        os.kill(os.getpid(), signal.SIGSEGV)
    return {"y": 1}

def leaves(row):
    if row["id"] == 150:
        with open("pids", "a") as file:
            file.write(f"{subprocess.Popen(['sleep', '100']).pid}\\n")
    return {"y": 1}

def prints(row):
    print("p" * 3000, end="\\nlast words\\n" if row["id"] == 290 else "", flush=True)
    time.sleep(0.005)
    return {"y": 1}

def some_fail(row):
    if row["id"] % 100 == 3:
        raise ValueError("no")
    return {"y": 1}

def another(row):
    return {"y": os.environ["RUN"] + str(row["id"])}
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    lines = [json.dumps({"id": number, "text": "x" * 200}) for number in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "steps.py").write_text(STEPS)
    return tmp_path


def run(work: Path, function: str, *more: str, check: int = 0) -> str:
    arguments = ["map", "rows.jsonl", "out", "--fn", f"steps.py:{function}", "--memory", "600MB", "--workers", "1"]
    return brim(*arguments, *more, cwd=work, check=check).stderr


def left(work: Path) -> list[int]:
    """Return the processes that the function has started and that still run."""
    pids = [int(line) for line in (work / "pids").read_text().split()]
    assert pids
    time.sleep(0.2)
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}/cmdline") and Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_worker_dies_and_its_child_holds_the_line(work: Path) -> None:
    """The death of a worker is detected although a forked child holds its socket, and the child is killed."""
    started_at = time.monotonic()
    assert "ended 3 times (SIGSEGV)" in run(work, "orphan", check=2)
    assert time.monotonic() - started_at < 60
    assert left(work) == []


def test_processes_that_a_function_left_are_ended(work: Path) -> None:
    run(work, "leaves")
    assert left(work) == []


FORKS = """
import os

def note(row):
    with open("rows", "a") as file:
        file.write(f"{os.getpid()} {row}\\n")

def fork():
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return child

def returns(row):
    note(row["n"])
    if row["n"] == 3:
        fork()
    return {"n": row["n"]}

def raises(row):
    if row["n"] == 3 and not fork():
        raise ValueError("in the child")
    note(row["n"])
    return {"n": row["n"]}

def batched(rows):
    if fork():
        note(rows["n"][0])
    return {"n": rows["n"]}
"""


@pytest.mark.parametrize("function", ["returns", "raises", "batched"])
def test_forked_child_that_comes_back_is_ended_and_the_rows_are_right(function: str, work: Path) -> None:
    """A forked child that returns processes no row a second time, and the message names the fix."""
    (work / "steps.py").write_text(FORKS)
    (work / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(20)))
    message = run(work, function, *(["--batched"] if function == "batched" else []))
    assert "exit it with os._exit()" in message
    (created,) = (work / "out" / "data").iterdir()
    assert pq.read_table(created)["n"].to_pylist() == list(range(20))
    workers = {line.split()[0] for line in (work / "rows").read_text().splitlines()}
    assert len(workers) == 1


def test_much_printed_without_a_newline(work: Path) -> None:
    """Output without a newline is shown in truncated pieces, and later output is shown too."""
    message = run(work, "prints")
    assert "last words" in message
    assert max(map(len, message.splitlines())) < 1200


def test_a_module_that_fills_memory_on_import(work: Path) -> None:
    """The limit that the error suggests is above the one that was too small."""
    (work / "steps.py").write_text("HELD = bytearray(500_000_000)\ndef f(row):\n    return {}\n")
    arguments = ["map", "rows.jsonl", "out", "--fn", "steps.py:f", "--memory", "400MB", "--json"]
    refused = brim(*arguments, cwd=work, check=4)
    errors = [json.loads(line) for line in (refused.stdout + refused.stderr).splitlines() if line.startswith("{")]
    assert max(error.get("need_bytes", 0) for error in errors) > 400_000_000


def test_quarantined_rows_of_an_earlier_job_do_not_stay(work: Path) -> None:
    run(work, "some_fail", "--on-error", "quarantine")
    assert pq.read_table(work / "out" / "quarantine.parquet").num_rows == 3
    run(work, "leaves", "--on-error", "quarantine", "--fresh")
    assert not (work / "out" / "quarantine.parquet").exists()


def test_quarantined_rows_of_an_earlier_attempt_do_not_stay(work: Path) -> None:
    """A unit that is computed again without bad rows removes its earlier quarantined rows."""
    out = work / "out"
    out.mkdir()
    run(work, "some_fail", "--on-error", "quarantine")
    assert (out / "quarantine.parquet").exists()
    (out / "quarantine.parquet").unlink()
    (out / ".brim" / "units").mkdir()
    (out / ".brim" / "ledger.jsonl").unlink()
    for shard in (out / "data").iterdir():
        shard.unlink()
    stale = out / ".brim" / "units" / "00000000.bad.arrow"
    stale.write_bytes(b"of an attempt that was killed")
    run(work, "leaves", "--on-error", "quarantine")
    assert not (out / "quarantine.parquet").exists()


def test_files_of_others_are_refused_before_the_work(work: Path) -> None:
    (work / "out" / "data").mkdir(parents=True)
    (work / "out" / "data" / "train-00000-of-00009.parquet").write_bytes(b"mine")
    assert "brim did not write" in run(work, "leaves", check=2)
    assert not (work / "pids").exists()
    assert (work / "out" / "data" / "train-00000-of-00009.parquet").read_bytes() == b"mine"


def test_rows_of_two_runs_are_not_mixed(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one shard of a nondeterministic function is lost, all rows are computed by the new run."""
    monkeypatch.setenv("RUN", "a")
    run(work, "another", "--unit-size", "8KB")
    shards = sorted((work / "out" / "data").iterdir())
    assert len(shards) > 3
    shards[1].unlink()
    monkeypatch.setenv("RUN", "b")
    run(work, "another", "--unit-size", "8KB")
    rows = [row["y"] for shard in shards for row in pq.read_table(shard).to_pylist()]
    assert rows == [f"b{number}" for number in range(ROWS)]
    brim("verify", "out", "--quiet", cwd=work)
