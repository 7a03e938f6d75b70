"""Measure the bytes that the next upload sends after 1 % of the rows were inserted: `make bench-reupload`.

    python benchmarks/reupload.py [--rows 30000] [--json FILE]

`brim map`, `tokenize` and `embed` write Parquet of texts; 1 % more rows come at the start, or in the middle. The files
are uploaded with the real clients huggingface_hub and hf_xet to the Hub of tests/hub, which counts received bytes.
The client finds its earlier uploads in its own cache, so both uploads come from one machine. *plain* are the same
rows in the same row groups, written by pyarrow without content-defined chunking, like earlier versions of brim.
Not measured: deduplication against uploads of other machines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tables import Part, at_most, machine, print_goals, print_machine, print_part, progress, write_json

from tests.hub import TestHub

REPO = "ada/data"
UPLOAD = """
import sys
from huggingface_hub import HfApi
HfApi().upload_folder(repo_id=sys.argv[1], repo_type="dataset", folder_path=sys.argv[2], path_in_repo="data")
"""
FUNCTIONS = """
import hashlib
import numpy as np

def length(row):
    return {"length": len(row["text"])}

def model():
    def embed(given):
        seeds = [int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") for text in given["text"]]
        return np.stack([np.random.default_rng(seed).standard_normal(128).astype(np.float16) for seed in seeds])
    return embed
"""
JOBS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "map": (["--fn", "functions:length"], {"compression": "zstd", "compression_level": 1, "write_page_index": True}),
    "tokenize": (
        ["--tokenizer", "words.json", "--keep", "id"],
        {"compression": "zstd", "compression_level": 1, "use_dictionary": ["id"], "write_statistics": ["id"]},
    ),
    "embed": (
        ["--model", "functions:model", "--column", "text", "--keep", "id"],
        {"compression": {"id": "zstd"}, "use_dictionary": ["id"], "write_statistics": ["id"]},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    part = Part(
        "re-upload after 1 % more rows, by Xet",
        ("what", "rows come", "plain: MB sent", "of the files", "brim: MB sent", "of the files", "size of the files"),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sources(folder, arguments.rows)
        for command, (options, plain) in JOBS.items():
            for source in ("old", "start", "middle"):
                created = run(folder, command, source, options)
                write_plain(created, folder / f"plain-{command}-{source}", plain)
            for location in ("start", "middle"):
                measure(part, folder, command, location)
        facts = machine(folder, ("brim", "pyarrow", "huggingface_hub", "hf-xet"))
    print_machine(facts)
    print_part(part)
    print_goals({"reupload": part})
    if arguments.json:
        write_json(arguments.json, facts, {"reupload": part})


def write_sources(folder: Path, count: int) -> None:
    rng = random.Random(0)
    arguments = [
        "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randrange(2, 9))) for _ in range(20_000)
    ]
    vocabulary = {value: number for number, value in enumerate(["[UNK]", *dict.fromkeys(arguments)])}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    tokenizer = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "words.json").write_text(json.dumps(tokenizer))
    (folder / "functions.py").write_text(FUNCTIONS)

    def rows(name: str, number: int) -> list[str]:
        texts = (" ".join(rng.choices(arguments, k=rng.randrange(50, 300))) for _ in range(number))
        return [
            json.dumps({"id": f"{name}-{n}", "score": rng.randrange(10**6), "text": text})
            for n, text in enumerate(texts)
        ]

    old, new = rows("old", count), rows("new", count // 100)
    half = count // 2
    sources = {"old": old, "start": [*new, *old], "middle": [*old[:half], *new, *old[half:]]}
    for name, lines in sources.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def run(folder: Path, command: str, source: str, options: list[str]) -> Path:
    """Run the command and return the folder with its shards."""
    target = folder / f"{command}-{source}"
    out = target / "vectors.parquet" if command == "embed" else target
    target.mkdir()
    arguments = [sys.executable, "-m", "brim", command, f"{source}.jsonl", str(out), *options, "--quiet"]
    subprocess.run(arguments, cwd=folder, check=True)
    progress(f"{command} {source}: {size_of(target):,} bytes")
    return target


def write_plain(created: Path, target: Path, options: Mapping[str, Any]) -> None:
    for path in shards(created):
        file = pq.ParquetFile(path)
        (target / path.name).parent.mkdir(parents=True, exist_ok=True)
        inputs = dict(options)
        if isinstance(inputs["compression"], dict):
            leaf_values = [file.schema.column(number).path for number in range(len(file.schema.names))]
            inputs["compression"] = {leaf: inputs["compression"].get(leaf, "none") for leaf in leaf_values}
        with pq.ParquetWriter(target / path.name, file.schema_arrow, **inputs) as writer:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group)
                writer.write_table(table, row_group_size=max(table.num_rows, 1))


def measure(part: Part, folder: Path, command: str, where: str) -> None:
    row = [command, f"at the {where}" if where == "start" else "in the middle"]
    for kind in ("plain-", ""):
        old, new = (folder / f"{kind}{command}-{name}" for name in ("old", where))
        sent, size = sent_again(old, new), size_of(new)
        progress(f"{kind}{command} {where}: {sent:,} of {size:,} bytes sent again")
        part.runs.setdefault(f"{kind}{command}, {where}", []).append({"sent": sent, "size": size})
        row += [f"{sent / 1e6:.2f}", f"{sent / size:.1%}"]
    part.rows.append([*row, f"{size / size_of(folder / f'plain-{command}-{where}'):.3f}×"])
    part.goals.append(at_most(f"{command}, {where}: sent again", 100 * sent / size, 35, " %"))


def sent_again(old: Path, new: Path) -> int:
    """Return the bytes that the Hub receives when `new` is uploaded after `old`."""
    with tempfile.TemporaryDirectory() as name, TestHub(Path(name) / "hub", xet=True) as hub:
        hub.create(REPO)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        own = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_write", "HF_HOME": f"{name}/home"}
        for folder in (old, new):
            before = hub.counters.bytes_received
            arguments = [sys.executable, "-c", UPLOAD, REPO, str(folder)]
            subprocess.run(arguments, env={**inherited, **own}, check=True, capture_output=True)
        return hub.counters.bytes_received - before


def shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.parquet") if ".brim" not in path.parts)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in shards(folder))


if __name__ == "__main__":
    main()
