"""Compare forecasts with measurements: ten jobs, each predicted first and then run.

    python benchmarks/forecasts.py [--only NAME,…] [--json FILE]

Each job is a separate process under `brim run --json`, whose peak (unreclaimable memory, including the kernel's peak
counters) is compared with the forecast. The memory of the process without the job (interpreter, NumPy) is measured
once and is the --base of forecasts that accept one. A case is good if the peak lies within the range; a single number
may be 5 % off.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tables import MB, Goal, Part, machine, print_goals, print_machine, print_part, progress, write_json

_EXACT = 0.05  # for a forecast that is a number and not a range
BASE = "import numpy as np\n"
CONCAT = """
import numpy as np, sys
rows, dims, copies, kind = int(sys.argv[1]), [int(d) for d in sys.argv[2].split(",")], int(sys.argv[3]), sys.argv[4]
pieces = [[np.ones((512, d), kind) for _ in range(rows // 512)] for d in dims]
joined = [np.concatenate(one) for one in pieces]
more = [one.copy() for one in joined] if copies > 2 else []
"""
PID = """
import numpy as np, sys
rows, dims = int(sys.argv[1]), int(sys.argv[2])
pieces = [np.ones((512, dims), "float32") for _ in range(rows // 512)]
print("ready", flush=True)
sys.stdin.readline()
joined = np.concatenate(pieces)
print("done", flush=True)
sys.stdin.readline()
"""
PART = """
import os, numpy as np
part = float(os.environ["BRIM_FRACTION"])
held = [np.ones(125_000) for _ in range(int(400 * part))]
"""
BENT = """
import os, numpy as np
part = float(os.environ["BRIM_FRACTION"])
held = [np.ones(125_000) for _ in range(int(100 * part + 400 * part * part))]
"""
EMBED = """
import glob, sys
from datasets import Dataset, Features, Image
from datasets.table import embed_table_storage
files = sorted(glob.glob(sys.argv[1] + "/*.png"))
ds = Dataset.from_dict({"image": files}, features=Features({"image": Image()}))
shards = int(sys.argv[3])
for number in range(shards):
    shard = ds.shard(shards, number, contiguous=True).with_format("arrow")
    shard = shard.map(embed_table_storage, batched=True, batch_size=len(shard), keep_in_memory=True)
    shard.to_parquet(f"{sys.argv[2]}/{number}.parquet")
"""
MAP = """
import sys
from datasets import Dataset
rows, size, workers = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
def make():
    for number in range(rows):
        yield {"text": chr(97 + number % 26) * size}
def upper(batch):
    return {"text": [text.upper() for text in batch["text"]]}
if __name__ == "__main__":
    ds = Dataset.from_generator(make, cache_dir=sys.argv[4])
    ds.map(upper, batched=True, num_proc=workers if workers > 1 else None, cache_file_name=None)
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A forecast and the measured peak, in bytes."""

    low: int
    high: int
    peak: int
    seconds: float

    @property
    def within(self) -> bool:
        low, high = (
            (self.low, self.high) if self.low < self.high else (self.low * (1 - _EXACT), self.high * (1 + _EXACT))
        )
        return low <= self.peak <= high


def forecast(*arguments: str) -> tuple[int, int]:
    records = subprocess.run(
        [sys.executable, "-m", "brim", "forecast", *arguments, "--json"], capture_output=True, check=True
    )
    facts = json.loads(records.stdout)
    return facts["low_bytes"], facts["high_bytes"]


def run(code: str, *arguments: str, options: tuple[str, ...] = ()) -> int:
    """Run a process and return its peak."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.py"
        script.write_text(code)
        command = [
            sys.executable,
            "-m",
            "brim",
            "run",
            "--json",
            "--no-cgroup",
            *options,
            "--",
            sys.executable,
            str(script),
        ]
        result = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, env={**os.environ, "HF_HOME": folder}
        )
    facts = json.loads(result.stderr.splitlines()[-1])
    if facts["exit_code"]:
        raise SystemExit(f"the job failed: {result.stderr[-2000:]}")
    return int(facts["peak_bytes"])


@functools.cache
def base_bytes() -> int:
    return run(BASE)


def concat(rows: int, dims: str, copies: int, kind: str) -> tuple[tuple[int, int], int]:
    arguments = [text for item in dims.split(",") for text in ("--dims", item)]
    extra = ["--copies", str(copies)] if copies != 2 else []
    report = forecast("concat", "--rows", str(rows), *arguments, "--dtype", kind, *extra, "--base", str(base_bytes()))
    return report, run(CONCAT, str(rows), dims, str(copies), kind)


def running(adds: bool) -> tuple[tuple[int, int], int]:
    """Measure a process that already has its parts and concatenates them on a signal."""
    rows, dims = 204_800, 256
    with tempfile.TemporaryDirectory() as folder:
        script, log = Path(folder) / "job.py", Path(folder) / "l.jsonl"
        script.write_text(PID)
        command = [sys.executable, "-m", "brim", "run", "-q", "--no-cgroup", "--log", str(log), "--"]
        command += [sys.executable, str(script), str(rows), str(dims)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        pid = next(
            e["pid"] for e in map(json.loads, log.read_text().splitlines()) if e.get("pid") and e["type"] == "head"
        )
        pid = _child_of(process.pid, str(script)) or pid
        step = ["--adds", str(rows * dims * 4)] if adds else ["--rows", str(rows), "--dims", str(dims)]
        report = forecast("pid", str(pid), *step, "--memory", "64GB")
        for _ in range(2):
            process.stdin.write("go\n")
            process.stdin.flush()
            process.stdout.readline()
        process.wait()
        end = next(e for e in map(json.loads, log.read_text().splitlines()) if e["type"] == "end")
    return report, int(end["peak_bytes"])


def _child_of(pid: int, script: str) -> int | None:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if script in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    return None


def sampled(code: str, parts: tuple[str, ...]) -> tuple[tuple[int, int], int]:
    with tempfile.TemporaryDirectory() as folder:
        logs = [f"{folder}/{number}.jsonl" for number in range(len(parts))]
        for part, log in zip(parts, logs, strict=True):
            run(code, options=("--fraction", part, "--log", log))
        report = forecast("sampled", *logs)
    return report, run(code, options=("--fraction", "1/1"))


def embedded(files: int, size: int, shards: int) -> tuple[tuple[int, int], int]:
    """Measure the usual loop: a shard's files into a table, the table into Parquet. The files only resemble images."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(files):
            (Path(folder) / f"{number:04d}.png").write_bytes(os.urandom(size))
        per_shard = -(-files // shards) * size
        report = forecast("embed-files", "--shard-bytes", str(per_shard), "--largest-file", str(size))
        return report, run(EMBED, folder, folder, str(shards))


def mapped(rows: int, size: int, workers: int) -> tuple[tuple[int, int], int]:
    report = forecast("map", "--row-bytes", str(size), "--workers", str(workers))
    with tempfile.TemporaryDirectory() as folder:
        return report, run(MAP, str(rows), str(size), str(workers), folder)


CASES: dict[str, Callable[[], tuple[tuple[int, int], int]]] = {
    "concat, 200 MB of float32": lambda: concat(204_800, "256", 2, "float32"),
    "concat, two outputs, float16": lambda: concat(204_800, "256,512", 2, "float16"),
    "concat and a copy to save": lambda: concat(102_400, "256", 3, "float32"),
    "a process and its next step (rows × dims)": lambda: running(adds=False),
    "a process and its next step (--adds)": lambda: running(adds=True),
    "sampled at 1/16, 1/8, 1/4": lambda: sampled(PART, ("1/16", "1/8", "1/4")),
    "sampled, bends upwards": lambda: sampled(BENT, ("1/8", "1/4", "1/2")),
    "embed files, 1 shard of 120 MB": lambda: embedded(40, 3_000_000, 1),
    "embed files, 4 shards of 60 MB": lambda: embedded(80, 3_000_000, 4),
    "map, rows of 50 KB": lambda: mapped(6_000, 50_000, 1),
    "map, rows of 50 KB, 2 workers": lambda: mapped(6_000, 50_000, 2),
}


def compare(selection: list[str]) -> Part:
    part = Part("Forecast against fact", ["case", "forecast", "measured", "", "time"])
    good = []
    for name, case in CASES.items():
        if selection and not any(text in name for text in selection):
            continue
        progress(name)
        started_at = time.monotonic()
        (low, high), peak = case()
        actual = Found(low, high, peak, time.monotonic() - started_at)
        good.append(actual.within)
        span = f"{low / MB:.0f} to {high / MB:.0f} MB" if low < high else f"{low / MB:.0f} MB"
        part.rows.append(
            [name, span, f"{peak / MB:.0f} MB", "within" if actual.within else "OUTSIDE", f"{actual.seconds:.0f} s"]
        )
        part.runs[name] = [asdict(actual)]
    part.goals.append(Goal("every fact lies within its forecast", all(good), f"{sum(good)} of {len(good)}"))
    part.goals.append(Goal("ten cases or more", len(good) >= 10, str(len(good))))
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecasts against what then happens.")
    parser.add_argument("--only", default="", help="words in the names of cases, separated by commas")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    facts = machine(Path(tempfile.gettempdir()), ["numpy", "pyarrow", "datasets"])
    parts = {"forecasts": compare([argument for argument in arguments.only.split(",") if argument])}
    print_part(parts["forecasts"])
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


if __name__ == "__main__":
    main()
