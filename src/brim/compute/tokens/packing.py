"""Fixed-length blocks of tokens across documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from brim.compute.tokens.documents import tokens_of
from brim.compute.tokens.step import IDS


class Packer:
    """Rows of exactly `length` tokens out of the documents of one split, one after the other."""

    def __init__(self, length: int, kind: pa.DataType) -> None:
        self._length, self._kind = length, kind
        self._held: list[np.ndarray[Any, Any]] = []  # copies: what they came from may be unmapped
        self._count = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        tokens = tokens_of(batch)
        if self._count + len(tokens) < self._length:
            self._keep(tokens)
            return
        use = len(tokens) - (self._count + len(tokens)) % self._length
        values = np.concatenate([*self._held, tokens[:use]])
        self._held, self._count = [], 0
        self._keep(tokens[use:])
        yield self._rows(values)

    def tail(self) -> pa.RecordBatch | None:
        """The tokens that did not fill a block, as a row of their own."""
        if not self._count:
            return None
        values = np.concatenate(self._held)
        return self._batch(values, np.array([0, len(values)], np.int32))

    @property
    def tail_tokens(self) -> int:
        return self._count

    def _keep(self, tokens: np.ndarray[Any, Any]) -> None:
        if len(tokens):
            self._held.append(tokens.copy())
            self._count += len(tokens)

    def _rows(self, values: np.ndarray[Any, Any]) -> pa.RecordBatch:
        return self._batch(values, np.arange(0, len(values) + 1, self._length, dtype=np.int32))

    def _batch(self, values: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> pa.RecordBatch:
        rows = pa.ListArray.from_arrays(pa.array(ends), pa.array(values, self._kind))
        return pa.RecordBatch.from_arrays([rows], names=[IDS])
