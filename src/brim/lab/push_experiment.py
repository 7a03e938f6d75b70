"""Files embedded into a table and then written as Parquet, and the same files spliced by `brim build`."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from brim.forecasts.shapes import Forecast, embed_files
from brim.lab.measure import measure, need, need_room, step, tell
from brim.lab.steps import Experiment, ExperimentPart, Watch
from brim.records import dataclass
from brim.sizes import format_size


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How many files are embedded, and how large each is."""

    num_files: int = 24
    file_bytes: int = 5_000_000


def run(folder: Path, options: PushOptions, watch: Watch) -> Experiment:
    need("datasets")
    total = options.num_files * options.file_bytes
    forecast = embed_files(shard_bytes=total, largest_file=options.file_bytes, memory="1PB")
    need_room(folder, 3 * total, forecast.low_bytes)  # the files, and two tables with them inside
    source = folder / "source"
    source.mkdir()
    for number in range(options.num_files):
        (source / f"{number:04d}.bin").write_bytes(os.urandom(options.file_bytes))
    places = {"source": str(source), "target": str(folder / "embedded.parquet")}
    embedded = measure("embed, then write", "push_experiment:embed_then_write", places, folder, watch)
    places["target"] = str(folder / "spliced")
    spliced = measure("brim build", "push_experiment:splice", places, folder, watch)
    numbers = {
        "options": asdict(options),
        "file_bytes": total,
        "forecast_low_bytes": forecast.low_bytes,
        "forecast_high_bytes": forecast.high_bytes,
    }
    parts = (embedded, spliced)
    return Experiment("push", parts, _seen(embedded, spliced, total, forecast), ("datasets", "pyarrow"), numbers)


def _seen(embedded: ExperimentPart, spliced: ExperimentPart, total: int, forecast: Forecast) -> tuple[str, str]:
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
