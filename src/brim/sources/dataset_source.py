"""A dataset of `datasets` (in memory, mapped from disk or streamed) as a source.

What is built from it loads to the same features, rows and bytes as the result of `Dataset.push_to_hub`, and is not
held in memory. Data that a job would otherwise hold is written to the spill folder, so that it can be read like any
other file. The caller owns the folder: its files are needed until the job has ended, and useless afterwards.

A value of media (images, sounds, films, scans) has bytes, or the path of a file, or both. Bytes in a memory-mapped
Arrow file are a range of that file; a path without bytes is the file; bytes that are only in memory, or remote, are
spilled. The bytes and the base name are published, as `datasets` embeds them.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim import partition as cuts
from brim.errors import DestinationUnavailableError, InputError, SourceError
from brim.extras import missing
from brim.file_set import FILE_TYPE, NO_CONTENT, Bools, Ints, RangeSetBuilder
from brim.formats.parquet_levels import is_list_type, list_array, single_array
from brim.records import dataclass
from brim.sizes import format_size
from brim.sources.datasets_private import read_undecoded, resolve_features, row_order, tokens_of
from brim.sources.file_table import FileColumn, FileTable, Refused, Split
from brim.sources.folder_tree import Folder, LocalTree, Walk
from brim.sources.source_options import check_split
from brim.state.atomic_files import pread_all, reason

_SMALL_BYTES = 16_000_000  # columns that take less are sorted in memory
_CAST_BYTES, _CAST_ROWS = 1_000_000, 1000


def batches_of(table: Any, rows: Ints | None) -> Iterator[pa.Table]:
    """Yield the rows of a `datasets.table.Table` in batches; in the order of `rows` if that is given."""
    from datasets.formatting import query_table

    weights = cuts.row_bytes(table.table)
    weights = weights if rows is None else weights[rows]
    edges = cuts.fill(weights, BATCH_BYTES, BATCH_ROWS).tolist()
    for start, stop in itertools.pairwise(edges):
        key = slice(start, stop) if rows is None else rows[start:stop].tolist()
        yield query_table(table, key).combine_chunks()


def _embedded(tables: Iterator[pa.Table], feature: Any, name: str, tokens: Any) -> Iterator[pa.Table]:
    """Embed the media of tables of one column, as `datasets` does; row by row where files are read."""
    from datasets.table import embed_array_storage

    for table in tables:
        step = 1 if _names_files(table.column(0)) else max(len(table), 1)
        for start in range(0, len(table), step):
            column = table.column(0).slice(start, step)
            try:
                column = embed_array_storage(column, feature, token_per_repo_id=tokens)
            except (OSError, TypeError, ValueError, ImportError, pa.ArrowException) as error:
                raise SourceError(f"A file of the column {name!r} cannot be embedded: {error}.") from error
            yield pa.table({name: column})


def _names_files(array: Any) -> bool:
    """Return whether a struct at any depth has a path and no bytes."""
    if isinstance(array, pa.ChunkedArray):
        return any(_names_files(chunk) for chunk in array.chunks)
    if isinstance(array, pa.ExtensionArray):
        return _names_files(array.storage)
    kind = array.type
    if pa.types.is_struct(kind):
        if {"bytes", "path"} <= {field.name for field in kind}:
            is_empty = array.field("bytes").is_null().to_numpy(zero_copy_only=False)
            return bool((is_empty & array.field("path").is_valid().to_numpy(zero_copy_only=False)).any())
        return any(_names_files(child) for child in array.flatten())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _names_files(array.flatten())
    return False


class _DoesNotFit(Exception):
    """Values cannot be cast to the features. Never leaves this module."""


def _read_stream(stream: Any, split: str, spill: Spill) -> tuple[pa.Table, Any]:
    """Return the rows of a stream as a table that is mapped from disk, and its features."""
    from datasets.table import CastError, cast_table_to_features

    def cast(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
        """Cast tables of one row to the features, several at a time where their own types agree."""
        for table in gathered(tables, _CAST_BYTES, _CAST_ROWS):
            for name in features:
                if name not in table.column_names:
                    table = table.append_column(name, pa.nulls(len(table)))
            try:
                table = cast_table_to_features(table, features)
            except TypeError as error:  # a text where the first rows had null
                raise _DoesNotFit(str(error)) from error
            yield table.replace_schema_metadata(None)

    try:
        with suppress(StopIteration):  # an empty stream
            stream = resolve_features(stream)
        if not stream.features:
            raise SourceError(
                f"The split {split!r} has no rows, so its columns are unknown.",
                hint="Set the features of the dataset.",
            )
        features = stream.features
        spill.announce(f"the stream of the split {split!r}")
        plain, decoding = read_undecoded(stream)
        if decoding:
            spill.note(
                f"the split {split!r} decodes media before a map or filter and encodes them again after it; "
                "cast_column(NAME, Type(decode=False)) before it, and back after it, keeps their bytes"
            )
        # Rows are read singly, because one may be huge.
        return spill.rows(features.arrow_schema.remove_metadata(), cast(plain.iter(batch_size=1))), features
    except (CastError, _DoesNotFit, pa.ArrowException) as error:
        raise SourceError(
            f"The rows of the split {split!r} do not match its features: {' '.join(str(error).split())}.",
            hint="Set features that match every row.",
        ) from error


def dataset_source(
    dataset: Any,
    *,
    split: str | None = None,
    embed_external_files: bool = True,
    spill: Path,
    note: Callable[[str], None] = lambda text: None,
) -> FileTable:
    """Make the file table of a Dataset, IterableDataset, or a dict of either.

    Files in the folder `spill` are part of the table: keep it until the build has ended, then remove it. `note` gets a
    text about what is written there.
    """
    spilled = Spill(spill, note)
    parts = [_part(each, name, spilled) for name, each in _splits(dataset, split)]
    features = _same_features(parts)
    tokens = {key: token for part in parts for key, token in part.tokens.items()}
    reader = _Reader(features, spilled, embed_external_files, tokens)
    tables, splits, start = [], [], 0
    for part in parts:
        tables.append(reader.rows(part))
        splits.append(Split(part.split, start, start + len(tables[-1])))
        start = splits[-1].stop
    spilled.finish()
    pa.default_memory_pool().release_unused()  # the numbers of a million values took several times their size
    return FileTable(
        rows=pa.concat_tables(tables),
        columns={name: FileColumn(media.kind, media.is_list) for name, media in reader.media.items()},
        files=reader.columns.files.finish(),
        features=json.loads(json.dumps(features.to_dict())),
        splits=tuple(splits),
        refused=tuple(reader.columns.refused),
        verbatim=True,
        borrowed=frozenset(features) - set(reader.media),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A split: a `datasets.table.Table`, and the order in which its rows are published, if it is another one."""

    split: str
    table: Any
    rows: Ints | None
    features: Any
    tokens: Mapping[str, Any]


