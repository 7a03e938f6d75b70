"""Cut a long document into pieces that encode to the same tokens as the whole.

A tokenizer needs up to 490 bytes of memory for each character that it encodes at once (measured: Chinese characters,
WordPiece and byte-level BPE), so a document of 4 MB can take half a gigabyte. A place for a cut is tried on a window
around it: the tokens of the window must be those of its two halves. Spaces between words come first, then other
white space, then ends of words and of tokens as the tokenizer sees them. With a pre-tokenizer that splits at spaces
the result is that of the whole document; where there is none, tokens depend on what is near, and the window sees
that. Only if no place passes is the cut made anyway, and the document is counted as cut roughly.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PIECE_CHARS = 1 << 16  # at 490 bytes each: 32 MB
_WINDOW = 1024
_SEARCH = 4096  # how far before the limit a space is looked for
_TRIES = 3
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
_BEFORE_WHITE = re.compile(r"(?<=\S)(?=\s)")


@dataclass(frozen=True, slots=True)
class Cut:
    """The left piece ends at `end`, the right one starts at `start`: after a space that is left out, if need be."""

    end: int
    start: int
    exact: bool


def pieces(raw: Any, text: str, limit: int = PIECE_CHARS) -> Iterator[tuple[str, bool]]:
    """Each piece, and whether the cut before it passed the test."""
    at, exact = 0, True
    while len(text) - at > limit:
        cut = _best(raw, text, at, at + limit)
        yield text[at : cut.end], exact
        at, exact = cut.start, cut.exact
    yield text[at:], exact


def _best(raw: Any, text: str, begin: int, limit: int) -> Cut:
    low = max(begin + 1, limit - _SEARCH)
    for pattern in (_BETWEEN_WORDS, _BEFORE_WHITE):
        places = [found.start() for found in pattern.finditer(text, low, limit)]
        for place in reversed(places[-_TRIES:]):
            # Sentencepiece tokenizers of the older kind put a space before every piece: leave ours out.
            for start in (place, place + 1):
                if _passes(raw, text, begin, place, start):
                    return Cut(place, start, True)
    for place in _token_ends(raw, text, begin, limit):
        if _passes(raw, text, begin, place, place):
            return Cut(place, place, True)
    place = limit
    while place > low and unicodedata.combining(text[place]):
        place -= 1
    return Cut(place, place, False)


def _passes(raw: Any, text: str, begin: int, end: int, start: int) -> bool:
    left, right = text[max(begin, end - _WINDOW) : end], text[start : start + _WINDOW]
    whole = text[max(begin, end - _WINDOW) : start + _WINDOW]
    ids = [each.ids for each in raw.encode_batch_fast([whole, left, right], add_special_tokens=False)]
    return bool(ids[0] == ids[1] + ids[2])


def _token_ends(raw: Any, text: str, begin: int, limit: int) -> list[int]:
    """The last places before the limit where a token ends in its surroundings: ends of words first."""
    low = max(begin, limit - _WINDOW)
    found = raw.encode(text[low : limit + _WINDOW], add_special_tokens=False)
    words, ends = found.word_ids, [low + end for _, end in found.offsets]
    inside = [number for number, end in enumerate(ends) if begin < end <= limit and number + 1 < len(ends)]
    last_of_word = [ends[number] for number in inside if words[number] != words[number + 1]]
    others = [ends[number] for number in inside if words[number] == words[number + 1]]
    return [*reversed(last_of_word[-_TRIES:]), *reversed(others[-_TRIES:])]
