"""The units of a job as tasks: made ahead, computed by a backend, each stored as a durable file and then a receipt.

A unit's file is durable before its receipt is written, and the receipt before anything depends on it; so a crash loses
at most the units that were not finished. The content of the units is the plan's to decide, not this module's.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol

from brim.compute.outputs.partial_unit import remove_partial
from brim.compute.outputs.rows_file import EXTENSIONS, Writing
from brim.compute.rows.unit import Reading, RowSource, Unit
from brim.compute.steps.step import Step
from brim.errors import MemoryLimitError, SourceChangedError
from brim.execution.scheduler import (
    Attempt,
    Backend,
    Event,
    Retries,
    Task,
    TaskDone,
    TaskFailed,
    TaskLost,
    TaskQueue,
    UnitStats,
    run_tasks,
)
from brim.execution.worker_messages import OnError, RowRange, UnitDone
from brim.progress import Progress
from brim.records import dataclass
from brim.state.atomic_files import sync_file, sync_folder
from brim.state.ledger import Ledger, Receipt
from brim.state.retry import interrupted_by
from brim.state.stop import Stop

_MOST_UNSYNCED = 64  # units that are computed and not yet durable: a crash loses so many
_CRASHES = 3  # attempts: a worker may also be killed by another program


class UnitFiles:
    """Where the unit files of a job are: in a local folder. A subclass stores them remotely."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has_receipt(self, receipt: Receipt) -> bool:
        """Return whether the file of a receipt exists with its size."""
        try:
            return (self.folder / receipt.name).stat().st_size == receipt.size
        except FileNotFoundError:
            return False

    def store(self, name: str) -> None:
        """Make a new file durable for other machines, before its receipt is written."""


@dataclass(frozen=True, slots=True)
class UnitJob:
    """The units to compute, and how. The caller holds the lock of the folder of `files`.

    Every `part_count`-th unit belongs to this run, starting with `part`. `held_bytes` of the limit belong to the
    caller: they were added to the limit of the user, and are not shown.
    """

    name: str  # for people: map, tokenize, embed
    source: RowSource
    step: Step
    writing: Writing
    ledger: Ledger
    files: UnitFiles
    limit_bytes: int
    progress: Progress
    stop: Stop
    workers: int | None = None
    on_error: OnError = "stop"
    uses_whole_node: bool = False  # one worker takes all cores, as a model does
    held_bytes: int = 0
    part: int = 0
    part_count: int = 1

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def reading(self) -> Reading:
        """What workers read of the source."""
        reading = self.source.reading
        return reading if self.step.columns is None else replace(reading, columns=self.step.columns)

    @property
    def seed(self) -> str:
        """The seed of random numbers in the user's code: the same in every run of the job, on any machine."""
        return "" if self.ledger.job is None else self.ledger.job.fingerprint

    def memory_error(
        self,
        attempt: Attempt,
        rows: RowRange | None,
        held_bytes: int,
        killed_by_kernel: bool = False,
        base_bytes: int = 0,
    ) -> MemoryLimitError:
        """Make the error for rows that do not fit the limit. `base_bytes`: held before the first row."""
        from brim.execution.failures import does_not_fit  # reads units, which most importers of this module do not

        return does_not_fit(
            attempt,
            rows,
            held_bytes,
            self.step,
            self.source.reading,
            self.limit_bytes,
            killed_by_kernel=killed_by_kernel,
            base_bytes=base_bytes,
            caller_bytes=self.held_bytes,
        )

    def crash_lost(self, attempt: Attempt, code: int, output: str, rows: RowRange | None) -> TaskLost:
        """Make the event for a worker process that died with an exit code. `output` is the end of its output."""
        from brim.execution.failures import crashed, exit_text

        reading = self.source.reading
        text = f"a worker died ({exit_text(code)}) at unit {attempt.task.work.number}"
        return TaskLost(attempt, "crash", text, lambda: crashed(attempt, reading, code, output, rows), rows)


class UnitBackend(Backend, Protocol):
    """A backend for units; open while they are computed. `ahead` units are made before they are requested."""

    prefetch_count: int
    most_workers: int
    peak_bytes: int

    def __enter__(self) -> UnitBackend: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def finish(self) -> None:
        """Release the workers: all units are done."""


