"""Convert the results of calls, merged over their inputs, to the tables and types that `Dataset.map` writes.

Plain Python and NumPy values are turned into Arrow here. For anything else (images, tensors, values of mixed types)
the code of `datasets` is used, so that the result is the same.
"""

from __future__ import annotations

import datetime
import decimal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from inspect import signature
from typing import Any

import numpy as np
import pyarrow as pa

from brim.compute.rows.schemas import contains_type
from brim.compute.steps.map_inputs import Call, LazyRow
from brim.compute.steps.map_options import NO_COLUMNS, UNCHANGED, MapStepOptions
from brim.compute.steps.row_features import Feature, features_of, import_datasets, inferred, is_plain, metadata
from brim.errors import MissingDependencyError
from brim.records import dataclass

_LEAF_TYPES = {bool, int, float, str, bytes, datetime.datetime, datetime.date, datetime.time, datetime.timedelta}
_LEAF_TYPES |= {decimal.Decimal}
_SMALL_INTS = {
    "attention_mask": pa.int8(),
    "special_tokens_mask": pa.int8(),
    "input_ids": pa.int32(),
    "token_type_ids": pa.int8(),
}
_ERRORS = (TypeError, ValueError, OverflowError, pa.ArrowException)
Array = Any  # pa.Array or pa.ChunkedArray


@dataclass(frozen=True, slots=True)
class TypeRules:
    """How `datasets` infers types: whether a column tries to keep its own, and how values of mixed types are stored."""

    keep_original: bool = True
    on_mixed_types: str | None = "use_json"


USUAL = TypeRules()


@dataclass(frozen=True)
class SchemaFeatures:
    """The features and Arrow types of a schema's columns. The objects of `datasets` are made on demand."""

    features: dict[str, Feature]
    types: dict[str, pa.DataType]
    _objects: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_schema(cls, schema: pa.Schema) -> SchemaFeatures:
        return cls(features_of(schema), {field.name: field.type for field in schema})

    def feature(self, name: str) -> Any:
        """Return the feature of a column as an object of `datasets`."""
        if name not in self._objects:
            datasets = import_datasets(f"the column {name!r}")
            self._objects[name] = datasets.Features.from_dict({name: self.features[name]})[name]
        return self._objects[name]


def to_arrow(
    name: str, values: Any, source: SchemaFeatures, requested: SchemaFeatures | None, rules: TypeRules = USUAL
) -> tuple[Array, Feature | None]:
    """Convert a column's values to Arrow; return its feature too if the Arrow type does not determine it.

    `source`: the input's columns; a column of the same name keeps its type if the values fit. `requested`: the
    types that the user asked for, which the values must fit.
    """
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return (values if requested is None else as_requested(name, values, requested)), None
    if not rules.keep_original:
        source = _NO_FEATURES
    expected = requested if requested is not None else source
    target = expected.types.get(name)
    plain = target is None or is_plain(expected.features[name], labels=False)
    if not plain and not _number_labels(expected.features[name], values):
        return _by_datasets(name, values, source, requested, rules)
    array = _plain_array(values)
    if array is None:
        return _by_datasets(name, values, source, requested, rules)
    if target is None:
        if contains_type(array.type, pa.types.is_struct) and _mixed(values):
            return _by_datasets(name, values, source, requested, rules)
        return _small_ints(name, array), None
    verdict = _may_cast(array.type, target)
    if verdict is None or (verdict is False and requested is not None):
        return _by_datasets(name, values, source, requested, rules)
    if verdict is False:
        return array, None
    try:
        return array.cast(target), None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        if requested is not None:
            raise
        return array, None


_NO_FEATURES = SchemaFeatures({}, {})


def as_requested(name: str, array: Array, requested: SchemaFeatures) -> Array:
    """Cast an unchanged input column to the type that the user requested."""
    if array.type == requested.types[name]:
        return array
    if isinstance(array, pa.ChunkedArray):
        chunks = [as_requested(name, chunk, requested) for chunk in array.chunks]
        return pa.chunked_array(chunks, requested.types[name])
    feature = requested.feature(name)
    from datasets.table import cast_array_to_feature

    return cast_array_to_feature(array, feature)


