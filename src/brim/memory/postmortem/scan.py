"""One log through all that can read it: kernel records, other killers, terminals, restarts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from brim.memory.postmortem import kernel, killers, restarts, terminal
from brim.memory.postmortem.reading import UNREADABLE, blocks_of, lines_of, unwrap
from brim.memory.postmortem.records import Kill, Restart, Source
from brim.memory.postmortem.timestamps import Clock

_BESIDE = 20  # lines
_CLOCK = b"setting system clock to"


@dataclass(slots=True)
class Found:
    """What sources say, what can be said of them, and how many boots they saw."""

    kills: list[Kill] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    boots: int = 0

    def add(self, other: Found) -> None:
        self.kills += other.kills
        self.restarts += other.restarts
        self.sources += other.sources


class Scan:
    """Feed it lines of one source. `terminals`: also look for what shells and programs print."""

    def __init__(self, source: str, clock: Clock, terminals: bool = False) -> None:
        self.source, self.clock = source, clock
        self._kernel = kernel.KernelRecords(source, clock)
        self._killers = killers.Killers(source, clock)
        self._terminal = terminal.Terminal(source, clock) if terminals else None
        self._restarts = restarts.Restarts(source, clock)
        self.needles: tuple[bytes, ...] = (
            *kernel.NEEDLES,
            *killers.NEEDLES,
            *restarts.NEEDLES,
            b"setting system clock to",
        )
        if terminals:
            self.needles += terminal.NEEDLES

    @property
    def boots(self) -> int:
        """How often the machine booted in this log."""
        return self._restarts.boot

    @property
    def busy(self) -> bool:
        return self._kernel.busy

    def lines(self, blocks: Iterable[bytes]) -> Iterator[tuple[int, str]]:
        """The lines that this scan has to see."""
        return lines_of(blocks, self.needles, lambda: self.busy, self._restarts.glance)

    def feed(self, number: int, raw: str) -> None:
        for text in unwrap(raw):
            if "setting system clock to" in text:
                self.clock.learn(text)
            boot = self._restarts.boot
            self._restarts.feed(number, text)
            if self._restarts.boot > boot:
                self._mark_boot(boot)
            known = len(self._kernel.kills) + len(self._killers.kills)
            self._kernel.feed(number, text)
            self._killers.feed(number, text)
            if self._terminal is not None and len(self._kernel.kills) + len(self._killers.kills) == known:
                self._terminal.feed(number, text)

    def _mark_boot(self, boot: int) -> None:
        for found in (self._kernel.kills, self._killers.kills):
            found[:] = [kill if kill.boot is not None else replace(kill, boot=boot) for kill in found]

    def finish(self) -> tuple[list[Kill], list[Restart]]:
        """Everything found. Boots are counted back from the last one of this log."""
        self._kernel.finish()
        self._mark_boot(self._restarts.boot)
        last = self._restarts.boot
        found = [replace(kill, boot=(kill.boot or 0) - last) for kill in (*self._kernel.kills, *self._killers.kills)]
        for seen in self._terminal.kills if self._terminal else ():
            place = next((i for i, kill in enumerate(found) if _is_its_shell(kill, seen)), None)
            if place is None:
                found.append(seen)
            else:
                found[place] = _named(found[place], seen)
        return sorted(found, key=_first_line), self._restarts.restarts


def _first_line(kill: Kill) -> int:
    return kill.evidence[0].line or 0


def _is_its_shell(kill: Kill, seen: Kill) -> bool:
    """Whether a shell's "Killed" belongs to a kill beside it that names no process (Slurm, a container)."""
    if seen.killer != "unknown" or kill.pid is not None or kill.killer not in ("slurm", "container runtime"):
        return False
    return any(abs((one.line or 0) - (other.line or 0)) <= _BESIDE for one in kill.evidence for other in seen.evidence)


def _named(kill: Kill, seen: Kill) -> Kill:
    evidence = tuple(sorted((*kill.evidence, *seen.evidence), key=lambda quote: quote.line or 0))
    notes = (*kill.notes, *seen.notes)
    kill = replace(kill, pid=seen.pid, name=seen.name, command=seen.command, job=seen.job)
    return replace(kill, notes=notes, evidence=evidence)


def scan_lines(scan: Scan, lines: Iterable[tuple[int, str]]) -> tuple[list[Kill], list[Restart]]:
    for number, text in lines:
        scan.feed(number, text)
    return scan.finish()


def scan_file(path: Path, name: str, terminals: bool) -> Found:
    """A log file, streamed. One that is cut or damaged gives what stands before the damage."""
    problem = ""

    def blocks() -> Iterator[bytes]:
        nonlocal problem
        try:
            yield from blocks_of(path)
        except UNREADABLE as error:
            problem = why_unreadable(error)

    scan = Scan(name, Clock(_last_change(path)), terminals)
    kills, restarts = scan_lines(scan, scan.lines(blocks()))
    return Found(kills, restarts, [Source(name, problem, len(kills))], scan.boots)


def why_unreadable(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _last_change(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime).astimezone()
    except (OSError, ValueError, OverflowError):
        return None
