"""The original files back from a dataset, byte for byte, under their relative paths.

Of the rows that were chosen, and of no others, whoever wrote the dataset and wherever it is: `unpack_rows`.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO

import numpy as np

from brim.errors import InputError, VerificationError
from brim.formats.file_views import FileView
from brim.formats.parquet_columns import ParquetColumns, is_file_type
from brim.formats.parquet_levels import is_list_type
from brim.formats.range_readers import Hashing, Readable, ShardFile
from brim.formats.splice import SpliceBuilder
from brim.memory.limit import effective_limit
from brim.options.check_options import UnpackOptions
from brim.plans.shard_bytes import locate
from brim.plans.source_checks import is_inside, refuse_source
from brim.progress import Progress
from brim.records import dataclass
from brim.safe_names import path_below
from brim.sizes import format_size, plural
from brim.sources.file_table import FileTable, Split, flat_numbers, nothing_chosen
from brim.sources.open_dataset import is_dataset, open_dataset
from brim.sources.selection import Selection
from brim.state.atomic_files import BUFFER_BYTES, failures, write_all
from brim.state.ledger import STATE, Receipt
from brim.state.retry import interrupted_by
from brim.storage.destination_address import check_not_empty, parse_destination
from brim.storage.location import Access, Location, folder_location, is_remote, split_address
from brim.storage.storage import open_storage
from brim.verification.published import Published, Subset, opened
from brim.wording import Result

WAITING = ".brim-unpack"  # where files are until they are whole


_CHOOSE = "Choose rows or columns in which it comes once, with --where or --columns."
_CASE = "Unpack to a file system that tells capital letters from small ones, or choose one of them."


def safe_place(name: str, where: str, root: str) -> str:
    """Where a file goes; refuses a path that leads out of the folder, also by a link that is there."""
    path = path_below(root, name, where)
    if path[len(root) :].lstrip(os.sep).partition(os.sep)[0].casefold() == WAITING:
        raise InputError(f"{where} names {name!r}, which is where brim keeps unfinished files.")
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
                    f"The column {column!r} has content without a file name, so there is no file to write.",
                    hint="Choose others with --columns, or read it with datasets.load_dataset.",
                )
            other = seen.setdefault(path, number)
            if other != number and not _same_place(table, other, number):
                raise InputError(
                    f"{path!r} is the name of two different files of the dataset, and one would overwrite the other.",
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
    """Where each file goes. VerificationError for a path that would leave the folder, or that comes twice there."""
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
                raise InputError(f"{folded[above]!r} is a file, and {path!r} would be inside it.", hint=_CHOOSE)
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
                if body is None:
                    raise VerificationError(f"{member.name!r} is not a file.")
                yield path_below(place, member.name, repr(table.files.path(number))), _blocks(body)
    except tarfile.TarError as error:
        raise VerificationError(f"{table.files.path(number)!r} is not a folder that brim packed: {error}.") from error


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
            f"{os.path.basename(path)!r} already exists with other content.", hint="Unpack into an empty folder."
        )
    return True


@dataclass(repr=False)
class UnpackResult(Result):
    """What was written."""

    files: int = 0
    bytes: int = 0
    already_there: int = 0
    unproved: int = 0  # shards without a receipt to compare with

    def summary(self) -> list[tuple[str, str]]:
        """Return what was written, for people."""
        existing = f"; {self.already_there:,} existed with the same content" if self.already_there else ""
        lines = [("unpacked", f"{self.files:,} files, {format_size(self.bytes)}{existing}")]
        unverified = f"{plural(self.unproved, 'shard')} without a receipt to compare with"
        return [*lines, ("not verified", unverified)] if self.unproved else lines


def unpack(options: UnpackOptions, progress: Progress) -> UnpackResult:
    """Write every file of a dataset, or of chosen rows, below `out`. Existing files must have the same content.

    No file appears before its shard is verified: a local one is hashed first, one on the Hub as it streams. With
    `where` or `columns`, files are not compared with the receipts of their shards, which are of the whole shards.
    """
    destination, out, access = options.destination, options.out, Access(options.endpoint_url, options.anonymous)
    config, split = options.from_config, options.from_split
    check_not_empty(os.fspath(out))
    if "://" in os.fspath(out):
        raise InputError(
            f"Files can only be unpacked to a local folder, not to {os.fspath(out)!r}.", hint="Name a local folder."
        )
    target = Path(out)
    if target.exists() and not target.is_dir():
        raise InputError(f"{str(target)!r} is a file.", hint="Name a folder.")
    where, columns = options.where, list(dict.fromkeys(options.columns))
    if isinstance(destination, Selection | FileTable) or where is not None or columns or _is_file(destination):
        if not isinstance(destination, Selection | FileTable) and "://" not in os.fspath(destination):
            _refuse_among_shards(folder_location(destination), target)
        rows = open_dataset(destination, config=config, split=split, access=access)
        rows = rows.where(where) if where is not None else rows
        rows = rows.columns(columns) if columns else rows
        return _unpack_chosen(rows, target, progress)
    _refuse_among_shards(parse_destination(destination, access), target)
    with opened(destination, options.state_dir, progress.note, access, config, split) as published:
        receipts = published.record.receipts
        names = sorted(published.sizes)
        begun = next((subset for subset in published.subsets if subset.state == "unfinished"), None)
        if begun is not None or published.record.unfinished:
            raise VerificationError(
                f"{os.fspath(destination)!r} is {'unfinished' if begun is None else begun.words}.",
                hint="Finish it first, or unpack a complete part of it with --from-config and --from-split.",
            )
        if not names:
            raise InputError(f"{os.fspath(destination)!r} has no shards.")
        if not receipts and not published.record.computed:  # somebody else wrote it
            rows = open_dataset(destination, config=config, split=split, access=access)
            return _unpack_chosen(rows, target, progress, len(names))
        missing = [name for name in receipts if name not in published.sizes]
        if missing:
            raise VerificationError(f"{missing[0]} is missing.", hint="Run brim verify for a list of all problems.")
        places = _places(published)
        if len(set(places.values())) > 1:
            progress.note("configs or splits have files of the same name: each goes into a folder of its own")
        progress.start("unpack", sum(published.sizes.values()), len(names), effective_limit().bytes)
        try:
            with failures(target):
                target.mkdir(parents=True, exist_ok=True)
                work = _Unpacking(published, os.path.realpath(target), progress)
                try:
                    for name in names:
                        progress.begin(name, published.sizes[name])
                        work.shard(name, receipts.get(name), places.get(name, ""))
                finally:
                    work.clear()
                return work.finish()
        finally:
            progress.finish()


def _is_file(source: str | os.PathLike[str]) -> bool:
    """Whether shards are given one by one, and no folder or repository of them."""
    text = os.fspath(source)
    if "://" in text:
        return is_remote(text) and not open_storage(split_address(text)).can_list
    return os.path.isfile(text) or (not os.path.exists(text) and is_dataset(text))


def _refuse_among_shards(location: Location, target: Path) -> None:
    if location.is_local:
        source = location.path
        refuse_source(folder_location(target), str(source))
        own = (source / STATE).is_dir()  # of brim's, whose shards are in one folder
        if is_inside(target, source / "data") or (not own and source.is_dir() and is_inside(target, source)):
            raise InputError(f"{str(target)!r} is inside the folder of the shards.", hint="Unpack to another folder.")


def _folders(subsets: Sequence[Subset]) -> dict[str, str]:
    """By shard: CONFIG/SPLIT; of the default config SPLIT alone, unless a config has the name of one of its splits."""
    configs = {subset.config for subset in subsets}
    mixed = any(subset.config == "default" and subset.split in configs for subset in subsets)
    of = {subset: f"{subset.config}/{subset.split}" if mixed else subset.name for subset in subsets}
    return {name: folder for subset, folder in of.items() for name in subset.names}


def _places(published: Published) -> dict[str, str]:
    """The folder of each shard's files: none, unless files of several configs or splits have the same name."""
    if len(published.subsets) < 2:
        return {}
    seen: dict[str, int] = {}
    shared = False
    for number, subset in enumerate(published.subsets):
        for name in subset.names:
            with closing(published.open(name)) as shard:
                shared = shared or any(seen.setdefault(path, number) != number for path in paths_in(shard))
            if shared:
                return _folders(published.subsets)
    return {}


