"""The ledger: an append-only file of receipts that survives any crash.

A `RecordLog` (record_log.py): a shard whose line is torn or damaged is done again. A finished job's ledger is
rewritten in order, so that it depends on what was built and not on what was interrupted. It holds no path of this
machine and no secret: it may travel with the folder it describes.

Version 0.1 wrote receipts of cache files before it synced them (`unsynced`): the files must be checked once.
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
from brim.state.atomic_files import reason, record_line, write_whole
from brim.state.record_log import RecordLog, broken_line, records_of


@dataclass(frozen=True, slots=True)
class Piece:
    """A shard as a destination sees it. `etag` is what a bucket called its content when it was sent."""

    name: str
    size: int
    sha256: str
    etag: str = ""


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
    source: str = ""  # of a unit: SHA-256 of the source bytes that it read

    @property
    def piece(self) -> Piece:
        return Piece(self.name, self.size, self.sha256, self.etag)


Each = TypeVar("Each")


class Lazy(Sequence[Each], Generic[Each]):
    """What is made of names, whenever it is asked for and not before: a million would take much memory at once."""

    def __init__(self, names: Sequence[str], make: Callable[[str], Each]) -> None:
        self._names, self._make = names, make

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, at: int) -> Each: ...
    @overload
    def __getitem__(self, at: slice) -> Lazy[Each]: ...
    def __getitem__(self, at: int | slice) -> Each | Lazy[Each]:
        return Lazy(self._names[at], self._make) if isinstance(at, slice) else self._make(self._names[at])

    def __iter__(self) -> Iterator[Each]:
        return map(self._make, self._names)


@dataclass(slots=True)
class Total:
    """Of several shards."""

    shards: int = 0
    bytes: int = 0


def totals(receipts: Iterable[Receipt]) -> dict[str, Total]:
    """By split."""
    found: dict[str, Total] = {}
    for receipt in receipts:
        total = found.setdefault(receipt.split, Total())
        total.shards += 1
        total.bytes += receipt.size
    return found


# Rows, size, when it was staged, which split and job; two hashes; the lengths of the digest of dates and of the hash of
# the source, which follow with the ETag.
_PACKED = struct.Struct("<qqqI32s32sBB")
_SHARED_AT = struct.calcsize("<qqq")


class PackedReceipts(MutableMapping[str, Receipt]):
    """Receipts by name, in the order in which they came. One is made anew whenever it is asked for."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes | Receipt] = {}
        self._shared: dict[tuple[str, str], int] = {}  # splits and jobs, which are few, by number
        self._pairs: list[tuple[str, str]] = []

    def __getitem__(self, name: str) -> Receipt:
        packed = self._packed[name]
        if isinstance(packed, Receipt):
            return packed
        rows, size, staged_at, shared, sha256, key, dates_end, source_length = _PACKED.unpack_from(packed)
        split, job = self._pairs[shared]
        rest, source_end = packed[_PACKED.size :], dates_end + source_length
        dates, source, etag = rest[:dates_end].hex(), rest[dates_end:source_end].hex(), rest[source_end:].decode()
        return Receipt(name, split, rows, size, sha256.hex(), key.hex(), dates, job, staged_at, etag, source=source)

    def __setitem__(self, name: str, receipt: Receipt) -> None:
        self._packed[name] = self._pack(receipt)

    def _pack(self, receipt: Receipt) -> bytes | Receipt:
        """A receipt with other texts than hashes stays what it is."""
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
        """The jobs that the receipts are of."""
        found = self._packed.values()
        numbers = {each[_SHARED_AT : _SHARED_AT + 4] for each in found if isinstance(each, bytes)}
        others = {each.job for each in found if isinstance(each, Receipt)}
        return others | {self._pairs[int.from_bytes(number, "little")][1] for number in numbers}


LEDGER = "ledger.jsonl"
STATE = ".brim"
_TOGETHER = 10_000  # receipts that are written at once


_FIELDS = tuple(field.name for field in fields(Receipt))
_PLANNED = "planned shards"
_NUMBERED = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})(\.\w+)")


