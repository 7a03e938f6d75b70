"""The parser, made with typer: each verb is imported when it is wanted. Who only asks for the help needs none.

Texts, numbers and switches are taken without pydantic, which typer loads for them in 0.1 s. This is the one place that
touches private names of typer (`tests/unit/test_private_names.py`). A value that is no number goes to typer's own way,
which knows the words for it; so does everything else, and all of it in a typer that has no such place.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
import typer.core as core
from typer.core import TyperCommand, TyperGroup

from brim.cli.flags import complete_words, flat, help_text
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


_PLACE = "build_runtime_param"
_PLAIN = (str, bool, int, float)


def take_plain_values() -> None:
    usual = getattr(core, _PLACE, None)
    if usual is None or getattr(usual, "is_plain", False):
        return

    def build(descriptor: Any) -> Any:
        kind = _plain_kind(descriptor)
        if kind is None:
            return usual(descriptor)
        about = descriptor.parameter_info
        return _PlainParam(kind, (getattr(about, "min", None), getattr(about, "max", None)), lambda: usual(descriptor))

    build.is_plain = True  # type: ignore[attr-defined]
    setattr(core, _PLACE, build)


def _plain_kind(descriptor: Any) -> Any:
    """str, bool, int, float, or a list of one of them; None where more is to be looked at."""
    kind, about = descriptor.annotation, descriptor.parameter_info
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not NoneType]
        kind = kinds[0] if len(kinds) == 1 else None
    inner = get_args(kind)[0] if get_origin(kind) is list else kind
    if inner not in _PLAIN or any(getattr(about, name, None) for name in ("parser", "click_type", "clamp")):
        return None
    return kind


class _PlainParam:
    """What typer asks to make a value of the words on the line."""

    def __init__(self, kind: Any, bounds: tuple[Any, Any], usual: Any) -> None:
        self._many = get_origin(kind) is list
        self._kind = get_args(kind)[0] if self._many else kind
        self._least, self._most = bounds
        self._usual = usual

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        given = value if self._many else [value]
        if isinstance(given, list | tuple):
            found = [self._one(each) for each in given]
            if None not in found and all(map(self._is_within, found)):
                return found if self._many else found[0]
        return self._usual().coerce(value, param, ctx)

    def _is_within(self, value: Any) -> bool:
        return (self._least is None or value >= self._least) and (self._most is None or value <= self._most)

    def _one(self, value: Any) -> Any:
        """None if it does not look like one."""
        if self._kind is bool or isinstance(value, self._kind):
            return value if type(value) is self._kind else None
        if not isinstance(value, str) or not value.isascii():
            return None
        try:
            return self._kind(value)
        except ValueError:
            return None
