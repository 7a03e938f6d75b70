"""A worker: a fresh process that takes a unit, streams its batches through the step, and leaves a file.

Started with `python -m`, so that scripts without a main guard work and nothing of the parent is copied. It ends with
its parent, and the kernel takes it first when the machine runs out of memory.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import gc
import importlib
import itertools
import mmap
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_WAIT_S = 5.0  # at most, for memory to be given back by others
_TELL_S = 0.1
_WEIGH_S = 0.02
_KEPT_BYTES = 32 << 20  # more than when it began: time to give back what is free


def main() -> None:
    """`python -m brim.execution.worker FD SETUP`, or `FD - MODULE…` to load them and be told the setup later."""
    parent = os.getppid()
    _die_with(parent)
    gc.disable()  # what is loaded now stays
    try:
        connection = Connection(int(sys.argv[1]))
        setup = sys.argv[2] if sys.argv[2] != "-" else _wait_for_setup(connection, sys.argv[3:])
        while setup is not None:
            setup = _work(connection, Path(setup))
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the parent is gone


def _wait_for_setup(connection: Connection, modules: list[str]) -> str | None:
    """Nothing of the user's is loaded before there is a job. None if there will be none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the parent's to handle
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # whoever needs it says so
    try:
        return _begun(connection.recv())
    except EOFError:
        return None


def _begun(begin: Any) -> str:
    """The setup of a job, to whose log goes what is printed from now on."""
    log = os.open(begin.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 2)
    os.close(log)
    return str(begin.setup)


def _work(connection: Connection, path: Path) -> str | None:
    """Do the units of a job; the setup of another one with the same work, if there is one after it."""
    _take_streams()
    # Imported here: dying with the parent comes first.
    from brim.execution.worker_messages import Begin, Failed, Ready
    from brim.memory.meter import process_bytes
    from brim.state.atomic_files import failures

    try:
        job = path.parent
        with failures(job):
            data = path.read_bytes()
        setup = pickle.loads(data)
        with failures(job):
            worker = Worker(setup, connection, job)
        worker.open()
    except BaseException as error:  # noqa: BLE001  whatever it is, the parent has to know
        connection.send(Failed("memory") if _is_memory(error) else Failed("error", _travelling(error)))
        return None
    connection.send(Ready(process_bytes(os.getpid())))
    while True:
        try:
            order = connection.recv()
        except EOFError:
            break
        if order is None:
            break
        if isinstance(order, Begin):
            worker.close()
            gc.disable()
            return _begun(order)
        worker.do(order)
    worker.close()
    connection.close()
    _end_children()
    if not worker.runs_own_code:
        os._exit(0)  # nothing is left to be said, and taking the interpreter apart takes 0.1 s
    return None


