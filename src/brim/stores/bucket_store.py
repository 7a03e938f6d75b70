"""A place in a bucket as a sink: shards below `data/`, the card beside them, their ledger in `.brim/`.

A bucket cannot change several objects at once. So it is like a folder: while a build goes on, the card names what does
not exist; the card that makes the dataset loadable comes last. An ETag stands for content: it is noted when a shard has
been sent, and what the bucket lists at the end must agree.

Machines that share no disk put unit files there, too, and whoever finishes fetches them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from brim.errors import DestinationError, DestinationUnavailableError, VerificationError
from brim.formats.card import CARD
from brim.formats.card_configs import UNFINISHED
from brim.formats.splice import FileSplice, Splice
from brim.progress import notify_if_slow
from brim.records import dataclass
from brim.state.atomic_files import write_whole
from brim.state.ledger import Piece, Receipt
from brim.state.retry import Retry, leaving
from brim.storage.abilities import CHECKS, ask_abilities
from brim.storage.explain_error import explain, explained
from brim.storage.lease import Lease
from brim.storage.listing import list_objects, read_small, stat_object
from brim.storage.location import Location
from brim.storage.reading import ObjectStream
from brim.storage.requests import is_transient, patience_s
from brim.storage.storage import PART_BYTES, ObjectStat, open_storage, part_bytes
from brim.storage.storage_error import StorageError
from brim.stores.store import (
    Announcement,
    CardMaker,
    Listener,
    Publication,
    PublishedThere,
    Put,
    PutWatcher,
    SendingRoom,
)

_TRIES = 3
_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class BucketCarrier:
    """Shards to `address`, with so many parts of one on their way at a time. Credentials are the machine's own.

    `etags`: whether those of this store tell content (abilities.py); else none are noted. `parts`: if it takes any.
    """

    address: Location
    in_flight: int = 2
    etags: bool = True
    parts: bool = True

    def check(self) -> None:
        """Whether this machine may write there."""
        key = self.address.key(f".brim/{CHECKS}{time.time_ns():x}")
        with explained(self.address):
            open_storage(self.address).put_bytes(key, b"brim")
            open_storage(self.address).delete([key])

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: PutWatcher) -> Put:
        # obstore has tried again what it may. What it may not, like a part whose answer was lost, is sent anew.
        retry = Retry((_WAIT_S,) * (_TRIES - 1), is_transient, patience_s=patience_s())
        quiet = False
        try:
            while True:
                retry.begin()
                try:
                    return self._put(name, splice, _Told(watcher, quiet=quiet))
                except StorageError as error:
                    if not retry.again(error):
                        raise explain(error, self.address) from None
                quiet = True
        except BaseException:
            if splice.size > part_bytes(splice.size):  # a smaller one is sent whole: nothing of it was begun
                self.drop(name)
            raise

    def _put(self, name: str, splice: Splice, watcher: _Told) -> Put:
        key = self.address.key(name)
        etag, sha256 = open_storage(self.address).put(key, splice, self.in_flight, self.parts, watcher.sent)
        return self._there(name, splice.size, sha256, etag)

    def _there(self, name: str, size: int, sha256: str, etag: str) -> Put:
        """What was sent, if that is what the store has."""
        there = stat_object(self.address.below(name), reading=False)
        if there is None or there.st_size != size:
            there_are = "is not there" if there is None else f"has {there.st_size:,} there"
            raise DestinationUnavailableError(
                f"{self.address.below(name)} was sent with {size:,} bytes and {there_are}.",
                hint="Somebody else may be writing to the same place. Run the same command again.",
            )
        # A store that answers with one ETag and then has another tells nothing by them.
        tells = self.etags and etag in ("", there.etag)
        return Put(sha256, etag=there.etag if tells else "")

    def drop(self, name: str) -> None:
        """What was begun and will not be finished."""
        from brim.storage.stale_uploads import CannotTell, abort_uploads

        key = self.address.key(name)
        try:
            with leaving():
                abort_uploads(self.address, key, lambda found: found == key)
        except CannotTell:
            pass  # the next run tries again


class _Told:
    """Tells of bytes once, however often they are sent."""

    def __init__(self, watcher: PutWatcher, quiet: bool) -> None:
        self._watcher, self._quiet = watcher, quiet

    def sent(self, size: int) -> None:
        self._watcher.sent(0 if self._quiet else size)


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
            note(f"made the private bucket {address.scheme}://{address.bucket}")


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
        self._carrier = BucketCarrier(address, parts_in_flight(room))
        self._lease = Lease(address, owner, listener.note)
        self._there: dict[str, ObjectStat] = {}

    def open(self, fingerprint: str) -> None:
        need_place(self.address, self._listener.note)
        with notify_if_slow(self._listener.note, f"still waiting for {self.address}"):
            self._look()
        able = ask_abilities(self.address)
        if missing := able.missing():
            self._listener.note(f"{self.address}: this store {'; it '.join(missing)}")
        self._carrier = replace(self._carrier, etags=able.same_etags, parts=able.parts)
        if self._mine is None:
            self._lease.take(self._check)
        self._abort_left()
        self._look()

    def _look(self) -> None:
        self._there = _listed(self.address, self.folder)

    def _abort_left(self) -> None:
        """Uploads that a killed run has begun. Whoever holds the lease is the only one to have any."""
        from brim.storage.stale_uploads import CannotTell, abort_uploads  # which speaks HTTP and XML

        start = self.address.key(f"{self.folder}/")
        keys = None if self._mine is None else {self.address.key(name) for name in self._mine}
        try:
            left = abort_uploads(
                self.address, start, lambda key: "/" not in key.removeprefix(start) if keys is None else key in keys
            )
            if keys is None:
                abort_uploads(self.address, self.address.key(f"{MANIFESTS}/{CHECKS}"), lambda key: True)
        except CannotTell as why:
            self._listener.note(f"{self.address}: {why}")
            return
        if left:
            self._listener.note(f"aborted {left} upload(s) that were begun and never finished")

    def manifest_name(self, split: str) -> str:
        return f"{MANIFESTS}/{_CONFIG}/{split}.jsonl"

    def manifests(self) -> list[bytes]:
        """What earlier builds left about themselves."""
        return _manifests(self.address, self._there)

    def carrier(self) -> BucketCarrier:
        return self._carrier

    def shards(self) -> Iterable[str]:
        return _shards(self._there, self.folder)

    def begun(self) -> bool:
        return UNFINISHED.encode() in (read_small(self.address, CARD, reading=False) or b"")

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
            storage = open_storage(self.address)
            storage.copy(self.address.key(source), self.address.key(target))
            storage.delete([self.address.key(source)])
        there = stat_object(self.address.below(target), reading=False)
        if there is None:
            raise DestinationUnavailableError(
                f"{target} was copied in the bucket and is not there.", hint="Run the same command again."
            )
        self._there.pop(source, None)
        self._there[target] = there

    def discard(self, names: Iterable[str]) -> None:
        gone = [name for name in names if name in self._there]
        gone += [name for name in self._there if name.startswith(f"{_KEEP}/")]
        self._delete(gone)

    def _delete(self, names: Sequence[str]) -> None:
        with explained(self.address):
            open_storage(self.address).delete([self.address.key(name) for name in names])
        for name in names:
            self._there.pop(name, None)

    def free_bytes(self) -> int | None:
        return None

    def check_card(self, maker: CardMaker) -> None:
        self._card(maker)

    def begin(self, job: Announcement) -> None:
        self._card(job.trial_card)
        self._write(CARD, self._card(job.unfinished_card))

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: PutWatcher) -> Put:
        self._lease.check()
        return self._carrier.put(name, splice, sha256, watcher)

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
        keep = [name for name in self._there if name.startswith((f"{_KEEP}/", f"{MANIFESTS}/{CHECKS}"))]
        self._delete(sorted({*(name for name in publication.gone if name in self._there), *stale, *keep}))
        for name, data in publication.manifests.items():
            self._write(name, data)
        self._write(CARD, self._card(publication.card))
        count = len(publication.pieces)
        shards = "the shard" if count == 1 else f"all {count:,} shards"
        what = "size and ETag" if self._carrier.etags else "size"
        return f"the bucket lists {shards} with the {what} noted when sent"

    def _lists(self, piece: Piece) -> bool:
        """Whether the shard is there. Some stores list another ETag than they answer with: then the answer counts."""
        listed = self._there.get(piece.name)
        if listed is None or _is(listed, piece):
            return listed is not None
        return _is(stat_object(self.address.below(piece.name), reading=False), piece)

    def _card(self, maker: CardMaker) -> bytes:
        existing = read_small(self.address, CARD, reading=False)
        try:
            return maker(None if existing is None else existing.decode(), {}).encode()
        except UnicodeDecodeError as error:
            raise DestinationError(f"The {CARD} at {self.address} is not UTF-8.", hint="Mend it there.") from error

    def _write(self, name: str, data: bytes) -> None:
        with explained(self.address):
            open_storage(self.address).put_bytes(self.address.key(name), data)

    def close(self) -> None:
        self._lease.release()


def _is(there: ObjectStat | None, piece: Piece) -> bool:
    """Whether what is there is the shard: by size, and by its ETag where one was noted."""
    return there is not None and there.st_size == piece.size and piece.etag in ("", there.etag)


def published_in(address: Location, folder: str = "data") -> PublishedThere:
    """What is there, without a lock and without changing anything. In a bucket that is yet to be made: nothing."""
    with explained(address):
        if not open_storage(address).exists():
            return PublishedThere((), (), unfinished=False)
    there, card = _listed(address, folder), read_small(address, CARD, reading=False) or b""
    return PublishedThere(_manifests(address, there), _shards(there, folder), UNFINISHED.encode() in card)


def _listed(address: Location, shards: str) -> dict[str, ObjectStat]:
    there = {}
    for folder in (shards, MANIFESTS):
        for name, stat in list_objects(address.below(folder), reading=False):
            there[f"{folder}/{name}"] = stat
    return there


def _manifests(address: Location, there: Iterable[str]) -> list[bytes]:
    names = [name for name in sorted(there) if name.startswith(f"{MANIFESTS}/{_CONFIG}/") and name.endswith(".jsonl")]
    found = (read_small(address, name, reading=False) for name in names)
    return [data for data in found if data is not None]


def _shards(there: Iterable[str], folder: str) -> list[str]:
    return [name for name in sorted(there) if name.startswith(f"{folder}/")]


_CHUNK = 1 << 20


class _Nobody:
    def hashed(self, size: int) -> None: ...
    def sent(self, size: int) -> None: ...


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
        BucketCarrier(address).put(name, splice, None, _Nobody())


def fetch_unit(address: Location, name: str, folder: Path, sha256: str = "") -> None:
    """A file of a unit, whole or not at all; VerificationError if it is not the one with this SHA-256."""
    stat = stat_object(address.below(name))
    if stat is None:
        raise DestinationError(f"{address.below(name)} is not there any more.", hint="Run the same command again.")
    (folder / name).parent.mkdir(exist_ok=True)
    with closing(ObjectStream(address, name, stat.st_size, stat.etag)) as stream:

        def content() -> Iterator[bytes]:
            yield from (stream.read_at(at, _CHUNK) for at in range(0, stat.st_size, _CHUNK))
            if sha256 not in ("", stream.sha256()):
                raise VerificationError(f"{address.below(name)} is not what was computed.")

        write_whole(folder / name, content())


def units_there(address: Location) -> Callable[[Receipt], bool]:
    """Whether the unit of a receipt is in the bucket, as it lists them now."""
    there = {name: stat.st_size for name, stat in list_objects(address, reading=False)}
    return lambda receipt: there.get(receipt.name) == receipt.size


def clear_units(address: Location) -> None:
    """Take all of them away."""
    with explained(address):
        open_storage(address).delete([address.key(name) for name, _ in list_objects(address, reading=False)])
