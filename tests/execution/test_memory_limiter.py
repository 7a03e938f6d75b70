"""The memory limit of workers: how many fit, when they are paused, and which worker is killed."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from brim.execution import memory_limiter
from brim.execution.memory_limiter import MemoryBudget, MemoryLimiter, PauseFlag, WorkMemory, divide_node

MB, MIB = 10**6, 1 << 20


@pytest.mark.parametrize(
    ("limit", "margin"),
    [(500 * MB, 32 * MIB), (1000 * MIB, 32 * MIB), (2000 * MB, 60 * MB), (10_000 * MB, 300 * MB)],
)
def test_the_line_lies_a_margin_below_the_limit(limit: int, margin: int) -> None:
    """The margin below the limit is 32 MiB or 3 %: the memory that a worker may allocate between two measurements."""
    budget = MemoryBudget(limit, 0, 0)
    assert budget == MemoryBudget(limit, 0, 0, caller_bytes=0)
    assert budget.kill_bytes == limit - margin
    assert budget.pause_bytes == round(0.85 * (limit - margin))


def test_the_margin_is_the_larger_of_the_two() -> None:
    """The margin switches to 3 % where that is more than 32 MiB."""
    even = round(32 * MIB / 0.03)
    assert MemoryBudget(even, 0, 0).kill_bytes == even - 32 * MIB
    assert MemoryBudget(even + 100, 0, 0).kill_bytes == even + 100 - (32 * MIB + 3)


@pytest.mark.parametrize(
    ("parent", "worker", "smallest"),
    # Parent, worker and 24 MiB of work, plus a margin of 32 MiB or 3 %, rounded up to ten megabytes.
    [
        (60 * MB, 40 * MB, 160 * MB),
        (25 * MB, 30 * MB, 120 * MB),
        (100 * MB, 1_474_834_176, 1_650 * MB),
        (0, 1_000 * MB, 1_060 * MB),
    ],
)
def test_the_smallest_limit(parent: int, worker: int, smallest: int) -> None:
    budget = MemoryBudget(10**9, parent, worker)
    assert budget.smallest_limit_bytes == smallest
    sufficient = MemoryBudget(smallest, parent, worker)
    assert sufficient.kill_bytes >= parent + worker + 24 * MIB
    assert MemoryBudget(smallest - 10 * MB, parent, worker).kill_bytes < parent + worker + 24 * MIB


@pytest.mark.parametrize(
    ("work", "maximum", "workers"),
    [(100 * MB, 9, 3), (100 * MB, 2, 2), (100 * MB + 1, 9, 2), (900 * MB, 9, 1), (0, 9, 4), (0, 3, 3)],
)
def test_as_many_as_fit(work: int, maximum: int, workers: int) -> None:
    """The worker count follows from memory at rest and for work (48 MiB before any measurement), and is at least 1."""
    budget = MemoryBudget(500 * MB + 32 * MIB, 50 * MB, 50 * MB)
    assert budget.kill_bytes - budget.parent_bytes == 450 * MB
    assert budget.worker_count(work, maximum) == workers


def test_the_first_batches_are_given_48_mib() -> None:
    """Before any measurement, each worker counts with 48 MiB for its first batch, exact to one byte."""
    whole = 32 * MIB + 4 * (50 * MB + 48 * MIB)
    assert MemoryBudget(whole, 0, 50 * MB).worker_count(0, 9) == 4
    assert MemoryBudget(whole - 1, 0, 50 * MB).worker_count(0, 9) == 3


def test_shares_are_equal() -> None:
    """The memory left by the parent is divided equally among the workers; a count of zero is treated as one."""
    budget = MemoryBudget(500 * MB + 32 * MIB, 50 * MB, 50 * MB)
    assert [budget.bytes_per_worker(count) for count in (0, 1, 2, 4)] == [450 * MB, 450 * MB, 225 * MB, 112_500_000]


def test_the_gate_is_a_byte_that_is_one_while_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause flag is a file with one byte, which is 1 while memory is low.

    The byte is written only when it changes, and `remove` deletes the file.
    """
    pause_flag = PauseFlag(tmp_path / "gate")
    writes: list[bytes] = []
    plain = memory_limiter.write_all

    def write(descriptor: int, data: bytes, at: int) -> None:
        writes.append(data)
        plain(descriptor, data, at)

    monkeypatch.setattr(memory_limiter, "write_all", write)
    for short in (False, True, True, False, False, True):
        pause_flag.set(short)
        assert pause_flag.path.read_bytes() == (b"\1" if short else b"\0")
    assert writes == [b"\1", b"\0", b"\1"]
    before = len(os.listdir("/proc/self/fd"))
    pause_flag.remove()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    assert not pause_flag.path.exists()