def paths_in(shard: Readable) -> Iterator[str]:
    """The names of the files in a shard, without their content."""
    if not shard.name.endswith(".parquet"):
        yield from (found.path for found in locate(shard) if found.path)
        return
    with ParquetColumns(shard) as columns:
        for column in columns.schema:
            for group in range(columns.footer.num_row_groups) if is_file_type(column.type) else ():
                cells = columns.cells(group, column.name)
                inner = cells.flatten() if is_list_type(cells.type) else cells
                yield from inner.field("path").drop_null().to_pylist()


def _unpack_chosen(rows: Selection, target: Path, progress: Progress, unproved: int = 0) -> UnpackResult:
    no_files = InputError("These columns have no files.", hint=f"Columns: {', '.join(rows.origin.columns)}.")
    if not rows.origin.file_columns:
        raise no_files  # before any row is read
    has_steps = bool(rows.steps)
    table = (rows if has_steps else rows.columns(rows.origin.file_columns)).table()
    if has_steps and not len(table):
        raise nothing_chosen(table, "unpack")
    if not table.columns:
        raise no_files
    with failures(target):
        target.mkdir(parents=True, exist_ok=True)
        root = os.path.realpath(target)
        files = size = there = 0
        for place, part in split_apart(table):
            of = unpack_rows(part, path_below(root, place, "a split") if place else root, progress)
            files, size, there = files + of[0], size + of[1], there + of[2]
    return UnpackResult(files, size, there, unproved)


