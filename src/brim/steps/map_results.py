"""The results of calls, merged over their inputs, as tables: what `Dataset.map` writes for them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from brim.steps.map_inputs import Call, LazyRow
from brim.steps.map_options import NO_COLUMNS, UNCHANGED, MapOptions
from brim.steps.map_types import Known, TypeRules, as_wanted, to_arrow
from brim.steps.row_features import Feature, features_of, import_datasets, inferred, is_plain, metadata


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


_COLUMN_TYPES = (
    ("pandas", "Series"),
    ("polars", "Series"),
    ("polars", "DataFrame"),
    ("torch", "Tensor"),
    ("tensorflow", "Tensor"),
    ("jax", "Array"),
)


class Results:
    """Turns what a function returned into tables, for one source schema."""

    def __init__(
        self,
        source: pa.Schema,
        options: MapOptions,
        wanted: pa.Schema | None,
        settled: pa.Schema | None,
    ) -> None:
        self.source = Known.of(source)
        self.wanted = None if wanted is None else Known.of(wanted)
        self._settled = None if settled is None else Known.of(settled)
        self._removed = frozenset(options.remove_columns or ())
        self._rules = TypeRules(options.try_original_type or not options.batched, options.on_mixed_types)
        self._no_nulls = options.disable_nullable
        # As long as nothing else was seen, a function that returns nothing has nothing written.
        nothing_so_far = self._settled is None or UNCHANGED in self._settled.types
        self._marks = options.side_effects and nothing_so_far
        self._only_marks = self._marks and self._settled is not None
        self._tells_of_none = options.side_effects and (self._settled is None or NO_COLUMNS in self._settled.types)
        self._has_none = self._tells_of_none and self._settled is not None
        self._tags: dict[Any, dict[bytes, bytes]] = {}

    def unchanged(self, table: pa.Table) -> pa.Table:
        """The rows of a function that returned nothing."""
        if self._marks:
            return pa.table({UNCHANGED: pa.nulls(table.num_rows)})
        return table.replace_schema_metadata(metadata(self.source.features))

    def of_rows(self, table: pa.Table, calls: Sequence[Call], results: Sequence[Any]) -> pa.Table:
        """One result for each row of a table."""
        self._refuse_after_nothing()
        results = [as_table(result) for result in results]
        if any(isinstance(result, pa.Table) for result in results):
            return self._of_tables(results)
        if self._tells_of_none and (self._has_none or self._first_is_bare(table, calls[0], results[0])):
            return _without_columns()
        return self._finish(*self._row_columns(table, calls, results))

    def _first_is_bare(self, table: pa.Table, call: Call, result: Mapping[str, Any]) -> bool:
        """Whether the first row has no column left: then no row has, as the original writes those of the first."""
        if self._changed(call, result):
            return False
        return not call.merges or all(name in self._removed or _is_gone(call, name) for name in table.column_names)

    def of_batch(self, table: pa.Table, call: Call, result: Any) -> pa.Table | None:
        """The result for a table as a whole; None if it has no rows."""
        self._refuse_after_nothing()
        result = as_table(result)
        if isinstance(result, pa.Table):
            return self._finish(dict(zip(result.column_names, result.columns, strict=True)), {})
        changed = self._changed(call, result)
        for name, value in result.items() if not isinstance(result, LazyRow) else ():
            _check_column(name, value)
        columns: dict[str, Any] = {}
        for name in table.column_names if call.merges else ():
            if name not in changed and name not in self._removed and not _is_gone(call, name):
                columns[name] = table.column(name)
        columns |= changed
        lengths = {name: len(value) for name, value in columns.items()}
        if len(set(lengths.values())) > 1:
            first, *others = lengths
            other = next(name for name in others if lengths[name] != lengths[first])
            raise pa.ArrowInvalid(  # as the original does
                f"Column lengths mismatch: {first!r} has {lengths[first]} rows, {other!r} has {lengths[other]}, not "
                "the expected length. A batch may become more or fewer rows only if all columns do: remove the others "
                "with remove_columns."
            )
        if not columns and self._tells_of_none:
            return _without_columns()
        if not any(lengths.values()):
            return None
        return self._finish(*self._convert(self._in_order(columns)))

    def _refuse_after_nothing(self) -> None:
        if self._only_marks:
            raise TypeError("The function returned None for the first rows and not for these. Return a dict for all.")

    def _changed(self, call: Call, result: Mapping[str, Any]) -> dict[str, Any]:
        """What the function set, in place or by what it returned."""
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
        alike = all(one.keys() == first for one in changed) and not any(call.lazy and call.lazy.gone for call in calls)
        merges = calls[0].merges
        columns: dict[str, Any] = {}
        names = list(first) if alike else list(dict.fromkeys(name for one in changed for name in one))
        for name in table.column_names if merges else ():
            if name in names or name in self._removed:
                continue
            if alike or not any(_is_gone(call, name) for call in calls):
                columns[name] = table.column(name)
            elif not all(_is_gone(call, name) for call in calls):
                stored = table.column(name).to_pylist()
                columns[name] = [
                    None if _is_gone(call, name) else value for call, value in zip(calls, stored, strict=True)
                ]
        for name in names:
            if alike:
                columns[name] = [one[name] for one in changed]
                continue
            rest: list[Any] = [None] * len(changed)
            if merges and name in table.column_names and name not in self._removed:
                stored = table.column(name).to_pylist()
                rest = [None if _is_gone(call, name) else value for call, value in zip(calls, stored, strict=True)]
            columns[name] = [one.get(name, other) for one, other in zip(changed, rest, strict=True)]
        return self._convert(self._in_order(columns))

    def _in_order(self, columns: dict[str, Any]) -> dict[str, Any]:
        """The source's columns first, in their order, as `datasets` has them."""
        order = [*(name for name in self.source.types if name in columns)]
        order += [name for name in columns if name not in self.source.types]
        return {name: columns[name] for name in order}

    def _convert(self, columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Feature]]:
        self._check_wanted(columns)
        arrays, found = {}, {}
        for name, values in columns.items():
            try:
                arrays[name], feature = self.column(name, values)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                if isinstance(error, MemoryError):
                    raise
                raise type(error)(f"The column {name!r}: {error}") from error
            if feature is not None:
                found[name] = feature
        return arrays, found

    def column(self, name: str, values: Any) -> tuple[Any, Feature | None]:
        """One column: of the type that was asked for, or that it had in the first batch if that will do."""
        settled = self._settled
        if settled is not None and name in settled.types and not pa.types.is_null(settled.types[name]):
            try:
                array, _ = to_arrow(name, values, self.source, settled, self._rules)
                return array, None if is_plain(settled.features[name]) else settled.features[name]
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                if isinstance(error, MemoryError):
                    raise
        return to_arrow(name, values, self.source, self.wanted, self._rules)

    def _check_wanted(self, columns: Mapping[str, Any]) -> None:
        if self.wanted is None or columns.keys() == self.wanted.types.keys():
            return
        extra = [name for name in columns if name not in self.wanted.types]
        missing = [name for name in self.wanted.types if name not in columns]
        what = f"does not have {extra[0]!r}" if extra else f"has {missing[0]!r}, which the function did not give"
        raise ValueError(f"features= {what}. The columns are: {', '.join(columns)}.")

    def _of_tables(self, results: Sequence[Any]) -> pa.Table:
        for result in results:
            if not isinstance(result, pa.Table):
                raise TypeError("The function returned a table for one row and a dict for another.")
            if result.num_rows != 1:
                raise ValueError(f"A function of rows must return tables of one row, not of {result.num_rows}.")
        table = pa.concat_tables(results, promote_options="permissive").combine_chunks()
        return self._finish(dict(zip(table.column_names, table.columns, strict=True)), {})

    def _finish(self, columns: dict[str, Any], found: dict[str, Feature]) -> pa.Table:
        """The table, with its features: those of the source where the type is still the same."""
        self._check_wanted(columns)
        for name, column in columns.items() if self._no_nulls else ():
            if column.null_count:
                raise ValueError(f"The column {name!r} has nulls, and disable_nullable=True was said.")
        if self.wanted is not None:
            columns = {name: as_wanted(name, columns[name], self.wanted) for name in self.wanted.types}
            table = pa.Table.from_arrays(list(columns.values()), list(columns))
            return table.replace_schema_metadata(metadata(self.wanted.features))
        return self.tag(pa.Table.from_arrays(list(columns.values()), list(columns)), found)

    def tag(self, table: pa.Table, found: Mapping[str, Feature]) -> pa.Table:
        """A table with the features of its columns: `found` ones, then the source's, then what the types say."""
        key = (table.schema.remove_metadata(), repr(found) if found else "")
        if key not in self._tags:
            features = {}
            for field in table.schema:
                if self.source.types.get(field.name) == field.type:
                    features[field.name] = self.source.features[field.name]
                elif field.name in found:
                    features[field.name] = found[field.name]
                else:
                    features[field.name] = inferred(field)
            self._tags[key] = metadata(features)
        return table.replace_schema_metadata(self._tags[key])


def _without_columns() -> pa.Table:
    return pa.table({NO_COLUMNS: pa.nulls(1)})


def kept(result: Any) -> Any:
    """A result that waits for those of other rows: the function may fill the same dict again for the next."""
    if result is None or isinstance(result, LazyRow):
        return result
    return dict(result) if isinstance(result, Mapping) else as_table(result)


def as_table(result: Any) -> Any:
    """A data frame as a table; a mapping or a table as it is; anything else is refused."""
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


def _is_gone(call: Call, name: str) -> bool:
    return call.lazy is not None and call.lazy.gone is not None and name in call.lazy.gone
