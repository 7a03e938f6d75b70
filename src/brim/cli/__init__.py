"""The command line: one module per command, which parses, calls the library and prints the result."""

from __future__ import annotations

import gc
import io
import os
import sys
from typing import NoReturn, TextIO

from brim.block_pandas import do_without_pandas
from brim.cli.commands import help_page, version_line
from brim.cli.print_output import Escaped, Printed, fail, missing_working_folder
from brim.errors import BrimError, DestinationUnavailableError, StoppedError
from brim.state.atomic_files import reason
from brim.state.stop import handle_all_signals
from brim.wording import speak_of_flags


def _expand_help(arguments: list[str]) -> list[str]:
    """Turn `help COMMAND` into `COMMAND --help`."""
    if arguments[:1] != ["help"]:
        return arguments
    name = [argument for argument in arguments[1:] if not argument.startswith("-") and argument != "help"]
    return [*name, "--help"]


def _print_static_page(arguments: list[str]) -> bool:
    """Print the list of commands or the version, which need no parser. False if something else is asked for."""
    if not arguments or arguments[0] in ("--help", "-h", "--help-all"):
        print(help_page())
    elif arguments[0] in ("--version", "-V"):
        print(version_line())
    else:
        return False
    return True


# New objects before the garbage collector runs. Imports create 70,000 objects, and with the default threshold of 700
# the collector would run about a hundred times during them.
_OBJECTS = 100_000
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


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at `--` into those of brim and those of the command that `brim run` starts."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end:]


def _share_heap(arguments: list[str]) -> None:
    """Limit the number of malloc heaps if an argument is a remote address.

    Remote data is transferred by threads of libraries. By default each thread gets a separate heap and cannot reuse
    the memory that other threads have freed. The limit must be set before the first of these threads starts.
    """
    if any("://" in argument for argument in arguments):
        from brim.memory.release import keep_heap_small

        keep_heap_small(large_bytes=None)


_ON_ARRAYS = {"build", "check", "embed", "map", "plan", "select", "tokenize", "unpack", "verify"}


def _load_early(arguments: list[str]) -> None:
    """Import numpy before the parser runs, for the commands that need it anyway.

    Imported from inside the parser, numpy would be so many calls deep that Python's stack chunk may be full at that
    depth: each further call would then allocate a chunk and free it again (2,000 times, 30 ms).
    """
    if _ON_ARRAYS.intersection(arguments[:1]) and not {"--help", "-h"}.intersection(arguments):
        import numpy  # noqa: F401


def _print_traceback(error: Exception) -> None:
    """Print the traceback with all causes, without secrets: a server's response may contain a token."""
    import traceback

    from brim.redact import hide_values, redact

    text = "".join(traceback.format_exception(error))
    print(redact(hide_values(text, os.environ)), end="", file=sys.stderr)


def main() -> None:
    """Run the `brim` command."""
    gc.set_threshold(_OBJECTS)
    speak_of_flags()
    handle_all_signals()
    _replace_streams()
    do_without_pandas()
    arguments, command = _split(sys.argv[1:])
    debug = "--debug" in arguments
    arguments = _expand_help([argument for argument in arguments if argument != "--debug"])
    as_json = "--json" in arguments
    try:
        if "_BRIM_COMPLETE" in os.environ:
            from brim.cli.parser import complete

            complete()
            _end(0)
        if _print_static_page(arguments + command):
            _end(0)
        if arguments[:1] in (["--show-completion"], ["--install-completion"]):
            from brim.cli.parser import print_completion

            print_completion(install=arguments[0] == "--install-completion")
            _end(0)
        _share_heap(arguments)
        _load_early(arguments)
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
