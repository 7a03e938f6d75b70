"""brim.forecast: estimates by kind of job; the numbers of `embed-files` may come from a source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from brim.api.source_api import source_options
from brim.errors import InputError, named
from brim.jobs.build_job import BuildPlan, BuildSettings
from brim.monitor.forecasts import measured, shapes
from brim.monitor.forecasts.shapes import Forecast
from brim.options.declare import declared_options, make_options
from brim.options.monitor_options import FORECASTS, EmbedFilesForecast
from brim.sizes import format_size
from brim.sources.features import SIZED_BY_PATH
from brim.sources.file_table import FileTable
from brim.sources.open_source import read_source

Shape = Literal["embed-files", "map", "concat", "pid", "sampled"]

# What `datasets` 5.2 aims at, by sizes that it takes from the paths for some kinds of files.
_SHARD_BYTES = 500_000_000
_ROW_GROUP_BYTES = 100_000_000


def forecast(shape: Shape, **numbers: Any) -> Forecast:
    """Estimate whether a job fits into memory, with the arithmetic. Nothing is run.

    Args:
        shape: "embed-files", "map", "concat", "pid" or "sampled".
        numbers: The options of `brim forecast SHAPE`, such as rows=, dims= and memory=. Without memory=, the limit is
            the available memory of this machine or cgroup.

    Returns:
        The estimate: `verdict`, `low_bytes`, `high_bytes`; print it.

    Raises:
        InputError: The shape or a number is wrong, or one is missing.

    Examples:
        >>> brim.forecast("concat", rows=2_857_545, dims=[768, 1024], memory="64GB").verdict.name
        'LOW'
        >>> brim.forecast("embed-files", source="photos", memory="64GB").verdict.name
        'LOW'
    """
    if shape not in FORECASTS:
        raise InputError(f"Unknown kind of job {shape!r}.", hint=f"Use one of: {', '.join(FORECASTS)}.")
    try:
        declared = declared_options(FORECASTS[shape])
        texts = {name: text for name, text in numbers.items() if isinstance(text, str) and name in declared}
        lists = {name for name in texts if declared[name].option.from_texts is not None}
        parsed = {name: declared[name].parse([text] if name in lists else text) for name, text in texts.items()}
        options = make_options(FORECASTS[shape], "forecast", (), {**numbers, **parsed})
    except TypeError as error:
        names = ", ".join(declared_options(FORECASTS[shape]))
        problem = f"The forecast {shape!r} cannot be made: {error}"
        raise InputError(problem if problem.endswith("?") else f"{problem}.", hint=f"It takes: {names}.") from error
    return make_forecast(shape, options)


def make_forecast(shape: str, options: Any) -> Forecast:
    """Make the forecast of a shape from its checked options."""
    if isinstance(options, EmbedFilesForecast):
        return _embed_files(options)
    kind = FORECASTS[shape]
    numbers = options.values(kind)
    if shape == "pid":
        numbers["dims"] = numbers["dims"] or None
    functions: dict[str, Callable[..., Forecast]] = {
        "map": shapes.map_rows,
        "concat": shapes.concat,
        "pid": measured.pid,
        "sampled": measured.sampled,
    }
    with named({"point": "points"}):
        return functions[shape](**numbers)


def _embed_files(options: EmbedFilesForecast) -> Forecast:
    """From sizes, or from a source: then the shards are those that `datasets` would make, by the size of the files."""
    common: dict[str, Any] = {"workers": options.workers, "base": options.base, "memory": options.memory}
    source, num_shards, shard_bytes = options.source, options.num_shards, options.shard_bytes
    largest_file, row_group = options.largest_file, options.row_group
    if source is None:
        if num_shards is not None:
            raise InputError("--num-shards can only be used with SOURCE.", hint="Use --shard-bytes.")
        if shard_bytes is None:
            raise InputError("SOURCE or --shard-bytes is missing.", hint="Write the size like --shard-bytes=3.6GB.")
        return shapes.embed_files(shard_bytes=shard_bytes, largest_file=largest_file, row_group=row_group, **common)
    if shard_bytes is not None:
        raise InputError("--shard-bytes cannot be used with SOURCE.", hint="Leave out one of them.")
    if isinstance(source, FileTable):
        table = source
    else:
        table = read_source(
            source, replace(source_options(options), memory=None)
        )  # `memory` is the limit of the job to predict, not of this one
    total = int(table.file_bytes().sum())
    if total == 0:
        raise InputError("All files of the source are empty.", hint="Name a source whose files have content.")
    by_path = sorted({column.kind for column in table.columns.values()} & SIZED_BY_PATH)
    shards = (1 if by_path else total // _SHARD_BYTES + 1) if num_shards is None else num_shards
    forecast = shapes.embed_files(
        shard_bytes=largest_shard(table.file_bytes(), shards),
        largest_file=largest_file or int(table.files.sizes.max()),
        row_group=row_group or (None if by_path else _ROW_GROUP_BYTES),
        **common,
    )
    return _add_source(forecast, table, total, shards, by_path if num_shards is None else [])


def _add_source(forecast: Forecast, table: FileTable, total: int, shards: int, by_path: list[str]) -> Forecast:
    """Add details about the source to a forecast, and the memory that `brim build` would need for it."""
    risks = forecast.reasons.for_crash
    if by_path:
        risks = (
            f"`datasets` 5.2 sizes {', '.join(by_path)} columns by their paths, not by the {format_size(total)} in the "
            "files: without num_shards it makes one shard",
            *risks,
        )
    # With practically no limit: this is the memory that brim needs, whether or not it fits.
    need = BuildPlan(table, None, BuildSettings(memory="1PB", workers=1)).forecast.total
    better = (
        f"`brim build` splices the files into shards without holding them, in about {format_size(need)}",
        *forecast.reasons.better[1:],
    )
    remark = ("source", f"{table.file_count():,} files, {format_size(total)}, in {shards:,} shard(s)")
    details = {"rows": len(table), "file_bytes": total, "num_shards": shards, "brim_bytes": need}
    reasons = replace(forecast.reasons, for_crash=risks, better=better)
    return replace(forecast, reasons=reasons, remark=remark, details={**forecast.details, **details})


def largest_shard(row_bytes: np.ndarray[Any, Any], shards: int) -> int:
    """Return the bytes of the largest shard if all shards get the same number of rows, as `datasets` divides them."""
    return max(int(shard.sum()) for shard in np.array_split(row_bytes, min(shards, len(row_bytes))))
