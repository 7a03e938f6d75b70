"""The command line: one file a verb. It parses, calls the library and prints; it decides nothing."""

from __future__ import annotations

import gc
import io
import os
import shutil
import sys
from typing import TYPE_CHECKING, NoReturn, TextIO

from brim.cli.show import Escaped, Printed, fail, folder_gone
from brim.cli.verbs import VERBS, help_lines, version_line
from brim.errors import BrimError, SinkFailed, Stopped
from brim.no_pandas import do_without_pandas
from brim.state.durable import reason
from brim.state.stop import hear_all_signals
from brim.wording import speak_of_flags

if TYPE_CHECKING:
    import typer


def _as_asked(arguments: list[str]) -> list[str]:
    """`help VERB` as the flag that it stands for, in all its spellings."""
    if arguments[:1] != ["help"] or {"-h", "--help"} & set(arguments):
        return arguments
    return [*arguments[1:], "--help"]


def _app_for(arguments: list[str]) -> typer.Typer:
    """Only the verb that is called: the others would be imported for nothing. Without one, all, as plain text."""
    from brim.cli.parser import make_app

    if "_BRIM_COMPLETE" in os.environ:  # the words of the line are in the environment, as the shell has them
        typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
        arguments = typed.split()[1:]
        return make_app([verb for verb in arguments[:1] if verb in VERBS] or VERBS)
    verb = next((argument for argument in arguments if not argument.startswith("-")), None)
    if verb in VERBS:
        return make_app([verb])
    return make_app(VERBS, "rich" if verb is not None else None)


def __getattr__(name: str) -> typer.Typer:
    """`app`, with all verbs."""
    if name != "app":
        raise AttributeError(name)
    from brim.cli.parser import make_app

    return make_app()


def _answered(arguments: list[str]) -> bool:
    """Whether all that was asked for is the help or the version, which need no parser."""
    if arguments in (["--help"], ["-h"]):
        print("\n".join(help_lines(shutil.get_terminal_size().columns)))
    elif arguments in (["--version"], ["-V"]):
        print(version_line())
    else:
        return False
    return True


_OBJECTS = 100_000  # new ones before garbage is looked for: imports make 70,000, and the usual 700 come by with each
_INTERRUPTED = 130  # what typer makes of Ctrl-C
_KEPT: list[TextIO] = []  # the interpreter's own streams: closing them would close the descriptors


def _settle_streams() -> None:
    """Streams that are closed or fail swallow what is printed; what a terminal cannot show becomes "?".

    Control characters are escaped: names come from files, tables and servers, and a terminal obeys them.
    """
    for name in ("stdout", "stderr"):
        before = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        before.flush()
        raw = Printed(before.fileno(), "w", closefd=False)
        lines = name == "stderr" or raw.isatty()
        after = Escaped(io.BufferedWriter(raw), before.encoding, "replace", line_buffering=lines)
        setattr(sys, name, after)
        _KEPT.append(before)


def _end(code: int) -> NoReturn:
    """Exit; a result that could not be printed is no success."""
    sys.stdout.flush()
    failure = getattr(getattr(sys.stdout.buffer, "raw", None), "failure", None)  # Printed has one
    if code == 0 and failure is not None:
        lost = SinkFailed(
            f"What brim prints cannot be written to stdout: {reason(failure)}.",
            hint="Its work is done. Make room or print elsewhere, and run the same command again to see the result.",
        )
        code = fail(lost, as_json=False)
    gc.freeze()  # the interpreter need not look for what could be freed at its end
    sys.exit(code)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is brim's, and what behind `--` belongs to the command that `brim run` runs."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end:]


def _share_heap(arguments: list[str]) -> None:
    """What is far away is read and sent by threads of libraries. Each would have a heap of its own, which grows by what
    the others have freed: that is settled before the first of them starts."""
    if any("://" in argument for argument in arguments):
        from brim.memory.release import keep_heap_small

        keep_heap_small(large_bytes=None)


_ON_ARRAYS = {"build", "check", "embed", "map", "plan", "select", "tokenize", "unpack", "verify"}


def _load_early(arguments: list[str]) -> None:
    """numpy, where a verb loads it anyway. From inside of the parser and of brim's own imports that is so many calls
    deep that Python's stack may end a block there: then each further call gets one from the system and gives it back
    (2,000 times, 30 ms)."""
    if _ON_ARRAYS.intersection(arguments[:1]) and not {"--help", "-h"}.intersection(arguments):
        import numpy  # noqa: F401


def _print_traceback(error: Exception) -> None:
    """The whole traceback with all its causes, without secrets: what a server answers may echo a token."""
    import traceback

    from brim.redact import hide_values, redact

    text = "".join(traceback.format_exception(error))
    print(redact(hide_values(text, os.environ)), end="", file=sys.stderr)


def main() -> None:
    """The `brim` command."""
    gc.set_threshold(_OBJECTS)
    speak_of_flags()
    hear_all_signals()
    _settle_streams()
    do_without_pandas()
    arguments, command = _split(sys.argv[1:])
    debug = "--debug" in arguments
    arguments = _as_asked([argument for argument in arguments if argument != "--debug"])
    as_json = "--json" in arguments
    try:
        if "_BRIM_COMPLETE" not in os.environ and _answered(arguments + command):
            _end(0)
        _share_heap(arguments)
        _load_early(arguments)
        code = _app_for(arguments)(arguments + command, standalone_mode=False)
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        _end(code if isinstance(code, int) else 0)
    except KeyboardInterrupt:
        _end(fail(Stopped("Stopped by Ctrl-C.", hint="Run it again."), as_json))
    except Exception as error:  # noqa: BLE001  # the last place: nobody should see a traceback unasked
        if type(error).__name__ == "Abort":  # the parser's word for Ctrl-C
            _end(fail(Stopped("Stopped by Ctrl-C.", hint="Run it again."), as_json))
        if hasattr(error, "show"):  # a usage error: the parser knows how to show it
            error.show()
            _end(2)
        if debug:
            _print_traceback(error)
            _end(error.exit_code if isinstance(error, BrimError) else 1)
        if not isinstance(error, BrimError):
            error = folder_gone() or BrimError(
                f"brim ran into a bug: {type(error).__name__}: {error}.",
                hint="Nothing finished was lost. Run again with --debug and report what it prints.",
            )
        _end(fail(error, as_json))
