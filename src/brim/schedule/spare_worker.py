"""Workers that are there before anybody has work for them: one is started while the source is looked at, and in a
program that calls brim again and again, one is kept from call to call.

A spare has loaded brim's own modules for one kind of step and nothing of the user's. Once it has run a function of the
user's, it is given that function again and never another: what a function imports and leaves behind stays with it. It
is given nothing if this process has another environment, or works in another folder, than when it was started.

A job takes those that are there as its first workers, so that they count in its limit, and ends those that are not for
it. Between jobs they are kept for a minute; they end with this process.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field

from brim.memory.limit import usable_cores
from brim.memory.meter import process_bytes, tree
from brim.records import dataclass
from brim.schedule.worker_process import WorkerProcess, worker_environment

KEPT_S = 60.0
_END_S = 2.0
ANYTHING = ""  # what a worker may be given next, if nothing of the user's has run in it
# What every worker loads in the end.
_MODULES = (
    "pyarrow",
    "brim.memory.meter",
    "brim.memory.release",
    "brim.outputs.rows_file",
    "brim.rows.read_unit",
    "brim.schedule.messages",
    "brim.state.durable",
)
_ALSO = {"brim.steps.tokenize_step": ("tokenizers",), "brim.steps.map_step": ("cloudpickle",)}


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """What a worker was started with, and what it may be given: `work` is a function's digest, or anything."""

    step: str
    environment: Mapping[str, str]
    folder: str
    work: str = ANYTHING

    @classmethod
    def now(cls, step: str, threads: int, work: str = ANYTHING) -> WorkerPlace:
        return cls(step, worker_environment(threads), os.getcwd(), work)


@dataclass(slots=True)
class _Kept:
    """The spares of this process: one at most for each place."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    workers: list[tuple[WorkerProcess, WorkerPlace]] = field(default_factory=list)
    timer: threading.Timer | None = None
    calls: int = 0  # of a program, that may call again


_KEPT = _Kept()


def threads_of(workers: int | None) -> int:
    """How many threads each of so many workers has; without a number there is one for each core."""
    return max(usable_cores() // (workers or usable_cores()), 1)


@contextmanager
def kept_workers() -> Iterator[None]:
    """What is called in here is likely to be called again: a worker that is done with it is kept."""
    _KEPT.calls += 1
    try:
        yield
    finally:
        _KEPT.calls -= 1


def start_spare(step: str, workers: int | None = None) -> None:
    """Have one for a step of that module. One that is there already is as good."""
    place = WorkerPlace.now(step, threads_of(workers))
    with _KEPT.lock:
        if any(kept == place and not worker.ended for worker, kept in _KEPT.workers):
            _keep_for(KEPT_S)
            return
        try:
            worker = WorkerProcess.spare(place.environment, (*_MODULES, step, *_ALSO.get(step, ())))
        except OSError:
            return  # the job starts its own, and tells what is wrong
        _add(worker, place)


def take_spares(step: str, threads: int, work: str | None) -> list[WorkerProcess]:
    """They are the caller's now: who has done the same work first. Others are ended: they would only take room."""
    here = WorkerPlace.now(step, threads)
    with _KEPT.lock:
        found: list[tuple[bool, WorkerProcess]] = []
        for worker, place in _KEPT.workers:
            same = (place.step, place.environment, place.folder) == (here.step, here.environment, here.folder)
            if same and place.work in (ANYTHING, work) and not worker.ended:
                found.append((place.work == ANYTHING, worker))
            else:
                _end(worker, place)
        _KEPT.workers = []
        _stop_timer()
        return [worker for _, worker in sorted(found, key=lambda pair: pair[0])]


def keep_worker(worker: WorkerProcess, step: str, threads: int, work: str | None) -> bool:
    """Whether it stays for the next call, which may give it the same work; anything, if nothing of a user's ran."""
    if not _KEPT.calls or work is None:
        return False
    place = WorkerPlace.now(step, threads, work)
    with _KEPT.lock:
        if any(kept == place for _, kept in _KEPT.workers):
            return False
        _add(worker, place)
    return True


def caller_bytes() -> int:
    """What this process and all it has started hold, but for the spares: what is the caller's before a job.

    Pages that forked processes share count for each, as in all sums over this tree that this is compared with.
    """
    with _KEPT.lock:
        spares = frozenset(tree([worker.pid for worker, _ in _KEPT.workers]))
    return sum(process_bytes(pid) for pid in tree([os.getpid()]) if pid not in spares)


def end_spares() -> None:
    with _KEPT.lock:
        workers, _KEPT.workers = _KEPT.workers, []
        _stop_timer()
        for worker, place in workers:
            _end(worker, place)


def _add(worker: WorkerProcess, place: WorkerPlace) -> None:
    for other, there in [pair for pair in _KEPT.workers if pair[1] == place or pair[0].ended]:
        _end(other, there)
    _KEPT.workers = [pair for pair in _KEPT.workers if pair[1] != place and not pair[0].ended] + [(worker, place)]
    _keep_for(KEPT_S)


def _end(worker: WorkerProcess, place: WorkerPlace) -> None:
    """What a function of the user's has left to be done at the end is done."""
    if place.work == ANYTHING:
        worker.kill()
    else:
        worker.end()
    worker.wait(_END_S)


def _keep_for(seconds: float) -> None:
    _stop_timer()
    _KEPT.timer = threading.Timer(seconds, end_spares)
    _KEPT.timer.daemon = True
    _KEPT.timer.start()


def _stop_timer() -> None:
    if _KEPT.timer is not None:
        _KEPT.timer.cancel()
        _KEPT.timer = None


def _belong_to_parent() -> None:
    """After a fork: they are the parent's."""
    global _KEPT
    _KEPT = _Kept()


atexit.register(end_spares)
os.register_at_fork(after_in_child=_belong_to_parent)
