"""One run at a time at one destination. The lock dies with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from brim.errors import DestinationError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DestinationError(
                "Another brim is building at this destination.", hint="Wait for it to end, or stop it."
            ) from error
        except OSError as error:
            raise DestinationError(
                f"The file system of the ledger cannot lock files: {error.strerror}.",
                hint="Keep the ledger on another disk with --state DIR.",
            ) from error
        yield
    finally:
        os.close(descriptor)
