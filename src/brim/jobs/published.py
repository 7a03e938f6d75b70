"""A dataset that was built, as verify and unpack see it: its shards, what their receipts say, its card."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from brim.buckets.bucket_address import Access, BucketAddress
from brim.buckets.listing import ObjectStat, list_objects, read_small
from brim.buckets.read_object import ObjectFile, ObjectStream
from brim.errors import DestinationError, InputError
from brim.formats.card import BEGIN, CARD, UNFINISHED, card_folders, read_card
from brim.formats.readable import LocalFile, Readable
from brim.progress import Advance
from brim.state.durable import reading, sha256_of
from brim.state.ledger import JobRecord, Ledger, Receipt
from brim.stores.destination import parse_destination, state_folder
from brim.stores.hub_client import HubClient, Snapshot
from brim.stores.hub_files import RangeFile, StreamFile
from brim.stores.hub_options import HubAddress
from brim.stores.hub_session import Note, explained, hub_session
from brim.stores.hub_store import MANIFESTS

_SHARDS = (".parquet", ".tar", ".arrow", ".bin", ".npy", ".safetensors")


@dataclass(frozen=True, slots=True)
class DatasetRecord:
    """What receipts say. `job` is None without any, or where several builds share the destination."""

    receipts: Mapping[str, Receipt]
    jobs: tuple[JobRecord, ...]
    unfinished: bool = False

    @property
    def job(self) -> JobRecord | None:
        return self.jobs[0] if len(self.jobs) == 1 else None

    @property
    def computed(self) -> bool:
        return bool(self.jobs) and all(map(is_computed, self.jobs))


def is_computed(job: JobRecord) -> bool:
    """Whether a job computed its rows (map, tokenize, embed); others hold the files of their source."""
    return "recipe" not in job.facts


class Published(Protocol):
    """`sha256` without a full read (`deep`) is what the destination says of itself, where it says anything."""

    remote: bool
    told: DatasetRecord
    sizes: Mapping[str, int]

    @property
    def unproved(self) -> Sequence[str]: ...
    def card(self) -> str | None: ...
    def open(self, name: str) -> Readable: ...
    def stream(self, name: str) -> Readable: ...
    def sha256(self, name: str, deep: bool, advance: Advance) -> str | None: ...


class PublishedFolder:
    """A folder that was built."""

    remote = False
    unproved: Sequence[str] = ()

    def __init__(self, folder: Path, state: str | os.PathLike[str] | None) -> None:
        if not folder.is_dir():
            raise InputError(f"There is no folder {str(folder)!r}.", hint="Give the folder that brim built.")
        self._folder = folder
        others = [] if (folder / "data").is_dir() else shards_below(folder)
        if not (folder / "data").is_dir() and not others:
            raise InputError(
                f"{str(folder)!r} holds no dataset: it has no folder data/.", hint="Give the folder that brim built."
            )
        ledger = Ledger(state_folder(folder, state))
        self.told = DatasetRecord(
            ledger.receipts, () if ledger.job is None else (ledger.job,), ledger.job is not None and not ledger.done
        )
        with reading(str(folder / "data")):
            listed = [] if others else os.listdir(folder / "data")
        names = others or sorted(f"data/{name}" for name in listed if not name.startswith("."))
        here = {name: folder / name for name in names}
        self.sizes: Mapping[str, int] = {name: p.stat().st_size for name, p in here.items() if p.is_file()}

    def card(self) -> str | None:
        if not (self._folder / CARD).exists():
            return None
        with reading(CARD):
            return (self._folder / CARD).read_text(encoding="utf-8")

    def open(self, name: str) -> Readable:
        return LocalFile(self._folder / name)

    stream = open

    def sha256(self, name: str, deep: bool, advance: Advance) -> str | None:
        with reading(name):
            return sha256_of(self._folder / name, advance)


def shards_below(folder: Path) -> list[str]:
    """The Parquet files anywhere below a folder that brim did not build, as `load_dataset` finds them."""
    found = []
    for top, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.relpath(os.path.join(top, name), folder) for name in names if name.endswith(".parquet")]
    return sorted(found)


class PublishedRepository:
    """A repository on the Hub at one commit. Nothing of it is kept on disk."""

    remote = True
    unproved: Sequence[str] = ()

    def __init__(self, client: HubClient, snapshot: Snapshot) -> None:
        self._client, self._at = client, snapshot
        manifests = [name for name in snapshot.tree if name.startswith(f"{MANIFESTS}/")]
        self.told = read_manifests(manifests, lambda name: client.read(name, snapshot))
        folders = {"data", *(name.rpartition("/")[0] for name in self.told.receipts)}
        try:
            folders |= card_folders(read_card(self.card() or ""))
        except (DestinationError, UnicodeDecodeError):
            pass  # a broken card is reported as what it is
        there = {name: file.size for name, file in sorted(snapshot.tree.items()) if name.endswith(_SHARDS)}
        named = {name: size for name, size in there.items() if name.rpartition("/")[0] in folders}
        # Where no card says where its files are, `load_dataset` takes them wherever they are.
        self.sizes: Mapping[str, int] = named or there
        if not self.sizes and not self.told.receipts:
            raise InputError(f"{client.address} holds no dataset that brim can read: it has no Parquet or tar files.")

    def card(self) -> str | None:
        data = self._client.read(CARD, self._at)
        return None if data is None else data.decode()

    def open(self, name: str) -> Readable:
        return RangeFile(self._client, self._at, name)

    def stream(self, name: str) -> StreamFile:
        return StreamFile(self._client, self._at, name)

    def sha256(self, name: str, deep: bool, advance: Advance) -> str | None:
        """As the Hub lists it; a small file that is no LFS object has none."""
        if not deep:
            return self._at.tree[name].sha256
        return hash_stream(self.stream(name), advance)


class PublishedObjects:
    """A place in a bucket. What is listed there has an ETag, which the manifest notes for every shard."""

    remote = True

    def __init__(self, address: BucketAddress, state: str | os.PathLike[str] | None) -> None:
        self._address = address
        self._there: dict[str, ObjectStat] = {}
        for folder in ("data", MANIFESTS):
            for name, stat in list_objects(address.below(folder)):
                self._there[f"{folder}/{name}"] = stat
        told = read_manifests([name for name in self._there if name.startswith(f"{MANIFESTS}/")], self._read)
        if not told.jobs:  # a build that goes on has its ledger on the machine that builds
            here = Ledger(state_folder(address, state, "default/*"))
            told = DatasetRecord(here.receipts, () if here.job is None else (here.job,))
        card = self._read(CARD) or b""
        # On other machines the card tells that it goes on.
        self.told = replace(told, unfinished=UNFINISHED.encode() in card)
        self.sizes: Mapping[str, int] = {
            name: stat.st_size for name, stat in sorted(self._there.items()) if name.startswith("data/")
        }
        if not self.sizes and not self.told.receipts:  # not built by brim: Parquet files, wherever they are
            self._there |= {name: stat for name, stat in list_objects(address) if name.endswith(".parquet")}
            self.sizes = {name: stat.st_size for name, stat in sorted(self._there.items()) if name.endswith(".parquet")}
        # A dataset without rows has a card and nothing else.
        if not self.sizes and not self.told.receipts and BEGIN.encode() not in card:
            raise InputError(f"{address} holds no dataset: there is nothing below data/.", hint="Give what brim built.")

    @property
    def unproved(self) -> Sequence[str]:
        noted = all(receipt.etag for receipt in self.told.receipts.values())
        what = "sizes and ETags are those" if noted else "sizes are those (this store's ETags do not tell content)"
        return (f"content: not read back; {what} noted when it was sent (--deep reads everything)",)

    def _read(self, name: str) -> bytes | None:
        return read_small(self._address, name)

    def card(self) -> str | None:
        data = self._read(CARD)
        return None if data is None else data.decode()

    def open(self, name: str) -> Readable:
        return ObjectFile(self._address, name, self._there[name].st_size, self._there[name].etag)

    def stream(self, name: str) -> ObjectStream:
        return ObjectStream(self._address, name, self._there[name].st_size, self._there[name].etag)

    def sha256(self, name: str, deep: bool, advance: Advance) -> str | None:
        """By its ETag, which is that of the content whose SHA-256 was noted; or read."""
        receipt = self.told.receipts.get(name)
        if not deep:
            return receipt.sha256 if receipt and receipt.etag in ("", self._there[name].etag) else None
        return hash_stream(self.stream(name), advance)


def hash_stream(stream: StreamFile | ObjectStream, advance: Advance) -> str:
    """Read all of it."""
    with closing(stream):
        return stream.sha256(advance)


def read_manifests(names: Iterable[str], read: Callable[[str], bytes | None]) -> DatasetRecord:
    """What the published ledgers say, all of them together."""
    receipts: dict[str, Receipt] = {}
    jobs: dict[str, JobRecord] = {}
    for name in sorted(names):
        if name.endswith(".jsonl"):
            ledger = Ledger.of(read(name) or b"")
            receipts |= ledger.receipts
            if ledger.job is not None:
                jobs[ledger.job.fingerprint] = ledger.job
    return DatasetRecord(receipts, tuple(jobs.values()))


@contextmanager
def opened(
    destination: str | os.PathLike[str],
    state: str | os.PathLike[str] | None,
    note: Note,
    access: Access | None = None,
) -> Iterator[Published]:
    """What was built at a destination, to be read."""
    where = parse_destination(destination, access)
    if isinstance(where, Path):
        yield PublishedFolder(where, state)
        return
    if isinstance(where, BucketAddress):
        yield PublishedObjects(where, state)
        return
    with ExitStack() as stack:
        stack.enter_context(explained(where.repo, begun=False, reading=True))
        stack.enter_context(hub_session(note))
        yield PublishedRepository(*_found(where))


def _found(address: HubAddress) -> tuple[HubClient, Snapshot]:
    client = HubClient(address)
    return client, client.snapshot(address.revision)
