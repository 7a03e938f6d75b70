"""A result that is one file: its vectors, its books, and what lies beside it; and the store of single files.

There is no card and no folder of shards. What has a file's name before is replaced when the new one is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from brim.compute.outputs.vector_output import check_target, quarantine_path, rows_path
from brim.errors import DestinationError
from brim.formats.splice import FileSplice, Splice
from brim.jobs.spec import WriteBadRows, write_aside
from brim.records import dataclass
from brim.state.atomic_files import failures, free_bytes, rename
from brim.state.ledger import Ledger, Piece
from brim.storage.explain_error import explained
from brim.storage.listing import stat_file, stat_files
from brim.storage.location import Access, Location, folder_location
from brim.storage.storage import PutResult, Storage, open_storage
from brim.storage.upload_content import UploadWatcher
from brim.stores.destination import UNITS, Footprints, parse_destination, state_folder
from brim.stores.store import Announcement, CardMaker, Publication


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file, with others beside it whose names begin with its own.

    The books lie beside it too, in a hidden folder on the same disk: `.NAME.brim`. When the job is done, a small ledger
    stays there, so that the same command knows that there is nothing to do. For a file in a bucket they lie with the
    user's state; the file is made there, sent, and removed.
    """

    destination: Location
    state: Path
    waits: bool = False
    apart = True

    @property
    def name(self) -> str:
        return self.destination.path.name

    @property
    def place(self) -> Location:
        return self.destination.parent

    @property
    def books(self) -> Path:
        return self.state

    @property
    def units(self) -> Path:
        return self.state / UNITS

    @property
    def failing(self) -> Path:
        return self.place.path if self.destination.is_local else self.state

    @property
    def _hidden(self) -> Path:
        """Beside the file, on its disk: it gets its name by a rename, so not on the disk that --state-dir may be on."""
        return hidden_books(self.destination.path) if self.destination.is_local else self.state

    @property
    def taken(self) -> list[Location]:
        names = [self.name, rows_path(Path(self.name)).name, quarantine_path(Path(self.name)).name]
        there = [self.place.child(name) for name in names]
        return [*there, folder_location(self._hidden)] if self.destination.is_local else there

    def footprints(self) -> Footprints:
        return Footprints(None, self.state)

    def make(self) -> None:
        with failures(self.failing):
            self.state.mkdir(parents=True, exist_ok=True)

    def work(self, fingerprint: str, fresh: bool) -> Path:
        """Half a file of another job is not gone on with."""
        work = self._hidden / "work" / fingerprint[:16]
        if fresh or not work.exists():
            shutil.rmtree(work.parent, ignore_errors=True)
        return work

    def store(self) -> FileStore | ObjectFileStore:
        names = [self.name, rows_path(Path(self.name)).name]
        return FileStore(self.place.path, names) if self.place.is_local else ObjectFileStore(self.place, names)

    def holds(self, ledger: Ledger) -> bool:
        store = self.store()
        return bool(ledger.receipts) and all(store.holds(receipt.piece) for receipt in ledger.receipts.values())

    def refuse_strangers(self, ledger: Ledger, fresh: bool) -> None:
        if ledger.job is None and not fresh and (found := self.store().shards()):
            raise DestinationError(
                f"{self.place.child(found[0])} already exists, and brim did not write it.",
                hint="Use --fresh to replace it when the job is done.",
            )

    def keep_bad_rows(self, write: WriteBadRows, fresh: bool, watcher: UploadWatcher) -> Path | str | None:
        name = quarantine_path(Path(self.name)).name
        made = self._hidden / "work" / name
        if self.place.is_local:
            target = self.place.path / name
            return target if write_aside(write, made, target, fresh) else None
        if write(made):
            with FileSplice(made) as splice:
                ObjectFileStore(self.place, ()).put(name, splice, None, watcher)
            return str(self.place.child(name))
        if fresh:
            with explained(self.place):
                open_storage(self.place).delete([name])
        return None

    def clear(self) -> None:
        for left in (self.units, self._hidden / "work", self.state / "made"):  # the last is of version 0.1.0, killed
            shutil.rmtree(left, ignore_errors=True)
        if self.state != self._hidden:
            with suppress(OSError):
                self._hidden.rmdir()  # the books are elsewhere


