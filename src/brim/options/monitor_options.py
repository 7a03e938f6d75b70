"""The options of run, watch, why and forecast."""

import math
import operator
import os
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path as FilePath
from typing import Annotated, Any

from brim.options.declare import (
    LEVELS,
    LOGS,
    Argument,
    Common,
    Kind,
    Names,
    Option,
    Options,
    Path,
    PythonOnly,
    Size,
    split_commas,
)
from brim.records import dataclass
from brim.sizes import parse_count


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not 0 <= float(value) < math.inf:
        raise ValueError(value)
    return float(value)


Seconds = Annotated[float, Kind("seconds, 0 or more", _seconds, "S", float)]


@dataclass(frozen=True, kw_only=True)
class LevelOptions(Options, panel=LEVELS):
    """At which memory a watched program is warned about, stopped and killed."""

    alert: Annotated[
        str, Common("Warn above this level for 10 s: a percentage of the limit, a size, or off.", "LEVEL")
    ] = "80%"
    stop_at: Annotated[str, Common("Ask the program to stop above this level for 3 s.", "LEVEL", old="stop")] = "90%"
    kill_at: Annotated[str, Common("Kill the program above this level.", "LEVEL", old="kill")] = "97%"
    stop_lead: Annotated[
        Seconds | None,
        Option(
            "Seconds that the program needs to stop: it is asked when less is predicted to remain. 0 predicts nothing.",
            default="from the last run, or 30",
            old="lead",
        ),
    ] = None
    stop_file: Annotated[
        Path | None, Common("Create this file to ask the program to stop, before SIGTERM.", "FILE")
    ] = None


@dataclass(frozen=True, kw_only=True)
class LimitOptions(Options, panel="Run"):
    """The memory limit of the watched processes."""

    memory: Annotated[Size, Common("Memory limit, such as 40GB.", default="available memory")] = None


@dataclass(frozen=True, kw_only=True)
class LogOptions(Options, panel=LOGS):
    """Where samples and warnings are written."""

    log: Annotated[
        Path | None, Common("Log of the run.", "FILE.jsonl", default="a new file in ~/.local/state/brim/runs")
    ] = None
    on_alert: Annotated[
        str | None, Common("Run this command at every warning, with its details as BRIM_… variables.", "COMMAND")
    ] = None


@dataclass(frozen=True, kw_only=True)
class WatchOptions(LimitOptions, LevelOptions, LogOptions):
    """The options of `brim.watch`."""

    memory: Annotated[Size, Option("Memory limit, such as 40GB.", default="memory in use plus available memory")] = (
        field(default=None, kw_only=False)
    )
    enforce: Annotated[bool, Option("Stop and kill the program at these levels, not only warn.", old="act")] = False
    quiet: Annotated[bool, Option("Print nothing.")] = False


@dataclass(frozen=True, kw_only=True)
class LadderOptions(LevelOptions, panel=LEVELS):
    """What only `brim run` and `brim watch` can set about the levels."""

    alert_system: Annotated[str, Option("Warn when the memory of the machine is above this level.", "LEVEL")] = "90%"
    alert_after: Annotated[Seconds, Option("Seconds above the level before a warning.")] = 10.0
    stop_after: Annotated[Seconds, Option("Seconds above the level before a stop.")] = 3.0
    grace: Annotated[Seconds, Option("Seconds from the stop file to SIGTERM, and from SIGTERM to SIGKILL.")] = 30.0


@dataclass(frozen=True, kw_only=True)
class MonitorOptions(LimitOptions, LadderOptions, LogOptions, panel=LOGS):
    """What `brim run` and `brim watch` share."""

    alerts: Annotated[
        Path | None, Option("Write warnings as text to this file, for tail -f.", "FILE", default="next to the log")
    ] = None
    report: Annotated[Path | None, Common("Write an HTML page about the run at its end.", "FILE.html")] = None


def _paths(value: Any) -> tuple[Any, ...]:
    return () if value is None else (value,) if isinstance(value, str | os.PathLike) else tuple(value)


@dataclass(frozen=True, kw_only=True)
class WhyOptions(Options):
    """The options of `brim.why`."""

    pid: Annotated[int | None, Argument("Only kills of this process.", "PID", minimum=1)] = field(
        default=None, kw_only=False
    )
    logs: Annotated[
        Sequence[Path],
        Kind("paths", _paths, is_list=True),
        Option("Read this file (- is stdin) and not the logs of the machine.", "FILE", flags=("--log",)),
    ] = ()
    since: Annotated[
        Any, Option("Only kills after this time: today, yesterday, 2h, 3d or 2026-05-31T14:00.", "TIME")
    ] = None
    boot: Annotated[int | None, Option("Only kills of one boot: 0 is this one, -1 the one before.", "N")] = None
    runs: Annotated[Sequence[Path], PythonOnly("Logs of `brim run` that are in other folders.")] = ()
    root: Annotated[Any, Kind("a folder", FilePath), PythonOnly("Folder where /proc and /var/log are.")] = FilePath("/")


