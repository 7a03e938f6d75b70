"""What a process tree holds: quickly, and counted page by page where it matters.

The sum of /proc/PID/status is quick and too high where processes share pages: eight forked readers of a 200 MB parent
look like 1.8 GB. smaps_rollup counts every page once, but is slow and holds the processes up. So `TreeMeter` counts now
and then, and moves the last count by what can be proved since: private memory that a process has added to its own. It
counts again when more than that could have happened and it would matter: when the sum lies above the line and has
grown, or when there were page faults enough for shared pages to have become private ones. What it gives is therefore
never too high by sharing, and behind by one count at most.

Files in memory (/dev/shm and every other tmpfs, and memfd) count too. No process need map them or even have them open,
so that no counter of a process shows them. `statvfs` of each mount and the machine's `Shmem` are read at every sample
(hundredths of a millisecond); files are looked at only when one of them has moved. A file is the tree's if the tree
has, or was once seen to have, it open for writing or mapped. One that is open nowhere may have been written and closed
between two looks: it counts up to what the tree has written to something that is no disk (wchar − write_bytes), if it
belongs to the tree's user and changed since the start. What others write is therefore never counted against the tree.
The order of a look matters: files are listed, then those that are open, then what was written. So what is listed and
not open was written before, and a write under way, of which wchar knows nothing yet, is in a file that is open.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from brim.memory.meter import (
    Process,
    Usage,
    meminfo,
    minor_faults,
    proportional_usage,
    read_process,
    resident_tree,
    started,
    tree,
)
from brim.records import dataclass

_SMALL_BYTES = 1 << 20  # a file below this decides nothing
_UNDER_WAY_BYTES = 64 << 20  # one write puts no more than this into a file before it is counted
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
        self._others_before = {pid: _not_to_disk([pid]) for pid in _all_pids()}

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
        changed = list(self._changed())
        held: dict[Identity, int] = {}
        under_way: dict[Identity, int] = {}
        mapped: set[Identity] = set()
        for pid in members:
            for identity, size, position in self._open_files(pid, writing=True):
                held[identity] = size
                under_way[identity] = min(max(size - position, 0), _UNDER_WAY_BYTES)
            mapped |= {identity for identity in _mapped(pid) if identity[0] in self._devices}
        self._ours |= held.keys() | mapped
        users = {uid for pid in members if (uid := _owner(pid)) is not None}
        closed = {i: size for _, i, size, owner in changed if i not in held and (i in self._ours or owner in users)}
        known = {i: size for i, size in closed.items() if i in self._ours}
        total = sum(size for i, size in (held | known).items() if i not in mapped)
        unknown = {i: size for i, size in closed.items() if i not in self._ours}
        if unknown:
            counted = total - sum(size for i, size in under_way.items() if i not in mapped)
            total += self._perhaps(unknown, members, counted)
        return total

    def _perhaps(self, unknown: dict[Identity, int], members: list[int], counted: int) -> int:
        """Of files that are open nowhere, as much as the tree can have written beside what is counted."""
        written = max(_not_to_disk(members) - self._written_before - counted, 0)
        if written < _SMALL_BYTES:
            return 0
        written += written // 100 + _SMALL_BYTES  # files take whole pages
        others = _all_pids() - {*members, os.getpid()}
        foreign = {
            identity
            for pid in others
            for identity in (*(found for found, *_ in self._open_files(pid)), *_mapped_memory(pid))
        }
        mine = {identity: size for identity, size in unknown.items() if identity not in foreign}
        # A file is only taken for the tree's if no other process has written as much since the last look.
        before, self._others_before = self._others_before, {pid: _not_to_disk([pid]) for pid in others}
        most = max((size - before.get(pid, 0) for pid, size in self._others_before.items()), default=0)
        if sum(mine.values()) <= written:
            self._ours |= {identity for identity, size in mine.items() if size > most}
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

    def _open_files(self, pid: int, writing: bool = False) -> Iterator[tuple[Identity, int, int]]:
        """Files in memory that a process has open, deleted ones and memfd too: their size, and where it is in them."""
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
            flags, position = _opened(pid, descriptor) if writing else (_WRITING, 0)
            if flags & _WRITING:
                yield (info.st_dev, info.st_ino), info.st_blocks * 512, position


def _opened(pid: int, descriptor: str) -> tuple[int, int]:
    """How a file was opened, and where the next byte goes, which moves once a write is done."""
    try:
        words = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().split()
        facts = dict(zip(words[:4:2], words[1:4:2], strict=True))
        return int(facts["flags:"], 8), int(facts["pos:"])
    except (OSError, ValueError, KeyError):
        return 0, 0


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


def _all_pids() -> set[int]:
    try:
        return {int(name) for name in os.listdir("/proc") if name.isdigit()}
    except OSError:
        return set()


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


_PAGE_BYTES = 4096
_NOTABLE_BYTES = 1 << 20
_CALM_S = 5.0  # below the line a count is only for the sake of the curve
_TOO_LARGE_TO_POLL = 20 * 10**9  # counting holds the processes up: not without need
# A count waits this many times what the last one took: when the line may be crossed, when processes came, else.
_URGENT, _CHANGED, _CALM = 4, 20, 300
_WALK_PAUSE = 20


@dataclass(frozen=True, slots=True)
class TreeReading:
    """A tree at one moment: all of it, and each process as if it shared nothing."""

    usage: Usage
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class _Count:
    """What was counted page by page, beside what the quick look said then."""

    at: float
    took_s: float
    true: Usage
    quick: Usage
    each: dict[int, Usage]
    faults: int


class TreeMeter:
    """The processes below some roots. Those whose parents end are not lost."""

    def __init__(
        self,
        roots: Callable[[], Iterable[int]],
        *,
        without: Iterable[int] = (),
        tmpfs: TmpfsFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roots, self._without, self._tmpfs, self._clock = roots, frozenset(without), tmpfs, clock
        self._known: dict[int, int] = {}
        self._members: list[int] = []
        self._walk_again = 0.0
        self._count: _Count | None = None

    def members(self) -> list[int]:
        """Every process of the tree: what the roots started, and what was seen before and still runs."""
        reached = tree(self._roots())
        found = set(reached)
        strays = [pid for pid, born in self._known.items() if pid not in found and started(pid) == born]
        if strays:
            reached = tree([*reached, *strays])
        born = {pid: self._known.get(pid) or started(pid) for pid in reached if pid not in self._without}
        self._known = {pid: when for pid, when in born.items() if when is not None}
        self._members = list(self._known)
        return self._members

    def read(self, line_bytes: int = 0) -> TreeReading:
        """The tree now. What lies above `line_bytes` matters to the caller and is counted with more effort."""
        if sys.platform != "linux":
            found = tuple(p for p in resident_tree(self._roots()) if p.pid not in self._without)
            return TreeReading(sum((p.usage for p in found), Usage()), found)
        self._walk()
        processes = tuple(p for p in map(read_process, self._members) if p is not None)
        files = Usage(shmem_bytes=self._tmpfs.bytes_of(self._members) if self._tmpfs else 0)
        quick = sum((p.usage for p in processes), Usage())
        if len(processes) < 2:
            self._count = None
            return TreeReading(quick + files, processes)
        if self._should_count(quick, processes, max(line_bytes - files.shmem_bytes, 0)):
            self._count_pages(quick, processes)
        return TreeReading(self._moved(quick, processes) + files, processes)

    def _walk(self) -> None:
        """Walking a tree of thousands of threads takes long: then the members are a little old."""
        if self._clock() >= self._walk_again:
            begin = time.perf_counter()
            self.members()
            self._walk_again = self._clock() + _WALK_PAUSE * (time.perf_counter() - begin)

    def _should_count(self, quick: Usage, processes: tuple[Process, ...], line_bytes: int) -> bool:
        count = self._count
        if count is None:
            return quick.total_bytes > line_bytes or quick.total_bytes < _TOO_LARGE_TO_POLL
        passed_s = self._clock() - count.at
        if quick.total_bytes > line_bytes:
            return passed_s >= _URGENT * count.took_s and _may_lie_above(line_bytes, quick, processes, count)
        if quick.total_bytes > _TOO_LARGE_TO_POLL:
            return False
        new = sum(p.usage.total_bytes for p in processes if p.pid not in count.each)
        if new > _NOTABLE_BYTES:
            return passed_s >= _CHANGED * count.took_s
        return passed_s >= max(_CALM_S, _CALM * count.took_s)

    def _count_pages(self, quick: Usage, processes: tuple[Process, ...]) -> None:
        begin, faults = time.perf_counter(), _faults(processes)
        true = sum((proportional_usage(p.pid) or p.usage for p in processes), Usage())
        took_s = time.perf_counter() - begin
        self._count = _Count(self._clock(), took_s, true, quick, {p.pid: p.usage for p in processes}, faults)

    def _moved(self, quick: Usage, processes: tuple[Process, ...]) -> Usage:
        """The last count, moved by what is sure: private memory of processes that were counted then.

        New processes may be forks that share all they have, and a shared segment may be one that is counted
        already: both wait for the next count. The largest process is there for sure, and the sum is the most
        there can be.
        """
        count = self._count
        if count is None:
            return quick
        old = [(p.usage, count.each[p.pid]) for p in processes if p.pid in count.each]
        anon = count.true.anon_bytes + sum(now.anon_bytes - then.anon_bytes for now, then in old)
        swap = count.true.swap_bytes + sum(now.swap_bytes - then.swap_bytes for now, then in old)
        most = Usage(*(max((getattr(p.usage, kind) for p in processes), default=0) for kind in _KINDS))
        return Usage(
            min(max(anon, most.anon_bytes), quick.anon_bytes),
            min(max(count.true.shmem_bytes, most.shmem_bytes), quick.shmem_bytes),
            min(max(swap, most.swap_bytes), quick.swap_bytes),
            quick.file_bytes,
        )


_KINDS = ("anon_bytes", "shmem_bytes", "swap_bytes")


def _may_lie_above(line_bytes: int, quick: Usage, processes: tuple[Process, ...], count: _Count) -> bool:
    """Could there be more above the line than was counted, or has some of it gone?"""
    grown = quick.total_bytes - count.quick.total_bytes
    copied = max(_faults(processes) - count.faults, 0) * _PAGE_BYTES
    if count.true.total_bytes > line_bytes:
        return grown != 0 or copied > 0
    return count.true.total_bytes + max(grown, 0) + copied > line_bytes


def _faults(processes: tuple[Process, ...]) -> int:
    return sum(minor_faults(p.pid) for p in processes)
