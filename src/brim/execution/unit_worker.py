"""What a worker process does with a unit: stream its batches through the step, and write the results to a file.

Only `worker.py` imports this module, once the process is bound to its parent.
"""

from __future__ import annotations

import bisect
import functools
import gc
import hashlib
import itertools
import json
import mmap
import os
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.block_pandas import do_without_pandas, postpone_pandas
from brim.compute.outputs.partial_unit import PartialUnit
from brim.compute.outputs.rows_file import EXTENSIONS, UnitFile, Writing, concatenate, write_rows
from brim.compute.rows.read_unit import cut_batches, read_unit
from brim.compute.rows.source_hash import SourceHash
from brim.compute.steps.row_features import unified
from brim.compute.steps.step import (
    BadBatch,
    BadRow,
    HasEncoder,
    HasTypeInference,
    RestartUnit,
    RowBatch,
    end_forked_child,
)
from brim.errors import BrimError, InputError
from brim.execution.failures import error_text, explain
from brim.execution.random_seeds import RandomSeeds
from brim.execution.worker_messages import ProbeDone, RowRange, UnitDone, UnitFailed, WorkerPositions
from brim.memory.meter import process_bytes, tree
from brim.memory.release import release
from brim.state.atomic_files import failures, refuse_more_files

_MOST_PAUSE_S = 5.0  # for other workers to release memory
_REPORT_S = 0.1
_MEASURE_S = 0.02
_KEPT_BYTES = 32 << 20  # above the memory at the start: free memory is released


