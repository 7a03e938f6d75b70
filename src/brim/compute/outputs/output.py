"""From unit files to shards: one schema for all, in the order of the input.

Each unit was written with the types of its rows. If all agree, the unit files become the shards; those that differ are
written again with the merged types. With a number of rows per shard, all rows are written again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa

from brim.compute.outputs.rows_file import EXTENSIONS, RowsFile, Writing, read_rows, read_schema, write_rows
from brim.compute.rows.schemas import cast
from brim.compute.steps.row_features import features_of, metadata, unified
from brim.errors import InputError
from brim.formats.card import CardFacts
from brim.plans.cut_shards import shard_name
from brim.progress import Advance
from brim.records import dataclass
from brim.sources.features import as_yaml
from brim.state.atomic_files import rename
from brim.state.ledger import Receipt


class OrderedPool:
    """A thread pool that delivers results in the order of submission.

    For work of Arrow, NumPy and hashing that releases Python's lock. At most `threads` + 1 tasks wait or run, which
    bounds memory; with `threads=0` the caller's thread does the work at once. Always close it.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name) if threads > 0 else None
        self._max_pending = threads + 1
        self._pending: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def do(self, work: Callable[[], Any], take: Callable[[Any], None]) -> None:
        """Submit `work`. `take` gets its result in the caller's thread, now or in a later call."""
        if self._pool is None:
            take(work())
            return
        while len(self._pending) >= self._max_pending:
            self._take_next()
        self._pending.append((self._pool.submit(work), take))

    def drain(self) -> None:
        """Wait until all submitted work is done and its results are taken."""
        while self._pending:
            self._take_next()

    def _take_next(self) -> None:
        future, take = self._pending.popleft()
        take(future.result())

    def close(self) -> None:
        """Drop work that has not started; take no more results."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pending.clear()


def name_shards(shards: Sequence[OutputShard], folder: str, extension: str) -> dict[str, OutputShard]:
    """Name shards by the Hub's convention."""
    counts: dict[str, int] = {}
    for shard in shards:
        counts[shard.split] = counts.get(shard.split, 0) + 1
    numbers: dict[str, int] = {}
    names = {}
    for shard in shards:
        number = numbers[shard.split] = numbers.get(shard.split, -1) + 1
        names[shard_name(folder, shard.split, number, counts[shard.split], extension)] = shard
    return names


@dataclass(frozen=True, slots=True)
class OutputShard:
    """A file that becomes a shard."""

    path: Path
    split: str
    rows: int
    size: int
    sha256: str


def merge_unit_schemas(folder: Path, units: Sequence[Receipt], format: str, empty: pa.Schema) -> pa.Schema:
    """Merge the schemas of all units with rows; without any, return `empty`."""
    schemas: dict[str, pa.Schema] = {}
    names: dict[str, str] = {}
    for unit in units:
        if unit.rows:
            schema = read_schema(folder / unit.name, format)
            key = schema.serialize().to_pybytes().hex()
            schemas.setdefault(key, schema)
            names.setdefault(key, unit.name)
    if not schemas:
        return empty
    try:
        return unified(list(schemas.values()))
    except InputError as error:
        numbers = ", ".join(str(int(name.split(".")[0])) for name in list(names.values())[:3])
        raise InputError(
            f"The function gave values of types that do not go together (seen in units {numbers}): {error.words[0]}",
            hint="Let it return one type for each column, or give the types with features=.",
        ) from error


def make_shards(
    folder: Path, units: Sequence[Receipt], schema: pa.Schema, writing: Writing, split: str, advance: Advance
) -> list[OutputShard]:
    """Make one shard per unit that has rows."""
    shards = []
    units_with_rows = [unit for unit in units if unit.rows] or list(units[:1])
    for unit in units_with_rows:
        path = folder / unit.name
        if read_schema(path, writing.format).equals(schema, check_metadata=True):
            shards.append(OutputShard(path, split, unit.rows, unit.size, unit.sha256))
        else:
            file = write_rows(_work_folder(folder) / unit.name, read_rows(path, writing.format), schema, writing)
            shards.append(
                OutputShard(_work_folder(folder) / unit.name, split, file.rows, file.file.size, file.file.sha256)
            )
        advance(unit.size)
    return shards


def cut_shards(
    folder: Path,
    units: Sequence[Receipt],
    schema: pa.Schema,
    units_format: str,
    writing: Writing,
    rows: int,
    split: str,
    advance: Advance,
) -> list[OutputShard]:
    """Make shards of `rows` rows each; the last may have fewer."""
    shards: list[OutputShard] = []
    file: RowsFile | None = None
    target = Path()

    def close(file: RowsFile) -> None:
        file.close()
        rename(file.file.path, target)
        shards.append(OutputShard(target, split, file.rows, file.file.size, file.file.sha256))

    for table in _tables(folder, units, units_format, schema, advance):
        while table.num_rows or (file is None and not shards):
            if file is None:
                target = _work_folder(folder) / f"{len(shards):08d}{EXTENSIONS[writing.format]}"
                file, remaining = RowsFile(target.with_name(f".{target.name}.tmp"), schema, writing), rows
            part, table = table.slice(0, remaining), table.slice(remaining)
            file.write(part)
            remaining -= part.num_rows
            if remaining == 0:
                close(file)
                file = None
            if not table.num_rows:
                break
    if file is not None:
        close(file)
    return shards


