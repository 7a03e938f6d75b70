"""brim select: choose rows of a dataset and write them."""

import shlex
from typing import Annotated

from brim.cli.command import Command
from brim.cli.plan_command import show_plan
from brim.cli.print_output import emit, memory_held, print_lines, show_progress, waiting_for
from brim.memory.peak import PeakSampler
from brim.options.build_options import SelectOptions
from brim.options.declare import Common
from brim.options.groups import ShowOptions
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class SelectCommand(ShowOptions, SelectOptions, panel="Run"):
    """`brim select SOURCE DEST`.

    Examples:
        brim select hf://datasets/me/arc women/ --where 'age > 40 and sex == "F"'
        brim select arc/ parts/ --split-into train=0.9,test=0.1 --group-by subject_id
        brim select one/ both/ --concat two/ --columns image,label --shuffle 7

    Rows are selected by their small columns; large values are copied as byte ranges of the old shards. So a
    selection uses as much memory as a build and takes about as long as copying the selected rows. Of a remote
    dataset, only the selected rows are downloaded.

    --where has the syntax of Python and the null rules of SQL: age > 40 and sex == "F"; subject in ["M1", "M2"]; "x"
    in tags; seen >= "2024-01-31"; site is not None; name.lower().startswith("a"); image.path.endswith(".png").
    Several conditions must all be true.

    The steps run in this order: concat, where or sql, distinct, sample, sort-by or shuffle, limit, split-into;
    columns and drop come last. Random choices use the seed of --shuffle, or 0.
    """

    dry_run: Annotated[bool, Common("Only show the plan and how much would be read.")] = False


def run(options: SelectCommand) -> None:
    from brim.api.build_api import make_select_plan
    from brim.jobs.results import load_dataset

    destination = str(options.destination)
    with PeakSampler() as sampler:
        with waiting_for(str(options.source)):
            job = make_select_plan(options, runs=not options.dry_run)
        if options.dry_run:
            show_plan(job, options.json)
            return
        with show_progress(
            options, limit=job.limit, report=options.report, takes=job.takes, stop_file=job.stop_file
        ) as progress:
            for warning in job.plan.table.warnings:
                progress.note(warning)
            result = job.run(progress)
    splits = {split.name: split.stop - split.start for split in job.plan.table.splits}
    query = dict(job.plan.table.query)
    if options.json:
        emit("done", **result.as_dict(), splits=splits, query=query)
        return
    first, second, *remaining = result.lines
    counts = [("splits", ", ".join(f"{name} {rows:,}" for name, rows in splits.items()))] if len(splits) > 1 else []
    lines = [("selected", query["chosen"]), first, second, *counts, *remaining]
    lines += memory_held(progress, job.limit.bytes, sampler.peak_bytes)
    if job.plan.format == "parquet":
        names = (shard.split for shard in job.plan.shards)
        lines.append(("load", load_dataset(destination, options.config, names, options.endpoint_url)))
    print_lines([*lines, ("verify with", shlex.join(["brim", "verify", destination]))])


COMMAND = Command(SelectCommand, run)
