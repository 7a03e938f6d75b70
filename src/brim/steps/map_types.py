"""What a function returned, as Arrow arrays of the types that `datasets.map` would give them.

Plain Python and NumPy values are turned into Arrow here. For anything else (images, tensors, values of mixed
types) `datasets`' own code is asked, so that the result is the same.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping
from dataclasses import field
from inspect import signature
from typing import Any

import numpy as np
import pyarrow as pa

from brim.errors import MissingExtra
from brim.records import dataclass
from brim.steps.row_features import Feature, features_of, import_datasets, is_plain

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
    """How `datasets` finds types: whether a column tries to keep its own, and what values of several types become."""

    keep_original: bool = True
    on_mixed_types: str | None = "use_json"


USUAL = TypeRules()


@dataclass(frozen=True)
class Known:
    """The columns of a schema: their features and Arrow types. The objects of `datasets` are made when needed."""

    features: dict[str, Feature]
    types: dict[str, pa.DataType]
    _made: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, schema: pa.Schema) -> Known:
        return cls(features_of(schema), {field.name: field.type for field in schema})

    def feature(self, name: str) -> Any:
        """The feature of a column as an object of `datasets`."""
        if name not in self._made:
            datasets = import_datasets(f"the column {name!r}")
            self._made[name] = datasets.Features.from_dict({name: self.features[name]})[name]
        return self._made[name]


def to_arrow(
    name: str, values: Any, source: Known, wanted: Known | None, rules: TypeRules = USUAL
) -> tuple[Array, Feature | None]:
    """A column's values as an array, and its feature if the Arrow type does not tell.

    `source`: the input's columns; a column of the same name keeps its type if the values fit. `wanted`: the
    types that the user asked for, which the values must fit.
    """
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return (values if wanted is None else as_wanted(name, values, wanted)), None
    if not rules.keep_original:
        source = _NOTHING
    known = wanted if wanted is not None else source
    target = known.types.get(name)
    plain = target is None or is_plain(known.features[name], labels=False)
    if not plain and not _number_labels(known.features[name], values):
        return _by_datasets(name, values, source, wanted, rules)
    array = _plain_array(values)
    if array is None:
        return _by_datasets(name, values, source, wanted, rules)
    if target is None:
        if _holds_struct(array.type) and _mixed(values):
            return _by_datasets(name, values, source, wanted, rules)
        return _small_ints(name, array), None
    verdict = _may_cast(array.type, target)
    if verdict is None or (verdict is False and wanted is not None):
        return _by_datasets(name, values, source, wanted, rules)
    if verdict is False:
        return array, None
    try:
        return array.cast(target), None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        if wanted is not None:
            raise
        return array, None


_NOTHING = Known({}, {})


def as_wanted(name: str, array: Array, wanted: Known) -> Array:
    """An input column that is passed on, as the type that the user asked for."""
    if array.type == wanted.types[name]:
        return array
    if isinstance(array, pa.ChunkedArray):
        chunks = [as_wanted(name, chunk, wanted) for chunk in array.chunks]
        return pa.chunked_array(chunks, wanted.types[name])
    feature = wanted.feature(name)
    from datasets.table import cast_array_to_feature

    return cast_array_to_feature(array, feature)


def _by_datasets(
    name: str, values: Any, source: Known, wanted: Known | None, rules: TypeRules
) -> tuple[Array, Feature | None]:
    try:
        datasets = import_datasets(f"what the function gave for {name!r}")
    except MissingExtra:
        if isinstance(values, list) and name not in source.types and wanted is None:
            pa.array(values)  # says what it is about the values
        raise
    from datasets.arrow_writer import OptimizedTypedSequence

    options: dict[str, Any] = {}
    if wanted is not None:
        options["type"] = wanted.feature(name)
    elif name in source.types:
        options["try_type"] = source.feature(name)
    if "on_mixed_types" in signature(OptimizedTypedSequence).parameters:  # from datasets 4.7 on
        options["on_mixed_types"] = rules.on_mixed_types
    sequence = OptimizedTypedSequence(values, col=name, **options)
    array = pa.array(sequence)
    feature = datasets.Features({name: sequence.get_inferred_type()}).to_dict()[name]
    return array, None if is_plain(feature) else feature


def _number_labels(feature: Feature, values: Any) -> bool:
    """Whether values are class numbers in range, which are stored as they are."""
    if not isinstance(feature, Mapping) or feature.get("_type") != "ClassLabel" or not isinstance(values, list):
        return False
    count = len(feature.get("names") or ())
    return all(value is None or (type(value) is int and -1 <= value < count) for value in values)


def _plain_array(values: Any) -> Array | None:
    """Plain Python or NumPy values as Arrow infers them, None if `datasets` should look at them."""
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
    """Whether the first values inside are such that Arrow and `datasets` see the same in them."""
    if value is None or type(value) in _LEAF_TYPES or isinstance(value, np.generic):
        return True
    if type(value) is dict:
        return all(map(_is_leaf, value.values()))
    if type(value) in (list, tuple):
        return _is_leaf(next((item for item in value if item is not None and not _is_empty(item)), None))
    return isinstance(value, np.ndarray) and value.ndim == 1


def _nested(array: np.ndarray[Any, Any]) -> pa.Array:
    """An array of any number of dimensions as lists of lists. Always a copy: the function may use its own again."""
    values = pa.array(array.flatten())
    for dimension in range(array.ndim - 1, 0, -1):
        count = int(np.prod(array.shape[:dimension]))
        offsets = np.arange(count + 1, dtype=np.int64) * array.shape[dimension]
        values = pa.ListArray.from_arrays(pa.array(offsets).cast(pa.int32()), values)
    return values


def _arrays(values: list[Any]) -> pa.Array | None:
    """Arrays, one for a row, as one array of lists."""
    if any(not (value is None or (isinstance(value, np.ndarray) and value.ndim)) for value in values):
        return None
    parts = [_nested(value) for value in values if value is not None]
    if any(part.type != parts[0].type for part in parts):
        parts = _promoted(parts)
    lengths = [0 if value is None else len(value) for value in values]
    offsets = pa.array(np.cumsum([0, *lengths], dtype=np.int64)).cast(pa.int32())
    missing = pa.array([value is None for value in values]) if len(parts) < len(values) else None
    return pa.ListArray.from_arrays(offsets, pa.concat_arrays(parts), mask=missing)


def _promoted(parts: list[pa.Array]) -> list[pa.Array]:
    tables = [pa.Table.from_arrays([part], ["x"]) for part in parts]
    column = pa.concat_tables(tables, promote_options="permissive").column(0)
    return list(column.chunks)


def _holds_struct(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) or any(_holds_struct(kind.field(i).type) for i in range(kind.num_fields))


def _mixed(values: Any) -> bool:
    """Whether dicts at the same place have different keys: `datasets` stores those as JSON."""
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
    """Whether values of an inferred type may take the column's type; None where `datasets` has more to say."""
    if kind == target or pa.types.is_null(kind):
        return True
    if pa.types.is_list(kind) and (pa.types.is_list(target) or pa.types.is_large_list(target)):
        return _may_cast(kind.value_type, target.value_type)
    if pa.types.is_struct(kind) and pa.types.is_struct(target):
        if [field.name for field in kind] != [field.name for field in target]:
            return None
        verdicts = [_may_cast(a.type, b.type) for a, b in zip(kind, target, strict=True)]
        return None if None in verdicts else all(verdicts)
    if pa.types.is_nested(kind) or pa.types.is_nested(target):
        return None if pa.types.is_nested(kind) and pa.types.is_nested(target) else False
    if pa.types.is_string(target):
        return not (pa.types.is_primitive(kind) or pa.types.is_decimal(kind))
    return not pa.types.is_null(target)
