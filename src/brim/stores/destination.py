"""Where a dataset is: a folder, a repository on the Hub, or a place in a bucket; and where its ledger is.

hf://datasets/ORG/NAME[@REVISION] says which repository and which branch of it; `PublishOptions`, how it is published.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

import numpy as np

from brim.errors import DestinationError, DestinationUnavailableError, InputError, MemoryLimitError
from brim.file_set import FileSet, inode_of
from brim.formats.card import CARD
from brim.options.groups import HubOptions
from brim.records import dataclass
from brim.sizes import format_size
from brim.state.atomic_files import private_folder, reason, sync_folder
from brim.state.ledger import LEDGER, STATE, Ledger
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

_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_MOST_NAME = 200  # characters: it is the name of a folder
_CONFIG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


# Names in saved plans, of an earlier version.
_STORED_NAMES = {
    "commit_message": "message", "commit_as_you_go": "direct", "upload_with": "via", "create_pr": "create_pull",
    "replace_foreign": "replace",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PublishOptions(HubOptions):
    """How to publish, apart from where. If `split` is given, only that split is replaced, else the whole config."""

    split: str | None = None
    data_dir: str | None = None
    description: str | None = None
    create_pr: bool = False
    replace_foreign: bool = False  # files that brim did not write are replaced too; the repository's history keeps them
    set_default: bool = False
    bare: bool = False  # the card lists files as `push_to_hub` does
    token: str | None = field(default=None, repr=False)

    def check_options(self) -> None:
        if "readme.md" in (self.config.lower(), (self.data_dir or "").lower()):
            raise InputError("README.md is the card.", hint="Use another name for the config or folder.")
        taken = self.config in ("data", "all")
        if not _CONFIG.fullmatch(self.config) or taken or len(self.config) > _MOST_NAME:
            raise InputError(
                f"{self.config[:_MOST_NAME]!r} is not the name of a config.",
                hint="Use letters, digits, _ and -, at most 200 of them; data and all are taken.",
            )
        if self.data_dir is not None and not _FOLDER.fullmatch(self.data_dir):
            raise InputError(f"{self.data_dir!r} is not a folder for shards.", hint="Use a plain name, like data.")
        if self.commit_as_you_go and self.create_pr:
            raise InputError("create_pr=True cannot be used with --commit-as-you-go.")

    def to_record(self) -> dict[str, Any]:
        """Return what a saved plan keeps, without the token."""
        return {_STORED_NAMES.get(name, name): value for name, value in asdict(self).items() if name != "token"}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> PublishOptions:
        present = {stored: name for name, stored in _STORED_NAMES.items()}
        return cls(**{present.get(name, name): value for name, value in record.items()})

    @property
    def folder(self) -> str:
        """Where the shards of the config are, as `datasets` has it."""
        return self.data_dir or ("data" if self.config == "default" else self.config)


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


FREE_PRIVATE_BYTES = 100_000_000_000  # of all private repositories of a free account, by the Hub's own pages
USUAL_FILE_BYTES = 20_000_000_000
USUAL_COMMITS = 128  # an hour
GROUP_FILES = 100  # of a commit


def hub_limits(count: int, largest_bytes: int, total_bytes: int, public: bool) -> list[str]:
    """What the Hub may refuse, or asks to be otherwise, of shards like these; nothing if they are as it likes them."""
    said = []
    if total_bytes > FREE_PRIVATE_BYTES and not public:
        said.append(
            f"private repositories of a free account hold about {format_size(FREE_PRIVATE_BYTES)} in all, and this is "
            f"{format_size(total_bytes)}: it may be refused on the way; --public, or an account that holds more"
        )
    if largest_bytes > USUAL_FILE_BYTES:
        said.append(f"files of more than {format_size(USUAL_FILE_BYTES)} are discouraged: smaller --shard-size")
    if count > FOLDER_FILES // 2:
        said.append(f"{count:,} of {FOLDER_FILES:,} files that a folder takes")
    commits = -(-count // GROUP_FILES) + 1
    if commits > USUAL_COMMITS // 2:
        said.append(f"about {commits:,} commits, of which the Hub takes about {USUAL_COMMITS} an hour: it will wait")
    return said


def _round(size: int) -> str:
    """A size to type, not below this one."""
    unit, letters = (10**9, "GB") if size > 10**9 else (10**6, "MB")
    return f"{-(-size // unit)}{letters}"


UNITS = "units"  # the folder of the units of a computed job, beside its ledger
QUARANTINE = "quarantine.parquet"
CLAIM = "destination"  # the file that says which one books are of, if their folder is the user's choice


def parse_destination(destination: str | os.PathLike[str], access: Access | None = None) -> Location:
    """Parse where a job writes. `access` is how a bucket is reached."""
    text = os.fspath(destination)
    refuse_nameless(text)
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


def refuse_nameless(text: str) -> None:
    """InputError for an empty text, as of a variable that is not set: it would be the folder that one is in."""
    if not text:
        raise InputError("The destination has no name.", hint="Name it. The folder you are in is called '.'.")


def refuse_source(
    destination: Location,
    place: str,
    access: Access | None = None,
    files: FileSet | None = None,
    taken: Iterable[Location] = (),
) -> None:
    """A source is never its own destination: what was stopped while it replaced its source could not go on.

    The source is `place`, which is reached with `access` (as `files` are), and the `files` found there. `taken` are the
    files and folders that the job writes or replaces: none of them is a file of the source or holds one, whatever their
    paths are called. Files are compared by device and inode.
    """
    if access is None:
        access = files.bucket.access if files is not None and files.bucket is not None else Access()
    if _is_place(destination, place, access):
        raise DestinationError("The destination is the source itself.", hint="Give another place.")
    for one in taken:
        found = None if files is None else _found_in(one, files)
        if found is not None:
            raise DestinationError(
                f"The destination is the source itself: the job would take the place of {found!r}.",
                hint="Give another place.",
                path=found,
            )


def taken_by_dataset(destination: Location, folder: str) -> list[Location]:
    """Where a job that makes a dataset writes: its shards (in `folder`), its card, what it left out, its books."""
    names = [folder, CARD, QUARANTINE, STATE]
    return [] if destination.is_repository else [destination.child(name) for name in names]


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path, which need not exist, is a folder or below it."""
    whole = Path(os.path.realpath(path))
    return any(_same_path(one, folder) for one in (whole, *whole.parents))


