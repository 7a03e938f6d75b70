"""brim.forecast: the shapes by name, and the numbers of `embed-files` taken from a real source."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from brim.errors import InputError, named
from brim.forecasts import measured, shapes
from brim.forecasts.shapes import Forecast, Size
from brim.jobs.build_job import Build, BuildOptions
from brim.sizes import format_size
from brim.sources.features import SIZED_BY_PATH
from brim.sources.file_table import FileTable
from brim.sources.open_source import read_source
from brim.sources.source_options import SourceOptions

Shape = Literal["embed-files", "map", "concat", "pid", "sampled"]

# What `datasets` 5.2 aims at, by sizes that it takes from the paths for some kinds of files.
_SHARD_BYTES = 500_000_000
_ROW_GROUP_BYTES = 100_000_000


def forecast(shape: Shape, **numbers: Any) -> Forecast:
    """Will it fit, with the arithmetic. Print the result.

    forecast("concat", rows=2_857_545, dims=[768, 1024], memory="64GB")
    forecast("embed-files", source="scans/")  # or shard_bytes="3.6GB"
    forecast("map", row_bytes="200KB", batch_size=1000, workers=8)
    forecast("pid", pid=4242, adds="19GB")
    forecast("sampled", points=["1/32=1.2GB", "1/8=3.4GB"])  # or logs=[…] of brim run --fraction

    Without `memory` the limit is what this machine, or the cgroup around this process, has left.
    """
    function: Callable[..., Forecast] | None = _FUNCTIONS.get(shape)
    if function is None:
        raise InputError(f"{shape!r} is not a shape of work.", hint=f"Use one of: {', '.join(_FUNCTIONS)}.")
    try:
        inspect.signature(function).bind(**numbers)
    except TypeError as error:
        names = ", ".join(inspect.signature(function).parameters)
        raise InputError(f"The forecast {shape!r} cannot be made: {error}.", hint=f"It takes: {names}.") from error
    with named({"point": "points"}):
        return function(**numbers)


def embed_files(
    *,
    source: str | os.PathLike[str] | FileTable | None = None,
    num_shards: int | None = None,
    shard_bytes: Size | None = None,
    workers: int = 1,
    largest_file: Size | None = None,
    row_group: Size | None = None,
    base: Size | None = None,
    memory: Size | None = None,
) -> Forecast:
    """From numbers, or from a source: then the shards are those that `datasets` would make, by their true bytes."""
    rest: dict[str, Any] = {"workers": workers, "base": base, "memory": memory}
    if source is None:
        if num_shards is not None:
            raise InputError("--num-shards needs a SOURCE to cut.", hint="Give --shard-bytes instead.")
        if shard_bytes is None:
            raise InputError("Give a SOURCE, or how large a shard is.", hint="Write it like --shard-bytes=3.6GB.")
        return shapes.embed_files(shard_bytes=shard_bytes, largest_file=largest_file, row_group=row_group, **rest)
    if shard_bytes is not None:
        raise InputError("Choose one of SOURCE and --shard-bytes.", hint="A source says how large its shards are.")
    table = source if isinstance(source, FileTable) else read_source(source, SourceOptions())
    total = int(table.file_bytes().sum())
    if total == 0:
        raise InputError("The source holds no files with anything in them.", hint="There is nothing to embed.")
    by_path = sorted({column.kind for column in table.columns.values()} & SIZED_BY_PATH)
    shards = (1 if by_path else total // _SHARD_BYTES + 1) if num_shards is None else num_shards
    if shards < 1:
        raise InputError("--num-shards takes a number above zero.")
    made = shapes.embed_files(
        shard_bytes=largest_piece(table.file_bytes(), shards),
        largest_file=largest_file or int(table.files.sizes.max()),
        row_group=row_group or (None if by_path else _ROW_GROUP_BYTES),
        **rest,
    )
    return _of_source(made, table, total, shards, by_path if num_shards is None else [])


def _of_source(made: Forecast, table: FileTable, total: int, shards: int, by_path: list[str]) -> Forecast:
    """A forecast with what is known about its source, and what brim would take for the same."""
    risks = made.reasons.for_crash
    if by_path:
        risks = (
            f"`datasets` 5.2 sizes {', '.join(by_path)} columns by their paths, not by the {format_size(total)} in the "
            "files: without num_shards it makes one shard",
            *risks,
        )
    # No limit: the question is what brim needs, not whether that fits.
    need = Build(table, None, BuildOptions(memory="1PB", workers=1)).forecast.total
    better = (
        f"`brim build` splices the files into shards without holding them, in about {format_size(need)}",
        *made.reasons.better[1:],
    )
    remark = ("source", f"{table.file_count():,} files, {format_size(total)}, in {shards:,} shard(s)")
    details = {"rows": len(table), "file_bytes": total, "num_shards": shards, "brim_bytes": need}
    reasons = replace(made.reasons, for_crash=risks, better=better)
    return replace(made, reasons=reasons, remark=remark, details={**made.details, **details})


def largest_piece(row_bytes: np.ndarray[Any, Any], pieces: int) -> int:
    """The bytes of the largest of `pieces` runs of equally many rows, which is how `datasets` cuts."""
    return max(int(piece.sum()) for piece in np.array_split(row_bytes, min(pieces, len(row_bytes))))


_FUNCTIONS: dict[str, Callable[..., Forecast]] = {
    "embed-files": embed_files,
    "map": shapes.map_rows,
    "concat": shapes.concat,
    "pid": measured.pid,
    "sampled": measured.sampled,
}
