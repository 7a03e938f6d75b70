"""A group of its own for a command: the kernel counts every page once, and holds the line itself.

cgroup v1 as root, or cgroup v2 where a group was delegated to this user. The new group is always a child of
the group brim runs in, so that every limit above goes on to hold. Where the system does not allow it,
`open_group` says why in words for the user, and brim watches as well as it can from outside.

The v1 half is exercised by tests against the kernel; the v2 half only against a tree of plain files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from brim.memory.meter import Usage
from brim.records import dataclass

_V2_HINT = "for a hard limit, start it with: systemd-run --user --scope -p Delegate=yes brim run …"


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A cgroup that brim made. `limited`: the kernel kills inside it rather than let it grow beyond its limit."""

    folder: Path
    version: int
    limited: bool
    shelter: Path | None = None  # v2: where brim itself had to move, because only leaves may hold processes

    @property
    def kind(self) -> str:
        return f"cgroup v{self.version}"

    def join(self) -> None:
        """Move the calling process in; what it starts from then on is born inside."""
        (self.folder / "cgroup.procs").write_text("0")

    def pids(self) -> list[int]:
        """Every process in the group and in groups that those made below it."""
        return [pid for folder in self._folders() for pid in _pids(folder)]

    def usage(self) -> Usage | None:
        """Each page once, files in tmpfs included. None when the group is gone."""
        try:
            stat = _stat(self.folder / "memory.stat")
        except OSError:
            return None
        if self.version == 1:
            anon, shmem = stat.get("total_rss", 0), stat.get("total_shmem", 0)
            file = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
            return Usage(anon, shmem, stat.get("total_swap", 0), file)
        file = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        return Usage(stat.get("anon", 0), stat.get("shmem", 0), _number(self.folder / "memory.swap.current"), file)

    def peak_bytes(self) -> int | None:
        """The most that was charged to it at once, page cache included; None where the kernel does not say."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return _number(self.folder / name) or None

    def oom_kills(self) -> int:
        """How many processes the kernel killed because the group, or one above, was full."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        total = 0
        for folder in self._folders():
            try:
                total += _stat(folder / name).get("oom_kill", 0)
            except OSError:
                continue
            if self.version == 2:
                break  # counts what is below as well
        return total

    def remove(self) -> bool:
        """Take the group away; False while something still runs in it."""
        try:
            for folder in reversed(list(self._folders())):
                folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            return False
        if self.shelter is not None:
            _leave_shelter(self.shelter)
        return True

    def _folders(self) -> Iterator[Path]:
        yield self.folder
        yield from (Path(path) for path, _, _ in os.walk(self.folder) if path != str(self.folder))


def open_group(limit_bytes: int | None, root: Path = Path("/")) -> Cgroup | str:
    """A new group, with a hard limit unless that is None; or the reason why there is none."""
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
    """Whether `brim run` could make a group whose limit the kernel holds, told without making one."""
    try:
        home = _home(root)
    except OSError as error:
        home = f"no cgroups are seen here ({error.strerror})"
    if isinstance(home, str):
        return f"no limit that the kernel holds: {home}"
    folder, version = home
    if not os.access(folder, os.W_OK):
        return f"no limit that the kernel holds: {folder} (v{version}) is not ours to write"
    return f"brim run can set a limit that the kernel holds (v{version}, {folder})"


def _home(root: Path) -> tuple[Path, int] | str:
    """The folder of the group that this process is in, where memory is counted."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = list(_mounts(root))
    except OSError:
        return "this system has no cgroups"
    groups = {controllers: group for _, controllers, group in (line.split(":", 2) for line in lines)}
    for controllers, group in groups.items():
        if "memory" in controllers.split(","):
            return _folder_of(mounts, "cgroup", group)
    if "" in groups:
        return _folder_of(mounts, "cgroup2", groups[""])
    return "no cgroup counts memory here"


def _folder_of(mounts: list[tuple[str, str, Path]], kind: str, group: str) -> tuple[Path, int] | str:
    for mounted_kind, top, path in mounts:
        if mounted_kind == kind:
            inside = os.path.relpath(group, top)
            if not inside.startswith(".."):
                return path / inside, 1 if kind == "cgroup" else 2
    return "the cgroup of this process is not mounted here"


def _mounts(root: Path) -> Iterator[tuple[str, str, Path]]:
    """(kind, the group at its top, where) of each hierarchy that can count memory."""
    for line in (root / "proc/self/mountinfo").read_text(errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = [*right.split(" ", 2), "", ""][:3]
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            fields = left.split(" ")
            yield kind, fields[3], root / fields[4].lstrip("/")


def _open_v1(home: Path, limit_bytes: int | None) -> Cgroup:
    folder = _make(home)
    group = Cgroup(folder, 1, limit_bytes is not None)
    try:
        if limit_bytes is not None:
            (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
            with_swap = folder / "memory.memsw.limit_in_bytes"
            if with_swap.exists():
                with_swap.write_text(str(limit_bytes))
    except OSError:
        group.remove()
        raise
    return group


def _open_v2(home: Path, limit_bytes: int | None) -> Cgroup | str:
    if "memory" not in (home / "cgroup.controllers").read_text().split():
        return f"the memory controller is not given to {home}; {_V2_HINT}"
    shelter = None
    if "memory" not in (home / "cgroup.subtree_control").read_text().split():
        strangers = set(_pids(home)) - {os.getpid()}
        if strangers:
            return f"{len(strangers)} other processes share the cgroup {home}; {_V2_HINT}"
        shelter = _make(home, "-self")
        (shelter / "cgroup.procs").write_text(str(os.getpid()))
        (home / "cgroup.subtree_control").write_text("+memory")
    folder = _make(home)
    group = Cgroup(folder, 2, limit_bytes is not None, shelter)
    try:
        if limit_bytes is not None:
            (folder / "memory.max").write_text(str(limit_bytes))
            (folder / "memory.swap.max").write_text("0")  # else the line would be memory + swap, which v2 cannot say
            (folder / "memory.oom.group").write_text("1")
    except OSError:
        group.remove()
        raise
    return group


def _leave_shelter(shelter: Path) -> None:
    """Put brim back where it was. If that fails, the group goes when its last process ends."""
    try:
        (shelter.parent / "cgroup.subtree_control").write_text("-memory")
        for pid in _pids(shelter):
            (shelter.parent / "cgroup.procs").write_text(str(pid))
        shelter.rmdir()
    except OSError:
        pass


def _make(home: Path, suffix: str = "") -> Path:
    folder = home / f"brim-{os.getpid()}-{time.monotonic_ns() % 10**9}{suffix}"
    folder.mkdir()
    return folder


def _pids(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _stat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _number(path: Path) -> int:
    try:
        text = path.read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0
