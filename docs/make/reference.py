"""Pages that are made, not written: verbs from their help, functions from their docstrings, changelog, decisions."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import typer

import brim
import brim.cli

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
GROUPS = {
    "Sources": ["files", "table", "bids", "dataset", "recipes"],
    "Package and publish": ["plan", "build", "select", "open_plan", "push_to_hub", "verify", "unpack", "check", "info"],
    "Compute": ["map", "tokenize", "embed", "caches", "clean", "TensorWriter", "save_file", "open_tensors"],
    "Memory": ["watch", "release", "why", "forecast"],
}


def cell(text: str) -> str:
    return re.sub(r"\\\[", "[", text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def described(help_text: str) -> str:
    """The help of a verb: paragraphs, and its examples as a block."""
    text, _, examples = help_text.partition("[bold]Examples[/bold]")
    block = "\n".join(
        f"$ {line[2:]}" if line.startswith("  brim") else line for line in examples.strip("\n").splitlines()
    )
    shown = f"\n```console\n{block}\n```\n" if examples.strip() else ""
    return f"{text.strip().replace('<', '&lt;')}\n{shown}"


def options(command: Any) -> str:
    panels: dict[str, list[str]] = defaultdict(list)
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or not getattr(parameter, "help", None):
            continue
        names = ", ".join(f"`{name}`" for name in parameter.opts if name.startswith("-")) or f"`{parameter.metavar}`"
        metavar = f" `{parameter.metavar}`" if parameter.metavar and names.startswith("`-") else ""
        panel = getattr(parameter, "rich_help_panel", None) or "Options"
        panels[panel if names.startswith("`-") else "Arguments"].append(
            f"| {names}{metavar.replace('|', chr(92) + '|')} | {cell(parameter.help)} |"
        )
    parts = [
        f"\n**{panel}**\n\n| name | what it is |\n|---|---|\n" + "\n".join(lines) for panel, lines in panels.items()
    ]
    return "\n".join(parts)


def verbs() -> str:
    app: typer.Typer = brim.cli.app
    group: Any = typer.main.get_command(app)
    parts = ["# Verbs\n\nEach with its help, as `brim help VERB` shows it in the terminal.\n"]
    for name, command in group.commands.items():
        if name == "help":
            continue
        parts.append(f"## brim {name} {{ #{name} }}\n\n{described(command.help or '')}\n{options(command)}\n")
        for below, subcommand in getattr(command, "commands", {}).items():
            parts.append(f"### brim {name} {below}\n\n{described(subcommand.help or '')}\n{options(subcommand)}\n")
    return "\n".join(parts)


def functions() -> str:
    homes: dict[str, str] = brim._HOMES
    parts = ["# Python\n\nEvery verb is a function, with the words of the command line as keywords.\n"]
    named = {name for names in GROUPS.values() for name in names}
    rest = [name for name in brim.__all__ if name in homes and name not in named]
    groups = {
        **GROUPS,
        "Rows of a datasets.Dataset": [name for name in rest if name.islower()],
        "Results": [name for name in rest if not name.islower() and homes[name] != "brim.errors"],
        "Errors": [name for name in rest if homes[name] == "brim.errors"],
    }
    for title, names in groups.items():
        blocks = "\n\n".join(f"::: {homes[name]}.{name}" for name in names if name in homes)
        parts.append(f"## {title}\n\n{blocks}\n")
    return "\n".join(parts)


def decisions() -> str:
    pages = sorted((ROOT / "adr").glob("[0-9]*.md"))
    return "# Decisions\n\n" + "\n\n".join(re.sub(r"^(#+)", r"#\1", page.read_text(), flags=re.M) for page in pages)


def main() -> None:
    PAGES.mkdir(exist_ok=True)
    made = {
        "verbs.md": verbs(),
        "python.md": functions(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "decisions.md": decisions(),
    }
    for name, text in made.items():
        (PAGES / name).write_text(text)


if __name__ == "__main__":
    main()
