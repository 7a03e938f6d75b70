"""A dataset that was built, as verify and unpack see it: its shards, what their receipts say, its card, its subsets.

Which shards a config or split has, and whether they are all of them, is known from the manifests, else from the card,
else from the names of the shards. What verify, check, info and unpack look at is chosen here (`--from-config`,
`--from-split`).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from brim.errors import BrimError, InputError
from brim.formats.card import BEGIN, CARD, card_folders, read_card
from brim.formats.card_configs import UNFINISHED, card_entries, fits, is_unfinished, patterns_of
from brim.formats.range_readers import LocalFile, Readable
from brim.plans.fingerprint import digest_json
from brim.progress import Advance
from brim.records import dataclass
from brim.state.atomic_files import reading, sha256_of
from brim.state.ledger import LEDGER, STATE, JobRecord, Ledger, Receipt
from brim.storage.destination import MANIFESTS, parse_destination, state_folder
from brim.storage.hub_session import Note, explained, hub_session
from brim.storage.listing import list_files, read_file
from brim.storage.location import Access, Location, folder_location
from brim.storage.reading import ForwardFile, RandomFile, RemoteFile
from brim.storage.storage import open_storage

SHARD_NAME = re.compile(
    r"(?P<folder>.+)/(?P<split>[^/]+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.(?:parquet|tar|arrow)"
)
State = Literal["whole", "unfinished", "incomplete", "not brim's"]
Key = tuple[str, str]  # config and split


@dataclass(frozen=True, slots=True)
class Subset:
    """A split of a config. `wanted` is how many shards it should have, as far as anybody knows."""

    config: str
    split: str
    names: tuple[str, ...]
    wanted: int | None
    state: State

    @property
    def name(self) -> str:
        return self.split if self.config == "default" else f"{self.config}/{self.split}"

    @property
    def words(self) -> str:
        """What is to be said of it."""
        if self.state == "unfinished":
            of = f" of {self.wanted:,}" if self.wanted else ""
            return f"unfinished: {len(self.names):,}{of} shards; run the same build to finish"
        if self.state == "incomplete":
            return f"incomplete: {len(self.names):,} of {self.wanted or 0:,} shards"
        return self.state


def find_subsets(
    sizes: Mapping[str, int],
    receipts: Mapping[str, Receipt],
    listed: Mapping[Key, Sequence[str]],
    fields: dict[str, Any],
    unfinished: bool,
) -> list[Subset]:
    """Every config and split that a manifest (`listed`: the shards that it names), the card or a shard's name tells of.

    `unfinished`: the ledger that is there says so, of all of it.
    """
    found: dict[Key, list[str]] = {key: list(names) for key, names in listed.items()}
    claimed = set(receipts)
    open_keys: set[tuple[str, str | None]] = set()
    for entry in card_entries(fields):
        config = str(entry["config_name"])
        patterns = patterns_of(entry)
        waiting = [split for split, path in patterns if path == UNFINISHED]
        if waiting:
            open_keys |= {(config, None if len(waiting) == len(patterns) else split) for split in waiting}
        for split, pattern in patterns:
            fitting = [name for name in sizes if pattern != UNFINISHED and fits(name, pattern)]
            of_others = claimed - set(found.get((config, split), ()))
            fitting = [name for name in fitting if name not in of_others or name not in receipts]
            if fitting or (split, config) not in found:
                of = found.setdefault((config, split), [])
                of += [name for name in fitting if name not in of]
                claimed |= set(fitting)
    for name in sizes:
        if name not in claimed:
            found.setdefault(_by_name(name), []).append(name)
    return [s for key, names in found.items() if (s := _subset(key, names, sizes, receipts, open_keys, unfinished))]


def _by_name(name: str) -> Key:
    match = SHARD_NAME.fullmatch(name)
    folder = match["folder"] if match else name.rpartition("/")[0]
    return ("default" if folder in ("data", "") else folder, match["split"] if match else "train")


def _subset(
    key: Key,
    names: list[str],
    sizes: Mapping[str, int],
    receipts: Mapping[str, Receipt],
    open_keys: set[tuple[str, str | None]],
    unfinished: bool,
) -> Subset | None:
    here = sorted(name for name in names if name in sizes)
    told = [name for name in names if name in receipts]
    if unfinished or (key[0], None) in open_keys or key in open_keys:
        # Those of an earlier version may still be there, under names that its manifest knows.
        fresh = here if unfinished else [name for name in here if name not in receipts] or here
        counts = {int(match["count"]) for name in fresh if (match := SHARD_NAME.fullmatch(name))}
        if not fresh and not told and any(config == key[0] and split is None for config, split in open_keys):
            return Subset(*key, (), None, "unfinished")
        wanted = max(counts, default=0) or None
        fresh = fresh if unfinished else [n for n in fresh if f"-of-{wanted or 0:05d}" in n] or fresh
        return Subset(*key, tuple(fresh), wanted, "unfinished")
    if told:
        whole = all(sizes.get(name) == receipts[name].size for name in told)
        return Subset(*key, tuple(here), len(told), "whole" if whole else "incomplete")
    if not here:
        return None
    missing = list(missing_numbers(here))
    return Subset(*key, tuple(here), len(here) + len(missing), "incomplete" if missing else "not brim's")


def missing_numbers(names: Sequence[str]) -> Iterator[tuple[str, str, int, int, str]]:
    """(folder, split, number, count, extension) of shards that names tell of and that are not there. Where rows were
    appended the numbers go on, and the largest count is that of all."""
    seen: dict[tuple[str, str, str], tuple[set[int], int]] = {}
    for name in names:
        if match := SHARD_NAME.fullmatch(name):
            kind = (match["folder"], match["split"], f".{name.rpartition('.')[2]}")
            numbers, count = seen.get(kind, (set(), 0))
            seen[kind] = (numbers | {int(match["number"])}, max(count, int(match["count"])))
    for (folder, split, extension), (numbers, count) in seen.items():
        for number in sorted(set(range(count)) - numbers):
            yield folder, split, number, count, extension


def chosen_subsets(subsets: Sequence[Subset], config: str | None, split: str | None, address: str) -> list[Subset]:
    """Those that were asked for; InputError if there is none."""
    configs = list(dict.fromkeys(subset.config for subset in subsets))
    if config is not None and config not in configs:
        raise InputError(f"{address!r} has no config {config!r}.", hint=f"It has: {', '.join(configs) or 'none'}.")
    found = [subset for subset in subsets if config in (None, subset.config)]
    splits = list(dict.fromkeys(subset.split for subset in found))
    if split is not None and split not in splits:
        raise InputError(f"{address!r} has no split {split!r}.", hint=f"It has: {', '.join(splits) or 'none'}.")
    return [subset for subset in found if split in (None, subset.split)]


_SHARDS = (".parquet", ".tar", ".arrow", ".bin", ".npy", ".safetensors")


@dataclass(frozen=True, slots=True)
class DatasetRecord:
    """What receipts say. `job` is None without any, or where several builds share the destination.

    `listed` are the shards that the manifest of each config and split names; `damaged` says what is wrong with one.
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
    """Whether a job computed its rows (map, tokenize, embed); others hold the files of their source."""
    return "recipe" not in job.facts


