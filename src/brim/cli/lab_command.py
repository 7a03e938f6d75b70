"""brim lab: measure the memory of common patterns, compared with brim; one subcommand per experiment."""

import functools
import inspect
from dataclasses import fields
from typing import Annotated, Literal

from brim.cli.command import Command
from brim.cli.print_output import emit, page_path, wrapped
from brim.lab.experiments import RUNS
from brim.lab.measure import scratch
from brim.lab.steps import ExperimentStep, heading, row
from brim.monitor.report.page import write_page
from brim.monitor.report.recording import log_next_to
from brim.options.declare import Option, Path, Size
from brim.options.groups import JsonOptions
from brim.records import dataclass
from brim.sizes import parse_size

EXAMPLES = """
brim lab leak
brim lab embed-list --rows 100000
brim lab map --mode shard --interrupt-after 3
"""


_DETAILS = """
Each experiment runs in separate processes, is measured from outside, and takes some seconds and less than 1 GB.
Prints the memory at each step, a chart, and the result with the installed versions in two sentences.
"""
_SIZES = ("size", "file_size", "text_size")


@dataclass(frozen=True, kw_only=True)
class ExperimentOptions(JsonOptions):
    """The options that all experiments share."""

    keep: Annotated[Path | None, Option("Write the data to this folder and keep it.", "DIR", default="removed")] = None
    report: Annotated[Path | None, Option("Write an HTML page about the experiment.", "FILE.html")] = None


@dataclass(frozen=True, kw_only=True)
class LeakExperimentCommand(ExperimentOptions):
    """A growing list, and a memory-mapped file that looks like a leak.

    Examples:
        brim lab leak --size 500MB
    """

    size: Annotated[Size, Option("Size of the list and of the file.")] = "200MB"
    pieces: Annotated[int, Option("Number of steps.", minimum=1)] = 4


@dataclass(frozen=True, kw_only=True)
class EmbedListExperimentCommand(ExperimentOptions):
    """Vectors collected in a list, compared with written in batches.

    Examples:
        brim lab embed-list --rows 100000 --dims 768
    """

    rows: Annotated[int, Option("Number of vectors.", minimum=1)] = 40_000
    dims: Annotated[int, Option("Length of a vector.", minimum=1)] = 1024
    batch_size: Annotated[int, Option("Vectors per batch.", minimum=1)] = 500


@dataclass(frozen=True, kw_only=True)
class PushExperimentCommand(ExperimentOptions):
    """Files embedded into a table and then written, compared with brim.

    Examples:
        brim lab push --files 40 --file-size 10MB
    """

    files: Annotated[int, Option("Number of files.", minimum=1)] = 24
    file_size: Annotated[Size, Option("Size of a file.")] = "5MB"


@dataclass(frozen=True, kw_only=True)
class MapExperimentCommand(ExperimentOptions):
    """datasets.map over large texts, interrupted and run again.

    Examples:
        brim lab map --mode shard --num-files 8 --interrupt-after 3
        brim lab map --mode basic --num-proc 2
    """

    mode: Annotated[Literal["basic", "shard"], Option("All files in one call, or one call per file.")] = "shard"
    num_files: Annotated[int, Option("Number of text files.", minimum=1)] = 6
    rows: Annotated[int, Option("Texts per file.", minimum=1)] = 100
    text_size: Annotated[Size, Option("Size of a text.")] = "200KB"
    batch_size: Annotated[int, Option("Rows per batch, as in `datasets`.", minimum=1)] = 25
    writer_batch_size: Annotated[int, Option("Rows per write, as in `datasets`.", minimum=1)] = 25
    num_proc: Annotated[int, Option("Number of processes, as in `datasets`.", minimum=1)] = 1
    interrupt_after: Annotated[
        int, Option("Kill the first run after this many shards; 0 lets it finish.", "K", minimum=0)
    ] = 2


_SHARED = {each.name for each in fields(ExperimentOptions)}


def _run(name: str, options: ExperimentOptions) -> None:
    parts: list[str] = []

    def watch(part: str, step: ExperimentStep) -> None:
        if options.json:
            emit("step", part=part, **step.facts())
            return
        if part not in parts:
            parts.append(part)
            print(heading(part), flush=True)
        print(row(step), flush=True)

    experiment = RUNS[name]
    # The numbers of the command, in the order in which the experiment declares them.
    own = [each.name for each in fields(options) if each.name not in _SHARED]
    values = [parse_size(getattr(options, each)) if each in _SIZES else getattr(options, each) for each in own]
    numbers = dict(zip(list(inspect.signature(experiment).parameters)[2:], values, strict=True))
    page = None if options.report is None else page_path(options.report)
    log = None if page is None else log_next_to(page)
    with scratch(options.keep) as folder:
        result = experiment(folder, watch, **numbers)
    if page is not None and log is not None:
        result.write_log(log)
        write_page(log, page)
    if options.json:
        emit("lab", **result.facts())
    else:
        for paragraph in result.text().splitlines():
            print(wrapped(paragraph, 0))


SUBCOMMANDS = {
    name: Command(options, functools.partial(_run, name), shared_details=_DETAILS)
    for name, options in (
        ("leak", LeakExperimentCommand),
        ("embed-list", EmbedListExperimentCommand),
        ("push", PushExperimentCommand),
        ("map", MapExperimentCommand),
    )
}
