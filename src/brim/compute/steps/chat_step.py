"""The step that turns conversations into token ids with labels."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from brim.compute.steps.chat_masks import Spans, TrainOn, label_tokens, render_with_spans, token_mask
from brim.compute.steps.chat_template_files import ChatTemplates
from brim.compute.steps.conversations import ChatColumns, TextPair, read_conversation
from brim.compute.steps.step import BadRow, RowBatch
from brim.compute.steps.tokenize_step import (
    IDS,
    NOTE,
    OVERLONG,
    PLAIN,
    ROUGH,
    TRUNCATED,
    Dtype,
    cut_text_at,
    source_field,
)
from brim.compute.steps.tokenizers import Ids, LoadedTokenizer, Places, TokenizerFile, reference_name
from brim.errors import InputError
from brim.extras import need_extra
from brim.options.compute_options import ChatOptions, TextOptions
from brim.options.declare import Options
from brim.records import dataclass

if TYPE_CHECKING:
    from brim.compute.steps.template_environment import ChatRenderer

LABELS, MASKS, LENGTH, ATTENTION = "labels", "assistant_masks", "length", "attention_mask"
CHAT_COLUMNS = (IDS, LABELS, MASKS, LENGTH, ATTENTION, NOTE)
_GROUP_CHARS = 1 << 18  # encoded at once
_SMALL_ROWS = 64  # read from Arrow at once


@dataclass(frozen=True, kw_only=True)
class ChatStepOptions(ChatOptions, TextOptions, Options):
    """How conversations become tokens, as workers take it. `special_tokens` are those around plain text pairs."""

    train_on: TrainOn = "assistant"
    date: str | None = None  # that the template asks for
    eos: str | None = None  # the end of a completion that is plain text
    add_special_tokens: bool = True
    dtype: Dtype = "int32"

    def check_options(self) -> None:
        taken = sorted({*CHAT_COLUMNS} & {*self.keep_columns})
        if taken:
            raise InputError(
                f"{taken[0]} is a column that --chat writes; it cannot be kept.", hint="Rename it in the source."
            )


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a batch, ready to be encoded."""

    number: int
    text: str
    spans: Spans
    is_pair: bool


