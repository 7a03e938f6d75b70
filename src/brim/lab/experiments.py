"""The experiments of `brim lab`. Functions marked "Child" run in measured processes.

`leak`: a list that grows, and a memory-mapped file that is read. RSS rises for both, and only the list is a leak.
`embed-list`: vectors appended to a list and concatenated, and the same vectors written batch by batch.
`push`: files embedded into a table and then written as Parquet, and the same files spliced by `brim build`.
`map`: `datasets.map` over large texts, interrupted and run again: cached and fresh shards.
"""

from __future__ import annotations

import filecmp
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import InputError
from brim.lab.measure import check_space, measure, require, send, send_and_wait, step
from brim.lab.steps import Experiment, ExperimentPart, Watch, installed_versions
from brim.memory.prediction import median
from brim.memory.release import give_back_heap
from brim.monitor.forecasts.shapes import concat, embed_files
from brim.sizes import format_size

if TYPE_CHECKING:
    import numpy as np

_PAGE = 4096
_NOTABLE = 0.1  # of a shard: less growth per shard is noise


def run_leak(folder: Path, watch: Watch, *, size_bytes: int, pieces: int) -> Experiment:
    options = {"size_bytes": size_bytes, "pieces": pieces}
    check_space(folder, size_bytes, size_bytes)
    path, block = folder / "mapped.bin", os.urandom(1 << 20)
    with open(path, "wb") as file:
        for start in range(0, size_bytes, len(block)):
            file.write(block[: size_bytes - start])
    grown = measure("a list that grows", "grow", options, folder, watch)
    touched = measure("a mapped file", "touch", {"path": str(path), "pieces": pieces}, folder, watch)
    kinds = {}
    for part in (grown, touched):  # the last step is after the memory was returned
        first, last = part.steps[0], part.steps[-2]
        rise = last.rss_bytes - first.rss_bytes
        is_leak = last.usage.total_bytes - first.usage.total_bytes > rise / 2
        kinds[part.name] = "leak" if is_leak else "mapping"
    rss = [format_size(part.steps[-2].rss_bytes) for part in (grown, touched)]
    memory = [format_size(part.steps[-2].usage.total_bytes) for part in (grown, touched)]
    after = [format_size(part.steps[-1].rss_bytes) for part in (grown, touched)]
    is_mapping = kinds[touched.name] == "mapping"
    looks = "the file only looks like one" if is_mapping else "the file should only look like one, but is one"
    sentences = (
        f"RSS rose to {rss[0]} with the list and to {rss[1]} with the mapped file. Of that, {memory[0]} and "
        f"{memory[1]} cannot be reclaimed by the kernel: the list has the shape of a {kinds[grown.name]}, {looks}.",
        f"After both had returned unused memory, the list kept {after[0]} and the mapped file {after[1]}; the kernel "
        "reclaims file pages without being asked.",
    )
    return Experiment("leak", (grown, touched), sentences, (), {"options": options, "verdicts": kinds})