def test_a_gate_that_is_gone_already_is_removed(tmp_path: Path) -> None:
    pause_flag = PauseFlag(tmp_path / "gate")
    assert pause_flag.path.read_bytes() == b"\0"
    pause_flag.path.unlink()
    pause_flag.remove()


@dataclass
class Worker:
    """A worker with the attributes that the limiter reads."""

    pid: int
    size: int = 0
    attempt: object | None = None
    killed_at_bytes: int = 0
    peak_bytes: int = 0
    children: tuple[int, ...] = ()
    killed: int = 0
    is_ready: bool = False

    def held_bytes(self) -> int:
        return self.size

    def kill(self) -> None:
        self.killed += 1


class Machine:
    """A simulated process tree with the memory of each process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.here = os.getpid()
        self.held: dict[int, int] = {self.here: 10 * MB}
        self.below: dict[int, list[int]] = {}
        self.walks = 0
        monkeypatch.setattr(memory_limiter, "tree", self._tree)
        monkeypatch.setattr(memory_limiter, "process_bytes", lambda pid: self.held.get(pid, 0))
        self.flag = tmp_path / "pause"

    def _tree(self, roots: list[int]) -> list[int]:
        self.walks += 1
        actual = list(roots)
        for pid in actual:
            actual += self.below.get(pid, [])
        return actual

    def line(self, workers: list[Worker], limit: int = 500 * MB, beside: int = 0) -> MemoryLimiter:
        self.below.setdefault(self.here, [worker.pid for worker in workers])
        limiter: Any = MemoryLimiter(MemoryBudget(limit, 0, 0, beside), 9, lambda: workers, self.flag)  # type: ignore[arg-type, return-value]
        return limiter  # type: ignore[no-any-return]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_the_largest_is_ended(machine: Machine) -> None:
    """Each call kills the largest worker that is still alive, and records its memory as at least one byte."""
    workers = [Worker(1, 30), Worker(2, 90), Worker(3, 60)]
    line = machine.line(workers)
    for killed in ([0, 1, 0], [0, 1, 1], [1, 1, 1]):
        line._kill_largest()
        assert [worker.killed for worker in workers] == killed
    assert [worker.killed_at_bytes for worker in workers] == [30, 90, 60]
    removed = [Worker(4, 0)]
    machine.line(removed)._kill_largest()
    assert (removed[0].killed, removed[0].killed_at_bytes) == (1, 1)


def test_of_two_that_hold_the_same_one_is_ended(machine: Machine) -> None:
    workers = [Worker(1, 50), Worker(2, 50)]
    machine.line(workers)._kill_largest()
    assert [worker.killed for worker in workers] == [1, 0]


def test_nobody_left_to_end(machine: Machine) -> None:
    """With no worker left to kill, `own_bytes` records the memory that is still in use."""
    ended = Worker(1, 30, killed_at_bytes=30)
    line = machine.line([ended])
    line._meter = SimpleNamespace(read=lambda *_: SimpleNamespace(usage=SimpleNamespace(total_bytes=77)))  # type: ignore[assignment]
    assert (line.own_bytes, line.peak_bytes, line.is_low) == (0, 0, False)
    line._kill_largest()
    assert (ended.killed, line.own_bytes) == (0, 10 * MB + 77)


def test_what_the_workers_hold_is_measured_where_nobody_can_be_ended(machine: Machine) -> None:
    """With no worker left to kill, the limiter measures the pages of real processes: this one and the workers."""
    with subprocess.Popen(["sleep", "60"]) as child:
        line = machine.line([Worker(child.pid, killed_at_bytes=1)])
        line._kill_largest()
        child.kill()
    assert line.own_bytes > 10 * MB


def test_workers_that_share_nothing_are_added_up(machine: Machine) -> None:
    """Workers without children are measured as a sum with this process, and the peak of each worker is kept."""
    workers = [Worker(1), Worker(2)]
    line = machine.line(workers)
    machine.held |= {1: 20 * MB, 2: 30 * MB}
    assert line._measure() == 60 * MB
    machine.held |= {1: 5 * MB, 2: 35 * MB}
    assert line._measure() == 50 * MB
    assert [worker.peak_bytes for worker in workers] == [20 * MB, 35 * MB]
    assert [worker.children for worker in workers] == [(), ()]


def test_programs_of_the_caller_count_as_they_were(machine: Machine) -> None:
    """Programs of the caller count with their memory at the start of the job, which is part of its limit.

    So a program that grows during the job does not cause the kill of a worker.
    """
    worker = Worker(1)
    line = machine.line([worker], beside=200 * MB)
    machine.below[machine.here] = [1, 2]
    machine.held |= {1: 20 * MB, 2: 900 * MB}
    assert line._measure() == 230 * MB
    assert worker.children == ()


def test_a_worker_that_has_just_come_is_counted(machine: Machine) -> None:
    """A new worker is counted before the next walk of the process tree."""
    workers = [Worker(1)]
    line = machine.line(workers)
    line._measure()
    workers.append(Worker(2))
    machine.held |= {1: 20 * MB, 2: 30 * MB}
    assert line._measure() == 60 * MB
    assert machine.walks == 1


def test_the_tree_is_walked_now_and_then(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process tree is walked at most 20 times per second, because a walk costs ten times as much as a reading."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    line = machine.line([Worker(1)])
    # The clock may start at zero, and the last position is exactly one interval after the previous walk.
    for position, walks in ((0.0, 1), (0.04, 1), (0.051, 2), (0.1, 2), (0.102, 3), (0.102 + 0.05, 4)):
        now[0] = position
        line._measure()
        assert machine.walks == walks


def test_processes_of_a_function_are_counted_by_pages(machine: Machine) -> None:
    """If workers have children, all processes are measured by pages, because a sum counts shared pages several times.

    The memory of a worker includes its children, each process once.
    """
    workers = [Worker(1), Worker(2)]
    line = machine.line(workers)
    machine.below[1] = [11, 12]
    machine.held |= {1: 20 * MB, 2: 30 * MB, 11: 5 * MB, 12: 6 * MB}
    requested: list[Any] = []

    def read(*line_bytes: int) -> Any:
        requested.append(line_bytes)
        return SimpleNamespace(usage=SimpleNamespace(total_bytes=44 * MB))

    line._meter = SimpleNamespace(read=read)  # type: ignore[assignment]
    assert line._measure() == 54 * MB
    assert requested == [(line.budget.pause_bytes - 10 * MB,)]
    assert [worker.children for worker in workers] == [(11, 12), ()]
    assert [worker.peak_bytes for worker in workers] == [31 * MB, 30 * MB]


def test_a_process_that_has_just_come_counts_from_the_next_walk_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new child process is assigned to its worker at the next walk, and has no memory until then."""
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    worker = Worker(1)
    line = machine.line([worker])
    line._meter = SimpleNamespace(read=lambda *_: SimpleNamespace(usage=SimpleNamespace(total_bytes=25 * MB)))  # type: ignore[assignment]
    machine.below[1] = [11]
    machine.held |= {1: 20 * MB, 11: 5 * MB, 12: 6 * MB}
    line._measure()
    machine.below[1] = [11, 12]
    line._measure()
    assert (worker.children, worker.peak_bytes) == ((11, 12), 25 * MB)


