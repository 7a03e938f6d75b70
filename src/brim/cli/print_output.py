"""Print results, errors and progress: the output functions that all commands share."""

import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from brim.errors import BrimError, InputError
from brim.memory.limit import effective_limit
from brim.monitor.report.progress_renderers import JsonLines, PlainLines, TerminalBar
from brim.monitor.report.recording import recorded
from brim.progress import Progress, notify_if_slow
from brim.redact import redact_command
from brim.sizes import format_size
from brim.storage.location import is_object_address
from brim.wording import escape_controls


class Printed(io.FileIO):
    """An output stream that discards its output after a failed write (`| head`, a full disk): the job continues.

    `failure` is the error of the write. It stays None for a closed pipe: there the reader chose to stop reading.
    """

    failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.failure = error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


class Escaped(io.TextIOWrapper):
    """Text for a terminal, with control characters escaped.

    The progress bars of rich consist of control characters. rich writes to `rich_proxied_file`, where they stay.
    """

    def __init__(self, buffer: Any, encoding: str, errors: str, *, line_buffering: bool) -> None:
        super().__init__(buffer, encoding, errors, line_buffering=line_buffering)
        self.rich_proxied_file = io.TextIOWrapper(buffer, encoding, errors, line_buffering=line_buffering)

    def write(self, text: str) -> int:
        super().write(escape_controls(text))
        return len(text)


def emit(event: str, **facts: Any) -> None:
    """Print a JSON object on one line of stdout."""
    print(json.dumps({"event": event, **facts}, default=str), flush=True)


def fail(error: BrimError, as_json: bool) -> int:
    """Print an error and return its exit code."""
    if as_json:
        standard = {"error": error.json_name, "message": error.message, "hint": error.hint}
        emit("error", **{**error.facts, **standard, "exit_code": error.exit_code})
    else:
        print(f"brim: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"      {error.hint}", file=sys.stderr)
    return error.exit_code


def silence_stdout() -> None:
    """Discard all further output on stdout, for `--quiet`. Errors go to stderr."""
    sys.stdout = Escaped(open(os.devnull, "wb"), "utf-8", "replace", line_buffering=False)  # noqa: SIM115


def progress_for(as_json: bool, quiet: bool) -> Any:
    if as_json:
        return Progress(JsonLines())
    if quiet:
        return Progress()
    return Progress(TerminalBar() if sys.stderr.isatty() else PlainLines())


def show_progress(
    options: Any,
    *,
    limit: Any = None,
    report: str | os.PathLike[str] | None = None,
    takes: Mapping[str, int] | None = None,
    stop_file: Path | None = None,
) -> AbstractContextManager[Any]:
    """Return a context that shows the progress of a job in the terminal, on a live page and in a report.

    Args:
        options: The options of the command, with `json`, `quiet`, `port` and `open_page`.
        limit: The memory limit; by default the effective limit of this process.
        report: The HTML page to write at the end.
        takes: Predicted bytes by purpose, for the report.
        stop_file: The file whose creation stops the job.
    """
    shown = progress_for(options.json, options.quiet)
    if limit is None:
        limit = effective_limit()
        if limit.warning:  # a job with its own limit prints its warning
            shown.note(limit.warning)
    return recorded(
        shown,
        None if report is None else page_path(report),
        redact_command(["brim", *sys.argv[1:]]),
        limit,
        takes,
        live_port=options.port,
        open_page=options.open_page,
        stop_file=stop_file,
    )


def waiting_for(source: str) -> AbstractContextManager[None]:
    """Return a context in which a source is read. It prints a message if a bucket takes long to answer."""
    if not is_object_address(source):
        return nullcontext()
    return notify_if_slow(
        lambda text: print(f"brim: {text}", file=sys.stderr, flush=True), f"still waiting for {source}"
    )


def print_lines(lines: list[tuple[str, str]], width: int = 0) -> None:
    """Print labels and texts in two columns; in a terminal, long texts are wrapped in the second one."""
    width = max([width, *(len(label) for label, _ in lines)])
    for label, text in lines:
        print(wrapped(f"{label:>{width}}  {text}", width + 2))


def print_result(event: str, result: Any, as_json: bool, lines: list[tuple[str, str]] | None = None) -> None:
    """Print a result as JSON, or as its summary or the `lines` in place of it."""
    if as_json:
        emit(event, **result.as_dict())
    else:
        print_lines(result.summary() if lines is None else lines)


def print_stderr(text: str) -> None:
    """Print a line to stderr, where stdout belongs to another command."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        pass  # stderr is closed, and the exit code must still be right


def print_stderr_lines(lines: list[tuple[str, str]]) -> None:
    """Print labels and texts to stderr."""
    width = max((len(label) for label, _ in lines), default=0)
    for label, text in lines:
        print_stderr(f"{label:>{width}}  {text}")


def memory_held(progress: Any, limit_bytes: int, seen_bytes: int = 0) -> list[tuple[str, str]]:
    """Return a text about the peak memory of a job, here and on cluster nodes; [] if it was not measured."""
    local, limit = getattr(progress, "peak_bytes", 0), format_size(limit_bytes)
    if node := getattr(progress, "node_peak_bytes", 0):
        text = f"{format_size(local)} locally, {format_size(node)} on the fullest node (limit {limit} on each)"
        return [("peak memory", text)]
    peak = max(local, seen_bytes)
    return [("peak memory", f"{format_size(peak)} (limit {limit})")] if peak else []


def wrapped(line: str, indent: int) -> str:
    """Return a line wrapped at spaces to fit the terminal; unchanged if stdout is not a terminal."""
    if not sys.stdout.isatty():
        return line
    columns = max(shutil.get_terminal_size().columns, indent + 20)
    return textwrap.fill(
        line,
        columns,
        subsequent_indent=" " * indent,
        drop_whitespace=True,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def absolute(path: str) -> Path:
    """Return the absolute path, which is also valid for a process with another working folder."""
    try:
        return Path(path).absolute()
    except FileNotFoundError as error:
        raise (missing_working_folder() or error) from error


def missing_working_folder() -> InputError | None:
    """Return an error if the working folder was removed, so that relative paths cannot be resolved; else None."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return InputError("The working folder does not exist any more.", hint="cd into one that does.")
    return None


def page_path(report: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a report; raise before the job starts if it cannot be written."""
    from brim.monitor.report.page import check_page  # imported late: most runs write no report

    page = absolute(os.fspath(report))
    check_page(page)
    return page
