"""Asked to stop: by Ctrl-C, a stop file, or another thread; and in the terminal by SIGTERM and SIGUSR1 too.

In a program of somebody else's only Ctrl-C is heard, and only in the main thread, where Python would hear it: the job
ends cleanly, the handler is put back and KeyboardInterrupt is raised. All other signals are the program's own.

A run notes in the user's state folder that it obeys a stop file, and takes the note and the file away when it ends.
A file that is there at the start is stale if the run that it was made for has ended without taking it away (it was
killed); then it goes, with a word about it. Any other was made by somebody who means it: refused, before anything
is loaded. One that comes later, while a source is read or before the run has begun, is obeyed.
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

_OWN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # batch systems warn with the last
_LOOK_EVERY_S = 0.2
_MOST_DEAF_S = 1.5  # for a library that does not come back

_process_is_ours = False


class _Here(threading.local):
    hears = False
    not_there: frozenset[Path] = frozenset()  # when the reading for the next run began: what is there now came since


_HERE = _Here()


def hear_all_signals() -> None:
    """From now on this process is a command of brim's: signals end its jobs, and say so by exit code 6."""
    global _process_is_ours
    _process_is_ours = True


class Stop:
    """Asks jobs to stop, from any thread: give it as `stop=`, and call `request()`. What is finished stays finished."""

    def __init__(self) -> None:
        self._why: str | None = None
        self._event = threading.Event()

    def request(self, why: str = "the program that runs it") -> None:
        """Ask. Jobs look a few times a second and raise `StoppedError`; `why` is told there."""
        self._why = self._why or why
        self._event.set()

    @property
    def requested(self) -> str | None:
        """Why, if someone asked."""
        return self._why if self._event.is_set() else None

    def check(self) -> None:
        """Raise Stopped if someone asked."""
        if self._event.is_set():
            raise StoppedError(
                f"Stopped by {self._why}; finished shards are kept.", hint="Run the same command to continue."
            )


class RunStop(Stop):
    """The flag of one run, which workers look at between chunks: set by a signal, a file or the caller's own."""

    def __init__(self, files: tuple[Path, ...], asked: Stop | None = None) -> None:
        super().__init__()
        self._files, self._asked = files, asked
        self._looked = 0.0

    def check(self, *, now: bool = False) -> None:
        """`now`: files are looked at however short ago they were."""
        if self._asked is not None and (why := self._asked.requested):
            self.request(why)
        at = time.monotonic()
        if now or at - self._looked >= _LOOK_EVERY_S:
            self._looked = at
            for file in self._files:
                if file.exists():
                    self.request(f"the stop file {file.name}")
        super().check()


@contextmanager
def stoppable(*files: Path, asked: Stop | None = None) -> Iterator[RunStop]:
    """Turn signals, stop files and what the caller asks into a flag. A second Ctrl-C ends the process at once.

    A stop file that is there already is refused, or removed if it is stale; one that comes goes at the end, as does one
    that came since this thread began to read what the run is made of.
    """
    _settle(files)
    _HERE.not_there = frozenset()
    ours = [file for file in files if note_run(file)]
    stop = RunStop(files, asked)
    try:
        with _all_signals(stop) if _process_is_ours else _interrupt(stop):
            yield stop
    finally:
        for file in ours:
            forget_run(file)


@contextmanager
def heard_at_once(*files: Path, asked: Stop | None = None) -> Iterator[None]:
    """The same while nothing has begun that must end cleanly: `StoppedError` is raised wherever this thread is.

    In a program of somebody else's, that is where it waits for a server.
    """
    if _HERE.hears:  # whoever called has said what to hear
        yield
        return
    _HERE.not_there = frozenset()
    _settle(files)
    ours = [file for file in files if note_run(file)]
    stop = RunStop(files, asked)
    _HERE.hears, _HERE.not_there = True, frozenset(files)
    begins = False
    try:
        with interrupted_by(stop.check), _all_signals(stop, at_once=True) if _process_is_ours else nullcontext():
            yield
        stop.check(now=True)
        begins = True
    finally:
        _HERE.hears = False
        if not begins:
            _HERE.not_there = frozenset()
        for file in ours:
            forget_run(file, keep=begins)  # what comes from now on is for the run


def _settle(files: tuple[Path, ...]) -> None:
    for file in files:
        if note := settle_stop_file(file):
            sys.stderr.write(f"brim: {note}\n")


@contextmanager
def _all_signals(stop: RunStop, *, at_once: bool = False) -> Iterator[None]:
    heard = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        heard.set()
        stop.request(_name(number))
        signal.signal(number, signal.SIG_DFL)
        if at_once:
            stop.check()

    before = _handled(_OWN, on_signal)
    try:
        with _looking(stop, heard) if at_once and before else nullcontext():
            yield
    finally:
        _put_back(before)


def _name(number: int) -> str:
    return {signal.SIGINT: "Ctrl-C"}.get(signal.Signals(number), signal.Signals(number).name)


