"""Tests on a disk that is really full: a small tmpfs, which only root can mount."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import brim, tree_digest


def grow(disk: Path, megabytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={megabytes}m", str(disk)], check=True)


def test_too_small_from_the_start(many_files: Callable[..., Path], small_disk: Path) -> None:
    """If the output cannot fit, the run fails before the first byte and states both sizes."""
    source = many_files(12, size=1_000_000)
    failed = brim("build", source, small_disk / "out", check=5).stderr
    assert "free disk" in failed
    assert "Free disk space" in failed
    assert not (small_disk / "out").exists()
    grow(small_disk, 40)
    brim("build", source, small_disk / "out")
    brim("verify", small_disk / "out", source)


def test_full_in_the_middle(many_files: Callable[..., Path], small_disk: Path) -> None:
    """If other data fills the disk during the run, no partial shard remains and the run can be resumed."""
    source, out = many_files(6, size=1_000_000), small_disk / "out"
    code = (
        "import sys; sys.argv = ['brim', *sys.argv[1:]]\n"
        "from brim.jobs.files_destination import FilesDestination\n"
        "FilesDestination.free_bytes = lambda self: None\n"  # like a file system that does not report its free space
        "from brim.cli import main; main()\n"
    )
    (small_disk / "ballast").write_bytes(bytes(4_500_000))
    command = [sys.executable, "-c", code, "build", str(source), str(out), "--rows-per-shard", "1", "--workers", "1"]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 5, failed.stderr
    assert "disk of the destination is full" in failed.stderr
    assert "Traceback" not in failed.stderr
    names = [p.name for p in (out / "data").iterdir()]
    assert 0 < len(names) < 6
    assert not [name for name in names if name.startswith(".")]
    (small_disk / "ballast").unlink()
    assert f"{6 - len(names)} written, {len(names)} kept" in brim(*command[3:]).stdout
    brim("verify", out, source)


def test_no_room_for_the_ledger(many_files: Callable[..., Path], tmp_path: Path, small_disk: Path) -> None:
    """If the ledger cannot be written, the destination has failed; the build resumes once it can be written."""
    source, out, state = many_files(40, size=100), tmp_path / "out", small_disk / "state"
    state.mkdir()
    (small_disk / "ballast").write_bytes(bytes(8_388_608 - 3 * 4096))
    failed = brim("build", source, out, "--rows-per-shard", "1", "--state", state, check=5).stderr
    assert "is full" in failed
    (small_disk / "ballast").unlink()
    brim("build", source, out, "--rows-per-shard", "1", "--state", state)
    brim("verify", out, source, "--state", state)


def test_unpack_on_a_full_disk(many_files: Callable[..., Path], tmp_path: Path, small_disk: Path) -> None:
    """unpack reports the full disk, leaves no partial file and can be resumed."""
    source, out = many_files(12, size=1_000_000), tmp_path / "out"
    brim("build", source, out)
    assert "is full" in brim("unpack", out, small_disk / "back", check=5).stderr
    assert not list((small_disk / "back").glob(".*"))
    grow(small_disk, 40)
    brim("unpack", out, small_disk / "back")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="printing to a full disk is not proved here: no /dev/full")
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_printing_to_a_full_disk(many_files: Callable[..., Path], tmp_path: Path, arguments: list[str]) -> None:
    """The job finishes although nothing can be printed, and the exit message states that."""
    source, out = many_files(3), tmp_path / "out"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "brim", "build", str(source), str(out), *arguments]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 5
    assert "cannot be written to stdout: No space left on device" in result.stderr
    assert "bug" not in result.stderr
    brim("verify", out, source)


@pytest.mark.parametrize("option", ["--append", "--update", "--fresh"])
def test_refused_for_lack_of_disk_changes_nothing(
    many_files: Callable[..., Path], small_disk: Path, tmp_path: Path, option: str
) -> None:
    """A run that is refused for lack of disk space leaves the existing dataset complete; with space it succeeds."""
    source, out = many_files(4, size=500_000, name="old"), small_disk / "out"
    brim("build", source, out, "--rows-per-shard", "1", "--quiet")
    before = tree_digest(out)
    larger = many_files(9, size=1_000_000, name="larger")
    if option == "--append":
        for path in larger.iterdir():
            path.rename(path.with_name(f"new-{path.name}"))
    refused = brim("build", larger, out, "--rows-per-shard", "1", option, check=5).stderr
    assert "nothing was written" in refused
    assert tree_digest(out) == before
    brim("verify", out, source)
    brim("unpack", out, tmp_path / "back")
    grow(small_disk, 40)
    brim("build", larger, out, "--rows-per-shard", "1", option)
    brim("verify", out, larger)


def test_refused_for_lack_of_disk_leaves_no_new_folder(many_files: Callable[..., Path], small_disk: Path) -> None:
    brim("build", many_files(12, size=1_000_000), small_disk / "out", check=5)
    assert not (small_disk / "out").exists()


def test_fresh_counts_the_room_that_it_makes(many_files: Callable[..., Path], small_disk: Path) -> None:
    source, out = many_files(5, size=1_000_000), small_disk / "out"
    brim("build", source, out, "--rows-per-shard", "1", "--quiet")
    brim("build", source, out, "--rows-per-shard", "2", "--quiet", "--fresh")
    brim("verify", out, source)
