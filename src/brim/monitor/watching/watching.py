"""`with brim.watch(memory="40GB") as m:` — the watch of `brim run`, for a program that watches itself.

The sampler is a separate process, so that a program that is starved or stuck is still sampled. It warns, writes the
log, creates the stop file and sets the flag that `should_stop()` reads. It sends no signal unless `enforce=True`.

A callback ends a training run before its memory does: a plain one, or one for transformers' Trainer.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from brim.errors import MissingDependencyError
from brim.memory.limit import watch_limit
from brim.memory.meter import Usage, tree_bytes
from brim.monitor.log_writer import alerts_path, check_log, new_log_path, prepare_log
from brim.monitor.watching.launch import SharedValues, StopLevels, WatchConfig, WatcherProcess, WatchTarget
from brim.monitor.watching.stop_sequence import lead_of
from brim.redact import redact_command
from brim.state.stop import forget_run, note_run, settle_stop_file

_FIRST_SAMPLE_S = 2.0


class StopCallback:
    """Call it once per step. It returns False to continue, True to end; then it has called `save` once."""

    def __init__(self, watched: Any, save: Callable[[], Any] | None = None) -> None:
        """`watched` has `should_stop()` and `mark(text)`."""
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


class MemoryWatch:
    """Watch this process and its descendants within a `with` block.

    `memory` is the limit (default: its memory and all free memory). `stop_file` is created when the program should
    stop, and a person may create it to stop it; `should_stop()` checks for both, and the file is removed at the end.
    `stop_lead` is the number of seconds that the program needs to stop (default: as long as last time, or 30): the stop
    is requested when less is predicted to remain. `alert`, `stop_at` and `kill_at` are levels like "80%" or "40GB";
    without `enforce` the last only sets the flag as well.
    """

    def __init__(
        self,
        memory: str | int | float | None = None,
        *,
        stop_file: str | os.PathLike[str] | None = None,
        alert: str = "80%",
        stop_at: str = "90%",
        kill_at: str = "97%",
        log: str | os.PathLike[str] | None = None,
        on_alert: str | None = None,
        stop_lead: float | None = None,
        enforce: bool = False,
        quiet: bool = False,
    ) -> None:
        limit = watch_limit(memory, held_bytes=tree_bytes())
        self.limit = limit if memory is None else replace(limit, reason="brim.watch(memory=…)")
        self.stop_file = Path(stop_file).absolute() if stop_file is not None else None
        note = settle_stop_file(self.stop_file) if self.stop_file is not None else ""
        for text in filter(None, () if quiet else (self.limit.warning, note)):
            sys.stderr.write(f"brim: {text}\n")
        # Python inside another program may have no arguments.
        self._command = redact_command([sys.executable, *(getattr(sys, "argv", None) or [""])])
        self.log = Path(log).absolute() if log is not None else new_log_path(Path(self._command[1]).name or "python")
        check_log(self.log)
        self._levels = StopLevels(
            alert=alert,
            stop=stop_at,
            kill=kill_at,
            stop_file=str(self.stop_file) if self.stop_file else None,
            alerts=str(alerts_path(self.log)),
            on_alert=on_alert,
            enforce=enforce,
            is_polled=True,
            lead_s=lead_of(self._command, self.log)[0] if stop_lead is None else stop_lead,
        )
        self._levels.thresholds(self.limit.bytes)
        self._is_floating = memory is None and not os.environ.get("BRIM_MEMORY")
        self._quiet = quiet
        self._values: SharedValues | None = None
        self._watcher: WatcherProcess | None = None
        self._last, self._peak = Usage(), 0
        self._owner = os.getpid()
        self._has_note = False

    def __enter__(self) -> Self:
        prepare_log(self.log, replace=False)
        self._owner = os.getpid()
        self._has_note = self.stop_file is not None and note_run(self.stop_file)
        self._values = SharedValues()
        config = WatchConfig(
            target=WatchTarget("process", pid=os.getpid(), command=tuple(self._command)),
            log=str(self.log),
            limit=self.limit,
            is_floating=self._is_floating,
            levels=self._levels,
            values_descriptor=self._values.descriptor,
            speak=not self._quiet,
        )
        self._watcher = WatcherProcess(config)
        deadline = time.monotonic() + _FIRST_SAMPLE_S
        while not self._values.get("t_ns") and time.monotonic() < deadline:
            time.sleep(0.005)  # so that `now` is known from the start
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watch and its log. In a forked child this does nothing: the watch belongs to the parent."""
        if os.getpid() != self._owner:
            return
        watcher, self._watcher = self._watcher, None
        if watcher is None or self._values is None:
            return
        watcher.send("finish")
        watcher.await_end(10.0)
        self._last, self._peak = self.usage, self.peak
        watcher.detach()
        self._values.close()
        self._values = None
        if self._has_note and self.stop_file is not None:
            forget_run(self.stop_file)

    @property
    def usage(self) -> Usage:
        """The last sample, by kind; at most a second old."""
        if self._values is None:
            return self._last
        get = self._values.get
        return Usage(get("anon_bytes"), get("shmem_bytes"), get("swap_bytes"), get("file_bytes"))

    @property
    def now(self) -> int:
        """The unreclaimable bytes of this process and its descendants in the last sample."""
        return self.usage.total_bytes

    @property
    def peak(self) -> int:
        """The highest memory of all samples."""
        return self._values.get("peak_bytes") if self._values is not None else self._peak

    def mark(self, text: str) -> None:
        """Write into the log that this point was reached, with the memory at this time."""
        if self._watcher is not None:
            self._watcher.send("mark", text=text)

    def should_stop(self) -> bool:
        """Check whether to save and end: after a stop request, or if the stop file exists."""
        if self._values is not None and self._values.get("stop"):
            return True
        return self.stop_file is not None and self.stop_file.exists()

    def callback(self, save: Callable[[], Any] | None = None) -> StopCallback:
        """Return a function for a training loop. When the loop should end, it calls `save` once and returns True."""
        return StopCallback(self, save)

    def trainer_callback(self) -> Any:
        """Return a `transformers.TrainerCallback` that saves a checkpoint and ends the training on a stop request."""
        try:
            from transformers import TrainerCallback  # type: ignore[import-not-found,unused-ignore]
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                "A callback for the Trainer needs transformers.", hint="pip install transformers", extra="embed"
            ) from error
        watched = self

        class BrimCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
            """Saves a checkpoint and ends the training on a stop request; marks its start and end."""

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