def _by_datasets(
    name: str, values: Any, source: SchemaFeatures, requested: SchemaFeatures | None, rules: TypeRules
) -> tuple[Array, Feature | None]:
    try:
        datasets = import_datasets(f"what the function gave for {name!r}")
    except MissingDependencyError:
        if isinstance(values, list) and name not in source.types and requested is None:
            pa.array(values)  # raises an error about the values
        raise
    from datasets.arrow_writer import OptimizedTypedSequence

    options: dict[str, Any] = {}
    if requested is not None:
        options["type"] = requested.feature(name)
    elif name in source.types:
        options["try_type"] = source.feature(name)
    if "on_mixed_types" in signature(OptimizedTypedSequence).parameters:  # from datasets 4.7 on
        options["on_mixed_types"] = rules.on_mixed_types
    sequence = OptimizedTypedSequence(values, col=name, **options)
    array = pa.array(sequence)
    feature = datasets.Features({name: sequence.get_inferred_type()}).to_dict()[name]
    return array, None if is_plain(feature) else feature


def _number_labels(feature: Feature, values: Any) -> bool:
    """Return whether values are class numbers in range, which are stored unchanged."""
    if not isinstance(feature, Mapping) or feature.get("_type") != "ClassLabel" or not isinstance(values, list):
        return False
    count = len(feature.get("names") or ())
    return all(value is None or (type(value) is int and -1 <= value < count) for value in values)


def _plain_array(values: Any) -> Array | None:
    """Convert plain Python or NumPy values with Arrow's inference; None if `datasets` should convert them."""
    try:
        if isinstance(values, np.ndarray):
            return _nested(values) if values.ndim else None
        if type(values) is not list:
            return None
        first = next((value for value in values if value is not None and not _is_empty(value)), None)
        if isinstance(first, np.ndarray):
            return _arrays(values)
        return pa.array(values) if _is_leaf(first) else None
    except _ERRORS as error:
        if isinstance(error, MemoryError):
            raise
        return None


def _is_empty(value: Any) -> bool:
    return isinstance(value, list | dict) and not value


def _is_leaf(value: Any) -> bool:
    """Return whether Arrow and `datasets` infer the same type from the first values inside."""
    if value is None or type(value) in _LEAF_TYPES or isinstance(value, np.generic):
        return True
    if type(value) is dict:
        return all(map(_is_leaf, value.values()))
    if type(value) in (list, tuple):
        return _is_leaf(next((item for item in value if item is not None and not _is_empty(item)), None))
    return isinstance(value, np.ndarray) and value.ndim == 1


def _nested(array: np.ndarray[Any, Any]) -> pa.Array:
    """Convert an array of any dimension to nested lists. Always copies: the function may reuse its array."""
    values = pa.array(array.flatten())
    for dimension in range(array.ndim - 1, 0, -1):
        count = int(np.prod(array.shape[:dimension]))
        offsets = np.arange(count + 1, dtype=np.int64) * array.shape[dimension]
        values = pa.ListArray.from_arrays(pa.array(offsets).cast(pa.int32()), values)
    return values


def _arrays(values: list[Any]) -> pa.Array | None:
    """Convert arrays, one per row, to one array of lists."""
    if any(not (value is None or (isinstance(value, np.ndarray) and value.ndim)) for value in values):
        return None
    parts = [_nested(value) for value in values if value is not None]
    if any(part.type != parts[0].type for part in parts):
        tables = [pa.Table.from_arrays([part], ["x"]) for part in parts]
        parts = list(pa.concat_tables(tables, promote_options="permissive").column(0).chunks)
    lengths = [0 if value is None else len(value) for value in values]
    offsets = pa.array(np.cumsum([0, *lengths], dtype=np.int64)).cast(pa.int32())
    missing = pa.array([value is None for value in values]) if len(parts) < len(values) else None
    return pa.ListArray.from_arrays(offsets, pa.concat_arrays(parts), mask=missing)


