"""Map and filter: a user's function over rows or batches, with the results of `Dataset.map` and `Dataset.filter`.

Results become Arrow a few rows at a time, so that few Python objects exist at once. Tables keep the types of their own
rows: types are merged over the whole dataset when the output is finished.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from brim.compute.steps.function_digest import Digest, function_digest
from brim.compute.steps.functions import Shipped, pack, unpack
from brim.compute.steps.map_inputs import Call, Inputs
from brim.compute.steps.map_options import ALL_ROWS, NO_COLUMNS, MapStepOptions
from brim.compute.steps.map_results import Results, keep_result, reconciled
from brim.compute.steps.row_features import as_schema, features_of, metadata
from brim.compute.steps.step import BadRow, RowBatch, end_forked_child
from brim.errors import BrimError

_CHUNK_ROWS = 100
_CHUNK_ROWS_DECODED = 10  # images and the like are large as Python objects
_CHUNK_BYTES = 4_000_000
_HELD_BYTES = 32_000_000  # results of a batch that are collected to get one type
_PARTS = 8
_BATCH_BYTES = 16_000_000


def identity(rows: Any) -> Any:
    """Return rows unchanged: the function of a `map` without one."""
    return rows


class MapStep:
    """The step of a map. Made in the caller's process; `open` loads the function in the worker."""

    columns: tuple[str, ...] | None = None

    def __init__(self, function: Callable[..., Any] | None, options: MapStepOptions | None = None) -> None:
        options = options or MapStepOptions()
        function = function or identity
        self.function = Shipped.from_function(function)
        self.digest: Digest = function_digest((function, options.fn_kwargs, options.format_kwargs))
        keywords = (options.fn_kwargs, options.format_kwargs)
        self._kwargs = (
            pack(keywords, "fn_kwargs") if any(keywords) else b""
        )  # without arguments, cloudpickle is not needed
        self._requested = None if options.features is None else as_schema(options.features)
        none: dict[str, Any] = {}
        self.options = replace(options, fn_kwargs=none, format_kwargs=none, features=None)
        self.batch_rows: int | None = options.batch_rows
        # Without `batched`, a batch only groups rows for reading: large rows are limited by bytes.
        self.batch_bytes = 0 if options.batched else _BATCH_BYTES
        self.indices = options.with_indices
        self.rank = 0  # in the worker: its number among those that run
        self._open: _Open | None = None

    @property
    def splittable(self) -> bool:
        """Whether a divided batch gives the same rows."""
        if not self.options.batched:
            return True
        return (
            self.options.splittable is True and not self.options.drop_last_batch
        )  # a part would count as the last batch

    @property
    def repeats(self) -> str | None:
        return json.dumps(self.facts, sort_keys=True) if self.digest.stable else None

    @property
    def facts(self) -> dict[str, Any]:
        """The fingerprint inputs of the step."""
        options = self.options
        optional: dict[str, Any] = {
            "with_rank": options.with_rank,
            "disable_nullable": options.disable_nullable,
            "new_types": not options.try_original_type,
            "mixed_types": "" if options.on_mixed_types else "refused",
        }
        return {name: value for name, value in optional.items() if value} | {
            "step": "map",
            "function": self.digest.value,
            "batched": options.batched,
            "batch_rows": self.batch_rows,
            "drop_last_batch": options.batched and options.drop_last_batch,
            "remove_columns": sorted(options.remove_columns or ()),
            "with_indices": options.with_indices,
            "input_columns": None if options.input_columns is None else list(options.input_columns),
            "input": options.input,
            "format": options.format_type,
            "features": None if self._requested is None else json.dumps(features_of(self._requested), sort_keys=True),
        }

    def empty_schema(self, schema: pa.Schema, had_rows: bool) -> pa.Schema:
        """Return the schema of an output without rows: the source has none, or all were dropped."""
        if had_rows and self._requested is not None:
            return self._requested
        features = features_of(schema)
        if not had_rows:
            removed = self.options.remove_columns or ()
            schema = pa.schema([field for field in schema if field.name not in removed])
        return schema.with_metadata(metadata({name: features[name] for name in schema.names}))

    def settle(self, schema: pa.Schema) -> None:
        """From now on, convert columns to the types of `schema` if their values fit.

        `datasets` gives all rows the types of the first batch it writes, or fails. With the schema of the first batch,
        later batches get the same types; values that do not fit keep their own.
        """
        if self._open is not None and self._requested is None:
            self._open.settle(schema)

    def open(self, schema: pa.Schema) -> None:
        """Load the function, and check the columns."""
        self.options.check(schema)
        self._open = _Open(self, schema)

    def apply(self, batch: RowBatch, small: bool = False) -> Iterator[pa.Table]:
        """Yield the output rows of a batch."""
        if self._open is None:
            raise RuntimeError("open() comes before apply()")
        if batch.table.num_rows == 0:
            return
        if not self.options.batched:
            yield from self._open.rows(batch, small)
        elif not self.options.drop_last_batch or self.batch_rows in (batch.table.num_rows, ALL_ROWS):
            yield from self._open.batch(batch, small and self.splittable)

    def smaller(self, rows: int) -> str:
        """Suggest a smaller batch if batches may not be divided."""
        if self.splittable or rows < 2:
            return ""
        return (
            f"Or try --batch-size={max(rows // 4, 1)}, if the function allows it, or allow a batch to be divided "
            "(--splittable)."
        )

    def close(self) -> None:
        """Release the function."""
        self._open = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}


