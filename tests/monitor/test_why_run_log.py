"""brim's own logs as evidence: stops, kills, restarts, a watcher that was killed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brim.monitor.oom import brim_log
from brim.monitor.oom.kills import Kill
from brim.monitor.oom.why import why
from brim.monitor.run_log import read_runs

NOW = 1_780_000_000.0
GB = 10**9
HEAD = {
    "type": "head",
    "time": "2026-05-28T20:00:00+00:00",
    "boot_id": "boot-a",
    "machine": {"ram_bytes": 64 * GB, "swap_bytes": 0, "cpus": 8, "kernel": "6.8"},
    "limit": {"bytes": 40 * GB, "why": "--memory"},
    "command": ["python", "train.py", "--token", "***"],
    "pid": 999_999_99,
    "unknown": {"field": 1},
}


def sample(t: float, total: int, available: int = 30 * GB) -> dict[str, Any]:
    process = {"pid": 4242, "name": "python", "anon_bytes": total, "shmem_bytes": 0, "swap_bytes": 0, "file_bytes": 5}
    return {
        "type": "sample", "t": t, "anon_bytes": total, "shmem_bytes": 0, "swap_bytes": 0, "file_bytes": 5,
        "total_bytes": total, "available_bytes": available, "swap_free_bytes": 0, "processes": [process],
    }  # fmt: skip


def rising(available: int = 30 * GB) -> list[dict[str, Any]]:
    return [sample(NOW - 300 + t, (1 + t // 10) * GB, available) for t in range(0, 200, 5)]


def write(path: Path, entries: list[dict[str, Any]], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + tail)
    return path


def kills(path: Path, boot: str = "boot-a", now: float = NOW) -> list[Kill]:
    return [kill for run in read_runs(path) for kill in brim_log.kills_of(run, brim_log.Present(boot, now))]


def test_brim_stopped_it(tmp_path: Path) -> None:
    """A stop or kill by brim is certain, with its limit and the curve of the last minute."""
    events = [
        {"type": "event", "t": NOW - 105, "kind": "stop", "text": "40.0 GB of 40.0 GB"},
        {"type": "event", "t": NOW - 101, "kind": "kill", "text": "did not end"},
        {"type": "end", "t": NOW - 100, "exit_code": -9, "signal": 9, "peak_bytes": 1},
    ]
    (kill,) = kills(write(tmp_path / "a.jsonl", [HEAD, *rising(), *events]))
    assert (kill.killer, kill.effect, kill.sure, kill.bound.bytes) == ("brim", "killed", "certain", 40 * GB)
    assert kill.command == "python train.py --token ***"
    assert len(kill.curve) == 13
    assert kill.curve[-1].t - kill.curve[0].t == 60
    assert kill.tasks[0].pid == 4242


def stopped(path: Path, samples: list[dict[str, Any]]) -> Path:
    """Write the log of a run that was asked to stop at its last sample and freed its memory while it exited."""
    events = [
        {"type": "event", "t": NOW - 104, "kind": "stop", "text": "20.0 GB of 40.0 GB"},
        sample(NOW - 102, GB),
        {"type": "end", "t": NOW - 100, "exit_code": 0, "signal": None, "stopped": "stop"},
    ]
    return write(path, [HEAD, *samples, *events])


def test_clean_stop_reports_the_sample_at_the_stop_and_is_no_kill(tmp_path: Path) -> None:
    flat = [sample(NOW - 300 + t, 20 * GB) for t in range(0, 200, 5)]
    report = why(logs=[stopped(tmp_path / "a.jsonl", flat), stopped(tmp_path / "b.jsonl", flat)])
    text = report.text()
    assert "at 20.0 GB of 40.0 GB" in text
    assert "1.00 GB" not in text
    assert "kills" not in text
    assert "brim run --memory 60GB" in text


def test_clean_stop_of_a_leak_does_not_advise_more_memory(tmp_path: Path) -> None:
    text = why(logs=[stopped(tmp_path / "a.jsonl", rising())]).text()
    assert "did not level off" in text
    assert "--memory 60GB" not in text


def test_the_kernel_held_brims_line(tmp_path: Path) -> None:
    """A kill in the run's own cgroup is attributed to the kernel, and reported once if a kernel record exists too."""
    head = {**HEAD, "limit": {"bytes": 40 * GB, "why": "--memory", "enforced": "cgroup v1"}}
    events = [
        {"type": "event", "t": NOW - 101, "kind": "oom", "text": "the kernel killed 1 of its processes at 40.0 GB"},
        {"type": "event", "t": NOW - 100, "kind": "kill", "text": "killed it: the rest of it"},
        {"type": "end", "t": NOW - 100, "exit_code": -9, "signal": 9},
    ]
    log = write(tmp_path / "a.jsonl", [head, *rising(), *events])
    (kill,) = kills(log)
    assert (kill.killer, kill.scope, kill.bound.bytes) == ("kernel", "cgroup", 40 * GB)
    kernel = tmp_path / "kern.log"
    line = "Memory cgroup out of memory: Killed process 4242 (python) total-vm:9kB, anon-rss:5kB"
    kernel.write_text(f"{NOW - 101:.6f} h kernel: {line}\n")
    (kill,) = why(logs=[log, kernel]).kills
    assert (kill.pid, kill.sure, len(kill.curve)) == (4242, "certain", 12)