def _mixed(values: Any) -> bool:
    """Return whether dicts at the same level have different keys: `datasets` stores those as JSON."""
    values = [value for value in values if value is not None]
    if not values:
        return False
    if all(isinstance(value, dict) for value in values):
        keys = values[0].keys()
        if not keys or any(value.keys() != keys for value in values):
            return True
        return any(_mixed([value[key] for value in values]) for key in keys)
    if all(isinstance(value, list) for value in values):
        return _mixed([inner for value in values for inner in value])
    return any(isinstance(value, dict | list) for value in values)


def _small_ints(name: str, array: Array) -> Array:
    small = _SMALL_INTS.get(name)
    if small is None:
        return array
    kind, depth = array.type, 0
    while pa.types.is_list(kind) and depth < 2:
        kind, depth = kind.value_type, depth + 1
    if kind != pa.int64():
        return array
    for _ in range(depth):
        small = pa.list_(small)
    try:
        return array.cast(small)
    except pa.ArrowInvalid:
        return array


def _may_cast(kind: pa.DataType, target: pa.DataType) -> bool | None:
    """Return whether values of an inferred type can be cast to the column's type; None if `datasets` must decide."""
    if kind == target or pa.types.is_null(kind):
        return True
    if pa.types.is_list(kind) and (pa.types.is_list(target) or pa.types.is_large_list(target)):
        return _may_cast(kind.value_type, target.value_type)
    if pa.types.is_struct(kind) and pa.types.is_struct(target):
        if [field.name for field in kind] != [field.name for field in target]:
            return None
        results = [_may_cast(a.type, b.type) for a, b in zip(kind, target, strict=True)]
        return None if None in results else all(results)
    if pa.types.is_nested(kind) or pa.types.is_nested(target):
        return None if pa.types.is_nested(kind) and pa.types.is_nested(target) else False
    if pa.types.is_string(target):
        return not (pa.types.is_primitive(kind) or pa.types.is_decimal(kind))
    return not pa.types.is_null(target)


def reconciled(tables: list[pa.Table], results: Results) -> list[pa.Table]:
    """Concatenate tables with one schema if there is one for all; else return them unchanged."""
    first = tables[0].schema
    if all(table.schema.equals(first, check_metadata=True) for table in tables):
        return [pa.concat_tables(tables)]
    table_features = [features_of(table.schema) for table in tables]
    columns: dict[str, Any] = {}
    features: dict[str, Feature] = {}
    names = list(dict.fromkeys(name for table in tables for name in table.column_names))
    source = [name for name in results.source.types if name in names]
    for name in [*source, *(name for name in names if name not in results.source.types)]:
        try:
            columns[name], feature = _column(name, tables, table_features, results)
        except (pa.ArrowException, TypeError, ValueError) as error:
            if isinstance(error, MemoryError):
                raise
            return tables
        if feature is not None:
            features[name] = feature
    return [results.tag(pa.Table.from_arrays(list(columns.values()), list(columns)), features)]


def _column(
    name: str, tables: list[pa.Table], table_features: list[dict[str, Feature]], results: Results
) -> tuple[Any, Feature | None]:
    parts = [table.column(name) if name in table.column_names else pa.nulls(len(table)) for table in tables]
    kinds = {str(part.type): part.type for part in parts}
    features = {
        repr(features_by_name[name]): features_by_name[name]
        for features_by_name, part in zip(table_features, parts, strict=True)
        if name in features_by_name and not pa.types.is_null(part.type)
    }
    special = [feature for feature in features.values() if not is_plain(feature)]
    if len(kinds) == 1:
        return _concatenate(parts), (special or [None])[0]
    if len(special) == len(features) == 1 and len(kinds) == 2 and "null" in kinds:
        kind = next(kind for kind in kinds.values() if not pa.types.is_null(kind))
        typed = [pa.nulls(len(part), kind) if pa.types.is_null(part.type) else part for part in parts]
        return _concatenate(typed), special[0]
    if not special and _same_fields(list(kinds.values())):
        try:
            single_columns = [pa.Table.from_arrays([part], [name]) for part in parts]
            return pa.concat_tables(single_columns, promote_options="permissive").column(0), None
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            pass
    values = [
        value
        for features_by_name, part in zip(table_features, parts, strict=True)
        for value in _values(name, features_by_name.get(name), part)
    ]
    return results.column(name, values)


