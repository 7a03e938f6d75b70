"""A flag has the same meaning and values in every command."""

from __future__ import annotations

import importlib
from collections import defaultdict

from brim.cli.commands import COMMANDS
from brim.options.declare import PARTS, Declared, declared_options

# The same concept, with kinds that differ between commands.
KINDS = {"--format", "--dtype", "--drop", "--log", "--prompt"}
# Options of a step in one command, and of the output in another.
SEVERAL_PANELS = {
    "--shuffle",
    "--split-into",
    "--batch-size",
    "--dtype",
    "--column",
    "--keep-columns",
    "--prompt",
    "--report",
    "--stop-file",
}
WRITES = {"plan", "check", "build", "select", "map", "tokenize", "embed"}
READS = {"plan", "check", "info", "build", "select", "verify", "unpack", "map", "tokenize", "embed"}


def flags() -> dict[str, dict[str, Declared]]:
    """Return the declarations by flag and command; subcommands of experiments and estimates count separately."""
    actual: dict[str, dict[str, Declared]] = defaultdict(dict)
    for name in COMMANDS:
        if name == "help":
            continue
        module = importlib.import_module(f"brim.cli.{name}_command")
        for item in declared_options(module.COMMAND.options).values() if hasattr(module, "COMMAND") else ():
            for flag in "/".join(item.flags).split("/") if item.option.cli and not item.option.argument else ():
                actual[flag][name] = item
    return actual


def test_a_flag_takes_the_same_value_with_every_command() -> None:
    """The placeholder of a flag (NAME, SIZE, ROWS, none) is the same in all commands."""
    for flag, commands in flags().items():
        metavars = {None if item.is_switch else item.metavar for item in commands.values()}
        assert len(metavars) == 1 or flag in KINDS, (flag, metavars)


def test_a_flag_has_one_name_in_python() -> None:
    """A flag has the same keyword argument in every function; --deep of check is another name of --all."""
    for flag, commands in flags().items():
        names = {item.name for name, item in commands.items() if (flag, name) not in {("--deep", "check")}}
        assert len(names) == 1 or flag == "--log", (flag, names)


def test_a_flag_has_one_panel() -> None:
    """A flag is in the same group of --help-all with every command that has groups."""
    for flag, commands in flags().items():
        panels = {item.panel for name, item in commands.items() if item.panel not in ("", PARTS)}
        assert len(panels) <= 1 or flag in SEVERAL_PANELS, (flag, panels)


def test_names_of_what_is_read_and_what_is_written() -> None:
    """--config and --split name the written dataset, --from-config and --from-split the one that is read."""
    known_values = flags()
    assert set(known_values["--split"]) | set(known_values["--config"]) <= WRITES
    assert set(known_values["--from-config"]) == set(known_values["--from-split"]) == READS
    assert set(known_values["--split-into"]) == {"select", "tokenize"}
