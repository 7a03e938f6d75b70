"""The step that turns a column of text into a column of token ids."""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.choices import at_least, one_of
from brim.errors import InputError
from brim.steps.step import BadRow, Batch
from brim.steps.tokenizers import LoadedTokenizer, TokenizerFile

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


IDS, NOTE = "input_ids", "_brim_note"
# What NOTE says of a document; finishing counts it and drops the column.
PLAIN, NULL, CUT, ROUGH = range(4)
Dtype = Literal["int32", "uint16", "uint32"]
# Encoded at once: takes up to 50 MB.
_GROUP_BYTES = 1 << 18
_CODES = {"int32": "i", "uint16": "H", "uint32": "I"}


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """How texts become tokens. Who packs documents leaves `add_special_tokens` off, as training jobs do.

    `max_length` counts special tokens and `eos`. A document longer than `long_chars` characters is long.
    """

    column: str = "text"
    eos: str | None = None
    add_special_tokens: bool = True
    max_length: int | None = None
    keep: tuple[str, ...] = ()
    dtype: Dtype = "int32"
    long_documents: Literal["cut", "refuse"] = "cut"
    long_chars: int = PIECE_CHARS

    def __post_init__(self) -> None:
        one_of("long-documents", self.long_documents, ("cut", "refuse"))
        at_least("max-length", self.max_length, 1)
        at_least("long-chars", self.long_chars, 1000)
        if IDS in self.keep or NOTE in self.keep:
            raise InputError(f"{IDS} is the column that is made; it cannot be kept.", hint="Rename it in the source.")


def settle_dtype(asked: str, output: str, vocab_size: int) -> Dtype:
    """auto: int32 for Parquet and Arrow, because torch takes it as it is; for bin the smallest that fits."""
    one_of("dtype", asked, ("auto", "int32", "uint16", "uint32"))
    if asked == "auto":
        return "int32" if output != "bin" else "uint16" if vocab_size <= 1 << 16 else "uint32"
    if asked == "uint16" and vocab_size > 1 << 16:
        raise InputError(
            f"uint16 holds ids up to 65,535, and the tokenizer has {vocab_size:,} tokens.", hint="Use --dtype=uint32."
        )
    return asked  # type: ignore[return-value]


