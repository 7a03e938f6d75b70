"""brim plan: what would be built."""

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from brim.cli.flags import (
    BidsFlags,
    CuttingFlags,
    MaybeSource,
    PublishingFlags,
    ReadingFlags,
    RunningFlags,
    ShowingFlags,
    StoringFlags,
)
from brim.cli.show import emit, print_lines, waiting_for
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


def opened(plan: str, running: RunningFlags, storing: StoringFlags, root: str | None, **more: Any) -> Any:
    """The saved plan, as this machine works on it. Of what `storing` says, only the store of PLAN is free."""
    refuse_given(None, None, (dataclasses.replace(storing, endpoint_url=None),), {})
    import brim

    return brim.open_plan(plan, root=root, endpoint_url=storing.endpoint_url, **vars(running), **more)


def _opened_any(plan: str, running: RunningFlags, storing: StoringFlags, root: str | None) -> Any:
    """A saved plan of whichever verb."""
    from brim.buckets.bucket_address import Access
    from brim.jobs.plan_place import is_job_plan, open_place

    if not is_job_plan(open_place(plan, Access(storing.endpoint_url)).path):
        return opened(plan, running, storing, root)
    from brim.api.job_options import RunningGiven
    from brim.api.saved_jobs import no_caller, opened_job

    refuse_given(None, None, (dataclasses.replace(storing, endpoint_url=None),), {})
    if root is not None:
        raise InputError("--root is for plans of brim build.", hint="Have the source under the same path everywhere.")
    return opened_job(plan, Access(storing.endpoint_url), RunningGiven(**vars(running)), no_caller)


def _tell_saved(found: Any, missing: int | None, as_json: bool) -> None:
    """How far a saved plan is; or the parts that it lacks, and nothing else."""
    if missing is not None:
        from brim.jobs.plan_place import listed

        typer.echo(listed(found.status.lacking(missing)).replace(" ", ""))
    elif as_json:
        emit("plan", **found.facts)
    else:
        print_lines(found.lines)


HELP = """Show what would be built, how big it is, and whether it fits.

Looks at every file (none is read whole) and prints rows, bytes as they really are, the shards, and the
memory a build takes. Nothing is built. Exits 2 if `brim build` would refuse a file.

--save writes the plan to a file, from which `brim build --plan` works in parts on many machines;
--plan shows such a plan and how far it is.

[bold]Examples[/bold]

  brim plan scans/
  brim plan scans.csv --files t1w:nifti --shard-size 1GB
  brim plan photos/ out/ --label-from parent --json
  brim plan ds004884/ --save-recipe arc-columns.toml
  brim plan ds004884/ hf://datasets/me/arc --save shared/arc.plan
  brim plan --plan shared/arc.plan
  sbatch --array=$(brim plan --plan shared/arc.plan --missing 100) …
  brim plan s3://openneuro.org/ds004884 --recipe arc --anonymous
"""


def planned(
    source: str,
    dest: str | None,
    reading: ReadingFlags,
    bids: BidsFlags,
    cutting: CuttingFlags,
    storing: StoringFlags,
    running: RunningFlags,
    runs: bool = False,
    **more: Any,
) -> Any:
    """The library's plan for what the command line says. `brim build` `runs` the same."""
    from brim.api import build_api
    from brim.api.job_options import BuildGiven

    words = {**vars(reading), **bids.words, **vars(cutting), **vars(storing), **vars(running), **more}
    with waiting_for(source):
        return build_api.planned(source, dest, BuildGiven(**words), runs=runs)


def show(build: Any, as_json: bool) -> None:
    """Print a plan; FilesRefused (exit 2) if building it would refuse a file."""
    if as_json:
        emit("plan", **build.facts)
    else:
        print_lines(build.lines)
    build.check_plan()


def plan(
    reading: ReadingFlags,
    bids: BidsFlags,
    cutting: CuttingFlags,
    publishing: PublishingFlags,
    storing: StoringFlags,
    running: RunningFlags,
    showing: ShowingFlags,
    source: MaybeSource = None,
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="DEST", help="Where it would be built: a folder, hf://datasets/ORG/NAME, or s3://BUCKET/PREFIX."
        ),
    ] = None,
    save_recipe: Annotated[
        str | None,
        typer.Option("--save-recipe", metavar="FILE.toml", help="Write the columns found, so that later builds agree."),
    ] = None,
    save: Annotated[
        str | None, typer.Option("--save", metavar="PLAN", help="Write the plan to a file for brim build --plan.")
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="The rows come behind those at DEST.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="With --save: what the repository holds may be replaced.")
    ] = False,
    saved: PlanOption = None,
    missing: Annotated[
        int | None,
        typer.Option(
            "--missing",
            metavar="N",
            min=1,
            max=99_999,
            help="With --plan: print those of N parts that are not done, like 3,7-9, and nothing else.",
        ),
    ] = None,
) -> None:
    if saved is not None:
        more = {"save": save, "save_recipe": save_recipe, "update": update, "append": append}
        refuse_given(source, dest, (reading, bids, cutting, publishing), more)
        _tell_saved(_opened_any(saved, running, storing, reading.root), missing, showing.json)
        return
    if missing is not None:
        raise InputError("--missing needs a plan that was saved.", hint="Give --plan PLAN.")
    job = planned(
        need(source), dest, reading, bids, cutting, storing, running, **vars(publishing), update=update, append=append
    )
    if save_recipe is not None:
        job.save_recipe(save_recipe)
    show(job, showing.json)
    if save is None:
        return
    job.save(save)
    if showing.json:
        emit("saved", path=save, fingerprint=job.plan.fingerprint)
    else:
        part = shlex.join(["brim", "build", "--plan", save, "--part"])
        width = max(len(label) for label, _ in job.lines)
        print_lines([("saved", save), ("next", f"{part} I/N  (I from 1 to N, on any machine)")], width)
