"""The ledger: an append-only file of receipts that survives any crash.

It is a `RecordLog` (record_log.py): a shard whose line is torn or damaged is written again. The ledger of a finished
job is rewritten in order, so that it depends on the result and not on interruptions. It contains no path of this
machine and no secret, because it may be copied with the folder that it describes.

Version 0.1 wrote receipts of cache files before it synced them (`unsynced`): these files must be checked once.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, MutableMapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from brim.errors import DestinationError
from brim.records import dataclass
from brim.safe_names import is_file_name, stays_below
from brim.state.atomic_files import reason, write_whole
from brim.state.record_log import RecordLog, broken_line, record_line, records_of


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What a destination needs to know of a shard. `etag` is that of the object when it was uploaded."""

    name: str
    size: int
    sha256: str
    etag: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A finished shard or unit: its name, its content, and digests of its source."""

    name: str
    split: str
    rows: int
    size: int
    sha256: str
    key: str
    mtimes: str
    job: str
    staged_at: int = 0  # time of an upload that is kept only for hours until it is committed; 0: it is final
    etag: str = ""  # of the object in a bucket
    source: str = ""  # of a unit: SHA-256 of the source bytes that it read

    @property
    def stored_file(self) -> StoredFile:
        return StoredFile(self.name, self.size, self.sha256, self.etag)


Each = TypeVar("Each")


class LazySequence(Sequence[Each], Generic[Each]):
    """Values made from names on access: a million of them would need much memory at once."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Each]) -> None:
        self._names, self._make = names, make

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> Each: ...
    @overload
    def __getitem__(self, index: slice) -> LazySequence[Each]: ...
    def __getitem__(self, index: int | slice) -> Each | LazySequence[Each]:
        names = self._names[index]
        return self._make(names) if isinstance(names, str) else LazySequence(names, self._make)

    def __iter__(self) -> Iterator[Each]:
        return map(self._make, self._names)


@dataclass(slots=True)
class SplitTotal:
    shards: int = 0
    bytes: int = 0


def split_totals(receipts: Iterable[Receipt]) -> dict[str, SplitTotal]:
    """Return the number and the size of the shards of each split."""
    totals: dict[str, SplitTotal] = {}
    for receipt in receipts:
        total = totals.setdefault(receipt.split, SplitTotal())
        total.shards += 1
        total.bytes += receipt.size
    return totals


# Rows, size, time of staging, number of split and job; two hashes; the lengths of the digest of dates and of the hash
# of the source, which follow with the ETag.
_PACKED = struct.Struct("<qqqI32s32sBB")
_SHARED_AT = struct.calcsize("<qqq")


