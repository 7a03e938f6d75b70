"""`datasets.map` over big texts, interrupted and run again: cached and fresh shards side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.lab.measure import measure, need, need_room, step, tell
from brim.lab.steps import Experiment, ExperimentPart, Watch, installed_versions
from brim.records import dataclass
from brim.sizes import format_size

_NOTABLE = 0.1  # of a shard: less growth than that, shard after shard, is noise


@dataclass(frozen=True, slots=True)
class MapExperimentOptions:
    """`mode`: "basic" maps all files in one call, "shard" each in a call of its own."""

    mode: str = "shard"
    num_files: int = 6
    rows_per_file: int = 100
    text_bytes: int = 200_000
    batch_size: int = 25
    writer_batch_size: int = 25
    num_proc: int = 1
    interrupt_after: int = 2

    def __post_init__(self) -> None:
        if self.mode not in ("basic", "shard"):
            raise InputError(f"--mode takes basic or shard, not {self.mode!r}.")
        shards = self.shards
        if self.interrupt_after >= shards and self.interrupt_after:
            raise InputError(
                f"--interrupt-after {self.interrupt_after} would come after the last of {shards} shard(s).",
                hint="Give a smaller number, or 0 for no interruption.",
            )

    @property
    def shards(self) -> int:
        """The pieces that `datasets` caches apart: one for each call and worker."""
        return self.num_files if self.mode == "shard" or self.num_proc == 1 else self.num_proc


def run(folder: Path, options: MapExperimentOptions, watch: Watch) -> Experiment:
    need("datasets")
    total = options.num_files * options.rows_per_file * options.text_bytes
    need_room(folder, 2 * total, 0)  # the texts, and what is made of them
    texts = folder / "texts"
    texts.mkdir()
    for number in range(options.num_files):
        _write_texts(texts / f"{number:04d}.arrow", options, number)
    call = {
        "folder": str(texts),
        "mode": options.mode,
        "batch_size": options.batch_size,
        "writer_batch_size": options.writer_batch_size,
        "num_proc": options.num_proc,
    }
    first_name = f"interrupted after {options.interrupt_after}" if options.interrupt_after else "first run"
    first = measure(first_name, "map_experiment:map_texts", call, folder, watch, _interruption(texts, options))
    again = measure("run again", "map_experiment:map_texts", call, folder, watch)
    rows = {part.name: sum(entry.get("rows", 0) for entry in part.told) for part in (first, again)}
    numbers = {"options": asdict(options), "rows_computed": rows}
    seen = (_caching(first, again, rows, options), _growth(first, again, options))
    return Experiment("map", (first, again), seen, ("datasets", "pyarrow"), numbers)


def _interruption(texts: Path, options: MapExperimentOptions) -> Callable[[list[dict[str, Any]]], bool]:
    """When to kill the first run: after so many shards have been finished."""
    after = options.interrupt_after
    if not after:
        return lambda told: False
    if options.mode == "shard":
        return lambda told: sum("shard" in entry for entry in told) >= after
    if options.num_proc == 1:  # one cache file at the very end: count what went through
        rows = after * options.rows_per_file
        return lambda told: sum(entry.get("rows", 0) for entry in told) >= rows
    return lambda told: sum(1 for _ in texts.glob("cache-*.arrow")) >= after


def _caching(first: ExperimentPart, again: ExperimentPart, rows: dict[str, int], options: MapExperimentOptions) -> str:
    total = options.num_files * options.rows_per_file
    kept = total - rows[again.name]
    how = f"was killed after {rows[first.name]:,} of {total:,} rows" if first.interrupted else "went through"
    if kept == 0:
        cached = "nothing of it was kept: datasets throws an unfinished cache file away"
    else:
        cached = f"the second run found {kept:,} rows in the cache and computed the other {total - kept:,}"
    step_bytes = again.steps[-1]
    return (
        f"The first run {how}, and {cached}; at the end RSS was {format_size(step_bytes.rss_bytes)}, of which "
        f"{format_size(step_bytes.usage.file_bytes)} are mapped files, which look like a leak and are none."
    )


def _growth(first: ExperimentPart, again: ExperimentPart, options: MapExperimentOptions) -> str:
    """Does memory that cannot be taken back rise from fresh shard to fresh shard?"""
    with_version = f"datasets {installed_versions(('datasets',))['datasets']}"
    fresh = max(
        ([s.usage.total_bytes for s in part.steps if s.name.endswith("fresh")] for part in (first, again)), key=len
    )
    if len(fresh) < 3:
        high = max(first.peak_bytes, again.peak_bytes)
        return f"With {with_version} the peak was {format_size(high)}; --mode shard shows whether it grows."
    rises = sorted(after - before for before, after in pairwise(fresh))
    middle = rises[len(rises) // 2]
    if middle > _NOTABLE * options.rows_per_file * options.text_bytes:
        return (
            f"With {with_version} memory that cannot be taken back rises by about {format_size(middle)} with every "
            "fresh shard: that is a leak's shape."
        )
    return (
        f"The famous growth from shard to shard does not show with {with_version}: after each of {len(fresh)} fresh "
        f"shards, what cannot be taken back stayed within {format_size(max(fresh) - min(fresh))} of "
        f"{format_size(min(fresh))}."
    )


def _write_texts(path: Path, options: MapExperimentOptions, seed: int) -> None:
    """An Arrow file as `datasets` caches them, written row by row."""
    import random

    import pyarrow as pa

    words = [f"{n:x}" for n in random.Random(seed).sample(range(1 << 20), 500)]
    schema = pa.schema([("text", pa.string())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for row in range(options.rows_per_file):
            line = " ".join(words[row % 100 :]) + " "
            text = (line * (options.text_bytes // len(line) + 1))[: options.text_bytes]
            writer.write_table(pa.table({"text": [text]}, schema=schema))


def map_texts(folder: str, mode: str, batch_size: int, writer_batch_size: int, num_proc: int) -> None:
    """Child: map, then read what came out."""
    import datasets

    began = time.time()
    step("datasets imported")
    options: dict[str, Any] = {
        "batched": True,
        "batch_size": batch_size,
        "writer_batch_size": writer_batch_size,
        "num_proc": num_proc if num_proc > 1 else None,
    }
    names = sorted(name for name in os.listdir(folder) if name[:4].isdigit())
    rows = [datasets.Dataset.from_file(os.path.join(folder, name)) for name in names]
    if mode == "basic":
        rows = [datasets.concatenate_datasets(rows)]
    for number, shard in enumerate(rows, start=1):
        done = shard.map(upper, **options)
        for _ in done.iter(batch_size):
            pass
        which = "all files" if mode == "basic" else f"shard {number} of {len(rows)}"
        tell(shard=number)
        step(f"{which}, {_origin(done, began)}")


def upper(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    """The mapped function. It says how many rows it was given, so that cached ones are known by their silence."""
    tell(rows=len(batch["text"]))
    return {"text": [text.upper() for text in batch["text"]]}


def _origin(done: Any, began: float) -> str:
    files = [file["filename"] for file in done.cache_files]
    cached = sum(os.path.getmtime(file) < began for file in files)
    if cached in (0, len(files)):
        return "cached" if cached else "fresh"
    return f"{cached} of {len(files)} cached"
