"""Kills assembled from a kernel record: the limit, the group, its memory, and the name of the victim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from brim.monitor.oom import kernel_record as module
from brim.monitor.oom.kernel_record import UNLIMITED_KB, Announced, Record, Table, assemble, take
from brim.monitor.oom.kills import Bound, Evidence, GroupMemory, Kill, MachineRoom, Sizes
from brim.monitor.oom.log_lines import Stamp

STAMP = Stamp.__new__(Stamp)
VICTIM = Kill("kernel", "group", pid=7, signal=9)  # type: ignore[arg-type]
SPOKEN = Announced(7, "python", "group", "/limit", "/task", STAMP, 1, Evidence.__new__(Evidence), False)


def record() -> Record:
    return Record(STAMP, 1)


@pytest.mark.parametrize(
    ("usages", "bound"),
    [
        ({}, Bound()),
        ({"memory": (1024, 1)}, Bound(1024, 1024, "memory")),
        ({"memory": (1023, 1)}, Bound(1024, 1023, "memory")),  # no limit was reached
        ({"memory": (1, 1), "swap": (2048, 2)}, Bound(2048, 2048, "swap")),
        ({"memory": (1024, 1), "memory+swap": (4096, 2)}, Bound(1024, 1024, "memory")),
        ({"memory+swap": (4096, 2), "kmem": (4096, 2)}, Bound(2048, 4096, "memory+swap")),
        ({"kmem": (4096, 2), "swap": (4096, 2)}, Bound(2048, 4096, "kmem")),
        ({"swap": (0, 0)}, Bound()),  # a limit of zero is never reached
        ({"memory": (10**15, UNLIMITED_KB)}, Bound()),
        ({"memory": (1024 * (UNLIMITED_KB - 1), UNLIMITED_KB - 1)}, Bound(*[1024 * (UNLIMITED_KB - 1)] * 2, "memory")),
    ],
)
def test_which_limit_was_hit(usages: dict[str, tuple[int, int]], bound: Bound) -> None:
    """The first limit that was reached, in order of priority, is reported; otherwise the memory limit, if it exists."""
    assert module._bound(usages) == bound


@pytest.mark.parametrize(
    ("stats", "retained"),
    [
        ({}, GroupMemory()),
        ({"anon": 5, "file": 9, "shmem": 4}, GroupMemory(5, 4, 5)),
        ({"total_rss": 6, "rss": 5, "total_cache": 9, "cache": 8}, GroupMemory(6, None, 9)),
        ({"rss": 5, "cache": 8, "total_shmem": 3}, GroupMemory(5, 3, 5)),
        ({"file": 3, "shmem": 4}, GroupMemory(None, 4, 0)),
        ({"anon": 1, "total_rss": 2}, GroupMemory(1, None, None)),
    ],
)
def test_what_a_group_held(stats: dict[str, int], retained: GroupMemory) -> None:
    """Field names of both cgroup versions are read; shared memory is not counted as file pages too."""
    for name in ("/limit", "/other"):
        with_stats = record()
        with_stats.stats[name] = stats
        assert module._contents(with_stats, "/limit") == retained
    several = record()
    several.stats |= {"/other": {"anon": 99}, "/limit": stats or {"x": 1}}
    assert module._contents(several, "/limit") == retained


def test_the_largest_processes_are_listed() -> None:
    """The processes are sorted by memory plus swap; the table adds fields that the victim's line does not have."""
    table = Table("uid tgid total_vm rss swapents oom_score_adj name")
    for pid, rss, swap in ((7, 10, 5), (8, 20, 0), (9, 1, 30), (10, 2, 0), (11, 3, 0), (12, 4, 0)):
        assert table.add(f"[ {pid}] 1000 {pid} 100 {rss} {swap} 0 name{pid}")
    kill = assemble(VICTIM, None, None, replace(record(), table=table))
    assert [task.pid for task in kill.tasks] == [9, 8, 7, 12, 11]
    assert [(task.name, task.uid) for task in kill.tasks[:2]] == [("name9", 1000), ("name8", 1000)]
    assert kill.tasks[0].sizes.swap_bytes == 30 * 4096
    assert (kill.name, kill.uid) == ("name7", 1000)
    assert kill.sizes == table.sizes(7, 4096)
    known_values = replace(VICTIM, name="mine", uid=5, sizes=Sizes(anon_bytes=1, total_vm_bytes=100 * 65536))
    kill = assemble(known_values, None, None, replace(record(), table=table, ram_pages=3, shmem_pages=2))
    assert (kill.name, kill.uid, kill.sizes) == ("mine", 5, replace(known_values.sizes, swap_bytes=5 * 65536))
    assert (kill.room.ram_bytes, kill.room.shmem_bytes) == (3 * 65536, 2 * 65536)
    second = assemble(replace(VICTIM, pid=99), None, None, replace(record(), table=table))
    assert (second.name, second.uid, len(second.tasks)) == (None, None, 5)


