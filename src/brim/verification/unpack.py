"""Write the original files of a dataset, byte for byte, under their relative paths.

`unpack` verifies the shards that brim wrote. `unpack_rows` writes the files of selected rows, or of datasets that other
programs wrote.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from brim.errors import InputError, VerificationError
from brim.formats.parquet_levels import is_list_type
from brim.formats.parquet_reader import ParquetColumns, is_file_type
from brim.formats.range_readers import FileView, Hashing, Readable, ShardFile
from brim.formats.splice import SpliceBuilder
from brim.memory.limit import effective_limit
from brim.options.check_options import UnpackOptions
from brim.plans.shard_bytes import locate
from brim.plans.source_checks import is_inside, refuse_source
from brim.progress import Progress
from brim.records import dataclass
from brim.safe_names import path_below
from brim.sizes import format_size, plural
from brim.sources.file_table import FileTable, Split, flat_numbers, no_rows_error
from brim.sources.open_source import is_dataset, open_dataset
from brim.sources.selection import Selection
from brim.state.atomic_files import BUFFER_BYTES, failures, write_all
from brim.state.ledger import STATE, Receipt
from brim.state.retry import interrupted_by
from brim.storage.destination_address import check_not_empty, parse_destination
from brim.storage.location import Access, Location, folder_location, is_remote, split_address
from brim.storage.storage import open_storage
from brim.verification.published import Published, Subset, open_published
from brim.wording import Result

TEMPORARY_FOLDER = ".brim-unpack"  # the folder of incomplete files


_CHOOSE = "Choose rows or columns in which it occurs once, with --where or --columns."
_CASE = "Unpack to a case-sensitive file system, or choose one of them."


def safe_target(name: str, origin: str, root: str) -> str:
    """Return the path of a file to write; refuse a path that leaves the folder, directly or through a link."""
    path = path_below(root, name, origin)
    if path[len(root) :].lstrip(os.sep).partition(os.sep)[0].casefold() == TEMPORARY_FOLDER:
        raise InputError(f"{origin} names {name!r}, which is where brim keeps unfinished files.")
    return path


def named_files(table: FileTable) -> list[tuple[str, int]]:
    """Return (path, number) of every file once; raise InputError for one without a name, or two with one name."""
    number_by_path: dict[str, int] = {}
    for column in table.columns:
        for number in flat_numbers(table.rows.column(column)).tolist():
            if not table.files.has_content(np.array([number]))[0]:
                continue
            path = table.files.paths[number].as_py()
            if path is None:
                raise InputError(
                    f"The column {column!r} has content without a file name, so no file can be written.",
                    hint="Choose others with --columns, or read it with datasets.load_dataset.",
                )
            first = number_by_path.setdefault(path, number)
            if first == number:
                continue
            ranges = [[part.tolist() for part in table.files.places(np.array([n]))] for n in (first, number)]
            if ranges[0] != ranges[1]:
                raise InputError(
                    f"{path!r} is the name of two different files of the dataset, and one would overwrite the other.",
                    hint=_CHOOSE,
                    path=path,
                )
    return list(number_by_path.items())


def split_apart(table: FileTable) -> list[tuple[str, FileTable]]:
    """Return (folder, rows): all rows in the target, or each split in its own folder if their files share names."""
    parts = [(split.name, table.replace(rows=table.rows.slice(split.start, split.stop - split.start),
             splits=(Split(split.name, 0, split.stop - split.start),))) for split in table.splits]  # fmt: skip
    split_by_path: dict[str, str] = {}
    for name, part in parts:
        for path, _ in named_files(part):
            if split_by_path.setdefault(path, name) != name:
                return parts
    return [("", table)]


def safe_paths(files: Sequence[tuple[str, int]], root: str) -> dict[str, int]:
    """Return the target of each file; raise InputError for a path that leaves the folder, or occurs twice."""
    targets: dict[str, int] = {}
    folded: dict[str, str] = {}
    blind = _ignores_case(root)
    for path, number in files:
        target = safe_target(path, "a row", root)
        key = target.casefold() if blind else target
        if key in folded:
            hint = _CHOOSE if target in targets else _CASE
            raise InputError(f"{path!r} and {folded[key]!r} would be the same file here.", hint=hint)
        folded[key] = path
        targets[target] = number
    for key, path in folded.items():
        above = os.path.dirname(key)
        while len(above) > len(root):
            if above in folded:
                raise InputError(f"{folded[above]!r} is a file, and {path!r} would be inside it.", hint=_CHOOSE)
            above = os.path.dirname(above)
    return targets


def _ignores_case(folder: str) -> bool:
    probe = os.path.join(folder, f"{TEMPORARY_FOLDER}-Case")
    try:
        with open(probe, "x"):
            pass
        try:
            return os.path.exists(os.path.join(folder, f"{TEMPORARY_FOLDER}-cASE"))
        finally:
            os.unlink(probe)
    except OSError:
        return False


def unpack_rows(table: FileTable, root: str, progress: Progress) -> tuple[int, int, int]:
    """Write the files of a table below a folder; return their number and bytes, and how many existed already."""
    targets = safe_paths(named_files(table), root)
    total = int(table.files.sizes[np.array(list(targets.values()), np.int64)].sum()) if targets else 0
    os.makedirs(root, exist_ok=True)
    folder = os.path.join(root, TEMPORARY_FOLDER)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    files = size = existing = 0
    progress.start("unpack", total, 0, effective_limit().bytes)
    try:
        with interrupted_by(lambda: progress.advance(0)):
            temporary = os.path.join(folder, "file")
            for path, chunks in _contents(table, targets):
                written = _write(temporary, chunks, progress)
                if _exists_equal(path, temporary):
                    existing += 1
                    continue
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.rename(temporary, path)
                files, size = files + 1, size + written
    finally:
        progress.finish()
        shutil.rmtree(folder, ignore_errors=True)
    return files, size, existing


Content = tuple[str, Iterator[memoryview | bytes]]


def _contents(table: FileTable, targets: Mapping[str, int]) -> Iterator[Content]:
    """Yield each file and its bytes in storage order, so that adjacent remote values share a request."""
    numbers = np.array(list(targets.values()), np.int64)
    paths = list(targets)
    ranges = table.files.ranges
    order = (
        np.argsort(numbers) if ranges is None else np.lexsort((ranges.first_bytes(numbers), ranges.holders[numbers]))
    )
    plain = SpliceBuilder(table.files)
    after = []
    for index in order.tolist():
        if table.files.path(int(numbers[index])).endswith("/"):
            yield from _folder(table, paths[index], int(numbers[index]))
        else:
            plain.value(int(numbers[index]))
            after.append((paths[index], int(table.files.sizes[numbers[index]])))
    with plain.finish() as splice:
        chunks = _Chunks(splice.chunks())
        for path, size in after:
            yield path, chunks.take(size)


def _folder(table: FileTable, folder: str, number: int) -> Iterator[Content]:
    """Yield the files of a folder that is packed as one value."""
    value = SpliceBuilder(table.files)
    value.value(number)
    try:
        with value.finish() as splice, tarfile.open(fileobj=splice.open(), mode="r:") as archive:
            while (member := archive.next()) is not None:
                body = archive.extractfile(member)
                if body is None:
                    raise VerificationError(f"{member.name!r} is not a file.")
                target = path_below(folder, member.name, repr(table.files.path(number)))
                yield target, iter(partial(body.read, BUFFER_BYTES), b"")
    except tarfile.TarError as error:
        raise VerificationError(f"{table.files.path(number)!r} is not a folder that brim packed: {error}.") from error


class _Chunks:
    """Splits a stream of chunks at other positions."""

    def __init__(self, chunks: Iterator[memoryview]) -> None:
        self._chunks, self._buffer = chunks, memoryview(b"")

    def take(self, size: int) -> Iterator[memoryview]:
        while size:
            if not self._buffer:
                self._buffer = next(self._chunks)
            step, self._buffer = self._buffer[:size], self._buffer[size:]
            size -= len(step)
            yield step


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


def _exists_equal(path: str, temporary: str) -> bool:
    """Return whether the same file exists; raise InputError if its content differs."""
    if not os.path.lexists(path):
        return False
    same = not os.path.islink(path) and os.path.isfile(path) and os.path.getsize(path) == os.path.getsize(temporary)
    if same:
        with open(path, "rb") as existing, open(temporary, "rb") as new:
            while same and (block := existing.read(BUFFER_BYTES)):
                same = block == new.read(BUFFER_BYTES)
    if not same:
        raise InputError(
            f"{os.path.basename(path)!r} already exists with other content.", hint="Unpack into an empty folder."
        )
    return True


@dataclass(repr=False)
class UnpackResult(Result):
    """The number and bytes of written files."""

    files: int = 0
    bytes: int = 0
    already_there: int = 0
    unproved: int = 0  # shards without a receipt to compare with

    def summary(self) -> list[tuple[str, str]]:
        """Return the result as text lines."""
        existing = f"; {self.already_there:,} existed with the same content" if self.already_there else ""
        lines = [("unpacked", f"{self.files:,} files, {format_size(self.bytes)}{existing}")]
        unverified = f"{plural(self.unproved, 'shard')} without a receipt to compare with"
        return [*lines, ("not verified", unverified)] if self.unproved else lines


def unpack(options: UnpackOptions, progress: Progress) -> UnpackResult:
    """Write every file of a dataset, or of chosen rows, below `out`. Existing files must have the same content.

    No file appears before its shard is verified: a local one is hashed first, one on the Hub as it streams. With
    `condition` or `columns`, files are not compared with the receipts of their shards, which are of the whole shards.
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
    condition, columns = options.where, list(dict.fromkeys(options.columns))
    if isinstance(destination, Selection | FileTable) or condition is not None or columns or _is_file(destination):
        if not isinstance(destination, Selection | FileTable) and "://" not in os.fspath(destination):
            _refuse_among_shards(folder_location(destination), target)
        rows = open_dataset(destination, config=config, split=split, access=access)
        rows = rows.where(condition) if condition is not None else rows
        rows = rows.columns(columns) if columns else rows
        return _unpack_selection(rows, target, progress)
    _refuse_among_shards(parse_destination(destination, access), target)
    with open_published(destination, options.state_dir, progress.note, access, config, split) as published:
        receipts = published.record.receipts
        names = sorted(published.sizes)
        unfinished = next((subset for subset in published.subsets if subset.state == "unfinished"), None)
        if unfinished is not None or published.record.unfinished:
            raise VerificationError(
                f"{os.fspath(destination)!r} is {'unfinished' if unfinished is None else unfinished.state_text}.",
                hint="Finish it first, or unpack a complete part of it with --from-config and --from-split.",
            )
        if not names:
            raise InputError(f"{os.fspath(destination)!r} has no shards.")
        if not receipts and not published.record.computed:  # written by another program
            rows = open_dataset(destination, config=config, split=split, access=access)
            return _unpack_selection(rows, target, progress, len(names))
        missing = [name for name in receipts if name not in published.sizes]
        if missing:
            raise VerificationError(f"{missing[0]} is missing.", hint="Run brim verify for a list of all problems.")
        folders = _target_folders(published)
        if len(set(folders.values())) > 1:
            progress.note("configs or splits have files of the same name: each gets a separate folder")
        progress.start("unpack", sum(published.sizes.values()), len(names), effective_limit().bytes)
        try:
            with failures(target):
                target.mkdir(parents=True, exist_ok=True)
                work = _Unpacking(published, os.path.realpath(target), progress)
                try:
                    for name in names:
                        progress.begin(name, published.sizes[name])
                        work.shard(name, receipts.get(name), folders.get(name, ""))
                finally:
                    work.clear()
                return work.finish()
        finally:
            progress.finish()


