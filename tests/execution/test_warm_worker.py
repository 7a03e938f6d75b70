"""The warm worker, which waits up to a minute for the next call with the same function."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import brim
from brim.execution import worker_process
from brim.execution.worker_process import caller_bytes, end_warm_worker, start_warm_worker, take_warm_worker
from brim.memory.meter import tree_bytes

pytest.importorskip("datasets")
MAP = "brim.compute.steps.map_step"


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    end_warm_worker()
    yield
    end_warm_worker()


def whose(row: dict[str, Any]) -> dict[str, Any]:
    import colorsys  # noqa: F401  nothing else imports it

    return {"pid": os.getpid(), "seen": "colorsys" in sys.modules}


def another(row: dict[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid(), "seen": "colorsys" in sys.modules}


def run(tmp_path: Path, function: Any) -> tuple[int, bool]:
    """Return the process id that a function ran in, and whether the module of `whose` was already imported."""
    import datasets

    rows = datasets.Dataset.from_dict({"n": [1, 2, 3]})
    mapped = brim.map(rows, function, cache_dir=tmp_path / str(time.monotonic_ns()), memory="1GB")
    (pid,) = set(mapped["pid"])
    return pid, mapped["seen"][0]


def warm() -> worker_process.WorkerProcess:
    assert worker_process._WARM.worker is not None
    return worker_process._WARM.worker


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_the_same_again_and_never_anothers(tmp_path: Path) -> None:
    """The next call with the same function uses the same worker. Another function gets a new worker."""
    first, _ = run(tmp_path, whose)
    assert run(tmp_path, whose) == (first, True)
    second, observed = run(tmp_path, another)
    assert second != first
    assert not observed
    assert gone(first)


def test_another_environment_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm worker is not used after the environment or the working folder has changed."""
    first, _ = run(tmp_path, another)
    monkeypatch.setenv("BRIM_TEST_OTHER", "1")
    second, _ = run(tmp_path, another)
    assert second != first
    monkeypatch.chdir(tmp_path)
    third, _ = run(tmp_path, another)
    assert third not in (first, second)
    assert gone(first)
    assert gone(second)


def registered(row: dict[str, Any]) -> dict[str, Any]:
    import atexit

    atexit.register(Path(os.environ["BRIM_TEST_ENDED"]).touch)
    return {"pid": os.getpid(), "seen": False}


def test_what_a_function_wants_done_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit handlers of a warm worker run when it is closed."""
    monkeypatch.setenv("BRIM_TEST_ENDED", str(tmp_path / "ended"))
    run(tmp_path, registered)
    assert not (tmp_path / "ended").exists()
    end_warm_worker()
    assert (tmp_path / "ended").exists()


def test_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm worker exits when its waiting time is over, with or without an earlier call."""
    monkeypatch.setattr(worker_process, "WAIT_S", 0.05)
    pid, _ = run(tmp_path, another)
    assert gone_or_zombie(pid)
    end_warm_worker()
    start_warm_worker(MAP)
    worker = warm()
    assert worker.wait(20) == 0  # a zombie with a running thread could still be taken
    assert take_warm_worker(MAP, 1, None) is None


def test_one_that_died_is_not_missed(tmp_path: Path) -> None:
    """A warm worker that was killed while waiting or loading is replaced by the next call."""
    pid, _ = run(tmp_path, another)
    os.kill(warm().pid, signal.SIGKILL)
    assert gone_or_zombie(pid)
    repeated, _ = run(tmp_path, another)
    assert repeated != pid
    end_warm_worker()
    start_warm_worker(MAP)
    os.kill(warm().pid, signal.SIGKILL)
    run(tmp_path, another)


def gone_or_zombie(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_it_ends_with_the_program(tmp_path: Path) -> None:
    """A warm worker exits with its program, even without a main guard. A forked child does not terminate it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, datasets, brim\n"
        "from brim.execution import worker_process\n"
        "rows = datasets.Dataset.from_dict({'n': [1]})\n"
        f"brim.map(rows, lambda row: {{'m': 1}}, cache_dir={str(tmp_path / 'cache')!r}, memory='1GB')\n"
        "if os.fork() == 0:\n"
        "    assert worker_process._WARM.worker is None\n"
        "    sys.exit(0)\n"
        "assert os.wait()[1] == 0\n"
        "assert not worker_process._WARM.worker.has_exited\n"
        "print(worker_process._WARM.worker.pid)\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert gone(int(result.stdout))


def test_it_counts_in_the_limit(tmp_path: Path) -> None:
    """A warm worker that a job uses is part of its process tree, so it counts toward the memory limit."""
    import datasets

    from brim.memory.meter import tree

    start_warm_worker(MAP)
    spare = warm().pid
    rows = datasets.Dataset.from_dict({"n": list(range(4))})
    mapped = brim.map(rows, another, cache_dir=tmp_path / "cache", memory="1GB", workers=None)
    assert set(mapped["pid"]) == {spare}
    assert spare in tree([os.getpid()])


def test_spares_are_not_the_callers() -> None:
    """A waiting warm worker does not count as memory of the caller, but other child processes do."""
    start_warm_worker(MAP)
    spare = warm()
    until = time.monotonic() + 60
    while spare.held_bytes() < 20 << 20 and time.monotonic() < until:
        time.sleep(0.02)
    before = caller_bytes()
    assert before + (10 << 20) < tree_bytes()
    fat = "held = b'x' * (200 << 20); print(flush=True); input()"
    second = subprocess.Popen([sys.executable, "-c", fat], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert second.stdout is not None
        second.stdout.readline()
        assert caller_bytes() - before > 200 << 20
    finally:
        second.kill()
        second.communicate()