def _concatenate(parts: list[Any]) -> pa.ChunkedArray:
    chunks = [chunk for part in parts for chunk in (part.chunks if isinstance(part, pa.ChunkedArray) else [part])]
    return pa.chunked_array(chunks, parts[0].type)


def _same_fields(kinds: list[pa.DataType]) -> bool:
    """Return whether structs at the same level have the same fields: `datasets` stores others as JSON."""
    kinds = [kind for kind in kinds if not pa.types.is_null(kind)]
    if any(isinstance(kind, pa.BaseExtensionType) for kind in kinds):
        return False
    if all(pa.types.is_struct(kind) for kind in kinds):
        names = [sorted(field.name for field in kind) for kind in kinds]
        if any(other_names != names[0] for other_names in names):
            return False
        return not names or all(_same_fields([kind.field(name).type for kind in kinds]) for name in names[0])
    if all(hasattr(kind, "value_type") for kind in kinds):
        return _same_fields([kind.value_type for kind in kinds])
    return not any(pa.types.is_nested(kind) for kind in kinds)


def _values(name: str, feature: Feature | None, part: Any) -> list[Any]:
    """Return the Python values of a column."""
    if feature is None or is_plain(feature):
        return part.to_pylist()  # type: ignore[no-any-return]
    datasets = import_datasets(f"the column {name!r}")
    features = datasets.Features.from_dict({name: feature})
    return features.decode_column(part.to_pylist(), name)  # type: ignore[no-any-return]


_COLUMN_TYPES = (
    ("pandas", "Series"),
    ("polars", "Series"),
    ("polars", "DataFrame"),
    ("torch", "Tensor"),
    ("tensorflow", "Tensor"),
    ("jax", "Array"),
)


