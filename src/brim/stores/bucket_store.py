"""A place in a bucket as a sink: shards below `data/`, the card beside them, their ledger in `.brim/`.

A bucket cannot change several objects at once. So it is like a folder: while a build goes on, the card names what does
not exist; the card that makes the dataset loadable comes last. An ETag stands for content: it is noted when a shard has
been sent, and what the bucket lists at the end must agree.

Machines that share no disk put unit files there, too, and whoever finishes fetches them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from brim.errors import DestinationError, DestinationUnavailableError, VerificationError
from brim.formats.card import CARD
from brim.formats.card_configs import UNFINISHED
from brim.formats.splice import FileSplice, Splice
from brim.progress import told_if_slow
from brim.state.atomic_files import write_whole
from brim.state.ledger import Piece, Receipt
from brim.storage.bucket_storage import TRIALS
from brim.storage.explain_error import explained
from brim.storage.lease import Lease
from brim.storage.listing import list_files, read_file, stat_file
from brim.storage.location import Location
from brim.storage.reading import RangeStream, RemoteFile
from brim.storage.storage import PART_BYTES, FileInfo, PutResult, Storage, open_storage
from brim.storage.storage_error import StorageError
from brim.storage.upload_content import SilentWatcher, UploadWatcher
from brim.stores.store import Announcement, CardMaker, Listener, Publication, PublishedThere, SendingRoom

MANIFESTS = ".brim"
_KEEP = f"{MANIFESTS}/keep"  # content that lost its name and will get another, by SHA-256
_CONFIG = "default"
_MOST_IN_FLIGHT = 2
_MOST_COPY_BYTES = 5_000_000_000  # of one copy inside of S3


def parts_in_flight(room: SendingRoom) -> int:
    """How many parts of a shard may be on their way: what the limit leaves, beside the one that every shard needs."""
    return max(1, min(1 + room.bytes // max(room.workers, 1) // PART_BYTES, _MOST_IN_FLIGHT))


def need_place(address: Location, note: Callable[[str], None]) -> None:
    """A bucket of the Hub is made if it is not there, as a repository is; others are not brim's to make."""
    with explained(address):
        if open_storage(address).create():
            note(f"made the private bucket {address.root}")


class BucketStore:
    """One build at one place. With `mine`, others are at it too: only these shards are this run's."""

    staged = False

    def __init__(
        self,
        address: Location,
        owner: str,
        room: SendingRoom,
        listener: Listener,
        check: Callable[[], None] = lambda: None,
        folder: str = "data",
        mine: frozenset[str] | None = None,
    ) -> None:
        self.address, self.folder, self._mine = address, folder, mine
        self._listener, self._check = listener, check
        self._storage = open_storage(address, parts_in_flight=parts_in_flight(room))
        self._lease = Lease(address, owner, listener.note)
        self._there: dict[str, FileInfo] = {}

    def open(self, fingerprint: str) -> None:
        need_place(self.address, self._listener.note)
        with told_if_slow(self._listener.note, f"still waiting for {self.address}"):
            self._look()
        if self._mine is None:
            self._lease.take(self._check)
        self._abort_left()
        self._look()

    def _look(self) -> None:
        self._there = _listed(self.address, self.folder)

    def _abort_left(self) -> None:
        """Uploads that a killed run has begun. Whoever holds the lease is the only one to have any."""
        start = f"{self.folder}/"

        def is_own(name: str) -> bool:
            return "/" not in name.removeprefix(start) if self._mine is None else name in self._mine

        try:
            left = self._storage.abort_uploads(start, is_own)
        except StorageError as error:
            self._listener.note(f"{self.address}: {error.detail}")
            return
        if left:
            self._listener.note(f"aborted {left} upload(s) that were begun and never finished")

    def manifest_name(self, split: str) -> str:
        return f"{MANIFESTS}/{_CONFIG}/{split}.jsonl"

    def manifests(self) -> list[bytes]:
        """What earlier builds left about themselves."""
        return _manifests(self.address, self._there)

    def carrier(self) -> Storage:
        return self._storage

    def shards(self) -> Iterable[str]:
        return _shards(self._there, self.folder)

    def begun(self) -> bool:
        return UNFINISHED.encode() in (read_file(self.address, CARD, "write") or b"")

    def holds(self, piece: Piece) -> bool:
        return _is(self._there.get(piece.name), piece)

    def holds_aside(self, piece: Piece) -> bool:
        there = self._there.get(f"{_KEEP}/{piece.sha256}")
        return there is not None and there.st_size == piece.size

    def set_aside(self, piece: Piece) -> None:
        if piece.size <= _MOST_COPY_BYTES:  # a larger one is sent again
            self._move(piece.name, f"{_KEEP}/{piece.sha256}")

    def bring_back(self, piece: Piece, name: str) -> str:
        self._move(f"{_KEEP}/{piece.sha256}", name)
        return self._there[name].etag

    def _move(self, source: str, target: str) -> None:
        with explained(self.address):
            info = self._storage.move(source, target)
        self._there.pop(source, None)
        self._there[target] = info

    def discard(self, names: Iterable[str]) -> None:
        gone = [name for name in names if name in self._there]
        gone += [name for name in self._there if name.startswith(f"{_KEEP}/")]
        self._delete(gone)

    def _delete(self, names: Sequence[str]) -> None:
        with explained(self.address):
            self._storage.delete(names)
        for name in names:
            self._there.pop(name, None)

    def free_bytes(self) -> int | None:
        return None

    def check_card(self, maker: CardMaker) -> None:
        self._card(maker)

    def begin(self, job: Announcement) -> None:
        self._card(job.trial_card)
        self._write(CARD, self._card(job.unfinished_card))

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        self._lease.check()
        return self._storage.put(name, splice, sha256, watcher)

    def checkpoint(self, pieces: Sequence[Piece], oldest: float) -> None:
        """What is there lasts."""

    def publish(self, publication: Publication) -> str:
        self._look()
        wrong = [piece.name for piece in publication.pieces if not self._lists(piece)]
        if wrong:
            raise DestinationUnavailableError(
                f"{self.address} does not hold {wrong[0]} as it was sent ({len(wrong)} such objects).",
                hint="Someone else may have changed it meanwhile. Run the same command again.",
            )
        self._lease.renew()  # from here on nobody else can have been at it
        self._abort_left()  # of a machine of a cluster that was lost on the way
        stale = [n for n in self._there if n.startswith(f"{MANIFESTS}/{_CONFIG}/") and n not in publication.manifests]
        keep = [name for name in self._there if name.startswith((f"{_KEEP}/", TRIALS))]
        self._delete(sorted({*(name for name in publication.gone if name in self._there), *stale, *keep}))
        for name, data in publication.manifests.items():
            self._write(name, data)
        self._write(CARD, self._card(publication.card))
        count = len(publication.pieces)
        shards = "the shard" if count == 1 else f"all {count:,} shards"
        what = "size and ETag" if all(piece.etag for piece in publication.pieces) else "size"
        return f"the bucket lists {shards} with the {what} noted when sent"

    def _lists(self, piece: Piece) -> bool:
        """Whether the shard is there. Some stores list another ETag than they answer with: then the answer counts."""
        listed = self._there.get(piece.name)
        if listed is None or _is(listed, piece):
            return listed is not None
        return _is(stat_file(self.address, piece.name, "write"), piece)

    def _card(self, maker: CardMaker) -> bytes:
        existing = read_file(self.address, CARD, "write")
        try:
            return maker(None if existing is None else existing.decode(), {}).encode()
        except UnicodeDecodeError as error:
            raise DestinationError(f"The {CARD} at {self.address} is not UTF-8.", hint="Mend it there.") from error

    def _write(self, name: str, data: bytes) -> None:
        with explained(self.address):
            self._storage.put_bytes(name, data)

    def close(self) -> None:
        self._lease.release()


