"""One run at a time at one destination, or several that share it. A lock dies with its process, however that ends."""

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

_WAIT_S = 0.1


def lock_file(
    descriptor: int,
    *,
    busy: str,
    elsewhere: str,
    what: str = "the destination",
    hint: str = "Wait for it to end, or stop it.",
    shared: bool = False,
) -> None:
    """Lock an open file until it is closed. `elsewhere` is what to do where files cannot be locked."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DestinationError(busy, hint=hint) from error
    except OSError as error:
        raise DestinationError(
            f"The file system of {what} cannot lock files: {reason(error)}.", hint=elsewhere
        ) from error


@contextmanager
def locked(
    folder: Path, *, shared: bool = False, busy: str = "Another brim is building at this destination."
) -> Iterator[None]:
    """Hold the folder's lock; `shared`, with others that share it. `busy` says what it means that somebody has it."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise DestinationError(
            f"The lock {str(folder / 'lock')!r} cannot be opened: {reason(error)}.",
            hint="Make that possible, or keep the ledger in another folder with --state-dir DIR.",
        ) from error
    try:
        lock_file(
            descriptor,
            shared=shared,
            busy=busy,
            what=f"the ledger, {str(folder)!r},",
            elsewhere="Keep the ledger on another disk with --state-dir=DIR.",
        )
        yield
    finally:
        _unlock(descriptor)


@contextmanager
def lock_in_turn(folder: Path, make: Callable[[], None], waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the folder's lock, however long others have it. `make` makes the folder, `waiting` is called all the while.

    Who has it may die, and one of those that wait has it then; or may take the folder away, which is made again.
    """
    while True:
        if not folder.is_dir():
            make()
        try:
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            continue
        try:
            if not _taken(descriptor, folder / "lock"):
                waiting()
                time.sleep(_WAIT_S)
                continue
            yield
            return
        finally:
            _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    """A process that was forked meanwhile has the descriptor too, and would keep the lock that closing gives back."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _taken(descriptor: int, path: Path) -> bool:
    """Whether the lock is ours, and still that of its folder."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def owner_of(folder: Path) -> str:
    """What tells the runs that keep their books in this folder from all others: random, and kept there."""
    path = folder / "owner"
    try:
        return path.read_text()
    except FileNotFoundError:
        write_whole(path, secrets.token_hex(16).encode())
        return path.read_text()
