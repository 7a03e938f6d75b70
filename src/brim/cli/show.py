"""What every verb prints alike: results, errors, and the progress that fits where it is shown."""

import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from brim.buckets.bucket_address import is_bucket_address
from brim.errors import BrimError, InputError
from brim.progress import Silent, told_if_slow
from brim.sizes import format_size
from brim.wording import escape_controls


class Printed(io.FileIO):
    """Where print goes. If that fails (`| head`, a full disk), the work goes on and the rest goes nowhere.

    `failure` is what was lost of what somebody wanted to keep, not of what they stopped to read.
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

    What rich draws (bars, help) is made of such characters, and goes to `rich_proxied_file`, which is where rich looks.
    """

    def __init__(self, buffer: Any, encoding: str, errors: str, *, line_buffering: bool) -> None:
        super().__init__(buffer, encoding, errors, line_buffering=line_buffering)
        self.rich_proxied_file = io.TextIOWrapper(buffer, encoding, errors, line_buffering=line_buffering)

    def write(self, text: str) -> int:
        super().write(escape_controls(text))
        return len(text)


def emit(event: str, **facts: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps({"event": event, **facts}, default=str), flush=True)


def fail(error: BrimError, as_json: bool) -> int:
    """Print an error and return its exit code."""
    if as_json:
        known = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        emit("error", **{**error.facts, **known, "exit_code": error.exit_code})
    else:
        print(f"brim: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"      {error.hint}", file=sys.stderr)
    return error.exit_code


def say_nothing() -> None:
    """From now on only errors are shown: `--quiet`."""
    sys.stdout = Escaped(open(os.devnull, "wb"), "utf-8", "replace", line_buffering=False)  # noqa: SIM115


def progress_for(as_json: bool, quiet: bool) -> Any:
    from brim.report.bars import Bar, JsonLines, PlainLines

    if as_json:
        return JsonLines()
    if quiet:
        return Silent()
    return Bar() if sys.stderr.isatty() else PlainLines()


def followed(
    showing: Any,
    watching: Any,
    live: Any,
    *,
    limit: Any = None,
    report: str | None = None,
    takes: Mapping[str, int] | None = None,
    stop_file: Path | None = None,
) -> AbstractContextManager[Any]:
    """The progress of a verb's work: shown where it fits, on a live page and in a report if those are asked for.

    Without a `limit` it is what brim takes for itself. `stop_file` is what ends the work, if a file does.
    """
    from brim.memory.limit import effective_limit
    from brim.redact import redact_command
    from brim.report.recording import recorded

    shown = progress_for(showing.json, watching.quiet)
    if limit is None:
        limit = effective_limit()
        if limit.warning:  # a job says it itself
            shown.note(limit.warning)
    return recorded(
        shown,
        None if report is None else page_path(report),
        redact_command(["brim", *sys.argv[1:]]),
        limit,
        takes,
        live_port=live.port,
        open_page=live.open_page,
        stop_file=stop_file,
    )


def waiting_for(source: str) -> AbstractContextManager[None]:
    """Reading a source; of a bucket that takes long to tell what it holds, or does not answer, it is said."""
    if not is_bucket_address(source):
        return nullcontext()
    return told_if_slow(lambda text: print(f"brim: {text}", file=sys.stderr, flush=True), f"still waiting for {source}")


def print_lines(lines: list[tuple[str, str]], width: int = 0) -> None:
    """Labels in a column of their own; in a terminal, long texts are wrapped beside them."""
    width = max([width, *(len(label) for label, _ in lines)])
    for label, text in lines:
        print(wrapped(f"{label:>{width}}  {text}", width + 2))


def memory_held(progress: Any, limit_bytes: int, seen_bytes: int = 0) -> list[tuple[str, str]]:
    """What a job held at most, here and on the nodes of a cluster; nothing if nobody looked."""
    here, limit = getattr(progress, "peak_bytes", 0), format_size(limit_bytes)
    if node := getattr(progress, "node_peak_bytes", 0):
        told = f"{format_size(here)} at most here, {format_size(node)} on the fullest node; limit {limit} on each"
        return [("memory", told)]
    peak = max(here, seen_bytes)
    return [("memory", f"{format_size(peak)} at most, of {limit}")] if peak else []


def wrapped(line: str, indent: int) -> str:
    """A line as it is, or broken at blanks to fit the terminal."""
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
    """The path from the root, so that it stays the same for a process that works elsewhere."""
    try:
        return Path(path).absolute()
    except FileNotFoundError as error:
        raise (folder_gone() or error) from error


def folder_gone() -> InputError | None:
    """What to say where the folder that this process works in was removed, and with it all that relative paths mean."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return InputError("The working folder does not exist any more.", hint="cd into one that does.")
    return None


def page_path(report: str) -> Path:
    """Where a report goes; one that cannot be written there is refused before the work, not after it."""
    from brim.report.page import check_page  # most runs have none

    page = absolute(report)
    check_page(page)
    return page


_READERS = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}  # by which `datasets` reaches a bucket


def loading(dest: str, config: str, splits: Iterable[str], endpoint: str | None = None) -> str:
    """How it is loaded, as a line that runs where the environment names keys and store as it does for brim."""
    if is_bucket_address(dest):
        scheme = dest.partition("://")[0]
        files = {split: f"{dest.rstrip('/')}/data/{split}-*.parquet" for split in sorted(set(splits))}
        # adlfs takes another endpoint from a connection string alone, which the environment has.
        told = endpoint and scheme in ("s3", "gs")
        more = f", storage_options={{'endpoint_url': {endpoint!r}}}" if told else ""
        needs = (
            f"  # pip install {_READERS[scheme]}" if scheme in _READERS else ""
        )  # the Hub's own buckets need nothing
        return f"datasets.load_dataset('parquet', data_files={files!r}{more}){needs}"
    path, _, revision = dest.removeprefix("hf://datasets/").partition("@")
    if not dest.startswith("hf://"):
        return f"datasets.load_dataset({dest!r})"
    words = [repr(path.rstrip("/")), *([] if config == "default" else [repr(config)])]
    return f"datasets.load_dataset({', '.join([*words, *([f'revision={revision!r}'] if revision else [])])})"
