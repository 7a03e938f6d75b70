"""Make a click command from an `Options` class: parsing, short and full help, completion, deprecated names.

click parses and completes, but converts no values. `Declared.parse` converts the texts, so that the command line and
Python have the same checks and messages.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import MISSING
from inspect import cleandoc
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from brim.cli.print_output import print_stderr, silence_stdout
from brim.errors import InputError
from brim.options.declare import PANELS, Declared, Options, declared_options

_MAX_WIDTH = 100
_HYPHEN = "\u2011"
_FEW_OPTIONS = 15  # a command with at most this many shows all of them in --help


class Command(NamedTuple):
    """A command: its options and the function that runs it.

    The docstring of the options class is the help text: a sentence, a paragraph `Examples:`, and details for
    --help-all, to which `shared_details` are added. With `saved`, the command also accepts a saved plan: with --plan,
    the options are those of that class.
    """

    options: type[Options]
    run: Callable[[Any], None]
    saved: type[Options] | None = None
    is_wrapper: bool = False  # all arguments after the first one belong to another command
    shared_details: str = ""  # with other commands

    @property
    def summary(self) -> str:
        return self._paragraphs()[0]

    @property
    def examples(self) -> list[str]:
        examples = next(text for text in self._paragraphs() if text.startswith("Examples:"))
        return [line.strip() for line in examples.splitlines()[1:]]

    @property
    def details(self) -> list[str]:
        return [" ".join(text.split()) for text in self._paragraphs()[1:] if not text.startswith("Examples:")]

    def _paragraphs(self) -> list[str]:
        return [*cleandoc(self.options.__doc__ or "").split("\n\n"), *filter(None, [self.shared_details])]


def click_command(name: str, command: Command, summary: str = "") -> "ClickCommand":
    """Make the click command for `brim NAME`. A summary replaces the first sentence of its help text."""
    declared: dict[str, Declared] = {}
    for kind in (command.options, *([command.saved] if command.saved else [])):
        for item in declared_options(kind).values():
            if item.option.cli:
                declared.setdefault(item.name, item)
    params: list[click.Parameter] = []
    for item in declared.values():
        if item.option.argument:
            count = -1 if item.kind.is_list else 1
            metavar = item.option.metavar
            params.append(click.Argument([item.name], required=False, nargs=count, type=_Text(item), metavar=metavar))
        else:
            params.append(_option(item, item.flags, item.name))
    params.sort(key=lambda param: param.param_type_name)  # arguments first; the sort is stable, so their order stays
    flags = {flag for param in params for flag in param.opts}
    old_flags = {f"old_{item.option.old}": item for item in declared.values() if item.option.old}
    for key, item in old_flags.items():
        flag = f"--{item.option.old.replace('_', '-')}"
        if flag not in flags:
            params.append(_option(item, (flag,), key, hidden=True))
    params.append(click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_print_all))
    settings = {
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": not command.is_wrapper,
        "allow_extra_args": True,  # `_make_options` refuses them, with a hint
    }
    result = ClickCommand(name, params=params, callback=None, context_settings=settings)
    result.command, result.declared, result.old_flags = command, declared, old_flags
    result.summary = summary or command.summary
    return result


def _option(item: Declared, flags: tuple[str, ...], name: str, *, hidden: bool = False) -> click.Option:
    names, switch = [*flags, name], {"is_flag": True}
    if not item.is_switch:
        return click.Option(
            names, default=None, multiple=item.is_multiple, type=_Text(item), metavar=item.metavar, hidden=hidden
        )
    if "/" not in flags[0]:  # any flag_value, also None, would make the value of another option optional
        switch["flag_value"] = True
    return click.Option(names, default=None, hidden=hidden, **switch)  # type: ignore[arg-type]


def _print_all(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:
        print(help_page(ctx.command, ctx, show_all=True))  # type: ignore[arg-type]
        ctx.exit(0)


class _Text(click.ParamType):  # type: ignore[type-arg]
    """A text as the user typed it; the Tab key offers the values that an option accepts."""

    name = "text"

    def __init__(self, item: Declared) -> None:
        self.item = item

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        choices = list(self.item.kind.choices)
        if self.item.name == "recipe":
            from brim.sources.recipe import builtin_recipes

            choices = [recipe.name for recipe in builtin_recipes()]
        if not choices:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]


class ClickCommand(click.Command):
    command: Command
    declared: dict[str, Declared]
    old_flags: dict[str, Declared]  # by the names of the hidden parameters that accept deprecated names
    summary: str

    def invoke(self, ctx: click.Context) -> Any:
        try:
            options = self._make_options(ctx)
            if getattr(options, "quiet", False) and not getattr(options, "json", False):
                silence_stdout()
            return self.command.run(options)
        except InputError as error:
            arguments = tuple(item.spelling for item in self.declared.values() if item.option.argument)
            if not error.hint and ("--" in error.words[0] or error.words[0].startswith(arguments)):
                error.with_hint(f"{ctx.command_path} --help shows examples and options.")
            raise

    def _make_options(self, ctx: click.Context) -> Options:
        """Turn what the user typed into the options object of the command, or of a saved plan."""
        saved, kind = self.command.saved, self.command.options
        if ctx.args:
            names = " and ".join(item.spelling for item in self.declared.values() if item.option.argument)
            takes = f"{ctx.command_path} takes {names or 'only options'}."
            raise InputError(
                f"Unexpected argument {ctx.args[0]!r}.", hint=f"{takes} Quote globs and names that contain spaces."
            )
        typed = {name: value for name, value in ctx.params.items() if value not in (None, ())}
        for old_name in [name for name in typed if name in self.old_flags]:
            item, value = self.old_flags[old_name], typed.pop(old_name)
            old_flag = f"--{item.option.old.replace('_', '-')}"
            if item.name in typed and not isinstance(value, tuple):
                raise InputError(
                    f"{old_flag} cannot be used with {item.flags[0]}, which is its new name.",
                    hint=f"Leave out {old_flag}.",
                )
            print_stderr(f"brim: {old_flag} is now {item.flags[0]}.")
            typed[item.name] = (*typed.get(item.name, ()), *value) if isinstance(value, tuple) else value
        if saved is not None and "plan" in typed:
            kind = saved
        declared = declared_options(kind)
        if extra := [self.declared[name].spelling for name in typed if name not in declared]:
            if kind is saved:
                raise InputError(
                    f"{', '.join(extra)} cannot be used with --plan: the plan defines source, job and destination.",
                    hint="Leave it out, or save another plan.",
                )
            save = f"brim {'plan' if self.name == 'build' else self.name} SOURCE DEST --save PLAN"
            raise InputError(
                f"{extra[0]} can only be used with --plan.",
                hint=f"Save a plan with `{save}`, then run `brim {self.name} --plan PLAN {extra[0]} …`.",
            )
        for item in declared.values():
            if item.default is MISSING and item.name not in typed:
                plan = ", or with --plan PLAN" if saved is not None else ""
                raise InputError(
                    f"{item.spelling} is missing.", hint=f"Write it like `{self.command.examples[0]}`{plan}."
                )
        return kind(**{name: declared[name].parse(value) for name, value in typed.items()})

    def get_help(self, ctx: click.Context) -> str:
        return help_page(self, ctx, show_all=False)


def help_page(click_command: ClickCommand, ctx: click.Context, *, show_all: bool) -> str:
    """Return the help of a command: the common options, or all of them in panels."""
    command = click_command.command
    formatter = click.HelpFormatter(width=min(shutil.get_terminal_size().columns, _MAX_WIDTH))
    required = {name for name, item in declared_options(command.options).items() if item.default is MISSING}
    arguments = [item for item in click_command.declared.values() if item.option.argument]
    options = [item for item in click_command.declared.values() if not item.option.argument]
    options.sort(key=lambda item: (PANELS.index(item.panel), not item.option.common))
    optional = [item.spelling if item.name in required else f"[{item.spelling}]" for item in arguments]
    usage = ["[OPTIONS]", "--", *optional] if command.is_wrapper else [*optional, "[OPTIONS]"]
    formatter.write_usage(ctx.command_path, " ".join(usage))
    for paragraph in [click_command.summary, *(command.details if show_all else ())]:
        formatter.write_paragraph()
        formatter.write_text(_unbroken(paragraph))
    formatter.write("\nExamples:\n" + "".join(f"  {line}\n" for line in command.examples))
    if arguments:
        with formatter.section("Arguments"):
            formatter.write_dl([(item.spelling, _unbroken(item.help)) for item in arguments], col_max=28)
    is_shortened = not show_all and len(options) > _FEW_OPTIONS
    shown = [item for item in options if item.option.common] if is_shortened else options
    panels: dict[str, list[tuple[str, str]]] = {}
    for item in shown:
        flags = ", ".join(sorted(item.flags, key=len)).replace("/", ", ")
        label, text = flags if item.is_switch else f"{flags} {item.metavar}", item.help if show_all else item.short_help
        panels.setdefault(item.panel if show_all else "", []).append((label, _unbroken(text)))
    for panel, rows in panels.items():
        with formatter.section(panel or ("Common options" if is_shortened else "Options")):
            formatter.write_dl(rows, col_max=28)
    if len(shown) < len(options):
        formatter.write(f"\n{ctx.command_path} --help-all shows {len(options) - len(shown)} more options.\n")
    elif command.details and not show_all:
        formatter.write(f"\n{ctx.command_path} --help-all explains the command.\n")
    return formatter.getvalue().rstrip("\n").replace(_HYPHEN, "-")


def _unbroken(text: str) -> str:
    """Return a text that click does not break at the hyphens of options and names."""
    return re.sub(r"(?<=\S)-(?=\w)", _HYPHEN, text)
