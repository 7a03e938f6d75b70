"""Addresses that jobs write to, and the folder that keeps the state of each: its lock, its ledger, its units."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Protocol

from brim.errors import DestinationError, InputError
from brim.state.atomic_files import private_folder, reason, sync_folder
from brim.state.ledger import LEDGER, STATE
from brim.storage.credentials import endpoint_of
from brim.storage.location import (
    HUB_SCHEME,
    Access,
    Location,
    folder_location,
    is_object_address,
    parse_location,
    parse_repository,
)
from brim.storage.storage import PutResult
from brim.storage.upload_content import UploadWatcher


class Uploader(Protocol):
    """Uploads shards from any machine: a storage, or uploads to a repository. Can be pickled, with its token."""

    def check_access(self) -> None: ...

    def put(self, name: str, content: Any, sha256: str | None, watcher: UploadWatcher) -> PutResult: ...


UNITS = "units"  # the folder of the units of a computed job, next to its ledger
QUARANTINE = "quarantine.parquet"
CLAIM = "destination"  # a file that names the destination of a state folder that the user chose
MANIFESTS = ".brim"  # the folder of ledgers that are published with a dataset


def parse_destination(destination: str | os.PathLike[str], access: Access | None = None) -> Location:
    """Return the location of a destination. `access` is how a bucket is reached."""
    text = os.fspath(destination)
    check_not_empty(text)
    if is_object_address(text):
        return parse_location(text, access)
    if text.startswith(HUB_SCHEME):
        return parse_repository(text)
    if "://" in text:
        raise InputError(
            f"brim cannot use {text.partition('://')[0]}:// as a destination.",
            hint="Give a folder, hf://datasets/ORG/NAME, hf://buckets/ORG/NAME, or s3://BUCKET/PREFIX (gs://, az://).",
        )
    return folder_location(text)


def check_not_empty(text: str) -> None:
    """Refuse an empty text, such as an unset variable: it would mean the current folder."""
    if not text:
        raise InputError("The destination has no name.", hint="Name it. The current folder is called '.'.")


def state_folder(destination: Location, state: str | os.PathLike[str] | None, scope: str = "") -> Path:
    """Return the folder of the ledger: in the destination if that is a folder, else in the user's state, or `state`.

    `scope` distinguishes parts of a repository that are published independently (a config, a split).
    """
    if state:
        return Path(os.path.abspath(state))
    if destination.is_local:
        return destination.path / STATE
    if destination.is_repository:
        kind, label = "hub", destination.repo
    else:
        kind, label = "objects", f"{destination.container}/{destination.prefix}".rstrip("/")
    return user_state(kind, f"{identity(destination)} {scope}", label)


def identity(destination: Location) -> str:
    """Return a text that distinguishes a destination from all others, including its server."""
    return str(destination) if destination.is_local else f"{endpoint_of(destination) or ''} {destination}"


def user_state(kind: str, subject: str, label: str) -> Path:
    """Return the folder for a subject among the state of this user; `label` is the readable part of its name."""
    name = f"{label[:80].replace('/', '--')}-{hashlib.sha256(subject.encode()).hexdigest()[:12]}"
    return state_root() / kind / name


def state_root() -> Path:
    """Return the folder of all state that brim keeps for this user."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home) / "brim"


def make_state_folder(destination: Location, folder: Path) -> None:
    """Make the folder of the ledger. A folder that brim builds always has .brim, which marks it."""
    try:
        if destination.is_local:
            (destination.path / STATE).mkdir(exist_ok=True)
            folder.mkdir(parents=True, exist_ok=True)
        else:
            private_folder(folder)
        for name in ("lock", LEDGER):
            with open(folder / name, "ab"):
                pass
        sync_folder(folder)
    except OSError as error:
        raise DestinationError(
            f"The folder of the ledger, {str(folder)!r}, cannot be used: {reason(error)}.",
            hint="Choose another one with --state-dir=DIR.",
        ) from error