@dataclass(slots=True)
class ChatStep:
    """Made in the parent, opened in workers. `threads` is set by who runs it, before `open`."""

    tokenizer: TokenizerFile
    templates: ChatTemplates | None  # None where all rows must be pairs of plain texts
    chat_columns: ChatColumns
    options: ChatStepOptions
    threads: int = 1
    batch_rows: int | None = None
    batch_bytes: int = 1_000_000
    indices: bool = False
    splittable: bool = True
    runs_own_code: bool = False  # of the user: nothing here needs pandas
    repeats: str | None = ""
    _loaded: LoadedTokenizer | None = None
    _renderer: ChatRenderer | None = None
    _pair_frame: tuple[list[int], list[int]] | None = None  # what is put around a pair of texts

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.chat_columns.names, *self.options.keep_columns)))

    @property
    def encoder(self) -> str:
        return reference_name()

    @property
    def facts(self) -> dict[str, Any]:
        options, columns = self.options, self.chat_columns
        return {
            "step": "chat",
            "tokenizer": self.tokenizer.sha256,
            "template": None if self.templates is None else self.templates.fingerprint_inputs,
            "arguments": dict(options.template_arg or {}),
            "date": options.date,
            "columns": [
                columns.messages,
                columns.prompt,
                columns.completion,
                columns.tools,
                columns.template_arguments,
            ],
            "json": list(columns.json_columns),
            "roles": [list(pair) for pair in columns.roles],
            "train_on": options.train_on,
            "masks": "generation marks, else rendered prefixes",
            "max_length": options.max_length,
            "overlong": options.overlong,
            "attention_mask": options.attention_mask,
            "eos": options.eos,
            "add_special_tokens": options.add_special_tokens,
            "dtype": options.dtype,
            "long_documents": options.long_documents,
            "long_chars": options.long_chars,
            "keep": list(options.keep_columns),
        }

    def check(self) -> None:
        """Find everything about the tokenizer and the template that can be wrong, before the job starts."""
        self._load()
        self.close()

    def output_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns that workers write. A column that is missing is an InputError."""
        for name in self.chat_columns.names:
            source_field(schema, name)
        kinds = {
            IDS: pa.list_(pa.type_for_alias(self.options.dtype)),
            LABELS: pa.list_(pa.int32()),
            MASKS: pa.list_(pa.int8()),
            LENGTH: pa.int32(),
            **({ATTENTION: pa.list_(pa.int8())} if self.options.attention_mask else {}),
            NOTE: pa.uint8(),
        }
        kept = [source_field(schema, name).remove_metadata() for name in self.options.keep_columns]
        return pa.schema([*(pa.field(name, kind) for name, kind in kinds.items()), *kept])

    def open(self, schema: pa.Schema) -> None:
        # The engine has a worker for each core; a pool of threads in each would only be in the way.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if self.threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(self.threads)
        self.output_schema(schema)
        self._load()

    def _load(self) -> None:
        self._loaded = LoadedTokenizer(_untrimmed(self.tokenizer.read()), self.tokenizer.name)
        if self._loaded.generation:
            raise InputError(
                f"--chat needs to know where tokens are in the text, which {reference_name()} does not tell.",
                hint="Use an earlier version: pip install 'tokenizers<1'.",
            )
        self._loaded.refuse_dropout()
        if self.templates is None:
            return
        need_extra("compute", "--chat needs jinja2, which renders chat templates.", "jinja2")
        from brim.compute.steps.template_environment import ChatRenderer

        date = datetime.date.fromisoformat(self.options.date or "1970-01-01")
        self._renderer = ChatRenderer(self.templates, self.options.template_arg or {}, date)

    def close(self) -> None:
        self._loaded = self._renderer = None

    def smaller(self, rows: int) -> str:
        return ""

    def apply(self, batch: RowBatch, small: bool) -> Iterator[pa.Table]:
        limit = 1 if small else _GROUP_CHARS * self.threads
        group, chars = list[_Row](), 0
        for row in self._rendered(batch):
            if group and chars + len(row.text) > limit:
                yield from self._encoded(group, batch)
                group, chars = [], 0
            group.append(row)
            chars += len(row.text)
        if group:
            yield from self._encoded(group, batch)

    def _rendered(self, batch: RowBatch) -> Iterator[_Row]:
        """Yield the rows that can be rendered; the others are left out, or the error of the batch."""
        names = list(self.chat_columns.names)
        for start in range(0, batch.table.num_rows, _SMALL_ROWS):
            part = batch.table.select(names).slice(start, _SMALL_ROWS)
            for number, values in enumerate(part.to_pylist(), start):
                try:
                    yield self._render(number, values)
                except InputError as error:
                    _leave_out(batch, number, error)

    def _render(self, number: int, values: dict[str, Any]) -> _Row:
        found = read_conversation(values, self.chat_columns)
        if isinstance(found, TextPair):
            if self.options.train_on in ("assistant", "last"):
                raise InputError(
                    f"--train-on={self.options.train_on} can only be used with messages, and this row has texts.",
                    hint="Use --train-on=completion, or all.",
                )
            eos = self.options.eos or ""
            completion = found.completion if found.completion.endswith(eos) else found.completion + eos
            text = found.prompt + completion
            start = 0 if self.options.train_on == "all" else len(found.prompt)
            return _Row(number, text, [(start, len(text))], True)
        if self._renderer is None:
            raise InputError(
                f"This row has messages, and the tokenizer {self.tokenizer.name} has no chat template.",
                hint="Pass one: --chat-template=FILE.",
            )
        text, spans = render_with_spans(self._renderer, found, self.options.train_on)
        return _Row(number, text, spans, False)

    def _encoded(self, group: list[_Row], batch: RowBatch) -> Iterator[pa.Table]:
        """Encode rows, and cut or leave out those that are too long."""
        done = list[tuple[int, Ids, npt.NDArray[np.bool_], int]]()
        for row, (ids, places, note) in zip(group, self._encode(group), strict=True):
            mask = token_mask(places, row.spans)
            try:
                if row.is_pair and self.options.add_special_tokens:
                    before, after = self._frame()
                    ids = np.concatenate([np.array(before, np.uint32), ids, np.array(after, np.uint32)])
                    is_first_trained = self.options.train_on == "all"
                    mask = np.concatenate([np.full(len(before), is_first_trained), mask, np.ones(len(after), bool)])
                ids, mask, note = self._fitted(ids, mask, note)
            except InputError as error:
                _leave_out(batch, row.number, error)
                continue
            done.append((row.number, ids, mask, note))
        if done:
            yield self._table(done, batch.table)

    def _frame(self) -> tuple[list[int], list[int]]:
        if self._pair_frame is None:
            assert self._loaded is not None
            self._pair_frame = self._loaded.frame()
        return self._pair_frame

    def _fitted(self, ids: Ids, mask: npt.NDArray[np.bool_], note: int) -> tuple[Ids, npt.NDArray[np.bool_], int]:
        limit = self.options.max_length
        if limit is not None and len(ids) > limit:
            if self.options.overlong == "error":
                raise InputError(
                    f"This conversation has {len(ids):,} tokens, more than --max-length={limit:,}.",
                    hint="Drop or truncate such rows: --overlong=drop, or --overlong=truncate.",
                )
            if self.options.overlong == "drop":
                return ids[:0], mask[:0], OVERLONG
            ids, mask, note = ids[:limit], mask[:limit], TRUNCATED
        if not mask.any():
            cut = " after it is truncated" if note == TRUNCATED else ""
            raise InputError(
                f"No token of this conversation is trained{cut} (--train-on={self.options.train_on}).",
                hint="Check its messages, or use another --train-on or a larger --max-length.",
            )
        return ids, mask, note

    def _encode(self, group: list[_Row]) -> Iterator[tuple[Ids, Places, int]]:
        """Yield ids, places and notes of rows; texts that are long are encoded in pieces."""
        assert self._loaded is not None
        short = [row.text for row in group if len(row.text) <= self.options.long_chars]
        found = iter(self._loaded.ids_and_places(short) if short else [])
        for row in group:
            if len(row.text) <= self.options.long_chars:
                yield *next(found), PLAIN
            else:
                yield self._encode_long(self._loaded, row.text)

    def _encode_long(self, loaded: LoadedTokenizer, text: str) -> tuple[Ids, Places, int]:
        note, ids, places = PLAIN, list[Ids](), list[Places]()
        for start, piece, exact in cut_text_at(loaded, memoryview(text.encode()), self.options.long_chars):
            ((own_ids, own_places),) = loaded.ids_and_places([piece])
            ids.append(own_ids)
            places.append(own_places + np.uint32(start))
            note = note if exact else ROUGH
        return np.concatenate(ids), np.concatenate(places), note

    def _table(self, rows: list[tuple[int, Ids, npt.NDArray[np.bool_], int]], source: pa.Table) -> pa.Table:
        lengths = np.array([len(ids) for _, ids, _, _ in rows], np.int32)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        ids, mask = np.concatenate([row[1] for row in rows]), np.concatenate([row[2] for row in rows])

        def lists(values: npt.NDArray[Any]) -> pa.Array:
            return pa.ListArray.from_arrays(offsets, pa.array(values))

        columns = {IDS: lists(ids.astype(self.options.dtype)), LABELS: lists(label_tokens(ids, mask))}
        columns |= {MASKS: lists(mask.astype(np.int8)), LENGTH: pa.array(lengths)}
        if self.options.attention_mask:
            columns[ATTENTION] = lists(np.ones(len(ids), np.int8))
        columns[NOTE] = pa.array([note for *_, note in rows], pa.uint8())
        if self.options.keep_columns:
            kept = source.select(list(self.options.keep_columns)).take(pa.array([row[0] for row in rows]))
            columns |= {name: kept.column(name) for name in kept.column_names}
        return pa.table(columns)


def _leave_out(batch: RowBatch, row: int, error: InputError) -> None:
    if batch.leave_out is None:
        raise BadRow(row, 1) from error
    batch.leave_out(row, error)


def _untrimmed(data: bytes) -> bytes:
    """Have the places of tokens include their blanks. The ids stay the same."""
    try:
        held = json.loads(data)
    except ValueError:
        return data  # which is refused when it is loaded
    if not isinstance(held, dict) or not isinstance(held.get("post_processor"), dict):
        return data
    processors = [held["post_processor"], *(held["post_processor"].get("processors") or ())]
    for processor in processors:
        if "trim_offsets" in processor:
            processor["trim_offsets"] = False
    return json.dumps(held).encode()
