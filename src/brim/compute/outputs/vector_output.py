"""The file that an embedding job ends in, made of the units' files.

A `.parquet` file has everything: the kept columns and the vectors. `.safetensors` and `.npy` hold numbers only, and
the kept columns lie in `NAME.rows.parquet` beside them, row for row. Everything is made in a folder of the job.
Units are mapped and gone through a table at a time, and the files are hashed while they are written. What is made is
written from its first byte to its last, so that a crash costs no more than doing it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from brim.compute.outputs.output import Beside, Finished, MadeShard, Units
from brim.compute.outputs.rows_file import PAGES, HashedFile, Writing, parquet_leaves
from brim.compute.steps.embed_step import vectors_in
from brim.compute.steps.embedding_models import VectorType
from brim.errors import InputError, VerificationError
from brim.formats.card import CardFacts
from brim.partition import arrow_bytes
from brim.progress import Advance
from brim.records import dataclass
from brim.state.atomic_files import rename
from brim.storage.destination_address import QUARANTINE
from brim.tensors.tensor_batches import batch_for
from brim.tensors.tensor_files import NpyLayout, SafetensorsLayout, Tensor, npy_path, tensors_from

SUFFIXES = (".safetensors", ".npy", ".parquet")
ROW_GROUP_BYTES = 16 * 1024 * 1024  # pyarrow holds a row group three to four times while it writes it
_PIECE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FinishedVectors:
    """What there is now. `files` are the vectors first, then the kept columns."""

    rows: int
    files: tuple[Path, ...]
    outputs: Mapping[str, VectorType]
    hashes: Mapping[Path, str] = field(default_factory=dict, compare=False)  # SHA-256 of each file


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

    @property
    def joins(self) -> bool:
        return True

    def check_room(self, limit_bytes: int) -> None:
        """Tables stream."""

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        """The vectors come last: where they are, all is."""
        receipts = [receipt for receipt in units.receipts if receipt.rows]
        paths, rows = [units.folder / receipt.name for receipt in receipts], [receipt.rows for receipt in receipts]
        target = units.work / "made" / self.name
        done = finish_vectors(paths, target, units.work, rows=rows, advance=advance)
        made = {
            path.name: MadeShard(path, "", done.rows, path.stat().st_size, done.hashes[path])
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
    """Put the units' tables together. Doing it again gives the same files.

    `work` is a folder of this job alone, on the disk of the target. `rows` are the rows of each unit, if they are
    known. What has the target's name already is replaced at the end.
    """
    check_target(target)
    schema, outputs = _schema_of(units)
    counts = list(rows) if rows is not None else [_count(unit) for unit in units]
    work.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".parquet":
        made = work / "whole.parquet"
        sha256 = _write_parquet(made, units, schema, metadata, outputs, advance)
        rename(made, target)
        return FinishedVectors(sum(counts), (target,), outputs, {target: sha256})
    kept = [field.name for field in schema if field.name not in outputs]
    hashes: dict[Path, str] = {}
    if kept:
        made, beside = work / "rows.parquet", rows_path(target)
        columns = pa.schema([schema.field(name) for name in kept])
        hashes[beside] = _write_parquet(made, units, columns, None, {}, advance)
        rename(made, beside)
    tensors = _write_tensors(units, sum(counts), target, work, outputs, metadata, advance)
    return FinishedVectors(sum(counts), (*tensors, *hashes), outputs, tensors | hashes)


def _write_tensors(
    units: Sequence[Path],
    rows: int,
    target: Path,
    work: Path,
    outputs: Mapping[str, VectorType],
    metadata: Mapping[str, str] | None,
    advance: Advance,
) -> dict[Path, str]:
    """The files and their hashes: all tensors in one, or one in each."""
    tensors = tensors_from({name: (output.dim, output.dtype) for name, output in outputs.items()})
    made: list[tuple[Path, SafetensorsLayout | NpyLayout]]
    if target.suffix == ".safetensors":
        made = [(target, SafetensorsLayout(tensors, metadata))]
    else:
        made = [(npy_path(target, tensor.name, len(tensors) == 1), NpyLayout(tensor)) for tensor in tensors]
    hashes = {path: _write_body(work / path.name, units, tensors, layout, rows, advance) for path, layout in made}
    for path in hashes:
        rename(work / path.name, path)
    return hashes


def _write_body(
    path: Path,
    units: Sequence[Path],
    tensors: Sequence[Tensor],
    layout: SafetensorsLayout | NpyLayout,
    rows: int,
    advance: Advance,
) -> str:
    """A header, then the values of one tensor after the other: of a unit's columns, each is read once."""
    body = layout.body({tensor.name: rows for tensor in tensors})
    named = {tensor.name: tensor for tensor in tensors}
    file, beside = HashedFile(path, hashed=True), Beside(1, "brim-finish")
    try:
        file.write(body.header)
        for name in body.starts:
            for table in _tables(units, [name]):
                for block in batch_for(named[name], table[name]).streams[0]():
                    beside.do(partial(file.write, block), lambda _: None)
                advance(arrow_bytes(table))
        beside.settle()
    finally:
        beside.close()
        file.close()
    if file.size != body.size:
        raise VerificationError(f"The units hold {file.size:,} bytes of vectors, and should hold {body.size:,}.")
    return file.sha256


def _write_parquet(
    made: Path,
    units: Sequence[Path],
    schema: pa.Schema,
    metadata: Mapping[str, str] | None,
    outputs: Mapping[str, VectorType],
    advance: Advance,
) -> str:
    """In row groups of whole tables up to a size. Vectors are plain: they do not compress. The SHA-256 of the file."""
    whole = schema.with_metadata(dict(metadata)) if metadata else schema.remove_metadata()
    leaves = parquet_leaves(whole).keys()
    plain = {leaf for leaf in leaves if leaf.partition(".")[0] in outputs}
    file = HashedFile(made, hashed=True)
    with (
        closing(file),
        pq.ParquetWriter(
            pa.PythonFile(file, mode="w"),
            whole,
            compression={leaf: "none" if leaf in plain else "zstd" for leaf in leaves},
            use_dictionary=sorted(leaves - plain) or False,
            write_statistics=sorted(leaves - plain) or False,
            **PAGES,
        ) as writer,
    ):
        held: list[pa.Table] = []
        for table in _tables(units, whole.names):
            if held and sum(arrow_bytes(each) for each in held) + arrow_bytes(table) > ROW_GROUP_BYTES:
                _write_group(writer, held, whole)
                held = []
            held.append(table)
            advance(arrow_bytes(table))
        if held:
            _write_group(writer, held, whole)
    return file.sha256


def _write_group(writer: Any, tables: Sequence[pa.Table], schema: pa.Schema) -> None:
    table = pa.concat_tables([table.cast(schema) for table in tables])
    writer.write_table(table, row_group_size=max(table.num_rows, 1))


def _schema_of(units: Sequence[Path]) -> tuple[pa.Schema, Mapping[str, VectorType]]:
    if not units:
        raise InputError("The source has no rows.", hint="There is nothing to embed.")
    with pa.memory_map(str(units[0])) as file, _opened(units[0], file) as reader:
        schema = reader.schema
    outputs = vectors_in(schema)
    if not outputs:
        raise VerificationError(f"{units[0].name} holds no vectors.", path=str(units[0]))
    return schema, outputs


def _count(unit: Path) -> int:
    with pa.memory_map(str(unit)) as file, _opened(unit, file) as reader:
        return sum(batch.num_rows for batch in reader)


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
        raise VerificationError(f"The unit {unit.name} cannot be read: {error}", path=str(unit)) from error
