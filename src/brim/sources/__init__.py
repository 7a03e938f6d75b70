"""What rows there are, and which files they name."""

from __future__ import annotations

import os

from brim.errors import SourceError
from brim.sources.filetable import FileTable
from brim.sources.folder import folder_source
from brim.sources.options import SourceOptions
from brim.sources.tables import table_source


def read_source(source: str | os.PathLike[str], options: SourceOptions) -> FileTable:
    """A folder of files, or a table that names files, whichever the path leads to."""
    path = os.fspath(source)
    if "://" in path:
        raise SourceError(f"{path!r} is not a local path.", hint="Give a folder, or a table that names files.")
    if os.path.isdir(path):
        return folder_source(path, options)
    if not os.path.lexists(path):
        raise SourceError(f"The source {path!r} does not exist.", hint="Give a folder, or a table that names files.")
    return table_source(path, options)
