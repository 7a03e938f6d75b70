"""The documented Slurm example on a real Slurm of three daemons (make test-slurm)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import brim as library
from tests.conftest import random_bytes, tree_digest, write_files
from tests.slurm import Slurm, lacking

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(lacking()), reason=lacking())]

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm"
STEPS = b"""
import os
import time

def slow(row):
    if os.path.exists(os.environ.get("SLOW", "")):
        time.sleep(0.03)
    if row["number"] == 333 and os.path.exists(os.environ.get("BROKEN", "")):
        raise ValueError("a row that fails")
    return {"length": len(row["text"])}

def hungry(row):
    held = bytearray(900_000_000)
    held[::4096] = b"1" * len(held[::4096])
    return {"length": len(held)}
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def work(tmp_path: Path, slurm: Slurm) -> Path:
    """The example's scripts, `brim` on the path, and rows of many small units."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "brim").write_text(f'#!/bin/sh\nexec {sys.executable} -m brim "$@"\n')
    (tmp_path / "bin" / "brim").chmod(0o755)
    rows = "".join(json.dumps({"number": n, "text": f"row {n} of many " * 3}) + "\n" for n in range(3000))
    write_files(tmp_path, {"rows.jsonl": rows.encode(), "steps.py": STEPS})
    slurm.environment["PATH"] = f"{tmp_path / 'bin'}:{slurm.environment['PATH']}"
    return tmp_path


def submit(slurm: Slurm, work: Path, *arguments: str, **extra: str) -> dict[str, str]:
    """Submit with brim-submit.sh; return the job ids of the array and of the finishing job."""
    message = slurm.run("./brim-submit.sh", *arguments, cwd=work, more=extra)
    return dict(re.findall(r"^(array|finish) (\d+)", message, re.MULTILINE))


def logs(work: Path, pattern: str = "brim-*.log") -> str:
    return "\n".join(f"{path.name}: {path.read_text()}" for path in sorted(work.glob(pattern)))


def brim(work: Path, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "brim", *arguments], cwd=work, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def plan_of_rows(work: Path, function: str = "slow") -> dict[str, str]:
    """Save the plan of a map of 30 units; return the result of a single machine."""
    arguments = ("map", "rows.jsonl", "--fn", f"steps.py:{function}", "--batch-size", "10", "--unit-size", "6KB")
    brim(work, arguments[0], arguments[1], "out", *arguments[2:], "--save", "m.plan")
    if function == "slow":
        brim(work, arguments[0], arguments[1], "one", *arguments[2:], "--quiet")
        return content(work / "one")
    return {}


def content(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in tree_digest(folder).items() if not name.startswith(".brim")}


def test_a_build_by_an_array(slurm: Slurm, work: Path) -> None:
    """Six parts on three nodes and a finishing job give the bytes of one machine. Submitting again repeats no work."""
    source = write_files(work / "source", {f"f{i:03d}.bin": random_bytes(50_000, i) for i in range(24)})
    library.build(source, work / "one", rows_per_shard=1)
    brim(work, "plan", "source", "out", "--rows-per-shard", "1", "--save", "b.plan")
    submit(slurm, work, "b.plan", "6", SBATCH_MEM_PER_NODE="600", SBATCH_CPUS_PER_TASK="1")
    slurm.wait_all()
    assert (work / "out").exists(), logs(work)
    assert content(work / "out") == content(work / "one")
    assert brim(work, "plan", "--plan", "b.plan", "--missing", "6").strip() == ""
    repeated = submit(slurm, work, "b.plan", "6")
    assert list(repeated) == ["finish"]
    slurm.wait_all()
    assert slurm.told(repeated["finish"])["JobState"] == "COMPLETED", logs(work, "brim-finish*")


def test_a_lost_node_and_a_part_that_fails(slurm: Slurm, work: Path) -> None:
    """A part on a lost node is requeued and resumes. If another part fails, the finishing job (afterany) names it,
    submits it again, and publishes the same result as a single machine."""
    expected = plan_of_rows(work)
    broken, slow = work / "broken", work / "slow"
    broken.touch()
    slow.touch()
    jobs = submit(slurm, work, "m.plan", "3", "map", SBATCH_MEM_PER_NODE="600", BROKEN=str(broken), SLOW=str(slow))
    task = f"{jobs['array']}_1"
    node = slurm.wait_running(task)
    time.sleep(3)
    slurm.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
    try:
        slurm._until(lambda: slurm.tasks().get(task, ("RUNNING", node)) != ("RUNNING", node), "requeue of the part")
        restarted = slurm.told(task)["Restarts"]
    finally:
        slurm.run("scontrol", "update", f"nodename={node}", "state=resume")
    slow.unlink()
    assert int(restarted) == 1
    # The failing part ends before the first round finishes; after the fix, the second round completes it.
    slurm._until(lambda: "a row that fails" in logs(work), "failing part", 120)
    broken.unlink()
    slurm.wait_all()
    output = logs(work, "brim-finish*")
    assert re.search(r"Missing or unfinished: part \d of 3", output), output
    assert re.search(r"array \d+: parts \d of 3", output), output
    assert (work / "out").exists(), logs(work)
    assert content(work / "out") == expected


def test_the_time_limit(slurm: Slurm, work: Path) -> None:
    """When Slurm announces the time limit, brim exits with 6, the script requeues the task, and the final bytes are the
    same."""
    expected = plan_of_rows(work)
    slow = work / "slow"
    slow.touch()
    # The warning may arrive a minute early, when brim has run for ten seconds.
    jobs = submit(
        slurm, work, "m.plan", "1", "map",
        SBATCH_TIMELIMIT="2", SBATCH_SIGNAL="B:USR1@50", SBATCH_MEM_PER_NODE="600", SLOW=str(slow),
    )  # fmt: skip
    task = f"{jobs['array']}_1"
    slurm._until(lambda: "SIGUSR1" in logs(work) or task not in slurm.tasks(), "warning", 180)
    slow.unlink()
    assert "Run the same command" in logs(work), logs(work)
    slurm._until(lambda: int(slurm.told(task).get("Restarts", 0)) >= 1, "requeue")
    slurm.run("scontrol", "update", f"jobid={task}", "timelimit=10")
    slurm.wait_all()
    assert content(work / "out") == expected, logs(work)


def test_the_memory_of_a_task(slurm: Slurm, work: Path) -> None:
    """brim keeps within --mem: work that needs more ends with exit code 4 instead of a kill by Slurm."""
    arguments = ("--fn", "steps.py:hungry", "--unit-size", "6KB")
    refused = subprocess.run(
        ["sbatch", "--parsable", "--wait", "--mem=600", f"--output={work}/mem.log", "--wrap",
         f"brim map rows.jsonl out {' '.join(arguments)} --limit 20"],
        cwd=work, env=slurm.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    message = (work / "mem.log").read_text()
    assert refused.returncode == 4, message
    assert "oom" not in message.lower(), message
    assert "limit of 315 MB" in message, message  # half of the 600 MiB
