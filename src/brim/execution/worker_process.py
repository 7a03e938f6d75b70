"""Worker processes: started fresh, controlled over a socket, killed with every process that they started.

One warm worker may wait for the next job: it is started while a source is opened, or kept from an earlier call of a
program. It has loaded brim's modules for one kind of step. Once it has run a function of the user, it gets only that
function again, because a function may leave state in its process. It gets no job in another environment or folder. The
next job takes it as its first worker, so that its memory counts in the limit of that job. It ends itself after a
minute without a job, and with this process.
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.execution.worker_messages import JobEnd, JobStart
from brim.memory.limit import usable_cores
from brim.memory.meter import process_bytes, tree
from brim.monitor.watching.launch import HOME

if TYPE_CHECKING:
    from brim.execution.scheduler import Attempt

# Libraries that start a thread per core would start as many in every worker.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_TAIL_BYTES, _READ_BYTES = 4000, 1 << 16
_LOG_BYTES = 64 << 20  # a log of this size is truncated
_LINE_CHARACTERS = 1000


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment of this process, with settings that keep a worker small."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(HOME), *filter(None, [environment.get("PYTHONPATH")])])
    for name in _THREADS:
        environment.setdefault(name, str(threads))
    # Freed memory is returned at once, and threads have no heaps of their own.
    environment.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    environment.setdefault("MALLOC_ARENA_MAX", "2")
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(16 << 20))
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(4 << 20))
    return environment


class WorkerProcess:
    """One worker process, and the unit that it computes."""

    def __init__(self, number: int, setup: Path, threads: int, cwd: str | None = None) -> None:
        self._reset(number, setup)
        with open(self.log, "ab") as log:
            self._start(worker_environment(threads), [str(setup)], log.fileno(), cwd)

    @classmethod
    def warm(cls, environment: Mapping[str, str], wait_s: float, modules: Sequence[str]) -> WorkerProcess:
        """Start a worker without a job, which imports modules and waits for `start_job`."""
        worker = cls.__new__(cls)
        worker._reset(0, Path(os.devnull))
        worker.was_warm = True
        worker._start(environment, ["-", str(wait_s), *modules], subprocess.DEVNULL, None)
        return worker

    def start_job(self, number: int, setup: Path) -> None:
        self._reset(number, setup)
        self.was_warm = True
        self.send(JobStart(str(setup), str(self.log)))

    def _reset(self, number: int, setup: Path) -> None:
        self.number = number
        self.slot = 0  # the lowest number that no other running worker has
        self.attempt: Attempt | None = None
        self.next_attempt: Attempt | None = None  # ordered in advance, so that the worker need not wait
        self.started_at = 0.0  # time at which the attempt started
        self.is_quick = False  # the last unit took no longer than ordering another one may take
        self.seen_bytes = 0
        self.is_ready = False
        self.base_bytes = 0  # memory when it was ready
        self.peak_bytes = 0
        self.killed_at_bytes = 0  # memory when the limiter killed it
        self.runs_alone = False
        self.is_stale = False  # its setup is outdated: it is replaced when it is idle
        self.children: tuple[int, ...] = ()  # processes that it had started at the last check
        self.was_warm = False  # it may have died of something that a fresh one does not
        self._log_offset = 0
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
        # Becomes readable when the process ends. Not every system has it.
        self.exit_descriptor = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        self.connection = Connection(ours.detach())

    def send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except OSError:
            pass  # the process is gone, which shows when it is polled

    def held_bytes(self) -> int:
        """Return the memory of the worker and of all processes that it started."""
        return sum(process_bytes(pid) for pid in tree([self.pid]))

    @property
    def has_exited(self) -> bool:
        """Whether the process is gone. A child of it may still hold its end of the socket."""
        return self._process.poll() is not None

    def kill(self) -> None:
        _kill([*reversed(tree([self.pid])), *self.children])

    def kill_children(self) -> None:
        """Kill processes that a dead worker has left."""
        _kill(self.children)

    def exit(self) -> None:
        """Let an idle worker exit."""
        self.send(None)

    def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit code, negative for a signal. A process that does not exit in time is killed."""
        if self.exit_descriptor >= 0:
            poll = select.poll()
            poll.register(self.exit_descriptor, select.POLLIN)
            if not poll.poll(None if timeout_s is None else 1000 * timeout_s):
                self.kill()
            os.close(self.exit_descriptor)
            self.exit_descriptor, timeout_s = -1, None
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self.connection.close()
        return code

    def new_lines(self) -> list[str]:
        """Return lines printed since the last call, by the user's function for example."""
        try:
            with open(self.log, "rb") as file:
                file.seek(self._log_offset)
                read = file.read(_READ_BYTES)
                is_large = os.fstat(file.fileno()).st_size > _LOG_BYTES
            if is_large:
                os.truncate(self.log, 0)
        except OSError:
            return []
        data, newline, _ = read.rpartition(b"\n")
        if not newline and len(read) == _READ_BYTES:
            data = read
        self._log_offset = 0 if is_large else self._log_offset + len(data) + len(newline)
        limit = _LINE_CHARACTERS
        texts = data.decode(errors="replace").splitlines()
        lines = [text if len(text) <= limit else f"{text[:limit]} …" for text in texts]
        return [*lines, "(it prints more than can be shown: some lines were skipped)"] if is_large else lines

    def last_output(self) -> str:
        """Return the end of the printed output."""
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


