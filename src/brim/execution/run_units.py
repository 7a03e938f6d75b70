"""The units of a job as tasks: made ahead of the workers, done by whichever backend, each a file and then a receipt.

The order of things is what makes a crash harmless: a unit's file is on disk before its receipt is written, and a
receipt is on disk before anything depends on it. (The files of a cache are synced later, and their receipts count in
this boot alone until then: see `UnitWork.boot`.) Nothing here decides what the rows are: that is the plan's.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import field, replace
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
    Compute,
    Event,
    Retries,
    Task,
    TaskDone,
    TaskFailed,
    TaskQueue,
    run,
)
from brim.execution.worker_messages import At, Done, OnError
from brim.progress import Progress
from brim.records import dataclass
from brim.state.atomic_files import sync_file, sync_folder
from brim.state.deferred_sync import sync_rest
from brim.state.ledger import Ledger, Receipt
from brim.state.retry import interrupted_by
from brim.state.stop import Stop

_SETTLING = 64  # units that are computed and not yet on disk: so many may be done again after a crash
_LATER_S = 30.0  # what was computed in so long is computed again if the machine stops: the kernel waits as long itself
_CRASHES = 3  # a worker may also be killed by somebody who means well


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """How to run, apart from what. `align` is the number of rows that unit boundaries are a multiple of.

    `whole_node`: one worker takes all cores by itself, as a model does. `held_bytes` of the limit are what the caller
    holds: they are added to what it asked for, and are not shown.
    """

    limit_bytes: int
    workers: int | None = None
    on_error: OnError = "stop"
    align: int = 1
    what: str = "map"
    whole_node: bool = False
    held_bytes: int = 0


@dataclass(slots=True)
class UnitStats:
    """What a run did: the receipts of all units in order, and what was counted on the way."""

    receipts: list[Receipt] = field(default_factory=list)
    computed: int = 0
    workers: int = 0
    retries: int = 0
    bad_rows: int = 0  # left out; those of `bad_batches` batches, which failed as a whole, among them
    peak_bytes: int = 0
    encoders: dict[str, int] = field(default_factory=dict)  # the units that each of them did
    bad_batches: int = 0
    bad_batch_rows: int = 0


@dataclass(frozen=True, slots=True)
class UnitShare:
    """What a run has to do with others that do units of the same job; by itself, everything.

    Units go to the parts in turn, so that nobody has to know how many there are.
    """

    number: int = 1  # of `count`, from 1
    count: int = 1
    kept: Callable[[str], None] = lambda name: None  # what else has to be done with a file before its receipt
    there: Callable[[Receipt], bool] | None = None  # whether the file of a receipt is where others find it

    def has(self, unit: int) -> bool:
        return unit % self.count == self.number - 1


ALL_UNITS = UnitShare()


@dataclass(frozen=True, slots=True)
class UnitWork:
    """What is computed, and where its unit files and receipts are: whoever runs it holds the lock of `folder`.

    `boot`: files need not be on disk before their receipts, which count in this boot alone until they are.
    """

    source: RowSource
    step: Step
    writing: Writing
    ledger: Ledger
    folder: Path
    options: ComputeOptions
    progress: Progress
    stop: Stop
    share: UnitShare = ALL_UNITS
    boot: str = ""

    @property
    def reading(self) -> Reading:
        """What workers read of the source."""
        reading = self.source.reading
        return reading if self.step.columns is None else replace(reading, columns=self.step.columns)

    @property
    def seed(self) -> str:
        """What random numbers of the user's code start from: the same in every run of the job, on any machine."""
        return "" if self.ledger.job is None else self.ledger.job.fingerprint

    def does_not_fit(
        self, attempt: Attempt, at: At | None, held_bytes: int, by_kernel: bool = False, base_bytes: int = 0
    ) -> MemoryLimitError:
        from brim.execution.failures import does_not_fit  # reads units, which most who import this do not

        options = self.options
        return does_not_fit(
            attempt,
            at,
            held_bytes,
            self.step,
            self.source.reading,
            options.limit_bytes,
            by_kernel=by_kernel,
            base_bytes=base_bytes,
            caller_bytes=options.held_bytes,
        )


