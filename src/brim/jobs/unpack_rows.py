"""The files of the rows that were chosen, and of no others: whoever wrote the dataset, and wherever it is."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import IO

import numpy as np

from brim.errors import DamageFound, InputError
from brim.formats.splice import SpliceBuilder
from brim.memory.limit import effective_limit
from brim.progress import Progress
from brim.sources.file_table import FileTable, Split, flat_numbers
from brim.state.durable import BUFFER_BYTES, write_all
from brim.state.retry import interrupted_by

WAITING = ".brim-unpack"  # where files are until they are whole


_MOST_NAME_BYTES = 255
_CHOOSE = "Choose rows or columns in which it comes once, with --where or --columns."
_CASE = "Unpack to a file system that tells capital letters from small ones, or choose one of them."


def safe_place(name: str, where: str, root: str) -> str:
    """Where a file goes; refuses a path that leads out of the folder, also by a link that is there."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name:
        raise DamageFound(
            f"{where} names {name!r}, which would leave the folder.",
            hint="Nothing was written there; do not trust this dataset.",
        )
    if parts[0].casefold() == WAITING:
        raise InputError(f"{where} names {name!r}, which is where brim keeps files that are not whole yet.")
    if any(len(os.fsencode(part)) > _MOST_NAME_BYTES for part in parts):
        raise InputError(f"{where} names {name[:60] + '…'!r}, which is longer than a file's name can be.")
    path = os.path.join(root, *parts)
    parent = os.path.realpath(os.path.dirname(path))
    if parent != root and not parent.startswith(root + os.sep):
        raise DamageFound(f"{name!r} would be written outside of the folder, through a link.")
    return path


def named_files(table: FileTable) -> list[tuple[str, int]]:
    """(path, number) of every file once. InputError for one without a name, and for two of one name."""
    seen: dict[str, int] = {}
    for column in table.columns:
        for number in flat_numbers(table.rows.column(column)).tolist():
            if not table.files.has_content(np.array([number]))[0]:
                continue
            path = table.files.paths[number].as_py()
            if path is None:
                raise InputError(
                    f"The column {column!r} holds content without a name, so there is no file to write.",
                    hint="Choose others with --columns, or read it with datasets.load_dataset.",
                )
            other = seen.setdefault(path, number)
            if other != number and not _same_place(table, other, number):
                raise InputError(
                    f"{path!r} names two different files of the dataset, and one would take the place of the other.",
                    hint=_CHOOSE,
                    path=path,
                )
    return list(seen.items())


def split_apart(table: FileTable) -> list[tuple[str, FileTable]]:
    """(folder, rows): all rows in none, or each split in one of its own if files of several have the same name."""
    parts = [(split.name, table.replace(rows=table.rows.slice(split.start, split.stop - split.start),
             splits=(Split(split.name, 0, split.stop - split.start),))) for split in table.splits]  # fmt: skip
    seen: dict[str, str] = {}
    for name, part in parts:
        for path, _ in named_files(part):
            if seen.setdefault(path, name) != name:
                return parts
    return [("", table)]


def _same_place(table: FileTable, one: int, other: int) -> bool:
    places = [[part.tolist() for part in table.files.places(np.array([number]))] for number in (one, other)]
    return places[0] == places[1]


def safe_paths(files: Sequence[tuple[str, int]], root: str) -> dict[str, int]:
    """Where each file goes. DamageFound for a path that would leave the folder, or that comes twice there."""
    found: dict[str, int] = {}
    folded: dict[str, str] = {}
    blind = _ignores_case(root)
    for path, number in files:
        place = safe_place(path, "a row", root)
        key = place.casefold() if blind else place
        if key in folded:
            raise InputError(
                f"{path!r} and {folded[key]!r} would be the same file here.",
                hint=_CHOOSE if place in found else _CASE,
            )
        folded[key] = path
        found[place] = number
    for key, path in folded.items():
        above = os.path.dirname(key)
        while len(above) > len(root):
            if above in folded:
                raise InputError(f"{folded[above]!r} is a file, and {path!r} would lie in it.", hint=_CHOOSE)
            above = os.path.dirname(above)
    return found


def _ignores_case(folder: str) -> bool:
    probe = os.path.join(folder, f"{WAITING}-Case")
    try:
        with open(probe, "x"):
            pass
        try:
            return os.path.exists(os.path.join(folder, f"{WAITING}-cASE"))
        finally:
            os.unlink(probe)
    except OSError:
        return False


