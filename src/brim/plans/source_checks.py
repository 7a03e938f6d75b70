"""Refuse a source that is, or contains, its own destination: an interrupted job could not be resumed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from brim.errors import DestinationError
from brim.file_set import FileSet, inode_of
from brim.storage.credentials import endpoint_of
from brim.storage.location import (
    HUB_SCHEME,
    Access,
    Location,
    is_object_address,
    parse_location,
    parse_repository,
)

_IS_SOURCE = "The destination is the source itself"
_HINT = "Choose another destination."


def refuse_source(
    destination: Location,
    source: str,
    access: Access | None = None,
    files: FileSet | None = None,
    outputs: Iterable[Location] = (),
) -> None:
    """Raise DestinationError if a job would replace files of its source.

    `source` is an address that is reached with `access` (by default as `files` are), and `files` are those found there.
    `outputs` are the files and folders that the job writes or replaces. Local files are compared by device and inode.
    """
    if access is None:
        access = files.bucket.access if files is not None and files.bucket is not None else Access()
    if _is_same(destination, source, access):
        raise DestinationError(f"{_IS_SOURCE}.", hint=_HINT)
    for output in outputs:
        path = None if files is None else _find_source_file(output, files)
        if path is not None:
            raise DestinationError(f"{_IS_SOURCE}: the job would replace {path!r}.", hint=_HINT, path=path)


def refuse_source_folder(destination: Location, folder: str) -> None:
    """Refuse a destination in a folder that rows are read from: the next run would read its shards too."""
    if destination.is_local and is_inside(destination.path, Path(folder)):
        raise DestinationError(f"{_IS_SOURCE}, or is inside it.", hint=_HINT, path=folder)


def refuse_source_shard(destination: Location, path: str) -> None:
    """Refuse a destination with shards that values are read from: they would be replaced during the job."""
    if destination.is_local:
        folder = os.path.realpath(destination.path)
        is_source = "://" not in path and os.path.realpath(path).startswith(folder + os.sep)
    else:
        is_source = f"{path.partition('@')[0]}/".startswith(f"{str(destination).partition('@')[0]}/")
    if is_source:
        raise DestinationError(f"{_IS_SOURCE}.", hint=_HINT)


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path, which need not exist, is a folder or below it."""
    real = Path(os.path.realpath(path))
    return any(_is_same_path(parent, folder) for parent in (real, *real.parents))


def _is_same(destination: Location, source: str, access: Access) -> bool:
    if destination.is_local:
        return "://" not in source and _is_same_path(destination.path, Path(source))
    if destination.is_repository:
        is_repository = source.startswith(HUB_SCHEME) and not is_object_address(source)
        return is_repository and parse_repository(source).repo == destination.repo
    if not is_object_address(source):
        return False
    location = parse_location(source, access)
    return _is_same_bucket(destination, location) and destination.prefix == location.prefix


def _is_same_bucket(location: Location, other: Location) -> bool:
    return location.root == other.root and endpoint_of(location) == endpoint_of(other)


def _is_same_path(path: Path, other: Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # one of them does not exist
        return os.path.realpath(path) == os.path.realpath(other)


def _find_source_file(output: Location, files: FileSet) -> str | None:
    """Return a file of the source that is `output`, or inside it."""
    if output.is_local:
        if files.bucket is not None:
            return None
        # Every existing file is compared with the inodes of the source, so that no spelling of a path matters.
        source = files.on_disk
        existing = {inode_of(os.stat(path)): path for path in _files_at(output.path)}
        inodes = np.fromiter(existing, np.int64, len(existing))
        for number in np.flatnonzero(np.isin(source.inodes, inodes)).tolist():
            path = source.full_path(number)
            if _is_same_path(Path(path), Path(existing[int(source.inodes[number])])):
                return path
        return None
    if output.is_repository or files.bucket is None or not _is_same_bucket(output, files.bucket):
        return None
    for name in files.paths:  # a source in a bucket was listed just now: this is the smaller part
        key = files.bucket.key(name.as_py())
        if key == output.prefix or key.startswith(f"{output.prefix}/"):
            return f"{output.root}/{key}"
    return None


def _files_at(path: Path) -> Iterator[str]:
    if path.is_file():
        yield str(path)
    for folder, _, names in os.walk(path, followlinks=False):
        yield from (file for name in names if os.path.isfile(file := os.path.join(folder, name)))
