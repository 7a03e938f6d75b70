"""Runs of which one system call fails: the N-th of its kind on a file, in whichever thread or process that is.

`shim.c` does it. Calls are distinguished by what they do to which file, because the N-th call of a whole run is another
one every time: threads and workers take turns. Numbers in the names of files are whatever they are in that run. A job
is a command with its source, its destination and its state below folders whose calls count.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import tree_digest
from tests.forked import brim

KINDS = ("write", "pwrite", "fsync", "rename", "open", "read", "pread", "copy", "lock")
# What can happen to a call. Disks that are full refuse reads as little as a process without files refuses writes.
FAULTS = {
    "write": ("EIO", "ENOSPC", "short"),
    "pwrite": ("EIO", "ENOSPC", "short"),
    "fsync": ("EIO", "ENOSPC"),
    "rename": ("EIO", "ENOSPC"),
    "open": ("EMFILE", "EIO"),
    "read": ("EIO", "short"),
    "pread": ("EIO", "short"),
    "copy": ("EIO", "ENOSPC", "short"),
    "lock": ("ENOLCK", "EIO"),
}
_BOARD = struct.Struct("16QQ4096s")
_RELEASED = 14


Call = tuple[str, str]
"""A kind, and a glob of the files it concerns."""


@dataclass(frozen=True)
class Fault:
    """What happens to the `number`-th call of a kind on files that `glob` matches, counted from 1."""

    kind: str
    number: int
    how: str
    glob: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.number}-{self.how} of {self.glob}"

    @property
    def variable(self) -> str:
        method = self.how if self.how in ("short", "hold") else getattr(errno, self.how)
        return f"{self.kind} {self.number} {method} {self.glob}"


@dataclass(frozen=True)
class UnitStats:
    """How a run ended. `hit` is the file whose call failed, None if the run made no such call."""

    code: int
    said: str
    hit: Path | None
    calls: Counter[Call]


class Shim:
    """The library, built for this machine, and its board."""

    def __init__(self, library: Path, panel: Path) -> None:
        self.library, self._board = library, panel

    @classmethod
    def build(cls, folder: Path) -> Shim | None:
        """None where it cannot be built."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None or sys.platform != "linux":
            return None
        library, source = folder / "shim.so", Path(__file__).with_name("shim.c")
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        return cls(library, folder / "board")

    def variables(self, fault: Fault | None, folders: Sequence[Path]) -> dict[str, str]:
        """The environment of a command, with a board on which nothing has happened."""
        self._board.write_bytes(bytes(_BOARD.size))
        return {
            "LD_PRELOAD": str(self.library),
            "BRIM_FAULT_BOARD": str(self._board),
            "BRIM_FAULT_FOLDERS": ":".join(map(str, folders)),
            "BRIM_FAULT": fault.variable if fault else "",
        }

    @property
    def fired(self) -> bool:
        return bool(_BOARD.unpack(self._board.read_bytes())[16])

    def release(self) -> None:
        """Let who is held continue."""
        with self._board.open("r+b") as board:
            board.seek(_RELEASED * 8)
            board.write((1).to_bytes(8, sys.byteorder))

    def run(self, job: Job, fault: Fault | None = None) -> UnitStats:
        """A job's command from beginning to end, with at most one fault. Calls are told of a run without."""
        log = self._board.with_name("log")
        log.write_bytes(b"")
        variables = self.variables(fault, job.counted) | {"BRIM_FAULT_LOG": "" if fault else str(log)}
        code, output = job.run({**os.environ, **job.variables, **variables}, str(self.library))
        *_, fired, path = _BOARD.unpack(self._board.read_bytes())
        hit = Path(os.fsdecode(path.rstrip(b"\0")).removesuffix(" (deleted)")) if fired else None
        return UnitStats(code, output, hit, Counter(map(job.call_of, log.read_text().splitlines())))


@dataclass
class Job:
    """A command (words for brim, or a Python script), and where it reads and writes."""

    name: str
    words: list[str]
    source: Path
    place: Path  # everything that the command makes is below it, and nothing else
    prepare: Callable[[], None] = lambda: None
    script: bool = False

    @property
    def counted(self) -> list[Path]:
        return [self.source, self.place]

    @property
    def variables(self) -> dict[str, str]:
        return {"XDG_STATE_HOME": str(self.place / "state"), "PYTHONPATH": os.pathsep.join(sys.path)}

    def call_of(self, line: str) -> Call:
        """What a line of the shim's log tells of."""
        kind, _, path = line.partition(" ")
        folder = next(str(folder) for folder in self.counted if Path(path).is_relative_to(folder))
        return kind, folder + re.sub(r"[0-9a-f]{8,}|[0-9]+", "*", path[len(folder) :].removesuffix(" (deleted)"))

    def run(self, environment: dict[str, str], preload: str) -> tuple[int, str]:
        if self.script:
            command = [sys.executable, *self.words]
            result = subprocess.run(
                command, env=environment, cwd=self.source.parent, capture_output=True, text=True, check=False
            )
        else:
            result = brim(*self.words, check=None, env=environment, cwd=self.source.parent, preload=preload)
        return result.returncode, result.stderr + (result.stdout if result.returncode else "")

    def clear(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        self.prepare()

    def made(self) -> dict[str, str]:
        """What readers find: everything but ledgers."""
        return {name: digest for name, digest in tree_digest(self.place).items() if not _is_state(name)}


def _is_state(name: str) -> bool:
    return any(part == "state" or part.endswith(".brim") for part in Path(name).parts)


_ENDS = 4


def every_fault(calls: Counter[Call]) -> Iterator[Fault]:
    """Each call of a run fails: the first on a file in every way there is, the others in these ways by turns.

    Of many calls of a kind on files of a name the first and the last few do: those between are of the same loop.
    """
    for (kind, glob), count in sorted(calls.items()):
        methods = FAULTS[kind]
        # The driver looks into the logs of workers as often as it has the time, so there is no last one.
        last = 2 if "worker-" in glob else count
        for number in range(1, last + 1):
            if _ENDS < number <= last - _ENDS:
                continue
            for method in methods if number == 1 else (methods[number % len(methods)],):
                yield Fault(kind, number, method, glob)
