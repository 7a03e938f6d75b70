"""An option is declared once; the command line, Python, the checks and the docs follow from the declaration."""

import inspect
import json
import re
from dataclasses import field
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import click
import pytest
from click.shell_completion import ShellComplete

import brim
from brim.cli.command import Command, click_command, help_page
from brim.cli.commands import COMMANDS
from brim.cli.parser import BrimGroup
from brim.errors import ArgumentError, InputError
from brim.formats.parquet_writer import MAX_CELL_BYTES
from brim.options.declare import (
    PANELS,
    Names,
    Option,
    Options,
    Path,
    Size,
    declared_options,
    old_names,
    options_table,
    takes,
)
from brim.records import dataclass

EARLIER = json.loads((FilePath(__file__).parents[1] / "fixtures" / "options-0.1.json").read_text())


@dataclass(frozen=True, kw_only=True)
class CookOptions(Options):
    """Cook something.

    Examples:
        brim cook soup --oven-heat 200

    This command exists only in this test.
    """

    source: Annotated[Path, Option("What to cook.", "SOURCE", argument=True)] = field(kw_only=False)
    style: Annotated[Literal["raw", "done"], Option("How it is served.")] = "done"
    size: Annotated[Size, Option("Size of a portion.", default="1KB")] = None
    salt: Annotated[bool, Option("Add salt.")] = True
    spices: Annotated[Names, Option("Spice for DEST.", "SPICE", python="Or a dict of spices.")] = ()
    dish: Annotated[Path | None, Option("Where it is served.", "DEST")] = None
    # The option that the tests below look up.
    oven_heat: Annotated[int, Option("Degrees of the oven.", "N", minimum=1, maximum=300, old="warmth")] = 180


@takes(CookOptions)
def cook(options: CookOptions) -> int:
    """Cook something.

    Returns:
        The degrees that were used.
    """
    return options.oven_heat


cooked: list[CookOptions] = []
COOK = Command(CookOptions, cooked.append)


def typed(*arguments: str) -> CookOptions:
    """Run the command with these words and return the options that it was called with."""
    click_command("cook", COOK).main(list(arguments), "brim cook", standalone_mode=False)
    return cooked.pop()


def completions(*arguments: str) -> list[str]:
    """Return what the Tab key offers for the last word."""
    shell = ShellComplete(click_command("cook", COOK), {}, "brim", "_BRIM_COMPLETE")
    return [item.value for item in shell.get_completions(list(arguments[:-1]), arguments[-1])]


def test_declared_option_is_on_the_command_line() -> None:
    """The flag accepts sizes as people write them, and both help pages and completion show it."""
    assert typed("soup", "--oven-heat", "200").oven_heat == 200
    assert typed("soup", "--oven-heat=2e2", "--size", "3MB") == CookOptions("soup", oven_heat=200, size="3MB")
    created = click_command("cook", COOK)
    for show_all in (False, True):
        page = help_page(created, click.Context(created, info_name="brim cook"), show_all=show_all)  # type: ignore[arg-type]
        assert "--oven-heat N" in page
        assert "Degrees of the oven. (default: 180)" in page
        assert "warmth" not in page
    assert completions("--ov") == ["--oven-heat"]
    assert completions("--style", "r") == ["raw"]
    assert completions("--warm") == []


