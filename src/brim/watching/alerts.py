"""Telling people: the terminal, a plain-text file to `tail -f`, and a command of the user's own."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from brim.state.durable import write_all

_HOOK_LIMIT_S = 60.0
_UNSAID = 100  # lines that wait for a terminal that is not read; what comes after them is only in the files
_STDERR = 2


class _Voice(threading.Thread):
    """Writes to stderr: a pipe that nobody reads, or a terminal at Ctrl-S, holds up this thread and not the watch."""

    def __init__(self) -> None:
        super().__init__(name="brim-voice", daemon=True)
        self.lines: queue.Queue[str | None] = queue.Queue(_UNSAID)

    def run(self) -> None:
        while (line := self.lines.get()) is not None:
            try:
                write_all(_STDERR, line.encode(errors="replace"))
            except OSError:
                continue  # the terminal is gone


class Alerts:
    """Says each thing in all the places the user asked for. None of them may hold the watch up."""

    def __init__(self, file: Path | None, hook: str | None, speak: bool, log: Path) -> None:
        self._file, self._hook, self._speak, self._log = file, hook, speak, log
        self._voice: _Voice | None = None
        self._running: list[tuple[float, subprocess.Popen[bytes]]] = []
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch(mode=0o600)
            except OSError as error:
                self._print(f"the alerts file {file} cannot be written: {error.strerror}")
                self._file = None

    def say(self, kind: str, text: str, facts: dict[str, Any]) -> None:
        self._print(text)
        if self._file is not None:
            try:
                with open(self._file, "a") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {kind}: {text}\n")
            except OSError:
                pass  # a full disk: the terminal and the log still say it
        if self._hook is not None:
            self._run_hook(kind, text, facts)

    def _print(self, text: str) -> None:
        if not self._speak:
            return
        if self._voice is None:
            self._voice = _Voice()
            self._voice.start()
        try:
            self._voice.lines.put_nowait(f"brim: {text}\n")
        except queue.Full:
            pass

    def settle(self, timeout_s: float = 1.0) -> None:
        """Wait until all is said, unless nobody listens."""
        voice, self._voice = self._voice, None
        if voice is not None:
            try:
                voice.lines.put_nowait(None)
            except queue.Full:
                return
            voice.join(timeout_s)

    def _run_hook(self, kind: str, text: str, facts: dict[str, Any]) -> None:
        """The watcher's own environment is already small (see launch.py): no secret can be passed on."""
        environment = {
            **os.environ,
            "BRIM_ALERT": kind,
            "BRIM_TEXT": text,
            "BRIM_LOG": str(self._log),
            **{f"BRIM_{name.upper()}": str(value) for name, value in facts.items()},
        }
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._hook or ""],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR if self._speak else subprocess.DEVNULL,
                start_new_session=True,  # to be ended with all it started
            )
        except OSError as error:
            self._print(f"--on-alert could not be started: {error.strerror}")
            return
        self._running.append((time.monotonic(), process))

    def tend(self) -> None:
        """Collect hooks that have ended, end those that hang."""
        for begun, process in list(self._running):
            if process.poll() is not None:
                self._running.remove((begun, process))
            elif time.monotonic() - begun > _HOOK_LIMIT_S:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def close(self) -> None:
        """An alerts file in which nothing stands is not left behind."""
        deadline = time.monotonic() + 2.0
        for _, process in self._running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                continue  # it goes on by itself
        if self._file is not None and self._file.exists() and not self._file.stat().st_size:
            self._file.unlink(missing_ok=True)
