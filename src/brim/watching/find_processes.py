"""Processes by the name of their program or script: `brim watch --match train.py`.

Not by other words of the command line: an editor with train.py open, or `grep train.py`, is a bystander.
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
    """How a process was started; empty if it is gone or a kernel thread."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def named(words: list[str]) -> list[str]:
    """What a command line runs: its program and, if that is an interpreter, the script or module."""
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
    """What processes are called: by their script or module rather than ten times "python3"."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, str]] = {}

    def of(self, pid: int, name: str) -> str:
        """`name` is what the kernel calls it; that changes when it becomes another program."""
        known = self._known.get(pid)
        if known is None or known[0] != name:
            words = named(command_line(pid))
            script = os.path.basename(words[-1]) if len(words) > 1 else ""
            known = name, redact(script)[:80] or name
            self._known = {**(self._known if len(self._known) < _MOST_NAMES else {}), pid: known}
        return known[1]


def find(pattern: str, without: frozenset[int] = frozenset()) -> list[int]:
    """Processes whose program or script has `pattern` in it, but no brim that looks for them and no parent of ours."""
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
    """`brim watch …` has the pattern on its own command line, and so has `brim run … -- COMMAND`."""
    return ("watch" in words or "run" in words) and any(os.path.basename(word) == "brim" for word in words[:4])


def _ancestors() -> list[int]:
    """This process and all above it: the shell or the script that asked for the watch."""
    pids, pid = [], os.getpid()
    while pid > 1:
        pids.append(pid)
        pid = _parent(pid)
    return pids


def _parent(pid: int) -> int:
    """0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def leaders(pids: list[int]) -> list[int]:
    """Those among these that decide for themselves when to end: not the forked workers of another one."""
    programs = {pid: command_line(pid)[:1] for pid in pids}
    return [pid for pid in pids if programs.get(_parent(pid)) != programs[pid]]


@dataclass(slots=True)
class Matching:
    """The processes that match now; looked for often while there are none, seldom while there are."""

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
