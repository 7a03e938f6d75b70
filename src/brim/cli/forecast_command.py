"""brim forecast: estimate whether a job fits into memory; one subcommand per kind of job."""

import functools
from typing import Any

from brim.cli.command import Command
from brim.cli.print_output import emit, print_lines, waiting_for
from brim.options.groups import JsonOptions
from brim.options.monitor_options import ConcatForecast, EmbedFilesForecast, MapForecast, PidForecast, SampledForecast
from brim.records import dataclass

EXAMPLES = """
brim forecast concat --rows 3M --dims 768,1024 --memory 64GB
brim forecast embed-files scans/
brim forecast pid 4242 --adds 19GB
"""
_DETAILS = """
Adds up the peak memory, as a range where a value is uncertain, and compares it with the limit: LOW below 70 %,
MODERATE up to 90 %, HIGH above. Nothing is run. Exits with 0 whatever the verdict; with 2 if the estimate cannot be
made.
"""


@dataclass(frozen=True, kw_only=True)
class EmbedFilesForecastCommand(JsonOptions, EmbedFilesForecast):
    """Files read into a table and written as Parquet, by shards.

    Examples:
        brim forecast embed-files scans/ --memory 32GB
        brim forecast embed-files --shard-bytes 3.6GB --largest-file 300MB --workers 4
    """


@dataclass(frozen=True, kw_only=True)
class MapForecastCommand(JsonOptions, MapForecast):
    """datasets.map, or tokenizing: batches in, batches out.

    Examples:
        brim forecast map --row-bytes 200KB --batch-size 1000 --workers 8
        brim forecast map --row-bytes 5KB --output-bytes 40KB --per-worker 500MB
    """


@dataclass(frozen=True, kw_only=True)
class ConcatForecastCommand(JsonOptions, ConcatForecast):
    """Batches of vectors appended to lists and concatenated at the end.

    Examples:
        brim forecast concat --rows 2,857,545 --dims 768,1024 --dtype float32
    """


@dataclass(frozen=True, kw_only=True)
class PidForecastCommand(JsonOptions, PidForecast):
    """A running process: its memory now, and after its next step.

    Examples:
        brim forecast pid 4242 --adds 19GB
        brim forecast pid 4242 --rows 3M --dims 768,1024
    """


@dataclass(frozen=True, kw_only=True)
class SampledForecastCommand(JsonOptions, SampledForecast):
    """A command that was run on parts of its data, extrapolated.

    Examples:
        brim run --fraction 1/32 --log a.jsonl -- python job.py
        brim run --fraction 1/8 --log b.jsonl -- python job.py
        brim forecast sampled a.jsonl b.jsonl --memory 64GB
    """


def run(shape: str, options: Any) -> None:
    from brim.api.forecast_api import make_forecast

    with waiting_for(str(getattr(options, "source", ""))):
        forecast = make_forecast(shape, options)
    if options.json:
        emit("forecast", **forecast.facts)
    else:
        print_lines(forecast.lines)


SUBCOMMANDS = {
    name: Command(options, functools.partial(run, name), shared_details=_DETAILS)
    for name, options in {
        "embed-files": EmbedFilesForecastCommand,
        "map": MapForecastCommand,
        "concat": ConcatForecastCommand,
        "pid": PidForecastCommand,
        "sampled": SampledForecastCommand,
    }.items()
}
