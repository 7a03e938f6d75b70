"""Measure the overhead of watching a process, and how well the memory limit holds.

    python benchmarks/watch.py [--runs 20] [--rest 30] [--minutes 60] [--only overshoot,kinds,rest,many,logs,soak]
                               [--json FILE]

Overshoot: a child fills memory as fast as it can under `brim run --memory 300MB`. It records its earlier and newly
filled memory in a file, so that the true value is known after the kill, and not only brim's samples.
Kinds: the same limit, enforced from outside, for files in /dev/shm, memfd, forks that each fill a little, and forks
that write to shared pages; the child again counts the true memory.
Many: the watcher's processor time with 500 processes.
Logs: `brim why` of 100 MB of lines that all resemble kills, of four kinds; the time is the whole command's.
Rest: the watcher's processor time, from /proc/PID/stat between two points in time, without starting up.
Soak: a child whose memory goes up and down for a long time; the watcher's own memory and the log's size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tables import (
    MB,
    Goal,
    Part,
    at_most,
    comma_list,
    machine,
    print_goals,
    print_machine,
    print_part,
    progress,
    write_json,
)

LIMIT_BYTES = 300_000_000

GREEDY = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    count = memoryview(mmap.mmap(file.fileno(), 16)).cast("q")
    count[1] = int(open("/proc/self/status").read().partition("RssAnon:")[2].split()[0]) * 1024
    block = mmap.mmap(-1, 4_000_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = b"x" * 1_000_000
    for at in range(0, len(block) - len(page), len(page)):
        block[at : at + len(page)] = page
        count[0] = at + len(page)
"""
BUSY = """
import random, time
held = []
while True:
    held.append(bytearray(b"x") * random.randrange(1_000_000, 6_000_000))
    if len(held) > 30:
        del held[: random.randrange(5, 30)]
    time.sleep(0.05)
"""


COUNTED = """
import mmap, os, sys, time
with open(sys.argv[1], "r+b") as file:
    count = memoryview(mmap.mmap(file.fileno(), 16)).cast("q")
count[1] = int(open("/proc/self/status").read().partition("RssAnon:")[2].split()[0]) * 1024
"""
KINDS = {
    "/dev/shm, 10 MB writes": """
with open(f"/dev/shm/brim-bench-{os.getpid()}", "wb") as out:
    os.unlink(out.name)
    for number in range(60):
        out.write(b"x" * 10_000_000); out.flush()
        count[0] = (number + 1) * 10_000_000
    time.sleep(10)
""",
    "/dev/shm, 60 files": """
for number in range(60):
    with open(f"{sys.argv[2]}/{number}", "wb") as out:
        out.write(b"x" * 10_000_000)
    count[0] = (number + 1) * 10_000_000
time.sleep(10)
""",
    "memfd, 10 MB writes": """
out = os.memfd_create("bench")
for number in range(60):
    os.write(out, b"x" * 10_000_000)
    count[0] = (number + 1) * 10_000_000
time.sleep(10)
""",
    "fork storm, 5 MB each": """
for number in range(120):
    if os.fork() == 0:
        block = bytearray(b"x") * 5_000_000
        count[0] += 5_000_000
        time.sleep(10)
        os._exit(0)
time.sleep(10)
""",
    "copy-on-write burst": """
block = bytearray(b"x") * 150_000_000
count[0] = 150_000_000
for number in range(4):
    if os.fork() == 0:
        for at in range(0, len(block), 1_000_000):
            block[at : at + 1_000_000] = b"y" * 1_000_000
            count[0] += 1_000_000
        time.sleep(10)
        os._exit(0)
time.sleep(10)
""",
}


def kinds(runs: int) -> Part:
    title = f"Overshoot of a 300 MB limit, best effort, {runs} runs each, by the children's own count"
    part = Part(title, ["what", "ended", "median over", "worst over"])
    for name, code in KINDS.items():
        over, ended = [], 0
        for _ in range(runs):
            with tempfile.NamedTemporaryFile() as count, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                count.write(bytes(16))
                count.flush()
                child = [sys.executable, "-c", COUNTED + code, count.name, folder]
                result = subprocess.run(
                    [*brim("-q", "--memory", "300MB", "--no-cgroup"), "--", *child], stderr=subprocess.DEVNULL
                )
                numbers = Path(count.name).read_bytes()
            retained = int.from_bytes(numbers[:8], "little") + int.from_bytes(numbers[8:], "little")
            ended += result.returncode == 4
            over.append(max(retained - LIMIT_BYTES, 0))
        part.rows.append([name, f"{ended}/{runs}", size(statistics.median(over)), size(max(over))])
        part.runs[name] = [{"over_bytes": item} for item in over]
        part.goals.append(Goal(f"{name}: noticed in all", ended == runs, f"{ended} of {runs}"))
        progress(" ".join(part.rows[-1]))
    part.notes.append(load())
    return part


