"""A folder, a prefix in a bucket, or a bucket of the Hub; also single files in one of them.

Several files cannot be replaced atomically. Therefore the card names a file that does not exist while a build runs, and
the card that makes the dataset loadable is written last. A bucket has a lease (storage/lease.py) instead of a lock, and
the published ledger of each split in `.brim/`; its listing at the end must agree with the receipts.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from brim.errors import DestinationError, DestinationUnavailableError
from brim.formats.card import CARD
from brim.formats.card_configs import UNFINISHED
from brim.formats.splice import FileSplice, Splice
from brim.jobs.destination import Destination, Existing, Publication, Run, UploadBudget
from brim.jobs.destination_paths import DestinationPaths
from brim.jobs.manifest import DatasetCard
from brim.progress import notify_if_slow
from brim.state.atomic_files import failures, rename, write_whole
from brim.state.ledger import LEDGER, STATE, Receipt
from brim.state.lock import owner_of
from brim.storage.destination_address import MANIFESTS
from brim.storage.explain_error import explain_errors
from brim.storage.listing import list_files, read_file
from brim.storage.storage import PART_BYTES, FileInfo, PutResult, Storage, open_storage
from brim.storage.storage_error import StorageError
from brim.storage.upload_content import SilentWatcher, UploadWatcher

_RETAINED = f"{MANIFESTS}/keep"  # content that will get another name, by SHA-256
_TRIALS = f"{MANIFESTS}/check-"
_CONFIG = "default"
_MOST_PARTS_IN_FLIGHT = 2
_MOST_COPY_BYTES = 5_000_000_000  # of one copy inside of S3


class _TwoParts:
    """Zeros, one byte more than an object of one part has."""

    size, path = PART_BYTES + 1, None

    def chunks(self, start: int = 0, stop: int | None = None, *_: Any, **__: Any) -> Iterator[memoryview]:
        yield memoryview(bytes((self.size if stop is None else stop) - start))


class FilesDestination(Destination):
    """Shards in `data/` with a card next to it, or the files of `paths.file_names`."""

    def __init__(self, paths: DestinationPaths, run: Run, own: frozenset[str] | None = None) -> None:
        self.paths, self._run, self._own = paths, run, own
        self._folder = paths.root.path if paths.root.is_local else None
        self._storage: Storage = open_storage(paths.root)
        self._files: dict[str, FileInfo] | None = None  # of a dataset in a bucket, as listed
        self._is_reserved = self._has_lease = False
        # Parts write the same card at the same time.
        self._mark = f".{Path(min(own)).stem}" if own else ""

    @property
    def _is_bucket_dataset(self) -> bool:
        return self._folder is None and self.paths.has_card

    # Existing files

    def read_existing(self) -> Existing:
        if not self._is_bucket_dataset:
            return Existing(self._names(), None, self._is_unfinished())
        with notify_if_slow(self._run.progress.note, f"still waiting for {self.paths.root}"):
            with explain_errors(self.paths.root):
                if not self._storage.exists():
                    self._files = {}
                    return Existing((), ())
            self._list()
            return Existing(self._names(), self._manifests(), self._is_unfinished())

    def _names(self) -> list[str]:
        if not self.paths.has_card:
            return [name for name in self.paths.file_names if self._info(name) is not None]
        if self._folder is not None:
            entries = sorted(os.listdir(self._folder / "data")) if (self._folder / "data").is_dir() else []
            return [f"data/{entry}" for entry in entries if not entry.startswith(".")]
        return [name for name in sorted(self._files or {}) if name.startswith(f"{self.paths.shard_folder}/")]

    def _list(self) -> None:
        folders, root = (self.paths.shard_folder, MANIFESTS), self.paths.root
        self._files = {name: info for folder in folders for name, info in list_files(root, folder, "write")}

    def _info(self, name: str) -> FileInfo | None:
        if self._files is not None:
            return self._files.get(name)
        with explain_errors(self.paths.root):
            return next(iter(self._storage.stat([name])))

    def _manifests(self) -> list[bytes]:
        prefix = f"{MANIFESTS}/{_CONFIG}/"
        names = [name for name in sorted(self._files or {}) if name.startswith(prefix) and name.endswith(".jsonl")]
        contents = (read_file(self.paths.root, name, "write") for name in names)
        return [data for data in contents if data is not None]

    def _is_unfinished(self) -> bool:
        """Return whether the card marks the build as unfinished; single files have no card."""
        return not self.paths.has_card or UNFINISHED.encode() in (self._read_card_bytes() or b"")

    def manifest_name(self, split: str) -> str | None:
        return f"{MANIFESTS}/{_CONFIG}/{split}.jsonl" if self._is_bucket_dataset else None

    # Opening

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Hold the lease of a dataset or file in a bucket. Parts of a plan share the bucket without one."""
        if self._is_reserved or self._own is not None or self._folder is not None:
            yield
            return
        from brim.storage.lease import Lease

        progress = self._run.progress
        self._create_bucket()
        owner, file = owner_of(self._run.ledger.path.parent), next(iter(self.paths.file_names), "")
        self._lease = Lease(self.paths.root, owner, progress.note, file)
        self._is_reserved = True
        try:
            self._lease.take(self._run.stop.check)
            self._has_lease = True
            yield
        finally:
            self._is_reserved = self._has_lease = False
            self._lease.release()

    def _create_bucket(self) -> None:
        """Create a bucket of the Hub, as a repository is. Other buckets must exist."""
        with explain_errors(self.paths.root):
            if self._storage.create():
                self._run.progress.note(f"made the private bucket {self.paths.root.root}")

    def check_access(self) -> Storage | None:
        """Upload and delete an object of two parts: some stores accept only small ones."""
        if self._folder is not None:
            return None
        with notify_if_slow(self._run.progress.note, f"still waiting for {self.paths.root}"):
            self._create_bucket()
            name = f"{_TRIALS}{time.time_ns():x}"
            self._storage.put(name, _TwoParts(), None, SilentWatcher())
            with explain_errors(self.paths.root):
                self._storage.delete([name])
        return self._storage

    @contextmanager
    def open(self, fingerprint: str, budget: UploadBudget) -> Iterator[Existing]:
        if not self.paths.has_card:
            if self._has_lease:
                self._lease.renew()  # no other run has taken the file during hours of work
            yield self.read_existing()
            return
        if self._folder is not None:
            if self._own is not None:
                (self._folder / f".{CARD}{self._mark}.tmp").unlink(missing_ok=True)
            self._abort_uploads()
            existing = self.read_existing()
            if self._own is not None:  # a part has its own ledger; that of the folder shows another dataset
                ledger = self._folder / STATE / LEDGER
                existing = replace(existing, manifests=[ledger.read_bytes()] if ledger.exists() else [])
            yield existing
            return
        # The limit decides how many parts of a shard are uploaded at a time; each shard needs one in any case.
        parts = 1 + budget.bytes // max(budget.workers, 1) // PART_BYTES
        self._storage = open_storage(self.paths.root, parts_in_flight=max(1, min(parts, _MOST_PARTS_IN_FLIGHT)))
        self._create_bucket()
        with notify_if_slow(self._run.progress.note, f"still waiting for {self.paths.root}"):
            self._list()
        was_reserved = self._has_lease
        with self.reserved():
            if was_reserved:
                self._lease.renew()  # no other run has taken the bucket during hours of work
            self._abort_uploads()
            self._list()
            yield Existing(self._names(), self._manifests(), self._is_unfinished())

    def _abort_uploads(self) -> None:
        """Abort uploads, or remove temporary files, that a killed run left. The lock is held, or they are our own."""
        folder = self.paths.shard_folder

        def is_own(name: str) -> bool:
            return "/" not in name.removeprefix(f"{folder}/") if self._own is None else name in self._own

        try:
            count = self._storage.abort_uploads(folder if self._folder is not None else f"{folder}/", is_own)
        except StorageError as error:
            self._run.progress.note(f"{self.paths.root}: {error.detail}")
            return
        if count and self._folder is None:
            self._run.progress.note(f"aborted {count} upload(s) that were begun and never finished")

    # Shards

    def has_receipt(self, receipt: Receipt) -> bool:
        is_damaged = self._run.ledger.is_damaged(receipt)
        return not is_damaged and self._is_same(self._info(receipt.name), receipt)

    def _is_same(self, info: FileInfo | None, receipt: Receipt) -> bool:
        """Compare a file with a receipt: by size, and in a bucket by the ETag, if one was recorded."""
        if info is None or info.st_size != receipt.size:
            return False
        return self._folder is not None or receipt.etag in ("", info.etag)

    def has_content(self, receipt: Receipt) -> bool:
        info = self._info(f"{_RETAINED}/{receipt.sha256}") if self.paths.has_card else None
        return info is not None and info.st_size == receipt.size

    def retain(self, receipt: Receipt) -> None:
        if self._folder is not None or receipt.size <= _MOST_COPY_BYTES:  # a larger object is uploaded again
            self._move(receipt.name, f"{_RETAINED}/{receipt.sha256}")

    def restore(self, receipt: Receipt, name: str) -> str:
        info = self._move(f"{_RETAINED}/{receipt.sha256}", name)
        return "" if self._folder is not None else info.etag

    def _move(self, source: str, target: str) -> FileInfo:
        with explain_errors(self.paths.root):
            info = self._storage.move(source, target)
        if self._files is not None:
            self._files.pop(source, None)
            self._files[target] = info
        return info

    def discard(self, names: Iterable[str]) -> None:
        if not self.paths.has_card:
            return  # single files stay until they are replaced
        retained = [name for name in self._files or {} if name.startswith(f"{_RETAINED}/")]
        self._delete([*(name for name in names if self._files is None or name in self._files), *retained])
        if self._folder is not None:
            shutil.rmtree(self._folder / _RETAINED, ignore_errors=True)

    def _delete(self, names: Sequence[str]) -> None:
        with explain_errors(self.paths.root):
            self._storage.delete(names)
        if self._files is not None:
            for name in names:
                self._files.pop(name, None)

    def free_bytes(self) -> int | None:
        return self._storage.free_bytes()

    def upload(self, name: str, content: Splice, sha256: str | None, watcher: UploadWatcher) -> PutResult:
        if self._has_lease:
            self._lease.check()
        if not self.paths.has_card and self._folder is not None and content.path is not None and sha256 is not None:
            self._place_file(content.path, self._folder / name)
            watcher.sent(content.size)
            return PutResult(sha256)
        if not self.paths.has_card:
            with suppress(StorageError):
                self._storage.abort_uploads(name, lambda found: found == name)
        return self._storage.put(name, content, sha256, watcher)

    def _place_file(self, source: Path, target: Path) -> None:
        """Give a large file its name by a link, so that a killed run finds it again, or by a rename."""
        link = source.with_name(f".{source.name}.tmp")
        with failures(target.parent):
            link.unlink(missing_ok=True)
            try:
                os.link(source, link)
            except OSError:  # a file system without links
                link = source
            rename(link, target)
            if link != source:
                link.unlink(missing_ok=True)  # renaming one name of a file over another leaves both

    def uploader(self) -> Storage:
        if self._folder is not None and not self._storage.marker:
            # A temporary file shows other machines that it is the same folder.
            self._storage.marker = f"data/.{uuid.uuid4().hex}.tmp"
            with failures(self._folder):
                (self._folder / self._storage.marker).touch()
        return self._storage

    # Publishing

    def check_card(self, card: DatasetCard) -> None:
        if self.paths.has_card:
            card.final(self._read_card(), {})

    def start(self, title: str, missing: int, card: DatasetCard) -> None:
        if self.paths.has_card:
            existing = self._read_card()
            card.final(existing, {})
            self._write(CARD, card.unfinished(existing, {}).encode())

    def publish(self, publication: Publication) -> str:
        if not self._is_bucket_dataset:
            self.discard(publication.removed) if self.paths.has_card else self._delete(sorted(publication.removed))
            if self._storage.marker:  # and files of lost machines
                self._abort_uploads()
            if self.paths.has_card:
                self._write(CARD, publication.card.final(self._read_card(), {}).encode())
            return ""
        self._list()
        wrong = [receipt.name for receipt in publication.receipts if not self._is_listed(receipt)]
        if wrong:
            raise DestinationUnavailableError(
                f"{self.paths.root} does not list {wrong[0]} as it was uploaded ({len(wrong)} such objects).",
                hint="Another process may have changed it. Run the same command again.",
            )
        self._lease.renew()  # no other run has written since
        self._abort_uploads()  # of a lost node of a cluster
        files = self._files or {}
        manifests = f"{MANIFESTS}/{_CONFIG}/"
        stale = {name for name in files if name.startswith(manifests) and name not in publication.manifests}
        temporary = {name for name in files if name.startswith((f"{_RETAINED}/", _TRIALS))}
        self._delete(sorted({*publication.removed & files.keys(), *stale, *temporary}))
        for name, data in publication.manifests.items():
            self._write(name, data)
        self._write(CARD, publication.card.final(self._read_card(), {}).encode())
        count = len(publication.receipts)
        shards = "the shard" if count == 1 else f"all {count:,} shards"
        version = "size and ETag" if all(receipt.etag for receipt in publication.receipts) else "size"
        return f"the bucket lists {shards} with the {version} recorded at the upload"

    def _is_listed(self, receipt: Receipt) -> bool:
        """Return whether a shard is listed. If a store lists another ETag than its object has, the latter counts."""
        listed = (self._files or {}).get(receipt.name)
        if listed is None or self._is_same(listed, receipt):
            return listed is not None
        with explain_errors(self.paths.root):
            return self._is_same(next(iter(self._storage.stat([receipt.name]))), receipt)

    def _read_card_bytes(self) -> bytes | None:
        if self._folder is None:
            return read_file(self.paths.root, CARD, "write")
        with failures(self._folder):
            try:
                return (self._folder / CARD).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _read_card(self) -> str | None:
        try:
            data = self._read_card_bytes()
            return None if data is None else data.decode()
        except UnicodeDecodeError as error:
            raise DestinationError(
                f"The {CARD} at {self.paths.root} cannot be read: {error}.",
                hint="Correct it, or move it away and run again, which writes a new one.",
            ) from error

    def _write(self, name: str, data: bytes) -> None:
        if self._folder is None:
            with explain_errors(self.paths.root):
                self._storage.put_bytes(name, data)
            return
        with failures(self._folder):
            write_whole(self._folder / name, data, self._mark)

    # Units

    def open_work_dir(self, fingerprint: str, fresh: bool) -> Path:
        if self.paths.has_card:
            return self.paths.work_dir
        folder = self.paths.work_dir / fingerprint[:16]
        if fresh or not folder.exists():
            shutil.rmtree(self.paths.work_dir, ignore_errors=True)
        return folder

    def store_bad_rows(self, path: Path | None, watcher: UploadWatcher) -> Path | str | None:
        if self.paths.has_card:
            return super().store_bad_rows(path, watcher)
        name = self.paths.bad_rows.name
        if self._folder is not None:
            if path is None:
                (self._folder / name).unlink(missing_ok=True)
                return None
            rename(path, self._folder / name)
            return self._folder / name
        if path is None:
            self._delete([name])
            return None
        with FileSplice(path) as content:
            self.upload(name, content, None, watcher)
        return str(self.paths.root.child(name))

    def clear_units(self) -> None:
        super().clear_units()
        if not self.paths.has_card:
            state, work = self.paths.state_dir, self.paths.work_dir
            for folder in (work, state / "made"):  # the last is of version 0.1.0, killed
                shutil.rmtree(folder, ignore_errors=True)
            if state != work.parent:
                with suppress(OSError):
                    work.parent.rmdir()  # the state is in another folder
