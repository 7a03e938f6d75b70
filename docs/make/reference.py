"""Write the pages that are generated: commands and functions from the declared options, changelog, decisions."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import brim
from brim.cli.commands import COMMANDS, GROUPS
from brim.options.declare import declared_options, options_table
from brim.options.monitor_options import FORECASTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FUNCTIONS = {
    "Sources": ["files", "table", "bids", "dataset", "recipes"],
    "Package and publish": ["plan", "build", "select", "open_plan", "push_to_hub", "verify", "unpack", "check", "info"],
    "Compute": ["map", "tokenize", "embed", "caches", "clean", "save_job", "open_job"],
    "Tensors": ["TensorWriter", "save_file", "open_tensors"],
    "Train": ["Loader"],
    "Memory": ["watch", "release", "why", "forecast"],
    "Progress and stopping": ["Progress", "Stop"],
}


def command_section(heading: str, name: str, command: Any, summary: str) -> str:
    """Return summary, examples, details and the table of options of a command."""
    examples = "\n".join(f"$ {line}" for line in command.examples)
    kinds = [command.options, *([command.saved] if command.saved else [])]
    kind = (
        FORECASTS.get(name.removeprefix("forecast "))
        if " " in name
        else getattr(getattr(brim, name, None), "options", None)
    )
    known = declared_options(kind) if kind else ()
    tables = ["\n".join(options_table(kind, known)).replace("<", "&lt;") for kind in kinds]
    if len(tables) > 1:
        tables.insert(1, "With `--plan`, in place of these:")
    parts = [
        heading,
        summary,
        f"```console\n{examples}\n```",
        *(text.replace("<", "&lt;") for text in command.details),
        *tables,
    ]
    return "\n\n".join(part for part in parts if part)


def commands() -> str:
    parts = ["# Commands", "`brim COMMAND --help` shows the common options, `brim COMMAND --help-all` all of them."]
    for names in GROUPS.values():
        for name in names:
            if name == "help":
                continue
            module = importlib.import_module(f"brim.cli.{name}_command")
            title = f"## brim {name} {{ #{name} }}"
            if not hasattr(module, "SUBCOMMANDS"):
                parts.append(command_section(title, name, module.COMMAND, COMMANDS[name]))
                continue
            parts += [title, COMMANDS[name]]
            for below, command in module.SUBCOMMANDS.items():
                parts.append(command_section(f"### brim {name} {below}", f"{name} {below}", command, command.summary))
    return "\n\n".join(parts) + "\n"


def function_section(name: str) -> str:
    """Return the docstring of a function that takes declared options, with its options as a table."""
    function = getattr(brim, name)
    text = inspect.getdoc(function) or ""
    about, _, rest = text.partition("Args:")
    _, heading, after = rest.partition("Returns:")
    sections = re.sub(r"^(Returns|Raises|Examples):$", r"**\1**\n", heading + after, flags=re.M)
    sections = re.sub(r"^    (\w+Error): ", r"- `\1`: ", sections, flags=re.M)
    before, marker, examples = inspect.cleandoc(sections).partition("**Examples**")
    block = f"\n\n```python\n{inspect.cleandoc(examples)}\n```" if marker else ""
    lines = list(options_table(function.options))
    if name not in COMMANDS:  # without the column of options of the command line
        lines = [lines[0].split(" | ", 1)[1], "---|---", *(line.split(" | ", 1)[1] for line in lines[2:])]
        lines = [f"| {line}" if line[0] != "-" else f"|{line}|" for line in lines]
    table = "\n".join(lines).replace("<", "&lt;")
    plain = "\n".join(line.strip() for line in before.splitlines())
    return f"### brim.{name} {{ #{name} }}\n\n{about.strip()}\n\n{table}\n\n{plain}{block}"


def functions() -> str:
    homes = brim._public_modules()
    parts = ["# Python\n\nEvery command is a function, with the options of the command line as keyword arguments.\n"]
    named = {name for names in FUNCTIONS.values() for name in names}
    rest = [name for name in brim.__all__ if name in homes and name not in named]
    groups = {
        **FUNCTIONS,
        "Rows of a datasets.Dataset": [name for name in rest if name.islower()],
        "Results": [name for name in rest if not name.islower() and homes[name] != "brim.errors"],
        "Errors": [name for name in rest if homes[name] == "brim.errors"],
    }
    for title, names in groups.items():
        blocks = [
            function_section(name) if hasattr(getattr(brim, name), "options") else f"::: {homes[name]}.{name}"
            for name in names
            if name in homes
        ]
        parts.append(f"## {title}\n\n" + "\n\n".join(blocks) + "\n")
    return "\n".join(parts)


def decisions() -> str:
    """Return all decisions as one page, whose links lead to its sections."""
    pages = {page.name: page.read_text() for page in sorted((ROOT / "adr").glob("[0-9]*.md"))}
    parts = ["# Decisions", "Why brim is built as it is. Each section was written when the decision was made."]
    for name, text in pages.items():
        title, _, body = text.partition("\n")
        body = re.sub(r"\]\((\d+-[\w-]+)\.md\)", r"](#\1)", body)
        parts.append(f"#{title} {{ #{name.removesuffix('.md')} }}\n{body}")
    return "\n\n".join(parts)


def main() -> None:
    made = {
        "reference/commands.md": commands(),
        "reference/python.md": functions(),
        "reference/changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "contributing/decisions.md": decisions(),
    }
    for name, text in made.items():
        (DOCS / name).write_text(text)


if __name__ == "__main__":
    main()
