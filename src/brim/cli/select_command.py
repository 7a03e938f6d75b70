"""brim select: choose rows of a dataset and build them."""

import shlex
from typing import Annotated, Any

import typer

from brim.cli.flags import (
    DESTINATIONS,
    CuttingFlags,
    FromFlags,
    KeepingFlags,
    LiveFlags,
    PublishingFlags,
    RunningFlags,
    ScalingFlags,
    SelectingFlags,
    ShowingFlags,
    StoringFlags,
    WatchingFlags,
    all_true,
    split_names,
)
from brim.cli.plan_command import show
from brim.cli.show import emit, followed, loading, memory_held, print_lines, waiting_for
from brim.memory.peak import PeakSampler

HELP = """Filter, sort, shuffle, split, join or re-shard what is a dataset already, without holding it.

Rows are chosen by their small columns; the large values of the new shards are ranges of the old ones. So it takes as
much memory as a build, and about as long as a copy of what is chosen. SOURCE is a folder or a glob of Parquet shards
or WebDataset tars, hf://datasets/ORG/NAME\\[@REVISION], s3://BUCKET/PREFIX or an https address: from far away, only
what was chosen is fetched. DEST is what brim build takes, and never the source.

--where is Python's syntax with SQL's nulls: age > 40 and sex == "F"; subject in \\["M1", "M2"]; "x" in tags;
seen >= "2024-01-31"; site is not None; name.lower().startswith("a"); image.path.endswith(".png").

[bold]Examples[/bold]

  brim select hf://datasets/me/arc women/ --where 'age > 40 and sex == "F"'
  brim select arc/ shuffled/ --shuffle 7 --shard-size 1GB
  brim select arc/ parts/ --split-into train=0.9,test=0.1 --group-by subject_id
  brim select one/ both/ --also two/ --also 'more/*.parquet' --columns image,label
  brim select arc/ pilot/ --sample 1% --unique content --dry-run
"""


def select(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The dataset that rows are chosen from.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help=DESTINATIONS)],
    reading: FromFlags,
    selecting: SelectingFlags,
    cutting: CuttingFlags,
    publishing: PublishingFlags,
    storing: StoringFlags,
    running: RunningFlags,
    scaling: ScalingFlags,
    keeping: KeepingFlags,
    showing: ShowingFlags,
    watching: WatchingFlags,
    live: LiveFlags,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: remove what an earlier run left.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Bring DEST up to date; keep unchanged shards.")] = False,
    append: Annotated[
        bool,
        typer.Option("--append", help="Add the rows behind those at DEST, as new shards; nothing else is read there."),
    ] = False,
    stop_file: Annotated[
        str | None, typer.Option("--stop-file", metavar="FILE", help="Stop cleanly when this file appears.")
    ] = None,
    report: Annotated[
        str | None, typer.Option("--report", metavar="FILE.html", help="A page about the run: memory, shards, notes.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan, and what would be read.")] = False,
) -> None:
    import brim
    from brim.api.job_options import SelectGiven
    from brim.api.source_api import chosen
    from brim.jobs.spec import heard_while_reading

    query = {**vars(selecting), **vars(reading)}
    query |= {name: split_names(query[name]) for name in ("columns", "drop", "sort_by")}
    query["where"] = all_true(selecting.where)
    options: dict[str, Any] = {
        **vars(cutting), **vars(running), **vars(publishing), **vars(scaling), **vars(storing), **vars(keeping),
        "fresh": fresh, "update": update, "append": append, "stop_file": stop_file,
    }  # fmt: skip
    given = SelectGiven(**options)
    with PeakSampler() as sampler:
        with waiting_for(source), heard_while_reading(None if dry_run else dest, given.options):
            rows = chosen(source, given.source_access, **query)
            job = brim.plan(rows, dest, **options)
        if dry_run:
            show(job, showing.json)
            return
        about: dict[str, Any] = {"limit": job.limit, "report": report, "takes": job.takes, "stop_file": job.stop_file}
        with followed(showing, watching, live, **about) as progress:
            for warning in job.plan.table.warnings:
                progress.note(warning)
            result = job.run(progress)
    splits = job.plan.table.splits
    if showing.json:
        told = {split.name: split.stop - split.start for split in splits}
        facts = {name: getattr(result, name) for name in result.__slots__}
        emit("done", **facts, splits=told, query=dict(job.plan.table.query))
        return
    built, holds, *rest = result.lines
    counted = [("splits", ", ".join(f"{s.name} {s.stop - s.start:,}" for s in splits))] if len(splits) > 1 else []
    lines = [("selected", dict(job.plan.table.query)["chosen"]), built, holds, *counted, *rest]
    lines += memory_held(progress, job.limit.bytes, sampler.peak_bytes)
    if job.plan.format == "parquet":
        lines.append(
            ("load", loading(dest, publishing.config, (s.split for s in job.plan.shards), storing.endpoint_url))
        )
    lines.append(("prove", shlex.join(["brim", "verify", dest])))
    print_lines(lines)
