"""The command line: one file a verb. It parses, calls the library and prints; it decides nothing."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NoReturn, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from brim.cli.completion import complete_words
from brim.cli.flags import flat, help_text
from brim.cli.show import Escaped, Printed, fail
from brim.errors import BrimError, SinkFailed, Stopped
from brim.no_pandas import do_without_pandas
from brim.state.durable import reason
from brim.state.stop import hear_all_signals
from brim.wording import speak_of_flags

HELP = """Datasets bigger than memory, built under a memory limit that you set.

brim packages files into shards without holding them: a shard is a recipe of what lies where. So a 300 GB
dataset takes as much memory as a small one, a killed run continues where it was, and what was written is
proved. `brim help VERB` has examples, `brim doctor` says what is here and what is missing.
"""

# In the order of the help. Each is a module of its name, which is imported when it is wanted.
_VERBS = (
    "plan", "check", "info", "build", "select", "verify", "unpack", "map", "tokenize", "embed", "clean", "recipes",
    "run", "watch", "why", "forecast", "lab", "report", "doctor",
)  # fmt: skip


def _without_bool(parameters: list[Any]) -> list[Any]:
    """A flag takes no value, and its help does not name the type of one."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_bool(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_bool(super().get_params(ctx))


def _app(verbs: Iterable[str], markup: Literal["rich"] | None = "rich") -> typer.Typer:
    made = typer.Typer(
        name="brim",
        no_args_is_help=True,
        add_completion=True,
        cls=_Group,
        pretty_exceptions_enable=False,
        rich_markup_mode=markup,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback(help=help_text(HELP))(_brim)
    for verb in verbs:
        module = importlib.import_module(f"brim.cli.{verb}_command")
        if hasattr(module, "app"):
            made.add_typer(module.app, name=verb, help=help_text(module.HELP), cls=_Group)
            for command in module.app.registered_commands:
                command.cls = _Command
            continue
        settings = {"allow_interspersed_args": False} if verb == "run" else None
        made.command(verb, help=help_text(module.HELP), context_settings=settings, cls=_Command)(
            flat(getattr(module, verb))
        )
    made.command("help", help="Show how a verb is used: `brim help build` is `brim build --help`.", cls=_Command)(_help)
    return made


def _help(
    verb: Annotated[
        str | None,
        typer.Argument(metavar="VERB", help="Without one: all verbs.", autocompletion=complete_words(_VERBS)),
    ] = None,
) -> None:
    """Only for the list of verbs and for completion: `main` turns `help VERB` into `VERB --help`."""


def _as_asked(arguments: list[str]) -> list[str]:
    """`help VERB` as the flag that it stands for, in all its spellings."""
    if arguments[:1] != ["help"] or {"-h", "--help"} & set(arguments):
        return arguments
    return [*arguments[1:], "--help"]


def _app_for(arguments: list[str]) -> typer.Typer:
    """Only the verb that is called: the others would be imported for nothing. Without one, all, as plain text."""
    if "_BRIM_COMPLETE" in os.environ:  # the words of the line are in the environment, as the shell has them
        typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
        arguments = typed.split()[1:]
        return _app([verb for verb in arguments[:1] if verb in _VERBS] or _VERBS)
    verb = next((argument for argument in arguments if not argument.startswith("-")), None)
    if verb in _VERBS:
        return _app([verb])
    return _app(_VERBS, "rich" if verb is not None else None)


def __getattr__(name: str) -> typer.Typer:
    """`app`, with all verbs."""
    if name != "app":
        raise AttributeError(name)
    return _app(_VERBS)


def _version(show: bool) -> None:
    if show:
        from brim import __version__

        print(f"brim {__version__}")
        raise typer.Exit


def _brim(
    version: bool = typer.Option(False, "--version", "-V", help="Show the version.", callback=_version, is_eager=True),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks (anywhere on the line)."),
) -> None:
    pass


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
    sys.exit(code)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What is brim's, and what behind `--` belongs to the command that `brim run` runs."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end:]


def main() -> None:
    """The `brim` command."""
    speak_of_flags()
    hear_all_signals()
    _settle_streams()
    do_without_pandas()
    arguments, command = _split(sys.argv[1:])
    debug = "--debug" in arguments
    arguments = _as_asked([argument for argument in arguments if argument != "--debug"])
    as_json = "--json" in arguments
    try:
        code = _app_for(arguments)(arguments + command, standalone_mode=False)
        if code == _INTERRUPTED:
            raise KeyboardInterrupt
        _end(code if isinstance(code, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        _end(fail(Stopped("Stopped by Ctrl-C.", hint="Run it again."), as_json))
    except Exception as error:  # the last place: nobody should see a traceback unasked
        if hasattr(error, "show"):  # a usage error: the parser knows how to show it
            error.show()
            _end(2)
        if debug:
            raise
        if not isinstance(error, BrimError):
            error = BrimError(
                f"brim ran into a bug: {type(error).__name__}: {error}.",
                hint="Nothing finished was lost. Run again with --debug and report what it prints.",
            )
        _end(fail(error, as_json))
