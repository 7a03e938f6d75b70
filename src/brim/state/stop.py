"""Requests to stop: Ctrl-C, a stop file, or `Stop` from another thread; on the command line SIGTERM and SIGUSR1 too.

In a user's program only Ctrl-C is handled, and only in the main thread, where Python would handle it: the job ends
cleanly, the handler is restored and KeyboardInterrupt is raised. All other signals are left to the program.

A run records in the user's state folder that it polls a stop file; at its end it removes the record and the file. A
file that exists at the start is stale if its run was killed, and removed with a note. Any other was made on purpose,
and is refused before anything is loaded. A file that appears later, even before the run has begun, stops it.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from brim.errors import InputError, StoppedError
from brim.memory.meter import boot_id, started
from brim.state.atomic_files import private_folder
from brim.state.retry import interrupted_by

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # batch systems warn with the last
_POLL_S = 0.2
_MOST_BLOCKED_S = 1.5  # in a library that does not return to Python

_handles_all_signals = False


class _ThreadState(threading.local):
    is_stopping_at_once = False
    polled_files: frozenset[Path] = frozenset()  # checked when reading began: a file that exists now is newer


_THREAD = _ThreadState()


def handle_all_signals() -> None:
    """Let signals stop the jobs of this process, which is a command of brim; it then ends with exit code 6."""
    global _handles_all_signals
    _handles_all_signals = True


class Stop:
    """Stops jobs from any thread: pass it as `stop=`, and call `request()`. Finished work is kept."""

    def __init__(self) -> None:
        self._why: str | None = None
        self._event = threading.Event()

    def request(self, why: str = "the program that runs it") -> None:
        """Request a stop. Jobs check a few times per second and raise `StoppedError`, which names `why`."""
        self._why = self._why or why
        self._event.set()

    @property
    def requested(self) -> str | None:
        """The reason of a request, or None."""
        return self._why if self._event.is_set() else None

    def check(self) -> None:
        """Raise StoppedError if a stop was requested."""
        if self._event.is_set():
            raise StoppedError(
                f"Stopped by {self._why}; finished shards are kept.", hint="Run the same command to continue."
            )


class RunStop(Stop):
    """The stop of one run, which workers check between chunks: set by a signal, a file, or the caller's `Stop`."""

    def __init__(self, files: tuple[Path, ...], caller: Stop | None = None) -> None:
        super().__init__()
        self._files, self._caller = files, caller
        self._polled_at = 0.0

    def check(self, *, now: bool = False) -> None:
        """Raise StoppedError if a stop was requested. `now`: poll the files however recently they were polled."""
        if self._caller is not None and (why := self._caller.requested):
            self.request(why)
        time_s = time.monotonic()
        if now or time_s - self._polled_at >= _POLL_S:
            self._polled_at = time_s
            for file in self._files:
                if file.exists():
                    self.request(f"the stop file {file.name}")
        super().check()


@contextmanager
def stoppable(*files: Path, requested: Stop | None = None) -> Iterator[RunStop]:
    """Turn signals, stop files and the caller's stop into one stop. A second Ctrl-C exits at once.

    A stop file that exists already is refused, or removed if it is stale. One that appears is removed at the end, as is
    one that appeared after this thread began to read the input of the run.
    """
    _settle_files(files)
    _THREAD.polled_files = frozenset()
    own = [file for file in files if note_run(file)]
    stop = RunStop(files, requested)
    try:
        with _all_signals(stop) if _handles_all_signals else _keyboard_interrupt(stop):
            yield stop
    finally:
        for file in own:
            forget_run(file)


@contextmanager
def stopping_at_once(*files: Path, requested: Stop | None = None) -> Iterator[None]:
    """As `stoppable`, before anything has begun that must end cleanly: StoppedError is raised wherever the thread is.

    In a user's program it is raised where this thread waits for a server.
    """
    if _THREAD.is_stopping_at_once:  # nested: the outer block decides
        yield
        return
    _THREAD.polled_files = frozenset()
    _settle_files(files)
    own = [file for file in files if note_run(file)]
    stop = RunStop(files, requested)
    _THREAD.is_stopping_at_once, _THREAD.polled_files = True, frozenset(files)
    run_follows = False
    try:
        with interrupted_by(stop.check), _all_signals(stop, at_once=True) if _handles_all_signals else nullcontext():
            yield
        stop.check(now=True)
        run_follows = True
    finally:
        _THREAD.is_stopping_at_once = False
        if not run_follows:
            _THREAD.polled_files = frozenset()
        for file in own:
            forget_run(file, keep=run_follows)  # a file that appears from now on is for the run


def _settle_files(files: tuple[Path, ...]) -> None:
    for file in files:
        if note := settle_stop_file(file):
            sys.stderr.write(f"brim: {note}\n")


@contextmanager
def _all_signals(stop: RunStop, *, at_once: bool = False) -> Iterator[None]:
    was_handled = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        was_handled.set()
        stop.request(_signal_name(number))
        signal.signal(number, signal.SIG_DFL)
        if at_once:
            stop.check()

    earlier = _set_handlers(_SIGNALS, on_signal)
    try:
        with _watching(stop, was_handled) if at_once and earlier else nullcontext():
            yield
    finally:
        _restore_handlers(earlier)


def _signal_name(number: int) -> str:
    return {signal.SIGINT: "Ctrl-C"}.get(signal.Signals(number), signal.Signals(number).name)