def _splits(dataset: Any, split: str | None) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise missing("datasets", "Reading a dataset of `datasets` needs that library.") from error
    if isinstance(dataset, datasets.DatasetDict | datasets.IterableDatasetDict):
        if split is not None:
            raise InputError("split= can only be used with one dataset; the keys of a dict are its splits.")
        if not dataset:
            raise InputError("The dict of datasets is empty.", hint="There is nothing to build.")
        splits = {str(name): each for name, each in dataset.items()}
    else:
        own = getattr(dataset, "split", None)
        splits = {str(split) if split else (str(own) if own is not None else "train"): dataset}
    for name, each in splits.items():
        if not isinstance(each, datasets.Dataset | datasets.IterableDataset):
            raise InputError(
                f"This is a {type(each).__name__}, not a dataset of `datasets`.",
                hint="Use a Dataset, an IterableDataset, a DatasetDict or an IterableDatasetDict.",
            )
        check_split(name)
        yield name, each


def _part(dataset: Any, split: str, spill: Spill) -> _Part:
    import datasets

    if isinstance(dataset, datasets.Dataset):
        return _Part(split, dataset.data, row_order(dataset), dataset.features, {})
    table, features = _read_stream(dataset, split, spill)
    return _Part(split, datasets.table.InMemoryTable(table), None, features, tokens_of(dataset))


def _same_features(parts: list[_Part]) -> Any:
    first = parts[0]
    for part in parts[1:]:
        if part.features != first.features:
            names = {*part.features, *first.features}
            differs = sorted(n for n in names if part.features.get(n) != first.features.get(n))
            raise InputError(
                f"The splits {first.split!r} and {part.split!r} differ in the column {differs[0]!r}.",
                hint="All splits must have the same features.",
            )
    return first.features


