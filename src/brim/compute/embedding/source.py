"""Where the rows of an embedding job come from: rows as for any computed job, or a folder of images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from brim.errors import InputError
from brim.plans.fingerprint import digest_ints, digest_json, digest_table
from brim.sources import read_source
from brim.sources.filetable import FileTable
from brim.sources.options import SourceOptions
from brim.sources.rows import RowOptions, RowSource, open_rows
from brim.sources.rows.found import split_name

_BLOCK_ROWS = 10_000


def open_source(source: str, image: str | None, options: RowOptions) -> tuple[RowSource, str | None]:
    """The rows, and where relative paths of images begin."""
    path = Path(source)
    if image is None or not path.is_dir() or _holds_rows(path):
        root = path if path.is_dir() else path.parent
        return open_rows(source, options), os.path.abspath(root) if image is not None else None
    table = read_source(source, SourceOptions(limit=options.limit))
    if image not in table.columns:
        named = ", ".join(table.columns) or "none"
        raise InputError(
            f"The folder {source!r} gives no column of images {image!r}.", hint=f"Its columns of files: {named}."
        )
    rows = open_rows(lambda: _tables(table), replace(options, name=path.name, limit=None))
    # An iterator is known by its name alone: a folder by what its files are called and how large they are.
    content = [digest_ints(table.files.sizes), *(digest_table(block) for block in _tables(table))]
    rows.facts = rows.facts | {"content": digest_json(content)}
    return rows, table.files.root


def _holds_rows(folder: Path) -> bool:
    """Whether a folder has files of rows; tables that describe the files beside them do not count."""
    for _, _, names in os.walk(folder):
        for name in names:
            if not name.startswith(("metadata.", "README")) and split_name(name)[0] not in (None, "text"):
                return True
    return False


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
