"""Name options as the reader does: flags in the terminal, keyword arguments in Python.

Texts are written once, with options as the terminal has them and a value after `=`: `--workers`, `--on-error=skip`.
The terminal prints `--workers` and `--on-error skip`, Python `workers=` and `on_error="skip"`. What follows the name of
a command (`brim build --plan PLAN`), or stands in backticks, is a command to type and stays as it is.

Plans, estimates and results are `Described`: lines of a label and a text, in a notebook a table.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast

_OPTION = r"(?<![\w'\"-])--(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>[^\s,;)]*[^\s,;).:]))?"
_NUMBER = re.compile(r"\d+(\.\d+)?|True|False|None")

# Characters that a terminal interprets (but not newline and tab), and those that reverse the order of letters.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_in_terminal = False


def drawing_stream() -> TextIO:
    """Return the stream for progress bars: stderr without the escaping of control characters, which bars need."""
    return cast("TextIO", getattr(sys.stderr, "rich_proxied_file", sys.stderr))


def escape_controls(text: str) -> str:
    """Escape control characters: the name of a file could set the title of a terminal, or hide what follows."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def use_terminal_names() -> None:
    """Name options as flags from now on: this process is the `brim` command."""
    global _in_terminal
    _in_terminal = True


@functools.cache
def _pattern() -> re.Pattern[str]:
    """Return what finds options, and commands to type, in a text."""
    commands = importlib.import_module("brim.cli.commands").COMMANDS  # not before an error is shown
    programs = rf"brim (?:{'|'.join(commands)})|systemd-run|docker|sbatch"
    return re.compile(rf"(?P<typed>`[^`]*`|\b(?:{programs})\b.*?(?=[.;](?:\s|$)|$))|{_OPTION}", re.DOTALL)


@functools.cache
def switches() -> dict[str, str]:
    """Return what each flag without a value is in Python, by the declarations of the options: fresh=True."""
    declare = importlib.import_module("brim.options.declare")
    package = importlib.import_module("brim.options")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"brim.options.{module.name}")
    found: dict[str, str] = {}
    kinds = [declare.Options]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for item in declare.declared_options(kind).values() if kind is not declare.Options else ():
            for flag in "/".join(item.flags).split("/") if item.is_switch and item.option.cli else ():
                name = flag.removeprefix("--")
                if flag == item.flags[0] or name not in found:  # check has --deep as a second name of --all
                    found[name] = f"{item.name}={not name.startswith('no-') or item.name.startswith('no_')}"
    return found


def worded(text: str) -> str:
    """Return a text with flags in the terminal, with keyword arguments in Python."""
    return _pattern().sub(_flag if _in_terminal else _keyword, text) if "--" in text else text


def terminal_text(text: str) -> str:
    """Return a text with flags, also where this process is not the `brim` command."""
    return _pattern().sub(_flag, text) if "--" in text else text


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Return a text with the names that a Python function has for some options, or for a switch with its value."""
    if _in_terminal or "--" not in text:
        return text

    def rename(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None or name not in names:
            return match[0]
        if "=" in names[name]:
            return names[name]
        return f"--{names[name]}{'' if match['value'] is None else '=' + match['value']}"

    return _pattern().sub(rename, text)


def _flag(match: re.Match[str]) -> str:
    return match[0] if match["value"] is None else f"--{match['name']} {match['value']}"


def _keyword(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    if name is None:
        return match[0]
    if value is None:
        return switches().get(name) or f"{name.replace('-', '_')}="
    plain = _NUMBER.fullmatch(value) or value[0] in "'\""
    return f"{name.replace('-', '_')}={value if plain else repr(value)}"


class Described:
    """Base of results that print as `lines`, and are a table in a notebook."""

    __slots__ = ()
    label_width = 0  # at least

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Labels and texts, for people."""
        raise NotImplementedError

    def __str__(self) -> str:
        lines = self.lines
        width = max([self.label_width, *(len(label) for label, _ in lines)])
        return "\n".join(f"{label:>{width}}  {worded(text)}" for label, text in lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        import html  # for notebooks alone

        rows = "".join(
            f'<tr><th style="text-align:right;vertical-align:top">{html.escape(label)}</th>'
            f'<td style="text-align:left;white-space:pre-wrap">{html.escape(worded(text))}</td></tr>'
            for label, text in self.lines
        )
        return f"<table>{rows}</table>"


class Result(Described):
    """The result of a command: for people, for programs, and what to do next."""

    __slots__ = ()

    def summary(self) -> list[tuple[str, str]]:
        """Return labels and texts, for people."""
        raise NotImplementedError

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The summary, under its earlier name."""
        return self.summary()

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name, as --json prints them."""
        return {name: getattr(self, name) for name in getattr(self, "__dataclass_fields__", ())}

    def next_steps(self) -> list[tuple[str, str]]:
        """Return labels and commands: what to do with the result."""
        return []
