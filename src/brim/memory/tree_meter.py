"""Measure the memory of a process tree: quickly, and page by page when it matters.

The sum over /proc/PID/status is quick, and too high if processes share pages: eight forked readers of a 200 MB parent
add up to 1.8 GB. smaps_rollup counts every page once, but is slow and makes the processes wait. So `TreeMeter` counts
page by page from time to time, and adjusts the last count by changes that are certain: private memory that a process
has gained. It counts again when other changes are possible and would matter: when the sum is above the threshold and
has grown, or when there were enough page faults for shared pages to have become private. Its result is therefore never
too high because of sharing, and at most one count old.
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
from brim.memory.tmpfs_files import TmpfsFiles
from brim.records import dataclass

_PAGE_BYTES = 4096
_NOTABLE_BYTES = 1 << 20
_CALM_S = 5.0  # below the threshold a count only improves the curve
_TOO_LARGE_TO_POLL = 20 * 10**9  # counting makes the processes wait: only if it is necessary
# A count pauses this many times its duration: if the threshold may be exceeded, if processes were added, otherwise.
_URGENT, _CHANGED, _CALM = 4, 20, 300
_WALK_PAUSE = 20
_KINDS = ("anon_bytes", "shmem_bytes", "swap_bytes")


@dataclass(frozen=True, slots=True)
class TreeReading:
    """The memory of a tree, and of each process with its shared pages in full."""

    usage: Usage
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True)
class _PageCount:
    """The result of a count page by page, and the quick sums at the same time."""

    at: float
    took_s: float
    exact: Usage
    quick: Usage
    by_pid: dict[int, Usage]
    faults: int


class TreeMeter:
    """Measures the descendants of some roots, including processes whose parents have ended."""

    def __init__(
        self,
        roots: Callable[[], Iterable[int]],
        *,
        without: Iterable[int] = (),
        tmpfs: TmpfsFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roots, self._without, self._tmpfs, self._clock = roots, frozenset(without), tmpfs, clock
        self._started: dict[int, int] = {}
        self._members: list[int] = []
        self._next_walk = 0.0
        self._count: _PageCount | None = None

    def members(self) -> list[int]:
        """Return every process of the tree: descendants of the roots, and earlier members that still run."""
        reached = tree(self._roots())
        current = set(reached)
        strays = [pid for pid, start in self._started.items() if pid not in current and started(pid) == start]
        if strays:
            reached = tree([*reached, *strays])
        starts = {pid: self._started.get(pid) or started(pid) for pid in reached if pid not in self._without}
        self._started = {pid: start for pid, start in starts.items() if start is not None}
        self._members = list(self._started)
        return self._members

    def read(self, threshold_bytes: int = 0) -> TreeReading:
        """Measure the tree, with more effort if it is above `threshold_bytes`."""
        if sys.platform != "linux":
            resident = tuple(p for p in resident_tree(self._roots()) if p.pid not in self._without)
            return TreeReading(sum((p.usage for p in resident), Usage()), resident)
        if self._clock() >= self._next_walk:  # walking a tree of thousands of threads takes long
            start = time.perf_counter()
            self.members()
            self._next_walk = self._clock() + _WALK_PAUSE * (time.perf_counter() - start)
        processes = tuple(p for p in map(read_process, self._members) if p is not None)
        files = Usage(shmem_bytes=self._tmpfs.bytes_of(self._members) if self._tmpfs else 0)
        quick = sum((p.usage for p in processes), Usage())
        if len(processes) < 2:
            self._count = None
            return TreeReading(quick + files, processes)
        if self._should_count(quick, processes, max(threshold_bytes - files.shmem_bytes, 0)):
            start, faults = time.perf_counter(), _faults(processes)
            exact = sum((proportional_usage(p.pid) or p.usage for p in processes), Usage())
            took_s = time.perf_counter() - start
            by_pid = {p.pid: p.usage for p in processes}
            self._count = _PageCount(self._clock(), took_s, exact, quick, by_pid, faults)
        return TreeReading(self._adjusted(quick, processes) + files, processes)

    def _should_count(self, quick: Usage, processes: tuple[Process, ...], threshold_bytes: int) -> bool:
        count = self._count
        if count is None:
            return quick.total_bytes > threshold_bytes or quick.total_bytes < _TOO_LARGE_TO_POLL
        passed_s = self._clock() - count.at
        if quick.total_bytes > threshold_bytes:
            grown = quick.total_bytes - count.quick.total_bytes
            copied = max(_faults(processes) - count.faults, 0) * _PAGE_BYTES
            exact_bytes = count.exact.total_bytes
            if exact_bytes > threshold_bytes:
                may_have_changed = grown != 0 or copied > 0
            else:
                may_have_changed = exact_bytes + max(grown, 0) + copied > threshold_bytes
            return passed_s >= _URGENT * count.took_s and may_have_changed
        if quick.total_bytes > _TOO_LARGE_TO_POLL:
            return False
        added = sum(p.usage.total_bytes for p in processes if p.pid not in count.by_pid)
        if added > _NOTABLE_BYTES:
            return passed_s >= _CHANGED * count.took_s
        return passed_s >= max(_CALM_S, _CALM * count.took_s)

    def _adjusted(self, quick: Usage, processes: tuple[Process, ...]) -> Usage:
        """Return the last count, adjusted by the private memory that its processes have gained or freed since.

        New processes may be forks that share all pages, and a shared segment may be counted already: both are included
        at the next count. The largest process is a lower bound, and the sum an upper one.
        """
        count = self._count
        if count is None:
            return quick
        pairs = [(p.usage, count.by_pid[p.pid]) for p in processes if p.pid in count.by_pid]
        anon = count.exact.anon_bytes + sum(now.anon_bytes - then.anon_bytes for now, then in pairs)
        swap = count.exact.swap_bytes + sum(now.swap_bytes - then.swap_bytes for now, then in pairs)
        largest = Usage(*(max((getattr(p.usage, kind) for p in processes), default=0) for kind in _KINDS))
        return Usage(
            min(max(anon, largest.anon_bytes), quick.anon_bytes),
            min(max(count.exact.shmem_bytes, largest.shmem_bytes), quick.shmem_bytes),
            min(max(swap, largest.swap_bytes), quick.swap_bytes),
            quick.file_bytes,
        )


def _faults(processes: tuple[Process, ...]) -> int:
    return sum(minor_faults(p.pid) for p in processes)
