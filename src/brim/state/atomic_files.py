"""Writes that last through a power cut, calls that the system does by halves, and its errors about them as brim's.

Records that must survive any crash are lines of JSON, each with a checksum of its own (`record_line`,
`append_line`): a torn or damaged line is as if it had not been written.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from brim.errors import DestinationError, DestinationUnavailableError, InputError, VerificationError
from brim.sizes import format_size

BUFFER_BYTES = 1024 * 1024  # fits the second-level cache: read, hash and write touch memory once


_FULL = {errno.ENOSPC, errno.EDQUOT}
_UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}
_TOO_MANY = {errno.EMFILE, errno.ENFILE}
_MORE_FILES = "raise the limit of open files, as with `ulimit -n 65536`"


_WINDOW_BYTES, _WINDOWS = 8 << 20, 4  # on its way to disk at a time; more of them than that are waited for
_WRITE, _WRITE_AND_WAIT = 2, 1 | 2 | 4  # SYNC_FILE_RANGE_…
_NO_SUCH_CALL = {errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP}


class Outflow:
    """A file that is appended to, on its way to disk while more is written: the sync at its end has little to wait for.

    Nothing lasts by this alone. Dirty pages do not pile up: a disk that is slower than who writes is waited for.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._begun = descriptor, 0

    def wrote(self, size: int) -> None:
        """The file has this size now."""
        while size - self._begun >= _WINDOW_BYTES:
            _sync_range(self._descriptor, self._begun, _WRITE)
            self._begun += _WINDOW_BYTES
            behind = self._begun - (_WINDOWS + 1) * _WINDOW_BYTES
            if behind >= 0:
                _sync_range(self._descriptor, behind, _WRITE_AND_WAIT)

    def end(self) -> None:
        """Nothing more is written: what is left is on its way too."""
        _sync_range(self._descriptor, self._begun, _WRITE)


def _sync_range(descriptor: int, start: int, how: int) -> None:
    call = _sync_file_range()
    if call is not None and call(descriptor, start, _WINDOW_BYTES, how) == 0:
        return
    error = errno.ENOSYS if call is None else ctypes.get_errno()
    if error not in _NO_SUCH_CALL:
        raise OSError(error, os.strerror(error))
    if how != _WRITE:
        os.fsync(descriptor)


@functools.cache
def _sync_file_range() -> Any:
    """The system's, where it has one: Python has no name for it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def sync_file(path: Path) -> os.stat_result:
    """Make what was written to a file last, whoever wrote it. Which file that was is told."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make a rename or a new file in `folder` last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner may look into, and so those above it that have to be made."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)


def rename(source: Path, target: Path) -> None:
    """Give a file its name, for good. What had the name before is gone."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
    for folder in {source.parent, target.parent}:
        sync_folder(folder)


def write_whole(
    target: Path, data: bytes | Iterable[bytes | memoryview], mark: str = "", private: bool = False
) -> None:
    """A file that appears whole or not at all, from its bytes or from its lines.

    Where several write it at a time, each has a `mark` of its own. A `private` one is for its owner's eyes.
    """
    temporary = target.with_name(f".{target.name}{mark}.tmp")
    with open(temporary, "wb") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())
    rename(temporary, target)


def write_all(descriptor: int, data: memoryview | bytes, at: int | None = None) -> None:
    """All of it, at the descriptor's position or at a place of the file: the system may take less at a time."""
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view) if at is None else os.pwrite(descriptor, view, at)
        view, at = view[written:], None if at is None else at + written


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor of a regular file, to read from. Anything else is an OSError, and is not waited for.

    Opening a FIFO that nobody writes to would block for ever, whatever signal comes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def pread_all(descriptor: int, size: int, offset: int) -> bytes:
    """os.pread, until everything is read: fewer bytes only at the end of the file."""
    data = os.pread(descriptor, size, offset)
    while data and len(data) < size:
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def record_line(record: dict[str, Any]) -> bytes:
    body = json.dumps(record, sort_keys=True)
    return f"{zlib.crc32(body.encode()):08x} {body}\n".encode()


