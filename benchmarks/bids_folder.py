"""Read every BIDS dataset below a folder and print its rows, the files that belong to no column, or the error.

    python benchmarks/bids_folder.py PATH/TO/bids-examples

Nothing is built. Made for the public collection bids-standard/bids-examples; exits with code 1 if reading any
dataset gives neither a table nor one of brim's errors.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

from brim.errors import BrimError
from brim.sources.file_table import FileTable
from brim.sources.open_source import read_source
from brim.sources.source_options import SourceOptions


def main(folder: Path) -> int:
    read = refused = bugs = lists = 0
    remaining = [0, 0, 0]
    start = time.perf_counter()
    print("| dataset | rows | files | columns | no column: data | sidecars | documentation | |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for dataset in sorted(path for path in folder.iterdir() if (path / "dataset_description.json").is_file()):
        try:
            table = read_source(dataset, SourceOptions())
        except BrimError as error:
            refused += 1
            print(f"| {dataset.name} | | | | | | | refused: {' '.join(str(error).split())} |")
            continue
        except Exception:  # noqa: BLE001  # what this script is for: anything else is a bug, and is shown
            bugs += 1
            print(f"| {dataset.name} | | | | | | | BUG |")
            traceback.print_exc()
            continue
        read += 1
        lists += any(column.is_list for column in table.columns.values())
        counts = _left(table)
        remaining = [total + count for total, count in zip(remaining, counts, strict=True)]
        cells = [len(table), table.file_count(), table.rows.num_columns, *counts]
        print(f"| {dataset.name} | {' | '.join(f'{cell:,}' for cell in cells)} | {_example(table)} |")
    seconds = time.perf_counter() - start
    print(f"\n{read} read ({lists} with several files in a cell), {refused} refused, {bugs} bugs, {seconds:.1f} s")
    print(f"in no column: {remaining[0]:,} of data, {remaining[1]:,} sidecars, {remaining[2]:,} of documentation")
    return 1 if bugs or not read else 0


def _left(table: FileTable) -> list[int]:
    assert table.unmatched is not None
    return [table.unmatched.count(group) for group in ("data", "sidecars", "documentation")]


def _example(table: FileTable) -> str:
    assert table.unmatched is not None
    data = [kind for kind in table.unmatched.kinds if kind.group == "data"]
    return f"{data[0].count:,} {data[0].kind}, {data[0].example}" if data else ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