class Results:
    """Convert the return values of a function to tables, for one source schema."""

    def __init__(
        self, source: pa.Schema, options: MapStepOptions, requested: pa.Schema | None, settled: pa.Schema | None
    ) -> None:
        self.source = SchemaFeatures.from_schema(source)
        self.requested = None if requested is None else SchemaFeatures.from_schema(requested)
        self._settled = None if settled is None else SchemaFeatures.from_schema(settled)
        self._removed = frozenset(options.remove_columns or ())
        self._rules = TypeRules(options.try_original_type or not options.batched, options.on_mixed_types)
        self._no_nulls = options.disable_nullable
        # Until the function returns something, rows are only marked as unchanged.
        nothing_so_far = self._settled is None or UNCHANGED in self._settled.types
        self._marks = options.side_effects and nothing_so_far
        self._only_marks = self._marks and self._settled is not None
        self._marks_no_columns = options.side_effects and (self._settled is None or NO_COLUMNS in self._settled.types)
        self._has_no_columns = self._marks_no_columns and self._settled is not None
        self._tags: dict[Any, dict[bytes, bytes]] = {}

    def unchanged(self, table: pa.Table) -> pa.Table:
        """Return the rows of a function that returned None."""
        if self._marks:
            return pa.table({UNCHANGED: pa.nulls(table.num_rows)})
        return table.replace_schema_metadata(metadata(self.source.features))

    def of_rows(self, table: pa.Table, calls: Sequence[Call], results: Sequence[Any]) -> pa.Table:
        """Convert the results for the rows of a table."""
        self._refuse_after_nothing()
        results = [as_table(result) for result in results]
        if any(isinstance(result, pa.Table) for result in results):
            return self._of_tables(results)
        if self._marks_no_columns:
            # `datasets` writes the columns of the first row: if that has none left, no row has.
            call = calls[0]
            kept = [name for name in table.column_names if name not in self._removed and not _is_deleted(call, name)]
            if self._has_no_columns or not (self._changed(call, results[0]) or (call.merges and kept)):
                return _without_columns()
        return self._finish(*self._row_columns(table, calls, results))

    def of_batch(self, table: pa.Table, call: Call, result: Any) -> pa.Table | None:
        """Convert the result for a whole table; None if it has no rows."""
        self._refuse_after_nothing()
        result = as_table(result)
        if isinstance(result, pa.Table):
            return self._finish(dict(zip(result.column_names, result.columns, strict=True)), {})
        changed = self._changed(call, result)
        for name, value in result.items() if not isinstance(result, LazyRow) else ():
            _check_column(name, value)
        columns: dict[str, Any] = {}
        for name in table.column_names if call.merges else ():
            if name not in changed and name not in self._removed and not _is_deleted(call, name):
                columns[name] = table.column(name)
        columns |= changed
        lengths = {name: len(value) for name, value in columns.items()}
        if len(set(lengths.values())) > 1:
            first, *other_names = lengths
            differing = next(name for name in other_names if lengths[name] != lengths[first])
            raise pa.ArrowInvalid(  # as the original does
                f"Column lengths mismatch: {first!r} has {lengths[first]} rows, {differing!r} has "
                f"{lengths[differing]}, not the expected length. A batch may become more or fewer rows only if all "
                "columns do: remove the others with remove_columns."
            )
        if not columns and self._marks_no_columns:
            return _without_columns()
        if not any(lengths.values()):
            return None
        return self._finish(*self._convert(self._in_order(columns)))

    def _refuse_after_nothing(self) -> None:
        if self._only_marks:
            raise TypeError("The function returned None for the first rows and not for these. Return a dict for all.")

    def _changed(self, call: Call, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the function set, in place or by returning them."""
        changed: dict[str, Any] = {}
        if call.lazy is not None and call.lazy.touched:
            touched = call.lazy.changes() if call.merges else call.lazy.touched
            changed = {name: value for name, value in touched.items() if name not in self._removed}
        if isinstance(result, LazyRow):
            changed |= {name: value for name, value in result.touched.items() if name not in self._removed}
        else:
            changed.update(result)
        return changed

    def _row_columns(
        self, table: pa.Table, calls: Sequence[Call], results: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, Feature]]:
        changed = [self._changed(call, result) for call, result in zip(calls, results, strict=True)]
        first = changed[0].keys()
        alike = all(row.keys() == first for row in changed) and not any(
            call.lazy and call.lazy.deleted for call in calls
        )
        merges = calls[0].merges
        columns: dict[str, Any] = {}
        names = list(first) if alike else list(dict.fromkeys(name for row in changed for name in row))

        def stored_values(name: str) -> list[Any]:
            pairs = zip(calls, table.column(name).to_pylist(), strict=True)
            return [None if _is_deleted(call, name) else value for call, value in pairs]

        for name in table.column_names if merges else ():
            if name in names or name in self._removed:
                continue
            if alike or not any(_is_deleted(call, name) for call in calls):
                columns[name] = table.column(name)
            elif not all(_is_deleted(call, name) for call in calls):
                columns[name] = stored_values(name)
        for name in names:
            if alike:
                columns[name] = [row[name] for row in changed]
                continue
            defaults: list[Any] = [None] * len(changed)
            if merges and name in table.column_names and name not in self._removed:
                defaults = stored_values(name)
            columns[name] = [row.get(name, default) for row, default in zip(changed, defaults, strict=True)]
        return self._convert(self._in_order(columns))

    def _in_order(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Put the source's columns first, in the source's order, as `datasets` does."""
        order = [*(name for name in self.source.types if name in columns)]
        order += [name for name in columns if name not in self.source.types]
        return {name: columns[name] for name in order}

    def _convert(self, columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Feature]]:
        self._check_requested(columns)
        arrays, special = {}, {}
        for name, values in columns.items():
            try:
                arrays[name], feature = self.column(name, values)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                if isinstance(error, MemoryError):
                    raise
                # A UnicodeError cannot be constructed from a message alone.
                kind = ValueError if isinstance(error, UnicodeError) else type(error)
                raise kind(f"The column {name!r}: {error}") from error
            if feature is not None:
                special[name] = feature
        return arrays, special

    def column(self, name: str, values: Any) -> tuple[Any, Feature | None]:
        """Convert one column to the type of the first batch if the values fit, else to the requested type."""
        settled = self._settled
        if settled is not None and name in settled.types and not pa.types.is_null(settled.types[name]):
            try:
                array, _ = to_arrow(name, values, self.source, settled, self._rules)
                return array, None if is_plain(settled.features[name]) else settled.features[name]
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                if isinstance(error, MemoryError):
                    raise
        return to_arrow(name, values, self.source, self.requested, self._rules)

    def _check_requested(self, columns: Mapping[str, Any]) -> None:
        if self.requested is None or columns.keys() == self.requested.types.keys():
            return
        extra = [name for name in columns if name not in self.requested.types]
        missing = [name for name in self.requested.types if name not in columns]
        problem = f"does not have {extra[0]!r}" if extra else f"has {missing[0]!r}, which the function did not give"
        raise ValueError(f"features= {problem}. The columns are: {', '.join(columns)}.")

    def _of_tables(self, results: Sequence[Any]) -> pa.Table:
        for result in results:
            if not isinstance(result, pa.Table):
                raise TypeError("The function returned a table for one row and a dict for another.")
            if result.num_rows != 1:
                raise ValueError(f"A function of rows must return tables of one row, not of {result.num_rows}.")
        table = pa.concat_tables(results, promote_options="permissive").combine_chunks()
        return self._finish(dict(zip(table.column_names, table.columns, strict=True)), {})

    def _finish(self, columns: dict[str, Any], special: dict[str, Feature]) -> pa.Table:
        """Make the table with its features: those of the source if the type is the same."""
        self._check_requested(columns)
        for name, column in columns.items() if self._no_nulls else ():
            if column.null_count:
                raise ValueError(f"The column {name!r} has nulls, and disable_nullable=True was said.")
        if self.requested is not None:
            columns = {name: as_requested(name, columns[name], self.requested) for name in self.requested.types}
            table = pa.Table.from_arrays(list(columns.values()), list(columns))
            return table.replace_schema_metadata(metadata(self.requested.features))
        return self.tag(pa.Table.from_arrays(list(columns.values()), list(columns)), special)

    def tag(self, table: pa.Table, special: Mapping[str, Feature]) -> pa.Table:
        """Tag a table with features: those in `special`, then the source's, then inferred ones."""
        key = (table.schema.remove_metadata(), repr(special) if special else "")
        if key not in self._tags:
            features = {}
            for field in table.schema:
                if self.source.types.get(field.name) == field.type:
                    features[field.name] = self.source.features[field.name]
                elif field.name in special:
                    features[field.name] = special[field.name]
                else:
                    features[field.name] = inferred(field)
            self._tags[key] = metadata(features)
        return table.replace_schema_metadata(self._tags[key])


