"""The command line: one file a verb. It parses, calls the library and prints; it decides nothing."""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn, TextIO

import typer

from brim.cli import (
    build_command,
    check_command,
    clean_command,
    embed_command,
    forecast_command,
    info_command,
    lab_command,
    map_command,
    plan_command,
    recipes_command,
    report_command,
    run_command,
    select_command,
    tokenize_command,
    unpack_command,
    verify_command,
    watch_command,
    why_command,
)
from brim.cli.flags import flat, help_text
from brim.cli.show import Printed, fail
from brim.errors import BrimError, SinkFailed, Stopped
from brim.no_pandas import do_without_pandas
from brim.state.durable import reason
from brim.wording import speak_of_flags

HELP = """Datasets bigger than memory, built under a memory limit that you set.

brim packages files into shards without holding them: a shard is a recipe of what lies where. So a 300 GB
dataset takes as much memory as a small one, a killed run continues where it was, and what was written is
proved. `brim VERB --help` has examples.
"""

app = typer.Typer(
    name="brim",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan", help=help_text(plan_command.HELP))(flat(plan_command.plan))
app.command("check", help=help_text(check_command.HELP))(flat(check_command.check))
app.command("info", help=help_text(info_command.HELP))(flat(info_command.info))
app.command("build", help=help_text(build_command.HELP))(flat(build_command.build))
app.command("select", help=help_text(select_command.HELP))(flat(select_command.select))
app.command("verify", help=help_text(verify_command.HELP))(flat(verify_command.verify))
app.command("unpack", help=help_text(unpack_command.HELP))(flat(unpack_command.unpack))
app.command("map", help=help_text(map_command.HELP))(flat(map_command.map))
app.command("tokenize", help=help_text(tokenize_command.HELP))(flat(tokenize_command.tokenize))
app.command("embed", help=help_text(embed_command.HELP))(flat(embed_command.embed))
app.command("clean", help=help_text(clean_command.HELP))(flat(clean_command.clean))
app.command("recipes", help=help_text(recipes_command.HELP))(flat(recipes_command.recipes))
app.command("run", help=help_text(run_command.HELP), context_settings={"allow_interspersed_args": False})(
    flat(run_command.run)
)
app.command("watch", help=help_text(watch_command.HELP))(flat(watch_command.watch))
app.command("why", help=help_text(why_command.HELP))(flat(why_command.why))
app.add_typer(forecast_command.app, name="forecast", help=help_text(forecast_command.HELP))
app.add_typer(lab_command.app, name="lab", help=help_text(lab_command.HELP))
app.command("report", help=help_text(report_command.HELP))(flat(report_command.report))


def _version(show: bool) -> None:
    if show:
        from brim import __version__

        print(f"brim {__version__}")
        raise typer.Exit


@app.callback(help=help_text(HELP))
def _brim(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_version, is_eager=True),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks (anywhere on the line)."),
) -> None:
    pass


_INTERRUPTED = 130  # what typer makes of Ctrl-C
_KEPT: list[TextIO] = []  # the interpreter's own streams: closing them would close the descriptors


def _settle_streams() -> None:
    """Streams that are closed or fail swallow what is printed; what a terminal cannot show becomes "?"."""
    for name in ("stdout", "stderr"):
        before = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115
        before.flush()
        raw = Printed(before.fileno(), "w", closefd=False)
        lines = name == "stderr" or raw.isatty()
        after = io.TextIOWrapper(io.BufferedWriter(raw), before.encoding, "replace", line_buffering=lines)
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
    _settle_streams()
    do_without_pandas()
    arguments, command = _split(sys.argv[1:])
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    as_json = "--json" in arguments
    try:
        code = app(arguments + command, standalone_mode=False)
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
