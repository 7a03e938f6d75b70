"""brim map: a function over rows, within a limit."""

from typing import Annotated

import typer

from brim.cli.compute_flags import is_saved, need, run_job, run_saved, start_worker, tell, tell_saved, words_of
from brim.cli.flags import (
    DESTINATIONS,
    ComputingFlags,
    KeepingFlags,
    LiveFlags,
    Many,
    PartFlags,
    PublishingFlags,
    RowFlags,
    RunningFlags,
    ScalingFlags,
    ShowingFlags,
    StoringFlags,
    WatchingFlags,
)
from brim.cli.show import loading, waiting_for

HELP = """Apply a function to every row (or batch) of SOURCE, and write the results to DEST.

SOURCE is JSONL, CSV, TSV, Parquet, Arrow or text (also .gz and .zst), a folder or a glob of them, also in a bucket
(s3://BUCKET/PREFIX), or a folder that `datasets` has saved. The function takes and returns what it would for
`Dataset.map`. Workers are as many as fit the limit. Work that runs out of memory is tried again with more room, then
in smaller pieces where that cannot change the result. Run the same command again after a crash, a kill or Ctrl-C:
finished units are not done again.

[bold]Examples[/bold]

  brim map docs.jsonl out/ --fn mymodule:clean --memory 4GB
  brim map 'logs/*.jsonl.zst' out/ --fn steps.py:parse --batched
  brim map 's3://archive/**/*.jsonl.zst' out/ --fn steps.py:parse --anonymous
  brim map table.parquet hf://datasets/me/clean --fn mymodule:add_columns \\
      --remove-columns html
  brim map pages.jsonl /shared/out --fn steps:clean --memory 8GB --engine ray
  brim map pages.jsonl out/ --fn steps:clean --save shared/clean.plan
  brim map --plan shared/clean.plan --part 3/100
  brim map --plan shared/clean.plan --finish
"""


def map(
    context: typer.Context,
    rows: RowFlags,
    publishing: PublishingFlags,
    running: RunningFlags,
    scaling: ScalingFlags,
    computing: ComputingFlags,
    keeping: KeepingFlags,
    showing: ShowingFlags,
    watching: WatchingFlags,
    live: LiveFlags,
    storing: StoringFlags,
    parts: PartFlags,
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="A file, folder or glob of rows; or s3://…")
    ] = None,
    dest: Annotated[
        str | None,
        typer.Argument(metavar="DEST", help=DESTINATIONS),
    ] = None,
    fn: Annotated[
        str | None, typer.Option("--fn", metavar="MODULE:FUNCTION", help="The function; or FILE.py:FUNCTION.")
    ] = None,
    batched: Annotated[bool, typer.Option("--batched", help="The function takes a batch of rows.")] = False,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="ROWS", help="Rows in a batch.")] = 1000,
    input: Annotated[
        str, typer.Option("--input", metavar="python|arrow|numpy", help="What the function is given.")
    ] = "python",
    with_indices: Annotated[bool, typer.Option("--with-indices", help="Give the function the rows' numbers.")] = False,
    input_columns: Annotated[
        Many, typer.Option("--input-columns", metavar="COLUMN", help="Given to the function by position. Repeatable.")
    ] = None,
    remove_columns: Annotated[
        Many, typer.Option("--remove-columns", metavar="COLUMN", help="Not in the output. May be repeated.")
    ] = None,
    splittable: Annotated[
        bool,
        typer.Option(
            "--splittable",
            help="A batch done in parts gives the same rows: allow it if memory is short or rows fail.",
        ),
    ] = False,
    format: Annotated[str, typer.Option("--format", metavar="parquet|arrow", help="What a shard is.")] = "parquet",
    rows_per_shard: Annotated[
        int | None, typer.Option("--rows-per-shard", metavar="N", help="(default: one shard for each unit)")
    ] = None,
    split: Annotated[str, typer.Option("--split", metavar="NAME", help="The split that the rows become.")] = "train",
) -> None:
    start_worker("brim.steps.map_step", running.workers, scaling)
    from brim.api.compute_api import map_job
    from brim.api.job_options import MapGiven
    from brim.steps.map_options import MapOptions

    options = MapOptions(
        batched=batched,
        batch_size=batch_size,
        with_indices=with_indices,
        input_columns=input_columns,
        remove_columns=remove_columns,
        input=input,  # type: ignore[arg-type]  # checked there
        splittable=splittable or None,
    )
    words = words_of(rows, publishing, running, scaling, computing, keeping, storing)
    if is_saved(parts, context):
        run_saved("map", parts, words, computing, showing, watching, live)
        return
    source, dest, fn = need(source, "SOURCE"), need(dest, "DEST"), need(fn, "--fn")
    given = MapGiven(**words, format=format, rows_per_shard=rows_per_shard, split=split)  # type: ignore[arg-type]
    with waiting_for(source):
        job = map_job(source, fn, dest, options, given, held_bytes=0)
        if parts.save is not None:
            from brim.api.saved_jobs import no_caller, write_plan

            named = {"source": source, "function": fn, "destination": dest}
            tell_saved(write_plan(parts.save, job, given, named, options, held=no_caller), showing)
            return
    computed, progress = run_job(job, computing, showing, watching, live)
    loads = "://" not in dest or (format == "parquet" and not dest.startswith("hf://"))
    load = [("load", loading(dest, "default", [split], storing.endpoint_url))] if loads else []
    tell(computed, progress, job, showing, load)
