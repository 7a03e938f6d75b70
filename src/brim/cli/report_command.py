"""brim report: write the HTML page about a run from its log."""

from pathlib import Path
from typing import Annotated

from brim.cli.command import Command
from brim.cli.print_output import emit, print_lines, print_stderr
from brim.errors import InputError
from brim.monitor.report.page import write_page, write_side_by_side
from brim.monitor.run_log import read_run
from brim.options.declare import Argument, Common, Names
from brim.options.groups import JsonOptions, LiveOptions
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class ReportCommand(LiveOptions, JsonOptions):
    """`brim report LOG.jsonl… [FILE.html]`.

    Examples:
        brim report run.jsonl night.html
        brim report monday.jsonl tuesday.jsonl
        brim report run.jsonl --follow

    Writes one self-contained HTML file: memory over time against the limit, events, processes, estimate and
    measurement, and why the run ended. The option --report of other commands writes the same page at the end of a
    run. This command makes it from the log alone, also while the run continues or after it was killed. Several logs
    are shown side by side.
    """

    logs: Annotated[Names, Argument("Logs of brim run, and the page to write.", "LOG.jsonl… [FILE.html]")]
    follow: Annotated[bool, Common("Serve the page while the log grows, until Ctrl-C or the end of the run.")] = False


def run(options: ReportCommand) -> None:
    logs = [Path(name) for name in options.logs]
    pages = [path for path in logs[1:] if path.suffix in (".html", ".htm")]
    logs = [path for path in logs if path not in pages]
    if not logs or len(pages) > 1:
        raise InputError("Name one log or more, and at most one page.", hint="brim report run.jsonl night.html")
    if options.follow or options.port is not None:
        _follow(logs, pages, options)
        return
    page = pages[0] if pages else logs[0].with_suffix(".html")
    if len(logs) == 1:
        write_page(logs[0], page)
    else:
        page = pages[0] if pages else logs[0].with_name("side-by-side.html")
        write_side_by_side(logs, page)
    if options.json:
        emit("report", page=str(page), log=str(logs[0]), logs=[str(log) for log in logs])
    else:
        print_lines([("page", str(page))])


def _follow(logs: list[Path], pages: list[Path], options: ReportCommand) -> None:
    import webbrowser

    from brim.monitor.report.live_server import open_server

    if len(logs) > 1 or pages:
        raise InputError("--follow shows one log and writes no page.", hint="brim report run.jsonl --follow")
    read_run(logs[0])  # raises for a file that is not a log, before the page is served
    server, address = open_server(logs[0], options.port or 0)
    print_stderr(f"brim: live page {address}")
    if options.open_page:
        webbrowser.open(address)
    try:
        server.follow(lambda: False)
    except KeyboardInterrupt:
        pass  # Ctrl-C is how the user stops it


COMMAND = Command(ReportCommand, run)
