"""The text about kills: sentences, suggestions, summaries, and the sources on a machine."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from brim.errors import InputError
from brim.monitor.oom import explain, this_machine
from brim.monitor.oom.kills import Bound, CurvePoint, Kill, MachineRoom, Sizes, owner_of
from brim.monitor.oom.why import why

LOGS = Path(__file__).parents[1] / "fixtures" / "oom"
GB = 10**9


def kill(day: int, retained: float, name: str = "python3") -> Kill:
    return Kill(
        "kernel",
        "machine",
        name=name,
        pid=day,
        when=datetime(2026, 5, day, tzinfo=UTC),
        sizes=Sizes(anon_bytes=round(retained * GB)),
        room=MachineRoom(ram_bytes=61 * GB),
    )


def test_summary_of_two() -> None:
    """Two kills are summarized with their number, interval and sizes."""
    assert explain.summary([kill(2, 50.8), kill(10, 58.8)]) == "2 kills of python3 in 8 d, 50.8 and 58.8 GB of 61.0 GB"


def test_summary_of_many() -> None:
    """Three or more kills have an average interval; more than three have only a range of sizes."""
    text = explain.summary([kill(day, day, "java") for day in range(1, 11)])
    assert text == "10 kills of java in 9 d (one every 24 h), 1.00 to 10.0 GB of 61.0 GB"


def test_summary_of_one_or_none() -> None:
    """One kill has no summary."""
    assert explain.summary([]) == ""
    assert explain.summary([kill(1, 1)]) == ""


@pytest.mark.parametrize(
    ("group", "kind", "message"),
    [
        ("/kubepods/burstable/pod11/c1", "pod", "a container of the Kubernetes pod 11"),
        ("/kubepods/burstable/pod11", "pod", "the whole Kubernetes pod 11"),
        ("/kubepods", "pod", "all pods of this node"),
        (
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod62015ce8_a46f_4b0e_a5a1_3082235c62dd.slice"
            "/cri-containerd-2cc85334e503.scope",
            "pod",
            "a container of the Kubernetes pod 62015ce8-a46f-4b0e-a5a1-3082235c62dd",
        ),
        ("/docker/d9b0a9bd41d3", "docker", "the container d9b0a9bd41d3"),
        ("/system.slice/docker-0a1b2c3d4e5f6789.scope", "docker", "the container 0a1b2c3d4e5f"),
        ("/ecs/aa01bb02/cc03dd04", "ecs", "ECS"),
        ("/slurm/uid_1000/job_191/step_batch/task_0", "slurm", "Slurm job 191, step batch"),
        ("/system.slice/slurmstepd.scope/job_191/step_0/user", "slurm", "Slurm job 191"),
        ("/lxc/101/ns", "lxc", "101"),
        ("/user.slice/user-1000.slice", "session", "everything that user 1000 runs"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/x.scope", "session", "x.scope of user 1000"),
        ("/system.slice/job.service", "service", "job.service"),
        ("/jobs2", "group", "the cgroup /jobs2"),
    ],
)
def test_owners(group: str, kind: str, message: str) -> None:
    """The owner of a limit follows from the path of the cgroup."""
    assert owner_of(group).kind == kind
    assert message in owner_of(group).text


ADVICE = {
    "k3.10_el7_syslog_uid": "docker run --memory",
    "k3.13_memcg": "brim run --memory 912MB -- COMMAND",
    "k4.14_ecs_pmds": "task definition",
    "k5.14_iso_user_session": "brim run --memory 53GB -- COMMAND",
    "k5.4_memcg_v1_multiline_stats": "resources.limits.memory",
    "k5.x_global_in_docker": "below the machine's memory",
    "k6.18_memcg_v1_shmem": "/dev/shm",
    "more_terminal_leaked_semaphores": "brim map SOURCE DEST --fn PACKAGE.MODULE:FUNCTION",
    "more_terminal_slurm": "sbatch",
}


@pytest.mark.parametrize("name", ADVICE)
def test_one_fitting_suggestion(name: str) -> None:
    """Each case gets its specific suggestion, and every report fits 80 columns."""
    report = why(logs=[LOGS / f"{name}.log"])
    assert ADVICE[name] in report.kills[-1].advice
    assert max(map(len, str(report).splitlines())) <= 80
    assert report.facts["kills"][0]["evidence"]


def test_what_is_easily_misread() -> None:
    """Notes explain the limit of an ancestor, a full machine around a container, and unmapped shared memory."""
    notes = {name: " ".join(why(logs=[LOGS / f"{name}.log"]).kills[0].notes) for name in ADVICE}
    assert "above the process's own group" in notes["k5.4_memcg_v1_multiline_stats"]
    assert "the whole machine was full" in notes["k5.x_global_in_docker"]
    assert "shared memory" in notes["k6.18_memcg_v1_shmem"]


def test_curve() -> None:
    """The last minute is drawn as bars that end at the maximum."""
    text = explain.curve_text([CurvePoint(t, t * GB) for t in range(61)], width=10)
    assert text == "▁▂▃▄▄▅▆▇██ 0 B → 60.0 GB in 60 s"


def test_report_without_kills(tmp_path: Path) -> None:
    """The report states that no kill was found and names the sources that were read."""
    empty = tmp_path / "empty.log"
    empty.write_text("nothing happened\n")
    text = str(why(logs=[empty]))
    assert text.startswith("No record of an out-of-memory kill was found.")
    assert str(empty) in text.replace("\n             ", "")


def test_missing_log(tmp_path: Path) -> None:
    """A missing log file is an error."""
    with pytest.raises(InputError, match="No such file"):
        why(logs=[tmp_path / "none.log"])
    with pytest.raises(InputError, match="is a folder"):
        why(logs=[tmp_path])


def fake_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a root folder with the files of a machine, without a journal and without brim logs."""
    monkeypatch.setenv("PATH", str(root / "bin"))
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
    for name in (
        "dev",
        "var/log",
        "proc/sys/kernel/random",
        "sys/fs/cgroup/memory/jobs/a",
        "sys/fs/cgroup/user.slice",
        "bin",
    ):
        (root / name).mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:       61000000 kB\nSwapTotal:             0 kB\n")
    (root / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    (root / "proc/sys/kernel/random/boot_id").write_text("boot-a\n")
    (root / "sys/fs/cgroup/memory/jobs/a/memory.oom_control").write_text(
        "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"
    )
    (root / "sys/fs/cgroup/memory/jobs/a/memory.limit_in_bytes").write_text("157286400\n")
    (root / "sys/fs/cgroup/user.slice/memory.events.local").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 2\n")
    (root / "sys/fs/cgroup/user.slice/memory.max").write_text("max\n")
    return root


def test_a_machine_with_counters_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without access to logs, the counters still show the kills, and the unreadable sources are listed."""
    root = fake_machine(tmp_path, monkeypatch)
    report = why(root=root)
    assert sorted((k.bound.group, k.count, k.bound.bytes, k.sure) for k in report.kills) == [
        ("/jobs/a", 1, 157286400, "likely"),
        ("/user.slice", 2, None, "likely"),
    ]
    problems = {source.name: source.problem for source in report.sources}
    assert "No such file" in problems["dmesg"]
    assert "no journalctl" in problems["journal"]
    assert "no such files" in problems[f"{root}/var/log/{{kern.log,messages,syslog}}"]
    assert "3 kills since boot" in report.remarks[0]


def test_a_counter_that_a_record_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill with a record in the ring buffer is not counted a second time."""
    root = fake_machine(tmp_path, monkeypatch)
    (root / "dev/kmsg").write_text(
        "4,1,694801068,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/jobs/a,"
        "task_memcg=/jobs/a,task=python3,pid=24601,uid=0\n SUBSYSTEM=x\n"
        "3,2,694801091,-;Memory cgroup out of memory: Killed process 24601 (python3) total-vm:26892kB, "
        "anon-rss:17156kB, file-rss:6684kB, shmem-rss:0kB, UID:0 pgtables:96kB oom_score_adj:0\n"
    )
    report = why(root=root)
    assert [(k.pid, k.bound.group, k.boot) for k in report.kills] == [(None, "/user.slice", 0), (24601, "/jobs/a", 0)]
    assert report.kills[-1].room.ram_bytes == 61000000 * 1024
    assert report.kills[-1].when is not None
    assert [k.pid for k in why(24601, root=root).kills] == [24601]


def test_rotated_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated and compressed files are read in order, and boots are counted across them."""
    import gzip
    import lzma

    root = fake_machine(tmp_path, monkeypatch)
    shutil.rmtree(root / "sys/fs/cgroup")
    boot = "May 0{d} 08:00:00 h kernel: [    0.000000] Linux version 6.8.0\n"
    line = "May 0{d} 09:00:00 h kernel: Out of memory: Killed process {d} (x) total-vm:9kB, anon-rss:5kB\n"
    texts = {"kern.log.3.xz": (1, ""), "kern.log.2.gz": (2, boot), "kern.log.1": (3, boot), "kern.log": (4, "")}
    base = datetime(2026, 5, 1, 12).timestamp()
    for name, (day, before) in texts.items():
        content = (before + line).format(d=day).encode()
        packed = (
            gzip.compress(content)
            if name.endswith("gz")
            else lzma.compress(content)
            if name.endswith("xz")
            else content
        )
        path = root / "var/log" / name
        path.write_bytes(packed)
        os.utime(path, (base + day * 86400, base + day * 86400))
    (root / "var/log/kern.log.2.gz.bak~").write_text("")
    report = why(root=root)
    assert [(k.pid, k.boot) for k in report.kills] == [(1, -2), (2, -1), (3, 0), (4, 0)]
    assert [k.when.year for k in report.kills if k.when] == [2026] * 4
    assert [k.pid for k in why(root=root, boot=-1).kills] == [2]
    assert [k.pid for k in why(root=root, since="2026-05-03T00:00").kills] == [3, 4]


def test_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """journalctl is queried for the kernel and the killers with the given time and boot, and its errors are shown."""
    root = fake_machine(tmp_path, monkeypatch)
    command = root / "bin/journalctl"
    line = "2026-05-02T09:00:00.000001+0000 h kernel: Out of memory: Killed process 5 (x) total-vm:9kB, anon-rss:5kB"
    command.write_text(f'#!/bin/sh\necho "$@" > {root}/asked\necho "{line}"\n')
    command.chmod(0o755)
    actual = this_machine.journal(datetime(2026, 5, 1).astimezone(), -1)
    assert [(kill.pid, kill.boot) for kill in actual.kills] == [(5, -1)]
    requested = (root / "asked").read_text()
    assert "-b -1" in requested
    assert "--since 2026-05-01 00:00:00" in requested
    assert "_TRANSPORT=kernel" in requested
    command.write_text("#!/bin/sh\necho 'No journal files were found.' >&2\nexit 1\n")
    assert this_machine.journal().sources[0].problem == "No journal files were found."


def test_the_same_kill_in_three_places(tmp_path: Path) -> None:
    """The same kill in dmesg, syslog and the journal is one kill with three pieces of evidence."""
    tail = "Out of memory: Killed process 4178 (python) total-vm:9543680kB, anon-rss:8322048kB, file-rss:0kB"
    paths = []
    for name, prefix in {
        "a": "[ 1401.262774] ",
        "b": "Apr 18 21:03:10 h kernel: ",
        "c": "2026-04-18T21:03:10.2+00:00 h kernel: ",
    }.items():
        paths.append(tmp_path / name)
        paths[-1].write_text(f"{prefix}{tail}\n")
    os.utime(tmp_path / "b", (1776600000, 1776600000))
    (actual,) = why(logs=paths).kills
    assert len({quote.source for quote in actual.evidence}) == 3


def test_a_pid_that_was_not_killed() -> None:
    """A process that was not killed is reported as running."""
    report = why(os.getpid(), logs=[LOGS / "k3.13_memcg.log"])
    assert report.kills == ()
    assert "it is running" in report.remarks[0]
    assert "Kills of other processes: 1" in report.remarks[0]


def test_unproven_headline() -> None:
    """The headline states an uncertain cause as uncertain."""
    output = explain.headline(Kill("unknown", sure="possible", name="x", pid=3, signal=9))
    assert output == "x (pid 3) was killed by SIGKILL, and the log does not name the killer."
    assert "RLIMIT_DATA" in explain.headline(
        Kill("rlimit", "process", "refused", pid=1, bound=Bound(5, 6, "RLIMIT_DATA"))
    )


def test_kills_without_a_date_come_first(tmp_path: Path) -> None:
    """The kills with a date come last, so the report shows the latest of them in full."""
    now = datetime.now().astimezone()
    log = tmp_path / "x.log"
    line = 'earlyoom: sending SIGTERM to process 7 "y": badness 1, VmRSS 9 MiB'
    log.write_text(f"Killed\n{now - timedelta(days=1):%Y-%m-%dT%H:%M:%S%z} {line}\n")
    assert [k.pid for k in why(logs=[log]).kills] == [None, 7]
