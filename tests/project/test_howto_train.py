"""docs/how-to/train.md: a DataLoader reads brim's datasets with ranks, a stop within an epoch, and large rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import brim
from tests.generators.tokenizers import made_tokenizers

torch = pytest.importorskip("torch", reason="needs torch: make test-embed")
datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("train")
    texts = [json.dumps({"text": f"row {n} of a small corpus with a few words"}) for n in range(300)]
    (work / "texts.jsonl").write_text("\n".join(texts) + "\n")
    tokenizer = next(iter(made_tokenizers(work).values()))
    arguments = [
        "--tokenizer",
        tokenizer,
        "--pack",
        "16",
        "--eos",
        "</s>",
        "--rows-per-shard",
        "16",
        "--memory",
        "600MB",
        "-q",
    ]
    brim("tokenize", work / "texts.jsonl", work / "tokens", *arguments)
    return work / "tokens"


def stream_of(tokens: Path) -> datasets.IterableDataset:
    return datasets.load_dataset(str(tokens), split="train", streaming=True)


def ids_of(stream: datasets.IterableDataset) -> list[tuple[int, ...]]:
    return [tuple(row["input_ids"]) for row in stream]


def test_ranks_share_an_epoch(tokens: Path) -> None:
    """Two ranks together see every row once."""
    from datasets.distributed import split_dataset_by_node

    whole = ids_of(stream_of(tokens))
    parts = [ids_of(split_dataset_by_node(stream_of(tokens), rank, 2)) for rank in range(2)]
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == sorted(whole)


def test_batches_and_epochs(tokens: Path) -> None:
    """A DataLoader returns tensors; another epoch has the same rows in another order."""
    from torch.utils.data import DataLoader

    stream = stream_of(tokens).select_columns(["input_ids"]).shuffle(seed=1, buffer_size=100).with_format("torch")
    epochs = []
    for epoch in range(2):
        stream.set_epoch(epoch)
        batches = [batch["input_ids"] for batch in DataLoader(stream, batch_size=4)]
        assert all(batch.shape == (4, 16) for batch in batches[:-1])
        epochs.append([tuple(row.tolist()) for batch in batches for row in batch])
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])


def test_a_stop_in_the_middle_of_an_epoch(tokens: Path) -> None:
    """A restored state continues with the next row."""
    whole, stream = ids_of(stream_of(tokens)), stream_of(tokens)
    observed = []
    for row in stream:
        observed.append(tuple(row["input_ids"]))
        if len(observed) == 20:
            state = stream.state_dict()
            break
    fresh = stream_of(tokens)
    fresh.load_state_dict(state)
    assert observed + ids_of(fresh) == whole


MEASURED = """
import os, sys, datasets, pyarrow.dataset
from brim.memory.meter import process_bytes
if sys.argv[2] == "one":
    more = {"fragment_scan_options": pyarrow.dataset.ParquetFragmentScanOptions(pre_buffer=False)}
else:
    more = {}
held = []
for row in datasets.load_dataset(sys.argv[1], split="train", streaming=True, **more):
    assert len(row["file"]["bytes"] if isinstance(row["file"], dict) else row["file"]) == 60_000_000
    held.append(process_bytes(os.getpid()))
print(*held)
"""


def test_large_rows_are_not_held(tmp_path: Path) -> None:
    """Rows of 60 MB are streamed one at a time: the last row of a shard takes no more memory than the first."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(8):
        (source / f"{number}.bin").write_bytes(bytes([number]) * 60_000_000)
    brim("build", source, tmp_path / "out", "-q")

    def held(method: str) -> list[int]:
        command = [sys.executable, "-c", MEASURED, str(tmp_path / "out"), method]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        return [int(number) for number in result.stdout.split()]

    flat, usual = held("one"), held("all")
    assert len(flat) == 8
    assert max(flat) <= flat[1] + 130_000_000
    assert max(usual) >= max(flat) + 200_000_000  # the purpose of the option