@contextmanager
def _looking(stop: RunStop, heard: threading.Event) -> Iterator[None]:
    """A file or another thread that asks is heard as a signal is. A signal is heard too while a library keeps the main
    thread: nothing has begun that must end cleanly."""
    news, told = os.pipe()
    os.set_blocking(told, False)
    over, other = threading.Event(), signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    thread = threading.Thread(target=_look, args=(stop, heard, over, news), name="stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(other)
        os.write(told, b"\0")
        thread.join()
        os.close(news)
        os.close(told)


def _look(stop: RunStop, heard: threading.Event, over: threading.Event, news: int) -> None:
    began, number, asked = 0.0, 0, False
    while not over.is_set():
        if select.select([news], [], [], _LOOK_EVERY_S)[0]:
            came = [one for one in os.read(news, 64) if one in _OWN]
            began, number = (time.monotonic(), came[0]) if came and not number else (began, number)
        if number and not heard.is_set() and not over.is_set() and time.monotonic() - began > _MOST_DEAF_S:
            sys.stderr.write(f"brim: Stopped by {_name(number)}; nothing was begun.\n")
            sys.stderr.flush()
            os._exit(StoppedError.exit_code)
        try:
            stop.check()
        except StoppedError:
            if not asked and not over.is_set() and not number:
                os.kill(os.getpid(), signal.SIGUSR1)
            asked = True


@contextmanager
def _interrupt(stop: RunStop) -> Iterator[None]:
    """Ctrl-C as it is known in Python, but only once the job has ended; a second one is not waited for."""
    heard = threading.Event()

    def on_interrupt(number: int, _frame: FrameType | None) -> None:
        heard.set()
        stop.request("Ctrl-C")
        signal.signal(number, signal.default_int_handler)

    # Who has a handler of their own, or ignores it, means that.
    python_hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    before = _handled((signal.SIGINT,), on_interrupt) if python_hears else {}
    try:
        yield
    except StoppedError as stopped:
        if heard.is_set():
            raise KeyboardInterrupt(str(stopped)) from stopped
        raise
    finally:
        _put_back(before)
    if heard.is_set():  # too late to stop anything, but somebody wants the program to end
        raise KeyboardInterrupt


def _handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """What was there before. Only the main thread may have handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in numbers}


def _put_back(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)


def settle_stop_file(path: Path) -> str | None:
    """Before a run: None if there is no such file, a sentence if a stale one was removed; else an InputError."""
    if not stop_file_lies(path):
        return None
    path.unlink(missing_ok=True)
    _note_path(path).unlink(missing_ok=True)
    return f"removed the stop file {path}: the run that it was made for has ended"


def stop_file_lies(path: Path) -> bool:
    """Whether there is a stale one; an InputError if it is not stale. Changes nothing: for whoever begins to plan."""
    if path.is_dir():
        raise InputError(f"The stop file {str(path)!r} is a folder.", hint="Give the name of a file.")
    if path in _HERE.not_there or not path.exists():
        return False
    note = _read(path)
    if note is not None and not _runs(note) and note["began"] <= path.stat().st_mtime:
        return True
    if note is not None and _runs(note):
        raise InputError(
            f"The stop file {str(path)!r} is there: it stops the run with process {note['pid']}, which still goes on.",
            hint="Wait for its end, or name another file.",
        )
    raise InputError(
        f"The stop file {str(path)!r} is there already: the run would stop at once.", hint=f"Remove it: rm {path}"
    )


def note_run(path: Path) -> bool:
    """This process obeys the file from now on. False if another does already: then the end is that one's to see to."""
    note = _read(path)
    if note is not None and _runs(note):
        return False
    place = _note_path(path)
    facts = {"pid": os.getpid(), "born": started(os.getpid()), "boot": boot_id(), "began": time.time()}
    try:
        private_folder(place.parent)
        place.write_text(json.dumps(facts))
    except OSError:
        return True  # without a note a file that is left behind is refused: said, and not lost
    return True


def forget_run(path: Path, *, keep: bool = False) -> None:
    """The run is over: what asked it to stop has been obeyed, unless it is to `keep`."""
    for done in (*(() if keep else (path,)), _note_path(path)):
        try:
            done.unlink(missing_ok=True)
        except OSError:
            continue


def _note_path(path: Path, environment: Mapping[str, str] | None = None) -> Path:
    environment = os.environ if environment is None else environment
    state = environment.get("XDG_STATE_HOME") or os.path.join(environment.get("HOME") or "/tmp", ".local/state")
    name = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:32]
    return Path(state) / "brim" / "stop-files" / f"{name}.json"


def _read(path: Path) -> dict[str, float] | None:
    try:
        note = json.loads(_note_path(path).read_text())
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) and {"pid", "born", "boot", "began"} <= note.keys() else None


def _runs(note: Mapping[str, object]) -> bool:
    pid = note["pid"]
    return note["boot"] == boot_id() and isinstance(pid, int) and started(pid) == note["born"]
