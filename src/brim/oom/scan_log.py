"""One log through all that can read it: kernel records, other killers, terminals, restarts."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace
from datetime import datetime
from pathlib import Path

from brim.oom import kernel_log, other_killers, scan_log, terminal_log
from brim.oom.folded_logs import unfold
from brim.oom.kills import Kill, Restart, Source
from brim.oom.log_lines import UNREADABLE, Clock, blocks_of, lines_of, unwrap
from brim.records import dataclass

NEEDLES = (
    b"Linux version ",
    b"exiting on signal 15",
    b"Shutting down",
    b"Powering",
    b"ystem Reboot",
    b"Power-Off",
    b"systemd-shutdown",
    b"Journal stopped",
    b"reboot: ",
)
_BOOT = re.compile(r"(?:^|kernel: |\] |;)(?:\[\s*[\d.]+\] )?Linux version \d+\.\d+")
_FAREWELL = re.compile(
    r"exiting on signal 15|systemd\[1\]: Shutting down|Reached target .*(?:Shutdown|Reboot|Power[- ]Off|Halt)"
    r"|System is (?:rebooting|powering down)|systemd-shutdown|Journal stopped|reboot: (?:Restarting|Power down)"
    r"|Received SIGTERM from PID 1 "
)
_SERVICES = (b"systemd[1]:", b"rsyslogd", b"systemd-journald", b"CRON[", b"sshd[")


class Restarts:
    """Feed it lines; `boot` counts boots, `restarts` grows."""

    def __init__(self, source: str, clock: Clock) -> None:
        self.source, self.clock = source, clock
        self.boot = 0
        self.restarts: list[Restart] = []
        self._services = False
        self._farewell = False
        self._last = ""

    def feed(self, number: int, text: str) -> None:
        if "Linux version " in text and _BOOT.search(text):
            self._booted(number, text)
        elif not self._farewell and _FAREWELL.search(text):
            self._farewell = True
        if text:
            self._last = text

    def glance(self, block: bytes) -> None:
        """See whether anybody but the kernel writes to this log."""
        if not self._services:
            self._services = any(word in block for word in _SERVICES)

    def _booted(self, number: int, text: str) -> None:
        self.boot += 1
        if self._last and self._services and not self._farewell:
            last, first = self._date(self._last), self._date(text)
            self.restarts.append(Restart(self.source, last, first, number))
        self._farewell = False

    def _date(self, text: str) -> datetime | None:
        return self.clock.stamp(text).when


_BESIDE = 20  # lines
_MOST_KILLS = 1000  # of one log; nobody reads more, and each takes memory
_ENDS = 500  # of what others than the kernel say of kills, the first and the last: each is compared with each
_TAIL_BYTES = 512 << 10
_CLOCK = b"setting system clock to"


@dataclass(slots=True)
class LogFindings:
    """What sources say, what can be said of them, and how many boots they saw."""

    kills: list[Kill] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    boots: int = 0

    def add(self, other: LogFindings) -> None:
        self.kills += other.kills
        self.restarts += other.restarts
        self.sources += other.sources


class _Passing:
    """Lets blocks through until `full()`, and after that only the last ones: time and memory have a bound."""

    def __init__(self, full: Callable[[], bool]) -> None:
        self._full = full
        self._tail: deque[bytes] = deque()
        self._skipped = 0
        self.passed_over = 0  # lines, in all
        self.looked_like_kills = 0

    def through(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        iterator = iter(blocks)
        for block in iterator:
            yield block
            if self._full():
                break
        held = 0
        for block in iterator:
            self._tail.append(block)
            held += len(block)
            while held - len(self._tail[0]) >= _TAIL_BYTES:
                dropped = self._tail.popleft()
                held -= len(dropped)
                self._skipped += dropped.count(b"\n")
                self.looked_like_kills += dropped.count(b"illed process ")
        self.passed_over = self._skipped
        if self._skipped:
            first = self._tail.popleft()
            cut = first.find(b"\n") + 1  # the rest of a line whose beginning is gone
            self._skipped += 1 if cut else 0
            self._tail.appendleft(first[cut:])
        while self._tail:
            yield self._tail.popleft()

    def take_skipped(self) -> int:
        number, self._skipped = self._skipped, 0
        return number


class Scan:
    """Feed it lines of one source. `terminals`: also look for what shells and programs print."""

    def __init__(self, source: str, clock: Clock, terminals: bool = False) -> None:
        self.source, self.clock = source, clock
        self._kernel = kernel_log.KernelRecords(source, clock)
        self._killers = other_killers.Killers(source, clock)
        self._terminal = terminal_log.Terminal(source, clock) if terminals else None
        self._restarts = scan_log.Restarts(source, clock)
        self.passing = _Passing(lambda: False)
        self.left_out = 0  # kills in the middle of too many
        self.needles: tuple[bytes, ...] = (
            *kernel_log.NEEDLES,
            *other_killers.NEEDLES,
            *scan_log.NEEDLES,
            b"setting system clock to",
            b'"MESSAGE":[',  # journalctl -o json: a message that is not text, as numbers
        )
        if terminals:
            self.needles += terminal_log.TERMINAL_NEEDLES

    @property
    def boots(self) -> int:
        """How often the machine booted in this log."""
        return self._restarts.boot

    @property
    def busy(self) -> bool:
        return self._kernel.busy

    @property
    def found(self) -> int:
        """How many kills were found so far."""
        return len(self._kernel.kills) + len(self._killers.kills) + (len(self._terminal.kills) if self._terminal else 0)

    def lines(self, blocks: Iterable[bytes]) -> Iterator[tuple[int, str]]:
        """The lines that this scan has to see. Of a log with too many kills, the first of them and the last."""
        passing = _Passing(lambda: self.found >= _MOST_KILLS)
        self.passing = passing
        return lines_of(
            passing.through(unfold(blocks)),
            self.needles,
            lambda: self.busy,
            self._restarts.glance,
            passing.take_skipped,
        )

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
        told = (*self._kernel.kills, *self._ends(self._killers.kills))
        found = [replace(kill, boot=(kill.boot or 0) - last) for kill in told]
        nameless = [i for i, kill in enumerate(found) if kill.pid is None]
        for seen in self._ends(self._terminal.kills if self._terminal else []):
            place = next((i for i in nameless if _is_its_shell(found[i], seen)), None)
            if place is None:
                found.append(seen)
            else:
                found[place] = _named(found[place], seen)
        return sorted(found, key=_first_line), self._restarts.restarts

    def _ends(self, kills: list[Kill]) -> list[Kill]:
        if len(kills) <= 2 * _ENDS:
            return kills
        self.left_out += len(kills) - 2 * _ENDS
        return [*kills[:_ENDS], *kills[-_ENDS:]]


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


def scan_file(path: Path, name: str, terminals: bool) -> LogFindings:
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
    note = ""
    if scan.passing.passed_over:
        note = (
            f"the first {_MOST_KILLS} kills and the last ones were read; between them {scan.passing.passed_over} lines "
            f"({scan.passing.looked_like_kills} with kills of the kernel) were only counted"
        )
    if scan.left_out:
        note += f"{'; ' if note else ''}{scan.left_out} kills between the first and the last {_ENDS} are left out"
    return LogFindings(kills, restarts, [Source(name, problem, len(kills), note)], scan.boots)


def why_unreadable(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _last_change(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime).astimezone()
    except (OSError, ValueError, OverflowError):
        return None
