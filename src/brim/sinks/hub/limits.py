"""What the Hub takes at most, said before the first byte (docs/scale.md has the sources of these numbers)."""

from __future__ import annotations

from brim.errors import InputError
from brim.sizes import format_size

FOLDER_FILES = 10_000
FILE_BYTES = 500_000_000_000
_USUAL_BYTES, _USUAL_SHARDS = (
    500_000_000,
    5_000,
)  # what is suggested instead: shards of this size or more, about so many


def check_shards(count: int, largest_bytes: int, total_bytes: int) -> None:
    """InputError if these shards cannot lie in one folder of a repository."""
    if count <= FOLDER_FILES and largest_bytes <= FILE_BYTES:
        return
    if total_bytes > FOLDER_FILES * FILE_BYTES / 2:
        hint = "It is too large for one folder however it is cut: publish parts of it, each with a --config of its own."
    elif count > FOLDER_FILES:
        size = max(_USUAL_BYTES, total_bytes // _USUAL_SHARDS)
        hint = f"Cut larger shards, for example with --shard-size={_round(size)} and no other number."
    else:
        hint = f"Cut smaller shards with --shard-size, or rows that each fit {format_size(FILE_BYTES)}."
    if count > FOLDER_FILES:
        what = f"{count:,} shards are more than the {FOLDER_FILES:,} files that the Hub takes in a folder."
    else:
        what = f"A shard of {format_size(largest_bytes)} is larger than the Hub takes ({format_size(FILE_BYTES)})."
    raise InputError(what, hint=hint, shards=count, largest_bytes=largest_bytes)


def _round(size: int) -> str:
    """A size to type, not below this one."""
    unit, letters = (10**9, "GB") if size > 10**9 else (10**6, "MB")
    return f"{-(-size // unit)}{letters}"