def _without_columns() -> pa.Table:
    return pa.table({NO_COLUMNS: pa.nulls(1)})


def keep_result(result: Any) -> Any:
    """Copy a result that waits for other rows, because the function may reuse its dict."""
    if result is None or isinstance(result, LazyRow):
        return result
    return dict(result) if isinstance(result, Mapping) else as_table(result)


def as_table(result: Any) -> Any:
    """Convert a data frame to a table; return a mapping or a table unchanged; raise TypeError for anything else."""
    if isinstance(result, Mapping | pa.Table):
        return result
    if (pandas := sys.modules.get("pandas")) is not None and isinstance(result, pandas.DataFrame):
        return pa.Table.from_pandas(result)
    if (polars := sys.modules.get("polars")) is not None and isinstance(result, polars.DataFrame):
        return result.to_arrow()
    raise TypeError(
        f"The function returned a {type(result).__name__}. It should return a dict, a pyarrow Table or a data "
        "frame, or None if only its side effects matter."
    )


def _check_column(name: str, value: Any) -> None:
    if isinstance(value, list | np.ndarray | pa.Array | pa.ChunkedArray):
        return
    for module, kind in _COLUMN_TYPES:
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], kind, ())):
            return
    raise TypeError(
        f"The function returned a {type(value).__name__} for the column {name!r}. With batched=True each column "
        "must be a list or an array, with one value for each row."
    )


def _is_deleted(call: Call, name: str) -> bool:
    return call.lazy is not None and call.lazy.deleted is not None and name in call.lazy.deleted