def test_what_a_dead_worker_left_is_still_its_own(machine: Machine) -> None:
    """The children of a dead worker stay assigned to it, so that they can be killed with it."""
    worker = Worker(1, children=(11, 12))
    line = machine.line([worker])
    machine.below |= {1: []}
    machine.held |= {11: 5 * MB}
    line._meter = SimpleNamespace(read=lambda *_: SimpleNamespace(usage=SimpleNamespace(total_bytes=15 * MB)))  # type: ignore[assignment]
    line._measure()
    assert worker.children == (11, 12)
    assert worker.peak_bytes == 5 * MB


class Ended:
    """An event that stops the watch loop after the specified number of waits."""

    def __init__(self, looks: int) -> None:
        self.looks, self.waits = looks, list[float]()

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return len(self.waits) >= self.looks


@pytest.mark.parametrize(("pause", "waited"), [(0.01, 0.01), (0.2, 0.2), (5.0, 0.2)])
def test_it_looks_five_times_a_second_at_least(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, pause: float, waited: float
) -> None:
    """The limiter measures at least five times per second, and more often if the pace requires it.

    The pace receives the memory in use, the kill threshold and the CPU time of the measurement.
    """
    requested: list[Any] = []

    class Paced:
        def __init__(self, shortest_s: float) -> None:
            assert shortest_s == 0.004

        def pause_s(self, *report: float) -> float:
            requested.append(report)
            return pause

    spent = iter([50.0, 50.25] * 3)
    monkeypatch.setattr(memory_limiter, "Pace", Paced)
    monkeypatch.setattr(time, "thread_time", lambda: next(spent))
    line = machine.line([])
    line._closed = Ended(3)  # type: ignore[assignment]
    line.pause_flag = PauseFlag(machine.flag)
    line._watch()
    assert line._closed.waits == [waited] * 3  # type: ignore[attr-defined]
    assert [message[1:] for message in requested] == [(10 * MB, line.budget.kill_bytes, 0.25)] * 3


