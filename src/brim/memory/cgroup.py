"""Run a command in a separate cgroup: the kernel counts each of its pages once and can enforce a limit.

This works with cgroup v1 as root, and with cgroup v2 if a group was delegated to this user. The new group is a child of
the group of this process, so that every limit above stays valid. If the system does not allow it, `open_group` returns
the reason as a text, and brim measures from outside.

The v1 half is tested against the kernel, the v2 half only against a tree of plain files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from brim.memory.meter import Usage, read_counters, read_number
from brim.records import dataclass

_V2_HINT = "for a hard limit, start it with: systemd-run --user --scope -p Delegate=yes brim run …"


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup that brim made. `limited`: the kernel kills processes in it before it exceeds its limit."""

    folder: Path
    version: int
    limited: bool
    shelter: Path | None = None  # v2: the group to which brim itself had to move, because only leaves have processes

    @property
    def kind(self) -> str:
        return f"cgroup v{self.version}"

    def join(self) -> None:
        """Move the calling process into the group; its later child processes start there."""
        (self.folder / "cgroup.procs").write_text("0")

    def pids(self) -> list[int]:
        """Return every process in the group and the groups below it."""
        return [pid for folder in self._folders() for pid in _pids(folder)]

    def usage(self) -> Usage | None:
        """Return the memory of the group, each page once, files in tmpfs included; None if the group is gone."""
        stat = read_counters(self.folder / "memory.stat")
        if not stat:
            return None
        prefix = "total_" if self.version == 1 else ""
        file = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
        if self.version == 1:
            return Usage(stat.get("total_rss", 0), stat.get("total_shmem", 0), stat.get("total_swap", 0), file)
        swap = read_number(self.folder / "memory.swap.current") or 0
        return Usage(stat.get("anon", 0), stat.get("shmem", 0), swap, file)

    def peak_bytes(self) -> int | None:
        """Return the highest memory of the group, page cache included; None if the kernel does not report it."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return read_number(self.folder / name) or None

    def oom_kills(self) -> int:
        """Return how many processes the kernel killed because this group, or one above, was full."""
        if self.version == 2:  # the counter includes the groups below
            return read_counters(self.folder / "memory.events").get("oom_kill", 0)
        return sum(read_counters(folder / "memory.oom_control").get("oom_kill", 0) for folder in self._folders())

    def remove(self) -> bool:
        """Remove the group; return False while processes run in it."""
        try:
            for folder in reversed(list(self._folders())):
                folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return False
        if self.shelter is not None:
            home = self.shelter.parent
            try:  # move brim back; if that fails, the group is removed with its last process
                (home / "cgroup.subtree_control").write_text("-memory")
                for pid in _pids(self.shelter):
                    (home / "cgroup.procs").write_text(str(pid))
                self.shelter.rmdir()
            except OSError:
                pass
        return True

    def _folders(self) -> Iterator[Path]:
        yield self.folder
        yield from (Path(path) for path, _, _ in os.walk(self.folder) if path != str(self.folder))


def open_group(limit_bytes: int | None, root: Path = Path("/")) -> Cgroup | str:
    """Make a new group, with a hard limit unless that is None; or return the reason why this is not possible."""
    home = _home(root)
    if isinstance(home, str):
        return home
    folder, version = home
    try:
        return _open_v1(folder, limit_bytes) if version == 1 else _open_v2(folder, limit_bytes)
    except OSError as error:
        reason = f"this user may not make a cgroup below {folder} ({error.strerror})"
        return f"{reason}; {_V2_HINT}" if version == 2 else reason


def hard_limit_here(root: Path = Path("/")) -> str:
    """Return a sentence about whether `brim run` can set a limit that the kernel enforces. Nothing is changed."""
    try:
        home = _home(root)
    except OSError as error:
        home = f"no cgroups can be read ({error.strerror})"
    if isinstance(home, str):
        return f"brim run cannot set a limit that the kernel enforces: {home}"
    folder, version = home
    if not os.access(folder, os.W_OK):
        return f"brim run cannot set a limit that the kernel enforces: this user cannot write {folder} (v{version})"
    return f"brim run can set a limit that the kernel enforces (v{version}, {folder})"


def _home(root: Path) -> tuple[Path, int] | str:
    """Return folder and version of the memory cgroup of this process, or the reason why it cannot be used."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return "this system has no cgroups"
    groups = {controllers: group for _, controllers, group in (line.split(":", 2) for line in lines)}
    v1_group = next((group for names, group in groups.items() if "memory" in names.split(",")), None)
    version, group = (1, v1_group) if v1_group is not None else (2, groups.get(""))
    if group is None:
        return "no cgroup of this process counts memory"
    for mount in mounts:
        fields_text, _, right = mount.partition(" - ")
        kind, _, options = [*right.split(" ", 2), "", ""][:3]
        if (kind == "cgroup2") if version == 2 else (kind == "cgroup" and "memory" in options.split(",")):
            fields = fields_text.split(" ")  # the fourth is the group at the top of the mount, the fifth its path
            inside = os.path.relpath(group, fields[3])
            if not inside.startswith(".."):
                return root / fields[4].lstrip("/") / inside, version
    return "the cgroup of this process is not mounted"


def _open_v1(home: Path, limit_bytes: int | None) -> Cgroup:
    group = Cgroup(_make(home), 1, limit_bytes is not None)
    try:
        if limit_bytes is not None:
            (group.folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
            with_swap = group.folder / "memory.memsw.limit_in_bytes"
            if with_swap.exists():
                with_swap.write_text(str(limit_bytes))
    except OSError:
        group.remove()
        raise
    return group


def _open_v2(home: Path, limit_bytes: int | None) -> Cgroup | str:
    if "memory" not in (home / "cgroup.controllers").read_text().split():
        return f"the memory controller is not enabled for {home}; {_V2_HINT}"
    shelter = None
    if "memory" not in (home / "cgroup.subtree_control").read_text().split():
        other_pids = set(_pids(home)) - {os.getpid()}
        if other_pids:
            return f"{len(other_pids)} other processes share the cgroup {home}; {_V2_HINT}"
        shelter = _make(home, "-self")
        (shelter / "cgroup.procs").write_text(str(os.getpid()))
        (home / "cgroup.subtree_control").write_text("+memory")
    group = Cgroup(_make(home), 2, limit_bytes is not None, shelter)
    try:
        if limit_bytes is not None:
            (group.folder / "memory.max").write_text(str(limit_bytes))
            (group.folder / "memory.swap.max").write_text("0")  # v2 has no limit for memory and swap together
            (group.folder / "memory.oom.group").write_text("1")
    except OSError:
        group.remove()
        raise
    return group


def _make(home: Path, suffix: str = "") -> Path:
    folder = home / f"brim-{os.getpid()}-{time.monotonic_ns() % 10**9}{suffix}"
    folder.mkdir()
    return folder


def _pids(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []
