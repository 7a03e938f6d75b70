"""The Hub as a sink: shards are sent as objects that nobody sees, then published in one step.

Up to a hundred shards: one commit with all pointers, the card and the deletions. More: a pull request that
brim opens, fills in groups and merges at the end. Readers see the old version or the new one. What is there
decides what is done (hub_commits.py), so that a killed run needs no memory of its own but the pull request's
number.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import field
from typing import Any, Protocol

from brim.errors import DestinationError, DestinationUnavailableError, MemoryLimitError
from brim.formats.card import CARD
from brim.formats.card_configs import UNFINISHED
from brim.formats.splice import Splice
from brim.records import dataclass
from brim.state.ledger import Piece
from brim.state.retry import interruptible
from brim.storage import hub_private
from brim.storage.hub_client import HubClient, Snapshot
from brim.storage.hub_session import explained, hub_session, hub_tries, status_of
from brim.storage.location import MAIN, Location
from brim.storage.storage import PutResult
from brim.storage.storage_error import StorageError
from brim.storage.upload_content import UploadWatcher
from brim.storage.xet import XET_BYTES, XetUnavailableError
from brim.stores.destination import PublishOptions
from brim.stores.hub_commits import CONFLICT, REFUSED, Commits, OperationsAt, pointers, texts
from brim.stores.hub_upload import Lfs, Xet
from brim.stores.store import Announcement, CardMaker, Listener, Moved, Publication, PublishedThere, SendingRoom

_REACH_S = 10.0
_ONE_BYTE = Piece("check", 1, hashlib.sha256(b"\0").hexdigest())

# What this process has opened. It is a worker's, and ends with its job; connections stay open from shard to shard.
_WAYS: dict[HubCarrier, Lfs | Xet] = {}
_SESSION: list[ExitStack] = []


@dataclass(frozen=True, slots=True)
class HubCarrier:
    """`room` is that of one shard; None: by LFS, which needs none."""

    address: Location
    endpoint: str
    token: str = field(repr=False)
    room: SendingRoom | None = None

    def check_access(self) -> None:
        """Ask for the right to send one byte, which is then not sent. First, without patience: is the Hub there?"""
        from huggingface_hub.utils import get_session

        _open_session()
        with explained(self.address.repo, begun=False):
            interruptible(lambda: get_session().head(self.endpoint, timeout=_REACH_S))
            Lfs(self.address, self.token, self.endpoint).asked([_ONE_BYTE])

    def put(self, name: str, content: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        _open_session()
        with explained(self.address.repo, begun=True):
            way = _WAYS.get(self)
            if way is None:
                way = _WAYS[self] = self._way()
            return way.send(name, content, sha256, watcher)

    def _way(self) -> Lfs | Xet:
        """A machine that has no Xet sends the same bytes by LFS."""
        if self.room is not None:
            try:
                return Xet(self.address, self.token, self.room, self.endpoint)
            except XetUnavailableError:
                pass
        return Lfs(self.address, self.token, self.endpoint)


def _open_session() -> None:
    """The library, changed as brim uses it, from the first shard of this process to its end."""
    if not _SESSION:
        stack = ExitStack()
        stack.enter_context(hub_session(lambda text: None))
        _SESSION.append(stack)


MANIFESTS = ".brim"
# The Hub asks for about 100 files a commit, limits commits per hour, and removes uploaded objects that no
# commit names after about 20 hours.
ONE_COMMIT_SHARDS = 100
GROUP_SHARDS, GROUP_S = 100, 3600.0
UNCOMMITTED_S = 12 * 3600.0
_TITLE_CHARACTERS = 150  # of 200 that the Hub takes


class Memory(Protocol):
    """What a killed run remembers."""

    def recall(self, name: str) -> Any: ...
    def remember(self, name: str, value: Any) -> None: ...


class Way(Protocol):
    """How the bytes of a shard get to the Hub."""

    name: str
    hashes_first: bool

    def send(self, name: str, splice: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult: ...


class HubStore:
    """One publication to one repository."""

    staged = True

    def __init__(
        self,
        address: Location,
        options: PublishOptions,
        memory: Memory,
        room: SendingRoom,
        listener: Listener,
        check: Callable[[], None] = lambda: None,
        *,
        updates: bool = False,
    ) -> None:
        """`updates`: its shards may be much like those that are there."""
        self.address, self.options, self._updates = address, options, updates
        self.visibility, self.pull = "", 0
        self._memory, self._room, self._listener, self._note = memory, room, listener, listener.note
        self._check = check
        self._begun = False
        self._open = ExitStack()

    def open(self, fingerprint: str) -> None:
        self._open.enter_context(hub_session(self._note, self._check))
        with self._explained():
            self.client = HubClient(self.address, self.options.token)
            token = self.client.need_token()
            self._need_repository()
            self._lfs = Lfs(self.address, token)
            self._commits = Commits(self.client, self._lfs, self._listener.committed)
            self._base = self.client.snapshot(self.address.revision)
            if self.options.folder in self._base.tree:
                raise DestinationError(
                    f"{self.address.repo} holds a file named {self.options.folder}, where the folder of this config "
                    "would be.",
                    hint="Use another --config.",
                )
            self._look_for_pull(fingerprint)
            self._way = self._choose_way(token)

    def _need_repository(self) -> None:
        visibility = self.client.visibility()
        if visibility is None:
            visibility = "public" if self.options.public else "private"
            self.client.create(private=not self.options.public)
            self._note(f"created the {visibility} repository {self.address.repo}")
        elif self.client.called.lower() != self.address.repo.lower():
            self._note(f"{self.address.repo} is called {self.client.called} now: the Hub leads there")
        if self.options.public and visibility == "private":
            self._note(f"{self.address.repo} exists and stays private; --public is for new repositories")
        self.visibility = visibility
        self.client.need_write()
        self.holds_more = visibility == "public" or self.client.holds_more()
        if self.address.revision != MAIN:
            self.client.need_branch(self.address.revision)

    def _look_for_pull(self, fingerprint: str) -> None:
        """The pull request that an interrupted run of the same job left."""
        # A pull request is taken up by the same publication alone: to the same branch, config and split, and not
        # if it waits for somebody to look at it.
        what = [fingerprint, self.address.revision, self.options.config, self.options.split, self.options.create_pr]
        self._mark = f"brim {hashlib.sha256(repr(what).encode()).hexdigest()[:16]}"
        self._filled: Snapshot | None = None
        if self.options.commit_as_you_go:
            return
        mark, number = self._memory.recall("pull request") or ("", 0)
        number = number if mark == self._mark else self.client.find_pull(self._mark)
        if number and self.client.pull_status(number) in ("draft", "open"):
            self._take_pull(number)

    def _take_pull(self, number: int) -> None:
        self.pull = number
        self._filled = self.client.snapshot(f"refs/pr/{number}")

    def _choose_way(self, token: str) -> Way:
        """A changed shard is mostly what was there: by Xet its new chunks go, if there is Xet and memory for it."""
        asked = self.options.upload_with == "xet"
        if not asked and not (self.options.upload_with == "auto" and self._updates and any(self.shards())):
            return self._lfs
        try:
            return Xet(self.address, token, self._room)
        except XetUnavailableError as error:
            if asked:
                self._note(f"{error}: sending by LFS instead")
        except MemoryLimitError:
            if asked:
                raise
        return self._lfs

    def _explained(self) -> Any:
        return explained(self.address.repo, begun=self._begun)

    @property
    def commits(self) -> int:
        """How many this run made."""
        return self._commits.count

    def manifest_name(self, split: str) -> str:
        return _manifest_name(self.options.config, split)

    def manifests(self) -> list[bytes]:
        """What earlier publications of this config (or of this split of it) left about themselves."""
        with self._explained():
            return _manifests(self.client, self._base, self.options)

    def shards(self) -> Iterable[str]:
        """Files of the config, or of the one split of it that is published."""
        return _shards(self._base, self.options)

    def begun(self) -> bool:
        with self._explained():
            return UNFINISHED.encode() in (self.client.read(CARD, self._base) or b"")

    def _snapshots(self) -> list[Snapshot]:
        return [self._base, *([self._filled] if self._filled else [])]

    def holds(self, piece: Piece) -> bool:
        return any(snapshot.holds(piece) for snapshot in self._snapshots())

    def holds_aside(self, piece: Piece) -> bool:
        return piece.sha256 in self._objects()

    def _objects(self) -> set[str]:
        return {file.sha256 for snapshot in self._snapshots() for file in snapshot.tree.values() if file.sha256}

    def set_aside(self, piece: Piece) -> None:
        """An object has no name; nothing needs to move."""

    def bring_back(self, piece: Piece, name: str) -> str:
        """The next commit gives it the name."""
        return ""

    def discard(self, names: Iterable[str]) -> None:
        """Readers keep what they have until the new version is whole."""

    def free_bytes(self) -> int | None:
        return None

    def check_card(self, maker: CardMaker) -> None:
        """`begin` does: nothing that readers see has changed by then."""

    def begin(self, job: Announcement) -> None:
        with self._explained():
            self._card(self._base, job.trial_card)
        self._begun = True
        with self._explained():
            if self.options.commit_as_you_go:
                card = self._card(self._base, job.unfinished_card)
                self._commits.bring(self.address.revision, lambda at: texts(at, {CARD: card}), "Begin to publish")
            elif not self.pull and (job.missing > ONE_COMMIT_SHARDS or self.options.create_pr):
                self._open_pull(job)
        self._job = job
        self._remember_pull()
        self._have = self._objects()
        self._sizes = {f.st_size for snapshot in self._snapshots() for f in snapshot.tree.values() if f.sha256}

    def _open_pull(self, job: Announcement) -> None:
        title = f"{(self.options.commit_message or job.title)[:_TITLE_CHARACTERS]} [{self._mark}]"
        number = self.client.find_pull(self._mark)  # an answer to its opening may have been lost
        if number is None:
            end = "" if self.options.create_pr else " and merges it when everything is there"
            about = f"Opened by brim, which fills it in groups{end}."
            retry = hub_tries()
            while number is None:
                try:
                    number = self.client.open_pull(title, about)
                except Exception as error:
                    if not retry.again(error):
                        raise
                    number = self.client.find_pull(self._mark)
        self._take_pull(number)
        end = "left open" if self.options.create_pr else "merged"
        self._note(f"filling pull request {number}, which is {end} when everything is there")

    def _remember_pull(self) -> None:
        if self.pull:
            self._memory.remember("pull request", [self._mark, self.pull])

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        with self._explained():
            if sha256 is None and (self._way.hashes_first or splice.size in self._sizes):
                sha256 = splice.sha256(watcher.hashed)
            if sha256 in self._have:
                watcher.sent(splice.size)
                return PutResult(sha256, sent=False)
            return self._way.send(name, splice, sha256, watcher)

    def carrier(self) -> HubCarrier:
        """By the way that was chosen; what the repository holds already is found out by asking for it."""
        token = self.client.token
        assert token is not None  # open() has seen one
        # What a task elsewhere may take is counted as the least that Xet needs.
        by_xet = self.options.upload_with == "xet" and self._way is not self._lfs
        room = SendingRoom(XET_BYTES, 1, asked_for=False) if by_xet else None
        return HubCarrier(self.address, self.client.api.endpoint, token, room)

    def checkpoint(self, pieces: Sequence[Piece], oldest: float) -> None:
        age_s = time.time() - oldest
        if not pieces or (len(pieces) < GROUP_SHARDS and age_s < GROUP_S):
            return
        # Whole groups if there are any: commits are counted, and the rest goes with the next one.
        pieces = pieces[: len(pieces) // GROUP_SHARDS * GROUP_SHARDS] or pieces
        with self._explained():
            if self.options.commit_as_you_go:
                self._base = self._add(self.address.revision, pieces)
            elif self.pull or age_s >= UNCOMMITTED_S * 0.8:
                if not self.pull:
                    self._open_pull(self._job)
                    self._remember_pull()
                self._fill(pieces)

    def _fill(self, pieces: Sequence[Piece]) -> None:
        """Commit shards to the pull request."""
        revision = f"refs/pr/{self.pull}"
        missing = [piece for piece in pieces if self._filled is None or not self._filled.holds(piece)]
        for start in range(0, len(missing), GROUP_SHARDS):
            self._filled = self._add(revision, missing[start : start + GROUP_SHARDS])

    def _add(self, revision: str, pieces: Sequence[Piece]) -> Snapshot:
        return self._commits.bring(revision, lambda at: pointers(at, pieces), "Add shards")

    def publish(self, publication: Publication) -> str:
        self._begun = True
        target = self.address.revision
        with self._explained():
            if self.pull:
                self._fill(publication.pieces)
                self._filled = self._bring_whole(f"refs/pr/{self.pull}", publication)
                if self.options.create_pr:
                    self.client.set_pull_status(self.pull, "open")
                    return self._proved(publication, f"refs/pr/{self.pull}")
                self._merge(publication)
            else:
                if self.options.commit_as_you_go:
                    missing = [p for p in publication.pieces if not self.holds(p)]
                    for start in range(0, len(missing), GROUP_SHARDS):
                        self._base = self._add(target, missing[start : start + GROUP_SHARDS])
                self._bring_whole(target, publication)
            return self._proved(publication, target)

    def _merge(self, publication: Publication) -> None:
        """Make the pull request what readers see. Where it cannot be merged, one commit does the same."""
        if self.address.revision == MAIN:
            self.client.set_pull_status(self.pull, "open")
            try:
                self.client.merge(self.pull)
                self._commits.made()
                return
            except Exception as error:
                if status_of(error) not in (*CONFLICT, *REFUSED):
                    raise
            self._note(f"pull request {self.pull} cannot be merged as it is: publishing in one commit instead")
        self._bring_whole(self.address.revision, publication)
        self.client.set_pull_status(self.pull, "closed")

    def _bring_whole(self, revision: str, publication: Publication) -> Snapshot:
        message = self.options.commit_message or "Publish with brim"
        return self._commits.bring(revision, self._whole(publication), message, self.options.description)

    def _whole(self, publication: Publication) -> OperationsAt:
        """Everything that differs from what shall be."""

        def operations_at(at: Snapshot) -> list[Any]:
            # The prose is the target's: it may have been edited since the pull request was opened.
            base = at if at.revision == self.address.revision else self.client.snapshot(self.address.revision)
            self._still(base, publication)
            wanted = {CARD: self._card(base, publication.card), **publication.manifests}
            gone = [hub_private.deletion(name) for name in self._gone(publication) if name in at.tree]
            return [*pointers(at, publication.pieces), *gone, *texts(at, wanted)]

        return operations_at

    def _still(self, base: Snapshot, publication: Publication) -> None:
        """Moved if readers have something else than what this comes behind, or than this."""
        if publication.builds_on is None:
            return
        there = set(_shards(base, self.options))
        for pieces in (publication.builds_on, publication.pieces):
            if there == {piece.name for piece in pieces} and all(map(base.holds, pieces)):
                return
        if self.pull:
            self.client.set_pull_status(self.pull, "closed")
        raise Moved

    def _gone(self, publication: Publication) -> list[str]:
        """Shards that are no longer part, and what was said of splits that are not; never another file."""
        shards = [name for name in publication.gone if name.startswith(f"{self.options.folder}/")]
        about = f"{MANIFESTS}/{self.options.config}/" if self.options.split is None else None
        stale = [n for n in self._base.tree if about and n.startswith(about) and n not in publication.manifests]
        return sorted([*shards, *stale])

    def _card(self, at: Snapshot, maker: CardMaker) -> bytes:
        existing = self.client.read(CARD, at)
        try:
            sizes = {name: entry.st_size for name, entry in at.tree.items()}
            return maker(None if existing is None else existing.decode(), sizes).encode()
        except UnicodeDecodeError as error:
            raise DestinationError(f"The {CARD} on the Hub is not UTF-8.", hint="Mend it there.") from error

    def _proved(self, publication: Publication, revision: str) -> str:
        at = self.client.snapshot(revision)
        wrong = [piece.name for piece in publication.pieces if not at.holds(piece)]
        wrong += [name for name in self._gone(publication) if name in at.tree]
        if wrong:
            raise DestinationUnavailableError(
                f"The Hub does not list {wrong[0]} as it was published ({len(wrong)} such files).",
                hint="Someone else may have changed it meanwhile. Run the same command again.",
            )
        count = len(publication.pieces)
        shards = "the shard" if count == 1 else f"all {count:,} shards"
        return f"the Hub lists {shards} with the right size and SHA-256 ({at.commit[:12]})"

    def close(self) -> None:
        self._open.close()


def published_at(address: Location, options: PublishOptions) -> PublishedThere | None:
    """What is there of a config, without changing anything. None: nothing yet, or nobody may look."""
    client = HubClient(address, options.token)
    if not client.token or client.visibility() is None:
        return None
    try:
        at = client.snapshot(client.beginning().revision)
    except StorageError as error:
        if error.kind != "no_revision":
            raise
        return None  # of a pull request: said when something is published to it
    card = client.read(CARD, at) or b""
    return PublishedThere(_manifests(client, at, options), _shards(at, options), UNFINISHED.encode() in card)


def _manifest_name(config: str, split: str) -> str:
    return f"{MANIFESTS}/{config}/{split}.jsonl"


def _manifests(client: HubClient, at: Snapshot, options: PublishOptions) -> list[bytes]:
    folder, one = f"{MANIFESTS}/{options.config}/", options.split
    names = [name for name in sorted(at.tree) if name.startswith(folder) and name.endswith(".jsonl")]
    wanted = (name for name in names if one is None or name == _manifest_name(options.config, one))
    return [data for data in (client.read(name, at) for name in wanted) if data is not None]


def _shards(at: Snapshot, options: PublishOptions) -> list[str]:
    start = f"{options.folder}/" + ("" if options.split is None else f"{options.split}-")
    return [name for name in sorted(at.tree) if name.startswith(start)]
