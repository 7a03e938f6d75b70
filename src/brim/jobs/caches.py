"""Where what was computed without a destination is kept: a folder for each job, found by its fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.compute.outputs.output import MadeShard
from brim.compute.outputs.rows_file import read_rows, read_schema
from brim.compute.steps.row_features import as_schema, features_of, import_datasets
from brim.errors import DestinationError, InputError, VerificationError
from brim.execution.unit_receipts import clear_scratch, scratch_files
from brim.jobs.spec import WriteBadRows
from brim.plans.fingerprint import digest_json
from brim.records import dataclass
from brim.sizes import parse_size
from brim.state.atomic_files import reason, rename, sha256_of, sync_file, sync_folder, write_whole
from brim.state.ledger import LEDGER, Ledger, Receipt
from brim.state.lock import locked
from brim.storage.location import Location, folder_location
from brim.storage.upload_content import UploadWatcher
from brim.stores.destination import UNITS, Footprints

_ABOUT = "about.json"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A cache folder, for people."""

    folder: Path
    bytes: int
    used_at: float
    done: bool
    what: str
    source: str
    rows: int
    removed: bool = False

    @property
    def age_days(self) -> float:
        return max(time.time() - self.used_at, 0.0) / 86400


def cache_home(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all caches: as given, or $BRIM_CACHE, or the user's cache folder."""
    if cache_dir is not None:
        return Path(os.path.abspath(cache_dir))
    if os.environ.get("BRIM_CACHE"):
        return Path(os.path.abspath(os.environ["BRIM_CACHE"]))
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "brim" / "map"


def cache_max() -> int | None:
    """What all caches may hold together: $BRIM_CACHE_MAX."""
    said = os.environ.get("BRIM_CACHE_MAX")
    if not said:
        return None
    try:
        return parse_size(said)
    except InputError as error:
        raise InputError(f"BRIM_CACHE_MAX: {error.words[0]}", hint=error.words[1]) from error


def cache_key(facts: dict[str, Any]) -> dict[str, Any]:
    """What the folder of a job is known by. What an iterator gives is known by nothing but a name for it."""
    source = facts["source"]
    if "iterator" in source and "name" not in source:
        return facts | {"once": secrets.token_hex(16)}
    return facts


def trim_caches(home: Path) -> None:
    """Remove what was not used for longest, until the rest is within $BRIM_CACHE_MAX. What is in use stays."""
    most = cache_max()
    if most is None:
        return
    found = list_caches(home)
    total = sum(one.bytes for one in found)
    used: set[str] | None = None
    for one in found:
        if total <= most:
            return
        if used is None:
            used = _mapped_files()
        own = os.path.realpath(one.folder) + os.sep
        if not any(path.startswith(own) for path in used) and remove_cache(one):
            total -= one.bytes


def _mapped_files() -> set[str]:
    """All files that a process has open as memory, where that can be seen: a dataset that is in use is."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:
            continue  # somebody else's, or it has ended
        found.update(line[line.index("/") :] for line in lines if "/" in line)
    return found


def open_cache(home: Path, name: str, about: dict[str, Any], *, adopt: bool = False) -> Path:
    """The folder of one job, made if it is new. What it is about is told for `brim clean`.

    `adopt`: an unfinished job whose name begins alike (the function alone differs) becomes this one.
    """
    folder = home / name
    try:
        if adopt and not folder.exists():
            _adopt(home, name)
        folder.mkdir(parents=True, exist_ok=True)
        # Ranks of a program open it at the same moment, perhaps on several machines.
        write_whole(folder / _ABOUT, json.dumps(about).encode(), mark=f".{secrets.token_hex(4)}")
    except OSError as error:
        raise DestinationError(
            f"The cache folder {str(folder)!r} cannot be used: {reason(error)}.",
            hint="Choose another one with cache_dir=, or set BRIM_CACHE.",
        ) from error
    return folder


def _adopt(home: Path, name: str) -> None:
    alike = [path for path in home.glob(f"{name.partition('-')[0]}-*") if not Ledger(path / "units").done]
    with suppress(FileNotFoundError):  # another process has made it its own
        latest = max(alike, key=lambda path: path.stat().st_mtime, default=None)
        if latest is not None:
            with locked(latest):
                latest.rename(home / name)


def sweep_caches(home: Path) -> None:
    """Take away what killed processes left in any cache, apart from the units that they finished."""
    for folder in home.iterdir() if home.is_dir() else ():
        if (folder / _ABOUT).is_file() and next(scratch_files(folder / "units"), None) is not None:
            with suppress(DestinationError, FileNotFoundError), locked(folder):  # somebody is using it, or removed it
                clear_scratch(folder / "units")


def list_caches(home: Path) -> list[CacheEntry]:
    """Every cache, the one used longest ago first."""
    found = []
    for folder in sorted(home.iterdir()) if home.is_dir() else []:
        if not (folder / _ABOUT).is_file():
            continue  # not ours
        about = _about(folder)
        ledger = _ledger(folder)
        found.append(
            CacheEntry(
                folder,
                sum(map(_size_of, folder.rglob("*"))),
                (folder / _ABOUT).stat().st_mtime,
                ledger.done,
                str(about.get("what", "?")),
                str(about.get("source", "?")),
                sum(receipt.rows for receipt in ledger.receipts.values()),
            )
        )
    return sorted(found, key=lambda cached: cached.used_at)


def _size_of(path: Path) -> int:
    """Of a file; nothing of what is none, or is gone since it was listed."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def remove_cache(cached: CacheEntry) -> bool:
    """Take a cache away; False if a job is using it. Datasets that are open stay readable until they are closed."""
    return remove_folder(cached.folder)


def remove_folder(folder: Path) -> bool:
    try:
        with locked(folder):
            for books in _books(folder):
                (books / LEDGER).unlink(missing_ok=True)  # first: a half removed cache is no cache
            shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():  # something was put there meanwhile: whoever waits for the lock makes its file
                shutil.rmtree(folder)
    except DestinationError:
        return False
    except OSError as error:
        raise InputError(f"The cache {str(folder)!r} cannot be removed: {reason(error)}.") from error
    return True


def _books(folder: Path) -> tuple[Path, Path]:
    """Where the ledger is: with the units that are the result, or above what is made of them."""
    return folder / "units", folder


def _ledger(folder: Path) -> Ledger:
    """The one that says most: of what is finished, else of the units so far."""
    units, made = (Ledger(books) for books in _books(folder))
    return made if made.done else units


def _about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / _ABOUT).read_text())
        return about if isinstance(about, dict) else {}
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A folder of `home`, found again by its name: unit files are the result, and stay.

    `adopt`: an unfinished job whose name begins alike becomes this one. `about` is told to `brim clean`.
    """

    home: Path
    name: str
    about: Mapping[str, Any] = field(default_factory=dict)
    adopt: bool = False
    apart = False
    waits = True

    @property
    def destination(self) -> Location:
        return folder_location(self.home)

    @property
    def place(self) -> Location:
        return folder_location(self.units)

    @property
    def state(self) -> Path:
        return self.home / self.name

    @property
    def books(self) -> Path:
        return self.units

    @property
    def units(self) -> Path:
        return self.state / UNITS

    @property
    def failing(self) -> Path:
        return self.state

    @property
    def taken(self) -> list[Location]:
        return [folder_location(self.state)]

    def footprints(self) -> Footprints:
        return Footprints(None, self.state)

    def make(self) -> None:
        sweep_caches(self.home)
        open_cache(self.home, self.name, dict(self.about), adopt=self.adopt)

    def work(self, fingerprint: str, fresh: bool) -> Path:
        return self.units / "made"

    def store(self) -> None:
        """Nothing is put anywhere: it is computed in its place."""

    def holds(self, ledger: Ledger) -> bool:
        sizes = {path.name: path.stat().st_size for path in self.units.iterdir()}
        return all(sizes.get(receipt.name) == receipt.size for receipt in ledger.receipts.values())

    def refuse_strangers(self, ledger: Ledger, fresh: bool) -> None:
        """Nobody else writes there."""

    def keep_bad_rows(self, write: WriteBadRows, fresh: bool, watcher: UploadWatcher) -> None:
        """They stay with their units."""

    def clear(self) -> None:
        shutil.rmtree(self.units / "made", ignore_errors=True)


def check_unsynced(folder: Path, ledger: Ledger) -> None:
    """Read files that version 0.1 did not sync, once: those that are complete are synced and keep their receipts."""
    complete = []
    for receipt in list(ledger.unsynced.values()):
        path = folder / receipt.name
        try:
            if path.stat().st_size != receipt.size or receipt.sha256 not in ("", sha256_of(path, lambda _: None)):
                continue
            if sum(table.num_rows for table in read_rows(path, "arrow")) == receipt.rows:
                sync_file(path)
                complete.append(receipt)
        except (OSError, pa.ArrowException):
            continue  # it is computed again
    if complete:
        sync_folder(folder)
        is_finished = ledger.finished_unsynced and len(complete) == len(ledger.unsynced)
        ledger.add_all(complete)
        if is_finished:
            ledger.finish([ledger.receipts[name] for name in sorted(ledger.receipts)])


@dataclass(frozen=True, slots=True)
class Kept:
    """The files of a finished job, in order, all of one schema."""

    files: Sequence[Path]
    schema: pa.Schema
    fingerprint: str


def read_kept(folder: Path, ledger: Ledger, empty: Callable[[bool], pa.Schema]) -> Kept:
    """What a finished ledger of units says is kept. `empty` gives the schema where no row came out."""
    assert ledger.job is not None
    receipts = [ledger.receipts[name] for name in sorted(ledger.receipts)]
    files = [folder / receipt.name for receipt in receipts if receipt.rows]
    schema = read_schema(files[0], "arrow") if files else empty(bool(receipts))
    fingerprint = ledger.job.fingerprint
    if ledger.source is not None:  # the same job over other content is another dataset
        fingerprint = digest_json([fingerprint, *([receipt.key, receipt.source] for receipt in receipts)])
    return Kept(files, schema, fingerprint)


def keep_in_place(folder: Path, receipts: Sequence[Receipt], made: Iterable[MadeShard], units: Ledger) -> None:
    """Unit files become what is kept: one that had to be `made` again takes the place of what it was."""
    again = {one.path.name: one for one in made if one.path.parent != folder}
    kept = []
    for receipt in receipts:
        one = again.get(receipt.name)
        if one is not None:
            units.forget(receipt.name)  # before its file becomes another one
            rename(one.path, folder / receipt.name)
            receipt = replace(receipt, rows=one.rows, size=one.size, sha256=one.sha256)
            units.add(receipt)
        kept.append(receipt.name)
    units.finish([units.receipts[name] for name in kept])


def open_dataset(
    files: Sequence[Path],
    schema: Any,
    fingerprint: str | None = None,
    *,
    info: Any = None,
    split: Any = None,
    name: str | None = None,
) -> Any:
    """A Dataset over Arrow stream files, in order, mapped from disk: nothing is held but where batches are.

    `schema` is a pa.Schema with features in its metadata, a datasets.Features, or its dict; the files have its
    types. Files without rows are left out. `info` and `split` are those of the dataset that was mapped. The dataset's
    own fingerprint is made of `fingerprint`, unless it is given as `name`.
    """
    datasets = import_datasets("reading the result as a Dataset")
    from datasets.table import ConcatenationTable, InMemoryTable, MemoryMappedTable

    schema = as_schema(schema)
    features = datasets.Features.from_dict(features_of(schema))
    blocks = []
    for path in files:
        try:
            block = MemoryMappedTable.from_file(os.fspath(path))
        except (pa.ArrowInvalid, OSError) as error:
            raise VerificationError(f"{path} cannot be read: {error}.", hint="Remove it and run again.") from error
        if block.num_rows:
            blocks.append(block)
    if not blocks:
        table: Any = InMemoryTable(features.arrow_schema.empty_table())
    elif len(blocks) == 1:
        table = blocks[0]
    else:
        table = ConcatenationTable(pa.concat_tables([block.table for block in blocks]), [[one] for one in blocks])
    made = info.copy() if info is not None else datasets.DatasetInfo()
    made.features = features
    if name is None and fingerprint:
        name = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    return datasets.Dataset(table, info=made, split=split, fingerprint=name)