class UnitWorker:
    """The state of one worker process."""

    def __init__(self, setup: Any, connection: Connection, folder: Path) -> None:
        self.setup, self.connection = setup, connection
        self._folder = folder / setup.folder
        self._reported_at = self._checked_at = self._measured_at = 0.0
        self._held_bytes = 0
        self._source_hash: Any = None  # of the present unit
        self._started: tuple[Any, int, _SkippedRows, Iterator[Any]] | None = None  # a unit whose first batch was probed
        with open(folder / setup.pause, "rb") as file:
            self._pause_flag = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
        self._positions = WorkerPositions(Path(setup.positions)) if setup.positions else None

    @property
    def runs_user_code(self) -> bool:
        """Whether the step runs code of the user: it may need pandas, and exit handlers."""
        return getattr(self.setup.step, "runs_own_code", True)

    def open(self) -> None:
        step = self.setup.step
        if self.runs_user_code:
            self._seeds = RandomSeeds()
            postpone_pandas()
        else:
            do_without_pandas()
        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        self.schema = pa.ipc.read_schema(pa.py_buffer(self.setup.reading.schema))
        if hasattr(step, "threads"):
            step.threads = self.setup.threads
        step.open(self.schema)
        self._types = b""
        # Everything loaded by now stays to the end: the collector need not scan it again and again.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._base_bytes = process_bytes(os.getpid())

    def close(self) -> None:
        self.setup.step.close()

    def compute(self, order: Any) -> None:
        """Compute a unit, or probe its first batch, and send the answer."""
        step, folder = self.setup.step, self._folder
        if hasattr(step, "rank"):
            step.rank = order.slot
        if order.probe:
            self._probe(order)
            return
        if order.types and order.types != self._types and isinstance(step, HasTypeInference):
            self._types = order.types
            step.settle(pa.ipc.read_schema(pa.py_buffer(order.types)))
        target = folder / f"{order.unit.number:08d}{EXTENSIONS[self.setup.writing.format]}"
        out = UnitFile(target, self.setup.writing)
        skipped, tables = self._start(order)
        try:
            for table in tables:
                with failures(folder):
                    out.write(table)
            with failures(folder):
                rows, size, sha256 = out.finish(self.setup.syncs)
                skipped.close()
        except RestartUnit:
            out.abandon()
            skipped.abandon()
            self.compute(order)
            return
        except BaseException as error:  # noqa: BLE001  the parent must be informed of any
            out.abandon()
            skipped.abandon()
            self.connection.send(failure_message(error))
            return
        held_bytes = process_bytes(os.getpid())
        if held_bytes > self._base_bytes + _KEPT_BYTES:
            release()
            held_bytes = process_bytes(os.getpid())
        encoder = (step.encoder, step.differed) if isinstance(step, HasEncoder) else ("", "")
        source = "" if self._source_hash is None else self._source_hash.hexdigest()
        batches = (skipped.batches, skipped.batch_rows)
        self.connection.send(UnitDone(rows, size, sha256, held_bytes, skipped.count, *encoder, *batches, source))

    def _probe(self, order: Any) -> None:
        """Send the types of the first batch. It is computed once: the unit continues after it."""
        skipped, tables = self._start(order)
        try:
            table = next(tables, None)
        except BaseException as error:  # noqa: BLE001  the parent must be informed of any
            self.connection.send(failure_message(error))
            return
        types = b"" if table is None or not table.num_rows else table.schema.serialize().to_pybytes()
        all_tables = tables if table is None else itertools.chain([table], tables)
        self._started = (order.unit, order.parts, skipped, all_tables)
        self.connection.send(ProbeDone(types))

    def _start(self, order: Any) -> tuple[_SkippedRows, Iterator[Any]]:
        """Return the results of a unit, including a batch that was probed."""
        started, self._started = self._started, None
        if started is not None and started[:2] == (order.unit, order.parts):
            return started[2:]
        reading, unit = self.setup.reading, order.unit
        self._source_hash = SourceHash(reading) if reading.options.get("hashed") and not unit.spooled else None
        path = self._folder / f"{unit.number:08d}.bad.arrow"
        skipped = _SkippedRows(path, unit.number, unit.first_row, keeps=self.setup.on_error == "quarantine")
        return skipped, self._results(order, skipped)

    def _results(self, order: Any, skipped: _SkippedRows) -> Iterator[Any]:
        """Yield one table per batch: the cuts between them do not depend on how the batch was computed."""
        step, unit = self.setup.step, order.unit
        partial = self._open_partial(unit, skipped)
        done_rows = 0 if partial is None else partial.rows
        if partial is not None:
            yield from partial.results()
        offset = seen_bytes = 0
        on_unreadable = self._on_unreadable(unit, skipped)
        tables = read_unit(self.setup.reading, unit, on_unreadable=on_unreadable, hashed=self._source_hash)
        for table in cut_batches(tables, step.batch_rows, step.batch_bytes):
            if offset < done_rows:
                offset += table.num_rows
                seen_bytes += table.nbytes
                continue
            self._pause(order.release_bytes)
            if self.runs_user_code:
                self._seeds.start(f"{self.setup.seed} {unit.number} {offset}")  # for all parts of the batch
            results: list[Any] = []
            result_bytes = 0
            for part in skipped.between_gaps(table, offset) if step.indices else [table]:
                first = None if unit.first_row is None else unit.first_row + skipped.position(offset)
                for batch in _parts(RowBatch(part, offset, first), order.parts if step.splittable else 1):
                    held_bytes = self._measure(order) - result_bytes
                    self._report(order, batch, seen_bytes, held_bytes, skipped)
                    advance = functools.partial(self._report_within, order, batch, seen_bytes, held_bytes, skipped)
                    new = self._apply(replace(batch, advance=advance), order.parts != 1, skipped, unit)
                    results += new
                    result_bytes += sum(result.nbytes for result in new)
                offset += part.num_rows
            result = concatenate(results) if results else None
            seen_bytes += table.nbytes
            if partial is not None:
                with failures(self._folder):
                    partial.add(result, skipped.take_new(), offset, skipped.counts)
            if result is not None:
                yield result
            del results, result

    def _open_partial(self, unit: Any, skipped: _SkippedRows) -> Any:
        """Open the results that an earlier attempt has left of a unit; None if the step keeps none."""
        if not getattr(self.setup.step, "keeps_partial_units", False):
            return None
        inputs = [self.setup.step.facts, self.setup.on_error, unit.key, unit.mtimes]
        identity = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()
        with failures(self._folder):
            partial = PartialUnit(self._folder, unit.number, identity)
            skipped.restore(partial.left_out(), partial.counts)
        return partial

    def _on_unreadable(self, unit: Any, skipped: _SkippedRows) -> Any:
        """Return what to call with rows of text that cannot be read; None where they are an error."""
        if self.setup.on_error == "stop":
            return None
        for row in unit.unreadable:
            skipped.add_unreadable(row, in_unit=False)
        return skipped.add_unreadable

    def _apply(self, batch: Any, saves_memory: bool, skipped: _SkippedRows, unit: Any) -> list[Any]:
        """Apply the step to a batch; skip rows that fail, if the user asked for that.

        A batch that may be split is halved until the rows are found that fail alone.
        """
        step, is_error = self.setup.step, self.setup.on_error == "stop"
        if not is_error:
            batch = replace(batch, leave_out=lambda row, cause: skipped.add(batch, row, 1, cause))
        pid = os.getpid()
        try:
            return list(step.apply(batch, saves_memory))
        except BadRow as error:
            failed = error
        finally:
            if os.getpid() != pid:
                end_forked_child()
        start, stop, rows = failed.row, failed.row + failed.rows, batch.table.num_rows
        if isinstance(failed, BadBatch) or isinstance(failed.__cause__, KeyboardInterrupt):
            raise self._explain(failed, batch, unit, skipped) from failed
        if failed.rows > 1 and step.splittable:
            middle = start + failed.rows // 2
            ranges = [(0, start), (start, middle), (middle, stop), (stop, rows)]
        elif is_error:
            raise self._explain(failed, batch, unit, skipped) from failed
        else:
            skipped.add(batch, start, failed.rows, failed.__cause__)
            ranges = [(0, start), (stop, rows)]
        parts = [_slice(batch, first, end) for first, end in ranges if end > first]
        results = [table for part in parts for table in self._apply(part, saves_memory, skipped, unit)]
        if is_error:  # the batch fails as a unit, and none of its parts does
            raise self._explain(failed, batch, unit, skipped) from failed
        return results

    def _explain(self, error: Any, batch: Any, unit: Any, skipped: _SkippedRows) -> Exception:
        """Make the error that names the rows of the input on which the function failed."""
        return explain(error, unit, self.setup.reading, skipped.position(batch.offset + error.row) - error.row)

    def _measure(self, order: Any) -> int:
        """Return the memory of this process: measured per row if the error must name a row, else every 20 ms."""
        now = time.monotonic()
        if order.parts != 1 or now - self._measured_at >= _MEASURE_S:
            self._measured_at, self._held_bytes = now, process_bytes(os.getpid())
        return self._held_bytes

    def _report(self, order: Any, batch: Any, seen_bytes: int, held_bytes: int, skipped: _SkippedRows) -> None:
        """Report the rows of a batch: every 0.1 s, or each batch if the error must name a row and no file has it."""
        rows = RowRange(skipped.position(batch.offset), batch.table.num_rows, seen_bytes, max(held_bytes, 0))
        if self._positions is not None:
            self._positions.note(order.slot, order.unit.number, rows)
        is_exact = self._positions is None and (order.parts != 1 or self.setup.step.batch_rows != 1)
        now = time.monotonic()
        if is_exact or now - self._reported_at >= _REPORT_S:
            self._reported_at = now
            self.connection.send(rows)

    def _report_within(
        self, order: Any, batch: Any, seen_bytes: int, held_bytes: int, skipped: _SkippedRows, rows: int
    ) -> None:
        """Report that so many rows of a batch are done."""
        seen_bytes += batch.table.nbytes * rows // max(batch.table.num_rows, 1)
        self._report(order, batch, seen_bytes, held_bytes, skipped)

    def _pause(self, release_bytes: int) -> None:
        """Between batches: release free memory, and wait up to 5 s while memory is low."""
        now = time.monotonic()
        if release_bytes and now - self._checked_at >= _MEASURE_S:
            self._checked_at = now
            if process_bytes(os.getpid()) > release_bytes:
                release()
        if self._pause_flag[0]:
            release()
            until = time.monotonic() + _MOST_PAUSE_S
            while self._pause_flag[0] and time.monotonic() < until:
                time.sleep(0.02)


