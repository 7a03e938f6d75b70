"""300,000 examples, tokenised twice: list, from_list and map, then brim. Prints time and peak memory of both.

    python examples/tokenize_300k.py [--examples 300000] [--memory 400MB] [--folder DIR]

Linux; needs pip install '.[compute,datasets]', about 3 GB of disk, and 4 GB of memory for the first way.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from brim.memory.meter import tree


def before(texts: str, tokenizer: str, out: str) -> None:
    """The usual script."""
    from datasets import Dataset
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(tokenizer)
    examples = []
    with open(texts) as file:
        for line in file:
            examples.append(json.loads(line))
    dataset = Dataset.from_list(examples)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [each.ids for each in loaded.encode_batch(batch["text"])]}

    dataset = dataset.map(encode, batched=True, remove_columns=["text"], num_proc=2)
    dataset.to_parquet(out + "/train.parquet")


def after(texts: str, tokenizer: str, out: str, memory: str) -> list[str]:
    return [sys.executable, "-m", "brim", "tokenize", texts, out, "--tokenizer", tokenizer, "--memory", memory]


def make_texts(path: Path, count: int) -> None:
    """About 1 KB each: words of a made-up language, the common ones often."""
    draw = random.Random(0)
    parts = ["ka", "ro", "min", "tel", "su", "ven", "dal", "i", "o", "na", "ther", "qui", "bo", "len"]
    words = ["".join(draw.choices(parts, k=draw.randint(1, 4))) for _ in range(20_000)]
    weights = [1 / (rank + 2) for rank in range(len(words))]
    with open(path, "w") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(draw.choices(words, weights, k=160))}) + "\n")


def make_tokenizer(path: Path, texts: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    with open(texts) as file:
        sample = [json.loads(line)["text"] for line, _ in zip(file, range(5000), strict=False)]
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(sample, trainer)
    made.save(str(path))


def held_bytes(pid: int) -> int:
    """What the kernel cannot take back of a process, its share of what it has in common with others."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:", "SwapPss:")))


def measured(name: str, command: list[str]) -> None:
    """Time, and the peak of what the tree of processes holds, every 50 ms. Pages that forks share count once."""
    begin, peak = time.monotonic(), 0
    errors = tempfile.TemporaryFile()  # noqa: SIM115  read below; a pipe would fill up with progress bars
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
    while process.poll() is None:
        peak = max(peak, sum(map(held_bytes, tree([process.pid]))))
        time.sleep(0.05)
    seconds = time.monotonic() - begin
    if process.returncode:
        errors.seek(0)
        print(f"{name:24s} ended with {process.returncode}:\n{errors.read().decode()[-1000:]}")
    else:
        print(f"{name:24s} {seconds:6.1f} s   {peak / 1e6:6.0f} MB at the peak")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=300_000)
    parser.add_argument("--memory", default="400MB")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--before", nargs=3, metavar=("TEXTS", "TOKENIZER", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.before:
        before(*arguments.before)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        texts, tokenizer = folder / "texts.jsonl", folder / "tokenizer.json"
        make_texts(texts, arguments.examples)
        make_tokenizer(tokenizer, texts)
        print(f"{arguments.examples:,} examples, {texts.stat().st_size / 1e6:.0f} MB")
        (folder / "before").mkdir()
        usual = [sys.executable, __file__, "--before", str(texts), str(tokenizer), str(folder / "before")]
        measured("list, from_list, map", usual)
        measured("brim tokenize", after(str(texts), str(tokenizer), str(folder / "after"), arguments.memory))


if __name__ == "__main__":
    main()