def test_declared_option_is_in_python() -> None:
    """The option is a keyword argument with its type and default, and the docstring explains it."""
    assert cook("soup", oven_heat=90) == 90
    parameter = inspect.signature(cook).parameters["oven_heat"]
    assert (parameter.default, parameter.annotation, parameter.kind) == (180, int, parameter.KEYWORD_ONLY)
    assert "oven_heat: Degrees of the oven. (default: 180)" in (inspect.getdoc(cook) or "")
    with pytest.raises(TypeError, match=r"^cook\(\) got .* 'oven_heet'. Did you mean 'oven_heat'\?"):
        cook("soup", oven_heet=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^cook\(\) missing 1 required positional argument: 'source'"):
        cook()  # type: ignore[call-arg]


def test_declared_option_is_checked_with_one_message() -> None:
    """The same message names the keyword in Python and the flag in the terminal, which adds a hint."""
    with pytest.raises(ArgumentError) as in_python:
        cook("soup", oven_heat=301)
    assert in_python.value.message == "oven_heat= takes a number from 1 to 300, not 301."
    with pytest.raises(ArgumentError) as in_terminal:
        typed("soup", "--oven-heat", "301")
    assert in_terminal.value.words == (
        "--oven-heat takes a number from 1 to 300, not 301.",
        "brim cook --help shows examples and options.",
    )
    with pytest.raises(ArgumentError, match="style= takes raw or done, not 'burnt'"):
        cook("soup", style="burnt")  # type: ignore[arg-type]


def test_deprecated_name_is_accepted_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """The earlier name works in Python and in the terminal, with a warning that names the current one."""
    with pytest.warns(DeprecationWarning, match="warmth= is now oven_heat="):
        assert cook("soup", warmth=70) == 70  # type: ignore[call-arg]
    assert typed("soup", "--warmth", "70").oven_heat == 70
    assert capsys.readouterr().err == "brim: --warmth is now --oven-heat.\n"


def test_declared_option_is_in_the_docs() -> None:
    """The table of the reference has the option's flag, keyword and help."""
    assert "| `--oven-heat N` | `oven_heat` | Degrees of the oven. (default: 180) |" in list(options_table(CookOptions))


def test_help_texts_fit_the_terminal_and_python() -> None:
    """In Python, help texts have no repetition or negated switches, but additional types and parameter names."""
    help_texts = {name: item.help for name, item in declared_options(CookOptions).items()}
    assert help_texts["salt"] == "Do not add salt."
    assert help_texts["spices"] == "Spice for DEST. May be repeated."
    docstring = inspect.getdoc(cook) or ""
    assert "salt: Add salt." in docstring
    assert "spices: Spice for `dish`. Or a dict of spices." in docstring
    assert "| `--spices SPICE` | `spices` | Spice for DEST. May be repeated. |" in list(
        options_table(CookOptions, in_python=["spices"])
    )


def test_options_have_one_order() -> None:
    """Help, signature and docstring list one panel after the other, with the common options first in each."""
    for function in (brim.build, brim.select, brim.verify):
        items = [item for item in declared_options(function.options).values() if item.is_keyword]  # type: ignore[attr-defined]
        assert items == sorted(items, key=lambda item: (PANELS.index(item.panel), not item.option.common))
        names = [
            name for name, each in inspect.signature(function).parameters.items() if each.kind == each.KEYWORD_ONLY
        ]
        assert names == [item.name for item in items]


def test_unexpected_argument_is_named() -> None:
    """A second value, such as the result of a glob without quotes, is refused with the solution."""
    with pytest.raises(InputError) as caught:
        typed("soup", "salad")
    assert caught.value.words[0] == "Unexpected argument 'salad'."
    assert "brim cook takes SOURCE" in caught.value.words[1]


def test_wrapped_command_keeps_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments of the wrapped command are not parsed, not even a deprecated name or --help-all."""
    observed: list[Any] = []
    wrapper = click_command("run", COOK._replace(run=observed.append, is_wrapper=True, options=_Wrapper))
    wrapper.main(["--oven-heat", "7", "x", "--warmth", "3", "--help-all"], "brim run", standalone_mode=False)
    assert (observed[0].oven_heat, observed[0].words) == (7, ("x", "--warmth", "3", "--help-all"))
    assert capsys.readouterr().err == ""


@dataclass(frozen=True, kw_only=True)
class _Wrapper(Options):
    words: Annotated[
        tuple[str, ...], declared_options(brim.build.options)["include"].kind, Option("", argument=True)
    ] = ()  # type: ignore[attr-defined]
    oven_heat: Annotated[int, Option("Degrees of the oven.", old="warmth")] = 180


def commands() -> list[str]:
    return list(EARLIER["commands"])


def command(path: str) -> click.Command:
    """Return the click command of `brim forecast map`."""
    name, _, subcommand = path.partition(" ")
    group = BrimGroup("brim")
    created = group.get_command(click.Context(group), name)
    assert created is not None
    return created.commands[subcommand] if isinstance(created, click.Group) else created


def test_every_command_is_looked_at() -> None:
    """The tests below cover exactly the existing commands."""
    assert {name.partition(" ")[0] for name in commands()} | {"help"} == set(COMMANDS)


@pytest.mark.parametrize("path", commands())
def test_help_fits_a_small_terminal(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The help of a command has at most 45 lines, and no line has more than 80 characters, also with --help-all."""
    monkeypatch.setenv("COLUMNS", "80")
    created: Any = command(path)
    context = click.Context(created, info_name=f"brim {path}")
    page = help_page(created, context, show_all=False).splitlines()
    assert len(page) <= 45
    assert not [line for line in [*page, *help_page(created, context, show_all=True).splitlines()] if len(line) > 80]
    assert len(created.command.examples) in (1, 2, 3)
    assert all(line.startswith("brim ") for line in created.command.examples)


@pytest.mark.parametrize("path", commands())
def test_help_names_what_help_all_adds(path: str) -> None:
    """The short help mentions --help-all exactly if that shows more; values of options are written as people type
    them."""
    created: Any = command(path)
    context = click.Context(created, info_name=f"brim {path}")
    short, full = (help_page(created, context, show_all=show_all) for show_all in (False, True))
    assert (f"brim {path} --help-all " in short.splitlines()[-1]) == (short != full)
    assert not re.search(r"--[a-z-]+=", re.sub("`[^`]*`", "", full.partition("Arguments:")[2]))


@pytest.mark.parametrize("path", commands())
def test_options_are_explained(path: str) -> None:
    """Every option has a help text that is a sentence and also true in Python; the docstring is complete."""
    created: Any = command(path)
    wrong = {
        name: item.option.help
        for name, item in created.declared.items()
        if not (item.option.help[:1].isupper() or item.option.help.startswith("datasets"))
        or item.option.help[-1] != "."
    }
    assert not wrong
    terminal_only = ("May be repeated", "in Python", "separated by commas")
    assert not [
        item.name for item in created.declared.values() if any(text in item.option.help for text in terminal_only)
    ]
    assert created.summary.endswith(".")
    assert all(text[0].isupper() or text.startswith("--") for text in created.command.details)


@pytest.mark.parametrize("path", commands())
def test_earlier_command_lines_are_accepted(path: str) -> None:
    """Every flag and argument of version 0.1 is accepted, and takes a value or none as before."""
    before, created = EARLIER["commands"][path], command(path)
    arguments = [param for param in created.params if isinstance(param, click.Argument)]
    options = [param for param in created.params if isinstance(param, click.Option)]
    assert len(arguments) >= len(before["arguments"])
    switches = {flag for param in options if param.is_flag for flag in (*param.opts, *param.secondary_opts)}
    values = {flag for param in options if not param.is_flag for flag in param.opts}
    assert set(before["switches"]) <= switches
    assert set(before["values"]) <= values


@pytest.mark.parametrize("name", EARLIER["functions"])
def test_earlier_calls_of_python_are_accepted(name: str) -> None:
    """Every parameter of version 0.1 is accepted at its position and with its default, possibly under an old name."""
    function: Any = getattr(brim, name)
    renamed = old_names(function.options) if hasattr(function, "options") else {}
    parameters = inspect.signature(function).parameters
    for position, (parameter, kind, default) in enumerate(EARLIER["functions"][name]):
        if kind == "any":
            assert any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            continue
        present = parameters[renamed.get(parameter, parameter)]
        if kind == "position":
            assert list(parameters).index(present.name) == position
            assert present.kind is present.POSITIONAL_OR_KEYWORD
        shown = "required" if present.default is inspect.Parameter.empty else repr(present.default)
        empty = ("None", "()", "False")
        assert shown == default or (shown in empty and default in empty), parameter


@pytest.mark.parametrize(
    "name", ["build", "check", "clean", "info", "plan", "select", "unpack", "verify", "watch", "why"]
)
def test_docstrings_explain_every_keyword(name: str) -> None:
    """help() has a summary line, every keyword, the return value, and an example."""
    function: Any = getattr(brim, name)
    text = inspect.getdoc(function) or ""
    assert text.splitlines()[0].endswith((".", ":"))
    assert all(f"{keyword}: " in text for keyword in inspect.signature(function).parameters)
    assert "Args:" in text
    assert "Returns:" in text
    assert "Examples:" in text


def test_public_members_have_docstrings() -> None:
    """help() of a public class explains every method and property."""
    missing = []
    for name in brim.__all__:
        kind = getattr(brim, name)
        for member in dir(kind) if inspect.isclass(kind) else ():
            raw = inspect.getattr_static(kind, member)
            function = getattr(raw, "fget", None) or getattr(raw, "func", None) or getattr(raw, "__func__", raw)
            is_public = inspect.isfunction(function) and not member.startswith("_")
            if is_public and not inspect.getdoc(getattr(kind, member)):
                missing.append(f"{name}.{member}")
    assert not missing


def test_largest_cell_is_that_of_the_format() -> None:
    """`brim.check` declares its limit without loading the format."""
    assert inspect.signature(brim.check).parameters["max_cell_bytes"].default == MAX_CELL_BYTES
