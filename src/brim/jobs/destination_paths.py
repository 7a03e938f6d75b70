"""Where a job writes, as data: its destination, its state, its units, and everything that it replaces."""

from __future__ import annotations

import os
from pathlib import Path

from brim.errors import DestinationError
from brim.formats.card import CARD
from brim.jobs.publish_options import PublishOptions
from brim.records import dataclass
from brim.state.ledger import STATE
from brim.storage.destination_address import QUARANTINE, UNITS, parse_destination, state_folder
from brim.storage.location import Access, Location, folder_location


@dataclass(frozen=True, slots=True)
class DestinationPaths:
    """The locations and folders of one job.

    A dataset has shards and a card in `location`. Single files (`file_names` is not empty) are next to each other in
    `root`, each with data of every row, and have no card. The files of a cache are computed in `units_dir` and stay.
    """

    location: Location  # as the user named it
    root: Location  # names of receipts are relative to it
    state_dir: Path  # with the lock and the stop file
    ledger_dir: Path
    units_dir: Path  # unit files and their receipts
    work_dir: Path  # results are made of units here, on the disk of a local destination
    error_path: Path  # named in errors of the operating system
    output_paths: tuple[Location, ...]  # everything that the job writes or replaces
    bad_rows: Path  # the file of skipped rows; of single files it is moved to the destination
    shard_folder: str = "data"
    file_names: tuple[str, ...] = ()
    waits_for_lock: bool = False  # a second run waits, and uses what the first one has made
    is_cache: bool = False
    about: tuple[tuple[str, str], ...] = ()  # of a cache, for `brim clean`
    adopts: bool = False  # an unfinished cache whose name begins alike becomes this one

    @property
    def has_card(self) -> bool:
        return not self.file_names and not self.is_cache


def dataset_paths(
    location: Location, state: str | os.PathLike[str] | None, hub: PublishOptions, *, waits_for_lock: bool = False
) -> DestinationPaths:
    """Return the paths of a dataset. Each config and split of a repository has its own ledger."""
    state_dir = state_folder(location, state, f"{hub.config}/{hub.split or '*'}")
    outputs = () if location.is_repository else (hub.folder, CARD, QUARANTINE, STATE)
    error_path = location.path if location.is_local else state_dir
    return DestinationPaths(
        location=location,
        root=location,
        state_dir=state_dir,
        ledger_dir=state_dir,
        units_dir=state_dir / UNITS,
        work_dir=state_dir / UNITS / "made",
        error_path=error_path,
        output_paths=tuple(location.child(name) for name in outputs),
        bad_rows=error_path / QUARANTINE,
        shard_folder=hub.folder,
        waits_for_lock=waits_for_lock,
    )


def file_paths(
    destination: str | os.PathLike[str],
    state: str | os.PathLike[str] | None,
    access: Access,
    *,
    waits_for_lock: bool = False,
) -> DestinationPaths:
    """Return the paths of a file of vectors; its suffix decides the format.

    Its state is next to it, in a hidden folder on the same disk. After the job a small ledger stays there, so that the
    same command knows that there is nothing to do. That of a file in a bucket is in the user's state.
    """
    from brim.compute.outputs.vector_output import check_target, quarantine_path, rows_path

    location = parse_destination(destination, access)
    if location.is_repository:
        raise DestinationError(f"{str(location)!r} is a repository, not a file.", hint="Name a file.")
    path = location.path  # of an object, only its name counts
    check_target(Path(path.name))
    if location.is_local and path.is_dir():
        raise DestinationError(f"{os.fspath(destination)!r} is a folder.", hint="Name a file.")
    hidden = path.with_name(f".{path.name}.brim")
    state_dir = hidden if location.is_local and not state else state_folder(location, state)
    work_dir = (hidden if location.is_local else state_dir) / "work"  # files get their names by a rename
    names = (path.name, rows_path(Path(path.name)).name)
    bad_rows = quarantine_path(Path(path.name)).name
    outputs = [location.parent.child(name) for name in (*names, bad_rows)]
    return DestinationPaths(
        location=location,
        root=location.parent,
        state_dir=state_dir,
        ledger_dir=state_dir,
        units_dir=state_dir / UNITS,
        work_dir=work_dir,
        error_path=path.parent if location.is_local else state_dir,
        output_paths=(*outputs, folder_location(hidden)) if location.is_local else tuple(outputs),
        bad_rows=work_dir / bad_rows,
        shard_folder="",
        file_names=names,
        waits_for_lock=waits_for_lock,
    )


def cache_paths(home: Path, name: str, about: dict[str, str], *, adopts: bool = False) -> DestinationPaths:
    """Return the paths of a cache entry, whose unit files are the result."""
    folder = home / name
    units = folder / UNITS
    return DestinationPaths(
        location=folder_location(home),
        root=folder_location(units),
        state_dir=folder,
        ledger_dir=units,
        units_dir=units,
        work_dir=units / "made",
        error_path=folder,
        output_paths=(folder_location(folder),),
        bad_rows=units,
        waits_for_lock=True,
        is_cache=True,
        about=tuple(about.items()),
        adopts=adopts,
    )
