"""One word, one meaning: a flag says the same whichever verb it stands with."""

from __future__ import annotations

from collections import defaultdict

import typer

from brim.cli.parser import make_app

# Kept for command lines that have them; each has a word of its own beside it.
FORMER = {("--split", "tokenize")}  # --split-into
# The same thing, of which each verb has its own kinds.
KINDS = {"--format", "--dtype", "--drop", "--log"}
WRITES = {"plan", "check", "build", "select", "map", "tokenize", "embed"}
READS = {"plan", "check", "info", "build", "select", "verify", "unpack", "map", "tokenize", "embed"}


def flags() -> dict[str, dict[str, tuple[str, bool]]]:
    """By flag and verb: what it takes, and whether it takes anything."""
    found: dict[str, dict[str, tuple[str, bool]]] = defaultdict(dict)
    command = typer.main.get_command(make_app())
    for verb, made in command.commands.items():  # type: ignore[attr-defined]
        for parameter in made.params:
            for name in parameter.opts:
                if name.startswith("--"):
                    takes = (parameter.metavar or "").strip()
                    found[name][verb] = (takes, bool(getattr(parameter, "is_flag", False)))
    return found


def test_a_flag_takes_the_same_with_every_verb() -> None:
    """What a flag takes (NAME, SIZE, ROWS, nothing) is what it means in short: it is one thing for all verbs."""
    for name, verbs in flags().items():
        told = {takes for verb, takes in verbs.items() if (name, verb) not in FORMER}
        assert len(told) == 1 or name in KINDS, (name, verbs)


def test_what_is_read_and_what_is_written() -> None:
    """--config and --split name what is written, --from-config and --from-split what is read, and every verb that reads
    a dataset has these."""
    known = flags()
    assert set(known["--split"]) | set(known["--config"]) <= WRITES
    assert set(known["--from-config"]) == set(known["--from-split"]) == READS
    assert set(known["--split-into"]) == {"select", "tokenize"}
