"""How much memory a process tree holds that the kernel cannot take back.

Anonymous + shared + swapped pages, summed over the tree from /proc/PID/status. The sum is quick and an
upper bound: pages that forked processes share are counted once for each. File-backed pages (page cache,
memory maps) are not counted: the kernel takes them back when it needs them. Where there is no /proc, the
resident size is all that can be seen.
"""

from __future__ import annotations

import os
import sys


def tree_bytes(pid: int | None = None) -> int:
    """Unreclaimable bytes of a process and everything it started."""
    pid = os.getpid() if pid is None else pid
    if sys.platform != "linux":
        return _resident_bytes(pid)
    return sum(process_bytes(member) for member in _tree(pid))


def process_bytes(pid: int) -> int:
    """Unreclaimable bytes of one process; 0 if it is gone."""
    total = 0
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            for line in status:
                if line.startswith((b"RssAnon:", b"RssShmem:", b"VmSwap:")):
                    total += int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return total


def _tree(pid: int) -> list[int]:
    members = [pid]
    for member in members:
        try:
            for task in os.listdir(f"/proc/{member}/task"):
                with open(f"/proc/{member}/task/{task}/children", "rb") as children:
                    members.extend(int(child) for child in children.read().split())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return members


def _resident_bytes(pid: int) -> int:
    import psutil

    try:
        process = psutil.Process(pid)
        return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
    except psutil.NoSuchProcess:
        return 0