_FORKED: list[bool] = []  # not empty in a process that the function has forked


@functools.cache
def _notice_forks() -> None:
    os.register_at_fork(after_in_child=lambda: _FORKED.append(True))


class _Open:
    """A loaded function with its inputs and results."""

    def __init__(self, step: MapStep, schema: pa.Schema) -> None:
        function = step.function.load()
        self._kwargs, format_kwargs = unpack(step._kwargs, "fn_kwargs") if step._kwargs else ({}, {})
        self._inputs = Inputs(schema, step.options, format_kwargs, lambda: step.rank)
        self._result_arguments = (self._inputs.schema or schema, step.options, step._requested)
        self._results = Results(*self._result_arguments, None)
        self._function = function
        self.keep: Callable[[Any], Any] = keep_result  # applied to the result of a row
        _notice_forks()
        self._is_async = inspect.iscoroutinefunction(function)

    def settle(self, schema: pa.Schema) -> None:
        self._results = Results(*self._result_arguments, schema)

    def rows(self, batch: RowBatch, small: bool) -> Iterator[pa.Table]:
        table = self._inputs.arrange(batch.table)
        tables: list[pa.Table] = []
        held_bytes = 0
        returns_none: bool | None = None  # whether the function returns None
        step = 1 if small else self._chunk_rows(table)
        for start in range(0, table.num_rows, step):
            chunk = table.slice(start, step)
            first_row = None if batch.first_row is None else batch.first_row + start
            calls, results = self._call_rows(chunk, first_row, start)
            for row, result in enumerate(results):
                if returns_none is None:
                    returns_none = result is None
                if returns_none != (result is None):
                    message = "The function returned None for one row and not for another. Return a dict for every row."
                    raise BadRow(start + row, 1) from TypeError(message)
            if not returns_none:
                tables.append(self._row_table(chunk, calls, results, start))
                held_bytes += tables[-1].nbytes
                if held_bytes > _HELD_BYTES:
                    yield from self._merge_types(tables)
                    tables, held_bytes = [], 0
        if returns_none:
            yield self._results.unchanged(table)
        yield from self._merge_types(tables)

    def batch(self, batch: RowBatch, in_parts: bool) -> Iterator[pa.Table]:
        table = self._inputs.arrange(batch.table)
        count = table.num_rows
        step = -(-count // _PARTS) if in_parts else count
        tables = (
            table_part
            for start in range(0, count, step)
            for table_part in self._batch_part(table.slice(start, step), batch.first_row, start, in_parts)
        )
        yield from self._merge_types(list(tables))

    def _batch_part(self, table: pa.Table, first_row: int | None, start: int, in_parts: bool) -> Iterator[pa.Table]:
        """Process a batch or a part of it; in halves if memory runs out."""
        rows = table.num_rows
        try:
            call, result = self.call(table, None if first_row is None else first_row + start)
            output = self._results.unchanged(table) if result is None else self._results.of_batch(table, call, result)
        except MemoryError:
            if not in_parts or rows == 1:
                raise
        except BrimError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise blamed(error, start, rows) from error
        else:
            if output is not None:
                yield output
            return
        half = rows // 2
        yield from self._batch_part(table.slice(0, half), first_row, start, in_parts)
        yield from self._batch_part(table.slice(half), first_row, start + half, in_parts)

    def call(self, table: pa.Table, first_row: int | None) -> tuple[Call, Any]:
        """Call the function once for all rows."""
        call = self._inputs.batch(table, first_row)
        result = self._function(*call.args, **self._kwargs)
        if self._is_async:
            import asyncio  # few functions are

            result = asyncio.run(result)
        return call, result

    def masks(self, batch: RowBatch, small: bool) -> Iterator[tuple[pa.Table, int, list[Any]]]:
        """Yield rows, their offset in the batch, and the function's result for each."""
        table = self._inputs.arrange(batch.table)
        step = 1 if small else self._chunk_rows(table)
        for start in range(0, table.num_rows, step):
            chunk = table.slice(start, step)
            first_row = None if batch.first_row is None else batch.first_row + start
            yield chunk, start, self._call_rows(chunk, first_row, start)[1]

    def mask(self, batch: RowBatch) -> tuple[pa.Table, list[Any]]:
        """Return all rows of a batch, and the function's result for each."""
        table = self._inputs.arrange(batch.table)
        try:
            answers = self.call(table, batch.first_row)[1]
            return table, answers.to_pylist() if isinstance(answers, pa.Array | pa.ChunkedArray) else list(answers)
        except (MemoryError, BrimError):
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise blamed(error, 0, table.num_rows) from error

    def unchanged(self, table: pa.Table) -> pa.Table:
        return self._results.unchanged(table)

    def _merge_types(self, tables: list[pa.Table]) -> list[pa.Table]:
        if tables and NO_COLUMNS in tables[0].column_names:
            return tables[:1]
        return reconciled(tables, self._results) if len(tables) > 1 else tables

    def _chunk_rows(self, table: pa.Table) -> int:
        max_rows = _CHUNK_ROWS_DECODED if self._inputs.decodes else _CHUNK_ROWS
        return max(1, min(max_rows, int(_CHUNK_BYTES * table.num_rows / (table.nbytes or 1))))

    def _call_rows(self, chunk: pa.Table, first_row: int | None, start: int) -> tuple[list[Call], list[Any]]:
        if self._is_async:
            import asyncio

            return asyncio.run(self._call_rows_async(chunk, first_row, start))
        calls: list[Call] = []
        results: list[Any] = []
        function, kwargs, keep = self._function, self._kwargs, self.keep
        try:
            for call in self._inputs.rows(chunk, first_row):
                results.append(keep(function(*call.args, **kwargs)))
                calls.append(call)
                if _FORKED:
                    end_forked_child()
        except (MemoryError, BrimError):
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise blamed(error, start + len(results), 1) from error
        return calls, results

    async def _call_rows_async(
        self, chunk: pa.Table, first_row: int | None, start: int
    ) -> tuple[list[Call], list[Any]]:
        import asyncio

        calls = list(self._inputs.rows(chunk, first_row))
        work = (self._function(*call.args, **self._kwargs) for call in calls)
        results = await asyncio.gather(*work, return_exceptions=True)
        for row, result in enumerate(results):
            if isinstance(result, MemoryError):
                raise result
            if isinstance(result, BaseException):
                raise blamed(result, start + row, 1) from result
        return calls, results

    def _row_table(self, chunk: pa.Table, calls: Sequence[Call], results: Sequence[Any], start: int) -> pa.Table:
        try:
            return self._results.of_rows(chunk, calls, results)
        except (MemoryError, BrimError):
            raise
        except Exception as error:
            for row in range(chunk.num_rows if chunk.num_rows > 1 else 0):
                self._row_table(chunk.slice(row, 1), calls[row : row + 1], results[row : row + 1], start + row)
            raise BadRow(start, chunk.num_rows) from error


def blamed(error: BaseException, row: int, rows: int) -> BaseException:
    """Return the error for failed rows. A GPU out of memory is a MemoryError, not a fault of the rows."""
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return MemoryError(str(error))
    return BadRow(row, rows)


INDICES = "indices"
_NUMBERS = pa.schema([(INDICES, pa.uint64())])
_NUMBERS = _NUMBERS.with_metadata(metadata(features_of(_NUMBERS)))


def always(*_: Any, **__: Any) -> bool:
    """Return True: the function of a `filter` without one."""
    return True


class FilterStep(MapStep):
    """A filter. `numbers`: write only the numbers of kept rows, for a caller that has the rows."""

    settle = None  # type: ignore[assignment]  # its types do not depend on the first batch

    def __init__(self, function: Callable[..., Any] | None, options: MapStepOptions, *, numbers: bool) -> None:
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

    def apply(self, batch: RowBatch, small: bool = False) -> Iterator[pa.Table]:
        if self._open is None:
            raise RuntimeError("open() comes before apply()")
        if batch.table.num_rows == 0:
            return
        if self.options.batched:
            table, answers = self._open.mask(batch)
            yield from self._kept_rows(table, batch.first_row, answers)
            return
        for table, start, answers in self._open.masks(batch, small):
            yield from self._kept_rows(table, None if batch.first_row is None else batch.first_row + start, answers)

    def _kept_rows(self, table: pa.Table, first_row: int | None, answers: list[Any]) -> Iterator[pa.Table]:
        stays = [row for row, true in zip(range(table.num_rows), answers, strict=False) if true]
        if not stays:
            return
        if self.numbers:
            assert first_row is not None
            yield pa.table([pa.array(np.array(stays, np.uint64) + np.uint64(first_row))], _NUMBERS)
        else:
            assert self._open is not None
            yield self._open.unchanged(table.take(pa.array(stays)))
