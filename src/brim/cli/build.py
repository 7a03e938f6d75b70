"""brim build: package files into shards."""

import shlex
import sys
from typing import Annotated, Any

import typer

from brim.cli.options import Bids, Cutting, Keeping, Publishing, Reading, Running, Showing, SourceArgument, Watching
from brim.cli.output import emit, page_path, print_lines, progress_for
from brim.cli.plan import planned, show
from brim.memory.redact import redact_command
from brim.sizes import format_size

HELP = """Package files into shards at DEST, a folder or hf://datasets/ORG/NAME.

Writes Parquet (or WebDataset) shards and a card, so that `load_dataset("DEST")` works and decodes, in
about 60 MB of memory (100 MB to the Hub) however large the files are. Run the same command again after a
crash, a kill or Ctrl-C: it does what is missing and nothing else.

To the Hub nothing is written to disk but a ledger, and readers see the old version or the new one, never
a part. The token comes from `hf auth login` or HF_TOKEN.

[bold]Examples[/bold]

  brim build scans/ out/
  brim build scans.csv out/ --files t1w:nifti --files masks:nifti --memory 1GB
  brim build photos/ out/ --label-from parent --shard-size 1GB
  brim build ds004884/ out/ --recipe arc
  brim build photos/ out/ --update        (files were added: keep unchanged shards)
  brim build ds004884/ hf://datasets/me/arc --recipe arc
"""


def build(
    source: SourceArgument,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A folder, or hf://datasets/ORG/NAME\\[@BRANCH].")],
    reading: Reading,
    bids: Bids,
    cutting: Cutting,
    publishing: Publishing,
    running: Running,
    keeping: Keeping,
    showing: Showing,
    watching: Watching,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: remove what an earlier build left.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Bring DEST up to date; keep unchanged shards.")] = False,
    stop_file: Annotated[
        str | None, typer.Option("--stop-file", metavar="FILE", help="Stop cleanly when this file appears.")
    ] = None,
    report: Annotated[
        str | None,
        typer.Option("--report", metavar="FILE.html", help="A page about the run: memory over time, shards, notes."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan, as `brim plan` does.")] = False,
) -> None:
    job = planned(
        source, dest, reading, bids, cutting, running,
        **vars(publishing), fresh=fresh, update=update, state=keeping.state, stop_file=stop_file,
    )  # fmt: skip
    if dry_run:
        show(job, showing.json)
        return
    from brim.report.recording import recorded

    page = None if report is None else page_path(report)
    need = {"low_bytes": job.forecast.total, "high_bytes": job.forecast.total}
    command = redact_command(["brim", *sys.argv[1:]])
    with recorded(progress_for(showing.json, watching.quiet), page, command, job.limit, need) as progress:
        for warning in job.plan.table.warnings:
            progress.note(warning)
        result = job.run(progress)
    if showing.json:
        emit("done", **{name: getattr(result, name) for name in result.__slots__})
        return
    lines = [
        ("built", f"{result.destination}{f' ({result.visibility})' if result.visibility else ''}"),
        ("holds", f"{result.rows:,} rows, {result.files:,} files, {format_size(result.bytes)}"),
        ("shards", _shards(result)),
    ]
    if result.proved:
        lines.append(("proved", result.proved))
    peak = getattr(progress, "peak_bytes", 0)
    if peak:
        lines.append(("memory", f"{format_size(peak)} at most, of {format_size(job.limit.bytes)}"))
    if result.left_out:
        lines.append(("left out", f"{len(result.left_out)} file(s) too large for the format, listed in README.md"))
    if cutting.format == "parquet":
        lines.append(("load", f"datasets.load_dataset({_loadable(dest, publishing.config)})"))
    places = (("--root", reading.root), ("--state", keeping.state))
    options = [word for option, value in places if value for word in (option, value)]
    lines.append(("prove", shlex.join(["brim", "verify", dest, source, *options])))
    print_lines(lines)


def _shards(result: Any) -> str:
    """How many there are, and how many of them this run had to bring."""
    kept = f", {result.kept:,} kept" if result.kept else ""
    if not result.visibility:
        return f"{result.shards:,} ({result.written:,} written{kept})"
    pull = f", by pull request {result.pull_request}" if result.pull_request else ""
    sent = f"{result.written:,} sent, {format_size(result.sent_bytes)}{kept}"
    return f"{result.shards:,} ({sent}) in {result.commits:,} commit{'' if result.commits == 1 else 's'}{pull}"


def _loadable(dest: str, config: str) -> str:
    """What load_dataset takes."""
    path, _, revision = dest.removeprefix("hf://datasets/").partition("@")
    if not dest.startswith("hf://"):
        return repr(dest)
    words = [repr(path.rstrip("/")), *([] if config == "default" else [repr(config)])]
    return ", ".join([*words, *([f"revision={revision!r}"] if revision else [])])
