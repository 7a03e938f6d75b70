"""TRL's SFTTrainer and transformers.Trainer accept the chat datasets without changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import brim
from tests.generators.chats import STYLES, chat_rows, with_marks, write_chat_tokenizer, write_chats
from tests.generators.tokenizers import made_tokenizers

pytestmark = pytest.mark.trainers
LONGEST = 3000  # tokens of the longest conversation: more than TRL's default limit of 1,024


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose template marks answers, conversations, and the dataset that brim makes of them."""
    folder = tmp_path_factory.mktemp("trainers")
    write_chat_tokenizer(folder / "tokenizer", with_marks(STYLES["chatml"]), made_tokenizers(folder)["gpt4"])
    config = json.loads((folder / "tokenizer/tokenizer_config.json").read_text()) | {"pad_token": "[SEP]"}
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(config))
    rows = chat_rows(8)
    rows[0]["messages"][-1]["content"] += " and" * LONGEST
    write_chats(folder / "chats.jsonl", [{"messages": row["messages"]} for row in rows])
    for name, options in {"rows": [], "packed": ["--pack", "4096", "--position-ids"]}.items():
        arguments = ("--tokenizer", folder / "tokenizer", "--chat", "--memory", "600MB", "-q", *options)
        brim("tokenize", folder / "chats.jsonl", folder / name, *arguments)
    return folder


def load_rows(work: Path, name: str) -> Any:
    import datasets

    return datasets.load_dataset("parquet", data_files=f"{work}/{name}/data/*.parquet", split="train")


def make_model(tokenizer: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=8192, **size)
    return transformers.LlamaForCausalLM(config)


def settings(out: Path) -> dict[str, Any]:
    values = {"per_device_train_batch_size": 2, "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-3, "seed": 1}
    return {**values, "output_dir": str(out), "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no"}


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_with_trl(work: Path, out: Path, dataset: Any, **options: Any) -> tuple[list[float], Any]:
    import transformers
    from trl import SFTConfig, SFTTrainer

    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "tokenizer")
    config = SFTConfig(**settings(out), max_length=None, **options)
    trainer = SFTTrainer(make_model(tokenizer), config, train_dataset=dataset, processing_class=tokenizer)
    return losses(trainer), trainer


def test_trl_has_the_loss_of_its_own_preparation(work: Path, tmp_path: Path) -> None:
    """Training on brim's rows gives the losses of TRL's own masks in two steps, and no token is cut."""
    import datasets

    raw = datasets.load_dataset("json", data_files=str(work / "chats.jsonl"), split="train")
    own, _ = train_with_trl(work, tmp_path / "own", raw, assistant_only_loss=True)
    created, trainer = train_with_trl(work, tmp_path / "brim", load_rows(work, "rows"))
    assert len(own) == 2
    assert created == own
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    assert lengths == load_rows(work, "rows")["length"][:]
    assert max(lengths) > LONGEST


def test_trl_takes_packed_rows(work: Path, tmp_path: Path) -> None:
    """With padding_free and max_length=None, rows of several conversations are not cut."""
    dataset = load_rows(work, "packed")
    actual, trainer = train_with_trl(work, tmp_path / "packed", dataset, padding_free=True)
    assert len(actual) == 2
    assert all(loss > 0 for loss in actual)
    assert sum(len(row["input_ids"]) for row in trainer.train_dataset) == sum(dataset["length"])


def test_transformers_trainer(work: Path, tmp_path: Path) -> None:
    """DataCollatorForSeq2Seq pads ids and labels; two steps have the same losses as TRL."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "tokenizer")
    trainer = transformers.Trainer(
        make_model(tokenizer),
        transformers.TrainingArguments(**settings(tmp_path / "out")),
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
        train_dataset=load_rows(work, "rows").select_columns(["input_ids", "labels"]),
    )
    expected, _ = train_with_trl(work, tmp_path / "trl", load_rows(work, "rows"))
    assert losses(trainer) == pytest.approx(expected, rel=1e-3)
