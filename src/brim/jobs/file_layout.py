"""A result that is one file: its vectors, its books, and what lies beside it."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from brim.buckets.bucket_address import Access, BucketAddress
from brim.buckets.bucket_client import explained
from brim.buckets.send_object import delete_objects
from brim.errors import DestinationError
from brim.formats.splice import FileSplice
from brim.jobs.spec import WriteBadRows, write_aside
from brim.outputs.vector_output import check_target, quarantine_path, rows_path
from brim.records import dataclass
from brim.state.durable import failures
from brim.state.ledger import Ledger
from brim.stores.destination import UNITS, Destination, Footprints, parse_destination, state_folder
from brim.stores.file_store import FileStore, ObjectFileStore
from brim.stores.store import PutWatcher


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file, with others beside it whose names begin with its own.

    The books lie beside it too, in a hidden folder on the same disk: `.NAME.brim`. When the job is done, a small ledger
    stays there, so that the same command knows that there is nothing to do. For a file in a bucket they lie with the
    user's state; the file is made there, sent, and removed.
    """

    destination: Path | BucketAddress
    state: Path
    waits: bool = False
    apart = True

    @property
    def name(self) -> str:
        return self.destination.name if isinstance(self.destination, Path) else Path(self.destination.prefix).name

    @property
    def place(self) -> Path | BucketAddress:
        if isinstance(self.destination, Path):
            return self.destination.parent
        return replace(self.destination, prefix=self.destination.prefix.rpartition("/")[0])

    @property
    def books(self) -> Path:
        return self.state

    @property
    def units(self) -> Path:
        return self.state / UNITS

    @property
    def failing(self) -> Path:
        return self.destination.parent if isinstance(self.destination, Path) else self.state

    @property
    def _hidden(self) -> Path:
        """Beside the file, on its disk: it gets its name by a rename, so not on the disk that --state may be on."""
        return hidden_books(self.destination) if isinstance(self.destination, Path) else self.state

    @property
    def taken(self) -> list[Destination]:
        names = [self.name, rows_path(Path(self.name)).name, quarantine_path(Path(self.name)).name]
        there: list[Destination] = [_below(self.place, name) for name in names]
        return [*there, self._hidden] if isinstance(self.destination, Path) else there

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
        return FileStore(self.place, names) if isinstance(self.place, Path) else ObjectFileStore(self.place, names)

    def holds(self, ledger: Ledger) -> bool:
        store = self.store()
        return bool(ledger.receipts) and all(store.holds(receipt.piece) for receipt in ledger.receipts.values())

    def refuse_strangers(self, ledger: Ledger, fresh: bool) -> None:
        if ledger.job is None and not fresh and (found := self.store().shards()):
            raise DestinationError(
                f"{_below(self.place, found[0])} exists, and brim did not write it.",
                hint="--fresh replaces it at the end.",
            )

    def keep_bad_rows(self, write: WriteBadRows, fresh: bool, watcher: PutWatcher) -> Path | str | None:
        name = quarantine_path(Path(self.name)).name
        made = self._hidden / "work" / name
        if isinstance(self.place, Path):
            return self.place / name if write_aside(write, made, self.place / name, fresh) else None
        if write(made):
            with FileSplice(made) as splice:
                ObjectFileStore(self.place, ()).put(name, splice, None, watcher)
            return str(self.place.below(name))
        if fresh:
            with explained(self.place):
                delete_objects(self.place, [self.place.key(name)])
        return None

    def clear(self) -> None:
        for left in (self.units, self._hidden / "work", self.state / "made"):  # the last is of version 0.1.0, killed
            shutil.rmtree(left, ignore_errors=True)
        if self.state != self._hidden:
            with suppress(OSError):
                self._hidden.rmdir()  # the books are elsewhere


def file_layout(destination: str | os.PathLike[str], state: str | None, access: Access) -> FileLayout:
    """A file to be made; its ending chooses the format."""
    where = parse_destination(destination, access)
    if isinstance(where, BucketAddress):
        layout = FileLayout(where, state_folder(where, state))
    elif isinstance(where, Path):
        layout = FileLayout(where, state_folder(where, state) if state else hidden_books(where))
    else:
        raise DestinationError(f"{str(where)!r} is a repository, and no file.", hint="Give the name of a file.")
    check_target(Path(layout.name))
    if isinstance(where, Path) and where.is_dir():
        raise DestinationError(f"{os.fspath(destination)!r} is a folder.", hint="Give the name of a file.")
    return layout


def hidden_books(target: Path) -> Path:
    return target.with_name(f".{target.name}.brim")


def _below(place: Path | BucketAddress, name: str) -> Path | BucketAddress:
    return place / name if isinstance(place, Path) else place.below(name)
