"""s3://BUCKET/PREFIX: which bucket, where in it, and how it is reached. Never with what secrets.

A bucket of the Hub, hf://buckets/ORG/NAME/PREFIX, is one too; it is called "buckets/ORG/NAME" here. What is only read
may also be hf://datasets/ORG/NAME[@REVISION][/PATH] or an https address: http_files.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import unquote

from brim.errors import InputError
from brim.records import dataclass

SCHEMES = ("s3", "gs", "az")
ON_HUB = "hf://buckets/"
ADDRESSES = (*(f"{scheme}://" for scheme in SCHEMES), ON_HUB)  # what those of buckets begin with
_ENDPOINT = re.compile(r"https?://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(/[A-Za-z0-9._~%/-]*)?")
_LAST_PORT = 65535
_BUCKET = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{1,61}[A-Za-z0-9])")
_HUB_BUCKET = re.compile(r"buckets/[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True, slots=True)
class Access:
    """How a bucket is reached, apart from credentials: those come from the environment of whoever asks."""

    endpoint: str | None = None
    anonymous: bool = False

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            checked_endpoint(self.endpoint, "--endpoint-url")


def checked_endpoint(said: str, where: str) -> str:
    """The address of a store, if it is one: obstore ends the whole process over some that are none."""
    if "@" in said:
        raise InputError(
            f"The address of {where} holds a name or a password.",
            hint="Give credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or by a profile.",
        )
    match = _ENDPOINT.fullmatch(said)
    if match is None or int(match["port"] or 0) > _LAST_PORT:
        raise InputError(f"{where} takes an address like https://s3.example.org, not {said!r}.")
    return said.rstrip("/")


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a bucket. `prefix` has no slash at either end; it may be empty."""

    scheme: str
    bucket: str
    prefix: str
    access: Access = Access()

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def on_hub(self) -> bool:
        """Whether it is a bucket of the Hub, and no repository there."""
        return self.scheme == "hf" and self.bucket.startswith("buckets/")

    @property
    def repository(self) -> str:
        """ORG/NAME of a repository on the Hub."""
        return self.bucket.removeprefix("datasets/").partition("@")[0]

    @property
    def revision(self) -> str:
        """The branch, tag or commit of a repository on the Hub, as it is written in the address."""
        return self.bucket.partition("@")[2] or "main"

    def key(self, name: str) -> str:
        """The key of what is called `name` below this place."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def below(self, name: str) -> Location:
        return replace(self, prefix=self.key(name).strip("/"))


def is_bucket_address(text: str) -> bool:
    return text.startswith(ADDRESSES)


def bucket_of(text: str) -> tuple[str, str]:
    """Scheme and bucket of an address."""
    return _parts(text)[:2]


def _parts(text: str) -> tuple[str, str, str]:
    """Scheme, bucket and what follows."""
    scheme, _, rest = text.partition("://")
    if text.startswith(ON_HUB):
        kind, org, name, *path = [*rest.split("/", 3), "", ""]
        return scheme, f"{kind}/{org}/{name}", path[0]
    bucket, _, prefix = rest.partition("/")
    return scheme, bucket, prefix


def parse_bucket_address(text: str, access: Access | None = None) -> Location:
    scheme, bucket, prefix = _parts(text)
    if scheme == "hf":
        if not _HUB_BUCKET.fullmatch(bucket) or ".." in bucket:
            hint = f"Write {ON_HUB}ORG/NAME/PREFIX; a bucket has no revisions."
            raise InputError(f"{text!r} names no bucket of the Hub.", hint=hint)
        access = None  # it is reached as the Hub is, whatever is said of other stores
    elif scheme not in SCHEMES or not _BUCKET.fullmatch(bucket) or ".." in bucket:
        hint = f"Write {scheme}://BUCKET/PREFIX; a bucket's name has 3 to 63 letters, digits, dots, dashes."
        raise InputError(f"{_without_user(text)!r} names no bucket.", hint=hint)
    parts = prefix.strip("/").split("/")
    if "" in parts and prefix.strip("/"):
        raise InputError(f"{text!r} has an empty name in its path.", hint="Write one slash between names.")
    if "." in parts or ".." in parts:
        raise InputError(f"{text!r} has a '.' or '..' in its path, which means nothing in a bucket.")
    return Location(scheme, bucket, prefix.strip("/"), access or Access())


WEB_SCHEMES = ("hf", "https", "http")
_HUB = re.compile(r"hf://(?P<repo>datasets/[\w.-]+/[\w.-]+(@[^/\s]+)?)(/(?P<path>.*))?")
_WEB = re.compile(r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9_.-]+(:[0-9]{1,5})?)/(?P<path>\S+)")


def is_web_address(text: str) -> bool:
    return text.startswith(tuple(f"{scheme}://" for scheme in WEB_SCHEMES)) and not is_bucket_address(text)


def is_web_file(text: str) -> bool:
    """Whether an address is that of a file on a server that is not the Hub."""
    return text.startswith(("https://", "http://"))


def parse_web_address(text: str) -> Location:
    """A place to read from. A revision with slashes is written with %2F for each."""
    if (match := _HUB.fullmatch(text)) is not None:
        path = (match["path"] or "").strip("/")
        if ".." in path.split("/"):
            raise InputError(f"{text!r} has a '..' in its path.")
        return Location("hf", match["repo"], path)
    if (match := _WEB.fullmatch(text)) is not None:
        return Location(match["scheme"], match["host"], match["path"])
    hint = "Write hf://datasets/ORG/NAME, with @REVISION or /PATH behind it, or https://HOST/FILE.parquet."
    raise InputError(f"{_without_user(text)!r} is not an address that brim can read.", hint=hint)


def is_remote(text: str) -> bool:
    """Return whether a text is the address of a bucket, of a repository on the Hub or of a file on a web server."""
    return is_bucket_address(text) or is_web_address(text)


def parse_location(text: str, access: Access | None = None) -> Location:
    """Parse the address of anything that can be read and is not on this machine."""
    return parse_web_address(text) if is_web_address(text) else parse_bucket_address(text, access)


def parse_object_address(text: str, access: Access) -> Location:
    """A place in a bucket or on the web, whose prefix may be the key of an object."""
    if is_web_address(text):
        return parse_web_address(text)
    return Location(*_parts(text), access)


def _without_user(text: str) -> str:
    """What may be shown: an address can hold a password before its @."""
    scheme, slashes, rest = text.partition("://")
    return f"{scheme}{slashes}{rest.rpartition('@')[2]}"


HUB_SCHEME = "hf://"
MAIN = "main"
_NAME_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"{_NAME_PART}/{_NAME_PART}")
_REPOSITORY_HINT = "Write hf://datasets/ORG/NAME, with @BRANCH after it for another branch than main."


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A dataset repository and a revision of it."""

    repo: str
    revision: str = MAIN

    def __str__(self) -> str:
        return f"{HUB_SCHEME}datasets/{self.repo}" + ("" if self.revision == MAIN else f"@{self.revision}")


def parse_hub_address(text: str) -> HubAddress:
    path, at, revision = text.removeprefix(HUB_SCHEME).rstrip("/").partition("@")
    kind, _, repo = path.partition("/")
    if kind in ("models", "spaces", "buckets"):
        raise InputError(f"{text!r} is not a dataset repository.", hint=_REPOSITORY_HINT)
    if kind != "datasets":
        if _REPO.fullmatch(path):
            raise InputError(f"{text!r} lacks its kind.", hint=f"Write hf://datasets/{path}.")
        raise InputError(f"{text!r} is not the address of a dataset.", hint=_REPOSITORY_HINT)
    if not repo_name_is_valid(repo):
        raise InputError(f"{repo!r} is not the name of a repository on the Hub.", hint=_REPOSITORY_HINT)
    if at and not revision:
        raise InputError(f"{text!r} ends where a branch should be named.", hint=_REPOSITORY_HINT)
    return HubAddress(repo, unquote(revision) or MAIN)


def repo_name_is_valid(repo: str) -> bool:
    """ORG/NAME as the Hub takes it."""
    return _REPO.fullmatch(repo) is not None and ".." not in repo and "--" not in repo and not repo.endswith(".git")
