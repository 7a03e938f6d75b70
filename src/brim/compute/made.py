"""From unit files to shards: one schema for all, in the order of the input.

Each unit was written with the types that its own rows showed. If all agree, unit files are the shards as they are;
those that do not are written again with the type that holds everything. With a number of rows for each shard, all
rows are written again, cut anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from brim.compute.features import unified
from brim.compute.outfile import EXTENSIONS, RowsFile, read_rows, read_schema, write_rows
from brim.compute.setup import Writing
from brim.durable import rename
from brim.engine.ledger import Receipt
from brim.errors import InputError
from brim.progress import Advance
from brim.sources.rows.schemas import cast


@dataclass(frozen=True, slots=True)
class Made:
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
) -> list[Made]:
    """One shard for each unit that has rows."""
    made = []
    kept = [unit for unit in units if unit.rows] or list(units[:1])
    for unit in kept:
        path = folder / unit.name
        if read_schema(path, writing.format).equals(schema, check_metadata=True):
            made.append(Made(path, split, unit.rows, unit.size, unit.sha256))
        else:
            file = write_rows(_made(folder) / unit.name, read_rows(path, writing.format), schema, writing)
            made.append(Made(_made(folder) / unit.name, split, file.rows, file.file.size, file.file.sha256))
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
) -> list[Made]:
    """Shards of `rows` rows each, the last may have fewer."""
    made: list[Made] = []
    file: RowsFile | None = None
    target = Path()

    def close(file: RowsFile) -> None:
        file.close()
        rename(file.file.path, target)
        made.append(Made(target, split, file.rows, file.file.size, file.file.sha256))

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
