"""brim plan: what would be built."""

from typing import Annotated, Any

import typer

from brim.cli.options import Bids, Cutting, Reading, Running, Showing, SourceArgument
from brim.cli.output import emit, print_lines
from brim.cli.reading import read

HELP = """Show what would be built, how big it is, and whether it fits.

Looks at every file (none is read whole) and prints rows, bytes as they really are, the shards, and the
memory a build takes. Nothing is written. Exits 2 if `brim build` would refuse a file.

[bold]Examples[/bold]

  brim plan scans/
  brim plan scans.csv --files t1w:nifti --shard-size 1GB
  brim plan photos/ out/ --label-from parent --json
  brim plan ds004884/ --save-recipe arc-columns.toml
"""


def planned(
    source: str, dest: str | None, reading: Reading, bids: Bids, cutting: Cutting, running: Running, **more: Any
) -> Any:
    """The library's plan for what the command line says. `brim build` runs the same."""
    import brim

    return brim.plan(
        read(source, reading, bids),
        dest,
        **vars(cutting),
        **vars(running),
        allow_empty=reading.allow_empty,
        oversize=reading.oversize,  # type: ignore[arg-type]  # checked by plan
        **more,
    )


def show(build: Any, as_json: bool) -> None:
    """Print a plan; FilesRefused (exit 2) if building it would refuse a file."""
    if as_json:
        emit("plan", **build.facts)
    else:
        print_lines(build.lines)
    build.check()


def plan(
    source: SourceArgument,
    reading: Reading,
    bids: Bids,
    cutting: Cutting,
    running: Running,
    showing: Showing,
    dest: Annotated[
        str | None, typer.Argument(metavar="DEST", help="Where it would be built: a folder, or hf://datasets/ORG/NAME.")
    ] = None,
    save_recipe: Annotated[
        str | None,
        typer.Option("--save-recipe", metavar="FILE.toml", help="Write the columns found, so that later builds agree."),
    ] = None,
) -> None:
    job = planned(source, dest, reading, bids, cutting, running)
    if save_recipe is not None:
        job.save_recipe(save_recipe)
    show(job, showing.json)
