"""The parser, made with typer: each verb is imported when it is wanted. Who only asks for the help needs none."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from brim.cli.completion import complete_words
from brim.cli.flags import flat, help_text
from brim.cli.plain_values import take_plain_values
from brim.cli.verbs import ABOUT, HELP_VERB, VERBS, version_line


def _without_types(parameters: list[Any]) -> list[Any]:
    """A flag takes no value, and an argument is told by its name: help does not name Python's types of them."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
        if parameter.param_type_name == "argument" and hasattr(parameter, "display_type_rich"):
            parameter.display_type_rich = _no_type
    return parameters


def _no_type(ctx: Any) -> None:
    return None


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


def make_app(verbs: Iterable[str] = VERBS, markup: Literal["rich"] | None = "rich") -> typer.Typer:
    take_plain_values()
    made = typer.Typer(
        name="brim",
        no_args_is_help=True,
        add_completion=True,
        cls=_Group,
        pretty_exceptions_enable=False,
        rich_markup_mode=markup,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback(help=help_text(ABOUT))(_brim)
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
    made.command("help", help=HELP_VERB, cls=_Command)(_help)
    return made


def _help(
    verb: Annotated[
        str | None,
        typer.Argument(metavar="VERB", help="Without one: all verbs.", autocompletion=complete_words(VERBS)),
    ] = None,
) -> None:
    """Only for the list of verbs and for completion: `main` turns `help VERB` into `VERB --help`."""


def _version(show: bool) -> None:
    if show:
        print(version_line())
        raise typer.Exit


def _brim(
    version: bool = typer.Option(False, "--version", "-V", help="Show the version.", callback=_version, is_eager=True),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks (anywhere on the line)."),
) -> None:
    pass
