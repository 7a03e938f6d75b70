"""Killers other than the kernel, messages of terminals, and machines that restarted."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from brim.monitor.oom.kills import Kill, Restart
from brim.monitor.oom.log_lines import Clock
from brim.monitor.oom.merge_kills import merge
from brim.monitor.oom.scan_log import Scan, scan_file

LOGS = Path(__file__).parents[1] / "fixtures" / "oom"
MIB = 1 << 20


def scan(text: str, terminals: bool = True) -> tuple[list[Kill], list[Restart]]:
    reader = Scan("log", Clock(datetime(2026, 6, 1, tzinfo=UTC)), terminals)
    for number, line in reader.lines([text.encode() + b"\n"]):
        reader.read(number, line)
    return reader.finish()


def one(text: str) -> Kill:
    (kill,) = scan(text)[0]
    return kill


def test_the_fixture_of_other_killers() -> None:
    """Every line of other_killers.log is attributed to its killer, with pid, name, size, signal and limit."""
    kills = scan_file(LOGS / "other_killers.log", "log", terminals=False).kills
    messages = [(k.killer, k.effect, k.pid, k.name, k.unit, k.count, k.signal) for k in kills]
    assert messages == [
        ("systemd-oomd", "killed", None, None, "vte-spawn-db.scope", 12, 9),
        ("systemd-oomd", "killed", None, None, "job.service", 1, 9),
        ("kernel", "killed", None, None, "user-1021.slice", 1, 9),
        ("earlyoom", "asked to end", 28541, "bash", None, 1, 15),
        ("earlyoom", "asked to end", 796, "ipfs", None, 1, 15),
        ("earlyoom", "asked to end", 916175, "java", None, 1, 15),
        ("slurm", "killed", None, None, "step 3856240.batch", 2, 9),
        ("slurm", "killed", None, None, "step 15604003.0", 1, 9),
        ("slurm", "killed", None, None, "step 450575.0", 1, 9),
        ("slurm", "killed", None, None, "step 450576.13", 2, 9),
        ("rlimit", "refused", 1272, "python3", None, 1, None),
        ("kernel", "refused", None, None, None, 1, None),
    ]
    assert [k.sizes.rss_bytes for k in kills[3:6]] == [7710 * MIB, 641 * MIB, 44012 * MIB]
    assert (kills[4].uid, kills[5].uid) == (1001, 1000)
    assert "52.11% > 50.00%" in kills[0].bound.text
    assert kills[0].bound.group == "/user.slice/user-1001.slice/user@1001.service"
    assert "mem 10 %, swap 10 %" in kills[3].bound.text
    assert not kills[4].bound.text  # this limit belongs to another kill
    assert (kills[10].bound.bytes, kills[10].bound.usage_bytes) == (262144000, 322859008)
    assert kills[9].host == "n0616"  # the message of srun is merged with that of slurmstepd


def test_more_daemons() -> None:
    """Messages of systemd-oomd, earlyoom, PBS, LSF, kubelet, Docker, Talos, Ray and Dask are recognized.

    systemd-oomd reports swap, and earlyoom escalates and has an older format.
    """
    kills = scan_file(LOGS / "more_daemons.log", "log", terminals=False).kills
    assert [(k.killer, k.effect, k.pid, k.unit) for k in kills] == [
        ("systemd-oomd", "killed", None, "httpd.service"),
        ("earlyoom", "killed", 29410, None),
        ("earlyoom", "killed", 4084, None),
        ("slurm", "killed", None, "step 1141810.0"),
        ("batch system", "killed", None, None),
        ("batch system", "killed", None, None),
        ("kernel", "killed", 5211, None),
        ("container runtime", "killed", None, "container k8s_notebook_jupyter-1"),
        ("kubelet", "evicted", None, "worker"),
        ("container runtime", "killed", None, "pod77f06c5c-4593-43e9-b970-987f6ecb825b"),
        ("ray", "killed", None, None),
        ("dask", "killed", 4711, None),
    ]
    assert kills[0].room.ram_bytes == 33046716416
    assert (kills[1].room.ram_bytes, kills[1].room.available_bytes) == (31808 * MIB, 2430 * MIB)
    assert (kills[3].bound.bytes, kills[3].bound.usage_bytes) == (20971520 * 1024, 52917772 * 1024)
    assert kills[4].bound.bytes == 33554432 * 1024


def test_leaked_semaphores_and_killed() -> None:
    """Python's warning about leaked objects before "Killed" is a consequence, not the cause."""
    (kill,) = scan((LOGS / "more_terminal_leaked_semaphores.log").read_text())[0]
    assert (kill.sure, kill.signal, kill.name) == ("likely", 9, "python")
    assert "not the cause" in kill.notes[0]
    assert [quote.line for quote in kill.evidence] == [3, 5]


def test_leaked_semaphores_after_the_shell() -> None:
    """zsh writes its line before the warning."""
    text = "[1]    75076 killed     python main.py\nresource_tracker.py:216: UserWarning: resource_tracker: "
    kill = one(text + "There appear to be 1 leaked semaphore objects to clean up at shutdown")
    assert (kill.sure, kill.pid, kill.command) == ("likely", 75076, "python main.py")


def test_leaked_semaphores_alone_are_no_kill() -> None:
    """A program that exited normally may print the warning too."""
    assert scan(
        "UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown"
    ) == (
        [],
        [],
    )


