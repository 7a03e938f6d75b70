"""One scheduler for shards that are brought and units that are computed, whoever does it.

The loop gives what waits to a backend (threads, worker processes, or Ray), hears what became of it, and tries again
what was lost; the first failure drops the rest. When there is room for another task is the backend's to know, what
is done already and what is written down are the receipts'. A task is made when it is its turn: there may be a million
shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from brim.records import dataclass

if TYPE_CHECKING:  # workers read what failed, and bring nothing
    from brim.compute.rows.unit import Unit
    from brim.execution.worker_messages import At
    from brim.plans.cut_shards import Shard
    from brim.plans.shard_bytes import Slice
    from brim.progress import Progress
    from brim.state.stop import Stop


@dataclass(frozen=True, slots=True)
class Bring:
    """A shard that goes to its destination. `slice` makes what its bytes are made of, where they are wanted."""

    shard: Shard
    slice: Callable[[Shard], Slice]
    sha256: str | None = None  # if that is known


@dataclass(frozen=True, slots=True)
class Compute:
    """A unit that becomes a file of rows."""

    unit: Unit


@dataclass(frozen=True, slots=True)
class Finish:
    """Units that become what is delivered."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something to be done, that has a receipt when it is."""

    name: str
    bytes: int
    work: Bring | Compute | Finish


@dataclass(frozen=True, slots=True)
class Attempt:
    """A task, and how it is tried. `pieces` as in an Order."""

    task: Task
    alone: bool = False
    pieces: int = 1
    crashes: int = 0
    held_bytes: int = 0  # what the worker held when the last attempt ended
    at: At | None = None  # and what it was doing

    @property
    def unit(self) -> Unit:
        assert isinstance(self.task.work, Compute)
        return self.task.work.unit

    @property
    def bring(self) -> Bring:
        assert isinstance(self.task.work, Bring)
        return self.task.work


class Receipts(Protocol):
    """All that a scheduler sees of ledgers."""

    def skip(self, task: Task) -> bool:
        """Whether it need not be done: it was."""

    def begin(self, task: Task) -> None:
        """It will be done: what is there becomes another one. Called before its bytes move."""

    def done(self, task: Task, result: Any) -> Any:
        """It is where it belongs: write that down, and give what the caller of `run` wants to know.

        Called as soon as possible, so that a stop loses nothing that is finished; by several threads at a time,
        where threads do the work.
        """


@dataclass(frozen=True, slots=True)
class TaskDone:
    """Its receipt is written, and gave `result`."""

    result: Any


@dataclass(frozen=True, slots=True)
class TaskAgain:
    """Nothing went wrong with it, and it is given once more. `alone`: by itself, unless one that waits will be."""

    attempt: Attempt
    first: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class TaskLost:
    """It ran out of memory, or who did it is gone. `end` makes the error if there is nothing left to try."""

    attempt: Attempt
    cause: Literal["memory", "crash"]
    what: str  # for people
    end: Callable[[], Exception]
    at: At | None = None
    held_bytes: int = 0
    was_alone: bool = False


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """It cannot be done, however often it is tried."""

    error: BaseException


Event = TaskDone | TaskAgain | TaskLost | TaskFailed
_IN_ORDER = (TaskDone, TaskAgain, TaskLost, TaskFailed)


class Backend(Protocol):
    """Whoever does tasks, several at a time. It never decides what becomes of one that was lost."""

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""

    def admit(self, queue: TaskQueue) -> None:
        """Begin what there is room for."""

    def listen(self) -> Iterable[Event]:
        """What happened, after a short wait if nothing did. What finished has its receipt by then."""

    def drop(self) -> None:
        """End what is on its way. What has finished meanwhile gets its receipt."""


@dataclass(frozen=True, slots=True)
class Retries:
    """What is tried with a task, one rung after the other: units in parts and row by row, where they may be split."""

    crashes: int
    splittable: bool = False
    alone: str = "alone"  # in words
    parts: int = 16

    def after(self, lost: TaskLost) -> Attempt | None:
        """What to try next; None at the end of the road."""
        was, at = lost.attempt, lost.at or lost.attempt.at
        if lost.cause == "crash":
            crashed = replace(was, crashes=was.crashes + 1, at=at)
            return crashed if crashed.crashes < self.crashes else None
        seen = replace(was, held_bytes=lost.held_bytes, at=at, alone=True)
        if not lost.was_alone:
            return seen
        if not self.splittable or was.pieces == 0:
            return None
        # The rows of a batch in parts, then one by one, so that the row that does not fit can be named.
        return replace(seen, pieces=self.parts if was.pieces == 1 else 0)

    def words(self, lost: TaskLost, again: Attempt) -> str:
        if lost.cause == "crash":
            return "again"
        if again.pieces == 1:
            return self.alone
        return "row by row" if again.pieces == 0 else f"in {again.pieces} parts"


