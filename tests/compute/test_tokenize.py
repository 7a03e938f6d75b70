"""brim tokenize end to end: the real command, real files, and the result for readers."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brim.cli.parser import run_command
from brim.errors import BrimError
from brim.memory.meter import tree_bytes
from tests.conftest import brim, tree_digest
from tests.hub import TestHub
from tests.publishing import DEST, REPO, Machine

tokenizers = pytest.importorskip("tokenizers")
ARGUMENTS = [
    "the",
    "a",
    "naïve",
    "Straße",
    "café",
    "splits",
    "words,",
    "12345",
    "(signs)",
    "it's",
    "3.14!",
    "你好",
    "🙂",
    "x_y",
]
LIMIT = 400_000_000
EOS = "<|end|>"


def prose(words: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choices(ARGUMENTS, k=words))


TEXTS = [prose(30, seed) for seed in range(200)] + ["", 'two\nlines, a "quote" and a comma', " spaces  ", "🙂" * 40]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tokenizers and a corpus."""
    folder = tmp_path_factory.mktemp("tokenize")
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=[EOS, "[CLS]"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([prose(100, seed) for seed in range(900, 920)], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", tokenizer.token_to_id("[CLS]"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(folder / "padded.json"))
    write_jsonl(folder / "corpus.jsonl", TEXTS)
    return folder


@pytest.fixture(scope="module")
def expected(work: Path) -> list[list[int]]:
    raw = tokenizers.Tokenizer.from_file(str(work / "tokenizer.json"))
    return [raw.encode(text).ids if text else [] for text in TEXTS]


@pytest.fixture(scope="module")
def bare(work: Path) -> list[list[int]]:
    """A tokenizer without [CLS] and with an end token for each document, as packing needs it."""
    raw = tokenizers.Tokenizer.from_file(str(work / "tokenizer.json"))
    end = raw.token_to_id(EOS)
    return [[*raw.encode(text, add_special_tokens=False).ids, end] if text else [] for text in TEXTS]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)))
    return path


def tokenize(work: Path, source: str, out: Path | str, *extra: str, **options: Any) -> Any:
    """Return the last line of --json, or the process if it is expected to fail."""
    arguments = ["--tokenizer", "tokenizer.json", "--memory", str(LIMIT), *extra]
    result = brim("tokenize", source, str(out), *arguments, "--json", cwd=work, **options)
    return json.loads(result.stdout.splitlines()[-1])


def ids(out: Path, split: str = "train") -> list[list[int]]:
    shards = sorted((out / "data").glob(f"{split}-*.parquet"))
    return [row for shard in shards for row in pq.read_table(shard)["input_ids"].to_pylist()]


