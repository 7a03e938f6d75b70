"""`with brim.watch(memory="40GB") as m:` — the watch of `brim run`, for a program that watches itself.

The sampler is a separate process here too, so that a program that is starved or stuck is still sampled. It warns,
writes the log, creates the stop file and sets the flag that `should_stop()` reads. It sends no signal unless
`act=True`.

A callback ends a training run before its memory does: a plain one, or one for transformers' Trainer.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

from brim.errors import MissingDependencyError
from brim.memory.limit import Limit, watch_limit
from brim.memory.meter import Usage, tree_bytes
from brim.monitor.watching.act import lead_of
from brim.monitor.watching.launch import Board, Ladder, Orders, Target, WatcherProcess
from brim.monitor.watching.run_log import alerts_path, check_log, new_log_path, prepare_log
from brim.redact import redact_command
from brim.state.stop import forget_run, note_run, settle_stop_file

_FIRST_SAMPLE_S = 2.0


class Watched(Protocol):
    """The part of a watch that a callback uses."""

    def should_stop(self) -> bool: ...
    def mark(self, text: str) -> None: ...


class StopCallback:
    """Call it once per step. It returns False to continue, True to end; then it has called `save` once."""

    def __init__(self, watched: Watched, save: Callable[[], Any] | None = None) -> None:
        self._watched, self._save = watched, save
        self.stopped = False

    def __call__(self, *_: Any, **__: Any) -> bool:
        """Accept and ignore the arguments that a framework passes to its callbacks."""
        if not self.stopped and self._watched.should_stop():
            self.stopped = True
            self._watched.mark("saving, then stopping")
            if self._save is not None:
                self._save()
        return self.stopped


def trainer_callback(watched: Watched) -> Any:
    """A `transformers.TrainerCallback`. transformers is imported here and not before."""
    try:
        from transformers import TrainerCallback  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "A callback for the Trainer needs transformers.", hint="pip install transformers", extra="embed"
        ) from error

    class BrimCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Saves a checkpoint and ends the training on a stop request; marks its beginning and end."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            watched.mark("training begins")
            return control

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if watched.should_stop() and not control.should_training_stop:
                watched.mark(f"step {state.global_step}: saving, then stopping")
                control.should_save = True
                control.should_training_stop = True
            return control

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            watched.mark("training ends")
            return control

    return BrimCallback()


class watch:
    """Watch this process and all it starts.

    `memory` is the limit (default: its memory and all free memory). `stop_file` is created when the program should
    stop, and a person may create it to stop it; `should_stop()` checks for both, and the file is removed at the end.
    `lead` is the number of seconds that the program needs to stop (default: as long as last time, or 30): the stop is
    requested when less is predicted to remain. `alert`, `stop` and `kill` are levels like "80%" or "40GB"; without
    `act` the last only sets the flag as well.
    """

    def __init__(
        self,
        memory: str | int | float | None = None,
        *,
        stop_file: str | os.PathLike[str] | None = None,
        alert: str = "80%",
        stop: str = "90%",
        kill: str = "97%",
        log: str | os.PathLike[str] | None = None,
        on_alert: str | None = None,
        lead: float | None = None,
        act: bool = False,
        quiet: bool = False,
    ) -> None:
        self.limit = _own_limit(memory)
        if self.limit.warning and not quiet:
            sys.stderr.write(f"brim: {self.limit.warning}\n")
        self.stop_file = Path(stop_file).absolute() if stop_file is not None else None
        if self.stop_file is not None and (note := settle_stop_file(self.stop_file)) and not quiet:
            sys.stderr.write(f"brim: {note}\n")
        self.log = Path(log).absolute() if log is not None else new_log_path(Path(_argv()[0]).name or "python")
        check_log(self.log)
        self._ladder = Ladder(
            alert=alert,
            stop=stop,
            kill=kill,
            stop_file=str(self.stop_file) if self.stop_file else None,
            alerts=str(alerts_path(self.log)),
            on_alert=on_alert,
            act=act,
            heard=True,
            lead_s=lead_of(_own_command(), self.log)[0] if lead is None else lead,
        )
        self._ladder.lines(self.limit.bytes)
        self._floating = memory is None and not os.environ.get("BRIM_MEMORY")
        self._quiet = quiet
        self._board: Board | None = None
        self._watcher: WatcherProcess | None = None
        self._last = Usage()
        self._peak = 0
        self._owner = os.getpid()
        self._obeys = False

    def __enter__(self) -> Self:
        prepare_log(self.log, anew=False)
        self._owner = os.getpid()
        self._obeys = self.stop_file is not None and note_run(self.stop_file)
        self._board = Board()
        orders = Orders(
            target=Target("process", pid=os.getpid(), command=tuple(_own_command())),
            log=str(self.log),
            limit_bytes=self.limit.bytes,
            asked_bytes=self.limit.asked_bytes,
            limit_why=self.limit.reason,
            floating=self._floating,
            ladder=self._ladder,
            board=self._board.descriptor,
            speak=not self._quiet,
        )
        self._watcher = WatcherProcess(orders)
        deadline = time.monotonic() + _FIRST_SAMPLE_S
        while not self._board.get("t_ns") and time.monotonic() < deadline:
            time.sleep(0.005)  # so that `now` is known from the beginning
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watch and its log. In a forked child this does nothing: the watch belongs to the parent."""
        if os.getpid() != self._owner:
            return
        watcher, self._watcher = self._watcher, None
        if watcher is None or self._board is None:
            return
        watcher.tell("finish")
        watcher.await_end(10.0)
        self._last, self._peak = self.usage, self.peak
        watcher.let_go()
        self._board.close()
        self._board = None
        if self._obeys and self.stop_file is not None:
            forget_run(self.stop_file)

    @property
    def usage(self) -> Usage:
        """The last sample, by kind; at most a second old."""
        if self._board is None:
            return self._last
        get = self._board.get
        return Usage(get("anon_bytes"), get("shmem_bytes"), get("swap_bytes"), get("file_bytes"))

    @property
    def now(self) -> int:
        """Unreclaimable bytes of this process and all it started, as of the last sample."""
        return self.usage.total_bytes

    @property
    def peak(self) -> int:
        """The most that was seen."""
        return self._board.get("peak_bytes") if self._board is not None else self._peak

    def mark(self, text: str) -> None:
        """Write into the log that this point was reached, with the memory at it."""
        if self._watcher is not None:
            self._watcher.tell("mark", text=text)

    def should_stop(self) -> bool:
        """Check whether to save and end: after a stop request, or if the stop file exists."""
        if self._board is not None and self._board.get("stop"):
            return True
        return self.stop_file is not None and self.stop_file.exists()

    def callback(self, save: Callable[[], Any] | None = None) -> StopCallback:
        """A function for a training loop: True when it should end, after calling `save` once."""

        return StopCallback(self, save)

    def trainer_callback(self) -> Any:
        """A `transformers.TrainerCallback` that saves a checkpoint and ends the training when it is time."""

        return trainer_callback(self)


def _argv() -> list[str]:
    """How this program was called; Python inside another program may have no words for that."""
    return list(getattr(sys, "argv", None) or [""])


def _own_command() -> list[str]:
    return redact_command([sys.executable, *_argv()])


def _own_limit(memory: str | int | float | None) -> Limit:
    limit = watch_limit(memory, held_bytes=tree_bytes())
    return limit if memory is None else replace(limit, reason="brim.watch(memory=…)")
