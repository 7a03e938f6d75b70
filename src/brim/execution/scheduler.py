"""The scheduler loop: one for uploading shards and for computing units, whichever backend does the work.

The loop passes waiting tasks to a backend (threads, worker processes, or Ray), takes its events, and retries lost
tasks; the first failure cancels the rest. The backend decides how many tasks run. The receipts decide which tasks are
done already, and record the others. Tasks are created when they start, because there may be a million shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from brim.records import dataclass
from brim.state.ledger import Receipt

if TYPE_CHECKING:
    from brim.execution.unit_receipts import UnitFeed
    from brim.execution.worker_messages import RowRange
    from brim.progress import Progress
    from brim.state.stop import Stop


@dataclass(frozen=True, slots=True)
class Task:
    """One shard to upload, one unit to compute, or all units to finish. `work` is the Shard, the Unit, or an order."""

    name: str
    bytes: int
    work: Any


@dataclass(frozen=True, slots=True)
class Attempt:
    """A task, and how to try it this time."""

    task: Task
    is_exclusive: bool = False  # with all memory, while no other task runs
    parts: int = 1  # each batch of a unit in so many parts; 0: row by row
    crashes: int = 0
    held_bytes: int = 0  # memory of the worker when the last attempt ended
    rows: RowRange | None = None  # last rows that the last attempt reported


class Receipts(Protocol):
    """The view of a ledger that a scheduler needs."""

    def is_done(self, task: Task) -> bool: ...

    def begin(self, task: Task) -> None:
        """Invalidate an old receipt of the task, before its bytes change."""

    def record_done(self, task: Task, result: Any) -> Any:
        """Write the receipt and return what the caller of `run_tasks` gets.

        Called as soon as possible, so that a stop loses no finished task. Threads of a backend call it concurrently.
        """


@dataclass(frozen=True, slots=True)
class TaskDone:
    """The receipt of a task is written. `result` is what writing it returned."""

    result: Any


@dataclass(frozen=True, slots=True)
class TaskReturned:
    """A task did not fail and waits again. `first`: before all others. `alone`: one of those that ask runs alone."""

    attempt: Attempt
    first: bool = False
    is_exclusive: bool = False


@dataclass(frozen=True, slots=True)
class TaskLost:
    """A task ran out of memory, or its worker is gone. `error` makes the error if no retry is left."""

    attempt: Attempt
    cause: Literal["memory", "crash"]
    text: str  # for people
    error: Callable[[], Exception]
    rows: RowRange | None = None
    held_bytes: int = 0
    was_exclusive: bool = False


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """No retry helps."""

    error: BaseException


Event = TaskDone | TaskReturned | TaskLost | TaskFailed
_ORDER = (TaskDone, TaskReturned, TaskLost, TaskFailed)


class Backend(Protocol):
    """Runs several tasks at a time. The scheduler decides about retries."""

    @property
    def is_busy(self) -> bool: ...

    def start_tasks(self, queue: TaskQueue) -> None:
        """Start as many tasks as may run now."""

    def poll(self) -> Iterable[Event]:
        """Return new events, or an empty list after a short wait. Finished tasks have their receipts."""

    def cancel(self) -> None:
        """Stop running tasks. Tasks that have finished get their receipts."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How lost tasks are retried: alone; then, where batches may be split, in parts and row by row."""

    crashes: int
    splittable: bool = False
    alone_text: str = "alone"
    parts: int = 16

    def next_attempt(self, lost: TaskLost) -> Attempt | None:
        """Return the next attempt, or None if nothing is left to try."""
        last, rows = lost.attempt, lost.rows or lost.attempt.rows
        if lost.cause == "crash":
            crashed = replace(last, crashes=last.crashes + 1, rows=rows)
            return crashed if crashed.crashes < self.crashes else None
        whole_machine = replace(last, held_bytes=lost.held_bytes, rows=rows, is_exclusive=True)
        if not lost.was_exclusive:
            return whole_machine
        if not self.splittable or last.parts == 0:
            return None
        # Row by row at last, so that the error can name the row that does not fit.
        return replace(whole_machine, parts=self.parts if last.parts == 1 else 0)

    def text(self, lost: TaskLost, attempt: Attempt) -> str:
        if lost.cause == "crash":
            return "again"
        if attempt.parts == 1:
            return self.alone_text
        return "row by row" if attempt.parts == 0 else f"in {attempt.parts} parts"


