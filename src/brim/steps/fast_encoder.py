"""gigatoken (the extra `fast`), and the proof while it runs that its ids are those of the reference.

Texts that are plain ASCII go straight to it. Others do if no code point of theirs is one on which the two may differ.
A sample is encoded by both. One difference, and the fast way is over for the job: the unit is done again by the
reference, and what differed is told.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.choices import one_of
from brim.errors import InputError
from brim.extras import missing
from brim.memory.meter import process_bytes
from brim.memory.release import give_back_heap
from brim.records import dataclass
from brim.steps.step import Redo
from brim.steps.tokenizers import Encoded, Encoder, offsets_of

# Code points on which tokenizers that compose characters (NFC) may differ, as their tables of Unicode do. Found by
# trying all 1,112,064, alone and among marks of several classes, with tokenizers 0.23.3 and 1.0.0rc3 and gigatoken 0.10
# (tests/generators/code_points.py); scripts that Unicode brought since 9 with compositions are in it as a whole,
# because there pairs decide. Without composition no code point was found on which they differ.
_SCRIPTS = ((0x105C0, 0x105FF), (0x11380, 0x113FF), (0x11900, 0x1195F), (0x16100, 0x1613F), (0x16D40, 0x16D7F))
_MARKS = (
    (0x7FD, 0x7FD), (0x897, 0x89F), (0x8CA, 0x8D3), (0x9FE, 0x9FE), (0xC3C, 0xC3C), (0xD3B, 0xD3C), (0xEBA, 0xEBA),
    (0x1715, 0x1715), (0x1ABF, 0x1ADD), (0x1AE0, 0x1AEB), (0x1DF6, 0x1DFA), (0xA82C, 0xA82C), (0x10D24, 0x10D27),
    (0x10D69, 0x10D6D), (0x10EAB, 0x10EAC), (0x10EFA, 0x10EFB), (0x10EFD, 0x10EFF), (0x10F46, 0x10F50), (0x10F82,
    0x10F85), (0x11070, 0x11070), (0x1133B, 0x1133B), (0x1145E, 0x1145E), (0x11839, 0x1183A), (0x119E0, 0x119E0),
    (0x11A34, 0x11A34), (0x11A47, 0x11A47), (0x11A99, 0x11A99), (0x11D42, 0x11D42), (0x11D44, 0x11D45), (0x11D97,
    0x11D97), (0x11F41, 0x11F42), (0x16FF0, 0x16FF1), (0x1E08F, 0x1E08F), (0x1E130, 0x1E136), (0x1E2AE, 0x1E2AE),
    (0x1E2EC, 0x1E2EF), (0x1E4EC, 0x1E4EF), (0x1E5EE, 0x1E5EF), (0x1E6E3, 0x1E6E3), (0x1E6E6, 0x1E6E6), (0x1E6EE,
    0x1E6EF), (0x1E6F5, 0x1E6F5),
)  # fmt: skip
_DOUBT, _MARK = 1, 2


@cache
def _table() -> npt.NDArray[np.uint8]:
    table = np.zeros(0x110000, np.uint8)
    for first, last in (*_SCRIPTS, *_MARKS):
        table[first : last + 1] = _DOUBT
    # Marks are the ones that this Python knows: those that are newer are all in doubt by themselves.
    for first, last in ((0x300, 0x20000), (0xE0000, 0xE0200)):
        marks = [point for point in range(first, last) if unicodedata.combining(chr(point))]
        table[marks] |= _MARK
    return table


def doubtful(points: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """The places of code points in doubt, and of marks that follow a mark: their order is the tables' to decide."""
    kinds = _table()[points]
    marks = kinds & _MARK != 0
    bad = kinds & _DOUBT != 0
    bad[1:] |= marks[1:] & marks[:-1]
    return np.flatnonzero(bad)


EncoderChoice = Literal["auto", "reference", "fast"]
CHOICES = ("auto", "reference", "fast")
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = (_GPT4, _QWEN)
_FIRST_TEXTS, _EVERY = 200, 500  # encoded by both: so many at the start, and each so-and-so-manieth
_CACHE_BYTES = 48 << 20  # what it may keep of the words that it has seen
_LOOK_BYTES = 1 << 20  # how much it encodes between two looks at that
_SHOWN = 200
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class FastKind:
    """A kind of tokenizer whose ids were found to be the same. `marks`: it composes characters, where tables differ."""

    marks: bool
    added: tuple[str, ...]  # tokens that may stand in texts


