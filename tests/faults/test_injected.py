"""Disks and systems that fail one call of a run: a clear error with the right blame, and the next run ends the same.

A few positions are drawn for every run of the tests; BRIM_FAULTS=all tries every call of these jobs (`make faults`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.conftest import random_bytes, write_files
from tests.faults.injection import Job
from tests.forked import brim

STEPS = """
def length(row):
    return {"length": len(row["text"])}
"""
MODEL = """
import numpy as np

def factory():
    return lambda batch: np.array([[len(text), 1.0] for text in batch["text"]], "float32")
"""
WRITER = """
import sys
import numpy as np
import brim
from brim.errors import BrimError

source, target = sys.argv[1:]
values = np.random.default_rng(0).random((400, 8), dtype=np.float32)
options = {"rows": 400} if target.endswith(".npy") else {}
try:
    with brim.TensorWriter(target, values=(8, "float32"), resume=True, checkpoint_rows=100, **options) as writer:
        for at in range(writer.rows_done, 400, 50):
            writer.append(values=values[at : at + 50])
except BrimError as error:
    sys.exit(f"brim: {error}") if error.exit_code == 1 else print(f"brim: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def _make_source(folder: Path) -> None:
    """Files to package, rows to compute, a tokenizer, and code that is not counted beside them."""
    write_files(folder / "files", {f"f{n}.bin": random_bytes(3000 + n, n) for n in range(4)})
    rows = [{"id": n, "text": f"row {n} " + "word " * (n % 5)} for n in range(120)]
    (folder / "rows").mkdir()
    for part in range(2):
        lines = [json.dumps(row) for row in rows[part * 60 : part * 60 + 60]]
        (folder / "rows" / f"part{part}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "steps.py").write_text(STEPS)
    (folder / "model.py").write_text(MODEL)
    (folder / "writer.py").write_text(WRITER)
    (folder / "model").mkdir()
    vocabulary = {"row": 0, "word": 1, "[UNK]": 2}
    (folder / "model" / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": None,
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
            }
        )
    )


def make_jobs(folder: Path) -> dict[str, Job]:
    _make_source(folder)
    files, rows, tokenizer = folder / "files", folder / "rows", folder / "model" / "tokenizer.json"
    built = folder / "built"
    brim("build", files, built, "--rows-per-shard", "2", "--quiet")
    limits = ["--memory", "600MB", "--workers", "1", "--quiet"]

    def job(name: str, source: Path, make: Callable[[Path], list[str | Path]], script: bool = False) -> Job:
        place = folder / f"place-{name}"
        return Job(name, [os.fspath(word) for word in make(place / "out")], source, place, script=script)

    def copy_built(place: Path) -> None:
        shutil.copytree(built, place / "out")

    jobs = [
        job("build", files, lambda out: ["build", files, out, "--rows-per-shard", "2", "--workers", "2", "--quiet"]),
        job("tar", files, lambda out: ["build", files, out, "--format", "webdataset", "--workers", "1", "--quiet"]),
        job("map", rows, lambda out: ["map", rows, out, "--fn", "steps.py:length", "--unit-size", "3KB", *limits]),
        job(
            "tokenize",
            rows,
            lambda out: ["tokenize", rows, out, "--tokenizer", tokenizer, "--pack", "16", "--eos", "[UNK]", *limits],
        ),
        job(
            "bin",
            rows,
            lambda out: ["tokenize", rows, out, "--tokenizer", tokenizer, "--format", "bin", "--eos", "[UNK]", *limits],
        ),
        *(
            job(
                f"embed{suffix}",
                rows,
                lambda out, suffix=suffix: [  # type: ignore[misc]
                    *["embed", rows, out / f"a{suffix}" if suffix else out, "--model", "model:factory"],
                    *["--column", "text", "--keep", "id", "--unit-size", "3KB", *limits],
                ],
            )
            for suffix in ("", ".safetensors", ".npy", ".parquet")
        ),
        *(
            job(
                f"tensors{suffix}",
                files,
                lambda out, suffix=suffix: [folder / "writer.py", files, out / f"a{suffix}"],  # type: ignore[misc]
                script=True,
            )
            for suffix in (".safetensors", ".npy", ".parquet")
        ),
        job("unpack", built, lambda out: ["unpack", built, out, "--quiet"]),
        job("verify", files, lambda out: ["verify", out, files, "--quiet"]),
    ]
    for each in jobs:
        if each.name == "verify":
            each.prepare = lambda place=each.place: copy_built(place)  # type: ignore[misc]
        elif each.name.startswith(("embed.", "tensors")):
            each.prepare = (each.place / "out").mkdir
    return {each.name: each for each in jobs}
