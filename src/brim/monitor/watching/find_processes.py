"""Find processes by the name of their program or script: `brim watch --match train.py`.

Other arguments do not count: an editor with train.py open, or `grep train.py`, does not match.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable
from dataclasses import field

from brim.memory.meter import all_pids, parent_of, started
from brim.records import dataclass
from brim.redact import redact

_SEARCH_S, _SEARCH_AGAIN_S = 0.5, 5.0
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


def program_names(arguments: list[str]) -> list[str]:
    """Return the program of a command line and, if that is an interpreter, the script or module."""
    if not arguments or not arguments[0]:
        return []
    program = arguments[0]
    if not _INTERPRETER.fullmatch(os.path.basename(program)):
        return [program]
    remaining = iter(arguments[1:])
    for argument in remaining:
        if argument in _MODULE:
            return [program, *itertools.islice(remaining, 1)]
        if argument in _CODE:
            return [program]
        if argument in _WITH_VALUE:
            next(remaining, None)
        elif not argument.startswith(("-", "+")):
            return [program, argument]
    return [program]


class ProcessNames:
    """Names of processes: the script or module rather than ten times "python3"."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, str]] = {}

    def of(self, pid: int, name: str) -> str:
        """Return the name of a process. `name` is that of the kernel, which changes with exec."""
        names = self._names.get(pid)
        if names is None or names[0] != name:
            programs = program_names(command_line(pid))
            script = os.path.basename(programs[-1]) if len(programs) > 1 else ""
            names = name, redact(script)[:80] or name
            self._names = {**(self._names if len(self._names) < _MOST_NAMES else {}), pid: names}
        return names[1]


def find(pattern: str, without: frozenset[int] = frozenset()) -> list[int]:
    """Return processes with `pattern` in the name of their program or script, except brim and its parents."""
    excluded, pid = {*without}, os.getpid()
    while pid > 1:
        excluded.add(pid)
        pid = parent_of(pid)
    matching = []
    for pid in all_pids():
        if pid in excluded:
            continue
        arguments = command_line(pid)
        # `brim watch …` and `brim run … -- COMMAND` have the pattern on their own command lines.
        is_brim = ("watch" in arguments or "run" in arguments) and any(
            os.path.basename(argument) == "brim" for argument in arguments[:4]
        )
        if not is_brim and any(pattern in name for name in program_names(arguments)) and started(pid) is not None:
            matching.append(pid)
    return matching


def leaders(pids: list[int]) -> list[int]:
    """Return the processes that are not forked workers of another one."""
    programs = {pid: command_line(pid)[:1] for pid in pids}
    return [pid for pid in pids if programs.get(parent_of(pid)) != programs[pid]]


@dataclass(slots=True)
class Matching:
    """The processes that match now. The search repeats every 0.5 s until one is found, then every 5 s."""

    pattern: str
    without: frozenset[int] = frozenset()
    clock: Callable[[], float] = time.monotonic
    _matching: dict[int, int | None] = field(default_factory=dict)
    _searched: float | None = None

    def __call__(self) -> list[int]:
        running = {pid: start for pid, start in self._matching.items() if started(pid) == start}
        now = self.clock()
        if self._searched is None or now - self._searched >= (_SEARCH_AGAIN_S if running else _SEARCH_S):
            self._searched = now
            running = {pid: started(pid) for pid in find(self.pattern, self.without)}
        self._matching = running
        return list(running)