def is_foreign(job: JobRecord) -> bool:
    """Whether a record stands for shards that brim found, and did not write."""
    return bool(job.facts.get("foreign"))


@dataclass(frozen=True, slots=True)
class PublishedPart:
    """What one source gave: its job, and its shards by split, in order."""

    job: JobRecord
    names: Mapping[str, Sequence[str]]


def parts_of(told: DatasetRecord) -> list[PublishedPart]:
    """The parts of a dataset, each published from a source of its own: configs, splits, rows that were appended."""
    found: dict[str, tuple[JobRecord, dict[str, list[str]]]] = {}
    for job in told.jobs:
        mine: dict[str, list[str]] = {}
        for (_, split), names in told.listed.items():
            own = [name for name in names if len(told.jobs) == 1 or told.receipts[name].job == job.fingerprint[:16]]
            mine.setdefault(split, []).extend(sorted(own) if own else [])
        parts = job.facts.get("parts")
        if not parts:
            found[job.fingerprint] = (job, {split: names for split, names in mine.items() if names})
            continue
        at = dict.fromkeys(mine, 0)
        for part in parts:
            of = JobRecord(part["fingerprint"], dict(part["facts"]), dict(part["versions"]), tuple(part["left_out"]))
            _, known = found.setdefault(of.fingerprint, (of, {}))
            for split, count in part["shards"].items():
                start = at.get(split, 0)
                known.setdefault(split, []).extend(mine.get(split, [])[start : start + count])
                at[split] = start + count
    return [PublishedPart(job, names) for job, names in found.values()]


