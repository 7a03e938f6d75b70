"""Sources that change, move or break while they are packaged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import brim as api
from brim.errors import SourceChangedError
from brim.progress import Progress
from tests.conftest import random_bytes, tree_digest, write_files
from tests.forked import brim


class Meddler(Progress):
    """Runs an action on the source after the first finished shard."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def shard(self, name: str, size: int, sha256: str, method: str) -> None:
        if self._act:
            self._act()
            self._act = None


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
        lambda path: os.truncate(path, 10),
        lambda path: path.unlink(),
        _flip,
    ],
    ids=["grows", "shrinks", "vanishes", "changes"],
)
def test_a_file_that_changes_during_the_build(
    many_files: Callable[..., Path], tmp_path: Path, change: Callable[[Path], Any]
) -> None:
    """The error names the changed file, and its shard is not written.

    Earlier shards exist, and the build resumes once the source has its original content.
    """
    source, out = many_files(6), tmp_path / "out"
    victim = source / "f004.bin"
    original, times = victim.read_bytes(), victim.stat()
    plan = api.plan(source, out, rows_per_shard=1, workers=1)
    with pytest.raises(SourceChangedError, match=r"f004\.bin") as caught:
        plan.run(Meddler(lambda: change(victim)))
    assert caught.value.facts["path"] == "f004.bin"
    names = sorted(p.name for p in (out / "data").iterdir())
    assert "train-00000-of-00006.parquet" in names
    assert "train-00004-of-00006.parquet" not in names
    assert not [name for name in names if name.startswith(".")]
    victim.write_bytes(original)
    os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))
    brim("build", source, out, "--rows-per-shard", "1")
    brim("verify", out, source)


