"""A kernel record while it is read, and the kill that results from it."""

from __future__ import annotations

from dataclasses import field, replace

from brim.monitor.oom import kernel_lines as lines
from brim.monitor.oom.kills import ASKED_FOR, Bound, Evidence, GroupMemory, Kill, ListedTask, MachineRoom, Scope, Sizes
from brim.monitor.oom.log_lines import Stamp
from brim.records import dataclass

_LARGEST = 5  # listed processes


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
    table: lines.Table | None = None
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
    if match := lines.USAGE.search(text):
        pair = int(match["usage"]) * 1024, int(match["limit"])
        record.tangled = record.tangled or record.usages.get(match["kind"], pair) != pair
        record.usages[match["kind"]] = pair
        return "quote" if pair[1] < lines.UNLIMITED_KB and pair[0] >= pair[1] * 1024 else "usage"
    if match := lines.TABLE_HEAD.search(text):
        record.tangled = record.tangled or record.table is not None
        record.table, record.stats_of = lines.Table(match["columns"]), None
        return "table"
    if match := lines.LIMIT_OF.search(text) or lines.LIMIT_REACHED.search(text):
        record.tangled = record.tangled or record.limit_group is not None
        record.limit_group = match["limit"]
        record.task_group = match.groupdict().get("task")
        return "quote"
    if match := lines.STATS_FOR.search(text):
        record.stats_of = match["group"] or ""
        inline = lines.inline_stats(match["inline"] or match["bare"] or "")
        record.stats.setdefault(record.stats_of, {}).update(inline)
        return "stats"
    if record.stats_of is not None and (match := lines.STAT.search(text)):
        record.stats[record.stats_of].setdefault(match["key"], int(match["value"]))
        return "stat"
    return _take_machine(record, text)


def _take_machine(record: Record, text: str) -> str:
    if match := lines.RAM.search(text):
        record.ram_pages = int(match[1])
    elif match := lines.SWAP_TOTAL.search(text):
        record.machine = replace(record.machine, swap_bytes=int(match[1]) * 1024)
    elif match := lines.SWAP_FREE.search(text):
        record.machine = replace(record.machine, swap_free_bytes=int(match[1]) * 1024)
    elif match := lines.SHMEM_PAGES.search(text):
        record.shmem_pages = int(match[1])
    else:
        return ""
    return "room"


def assemble(victim: lines.Killed, spoken: Announced | None, choice: Announced | None, record: Record | None) -> Kill:
    """Return the kill that one record reports."""
    scope = victim.scope
    for announced in (choice, spoken):
        if announced is not None and announced.scope != "unknown":
            scope = announced.scope
    limit_group, task_group = (spoken.limit_group, spoken.task_group) if spoken else (None, None)
    kill = Kill("kernel", scope, pid=victim.pid, name=victim.name, uid=victim.uid, sizes=victim.sizes, signal=9)
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


def _with_table(kill: Kill, table: lines.Table, page: int) -> Kill:
    row = table.rows.get(kill.pid) if kill.pid is not None else None
    if row is not None and kill.pid is not None:
        listed = table.sizes(kill.pid, page) or Sizes()
        sizes = kill.sizes
        if sizes.swap_bytes is None:
            sizes = replace(sizes, swap_bytes=listed.swap_bytes)
        if sizes.anon_bytes is None:
            sizes = listed
        kill = replace(kill, name=kill.name or row[1] or None, uid=row[0]["uid"] if kill.uid is None else kill.uid)
        kill = replace(kill, sizes=sizes)
    largest = sorted(table.rows, key=lambda pid: _weight(table.rows[pid][0]), reverse=True)[:_LARGEST]
    tasks = tuple(
        ListedTask(pid, table.rows[pid][1], table.rows[pid][0]["uid"], table.sizes(pid, page) or Sizes())
        for pid in largest
    )
    return replace(kill, tasks=tasks)


def _weight(pages: dict[str, int]) -> int:
    return pages.get("rss", 0) + pages.get("swapents", 0)


def _bound(usages: dict[str, tuple[int, int]]) -> Bound:
    """Return the limit that was reached, or else the memory limit."""
    limited = {kind: (usage, limit * 1024) for kind, (usage, limit) in usages.items() if limit < lines.UNLIMITED_KB}
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
