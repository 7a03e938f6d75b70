"""A published dataset, as verify and unpack see it: its shards, their receipts, its card, its subsets.

The shards of a config or split, and whether they are complete, follow from the manifests, else from the card, else from
the names of the shards. `--from-config` and `--from-split` narrow a dataset for verify, check, info and unpack.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from brim.errors import BrimError, InputError
from brim.formats.card import BEGIN, CARD, card_folders, read_card
from brim.formats.card_configs import UNFINISHED, card_entries, fits, is_unfinished, patterns_of
from brim.formats.range_readers import LocalFile, Readable
from brim.plans.fingerprint import digest_json
from brim.progress import Advance
from brim.records import dataclass
from brim.state.atomic_files import reading, sha256_of
from brim.state.ledger import LEDGER, STATE, JobRecord, Ledger, Receipt
from brim.storage.destination_address import MANIFESTS, parse_destination, state_folder
from brim.storage.hub_session import Note, explain_hub_errors, hub_session
from brim.storage.listing import list_files, read_file
from brim.storage.location import Access, Location, folder_location
from brim.storage.reading import ForwardFile, RandomFile, RemoteFile
from brim.storage.storage import FileInfo, Storage, open_storage

SHARD_NAME = re.compile(
    r"(?P<folder>.+)/(?P<split>[^/]+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.(?:parquet|tar|arrow)"
)
State = Literal["whole", "unfinished", "incomplete", "not brim's"]
Key = tuple[str, str]  # config and split


@dataclass(frozen=True, slots=True)
class Subset:
    """A split of a config. `expected` is how many shards it should have, as far as it is known."""

    config: str
    split: str
    names: tuple[str, ...]
    expected: int | None
    state: State

    @property
    def name(self) -> str:
        return self.split if self.config == "default" else f"{self.config}/{self.split}"

    @property
    def state_text(self) -> str:
        """Return its state for users."""
        if self.state == "unfinished":
            expected = f" of {self.expected:,}" if self.expected else ""
            return f"unfinished: {len(self.names):,}{expected} shards; run the same build to finish"
        if self.state == "incomplete":
            return f"incomplete: {len(self.names):,} of {self.expected or 0:,} shards"
        return self.state


def find_subsets(
    sizes: Mapping[str, int],
    receipts: Mapping[str, Receipt],
    listed: Mapping[Key, Sequence[str]],
    fields: dict[str, Any],
    unfinished: bool,
) -> list[Subset]:
    """Return every config and split that a manifest (`listed`: its shards), the card or a shard's name mentions.

    `unfinished`: all of it, by the local ledger.
    """
    shards: dict[Key, list[str]] = {key: list(names) for key, names in listed.items()}
    claimed = set(receipts)
    unfinished_keys: set[tuple[str, str | None]] = set()
    for entry in card_entries(fields):
        config = str(entry["config_name"])
        patterns = patterns_of(entry)
        splits = [split for split, path in patterns if path == UNFINISHED]
        if splits:
            unfinished_keys |= {(config, None if len(splits) == len(patterns) else split) for split in splits}
        for split, pattern in patterns:
            fitting = [name for name in sizes if pattern != UNFINISHED and fits(name, pattern)]
            foreign = claimed - set(shards.get((config, split), ()))
            fitting = [name for name in fitting if name not in foreign or name not in receipts]
            if fitting or (split, config) not in shards:
                names = shards.setdefault((config, split), [])
                names += [name for name in fitting if name not in names]
                claimed |= set(fitting)
    for name in sizes:
        if name not in claimed:
            match = SHARD_NAME.fullmatch(name)
            folder = match["folder"] if match else name.rpartition("/")[0]
            key = ("default" if folder in ("data", "") else folder, match["split"] if match else "train")
            shards.setdefault(key, []).append(name)
    subsets = (_subset(key, names, sizes, receipts, unfinished_keys, unfinished) for key, names in shards.items())
    return [subset for subset in subsets if subset is not None]


def _subset(
    key: Key,
    names: list[str],
    sizes: Mapping[str, int],
    receipts: Mapping[str, Receipt],
    unfinished_keys: set[tuple[str, str | None]],
    unfinished: bool,
) -> Subset | None:
    existing = sorted(name for name in names if name in sizes)
    recorded = [name for name in names if name in receipts]
    if unfinished or (key[0], None) in unfinished_keys or key in unfinished_keys:
        # Those of an earlier version may still exist, under names that its manifest knows.
        fresh = existing if unfinished else [name for name in existing if name not in receipts] or existing
        counts = {int(match["count"]) for name in fresh if (match := SHARD_NAME.fullmatch(name))}
        if not fresh and not recorded and any(config == key[0] and split is None for config, split in unfinished_keys):
            return Subset(*key, (), None, "unfinished")
        expected = max(counts, default=0) or None
        fresh = fresh if unfinished else [n for n in fresh if f"-of-{expected or 0:05d}" in n] or fresh
        return Subset(*key, tuple(fresh), expected, "unfinished")
    if recorded:
        is_complete = all(sizes.get(name) == receipts[name].size for name in recorded)
        return Subset(*key, tuple(existing), len(recorded), "whole" if is_complete else "incomplete")
    if not existing:
        return None
    missing = list(missing_numbers(existing))
    return Subset(*key, tuple(existing), len(existing) + len(missing), "incomplete" if missing else "not brim's")


def missing_numbers(names: Sequence[str]) -> Iterator[tuple[str, str, int, int, str]]:
    """Yield (folder, split, number, count, extension) of shards that names imply and that do not exist.

    Numbers of appended rows continue, and the largest count is that of all.
    """
    kinds: dict[tuple[str, str, str], tuple[set[int], int]] = {}
    for name in names:
        if match := SHARD_NAME.fullmatch(name):
            kind = (match["folder"], match["split"], f".{name.rpartition('.')[2]}")
            numbers, count = kinds.get(kind, (set(), 0))
            kinds[kind] = (numbers | {int(match["number"])}, max(count, int(match["count"])))
    for (folder, split, extension), (numbers, count) in kinds.items():
        for number in sorted(set(range(count)) - numbers):
            yield folder, split, number, count, extension


def find_chosen(subsets: Sequence[Subset], config: str | None, split: str | None, address: str) -> list[Subset]:
    """Return the subsets of a config and split; InputError for unknown names."""
    configs = list(dict.fromkeys(subset.config for subset in subsets))
    if config is not None and config not in configs:
        raise InputError(f"{address!r} has no config {config!r}.", hint=f"It has: {', '.join(configs) or 'none'}.")
    of_config = [subset for subset in subsets if config in (None, subset.config)]
    splits = list(dict.fromkeys(subset.split for subset in of_config))
    if split is not None and split not in splits:
        raise InputError(f"{address!r} has no split {split!r}.", hint=f"It has: {', '.join(splits) or 'none'}.")
    return [subset for subset in of_config if split in (None, subset.split)]


_SHARDS = (".parquet", ".tar", ".arrow", ".bin", ".npy", ".safetensors")


@dataclass(frozen=True, slots=True)
class DatasetRecord:
    """Receipts and jobs of a dataset. `job` is None without any, or where several builds share the destination.

    `listed` are the shards that the manifest of each config and split names; `damaged` are faults of manifests.
    """

    receipts: Mapping[str, Receipt]
    jobs: tuple[JobRecord, ...]
    unfinished: bool = False
    listed: Mapping[Key, Sequence[str]] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()

    @property
    def job(self) -> JobRecord | None:
        return self.jobs[0] if len(self.jobs) == 1 else None

    @property
    def computed(self) -> bool:
        return bool(self.jobs) and all(map(is_computed, self.jobs))


def is_computed(job: JobRecord) -> bool:
    """Return whether a job computed its rows (map, tokenize, embed); others hold the files of their source."""
    return "recipe" not in job.facts


def is_foreign(job: JobRecord) -> bool:
    """Return whether a record is of shards that brim found, and did not write."""
    return bool(job.facts.get("foreign"))


@dataclass(frozen=True, slots=True)
class PublishedPart:
    """The shards of one source: its job, and its shards by split, in order."""

    job: JobRecord
    names: Mapping[str, Sequence[str]]


def parts_of(record: DatasetRecord) -> list[PublishedPart]:
    """Return the parts of a dataset, each published from its own source: configs, splits, appended rows."""
    parts: dict[str, tuple[JobRecord, dict[str, list[str]]]] = {}
    for job in record.jobs:
        own: dict[str, list[str]] = {}
        for (_, split), names in record.listed.items():
            is_only = len(record.jobs) == 1
            mine = [name for name in names if is_only or record.receipts[name].job == job.fingerprint[:16]]
            own.setdefault(split, []).extend(sorted(mine))
        recorded = job.facts.get("parts")
        if not recorded:
            parts[job.fingerprint] = (job, {split: names for split, names in own.items() if names})
            continue
        starts = dict.fromkeys(own, 0)
        for part in recorded:
            source = JobRecord(
                part["fingerprint"], dict(part["facts"]), dict(part["versions"]), tuple(part["left_out"])
            )
            _, shards = parts.setdefault(source.fingerprint, (source, {}))
            for split, count in part["shards"].items():
                start = starts.get(split, 0)
                shards.setdefault(split, []).extend(own.get(split, [])[start : start + count])
                starts[split] = start + count
    return [PublishedPart(job, names) for job, names in parts.values()]


class Published:
    """A dataset to read: its shards, their receipts, its card, its subsets.

    `renames`: shards get other names without being moved. `names` are all files; None: they were not listed.
    """

    address: str
    unproved: Sequence[str] = ()

    def __init__(
        self,
        storage: Storage,
        infos: Mapping[str, FileInfo],
        record: DatasetRecord,
        read_card: Callable[[], bytes | None],
        shards: Iterable[str],
    ) -> None:
        self._storage, self._infos, self._read_card, self.record = storage, infos, read_card, record
        self.remote, self.renames = storage.is_remote, storage.pinned_revision() is not None
        self.address = str(storage.location)
        self.sizes: Mapping[str, int] = {name: infos[name].st_size for name in shards}
        is_locked = record.unfinished and not self.remote
        self.subsets: Sequence[Subset] = find_subsets(
            self.sizes, record.receipts, record.listed, _fields(read_card), is_locked
        )

    @cached_property
    def names(self) -> Collection[str] | None:
        if not self.remote:
            return files_below(self._storage.location.path)
        return self._infos.keys() if self.renames else None

    def card(self) -> str | None:
        card = self._read_card()
        return None if card is None else card.decode()

    def _file(self, name: str) -> RemoteFile:
        info = self._infos[name]
        return RemoteFile(self._storage.location, name, info.st_size, info.etag)

    def open(self, name: str) -> Readable:
        if not self.remote:
            return LocalFile(self._storage.location.path / name)
        return RandomFile(self._file(name), storage=self._storage)

    def stream(self, name: str) -> Readable:
        if not self.remote:
            return self.open(name)
        return ForwardFile(self._file(name), storage=self._storage, is_hashed=True)

    def sha256(self, name: str, deep: bool, advance: Advance) -> str | None:
        """Return the hash of a shard: read, or without `deep` as a remote location states it; None if it does not.

        A repository lists it. In a bucket, an ETag is that of the content whose SHA-256 was noted.
        """
        if not self.remote:
            with reading(name):
                return sha256_of(self._storage.location.path / name, advance)
        if deep:
            with closing(ForwardFile(self._file(name), storage=self._storage, is_hashed=True)) as stream:
                return stream.sha256(advance)
        info, receipt = self._infos[name], self.record.receipts.get(name)
        if self.renames:
            return info.sha256 or None
        return receipt.sha256 if receipt and receipt.etag in ("", info.etag) else None

    def listed(self, name: str) -> tuple[str, str]:
        """Return SHA-256 and ETag as the location lists them; empty where it does not."""
        info = self._infos[name]
        return info.sha256, "" if self.renames else info.etag


def _open_folder(folder: Path, state: str | os.PathLike[str] | None) -> Published:
    if folder.is_file():
        raise InputError(
            f"{str(folder)!r} is a file, and a dataset is a folder.",
            hint="brim.open_tensors opens a file of tensors and checks its header.",
        )
    if not folder.is_dir():
        raise InputError(f"The folder {str(folder)!r} does not exist.", hint="Use a folder that brim built.")
    data = folder / "data"
    foreign = [] if data.is_dir() else shards_below(folder)
    if not data.is_dir() and not foreign:
        raise InputError(
            f"{str(folder)!r} has no dataset: the folder data/ is missing.", hint="Use a folder that brim built."
        )
    location = folder_location(folder)
    ledger = Ledger(state_folder(location, state))
    record = record_of(ledger)

    def card() -> bytes | None:
        if not (folder / CARD).exists():
            return None
        with reading(CARD):
            return (folder / CARD).read_bytes()

    with suppress(BrimError, OSError):  # a ledger without a job, next to the card of a finished build
        text, size = card() or b"", ledger.path.stat().st_size
        if ledger.job is None and BEGIN.encode() in text and UNFINISHED.encode() not in text:
            fault = "none of its lines can be read" if size else "is empty"
            record = replace(record, damaged=(*record.damaged, f"{STATE}/{LEDGER}: {fault}"))
    with reading(str(data)):
        listed = [] if foreign else os.listdir(data)
    names = foreign or sorted(f"data/{name}" for name in listed if not name.startswith("."))
    infos = {name: FileInfo((folder / name).stat().st_size) for name in names if (folder / name).is_file()}
    return Published(open_storage(location), infos, record, card, infos)


def _open_repository(location: Location, token: str | None) -> Published:
    """Open a repository at one commit. Nothing of it is kept on disk."""
    storage = open_storage(location, token)
    storage.explains_errors = False  # the caller does, by what the Hub answers to a token
    infos = dict(storage.list())
    storage.location = replace(location, revision=storage.pinned_revision() or location.revision)
    card = functools.cache(lambda: storage.read(CARD) if CARD in infos else None)
    record = read_manifests([name for name in infos if name.startswith(f"{MANIFESTS}/")], storage.read)
    entries = card_entries(_fields(card))
    has_unfinished = any(map(is_unfinished, entries))
    folders = {"data", *(name.rpartition("/")[0] for name in record.receipts), *card_folders(_fields(card))}
    folders |= {str(entry["config_name"]) for entry in entries if is_unfinished(entry)}
    shards = [name for name in sorted(infos) if name.endswith(_SHARDS)]
    # If a card names no folders, `load_dataset` takes files of all folders.
    shards = [name for name in shards if name.rpartition("/")[0] in folders] or shards
    if not shards and not record.receipts and not has_unfinished:
        raise InputError(f"{location} has no dataset that brim can read: it has no Parquet or tar files.")
    return Published(storage, infos, replace(record, unfinished=has_unfinished), card, shards)


def _open_bucket(location: Location, state: str | os.PathLike[str] | None) -> Published:
    """Open a prefix in a bucket. The manifest notes the ETag of every shard."""
    infos = {name: info for folder in ("data", MANIFESTS) for name, info in list_files(location, folder)}
    card = read_file(location, CARD)
    manifests = [name for name in infos if name.startswith(f"{MANIFESTS}/")]
    record = read_manifests(manifests, functools.partial(read_file, location))
    if not record.jobs:  # the ledger of an unfinished build is on the machine that builds
        record = record_of(Ledger(state_folder(location, state, "default/*")))
    record = replace(record, unfinished=UNFINISHED.encode() in (card or b""))  # other machines see it only in the card
    shards = sorted(name for name in infos if name.startswith("data/"))
    if not shards and not record.receipts:  # not built by brim: Parquet files, wherever they are
        infos |= {name: info for name, info in list_files(location) if name.endswith(".parquet")}
        shards = sorted(name for name in infos if name.endswith(".parquet"))
    # A dataset without rows has a card and nothing else.
    if not shards and not record.receipts and BEGIN.encode() not in (card or b""):
        raise InputError(f"{location} has no dataset: data/ is empty.", hint="Use an address that brim built.")
    published = Published(open_storage(location), infos, record, lambda: card, shards)
    noted = all(receipt.etag for receipt in record.receipts.values())
    proof = "sizes and ETags are those" if noted else "this store's ETags do not identify content, and sizes are those"
    published.unproved = (f"content: not read back; {proof} noted when it was sent (--deep reads everything)",)
    return published


def _raise_error(error: OSError) -> None:
    """Raise the error for a folder that cannot be listed, which os.walk would skip."""
    raise error


def files_below(folder: Path) -> list[str]:
    """Return the files anywhere below a folder, without those in hidden folders."""
    files = []
    with reading(str(folder)):
        for top, folders, names in os.walk(folder, onerror=_raise_error):
            folders[:] = [name for name in folders if not name.startswith(".")]
            files += [os.path.relpath(os.path.join(top, name), folder) for name in names]
    return sorted(files)


def shards_below(folder: Path) -> list[str]:
    """Return the Parquet files anywhere below a folder that brim did not build, as `load_dataset` finds them."""
    return [name for name in files_below(folder) if name.endswith(".parquet")]


def record_of(ledger: Ledger) -> DatasetRecord:
    """Return the record of one build from its ledger."""
    listed: dict[Key, list[str]] = {}
    for name, receipt in ledger.receipts.items():
        listed.setdefault(("default", receipt.split), []).append(name)
    is_unfinished = ledger.job is not None and not ledger.is_finished
    damaged = () if (fault := ledger_fault(ledger)) is None else (f"{STATE}/{LEDGER}: {fault}",)
    return DatasetRecord(ledger.receipts, () if ledger.job is None else (ledger.job,), is_unfinished, listed, damaged)


def ledger_fault(ledger: Ledger) -> str | None:
    """Return the fault of a finished ledger: all of its lines count, that of the job too."""
    if ledger.broken:
        return f"its line {ledger.broken} is damaged"
    if not ledger.is_finished:
        return None
    if ledger.job is None:
        return "the record of the job is missing"
    facts = ledger.job.facts
    stable = {name: fact for name, fact in facts.items() if name not in ("cut", "recipe")}
    if ledger.job.fingerprint not in (digest_json(stable), digest_json(facts)):
        return "the record of the job does not match its fingerprint"
    return None


def read_manifests(names: Iterable[str], read: Callable[[str], bytes | None]) -> DatasetRecord:
    """Return the record of all published ledgers together."""
    receipts: dict[str, Receipt] = {}
    jobs: dict[str, JobRecord] = {}
    listed: dict[Key, list[str]] = {}
    damaged = []
    for name in sorted(names):
        if name.endswith(".jsonl"):
            ledger = Ledger.from_bytes(read(name) or b"")
            receipts |= ledger.receipts
            config, _, file = name.partition("/")[2].rpartition("/")
            listed[config, file.removesuffix(".jsonl")] = list(ledger.receipts)
            fault = ledger_fault(ledger) or (None if ledger.is_finished else "it ends before its last line")
            damaged += [f"{name}: {fault}"] if fault else []
            if ledger.job is not None:
                jobs[ledger.job.fingerprint] = ledger.job
    return DatasetRecord(receipts, tuple(jobs.values()), listed=listed, damaged=tuple(damaged))


def _fields(card: Callable[[], bytes | None]) -> dict[str, Any]:
    """Return the fields of the card; none of a broken one, which `verify` reports."""
    try:
        return read_card((card() or b"").decode())
    except (BrimError, UnicodeDecodeError):
        return {}


def narrow(published: Published, config: str | None, split: str | None, address: str) -> None:
    """Reduce a dataset to some configs and splits."""
    if config is None and split is None:
        return
    subsets = find_chosen(published.subsets, config, split, address)
    record = narrow_record(published.record, {(subset.config, subset.split) for subset in subsets})
    names = {*record.receipts, *(name for subset in subsets for name in subset.names)}
    published.subsets = subsets
    published.sizes = {name: size for name, size in published.sizes.items() if name in names}
    published.record = replace(record, unfinished=any(subset.state == "unfinished" for subset in subsets))


def narrow_record(record: DatasetRecord, keys: Collection[Key]) -> DatasetRecord:
    """Return the record of some configs and splits. Others may have splits of the same names."""
    listed = {key: names for key, names in record.listed.items() if key in keys}
    receipts = {name: record.receipts[name] for names in listed.values() for name in names if name in record.receipts}
    marks = {receipt.job for receipt in receipts.values()}
    jobs = tuple(job for job in record.jobs if job.fingerprint[:16] in marks)
    return replace(record, receipts=receipts, jobs=jobs, listed=listed)


@contextmanager
def open_published(
    destination: str | os.PathLike[str],
    state: str | os.PathLike[str] | None,
    note: Note,
    access: Access | None = None,
    config: str | None = None,
    split: str | None = None,
    token: str | None = None,
) -> Iterator[Published]:
    """Open a dataset to read: all of it, or one config or split."""
    location = parse_destination(destination, access)
    with ExitStack() as stack:
        if location.is_local:
            published = _open_folder(location.path, state)
        elif location.is_repository:
            stack.enter_context(explain_hub_errors(location.repo, started=False, reading=True))
            stack.enter_context(hub_session(note))
            published = _open_repository(location, token)
        else:
            published = _open_bucket(location, state)
        narrow(published, config, split, os.fspath(destination))
        yield published