def _is_place(destination: Location, place: str, access: Access) -> bool:
    if destination.is_local:
        return "://" not in place and _same_path(destination.path, Path(place))
    if destination.is_repository:
        is_repository = place.startswith(HUB_SCHEME) and not is_object_address(place)
        return is_repository and parse_repository(place).repo == destination.repo
    if not is_object_address(place):
        return False
    source = parse_location(place, access)
    return _same_bucket(destination, source) and destination.prefix == source.prefix


def _same_bucket(one: Location, other: Location) -> bool:
    return one.root == other.root and endpoint_of(one) == endpoint_of(other)


def _same_path(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return os.path.realpath(one) == os.path.realpath(other)


def _found_in(place: Location, files: FileSet) -> str | None:
    """A file of the source that is `place`, or lies in it."""
    if place.is_local:
        return None if files.bucket is not None else _found_on_disk(place.path, files.on_disk)
    if place.is_repository or files.bucket is None or not _same_bucket(place, files.bucket):
        return None
    for path in files.paths:  # a source in a bucket was listed just before: this is the smaller part
        key = files.bucket.key(path.as_py())
        if key == place.prefix or key.startswith(f"{place.prefix}/"):
            return f"{place.root}/{key}"
    return None


def _found_on_disk(place: Path, files: FileSet) -> str | None:
    """Every file there is looked for among the inodes of the source, so that no spelling of a path matters."""
    there = {inode_of(os.stat(path)): path for path in _files_at(place)}
    inodes = np.fromiter(there, np.int64, len(there))
    for number in np.flatnonzero(np.isin(files.inodes, inodes)).tolist():
        if _same_path(Path(files.full_path(number)), Path(there[int(files.inodes[number])])):
            return files.full_path(number)
    return None


def _files_at(place: Path) -> Iterator[str]:
    if place.is_file():
        yield str(place)
    for folder, _, names in os.walk(place, followlinks=False):
        yield from (path for name in names if os.path.isfile(path := os.path.join(folder, name)))


def refuse_within(destination: Location, folder: str) -> None:
    """A dataset is not built in the folder that its rows are read from: the next reading would find its shards too."""
    if destination.is_local and lies_in(destination.path, Path(folder)):
        raise DestinationError(
            "The destination is the source itself, or lies in it.", hint="Give a place beside it.", path=folder
        )


def refuse_holder(destination: Location, path: str) -> None:
    """A dataset is not built where the shards lie that its values are taken from: they would be replaced meanwhile."""
    if destination.is_local:
        folder = os.path.realpath(destination.path)
        same = "://" not in path and os.path.realpath(path).startswith(folder + os.sep)
    else:
        same = f"{path.partition('@')[0]}/".startswith(f"{str(destination).partition('@')[0]}/")
    if same:
        raise DestinationError("The destination is the source itself.", hint="Give another place.")


def state_folder(destination: Location, state: str | os.PathLike[str] | None, scope: str = "") -> Path:
    """Where the ledger of a destination is: inside a folder, else with the user's state; or where the user says.

    `scope` tells apart what is published to one repository independently (a config, a split).
    """
    if state:
        return Path(os.path.abspath(state))
    if destination.is_local:
        return destination.path / STATE
    if destination.is_repository:
        kind, shown = "hub", destination.repo
    else:
        kind, shown = "objects", f"{destination.container}/{destination.prefix}".rstrip("/")
    return state_home(kind, f"{identity(destination)} {scope}", shown)


def identity(destination: Location) -> str:
    """What tells a destination from all others: with the server that it is at."""
    return str(destination) if destination.is_local else f"{endpoint_of(destination) or ''} {destination}"


def state_home(kind: str, what: str, shown: str) -> Path:
    """The folder that the user's state keeps about something; `shown` is what people will know it by."""
    name = f"{shown[:80].replace('/', '--')}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
    return state_root() / kind / name


def state_root() -> Path:
    """The folder of all that brim keeps for this user."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home) / "brim"


class Footprints:
    """What a job makes at a destination before it begins. One that is refused takes it away again.

    Made before anything else is. What was there before stays as it was.
    """

    def __init__(self, destination: Location | None, state: Path) -> None:
        folders = [state, *state.parents]
        if destination is not None and destination.is_local:
            path = destination.path
            folders += [path / "data", path / STATE, path, *path.parents]
        self._state = state
        self._folders = [folder for folder in dict.fromkeys(folders) if not folder.exists()]
        self._books = [folder for folder in (state, state / UNITS) if not folder.exists()]
        self._files = [state / name for name in ("lock", LEDGER, CLAIM) if not (state / name).exists()]

    def sweep(self) -> None:
        """Remove the folders that are empty."""
        for folder in sorted(self._folders, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):  # it is not empty: somebody else's
                folder.rmdir()

    @contextmanager
    def removed_if_refused(self) -> Iterator[None]:
        """For whoever holds the lock: nothing stays of a job that is refused, or does not fit, with nothing done."""
        try:
            yield
        except (InputError, MemoryLimitError, DestinationUnavailableError):
            if Ledger(self._state).job is None and not Ledger(self._state / UNITS).receipts:
                for folder in self._books:
                    shutil.rmtree(folder, ignore_errors=True)
                for file in self._files:
                    file.unlink(missing_ok=True)
            self.sweep()
            raise


def make_state(destination: Location, folder: Path) -> None:
    """Make the folder of the ledger. In a built folder, .brim is made in any case: it marks what brim built."""
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