class UnitBackend(Backend, Protocol):
    """It is open while units are done. `ahead` of them are made before anybody asks."""

    ahead: int
    most_workers: int
    peak_bytes: int

    def __enter__(self) -> UnitBackend: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def finish(self) -> None:
        """All units are done."""


class Feed:
    """The units of a source, a few ahead. Closing it ends the thread, whatever the source is doing."""

    def __init__(self, units: Iterator[Unit], ahead: int) -> None:
        self._units, self._most = units, max(ahead, 1)
        self._made: deque[Unit] = deque()
        self._changed = threading.Condition()
        self._closed = self._over = False
        self._failed: BaseException | None = None
        self._heard, self._tell = os.pipe()
        os.set_blocking(self._heard, False)
        os.set_blocking(self._tell, False)
        self._thread = threading.Thread(target=self._run, name="units", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for unit in self._units:
                if not self._put(unit):
                    return
        except BaseException as error:  # noqa: BLE001  it is raised where units are taken
            self._failed = error
        with self._changed:
            self._over = True
            self._say()

    def _put(self, unit: Unit) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._made) < self._most)
            if not self._closed:
                self._made.append(unit)
                self._say()
            return not self._closed

    def _say(self) -> None:
        if not self._closed:
            with suppress(BlockingIOError):  # enough was said
                os.write(self._tell, b"+")

    def news(self) -> list[int]:
        """A descriptor that is readable when something has changed, if there is nothing to take and more may come."""
        with self._changed:
            if self._made or self._over:
                return []
            with suppress(BlockingIOError):
                os.read(self._heard, 4096)  # what was said before
            return [self._heard]

    @property
    def ahead(self) -> int:
        """How many units are made and not taken."""
        return len(self._made)

    @property
    def exhausted(self) -> bool:
        """Whether there is none left and none will come. Raises what ended the source, once all before it is taken."""
        with self._changed:
            if not self._over or self._made:
                return False
        if self._failed is not None:
            raise self._failed
        return True

    def take(self) -> Unit | None:
        """The next unit, if there is one yet."""
        with self._changed:
            if not self._made:
                return None
            self._changed.notify()
            return self._made.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout=5.0)
        os.close(self._heard)
        with self._changed:
            os.close(self._tell)


