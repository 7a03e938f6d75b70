"""Check that 40 jobs stay within the memory limit: functions that take 1 to 200 times their batch, at 300 MB to 1 GB.

Each is a separate `brim map`, measured from outside every 5 ms. It must succeed, or exit with code 4 and name the rows
that do not fit; and its processes together must not use more memory than the limit.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
from peak import Measured, measure
from tables import MB, Part, at_most, machine, print_goals, print_machine, print_part, progress, write_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.generators.hungry import KINDS

ROWS, BATCH_ROWS, ROW_BYTES = 192, 16, 64_000
FACTORS = (1, 2, 5, 10, 20, 40, 80, 120, 160, 200)
LIMITS = (300, 400, 600, 800, 1000)


@dataclass(frozen=True, slots=True)
class Job:
    number: int
    kind: str
    factor: int
    limit_mb: int
    batched: bool

    @property
    def batch_bytes(self) -> int:
        return BATCH_ROWS * ROW_BYTES


def jobs(seed: int = 0) -> list[Job]:
    draw = random.Random(seed)
    pairs = [(kind, factor) for kind in KINDS for factor in FACTORS]
    return [
        Job(number, kind, factor, draw.choice(LIMITS), draw.random() < 0.7)
        for number, (kind, factor) in enumerate(pairs)
    ]


def write_source(job: Job, path: Path) -> None:
    """Write rows whose function takes `factor` times the batch in every third batch, and little in the others."""
    with open(path, "w") as file:
        for number in range(ROWS):
            hungry = number // BATCH_ROWS % 3 == 1
            take = job.factor * (ROW_BYTES if job.batched else job.batch_bytes) if hungry else 1000
            row = {"id": number, "kind": job.kind, "take": take, "text": "x" * ROW_BYTES}
            file.write(json.dumps(row) + "\n")


def run(job: Job, folder: Path) -> tuple[Measured, str]:
    source, out = folder / f"{job.number}.jsonl", folder / f"{job.number}"
    write_source(job, source)
    function = "tests.generators.hungry:batch" if job.batched else "tests.generators.hungry:row"
    command = [sys.executable, "-m", "brim", "map", str(source), str(out), "--fn", function, "--quiet"]
    command += ["--memory", f"{job.limit_mb}MB", "--unit-size", "3MB", "--remove-columns", "text"]
    command += ["--batched", "--batch-size", str(BATCH_ROWS)] if job.batched else []
    measured = measure(command, period_s=0.005)
    return measured, judge(job, measured, out)


def judge(job: Job, measured: Measured, out: Path) -> str:
    """Return the kind of result; WRONG if it is neither of the two expected ones."""
    if measured.exit_code == 4 and "row" in measured.output:
        return "does not fit"
    if measured.exit_code != 0:
        return f"WRONG: exit {measured.exit_code}: {measured.output[-300:]}"
    rows = [row for path in sorted(out.glob("data/*.parquet")) for row in pq.read_table(path).to_pylist()]
    if [row["id"] for row in rows] != list(range(ROWS)) or any(row["held"] <= 0 for row in rows):
        return "WRONG: other rows"
    return "right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    part = Part("functions that take 1 to 200 times their batch", ("takes", "limit", "peak", "of limit", "s", "end"))
    shares, wrong = [], 0
    with tempfile.TemporaryDirectory(prefix="brim-limits-") as folder:
        facts = machine(Path(folder), ("brim", "pyarrow"))
        for job in jobs()[: arguments.jobs]:
            measured, end = run(job, Path(folder))
            fraction = measured.peak_bytes / (job.limit_mb * MB)
            shares.append(fraction)
            wrong += end.startswith("WRONG")
            label = f"{job.factor} × batch, {job.kind}{'' if job.batched else ', rows'}"
            memory = (f"{job.limit_mb} MB", f"{measured.peak_bytes / MB:.0f} MB", f"{100 * fraction:.1f} %")
            part.rows.append((label, *memory, f"{measured.seconds:.1f}", end))
            part.runs[f"{job.number}: {label}"] = [{"seconds": measured.seconds, "peak_bytes": measured.peak_bytes}]
            progress(" | ".join(part.rows[-1]))
    part.goals = [at_most("ended wrongly", wrong, 0, ""), at_most("the highest peak", 100 * max(shares), 100, " %")]
    print_part(part)
    print_goals({"limits": part})
    print_machine(facts)
    write_json(arguments.json, facts, {"limits": part})
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