def _is_file(source: str | os.PathLike[str]) -> bool:
    """Return whether a source names shards, not a folder or a repository."""
    text = os.fspath(source)
    if "://" in text:
        return is_remote(text) and not open_storage(split_address(text)).can_list
    return os.path.isfile(text) or (not os.path.exists(text) and is_dataset(text))


def _refuse_among_shards(location: Location, target: Path) -> None:
    if location.is_local:
        source = location.path
        refuse_source(folder_location(target), str(source))
        own = (source / STATE).is_dir()  # a dataset of brim, whose shards are in one folder
        if is_inside(target, source / "data") or (not own and source.is_dir() and is_inside(target, source)):
            raise InputError(f"{str(target)!r} is inside the folder of the shards.", hint="Unpack to another folder.")


def _folders(subsets: Sequence[Subset]) -> dict[str, str]:
    """Return the folder of each shard: CONFIG/SPLIT; for the default config SPLIT, unless a config has that name."""
    configs = {subset.config for subset in subsets}
    mixed = any(subset.config == "default" and subset.split in configs for subset in subsets)
    folder_of = {subset: f"{subset.config}/{subset.split}" if mixed else subset.name for subset in subsets}
    return {name: folder for subset, folder in folder_of.items() for name in subset.names}


def _target_folders(published: Published) -> dict[str, str]:
    """Return the folder of each shard's files: none, unless configs or splits share names of files."""
    if len(published.subsets) < 2:
        return {}
    subset_by_path: dict[str, int] = {}
    shared = False
    for number, subset in enumerate(published.subsets):
        for name in subset.names:
            with closing(published.open(name)) as shard:
                shared = shared or any(subset_by_path.setdefault(path, number) != number for path in paths_in(shard))
            if shared:
                return _folders(published.subsets)
    return {}


