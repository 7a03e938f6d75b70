"""A repository by way of huggingface_hub: its files at a commit, its rights, commits, pull requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brim.errors import DestinationError
from brim.records import dataclass
from brim.state.ledger import StoredFile
from brim.storage.hub_private import hub_token
from brim.storage.hub_session import UnexpectedAnswerError, ask_again, ask_hub, explain_hub_errors, status_of
from brim.storage.location import MAIN, Location
from brim.storage.storage import FileInfo

if TYPE_CHECKING:
    from brim.storage.hub_repository import HubRepository

_KIND = "dataset"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A revision's files at one commit. A large file is known by its SHA-256, a text by git's hash."""

    revision: str
    commit: str
    tree: dict[str, FileInfo]

    def contains(self, shard: StoredFile) -> bool:
        """Return whether a shard exists under its name."""
        info = self.tree.get(shard.name)
        return info is not None and (info.st_size, info.sha256) == (shard.size, shard.sha256)

    def holds_text(self, name: str, data: bytes) -> bool:
        """Return whether a small file has this content."""
        info = self.tree.get(name)
        if info is None or info.sha256:
            return info is not None and info.sha256 == hashlib.sha256(data).hexdigest()
        return info.blob == hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


class HubClient:
    """One repository, one token. Requests that the library makes only once are retried here."""

    def __init__(self, address: Location, token: str | None = None) -> None:
        from huggingface_hub import HfApi

        self.address = address
        self.repo: dict[str, Any] = {"repo_id": address.repo, "repo_type": _KIND}
        self.api: Any = HfApi(token=token, library_name="brim")
        self.token = hub_token(token)

    def visibility(self) -> str | None:
        """ "private" or "public", or None if there is no such repository."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            info = ask_again(lambda: self.api.repo_info(**self.repo))
        except RepositoryNotFoundError as error:
            if status_of(error) == 404:
                return None
            raise
        self.called = str(info.id)
        return "private" if info.private else "public"

    def create(self, private: bool) -> None:
        try:
            ask_again(lambda: self.api.create_repo(**self.repo, private=private, exist_ok=True))
        except UnexpectedAnswerError:
            if self.visibility() is None:
                raise

    def need_token(self) -> str:
        if not self.token:
            raise DestinationError(
                "The token for the Hub is missing.",
                hint="Log in with `hf auth login`, or set HF_TOKEN to a token that may write.",
            )
        return self.token

    def need_write(self) -> None:
        """Raise the Hub's answer to a token that may not write here."""
        ask_again(lambda: self.api.auth_check(**self.repo, write=True))

    def holds_more(self) -> bool:
        """Return whether the owner of the repository has a paid account, as far as the server states it."""
        try:
            user = ask_again(self.api.whoami)
        except Exception as error:
            if status_of(error) is None:
                raise
            return False  # a server that does not say
        if not isinstance(user, dict):
            return False
        owner = self.address.repo.partition("/")[0]
        account = next((org for org in user.get("orgs") or () if org.get("name") == owner), user)
        return bool(account.get("isPro") or account.get("isEnterprise") or account.get("plan") not in (None, "free"))

    def need_branch(self, name: str) -> None:
        """Create a branch that does not exist, from main."""
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            ask_again(lambda: self.api.repo_info(**self.repo, revision=name))
        except RevisionNotFoundError as error:
            if name.startswith("refs/"):
                raise DestinationError(f"{self.address.repo} has no revision {name!r}.") from error
            ask_again(lambda: self.api.create_branch(**self.repo, branch=name, exist_ok=True))
            return
        refs = ask_again(lambda: self.api.list_repo_refs(**self.repo))
        if not name.startswith("refs/") and name not in {branch.name for branch in refs.branches}:
            raise DestinationError(
                f"{name!r} is a commit or a tag of {self.address.repo}, and only a branch can be published to.",
                hint="Name a branch after the @, or leave it out for main.",
            )

    def beginning(self) -> Location:
        """Return the revision that a publication to this branch begins with: main, if the branch does not exist."""
        from huggingface_hub.errors import RevisionNotFoundError

        if self.address.revision == MAIN or self.address.revision.startswith("refs/"):
            return self.address
        try:
            ask_again(lambda: self.api.repo_info(**self.repo, revision=self.address.revision))
        except RevisionNotFoundError:
            return replace(self.address, revision=MAIN)
        return self.address

    def snapshot(self, revision: str = MAIN, commit: str = "") -> Snapshot:
        """List a revision, at the commit that it has now or at a known one."""
        repository = self._repository(commit or revision)
        if commit:
            repository.commit = commit
        return Snapshot(revision, repository.commit, dict(repository.list()))

    def read(self, name: str, snapshot: Snapshot) -> bytes | None:
        """Return a small file of a snapshot; None if it has none of that name."""
        return self._repository(snapshot.commit).read(name, snapshot.commit) if name in snapshot.tree else None

    def _repository(self, revision: str) -> HubRepository:
        from brim.storage.hub_repository import HubRepository

        return HubRepository(replace(self.address, revision=revision), self.token)

    def commit(
        self, revision: str, parent: str, operations: Sequence[Any], message: str, description: str | None = None
    ) -> str:
        """Make a commit, in one try: the caller lists the repository before another."""
        info = ask_hub(
            lambda: self.api.create_commit(
                **self.repo,
                operations=list(operations),
                commit_message=message,
                commit_description=description,
                revision=revision,
                parent_commit=parent,
            )
        )
        return str(info.oid)

    def open_pull(self, title: str, description: str) -> int:
        pull = ask_hub(lambda: self.api.create_pull_request(**self.repo, title=title, description=description))
        return int(pull.num)

    def find_pull(self, mark: str) -> int | None:
        """Return the number of the open pull request whose title contains `mark`."""

        def find() -> int | None:
            pulls = self.api.get_repo_discussions(**self.repo, discussion_type="pull_request", discussion_status="open")
            return next((int(pull.num) for pull in pulls if mark in pull.title), None)

        return ask_again(find)

    def pull_status(self, number: int) -> str:
        """Return draft, open, closed or merged; closed if it does not exist."""
        try:
            details = ask_again(lambda: self.api.get_discussion_details(**self.repo, discussion_num=number))
        except Exception as error:
            if status_of(error) == 404:
                return "closed"
            raise
        return str(details.status)

    def set_pull_status(self, number: int, status: str) -> None:
        def change() -> None:
            if self.pull_status(number) != status:
                self.api.change_discussion_status(**self.repo, discussion_num=number, new_status=status)

        ask_again(change)

    def merge(self, number: int) -> None:
        """Merge a pull request; after a lost answer it is merged already."""

        def merge() -> None:
            if self.pull_status(number) != "merged":
                self.api.merge_pull_request(**self.repo, discussion_num=number)

        ask_again(merge)


def own_name(token: str | None) -> str:
    """Return the name of the token's account."""
    from huggingface_hub import HfApi

    with explain_hub_errors("your account", started=False):
        return str(ask_again(lambda: HfApi(token=token).whoami())["name"])
