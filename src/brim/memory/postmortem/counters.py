"""The kernel's counts of kills: they outlive every log, need no rights, and name no victim."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOST_GROUPS = 20_000
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class GroupCount:
    """A cgroup in which something was killed since it was made."""

    group: str
    kills: int
    limit_bytes: int | None
    peak_bytes: int | None
    file: str


def group_counts(root: Path = Path("/")) -> tuple[list[GroupCount], str]:
    """Every cgroup with kills, v1 and v2; and why not, if none could be read."""
    mounts = [
        (root / "sys/fs/cgroup/memory", "memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
        (root / "sys/fs/cgroup", "memory.events.local", "memory.max", "memory.peak"),
        (root / "sys/fs/cgroup/unified", "memory.events.local", "memory.max", "memory.peak"),
    ]
    found: list[GroupCount] = []
    seen = 0
    for mount, events, limit, peak in mounts:
        for folder in _folders(mount, events):
            seen += 1
            kills = _count(folder / events)
            if kills:
                group = "/" + os.path.relpath(folder, mount).removeprefix(".")
                found.append(
                    GroupCount(group, kills, _number(folder / limit), _number(folder / peak), str(folder / events))
                )
    return found, "" if seen else "no cgroup has counters for memory here"


def machine_count(root: Path = Path("/")) -> int | None:
    """Kills since boot, machine-wide; None where the kernel does not count them (before 4.13)."""
    try:
        for line in (root / "proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _folders(mount: Path, events: str) -> Iterator[Path]:
    for count, (folder, children, files) in enumerate(os.walk(mount)):
        if mount.name == "cgroup" and folder == str(mount):
            children[:] = [child for child in children if child not in ("memory", "unified")]  # mounts of their own
        if events in files:
            yield Path(folder)
        if count >= _MOST_GROUPS:
            return


def _count(path: Path) -> int:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill"), 0)
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None