class _Unpacking:
    """Files go to a folder beside the others first, and get their names when their shard is proved."""

    def __init__(self, published: Published, root: str, progress: Progress) -> None:
        self.published, self.root, self.progress = published, root, progress
        self.result = UnpackResult()
        self._waiting_room = os.path.join(root, WAITING)
        self._waiting: dict[str, str] = {}  # by its path, where a file waits
        self.clear()  # what a killed run left

    def shard(self, name: str, receipt: Receipt | None, place: str) -> None:
        """Its files, below the folder `place`."""
        if receipt is None:
            self.result.unproved += 1
        elif not self.published.remote:
            self._prove(name, receipt, self.published.sha256(name, True, lambda _: None))
        with closing(self.published.stream(name)) as shard, closing(self.published.open(name)) as footer_of:
            for found in locate(shard, footer_of):
                for file in _members(shard, found) if (found.path or "").endswith("/") else (found,):
                    self._file(shard, file, place)
                self.progress.advance(found.size)
            if isinstance(shard, Hashing) and receipt is not None:
                self._prove(name, receipt, shard.sha256())
        for path, temporary in self._waiting.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.rename(temporary, path)
        self._waiting = {}
        self.progress.shard(name, self.published.sizes[name], "", "unpacked")

    def _prove(self, name: str, receipt: Receipt, sha256: str | None) -> None:
        if sha256 != receipt.sha256:
            raise VerificationError(
                f"{name} is damaged: its content differs from what was written.",
                hint="Run brim verify for a list of all problems.",
            )

    def _file(self, shard: Readable, found: ShardFile, place: str) -> None:
        path = _safe_path(found, shard.name, path_below(self.root, place, shard.name) if place else self.root)
        there = self._waiting.get(path, path)
        if os.path.lexists(there):
            if not _holds(there, shard, found):
                raise InputError(
                    f"{found.path!r} already exists with other content.", hint="Unpack into an empty folder."
                )
            self.result.already_there += 1
            return
        os.makedirs(self._waiting_room, exist_ok=True)
        temporary = os.path.join(self._waiting_room, str(len(self._waiting)))
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            shard.copy_to(descriptor, found.offset, found.size)
        finally:
            os.close(descriptor)
        self._waiting[path] = temporary
        self.result.files += 1
        self.result.bytes += found.size

    def finish(self) -> UnpackResult:
        computed = self.published.record.computed
        if (self.result.unproved or computed) and not self.result.files + self.result.already_there:
            why = "was computed" if computed else "was not built by brim, and its columns are encoded"
            raise InputError(
                f"The dataset has no files that brim packed: it {why}.",
                hint="Read it with datasets.load_dataset.",
            )
        return self.result

    def clear(self) -> None:
        """Nothing unproved is left, however it ended."""
        shutil.rmtree(self._waiting_room, ignore_errors=True)


def _members(shard: Readable, found: ShardFile) -> Iterator[ShardFile]:
    """The files of a folder that is packed as one value."""
    file = io.BufferedReader(FileView(shard, position=found.offset))
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would keep every header
            yield ShardFile(found.column, found.row, f"{found.path}{member.name}", member.offset_data, member.size)


def _safe_path(found: ShardFile, shard_name: str, root: str) -> str:
    """Where a file goes; refuses a path that leads out of the folder, also by a link that is there."""
    name = found.path or ""
    if found.path is None:
        raise InputError(
            f"{shard_name} row {found.row} has content without a file name in its column {found.column!r}: there is no "
            "file to write.",
            hint="Read it with datasets.load_dataset.",
        )
    return safe_place(name, f"{shard_name} row {found.row}", root)


def _holds(path: str, shard: Readable, found: ShardFile) -> bool:
    """Whether the file at `path` is what the shard holds."""
    if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) != found.size:
        return False
    with open(path, "rb", buffering=0) as file:
        for at in range(0, found.size, BUFFER_BYTES):
            want = min(BUFFER_BYTES, found.size - at)
            if file.read(want) != shard.read_at(found.offset + at, want):
                return False
    return True
