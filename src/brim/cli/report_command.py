"""brim report: the page about a run, from its log."""

from pathlib import Path
from typing import Annotated

import typer

from brim.cli.flags import ShowingFlags
from brim.cli.show import emit, print_lines

HELP = """The page about a run, made from its log.

One HTML file that needs nothing else: memory over time against the limit, what happened when, processes,
forecast against fact, and why it ended. `--report` writes it at the end of a run; this makes it from the log
alone, after a run that was killed too, or while one still runs.

[bold]Examples[/bold]

  brim report run.jsonl
  brim report ~/.local/state/brim/runs/NAME.jsonl night.html
"""


def report(
    log: Annotated[Path, typer.Argument(metavar="LOG.jsonl", help="What brim run --log has written.")],
    showing: ShowingFlags,
    html: Annotated[
        Path | None, typer.Argument(metavar="FILE.html", help="The page. (default: beside the log)")
    ] = None,
) -> None:
    from brim.report.page import write_page

    page = log.with_suffix(".html") if html is None else html
    write_page(log, page)
    if showing.json:
        emit("report", page=str(page), log=str(log))
    else:
        print_lines([("page", str(page))])