@dataclass(slots=True)
class TokenizeStep:
    """Made in the parent, opened in workers. `threads` is set by who runs it, before `open`."""

    tokenizer: TokenizerFile
    options: TokenizeOptions = field(default_factory=TokenizeOptions)
    threads: int = 1
    batch_rows: int | None = None
    batch_bytes: int = 1_000_000
    indices: bool = False
    splittable: bool = True
    _loaded: LoadedTokenizer | None = None
    _frame: tuple[list[int], list[int]] = ((), ())  # type: ignore[assignment]
    _tail: tuple[int, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.options.column, *self.options.keep)))

    @property
    def facts(self) -> dict[str, Any]:
        named = self.options
        return {
            "step": "tokenize",
            "tokenizer": self.tokenizer.sha256,
            **{name: getattr(named, name) for name in named.__dataclass_fields__ if name != "keep"},
            "keep": list(named.keep),
        }

    def check(self, loaded: LoadedTokenizer | None = None) -> LoadedTokenizer:
        """Everything about the tokenizer that can be wrong, before the job starts."""
        loaded = loaded or LoadedTokenizer(self.tokenizer.read(), self.tokenizer.name)
        settle_dtype(self.options.dtype, "", loaded.vocab_size)
        self._settle(loaded)
        return loaded

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        """The columns that workers write. A column that is missing or no text is an InputError."""
        kind = _field(schema, self.options.column).type
        if not _is_text(kind):
            raise InputError(
                f"The column {self.options.column!r} is not text but {kind}.", hint="Choose another with --column."
            )
        fields = [pa.field(IDS, pa.list_(_arrow(self.options.dtype))), pa.field(NOTE, pa.uint8())]
        return pa.schema(fields + [_field(schema, name).remove_metadata() for name in self.options.keep])

    def open(self, schema: pa.Schema) -> None:
        # The engine has a worker for each core; a pool of threads in each would only be in the way.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if self.threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(self.threads)
        self.output_schema(schema)
        self._loaded = self.check()
        if self.options.max_length is not None:
            self._loaded.raw.enable_truncation(self.options.max_length - len(self._tail))

    def apply(self, batch: Batch, small: bool) -> Iterator[pa.Table]:
        column = batch.table.column(self.options.column)
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            column = column.cast(pa.large_string())
        room = 1 if small else _GROUP_BYTES * self.threads
        for start, stop in _groups(column, room):
            texts = column.slice(start, stop - start).to_pylist()
            yield self._encoded(texts, batch.table.slice(start, stop - start), start)

    def smaller(self, rows: int) -> str:
        return "Or encode long texts in smaller pieces: --long-chars."

    def close(self) -> None:
        self._loaded = None

    def _settle(self, loaded: LoadedTokenizer) -> None:
        options = self.options
        self._frame = loaded.frame() if options.add_special_tokens else ([], [])
        eos = None if options.eos is None else loaded.id_of(options.eos)
        ends_with_it = bool(self._frame[1]) and self._frame[1][-1] == eos
        self._tail = () if eos is None or ends_with_it else (eos,)
        specials = len(self._frame[0]) + len(self._frame[1]) + len(self._tail)
        if options.max_length is not None and options.max_length <= specials:
            raise InputError(
                f"--max-length={options.max_length} leaves no room: every document has {specials} special tokens.",
                hint=f"Give {specials + 1} or more.",
            )

    def _encoded(self, texts: Sequence[str | None], table: pa.Table, offset: int) -> pa.Table:
        assert self._loaded is not None
        ids = array(_CODES[self.options.dtype])
        ends = np.zeros(len(texts) + 1, np.int32)
        notes = np.zeros(len(texts), np.uint8)
        plain = [text for text in texts if text and len(text) <= self.options.long_chars]
        encodings = iter(
            self._loaded.raw.encode_batch_fast(plain, add_special_tokens=self.options.add_special_tokens)
            if plain
            else ()
        )
        for row, text in enumerate(texts):
            if text is None:
                notes[row] = NULL
            elif len(text) > self.options.long_chars:
                notes[row] = self._long(text, ids, offset + row)
            elif text:
                ids.fromlist(next(encodings).ids)
                ids.extend(self._tail)
            ends[row + 1] = len(ids)
        values = pa.array(np.frombuffer(ids, self.options.dtype) if ids else np.empty(0, self.options.dtype))
        made = {IDS: pa.ListArray.from_arrays(pa.array(ends), values), NOTE: pa.array(notes)}
        return pa.table(made | {name: table.column(name) for name in self.options.keep})

    def _long(self, text: str, ids: array[int], row: int) -> int:
        assert self._loaded is not None
        if self.options.long_documents == "refuse":
            raise BadRow(row, 1) from InputError(
                f"A text of {len(text):,} characters is longer than {self.options.long_chars:,}.",
                hint="Let it be cut with --long-documents=cut, or raise --long-chars.",
            )
        raw, note, room = self._loaded.raw, CUT, None
        if self.options.max_length is not None:
            raw.no_truncation()
            room = self.options.max_length - len(self._frame[0]) - len(self._frame[1]) - len(self._tail)
        ids.extend(self._frame[0])
        body = len(ids)
        for piece, exact in pieces(raw, text, self.options.long_chars):
            ids.fromlist(raw.encode_batch_fast([piece], add_special_tokens=False)[0].ids)
            note = note if exact else ROUGH
            if room is not None and len(ids) - body >= room:
                del ids[body + room :]
                break
        if self.options.max_length is not None:
            raw.enable_truncation(self.options.max_length - len(self._tail))
        ids.extend((*self._frame[1], *self._tail))
        return note


def _groups(column: pa.ChunkedArray, room: int) -> Iterator[tuple[int, int]]:
    """Rows from, to: as many as `room` bytes hold, at least one."""
    sizes = pc.fill_null(pc.binary_length(column), 0).to_numpy()
    ends = np.cumsum(sizes, dtype=np.int64)
    start, before = 0, 0
    while start < len(ends):
        stop = max(start + 1, int(np.searchsorted(ends, before + room, side="right")))
        yield start, stop
        start, before = stop, int(ends[stop - 1])


def _arrow(dtype: str) -> pa.DataType:
    return {"int32": pa.int32(), "uint16": pa.uint16(), "uint32": pa.uint32()}[dtype]


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return bool(text or pa.types.is_null(kind))  # null: no text so far


def _field(schema: pa.Schema, name: str) -> pa.Field:
    if name in schema.names:
        return schema.field(name)
    near = difflib.get_close_matches(name, schema.names, n=3)
    listed = ", ".join(map(repr, near or schema.names[:20])) or "none"
    raise InputError(
        f"The source has no column {name!r}.", hint=f"{'Close to it are' if near else 'It has'} {listed}.", column=name
    )