class _SkippedRows:
    """Rows that cannot be read or that the step failed on, with the reason, in a file next to the unit's.

    Steps count readable rows only; `position` is the index of such a row among all rows of the unit.
    """

    def __init__(self, path: Path, unit: int, first_row: int | None, *, keeps: bool) -> None:
        self.rows = self.batches = self.batch_rows = self.unreadable_rows = 0
        self._path, self._unit, self._first_row, self._keeps = path, unit, first_row, keeps
        self._tables: list[Any] = []
        self._taken_count = 0
        self._unreadable: list[Any] = []  # separate: each attempt reads its unit from the start
        self._gaps: list[int] = []  # for each unreadable row, the number of readable rows before it

    @property
    def count(self) -> int:
        """All rows of the unit that have no result."""
        return self.rows + self.unreadable_rows

    @property
    def counts(self) -> list[int]:
        return [self.rows, self.batches, self.batch_rows]

    def position(self, offset: int) -> int:
        return offset + bisect.bisect_right(self._gaps, offset)

    def between_gaps(self, table: Any, offset: int) -> list[Any]:
        """Split a table into parts whose rows are consecutive in the source."""
        stop = offset + table.num_rows
        gaps = self._gaps[bisect.bisect_right(self._gaps, offset) : bisect.bisect_left(self._gaps, stop)]
        edges = [offset, *dict.fromkeys(gaps), stop]
        return [table.slice(start - offset, end - start) for start, end in itertools.pairwise(edges)]

    def add_unreadable(self, row: Any, *, in_unit: bool = True) -> None:
        """Count a row of text that cannot be read, and keep it for quarantine.

        `in_unit`: it is between rows of the unit, and was not skipped before the unit was made.
        """
        self.unreadable_rows += 1
        if in_unit:
            self._gaps.append(row.offset - len(self._gaps))
        if not self._keeps:
            return
        offset = row.offset if in_unit else None
        number = None if offset is None or self._first_row is None else self._first_row + offset
        columns = {
            "brim_file": pa.array([row.file], pa.string()),
            "brim_line": pa.array([row.line], pa.int64()),
            "brim_byte": pa.array([row.byte], pa.int64()),
            "brim_content": pa.array([row.content], pa.binary()),
            "brim_row": pa.array([number], pa.int64()),
            "brim_unit": pa.array([self._unit], pa.int64()),
            "brim_offset": pa.array([offset], pa.int64()),
            "brim_error": pa.array([f"cannot be read: {row.reason}"], pa.string()),
        }
        self._unreadable.append(pa.table(columns))

    def restore(self, tables: list[Any], counts: list[int]) -> None:
        """Take over rows that an earlier attempt has skipped."""
        if counts:
            self.rows, self.batches, self.batch_rows = counts
            self._tables, self._taken_count = list(tables), len(tables)

    def take_new(self) -> list[Any]:
        """Return the rows that were added since the last call."""
        new, self._taken_count = self._tables[self._taken_count :], len(self._tables)
        return new

    def add(self, batch: Any, start: int, rows: int, cause: BaseException | None) -> None:
        """Count skipped rows of a batch, and keep them for quarantine."""
        self.rows += rows
        if rows > 1:
            self.batches += 1
            self.batch_rows += rows
        if not self._keeps:
            return
        offsets = [self.position(batch.offset + start + number) for number in range(rows)]
        numbers = [None if self._first_row is None else self._first_row + offset for offset in offsets]
        notes = {
            "brim_row": pa.array(numbers, pa.int64()),  # in the source, where that is known
            "brim_unit": pa.array([self._unit] * rows, pa.int64()),
            "brim_offset": pa.array(offsets, pa.int64()),  # in the unit
            "brim_error": pa.array([error_text(cause)] * rows),
        }
        table = batch.table.slice(start, rows).replace_schema_metadata(None)
        for name, values in notes.items():
            table = table.append_column(name, values)
        self._tables.append(table)

    def close(self) -> None:
        tables = sorted([*self._unreadable, *self._tables], key=lambda table: table["brim_offset"][0].as_py() or 0)
        if tables:
            schema = unified([table.schema for table in tables])
            write_rows(self._path, tables, schema, Writing("arrow"))
            self.abandon()
        else:
            self._path.unlink(missing_ok=True)  # of an earlier attempt, which had some

    def abandon(self) -> None:
        self._tables, self._unreadable = [], []


