"""Tensor writers that are killed or run out of disk space, and partial files that are damaged."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import brim
from brim.errors import DestinationUnavailableError, InputError, SourceError
from brim.tensors import tensor_writer
from tests.conftest import tree_digest
from tests.guarantees.test_disk_full import grow

pytest.importorskip("safetensors", reason="what a killed writer leaves is not proved here: no safetensors")

ROWS, STEP = 4000, 100
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "known": ("a.safetensors", {"rows": ROWS}),
    "unknown": ("a.safetensors", {}),
    "shards": ("a.safetensors", {"shard_size": "200kB"}),
    "npy": ("a.npy", {"rows": ROWS}),
    "parquet": ("a.parquet", {}),
}


def job(folder: Path, kind: str, pause_s: float = 0.0, replace: bool = False) -> int:
    """Write all rows, or the missing ones; return the number of existing rows."""
    name, options = KINDS[kind]
    text = np.random.default_rng(0).random((ROWS, 64), dtype=np.float32)
    number = np.arange(ROWS)
    spec = {"text": (64, "float32"), "number": "int64"}
    options = {**options, "resume": not replace, "overwrite": replace, "checkpoint_rows": 3 * STEP}
    with brim.TensorWriter(folder / name, tensors=spec, **options) as writer:
        completed = writer.rows_done
        assert completed % STEP == 0
        for index in range(completed, ROWS, STEP):
            writer.append(text=text[index : index + STEP], number=number[index : index + STEP])
            time.sleep(pause_s)
    return completed


# Forking from a process that has imported everything gives a writer that can be killed from its start.
NURSERY = """
import os, sys
from pathlib import Path
from tests.guarantees.test_tensor_faults import job
print("ready", flush=True)
while line := sys.stdin.readline():
    folder, kind = line.split()
    pid = os.fork()
    if pid == 0:
        job(Path(folder), kind, 0.003)
        os._exit(0)
    print(pid, flush=True)
    sys.stdin.readline()
    print(os.waitpid(pid, 0)[1], flush=True)
"""


class Nursery:
    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def run(self, folder: Path, kind: str, kill_after_s: float | None = None, first_receipt: bool = False) -> float:
        """Return the lifetime of the job in seconds; it is killed this long after its start or its first receipt."""
        self._say(f"{folder} {kind}")
        pid, started_at = int(self._line()), time.monotonic()
        if kill_after_s is not None:
            while first_receipt and not _has_receipt(folder / KINDS[kind][0]) and time.monotonic() - started_at < 5:
                time.sleep(0.002)
            time.sleep(kill_after_s)
            os.kill(pid, signal.SIGKILL)
        self._say("wait")  # until this message the pid stays reserved, even if the process has ended
        status = int(self._line())
        assert status in (0, signal.SIGKILL)
        return time.monotonic() - started_at

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _has_receipt(path: Path) -> bool:
    try:
        return b'"type": "rows"' in (path.with_name(f"{path.name}.partial") / "receipts.jsonl").read_bytes()
    except FileNotFoundError:
        return False


def visible_rows(path: Path) -> int:
    """Return the number of rows that a reader sees under the file's name: all or none."""
    try:
        if path.suffix == ".parquet":
            return pq.ParquetFile(path).metadata.num_rows if path.exists() else 0
        return len(next(iter(brim.open_tensors(path).values())))
    except SourceError:
        return 0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    created = Nursery()
    yield created
    created.close()


@pytest.mark.long
@pytest.mark.parametrize(("kind", "moments"), [(kind, 30 if kind == "known" else 12) for kind in KINDS])
def test_killed_at_random_moments(tmp_path: Path, nursery: Nursery, kind: str, moments: int) -> None:
    """After kill -9 the rows of the last receipt exist, and finishing the file gives the same bytes."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    lived = nursery.run(whole, kind)
    undisturbed = tree_digest(whole)
    when = random.Random(kind)
    landed = 0
    for number in range(moments):
        killed.mkdir()
        if number % 3:  # most kills happen during the writing, on a slow machine too
            nursery.run(killed, kind, when.uniform(0, lived / 2), first_receipt=True)
        else:
            nursery.run(killed, kind, when.uniform(0, lived * 1.1))
        assert visible_rows(killed / KINDS[kind][0]) in (0, ROWS)
        landed += 0 < job(killed, kind) < ROWS
        assert tree_digest(killed) == undisturbed
        shutil.rmtree(killed)
    assert landed >= moments // 4, "too few kills fell into the writing to prove anything"


def test_killed_again_and_again(tmp_path: Path, nursery: Nursery) -> None:
    """A job that is killed repeatedly completes, and progresses every time that it wrote a receipt."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    lived = nursery.run(whole, "unknown")
    for _ in range(12):
        nursery.run(killed, "unknown", lived / 4)
    job(killed, "unknown")
    assert tree_digest(killed) == tree_digest(whole)


class Crash(BaseException):
    """Simulates the death of the process."""


