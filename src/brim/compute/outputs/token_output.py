"""From the token files of units to the files that are published: split, shuffle, pack, write.

Everything streams. It is made in a working folder inside the destination and gets its names when all of it is
complete and synced; the same units and options give the same bytes, so running it again after a crash is harmless.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from brim.compute.outputs.chat_packing import WINDOW, PackedChats, packed_schema
from brim.compute.outputs.megatron_files import MegatronWriter
from brim.compute.outputs.output import Finished, OrderedPool, OutputShard, Units, card_of, with_features
from brim.compute.outputs.rows_file import Writing
from brim.compute.outputs.token_files import GROUP_TOKENS, BinWriter, ShardWriter, TokenShard
from brim.compute.outputs.token_packing import (
    SEQ_LENGTHS,
    SPLIT,
    Packer,
    TokenSplit,
    ends_of,
    in_key_order,
    open_unit,
    unit_batches,
    with_places,
)
from brim.compute.rows.schemas import unify
from brim.compute.steps.chat_step import MASKS
from brim.compute.steps.tokenize_step import CUT, IDS, NOTE, NULL, OVERLONG, ROUGH, TRUNCATED, Dtype
from brim.errors import InputError, MemoryLimitError
from brim.formats.card import CardFacts
from brim.memory.limit import usable_cores
from brim.memory.meter import tree_bytes
from brim.options.compute_options import TokenFileOptions, TokenSplitOptions
from brim.progress import Advance
from brim.records import dataclass
from brim.sizes import format_size, plural
from brim.sources.source_options import check_split
from brim.state.atomic_files import failures, rename

WHOLE = (TokenSplit("train", 1.0),)
_WORK = ".finish"
_FILES_OF_TOKENS = ("bin", "megatron")  # formats without columns
_COPIES = 6  # copies of a packed row or group in memory: collected, concatenated, grouped, encoded, compressed
_LEFT_BYTES = 64 << 20  # for reading
_ROW_BYTES = 19  # pyarrow's memory per token while it writes a list as one row of Parquet


@dataclass(frozen=True, kw_only=True)
class FinishOptions(TokenFileOptions):
    """How documents become files. The seed decides the splits, and the order of shuffled documents.

    `header` is written to the header of `bin` files: vocab_size, eos, tokenizer_sha256, created_by.
    """

    dtype: Dtype = "int32"
    splits: tuple[TokenSplit, ...] = WHOLE
    is_chat: bool = False  # rows are conversations with labels
    position_ids: bool = False
    shard_bytes: int = 256_000_000
    header: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """`tokens` are those that were written; `rough` documents were cut where no boundary is safe.

    Of chats: `overlong` were left out, `truncated` cut, and `trained` tokens have labels.
    `first_rough` is the number of the first of them in the order of the source, from 0.
    """

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    null: int = 0
    cut: int = 0
    rough: int = 0
    dropped_tail: int = 0
    truncated: int = 0
    overlong: int = 0
    trained: int = 0
    first_rough: int | None = None


@dataclass(frozen=True, slots=True)
class FinishedTokens:
    """The shards, their columns, and the counts."""

    shards: list[TokenShard]
    schema: pa.Schema
    counts: TokenCounts


def token_splits(options: TokenSplitOptions) -> tuple[TokenSplit, ...]:
    """Return the splits that documents go to, with their shares."""
    shares = options.shares or {options.split or "train": 1.0}
    for name in shares:
        check_split(name)
    total = sum(shares.values())
    return tuple(TokenSplit(name, share / total) for name, share in shares.items())


def finish_tokens(
    units: Sequence[Path],
    folder: Path,
    options: FinishOptions,
    limit_bytes: int,
    advance: Callable[[int], None],
    source: pa.Schema | None = None,
) -> FinishedTokens:
    """Make the final files below `folder`. `advance` gets the number of documents after each batch.

    `source` is the schema of the source, which may have `datasets` features of kept columns.
    """
    types = _types(units, options)
    schema = pa.schema([column for column in types if column.name != NOTE])
    columns = pa.schema([column for column in schema if column.name != IDS], source.metadata if source else None)
    schema = with_features(schema.with_metadata(with_features(columns).metadata))
    if options.is_chat and options.pack is not None:
        schema = with_features(packed_schema(schema, options.position_ids))
    elif options.format in _FILES_OF_TOKENS or options.pack is not None:
        kept = [name for name in schema.names if name != IDS]
        if kept:
            raise InputError(
                f"--keep-columns={' '.join(kept)} cannot be used with --pack or --format={options.format}: their rows "
                "are not documents.",
                hint="Leave out one of them.",
            )
        if options.format not in _FILES_OF_TOKENS:
            schema = with_features(schema.append(pa.field(SEQ_LENGTHS, pa.list_(pa.int32()))))
    work = folder / _WORK
    with failures(folder):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        counter = _Counter()
        documents = with_places(
            counter.watch(unit_batches(units, types)), options.splits, options.seed, options.shuffle is not None
        )
        if options.shuffle is not None:
            total = sum(path.stat().st_size for path in units)
            documents = in_key_order(documents, total, work / "buckets", limit_bytes)
        pool = OrderedPool(_encoders(options, limit_bytes), "brim-finish")
        outputs: list[Any] = [_output(work, split.name, schema, options, pool) for split in options.splits]
        try:
            for batch in documents:
                _check_row_room(batch, options, limit_bytes)
                for number, part in _by_split(batch, len(outputs)):
                    outputs[number].write(part)
                advance(batch.num_rows)
            if (dropped := counter.counts.overlong) and dropped == counter.counts.documents:
                raise InputError(
                    f"All {dropped:,} conversations are longer than --max-length allows, so no row is left.",
                    hint="Start over with a larger --max-length, or cut them: --fresh --overlong=truncate.",
                )
            split_results = [output.finish() for output in outputs]
        finally:
            pool.close()
            for output in outputs:
                output.abandon()
        dropped = sum(count for _, count in split_results)
        if options.pack is not None and not options.is_chat and counter.counts.tokens == dropped:
            splits = "" if len(options.splits) == 1 else ", in several splits"
            raise InputError(
                f"No row of {options.pack:,} tokens (--pack) is full: all documents together have {dropped:,} tokens"
                f"{splits}.",
                hint="Start over with fewer tokens per row, or keep them as a shorter one: --fresh --pack-tail=keep.",
            )
        token_shards = [replace(each, path=folder / each.name) for files, _ in split_results for each in files]
        for files, _ in split_results:
            for each in files:
                rename(each.path, folder / each.name)
        shutil.rmtree(work)
    return FinishedTokens(
        token_shards, schema, replace(counter.counts, tokens=counter.counts.tokens - dropped, dropped_tail=dropped)
    )


class _Rows:
    """Write the documents of one split to shards, packed or one per row."""

    def __init__(self, writer: ShardWriter, packer: Packer | None, keep_tail: bool) -> None:
        self._writer, self._packer, self._keep_tail = writer, packer, keep_tail

    def write(self, batch: pa.RecordBatch) -> None:
        for rows in self._packer.add(batch) if self._packer is not None else (batch,):
            self._writer.write(rows)

    def finish(self) -> tuple[list[TokenShard], int]:
        dropped = 0
        if self._packer is not None and (tail := self._packer.tail()) is not None:
            if self._keep_tail:
                self._writer.write(tail)
            else:
                dropped = self._packer.tail_tokens
        return self._writer.finish(), dropped

    def abandon(self) -> None:
        self._writer.abandon()


class _Counter:
    """Count documents and tokens of a stream of batches."""

    def __init__(self) -> None:
        self.counts = TokenCounts()

    def watch(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            offsets = batch.column(IDS).offsets.to_numpy()
            has_note = NOTE in batch.schema.names
            notes = batch.column(NOTE).to_numpy() if has_note else np.zeros(batch.num_rows, np.uint8)
            null = int(np.count_nonzero(notes == NULL))
            rough = int(np.count_nonzero(notes == ROUGH))
            now = self.counts
            first = now.first_rough
            if rough and first is None:
                first = now.documents + int(np.argmax(notes == ROUGH))
            self.counts = replace(
                now,
                documents=now.documents + batch.num_rows,
                tokens=now.tokens + int(offsets[-1] - offsets[0]),
                empty=now.empty + int(np.count_nonzero(np.diff(offsets) == 0)) - null,
                null=now.null + null,
                cut=now.cut + int(np.count_nonzero(notes == CUT)) + rough,
                truncated=now.truncated + int(np.count_nonzero(notes == TRUNCATED)),
                overlong=now.overlong + int(np.count_nonzero(notes == OVERLONG)),
                trained=now.trained + (_trained(batch) if MASKS in batch.schema.names else 0),
                rough=now.rough + rough,
                first_rough=first,
            )
            yield batch


def _trained(batch: pa.RecordBatch) -> int:
    return int(np.count_nonzero(batch.column(MASKS).flatten().to_numpy()))


def _types(units: Sequence[Path], options: FinishOptions) -> pa.Schema:
    """Merge the types of all units: a kept column may be an integer in one and a float in another."""
    schemas: dict[pa.Schema, None] = {}
    for path in units:
        with open_unit(path) as reader:
            schemas[reader.schema] = None
    return unify(schemas) if schemas else pa.schema([pa.field(IDS, pa.list_(pa.type_for_alias(options.dtype)))])


def _check_row_room(batch: pa.RecordBatch, options: FinishOptions, limit_bytes: int) -> None:
    """Raise MemoryLimitError if writing a long document as one row would exceed the limit."""
    tokens = int(np.diff(ends_of(batch), prepend=0).max(initial=0))
    if tokens <= GROUP_TOKENS or options.format != "parquet" or options.pack is not None:
        return
    need_bytes = _ROW_BYTES * tokens + tree_bytes()
    if need_bytes > limit_bytes:
        raise MemoryLimitError(
            f"A document of {tokens:,} tokens does not fit a limit of {format_size(limit_bytes)}: writing it as a row "
            f"of Parquet takes {format_size(_ROW_BYTES * tokens)}.",
            hint=f"Give --memory={-(-need_bytes // 10**7) * 10}MB: finished units are kept.",
            limit_bytes=limit_bytes,
            need_bytes=need_bytes,
        )


def _encoders(options: FinishOptions, limit_bytes: int) -> int:
    """Return how many threads encode row groups, each of which takes several times its ids; 0 if memory is short."""
    if options.format in _FILES_OF_TOKENS:
        return 1  # it writes and hashes, in order
    free_bytes = limit_bytes - tree_bytes() - _LEFT_BYTES
    row_bytes = 4 * (options.pack or 0)
    return min(max(free_bytes // (_COPIES * max(4 * GROUP_TOKENS, row_bytes)) - 1, 0), usable_cores())


def _output(
    work: Path, split: str, schema: pa.Schema, options: FinishOptions, pool: OrderedPool
) -> _Rows | BinWriter | MegatronWriter | PackedChats:
    if options.format == "megatron":
        return MegatronWriter(work, split, options.dtype, options.shard_bytes, pool)
    if options.format == "bin":
        block = options.pack if options.pack_tail == "drop" else None
        return BinWriter(work, split, options.dtype, dict(options.header) | {"pack": options.pack}, block, pool)
    tokens = options.shard_bytes // np.dtype(options.dtype).itemsize
    writer = ShardWriter(work, split, schema, options, tokens, pool)
    if options.is_chat and options.pack is not None:
        return PackedChats(writer, options.pack, schema, work / f"{split}-window.arrow")
    packer = Packer(options.pack, schema.field(IDS).type.value_type) if options.pack is not None else None
    return _Rows(writer, packer, options.pack_tail == "keep")


def _by_split(batch: pa.RecordBatch, count: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    if count == 1:
        yield 0, batch
        return
    splits = batch.column(SPLIT).to_numpy()
    for number in range(count):
        rows = np.flatnonzero(splits == number)
        if len(rows) == batch.num_rows:
            yield number, batch
        elif len(rows):
            yield number, batch.take(pa.array(rows))


_READ_BIN = """import json
import numpy as np

