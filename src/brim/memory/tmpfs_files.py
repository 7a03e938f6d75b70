"""Count files in memory (/dev/shm, every other tmpfs, memfd) that a process tree has written.

Processes need not map such a file or keep it open, so that no counter of a process contains it. `statvfs` of each mount
and the machine's `Shmem` are read at every sample (hundredths of a millisecond); files are listed only when one of them
has changed. A file belongs to the tree if the tree has, or once had, it open for writing or mapped. A file that no
process has open may have been written and closed between two samples: it counts up to the bytes that the tree has
written to anything but a disk (wchar − write_bytes), if it belongs to the tree's user and changed since the start. So
files of other programs are never counted.

The order of the steps matters: files are listed, then open files, then the counters of written bytes. So a file that
is listed and not open was written before, and a write in progress, which wchar does not yet contain, has an open file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from brim.memory.meter import all_pids, meminfo, read_process

_SMALL_BYTES = 1 << 20  # smaller files are ignored
_IN_PROGRESS_BYTES = 64 << 20  # one write adds at most this much to a file before it is counted
_PAUSE = 4  # listing files pauses this many times its duration
_WRITING = os.O_WRONLY | os.O_RDWR
Identity = tuple[int, int]  # device and inode


class TmpfsFiles:
    """The files that a process tree holds in memory since this object was made."""

    def __init__(
        self,
        running: Iterable[int] = (),
        mountinfo: Path = Path("/proc/self/mountinfo"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`running` are processes of the tree that run already, and may have written before."""
        self._since, self._clock = time.time(), clock
        self._mounts = dict(_tmpfs_mounts(mountinfo))
        self._devices = {*self._mounts.values(), *_memfd_device()}
        self._gauges = self._read_gauges()
        self._owned: set[Identity] = set()
        self._bytes = 0
        self._next_listing = 0.0
        self._written_before = _written_to_memory(running)
        self._written_by_others = {pid: _written_to_memory([pid]) for pid in all_pids()}

    def bytes_of(self, pids: Iterable[int]) -> int:
        """Return the bytes of files that these processes wrote and do not map (mapped ones are in RssShmem)."""
        members = list(pids)
        gauges = self._read_gauges()
        has_changed = any(abs(new - old) >= _SMALL_BYTES for new, old in zip(gauges, self._gauges, strict=True))
        if has_changed and self._clock() >= self._next_listing:
            start = time.perf_counter()
            self._gauges, self._bytes = gauges, self._list(members)
            self._next_listing = self._clock() + _PAUSE * (time.perf_counter() - start)
        return self._bytes

    def left_behind(self) -> list[tuple[str, int]]:
        """Return path and size of the tree's files that still exist, the largest first."""
        files = [(path, size) for path, identity, size, _ in self._changed_files() if identity in self._owned]
        return sorted(files, key=lambda file: -file[1])

    def _read_gauges(self) -> tuple[int, ...]:
        used = []
        for path in self._mounts:
            try:
                info = os.statvfs(path)
                used.append((info.f_blocks - info.f_bfree) * info.f_frsize)
            except OSError:
                used.append(0)
        return (*used, meminfo().get("Shmem", 0))

    def _list(self, members: list[int]) -> int:
        changed = list(self._changed_files())
        held: dict[Identity, int] = {}
        in_progress: dict[Identity, int] = {}
        mapped: set[Identity] = set()
        users: set[int] = set()
        for pid in members:
            for identity, size, position in self._open_files(pid, for_writing=True):
                held[identity] = size
                in_progress[identity] = min(max(size - position, 0), _IN_PROGRESS_BYTES)
            mapped |= {identity for identity in _mapped_files(pid) if identity[0] in self._devices}
            try:
                users.add(os.stat(f"/proc/{pid}").st_uid)
            except OSError:
                continue
        self._owned |= held.keys() | mapped
        unknown = {}
        for _, identity, size, owner in changed:
            if identity in self._owned:
                held.setdefault(identity, size)
            elif owner in users:
                unknown[identity] = size
        total = sum(size for identity, size in held.items() if identity not in mapped)
        if unknown:
            settled = total - sum(size for identity, size in in_progress.items() if identity not in mapped)
            total += self._attribute(unknown, members, settled)
        return total

    def _attribute(self, unknown: dict[Identity, int], members: list[int], counted: int) -> int:
        """Return as much of closed files as the tree can have written in addition to the counted bytes."""
        written = max(_written_to_memory(members) - self._written_before - counted, 0)
        if written < _SMALL_BYTES:
            return 0
        written += written // 100 + _SMALL_BYTES  # files take full pages
        others = {*all_pids()} - {*members, os.getpid()}
        foreign: set[Identity] = set()
        for pid in others:
            foreign |= {identity for identity, *_ in self._open_files(pid)}
            process = read_process(pid)
            if process is not None and process.usage.shmem_bytes:  # reading the maps of all processes takes long
                foreign |= {*_mapped_files(pid)}
        own = {identity: size for identity, size in unknown.items() if identity not in foreign}
        # A file is only attributed to the tree if no other process has written as much since the last listing.
        before, self._written_by_others = self._written_by_others, {pid: _written_to_memory([pid]) for pid in others}
        most = max((size - before.get(pid, 0) for pid, size in self._written_by_others.items()), default=0)
        if sum(own.values()) <= written:
            self._owned |= {identity for identity, size in own.items() if size > most}
        return min(sum(own.values()), written)

    def _changed_files(self) -> Iterator[tuple[str, Identity, int, int]]:
        """Yield (path, identity, size, owner) of every file that changed since the start."""
        for mount, device in self._mounts.items():
            for folder, folders, files in os.walk(mount):
                folders[:] = [name for name in folders if not os.path.ismount(os.path.join(folder, name))]
                for name in files:
                    path = os.path.join(folder, name)
                    try:
                        info = os.lstat(path)
                    except OSError:
                        continue
                    size = info.st_blocks * 512
                    is_changed = max(info.st_mtime, info.st_ctime) >= self._since
                    if size >= _SMALL_BYTES and is_changed and info.st_dev == device:
                        yield path, (info.st_dev, info.st_ino), size, info.st_uid

    def _open_files(self, pid: int, for_writing: bool = False) -> Iterator[tuple[Identity, int, int]]:
        """Yield files in memory that a process has open, deleted ones and memfd included: size and position."""
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            return
        for descriptor in descriptors:
            try:
                info = os.stat(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue
            if info.st_dev not in self._devices or info.st_blocks * 512 < _SMALL_BYTES:
                continue
            position = 0
            if for_writing:
                try:
                    fields = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().split()
                    details = dict(zip(fields[:4:2], fields[1:4:2], strict=True))
                    if not int(details["flags:"], 8) & _WRITING:
                        continue
                    position = int(details["pos:"])  # moves when a write is done
                except (OSError, ValueError, KeyError):
                    continue
            yield (info.st_dev, info.st_ino), info.st_blocks * 512, position


def _written_to_memory(pids: Iterable[int]) -> int:
    """Return the bytes that processes have written to anything but a disk: to tmpfs, pipes and sockets."""
    total = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/io").read_text().split()
        except OSError:
            continue
        counters = dict(zip(fields[::2], map(int, fields[1::2]), strict=False))
        total += max(counters.get("wchar:", 0) - counters.get("write_bytes:", 0), 0)
    return total


def _memfd_device() -> Iterator[int]:
    """Yield the device of memfd files, which are in no folder."""
    if not hasattr(os, "memfd_create"):
        return
    try:
        descriptor = os.memfd_create("brim")
    except OSError:
        return
    yield os.fstat(descriptor).st_dev
    os.close(descriptor)


def _tmpfs_mounts(mountinfo: Path) -> Iterator[tuple[str, int]]:
    """Yield path and device of each tmpfs once, without those that another mount hides."""
    try:
        lines = mountinfo.read_text(errors="replace").splitlines()
    except OSError:
        return
    devices = set()
    for line in lines:
        left, _, right = line.partition(" - ")
        if right.split(" ")[0] != "tmpfs":
            continue
        path = left.split(" ")[4].replace("\\040", " ")
        try:
            device = os.stat(path).st_dev
        except OSError:
            continue
        if device not in devices:
            devices.add(device)
            yield path, device


def _mapped_files(pid: int) -> Iterator[Identity]:
    """Yield every file that a process maps."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            for line in maps:
                fields = line.split(None, 5)
                if len(fields) > 5 and fields[4] != b"0":
                    major, minor = fields[3].split(b":")
                    yield os.makedev(int(major, 16), int(minor, 16)), int(fields[4])
    except OSError:
        return
