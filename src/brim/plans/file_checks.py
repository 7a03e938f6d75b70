"""Check the files of a source before the first byte is read: missing, unreadable, pointers, empty, too large."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim import partition as cuts
from brim.errors import InputError, InvalidFilesError, SourceError
from brim.file_set import FileSet, Ints
from brim.formats.source_reader import remote_file
from brim.options.groups import CheckFileOptions
from brim.records import dataclass
from brim.sizes import format_size
from brim.sources.file_table import FileTable, Reason, Refused, flat_numbers, nested_numbers, one_array
from brim.sources.folder_tree import (
    COMMANDS,
    HEAD_BYTES,
    MAX_POINTER_BYTES,
    LocalTree,
    annex_size,
    datalad_get,
    is_annex_link,
    pointer_kind,
)
from brim.storage.reading import RangeStream
from brim.storage.storage import ByteRange

_SHOWN = 3
_BLOCK, _THREADS = 4096, 8
_REQUESTS = 64  # in parallel, to a bucket


@dataclass(frozen=True, slots=True)
class RefusalText:
    """The texts of a reason to refuse files: for one file, for several, and what to do."""

    singular: str
    plural: str
    todo: str


REASONS: dict[Reason, RefusalText] = {
    "missing": RefusalText("missing", "missing", "Restore them, or leave their rows out with --exclude."),
    "folder": RefusalText(
        "a folder, not a file", "folders, not files", "Name the files inside, or pack each folder first."
    ),
    "special": RefusalText("a pipe, socket or device", "pipes, sockets or devices", "Leave them out with --exclude."),
    "unreadable": RefusalText("not readable", "not readable", "Give yourself the right to read them."),
    "annex": RefusalText(
        "a git-annex pointer, not data", "git-annex pointers, not data", f"Fetch the data with: {COMMANDS['annex']}"
    ),
    "lfs": RefusalText(
        "a Git LFS pointer, not data", "Git LFS pointers, not data", f"Fetch the data with: {COMMANDS['lfs']}"
    ),
    "url": RefusalText("an address, not a local path", "addresses, not local paths", "Download them first."),
    "name": RefusalText("named in a way that is not UTF-8", "named in a way that is not UTF-8", "Rename them."),
    "twin": RefusalText(
        "an object with the name of a folder",
        "objects with the names of folders",
        "Rename them, or leave them out with --exclude.",
    ),
    "empty": RefusalText(
        "empty (0 bytes)",
        "empty (0 bytes)",
        "Restore them, leave them out with --exclude, or take them with --allow-empty.",
    ),
    "oversize": RefusalText(
        "too large for one cell of a Parquet file, which holds just under 2 GiB per row and column",
        "too large for one cell of a Parquet file, which holds just under 2 GiB per row and column",
        "Use --format=webdataset, give each file a separate row, or leave them out with --oversize=skip.",
    ),
}


Oversize = Literal["error", "skip"]


def check_files(table: FileTable, options: CheckFileOptions, max_cell_bytes: int | None) -> FileTable:
    """Add refused files to a table; empty oversized cells with `--oversize=skip`."""
    table, refused = _with_absent(table, [*table.refused, *_unreadable_or_pointer(table)])
    if not options.allow_empty and not table.verbatim:
        empty = (table.files.sizes == 0) & ~table.files.packed()  # inside a recording, empty files are usual
        empty &= table.files.has_content(np.arange(len(empty)))
        refused += [Refused("empty", table.files.path(i)) for i in np.flatnonzero(empty).tolist()]
    if max_cell_bytes is not None:
        for name in table.columns:
            # A list's levels take up to four bytes per file besides the length.
            cell_bytes = table.cell_bytes(name, table.files.sizes + (8 if table.columns[name].is_list else 4))
            over = np.flatnonzero(cell_bytes > max_cell_bytes + 4)
            if not len(over):
                continue
            present = flat_numbers(table.rows.column(name).take(pa.array(over))).tolist()
            paths = [table.files.path(number) for number in present]
            if options.oversize == "skip":
                table = table.replace(left_out=table.left_out + tuple(paths))
                # Columns that are aligned with it lose the same cells.
                base = table.aligned_with.get(name, name)
                for column in [base, *(other for other, first in table.aligned_with.items() if first == base)]:
                    table = _empty_cells(table, column, over)
            else:
                refused += [Refused("oversize", path) for path in paths]
        # Files inside of nested values are always refused: their bytes are part of a value.
        for name, kind in table.nested.items():
            for numbers, rows in nested_numbers(table.rows.column(name), kind):
                total = np.zeros(len(table), np.int64)
                np.add.at(total, rows, table.files.sizes[numbers] + 8)
                over = np.flatnonzero(total > max_cell_bytes)
                refused += [Refused("oversize", f"{name}, row {row}") for row in over.tolist()]
    table = _drop_bare_rows(table) if table.left_out else table
    return table.replace(refused=tuple(refused))


def _with_absent(table: FileTable, refused: list[Refused]) -> tuple[FileTable, list[Refused]]:
    """Accept files that git-annex keeps elsewhere if their keys contain their sizes."""
    files = table.files
    if files.bucket is not None or files.ranges is not None or not any(r.reason == "annex" for r in refused):
        return table, refused
    number_of = {path: number for number, path in enumerate(files.paths.to_pylist())}
    packed, sizes, remaining, absent = files.packed(), files.sizes.copy(), [], []
    for item in refused:
        number = number_of.get(item.path)
        is_annexed = item.reason == "annex" and number is not None and not packed[number]
        size = annex_size(files.root, item.path) if is_annexed else None
        if size is None or number is None:
            remaining.append(item)
        else:
            sizes[number] = size
            absent.append(item.path)
    return table.replace(files=replace(files, sizes=sizes), absent=tuple(absent)), remaining


def absent_text(table: FileTable) -> str:
    """Describe the files that git-annex keeps elsewhere."""
    numbers = np.flatnonzero(np.isin(table.files.paths.to_numpy(zero_copy_only=False), list(table.absent)))
    size = format_size(int(table.files.sizes[numbers].sum()))
    examples = ", ".join(table.absent[:_SHOWN]) + (" …" if len(table.absent) > _SHOWN else "")
    return f"{len(table.absent):,} file(s) of {size} are keys of git-annex, their content is elsewhere: {examples}"


def raise_refused(table: FileTable, *, planning: bool = False) -> None:
    """Raise InvalidFilesError if files are refused. With `planning`, git-annex may keep their content elsewhere."""
    absent = () if planning else table.absent
    refused = [*table.refused, *(Refused("annex", path) for path in absent)]
    if refused:
        lines = refusal_lines(refused)
        listed = set(table.files.paths.to_pylist()) if table.refused else set()
        unlisted = {file.path for file in table.refused} - listed
        raise InvalidFilesError(
            f"{len(refused)} of {len(table.files) + len(unlisted)} files cannot be packaged:\n"
            + "\n".join(f"  {line}" for line in lines),
            problems=[{"reason": r.reason, "path": r.path} for r in refused],
        )


def raise_unfit(table: FileTable, strict: bool) -> None:
    """Raise SourceError if aligned lists differ in length; with `--strict`, or a strict recipe, also if the source is
    not as the recipe expects, or has data that belongs to no column."""
    if misaligned := table.misaligned():
        suffix = [f"and {len(misaligned) - _SHOWN} more"] if len(misaligned) > _SHOWN else []
        raise SourceError(
            "These list columns must have the same length in every row, but do not:\n"
            + "\n".join(f"  {line}" for line in [*misaligned[:_SHOWN], *suffix]),
            hint="Restore the missing files; brim check names them.",
        )
    unmet = [f"{finding.name}: {finding.detail}" for finding in table.expected if not finding.ok] if strict else []
    hints = ["Complete the source, or leave out --strict to build it as it is."] if unmet else []
    unmatched = table.unmatched
    if unmatched is not None and (strict or unmatched.is_error) and unmatched.count("data"):
        unmet.append(unmatched.lines()[0])
        hints.append(unmatched.hint)
    if unmet:
        raise SourceError(
            f"The source is not as expected (by {'--strict' if strict else 'the recipe'}):\n"
            + "\n".join(f"  {line}" for line in unmet),
            hint=" ".join(hints),
            findings=unmet,
        )


def refusal_lines(refused: Sequence[Refused]) -> list[str]:
    """Return one line per reason: the number of files, examples, and what to do."""
    lines = []
    for reason, count in Counter(r.reason for r in refused).most_common():
        text = REASONS[reason]
        paths = [r.path for r in refused if r.reason == reason]
        examples = ", ".join(paths[:_SHOWN]) + (f" and {count - _SHOWN} more" if count > _SHOWN else "")
        summary = f"is {text.singular}" if count == 1 else f"are {text.plural}"
        lines.append(f"{count} {summary}: {examples}. {todo(reason, paths)}")
    return lines


def todo(reason: Reason, paths: Sequence[str]) -> str:
    """Return what to do about refused files."""
    if reason == "annex":
        return f"Fetch the data with: {datalad_get(paths)}   (in the folder of the dataset)"
    return REASONS[reason].todo


def _unreadable_or_pointer(table: FileTable) -> list[Refused]:
    """Return files that are unreadable or pointers. Uses threads, since a cold disk serves several requests at once."""
    files = table.files.on_disk
    small = (files.sizes <= MAX_POINTER_BYTES) & (files.sizes > 0)
    small[list(files.bundles)] = False
    if files.bucket is not None:
        return list(_pointers_in_bucket(files, np.flatnonzero(small)))
    if files.remotes or table.held:
        return []  # these files were just read, so they are not pointers
    tree = LocalTree(files.root)

    def check_block(start: int) -> list[Refused]:
        block = []
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
            if reason == "unreadable" and is_annex_link(os.path.join(files.root, path)):
                reason = "annex"
            if reason is not None:
                block.append(Refused(reason, path))
        return block

    with ThreadPoolExecutor(_THREADS) as pool:
        return [refused for block in pool.map(check_block, range(0, len(files), _BLOCK)) for refused in block]


def _pointers_in_bucket(files: FileSet, small: Ints) -> Iterator[Refused]:
    """Yield objects that are pointers; only small ones are read, since each takes a request."""
    assert files.bucket is not None
    heads = (next(remote_file(files, number).ranges(0, HEAD_BYTES)) for number in small.tolist())

    def replaced_error(_: ByteRange) -> Exception:
        return files.changed(number, "was replaced or removed after it was listed")

    stream = RangeStream(files.bucket, heads, requests=_REQUESTS, replaced_error=replaced_error)
    for number in small.tolist():
        kind = pointer_kind(bytes(next(stream)[1]))
        if kind is not None:
            yield Refused(kind, files.path(number))


def _empty_cells(table: FileTable, name: str, rows: Ints) -> FileTable:
    mask = np.zeros(len(table), bool)
    mask[rows] = True
    column = one_array(table.rows.column(name))
    emptied = pc.if_else(pa.array(mask), pa.scalar(None, column.type), column)
    index = table.rows.column_names.index(name)
    return table.replace(rows=table.rows.set_column(index, name, emptied))


def _drop_bare_rows(table: FileTable) -> FileTable:
    """Drop rows whose last file was skipped."""
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


def check_no_local_paths(table: FileTable) -> None:
    """Refuse metadata with absolute paths of this machine, which would be published."""
    if table.verbatim:
        return
    root = table.files.root if table.files.bucket is None else ""  # a bucket is not on this machine
    folders = {root.rstrip("/"), os.path.expanduser("~").rstrip("/")} - {""}
    for field in table.rows.schema:
        if field.name in table.columns:
            continue
        for texts in (texts for chunk in table.rows.column(field.name).chunks for texts in _texts(chunk)):
            if any(pc.any(pc.match_substring(texts, f"{folder}/")).as_py() for folder in folders):
                raise InputError(
                    f"The column {field.name!r} has absolute paths of this machine, which would be published.",
                    hint=f"Leave it out with --drop={field.name}, package its files with --files={field.name}, "
                    "or make its paths relative.",
                )


def _texts(array: pa.Array) -> Iterator[pa.Array]:
    """Yield every array of texts inside an array."""
    if pa.types.is_dictionary(array.type):
        yield from _texts(array.dictionary)
    elif pa.types.is_struct(array.type):
        for child in array.flatten():
            yield from _texts(child)
    elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        yield from _texts(array.flatten())
    elif pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        yield array