def test_content_that_changed_between_runs(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """A shard whose source has the same size and a new date is compared by content.

    It is kept if the content is equal and written again if not.
    """
    source, out = many_files(4), tmp_path / "out"
    brim("build", source, out, "--rows-per-shard", "1")
    os.utime(source / "f000.bin", ns=(7, 7))
    _flip(source / "f001.bin")
    result = brim("build", source, out, "--rows-per-shard", "1")
    assert "1 written, 3 kept" in result.stdout
    brim("verify", out, source)
    assert "0 written, 4 kept" in brim("build", source, out, "--rows-per-shard", "1").stdout


def test_a_source_that_was_moved_or_copied(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """The build resumes from a moved source and from a copy without its modification times."""
    source, out = many_files(6), tmp_path / "out"
    whole = tmp_path / "whole"
    brim("build", source, whole, "--rows-per-shard", "1")
    stop = tmp_path / "stop"
    plan = api.plan(source, out, rows_per_shard=1, workers=1, stop_file=stop)
    with pytest.raises(api.BrimError):
        plan.run(Meddler(lambda: (stop.touch(), time.sleep(0.3))[0]))
    rows_done = len(list((out / "data").iterdir()))
    assert 0 < rows_done < 6
    moved_path = tmp_path / "elsewhere" / "renamed"
    moved_path.parent.mkdir()
    source.rename(moved_path)
    assert (
        f"{6 - rows_done} written, {rows_done} kept" in brim("build", moved_path, out, "--rows-per-shard", "1").stdout
    )
    assert tree_digest(out) == tree_digest(whole)
    copied = tmp_path / "copied"
    shutil.copytree(moved_path, copied, copy_function=shutil.copyfile)
    repeated = brim("build", copied, out, "--rows-per-shard", "1")
    assert "0 written, 6 kept" in repeated.stdout
    assert tree_digest(out / "data") == tree_digest(whole / "data")


def test_update_keeps_what_is_unchanged(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """Files added at the end change only the last shard; the others are renamed and not written again."""
    source, out = many_files(7), tmp_path / "out"
    options = ["--rows-per-shard", "2"]
    brim("build", source, out, *options)
    before = {p.stat().st_ino for p in (out / "data").iterdir()}
    write_files(source, {"g.bin": b"new", "h.bin": b"new too"})
    assert "2 written, 3 kept" in brim("build", source, out, *options, "--update").stdout
    assert len(before & {p.stat().st_ino for p in (out / "data").iterdir()}) == 3
    brim("verify", out, source)
    fresh = tmp_path / "fresh"
    brim("build", source, fresh, *options)
    assert tree_digest(out) == tree_digest(fresh)


def test_update_when_a_value_comes_first(tmp_path: Path) -> None:
    """With --shard-by, a new value moves the shards of the others and writes only its own."""
    source = write_files(tmp_path / "source", {f"{i}.bin": random_bytes(900 + i, i) for i in range(8)})
    table, out = source / "t.csv", tmp_path / "out"

    def rows(*names: str) -> None:
        table.write_text("file,who\n" + "".join(f"{i}.bin,{n}\n" for i, n in enumerate(names)))

    rows("b", "b", "c", "c", "d", "d")
    brim("build", table, out, "--shard-by", "who")
    table.write_text("file,who\n6.bin,a\n0.bin,b\n1.bin,b\n2.bin,c\n3.bin,c\n4.bin,d\n5.bin,d\n")
    assert "1 written, 3 kept" in brim("build", table, out, "--shard-by", "who", "--update").stdout
    brim("verify", out, table)
    table.write_text("file,who\n2.bin,c\n3.bin,c\n4.bin,d\n5.bin,d\n6.bin,a\n7.bin,e\n")
    assert "1 written, 3 kept" in brim("build", table, out, "--shard-by", "who", "--update").stdout
    brim("verify", out, table)
    assert not (out / ".brim" / "keep").exists()


def test_a_killed_update_goes_on(many_files: Callable[..., Path], tmp_path: Path) -> None:
    """An update that is killed at any of its steps and run again gives the result of an undisturbed one."""
    source, out = many_files(4, size=2_000), tmp_path / "out"
    options = ["--rows-per-shard", "1"]
    brim("build", source, out, *options)
    (source / "f000.bin").unlink()
    write_files(source, {"a.bin": b"first", "z.bin": b"last"})
    expected = tmp_path / "wanted"
    brim("build", source, expected, *options)
    for calls in range(1, 150, 4):
        trial = tmp_path / "trial"
        shutil.copytree(out, trial)
        # The process exits at its n-th fsync, as by kill -9: each fsync marks a step of the protocol.
        code = (
            "import os, sys\n"
            f"left = [{calls}]\n"
            "real = os.fsync\n"
            "def fsync(fd):\n"
            "    left[0] -= 1\n"
            "    if left[0] == 0: os._exit(137)\n"
            "    return real(fd)\n"
            "os.fsync = fsync\n"
        )
        arguments = ["build", str(source), str(trial), *options, "--update", "--workers", "1", "--quiet"]
        killed = brim(*arguments, check=None, before=code)
        brim("build", source, trial, *options, "--update")
        assert tree_digest(trial) == tree_digest(expected), f"killed at step {calls}"
        shutil.rmtree(trial)
        if killed.returncode == 0:
            assert calls > 20
            break
    else:
        pytest.fail("the update never came to its end")


def _becomes_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("verb", ["build", "verify", "check", "unpack"])
def test_a_source_file_that_became_a_fifo_is_named_and_not_waited_for(tmp_path: Path, verb: str) -> None:
    """The error names the FIFO, and the command does not block in opening it until a writer appears."""
    source = write_files(tmp_path / "in", {f"{n}.bin": random_bytes(2000, n) for n in range(3)})
    out = tmp_path / "out"
    if verb == "build":
        brim("plan", source, out, "--save", tmp_path / "job.plan")
        _becomes_fifo(source / "1.bin")
        result = ended("build", "--plan", tmp_path / "job.plan")
    else:
        brim("build", source, out, "--rows-per-shard", "1", "--quiet")
        _becomes_fifo(source / "1.bin" if verb != "unpack" else out / "data" / "train-00001-of-00003.parquet")
        result = ended(*{"verify": ("verify", out, source), "check": ("check", source, "--deep"),
                       "unpack": ("unpack", out, tmp_path / "back")}[verb])  # fmt: skip
    assert result.returncode in (2, 3), result.stderr
    assert "1.bin" in result.stderr + result.stdout or "train-00001" in result.stderr
    assert "bug" not in result.stderr


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "rows.arrow", "rows.txt"])
def test_rows_of_a_file_that_became_a_fifo_are_not_waited_for(tmp_path: Path, name: str) -> None:
    """A source that becomes a FIFO between plan and part of a computed job is an error and does not block."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    table, path = pa.table({"text": [f"row {n}" for n in range(50)]}), tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(table, path)
    elif name.endswith("arrow"):
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    elif name.endswith("csv"):
        pyarrow.csv.write_csv(table, path)
    else:
        path.write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(50)))
    (tmp_path / "step.py").write_text("def same(row):\n    return row\n")
    brim("map", path, tmp_path / "out", "--fn", tmp_path / "step.py:same", "--save", tmp_path / "job.plan")
    _becomes_fifo(path)
    result = ended("map", "--plan", tmp_path / "job.plan", "--part", "1/1")
    assert result.returncode == 2, result.stderr
    assert name in result.stderr


def ended(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command that must exit within a minute; if it hangs, it is killed and the test fails."""
    return subprocess.run(
        [sys.executable, "-m", "brim", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
