"""Convert rows to the arguments of a function: Python, NumPy, Arrow, or the format of a dataset."""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import pyarrow as pa

from brim.compute.steps.map_options import MapStepOptions
from brim.compute.steps.row_features import features_of, import_datasets, is_plain
from brim.records import dataclass

_FIXED = (type(None), bool, int, float, str, bytes, datetime.datetime, datetime.date)
_FIXED_KINDS = (
    pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary,
    pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating,
)  # fmt: skip
Decode = Callable[[pa.Table], list[Any]]  # a table of one column, as Python values


class LazyRows:
    """The columns of consecutive rows as Python lists, made on demand."""

    __slots__ = ("_decoders", "_lists", "names", "table")

    def __init__(self, table: pa.Table, decoders: Mapping[str, Decode]) -> None:
        self.table = table
        self.names = dict.fromkeys(table.column_names)
        self._decoders = decoders
        self._lists: dict[str, list[Any]] = {}

    def stored(self, name: str) -> list[Any]:
        """Return a column without decoding it."""
        values = self._lists.get(name)
        if values is None:
            values = self._lists[name] = self.table.column(name).to_pylist()
        return values

    def value(self, name: str, row: int) -> Any:
        """Return one value. Images and the like are decoded individually, because they are large."""
        decode = self._decoders.get(name)
        if decode is None:
            return self.stored(name)[row]
        return decode(self.table.select([name]).slice(row, 1))[0]

    def is_fixed(self, name: str) -> bool:
        """Return whether the values of a column are immutable."""
        kind = self.table.schema.field(name).type
        return name not in self._decoders and any(test(kind) for test in _FIXED_KINDS)

    def column(self, name: str) -> list[Any]:
        """Return a new list of a column's values, which the function may change."""
        decode = self._decoders.get(name)
        return self.table.column(name).to_pylist() if decode is None else decode(self.table.select([name]))


