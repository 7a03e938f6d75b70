"""Nightly training: a leaking run is stopped in time, and the same command continues on the next night."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from brim.monitor.log_writer import read_log
from tests.conftest import brim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory commands see little elsewhere")

TRAIN = """
import json, pathlib, sys, time
import brim

checkpoint, stop = pathlib.Path(sys.argv[1]), sys.argv[2]
step = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
print(f"from step {step}", flush=True)
held = []

def save():
    checkpoint.write_text(json.dumps({"step": step}))

with brim.watch(memory="300MB", stop_file=stop, stop_lead=4, quiet=True, log=sys.argv[3]) as m:
    should_end = m.callback(save=save)
    while step < 300:
        held.append(bytearray(b"x") * 1_000_000)
        step += 1
        time.sleep(0.1)
        if should_end():
            print(f"stopped at step {step}", flush=True)
            sys.exit(0)
save()
print("done", flush=True)
"""


@pytest.mark.slow
def test_night_after_night(tmp_path: Path) -> None:
    """A training run with the callback leaks, stops with a checkpoint, and resumes when the same command runs again."""
    script, checkpoint, stop = tmp_path / "train.py", tmp_path / "checkpoint.json", tmp_path / "stop"
    script.write_text(TRAIN)
    log, inner = tmp_path / "night.jsonl", tmp_path / "inner.jsonl"
    command = [
        "run",
        "--memory",
        "300MB",
        "--no-cgroup",
        "--stop-lead",
        "4",
        "--stop-file",
        stop,
        "--log",
        log,
        "--quiet",
    ]
    command += ["--", sys.executable, script, checkpoint, stop, inner]
    reached = []
    for night in range(3):
        result = brim(*command, check=None)
        entries = list(read_log(log))
        end = next(entry for entry in entries if entry["type"] == "end")
        assert not [entry for entry in entries if entry.get("kind") in ("kill", "term")], f"night {night}"
        assert not stop.exists()
        assert result.stdout.startswith(f"from step {reached[-1] if reached else 0}\n")
        reached.append(json.loads(checkpoint.read_text())["step"])
        if "done" in result.stdout:
            assert end["stopped"] is None
            assert result.returncode == 0
            break
        assert result.returncode == (4 if end["stopped"] else 0)
        assert end["peak_bytes"] < 0.97 * 300e6
    assert len(reached) >= 2
    assert reached == sorted(set(reached))
    assert reached[-1] == 300
