"""A repository on the Hub: shards are uploaded as objects that no reader sees, then published in one step.

Up to a hundred shards are published by one commit with all pointers, the card and the deletions. For more, brim opens a
pull request, fills it in groups and merges it at the end. Readers see the old version or the new one. The state of the
repository determines the remaining work (storage/hub_commits.py), so a killed run only has to remember the number of
its pull request.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from typing import Any

from brim.errors import DestinationError, DestinationUnavailableError, MemoryLimitError
from brim.formats.card import CARD
from brim.formats.card_configs import UNFINISHED
from brim.formats.splice import Splice
from brim.jobs.destination import (
    Destination,
    DestinationChanged,
    Existing,
    Publication,
    Run,
    UploadBudget,
    UploadsExpired,
)
from brim.jobs.destination_paths import DestinationPaths
from brim.jobs.manifest import DatasetCard
from brim.jobs.publish_options import PublishOptions
from brim.records import dataclass
from brim.state.ledger import Receipt, StoredFile
from brim.state.retry import interruptible
from brim.storage import hub_private
from brim.storage.destination_address import MANIFESTS
from brim.storage.hub_client import HubClient, Snapshot
from brim.storage.hub_commits import CONFLICT, REFUSED, HubCommits, Operations, UploadsMissing, pointers, texts
from brim.storage.hub_session import explain_hub_errors, hub_session, hub_tries, status_of
from brim.storage.hub_upload import HubUpload, LfsUpload, XetUpload
from brim.storage.location import MAIN, Location
from brim.storage.storage import PutResult
from brim.storage.storage_error import StorageError
from brim.storage.upload_content import UploadWatcher
from brim.storage.xet import XET_BYTES, XetUnavailableError

_CONNECT_S = 10.0
_ONE_BYTE = StoredFile("check", 1, hashlib.sha256(b"\0").hexdigest())
# The Hub asks for about 100 files per commit, limits commits per hour, and removes uploaded objects after about 20
# hours if no commit names them.
ONE_COMMIT_SHARDS = 100
GROUP_SHARDS, GROUP_S = 100, 3600.0
UNCOMMITTED_S = 12 * 3600.0
_TITLE_CHARACTERS = 150  # of 200 that the Hub allows

# Opened by a worker process, until it ends: connections stay open from shard to shard.
_UPLOADS: dict[HubUploader, HubUpload] = {}
_SESSION: list[ExitStack] = []


def _open_session() -> None:
    if not _SESSION:
        stack = ExitStack()
        stack.enter_context(hub_session(lambda text: None))
        _SESSION.append(stack)


@dataclass(frozen=True, slots=True)
class HubUploader:
    """Uploads shards from any machine: by Xet if it is allowed and available, otherwise by LFS."""

    location: Location
    endpoint: str
    token: str = field(repr=False)
    by_xet: bool = False

    def check_access(self) -> None:
        """Check that the Hub answers, and request the upload of one byte, which is not sent."""
        from huggingface_hub.utils import get_session

        _open_session()
        with explain_hub_errors(self.location.repo, started=False):
            interruptible(lambda: get_session().head(self.endpoint, timeout=_CONNECT_S))
            LfsUpload(self.location, self.token, self.endpoint).request([_ONE_BYTE])

    def put(self, name: str, content: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        _open_session()
        with explain_hub_errors(self.location.repo, started=True):
            if self not in _UPLOADS:
                upload: HubUpload = LfsUpload(self.location, self.token, self.endpoint)
                if self.by_xet:
                    try:  # a task may use the least memory that Xet needs
                        upload = XetUpload(self.location, self.token, XET_BYTES, 1, False, self.endpoint)
                    except XetUnavailableError:
                        pass
                _UPLOADS[self] = upload
            return _UPLOADS[self].send(name, content, sha256, watcher)


class HubDestination(Destination):
    """One publication to a repository. `is_part`: other parts of a plan upload too, and nothing is committed.

    `updates`: the shards may be similar to existing ones.
    """

    is_staged = True

    def __init__(
        self, paths: DestinationPaths, options: PublishOptions, run: Run, *, is_part: bool, updates: bool
    ) -> None:
        self.paths, self._run, self._updates = paths, run, updates
        self._location, self._repo = paths.location, paths.location.repo
        self.options = replace(options, commit_as_you_go=False, create_pr=False) if is_part else options
        self.visibility, self.pull_request, self.allows_more = "", 0, False
        self._is_started = False
        self._base: Snapshot | None = None
        self._pull: Snapshot | None = None  # the state of the pull request

    @property
    def commits(self) -> int:
        """The number of commits of this run."""
        return self._commits.count

    def _explain_errors(self) -> Any:
        return explain_hub_errors(self._repo, started=self._is_started)

    def _session(self) -> Any:
        return hub_session(self._run.progress.note, self._run.stop.check)

    # Existing files

    def read_existing(self) -> Existing:
        """Read the files of a config; an empty list without a token or a repository."""
        with self._session(), explain_hub_errors(self._repo, started=False):
            self.client = HubClient(self._location, self.options.token)
            if not self.client.token or self.client.visibility() is None:
                return Existing()
            try:
                self._base = self.client.snapshot(self.client.beginning().revision)
            except StorageError as error:
                if error.kind != "no_revision":
                    raise
                return Existing()  # of a pull request: an error when something is published to it
            return self._existing(self._base)

    def _existing(self, snapshot: Snapshot) -> Existing:
        options, prefix = self.options, f"{MANIFESTS}/{self.options.config}/"
        names = [name for name in sorted(snapshot.tree) if name.startswith(prefix) and name.endswith(".jsonl")]
        if options.split is not None:
            names = [name for name in names if name == self.manifest_name(options.split)]
        manifests = [data for data in (self.client.read(name, snapshot) for name in names) if data is not None]
        card = self.client.read(CARD, snapshot) or b""
        return Existing(self._shard_names(snapshot), manifests, UNFINISHED.encode() in card)

    def _shard_names(self, snapshot: Snapshot) -> list[str]:
        """Return the files of the config, or of the one split that is published."""
        options = self.options
        prefix = f"{options.folder}/" + ("" if options.split is None else f"{options.split}-")
        return [name for name in sorted(snapshot.tree) if name.startswith(prefix)]

    def manifest_name(self, split: str) -> str:
        return f"{MANIFESTS}/{self.options.config}/{split}.jsonl"

    # Opening

    def check_access(self) -> HubUploader | None:
        """Check that the user may write. A repository that does not exist yet is not created for it."""
        with self._session(), explain_hub_errors(self._repo, started=False):
            client = HubClient(self._location, self.options.token)
            token = client.need_token()
            if client.visibility() is None:
                return None
            client.need_write()
            return HubUploader(self._location, client.api.endpoint, token)

    @contextmanager
    def open(self, fingerprint: str, budget: UploadBudget) -> Iterator[Existing]:
        with self._session():
            with self._explain_errors():
                self.client = HubClient(self._location, self.options.token)
                token = self.client.need_token()
                self._open_repository()
                self._lfs = LfsUpload(self._location, token)
                self._commits = HubCommits(self.client, self._lfs, self._run.progress.committed)
                self._base = self.client.snapshot(self._location.revision)
                if self.options.folder in self._base.tree:
                    raise DestinationError(
                        f"{self._repo} has a file named {self.options.folder}, where the folder of this config would "
                        "be.",
                        hint="Use another --config.",
                    )
                self._find_pull_request(fingerprint)
                self._upload = self._choose_upload(token, budget)
                existing = self._existing(self._base)
            yield existing

    def _open_repository(self) -> None:
        note, public = self._run.progress.note, self.options.public
        visibility = self.client.visibility()
        if visibility is None:
            visibility = "public" if public else "private"
            self.client.create(private=not public)
            note(f"created the {visibility} repository {self._repo}")
        elif self.client.called.lower() != self._repo.lower():
            note(f"{self._repo} is called {self.client.called} now: the Hub redirects to it")
        if public and visibility == "private":
            note(f"{self._repo} exists and stays private; --public is for new repositories")
        self.visibility = visibility
        self.client.need_write()
        self.allows_more = visibility == "public" or self.client.holds_more()
        if self._location.revision != MAIN:
            self.client.need_branch(self._location.revision)

    def _find_pull_request(self, fingerprint: str) -> None:
        """Continue the pull request of an interrupted run of the same publication: its branch, config and split."""
        options = self.options
        inputs = [fingerprint, self._location.revision, options.config, options.split, options.create_pr]
        self._mark = f"brim {hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}"
        self._pull = None
        if options.commit_as_you_go:
            return
        mark, number = self._run.ledger.recall("pull request") or ("", 0)
        number = number if mark == self._mark else self.client.find_pull(self._mark)
        if number and self.client.pull_status(number) in ("draft", "open"):
            self._use_pull_request(number)

    def _use_pull_request(self, number: int) -> None:
        self.pull_request = number
        self._pull = self.client.snapshot(f"refs/pr/{number}")

    def _choose_upload(self, token: str, budget: UploadBudget) -> HubUpload:
        """Prefer Xet for changed shards, of which the Hub knows most chunks, if it is available and fits."""
        is_required = self.options.upload_with == "xet"
        is_useful = self.options.upload_with == "auto" and self._updates and bool(self._shard_names(self._snapshots[0]))
        if is_required or is_useful:
            try:
                return XetUpload(self._location, token, budget.bytes, budget.workers, budget.is_explicit)
            except XetUnavailableError as error:
                if is_required:
                    self._run.progress.note(f"{error}: sending by LFS instead")
            except MemoryLimitError:
                if is_required:
                    raise
        return self._lfs

    # Shards

    @property
    def _snapshots(self) -> list[Snapshot]:
        return [snapshot for snapshot in (self._base, self._pull) if snapshot is not None]

    def has_receipt(self, receipt: Receipt) -> bool:
        return not self._run.ledger.is_damaged(receipt) and self._contains(receipt.stored_file)

    def _contains(self, shard: StoredFile) -> bool:
        return any(snapshot.contains(shard) for snapshot in self._snapshots)

    def has_content(self, receipt: Receipt) -> bool:
        return receipt.sha256 in self._objects()

    def _objects(self) -> set[str]:
        return {file.sha256 for snapshot in self._snapshots for file in snapshot.tree.values() if file.sha256}

    def restore(self, receipt: Receipt, name: str) -> str:
        return ""  # the next commit names the object

    def upload(self, name: str, content: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        with self._explain_errors():
            if sha256 is None and (self._upload.hashes_first or content.size in self._existing_sizes):
                sha256 = content.sha256(watcher.hashed)
            if sha256 in self._existing_objects:
                watcher.sent(content.size)
                return PutResult(sha256, sent=False)
            return self._upload.send(name, content, sha256, watcher)

    def uploader(self) -> HubUploader:
        token = self.client.token
        assert token is not None  # opened() has checked it
        by_xet = self.options.upload_with == "xet" and self._upload is not self._lfs
        return HubUploader(self._location, self.client.api.endpoint, token, by_xet)

    # Publishing

    def start(self, title: str, missing: int, card: DatasetCard) -> None:
        base = self._snapshots[0]
        with self._explain_errors():
            self._card_bytes(base, card, final=True)  # an invalid card is an error now, not after the uploads
        self._is_started = True
        self._title = title
        with self._explain_errors():
            if self.options.commit_as_you_go:
                data = self._card_bytes(base, card, final=False)
                self._commit(self._location.revision, lambda at: texts(at, {CARD: data}), "Begin to publish")
            elif not self.pull_request and (missing > ONE_COMMIT_SHARDS or self.options.create_pr):
                self._open_pull_request()
        self._remember_pull_request()
        self._existing_objects = self._objects()
        files = (file for snapshot in self._snapshots for file in snapshot.tree.values())
        self._existing_sizes = {file.st_size for file in files if file.sha256}

    def _open_pull_request(self) -> None:
        number = self.client.find_pull(self._mark)  # an earlier answer may have been lost
        if number is None:
            title = f"{(self.options.commit_message or self._title)[:_TITLE_CHARACTERS]} [{self._mark}]"
            end = "" if self.options.create_pr else " and merges it when everything is uploaded"
            description = f"Opened by brim, which fills it in groups{end}."
            retry = hub_tries()
            while number is None:
                try:
                    number = self.client.open_pull(title, description)
                except Exception as error:
                    if not retry.wait_to_retry(error):
                        raise
                    number = self.client.find_pull(self._mark)
        self._use_pull_request(number)
        end = "left open" if self.options.create_pr else "merged"
        self._run.progress.note(f"filling pull request {number}, which is {end} when it is complete")

    def _remember_pull_request(self) -> None:
        if self.pull_request:
            self._run.ledger.remember("pull request", [self._mark, self.pull_request])

    def _commit(self, revision: str, operations: Operations, message: str, description: str | None = None) -> Snapshot:
        try:
            return self._commits.commit(revision, operations, message, description)
        except UploadsMissing as missing:
            raise UploadsExpired(missing.names) from missing

    def _add_shards(self, revision: str, shards: Sequence[StoredFile]) -> Snapshot | None:
        """Commit those of the shards that a revision lacks, in groups."""
        snapshot = None
        for start in range(0, len(shards), GROUP_SHARDS):
            group = shards[start : start + GROUP_SHARDS]
            snapshot = self._commit(revision, lambda at, group=group: pointers(at, group), "Add shards")  # type: ignore[misc]
        return snapshot

    def checkpoint(self, receipts: Sequence[Receipt]) -> None:
        """Commit uploads in full groups, or all of them before they expire: the Hub counts commits."""
        waiting = sorted((r for r in receipts if not self._contains(r.stored_file)), key=lambda receipt: receipt.name)
        age_s = time.time() - min((receipt.staged_at for receipt in waiting), default=time.time())
        if not waiting or (len(waiting) < GROUP_SHARDS and age_s < GROUP_S):
            return
        shards = [receipt.stored_file for receipt in waiting]
        shards = shards[: len(shards) // GROUP_SHARDS * GROUP_SHARDS] or shards
        with self._explain_errors():
            if self.options.commit_as_you_go:
                self._base = self._add_shards(self._location.revision, shards)
            elif self.pull_request or age_s >= UNCOMMITTED_S * 0.8:
                if not self.pull_request:
                    self._open_pull_request()
                    self._remember_pull_request()
                self._fill_pull_request(shards)

    def _fill_pull_request(self, shards: Sequence[StoredFile]) -> None:
        missing = [shard for shard in shards if self._pull is None or not self._pull.contains(shard)]
        self._pull = self._add_shards(f"refs/pr/{self.pull_request}", missing) or self._pull

    def publish(self, publication: Publication) -> str:
        self._is_started = True
        shards = [receipt.stored_file for receipt in publication.receipts]
        target = self._location.revision
        with self._explain_errors():
            if self.pull_request:
                pull = f"refs/pr/{self.pull_request}"
                self._fill_pull_request(shards)
                self._pull = self._commit_all(pull, publication)
                if self.options.create_pr:
                    self.client.set_pull_status(self.pull_request, "open")
                    return self._verify(publication, pull)
                self._merge(publication)
            else:
                if self.options.commit_as_you_go:
                    missing = [shard for shard in shards if not self._contains(shard)]
                    self._base = self._add_shards(target, missing) or self._base
                self._commit_all(target, publication)
            return self._verify(publication, target)

    def _merge(self, publication: Publication) -> None:
        """Merge the pull request. Where that is impossible, one commit does the same."""
        if self._location.revision == MAIN:
            self.client.set_pull_status(self.pull_request, "open")
            try:
                self.client.merge(self.pull_request)
                self._commits.add_count()
                return
            except Exception as error:
                if status_of(error) not in (*CONFLICT, *REFUSED):
                    raise
            self._run.progress.note(
                f"pull request {self.pull_request} cannot be merged as it is: publishing in one commit instead"
            )
        self._commit_all(self._location.revision, publication)
        self.client.set_pull_status(self.pull_request, "closed")

    def _commit_all(self, revision: str, publication: Publication) -> Snapshot:
        """Commit everything that differs from the publication."""

        def operations(snapshot: Snapshot) -> list[Any]:
            # The text of the card is the target's: it may have been edited since the pull request was opened.
            is_target = snapshot.revision == self._location.revision
            base = snapshot if is_target else self.client.snapshot(self._location.revision)
            self._check_base(base, publication)
            contents = {CARD: self._card_bytes(base, publication.card, final=True), **publication.manifests}
            removed = [name for name in self._removed_names(publication) if name in snapshot.tree]
            added = pointers(snapshot, (r.stored_file for r in publication.receipts))
            return [*added, *map(hub_private.deletion, removed), *texts(snapshot, contents)]

        message = self.options.commit_message or "Publish with brim"
        return self._commit(revision, operations, message, self.options.description)

    def _check_base(self, base: Snapshot, publication: Publication) -> None:
        """Raise DestinationChanged if readers have neither the shards that rows are appended to, nor the result."""
        if publication.base is None:
            return
        names = set(self._shard_names(base))
        for receipts in (publication.base, publication.receipts):
            if names == {receipt.name for receipt in receipts} and all(base.contains(r.stored_file) for r in receipts):
                return
        if self.pull_request:
            self.client.set_pull_status(self.pull_request, "closed")
        raise DestinationChanged

    def _removed_names(self, publication: Publication) -> list[str]:
        """Return shards and manifests that are no longer part of the dataset; never another file."""
        shards = [name for name in publication.removed if name.startswith(f"{self.options.folder}/")]
        stale: list[str] = []
        if self.options.split is None:
            prefix, names = f"{MANIFESTS}/{self.options.config}/", self._snapshots[0].tree
            stale = [name for name in names if name.startswith(prefix) and name not in publication.manifests]
        return sorted([*shards, *stale])

    def _card_bytes(self, snapshot: Snapshot, card: DatasetCard, *, final: bool) -> bytes:
        try:
            data = self.client.read(CARD, snapshot)
            existing = None if data is None else data.decode()
        except UnicodeDecodeError as error:
            raise DestinationError(f"The {CARD} on the Hub is not UTF-8.", hint="Correct it there.") from error
        sizes = {name: file.st_size for name, file in snapshot.tree.items()}
        return (card.final if final else card.unfinished)(existing, sizes).encode()

    def _verify(self, publication: Publication, revision: str) -> str:
        snapshot = self.client.snapshot(revision)
        wrong = [receipt.name for receipt in publication.receipts if not snapshot.contains(receipt.stored_file)]
        wrong += [name for name in self._removed_names(publication) if name in snapshot.tree]
        if wrong:
            raise DestinationUnavailableError(
                f"The Hub does not list {wrong[0]} as it was published ({len(wrong)} such files).",
                hint="Another user may have changed it. Run the same command again.",
            )
        count = len(publication.receipts)
        shards = "the shard" if count == 1 else f"all {count:,} shards"
        return f"the Hub lists {shards} with the right size and SHA-256 ({snapshot.commit[:12]})"
