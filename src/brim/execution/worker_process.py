"""Worker processes: started fresh, spoken with over a socket, ended with all they started.

Spare workers are there before anybody has work for them: one is started while the source is looked at, and in a program
that calls brim again and again, one is kept from call to call.

A spare has loaded brim's own modules for one kind of step and nothing of the user's. Once it has run a function of the
user's, it is given that function again and never another: what a function imports and leaves behind stays with it. It
is given nothing if this process has another environment, or works in another folder, than when it was started.

A job takes those that are there as its first workers, so that they count in its limit, and ends those that are not for
it. Between jobs they are kept for a minute; they end with this process.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.memory.limit import usable_cores
from brim.memory.meter import process_bytes, tree
from brim.monitor.watching.launch import HOME
from brim.records import dataclass

if TYPE_CHECKING:
    from brim.execution.scheduler import Attempt

# Libraries that start a thread for each core would start as many in every worker.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_TAIL_BYTES, _READ_BYTES = 4000, 1 << 16
_LOG_BYTES = 64 << 20  # a log that has grown to this is begun anew
_LINE = 1000


def worker_environment(threads: int) -> dict[str, str]:
    """That of this process, and what makes a worker small."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(HOME), *filter(None, [environment.get("PYTHONPATH")])])
    for name in _THREADS:
        environment.setdefault(name, str(threads))
    # Freed memory goes back at once, and threads do not keep heaps of their own.
    environment.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    environment.setdefault("MALLOC_ARENA_MAX", "2")
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(16 << 20))
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(4 << 20))
    return environment


class WorkerProcess:
    """One worker and what it is doing."""

    def __init__(self, number: int, setup: Path, threads: int, cwd: str | None = None) -> None:
        self._be(number, setup)
        with open(self.log, "ab") as log:
            self._start(worker_environment(threads), [str(setup)], log.fileno(), cwd)

    @classmethod
    def spare(cls, environment: Mapping[str, str], modules: Sequence[str]) -> WorkerProcess:
        """One without a job, that loads these modules and waits: `begin` gives it one."""
        worker = cls.__new__(cls)
        worker._be(0, Path(os.devnull))
        worker.was_spare = True
        worker._start(environment, ["-", *modules], subprocess.DEVNULL, None)
        return worker

    def begin(self, number: int, setup: Path) -> None:
        from brim.execution.worker_messages import Begin

        self._be(number, setup)
        self.was_spare = True
        self.send(Begin(str(setup), str(self.log)))

    def _be(self, number: int, setup: Path) -> None:
        self.number = number
        self.slot = 0  # the place that it has among those that run
        self.attempt: Attempt | None = None
        self.ahead: Attempt | None = None  # given while it does that one, so that it need not wait
        self.begun_at = 0.0
        self.is_quick = False  # its last unit took no longer than giving it another may take
        self.seen_bytes = 0
        self.ready = False
        self.base_bytes = 0  # held when it was ready
        self.peak_bytes = 0
        self.over_line_bytes = 0  # held when the line ended it
        self.alone = False
        self.stale = False  # set up for what is not wanted any more: it goes when it is idle
        self.children: tuple[int, ...] = ()  # what it had started when the line looked last
        self.was_spare = False  # it may have died of something that a fresh one does not
        self._read = 0
        self.log = setup.with_name(f"worker-{number}.log")

    def _start(self, environment: Mapping[str, str], arguments: Sequence[str], log: int, cwd: str | None) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "brim.execution.worker", str(theirs.fileno()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=(theirs.fileno(),),
            cwd=cwd,
        )
        theirs.close()
        self.pid = self._process.pid
        # Readable when the process is gone. Not every system has such a thing.
        self.end_descriptor = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        self.connection = Connection(ours.detach())

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            pass  # it is gone: that shows when it is listened to

    def held_bytes(self) -> int:
        """With all that it started."""
        return sum(process_bytes(pid) for pid in tree([self.pid]))

    @property
    def ended(self) -> bool:
        """Whether the process is gone. A child of it may still hold its end of the socket."""
        return self._process.poll() is not None

    def kill(self) -> None:
        _kill([*reversed(tree([self.pid])), *self.children])

    def kill_children(self) -> None:
        """What it leaves when it has died by itself."""
        _kill(self.children)

    def end(self) -> None:
        """It is idle: let it go by itself."""
        self.send(None)

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit code; negative for a signal. One that does not end in time is ended."""
        if self.end_descriptor >= 0:
            ending = select.poll()
            ending.register(self.end_descriptor, select.POLLIN)
            if not ending.poll(None if timeout_s is None else 1000 * timeout_s):
                self.kill()
            os.close(self.end_descriptor)
            self.end_descriptor, timeout_s = -1, None
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self.connection.close()
        return code

    def new_lines(self) -> list[str]:
        """What it has printed since the last call: the user's function may have something to say."""
        try:
            with open(self.log, "rb") as file:
                file.seek(self._read)
                read = file.read(_READ_BYTES)
                much = os.fstat(file.fileno()).st_size > _LOG_BYTES
            if much:
                os.truncate(self.log, 0)
        except OSError:
            return []
        data, newline, _ = read.rpartition(b"\n")
        if not newline and len(read) == _READ_BYTES:
            data = read
        self._read = 0 if much else self._read + len(data) + len(newline)
        lines = [
            line if len(line) <= _LINE else f"{line[:_LINE]} …" for line in data.decode(errors="replace").splitlines()
        ]
        return [*lines, "(it prints more than can be shown: some is left out)"] if much else lines

    def last_words(self) -> str:
        """The end of what it printed."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
                return file.read().decode(errors="replace")
        except OSError:
            return ""


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


KEPT_S = 60.0
_END_S = 2.0
ANYTHING = ""  # what a worker may be given next, if nothing of the user's has run in it
# What every worker loads in the end.
_MODULES = (
    "pyarrow",
    "brim.memory.meter",
    "brim.memory.release",
    "brim.compute.outputs.rows_file",
    "brim.compute.rows.read_unit",
    "brim.execution.worker_messages",
    "brim.state.atomic_files",
)
_ALSO = {"brim.compute.steps.tokenize_step": ("tokenizers",), "brim.compute.steps.map_step": ("cloudpickle",)}


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
