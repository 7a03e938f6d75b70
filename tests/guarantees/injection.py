"""Runs in which one system call fails: the N-th of its kind on a file, in any thread or process.

`shim.c` injects the fault. Calls are identified by kind and file, because the N-th call of a complete run differs
between runs: the order of threads and workers varies. Numbers in file names are replaced by a wildcard. A job is a
command whose source, destination and state are below folders whose calls are counted.
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
# The faults of each kind of call. A full disk does not refuse reads, and the limit of open files no writes.
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
    """A fault of the `number`-th call of a kind on files that match `glob`, counted from 1."""

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
    """The outcome of a run. `hit` is the file whose call failed, or None if the run made no such call."""

    code: int
    said: str
    hit: Path | None
    calls: Counter[Call]


class Shim:
    """The library, built for this machine, and its board: a file with counters that all processes map."""

    def __init__(self, library: Path, panel: Path) -> None:
        self.library, self._board = library, panel

    @classmethod
    def build(cls, folder: Path) -> Shim | None:
        """Build the library; return None if the machine cannot build it."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None or sys.platform != "linux":
            return None
        library, source = folder / "shim.so", Path(__file__).with_name("shim.c")
        command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        return cls(library, folder / "board")

    def variables(self, fault: Fault | None, folders: Sequence[Path]) -> dict[str, str]:
        """Reset the board and return the environment variables for a command."""
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
        """Release a call that a fault of type `hold` delays."""
        with self._board.open("r+b") as board:
            board.seek(_RELEASED * 8)
            board.write((1).to_bytes(8, sys.byteorder))

    def run(self, job: Job, fault: Fault | None = None) -> UnitStats:
        """Run the command of a job with at most one fault; without a fault, its calls are recorded."""
        log = self._board.with_name("log")
        log.write_bytes(b"")
        variables = self.variables(fault, job.counted) | {"BRIM_FAULT_LOG": "" if fault else str(log)}
        code, output = job.run({**os.environ, **job.variables, **variables}, str(self.library))
        *_, fired, path = _BOARD.unpack(self._board.read_bytes())
        hit = Path(os.fsdecode(path.rstrip(b"\0")).removesuffix(" (deleted)")) if fired else None
        return UnitStats(code, output, hit, Counter(map(job.call_of, log.read_text().splitlines())))


@dataclass
class Job:
    """A command (arguments of brim, or a Python script) with its source and its output folder."""

    name: str
    words: list[str]
    source: Path
    place: Path  # all output of the command is below this folder, which contains nothing else
    prepare: Callable[[], None] = lambda: None
    script: bool = False

    @property
    def counted(self) -> list[Path]:
        return [self.source, self.place]

    @property
    def variables(self) -> dict[str, str]:
        return {"XDG_STATE_HOME": str(self.place / "state"), "PYTHONPATH": os.pathsep.join(sys.path)}

    def call_of(self, line: str) -> Call:
        """Parse a line of the shim's log into a call."""
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
        """Return the digests of all files except ledgers and state."""
        return {name: digest for name, digest in tree_digest(self.place).items() if not _is_state(name)}


def _is_state(name: str) -> bool:
    return any(part == "state" or part.endswith(".brim") for part in Path(name).parts)


_ENDS = 4


def every_fault(calls: Counter[Call]) -> Iterator[Fault]:
    """Yield the faults of all calls of a run.

    The first call on a file fails in every possible way, the others in one of these ways in rotation. Of many calls of
    a kind on files of one pattern, only the first and the last few fail, because the others belong to the same loop.
    """
    for (kind, glob), count in sorted(calls.items()):
        methods = FAULTS[kind]
        # The driver polls the logs of workers as often as it has time, so the number of these calls varies.
        last = 2 if "worker-" in glob else count
        for number in range(1, last + 1):
            if _ENDS < number <= last - _ENDS:
                continue
            for method in methods if number == 1 else (methods[number % len(methods)],):
                yield Fault(kind, number, method, glob)
