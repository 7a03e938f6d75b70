"""Formats other than plain text, additional killers, and logs that consist only of kills."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from brim.monitor.oom.kills import Kill
from brim.monitor.oom.log_lines import Clock
from brim.monitor.oom.merge_kills import merge
from brim.monitor.oom.scan_log import Scan, scan_lines
from brim.monitor.oom.why import why

VICTIM = (
    "Out of memory: Killed process 4711 (python) total-vm:900kB, anon-rss:800kB, file-rss:4kB, shmem-rss:0kB, UID:0 "
    "pgtables:4kB oom_score_adj:0"
)


def kills(text: str, terminals: bool = True) -> list[Kill]:
    reader = Scan("log", Clock(datetime(2026, 6, 1, tzinfo=UTC)), terminals)
    return scan_lines(reader, reader.lines([text.encode()]))[0]


def one(text: str) -> Kill:
    (kill,) = kills(text)
    return kill


def test_journal_export() -> None:
    """journalctl -o export has fields, an empty line between entries, and the time in microseconds."""
    entry = (
        "__CURSOR=s=1\n__REALTIME_TIMESTAMP=1780236000000000\n_HOSTNAME=n1\nSYSLOG_IDENTIFIER=kernel\n"
        f"MESSAGE={VICTIM}\n\n"
    )
    kill = one(entry)
    assert (kill.pid, kill.name, kill.host) == (4711, "python", "n1")
    assert kill.when == datetime(2026, 5, 31, 14, 0, tzinfo=UTC)
    assert kill.evidence[0].line == 6


def test_journal_verbose() -> None:
    """journalctl -o verbose has a line with the time, and the fields after it."""
    text = (
        "Sun 2026-05-31 14:00:00.000000 UTC [s=1;i=2]\n    _HOSTNAME=n1\n    SYSLOG_IDENTIFIER=kernel\n"
        f"    MESSAGE={VICTIM}\n"
        "Sun 2026-05-31 14:00:01.000000 UTC [s=1;i=3]\n    MESSAGE=other\n"
    )
    kill = one(text)
    assert (kill.pid, kill.when) == (4711, datetime(2026, 5, 31, 14, 0, tzinfo=UTC))


@pytest.mark.parametrize("as_bytes", [False, True])
def test_journal_json_pretty(as_bytes: bool) -> None:
    """journalctl -o json-pretty may have a message that is text or a list of numbers."""
    message: object = list(VICTIM.encode()) if as_bytes else VICTIM
    entry = {"__CURSOR": "s=1", "__REALTIME_TIMESTAMP": "1780236000000000", "MESSAGE": message}
    kill = one(json.dumps(entry, indent="\t") + "\n")
    assert (kill.pid, kill.when) == (4711, datetime(2026, 5, 31, 14, 0, tzinfo=UTC))


def test_journal_json_with_bytes() -> None:
    """journalctl -o json may have a message of numbers in one line."""
    entry = {"__REALTIME_TIMESTAMP": "1780236000000000", "MESSAGE": list(VICTIM.encode())}
    assert one(json.dumps(entry, separators=(",", ":")) + "\n").pid == 4711


def test_dmesg_json() -> None:
    """dmesg --json has the seconds since boot and the message."""
    entries = [{"pri": 6, "time": 1.5, "msg": "hello"}, {"pri": 3, "time": 77.25, "msg": VICTIM}]
    kill = one(json.dumps({"dmesg": entries}, indent=3) + "\n")
    assert (kill.pid, kill.boot_s) == (4711, 77.25)


ENDED = {"exitCode": 137, "finishedAt": "2026-05-31T14:00:00Z", "reason": "OOMKilled"}
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "train-0", "namespace": "ml"},
    "status": {
        "containerStatuses": [{"image": "x", "lastState": {"terminated": ENDED}, "name": "worker", "ready": True}]
    },
}
POD_YAML = """apiVersion: v1
kind: Pod
metadata:
  name: train-0
status:
  containerStatuses:
  - image: x
    lastState:
      terminated:
        exitCode: 137
        finishedAt: "2026-05-31T14:00:00Z"
        reason: OOMKilled
    name: worker