W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)


class Supply(Protocol[W_co]):
    """What is to be done, in its order. Making it may take time: then there is none yet."""

    @property
    def ahead(self) -> int:
        """How many are there to be taken."""

    @property
    def exhausted(self) -> bool:
        """Whether none is left and none will come. Raises what ended it, once all before that is taken."""

    def take(self) -> W_co | None:
        """The next, if there is one yet."""

    def news(self) -> list[int]:
        """A descriptor that is readable once there is more, for whoever has taken all there is."""


class Listed(Generic[W]):
    """A supply that is all there."""

    def __init__(self, work: Iterable[W]) -> None:
        self._work: Iterator[W] = iter(work)
        self.ahead = 0
        self.exhausted = False

    def take(self) -> W | None:
        work = next(self._work, None)
        self.exhausted = work is None
        return work

    def news(self) -> list[int]:
        return []


class TaskQueue:
    """What waits: what was tried before, then what comes. What is done already is passed over."""

    def __init__(
        self, supply: Supply[W], task: Callable[[W], Task], receipts: Receipts, progress: Progress, retries: Retries
    ) -> None:
        self._supply, self._receipts, self._progress, self._retries = supply, receipts, progress, retries
        self._take: Callable[[], Task | None] = lambda: None if (work := supply.take()) is None else task(work)
        self._waiting: deque[Attempt] = deque()
        self.retried = 0

    @property
    def first(self) -> Attempt | None:
        """What is next among what waits already."""
        return self._waiting[0] if self._waiting else None

    def find(self) -> Attempt | None:
        """What is next, if there is anything to do now."""
        while not self._waiting and (task := self._take()) is not None:
            if self._receipts.skip(task):
                self._progress.advance(task.bytes)
            else:
                self._waiting.append(Attempt(task))
        return self.first

    def pop(self) -> Attempt:
        """What is next goes to be done."""
        attempt = self._waiting.popleft()
        self._receipts.begin(attempt.task)
        self._progress.begin(attempt.task.name, attempt.task.bytes)
        return attempt

    @property
    def ahead(self) -> int:
        return len(self._waiting) + self._supply.ahead

    def news(self) -> list[int]:
        """What to listen to for more to do, if there is nothing now."""
        return [] if self._waiting else self._supply.news()

    @property
    def empty(self) -> bool:
        return self._supply.exhausted and not self._waiting

    def again(self, event: TaskAgain) -> None:
        attempt, first = event.attempt, event.first
        if event.alone and not any(waiting.alone for waiting in self._waiting):
            attempt, first = replace(attempt, alone=True), True
        self._progress.again(attempt.task.name)
        (self._waiting.appendleft if first else self._waiting.append)(attempt)

    def retry(self, lost: TaskLost) -> None:
        """The next rung for it; the error of it, if there is none."""
        again = self._retries.after(lost)
        if again is None:
            raise lost.end()
        self._progress.note(f"{lost.what}: trying it {self._retries.words(lost, again)}")
        self._progress.again(again.task.name)
        self.retried += 1
        self._waiting.append(again)


def run(queue: TaskQueue, backend: Backend, stop: Stop) -> Generator[Any, None, None]:
    """What each receipt gave, as tasks are done. The first failure drops the others and is raised; closing does too."""
    try:
        while True:
            stop.check()
            backend.admit(queue)
            if queue.empty and not backend.busy:
                return
            # What finished comes before what failed: whoever asked sees all of it.
            for event in sorted(backend.listen(), key=lambda event: _IN_ORDER.index(type(event))):
                if isinstance(event, TaskDone):
                    yield event.result
                elif isinstance(event, TaskAgain):
                    queue.again(event)
                elif isinstance(event, TaskLost):
                    queue.retry(event)
                else:
                    raise event.error
    except BaseException:
        backend.drop()
        raise