def test_shell_and_slurm_are_one_kill() -> None:
    """The shell names the process and the command, and Slurm the cause; secrets are removed."""
    kill = one((LOGS / "more_terminal_slurm.log").read_text())
    assert (kill.killer, kill.pid, kill.unit) == ("slurm", 8156, "step 191.batch")
    assert kill.command == "python3 main.py --epochs 400 --token ***"
    assert not any("hf_" in quote.text for quote in kill.evidence)


@pytest.mark.parametrize(
    ("line", "pid"),
    [
        ("Killed", None),
        ("zsh: killed     python train.py", None),
        ("Map:  1%| | 1/9 [00:01<10, 9it/s]\rMap:  61%|##| 5/9 [00:02<10, 48 examples/s]Killed", None),
        (f"{'.' * 300_000}\r10/99\rKilled", None),
        ("[1]+  Killed                  python train.py", None),
        ("run.sh: line 3: 12345 Killed                  python x.py", 12345),
        ("Process finished with exit code 137 (interrupted by signal 9: SIGKILL)", None),
        ("RuntimeError: DataLoader worker (pid 22048) is killed by signal: Killed. ", 22048),
        ("subprocess.CalledProcessError: Command 'x' returned non-zero exit status 137.", None),
        ("subprocess.CalledProcessError: Command 'x' died with <Signals.SIGKILL: 9>.", None),
        ("concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly", None),
        ("RuntimeError: One of the subprocesses has abruptly died during map operation.", None),
        ("stress: FAIL: [1] (415) <-- worker 5 got signal 9", None),
        ("    Exit Code:    137", None),
    ],
)
def test_killed_and_unproven(line: str, pid: int | None) -> None:
    """SIGKILL alone is reported as possibly caused by memory, and not more."""
    kill = one(line)
    assert (kill.killer, kill.sure, kill.pid) == ("unknown", "possible", pid)


@pytest.mark.parametrize(
    ("line", "requested"),
    [
        ("numpy._ArrayMemoryError: Unable to allocate 48.8 GiB for an array (9, 9)", 48.8 * 2**30),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 12345 bytes. x", 12345),
        ("pyarrow.lib.ArrowMemoryError: malloc of size 268435456 failed", 268435456),
        ("MemoryError", None),
        ("terminate called after throwing an instance of 'std::bad_alloc'", None),
        ("OSError: [Errno 12] Cannot allocate memory", None),
    ],
)  # fmt: skip
def test_refused(line: str, requested: float | None) -> None:
    """A failed allocation is not a kill."""
    kill = one(line)
    assert (kill.killer, kill.effect) == ("program", "refused")
    assert kill.bound.requested_bytes == (None if requested is None else round(requested))
    assert kill.bound.usage_bytes is None


def test_gpu() -> None:
    """Full GPU memory is distinguished from full machine memory."""
    line = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB"
    kill = one(line)
    assert (kill.scope, kill.effect, kill.bound.requested_bytes) == ("gpu", "refused", 2 << 30)
    assert kill.bound.bytes == round(23.65 * 2**30)


@pytest.mark.parametrize(
    "line",
    ["Killed the meeting", "the process was not killed", "code 1370", "13 killed 7", "num_killed=0", "exit code 0"],
)
def test_words_that_are_no_kill(line: str) -> None:
    """The word alone is not evidence of a kill."""
    assert scan(line) == ([], [])


def test_systemd_and_the_kernel_tell_of_one_kill() -> None:
    """A unit's message is merged with the kernel's record of a process in that unit."""
    text = (
        "May 02 09:31:41 h kernel: oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
        "oom_memcg=/system.slice/job.service,task_memcg=/system.slice/job.service,task=py,pid=5,uid=0\n"
        "May 02 09:31:41 h kernel: Memory cgroup out of memory: Killed process 5 (py) total-vm:9kB, anon-rss:5kB\n"
        "May 02 09:31:41 h systemd[1]: job.service: A process of this unit has been killed by the OOM killer.\n"
        "May 02 09:31:42 h systemd[1]: job.service: Failed with result 'oom-kill'.\n"
    )
    (kill,) = merge(scan(text)[0])
    assert (kill.pid, kill.unit, len(kill.evidence)) == (5, "job.service", 4)


BOOT = "May 02 09:40:00 h kernel: [    0.000000] Linux version 6.8.0 (gcc)\n"


def test_restart_without_farewell() -> None:
    """A boot after a log that ends without a shutdown is reported as a crash of the machine."""
    text = f"May 02 09:31:40 h systemd[1]: Started x.\nMay 02 09:31:41 h kernel: fine\n{BOOT}"
    (restart,) = scan(text)[1]
    assert restart.last_sign is not None
    assert (restart.last_sign.hour, restart.last_sign.minute, restart.line) == (9, 31, 3)


def test_restart_in_order() -> None:
    """A restart after a logged shutdown is not a finding."""
    farewell = "May 02 09:31:41 h systemd[1]: Shutting down.\n"
    assert scan(f"May 02 09:31:40 h systemd[1]: Started x.\n{farewell}{BOOT}") == ([], [])


def test_the_kernel_alone_cannot_tell() -> None:
    """kern.log never records a shutdown, so a restart there is not a finding."""
    assert scan(f"May 02 09:31:41 h kernel: fine\n{BOOT}") == ([], [])


def test_boots_are_counted_back() -> None:
    """Each kill states the number of boots since it."""
    kill = "May 02 09:30:0{} h kernel: Out of memory: Killed process {} (x) total-vm:9kB, anon-rss:5kB\n"
    kills, _ = scan(kill.format(1, 11) + BOOT + kill.format(2, 12))
    assert [(k.pid, k.boot) for k in kills] == [(11, -1), (12, 0)]
