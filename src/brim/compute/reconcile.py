"""Tables of one batch that were made apart, given the types that they would have had together.

`datasets` infers types from all the rows that it writes at once. The rows of a batch that became Arrow a few at a
time may have come out as null here and string there, or int and float.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from brim.compute.features import Feature, features_of, import_datasets, is_plain
from brim.compute.results import Results


def reconciled(tables: list[pa.Table], results: Results) -> list[pa.Table]:
    """The tables with one schema, where there is one that holds them all; else as they are."""
    first = tables[0].schema
    if all(table.schema.equals(first, check_metadata=True) for table in tables):
        return [pa.concat_tables(tables)]
    known = [features_of(table.schema) for table in tables]
    columns: dict[str, Any] = {}
    found: dict[str, Feature] = {}
    names = list(dict.fromkeys(name for table in tables for name in table.column_names))
    source = [name for name in results.source.types if name in names]
    for name in [*source, *(name for name in names if name not in results.source.types)]:
        try:
            columns[name], feature = _column(name, tables, known, results)
        except (pa.ArrowException, TypeError, ValueError) as error:
            if isinstance(error, MemoryError):
                raise
            return tables
        if feature is not None:
            found[name] = feature
    return [results.tag(pa.Table.from_arrays(list(columns.values()), list(columns)), found)]


def _column(
    name: str, tables: list[pa.Table], known: list[dict[str, Feature]], results: Results
) -> tuple[Any, Feature | None]:
    parts = [table.column(name) if name in table.column_names else pa.nulls(len(table)) for table in tables]
    kinds = {str(part.type): part.type for part in parts}
    features = {
        repr(one[name]): one[name]
        for one, part in zip(known, parts, strict=True)
        if name in one and not pa.types.is_null(part.type)
    }
    special = [feature for feature in features.values() if not is_plain(feature)]
    if len(kinds) == 1:
        return _joined(parts), (special or [None])[0]
    if len(special) == len(features) == 1 and len(kinds) == 2 and "null" in kinds:
        kind = next(kind for kind in kinds.values() if not pa.types.is_null(kind))
        return _joined([_nulls_as(part, kind) for part in parts]), special[0]
    if not special and _same_fields(list(kinds.values())):
        try:
            alone = [pa.Table.from_arrays([part], [name]) for part in parts]
            return pa.concat_tables(alone, promote_options="permissive").column(0), None
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            pass
    values = [value for one, part in zip(known, parts, strict=True) for value in _values(name, one.get(name), part)]
    return results.column(name, values)


def _joined(parts: list[Any]) -> pa.ChunkedArray:
    chunks = [chunk for part in parts for chunk in (part.chunks if isinstance(part, pa.ChunkedArray) else [part])]
    return pa.chunked_array(chunks, parts[0].type)


def _nulls_as(part: Any, kind: pa.DataType) -> Any:
    return pa.nulls(len(part), kind) if pa.types.is_null(part.type) else part


def _same_fields(kinds: list[pa.DataType]) -> bool:
    """Whether structs at the same place have the same fields: others are JSON for `datasets`."""
    kinds = [kind for kind in kinds if not pa.types.is_null(kind)]
    if any(isinstance(kind, pa.BaseExtensionType) for kind in kinds):
        return False
    if all(pa.types.is_struct(kind) for kind in kinds):
        names = [sorted(field.name for field in kind) for kind in kinds]
        if any(one != names[0] for one in names):
            return False
        return not names or all(_same_fields([kind.field(name).type for kind in kinds]) for name in names[0])
    if all(hasattr(kind, "value_type") for kind in kinds):
        return _same_fields([kind.value_type for kind in kinds])
    return not any(pa.types.is_nested(kind) for kind in kinds)


def _values(name: str, feature: Feature | None, part: Any) -> list[Any]:
    """A column as the values that it was made of."""
    if feature is None or is_plain(feature):
        return part.to_pylist()  # type: ignore[no-any-return]
    datasets = import_datasets(f"the column {name!r}")
    features = datasets.Features.from_dict({name: feature})
    return features.decode_column(part.to_pylist(), name)  # type: ignore[no-any-return]
