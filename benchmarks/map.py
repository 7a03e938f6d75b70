"""Compare brim.map, Dataset.map and a plain pyarrow loop: a cheap Python function and an Arrow function over Parquet.

All write every row with one more column as Arrow. The loop syncs the file to disk; brim syncs in the background after
the call returns, and waits for it when the process ends; `datasets` does not sync. Time and the peak of unreclaimable
memory are those of the whole process, including imports, as medians of interleaved runs. The time of the call alone is
a separate column, to which the goal refers. `Dataset.map` needs the Parquet as an Arrow cache first: this time is
listed separately, and brim is run on that Dataset too. Peaks at 1 and 5 GB show whether memory grows with the data.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from peak import Measured, measure
from tables import MB, Part, at_most, machine, print_goals, print_machine, print_part, progress, write_json

GROUP_ROWS = 20_000
RUNS = 3
FUNCTIONS = {"python": "Python lists", "arrow": "Arrow tables"}

SCRIPTS = {
    "pyarrow": """
import sys, os, pyarrow as pa, pyarrow.compute as pc, pyarrow.parquet as pq
source, folder, kind = sys.argv[1:]
writer = None
with pq.ParquetFile(source) as file, open(folder + "/out.arrow", "wb") as out:
    for batch in file.iter_batches(1000, use_threads=True):
        texts = batch.column("text")
        new = pc.utf8_length(texts) if kind == "arrow" else pa.array([len(text) for text in texts.to_pylist()])
        batch = batch.append_column("n", new)
        writer = writer or pa.ipc.new_stream(out, batch.schema)
        writer.write_batch(batch)
    writer.close()
    os.fsync(out.fileno())
""",
    "datasets": """
import sys, time, datasets, pyarrow.compute as pc
source, folder, kind = sys.argv[1:]
datasets.disable_progress_bars()
ds = datasets.Dataset.from_parquet(source, cache_dir=folder)
if kind == "load":
    sys.exit()
if kind == "arrow":
    ds = ds.with_format("arrow")
    f = lambda table: table.append_column("n", pc.utf8_length(table["text"]))
else:
    f = lambda batch: {"n": [len(text) for text in batch["text"]]}
begin = time.monotonic()
ds.map(f, batched=True, num_proc=NUM_PROC, cache_file_name=folder + "/mapped.arrow")
print(time.monotonic() - begin)
""",
    "brim": """
import sys, time, brim, pyarrow.compute as pc
source, folder, kind = sys.argv[1:]
if kind == "arrow":
    f = lambda table: table.append_column("n", pc.utf8_length(table["text"]))
else:
    f = lambda batch: {"n": [len(text) for text in batch["text"]]}
