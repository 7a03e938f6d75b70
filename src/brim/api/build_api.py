"""Files and rows as they are: planned, built, chosen from, and done in parts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from brim.api.job_options import (
    BuildGiven,
    BuildKeywords,
    Running,
    RunningGiven,
    SelectGiven,
    SelectKeywords,
    SourceGiven,
    as_text,
    changed,
    spelled_out,
)
from brim.api.recorded_run import recorded_run, shown
from brim.api.source_api import Source, chosen
from brim.buckets.bucket_address import Access
from brim.errors import InputError
from brim.jobs.build_job import Build
from brim.jobs.job import Built
from brim.jobs.spec import heard_while_reading
from brim.progress import Progress
from brim.sources.file_table import FileTable
from brim.sources.open_source import read_source
from brim.sources.selection import Selection

if TYPE_CHECKING:
    from brim.jobs.parts import SavedBuild


@spelled_out(BuildGiven)
def plan(source: Source, destination: str | os.PathLike[str] | None = None, **options: Unpack[BuildKeywords]) -> Build:
    """What building `source` at `destination` would do. Print it to see, `run()` it to do it, `save()` it for others.

    The source is a path, or what `files`, `bids`, `table` and `dataset` make of one; `files` to `bidsignore` say how a
    path is read. The destination is a folder, hf://datasets/ORG/NAME[@BRANCH] or s3://BUCKET/PREFIX; `config` to `via`
    are for the Hub. With `strict`, counts that are not what the recipe expects and data that no column takes are
    errors. A bucket is reached at `endpoint_url`, one that is the source at `source_endpoint_url` if it is in another
    store; `anonymous` reads it without credentials. With engine="ray" shards are made by a running Ray at `address`.
    `stop` is a `brim.Stop` by which another thread can end the run.
    """
    return planned(source, destination, BuildGiven(**options), runs=False)


def planned(source: Source, destination: str | os.PathLike[str] | None, given: BuildGiven, *, runs: bool) -> Build:
    """The plan of what was said. One that `runs` is refused where a stop file lies; others only show what would be."""
    how = given.options  # what was said is looked at before the source is
    if isinstance(source, FileTable | Selection) and (said := changed(given, SourceGiven)):
        raise InputError(
            f"--{said[0].replace('_', '-')} says how a path is read, and this source is read already.",
            hint="Say it where the source is made: brim.files, brim.bids, brim.table or brim.dataset.",
        )
    with heard_while_reading(destination if runs else None, how):
        if isinstance(source, FileTable | Selection):
            read = source.table() if isinstance(source, Selection) else source
        else:
            read = read_source(source, given.source_options(given.source_access))
        made = Build(read, destination, how)
    made.watch = shown
    return made


@spelled_out(BuildGiven)
def build(
    source: Source,
    destination: str | os.PathLike[str],
    *,
    progress: Progress | bool | None = None,
    report: str | os.PathLike[str] | None = None,
    **options: Unpack[BuildKeywords],
) -> Built:
    """Plan and run in one step; the options are those of `plan`. `report` is a page about the run, FILE.html."""
    return _run(planned(source, destination, BuildGiven(**options), runs=True), progress, report)


@spelled_out(SelectGiven)
def select(
    source: Any,
    destination: str | os.PathLike[str],
    *,
    where: str | None = None,
    sql: str | None = None,
    columns: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    sort_by: str | Sequence[str] = (),
    shuffle: int | None = None,
    sample: int | str | None = None,
    limit: int | None = None,
    unique: str | None = None,
    split_into: str | Mapping[str, float] | None = None,
    group_by: str | None = None,
    also: Any = (),
    from_config: str | None = None,
    from_split: str | None = None,
    progress: Progress | bool | None = None,
    report: str | os.PathLike[str] | None = None,
    **options: Unpack[SelectKeywords],
) -> Built:
    """Build what is chosen of a dataset at `destination`; the options are those of `plan` beside these.

    Rows are joined (`also`), chosen (`where`, `sql`), then `unique`, `sample`, `sort_by` or `shuffle`, `limit` and
    `split_into` are done in this order; `columns` and `drop` say what of them is taken.
    """
    given = SelectGiven(**options)
    how = given.options
    with heard_while_reading(destination, how):
        rows = chosen(
            source, given.source_access, where=where, sql=sql, columns=columns, drop=drop, sort_by=sort_by,
            shuffle=shuffle, sample=sample, limit=limit, unique=unique, split_into=split_into, group_by=group_by,
            also=also, from_config=from_config, from_split=from_split,
        )  # fmt: skip
        job = Build(rows.table(), destination, how)
    return _run(job, progress, report)


@spelled_out(RunningGiven)
def open_plan(
    path: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    endpoint_url: str | None = None,
    **options: Unpack[Running],
) -> SavedBuild:
    """A plan that was saved, as this machine works on it: `part("3/100")` brings a part, `finish()` publishes what all
    parts brought, `run()` does all that is missing, `status` tells how far it is.

    `root` is where the source is on this machine, `endpoint_url` the store that the plan itself is in. A plan of map,
    tokenize or embed is opened by `open_job`.
    """
    given, access = RunningGiven(**options), Access(endpoint_url)
    from brim.jobs.parts import SavedBuild, SavedOptions  # a build that is not saved has no use for them
    from brim.jobs.plan_place import is_job_plan, open_place

    if is_job_plan(open_place(path, access).path):
        raise InputError(
            f"{os.fspath(path)!r} is a plan of map, tokenize or embed.",
            hint="Open it with brim.open_job; in the terminal with --plan of that verb.",
        )
    saved = SavedBuild(path, SavedOptions(**given.running, root=as_text(root), access=access))
    saved.watch = shown
    return saved


def _run(job: Build, progress: Progress | bool | None, report: str | os.PathLike[str] | None) -> Built:
    with recorded_run(shown(progress), report, job.limit, job.takes) as watched:
        return job.run(watched)
