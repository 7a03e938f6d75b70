"""The storage host: large objects are written to files or only hashed, and every SHA-256 and size is checked.

Memory use does not grow with the size of an object. With keep=False only the SHA-256, the size and, if
`tail_bytes` is set, the last bytes of an object are stored (enough for a Parquet footer). Parts must then arrive
in order, because parts that are not stored can only be hashed in order.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .store import HubError


@dataclass(slots=True)
class Counters:
    """Counters of the server since it was created; they survive a restart."""

    requests: Counter[str] = field(default_factory=Counter)
    puts: int = 0
    """PUTs of objects and of parts that were begun, whatever became of them."""
    bytes_received: int = 0
    bytes_repeated: int = 0
    """Of those, bytes at a place of an object (or xorb) where bytes had been received before."""
    bytes_by_oid: Counter[str] = field(default_factory=Counter)
    bytes_sent: int = 0
    """Of bodies of answers."""
    commits: int = 0
    concurrent_puts: int = 0
    peak_puts: int = 0


class Intake:
    """Counts the bytes of one PUT as they arrive."""

    def __init__(self, objects: Objects, oid: str, part: int) -> None:
        self._objects, self._key, self._at = objects, (oid, part), 0

    def __enter__(self) -> Intake:
        with self._objects.lock:
            counters = self._objects.counters
            counters.puts += 1
            counters.concurrent_puts += 1
            counters.peak_puts = max(counters.peak_puts, counters.concurrent_puts)
        return self

    def __exit__(self, *_: object) -> None:
        with self._objects.lock:
            self._objects.counters.concurrent_puts -= 1

    def count(self, received_bytes: int) -> None:
        with self._objects.lock:
            counters, high = self._objects.counters, self._objects.high_water.get(self._key, 0)
            counters.bytes_received += received_bytes
            counters.bytes_by_oid[self._key[0]] += received_bytes
            counters.bytes_repeated += max(0, min(received_bytes, high - self._at))
            self._at += received_bytes
            self._objects.high_water[self._key] = max(high, self._at)


class Writer:
    """Writes the bytes of one PUT to a separate file or to a part of a shared file, or only hashes them."""

    def __init__(self, file: Path | None, tail_bytes: int, *, offset: int | None = None, state: Writer | None = None):
        self.etag = uuid.uuid4().hex
        self.sha256: hashlib._Hash = state.sha256.copy() if state else hashlib.sha256()
        self.tail: bytes = state.tail if state else b""
        self.size = 0
        self.file = file
        self._shared = offset is not None
        self._offset = offset or 0
        self._tail_bytes = tail_bytes
        self._fd = None if file is None else os.open(file, os.O_RDWR | os.O_CREAT, 0o644)

    def write(self, data: memoryview) -> None:
        if self._fd is None or not self._shared:
            self.sha256.update(data)
        if self._fd is not None:
            os.pwrite(self._fd, data, self._offset + self.size)
        elif self._tail_bytes:
            self.tail = (self.tail + bytes(data[-self._tail_bytes :]))[-self._tail_bytes :]
        self.size += len(data)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def abandon(self) -> None:
        self.close()
        if self.file is not None and not self._shared:
            self.file.unlink(missing_ok=True)


@dataclass(slots=True)
class Multipart:
    oid: str
    size: int
    chunk: int
    file: Path | None
    parts: dict[int, Writer] = field(default_factory=dict)

    def part_size(self, number: int) -> int:
        return min(self.chunk, self.size - (number - 1) * self.chunk)

    @property
    def count(self) -> int:
        return -(-self.size // self.chunk)


class Objects:
    """All large objects by SHA-256, independent of the repository they belong to."""

    def __init__(self, folder: Path, counters: Counters, *, keep: bool, tail_bytes: int) -> None:
        self.folder, self.counters, self.keep, self.tail_bytes = folder, counters, keep, tail_bytes
        self.lock = threading.Lock()
        self.sizes: dict[str, int] = {}
        self.high_water: dict[tuple[str, int], int] = {}
        self.uploads: dict[str, Multipart] = {}
        for name in ("objects", "incoming"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def path(self, oid: str) -> Path:
        return self.folder / "objects" / oid

    def _incoming(self) -> Path | None:
        return self.folder / "incoming" / uuid.uuid4().hex if self.keep else None

    def begin_put(self) -> Writer:
        return Writer(self._incoming(), self.tail_bytes)

    def begin_spool(self) -> Writer:
        """Return a writer to a file even with keep=False, for content that has to be read once."""
        return Writer(self.folder / "incoming" / uuid.uuid4().hex, 0)

    def adopt(self, oid: str, file: Path) -> None:
        self._store(oid, file.stat().st_size, file, b"")

    def finish_put(self, writer: Writer, oid: str, size: int) -> None:
        writer.close()
        if writer.size != size or writer.sha256.hexdigest() != oid:
            writer.abandon()
            raise HubError(400, f"The object has {writer.size} bytes, SHA-256 {writer.sha256.hexdigest()}")
        self._store(oid, size, writer.file, writer.tail)

    def _store(self, oid: str, size: int, file: Path | None, tail: bytes) -> None:
        if file is not None:
            file.replace(self.path(oid))
        elif tail:
            self.path(oid).write_bytes(tail)
        with self.lock:
            self.sizes[oid] = size

    def begin_multipart(self, oid: str, size: int, chunk: int) -> str:
        upload = uuid.uuid4().hex
        self.uploads[upload] = Multipart(oid, size, chunk, self._incoming())
        return upload

    def multipart(self, upload: str) -> Multipart:
        if upload not in self.uploads:
            raise HubError(404, "The specified upload does not exist", "NoSuchUpload")
        return self.uploads[upload]

    def begin_part(self, upload: Multipart, number: int) -> Writer:
        if not 1 <= number <= upload.count:
            raise HubError(400, f"There is no part {number}")
        before = upload.parts.get(number - 1)
        if not self.keep and number > 1 and before is None:
            raise HubError(501, "A server that only hashes needs the parts in order")
        offset = (number - 1) * upload.chunk
        return Writer(upload.file, self.tail_bytes, offset=offset, state=None if self.keep else before)

    def finish_part(self, upload: Multipart, number: int, writer: Writer) -> None:
        writer.close()
        if writer.size != upload.part_size(number):
            raise HubError(400, f"Part {number} has {writer.size} bytes, not {upload.part_size(number)}")
        upload.parts[number] = writer

    def complete(self, upload_id: str, oid: str, etags: dict[int, str]) -> None:
        upload = self.multipart(upload_id)
        got = {number: writer.etag for number, writer in upload.parts.items()}
        if oid != upload.oid or set(got) != set(range(1, upload.count + 1)) or got != etags:
            raise HubError(400, f"Parts {sorted(etags)} do not make up object {oid}")
        if upload.file is None:
            digest = upload.parts[upload.count].sha256.hexdigest()
        else:
            with open(upload.file, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != oid:
            raise HubError(422, f"The parts make up an object with SHA-256 {digest}, not {oid}")
        self._store(oid, upload.size, upload.file, upload.parts[upload.count].tail)
        del self.uploads[upload_id]

    def readable(self, oid: str, start: int) -> tuple[Path, int]:
        """Return the file with an object's bytes from `start` on, and the offset of its first byte in the object."""
        path, size = self.path(oid), self.sizes[oid]
        first = size - path.stat().st_size if path.exists() else size + 1
        if start < first:
            raise HubError(410, "This server did not keep the object's content")
        return path, first

    def forget(self, oid: str) -> None:
        """Delete an object that no commit refers to, as garbage collection does."""
        with self.lock:
            self.sizes.pop(oid, None)
        self.path(oid).unlink(missing_ok=True)
