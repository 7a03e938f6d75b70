"""Cache entries: results that were computed without a destination, one folder per job, found by its fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.compute.outputs.rows_file import read_schema
from brim.compute.steps.row_features import as_schema, features_of, import_datasets
from brim.errors import DestinationError, InputError, VerificationError
from brim.execution.unit_receipts import clear_scratch, scratch_files
from brim.plans.fingerprint import digest_json
from brim.records import dataclass
from brim.sizes import parse_size
from brim.state.atomic_files import reason, write_whole
from brim.state.ledger import LEDGER, Ledger
from brim.state.lock import locked
from brim.storage.destination_address import UNITS

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
        """Days since the cache was last used."""
        return max(time.time() - self.used_at, 0.0) / 86400


def cache_home(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all entries: the given one, or $BRIM_CACHE, or the user's cache folder."""
    if cache_dir is not None:
        return Path(os.path.abspath(cache_dir))
    if os.environ.get("BRIM_CACHE"):
        return Path(os.path.abspath(os.environ["BRIM_CACHE"]))
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "brim" / "map"


def cache_max() -> int | None:
    """Return the maximum size of all entries together, $BRIM_CACHE_MAX."""
    text = os.environ.get("BRIM_CACHE_MAX")
    if not text:
        return None
    try:
        return parse_size(text)
    except InputError as error:
        raise InputError(f"BRIM_CACHE_MAX: {error.words[0]}", hint=error.words[1]) from error


def cache_key(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what identifies the entry of a job. An iterator can be identified by a name only."""
    source = facts["source"]
    if "iterator" in source and "name" not in source:
        return facts | {"once": secrets.token_hex(16)}
    return facts


def trim_caches(home: Path) -> None:
    """Remove the least recently used entries until the rest is within $BRIM_CACHE_MAX. Open datasets are kept."""
    limit = cache_max()
    if limit is None:
        return
    entries = list_caches(home)
    total = sum(entry.bytes for entry in entries)
    mapped: set[str] | None = None
    for entry in entries:
        if total <= limit:
            return
        if mapped is None:
            mapped = _mapped_files()
        prefix = os.path.realpath(entry.folder) + os.sep
        if not any(path.startswith(prefix) for path in mapped) and remove_cache(entry):
            total -= entry.bytes


def _mapped_files() -> set[str]:
    """Return all memory-mapped files of the processes that may be inspected: a dataset in use is mapped."""
    paths: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:
            continue  # of another user, or it has ended
        paths.update(line[line.index("/") :] for line in lines if "/" in line)
    return paths


def open_cache(home: Path, name: str, about: dict[str, Any], *, adopts: bool = False) -> Path:
    """Return the folder of a job, which is made if it is new. `about` describes it for `brim clean`.

    `adopts`: an unfinished entry whose name begins alike (only the function differs) is renamed to this one.
    """
    folder = home / name
    try:
        if adopts and not folder.exists():
            pattern = f"{name.partition('-')[0]}-*"
            similar = [path for path in home.glob(pattern) if not Ledger(path / UNITS).is_finished]
            with suppress(FileNotFoundError):  # another process has renamed it
                latest = max(similar, key=lambda path: path.stat().st_mtime, default=None)
                if latest is not None:
                    with locked(latest):
                        latest.rename(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Ranks of a program open it at the same time, perhaps on several machines.
        write_whole(folder / _ABOUT, json.dumps(about).encode(), mark=f".{secrets.token_hex(4)}")
    except OSError as error:
        raise DestinationError(
            f"The cache folder {str(folder)!r} cannot be used: {reason(error)}.",
            hint="Choose another one with cache_dir=, or set BRIM_CACHE.",
        ) from error
    return folder


def sweep_caches(home: Path) -> None:
    """Remove what killed processes left in any entry, except for finished units."""
    for folder in home.iterdir() if home.is_dir() else ():
        if (folder / _ABOUT).is_file() and next(scratch_files(folder / UNITS), None) is not None:
            with suppress(DestinationError, FileNotFoundError), locked(folder):  # in use, or removed just now
                clear_scratch(folder / UNITS)


def list_caches(home: Path) -> list[CacheEntry]:
    """Return all entries, the least recently used first."""
    entries = []
    for folder in sorted(home.iterdir()) if home.is_dir() else []:
        if not (folder / _ABOUT).is_file():
            continue  # not an entry of brim
        # The ledger of the finished result if there is one, otherwise that of the units.
        about, units, ledger = _read_about(folder), Ledger(folder / UNITS), Ledger(folder)
        ledger = ledger if ledger.is_finished else units
        entries.append(
            CacheEntry(
                folder,
                sum(map(_file_size, folder.rglob("*"))),
                (folder / _ABOUT).stat().st_mtime,
                ledger.is_finished,
                str(about.get("what", "?")),
                str(about.get("source", "?")),
                sum(receipt.rows for receipt in ledger.receipts.values()),
            )
        )
    return sorted(entries, key=lambda entry: entry.used_at)


def _file_size(path: Path) -> int:
    """Return the size of a file; 0 for anything else, and for a file that was removed since it was listed."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def remove_cache(entry: CacheEntry) -> bool:
    """Remove an entry; return False if a job uses it. Open datasets stay readable until they are closed."""
    return remove_folder(entry.folder)


def remove_folder(folder: Path) -> bool:
    try:
        with locked(folder):
            for ledger_dir in (folder / UNITS, folder):
                (ledger_dir / LEDGER).unlink(missing_ok=True)  # first: without it the rest does not count
            shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():  # a process that waits for the lock has made its file again
                shutil.rmtree(folder)
    except DestinationError:
        return False
    except OSError as error:
        raise InputError(f"The cache {str(folder)!r} cannot be removed: {reason(error)}.") from error
    return True


def _read_about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / _ABOUT).read_text())
        return about if isinstance(about, dict) else {}
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True, slots=True)
class CachedFiles:
    """The files of a finished job, in order, all with the same schema."""

    files: Sequence[Path]
    schema: pa.Schema
    fingerprint: str


def read_cached(folder: Path, ledger: Ledger, empty: Callable[[bool], pa.Schema]) -> CachedFiles:
    """Return the files of a finished ledger of units. `empty` gives the schema of a result without rows."""
    assert ledger.job is not None
    receipts = [ledger.receipts[name] for name in sorted(ledger.receipts)]
    files = [folder / receipt.name for receipt in receipts if receipt.rows]
    schema = read_schema(files[0], "arrow") if files else empty(bool(receipts))
    fingerprint = ledger.job.fingerprint
    if ledger.source is not None:  # the same job on other content is another dataset
        fingerprint = digest_json([fingerprint, *([receipt.key, receipt.source] for receipt in receipts)])
    return CachedFiles(files, schema, fingerprint)


def open_dataset(
    files: Sequence[Path],
    schema: Any,
    fingerprint: str | None = None,
    *,
    info: Any = None,
    split: Any = None,
    name: str | None = None,
) -> Any:
    """Return a Dataset over Arrow stream files, in order, memory-mapped: only the positions of batches are in memory.

    `schema` is a pa.Schema with features in its metadata, a datasets.Features, or its dict; the files have its
    types. Files without rows are skipped. `info` and `split` are those of the dataset that was mapped. The fingerprint
    of the dataset is made of `fingerprint`, unless `name` is given.
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
        table = ConcatenationTable(pa.concat_tables([block.table for block in blocks]), [[block] for block in blocks])
    info = info.copy() if info is not None else datasets.DatasetInfo()
    info.features = features
    if name is None and fingerprint:
        name = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    return datasets.Dataset(table, info=info, split=split, fingerprint=name)