class UnitReceipts:
    """The units of the job that the ledger holds, and the rows that were left out of them."""

    def __init__(self, work: UnitWork) -> None:
        assert work.ledger.job is not None
        self._ledger, self._folder, self._extension = work.ledger, work.folder, EXTENSIONS[work.writing.format]
        self._job, self._progress, self._share = work.ledger.job.fingerprint[:16], work.progress, work.share
        self._keeps_partial = getattr(work.step, "keeps_partial_units", False)
        self._receipts: dict[int, Receipt] = {}
        self._lock = threading.Lock()  # some are found while others are done
        self.computed = self.bad_rows = self.bad_batches = self.bad_batch_rows = 0
        self.encoders: dict[str, int] = {}

    @property
    def receipts(self) -> list[Receipt]:
        """In the order of the input, as the ledger has them now."""
        return [self._ledger.receipts[self._receipts[number].name] for number in sorted(self._receipts)]

    def _name(self, number: int) -> str:
        return f"{number:08d}{self._extension}"

    def file(self, task: Task) -> Path:
        return self._folder / self._name(_unit_of(task).number)

    def has(self, number: int) -> bool:
        """Whether a unit has a receipt, and its file is there with that size."""
        receipt = self._ledger.receipts.get(self._name(number))
        if receipt is None or receipt.job != self._job:
            return False
        if self._share.there is not None:
            return self._share.there(receipt)
        try:
            return (self._folder / receipt.name).stat().st_size == receipt.size
        except FileNotFoundError:
            return False

    def skip(self, task: Task) -> bool:
        """Whether the unit was done, and of the same rows. One that was done of others is forgotten."""
        unit = _unit_of(task)
        receipt = self._ledger.receipts.get(self._name(unit.number))
        if receipt is None:
            return False
        if not self.has(unit.number) or (receipt.key, receipt.mtimes) != (unit.key, unit.mtimes):
            if unit.spooled and not all(os.path.exists(span.path) for span in unit.spans):
                raise SourceChangedError(
                    f"The source gives other rows than in the run that is continued (unit {unit.number}).",
                    hint="Start over with --fresh.",
                )
            self._ledger.forget(receipt.name)  # before its file becomes another one
            return False
        encoder = self._ledger.recall(f"encoder {receipt.name}") or ""
        bad = [self._ledger.recall(f"bad rows {receipt.name}") or 0]
        bad += self._ledger.recall(f"bad batches {receipt.name}") or (0, 0)
        self._take(unit, receipt, bad, encoder)
        return True

    def begin(self, task: Task) -> None:
        """Nothing: what was there is forgotten since it was looked at."""

    def done(self, task: Task, result: Done) -> None:
        """The unit's file is on disk: write that down."""
        self.done_all([(task, result)])

    def done_all(self, units: Sequence[tuple[Task, Done]], boot: str = "") -> None:
        """Their files are on disk: write that down, with one wait for all; with a `boot`, without any."""
        found = [(_unit_of(task), done) for task, done in units]
        notes = dict(note for unit, done in found for note in self._notes(unit, done))
        self._ledger.remember_all(notes, lasts=not boot)
        receipts = [self._receipt(unit, done, boot) for unit, done in found]
        self._ledger.add_all(receipts, lasts=not boot)
        for (unit, done), receipt in zip(found, receipts, strict=True):
            self._take(unit, receipt, (done.bad_rows, done.bad_batches, done.bad_batch_rows), done.encoder)
            self.computed += 1
            self._progress.rows(done.rows)
            self._progress.shard(f"unit {unit.number}", done.size, done.sha256, "computed")
            for span in unit.spans if unit.spooled else ():
                Path(span.path).unlink(missing_ok=True)
            if self._keeps_partial:
                remove_partial(self._folder, unit.number)

    def _notes(self, unit: Unit, done: Done) -> Iterator[tuple[str, Any]]:
        """What a receipt has no place for. It is on disk before the receipt is."""
        name = self._name(unit.number)
        self._share.kept(name)
        if done.bad_rows or self._ledger.recall(f"bad rows {name}"):
            yield f"bad rows {name}", done.bad_rows
        if done.bad_batches or self._ledger.recall(f"bad batches {name}"):
            yield f"bad batches {name}", [done.bad_batches, done.bad_batch_rows]
        if done.encoder:
            yield f"encoder {name}", done.encoder

    def _receipt(self, unit: Unit, done: Done, boot: str) -> Receipt:
        name = self._name(unit.number)
        made = (done.rows, done.size, done.sha256)
        return Receipt(name, "", *made, unit.key, unit.mtimes, self._job, boot=boot, source=done.source)

    def sync_rest(self) -> None:
        """Make those last that count in this boot alone."""
        sync_rest(self._ledger, self._folder)

    def _take(self, unit: Unit, receipt: Receipt, bad: Sequence[int], encoder: str) -> None:
        with self._lock:
            self._receipts[unit.number] = receipt
            self.bad_rows += bad[0]
            self.bad_batches += bad[1]
            self.bad_batch_rows += bad[2]
            if encoder:
                self.encoders[encoder] = self.encoders.get(encoder, 0) + 1


