"""The scheduler loop: results before failures, retries of lost tasks, and cancellation after the first failure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brim.compute.rows.unit import Unit
from brim.errors import InputError, MemoryLimitError, StoppedError
from brim.execution.scheduler import (
    Attempt,
    Event,
    Retries,
    Task,
    TaskDone,
    TaskFailed,
    TaskLost,
    TaskQueue,
    TaskReturned,
    run_tasks,
)
from brim.options import groups
from brim.options.groups import EngineOptions
from brim.progress import Progress
from brim.state.stop import Stop


class Told(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.passed = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, size: int) -> None:
        self.passed += size


class Written:
    """Receipts kept in a list; `existing` are the tasks with receipts of an earlier run."""

    def __init__(self, existing: tuple[str, ...] = ()) -> None:
        self.there, self.begun, self.names = existing, list[str](), list[str]()

    def is_done(self, task: Task) -> bool:
        return task.name in self.there

    def begin(self, task: Task) -> None:
        self.begun.append(task.name)

    def record_done(self, task: Task, result: Any) -> str:
        self.names.append(task.name)
        return task.name


def lost(attempt: Attempt, cause: Any = "memory", was_alone: bool | None = None) -> TaskLost:
    single = attempt.is_exclusive if was_alone is None else was_alone
    return TaskLost(
        attempt, cause, attempt.task.name, lambda: MemoryLimitError(attempt.task.name), was_exclusive=single
    )


class Scripted:
    """A backend that runs `at_a_time` tasks together; `script` returns the event of an attempt, or None for success."""

    def __init__(self, receipts: Written, script: Any, at_a_time: int = 2) -> None:
        self.receipts, self.script, self.at_a_time = receipts, script, at_a_time
        self.running: list[Attempt] = []
        self.given: list[Attempt] = []
        self.dropped = False

    @property
    def is_busy(self) -> bool:
        return bool(self.running)

    def start_tasks(self, queue: TaskQueue) -> None:
        while len(self.running) < self.at_a_time and queue.peek() is not None:
            self.running.append(queue.pop())
            self.given.append(self.running[-1])

    def poll(self) -> list[Event]:
        running, self.running = self.running, []
        return [self.script(a) or TaskDone(self.receipts.record_done(a.task, None)) for a in running]

    def cancel(self) -> None:
        self.dropped = True


def tasks_of(units: Iterable[Unit]) -> Iterator[Task]:
    return (Task(str(unit.number), unit.bytes, unit) for unit in units)


def scheduled(
    count: int, script: Any, retries: Retries, existing: tuple[str, ...] = (), at_a_time: int = 2
) -> tuple[Iterator[str], Scripted, Told, TaskQueue]:
    report, receipts = Told(), Written(existing)
    backend = Scripted(receipts, script, at_a_time)
    units = (Unit(number, (), 10, "") for number in range(count))
    queue = TaskQueue(tasks_of(units), receipts, report, retries)
    return run_tasks(queue, backend, Stop()), backend, report, queue


def test_all_in_their_order() -> None:
    """Each task runs once, in order. Tasks with a receipt are skipped and count as progress."""
    finished, backend, reports, _ = scheduled(5, lambda attempt: None, Retries(1), existing=("1", "4"))
    assert list(finished) == ["0", "2", "3"] == backend.receipts.begun
    assert reports.passed == 20
    assert not backend.dropped


def test_nothing_to_do() -> None:
    finished, backend, *_ = scheduled(0, lambda attempt: None, Retries(1))
    assert list(finished) == []
    assert not backend.given


def test_what_finished_before_what_failed() -> None:
    """Results that arrive together with a failure are recorded before the failure cancels the other tasks."""
    script = {"0": TaskFailed(ValueError("broken"))}
    finished, backend, *_ = scheduled(9, lambda a: script.get(a.task.name), Retries(1), at_a_time=3)
    observed: list[str] = []
    with pytest.raises(ValueError, match="broken"):
        observed.extend(finished)
    assert observed == ["1", "2"] == backend.receipts.names
    assert backend.dropped
    assert len(backend.given) == 3


@pytest.mark.parametrize(
    ("splittable", "tried"), [(True, [(False, 1), (True, 1), (True, 16), (True, 0)]), (False, [(False, 1), (True, 1)])]
)
def test_out_of_memory(splittable: bool, tried: list[tuple[bool, int]]) -> None:
    """A task that runs out of memory is retried alone, then in parts and row by row if that is allowed, then fails."""
    finished, backend, reports, queue = scheduled(1, lost, Retries(3, splittable))
    with pytest.raises(MemoryLimitError):
        list(finished)
    assert [(attempt.is_exclusive, attempt.parts) for attempt in backend.given] == tried
    methods = ["alone", "in 16 parts", "row by row"][: len(tried) - 1]
    assert reports.notes == [f"0: trying it {method}" for method in methods]
    assert queue.retried == len(methods)


@pytest.mark.parametrize("crashes", [1, 3, 4])
def test_crashes(crashes: int) -> None:
    """A crashing task is tried as often as `Retries` allows."""
    finished, backend, reports, _ = scheduled(1, lambda a: lost(a, "crash"), Retries(crashes))
    with pytest.raises(MemoryLimitError):
        list(finished)
    assert [attempt.crashes for attempt in backend.given] == list(range(crashes))
    assert reports.notes == ["0: trying it again"] * (crashes - 1)


def test_one_shows_it_alone() -> None:
    """If several tasks ask to run alone, the first one runs before all others, and the rest remain unchanged."""

    def script(attempt: Attempt) -> TaskReturned | None:
        observed = sum(inputs.task.name == attempt.task.name for inputs in backend.given)
        return TaskReturned(attempt, is_exclusive=True) if observed == 1 and attempt.task.name in "01" else None

    finished, backend, *_ = scheduled(3, script, Retries(1))
    assert sorted(finished) == ["0", "1", "2"]
    assert [(a.task.name, a.is_exclusive) for a in backend.given[2:4]] == [("0", True), ("1", False)]


def test_given_once_more_first() -> None:
    """A task that waits only for its types continues before any new task."""
    repeated = iter([True])
    finished, backend, *_ = scheduled(
        3, lambda a: TaskReturned(a, first=True) if next(repeated, False) else None, Retries(1), at_a_time=1
    )
    assert list(finished) == ["0", "1", "2"]
    assert [attempt.task.name for attempt in backend.given] == ["0", "0", "1", "2"]


def test_a_stop_drops_what_is_on_its_way(tmp_path: Path) -> None:
    report, receipts, stop = Told(), Written(), Stop()
    backend = Scripted(receipts, lambda attempt: stop.request("the test"), at_a_time=1)
    queue = TaskQueue(tasks_of([Unit(0, (), 1, ""), Unit(1, (), 1, "")]), receipts, report, Retries(1))
    finished = run_tasks(queue, backend, stop)
    assert next(finished) == "0"
    with pytest.raises(StoppedError):
        next(finished)
    assert backend.dropped
    assert receipts.begun == ["0"]


def test_closing_drops() -> None:
    """Closing the iterator of results cancels the running tasks."""
    finished, backend, *_ = scheduled(9, lambda attempt: None, Retries(1))
    next(finished)
    finished.close()  # type: ignore[attr-defined]
    assert backend.dropped


def test_tasks_are_made_when_it_is_their_turn() -> None:
    """Tasks are created only when they can start, so a million shards do not need a million tasks in memory."""
    created: list[int] = []
    units = (created.append(number) or Unit(number, (), 1, "") for number in range(1000))  # type: ignore[func-returns-value]
    receipts = Written()
    backend = Scripted(receipts, lambda attempt: None)
    queue = TaskQueue(tasks_of(units), receipts, Told(), Retries(1))
    next(run_tasks(queue, backend, Stop()))
    assert len(created) == backend.at_a_time


@pytest.fixture
def needed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of requested extras, all of which count as installed."""
    actual: list[str] = []
    monkeypatch.setattr(groups, "need_extra", lambda name, arguments: actual.append(name))
    return actual


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:1", "h:65535", "[::1]:10001"])
def test_addresses_of_a_cluster(address: str, needed: list[str]) -> None:
    assert EngineOptions(engine="ray", address=address).address == address
    assert needed == ["ray"]
    with pytest.raises(InputError, match="can only be used with"):
        EngineOptions(engine="local", address=address)


