"""Compare ways to prepare chats with labels: TRL, `datasets.map` with `apply_chat_template`, and brim.

The inputs are generated conversations of one to four turns, a tokenizer made by this script, and a template with
{% generation %} marks and the same one without. Contenders run in separate processes on all cores, in turns.
Without marks TRL cannot find the answers and trains on everything; brim finds them by rendered prefixes.

    make bench-chat            20,000 conversations
    make bench-chat ROWS=300000
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from peak import Measured, measure
from tables import MB, Part, at_least, at_most, machine, print_goals, print_machine, print_part, progress, write_json

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
PACKED = "brim --pack 4096"
WAYS = {
    "TRL": _TRL,
    "datasets.map": _MAP,
    "brim": _BRIM,
    PACKED: _BRIM.replace("chat=True", "chat=True, pack=4096").replace(
        "made.rows", 'made.counts["tokens"] / (made.rows * 4096)'
    ),
}


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
        tokenizer.train_from_iterator(list(itertools.islice(file, 500)), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts: dict[str, Part] = {}
    with tempfile.TemporaryDirectory(prefix="brim-chat-") as name:
        work = Path(name)
        facts = machine(work, ("brim", "trl", "transformers", "datasets", "tokenizers"))
        write_rows(work / "rows.jsonl", options.rows)
        for marks in ("marks", "bare"):
            signs = ("{% generation %}", "{% endgeneration %}") if marks == "marks" else ("", "")
            write_tokenizer(work / marks, work / "rows.jsonl", _TEMPLATE.replace("«", signs[0]).replace("»", signs[1]))
            runs: dict[str, list[Measured]] = {way: [] for way in WAYS}
            for number in range(options.repeats):  # in turns, so that other load affects all alike
                for way in WAYS:
                    progress(f"{marks}, {way}, run {number + 1}")
                    runs[way].append(run(way, work, marks, options.processes))
            parts[marks] = part_of(options.rows, marks, runs)
            print_part(parts[marks])
    print_goals(parts)
    print_machine(facts)
    write_json(options.json, facts, parts)


def run(way: str, work: Path, marks: str, processes: int) -> Measured:
    arguments = [str(work / "rows.jsonl"), str(work / marks), str(work / "out"), marks, str(processes)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    measured = measure([sys.executable, "-c", WAYS[way], *arguments], env=environment)
    if measured.exit_code:
        raise SystemExit(f"{way} failed:\n{measured.output[-2000:]}")
    for path in work.glob("out*"):
        shutil.rmtree(path)
    return measured


def part_of(rows: int, marks: str, runs: dict[str, list[Measured]]) -> Part:
    words = "with {% generation %}" if marks == "marks" else "without marks"
    part = Part(
        f"{rows:,} conversations, a template {words}", ("way", "s", "rows/s", "CPU s", "peak MB", "speed to TRL")
    )
    seconds = {way: statistics.median(each.seconds for each in found) for way, found in runs.items()}
    peaks = {way: max(each.peak_bytes for each in found) / MB for way, found in runs.items()}
    for way, found in runs.items():
        cpu = statistics.median(each.cpu_seconds for each in found)
        speed = f"{seconds['TRL'] / seconds[way]:.1f}×"
        times = (f"{seconds[way]:.1f}", f"{rows / seconds[way]:,.0f}", f"{cpu:.1f}")
        part.rows.append((way, *times, f"{peaks[way]:.0f}", speed))
        part.runs[way] = [
            {"seconds": each.seconds, "cpu_seconds": each.cpu_seconds, "peak_bytes": each.peak_bytes} for each in found
        ]
    part.goals.append(at_least("speed to TRL", seconds["TRL"] / seconds["brim"], 5 if marks == "marks" else 2, "×"))
    part.goals.append(at_most("peak memory", max(peaks["brim"], peaks[PACKED]), 300, " MB"))
    fill_rate = float(runs[PACKED][0].output.split()[-1])
    part.goals.append(at_least("fill rate of packed rows", fill_rate, 0.97, ""))
    return part


if __name__ == "__main__":
    main()
