"""Synthetic logs in the format of `brim run`, with the shapes of real runs."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BEGAN = 1_794_700_000.0
GB = 10**9
Entry = dict[str, Any]


def head(limit_bytes: int | None = 4 * GB, **facts: Any) -> Entry:
    return {
        "type": "head",
        "time": "2026-11-14T23:46:40.000+00:00",
        "boot_id": "d710b919-7b12-40d6-9611-fb1f5f11347a",
        "machine": {"ram_bytes": 16 * GB, "swap_bytes": 2 * GB, "cpus": 8, "kernel": "6.18.4", "system": "Linux"},
        "limit": {"bytes": limit_bytes, "why": "--memory", "enforced": "best effort"},
        "watched": "command",
        "command": ["python", "train.py", "--epochs", "8"],
        "pid": 4242,
        "ladder": {"alert": "80%", "stop": "90%", "kill": "97%"},
        "versions": {"brim": "0.1.0", "python": "3.11.7"},
        "not_seen": [],
        **facts,
    }


def sample(at_s: float, anon: float, shmem: float = 0, swap: float = 0, file: float = 0, **facts: Any) -> Entry:
    anon, shmem, swap, file = map(int, (anon, shmem, swap, file))
    total = anon + shmem + swap
    return {
        "type": "sample",
        "t": round(BEGAN + at_s, 3),
        "anon_bytes": anon,
        "shmem_bytes": shmem,
        "swap_bytes": swap,
        "file_bytes": file,
        "total_bytes": total,
        "available_bytes": max(14 * GB - total, 0),
        "swap_free_bytes": 2 * GB - swap,
        **facts,
    }


def process(pid: int, name: str, anon: float, shmem: float = 0) -> Entry:
    sizes = {"anon_bytes": int(anon), "shmem_bytes": int(shmem), "swap_bytes": 0, "file_bytes": 5_000_000}
    return {"pid": pid, "name": name, **sizes}


def event(at_s: float, kind: str, text: str, **facts: Any) -> Entry:
    return {"type": "event", "t": round(BEGAN + at_s, 3), "kind": kind, "text": text, **facts}


def end(at_s: float, entries: Iterable[Entry] = (), exit_code: int | None = 0, **facts: Any) -> Entry:
    peak = max((e for e in entries if e["type"] == "sample"), key=lambda e: e["total_bytes"], default=None)
    observed = {"peak_bytes": peak["total_bytes"], "peak_t": peak["t"]} if peak else {"peak_bytes": 0, "peak_t": BEGAN}
    records = {"exit_code": exit_code, "signal": None, "stopped": None, "why": None, "overshoot_bytes": 0}
    return {"type": "end", "t": round(BEGAN + at_s, 3), **records, **observed, **facts}


def training(seconds: int = 600, grow: float = 0.0, seed: int = 0) -> list[Entry]:
    """A model is loaded, four readers feed it, and batches make a sawtooth; `grow` bytes per second are never freed."""
    chance = random.Random(seed)
    entries = [event(0, "start", "started process 4242", pid=4242)]
    for second in range(seconds):
        loaded = 1 - math.exp(-second / 25)
        tooth = 0.35 * GB * ((second % 37) / 37) + chance.uniform(0, 0.03) * GB
        anon = 0.15 * GB + 1.4 * GB * loaded + tooth + grow * second
        shared = 0.4 * GB * loaded * (0.8 + 0.2 * math.sin(second / 15))
        readers = [process(4250 + n, "pt_data_worker", 0.08 * GB * loaded, shared / 4) for n in range(4)]
        listed = (
            {"processes": [process(4242, "python", anon - 0.32 * GB * loaded), *readers]} if second % 5 == 0 else {}
        )
        entries.append(sample(second + 0.1, anon, shared, 0, 0.3 * GB + 1.2 * GB * second / seconds, **listed))
    return entries


def fine() -> list[Entry]:
    run = training()
    marks = [event(60, "mark", "model loaded"), *(event(150 * n, "mark", f"epoch {n} done") for n in range(1, 4))]
    forecast = {"low_bytes": int(2.0 * GB), "high_bytes": int(2.9 * GB), "verdict": "LOW"}
    return [head(forecast=forecast), *_in_order([*run, *marks]), end(600.5, run)]


def leaking() -> list[Entry]:
    """Memory grows until brim asks the program to stop, which the program ignores."""
    run = training(500, grow=0.0035 * GB)
    events = [
        event(300, "exhaustion", "memory runs out: 3.05 GB of 4.00 GB, growing by 210 MB a minute: full in 4 min"),
        event(352, "alert", "memory is at 3.21 GB of 4.00 GB (80 %)", used_bytes=3_210_000_000),
        event(455, "stop", "above the stop threshold: 3.62 GB of 4.00 GB (90 %)"),
        event(455.2, "stop", "made the stop file run/stop"),
        event(485, "term", "sent SIGTERM to 4242"),
        event(499, "kill", "killed it: 3.90 GB of 4.00 GB (97 %), above the kill threshold"),
    ]
    ended = end(500, run, None, signal=9, stopped="kill", why="3.90 GB of 4.00 GB (97 %)")
    return [head(), *_in_order([*run, *events]), ended]


def killed_by_kernel() -> list[Entry]:
    run = training(240, grow=0.005 * GB)
    lines = [
        "2026-11-14 23:50:40 the kernel killed process 4242 (python), machine-wide",
        "  it held 2.9 GB: 2.5 GB anonymous, 0.4 GB shared; the machine has 16.0 GB, no swap left",
        "  sure: the kernel's own record names the process",
        "  Out of memory: Killed process 4242 (python) total-vm:9012345kB, anon-rss:2512345kB",
    ]
    events = [event(240, "oom", "the kernel killed a process for memory somewhere on this machine", machine=True)]
    after = event(260, "postmortem", "why it died", lines=lines)
    ended = end(240.4, run, None, signal=9, machine_oom_kills=1)
    return [head(None), *_in_order([*run, *events]), ended, after]


def mapping() -> list[Entry]:
    """A file much larger than the limit is read through a memory map, and other memory stays constant."""
    run = [sample(n, 0.2 * GB + (n % 7) * 1e6, 0, 0, min(n * 0.05, 12) * GB) for n in range(300)]
    return [head(int(0.4 * GB), command=["python", "read_arrow.py"]), *run, end(300, run)]


def building(shards: int = 900) -> list[Entry]:
    """A build of many shards, far below its limit."""
    run = [sample(n, 0.06 * GB + 0.01 * GB * math.sin(n / 9) ** 2) for n in range(1200)]
    size = "500 MB written"
    finished = [
        event(1200 * n / shards, "shard", f"data/train-{n:05d}-of-{shards:05d}.parquet: {size}") for n in range(shards)
    ]
    notes = [event(3, "note", "2 files are empty"), event(600, "mark", "half of it")]
    command = ["brim", "build", "ds004884/", "out/", "--memory", "2GB"]
    return [
        head(2 * GB, command=command, watched="job", ladder=None),
        *_in_order([*run, *finished, *notes]),
        end(1201, run),
    ]


def write(path: Path, entries: Iterable[Entry], cut_bytes: int = 0) -> Path:
    """Write one line per record; the last `cut_bytes` are missing, as after a crash."""
    whole = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries).encode()
    path.write_bytes(whole[: len(whole) - cut_bytes])
    return path


def _in_order(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry["t"])