def _is(there: FileInfo | None, piece: Piece) -> bool:
    """Whether what is there is the shard: by size, and by its ETag where one was noted."""
    return there is not None and there.st_size == piece.size and piece.etag in ("", there.etag)


def published_in(address: Location, folder: str = "data") -> PublishedThere:
    """What is there, without a lock and without changing anything. In a bucket that is yet to be made: nothing."""
    with explained(address):
        if not open_storage(address).exists():
            return PublishedThere((), (), unfinished=False)
    there, card = _listed(address, folder), read_file(address, CARD, "write") or b""
    return PublishedThere(_manifests(address, there), _shards(there, folder), UNFINISHED.encode() in card)


def _listed(address: Location, shards: str) -> dict[str, FileInfo]:
    return {name: info for folder in (shards, MANIFESTS) for name, info in list_files(address, folder, "write")}


def _manifests(address: Location, there: Iterable[str]) -> list[bytes]:
    names = [name for name in sorted(there) if name.startswith(f"{MANIFESTS}/{_CONFIG}/") and name.endswith(".jsonl")]
    found = (read_file(address, name, "write") for name in names)
    return [data for data in found if data is not None]


def _shards(there: Iterable[str], folder: str) -> list[str]:
    return [name for name in sorted(there) if name.startswith(f"{folder}/")]


def bad_rows_of(unit: str) -> str:
    """The file of the rows that were left out of a unit."""
    return f"{Path(unit).stem}.bad.arrow"


def send_unit(address: Location, folder: Path, name: str) -> None:
    """A unit's file, and that of the rows that were left out of it, if there is one."""
    for file in (folder / bad_rows_of(name), folder / name):
        if file.exists():
            send_file(address, file, file.name)


def send_file(address: Location, file: Path, name: str) -> None:
    with FileSplice(file) as splice:
        open_storage(address).put(name, splice, None, SilentWatcher())


def fetch_unit(address: Location, name: str, folder: Path, sha256: str = "") -> None:
    """A file of a unit, whole or not at all; VerificationError if it is not the one with this SHA-256."""
    info = stat_file(address, name)
    if info is None:
        raise DestinationError(f"{address.child(name)} is not there any more.", hint="Run the same command again.")
    (folder / name).parent.mkdir(exist_ok=True)
    with RangeStream(address, RemoteFile(address, name, info.st_size, info.etag).ranges(0, info.st_size)) as stream:

        def content() -> Iterator[memoryview]:
            digest = hashlib.sha256()
            for _, view in stream:
                digest.update(view)
                yield view
            if sha256 not in ("", digest.hexdigest()):
                raise VerificationError(f"{address.child(name)} is not what was computed.")

        write_whole(folder / name, content())


def units_there(address: Location) -> Callable[[Receipt], bool]:
    """Whether the unit of a receipt is in the bucket, as it lists them now."""
    there = {name: info.st_size for name, info in list_files(address, action="write")}
    return lambda receipt: there.get(receipt.name) == receipt.size


def clear_units(address: Location) -> None:
    """Take all of them away."""
    with explained(address):
        storage = open_storage(address)
        storage.delete([name for name, _ in storage.list()])
