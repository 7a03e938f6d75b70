"""A flat token file, an index of its documents, and a small header, for `np.memmap`. See docs/tokenize.md."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from brim.compute.tokens.documents import ends_of, tokens_of
from brim.compute.tokens.writing import Made

FORMAT, VERSION = "brim-tokens", 1


class BinWriter:
    """The documents of one split. `block`: the tokens are cut to a multiple of it, unless the tail is kept."""

    def __init__(self, folder: Path, split: str, dtype: str, header: dict[str, Any], block: int | None) -> None:
        self._folder, self._split, self._dtype, self._block = folder, split, np.dtype(dtype).newbyteorder("<"), block
        self._header = header
        self._tokens_file = open(folder / f"{split}.bin", "w+b")  # noqa: SIM115  closed in finish
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
        np.ascontiguousarray(tokens, self._dtype).tofile(self._tokens_file)
        self._tokens, self._documents = int(ends[-1]), self._documents + batch.num_rows

    def finish(self) -> tuple[list[Made], int]:
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
        made = [
            Made(path, path.name, self._split, row, count) for path, row, count in zip(paths, rows, tokens, strict=True)
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
