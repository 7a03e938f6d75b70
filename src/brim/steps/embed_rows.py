"""Where the rows of an embedding job come from: rows as for any computed job, or a folder of images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa

from brim.buckets.bucket_address import is_bucket_address, parse_bucket_address
from brim.buckets.listing import list_objects
from brim.errors import InputError
from brim.plans.fingerprint import digest_ints, digest_json, digest_table
from brim.rows.open_rows import open_rows
from brim.rows.row_files import WILD, split_name
from brim.rows.row_options import RowOptions
from brim.rows.unit import RowSource
from brim.sources.file_table import FileTable
from brim.sources.open_source import read_source
from brim.sources.source_options import SourceOptions

_BLOCK_ROWS = 10_000
_LOOK_NAMES = 10_000


def open_source(source: str, image: str | None, options: RowOptions) -> tuple[RowSource, str | None]:
    """The rows, and where relative paths of images begin."""
    if is_bucket_address(source):
        return _open_bucket(source, image, options)
    path = Path(source)
    if image is None or not path.is_dir() or _holds_rows(path):
        root = path if path.is_dir() else path.parent
        return open_rows(source, options), os.path.abspath(root) if image is not None else None
    return _open_images(source, image, SourceOptions(limit=options.limit), path.name, options)


def _open_bucket(source: str, image: str | None, options: RowOptions) -> tuple[RowSource, str | None]:
    """As for a folder. Whether a bucket holds rows or images is told from its first names."""
    address = parse_bucket_address(source, options.access)
    folder, _, name = address.prefix.rpartition("/")
    if image is None or split_name(name)[0] is not None or WILD.search(address.prefix):
        root = replace(address, prefix=folder)
    elif any(map(_is_of_rows, (found for found, _ in islice(list_objects(address), _LOOK_NAMES)))):
        root = address
    else:
        reading = SourceOptions(limit=options.limit, access=options.access)
        return _open_images(source, image, reading, name or address.bucket, options)
    return open_rows(source, options), str(root) if image is not None else None


def _open_images(
    source: str, image: str, reading: SourceOptions, name: str, options: RowOptions
) -> tuple[RowSource, str | None]:
    table = read_source(source, reading)
    if image not in table.columns:
        named = ", ".join(table.columns) or "none"
        raise InputError(
            f"The folder {source!r} gives no column of images {image!r}.", hint=f"Its columns of files: {named}."
        )
    rows = open_rows(lambda: _tables(table), replace(options, name=name, limit=None))
    # An iterator is known by its name alone: a folder by what its files are called and how large they are.
    content = [digest_ints(table.files.sizes), *(digest_table(block) for block in _tables(table))]
    rows.facts = rows.facts | {"content": digest_json(content)}
    rows.files = table.files
    return rows, table.files.root if table.files.bucket is None else str(table.files.bucket)


def _holds_rows(folder: Path) -> bool:
    """Whether a folder has files of rows; tables that describe the files beside them do not count."""
    return any(_is_of_rows(name) for _, _, names in os.walk(folder) for name in names)


def _is_of_rows(path: str) -> bool:
    name = path.rpartition("/")[2]
    return not name.startswith(("metadata.", "README")) and split_name(name)[0] not in (None, "text")


def _tables(table: FileTable) -> Iterator[pa.Table]:
    """The rows with the paths of their files, which are relative to the root."""
    for start in range(0, len(table), _BLOCK_ROWS):
        rows = table.rows.slice(start, _BLOCK_ROWS)
        for name in table.columns:
            numbers = rows.column(name)
            if not pa.types.is_integer(numbers.type):
                continue  # lists of files: not for a model that takes one
            paths = [table.files.paths.take(chunk).cast(pa.string()) for chunk in numbers.chunks]
            rows = rows.set_column(rows.schema.get_field_index(name), name, pa.chunked_array(paths, pa.string()))
        yield rows.replace_schema_metadata(None)
