"""Compute units in worker processes of this machine. The memory limiter decides how many run, and which one is killed.

Units that were lost are reported to the scheduler, which retries them.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import time
from multiprocessing.connection import wait
from typing import Any

from brim.compute.steps.step import HasEncoder, HasTypeInference
from brim.errors import MemoryLimitError
from brim.execution.failures import does_not_start, is_memory_abort, too_small
from brim.execution.memory_limiter import MemoryBudget, MemoryLimiter
from brim.execution.scheduler import Attempt, Event, TaskFailed, TaskLost, TaskQueue, TaskReturned
from brim.execution.unit_receipts import ReceiptWriter, UnitJob, UnitReceipts
from brim.execution.worker_messages import (
    ProbeDone,
    RowRange,
    UnitDone,
    UnitFailed,
    UnitOrder,
    WorkerPositions,
    WorkerReady,
    WorkerSetup,
)
from brim.execution.worker_process import WorkerProcess, keep_worker, take_warm_worker, threads_per_worker
from brim.memory.limit import headrooms, usable_cores
from brim.memory.meter import oom_kills

_QUICK_S = 0.25  # after such a unit, the next one is ordered before the present one is done
_POLL_S = 0.1
_EXIT_S = 5.0
_MOST_BAD_STARTS = 3
_DIFFERED = "differed"  # the note of a job whose encoders gave different ids


class ProcessBackend:
    """As many workers as fit; a unit that needs all memory runs alone."""

    def __init__(self, job: UnitJob, receipts: UnitReceipts) -> None:
        self._job, self._receipts, self._progress = job, receipts, job.progress
        self.most_workers = self.peak_bytes = 0
        self._workers: tuple[WorkerProcess, ...] = ()  # replaced, never modified: the limiter's thread reads it
        self._warm: WorkerProcess | None = None  # started before this job, for the first unit
        self.prefetch_count = job.workers or usable_cores()
        budget = MemoryBudget.measured(job.limit_bytes)
        self._limiter = MemoryLimiter(
            budget, self.prefetch_count, lambda: (*self._workers, *filter(None, [self._warm])), job.folder / "pause"
        )
        self._threads = threads_per_worker(self.prefetch_count)
        self._module = type(job.step).__module__
        # The work that a worker may do after this job: the same, or any if it ran no code of the user.
        self._repeats: str | None = getattr(job.step, "repeats", None)
        self._started = self._bad_starts = 0
        self._returned: list[Event] = []  # attempts that their workers have not started
        self._kernel_kills = oom_kills()
        # The types of the first batch, as hex; None until they are known.
        self._types: str | None = job.ledger.recall("types") if isinstance(job.step, HasTypeInference) else ""

    def __enter__(self) -> ProcessBackend:
        if self._job.limit_bytes < self._limiter.budget.smallest_limit_bytes:
            raise self._too_small(self._limiter.budget)
        if self._job.ledger.recall(_DIFFERED):
            self._use_reference()
        self._positions = WorkerPositions(self._job.folder / "positions", self.prefetch_count + 2)
        self._write_setup()
        self._warm = take_warm_worker(self._module, self._threads, self._repeats)
        self._limiter.__enter__()
        self._writer = ReceiptWriter(self._receipts, self._job.stop)
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
        self._limiter.__exit__()
        if self._warm is not None and not keep_worker(self._warm, self._module, self._threads, ""):
            self._warm.kill()
            self._warm.wait()
        self._wait_for_workers(_EXIT_S)
        self._positions.remove()

    def finish(self) -> None:
        """Let all workers exit; one may be kept for the next call of the program."""
        for worker in self._workers:
            is_usable = worker.is_ready and not worker.is_stale
            if is_usable and keep_worker(worker, self._module, self._threads, self._repeats):
                self._remove(worker)
            else:
                worker.exit()
        self.peak_bytes = self._limiter.peak_bytes

    def cancel(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._writer.close()
        self._wait_for_workers(None)

    def _write_setup(self) -> None:
        job = self._job
        setup = WorkerSetup(
            job.step,
            job.reading,
            job.writing,
            str(job.folder),
            str(job.folder / "pause"),
            job.on_error,
            self._threads,
            syncs=False,
            positions=str(self._positions.path),
            seed=job.seed,
        )
        (job.folder / "setup.pickle").write_bytes(pickle.dumps(setup))

    def _wait_for_workers(self, timeout_s: float | None) -> None:
        for worker in self._workers:
            worker.wait(timeout_s)
        self._workers = ()

    def _remove(self, worker: WorkerProcess) -> None:
        self._workers = tuple(item for item in self._workers if item is not worker)

    # Starting tasks

    @property
    def is_busy(self) -> bool:
        return self._has_busy_worker or self._writer.is_busy

    @property
    def _has_busy_worker(self) -> bool:
        return any(worker.attempt is not None for worker in self._workers)

    def start_tasks(self, queue: TaskQueue) -> None:
        self._queue = queue
        if self._limiter.own_bytes:
            raise MemoryLimitError(
                "This process alone uses more than the memory limit.",
                hint="Raise --memory, or let the process use less.",
                limit_bytes=self._job.limit_bytes,
                need_bytes=self._limiter.own_bytes,
            )
        if queue.first is not None and queue.first.is_exclusive:
            self._start_alone(queue)
            return
        target, is_low = self._limiter.target_workers(), self._limiter.is_low
        for worker in [worker for worker in self._workers if worker.is_ready and worker.attempt is None]:
            if len(self._workers) > target or worker.is_stale:
                self._dismiss(worker)
                continue
            if (is_low or self._types is None) and self._has_busy_worker:
                break  # memory is low; or the first batch is being computed, and all others take its types
            if self._writer.is_full or queue.peek() is None:
                return
            self._give(worker, queue.pop())
        self._start_workers(queue, target, is_low)
        if not is_low and len(self._workers) <= target:
            self._order_ahead(queue)

    def _start_workers(self, queue: TaskQueue, target: int, is_low: bool) -> None:
        # One always runs, otherwise nothing would ever happen again: if it does not fit, it shows that.
        while (not is_low or not self._workers) and len(self._workers) < target and queue.peek() is not None:
            starting = sum(not worker.is_ready for worker in self._workers)
            is_first_round = starting == len(self._workers)
            if (starting and not is_first_round) or starting >= queue.ready_count:
                return
            self._start()

    def _order_ahead(self, queue: TaskQueue) -> None:
        """Order the next unit of workers whose units take less time than an order."""
        for worker in self._workers:
            if worker.attempt is None or worker.next_attempt is not None or not worker.is_quick or worker.is_stale:
                continue
            attempt = None if self._writer.is_full or worker.attempt.is_exclusive else queue.peek()
            if attempt is None or attempt.is_exclusive:
                return
            worker.next_attempt = queue.pop()
            self._order(worker, worker.next_attempt)

    def _start_alone(self, queue: TaskQueue) -> None:
        """Start a unit that needs all memory: in a new process, once no other works."""
        if self._has_busy_worker:
            return
        new = [worker for worker in self._workers if worker.runs_alone]
        for worker in self._workers:
            if not worker.runs_alone:
                self._dismiss(worker)
        if not new:
            self._start().runs_alone = True
        elif new[0].is_ready:
            new[0].runs_alone = False  # for later units it is like any other
            self._give(new[0], queue.pop())

    def _start(self) -> WorkerProcess:
        self._started += 1
        setup = self._job.folder / "setup.pickle"
        if self._warm is not None:
            worker, self._warm = self._warm, None
            worker.start_job(self._started, setup)
        else:
            worker = WorkerProcess(self._started, setup, self._threads)
        slots = {running.slot for running in self._workers}
        worker.slot = next(slot for slot in range(len(slots) + 1) if slot not in slots)
        self._positions.clear(worker.slot)
        self._workers = (*self._workers, worker)
        self.most_workers = max(self.most_workers, len(self._workers))
        return worker

    def _give(self, worker: WorkerProcess, attempt: Attempt) -> None:
        self._set_attempt(worker, attempt)
        self._order(worker, attempt)

    def _set_attempt(self, worker: WorkerProcess, attempt: Attempt | None) -> None:
        worker.attempt, worker.seen_bytes, worker.peak_bytes = attempt, 0, 0
        worker.started_at = time.monotonic()

    def _order(self, worker: WorkerProcess, attempt: Attempt) -> None:
        types, release_bytes = self._types, self._limiter.release_bytes()
        unit, schema = attempt.task.work, bytes.fromhex(types or "")
        worker.send(UnitOrder(unit, attempt.parts, release_bytes, types is None, schema, worker.slot))

    def _dismiss(self, worker: WorkerProcess) -> None:
        """Let an idle worker exit, or kill it; its attempt is returned."""
        self._remove(worker)
        worker.exit() if worker.is_ready and worker.attempt is None else worker.kill()
        worker.wait(_EXIT_S)
        self._return(worker.attempt)

    def _return(self, attempt: Attempt | None) -> None:
        if attempt is not None:
            self._returned.append(TaskReturned(attempt, first=True))

    # Messages of workers

    def poll(self) -> list[Event]:
        by_connection = {worker.connection: worker for worker in self._workers}
        exits = [worker.exit_descriptor for worker in self._workers if worker.exit_descriptor >= 0]
        descriptors = [*exits, *self._queue.descriptors(), *self._writer.descriptors()]
        events: list[Event | None] = []
        for ready in wait([*by_connection, *descriptors], _POLL_S):
            if ready in by_connection:
                events.append(self._receive(by_connection[ready]))
        events += self._writer.events()
        for worker in self._workers:
            if worker.has_exited and not worker.connection.poll():
                events.append(self._handle_exit(worker))
        self._progress.advance(0)  # the gauge moves although a batch takes long
        for worker in self._workers:
            for text in worker.new_lines():
                self._progress.note(f"worker {worker.number}: {text}")
        events += self._returned
        self._returned = []
        return [event for event in events if event is not None]

    def _receive(self, worker: WorkerProcess) -> Event | None:
        try:
            message: Any = worker.connection.recv()
        except (EOFError, OSError):
            return self._handle_exit(worker)
        if isinstance(message, UnitFailed):
            if message.kind != "memory":
                return TaskFailed(message.error)
            if not worker.is_ready:
                return TaskFailed(self._too_small(self._limiter.budget_with(worker)))
            return self._lose_to_memory(worker, max(worker.peak_bytes, worker.held_bytes()))
        if isinstance(message, WorkerReady):
            worker.is_ready, worker.base_bytes = True, message.held_bytes
            self._limiter.record_ready(message.held_bytes)
        elif isinstance(message, UnitDone):
            self._handle_done(worker, message)
        elif isinstance(message, RowRange):
            self._advance(worker, message.seen_bytes)
        elif isinstance(message, ProbeDone):
            self._types = message.types.hex()
            self._job.ledger.remember("types", self._types)
            assert worker.attempt is not None
            self._order(worker, worker.attempt)  # the same worker continues at once
        return None

    def _advance(self, worker: WorkerProcess, seen_bytes: int) -> None:
        """Count batches as they are computed. A unit that is retried does not count twice."""
        if worker.attempt is not None and worker.attempt.held_bytes == 0:
            seen_in_task = min(seen_bytes, worker.attempt.task.bytes)
            self._progress.advance(max(seen_in_task - worker.seen_bytes, 0))
            worker.seen_bytes = max(seen_in_task, worker.seen_bytes)

    def _handle_done(self, worker: WorkerProcess, result: UnitDone) -> None:
        attempt = worker.attempt
        assert attempt is not None
        self._writer.add(attempt.task, result)
        self._advance(worker, attempt.task.bytes)
        self._limiter.record_unit(worker.peak_bytes, worker.base_bytes, attempt.is_exclusive)
        worker.is_quick = time.monotonic() - worker.started_at < _QUICK_S
        next_attempt, worker.next_attempt = worker.next_attempt, None
        self._set_attempt(worker, next_attempt)
        if result.differed and not self._job.ledger.recall(_DIFFERED):
            # The fast encoder gave other ids, or cannot load the tokenizer. Workers with the old setup are replaced.
            self._progress.note(f"{result.differed}; the rest is done by the reference")
            self._job.ledger.remember(_DIFFERED, result.differed)
            self._use_reference()
            self._write_setup()
            for running in self._workers:
                running.is_stale = running is not worker
        is_outdated = worker.is_stale and worker.attempt is not None
        if self._limiter.should_replace(worker, result.held_bytes) or is_outdated:
            self._dismiss(worker)

    def _use_reference(self) -> None:
        if isinstance(self._job.step, HasEncoder):
            self._job.step.use_reference()

    # Failures

    def _handle_exit(self, worker: WorkerProcess) -> Event | None:
        code = worker.wait(_EXIT_S)
        worker.kill_children()
        self._remove(worker)
        output = worker.last_output()
        was_memory = bool(worker.killed_at_bytes) or is_memory_abort(code, output)
        if code == -signal.SIGKILL and not worker.killed_at_bytes:
            # Perhaps the kernel killed it for memory: its counter changed, or the worker held much.
            kills, self._kernel_kills = self._kernel_kills, oom_kills()
            was_large = worker.peak_bytes > self._limiter.budget.bytes_per_worker(1) // 2
            was_memory = was_memory or kills != self._kernel_kills or was_large
        if not worker.is_ready:
            return self._handle_failed_start(worker, code, output)
        attempt = worker.attempt
        if attempt is None:
            return None
        if was_memory:
            by_kernel = code == -signal.SIGKILL and not worker.killed_at_bytes
            return self._lose_to_memory(worker, worker.killed_at_bytes or worker.peak_bytes, by_kernel)
        self._return(worker.next_attempt)
        return self._job.crash_lost(attempt, code, output, self._rows(worker))

    def _rows(self, worker: WorkerProcess) -> RowRange | None:
        """Return the last rows that a worker has begun."""
        return None if worker.attempt is None else self._positions.find(worker.slot, worker.attempt.task.work.number)

    def _handle_failed_start(self, worker: WorkerProcess, code: int, output: str) -> Event | None:
        """Handle a killed worker: other workers may have used too much memory, or another program killed it."""
        if worker.killed_at_bytes and not self._workers:
            return TaskFailed(self._too_small(self._limiter.budget_with(worker)))
        if worker.was_warm:
            return None  # a new one is started instead, and reports the error
        self._bad_starts += 1
        if code != -signal.SIGKILL or self._bad_starts > _MOST_BAD_STARTS:
            return TaskFailed(does_not_start(code, output, self._job.limit_bytes))
        if worker.killed_at_bytes:
            self._limiter.record_failed_start()
        return None

    def _too_small(self, budget: MemoryBudget) -> MemoryLimitError:
        free = min((headroom.bytes for headroom in headrooms(os.environ)), default=0)
        return too_small(budget, self._job.held_bytes, free // 2)

    def _lose_to_memory(self, worker: WorkerProcess, held_bytes: int, by_kernel: bool = False) -> TaskLost:
        attempt, rows = worker.attempt, self._rows(worker)
        assert attempt is not None
        self._return(worker.next_attempt)
        was_exclusive = attempt.is_exclusive or all(running is worker for running in self._workers)
        if worker in self._workers:  # it reported this itself, and its state is unknown
            worker.attempt = None
            worker.kill()
            worker.wait()
            self._remove(worker)
        self._limiter.record_shortage(was_exclusive, self._receipts.stats.computed)
        text = f"unit {attempt.task.work.number} ran out of memory"
        error = functools.partial(self._job.memory_error, attempt, rows, held_bytes, by_kernel, worker.base_bytes)
        return TaskLost(attempt, "memory", text, error, rows, held_bytes, was_exclusive)
