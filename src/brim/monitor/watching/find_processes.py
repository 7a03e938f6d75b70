"""Find processes by the name of their program or script: `brim watch --match train.py`.

Other words of a command line do not count: an editor with train.py open, or `grep train.py`, does not match.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable
from dataclasses import field

from brim.memory.meter import started
from brim.records import dataclass
from brim.redact import redact

_LOOK_S, _LOOK_AGAIN_S = 0.5, 5.0
_MOST_NAMES = 10_000
_INTERPRETER = re.compile(r"(python|pypy|perl|ruby|node|bash|dash|zsh|ksh|fish|sh|Rscript|julia|java|bun|deno)[\d.]*t?")
_MODULE, _CODE = ("-m", "-jar"), ("-c", "-e", "-p", "--eval")
_WITH_VALUE = ("-W", "-X", "-cp", "-classpath", "--require", "-r", "-o", "-O", "-I", "-L", "--project")


def command_line(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended or is a kernel thread."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def named(words: list[str]) -> list[str]:
    """Return the program of a command line and, if that is an interpreter, the script or module."""
    if not words or not words[0]:
        return []
    name = os.path.basename(words[0])
    if not _INTERPRETER.fullmatch(name):
        return [words[0]]
    rest = iter(words[1:])
    for word in rest:
        if word in _MODULE:
            return [words[0], *itertools.islice(rest, 1)]
        if word in _CODE:
            return [words[0]]
        if word in _WITH_VALUE:
            next(rest, None)
        elif not word.startswith(("-", "+")):
            return [words[0], word]
    return [words[0]]


class ProcessNames:
    """Names of processes: the script or module rather than ten times "python3"."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, str]] = {}

    def of(self, pid: int, name: str) -> str:
        """Return the name of a process. `name` is that of the kernel, which changes with exec."""
        known = self._known.get(pid)
        if known is None or known[0] != name:
            words = named(command_line(pid))
            script = os.path.basename(words[-1]) if len(words) > 1 else ""
            known = name, redact(script)[:80] or name
            self._known = {**(self._known if len(self._known) < _MOST_NAMES else {}), pid: known}
        return known[1]


def find(pattern: str, without: frozenset[int] = frozenset()) -> list[int]:
    """Return processes with `pattern` in the name of their program or script, except brim and its parents."""
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []
    own = without | frozenset(_ancestors())
    found = []
    for pid in pids:
        if pid in own:
            continue
        words = command_line(pid)
        if any(pattern in word for word in named(words)) and not _is_brim(words) and started(pid) is not None:
            found.append(pid)
    return found


def _is_brim(words: list[str]) -> bool:
    """Check for `brim watch …` and `brim run … -- COMMAND`, which have the pattern on their own command lines."""
    return ("watch" in words or "run" in words) and any(os.path.basename(word) == "brim" for word in words[:4])


def _ancestors() -> list[int]:
    """Return this process and its ancestors."""
    pids, pid = [], os.getpid()
    while pid > 1:
        pids.append(pid)
        pid = _parent(pid)
    return pids


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def leaders(pids: list[int]) -> list[int]:
    """Return the processes that are not forked workers of another one."""
    programs = {pid: command_line(pid)[:1] for pid in pids}
    return [pid for pid in pids if programs.get(_parent(pid)) != programs[pid]]


@dataclass(slots=True)
class Matching:
    """The processes that match now. The search repeats every 0.5 s until one is found, then every 5 s."""

    pattern: str
    without: frozenset[int] = frozenset()
    clock: Callable[[], float] = time.monotonic
    _found: dict[int, int | None] = field(default_factory=dict)
    _looked: float | None = None

    def __call__(self) -> list[int]:
        alive = {pid: born for pid, born in self._found.items() if started(pid) == born}
        pause = _LOOK_AGAIN_S if alive else _LOOK_S
        now = self.clock()
        if self._looked is None or now - self._looked >= pause:
            self._looked = now
            alive = {pid: started(pid) for pid in find(self.pattern, self.without)}
        self._found = alive
        return list(alive)