@pytest.mark.parametrize(
    ("events", "killer"),
    [
        ([], None),
        ([{"kind": "stop", "text": "38 GB of 40 GB"}], "brim"),
        ([{"type": "end", "exit_code": None, "signal": 9}], "kernel"),
        ([{"kind": "kill", "text": "did not end"}, {"type": "end", "exit_code": None, "signal": 9}], "brim"),
    ],
)
def test_a_kill_somewhere_on_the_machine(tmp_path: Path, events: list[dict[str, Any]], killer: str | None) -> None:
    """A kill elsewhere on the machine counts for this run only if the run died of a SIGKILL that brim did not send."""
    elsewhere = {"kind": "oom", "text": "the kernel killed a process", "machine": True}
    ended = {"type": "end", "exit_code": 0, "signal": None}
    last = [] if events and events[-1].get("type") == "end" else [ended]
    messages = [{"type": "event", "t": NOW - 101, **event} for event in (elsewhere, *events, *last)]
    actual = kills(write(tmp_path / "a.jsonl", [HEAD, *rising(), *messages]))
    assert [kill.killer for kill in actual] == ([killer] if killer else [])
    goes_on = write(tmp_path / "b.jsonl", [HEAD | {"pid": os.getpid()}, *rising(), messages[0]])
    assert kills(goes_on) == []


def test_ended_by_itself(tmp_path: Path) -> None:
    """A run that exited normally is not a finding."""
    end = {"type": "end", "t": NOW - 100, "exit_code": 0, "signal": None}
    assert kills(write(tmp_path / "a.jsonl", [HEAD, *rising(), end])) == []


def test_sigkill_without_a_count(tmp_path: Path) -> None:
    """Exit code 137 alone is only a possible memory kill."""
    end = {"type": "end", "t": NOW - 100, "exit_code": 137, "signal": None}
    (kill,) = kills(write(tmp_path / "a.jsonl", [HEAD, *rising(), end]))
    assert (kill.killer, kill.sure) == ("unknown", "possible")


@pytest.mark.parametrize(("available", "sure"), [(GB, "likely"), (30 * GB, "possible")])
def test_machine_restarted_under_it(tmp_path: Path, available: int, sure: str) -> None:
    """A log without an end and with another boot id means that the machine restarted.

    The less memory was available, the more likely memory was the cause.
    """
    (kill,) = kills(write(tmp_path / "a.jsonl", [HEAD, *rising(available)]), boot="boot-b")
    assert (kill.effect, kill.sure) == ("restarted", sure)
    assert kill.when is not None
    assert kill.when.timestamp() == pytest.approx(NOW - 105)


def test_watcher_was_killed(tmp_path: Path) -> None:
    """A log without an end, of the same boot and without a running process, means that the watcher was killed too."""
    (kill,) = kills(write(tmp_path / "a.jsonl", [HEAD, *rising()], tail='{"type": "sample", "t": 17'))
    assert (kill.effect, kill.sure) == ("killed", "possible")
    assert "watcher" in kill.reason


def test_still_running(tmp_path: Path) -> None:
    """A log with a running process, or with a recent sample, is not a finding."""
    alive = {**HEAD, "pid": os.getpid()}
    assert kills(write(tmp_path / "a.jsonl", [alive, *rising()])) == []
    assert kills(write(tmp_path / "b.jsonl", [HEAD, *rising()]), now=NOW - 100) == []


def test_kernel_kill_gets_the_curve(tmp_path: Path) -> None:
    """A kernel record of a process that brim was watching shows the minute before the kill."""
    log = write(tmp_path / "a.jsonl", [HEAD, *rising(), {"type": "end", "t": NOW, "exit_code": 0}])
    kernel = tmp_path / "kern.log"
    kernel.write_text(
        f"{NOW - 105:.6f} h kernel: Out of memory: Killed process 4242 (python) total-vm:9kB, anon-rss:5kB\n"
    )
    (kill,) = why(logs=[log, kernel]).kills
    assert kill.killer == "kernel"
    assert kill.curve[-1].total_bytes == 20 * GB
    assert kill.command == "python train.py --token ***"


@given(
    st.lists(
        st.sampled_from([json.dumps(HEAD), json.dumps(sample(1, 2)), "{", "[]", "null", '{"type": 3}']) | st.text()
    )
)
def test_never_raises(lines: list[str]) -> None:
    """Torn lines and unknown entries are skipped."""
    path = Path(tempfile.gettempdir()) / f"brim-{os.getpid()}-x.jsonl"
    path.write_text("\n".join(lines), errors="replace")
    kills(path, boot="boot-b")
    path.unlink()


FIELDS = ["t", "pid", "boot_id", "machine", "limit", "command", "processes", "kind", "signal", "total_bytes"]
VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
)


@given(st.sampled_from(["head", "sample", "event", "end"]), st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_value_never_raises(kind: str, entry: dict[str, Any]) -> None:
    """Fields with values of the wrong type are treated as missing."""
    path = Path(tempfile.gettempdir()) / f"brim-{os.getpid()}-y.jsonl"
    write(path, [HEAD, {**entry, "type": kind}, sample(NOW, 1)])
    kills(path, boot="boot-b")
    path.unlink()
