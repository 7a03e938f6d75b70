"""A place in a bucket as a sink: shards below `data/`, the card beside them, their ledger in `.brim/`.

A bucket cannot change several objects at once. So it is like a folder: while a build goes on, the card names what does
not exist; the card that makes the dataset loadable comes last. An ETag stands for content: it is noted when a shard has
been sent, and what the bucket lists at the end must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from brim.errors import DestinationError, SinkFailed
from brim.formats.card import CARD, UNFINISHED
from brim.formats.splice import Splice
from brim.objects.address import ObjectAddress
from brim.objects.failures import explained
from brim.objects.listing import ObjectStat, list_objects, read_small, stat_object
from brim.objects.loop import interrupted_by
from brim.objects.sending import PART_BYTES, copy_object, delete_objects, send_small
from brim.objects.uploads import CannotTell, abort_uploads
from brim.progress import told_if_slow
from brim.sinks.objects.carrier import CHECKS, ObjectCarrier
from brim.sinks.objects.lease import Lease
from brim.sinks.room import Room
from brim.sinks.sink import CardMaker, Job, Listener, Piece, Publication, Put, Watcher

MANIFESTS = ".brim"
_KEEP = f"{MANIFESTS}/keep"  # content that lost its name and will get another, by SHA-256
_CONFIG = "default"
_MOST_IN_FLIGHT = 2
_MOST_COPY_BYTES = 5_000_000_000  # of one copy inside of S3


def parts_in_flight(room: Room) -> int:
    """How many parts of a shard may be on their way: what the limit leaves, beside the one that every shard needs."""
    return max(1, min(1 + room.bytes // max(room.workers, 1) // PART_BYTES, _MOST_IN_FLIGHT))


class ObjectSink:
    """One build at one place. With `mine`, others are at it too: only these shards are this run's."""

    staged = False

    def __init__(
        self,
        address: ObjectAddress,
        owner: str,
        room: Room,
        listener: Listener,
        check: Callable[[], None] = lambda: None,
        folder: str = "data",
        mine: frozenset[str] | None = None,
    ) -> None:
        self.address, self.folder, self._mine = address, folder, mine
        self._listener, self._check = listener, check
        self._carrier = ObjectCarrier(address, parts_in_flight(room))
        self._lease = Lease(address, owner, listener.note)
        self._there: dict[str, ObjectStat] = {}

    def open(self, fingerprint: str) -> None:
        with told_if_slow(self._listener.note, f"still waiting for {self.address}"), interrupted_by(self._check):
            self._look()
        if self._mine is None:
            self._lease.take(self._check)
        self._abort_left()
        self._look()

    def _look(self) -> None:
        self._there = _listed(self.address, self.folder)

    def _abort_left(self) -> None:
        """Uploads that a killed run has begun. Whoever holds the lease is the only one to have any."""
        start = self.address.key(f"{self.folder}/")
        keys = None if self._mine is None else {self.address.key(name) for name in self._mine}
        try:
            left = abort_uploads(
                self.address, start, lambda key: "/" not in key.removeprefix(start) if keys is None else key in keys
            )
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

    def carrier(self) -> ObjectCarrier:
        return self._carrier

    def shards(self) -> Iterable[str]:
        return _shards(self._there, self.folder)

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
            copy_object(self.address, self.address.key(source), self.address.key(target))
            delete_objects(self.address, [self.address.key(source)])
        there = stat_object(self.address.below(target), reading=False)
        if there is None:
            raise SinkFailed(f"{target} was copied in the bucket and is not there.", hint="Run the same command again.")
        self._there.pop(source, None)
        self._there[target] = there

    def discard(self, names: Iterable[str]) -> None:
        gone = [name for name in names if name in self._there]
        gone += [name for name in self._there if name.startswith(f"{_KEEP}/")]
        self._delete(gone)

    def _delete(self, names: Sequence[str]) -> None:
        with explained(self.address):
            delete_objects(self.address, [self.address.key(name) for name in names])
        for name in names:
            self._there.pop(name, None)

    def free_bytes(self) -> int | None:
        return None

    def begin(self, job: Job) -> None:
        self._card(job.trial_card)
        self._write(CARD, self._card(job.unfinished_card))

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: Watcher) -> Put:
        self._lease.check()
        return self._carrier.put(name, splice, sha256, watcher)

    def checkpoint(self, pieces: Sequence[Piece], oldest: float) -> None:
        """What is there lasts."""

    def publish(self, publication: Publication) -> str:
        self._look()
        wrong = [piece.name for piece in publication.pieces if not _is(self._there.get(piece.name), piece)]
        if wrong:
            raise SinkFailed(
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
        return f"the bucket lists {shards} with the size and ETag noted when sent"

    def _card(self, maker: CardMaker) -> bytes:
        existing = read_small(self.address, CARD, reading=False)
        try:
            return maker(None if existing is None else existing.decode()).encode()
        except UnicodeDecodeError as error:
            raise DestinationError(f"The {CARD} at {self.address} is not UTF-8.", hint="Mend it there.") from error

    def _write(self, name: str, data: bytes) -> None:
        with explained(self.address):
            send_small(self.address, self.address.key(name), data)

    def close(self) -> None:
        self._lease.release()


def _is(there: ObjectStat | None, piece: Piece) -> bool:
    """Whether what is there is the shard: by size, and by its ETag where one was noted."""
    return there is not None and there.st_size == piece.size and piece.etag in ("", there.etag)


@dataclass(frozen=True, slots=True)
class There:
    """What lies at a place. `unfinished`: a build has not ended, so shards may be there that no manifest names."""

    manifests: Sequence[bytes]
    shards: Sequence[str]
    unfinished: bool


def published_in(address: ObjectAddress, folder: str = "data") -> There:
    """What is there, without a lock and without changing anything."""
    there, card = _listed(address, folder), read_small(address, CARD, reading=False) or b""
    return There(_manifests(address, there), _shards(there, folder), UNFINISHED.encode() in card)


def _listed(address: ObjectAddress, shards: str) -> dict[str, ObjectStat]:
    there = {}
    for folder in (shards, MANIFESTS):
        for name, stat in list_objects(address.below(folder), reading=False):
            there[f"{folder}/{name}"] = stat
    return there


def _manifests(address: ObjectAddress, there: Iterable[str]) -> list[bytes]:
    names = [name for name in sorted(there) if name.startswith(f"{MANIFESTS}/{_CONFIG}/") and name.endswith(".jsonl")]
    found = (read_small(address, name, reading=False) for name in names)
    return [data for data in found if data is not None]


def _shards(there: Iterable[str], folder: str) -> list[str]:
    return [name for name in sorted(there) if name.startswith(f"{folder}/")]
