"""What `brim plan` and `brim build` share about plans that were saved."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from brim.cli.options import Running, Storing
from brim.errors import InputError

PlanOption = Annotated[
    str | None,
    typer.Option("--plan", metavar="PLAN", help="A plan that was saved, in place of SOURCE and DEST."),
]
_ALLOWED = ("root",)  # where the source is on this machine


def need(argument: str | None, name: str = "SOURCE") -> str:
    """An argument that only a saved plan can stand for."""
    if argument is None:
        raise InputError(f"{name} is missing.", hint="Give SOURCE and DEST, or --plan PLAN.")
    return argument


def refuse_given(source: str | None, dest: str | None, groups: Sequence[Any], more: Mapping[str, Any]) -> None:
    """InputError if what the saved plan says already is said again."""
    given = [name for name, value in (("SOURCE", source), ("DEST", dest)) if value is not None]
    named = {f.name: getattr(group, f.name) != f.default for group in groups for f in fields(group)}
    named |= {name: bool(value) for name, value in more.items()}
    given += [f"--{name.replace('_', '-')}" for name, is_given in named.items() if is_given and name not in _ALLOWED]
    if given:
        raise InputError(
            f"{', '.join(given)} cannot go with --plan: the plan says what is built, from what and where.",
            hint="Leave it out, or save another plan.",
        )


def opened(plan: str, running: Running, storing: Storing, root: str | None, **more: Any) -> Any:
    """The saved plan, as this machine works on it. Of what `storing` says, only the store of PLAN is free."""
    refuse_given(None, None, (dataclasses.replace(storing, endpoint_url=None),), {})
    from brim.engine.parts import SavedBuild, SavedOptions

    return SavedBuild(plan, SavedOptions(running.memory, running.workers, root=root, access=storing.dest, **more))