def many(seconds: float) -> Part:
    title = f"The watcher's share of one core with 500 processes, over {seconds:.0f} s"
    part = Part(title, ["held by", "share", "own memory"])
    sleepers = "for i in $(seq 499); do sleep 9999 & done; wait"
    for name, options in (("best effort", ["--no-cgroup"]), ("cgroup", [])):
        process = subprocess.Popen(
            [*brim("-q", "--memory", "4GB", *options), "--", "sh", "-c", sleepers], stderr=subprocess.DEVNULL
        )
        try:
            time.sleep(12)
            fraction, own = share_of(process.pid, seconds)
            part.rows.append([name, f"{fraction:.2f} %", size(own)])
            part.runs[name] = [{"share": fraction, "own_bytes": own}]
            part.goals.append(at_most(f"500 processes, {name}: a core", fraction, 4, " %"))
        finally:
            end(process)
    part.notes.append(load())
    return part


def share_of(pid: int, seconds: float) -> tuple[float, int]:
    """Return the watcher's share of a core, in percent, and its memory."""
    watcher = watcher_of(pid)
    before, started_at = cpu_seconds(watcher), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_seconds(watcher) - before) / (time.monotonic() - started_at), unreclaimable(watcher)


KILL_LINES = {
    "kernel, one line each": "Jan 07 06:14:05 n kernel: "
    "Out of memory: Killed process {n} (python3) total-vm:9000000kB, "
    "anon-rss:8000000kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0\n",
    "kernel, records": "[{n}.1] python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n"
    "[{n}.2] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a,task_memcg=/a/b,"
    "task=python3,pid={n},uid=0\n[{n}.3] Memory cgroup out of memory: Killed process {n} (python3) "
    "total-vm:9000000kB, anon-rss:8000000kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0\n",
    "Ray": "(raylet) [2024-03-01 10:05:22,456 E 1 1] node_manager.cc: 3 Workers (tasks / actors) killed due "
    "to memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: 2b4a, IP: 10.0.0.{n})\n",
    "DataLoader": "RuntimeError: DataLoader worker (pid {n}) is killed by signal: Killed.\n",
}


def logs() -> Part:
    part = Part("brim why of 100 MB of lines that all look like kills", ["lines", "time", "processor time", "largest"])
    for name, line in KILL_LINES.items():
        with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
            number = written = 0
            while written < 100 * MB:
                text = "".join(line.replace("{n}", str(n)) for n in range(number, number + 1000))
                number, written = number + 1000, written + file.write(text)
            file.flush()
            started_at = time.monotonic()
            process = subprocess.Popen(
                [sys.executable, "-m", "brim", "why", "--log", file.name], stdout=subprocess.DEVNULL
            )
            _, _, usage = os.wait4(process.pid, 0)
            process.returncode = 0
            seconds, cpu = time.monotonic() - started_at, usage.ru_utime + usage.ru_stime
        largest = usage.ru_maxrss * 1024
        part.rows.append([name, f"{seconds:.1f} s", f"{cpu:.1f} s", size(largest)])
        part.runs[name] = [{"seconds": seconds, "cpu_s": cpu, "max_rss_bytes": largest}]
        part.goals.append(at_most(name, seconds, 10, " s"))
        part.goals.append(at_most(f"{name}: resident at most", largest / MB, 80, " MB"))
        progress(" ".join(part.rows[-1]))
    part.notes.append(load())
    return part


def size(number: float) -> str:
    return f"{number / MB:.1f} MB"


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the end"


def brim(*options: str) -> list[str]:
    return [sys.executable, "-m", "brim", "run", *options]


def overshoot(runs: int) -> Part:
    title = f"Overshoot of a 300 MB limit, {runs} runs each, by the child's own count"
    part = Part(title, ["held by", "ended", "median over", "worst over", "brim said, worst", "speed"])
    for options in (["--no-cgroup"], []):
        over, message, speeds, ended, method = [], [], [], 0, ""
        for _ in range(runs):
            facts, code, retained = greedy_run(options)
            ended += code == 4
            over.append(max(retained - LIMIT_BYTES, 0))
            message.append(facts["overshoot_bytes"])
            speeds.append(retained / max(facts["seconds"], 1e-3))
            method = facts["limit"]["enforced"]
        rate = f"{statistics.median(speeds) / 1e9:.1f} GB/s"
        sizes = [size(item) for item in (statistics.median(over), max(over), max(message))]
        part.rows.append([method, f"{ended}/{runs}", *sizes, rate])
        part.runs[method] = [{"over_bytes": a, "said_bytes": b} for a, b in zip(over, message, strict=True)]
        part.goals.append(Goal(f"{method}: noticed in all", ended == runs, f"{ended} of {runs}"))
        progress(" ".join(part.rows[-1]))
    part.notes.append(load())
    return part


