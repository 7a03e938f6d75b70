"""Addresses: which container, which prefix in it, and how it is reached. Never with which secrets.

Read and written: a folder, s3://BUCKET/PREFIX (gs://, az://) and hf://buckets/ORG/NAME/PREFIX, a bucket of the Hub.
Read only: https://HOST/FILE. A repository, hf://datasets/ORG/NAME[@REVISION][/PATH], is written by commits.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

from brim.errors import InputError
from brim.records import dataclass

HUB_SCHEME = "hf://"
MAIN = "main"
_BUCKET_SCHEMES = ("s3", "gs", "az")
_HUB_BUCKETS = "hf://buckets/"
BUCKET_ADDRESSES = (*(f"{scheme}://" for scheme in _BUCKET_SCHEMES), _HUB_BUCKETS)
_WEB_ADDRESSES = ("https://", "http://")
_LAST_PORT = 65535
_ENDPOINT = re.compile(r"https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(/[A-Za-z0-9._~%/-]*)?")
_BUCKET = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{1,61}[A-Za-z0-9])")
_HUB_BUCKET = re.compile(r"buckets/[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUB_FILE = re.compile(r"hf://(?P<container>datasets/[\w.-]+/[\w.-]+)(@(?P<revision>[^/\s]+))?(/(?P<prefix>.*))?")
_WEB_FILE = re.compile(r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9_.-]+(:[0-9]{1,5})?)/(?P<path>\S+)")
_NAME_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_NAME_PART}/{_NAME_PART}")
_REPOSITORY_HINT = "Write hf://datasets/ORG/NAME, with @BRANCH after it for another branch than main."


@dataclass(frozen=True, slots=True)
class Access:
    """How a bucket is reached, apart from credentials, which each machine takes from its own environment."""

    endpoint: str | None = None
    anonymous: bool = False

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            checked_endpoint(self.endpoint, "--endpoint-url")


def checked_endpoint(text: str, option: str) -> str:
    """Return the address of a store; InputError for an invalid one: some crash obstore."""
    if "@" in text:
        raise InputError(
            f"The address of {option} holds a name or a password.",
            hint="Give credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or by a profile.",
        )
    match = _ENDPOINT.fullmatch(text)
    if match is None or int(match["port"] or 0) > _LAST_PORT:
        raise InputError(f"{option} takes an address like https://s3.example.org, not {text!r}.")
    return text.rstrip("/")


@dataclass(frozen=True, slots=True)
class Location:
    """A folder, or a prefix in a container: a bucket, "datasets/ORG/NAME", "buckets/ORG/NAME" or a host.

    `prefix` has no slash at either end and may be empty; that of a folder is its absolute path. `revision` is the
    branch, tag or commit of a repository.
    """

    scheme: str
    container: str
    prefix: str
    access: Access = Access()
    revision: str = ""

    def __str__(self) -> str:
        if self.is_local:
            return self.prefix
        revision = quote(self.revision, safe="") if self.prefix else self.revision  # a slash would begin the path
        suffix = "" if revision in ("", MAIN) else f"@{revision}"
        return f"{self.root}{suffix}/{self.prefix}".rstrip("/")

    @property
    def root(self) -> str:
        """Return the address of the container."""
        return f"{self.scheme}://{self.container}"

    @property
    def is_local(self) -> bool:
        return self.scheme == "file"

    @property
    def is_hub_bucket(self) -> bool:
        return self.scheme == "hf" and self.container.startswith("buckets/")

    @property
    def is_repository(self) -> bool:
        return self.scheme == "hf" and self.container.startswith("datasets/")

    @property
    def is_bucket(self) -> bool:
        return self.scheme in _BUCKET_SCHEMES or self.is_hub_bucket

    @property
    def path(self) -> Path:
        """Return the path of a folder on this machine."""
        return Path(self.prefix)

    @property
    def repo(self) -> str:
        """Return ORG/NAME of a repository on the Hub."""
        return self.container.removeprefix("datasets/")

    def key(self, name: str) -> str:
        """Return the key in the container of a file below this location; without a name, of the location itself."""
        return f"{self.prefix.rstrip('/')}/{name}" if self.prefix and name else self.prefix or name

    def name_of(self, key: str) -> str:
        """Return the name below this location of a key in its container."""
        return key[len(self.prefix.rstrip("/")) + 1 :] if self.prefix else key

    def child(self, name: str) -> Location:
        """Return a location below this one."""
        key = self.key(name)
        return replace(self, prefix=key.rstrip("/") if self.is_local else key.strip("/"))

    @property
    def parent(self) -> Location:
        return replace(self, prefix=self.prefix.rpartition("/")[0])


def folder_location(path: str | os.PathLike[str]) -> Location:
    """Return the location of a folder on this machine."""
    return Location("file", "", os.path.abspath(path))


def is_remote(text: str) -> bool:
    """Return whether a text is the address of a bucket, of a repository on the Hub or of a file on a web server."""
    return text.startswith((*BUCKET_ADDRESSES, HUB_SCHEME, *_WEB_ADDRESSES))


def is_object_address(text: str) -> bool:
    """Return whether a text is an address in a bucket."""
    return text.startswith(BUCKET_ADDRESSES)


def is_dataset_address(text: str) -> bool:
    """Return whether a text is the address of a repository, or of a file on a web server: these hold datasets."""
    return is_remote(text) and not is_object_address(text)


def split_address(text: str, access: Access | None = None) -> Location:
    """Return the location of an address that brim made, whose prefix may be any key."""
    if is_dataset_address(text):
        return _parse_read_only(text)
    scheme, _, path = text.partition("://")
    if text.startswith(_HUB_BUCKETS):
        kind, org, name, *prefixes = [*path.split("/", 3), "", ""]
        return Location(scheme, f"{kind}/{org}/{name}", prefixes[0])  # it is reached as the Hub is
    container, _, prefix = path.partition("/")
    return Location(scheme, container, prefix, access or Access())


def parse_location(text: str, access: Access | None = None) -> Location:
    """Parse an address that a user typed; InputError names its fault."""
    location = split_address(text, access)
    if not location.is_bucket and location.scheme in ("hf", "http", "https"):
        return location
    container, prefix = location.container, location.prefix.strip("/")
    if location.scheme == "hf":
        if not _HUB_BUCKET.fullmatch(container) or ".." in container:
            hint = f"Write {_HUB_BUCKETS}ORG/NAME/PREFIX; a bucket has no revisions."
            raise InputError(f"{text!r} names no bucket of the Hub.", hint=hint)
    elif not location.is_bucket or not _BUCKET.fullmatch(container) or ".." in container:
        hint = f"Write {location.scheme}://BUCKET/PREFIX; a bucket's name has 3 to 63 letters, digits, dots, dashes."
        raise InputError(f"{_without_user(text)!r} names no bucket.", hint=hint)
    parts = prefix.split("/")
    if "" in parts and prefix:
        raise InputError(f"{text!r} has an empty name in its path.", hint="Write one slash between names.")
    if "." in parts or ".." in parts:
        raise InputError(f"{text!r} has a '.' or '..' in its path, which means nothing in a bucket.")
    return replace(location, prefix=prefix)


def _parse_read_only(text: str) -> Location:
    """Parse the address of a repository or of a file on a web server. A slash in a revision is written %2F."""
    if (match := _HUB_FILE.fullmatch(text)) is not None:
        prefix = (match["prefix"] or "").strip("/")
        if ".." in prefix.split("/"):
            raise InputError(f"{text!r} has a '..' in its path.")
        return Location("hf", match["container"], prefix, revision=unquote(match["revision"] or MAIN))
    if (match := _WEB_FILE.fullmatch(text)) is not None:
        return Location(match["scheme"], match["host"], match["path"])
    hint = "Write hf://datasets/ORG/NAME, with @REVISION or /PATH after it, or https://HOST/FILE.parquet."
    raise InputError(f"{_without_user(text)!r} is not an address that brim can read.", hint=hint)


def _without_user(text: str) -> str:
    """Return an address without a name and a password before its @."""
    scheme, slashes, path = text.partition("://")
    return f"{scheme}{slashes}{path.rpartition('@')[2]}"


def parse_repository(text: str) -> Location:
    """Parse hf://datasets/ORG/NAME[@REVISION], the address of a repository to publish to."""
    path, mark, revision = text.removeprefix(HUB_SCHEME).rstrip("/").partition("@")
    kind, _, repo = path.partition("/")
    if kind in ("models", "spaces", "buckets"):
        raise InputError(f"{text!r} is not a dataset repository.", hint=_REPOSITORY_HINT)
    if kind != "datasets":
        if _REPO.fullmatch(path):
            raise InputError(f"{text!r} lacks its kind.", hint=f"Write hf://datasets/{path}.")
        raise InputError(f"{text!r} is not the address of a dataset.", hint=_REPOSITORY_HINT)
    if not repo_name_is_valid(repo):
        raise InputError(f"{repo!r} is not the name of a repository on the Hub.", hint=_REPOSITORY_HINT)
    if mark and not revision:
        raise InputError(f"{text!r} ends where a branch should be named.", hint=_REPOSITORY_HINT)
    return Location("hf", f"datasets/{repo}", "", revision=unquote(revision) or MAIN)


def repo_name_is_valid(repo: str) -> bool:
    """Return whether the Hub takes this as ORG/NAME."""
    return _REPO.fullmatch(repo) is not None and ".." not in repo and "--" not in repo and not repo.endswith(".git")