def grow(size_bytes: int, pieces: int) -> None:
    """Child: keep piece after piece."""
    step("started")
    blocks = []
    for number in range(1, pieces + 1):
        blocks.append(b"\1" * (size_bytes // pieces))
        step(f"{number} of {pieces} pieces kept")
    give_back_heap()
    step("after malloc_trim")
    assert blocks


def touch(path: str, pieces: int) -> None:
    """Child: read piece after piece of a mapped file."""
    import mmap

    step("started")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        size = len(mapped)
        for number in range(1, pieces + 1):
            sum(mapped[size * (number - 1) // pieces : size * number // pieces : _PAGE])
            step(f"{number} of {pieces} pieces read")
        if hasattr(mmap, "MADV_DONTNEED"):
            mapped.madvise(mmap.MADV_DONTNEED)
        step("after returning its pages")


def run_concat(folder: Path, watch: Watch, *, rows: int, dims: int, batch_size: int) -> Experiment:
    paths = folder / "joined.npy", folder / "streamed.npy"
    options = {"rows": rows, "dims": dims, "batch_size": batch_size}
    forecast = concat(rows=rows, dims=dims, memory="1PB")
    data_bytes, forecast_bytes = forecast.details["data_bytes"], forecast.high_bytes
    check_space(folder, 2 * data_bytes, forecast_bytes)
    collected, streamed = (
        measure(name, function, {"path": str(path), **options}, folder, watch)
        for name, function, path in (
            ("append and join", "append_and_join", paths[0]),
            ("batch by batch", "batch_by_batch", paths[1]),
        )
    )
    same = filecmp.cmp(*paths, shallow=False)
    twice = "twice the vectors" if collected.work_bytes > 1.7 * data_bytes else "less than twice the vectors"
    sentences = (
        f"Concatenating {format_size(data_bytes)} of vectors took {format_size(collected.work_bytes)}: {twice} "
        f"(brim forecast concat predicts {format_size(forecast_bytes)}), and all of it at the end.",
        f"Written batch by batch into a file of known size, the same vectors took {format_size(streamed.work_bytes)}"
        f"{'; the two files are identical' if same else '; but the two files differ'}.",
    )
    facts = {"options": options, "forecast_bytes": forecast_bytes, "same_bytes": same}
    return Experiment("embed-list", (collected, streamed), sentences, ("numpy",), facts)


def _batches(rows: int, dims: int, batch_size: int, action: str) -> Iterator[np.ndarray[Any, Any]]:
    """Yield random vectors; measure after half of them and at the end."""
    import numpy as np

    random = np.random.default_rng(0)
    for number, start in enumerate(range(0, rows, batch_size)):
        yield random.random((min(batch_size, rows - start), dims), dtype=np.float32)
        if number == rows // batch_size // 2:
            step(f"half of it {action}")
    step(f"all of it {action}")


def append_and_join(path: str, rows: int, dims: int, batch_size: int) -> None:
    """Child: the usual loop, which collects batches in a list and joins them at the end."""
    import numpy as np

    step("started")
    array = np.concatenate([*_batches(rows, dims, batch_size, "appended")])
    step("joined")
    np.save(path, array)
    step("saved")


def batch_by_batch(path: str, rows: int, dims: int, batch_size: int) -> None:
    """Child: the file has its final size from the start, and every batch is written to its position."""
    import brim

    open_writer = brim.TensorWriter  # loaded before the first step
    step("started")
    with open_writer(path, rows, vectors=(dims, "float32"), overwrite=True) as writer:
        for batch in _batches(rows, dims, batch_size, "written"):
            writer.append(vectors=batch)
    step("on disk")


def run_push(folder: Path, watch: Watch, *, num_files: int, file_bytes: int) -> Experiment:
    require("datasets")
    total = num_files * file_bytes
    forecast = embed_files(shard_bytes=total, largest_file=file_bytes, memory="1PB")
    check_space(folder, 3 * total, forecast.low_bytes)  # the files, and two copies of them
    source = folder / "source"
    source.mkdir()
    for number in range(num_files):
        (source / f"{number:04d}.bin").write_bytes(os.urandom(file_bytes))
    embedded, spliced = (
        measure(name, call, {"source": str(source), "target": str(folder / target)}, folder, watch)
        for name, call, target in (
            ("embed, then write", "embed_then_write", "embedded.parquet"),
            ("brim build", "splice", "spliced"),
        )
    )
    times = embedded.work_bytes / total
    note = "" if times > 2 else "; the usual two to three times do not show with these versions"
    low, high = forecast.low_bytes, forecast.high_bytes
    sentences = (
        f"Embedding used {format_size(embedded.peak_bytes)} for {format_size(total)} of files, {times:.1f} times their "
        f"size in addition to its base (forecast: {format_size(low)} to {format_size(high)} in total){note}.",
        f"brim used {format_size(spliced.peak_bytes)} in total, independent of the size of the files: it writes a "
        "shard from a list of file ranges.",
    )
    options = {"num_files": num_files, "file_bytes": file_bytes}
    numbers = {"options": options, "file_bytes": total, "forecast_low_bytes": low, "forecast_high_bytes": high}
    return Experiment("push", (embedded, spliced), sentences, ("datasets", "pyarrow"), numbers)


def embed_then_write(source: str, target: str) -> None:
    """Child: one shard, as in `push_to_hub` and in most scripts."""
    import datasets
    import pyarrow.parquet as pq
    from datasets.table import embed_table_storage

    step("datasets imported")
    paths = [entry.path for entry in sorted(os.scandir(source), key=lambda entry: entry.name)]
    rows = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image(decode=False))
    step("table of paths")
    table = embed_table_storage(rows.data.table)
    step("files embedded")
    pq.write_table(table, target)
    step("written")


def splice(source: str, target: str) -> None:
    """Child: the same with brim."""
    import brim

    files, plan = brim.files, brim.plan  # loaded before the first step
    step("brim imported")
    job = plan(files(source, column="image:image"), target)
    step("planned")
    job.run()
    step("built")


def run_map(
    folder: Path,
    watch: Watch,
    *,
    mode: str,
    num_files: int,
    rows_per_file: int,
    text_bytes: int,
    batch_size: int,
    writer_batch_size: int,
    num_proc: int,
    interrupt_after: int,
) -> Experiment:
    """Map all files in one call (mode "basic") or each file in a separate call ("shard")."""
    options = {name: value for name, value in locals().items() if name not in ("folder", "watch")}
    require("datasets")
    shards = num_files if mode == "shard" or num_proc == 1 else num_proc  # `datasets` caches each call and worker
    if interrupt_after >= shards:
        raise InputError(
            f"--interrupt-after {interrupt_after} would come after the last of {shards} shard(s).",
            hint="Give a smaller number, or 0 for no interruption.",
        )
    rows = num_files * rows_per_file
    check_space(folder, 2 * rows * text_bytes, 0)  # the texts and the results
    texts = folder / "texts"
    texts.mkdir()
    for number in range(num_files):
        _write_texts(texts / f"{number:04d}.arrow", rows_per_file, text_bytes, number)

    def should_stop(messages: list[dict[str, Any]]) -> bool:
        """Check whether enough shards are finished."""
        if mode == "shard":
            finished = sum("shard" in message for message in messages)
        elif num_proc == 1:  # the only cache file is written at the end, so count rows
            finished = sum(int(message.get("rows", 0)) for message in messages) // rows_per_file
        else:
            finished = sum(1 for _ in texts.glob("cache-*.arrow"))
        return 0 < interrupt_after <= finished

    names = ("mode", "batch_size", "writer_batch_size", "num_proc")
    call = {"folder": str(texts), **{name: options[name] for name in names}}
    first_name = f"interrupted after {interrupt_after}" if interrupt_after else "first run"
    first = measure(first_name, "map_texts", call, folder, watch, should_stop)
    second = measure("run again", "map_texts", call, folder, watch)
    computed = {part.name: sum(message.get("rows", 0) for message in part.messages) for part in (first, second)}
    cached_rows = rows - computed[second.name]
    outcome = f"was killed after {computed[first_name]:,} of {rows:,} rows" if first.interrupted else "was complete"
    cached = f"the second run found {cached_rows:,} rows in the cache and computed the other {rows - cached_rows:,}"
    if cached_rows == 0:
        cached = "nothing of it was kept: datasets discards an unfinished cache file"
    last = second.steps[-1]
    sentences = (
        f"The first run {outcome}, and {cached}; at the end RSS was {format_size(last.rss_bytes)}, of which "
        f"{format_size(last.usage.file_bytes)} are mapped files, which look like a leak and are not one.",
        _growth(first, second, rows_per_file * text_bytes),
    )
    numbers = {"options": options, "rows_computed": computed}
    return Experiment("map", (first, second), sentences, ("datasets", "pyarrow"), numbers)


def _growth(first: ExperimentPart, second: ExperimentPart, shard_bytes: int) -> str:
    """Return whether memory rises from one fresh shard to the next."""
    with_version = f"datasets {installed_versions(('datasets',))['datasets']}"
    fresh = max(
        ([s.usage.total_bytes for s in part.steps if s.name.endswith("fresh")] for part in (first, second)), key=len
    )
    if len(fresh) < 3:
        highest = format_size(max(first.peak_bytes, second.peak_bytes))
        return f"With {with_version} the peak was {highest}; --mode shard shows whether it grows."
    rise = median(after - before for before, after in pairwise(fresh))
    if rise > _NOTABLE * shard_bytes:
        return f"With {with_version} memory rises by about {format_size(rise)} per fresh shard, as a leak does."
    spread, least = format_size(max(fresh) - min(fresh)), format_size(min(fresh))
    return (
        f"Memory does not grow from shard to shard with {with_version}: after each of {len(fresh)} fresh shards it was "
        f"within {spread} of {least}."
    )


def _write_texts(path: Path, rows: int, text_bytes: int, seed: int) -> None:
    """Write an Arrow file like the caches of `datasets`, row by row."""
    import random

    import pyarrow as pa

    tokens = [f"{n:x}" for n in random.Random(seed).sample(range(1 << 20), 500)]
    schema = pa.schema([("text", pa.string())])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for number in range(rows):
            line = " ".join(tokens[number % 100 :]) + " "
            text = (line * (text_bytes // len(line) + 1))[:text_bytes]
            writer.write_table(pa.table({"text": [text]}, schema=schema))


def map_texts(folder: str, mode: str, batch_size: int, writer_batch_size: int, num_proc: int) -> None:
    """Child: map, then read the result."""
    import datasets

    began = time.time()
    step("datasets imported")
    names = sorted(name for name in os.listdir(folder) if name[:4].isdigit())
    shards = [datasets.Dataset.from_file(os.path.join(folder, name)) for name in names]
    if mode == "basic":
        shards = [datasets.concatenate_datasets(shards)]
    workers = num_proc if num_proc > 1 else None
    for number, shard in enumerate(shards, start=1):
        mapped = shard.map(
            upper,
            fn_kwargs={"report": send if workers else send_and_wait},  # a worker cannot wait for an answer
            batched=True,
            batch_size=batch_size,
            writer_batch_size=writer_batch_size,
            num_proc=workers,
        )
        for _ in mapped.iter(batch_size):
            pass
        files = [file["filename"] for file in mapped.cache_files]
        cached = sum(os.path.getmtime(file) < began for file in files)
        origin = f"{cached} of {len(files)} cached"
        if cached in (0, len(files)):
            origin = "cached" if cached else "fresh"
        send(shard=number)
        step(f"{'all files' if mode == 'basic' else f'shard {number} of {len(shards)}'}, {origin}")


def upper(batch: dict[str, list[str]], report: Callable[..., None]) -> dict[str, list[str]]:
    """Child: the mapped function. It reports the rows that it computes; rows from the cache are not reported."""
    report(rows=len(batch["text"]))
    return {"text": [text.upper() for text in batch["text"]]}


RUNS: dict[str, Callable[..., Experiment]] = {
    "leak": run_leak,
    "embed-list": run_concat,
    "push": run_push,
    "map": run_map,
}