def _as_csv(delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\r\n")
    writer.writerows([("id", "text"), *enumerate(TEXTS)])
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def write_formats(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Write the corpus in every format; return (source, options)."""
    lines = (folder / "corpus.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:99])) + gzip.compress(b"".join(lines[99:])))
    yield "a.jsonl.gz", []
    parts = [pa.compress(b"".join(part), codec="zstd", asbytes=True) for part in (lines[:99], lines[99:])]
    (folder / "a.jsonl.zst").write_bytes(b"".join(parts))
    yield "a.jsonl.zst", []
    (folder / "a.csv").write_bytes(_as_csv(","))
    yield "a.csv", []
    (folder / "a.tsv").write_bytes(_as_csv("\t"))
    yield "a.tsv", []
    table = pa.table({"id": range(len(TEXTS)), "nested": [[{"a": 1}]] * len(TEXTS), "text": TEXTS})
    pq.write_table(table.slice(0, 100), folder / "a-1.parquet", row_group_size=37)
    pq.write_table(table.slice(100), folder / "a-2.parquet", row_group_size=1)
    yield "a-*.parquet", []
    viewed = table.set_column(2, "text", table["text"].cast(pa.string_view()))
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, viewed.schema) as writer:
        writer.write_table(viewed, max_chunksize=41)
    yield "a.arrow", []
    (folder / "documents").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "documents" / f"{number:03d}.txt").write_text(text)
    yield "documents", ["--text", "document"]


def test_every_format_gives_the_ids_of_encode(work: Path, expected: list[list[int]]) -> None:
    """For every source format, each document has the ids that encode gives for it alone."""
    sources = [*write_formats(work)]

    def run(inputs: tuple[str, list[str]]) -> list[list[int]]:
        out = work / f"format-{inputs[0].replace('*', '')}"
        result = tokenize(work, inputs[0], out, *inputs[1])
        counted = [result[name] for name in ("documents", "tokens", "empty", "null", "cut", "rough", "rows")]
        assert counted == [len(TEXTS), sum(map(len, expected)), 1, 0, 0, 0, len(TEXTS)]
        return ids(out)

    with ThreadPoolExecutor(2) as pool:
        for supplied, rows in zip(sources, pool.map(run, sources), strict=True):
            assert rows == expected, supplied


def test_a_saved_dataset_and_what_stays_beside_the_ids(
    work: Path, tmp_path: Path, bare: list[list[int]], expected: list[list[int]]
) -> None:
    """A split of a DatasetDict works; labels keep their names; nulls are counted; --limit takes the first rows."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"]), input_ids=datasets.Value("int8")
    )
    texts = [None, *TEXTS[:-1]]
    rows = {"text": texts, "label": [n % 2 for n in range(len(TEXTS))], "input_ids": [0] * len(TEXTS)}
    saved = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(train=saved, test=saved.select(range(9))).save_to_disk(tmp_path / "saved")
    requested = tokenize(work, str(tmp_path / "saved"), tmp_path / "out", check=2)
    assert requested["hint"] == "It has: train, test. Name one with --from-split."
    extra = ("--from-split", "train", "--keep", "label", "--limit", "50")
    result = tokenize(work, str(tmp_path / "saved"), tmp_path / "out", *extra)
    assert (result["documents"], result["null"]) == (50, 1)
    read = datasets.load_dataset(str(tmp_path / "out"), split="train")
    assert read.features == {"input_ids": datasets.List(datasets.Value("int32")), "label": features["label"]}
    assert read["input_ids"][:] == [[], *expected[:49]]
    assert read["label"][:] == rows["label"][:50]


def test_packing_is_the_same_however_it_is_cut(work: Path, tmp_path: Path, bare: list[list[int]]) -> None:
    """Blocks are cut from all documents in sequence, for any workers and units; the tail is dropped and counted."""
    options = ("--pack", "64", "--eos", EOS, "--rows-per-shard", "50")
    methods = [("--workers", "1"), ("--workers", "2", "--unit-size", "5KB")]
    created = []
    for number, method in enumerate(methods):
        result = tokenize(work, "corpus.jsonl", tmp_path / str(number), *options, *method)
        created.append({name: sha for name, sha in tree_digest(tmp_path / str(number)).items() if ".brim" not in name})
    assert created[0] == created[1]
    flat = [token for document in bare for token in document]
    assert ids(tmp_path / "1") == [flat[index : index + 64] for index in range(0, len(flat) - 63, 64)]
    assert result["dropped_tail"] == len(flat) % 64
    counts = [pq.read_metadata(path).num_rows for path in sorted((tmp_path / "1" / "data").iterdir())]
    assert counts[:-1] == [50] * (len(counts) - 1)
    assert 0 < counts[-1] <= 50