@pytest.mark.parametrize(("kind", "replacing"), [*((kind, False) for kind in KINDS), ("shards", True), ("npy", True)])
def test_a_crash_at_every_step_of_finishing(
    tmp_path: Path, kind: str, replacing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash at any step of finishing the files, the next run gives the same files."""
    (tmp_path / "whole").mkdir()
    job(tmp_path / "whole", kind)
    undisturbed = tree_digest(tmp_path / "whole")
    name, options = KINDS[kind]
    earlier = {"text": (64, "float32"), "number": "int64"} if replacing else None
    steps = 0
    for step in range(100):
        folder = tmp_path / f"crash{step}"
        folder.mkdir()
        with monkeypatch.context() as patch:
            if earlier is not None:
                with brim.TensorWriter(folder / name, tensors=earlier, **{**options, "rows": 0}):
                    pass
            crashed = _crash_at(step, patch)
            with contextlib.suppress(Crash):
                job(folder, kind, replace=replacing)
        if not crashed():
            assert tree_digest(folder) == undisturbed
            break
        steps += 1
        assert visible_rows(folder / name) in (0, ROWS)
        assert job(folder, kind) in (0, ROWS)
        assert tree_digest(folder) == undisturbed
    assert steps >= 3


def _crash_at(step: int, patch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Make the step-th durable operation of finishing, and all later ones, raise Crash."""
    acts = 0

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal acts
            if threading.current_thread() is not threading.main_thread():
                return act(*arguments, **options)  # a sync during the writing is not a step of finishing
            if acts >= step:
                acts = step + 1
                raise Crash
            acts += 1
            return act(*arguments, **options)

        return run

    from brim.tensors import partial_file

    for name in ("rename", "sync_folder"):
        patch.setattr(partial_file, name, counted(getattr(partial_file, name)))
    patch.setattr(partial_file.CheckpointLog, "finish", counted(partial_file.CheckpointLog.finish))
    patch.setattr(partial_file.shutil, "rmtree", counted(shutil.rmtree))
    return lambda: acts > step


def test_damage_is_found_and_written_again(tmp_path: Path) -> None:
    """After a flipped bit in data with a receipt, the rows from that block on are written again, with a warning."""
    text = np.random.default_rng(0).random((100, 8), dtype=np.float32)
    path = tmp_path / "a.npy"
    writer = brim.TensorWriter(path, 100, text=(8, "float32"), checkpoint_rows=10)
    for index in range(0, 90, 10):
        writer.append(text=text[index : index + 10])
    with pytest.raises(InputError):
        writer.close()
    [part] = (tmp_path / "a.npy.partial").glob("*.part")
    data = bytearray(part.read_bytes())
    data[128 + 45 * 32] ^= 1
    part.write_bytes(data)
    with pytest.warns(UserWarning, match="those after row 40 are damaged"):
        resumed = brim.TensorWriter(path, 100, text=(8, "float32"), resume=True)
    assert resumed.rows_done == 40
    resumed.append(text=text[40:60])
    with pytest.raises(InputError):
        resumed.close()
    with brim.TensorWriter(path, 100, text=(8, "float32"), resume=True) as last:  # without a warning
        assert last.rows_done == 60
        last.append(text=text[60:])
    np.testing.assert_array_equal(np.load(path), text)


@pytest.mark.parametrize("harm", ["torn", "flipped", "gone"])
def test_damaged_receipts(tmp_path: Path, harm: str) -> None:
    """A torn or flipped receipt counts as missing; without receipts all rows are written again."""
    text = np.arange(400, dtype=np.float32).reshape(100, 4)
    path, receipts = tmp_path / "a.npy", tmp_path / "a.npy.partial" / "receipts.jsonl"
    writer = brim.TensorWriter(path, 100, text=(4, "float32"), checkpoint_rows=10)
    for index in range(0, 50, 10):
        writer.append(text=text[index : index + 10])
    with pytest.raises(InputError):
        writer.close()
    lines = receipts.read_bytes()
    created = {"torn": lines[:-5], "flipped": lines.replace(b'"rows": 50', b'"rows": 60'), "gone": b""}[harm]
    receipts.write_bytes(created)
    with brim.TensorWriter(path, 100, text=(4, "float32"), resume=True) as resumed:
        assert resumed.rows_done == {"torn": 40, "flipped": 40, "gone": 0}[harm]
        resumed.append(text=text[resumed.rows_done :])
    np.testing.assert_array_equal(np.load(path), text)


def test_a_disk_that_fails_while_syncing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed sync the writer reports the error at its next call, and the receipts decide on resuming."""
    text = np.arange(400, dtype=np.float32).reshape(100, 4)
    path = tmp_path / "a.npy"
    writer = brim.TensorWriter(path, 100, text=(4, "float32"), checkpoint_rows=20)
    writer.append(text=text[:20])
    writer.checkpoint()

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        writer.append(text=text[20:40])
        with pytest.raises(DestinationUnavailableError, match="resume=True"):
            writer.checkpoint()
    for act in (writer.checkpoint, writer.close, lambda: writer.append(text=text[40:60])):
        with pytest.raises((DestinationUnavailableError, InputError)):
            act()
    with brim.TensorWriter(path, 100, text=(4, "float32"), resume=True) as resumed:
        assert resumed.rows_done == 20
        resumed.append(text=text[20:])
    np.testing.assert_array_equal(np.load(path), text)


@pytest.mark.parametrize("position", [1, 2])
def test_an_interrupt_between_two_tensors(tmp_path: Path, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two tensors of a batch leaves no row in only one of them."""
    from brim.tensors.partial_layout import Stream

    path, spec = tmp_path / "a.safetensors", {"x": (3, "float32"), "y": (2, "float32")}
    x, y = np.arange(120, dtype=np.float32).reshape(40, 3), np.arange(80, dtype=np.float32).reshape(40, 2)
    commit, calls = Stream.commit, 0

    def interrupted(stream: Stream) -> None:
        nonlocal calls
        calls += 1
        if calls == 4 + position:
            raise KeyboardInterrupt
        commit(stream)

    def go_on() -> None:
        with brim.TensorWriter(path, 40, tensors=spec, resume=True, checkpoint_rows=10) as writer:
            for start in range(writer.rows_done, 40, 10):
                writer.append(x=x[start : start + 10], y=y[start : start + 10])

    monkeypatch.setattr(Stream, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go_on()
    go_on()
    np.testing.assert_array_equal(brim.open_tensors(path)["x"], x)
    np.testing.assert_array_equal(brim.open_tensors(path)["y"], y)


def test_too_small_from_the_start(small_disk: Path) -> None:
    """If the output cannot fit, the run fails before the first byte and states both sizes."""
    path = small_disk / "a.safetensors"
    with pytest.raises(
        DestinationUnavailableError, match=r"10\.0 MB of disk, and 8\.\d+ MB are left.*Make room"
    ) as caught:
        brim.TensorWriter(path, 10_000, text=(250, "float32"))
    assert caught.value.exit_code == 5
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_full_in_the_middle(small_disk: Path, kind: str) -> None:
    """If other data fills the disk during the run, the rows of the last receipt remain and the run can be resumed."""
    text = np.random.default_rng(0).random((5000, 250), dtype=np.float32)
    rows = 5000 if kind == "known" else None
    path = small_disk / "a.safetensors"

    def go_on(resume: bool) -> int:
        with brim.TensorWriter(path, rows, text=(250, "float32"), checkpoint_rows=500, resume=resume) as writer:
            completed = writer.rows_done
            for index in range(completed, 5000, 100):
                writer.append(text=text[index : index + 100])
                if index == 2000 and not resume:
                    (small_disk / "ballast").write_bytes(bytes(4_000_000))
        return completed

    with pytest.raises(
        DestinationUnavailableError, match=r"destination is full.*Free disk space, then open it again with resume"
    ):
        go_on(resume=False)
    assert not path.exists()
    grow(small_disk, 40)
    assert 2000 <= go_on(resume=True) < 5000
    np.testing.assert_array_equal(brim.open_tensors(path)["text"], text)


def test_full_while_it_is_put_together(small_disk: Path) -> None:
    """Without a known number of rows, finishing needs the same space again; a retry needs no new data."""
    text = np.random.default_rng(0).random((5000, 250), dtype=np.float32)
    path = small_disk / "a.safetensors"
    writer = brim.TensorWriter(path, text=(250, "float32"))
    writer.append(text=text)
    with pytest.raises(DestinationUnavailableError, match="full"):
        writer.close()
    grow(small_disk, 40)
    with brim.TensorWriter(path, text=(250, "float32"), resume=True) as resumed:
        assert resumed.rows_done == 5000
    np.testing.assert_array_equal(brim.open_tensors(path)["text"], text)
    assert [file.name for file in small_disk.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("kind", ["list", "iterator"])
def test_save_file_goes_on_after_a_full_disk(small_disk: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a full disk, released batches are in the partial file, so the same call with the same lists finishes it."""
    monkeypatch.setattr(tensor_writer, "SYNC_BYTES", 300_000)
    text = np.random.default_rng(0).random((5000, 250), dtype=np.float32)
    batches = np.array_split(text, 50)
    inputs: dict[str, Any] = {"text": batches if kind == "list" else iter(batches)}
    inputs["more"] = np.array_split(text[:1000], 7)
    path = small_disk / "a.safetensors"
    (small_disk / "ballast").write_bytes(bytes(4_000_000))
    monkeypatch.setattr("brim.tensors.partial_file.free_bytes", lambda folder: None)  # as without an option
    with pytest.raises(DestinationUnavailableError, match="call save_file again with the same lists"):
        brim.save_file(inputs, path)
    if kind == "list":
        assert 0 < len(batches) < 50
        assert batches[0] is not None
    grow(small_disk, 40)
    brim.save_file(inputs, path)
    np.testing.assert_array_equal(brim.open_tensors(path)["text"], text)
    np.testing.assert_array_equal(brim.open_tensors(path)["more"], text[:1000])
