"""Units done by worker processes of this machine: as many as fit in the limit, which is held by ending the largest.

What was lost so is told to the scheduler, which tries it again.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
import time
from collections import deque
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from brim.compute.steps.step import Changes, Encodes, Settles
from brim.errors import MemoryLimitError
from brim.execution.failures import aborted_for_memory, crashed, does_not_start, exit_words, too_small
from brim.execution.memory_limiter import Gate, HeldLine, WorkerRoom
from brim.execution.run_units import Settling, UnitReceipts, UnitWork
from brim.execution.scheduler import Attempt, Event, TaskAgain, TaskFailed, TaskLost, TaskQueue
from brim.execution.worker_messages import At, Done, Failed, Order, Probed, Ready, Setup, Whereabouts
from brim.execution.worker_process import ANYTHING, WorkerProcess, caller_bytes, keep_worker, take_spares, threads_of
from brim.memory.limit import headrooms, usable_cores
from brim.memory.meter import oom_kills, process_bytes

_QUICK_S = 0.25  # a unit that takes no longer is given before the one before it is done
_SHOW_S = 0.1  # how often the gauge moves while nothing happens
_END_S = 5.0
_PYTHON_BYTES, _UNSEEN_BYTES = 50 << 20, 80 << 20  # a worker with pyarrow and nothing else; with some imports
_KEPT_BYTES = 64 << 20  # what a worker may keep from unit to unit
_DIFFERED = "differed"  # the note of a job whose encoders were seen to differ
_SEEN, _RARE, _BAD_STARTS = 16, 8, 3
_REST_BYTES, _REST_S = 1 << 20, 1.0  # a last unit so small is not worth another process before so long


class ProcessBackend:
    """Units done by processes of this machine: as many as fit, a unit that needs all the room alone."""

    def __init__(self, work: UnitWork, receipts: UnitReceipts) -> None:
        self._work, self._receipts, self._progress = work, receipts, work.progress
        self.most_workers = self.peak_bytes = 0
        self._workers: tuple[WorkerProcess, ...] = ()  # replaced, never changed: the line's thread reads it
        self._limit = work.options.limit_bytes
        here = caller_bytes()
        self._room = WorkerRoom(self._limit, here, _PYTHON_BYTES, max(here - process_bytes(os.getpid()), 0))
        self._most = self.ahead = work.options.workers or usable_cores()
        self._threads = threads_of(self._most)
        self._module = type(work.step).__module__
        # What a worker that has done this step may do again: the same, anything if it ran nothing of the user's.
        self._repeats: str | None = getattr(work.step, "repeats", None)
        self._spares: tuple[WorkerProcess, ...] = ()  # started before this job, for the first units
        self._taken: deque[int] = deque(maxlen=_SEEN)  # what units took above what their worker holds at rest
        self._started = self._bad_starts = self._shortages = 0
        self._given_back: list[Event] = []  # by workers that did not come to it
        self._largest_bytes, self._began = 0, time.monotonic()
        self._kills = oom_kills()
        # The types of the first batch, as hex; None until they are known.
        self._types: str | None = work.ledger.recall("types") if isinstance(work.step, Settles) else ""

    def __enter__(self) -> ProcessBackend:
        if self._limit < self._room.smallest_bytes:
            raise self._too_small(self._room)
        if self._work.ledger.recall(_DIFFERED):
            self._use_reference()
        self._gate = Gate(self._work.folder / "gate")
        self._whereabouts = Whereabouts(self._work.folder / "whereabouts", self._most + 2)
        self._write_setup()
        self._spares = tuple(take_spares(self._module, self._threads, self._repeats))
        self._line = HeldLine(self._room, lambda: (*self._workers, *self._spares), self._gate)
        self._line.__enter__()
        self._settling = Settling(self._receipts, self._work.folder, self._work.stop, self._work.boot)
        return self

    def __exit__(self, *_: object) -> None:
        self._settling.close()
        self._line.__exit__()
        for spare in self._spares:
            if not keep_worker(spare, self._module, self._threads, ANYTHING):
                spare.kill()
                spare.wait()
        self._end_workers(_END_S)
        self._gate.remove()
        self._whereabouts.remove()

    def finish(self) -> None:
        for worker in self._workers:
            if not worker.ready or worker.stale or not self._stays(worker):
                worker.end()
        self.peak_bytes = self._line.peak_bytes

    def _stays(self, worker: WorkerProcess) -> bool:
        """Whether it is kept for the next call of the program."""
        kept = keep_worker(worker, self._module, self._threads, self._repeats)
        if kept:
            self._workers = tuple(other for other in self._workers if other is not worker)
        return kept

    def drop(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._settling.close()
        self._end_workers(None)

    def _write_setup(self) -> None:
        work = self._work
        gate, on_error = str(self._gate.path), work.options.on_error
        setup = Setup(
            work.step,
            work.reading,
            work.writing,
            str(work.folder),
            gate,
            on_error,
            self._threads,
            lasts=False,
            whereabouts=str(self._whereabouts.path),
            seed=work.seed,
        )
        (work.folder / "setup.pickle").write_bytes(pickle.dumps(setup))

    def _end_workers(self, timeout_s: float | None) -> None:
        for worker in self._workers:
            worker.wait(timeout_s)
        self._workers = ()

    # Room

    @property
    def busy(self) -> bool:
        return bool(self._busy()) or self._settling.busy

    def _busy(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.attempt is not None]

    def admit(self, queue: TaskQueue) -> None:
        self._queue = queue
        if self._line.own_bytes:
            raise MemoryLimitError(
                "This process itself holds more than the limit, without any work.",
                hint="Give it more with --memory, or let it hold less.",
                limit_bytes=self._limit,
                need_bytes=self._line.own_bytes,
            )
        if queue.first is not None and queue.first.alone:
            self._admit_alone(queue)
        else:
            self._admit_some(queue, self._line.tight)

    def _admit_some(self, queue: TaskQueue, tight: bool) -> None:
        wanted = self._wanted()
        idle = [worker for worker in self._workers if worker.ready and worker.attempt is None]
        for worker in idle:
            if len(self._workers) > wanted or worker.stale:
                self._let_go(worker)
                continue
            if (tight or self._types is None) and self._busy():
                break  # memory is short; or the first batch is on its way, and all others take its types
            if self._settling.full or queue.find() is None:
                return
            self._give(worker, queue.pop())
        self._start_some(queue, wanted, tight)
        if not tight and len(self._workers) <= wanted:
            self._give_ahead(queue)

    def _give_ahead(self, queue: TaskQueue) -> None:
        """The next unit of workers that do one in less time than is worth waiting for an order."""
        for worker in self._workers:
            if worker.attempt is None or worker.ahead is not None or not worker.is_quick or worker.stale:
                continue
            next_one = None if self._settling.full or worker.attempt.alone else queue.find()
            if next_one is None or next_one.alone:
                return
            worker.ahead = queue.pop()
            self._order(worker, worker.ahead)

    def _start_some(self, queue: TaskQueue, wanted: int, tight: bool) -> None:
        # One is always there, or nothing would ever happen again: if it does not fit, that is found out by it.
        while (not tight or not self._workers) and len(self._workers) < wanted and queue.find() is not None:
            starting = [worker for worker in self._workers if not worker.ready]
            one_by_one = len(starting) < len(self._workers)
            if (starting and one_by_one) or len(starting) >= queue.ahead or self._is_small_rest(queue, len(starting)):
                return
            self._start()

    def _is_small_rest(self, queue: TaskQueue, starting: int) -> bool:
        """Whether those that are there will have done all that is left before another one has loaded what it needs."""
        total = self._work.source.total_bytes
        if queue.first is not None:
            self._largest_bytes = max(self._largest_bytes, queue.first.unit.bytes)
        if not self._workers or self._spares or total is None or queue.ahead - starting > 1:
            return False
        return total - self._largest_bytes < _REST_BYTES and time.monotonic() - self._began < _REST_S

    def _admit_alone(self, queue: TaskQueue) -> None:
        """A unit that needs all the room: once nobody else works, in a fresh process."""
        if self._busy():
            return
        fresh = [worker for worker in self._workers if worker.alone]
        for worker in self._workers:
            if not worker.alone:
                self._let_go(worker)
        if not fresh:
            self._start().alone = True
        elif fresh[0].ready:
            fresh[0].alone = False  # for the units after this one it is like any other
            self._give(fresh[0], queue.pop())

    def _wanted(self) -> int:
        if not any(worker.ready for worker in self._workers):
            # Several at once only if there is room for workers that load much; else the first one shows what they take.
            return replace(self._room, worker_bytes=_UNSEEN_BYTES).workers(0, self._most)
        # A rare unit that takes more is done alone: it need not slow down all others.
        usual = sorted(self._taken)[3 * len(self._taken) // 4] if self._taken else 0
        return self._room.workers(round(1.1 * usual), self._most)

    def _start(self) -> WorkerProcess:
        self._started += 1
        setup = self._work.folder / "setup.pickle"
        if self._spares:
            worker, self._spares = self._spares[0], self._spares[1:]
            worker.begin(self._started, setup)
        else:
            worker = WorkerProcess(self._started, setup, self._threads)
        taken = {other.slot for other in self._workers}
        worker.slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self._whereabouts.forget(worker.slot)
        self._workers = (*self._workers, worker)
        self.most_workers = max(self.most_workers, len(self._workers))
        return worker

    def _give(self, worker: WorkerProcess, attempt: Attempt) -> None:
        self._begins(worker, attempt)
        self._order(worker, attempt)

    def _begins(self, worker: WorkerProcess, attempt: Attempt | None) -> None:
        worker.attempt, worker.seen_bytes, worker.peak_bytes = attempt, 0, 0
        worker.begun_at = time.monotonic()

    def _order(self, worker: WorkerProcess, attempt: Attempt) -> None:
        soft = round(0.9 * self._room.share_bytes(len(self._workers)))
        types = self._types
        known = bytes.fromhex(types or "")
        worker.send(Order(attempt.unit, attempt.pieces, soft, types is None, known, worker.slot))

    def _let_go(self, worker: WorkerProcess) -> None:
        """What it has been given by then is somebody else's to do."""
        self._workers = tuple(other for other in self._workers if other is not worker)
        worker.end() if worker.ready and worker.attempt is None else worker.kill()
        worker.wait(_END_S)
        self._give_back(worker.attempt)

    def _give_back(self, attempt: Attempt | None) -> None:
        if attempt is not None:
            self._given_back.append(TaskAgain(attempt, first=True))

    # What workers say

    def listen(self) -> list[Event]:
        by_connection = {worker.connection: worker for worker in self._workers}
        ends = [worker.end_descriptor for worker in self._workers if worker.end_descriptor >= 0]
        news = self._queue.news()  # a unit that is made, if anybody waits for one
        events: list[Event | None] = []
        for said in wait([*by_connection, *ends, *news, *self._settling.news()], _SHOW_S):
            if said in by_connection:
                events.append(self._hear(by_connection[said]))
        events += self._settling.events()
        for worker in self._workers:
            if worker.ended and not worker.connection.poll():
                events.append(self._died(worker))
        self._progress.advance(0)  # the gauge moves on while a batch takes its time
        for worker in self._workers:
            for text in worker.new_lines():
                self._progress.note(f"worker {worker.number}: {text}")
        events += self._given_back
        self._given_back = []
        return [event for event in events if event is not None]

    def _hear(self, worker: WorkerProcess) -> Event | None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            return self._died(worker)
        return self._take(worker, message)

    def _take(self, worker: WorkerProcess, message: Any) -> Event | None:
        if isinstance(message, Failed):
            return self._failed(worker, message)
        if isinstance(message, Ready):
            self._is_ready(worker, message)
        elif isinstance(message, Done):
            self._is_done(worker, message)
        elif isinstance(message, At):
            self._advance(worker, message.seen_bytes)
        elif isinstance(message, Probed):
            self._types = message.types.hex()
            self._work.ledger.remember("types", self._types)
            assert worker.attempt is not None
            self._order(worker, worker.attempt)  # the same worker goes on at once
        return None

    def _advance(self, worker: WorkerProcess, seen_bytes: int) -> None:
        """Batches count as they go by; a unit that is tried again does not count twice."""
        if worker.attempt is not None and worker.attempt.held_bytes == 0:
            seen = min(seen_bytes, worker.attempt.unit.bytes)
            self._progress.advance(max(seen - worker.seen_bytes, 0))
            worker.seen_bytes = max(seen, worker.seen_bytes)

    def _is_ready(self, worker: WorkerProcess, message: Ready) -> None:
        worker.ready, worker.base_bytes = True, message.held_bytes
        parent = max(process_bytes(os.getpid()) + self._room.beside_bytes, self._room.parent_bytes)
        worker_bytes = max(message.held_bytes, self._room.worker_bytes)
        self._room = replace(self._room, parent_bytes=parent, worker_bytes=worker_bytes)

    def _is_done(self, worker: WorkerProcess, done: Done) -> None:
        attempt = worker.attempt
        assert attempt is not None
        self._settling.take(attempt.task, done)
        if isinstance(self._work.step, Changes):
            self._work.step.take_changes(worker.number, done.changes)
        self._advance(worker, attempt.unit.bytes)
        if not attempt.alone:
            self._taken.append(max(worker.peak_bytes - worker.base_bytes, 0))
        worker.is_quick = time.monotonic() - worker.begun_at < _QUICK_S
        following, worker.ahead = worker.ahead, None
        self._begins(worker, following)
        if done.differed:
            self._leave_fast(worker, done.differed)
        kept = done.held_bytes - worker.base_bytes
        if kept > max(_KEPT_BYTES, self._room.share_bytes(len(self._workers)) // 4):
            self._let_go(worker)  # its memory does not come back: a fresh one takes its place
        elif worker.stale and worker.attempt is not None:
            self._let_go(worker)

    def _failed(self, worker: WorkerProcess, failed: Failed) -> Event:
        if failed.kind != "memory":
            return TaskFailed(failed.error)
        if not worker.ready:
            return TaskFailed(self._too_small(self._room_with(worker)))
        return self._out_of_memory(worker, max(worker.peak_bytes, worker.held_bytes()))

    def _leave_fast(self, who: WorkerProcess, differed: str) -> None:
        """The fast encoder gave other ids or cannot load the tokenizer: what is not done yet is done by the slower one.

        Workers of before go.
        """
        if self._work.ledger.recall(_DIFFERED):
            return
        self._progress.note(f"{differed}; the rest is done by the reference")
        self._work.ledger.remember(_DIFFERED, differed)
        self._use_reference()
        self._write_setup()
        for worker in self._workers:
            worker.stale = worker is not who

    def _use_reference(self) -> None:
        if isinstance(self._work.step, Encodes):
            self._work.step.use_reference()

    # What goes wrong

    def _died(self, worker: WorkerProcess) -> Event | None:
        code = worker.wait(_END_S)
        worker.kill_children()
        self._workers = tuple(other for other in self._workers if other is not worker)
        words = worker.last_words()
        memory = bool(worker.over_line_bytes) or (code == -signal.SIGKILL and self._was_full(worker))
        memory = memory or aborted_for_memory(code, words)
        if not worker.ready:
            return self._did_not_start(worker, code, words)
        attempt, at = worker.attempt, self._at(worker)
        if attempt is None:
            return None
        if memory:
            by_kernel = code == -signal.SIGKILL and not worker.over_line_bytes
            return self._out_of_memory(worker, worker.over_line_bytes or worker.peak_bytes, by_kernel)
        self._give_back(worker.ahead)
        what = f"a worker died ({exit_words(code)}) at unit {attempt.unit.number}"
        reading = self._work.source.reading
        return TaskLost(attempt, "crash", what, lambda: crashed(attempt, reading, code, words, at), at)

    def _at(self, worker: WorkerProcess) -> At | None:
        """Where it was last."""
        return None if worker.attempt is None else self._whereabouts.find(worker.slot, worker.attempt.unit.number)

    def _was_full(self, worker: WorkerProcess) -> bool:
        """Whether a SIGKILL that was not ours can be the kernel's for want of memory: it says so, or there was much."""
        kills, self._kills = self._kills, oom_kills()
        return kills != self._kills or worker.peak_bytes > self._room.share_bytes(1) // 2

    def _did_not_start(self, worker: WorkerProcess, code: int, words: str) -> Event | None:
        """With others beside it, there may only be too many; and whoever kills may do it once."""
        if worker.over_line_bytes and not self._workers:
            return TaskFailed(self._too_small(self._room_with(worker)))
        if worker.was_spare:
            return None  # another one is started from the beginning, and tells what is wrong
        self._bad_starts += 1
        if code != -signal.SIGKILL or self._bad_starts > _BAD_STARTS:
            return TaskFailed(does_not_start(code, words, self._limit))
        if worker.over_line_bytes:
            self._most = max(len(self._workers), 1)
        return None

    def _too_small(self, room: WorkerRoom) -> MemoryLimitError:
        free = min((each.bytes for each in headrooms(os.environ)), default=0)
        return too_small(room, self._work.options.held_bytes, free // 2)

    def _room_with(self, worker: WorkerProcess) -> WorkerRoom:
        """The room, now that a worker was seen to need more before its first row."""
        held = max(self._room.worker_bytes, worker.over_line_bytes, worker.peak_bytes)
        return replace(self._room, worker_bytes=held)

    def _out_of_memory(self, worker: WorkerProcess, held_bytes: int, by_kernel: bool = False) -> TaskLost:
        attempt, at = worker.attempt, self._at(worker)
        assert attempt is not None
        self._give_back(worker.ahead)
        was_alone = attempt.alone or len([w for w in self._workers if w is not worker]) == 0
        if worker in self._workers:  # it said so itself, and what it holds is in doubt
            worker.attempt = None
            worker.kill()
            worker.wait()
            self._workers = tuple(other for other in self._workers if other is not worker)
        self._shortages += 1
        if not was_alone and self._shortages > 1 + self._receipts.computed // _RARE:
            self._most = max(self._most - 1, 1)
        what = f"unit {attempt.unit.number} ran out of memory"
        end = functools.partial(self._work.does_not_fit, attempt, at, held_bytes, by_kernel, worker.base_bytes)
        return TaskLost(attempt, "memory", what, end, at, held_bytes, was_alone)