class _Reader:
    """Turns splits into rows of one file table."""

    def __init__(self, features: Any, spill: Spill, embed: bool, tokens: Mapping[str, Any]) -> None:
        self.features = features
        self.schema: pa.Schema = features.arrow_schema.remove_metadata()
        by_name = {field.name: media_of(features[field.name], field.type) for field in self.schema}
        self.media: dict[str, Media] = {name: media for name, media in by_name.items() if media is not None}
        self.columns = MediaColumns(spill, embed, tokens)
        self._spill = spill
        self._embed = embed
        self._tokens = tokens

    def rows(self, part: _Part) -> pa.Table:
        """Return the rows of a split, with numbers of files in the columns of media."""
        from datasets.features.features import require_storage_embed

        columns: dict[str, Any] = {}
        plain = []
        for field in self.schema:
            if field.name in self.media:
                column = part.table.table.column(field.name)
                columns[field.name] = self.columns.number(column, self.media[field.name], part.rows)
            elif self._embed and require_storage_embed(self.features[field.name]):
                columns[field.name] = self._embedded(part, field.name)
            else:
                plain.append(field.name)
        if plain:
            ordered = self._in_order(part, plain)
            columns |= {name: ordered.column(name) for name in plain}
        rows = pa.table({field.name: columns[field.name] for field in self.schema})
        fields = [field if field.name not in self.media else rows.schema.field(field.name) for field in self.schema]
        return rows if rows.schema.types == [field.type for field in fields] else rows.cast(pa.schema(fields))

    def _in_order(self, part: _Part, names: list[str]) -> pa.Table:
        """Return columns in the order of the split's rows; large ones on disk."""
        table = part.table.select(names)
        if part.rows is None:
            return table.table
        tables = batches_of(table, part.rows)
        schema = table.schema.remove_metadata()
        if int(cuts.row_bytes(table.table)[part.rows].sum()) <= _SMALL_BYTES:
            return pa.concat_tables([table.table.slice(0, 0), *tables])
        self._spill.announce(f"the rows of the split {part.split!r} in order")
        return self._spill.rows(schema, (batch.replace_schema_metadata(None) for batch in tables))

    def _embedded(self, part: _Part, name: str) -> pa.ChunkedArray:
        """Return a column with media at any depth, embedded by `datasets`."""
        self._spill.announce(f"the column {name!r} of the split {part.split!r}, with its files embedded")
        tables = _embedded(batches_of(part.table.select([name]), part.rows), self.features[name], name, self._tokens)
        return self._spill.rows(pa.schema([self.schema.field(name)]), tables).column(0)


BATCH_BYTES = 16_000_000  # rows are gathered up to this before they are written; a larger row is written alone
BATCH_ROWS = 10_000