class Published(Protocol):
    """`sha256` without a full read (`deep`) is what the destination says of itself, where it says anything; `listed` is
    what it says without being asked to read: SHA-256 and ETag, empty where it says nothing.

    `renames`: shards get other names without being moved.
    """

    remote: bool
    renames: bool
    told: DatasetRecord
    sizes: Mapping[str, int]
    subsets: Sequence[Subset]

    @property
    def names(self) -> Collection[str] | None:
        """All files that are there, whatever they are; None: they were not listed."""

    @property
    def unproved(self) -> Sequence[str]: ...
    def card(self) -> str | None: ...
    def open(self, name: str) -> Readable: ...
    def stream(self, name: str) -> Readable: ...
    def sha256(self, name: str, deep: bool, advance: Advance) -> str | None: ...
    def listed(self, name: str) -> tuple[str, str]: ...


class PublishedFolder:
    """A folder that was built."""

    remote = renames = False
    unproved: Sequence[str] = ()

    def __init__(self, folder: Path, state: str | os.PathLike[str] | None) -> None:
        if not folder.is_dir():
            raise InputError(f"The folder {str(folder)!r} does not exist.", hint="Use a folder that brim built.")
        self._folder = folder
        others = [] if (folder / "data").is_dir() else shards_below(folder)
        if not (folder / "data").is_dir() and not others:
            raise InputError(
                f"{str(folder)!r} has no dataset: the folder data/ is missing.", hint="Use a folder that brim built."
            )
        ledger = Ledger(state_folder(folder_location(folder), state))
        self.told = told_by(ledger)
        if (fault := self._lost_ledger(ledger)) is not None:
            self.told = replace(self.told, damaged=(*self.told.damaged, fault))
        with reading(str(folder / "data")):
            listed = [] if others else os.listdir(folder / "data")
        names = others or sorted(f"data/{name}" for name in listed if not name.startswith("."))
        here = {name: folder / name for name in names}
        self.sizes: Mapping[str, int] = {name: p.stat().st_size for name, p in here.items() if p.is_file()}
        self.subsets: Sequence[Subset] = _subsets(self)

    def _lost_ledger(self, ledger: Ledger) -> str | None:
        """What is wrong with a ledger that names no job, beside a card that says that a build has ended."""
        try:
            card = (self._folder / CARD).read_bytes()
            size = ledger.path.stat().st_size
        except OSError:
            return None
        if ledger.job is not None or BEGIN.encode() not in card or UNFINISHED.encode() in card:
            return None
        return f"{STATE}/{LEDGER}: {'is empty' if not size else 'none of its lines can be read'}"

    @cached_property
    def names(self) -> Collection[str]:
        return files_below(self._folder)

    def card(self) -> str | None:
        if not (self._folder / CARD).exists():
            return None
        with reading(CARD):
            return (self._folder / CARD).read_bytes().decode()

    def open(self, name: str) -> Readable:
        return LocalFile(self._folder / name)

    stream = open

    def sha256(self, name: str, deep: bool, advance: Advance) -> str | None:
        with reading(name):
            return sha256_of(self._folder / name, advance)

    def listed(self, name: str) -> tuple[str, str]:
        return "", ""


def _raise(error: OSError) -> None:
    """Let a folder that cannot be listed be an error: os.walk would leave it out."""
    raise error


def files_below(folder: Path) -> list[str]:
    """The files anywhere below a folder, without those in hidden folders."""
    found = []
    with reading(str(folder)):
        for top, folders, names in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [os.path.relpath(os.path.join(top, name), folder) for name in names]
    return sorted(found)


def shards_below(folder: Path) -> list[str]:
    """The Parquet files anywhere below a folder that brim did not build, as `load_dataset` finds them."""
    return [name for name in files_below(folder) if name.endswith(".parquet")]


