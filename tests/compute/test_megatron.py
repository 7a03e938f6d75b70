"""brim tokenize --format megatron: its files work with Megatron's reader and match the layout of its builder."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import brim, tree_digest
from tests.generators.tokenizers import made_tokenizers, prose

tokenizers = pytest.importorskip("tokenizers")
TEXTS = [prose(30, seed) if seed % 7 else "" for seed in range(300)]
READER = """
import json, sys
from megatron.core.datasets.indexed_dataset import IndexedDataset
found = []
for prefix in sys.argv[1:]:
    data = IndexedDataset(prefix)
    found.append({
        "dtype": data.index.dtype.__name__,
        "documents": data.document_indices.tolist(),
        "rows": [data[number].tolist() for number in range(len(data))],
    })
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    tokenizer = tokenizers.Tokenizer.from_file(str(made_tokenizers(folder)["gpt4"]))
    tokenizer.save(str(folder / "small.json"))
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"] |= {
        f"<unused {number}>": number for number in range(len(content["model"]["vocab"]), 65_500)
    }
    (folder / "large.json").write_text(json.dumps(content))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder


def tokenize(work: Path, out: Path, *options: str) -> Any:
    arguments = ("tokenize", "rows.jsonl", out, "--format", "megatron", "--memory", "400MB", *options, "--json")
    return json.loads(brim(*arguments, cwd=work).stdout.splitlines()[-1])


def read_pair(prefix: Path) -> tuple[int, list[list[int]], list[int]]:
    """Return the type code, the documents, and their offsets, read according to the format description."""
    data = prefix.with_name(prefix.name + ".idx").read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, documents = struct.unpack("<QBQQ", data[9:34])
    assert (version, documents) == (1, sequences + 1)
    lengths = np.frombuffer(data, "<i4", sequences, 34)
    pointers = np.frombuffer(data, "<i8", sequences, 34 + 4 * sequences)
    begins = np.frombuffer(data, "<i8", documents, 34 + 12 * sequences)
    assert len(data) == 34 + 12 * sequences + 8 * documents
    tokens = np.fromfile(prefix.with_name(prefix.name + ".bin"), "<u2" if code == 8 else "<i4")
    starts = pointers // tokens.itemsize
    rows = [tokens[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]
    return code, rows, begins.tolist()


def prefixes(out: Path, split: str = "train") -> list[Path]:
    return [out / "data" / name for name in (out / "data" / f"{split}-data-path.txt").read_text().split()]


def test_summary_names_the_pair_and_its_reader(work: Path, tmp_path: Path) -> None:
    """The last output lines state the prefix for Megatron's reader, and list files instead of shards."""
    arguments = ("tokenize", "rows.jsonl", tmp_path / "out", "--format", "megatron", "--tokenizer", "small.json")
    printed = brim(*arguments, "--limit", "20", cwd=work).stdout
    (prefix,) = prefixes(tmp_path / "out")
    assert f"IndexedDataset({str(prefix)!r})" in printed
    assert " in 3 files" in printed


@pytest.mark.parametrize(("tokenizer", "code"), [("small", 8), ("large", 4)])
def test_documents_are_read_back(work: Path, tmp_path: Path, tokenizer: str, code: int) -> None:
    """Ids have 16 bits for small vocabularies and 32 otherwise; empty documents are left out and counted."""
    out = tmp_path / "out"
    result = tokenize(work, out, "--tokenizer", f"{tokenizer}.json", "--eos", "</s>")
    raw = tokenizers.Tokenizer.from_file(str(work / f"{tokenizer}.json"))
    expected = [[*raw.encode(text).ids, raw.token_to_id("</s>")] for text in TEXTS if text]
    assert (result["documents"], result["empty"]) == (len(TEXTS), TEXTS.count(""))
    (prefix,) = prefixes(out)
    assert read_pair(prefix) == (code, expected, list(range(len(expected) + 1)))
    brim("verify", out, "--deep")


@pytest.mark.trainers
def test_the_reader_of_megatron_reads_the_documents(work: Path, tmp_path: Path) -> None:
    """The real reader `megatron.core.datasets.indexed_dataset` runs in the environment of BRIM_MEGATRON."""
    tokenize(work, tmp_path / "out", "--tokenizer", "small.json", "--shuffle", "1")
    raw = tokenizers.Tokenizer.from_file(str(work / "small.json"))
    expected = sorted(raw.encode(text).ids for text in TEXTS if text)
    command = [os.environ["BRIM_MEGATRON"], "-c", READER, *prefixes(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    (actual,) = json.loads(result.stdout.splitlines()[-1])
    assert actual["dtype"] == "uint16"
    assert sorted(actual["rows"]) == expected
    assert actual["documents"] == list(range(len(expected) + 1))


def test_shards_and_splits_depend_on_the_input_only(work: Path, tmp_path: Path) -> None:
    """Shuffled documents in splits give the same bytes for any workers and units."""
    options = ("--tokenizer", "small.json", "--shuffle", "5", "--split-into", "train=0.8,test=0.2")
    tokenize(work, tmp_path / "a", *options, "--workers", "1")
    tokenize(work, tmp_path / "b", *options, "--workers", "2", "--unit-size", "9KB")
    assert tree_digest(tmp_path / "a/data") == tree_digest(tmp_path / "b/data")
    actual = [
        row for split in ("train", "test") for prefix in prefixes(tmp_path / "a", split) for row in read_pair(prefix)[1]
    ]
    raw = tokenizers.Tokenizer.from_file(str(work / "small.json"))
    assert sorted(actual) == sorted(raw.encode(text).ids for text in TEXTS if text)
