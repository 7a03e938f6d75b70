"""Keep a job with worker processes within its memory limit.

The only place that decides how many workers run on this machine, and which one is killed. A thread measures the
processes: above a threshold workers pause between batches, and at the limit minus a margin the largest is killed.
Arithmetic for Ray nodes is here too, because both use the same budget. Thresholds with hysteresis are in
brim.memory.thresholds, counting of pages in brim.memory.tree_meter. Builds keep their limit by arithmetic instead
(plans/describe_plan.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from brim.execution.worker_process import WorkerProcess, caller_bytes
from brim.memory.meter import process_bytes, tree
from brim.memory.sampler import Pace
from brim.memory.thresholds import Guard, Level, Threshold
from brim.memory.tree_meter import TreeMeter
from brim.records import dataclass
from brim.state.atomic_files import write_all

_MARGIN_BYTES, _MARGIN = 32 << 20, 0.03  # a worker may allocate so much between two checks
_PAUSE_ABOVE = 0.85
_WORK_BYTES = 48 << 20  # for the first batches, before any was measured
_PYTHON_BYTES, _IMPORTS_BYTES = 50 << 20, 80 << 20  # a worker with pyarrow only; with some imports
_KEPT_BYTES = 64 << 20  # a worker may keep so much from unit to unit
_MOST_UNITS, _UNITS_PER_SHORTAGE = 16, 8
_KILL_AGAIN_S = 0.2  # a killed worker is gone by then
_WALK_S = 0.05
_SHORTEST_S = 0.004  # between checks: a thread fills two gigabytes per second


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A memory limit, and the part of it that is used without any work: by the parent, and by each idle worker."""

    limit_bytes: int
    parent_bytes: int
    worker_bytes: int
    caller_bytes: int = 0  # part of the parent's: other programs of the caller, as measured at the start of the job

    @classmethod
    def measured(cls, limit_bytes: int) -> MemoryBudget:
        """Return the budget of this process, before any worker was measured."""
        own_bytes = caller_bytes()
        return cls(limit_bytes, own_bytes, _PYTHON_BYTES, max(own_bytes - process_bytes(os.getpid()), 0))

    @property
    def kill_bytes(self) -> int:
        """Above this a worker is killed. The margin is for the workers: the parent's memory does not change."""
        return self.limit_bytes - max(_MARGIN_BYTES, round(_MARGIN * (self.limit_bytes - self.parent_bytes)))

    @property
    def pause_bytes(self) -> int:
        """Above this no worker begins another batch."""
        return self.parent_bytes + round(_PAUSE_ABOVE * (self.kill_bytes - self.parent_bytes))

    @property
    def smallest_limit_bytes(self) -> int:
        """The limit with which one worker can work at all, rounded up to ten megabytes."""
        need = self.worker_bytes + _WORK_BYTES // 2
        with_margin = self.parent_bytes + max(need + _MARGIN_BYTES, round(need / (1 - _MARGIN)))
        return -(-with_margin // 10**7) * 10**7

    def worker_count(self, work_bytes: int, max_count: int) -> int:
        """Return how many workers fit if each needs so much for its work (0: not measured yet), at least one."""
        available = self.kill_bytes - self.parent_bytes
        return max(min(available // (self.worker_bytes + (work_bytes or _WORK_BYTES)), max_count), 1)

    def bytes_per_worker(self, workers: int) -> int:
        return (self.kill_bytes - self.parent_bytes) // max(workers, 1)


def divide_node(node_cpus: float, need_bytes: int, limit_bytes: int) -> int:
    """Return how many CPUs each Ray task must request so that the tasks of a node fit in its memory limit."""
    slots = max(limit_bytes // max(need_bytes, 1), 1)
    return max(-(-int(node_cpus) // int(slots)), 1)


class WorkMemory:
    """Memory that units needed above that of an idle worker. A rare large unit does not count: it is retried alone."""

    def __init__(self) -> None:
        self._units: deque[int] = deque(maxlen=_MOST_UNITS)

    def add(self, peak_bytes: int, base_bytes: int) -> None:
        self._units.append(max(peak_bytes - base_bytes, 0))

    def usual_bytes(self, default: int = 0) -> int:
        """Return the third quartile of the memory of the last units; `default` before the first."""
        return sorted(self._units)[3 * len(self._units) // 4] if self._units else default


class PauseFlag:
    """A file of one byte that every worker maps: 1 while memory is low."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(b"\0")
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._is_set = False

    def set(self, is_low: bool) -> None:
        if is_low != self._is_set:
            self._is_set = is_low
            write_all(self._descriptor, b"\1" if is_low else b"\0", 0)

    def remove(self) -> None:
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)


class MemoryLimiter:
    """Decides how many workers run, and kills the largest at the limit. Its thread runs while it is open.

    `is_low`: no task should start now. `own_bytes`: memory of this process, if that alone exceeds the limit.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        most_workers: int,
        workers: Callable[[], Sequence[WorkerProcess]],
        pause_path: Path,
    ) -> None:
        self.budget, self.most_workers = budget, most_workers
        self._workers, self._pause_path = workers, pause_path
        self._units, self._shortages = WorkMemory(), 0
        # Thresholds hold for the whole job: later measurements of the parent change only the number of workers.
        self._pause_bytes, self._kill_bytes = budget.pause_bytes, budget.kill_bytes
        kill = Threshold("hard", Level(bytes=self._kill_bytes), repeat_s=_KILL_AGAIN_S, hysteresis=0.0)
        self._guard = Guard(budget.limit_bytes, [kill], horizon_s=0.0)
        self._meter = TreeMeter(lambda: [worker.pid for worker in workers()])
        self._tree: set[int] = set()
        self._walk_at = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory limiter", daemon=True)
        self.is_low = False
        self.peak_bytes = self.own_bytes = 0

    # The number of workers

    def target_workers(self) -> int:
        """Return how many workers should run, by what units needed so far."""
        if not any(worker.is_ready for worker in self._workers()):
            # Several at once only if large imports fit several times; otherwise the first worker shows their size.
            return replace(self.budget, worker_bytes=_IMPORTS_BYTES).worker_count(0, self.most_workers)
        return self.budget.worker_count(round(1.1 * self._units.usual_bytes()), self.most_workers)

    def release_bytes(self) -> int:
        """Return the memory above which a worker releases free memory between batches."""
        return round(0.9 * self.budget.bytes_per_worker(len(self._workers())))

    def record_ready(self, held_bytes: int) -> None:
        """Take account of a worker that has imported everything."""
        parent = max(process_bytes(os.getpid()) + self.budget.caller_bytes, self.budget.parent_bytes)
        worker_bytes = max(held_bytes, self.budget.worker_bytes)
        self.budget = replace(self.budget, parent_bytes=parent, worker_bytes=worker_bytes)

    def record_unit(self, peak_bytes: int, base_bytes: int, is_exclusive: bool) -> None:
        """Take account of a unit that was computed."""
        if not is_exclusive:
            self._units.add(peak_bytes, base_bytes)

    def record_shortage(self, was_exclusive: bool, computed_units: int) -> None:
        """Run fewer workers if units run out of memory often."""
        self._shortages += 1
        if not was_exclusive and self._shortages > 1 + computed_units // _UNITS_PER_SHORTAGE:
            self.most_workers = max(self.most_workers - 1, 1)

    def record_failed_start(self) -> None:
        """Run no more workers than now, because there was not enough memory to start another one."""
        self.most_workers = max(len(self._workers()), 1)

    def should_replace(self, worker: WorkerProcess, held_bytes: int) -> bool:
        """Return whether a worker does not release the memory of its units."""
        kept_bytes = held_bytes - worker.base_bytes
        return kept_bytes > max(_KEPT_BYTES, self.budget.bytes_per_worker(len(self._workers())) // 4)

    def budget_with(self, worker: WorkerProcess) -> MemoryBudget:
        """Return the budget for a worker that needs more than it may before its first row."""
        held_bytes = max(self.budget.worker_bytes, worker.killed_at_bytes, worker.peak_bytes)
        return replace(self.budget, worker_bytes=held_bytes)

    # The limit

    def __enter__(self) -> MemoryLimiter:
        self.pause_flag = PauseFlag(self._pause_path)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self.pause_flag.remove()

    def _watch(self) -> None:
        pace = Pace(_SHORTEST_S)
        while True:
            start = time.thread_time()
            used, now = self._measure(), time.monotonic()
            self.peak_bytes = max(self.peak_bytes, used)
            if self._guard.observe(now, used):
                self._kill_largest()
            self.is_low = used >= self._pause_bytes
            busy = sum(worker.attempt is not None for worker in self._workers())
            self.pause_flag.set(self.is_low and busy > 1)
            pause = pace.pause_s(now, used, self._kill_bytes, time.thread_time() - start)
            if self._closed.wait(min(pause, 0.2)):
                return

    def _measure(self) -> int:
        """Return the memory of the job: this process, its workers, and all that they started.

        Programs that the caller has started (a server, processes of a DataLoader) count as measured at the start of
        the job: they may grow and end, and no worker is killed for it.
        """
        workers, now = self._workers(), time.monotonic()
        worker_pids = {worker.pid for worker in workers}
        if now >= self._walk_at:  # walking the tree costs ten times as much as reading it
            children = [child for worker in workers for child in worker.children]
            self._tree, self._walk_at = set(tree([*worker_pids, *children])), now + _WALK_S
        bytes_by_pid = {pid: process_bytes(pid) for pid in self._tree | worker_pids}
        has_children = not self._tree <= worker_pids
        for worker in workers:
            if bytes_by_pid.get(worker.pid):  # not of a dead one: its children are still to be killed
                worker.children = tuple(tree([worker.pid])[1:]) if has_children else ()
            used = sum(bytes_by_pid.get(pid, 0) for pid in (worker.pid, *worker.children))
            worker.peak_bytes = max(worker.peak_bytes, used)
        parent_bytes = self._parent_bytes()
        # Workers are new processes that share nothing, so the sum is their memory. Pages must be counted only where
        # the user's function has started processes.
        if has_children:
            return parent_bytes + self._meter.read(max(self._pause_bytes - parent_bytes, 0)).usage.total_bytes
        return parent_bytes + sum(bytes_by_pid.values())

    def _parent_bytes(self) -> int:
        return process_bytes(os.getpid()) + self.budget.caller_bytes

    def _kill_largest(self) -> None:
        """Kill the largest worker; its unit is retried with more memory."""
        sizes = [(worker.held_bytes(), worker) for worker in self._workers() if not worker.killed_at_bytes]
        if not sizes:
            self.own_bytes = self._parent_bytes() + self._meter.read().usage.total_bytes
            return
        size, worker = max(sizes, key=lambda pair: pair[0])
        worker.killed_at_bytes = max(size, 1)
        worker.kill()