class PublishedRepository:
    """A repository on the Hub at one commit. Nothing of it is kept on disk."""

    remote = renames = True
    unproved: Sequence[str] = ()

    def __init__(self, location: Location, token: str | None) -> None:
        self._storage = open_storage(location, token)
        self._files = dict(self._storage.list())
        self._location = replace(location, revision=self._storage.pinned_revision() or "")
        self.address = str(self._location)  # of what was read, whatever is published later
        self.names: Collection[str] | None = self._files.keys()
        manifests = [name for name in self._files if name.startswith(f"{MANIFESTS}/")]
        self.told = read_manifests(manifests, self._storage.read)
        folders = {"data", *(name.rpartition("/")[0] for name in self.told.receipts)}
        fields = _fields(self)
        folders |= card_folders(fields)
        begun = any(map(is_unfinished, card_entries(fields)))
        folders |= {str(entry["config_name"]) for entry in card_entries(fields) if is_unfinished(entry)}
        self.told = replace(self.told, unfinished=begun)
        there = {name: info.st_size for name, info in sorted(self._files.items()) if name.endswith(_SHARDS)}
        named = {name: size for name, size in there.items() if name.rpartition("/")[0] in folders}
        # Where no card says where its files are, `load_dataset` takes them wherever they are.
        self.sizes: Mapping[str, int] = named or there
        if not self.sizes and not self.told.receipts and not begun:
            raise InputError(f"{location} has no dataset that brim can read: it has no Parquet or tar files.")
        self.subsets: Sequence[Subset] = _subsets(self)

    @cached_property
    def _card(self) -> bytes | None:
        return self._storage.read(CARD) if CARD in self._files else None

    def card(self) -> str | None:
        return None if self._card is None else self._card.decode()

    def _file(self, name: str) -> RemoteFile:
        return RemoteFile(self._location, name, self._files[name].st_size, self._files[name].etag)

    def open(self, name: str) -> Readable:
        return RandomFile(self._file(name), storage=self._storage)

    def stream(self, name: str) -> ForwardFile:
        return ForwardFile(self._file(name), storage=self._storage, is_hashed=True)

    def sha256(self, name: str, deep: bool, advance: Advance) -> str | None:
        """Return it as the Hub lists it; a small file that is not an LFS object has none."""
        if not deep:
            return self._files[name].sha256 or None
        return hash_stream(self.stream(name), advance)

    def listed(self, name: str) -> tuple[str, str]:
        return self._files[name].sha256, ""


class PublishedObjects:
    """A prefix in a bucket. What is listed there has an ETag, which the manifest notes for every shard."""

    remote, renames = True, False
    names: Collection[str] | None = None

    def __init__(self, address: Location, state: str | os.PathLike[str] | None) -> None:
        self._address = address
        self._there = {name: info for folder in ("data", MANIFESTS) for name, info in list_files(address, folder)}
        manifests = [name for name in self._there if name.startswith(f"{MANIFESTS}/")]
        told = read_manifests(manifests, functools.partial(read_file, address))
        if not told.jobs:  # a build that goes on has its ledger on the machine that builds
            told = told_by(Ledger(state_folder(address, state, "default/*")))
        self._card = read_file(address, CARD)
        card = self._card or b""
        # On other machines the card tells that it goes on.
        self.told = replace(told, unfinished=UNFINISHED.encode() in card)
        self.sizes: Mapping[str, int] = {
            name: info.st_size for name, info in sorted(self._there.items()) if name.startswith("data/")
        }
        if not self.sizes and not self.told.receipts:  # not built by brim: Parquet files, wherever they are
            self._there |= {name: info for name, info in list_files(address) if name.endswith(".parquet")}
            self.sizes = {name: info.st_size for name, info in sorted(self._there.items()) if name.endswith(".parquet")}
        # A dataset without rows has a card and nothing else.
        if not self.sizes and not self.told.receipts and BEGIN.encode() not in card:
            raise InputError(f"{address} has no dataset: data/ is empty.", hint="Use an address that brim built.")
        self.subsets: Sequence[Subset] = _subsets(self)

    @property
    def unproved(self) -> Sequence[str]:
        noted = all(receipt.etag for receipt in self.told.receipts.values())
        what = "sizes and ETags are those" if noted else "this store's ETags do not tell content, and sizes are those"
        return (f"content: not read back; {what} noted when it was sent (--deep reads everything)",)

    def card(self) -> str | None:
        return None if self._card is None else self._card.decode()

    def _file(self, name: str) -> RemoteFile:
        return RemoteFile(self._address, name, self._there[name].st_size, self._there[name].etag)

    def open(self, name: str) -> Readable:
        return RandomFile(self._file(name))

    def stream(self, name: str) -> ForwardFile:
        return ForwardFile(self._file(name), is_hashed=True)

    def sha256(self, name: str, deep: bool, advance: Advance) -> str | None:
        """By its ETag, which is that of the content whose SHA-256 was noted; or read."""
        receipt = self.told.receipts.get(name)
        if not deep:
            return receipt.sha256 if receipt and receipt.etag in ("", self._there[name].etag) else None
        return hash_stream(self.stream(name), advance)

    def listed(self, name: str) -> tuple[str, str]:
        return "", self._there[name].etag


def hash_stream(stream: ForwardFile, advance: Advance) -> str:
    """Read all of it."""
    with closing(stream):
        return stream.sha256(advance)