class UnitFeed:
    """A thread that makes the units of a source, a few ahead. Closing it ends the thread, whatever the source does."""

    def __init__(self, units: Iterator[Unit], prefetch_count: int) -> None:
        self._units, self._prefetch_count = units, max(prefetch_count, 1)
        self._ready: deque[Unit] = deque()
        self._changed = threading.Condition()
        self._is_closed = self._is_over = False
        self._error: BaseException | None = None
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._thread = threading.Thread(target=self._run, name="units", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for unit in self._units:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or len(self._ready) < self._prefetch_count)
                    if self._is_closed:
                        return
                    self._ready.append(unit)
                    self._wake()
        except BaseException as error:  # noqa: BLE001  raised where units are taken
            self._error = error
        with self._changed:
            self._is_over = True
            self._wake()

    def _wake(self) -> None:
        if not self._is_closed:
            with suppress(BlockingIOError):  # the pipe is full: the reader is awake
                os.write(self._write_end, b"+")

    def descriptors(self) -> list[int]:
        """Return a descriptor that becomes readable at the next change, if no unit is ready and more may come."""
        with self._changed:
            if self._ready or self._is_over:
                return []
            with suppress(BlockingIOError):
                os.read(self._read_end, 4096)  # earlier changes
            return [self._read_end]

    @property
    def ready_count(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[Unit | None]:
        """Yield the units in order, and None while the next is being made. Then raise the error of the source."""
        while True:
            with self._changed:
                unit = self._ready.popleft() if self._ready else None
                if unit is None and self._is_over:
                    break
                self._changed.notify()
            yield unit
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout=5.0)
        os.close(self._read_end)
        with self._changed:
            os.close(self._write_end)


class UnitReceipts:
    """The receipts of units in the ledger of a job, and counts of the rows that were skipped."""

    def __init__(self, job: UnitJob) -> None:
        assert job.ledger.job is not None
        self._ledger, self._files, self._progress = job.ledger, job.files, job.progress
        self._extension, self._mark = EXTENSIONS[job.writing.format], job.ledger.job.fingerprint[:16]
        self._keeps_partial = getattr(job.step, "keeps_partial_units", False)
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()  # skipped units are counted while others finish
        self.stats = UnitStats()

    @property
    def in_order(self) -> list[Receipt]:
        """The receipts of all units in the order of the input, as the ledger has them now."""
        return [self._ledger.receipts[self._names[number]] for number in sorted(self._names)]

    def _name(self, number: int) -> str:
        return f"{number:08d}{self._extension}"

    def path(self, task: Task) -> Path:
        return self._files.folder / self._name(task.work.number)

    def has_receipt(self, number: int) -> bool:
        """Return whether a unit has a receipt of this job, and its file exists."""
        receipt = self._ledger.receipts.get(self._name(number))
        return receipt is not None and receipt.job == self._mark and self._files.has_receipt(receipt)

    def is_done(self, task: Task) -> bool:
        """Return whether the unit was computed from the same rows. The receipt of other rows is forgotten."""
        unit: Unit = task.work
        receipt = self._ledger.receipts.get(self._name(unit.number))
        if receipt is None:
            return False
        if not self.has_receipt(unit.number) or (receipt.key, receipt.mtimes) != (unit.key, unit.mtimes):
            if unit.spooled and not all(os.path.exists(span.path) for span in unit.spans):
                raise SourceChangedError(
                    f"The source gives other rows than in the interrupted run (unit {unit.number}).",
                    hint="Start over with --fresh.",
                )
            self._ledger.forget(receipt.name)  # before its file is replaced
            return False
        encoder = self._ledger.recall(f"encoder {receipt.name}") or ""
        bad_rows = self._ledger.recall(f"bad rows {receipt.name}") or 0
        bad_batches, bad_batch_rows = self._ledger.recall(f"bad batches {receipt.name}") or (0, 0)
        self._count(unit, receipt, bad_rows, bad_batches, bad_batch_rows, encoder)
        return True

    def begin(self, task: Task) -> None:
        """Do nothing: `is_done` has forgotten an old receipt."""

    def record_done(self, task: Task, result: UnitDone) -> None:
        self.record_all([(task, result)])

    def record_all(self, units: Sequence[tuple[Task, UnitDone]]) -> None:
        """Write the receipts of units whose files are durable, with one sync for all."""
        notes: dict[str, Any] = {}
        for task, result in units:
            name = self._name(task.work.number)
            self._files.store(name)
            if result.bad_rows or self._ledger.recall(f"bad rows {name}"):
                notes[f"bad rows {name}"] = result.bad_rows
            if result.bad_batches or self._ledger.recall(f"bad batches {name}"):
                notes[f"bad batches {name}"] = [result.bad_batches, result.bad_batch_rows]
            if result.encoder:
                notes[f"encoder {name}"] = result.encoder
        self._ledger.remember_all(notes)
        receipts = [self._receipt(task.work, result) for task, result in units]
        self._ledger.add_all(receipts)
        for (task, result), receipt in zip(units, receipts, strict=True):
            unit: Unit = task.work
            self._count(unit, receipt, result.bad_rows, result.bad_batches, result.bad_batch_rows, result.encoder)
            self.stats.computed += 1
            self._progress.rows(result.rows)
            self._progress.shard(f"unit {unit.number}", result.size, result.sha256, "computed")
            for span in unit.spans if unit.spooled else ():
                Path(span.path).unlink(missing_ok=True)
            if self._keeps_partial:
                remove_partial(self._files.folder, unit.number)

    def _receipt(self, unit: Unit, result: UnitDone) -> Receipt:
        name, content = self._name(unit.number), (result.rows, result.size, result.sha256)
        return Receipt(name, "", *content, unit.key, unit.mtimes, self._mark, source=result.source)

    def _count(
        self, unit: Unit, receipt: Receipt, bad_rows: int, bad_batches: int, bad_batch_rows: int, encoder: str
    ) -> None:
        with self._lock:
            self._names[unit.number] = receipt.name
            self.stats.bad_rows += bad_rows
            self.stats.bad_batches += bad_batches
            self.stats.bad_batch_rows += bad_batch_rows
            if encoder:
                self.stats.encoders[encoder] = self.stats.encoders.get(encoder, 0) + 1


