"""Example notebooks run, show the progress bar, and can be interrupted (make test-notebooks)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.notebook
EXAMPLES = Path(__file__).parents[2] / "examples" / "notebooks"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A real kernel of this Python, as notebooks use it."""
    from jupyter_client.manager import KernelManager

    monkeypatch.setenv("BRIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BRIM_MEMORY", "1GB")
    monkeypatch.chdir(tmp_path)
    manager = KernelManager()
    manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def replies(client: Any, requested: str) -> list[dict[str, Any]]:
    """Return the messages that the kernel sends for one cell, until it is idle again."""
    actual = []
    until = time.monotonic() + 120
    while time.monotonic() < until:
        message = client.get_iopub_msg(timeout=120)
        if message["parent_header"].get("msg_id") != requested:
            continue
        actual.append(message)
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return actual
    raise AssertionError("the kernel is busy after two minutes")


CELL = """
import brim, datasets, os, time
rows = datasets.Dataset.from_dict({"n": list(range(40))})
def slow(batch):
    open(f"mark-{batch['n'][0]}", "w").close()
    time.sleep(SECONDS)
    return {"m": batch["n"]}
made = brim.map(rows, slow, batched=True, batch_size=4, num_proc=1, unit_size=1)
made["m"][:] == list(range(40))
"""


def test_a_kernel_is_interrupted_and_goes_on(kernel: Any, tmp_path: Path) -> None:
    """The cell ends with KeyboardInterrupt, the kernel survives, and running the cell again finishes the job."""
    manager, client = kernel
    requested = client.execute(CELL.replace("SECONDS", "float(os.environ.get('SLOW', '0.5'))"))
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("mark-*"))) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    manager.interrupt_kernel()
    error = next(message["content"] for message in replies(client, requested) if message["msg_type"] == "error")
    assert error["ename"] == "KeyboardInterrupt"
    observed = len(list(tmp_path.glob("mark-*")))
    assert observed < 10
    for path in tmp_path.glob("mark-*"):
        path.unlink()
    requested = client.execute(CELL.replace("SECONDS", "float(os.environ.get('SLOW', '0.5'))"))
    report = replies(client, requested)
    shown = [message["content"]["data"] for message in report if message["msg_type"] == "execute_result"]
    assert shown == [{"text/plain": "True"}]
    assert len(list(tmp_path.glob("mark-*"))) < 10  # finished work is not repeated
    bars = [m["content"]["data"] for m in report if m["msg_type"] in ("display_data", "update_display_data")]
    assert bars
    assert all("<progress" in bar["text/html"] for bar in bars)
    assert bars[0]["text/plain"].startswith("map: ")
    assert bars[-1]["text/plain"].startswith("map: ")


def test_an_error_in_a_cell_is_the_functions_own(kernel: Any) -> None:
    """The error has a type that the notebook defines, and shows the line number of the cell."""
    _, client = kernel
    requested = client.execute(
        "import brim\nclass Own(Exception): pass\ndef bad(row):\n    raise Own('no good')\n"
        "try:\n    brim.map([{'n': 1}], bad)\nexcept Own as error:\n    import traceback\n"
        "    print(''.join(traceback.format_exception(error)))"
    )
    text = "".join(m["content"]["text"] for m in replies(client, requested) if m["msg_type"] == "stream")
    assert "raise Own('no good')" in text
    assert "It failed at" in text


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.ipynb")))
def test_the_examples_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example runs from the first to the last cell in an empty folder; stored outputs come from a run and contain
    no local path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = dict(os.environ)
    try:
        from make_notebooks import run

        run(EXAMPLES / name)
    finally:
        os.environ.clear()
        os.environ.update(before)
    stored = json.loads((EXAMPLES / name).read_text())
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    assert any(cell["outputs"] for cell in code)
    assert str(Path.home()) not in json.dumps(stored)
    assert "/tmp/" not in json.dumps(stored)
