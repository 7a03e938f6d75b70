"""Names that come from data and become paths: splits, configs, file paths, tar members, names in plans and ledgers.

Every such name passes `stays_below` (or `path_below`, which also joins it) before it is used as a path. Names that stay
data, such as columns and the values of a table, are not checked here.
"""

from __future__ import annotations

import os

from brim.errors import InputError, VerificationError

_MOST_NAME_BYTES = 255


def stays_below(name: object) -> bool:
    """Whether `name` is a relative path of something below the folder that it will be joined to."""
    if not isinstance(name, str) or "\0" in name or name.startswith("/"):
        return False
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return bool(parts) and ".." not in parts


def is_file_name(name: object) -> bool:
    """Whether `name` can be one component of a path."""
    return stays_below(name) and "/" not in str(name) and name != "."


def path_below(root: str, name: str, where: str) -> str:
    """Join `name` to `root`, which has no symbolic links in it.

    Raises:
        VerificationError: If the path would lead out of `root`, also through a symbolic link that exists there.
        InputError: If a component is longer than file systems accept.
    """
    if not stays_below(name):
        raise VerificationError(
            f"{where} names {name!r}, which would leave the folder.",
            hint="Nothing was written there; do not trust this dataset.",
        )
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if any(len(os.fsencode(part)) > _MOST_NAME_BYTES for part in parts):
        raise InputError(f"{where} names {name[:60] + '…'!r}, which is longer than a file's name can be.")
    path = os.path.join(root, *parts)
    parent = os.path.realpath(os.path.dirname(path))
    if parent != root and not parent.startswith(root.rstrip(os.sep) + os.sep):
        raise VerificationError(f"{name!r} would be written outside of the folder, through a link.")
    return path
