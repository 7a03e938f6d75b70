"""Open log files: plain, gzip, xz or bzip2."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

# Errors of a decompressor for a file that was cut or is damaged.
UNREADABLE = (OSError, EOFError, lzma.LZMAError, ValueError, zlib.error)

_DECOMPRESSORS: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"\xfd7zXZ\x00": lzma.open, b"BZh": bz2.open}
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


@contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[IO[bytes], bool]]:
    """Open a file, decompressed if its first bytes show a compression, and whether they do. Pipes are unchanged."""
    with open(path, "rb") as raw:
        magic = raw.peek(6)[:6] if raw.seekable() else b""
        if magic.startswith(_ZSTANDARD):
            raise OSError(f"the file is compressed with zstd; decompress it first: zstd -d {path}")
        decompress = next((opener for mark, opener in _DECOMPRESSORS.items() if magic.startswith(mark)), None)
        if decompress is None:
            yield raw, False
            return
        with decompress(raw) as file:
            yield cast("IO[bytes]", file), True
