"""What Python processes are doing: their stacks by py-spy (extra `watch`), written to the log.

Looked at when an alarm is first raised and when a stop is given; in a thread, with a second for each process, so that
neither a sample nor a kill waits for it. The processes are not held (`--nonblocking`), and values of variables are
never asked for. What cannot be looked at, and why, is said in its place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from brim.redact import redact

_LIMIT_S = 1.0
_LARGEST = 3
_MOST_LINES = 200
_WITHOUT = "pip install py-spy writes down here what Python was doing"

Say = Callable[[str, list[str]], None]


class Stacks:
    """`look` returns at once; `say(text, lines)` is called from a thread, once for each process."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._thread: threading.Thread | None = None
        self._missing_said = False

    def look(self, pids: Iterable[int], why: str) -> None:
        """At the largest of these (the largest first); nothing if a look is still under way."""
        chosen = [pid for pid in pids if is_python(pid)][:_LARGEST]
        if not chosen or (self._thread is not None and self._thread.is_alive()):
            return
        program = find_program()
        if program is None:
            if not self._missing_said:
                self._missing_said = True
                self._say(f"no stacks at the {why}: py-spy is not installed", [_WITHOUT])
            return
        self._thread = threading.Thread(target=self._run, args=(program, chosen, why), name="brim-stacks", daemon=True)
        self._thread.start()

    def settle(self, timeout_s: float = _LIMIT_S) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, program: str, pids: list[int], why: str) -> None:
        for pid in pids:
            lines, problem = dump(program, pid)
            told = f"process {pid} at the {why}" + (f": {problem}" if problem else "")
            self._say(told, lines)


def dump(program: str, pid: int) -> tuple[list[str], str]:
    """The stacks of a process, and what went wrong, if anything did."""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return [], "its stacks could not be read within a second"
    except OSError as error:
        return [], f"py-spy could not be started: {error.strerror}"
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it does not say why"])[0]
        if "ermission" in done.stderr:
            reason = "this user may not look into it (ptrace): see /proc/sys/kernel/yama/ptrace_scope, or run as root"
        return [], f"its stacks could not be read: {redact(reason)[:200]}"
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    kept = [redact(line)[:300] for line in lines if line and not line.startswith("Process ")]
    return kept[:_MOST_LINES], ""


def is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False


def find_program() -> str | None:
    """py-spy on the PATH, or beside the interpreter."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if os.access(beside, os.X_OK) else None)
