"""A tokenizer folder gives the ids of `AutoTokenizer.from_pretrained(folder)`, or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from brim.compute.steps import tokenizer_folder
from brim.compute.steps.tokenizer_folder import find_id_change
from brim.compute.steps.tokenizers import LoadedTokenizer, find_tokenizer
from brim.errors import InputError
from tests.forked import brim
from tests.generators.texts import fuzz_texts
from tests.generators.tokenizers import SPECIALS, made_tokenizers

pytest.importorskip("tokenizers")
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
NEW = {"content": "numbers", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
# Settings that change the ids of tokenizer.json for some texts: kind of tokenizer, file, content, part of the error.
CHANGES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "added_tokens_decoder": (
        "bpe",
        "tokenizer_config.json",
        FAST | {"added_tokens_decoder": {"400": NEW}},
        "added_tokens_decoder adds 'numbers'",
    ),
    "flags of a token": (
        "bpe",
        "tokenizer_config.json",
        FAST | {"added_tokens_decoder": {"1": NEW | {"content": "[CLS]", "lstrip": True}}},
        "added_tokens_decoder sets lstrip of '[CLS]' to True",
    ),
    "extra_special_tokens": (
        "bpe",
        "tokenizer_config.json",
        FAST | {"extra_special_tokens": ["numbers"]},
        "extra_special_tokens of tokenizer_config.json adds 'numbers'",
    ),
    "additional_special_tokens": (
        "gpt4",
        "tokenizer_config.json",
        FAST | {"additional_special_tokens": ["<|a|>", "don't"]},
        "additional_special_tokens of tokenizer_config.json adds '<|a|>'",
    ),
    "pad_token": (
        "wordpiece",
        "tokenizer_config.json",
        FAST | {"pad_token": "Hello"},
        "pad_token of tokenizer_config.json adds 'Hello'",
    ),
    "special_tokens_map.json": (
        "bpe",
        "special_tokens_map.json",
        {"eos_token": {"content": "Hello", "lstrip": False, "rstrip": False, "normalized": False}},
        "eos_token of special_tokens_map.json adds 'Hello'",
    ),
    "add_prefix_space": (
        "bpe",
        "tokenizer_config.json",
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "unk_token": "[UNK]", "bos_token": "[CLS]"}
        | {"eos_token": "</s>"},
        "add_prefix_space is True",
    ),
    "do_lower_case": (
        "wordpiece",
        "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False},
        "do_lower_case is False",
    ),
}
SAME = {
    "names of its tokens": FAST | {"eos_token": "</s>", "pad_token": "[UNK]", "model_max_length": 512},
    "its own added tokens": FAST | {"added_tokens_decoder": {"1": NEW | {"content": "[CLS]"}}},
    "its own settings": FAST | {"add_prefix_space": False, "chat_template": "{{ messages }}"},
}


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_tokenizers(tmp_path_factory.mktemp("tokenizers"))


def folder_of(created: dict[str, Path], folder: Path, kind: str, name: str, content: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_bytes(created[kind].read_bytes())
    (folder / name).write_text(json.dumps(content))
    if name != "tokenizer_config.json":
        (folder / "tokenizer_config.json").write_text(json.dumps(FAST))
    return folder


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_folder, "has_transformers", lambda: False)


@pytest.mark.usefixtures("no_transformers")
@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_whose_configuration_changes_ids_is_refused_without_transformers(
    tokenizer_files: dict[str, Path], tmp_path: Path, change: str
) -> None:
    """The error names the setting, and the file that can be used alone."""
    kind, name, content, expected_message = CHANGES[change]
    folder = folder_of(tokenizer_files, tmp_path, kind, name, content)
    with pytest.raises(InputError, match="change its ids") as caught:
        find_tokenizer(folder)
    assert expected_message in caught.value.message
    assert "pip install transformers" in caught.value.hint
    assert str(folder / "tokenizer.json") in caught.value.hint
    assert find_tokenizer(folder / "tokenizer.json").read() == tokenizer_files[kind].read_bytes()


@pytest.mark.usefixtures("no_transformers")
@pytest.mark.parametrize("same", SAME)
def test_a_folder_whose_configuration_changes_nothing_is_taken_without_transformers(
    tokenizer_files: dict[str, Path], tmp_path: Path, same: str
) -> None:
    folder = folder_of(tokenizer_files, tmp_path, "bpe", "tokenizer_config.json", SAME[same])
    assert find_tokenizer(folder).read() == tokenizer_files["bpe"].read_bytes()
    assert find_tokenizer(folder).eos == SAME[same].get("eos_token")


@pytest.mark.usefixtures("no_transformers")
def test_bos_and_eos_flags_that_the_tokenizer_does_not_have_are_refused(
    tokenizer_files: dict[str, Path], tmp_path: Path
) -> None:
    config = FAST | {"bos_token": "[CLS]", "eos_token": "</s>"}
    for kind, flags, message in (
        ("llama3", {"add_bos_token": True, "add_eos_token": False}, None),
        ("llama3", {"add_bos_token": False}, "add_bos_token is False"),
        ("llama3", {"add_eos_token": True}, "add_eos_token is True"),
        ("unigram", {"add_eos_token": True}, None),
    ):
        assert (
            find_id_change(folder_of(tokenizer_files, tmp_path, kind, "tokenizer_config.json", config | flags))
            == message
        )


@pytest.mark.usefixtures("no_transformers")
def test_a_damaged_configuration_is_an_error_in_words(tokenizer_files: dict[str, Path], tmp_path: Path) -> None:
    folder = folder_of(tokenizer_files, tmp_path, "bpe", "tokenizer_config.json", {})
    (folder / "tokenizer_config.json").write_text("{")
    for inputs in (folder, folder / "tokenizer.json"):
        with pytest.raises(InputError, match=r"tokenizer_config\.json' cannot be read"):
            find_tokenizer(inputs)


TEXTS = [text for text in fuzz_texts(1500, [*SPECIALS, "numbers", "don't", "Hello"]) if text]


@pytest.mark.transformers
@pytest.mark.parametrize("change", [*CHANGES, *SAME, "a separate class"])
def test_a_folder_has_the_ids_of_auto_tokenizer(tokenizer_files: dict[str, Path], tmp_path: Path, change: str) -> None:
    """1,500 texts have the same ids, with and without special tokens; the file is used if transformers changes no
    ids."""
    from transformers import AutoTokenizer

    kind, name, content, _ = CHANGES.get(change) or (
        "bpe",
        "tokenizer_config.json",
        SAME.get(change) or {"tokenizer_class": "LlamaTokenizer"},
        "",
    )
    if change == "a separate class":
        kind = "llama"
    folder = folder_of(tokenizer_files, tmp_path, kind, name, content)
    actual = find_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    ours, single = LoadedTokenizer(actual.read(), "folder"), LoadedTokenizer(tokenizer_files[kind].read_bytes(), "file")
    differ = 0
    for special in (True, False):
        expected = [theirs(text, add_special_tokens=special).input_ids for text in TEXTS]
        assert [ids.tolist() for ids in ours.ids(TEXTS, special)] == expected
        differ += sum(ids.tolist() != second for ids, second in zip(single.ids(TEXTS, special), expected, strict=True))
    assert (differ > 0) == (change in CHANGES) or change == "a separate class"
    assert (actual.path is None) == (differ > 0) or change == "a separate class"
    assert actual.eos == theirs.eos_token


@pytest.mark.transformers
def test_neither_the_job_nor_its_workers_import_transformers(tokenizer_files: dict[str, Path], tmp_path: Path) -> None:
    """transformers takes hundreds of megabytes, so a child process loads the folder, without torch."""
    folder = folder_of(tokenizer_files, tmp_path, *CHANGES["extra_special_tokens"][:3])
    program = f"""
