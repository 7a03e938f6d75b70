"""Chats with labels: TRL's own preparation, `datasets.map` with `apply_chat_template`, and brim.

Generated conversations of one to four turns; a tokenizer made here; a template with {% generation %} marks and the same
one without. Each way runs in a process of its own on all cores, and its memory is that of all its processes together.
Without marks TRL knows no answers, and trains on everything; brim finds the answers by rendered prefixes.

    make bench-chat            20,000 conversations
    make bench-chat ROWS=300000
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "«{{ message.content + '<|im_end|>' }}»{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TRL = """
import sys, datasets, transformers
from trl import SFTConfig, SFTTrainer
rows, tokenizer, out, marks = sys.argv[1:5]
data = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=out + "-cache")
tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
config = SFTConfig(output_dir=out, max_length=4096, assistant_only_loss=marks == "marks", use_cpu=True, bf16=False,
                   report_to=[], dataset_num_proc=int(sys.argv[5]))
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), hidden_size=16,
    intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1))
trainer = SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer)
trainer.train_dataset.save_to_disk(out)
print(len(trainer.train_dataset))
"""
_MAP = """
import sys, datasets, transformers
rows, tokenizer, out, marks = sys.argv[1:5]
data = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=out + "-cache")
tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
def prepare(row):
    options = {"return_dict": True, "return_assistant_tokens_mask": marks == "marks"}
    made = tokenizer.apply_chat_template(row["messages"], **options)
    ids, mask = made["input_ids"], made.get("assistant_masks") or [1] * len(made["input_ids"])
    return {"input_ids": ids, "labels": [token if bit else -100 for token, bit in zip(ids, mask)]}
data = data.map(prepare, num_proc=int(sys.argv[5]), remove_columns=data.column_names)
data.save_to_disk(out)
print(len(data))
"""
_BRIM = """
import sys, brim
rows, tokenizer, out, marks = sys.argv[1:5]
made = brim.tokenize(rows, tokenizer, destination=out, chat=True, memory="300MB", progress=False)
print(made.rows)
"""
_PACKED = _BRIM.replace("chat=True", "chat=True, pack=4096")
WAYS = {"TRL": _TRL, "datasets.map": _MAP, "brim": _BRIM, "brim --pack 4096": _PACKED}


def write_rows(path: Path, count: int) -> None:
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(5000)]

    def text(maximum: int) -> str:
        return " ".join(draw.choices(vocabulary, k=draw.randint(5, maximum))) + "."

    with open(path, "w") as file:
        for number in range(count):
            messages = [{"role": "system", "content": text(20)}] if number % 2 else []
            for _ in range(draw.randint(1, 4)):
                messages += [{"role": "user", "content": text(80)}, {"role": "assistant", "content": text(200)}]
            file.write(json.dumps({"messages": messages}) + "\n")


def write_tokenizer(folder: Path, rows: Path, template: str) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    with open(rows) as file:
        tokenizer.train_from_iterator([next(file) for _ in range(500)], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)


def measure(python: str, code: str, arguments: list[str]) -> tuple[float, int]:
    """Return the seconds and the peak memory (of all processes, shared pages counted once) of a run."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        [python, "-c", code, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    )
    peak, finished = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(0.1):
            try:
                tree = psutil.Process(process.pid)
                peak = max(peak, sum(item.memory_full_info().pss for item in [tree, *tree.children(recursive=True)]))
            except psutil.Error:
                continue

    watcher = threading.Thread(target=watch)
    watcher.start()
    error = process.communicate()[1]
    seconds = time.monotonic() - start
    finished.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(error.decode()[-2000:])
    return seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"rows": options.rows, "processes": options.processes, "ways": {}}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_rows(work / "rows.jsonl", options.rows)
        for marks in ("marks", "bare"):
            signs = ("{% generation %}", "{% endgeneration %}") if marks == "marks" else ("", "")
            write_tokenizer(work / marks, work / "rows.jsonl", _TEMPLATE.replace("«", signs[0]).replace("»", signs[1]))
            runs: dict[str, list[tuple[float, int]]] = {method: [] for method in WAYS}
            for _ in range(options.repeats):  # in turns, so that another load on the machine slows all ways alike
                for mode, code in WAYS.items():
                    out = work / "out"
                    arguments = [str(work / "rows.jsonl"), str(work / marks), str(out), marks, str(options.processes)]
                    runs[mode].append(measure(sys.executable, code, arguments))
                    for path in work.glob("out*"):
                        shutil.rmtree(path)
            for mode, measured in runs.items():
                seconds = statistics.median(seconds for seconds, _ in measured)
                row = {"seconds": seconds, "peak_bytes": max(peak for _, peak in measured)}
                results["ways"][f"{marks}: {mode}"] = row
                base = results["ways"][f"{marks}: TRL"]["seconds"]
                print(
                    f"{marks:6} {mode:17} {seconds:8.1f} s  {options.rows / seconds:8,.0f} rows/s  "
                    f"{row['peak_bytes'] / 1e6:7,.0f} MB  {base / seconds:5.1f} x TRL",
                    flush=True,
                )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