WAIT_S = 60.0  # a warm worker waits so long for a job
_EXIT_S = 2.0
ANY_WORK = ""  # the digest of a worker that has run no code of the user
_MODULES = ("brim.execution.unit_worker",)  # every worker imports them
_STEP_MODULES = {"brim.compute.steps.tokenize_step": ("tokenizers",), "brim.compute.steps.map_step": ("cloudpickle",)}


class _Warm:
    """The warm worker of this process; its setup: the module of its step, its environment and its folder; its work."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.worker: WorkerProcess | None = None
        self.setup: tuple[str, Mapping[str, str], str] | None = None
        self.work = ANY_WORK  # digest of the user's function that it has run
        self.callers = 0  # calls of a program that are running, and may come again

    def keep(self, worker: WorkerProcess | None, setup: tuple[str, Mapping[str, str], str] | None, work: str) -> None:
        """Replace the warm worker; the earlier one exits. It runs the exit handlers of the user's code."""
        earlier, earlier_work = self.worker, self.work
        self.worker, self.setup, self.work = worker, setup, work
        if earlier is not None:
            earlier.kill() if earlier_work == ANY_WORK else earlier.exit()
            earlier.wait(_EXIT_S)


_WARM = _Warm()


def _worker_setup(step: str, threads: int) -> tuple[str, Mapping[str, str], str]:
    return step, worker_environment(threads), os.getcwd()


def threads_per_worker(workers: int | None) -> int:
    """Return the number of threads of each of so many workers; without a number, there is one per core."""
    return max(usable_cores() // (workers or usable_cores()), 1)


@contextmanager
def keeping_worker() -> Iterator[None]:
    """Keep one worker of the jobs in this block warm, because the next call is likely to do the same work."""
    _WARM.callers += 1
    try:
        yield
    finally:
        _WARM.callers -= 1


def start_warm_worker(step: str, workers: int | None = None) -> None:
    """Start a worker for a step of this module, unless a warm one exists."""
    setup = _worker_setup(step, threads_per_worker(workers))
    with _WARM.lock:
        if _WARM.worker is not None and _WARM.setup == setup and not _WARM.worker.has_exited:
            return
        try:
            worker = WorkerProcess.warm(setup[1], WAIT_S, (*_MODULES, step, *_STEP_MODULES.get(step, ())))
        except OSError:
            return  # the job starts its own, and reports the error
        _WARM.keep(worker, setup, ANY_WORK)


def take_warm_worker(step: str, threads: int, work: str | None) -> WorkerProcess | None:
    """Return the warm worker if it may do this work. Another one exits, because it would only use memory."""
    with _WARM.lock:
        worker = _WARM.worker
        if worker is None or worker.has_exited or _WARM.setup != _worker_setup(step, threads):
            _WARM.keep(None, None, ANY_WORK)
            return None
        if _WARM.work not in (ANY_WORK, work):
            _WARM.keep(None, None, ANY_WORK)
            return None
        _WARM.worker = None
        return worker


def keep_worker(worker: WorkerProcess, step: str, threads: int, work: str | None) -> bool:
    """Keep a worker for the next call, if there may be one; return whether it was kept.

    `work` is the digest of the user's function that it has run, None if that cannot be known.
    """
    if not _WARM.callers or work is None:
        return False
    with _WARM.lock:
        if _WARM.worker is not None and not _WARM.worker.has_exited:
            return False
        worker.send(JobEnd(WAIT_S))
        _WARM.keep(worker, _worker_setup(step, threads), work)
    return True


def end_warm_worker() -> None:
    with _WARM.lock:
        _WARM.keep(None, None, ANY_WORK)


def caller_bytes() -> int:
    """Return the memory of this process and all that it started, without the warm worker: the caller's, before a job.

    Pages that forked processes share count for each, as in all sums over this tree that it is compared with.
    """
    with _WARM.lock:
        warm = frozenset(() if _WARM.worker is None else tree([_WARM.worker.pid]))
    return sum(process_bytes(pid) for pid in tree([os.getpid()]) if pid not in warm)


def _forget_after_fork() -> None:
    """Leave the warm worker to the parent."""
    global _WARM
    _WARM = _Warm()


atexit.register(end_warm_worker)
os.register_at_fork(after_in_child=_forget_after_fork)
