"""A folder as destination. A shard appears whole, under its name, on disk for good, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from brim.errors import DestinationError, SinkFailed
from brim.formats.splice import Splice
from brim.sinks.direct import DirectFile
from brim.sizes import format_size

_FULL = {errno.ENOSPC, errno.EDQUOT}
_UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}


class FolderSink:
    """Shards under `root/data/`, the card beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self) -> None:
        """Make the folder and remove what an interrupted run left behind."""
        if self.root.exists() and not self.root.is_dir():
            raise DestinationError(f"{str(self.root)!r} is a file.", hint="Give a folder.")
        with self._failures():
            (self.root / "data").mkdir(parents=True, exist_ok=True)
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
        """Room on the disk, or None where the file system does not say."""
        usage = os.statvfs(self.root)
        return usage.f_bavail * usage.f_frsize if usage.f_blocks else None

    def put(self, name: str, splice: Splice, advance: Callable[[int], None]) -> str:
        """Write a shard and return its SHA-256. `advance` is told of bytes and may raise to drop the shard."""
        target = self.root / name
        temporary = target.with_name(f".{target.name}.tmp")
        with self._failures():
            file = DirectFile(str(temporary))
            try:
                digest = _write_and_hash(file, splice, advance)
                file.sync()
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                file.close()
            self._rename(temporary, target)
        return digest

    def write_text(self, name: str, text: str) -> None:
        target = self.root / name
        temporary = target.with_name(f".{target.name}.tmp")
        with self._failures():
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            self._rename(temporary, target)

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
        with self._failures():
            self._rename(self.root / name, self.root / to)

    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def clear(self, name: str) -> None:
        """Remove a folder of brim's own."""
        shutil.rmtree(self.root / name, ignore_errors=True)

    def _rename(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
        for folder in {source.parent, target.parent}:
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Here the system's errors become brim's."""
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                free = self.free_bytes() if self.root.exists() else None
                left = f" ({format_size(free)} left)" if free is not None else ""
                message = f"The disk of the destination is full{left}; finished shards are kept."
                raise SinkFailed(message, hint="Make room, then run the same command to continue.") from error
            if error.errno in _UNUSABLE:
                raise DestinationError(
                    f"The destination {str(self.root)!r} cannot be written: {error.strerror}.",
                    hint="Choose another folder, or give yourself the right to write there.",
                ) from error
            raise SinkFailed(
                f"Writing to the destination failed: {error.strerror or error}.",
                hint="Run the same command to continue.",
            ) from error


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
