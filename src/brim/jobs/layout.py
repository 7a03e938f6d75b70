"""What the result of a job is laid out as, and where its books are: here the contract, and the dataset.

The books are a lock, a stop file, a ledger and the units that are done. A layout knows names and places. What is to be
done is the spec's, and how bytes travel is the store's (open_store.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from brim.buckets.bucket_address import Access
from brim.jobs.bring import refuse_strangers
from brim.records import dataclass
from brim.state.durable import rename
from brim.state.ledger import Ledger
from brim.stores.destination import (
    QUARANTINE,
    UNITS,
    Destination,
    Footprints,
    HubOptions,
    make_state,
    parse_destination,
    state_folder,
    taken_by_dataset,
)
from brim.stores.folder_store import FolderStore, make_folder
from brim.stores.store import PutWatcher, Store

WriteBadRows = Callable[[Path], bool]


class Layout(Protocol):
    """A dataset (below), a file (file_layout.py) or a cache (caches.py)."""

    @property
    def destination(self) -> Destination:
        """What the user calls it; a source must be something else."""

    @property
    def place(self) -> Destination:
        """What the names of receipts are relative to."""

    @property
    def state(self) -> Path:
        """The folder with the lock and the stop file."""

    @property
    def books(self) -> Path:
        """The folder of the ledger that says what is done."""

    @property
    def units(self) -> Path:
        """The folder of unit files and their receipts."""

    @property
    def failing(self) -> Path:
        """What an error of the system is about."""

    @property
    def apart(self) -> bool:
        """Whether files stand beside each other, each with all rows, and are brought one by one from this machine."""

    @property
    def waits(self) -> bool:
        """Whether a second run waits for the first, and takes what that has made. Elsewhere it is refused."""

    @property
    def taken(self) -> list[Destination]:
        """All that the job writes or replaces."""

    def footprints(self) -> Footprints:
        """What is there before anything is made."""

    def make(self) -> None:
        """The folders that are needed before the first byte."""

    def work(self, fingerprint: str, fresh: bool) -> Path:
        """Where the result is made of units, on the disk that it gets its names on if that is here."""

    def store(self) -> Store | None:
        """Where results are put if that is no dataset; None: the store of the destination (open_store.py)."""

    def holds(self, ledger: Ledger) -> bool | None:
        """Whether all that the receipts name is there; None: that cannot be seen from here."""

    def refuse_strangers(self, ledger: Ledger, fresh: bool) -> None:
        """DestinationError if something is in the way that brim did not write: before hours of work, not after."""

    def keep_bad_rows(self, write: WriteBadRows, fresh: bool, watcher: PutWatcher) -> Path | str | None:
        """Have the file of rows that were left out written where it belongs, if there are any.

        Before the result is there: then nothing is done again. `fresh`: what is there of an earlier job goes.
        """

    def clear(self) -> None:
        """Take away what a finished job needs no more."""


@dataclass(frozen=True, slots=True)
class DatasetLayout:
    """Shards in a folder (`data`, or as the Hub's config says) with a card beside it."""

    destination: Destination
    state: Path
    folder: str = "data"
    waits: bool = False
    apart = False

    @property
    def place(self) -> Destination:
        return self.destination

    @property
    def books(self) -> Path:
        return self.state

    @property
    def units(self) -> Path:
        return self.state / UNITS

    @property
    def failing(self) -> Path:
        return self.destination if isinstance(self.destination, Path) else self.state

    @property
    def taken(self) -> list[Destination]:
        return taken_by_dataset(self.destination, self.folder)

    def footprints(self) -> Footprints:
        return Footprints(self.destination, self.state)

    def make(self) -> None:
        if isinstance(self.destination, Path):
            make_folder(self.destination)
        make_state(self.destination, self.state)

    def work(self, fingerprint: str, fresh: bool) -> Path:
        return self.units / "made"

    def store(self) -> None:
        """That of its destination."""

    def holds(self, ledger: Ledger) -> bool | None:
        if not isinstance(self.destination, Path):
            return None
        return all(FolderStore(self.destination).holds(receipt.piece) for receipt in ledger.receipts.values())

    def refuse_strangers(self, ledger: Ledger, fresh: bool) -> None:
        if isinstance(self.destination, Path) and ledger.job is None:
            refuse_strangers(list(FolderStore(self.destination).shards()), staged=False)

    def keep_bad_rows(self, write: WriteBadRows, fresh: bool, watcher: PutWatcher) -> Path | None:
        target = self.failing / QUARANTINE
        return target if write_aside(write, target, target, fresh) else None

    def clear(self) -> None:
        shutil.rmtree(self.units, ignore_errors=True)


def dataset_layout(
    destination: str | os.PathLike[str], state: str | None, hub: HubOptions, access: Access
) -> DatasetLayout:
    """A dataset to be made. The ledger of each config and split of a repository is one of its own."""
    return dataset_at(parse_destination(destination, access), state, hub)


def dataset_at(where: Destination, state: str | None, hub: HubOptions) -> DatasetLayout:
    return DatasetLayout(where, state_folder(where, state, f"{hub.config}/{hub.split or '*'}"), hub.folder)


def write_aside(write: WriteBadRows, made: Path, target: Path, fresh: bool) -> bool:
    """Whether there is something to keep; it is made on the target's disk, and then gets its name."""
    made.with_name(f".{made.name}.tmp").unlink(missing_ok=True)  # of a run that was killed
    some = write(made)
    if some and made != target:
        rename(made, target)
    elif not some and fresh:
        target.unlink(missing_ok=True)  # of the rows that were there before
    return some