class LazyRow(MutableMapping[str, Any]):
    """A row as a mapping. `touched` has the values that were set, and those read that are mutable."""

    __slots__ = ("_row", "_rows", "deleted", "touched")

    def __init__(self, rows: LazyRows, row: int) -> None:
        self._rows, self._row = rows, row
        self.touched: dict[str, Any] = {}
        self.deleted: set[str] | None = None

    def _read(self, key: str) -> Any:
        value = self._rows.value(key, self._row)
        if type(value) not in _FIXED:
            self.touched[key] = value
        return value

    def __getitem__(self, key: str) -> Any:
        if key in self.touched:
            return self.touched[key]
        if key not in self._rows.names or (self.deleted is not None and key in self.deleted):
            raise KeyError(key)
        return self._read(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.touched[key] = value

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self.touched.pop(key, None)
        if key in self._rows.names:
            self.deleted = (self.deleted or set()) | {key}

    def __contains__(self, key: object) -> bool:
        return key in self.touched or (key in self._rows.names and (self.deleted is None or key not in self.deleted))

    def __iter__(self) -> Iterator[str]:
        for name in self._rows.names:
            if self.deleted is None or name not in self.deleted or name in self.touched:
                yield name
        yield from [name for name in self.touched if name not in self._rows.names]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def changes(self) -> dict[str, Any]:
        """Return the values of `touched` that may differ from the input."""
        return self.touched

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> LazyRow:
        """Return another mapping over the same row."""
        row = type(self)(self._rows, self._row)
        row.touched = dict(self.touched)
        row.deleted = None if self.deleted is None else set(self.deleted)
        return row

    __copy__ = copy

    def __or__(self, other: Mapping[str, Any]) -> LazyRow:
        if not isinstance(other, Mapping):
            return NotImplemented
        row = self.copy()
        row.touched.update(other)
        return row

    def __ror__(self, other: Mapping[str, Any]) -> LazyRow:
        if not isinstance(other, Mapping):
            return NotImplemented
        row = self.copy()
        row.touched.update({key: value for key, value in other.items() if key not in self})
        return row

    def __ior__(self, other: Mapping[str, Any]) -> LazyRow:
        self.touched.update(other)
        return self


class LazyBatch(LazyRow):
    """A batch as a mapping: each value is the list of a column's values."""

    __slots__ = ("_copies",)

    def __init__(self, rows: LazyRows, row: int = 0) -> None:
        super().__init__(rows, row)
        self._copies: dict[str, tuple[list[Any], list[Any]]] = {}  # lists of immutable values, and copies of them

    def _read(self, key: str) -> Any:
        value = self.touched[key] = self._rows.column(key)
        if self._rows.is_fixed(key):
            self._copies[key] = (value, value.copy())
        return value

    def changes(self) -> dict[str, Any]:
        return {name: value for name, value in self.touched.items() if not self._is_unchanged(name, value)}

    def _is_unchanged(self, name: str, value: Any) -> bool:
        column, before = self._copies.get(name, (None, list[Any]()))
        if column is None or value is not column or (self.deleted is not None and name in self.deleted):
            return False
        return len(column) == len(before) and all(map(operator.is_, column, before))


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, and how its result is merged with the input."""

    args: tuple[Any, ...]
    lazy: LazyRow | None  # the mapping the function may have changed
    merges: bool  # whether a returned dict is merged over the input's columns


class Inputs:
    """Makes the arguments of calls from tables of one schema."""

    def __init__(
        self, schema: pa.Schema, options: MapStepOptions, format_kwargs: Mapping[str, Any], rank: Callable[[], int]
    ) -> None:
        self._options, self._rank = options, rank
        features = features_of(schema)
        exotic = [name for name, feature in features.items() if not is_plain(feature)]
        self._schema: pa.Schema | None = None
        self._formatter: Any = None
        self._decoders: dict[str, Decode] = {}
        own_format = options.format_type is not None
        if any(pa.types.is_dictionary(field.type) for field in schema):  # `datasets` has no feature for them
            kinds = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in schema.types]
            fields = [field.with_type(kind) for field, kind in zip(schema, kinds, strict=True)]
            self._schema = pa.schema(fields, schema.metadata)
        if exotic or own_format:
            datasets = import_datasets(f"the column {exotic[0]!r}" if exotic else "a dataset with a format")
            objects = datasets.Features.from_dict(features)
            self._schema = objects.arrow_schema
            self._formatter = datasets.formatting.get_formatter(options.format_type, features=objects, **format_kwargs)
            if not own_format:
                self._decoders = dict.fromkeys(exotic, self._formatter.format_column)

    @property
    def schema(self) -> pa.Schema | None:
        """The schema of tables from `arrange`; None if it is the source's."""
        return self._schema

    @property
    def decodes(self) -> bool:
        """Whether values are decoded for the function, and so may be large."""
        return bool(self._decoders)

    def arrange(self, table: pa.Table) -> pa.Table:
        """Cast a table to the types of its features; files are read without the extension types of `datasets`."""
        if self._schema is None or table.schema.types == self._schema.types:
            return table
        if self._formatter is None:
            return table.cast(self._schema)
        from datasets.table import table_cast

        return table_cast(table, self._schema)

    def batch(self, table: pa.Table, first_row: int | None) -> Call:
        """Return the call for a whole table."""
        index: tuple[Any, ...] = ()
        if self._options.with_indices:
            start = first_row or 0
            index = (list(range(start, start + table.num_rows)),)
        return self._call(table, None, (*index, *self._ranks()))

    def _ranks(self) -> tuple[int, ...]:
        return (self._rank(),) if self._options.with_rank else ()

    def rows(self, table: pa.Table, first_row: int | None) -> Iterator[Call]:
        """Yield the call for each row of a table."""
        shared = LazyRows(table, self._decoders)
        start, indices = first_row or 0, self._options.with_indices
        plain = self._options.format_type is None and self._options.input == "python"
        columns, ranks = self._options.input_columns, self._ranks()
        for row in range(table.num_rows):
            index = (start + row, *ranks) if indices else ranks
            if not plain:
                yield self._call(table.slice(row, 1), 0, index)
            elif columns is not None:
                yield Call((*(shared.value(name, row) for name in columns), *index), None, True)
            else:
                lazy = LazyRow(shared, row)
                yield Call((lazy, *index), lazy, True)

    def _call(self, table: pa.Table, row: int | None, index: tuple[Any, ...]) -> Call:
        """Return the call for a table, or for its only row."""
        options = self._options
        if options.input == "python" and options.format_type is None:
            rows = LazyRows(table, self._decoders)
            if options.input_columns is not None:
                return Call((*map(rows.column, options.input_columns), *index), None, True)
            lazy = LazyBatch(rows)
            return Call((lazy, *index), lazy, True)
        data: Any = table if options.input_columns is None else table.select(options.input_columns)
        if options.input == "numpy":
            data = {name: to_numpy(data.column(name)) for name in data.column_names}
            if row is not None:
                data = {name: column[row] for name, column in data.items()}
        elif options.format_type is not None:
            data = self._formatter(data, "batch" if row is None else "row")
        merges = isinstance(data, Mapping)
        if options.input_columns is not None:
            return Call((*(data[name] for name in options.input_columns), *index), None, merges)
        return Call((data, *index), None, merges)


def to_numpy(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Convert a column to an array. Lists of one length become a matrix, others an array of arrays."""
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
    arrays = np.empty(count, dtype=object)
    valid = array.is_valid().to_numpy(False)
    start = 0
    for row in range(count):
        if valid[row]:
            arrays[row] = values[start : start + lengths[row]]
            start += lengths[row]
    return arrays
