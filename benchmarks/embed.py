"""Compare ways to write embeddings: brim.TensorWriter, a plain file, and a list that is concatenated.

    python benchmarks/embed.py [--parts writer,model] [--sizes 0.3,3] [--repeats 5] [--texts 20000] [--data DIR]

Part *writer* is described below; part *model* (`brim embed` and SentenceTransformer.encode) in embed_model.py.

The vectors of two tensors (768 and 1024 float32) come in batches of 512 rows, the same for every contender. *plain
file* writes the same bytes one after another and syncs where brim makes a checkpoint; it has no header, no
checksums and cannot resume, and it waits for each sync, while brim writes the next rows. *append and join*
is the usual loop: a list of batches, np.concatenate, save_file. Contenders take turns. Times are medians, measured in
the child from before its first batch to the file on disk, without starting Python and importing;
`against plain` is the median of the ratios within a round. Memory is the largest of the runs, measured by peak.py,
minus that of an interpreter that has only imported NumPy and made the batches.

Not measured: other formats, network file systems.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from embed_model import model_part
from peak import measure
from tables import (
    GB,
    MB,
    Part,
    at_most,
    comma_list,
    machine,
    print_goals,
    print_machine,
    print_part,
    progress,
    write_json,
)

DIMS = {"text": 768, "vision": 1024}
BATCH_ROWS = 512
ROW_BYTES = 4 * sum(DIMS.values())
CHECKPOINT_ROWS = 256 * MB // ROW_BYTES
KINDS_OF_BATCHES = 4  # enough that no two neighbors are equal, few enough to stay small
CONTENDERS = {
    "numpy alone": "nothing",
    "plain file": "plain",
    "TensorWriter": "writer",
    "TensorWriter, rows unknown": "growing",
    "append and join": "join",
}


@dataclass(slots=True)
class Runs:
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="0.3,3", help="GB of vectors, smallest first")
    parser.add_argument("--parts", type=comma_list("writer", "model"), default="writer,model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--model-repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, default=Path("bench-data"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=3, metavar=("KIND", "PATH", "ROWS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        kind, path, rows = arguments.child
        child(kind, path, int(rows))
        return
    arguments.data.mkdir(parents=True, exist_ok=True)
    selection, parts = arguments.parts.split(","), {}
    libraries = ("torch", "sentence-transformers") if "model" in selection else ()
    facts = machine(arguments.data, ("brim", "numpy", "pyarrow", "safetensors", *libraries))
    with tempfile.TemporaryDirectory(dir=arguments.data) as folder:
        if "writer" in selection:
            sizes = [float(size) for size in arguments.sizes.split(",")]
            parts["writer"] = writer_part(Path(folder), sizes, arguments.repeats)
        if "model" in selection:
            parts["model"] = model_part(Path(folder), arguments.texts, arguments.model_repeats)
    for part in parts.values():
        print_part(part)
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


def writer_part(folder: Path, sizes: list[float], repeats: int) -> Part:
    part = Part(
        f"writer: batches of {BATCH_ROWS} rows, {' + '.join(map(str, DIMS.values()))} float32",
        ("what", "data", "runs", "median s", "min–max s", "GB/s", "against plain", "peak MB above NumPy"),
        notes=[
            "Without a known number of rows the file is written twice: as it grows, and put together by the kernel."
        ],
    )
    above, ratios, peaks = {}, {}, []
    for size in sizes:
        rows = round(size * GB / ROW_BYTES / BATCH_ROWS) * BATCH_ROWS
        results = take_turns(folder, rows, repeats)
        peaks.append(results["TensorWriter"].peak_bytes / MB)
        for name in list(CONTENDERS)[1:]:
            runs, base = results[name], results["numpy alone"].peak_bytes
            pairs = zip(runs.seconds, results["plain file"].seconds, strict=True)
            ratios[name] = statistics.median(mine / plain for mine, plain in pairs)
            above[name, size] = (runs.peak_bytes - base) / MB
            median_s = statistics.median(runs.seconds)
            part.rows.append(
                (
                    name,
                    f"{rows * ROW_BYTES / GB:.2f} GB",
                    str(len(runs.seconds)),
                    f"{median_s:.2f}",
                    f"{min(runs.seconds):.2f}–{max(runs.seconds):.2f}",
                    f"{rows * ROW_BYTES / GB / median_s:.2f}",
                    f"{ratios[name]:.2f}×",
                    f"{above[name, size]:.0f}",
                )
            )
            part.runs[f"{name}, {size} GB"] = [
                {"seconds": s, "peak_bytes": p} for s, p in zip(runs.seconds, runs.peaks, strict=True)
            ]
    least, maximum = sizes[0], sizes[-1]
    ours = [above["TensorWriter", size] for size in sizes]
    part.goals = [
        at_most(f"time against a plain file with the same syncs, {maximum:g} GB", ratios["TensorWriter"], 1.2, "×"),
        at_most("peak anonymous memory above NumPy", max(ours), 120, " MB"),
        at_most(f"peaks from {least:g} to {maximum:g} GB lie within", max(peaks) - min(peaks), 15, " MB"),
    ]
    combined = above["append and join", maximum] * MB / (maximum * GB)
    part.notes.append(f"Append and join held {combined:.2f} times the vectors.")
    return part


def take_turns(folder: Path, rows: int, repeats: int) -> dict[str, Runs]:
    """Run every contender once per round, to a file that does not exist yet, on a synced disk."""
    results = {name: Runs() for name in CONTENDERS}
    for number in range(repeats):
        for name, kind in CONTENDERS.items():
            if kind == "nothing" and number:
                continue
            path = folder / "out.safetensors"
            subprocess.run(["sync"], check=True)
            command = [sys.executable, __file__, "--child", kind, str(path), str(rows)]
            measured = measure(command)
            if measured.exit_code:
                raise SystemExit(f"{name} ended with {measured.exit_code}:\n{measured.output[-2000:]}")
            results[name].seconds.append(float(measured.output.split()[-1]))
            results[name].peaks.append(measured.peak_bytes)
            progress(f"{name}: {results[name].seconds[-1]:.2f} s, {measured.peak_bytes / MB:.0f} MB")
            if kind == "writer":
                check_size(path, rows)
            for remaining in folder.iterdir():
                shutil.rmtree(remaining) if remaining.is_dir() else remaining.unlink()
    return results


def check_size(path: Path, rows: int) -> None:
    """Check the size of the result, because a contender that writes less would be faster."""
    if not 0 <= path.stat().st_size - rows * ROW_BYTES < 1000:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes for {rows} rows")


def child(kind: str, path: str, rows: int) -> None:
    random = np.random.default_rng(0)
    remaining = [
        {name: random.random((BATCH_ROWS, dims), dtype=np.float32) for name, dims in DIMS.items()}
        for _ in range(KINDS_OF_BATCHES)
    ]
    work = {"nothing": lambda *_: None, "plain": plain, "writer": writer, "growing": growing, "join": join}[kind]
    if kind in ("writer", "growing"):
        importlib.import_module("safetensors")
        importlib.import_module("brim.tensors.tensor_writer")
    elif kind == "join":
        importlib.import_module("safetensors.numpy")
    start = time.perf_counter()
    work(path, rows, remaining)
    print(time.perf_counter() - start)


def batches(rows: int, remaining: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number in range(rows // BATCH_ROWS):
        yield remaining[number % len(remaining)]


def plain(path: str, rows: int, kept: list[dict[str, Any]]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    since = 0
    for batch in batches(rows, kept):
        for array in batch.values():
            view = memoryview(array).cast("B")
            while view:
                view = view[os.write(descriptor, view) :]
        since += BATCH_ROWS
        if since >= CHECKPOINT_ROWS:
            os.fsync(descriptor)
            since = 0
    os.fsync(descriptor)
    os.close(descriptor)


def writer(path: str, rows: int, remaining: list[dict[str, Any]], is_known: bool = True) -> None:
    import brim

    spec = {name: (dims, "float32") for name, dims in DIMS.items()}
    with brim.TensorWriter(
        path, rows if is_known else None, tensors=spec, checkpoint_rows=CHECKPOINT_ROWS, checkpoint_seconds=1e9
    ) as created:
        for batch in batches(rows, remaining):
            created.append(batch)


def growing(path: str, rows: int, remaining: list[dict[str, Any]]) -> None:
    writer(path, rows, remaining, is_known=False)


def join(path: str, rows: int, remaining: list[dict[str, Any]]) -> None:
    """Collect copies in a list, because a model makes new vectors for every batch."""
    from safetensors.numpy import save_file

    segments: dict[str, list[Any]] = {name: [] for name in DIMS}
    for batch in batches(rows, remaining):
        for name, array in batch.items():
            segments[name].append(array.copy())
    save_file({name: np.concatenate(each) for name, each in segments.items()}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


if __name__ == "__main__":
    main()
