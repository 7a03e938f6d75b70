"""The click group of all commands: each command's module is imported when it is needed."""

from __future__ import annotations

import difflib
import importlib
import os
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from brim.cli.command import Command, click_command
from brim.cli.commands import COMMANDS, SYNONYMS, static_page
from brim.errors import InputError


class BrimGroup(click.Group):
    """`brim`, with the commands of `commands.py`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "help":
            names = click.Argument(["name"], required=False, type=click.Choice(list(COMMANDS)))
            return click.Command("help", params=[names], callback=lambda name: print(static_page([])))
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"brim.cli.{name}_command")
        if hasattr(module, "SUBCOMMANDS"):
            return _Subcommands(name, module.SUBCOMMANDS, module.EXAMPLES)
        return click_command(name, module.COMMAND, COMMANDS[name])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the commands without importing them."""
        matches = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return [*matches, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        _refuse_unknown("brim", args[0], COMMANDS, SYNONYMS)
        return super().resolve_command(ctx, args)


class _Subcommands(click.Group):
    """A command with subcommands, such as `brim forecast map`."""

    def __init__(self, name: str, subcommands: dict[str, Command], examples: str) -> None:
        parsers: dict[str, click.Command] = {key: click_command(key, command) for key, command in subcommands.items()}
        super().__init__(name, commands=parsers, context_settings={"help_option_names": ["-h", "--help"]})
        self.subcommands, self.examples = subcommands, examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # for completion
            return super().parse_args(ctx, args)
        if not args or args[0] in ("--help", "-h", "--help-all"):
            print(self.get_help(ctx))
            ctx.exit(0)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        _refuse_unknown(f"brim {self.name}", args[0], self.subcommands, {})
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        width = max(map(len, self.subcommands))
        rows = [f"  {name:<{width}}  {command.summary}" for name, command in self.subcommands.items()]
        usage = f"Usage: brim {self.name} COMMAND [ARGUMENTS] [OPTIONS]"
        examples = [f"  {line}" for line in self.examples.strip("\n").splitlines()]
        return "\n".join([usage, "", COMMANDS[str(self.name)], "", "Examples:", *examples, "", "Commands:", *rows])


def _refuse_unknown(program: str, name: str, names: Any, synonyms: dict[str, str]) -> None:
    if name in names or name.startswith("-"):
        return
    if name in synonyms:
        raise InputError(f"Unknown command {name!r}.", hint=f"Try: {synonyms[name]}")
    close = difflib.get_close_matches(name, names, 1)
    hint = f"Did you mean {program} {close[0]}?" if close else f"{program} --help lists the commands."
    raise InputError(f"Unknown command {name!r}.", hint=hint)


def run_command(arguments: list[str]) -> Any:
    """Parse the arguments and run the command; click's own errors become brim's."""
    group = BrimGroup("brim", context_settings={"help_option_names": ["-h", "--help"]})
    if "_BRIM_COMPLETE" in os.environ:  # the shell passes the incomplete command line in environment variables
        group.main([], "brim", complete_var="_BRIM_COMPLETE")
    if arguments[:1] in (["--show-completion"], ["--install-completion"]):
        if arguments[1:]:
            raise InputError(f"{arguments[0]} takes no arguments.", hint=f"Write it like `brim {arguments[0]}`.")
        return _print_completion(install=arguments[0] == "--install-completion")
    try:
        return group.main(arguments, "brim", standalone_mode=False)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else " ".join(["brim", *arguments[:1]])
        hint = f"{path} --help shows the options."
        if isinstance(error, click.NoSuchOption):
            params = error.ctx.command.params if error.ctx is not None else []
            shown = [param for param in params if not getattr(param, "hidden", False)]
            names = [flag[2:] for param in shown for flag in param.opts if flag.startswith("--")]
            close = difflib.get_close_matches(error.option_name.lstrip("-"), names, 1)
            hint = f"Did you mean --{close[0]}?" if close else hint
            raise InputError(f"Unknown option {error.option_name}.", hint=hint) from error
        if isinstance(error, click.BadOptionUsage):
            problem = "needs a value" if "requires" in error.message else "does not take a value"
            raise InputError(f"{error.option_name} {problem}.", hint=hint) from error
        raise InputError(f"{error.format_message().rstrip('.')}.", hint=hint) from error
    except click.Abort as error:
        raise KeyboardInterrupt from error


def _print_completion(*, install: bool) -> None:
    """Print the completion script for the user's shell, or add it to the start-up file of the shell."""
    shell = Path(os.environ.get("SHELL", "bash")).name
    kind = get_completion_class(shell)
    if kind is None:
        raise InputError(f"Completion is not available for the shell {shell!r}.", hint="Use bash, zsh or fish.")
    if not install:
        print(kind(BrimGroup("brim"), {}, "brim", "_BRIM_COMPLETE").source())
        return
    home = Path.home()
    fish = home / ".config" / "fish" / "completions" / "brim.fish"
    target = {"bash": home / ".bashrc", "zsh": home / ".zshrc"}.get(shell, fish)
    source = f"_BRIM_COMPLETE={shell}_source brim"
    command = f"{source} | source" if shell == "fish" else f'eval "$({source})"'
    if not target.exists() or command not in target.read_text():
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a") as file:
            file.write(f"\n{command}\n")
    print(f"Completion is installed in {target}. Start a new shell to use it.")
