"""The cheap checks before the first byte: what would ruin a long run is found while it costs nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim import cuts
from brim.buckets.read_object import Changed, ObjectPiece, ahead
from brim.errors import FilesRefused, InputError, SourceError
from brim.file_set import FileSet, Ints
from brim.sources.file_table import FileTable, Reason, Refused, flat_numbers, one_array
from brim.sources.folder_tree import COMMANDS, HEAD_BYTES, MAX_POINTER_BYTES, LocalTree, pointer_kind

_SHOWN = 3
_BLOCK, _THREADS = 4096, 8
_REQUESTS = 64  # at a time, to a bucket


@dataclass(frozen=True, slots=True)
class Words:
    """A reason to refuse a file, of one and of several, and what to do about it."""

    one: str
    many: str
    todo: str


REASONS: dict[Reason, Words] = {
    "missing": Words("missing", "missing", "Restore them, or leave their rows out with --exclude."),
    "folder": Words("a folder, not a file", "folders, not files", "Name the files inside, or pack each folder first."),
    "special": Words("a pipe, socket or device", "pipes, sockets or devices", "Leave them out with --exclude."),
    "unreadable": Words("not readable", "not readable", "Give yourself the right to read them."),
    "annex": Words(
        "a git-annex pointer, not data", "git-annex pointers, not data", f"Fetch the data with: {COMMANDS['annex']}"
    ),
    "lfs": Words(
        "a Git LFS pointer, not data", "Git LFS pointers, not data", f"Fetch the data with: {COMMANDS['lfs']}"
    ),
    "url": Words("an address, not a local path", "addresses, not local paths", "Download them first."),
    "name": Words("named in a way that is not UTF-8", "named in a way that is not UTF-8", "Rename them."),
    "twin": Words(
        "an object with the name of a folder",
        "objects with the names of folders",
        "Rename them, or leave them out with --exclude.",
    ),
    "empty": Words(
        "empty (0 bytes)",
        "empty (0 bytes)",
        "Restore them, leave them out with --exclude, or take them with --allow-empty.",
    ),
    "oversize": Words(
        "too large for one cell of a Parquet file, which holds just under 2 GiB per row and column",
        "too large for one cell of a Parquet file, which holds just under 2 GiB per row and column",
        "Use --format=webdataset, give each file a row of its own, or leave them out with --oversize=skip.",
    ),
}


Oversize = Literal["error", "skip"]


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What the user lets pass."""

    allow_empty: bool = False
    skip_oversize: bool = False


def check_files(table: FileTable, options: CheckOptions, max_cell_bytes: int | None) -> FileTable:
    """The table with every refused file noted, and oversized cells emptied if the user asked for that."""
    refused = [*table.refused, *_unreadable_or_pointer(table)]
    if not options.allow_empty and not table.verbatim:
        empty = (table.files.sizes == 0) & ~table.files.packed()  # inside a recording, empty files are usual
        empty &= table.files.has_content(np.arange(len(empty)))
        refused += [Refused("empty", table.files.path(i)) for i in np.flatnonzero(empty).tolist()]
    if max_cell_bytes is not None:
        for name in table.columns:
            over = _oversize_rows(table, name, max_cell_bytes)
            if not len(over):
                continue
            paths = _paths_of(table, name, over)
            if options.skip_oversize:
                table = _empty_cells(table, name, over).replace(left_out=table.left_out + tuple(paths))
            else:
                refused += [Refused("oversize", path) for path in paths]
    table = _drop_bare_rows(table) if table.left_out else table
    return table.replace(refused=tuple(refused))


def raise_refused(table: FileTable) -> None:
    """FilesRefused if there are any."""
    if table.refused:
        lines = refusal_lines(table)
        raise FilesRefused(
            f"{len(table.refused)} of {len(table.files) + _absent(table)} files cannot be packaged:\n"
            + "\n".join(f"  {line}" for line in lines),
            problems=[{"reason": r.reason, "path": r.path} for r in table.refused],
        )


def refusal_lines(table: FileTable) -> list[str]:
    """One line for each reason: how many, which for example, and what to do."""
    lines = []
    for reason, count in Counter(r.reason for r in table.refused).most_common():
        words = REASONS[reason]
        paths = [r.path for r in table.refused if r.reason == reason]
        examples = ", ".join(paths[:_SHOWN]) + (f" and {count - _SHOWN} more" if count > _SHOWN else "")
        what = f"is {words.one}" if count == 1 else f"are {words.many}"
        lines.append(f"{count} {what}: {examples}. {words.todo}")
    return lines


def _absent(table: FileTable) -> int:
    return sum(r.reason in ("missing", "folder", "special", "annex", "url", "name", "twin") for r in table.refused)


