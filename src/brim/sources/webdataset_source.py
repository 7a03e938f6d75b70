"""Tars of WebDataset as a source: members with the same key are a row, and their bytes are not copied.

In tars by brim, the JSON of a row names the columns of files. In others, the extension of a member is its column; JSON
and text are values, all other members are files.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from brim.errors import SourceError, VerificationError
from brim.file_set import NO_CONTENT, RangeSetBuilder
from brim.formats.range_readers import FileView, LocalFile, Readable
from brim.sources.dataset_files import DatasetFile, RemoteShard
from brim.sources.features import kind_of
from brim.sources.file_table import FileColumn, FileTable, Split
from brim.sources.table_source import describe

_FILES = "__files__"
_TEXT = {"txt", "text", "cls", "cls2", "index", "inx", "id"}
_NUMBER = {"cls", "cls2", "index", "inx", "id"}
_WHOLE = re.compile(r"\s*[-+]?\d+\s*")
_SMALL_BYTES = 16 << 20  # of a member that is a value and not a file
_SAMPLED_FILES = 100  # by which the type of a column is guessed


def webdataset_table(files: Sequence[DatasetFile], about: Mapping[str, Any]) -> FileTable:
    """Make the file table of tars. Their headers are read, and the small members that are values."""
    ranges = RangeSetBuilder()
    rows: list[dict[str, Any]] = []
    splits: list[Split] = []
    values: list[tuple[str, int, int, int]] = []
    list_columns: set[str] = set()
    file_columns: set[str] = set()
    without_key: list[str] = []
    for file in files:
        holder = ranges.container(file.path, file.stat, file.remote)
        start = len(rows)
        for row, members in _rows(file, without_key):
            for column, path, offset, size, is_list in members:
                if is_list:
                    list_columns.add(column)
                    row.setdefault(column, []).append(len(values))
                else:
                    row[column] = len(values)
                values.append((path, holder, offset, size))
                file_columns.add(column)
            rows.append(row)
        if splits and splits[-1].name == file.split:
            start = splits.pop().start
        splits.append(Split(file.split, start, len(rows)))
    paths = pa.array([path for path, *_ in values], pa.large_string())
    holders, starts, sizes = (np.array([value[n] for value in values], np.int64) for n in (1, 2, 3))
    ranges.add(paths, holders if len(values) else np.full(0, NO_CONTENT), starts, sizes)
    arrays = {}
    try:
        for name in dict.fromkeys(name for row in rows for name in row):
            cells = [row.get(name) for row in rows]
            has_lists = any(isinstance(cell, list) for cell in cells)
            kind = None if name not in file_columns else pa.list_(pa.int64()) if has_lists else pa.int64()
            arrays[name] = pa.array(cells, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise SourceError(f"The rows of the tars have different columns or types: {reason}.") from error
    columns: dict[str, FileColumn] = {}
    for name in sorted(file_columns):
        cells = arrays[name].flatten() if pa.types.is_list(arrays[name].type) else arrays[name]
        kinds = {kind_of(str(paths[number.as_py()])) for number in cells.drop_null()[:_SAMPLED_FILES]}
        columns[name] = FileColumn(kinds.pop() if len(kinds) == 1 else "file", name in list_columns)
    rows_table = pa.table(arrays)
    warnings = [f"{len(without_key):,} member(s) of the tars without a key and an extension are left out, such as"]
    return FileTable(
        rows=rows_table,
        columns=columns,
        files=ranges.finish(),
        features=describe(rows_table.schema, columns, {})[0],
        splits=tuple(splits),
        about=about,
        verbatim=True,
        warnings=tuple(f"{text} {without_key[0]!r}" for text in warnings if without_key),
    )


Member = tuple[str, str, int, int, bool]  # column, path, offset, size, whether of a list


def _rows(file: DatasetFile, without_key: list[str]) -> Iterator[tuple[dict[str, Any], list[Member]]]:
    """Yield each row of a tar, and its files. Members that belong to no row are added to `without_key`."""
    reader: Readable = LocalFile(file.path) if file.remote is None else RemoteShard(file)
    try:
        with tarfile.open(fileobj=io.BufferedReader(FileView(reader), 1 << 16), mode="r:") as archive:
            yield from _groups(archive, reader.size, without_key)
    except (tarfile.TarError, ValueError, KeyError, EOFError, RecursionError, OSError) as error:
        raise VerificationError(f"{file.shown} is not a tar that brim can read: {error}.") from error
    finally:
        reader.close()


def _groups(
    archive: tarfile.TarFile, archive_size: int, without_key: list[str]
) -> Iterator[tuple[dict[str, Any], list[Member]]]:
    key: str | None = None
    row: dict[str, Any] = {}
    members: list[Member] = []
    expected: list[tuple[str, str, bool]] | None = None  # column, path and whether of a list, of members that follow
    finished: set[str] = set()
    for member in _file_members(archive, archive_size):
        folder, _, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        extension = extension.lower()
        if not stem or (not extension and expected is None):
            without_key.append(member.name)
            continue
        own = f"{folder}/{stem}" if folder else stem
        if own != key:
            if key is not None:
                yield row, members
            key, row, members, expected, finished = own, {}, [], None, set()
        if expected is not None:
            if not expected:
                raise ValueError(f"the member {member.name} belongs to no row")
            column, path, is_list = expected.pop(0)
            members.append((column, path, member.offset_data, member.size, is_list))
            continue
        if extension in finished:
            raise ValueError(f"the member {member.name} comes twice")
        if extension == "json":
            content = json.loads(_content(archive, member))
            if isinstance(content, dict) and _FILES in content and not finished:
                row, expected = content, []
                for column in row.pop(_FILES):
                    cell = row[column]
                    row[column] = [] if isinstance(cell, list) else None
                    paths = cell if isinstance(cell, list) else [cell]
                    expected += [(column, path, isinstance(cell, list)) for path in paths if path is not None]
                continue
            content = content if isinstance(content, dict) else {"json": content}
            row.pop("__key__", None)  # a member counts more than a key of that name in the JSON
            row = {**({} if "__key__" in content else {"__key__": own}), **content, **row}
        else:
            row.setdefault("__key__", own)
            if extension in _TEXT:
                text = _content(archive, member).decode()
                row[extension] = int(text) if extension in _NUMBER and _WHOLE.fullmatch(text) else text
            else:
                members.append((extension, name, member.offset_data, member.size, False))
        finished.add(extension)
    if key is not None:
        yield row, members


def _file_members(archive: tarfile.TarFile, archive_size: int) -> Iterator[tarfile.TarInfo]:
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined]  # it would keep every header
        if member.islnk() or member.issym():
            raise ValueError(
                f"its member {member.name!r} is a link; pack the files themselves (tar --hard-dereference -h)"
            )
        if member.isfile():
            if member.offset_data + member.size > archive_size:
                raise ValueError("a member is cut off")
            yield member


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > _SMALL_BYTES:
        raise ValueError(f"the member {member.name} is larger than a value")
    file = archive.extractfile(member)
    return b"" if file is None else file.read()
