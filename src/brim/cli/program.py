"""Run a command: prepare the process, parse and run, print errors, exit."""

from __future__ import annotations

import gc
import io
import os
import sys
import traceback
from typing import NoReturn, TextIO

from brim.block_pandas import do_without_pandas
from brim.cli.commands import static_page
from brim.cli.print_output import Escaped, Printed, fail, missing_working_folder
from brim.errors import BrimError, DestinationUnavailableError, StoppedError
from brim.memory.release import keep_heap_small
from brim.redact import hide_values, redact
from brim.state.atomic_files import reason
from brim.state.stop import handle_all_signals
from brim.wording import use_terminal_names

_ORIGINAL_STREAMS: list[TextIO] = []  # kept open: closing them would close the file descriptors


def _replace_streams() -> None:
    """Replace stdout and stderr by streams that do not raise and that escape control characters.

    A closed or failing stream discards its output. A character that the terminal cannot show becomes "?". Control
    characters are escaped because names come from files, tables and servers, and a terminal would execute them.
    """
    for name in ("stdout", "stderr"):
        before = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        before.flush()
        raw = Printed(before.fileno(), "w", closefd=False)
        lines = name == "stderr" or raw.isatty()
        after = Escaped(io.BufferedWriter(raw), before.encoding, "replace", line_buffering=lines)
        setattr(sys, name, after)
        _ORIGINAL_STREAMS.append(before)


def _end(code: int) -> NoReturn:
    """Exit with a code; fail if the result could not be printed."""
    sys.stdout.flush()
    failure = getattr(getattr(sys.stdout.buffer, "raw", None), "failure", None)  # Printed has one
    if code == 0 and failure is not None:
        lost = DestinationUnavailableError(
            f"The output of brim cannot be written to stdout: {reason(failure)}.",
            hint="The job itself is done. Free disk space or redirect the output, then run the same command again.",
        )
        code = fail(lost, as_json=False)
    gc.freeze()  # skip the last garbage collection: the process exits anyway
    sys.exit(code)


_ON_ARRAYS = {"build", "check", "embed", "map", "plan", "select", "tokenize", "unpack", "verify"}


def _print_traceback(error: Exception) -> None:
    """Print the traceback with all causes, without secrets: a server's response may contain a token."""
    text = "".join(traceback.format_exception(error))
    print(redact(hide_values(text, os.environ)), end="", file=sys.stderr)


def run(arguments: list[str]) -> None:
    """Run the command that the arguments name, and exit."""
    use_terminal_names()
    handle_all_signals()
    _replace_streams()
    do_without_pandas()
    end = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, command = arguments[:end], arguments[end:]  # `brim run` starts what follows --
    debug, as_json = "--debug" in arguments, "--json" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if arguments[:1] == ["help"]:  # `brim help COMMAND` is `brim COMMAND --help`
        names = [argument for argument in arguments[1:] if not argument.startswith("-") and argument != "help"]
        arguments = [*names, "--help"]
    try:
        if any("://" in argument for argument in arguments):
            # Remote data is transferred by threads of libraries. By default each thread has a separate heap and cannot
            # reuse the memory that others have freed. The limit must be set before the first of these threads starts.
            keep_heap_small(large_bytes=None)
        if _ON_ARRAYS.intersection(arguments[:1]) and not {"--help", "-h", "--help-all"}.intersection(arguments):
            # Imported from inside the parser, numpy would be so many calls deep that Python's stack chunk may be full
            # at that depth: each further call would then allocate a chunk and free it again (2,000 times, 30 ms).
            import numpy  # noqa: F401
        page = None if "_BRIM_COMPLETE" in os.environ else static_page(arguments + command)
        if page is not None:
            print(page)
            _end(0)
        from brim.cli.parser import run_command

        code = run_command(arguments + command)
        _end(code if isinstance(code, int) else 0)
    except KeyboardInterrupt:
        _end(fail(StoppedError("Stopped by Ctrl-C.", hint="Run it again."), as_json))
    except Exception as error:  # noqa: BLE001  # tracebacks are shown only with --debug
        if debug:
            _print_traceback(error)
            _end(error.exit_code if isinstance(error, BrimError) else 1)
        if not isinstance(error, BrimError):
            error = missing_working_folder() or BrimError(
                f"brim ran into a bug: {type(error).__name__}: {error}.",
                hint="Finished work is kept. Run the command again with --debug and report the output.",
            )
        _end(fail(error, as_json))