class Spill:
    """A folder for temporary files. `note` gets a text about written files, and their size."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self.folder = folder.absolute()
        self.note = note
        self._files = 0
        self.bytes = 0

    def announce(self, content: str) -> None:
        """Note that something is about to be written, before it takes disk and time."""
        self.note(f"spilling {content} to disk in {self.folder}")

    def finish(self) -> None:
        if self.bytes:
            self.note(f"spilled {format_size(self.bytes)} to disk in {self.folder}")

    def rows(self, schema: pa.Schema, tables: Iterable[pa.Table]) -> pa.Table:
        """Write the rows of small tables to a file, and return them as one table that is mapped from it."""
        path = self.new_path(".arrow")
        with self.failures():
            file = open(path, "wb")  # noqa: SIM115  # closed below; errors of `tables` must not pass `failures`
        with file:
            writer = pa.ipc.new_stream(file, schema)
            for table in gathered(tables, BATCH_BYTES, BATCH_ROWS):
                with self.failures():
                    writer.write_table(table)
            with self.failures():
                writer.close()
                file.flush()
        self.bytes += path.stat().st_size
        return pa.ipc.open_stream(pa.memory_map(str(path))).read_all()

    def new_path(self, extension: str) -> Path:
        with self.failures():
            self.folder.mkdir(parents=True, exist_ok=True)
        self._files += 1
        return self.folder / f"spill-{os.getpid()}-{self._files:04d}{extension}"

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turn errors of the system about writing into errors that name the folder."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
                raise
            raise DestinationUnavailableError(
                f"{str(self.folder)!r}, the folder for temporary files, cannot be written to: {reason(error)}.",
                hint="Free disk space there, or choose another folder.",
            ) from error


class Blob:
    """A file that values are appended to. It is created with the first value, which notes `what`."""

    def __init__(self, spill: Spill, content: str) -> None:
        self._spill, self._content = spill, content
        self._file: BinaryIO | None = None
        self._size = 0

    @property
    def path(self) -> str | None:
        return None if self._file is None else self._file.name

    def append(self, data: Any) -> int:
        """Append data, and return its offset."""
        start = self._size
        with self._spill.failures():
            if self._file is None:
                self._spill.announce(self._content)
                self._file = open(self._spill.new_path(".bin"), "wb")  # noqa: SIM115  # closed by close()
            self._file.write(data)
        self._size += len(data)
        self._spill.bytes += len(data)
        return start

    def close(self) -> None:
        with self._spill.failures():
            if self._file is not None:
                self._file.close()


def gathered(tables: Iterable[pa.Table], max_bytes: int, max_rows: int) -> Iterator[pa.Table]:
    """Put small tables of the same schema together, as long as they stay small."""
    waiting: list[pa.Table] = []
    size = rows = 0
    for table in tables:
        table_bytes = table.nbytes
        is_full = size + table_bytes > max_bytes or rows + len(table) > max_rows
        if waiting and (is_full or not table.schema.equals(waiting[0].schema)):
            yield pa.concat_tables(waiting).combine_chunks() if len(waiting) > 1 else waiting[0]
            waiting, size, rows = [], 0, 0
        if table_bytes > max_bytes:  # not held while the next one is made
            yield table
            continue
        waiting.append(table)
        size, rows = size + table_bytes, rows + len(table)
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks() if len(waiting) > 1 else waiting[0]


_MAPS = "/proc/self/maps"
_PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Mapping:
    start: int
    end: int
    offset: int
    path: str


class Mappings:
    """The files that are mapped into this process at the moment when this is made."""

    def __init__(self) -> None:
        self._mappings: list[_Mapping] = []
        lines: list[str] = []
        with suppress(OSError), open(_MAPS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.readlines()
        for line in lines:
            parts = line.rstrip("\n").split(maxsplit=5)
            # The name of a deleted file leads nowhere, or to another file.
            if len(parts) == 6 and parts[5].startswith("/") and not parts[5].endswith(" (deleted)"):
                start, end = (int(part, 16) for part in parts[0].split("-"))
                self._mappings.append(_Mapping(start, end, int(parts[2], 16), parts[5].replace("\\012", "\n")))
        self._mappings.sort(key=lambda mapping: mapping.start)
        self._starts = [mapping.start for mapping in self._mappings]

    def find(self, buffer: Any) -> tuple[str, int] | None:
        """Return the path of the file that an Arrow buffer is a view of, and the offset of the buffer in it."""
        number = bisect_right(self._starts, buffer.address) - 1
        if number < 0 or buffer.size == 0:
            return None
        first = mapping = self._mappings[number]
        while mapping.end < buffer.address + buffer.size:  # the kernel may have split a mapping
            number += 1
            if number == len(self._mappings):
                return None
            following = self._mappings[number]
            offset = mapping.offset + mapping.end - mapping.start
            if (mapping.end, mapping.path, offset) != (following.start, following.path, following.offset):
                return None
            mapping = following
        offset = first.offset + buffer.address - first.start
        return (first.path, offset) if _has_bytes_of(first.path, offset, buffer) else None


def _has_bytes_of(path: str, offset: int, buffer: Any) -> bool:
    """Return whether a file has the bytes of a buffer, at both ends: layered file systems change device and inode."""
    size = min(_PROBE_BYTES, buffer.size)
    tail = buffer.size - size
    view = memoryview(buffer).cast("B")  # Arrow's own view is one of signed numbers
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        probes = ((0, offset), (tail, offset + tail))
        return all(pread_all(descriptor, size, position) == view[start : start + size] for start, position in probes)
    finally:
        os.close(descriptor)


# The features of `datasets` whose bytes come before their path, and that embed a file unchanged.
_KINDS = frozenset(["Image", "Audio", "Video", "Pdf", "Nifti", "Mesh"])
_IN_BLOB = -2  # the holder of values in the blob, until the blob is finished and has a number
_BLOCK = 65536


@dataclass(frozen=True, slots=True)
class Media:
    """A feature whose values are files, and whether a column has lists of them."""

    kind: str
    feature: Any
    is_list: bool


def media_of(feature: Any, kind: pa.DataType) -> Media | None:
    """Return the media of a column whose values are files, alone or in lists; None for all other columns."""
    name = type(feature).__name__
    if name in _KINDS and kind == FILE_TYPE:
        return Media(name.lower(), feature, is_list=False)
    if name in ("List", "LargeList") and is_list_type(kind):
        inner = media_of(feature.feature, kind.value_type)
        if inner is not None and not inner.is_list:
            return Media(inner.kind, inner.feature, is_list=True)
    return None


class _Values:
    """The locations of the values of a column, in the order in which they are published."""

    def __init__(self, count: int) -> None:
        self.valid: Bools = np.zeros(count, bool)
        self.holders: Ints = np.full(count, NO_CONTENT, np.int64)
        self.starts: Ints = np.zeros(count, np.int64)
        self.sizes: Ints = np.zeros(count, np.int64)
        self.paths = pa.nulls(count, pa.large_string())


class MediaColumns:
    """Turns columns into numbers of one set of files."""

    def __init__(self, spill: Spill, embed: bool, tokens: Mapping[str, Any]) -> None:
        self.files = RangeSetBuilder()
        self.refused: list[Refused] = []
        self._spill, self._embed, self._tokens = spill, embed, tokens
        self._walk = Walk(LocalTree(""), refused=self.refused)
        self._containers: dict[str, int] = {}

    def number(self, column: pa.ChunkedArray, media: Media, rows: Ints | None) -> pa.Array:
        """Return the numbers of a column's values (int64, or lists of it), in the order of `rows` if that is given."""
        if not media.is_list:
            return self._number_values(column.chunks, media, rows)
        # Where the list of each row starts among the values of all chunks, and how long it is.
        all_starts, all_lengths, base = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
        for chunk in column.chunks:
            offsets = chunk.offsets.to_numpy().astype(np.int64)
            is_valid = chunk.is_valid().to_numpy(zero_copy_only=False)
            all_starts.append(offsets[:-1] + base)
            all_lengths.append(np.where(is_valid, np.diff(offsets), 0))
            base += len(chunk.values)
        starts, lengths = np.concatenate(all_starts), np.concatenate(all_lengths)
        is_null = single_array(column.is_null()) if column.null_count else None
        if rows is not None:
            starts, lengths = starts[rows], lengths[rows]
            is_null = None if is_null is None else is_null.take(pa.array(rows))
        before = cuts.running(lengths)
        positions = np.repeat(starts - before[:-1], lengths) + np.arange(before[-1])
        values = self._number_values([chunk.values for chunk in column.chunks], media, positions)
        kind = pa.large_list(pa.int64()) if pa.types.is_large_list(column.type) else pa.list_(pa.int64())
        return list_array(kind, lengths, values, is_null)

    def _number_values(self, chunks: list[Any], media: Media, positions: Ints | None) -> pa.Array:
        if positions is None:
            positions = np.arange(sum(len(chunk) for chunk in chunks), dtype=np.int64)
        values = _Values(len(positions))
        with closing(Blob(self._spill, f"the bytes of {media.kind} values that are in no local file")) as blob:
            self._locate(chunks, positions, values, blob)
            has_path = np.asarray(values.paths.is_valid().to_numpy(zero_copy_only=False))
            outside = values.valid & (values.holders == NO_CONTENT) & has_path
            if self._embed and outside.any():
                self._take_files(values, np.flatnonzero(outside), media, blob)
        if blob.path is not None:
            values.holders[values.holders == _IN_BLOB] = self._container(blob.path)
        paths = pc.replace_substring_regex(values.paths, r"(?s)^.*/", "") if self._embed else values.paths
        valid = np.flatnonzero(values.valid)
        numbers = np.zeros(len(positions), np.int64)
        numbers[valid] = self.files.add(
            paths.take(pa.array(valid)), values.holders[valid], values.starts[valid], values.sizes[valid]
        )
        return pa.array(numbers, mask=~values.valid)

    def _locate(self, chunks: list[Any], file_positions: Ints, values: _Values, blob: Blob) -> None:
        """Locate the bytes that are inside the column."""
        order = np.argsort(file_positions, kind="stable")
        in_order = file_positions[order]
        mappings = Mappings()
        paths = [pa.array([], pa.large_string())]
        base = 0
        for chunk in chunks:
            low, high = np.searchsorted(in_order, [base, base + len(chunk)])
            targets, positions = order[low:high], in_order[low:high] - base
            base += len(chunk)
            if not len(targets):
                continue
            is_valid = chunk.is_valid().to_numpy(zero_copy_only=False)[positions]
            values.valid[targets] = is_valid
            path = chunk.field("path").take(pa.array(positions)).cast(pa.large_string())
            paths.append(pc.if_else(pa.array(is_valid), path, pa.scalar(None, pa.large_string())))
            content = chunk.field("bytes")
            has_bytes = is_valid & content.is_valid().to_numpy(zero_copy_only=False)[positions]
            if has_bytes.any():
                self._locate_bytes(content, positions[has_bytes], targets[has_bytes], values, mappings, blob)
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        values.paths = pa.concat_arrays(paths).take(pa.array(back))

    def _locate_bytes(
        self, content: Any, positions: Ints, targets: Ints, values: _Values, mappings: Mappings, blob: Blob
    ) -> None:
        _, offsets, data = content.buffers()
        ends = np.frombuffer(offsets, np.int32)[content.offset : content.offset + len(content) + 1].astype(np.int64)
        starts, sizes = ends[positions], ends[positions + 1] - ends[positions]
        values.sizes[targets] = sizes
        mapped_offset = mappings.find(data) if data is not None and sizes.any() else None
        if mapped_offset is not None:
            path, offset = mapped_offset
            values.holders[targets], values.starts[targets] = self._container(path), starts + offset
            return
        values.holders[targets] = _IN_BLOB
        view = memoryview(data if data is not None else b"").cast("B")
        ranges = zip(starts.tolist(), (starts + sizes).tolist(), strict=True)
        values.starts[targets] = [blob.append(view[start:stop]) for start, stop in ranges]

    def _container(self, path: str) -> int:
        if path not in self._containers:
            self._containers[path] = self.files.container(path, os.stat(path))
        return self._containers[path]

    def _take_files(self, values: _Values, targets: Ints, media: Media, blob: Blob) -> None:
        """Let values without bytes be the files that their paths name. Each path is looked at once."""
        encoded = values.paths.take(pa.array(targets)).dictionary_encode()
        count = len(encoded.dictionary)
        holders, starts, sizes = np.full(count, NO_CONTENT), np.zeros(count, np.int64), np.zeros(count, np.int64)
        for start in range(0, count, _BLOCK):
            for number, path in enumerate(encoded.dictionary.slice(start, _BLOCK).to_pylist(), start):
                local = _local_path(path)
                if local is None:
                    data = self._fetch(path, media)
                    holders[number], starts[number], sizes[number] = _IN_BLOB, blob.append(data), len(data)
                elif not local or "\0" in local:
                    self.refused.append(Refused("missing", path.replace("\0", "\\0")))
                elif isinstance(file := self._walk.find(local, path), Folder):
                    self.refused.append(Refused("folder", path))
                elif file is not None:
                    holders[number], sizes[number] = self.files.container(os.path.abspath(local), file), file.st_size
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        for target, located in ((values.holders, holders), (values.starts, starts), (values.sizes, sizes)):
            target[targets] = located[codes]

    def _fetch(self, path: str, media: Media) -> bytes:
        """Fetch the bytes at an address, as `datasets` does."""
        value = pa.array([{"bytes": None, "path": path}], FILE_TYPE)
        try:
            embedded = media.feature.embed_storage(value, token_per_repo_id=self._tokens)
        except (OSError, ValueError, ImportError) as error:
            raise SourceError(f"{path!r} cannot be read: {error}.", path=path) from error
        return bytes(embedded.field("bytes")[0].as_py())


def _local_path(path: str) -> str | None:
    """Return the file that a path names; None if it is an address, which `datasets` has to fetch.

    Streamed scans are named `gzip://scan.nii::/data/scan.nii.gz`, which stands for the compressed file.
    """
    from datasets.utils.file_utils import is_local_path

    if ":" not in path:
        return path
    if path.startswith("gzip://") and is_local_path(path.split("::")[-1]):
        return path.split("::")[-1]
    return path.split("::")[0] if is_local_path(path) else None
