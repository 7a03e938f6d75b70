"""Report alerts without blocking the watch, and read the stacks of Python processes (py-spy, extra `watch`)."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from brim.redact import redact
from brim.state.atomic_files import write_all

_HOOK_LIMIT_S = 60.0
_MOST_UNREAD = 100  # lines for a terminal that is not read; later ones are only in the files
_STDERR = 2


class Alerts:
    """Sends alerts to the terminal, the text file and the user's `--on-alert` command."""

    def __init__(self, file: Path | None, hook: str | None, speak: bool, log: Path) -> None:
        self._file, self._hook, self._speak, self._log = file, hook, speak, log
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_UNREAD)
        self._printing: threading.Thread | None = None
        self._running: list[tuple[float, subprocess.Popen[bytes]]] = []
        if file is not None:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch(mode=0o600)
            except OSError as error:
                self._print(f"the alerts file {file} cannot be written: {error.strerror}")
                self._file = None

    def send(self, kind: str, text: str, facts: dict[str, Any]) -> None:
        self._print(text)
        if self._file is not None:
            try:
                with open(self._file, "a") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {kind}: {text}\n")
            except OSError:
                pass  # a full disk: the terminal and the log have it
        if self._hook is not None:
            self._run_hook(kind, text, facts)

    def _print(self, text: str) -> None:
        """Print in a thread, because a pipe that is not read, or a terminal at Ctrl-S, blocks."""
        if not self._speak:
            return
        if self._printing is None:
            self._printing = threading.Thread(target=self._print_lines, name="brim-alerts", daemon=True)
            self._printing.start()
        try:
            self._lines.put_nowait(f"brim: {text}\n")
        except queue.Full:
            pass

    def _print_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                write_all(_STDERR, line.encode(errors="replace"))
            except OSError:
                continue  # the terminal is gone

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until all lines are printed, up to a time limit."""
        printing, self._printing = self._printing, None
        if printing is not None:
            try:
                self._lines.put_nowait(None)
            except queue.Full:
                return
            printing.join(timeout_s)

    def _run_hook(self, kind: str, text: str, facts: dict[str, Any]) -> None:
        """Run the hook. The watcher's environment is already reduced (see launch.py) and has no secrets."""
        values = {"alert": kind, "text": text, "log": self._log, **facts}
        environment = {**os.environ, **{f"BRIM_{name.upper()}": str(value) for name, value in values.items()}}
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", self._hook or ""],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR if self._speak else subprocess.DEVNULL,
                start_new_session=True,  # to be killed with its child processes
            )
        except OSError as error:
            self._print(f"--on-alert could not be started: {error.strerror}")
            return
        self._running.append((time.monotonic(), process))

    def reap_hooks(self) -> None:
        """Reap hooks that have ended, kill those that hang."""
        for start, process in list(self._running):
            if process.poll() is not None:
                self._running.remove((start, process))
            elif time.monotonic() - start > _HOOK_LIMIT_S:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def close(self) -> None:
        """Wait briefly for hooks, and remove an empty alerts file."""
        deadline = time.monotonic() + 2.0
        for _, process in self._running:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                continue  # it may outlive the watch
        if self._file is not None and self._file.exists() and not self._file.stat().st_size:
            self._file.unlink(missing_ok=True)


_STACK_LIMIT_S = 1.0
_MOST_STACKS, _MOST_LINES = 3, 200
_INSTALL = "pip install py-spy records the stacks of Python processes"


class Stacks:
    """Reads stacks in a thread; `report(text, lines)` is called once for each process.

    The processes are not paused (`--nonblocking`), and values of variables are never read.
    """

    def __init__(self, report: Callable[[str, list[str]], None]) -> None:
        self._report = report
        self._thread: threading.Thread | None = None
        self._is_missing_reported = False

    def read(self, pids: Iterable[int], occasion: str) -> None:
        """Read the stacks of the first of these processes; nothing if the previous reading is not finished."""
        python_pids = [pid for pid in pids if _is_python(pid)][:_MOST_STACKS]
        if not python_pids or (self._thread is not None and self._thread.is_alive()):
            return
        program = find_program()
        if program is not None:
            arguments = program, python_pids, occasion
            self._thread = threading.Thread(target=self._run, args=arguments, name="brim-stacks", daemon=True)
            self._thread.start()
        elif not self._is_missing_reported:
            self._is_missing_reported = True
            self._report(f"no stacks at the {occasion}: py-spy is not installed", [_INSTALL])

    def wait(self, timeout_s: float = _STACK_LIMIT_S) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, program: str, pids: list[int], occasion: str) -> None:
        for pid in pids:
            lines, problem = _dump(program, pid)
            self._report(f"process {pid} at the {occasion}" + (f": {problem}" if problem else ""), lines)


def _dump(program: str, pid: int) -> tuple[list[str], str]:
    """Return the stacks of a process, and the problem, if there was one."""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_STACK_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return [], "its stacks could not be read within a second"
    except OSError as error:
        return [], f"py-spy could not be started: {error.strerror}"
    if result.returncode != 0:
        reason = (result.stderr.strip().splitlines() or ["py-spy gives no reason"])[0]
        if "ermission" in result.stderr:
            reason = "this user may not read it (ptrace): see /proc/sys/kernel/yama/ptrace_scope, or run as root"
        return [], f"its stacks could not be read: {redact(reason)[:200]}"
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    return [redact(line)[:300] for line in lines if line and not line.startswith("Process ")][:_MOST_LINES], ""


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def find_program() -> str | None:
    """Return py-spy from the PATH or from the folder of the interpreter."""
    program = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(program) if os.access(program, os.X_OK) else None)
