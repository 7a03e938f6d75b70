"""Write token shards: Parquet, or Arrow streams, cut at the same rows regardless of the batches.

A row group (or record batch) has up to 2 million tokens. A shard is a number of complete groups, or exactly
`rows_per_shard` rows. Files have temporary names until all are complete, because a name contains the number of shards.

Row groups are encoded in parallel, each as a small Parquet file. Only the offsets in the footer depend on where a row
group is, so the bodies are concatenated and one footer is written for all, with the same bytes as one writer would.
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

from brim.compute.outputs.output import OrderedPool
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
_OFFSET_INDEX, _COLUMN_INDEX = (4, 5), (6, 7)  # of a column chunk: offset and size
_PAGE_OFFSETS = (9, 10, 11)  # of its metadata: data, index, dictionary


class JoinedFooter:
    """The page indexes and the footer of a file to which row groups are added. The file begins with MAGIC."""

    def __init__(self) -> None:
        self._footer: Struct | None = None
        self._groups: list[Struct] = []
        self._indexes: list[tuple[Struct, tuple[int, int], bytes]] = []  # a chunk, its fields for the index, the index
        self._rows = 0

    def add(self, encoded: memoryview, offset: int) -> memoryview:
        """Add a row group, the small file `encoded`; return its pages, to be written at `offset`."""
        length = int.from_bytes(encoded[-8:-4], "little")
        end = len(encoded) - 8 - length
        footer, _ = thrift.decode(encoded, end)
        by = offset - len(MAGIC)
        for group in footer[_GROUPS][1].items:
            for chunk in group[_COLUMNS][1].items:
                for fields in (_COLUMN_INDEX, _OFFSET_INDEX):
                    if fields[0] in chunk:
                        start, size = chunk[fields[0]][1], chunk[fields[1]][1]
                        end = min(end, start)
                        index = bytes(encoded[start : start + size])
                        self._indexes.append(
                            (chunk, fields, index if fields == _COLUMN_INDEX else _shift_index(index, by))
                        )
            self._groups.append(_shift_group(group, by, len(self._groups)))
        self._rows += footer[_ROWS][1]
        self._footer = footer
        return encoded[len(MAGIC) : end]

    def end(self, offset: int) -> bytes:
        """Return the bytes after the last row group, which ends at `offset`."""
        assert self._footer is not None, "a file has at least one row group, which may be empty"
        footer, parts = self._footer, []
        for index_fields in (_COLUMN_INDEX, _OFFSET_INDEX):
            for chunk, fields, index in self._indexes:
                if fields == index_fields:
                    chunk[fields[0]], chunk[fields[1]] = (I64, offset), (I32, len(index))
                    parts.append(index)
                    offset += len(index)
        footer[_GROUPS] = (LIST, thrift.List(STRUCT, self._groups))
        footer[_ROWS] = (footer[_ROWS][0], self._rows)
        data = thrift.encode(footer)
        return b"".join([*parts, data, len(data).to_bytes(4, "little"), MAGIC])


def _shift_index(index: bytes, by: int) -> bytes:
    """Add `by` to the offsets of an OffsetIndex, which count from the start of the file."""
    offset_index, _ = thrift.decode(index)
    for location in offset_index[1][1].items:
        location[1] = (I64, location[1][1] + by)
    return thrift.encode(offset_index)


def _shift_group(group: Struct, by: int, number: int) -> Struct:
    for chunk in group[_COLUMNS][1].items:
        _shift_offsets(chunk[_CHUNK_META][1], _PAGE_OFFSETS, by)
        _shift_offsets(chunk, (_CHUNK_OFFSET,), by)
    _shift_offsets(group, (_GROUP_OFFSET,), by)
    if _ORDINAL in group:
        group[_ORDINAL] = (group[_ORDINAL][0], number)
    return group


def _shift_offsets(fields: Struct, names: tuple[int, ...], by: int) -> None:
    """Add `by` to offsets. Absent parts have the offset 0: pages of an empty column, metadata after a chunk."""
    for name in names:
        if name in fields and fields[name][1]:
            fields[name] = (fields[name][0], fields[name][1] + by)


GROUP_TOKENS = 1 << 21


@dataclass(frozen=True, slots=True)
class TokenShard:
    """A finished file. `name` is its path below the destination; `sha256` was computed while it was written."""

    path: Path
    name: str
    split: str
    rows: int
    tokens: int
    size: int
    sha256: str


class ShardWriter:
    """Write the rows of one split, in order, to shards. `pool` encodes the groups.

    A shard has at most `shard_tokens` tokens, or one group if that has more; `rows_per_shard` takes precedence.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        schema: pa.Schema,
        options: TokenFileOptions,
        shard_tokens: int,
        pool: OrderedPool,
    ) -> None:
        self._folder, self._split, self._options, self._pool = folder, split, options, pool
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
                shard_rows = self._shards[-1].rows if self._shards and not self._shards[-1].full else 0
                fit = min(fit, self._options.rows_per_shard - shard_rows - self._group_rows)
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
        """Complete the last shard, and name all shards."""
        if self._group_rows or not self._shards:
            self._end_group()
        self._pool.drain()
        for shard in self._shards:
            shard.close()
        shards = []
        for number, shard in enumerate(self._shards):
            name = shard_name("data", self._split, number, len(self._shards), f".{self._options.format}")
            file = shard.file
            shards.append(TokenShard(file.path, name, self._split, shard.rows, shard.tokens, file.size, file.sha256))
        return shards

    def abandon(self) -> None:
        """Close the files after a failure."""
        for shard in self._shards:
            shard.abandon()

    def _end_group(self) -> None:
        shard = self._shard()
        table = pa.Table.from_batches([_plain(batch, self._schema) for batch in self._group], self._schema)
        shard.rows += self._group_rows
        shard.tokens += self._group_tokens
        shard.full = shard.rows == self._options.rows_per_shard
        self._group, self._group_rows, self._group_tokens = [], 0, 0
        self._pool.do(lambda: shard.encoded(table), shard.append)

    def _shard(self) -> _OpenShard:
        """Return the shard for the group: the last one if the group fits, else a new one."""
        limit = self._shard_tokens if self._options.rows_per_shard is None else 1 << 62
        last = self._shards[-1] if self._shards else None
        if last is None or last.full or (last.rows and last.tokens + self._group_tokens > limit):
            kind = ParquetShard if self._options.format == "parquet" else ArrowShard
            path = self._folder / f"{self._split}-{len(self._shards):05d}.{self._options.format}"
            # Groups arrive in order: after a group of the next shard, this one is complete.
            after = None if last is None else last.close
            self._shards.append(last := kind(path, self._schema, after))
        return last


