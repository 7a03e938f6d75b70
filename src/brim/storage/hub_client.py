"""What brim asks of the Hub: a repository, its files at a commit, commits, pull requests; and files to read from.

The Hub sends whoever asks for a large file on to its storage, with an address that expires. Each reader keeps that
address, and asks for a new one when it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from brim.errors import DestinationError, DestinationUnavailableError
from brim.records import dataclass
from brim.state.ledger import Piece
from brim.state.retry import Retry, interruptible
from brim.storage.hub_session import UnexpectedAnswer, ask_hub, explained, is_passing, persistently, status_of
from brim.storage.location import MAIN, HubAddress
from brim.storage.reading import ForwardFile, WindowFile

_KIND = "dataset"


@dataclass(frozen=True, slots=True)
class HubEntry:
    """A file in the repository. A large one is known by its SHA-256, a text by git's hash."""

    size: int
    sha256: str | None
    blob: str

    def is_piece(self, piece: Piece) -> bool:
        return self.size == piece.size and self.sha256 == piece.sha256

    def is_text(self, data: bytes) -> bool:
        if self.sha256 is not None:
            return self.sha256 == hashlib.sha256(data).hexdigest()
        return self.blob == hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A revision's files at one commit."""

    revision: str
    commit: str
    tree: dict[str, HubEntry]

    def holds(self, piece: Piece) -> bool:
        """Whether the shard is there under its name."""
        return piece.name in self.tree and self.tree[piece.name].is_piece(piece)


