"""brim unpack: the original files back."""

from typing import Annotated

import typer

from brim.cli.flags import (
    BUILT,
    ChoosingFlags,
    FetchingFlags,
    FromFlags,
    KeepingFlags,
    LiveFlags,
    ShowingFlags,
    WatchingFlags,
    all_true,
    split_names,
)
from brim.cli.show import emit, followed, print_lines
from brim.sizes import format_size

HELP = """Write the original files back, byte for byte, under their relative paths.

From a folder, or streamed from the Hub or a bucket. Files that are there already and hold the same bytes are left
alone, so a stopped run can be continued. Paths that would leave the folder are refused. With --where or --columns,
only these files are written, and of a dataset far away nothing else is fetched.

[bold]Examples[/bold]

  brim unpack out/ files/
  brim unpack hf://datasets/me/arc files/
  brim unpack s3://lab/arc files/
  brim unpack hf://datasets/me/arc files/ --where 'subject_id == "sub-M2230"'
"""


def unpack(
    dest: Annotated[
        str,
        typer.Argument(metavar="DEST", help=BUILT),
    ],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Where the files go.")],
    reading: FromFlags,
    choosing: ChoosingFlags,
    keeping: KeepingFlags,
    fetching: FetchingFlags,
    showing: ShowingFlags,
    watching: WatchingFlags,
    live: LiveFlags,
) -> None:
    import brim

    with followed(showing, watching, live) as progress:
        result = brim.unpack(
            dest,
            folder,
            where=all_true(choosing.where),
            columns=split_names(choosing.columns),
            **vars(reading),
            state=keeping.state,
            **vars(fetching),
            progress=progress,
        )
    if showing.json:
        emit("unpacked", **vars(result))
        return
    there = f", {result.already_there:,} were there" if result.already_there else ""
    lines = [("unpacked", f"{result.files:,} files, {format_size(result.bytes)}{there}"), ("in", folder)]
    if result.unproved:
        lines.append(("not proved", f"{result.unproved:,} shard(s) without a receipt to compare with"))
    print_lines(lines)