def paths_in(shard: Readable) -> Iterator[str]:
    """Yield the names of the files in a shard."""
    if not shard.name.endswith(".parquet"):
        yield from (file.path for file in locate(shard) if file.path)
        return
    with ParquetColumns(shard) as columns:
        for column in columns.schema:
            for group in range(columns.footer.num_row_groups) if is_file_type(column.type) else ():
                cells = columns.cells(group, column.name)
                inner = cells.flatten() if is_list_type(cells.type) else cells
                yield from inner.field("path").drop_null().to_pylist()


def _unpack_selection(rows: Selection, target: Path, progress: Progress, unproved: int = 0) -> UnpackResult:
    no_files = InputError("These columns have no files.", hint=f"Columns: {', '.join(rows.origin.columns)}.")
    if not rows.origin.file_columns:
        raise no_files  # before any row is read
    has_steps = bool(rows.steps)
    table = (rows if has_steps else rows.columns(rows.origin.file_columns)).table()
    if has_steps and not len(table):
        raise no_rows_error(table, "unpack")
    if not table.columns:
        raise no_files
    with failures(target):
        target.mkdir(parents=True, exist_ok=True)
        root = os.path.realpath(target)
        files = size = existing = 0
        for folder, part in split_apart(table):
            counts = unpack_rows(part, path_below(root, folder, "a split") if folder else root, progress)
            files, size, existing = files + counts[0], size + counts[1], existing + counts[2]
    return UnpackResult(files, size, existing, unproved)


