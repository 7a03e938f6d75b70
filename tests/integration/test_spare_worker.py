"""Workers that wait for the next call of a program: used for the same, never for another's, and not for long."""

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
from brim.execution.worker_process import caller_bytes, end_spares, start_spare, take_spares
from brim.memory.meter import tree_bytes

pytest.importorskip("datasets")
MAP = "brim.compute.steps.map_step"


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    end_spares()
    yield
    end_spares()


def whose(row: dict[str, Any]) -> dict[str, Any]:
    import colorsys  # noqa: F401  nothing else imports it

    return {"pid": os.getpid(), "seen": "colorsys" in sys.modules}


def another(row: dict[str, Any]) -> dict[str, Any]:
    return {"pid": os.getpid(), "seen": "colorsys" in sys.modules}


def run(tmp_path: Path, function: Any) -> tuple[int, bool]:
    """The process that a function ran in, and whether it had what the first one imports."""
    import datasets

    rows = datasets.Dataset.from_dict({"n": [1, 2, 3]})
    made = brim.map(rows, function, cache_dir=tmp_path / str(time.monotonic_ns()), memory="1GB")
    (pid,) = set(made["pid"])
    return pid, made["seen"][0]


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
    """A function finds its worker of the call before; another one finds a worker that has nothing of the first."""
    first, _ = run(tmp_path, whose)
    assert run(tmp_path, whose) == (first, True)
    other, seen = run(tmp_path, another)
    assert other != first
    assert not seen
    assert gone(first)


def test_another_environment_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker knows the environment and the folder that it was started in: it is not used in another."""
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
    """A worker that is kept is told of its end, as one that is not is."""
    monkeypatch.setenv("BRIM_TEST_ENDED", str(tmp_path / "ended"))
    run(tmp_path, registered)
    assert not (tmp_path / "ended").exists()
    end_spares()
    assert (tmp_path / "ended").exists()


def test_not_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "KEPT_S", 0.05)
    pid, _ = run(tmp_path, another)
    assert gone(pid)
    deadline = time.monotonic() + 20
    while worker_process._KEPT.workers and time.monotonic() < deadline:  # another one may have been kept later
        time.sleep(0.02)
    assert not take_spares(MAP, 1, None)


def test_one_that_died_is_not_missed(tmp_path: Path) -> None:
    """Killed between two calls, or while it loads: the next call starts its own."""
    pid, _ = run(tmp_path, another)
    for worker, _ in worker_process._KEPT.workers:
        os.kill(worker.pid, signal.SIGKILL)
    assert gone_or_zombie(pid)
    again, _ = run(tmp_path, another)
    assert again != pid
    end_spares()
    start_spare(MAP)
    os.kill(worker_process._KEPT.workers[0][0].pid, signal.SIGKILL)
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
    """A script without a main guard, that forks too: nobody is left, and the child of the fork ends nobody's worker."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, datasets, brim\n"
        "from brim.execution import worker_process\n"
        "rows = datasets.Dataset.from_dict({'n': [1]})\n"
        f"brim.map(rows, lambda row: {{'m': 1}}, cache_dir={str(tmp_path / 'cache')!r}, memory='1GB')\n"
        "if os.fork() == 0:\n"
        "    assert not worker_process._KEPT.workers\n"
        "    sys.exit(0)\n"
        "assert os.wait()[1] == 0\n"
        "assert not any(worker.ended for worker, _ in worker_process._KEPT.workers)\n"
        "print(*(worker.pid for worker, _ in worker_process._KEPT.workers))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2  # one that has run the function, and one that has run none
    assert all(gone(pid) for pid in pids)


def test_it_counts_in_the_limit(tmp_path: Path) -> None:
    """Those that are there are the job's own: they are not beside it, where nobody would count them."""
    import datasets

    from brim.memory.meter import tree

    start_spare(MAP)
    spare = worker_process._KEPT.workers[0][0].pid
    rows = datasets.Dataset.from_dict({"n": list(range(4))})
    made = brim.map(rows, another, cache_dir=tmp_path / "cache", memory="1GB", workers=None)
    assert set(made["pid"]) == {spare}
    assert spare in tree([os.getpid()])


def test_a_small_rest_is_left_to_those_who_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """4.2 MB and 0.4 MB: the second process would have loaded its libraries when all is done. Not for long, though."""
    from types import SimpleNamespace

    from brim.execution import process_backend as processes

    now = 10.0
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now))
    backend: Any = object.__new__(processes.ProcessBackend)
    backend._work = SimpleNamespace(source=SimpleNamespace(total_bytes=4_600_000))
    backend._largest_bytes, backend._began, backend._spares, backend._workers = 0, now, (), ("first",)
    queue: Any = SimpleNamespace(first=SimpleNamespace(unit=SimpleNamespace(bytes=4_200_000)), ahead=2)
    assert backend._is_small_rest(queue, starting=1)
    for change, value in (("_spares", ("there",)), ("_workers", ())):
        with monkeypatch.context() as changed:
            changed.setattr(backend, change, value)
            assert not backend._is_small_rest(queue, starting=1)
    with monkeypatch.context() as changed:
        changed.setattr(queue, "ahead", 3)
        assert not backend._is_small_rest(queue, starting=1)
    for total in (None, 6_000_000):
        with monkeypatch.context() as changed:
            changed.setattr(backend._work.source, "total_bytes", total)
            assert not backend._is_small_rest(queue, starting=1)
    now = 12.0
    assert not backend._is_small_rest(queue, starting=1)


def test_spares_are_not_the_callers() -> None:
    """What waits for a job is counted by the job; what else the program has started is the caller's."""
    start_spare(MAP)
    (spare,) = (worker for worker, _ in worker_process._KEPT.workers)
    until = time.monotonic() + 60
    while spare.held_bytes() < 20 << 20 and time.monotonic() < until:
        time.sleep(0.02)
    before = caller_bytes()
    assert before + (10 << 20) < tree_bytes()
    fat = "held = b'x' * (200 << 20); print(flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", fat], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        assert caller_bytes() - before > 200 << 20
    finally:
        other.kill()
        other.communicate()
