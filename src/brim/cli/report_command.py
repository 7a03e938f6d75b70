"""brim report: the page about a run, from its log."""

from pathlib import Path
from typing import Annotated

import typer

from brim.cli.flags import LiveFlags, ShowingFlags
from brim.cli.show import emit, print_lines
from brim.errors import InputError

HELP = """The page about a run, made from its log.

One HTML file that needs nothing else: memory over time against the limit, what happened when, processes,
forecast against fact, and why it ended. `--report` writes it at the end of a run; this makes it from the log
alone, after a run that was killed too, or while one still runs.

[bold]Examples[/bold]

  brim report run.jsonl
  brim report ~/.local/state/brim/runs/NAME.jsonl night.html
  brim report monday.jsonl tuesday.jsonl           (side by side)
  brim report run.jsonl --follow                   (live, of a run that goes on elsewhere)
"""


def report(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG.jsonl… [FILE.html]", help="What brim run --log has written; several: side by side."
        ),
    ],
    showing: ShowingFlags,
    live: LiveFlags,
    follow: Annotated[
        bool, typer.Option("--follow", help="Show it live, while it is written elsewhere; until Ctrl-C or its end.")
    ] = False,
) -> None:
    from brim.report.page import write_page, write_side_by_side

    pages = [path for path in logs[1:] if path.suffix in (".html", ".htm")]
    logs = [path for path in logs if path not in pages]
    if not logs or len(pages) > 1:
        raise InputError("Name one log or more, and at most one page.", hint="brim report run.jsonl night.html")
    if follow or live.port is not None:
        _follow(logs, pages, live)
        return
    page = pages[0] if pages else logs[0].with_suffix(".html")
    if len(logs) == 1:
        write_page(logs[0], page)
    else:
        page = pages[0] if pages else logs[0].with_name("side-by-side.html")
        write_side_by_side(logs, page)
    if showing.json:
        emit("report", page=str(page), log=str(logs[0]), logs=[str(log) for log in logs])
    else:
        print_lines([("page", str(page))])


def _follow(logs: list[Path], pages: list[Path], live: LiveFlags) -> None:
    import webbrowser

    from brim.cli.watch_flags import tell
    from brim.report.live_server import new_key, open_port
    from brim.report.log_series import read_run

    if len(logs) > 1 or pages:
        raise InputError("--follow shows one log, live, and writes no page.")
    read_run(logs[0])  # what is no log is said here, and not on the page
    key = new_key()
    server = open_port(logs[0], key, live.port or 0)
    address = f"http://127.0.0.1:{server.server_address[1]}/#key={key}"
    tell(f"brim: live page {address}")
    if live.open_page:
        webbrowser.open(address)
    try:
        server.follow(lambda: False)
    except KeyboardInterrupt:
        pass  # the way to end it
