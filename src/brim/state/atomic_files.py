"""Durable and atomic files, system calls that may return early, and OSErrors of files translated to brim's errors."""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from brim.errors import DestinationError, DestinationUnavailableError, InputError, VerificationError
from brim.sizes import format_size

BUFFER_BYTES = 1024 * 1024  # fits the second-level cache: read, hash and write use memory once
_FULL = {errno.ENOSPC, errno.EDQUOT}
_UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}
_TOO_MANY = {errno.EMFILE, errno.ENFILE}
_TOO_MANY_HINT = "raise the limit of open files, as with `ulimit -n 65536`"
_RESUME_HINT = "run the same command to continue"
_WINDOW_BYTES, _WINDOWS = 8 << 20, 4  # written back at a time; a writer that is further ahead waits
_WRITE, _WRITE_AND_WAIT = 2, 1 | 2 | 4  # SYNC_FILE_RANGE_…
_NO_SUCH_CALL = {errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP}


class Outflow:
    """Starts to write back a file while it is appended to, so that the sync at its end has little to wait for.

    This alone makes nothing durable. A writer waits for a disk that is slower, so that dirty pages do not accumulate.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._started = descriptor, 0

    def wrote(self, size: int) -> None:
        """Note that the file has this size now."""
        while size - self._started >= _WINDOW_BYTES:
            _sync_range(self._descriptor, self._started, _WRITE)
            self._started += _WINDOW_BYTES
            earlier = self._started - (_WINDOWS + 1) * _WINDOW_BYTES
            if earlier >= 0:
                _sync_range(self._descriptor, earlier, _WRITE_AND_WAIT)

    def end(self) -> None:
        """Start to write back the last window."""
        _sync_range(self._descriptor, self._started, _WRITE)


def _sync_range(descriptor: int, start: int, flags: int) -> None:
    call = _sync_file_range()
    if call is not None and call(descriptor, start, _WINDOW_BYTES, flags) == 0:
        return
    error = errno.ENOSYS if call is None else ctypes.get_errno()
    if error not in _NO_SUCH_CALL:
        raise OSError(error, os.strerror(error))
    if flags != _WRITE:
        os.fsync(descriptor)


@functools.cache
def _sync_file_range() -> Any:
    """Return the function of the C library, if it has one: Python has no name for it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def sync_file(path: Path) -> os.stat_result:
    """Make the content of a file durable, whichever process wrote it; return its metadata."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make renames and new files in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_folder(folder: Path) -> None:
    """Make a folder, and missing parents, that only the owner can read."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def rename(source: Path, target: Path) -> None:
    """Rename a file durably, replacing another file of that name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
    for folder in {source.parent, target.parent}:
        sync_folder(folder)


def write_whole(
    target: Path, data: bytes | Iterable[bytes | memoryview], mark: str = "", private: bool = False
) -> None:
    """Write a file atomically and durably, from bytes or from lines.

    Concurrent writers of one file need different `mark`s. A `private` file is readable by its owner only.
    """
    temporary = target.with_name(f".{target.name}{mark}.tmp")
    with open(temporary, "wb") as file:
        if private:
            os.fchmod(file.fileno(), 0o600)
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())
    rename(temporary, target)


def write_all(descriptor: int, data: memoryview | bytes, offset: int | None = None) -> None:
    """Write all bytes at the position of the descriptor, or at an offset, in as many calls as it takes."""
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view) if offset is None else os.pwrite(descriptor, view, offset)
        view, offset = view[written:], None if offset is None else offset + written


def open_regular(path: str | os.PathLike[str]) -> int:
    """Open a regular file for reading; raise OSError for any other.

    Opening a FIFO without a writer would block forever, whatever signal arrives.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def pread_all(descriptor: int, size: int, offset: int) -> bytes:
    """Call os.pread until all bytes are read; fewer are returned only at the end of the file."""
    data = os.pread(descriptor, size, offset)
    while data and len(data) < size:
        added = os.pread(descriptor, size - len(data), offset + len(data))
        if not added:
            break
        data += added
    return data


def free_bytes(folder: Path) -> int | None:
    """Return the free space of a disk, or None where the file system does not report it."""
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize if usage.f_blocks else None


def file_system(folder: str | os.PathLike[str], mounts: str = "/proc/self/mounts") -> str:
    """Return the type of the file system of a folder, such as "ext4" or "nfs4"; "" if it is unknown."""
    real, types = os.path.realpath(folder), _mounted_types(mounts)
    while real not in types and real:
        real = real.rpartition("/")[0]
    return types.get(real, "")


def _mounted_types(mounts: str) -> dict[str, str]:
    """Return the types of file systems by mount point; the last of several at one point hides the others."""
    try:
        with open(mounts, "rb") as file:  # psutil reads it too, and takes longer to import
            lines = [entry.split() for entry in file]
    except FileNotFoundError:
        import psutil

        return {disk.mountpoint.rstrip("/"): disk.fstype for disk in psutil.disk_partitions(all=True)}
    points = (re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), entry[1]) for entry in lines)
    return {os.fsdecode(point).rstrip("/"): os.fsdecode(entry[2]) for point, entry in zip(points, lines, strict=True)}


def reason(error: OSError) -> str:
    """Return the message of the system, with a hint if too many files are open."""
    text = error.strerror or str(error)
    return f"{text}; {_TOO_MANY_HINT}" if error.errno in _TOO_MANY else text


def refuse_more_files(error: OSError, next_step: str = _RESUME_HINT) -> None:
    """Raise an InputError if too many files are open, which is not a fault of the file in question."""
    if error.errno in _TOO_MANY:
        raise InputError(
            f"Too many files are open at a time to open {os.path.basename(error.filename or '') or 'another'!r}.",
            hint=f"{_TOO_MANY_HINT[0].upper()}{_TOO_MANY_HINT[1:]}, or use fewer --workers; then {next_step}.",
        ) from error


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Translate OSErrors about a file that brim has built."""
    try:
        yield
    except OSError as error:
        refuse_more_files(error)
        raise VerificationError(
            f"{name} cannot be read: {reason(error)}.", hint="Run brim verify for a list of all problems."
        ) from error


@contextmanager
def failures(root: Path, hint: str = _RESUME_HINT) -> Iterator[None]:
    """Translate OSErrors about a destination. `hint` is the hint for a later attempt."""
    try:
        yield
    except OSError as error:
        if getattr(error, "response", None) is not None:
            raise  # an answer of a server, which huggingface_hub makes an OSError
        file = f" ({os.fspath(error.filename)!r})" if isinstance(error.filename, str | os.PathLike) else ""
        if error.errno in _FULL:
            free = free_bytes(root) if root.exists() else None
            free_text = f" ({format_size(free)} left)" if free is not None else ""
            raise DestinationUnavailableError(
                f"The disk of the destination is full{free_text}: {str(root)!r}; finished work is kept.",
                hint=f"Free disk space, then {hint}.",
            ) from error
        refuse_more_files(error, hint)
        if error.errno in _UNUSABLE:
            raise DestinationError(
                f"The destination {str(root)!r} cannot be used: {error.strerror}{file}.",
                hint="Choose another folder, or change its permissions.",
            ) from error
        raise DestinationUnavailableError(
            f"The destination {str(root)!r} failed: {error.strerror or error}{file}.",
            hint=f"{hint[0].upper()}{hint[1:]}.",
        ) from error


def sha256_of(path: Path, advance: Callable[[int], None]) -> str:
    """Return the SHA-256 of a file. `advance` gets the size of each block, and may raise to stop."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
            advance(size)
    return digest.hexdigest()