def file_layout(
    destination: str | os.PathLike[str], state: str | os.PathLike[str] | None, access: Access
) -> FileLayout:
    """A file to be made; its ending chooses the format."""
    where = parse_destination(destination, access)
    if where.is_repository:
        raise DestinationError(f"{str(where)!r} is a repository, not a file.", hint="Name a file.")
    books = hidden_books(where.path) if where.is_local and not state else state_folder(where, state)
    layout = FileLayout(where, books)
    check_target(Path(layout.name))
    if where.is_local and where.path.is_dir():
        raise DestinationError(f"{os.fspath(destination)!r} is a folder.", hint="Name a file.")
    return layout


def hidden_books(target: Path) -> Path:
    return target.with_name(f".{target.name}.brim")


class _Files:
    """What single files need not do of all that a store does."""

    staged = False

    def open(self, fingerprint: str) -> None:
        """Nothing has to be there."""

    def begun(self) -> bool:
        """They have no card; whoever makes them has looked for others'."""
        return True

    def holds_aside(self, piece: Piece) -> bool:
        return False

    def set_aside(self, piece: Piece) -> None:
        """A file that loses its name is made again."""

    def bring_back(self, piece: Piece, name: str) -> str:
        raise AssertionError("nothing is set aside")

    def discard(self, names: Iterable[str]) -> None:
        """They stay until the new ones are there."""

    def check_card(self, maker: CardMaker) -> None:
        """They have no card."""

    def begin(self, job: Announcement) -> None:
        """Nobody is told."""

    def checkpoint(self, pieces: Sequence[Piece], oldest: float) -> None:
        """What is there lasts."""

    def close(self) -> None:
        """Nothing is held open."""


class FileStore(_Files):
    """Files in a folder of this machine. `names` are those that would be in the way if brim did not write them."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self._names = folder, names

    def shards(self) -> list[str]:
        return [name for name in self._names if (self.folder / name).exists()]

    def holds(self, piece: Piece) -> bool:
        try:
            return (self.folder / piece.name).stat().st_size == piece.size
        except (FileNotFoundError, NotADirectoryError):
            return False

    def free_bytes(self) -> int | None:
        return free_bytes(self.folder)

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        """Give a file of the same disk its name. It keeps its own too where it can: a killed run finds it again."""
        assert splice.path is not None
        assert sha256 is not None
        second = splice.path.with_name(f".{splice.path.name}.tmp")
        with failures(self.folder):
            second.unlink(missing_ok=True)
            try:
                os.link(splice.path, second)
            except OSError:  # a file system without links
                second = splice.path
            rename(second, self.folder / name)
            if second != splice.path:
                second.unlink(missing_ok=True)  # two names of one file: then the system leaves both as they are
        watcher.sent(splice.size)
        return PutResult(sha256)

    def carrier(self) -> Storage:
        return open_storage(folder_location(self.folder))

    def publish(self, publication: Publication) -> str:
        for name in sorted(publication.gone):
            (self.folder / name).unlink(missing_ok=True)
        return ""


class ObjectFileStore(_Files):
    """Files in a place of a bucket."""

    def __init__(self, folder: Location, names: Sequence[str]) -> None:
        self.folder, self._names = folder, names

    def shards(self) -> list[str]:
        infos = stat_files(self.folder, self._names, "write")
        return [name for name, info in zip(self._names, infos, strict=True) if info is not None]

    def holds(self, piece: Piece) -> bool:
        there = stat_file(self.folder, piece.name, "write")
        return there is not None and there.st_size == piece.size and piece.etag in ("", there.etag)

    def free_bytes(self) -> int | None:
        return None

    def put(self, name: str, splice: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        storage = self.carrier()
        storage.drop_upload(name)  # what a killed run began to send
        return storage.put(name, splice, sha256, watcher)

    def carrier(self) -> Storage:
        return open_storage(self.folder)

    def publish(self, publication: Publication) -> str:
        with explained(self.folder):
            open_storage(self.folder).delete(sorted(publication.gone))
        return ""
