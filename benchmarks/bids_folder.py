"""Read every BIDS dataset below a folder and say what brim makes of it: rows, columns, warnings or the error.

    python benchmarks/bids_folder.py PATH/TO/bids-examples

Nothing is built. Made for the public collection bids-standard/bids-examples; ends with exit code 1 if any
dataset gives anything but a table or one of brim's own errors.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

from brim.errors import BrimError
from brim.sources.open_source import read_source
from brim.sources.source_options import SourceOptions


def main(folder: Path) -> int:
    read = refused = bugs = lists = 0
    begin = time.perf_counter()
    for dataset in sorted(path for path in folder.iterdir() if (path / "dataset_description.json").is_file()):
        try:
            table = read_source(dataset, SourceOptions())
        except BrimError as error:
            refused += 1
            print(f"{dataset.name}: refused: {error}")
            continue
        except Exception:  # noqa: BLE001  # what this script is for: anything else is a bug, and is shown
            bugs += 1
            print(f"{dataset.name}: BUG")
            traceback.print_exc()
            continue
        read += 1
        lists += any(column.is_list for column in table.columns.values())
        print(f"{dataset.name}: {len(table)} rows, {table.file_count()} files, {', '.join(table.rows.column_names)}")
        for warning in table.warnings:
            print(f"    {warning}")
    seconds = time.perf_counter() - begin
    print(f"\n{read} read ({lists} with several files in a cell), {refused} refused, {bugs} bugs, {seconds:.1f} s")
    return 1 if bugs or not read else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
