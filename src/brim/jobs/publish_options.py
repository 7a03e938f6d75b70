"""How a dataset is published on the Hub, and the limits that the Hub has for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from brim.errors import InputError
from brim.options.groups import HubOptions
from brim.records import dataclass
from brim.sizes import format_size

_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_CONFIG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_CHARACTERS = 200  # of the name of a config, which names a folder
# Names in plans that were saved by earlier versions.
_STORED_NAMES = {
    "commit_message": "message", "commit_as_you_go": "direct", "upload_with": "via", "create_pr": "create_pull",
    "replace_foreign": "replace",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PublishOptions(HubOptions):
    """How to publish. With a `split`, only that split is replaced, otherwise the config."""

    split: str | None = None
    data_dir: str | None = None
    description: str | None = None
    create_pr: bool = False
    replace_foreign: bool = False  # replace foreign files too: the history of the repository keeps them
    set_default: bool = False
    bare: bool = False  # the card lists files as `push_to_hub` does
    token: str | None = field(default=None, repr=False)

    def check_options(self) -> None:
        if "readme.md" in (self.config.lower(), (self.data_dir or "").lower()):
            raise InputError("README.md is the card.", hint="Use another name for the config or folder.")
        is_reserved = self.config in ("data", "all")
        if not _CONFIG.fullmatch(self.config) or is_reserved or len(self.config) > _MOST_CHARACTERS:
            raise InputError(
                f"{self.config[:_MOST_CHARACTERS]!r} is not a valid name of a config.",
                hint="Use letters, digits, _ and -, at most 200 of them; data and all are reserved.",
            )
        if self.data_dir is not None and not _FOLDER.fullmatch(self.data_dir):
            raise InputError(f"{self.data_dir!r} is not a folder for shards.", hint="Use a plain name, like data.")
        if self.commit_as_you_go and self.create_pr:
            raise InputError("create_pr=True cannot be used with --commit-as-you-go.")

    def to_record(self) -> dict[str, Any]:
        """Return the values that a saved plan contains, without the token."""
        return {_STORED_NAMES.get(name, name): value for name, value in asdict(self).items() if name != "token"}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PublishOptions:
        names = {stored: name for name, stored in _STORED_NAMES.items()}
        return cls(**{names.get(name, name): value for name, value in record.items()})

    @property
    def folder(self) -> str:
        """The folder of the shards of the config, as `datasets` names it."""
        return self.data_dir or ("data" if self.config == "default" else self.config)


FOLDER_FILES = 10_000
FILE_BYTES = 500_000_000_000
_SUGGESTED_BYTES, _SUGGESTED_SHARDS = 500_000_000, 5_000  # at least this size, about so many
FREE_PRIVATE_BYTES = 100_000_000_000  # of all private repositories of a free account, by the pages of the Hub
USUAL_FILE_BYTES = 20_000_000_000
USUAL_COMMITS = 128  # per hour
GROUP_FILES = 100  # per commit


def check_shards(count: int, largest_bytes: int, total_bytes: int) -> None:
    """Raise InputError if the shards do not fit in one folder of a repository."""
    if count <= FOLDER_FILES and largest_bytes <= FILE_BYTES:
        return
    if total_bytes > FOLDER_FILES * FILE_BYTES / 2:
        hint = (
            "It is too large for one folder, whatever the shard size: publish parts of it, each with another --config."
        )
    elif count > FOLDER_FILES:
        size = max(_SUGGESTED_BYTES, total_bytes // _SUGGESTED_SHARDS)
        unit, letters = (10**9, "GB") if size > 10**9 else (10**6, "MB")
        hint = f"Use larger shards, for example with --shard-size={-(-size // unit)}{letters} and no other number."
    else:
        hint = f"Use smaller shards with --shard-size, or rows that each fit {format_size(FILE_BYTES)}."
    if count > FOLDER_FILES:
        message = f"{count:,} shards are more than the {FOLDER_FILES:,} files that the Hub allows in a folder."
    else:
        message = f"A shard of {format_size(largest_bytes)} is larger than the Hub allows ({format_size(FILE_BYTES)})."
    raise InputError(message, hint=hint, shards=count, largest_bytes=largest_bytes)


def hub_limits(count: int, largest_bytes: int, total_bytes: int, public: bool) -> list[str]:
    """Return notes about shards that the Hub may refuse or discourages."""
    notes = []
    if total_bytes > FREE_PRIVATE_BYTES and not public:
        notes.append(
            f"private repositories of a free account hold about {format_size(FREE_PRIVATE_BYTES)} in all, and this is "
            f"{format_size(total_bytes)}: the Hub may refuse it later; use --public, or an account with more"
        )
    if largest_bytes > USUAL_FILE_BYTES:
        notes.append(f"files of more than {format_size(USUAL_FILE_BYTES)} are discouraged: use a smaller --shard-size")
    if count > FOLDER_FILES // 2:
        notes.append(f"{count:,} of {FOLDER_FILES:,} files that a folder may have")
    commits = -(-count // GROUP_FILES) + 1
    if commits > USUAL_COMMITS // 2:
        notes.append(
            f"about {commits:,} commits, of which the Hub allows about {USUAL_COMMITS} per hour: brim will wait"
        )
    return notes
