"""One failed system call per run gives a clear error with the right cause, and the next run gives the same result.

Each test run selects a few positions; BRIM_FAULTS=all tries every call of these jobs (`make faults`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import random_bytes, write_files
from tests.forked import brim
from tests.generators.small_jobs import MODEL, STEPS, TOKENIZER
from tests.guarantees.injection import Fault, Job, Shim, UnitStats, every_fault

WRITER = b"""
import sys
import numpy as np
import brim
from brim.errors import BrimError

source, target = sys.argv[1:]
values = np.random.default_rng(0).random((400, 8), dtype=np.float32)
options = {"rows": 400} if target.endswith(".npy") else {}
try:
    with brim.TensorWriter(target, values=(8, "float32"), resume=True, checkpoint_rows=100, **options) as writer:
        for at in range(writer.rows_done, 400, 50):
            writer.append(values=values[at : at + 50])
except BrimError as error:
    sys.exit(f"brim: {error}") if error.exit_code == 1 else print(f"brim: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def _make_source(folder: Path) -> None:
    """Create files to package, rows to compute, a tokenizer, and code whose calls are not counted."""
    write_files(folder / "files", {f"f{n}.bin": random_bytes(3000 + n, n) for n in range(4)})
    rows = [{"id": n, "text": f"row {n} " + "word " * (n % 5)} for n in range(120)]
    (folder / "rows").mkdir()
    for part in range(2):
        lines = [json.dumps(row) for row in rows[part * 60 : part * 60 + 60]]
        (folder / "rows" / f"part{part}.jsonl").write_text("\n".join(lines) + "\n")
    write_files(folder, {"steps.py": STEPS, "model.py": MODEL, "writer.py": WRITER, "tokenizer.json": TOKENIZER})


def make_jobs(folder: Path) -> dict[str, Job]:
    _make_source(folder)
    files, rows, tokenizer = folder / "files", folder / "rows", folder / "tokenizer.json"
    built = folder / "built"
    brim("build", files, built, "--rows-per-shard", "2", "--quiet")
    limits = ["--memory", "600MB", "--workers", "1", "--quiet"]

    def job(name: str, source: Path, make: Callable[[Path], list[str | Path]], script: bool = False) -> Job:
        destination = folder / f"place-{name}"
        return Job(
            name, [os.fspath(argument) for argument in make(destination / "out")], source, destination, script=script
        )

    def copy_built(location: Path) -> None:
        shutil.copytree(built, location / "out")

    jobs = [
        job("build", files, lambda out: ["build", files, out, "--rows-per-shard", "2", "--workers", "2", "--quiet"]),
        job("tar", files, lambda out: ["build", files, out, "--format", "webdataset", "--workers", "1", "--quiet"]),
        job("map", rows, lambda out: ["map", rows, out, "--fn", "steps.py:length", "--unit-size", "3KB", *limits]),
        job(
            "tokenize",
            rows,
            lambda out: ["tokenize", rows, out, "--tokenizer", tokenizer, "--pack", "16", "--eos", "[UNK]", *limits],
        ),
        job(
            "bin",
            rows,
            lambda out: ["tokenize", rows, out, "--tokenizer", tokenizer, "--format", "bin", "--eos", "[UNK]", *limits],
        ),
        *(
            job(
                f"embed{suffix}",
                rows,
                lambda out, suffix=suffix: [  # type: ignore[misc]
                    *["embed", rows, out / f"a{suffix}" if suffix else out, "--model", "model:factory"],
                    *["--column", "text", "--keep", "id", "--unit-size", "3KB", *limits],
                ],
            )
            for suffix in ("", ".safetensors", ".npy", ".parquet")
        ),
        *(
            job(
                f"tensors{suffix}",
                files,
                lambda out, suffix=suffix: [folder / "writer.py", files, out / f"a{suffix}"],  # type: ignore[misc]
                script=True,
            )
            for suffix in (".safetensors", ".npy", ".parquet")
        ),
        job("unpack", built, lambda out: ["unpack", built, out, "--quiet"]),
        job("verify", files, lambda out: ["verify", out, files, "--quiet"]),
    ]
    for each in jobs:
        if each.name == "verify":
            each.prepare = lambda target=each.place: copy_built(target)  # type: ignore[misc]
        elif each.name.startswith(("embed.", "tensors")):
            each.prepare = (each.place / "out").mkdir
    return {each.name: each for each in jobs}


EVERYTHING = os.environ.get("BRIM_FAULTS") == "all"
PARTS = 4 if EVERYTHING else 1  # of the faults of a job, for processes that run in parallel
# Number of selected faults per job. A worker takes a second to start, so computed jobs get fewer.
DRAWN = {
    **{"build": 5, "tar": 2, "verify": 4, "unpack": 4},
    **{"tensors.safetensors": 2, "tensors.npy": 2, "tensors.parquet": 1},
    **{"map": 3, "tokenize": 1, "bin": 1},
    **{"embed": 1, "embed.safetensors": 2, "embed.npy": 1, "embed.parquet": 1},
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    shim = Shim.build(tmp_path_factory.mktemp("shim"))
    if shim is None:
        pytest.skip("calls that fail are not proved here: that takes Linux and a C compiler")
    return shim


@pytest.fixture(scope="module")
def jobs(shim: Shim, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    return make_jobs(tmp_path_factory.mktemp("jobs").resolve())


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", list(DRAWN))
def test_a_call_fails(shim: Shim, jobs: dict[str, Job], name: str, part: int) -> None:
    """A failed call is survived or reported with the right cause; then the same command gives the same bytes."""
    job = jobs[name]
    job.clear()
    clean = shim.run(job)
    assert clean.code == 0, clean.said
    expected = job.made()
    faults = [fault for fault in every_fault(clean.calls) if not _is_tried_elsewhere(job, fault)][part::PARTS]
    if not EVERYTHING:
        faults = random.Random(name).sample(faults, DRAWN[name])
    wrong = [f"{fault}: {complaint}" for fault in faults for complaint in complaints(shim, job, fault, expected)]
    print(f"{name}, part {part + 1} of {PARTS}: {len(faults)} faults, {len(wrong)} complaints")  # noqa: T201
    assert not wrong, f"{len(wrong)} of {len(faults)} faults:\n" + "\n".join(wrong)


def _is_tried_elsewhere(job: Job, fault: Fault) -> bool:
    """Return whether another job of the same command tests this fault on the same source and units."""
    units = "/units/" in fault.glob or Path(fault.glob).is_relative_to(job.source)
    return units and job.name in ("bin", "embed.safetensors", "embed.npy", "embed.parquet")


def complaints(shim: Shim, job: Job, fault: Fault, expected: dict[str, str]) -> list[str]:
    """Return the defects in the reaction of a job to a fault."""
    job.clear()
    broken = shim.run(job, fault)
    actual = blamed_wrongly(job, fault, broken) if broken.code else []
    if broken.code == 0 and job.made() != expected:
        actual.append("other bytes, and no error")
    repeated = shim.run(job)
    if repeated.code:
        actual.append(f"the next run exits {repeated.code}: {repeated.said}")
    elif job.made() != expected:
        actual.append(f"the next run makes other files: {sorted(set(job.made().items()) ^ set(expected.items()))}")
    return [f"{item}\n    ({broken.hit}: exit {broken.code}, {broken.said.strip()!r})" for item in actual]


def blamed_wrongly(job: Job, fault: Fault, outcome: UnitStats) -> list[str]:
    """Return the defects in the message and the exit code of a failed run."""
    message, hit = outcome.said, outcome.hit
    if hit is None:
        return ["an error without a fault"]
    actual = []
    if "bug" in message or "Traceback" in message or outcome.code not in (2, 3, 5):
        actual.append("called a bug")
    if fault.how == "short":
        actual.append("a short call is not an error")
    if fault.how == "EMFILE" and "ulimit" not in message:
        actual.append("nothing said about the limit of open files")
    if fault.how == "ENOSPC" and "full" not in message and "No space" not in message:
        actual.append("nothing said about the full disk")
    if hit.is_relative_to(job.source):
        if "estination" in message or (hit.name not in message and hit != job.source):
            actual.append("the source is not named, or something else is blamed")
    elif fault.how == "EMFILE" and "Too many files" in message:
        pass  # independent of the file that was to be opened
    elif "The source" in message or "source f" in message or not (str(job.place) in message or hit.name in message):
        actual.append("the destination is not named, or the source is blamed")
    return actual


@pytest.mark.parametrize("method", ["ENOLCK", "EIO"])
def test_a_lock_that_fails(shim: Shim, jobs: dict[str, Job], method: str) -> None:
    """A file system without locks is refused with that reason before anything is written."""
    for name in ("build", "map", "tensors.npy"):
        jobs[name].clear()
        refused = shim.run(jobs[name], Fault("lock", 1, method, "*"))
        assert refused.code == 2, refused.said
        assert "cannot lock files" in refused.said


def test_every_read_error_of_a_shard_is_damage(shim: Shim, jobs: dict[str, Job]) -> None:
    """verify on a disk with read errors names the unreadable shard and exits with code 3."""
    job = jobs["verify"]
    job.clear()
    shards = 0
    for (kind, glob), count in shim.run(job).calls.items():
        for number in range(1, count + 1) if kind in ("read", "pread") and glob.endswith(".parquet") else ():
            outcome = shim.run(job, Fault(kind, number, "EIO", glob))
            assert outcome.hit is not None
            shards += 1
            assert outcome.code == 3, outcome.said
            assert f"data/{outcome.hit.name}: cannot be read: Input/output error" in outcome.said
    assert shards >= 10
