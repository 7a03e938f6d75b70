"""Worker processes: started fresh, spoken with over a socket, ended with all they started."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.memory.meter import process_bytes, tree
from brim.watching.launch import HOME

if TYPE_CHECKING:  # a Ray worker has one of these, and schedules nothing
    from brim.schedule.messages import At
    from brim.schedule.scheduler import Attempt

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
        from brim.schedule.messages import Begin

        self._be(number, setup)
        self.was_spare = True
        self.send(Begin(str(setup), str(self.log)))

    def _be(self, number: int, setup: Path) -> None:
        self.number = number
        self.slot = 0  # the place that it has among those that run
        self.attempt: Attempt | None = None
        self.at: At | None = None
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
            [sys.executable, "-P", "-m", "brim.schedule.worker", str(theirs.fileno()), *arguments],
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