def shard_pattern(name: str) -> str:
    """The name of a shard without its number, which all shards of a split share: data/train-*-of-00040.parquet."""
    match = _NUMBERED.fullmatch(name)
    if match is None or int(match[2]) >= int(match[3]):
        return name
    return f"{match[1]}-*-of-{match[3]}{match[4]}"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What was asked for: the plan's fingerprint, and the facts it is made of."""

    fingerprint: str
    facts: dict[str, Any]
    versions: dict[str, str]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The source that a computed job has read, to find out later whether its content has changed.

    `stamp` is a digest of the dates (or ETags) of all files. `units` has the key, the dates and the hash of the source
    bytes of each unit, where no receipt of the ledger is one of a unit.
    """

    stamp: str
    units: tuple[tuple[str, str, str], ...] = ()


class Ledger:
    """The receipts of one destination. `job` is the last one begun, `done` whether it was finished; `broken` is the
    number of a line that is damaged, where none can be (a finished ledger is rewritten). `damaged` are the files that
    `verify` found damaged, each with the SHA-256 that it should have: the next build writes them again. `unsynced` are
    receipts of version 0.1 that do not count yet, `finished_unsynced` whether that version had finished the job.

    Threads may add to it at the same time.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER
        self._log = RecordLog(self.path)
        self._lock = threading.Lock()
        self.broken = 0
        try:
            self._read(self._log.replay())
            self.broken = self._log.broken if self.done else 0
        except (FileNotFoundError, NotADirectoryError):
            return  # there is none yet
        except OSError as error:  # it belongs to somebody else, or is a folder
            raise DestinationError(
                f"The ledger {str(self.path)!r} cannot be read: {reason(error)}.",
                hint="Choose another folder for it with --state-dir=DIR.",
            ) from error

    @classmethod
    def of(cls, data: bytes) -> Ledger:
        """A ledger that was published, to read from."""
        ledger = cls(Path(os.devnull))
        ledger._read(records_of(io.BytesIO(data)))
        ledger.broken = broken_line(io.BytesIO(data))
        return ledger

    def _read(self, records: Iterable[dict[str, Any]]) -> None:
        self.job: JobRecord | None = None
        self.done = self.finished_unsynced = False
        self.unsynced: dict[str, Receipt] = {}
        self.source: SourceRecord | None = None  # of a computed job
        self.receipts = PackedReceipts()
        self.former: dict[str, Receipt] = {}  # by key: shards that were written here and have no receipt any more
        self._former_names: set[str] = set()
        self._planned: set[str] = set()  # patterns of the shards of jobs that were begun and not finished
        self._notes: dict[str, Any] = {}
        self.damaged: dict[str, str] = {}
        for record in records:
            try:
                self._take(record)
            except (TypeError, KeyError, ValueError):
                continue  # whole, and not of a ledger that this version knows

    @property
    def names(self) -> set[str]:
        """Every name that a shard ever had here."""
        return self._former_names | self.receipts.keys()

    def know(self, names: Iterable[str]) -> None:
        """Names that shards have or had at the destination."""
        self._former_names |= set(names)

    def planned(self, names: Iterable[str]) -> list[str]:
        """Those of the names that jobs which were begun here, and have not finished, planned for their shards.

        Such a file is brim's own even without a receipt: a run may be killed between the two. Ledgers of earlier
        versions do not say what was planned; there, the shards with receipts tell.
        """
        patterns = self._planned | (set() if self.done else set(map(shard_pattern, self.names)))
        return [name for name in names if shard_pattern(name) in patterns]

    def known(self) -> dict[str, Receipt]:
        """Every shard that was ever written here, by key."""
        return self.former | {receipt.key: receipt for receipt in self.receipts.values()}

    def all_of(self, job: str) -> bool:
        """Whether every shard that was ever written here is one of this job."""
        return self.receipts.jobs() | {receipt.job for receipt in self.former.values()} <= {job}

    def agree_with(self, published: bytes) -> None:
        """The destination is the truth: unless a job is under way here, begin with the ledger that is published."""
        theirs = Ledger.of(published)
        known = None if self.job is None else self.job.fingerprint
        if (known is None or self.done) and known != (None if theirs.job is None else theirs.job.fingerprint):
            damaged = self.damaged
            write_whole(self.path, published)
            self._read(records_of(io.BytesIO(published)))
            self.record_damage({name: sha256 for name, sha256 in damaged.items() if name in self.receipts})
        self.know(theirs.names)

    def _take(self, record: dict[str, Any]) -> None:
        kind = record.pop("type", None)
        if kind == "job":
            job = JobRecord(**{**record, "left_out": tuple(record.get("left_out", ()))})
            _check_job(job)
            self.job = job
            self.done = False
            self._notes, self.source = {}, None
        elif kind == "source":
            key_dates_hash = [(str(key), str(dates), str(content)) for key, dates, content in record["units"]]
            self.source = SourceRecord(str(record["stamp"]), tuple(key_dates_hash))
        elif kind == "shard":
            is_synced = not record.pop("boot", "")
            receipt = Receipt(**record)
            if not _stays_inside(receipt) or not _has_its_types(receipt):
                raise ValueError(receipt.name)
            before = self.receipts.get(receipt.name)
            if before is not None:
                self.former[before.key] = before
            self.unsynced.pop(receipt.name, None)
            if not is_synced:
                self.receipts.pop(receipt.name, None)
                self.unsynced[receipt.name] = receipt
                return
            self.receipts[receipt.name] = receipt
            self.former.pop(receipt.key, None)
            self.damaged.pop(receipt.name, None)
        elif kind == "damaged":
            self.damaged[str(record["name"])] = str(record["sha256"])
        elif kind == "gone" and record["name"] in self.unsynced:
            del self.unsynced[record["name"]]
        elif kind == "gone" and record["name"] in self.receipts:
            self.damaged.pop(record["name"], None)
            receipt = self.receipts.pop(record["name"])
            self.former[receipt.key] = receipt
            self._former_names.add(receipt.name)
            self.done = False
        elif kind == "note":
            self._notes[record["name"]] = record["value"]
            if record["name"] == _PLANNED:
                self._planned |= set(record["value"])
        elif kind == "done":
            self.done = True
        elif kind == "done for now":
            self.finished_unsynced = True

    def begin(self, job: JobRecord, planned: Iterable[str] = ()) -> None:
        """Record a job, and in the same write the names of the shards that it plans."""
        patterns = sorted({*map(shard_pattern, planned)})
        note = [{"type": "note", "name": _PLANNED, "value": patterns}] if patterns else []
        with self._lock:
            self._write({"type": "job", **asdict(job)}, *note)

    def add(self, receipt: Receipt) -> None:
        self._append(_record_of(receipt))

    def add_all(self, receipts: Iterable[Receipt]) -> None:
        """Add many receipts with one sync for all."""
        lines = [_record_of(receipt) for receipt in receipts]
        for start in range(0, len(lines), _TOGETHER):
            with self._lock:
                self._write(*lines[start : start + _TOGETHER])

    def record_damage(self, damaged: Mapping[str, str]) -> None:
        """Note files that are damaged, each with the SHA-256 that it should have."""
        new = {name: sha256 for name, sha256 in damaged.items() if self.damaged.get(name) != sha256}
        if new:
            with self._lock:
                self._write(*({"type": "damaged", "name": name, "sha256": sha256} for name, sha256 in new.items()))

    def is_damaged(self, receipt: Receipt) -> bool:
        """Whether `verify` found that the file of this receipt is damaged."""
        return self.damaged.get(receipt.name) == receipt.sha256

    def forget(self, name: str) -> None:
        self._append({"type": "gone", "name": name})

    def remember(self, name: str, value: Any) -> None:
        """Something else that the job needs after a crash."""
        self.remember_all({name: value})

    def remember_all(self, notes: Mapping[str, Any]) -> None:
        """Remember several values with one sync for all."""
        with self._lock:
            new = {name: value for name, value in notes.items() if self._notes.get(name) != value}
            if new:
                lines = [{"type": "note", "name": name, "value": value} for name, value in new.items()]
                self._write(*lines)

    def recall(self, name: str) -> Any:
        return self._notes.get(name)

    def read_from(self, source: SourceRecord) -> None:
        """Record the source that the job reads."""
        if source != self.source:
            self._append(source_line(source))

    def finish(self, receipts: Iterable[Receipt], source: SourceRecord | None = None) -> None:
        """Write the ledger again: the job and its receipts in order, the source it has read, and that it is done."""
        if self.job is None:
            raise ValueError("no job has begun")
        self.close()
        self.source = source or self.source
        write_whole(
            self.path, finished_lines(self.job, receipts, [] if self.source is None else [source_line(self.source)])
        )
        self.done, self.damaged = True, {}

    def _append(self, record: dict[str, Any]) -> None:
        with self._lock:
            self._write(record)

    def _write(self, *records: dict[str, Any]) -> None:
        self._log.append(*map(_written, records))
        for record in records:
            self._take(json.loads(json.dumps(record)))

    def close(self) -> None:
        self._log.close()


