"""Holding the line: a thread that looks at the tree, and acts on what it sees.

Above the soft line it closes the gate, above the hard line it ends a worker.

The thresholds and their hysteresis are brim.memory.thresholds', the count of pages brim.memory.tree_meter's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from brim.execution.worker_process import WorkerProcess
from brim.memory.meter import process_bytes, tree
from brim.memory.sampler import Pace
from brim.memory.thresholds import Guard, Level, Threshold
from brim.memory.tree_meter import TreeMeter
from brim.records import dataclass
from brim.state.atomic_files import write_all

_MARGIN_BYTES, _MARGIN = 32 << 20, 0.03  # what a worker may take between two looks
_SOFT = 0.85
_WORK_BYTES = 48 << 20  # what the first batches are given before any was seen


@dataclass(frozen=True, slots=True)
class WorkerRoom:
    """The limit, and what of it is gone before any work: the parent, and every worker at rest."""

    limit_bytes: int
    parent_bytes: int
    worker_bytes: int
    beside_bytes: int = 0  # of the parent's: what the caller's other programs held when the job began

    @property
    def hard_bytes(self) -> int:
        """Above this a worker is ended. The margin is that of the workers: what the parent holds stays as it is."""
        return self.limit_bytes - max(_MARGIN_BYTES, round(_MARGIN * (self.limit_bytes - self.parent_bytes)))

    @property
    def soft_bytes(self) -> int:
        """Above this nobody begins another batch."""
        return self.parent_bytes + round(_SOFT * (self.hard_bytes - self.parent_bytes))

    @property
    def smallest_bytes(self) -> int:
        """The limit that one worker needs to do anything at all, rounded up to ten megabytes."""
        need = self.worker_bytes + _WORK_BYTES // 2
        with_margin = self.parent_bytes + max(need + _MARGIN_BYTES, round(need / (1 - _MARGIN)))
        return -(-with_margin // 10**7) * 10**7

    def workers(self, work_bytes: int, most: int) -> int:
        """How many fit if each takes so much for its work (0: none was seen yet); one always tries."""
        left = self.hard_bytes - self.parent_bytes
        return max(min(left // (self.worker_bytes + (work_bytes or _WORK_BYTES)), most), 1)

    def share_bytes(self, workers: int) -> int:
        """What one of so many may hold."""
        return (self.hard_bytes - self.parent_bytes) // max(workers, 1)


_AGAIN_S = 0.2  # a worker that was ended is gone by then
_WALK_S = 0.05
_SHORTEST_S = 0.004  # between looks: a thread fills two gigabytes a second


class Gate:
    """A file of one byte that every worker has mapped: 1 while memory is short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(b"\0")
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._closed = False

    def close_for_now(self, short: bool) -> None:
        if short != self._closed:
            self._closed = short
            write_all(self._descriptor, b"\1" if short else b"\0", 0)

    def remove(self) -> None:
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)


class HeldLine:
    """Watches while it is open. `tight` is true while nobody should begin anything new."""

    def __init__(self, room: WorkerRoom, workers: Callable[[], Sequence[WorkerProcess]], gate: Gate) -> None:
        self._room, self._workers, self._gate = room, workers, gate
        self._meter = TreeMeter(lambda: [worker.pid for worker in workers()])
        hard = Threshold("hard", Level(bytes=room.hard_bytes), repeat_s=_AGAIN_S, hysteresis=0.0)
        self._tree: set[int] = set()
        self._walk_at = 0.0
        self._guard = Guard(room.limit_bytes, [hard], horizon_s=0.0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="line", daemon=True)
        self.tight = False
        self.peak_bytes = 0
        self.own_bytes = 0  # what this process held when there was nobody else to end

    def __enter__(self) -> HeldLine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        pace = Pace(_SHORTEST_S)
        while True:
            begin = time.thread_time()
            used, now = self._read(), time.monotonic()
            self.peak_bytes = max(self.peak_bytes, used)
            if self._guard.observe(now, used):
                self._end_one()
            self.tight = used >= self._room.soft_bytes
            self._gate.close_for_now(self.tight and sum(w.attempt is not None for w in self._workers()) > 1)
            pause = pace.pause_s(now, used, self._room.hard_bytes, time.thread_time() - begin)
            if self._ended.wait(min(pause, 0.2)):
                return

    def _read(self) -> int:
        """What the job holds: this process, its workers and all they started.

        Programs that the caller has started (a server, readers of a DataLoader) count as what they held when the job
        began: they may grow and end, and no worker is ended for it.
        """
        workers, now = self._workers(), time.monotonic()
        known = {worker.pid for worker in workers}
        if now >= self._walk_at:  # walking the tree costs ten times what reading it does
            left = [child for worker in workers for child in worker.children]
            self._tree, self._walk_at = set(tree([*known, *left])), now + _WALK_S
        held = {pid: process_bytes(pid) for pid in self._tree | known}
        strangers = not self._tree <= known
        for worker in workers:
            if held.get(worker.pid):  # not of one that has died: what it left is still to be ended
                worker.children = tuple(tree([worker.pid])[1:]) if strangers else ()
            used = sum(held.get(pid, 0) for pid in (worker.pid, *worker.children))
            worker.peak_bytes = max(worker.peak_bytes, used)
        here = self._own()
        # Workers are fresh processes that share nothing, so their sum is what they hold. Only where the user's
        # function has started processes of its own, pages have to be counted.
        if strangers:
            return here + self._meter.read(max(self._room.soft_bytes - here, 0)).usage.total_bytes
        return here + sum(held.values())

    def _own(self) -> int:
        return process_bytes(os.getpid()) + self._room.beside_bytes

    def _end_one(self) -> None:
        """The largest goes; its unit is tried again with more room."""
        sizes = [(worker.held_bytes(), worker) for worker in self._workers() if not worker.over_line_bytes]
        if not sizes:
            self.own_bytes = self._own() + self._meter.read().usage.total_bytes
            return
        size, worker = max(sizes, key=lambda pair: pair[0])
        worker.over_line_bytes = max(size, 1)
        worker.kill()
