"""Encode texts with gigatoken (the extra `fast`), and check while it runs that its ids are those of the reference.

gigatoken encodes ASCII texts, and others if they have no code point on which the two may differ, and if composing
characters (NFC) cannot make, end or move an added token. Both encode a sample. After one difference, the job uses the
reference only: the unit is repeated, and the difference is reported.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.compute.steps.step import RestartUnit
from brim.compute.steps.tokenizers import Encoded, Encoder, offsets_of
from brim.errors import InputError
from brim.extras import missing
from brim.memory.meter import process_bytes
from brim.memory.release import give_back_heap
from brim.records import dataclass

# Code points on which tokenizers that compose characters (NFC) may differ, as their tables of Unicode do. Found by
# trying all 1,112,064, alone and among marks of several classes, with tokenizers 0.23.3 and 1.0.0rc3 and gigatoken 0.10
# (tests/generators/code_points.py); scripts with compositions that Unicode added since version 9 are included
# completely, because pairs matter there. Without composition no code point was found on which they differ.
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
_DOUBT, _MARK, _COMPOSES = 1, 2, 4
_MOST_SEARCHED = 1000  # added tokens in one pattern
_ASCII_SINGLETONS = "\u037e\u1fef\u212a"  # the code points that NFC turns into ASCII characters


@cache
def _table() -> npt.NDArray[np.uint8]:
    table = np.zeros(0x110000, np.uint8)
    for first, last in (*_SCRIPTS, *_MARKS):
        table[first : last + 1] = _DOUBT
    # Marks are those in Python's tables: newer ones are all doubtful.
    for first, last in ((0x300, 0x20000), (0x2F800, 0x2FA20), (0xE0000, 0xE0200)):
        for point in range(first, last):
            character = chr(point)
            if unicodedata.combining(character):
                table[point] |= _MARK
            parts = unicodedata.decomposition(character).split()
            if parts and parts[0][0] != "<":
                if not unicodedata.is_normalized("NFC", character):
                    table[point] |= _COMPOSES
                table[[int(part, 16) for part in parts[1:]]] |= _COMPOSES
    table[0x1161:0x1176] |= _COMPOSES  # vowels and finals of Hangul, which compose by rule
    table[0x11A8:0x11C3] |= _COMPOSES
    return table


def doubtful(points: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Return the positions of doubtful code points, and of marks after a mark, whose order depends on the tables."""
    return np.flatnonzero(_is_doubtful(_table()[points]))


