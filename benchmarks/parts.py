"""Measure finishing a saved plan that ran in 1,000 parts, compared with 100 parts, for a build and for a map.

    python benchmarks/parts.py [--parts 1000] [--data DIR] [--json FILE]

All parts of the build run sequentially in this process, as on separate machines. The units of the map are computed by
one part, and their files and receipts are then placed as 1,000 parts would have left them, because 1,000 workers would
only add start-up time. The measured command is `brim … --finish`, in a separate process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from peak import Measured, measure
from tables import MB, Part, at_most, machine, print_goals, print_machine, print_part, progress, write_json

import brim
from brim.jobs.plan_storage import Part as PartOf
from brim.jobs.plan_storage import PartReceipts
from brim.state.ledger import LEDGER, Ledger

MOST_S, MOST_GROWTH = 10.0, 1.25
BRIM = [sys.executable, "-m", "brim"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=int, default=1000)
    parser.add_argument("--data", type=Path, default=Path("bench-data"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    data = (arguments.data / "parts").absolute()
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    facts = machine(data, ("brim", "pyarrow"))
    subset, items = max(arguments.parts // 10, 1), arguments.parts
    parts = {
        name: _compared(name, {count: item(data / f"{name}-{count}", count) for count in (subset, items)})
        for name, item in (("build", _build), ("map", _map))
    }
    for part in parts.values():
        print_part(part)
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)
    shutil.rmtree(data)


def _compared(name: str, result: dict[int, Measured]) -> Part:
    part = Part(f"{name}: finishing what parts have done, two shards or units each", ("parts", "s", "peak MB"))
    for count, run in result.items():
        part.rows.append((f"{count:,}", f"{run.seconds:.1f}", f"{run.peak_bytes / MB:.0f}"))
        part.runs[str(count)] = [{"seconds": run.seconds, "peak_bytes": run.peak_bytes}]
    subset, many_items = result.values()
    part.goals = [
        at_most(f"{name}: finish of {max(result):,} parts", many_items.seconds, MOST_S, " s"),
        at_most(
            f"{name}: memory against a tenth of the parts", many_items.peak_bytes / subset.peak_bytes, MOST_GROWTH, "×"
        ),
    ]
    return part


def _finished(folder: Path, verb: str) -> Measured:
    result = measure([*BRIM, verb, "--plan", str(folder / "a.plan"), "--finish", "--quiet"], period_s=0.02)
    assert not result.exit_code, result.output
    progress(f"{folder.name}: {result.seconds:.1f} s, {result.peak_bytes / MB:.0f} MB")
    return result


def _build(folder: Path, count: int) -> Measured:
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(2 * count):
        (source / f"{number:05d}.bin").write_bytes(number.to_bytes(4, "big") * 300)
    brim.plan(source, folder / "out", rows_per_shard=1).save(folder / "a.plan")
    saved = brim.open_plan(folder / "a.plan")
    for number in range(count):
        saved.part(PartOf(number + 1, count))
    return _finished(folder, "build")


def _map(folder: Path, count: int) -> Measured:
    folder.mkdir(parents=True)
    rows = (json.dumps({"number": n, "text": f"row {n} " * 8}) for n in range(2 * count * 5))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "steps.py").write_text("def longer(row):\n    return {'length': len(row['text'])}\n")
    plan = str(folder / "a.plan")
    arguments = ["--fn", "steps.py:longer", "--batch-size", "5", "--unit-size", "400B", "--quiet"]
    _run(folder, "map", "rows.jsonl", "out", *arguments, "--save", plan)
    _run(folder, "map", "--plan", plan, "--part", "1/1", "--quiet")
    _spread(Path(f"{plan}.parts"), count)
    return _finished(folder, "map")


def _run(folder: Path, *arguments: str) -> None:
    subprocess.run([*BRIM, *arguments], cwd=folder, check=True)


def _spread(root: Path, count: int) -> None:
    """Distribute the results of one part over the folders of `count` parts."""
    first = root / PartOf(1, 1).folder
    before = PartReceipts(root.with_name(root.name.removesuffix(".parts"))).ledger(PartOf(1, 1))
    assert before.job is not None
    names = sorted(before.receipts.values(), key=lambda receipt: receipt.name)
    assert len(names) >= count, f"{len(names)} units"
    for number in range(count):
        folder = root / PartOf(number + 1, count).folder
        folder.mkdir()
        (folder / LEDGER).touch()
        ledger = Ledger(folder)
        ledger.start_job(before.job)
        for receipt in names[number::count]:
            (first / receipt.name).rename(folder / receipt.name)
            ledger.add(receipt)
        ledger.close()
    shutil.rmtree(first)


if __name__ == "__main__":
    main()
