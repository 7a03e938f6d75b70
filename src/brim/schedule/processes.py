"""One run over the units of a source: workers as many as fit, every finished unit remembered, failures tried again.

The order of things is what makes a crash harmless: a unit's file is on disk before its receipt is written, and a
receipt is on disk before anything depends on it. Nothing here decides what the rows are: that is the plan's.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from brim.errors import DoesNotFit
from brim.memory.limit import usable_cores
from brim.memory.machine import oom_kills
from brim.memory.meter import process_bytes
from brim.outputs.rows_file import Writing
from brim.progress import Progress
from brim.rows.unit import RowSource, Unit
from brim.schedule.attempts import Attempt
from brim.schedule.memory_line import Gate, HeldLine, WorkerRoom
from brim.schedule.messages import At, Done, Failed, Order, Probed, Ready, Setup
from brim.schedule.unit_work import ComputeOptions, DoneUnits, Outcome, clear_scratch
from brim.schedule.work_failures import aborted_for_memory, crashed, does_not_fit, does_not_start, exit_words, too_small
from brim.schedule.worker_process import WorkerProcess
from brim.state.ledger import Ledger
from brim.state.stop import Stop
from brim.steps.step import Encodes, Settles, Step


class Feed:
    """The units of a source, a few ahead. Closing it ends the thread, whatever the source is doing."""

    def __init__(self, units: Iterator[Unit], ahead: int) -> None:
        self._units = units
        self._queue: queue.Queue[Unit] = queue.Queue(max(ahead, 1))
        self._closed = threading.Event()
        self._made = self._taken = 0  # each is counted by one thread alone
        self._over = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="units", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for unit in self._units:
                self._made += 1
                if not self._put(unit):
                    return
        except BaseException as error:  # noqa: BLE001  it is raised where units are taken
            self._failed = error
        self._over = True

    def _put(self, unit: Unit) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(unit, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    @property
    def ahead(self) -> int:
        """How many units are made and not taken."""
        return self._made - self._taken

    @property
    def exhausted(self) -> bool:
        """Whether there is none left and none will come. Raises what ended the source, once all before it is taken."""
        if not self._over or self.ahead:
            return False
        if self._failed is not None:
            raise self._failed
        return True

    def take(self) -> Unit | None:
        """The next unit, if there is one yet."""
        try:
            unit = self._queue.get_nowait()
        except queue.Empty:
            return None
        self._taken += 1
        return unit

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5.0)


_LISTEN_S, _FIRST_S = 0.1, 0.01
_END_S = 5.0
_PYTHON_BYTES, _UNSEEN_BYTES = 50 << 20, 80 << 20  # a worker with pyarrow and nothing else; with some imports
_KEPT_BYTES = 64 << 20  # what a worker may keep from unit to unit
_DIFFERED = "differed"  # the note of a job whose encoders were seen to differ
_SEEN, _RARE, _BAD_STARTS = 16, 8, 3


class Computation:
    """The units of one job, done by processes of this machine.

    Whoever calls it holds the lock of `folder`, where unit files and receipts are.
    """

    def __init__(
        self,
        source: RowSource,
        step: Step,
        writing: Writing,
        ledger: Ledger,
        folder: Path,
        options: ComputeOptions,
        progress: Progress,
        stop: Stop,
    ) -> None:
        self.source, self.step, self.writing, self.options = source, step, writing, options
        self.ledger, self.folder, self.progress, self.stop = ledger, folder, progress, stop
        self.outcome = Outcome()
        self.done = DoneUnits(ledger, folder, writing.format)
        self._workers: tuple[WorkerProcess, ...] = ()  # replaced, never changed: the line's thread reads it
        self._waiting: deque[Attempt] = deque()  # what was tried before, and the next unit
        self._room = WorkerRoom(options.limit_bytes, process_bytes(os.getpid()), _PYTHON_BYTES)
        self._most = options.workers or usable_cores()
        self._taken: deque[int] = deque(maxlen=_SEEN)  # what units took above what their worker holds at rest
        self._started = self._bad_starts = self._shortages = 0
        self._kills = oom_kills()
        # The types of the first batch, as hex; None until they are known.
        self._types: str | None = ledger.recall("types") if isinstance(step, Settles) else ""

    def run(self) -> Outcome:
        clear_scratch(self.folder)
        if self.options.limit_bytes < self._room.smallest_bytes:
            raise too_small(self._room, known=False)
        spool = self.folder / "spool"
        spool.mkdir()
        gate = Gate(self.folder / "gate")
        if self.ledger.recall(_DIFFERED):
            self._use_reference()
        self._gate = str(gate.path)
        self._write_setup()
        self.progress.start(self.options.what, self.source.total_bytes or 0, 0, self.options.limit_bytes)
        units = self.source.units(self.options.align, indices=self.step.indices, spool=spool, skip=self.done.has)
        feed = Feed(units, self._most)
        try:
            with HeldLine(self._room, lambda: self._workers, gate) as line:
                self._loop(feed, line)
                for worker in self._workers:
                    worker.end()
                self.outcome.peak_bytes = line.peak_bytes
            self._end_workers(_END_S)
        finally:
            for worker in self._workers:
                worker.kill()
            self._end_workers(None)
            feed.close()
            gate.remove()
            clear_scratch(self.folder)
        self.outcome.receipts = self.done.receipts
        self.outcome.bad_rows = self.done.bad_rows
        self.outcome.encoders = self.done.encoders
        return self.outcome

    def _write_setup(self) -> None:
        threads = max(usable_cores() // self._most, 1)
        reading = self.source.reading
        if self.step.columns is not None:
            reading = replace(reading, columns=self.step.columns)
        setup = Setup(
            self.step,
            reading,
            self.writing,
            str(self.folder),
            self._gate,
            self.options.on_error,
            threads,
        )
        self._threads = threads
        (self.folder / "setup.pickle").write_bytes(pickle.dumps(setup))

    def _end_workers(self, timeout_s: float | None) -> None:
        for worker in self._workers:
            worker.wait(timeout_s)
        self._workers = ()

    def _find_work(self, feed: Feed) -> bool:
        """Whether there is something to do now. Units that are done already are not worth a worker."""
        while not self._waiting and (unit := feed.take()) is not None:
            if self.done.keep(unit):
                self.progress.advance(unit.bytes)
            else:
                self._waiting.append(Attempt(unit))
        return bool(self._waiting)

    # The loop

    def _loop(self, feed: Feed, line: HeldLine) -> None:
        while True:
            self.stop.check()
            if line.own_bytes:
                raise DoesNotFit(
                    "This process itself holds more than the limit, without any work.",
                    hint="Give it more with --memory, or let it hold less.",
                    limit_bytes=self.options.limit_bytes,
                    need_bytes=line.own_bytes,
                )
            self._admit(feed, line.tight)
            if feed.exhausted and not self._waiting and not self._busy():
                return
            self._listen()

    def _busy(self) -> list[WorkerProcess]:
        return [worker for worker in self._workers if worker.attempt is not None]

    def _admit(self, feed: Feed, tight: bool) -> None:
        if self._waiting and self._waiting[0].alone:
            self._admit_alone()
            return
        wanted = self._wanted()
        idle = [worker for worker in self._workers if worker.ready and worker.attempt is None]
        for worker in idle:
            if len(self._workers) > wanted or worker.stale:
                self._let_go(worker)
                continue
            if (tight or self._types is None) and self._busy():
                break  # memory is short; or the first batch is on its way, and all others take its types
            if not self._find_work(feed):
                return
            self._give(worker, self._waiting.popleft())
        while not tight and len(self._workers) < wanted and self._find_work(feed):
            starting = [worker for worker in self._workers if not worker.ready]
            one_by_one = len(starting) < len(self._workers)
            if (starting and one_by_one) or len(starting) >= len(self._waiting) + feed.ahead:
                return
            self._start()

    def _admit_alone(self) -> None:
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
            self._give(fresh[0], self._waiting.popleft())

    def _wanted(self) -> int:
        if not any(worker.ready for worker in self._workers):
            # Several at once only if there is room for workers that load much; else the first one shows what they take.
            return replace(self._room, worker_bytes=_UNSEEN_BYTES).workers(0, self._most)
        # A rare unit that takes more is done alone: it need not slow down all others.
        usual = sorted(self._taken)[3 * len(self._taken) // 4] if self._taken else 0
        return self._room.workers(round(1.1 * usual), self._most)

    def _start(self) -> WorkerProcess:
        self._started += 1
        worker = WorkerProcess(self._started, self.folder / "setup.pickle", self._threads)
        self._workers = (*self._workers, worker)
        self.outcome.workers = max(self.outcome.workers, len(self._workers))
        return worker

    def _give(self, worker: WorkerProcess, attempt: Attempt) -> None:
        worker.attempt, worker.at, worker.seen_bytes, worker.peak_bytes = attempt, None, 0, 0
        soft = round(0.9 * self._room.share_bytes(len(self._workers)))
        types = self._types
        worker.send(Order(attempt.unit, attempt.pieces, soft, types is None, bytes.fromhex(types or "")))

    def _let_go(self, worker: WorkerProcess) -> None:
        self._workers = tuple(other for other in self._workers if other is not worker)
        worker.end() if worker.ready else worker.kill()
        worker.wait(_END_S)

    # What workers say

    def _listen(self) -> None:
        by_connection = {worker.connection: worker for worker in self._workers}
        if not by_connection:
            time.sleep(_FIRST_S)  # the first units are being made
        for connection in wait(list(by_connection), _LISTEN_S) if by_connection else []:
            worker = by_connection[connection]  # type: ignore[index]
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._died(worker)
                continue
            self._take(worker, message)
        for worker in self._workers:
            if worker.ended and not worker.connection.poll():
                self._died(worker)
        self.progress.advance(0)  # the gauge moves on while a batch takes its time
        for worker in self._workers:
            for text in worker.new_lines():
                self.progress.note(f"worker {worker.number}: {text}")

    def _take(self, worker: WorkerProcess, message: Any) -> None:
        if isinstance(message, Ready):
            self._is_ready(worker, message)
        elif isinstance(message, At):
            worker.at = message
            self._advance(worker, message.seen_bytes)
        elif isinstance(message, Probed):
            self._types = message.types.hex()
            self.ledger.remember("types", self._types)
            assert worker.attempt is not None
            self._give(worker, worker.attempt)
        elif isinstance(message, Done):
            self._is_done(worker, message)
        elif isinstance(message, Failed) and message.kind == "memory":
            if not worker.ready:
                raise too_small(self._room_with(worker), known=False)
            self._out_of_memory(worker, max(worker.peak_bytes, worker.held_bytes()))
        elif isinstance(message, Failed):
            raise message.error

    def _advance(self, worker: WorkerProcess, seen_bytes: int) -> None:
        """Batches count as they go by; a unit that is tried again does not count twice."""
        if worker.attempt is not None and worker.attempt.held_bytes == 0:
            seen = min(seen_bytes, worker.attempt.unit.bytes)
            self.progress.advance(max(seen - worker.seen_bytes, 0))
            worker.seen_bytes = max(seen, worker.seen_bytes)

    def _is_ready(self, worker: WorkerProcess, message: Ready) -> None:
        worker.ready, worker.base_bytes = True, message.held_bytes
        parent = max(process_bytes(os.getpid()), self._room.parent_bytes)
        self._room = WorkerRoom(self.options.limit_bytes, parent, max(message.held_bytes, self._room.worker_bytes))
        if self._room.smallest_bytes > self.options.limit_bytes and self.outcome.computed == 0:
            raise too_small(self._room, known=True)

    def _is_done(self, worker: WorkerProcess, done: Done) -> None:
        attempt = worker.attempt
        assert attempt is not None
        unit = attempt.unit
        self.done.add(unit, done)
        self.outcome.computed += 1
        self._advance(worker, unit.bytes)
        self.progress.shard(f"unit {unit.number}", done.size, done.sha256, "computed")
        if unit.spooled:
            for span in unit.spans:
                Path(span.path).unlink(missing_ok=True)
        if not attempt.alone:
            self._taken.append(max(worker.peak_bytes - worker.base_bytes, 0))
        worker.attempt = None
        if done.differed:
            self._leave_fast(worker, done.differed)
        kept = done.held_bytes - worker.base_bytes
        if kept > max(_KEPT_BYTES, self._room.share_bytes(len(self._workers)) // 4):
            self._let_go(worker)  # its memory does not come back: a fresh one takes its place

    def _leave_fast(self, who: WorkerProcess, differed: str) -> None:
        """Two encoders gave other ids: what is not done yet is done by the slower one. Workers of before go."""
        if self.ledger.recall(_DIFFERED):
            return
        self.progress.note(f"{differed}; the rest is done by the reference")
        self.ledger.remember(_DIFFERED, differed)
        self._use_reference()
        self._write_setup()
        for worker in self._workers:
            worker.stale = worker is not who

    def _use_reference(self) -> None:
        if isinstance(self.step, Encodes):
            self.step.use_reference()

    # What goes wrong

    def _died(self, worker: WorkerProcess) -> None:
        code = worker.wait(_END_S)
        worker.kill_children()
        self._workers = tuple(other for other in self._workers if other is not worker)
        words = worker.last_words()
        memory = bool(worker.over_line_bytes) or (code == -signal.SIGKILL and self._was_full(worker))
        memory = memory or aborted_for_memory(code, words)
        if not worker.ready:
            self._did_not_start(worker, code, words)
            return
        if worker.attempt is None:
            return
        if memory:
            self._out_of_memory(worker, worker.over_line_bytes or worker.peak_bytes)
            return
        again = worker.attempt.after_crash(worker.at)
        if again is None:
            raise crashed(worker.attempt, self.source.reading, code, words, worker.at)
        self.progress.note(f"a worker died ({exit_words(code)}) at unit {again.unit.number}: trying it again")
        self.outcome.retries += 1
        self._waiting.append(again)

    def _was_full(self, worker: WorkerProcess) -> bool:
        """Whether a SIGKILL that was not ours can be the kernel's for want of memory: it says so, or there was much."""
        kills, self._kills = self._kills, oom_kills()
        return kills != self._kills or worker.peak_bytes > self._room.share_bytes(1) // 2

    def _did_not_start(self, worker: WorkerProcess, code: int, words: str) -> None:
        """With others beside it, there may only be too many; and whoever kills may do it once."""
        if worker.over_line_bytes and not self._workers:
            raise too_small(self._room_with(worker), known=False)
        self._bad_starts += 1
        if code != -signal.SIGKILL or self._bad_starts > _BAD_STARTS:
            raise does_not_start(code, words)
        if worker.over_line_bytes:
            self._most = max(len(self._workers), 1)

    def _room_with(self, worker: WorkerProcess) -> WorkerRoom:
        """The room, now that a worker was seen to need more before its first row."""
        held = max(self._room.worker_bytes, worker.over_line_bytes, worker.peak_bytes)
        return replace(self._room, worker_bytes=held)

    def _out_of_memory(self, worker: WorkerProcess, held_bytes: int) -> None:
        attempt = worker.attempt
        assert attempt is not None
        was_alone = attempt.alone or len([w for w in self._workers if w is not worker]) == 0
        if worker in self._workers:  # it said so itself, and what it holds is in doubt
            worker.attempt = None
            worker.kill()
            worker.wait()
            self._workers = tuple(other for other in self._workers if other is not worker)
        again = attempt.after_memory(was_alone, self.step.splittable, held_bytes, worker.at)
        if again is None:
            raise does_not_fit(attempt, worker.at, held_bytes, self.step, self.source.reading, self.options.limit_bytes)
        self._shortages += 1
        if not was_alone and self._shortages > 1 + self.outcome.computed // _RARE:
            self._most = max(self._most - 1, 1)
        how = "row by row" if again.pieces == 0 else f"in {again.pieces} parts" if again.pieces > 1 else "alone"
        self.progress.note(f"unit {again.unit.number} ran out of memory: trying it {how}")
        self.outcome.retries += 1
        self._waiting.append(again)