@dataclass(slots=True)
class UnitStats:
    """Results of a run: the receipts of all units in order, and counts."""

    receipts: list[Receipt] = field(default_factory=list)
    computed: int = 0
    workers: int = 0
    retries: int = 0
    bad_rows: int = 0  # skipped rows, including those of the `bad_batches` batches that failed as a unit
    peak_bytes: int = 0
    encoders: dict[str, int] = field(default_factory=dict)  # number of units per encoder
    bad_batches: int = 0
    bad_batch_rows: int = 0


class TaskQueue:
    """Waiting tasks: returned and retried ones, then those of `tasks`, which yields None while the next is being made.

    `feed` is the thread that makes them, if there is one.
    """

    def __init__(
        self,
        tasks: Iterator[Task | None],
        receipts: Receipts,
        progress: Progress,
        retries: Retries,
        feed: UnitFeed | None = None,
    ) -> None:
        self._tasks, self._receipts, self._progress, self._retries = tasks, receipts, progress, retries
        self._feed = feed
        self._waiting: deque[Attempt] = deque()
        self._is_exhausted = False
        self.retried = 0

    @property
    def first(self) -> Attempt | None:
        """The next attempt, if it was taken from the tasks already."""
        return self._waiting[0] if self._waiting else None

    def peek(self) -> Attempt | None:
        """Return the next attempt, or None if none is ready. Tasks with receipts are skipped."""
        while not self._waiting and not self._is_exhausted:
            try:
                task = next(self._tasks)
            except StopIteration:
                self._is_exhausted = True
                break
            if task is None:
                break
            if self._receipts.is_done(task):
                self._progress.advance(task.bytes)
            else:
                self._waiting.append(Attempt(task))
        return self.first

    def pop(self) -> Attempt:
        """Remove the next attempt, which starts now."""
        attempt = self._waiting.popleft()
        self._receipts.begin(attempt.task)
        self._progress.begin(attempt.task.name, attempt.task.bytes)
        return attempt

    @property
    def ready_count(self) -> int:
        """Number of tasks that could start now."""
        return len(self._waiting) + (0 if self._feed is None else self._feed.ready_count)

    def descriptors(self) -> list[int]:
        """Return descriptors that become readable when another task is made, if none is ready."""
        return [] if self._waiting or self._feed is None else self._feed.descriptors()

    @property
    def is_empty(self) -> bool:
        return self._is_exhausted and not self._waiting

    def put_back(self, event: TaskReturned) -> None:
        attempt, first = event.attempt, event.first
        if event.is_exclusive and not any(waiting.is_exclusive for waiting in self._waiting):
            attempt, first = replace(attempt, is_exclusive=True), True
        self._progress.again(attempt.task.name)
        (self._waiting.appendleft if first else self._waiting.append)(attempt)

    def retry(self, lost: TaskLost) -> None:
        """Queue the next attempt of a lost task; raise its error after the last one."""
        attempt = self._retries.next_attempt(lost)
        if attempt is None:
            raise lost.error()
        self._progress.note(f"{lost.text}: trying it {self._retries.text(lost, attempt)}")
        self._progress.again(attempt.task.name)
        self.retried += 1
        self._waiting.append(attempt)


def run_tasks(queue: TaskQueue, backend: Backend, stop: Stop) -> Generator[Any, None, None]:
    """Run all tasks; yield the result of each. The first failure cancels the others and is raised; so does closing."""
    try:
        while True:
            stop.check()
            backend.start_tasks(queue)
            if queue.is_empty and not backend.is_busy:
                return
            # Finished tasks come before failed ones: the caller sees all of their results.
            for event in sorted(backend.poll(), key=lambda event: _ORDER.index(type(event))):
                if isinstance(event, TaskDone):
                    yield event.result
                elif isinstance(event, TaskReturned):
                    queue.put_back(event)
                elif isinstance(event, TaskLost):
                    queue.retry(event)
                else:
                    raise event.error
    except BaseException:
        backend.cancel()
        raise
