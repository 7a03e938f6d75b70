"""Compare packaging by brim, a plain copy and `datasets`, also as the data grows.

Four parts. *speed*: 12 files of 300 MB, compared with `cp -r && sync` and with `datasets`. *growth*: memory as
the dataset grows. *small*: how fast other libraries read a file of brim, compared with a file of pyarrow. *million*:
a million small files. Contenders take turns; times are medians and include the start of the interpreter,
memory is the largest of the runs, measured by peak.py.

Sources are in the page cache unless a row says otherwise: the disk of the sources is not compared. Not
measured: uploading, tar shards, decoding, network file systems.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from package_data import (
    FOLDER_FILES,
    FOLDERS,
    GB,
    MB,
    ROW_BYTES,
    ROWS,
    SMALL_BYTES,
    SMALL_FILES,
    TINY_BYTES,
    cool,
    made,
    make_million,
    make_scans,
    make_small,
    make_sparse,
    remove,
    warm,
)
from peak import measure
from tables import Part, at_least, at_most, machine, print_goals, print_machine, print_part, progress, write_json

HERE = Path(__file__).parent
BRIM = [sys.executable, "-m", "brim"]
READERS = ("pyarrow", "duckdb", "polars")
PACKAGES = ("brim", "pyarrow", "numpy", "datasets", "pandas", "duckdb", "polars")

GROWTH_FILE_BYTES = 250 * MB
READS = 15


@dataclass(frozen=True, slots=True)
class Contender:
    """A command, its number of runs, and the preparation of the source before each run."""

    name: str
    command: list[str]
    repeats: int
    prepare: Callable[[Path], None] = warm


@dataclass(frozen=True, slots=True)
class Runs:
    """All runs of a contender."""

    seconds: list[float]
    peaks: list[int]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks)

    @property
    def spread(self) -> str:
        return f"{min(self.seconds):.2f}–{max(self.seconds):.2f}"

    def as_json(self) -> list[dict[str, float]]:
        return [{"seconds": s, "peak_bytes": p} for s, p in zip(self.seconds, self.peaks, strict=True)]


def take_turns(contenders: Sequence[Contender], source: Path, output: Path) -> dict[str, Runs]:
    """Run the contenders in turn, round after round, with a new output on a synced disk."""
    results = {contender.name: Runs([], []) for contender in contenders}
    for number in range(max(contender.repeats for contender in contenders)):
        for contender in contenders:
            if number < contender.repeats:
                remove(output)
                contender.prepare(source)
                subprocess.run(["sync"], check=True)
                seconds, peak = run(contender.command)
                results[contender.name].seconds.append(seconds)
                results[contender.name].peaks.append(peak)
                progress(f"{contender.name}: {seconds:.2f} s, {peak / MB:.0f} MB")
    remove(output)
    return results


def run(command: Sequence[str]) -> tuple[float, int]:
    measured = measure(command)
    if measured.exit_code:
        raise SystemExit(f"{' '.join(command)} ended with {measured.exit_code}:\n{measured.output[-2000:]}")
    return measured.seconds, measured.peak_bytes


def speed(arguments: argparse.Namespace) -> Part:
    source = made(arguments.data / "speed", make_scans, 3 * ROWS * ROW_BYTES)
    output = arguments.data / "speed-out"
    peer = [sys.executable, str(HERE / "package_peers.py")]
    destinations = [str(source), str(output)]
    shards = ["--num-shards", str(ROWS)]
    subset = min(arguments.peer_repeats, arguments.repeats)
    contenders = [
        Contender("cp -r && sync", ["sh", "-c", 'cp -r "$0" "$1" && sync', *destinations], arguments.repeats),
        Contender(
            "cp -r && sync OUT/*", ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/*', *destinations], arguments.repeats
        ),
        Contender("brim build", [*BRIM, "build", *destinations, *shards, "--quiet"], arguments.repeats),
        Contender("datasets, as push_to_hub", [*peer, "embed", *destinations, *shards], subset),
        Contender("datasets, copied loop", [*peer, "loop", *destinations, *shards], subset),
    ]
    results = take_turns(contenders, source, output)
    copy, _, brim, embed, _ = (results[contender.name] for contender in contenders)
    part = Part(
        f"speed: {ROWS} files of {ROW_BYTES // MB} MB into {ROWS} shards",
        ("what", "runs", "median s", "min–max s", "GB/s", "time against cp", "time against brim", "peak MB"),
        notes=[
            "brim hashes every byte and syncs every shard; the two of `datasets` do neither. `sync` alone also waits "
            "for what other programs have written, `sync OUT/*` and brim wait for their own files only."
        ],
    )
    for name, runs in results.items():
        part.runs[name] = runs.as_json()
        part.rows.append(
            (
                name,
                str(len(runs.seconds)),
                f"{runs.median_s:.2f}",
                runs.spread,
                f"{ROWS * ROW_BYTES / GB / runs.median_s:.2f}",
                f"{runs.median_s / copy.median_s:.2f}×",
                f"{runs.median_s / brim.median_s:.2f}×",
                f"{runs.peak_bytes / MB:.0f}",
            )
        )
    part.goals = [
        at_most("brim's time against cp -r && sync", brim.median_s / copy.median_s, 1.25, "×"),
        at_least("brim faster than datasets (push_to_hub's way)", embed.median_s / brim.median_s, 8, "×"),
        at_most("brim's peak anonymous memory", brim.peak_bytes / MB, 90, " MB"),
    ]
    return part


def growth(arguments: argparse.Namespace) -> Part:
    part = Part(
        "growth: peak memory of `brim build` as data grows (sparse files)",
        ("data", "files", "runs", "median s", "peak MB (largest)", "peak MB (smallest)"),
    )
    cases = [(f"{size} GB", size * GB // GROWTH_FILE_BYTES, GROWTH_FILE_BYTES) for size in (1, 4, 12)]
    cases.append(("2 GB in one file", 1, 2_000_000_000))
    peaks = []
    for name, files, file_bytes in cases:
        folder = arguments.data / ("growth-" + name.replace(" ", "-"))
        output = folder.with_name(folder.name + "-out")
        source = made(folder, partial(make_sparse, files=files, file_bytes=file_bytes), files * file_bytes)
        contender = Contender(name, [*BRIM, "build", str(source), str(output), "--quiet"], arguments.repeats, cool)
        runs = take_turns([contender], source, output)[name]
        peaks.append(runs.peak_bytes / MB)
        part.runs[name] = runs.as_json()
        part.rows.append(
            (
                name,
                str(files),
                str(len(runs.seconds)),
                f"{runs.median_s:.2f}",
                f"{runs.peak_bytes / MB:.1f}",
                f"{min(runs.peaks) / MB:.1f}",
            )
        )
    part.goals = [at_most("peaks of all sizes lie within", max(peaks) - min(peaks), 15, " MB")]
    return part


def small(arguments: argparse.Namespace) -> Part:
    source = made(arguments.data / "small", make_small, 5 * SMALL_FILES * SMALL_BYTES)
    output, duplicate = arguments.data / "small-out", arguments.data / "small-pyarrow.parquet"
    remove(output)
    run([*BRIM, "build", str(source), str(output), "--quiet"])
    (ours,) = sorted((output / "data").glob("*.parquet"))
    column = write_twin(source, ours, duplicate)
    part = Part(
        f"small: reading {SMALL_FILES:,} files of {SMALL_BYTES // 1000} KB back",
        ("reader", "runs", "brim's file, median ms", "pyarrow's file, median ms", "brim against pyarrow"),
        notes=[
            f"A run is a fresh process that reads both files in turn and counts its best of {READS} reads of each; "
            "the last column is the median of the runs' ratios. Both files are in the page cache."
        ],
    )
    for reader in READERS:
        pairs = [best_reads(reader, column, ours, duplicate) for _ in range(arguments.repeats)]
        ratio = statistics.median(brim / pyarrow for brim, pyarrow in pairs)
        brim_ms, pyarrow_ms = (statistics.median(seconds) * 1000 for seconds in zip(*pairs, strict=True))
        progress(f"{reader}: {ratio:.2f}×")
        part.runs[reader] = [{"brim": brim, "pyarrow": pyarrow} for brim, pyarrow in pairs]
        part.rows.append((reader, str(len(pairs)), f"{brim_ms:.1f}", f"{pyarrow_ms:.1f}", f"{ratio:.2f}×"))
        part.goals.append(at_most(f"{reader} reads brim's file within", ratio, 1.1, "×"))
    remove(output)
    remove(duplicate)
    return part


def write_twin(source: Path, ours: Path, duplicate: Path) -> str:
    """Write the rows of brim's file from the sources with pyarrow; return the name of their column."""
    theirs = pq.ParquetFile(ours)
    groups = [theirs.metadata.row_group(i).num_rows for i in range(theirs.num_row_groups)]
    paths = sorted(source.iterdir())
    content = pa.array([path.read_bytes() for path in paths], pa.binary())
    (cell,) = theirs.schema_arrow
    cells = pa.StructArray.from_arrays([content, pa.array([path.name for path in paths])], fields=list(cell.type))
    table = pa.Table.from_arrays([cells], schema=theirs.schema_arrow)
    if not theirs.read().equals(table):
        raise SystemExit("brim's file does not hold the source's files")
    pq.write_table(table, duplicate, compression="none", row_group_size=groups[0])
    written = pq.read_metadata(duplicate)
    if [written.row_group(i).num_rows for i in range(written.num_row_groups)] != groups:
        raise SystemExit("the two files do not have the same row groups")
    return str(cell.name)


