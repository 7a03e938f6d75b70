"""The log format of brim: records as lines of JSON, each with a CRC-32, only ever appended.

A line is on disk before anything depends on it. A torn or damaged line counts as missing. The meaning of the records is
up to the user of a log: the ledger (this name is done), checkpoints of tensors (rows up to this one are durable). Plain
lines and fsync are used instead of SQLite, whose WAL does not work on the network file systems of clusters.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from brim.state.atomic_files import sync_folder, write_all
from brim.state.lock import lock_file


class RecordLog:
    """A log file, which is opened for writing by the first record. Not thread-safe."""

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        self.path, self._mode = path, mode
        self._descriptor: int | None = None

    def replay(self) -> Iterator[dict[str, Any]]:
        """Yield the undamaged records in order. Raises FileNotFoundError if the log does not exist."""
        with open(self.path, "rb") as file:
            yield from records_of(file)

    @property
    def broken(self) -> int:
        """The number of the first damaged line, from 1; 0 if all are intact."""
        with open(self.path, "rb") as file:
            return broken_line(file)

    def lock(self, subject: str, busy: str) -> None:
        """Lock the log for this writer until it is closed. `busy` is the error if another process has the lock."""
        hint, elsewhere = "Wait for it to end, or close it.", "Write to another disk."
        lock_file(self._open(), subject=subject, busy=busy, hint=hint, elsewhere=elsewhere)

    def append(self, *records: dict[str, Any]) -> None:
        """Append records durably, or none of them and raise an error."""
        append_line(self._open(), b"".join(map(record_line, records)))

    def clear(self) -> None:
        os.ftruncate(self._open(), 0)

    def sync(self) -> None:
        """Make the name of the log durable."""
        self._open()
        sync_folder(self.path.parent)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, self._mode)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                write_all(self._descriptor, b"\n")  # a line that was torn by a crash remains a separate line
        return self._descriptor


def record_line(record: dict[str, Any]) -> bytes:
    body = json.dumps(record, sort_keys=True)
    return f"{zlib.crc32(body.encode()):08x} {body}\n".encode()


def record_of(data: bytes) -> dict[str, Any] | None:
    """Return the record of a line without its end, or None for a torn or damaged line."""
    checksum, _, body = data.partition(b" ")
    if not body or checksum != b"%08x" % zlib.crc32(body):
        return None
    record = json.loads(body)
    return record if isinstance(record, dict) else None


def append_line(descriptor: int, data: bytes) -> None:
    """Append a line durably; after an error the file is as before."""
    size = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, data)
    except OSError:
        os.ftruncate(descriptor, size)
        raise
    os.fsync(descriptor)


def records_of(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the records of the undamaged lines."""
    for data in lines:
        try:
            record = record_of(data.removesuffix(b"\n"))
        except ValueError:
            continue  # the checksum of something that is not JSON
        if record is not None:
            yield record


def broken_line(lines: Iterable[bytes]) -> int:
    """Return the number of the first damaged line, from 1; 0 if all are intact."""
    for number, line in enumerate(lines, 1):
        if line.strip() and next(records_of([line]), None) is None:
            return number
    return 0
