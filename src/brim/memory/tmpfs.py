"""Files in memory that a process tree has written: /dev/shm and every other tmpfs, and memfd.

No process need map them or even have them open, so that no counter of a process shows them. `statvfs` of each mount
and the machine's `Shmem` are read at every sample (hundredths of a millisecond); files are looked at only when one of
them has moved. A file is the tree's if the tree has, or was once seen to have, it open for writing or mapped. One
that is open nowhere may have been written and closed between two looks: it counts up to what the tree has written
to something that is no disk (wchar − write_bytes), if it belongs to the tree's user and changed since the start.
What others write is therefore never counted against the tree.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from brim.memory.machine import meminfo
from brim.memory.meter import read_process

_SMALL_BYTES = 1 << 20  # a file below this decides nothing
_PAUSE = 4  # a look waits this many times what the last one took
_WRITING = os.O_WRONLY | os.O_RDWR
Identity = tuple[int, int]


class TmpfsFiles:
    """Made when a watch begins; `bytes_of` says what the tree holds in files since then."""

    def __init__(
        self,
        running: Iterable[int] = (),
        mountinfo: Path = Path("/proc/self/mountinfo"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`running` are processes of the tree that have written things before."""
        self._since, self._clock = time.time(), clock
        self._mounts = dict(_tmpfs_mounts(mountinfo))
        self._devices = {*self._mounts.values(), *_memfd_device()}
        self._moved = self._gauge()
        self._ours: set[Identity] = set()
        self._bytes = 0
        self._again = 0.0
        self._written_before = _not_to_disk(running)

    def bytes_of(self, pids: Iterable[int]) -> int:
        """Bytes in files that these processes wrote and do not map (what they map is in RssShmem)."""
        members = list(pids)
        gauge = self._gauge()
        if all(abs(now - then) < _SMALL_BYTES for now, then in zip(gauge, self._moved, strict=True)):
            return self._bytes
        if self._clock() < self._again:
            return self._bytes
        begin = time.perf_counter()
        self._moved, self._bytes = gauge, self._look(members)
        self._again = self._clock() + _PAUSE * (time.perf_counter() - begin)
        return self._bytes

    def left_behind(self) -> list[tuple[str, int]]:
        """The tree's files that are still there, the largest first: memory that nobody gives back."""
        found = [(path, size) for path, identity, size, _ in self._changed() if identity in self._ours]
        return sorted(found, key=lambda one: -one[1])

    def _gauge(self) -> tuple[int, ...]:
        return (*(_used_bytes(path) for path in self._mounts), meminfo().get("Shmem", 0))

    def _look(self, members: list[int]) -> int:
        held: dict[Identity, int] = {}
        mapped: set[Identity] = set()
        for pid in members:
            held |= dict(self._open_files(pid, writing=True))
            mapped |= {identity for identity in _mapped(pid) if identity[0] in self._devices}
        self._ours |= held.keys() | mapped
        users = {uid for pid in members if (uid := _owner(pid)) is not None}
        closed = {
            i: size for _, i, size, owner in self._changed() if i not in held and (i in self._ours or owner in users)
        }
        known = {i: size for i, size in closed.items() if i in self._ours}
        total = sum(size for i, size in (held | known).items() if i not in mapped)
        unknown = {i: size for i, size in closed.items() if i not in self._ours}
        if unknown:
            total += self._perhaps(unknown, members, total)
        return total

    def _perhaps(self, unknown: dict[Identity, int], members: list[int], counted: int) -> int:
        """Of files that are open nowhere, as much as the tree can have written."""
        written = max(_not_to_disk(members) - self._written_before - counted, 0)
        if written < _SMALL_BYTES:
            return 0
        written += written // 100 + _SMALL_BYTES  # files take whole pages
        ours = set(members)
        strange = {
            identity
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if pid not in ours and pid != os.getpid()
            for identity in (*(found for found, _ in self._open_files(pid)), *_mapped_memory(pid))
        }
        mine = {identity: size for identity, size in unknown.items() if identity not in strange}
        if sum(mine.values()) <= written:
            self._ours |= mine.keys()
        return min(sum(mine.values()), written)

    def _changed(self) -> Iterator[tuple[str, Identity, int, int]]:
        """(path, identity, size, owner) of every file that changed since the start."""
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
                    changed = max(info.st_mtime, info.st_ctime) >= self._since
                    if size >= _SMALL_BYTES and changed and info.st_dev == device:
                        yield path, (info.st_dev, info.st_ino), size, info.st_uid

    def _open_files(self, pid: int, writing: bool = False) -> Iterator[tuple[Identity, int]]:
        """Files in memory that a process has open, deleted ones and memfd too."""
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
            if not writing or _opened_for_writing(pid, descriptor):
                yield (info.st_dev, info.st_ino), info.st_blocks * 512


def _opened_for_writing(pid: int, descriptor: str) -> bool:
    try:
        text = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
    except OSError:
        return False
    _, found, rest = text.partition("flags:\t")
    return bool(found and int(rest.split()[0], 8) & _WRITING)


def _mapped_memory(pid: int) -> Iterable[Identity]:
    """As `_mapped`, but only of processes that hold shared memory: reading the maps of all takes long."""
    process = read_process(pid)
    return _mapped(pid) if process is not None and process.usage.shmem_bytes else ()


def _not_to_disk(pids: Iterable[int]) -> int:
    """Bytes that processes have written, less those that go to a disk: to tmpfs, pipes and sockets."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/io").read_text().split()
        except OSError:
            continue
        facts = dict(zip(lines[::2], map(int, lines[1::2]), strict=False))
        total += max(facts.get("wchar:", 0) - facts.get("write_bytes:", 0), 0)
    return total


def _memfd_device() -> Iterator[int]:
    """The device that files without a place in any folder lie on."""
    if not hasattr(os, "memfd_create"):
        return
    try:
        descriptor = os.memfd_create("brim")
    except OSError:
        return
    yield os.fstat(descriptor).st_dev
    os.close(descriptor)


def _tmpfs_mounts(mountinfo: Path) -> Iterator[tuple[str, int]]:
    """(path, device) of each; one that another mount hides is not seen, and one seen twice counts once."""
    try:
        lines = mountinfo.read_text(errors="replace").splitlines()
    except OSError:
        return
    seen = set()
    for line in lines:
        left, _, right = line.partition(" - ")
        if right.split(" ")[0] != "tmpfs":
            continue
        path = left.split(" ")[4].replace("\\040", " ")
        try:
            device = os.stat(path).st_dev
        except OSError:
            continue
        if device not in seen:
            seen.add(device)
            yield path, device


def _used_bytes(path: str) -> int:
    try:
        usage = os.statvfs(path)
    except OSError:
        return 0
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _mapped(pid: int) -> Iterator[tuple[int, int]]:
    """(device, inode) of every file that a process maps."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            for line in maps:
                fields = line.split(None, 5)
                if len(fields) > 5 and fields[4] != b"0":
                    major, minor = fields[3].split(b":")
                    yield os.makedev(int(major, 16), int(minor, 16)), int(fields[4])
    except OSError:
        return
