"""The one log format: records as lines of JSON, each with a checksum, only ever appended.

A line is on disk before the next thing depends on it. A torn or damaged line is as if it had not been written. What
the records mean is for whoever keeps the log: the ledger (this name is done), checkpoints of tensors (rows up to here
are safe). Plain lines and fsync rather than SQLite, whose WAL does not work on the network file systems of clusters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from brim.state.atomic_files import append_line, end_torn_line, record_line, record_of, sync_folder
from brim.state.lock import lock_file


class RecordLog:
    """Opened for writing with the first record. Not for several threads at once."""

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        self.path, self._mode = path, mode
        self._descriptor: int | None = None

    def replay(self) -> Iterator[dict[str, Any]]:
        """The records that are whole, in order. FileNotFoundError if there is no log."""
        with open(self.path, "rb") as file:
            yield from records_of(file)

    @property
    def broken(self) -> int:
        """The number of the first line that is not whole; 0 if all are."""
        with open(self.path, "rb") as file:
            return broken_line(file)

    def lock(self, what: str, busy: str) -> None:
        """For this writer alone until it is closed. `busy` says what it means that somebody has it."""
        lock_file(
            self._opened(),
            what=what,
            busy=busy,
            hint="Wait for it to end, or close it.",
            elsewhere="Write to another disk.",
        )

    def append(self, *records: dict[str, Any]) -> None:
        """All on disk when this returns, or an error and none of them."""
        append_line(self._opened(), b"".join(map(record_line, records)))

    def clear(self) -> None:
        """As if nothing had been written."""
        os.ftruncate(self._opened(), 0)

    def sync(self) -> None:
        """The log's own name lasts."""
        self._opened()
        sync_folder(self.path.parent)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _opened(self) -> int:
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, self._mode)
            end_torn_line(self._descriptor)
        return self._descriptor


def records_of(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The records of lines that are whole."""
    for line in lines:
        try:
            record = record_of(line.removesuffix(b"\n"))
        except ValueError:
            continue  # a checksum that is right over what is no JSON
        if record is not None:
            yield record


def broken_line(lines: Iterable[bytes]) -> int:
    """The number of the first line that is not whole, from 1; 0 if all are."""
    for number, line in enumerate(lines, 1):
        if line.strip() and next(records_of([line]), None) is None:
            return number
    return 0
