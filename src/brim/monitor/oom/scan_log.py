"""Scan one log for everything that reports a kill: kernel records, services, program output, restarts."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace
from datetime import datetime
from pathlib import Path

from brim.monitor.log_files import UNREADABLE
from brim.monitor.oom import kernel_log
from brim.monitor.oom.kills import Kill, Restart, Source
from brim.monitor.oom.log_lines import Clock, blocks_of, lines_of, unwrap
from brim.monitor.oom.merge_kills import merge
from brim.monitor.oom.multiline_logs import SlurmTable, unfold
from brim.monitor.oom.phrases import PhraseReader
from brim.monitor.oom.program_phrases import PROGRAM_PHRASES
from brim.monitor.oom.service_phrases import SERVICE_PHRASES
from brim.records import dataclass

_BOOT = re.compile(r"(?:^|kernel: |\] |;)(?:\[\s*[\d.]+\] )?Linux version \d+\.\d+")
_SHUTDOWN = re.compile(
    r"exiting on signal 15|systemd\[1\]: Shutting down|Reached target .*(?:Shutdown|Reboot|Power[- ]Off|Halt)"
    r"|System is (?:rebooting|powering down)|systemd-shutdown|Journal stopped|reboot: (?:Restarting|Power down)"
    r"|Received SIGTERM from PID 1 "
)
_SERVICES = (b"systemd[1]:", b"rsyslogd", b"systemd-journald", b"CRON[", b"sshd[")
_CLOCK = "setting system clock to"


def _shortest(needles: set[bytes]) -> tuple[bytes, ...]:
    """Return needles without those that contain another one; each one is searched in the whole log."""
    return tuple(needle for needle in needles if not any(part in needle for part in needles - {needle}))


_NEEDLES = _shortest(
    {phrase.needle.encode() for phrase in SERVICE_PHRASES}
    | {*kernel_log.NEEDLES, *SlurmTable.NEEDLES, _CLOCK.encode()}
    | {b"Linux version ", b"exiting on signal 15", b"Shutting down", b"Powering", b"ystem Reboot", b"Power-Off"}
    | {b"systemd-shutdown", b"Journal stopped", b"reboot: "}
    | {b'"MESSAGE":['}  # journalctl -o json writes a message that is not text as numbers
)
_TERMINAL_NEEDLES = _shortest({*_NEEDLES, *(phrase.needle.encode() for phrase in PROGRAM_PHRASES)})
_MOST_KILLS = 1000  # per log
_MOST_REPORTS = 500  # of services and programs, at the beginning and at the end of a log
_TAIL_BYTES = 512 << 10

# A document or a program may quote a kill line. Files are recognized by their names, piped text by its beginning.
_DOCUMENT_NAME = re.compile(
    r"(?i)(?:^|/)(?:readme|changelog|changes|contributing|authors|makefile|dockerfile)[^/]*$"
    r"|\.(?:md|markdown|rst|adoc|org|tex|texi|html?|xml|xhtml|ipynb|py|pyi|pyx|c|cc|cpp|cxx|h|hh|hpp|inl|go|rs|java|kt|scala"
    r"|js|jsx|mjs|ts|tsx|vue|rb|pl|php|swift|m|lua|jl|r|sh|bash|zsh|fish|ps1|bats|t|toml|ini|cfg|conf|in|am|ac|cmake|proto"
    r"|sql|css|svg|patch|diff|po|pot|1|5|7|8)$"
)
_DOCUMENT_START = re.compile(
    rb"\A#!|\A\s*(?:<!DOCTYPE|<html|<!--|//|/\*|#include\b|diff --git)|\A# [^\n]+\n\n|^```|^package \w+$|^func \w+\("
    rb"|^(?:def|class) \w+.*:\s*$|\]\(https?://"
    rb"|\0[^\0\n]{1,20}\0[^\0\n]{1,20}\0",  # a compiled program; a power failure leaves one run of zeros in a log
    re.M | re.I,
)
QUOTED_REASON = "the file is a document or source code, which may quote a kill"


@dataclass(slots=True)
class LogFindings:
    """The findings of one or several sources, and the number of boots."""

    kills: list[Kill] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    boots: int = 0

    def add(self, findings: LogFindings) -> None:
        self.kills += findings.kills
        self.restarts += findings.restarts
        self.sources += findings.sources


class _MiddleFilter:
    """Passes blocks on until `is_full()`, then only the last ones, so that time and memory are bounded."""

    def __init__(self, is_full: Callable[[], bool]) -> None:
        self._is_full = is_full
        self._tail: deque[bytes] = deque()
        self._skipped = 0
        self.skipped_lines = 0
        self.looked_like_kills = 0

    def filter(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        iterator = iter(blocks)
        for block in iterator:
            yield block
            if self._is_full():
                break
        size = 0
        for block in iterator:
            self._tail.append(block)
            size += len(block)
            while size - len(self._tail[0]) >= _TAIL_BYTES:
                dropped = self._tail.popleft()
                size -= len(dropped)
                self._skipped += dropped.count(b"\n")
                self.looked_like_kills += dropped.count(b"illed process ")
        self.skipped_lines = self._skipped
        if self._skipped:
            first = self._tail.popleft()
            cut = first.find(b"\n") + 1  # the rest of a line whose beginning was dropped
            self._skipped += 1 if cut else 0
            self._tail.appendleft(first[cut:])
        while self._tail:
            yield self._tail.popleft()

    def take_skipped(self) -> int:
        number, self._skipped = self._skipped, 0
        return number


class Scan:
    """Scans one source line by line. `terminals` also looks for the output of shells and programs."""

    def __init__(self, source: str, clock: Clock, terminals: bool = False) -> None:
        self.source, self.clock = source, clock
        self.is_document = bool(_DOCUMENT_NAME.search(source))
        self.boots = 0
        self.restarts: list[Restart] = []  # boots that no shutdown preceded
        self.middle = _MiddleFilter(lambda: False)
        self.left_out = 0  # reports between the first and the last ones
        self._kernel = kernel_log.KernelRecords(source, clock)
        tables = (SERVICE_PHRASES, PROGRAM_PHRASES) if terminals else (SERVICE_PHRASES,)
        self._readers = [PhraseReader(table, source, clock) for table in tables]
        self._terminals, self._needles = terminals, _TERMINAL_NEEDLES if terminals else _NEEDLES
        self._table = SlurmTable()
        self._has_services = self._was_shut_down = False
        self._previous = ""

    def lines(self, blocks: Iterable[bytes]) -> Iterator[tuple[int, str]]:
        """Yield the lines that this scan must read; of a log with too many kills, the first and the last."""

        def is_full() -> bool:
            return len(self._kernel.kills) + sum(len(reader.kills) for reader in self._readers) >= _MOST_KILLS

        def inspect(block: bytes) -> None:
            """Check whether services write to this log; the kernel alone logs no shutdown."""
            self._has_services = self._has_services or any(service in block for service in _SERVICES)

        def sniffed() -> Iterator[bytes]:
            for number, block in enumerate(blocks):
                if number == 0 and self._terminals and _DOCUMENT_START.search(block[:4096]):
                    self.is_document = True
                yield block

        self.middle = middle = _MiddleFilter(is_full)
        filtered = middle.filter(unfold(sniffed()))
        return lines_of(filtered, self._needles, lambda: self._kernel.busy, inspect, middle.take_skipped)

    def read(self, number: int, raw: str) -> None:
        """Read one line, which may contain several."""
        for text in unwrap(self._table.read(raw)):
            if _CLOCK in text:
                self.clock.learn(text)
            if "Linux version " in text and _BOOT.search(text):
                if self._previous and self._has_services and not self._was_shut_down:
                    last, first = self.clock.stamp(self._previous).when, self.clock.stamp(text).when
                    self.restarts.append(Restart(self.source, last, first, number))
                self._was_shut_down = False
                self._mark_boot()
                self.boots += 1
            elif not self._was_shut_down and _SHUTDOWN.search(text):
                self._was_shut_down = True
            self._previous = text or self._previous
            if not self._kernel.read(number, text):
                any(reader.read(number, text) for reader in self._readers)  # until one recognizes it

    def _mark_boot(self) -> None:
        for kills in (self._kernel.kills, self._readers[0].kills):
            kills[:] = [kill if kill.boot is not None else replace(kill, boot=self.boots) for kill in kills]

    def finish(self) -> tuple[list[Kill], list[Restart]]:
        """Return the kills, each once, in the order of the log. Boots are counted back from the last one."""
        self._kernel.finish()
        self._mark_boot()
        reports = [*self._kernel.kills]
        for reader in self._readers:
            kills = reader.kills
            if len(kills) > 2 * _MOST_REPORTS:
                self.left_out += len(kills) - 2 * _MOST_REPORTS
                kills = [*kills[:_MOST_REPORTS], *kills[-_MOST_REPORTS:]]
            reports += kills
        kills = merge(sorted(reports, key=lambda kill: (kill.evidence[0].line or 0) if kill.evidence else 0))
        kills = [kill if kill.boot is None else replace(kill, boot=kill.boot - self.boots) for kill in kills]
        if self.is_document:
            kills = [replace(kill, sure="possible", reason=QUOTED_REASON) for kill in kills]
        return kills, self.restarts


def scan_lines(scan: Scan, lines: Iterable[tuple[int, str]]) -> tuple[list[Kill], list[Restart]]:
    for number, text in lines:
        scan.read(number, text)
    return scan.finish()


def scan_file(path: Path, name: str, terminals: bool) -> LogFindings:
    """Scan a log file as a stream. A damaged file gives the findings before the damage."""
    problem = ""

    def blocks() -> Iterator[bytes]:
        nonlocal problem
        try:
            yield from blocks_of(path)
        except UNREADABLE as error:
            problem = reading_problem(error)

    try:
        changed = datetime.fromtimestamp(path.stat().st_mtime).astimezone()
    except (OSError, ValueError, OverflowError):
        changed = None
    scan = Scan(name, Clock(changed), terminals)
    kills, restarts = scan_lines(scan, scan.lines(blocks()))
    notes = []
    if scan.middle.skipped_lines:
        notes.append(
            f"the first {_MOST_KILLS} kills and the last ones were read; {scan.middle.skipped_lines} lines between "
            f"them ({scan.middle.looked_like_kills} with kills of the kernel) were only counted"
        )
    if scan.left_out:
        notes.append(f"{scan.left_out} kills between the first and the last {_MOST_REPORTS} are left out")
    if kills and scan.is_document:
        notes.append(QUOTED_REASON)
    return LogFindings(kills, restarts, [Source(name, problem, len(kills), "; ".join(notes))], scan.boots)


def reading_problem(error: BaseException) -> str:
    """Return the reason for which a source could not be read."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
