"""Small tokenizers of the common kinds, trained here: `python -m tests.generators.tokenizers FOLDER`.

tokenizers 1.x cannot train: tests in its environment take the folder from BRIM_TOKENIZERS.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

ARGUMENTS = [
    "the",
    "naïve",
    "Straße",
    "café",
    "of",
    "a",
    "tokenizer",
    "splits",
    "words,",
    "numbers",
    "12345",
    "and",
    "(signs)",
    "—",
    "it's",
    "3.14!",
    "你好",
    "世界",
    "🙂",
    "x_y\n\n\t",
]
SPECIALS = ["[UNK]", "[CLS]", "[SEP]", "</s>"]
BYTE_LEVEL = ("bpe", "prefixed", "gpt4", "llama3", "qwen", "digits")
METASPACE = ("llama", "metaspace")
OTHER_VALUES = ("wordpiece", "unigram")
KINDS = (*BYTE_LEVEL, *METASPACE, *OTHER_VALUES)
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def prose(words: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(ARGUMENTS) * draw.randint(1, 2) for _ in range(words))


def made_tokenizers(folder: Path) -> dict[str, Path]:
    """Return the tokenizers by kind; those of BRIM_TOKENIZERS if it is set."""
    inputs = os.environ.get("BRIM_TOKENIZERS")
    if inputs is None:
        write_tokenizers(folder)
    return {kind: Path(inputs or folder) / f"{kind}.json" for kind in KINDS}


def write_tokenizers(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    corpus = [prose(200, seed) for seed in range(100, 130)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    kinds: dict[str, Any] = {}

    def bytes_of(name: str, splitter: Any, **model: Any) -> None:
        kinds[name] = Tokenizer(models.BPE(**model))
        kinds[name].pre_tokenizer = splitter
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        )
        kinds[name].train_from_iterator(corpus, trainer)

    def split_by(pattern: str) -> Any:
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), last])

    bytes_of("bpe", pre_tokenizers.ByteLevel(add_prefix_space=False))
    kinds["bpe"].post_processor = processors.ByteLevel()
    kinds["prefixed"] = Tokenizer.from_str(kinds["bpe"].to_str())
    kinds["prefixed"].pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    kinds["prefixed"].post_processor = processors.RobertaProcessing(("[SEP]", 2), ("[CLS]", 1))
    bytes_of("gpt4", split_by(_GPT4))
    bytes_of("llama3", split_by(_GPT4), ignore_merges=True)
    kinds["llama3"].post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    bytes_of("qwen", split_by(_GPT4.replace(r"\p{N}{1,3}", r"\p{N}")))
    kinds["qwen"].normalizer = normalizers.NFC()
    bytes_of(
        "digits",
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    )
    kinds["wordpiece"] = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    kinds["wordpiece"].normalizer = normalizers.BertNormalizer()
    kinds["wordpiece"].pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIALS, show_progress=False)
    kinds["wordpiece"].train_from_iterator(corpus, trainer)
    kinds["wordpiece"].post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    kinds["unigram"] = Tokenizer(models.Unigram())
    kinds["unigram"].normalizer = normalizers.NFKC()
    kinds["unigram"].pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIALS, unk_token="[UNK]", show_progress=False)
    kinds["unigram"].train_from_iterator(corpus, trainer)
    kinds["unigram"].post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 3)])
    for name, each in kinds.items():
        each.save(str(folder / f"{name}.json"))
    for name in METASPACE:
        (folder / f"{name}.json").write_text(json.dumps(_metaspace(corpus, name)))


def _metaspace(corpus: list[str], name: str) -> dict[str, Any]:
    """Write a BPE tokenizer of characters with byte fallback as a file, because no API creates all of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=[*SPECIALS, *bytes_], limit_alphabet=60, show_progress=False
        ),
    )
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in SPECIALS]
    if name == "llama":
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replaced]}
        content["pre_tokenizer"] = None
    else:
        content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return content


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    write_tokenizers(Path(sys.argv[1]))
