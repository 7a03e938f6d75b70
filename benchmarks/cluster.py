"""Measure the cost and the gain of --engine ray: the overhead per shard, and the speedup by a second worker.

    python benchmarks/cluster.py [--shards 500] [--repeats 3] [--parts shards,workers,nodes] [--data DIR] [--json FILE]

A real Ray on this machine: a head that runs no tasks and two nodes of one CPU each.

*shards*: small files, one per shard, built into a folder by the local executor and by Ray's tasks. *workers*: a
function that only computes, over rows that are cut into units, with one worker and with two. Both engines run both.
*nodes*: one tokenize job on Ray with one, two and three nodes, compared with as many local workers; one node packs.
The time per shard or unit is measured between the first finished ones and the last, because a whole run also contains
the start (importing Ray, connecting, inspecting every node). The overhead is the difference with one shard at a time:
with several, the overhead of one overlaps with the work on the others, and the disk may limit both engines.

Contenders take turns; figures are medians. Not measured: a network between nodes, and more cores than this machine
has: two workers and the driver share them.

(This file cannot be called ray.py: it would be imported in place of Ray.)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tables import (
    Part,
    at_least,
    at_most,
    comma_list,
    machine,
    print_goals,
    print_machine,
    print_part,
    progress,
    write_json,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.clusters import cluster_of  # noqa: E402  the repository is put on the path first

FILE_BYTES = 20_000
MB, TEXTS = 10**6, 16_000
UNITS, ROWS = 40, 400
FUNCTION = """
def burn(row):
    n = 0
    for i in range(200_000):
        n = (n * 31 + i) % 1_000_003
    return {"n": n}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", type=comma_list("shards", "workers", "nodes"), default="shards,workers,nodes")
    parser.add_argument("--data", type=Path, default=Path("bench-data"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    data = (arguments.data / "cluster").absolute()
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    facts = machine(data, ("brim", "ray", "pyarrow"))
    parts: dict[str, Part] = {}
    expected = arguments.parts.split(",")
    with cluster_of(2) as cluster:
        engines = {"local": (), "ray": cluster.options}
        for name in [name for name in expected if name != "nodes"]:
            make = {"shards": shards_part, "workers": workers_part}[name]
            parts[name] = make(data, engines, arguments)
            print_part(parts[name])
    if "nodes" in expected:
        parts["nodes"] = nodes_part(data, arguments)
        print_part(parts["nodes"])
    print_goals(parts)
    print_machine(facts)
    shutil.rmtree(data)
    write_json(arguments.json, facts, parts)


def shards_part(data: Path, engines: dict[str, Sequence[str]], arguments: argparse.Namespace) -> Part:
    source = data / "files"
    source.mkdir()
    for number in range(arguments.shards):
        (source / f"{number:05d}.bin").write_bytes(os.urandom(FILE_BYTES))
    part = Part(
        f"{arguments.shards} shards of {FILE_BYTES // 1000} KB into a folder",
        ("engine", "at a time", "runs", "whole run, s", "ms a shard", "min–max"),
    )
    each: dict[tuple[str, str], list[float]] = {}
    whole: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.repeats):
        for at_a_time, extra in (("1", ("--workers", "1")), ("default", ())):
            for name, options in engines.items():
                args = ["build", str(source), str(data / "out"), "--rows-per-shard", "1", *extra, *options]
                started_at = time.monotonic()
                pace = 1000 * paced(data, data / "out", args, '"how": "written"', skipped=20)
                each.setdefault((name, at_a_time), []).append(pace)
                whole.setdefault((name, at_a_time), []).append(time.monotonic() - started_at)
                progress(f"{name}, {at_a_time} at a time: {pace:.1f} ms a shard")
    for (name, at_a_time), owner in each.items():
        seconds = whole[name, at_a_time]
        figures = (
            f"{statistics.median(seconds):.2f}",
            f"{statistics.median(owner):.1f}",
            f"{min(owner):.1f}–{max(owner):.1f}",
        )
        part.rows.append((name, at_a_time, str(len(owner)), *figures))
        runs = [{"whole_s": a, "shard_ms": b} for a, b in zip(seconds, owner, strict=True)]
        part.runs[f"{name}, {at_a_time} at a time"] = runs
    pairs = zip(each["ray", "1"], each["local", "1"], strict=True)
    over = statistics.median(ray - local for ray, local in pairs)
    part.goals = [at_most("overhead of Ray for each shard, one at a time", over, 10, " ms")]
    return part


def workers_part(data: Path, engines: dict[str, Sequence[str]], arguments: argparse.Namespace) -> Part:
    rows = data / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": n, "pad": "x" * 80}) + "\n" for n in range(ROWS)))
    (data / "steps.py").write_text(FUNCTION)
    part = Part(
        f"a function that computes, {ROWS} rows in about {UNITS} units",
        ("engine", "runs", "1 worker, s a unit", "2 workers, s a unit", "gain"),
    )
    gains: dict[str, float] = {}
    for name, options in engines.items():
        seconds: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(arguments.repeats):
            for workers, source in seconds.items():
                source.append(mapped(data, rows, workers, options))
            progress(f"{name}: {seconds[1][-1]:.3f} s a unit with one worker, {seconds[2][-1]:.3f} with two")
        gains[name] = statistics.median(a / b for a, b in zip(seconds[1], seconds[2], strict=True))
        first, two = (f"{statistics.median(owner):.3f}" for owner in seconds.values())
        part.rows.append((name, str(arguments.repeats), first, two, f"{gains[name]:.2f}×"))
        part.runs[name] = [{"one_s": a, "two_s": b} for a, b in zip(seconds[1], seconds[2], strict=True)]
    part.goals = [at_least("gain of a second worker", gains["ray"], 1.7, "×")]
    return part


def nodes_part(data: Path, arguments: argparse.Namespace) -> Part:
    """Measure Ray nodes of one CPU each, so that a node is a worker."""
    from tests.generators.tokenizers import made_tokenizers, prose

    rows, tokenizer = data / "texts.jsonl", made_tokenizers(data)["wordpiece"]
    some = [prose(200, seed) for seed in range(500)]
    rows.write_text("".join(json.dumps({"text": f"{n} {some[n % 500]}"}) + "\n" for n in range(TEXTS)))
    part = Part(
        f"tokenize and pack {TEXTS:,} texts, {rows.stat().st_size / MB:.0f} MB",
        (
            "nodes or workers",
            "runs",
            "local, ms per unit",
            "Ray, ms per unit",
            "local, whole s",
            "Ray, whole s",
            "of local",
        ),
    )
    gains: dict[int, dict[str, float]] = {}
    for count in (1, 2, 3):
        paces: dict[str, list[float]] = {"local": [], "ray": []}
        whole: dict[str, list[float]] = {"local": [], "ray": []}
        with cluster_of(count) as cluster:
            for _ in range(arguments.repeats):
                for name, options in (("local", ("--workers", str(count))), ("ray", cluster.options)):
                    args = ["tokenize", str(rows), str(data / "tokens"), "--tokenizer", str(tokenizer), *options]
                    args += [
                        "--pack",
                        "1024",
                        "--no-eos",
                        "--unit-size",
                        str(rows.stat().st_size // UNITS),
                        "--encoder",
                        "reference",
                    ]
                    started_at = time.monotonic()
                    paces[name].append(1000 * paced(data, data / "tokens", args, '"how": "computed"', skipped=4))
                    whole[name].append(time.monotonic() - started_at)
                progress(f"{count}: {paces['local'][-1]:.0f} ms per unit here, {paces['ray'][-1]:.0f} by Ray")
        median = {name: statistics.median(source) for name, source in paces.items()}
        whole_s = {name: statistics.median(owner) for name, owner in whole.items()}
        gains[count] = median
        part.rows.append(
            (
                str(count),
                str(arguments.repeats),
                *(f"{median[name]:.0f}" for name in paces),
                *(f"{whole_s[name]:.1f}" for name in whole),
                f"{median['local'] / median['ray']:.2f}×",
            )
        )
        part.runs[str(count)] = [
            {"local_ms": a, "ray_ms": b, "local_s": c, "ray_s": d}
            for a, b, c, d in zip(paces["local"], paces["ray"], whole["local"], whole["ray"], strict=True)
        ]
    part.notes.append("Three nodes share two cores; a third node helps only on a machine with more cores.")
    part.goals = [
        at_least("pace of two nodes against two local workers", gains[2]["local"] / gains[2]["ray"], 0.8, "×"),
        at_least("gain of a second node", gains[1]["ray"] / gains[2]["ray"], 1.5, "×"),
    ]
    return part


def mapped(data: Path, rows: Path, workers: int, options: Sequence[str]) -> float:
    size = str(rows.stat().st_size // UNITS)
    out = data / "mapped"
    arguments = ["map", str(rows), str(out), "--fn", "steps.py:burn", "--unit-size", size, "--workers", str(workers)]
    return paced(data, out, [*arguments, *options], '"how": "computed"', skipped=4)


def paced(cwd: Path, out: Path, arguments: Sequence[str], mark: str, skipped: int) -> float:
    """Return the seconds per shard or unit after all workers have started: without the first few, until the last."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "brim", *arguments, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd, env=environment())
    assert process.stdout is not None
    finished = [time.monotonic() for line in process.stdout if mark in line]
    if process.wait():
        sys.exit(f"{arguments[0]} failed")
    return (finished[-1] - finished[skipped]) / (len(finished) - 1 - skipped)


def environment() -> dict[str, str]:
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


if __name__ == "__main__":
    main()
