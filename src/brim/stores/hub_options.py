"""hf://datasets/ORG/NAME[@REVISION]: which repository, and which branch of it."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Literal, get_args
from urllib.parse import unquote

from brim.choices import one_of
from brim.errors import InputError
from brim.records import dataclass
from brim.sizes import format_size

SCHEME = "hf://"
MAIN = "main"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}")
_HINT = "Write hf://datasets/ORG/NAME, with @BRANCH after it for another branch than main."


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A dataset repository and a revision of it."""

    repo: str
    revision: str = MAIN

    def __str__(self) -> str:
        return f"{SCHEME}datasets/{self.repo}" + ("" if self.revision == MAIN else f"@{self.revision}")


def parse_hub_address(text: str) -> HubAddress:
    path, at, revision = text.removeprefix(SCHEME).rstrip("/").partition("@")
    kind, _, repo = path.partition("/")
    if kind in ("models", "spaces", "buckets"):
        raise InputError(f"{text!r} is not a dataset repository.", hint=_HINT)
    if kind != "datasets":
        if _REPO.fullmatch(path):
            raise InputError(f"{text!r} lacks its kind.", hint=f"Write hf://datasets/{path}.")
        raise InputError(f"{text!r} is not the address of a dataset.", hint=_HINT)
    if not repo_name_is_valid(repo):
        raise InputError(f"{repo!r} is not the name of a repository on the Hub.", hint=_HINT)
    if at and not revision:
        raise InputError(f"{text!r} ends where a branch should be named.", hint=_HINT)
    return HubAddress(repo, unquote(revision) or MAIN)


def repo_name_is_valid(repo: str) -> bool:
    """ORG/NAME as the Hub takes it."""
    return _REPO.fullmatch(repo) is not None and ".." not in repo and "--" not in repo and not repo.endswith(".git")


Via = Literal["auto", "lfs", "xet"]
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_CONFIG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How to publish, apart from where. `split` alone is replaced if it is given, else the whole config."""

    config: str = "default"
    split: str | None = None
    data_dir: str | None = None
    message: str | None = None
    description: str | None = None
    public: bool = False
    direct: bool = False
    via: Via = "auto"
    create_pull: bool = False
    replace: bool = False  # files that brim did not write go too; the repository's history keeps them
    set_default: bool = False
    bare: bool = False  # the card lists files as `push_to_hub` does
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        one_of("via", self.via, get_args(Via))
        if not _CONFIG.fullmatch(self.config) or self.config in ("data", "all"):
            raise InputError(f"{self.config!r} is not the name of a config.", hint="Use letters, digits, _ and -.")
        if self.data_dir is not None and not _FOLDER.fullmatch(self.data_dir):
            raise InputError(f"{self.data_dir!r} is not a folder for shards.", hint="Use a plain name, like data.")
        if self.direct and self.create_pull:
            raise InputError("Choose one of --create-pr (a pull request) and --direct.")

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