def write_bad_rows(folder: Path, target: Path) -> bool:
    """Write the rows that failed, of all units, to one file; return False if none failed."""
    bad = sorted(folder.glob("*.bad.arrow"))
    if bad:
        schema = unified([read_schema(path, "arrow") for path in bad])
        write_rows(target, (t for path in bad for t in read_rows(path, "arrow")), schema, Writing("parquet"))
    return bool(bad)


def _tables(
    folder: Path, units: Sequence[Receipt], format: str, schema: pa.Schema, advance: Advance
) -> Iterator[pa.Table]:
    yield schema.empty_table()
    for unit in units:
        for table in read_rows(folder / unit.name, format) if unit.rows else ():
            yield cast(table, schema)
        advance(unit.size)


def _work_folder(folder: Path) -> Path:
    """Return the folder for shards that are not unit files. They are made again after a crash."""
    path = folder / "made"
    path.mkdir(exist_ok=True)
    return path


RowFormat = Literal["parquet", "arrow"]
_BATCH_ROWS = {"arrow": 1000, "parquet": 100_000}


@dataclass(frozen=True, slots=True)
class Finished:
    """Shards by name, facts for their card, counts, and notes for the user."""

    shards: Mapping[str, OutputShard]
    card: CardFacts
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Units:
    """The input of `Output.finish`: the unit files of `folder` in order, and the memory limit.

    New files are made in `work`.
    """

    folder: Path
    receipts: Sequence[Receipt]
    limit_bytes: int
    schema: pa.Schema  # of the source
    work: Path
    source: str = "the source"  # its name, for messages


class Output(Protocol):
    """How units are written, and how they become shards: of rows, tokens, or vectors."""

    @property
    def writing(self) -> Writing: ...

    @property
    def facts(self) -> dict[str, Any]:
        """The fingerprint inputs of the output."""

    @property
    def joins(self) -> bool:
        """Whether finishing writes all rows again, instead of using unit files as shards."""

    def check_room(self, limit_bytes: int) -> None:
        """Raise MemoryLimitError, before the first unit, if finishing would exceed the limit."""

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        """Make the files for the destination; those of a dataset are in its folder `shards`.

        After a crash, the same call makes the same files.
        """


@dataclass(frozen=True, slots=True)
class RowsOutput:
    """Rows in Parquet or Arrow shards."""

    format: RowFormat = "parquet"
    rows_per_shard: int | None = None
    split: str = "train"
    writer_batch_rows: int | None = None

    @property
    def _shards(self) -> Writing:
        return Writing(self.format, self.writer_batch_rows or _BATCH_ROWS[self.format])

    @property
    def writing(self) -> Writing:
        return self._shards if self.rows_per_shard is None else Writing("arrow")

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "rows_per_shard": self.rows_per_shard,
            "split": self.split,
            "batch_rows": self._shards.batch_rows,
        }

    @property
    def joins(self) -> bool:
        return self.rows_per_shard is not None

    def check_room(self, limit_bytes: int) -> None:
        """Accept any limit: rows are streamed."""

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        schema = with_features(merge_unit_schemas(units.folder, units.receipts, self.writing.format, units.schema))
        if self.rows_per_shard is None:
            files = make_shards(units.folder, units.receipts, schema, self.writing, self.split, advance)
        else:
            source = (units.folder, units.receipts, schema, self.writing.format)
            files = cut_shards(*source, self._shards, self.rows_per_shard, self.split, advance)
        return Finished(name_shards(files, shards, EXTENSIONS[self.format]), card_of(schema, EXTENSIONS[self.format]))


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Rows in a cache: Arrow files of one schema, which readers map.

    `empty` returns the schema of a result without rows; its argument is whether the input had rows.
    """

    batch_rows: int
    empty: Callable[[bool], pa.Schema]

    @property
    def writing(self) -> Writing:
        return Writing("arrow", self.batch_rows, hashed=False)

    @property
    def facts(self) -> dict[str, Any]:
        return {"batch_rows": self.batch_rows}

    @property
    def joins(self) -> bool:
        return False

    def check_room(self, limit_bytes: int) -> None:
        """Accept any limit: rows are streamed."""

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        """Write files again if their schema differs from the merged one."""
        empty = self.empty(bool(units.receipts))
        schema = with_features(merge_unit_schemas(units.folder, units.receipts, "arrow", empty))
        files = make_shards(units.folder, units.receipts, schema, self.writing, "", advance)
        return Finished({file.path.name: file for file in files}, card_of(schema, EXTENSIONS["arrow"]))


def with_features(schema: pa.Schema) -> pa.Schema:
    """Add `datasets` features for all columns to a schema: those in its metadata, else inferred ones."""
    features = _features(schema)
    return schema.remove_metadata() if features is None else schema.with_metadata(metadata(features))


def _features(schema: pa.Schema) -> dict[str, Any] | None:
    """Return the features of a schema; None if `datasets` has no feature for a type."""
    try:
        return features_of(schema)
    except InputError:
        return None


def card_of(schema: pa.Schema, extension: str) -> CardFacts:
    features = _features(schema)
    columns = [(column.name, str(column.type)) for column in schema]
    return CardFacts([], None if features is None else as_yaml(features), extension, columns)
