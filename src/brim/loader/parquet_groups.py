"""The row groups of a dataset, as a loader needs them: which file, how many rows and bytes, which rows are selected.

Only footers are read. The description can be pickled, so that workers need not read them again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import BrimError, InputError, SourceError
from brim.file_set import Ints
from brim.formats.range_readers import FileView
from brim.records import dataclass
from brim.sources.dataset_files import DatasetFile, RemoteShard, find_files, open_together
from brim.sources.file_table import FileTable
from brim.sources.hive_partitions import partition_fields
from brim.sources.parquet_shards import BROKEN, broken, encrypted, plain_schema
from brim.sources.parquet_source import ParquetOrigin
from brim.sources.selection import JoinedOrigin, Selection
from brim.storage.location import Access

_FOOTERS_AT_ONCE = 64
_KEPT_FOOTER_BYTES = 32_000_000  # of all files; beyond that, readers read them again
_NOT_PARQUET = "Write it as Parquet first: brim build, brim select or brim map."


@dataclass(frozen=True, slots=True)
class RowGroups:
    """Row groups, in the order of the files. `chosen` has the selected rows of a row group, if not all are."""

    files: tuple[DatasetFile, ...]
    metadata: Mapping[int, Any]  # of files, pyarrow's
    file: Ints
    group: Ints
    rows: Ints
    bytes: Ints  # of the columns that are read, decompressed
    chosen: Mapping[int, Ints]
    schema: pa.Schema
    fingerprints: tuple[str, ...]  # of the first 1, 2, … files

    @property
    def fingerprint(self) -> str:
        return self.fingerprints[-1]

    def first_files(self, count: int) -> RowGroups:
        """Return the row groups of the first files."""
        if count == len(self.files):
            return self
        stop = int(np.searchsorted(self.file, count))
        return replace(
            self,
            files=self.files[:count],
            file=self.file[:stop],
            group=self.group[:stop],
            rows=self.rows[:stop],
            bytes=self.bytes[:stop],
            fingerprints=self.fingerprints[:count],
        )


def open_row_groups(
    source: Any, columns: Sequence[str] | None, config: str | None, split: str | None, access: Access, *, ordered: bool
) -> RowGroups:
    """Read the footers of a dataset, and choose columns. `ordered`: the rows of a selection must keep their order."""
    if isinstance(source, FileTable) or not isinstance(source, str | os.PathLike | Selection):
        raise InputError(f"A loader reads Parquet files, not a {type(source).__name__}.", hint=_NOT_PARQUET)
    if isinstance(source, Selection):
        files, picked, names = _selected_files(source, split)
        columns = names if columns is None else columns
    else:
        found = find_files(source, config, split, access)
        if found.format != ".parquet":
            raise InputError(f"{os.fspath(source)!r} is not Parquet.", hint=_NOT_PARQUET)
        files, picked = list(found.files), None
        splits = list(dict.fromkeys(file.split for file in files))
        if len(splits) > 1 and split is None:
            raise InputError("The dataset has several splits.", hint=f"Name one with from_split: {', '.join(splits)}.")
    return _described(files, columns, picked, ordered)


def _selected_files(source: Selection, split: str | None) -> tuple[list[DatasetFile], Ints | None, list[str]]:
    """Return the files of a selection, its row numbers across these files (None: all rows), and its column names."""
    parts = source.rows_of
    if split is None and len(parts) > 1:
        raise InputError(
            "The selection has several splits.", hint=f"Name one with from_split: {', '.join(n for n, _ in parts)}."
        )
    if split is not None and split not in dict(parts):
        raise InputError(f"The selection has no split {split!r}.", hint=f"It has: {', '.join(n for n, _ in parts)}.")
    rows = dict(parts)[split] if split is not None else parts[0][1]
    files, rows = _files_of(source.origin, rows)
    return files, rows, source.column_names


def _files_of(origin: Any, rows: Ints) -> tuple[list[DatasetFile], Ints]:
    """Return the files of an origin of rows, and rows counted over them."""
    if isinstance(origin, ParquetOrigin):
        origin.close()
        return list(origin.shards.files), rows
    if not isinstance(origin, JoinedOrigin):
        raise InputError(f"A loader reads Parquet files, and {origin.name} is another source.", hint=_NOT_PARQUET)
    files: list[DatasetFile] = []
    found, before = np.empty(len(rows), np.int64), 0
    for number, part in enumerate(origin.parts):
        own = np.flatnonzero(origin.part_of[rows] == number)
        inside = np.concatenate([np.zeros(0, np.int64), *(numbers for _, numbers in part.rows_of)])
        more, own_rows = _files_of(part.origin, inside[origin.row_of[rows[own]]])
        found[own] = before + own_rows
        before += len(part.origin)
        files += more
    return files, found


def _described(
    files: Sequence[DatasetFile], columns: Sequence[str] | None, picked: Ints | None, ordered: bool
) -> RowGroups:
    kept: dict[int, Any] = {}
    schemas: list[pa.Schema] = []
    numbers: list[tuple[int, int, int, int]] = []  # file, row group, rows, bytes
    digest, fingerprints, footer_bytes = hashlib.sha256(), list[str](), 0
    names = None if columns is None else list(columns)
    for first in range(0, len(files), _FOOTERS_AT_ONCE):
        for number, metadata in enumerate(read_footers(files[first : first + _FOOTERS_AT_ONCE]), start=first):
            schema = plain_schema(metadata.schema.to_arrow_schema())
            if not schemas or not schema.equals(schemas[-1]):
                schemas.append(schema)
                names = _checked_columns(files, number, schemas, columns)
            wanted = None if names is None else set(names)
            for group in range(metadata.num_row_groups):
                entry = metadata.row_group(group)
                size = entry.total_byte_size if wanted is None else _column_bytes(entry, wanted)
                numbers.append((number, group, entry.num_rows, size))
            digest.update(_footer_digest(metadata))
            fingerprints.append(digest.copy().hexdigest()[:32])
            footer_bytes += metadata.serialized_size
            if footer_bytes <= _KEPT_FOOTER_BYTES:
                kept[number] = metadata
    table = np.array(numbers, np.int64).reshape(-1, 4)
    schema = _common_schema(files, schemas, names)
    rows, chosen = table[:, 2].copy(), dict[int, Ints]()
    if picked is not None:
        rows, chosen, digest_of_rows = _choose_rows(rows, picked, ordered)
        fingerprints = [hashlib.sha256(f"{text} {digest_of_rows}".encode()).hexdigest()[:32] for text in fingerprints]
    bare = tuple(replace(file, listing=None) for file in files)
    return RowGroups(bare, kept, table[:, 0], table[:, 1], rows, table[:, 3], chosen, schema, tuple(fingerprints))


def read_footers(files: Sequence[DatasetFile]) -> list[Any]:
    """Return pyarrow's metadata of files; the footers of remote ones are requested together."""
    remote = [file for file in files if file.remote is not None]
    opened = dict(zip((id(file) for file in remote), open_together(remote), strict=True))
    found = []
    for file in files:
        try:
            found.append(_footer(file, opened.get(id(file))))
        except BrimError:
            raise
        except FileNotFoundError as error:
            raise SourceError(f"{file.shown!r} does not exist any more.", path=file.shown) from error
        except BROKEN as error:
            raise broken(file, error) from error
    return found