def _stays_inside(receipt: Receipt) -> bool:
    """A folder may come from a stranger with its ledger: no line of it reaches a file outside."""
    return stays_below(receipt.name) and (receipt.sha256 == "" or is_file_name(receipt.sha256))


def _has_its_types(receipt: Receipt) -> bool:
    """A checksum may be right over values of other types than a receipt has."""
    for one in fields(Receipt):
        value = getattr(receipt, one.name)
        if one.type == "int" and (type(value) is not int or value < 0):
            return False
        if one.type == "str" and not isinstance(value, str):
            return False
    return True


def _check_job(job: JobRecord) -> None:
    """ValueError if what a job says of itself has other types than brim writes, in its parts too."""
    sound = isinstance(job.fingerprint, str) and _is_dict(job.facts, object) and _is_dict(job.versions, str)
    sound = sound and all(isinstance(path, str) for path in job.left_out)
    facts = job.facts if sound else {}
    sound = sound and all(isinstance(facts.get(name, {}), dict) for name in ("recipe", "cut", "columns"))
    sound = sound and isinstance(facts.get("format", ""), str)
    parts = facts.get("parts", [])
    if not sound or not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ValueError("a job of another kind")
    for part in parts:
        if not _is_dict(part["shards"], int) or min(part["shards"].values(), default=0) < 0:
            raise ValueError("a part of another kind")
        if not isinstance(part["left_out"], list):
            raise TypeError("a part of another kind")
        _check_job(JobRecord(part["fingerprint"], part["facts"], part["versions"], tuple(part["left_out"])))