class _Unpacking:
    """Writes files to a temporary folder, and moves them to their paths when their shard is verified."""

    def __init__(self, published: Published, root: str, progress: Progress) -> None:
        self.published, self.root, self.progress = published, root, progress
        self.result = UnpackResult()
        self._temporary_folder = os.path.join(root, TEMPORARY_FOLDER)
        self._pending: dict[str, str] = {}  # path → temporary file
        self.clear()  # files of a killed run

    def shard(self, name: str, receipt: Receipt | None, folder: str) -> None:
        """Write the files of a shard below `folder`."""
        if receipt is None:
            self.result.unproved += 1
        elif not self.published.remote:
            self._check_hash(name, receipt, self.published.sha256(name, True, lambda _: None))
        with closing(self.published.stream(name)) as shard, closing(self.published.open(name)) as footer_of:
            for entry in locate(shard, footer_of):
                for file in _members(shard, entry) if (entry.path or "").endswith("/") else (entry,):
                    self._file(shard, file, folder)
                self.progress.advance(entry.size)
            if isinstance(shard, Hashing) and receipt is not None:
                self._check_hash(name, receipt, shard.sha256())
        for path, temporary in self._pending.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.rename(temporary, path)
        self._pending = {}
        self.progress.shard(name, self.published.sizes[name], "", "unpacked")

    def _check_hash(self, name: str, receipt: Receipt, sha256: str | None) -> None:
        if sha256 != receipt.sha256:
            raise VerificationError(
                f"{name} is damaged: its content differs from its checksum.",
                hint="Run brim verify for a list of all problems.",
            )

    def _file(self, shard: Readable, entry: ShardFile, folder: str) -> None:
        path = _safe_path(entry, shard.name, path_below(self.root, folder, shard.name) if folder else self.root)
        existing = self._pending.get(path, path)
        if os.path.lexists(existing):
            if not _has_equal_content(existing, shard, entry):
                raise InputError(
                    f"{entry.path!r} already exists with other content.", hint="Unpack into an empty folder."
                )
            self.result.already_there += 1
            return
        os.makedirs(self._temporary_folder, exist_ok=True)
        temporary = os.path.join(self._temporary_folder, str(len(self._pending)))
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            shard.copy_to(descriptor, entry.offset, entry.size)
        finally:
            os.close(descriptor)
        self._pending[path] = temporary
        self.result.files += 1
        self.result.bytes += entry.size

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
        """Remove unverified files."""
        shutil.rmtree(self._temporary_folder, ignore_errors=True)


def _members(shard: Readable, folder: ShardFile) -> Iterator[ShardFile]:
    """Yield the files of a folder that is packed as one value."""
    file = io.BufferedReader(FileView(shard, position=folder.offset))
    with tarfile.open(fileobj=file, mode="r:") as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would keep every header
            yield ShardFile(folder.column, folder.row, f"{folder.path}{member.name}", member.offset_data, member.size)


def _safe_path(file: ShardFile, shard_name: str, root: str) -> str:
    """Return the path of a file to write; refuse a path that leaves the folder, directly or through a link."""
    name = file.path or ""
    if file.path is None:
        raise InputError(
            f"{shard_name} row {file.row} has content without a file name in its column {file.column!r}: there is no "
            "file to write.",
            hint="Read it with datasets.load_dataset.",
        )
    return safe_target(name, f"{shard_name} row {file.row}", root)


def _has_equal_content(path: str, shard: Readable, entry: ShardFile) -> bool:
    """Return whether the file at `path` has the content of the shard's file."""
    if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) != entry.size:
        return False
    with open(path, "rb", buffering=0) as file:
        for offset in range(0, entry.size, BUFFER_BYTES):
            want = min(BUFFER_BYTES, entry.size - offset)
            if file.read(want) != shard.read_at(entry.offset + offset, want):
                return False
    return True
