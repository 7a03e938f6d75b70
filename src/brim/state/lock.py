"""Locks of folders: one run at a destination, or several that share it. The system releases them with the process."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from brim.errors import DestinationError
from brim.state.atomic_files import reason, write_whole

_POLL_S = 0.1


def lock_file(
    descriptor: int,
    *,
    busy: str,
    elsewhere: str,
    subject: str = "the destination",
    hint: str = "Wait for it to end, or stop it.",
    shared: bool = False,
) -> None:
    """Lock an open file until it is closed. `elsewhere` is the hint for a file system without locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DestinationError(busy, hint=hint) from error
    except OSError as error:
        raise DestinationError(
            f"The file system of {subject} cannot lock files: {reason(error)}.", hint=elsewhere
        ) from error


@contextmanager
def locked(
    folder: Path, *, shared: bool = False, busy: str = "Another brim is building at this destination."
) -> Iterator[None]:
    """Hold the lock of a folder, or share it. `busy` is the error if another process has it."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DestinationError(
            f"The lock {str(folder / 'lock')!r} cannot be opened: {reason(error)}.",
            hint="Fix the cause, or keep the ledger in another folder with --state-dir DIR.",
        ) from error
    try:
        lock_file(
            descriptor,
            shared=shared,
            busy=busy,
            subject=f"the ledger, {str(folder)!r},",
            elsewhere="Keep the ledger on another disk with --state-dir=DIR.",
        )
        yield
    finally:
        _unlock(descriptor)


@contextmanager
def wait_for_lock(folder: Path, make: Callable[[], None], on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a folder, however long other processes have it.

    `make` creates the folder, again if another process removes it. `on_wait` is called at every poll.
    """
    while True:
        if not folder.is_dir():
            make()
        try:
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue
        try:
            if not _try_lock(descriptor, folder / "lock"):
                on_wait()
                time.sleep(_POLL_S)
                continue
            yield
            return
        finally:
            _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    """Release the lock, then close: if a forked process shares the descriptor, closing alone would not release it."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    """Return whether the file was locked, and is still the lock file of its folder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def owner_of(folder: Path) -> str:
    """Return the id of the runs with this state folder, as used in leases: random, and stored in the folder."""
    path = folder / "owner"
    try:
        return path.read_text()
    except FileNotFoundError:
        write_whole(path, secrets.token_hex(16).encode())
        return path.read_text()
