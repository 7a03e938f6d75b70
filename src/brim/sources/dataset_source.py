"""A dataset of `datasets` (in memory, mapped from disk or streamed) as a source.

What is built from it loads to the same features, rows and bytes as the result of `Dataset.push_to_hub`, and is not
held in memory. Columns of files: media_columns.py. Other columns are not copied, or are written to the spill folder if
they have to be sorted first.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim import partition as cuts
from brim.errors import InputError, SourceError
from brim.extras import missing
from brim.file_set import Ints
from brim.records import dataclass
from brim.sources.datasets_private import read_undecoded, resolve_features, row_order, tokens_of
from brim.sources.file_table import FileColumn, FileTable, Split
from brim.sources.media_columns import BATCH_BYTES, BATCH_ROWS, Media, MediaColumns, Spill, gathered, media_of
from brim.sources.source_options import check_split

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
