"""Write to disk what a job would otherwise have to hold in memory, so that it can be read like any other file.

The caller owns the folder: what is in it is needed until the job has ended, and is of no use afterwards.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from brim.errors import SinkFailed
from brim.sizes import format_size
from brim.state.durable import reason

BATCH_BYTES = 16_000_000  # rows are gathered up to this before they are written; a larger row is written alone
BATCH_ROWS = 10_000


class Spill:
    """A folder for temporary files. `note` is told what goes there, and how much it was."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self.folder = folder.absolute()
        self.note = note
        self._files = 0
        self.bytes = 0

    def tell(self, what: str) -> None:
        """Say that something is about to be written, before the disk and the time for it are taken."""
        self.note(f"spilling {what} to disk in {self.folder}")

    def finish(self) -> None:
        if self.bytes:
            self.note(f"spilled {format_size(self.bytes)} to disk in {self.folder}")

    def rows(self, schema: pa.Schema, tables: Iterable[pa.Table]) -> pa.Table:
        """The rows of small tables, one after the other, as one table that is mapped from a file."""
        path = self.new(".arrow")
        with self.failures():
            file = open(path, "wb")  # noqa: SIM115  # closed below; what `tables` raises must not pass `failures`
        with file:
            writer = pa.ipc.new_stream(file, schema)
            for table in gathered(tables, BATCH_BYTES, BATCH_ROWS):
                with self.failures():
                    writer.write_table(table)
            with self.failures():
                writer.close()
                file.flush()
        self.bytes += path.stat().st_size
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()

    @contextmanager
    def blob(self, what: str) -> Iterator[Blob]:
        """A file of plain bytes, to be filled and then left. It is there as soon as something is appended."""
        blob = Blob(self, what)
        try:
            yield blob
        finally:
            blob.close()

    def new(self, extension: str) -> Path:
        """A path that no other file of this spill has."""
        with self.failures():
            self.folder.mkdir(parents=True, exist_ok=True)
        self._files += 1
        return self.folder / f"spill-{os.getpid()}-{self._files:04d}{extension}"

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Here the system's errors about writing become brim's."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
                raise
            raise SinkFailed(
                f"{str(self.folder)!r}, the folder for temporary files, cannot take more: {reason(error)}.",
                hint="Make room there, or choose another folder.",
            ) from error


class Blob:
    """A file that values are appended to."""

    def __init__(self, spill: Spill, what: str) -> None:
        self._spill = spill
        self._what = what
        self._file: BinaryIO | None = None
        self._at = 0

    @property
    def path(self) -> str | None:
        """None as long as nothing was appended."""
        return None if self._file is None else self._file.name

    def append(self, data: Any) -> int:
        """Where the data begins."""
        start = self._at
        with self._spill.failures():
            if self._file is None:
                self._spill.tell(self._what)
                self._file = open(self._spill.new(".bin"), "wb")  # noqa: SIM115  # closed by close()
            self._file.write(data)
        self._at += len(data)
        self._spill.bytes += len(data)
        return start

    def close(self) -> None:
        with self._spill.failures():
            if self._file is not None:
                self._file.close()


def gathered(tables: Iterable[pa.Table], max_bytes: int, max_rows: int) -> Iterator[pa.Table]:
    """Small tables of the same schema put together, as long as they stay small."""
    waiting: list[pa.Table] = []
    size = rows = 0
    for table in tables:
        table_bytes = table.nbytes
        full = size + table_bytes > max_bytes or rows + len(table) > max_rows
        if waiting and (full or not table.schema.equals(waiting[0].schema)):
            yield _together(waiting)
            waiting, size, rows = [], 0, 0
        if table_bytes > max_bytes:  # not to be held while the next is made
            yield table
            continue
        waiting.append(table)
        size, rows = size + table_bytes, rows + len(table)
    if waiting:
        yield _together(waiting)


def _together(tables: list[pa.Table]) -> pa.Table:
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()
