"""Patterns for the out-of-memory records of the kernel, from 2.6 to 6.18 and with any prefix.

Each pattern requires the character after a number, so that a line that was cut inside a number does not match: a
missing value is better than a wrong one.
"""

from __future__ import annotations

import re

from brim.monitor.oom.kills import Scope, Sizes
from brim.monitor.oom.phrases import is_quotation
from brim.records import dataclass

_CAUSE = r"(?P<cause>(?:Memory cgroup )?[Oo]ut of [Mm]emory(?: \([\w ]+\))?: )?"
KILLED = re.compile(_CAUSE + r"Killed process (?P<pid>\d+)(?=[ ,:.]|$)")
SELECTED_VICTIM = re.compile(_CAUSE + r"[Kk]ill process (?P<pid>\d+) \((?P<name>.*?)\),? score (?P<score>\d+)(?=\D)")
LIMIT_OF = re.compile(r"Task in (?P<task>\S.*?) killed as a result of limit of (?P<limit>/.*?)\s*$")
LIMIT_REACHED = re.compile(r"Memory limit reached of cgroup (?P<limit>/.*?)\s*$")
OOM_KILL = re.compile(
    r"oom-kill:constraint=(?P<constraint>\w+),.*?(?:mems_allowed=(?P<nodes>[\d,-]+),)?"
    r"(?:(?P<global>global_oom),|oom_memcg=(?P<limit>.*?),)?task_memcg=(?P<task_group>.*?),"
    r"task=(?P<name>.*),pid=\s*(?P<pid>\d+),uid="
)
REAPED = re.compile(r"oom_reaper: reaped process (?P<pid>\d+) ")
GROUP_KILL = re.compile(r"Tasks in (?P<group>/.*?) are going to be killed due to memory\.oom\.group set")
NO_VICTIM = re.compile(r"Out of memory and no killable processes|System is deadlocked on memory", re.I)
USAGE = re.compile(r"(?<![\w+])(?P<kind>memory|memory\+swap|swap|kmem): usage (?P<usage>\d+)kB, limit (?P<limit>\d+)kB")
STATS_FOR = re.compile(r"Memory cgroup stats for (?P<group>/.*?):(?P<inline>\s.*)?$|Memory cgroup stats:(?P<bare>\s.*)")
_INLINE_STAT = re.compile(r"\b([a-z_]+):(\d+)KB")
STAT = re.compile(r"(?:^|[\s:;\]])(?P<key>[a-z][a-z_]*) (?P<value>\d+)\s*$")
RAM = re.compile(r"(?<![\w.])(\d+) pages (?:of )?RAM\b")
SWAP_TOTAL = re.compile(r"Total swap\s*=\s*(\d+)kB")
SWAP_FREE = re.compile(r"Free swap\s*[=:]\s*(\d+)kB")
SHMEM_PAGES = re.compile(r"\bmapped:\d+ shmem:(\d+) ")
TABLE_HEAD = re.compile(r"\[\s*pid\s*\]\s+(?P<columns>uid\s+tgid\s+total_vm\s+rss\b.*?)\s*$")

_NAME = re.compile(r" ?\((?P<name>.*?)\)(?=,? UID[ :]|,? total-vm:|,? vsz:|[.,]?\s*$)")
_NAME_AFTER_UID = re.compile(r", UID (?P<uid>\d+), \((?P<name>.*?)\)(?=,? total-vm:|,? vsz:|[.,]?\s*$)")
_UID = re.compile(r"\bUID[ :](\d+)[ ,]")
_SENTENCE = re.compile(
    r"^[,:.]? ?\([^)]*\)[\"'`]? +(?!UID|total-vm|vsz)[a-z]{2,}|^[,:.]? (?!UID|total-vm|vsz)[a-z]{2,} "
)
_SIZE = re.compile(r"\b(total-vm|vsz|anon-rss|file-rss|shmem-rss|swap-rss):(\d+)kB")
# Text before a command name: everything up to "kernel: ", a "]" or a time.
_PREFIX = re.compile(
    r".*(?:\bkernel: ?|\bGuest: ?|[\])]:? |<\d+>|^\d{4}-\d\d-\d\dT\S+ |\d\d:\d\d:\d\d \S+ |;|^[> |]+| - - - )"
    r"(?:\[[^\]]*\]\s*)*"
)
UNLIMITED_KB = 1 << 50  # the kernel writes 9007199254740988 or 18014398509481983 for "no limit"


