"""`brim.watch` and `brim.release` in separate scripts, because a watch belongs to a process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import brim
from brim.errors import InputError
from brim.monitor.log_writer import read_log
from brim.monitor.watching.watching import StopCallback

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory commands see little elsewhere")


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def script(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_now_peak_and_marks(tmp_path: Path) -> None:
    """The memory of the program is measured from outside; a mark is logged with the memory at that time."""
    code = """
import brim, json, sys, time
with brim.watch(memory="500MB", log=sys.argv[1], quiet=True) as m:
    before = m.now
    block = bytearray(b"x") * 100_000_000
    m.mark("after loading")
    time.sleep(1.2)
    during = m.now
    del block
    time.sleep(1.2)
    print(json.dumps([during - before, m.now, m.peak, m.should_stop(), m.limit.bytes]))
print(m.peak)
"""
    log = tmp_path / "l.jsonl"
    first, last = script(code, log).splitlines()
    grown, now, peak, stop, limit = json.loads(first)
    assert 95e6 < grown < 140e6
    assert now < 60e6
    assert 100e6 < peak < 180e6
    assert (stop, limit) == (False, 500_000_000)
    assert int(last) >= peak
    marks = [entry for entry in read_log(log) if entry.get("kind") == "mark"]
    assert [mark["text"] for mark in marks] == ["after loading"]
    assert marks[0]["total_bytes"] > 100e6
    assert [entry["type"] for entry in read_log(log)][-1] == "end"


def test_a_training_loop_stops_by_itself_and_saves(tmp_path: Path) -> None:
    """A loop that leaks past the stop threshold saves once and ends; nothing is killed and no file stays."""
    code = """
import brim, sys, time
held, saved = [], []
with brim.watch(memory="200MB", stop_at="60%", alert="50%", kill_at="off", stop_file=sys.argv[1], quiet=True) as m:
    should_end = m.callback(save=lambda: saved.append(len(held)))
    for step in range(400):
        if len(held) < 30:
            held.append(bytearray(b"x") * 5_000_000)
        time.sleep(0.02)
        if should_end():
            break
print(step < 399, len(saved), should_end())
"""
    assert script(code, tmp_path / "stop").split() == ["True", "1", "True"]
    assert not (tmp_path / "stop").exists()


def test_anyone_may_make_the_stop_file(tmp_path: Path) -> None:
    """A stop file that is created by hand stops the loop too."""
    code = """
import brim, pathlib, sys
with brim.watch(stop_file=sys.argv[1], quiet=True) as m:
    before = m.should_stop()
    pathlib.Path(sys.argv[1]).touch()
    print(before, m.should_stop())
"""
    assert script(code, tmp_path / "stop").split() == ["False", "True"]


def test_a_watch_belongs_to_the_process_that_began_it(tmp_path: Path) -> None:
    """A forked child that leaves the block does not end its parent's watch, even in a program without a name."""
    code = """
import brim, os, sys
path, sys.argv = sys.argv[1], []
with brim.watch(memory="500MB", log=path, quiet=True) as m:
    child = os.fork()
    if not child:
        m.close()
        os._exit(0)
    os.waitpid(child, 0)
    m.mark("after the child")
"""
    script(code, tmp_path / "l.jsonl")
    written = list(read_log(tmp_path / "l.jsonl"))
    assert [entry["text"] for entry in written if entry.get("kind") == "mark"] == ["after the child"]
    assert len([entry for entry in written if entry["type"] == "end"]) == 1


def test_a_log_that_is_none_is_refused(tmp_path: Path) -> None:
    """brim.watch(log=…) refuses a file that is not a log and does not change it."""
    text = tmp_path / "thesis.txt"
    text.write_text("precious")
    with pytest.raises(InputError, match="not a run log of brim"):
        brim.watch(log=text)
    assert text.read_text() == "precious"


def test_the_plain_callback_saves_once() -> None:
    """The callback accepts any arguments of a framework and returns whether to stop."""

    class Asked:
        marks: list[str] = []  # noqa: RUF012

        def should_stop(self) -> bool:
            return True

        def mark(self, text: str) -> None:
            self.marks.append(text)

    saved: list[int] = []
    callback = StopCallback(Asked(), lambda: saved.append(1))
    assert callback("trainer", step=3)
    assert callback()
    assert (saved, Asked.marks) == ([1], ["saving, then stopping"])


def test_release_gives_back_and_says_how_much() -> None:
    """Garbage in a cycle is freed, used memory stays, and the result is the reduction of the process's memory."""
    code = """
import brim, gc, os
from brim.memory.meter import process_bytes
gc.disable()
kept = bytearray(b"x") * 30_000_000
cycle = [bytearray(b"x") * 80_000_000]
cycle.append(cycle)
del cycle
before = process_bytes(os.getpid())
released = brim.release()
print(before - process_bytes(os.getpid()), released.total_bytes, len(kept))
print(released)
"""
    numbers, text = script(code).splitlines()
    smaller, message, remaining = map(int, numbers.split())
    assert 75e6 < smaller < 90e6
    assert abs(smaller - message) < 5e6
    assert remaining == 30_000_000
    assert "garbage collection" in text


def test_watching_imports_nothing_optional() -> None:
    """`brim.watch` and `brim.release` import neither torch nor transformers nor pyarrow."""
    code = (
        "import brim, sys; brim.watch, brim.release, brim.release(); "
        "print([m for m in ('torch', 'transformers', 'pyarrow', 'click', 'rich') if m in sys.modules])"
    )
    assert script(code).strip() == "[]"


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="transformers and torch are not installed: that a real Trainer saves and stops is not proved here",
)
def test_a_trainer_saves_and_stops(tmp_path: Path) -> None:
    """A real transformers.Trainer saves one checkpoint and ends as soon as the stop file exists."""
    code = """
import brim, pathlib, sys, torch
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels=None):
        return {"loss": ((self.layer(x) - labels) ** 2).mean()}
data = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(64)]
folder = pathlib.Path(sys.argv[1])
options = TrainingArguments(str(folder / "out"), per_device_train_batch_size=1, save_strategy="no", report_to=[],
                            use_cpu=True)
with brim.watch(stop_file=folder / "stop", quiet=True) as m:
    trainer = Trainer(model=Model(), args=options, train_dataset=data, callbacks=[m.trainer_callback()])
    (folder / "stop").touch()
    trainer.train()
print(trainer.state.global_step, [p.name for p in (folder / "out").glob("checkpoint-*")])
"""
    assert script(code, tmp_path).strip().splitlines()[-1] == "1 ['checkpoint-1']"