begin = time.monotonic()
brim.map(source, f, batched=True, input="arrow" if kind == "arrow" else "python", memory="600MB", cache_dir=folder)
print(time.monotonic() - begin)
""",
}
SCRIPTS["brim, of the Dataset"] = (
    SCRIPTS["brim"]
    .replace(
        "begin =",
        "import datasets; ds = datasets.Dataset.from_parquet(source, cache_dir=folder + '/../cache')\nbegin =",
    )
    .replace("brim.map(source,", "brim.map(ds,")
)
SCRIPTS["datasets, 2 processes"] = SCRIPTS["datasets"].replace("NUM_PROC", "2")
SCRIPTS["datasets"] = SCRIPTS["datasets"].replace("NUM_PROC", "None")


def write_source(path: Path, size: int) -> int:
    """Write texts of 200 to 3,000 letters in words, ids and numbers; as many rows as fill `size`."""
    random = np.random.default_rng(0)
    vocabulary = np.array(
        ["".join(chr(97 + c) for c in random.integers(0, 26, n)) for n in random.integers(2, 11, 4000)]
    )
    texts = [" ".join(random.choice(vocabulary, n)) for n in random.integers(30, 450, GROUP_ROWS)]
    rows = 0
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("score", pa.float64())])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        while path.stat().st_size < size:
            order = random.permutation(GROUP_ROWS)
            ids, scores = np.arange(rows, rows + GROUP_ROWS), random.random(GROUP_ROWS)
            columns = [pa.array(ids), pa.array(texts).take(pa.array(order)), pa.array(scores)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            rows += GROUP_ROWS
    return rows


def run(name: str, source: Path, folder: Path, kind: str) -> Measured:
    folder.mkdir(exist_ok=True)
    measured = measure([sys.executable, "-c", SCRIPTS[name], str(source), str(folder), kind])
    if measured.exit_code:
        sys.exit(f"{name} failed:\n{measured.output[-2000:]}")
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 5])
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--only", nargs="+", choices=tuple(SCRIPTS), default=list(SCRIPTS), metavar="WHO")
    parser.add_argument("--data", type=Path, help="Where the rows are made, and kept for the next time.")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    parts: dict[str, Part] = {}
    with tempfile.TemporaryDirectory(prefix="brim-map-", dir=arguments.data) as folder:
        home = arguments.data or Path(folder)
        facts = machine(home, ("brim", "datasets", "pyarrow"))
        for size in arguments.gigabytes:
            source, cache = home / f"{size:g}.parquet", home / "cache"
            if not source.exists():
                write_source(source, int(size * 1e9))
            model_options = None if cache.exists() else run("datasets", source, cache, "load")
            if not arguments.runs:
                continue  # only create the data, so that a later measurement is short
            rows = pq.read_metadata(source).num_rows
            for kind in ("python", "arrow"):
                results: dict[str, list[Measured]] = {name: [] for name in arguments.only}
                for number in range(arguments.runs):
                    for name in arguments.only:
                        progress(f"{size:g} GB, {kind}, {name}, run {number + 1}")
                        out = cache if name.startswith("datasets") else home / "out"
                        results[name].append(run(name, source, out, kind))
                        shutil.rmtree(home / "out", ignore_errors=True)
                        for remaining in cache.glob("mapped*"):
                            remaining.unlink()
                part = part_of(f"{size:g} GB of Parquet, {rows:,} rows: a function of {FUNCTIONS[kind]}", results)
                if model_options is not None:
                    part.notes.append(f"`datasets` makes its Arrow cache first: {model_options.seconds:.1f} s.")
                parts[f"{size:g} GB, {kind}"] = part
                print_part(part)
            if arguments.data is None:
                shutil.rmtree(cache)
                source.unlink()
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


def part_of(title: str, results: dict[str, list[Measured]]) -> Part:
    part = Part(title, ("tool", "median s", "of it the call", "peak MB", "brim's time to it"))
    seconds = {name: statistics.median(item.seconds for item in source) for name, source in results.items()}
    calls = {name: statistics.median(map(call_s, owner)) for name, owner in results.items() if call_s(owner[0])}
    for name, of in results.items():
        mine = "brim, of the Dataset" if name.startswith(("datasets", "brim, of")) else "brim"
        peak = max(entry.peak_bytes for entry in of) / MB
        fraction = f"{seconds[mine] / seconds[name]:.2f}" if mine in seconds else ""
        call = f"{calls[name]:.1f}" if name in calls else ""
        part.rows.append((name, f"{seconds[name]:.1f}", call, f"{peak:.0f}", fraction))
        part.runs[name] = [
            {"seconds": element.seconds, "call_s": call_s(element), "peak_bytes": element.peak_bytes} for element in of
        ]
    if {"brim, of the Dataset", "datasets, 2 processes"} <= calls.keys():
        ratio = calls["brim, of the Dataset"] / calls["datasets, 2 processes"]
        label = "brim's time to Dataset.map's with two processes, both after loading"
        part.goals.append(at_most(label, ratio, 1.0, "×"))
    return part


def call_s(measured: Measured) -> float:
    """Return the seconds of the call without imports and loading, as printed by the process; 0 without such a line."""
    tokens = measured.output.split()
    return float(tokens[-1]) if tokens and tokens[-1].replace(".", "", 1).isdigit() else 0.0


if __name__ == "__main__":
    main()