class PackedReceipts(MutableMapping[str, Receipt]):
    """Receipts by name, in insertion order, in a compact form: the object is made on access."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes | Receipt] = {}
        self._shared: dict[tuple[str, str], int] = {}  # numbers of split and job: there are few pairs
        self._pairs: list[tuple[str, str]] = []

    def __getitem__(self, name: str) -> Receipt:
        packed = self._packed[name]
        if isinstance(packed, Receipt):
            return packed
        rows, size, staged_at, shared, sha256, key, dates_end, source_length = _PACKED.unpack_from(packed)
        split, job = self._pairs[shared]
        data, source_end = packed[_PACKED.size :], dates_end + source_length
        dates, source, etag = (
            data[:dates_end].hex(),
            data[dates_end:source_end].hex(),
            data[source_end:].decode(),
        )
        return Receipt(name, split, rows, size, sha256.hex(), key.hex(), dates, job, staged_at, etag, source=source)

    def __setitem__(self, name: str, receipt: Receipt) -> None:
        self._packed[name] = self._pack(receipt)

    def _pack(self, receipt: Receipt) -> bytes | Receipt:
        """Pack a receipt. One with other texts than hashes is kept as an object."""
        texts = (receipt.sha256, receipt.key, receipt.mtimes, receipt.source)
        try:
            hashes = [bytes.fromhex(text) for text in texts]
            if len(hashes[0]) != 32 or len(hashes[1]) != 32 or [h.hex() for h in hashes] != [*texts]:
                return receipt
            pair = (receipt.split, receipt.job)
            shared = self._shared.setdefault(pair, len(self._pairs))
            if shared == len(self._pairs):
                self._pairs.append(pair)
            numbers = (receipt.rows, receipt.size, receipt.staged_at, shared, *hashes[:2])
            lengths = (len(hashes[2]), len(hashes[3]))
            return _PACKED.pack(*numbers, *lengths) + hashes[2] + hashes[3] + receipt.etag.encode()
        except (TypeError, ValueError, struct.error):
            return receipt

    def __delitem__(self, name: str) -> None:
        del self._packed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def keys(self) -> KeysView[str]:
        return self._packed.keys()

    def jobs(self) -> set[str]:
        """Return the jobs of all receipts."""
        values = self._packed.values()
        numbers = {value[_SHARED_AT : _SHARED_AT + 4] for value in values if isinstance(value, bytes)}
        jobs = {value.job for value in values if isinstance(value, Receipt)}
        return jobs | {self._pairs[int.from_bytes(number, "little")][1] for number in numbers}


LEDGER = "ledger.jsonl"
STATE = ".brim"
_BATCH = 10_000  # receipts per sync


_FIELDS = tuple(field.name for field in fields(Receipt))
_PLANNED_NOTE = "planned shards"
_NUMBERED = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})(\.\w+)")


def shard_pattern(name: str) -> str:
    """Return the name that all shards of a split share, without their numbers: data/train-*-of-00040.parquet."""
    match = _NUMBERED.fullmatch(name)
    if match is None or int(match[2]) >= int(match[3]):
        return name
    return f"{match[1]}-*-of-{match[3]}{match[4]}"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job: the fingerprint of its plan, and the inputs of the fingerprint (`facts`, as they are called on disk)."""

    fingerprint: str
    facts: dict[str, Any]
    versions: dict[str, str]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The source that a computed job has read, to detect later changes of its content.

    `stamp` is a digest of the dates (or ETags) of all files. `units` has the key, the dates and the hash of the source
    bytes of each unit, if the receipts of the ledger are not those of units.
    """

    stamp: str
    units: tuple[tuple[str, str, str], ...] = ()


class Ledger:
    """The receipts of one destination. Thread-safe for writing.

    `job` is the last job that was begun, `done` whether it was finished. `broken` is the number of a damaged line of a
    finished ledger, which is rewritten and should have none. `damaged` are the files that `verify` found damaged, each
    with its correct SHA-256: the next build writes them again. `unsynced` are receipts of version 0.1 that do not count
    yet, `finished_unsynced` is whether that version had finished the job.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER
        self._log = RecordLog(self.path)
        self._lock = threading.Lock()
        self.broken = 0
        try:
            self._read(self._log.replay())
            self.broken = self._log.broken if self.is_finished else 0
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:  # it belongs to another user, or is a folder
            raise DestinationError(
                f"The ledger {str(self.path)!r} cannot be read: {reason(error)}.",
                hint="Choose another folder for it with --state-dir=DIR.",
            ) from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """Return a ledger for reading from the bytes of a manifest."""
        ledger = cls(Path(os.devnull))
        ledger._read(records_of(io.BytesIO(data)))
        ledger.broken = broken_line(io.BytesIO(data))
        return ledger

    def _read(self, records: Iterable[dict[str, Any]]) -> None:
        self.job: JobRecord | None = None
        self.is_finished = self.finished_unsynced = False
        self.unsynced: dict[str, Receipt] = {}
        self.source: SourceRecord | None = None  # of a computed job
        self.receipts = PackedReceipts()
        self.old_receipts: dict[str, Receipt] = {}  # by key: earlier shards, whose receipts are no longer valid
        self._old_names: set[str] = set()
        self._planned_patterns: set[str] = set()  # of the shards of jobs that were begun and not finished
        self._notes: dict[str, Any] = {}
        self.damaged: dict[str, str] = {}
        for record in records:
            try:
                self._apply(record)
            except (TypeError, KeyError, ValueError):
                continue  # undamaged, but not a record that this version knows

    @property
    def names(self) -> set[str]:
        """Every name that a shard of this destination ever had."""
        return self._old_names | self.receipts.keys()

    def add_names(self, names: Iterable[str]) -> None:
        """Add names that shards have or had at the destination."""
        self._old_names |= set(names)

    def planned_names(self, names: Iterable[str]) -> list[str]:
        """Return the names that unfinished jobs of this ledger planned for their shards.

        Such a file was written by brim even without a receipt: a run may be killed between the two. Ledgers of earlier
        versions do not record the planned names; in these, the names of shards with receipts decide.
        """
        patterns = self._planned_patterns | (set() if self.is_finished else set(map(shard_pattern, self.names)))
        return [name for name in names if shard_pattern(name) in patterns]

    def receipts_by_key(self) -> dict[str, Receipt]:
        """Return the receipts of all shards that were ever written, by key."""
        return self.old_receipts | {receipt.key: receipt for receipt in self.receipts.values()}

    def has_only(self, job: str) -> bool:
        """Return whether all shards that were ever written are of this job."""
        return self.receipts.jobs() | {receipt.job for receipt in self.old_receipts.values()} <= {job}

    def agree_with(self, published: bytes) -> None:
        """Replace the receipts by those published at the destination, unless an unfinished job is recorded here."""
        manifest = Ledger.from_bytes(published)
        fingerprint = None if self.job is None else self.job.fingerprint
        published_fingerprint = None if manifest.job is None else manifest.job.fingerprint
        if (fingerprint is None or self.is_finished) and fingerprint != published_fingerprint:
            damaged = self.damaged
            write_whole(self.path, published)
            self._read(records_of(io.BytesIO(published)))
            self.record_damage({name: sha256 for name, sha256 in damaged.items() if name in self.receipts})
        self.add_names(manifest.names)

    def _apply(self, record: dict[str, Any]) -> None:
        kind = record.pop("type", None)
        if kind == "job":
            job = JobRecord(**{**record, "left_out": tuple(record.get("left_out", ()))})
            _check_job(job)
            self.job = job
            self.is_finished = False
            self._notes, self.source = {}, None
        elif kind == "source":
            units = [(str(key), str(dates), str(content)) for key, dates, content in record["units"]]
            self.source = SourceRecord(str(record["stamp"]), tuple(units))
        elif kind == "shard":
            is_synced = not record.pop("boot", "")
            receipt = Receipt(**record)
            # The names of a receipt stay inside the folder; the ledger may come from an untrusted source.
            is_safe = stays_below(receipt.name) and (receipt.sha256 == "" or is_file_name(receipt.sha256))
            if not is_safe or not _has_its_types(receipt):
                raise ValueError(receipt.name)
            earlier = self.receipts.get(receipt.name)
            if earlier is not None:
                self.old_receipts[earlier.key] = earlier
            self.unsynced.pop(receipt.name, None)
            if not is_synced:
                self.receipts.pop(receipt.name, None)
                self.unsynced[receipt.name] = receipt
                return
            self.receipts[receipt.name] = receipt
            self.old_receipts.pop(receipt.key, None)
            self.damaged.pop(receipt.name, None)
        elif kind == "damaged":
            self.damaged[str(record["name"])] = str(record["sha256"])
        elif kind == "gone" and record["name"] in self.unsynced:
            del self.unsynced[record["name"]]
        elif kind == "gone" and record["name"] in self.receipts:
            self.damaged.pop(record["name"], None)
            receipt = self.receipts.pop(record["name"])
            self.old_receipts[receipt.key] = receipt
            self._old_names.add(receipt.name)
            self.is_finished = False
        elif kind == "note":
            self._notes[record["name"]] = record["value"]
            if record["name"] == _PLANNED_NOTE:
                self._planned_patterns |= set(record["value"])
        elif kind == "done":
            self.is_finished = True
        elif kind == "done for now":
            self.finished_unsynced = True

    def start_job(self, job: JobRecord, names: Iterable[str] = ()) -> None:
        """Record a job, together with the names of the shards that it plans."""
        patterns = sorted({*map(shard_pattern, names)})
        note = [{"type": "note", "name": _PLANNED_NOTE, "value": patterns}] if patterns else []
        with self._lock:
            self._write({"type": "job", **asdict(job)}, *note)

    def add(self, receipt: Receipt) -> None:
        self._append(_record_of(receipt))

    def add_all(self, receipts: Iterable[Receipt]) -> None:
        """Add many receipts with one sync for all."""
        lines = [_record_of(receipt) for receipt in receipts]
        for start in range(0, len(lines), _BATCH):
            with self._lock:
                self._write(*lines[start : start + _BATCH])

    def record_damage(self, damaged: Mapping[str, str]) -> None:
        """Record damaged files, each with its correct SHA-256."""
        new = {name: sha256 for name, sha256 in damaged.items() if self.damaged.get(name) != sha256}
        if new:
            with self._lock:
                self._write(*({"type": "damaged", "name": name, "sha256": sha256} for name, sha256 in new.items()))

    def is_damaged(self, receipt: Receipt) -> bool:
        """Return whether `verify` found that the file of this receipt is damaged."""
        return self.damaged.get(receipt.name) == receipt.sha256

    def forget(self, name: str) -> None:
        self._append({"type": "gone", "name": name})

    def remember(self, name: str, value: Any) -> None:
        """Record a value that the job needs after a crash."""
        self.remember_all({name: value})

    def remember_all(self, notes: Mapping[str, Any]) -> None:
        """Record several values with one sync for all."""
        with self._lock:
            new = {name: value for name, value in notes.items() if self._notes.get(name) != value}
            if new:
                lines = [{"type": "note", "name": name, "value": value} for name, value in new.items()]
                self._write(*lines)

    def recall(self, name: str) -> Any:
        return self._notes.get(name)

    def record_source(self, source: SourceRecord) -> None:
        """Record the source that the job reads."""
        if source != self.source:
            self._append(source_line(source))

    def finish(self, receipts: Iterable[Receipt], source: SourceRecord | None = None) -> None:
        """Rewrite the ledger: the job and its receipts in order, its source, and that it is done."""
        if self.job is None:
            raise ValueError("no job has begun")
        self.close()
        self.source = source or self.source
        write_whole(
            self.path, finished_lines(self.job, receipts, [] if self.source is None else [source_line(self.source)])
        )
        self.is_finished, self.damaged = True, {}

    def _append(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._write(record)

    def _write(self, *records: dict[str, Any]) -> None:
        self._log.append(*map(_written, records))
        for record in records:
            self._apply(json.loads(json.dumps(record)))

    def close(self) -> None:
        self._log.close()


def _has_its_types(receipt: Receipt) -> bool:
    """Return whether the values have the types of a receipt: a correct checksum does not guarantee that."""
    for field in fields(Receipt):
        value = getattr(receipt, field.name)
        if field.type == "int" and (type(value) is not int or value < 0):
            return False
        if field.type == "str" and not isinstance(value, str):
            return False
    return True


def _check_job(job: JobRecord) -> None:
    """Raise ValueError if a job or its parts contain values of other types than brim writes."""
    sound = isinstance(job.fingerprint, str) and _is_dict(job.facts, object) and _is_dict(job.versions, str)
    sound = sound and all(isinstance(path, str) for path in job.left_out)
    facts = job.facts if sound else {}
    sound = sound and all(isinstance(facts.get(name, {}), dict) for name in ("recipe", "cut", "columns"))
    sound = sound and isinstance(facts.get("format", ""), str)
    parts = facts.get("parts", [])
    if not sound or not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ValueError("not a job of brim")
    for part in parts:
        if not _is_dict(part["shards"], int) or min(part["shards"].values(), default=0) < 0:
            raise ValueError("not a part of a job")
        if not isinstance(part["left_out"], list):
            raise TypeError("not a part of a job")
        _check_job(JobRecord(part["fingerprint"], part["facts"], part["versions"], tuple(part["left_out"])))


def _is_dict(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, kind) for k, v in value.items())