@contextmanager
def _watching(stop: RunStop, was_handled: threading.Event) -> Iterator[None]:
    """Watch stop files and signals in a thread while the main thread may be blocked in a library.

    Nothing has begun that must end cleanly, so the process is ended if the main thread does not return.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    is_over, earlier = threading.Event(), signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(stop, was_handled, is_over, read_end), name="stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(earlier)
        os.write(write_end, b"\0")
        thread.join()
        os.close(read_end)
        os.close(write_end)


def _watch(stop: RunStop, was_handled: threading.Event, is_over: threading.Event, read_end: int) -> None:
    arrived_at, number, was_requested = 0.0, 0, False
    while not is_over.is_set():
        if select.select([read_end], [], [], _POLL_S)[0]:
            arrived = [byte for byte in os.read(read_end, 64) if byte in _SIGNALS]
            arrived_at, number = (time.monotonic(), arrived[0]) if arrived and not number else (arrived_at, number)
        is_blocked = number and not was_handled.is_set() and time.monotonic() - arrived_at > _MOST_BLOCKED_S
        if is_blocked and not is_over.is_set():
            sys.stderr.write(f"brim: Stopped by {_signal_name(number)}; nothing was begun.\n")
            sys.stderr.flush()
            os._exit(StoppedError.exit_code)
        try:
            stop.check()
        except StoppedError:
            if not was_requested and not is_over.is_set() and not number:
                os.kill(os.getpid(), signal.SIGUSR1)
            was_requested = True


@contextmanager
def _keyboard_interrupt(stop: RunStop) -> Iterator[None]:
    """Raise KeyboardInterrupt when the job has ended after a Ctrl-C; a second Ctrl-C raises it immediately."""
    was_handled = threading.Event()

    def on_interrupt(number: int, _frame: FrameType | None) -> None:
        was_handled.set()
        stop.request("Ctrl-C")
        signal.signal(number, signal.default_int_handler)

    # If the program has its own handler or ignores the signal, leave that unchanged.
    python_handles = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    earlier = _set_handlers((signal.SIGINT,), on_interrupt) if python_handles else {}
    try:
        yield
    except StoppedError as stopped:
        if was_handled.is_set():
            raise KeyboardInterrupt(str(stopped)) from stopped
        raise
    finally:
        _restore_handlers(earlier)
    if was_handled.is_set():  # Ctrl-C came too late to stop the job, but the user wants the program to end
        raise KeyboardInterrupt


def _set_handlers(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> dict[int, Any]:
    """Set a handler and return the earlier ones. Only the main thread may have handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in numbers}


def _restore_handlers(earlier: dict[int, Any]) -> None:
    for number, handler in earlier.items():
        signal.signal(number, handler)


def settle_stop_file(path: Path) -> str | None:
    """Before a run, return None without a stop file, or a note if a stale one was removed; else raise InputError."""
    if not is_stale_stop_file(path):
        return None
    path.unlink(missing_ok=True)
    _record_path(path).unlink(missing_ok=True)
    return f"removed the stop file {path}: the run that it was made for has ended"


def is_stale_stop_file(path: Path) -> bool:
    """Return whether a stale stop file exists; raise InputError for one that is not stale. Changes nothing."""
    if path.is_dir():
        raise InputError(f"The stop file {str(path)!r} is a folder.", hint="Give the name of a file.")
    if path in _THREAD.polled_files or not path.exists():
        return False
    record = _read_record(path)
    if record is not None and not _is_running(record) and record["began"] <= path.stat().st_mtime:
        return True
    if record is not None and _is_running(record):
        raise InputError(
            f"The stop file {str(path)!r} exists: it stops the run with process {record['pid']}, which has not ended.",
            hint="Wait for its end, or name another file.",
        )
    raise InputError(
        f"The stop file {str(path)!r} already exists: the run would stop at once.", hint=f"Remove it: rm {path}"
    )


def note_run(path: Path) -> bool:
    """Record that this process polls a stop file. False if another process does: then that one removes it."""
    record = _read_record(path)
    if record is not None and _is_running(record):
        return False
    record_path = _record_path(path)
    values = {"pid": os.getpid(), "born": started(os.getpid()), "boot": boot_id(), "began": time.time()}
    try:
        private_folder(record_path.parent)
        record_path.write_text(json.dumps(values))
    except OSError:
        return True  # without a record, a stale file is refused: nothing is lost
    return True


def forget_run(path: Path, *, keep: bool = False) -> None:
    """Remove the record of a run that has ended, and the stop file, unless it is to `keep`."""
    for finished in (*(() if keep else (path,)), _record_path(path)):
        try:
            finished.unlink(missing_ok=True)
        except OSError:
            continue


def _record_path(path: Path, environment: Mapping[str, str] | None = None) -> Path:
    environment = os.environ if environment is None else environment
    state = environment.get("XDG_STATE_HOME") or os.path.join(environment.get("HOME") or "/tmp", ".local/state")
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return Path(state) / "brim" / "stop-files" / f"{name}.json"


def _read_record(path: Path) -> dict[str, float] | None:
    try:
        record = json.loads(_record_path(path).read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and {"pid", "born", "boot", "began"} <= record.keys() else None


def _is_running(record: Mapping[str, object]) -> bool:
    pid = record["pid"]
    return record["boot"] == boot_id() and isinstance(pid, int) and started(pid) == record["born"]