"""


@pytest.mark.parametrize("text", [json.dumps(POD, indent=4), POD_YAML])
def test_kubectl(text: str) -> None:
    """kubectl get pod -o json and -o yaml give the names of pod and container, and the time."""
    kill = one(text + "\n")
    assert kill.unit == "pod train-0, container worker"
    assert (kill.sure, kill.when) == ("likely", datetime(2026, 5, 31, 14, 0, tzinfo=UTC))
    second = one(text.replace("OOMKilled", "Error") + "\n")
    assert second.sure == "possible"
    assert not kills(text.replace("137", "1").replace("OOMKilled", "Error") + "\n")


def test_ray() -> None:
    """Ray's messages give the driver's count and the killed task with its size, also in the older wording."""
    count = one(
        "(raylet) 2 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other "
        "reasons at node (ID: 2c8, IP: 10.0.0.5) over the last time period.\n"
    )
    assert (count.killer, count.count, count.unit) == ("ray", 2, "node 10.0.0.5")
    task = one(
        "Memory on the node (IP: 10.0.0.5, ID: e5) where the task (task ID: 1, name=embed, pid=11362, memory "
        "used=1.25GB) was running was 27.71GB / 28.80GB (0.962273), which exceeds the memory usage threshold of 0.95.\n"
    )
    assert (task.pid, task.name, task.sizes.rss_bytes) == (11362, "embed", 1_250_000_000)
    old = one(
        "System memory low at node with IP 10.0.0.5. Used memory (14.9GB) / total capacity (15.6GB) (0.955) exceeds "
        "threshold 0.95, killing latest task with name embed and actor ID 1 to avoid running out of memory.\n"
    )
    assert (old.name, old.bound.usage_bytes) == ("embed", 14_900_000_000)


def test_meta_oomd() -> None:
    """The message gives the group, its memory and the rule."""
    kill = one(
        "kernel: oomd kill: 55.68 40.01 10.00 workload.slice/job.service 167759872 ruleset:[protect] "
        "detectorgroup:[slow growth] killer:kill_by_memory_size_or_growth v2\n"
    )
    assert (kill.killer, kill.unit, kill.bound.usage_bytes) == ("oomd", "job.service", 167759872)


def test_slurm_accounting() -> None:
    """A table of sacct gives one kill per job, not per step; the lines of seff have the limit."""
    table = "JobID JobName State ExitCode\n191 train OUT_OF_ME+ 0:125\n191.batch batch OUT_OF_ME+ 0:125\n"
    assert [kill.unit for kill in kills(table)] == ["job 191"]
    kill = one(
        "Job ID: 191\nCluster: c\nState: OUT_OF_MEMORY (exit code 0)\nCores: 1\nMemory Utilized: 3.98 GB\n"
        "Memory Efficiency: 99.50% of 4.00 GB\n"
    )
    assert (kill.unit, kill.bound.bytes) == ("job 191", 4 << 30)


@pytest.mark.parametrize(
    ("line", "effect"),
    [
        ("make: *** [Makefile:12: all] Killed", "killed"),
        ("make[1]: *** [all] Error 137", "killed"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "killed"),
        ("memory allocation of 8589934592 bytes failed", "refused"),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array", "refused"),
        ("RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed.", "killed"),
        ("RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's "
         "workers are out of shared memory.", "refused"),
        ("ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
         "refused"),
        ("ExecutorLostFailure (executor 1 exited) Reason: Container killed by YARN for exceeding memory limits. 5.5 GB "
         "of 5.5 GB physical memory used.", "killed"),
        ("ExecutorLostFailure (executor 3 exited): Command exited with exit code 137", "killed"),
    ],
)  # fmt: skip
def test_programs(line: str, effect: str) -> None:
    """Messages of make, gcc, Rust and Polars, NumPy, PyTorch and Spark are recognized."""
    assert one(line + "\n").effect == effect


HEADER = "[100.0] python invoked oom-killer: gfp_mask=0xcc0, order={}, oom_score_adj=0\n"


def test_a_kill_by_hand() -> None:
    """SysRq f is not reported as a machine without free memory."""
    kill = one(HEADER.format(-1) + f"[100.1] {VICTIM}\n")
    assert kill.scope == "unknown"
    assert "SysRq" in kill.notes[0]
    assert one(HEADER.format(0) + f"[100.1] {VICTIM}\n").scope == "machine"


def test_the_limit_without_the_header() -> None:
    """The usage line alone gives the limit; a record that is cut before its last line is a likely kill."""
    usage = "[100.0] memory: usage 409600kB, limit 409600kB, failcnt 12\n"
    victim = VICTIM.replace("Out of memory:", "Memory cgroup out of memory:")
    assert one(usage + f"[100.1] {victim}\n").bound.bytes == 400 << 20
    cut = one(HEADER.format(0) + usage)
    assert (cut.sure, cut.scope, cut.bound.bytes) == ("likely", "cgroup", 400 << 20)


def test_earlyoom_and_the_kernel_are_one() -> None:
    """SIGTERM by earlyoom and the kernel's kill of the same process seconds later count as one kernel kill."""
    text = (
        '2026-05-31T14:00:00Z n1 earlyoom[1]: sending SIGTERM to process 4711 uid 0 "python": oom_score 900, '
        "VmRSS 9 MiB\n"
        f"2026-05-31T14:00:03Z n1 kernel: {VICTIM}\n"
    )
    (kill,) = merge(kills(text))
    assert (kill.killer, kill.pid, len(kill.evidence)) == ("kernel", 4711, 2)