def record_of(line: bytes) -> dict[str, Any] | None:
    """What a line says, or None if it is torn or damaged."""
    checksum, _, body = line.partition(b" ")
    if not body or checksum != b"%08x" % zlib.crc32(body):
        return None
    record = json.loads(body)
    return record if isinstance(record, dict) else None


def end_torn_line(descriptor: int) -> None:
    """A line that a crash has cut stays a line of its own."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        write_all(descriptor, b"\n")


def append_line(descriptor: int, line: bytes, lasts: bool = True) -> None:
    """A whole line on disk, or none and an error. Not `lasts`: it is there until the machine stops."""
    size = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, line)
    except OSError:
        os.ftruncate(descriptor, size)
        raise
    if lasts:
        os.fsync(descriptor)


def free_bytes(folder: Path) -> int | None:
    """Room on the disk, or None where the file system does not say."""
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize if usage.f_blocks else None


def file_system(folder: str | os.PathLike[str], mounts: str = "/proc/self/mounts") -> str:
    """The kind of the innermost file system that holds a folder: "ext4", "nfs4"; nothing where that is not known."""
    real, kinds = os.path.realpath(folder), _mounted(mounts)
    while real not in kinds and real:
        real = real.rpartition("/")[0]
    return kinds.get(real, "")


def _mounted(mounts: str) -> dict[str, str]:
    """The kinds of file systems, by where they are mounted; of several at one place the last hides the others."""
    try:
        with open(mounts, "rb") as file:  # psutil reads it too, and takes longer to import
            lines = [line.split() for line in file]
    except FileNotFoundError:
        import psutil

        return {disk.mountpoint.rstrip("/"): disk.fstype for disk in psutil.disk_partitions(all=True)}
    unescaped = (re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), line[1]) for line in lines)
    return {os.fsdecode(at).rstrip("/"): os.fsdecode(line[2]) for at, line in zip(unescaped, lines, strict=True)}


def reason(error: OSError) -> str:
    """What the system says, and what to do if that has nothing to do with the file."""
    said = error.strerror or str(error)
    return f"{said}; {_MORE_FILES}" if error.errno in _TOO_MANY else said


def refuse_more_files(error: OSError, again: str = "run the same command to continue") -> None:
    """Raise if there are too many open files: no matter of the file that was to be the next."""
    if error.errno in _TOO_MANY:
        raise InputError(
            f"Too many files are open at a time to open {os.path.basename(error.filename or '') or 'another'!r}.",
            hint=f"{_MORE_FILES[0].upper()}{_MORE_FILES[1:]}, or take fewer --workers; then {again}.",
        ) from error


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Here the system's errors about a file that brim built and reads again become brim's."""
    try:
        yield
    except OSError as error:
        refuse_more_files(error)
        raise VerificationError(
            f"{name} cannot be read: {reason(error)}.", hint="brim verify lists everything that is wrong."
        ) from error


@contextmanager
def failures(root: Path, again: str = "run the same command to continue") -> Iterator[None]:
    """Here the system's errors about a destination become brim's. `again` says how to go on."""
    try:
        yield
    except OSError as error:
        if getattr(error, "response", None) is not None:
            raise  # what a server answered to whoever read from it: huggingface_hub makes that an OSError
        file = f" ({os.fspath(error.filename)!r})" if isinstance(error.filename, str | os.PathLike) else ""
        if error.errno in _FULL:
            free = free_bytes(root) if root.exists() else None
            left = f" ({format_size(free)} left)" if free is not None else ""
            raise DestinationUnavailableError(
                f"The disk of the destination is full{left}: {str(root)!r}; what is finished is kept.",
                hint=f"Make room, then {again}.",
            ) from error
        refuse_more_files(error, again)
        if error.errno in _UNUSABLE:
            raise DestinationError(
                f"The destination {str(root)!r} cannot be used: {error.strerror}{file}.",
                hint="Choose another folder, or give yourself the right to write there.",
            ) from error
        raise DestinationUnavailableError(
            f"The destination {str(root)!r} failed: {error.strerror or error}{file}.",
            hint=f"{again[0].upper()}{again[1:]}.",
        ) from error


def sha256_of(path: Path, advance: Callable[[int], None]) -> str:
    """`advance` is told of bytes, and may raise to stop."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            advance(size)
    return digest.hexdigest()