def _is_doubtful(kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    marks = kinds & _MARK != 0
    bad: npt.NDArray[np.bool_] = kinds & _DOUBT != 0
    bad[1:] |= marks[1:] & marks[:-1]
    return bad


class ComposedTokens:
    """Finds texts in which composing characters (NFC) can make, end or move an added token.

    The reference looks for added tokens before and after it composes, according to their `normalized`; gigatoken does
    both at once. A text that NFC leaves alone has the same ids either way, and so has one without added tokens.
    """

    def __init__(self, added: Iterable[str]) -> None:
        tokens = sorted(set(added), key=len, reverse=True)
        self._is_too_large = len(tokens) > _MOST_SEARCHED
        self._pattern = re.compile("|".join(map(re.escape, tokens))) if tokens and not self._is_too_large else None
        self._is_ascii = all(map(str.isascii, tokens))

    def affect(self, text: str) -> bool:
        """Return whether `text`, which NFC may change, can contain an added token before or after NFC."""
        if self._pattern is None:
            return self._is_too_large  # a pattern of thousands takes longer than the reference
        if self._pattern.search(text) is not None:
            return True
        # Composed characters are never ASCII: then only what NFC turns into ASCII can make a token.
        if self._is_ascii and not any(character in text for character in _ASCII_SINGLETONS):
            return False
        return self._pattern.search(unicodedata.normalize("NFC", text)) is not None


EncoderChoice = Literal["auto", "reference", "fast"]
_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _GPT4.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = (_GPT4, _QWEN)
_FIRST_TEXTS, _EVERY = 200, 500  # both encode the first 200 texts, and then every 500th
_CACHE_BYTES = 48 << 20  # for gigatoken's cache of words
_LOOK_BYTES = 1 << 20  # encoded between two checks of the cache
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class FastKind:
    """A kind of tokenizer whose ids are the same. `marks`: it composes characters, for which tables differ.

    `required`: a tokenizer that the fast encoder cannot load is an error, not a reason to use the reference.
    """

    marks: bool
    added: tuple[str, ...]  # added tokens, which texts may contain
    required: bool = False


def kind_of(data: bytes) -> FastKind | None:
    """Recognize byte-level BPE of GPT-2, GPT-4, Llama 3, Qwen, RoBERTa, and Metaspace BPE; None for others."""
    settings = json.loads(data)
    model = settings["model"]
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type", "BPE") != "BPE" or "merges" not in model or any(model.get(name) for name in odd):
        return None
    normalizer, splitter = settings.get("normalizer"), settings.get("pre_tokenizer")
    if splitter is None:
        is_metaspace = _is_prefix(normalizer)
    else:
        is_metaspace = normalizer is None and splitter.get("type") == "Metaspace" and splitter.get("replacement") == "▁"
    if not (is_metaspace or _is_byte_level(splitter)):
        return None
    composes = normalizer == {"type": "NFC"}
    if not (composes or normalizer is None or _is_prefix(normalizer)):
        return None
    added = settings.get("added_tokens") or []
    if not _added_are_separate(added, has_prefix='"add_prefix_space": true' in json.dumps(splitter)):
        return None
    if composes and any(
        token.get("normalized") and not unicodedata.is_normalized("NFC", token["content"]) for token in added
    ):
        return None
    return FastKind(composes, tuple(token["content"] for token in added))


def _added_are_separate(added: Sequence[dict[str, Any]], *, has_prefix: bool) -> bool:
    """Return whether the order in which added tokens are searched cannot matter.

    The reference looks for tokens with `normalized` after all others; gigatoken takes the first in the text. They
    differ where two of them can overlap, by the white space that `lstrip` and `rstrip` take as well.
    """
    if any(token.get("single_word") for token in added):
        return False
    contents = [token["content"] for token in added]
    has_white_edge = any(content != content.strip() for content in contents)
    strips = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if has_white_edge and (strips or has_prefix):
        return False
    late = [token["content"] for token in added if token.get("normalized")]
    early = [token["content"] for token in added if not token.get("normalized")]
    return not (_can_overlap(early, late) or _can_overlap(late, early))


def _can_overlap(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether one of `first` can be inside one of `second`, or overlap its start."""
    if not first or not second:
        return False
    starts = {content[:end] for content in second for end in range(1, len(content) + 1)}
    if any(content[start:] in starts for content in first for start in range(len(content))):
        return True
    contents, lengths = set(first), sorted({len(content) for content in first})
    return any(
        content[start : start + length] in contents
        for content in second
        for length in lengths
        for start in range(len(content) - length + 1)
    )


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


def _is_prefix(normalizer: Any) -> bool:
    """Recognize the normalizer of Llama 2: a space in front, and spaces as ▁."""
    parts = normalizer.get("normalizers", []) if isinstance(normalizer, dict) else []
    return parts == [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]


def choose(choice: EncoderChoice, data: bytes) -> FastKind | None:
    """Return the kind of tokenizer if the fast encoder is installed, allowed, and gives the same ids; else None."""
    installed = choice != "reference" and importlib.util.find_spec("gigatoken") is not None
    if choice == "fast" and not installed:
        raise missing("fast", "The fast encoder is not installed.")
    kind = kind_of(data) if installed else None
    if choice == "fast" and kind is None:
        raise InputError(
            "The fast encoder is not known to give the same ids for this kind of tokenizer.",
            hint="Leave --encoder out, or use --encoder=reference.",
        )
    return replace(kind, required=choice == "fast") if kind is not None else None


class FastEncoder:
    """gigatoken. It caches all words, so it is loaded again when the cache is large."""

    def __init__(self, data: bytes) -> None:
        import gigatoken

        self._library, self._data = gigatoken, data
        self._most_bytes = 0
        self._load()

    def _load(self) -> None:
        self._raw = self._library.Tokenizer.from_json(self._data).backend
        memory_bytes, self._seen_bytes = process_bytes(os.getpid()), 0
        # The limit is set at the first load: memory that is not freed between loads must not add up.
        self._most_bytes = max(self._most_bytes or memory_bytes + _CACHE_BYTES, memory_bytes + _CACHE_BYTES // 4)

    @property
    def encoder(self) -> str:
        return fast_name()

    def encode(self, texts: pa.Array) -> Encoded:
        """Encode valid UTF-8; anything else would abort the process."""
        offsets, data = text_buffers(texts)
        encode = self._raw.encode
        encoded = Encoded.from_parts([encode(data[start:end]) for start, end in itertools.pairwise(offsets.tolist())])
        self._seen_bytes += len(data)
        if self._seen_bytes >= _LOOK_BYTES:
            self._seen_bytes = 0
            if process_bytes(os.getpid()) > self._most_bytes:
                del self._raw
                give_back_heap()
                self._load()
        return encoded


@cache
def fast_name() -> str:
    from importlib.metadata import version

    return f"gigatoken {version('gigatoken')}"


class ProvedEncoder:
    """Uses the fast encoder until it differs from the reference; then `differed` has the reason."""

    def __init__(self, fast: Encoder, reference: Encoder, kind: FastKind) -> None:
        self._fast, self._reference, self._kind = fast, reference, kind
        self._composed = ComposedTokens(kind.added)
        self._texts = 0
        self.differed = ""
        probes = pa.array([text for text in [*PROBES, *_with_added(kind.added)] if text])
        try:
            self._compare(probes.filter(pa.array(self._is_sure(probes))))
        except RestartUnit:
            pass  # no text was encoded yet

    @property
    def encoder(self) -> str:
        return self._reference.encoder if self.differed else self._fast.encoder

    def encode(self, texts: pa.Array) -> Encoded:
        if self.differed:
            return self._reference.encode(texts)
        sure = self._is_sure(texts)
        if sure.all():
            encoded = self._fast.encode(texts)
        else:
            rows = np.flatnonzero(~sure)
            encoded = self._fast.encode(texts.filter(pa.array(sure)))
            encoded = encoded.with_others(rows, self._reference.encode(texts.take(pa.array(rows))))
        self._sample(texts, encoded)
        return encoded

    def _is_sure(self, texts: pa.Array) -> npt.NDArray[np.bool_]:
        """Return which texts the fast encoder may encode: no code point or added token on which the two may differ."""
        sure = np.ones(len(texts), bool)
        if not self._kind.marks:
            return sure  # the two agree on every code point
        offsets, data = text_buffers(texts)
        if data.isascii():
            return sure
        high = np.flatnonzero(np.frombuffer(data, np.uint8) >= 0x80)
        rows = np.unique(np.searchsorted(offsets, high, side="right") - 1)
        parts = [data[offsets[row] : offsets[row + 1]].decode() for row in rows.tolist()]
        ends = offsets_of([len(part) for part in parts])
        kinds = _table()[np.frombuffer("".join(parts).encode("utf-32-le"), np.uint32)]
        bad = np.searchsorted(ends, np.flatnonzero(_is_doubtful(kinds)), side="right") - 1
        composed = np.unique(np.searchsorted(ends, np.flatnonzero(kinds & _COMPOSES), side="right") - 1)
        sure[rows[bad]] = False
        sure[[rows[number] for number in composed.tolist() if self._composed.affect(parts[number])]] = False
        return sure

    def _sample(self, texts: pa.Array, encoded: Encoded) -> None:
        first, self._texts = self._texts, self._texts + len(texts)
        numbers = np.arange(first, self._texts)
        sampled = np.flatnonzero((numbers < _FIRST_TEXTS) | (numbers % _EVERY == 0))
        if len(sampled):
            self._compare(texts.take(pa.array(sampled)), [encoded[row] for row in sampled.tolist()])

    def _compare(self, texts: pa.Array, fast_ids: Sequence[npt.NDArray[Any]] | None = None) -> None:
        ours = self._fast.encode(texts) if fast_ids is None else Encoded.from_parts(fast_ids)
        theirs = self._reference.encode(texts)
        same = np.array_equal(ours.offsets, theirs.offsets) and np.array_equal(ours.values, theirs.values)
        if same:
            return
        row = next(row for row in range(len(texts)) if not np.array_equal(ours[row], theirs[row]))
        text = texts[row].as_py()
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
        self.differed = f"{self._fast.encoder} and {self._reference.encoder} give other ids for {shown!r}"
        raise RestartUnit


def text_buffers(texts: pa.Array) -> tuple[npt.NDArray[np.int64], bytes]:
    """Return the offsets of the texts, and the bytes of all."""
    _, offset_buffer, data = texts.buffers()
    kind = np.int32 if pa.types.is_string(texts.type) else np.int64
    if offset_buffer is None or not len(texts):
        return np.zeros(1, np.int64), b""
    offsets = np.frombuffer(offset_buffer, kind, len(texts) + 1, texts.offset * kind().itemsize).astype(np.int64)
    if data is None:
        return offsets - offsets[0], b""
    start, end = int(offsets[0]), int(offsets[-1])
    return offsets - start, data.slice(start, end - start).to_pybytes()


def _with_added(added: Sequence[str]) -> list[str]:
    """Make texts with a tokenizer's added tokens: as written, composed, decomposed, and followed by a mark.

    Tokens after the first 256 get one text each, so that thousands of them do not delay every worker by seconds.
    """
    shapes = ("{}", " {} ", "a{}b", "{}{}", "the {}\n{} end", "{}.")
    texts = [shape.format(*[token] * shape.count("{}")) for token in added[:256] for shape in shapes]
    texts += [f"a{token}{token} {token}." for token in added[256:]] + [f"{token}\u0301" for token in added]
    forms = {unicodedata.normalize(form, token) for token in added for form in ("NFC", "NFD")} - set(added)
    return [*texts, *(f"the {form}." for form in sorted(forms))]


_SAMPLE_TEXTS = (
    "the", "Hello", "WORLD", "don't", "I'LL", "they'VE", "x1y22z333", "123456789", "foo_bar", "__init__", "!!!", "...",
    "naïve", "Straße", "ſ", "'ſ", "日本語", "русский", "ελληνικά", "हिन्दी", "ไทย", "한국어", "العربية", "😀", "👍🏽",
    "👨‍👩‍👧‍👦", "🇩🇪", "❤️", "e\u0301", "Å", "ﬁ", "½", "²", "٣", "Ⅷ", "①", "\u00ad", "\u200b", "\ufeff", "\x00",
    "\x7f", "\ufffd", "<s>", "</s>", "<unk>", "<0x41>", "▁", "Ġ", "\u0644\u0627", "가", "각", "\U0001d400", "=", "-",
)  # fmt: skip
_WHITE = (" ", "  ", "   ", "\n", "\r\n", "\r", "\t", "\x0b", "\x0c", "\xa0", "\u2003", "\u3000", "\x85", "\u2028", "")


def _probes() -> tuple[str, ...]:
    """Make the fixed texts: each word with each kind of white space on both sides, and repetitions."""
    pairs = zip(_SAMPLE_TEXTS, _SAMPLE_TEXTS[7:] + _SAMPLE_TEXTS, strict=False)
    mixed = [f"{white}{text}{white}{next_text}" for text, next_text in pairs for white in _WHITE]
    rows = [text * count for text in (*_SAMPLE_TEXTS[::5], *_WHITE, "a", "1", "\u0301", "'s") for count in (2, 17)]
    code = "def f(x):\n    return {'a': [1, 2.5e-3, 0xFF], \"b\": x**2}  # ok\r\n\tif x != None and y >= 10:\n"
    return (*mixed, *rows, code, " ".join(_SAMPLE_TEXTS), "".join(_SAMPLE_TEXTS))


PROBES = _probes()
