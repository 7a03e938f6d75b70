"""Measure how many modules of brim a job passes through: `make bench-walks`.

    python benchmarks/walks.py [--pairs] [--json FILE]

For each job, in the process that the user starts:

- modules: those of brim in which a function ran;
- packages: the folders that contain these (the root counts as one);
- crossings: pairs of modules of different packages of which one called a function of the other. The caller is the
  nearest function of brim, even if another library is between the two.

Code that runs because a module is imported does not count, nor code in workers, nor the methods that Python writes for
a dataclass. Threads count. The jobs are as small as possible while every stage has something to do. --pairs prints the
crossings. The figures are a guide and not a goal: fewer and larger modules have better ones.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
_TIMEOUT_S = 120
_GENERATED = "<string>"  # the file name of methods that dataclasses generate
_FUNCTIONS = """
def longer(row):
    return {"longer": row["text"] * 2}


def model():
    import numpy as np

    return lambda given: np.array([[len(text), 1.0] for text in given["text"]], dtype=np.float32)
"""


class Walk:
    """The calls between modules of brim."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.calls: set[tuple[str, str]] = set()
        self._known: set[tuple[CodeType | None, CodeType]] = set()

    def notice(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call; the profile function of sys.setprofile."""
        if event != "call" or not _is_brim(frame) or frame.f_code.co_filename == _GENERATED:
            return
        caller = frame.f_back
        while caller is not None and not _is_brim(caller):
            caller = caller.f_back
        pair = (caller and caller.f_code, frame.f_code)
        if pair in self._known or not frame.f_code.co_flags & inspect.CO_OPTIMIZED or _is_import(frame):
            return
        self._known.add(pair)
        self.modules.add(_module(frame))
        if caller is not None:
            self.calls.add((_module(caller), _module(frame)))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_brim(frame: FrameType) -> bool:
    name = _module(frame)
    return name.partition(".")[0] == "brim" and name != "brim.records"  # methods of dataclasses


def _is_import(frame: FrameType | None) -> bool:
    """Return whether an import is in progress below: the body of a module, or a module finder."""
    while frame is not None:
        if _module(frame) == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def trace(result: Path, arguments: list[str]) -> None:
    """Run the brim command in this process and record its calls."""
    from brim.cli import main as brim

    walk = Walk()
    sys.argv = ["brim", *arguments]
    threading.setprofile(walk.notice)
    sys.setprofile(walk.notice)
    try:
        brim()
    finally:
        sys.setprofile(None)
        result.write_text(json.dumps({"modules": sorted(walk.modules), "calls": sorted(walk.calls)}))


def package(module: str) -> str:
    """Return the package of a module."""
    import brim

    folder = Path(str(brim.__file__)).parent.joinpath(*module.split(".")[1:])
    return module if folder.is_dir() else module.rpartition(".")[0]


def prepare(home: Path) -> dict[str, list[str]]:
    """Create the jobs' sources and return their commands."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (home / "files").mkdir()
    for number in range(12):
        (home / "files" / f"{number}.bin").write_bytes(os.urandom(2000))
    texts = [f"text number {number} of a few" for number in range(200)]
    (home / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (home / "walked.py").write_text(_FUNCTIONS)
    arguments = sorted({value for text in texts for value in text.split()})
    tokenizer = Tokenizer(
        models.WordLevel({token: number for number, token in enumerate(["?", *arguments])}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(home / "words.json"))
    return {
        "build folder": ["build", "files", "built"],
        "build → Hub": ["build", "files", "hf://datasets/ada/data"],
        "map": ["map", "texts.jsonl", "mapped", "--fn", "walked:longer"],
        "tokenize --pack": ["tokenize", "texts.jsonl", "tokens", "--tokenizer", "words.json", "--pack=64", "--no-eos"],
        "embed → file": ["embed", "texts.jsonl", "emb.npy", "--model", "walked:model", "--column", "text"],
        "run": ["run", "--", sys.executable, "-c", "import time; time.sleep(1)"],
    }


def walked(home: Path, arguments: list[str], env: Mapping[str, str]) -> dict[str, Any]:
    result = home / "walk.json"
    command = [sys.executable, str(Path(__file__).resolve()), "--trace", str(result), *arguments]
    completed = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if completed.returncode:
        raise SystemExit(f"brim {' '.join(arguments)} ended with {completed.returncode}:\n{completed.stderr[-2000:]}")
    actual: dict[str, Any] = json.loads(result.read_text())
    return actual


def main() -> None:
    if sys.argv[1:2] == ["--trace"]:
        trace(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", action="store_true", help="print the crossings, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from tables import Part, machine, print_part, write_json

    from tests.hub import TestHub
    from tests.publishing import Machine

    part = Part("walks", ("job", "modules", "packages", "crossings"))
    with tempfile.TemporaryDirectory() as folder, TestHub(Path(folder) / "hub") as hub:
        home = Path(folder)
        path = os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")])
        env = Machine(hub, home / "machine").environment | {"PYTHONPATH": path}
        for name, command in prepare(home).items():
            actual = walked(home, command, env)
            crossings = [(a, b) for a, b in actual["calls"] if package(a) != package(b)]
            rooms = {package(module) for module in actual["modules"]}
            part.rows.append((name, str(len(actual["modules"])), str(len(rooms)), str(len(crossings))))
            if arguments.pairs:
                part.notes.append(f"{name}:\n" + "\n".join(f"  {a} → {b}" for a, b in crossings))
    print_part(part)
    write_json(arguments.json, machine(ROOT, ("brim",)), {"walks": part})


if __name__ == "__main__":
    main()