class Worker:
    """The state of one worker process."""

    def __init__(self, setup: Any, connection: Connection, job: Path) -> None:
        self.setup, self.connection, self._job = setup, connection, job
        self._told = self._weighed = self._measured_at = 0.0
        self._measured = 0
        self._source_hash: Any = None  # of the unit under way
        self._begun: tuple[Any, int, _Bad, Iterator[Any]] | None = None  # a unit whose first batch was looked at
        with open(job / setup.gate, "rb") as file:
            self._gate = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
        self._whereabouts = _whereabouts(setup)

    @property
    def runs_own_code(self) -> bool:
        """Whether the step runs what the user wrote: it may need pandas, and be told of the end."""
        return getattr(self.setup.step, "runs_own_code", True)

    def open(self) -> None:
        from brim.block_pandas import do_without_pandas, postpone_pandas
        from brim.memory.meter import process_bytes

        step = self.setup.step
        if self.runs_own_code:
            from brim.execution.random_seeds import RandomSeeds

            self._seeds = RandomSeeds()
            postpone_pandas()
        else:
            do_without_pandas()
        import pyarrow as pa

        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        self.schema = pa.ipc.read_schema(pa.py_buffer(self.setup.reading.schema))
        if hasattr(step, "threads"):
            step.threads = self.setup.threads
        step.open(self.schema)
        self._types = b""
        # What is loaded by now stays to the end: collections need not go through it again and again.
        gc.collect()
        gc.freeze()
        gc.enable()
        self._base_bytes = process_bytes(os.getpid())

    def close(self) -> None:
        self.setup.step.close()

    def do(self, order: Any) -> None:
        from brim.compute.outputs.rows_file import EXTENSIONS, UnitFile
        from brim.compute.steps.step import Changes, Encodes, Redo
        from brim.execution.worker_messages import Done, Failed
        from brim.memory.meter import process_bytes
        from brim.memory.release import release
        from brim.state.atomic_files import failures

        if hasattr(self.setup.step, "rank"):
            self.setup.step.rank = order.slot
        if order.probe:
            self._probe(order)
            return
        self._settle(order.types)
        folder = self._job / self.setup.folder
        target = folder / f"{order.unit.number:08d}{EXTENSIONS[self.setup.writing.format]}"
        out = UnitFile(target, self.setup.writing)
        bad, tables = self._begin(order)
        try:
            for table in tables:
                with failures(folder):
                    out.write(table)
            with failures(folder):
                rows, size, sha256 = out.finish(self.setup.lasts)
                bad.close()
        except Redo:
            out.abandon()
            bad.abandon()
            self.do(order)
            return
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent has to know
            out.abandon()
            bad.abandon()
            memory = _is_memory(error)
            self.connection.send(Failed("memory") if memory else Failed("error", _travelling(error)))
            return
        held, step = process_bytes(os.getpid()), self.setup.step
        if held > self._base_bytes + _KEPT_BYTES:
            release()
            held = process_bytes(os.getpid())
        told = (step.encoder, step.differed) if isinstance(step, Encodes) else ("", "")
        changes = step.changes() if isinstance(step, Changes) else b""
        source = "" if self._source_hash is None else self._source_hash.hexdigest()
        batches = (bad.batches, bad.batch_rows)
        self.connection.send(Done(rows, size, sha256, held, bad.left_out, *told, changes, *batches, source))

    def _probe(self, order: Any) -> None:
        """The types of the first batch. It is not done twice: the unit goes on from there."""
        from brim.execution.worker_messages import Failed, Probed

        bad, tables = self._begin(order)
        try:
            table = next(tables, None)
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent has to know
            self.connection.send(Failed("memory") if _is_memory(error) else Failed("error", _travelling(error)))
            return
        types = b"" if table is None or not table.num_rows else table.schema.serialize().to_pybytes()
        self._begun = (order.unit, order.pieces, bad, tables if table is None else itertools.chain([table], tables))
        self.connection.send(Probed(types))

    def _begin(self, order: Any) -> tuple[_Bad, Iterator[Any]]:
        """The results of a unit, from where a look at its first batch left them."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[:2] == (order.unit, order.pieces):
            return begun[2:]
        from brim.compute.rows.source_hash import SourceHash

        reading = self.setup.reading
        self._source_hash = SourceHash(reading) if reading.options.get("hashed") and not order.unit.spooled else None
        path = self._job / self.setup.folder / f"{order.unit.number:08d}.bad.arrow"
        bad = _Bad(path, order.unit.number, order.unit.first_row, keeps=self.setup.on_error == "quarantine")
        return bad, self._results(order, bad)

    def _settle(self, types: bytes) -> None:
        import pyarrow as pa

        from brim.compute.steps.step import Settles

        if types and types != self._types and isinstance(self.setup.step, Settles):
            self._types = types
            self.setup.step.settle(pa.ipc.read_schema(pa.py_buffer(types)))

    def _results(self, order: Any, bad: _Bad) -> Iterator[Any]:
        """One table for each batch: cuts between them are the same however the batch was done."""
        from brim.compute.outputs.rows_file import joined
        from brim.compute.rows.read_unit import cut_batches, read_unit
        from brim.compute.steps.step import Batch
        from brim.state.atomic_files import failures

        step, unit = self.setup.step, order.unit
        partial = self._partial(unit, bad)
        done_rows = 0 if partial is None else partial.rows
        if partial is not None:
            yield from partial.results()
        offset = seen = 0
        on_unreadable = self._on_unreadable(unit, bad)
        tables = read_unit(self.setup.reading, unit, on_unreadable=on_unreadable, hashed=self._source_hash)
        for table in cut_batches(tables, step.batch_rows, step.batch_bytes):
            if offset < done_rows:
                offset += table.num_rows
                seen += table.nbytes
                continue
            self._pause(order.soft_bytes)
            if self.runs_own_code:
                self._seeds.start(f"{self.setup.seed} {unit.number} {offset}")  # for all parts of the batch
            results: list[Any] = []
            result_bytes = 0
            for part in bad.between_gaps(table, offset) if step.indices else [table]:
                first = None if unit.first_row is None else unit.first_row + bad.position(offset)
                for batch in _pieces(Batch(part, offset, first), order.pieces if step.splittable else 1):
                    held = self._held_bytes(order) - result_bytes
                    self._tell(order, batch, seen, held, bad)
                    advance = functools.partial(self._tell_within, order, batch, seen, held, bad)
                    made = self._apply(replace(batch, advance=advance), order.pieces != 1, bad, unit)
                    results += made
                    result_bytes += sum(each.nbytes for each in made)
                offset += part.num_rows
            result = joined(results) if results else None
            seen += table.nbytes
            if partial is not None:
                with failures(self._job / self.setup.folder):
                    partial.add(result, bad.take_new(), offset, bad.counts)
            if result is not None:
                yield result
            del results, result

    def _partial(self, unit: Any, bad: _Bad) -> Any:
        """What an earlier attempt has left of the unit, and where this one keeps its own; None if the step does not."""
        if not getattr(self.setup.step, "keeps_partial_units", False):
            return None
        import hashlib
        import json

        from brim.compute.outputs.partial_unit import PartialUnit
        from brim.state.atomic_files import failures

        decides = [self.setup.step.facts, self.setup.on_error, unit.key, unit.mtimes]
        identity = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()
        folder = self._job / self.setup.folder
        with failures(folder):
            partial = PartialUnit(folder, unit.number, identity)
            bad.restore(partial.left_out(), partial.counts)
        return partial

    def _on_unreadable(self, unit: Any, bad: _Bad) -> Any:
        """What is done with rows of text that cannot be read; None where they are an error."""
        if self.setup.on_error == "stop":
            return None
        for row in unit.unreadable:
            bad.add_unreadable(row, in_unit=False)
        return bad.add_unreadable

    def _apply(self, batch: Any, small: bool, bad: _Bad, unit: Any) -> list[Any]:
        """What the step makes of a batch; rows that it cannot do are left out if that was asked for.

        Where a batch fails that may be done in parts, it is halved until the rows are found that fail alone.
        """
        from brim.compute.steps.step import BadBatch, BadRow, end_forked_child

        step, stops = self.setup.step, self.setup.on_error == "stop"
        if not stops:
            batch = replace(batch, leave_out=lambda row, cause: bad.add(batch, row, 1, cause))
        pid = os.getpid()
        try:
            return list(step.apply(batch, small))
        except BadRow as error:
            failed = error
        finally:
            if os.getpid() != pid:
                end_forked_child()
        start, stop, rows = failed.row, failed.row + failed.rows, batch.table.num_rows
        if isinstance(failed, BadBatch) or isinstance(failed.__cause__, KeyboardInterrupt):
            raise self._explained(failed, batch, unit, bad) from failed
        if failed.rows > 1 and step.splittable:
            middle = start + failed.rows // 2
            ranges = [(0, start), (start, middle), (middle, stop), (stop, rows)]
        elif stops:
            raise self._explained(failed, batch, unit, bad) from failed
        else:
            bad.add(batch, start, failed.rows, failed.__cause__)
            ranges = [(0, start), (stop, rows)]
        parts = [_slice(batch, begin, end) for begin, end in ranges if end > begin]
        results = [table for part in parts for table in self._apply(part, small, bad, unit)]
        if stops:  # it fails as a whole, and none of its parts does
            raise self._explained(failed, batch, unit, bad) from failed
        return results

    def _explained(self, error: Any, batch: Any, unit: Any, bad: _Bad) -> Exception:
        """The function's own error, and where in the input it happened."""
        from brim.execution.failures import explain

        return explain(error, unit, self.setup.reading, bad.position(batch.offset + error.row) - error.row)

    def _held_bytes(self, order: Any) -> int:
        """What this process holds: measured for every row if a row shall be named, else now and then."""
        from brim.memory.meter import process_bytes

        now = time.monotonic()
        if order.pieces != 1 or now - self._measured_at >= _WEIGH_S:
            self._measured_at, self._measured = now, process_bytes(os.getpid())
        return self._measured

    def _tell(self, order: Any, batch: Any, seen: int, held: int, bad: _Bad) -> None:
        """Where this worker is. Not more often than is useful, unless a row shall be named and nothing else tells."""
        from brim.execution.worker_messages import At

        now, at = time.monotonic(), At(bad.position(batch.offset), batch.table.num_rows, seen, max(held, 0))
        if self._whereabouts is not None:
            self._whereabouts.note(order.slot, order.unit.number, at)
        exact = self._whereabouts is None and (order.pieces != 1 or self.setup.step.batch_rows != 1)
        if exact or now - self._told >= _TELL_S:
            self._told = now
            self.connection.send(at)

    def _tell_within(self, order: Any, batch: Any, seen: int, held: int, bad: _Bad, rows: int) -> None:
        """So many rows of a batch are done."""
        self._tell(order, batch, seen + batch.table.nbytes * rows // max(batch.table.num_rows, 1), held, bad)

    def _pause(self, soft_bytes: int) -> None:
        """Between batches: give back what is free, and wait a little while memory is short."""
        from brim.memory.meter import process_bytes
        from brim.memory.release import release

        now = time.monotonic()
        if soft_bytes and now - self._weighed >= _WEIGH_S:
            self._weighed = now
            if process_bytes(os.getpid()) > soft_bytes:
                release()
        if self._gate[0]:
            release()
            until = time.monotonic() + _WAIT_S
            while self._gate[0] and time.monotonic() < until:
                time.sleep(0.02)


def _whereabouts(setup: Any) -> Any:
    from brim.execution.worker_messages import Whereabouts

    return Whereabouts(Path(setup.whereabouts)) if setup.whereabouts else None


class _Bad:
    """Rows that could not be read or that the step could not do, with the reason, in a file beside the unit's.

    Steps count the rows that could be read; `position` is where such a row is among all rows of the unit.
    """

    def __init__(self, path: Path, unit: int, first_row: int | None, *, keeps: bool) -> None:
        self.rows = self.batches = self.batch_rows = self.unreadable_rows = 0
        self._path, self._unit, self._first_row, self._keeps = path, unit, first_row, keeps
        self._tables: list[Any] = []
        self._taken = 0
        self._unreadable: list[Any] = []  # apart: each attempt reads its unit from the start
        self._gaps: list[int] = []  # for each unreadable row, the readable ones before it

    @property
    def left_out(self) -> int:
        """All rows of the unit that have no result."""
        return self.rows + self.unreadable_rows

    def position(self, offset: int) -> int:
        return offset + bisect.bisect_right(self._gaps, offset)

    def between_gaps(self, table: Any, offset: int) -> list[Any]:
        """A table in parts whose rows follow each other in the source."""
        stop = offset + table.num_rows
        gaps = self._gaps[bisect.bisect_right(self._gaps, offset) : bisect.bisect_left(self._gaps, stop)]
        edges = [offset, *dict.fromkeys(gaps), stop]
        return [table.slice(start - offset, end - start) for start, end in itertools.pairwise(edges)]

    def add_unreadable(self, row: Any, *, in_unit: bool = True) -> None:
        """Count a row of text that cannot be read, and keep it if that was asked for.

        `in_unit`: it lies between rows of the unit, and was not left out before the unit was made.
        """
        import pyarrow as pa

        self.unreadable_rows += 1
        if in_unit:
            self._gaps.append(row.offset - len(self._gaps))
        if not self._keeps:
            return
        offset = row.offset if in_unit else None
        number = None if offset is None or self._first_row is None else self._first_row + offset
        types = {
            "brim_file": pa.string(),
            "brim_line": pa.int64(),
            "brim_byte": pa.int64(),
            "brim_content": pa.binary(),
            "brim_row": pa.int64(),
            "brim_unit": pa.int64(),
            "brim_offset": pa.int64(),
            "brim_error": pa.string(),
        }
        values = (
            row.file,
            row.line,
            row.byte,
            row.content,
            number,
            self._unit,
            offset,
            f"cannot be read: {row.reason}",
        )
        kept = {name: pa.array([value], kind) for (name, kind), value in zip(types.items(), values, strict=True)}
        self._unreadable.append(pa.table(kept))

    @property
    def counts(self) -> list[int]:
        return [self.rows, self.batches, self.batch_rows]

    def restore(self, tables: list[Any], counts: list[int]) -> None:
        """Rows that an earlier attempt has left out."""
        if counts:
            self.rows, self.batches, self.batch_rows = counts
            self._tables, self._taken = list(tables), len(tables)

    def take_new(self) -> list[Any]:
        """Those that were kept since the last call."""
        new, self._taken = self._tables[self._taken :], len(self._tables)
        return new

    def add(self, batch: Any, start: int, rows: int, cause: BaseException | None) -> None:
        """Count rows of a batch that are left out, and keep them if that was asked for."""
        self.rows += rows
        if rows > 1:
            self.batches += 1
            self.batch_rows += rows
        if self._keeps:
            self._keep(batch.table.slice(start, rows), batch.offset + start, cause)

    def _keep(self, table: Any, offset: int, cause: BaseException | None) -> None:
        import pyarrow as pa

        from brim.execution.failures import reason

        offsets = [self.position(offset + number) for number in range(table.num_rows)]
        rows = [None if self._first_row is None else self._first_row + offset for offset in offsets]
        notes = {
            "brim_row": pa.array(rows, pa.int64()),  # in the source, where that is known
            "brim_unit": pa.array([self._unit] * table.num_rows, pa.int64()),
            "brim_offset": pa.array(offsets, pa.int64()),  # in the unit
            "brim_error": pa.array([reason(cause)] * table.num_rows),
        }
        table = table.replace_schema_metadata(None)
        for name, values in notes.items():
            table = table.append_column(name, values)
        self._tables.append(table)

    def close(self) -> None:
        from brim.compute.outputs.rows_file import Writing, write_rows
        from brim.compute.steps.row_features import unified

        tables = sorted([*self._unreadable, *self._tables], key=lambda table: table["brim_offset"][0].as_py() or 0)
        if tables:
            schema = unified([table.schema for table in tables])
            write_rows(self._path, tables, schema, Writing("arrow"))
            self._tables, self._unreadable = [], []
        else:
            self._path.unlink(missing_ok=True)  # of an earlier attempt, which had some

    def abandon(self) -> None:
        self._tables, self._unreadable = [], []


def _pieces(batch: Any, pieces: int) -> Iterator[Any]:
    """A batch in parts: `pieces` of them, or row by row for 0."""
    rows = batch.table.num_rows
    step = 1 if pieces == 0 else max(-(-rows // pieces), 1)
    if step >= rows:
        yield batch
        return
    for start in range(0, rows, step):
        yield _slice(batch, start, min(start + step, rows))


def _slice(batch: Any, start: int, stop: int) -> Any:
    """Some rows of a batch."""
    first = None if batch.first_row is None else batch.first_row + start
    return replace(batch, table=batch.table.slice(start, stop - start), offset=batch.offset + start, first_row=first)


def _is_memory(error: BaseException) -> bool:
    """Too little memory, whoever says so."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"MemoryError", "ArrowMemoryError", "OutOfMemoryError"}:
        return True
    cause = error.__cause__
    return cause is not None and _is_memory(cause)


def _travelling(error: BaseException) -> Exception:
    """An error that can be sent: brim's own as they are, others as text."""
    import traceback

    from brim.errors import BrimError, InputError
    from brim.state.atomic_files import refuse_more_files

    if isinstance(error, BrimError):
        return error
    try:
        if isinstance(error, OSError):
            refuse_more_files(error)
    except InputError as known:
        return known
    text = "".join(traceback.format_exception(error))
    return InputError(f"A worker failed: {type(error).__name__}: {error}".rstrip(), traceback=text)


def _die_with(parent: int) -> None:
    """End when the parent ends, however that is."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            Path("/proc/self/oom_score_adj").write_text("500")
        except OSError:
            pass
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _end_children() -> None:
    """What the user's function has started and left behind."""
    from brim.memory.meter import tree

    for pid in tree([os.getpid()])[1:]:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _take_streams() -> None:
    """What the user's function prints goes to the log, and it has nothing to read. Ctrl-C is the parent's to handle."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
