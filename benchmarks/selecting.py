"""Compare selecting rows by brim select, a plain copy, DuckDB, Polars, datasets and pyarrow.

Parts. *large*: 10 GB of values of 5 MB in shards of brim; filter, split, join, re-shard, shuffle and sort, compared
with `cp`, sync and `sha256sum` of the written bytes, in the same run. *small*: 100,000 values of 10 kB; *snappy* and
*zstd*: 1 GB of images that do not compress, in row groups of 100 MB; half of the rows, shuffled, compared with the
peers, as medians of five rounds. *decode*: the same images with gzip, which have to be decoded. *remote*
(selecting_far.py): rows from a Hub and a bucket with 20 ms latency, by requests and bytes, compared with the peers.

The shards of *large* are sparse: footers, page headers and lengths are real, their values are holes. Memory is
that of the process tree, measured by peak.py. Not called select.py: a script of that name would hide the standard
library's module. Sizes are smaller with --scale; the machine should be idle, and the page cache holds what fits.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from peak import Measured, measure
from selecting_far import remote
from selecting_peers import SYNCED
from tables import (
    MB,
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

HERE = Path(__file__).parent
BRIM = [sys.executable, "-m", "brim", "select"]
PEERS = str(HERE / "selecting_peers.py")
PEER_NAMES = ("duckdb-200MB", "duckdb-1GB", "polars", "datasets", "pyarrow")
FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
LARGE_BYTES = 5 * MB
IMAGE_BYTES = 330_000
ROUNDS = 5
PACKAGES = ("brim", "pyarrow", "duckdb", "polars", "datasets", "numpy")


def write(path: Path, rows: int, size: int, **options: object) -> Path:
    """Write a Parquet file of random values, with row groups of about 100 MB."""
    rng, step = np.random.default_rng(rows), max(100 * MB // size, 1)
    schema = pa.schema([("n", pa.int64()), ("key", pa.int64()), ("image", FILE)])
    with pq.ParquetWriter(path, schema, use_dictionary=["n", "key"], **options) as writer:  # type: ignore[arg-type]
        for start in range(0, rows, step):
            count = min(step, rows - start)
            data = rng.bytes(count * size)
            files = [{"bytes": data[n * size : (n + 1) * size], "path": f"{start + n}.jpg"} for n in range(count)]
            keys = rng.permutation(count) + start
            columns = {"n": np.arange(start, start + count), "key": keys, "image": pa.array(files, FILE)}
            writer.write_table(pa.table(columns, schema=schema), row_group_size=step)
    return path


def write_sparse(folder: Path, rows: int) -> Path:
    """Write the shards that brim build makes of files of 5 MB, without the content of these files."""
    import brim
    from brim.formats.splice import _LITERAL
    from brim.plans.shard_bytes import splice_of

    files = folder / "files"
    files.mkdir()
    for row in range(rows):
        with open(files / f"{row}.jpg", "wb") as file:
            file.truncate(LARGE_BYTES)
    keys = np.random.default_rng(rows).permutation(rows)
    table = pa.table({"n": np.arange(rows), "key": keys, "image": [f"{row}.jpg" for row in range(rows)]})
    job = brim.plan(brim.table(table, files={"image": "image"}, root=files), folder / "unused")
    out = folder / "in"
    (out / "data").mkdir(parents=True)
    for shard in job.plan.shards:
        with splice_of(job.plan, shard) as splice, open(out / shard.name, "wb") as target:
            position = 0
            for source, start, size in splice._segments(0, splice.size):
                if source == _LITERAL:
                    os.pwrite(target.fileno(), splice._literals[start : start + size], position)
                position += size
            target.truncate(splice.size)
    shutil.rmtree(files)
    return out


def took(name: str, command: list[str], out: Path | None = None) -> Measured:
    if out is not None:
        shutil.rmtree(out, ignore_errors=True)
    os.sync()
    result = measure(command)
    if result.exit_code:
        last = result.output.strip().splitlines()[-1][:150] if result.output.strip() else "killed"
        progress(f"{name} failed: {last}")
    else:
        progress(f"{name}: {result.seconds:.1f} s, {result.peak_bytes / MB:.0f} MB")
    return result


def copied(files: list[Path], folder: Path) -> float:
    """Return the seconds of cp, sync and sha256sum of the same bytes from the page cache, because brim's source is
    sparse."""
    subprocess.run(["cat", *map(str, files)], check=True, stdout=subprocess.DEVNULL)
    os.sync()
    started_at = time.monotonic()
    folder.mkdir()
    subprocess.run(["cp", "--sparse=never", *map(str, files), str(folder)], check=True)
    subprocess.run(["sync", *(str(folder / file.name) for file in files)], check=True)
    subprocess.run(["sha256sum", *(str(folder / file.name) for file in files)], check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - started_at
    shutil.rmtree(folder)
    return seconds


def large(work: Path, arguments: argparse.Namespace) -> Part:
    """Measure each operation on values of 5 MB, and a copy of the written bytes."""
    rows = max(int(2000 * arguments.scale), 8)
    source = write_sparse(work, rows)
    shards = sorted((source / "data").iterdir())
    halves = [work / "first", work / "second"]
    middle = len(shards) // 2
    for half, own in zip(halves, (shards[:middle] or shards, shards[middle:]), strict=True):
        half.mkdir()
        for number, shard in enumerate(own):
            os.link(shard, half / f"train-{number:05d}-of-{len(own):05d}.parquet")
    methods: dict[str, list[str]] = {
        "filter": [str(source), "--where", f"key < {rows // 2}"],
        "split": [str(source), "--split-into", "train=0.9,test=0.1"],
        "join": [str(halves[0]), "--also", str(halves[1])],
        "re-shard": [str(source), "--shard-size", "200MB"],
        "shuffle": [str(source), "--shuffle", "7"],
        "sort": [str(source), "--sort-by", "key"],
    }
    total = sum(shard.stat().st_size for shard in shards) / 1e9
    part = Part(
        f"large: {rows:,} values of 5 MB, {total:.1f} GB in {len(shards)} shards",
        ("what", "written GB", "brim s", "cp + sync + sha256sum s", "brim / copy", "peak MB"),
    )
    for name in arguments.ways.split(","):
        first, *options = methods[name]
        out = work / "out"
        result = took(name, [*BRIM, first, str(out), "--quiet", *options], out)
        if result.exit_code:
            raise SystemExit(result.output[-2000:])
        created = sorted((out / "data").iterdir())
        size = sum(file.stat().st_size for file in created)
        seconds = copied(created, work / "copy")
        shutil.rmtree(out)
        ratio = result.seconds / seconds
        progress(f"{name}: {seconds:.1f} s for cp, sync and sha256sum, {ratio:.2f}×")
        part.runs[name] = [
            {"seconds": result.seconds, "copy_seconds": seconds, "bytes": size, "peak_bytes": result.peak_bytes}
        ]
        part.rows.append(
            (
                name,
                f"{size / 1e9:.1f}",
                f"{result.seconds:.1f}",
                f"{seconds:.1f}",
                f"{ratio:.2f}×",
                f"{result.peak_bytes / MB:.0f}",
            )
        )
        part.goals.append(at_most(f"{name}, time against a copy", ratio, 1.3, "×"))
    return part


def pieces_of(source: Path) -> tuple[int, int]:
    """Return the number of values, and the number of file segments that contain them."""
    from brim.sources.open_source import open_dataset

    ranges = open_dataset(source).table().files.ranges
    assert ranges is not None
    return len(ranges.holders), 0 if ranges.pieces is None else len(ranges.pieces.starts)


def beside(part: Part, source: Path, rows: int, work: Path) -> dict[str, float]:
    """Select and shuffle half of the rows with brim and the peers in turns; return the median seconds of the successful
    ones."""
    out = work / "out"
    brim = [*BRIM, str(source), str(out), "--quiet", "--where", f"key < {rows // 2}", "--shuffle", "7"]
    contenders = {"brim": brim}
    contenders |= {name: [sys.executable, PEERS, name, str(source), str(out), str(rows // 2)] for name in PEER_NAMES}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    failed: set[str] = set()
    for _ in range(ROUNDS):
        for name in [name for name in contenders if name not in failed]:
            result = took(name, contenders[name], out)
            shutil.rmtree(out, ignore_errors=True)
            synced = float(result.output.rpartition(SYNCED)[2]) if SYNCED in result.output else 0.0
            run = {"seconds": result.seconds, "sync_seconds": synced, "peak_bytes": result.peak_bytes}
            runs[name].append({**run, "exit_code": result.exit_code})
            if result.exit_code:
                failed.add(name)
    medians = {name: median(run["seconds"] for run in owner) for name, owner in runs.items()}
    for name, of in runs.items():
        synced = median(run["sync_seconds"] for run in of)
        shown = "does not finish" if name in failed else f"{medians[name]:.2f}"
        without = f"{medians[name] - synced:.2f}" if synced else ""
        part.rows.append((name, shown, without, f"{max(run['peak_bytes'] for run in of) / MB:.0f}"))
        part.runs[name] = of
    return {name: seconds for name, seconds in medians.items() if name not in failed}


def shuffled(kind: str) -> Callable[[Path, argparse.Namespace], Part]:
    def run(work: Path, arguments: argparse.Namespace) -> Part:
        rows, size = int(100_000 * arguments.scale), 10_000
        if kind != "small":
            rows, size = int(3030 * arguments.scale), IMAGE_BYTES
        codec = "none" if kind == "small" else kind
        source = write(work / "in.parquet", rows, size, compression=codec, write_page_index=True)
        label = f"{rows:,} values of {size // 1000} kB, {codec}: half of them, shuffled"
        part = Part(f"{kind}: {label}", ("what", "median s", "s without the sync", "peak MB"))
        values, segments = pieces_of(source)
        result = beside(part, source, rows, work)
        own = result.pop("brim")
        best = min(result, key=result.__getitem__)
        peak = max(run["peak_bytes"] for run in part.runs["brim"])
        allowed = 120 + (0.5 * values + 0.2 * segments) / 1000
        part.notes.append(f"{values:,} values in {segments:,} pieces; all sync what they wrote, brim hashes it as well")
        part.goals = [
            at_least(f"faster than the best peer that finishes ({best})", result[best] / own, 2, "×"),
            at_most("peak anonymous memory", peak / MB, round(allowed), " MB"),
        ]
        source.unlink()
        return part

    return run


def decode(work: Path, arguments: argparse.Namespace) -> Part:
    """Measure images that must be decoded page by page. pyarrow checks the size of a page only every 1,024 rows."""
    rows = int(3030 * arguments.scale)
    source = write(work / "in.parquet", rows, IMAGE_BYTES, compression="gzip")
    page = min(rows, 100 * MB // IMAGE_BYTES) * IMAGE_BYTES / MB
    out = work / "out"
    result = took("brim", [*BRIM, str(source), str(out), "--quiet", "--where", f"key < {rows // 2}"], out)
    shutil.rmtree(out)
    source.unlink()
    part = Part(f"decode: {rows:,} images by gzip, pages of {page:.0f} MB", ("what", "s", "peak MB"))
    part.rows.append(("brim", f"{result.seconds:.1f}", f"{result.peak_bytes / MB:.0f}"))
    part.runs["brim"] = [{"seconds": result.seconds, "peak_bytes": result.peak_bytes}]
    part.goals.append(at_most("peak anonymous memory", result.peak_bytes / MB, round(2 * page + 100), " MB"))
    return part


def budget(work: Path, arguments: argparse.Namespace) -> Part:
    """Measure the effect of memory settings on selecting and shuffling half of the rows."""
    rows = int(100_000 * arguments.scale)
    source, out = write(work / "in.parquet", rows, 10_000, compression="none", write_page_index=True), work / "out"
    peers = [PEERS, "{name}", str(source), str(out), str(rows // 2)]
    selected = [str(source), str(out), "--quiet", "--where", f"key < {rows // 2}", "--shuffle", "7"]
    setting = "POLARS_OOC_MEMORY_BUDGET_MB=300"
    commands = {
        "brim, --memory 300MB": [*BRIM, *selected, "--memory", "300MB"],
        f"polars, {setting}": ["env", setting, sys.executable, *(word.format(name="polars") for word in peers)],
        "duckdb, memory_limit='200MB'": [sys.executable, *(word.format(name="duckdb-200MB") for word in peers)],
    }
    part = Part(f"budget: {rows:,} values of 10 kB, none: half of them, shuffled", ("what, setting", "end", "peak MB"))
    for name, command in commands.items():
        done = took(name, command, out)
        part.rows.append((name, "an error" if done.exit_code else "done", f"{done.peak_bytes / MB:.0f}"))
        part.runs[name] = [{"seconds": done.seconds, "peak_bytes": done.peak_bytes, "exit_code": done.exit_code}]
    part.goals.append(
        at_most("peak anonymous memory", part.runs["brim, --memory 300MB"][0]["peak_bytes"] / MB, 300, " MB")
    )
    return part


PARTS: dict[str, Callable[[Path, argparse.Namespace], Part]] = {
    "large": large, "small": shuffled("small"), "snappy": shuffled("snappy"), "zstd": shuffled("zstd"),
    "decode": decode, "remote": remote, "budget": budget,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--scale", type=float, default=1.0, help="of the 10 GB and 1 GB")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    ways = ("filter", "split", "join", "re-shard", "shuffle", "sort")
    parser.add_argument(
        "--ways", type=comma_list(*ways), default=",".join(ways), help=f"of large: some of {','.join(ways)}"
    )
    parser.add_argument("--work", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, help="write every single run there")
    arguments = parser.parse_args()
    parts = {}
    with tempfile.TemporaryDirectory(prefix="brim-select-", dir=arguments.work) as folder:
        facts = machine(Path(folder), PACKAGES)
        for name in arguments.only:
            progress(name)
            with tempfile.TemporaryDirectory(dir=folder) as work:
                parts[name] = PARTS[name](Path(work), arguments)
            print_part(parts[name])
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


if __name__ == "__main__":
    main()
