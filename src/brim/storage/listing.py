"""Names, sizes, ETags and small files of a remote location. Failures are errors for users."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from brim.storage.explain_error import Action, explain_errors
from brim.storage.location import Location
from brim.storage.storage import FileInfo, open_storage


def list_files(location: Location, prefix: str = "", action: Action = "read") -> Iterator[tuple[str, FileInfo]]:
    """Yield (name below the location, info) of every file below a prefix, in the order of the store."""
    with explain_errors(location, action):
        yield from open_storage(location).list(prefix)


def stat_files(location: Location, names: Iterable[str], action: Action = "read") -> Iterator[FileInfo | None]:
    """Yield the info of each of these files, in order; None for a missing one."""
    with explain_errors(location, action):
        yield from open_storage(location).stat(names)


def stat_file(location: Location, name: str = "", action: Action = "read") -> FileInfo | None:
    """Return the info of a file; without a name, of the location itself. A container is not a file."""
    return next(stat_files(location, [name], action)) if location.key(name) else None


def read_file(location: Location, name: str = "", action: Action = "read") -> bytes | None:
    """Return all of a small file; None if it is missing."""
    with explain_errors(location, action):
        return open_storage(location).read(name)
