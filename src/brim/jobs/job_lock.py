"""Lock the destination of a job: its folders, the claim of its state folder, the lock. A refused job leaves nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from brim.errors import DestinationError, DestinationUnavailableError, InputError, MemoryLimitError
from brim.jobs.destination_paths import DestinationPaths
from brim.progress import Progress
from brim.state.atomic_files import failures, write_whole
from brim.state.ledger import LEDGER, STATE, Ledger
from brim.state.lock import locked, wait_for_lock
from brim.state.stop import Stop
from brim.storage.destination_address import CLAIM, UNITS, identity, make_state_folder
from brim.storage.location import Location


@contextmanager
def lock_destination(
    paths: DestinationPaths, progress: Progress, *, claims: bool, fresh: bool, stop: Stop | None
) -> Iterator[None]:
    """Make the folders of a job and lock them for this run. `claims`: the user chose the state folder."""
    claim = _new_claim(paths, fresh) if claims else ""
    created = CreatedFolders(paths)
    is_noted = False

    def on_wait() -> None:
        nonlocal is_noted
        if not is_noted:
            progress.note("another process computes the same: waiting for it")
        is_noted = True
        if stop is not None:
            stop.check()

    try:
        make_folders(paths)
    except DestinationError:
        created.remove_empty()
        raise
    lock = (
        wait_for_lock(paths.state_dir, lambda: make_folders(paths), on_wait)
        if paths.waits_for_lock
        else locked(paths.state_dir)
    )
    with lock, created.removed_if_refused():
        if claim:
            with failures(paths.state_dir):
                write_whole(paths.state_dir / CLAIM, claim.encode())
        yield


@contextmanager
def share_destination(location: Location) -> Iterator[None]:
    """Share the lock of a destination with other parts of the same plan, which upload to it at the same time."""
    if not location.is_local:
        yield
        return
    make_shard_folder(location.path)
    make_state_folder(location, location.path / STATE)
    with locked(location.path / STATE, shared=True):
        yield


def make_folders(paths: DestinationPaths) -> None:
    """Make the folders that are needed before the first byte."""
    if paths.is_cache:
        from brim.jobs.cache_entries import open_cache, sweep_caches

        sweep_caches(paths.location.path)
        open_cache(paths.location.path, paths.state_dir.name, dict(paths.about), adopts=paths.adopts)
    elif paths.file_names:
        with failures(paths.error_path):
            paths.state_dir.mkdir(parents=True, exist_ok=True)
    else:
        if paths.location.is_local:
            make_shard_folder(paths.location.path)
        make_state_folder(paths.location, paths.state_dir)


def make_shard_folder(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise DestinationError(f"{str(root)!r} is a file.", hint="Name a folder.")
    with failures(root):
        (root / "data").mkdir(parents=True, exist_ok=True)


def _new_claim(paths: DestinationPaths, fresh: bool) -> str:
    """Return the claim to write into a state folder that the user chose, or "" if it exists already.

    Raises InputError if the folder belongs to an unfinished job for another destination.
    """
    path, claim = paths.state_dir / CLAIM, f"{identity(paths.location)}\n{paths.location}"
    try:
        existing = path.read_text()
    except OSError:
        existing = ""
    if not existing or existing == claim or fresh:
        return claim if existing != claim else ""
    ledger = Ledger(paths.ledger_dir)
    if Ledger(paths.units_dir).job is not None or (ledger.job is not None and not ledger.is_finished):
        raise InputError(
            f"The state folder {str(paths.state_dir)!r} belongs to an unfinished job for "
            f"{existing.splitlines()[-1]!r}, and this one is for {str(paths.location)!r}.",
            hint="Finish that job first, or give another --state-dir; --fresh forgets its finished work.",
        )
    return claim


class CreatedFolders:
    """The folders and files that do not exist before a job, to be removed if it is refused. Existing ones stay."""

    def __init__(self, paths: DestinationPaths) -> None:
        state = paths.state_dir
        folders = [state, *state.parents]
        if paths.has_card and paths.location.is_local:
            path = paths.location.path
            folders += [path / "data", path / STATE, path, *path.parents]
        self._state = state
        self._folders = [folder for folder in dict.fromkeys(folders) if not folder.exists()]
        self._state_folders = [folder for folder in (state, state / UNITS) if not folder.exists()]
        self._files = [state / name for name in ("lock", LEDGER, CLAIM) if not (state / name).exists()]

    def remove_empty(self) -> None:
        for folder in sorted(self._folders, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):  # it contains files of another program
                folder.rmdir()

    @contextmanager
    def removed_if_refused(self) -> Iterator[None]:
        """Remove them if the job is refused or does not fit before anything was done. The caller holds the lock."""
        try:
            yield
        except (InputError, MemoryLimitError, DestinationUnavailableError):
            if Ledger(self._state).job is None and not Ledger(self._state / UNITS).receipts:
                for folder in self._state_folders:
                    shutil.rmtree(folder, ignore_errors=True)
                for file in self._files:
                    file.unlink(missing_ok=True)
            self.remove_empty()
            raise
