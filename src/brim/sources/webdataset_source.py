"""Tars of WebDataset as a source: members that share a key are a row, and their bytes stay where they are.

Written by brim (whose JSON says which columns hold files) or by anybody: then the extension of a member is its column,
JSON and text are values, everything else is files.
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
from brim.formats.file_views import FileView
from brim.formats.range_readers import LocalFile, Readable
from brim.sources.dataset_files import DatasetFile, RemoteShard
from brim.sources.features import NoFeature, feature_of, feature_of_type, kind_of
from brim.sources.file_table import FileColumn, FileTable, Split

_FILES = "__files__"
_TEXT = {"txt", "text", "cls", "cls2", "index", "inx", "id"}
_NUMBER = {"cls", "cls2", "index", "inx", "id"}
_WHOLE = re.compile(r"\s*[-+]?\d+\s*")
_SMALL_BYTES = 16 << 20  # of a member that is a value and not a file


def webdataset_table(files: Sequence[DatasetFile], about: Mapping[str, Any]) -> FileTable:
    """The file table of tars. Their headers are read, and the small members that are values."""
    ranges = RangeSetBuilder()
    rows: list[dict[str, Any]] = []
    splits: list[Split] = []
    places: list[tuple[str, int, int, int]] = []
    listed: set[str] = set()
    columns: set[str] = set()
    others: list[str] = []
    for file in files:
        holder = ranges.container(file.path, file.stat, file.remote)
        start = len(rows)
        for row, members in _rows(file, others):
            for column, path, at, size, is_list in members:
                places.append((path, holder, at, size))
                number = len(places) - 1
                if is_list:
                    listed.add(column)
                    row.setdefault(column, []).append(number)
                else:
                    row[column] = number
                columns.add(column)
            rows.append(row)
        if splits and splits[-1].name == file.split:
            splits[-1] = Split(file.split, splits[-1].start, len(rows))
        else:
            splits.append(Split(file.split, start, len(rows)))
    paths = pa.array([path for path, *_ in places], pa.large_string())
    holders, starts, sizes = (np.array([place[n] for place in places], np.int64) for n in (1, 2, 3))
    ranges.add(paths, holders if len(places) else np.full(0, NO_CONTENT), starts, sizes)
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        table = pa.table({name: _column(rows, name, name in columns) for name in names})
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise SourceError(
            f"The rows of the tars have different columns or types: {str(error).splitlines()[0]}."
        ) from error
    kinds = {name: _kind(table.column(name), paths) for name in sorted(columns)}
    return FileTable(
        rows=table,
        columns={name: FileColumn(kind, name in listed) for name, kind in kinds.items()},
        files=ranges.finish(),
        features=_features(table, kinds, listed),
        splits=tuple(splits),
        about=about,
        verbatim=True,
        warnings=_left_out(others),
    )


def _left_out(others: list[str]) -> tuple[str, ...]:
    said = "member(s) of the tars without a key and an extension are left out, such as"
    return (f"{len(others):,} {said} {others[0]!r}",) if others else ()


def _column(rows: list[dict[str, Any]], name: str, holds_files: bool) -> pa.Array:
    values = [row.get(name) for row in rows]
    if not holds_files:
        return pa.array(values)
    many = any(isinstance(value, list) for value in values)
    return pa.array(values, pa.list_(pa.int64()) if many else pa.int64())


def _kind(column: pa.ChunkedArray, paths: pa.Array) -> str:
    cells = column.combine_chunks()
    cells = cells.flatten() if pa.types.is_list(cells.type) else cells
    numbers = cells.drop_null()
    kinds = {kind_of(str(paths[number.as_py()])) for number in numbers[:100]}
    return kinds.pop() if len(kinds) == 1 else "file"


def _features(table: pa.Table, kinds: Mapping[str, str], listed: set[str]) -> dict[str, Any] | None:
    features: dict[str, Any] = {}
    try:
        for name in table.column_names:
            if name not in kinds:
                features[name] = feature_of_type(table.schema.field(name).type)
            else:
                one = feature_of(kinds[name])
                features[name] = {"feature": one, "_type": "List"} if name in listed else one
    except NoFeature:
        return None
    return features


Member = tuple[str, str, int, int, bool]  # column, path, offset, size, whether of a list


def _rows(file: DatasetFile, others: list[str]) -> Iterator[tuple[dict[str, Any], list[Member]]]:
    opened: Readable = LocalFile(file.path) if file.remote is None else RemoteShard(file)
    try:
        yield from _groups(opened, others)
    except (tarfile.TarError, ValueError, KeyError, EOFError, RecursionError, OSError) as error:
        raise VerificationError(f"{file.shown} is not a tar that brim can read: {error}.") from error
    finally:
        opened.close()


def _groups(opened: Readable, others: list[str]) -> Iterator[tuple[dict[str, Any], list[Member]]]:
    """Each row and its files. What belongs to no row is added to `others`."""
    key: str | None = None
    row: dict[str, Any] = {}
    members: list[Member] = []
    expected: list[tuple[str, str, bool]] | None = None
    seen: set[str] = set()
    with tarfile.open(fileobj=io.BufferedReader(FileView(opened), 1 << 16), mode="r:") as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would keep every header
            if member.islnk() or member.issym():
                raise ValueError(
                    f"its member {member.name!r} is a link; pack the files themselves (tar --hard-dereference -h)"
                )
            if not member.isfile():
                continue
            if member.offset_data + member.size > opened.size:
                raise ValueError("a member is cut off")
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            extension = extension.lower()
            if not stem or (not extension and expected is None):
                others.append(member.name)
                continue
            own = f"{folder}/{stem}" if folder else stem
            if own != key:
                if key is not None:
                    yield row, members
                key, row, members, expected, seen = own, {}, [], None, set()
            if expected is not None:
                if not expected:
                    raise ValueError(f"the member {member.name} belongs to no row")
                column, path, many = expected.pop(0)
                members.append((column, path, member.offset_data, member.size, many))
                continue
            if extension in seen:
                raise ValueError(f"the member {member.name} comes twice")
            if extension == "json":
                told = json.loads(_body(archive, member))
                if isinstance(told, dict) and _FILES in told and not seen:
                    row, expected = told, list(_expected(told))
                    continue
                told = told if isinstance(told, dict) else {"json": told}
                row.pop("__key__", None)  # what other members are goes before what is said of them
                row = {**({} if "__key__" in told else {"__key__": own}), **told, **row}
            else:
                row.setdefault("__key__", own)
                if extension in _TEXT:
                    text = _body(archive, member).decode()
                    row[extension] = int(text) if extension in _NUMBER and _WHOLE.fullmatch(text) else text
                else:
                    members.append((extension, name, member.offset_data, member.size, False))
            seen.add(extension)
    if key is not None:
        yield row, members


def _body(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > _SMALL_BYTES:
        raise ValueError(f"the member {member.name} is larger than a value")
    body = archive.extractfile(member)
    return b"" if body is None else body.read()


def _expected(row: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """(column, path, whether of a list) of the members that follow, as brim's JSON has them."""
    for column in row.pop(_FILES):
        cell = row[column]
        row[column] = [] if isinstance(cell, list) else None
        for path in cell if isinstance(cell, list) else [cell]:
            if path is not None:
                yield column, path, isinstance(cell, list)
