"""hf://datasets/ORG/NAME[@REVISION]: which repository, and which branch of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote

from brim.errors import InputError

SCHEME = "hf://"
MAIN = "main"
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_PART}/{_PART}")
_HINT = "Write hf://datasets/ORG/NAME, with @BRANCH after it for another branch than main."


@dataclass(frozen=True, slots=True)
class Address:
    """A dataset repository and a revision of it."""

    repo: str
    revision: str = MAIN

    def __str__(self) -> str:
        return f"{SCHEME}datasets/{self.repo}" + ("" if self.revision == MAIN else f"@{self.revision}")


def parse_address(text: str) -> Address:
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
    return Address(repo, unquote(revision) or MAIN)


def repo_name_is_valid(repo: str) -> bool:
    """ORG/NAME as the Hub takes it."""
    return _REPO.fullmatch(repo) is not None and ".." not in repo and "--" not in repo and not repo.endswith(".git")


def looks_like_repo(text: str) -> bool:
    """Whether a destination that should be a folder may be meant as a repository: ORG/NAME, and no such folder."""
    return _REPO.fullmatch(text) is not None and not os.path.lexists(text.partition("/")[0])
