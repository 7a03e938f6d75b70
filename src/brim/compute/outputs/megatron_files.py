"""Write token files as Megatron-LM reads them: pairs of `.bin` and `.idx`.

A `.bin` file holds the ids of documents, one after the other. Its `.idx` file has the magic number, the type of the
ids, and for each sequence its length and the byte at which it starts; then where documents begin. A document is one
sequence here. The name of a pair without its suffix is what `--data-path` takes, so a text file lists these prefixes.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from brim.compute.outputs.output import OrderedPool
from brim.compute.outputs.token_files import TokenShard
from brim.compute.outputs.token_packing import ends_of, tokens_of
from brim.state.atomic_files import sha256_of

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
DATA_PATH = "data-path.txt"
_CODES = {"uint16": 8, "int32": 4}  # of Megatron's DType
_COPIED = 1 << 20


class MegatronWriter:
    """Write the documents of one split. Empty documents are left out: Megatron cannot sample from them."""

    def __init__(self, folder: Path, split: str, dtype: str, shard_bytes: int, pool: OrderedPool) -> None:
        self._folder, self._split, self._pool = folder, split, pool
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = _CODES[dtype]
        self._most_tokens = max(shard_bytes // self._dtype.itemsize, 1)
        self._shards: list[_Pair] = []

    def write(self, batch: pa.RecordBatch) -> None:
        ends, tokens = ends_of(batch), tokens_of(batch)
        start = before = 0
        while start < len(ends):
            pair = self._open_pair(int(ends[start]) - before)
            stop = int(np.searchsorted(ends, before + self._most_tokens - pair.tokens, side="right"))
            stop = max(stop, start + 1)
            end = int(ends[stop - 1])
            data = np.ascontiguousarray(tokens[before:end], self._dtype).tobytes()
            pair.add(np.diff(ends[start:stop], prepend=before), end - before)
            self._pool.do(lambda pair=pair, data=data: pair.write(data), lambda _: None)  # type: ignore[misc]
            start, before = stop, end

    def finish(self) -> tuple[list[TokenShard], int]:
        """Return the pairs and the list of their prefixes; no token is dropped."""
        self._pool.drain()
        if not self._shards:
            self._open_pair(0)
        made, prefixes = list[TokenShard](), list[str]()
        for number, pair in enumerate(self._shards):
            prefix = f"{self._split}-{number:05d}-of-{len(self._shards):05d}"
            made += pair.finish(prefix, self._split)
            prefixes.append(prefix)
        path = self._folder / f"{self._split}-{DATA_PATH}"
        path.write_text("".join(f"{prefix}\n" for prefix in prefixes))
        sha256 = sha256_of(path, lambda _: None)
        made.append(TokenShard(path, path.name, self._split, 0, 0, path.stat().st_size, sha256))
        return made, 0

    def abandon(self) -> None:
        for pair in self._shards:
            pair.close()

    def _open_pair(self, tokens: int) -> _Pair:
        """Return the pair that a document of so many tokens goes to."""
        last = self._shards[-1] if self._shards else None
        if last is None or (last.tokens and last.tokens + tokens > self._most_tokens):
            if last is not None:
                self._pool.do(last.close_data, lambda _: None)
            last = _Pair(self._folder / f"{self._split}-{len(self._shards):05d}", self._dtype.itemsize, self._code)
            self._shards.append(last)
        return last


class _Pair:
    """A `.bin` file, and the lengths that its `.idx` file will have: 4 bytes for each document, in a scratch file."""

    def __init__(self, base: Path, item_bytes: int, code: int) -> None:
        self._base, self._item_bytes, self._code = base, item_bytes, code
        self._data: BinaryIO = open(base.with_suffix(".bin"), "wb")  # noqa: SIM115  closed by close_data
        self._lengths: BinaryIO = open(base.with_suffix(".lengths"), "w+b")  # noqa: SIM115  closed by close
        self._digest = hashlib.sha256()
        self.tokens = self.documents = 0

    def add(self, lengths: Any, tokens: int) -> None:
        kept = lengths[lengths > 0].astype("<i4")
        self._lengths.write(kept.tobytes())
        self.documents += len(kept)
        self.tokens += tokens

    def write(self, data: bytes) -> None:
        self._data.write(data)
        self._digest.update(data)

    def close_data(self) -> None:
        if not self._data.closed:
            self._data.flush()
            os.fsync(self._data.fileno())
            self._data.close()

    def close(self) -> None:
        self._data.close()
        self._lengths.close()

    def finish(self, prefix: str, split: str) -> list[TokenShard]:
        self.close_data()
        index = self._base.with_suffix(".idx")
        with open(index, "wb") as file:
            file.write(MAGIC + struct.pack("<QBQQ", VERSION, self._code, self.documents, self.documents + 1))
            for pointers in (False, True):
                self._write_lengths(file, pointers)
            for start in range(0, self.documents + 1, _COPIED):
                stop = min(start + _COPIED, self.documents + 1)
                file.write(np.arange(start, stop, dtype="<i8").tobytes())
            file.flush()
            os.fsync(file.fileno())
        self._lengths.close()
        self._base.with_suffix(".lengths").unlink()
        data = self._base.with_suffix(".bin")
        hashes = (self._digest.hexdigest(), sha256_of(index, lambda _: None))
        counts = ((self.documents, self.tokens), (0, 0))
        return [
            TokenShard(path, f"{prefix}{path.suffix}", split, rows, tokens, path.stat().st_size, sha256)
            for path, (rows, tokens), sha256 in zip((data, index), counts, hashes, strict=True)
        ]

    def _write_lengths(self, file: BinaryIO, pointers: bool) -> None:
        """Write the lengths of sequences, or the bytes at which they start."""
        self._lengths.seek(0)
        position = 0
        while block := self._lengths.read(4 * _COPIED):
            if not pointers:
                file.write(block)
                continue
            ends = position + np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64) * self._item_bytes
            file.write(np.concatenate([[position], ends[:-1]]).astype("<i8").tobytes())
            position = int(ends[-1])
