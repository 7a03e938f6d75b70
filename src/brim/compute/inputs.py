"""Rows as a function wants to see them: Python, NumPy, Arrow, or the format that a dataset has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from brim.compute.features import features_of, import_datasets, is_plain
from brim.compute.lazy import Decode, LazyBatch, LazyRow, Rows
from brim.compute.options import MapOptions


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, and which columns of the input it starts from."""

    args: tuple[Any, ...]
    lazy: LazyRow | None  # the mapping the function may have changed
    merges: bool  # whether a dict that comes back is laid over the input's columns


class Inputs:
    """Makes the arguments of calls from tables."""

    def __init__(self, schema: pa.Schema, options: MapOptions, format_kwargs: Mapping[str, Any]) -> None:
        self._options = options
        features = features_of(schema)
        exotic = [name for name, feature in features.items() if not is_plain(feature)]
        self._schema: pa.Schema | None = None
        self._formatter: Any = None
        self._decoders: dict[str, Decode] = {}
        own_format = options.format_type is not None
        if any(pa.types.is_dictionary(field.type) for field in schema):  # `datasets` has no feature for them
            self._schema = pa.schema([_without_dictionary(field) for field in schema], schema.metadata)
        if exotic or own_format:
            datasets = import_datasets(f"the column {exotic[0]!r}" if exotic else "a dataset with a format")
            known = datasets.Features.from_dict(features)
            self._schema = known.arrow_schema
            self._formatter = datasets.formatting.get_formatter(options.format_type, features=known, **format_kwargs)
            if not own_format:
                self._decoders = dict.fromkeys(exotic, self._formatter.format_column)

    @property
    def schema(self) -> pa.Schema | None:
        """The schema of what `arrange` gives, where that is not the source's."""
        return self._schema

    @property
    def decodes(self) -> bool:
        """Whether values are decoded for the function: they may be large."""
        return bool(self._decoders)

    def arrange(self, table: pa.Table) -> pa.Table:
        """A table with the types that its features have; files are read without those of `datasets`."""
        if self._schema is None or table.schema.types == self._schema.types:
            return table
        if self._formatter is None:
            return table.cast(self._schema)
        from datasets.table import table_cast

        return table_cast(table, self._schema)

    def batch(self, table: pa.Table, first_row: int | None) -> Call:
        """The call for a whole table."""
        index: tuple[Any, ...] = ()
        if self._options.with_indices:
            start = first_row or 0
            index = (list(range(start, start + table.num_rows)),)
        return self._call(table, None, index)

    def rows(self, table: pa.Table, first_row: int | None) -> Iterator[Call]:
        """The calls for each row of a table."""
        shared = Rows(table, self._decoders)
        start, indices = first_row or 0, self._options.with_indices
        plain = self._options.format_type is None and self._options.input == "python"
        columns = self._options.input_columns
        for row in range(table.num_rows):
            index = (start + row,) if indices else ()
            if not plain:
                yield self._call(table.slice(row, 1), 0, index)
            elif columns is not None:
                yield Call((*(shared.value(name, row) for name in columns), *index), None, True)
            else:
                lazy = LazyRow(shared, row)
                yield Call((lazy, *index), lazy, True)

    def _call(self, table: pa.Table, row: int | None, index: tuple[Any, ...]) -> Call:
        """The call for a table, or for the one row of it."""
        options = self._options
        if options.input == "python" and options.format_type is None:
            rows = Rows(table, self._decoders)
            if options.input_columns is not None:
                return Call((*map(rows.column, options.input_columns), *index), None, True)
            lazy = LazyBatch(rows)
            return Call((lazy, *index), lazy, True)
        seen: Any = table if options.input_columns is None else table.select(options.input_columns)
        if options.input == "numpy":
            seen = {name: to_numpy(seen.column(name)) for name in seen.column_names}
            if row is not None:
                seen = {name: column[row] for name, column in seen.items()}
        elif options.format_type is not None:
            seen = self._formatter(seen, "batch" if row is None else "row")
        merges = isinstance(seen, Mapping)
        if options.input_columns is not None:
            return Call((*(seen[name] for name in options.input_columns), *index), None, merges)
        return Call((seen, *index), None, merges)


def _without_dictionary(field: pa.Field) -> pa.Field:
    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field


def to_numpy(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """A column as an array of its own type. Lists of one length become a matrix, others an array of arrays."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        return _lists(array)
    if column.num_chunks == 1 and column.null_count == 0:
        return column.chunk(0).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    return column.to_numpy()  # type: ignore[no-any-return]


def _lists(array: Any) -> np.ndarray[Any, Any]:
    count = len(array)
    offsets = array.offsets.to_numpy()
    lengths = np.diff(offsets)
    inner = array.flatten()
    values = _lists(inner) if hasattr(inner, "offsets") and hasattr(inner, "values") else inner.to_numpy(False)
    if count and array.null_count == 0 and (lengths == lengths[0]).all():
        return values.reshape(count, int(lengths[0]), *values.shape[1:])
    made = np.empty(count, dtype=object)
    valid = array.is_valid().to_numpy(False)
    start = 0
    for row in range(count):
        if valid[row]:
            made[row] = values[start : start + lengths[row]]
            start += lengths[row]
    return made
