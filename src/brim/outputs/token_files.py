"""Shards of rows: Parquet, or Arrow streams, cut at the same rows whatever the batches were.

A row group (or record batch) holds up to 2 million tokens. A shard is a number of whole groups, or exactly
`rows_per_shard` rows. Files have working names until all are complete, because a name says how many there are.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.outputs.rows_file import HashedFile
from brim.outputs.token_documents import ends_of, tokens_of
from brim.plans.cut_shards import shard_name
from brim.state.durable import sha256_of
from brim.steps.tokenize_step import IDS

GROUP_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class TokenShard:
    """A finished file. `name` is where it belongs below the destination; `sha256` was taken while it was written."""

    path: Path
    name: str
    split: str
    rows: int
    tokens: int
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """`shard_tokens`: a shard has no more, unless one group has. `rows_per_shard` overrules it."""

    format: str
    shard_tokens: int
    rows_per_shard: int | None = None


class ShardWriter:
    """The rows of one split, in order, into shards."""

    def __init__(self, folder: Path, split: str, schema: pa.Schema, options: ShardOptions) -> None:
        self._folder, self._split, self._options = folder, split, options
        self._schema = schema
        self._group: list[pa.RecordBatch] = []
        self._group_rows = self._group_tokens = 0
        self._shards: list[tuple[HashedFile, int, int]] = []  # finished: file, rows, tokens
        self._rows = self._tokens = 0  # of the open shard, groups that are written
        self._file: HashedFile | None = None
        self._writer: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        start, ends = 0, ends_of(batch)
        while start < batch.num_rows:
            before = int(ends[start - 1]) if start else 0
            fit = int(np.searchsorted(ends, before + GROUP_TOKENS - self._group_tokens, side="right")) - start
            if self._options.rows_per_shard is not None:
                fit = min(fit, self._options.rows_per_shard - self._rows - self._group_rows)
            if fit < 1 and not self._group_rows:
                fit = 1  # a row that is larger than a group
            if fit > 0:
                self._group.append(batch.slice(start, fit))
                self._group_rows += fit
                start += fit
                self._group_tokens += int(ends[start - 1]) - before
            if start < batch.num_rows:
                self._end_group()

    def finish(self) -> list[TokenShard]:
        """Complete the last shard, and give all of them their names."""
        if self._group_rows or not (self._shards or self._rows):
            self._end_group()
        self._end_shard()
        made = []
        for number, (file, rows, tokens) in enumerate(self._shards):
            name = shard_name("data", self._split, number, len(self._shards), f".{self._options.format}")
            made.append(TokenShard(file.path, name, self._split, rows, tokens, file.size, file.sha256))
        return made

    def abandon(self) -> None:
        """Let go of the files after a failure."""
        if self._file is not None:
            with contextlib.suppress(OSError, pa.ArrowException):
                self._writer.close()  # else it complains when it is collected, of a file that is closed
            self._file.close()

    def _end_group(self) -> None:
        limit = self._options.shard_tokens if self._options.rows_per_shard is None else 1 << 62
        full = self._rows == self._options.rows_per_shard
        if self._rows and (full or self._tokens + self._group_tokens > limit):
            self._end_shard()
        if self._file is None:
            self._begin_shard()
        table = pa.Table.from_batches([_plain(batch, self._schema) for batch in self._group], self._schema)
        table = table.combine_chunks()
        if self._options.format == "parquet":
            self._writer.write_table(table, row_group_size=max(len(table), 1))
        else:
            self._writer.write_table(table)
        self._rows += self._group_rows
        self._tokens += self._group_tokens
        self._group, self._group_rows, self._group_tokens = [], 0, 0
        if self._rows == self._options.rows_per_shard:
            self._end_shard()

    def _begin_shard(self) -> None:
        path = self._folder / f"{self._split}-{len(self._shards):05d}.{self._options.format}"
        self._file = HashedFile(path, hashed=True)
        sink = pa.PythonFile(self._file, mode="w")
        if self._options.format == "parquet":
            others = [name for name in self._schema.names if name != IDS]
            # Plain ids under zstd are smaller and faster than a dictionary of them: see docs/tokenize.md.
            self._writer = pq.ParquetWriter(
                sink,
                self._schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=others or False,
                write_statistics=others or False,
            )
        else:
            self._writer = pa.ipc.new_stream(sink, self._schema)

    def _end_shard(self) -> None:
        if self._file is None:
            return
        self._writer.close()
        self._file.close()
        self._shards.append((self._file, self._rows, self._tokens))
        self._file = self._writer = None
        self._rows = self._tokens = 0


def _plain(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Only the columns of the output; a text that was null is an empty list."""
    columns = [batch.column(name) for name in schema.names]
    at = schema.get_field_index(IDS)
    if columns[at].null_count:
        ends = np.concatenate([[0], ends_of(batch)]).astype(np.int32)
        columns[at] = pa.ListArray.from_arrays(pa.array(ends), pa.array(tokens_of(batch)))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