def _footer(file: DatasetFile, remote: RemoteShard | None) -> Any:
    if remote is not None:
        mark = remote.read_at(remote.size - 4, 4)
        source: Any = FileView(remote)
    else:
        source = file.path
        with open(file.path, "rb") as local:
            local.seek(max(os.fstat(local.fileno()).st_size - 4, 0))
            mark = local.read(4)
    if mark == b"PARE":
        raise encrypted(file, file.shown)
    with pq.ParquetFile(source, pre_buffer=False) as parquet:
        return parquet.metadata


def _footer_digest(metadata: Any) -> bytes:
    """Return a digest of a footer: it has the sizes, offsets and usually the statistics of all columns."""
    digest = hashlib.sha256()
    for group in range(metadata.num_row_groups):
        entry = metadata.row_group(group)
        digest.update(f"{entry.num_rows} {entry.total_byte_size}".encode())
        for number in range(entry.num_columns):
            column = entry.column(number)
            text = f"{column.path_in_schema} {column.data_page_offset} {column.total_compressed_size}"
            statistics = column.statistics if column.is_stats_set else None
            if statistics is not None and statistics.has_min_max:
                text += f" {statistics.min_raw!r} {statistics.max_raw!r}"
            digest.update(text.encode("utf-8", "surrogateescape"))
    return digest.digest()