class ReceiptWriter:
    """A thread that syncs the files of units and writes their receipts, while the next units are computed.

    Units that arrive while it is busy are recorded together, with one sync of the folder and one of the ledger.
    """

    def __init__(self, receipts: UnitReceipts, stop: Stop) -> None:
        self._receipts, self._stop = receipts, stop
        self._queue: SimpleQueue[tuple[Task, UnitDone] | None] = SimpleQueue()
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._unrecorded = 0
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._thread = threading.Thread(target=self._run, name="receipts", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return self._unrecorded > 0

    @property
    def is_full(self) -> bool:
        """Whether the disk is so slow that computed units would only wait for it."""
        return self._unrecorded >= _MOST_UNSYNCED

    def add(self, task: Task, result: UnitDone) -> None:
        self._unrecorded += 1
        self._queue.put((task, result))

    def descriptors(self) -> list[int]:
        """Return a descriptor that becomes readable at the next event, if one is expected."""
        return [self._read_end] if self._unrecorded else []

    def events(self) -> list[Event]:
        with suppress(BlockingIOError):
            os.read(self._read_end, 4096)
        events: list[Event] = []
        while not self._events.empty():
            events.append(self._events.get())
        self._unrecorded -= len(events)
        return events

    def _run(self) -> None:
        while True:
            entries = [self._queue.get()]
            while not self._queue.empty():
                entries.append(self._queue.get())
            units = [entry for entry in entries if entry is not None]
            for event in self._record(units) if units else ():
                self._events.put(event)
            if len(units) < len(entries):
                return
            os.write(self._write_end, b"+")

    def _record(self, units: list[tuple[Task, UnitDone]]) -> list[Event]:
        try:
            with interrupted_by(self._stop.check):  # the units of a part are also uploaded
                for task, _ in units:
                    sync_file(self._receipts.path(task))
                sync_folder(self._receipts.path(units[0][0]).parent)
                self._receipts.record_all(units)
        except BaseException as error:  # noqa: BLE001  raised by the thread that runs the units
            return [TaskFailed(error) for _ in units]
        return [TaskDone(result) for _, result in units]

    def close(self) -> None:
        """Record the added units, and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            os.close(self._read_end)
            os.close(self._write_end)


_SCRATCH = ("spool", "made", "pause", "positions", "setup.pickle", ".*.tmp", "worker-*.log")
_EARLIER_SCRATCH = ("gate", "whereabouts")  # of version 0.1


def scratch_files(folder: Path) -> Iterator[Path]:
    """Yield what only a running job needs next to the units: a killed one leaves it."""
    return (path for pattern in (*_SCRATCH, *_EARLIER_SCRATCH) for path in folder.glob(pattern))


def clear_scratch(folder: Path) -> None:
    for path in list(scratch_files(folder)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def compute_units(job: UnitJob, make_backend: Callable[[UnitJob, UnitReceipts], UnitBackend]) -> UnitStats:
    """Compute the missing units of a job."""
    source, receipts = job.source, UnitReceipts(job)
    backend = make_backend(job, receipts)
    clear_scratch(job.folder)
    try:
        with backend:
            spool = job.folder / "spool"
            spool.mkdir()
            job.progress.start(job.name, (source.total_bytes or 0) // job.part_count, 0, job.limit_bytes)
            align = job.step.batch_rows or 1
            units = source.units(align, indices=job.step.indices, spool=spool, skip=receipts.has_receipt)
            own_units = (unit for unit in units if unit.number % job.part_count == job.part)
            unit_feed = UnitFeed(own_units, backend.prefetch_count)
            tasks = (None if unit is None else Task(f"unit {unit.number}", unit.bytes, unit) for unit in unit_feed)
            queue = TaskQueue(tasks, receipts, job.progress, Retries(_CRASHES, job.step.splittable), unit_feed)
            try:
                with closing(run_tasks(queue, backend, job.stop)) as results:
                    for _ in results:
                        pass
                backend.finish()
            finally:
                unit_feed.close()
    finally:
        clear_scratch(job.folder)
    stats = receipts.stats
    stats.receipts, stats.workers = receipts.in_order, backend.most_workers
    stats.retries, stats.peak_bytes = queue.retried, backend.peak_bytes
    return stats