@pytest.mark.parametrize(
    "address", ["", "head", ":6379", "head:", "head:0", "head:65536", "head:x", "ray://head:10001"]
)
def test_what_is_no_address(address: str, needed: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        EngineOptions(engine="ray", address=address)
    assert caught.value.message == f"address= takes auto or HOST:PORT, not {address!r}."
    assert "ray start --head" in caught.value.hint


def test_engines(needed: list[str]) -> None:
    """The engine is local by default, and an unknown engine is refused."""
    assert EngineOptions() == EngineOptions(engine="local", address=None, workspace=None)
    assert not needed
    with pytest.raises(InputError, match="workspace"):
        EngineOptions(engine="local", workspace="s3://bucket/place")
    assert EngineOptions(engine="ray", workspace="s3://bucket/place").workspace == "s3://bucket/place"
    assert EngineOptions(engine="ray").address is None
    with pytest.raises(InputError, match=r"^engine= takes local or ray, not 'dask'\."):
        EngineOptions(engine="dask")  # type: ignore[arg-type]


def test_what_is_known_of_a_loss_goes_with_the_next_attempt() -> None:
    """The next attempt receives the latest known memory and row range of the lost one."""
    attempt = Attempt(Task("t", 1, Unit(0, (), 1, "")), parts=1, rows="before")  # type: ignore[arg-type]
    loss = TaskLost(attempt, "memory", "t", lambda: ValueError(), rows="now", held_bytes=7)  # type: ignore[arg-type]
    should_retry = Retries(2).next_attempt(loss)
    assert should_retry is not None
    assert (should_retry.held_bytes, should_retry.rows, should_retry.is_exclusive, should_retry.crashes) == (
        7,
        "now",
        True,
        0,
    )
    crash = TaskLost(attempt, "crash", "t", lambda: ValueError())
    should_retry = Retries(2).next_attempt(crash)
    assert should_retry is not None
    assert (should_retry.held_bytes, should_retry.rows, should_retry.is_exclusive, should_retry.crashes) == (
        0,
        "before",
        False,
        1,
    )
    assert Retries(1).next_attempt(crash) is None
    unseen = Retries(2).next_attempt(TaskLost(attempt, "memory", "t", lambda: ValueError()))
    assert unseen is not None
    assert unseen.held_bytes == 0


@pytest.mark.parametrize(("segments", "then"), [(1, 5), (5, 0), (0, None)])
def test_the_ladder_of_parts(segments: int, then: int | None) -> None:
    """A batch that does not fit alone is retried in parts, then row by row, and then fails."""
    attempt = Attempt(Task("t", 1, Unit(0, (), 1, "")), is_exclusive=True, parts=segments)
    loss = TaskLost(attempt, "memory", "t", lambda: ValueError(), was_exclusive=True)
    should_retry = Retries(3, splittable=True, parts=5).next_attempt(loss)
    assert (None if should_retry is None else should_retry.parts) == then
    assert Retries(3, splittable=False).next_attempt(loss) is None
    assert Retries(3).next_attempt(loss) is None, "rows stay together unless the step may split them"


def test_in_words() -> None:
    retries = Retries(2, True, "on a separate node")
    attempt = Attempt(Task("t", 1, Unit(0, (), 1, "")))
    loss = TaskLost(attempt, "memory", "t", lambda: ValueError())
    assert retries.text(loss, attempt) == "on a separate node"
    assert retries.text(loss, replace(attempt, parts=16)) == "in 16 parts"
    assert retries.text(loss, replace(attempt, parts=0)) == "row by row"
    assert retries.text(replace(loss, cause="crash"), attempt) == "again"
    assert Retries(1).alone_text == "alone"
    assert Retries(1).parts == 16


class Making:
    """A thread that creates tasks, with a settable number of ready ones."""

    ready_count = 0

    def descriptors(self) -> list[int]:
        return [3]


def test_what_waits() -> None:
    """Tasks that are put back come first, `ready_count` includes the feed, and the queue is empty only at its end."""
    unit_feed: Any = Making()
    units = [Unit(0, (), 1, ""), Unit(1, (), 1, "")]
    queue = TaskQueue(tasks_of(units), Written(), Told(), Retries(1), unit_feed)
    assert (queue.first, queue.is_empty, queue.ready_count) == (None, False, 0)
    first = queue.peek()
    assert first is not None
    assert (queue.first, queue.peek(), queue.ready_count) == (first, first, 1)
    assert queue.pop() is first
    assert not queue.is_empty
    second = queue.peek()
    queue.put_back(TaskReturned(first))
    assert queue.first is second
    queue.put_back(TaskReturned(first, first=True))
    assert queue.first is first
    assert queue.ready_count == 3
    unit_feed.ready_count = 4
    assert queue.ready_count == 7
    for _ in range(3):
        queue.pop()
    assert queue.peek() is None
    assert queue.is_empty


def test_descriptors_are_those_of_the_feed_while_no_task_waits() -> None:
    """The queue returns the descriptors of its feed only while no task waits. A list of tasks has no descriptors."""
    unit_feed: Any = Making()
    queue = TaskQueue(tasks_of([Unit(0, (), 1, "")]), Written(), Told(), Retries(1), unit_feed)
    assert queue.descriptors() == [3]
    queue.peek()
    assert queue.descriptors() == []
    queue.pop()
    assert queue.descriptors() == [3]
    assert TaskQueue(iter(()), Written(), Told(), Retries(1)).descriptors() == []


def test_none_means_that_the_next_task_is_being_made() -> None:
    """A None from the source means that the next task is not ready yet: the queue is not empty and asks again.

    An error of the source is raised by `peek`.
    """

    def tasks() -> Iterator[Task | None]:
        yield None
        yield Task("0", 1, None)
        raise ValueError("broken")

    queue = TaskQueue(tasks(), Written(), Told(), Retries(1))
    assert queue.peek() is None
    assert not queue.is_empty
    assert queue.peek() is not None
    queue.pop()
    with pytest.raises(ValueError, match="broken"):
        queue.peek()


def test_a_task_is_skipped_by_its_receipt_only_when_it_comes() -> None:
    units = [Unit(0, (), 5, ""), Unit(1, (), 5, "")]
    queue = TaskQueue(tasks_of(units), Written(("0", "1")), report := Told(), Retries(1))
    assert queue.peek() is None
    assert (report.passed, queue.is_empty) == (10, True)


class Hearing(Told):
    """A progress report that records the events of each task."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[str, Any]] = []

    def begin(self, name: str, size: int) -> None:
        self.heard.append((name, size))

    def again(self, name: str) -> None:
        self.heard.append((name, "again"))


def test_whoever_watches_hears_of_each_task() -> None:
    """The progress report receives the start of each task and each retry."""
    losses = iter([True, False])
    hearing, receipts = Hearing(), Written()
    backend = Scripted(receipts, lambda a: lost(a, "crash") if next(losses, False) else None, at_a_time=1)
    queue = TaskQueue(iter([Task("t", 10, Unit(0, (), 10, ""))]), receipts, hearing, Retries(3))
    assert list(run_tasks(queue, backend, Stop())) == ["t"]
    assert hearing.heard == [("t", 10), ("t", "again"), ("t", 10)]
    queue.put_back(TaskReturned(backend.given[0]))
    assert hearing.heard[3:] == [("t", "again")]
