"""What a process tree holds: quickly, and counted page by page where it matters.

The sum of /proc/PID/status is quick and too high where processes share pages: eight forked readers of a
200 MB parent look like 1.8 GB. smaps_rollup counts every page once, but is slow and holds the processes up.
So `TreeMeter` counts now and then, and moves the last count by what can be proved since: private memory that
a process has added to its own. It counts again when more than that could have happened and it would matter:
when the sum lies above the line and has grown, or when there were page faults enough for shared pages to have
become private ones. What it gives is therefore never too high by sharing, and behind by one count at most.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

from brim.memory.meter import (
    Process,
    Usage,
    minor_faults,
    proportional_usage,
    read_process,
    resident_tree,
    started,
    tree,
)
from brim.memory.tmpfs import TmpfsFiles
from brim.records import dataclass

_PAGE_BYTES = 4096
_NOTABLE_BYTES = 1 << 20
_CALM_S = 5.0  # below the line a count is only for the sake of the curve
_TOO_LARGE_TO_POLL = 20 * 10**9  # counting holds the processes up: not without need
# A count waits this many times what the last one took: when the line may be crossed, when processes came, else.
_URGENT, _CHANGED, _CALM = 4, 100, 300
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
