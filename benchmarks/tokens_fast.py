"""Measure the speedup of brim over raw `tokenizers`, as whole processes in turns: part of `make bench-tokenize`.

    python benchmarks/tokens_fast.py [--mb 1000] [--repeats 2] [--corpora code,languages,words] [--kinds bpe,metaspace]
        [--inputs jsonl,parquet] [--outputs parquet,packed,bin] [--python OTHER] [--encoder reference] [--no-peers]
        [--straight OTHER] [--datatrove OTHER] [--data DIR] [--json FILE]

Corpora are made of packages. *code* is English and code: all texts of the wheels that pip can get and of the installed
packages, in chunks of 1.5 KB without duplicates, and repeated from the start if that is less than --mb. *languages* are
the translated messages of these wheels and of some more in about 100 languages, also without duplicates, which is less.
*words* is 350 MB of words that all differ, on which unbounded caches keep growing: only brim's memory is measured.

*raw* is `Tokenizer.encode_batch` of all texts on all cores, reading included, on the first 40 MB of a corpus: its
rate does not depend on the size. brim reads JSONL or Parquet and writes Parquet, packed rows or bin within
600 MB. *straight line* is tokens_straight.py. Speed is MB of text per second of the whole process; CPU is the user and
system time of it and of all its children. `--python` is the environment that runs brim; for the kinds bpe, wordpiece
and unigram, use one with tokenizers 1.x, and --encoder reference.

Other tools run once on the same 40 MB: `datasets.map` with two processes, and datatrove's tokenizer step with two tasks
if --datatrove is the Python of an environment that has it. The straight line needs an environment with orjson in
--straight.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from peak import as_installed, tree_bytes
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
from tokens_texts import _files, _pieces, read_texts

LIMIT_MB = 600
RAW_BYTES = 40 * MB
WHEELS = (
    "django", "wagtail", "plone.app.locales", "djangorestframework", "sphinx", "django-cms", "django-oscar", "pretix",
    "mayan-edms", "translate-toolkit", "weblate", "kolibri", "apache-superset", "spyder", "mezzanine",
)  # fmt: skip
TRANSLATED = (
    "home-assistant-frontend", "indico", "ckan", "postorius", "hyperkitty", "wger", "django-allauth", "trytond-account",
    "trytond-sale", "trytond-purchase", "trytond-stock", "trytond-product", "trytond-party", "trytond-account-invoice",
    "trytond-production", "trytond-project", "trytond-timesheet", "trytond-marketing-automation", "trytond-country",
)  # fmt: skip
_TEXTS = (".py", ".md", ".rst", ".txt", ".js", ".ts", ".tsx", ".html", ".css", ".json", "METADATA")
_MESSAGE = re.compile(r'^msgstr(?:\[\d\])? ((?:"(?:[^"\\]|\\.)*"\s*)+)', re.MULTILINE)
OUTPUTS = {
    "parquet": (),
    "packed": ("--pack", "2048", "--no-eos"),
    "bin": ("--format", "bin"),
}
LEAST = {
    ("bpe", 0): 10.0,
    ("metaspace", 0): 3.0,
    ("bpe", 1): 8.0,
    ("wordpiece", 1): 4.0,
    ("unigram", 1): 3.0,
}
STRAIGHT = ("bpe", "metaspace")  # tokenizer kinds that the encoder of tokens_straight.py supports
WORDS_MB = 350


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--corpora", type=comma_list("code", "languages", "words"), default="code,languages")
    parser.add_argument("--kinds", type=comma_list(*sorted({kind for kind, _ in LEAST})), default="bpe,metaspace")
    parser.add_argument("--inputs", type=comma_list("jsonl", "parquet"), default="jsonl,parquet")
    parser.add_argument("--outputs", type=comma_list("parquet", "packed", "bin"), default="parquet,packed,bin")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--data", type=Path, default=Path("bench-data"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--encoder", choices=("auto", "reference", "fast"), default="auto")
    parser.add_argument("--datatrove", metavar="PYTHON")
    parser.add_argument("--straight", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--raw", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.raw is not None:
        raw(*arguments.raw)
        return
    arguments.data.mkdir(parents=True, exist_ok=True)
    facts = machine(arguments.data, ("tokenizers", "pyarrow"))
    parts = {}
    for corpus in arguments.corpora.split(","):
        if corpus == "words":
            parts["words"] = part = unique_words(arguments)
            print_part(part)
            continue
        source = corpus_of(arguments.data, corpus, arguments.mb * MB)
        for kind in arguments.kinds.split(","):
            tokenizer = tokenizer_of(arguments.data, kind, source)
            parts[f"{corpus}, {kind}"] = part = compared(corpus, kind, source, tokenizer, arguments)
            print_part(part)
    print_goals(parts)
    print_machine(facts)
    write_json(arguments.json, facts, parts)


def compared(corpus: str, kind: str, source: Path, tokenizer: Path, arguments: argparse.Namespace) -> Part:
    table = parquet_of(source)
    sample = head_of(source, RAW_BYTES)
    brim = [arguments.python, "-m", "brim", "tokenize"]
    options = ["--tokenizer", str(tokenizer), "--memory", f"{LIMIT_MB}MB", "--encoder", arguments.encoder]
    commands: dict[str, tuple[list[str], Path]] = {
        "raw": ([sys.executable, __file__, "--raw", str(sample), str(tokenizer)], sample)
    }
    for output in arguments.outputs.split(","):
        commands[f"brim, JSONL to {output}"] = ([*brim, str(source), "OUT", *options, *OUTPUTS[output]], source)
    if "parquet" in arguments.inputs.split(","):
        commands["brim, Parquet to parquet"] = ([*brim, str(table), "OUT", *options], source)
    if kind in STRAIGHT and arguments.encoder == "auto" and _has(arguments.straight, "orjson, gigatoken"):
        straight = Path(__file__).with_name("tokens_straight.py")
        commands["straight line"] = ([arguments.straight, str(straight), str(source), str(tokenizer), "OUT"], source)
    peers = {} if arguments.no_peers else peers_of(sample, tokenizer, arguments)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in (*commands, *peers)}
    encoder = ""
    for number in range(arguments.repeats):
        for name, (command, read) in (commands | peers if number == 0 else commands).items():
            actual, printed = run_once(command, arguments.data)
            runs[name].append(actual | {"mb": read.stat().st_size / MB})
            progress(f"{corpus}, {kind}, {name}: {actual['seconds']:.1f} s, {actual['cpu_s']:.1f} CPU-s")
            encoder = encoder or next(iter(re.findall(r"encoder +(.+)", printed)), "")
    part = Part(
        f"{corpus}, {kind}: {source.stat().st_size / MB:,.0f} MB of JSONL, {encoder}",
        ("what", "MB/s", "against raw", "MB/CPU-s", "against raw in CPU", "peak MB"),
    )
    first = rates(runs["raw"])
    for name, each in runs.items():
        speed, cpu = rates(each)
        peak = max(run["peak_mb"] for run in each)
        # datatrove's processes belong to a fork server, so their processor time is not available.
        used = ("", "") if name.startswith("datatrove") else (f"{cpu:.1f}", f"{cpu / first[1]:.1f}×")
        part.rows.append((name, f"{speed:.1f}", f"{speed / first[0]:.1f}×", *used, f"{peak:.0f}"))
    part.runs = runs
    generation = int("tokenizers 1" in encoder)
    least = LEAST.get((kind, generation))
    for name in [name for name in runs if name.startswith("brim")] if least is not None else ():
        speed, cpu = rates(runs[name])
        part.goals.append(at_least(f"{name}: speed against raw", speed / first[0], least, "×"))
        part.goals.append(at_least(f"{name}: against raw in CPU-seconds", cpu / first[1], least, "×"))
    if "straight line" in runs:
        fraction = rates(runs["brim, JSONL to parquet"])[1] / rates(runs["straight line"])[1]
        part.goals.append(at_least("share of the straight line in CPU-seconds", fraction, 0.45, "×"))
    peak = max(run["peak_mb"] for name, each in runs.items() if name.startswith("brim") for run in each)
    part.goals.append(at_most("peak memory of the tree", peak, LIMIT_MB, " MB"))
    return part


def _has(python: str, names: str) -> bool:
    if subprocess.run([python, "-c", f"import {names}"], capture_output=True).returncode == 0:
        return True
    progress(f"{python} has not {names}: the straight line is left out")
    return False


def peers_of(sample: Path, tokenizer: Path, arguments: argparse.Namespace) -> dict[str, tuple[list[str], Path]]:
    """Measure the other tools that are installed."""
    local = Path(__file__).parent
    actual = {}
    if importlib.util.find_spec("datasets") is None:
        progress("datasets is not installed: datasets.map is left out")
    else:
        command = [sys.executable, str(local / "tokens.py"), "--child", "map2", str(sample), str(tokenizer), "OUT"]
        actual["datasets.map, 2 processes"] = (command, sample)
    if arguments.datatrove is None:
        progress("no --datatrove: its tokenizer step is left out")
    else:
        command = [arguments.datatrove, str(local / "tokens_datatrove.py"), str(sample), str(tokenizer), "OUT"]
        actual["datatrove, 2 tasks"] = (command, sample)
    return actual


def unique_words(arguments: argparse.Namespace) -> Part:
    """Measure memory only: an encoder that caches the words it has encoded would keep all of these."""
    source = arguments.data / f"words-{WORDS_MB}.jsonl"
    if not source.exists():
        write_words(source, WORDS_MB * MB)
    code = corpus_of(arguments.data, "code", arguments.mb * MB)
    part = Part(f"words that all differ: {WORDS_MB} MB", ("what", "s", "CPU-s", "peak MB"))
    for kind in arguments.kinds.split(","):
        brim = [arguments.python, "-m", "brim", "tokenize", str(source), "OUT", "--memory", f"{LIMIT_MB}MB"]
        command = [*brim, "--tokenizer", str(tokenizer_of(arguments.data, kind, code)), "--encoder", arguments.encoder]
        actual, _ = run_once(command, arguments.data)
        row = (f"brim, {kind}", f"{actual['seconds']:.1f}", f"{actual['cpu_s']:.1f}", f"{actual['peak_mb']:.0f}")
        part.rows.append(row)
        part.runs[kind] = [actual]
        part.goals.append(at_most(f"{kind}: peak memory of the tree", actual["peak_mb"], LIMIT_MB, " MB"))
    return part


def write_words(path: Path, size: int) -> None:
    """Write lines of a hundred words of three to nine letters, each of which is a number that occurs once."""
    letters = "etaoinshrdlcumwfgypbvk"
    created, number = path.with_suffix(".tmp"), 0
    with open(created, "w") as file:
        while file.tell() < size:
            arguments = []
            for each in range(number, number + 100):
                text, remaining = "", each * 2_654_435_761 % (1 << 32)
                while remaining or len(text) < 3:
                    remaining, letter = divmod(remaining, len(letters))
                    text += letters[letter]
                arguments.append(text)
            number += 100
            file.write(json.dumps({"text": " ".join(arguments)}) + "\n")
    created.rename(path)


def rates(runs: list[dict[str, float]]) -> tuple[float, float]:
    """Return MB per second and MB per CPU-second of the median run."""
    return (
        statistics.median(run["mb"] / run["seconds"] for run in runs),
        statistics.median(run["mb"] / run["cpu_s"] for run in runs),
    )


def run_once(command: list[str], data: Path) -> tuple[dict[str, float], str]:
    with tempfile.TemporaryDirectory(dir=data) as folder, tempfile.TemporaryFile("w+") as message:
        command = [str(Path(folder, "out")) if argument == "OUT" else argument for argument in command]
        started_at = time.monotonic()
        process = subprocess.Popen(
            command, stdout=message, stderr=message, stdin=subprocess.DEVNULL, env=as_installed(os.environ)
        )
        peak = 0
        while True:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            peak = max(peak, tree_bytes(process.pid))
            time.sleep(0.02)
        seconds = time.monotonic() - started_at
        process.returncode = os.waitstatus_to_exitcode(status)
        message.seek(0)
        text = message.read()
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{text[-2000:]}")
        return {"seconds": seconds, "cpu_s": used.ru_utime + used.ru_stime, "peak_mb": peak / MB}, text


def raw(source: str, tokenizer: str) -> None:
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(tokenizer)
    texts = read_texts(Path(source))
    assert len(loaded.encode_batch(texts)) == len(texts)
    os._exit(0)  # exclude the time to free millions of objects


def corpus_of(data: Path, corpus: str, size: int) -> Path:
    path = data / f"{corpus}-{size // MB}.jsonl"
    if path.exists():
        return path
    wheels = wheels_of(data / "wheels", WHEELS)
    if corpus == "languages":
        wheels += wheels_of(data / "translated", TRANSLATED)
    created = path.with_suffix(".tmp")
    with open(created, "w") as file:
        while file.tell() < size:
            before = file.tell()
            texts = _chain(texts_of(wheels), _files()) if corpus == "code" else messages_of(wheels)
            for segment in _pieces(texts):
                file.write(json.dumps({"text": segment}, ensure_ascii=False) + "\n")
                if file.tell() >= size:
                    break
            progress(f"{corpus}: {(file.tell() - before) / MB:.0f} MB of texts that differ")
            if corpus != "code":
                break
    created.rename(path)
    return path


def _chain(*parts: Iterator[str]) -> Iterator[str]:
    for part in parts:
        yield from part


def wheels_of(folder: Path, names: tuple[str, ...]) -> list[Path]:
    if not folder.exists():
        folder.mkdir()
        for name in names:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), name]
            if subprocess.run(command, capture_output=True).returncode:
                progress(f"pip cannot get {name}")
    return sorted(folder.glob("*.whl"))


def texts_of(wheels: list[Path], endings: tuple[str, ...] = _TEXTS) -> Iterator[str]:
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(endings) and not name.endswith((".min.js", ".min.css")):
                    try:
                        yield wheel.read(name).decode()
                    except UnicodeDecodeError:
                        continue


def messages_of(wheels: list[Path]) -> Iterator[str]:
    for text in texts_of(wheels, (".po",)):
        actual = ("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', each)) for each in _MESSAGE.findall(text)[1:])
        yield "".join(f"{each.replace(chr(92) + 'n', chr(10))}\n" for each in actual if each)
    for path in wheels:
        if path.name.startswith("home_assistant"):
            for text in texts_of([path], (".json",)):
                actual = json.loads(text)
                if isinstance(actual, dict):
                    yield "".join(f"{each}\n" for each in actual.values() if isinstance(each, str))


def head_of(source: Path, size: int) -> Path:
    path = source.with_suffix(".head.jsonl")
    if not path.exists():
        with open(source, "rb") as file:
            path.write_bytes(file.read(size) + file.readline())
    return path


def parquet_of(source: Path) -> Path:
    import pyarrow.json as pj
    import pyarrow.parquet as pq

    path = source.with_suffix(".parquet")
    if not path.exists():
        reader = pj.open_json(source)
        with pq.ParquetWriter(path, reader.schema, compression="zstd") as writer:
            for batch in reader:
                writer.write_batch(batch)
    return path


def trained_words(kind: str, texts: list[str]) -> str:
    """Train WordPiece like BERT's, or Unigram like T5's."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    common = {"vocab_size": 30_000, "show_progress": False}
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]", "[CLS]", "[SEP]"], **common)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(special_tokens=["<unk>", "</s>"], unk_token="<unk>", **common)
    tokenizer.train_from_iterator(texts[:6000], trainer)
    return str(tokenizer.to_str())


def tokenizer_of(data: Path, kind: str, source: Path) -> Path:
    """Train a tokenizer of 32,000 tokens on 30 MB of the corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = data / f"{source.stem}-{kind}.json"
    if path.exists():
        return path
    texts = [text for _, text in zip(range(20_000), read_texts(head_of(source, RAW_BYTES)), strict=False)]
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        specials, alphabet = ["<|endoftext|>"], pre_tokenizers.ByteLevel.alphabet()
    elif kind in ("wordpiece", "unigram"):
        path.write_text(trained_words(kind, texts))
        return path
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        specials, alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))], []
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=specials, initial_alphabet=alphabet, limit_alphabet=2000, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [added for added in content["added_tokens"] if not added["content"].startswith("<0x")]
    if kind != "bpe":
        content["pre_tokenizer"]["split"] = False
    path.write_text(json.dumps(content))
    return path


if __name__ == "__main__":
    main()