head = json.load(open("{folder}/{split}.json"))
tokens = np.memmap("{folder}/{split}.bin", dtype=head["dtype"], mode="r")
starts = np.load("{folder}/{split}.idx.npy", mmap_mode="r")
first = tokens[starts[0] : starts[1]]"""


_READ_MEGATRON = """from megatron.core.datasets.indexed_dataset import IndexedDataset

prefixes = open("{folder}/{split}-data-path.txt").read().split()
first = IndexedDataset("{folder}/" + prefixes[0])[0]"""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Split, shuffle, pack, write. The card names `tokenizer`, and `eos`, the token that ends each document."""

    options: FinishOptions
    tokenizer: str
    eos: str | None = None

    @property
    def writing(self) -> Writing:
        return Writing("arrow", 10_000, 8 << 20)

    @property
    def facts(self) -> dict[str, Any]:
        options = self.options
        return {
            "format": options.format,
            "dtype": options.dtype,
            "pack": options.pack,
            "pack_tail": options.pack_tail,
            "splits": [asdict(split) for split in options.splits],
            "shuffle": options.shuffle is not None,
            "seed": options.seed,
            "rows_per_shard": options.rows_per_shard,
            "shard_bytes": options.shard_bytes,
            "header": None,
            **({"chat": {"window": WINDOW, "position_ids": options.position_ids}} if options.is_chat else {}),
        }

    @property
    def joins(self) -> bool:
        return True

    def check_room(self, limit_bytes: int) -> None:
        """Check packed rows, of which several copies are in memory while one is written."""
        if self.options.pack is None or self.options.format in _FILES_OF_TOKENS:
            return
        need = _COPIES * 4 * self.options.pack * len(self.options.splits)
        if need > limit_bytes // 2:
            raise MemoryLimitError(
                f"Rows of {self.options.pack:,} tokens are too long for a limit of {format_size(limit_bytes)}.",
                hint=f"Give --memory={-(-2 * need // 10**6)}MB, a smaller --pack, or --format=bin, which has no rows.",
                limit_bytes=limit_bytes,
                need_bytes=2 * need,
            )

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        paths = [units.folder / receipt.name for receipt in units.receipts if receipt.rows]
        folder = units.work
        rows = sum(receipt.rows for receipt in units.receipts)
        each = sum(receipt.size for receipt in units.receipts) / max(rows, 1)
        finished = finish_tokens(
            paths, folder, self.options, units.limit_bytes, lambda count: advance(round(count * each)), units.schema
        )
        files = {}
        for shard in finished.shards:
            files[f"{shards}/{Path(shard.name).name}"] = OutputShard(
                shard.path, shard.split, shard.rows, shard.size, shard.sha256
            )
        card = self._card(finished.schema, finished.counts, shards)
        counts = asdict(finished.counts)
        first = counts.pop("first_rough")
        unused = (
            ("empty", "null", "cut", "dropped_tail") if self.options.is_chat else ("truncated", "overlong", "trained")
        )
        counts = {name: count for name, count in counts.items() if name not in unused}
        notes = []
        if first is not None:
            some = plural(finished.counts.rough, "long document")
            notes.append(
                f"{some} had no safe place for a cut: next to it, ids may differ from those of the whole text. "
                f"The first is document {first:,} of {units.source}, counted from 0."
            )
        return Finished(files, card, counts, tuple(notes))

    def _card(self, schema: pa.Schema, counts: TokenCounts, shards: str) -> CardFacts:
        card = card_of(schema, f".{self.options.format}")
        if self.options.format == "bin":
            code = _READ_BIN.format(folder=shards, split=self.options.splits[0].name)
            card = replace(card, code=code, columns=[("tokens", self.options.dtype)])
        if self.options.format == "megatron":
            code = _READ_MEGATRON.format(folder=shards, split=self.options.splits[0].name)
            card = replace(card, code=code, columns=[("tokens", self.options.dtype)])
        return replace(card, notes=self._notes(counts))

    def _notes(self, counts: TokenCounts) -> list[str]:
        documents = "conversations" if self.options.is_chat else "documents"
        notes = [f"{counts.documents - counts.overlong:,} {documents}, {counts.tokens:,} tokens"]
        notes.append(f"tokenizer: {Path(self.tokenizer).name}")
        if self.options.is_chat:
            notes.append(f"{counts.trained:,} tokens have labels; the others are ignored (-100)")
        if self.eos is not None:
            notes.append(f"every document ends with `{self.eos}`")
        if self.options.pack is not None and self.options.is_chat:
            notes.append(f"packed in rows of at most {self.options.pack:,} tokens; no conversation is split")
        elif self.options.pack is not None:
            without_eos = "" if self.eos is not None else ", without an end-of-document token"
            notes.append(f"packed in rows of {self.options.pack:,} tokens{without_eos}")
        if self.options.shuffle is not None:
            notes.append(f"shuffled with the seed {self.options.seed}")
        return notes
