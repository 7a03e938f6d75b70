"""The memory limit and its origin.

The cgroup trees are plain files with the kernel's formats; cgroup v2 itself is not tested.
"""

from pathlib import Path

import pytest

from brim.errors import InputError
from brim.memory.limit import effective_limit, watch_limit
from brim.memory.meter import process_bytes, tree_bytes

GB = 10**9


def machine(root: Path, available: int = 8 * GB, cgroup: str = "0::/\n") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(root: Path, path: str, **values: object) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_the_user_decides(tmp_path: Path) -> None:
    """--memory has the highest priority, then BRIM_MEMORY."""
    root = machine(tmp_path)
    assert effective_limit("2GB", {"BRIM_MEMORY": "1GB"}, root).bytes == 2 * GB
    limit = effective_limit(None, {"BRIM_MEMORY": "1GB"}, root)
    assert (limit.bytes, limit.reason) == (GB, "BRIM_MEMORY")


def test_half_of_what_the_machine_has(tmp_path: Path) -> None:
    """The default limit is half of MemAvailable."""
    limit = effective_limit(None, {}, machine(tmp_path))
    assert limit.bytes == pytest.approx(4 * GB, rel=1e-5)
    assert "8.00 GB available on this machine" in limit.reason


def test_every_cgroup_above_counts(tmp_path: Path) -> None:
    """The tightest ancestor group decides: its limit less its usage, plus the memory that the kernel can reclaim."""
    root = machine(tmp_path, cgroup="0::/pod/job\n")
    group(root, "pod/job", memory__max="max", memory__current=GB)
    stat = f"inactive_file {GB // 2}\nactive_file {GB // 2}\nanon 5"
    group(root, "pod", memory__max=3 * GB, memory__current=2 * GB, memory__stat=stat)
    limit = effective_limit(None, {}, root)
    assert limit.bytes == pytest.approx((3 * GB - 2 * GB + GB + tree_bytes()) / 2, rel=0.05)
    assert "/pod" in limit.reason


def test_cgroup_v1(tmp_path: Path) -> None:
    """cgroup v1 is read too, and its huge default number means no limit."""
    root = machine(tmp_path, cgroup="5:memory:/slurm/job\n1:cpu:/x\n")
    group(root, "memory/slurm/job", memory__limit_in_bytes=GB, memory__usage_in_bytes=0)
    group(root, "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=0)
    assert effective_limit(None, {}, root).bytes == pytest.approx((GB + tree_bytes()) / 2, rel=0.05)


def test_slurm(tmp_path: Path) -> None:
    """Slurm states allocations in MiB, per node or per processor."""
    root = machine(tmp_path)
    assert effective_limit(None, {"SLURM_MEM_PER_NODE": "1024"}, root).bytes == 512 << 20
    per_cpu = {"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "4"}
    assert effective_limit(None, per_cpu, root).bytes == 1024 << 20


def test_a_wrong_size_is_said(tmp_path: Path) -> None:
    """A limit that is not a size is an input error."""
    with pytest.raises(InputError, match="'lots'"):
        effective_limit("lots", {}, machine(tmp_path))


def test_anonymous_memory_is_seen_and_files_are_not(tmp_path: Path) -> None:
    """50 MB of anonymous memory count and 50 MB of a mapped file do not."""
    import mmap

    before = tree_bytes()
    # not from a heap that may have free space
    block = mmap.mmap(-1, 50_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, 50_000_000, 1_000_000):
        block[start : start + 1_000_000] = b"x" * 1_000_000
    retained = tree_bytes() - before
    assert 45_000_000 < retained < 60_000_000
    (tmp_path / "mapped").write_bytes(block[:])
    block.close()
    with open(tmp_path / "mapped", "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        start = tree_bytes()
        assert sum(mapped[i] for i in range(0, len(mapped), 4096)) >= 0
        assert tree_bytes() - start < 5_000_000


def test_a_process_that_is_gone_holds_nothing() -> None:
    """Reading a process that has ended returns 0 and raises no error."""
    assert process_bytes(2**22 - 1) == 0


def test_what_runs_already_has_a_part_of_it(tmp_path: Path) -> None:
    """The command's own memory is added to the available memory, but not to Slurm's allocation, which includes it."""
    root = machine(tmp_path, cgroup="0::/job\n")
    group(root, "job", memory__max=3 * GB, memory__current=2 * GB)
    assert watch_limit(None, {}, root, held_bytes=GB).bytes == 2 * GB
    slurm = {"SLURM_MEM_PER_NODE": "1024"}
    assert watch_limit(None, slurm, root, held_bytes=GB).bytes == 1 << 30


def test_watch_limit_is_the_smaller_of_memory_and_what_a_cgroup_leaves(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/job\n")
    group(root, "job", memory__max=3 * GB, memory__current=2 * GB)
    limit = watch_limit("4GB", {}, root, held_bytes=GB)
    assert (limit.bytes, limit.asked_bytes) == (2 * GB, 4 * GB)
    assert watch_limit("1GB", {}, root, held_bytes=GB).bytes == GB


def test_a_limit_above_what_a_scheduler_gives_is_said(tmp_path: Path) -> None:
    """With --memory 2GB in a Slurm job of 400 MB, the printed limit includes the smaller limit of the scheduler."""
    folder = tmp_path / "sys/fs/cgroup/memory/slurm/uid_0/job_191"
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("9:memory:/slurm/uid_0/job_191\n")
    (folder / "memory.limit_in_bytes").write_text("400000000\n")
    (folder / "memory.usage_in_bytes").write_text("1000\n")
    limit = effective_limit("2GB", {}, tmp_path)
    assert str(limit) == "2.00 GB (--memory; but Slurm gives this job 400 MB)"
    assert str(effective_limit("300MB", {}, tmp_path)) == "300 MB (--memory)"
    assert "Slurm gives this job 210 MB" in str(effective_limit("2GB", {"SLURM_MEM_PER_NODE": "200"}, tmp_path))


def test_a_scheduler_that_gives_less_is_named(tmp_path: Path) -> None:
    """The requested limit is kept and the scheduler that would kill first is named; nothing is reported if both fit."""
    root = machine(tmp_path, cgroup="5:memory:/slurm/uid_7/job_3\n")
    group(root, "memory/slurm/uid_7/job_3", memory__limit_in_bytes=400_000_000, memory__usage_in_bytes=0)
    limit = effective_limit("2GB", {}, root)
    assert limit.bytes == 2 * GB
    assert (
        limit.warning == "--memory is 2.00 GB, but Slurm gives this job 400 MB: the kernel kills a job that uses more"
    )
    assert effective_limit("300MB", {}, root).warning == ""


def test_the_error_names_the_limit_that_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel killed a worker below brim's limit, the error names the limit that applied."""
    from brim.execution.failures import does_not_start

    monkeypatch.setattr("brim.execution.failures.gives_less", lambda requested: "Slurm gives this job 400 MB")
    struck = does_not_start(-9, "", 2 * GB)
    assert struck.exit_code == 4
    assert "not brim at its limit of 2.00 GB: Slurm gives this job 400 MB" in struck.message
    monkeypatch.setattr("brim.execution.failures.gives_less", lambda requests: "")
    assert does_not_start(-9, "", 2 * GB).exit_code == 2
