"""The file that an embedding job ends in, made of the units' files.

A `.parquet` file has everything: the kept columns and the vectors. `.safetensors` and `.npy` hold numbers only, and
the kept columns lie in `NAME.rows.parquet` beside them, row for row. Everything is made in a folder of the job.
Units are mapped and gone through a table at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from brim.cuts import arrow_bytes
from brim.errors import DamageFound, InputError
from brim.formats.card import CardFacts
from brim.outputs.output import Finished, MadeShard, Units
from brim.outputs.rows_file import Writing
from brim.progress import Advance
from brim.state.durable import rename, sha256_of
from brim.steps.embed_columns import vectors_in
from brim.steps.models import VectorType
from brim.stores.destination import QUARANTINE
from brim.tensors.tensor_files import npy_path
from brim.tensors.tensor_stream import sync_file
from brim.tensors.tensor_writer import TensorWriter

SUFFIXES = (".safetensors", ".npy", ".parquet")
ROW_GROUP_BYTES = 16 * 1024 * 1024  # pyarrow holds a row group three to four times while it writes it
_PIECE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FinishedVectors:
    """What there is now. `files` are the vectors first, then the kept columns."""

    rows: int
    files: tuple[Path, ...]
    outputs: Mapping[str, VectorType]


def rows_path(target: Path) -> Path:
    """Where the kept columns lie, beside a file that cannot hold them."""
    return target.with_name(f"{target.name}.rows.parquet")


def quarantine_path(target: Path) -> Path:
    """Where the rows lie that the model could not do."""
    return target.with_name(f"{target.name}.{QUARANTINE}")


def check_target(target: Path) -> None:
    if target.suffix not in SUFFIXES:
        raise InputError(
            f"{target.name!r} does not end in {', '.join(SUFFIXES)}.", hint="The ending chooses the format."
        )


@dataclass(frozen=True, slots=True)
class VectorOutput:
    """All vectors in the file `name` (or one for each tensor), whose ending is the format."""

    name: str
    batch_rows: int

    @property
    def writing(self) -> Writing:
        return Writing("arrow", self.batch_rows)

    @property
    def facts(self) -> dict[str, Any]:
        return {"file": Path(self.name).suffix}

    def check_room(self, limit_bytes: int) -> None:
        """Tables stream."""

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        """The vectors come last: where they are, all is."""
        receipts = [receipt for receipt in units.receipts if receipt.rows]
        paths, rows = [units.folder / receipt.name for receipt in receipts], [receipt.rows for receipt in receipts]
        target = units.work / "made" / self.name
        done = finish_vectors(paths, target, units.work, rows=rows, advance=advance)
        made = {
            path.name: MadeShard(path, "", done.rows, path.stat().st_size, sha256_of(path, lambda _: advance(0)))
            for path in reversed(done.files)
        }
        return Finished(made, CardFacts([], None, target.suffix, []), {"rows": done.rows})


def finish_vectors(
    units: Sequence[Path],
    target: Path,
    work: Path,
    *,
    rows: Sequence[int] | None = None,
    metadata: Mapping[str, str] | None = None,
    advance: Advance = lambda _: None,
) -> FinishedVectors:
    """Put the units' tables together. Doing it again goes on where it stopped, or does nothing new.

    `work` is a folder of this job alone, on the disk of the target. `rows` are the rows of each unit, if they are
    known. What has the target's name already is replaced at the end.
    """
    check_target(target)
    schema, outputs = _schema_of(units)
    counts = list(rows) if rows is not None else [_count(unit) for unit in units]
    work.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".parquet":
        made = work / "whole.parquet"
        _write_parquet(made, units, schema, metadata, outputs, advance)
        rename(made, target)
        return FinishedVectors(sum(counts), (target,), outputs)
    kept = [field.name for field in schema if field.name not in outputs]
    beside = rows_path(target)
    if kept:
        made = work / "rows.parquet"
        _write_parquet(made, units, pa.schema([schema.field(name) for name in kept]), None, {}, advance)
        rename(made, beside)
    files = _write_tensors(units, counts, target, work, outputs, metadata, advance)
    return FinishedVectors(sum(counts), (*files, beside) if kept else files, outputs)


def _write_tensors(
    units: Sequence[Path],
    counts: Sequence[int],
    target: Path,
    work: Path,
    outputs: Mapping[str, VectorType],
    metadata: Mapping[str, str] | None,
    advance: Advance,
) -> tuple[Path, ...]:
    inside = work / f"vectors{target.suffix}"
    names = list(outputs)
    targets = [target] if target.suffix == ".safetensors" else [npy_path(target, n, len(names) == 1) for n in names]
    made = [inside] if target.suffix == ".safetensors" else [npy_path(inside, n, len(names) == 1) for n in names]
    if any(path.exists() for path in made) and not all(path.exists() for path in made):
        for path in made:  # a crash between two renames
            path.unlink(missing_ok=True)
    spec = {name: (output.dim, output.dtype) for name, output in outputs.items()}
    notes = metadata if target.suffix == ".safetensors" else None
    with TensorWriter(inside, sum(counts), tensors=spec, resume=True, metadata=notes) as writer:
        if not writer.finished:
            for table in _tables_from(units, counts, writer.rows_done, names):
                writer.append({name: table[name] for name in names})
                advance(arrow_bytes(table))
    for one, other in zip(made, targets, strict=True):
        rename(one, other)
    return tuple(targets)


def _write_parquet(
    made: Path,
    units: Sequence[Path],
    schema: pa.Schema,
    metadata: Mapping[str, str] | None,
    outputs: Mapping[str, VectorType],
    advance: Advance,
) -> None:
    """In row groups of whole tables up to a size. Vectors are stored plain: they do not compress."""
    whole = schema.with_metadata(dict(metadata)) if metadata else schema.remove_metadata()
    leaves = _leaf_names(whole)
    plain = {leaf for leaf in leaves if leaf.partition(".")[0] in outputs}
    with pq.ParquetWriter(
        made,
        whole,
        compression={leaf: "none" if leaf in plain else "zstd" for leaf in leaves},
        use_dictionary=sorted(leaves - plain),
        write_statistics=sorted(leaves - plain),
    ) as writer:
        held: list[pa.Table] = []
        for table in _tables(units, whole.names):
            if held and sum(arrow_bytes(each) for each in held) + arrow_bytes(table) > ROW_GROUP_BYTES:
                _write_group(writer, held, whole)
                held = []
            held.append(table)
            advance(arrow_bytes(table))
        if held:
            _write_group(writer, held, whole)
    sync_file(made)


def _write_group(writer: Any, tables: Sequence[pa.Table], schema: pa.Schema) -> None:
    table = pa.concat_tables([table.cast(schema) for table in tables])
    writer.write_table(table, row_group_size=max(table.num_rows, 1))


def _leaf_names(schema: pa.Schema) -> set[str]:
    """The columns as Parquet calls them: `text.list.element`."""
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    parquet = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    return {parquet.column(number).path for number in range(len(parquet.names))}


def _schema_of(units: Sequence[Path]) -> tuple[pa.Schema, Mapping[str, VectorType]]:
    if not units:
        raise InputError("The source has no rows.", hint="There is nothing to embed.")
    with pa.memory_map(str(units[0])) as file, _opened(units[0], file) as reader:
        schema = reader.schema
    outputs = vectors_in(schema)
    if not outputs:
        raise DamageFound(f"{units[0].name} holds no vectors.", path=str(units[0]))
    return schema, outputs


def _count(unit: Path) -> int:
    with pa.memory_map(str(unit)) as file, _opened(unit, file) as reader:
        return sum(batch.num_rows for batch in reader)


def _tables_from(
    units: Sequence[Path], counts: Sequence[int], start: int, columns: Sequence[str]
) -> Iterator[pa.Table]:
    """Tables after the first `start` rows; units that lie before are not opened."""
    left = start
    for unit, count in zip(units, counts, strict=True):
        if left >= count:
            left -= count
            continue
        for table in _tables([unit], columns):
            yield from [table.slice(left)] if left < table.num_rows else []
            left = max(0, left - table.num_rows)


def _tables(units: Sequence[Path], columns: Sequence[str]) -> Iterator[pa.Table]:
    for unit in units:
        with pa.memory_map(str(unit)) as file, _opened(unit, file) as reader:
            for batch in reader:
                table = pa.table(batch).select(columns)
                step = max(1, _PIECE_BYTES * table.num_rows // max(arrow_bytes(table), 1))
                for start in range(0, table.num_rows, step):
                    yield table.slice(start, step)


def _opened(unit: Path, file: Any) -> Any:
    try:
        return pa.ipc.open_stream(file)
    except pa.ArrowInvalid as error:
        raise DamageFound(f"The unit {unit.name} cannot be read: {error}", path=str(unit)) from error
