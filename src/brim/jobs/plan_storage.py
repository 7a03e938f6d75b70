"""Storage of a saved plan and of the receipts of its parts: both in one folder, or in a bucket.

`PLAN.parts/` has a folder with a ledger for each part of the plan. Besides source and destination, this is the only
folder that the machines have to share. A run of a part shares the lock of the folder and holds the lock of the part;
the run that finishes the plan holds the lock of the folder alone.

From a bucket, the plan is fetched once and kept in the user's state folder. The ledger of a part is written there too,
and copied to the bucket every few seconds and at the end: work of a killed part since the last copy is repeated.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from brim import partition as cuts
from brim.errors import DestinationError, InputError, StoppedError, VerificationError
from brim.execution.unit_receipts import UnitFiles
from brim.execution.unit_storage import BucketUnits, download_unit
from brim.file_set import Ints
from brim.formats.splice import FileSplice
from brim.plans.cut_shards import Shard
from brim.plans.saved_plan import PLAN_MAGIC
from brim.records import dataclass
from brim.state.atomic_files import private_folder, reason, sha256_of, sync_folder, write_whole
from brim.state.ledger import LEDGER, Ledger, Receipt
from brim.state.lock import locked, owner_of
from brim.state.retry import interrupted_by, stop_delayed
from brim.storage.destination_address import user_state
from brim.storage.explain_error import explain_errors
from brim.storage.lease import Lease
from brim.storage.listing import list_files, read_file, stat_file
from brim.storage.location import Access, Location, folder_location, is_remote, parse_location
from brim.storage.reading import RangeStream, RemoteFile
from brim.storage.storage import open_storage
from brim.storage.upload_content import SilentWatcher

_FOLDER = re.compile(r"(\d{5})-of-(\d{5})")
_MAX_PARTS = 99_999


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of `count`, from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def folder(self) -> str:
        return f"{self.number:05d}-of-{self.count:05d}"


def parse_part(text: str) -> Part:
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    part = Part(int(match[1]), int(match[2])) if match else None
    if part is None or not 1 <= part.number <= part.count <= _MAX_PARTS:
        raise InputError(f"--part must be I/N, the I-th of N parts from 1, not {text!r}.", hint="Write --part=3/100.")
    return part


def divide(shards: Sequence[Shard], count: int) -> Ints:
    """Return the edges of `count` parts: consecutive shards, about equal bytes.

    They depend on the plan alone, so that every machine divides alike. A part may be empty: if there are more
    parts than shards, or a shard is larger than a part should be.
    """
    before = cuts.running(np.array([shard.file_bytes + shard.value_bytes + 1 for shard in shards], np.int64))
    middles = (before[:-1] + before[1:]) / 2.0  # a shard belongs to the part that its middle falls into
    edges = np.searchsorted(middles, float(before[-1]) * np.arange(count + 1) / count)
    return np.asarray(edges, np.int64)


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            yield block


class PartReceipts:
    """The receipts of all parts of one saved plan."""

    def __init__(self, plan: Path) -> None:
        self.root = plan.with_name(f"{plan.name}.parts")
        self.shown = str(self.root)  # its name for users

    def count(self) -> int | None:
        """Return into how many parts the plan was divided; None if no part has begun."""
        counts = {int(match[2]) for match in map(_FOLDER.fullmatch, self._names()) if match}
        if len(counts) > 1:
            raise InputError(
                f"{self.shown!r} has parts of several divisions: {', '.join(map(str, sorted(counts)))}.",
                hint="Remove the folders of the wrong one.",
            )
        return next(iter(counts), None)

    def _names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.root.iterdir() if entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(error) from error

    def ledger(self, part: Part) -> Ledger:
        return Ledger(self.root / part.folder)

    def ledgers(self) -> Iterator[tuple[Part, Ledger]]:
        """Yield every part that has begun, with its ledger."""
        for match in filter(None, map(_FOLDER.fullmatch, self._names())):
            part = Part(int(match[1]), int(match[2]))
            yield part, self.ledger(part)

    def check(self, part: Part, ledger: Ledger, fingerprint: str) -> None:
        """Raise an InputError for receipts of another plan: two plans must not be mixed."""
        if ledger.job is not None and ledger.job.fingerprint != fingerprint:
            raise InputError(
                f"{self.shown!r} has receipts of another plan, in part {part}.",
                hint="Save this plan under another name, or remove that folder if its results are not needed.",
            )

    def all(self, fingerprint: str) -> dict[str, Receipt]:
        """Return every receipt of the plan, by the name of its shard."""
        receipts: dict[str, Receipt] = {}
        for part, ledger in self.ledgers():
            self.check(part, ledger, fingerprint)
            receipts |= ledger.receipts
        return receipts

    @contextmanager
    def part(self, part: Part) -> Iterator[Path]:
        """Lock the folder of a part, for one run alone."""
        self._need_count(part)
        folder = self.root / part.folder
        self._make(folder)
        with (
            locked(self.root, shared=True, busy="This plan is being finished by another brim."),
            locked(folder, busy=f"Part {part} is being done by another brim."),
        ):
            self._need_count(part)  # another division may have begun at the same time
            yield folder

    def _need_count(self, part: Part) -> None:
        count = self.count()
        if count is not None and count != part.count:
            raise InputError(
                f"This plan is divided into {count} parts, and --part={part} belongs to another division.",
                hint=f"Use --part I/{count}; or run without --part to do the rest on one machine; or remove "
                f"{self.shown!r} to divide it again.",
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock all parts, for the run that finishes the plan."""
        self._make(self.root)
        with locked(self.root, busy="Parts of this plan are being done, or it is being finished."):
            yield

    def forget(self, names: Iterable[str]) -> None:
        """Forget receipts, so that their parts do these shards again. Only while `alone`."""
        forgotten = set(names)
        if not forgotten:
            return
        for _, ledger in self.ledgers():
            for name in sorted(forgotten & ledger.receipts.keys()):
                ledger.forget(name)
            ledger.close()

    def unit_files(self, part: Part, folder: Path) -> UnitFiles:
        """Return where the unit files of a part are: in its folder, which every machine sees."""
        return UnitFiles(folder)

    def download(self, part: Part, name: str, folder: Path, sha256: str = "") -> None:
        """Copy or link a file of a part, which must have this SHA-256, into a local folder. Only while `alone`."""
        source, target = self.root / part.folder / name, folder / name
        try:
            if sha256 and sha256_of(source, lambda _: None) != sha256:
                raise VerificationError(f"{str(source)!r} differs from what was computed.")
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except OSError:  # another disk, or a file system without links
                write_whole(target, _blocks(source))
            sync_folder(folder)
        except (FileNotFoundError, VerificationError) as error:
            self.forget([name])  # or its part would take the receipt as valid
            raise _missing_unit(str(source), part) from error

    def _make(self, folder: Path) -> None:
        try:
            self.root.mkdir(exist_ok=True, mode=0o700)
            if folder != self.root:
                folder.mkdir(exist_ok=True)
                (folder / LEDGER).touch()
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> DestinationError:
        return DestinationError(
            f"The folder of the receipts, {str(self.root)!r}, cannot be used: {reason(error)}.",
            hint="Keep the plan in a folder that all machines can write to.",
        )