def test_named_time_zones() -> None:
    """CEST is two hours ahead of UTC, in both common spellings."""
    for stamp in ("2026-05-31 16:00:00 CEST", "Sun May 31 16:00:00 CEST 2026"):
        assert one(f"{stamp} n1 kernel: {VICTIM}\n").when == datetime(2026, 5, 31, 14, 0, tzinfo=UTC)


def test_every_killer_has_words(tmp_path: Path) -> None:
    """Every killer has a description and advice, and suggested limits are never below the needs of an interpreter."""
    log = tmp_path / "log"
    log.write_text(
        "oomd kill: 55.68 40.01 10.00 a.slice/job.service 167759872 ruleset:[p] detectorgroup:[s] killer:k v2\n"
        "[100.0] memory: usage 8192kB, limit 8192kB, failcnt 12\n"
        f"[100.1] {VICTIM.replace('Out of', 'Memory cgroup out of')}\n"
    )
    text = why(logs=[str(log)]).text()
    assert "oomd" in text
    assert "--memory 50MB" in text


def test_nothing_but_kills() -> None:
    """In 40 MB of kill lines, the first and last kills are reported and the others counted, in bounded memory."""
    line = f"[{100:>8}.0] {VICTIM}\n".encode()
    block = line * (256_000 // len(line))

    def blocks() -> Iterator[bytes]:
        for _ in range(160):
            yield block
        yield b"[  999.0] " + VICTIM.replace("4711", "4712").encode() + b"\n"

    tracemalloc.start()
    started_at = time.process_time()
    reader = Scan("log", Clock())
    actual, _ = scan_lines(reader, reader.lines(blocks()))
    took_s, (_, peak) = time.process_time() - started_at, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert actual[-1].pid == 4712
    assert actual[-1].evidence[0].line == 160 * block.count(b"\n") + 1
    assert reader.middle.looked_like_kills > 150_000
    assert peak < 100e6
    assert took_s < 60  # with tracing and on a busy machine; docs/how-to/why-did-it-die.md has the normal time


def test_kubectl_of_several_pods() -> None:
    """Each kill belongs to its own pod and container, for any order of keys and also for a pod that has ended."""

    def pod(name: str, **state: object) -> dict[str, object]:
        containers = [
            {"name": "side"},
            {"name": "w", "resources": {"limits": {"memory": "512Mi"}, "requests": {"memory": "1Mi"}}},
        ]
        statuses = [{"name": "side", "state": {"running": {}}}, {"lastState": {}, "name": "w", "state": state}]
        metadata = {"labels": {"name": "label"}, "name": name, "ownerReferences": [{"name": "owner"}]}
        return {"metadata": metadata, "spec": {"containers": containers}, "status": {"containerStatuses": statuses}}

    pods = [pod("fine", running={}), pod("dead", terminated=ENDED), pod("done", terminated={"exitCode": 0})]
    listing = {"apiVersion": "v1", "kind": "List", "items": pods}
    as_yaml = _yaml(listing)
    for text in (json.dumps(listing, indent=4), json.dumps(listing), as_yaml, as_yaml.replace("\n  - ", "\n- ")):
        kill = one(text + "\n")
        assert (kill.unit, kill.bound.bytes) == ("pod dead, container w", 512 << 20)


def _yaml(value: object, indent: int = 0) -> str:
    """Format YAML as kubectl does: lists are indented as far as their key."""
    if isinstance(value, dict) and value:
        return "".join(
            f"\n{' ' * indent}{key}:{_yaml(inner, indent if isinstance(inner, list) else indent + 2)}"
            for key, inner in value.items()
        )
    if isinstance(value, list):
        return "".join(f"\n{' ' * indent}- {_yaml(inner, indent + 2).lstrip()}" for inner in value)
    return f" {json.dumps(value)}" if value != {} else " {}"
