"""Shards of rows: Parquet, or Arrow streams, cut at the same rows whatever the batches were.

A row group (or record batch) holds up to 2 million tokens. A shard is a number of whole groups, or exactly
`rows_per_shard` rows. Files have working names until all are complete, because a name says how many there are.

Row groups that were encoded apart become one Parquet file, with the bytes that one writer gives for all of them.
Nothing in a row group depends on where it lies but the offsets in the footer. So each can be encoded by itself, by
whoever has time, as a small file; their bodies are put after each other and one footer is written for all.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.compute.outputs.output import Beside
from brim.compute.outputs.rows_file import PAGES, HashedFile, parquet_leaves
from brim.compute.outputs.token_packing import ends_of, tokens_of
from brim.compute.steps.tokenize_step import IDS
from brim.formats import thrift
from brim.formats.thrift import I32, I64, LIST, STRUCT, Struct
from brim.options.compute_options import TokenFileOptions
from brim.plans.cut_shards import shard_name
from brim.records import dataclass
from brim.state.atomic_files import sha256_of

MAGIC = b"PAR1"
_ROWS, _GROUPS = 3, 4  # of the footer
_COLUMNS, _GROUP_OFFSET, _ORDINAL = 1, 5, 7  # of a row group
_CHUNK_OFFSET, _CHUNK_META = 2, 3  # of a column chunk
_OFFSET_INDEX, _COLUMN_INDEX = (4, 5), (6, 7)  # of a column chunk: where it is, and its size
_PAGE_OFFSETS = (9, 10, 11)  # of its metadata: data, index, dictionary


class JoinedFooter:
    """The page indexes and the footer of a file to which row groups are added. The file begins with MAGIC."""

    def __init__(self) -> None:
        self._footer: Struct | None = None
        self._groups: list[Struct] = []
        self._indexes: list[tuple[Struct, tuple[int, int], bytes]] = []  # a chunk, its fields for the index, the index
        self._rows = 0

    def add(self, encoded: memoryview, at: int) -> memoryview:
        """What is to be written at `at` of the small file `encoded`: its pages."""
        length = int.from_bytes(encoded[-8:-4], "little")
        end = len(encoded) - 8 - length
        footer, _ = thrift.decode(encoded, end)
        by = at - len(MAGIC)
        for group in footer[_GROUPS][1].items:
            for chunk in group[_COLUMNS][1].items:
                for fields in (_COLUMN_INDEX, _OFFSET_INDEX):
                    if fields[0] in chunk:
                        start, size = chunk[fields[0]][1], chunk[fields[1]][1]
                        end = min(end, start)
                        index = bytes(encoded[start : start + size])
                        self._indexes.append((chunk, fields, index if fields == _COLUMN_INDEX else _shifted(index, by)))
            self._groups.append(_moved(group, by, len(self._groups)))
        self._rows += footer[_ROWS][1]
        self._footer = footer
        return encoded[len(MAGIC) : end]

    def end(self, at: int) -> bytes:
        """What comes after the last row group, which ends at `at`."""
        assert self._footer is not None, "a file has one row group at least, if need be an empty one"
        footer, parts = self._footer, []
        for wanted in (_COLUMN_INDEX, _OFFSET_INDEX):
            for chunk, fields, index in self._indexes:
                if fields == wanted:
                    chunk[fields[0]], chunk[fields[1]] = (I64, at), (I32, len(index))
                    parts.append(index)
                    at += len(index)
        footer[_GROUPS] = (LIST, thrift.List(STRUCT, self._groups))
        footer[_ROWS] = (footer[_ROWS][0], self._rows)
        data = thrift.encode(footer)
        return b"".join([*parts, data, len(data).to_bytes(4, "little"), MAGIC])


def _shifted(index: bytes, by: int) -> bytes:
    """An OffsetIndex whose pages have moved: its offsets count from the start of the file."""
    found, _ = thrift.decode(index)
    for location in found[1][1].items:
        location[1] = (I64, location[1][1] + by)
    return thrift.encode(found)


def _moved(group: Struct, by: int, number: int) -> Struct:
    for chunk in group[_COLUMNS][1].items:
        _move(chunk[_CHUNK_META][1], _PAGE_OFFSETS, by)
        _move(chunk, (_CHUNK_OFFSET,), by)
    _move(group, (_GROUP_OFFSET,), by)
    if _ORDINAL in group:
        group[_ORDINAL] = (group[_ORDINAL][0], number)
    return group


def _move(fields: Struct, names: tuple[int, ...], by: int) -> None:
    """What is not there is 0: the pages of an empty column, and the metadata that old writers put behind a chunk."""
    for name in names:
        if name in fields and fields[name][1]:
            fields[name] = (fields[name][0], fields[name][1] + by)


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


class ShardWriter:
    """Write the rows of one split, in order, to shards. Groups are encoded by `beside`.

    A shard has at most `shard_tokens` tokens, or one group if that has more; `rows_per_shard` takes precedence.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        schema: pa.Schema,
        options: TokenFileOptions,
        shard_tokens: int,
        beside: Beside,
    ) -> None:
        self._folder, self._split, self._options, self._beside = folder, split, options, beside
        self._shard_tokens = shard_tokens
        self._schema = schema
        self._group: list[pa.RecordBatch] = []
        self._group_rows = self._group_tokens = 0
        self._shards: list[_OpenShard] = []  # the last one may take more groups

    def write(self, batch: pa.RecordBatch) -> None:
        start, ends = 0, ends_of(batch)
        while start < batch.num_rows:
            before = int(ends[start - 1]) if start else 0
            fit = int(np.searchsorted(ends, before + GROUP_TOKENS - self._group_tokens, side="right")) - start
            if self._options.rows_per_shard is not None:
                there = self._shards[-1].rows if self._shards and not self._shards[-1].full else 0
                fit = min(fit, self._options.rows_per_shard - there - self._group_rows)
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
        if self._group_rows or not self._shards:
            self._end_group()
        self._beside.settle()
        for shard in self._shards:
            shard.close()
        made = []
        for number, shard in enumerate(self._shards):
            name = shard_name("data", self._split, number, len(self._shards), f".{self._options.format}")
            file = shard.file
            made.append(TokenShard(file.path, name, self._split, shard.rows, shard.tokens, file.size, file.sha256))
        return made

    def abandon(self) -> None:
        """Let go of the files after a failure."""
        for shard in self._shards:
            shard.abandon()

    def _end_group(self) -> None:
        shard = self._shard()
        table = pa.Table.from_batches([_plain(batch, self._schema) for batch in self._group], self._schema)
        shard.rows += self._group_rows
        shard.tokens += self._group_tokens
        shard.full = shard.rows == self._options.rows_per_shard
        self._group, self._group_rows, self._group_tokens = [], 0, 0
        self._beside.do(lambda: shard.encoded(table), shard.append)

    def _shard(self) -> _OpenShard:
        """The shard that the group goes to: the last one, if it has room."""
        limit = self._shard_tokens if self._options.rows_per_shard is None else 1 << 62
        last = self._shards[-1] if self._shards else None
        if last is None or last.full or (last.rows and last.tokens + self._group_tokens > limit):
            kind = ParquetShard if self._options.format == "parquet" else ArrowShard
            path = self._folder / f"{self._split}-{len(self._shards):05d}.{self._options.format}"
            # Groups come in order: whoever has encoded one of the next shard has encoded all of this one.
            after = None if last is None else last.close
            self._shards.append(last := kind(path, self._schema, after))
        return last