class _OpenShard:
    """A file to which encoded groups are appended."""

    def __init__(self, path: Path, schema: pa.Schema, after: Callable[[], None] | None) -> None:
        self.path, self._schema, self._after = path, schema, after
        self.rows = self.tokens = 0
        self.full = False
        self._file: HashedFile | None = None

    @property
    def file(self) -> HashedFile:
        """Open the file at the first group, after closing the shard before: one is open at a time."""
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
        """Encode a group, in any thread."""
        raise NotImplementedError

    def append(self, encoded: Any) -> None:
        raise NotImplementedError

    def _open(self, file: HashedFile) -> None:
        raise NotImplementedError

    def _close(self, file: HashedFile) -> None:
        raise NotImplementedError


class ParquetShard(_OpenShard):
    """Row groups with one footer."""

    def _open(self, file: HashedFile) -> None:
        self._footer = JoinedFooter()
        file.write(MAGIC)

    def encoded(self, table: pa.Table) -> pa.Buffer:
        sink = pa.BufferOutputStream()
        dictionary_columns = sorted(path for path, is_ids in parquet_leaves(self._schema).items() if not is_ids)
        # Plain ids under zstd take 1.01 bytes per token (vocabulary of 32,000), dictionary-encoded ones 1.28.
        with pq.ParquetWriter(
            sink,
            self._schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=dictionary_columns or False,
            write_statistics=dictionary_columns or False,
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
                self._writer.close()  # else it raises about the closed file when it is collected
        super().abandon()


def _plain(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Select the columns of the output; a null text becomes an empty list."""
    columns = [batch.column(name) for name in schema.names]
    index = schema.get_field_index(IDS)
    if columns[index].null_count:
        ends = np.concatenate([[0], ends_of(batch)]).astype(np.int32)
        columns[index] = pa.ListArray.from_arrays(pa.array(ends), pa.array(tokens_of(batch)))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


FORMAT, VERSION = "brim-tokens", 1


class BinWriter:
    """Write the documents of one split as bin files. `block`: the tokens are cut to a multiple of it."""

    def __init__(
        self, folder: Path, split: str, dtype: str, header: dict[str, Any], block: int | None, pool: OrderedPool
    ) -> None:
        self._pool = pool
        self._folder, self._split, self._dtype, self._block = folder, split, np.dtype(dtype).newbyteorder("<"), block
        self._header = header
        self._tokens_file = open(folder / f"{split}.bin", "w+b")  # noqa: SIM115  closed in finish
        self._digest, self._unhashed = hashlib.sha256(), b""  # less than a block, which may be dropped
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
        self._pool.do(lambda: self._add(data), lambda _: None)
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
        """Complete the three files; return them and the number of dropped tokens of the tail."""
        self._pool.drain()
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
        shards = [
            TokenShard(path, path.name, self._split, row, count, path.stat().st_size, sha256)
            for path, row, count, sha256 in zip(paths, rows, tokens, hashes, strict=True)
        ]
        return shards, dropped

    def abandon(self) -> None:
        self._tokens_file.close()
        self._index_file.close()

    def _drop(self, count: int) -> None:
        """Cut off the last tokens, and the documents that start in them."""
        self._tokens -= count
        self._tokens_file.truncate(self._tokens * self._dtype.itemsize)
        self._index_file.flush()
        starts = np.memmap(self._index_file, "<i8", "r", self._head_bytes, (self._documents,))
        self._documents = int(np.searchsorted(starts, self._tokens, side="left"))
        del starts
        self._index_file.truncate(self._head_bytes + 8 * self._documents)


def _npy_header(count: int) -> bytes:
    """Return an .npy header. NumPy pads it, so that its length is the same for any count."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<i8", "fortran_order": False, "shape": (count,)})
    return buffer.getvalue()
