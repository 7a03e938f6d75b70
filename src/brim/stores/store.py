"""What a build needs of a destination, whatever it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from brim.formats.splice import Splice
from brim.records import dataclass
from brim.state.ledger import Piece
from brim.storage.storage import PutResult
from brim.storage.upload_content import UploadWatcher

# From the card that is there, and the files there with their sizes as far as they are known, to the card that shall be.
CardMaker = Callable[[str | None, Mapping[str, int]], str]


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a sink is told before the first shard. `missing` shards are not there under their name yet.

    `trial_card` raises what the card at the end would: that is better said before the first byte.
    """

    fingerprint: str
    title: str
    missing: int
    unfinished_card: CardMaker
    trial_card: CardMaker


@dataclass(frozen=True, slots=True)
class Publication:
    """What readers shall find: these shards and this card, and no longer what is `gone`."""

    pieces: Sequence[Piece]
    gone: frozenset[str]
    card: CardMaker
    manifests: Mapping[str, bytes]  # the ledger of each split, for whoever verifies without this machine's
    builds_on: Sequence[Piece] | None = None  # the shards that must still be there, where others come behind them


@dataclass(frozen=True, slots=True)
class PublishedThere:
    """What lies at a destination, as whoever has not built it sees it.

    `unfinished`: a build has not ended, so shards may be there that no manifest names.
    """

    manifests: Sequence[bytes]
    shards: Sequence[str]
    unfinished: bool


class Moved(Exception):
    """Somebody else has changed what this publication builds upon: plan it anew. Never leaves the engine."""


class ObjectsGone(Exception):
    """Shards that were put are not there any more: they have to be put again. Never leaves the engine."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(*names)
        self.names = names


class Listener(Protocol):
    """Whoever should know what a sink does beside putting shards."""

    def note(self, text: str) -> None: ...
    def committed(self) -> None: ...


class Carrier(Protocol):
    """Uploads shards from any machine: a storage, or what sends to a repository. It can be pickled.

    A token that it needs is pickled with it, and shows in no repr.
    """

    def check_access(self) -> None:
        """Check that shards can be uploaded from this machine; a BrimError says why not."""

    def put(self, name: str, content: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        """Upload a shard. Its SHA-256 may be known already."""


class Store(Protocol):
    """A destination. Methods are called by one thread, `put` by several."""

    staged: bool
    """Whether a shard that was put is only safe for some hours, until it is published."""

    def open(self, fingerprint: str) -> None:
        """Be ready for shards, or say why not before the first byte."""

    def shards(self) -> Iterable[str]:
        """The names of all files where shards belong."""

    def begun(self) -> bool:
        """Whether the card there says that a build has not ended."""

    def holds(self, piece: Piece) -> bool:
        """Whether the shard is there under its name."""

    def holds_aside(self, piece: Piece) -> bool:
        """Whether its content is there, whatever its name."""

    def set_aside(self, piece: Piece) -> None:
        """Keep the content of a shard that loses its name."""

    def bring_back(self, piece: Piece, name: str) -> str:
        """Give content that was set aside a name; its ETag there, where there is such a thing."""

    def discard(self, names: Iterable[str]) -> None:
        """Shards of an earlier build that starts over."""

    def free_bytes(self) -> int | None:
        """Room for more, or None where nobody can tell."""

    def check_card(self, maker: CardMaker) -> None:
        """Raise what writing this card would, where a card that cannot be written is found too late otherwise."""

    def begin(self, job: Announcement) -> None:
        """Something will be put."""

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        """Bring a shard there. Its SHA-256 may be known already."""

    def carrier(self) -> Carrier:
        """What puts shards from elsewhere, once the sink is open."""

    def checkpoint(self, pieces: Sequence[Piece], oldest: float) -> None:
        """These were put and not published, the first at `oldest` (Unix time): make sure that they last."""

    def publish(self, publication: Publication) -> str:
        """Make it what readers find. Returns what was proved, in words."""

    def close(self) -> None:
        """Let go of what `open` took."""


@dataclass(frozen=True, slots=True)
class SendingRoom:
    """What is left of the memory limit, how many shards are on their way at a time, and whether a user chose it."""

    bytes: int
    workers: int
    asked_for: bool = True