def unpack_rows(table: FileTable, root: str, progress: Progress) -> tuple[int, int, int]:
    """Write the files of a table below a folder: how many, their bytes, and how many were there already."""
    wanted = safe_paths(named_files(table), root)
    total = int(table.files.sizes[np.array(list(wanted.values()), np.int64)].sum()) if wanted else 0
    os.makedirs(root, exist_ok=True)
    room = os.path.join(root, WAITING)
    shutil.rmtree(room, ignore_errors=True)
    os.makedirs(room)
    files = size = there = 0
    progress.start("unpack", total, 0, effective_limit().bytes)
    try:
        with interrupted_by(lambda: progress.advance(0)):
            temporary = os.path.join(room, "file")
            for path, chunks in _contents(table, wanted):
                written = _write(temporary, chunks, progress)
                if _is_there(path, temporary):
                    there += 1
                    continue
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.rename(temporary, path)
                files, size = files + 1, size + written
    finally:
        progress.finish()
        shutil.rmtree(room, ignore_errors=True)
    return files, size, there


Content = tuple[str, Iterator[memoryview | bytes]]


def _contents(table: FileTable, wanted: Mapping[str, int]) -> Iterator[Content]:
    """Each file and its bytes, in the order in which they lie: what is near each other far away is one request."""
    numbers = np.array(list(wanted.values()), np.int64)
    places = list(wanted)
    ranges = table.files.ranges
    order = (
        np.argsort(numbers) if ranges is None else np.lexsort((ranges.first_bytes(numbers), ranges.holders[numbers]))
    )
    plain = SpliceBuilder(table.files)
    after = []
    for at in order.tolist():
        if table.files.path(int(numbers[at])).endswith("/"):
            yield from _folder(table, places[at], int(numbers[at]))
        else:
            plain.value(int(numbers[at]))
            after.append((places[at], int(table.files.sizes[numbers[at]])))
    with plain.finish() as splice:
        chunks = _Chunks(splice.chunks())
        for place, size in after:
            yield place, chunks.take(size)


def _folder(table: FileTable, place: str, number: int) -> Iterator[Content]:
    """The files of a folder that is packed as one value."""
    value = SpliceBuilder(table.files)
    value.value(number)
    try:
        with value.finish() as splice, tarfile.open(fileobj=splice.open(), mode="r:") as archive:
            while (member := archive.next()) is not None:
                body = archive.extractfile(member)
                if body is None or ".." in member.name.split("/") or member.name.startswith("/"):
                    raise DamageFound(f"{member.name!r} would be written outside of the folder.")
                yield os.path.join(place, member.name), _blocks(body)
    except tarfile.TarError as error:
        raise DamageFound(f"{table.files.path(number)!r} is not a folder that brim packed: {error}.") from error


class _Chunks:
    """Bytes that come in pieces, given out in others."""

    def __init__(self, chunks: Iterator[memoryview]) -> None:
        self._chunks, self._rest = chunks, memoryview(b"")

    def take(self, size: int) -> Iterator[memoryview]:
        while size:
            if not self._rest:
                self._rest = next(self._chunks)
            step, self._rest = self._rest[:size], self._rest[size:]
            size -= len(step)
            yield step


def _blocks(body: IO[bytes]) -> Iterator[bytes]:
    while block := body.read(BUFFER_BYTES):
        yield block


def _write(path: str, chunks: Iterator[memoryview | bytes], progress: Progress) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    size = 0
    try:
        for chunk in chunks:
            write_all(descriptor, chunk)
            size += len(chunk)
            progress.advance(len(chunk))
    finally:
        os.close(descriptor)
    return size


def _is_there(path: str, temporary: str) -> bool:
    """Whether the same file is there already; InputError if another one is."""
    if not os.path.lexists(path):
        return False
    same = not os.path.islink(path) and os.path.isfile(path) and os.path.getsize(path) == os.path.getsize(temporary)
    if same:
        with open(path, "rb") as one, open(temporary, "rb") as other:
            while same and (block := one.read(BUFFER_BYTES)):
                same = block == other.read(BUFFER_BYTES)
    if not same:
        raise InputError(
            f"{os.path.basename(path)!r} is already there with other content.", hint="Unpack into an empty folder."
        )
    return True
