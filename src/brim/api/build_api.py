"""plan, build, select and open_plan: files and rows packaged into shards."""

from typing import Any

from brim.api.recorded_run import recorded_run, shown
from brim.api.source_api import opened_table, source_options
from brim.errors import InputError
from brim.jobs.build_job import BuildPlan, BuildSettings
from brim.jobs.plan_storage import is_job_plan, open_place
from brim.jobs.preflight import job_settings, stopping_while_reading
from brim.jobs.results import BuildResult
from brim.jobs.saved_plans import SavedBuild, SavedSettings
from brim.options.build_options import (
    BuildOptions,
    OpenPlanOptions,
    PlanOptions,
    QueryOptions,
    ReadFilesOptions,
    SelectOptions,
)
from brim.options.declare import shared_values, takes
from brim.sources.open_source import read_source, select_rows
from brim.storage.location import Access


@takes(PlanOptions)
def plan(options: PlanOptions) -> BuildPlan:
    """Plan a build: print the plan to see it, `run()` it, or `save()` it for several machines.

    Nothing is written. `rows`, `bytes` and `shards` are attributes of the plan.

    Returns:
        The plan.

    Raises:
        SourceError: The source cannot be read as rows.
        MemoryLimitError: Not even one shard fits the limit.

    Examples:
        >>> brim.plan("photos", memory="500MB").rows
        2
    """
    return make_build_plan(options, runs=False)


@takes(BuildOptions)
def build(options: BuildOptions) -> BuildResult:
    """Package files into shards at a destination.

    A build that was interrupted resumes: shards that have a receipt are skipped.

    Returns:
        The shards, rows and bytes that were written; print it for a summary.

    Raises:
        SourceError: The source cannot be read as rows.
        InvalidFilesError: Files are missing, empty, unreadable or too large.
        PlanMismatchError: The destination contains another dataset.
        MemoryLimitError: Not even one shard fits the limit.

    Examples:
        >>> brim.build("photos", "out", memory="500MB", label_from="parent", progress=False).rows
        2
    """
    return _run(make_build_plan(options, runs=True), options)


@takes(SelectOptions)
def select(options: SelectOptions) -> BuildResult:
    """Choose rows and columns of a dataset and write them to a destination.

    The steps run in this order: concat, where or sql, distinct, sample, sort_by or shuffle, limit, split_into; columns
    and drop come last.

    Returns:
        The shards, rows and bytes that were written; print it for a summary.

    Raises:
        SourceError: The source is not a dataset.
        InputError: A condition or a column is wrong.

    Examples:
        >>> brim.select("published", "cats", where='label == "cat"', memory="500MB", progress=False).rows
        1
    """
    return _run(make_select_plan(options, runs=True), options)


@takes(OpenPlanOptions)
def open_plan(options: OpenPlanOptions) -> SavedBuild:
    """Open a saved plan of a build: `part("3/100")`, `finish()`, `run()` and `status`.

    A plan of map, tokenize or embed is opened by `brim.open_job`.

    Returns:
        The saved plan.

    Raises:
        InputError: The file is not a plan of a build.

    Examples:
        >>> brim.plan("photos", "shared", memory="500MB").save("photos.plan")
        >>> brim.open_plan("photos.plan").part("1/2").parts
        2
    """
    access = Access(options.endpoint_url)
    if is_job_plan(open_place(options.path, access).path):
        raise InputError(
            f"{str(options.path)!r} is a plan of map, tokenize or embed.",
            hint="Open it with brim.open_job; in the terminal with --plan of that command.",
        )
    root = None if options.root is None else str(options.root)
    saved = SavedBuild(options.path, SavedSettings(**shared_values(SavedSettings, options), root=root, access=access))
    saved.watch = shown
    return saved


def make_build_plan(options: PlanOptions, *, runs: bool) -> BuildPlan:
    """Plan a build. One that `runs` is refused while its stop file exists; others only show what would be done."""
    settings = job_settings(BuildSettings, options)
    with stopping_while_reading(options.destination if runs else None, settings):
        table = opened_table(options, ReadFilesOptions)
        if table is None:
            table = read_source(options.source, source_options(options))
        plan = BuildPlan(table, options.destination, settings)
    plan.watch = shown
    return plan


def make_select_plan(options: SelectOptions, *, runs: bool) -> BuildPlan:
    """Plan what a selection writes."""
    settings = job_settings(BuildSettings, options)
    access = Access(options.source_endpoint_url or options.endpoint_url, options.anonymous)
    with stopping_while_reading(options.destination if runs else None, settings):
        rows = select_rows(options.source, options.only(QueryOptions), options.from_config, options.from_split, access)
        return BuildPlan(rows.table(), options.destination, settings)


def _run(job: BuildPlan, options: Any) -> BuildResult:
    with recorded_run(shown(options.progress), options.report, job.limit, job.takes) as progress:
        return job.run(progress)
