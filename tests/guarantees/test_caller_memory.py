"""`memory=` limits the job only: for every function, memory that the calling program holds is not counted."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import brim
from tests.conftest import random_bytes, write_files
from tests.publishing import Machine

# The calling program holds 1.1 GB and allows the job less than that.
CALLS = {
    "plan": "brim.plan('files', 'planned', **held)",
    "build": "brim.build('files', 'built', **held)",
    "select": "brim.select('built', 'chosen', limit=2, **held)",
    "push_to_hub": "brim.push_to_hub(dataset, 'ada/rows', via='lfs', **held)",
    "map": "brim.map(dataset, length, **held); brim.map('rows.jsonl', 'steps.py:length', destination='mapped', **held)",
    "filter": "brim.filter(dataset, is_long, **held)",
    "tokenize": "brim.tokenize('rows.jsonl', 't.json', **held)",
    "embed": "brim.embed('rows.jsonl', 'embed_models:hashing', column='text', **held)",
    "open_plan": "brim.plan('files', 'saved', **held).save('a.plan');"
    " brim.open_plan('a.plan', **held).part('1/2'); brim.open_plan('a.plan', **held).run()",
    "save_job": "brim.save_job('map.job', 'map', 'rows.jsonl', 'steps.py:length', 'by-map', **held).run();"
    " brim.save_job('embed.job', 'embed', 'rows.jsonl', 'embed_models:hashing', 'v.npy', column='text', **held)",
    "open_job": "job = brim.open_job('embed.job', **held);"
    " more = b'y' * 500_000_000; job.part('1/1'); job.finish();"
    " brim.save_job('tokens.job', 'tokenize', 'rows.jsonl', 't.json', 'tokens', **held);"
    " brim.open_job('tokens.job', **held).run()",
}
# These functions take a limit and run no job within it.
NO_JOBS = {"forecast", "watch"}

PROGRAM = f"""
import sys
sys.path.insert(0, ".")
import brim
from datasets import Dataset
from steps import is_long, length

dataset = Dataset.from_dict({{"text": ["one", "two words", "and three more"]}})
mine = b"x" * 1_100_000_000
CALLS = {CALLS!r}
for name, call in CALLS.items():
    held = dict(memory="600MB", **({{"workers": 1}} if name != "push_to_hub" else {{}}))
    try:
        exec(call)
        print(name)
    except brim.MemoryLimitError as error:
        print(name, "does not fit:", error)
"""
STEPS = b"""
def length(row):
    return {"length": len(row["text"])}

def is_long(row):
    return len(row["text"]) > 4
"""


@pytest.mark.long
def test_every_call(machine: Machine, tmp_path: Path) -> None:
    """A program of 1.1 GB calls each function that takes `memory=` with 600 MB, and each call succeeds."""
    tokenizers = pytest.importorskip("tokenizers")
    rows = "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(20)).encode()
    write_files(tmp_path, {"rows.jsonl": rows, "steps.py": STEPS})
    write_files(tmp_path / "files", {f"{n}.bin": random_bytes(1000, n) for n in range(4)})
    shutil.copy(Path(__file__).parents[1] / "embed_models.py", tmp_path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"row": 0, "?": 1}, unk_token="?")).save(str(tmp_path / "t.json"))
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, cwd=tmp_path, env=machine.environment, capture_output=True, text=True, timeout=200)
    assert result.stdout.split("\n") == [*CALLS, ""], result.stdout + result.stderr


def test_no_call_is_forgotten() -> None:
    """Every public function with a parameter `memory` is called in this module."""
    public: dict[str, Any] = {name: getattr(brim, name) for name in brim.__all__}
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    taking = {name for name, value in functions.items() if "memory" in inspect.signature(value).parameters}
    assert taking - NO_JOBS == CALLS.keys() - {"save_job"}  # its options are those of the saved command
