"""The step that turns a column of text into a column of token ids."""

from __future__ import annotations

import difflib
import os
import re
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from brim.compute.steps.gigatoken_encoder import FastEncoder, FastKind, ProvedEncoder, fast_name
from brim.compute.steps.step import BadRow, RowBatch
from brim.compute.steps.tokenizers import (
    Encoded,
    Encoder,
    Ids,
    LoadedTokenizer,
    TokenizerFile,
    generation,
    reference_name,
)
from brim.errors import InputError
from brim.options.compute_options import TextOptions
from brim.records import dataclass

PIECE_CHARS = 1 << 16  # at 490 bytes each: 32 MB
_WINDOW = 1024
_SEARCH = 4096  # characters before the limit in which a space is searched
_TRIES = 3
_BLIND_TRIES = 32  # if the ends of tokens are unknown
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
_BEFORE_WHITE = re.compile(r"(?<=\S)(?=\s)")


@dataclass(frozen=True, slots=True)
class Cut:
    """The left part ends at `end`, the right one starts at `start`, perhaps after an omitted space."""

    end: int
    start: int
    exact: bool


def cut_text(loaded: LoadedTokenizer, text: memoryview, limit: int = PIECE_CHARS) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text in UTF-8, each with whether the cut before it passed the test."""
    for _, part, exact in cut_text_at(loaded, text, limit):
        yield part, exact


def cut_text_at(loaded: LoadedTokenizer, text: memoryview, limit: int = PIECE_CHARS) -> Iterator[tuple[int, str, bool]]:
    """Yield the same parts, each after the number of the character at which it starts.

    Only a window of the text is a Python string at a time, since a whole string can take four times its bytes.
    """
    position, character, exact = 0, 0, True
    while True:
        stop = min(position + 4 * (limit + _WINDOW + 2), len(text))  # a character has four bytes at most
        # A character that the window cuts is after everything that is searched.
        window = str(text[position:stop], "utf-8", "strict" if stop == len(text) else "ignore")
        if len(window) <= limit:
            yield character, window, exact
            return
        cut = _best(loaded, window, limit)
        yield character, window[: cut.end], exact
        character += cut.start
        position, exact = position + len(window[: cut.start].encode()), cut.exact


def _best(loaded: LoadedTokenizer, text: str, limit: int) -> Cut:
    """Return where to cut `text` so that its first part has at most `limit` characters."""
    low = max(1, limit - _SEARCH)
    for pattern in (_BETWEEN_WORDS, _BEFORE_WHITE):
        cuts = [match.start() for match in pattern.finditer(text, low, limit)]
        for position in reversed(cuts[-_TRIES:]):
            # Older Sentencepiece tokenizers put a space before every part: omit ours.
            for start in (position, position + 1):
                if _passes(loaded, text, position, start):
                    return Cut(position, start, True)
    # The last positions before the limit where a token ends in its context: ends of words first.
    start = max(0, limit - _WINDOW)
    tries = _BLIND_TRIES if loaded.generation else _TRIES
    ends = [
        [start + end for end in ends if 0 < start + end <= limit]
        for ends in loaded.token_ends(text[start : limit + _WINDOW])
    ]
    for position in [*reversed(ends[0][-_TRIES:]), *reversed(ends[1][-tries:])]:
        if _passes(loaded, text, position, position):
            return Cut(position, position, True)
    position = limit
    while position > low and unicodedata.combining(text[position]):
        position -= 1
    return Cut(position, position, False)


def _passes(loaded: LoadedTokenizer, text: str, end: int, start: int) -> bool:
    before, after = text[max(0, end - _WINDOW) : end], text[start : start + _WINDOW]
    whole = text[max(0, end - _WINDOW) : start + _WINDOW]
    ids = loaded.ids([whole, before, after])
    return np.array_equal(ids[0], np.concatenate(ids[1:]))


LARGEST_UINT16_VOCABULARY = 65_500  # Megatron writes ids of 16 bits below it
IDS, NOTE = "input_ids", "_brim_note"
# Values of NOTE for a document; finishing counts them and drops the column. OVERLONG rows are left out then.
PLAIN, NULL, CUT, ROUGH, TRUNCATED, OVERLONG = range(6)
Dtype = Literal["int32", "uint16", "uint32"]
_NO_IDS = np.empty(0, np.uint32)


@dataclass(frozen=True, kw_only=True)
class TokenizeStepOptions(TextOptions):
    """How texts become tokens, as workers take it. Packed documents have no special tokens, as training jobs want."""

    add_special_tokens: bool = True
    dtype: Dtype = "int32"

    def check_options(self) -> None:
        if {IDS, NOTE} & {*self.keep_columns}:
            raise InputError(
                f"{IDS} is the column that tokenize writes; it cannot be kept.", hint="Rename it in the source."
            )


def choose_dtype(dtype: str, output: str, vocab_size: int) -> Dtype:
    """Resolve `auto`: int32 for Parquet and Arrow, because torch uses it directly; for bin the smallest that fits.

    Megatron has uint16 for vocabularies below 65,500, and int32.
    """
    if dtype == "auto" and output == "megatron":
        return "uint16" if vocab_size < LARGEST_UINT16_VOCABULARY else "int32"
    if dtype == "auto":
        return "int32" if output != "bin" else "uint16" if vocab_size <= 1 << 16 else "uint32"
    if dtype == "uint16" and vocab_size > 1 << 16:
        raise InputError(
            f"uint16 holds ids up to 65,535, and the tokenizer has {vocab_size:,} tokens.", hint="Use --dtype=uint32."
        )
    return dtype  # type: ignore[return-value]


@dataclass(slots=True)
class TokenizeStep:
    """Made in the parent, opened in workers. The worker sets `threads` before `open`."""

    tokenizer: TokenizerFile
    options: TokenizeStepOptions = field(default_factory=TokenizeStepOptions)
    threads: int = 1
    batch_rows: int | None = None
    batch_bytes: int = 1_000_000
    indices: bool = False
    splittable: bool = True
    runs_own_code: bool = False  # no code of the user runs, so pandas is not needed
    repeats: str | None = ""
    _loaded: LoadedTokenizer | None = None
    fast: FastKind | None = None  # the fast encoder is used, as long as it gives the same ids
    _proved: ProvedEncoder | None = None
    _load_failure: str = ""  # why the fast encoder could not be used
    # Ids before and after every document; None until `check`.
    _frame: tuple[list[int], list[int]] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.options.column, *self.options.keep_columns)))

    @property
    def facts(self) -> dict[str, Any]:
        options = self.options
        return {
            "step": "tokenize",
            "tokenizer": self.tokenizer.sha256,
            "column": options.column,
            "eos": options.eos,
            "add_special_tokens": options.add_special_tokens,
            "max_length": options.max_length,
            "dtype": options.dtype,
            "long_documents": options.long_documents,
            "long_chars": options.long_chars,
            "keep": list(options.keep_columns),
            # Absent for generation 0, so that jobs from before tokenizers 1.x resume.
            **({"tokenizers_generation": generation()} if generation() else {}),
        }

    def check(self, loaded: LoadedTokenizer | None = None) -> LoadedTokenizer:
        """Check the tokenizer before the job starts."""
        loaded = loaded or LoadedTokenizer(self.tokenizer.read(), self.tokenizer.name)
        choose_dtype(self.options.dtype, "", loaded.vocab_size)
        loaded.refuse_dropout()
        self._set_frame(loaded)
        return loaded

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns that workers write; raise InputError if a column is missing or not text."""
        kind = source_field(schema, self.options.column).type
        if not _is_text(kind):
            raise InputError(
                f"The column {self.options.column!r} is not text but {kind}.", hint="Choose another with --column."
            )
        ids = pa.list_(pa.type_for_alias(self.options.dtype))
        fields = [pa.field(IDS, ids), pa.field(NOTE, pa.uint8())]
        return pa.schema(fields + [source_field(schema, name).remove_metadata() for name in self.options.keep_columns])

    def open(self, schema: pa.Schema) -> None:
        # There is one worker per core, so a pool of threads in each would only slow them down.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if self.threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(self.threads)
        self.output_schema(schema)
        data = self.tokenizer.read()
        self._loaded = LoadedTokenizer(data, self.tokenizer.name, threads=self.threads)
        if self._frame is None:
            self.check(self._loaded)
        if self.fast is not None:
            self._open_fast(data, self.fast)

    def _open_fast(self, data: bytes, kind: FastKind) -> None:
        """Load the fast encoder, or note why it cannot load this tokenizer."""
        assert self._loaded is not None
        try:
            fast = FastEncoder(data)
        except (RuntimeError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            self._load_failure = f"{fast_name()} cannot load the tokenizer {self.tokenizer.name}: {reason}"
            if kind.required:
                raise InputError(
                    f"{self._load_failure}.", hint="Leave --encoder out, or use --encoder=reference."
                ) from error
            return
        self._proved = ProvedEncoder(fast, self._loaded, kind)

    @property
    def _encoder(self) -> Encoder:
        assert self._loaded is not None
        return self._proved or self._loaded

    @property
    def encoder(self) -> str:
        if self._loaded is None:  # in the parent, before the work
            return fast_name() if self.fast is not None else reference_name()
        return self._encoder.encoder

    @property
    def differed(self) -> str:
        return self._proved.differed if self._proved is not None else self._load_failure

    def use_reference(self) -> None:
        self.fast = None

    def apply(self, batch: RowBatch, small: bool) -> Iterator[pa.Table]:
        column = batch.table.column(self.options.column)
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            column = column.cast(pa.large_string())
        step = 1 if small else max(len(column), 1)
        for start in range(0, len(column), step):
            texts = column.slice(start, step).combine_chunks()
            yield self._encoded(texts, batch.table.slice(start, step), start)

    def smaller(self, rows: int) -> str:
        return ""

    def close(self) -> None:
        self._loaded = self._proved = None

    def _set_frame(self, loaded: LoadedTokenizer) -> None:
        options = self.options
        before, after = loaded.frame() if options.add_special_tokens else ([], [])
        eos = None if options.eos is None else loaded.id_of(options.eos)
        if eos is not None and after[-1:] != [eos]:
            after = [*after, eos]
        specials = len(before) + len(after)
        if options.max_length is not None and options.max_length <= specials:
            raise InputError(
                f"--max-length={options.max_length} leaves no room: every document has {specials} special tokens.",
                hint=f"Give {specials + 1} or more.",
            )
        self._frame = before, after

    def _encoded(self, texts: pa.Array, table: pa.Table, offset: int) -> pa.Table:
        assert self._frame is not None
        _check_utf8(texts, offset)
        sizes = pc.binary_length(texts).fill_null(0).to_numpy(zero_copy_only=False)
        notes = np.where(texts.is_null().to_numpy(zero_copy_only=False), NULL, PLAIN).astype(np.uint8)
        wide = np.flatnonzero(sizes > self.options.long_chars)  # in bytes; in characters they may be short
        if len(wide):
            wide = wide[pc.utf8_length(texts.take(pa.array(wide))).to_numpy() > self.options.long_chars]
        if len(wide) == len(texts) == 1:
            ids, notes[0] = self._long(texts, 0, offset, framed=True)
            return self._table(np.array([0, len(ids)]), ids, notes, table)
        plain = sizes > 0
        plain[wide] = False
        encoded = self._encoder.encode(texts if plain.all() else texts.filter(pa.array(plain)))
        empty = np.flatnonzero(sizes == 0)
        encoded = encoded.with_others(empty - np.searchsorted(wide, empty), Encoded.from_parts([_NO_IDS] * len(empty)))
        if len(wide):
            bodies = []
            for row in wide.tolist():
                body, notes[row] = self._long(texts, row, offset, framed=False)
                bodies.append(body)
            encoded = encoded.with_others(wide, Encoded.from_parts(bodies))
        if self._max_own_ids is not None:
            encoded = encoded.cut(self._max_own_ids)
        encoded = encoded.framed(*self._frame, sizes > 0)
        return self._table(encoded.offsets, encoded.values, notes, table)

    def _table(
        self, offsets: npt.NDArray[np.int64], values: Ids, notes: npt.NDArray[np.uint8], table: pa.Table
    ) -> pa.Table:
        values = values.view(np.int32) if self.options.dtype == "int32" else values
        ids = pa.ListArray.from_arrays(
            pa.array(offsets.astype(np.int32)), pa.array(values.astype(self.options.dtype, copy=False))
        )
        return pa.table(
            {IDS: ids, NOTE: pa.array(notes)} | {name: table.column(name) for name in self.options.keep_columns}
        )

    @property
    def _max_own_ids(self) -> int | None:
        """How many ids a document may have, without special tokens."""
        assert self._frame is not None
        if self.options.max_length is None:
            return None
        return self.options.max_length - len(self._frame[0]) - len(self._frame[1])

    def _long(self, texts: pa.Array, row: int, offset: int, *, framed: bool) -> tuple[Ids, int]:
        """Return the ids of a long document, with its special tokens if `framed`, and its note.

        Ids are written directly to one array, so that there is never a second copy of them.
        """
        assert self._loaded is not None
        assert self._frame is not None
        text = _bytes_of(texts, row)
        if self.options.long_documents == "refuse":
            length = pc.utf8_length(texts[row]).as_py()
            raise BadRow(offset + row, 1) from InputError(
                f"A text of {length:,} characters is longer than {self.options.long_chars:,}.",
                hint="Let it be cut with --long-documents=cut, or raise --long-chars.",
            )
        before, after = self._frame if framed else ([], [])
        # Tokenizers rarely have more than one id per byte. Pages that are not written take no memory.
        ids, count = np.empty(len(before) + len(text) + len(after), np.uint32), len(before)
        ids[:count] = before
        max_ids = sys.maxsize if self._max_own_ids is None else self._max_own_ids + len(before)
        note = CUT
        for part, exact in cut_text(self._loaded, text, self.options.long_chars):
            ids_of_part = self._encoder.encode(pa.array([part])).values[: max_ids - count]
            if count + len(ids_of_part) + len(after) > len(ids):
                ids = np.concatenate([ids[:count], np.empty(max(count, len(ids_of_part) + len(after)), np.uint32)])
            ids[count : count + len(ids_of_part)] = ids_of_part
            count += len(ids_of_part)
            note = note if exact else ROUGH
            if count >= max_ids:
                break
        ids[count : count + len(after)] = after
        return ids[: count + len(after)], note


def _bytes_of(texts: pa.Array, row: int) -> memoryview:
    """Return the UTF-8 of one text; no copy."""
    _, offset_buffer, data = texts.buffers()
    kind = np.int32 if pa.types.is_string(texts.type) else np.int64
    start, end = np.frombuffer(offset_buffer, kind, 2, (texts.offset + row) * kind().itemsize).tolist()
    return memoryview(data)[start:end]


def _check_utf8(texts: pa.Array, offset: int) -> None:
    """Check UTF-8, since Parquet and Arrow files may have any bytes in a text column."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        for row, text in enumerate(texts.cast(pa.large_binary()).to_pylist()):
            try:
                (text or b"").decode()
            except UnicodeDecodeError as error:
                raise BadRow(offset + row, 1) from InputError(
                    f"A text is not UTF-8 (its byte {error.start:,}).",
                    hint="Fix it, or skip such rows with --on-error=skip.",
                )
        raise


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return bool(text or pa.types.is_null(kind))  # null: no text so far


def source_field(schema: pa.Schema, name: str) -> pa.Field:
    """Return a column of the source; InputError names similar ones if it has none of this name."""
    if name in schema.names:
        return schema.field(name)
    close = difflib.get_close_matches(name, schema.names, n=3)
    listed = ", ".join(map(repr, close or schema.names[:20])) or "none"
    raise InputError(
        f"The source has no column {name!r}.",
        hint=f"{'Close to it are' if close else 'It has'} {listed}.",
        column=name,
    )