def _missing_unit(unit: str, part: Part) -> InputError:
    return InputError(f"{unit!r} is missing or differs from what part {part} computed.", hint="Run that part again.")


def listed(numbers: Sequence[int]) -> str:
    """Return sorted numbers for users: 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


_COPY_S = 5.0
_MOMENT_S = 0.5


@dataclass(frozen=True, slots=True)
class PlanPlace:
    """A plan as a local file, and the receipts of its parts, local or remote. `shown` is its name for users."""

    path: Path
    shown: str
    receipts: PartReceipts


def open_place(plan: str | os.PathLike[str], access: Access | None = None) -> PlanPlace:
    """Open a saved plan. A remote one is copied to this machine."""
    location = _parse(plan, access)
    receipts = receipts_at(plan, access)
    if location.is_local:
        return PlanPlace(location.path, str(location), receipts)
    info = stat_file(location)
    if info is None:
        raise InputError(f"No plan is saved at {location}.", hint="Save one with brim plan SOURCE DEST --save PLAN.")
    # Another plan under the same name has another ETag, and other receipts.
    path = _home(location) / f"{hashlib.sha256(info.etag.encode()).hexdigest()[:16]}.plan"
    if not path.exists() or path.stat().st_size != info.st_size:  # a crash of the machine may have cut it off
        # Parts that start together on one machine each fetch it; the last one wins.
        temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        file = RemoteFile(location, "", info.st_size, info.etag)
        try:
            with (
                _usable(path.parent),
                open(temporary, "wb") as copy,
                RangeStream(location, file.ranges(0, file.size)) as stream,
            ):
                copy.writelines(view for _, view in stream)
            os.chmod(temporary, 0o600)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
    return PlanPlace(path, str(location), receipts)


def receipts_at(plan: str | os.PathLike[str], access: Access | None = None) -> PartReceipts:
    """Return the receipts of the parts of a plan, which may have none."""
    location = _parse(plan, access)
    return PartReceipts(location.path) if location.is_local else BucketReceipts(location, _home(location))


JOB_PLAN = "brim computed plan"  # the first words of a plan of map, tokenize or embed


def is_job_plan(path: Path) -> bool:
    """Return whether a saved plan is one of a computed job; those of a build are Arrow files."""
    return JOB_PLAN.encode() in _head(path)


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(64)
    except OSError:
        return b""


def check_plan_place(plan: str | os.PathLike[str]) -> None:
    """Refuse to save a plan over another file, such as its source, before it is made."""
    location = _parse(plan)
    path = location.path
    if not location.is_local or not os.path.lexists(path):
        return
    is_plan = path.is_file() and (not path.stat().st_size or is_job_plan(path) or _head(path).startswith(PLAN_MAGIC))
    if not is_plan:
        raise InputError(
            f"{str(path)!r} already exists and is not a plan of brim.", hint="Name a new file for the plan."
        )


def save_to(plan: str | os.PathLike[str], write: Callable[[Path], None], access: Access | None = None) -> None:
    """Write a plan to a file, and upload it if its location is in a bucket."""
    location = _parse(plan, access)
    if location.is_local:
        write(location.path)
        return
    if not location.prefix:
        raise InputError(
            f"{os.fspath(plan)!r} names a bucket, but not a plan in it.", hint="Write s3://BUCKET/NAME.plan."
        )
    temporary = _home(location) / f"new-{secrets.token_hex(8)}.plan"
    try:
        write(temporary)
        with FileSplice(temporary) as splice:
            open_storage(location.parent).put(location.prefix.rpartition("/")[2], splice, None, SilentWatcher())
    finally:
        temporary.unlink(missing_ok=True)


def _parse(plan: str | os.PathLike[str], access: Access | None = None) -> Location:
    text = os.fspath(plan)
    location = parse_location(text, access) if is_remote(text) else folder_location(text)
    if location.is_bucket or (location.is_local and "://" not in text):
        return location
    raise InputError(f"A plan must be a file or an object in a bucket, not {text!r}.", hint="Name a file, or s3://…")


def _home(address: Location) -> Path:
    """Return the local folder for a plan in a bucket, its copy and its ledgers."""
    home = user_state("plans", f"{address} {address.access.endpoint or ''}", address.prefix)
    with _usable(home):
        private_folder(home)
    return home


@contextmanager
def _usable(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DestinationError(
            f"The folder for copies of plans in buckets, {str(home)!r}, cannot be used: {reason(error)}.",
            hint="Set XDG_STATE_HOME to another folder.",
        ) from error


class BucketReceipts(PartReceipts):
    """`PLAN.parts/` in a bucket."""

    def __init__(self, plan: Location, home: Path) -> None:
        super().__init__(home / "x")
        self.root = home / "parts"
        self._address = replace(plan, prefix=f"{plan.prefix}.parts")
        self.shown = str(self._address)

    def _names(self) -> list[str]:
        return sorted({name.split("/", 1)[0] for name, _ in list_files(self._address) if name.endswith(LEDGER)})

    def _read(self, part: Part) -> bytes | None:
        return read_file(self._address, f"{part.folder}/{LEDGER}")

    def _write(self, part: Part, data: bytes) -> None:
        with explain_errors(self._address):
            open_storage(self._address).put_bytes(f"{part.folder}/{LEDGER}", data)

    def ledger(self, part: Part) -> Ledger:
        return Ledger.from_bytes(self._read(part) or b"")

    @contextmanager
    def part(self, part: Part) -> Iterator[Path]:
        self._need_count(part)
        folder = self.root / part.folder
        self._make(folder)
        with (
            locked(folder, busy=f"Part {part} is being done by another brim."),
            _leased(self._address.child(part.folder), folder),
        ):
            write_whole(folder / LEDGER, _longer(self._read(part), (folder / LEDGER).read_bytes()))
            with self._copied(part, folder):
                self._need_count(part)
                yield folder

    @contextmanager
    def _copied(self, part: Part, folder: Path) -> Iterator[None]:
        """Copy the ledger to the bucket every few seconds."""
        is_over, is_stopped = threading.Event(), threading.Event()
        sent: list[bytes] = []

        def copy() -> None:
            data = (folder / LEDGER).read_bytes()
            if [data] != sent:
                self._write(part, data)
                sent[:] = [data]

        def copy_regularly() -> None:
            with interrupted_by(lambda: _give_up() if is_stopped.is_set() else None):
                while not is_over.wait(_COPY_S):
                    try:
                        copy()
                    except Exception:  # noqa: BLE001  the network may be down: the last copy decides
                        continue

        copy()  # other machines see that the part has begun
        thread = threading.Thread(target=copy_regularly, name="receipts", daemon=True)
        thread.start()
        try:
            yield
        except (StoppedError, KeyboardInterrupt):
            is_stopped.set()
            raise
        finally:
            is_over.set()
            thread.join()
            with _hurried():
                copy()

    def unit_files(self, part: Part, folder: Path) -> UnitFiles:
        return BucketUnits(folder, self._address.child(part.folder), stores=True)

    def download(self, part: Part, name: str, folder: Path, sha256: str = "") -> None:
        location = self._address.child(part.folder)
        try:
            download_unit(location, name, folder, sha256)
        except (VerificationError, DestinationError) as error:
            self.forget([name])  # or its part would take the receipt as valid
            raise _missing_unit(str(location.child(name)), part) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the plan. Parts that still run lose nothing: only complete parts are published."""
        self._make(self.root)
        with (
            locked(self.root, busy="This plan is being finished by another brim."),
            _leased(self._address, self.root),
        ):
            yield

    def forget(self, names: Iterable[str]) -> None:
        forgotten = set(names)
        for part, copied in list(self.ledgers()) if forgotten else []:
            in_part = forgotten & copied.receipts.keys()
            if in_part:
                folder = self.root / part.folder
                self._make(folder)
                write_whole(folder / LEDGER, self._read(part) or b"")
                ledger = Ledger(folder)
                for name in sorted(in_part):
                    ledger.forget(name)
                ledger.close()
                self._write(part, (folder / LEDGER).read_bytes())


@contextmanager
def _leased(address: Location, folder: Path) -> Iterator[None]:
    """Hold the lease of a location; `folder` is the local folder of the same run."""
    lease = Lease(address, owner_of(folder), lambda text: None)
    lease.take(lambda: None)
    try:
        yield
    finally:
        with _hurried():
            lease.release()


@contextmanager
def _hurried() -> Iterator[None]:
    """Run the last steps of a run. If it was stopped, they wait only briefly for a silent store."""
    if not isinstance(sys.exception(), StoppedError | KeyboardInterrupt):
        yield
        return
    with suppress(StoppedError), interrupted_by(_give_up), stop_delayed(_MOMENT_S):
        yield


def _give_up() -> None:
    raise StoppedError("The store does not answer.")


def _longer(remote: bytes | None, local: bytes) -> bytes:
    """Return the ledger with more records: the local one, if it continues that of the bucket.

    The bucket has an empty one first. If it has none, the parts were removed.
    """
    return b"" if remote is None else local if local.startswith(remote) else remote