def _column_bytes(group: Any, wanted: set[str]) -> int:
    columns = (group.column(number) for number in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in columns if c.path_in_schema.partition(".")[0] in wanted)


def _checked_columns(
    files: Sequence[DatasetFile], number: int, schemas: Sequence[pa.Schema], columns: Sequence[str] | None
) -> list[str] | None:
    """Return the columns to read, after checking that a file has them; None for all."""
    first, schema = schemas[0], schemas[-1]
    if len(set(schema.names)) < len(schema.names):
        raise SourceError(f"{files[number].shown} has two columns of the same name.", path=files[number].shown)
    folders = [field.name for field in partition_fields((file.shown for file in files), first.names)]
    if columns is not None:
        if isinstance(columns, str) or not columns or len(set(columns)) < len(columns):
            raise InputError("columns= must be a list that names each column once.")
        for name in columns:
            if name not in schema.names and name not in folders:
                known = ", ".join([*schema.names, *folders][:30])
                raise InputError(f"The dataset has no column {name!r}.", hint=f"Its columns are: {known}.")
        return list(columns)
    if {*schema.names} != {*first.names}:
        name = sorted({*schema.names} ^ {*first.names})[0]
        raise SourceError(
            f"{files[number].shown} has different columns than {files[0].shown}: {name}.",
            hint="Name the columns that all files have with columns=, or one config with from_config=.",
        )
    return None


def _common_schema(files: Sequence[DatasetFile], schemas: Sequence[pa.Schema], names: list[str] | None) -> pa.Schema:
    """Return the schema of the columns that are read, with the wider type where files differ."""
    folders = partition_fields((file.shown for file in files), schemas[0].names)
    own = names or [*schemas[0].names, *(field.name for field in folders)]
    parts = []
    for schema in schemas:
        fields = {field.name: field for field in (*folders, *schema)}
        parts.append(pa.schema([fields[name] for name in own]).remove_metadata())
    try:
        return pa.unify_schemas(parts, promote_options="permissive")
    except pa.ArrowException as error:
        raise SourceError(
            f"The files have columns of different types: {str(error).splitlines()[0]}.",
            hint="Name columns that have one type in all files with columns=, or one config with from_config=.",
        ) from error


def _choose_rows(rows: Ints, picked: Ints, ordered: bool) -> tuple[Ints, dict[int, Ints], str]:
    """Return how many rows of each row group are selected, which, and a digest of them."""
    if len(picked) > 1 and bool((np.diff(picked) < 0).any()):
        if ordered:
            raise InputError(
                "The selection has an order of its own, which a loader cannot follow from file to file.",
                hint="Use shuffle=True, or write the selection with brim select first.",
            )
        picked = np.sort(picked)
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)])
    cuts = np.searchsorted(picked, edges)
    chosen = {}
    for block, count in enumerate(rows.tolist()):
        own = picked[cuts[block] : cuts[block + 1]] - edges[block]
        if not np.array_equal(own, np.arange(count)):  # some rows, or a row that is taken twice
            chosen[block] = own
    return np.diff(cuts).astype(np.int64), chosen, hashlib.sha256(picked.tobytes()).hexdigest()