def kind_of(data: bytes) -> FastKind | None:
    """None if nothing is known of this kind: byte-level BPE of GPT-2, GPT-4, Llama 3, Qwen, RoBERTa; Metaspace BPE."""
    held = json.loads(data)
    model = held["model"]
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type", "BPE") != "BPE" or "merges" not in model or any(model.get(name) for name in odd):
        return None
    if any(added.get("single_word") for added in held.get("added_tokens") or ()):
        return None
    normalizer, splitter = held.get("normalizer"), held.get("pre_tokenizer")
    if not (_is_byte_level(splitter) or _is_metaspace(normalizer, splitter)):
        return None
    added = tuple(added["content"] for added in held.get("added_tokens") or ())[:50]
    if normalizer is None or _is_prefix(normalizer):
        return FastKind(False, added)
    return FastKind(True, added) if normalizer == {"type": "NFC"} else None


def _is_byte_level(splitter: Any) -> bool:
    parts = splitter.get("pretokenizers", [splitter]) if isinstance(splitter, dict) else []
    last = parts[-1] if parts else {}
    if last.get("type") != "ByteLevel":
        return False
    if len(parts) == 1:
        return bool(last.get("use_regex", True))
    first = parts[0]
    return (
        len(parts) == 2
        and first.get("type") == "Split"
        and first.get("pattern", {}).get("Regex") in _SPLITS
        and first.get("behavior") == "Isolated"
        and not first.get("invert")
        and not last.get("use_regex", True)
        and not last.get("add_prefix_space")
    )


def _is_metaspace(normalizer: Any, splitter: Any) -> bool:
    if splitter is None:
        return _is_prefix(normalizer)
    return normalizer is None and splitter.get("type") == "Metaspace" and splitter.get("replacement") == "▁"


def _is_prefix(normalizer: Any) -> bool:
    """Llama 2: a space in front, and spaces as ▁."""
    parts = normalizer.get("normalizers", []) if isinstance(normalizer, dict) else []
    return parts == [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]


def choose(choice: EncoderChoice, data: bytes) -> FastKind | None:
    """The fast way where it is installed, wanted, and known to give the same ids; else None."""
    one_of("encoder", choice, CHOICES)
    installed = choice != "reference" and importlib.util.find_spec("gigatoken") is not None
    if choice == "fast" and not installed:
        raise missing("fast", "The fast encoder is not installed.")
    kind = kind_of(data) if installed else None
    if choice == "fast" and kind is None:
        raise InputError(
            "The fast encoder is not known to give the same ids for this kind of tokenizer.",
            hint="Leave --encoder out, or use --encoder=reference.",
        )
    return kind


