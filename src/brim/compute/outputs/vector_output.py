"""Make the file of an embedding job from the units' files.

A `.parquet` file has kept columns and vectors. `.safetensors` and `.npy` have numbers only; the kept columns are in
`NAME.rows.parquet` next to them, row for row. Files are made in a folder of the job. Units are mapped and read in small
tables, and the files are hashed while they are written, in one pass that is repeated after a crash.
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

from brim.compute.outputs.output import Finished, OrderedPool, OutputShard, Units
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
    """The finished files: first the vectors, then the kept columns."""

    rows: int
    files: tuple[Path, ...]
    outputs: Mapping[str, VectorType]
    hashes: Mapping[Path, str] = field(default_factory=dict, compare=False)  # SHA-256 of each file


def rows_path(target: Path) -> Path:
    """Return the path of the kept columns, next to a file that cannot contain them."""
    return target.with_name(f"{target.name}.rows.parquet")


def quarantine_path(target: Path) -> Path:
    """Return the path of the rows on which the model failed."""
    return target.with_name(f"{target.name}.{QUARANTINE}")


def check_target(target: Path) -> None:
    if target.suffix not in SUFFIXES:
        raise InputError(
            f"{target.name!r} does not end in {', '.join(SUFFIXES)}.", hint="The ending chooses the format."
        )


@dataclass(frozen=True, slots=True)
class VectorOutput:
    """All vectors in the file `name` (or one per tensor), whose suffix is the format."""

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
        """Make the files. The vectors are listed last: if they exist, all files do."""
        receipts = [receipt for receipt in units.receipts if receipt.rows]
        paths, rows = [units.folder / receipt.name for receipt in receipts], [receipt.rows for receipt in receipts]
        target = units.work / "made" / self.name
        finished = finish_vectors(paths, target, units.work, rows=rows, advance=advance)
        files = {
            path.name: OutputShard(path, "", finished.rows, path.stat().st_size, finished.hashes[path])
            for path in reversed(finished.files)
        }
        return Finished(files, CardFacts([], None, target.suffix, []), {"rows": finished.rows})


def finish_vectors(
    units: Sequence[Path],
    target: Path,
    work: Path,
    *,
    rows: Sequence[int] | None = None,
    metadata: Mapping[str, str] | None = None,
    advance: Advance = lambda _: None,
) -> FinishedVectors:
    """Write the units' tables to the target. Repeating it gives the same files.

    `work` is a folder of this job alone, on the disk of the target. `rows` are the rows of each unit, if known. An
    existing target is replaced at the end.
    """
    check_target(target)
    schema, outputs = _schema_of(units)
    counts = list(rows) if rows is not None else [_count(unit) for unit in units]
    work.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".parquet":
        temporary = work / "whole.parquet"
        sha256 = _write_parquet(temporary, units, schema, metadata, outputs, advance)
        rename(temporary, target)
        return FinishedVectors(sum(counts), (target,), outputs, {target: sha256})
    kept_columns = [field.name for field in schema if field.name not in outputs]
    hashes: dict[Path, str] = {}
    if kept_columns:
        temporary, kept_path = work / "rows.parquet", rows_path(target)
        columns = pa.schema([schema.field(name) for name in kept_columns])
        hashes[kept_path] = _write_parquet(temporary, units, columns, None, {}, advance)
        rename(temporary, kept_path)
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
    """Write all tensors to one file, or each to its own; return the files with their hashes."""
    tensors = tensors_from({name: (output.dim, output.dtype) for name, output in outputs.items()})
    layouts: list[tuple[Path, SafetensorsLayout | NpyLayout]]
    if target.suffix == ".safetensors":
        layouts = [(target, SafetensorsLayout(tensors, metadata))]
    else:
        layouts = [(npy_path(target, tensor.name, len(tensors) == 1), NpyLayout(tensor)) for tensor in tensors]
    hashes = {path: _write_body(work / path.name, units, tensors, layout, rows, advance) for path, layout in layouts}
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
    """Write a header, then the values of one tensor after the other; each column of a unit is read once."""
    body = layout.body({tensor.name: rows for tensor in tensors})
    tensors_by_name = {tensor.name: tensor for tensor in tensors}
    file, pool = HashedFile(path, hashed=True), OrderedPool(1, "brim-finish")
    try:
        file.write(body.header)
        for name in body.starts:
            for table in _tables(units, [name]):
                for block in batch_for(tensors_by_name[name], table[name]).streams[0]():
                    pool.do(partial(file.write, block), lambda _: None)
                advance(arrow_bytes(table))
        pool.drain()
    finally:
        pool.close()
        file.close()
    if file.size != body.size:
        raise VerificationError(f"The units hold {file.size:,} bytes of vectors, and should hold {body.size:,}.")
    return file.sha256


def _write_parquet(
    path: Path,
    units: Sequence[Path],
    schema: pa.Schema,
    metadata: Mapping[str, str] | None,
    outputs: Mapping[str, VectorType],
    advance: Advance,
) -> str:
    """Write row groups of complete tables; return the SHA-256. Vectors are not compressed, which would not help."""
    whole = schema.with_metadata(dict(metadata)) if metadata else schema.remove_metadata()
    leaf_paths = parquet_leaves(whole).keys()
    plain = {leaf for leaf in leaf_paths if leaf.partition(".")[0] in outputs}
    file = HashedFile(path, hashed=True)
    with (
        closing(file),
        pq.ParquetWriter(
            pa.PythonFile(file, mode="w"),
            whole,
            compression={leaf: "none" if leaf in plain else "zstd" for leaf in leaf_paths},
            use_dictionary=sorted(leaf_paths - plain) or False,
            write_statistics=sorted(leaf_paths - plain) or False,
            **PAGES,
        ) as writer,
    ):
        group: list[pa.Table] = []
        for table in _tables(units, whole.names):
            if group and sum(arrow_bytes(each) for each in group) + arrow_bytes(table) > ROW_GROUP_BYTES:
                _write_group(writer, group, whole)
                group = []
            group.append(table)
            advance(arrow_bytes(table))
        if group:
            _write_group(writer, group, whole)
    return file.sha256


def _write_group(writer: Any, tables: Sequence[pa.Table], schema: pa.Schema) -> None:
    table = pa.concat_tables([table.cast(schema) for table in tables])
    writer.write_table(table, row_group_size=max(table.num_rows, 1))


def _schema_of(units: Sequence[Path]) -> tuple[pa.Schema, Mapping[str, VectorType]]:
    if not units:
        raise InputError("The source has no rows.", hint="There is nothing to embed.")
    with pa.memory_map(str(units[0])) as file, _open_unit(units[0], file) as reader:
        schema = reader.schema
    outputs = vectors_in(schema)
    if not outputs:
        raise VerificationError(f"{units[0].name} holds no vectors.", path=str(units[0]))
    return schema, outputs


def _count(unit: Path) -> int:
    with pa.memory_map(str(unit)) as file, _open_unit(unit, file) as reader:
        return sum(batch.num_rows for batch in reader)


def _tables(units: Sequence[Path], columns: Sequence[str]) -> Iterator[pa.Table]:
    for unit in units:
        with pa.memory_map(str(unit)) as file, _open_unit(unit, file) as reader:
            for batch in reader:
                table = pa.table(batch).select(columns)
                step = max(1, _PIECE_BYTES * table.num_rows // max(arrow_bytes(table), 1))
                for start in range(0, table.num_rows, step):
                    yield table.slice(start, step)


def _open_unit(unit: Path, file: Any) -> Any:
    try:
        return pa.ipc.open_stream(file)
    except pa.ArrowInvalid as error:
        raise VerificationError(f"The unit {unit.name} cannot be read: {error}", path=str(unit)) from error
