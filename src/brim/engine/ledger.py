"""The ledger: an append-only file of receipts that survives any crash.

One JSON object a line, each with a checksum of its own, each on disk before the next thing depends on it.
A torn or damaged line is as if it had not been written: its shard is done again. A finished job's ledger
is rewritten in order, so that it depends on what was built and not on what was interrupted.

Plain lines and fsync rather than SQLite, whose WAL does not work on the network file systems of clusters.
The ledger holds no path of this machine and no secret: it may travel with the folder it describes.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from brim.durable import append_line, end_torn_line, record_line, record_of, write_whole
from brim.errors import DestinationError
from brim.sinks.sink import Piece

LEDGER = "ledger.jsonl"
STATE = ".brim"
_TOGETHER = 10_000  # receipts that are written at once


@dataclass(frozen=True, slots=True)
class Receipt:
    """A shard is done: what it is called, what it holds, what it was made of."""

    name: str
    split: str
    rows: int
    size: int
    sha256: str
    key: str
    mtimes: str
    job: str
    staged_at: int = 0  # when it was sent to where it is safe only for some hours; 0: it is where it belongs
    etag: str = ""  # what a bucket calls its content

    @property
    def piece(self) -> Piece:
        return Piece(self.name, self.size, self.sha256, self.etag)


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for: the plan's fingerprint, and the facts it is made of."""

    fingerprint: str
    facts: dict[str, Any]
    versions: dict[str, str]
    left_out: tuple[str, ...] = ()


class Ledger:
    """The receipts of one destination. `job` is the last one begun, `done` whether it was finished.

    Threads may add to it at the same time.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        try:
            data = self.path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            data = b""
        except OSError as error:  # it belongs to somebody else, or is a folder
            raise DestinationError(
                f"The ledger {str(self.path)!r} cannot be read: {error.strerror}.",
                hint="Choose another folder for it with --state DIR.",
            ) from error
        self._read(data)

    @classmethod
    def of(cls, data: bytes) -> Ledger:
        """A ledger that was published, to read from."""
        ledger = cls(Path(os.devnull))
        ledger._read(data)
        return ledger

    def _read(self, data: bytes) -> None:
        self.job: Job | None = None
        self.done = False
        self.receipts: dict[str, Receipt] = {}  # by name
        self.known: dict[str, Receipt] = {}  # by key: every shard that was ever written here
        self.names: set[str] = set()  # every name that a shard ever had here
        self._notes: dict[str, Any] = {}
        for line in data.split(b"\n"):
            try:
                self._take(record_of(line))
            except (TypeError, KeyError, ValueError):
                continue  # whole, and not of a ledger that this version knows

    def agree_with(self, published: bytes) -> None:
        """The destination is the truth: unless a job is under way here, begin with the ledger that is published."""
        theirs = Ledger.of(published)
        known = None if self.job is None else self.job.fingerprint
        if (known is None or self.done) and known != (None if theirs.job is None else theirs.job.fingerprint):
            write_whole(self.path, published)
            self._read(published)
        self.names |= theirs.names

    def _take(self, record: dict[str, Any] | None) -> None:
        if record is None:
            return
        kind = record.pop("type", None)
        if kind == "job":
            self.job = Job(**{**record, "left_out": tuple(record.get("left_out", ()))})
            self.done = False
            self._notes = {}
        elif kind == "shard":
            receipt = Receipt(**record)
            self.receipts[receipt.name] = self.known[receipt.key] = receipt
            self.names.add(receipt.name)
        elif kind == "gone":
            self.receipts.pop(record["name"], None)
        elif kind == "note":
            self._notes[record["name"]] = record["value"]
        elif kind == "done":
            self.done = True

    def begin(self, job: Job) -> None:
        self._append({"type": "job", **asdict(job)})

    def add(self, receipt: Receipt) -> None:
        self._append({"type": "shard", **asdict(receipt)})

    def add_all(self, receipts: Iterable[Receipt]) -> None:
        """Many at once: all are on disk when this returns, without a wait for each."""
        lines = [{"type": "shard", **asdict(receipt)} for receipt in receipts]
        for start in range(0, len(lines), _TOGETHER):
            with self._lock:
                self._write(*lines[start : start + _TOGETHER])

    def forget(self, name: str) -> None:
        self._append({"type": "gone", "name": name})

    def remember(self, name: str, value: Any) -> None:
        """Something else that the job needs after a crash."""
        if self._notes.get(name) != value:
            self._append({"type": "note", "name": name, "value": value})

    def recall(self, name: str) -> Any:
        return self._notes.get(name)

    def finish(self, receipts: Iterable[Receipt]) -> None:
        """Write the ledger again: the job and its receipts in order, and that it is done."""
        if self.job is None:
            raise ValueError("no job has begun")
        data = finished_ledger(self.job, receipts)
        self.close()
        write_whole(self.path, data)
        self.done = True

    def _append(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._write(record)

    def _write(self, *records: dict[str, Any]) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            end_torn_line(self._descriptor)
        append_line(self._descriptor, b"".join(map(_encode, records)))
        for record in records:
            self._take(json.loads(json.dumps(record)))

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def finished_ledger(job: Job, receipts: Iterable[Receipt]) -> bytes:
    """A ledger that depends on what was built alone: the job, its receipts in order, and that it is done."""
    records = [{"type": "job", **asdict(job)}]
    records += [{"type": "shard", **asdict(replace(receipt, staged_at=0))} for receipt in receipts]
    return b"".join(_encode(record) for record in [*records, {"type": "done"}])


def _encode(record: dict[str, Any]) -> bytes:
    return record_line({name: value for name, value in record.items() if name not in ("staged_at", "etag") or value})