def _lengths(value: Any) -> tuple[int, ...]:
    lengths = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    if any(isinstance(length, bool) or operator.index(length) < 1 for length in lengths):
        raise ValueError(value)
    return lengths


def _parse_lengths(texts: list[str]) -> tuple[int, ...]:
    return tuple(map(parse_count, split_commas(texts)))


_LENGTHS = Kind("numbers above zero, such as 768 or 768,1024", _lengths, "N", is_list=True)
_DIMS = Option("Length of a vector; of several arrays 768,1024.", "N", from_texts=_parse_lengths)
_DTYPE = Option("Type of a number: float32, float16, bfloat16, int8 and the like.", "TYPE")
_BASE = Option("Memory that the process uses in addition (model, libraries).")
_WORKERS = Option("Number of processes at a time.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class EmbedFilesForecast(LimitOptions):
    """The options of `brim.forecast("embed-files")`."""

    source: Annotated[
        Any,
        Argument("A folder, a BIDS dataset or a table of file paths, in place of sizes.", "SOURCE"),
    ] = None
    files: Annotated[Names, Option("File column of SOURCE.", "COLUMN[:TYPE]")] = ()
    recipe: Annotated[Path | None, Option("Recipe that turns SOURCE into rows.", "NAME|FILE")] = None
    num_shards: Annotated[
        int | None, Option("Number of shards to divide SOURCE into.", default="as `datasets` does", minimum=1)
    ] = None
    shard_bytes: Annotated[Size, Option("Size of the largest shard.")] = None
    largest_file: Annotated[Size, Option("Size of the largest file.")] = None
    row_group: Annotated[Size, Option("Size of the data that is encoded at a time.", default="the shard")] = None
    workers: Annotated[int, _WORKERS] = 1
    base: Annotated[Size, _BASE] = None


@dataclass(frozen=True, kw_only=True)
class MapForecast(LimitOptions):
    """The options of `brim.forecast("map")`."""

    row_bytes: Annotated[Size, Option("Size of a row of the input; better of a long one.")]
    output_bytes: Annotated[Size, Option("Size of a row of the output.", default="as the input")] = None
    batch_size: Annotated[int, Option("Rows per batch, as in `datasets`.", "ROWS", minimum=1)] = 1000
    writer_batch_size: Annotated[int, Option("Rows per write, as in `datasets`.", "ROWS", minimum=1)] = 1000
    workers: Annotated[int, _WORKERS] = 1
    per_worker: Annotated[Size, Option("Memory that the function itself uses, in each worker.")] = None
    factor: Annotated[
        float | None, Option("Bytes in memory per byte of a batch, if you have measured it.", "X", minimum=0)
    ] = None
    base: Annotated[Size, _BASE] = None


@dataclass(frozen=True, kw_only=True)
class ConcatForecast(LimitOptions):
    """The options of `brim.forecast("concat")`."""

    rows: Annotated[int, Option("Number of vectors, such as 3M or 2,857,545.", minimum=1)]
    dims: Annotated[Any, _LENGTHS, _DIMS]
    dtype: Annotated[str, _DTYPE] = "float32"
    copies: Annotated[int, Option("How many copies exist at the end.", minimum=2)] = 2
    base: Annotated[Size, _BASE] = None


@dataclass(frozen=True, kw_only=True)
class PidForecast(LimitOptions):
    """The options of `brim.forecast("pid")`."""

    pid: Annotated[int, Argument("The process; its child processes count too.", "PID", minimum=1)]
    adds: Annotated[Size, Option("Memory that its next step adds.")] = None
    rows: Annotated[int | None, Option("Number of vectors that it joins next, in place of --adds.", minimum=1)] = None
    dims: Annotated[Any, _LENGTHS, _DIMS] = None
    dtype: Annotated[str, _DTYPE] = "float32"


@dataclass(frozen=True, kw_only=True)
class SampledForecast(LimitOptions):
    """The options of `brim.forecast("sampled")`."""

    logs: Annotated[Any, Kind("paths", _paths, is_list=True), Argument("Logs of brim run --fraction.", "LOG…")] = ()
    points: Annotated[
        Any,
        Kind("fractions and peaks, such as 1/32=1.2GB", _paths, is_list=True),
        Option("A fraction and its peak, such as 1/32=1.2GB.", "F=SIZE", flags=("--point",)),
    ] = ()
    at: Annotated[Any, Option("Fraction to estimate; 2 is twice the data.", "F")] = 1


FORECASTS: dict[str, type[Options]] = {
    "embed-files": EmbedFilesForecast,
    "map": MapForecast,
    "concat": ConcatForecast,
    "pid": PidForecast,
    "sampled": SampledForecast,
}
