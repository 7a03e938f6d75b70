"""Options in what brim says: the words of whoever reads it.

Texts are written once, with options as the terminal has them and a value behind `=`: `--workers`, `--on-error=skip`.
In the terminal they read `--workers` and `--on-error skip`, in Python `workers=` and `on_error="skip"`. What follows
the name of a command (`brim build --plan PLAN`), or stands in backticks, is something to type and stays as it is.

Plans, forecasts and results are `Described` for people: lines of a label and a text, in a notebook a table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import TextIO, cast

# Flags without a value, and what says the same in Python.
SWITCHES = {
    "act": "act=True",
    "all": "everything=True",
    "allow-duplicate-paths": "allow_duplicate_paths=True",
    "allow-empty": "allow_empty=True",
    "anonymous": "anonymous=True",
    "create-pr": "create_pr=True",
    "deep": "deep=True",
    "direct": "direct=True",
    "fresh": "fresh=True",
    "keep-done": "keep_done=True",
    "no-bidsignore": "bidsignore=False",
    "no-projection": "projection=False",
    "phenotype": "phenotype=True",
    "public": "public=True",
    "splittable": "splittable=True",
    "strict": "strict=True",
    "update": "update=True",
}
_VERBS = "build|check|embed|forecast|info|lab|map|plan|run|tokenize|unpack|verify|watch|why"
_PROGRAMS = f"brim (?:{_VERBS})|systemd-run|docker|sbatch"
_TYPED = rf"`[^`]*`|\b(?:{_PROGRAMS})\b.*?(?=[.;](?:\s|$)|$)"
_OPTION = r"(?<![\w'\"-])--(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>[^\s,;)]*[^\s,;).:]))?"
_PATTERN = re.compile(rf"(?P<typed>{_TYPED})|{_OPTION}", re.DOTALL)
_NUMBER = re.compile(r"\d+(\.\d+)?|True|False|None")

# What a terminal obeys instead of showing (but not newline and tab), and what turns the order of letters around.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_in_terminal = False


def drawing_stream() -> TextIO:
    """Where bars are drawn: stderr, but behind what escapes control characters, of which a drawing is made."""
    return cast("TextIO", getattr(sys.stderr, "rich_proxied_file", sys.stderr))


def escape_controls(text: str) -> str:
    """The text with control characters as escapes: a file's name can set a terminal's title, or hide what follows."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def speak_of_flags() -> None:
    """From now on this process speaks to a terminal."""
    global _in_terminal
    _in_terminal = True


def worded(text: str) -> str:
    """A text for whoever reads it: with flags in the terminal, with keywords in Python."""
    return _PATTERN.sub(_flag if _in_terminal else _keyword, text) if "--" in text else text


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A text in which some options have the names (or, for a switch, the words) of a function of Python."""
    if _in_terminal:
        return text

    def other(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None or name not in names:
            return match[0]
        if "=" in names[name]:
            return names[name]
        return f"--{names[name]}{'' if match['value'] is None else '=' + match['value']}"

    return _PATTERN.sub(other, text)


def _flag(match: re.Match[str]) -> str:
    if match["value"] is None:
        return match[0]
    return f"--{match['name']} {match['value']}"


def _keyword(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    if name is None:
        return match[0]
    if value is None:
        return SWITCHES.get(name) or f"{name.replace('-', '_')}="
    plain = _NUMBER.fullmatch(value) or value[0] in "'\""
    return f"{name.replace('-', '_')}={value if plain else repr(value)}"


class Described:
    """Has `lines`. Printed and as the value of a cell it is those, not what a program would want to know."""

    __slots__ = ()
    label_width = 0  # at least

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Labels and texts, for people."""
        raise NotImplementedError

    def __str__(self) -> str:
        width = max([self.label_width, *(len(label) for label, _ in self.lines)])
        return "\n".join(f"{label:>{width}}  {worded(text)}" for label, text in self.lines)

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
