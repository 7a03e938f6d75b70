"""Compare two versions of brim: run the same jobs in turn and measure each.

    python benchmarks/compare.py OLD NEW [--rounds 5] [--only package,publish] [--json FILE]

OLD and NEW are checkouts, whose `src` runs with this Python and its installed packages. Each job is a separate process
(`python -m brim …`) that starts without earlier results. The versions take turns, and the first one changes from round
to round. Processor time is that of the process and its descendants; memory is the peak of the process tree, sampled
from outside. The goals for a refactoring: at most 5 % more processor time, and no more memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from peak import measure
from tables import MB, Part, at_most, comma_list, machine, print_goals, print_machine, print_part, progress, write_json

from tests.s3 import S3Server

HERE = Path(__file__).resolve().parent
MODEL = """
import numpy as np

def make(device="cpu"):
    return lambda given: np.ones((len(given["text"]), 384), np.float32)
"""
STEPS = "def longer(row):\n    return {'length': len(row['text'])}\n"
Job = Callable[[Path, Path], Sequence[str]]  # Python's arguments, for a destination and a checkout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    names = ("package", "files", "publish", "bucket", "select", "map", "tokenize", "embed", "scale")
    parser.add_argument("--only", type=comma_list(*names), default=",".join(names), help="separated by commas")
    parser.add_argument("--data", type=Path, help="where files are made (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.data) as folder:
        facts = machine(Path(folder), ["pyarrow", "numpy"])
        part = compared(arguments, Path(folder))
    print_part(part)
    print_goals({"compare": part})
    print_machine(facts)
    write_json(arguments.json, facts, {"compare": part})
    return 0


def compared(arguments: argparse.Namespace, folder: Path) -> Part:
    part = Part(
        f"{arguments.old.name} and {arguments.new.name}, medians of {arguments.rounds}",
        ["job", "CPU before", "CPU after", "ratio", "peak before", "peak after", "time before", "time after"],
    )
    versions = {"before": arguments.old.resolve(), "after": arguments.new.resolve()}
    with jobs_in(folder, arguments.only.split(",")) as jobs:
        for name, (job, extra) in jobs.items():
            runs: dict[str, list[tuple[float, int, float]]] = {version: [] for version in versions}
            for number in range(arguments.rounds):
                for version in list(versions)[:: 1 if number % 2 else -1]:
                    progress(f"{name}, round {number + 1}, {version}")
                    runs[version].append(one_run(job, folder, versions[version], extra))
            part.runs |= {
                f"{name} {version}": [{"cpu_s": c, "peak_bytes": p, "seconds": s} for c, p, s in match]
                for version, match in runs.items()
            }
            cpu, peak, seconds = (
                [statistics.median(run[position] for run in runs[version]) for version in versions]
                for position in range(3)
            )
            ratio = cpu[1] / cpu[0]
            part.rows.append([
                name, *(f"{value:.2f} s" for value in cpu), f"{ratio:.2f}",
                *(f"{value / MB:.0f} MB" for value in peak), *(f"{value:.2f} s" for value in seconds),
            ])  # fmt: skip
            part.goals.append(at_most(f"{name}: processor time after / before", ratio, 1.05, ""))
            part.goals.append(at_most(f"{name}: memory after / before", peak[1] / peak[0], 1.05, ""))
    return part


def one_run(job: Job, folder: Path, checkout: Path, extra: dict[str, str]) -> tuple[float, int, float]:
    out = folder / "out"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = measure(
        [sys.executable, *job(out, checkout)],
        env={**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{folder / 'code'}", **extra},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.exit_code:
        raise SystemExit(f"{checkout}: exit {result.exit_code}\n{result.output}")
    for remaining in (*folder.glob("out*"), *folder.glob(".out*")):  # a file has its state next to it
        shutil.rmtree(remaining) if remaining.is_dir() else remaining.unlink()
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used, result.peak_bytes, result.seconds


@contextmanager
def jobs_in(folder: Path, wanted: Sequence[str]) -> Iterator[dict[str, tuple[Job, dict[str, str]]]]:
    """Create the data and yield the jobs. A job returns the arguments of Python for a destination."""
    code = folder / "code"
    code.mkdir()
    (code / "steps.py").write_text(STEPS)
    (code / "model.py").write_text(MODEL)
    random = np.random.default_rng(0)
    large, small = folder / "large", folder / "small"
    large.mkdir()
    small.mkdir()
    for number in range(12):
        (large / f"{number}.bin").write_bytes(random.bytes(100 * MB))
    for number in range(5_000):
        (small / f"{number}.bin").write_bytes(random.bytes(2_000))
    vocabulary = [f"w{number}" for number in range(2_000)]
    texts = [" ".join(random.choice(vocabulary, 60)) for _ in range(40_000)]
    pq.write_table(pa.table({"text": texts}), folder / "rows.parquet")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer(folder / "tokenizer.json", texts[:2_000])
    brim = ("-m", "brim")
    limit = ("--memory", "1GB", "--quiet")
    rows = str(folder / "rows.jsonl")
    jobs: dict[str, tuple[Job, dict[str, str]]] = {
        "package": (lambda out, _: [*brim, "build", str(large), str(out), *limit], {}),
        "files": (lambda out, _: [*brim, "build", str(small), str(out), *limit, "--rows-per-shard", "100"], {}),
        "map": (
            lambda out, _: [*brim, "map", str(folder / "rows.parquet"), str(out), "--fn", "steps:longer", *limit], {}
        ),
        # No fast encoder takes a tokenizer of whole words, so both versions use the same encoder.
        "tokenize": (
            lambda out, _: [
                *brim, "tokenize", rows, str(out), "--tokenizer", str(folder / "tokenizer.json"), "--pack", "512",
                "--eos", "?", *limit,
            ],
            {},
        ),
        "embed": (
            lambda out, _: [
                *brim, "embed", rows, f"{out}.safetensors", "--model", "model:make", "--column", "text", *limit
            ],
            {},
        ),
        "scale": (lambda _, checkout: [str(checkout / "benchmarks" / "scale.py"), "--only", "plan"], {}),
    }  # fmt: skip
    if "select" in wanted:  # half of 200 MB, in pages compressed by snappy
        values = pa.array([random.bytes(500) for _ in range(400_000)])
        pq.write_table(pa.table({"n": range(400_000), "value": values}), folder / "values.parquet")
        where = ("--where", "n < 200_000")
        jobs["select"] = (
            lambda out, _: [*brim, "select", str(folder / "values.parquet"), str(out), *where, *limit], {}
        )  # fmt: skip
    with ExitStack() as servers:

        def upload(out: Path, to: str) -> list[str]:
            return [*brim, "build", str(large), to, "--fresh", "--state", f"{out}.state", *limit]

        if "publish" in wanted:
            hub = servers.enter_context(local_hub(folder))
            jobs["publish"] = (lambda out, _: upload(out, "hf://datasets/me/compared"), hub)
        if "bucket" in wanted:
            server = servers.enter_context(S3Server(folder / "s3"))
            jobs["bucket"] = (lambda out, _: upload(out, "s3://private/large"), server.environment)
        yield {name: jobs[name] for name in wanted}


def tokenizer(path: Path, texts: list[str]) -> None:
    import tokenizers

    encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="?"))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    encoder.train_from_iterator(texts, tokenizers.trainers.WordLevelTrainer(special_tokens=["?"]))
    encoder.save(str(path))


@contextmanager
def local_hub(folder: Path) -> Iterator[dict[str, str]]:
    """Start a Hub that hashes uploads and stores nothing."""
    command = [sys.executable, str(HERE / "hub_server.py"), str(folder / "hub")]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        yield {
            "HF_ENDPOINT": server.stdout.readline().strip(),
            "HF_TOKEN": "hf_write",
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
    finally:
        server.stdin.close()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
