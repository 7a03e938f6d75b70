"""The results of a unit that is not finished, kept so that a killed run resumes inside the unit.

Results are appended to a log while they are computed. Once some time has passed, a receipt is written at the next batch
boundary: the results of so many input rows are durable, and they are so many bytes of the log. A resumed unit begins
with these results and computes the rest; what the log holds beyond the receipt is truncated. The unit's file is written
from its start either way, so its bytes do not depend on interruptions.

Covers the files of one unit in the units' folder. Which units exist, and their receipts, are those of
`brim.execution.unit_receipts`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.state.atomic_files import sync_file, sync_folder, write_whole
from brim.state.record_log import record_line, record_of

_INTERVAL_S = 30.0  # between two receipts


def partial_files(folder: Path, number: int) -> tuple[Path, Path, Path]:
    """Return the paths of a unit's results, of its skipped rows, and of the receipt of both."""
    name = f"partial-{number:08d}"
    return folder / f"{name}.rows", folder / f"{name}.left-out", folder / f"{name}.receipt"


def remove_partial(folder: Path, number: int) -> None:
    for path in reversed(partial_files(folder, number)):
        path.unlink(missing_ok=True)


class _TableLog:
    """Tables in a file, each as a separate Arrow stream, since their types may differ."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        if size == 0:
            path.unlink(missing_ok=True)
        else:
            os.truncate(path, size)

    def append(self, table: pa.Table) -> None:
        with pa.OSFile(str(self.path), "ab") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        self.size = self.path.stat().st_size

    def tables(self) -> Iterator[pa.Table]:
        """Yield the tables that are in the log now."""
        if self.size:
            end = self.size
            with pa.OSFile(str(self.path), "rb") as file:
                while file.tell() < end:
                    yield pa.ipc.open_stream(file).read_all()

    def sync(self) -> None:
        if self.size:
            sync_file(self.path)


class PartialUnit:
    """The log of one unit. `identity` is a digest of the inputs of its results: a log with another one is removed.

    `rows` input rows are done, and `counts` are the caller's, when the log is opened.
    """

    def __init__(self, folder: Path, number: int, identity: str) -> None:
        self._folder = folder
        results, left_out, self._receipt = partial_files(folder, number)
        self._identity = identity
        self._interval_s = float(os.environ.get("BRIM_PARTIAL_UNIT_SECONDS") or _INTERVAL_S)
        receipt = self._read_receipt(results, left_out)
        if receipt is None:
            self._receipt.unlink(missing_ok=True)
            receipt = {"rows": 0, "bytes": 0, "left_out_bytes": 0, "counts": []}
        self.rows: int = receipt["rows"]
        self.counts: list[int] = receipt["counts"]
        self._results = _TableLog(results, receipt["bytes"])
        self._left_out = _TableLog(left_out, receipt["left_out_bytes"])
        self._written_at = time.monotonic()

    def _read_receipt(self, results: Path, left_out: Path) -> dict[str, Any] | None:
        """Return the receipt, or None if it cannot be used."""
        try:
            receipt = record_of(self._receipt.read_bytes().rstrip(b"\n"))
            if receipt is None or receipt["identity"] != self._identity:
                return None
            for path, size in ((results, receipt["bytes"]), (left_out, receipt["left_out_bytes"])):
                if size and path.stat().st_size < size:
                    return None
        except (FileNotFoundError, KeyError, ValueError):
            return None
        return receipt

    def results(self) -> Iterator[pa.Table]:
        """Yield the results of the finished rows."""
        return self._results.tables()

    def left_out(self) -> list[pa.Table]:
        return list(self._left_out.tables())

    def add(self, results: pa.Table | None, left_out: list[pa.Table], rows: int, counts: list[int]) -> None:
        """Append the results of a batch that ends at input row `rows`, with the caller's counts so far."""
        if results is not None:
            self._results.append(results)
        for table in left_out:
            self._left_out.append(table)
        if time.monotonic() - self._written_at < self._interval_s:
            return
        self._results.sync()
        self._left_out.sync()
        sync_folder(self._folder)
        record = {
            "identity": self._identity,
            "rows": rows,
            "bytes": self._results.size,
            "left_out_bytes": self._left_out.size,
            "counts": counts,
        }
        write_whole(self._receipt, record_line(record))
        self._written_at = time.monotonic()
