"""Vectors appended to a list and joined at the end, and the same vectors written batch by batch."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.forecasts.shapes import concat
from brim.lab.measure import measure, need_room, step
from brim.lab.steps import Experiment, ExperimentPart, Watch
from brim.records import dataclass
from brim.sizes import format_size

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class EmbedListOptions:
    """How many vectors, how long each is, and how many come at a time."""

    rows: int = 40_000
    dims: int = 1024
    batch_size: int = 500


def run(folder: Path, options: EmbedListOptions, watch: Watch) -> Experiment:
    one, other = folder / "joined.npy", folder / "streamed.npy"
    numbers = asdict(options)
    forecast = concat(rows=options.rows, dims=options.dims, memory="1PB")
    need_room(folder, 2 * forecast.details["data_bytes"], forecast.high_bytes)
    joined = measure(
        "append and join", "concat_experiment:append_and_join", {"path": str(one), **numbers}, folder, watch
    )
    streamed = measure(
        "batch by batch", "concat_experiment:batch_by_batch", {"path": str(other), **numbers}, folder, watch
    )
    same = filecmp.cmp(one, other, shallow=False)
    seen = _seen(joined, streamed, forecast.high_bytes, forecast.details["data_bytes"], same)
    facts = {"options": numbers, "forecast_bytes": forecast.high_bytes, "same_bytes": same}
    return Experiment("embed-list", (joined, streamed), seen, ("numpy",), facts)


def _seen(
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