def _parts(batch: Any, parts: int) -> Iterator[Any]:
    """Split a batch into so many parts; row by row for 0."""
    rows = batch.table.num_rows
    step = 1 if parts == 0 else max(-(-rows // parts), 1)
    if step >= rows:
        yield batch
        return
    for start in range(0, rows, step):
        yield _slice(batch, start, min(start + step, rows))


def _slice(batch: Any, start: int, stop: int) -> Any:
    first = None if batch.first_row is None else batch.first_row + start
    return replace(batch, table=batch.table.slice(start, stop - start), offset=batch.offset + start, first_row=first)


def _is_memory_error(error: BaseException) -> bool:
    """Return whether a library reports too little memory."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"MemoryError", "ArrowMemoryError", "OutOfMemoryError"}:
        return True
    return error.__cause__ is not None and _is_memory_error(error.__cause__)


def _picklable(error: BaseException) -> Exception:
    """Return an error that can be sent: one of brim as it is, others as text."""
    if isinstance(error, BrimError):
        return error
    try:
        if isinstance(error, OSError):
            refuse_more_files(error)
    except InputError as known:
        return known
    text = "".join(traceback.format_exception(error))
    return InputError(f"A worker failed: {type(error).__name__}: {error}".rstrip(), traceback=text)


def failure_message(error: BaseException) -> UnitFailed:
    """Return what the parent is told about an error."""
    return UnitFailed("memory") if _is_memory_error(error) else UnitFailed("error", _picklable(error))


def kill_children() -> None:
    """Kill processes that the user's function has started and left."""
    for pid in tree([os.getpid()])[1:]:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