CONFIGS = {
    "tokenizer_config.json": {"eos_token": EOS, "model_max_length": 512},
    "special_tokens_map.json": {"eos_token": {"content": EOS, "lstrip": False}, "pad_token": "[CLS]"},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("inputs", [".", "tokenizer.json"], ids=["folder", "file"])
def test_packed_documents_end_with_the_eos_token_of_the_configuration(
    work: Path, tmp_path: Path, bare: list[list[int]], name: str, inputs: str
) -> None:
    """The end token is printed and named in the summary and the card; the rows equal those of --eos."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
    (folder / name).write_text(json.dumps(CONFIGS[name]))
    tokenizer = ("--tokenizer", str(folder / inputs), "--memory", str(LIMIT))
    result = brim("tokenize", "corpus.jsonl", tmp_path / "out", *tokenizer, "--pack", "64", "--json", cwd=work)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert events[-1]["eos"] == EOS
    assert any(
        f"every document ends with {EOS!r}, the eos_token of {name}" in event.get("text", "") for event in events
    )
    flat = [token for document in bare for token in document]
    assert ids(tmp_path / "out") == [flat[index : index + 64] for index in range(0, len(flat) - 63, 64)]
    assert f"- every document ends with `{EOS}`" in (tmp_path / "out" / "README.md").read_text()
    message = brim("tokenize", "corpus.jsonl", tmp_path / "out", *tokenizer, "--pack", "64", cwd=work)
    assert "eos  <|end|>" in message.stdout


def test_packed_documents_can_follow_each_other_without_a_token(
    work: Path, tmp_path: Path, bare: list[list[int]]
) -> None:
    result = tokenize(work, "corpus.jsonl", tmp_path / "out", "--pack", "64", "--no-eos")
    flat = [token for document in bare for token in document[:-1]]
    assert ids(tmp_path / "out") == [flat[index : index + 64] for index in range(0, len(flat) - 63, 64)]
    assert result["eos"] is None
    assert "packed in rows of 64 tokens, without an end-of-document token" in (tmp_path / "out/README.md").read_text()


def test_the_eos_token_is_not_added_twice(work: Path, tmp_path: Path, bare: list[list[int]]) -> None:
    """A tokenizer that adds an end token, with --special-tokens, packs one token at each end."""
    encoder = tokenizers.Tokenizer.from_file(str(work / "tokenizer.json"))
    encoder.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, encoder.token_to_id(EOS))]
    )
    encoder.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    tokenizer = ("--tokenizer", str(tmp_path), "--pack", "64")
    rows = []
    for extra in ((), ("--special-tokens",), ("--special-tokens", "--no-eos"), ("--special-tokens", "--eos", EOS)):
        tokenize(work, "corpus.jsonl", tmp_path / f"out{len(rows)}", *tokenizer, *extra)
        rows.append(ids(tmp_path / f"out{len(rows)}"))
    flat = [token for document in bare for token in document]
    assert rows == [[flat[index : index + 64] for index in range(0, len(flat) - 63, 64)]] * 4


def test_packing_that_fills_no_row_is_an_error(work: Path, tmp_path: Path) -> None:
    """Nothing is published, and following the hint works."""
    arguments = ("--pack", "1000000", "--eos", EOS)
    refused = tokenize(work, "corpus.jsonl", tmp_path / "out", *arguments, check=2)
    assert "No row of 1,000,000 tokens (--pack) is full" in refused["message"]
    assert not (tmp_path / "out" / "data").exists()
    assert tokenize(work, "corpus.jsonl", tmp_path / "out", *arguments, "--fresh", "--pack-tail", "keep")["rows"] == 1


def test_bin_split_and_shuffled(work: Path, tmp_path: Path, bare: list[list[int]]) -> None:
    """With memmap and index every document occurs once, in another order; verify finds damage in each of the files."""
    options = ("--no-special-tokens", "--eos", EOS, "--split", "0.9/0.1", "--shuffle", "7")
    result = tokenize(work, "corpus.jsonl", tmp_path / "out", *options, "--format", "bin", "--unit-size", "9KB")
    data, documents = tmp_path / "out" / "data", {}
    for split in ("train", "validation"):
        head = json.loads((data / f"{split}.json").read_text())
        tokens = np.memmap(data / f"{split}.bin", dtype=head["dtype"], mode="r")
        start = np.load(data / f"{split}.idx.npy", mmap_mode="r")
        documents[split] = [tokens[start[n] : start[n + 1]].tolist() for n in range(head["documents"])]
        assert (head["dtype"], head["tokens"]) == ("<u2", len(tokens))
    both = documents["train"] + documents["validation"]
    assert sorted(both) == sorted(bare)
    assert both != bare
    assert 5 < len(documents["validation"]) < 50
    assert result["rows"] == len(TEXTS)
    tokenize(work, "corpus.jsonl", tmp_path / "parquet", *options)
    second = brim(
        "tokenize", "corpus.jsonl", tmp_path / "parquet", "--tokenizer", "padded.json", *options, cwd=work, check=None
    )
    assert "truncation and padding; switched off" in second.stderr
    assert "another dataset: the tokenizer changed." in second.stderr
    assert ids(tmp_path / "parquet", "validation") == documents["validation"]
    assert ids(tmp_path / "parquet") == documents["train"]
    brim("verify", tmp_path / "out")
    for name in ("train.bin", "train.idx.npy", "validation.json"):
        (data / name).write_bytes((data / name).read_bytes()[:-3] + b"???")
    actual = brim("verify", tmp_path / "out", check=None)
    assert actual.returncode != 0
    for name in ("train.bin", "train.idx.npy", "validation.json"):
        assert f"data/{name}: its content changed" in actual.stderr


@pytest.mark.long
def test_long_documents_without_spaces(work: Path, tmp_path: Path) -> None:
    """Megabytes without a space have the ids of the whole text, and the process tree stays below the limit."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("splitwordsnumbers0123", k=1_000_000 * (1 + n % 2))) for n in range(2)]
    source = write_jsonl(tmp_path / "long.jsonl", texts)
    arguments = [
        "tokenize",
        str(source),
        str(tmp_path / "out"),
        "--tokenizer",
        "tokenizer.json",
        "--memory",
        str(LIMIT),
    ]
    process = subprocess.Popen([sys.executable, "-m", "brim", *arguments], cwd=work, stdout=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_bytes(process.pid))
        time.sleep(0.004)
    assert process.returncode == 0
    assert peak <= LIMIT
    assert process.stdout is not None
    assert "long texts encoded in parts: 2" in process.stdout.read()
    raw = tokenizers.Tokenizer.from_file(str(work / "tokenizer.json"))
    assert ids(tmp_path / "out")[0] == raw.encode(texts[0]).ids


@pytest.fixture(scope="module")
def huge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a text of 50 MB without a space in the first row, in three formats."""
    folder = tmp_path_factory.mktemp("huge")
    draw = np.random.default_rng(1)
    text = draw.integers(97, 123, 50_000_000, np.uint8).tobytes().decode()
    source = write_jsonl(folder / "huge.jsonl", [text, "short"])
    (folder / "huge.jsonl.gz").write_bytes(gzip.compress(source.read_bytes(), 1))
    pq.write_table(pa.table({"text": [text, "short"]}), folder / "huge.parquet", compression="zstd")
    return folder


def peak_of(arguments: list[str]) -> tuple[int, int, str]:
    """Return the exit code of a command, the peak memory of its process tree, and its output."""
    with subprocess.Popen(
        [sys.executable, "-m", "brim", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, tree_bytes(process.pid))
            time.sleep(0.004)
        assert process.stdout is not None
        return process.returncode, peak, process.stdout.read()


@pytest.mark.long
@pytest.mark.parametrize("name", ["huge.jsonl", "huge.jsonl.gz", "huge.parquet"])
def test_a_text_that_does_not_fit_is_refused_within_the_limit(
    work: Path, huge: Path, tmp_path: Path, name: str
) -> None:
    """With 50 MB of text and a limit of 200 MB, neither planning nor a worker exceeds the limit before the error."""
    arguments = ["tokenize", str(huge / name), str(tmp_path / "out"), "--tokenizer", str(work / "tokenizer.json")]
    code, peak, output = peak_of([*arguments, "--memory", "200MB", "--quiet"])
    assert code == 4, output
    assert peak <= 200_000_000
    assert "--long-chars" not in output


@pytest.mark.long
def test_a_text_of_50_mb_fits_in_1_gb(work: Path, huge: Path, tmp_path: Path) -> None:
    """With a token for nearly every byte, all memory except for writing the row is at most 12 bytes per byte of
    text."""
    pytest.importorskip("gigatoken")  # the reference takes minutes
    arguments = ["tokenize", str(huge / "huge.jsonl"), "--tokenizer", str(work / "tokenizer.json")]
    code, peak, output = peak_of([*arguments, str(tmp_path / "out"), "--memory", "1GB", "--quiet"])
    assert code == 0, output
    assert peak <= 1_000_000_000
    code, peak, output = peak_of([*arguments, str(tmp_path / "bin"), "--format", "bin", "--memory", "1GB", "--quiet"])
    assert code == 0, output
    assert peak <= 120_000_000 + 12 * 50_000_000


@pytest.mark.long
def test_killed_and_continued(work: Path, tmp_path: Path) -> None:
    """After kill -9 of the parent in every part of the job, the output equals that of an uninterrupted run, bit for
    bit."""
    write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 3)
    options = ["--shuffle", "1", "--split", "0.8/0.2", "--pack", "32", "--eos", EOS, "--unit-size", "20KB", "--quiet"]
    arguments = ["tokenize", str(tmp_path / "corpus.jsonl"), "--tokenizer", "tokenizer.json", "--memory", str(LIMIT)]

    def command(out: str) -> list[str]:
        return [sys.executable, "-m", "brim", *arguments, str(tmp_path / out), *options]

    began = time.monotonic()
    subprocess.run(command("whole"), cwd=work, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - began
    moments, killed = random.Random("brim"), 0
    while killed < 8:
        process = subprocess.Popen(command("out"), cwd=work, stdout=subprocess.DEVNULL)
        try:
            assert process.wait(moments.uniform(0.3, seconds)) == 0
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
    subprocess.run(command("out"), cwd=work, check=True, stdout=subprocess.DEVNULL)
    assert tree_digest(tmp_path / "out") == tree_digest(tmp_path / "whole")


_KILLED = """
import os, signal, sys, threading
from brim.compute.outputs.token_files import ParquetShard
method, in_pool, seen = sys.argv[1], sys.argv[2] == "beside", []
usual = getattr(ParquetShard, method)
def killed(*given):
    seen.append(given)
    if len(seen) == 3:
        assert (threading.current_thread() is not threading.main_thread()) == in_pool
        os.kill(os.getpid(), signal.SIGKILL)
    return usual(*given)
setattr(ParquetShard, method, killed)
sys.argv[1:] = sys.argv[3:]
from brim.cli import main
main()
"""


@pytest.mark.long
def test_killed_while_shards_are_put_together(work: Path, tmp_path: Path) -> None:
    """After kill -9 while threads encode row groups, while one is added, and between two shards, no unit is encoded
    again, and the shards equal those of an uninterrupted run."""
    arguments = [
        "tokenize",
        "corpus.jsonl",
        "--tokenizer",
        "tokenizer.json",
        "--rows-per-shard",
        "30",
        "--memory",
        "600MB",
    ]
    plain = [sys.executable, "-m", "brim", *arguments]
    subprocess.run([*plain, str(tmp_path / "whole")], cwd=work, check=True, stdout=subprocess.DEVNULL)
    assert len(list((tmp_path / "whole" / "data").iterdir())) == 7
    for destination, actor in (("encoded", "beside"), ("append", "main"), ("_close", "main")):
        out = tmp_path / destination
        command = [sys.executable, "-c", _KILLED, destination, actor, *arguments, str(out), "--quiet"]
        assert subprocess.run(command, cwd=work).returncode == -signal.SIGKILL
        assert not list(out.glob("data/*"))
        output = subprocess.run([*plain, str(out), "--json"], cwd=work, check=True, stdout=subprocess.PIPE, text=True)
        assert json.loads(output.stdout.splitlines()[-1])["computed"] == 0
        assert tree_digest(out) == tree_digest(tmp_path / "whole")


def test_to_the_hub(work: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    """The same shards and a card are published; a second run has nothing to do."""
    with TestHub(tmp_path / "hub") as hub:
        machine = Machine(hub, tmp_path)
        arguments = [
            "corpus.jsonl",
            DEST,
            "--tokenizer",
            "tokenizer.json",
            "--memory",
            str(LIMIT),
            "--direct",
            "--json",
        ]
        command = [sys.executable, "-m", "brim", "tokenize", *arguments]
        messages = []
        for _ in range(2):
            result = subprocess.run(command, cwd=work, env=machine.environment, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr + result.stdout
            messages.append(json.loads(result.stdout.splitlines()[-1]))
        assert (messages[0]["computed"], messages[1]["units"]) == (1, 0)
        (name,) = [name for name in hub.files(REPO) if name.startswith("data/")]
        table = pq.read_table(io.BytesIO(hub.read(REPO, name)))
        assert table["input_ids"].to_pylist() == expected
        assert f"{len(TEXTS)} documents" in hub.read(REPO, "README.md").decode()


REFUSED = [
    ("corpus.jsonl", ["--keep-columns", "id", "--pack", "8"], "--keep-columns cannot be used with --pack"),
    ("corpus.jsonl", ["--pack", "100000000", "--no-eos"], "too long for a limit"),
    ("corpus.jsonl", ["--pack", "8"], "does not define an end-of-document token. Name it: --eos TOKEN."),
    ("corpus.jsonl", ["--pack", "8", "--eos", EOS, "--no-eos"], "--eos cannot be used with --no-eos"),
    ("corpus.jsonl", ["--eos", "<|End|>"], "Close to it are '<|end|>'"),
    ("corpus.jsonl", ["--column", "txt"], "Close to it are 'text'"),
    ("corpus.jsonl", ["--column", "id"], "not text but int64"),
    ("corpus.jsonl", ["--tokenizer", "corpus.jsonl"], "is not a tokenizer"),
    ("-", [], "Standard input is not read"),
    ("cut.jsonl.gz", [], "damaged or cut off"),
    ("surrogate.jsonl", [], "half of a surrogate pair"),
]


def test_refused_in_words(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before any encoding, and no files are left at the destination."""
    (work / "cut.jsonl.gz").write_bytes(gzip.compress((work / "corpus.jsonl").read_bytes())[:-9])
    (work / "surrogate.jsonl").write_bytes(b'{"text": "good"}\n{"text": "bad \\ud83d"}\n')
    monkeypatch.chdir(work)
    monkeypatch.setattr("brim.wording._in_terminal", True)
    for source, options, message in REFUSED:
        arguments = ["--tokenizer", "tokenizer.json", "--memory", str(LIMIT), *options]
        with pytest.raises(BrimError) as caught:  # a separate command would take half a second each
            run_command(["tokenize", source, str(tmp_path / "out"), *arguments])
        assert message in f"{caught.value.message} {caught.value.hint}"
        assert not (tmp_path / "out").exists()


def test_document_without_a_safe_cut_is_named(tmp_path: Path) -> None:
    """The error names the text, because a count would not help to find it."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["a", "a a " * 3000, "acgt" * 3000, "a", "tgca" * 3000]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = ["--tokenizer", "tokenizer.json", "--long-chars", "4000", "--no-eos"]
    result = brim("tokenize", "corpus.jsonl", "out", *arguments, cwd=tmp_path)
    assert "2 long documents had no safe place for a cut" in result.stderr
    assert "The first is document 2 of corpus.jsonl, counted from 0." in result.stderr


def test_splits_by_name_and_by_share(work: Path, tmp_path: Path) -> None:
    """--split names the split, --split-into the shares; shares without names still work, with a one-line warning."""
    arguments = ("--tokenizer", "tokenizer.json", "--memory", str(LIMIT))
    names = brim("tokenize", "corpus.jsonl", tmp_path / "dev", *arguments, "--split", "dev", cwd=work)
    assert [path.name for path in (tmp_path / "dev" / "data").iterdir()] == ["dev-00000-of-00001.parquet"]
    assert f"load  datasets.load_dataset('{tmp_path / 'dev'}')" in names.stdout
    assert "is now" not in names.stderr
    brim("tokenize", "corpus.jsonl", tmp_path / "a", *arguments, "--split-into", "train=0.9,validation=0.1", cwd=work)
    old = brim("tokenize", "corpus.jsonl", tmp_path / "b", *arguments, "--split", "0.9/0.1", cwd=work)
    assert "brim: --split 0.9/0.1 is now --split-into train=0.9,validation=0.1." in old.stderr
    parts = [sorted((tmp_path / name / "data").iterdir()) for name in ("a", "b")]
    assert [path.read_bytes() for path in parts[0]] == [path.read_bytes() for path in parts[1]]
