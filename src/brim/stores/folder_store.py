"""A folder as destination. A shard appears whole, under its name, on disk for good, or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from brim.errors import DestinationError
from brim.formats.card import CARD
from brim.formats.card_configs import UNFINISHED
from brim.formats.splice import Splice
from brim.state.atomic_files import failures, free_bytes, rename, write_whole
from brim.state.ledger import Piece
from brim.storage.local import LocalStorage
from brim.storage.location import folder_location
from brim.storage.storage import PutResult
from brim.storage.upload_content import UploadWatcher
from brim.stores.store import Announcement, CardMaker, Publication

_KEEP = ".brim/keep"  # content that lost its name and will get another, by SHA-256


class FolderStore:
    """Shards under `root/data/`, the card beside it.

    `mine` names the shards of a run that shares the folder with others: what is unfinished of those stays.
    """

    staged = False

    def __init__(self, root: Path, mine: frozenset[str] | None = None) -> None:
        self.root, self._mine = root, mine
        self._own = f".{Path(min(mine)).stem}" if mine else ""  # in the name of a card that others write too
        self._storage = LocalStorage(folder_location(root))

    def open(self, fingerprint: str) -> None:
        """Remove what an interrupted run left behind. Only for whoever holds the lock."""
        if self._mine is None:
            for left in (self.root / "data").glob(".*.tmp"):
                left.unlink()
            return
        (self.root / f".{CARD}{self._own}.tmp").unlink(missing_ok=True)
        for left in (self.root / "data").glob(".*.tmp"):
            if f"data/{left.name[1:].rsplit('.', 2)[0]}" in self._mine:
                left.unlink(missing_ok=True)

    def shards(self) -> Iterator[str]:
        for entry in sorted(os.listdir(self.root / "data")):
            if not entry.startswith("."):
                yield f"data/{entry}"

    def begun(self) -> bool:
        try:
            return UNFINISHED.encode() in (self.root / CARD).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return False

    def holds(self, piece: Piece) -> bool:
        """By its size: content is `brim verify`'s to prove."""
        return self._size(piece.name) == piece.size

    def holds_aside(self, piece: Piece) -> bool:
        return self._size(f"{_KEEP}/{piece.sha256}") == piece.size

    def set_aside(self, piece: Piece) -> None:
        with failures(self.root):
            rename(self.root / piece.name, self.root / _KEEP / piece.sha256)

    def bring_back(self, piece: Piece, name: str) -> str:
        with failures(self.root):
            rename(self.root / _KEEP / piece.sha256, self.root / name)
        return ""

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)
        shutil.rmtree(self.root / _KEEP, ignore_errors=True)

    def _size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def free_bytes(self) -> int | None:
        return free_bytes(self.root)

    def check_card(self, maker: CardMaker) -> None:
        with failures(self.root):
            maker(self._read_card(), {})

    def begin(self, job: Announcement) -> None:
        self._write_card(job.unfinished_card)

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        return self._storage.put(name, splice, sha256, watcher)

    def carrier(self) -> LocalStorage:
        """What an interrupted run leaves of the marker goes like everything temporary."""
        if not self._storage.marker:
            self._storage.marker = f"data/.{uuid.uuid4().hex}.tmp"
            with failures(self.root):
                (self.root / self._storage.marker).touch()
        return self._storage

    def checkpoint(self, pieces: Sequence[Piece], oldest: float) -> None:
        """What is on disk lasts."""

    def publish(self, publication: Publication) -> str:
        self.discard(sorted(publication.gone))
        if self._storage.marker:  # with it goes what machines that were lost have left
            for left in (self.root / "data").glob(".*.tmp"):
                left.unlink(missing_ok=True)
        self._write_card(publication.card)
        return ""

    def _write_card(self, maker: CardMaker) -> None:
        with failures(self.root):
            write_whole(self.root / CARD, maker(self._read_card(), {}).encode(), self._own)

    def _read_card(self) -> str | None:
        try:
            return (self.root / CARD).read_bytes().decode()
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise DestinationError(
                f"The {CARD} at the destination cannot be read: {error}.",
                hint="Correct it; or move it away and run again, which writes a new one.",
            ) from error

    def close(self) -> None:
        """Nothing is held open."""


def make_folder(root: Path) -> None:
    """A folder for shards."""
    if root.exists() and not root.is_dir():
        raise DestinationError(f"{str(root)!r} is a file.", hint="Give a folder.")
    with failures(root):
        (root / "data").mkdir(parents=True, exist_ok=True)
