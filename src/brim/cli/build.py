"""brim build: package files into shards."""

import shlex
from typing import Annotated

import typer

from brim.cli.options import Bids, Cutting, Keeping, Reading, Running, Showing, SourceArgument, Watching
from brim.cli.output import emit, print_lines, progress_for
from brim.cli.plan import planned, show
from brim.sizes import format_size

HELP = """Package files into shards at DEST.

Writes Parquet (or WebDataset) shards and a card, so that `load_dataset("DEST")` works and decodes, in
about 60 MB of memory however large the files are. Run the same command again after a crash, a kill or
Ctrl-C: it does what is missing and nothing else.

[bold]Examples[/bold]

  brim build scans/ out/
  brim build scans.csv out/ --files t1w:nifti --files masks:nifti --memory 1GB
  brim build photos/ out/ --label-from parent --shard-size 1GB
  brim build ds004884/ out/ --recipe arc
  brim build photos/ out/ --update        (files were added: keep unchanged shards)
"""


def build(
    source: SourceArgument,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder to build into.")],
    reading: Reading,
    bids: Bids,
    cutting: Cutting,
    running: Running,
    keeping: Keeping,
    showing: Showing,
    watching: Watching,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: remove what an earlier build left.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Bring DEST up to date; keep unchanged shards.")] = False,
    stop_file: Annotated[
        str | None, typer.Option("--stop-file", metavar="FILE", help="Stop cleanly when this file appears.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan, as `brim plan` does.")] = False,
) -> None:
    job = planned(
        source, dest, reading, bids, cutting, running,
        fresh=fresh, update=update, state=keeping.state, stop_file=stop_file,
    )  # fmt: skip
    if dry_run:
        show(job, showing.json)
        return
    progress = progress_for(showing.json, watching.quiet)
    for warning in job.plan.table.warnings:
        progress.note(warning)
    result = job.run(progress)
    if showing.json:
        emit("done", **{name: getattr(result, name) for name in result.__slots__})
        return
    kept = f", {result.kept:,} kept" if result.kept else ""
    lines = [
        ("built", f"{result.destination}"),
        ("holds", f"{result.rows:,} rows, {result.files:,} files, {format_size(result.bytes)}"),
        ("shards", f"{result.shards:,} ({result.written:,} written{kept})"),
    ]
    peak = getattr(progress, "peak_bytes", 0)
    if peak:
        lines.append(("memory", f"{format_size(peak)} at most, of {format_size(job.limit.bytes)}"))
    if result.left_out:
        lines.append(("left out", f"{len(result.left_out)} file(s) too large for the format, listed in README.md"))
    if cutting.format == "parquet":
        lines.append(("load", f"datasets.load_dataset({dest!r})"))
    places = (("--root", reading.root), ("--state", keeping.state))
    options = [word for option, value in places if value for word in (option, value)]
    lines.append(("prove", shlex.join(["brim", "verify", dest, source, *options])))
    print_lines(lines)
