"""brim info: what a dataset is."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from brim.cli.flags import FetchingFlags, FromFlags, KeepingFlags, ShowingFlags
from brim.cli.show import emit, print_lines
from brim.sizes import format_size

HELP = """What a dataset is: rows, splits, columns, bytes, shards, whole or not.

Reads footers, the card and the manifest, wherever the dataset is and whoever wrote it. --head shows the first rows:
files as their type, shape and size, read from their beginnings. `brim check DATASET` looks closer, `brim verify` proves
every byte.

[bold]Examples[/bold]

  brim info out/
  brim info hf://datasets/me/arc --head 2
  brim info s3://lab/scans --json
"""


def info(
    dataset: Annotated[
        str,
        typer.Argument(metavar="DATASET", help="A folder, hf://datasets/ORG/NAME\\[@REVISION], or s3://BUCKET/PREFIX."),
    ],
    reading: FromFlags,
    fetching: FetchingFlags,
    keeping: KeepingFlags,
    showing: ShowingFlags,
    head: Annotated[int, typer.Option("--head", metavar="N", min=0, help="Show the first rows too.")] = 0,
) -> None:
    import brim

    found = brim.info(dataset, head=head, **vars(reading), state=keeping.state, **vars(fetching))
    if showing.json:
        emit("info", **asdict(found))
        return
    print_lines(found.lines)
    for number, row in enumerate(found.head):
        print()
        print_lines([("row", str(number)), *((name, _cell(value)) for name, value in row.items())])


def _cell(value: Any) -> str:
    """A value in words; a file as its type, shape and size."""
    if isinstance(value, list):
        return f"[{', '.join(map(_cell, value))}]"
    if isinstance(value, dict) and value.keys() == {"type", "path", "shape", "bytes"}:
        shape = f" {' × '.join(map(str, value['shape']))}" if value["shape"] else ""
        path = f"  {value['path']}" if value["path"] else ""
        return f"{value['type']}{shape}, {format_size(value['bytes'])}{path}"
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)
