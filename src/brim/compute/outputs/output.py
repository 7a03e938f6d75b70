"""From unit files to shards: one schema for all, in the order of the input.

Each unit was written with the types that its own rows showed. If all agree, unit files are the shards as they are;
those that do not are written again with the type that holds everything. With a number of rows for each shard, all
rows are written again, cut anew.
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


class Beside:
    """Work beside the thread that makes it: several at a time, the results in the order in which they were given.

    For what Arrow, NumPy and hashing do outside of Python's lock. At most so many wait or run, which bounds memory;
    with none (`threads` is 0), everything is done at once by the caller. Close it, whatever happened.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name) if threads > 0 else None
        self._most = threads + 1
        self._waiting: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def do(self, work: Callable[[], Any], take: Callable[[Any], None]) -> None:
        """Have `work` done; its result is taken by the caller's thread, now or in a later call."""
        if self._pool is None:
            take(work())
            return
        while len(self._waiting) >= self._most:
            self._take()
        self._waiting.append((self._pool.submit(work), take))

    def settle(self) -> None:
        """All that was given is done and taken."""
        while self._waiting:
            self._take()

    def _take(self) -> None:
        future, take = self._waiting.popleft()
        take(future.result())

    def close(self) -> None:
        """Nothing more is taken: after an error, what was not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._waiting.clear()


def named(made: Sequence[MadeShard], folder: str, extension: str) -> dict[str, MadeShard]:
    """Shards under the names that the Hub's convention gives them."""
    counts: dict[str, int] = {}
    for one in made:
        counts[one.split] = counts.get(one.split, 0) + 1
    numbers: dict[str, int] = {}
    names = {}
    for one in made:
        number = numbers[one.split] = numbers.get(one.split, -1) + 1
        names[shard_name(folder, one.split, number, counts[one.split], extension)] = one
    return names


@dataclass(frozen=True, slots=True)
class MadeShard:
    """A file that becomes a shard."""

    path: Path
    split: str
    rows: int
    size: int
    sha256: str


def settle(folder: Path, units: Sequence[Receipt], format: str, empty: pa.Schema) -> pa.Schema:
    """The schema that holds the rows of every unit. Without any rows it is `empty`."""
    schemas: dict[str, pa.Schema] = {}
    names: dict[str, str] = {}
    for unit in units:
        if unit.rows:
            schema = read_schema(folder / unit.name, format)
            known = schema.serialize().to_pybytes().hex()
            schemas.setdefault(known, schema)
            names.setdefault(known, unit.name)
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
) -> list[MadeShard]:
    """One shard for each unit that has rows."""
    made = []
    kept = [unit for unit in units if unit.rows] or list(units[:1])
    for unit in kept:
        path = folder / unit.name
        if read_schema(path, writing.format).equals(schema, check_metadata=True):
            made.append(MadeShard(path, split, unit.rows, unit.size, unit.sha256))
        else:
            file = write_rows(_made(folder) / unit.name, read_rows(path, writing.format), schema, writing)
            made.append(MadeShard(_made(folder) / unit.name, split, file.rows, file.file.size, file.file.sha256))
        advance(unit.size)
    return made


def cut_shards(
    folder: Path,
    units: Sequence[Receipt],
    schema: pa.Schema,
    units_format: str,
    writing: Writing,
    rows: int,
    split: str,
    advance: Advance,
) -> list[MadeShard]:
    """Shards of `rows` rows each, the last may have fewer."""
    made: list[MadeShard] = []
    file: RowsFile | None = None
    target = Path()

    def close(file: RowsFile) -> None:
        file.close()
        rename(file.file.path, target)
        made.append(MadeShard(target, split, file.rows, file.file.size, file.file.sha256))

    for table in _tables(folder, units, units_format, schema, advance):
        while table.num_rows or (file is None and not made):
            if file is None:
                target = _made(folder) / f"{len(made):08d}{EXTENSIONS[writing.format]}"
                file, left = RowsFile(target.with_name(f".{target.name}.tmp"), schema, writing), rows
            part, table = table.slice(0, left), table.slice(left)
            file.write(part)
            left -= part.num_rows
            if left == 0:
                close(file)
                file = None
            if not table.num_rows:
                break
    if file is not None:
        close(file)
    return made


def write_bad_rows(folder: Path, target: Path) -> bool:
    """The rows that the step could not do, of all units, in one file; False if there are none."""
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


def _made(folder: Path) -> Path:
    """Where shards lie that are not unit files. They are made again after a crash."""
    path = folder / "made"
    path.mkdir(exist_ok=True)
    return path


RowFormat = Literal["parquet", "arrow"]
_BATCH_ROWS = {"arrow": 1000, "parquet": 100_000}


@dataclass(frozen=True, slots=True)
class Finished:
    """Shards by name, what the card says of them, what was counted on the way, and notes for the user."""

    made: Mapping[str, MadeShard]
    card: CardFacts
    counts: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Units:
    """What there is to finish: the unit files of `folder` in order, and the room there is.

    What is made of them, and is no unit file, is made in `work`.
    """

    folder: Path
    receipts: Sequence[Receipt]
    limit_bytes: int
    schema: pa.Schema  # of the source
    work: Path
    source: str = "the source"  # its name, for messages


class Output(Protocol):
    """How units are written, and what is made of them: rows, tokens, or vectors."""

    @property
    def writing(self) -> Writing: ...

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the output, for the fingerprint."""

    @property
    def joins(self) -> bool:
        """Whether all rows are written again when it is finished: units are not the shards."""

    def check_room(self, limit_bytes: int) -> None:
        """MemoryLimitError if it cannot be made within the limit: said before the first unit."""

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        """The files that the destination shall hold; those of a dataset lie in its folder `shards`.

        Done again, from the start or from where it was, after a crash.
        """


@dataclass(frozen=True, slots=True)
class RowsOutput:
    """Rows as they are: Parquet or Arrow shards."""

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
        """Rows stream."""

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        schema = with_features(settle(units.folder, units.receipts, self.writing.format, units.schema))
        if self.rows_per_shard is None:
            made = make_shards(units.folder, units.receipts, schema, self.writing, self.split, advance)
        else:
            made = cut_shards(
                units.folder,
                units.receipts,
                schema,
                self.writing.format,
                self._shards,
                self.rows_per_shard,
                self.split,
                advance,
            )
        return Finished(named(made, shards, EXTENSIONS[self.format]), card_of(schema, EXTENSIONS[self.format]))


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Rows that stay where they are computed, in files of one schema that are mapped when they are read.

    `empty` gives the schema where no row comes out; it is told whether any went in.
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
        """Rows stream."""

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        """Files that differ from the schema of all are written again."""
        schema = with_features(settle(units.folder, units.receipts, "arrow", self.empty(bool(units.receipts))))
        made = make_shards(units.folder, units.receipts, schema, self.writing, "", advance)
        return Finished({one.path.name: one for one in made}, card_of(schema, EXTENSIONS["arrow"]))


def with_features(schema: pa.Schema) -> pa.Schema:
    """The schema with `datasets`' features for all its columns: those it tells, else what its types are."""
    features = _features(schema)
    return schema.remove_metadata() if features is None else schema.with_metadata(metadata(features))


def _features(schema: pa.Schema) -> dict[str, Any] | None:
    """None where `datasets` has no feature for a type."""
    try:
        return features_of(schema)
    except InputError:
        return None


def card_of(schema: pa.Schema, extension: str) -> CardFacts:
    features = _features(schema)
    columns = [(column.name, str(column.type)) for column in schema]
    return CardFacts([], None if features is None else as_yaml(features), extension, columns)