def _is_dict(value: Any, of: type) -> bool:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, of) for k, v in value.items())


def finished_ledger(job: JobRecord, receipts: Iterable[Receipt], more: Iterable[dict[str, Any]] = ()) -> bytes:
    """A ledger that depends on what was built alone: the job, its receipts in order, what `more` is told of its shards,
    and that it is done."""
    return b"".join(finished_lines(job, receipts, more))


def finished_lines(job: JobRecord, receipts: Iterable[Receipt], more: Iterable[dict[str, Any]] = ()) -> Iterator[bytes]:
    yield _encode({"type": "job", **asdict(job)})
    for receipt in receipts:
        yield _encode({**_record_of(receipt), "staged_at": 0})
    yield from map(_encode, more)
    yield _encode({"type": "done"})


def source_line(source: SourceRecord) -> dict[str, Any]:
    return {"type": "source", **asdict(source)}


def _record_of(receipt: Receipt) -> dict[str, Any]:
    return {"type": "shard", **{name: getattr(receipt, name) for name in _FIELDS}}


def _written(record: dict[str, Any]) -> dict[str, Any]:
    """What most receipts have nothing to say of is left out."""
    return {name: value for name, value in record.items() if name not in ("staged_at", "etag", "source") or value}


def _encode(record: dict[str, Any]) -> bytes:
    return record_line(_written(record))


def job_versions() -> dict[str, str]:
    """Return the versions that a job record names: those of brim and pyarrow."""
    import pyarrow

    from brim import __version__

    return {"brim": __version__, "pyarrow": pyarrow.__version__}
