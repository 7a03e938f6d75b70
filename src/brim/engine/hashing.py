"""The SHA-256 of a file on disk, in a buffer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from brim.formats.splice import BUFFER_BYTES


def sha256_of(path: Path, advance: Callable[[int], None]) -> str:
    """`advance` is told of bytes, and may raise to stop."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            advance(size)
    return digest.hexdigest()