class Settling:
    """Units whose files are written, made to last while the next are computed: synced by a thread, then written down.

    Those that come while it is busy are done together, with one wait for the folder and one for the ledger. With a
    `boot` they are written down first, and synced together after a while.
    """

    def __init__(self, receipts: UnitReceipts, folder: Path, stop: Stop, boot: str = "") -> None:
        self._receipts, self._folder, self._stop = receipts, folder, stop
        self._boot, self._synced_at = boot, time.monotonic()
        self._waiting: SimpleQueue[tuple[Task, Done] | None] = SimpleQueue()
        self._said: SimpleQueue[Event] = SimpleQueue()
        self._under_way = 0
        self._heard, self._tell = os.pipe()
        os.set_blocking(self._heard, False)
        self._thread = threading.Thread(target=self._run, name="settling", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._under_way > 0

    @property
    def full(self) -> bool:
        """Whether the disk is behind: what is computed now would only wait for it."""
        return self._under_way >= _SETTLING

    def take(self, task: Task, done: Done) -> None:
        self._under_way += 1
        self._waiting.put((task, done))

    def news(self) -> list[int]:
        """A descriptor that is readable once there are events, if there will be any."""
        return [self._heard] if self._under_way else []

    def events(self) -> list[Event]:
        with suppress(BlockingIOError):
            os.read(self._heard, 4096)
        events: list[Event] = []
        while not self._said.empty():
            events.append(self._said.get())
        self._under_way -= len(events)
        return events

    def _run(self) -> None:
        while True:
            units = [self._waiting.get()]
            while not self._waiting.empty():
                units.append(self._waiting.get())
            found = [unit for unit in units if unit is not None]
            for event in self._settled(found) if found else ():
                self._said.put(event)
            if len(found) < len(units):
                return
            os.write(self._tell, b"+")

    def _settled(self, units: list[tuple[Task, Done]]) -> list[Event]:
        try:
            with interrupted_by(self._stop.check):  # a part's units are also put where others find them
                if self._boot:
                    self._receipts.done_all(units, self._boot)
                    self._sync_if_due()
                else:
                    for task, _ in units:
                        sync_file(self._receipts.file(task))
                    sync_folder(self._folder)
                    self._receipts.done_all(units)
        except BaseException as error:  # noqa: BLE001  it is raised by whoever runs the units
            return [TaskFailed(error) for _ in units]
        return [TaskDone(done) for _, done in units]

    def _sync_if_due(self) -> None:
        if time.monotonic() - self._synced_at >= _LATER_S:
            self._receipts.sync_rest()
            self._synced_at = time.monotonic()

    def close(self) -> None:
        """What was taken is written down by then. What is not on disk yet is for whoever runs the job."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()
            os.close(self._heard)
            os.close(self._tell)


BackendOf = Callable[[UnitWork, UnitReceipts], UnitBackend]


def clear_scratch(folder: Path) -> None:
    """What only a run that is under way needs beside the units, which stay: a killed one leaves it."""
    for path in list(_scratch(folder)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def has_scratch(folder: Path) -> bool:
    return next(_scratch(folder), None) is not None


def _scratch(folder: Path) -> Iterator[Path]:
    patterns = ("spool", "made", "gate", "whereabouts", "setup.pickle", ".*.tmp", "worker-*.log")
    return (path for pattern in patterns for path in folder.glob(pattern))


def compute(work: UnitWork, backend_of: BackendOf) -> UnitStats:
    """Do the units of a source that are missing."""
    source, options, receipts = work.source, work.options, UnitReceipts(work)
    backend = backend_of(work, receipts)
    clear_scratch(work.folder)
    try:
        with backend:
            spool = work.folder / "spool"
            spool.mkdir()
            work.progress.start(options.what, (source.total_bytes or 0) // work.share.count, 0, options.limit_bytes)
            units = source.units(options.align, indices=work.step.indices, spool=spool, skip=receipts.has)
            feed = Feed((unit for unit in units if work.share.has(unit.number)), backend.ahead)
            tasks = TaskQueue(feed, _task, receipts, work.progress, Retries(_CRASHES, work.step.splittable))
            try:
                with closing(run(tasks, backend, work.stop)) as finished:
                    for _ in finished:
                        pass
                backend.finish()
            finally:
                feed.close()
    finally:
        clear_scratch(work.folder)
    return UnitStats(
        receipts.receipts,
        receipts.computed,
        backend.most_workers,
        tasks.retried,
        receipts.bad_rows,
        backend.peak_bytes,
        receipts.encoders,
        receipts.bad_batches,
        receipts.bad_batch_rows,
    )


def _task(unit: Unit) -> Task:
    return Task(f"unit {unit.number}", unit.bytes, Compute(unit))


def _unit_of(task: Task) -> Unit:
    assert isinstance(task.work, Compute)
    return task.work.unit