def greedy_run(options: list[str]) -> tuple[dict[str, Any], int, int]:
    """Return brim's final event, its exit code, and the child's true memory."""
    with tempfile.NamedTemporaryFile() as count:
        count.write(bytes(16))
        count.flush()
        child = [sys.executable, "-c", GREEDY, count.name]
        result = subprocess.run(
            [*brim("--json", "--memory", "300MB", *options), "--", *child], capture_output=True, text=True
        )
        numbers = Path(count.name).read_bytes()
    filled, base = int.from_bytes(numbers[:8], "little"), int.from_bytes(numbers[8:], "little")
    return json.loads(result.stderr.splitlines()[-1]), result.returncode, filled + base


def rest(seconds: float) -> Part:
    title = f"The watcher's share of one core while the command does nothing, over {seconds:.0f} s"
    part = Part(title, ["what", "share", "own memory"])
    sleepers = "for i in $(seq 32); do sleep 9999 & done; wait"
    cases = [
        ("1 process, 300 MB, cgroup", ["--memory", "300MB"], ["sleep", "9999"]),
        ("1 process, 300 MB, best effort", ["--memory", "300MB", "--no-cgroup"], ["sleep", "9999"]),
        ("1 process, no limit set", ["--no-cgroup"], ["sleep", "9999"]),
        ("33 processes, 300 MB, best effort", ["--memory", "300MB", "--no-cgroup"], ["sh", "-c", sleepers]),
    ]
    for name, options, command in cases:
        process = subprocess.Popen([*brim("-q", *options), "--", *command], stderr=subprocess.DEVNULL)
        try:
            time.sleep(7)  # the watcher slows down after five seconds without change
            fraction, own = share_of(process.pid, seconds)
            part.rows.append([name, f"{fraction:.2f} %", size(own)])
            part.runs[name] = [{"share": fraction, "own_bytes": own}]
        finally:
            end(process)
    part.notes.append(load())
    return part


def soak(minutes: float) -> Part:
    part = Part(f"Soak of {minutes:g} min: memory up and down all the time", ["what", "found"])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "soak.jsonl"
        command = [*brim("-q", "--memory", "400MB", "--log", str(log)), "--", sys.executable, "-c", BUSY]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            time.sleep(5)
            watcher = watcher_of(process.pid)
            own, sizes = [], []
            started_at, before = time.monotonic(), cpu_seconds(watcher)
            while time.monotonic() - started_at < minutes * 60 and process.poll() is None:
                own.append(unreclaimable(watcher))
                sizes.append(log.stat().st_size)
                time.sleep(min(5.0, minutes * 6))
            passed = time.monotonic() - started_at
            fraction = 100 * (cpu_seconds(watcher) - before) / passed
            eighth = max(len(own) // 8, 1)
            medians = [
                statistics.median(own[index : index + eighth]) / MB
                for index in range(0, eighth * 8, eighth)
                if own[index:]
            ]
            rate = (sizes[-1] - sizes[0]) / passed
            part.rows += [
                ["ran", f"{passed / 60:.1f} min, {fraction:.2f} % of a core while it moves"],
                ["own memory by eighths, MB", " ".join(f"{retained:.2f}" for retained in medians)],
                ["log", f"{size(sizes[-1])}, largest {size(max(sizes))}, {rate * 3600 / MB:.1f} MB an hour"],
            ]
            part.runs["soak"] = [{"own_bytes": a, "log_bytes": b} for a, b in zip(own, sizes, strict=True)]
        finally:
            end(process)
    return part


def watcher_of(pid: int) -> int:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if "brim.monitor.watching.watcher" in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    raise SystemExit("no watcher found")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def unreclaimable(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")))


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the command and its children; brim forwards SIGTERM only to the command."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        for below in Path(f"/proc/{child}/task/{child}/children").read_text().split():
            os.kill(int(below), 15)
    process.terminate()
    process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description="What watching costs, and how well the line holds.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rest", type=float, default=30.0, metavar="SECONDS")
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the soak")
    names = ("overshoot", "kinds", "many", "rest", "logs", "soak")
    parser.add_argument("--only", type=comma_list(*names), default=",".join(names))
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    facts = machine(Path(tempfile.gettempdir()), [])
    created = {
        "overshoot": lambda: overshoot(arguments.runs),
        "kinds": lambda: kinds(arguments.runs),
        "many": lambda: many(arguments.rest),
        "rest": lambda: rest(arguments.rest),
        "logs": logs,
        "soak": lambda: soak(arguments.minutes),
    }
    parts: dict[str, Part] = {}
    for name in arguments.only.split(","):
        parts[name] = created[name]()
        print_part(parts[name])
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


if __name__ == "__main__":
    main()