import pickle, sys
import pyarrow as pa
from brim.compute.steps.tokenize_step import TokenizeStep
from brim.compute.steps.tokenizers import find_tokenizer
step = pickle.loads(pickle.dumps(TokenizeStep(find_tokenizer({str(folder)!r}))))
step.open(pa.schema([("text", pa.string())]))
assert not {{"transformers", "torch"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.transformers
def test_the_command_says_that_transformers_loaded_the_folder(tokenizer_files: dict[str, Path], tmp_path: Path) -> None:
    """The ids are those of the folder; a repeated command has nothing to do."""
    (tmp_path / "folder").mkdir()
    folder = folder_of(tokenizer_files, tmp_path / "folder", *CHANGES["extra_special_tokens"][:3])
    (tmp_path / "texts.jsonl").write_text('{"text": "a numbers b"}\n')
    arguments = ["tokenize", tmp_path / "texts.jsonl", tmp_path / "out", "--tokenizer", folder, "--memory", "1GB"]
    assert "change it: transformers" in brim(*arguments).stderr
    assert "nothing to do" in brim(*arguments).stdout


@pytest.mark.transformers
def test_a_folder_that_transformers_cannot_load_is_judged_by_its_files(
    tokenizer_files: dict[str, Path], tmp_path: Path
) -> None:
    """A folder with an unknown class is accepted if no setting changes ids, and otherwise refused with the reason."""
    config = {"tokenizer_class": "NoSuchTokenizer", "auto_map": {"AutoTokenizer": ["no.NoSuch", None]}}
    folder = folder_of(tokenizer_files, tmp_path, "bpe", "tokenizer_config.json", config)
    assert find_tokenizer(folder).read() == tokenizer_files["bpe"].read_bytes()
    folder_of(tokenizer_files, tmp_path, "bpe", "tokenizer_config.json", config | {"pad_token": "numbers"})
    with pytest.raises(InputError, match="transformers cannot load the folder"):
        find_tokenizer(folder)


@pytest.mark.transformers
def test_a_tokenizer_object_of_transformers_names_its_eos_token(
    tokenizer_files: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    folder = folder_of(tokenizer_files, tmp_path, "bpe", "tokenizer_config.json", SAME["names of its tokens"])
    actual = find_tokenizer(AutoTokenizer.from_pretrained(folder))
    assert (actual.eos, actual.eos_from) == ("</s>", "the tokenizer")
