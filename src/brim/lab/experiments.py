"""The small experiments.

`leak`: a list that grows, and a memory-mapped file that is read. RSS rises alike, and only one of them is a leak.

`concat`: vectors appended to a list and joined at the end, and the same vectors written batch by batch.

`push`: files embedded into a table and then written as Parquet, and the same files spliced by `brim build`.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.lab.measure import measure, need, need_room, step, tell
from brim.lab.steps import Experiment, ExperimentPart, Watch
from brim.monitor.forecasts.shapes import Forecast, concat, embed_files
from brim.records import dataclass
from brim.sizes import format_size

if TYPE_CHECKING:
    import numpy as np

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class LeakOptions:
    """How much is held or read in all, and in how many steps."""

    size_bytes: int = 200_000_000
    pieces: int = 4


def run_leak(folder: Path, options: LeakOptions, watch: Watch) -> Experiment:
    need_room(folder, options.size_bytes, options.size_bytes)
    path = folder / "mapped.bin"
    _write(path, options.size_bytes)
    grown = measure("a list that grows", "experiments:grow", asdict(options), folder, watch)
    touched = measure(
        "a mapped file", "experiments:touch", {"path": str(path), "pieces": options.pieces}, folder, watch
    )
    numbers = {"options": asdict(options), "verdicts": {part.name: judge(part) for part in (grown, touched)}}
    return Experiment("leak", (grown, touched), _leak_seen(grown, touched), (), numbers)


def judge(part: ExperimentPart) -> str:
    """ "leak" if what the steps added cannot be taken back, "mapping" if it can."""
    first, last = part.steps[0], part.steps[-2]  # the last step is after the giving back
    rose = last.rss_bytes - first.rss_bytes
    return "leak" if last.usage.total_bytes - first.usage.total_bytes > rose / 2 else "mapping"


def _leak_seen(grown: ExperimentPart, touched: ExperimentPart) -> tuple[str, str]:
    high = [part.steps[-2] for part in (grown, touched)]
    after = [part.steps[-1] for part in (grown, touched)]
    rss = [format_size(step.rss_bytes) for step in high]
    held = [format_size(step.usage.total_bytes) for step in high]
    looks = "looks like one" if judge(touched) == "mapping" else "should look like one, and is one here"
    return (
        f"RSS rose to {rss[0]} with the list and to {rss[1]} with the mapped file, but of that {held[0]} and "
        f"{held[1]} are memory that nobody can take back: the list is a {judge(grown)}'s shape, "
        f"the file only {looks}.",
        f"Asked to give back what it could, the list kept {format_size(after[0].rss_bytes)} and the mapped file "
        f"{format_size(after[1].rss_bytes)}; a kernel that needs the room takes file pages without asking.",
    )


def _write(path: Path, size: int) -> None:
    block = os.urandom(1 << 20)
    with open(path, "wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])


def grow(size_bytes: int, pieces: int) -> None:
    """Child: keep piece after piece."""
    step("started")
    kept = []
    for number in range(1, pieces + 1):
        kept.append(b"\1" * (size_bytes // pieces))
        step(f"{number} of {pieces} pieces kept")
    _give_back()
    step("after gc and malloc_trim")
    assert kept


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
        step("after giving its pages back")


def _give_back() -> None:
    import ctypes
    import gc

    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@dataclass(frozen=True, slots=True)
class EmbedListOptions:
    """How many vectors, how long each is, and how many come at a time."""

    rows: int = 40_000
    dims: int = 1024
    batch_size: int = 500


def run_concat(folder: Path, options: EmbedListOptions, watch: Watch) -> Experiment:
    one, other = folder / "joined.npy", folder / "streamed.npy"
    numbers = asdict(options)
    forecast = concat(rows=options.rows, dims=options.dims, memory="1PB")
    need_room(folder, 2 * forecast.details["data_bytes"], forecast.high_bytes)
    joined = measure("append and join", "experiments:append_and_join", {"path": str(one), **numbers}, folder, watch)
    streamed = measure("batch by batch", "experiments:batch_by_batch", {"path": str(other), **numbers}, folder, watch)
    same = filecmp.cmp(one, other, shallow=False)
    seen = _concat_seen(joined, streamed, forecast.high_bytes, forecast.details["data_bytes"], same)
    facts = {"options": numbers, "forecast_bytes": forecast.high_bytes, "same_bytes": same}
    return Experiment("embed-list", (joined, streamed), seen, ("numpy",), facts)


def _concat_seen(
    joined: ExperimentPart, streamed: ExperimentPart, forecast_bytes: int, data_bytes: int, same: bool
) -> tuple[str, str]:
    added = joined.work_bytes
    famous = "twice the vectors" if added > 1.7 * data_bytes else "less than the famous twice, here"
    return (
        f"Joining {format_size(data_bytes)} of vectors took {format_size(added)}: {famous} "
        f"(brim forecast concat says {format_size(forecast_bytes)}), and all of it at the very end.",
        f"Written batch by batch into a file of known size, the same vectors took {format_size(streamed.work_bytes)}"
        f"{'; the two files are equal, byte for byte' if same else '; but the two files differ'}.",
    )


def _batches(rows: int, dims: int, batch_size: int) -> Iterator[np.ndarray[Any, Any]]:
    import numpy as np

    random = np.random.default_rng(0)
    for start in range(0, rows, batch_size):
        yield random.random((min(batch_size, rows - start), dims), dtype=np.float32)


def append_and_join(path: str, rows: int, dims: int, batch_size: int) -> None:
    """Child: the usual loop."""
    import numpy as np

    step("started")
    pieces = []
    for number, batch in enumerate(_batches(rows, dims, batch_size)):
        pieces.append(batch)
        if number == rows // batch_size // 2:
            step("half of it appended")
    step("all of it appended")
    whole = np.concatenate(pieces)
    step("joined")
    np.save(path, whole)
    step("saved")


def batch_by_batch(path: str, rows: int, dims: int, batch_size: int) -> None:
    """Child: the file has its size from the start, and every batch goes to its place."""
    import brim

    open_writer = brim.TensorWriter  # loaded before the first step
    step("started")
    with open_writer(path, rows, vectors=(dims, "float32"), overwrite=True) as writer:
        for number, batch in enumerate(_batches(rows, dims, batch_size)):
            writer.append(vectors=batch)
            if number == rows // batch_size // 2:
                step("half of it written")
        step("all of it written")
    step("on disk")


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How many files are embedded, and how large each is."""

    num_files: int = 24
    file_bytes: int = 5_000_000


