"""Killers beside the kernel: systemd-oomd, earlyoom, Slurm and other batch systems, Kubernetes, containers.

Each reports in its own words (killer_lines.py). Some say things over two lines, so a line may add to the kill
before it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from brim.oom.killer_patterns import MIB, PATTERNS, Match, old_earlyoom
from brim.oom.kills import Bound, Evidence, Kill, MachineRoom, Sizes
from brim.oom.log_lines import Clock, Stamp
from brim.redact import redact

NEEDLES = (
    b"OOM",
    b"sending SIG",
    b"illing process ",
    b"ow memory!",
    b"ut of memory!",
    b"escalating to SIGKILL",
    b"kill failed",
    b"mem avail",
    b"emory limit",
    b"Out Of Memory",
    b"exceed data ulimit",
    b"exceeded limit",
    b"TERM_MEMLIMIT",
    b"low on resource: memory",
    b"Sending SIGKILL to cgroup",
    b"memory usage threshold",
    b"memory budget",
    b"killed due to memory pressure",
    b"System memory low at node",
    b"oomd kill:",
    b"OUT_OF_ME",
    b"Job ID: ",
    b"Memory Efficiency: ",
    b"kubernetes: pod",
    b"physical memory used",
)
_NEAR_LINES = 60
_SEFF_MEMORY = re.compile(r"(?P<share>[\d.]+)% of (?P<size>[\d.]+) (?P<unit>[KMGT]B)")
_SEFF_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
_OOMD_COUNT = re.compile(r"(?P<unit>\S+): systemd-oomd killed (?P<n>\d+|some) process\(es\) in this unit")
_EARLY_ROOM = re.compile(
    r"mem avail:\s*(?P<avail>\d+) of\s*(?P<ram>\d+) MiB.*?swap free:\s*(?P<free>\d+) of\s*(?P<swap>\d+) MiB"
)
_EARLY_LIMIT = re.compile(r"low memory! at or below SIG\w+ limits: (?P<text>mem\s+[\d.]+ ?%, swap\s+[\d.]+ ?%)", re.I)
_EARLY_OLD_LIMIT = re.compile(r"Out of memory! avail: (?P<avail>\d+) MiB < min: (?P<min>\d+) MiB")
_EARLY_OLD = re.compile(r"Killing process (?P<pid>\d+) (?P<name>\S.*?)(?:, badness .*)?$")
_EARLY_AFTER = re.compile(r"escalating to SIGKILL after|kill failed: |process (?:\d+ )?did not exit")


class Killers:
    """Feed it lines; `kills` grows."""

    def __init__(self, source: str, clock: Clock) -> None:
        self.source, self.clock = source, clock
        self.kills: list[Kill] = []
        self._room = MachineRoom()
        self._limit = ""
        self._job_line: tuple[int, str] | None = None
        self._limit_line = -_NEAR_LINES

    def feed(self, number: int, text: str) -> None:
        for word, pattern, make in PATTERNS:
            if word in text and (match := pattern.search(text)):
                self._add(make(match), number, text)
                return
        if text.startswith(("Job ID: ", "Array Job ID: ", "Memory Efficiency: ")):
            self._seff(number, text)
        elif "systemd-oomd killed" in text and (match := _OOMD_COUNT.search(text)):
            self._oomd_count(match, number, text)
        elif (
            "mem avail:" in text
            or "low memory!" in text.lower()
            or "rocess " in text
            or "SIGKILL" in text
            or "avail:" in text
        ):
            self._earlyoom_context(number, text)

    def _add(self, kill: Kill, number: int, text: str) -> None:
        stamp = self.clock.stamp(text)
        quote = self._quote(number, text)
        kill = replace(kill, when=stamp.when, boot_s=stamp.boot_s, host=kill.host or stamp.host, evidence=(quote,))
        if kill.killer == "slurm" and kill.unit is None and self._job_line and number - self._job_line[0] < 20:
            kill = replace(kill, unit=f"job {self._job_line[1]}")
        if kill.killer == "earlyoom":
            near = number - self._limit_line < _NEAR_LINES
            kill = replace(
                kill, room=self._room if near else MachineRoom(), bound=Bound(text=self._limit if near else "")
            )
            self._limit_line = -_NEAR_LINES  # said once before each kill
        last = self.kills[-1] if self.kills else None
        if last is not None and _says_more(last, kill, number):
            self.kills[-1] = _joined(last, kill)
        else:
            self.kills.append(kill)

    def _seff(self, number: int, text: str) -> None:
        """seff tells of a job over several lines: its number before the state, its memory after it."""
        label, _, value = text.partition(": ")
        if label.endswith("Job ID"):
            self._job_line = number, value.strip()
            return
        last = self.kills[-1] if self.kills else None
        share = _SEFF_MEMORY.search(value)
        if last is None or share is None or last.killer != "slurm" or number - (last.evidence[-1].line or 0) > 20:
            return
        limit = round(float(share["size"]) * _SEFF_UNITS[share["unit"]])
        bound = Bound(limit, round(limit * float(share["share"]) / 100), "memory")
        self.kills[-1] = replace(last, bound=bound, evidence=(*last.evidence, self._quote(number, text)))

    def _oomd_count(self, match: Match, number: int, text: str) -> None:
        count = int(match["n"]) if match["n"].isdigit() else 1
        quote, stamp = self._quote(number, text), self.clock.stamp(text)
        for index in range(len(self.kills) - 1, max(len(self.kills) - 10, -1), -1):
            kill = self.kills[index]
            if kill.killer == "systemd-oomd" and kill.unit == match["unit"] and _close(kill, stamp):
                self.kills[index] = replace(kill, count=count, evidence=(*kill.evidence, quote))
                return
        self.kills.append(
            Kill(
                "systemd-oomd",
                reason="systemd says so",
                unit=match["unit"],
                count=count,
                when=stamp.when,
                boot_s=stamp.boot_s,
                host=stamp.host,
                signal=9,
                evidence=(quote,),
            )
        )

    def _earlyoom_context(self, number: int, text: str) -> None:
        if match := _EARLY_ROOM.search(text):
            avail, ram, free, swap = (int(match[key]) * MIB for key in ("avail", "ram", "free", "swap"))
            self._room = MachineRoom(ram, swap, free, avail)
        elif match := _EARLY_LIMIT.search(text):
            self._limit, self._limit_line = f"it acts at or below {' '.join(match['text'].split())} available", number
        elif match := _EARLY_OLD_LIMIT.search(text):
            self._limit, self._limit_line = f"it acts below {match['min']} MiB available", number
            self._room = MachineRoom(available_bytes=int(match["avail"]) * MIB)
        elif number - self._limit_line < 5 and (match := _EARLY_OLD.search(text)):
            self._add(old_earlyoom(match), number, text)
        elif self.kills and self.kills[-1].killer == "earlyoom" and _EARLY_AFTER.search(text):
            kill = self.kills[-1]
            escalated = "escalating" in text
            self.kills[-1] = replace(
                kill,
                effect="killed" if escalated else kill.effect,
                signal=9 if escalated else kill.signal,
                evidence=(*kill.evidence, self._quote(number, text)),
            )

    def _quote(self, number: int, text: str) -> Evidence:
        return Evidence(self.source, number, redact(text.strip()[:300]))


def _close(kill: Kill, stamp: Stamp) -> bool:
    gap = Stamp(kill.when, kill.boot_s).seconds_to(stamp)
    return gap is None or abs(gap) < 60


def _says_more(last: Kill, kill: Kill, number: int) -> bool:
    """Whether a line tells of the same kill as the one before it."""
    line = last.evidence[-1].line
    if line is None or number - line > _NEAR_LINES or not _close(last, Stamp(kill.when, kill.boot_s)):
        return False
    if last.killer != kill.killer or (last.killer == "earlyoom" and last.pid != kill.pid):
        return False
    if kill.killer == "slurm":  # srun and slurmstepd both speak up, and only one of them knows the step
        same = last.unit == kill.unit
        return (
            same
            or kill.unit is None
            or kill.unit.startswith("task ")
            or last.unit is None
            or last.unit.startswith("task ")
        )
    return last.unit == kill.unit and last.pid == kill.pid and last.reason == kill.reason


def _joined(last: Kill, kill: Kill) -> Kill:
    """What two lines say about one kill."""
    named = kill if (last.unit is None or last.unit.startswith("task ")) and kill.unit else last
    other = last if named is kill else kill
    return replace(
        named,
        effect="killed" if "killed" in (last.effect, kill.effect) else last.effect,
        signal=9 if 9 in (last.signal, kill.signal) else last.signal,
        when=last.when or kill.when,
        boot_s=last.boot_s if last.boot_s is not None else kill.boot_s,
        host=named.host or other.host,
        bound=named.bound if named.bound.bytes is not None else other.bound,
        sizes=named.sizes if named.sizes != Sizes() else other.sizes,
        sure=min(last.sure, kill.sure, key=("certain", "likely", "possible").index),
        evidence=(*last.evidence, *kill.evidence),
    )