FORMAT, VERSION = "brim-tokens", 1


class BinWriter:
    """The documents of one split. `block`: the tokens are cut to a multiple of it, unless the tail is kept."""

    def __init__(self, folder: Path, split: str, dtype: str, header: dict[str, Any], block: int | None) -> None:
        self._folder, self._split, self._dtype, self._block = folder, split, np.dtype(dtype).newbyteorder("<"), block
        self._header = header
        self._tokens_file = open(folder / f"{split}.bin", "w+b")  # noqa: SIM115  closed in finish
        self._digest, self._unhashed = hashlib.sha256(), b""  # less than a block: it may be dropped
        self._index_file = open(folder / f"{split}.idx.npy", "w+b")  # noqa: SIM115
        self._head_bytes = self._index_file.write(_npy_header(0))
        self._tokens = self._documents = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        ends = ends_of(batch) + self._tokens
        starts = np.concatenate([[self._tokens], ends[:-1]]).astype("<i8")
        starts.tofile(self._index_file)
        tokens = tokens_of(batch)
        data = np.ascontiguousarray(tokens, self._dtype).tobytes()
        self._tokens_file.write(data)
        self._hash(memoryview(data))
        self._tokens, self._documents = int(ends[-1]), self._documents + batch.num_rows

    def _hash(self, data: memoryview) -> None:
        if self._block is None:
            self._digest.update(data)
            return
        whole = (len(self._unhashed) + len(data)) // (self._block * self._dtype.itemsize)
        now = whole * self._block * self._dtype.itemsize - len(self._unhashed)
        if now < 0:
            self._unhashed += bytes(data)
            return
        self._digest.update(self._unhashed)
        self._digest.update(data[:now])
        self._unhashed = bytes(data[now:])

    def finish(self) -> tuple[list[TokenShard], int]:
        """The three files, and the tokens of the tail that were dropped."""
        dropped = self._tokens % self._block if self._block else 0
        if dropped:
            self._drop(dropped)
        self._index_file.seek(0, os.SEEK_END)
        self._index_file.write(np.array([self._tokens], "<i8").tobytes())
        self._index_file.seek(0)
        self._index_file.write(_npy_header(self._documents + 1))
        head = {"format": FORMAT, "version": VERSION, "dtype": self._dtype.str, "tokens": self._tokens}
        head |= {"documents": self._documents} | self._header
        paths = [Path(self._tokens_file.name), Path(self._index_file.name), self._folder / f"{self._split}.json"]
        with open(paths[2], "wb") as header_file:
            header_file.write((json.dumps(head, indent=1) + "\n").encode())
            for file in (self._tokens_file, self._index_file, header_file):
                file.flush()
                os.fsync(file.fileno())
        self.abandon()
        rows = (self._documents, 0, 0)
        tokens = (self._tokens, 0, 0)
        hashes = (self._digest.hexdigest(), *(sha256_of(path, lambda _: None) for path in paths[1:]))
        made = [
            TokenShard(path, path.name, self._split, row, count, path.stat().st_size, sha256)
            for path, row, count, sha256 in zip(paths, rows, tokens, hashes, strict=True)
        ]
        return made, dropped

    def abandon(self) -> None:
        self._tokens_file.close()
        self._index_file.close()

    def _drop(self, count: int) -> None:
        """Cut the tokens, and the documents that began among them, off."""
        self._tokens -= count
        self._tokens_file.truncate(self._tokens * self._dtype.itemsize)
        self._index_file.flush()
        starts = np.memmap(self._index_file, "<i8", "r", self._head_bytes, (self._documents,))
        self._documents = int(np.searchsorted(starts, self._tokens, side="left"))
        del starts
        self._index_file.truncate(self._head_bytes + 8 * self._documents)


def _npy_header(count: int) -> bytes:
    """NumPy leaves room for the number to grow, so that the length is always the same."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<i8", "fortran_order": False, "shape": (count,)})
    return buffer.getvalue()