class HubClient:
    """One repository, one token. Requests that the library makes only once are tried again here."""

    def __init__(self, address: HubAddress, token: str | None = None) -> None:
        from huggingface_hub import HfApi

        self.address = address
        self.repo: dict[str, Any] = {"repo_id": address.repo, "repo_type": _KIND}
        self.api: Any = HfApi(token=token, library_name="brim")
        self.endpoint = str(self.api.endpoint)
        try:
            (self.token or "").encode("ascii")
        except UnicodeError as error:
            raise DestinationError(
                "What is set as the token for the Hub is none: it holds characters that no token has.",
                hint="Log in with `hf auth login`, or set HF_TOKEN to a valid token.",
            ) from error

    @property
    def token(self) -> str | None:
        from huggingface_hub import get_token

        return self.api.token if isinstance(self.api.token, str) else get_token()

    def visibility(self) -> str | None:
        """ "private" or "public", or None if there is no such repository."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            info = persistently(lambda: self.api.repo_info(**self.repo))
        except RepositoryNotFoundError as error:
            if status_of(error) == 404:
                return None
            raise
        self.called = str(info.id)
        return "private" if info.private else "public"

    def create(self, private: bool) -> None:
        try:
            persistently(lambda: self.api.create_repo(**self.repo, private=private, exist_ok=True))
        except UnexpectedAnswer:
            if self.visibility() is None:
                raise

    def need_token(self) -> str:
        if not self.token:
            raise DestinationError(
                "There is no token for the Hub.",
                hint="Log in with `hf auth login`, or set HF_TOKEN to a token that may write.",
            )
        return self.token

    def need_write(self) -> None:
        """Raises what the Hub answers to a token that may not write here."""
        persistently(lambda: self.api.auth_check(**self.repo, write=True))

    def holds_more(self) -> bool:
        """Whether the server tells that the owner of the repository is no free account."""
        try:
            told = persistently(self.api.whoami)
        except Exception as error:
            if status_of(error) is None:
                raise
            return False  # a server that does not tell
        if not isinstance(told, dict):
            return False
        owner = self.address.repo.partition("/")[0]
        of = next((org for org in told.get("orgs") or () if org.get("name") == owner), told)
        return bool(of.get("isPro") or of.get("isEnterprise") or of.get("plan") not in (None, "free"))

    def need_branch(self, name: str) -> None:
        """A branch that does not exist starts from main."""
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            persistently(lambda: self.api.repo_info(**self.repo, revision=name))
        except RevisionNotFoundError as error:
            if name.startswith("refs/"):
                raise DestinationError(f"{self.address.repo} has no revision {name!r}.") from error
            persistently(lambda: self.api.create_branch(**self.repo, branch=name, exist_ok=True))
            return
        refs = persistently(lambda: self.api.list_repo_refs(**self.repo))
        if not name.startswith("refs/") and name not in {branch.name for branch in refs.branches}:
            raise DestinationError(
                f"{name!r} is a commit or a tag of {self.address.repo}, and only a branch can be published to.",
                hint="Name a branch after the @, or leave it out for main.",
            )

    def beginning(self) -> HubAddress:
        """Where that is which whoever publishes to this branch begins with: main, if the branch is yet to be made."""
        from huggingface_hub.errors import RevisionNotFoundError

        if self.address.revision == MAIN or self.address.revision.startswith("refs/"):
            return self.address
        try:
            persistently(lambda: self.api.repo_info(**self.repo, revision=self.address.revision))
        except RevisionNotFoundError:
            return replace(self.address, revision=MAIN)
        return self.address

    def snapshot(self, revision: str = MAIN) -> Snapshot:
        commit = str(persistently(lambda: self.api.repo_info(**self.repo, revision=revision)).sha)
        return Snapshot(revision, commit, self.tree(commit))

    def tree(self, commit: str) -> dict[str, HubEntry]:
        return persistently(lambda: self._tree(commit))

    def _tree(self, commit: str) -> dict[str, HubEntry]:
        tree = {}
        for entry in self.api.list_repo_tree(**self.repo, revision=commit, recursive=True):
            size = getattr(entry, "size", None)
            if size is not None:  # a folder has none
                lfs = entry.lfs
                tree[entry.path] = HubEntry(lfs.size if lfs else size, lfs.sha256 if lfs else None, entry.blob_id)
        return tree

    def url(self, name: str, revision: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(**self.repo, filename=name, revision=revision, endpoint=self.endpoint)

    def headers(self) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers

        return dict(build_hf_headers(token=self.token or False, library_name="brim"))

    def read(self, name: str, snapshot: Snapshot) -> bytes | None:
        """A small file of a snapshot."""
        from huggingface_hub.utils import hf_raise_for_status, http_backoff

        if name not in snapshot.tree:
            return None
        url, headers = self.url(name, snapshot.commit), self.headers()
        response = ask_hub(lambda: http_backoff("GET", url, headers=headers))
        hf_raise_for_status(response)
        return bytes(response.content)

    def commit(
        self, revision: str, parent: str, operations: Sequence[Any], message: str, description: str | None = None
    ) -> str:
        """Once: whoever calls looks at what is there before asking again."""
        made = ask_hub(
            lambda: self.api.create_commit(
                **self.repo,
                operations=list(operations),
                commit_message=message,
                commit_description=description,
                revision=revision,
                parent_commit=parent,
            )
        )
        return str(made.oid)

    def open_pull(self, title: str, description: str) -> int:
        made = ask_hub(lambda: self.api.create_pull_request(**self.repo, title=title, description=description))
        return int(made.num)

    def find_pull(self, mark: str) -> int | None:
        """The open pull request whose title holds `mark`."""

        def look() -> int | None:
            found = self.api.get_repo_discussions(**self.repo, discussion_type="pull_request", discussion_status="open")
            return next((int(pull.num) for pull in found if mark in pull.title), None)

        return persistently(look)

    def pull_status(self, number: int) -> str:
        """draft, open, closed or merged; closed if there is no such one."""
        try:
            details = persistently(lambda: self.api.get_discussion_details(**self.repo, discussion_num=number))
        except Exception as error:
            if status_of(error) == 404:
                return "closed"
            raise
        return str(details.status)

    def set_pull_status(self, number: int, status: str) -> None:
        def change() -> None:
            if self.pull_status(number) != status:
                self.api.change_discussion_status(**self.repo, discussion_num=number, new_status=status)

        persistently(change)

    def merge(self, number: int) -> None:
        """Merge a pull request; asked again after a lost answer, it is merged already."""

        def once() -> None:
            if self.pull_status(number) != "merged":
                self.api.merge_pull_request(**self.repo, discussion_num=number)

        persistently(once)


def own_name(token: str | None) -> str:
    """Whose token this is."""
    from huggingface_hub import HfApi

    with explained("your account", begun=False):
        return str(persistently(lambda: HfApi(token=token).whoami())["name"])


_READ_BYTES = 1 << 18
_TRIES = 6
_HOPS = 6  # to another name of the repository, to the storage, and once more if its address is too old


class _Source:
    """One file of a snapshot, by range."""

    def __init__(self, client: HubClient, snapshot: Snapshot, name: str) -> None:
        self.client, self.name = client, name
        self.file: HubEntry = snapshot.tree[name]
        self._url = client.url(name, snapshot.commit)
        self._place: str | None = None

    def ask(self, start: int, stop: int) -> Any:
        """An open response with these bytes; close it. The token goes to the Hub alone."""
        from huggingface_hub.utils import get_session, hf_raise_for_status

        for attempt in range(_HOPS):
            place = self._place or self._url
            own = urlsplit(place)[:2] == urlsplit(self._url)[:2]  # also where a repository that was renamed is now
            headers = {**(self.client.headers() if own else {}), "Range": f"bytes={start}-{stop - 1}"}
            request = get_session().build_request("GET", place, headers=headers)
            response = get_session().send(request, stream=True, follow_redirects=False)
            where = response.headers.get("Location")
            if response.status_code in (301, 302, 303, 307, 308) and where:
                response.close()
                self._place = str(response.url.join(where))
                continue
            if response.status_code in (401, 403) and not own and attempt < _HOPS - 2:
                response.close()
                self._place = None  # its time is over: the Hub gives another one
                continue
            if response.status_code >= 300:
                response.read()
            hf_raise_for_status(response)
            if response.status_code == 200 and (start, stop) != (0, self.file.size):
                response.close()
                raise DestinationUnavailableError(
                    f"The storage of the Hub sends all of {self.name} instead of a range of it."
                )
            return response
        raise DestinationUnavailableError(
            f"The Hub sends whoever asks for {self.name} from one address to another without end."
        )


class RangeFile(WindowFile):
    """Any range."""

    def __init__(self, client: HubClient, snapshot: Snapshot, name: str) -> None:
        self._source = _Source(client, snapshot, name)
        super().__init__(name, self._source.file.size)

    def _fetch(self, start: int, stop: int) -> bytes:
        return persistently(lambda: self._ask(start, stop))

    def _ask(self, start: int, stop: int) -> bytes:
        if stop <= start:
            return b""
        response = self._source.ask(start, stop)
        try:
            data = bytes(response.read())
        finally:
            response.close()
        if len(data) != stop - start:
            raise DestinationUnavailableError(
                f"The Hub gave {len(data)} bytes of {self.name} instead of {stop - start}."
            )
        return data


class StreamFile(ForwardFile):
    """In one request. A cut connection goes on where it was."""

    def __init__(self, client: HubClient, snapshot: Snapshot, name: str) -> None:
        self._source = _Source(client, snapshot, name)
        super().__init__(name, self._source.file.size)
        self._response: Any = None
        self._blocks: Iterator[bytes] = iter(())

    def _next_block(self) -> bytes:
        retry = Retry((0.0,) * (_TRIES - 1), is_passing)  # asking anew waits by itself
        while True:
            try:
                if self._response is None:
                    self._response = persistently(lambda: self._source.ask(self._end, self.size))
                    self._blocks = self._response.iter_raw(_READ_BYTES)
                block: bytes = interruptible(partial(next, self._blocks, b""))
            except Exception as error:
                self._drop()
                if not retry.again(error):
                    raise
                continue
            if block:
                return block[: self.size - self._end]
            self._drop()
            if retry.next_s() is None:
                raise DestinationUnavailableError(
                    f"The Hub ends {self.name} after {self._end:,} of {self.size:,} bytes."
                )

    def _drop(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def close(self) -> None:
        self._drop()
