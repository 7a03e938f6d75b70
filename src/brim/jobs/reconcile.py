"""Compare the ledger, the destination and the requested shards: which may be replaced, are missing, or are reused.

The destination is the truth. The ledger of this machine counts only while a job is unfinished. Everything that is
refused is refused before anything changes at the destination.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from brim.errors import DestinationError, DestinationUnavailableError, PlanMismatchError
from brim.execution.thread_backend import Cancelled
from brim.jobs.destination import Destination, DestinationChanged, Existing, Run
from brim.jobs.shard_set import ShardSet, computed_changes
from brim.plans.cut_shards import Shard
from brim.sizes import format_size
from brim.state.ledger import JobRecord, Ledger, Receipt, job_versions
from brim.state.retry import interrupted_by

STAGED_S = 12 * 3600  # an upload that is not committed counts so long
_REPLACE_HINT = "Use --update to update it (unchanged shards are kept), --fresh to start over, or another destination."


class Scope:
    """What a run does of a job. Base class: everything, and no other run has done a part of it.

    A part uploads the shards in `names`, publishes nothing, and has its ledger in `ledger_dir`, locked by the caller.
    """

    names: frozenset[str] | None = None
    ledger_dir: Path | None = None

    @property
    def is_part(self) -> bool:
        return self.names is not None

    def receipts_of_parts(self, ledger: Ledger) -> Iterable[Receipt]:
        """Return the receipts of shards that parts have uploaded."""
        return ()

    def check_missing(self, missing: Sequence[Shard]) -> None:
        """Raise an error if these shards must not be uploaded by this run."""

    def take_over_units(self, units: Ledger) -> bool:
        """Take over the units that parts have computed; return whether there can be any."""
        return False


WHOLE_JOB = Scope()


class Reconciliation:
    """The rules for one delivery of shards to a destination. `fresh` starts over, `updates` keeps unchanged shards."""

    def __init__(
        self,
        run: Run,
        destination: Destination,
        shards: ShardSet,
        scope: Scope,
        *,
        fresh: bool,
        updates: bool,
        replaces_foreign: bool,
        base: Sequence[Receipt] | None = None,
    ) -> None:
        self._ledger, self._progress, self._stop = run.ledger, run.progress, run.stop
        self._destination, self._shards, self._scope = destination, shards, scope
        self._fresh, self._updates, self._replaces_foreign = fresh, updates, replaces_foreign
        self._base = base
        self._job = shards.fingerprint[:16]
        self.foreign: frozenset[str] = frozenset()  # foreign files that will be replaced
        self.known_sha256: dict[str, str] = {}  # of shards that must be uploaded again

    @property
    def _is_new(self) -> bool:
        job = self._ledger.job
        return job is None or job.fingerprint != self._shards.fingerprint

    def agree(self, existing: Existing, base_jobs: frozenset[str] = frozenset()) -> None:
        """Take over the published receipts. A part compares them only, and keeps its own ledger.

        `base_jobs` are the fingerprints that an append was planned on.
        """
        ledger, manifests = self._ledger, existing.manifests
        if self._base is not None:
            jobs = (Ledger.from_bytes(data).job for data in manifests or ())
            if any(job is not None and job.fingerprint not in {*base_jobs, self._shards.fingerprint} for job in jobs):
                raise DestinationChanged
        if self._scope.is_part:
            published = Ledger.from_bytes(b"".join(manifests or ()))
            ledger.add_names(published.names)
            is_staged = self._destination.is_staged
            if published.job is not None and not (is_staged and self._updates):
                hint = "Save the plan with --update to replace it, or choose another destination."
                self._refuse_other_job(published.job, hint if is_staged else "Choose another destination.")
        elif manifests is not None:
            ledger.agree_with(b"".join(manifests))
        if self._base is not None:
            ledger.add_names(receipt.name for receipt in self._base)
        # A run that was killed between a shard and its receipt has left a file of brim.
        ledger.add_names(ledger.planned_names(existing.names))

    def start(self, existing: Existing, card: Any) -> None:
        """Refuse to replace foreign or finished results; then record the job. `card` is the card without receipts."""
        ledger, destination = self._ledger, self._destination
        receipts = [*self._shards.existing_receipts, *self._scope.receipts_of_parts(ledger)]
        was_removed = ledger.is_finished and not destination.is_staged and not existing.names
        if ledger.job is not None and not (self._fresh or self._updates or was_removed):
            self._refuse_other_job(ledger.job, _REPLACE_HINT)
        self.foreign = self._foreign_files(existing)
        if (self._is_new or self._fresh) and not self._scope.is_part:
            self._check_space_for_job(receipts)
            destination.check_card(card)
        if self._fresh and ledger.job is not None:
            for name in sorted(ledger.receipts):
                ledger.forget(name)
            ledger.old_receipts.clear()
            destination.discard(ledger.names)
        if self._is_new:
            shards = self._shards
            record = JobRecord(shards.fingerprint, shards.facts, job_versions(), shards.skipped_files)
            ledger.start_job(record, shards.names)
        ledger.add_all(receipt for receipt in receipts if ledger.receipts.get(receipt.name) != receipt)

    def _refuse_other_job(self, job: JobRecord, hint: str) -> None:
        if job.fingerprint != self._shards.fingerprint:
            changes = self._shards.changes_from(job.facts)
            raise PlanMismatchError(
                f"The destination has another dataset: {'; '.join(changes)}.", hint=hint, changes=changes
            )

    def _foreign_files(self, existing: Existing) -> frozenset[str]:
        """Return the foreign files among the shards; refuse them unless they will be replaced."""
        ledger, names = self._ledger, self._shards.names
        foreign = [name for name in existing.names if name not in ledger.names]
        is_known = ledger.job is not None or self._scope is not WHOLE_JOB or self._base is not None
        # Without a ledger, files with the names of our shards are ours if an unfinished build is announced.
        if is_known or (existing.is_unfinished and not names.isdisjoint(foreign)):
            foreign = [name for name in foreign if name not in names]
        if not self._replaces_foreign:
            refuse_foreign_files(foreign, self._destination.is_staged)
        return frozenset(foreign)

    def _check_space_for_job(self, existing: Sequence[Receipt]) -> None:
        """Refuse a job whose new shards do not fit next to the kept ones, after --fresh removed others."""
        shards, free = self._shards.shards, self._destination.free_bytes()
        if free is None or self._shards.is_linked or self._shards.size(shards) <= free:
            return
        if self._fresh:
            receipts = self._ledger.receipts.values()
            self.check_space(shards, sum(r.size for r in receipts if self._destination.has_receipt(r)))
            return
        unchanged = {receipt.key for receipt in existing}
        unchanged |= {key for key, receipt in self._ledger.receipts_by_key().items() if self._is_unchanged(receipt)}
        self.check_space([shard for shard in shards if self._shards.key(shard) not in unchanged])

    def check_space(self, missing: Sequence[Shard], freed_bytes: int = 0) -> None:
        need = 0 if self._shards.is_linked else self._shards.size(missing)
        free = self._destination.free_bytes()
        if free is not None and need > free + freed_bytes:
            raise DestinationUnavailableError(
                f"The destination has {format_size(free)} of free disk space and the shards to write need "
                f"{format_size(need)}; nothing was written.",
                hint="Free disk space, then run the same command to continue.",
                need_bytes=need,
                free_bytes=free,
            )

    # Missing shards

    def missing_shards(self, workers: int, limit_bytes: int) -> list[Shard]:
        """Return the shards without a valid receipt. Content with a new name is moved, doubtful content is hashed."""
        ledger = self._ledger
        if not ledger.has_only(self._job):
            self._reuse_by_key()
        missing: list[Shard] = []
        doubtful: list[tuple[Shard, Receipt]] = []
        own = self._scope.names
        for shard, mtimes in self._shards.with_mtimes(s for s in self._shards.shards if own is None or s.name in own):
            receipt = ledger.receipts.get(shard.name)
            sha256 = self._shards.known_sha256(shard)  # of rows that were computed again: a function may be random
            is_other = receipt is not None and sha256 is not None and sha256 != receipt.sha256
            if receipt is None or receipt.job != self._job or is_other:
                missing.append(shard)
            elif ledger.is_damaged(receipt):
                self._progress.note(f"{shard.name}: brim verify found that it is damaged, so it is written again")
                missing.append(shard)
            elif not self._exists(receipt):
                if receipt.staged_at and receipt.mtimes == mtimes:
                    self.known_sha256[shard.name] = receipt.sha256
                missing.append(shard)
            elif receipt.mtimes != mtimes:
                doubtful.append((shard, receipt))
        if doubtful:
            missing += self._compare(doubtful, workers, limit_bytes)
        return sorted(missing, key=lambda shard: shard.start)

    def _exists(self, receipt: Receipt) -> bool:
        destination = self._destination
        if destination.has_receipt(receipt) or 0 <= time.time() - receipt.staged_at < STAGED_S:
            return True
        return destination.is_staged and destination.has_content(receipt)  # publishing names it

    def _compare(self, doubtful: list[tuple[Shard, Receipt]], workers: int, limit_bytes: int) -> list[Shard]:
        """Hash shards whose source files have other dates; return those with other content."""
        self._progress.note(f"comparing the content of {len(doubtful)} shard(s) with the destination")
        total = self._shards.size([shard for shard, _ in doubtful])
        self._progress.start("compare", total, len(doubtful), limit_bytes)
        changed: list[Shard] = []
        cancelled = threading.Event()

        def check() -> None:
            if cancelled.is_set():
                raise Cancelled
            self._stop.check()

        def advance(size: int) -> None:
            check()
            self._progress.advance(size)

        def sha256_of(pair: tuple[Shard, Receipt]) -> str:
            with interrupted_by(check), self._shards.content(pair[0]).splice() as splice:
                return splice.sha256(advance)

        with ThreadPoolExecutor(workers, "compare") as pool:
            try:
                for (shard, receipt), sha256 in zip(doubtful, pool.map(sha256_of, doubtful), strict=True):
                    self._progress.shard(shard.name, receipt.size, sha256, "compared")
                    if sha256 == receipt.sha256:
                        new = self.receipt(shard, receipt.size, sha256, etag=receipt.etag)
                        self._ledger.add(replace(new, staged_at=receipt.staged_at))
                    else:
                        self._progress.note(f"{shard.name}: the content of its files changed, so it is written again")
                        self.known_sha256[shard.name] = sha256
                        changed.append(shard)
            except BaseException:
                cancelled.set()
                raise
        return changed

    def receipt(self, shard: Shard, size: int, sha256: str, *, etag: str = "") -> Receipt:
        key, mtimes = self._shards.key(shard), self._shards.mtimes(shard)
        staged_at = int(time.time()) if self._destination.is_staged else 0
        return Receipt(shard.name, shard.split, shard.rows, size, sha256, key, mtimes, self._job, staged_at, etag)

    def _is_unchanged(self, receipt: Receipt) -> bool:
        """Return whether the destination still has the content of an earlier shard, under its name or another."""
        is_named = self._ledger.receipts.get(receipt.name) == receipt and self._destination.has_receipt(receipt)
        return is_named or self._destination.has_content(receipt)

    def _reuse_by_key(self) -> None:
        """Give earlier shards with the content of new ones their new names and receipts.

        The old receipt is forgotten before the file moves, and the new one is written after it has moved.
        """
        ledger, destination = self._ledger, self._destination
        by_key: dict[str, list[Shard]] = {}
        for shard in self._shards.shards:
            by_key.setdefault(self._shards.key(shard), []).append(shard)
        reused: list[tuple[Shard, Receipt]] = []
        for receipt in ledger.receipts_by_key().values():
            candidates = by_key.get(receipt.key)
            if not candidates or ledger.is_damaged(receipt) or not self._is_unchanged(receipt):
                continue
            has_name = ledger.receipts.get(receipt.name) == receipt and destination.has_receipt(receipt)
            same = next((shard for shard in candidates if has_name and shard.name == receipt.name), None)
            if has_name and same is None:
                ledger.forget(receipt.name)
                destination.retain(receipt)
            shard = same or candidates[0]
            candidates.remove(shard)
            reused.append((shard, receipt))
        for shard, receipt in reused:
            if ledger.receipts.get(shard.name) != receipt:
                if shard.name in ledger.receipts:
                    ledger.forget(shard.name)  # before its file is replaced
                receipt = replace(receipt, etag=destination.restore(receipt, shard.name))
            # The dates stay: if those of the files differ, the content is compared as in any resumed run.
            ledger.add(replace(receipt, name=shard.name, split=shard.split, job=self._job))


def refuse_foreign_files(names: Sequence[str], is_staged: bool) -> None:
    """Refuse files that brim did not write: they would become part of the dataset."""
    if names:
        raise DestinationError(
            f"The destination has {len(names)} foreign file(s) that brim did not write, such as "
            f"{names[0]}; they would become part of the dataset.",
            hint="Move them away, or choose another destination."
            + (" --fresh replaces them; the repository's history keeps them." if is_staged else ""),
        )


def refuse_foreign_in_folder(existing: Existing, ledger: Ledger) -> None:
    """Refuse foreign files in a folder, whatever their names.

    Not while a job is unfinished or a line is damaged: then files may be shards whose receipts are missing.
    """
    if existing.manifests is None and (ledger.job is None or (ledger.is_finished and not ledger.broken)):
        refuse_foreign_files([name for name in existing.names if name not in ledger.names], is_staged=False)


def other_job_error(subject: str, job: JobRecord, facts: dict[str, Any], hint: str) -> PlanMismatchError:
    """Make the error for a destination that belongs to another computed job."""
    changes = computed_changes(job.facts, facts)
    return PlanMismatchError(f"The destination has {subject}: {'; '.join(changes)}.", hint=hint, changes=changes)


def is_content_of(path: Path, receipt: Receipt) -> bool:
    """Return whether a local file has the content of a receipt."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == receipt.sha256
    except OSError:
        return False