def _unreadable_or_pointer(table: FileTable) -> list[Refused]:
    """Files that cannot be read, or stand for others. In threads: a cold disk answers several at once."""
    files = table.files.on_disk
    small = (files.sizes <= MAX_POINTER_BYTES) & (files.sizes > 0)
    small[list(files.bundles)] = False
    if files.bucket is not None:
        return list(_pointers_in_bucket(files, np.flatnonzero(small)))
    if files.remotes or table.held:
        return []  # what was just read to find its values is no pointer
    tree = LocalTree(files.root)

    def look(start: int) -> list[Refused]:
        found = []
        paths = files.paths.slice(start, _BLOCK).to_pylist()
        for path, is_small in zip(paths, small[start : start + _BLOCK].tolist(), strict=True):
            reason: Reason | None = None
            try:
                if is_small:
                    reason = pointer_kind(tree.head(path))
                elif not tree.may_read(path):
                    reason = "unreadable"
            except OSError:
                reason = "unreadable"
            if reason is not None:
                found.append(Refused(reason, path))
        return found

    with ThreadPoolExecutor(_THREADS) as pool:
        return [refused for found in pool.map(look, range(0, len(files), _BLOCK)) for refused in found]


def _pointers_in_bucket(files: FileSet, small: Ints) -> Iterator[Refused]:
    """Of objects, only those that are small enough to be pointers are looked at: each takes a request."""
    assert files.bucket is not None
    assert files.etags is not None
    bucket, etags = files.bucket, files.etags

    def pieces() -> Iterator[ObjectPiece]:
        for number in small.tolist():
            size = min(int(files.sizes[number]), HEAD_BYTES)
            yield ObjectPiece(bucket.key(files.path(number)), 0, size, etags[number].as_py())

    looked = ahead(bucket, pieces(), requests=_REQUESTS)
    for number in small.tolist():
        try:
            kind = pointer_kind(next(looked)[1])
        except Changed:
            raise files.changed(number, "is not the object that was listed, or is gone") from None
        if kind is not None:
            yield Refused(kind, files.path(number))


def _oversize_rows(table: FileTable, name: str, limit: int) -> Ints:
    # A list's levels take up to four bytes a file besides the length.
    extra = 8 if table.columns[name].is_list else 4
    return np.flatnonzero(table.cell_bytes(name, table.files.sizes + extra) > limit + 4)


def _paths_of(table: FileTable, name: str, rows: Ints) -> list[str]:
    column = table.rows.column(name).take(pa.array(rows))
    return [table.files.path(number) for number in flat_numbers(column).tolist()]


def _empty_cells(table: FileTable, name: str, rows: Ints) -> FileTable:
    mask = np.zeros(len(table), bool)
    mask[rows] = True
    column = one_array(table.rows.column(name))
    emptied = pc.if_else(pa.array(mask), pa.scalar(None, column.type), column)
    at = table.rows.column_names.index(name)
    return table.replace(rows=table.rows.set_column(at, name, emptied))


def _drop_bare_rows(table: FileTable) -> FileTable:
    """Rows whose last file was left out go as well."""
    ones = np.ones(len(table.files), np.int64)
    files = sum((table.cell_bytes(name, ones) for name in table.columns), np.zeros(len(table), np.int64))
    keep = files > 0
    before = cuts.running(keep.astype(np.int64))
    splits = tuple(
        type(split)(split.name, int(before[split.start]), int(before[split.stop]))
        for split in table.splits
        if before[split.stop] > before[split.start]
    )
    if not splits:
        raise SourceError("Every file is too large for the format.", hint="Use --format=webdataset.")
    return table.replace(rows=table.rows.filter(pa.array(keep)), splits=splits)


def check_paths_stay_home(table: FileTable) -> None:
    """Refuse metadata that would publish where things lie on this machine."""
    if table.verbatim:
        return
    root = table.files.root if table.files.bucket is None else ""  # a bucket tells nothing of this machine
    places = {root.rstrip("/"), os.path.expanduser("~").rstrip("/")} - {""}
    for field in table.rows.schema:
        if field.name in table.columns:
            continue
        for texts in (texts for chunk in table.rows.column(field.name).chunks for texts in _texts(chunk)):
            if any(pc.any(pc.match_substring(texts, f"{place}/")).as_py() for place in places):
                raise InputError(
                    f"The column {field.name!r} holds absolute paths of this machine, which would be published.",
                    hint=f"Leave it out with --drop={field.name}, package its files with --files={field.name}, "
                    "or make its paths relative.",
                )


def _texts(array: pa.Array) -> Iterator[pa.Array]:
    """Every array of texts inside an array."""
    if pa.types.is_dictionary(array.type):
        yield from _texts(array.dictionary)
    elif pa.types.is_struct(array.type):
        for child in array.flatten():
            yield from _texts(child)
    elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        yield from _texts(array.flatten())
    elif pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        yield array
