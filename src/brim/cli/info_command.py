"""brim info: show rows, splits, columns, size and shards of a dataset."""

from dataclasses import asdict
from typing import Any

from brim.cli.command import Command
from brim.cli.print_output import emit, print_lines
from brim.options.check_options import InfoOptions
from brim.options.groups import JsonOptions
from brim.records import dataclass
from brim.sizes import format_size


@dataclass(frozen=True, kw_only=True)
class InfoCommand(JsonOptions, InfoOptions):
    """`brim info DATASET`.

    Examples:
        brim info out/
        brim info hf://datasets/me/arc --head 2
        brim info s3://lab/scans --json

    Reads the Parquet footers, the dataset card and the manifest of a local or remote dataset, written by brim or by
    another program. --head shows the first rows; a file is shown by its type, shape and size. `brim check` checks
    more, and `brim verify` compares every byte.
    """


def run(options: InfoCommand) -> None:
    from brim.verification.dataset_info import info

    dataset = info(options)
    if options.json:
        emit("info", **asdict(dataset))
        return
    print_lines(dataset.lines)
    for number, row in enumerate(dataset.head):
        print()
        print_lines([("row", str(number)), *((name, _cell(value)) for name, value in row.items())])


def _cell(value: Any) -> str:
    """Return a value as text; a file as its type, shape and size."""
    if isinstance(value, list):
        return f"[{', '.join(map(_cell, value))}]"
    if isinstance(value, dict) and value.keys() == {"type", "path", "shape", "bytes"}:
        shape = f" {' × '.join(map(str, value['shape']))}" if value["shape"] else ""
        path = f"  {value['path']}" if value["path"] else ""
        return f"{value['type']}{shape}, {format_size(value['bytes'])}{path}"
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)


COMMAND = Command(InfoCommand, run)
