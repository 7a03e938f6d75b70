"""brim plan: show the plan of a build, or the progress of a saved plan."""

import shlex
from typing import Annotated, Any

from brim.cli.command import Command
from brim.cli.print_output import emit, print_lines, waiting_for
from brim.errors import InputError
from brim.options.build_options import PlanOptions
from brim.options.declare import PARTS, Common, Option, Path
from brim.options.groups import JsonOptions, RunOptions
from brim.records import dataclass
from brim.storage.location import Access


@dataclass(frozen=True, kw_only=True)
class PlanCommand(JsonOptions, PlanOptions, panel=PARTS):
    """`brim plan SOURCE [DEST]`.

    Examples:
        brim plan scans/
        brim plan scans.csv --files t1w:nifti --shard-size 1GB
        brim plan ds004884/ hf://datasets/me/arc --save shared/arc.plan

    Lists the files without reading them, and prints the rows, size, shards and memory of a build. Nothing is
    written. Exits with 2 if `brim build` would refuse a file.

    --save writes the plan to a file. `brim build --plan` then works on it in parts, on many machines; --plan shows
    such a plan and its progress: sbatch --array=$(brim plan --plan shared/arc.plan --list-missing 100) …
    """

    save: Annotated[Path | None, Common("Write the plan to a file, for brim build --plan.", "PLAN")] = None
    save_recipe: Annotated[
        Path | None, Option("Write the columns that were found as a recipe, for later builds.", "FILE.toml")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ShowPlanCommand(JsonOptions, RunOptions, panel=PARTS):
    """`brim plan --plan PLAN`."""

    plan: Annotated[Path, Common("Show this saved plan and its progress.", "PLAN")]
    list_missing: Annotated[
        int | None,
        Option(
            "With --plan: print which of N parts are not done, such as 3,7-9, and nothing else.",
            "N", minimum=1, maximum=99_999, old="missing",
        ),
    ] = None  # fmt: skip
    root: Annotated[Path | None, Option("Folder of the source on this machine.", "DIR")] = None
    endpoint_url: Annotated[str | None, Option("Address of the object store of PLAN.", "URL")] = None


def run(options: PlanCommand | ShowPlanCommand) -> None:
    if isinstance(options, ShowPlanCommand):
        _show_saved(options)
        return
    from brim.api.build_api import make_build_plan

    with waiting_for(str(options.source)):
        job = make_build_plan(options, runs=False)
    if options.save_recipe is not None:
        job.save_recipe(options.save_recipe)
    show_plan(job, options.json)
    if options.save is None:
        return
    job.save(options.save)
    if options.json:
        emit("saved", path=options.save, fingerprint=job.plan.fingerprint)
        return
    part = shlex.join(["brim", "build", "--plan", str(options.save), "--part"])
    width = max(len(label) for label, _ in job.lines)
    print_lines([("saved", str(options.save)), ("next step", f"{part} I/N  (I from 1 to N, on any machine)")], width)


def show_plan(job: Any, as_json: bool) -> None:
    """Print a plan; raise InvalidFilesError (exit 2) if building it would refuse a file."""
    if as_json:
        emit("plan", **job.facts)
    else:
        print_lines(job.lines)
    job.check_plan()


def _show_saved(options: ShowPlanCommand) -> None:
    from brim.api.build_api import open_plan
    from brim.jobs.plan_storage import is_job_plan, listed, open_place

    running = options.values(RunOptions)
    saved: Any
    if is_job_plan(open_place(options.plan, Access(options.endpoint_url)).path):
        if options.root is not None:
            raise InputError(
                "--root can only be used with a plan of brim build.",
                hint="Use the same path for the source everywhere.",
            )
        from brim.api.saved_jobs import open_job  # not needed for builds, so not imported for them

        saved = open_job(options.plan, endpoint_url=options.endpoint_url, **running)
    else:
        saved = open_plan(options.plan, root=options.root, endpoint_url=options.endpoint_url, **running)
    if options.list_missing is not None:
        print(listed(saved.status.lacking(options.list_missing)).replace(" ", ""))
    elif options.json:
        emit("plan", **saved.facts)
    else:
        print_lines(saved.lines)


COMMAND = Command(PlanCommand, run, saved=ShowPlanCommand)