def test_crossing_the_hard_line_again_counts_again(machine: Machine) -> None:
    """Each crossing of the kill threshold raises an alarm, however small the decrease before it."""
    line = machine.line([])
    hard = line.budget.kill_bytes
    messages = [
        bool(line._guard.observe(position, used))
        for position, used in ((0, hard - 1), (1, hard), (1.01, hard - 1), (1.02, hard))
    ]
    assert messages == [False, True, False, True]
    assert [bool(line._guard.observe(offset, hard)) for offset in (1.1, 1.25, 1.3)] == [False, True, False]
    assert (line._thread.name, line._thread.daemon) == ("memory limiter", True)


def test_nobody_is_ended_for_what_is_only_predicted(machine: Machine) -> None:
    """Only the kill threshold raises alarms: a prediction that memory will run out raises none."""
    line = machine.line([], limit=2_000 * MB)
    alarms = [alarm for index in range(1333) for alarm in line._guard.observe(index / 10, 15 * MB * index // 10)]
    assert {(alarm.kind, alarm.used_bytes >= line.budget.kill_bytes) for alarm in alarms} == {("hard", True)}
    assert len(alarms) > 5


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)


def test_short_memory_closes_the_gate_where_several_work(machine: Machine) -> None:
    """Low memory sets the pause flag if several workers run, but not for a single one; no worker is killed."""
    workers = [Worker(1, attempt=object()), Worker(2)]
    soft = MemoryBudget(500 * MB, 0, 0).pause_bytes
    with machine.line(workers) as line:
        until(lambda: line.peak_bytes)
        assert not line.is_low
        machine.held[1] = soft - 10 * MB
        until(lambda: line.is_low)
        assert line.peak_bytes == soft
        assert machine.flag.read_bytes() == b"\0"
        workers[1].attempt = object()
        until(lambda: machine.flag.read_bytes() == b"\1")
        machine.held[1] = 1
        until(lambda: machine.flag.read_bytes() == b"\0")
        assert not line.is_low
    assert line.peak_bytes == soft
    assert not [worker for worker in workers if worker.killed]
    assert not line._thread.is_alive()


def test_above_the_hard_line_a_worker_is_ended_and_then_another(machine: Machine) -> None:
    """Above the kill threshold, the limiter kills one worker after another, with a pause in which memory is freed."""
    workers = [Worker(1, 300), Worker(2, 400)]
    machine.held |= {1: 300 * MB, 2: 400 * MB}
    with machine.line(workers) as line:
        started_at = time.monotonic()
        until(lambda: workers[1].killed)
        first = time.monotonic()
        until(lambda: workers[0].killed)
        assert time.monotonic() - first > 0.1
        assert first - started_at < 10
    assert line.peak_bytes == 710 * MB
    assert [worker.killed_at_bytes for worker in workers] == [300, 400]


@pytest.mark.parametrize("parent", [0, 60 * MB, 2_000 * MB, 100_000 * MB])
def test_what_the_caller_holds_takes_no_room(parent: int) -> None:
    """The memory of the calling program reduces neither the memory of the job nor its margins."""
    budget = MemoryBudget(parent + 600 * MB, parent, 40 * MB, parent // 2)
    assert budget.kill_bytes - parent == 600 * MB - 32 * MIB
    assert budget.pause_bytes - parent == round(0.85 * (600 * MB - 32 * MIB))
    assert budget.smallest_limit_bytes == parent + 100 * MB
    assert budget.worker_count(0, 9) == 6


def limiter_of(workers: list[Worker], tmp_path: Path, limit: int = 1_000 * MB, maximum: int = 8) -> MemoryLimiter:
    return MemoryLimiter(MemoryBudget(limit, 50 * MB, 50 * MIB), maximum, lambda: workers, tmp_path / "pause")  # type: ignore[arg-type, return-value]


def test_target_workers_before_any_is_ready_counts_large_imports(tmp_path: Path) -> None:
    """Before any worker is ready, the target assumes imports of 80 MiB and first batches of 48 MiB."""
    limiter = limiter_of([], tmp_path)
    space = limiter.budget.kill_bytes - limiter.budget.parent_bytes
    assert limiter.target_workers() == space // (128 * MIB)
    assert limiter_of([], tmp_path, maximum=2).target_workers() == 2


def test_target_workers_follows_the_third_quartile_of_units(tmp_path: Path) -> None:
    """A single large unit does not lower the target: it is retried alone, and the third quartile counts."""
    worker = Worker(1, is_ready=True)
    limiter = limiter_of([worker], tmp_path)
    for peak in (250, 250, 250, 850):
        limiter.record_unit(peak * MB, 50 * MB, is_exclusive=False)
    limiter.record_unit(900 * MB, 50 * MB, is_exclusive=True)
    assert limiter.target_workers() == limiter.budget.worker_count(round(1.1 * 800 * MB), 8) == 1
    for _ in range(4):
        limiter.record_unit(250 * MB, 50 * MB, is_exclusive=False)
    assert limiter.target_workers() == limiter.budget.worker_count(round(1.1 * 200 * MB), 8) == 3


def test_record_ready_raises_the_memory_of_workers_and_never_lowers_it(tmp_path: Path, machine: Machine) -> None:
    limiter = limiter_of([], tmp_path)
    limiter.record_ready(90 * MIB)
    assert limiter.budget.worker_bytes == 90 * MIB
    limiter.record_ready(60 * MIB)
    assert limiter.budget.worker_bytes == 90 * MIB
    machine.held[machine.here] = 300 * MB
    limiter.record_ready(60 * MIB)
    assert limiter.budget.parent_bytes == 300 * MB


def test_frequent_shortages_lower_the_number_of_workers(tmp_path: Path) -> None:
    """Frequent shortages lower the number of workers. One shortage, and one more per eight units, are ignored.

    A shortage of a unit that ran alone does not count.
    """
    limiter = limiter_of([], tmp_path)
    limiter.record_shortage(False, 0)
    limiter.record_shortage(True, 0)
    limiter.record_shortage(False, 16)
    assert limiter.most_workers == 8
    limiter.record_shortage(False, 16)
    assert limiter.most_workers == 7
    for _ in range(20):
        limiter.record_shortage(False, 0)
    assert limiter.most_workers == 1


def test_a_worker_that_keeps_memory_is_replaced(tmp_path: Path) -> None:
    """A worker is replaced if it keeps more than 64 MiB or a quarter of its memory budget, whichever is larger."""
    worker: Any = Worker(1)
    worker.base_bytes = 50 * MB
    limiter = limiter_of([worker], tmp_path)
    quarter = limiter.budget.bytes_per_worker(1) // 4
    assert not limiter.should_replace(worker, 50 * MB + quarter)
    assert limiter.should_replace(worker, 50 * MB + quarter + 1)
    items: Any = [Worker(n) for n in range(20)]
    limiter = limiter_of(items, tmp_path)
    assert not limiter.should_replace(worker, 50 * MB + 64 * MIB)
    assert limiter.should_replace(worker, 50 * MB + 64 * MIB + 1)


@pytest.mark.parametrize(
    ("cpus", "need", "limit", "each"),
    [(8, 100, 800, 1), (8, 100, 400, 2), (8, 300, 800, 4), (8, 900, 800, 8), (1, 100, 800, 1), (3, 100, 200, 2)],
)
def test_ray_tasks_request_the_cpus_of_their_share(cpus: int, need: int, limit: int, each: int) -> None:
    assert divide_node(cpus, need, limit) == each


def test_work_memory_remembers_sixteen_units() -> None:
    memory = WorkMemory()
    assert memory.usual_bytes(7) == 7
    memory.add(5, 10)
    assert memory.usual_bytes() == 0
    for _ in range(16):
        memory.add(30, 10)
    assert memory.usual_bytes() == 20
