"""Recognize the lines of the kernel's out-of-memory records, from 2.6 to 6.18 with any prefix, and assemble kills.

Each pattern requires the character after a number, so that a line that was cut inside a number does not match: a
missing value is better than a wrong one.
"""

from __future__ import annotations

import re
from dataclasses import field, replace

from brim.monitor.oom.kills import ASKED_FOR, Bound, Evidence, GroupMemory, Kill, ListedTask, MachineRoom, Scope, Sizes
from brim.monitor.oom.log_lines import Stamp
from brim.monitor.oom.phrases import is_quotation
from brim.records import dataclass

_LARGEST = 5  # listed processes
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


def parse_killed(text: str) -> Kill | None:
    """Return the victim that "Killed process …" names."""
    match = KILLED.search(text)
    if match is None or is_quotation(text, match.start()):
        return None
    details = text[match.end() :]
    name = _NAME_AFTER_UID.match(details) or _NAME.match(details)
    if name and name["name"].count("(") > name["name"].count(")"):
        name = None  # cut at a parenthesis inside the name
    tail = details[name.end() :] if name else details
    # A number at the end may be cut. Other words after the name are a sentence about a kill.
    if not name and (not details or _SENTENCE.search(details)):
        return None
    uid = _UID.search(details[: name.end()] if name and "uid" in name.groupdict() else tail)
    by_name = {key: int(kb) * 1024 for key, kb in _SIZE.findall(tail)}
    keys = ("anon-rss", "shmem-rss", "file-rss", "swap-rss", "total-vm" if "total-vm" in by_name else "vsz")
    return Kill(
        "kernel",
        scope_of(match["cause"]),
        pid=int(match["pid"]),
        name=name["name"] if name else None,
        uid=int(uid[1]) if uid else None,
        sizes=Sizes(*map(by_name.get, keys)),
        signal=9,
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
        """Return the page size: 4 KiB, or larger (such as 64 KiB on ARM and POWER) if the size of a process shows it.

        The table gives the size of the process in pages, and `total_vm_bytes` is the same size in bytes.
        """
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


@dataclass(slots=True)
class Record:
    """The values of a record that were read so far."""

    stamp: Stamp
    number: int
    invoked_by: str | None = None
    limit_group: str | None = None
    task_group: str | None = None
    usages: dict[str, tuple[int, int]] = field(default_factory=dict)
    stats: dict[str, dict[str, int]] = field(default_factory=dict)
    stats_of: str | None = None
    table: Table | None = None
    machine: MachineRoom = field(default_factory=MachineRoom)
    shmem_pages: int | None = None
    ram_pages: int | None = None
    quotes: list[Evidence] = field(default_factory=list)
    tangled: bool = False  # it may contain lines of another record
    whole_group: bool = False
    asked_for: bool = False  # by SysRq f
    kills: int = 0


@dataclass(frozen=True, slots=True)
class Announced:
    """A victim that was named before the kill: "Kill process …" of old kernels, "oom-kill:" of new ones."""

    pid: int
    name: str
    scope: Scope
    limit_group: str | None
    task_group: str | None
    stamp: Stamp
    number: int
    quote: Evidence
    is_choice: bool  # a child may be killed instead
    note: str = ""


def take(record: Record, text: str) -> str:
    """Add the values of a line to a record; return its kind, "quote" if it is evidence, "" if it has no values."""
    if record.table is not None and record.table.add(text):
        return "row"
    if match := USAGE.search(text):
        pair = int(match["usage"]) * 1024, int(match["limit"])
        record.tangled = record.tangled or record.usages.get(match["kind"], pair) != pair
        record.usages[match["kind"]] = pair
        return "quote" if pair[1] < UNLIMITED_KB and pair[0] >= pair[1] * 1024 else "usage"
    if match := TABLE_HEAD.search(text):
        record.tangled = record.tangled or record.table is not None
        record.table, record.stats_of = Table(match["columns"]), None
        return "table"
    if match := LIMIT_OF.search(text) or LIMIT_REACHED.search(text):
        record.tangled = record.tangled or record.limit_group is not None
        record.limit_group = match["limit"]
        record.task_group = match.groupdict().get("task")
        return "quote"
    if match := STATS_FOR.search(text):
        record.stats_of = match["group"] or ""
        stats = _INLINE_STAT.findall(match["inline"] or match["bare"] or "")
        record.stats.setdefault(record.stats_of, {}).update((key, int(kb) * 1024) for key, kb in stats)
        return "stats"
    if record.stats_of is not None and (match := STAT.search(text)):
        record.stats[record.stats_of].setdefault(match["key"], int(match["value"]))
        return "stat"
    if match := RAM.search(text):
        record.ram_pages = int(match[1])
    elif match := SWAP_TOTAL.search(text):
        record.machine = replace(record.machine, swap_bytes=int(match[1]) * 1024)
    elif match := SWAP_FREE.search(text):
        record.machine = replace(record.machine, swap_free_bytes=int(match[1]) * 1024)
    elif match := SHMEM_PAGES.search(text):
        record.shmem_pages = int(match[1])
    else:
        return ""
    return "room"


def assemble(victim: Kill, spoken: Announced | None, choice: Announced | None, record: Record | None) -> Kill:
    """Return the kill that one record reports."""
    kill = victim
    for announced in (choice, spoken):
        if announced is not None and announced.scope != "unknown":
            kill = replace(kill, scope=announced.scope)
    limit_group, task_group = (spoken.limit_group, spoken.task_group) if spoken else (None, None)
    if spoken is not None and spoken.note:
        kill = replace(kill, notes=(spoken.note,))
    if kill.name is None and (announcement := spoken or choice) and announcement.pid == victim.pid:
        kill = replace(kill, name=announcement.name)
    if record is None or record.tangled:
        return replace(kill, bound=Bound(group=limit_group, task_group=task_group))
    if spoken is None:
        # A record that was cut may lack its group; the counted group is the one with the limit.
        counted = next(iter(record.stats), "") if len(record.stats) == 1 else ""
        limit_group, task_group = record.limit_group or counted or None, record.task_group
    page = 4096
    if record.table is not None:
        page = record.table.page_bytes(victim.pid, victim.sizes.total_vm_bytes)
        kill = _with_table(kill, record.table, page)
    machine = replace(
        record.machine,
        ram_bytes=None if record.ram_pages is None else record.ram_pages * page,
        shmem_bytes=None if record.shmem_pages is None else record.shmem_pages * page,
    )
    bound = replace(_bound(record.usages), group=limit_group, task_group=task_group)
    if kill.scope == "machine":  # a machine-wide record has no limit but the machine
        bound = Bound(task_group=task_group)
    if record.asked_for:
        kill = replace(kill, scope="unknown", notes=(*kill.notes, ASKED_FOR))
    return replace(
        kill, bound=bound, contents=_contents(record, limit_group), room=machine, invoked_by=record.invoked_by
    )


def _with_table(kill: Kill, table: Table, page: int) -> Kill:
    """Add the largest processes of the table, and values of the victim's row that its line lacks."""
    row = table.rows.get(kill.pid) if kill.pid is not None else None
    if row is not None and kill.pid is not None:
        listed, sizes = table.sizes(kill.pid, page) or Sizes(), kill.sizes
        if sizes.swap_bytes is None:
            sizes = replace(sizes, swap_bytes=listed.swap_bytes)
        uid = row[0]["uid"] if kill.uid is None else kill.uid
        kill = replace(
            kill, name=kill.name or row[1] or None, uid=uid, sizes=listed if sizes.anon_bytes is None else sizes
        )

    def weight(pid: int) -> int:
        pages = table.rows[pid][0]
        return pages.get("rss", 0) + pages.get("swapents", 0)

    tasks = tuple(
        ListedTask(pid, table.rows[pid][1], table.rows[pid][0]["uid"], table.sizes(pid, page) or Sizes())
        for pid in sorted(table.rows, key=weight, reverse=True)[:_LARGEST]
    )
    return replace(kill, tasks=tasks)


def _bound(usages: dict[str, tuple[int, int]]) -> Bound:
    """Return the limit that was reached, or else the memory limit."""
    limited = {kind: (usage, limit * 1024) for kind, (usage, limit) in usages.items() if limit < UNLIMITED_KB}
    for kind in ("memory", "memory+swap", "kmem", "swap"):
        if kind in limited and limited[kind][0] >= limited[kind][1] > 0:
            return Bound(limited[kind][1], limited[kind][0], kind)
    if "memory" in limited:
        return Bound(limited["memory"][1], limited["memory"][0], "memory")
    return Bound()


def _contents(record: Record, group: str | None) -> GroupMemory:
    stats = record.stats.get(group or "") or next(iter(record.stats.values()), {})

    def first_of(*keys: str) -> int | None:
        return next((stats[key] for key in keys if key in stats), None)

    shmem, file = first_of("total_shmem", "shmem"), first_of("file", "total_cache", "cache")
    if file is not None and shmem is not None:
        file = max(file - shmem, 0)  # the kernel counts shared memory as file pages too
    return GroupMemory(first_of("anon", "total_rss", "rss"), shmem, file)
