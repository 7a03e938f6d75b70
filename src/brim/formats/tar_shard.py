"""Write and read the spliced WebDataset shard: a tar whose file contents are not copied.

A row is a group of members that share a key: `KEY.json` with the metadata and the original paths, then
`KEY.COLUMN.EXT` (or `KEY.COLUMN.0.EXT` for lists) for each file. Headers come from the standard library's tarfile, with
PAX records if a name or size needs them.
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

from brim.errors import VerificationError
from brim.file_set import END, FileSet, Ints, member_header, padding
from brim.formats.range_readers import FileView, Readable, ShardFile
from brim.formats.splice import Splice, SpliceBuilder

_BATCH_ROWS = 1024
_FILES = "__files__"  # in the JSON of a row: the columns with files, in the order of their members


def splice_tar(table: pa.Table, files: FileSet, numbers: Mapping[str, Ints], first_key: int) -> Splice:
    """Return the shard with the rows of `table`; `numbers` has the files of each file column in order."""
    out = SpliceBuilder(files)
    members = _member_names(table.column_names)
    queues = {name: iter(column.tolist()) for name, column in numbers.items()}
    key = first_key
    for number, field in enumerate(table.schema):  # Python's times have no nanoseconds
        if pa.types.is_timestamp(field.type) or pa.types.is_time(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(pa.string()))
        elif pa.types.is_duration(field.type):
            table = table.set_column(number, field.name, table.column(number).cast(pa.int64()))
    for batch in table.to_batches(max_chunksize=_BATCH_ROWS):
        for row in batch.to_pylist():
            stem = f"{key:09d}"
            metadata = {name: _paths(value) if name in numbers else value for name, value in row.items()}
            metadata[_FILES] = list(numbers)
            text = json.dumps(metadata, default=_json_value, ensure_ascii=False).encode()
            out.literal(member_header(f"{stem}.json", len(text)) + text + padding(len(text)))
            for name, queue in queues.items():
                cell = row[name]
                elements = {f".{n}": each for n, each in enumerate(cell)} if isinstance(cell, list) else {"": cell}
                for suffix, element in elements.items():
                    if element is not None:
                        file = next(queue)
                        size = int(files.sizes[file])
                        ending = f"{suffix}{_extension(element['path'])}"
                        out.literal(member_header(f"{stem}.{members[name]}{ending}", size))
                        out.value(file)
                        out.literal(padding(size))
            key += 1
    out.literal(END)
    out.literal(bytes(-out.position % tarfile.RECORDSIZE))
    return out.finish()


def _member_names(columns: list[str]) -> dict[str, str]:
    """Turn column names into parts of member names: without dots and slashes, and unique."""
    names: dict[str, str] = {}
    for column in columns:
        name = re.sub(r"[^0-9A-Za-z_-]", "_", column) or "_"
        while name in names.values() or name == "json":
            name += "_"
        names[column] = name
    return names


def _extension(path: str) -> str:
    match = re.search(r"(\.[A-Za-z0-9]{1,8}){1,2}$", path.rsplit("/", 1)[-1])
    if match is None:
        return ".bin"
    last = match[0].lower()
    return last if last.endswith((".gz", ".bz2", ".xz", ".zst")) else "." + last.rsplit(".", 1)[-1]


def _paths(cell: Any) -> Any:
    if isinstance(cell, list):
        return [_paths(element) for element in cell]
    return None if cell is None else cell["path"]


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


def locate_tar(shard: Readable) -> Iterator[ShardFile]:
    """Yield every file of a shard that brim wrote, by reading the shard alone."""
    row = -1
    expected: list[tuple[str, str]] = []  # column and path of the row's files that follow
    for member, text in _members(shard):
        if text is not None:
            if expected:
                raise _broken(shard, f"row {row} lacks files")
            row += 1
            metadata = json.loads(text)
            for column in metadata[_FILES]:
                paths = metadata[column] if isinstance(metadata[column], list) else [metadata[column]]
                expected += [(column, path) for path in paths if path is not None]
        elif expected:
            column, path = expected.pop(0)
            yield ShardFile(column, row, path, member.offset_data, member.size)
        else:
            raise _broken(shard, f"the member {member.name} belongs to no row")
    if expected:
        raise _broken(shard, f"row {row} lacks files")


def tar_rows(shard: Readable) -> int:
    """Return the number of rows of a shard."""
    return sum(text is not None for _, text in _members(shard))


def _members(shard: Readable) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Yield every member, with its content if it starts a row."""
    try:
        with tarfile.open(fileobj=io.BufferedReader(FileView(shard)), mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # it would keep every header
                is_first = member.name.endswith(".json") and member.name.count(".") == 1
                body = archive.extractfile(member) if is_first else None
                yield member, None if body is None else body.read()
    except (tarfile.TarError, ValueError, KeyError, EOFError) as error:
        raise _broken(shard, str(error)) from error


def _broken(shard: Readable, problem: str) -> VerificationError:
    return VerificationError(f"{shard.name} is not a shard that brim can read: {problem}.")