def test_names_and_groups_of_what_was_announced() -> None:
    """An earlier line about the same process adds its name, groups and note to the kill."""
    kill = assemble(VICTIM, replace(SPOKEN, note="a note"), None, None)
    assert (kill.name, kill.notes, kill.signal, kill.pid) == ("python", ("a note",), 9, 7)
    assert kill.bound == Bound(group="/limit", task_group="/task")
    assert assemble(VICTIM, SPOKEN, None, None).notes == ()
    assert assemble(replace(VICTIM, pid=8), SPOKEN, None, None).name is None
    assert assemble(replace(VICTIM, name="own"), SPOKEN, None, None).name == "own"
    assert assemble(VICTIM, None, SPOKEN, None).name == "python"
    assert assemble(VICTIM, None, SPOKEN, None).bound == Bound()


@pytest.mark.parametrize(
    ("own", "choice", "spoken", "scope"),
    [
        ("group", None, None, "group"),
        ("unknown", "machine", None, "machine"),
        ("unknown", "machine", "group", "group"),
        ("group", "machine", "unknown", "machine"),
        ("machine", "unknown", "unknown", "machine"),
    ],
)
def test_the_scope_is_that_of_the_last_who_knows(own: str, choice: str | None, spoken: str | None, scope: str) -> None:
    created = [None if each is None else replace(SPOKEN, scope=each) for each in (spoken, choice)]  # type: ignore[arg-type]
    assert assemble(replace(VICTIM, scope=own), *created, None).scope == scope  # type: ignore[arg-type]


def test_a_tangled_record_tells_nothing_but_the_kill() -> None:
    result = replace(record(), usages={"memory": (1024, 1)}, invoked_by="x", limit_group="/a")
    assert assemble(VICTIM, None, None, result).bound == Bound(1024, 1024, "memory", "/a")
    assert assemble(VICTIM, None, None, result).invoked_by == "x"
    kill = assemble(VICTIM, SPOKEN, None, replace(result, tangled=True))
    assert (kill.bound, kill.invoked_by) == (Bound(group="/limit", task_group="/task"), None)


def test_the_group_of_a_record_without_its_line() -> None:
    """A record without a group line uses the only group with counters; with several groups it uses none."""
    first, two = record(), record()
    first.stats["/a"] = {"anon": 1}
    two.stats |= {"/a": {"anon": 1}, "/b": {"anon": 2}}
    assert assemble(VICTIM, None, None, first).bound.group == "/a"
    assert assemble(VICTIM, None, None, two).bound.group is None
    names = replace(first, limit_group="/named", task_group="/t")
    assert assemble(VICTIM, None, None, names).bound == Bound(group="/named", task_group="/t")
    assert assemble(VICTIM, SPOKEN, None, names).bound == Bound(group="/limit", task_group="/task")
    several = replace(two, limit_group="/b")
    assert assemble(VICTIM, None, None, several).contents == GroupMemory(2), "of the group that the limit is of"
    assert assemble(VICTIM, None, None, two).contents == GroupMemory(1)


def test_a_kill_of_the_whole_machine_has_no_limit() -> None:
    result = replace(record(), usages={"memory": (1024, 1)}, task_group="/t")
    kill = assemble(replace(VICTIM, scope="machine"), None, None, result)
    assert kill.bound == Bound(task_group="/t")
    requested = assemble(
        replace(VICTIM, scope="machine"), replace(SPOKEN, note="n"), None, replace(result, asked_for=True)
    )
    assert requested.scope in ("unknown", "group")
    assert len(requested.notes) == 2


def test_what_lines_add_to_a_record() -> None:
    """Each line adds its fields to the record and returns whether it is worth quoting."""
    created = record()
    assert take(created, "memory: usage 2048kB, limit 2048kB, failcnt 9") == "quote"
    assert created.usages == {"memory": (2048 * 1024, 2048)}
    assert take(created, "swap: usage 1kB, limit 2kB, failcnt 0") == "usage"
    assert not created.tangled
    assert take(created, "memory: usage 1kB, limit 2048kB, failcnt 9") == "usage"
    assert created.tangled, "another number for the same"
    assert take(created, "nothing of interest") == ""
    budget = record()
    assert (
        take(budget, "262144 pages RAM")
        == take(budget, "Total swap = 8kB")
        == take(budget, "Free swap  = 4kB")
        == "room"
    )
    assert (budget.ram_pages, budget.machine) == (262144, MachineRoom(swap_bytes=8192, swap_free_bytes=4096))


def test_lines_of_groups_and_processes() -> None:
    """The lines give the group that reached its limit, the victim's group, its memory, and the running processes."""
    created = record()
    assert take(created, "Task in /a/b killed as a result of limit of /a") == "quote"
    assert (created.limit_group, created.task_group, created.tangled) == ("/a", "/a/b", False)
    assert take(created, "Memory cgroup stats for /a: cache:4KB rss:8KB") == "stats"
    assert take(created, "anon 5") == "stat"
    assert take(created, "Memory cgroup stats: shmem:2KB") == "stats"
    assert created.stats == {"/a": {"cache": 4096, "rss": 8192, "anon": 5}, "": {"shmem": 2048}}
    assert take(created, "[ pid ]   uid  tgid total_vm      rss cpu oom_adj oom_score_adj name") == "table"
    assert take(created, "[    7]  1000     7      100       10   0       0             0 python") == "row"
    assert created.table is not None
    assert list(created.table.rows) == [7]
    assert take(created, "anon 6") == "", "what follows a table is not of the group"
    reached = record()
    assert take(reached, "Memory limit reached of cgroup /c") == "quote"
    assert (reached.limit_group, reached.task_group) == ("/c", None)
