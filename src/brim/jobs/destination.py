"""What a job needs of a destination: files (folder, bucket), a repository on the Hub, or a cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from brim.formats.splice import Splice
from brim.jobs.destination_paths import DestinationPaths
from brim.jobs.manifest import DatasetCard
from brim.progress import Progress
from brim.records import dataclass
from brim.state.ledger import Ledger, Receipt
from brim.state.stop import Stop
from brim.storage.destination_address import Uploader
from brim.storage.storage import PutResult
from brim.storage.upload_content import UploadWatcher

if TYPE_CHECKING:
    from brim.compute.outputs.output import OutputShard
    from brim.jobs.preflight import JobSettings


@dataclass(frozen=True, slots=True)
class Run:
    """What a run has while it holds the lock of its destination."""

    ledger: Ledger
    stop: Stop
    progress: Progress


@dataclass(frozen=True, slots=True)
class Existing:
    """The files at a destination. `manifests` is None where only the ledger of this machine knows the receipts.

    `names` are all files where shards belong. `is_unfinished`: the card marks the build as unfinished, so that
    shards may exist which no manifest names.
    """

    names: Sequence[str] = ()
    manifests: Sequence[bytes] | None = None
    is_unfinished: bool = False


@dataclass(frozen=True, slots=True)
class UploadBudget:
    """The memory that uploads may use, how many run at a time, and whether the user chose the limit."""

    bytes: int
    workers: int
    is_explicit: bool = True


@dataclass(frozen=True, slots=True)
class Publication:
    """What readers shall find: these shards, this card, and no longer the shards that are `gone`."""

    receipts: Sequence[Receipt]
    removed: frozenset[str]
    card: DatasetCard
    manifests: Mapping[str, bytes]
    base: Sequence[Receipt] | None = None  # of an append: shards that must still exist as they were


class DestinationChanged(Exception):
    """Another process has changed the dataset that rows are appended to: read it again. Never leaves a job."""


class UploadsExpired(Exception):
    """Uploaded shards no longer exist and must be uploaded again. Never leaves a job."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(*names)
        self.names = names


class Destination:
    """Base class; the methods of a destination that needs no preparation, like a cache, or has no content to move.

    Methods are called by one thread, `upload` by several.
    """

    is_staged = False  # uploads expire unless they are published; until then readers see the old content
    is_in_place = False  # results are computed where they stay
    paths: DestinationPaths

    def read_existing(self) -> Existing:
        """Read the existing files without changing anything, before the destination is opened."""
        return Existing()

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Keep other runs away, also before the destination is opened: where that needs more than the local lock."""
        yield

    def check_access(self) -> Uploader | None:
        """Check that uploads will work, before hours of work; return an uploader that other machines can check."""
        return None

    @contextmanager
    def open(self, fingerprint: str, budget: UploadBudget) -> Iterator[Existing]:
        """Prepare the destination for uploads, and yield the existing files."""
        yield self.read_existing()

    def has_receipt(self, receipt: Receipt) -> bool:
        """Return whether the undamaged shard exists under its name, by size and, if recorded, by version."""
        raise NotImplementedError

    def has_content(self, receipt: Receipt) -> bool:
        """Return whether the content of a shard is kept under another name."""
        return False

    def retain(self, receipt: Receipt) -> None:
        """Keep the content of a shard that loses its name."""

    def restore(self, receipt: Receipt, name: str) -> str:
        """Give retained content a name; return its ETag, if there is one."""
        raise NotImplementedError

    def discard(self, names: Iterable[str]) -> None:
        """Remove the shards of an earlier build that is started over."""

    def free_bytes(self) -> int | None:
        return None

    def check_card(self, card: DatasetCard) -> None:
        """Raise the error that writing this card would raise, before the first byte."""

    def start(self, title: str, missing: int, card: DatasetCard) -> None:
        """Announce uploads to readers. `missing` shards do not exist under their names yet."""

    def upload(self, name: str, content: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        """Upload a shard durably. Its SHA-256 may be known already."""
        raise NotImplementedError

    def uploader(self) -> Uploader:
        """Return what uploads shards from other machines."""
        raise NotImplementedError

    def checkpoint(self, receipts: Sequence[Receipt]) -> None:
        """Keep uploads that are not published yet from expiring."""

    def manifest_name(self, split: str) -> str | None:
        """Return the name of the published manifest of a split, if there is one."""
        return None

    def publish(self, publication: Publication) -> str:
        """Make the shards visible to readers; return in words how that was verified."""
        raise NotImplementedError

    def finish_in_place(self, units: Ledger, receipts: Sequence[Receipt], files: Iterable[OutputShard]) -> None:
        """Finish results that are computed where they stay. `files` may replace those of some units."""
        raise NotImplementedError

    def open_work_dir(self, fingerprint: str, fresh: bool) -> Path:
        """Return the folder in which the results of a job are made. Results of another job are not continued."""
        return self.paths.work_dir

    def store_bad_rows(self, path: Path | None, watcher: UploadWatcher) -> Path | str | None:
        """Store the file of skipped rows, or remove an earlier one; return where it is.

        That of a dataset stays in its folder on this machine, or in the state of the job.
        """
        if path is None:
            self.paths.bad_rows.unlink(missing_ok=True)
        return path

    def clear_units(self) -> None:
        """Remove the units of a finished job."""
        shutil.rmtree(self.paths.units_dir, ignore_errors=True)


def open_destination(
    paths: DestinationPaths, settings: JobSettings, run: Run, own: frozenset[str] | None
) -> Destination:
    """Return the destination of a job. `own` are the shards of this run, if other parts upload to it as well."""
    if paths.is_cache:
        from brim.jobs.cache_destination import CacheDestination

        return CacheDestination(paths, run)
    if paths.location.is_repository:
        from brim.jobs.hub_destination import HubDestination

        return HubDestination(paths, settings.hub, run, is_part=own is not None, updates=settings.update)
    from brim.jobs.files_destination import FilesDestination

    return FilesDestination(paths, run, own)
