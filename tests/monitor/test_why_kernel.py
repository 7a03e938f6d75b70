"""Kernel records: exact facts from every log, and no wrong facts from logs that are cut, mixed or damaged."""

from __future__ import annotations

import random
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.monitor.oom.kernel_log import KernelRecords
from brim.monitor.oom.kills import Kill, Sizes
from brim.monitor.oom.log_lines import Clock
from brim.monitor.oom.merge_kills import merge
from brim.monitor.oom.scan_log import Scan

LOGS = Path(__file__).parents[1] / "fixtures" / "oom"
K = 1024


def kills_in(text: str) -> list[Kill]:
    records = KernelRecords("log", Clock())
    for number, line in enumerate(text.split("\n"), 1):
        records.read(number, line)
    return records.finish()


def scanned(text: str) -> list[Kill]:
    """Return all findings of all readers in a text."""
    scan = Scan("log", Clock(), terminals=True)
    for number, line in enumerate(text.split("\n"), 1):
        scan.read(number, line)
    return merge(scan.finish()[0])


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()


# pid, name, uid, scope, limit kB, limit's group, (anon, file, shmem, total-vm) kB
EXPECTED = {
    "k3.10_el7_syslog_uid": (
        24100, "embed_be", 0, "cgroup", 47185920, "/docker/d9b0a9bd41d3", (46563840, 0, 0, 71348224),
    ),
    "k3.13_memcg": (13001, "tokenise", 275858, "cgroup", 1048576, "/jobs2", (1048100, 452, None, 33558652)),
    "k4.14_ecs_pmds": (21034, "npm start", 0, "cgroup", 1048576, "/ecs/aa01bb02/cc03dd04", (813832, 0, 0, 34003636)),
    "k5.14_iso_user_session": (1540763, "python", 31417, "machine", None, None, (61356032, 0, 0, 88033280)),
    "k5.4_memcg_v1_multiline_stats": (
        64214, "python3", 0, "cgroup", 204800, "/kubepods/burstable/pod11", (165888, 52480, 92, 3250176),
    ),
    "k5.x_global_in_docker": (4178, "python", 0, "machine", None, None, (8322048, 0, 8, 9543680)),
    "k6.18_memcg_v1_shmem": (24601, "python3", 0, "cgroup", 153600, "/jobs/embed_test", (17156, 6684, 0, 26892)),
    "more_french_64k_pages": (4242, "postmaster", 26, "machine", None, None, (25536000, 32000, 32000, 32000000)),
    "more_vmware_guest": (
        19388, "node", 1000, "cgroup", 614400, "/kubepods/burstable/podfe3f7a38-b3f7-48aa-8997-a697ae3d0741",
        (552020, 0, 0, 22353736),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_every_log_gives_its_facts(name: str) -> None:
    """Pid, name, user, sizes, scope, killer and limit equal those of the log."""
    (kill,) = kills_in(log(name))
    pid, command, uid, scope, limit_kb, group, (anon, file, shmem, total_vm) = EXPECTED[name]
    assert (kill.killer, kill.effect, kill.sure) == ("kernel", "killed", "certain")
    assert (kill.pid, kill.name, kill.uid, kill.scope) == (pid, command, uid, scope)
    assert kill.bound.bytes == (None if limit_kb is None else limit_kb * K)
    assert kill.bound.group == group
    sizes = kill.sizes
    assert (sizes.anon_bytes, sizes.file_bytes, sizes.total_vm_bytes) == (anon * K, file * K, total_vm * K)
    assert sizes.shmem_bytes == (None if shmem is None else shmem * K)


def test_sacrificed_child() -> None:
    """The selected process and the killed process are both named."""
    (kill,) = kills_in(log("k3.10_el7_syslog_uid"))
    assert (kill.pid, kill.chosen_pid, kill.invoked_by) == (24100, 25984, "embed_be")
    assert "in its place" in kill.notes[0]


def test_name_with_a_space_and_the_largest_processes() -> None:
    """Command names are complete, also in the table and for the process that requested memory."""
    (kill,) = kills_in(log("k4.14_ecs_pmds"))
    assert kill.invoked_by == "celery"
    assert [(task.name, task.sizes.rss_bytes) for task in kill.tasks] == [
        ("npm start", 203458 * 4096),
        ("celery", 25910 * 4096),
    ]


def test_name_with_parentheses() -> None:
    """Names with parentheses are parsed completely; the child and the other tasks of the group are found."""
    kills = merge(kills_in(log("more_talos_group_kill")))
    assert [(kill.pid, kill.name) for kill in kills] == [(2156, "apid"), (2157, "(helper) x")]
    assert {kill.bound.bytes for kill in kills} == {40960 * K}
    assert {kill.invoked_by for kill in kills} == {"apid"}


def test_limit_of_an_ancestor() -> None:
    """The limit that was reached may belong to a group above the victim's own."""
    (kill,) = kills_in(log("k5.4_memcg_v1_multiline_stats"))
    assert kill.bound.task_group == "/kubepods/burstable/pod11/c1"
    assert (kill.contents.anon_bytes, kill.contents.shmem_bytes) == (185409536, 0)


def test_machine_wide_in_a_container() -> None:
    """`global_oom` means the machine, independent of the victim's group."""
    (kill,) = kills_in(log("k5.x_global_in_docker"))
    assert (kill.scope, kill.bound.group, kill.bound.task_group) == ("machine", None, "/docker/0a1b2c3d4e5f")


def test_shared_memory_fills_a_group() -> None:
    """The memory of the group and of the victim are separate; shared memory is not counted as file pages."""
    (kill,) = kills_in(log("k6.18_memcg_v1_shmem"))
    assert (kill.contents.shmem_bytes, kill.contents.anon_bytes, kill.contents.file_bytes) == (146440192, 10485760, 0)
    assert kill.sizes.swap_bytes == 0


def test_pages_of_64_kib() -> None:
    """The table counts pages; the page size follows from the victim's line, which is in kB."""
    (kill,) = kills_in(log("more_french_64k_pages"))
    assert kill.room.ram_bytes == 524288 * 65536
    assert kill.sizes.swap_bytes == 60000 * 65536
    assert kill.tasks[1].sizes.anon_bytes == 40 * 65536
    assert (kill.room.swap_bytes, kill.room.swap_free_bytes) == (4194304 * K, 0)


def test_old_kernels() -> None:
    """el6 writes the user before the name, 2.6 writes no sizes, and the victim may be announced earlier."""
    kills = kills_in(log("more_k2.6_el5_el6"))
    assert [(k.pid, k.name, k.uid) for k in kills] == [
        (11726, "mysqld", 498),
        (21988, "oracle", 27),
        (2592, "java", None),
    ]
    assert kills[0].room.ram_bytes == 2097135 * 4096
    assert {kill.scope for kill in kills} == {"machine"}


def test_journal_as_json() -> None:
    """journalctl -o json is read like its text, and Slurm's message is merged with the kernel's."""
    (kill,) = scanned(log("more_journal_json"))
    assert (kill.pid, kill.bound.bytes, kill.host, kill.unit) == (8156, 33554432 * K, "gpu7", "step 191.batch")
    assert kill.when is not None
    assert kill.when.timestamp() == pytest.approx(1700000000.3)


def test_bound_to_some_memory() -> None:
    """A process that numactl or a cpuset binds to full nodes can die while other nodes have free memory."""
    text = (
        log("k5.14_iso_user_session")
        .replace("CONSTRAINT_NONE", "CONSTRAINT_CPUSET")
        .replace("mems_allowed=0", "mems_allowed=0-1,3")
    )
    (kill,) = kills_in(text)
    assert kill.scope == "machine"
    assert "NUMA nodes 0-1,3" in kill.notes[0]


def test_announced_long_ago() -> None:
    """A process with the same pid that was announced a day before is a different one."""
    announced = "[100.000000] Out of memory: Kill process 7 (old) score 1 or sacrifice child"
    killed = "[90000.000000] Killed process 7 (new) total-vm:8kB, anon-rss:4kB, file-rss:0kB"
    assert [(kill.name, kill.sure) for kill in kills_in(f"{announced}\n{killed}")] == [
        ("old", "likely"),
        ("new", "certain"),
    ]


def test_killed_line_alone() -> None:
    """Header and table are rate-limited, so the last line alone makes a kill."""
    line = log("k5.14_iso_user_session").splitlines()[-1]
    (kill,) = kills_in(line)
    assert (kill.pid, kill.name, kill.uid, kill.scope) == (1540763, "python", 31417, "machine")


def test_printed_twice() -> None:
    """The same kill in two logs, or twice in one, is reported once."""
    text = log("k5.x_global_in_docker")
    assert len(merge(kills_in(text + text))) == 1


def test_killed_again_after_a_week_is_another_kill() -> None:
    """The same pid and name a week later are another process."""
    text = log("k5.14_iso_user_session")
    assert len(merge(kills_in(text + text.replace("2024-05-02", "2024-05-10")))) == 2


def test_cut_before_the_victim() -> None:
    """A record without its last line reports a kill of an unknown process."""
    (kill,) = kills_in("\n".join(log("k6.18_memcg_v1_shmem").splitlines()[:-2]))
    assert (kill.pid, kill.sure, kill.scope, kill.bound.bytes) == (None, "likely", "cgroup", 153600 * K)


def test_announced_and_never_confirmed() -> None:
    """A victim without a final line is named and not certain."""
    (kill,) = kills_in("\n".join(log("k5.4_memcg_v1_multiline_stats").splitlines()[:-2]))
    assert (kill.pid, kill.name, kill.sure) == (64214, "python3", "likely")


def test_a_later_record_takes_nothing_from_an_old_one() -> None:
    """A header that was cut off an hour before does not add its limit to a later record."""
    cut = "\n".join(log("k3.13_memcg").splitlines()[:6])
    later_value = "[99999.100000] Out of memory: Killed process 7 (late) total-vm:8kB, anon-rss:4kB, file-rss:0kB"
    second, first = kills_in(f"{cut}\n{later_value}")
    assert (first.pid, first.bound.bytes) == (None, 1048576 * K)
    assert (second.pid, second.bound.bytes, second.scope) == (7, None, "machine")


PREFIXES = [
    "", "[12345.678901] ", "[ 1401.262738][ T4242] ", "[Thu Feb 20 07:12:03 2025] ",
    "2024-05-02T09:31:41,678628+02:00 ",
    "May  9 11:17:26 node-03 kernel: ", "May  9 11:17:26 node-03 kernel: [  12.345678] ", "kernel: ", "<4>[  12.3456] ",
    "2024-05-02T09:31:41.123+0000 node-03 kernel: ", "6,339,5140900,-;", "> > ", "\x1b[32m[  12.345678] \x1b[0m",
    "mars 01 10:28:39 hôte kernel: ", "5月 29 23:06:20 host kernel: ", "Guest: <6>[39291577.009360] ",
    "10.1.1.2: kern:    info: [2025-05-18T15:40:20.654325542Z]: ", '<4>1 2024-05-02T09:31:41.1Z node-03 kernel - - - ',
]  # fmt: skip
BARE = """\
npm start invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
memory: usage 204800kB, limit 204800kB, failcnt 77
Memory cgroup stats for /a/b:
anon 185409536
shmem 4096
Tasks state (memory values in pages):
[  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name
[  64214]     7 64214   787367    45021  1404928       11           986 npm start
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a,task_memcg=/a/b,task=npm start,pid=64214,uid=7
Memory cgroup out of memory: Killed process 64214 (npm start) total-vm:3149468kB, anon-rss:165888kB, file-rss:52480kB, shmem-rss:92kB, UID:7 pgtables:1404kB oom_score_adj:986"""  # noqa: E501


def test_a_group_that_is_killed_as_a_whole() -> None:
    """Each process of the group gets the limit of the record; without a statement of it, only the first one does."""
    together = "Tasks in /a are going to be killed due to memory.oom.group set"
    also = "Memory cgroup out of memory: Killed process 9 (other) total-vm:8kB, anon-rss:4kB, file-rss:0kB"
    for between, limit in ((together, 204800 * K), ("something else", None)):
        limits = {kill.pid: kill.bound.bytes for kill in kills_in(f"{BARE}\n{between}\n{also}")}
        assert limits == {64214: 204800 * K, 9: limit}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_any_prefix(prefix: str) -> None:
    """A record gives the same kill with any prefix before its lines."""
    (kill,) = scanned("\n".join(prefix + line for line in BARE.split("\n")))
    assert (kill.pid, kill.name, kill.uid, kill.scope, kill.bound.bytes) == (
        64214,
        "npm start",
        7,
        "cgroup",
        204800 * K,
    )
    assert (kill.bound.group, kill.bound.task_group, kill.invoked_by) == ("/a", "/a/b", "npm start")
    assert (kill.contents.anon_bytes, kill.sizes.swap_bytes) == (185409536, 11 * 4096)


def never_wrong(kill: Kill, truths: list[Kill]) -> None:
    """Check that each fact of a kill is missing or equal to the fact in the complete log."""
    if kill.pid is None:
        return
    truth = next((t for t in truths if kill.pid in (t.pid, t.chosen_pid)), None)
    assert truth is not None, f"{kill.pid} was invented"
    if kill.pid != truth.pid:
        return
    assert kill.name in (truth.name, None)
    assert kill.uid in (truth.uid, None)
    assert kill.scope in (truth.scope, "unknown")
    assert kill.bound.bytes in (truth.bound.bytes, None)
    assert kill.bound.group in (truth.bound.group, None)
    if kill.sizes.rss_bytes is None:  # from the victim's own line, because the pages in the table are rounded
        for field in fields(Sizes):
            assert getattr(kill.sizes, field.name) in (getattr(truth.sizes, field.name), None)


WHOLE = {name: log(name) for name in [*EXPECTED, "more_k2.6_el5_el6", "more_talos_group_kill"]}
TRUTH = {name: kills_in(text) for name, text in WHOLE.items()}


@given(st.sampled_from(sorted(WHOLE)), st.data())
def test_cut_anywhere(name: str, data: st.DataObject) -> None:
    """A log that is cut at any byte, at either end, gives fewer facts and no wrong ones."""
    text = WHOLE[name]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    for kill in kills_in(text[start:end]):
        never_wrong(kill, TRUTH[name])


@given(st.sampled_from(sorted(EXPECTED)), st.sampled_from(sorted(EXPECTED)), st.randoms(use_true_random=False))
def test_interleaved(one: str, other: str, chance: random.Random) -> None:
    """Two records with interleaved lines give two kills, whose values are missing or right."""
    queues = [WHOLE[one].splitlines(), WHOLE[other].splitlines()]
    lines = []
    while queue := chance.choice([q for q in queues if q] or [[]]):
        lines.append(queue.pop(0))
    truths = TRUTH[one] + TRUTH[other]
    kills = merge(kills_in("\n".join(lines)))
    assert {kill.pid for kill in kills} == {truth.pid for truth in truths}
    for kill in kills:
        never_wrong(kill, truths)
        truth = next(t for t in truths if t.pid == kill.pid)
        assert (kill.sizes.anon_bytes, kill.name) == (truth.sizes.anon_bytes, truth.name)


@given(st.lists(st.sampled_from(sorted(EXPECTED)), unique=True, min_size=1), st.randoms(use_true_random=False))
def test_mixed_with_other_lines(names: list[str], chance: random.Random) -> None:
    """Consecutive records with unrelated lines between them give each kill once."""
    noise = [
        "",
        "eth0: link up",
        "Apr 18 21:03:10 h sshd[1]: memory",
        "[ pid ]",
        "oom",
        "\x00\xff",
        "[1] 2 3",
        "limit 5kB",
    ]
    lines = []
    for name in names:
        for line in WHOLE[name].splitlines():
            lines += [chance.choice(noise)] * chance.randrange(2) + [line]
    kills = kills_in("\n".join(lines))
    assert [kill.pid for kill in kills] == [EXPECTED[name][0] for name in names]
    assert [kill.sizes.anon_bytes for kill in kills] == [EXPECTED[name][6][0] * K for name in names]


@given(st.text() | st.lists(st.sampled_from(BARE.split("\n")) | st.text(max_size=30)).map("\n".join))
def test_garbage_never_raises(text: str) -> None:
    """No text raises an error."""
    scanned(text)


@given(st.sampled_from(sorted(WHOLE)), st.data())
def test_damaged_letters_never_raise(name: str, data: st.DataObject) -> None:
    """A log with missing or changed characters is read without an error."""
    letters = list(WHOLE[name])
    for position in data.draw(st.lists(st.integers(0, len(letters) - 1), max_size=20)):
        letters[position] = data.draw(st.sampled_from(["", "\n", "9", ")", "(", ",", "=", " ", "\ufffd", "]", "["]))
    scanned("".join(letters))
