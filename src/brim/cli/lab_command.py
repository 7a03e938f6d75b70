"""brim lab: see how common patterns use memory, beside brim's; a command for each experiment."""

from typing import Annotated, Any

import typer

from brim.cli.flags import ShowingFlags, flat, help_text
from brim.cli.show import emit, page_path, wrapped
from brim.records import dataclass

HELP = """See for yourself how common patterns use memory, beside brim's.

Each experiment runs in processes of its own, is measured from outside, and takes some seconds and less than 1 GB.
Prints its memory step by step, a chart, and in two sentences what was seen with the versions that are installed.

[bold]Examples[/bold]

  brim lab leak
  brim lab embed-list --rows 100000
  brim lab push --files 40
  brim lab map --mode shard --interrupt-after 3
"""

LEAK = """A list that grows, and a memory-mapped file that only looks like a leak.

  brim lab leak --size 500MB
"""

EMBED_LIST = """Vectors appended to a list and joined, and the same written batch by batch.

  brim lab embed-list --rows 100000 --dims 768
"""

PUSH = """Files embedded into a table and then written, and the same files spliced by brim.

  brim lab push --files 40 --file-size 10MB
"""

MAP = """`datasets.map` over big texts, interrupted after some shards and run again.

  brim lab map --mode shard --num-files 8 --interrupt-after 3
  brim lab map --mode basic --num-proc 2 --interrupt-after 1
"""


@dataclass(frozen=True)
class ExperimentFlags:
    """What becomes of the data."""

    keep: Annotated[
        str | None, typer.Option("--keep", metavar="DIR", help="Put the data here and keep it. (default: removed)")
    ] = None
    report: Annotated[
        str | None, typer.Option("--report", metavar="FILE.html", help="A page with the whole curve, at the end.")
    ] = None


def _run(experiment: Any, options: Any, keeping: ExperimentFlags, showing: ShowingFlags) -> None:
    from brim.lab.measure import scratch
    from brim.lab.steps import ExperimentStep, heading, row
    from brim.report.recording import log_beside

    shown: list[str] = []

    def watch(part: str, step: ExperimentStep) -> None:
        if showing.json:
            emit("step", part=part, **step.facts())
            return
        if part not in shown:
            shown.append(part)
            print(heading(part), flush=True)
        print(row(step), flush=True)

    page = None if keeping.report is None else page_path(keeping.report)
    log = None if page is None else log_beside(page)
    with scratch(keeping.keep) as folder:
        seen = experiment(folder, options, watch)
    if page is not None and log is not None:
        from brim.lab.steps import write_log
        from brim.report.page import write_page

        write_log(seen, log)
        write_page(log, page)
    if showing.json:
        emit("lab", **seen.facts())
    else:
        for line in seen.text().splitlines():
            print(wrapped(line, 0))


def leak(
    keeping: ExperimentFlags,
    showing: ShowingFlags,
    size: Annotated[str, typer.Option(metavar="SIZE", help="How large the list and the file become.")] = "200MB",
    pieces: Annotated[int, typer.Option(metavar="N", min=1, help="In so many steps.")] = 4,
) -> None:
    from brim.lab.experiments import LeakOptions, run_leak
    from brim.sizes import parse_size

    _run(run_leak, LeakOptions(parse_size(size), pieces), keeping, showing)


def embed_list(
    keeping: ExperimentFlags,
    showing: ShowingFlags,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="How many vectors.")] = 40_000,
    dims: Annotated[int, typer.Option(metavar="N", min=1, help="How long a vector is.")] = 1024,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Vectors at a time.")] = 500,
) -> None:
    from brim.lab.experiments import EmbedListOptions, run_concat

    _run(run_concat, EmbedListOptions(rows, dims, batch_size), keeping, showing)


def push(
    keeping: ExperimentFlags,
    showing: ShowingFlags,
    files: Annotated[int, typer.Option(metavar="N", min=1, help="How many files.")] = 24,
    file_size: Annotated[str, typer.Option(metavar="SIZE", help="How large each is.")] = "5MB",
) -> None:
    from brim.lab.experiments import PushOptions, run_push
    from brim.sizes import parse_size

    _run(run_push, PushOptions(files, parse_size(file_size)), keeping, showing)


def map_texts(
    keeping: ExperimentFlags,
    showing: ShowingFlags,
    mode: Annotated[
        str, typer.Option(metavar="basic|shard", help="All files in one call, or a call for each.")
    ] = "shard",
    num_files: Annotated[int, typer.Option(metavar="N", min=1, help="How many files of texts.")] = 6,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Texts in each file.")] = 100,
    text_size: Annotated[str, typer.Option(metavar="SIZE", help="How long a text is.")] = "200KB",
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="As in `datasets`.")] = 25,
    writer_batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="As in `datasets`.")] = 25,
    num_proc: Annotated[int, typer.Option(metavar="N", min=1, help="As in `datasets`.")] = 1,
    interrupt_after: Annotated[
        int, typer.Option(metavar="K", min=0, help="Kill the first run after so many shards; 0: let it end.")
    ] = 2,
) -> None:
    from brim.lab.map_experiment import MapExperimentOptions, run
    from brim.sizes import parse_size

    options = MapExperimentOptions(
        mode, num_files, rows, parse_size(text_size), batch_size, writer_batch_size, num_proc, interrupt_after
    )
    _run(run, options, keeping, showing)


app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
for _name, _verb, _help in (
    ("leak", leak, LEAK),
    ("embed-list", embed_list, EMBED_LIST),
    ("push", push, PUSH),
    ("map", map_texts, MAP),
):
    app.command(_name, help=help_text(_help))(flat(_verb))