def best_reads(reader: str, column: str, *files: Path) -> list[float]:
    """Return the shortest time in which a new process read each file."""
    for file in files:
        # The way in which a file was loaded into the page cache decides the size of its folios, which changed times by
        # up to 14 % between two copies of one file. So all are loaded in the same way, and again before every run.
        cool(file)
        warm(file)
    command = [sys.executable, str(HERE / "package_readers.py"), reader, column, *map(str, files)]
    results = json.loads(subprocess.run([*command, "--reads", str(READS)], check=True, capture_output=True).stdout)
    for file, result in zip(files, results, strict=True):
        if (result["rows"], result["bytes"]) != (SMALL_FILES, SMALL_FILES * SMALL_BYTES):
            raise SystemExit(f"{reader} read {result['rows']} rows and {result['bytes']} bytes from {file.name}")
    return [min(result["seconds"]) for result in results]


def million(arguments: argparse.Namespace) -> Part:
    count = FOLDERS * FOLDER_FILES
    source = made(arguments.data / "million", make_million, 6 * GB)
    output = arguments.data / "million-out"
    subset = min(arguments.peer_repeats, arguments.repeats)
    looks = [
        Contender("du (a stat of every file)", ["du", "-s", "--apparent-size", str(source)], subset),
        Contender("brim plan", [*BRIM, "plan", str(source)], subset),
        Contender("brim plan, content not in the page cache", [*BRIM, "plan", str(source)], subset, cool),
    ]
    # One run each, because they take minutes and have no separate goal.
    tar = ["sh", "-c", 'mkdir "$1" && tar -cf "$1/all.tar" -C "$0" . && sync', str(source), str(output)]
    packs = [
        Contender("tar && sync", tar, 1),
        Contender("brim build", [*BRIM, "build", str(source), str(output), "--quiet"], 1),
    ]
    part = Part(
        f"million: {count:,} files of {TINY_BYTES} bytes in {FOLDERS} folders",
        ("what", "runs", "median s", "µs a file", "time against du or tar", "peak MB"),
    )
    results: dict[str, Runs] = {}
    for concurrent in (looks, packs):
        actual = take_turns(concurrent, source, output)
        base = actual[concurrent[0].name].median_s
        for name, runs in actual.items():
            ratio = "" if name == concurrent[0].name else f"{runs.median_s / base:.2f}×"
            micros = f"{runs.median_s / count * 1e6:.1f}"
            cells = (name, str(len(runs.seconds)), f"{runs.median_s:.2f}", micros, ratio, f"{runs.peak_bytes / MB:.0f}")
            part.rows.append(cells)
            part.runs[name] = runs.as_json()
        results |= actual
    for plan in looks[1:]:
        runs = results[plan.name]
        part.goals.append(at_most(f"{plan.name}, a million files", runs.median_s, 60, " s"))
        part.goals.append(at_most(f"{plan.name}, peak anonymous memory", runs.peak_bytes / MB, 600, " MB"))
    if not arguments.keep:
        remove(source)
    return part


PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {
    "speed": speed,
    "growth": growth,
    "small": small,
    "million": million,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What packaging costs, beside a plain copy and `datasets`.")
    parser.add_argument("--data", type=Path, default=Path("bench-data"), help="where sources and outputs go")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each contender (default: 5)")
    parser.add_argument("--peer-repeats", type=int, default=5, help="runs of the slow ones (default: 5)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single run here")
    parser.add_argument("--keep", action="store_true", help="do not delete the million files afterwards")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.data = arguments.data.resolve()
    arguments.data.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(arguments.data / "huggingface")}
    facts = machine(arguments.data, PACKAGES)
    parts: dict[str, Part] = {}
    for name in arguments.only:
        progress(name)
        parts[name] = PARTS[name](arguments)
        print_part(parts[name])
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


if __name__ == "__main__":
    main()
