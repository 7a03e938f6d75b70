"""brim build: package files into shards."""

import functools
import shlex
from collections.abc import Callable
from typing import Annotated, Any

import typer

from brim.buckets.bucket_address import BucketAddress
from brim.cli.flags import (
    DESTINATIONS,
    BidsFlags,
    CuttingFlags,
    KeepingFlags,
    LiveFlags,
    MaybeSource,
    PublishingFlags,
    ReadingFlags,
    RunningFlags,
    ScalingFlags,
    ShowingFlags,
    StoringFlags,
    WatchingFlags,
)
from brim.cli.plan_command import PlanOption, need, opened, planned, refuse_given, show
from brim.cli.show import emit, followed, loading, memory_held, print_lines
from brim.errors import InputError
from brim.memory.peak import PeakSampler
from brim.progress import Progress

HELP = """Package files into shards at DEST: a folder, hf://datasets/ORG/NAME, or s3://BUCKET/PREFIX.

Writes Parquet (or WebDataset) shards and a card, so that `load_dataset("DEST")` works and decodes, in
about 60 MB of memory (100 MB to the Hub, up to 200 MB from or to a bucket) however large the files are.
Run the same command again after a crash, a kill or Ctrl-C: it does what is missing and nothing else.

To the Hub or a bucket nothing is written to disk but a ledger. Readers of the Hub see the old version or the
new one, never a part. The token comes from `hf auth login` or HF_TOKEN, keys of a bucket from the
environment, AWS_PROFILE or the machine's role.

With --plan, a plan that `brim plan --save` wrote is built: a part of it with --part I/N, on any machine that
sees the source; --finish publishes what all parts brought; without either, all that is missing is done here.

[bold]Examples[/bold]

  brim build scans/ out/
  brim build scans.csv out/ --files t1w:nifti --files masks:nifti --memory 1GB
  brim build photos/ out/ --label-from parent --shard-size 1GB
  brim build ds004884/ out/ --recipe arc
  brim build photos/ out/ --update       (files were added)
  brim build more/ out/ --append         (new rows, without the old source)
  brim build ds004884/ hf://datasets/me/arc --recipe arc
  brim build s3://openneuro.org/ds004884 hf://datasets/me/arc --recipe arc \\
      --anonymous
  brim build scans/ s3://lab/scans --endpoint-url https://minio.lab.example
  brim build scans/ hf://datasets/me/scans --engine ray
  brim build --plan shared/arc.plan --part 3/100
  brim build --plan shared/arc.plan --finish
"""


def build(
    reading: ReadingFlags,
    bids: BidsFlags,
    cutting: CuttingFlags,
    publishing: PublishingFlags,
    storing: StoringFlags,
    running: RunningFlags,
    scaling: ScalingFlags,
    keeping: KeepingFlags,
    showing: ShowingFlags,
    watching: WatchingFlags,
    live: LiveFlags,
    source: MaybeSource = None,
    dest: Annotated[
        str | None,
        typer.Argument(metavar="DEST", help=DESTINATIONS),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: remove what an earlier build left.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Bring DEST up to date; keep unchanged shards.")] = False,
    append: Annotated[
        bool,
        typer.Option("--append", help="Add the rows that DEST does not hold yet, as new shards behind its own."),
    ] = False,
    allow_duplicate_paths: Annotated[
        bool,
        typer.Option(
            "--allow-duplicate-paths", help="With --append: add files whose paths DEST has with other content, too."
        ),
    ] = False,
    stop_file: Annotated[
        str | None, typer.Option("--stop-file", metavar="FILE", help="Stop cleanly when this file appears.")
    ] = None,
    report: Annotated[
        str | None,
        typer.Option("--report", metavar="FILE.html", help="A page about the run: memory over time, shards, notes."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan, as `brim plan` does.")] = False,
    saved: PlanOption = None,
    part: Annotated[
        str | None, typer.Option("--part", metavar="I/N", help="With --plan: only the I-th of N parts.")
    ] = None,
    finish: Annotated[bool, typer.Option("--finish", help="With --plan: publish what all parts brought.")] = False,
) -> None:
    if saved is None and (part is not None or finish):
        raise InputError(
            f"{'--finish' if part is None else '--part'} needs a plan that was saved.",
            hint="Save one with brim plan SOURCE DEST --save PLAN, then give --plan PLAN.",
        )
    job: Any
    run: Callable[[Progress], Any]
    with PeakSampler() as sampler:  # reading a table may take more than building it
        if saved is not None:
            more = {"fresh": fresh, "update": update, "append": append, "allow_duplicate_paths": allow_duplicate_paths}
            refuse_given(source, dest, (reading, bids, cutting, publishing, scaling), more)
            job = opened(saved, running, storing, reading.root, state=keeping.state, stop_file=stop_file)
            run = _step(job, part, finish)
        else:
            job = planned(
                need(source), need(dest, "DEST"), reading, bids, cutting, storing, running, runs=not dry_run,
                **vars(publishing), **vars(scaling), fresh=fresh, update=update, append=append,
                allow_duplicate_paths=allow_duplicate_paths, state=keeping.state, stop_file=stop_file,
            )  # fmt: skip
            run = job.run
        if dry_run:
            show(job, showing.json)
            return
        # A part obeys a file of its own among the plan's; the user's is obeyed by all.
        ended_by = None if part is not None and stop_file is None else job.stop_file
        about: dict[str, Any] = {"limit": job.limit, "report": report, "takes": job.takes, "stop_file": ended_by}
        with followed(showing, watching, live, **about) as progress:
            for warning in job.plan.table.notes() if part is None else ():
                progress.note(warning)
            result = run(progress)
    if showing.json:
        emit("done", **{name: getattr(result, name) for name in result.__slots__})
        return
    if part is not None:
        print_lines(result.lines)
        return
    dest = dest or str(result.destination)
    lines = [*result.lines, *memory_held(progress, job.limit.bytes, sampler.peak_bytes)]
    if job.plan.format == "parquet":
        config = publishing.config if saved is None else job.hub.config
        endpoint = storing.endpoint_url if saved is None else _endpoint(job.destination)
        lines.append(("load", loading(dest, config, (shard.split for shard in job.plan.shards), endpoint)))
    places = (
        ("--root", reading.root if saved is None else None),
        ("--state", keeping.state),
        ("--endpoint-url", storing.endpoint_url if saved is None else _endpoint(job.destination)),
        ("--source-endpoint-url", storing.source_endpoint_url),
    )
    options = [word for option, value in places if value for word in (option, value)]
    options += ["--anonymous"] if storing.anonymous else []
    compared = [source] if source and not append else []  # rows of a part need not be all that the source holds
    lines.append(("prove", shlex.join(["brim", "verify", dest, *compared, *options])))
    print_lines(lines)


def _step(job: Any, part: str | None, finish: bool) -> Callable[[Progress], Any]:
    """What is to be done of a saved plan."""
    if part is None:
        return job.finish if finish else job.run  # type: ignore[no-any-return]
    if finish:
        raise InputError("Choose one of --part (bring shards) and --finish (publish them).")
    return functools.partial(job.part, part)


def _endpoint(destination: Any) -> str | None:
    """The store that a saved plan goes to, if it says so."""
    return destination.access.endpoint if isinstance(destination, BucketAddress) else None
