"""Make a click command from an `Options` class: parsing, short and full help, completion, deprecated names.

click parses and completes, but converts no values. `Declared.parse` converts the texts, so that the command line and
Python have the same checks and messages.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from brim.cli.commands import COMMANDS
from brim.errors import InputError
from brim.options.declare import Declared, Options, declared_options

_PANELS = (
    "", "Function", "Tokens", "Model", "Vectors", "Output", "Source", "BIDS datasets and recipes", "Shards", "Run",
    "When to warn, stop and kill", "Logs", "Live page", "In parts, on many machines", "Hugging Face Hub",
    "Object stores (s3://, gs://, az://)",
)  # fmt: skip
_MAX_WIDTH = 100
_FEW_OPTIONS = 15  # a command with at most this many shows all of them in --help


class Command(NamedTuple):
    """A command: its options, the function that runs it, and the help texts besides those of the options.

    With `saved`, the command also accepts a saved plan: with --plan, the options are those of that class.
    """

    options: type[Options]
    run: Callable[[Any], None]
    examples: str
    details: str = ""
    saved: type[Options] | None = None
    summary: str = ""  # only for a subcommand; the summaries of commands are in `commands.py`
    is_wrapper: bool = False  # all arguments after the first one belong to another command


def click_command(name: str, command: Command) -> click.Command:
    """Make the click command for `brim NAME`."""
    declared = dict(declared_options(command.options))
    if command.saved is not None:
        declared = {**declared_options(command.saved), **declared}
    declared = {key: item for key, item in declared.items() if item.option.cli}
    params: list[click.Parameter] = [
        _argument(item) if item.option.argument else _option(item) for item in declared.values()
    ]
    params.sort(key=lambda param: param.param_type_name)  # arguments first; the sort is stable, so their order stays
    flags = {flag for param in params for flag in param.opts}
    renamed = {f"old_{old}": item for item in declared.values() for old in item.option.old if _flag(old) not in flags}
    params += [_option(item, (_flag(name.removeprefix("old_")),), name) for name, item in renamed.items()]
    params.append(click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_print_all))
    settings: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
    if command.is_wrapper:
        settings["allow_interspersed_args"] = False
    result = _ClickCommand(name, params=params, callback=None, context_settings=settings)
    result.command, result.declared, result.renamed = command, declared, renamed
    return result


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _print_all(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:
        print(help_page(ctx.command, ctx, everything=True))  # type: ignore[arg-type]
        ctx.exit(0)


class _ClickCommand(click.Command):
    command: Command
    declared: dict[str, Declared]
    renamed: dict[str, Declared]  # by the names of the hidden parameters that accept deprecated names

    def invoke(self, ctx: click.Context) -> Any:
        values: dict[str, Any] = {}
        for param in self.params:
            name, value = str(param.name), ctx.params.get(str(param.name))
            if value in (None, ()):
                continue
            if name in self.renamed:
                item = self.renamed[name]
                if item.name in values and not isinstance(value, tuple):
                    raise InputError(
                        f"{param.opts[0]} cannot be used with {item.flags[0]}, which is its new name.",
                        hint=f"Leave out {param.opts[0]}.",
                    )
                print(f"brim: {param.opts[0]} is now {item.flags[0]}.", file=sys.stderr)
                name, value = item.name, (*values.get(item.name, ()), *value) if isinstance(value, tuple) else value
            values[name] = value
        kind = self.command.options
        if self.command.saved is not None and "plan" in values:
            kind = self.command.saved
        declared = declared_options(kind)
        extra = [self.declared[name].spelling for name in values if name not in declared]
        if extra and kind is self.command.saved:
            raise InputError(
                f"{', '.join(extra)} cannot be used with --plan: the plan defines source, job and destination.",
                hint="Leave it out, or save another plan.",
            )
        if extra:
            save = f"brim {'plan' if self.name == 'build' else self.name} SOURCE DEST --save PLAN"
            raise InputError(
                f"{extra[0]} can only be used with --plan.",
                hint=f"Save a plan with `{save}`, then run `brim {self.name} --plan PLAN {extra[0]} …`.",
            )
        arguments = [item.spelling for item in declared.values() if item.option.argument]
        for item in declared.values():
            if item.default is MISSING and item.name not in values:
                raise InputError(f"{item.spelling} is missing.", hint=self._missing_hint())
        try:
            options = kind(**{name: declared[name].parse(value) for name, value in values.items()})
            if values.get("quiet") and not values.get("json"):
                from brim.cli.print_output import silence_stdout

                silence_stdout()
            return self.command.run(options)
        except InputError as error:
            if not error.hint and error.words[0].startswith(("--", *arguments)):
                error.with_hint(f"{ctx.command_path} --help shows examples and options.")
            raise

    def _missing_hint(self) -> str:
        example = self.command.examples.strip().splitlines()[0]
        plan = ", or give --plan PLAN" if self.command.saved is not None else ""
        return f"Write it like `{example}`{plan}."

    def get_help(self, ctx: click.Context) -> str:
        return help_page(self, ctx, everything=False)


def _option(item: Declared, old: tuple[str, ...] = (), name: str | None = None) -> click.Option:
    flags, switch = old or item.flags, {}
    if item.is_switch:  # any flag_value, also None, would make the value of another option optional
        switch = {"is_flag": True} if "/" in flags[0] else {"is_flag": True, "flag_value": True}
    return click.Option(
        [*flags, name or item.name],
        default=None,
        multiple=item.kind.is_list or item.option.from_texts is not None,
        type=None if item.is_switch else _Text(item),
        metavar=item.metavar,
        help=item.help,
        hidden=bool(old),
        **switch,
    )


def _argument(item: Declared) -> click.Argument:
    return click.Argument(
        [item.name], required=False, nargs=-1 if item.kind.is_list else 1, type=_Text(item), metavar=item.option.metavar
    )


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


def help_page(click_command: _ClickCommand, ctx: click.Context, *, everything: bool) -> str:
    """Return the help of a command: the common options, or all of them in panels."""
    command = click_command.command
    formatter = click.HelpFormatter(width=min(shutil.get_terminal_size().columns, _MAX_WIDTH))
    items = list(click_command.declared.values())
    arguments = [item for item in items if item.option.argument]
    optional = [f"[{item.spelling}]" if item.default is not MISSING else item.spelling for item in arguments]
    usage = ["[OPTIONS]", "--", *optional] if command.is_wrapper else [*optional, "[OPTIONS]"]
    formatter.write_usage(ctx.command_path, " ".join(usage))
    formatter.write_paragraph()
    formatter.write_text(command.summary or COMMANDS[str(click_command.name)])
    if everything:
        for paragraph in command.details.strip().split("\n\n") if command.details else ():
            formatter.write_paragraph()
            formatter.write_text(" ".join(paragraph.split()))
    formatter.write("\nExamples:\n" + "".join(f"  {line}\n" for line in command.examples.strip("\n").splitlines()))
    if arguments:
        with formatter.section("Arguments"):
            formatter.write_dl([(item.spelling, item.help) for item in arguments], col_max=28)
    options = [item for item in items if not item.option.argument]
    is_common = not everything and len(options) > _FEW_OPTIONS
    shown = [item for item in options if item.option.common] if is_common else options
    required = {name for name, item in declared_options(command.options).items() if item.default is MISSING}
    for title, rows in _panels(shown, everything, "Common options" if is_common else "Options", required):
        with formatter.section(title):
            formatter.write_dl(rows, col_max=28)
    if len(shown) < len(options):
        formatter.write(f"\n{ctx.command_path} --help-all shows {len(options) - len(shown)} more options.\n")
    return formatter.getvalue().rstrip("\n")


def _panels(
    options: list[Declared], show_all: bool, title: str, required: set[str]
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    grouped: dict[str, list[tuple[str, str]]] = {}
    for item in sorted(options, key=lambda item: _PANELS.index(item.panel)):
        flags = ", ".join(item.flags).replace("/", ", ")
        label = flags if item.is_switch else f"{flags} {item.metavar}"
        text = item.help if show_all else item.short_help
        grouped.setdefault(item.panel if show_all else "", []).append((label, text))
    for panel, rows in grouped.items():
        yield panel or title, rows
