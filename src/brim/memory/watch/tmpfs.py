"""Files in memory: what was written to tmpfs since the watch began.

A file in /dev/shm is memory that no process owns: 300 MB written there show in no RSS, and stay when the
writer ends. The growth of the mounts is known at once, but anyone may have caused it. `files_of` looks for
the files themselves: changed since the beginning, of the same user, and not held by a stranger.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_SMALL_BYTES = 1 << 20  # a file below this decides nothing


class TmpfsGrowth:
    """Mounted tmpfs, and how much more they hold than when this was made."""

    def __init__(self, mountinfo: Path = Path("/proc/self/mountinfo")) -> None:
        self._since = time.time()
        self._mounts = dict(_tmpfs_mounts(mountinfo))
        self._before = {path: _used_bytes(path) for path in self._mounts}

    def bytes(self) -> int:
        """An upper bound of what the watched wrote: all that anyone wrote."""
        return sum(max(_used_bytes(path) - before, 0) for path, before in self._before.items())

    def files_of(self, pids: Iterable[int]) -> int:
        """Bytes in files that these processes may have written and do not map (mapped ones count as RssShmem)."""
        ours = set(pids)
        users = {uid for pid in ours if (uid := _owner(pid)) is not None}
        held = {identity: size for pid in ours for identity, size in self._open_files(pid)}
        held |= {identity: size for identity, size in self._changed_files(users) if identity not in held}
        if not held:
            return 0
        mapped = {identity for pid in ours for identity in _mapped(pid)}
        strange = {
            identity
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if pid not in ours and pid != os.getpid()
            for identity in (*(found for found, _ in self._open_files(pid)), *_mapped(pid))
        }
        return sum(size for identity, size in held.items() if identity not in mapped and identity not in strange)

    def _changed_files(self, users: set[int]) -> Iterator[tuple[tuple[int, int], int]]:
        for mount, device in self._mounts.items():
            for folder, folders, files in os.walk(mount):
                folders[:] = [name for name in folders if not os.path.ismount(os.path.join(folder, name))]
                for name in files:
                    try:
                        info = os.lstat(os.path.join(folder, name))
                    except OSError:
                        continue
                    size = info.st_blocks * 512
                    changed = max(info.st_mtime, info.st_ctime) >= self._since
                    if size >= _SMALL_BYTES and changed and info.st_dev == device and info.st_uid in users:
                        yield (info.st_dev, info.st_ino), size

    def _open_files(self, pid: int) -> Iterator[tuple[tuple[int, int], int]]:
        """Files on these mounts that a process has open, deleted ones too."""
        devices = set(self._mounts.values())
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            return
        for descriptor in descriptors:
            try:
                info = os.stat(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue
            if info.st_dev in devices and info.st_blocks * 512 >= _SMALL_BYTES:
                yield (info.st_dev, info.st_ino), info.st_blocks * 512


def _tmpfs_mounts(mountinfo: Path) -> Iterator[tuple[str, int]]:
    """(path, device) of each; one that another mount hides is not seen, and one seen twice counts once."""
    try:
        lines = mountinfo.read_text(errors="replace").splitlines()
    except OSError:
        return
    seen = set()
    for line in lines:
        left, _, right = line.partition(" - ")
        if right.split(" ")[0] != "tmpfs":
            continue
        path = left.split(" ")[4].replace("\\040", " ")
        try:
            device = os.stat(path).st_dev
        except OSError:
            continue
        if device not in seen:
            seen.add(device)
            yield path, device


def _used_bytes(path: str) -> int:
    try:
        usage = os.statvfs(path)
    except OSError:
        return 0
    return (usage.f_blocks - usage.f_bfree) * usage.f_frsize


def _owner(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def _mapped(pid: int) -> Iterator[tuple[int, int]]:
    """(device, inode) of every file that a process maps."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            for line in maps:
                fields = line.split(None, 5)
                if len(fields) > 5 and fields[4] != b"0":
                    major, minor = fields[3].split(b":")
                    yield os.makedev(int(major, 16), int(minor, 16)), int(fields[4])
    except OSError:
        return
