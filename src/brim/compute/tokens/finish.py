"""From the token files of units to the files that are published: split, shuffle, pack, write.

Everything streams. It is made in a working folder inside the destination and gets its names when all of it is
complete and synced; the same units and options give the same bytes, so running it again after a crash is harmless.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from brim.choices import at_least, one_of
from brim.compute.finish import with_features
from brim.compute.tokens.binary import BinWriter
from brim.compute.tokens.documents import SPLIT, Split, open_unit, unit_batches, with_places
from brim.compute.tokens.packing import Packer
from brim.compute.tokens.shuffle import in_key_order
from brim.compute.tokens.step import CUT, IDS, NOTE, NULL, ROUGH
from brim.compute.tokens.writing import Made, ShardOptions, ShardWriter
from brim.durable import failures, rename
from brim.errors import InputError
from brim.sources.rows.schemas import unify

WHOLE = (Split("train", 1.0),)
_WORK = ".finish"
_NAMES = {2: ("train", "validation"), 3: ("train", "validation", "test")}


@dataclass(frozen=True, slots=True)
class FinishOptions:
    """What is made of the documents. `seed` decides the splits, and the order if `shuffle`.

    `header` is told in the header of `bin` files: vocab_size, eos, tokenizer_sha256, created_by.
    """

    format: Literal["parquet", "arrow", "bin"] = "parquet"
    dtype: str = "int32"
    pack: int | None = None
    pack_tail: Literal["drop", "keep"] = "drop"
    splits: tuple[Split, ...] = WHOLE
    shuffle: bool = False
    seed: int = 0
    rows_per_shard: int | None = None
    shard_bytes: int = 256_000_000
    header: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        one_of("format", self.format, ("parquet", "arrow", "bin"))
        one_of("pack-tail", self.pack_tail, ("drop", "keep"))
        at_least("pack", self.pack, 2)
        if self.pack is None and self.pack_tail != "drop":
            raise InputError("--pack-tail is for rows of --pack.", hint="Add --pack=N, or leave --pack-tail out.")
        at_least("rows-per-shard", self.rows_per_shard, 1)
        if self.rows_per_shard is not None and self.format == "bin":
            raise InputError("A bin file is one file for each split.", hint="Leave --rows-per-shard out.")


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """`tokens` are those that were written; `rough` documents were cut where no place was safe."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    null: int = 0
    cut: int = 0
    rough: int = 0
    dropped_tail: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    made: list[Made]
    schema: pa.Schema
    counts: TokenCounts


def parse_split(text: str) -> tuple[Split, ...]:
    """Shares like 0.99/0.01, or 98/1/1: train, validation and test, in this order."""
    try:
        shares = [float(part) for part in text.split("/")]
    except ValueError:
        shares = []
    total = sum(shares)
    right = len(shares) in _NAMES and all(share > 0 for share in shares)
    if not right or not (abs(total - 1) < 1e-6 or abs(total - 100) < 1e-4):
        raise InputError(
            f"--split takes two or three shares that make 1 or 100, not {text!r}.", hint="Write 0.99/0.01 or 98/1/1."
        )
    return tuple(Split(name, share / total) for name, share in zip(_NAMES[len(shares)], shares, strict=True))


def finish_tokens(
    units: Sequence[Path],
    folder: Path,
    options: FinishOptions,
    limit_bytes: int,
    advance: Callable[[int], None],
    source: pa.Schema | None = None,
) -> Finished:
    """Make the final files below `folder`. `advance` is told of documents as they are done.

    `source` is the schema of the source, where kept columns may have features of `datasets`.
    """
    types = _types(units, options)
    schema = _output_schema(types, source)
    if options.format == "bin" or options.pack is not None:
        _refuse_kept(schema)
    work = folder / _WORK
    with failures(folder):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        counter = _Counter()
        documents = with_places(
            counter.watch(unit_batches(units, types)), options.splits, options.seed, options.shuffle
        )
        if options.shuffle:
            total = sum(path.stat().st_size for path in units)
            documents = in_key_order(documents, total, work / "buckets", limit_bytes)
        outputs = [_output(work, split.name, schema, options) for split in options.splits]
        try:
            for batch in documents:
                for number, part in _by_split(batch, len(outputs)):
                    outputs[number].write(part)
                advance(batch.num_rows)
            done = [output.finish() for output in outputs]
        finally:
            for output in outputs:
                output.abandon()
        made = [replace(each, path=folder / each.name) for files, _ in done for each in files]
        for files, _ in done:
            for each in files:
                rename(each.path, folder / each.name)
        shutil.rmtree(work)
    dropped = sum(count for _, count in done)
    return Finished(made, schema, replace(counter.counts, tokens=counter.counts.tokens - dropped, dropped_tail=dropped))


class _Rows:
    """The way of one split's documents into shards: packed, or as they are."""

    def __init__(self, writer: ShardWriter, packer: Packer | None, keep_tail: bool) -> None:
        self._writer, self._packer, self._keep_tail = writer, packer, keep_tail

    def write(self, batch: pa.RecordBatch) -> None:
        for rows in self._packer.add(batch) if self._packer is not None else (batch,):
            self._writer.write(rows)

    def finish(self) -> tuple[list[Made], int]:
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
    """Counts what goes by."""

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
            self.counts = replace(
                now,
                documents=now.documents + batch.num_rows,
                tokens=now.tokens + int(offsets[-1] - offsets[0]),
                empty=now.empty + int(np.count_nonzero(np.diff(offsets) == 0)) - null,
                null=now.null + null,
                cut=now.cut + int(np.count_nonzero(notes == CUT)) + rough,
                rough=now.rough + rough,
            )
            yield batch


def _types(units: Sequence[Path], options: FinishOptions) -> pa.Schema:
    """Types that hold the rows of every unit: a kept column may have been an integer here and a float there."""
    found: dict[pa.Schema, None] = {}
    for path in units:
        with open_unit(path) as reader:
            found[reader.schema] = None
    return unify(found) if found else pa.schema([pa.field(IDS, pa.list_(pa.type_for_alias(options.dtype)))])


def _output_schema(types: pa.Schema, source: pa.Schema | None) -> pa.Schema:
    """The columns of the output, with the features that the source tells of those that are kept."""
    schema = pa.schema([column for column in types if column.name != NOTE])
    kept = pa.schema([column for column in schema if column.name != IDS], source.metadata if source else None)
    return with_features(schema.with_metadata(with_features(kept).metadata))


def _refuse_kept(schema: pa.Schema) -> None:
    kept = [name for name in schema.names if name != IDS]
    if kept:
        raise InputError(
            f"--keep={' '.join(kept)} needs rows that are documents.", hint="Leave out --keep, or --pack and bin."
        )


def _output(work: Path, split: str, schema: pa.Schema, options: FinishOptions) -> _Rows | BinWriter:
    if options.format == "bin":
        block = options.pack if options.pack_tail == "drop" else None
        return BinWriter(work, split, options.dtype, dict(options.header) | {"pack": options.pack}, block)
    tokens = options.shard_bytes // np.dtype(options.dtype).itemsize
    writer = ShardWriter(work, split, schema, ShardOptions(options.format, tokens, options.rows_per_shard))
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
