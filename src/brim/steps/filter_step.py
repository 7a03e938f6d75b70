"""Filter: the rows for which a user's function is true, with the results of `Dataset.filter`.

Rows pass as they are stored. Where whoever asked has them, as a Dataset, only their numbers are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from brim.steps.map_options import MapOptions
from brim.steps.map_step import MapStep
from brim.steps.row_features import features_of, metadata
from brim.steps.step import Batch

INDICES = "indices"
_NUMBERS = pa.schema([(INDICES, pa.uint64())])
_NUMBERS = _NUMBERS.with_metadata(metadata(features_of(_NUMBERS)))


def always(*_: Any, **__: Any) -> bool:
    """What `filter` does without a function."""
    return True


class FilterStep(MapStep):
    """The step of a filter. `numbers`: those of rows that stay, not the rows."""

    settle = None  # type: ignore[assignment]  # its types are known before the first batch

    def __init__(self, function: Callable[..., Any] | None, options: MapOptions, *, numbers: bool) -> None:
        super().__init__(function or always, options)
        self.numbers = numbers
        self.indices = numbers or options.with_indices

    @property
    def facts(self) -> dict[str, Any]:
        return super().facts | {"step": "filter", "numbers": self.numbers}

    def empty_schema(self, schema: pa.Schema, had_rows: bool) -> pa.Schema:
        return _NUMBERS if self.numbers else super().empty_schema(schema, had_rows)

    def open(self, schema: pa.Schema) -> None:
        super().open(schema)
        assert self._open is not None
        self._open.keep = bool

    def apply(self, batch: Batch, small: bool = False) -> Iterator[pa.Table]:
        if self._open is None:
            raise RuntimeError("open() comes before apply()")
        if batch.table.num_rows == 0:
            return
        if self.options.batched:
            table, said = self._open.mask(batch)
            yield from self._staying(table, batch.first_row, said)
            return
        for table, start, said in self._open.masks(batch, small):
            yield from self._staying(table, None if batch.first_row is None else batch.first_row + start, said)

    def _staying(self, table: pa.Table, first_row: int | None, said: list[Any]) -> Iterator[pa.Table]:
        stays = [row for row, true in zip(range(table.num_rows), said, strict=False) if true]
        if not stays:
            return
        if self.numbers:
            assert first_row is not None
            yield pa.table([pa.array(np.array(stays, np.uint64) + np.uint64(first_row))], _NUMBERS)
        else:
            assert self._open is not None
            yield self._open.unchanged(table.take(pa.array(stays)))
