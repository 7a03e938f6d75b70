"""A worker process: it waits for a job and passes its units to a `UnitWorker`.

Started with `python -m`, so that scripts need no main guard and nothing of the parent is copied. It ends with its
parent, and the kernel kills it first when the machine runs out of memory.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run `python -m brim.execution.worker FD SETUP`, or `FD - SECONDS MODULE…`: import them and wait for a job."""
    parent = os.getppid()
    _die_with(parent)
    gc.disable()  # modules that are imported now stay
    try:
        connection = Connection(int(sys.argv[1]))
        setup = sys.argv[2] if sys.argv[2] != "-" else _wait_for_job(connection, float(sys.argv[3]), sys.argv[4:])
        while setup is not None:
            setup = _run_job(connection, Path(setup))
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the parent is gone


def _wait_for_job(connection: Connection, wait_s: float, modules: list[str]) -> str | None:
    """Import modules of brim and wait for a job; return the path of its setup, or None. No user code is loaded yet."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # the step reports it
    try:
        start = connection.recv() if connection.poll(wait_s) else None
    except EOFError:
        return None
    return None if start is None else _open_log(start)


def _open_log(start: Any) -> str:
    """Print to the log of a job from now on; return the path of its setup."""
    log = os.open(start.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 2)
    os.close(log)
    return str(start.setup)


def _run_job(connection: Connection, path: Path) -> str | None:
    """Compute the units of a job; return the setup of the next job with the same work, if there is one."""
    # The output of the user's function goes to the log, its input is empty, and the parent handles Ctrl-C.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Imported here, because the process must first be bound to its parent.
    from brim.execution.unit_worker import UnitWorker, failure_message, kill_children
    from brim.execution.worker_messages import JobEnd, JobStart, WorkerReady
    from brim.memory.meter import process_bytes
    from brim.state.atomic_files import failures

    try:
        folder = path.parent
        with failures(folder):
            data = path.read_bytes()
        setup = pickle.loads(data)
        with failures(folder):
            worker = UnitWorker(setup, connection, folder)
        worker.open()
    except BaseException as error:  # noqa: BLE001  the parent must be informed of any
        connection.send(failure_message(error))
        return None
    connection.send(WorkerReady(process_bytes(os.getpid())))
    while True:
        try:
            order = connection.recv()
            if isinstance(order, JobEnd):
                order = connection.recv() if connection.poll(order.wait_s) else None
        except EOFError:
            break
        if order is None:
            break
        if isinstance(order, JobStart):
            worker.close()
            gc.disable()
            return _open_log(order)
        worker.compute(order)
    worker.close()
    connection.close()
    kill_children()
    if not worker.runs_user_code:
        os._exit(0)  # finalizing the interpreter takes 0.1 s
    return None


def _die_with(parent: int) -> None:
    """End this process when the parent ends, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            Path("/proc/self/oom_score_adj").write_text("500")
        except OSError:
            pass
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