def run_push(folder: Path, options: PushOptions, watch: Watch) -> Experiment:
    need("datasets")
    total = options.num_files * options.file_bytes
    forecast = embed_files(shard_bytes=total, largest_file=options.file_bytes, memory="1PB")
    need_room(folder, 3 * total, forecast.low_bytes)  # the files, and two tables with them inside
    source = folder / "source"
    source.mkdir()
    for number in range(options.num_files):
        (source / f"{number:04d}.bin").write_bytes(os.urandom(options.file_bytes))
    places = {"source": str(source), "target": str(folder / "embedded.parquet")}
    embedded = measure("embed, then write", "experiments:embed_then_write", places, folder, watch)
    places["target"] = str(folder / "spliced")
    spliced = measure("brim build", "experiments:splice", places, folder, watch)
    numbers = {
        "options": asdict(options),
        "file_bytes": total,
        "forecast_low_bytes": forecast.low_bytes,
        "forecast_high_bytes": forecast.high_bytes,
    }
    parts = (embedded, spliced)
    return Experiment("push", parts, _push_seen(embedded, spliced, total, forecast), ("datasets", "pyarrow"), numbers)


def _push_seen(embedded: ExperimentPart, spliced: ExperimentPart, total: int, forecast: Forecast) -> tuple[str, str]:
    times = embedded.work_bytes / total
    famous = "" if times > 2 else "; the famous two to three times do not show with these versions"
    return (
        f"Embedding held {format_size(embedded.peak_bytes)} for {format_size(total)} of files, {times:.1f} times their "
        f"size beyond what it began with (forecast: {format_size(forecast.low_bytes)} to "
        f"{format_size(forecast.high_bytes)} in all){famous}.",
        f"brim held {format_size(spliced.peak_bytes)} in all, and that does not grow with the files: a shard is a list "
        "of what lies where.",
    )


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
    tell(bytes=os.path.getsize(target))


def splice(source: str, target: str) -> None:
    """Child: brim's way."""
    import brim

    files, plan = brim.files, brim.plan  # loads what they need
    step("brim imported")
    job = plan(files(source, column="image:image"), target)
    step("planned")
    built = job.run()
    step("built")
    tell(bytes=built.bytes)
