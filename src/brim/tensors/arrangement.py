"""Where the bytes of a job lie while it is unfinished, and the files that are made of them.

A file whose number of rows is known has its size and its offsets from the start: values go where they will stay,
and finishing it means writing the header in front. Otherwise every tensor grows in a file of its own, and the
header and those files are put together by the kernel (`copy_file_range`). The same is done for a file that is
finished with fewer rows than were promised. Parquet files are made by pyarrow from the grown files.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.formats.splice import copy_range
from brim.records import dataclass
from brim.state.durable import write_all
from brim.tensors.tensor_files import (
    Body,
    NpyLayout,
    SafetensorsLayout,
    Tensor,
    VectorColumn,
    check_columns,
    npy_path,
    write_parquet,
)
from brim.tensors.tensor_stream import Files, FileSpan, Place, sync_file

SUFFIXES = (".safetensors", ".npy", ".parquet")


@dataclass(frozen=True, slots=True)
class Request:
    """What shall be written. `rows` is None where it is not known."""

    path: Path
    tensors: tuple[Tensor, ...]
    rows: Mapping[str, int] | None
    metadata: Mapping[str, str] | None = None
    shard_bytes: int | None = None

    @property
    def row_bytes(self) -> int:
        return sum(tensor.row_bytes for tensor in self.tensors)

    @property
    def shard_rows(self) -> int | None:
        return None if self.shard_bytes is None else max(1, self.shard_bytes // self.row_bytes)

    def facts(self) -> dict[str, Any]:
        """What decides the bytes of the result, and where they lie until then."""
        return {
            "tensors": [f"{tensor.name}={tensor}" for tensor in self.tensors],
            "rows": None if self.rows is None else dict(self.rows),
            "metadata": None if self.metadata is None else dict(self.metadata),
            "rows in a shard": self.shard_rows,
        }


@dataclass(frozen=True, slots=True)
class FileGroup:
    """The tensors that share a file."""

    target: Path
    tensors: tuple[Tensor, ...]
    layout: SafetensorsLayout | NpyLayout


class Arrangement:
    """`places` are the streams of each tensor."""

    def __init__(self, request: Request, groups: Sequence[FileGroup]) -> None:
        self._request = request
        self._groups = groups
        self._direct = request.rows is not None or request.shard_rows is not None
        self._bodies: dict[tuple[int, tuple[int, ...]], Body] = {}
        self.places: dict[str, tuple[Place, ...]] = {}
        for number, group in enumerate(groups):
            for tensor in group.tensors:
                place = partial(self._direct_place, number, tensor) if self._direct else _growing(len(self.places))
                self.places[tensor.name] = (place,)

    @property
    def targets(self) -> list[Path]:
        """Names that are in the way if they exist."""
        if self._request.shard_rows is not None:
            return [index_path(self._request.path), self._request.path]
        return [group.target for group in self._groups]

    @property
    def need_bytes(self) -> int | None:
        """Bytes on disk, where the number of rows is known."""
        rows = self._request.rows
        return None if rows is None else sum(tensor.row_bytes * rows[tensor.name] for tensor in self._request.tensors)

    @property
    def checksum(self) -> int:
        """Of a header as it is laid out by the libraries of today."""
        return zlib.crc32(self._body(0, self._planned(0)).header)

    def prepare(self, files: Files, rows: Mapping[str, int]) -> list[tuple[str, str]]:
        """Make every file whole inside the folder; what is in it, and the name that it shall have."""
        shard_rows, path = self._request.shard_rows, self._request.path
        count = 1 if shard_rows is None else max(1, -(-max(rows.values()) // shard_rows))
        moves, shards = [], []
        for shard in range(count):
            here = {name: _part_of(all_rows, shard, shard_rows) for name, all_rows in rows.items()}
            for number, group in enumerate(self._groups):
                inside = self._make_whole(files, shard, number, here)
                name = shard_name(path, shard, count) if shard_rows is not None else group.target.name
                moves.append((inside, name))
                shards.append({"file": name, "rows": next(iter(here.values()))})
        if shard_rows is not None:
            index = {"format": "brim row shards", "rows": max(rows.values()), "shards": shards}
            _write(files.folder / "index", json.dumps(index, indent=1).encode() + b"\n")
            moves.append(("index", index_path(path).name))
        return moves

    def _make_whole(self, files: Files, shard: int, number: int, rows: Mapping[str, int]) -> str:
        body = self._body(number, rows)
        part = _part_name(shard, number)
        if self._direct and self._body(number, self._planned(shard)) == body:
            descriptor = files.descriptor(part, body.size)
            write_all(descriptor, body.header, 0)
            os.fsync(descriptor)
            return part
        inside = f"{part}.whole"
        row_bytes = {tensor.name: tensor.row_bytes for tensor in self._groups[number].tensors}
        before = shard * (self._request.shard_rows or 0)
        with open(files.folder / inside, "wb", buffering=0) as file:
            write_all(file.fileno(), body.header)
            for name in body.starts:
                for span in self.places[name][0](before * row_bytes[name], rows[name] * row_bytes[name]):
                    source = files.descriptor(span.file, span.file_bytes)
                    copy_range(source, span.offset, span.size, file.fileno())
            os.fsync(file.fileno())
        return inside

    def _planned(self, shard: int) -> dict[str, int]:
        """The rows that a part has room for."""
        rows, shard_rows = self._request.rows, self._request.shard_rows
        return {
            tensor.name: _part_of(rows[tensor.name], shard, shard_rows) if rows is not None else shard_rows or 0
            for tensor in self._request.tensors
        }

    def _body(self, number: int, rows: Mapping[str, int]) -> Body:
        key = (number, tuple(rows.values()))
        if key not in self._bodies:
            self._bodies[key] = self._groups[number].layout.body(rows)
        return self._bodies[key]

    def _direct_place(self, number: int, tensor: Tensor, start: int, size: int) -> Iterator[FileSpan]:
        shard_rows = self._request.shard_rows
        while size > 0:
            shard, inside = (0, start) if shard_rows is None else divmod(start, shard_rows * tensor.row_bytes)
            planned = self._planned(shard)
            body = self._body(number, planned)
            step = min(size, planned[tensor.name] * tensor.row_bytes - inside)
            yield FileSpan(_part_name(shard, number), body.starts[tensor.name] + inside, step, body.size)
            start, size = start + step, size - step


class ParquetArrangement:
    """Every column grows in a file of its own; strings in two."""

    def __init__(self, request: Request) -> None:
        check_columns(request.tensors)
        self._request = request
        self.places: dict[str, tuple[Place, ...]] = {}
        self._files: dict[str, tuple[str, ...]] = {}
        for number, tensor in enumerate(request.tensors):
            kinds = ("lengths", "text") if tensor.is_text else ("rows",)
            self.places[tensor.name] = tuple(_growing(number, kind) for kind in kinds)
            self._files[tensor.name] = tuple(_side_name(number, kind) for kind in kinds)

    @property
    def targets(self) -> list[Path]:
        return [self._request.path]

    @property
    def need_bytes(self) -> int | None:
        rows = self._request.rows
        return None if rows is None else 2 * max(rows.values()) * self._request.row_bytes

    @property
    def checksum(self) -> int:
        return 0

    def prepare(self, files: Files, rows: Mapping[str, int]) -> list[tuple[str, str]]:
        counts = set(rows.values())
        if len(counts) != 1:
            raise InputError("The columns of a Parquet file have the same rows.", hint="Write a .safetensors file.")
        columns = []
        for tensor in self._request.tensors:
            for name in self._files[tensor.name]:
                files.descriptor(name)  # a column without rows has a file too
            columns.append(VectorColumn(tensor, tuple(files.folder / name for name in self._files[tensor.name])))
        whole = files.folder / "whole"
        write_parquet(whole, columns, counts.pop(), self._request.metadata)
        sync_file(whole)
        return [(whole.name, self._request.path.name)]


def arrangement_for(request: Request) -> Arrangement | ParquetArrangement:
    """By the ending of the name."""
    path, suffix = request.path, request.path.suffix
    if suffix not in SUFFIXES:
        raise InputError(f"{path.name!r} does not end in {', '.join(SUFFIXES)}.", hint="The ending chooses the format.")
    if request.shard_bytes is not None and suffix != ".safetensors":
        raise InputError(f"A {suffix} file is not cut into shards.", hint="Leave shard_size out, or use .safetensors.")
    if request.metadata is not None and suffix == ".npy":
        raise InputError("A .npy file has no room for metadata.", hint="Leave it out, or use .safetensors.")
    if suffix == ".parquet":
        return ParquetArrangement(request)
    if suffix == ".safetensors":
        layout = SafetensorsLayout(request.tensors, request.metadata)
        return Arrangement(request, [FileGroup(path, request.tensors, layout)])
    alone = len(request.tensors) == 1
    groups = [FileGroup(npy_path(path, one.name, alone), (one,), NpyLayout(one)) for one in request.tensors]
    return Arrangement(request, groups)


def index_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.index.json")


def shard_name(path: Path, shard: int, count: int) -> str:
    return f"{path.stem}-{shard + 1:05d}-of-{count:05d}{path.suffix}"


def _part_of(rows: int, shard: int, shard_rows: int | None) -> int:
    return rows if shard_rows is None else max(0, min(shard_rows, rows - shard * shard_rows))


def _part_name(shard: int, number: int) -> str:
    return f"{shard:05d}.{number}.part"


def _side_name(number: int, kind: str = "rows") -> str:
    return f"{number}.{kind}"


def _growing(number: int, kind: str = "rows") -> Place:
    def place(start: int, size: int) -> Iterator[FileSpan]:
        if size:
            yield FileSpan(_side_name(number, kind), start, size)

    return place


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
