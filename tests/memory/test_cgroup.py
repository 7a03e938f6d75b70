"""Limits through cgroups.

cgroup v2 is simulated by a tree of plain files, so the kernel's behavior is not tested. v1 is tested for real in
tests/guarantees.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from brim.memory.cgroup import Cgroup, open_group


def v2(root: Path, *, controllers: str = "cpu memory", enabled: str = "", pids: str = "") -> Path:
    """Create a machine with cgroup v2 and this process in /user/scope."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/user/scope\n")
    mount = root / "sys/fs/cgroup"
    (root / "proc/self/mountinfo").write_text("31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    home = mount / "user/scope"
    home.mkdir(parents=True)
    (home / "cgroup.controllers").write_text(controllers)
    (home / "cgroup.subtree_control").write_text(enabled)
    (home / "cgroup.procs").write_text(pids or f"{os.getpid()}\n")
    return home


def test_a_delegated_group_gets_a_child_with_a_hard_limit(tmp_path: Path) -> None:
    """With v2, brim moves itself into a leaf, delegates the controller, limits the child group and disables swap."""
    home = v2(tmp_path)
    group = open_group(300_000_000, tmp_path)
    assert isinstance(group, Cgroup)
    assert (group.version, group.limited, group.kind) == (2, True, "cgroup v2")
    assert group.folder.parent == home
    assert (group.folder / "memory.max").read_text() == "300000000"
    assert (group.folder / "memory.swap.max").read_text() == "0"
    assert (group.folder / "memory.oom.group").read_text() == "1"
    assert (home / "cgroup.subtree_control").read_text() == "+memory"
    assert group.shelter is not None
    assert (group.shelter / "cgroup.procs").read_text() == str(os.getpid())


def test_where_the_controller_is_handed_down_already_nobody_moves(tmp_path: Path) -> None:
    """With v2, a group that already has limited children gets one more and no process is moved."""
    v2(tmp_path, enabled="cpu memory", pids="\n")
    group = open_group(None, tmp_path)
    assert isinstance(group, Cgroup)
    assert group.shelter is None
    assert not group.limited
    assert not (group.folder / "memory.max").exists()


def test_a_shared_group_is_left_alone(tmp_path: Path) -> None:
    """With v2, a group with other processes is not changed, and the reason states how to get a limit."""
    home = v2(tmp_path, pids=f"{os.getpid()}\n1\n2\n")
    refused = open_group(300_000_000, tmp_path)
    assert isinstance(refused, str)
    assert "2 other processes" in refused
    assert "systemd-run" in refused
    assert (home / "cgroup.subtree_control").read_text() == ""
    assert [path for path in home.iterdir() if path.is_dir()] == []


def test_without_the_controller_there_is_no_limit(tmp_path: Path) -> None:
    """With v2, no limit is set unless the memory controller was delegated to the group."""
    v2(tmp_path, controllers="cpu pids")
    assert "memory controller" in str(open_group(1, tmp_path))


def test_numbers_of_v2(tmp_path: Path) -> None:
    """With v2, anonymous and shared memory, swap and kills are read from the files of the group."""
    (tmp_path / "memory.stat").write_text("anon 100\nshmem 20\nfile 500\ninactive_file 300\nactive_file 7\n")
    (tmp_path / "memory.swap.current").write_text("3\n")
    (tmp_path / "memory.events").write_text("low 0\noom 5\noom_kill 2\n")
    group = Cgroup(tmp_path, 2, True)
    usage = group.usage()
    assert usage is not None
    assert (usage.anon_bytes, usage.shmem_bytes, usage.swap_bytes, usage.file_bytes) == (100, 20, 3, 307)
    assert usage.total_bytes == 123
    assert group.oom_kills() == 2


def test_a_container_sees_its_part_of_the_tree(tmp_path: Path) -> None:
    """With v1, the group is found below the mount point if only a subtree is mounted, as in a container."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/docker/abc\n1:cpu:/x\n")
    (tmp_path / "proc/self/mountinfo").write_text(
        "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    )
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    group = open_group(150_000_000, tmp_path)
    assert isinstance(group, Cgroup)
    assert group.folder.parent == tmp_path / "sys/fs/cgroup/memory"
    assert (group.folder / "memory.limit_in_bytes").read_text() == "150000000"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_tree_is_a_reason(tmp_path: Path) -> None:
    """Without permission to create a group, brim reports the reason and raises no error."""
    home = v2(tmp_path, enabled="memory")
    home.chmod(0o500)
    assert "may not make a cgroup" in str(open_group(1, tmp_path))


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    """A system without cgroups is reported as the reason."""
    assert open_group(1, tmp_path) == "this system has no cgroups"