def told_by(ledger: Ledger) -> DatasetRecord:
    """What a ledger of one build says."""
    listed: dict[Key, list[str]] = {}
    for name, receipt in ledger.receipts.items():
        listed.setdefault(("default", receipt.split), []).append(name)
    begun = ledger.job is not None and not ledger.done
    damaged = () if (fault := ledger_fault(ledger)) is None else (f"{STATE}/{LEDGER}: {fault}",)
    return DatasetRecord(ledger.receipts, () if ledger.job is None else (ledger.job,), begun, listed, damaged)


def ledger_fault(ledger: Ledger) -> str | None:
    """What is wrong with a finished ledger: all of its lines count, that of the job too."""
    if ledger.broken:
        return f"its line {ledger.broken} is damaged"
    if not ledger.done:
        return None
    if ledger.job is None:
        return "it has lost the line that says what was built"
    facts = ledger.job.facts
    plain = {name: fact for name, fact in facts.items() if name not in ("cut", "recipe")}
    if ledger.job.fingerprint not in (digest_json(plain), digest_json(facts)):
        return "what it says was built is not what its fingerprint is of"
    return None


def read_manifests(names: Iterable[str], read: Callable[[str], bytes | None]) -> DatasetRecord:
    """What the published ledgers say, all of them together."""
    receipts: dict[str, Receipt] = {}
    jobs: dict[str, JobRecord] = {}
    listed: dict[Key, list[str]] = {}
    damaged = []
    for name in sorted(names):
        if name.endswith(".jsonl"):
            ledger = Ledger.of(read(name) or b"")
            receipts |= ledger.receipts
            config, _, file = name.partition("/")[2].rpartition("/")
            listed[config, file.removesuffix(".jsonl")] = list(ledger.receipts)
            fault = ledger_fault(ledger) or (None if ledger.done else "it ends before its last line")
            damaged += [f"{name}: {fault}"] if fault else []
            if ledger.job is not None:
                jobs[ledger.job.fingerprint] = ledger.job
    return DatasetRecord(receipts, tuple(jobs.values()), listed=listed, damaged=tuple(damaged))


def _fields(published: Published) -> dict[str, Any]:
    """Of the card; none of a broken one, which is reported as what it is."""
    try:
        return read_card(published.card() or "")
    except (BrimError, UnicodeDecodeError):
        return {}


def _subsets(published: Published) -> list[Subset]:
    told = published.told
    mine = told.unfinished and not published.remote
    return find_subsets(published.sizes, told.receipts, told.listed, _fields(published), mine)


def narrow(published: Published, config: str | None, split: str | None, address: str) -> None:
    """Only some configs and splits of a dataset are there from here on."""
    if config is None and split is None:
        return
    chosen = chosen_subsets(published.subsets, config, split, address)
    keys = {(subset.config, subset.split) for subset in chosen}
    told = told_of(published.told, keys)
    mine = {*told.receipts, *(name for subset in chosen for name in subset.names)}
    unfinished = any(subset.state == "unfinished" for subset in chosen)
    published.subsets = chosen
    published.sizes = {name: size for name, size in published.sizes.items() if name in mine}
    published.told = replace(told, unfinished=unfinished)


def told_of(told: DatasetRecord, keys: Collection[Key]) -> DatasetRecord:
    """What receipts say of some configs and splits. Others may have splits of the same names."""
    listed = {key: names for key, names in told.listed.items() if key in keys}
    receipts = {name: told.receipts[name] for names in listed.values() for name in names if name in told.receipts}
    marks = {receipt.job for receipt in receipts.values()}
    jobs = tuple(job for job in told.jobs if job.fingerprint[:16] in marks)
    return replace(told, receipts=receipts, jobs=jobs, listed=listed)


@contextmanager
def opened(
    destination: str | os.PathLike[str],
    state: str | os.PathLike[str] | None,
    note: Note,
    access: Access | None = None,
    config: str | None = None,
    split: str | None = None,
    token: str | None = None,
) -> Iterator[Published]:
    """What was built at a destination, to be read: all of it, or one config or split."""
    where = parse_destination(destination, access)
    published: Published
    with ExitStack() as stack:
        if where.is_local:
            published = PublishedFolder(where.path, state)
        elif where.is_bucket:
            published = PublishedObjects(where, state)
        else:
            stack.enter_context(explained(where.repo, begun=False, reading=True))
            stack.enter_context(hub_session(note))
            published = PublishedRepository(where, token)
        narrow(published, config, split, os.fspath(destination))
        yield published