def finished_ledger(job: JobRecord, receipts: Iterable[Receipt], further: Iterable[dict[str, Any]] = ()) -> bytes:
    """Return a ledger that depends on the result only: the job, its receipts in order, further records, the end."""
    return b"".join(finished_lines(job, receipts, further))


def finished_lines(
    job: JobRecord, receipts: Iterable[Receipt], further: Iterable[dict[str, Any]] = ()
) -> Iterator[bytes]:
    yield _encode({"type": "job", **asdict(job)})
    for receipt in receipts:
        yield _encode({**_record_of(receipt), "staged_at": 0})
    yield from map(_encode, further)
    yield _encode({"type": "done"})


def source_line(source: SourceRecord) -> dict[str, Any]:
    return {"type": "source", **asdict(source)}


def _record_of(receipt: Receipt) -> dict[str, Any]:
    return {"type": "shard", **{name: getattr(receipt, name) for name in _FIELDS}}


def _written(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the empty values that most receipts have."""
    return {name: value for name, value in record.items() if name not in ("staged_at", "etag", "source") or value}


def _encode(record: dict[str, Any]) -> bytes:
    return record_line(_written(record))


def job_versions() -> dict[str, str]:
    """Return the versions that a job record names: those of brim and pyarrow."""
    import pyarrow

    from brim import __version__

    return {"brim": __version__, "pyarrow": pyarrow.__version__}