class _OpenShard:
    """A file that groups are added to, each encoded before by whoever has time."""

    def __init__(self, path: Path, schema: pa.Schema, after: Callable[[], None] | None) -> None:
        self.path, self._schema, self._after = path, schema, after
        self.rows = self.tokens = 0
        self.full = False
        self._file: HashedFile | None = None

    @property
    def file(self) -> HashedFile:
        """Opened at the first group, when the shard before is closed: one is open at a time."""
        if self._file is None:
            if self._after is not None:
                self._after()
            self._file = HashedFile(self.path, hashed=True)
            self._open(self._file)
        return self._file

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            self._close(self._file)
            self._file.close()

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()

    def encoded(self, table: pa.Table) -> Any:
        """In any thread."""
        raise NotImplementedError

    def append(self, encoded: Any) -> None:
        raise NotImplementedError

    def _open(self, file: HashedFile) -> None:
        raise NotImplementedError

    def _close(self, file: HashedFile) -> None:
        raise NotImplementedError


class ParquetShard(_OpenShard):
    """Row groups, put together under one footer."""

    def _open(self, file: HashedFile) -> None:
        self._footer = JoinedFooter()
        file.write(MAGIC)

    def encoded(self, table: pa.Table) -> pa.Buffer:
        sink = pa.BufferOutputStream()
        others = sorted(path for path, is_ids in parquet_leaves(self._schema).items() if not is_ids)
        # Plain ids under zstd are smaller and faster than a dictionary of them: see docs/how-to/tokenize-text.md.
        with pq.ParquetWriter(
            sink,
            self._schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=others or False,
            write_statistics=others or False,
            **PAGES,
        ) as writer:
            writer.write_table(table.combine_chunks(), row_group_size=max(len(table), 1))
        return sink.getvalue()

    def append(self, encoded: pa.Buffer) -> None:
        file = self.file
        file.write(self._footer.add(memoryview(encoded).cast("B"), file.size))

    def _close(self, file: HashedFile) -> None:
        file.write(self._footer.end(file.size))


class ArrowShard(_OpenShard):
    """Record batches of a stream."""

    def _open(self, file: HashedFile) -> None:
        self._writer = pa.ipc.new_stream(pa.PythonFile(file, mode="w"), self._schema)

    def encoded(self, table: pa.Table) -> pa.Table:
        return table.combine_chunks()

    def append(self, encoded: pa.Table) -> None:
        self.file  # noqa: B018  opens the stream
        self._writer.write_table(encoded)

    def _close(self, file: HashedFile) -> None:
        self._writer.close()

    def abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError, pa.ArrowException):
                self._writer.close()  # else it complains when it is collected, of a file that is closed
        super().abandon()


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

    def __init__(
        self, folder: Path, split: str, dtype: str, header: dict[str, Any], block: int | None, beside: Beside
    ) -> None:
        self._beside = beside
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
        data = np.ascontiguousarray(tokens_of(batch), self._dtype).tobytes()
        self._beside.do(lambda: self._add(data), lambda _: None)
        self._tokens, self._documents = int(ends[-1]), self._documents + batch.num_rows

    def _add(self, data: bytes) -> None:
        self._tokens_file.write(data)
        self._hash(memoryview(data))

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
        self._beside.settle()
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
