"""A folder as destination. A shard appears whole, under its name, on disk for good, or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from brim.durable import failures, free_bytes, rename, write_whole
from brim.errors import DestinationError
from brim.formats.splice import Splice
from brim.sinks.direct import DirectFile


class FolderSink:
    """Shards under `root/data/`, the card beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> None:
        """Make the folder."""
        if self.root.exists() and not self.root.is_dir():
            raise DestinationError(f"{str(self.root)!r} is a file.", hint="Give a folder.")
        with failures(self.root):
            (self.root / "data").mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Remove what an interrupted run left behind. Only for whoever holds the lock."""
        for left in (self.root / "data").glob(".*.tmp"):
            left.unlink()

    def shards(self) -> Iterator[str]:
        """The names of all files where shards belong."""
        for entry in sorted(os.listdir(self.root / "data")):
            if not entry.startswith("."):
                yield f"data/{entry}"

    def size(self, name: str) -> int | None:
        """The size of a file at the destination, or None if it is not there."""
        try:
            return (self.root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def free_bytes(self) -> int | None:
        return free_bytes(self.root)

    def put(self, name: str, splice: Splice, advance: Callable[[int], None]) -> str:
        """Write a shard and return its SHA-256. `advance` is told of bytes and may raise to drop the shard."""
        target = self.root / name
        temporary = target.with_name(f".{target.name}.tmp")
        with failures(self.root):
            file = DirectFile(str(temporary))
            try:
                digest = _write_and_hash(file, splice, advance)
                file.sync()
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                file.close()
            rename(temporary, target)
        return digest

    def write_text(self, name: str, text: str) -> None:
        with failures(self.root):
            write_whole(self.root / name, text.encode())

    def read_text(self, name: str) -> str | None:
        try:
            return (self.root / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise DestinationError(
                f"The {name} at the destination cannot be read: {error}.", hint="Mend or move it."
            ) from error

    def move(self, name: str, to: str) -> None:
        with failures(self.root):
            rename(self.root / name, self.root / to)

    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def clear(self, name: str) -> None:
        """Remove a folder of brim's own."""
        shutil.rmtree(self.root / name, ignore_errors=True)


def _write_and_hash(file: DirectFile, splice: Splice, advance: Callable[[int], None]) -> str:
    """One pass over the bytes: each chunk is read once, then hashed and written at the same time."""
    digest = hashlib.sha256()
    written = 0
    with ThreadPoolExecutor(1, "hash") as hasher:
        for chunk in splice.chunks():
            hashing = hasher.submit(digest.update, chunk)
            file.write(chunk)
            hashing.result()
            written += len(chunk)
            advance(len(chunk))
    if written != splice.size:
        raise ValueError(f"a splice of {splice.size} bytes gave {written}")
    return digest.hexdigest()