class FastEncoder:
    """gigatoken. It keeps all words that it has seen: it is loaded anew when they take much."""

    def __init__(self, data: bytes) -> None:
        import gigatoken

        self._library, self._data = gigatoken, data
        self._most_bytes = 0
        self._load()

    def _load(self) -> None:
        self._raw = self._library.Tokenizer.from_json(self._data).backend
        held, self._seen_bytes = process_bytes(os.getpid()), 0
        # From the first time on: what is not given back in between must not add up.
        self._most_bytes = max(self._most_bytes or held + _CACHE_BYTES, held + _CACHE_BYTES // 4)

    @property
    def encoder(self) -> str:
        return fast_name()

    def encode(self, texts: pa.Array) -> Encoded:
        """Of valid UTF-8: it ends the process on anything else."""
        offsets, data = text_buffers(texts)
        one = self._raw.encode
        found = Encoded.of([one(data[start:end]) for start, end in itertools.pairwise(offsets.tolist())])
        self._seen_bytes += len(data)
        if self._seen_bytes >= _LOOK_BYTES:
            self._seen_bytes = 0
            if process_bytes(os.getpid()) > self._most_bytes:
                del self._raw
                give_back_heap()
                self._load()
        return found


def fast_name() -> str:
    from importlib.metadata import version

    return f"gigatoken {version('gigatoken')}"


class ProvedEncoder:
    """The fast encoder for as long as it gives what the reference gives. `differed` tells why it does not any more."""

    def __init__(self, fast: Encoder, reference: Encoder, kind: FastKind) -> None:
        self._fast, self._reference, self._kind = fast, reference, kind
        self._texts = 0
        self.differed = ""
        try:
            self._compare(pa.array([text for text in [*PROBES, *_with_added(kind.added)] if text]))
        except Redo:
            pass  # nothing has been done yet

    @property
    def encoder(self) -> str:
        return self._reference.encoder if self.differed else self._fast.encoder

    def encode(self, texts: pa.Array) -> Encoded:
        if self.differed:
            return self._reference.encode(texts)
        rows = self._in_doubt(texts)
        sure = np.ones(len(texts), bool)
        sure[rows] = False
        found = self._fast.encode(texts.filter(pa.array(sure)) if len(rows) else texts)
        if len(rows):
            found = found.with_others(rows, self._reference.encode(texts.take(pa.array(rows))))
        self._sample(texts, found)
        return found

    def _in_doubt(self, texts: pa.Array) -> npt.NDArray[np.int64]:
        """The rows of texts on whose code points the two may differ."""
        if not self._kind.marks:
            return _NO_ROWS  # every code point was tried, and there is none
        offsets, data = text_buffers(texts)
        if data.isascii():
            return _NO_ROWS
        high = np.flatnonzero(np.frombuffer(data, np.uint8) >= 0x80)
        rows = np.unique(np.searchsorted(offsets, high, side="right") - 1)
        parts = [data[offsets[row] : offsets[row + 1]].decode() for row in rows.tolist()]
        ends = offsets_of([len(part) for part in parts])
        bad = doubtful(np.frombuffer("".join(parts).encode("utf-32-le"), np.uint32))
        return rows[np.unique(np.searchsorted(ends, bad, side="right") - 1)]

    def _sample(self, texts: pa.Array, found: Encoded) -> None:
        first, self._texts = self._texts, self._texts + len(texts)
        numbers = np.arange(first, self._texts)
        chosen = np.flatnonzero((numbers < _FIRST_TEXTS) | (numbers % _EVERY == 0))
        if len(chosen):
            self._compare(texts.take(pa.array(chosen)), [found[row] for row in chosen.tolist()])

    def _compare(self, texts: pa.Array, found: Sequence[npt.NDArray[Any]] | None = None) -> None:
        ours = self._fast.encode(texts) if found is None else Encoded.of(found)
        theirs = self._reference.encode(texts)
        same = np.array_equal(ours.offsets, theirs.offsets) and np.array_equal(ours.values, theirs.values)
        if same:
            return
        row = next(row for row in range(len(texts)) if not np.array_equal(ours[row], theirs[row]))
        text = texts[row].as_py()
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
        self.differed = f"{self._fast.encoder} and {self._reference.encoder} give other ids for {shown!r}"
        raise Redo


def text_buffers(texts: pa.Array) -> tuple[npt.NDArray[np.int64], bytes]:
    """Where each text begins and ends, and the bytes of all of them."""
    _, places, data = texts.buffers()
    kind = np.int32 if pa.types.is_string(texts.type) else np.int64
    if places is None or not len(texts):
        return np.zeros(1, np.int64), b""
    offsets = np.frombuffer(places, kind, len(texts) + 1, texts.offset * kind().itemsize).astype(np.int64)
    if data is None:
        return offsets - offsets[0], b""
    start, end = int(offsets[0]), int(offsets[-1])
    return offsets - start, data.slice(start, end - start).to_pybytes()


def _with_added(added: Sequence[str]) -> list[str]:
    """Texts in which a tokenizer's own tokens stand."""
    shapes = ("{}", " {} ", "a{}b", "{}{}", "the {}\n{} end", "{}.")
    return [shape.format(*[token] * shape.count("{}")) for token in added for shape in shapes]


_WORDS = (
    "the", "Hello", "WORLD", "don't", "I'LL", "they'VE", "x1y22z333", "123456789", "foo_bar", "__init__", "!!!", "...",
    "naïve", "Straße", "ſ", "'ſ", "日本語", "русский", "ελληνικά", "हिन्दी", "ไทย", "한국어", "العربية", "😀", "👍🏽",
    "👨‍👩‍👧‍👦", "🇩🇪", "❤️", "e\u0301", "Å", "ﬁ", "½", "²", "٣", "Ⅷ", "①", "\u00ad", "\u200b", "\ufeff", "\x00",
    "\x7f", "\ufffd", "<s>", "</s>", "<unk>", "<0x41>", "▁", "Ġ", "\u0644\u0627", "가", "각", "\U0001d400", "=", "-",
)  # fmt: skip
_WHITE = (" ", "  ", "   ", "\n", "\r\n", "\r", "\t", "\x0b", "\x0c", "\xa0", "\u2003", "\u3000", "\x85", "\u2028", "")


def _probes() -> tuple[str, ...]:
    """The fixed set: each word with each kind of white space on both sides, and things in a row."""
    pairs = zip(_WORDS, _WORDS[7:] + _WORDS, strict=False)
    mixed = [f"{white}{word}{white}{other}" for word, other in pairs for white in _WHITE]
    rows = [piece * count for piece in (*_WORDS[::5], *_WHITE, "a", "1", "\u0301", "'s") for count in (2, 17)]
    code = "def f(x):\n    return {'a': [1, 2.5e-3, 0xFF], \"b\": x**2}  # ok\r\n\tif x != None and y >= 10:\n"
    return (*mixed, *rows, code, " ".join(_WORDS), "".join(_WORDS))


PROBES = _probes()
