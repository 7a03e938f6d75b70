"""The spliced WebDataset shard: a tar whose file contents are left where they are.

A row is a group of members that share a key: `KEY.json` with the metadata and the original paths, then
`KEY.COLUMN.EXT` (or `KEY.COLUMN.0.EXT` for lists) for each file. Headers come from the standard library's
tarfile, with PAX records where a name or size needs them.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from brim.errors import DamageFound
from brim.file_set import END, FileSet, Ints, member_header, padding
from brim.formats.readable import Readable, ReadableFile, ShardFile
from brim.formats.splice import Splice, SpliceBuilder

_BATCH = 1024
_FILES = "__files__"  # in the JSON of a row: which columns hold files, in the order of their members


def splice_tar(table: pa.Table, files: FileSet, numbers: Mapping[str, Ints], first_key: int) -> Splice:
    """The shard that holds `table`; `numbers` gives the files of each file column in order."""
    out = SpliceBuilder(files)
    members = _member_names(table.column_names)
    queues = {name: iter(of.tolist()) for name, of in numbers.items()}
    key = first_key
    for batch in _readable(table).to_batches(max_chunksize=_BATCH):
        for row in batch.to_pylist():
            stem = f"{key:09d}"
            metadata = {name: _paths(value) if name in numbers else value for name, value in row.items()}
            metadata[_FILES] = list(numbers)
            text = json.dumps(metadata, default=_plain, ensure_ascii=False).encode()
            out.literal(member_header(f"{stem}.json", len(text)) + text + padding(len(text)))
            for name, queue in queues.items():
                for suffix, path in _files_of(row[name]):
                    number = next(queue)
                    size = int(files.sizes[number])
                    out.literal(member_header(f"{stem}.{members[name]}{suffix}{_extension(path)}", size))
                    out.value(number)
                    out.literal(padding(size))
            key += 1
    out.literal(END)
    out.literal(bytes(-out.position % tarfile.RECORDSIZE))
    return out.finish()


def _readable(table: pa.Table) -> pa.Table:
    """Times as texts: Python's own have no nanoseconds."""
    for number, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type) or pa.types.is_time(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(pa.string()))
        elif pa.types.is_duration(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(pa.int64()))
    return table


def _member_names(columns: list[str]) -> dict[str, str]:
    """Column names as parts of member names: no dots or slashes, none twice."""
    names: dict[str, str] = {}
    for column in columns:
        plain = re.sub(r"[^0-9A-Za-z_-]", "_", column) or "_"
        while plain in names.values() or plain == "json":
            plain += "_"
        names[column] = plain
    return names


def _extension(path: str) -> str:
    match = re.search(r"(\.[A-Za-z0-9]{1,8}){1,2}$", path.rsplit("/", 1)[-1])
    if match is None:
        return ".bin"
    last = match[0].lower()
    return last if last.endswith((".gz", ".bz2", ".xz", ".zst")) else "." + last.rsplit(".", 1)[-1]


def _files_of(cell: Any) -> Iterator[tuple[str, str]]:
    """(suffix, path) of each file in a cell."""
    if isinstance(cell, list):
        for position, element in enumerate(cell):
            if element is not None:
                yield f".{position}", element["path"]
    elif cell is not None:
        yield "", cell["path"]


def _paths(cell: Any) -> Any:
    if isinstance(cell, list):
        return [_paths(element) for element in cell]
    return None if cell is None else cell["path"]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


def locate_tar(shard: Readable) -> Iterator[ShardFile]:
    """Every file of a shard that brim wrote, found by reading the shard alone."""
    row = -1
    expected: list[tuple[str, str]] = []
    for member, text in _members(shard):
        if text is not None:
            if expected:
                raise _broken(shard, f"row {row} lacks files")
            row += 1
            expected = _expected(json.loads(text))
        elif expected:
            column, path = expected.pop(0)
            yield ShardFile(column, row, path, member.offset_data, member.size)
        else:
            raise _broken(shard, f"the member {member.name} belongs to no row")
    if expected:
        raise _broken(shard, f"row {row} lacks files")


def tar_rows(shard: Readable) -> int:
    """How many rows a shard holds."""
    return sum(text is not None for _, text in _members(shard))


def _members(shard: Readable) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Every member, and the content of those that begin a row."""
    try:
        with tarfile.open(fileobj=io.BufferedReader(ReadableFile(shard)), mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep every header
                begins = member.name.endswith(".json") and member.name.count(".") == 1
                body = archive.extractfile(member) if begins else None
                yield member, None if body is None else body.read()
    except (tarfile.TarError, ValueError, KeyError, EOFError) as error:
        raise _broken(shard, str(error)) from error


def _broken(shard: Readable, what: str) -> DamageFound:
    return DamageFound(f"{shard.name} is not a shard that brim can read: {what}.")


def _expected(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """(column, path) of a row's files, in the order of its members."""
    found = []
    for column in metadata[_FILES]:
        cell = metadata[column]
        found += [(column, path) for path in (cell if isinstance(cell, list) else [cell]) if path is not None]
    return found