@dataclass(frozen=True, slots=True)
class Killed:
    """The victim that "Killed process …" names."""

    pid: int
    name: str | None
    uid: int | None
    scope: Scope
    sizes: Sizes


def parse_killed(text: str) -> Killed | None:
    match = KILLED.search(text)
    if match is None or is_quotation(text, match.start()):
        return None
    details = text[match.end() :]
    name = _NAME_AFTER_UID.match(details) or _NAME.match(details)
    if name and name["name"].count("(") > name["name"].count(")"):
        name = None  # cut at a parenthesis inside the name
    tail = details[name.end() :] if name else details
    sizes = {key: int(kb) * 1024 for key, kb in _SIZE.findall(tail)}
    # A number at the end may be cut. Other words after the name are a sentence about a kill.
    if not name and (not details or _SENTENCE.search(details)):
        return None
    uid = _UID.search(details[: name.end()] if name and "uid" in name.groupdict() else tail)
    return Killed(
        pid=int(match["pid"]),
        name=name["name"] if name else None,
        uid=int(uid[1]) if uid else None,
        scope=scope_of(match["cause"]),
        sizes=Sizes(
            anon_bytes=sizes.get("anon-rss"),
            shmem_bytes=sizes.get("shmem-rss"),
            file_bytes=sizes.get("file-rss"),
            swap_bytes=sizes.get("swap-rss"),
            total_vm_bytes=sizes.get("total-vm", sizes.get("vsz")),
        ),
    )


def scope_of(cause: str | None) -> Scope:
    if not cause:
        return "unknown"
    return "machine" if cause.startswith("O") else "cgroup"  # "Memory cgroup out of memory" may have lost its head


def node_note(constraint: str, nodes: str | None) -> str:
    """Return the note for a process that may use only a part of the machine's memory."""
    if constraint not in ("CONSTRAINT_CPUSET", "CONSTRAINT_MEMORY_POLICY"):
        return ""
    allowed = f"NUMA nodes {nodes}" if nodes else "some NUMA nodes"
    return f"The process was bound to {allowed} (cpuset or numactl). The other nodes may have had free memory."


def invoker_name(before: str) -> str | None:
    """Return the command name at the end of the text before "invoked oom-killer"."""
    name = _PREFIX.sub("", before).strip()
    if len(name) > 15:  # longer than the names of the kernel: the rest of an unknown prefix
        name = name.split()[-1]
    return name or None


def inline_stats(text: str) -> dict[str, int]:
    return {key: int(kb) * 1024 for key, kb in _INLINE_STAT.findall(text)}


class Table:
    """The process table of a record, in pages until the page size is known."""

    _LONGEST = 100_000

    def __init__(self, columns: str) -> None:
        self.columns = columns.split()[:-1]  # the last one is the name
        if not columns.endswith("name"):
            self.columns = columns.split()
        # A prefix may contain brackets too, so that a row is recognized by its numbers.
        self._row = re.compile(rf"\[\s*(\d+)\]((?:\s+-?\d+){{{len(self.columns)}}})(?: (.*)|$)")
        self.rows: dict[int, tuple[dict[str, int], str]] = {}

    def add(self, text: str) -> bool:
        match = self._row.search(text)
        if match is None or match[3] is None or len(self.rows) >= self._LONGEST:
            return match is not None
        values = dict(zip(self.columns, map(int, match[2].split()), strict=True))
        self.rows[int(match[1])] = values, match[3].strip()
        return True

    def page_bytes(self, pid: int | None, total_vm_bytes: int | None) -> int:
        """Return the page size: 4 KiB, unless a process of known size shows larger ones (64 KiB on ARM, POWER)."""
        row = self.rows.get(pid) if pid is not None else None
        if row is None or not total_vm_bytes or not row[0].get("total_vm"):
            return 4096
        ratio = total_vm_bytes / row[0]["total_vm"]
        return min((4096, 16384, 65536), key=lambda size: abs(size - ratio))

    def sizes(self, pid: int, page: int) -> Sizes | None:
        row = self.rows.get(pid)
        if row is None:
            return None
        pages = row[0]

        columns = ("rss_anon", "rss_shmem", "rss_file", "swapents", "total_vm", "rss")
        return Sizes(*(pages[column] * page if column in pages else None for column in columns))
