"""The first phases of a computed job: compute units, and finish them into shards. Then it is like any job (job.py).

Decided here is also which job the units of a folder belong to: one that is continued, adopted, or refused.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from brim.compute.outputs.output import CachedRows, Finished, Units, write_bad_rows
from brim.errors import DestinationError
from brim.execution.process_backend import ProcessBackend
from brim.execution.scheduler import UnitStats
from brim.execution.unit_receipts import UnitFiles, UnitJob, compute_units
from brim.execution.unit_storage import BucketUnits, clear_units, download_units
from brim.jobs.cache_entries import CachedFiles, read_cached
from brim.jobs.destination import Destination, Existing, Run
from brim.jobs.job import Delivery, Job
from brim.jobs.preflight import ComputePlan, JobSettings
from brim.jobs.reconcile import (
    WHOLE_JOB,
    Scope,
    other_job_error,
    refuse_foreign_files,
    refuse_foreign_in_folder,
)
from brim.jobs.results import MapResult
from brim.jobs.shard_set import ComputedShards, count_rows, without_function
from brim.jobs.source_changes import (
    Comparison,
    UnitRecord,
    compare_units,
    published_record,
    short_dates,
    source_record,
    unit_number,
    unit_record,
)
from brim.memory.meter import process_bytes
from brim.plans.describe_plan import WORKER_BYTES, sending_bytes
from brim.plans.fingerprint import digest_json
from brim.progress import Progress
from brim.state.ledger import JobRecord, Ledger, SourceRecord, job_versions
from brim.state.stop import Stop
from brim.storage.destination_address import Uploader
from brim.storage.listing import list_files
from brim.storage.location import parse_location

if TYPE_CHECKING:
    from brim.execution.ray_cluster import Cluster, NodeRequirements

_MEASURE_S = 0.1
_OTHER_HINT = "Use --fresh to start over, or choose another destination."


class ComputeRun:
    """One run of a computed job, which holds the lock of its destination."""

    def __init__(self, job: Job, run: Run, destination: Destination, cluster: Cluster | None) -> None:
        assert isinstance(job.plan, ComputePlan)
        self._job, self._plan, self._paths, self._settings = job, job.plan, job.paths, job.settings
        self._run, self._destination, self._cluster = run, destination, cluster
        self._watcher = _Watcher(run.progress, run.stop)
        # Nodes upload their units to a bucket: the one of the destination, or one for the work.
        workspace, root, self._bucket = self._settings.workspace, self._paths.root, None
        if cluster is not None and (workspace is not None or root.is_bucket):
            bucket = root if workspace is None else parse_location(workspace, self._settings.access)
            self._bucket = bucket.child(f".brim/units/{self._plan.fingerprint[:16]}")

    def run(self, scope: Scope = WHOLE_JOB) -> MapResult:
        destination, paths = self._destination, self._paths
        existing = destination.read_existing()
        self._check_existing(existing)
        if self._is_complete():
            destination.clear_units()  # of a run that was killed at its very end
            return self._finished_result(self._run.ledger)
        if paths.file_names and existing.names and self._run.ledger.job is None and not self._settings.fresh:
            raise DestinationError(
                f"{paths.root.child(existing.names[0])} already exists, and brim did not write it.",
                hint="Use --fresh to replace it when the job is done.",
            )
        if paths.has_card:
            refuse_foreign_in_folder(existing, self._run.ledger)
        requirements = self._node_requirements()
        with destination.reserved():  # two machines must not compute the same for hours
            uploader = destination.check_access()
            units = open_units(paths.units_dir, self._plan, self._run.ledger, self._settings, self._was_removed())
            work_dir = destination.open_work_dir(self._plan.fingerprint, self._settings.fresh)
            try:
                has_parts = scope.take_over_units(units)
                self._forget_changed(units, all_units=not has_parts)
                files = UnitFiles(paths.units_dir)
                if self._bucket is not None:
                    files = BucketUnits(paths.units_dir, self._bucket)
                stats = self._compute(units, files, None if paths.file_names else uploader)
                finished = self._finish(stats, work_dir)
                for note in finished.notes:
                    self._run.progress.note(note)
                result = self._deliver(units, stats, finished, requirements)
            finally:
                units.close()
        destination.clear_units()
        if self._bucket is not None:
            clear_units(self._bucket)
        return result

    def run_part(self, files: UnitFiles, part: int, part_count: int, types: str) -> UnitStats:
        """Compute every `part_count`-th unit into a separate folder, and upload nothing."""
        units = open_units(files.folder, self._plan, self._run.ledger, self._settings, self._was_removed())
        try:
            if types and units.recall("types") is None:
                units.remember("types", types)
            self._forget_changed(units, all_units=False)
            return self._compute(units, files, None, part, part_count)
        finally:
            units.close()

    # Reconcile

    def _check_existing(self, existing: Existing) -> None:
        """Take over the published receipts. Another job's dataset is refused before hours of work, not after."""
        if existing.manifests is None:
            return
        published, ledger, settings = b"".join(existing.manifests), self._run.ledger, self._settings
        job, own = Ledger.from_bytes(published).job, ledger.job
        is_unfinished = own is not None and not ledger.is_finished
        fingerprints = {self._plan.fingerprint, *([] if own is None else [own.fingerprint])}
        if job is not None and job.fingerprint not in fingerprints and not (settings.fresh or is_unfinished):
            raise other_job_error("another dataset", job, self._plan.facts, _OTHER_HINT)
        ledger.agree_with(published)
        is_staged = self._destination.is_staged
        if ledger.job is None and not existing.is_unfinished and not (is_staged and settings.fresh):
            refuse_foreign_files(existing.names, is_staged)

    def _is_complete(self) -> bool:
        """Return whether the job was finished before, its files exist, and its source has not changed."""
        ledger, receipts = self._run.ledger, self._run.ledger.receipts
        is_same = ledger.job is not None and ledger.job.fingerprint == self._plan.fingerprint
        if self._settings.fresh or not is_same or not ledger.is_finished or ledger.damaged:
            return False
        if self._paths.file_names and not receipts:
            return False
        return all(map(self._destination.has_receipt, receipts.values())) and self._source_is_same(ledger)

    def _source_is_same(self, ledger: Ledger) -> bool:
        """Return whether the source has the content that a finished job has read."""
        recorded, stamp = ledger.source, self._plan.source.stamp
        if not stamp or (recorded is not None and recorded.stamp == stamp):
            return True
        if recorded is None or self._destination.is_in_place:  # the units of a cache are compared individually
            return False
        comparison = self._compare(dict(enumerate(recorded.units)))
        if comparison.changed or comparison.units != len(recorded.units):
            self._run.progress.note("the content of the source has changed: everything is computed again")
            return False
        contents = ((number, key, content) for number, (key, _, content) in enumerate(recorded.units))
        units = tuple((key, short_dates(comparison.dates[number]), content) for number, key, content in contents)
        with suppress(OSError):  # in a read-only folder it is compared again the next time
            ledger.record_source(SourceRecord(stamp, units))
        return True

    def _compare(self, records: Mapping[int, UnitRecord]) -> Comparison:
        spool, run = self._paths.units_dir / "spool", self._run
        return compare_units(self._plan.source, self._plan.step, records, spool, run.progress, run.stop)

    def _forget_changed(self, units: Ledger, *, all_units: bool) -> None:
        """Forget units whose part of the source has other content.

        `all_units`: then all are forgotten, because the types of the first batch, the numbers of rows and the schema
        may differ for all of them. The parts of a plan have these from the plan.
        """
        stamp = self._plan.source.stamp
        if not stamp:
            return
        if units.job is not None and units.receipts and (units.source is None or units.source.stamp != stamp):
            receipts = {unit_number(receipt.name): receipt for receipt in units.receipts.values()}
            comparison = self._compare({number: unit_record(receipt) for number, receipt in receipts.items()})
            changed = comparison.changed
            if changed:
                count = len(receipts) if all_units else len(changed)
                self._run.progress.note(f"the content of the source has changed: units to compute again: {count:,}")
            if changed and all_units:
                for receipt in receipts.values():
                    units.forget(receipt.name)
                units.start_job(units.job)
            else:
                unchanged = [
                    replace(receipts[number], mtimes=comparison.dates[number])
                    for number in sorted(receipts.keys() - changed)
                ]
                for number in sorted(changed):
                    units.forget(receipts[number].name)
                units.add_all(receipt for receipt in unchanged if units.receipts[receipt.name] != receipt)
        units.record_source(SourceRecord(stamp))

    def _was_removed(self) -> bool:
        """Return whether all files of a finished result on this machine were removed."""
        ledger, root = self._run.ledger, self._paths.root
        if not ledger.is_finished or not root.is_local or self._destination.is_in_place:
            return False
        return not any((root.path / name).exists() for name in ledger.receipts)

    # Run units

    def _node_requirements(self) -> NodeRequirements | None:
        """Return what nodes need to upload shards: a shared folder with the units. Their memory is checked early."""
        location = self._paths.location
        if self._cluster is None or self._bucket is not None or location.is_local or self._paths.file_names:
            return None
        from brim.execution.ray_cluster import NodeRequirements

        self._cluster.check_memory(self._job.task_bytes(self._shard_bytes), self._job.limit.bytes)
        return NodeRequirements(paths=(str(self._paths.units_dir.absolute()),))

    @property
    def _shard_bytes(self) -> int:
        return WORKER_BYTES + (sending_bytes(0) if self._paths.location.is_bucket else 0)

    def _compute(
        self, units: Ledger, files: UnitFiles, uploader: Uploader | None, part: int = 0, part_count: int = 1
    ) -> UnitStats:
        plan, settings = self._plan, self._settings
        is_model = plan.command == "embed"  # a model uses all cores of a machine
        job = UnitJob(
            self._job.label,
            plan.source,
            plan.step,
            plan.output.writing,
            units,
            files,
            self._job.limit.bytes,
            self._run.progress,
            self._run.stop,
            workers=settings.workers or (1 if is_model and settings.engine == "local" else None),
            on_error=settings.on_error,
            uses_whole_node=is_model,
            held_bytes=settings.held_bytes,
            part=part,
            part_count=part_count,
        )
        if self._cluster is None:
            return compute_units(job, ProcessBackend)
        from brim.execution.ray_backend import RayUnits

        return compute_units(job, functools.partial(RayUnits, self._cluster, uploader, self._bucket))

    # Finish

    def _finish(self, stats: UnitStats, work_dir: Path) -> Finished:
        """Make shards of units: the same files where their types agree, otherwise written again."""
        plan, limit_bytes, receipts = self._plan, self._job.limit.bytes, stats.receipts
        progress, folder = self._run.progress, self._settings.hub.folder
        if self._bucket is not None and stats.bad_rows and self._settings.on_error == "quarantine":
            self._download([name for name, _ in list_files(self._bucket) if name.endswith(".bad.arrow")])
        units = Units(self._paths.units_dir, receipts, limit_bytes, plan.source.schema, work_dir, plan.source.name)
        progress.start("finish", sum(receipt.size for receipt in receipts), 0, limit_bytes)
        if self._cluster is not None and plan.output.joins:
            return self._finish_on_cluster(self._cluster, stats, units)
        self._download([receipt.name for receipt in receipts])
        finished = plan.output.finish(units, folder, self._watcher.advance)
        stats.peak_bytes = max(stats.peak_bytes, self._watcher.peak_bytes)
        return finished

    def _finish_on_cluster(self, cluster: Cluster, stats: UnitStats, units: Units) -> Finished:
        """Finish the units on a node. Without a shared disk, the results are downloaded."""
        from brim.execution.ray_backend import finish_on_cluster
        from brim.execution.ray_worker import FinishOrder

        folder = units.folder.absolute()
        units = replace(units, folder=folder, work=units.work.absolute())
        order = FinishOrder(self._plan.output, units, self._settings.hub.folder, self._bucket)
        finished, peak = finish_on_cluster(cluster, order, self._run.progress, self._run.stop)
        if self._bucket is not None:
            shutil.rmtree(folder / "made", ignore_errors=True)  # of a run that was killed
            self._download([str(file.path.relative_to(folder)) for file in finished.shards.values()])
        stats.peak_bytes = max(stats.peak_bytes, peak)
        return finished

    def _download(self, names: Iterable[str]) -> None:
        if self._bucket is not None:
            download_units(self._bucket, names, self._paths.units_dir, self._run.stop)

    def _deliver(
        self, units: Ledger, stats: UnitStats, finished: Finished, requirements: NodeRequirements | None
    ) -> MapResult:
        destination, ledger, plan = self._destination, self._run.ledger, self._plan
        if destination.is_in_place:
            destination.finish_in_place(units, stats.receipts, finished.shards.values())
            return self._finished_result(units, stats)
        # First, so that nothing is done again once the result exists.
        target, fresh = self._paths.bad_rows, self._settings.fresh
        target.with_name(f".{target.name}.tmp").unlink(missing_ok=True)  # of a run that was killed
        has_bad_rows = write_bad_rows(self._paths.units_dir, target)
        quarantine: Path | str | None = None
        if has_bad_rows or fresh:
            quarantine = destination.store_bad_rows(target if has_bad_rows else None, self._watcher)
        are_columns = bool(self._paths.file_names)
        is_local = self._paths.root.is_local
        shards = ComputedShards(plan.facts, finished.card, finished.shards, is_linked=is_local, are_columns=are_columns)
        source = source_record(plan.source, stats.receipts)
        result = Delivery(
            self._job,
            self._run,
            destination,
            shards,
            WHOLE_JOB,
            self._cluster,
            requirements=requirements,
            shard_bytes=self._shard_bytes,
            # Whether another job's result may be replaced was decided when this one began.
            fresh=fresh or (ledger.job is not None and ledger.job.fingerprint != plan.fingerprint),
            source=source,
            published_source=published_record(plan.source, source),
        ).deliver()
        return MapResult.from_build(result, stats, quarantine=quarantine, counts=finished.counts)

    def _finished_result(self, ledger: Ledger, stats: UnitStats | None = None) -> MapResult:
        """Return the result that a finished ledger records."""
        receipts = list(ledger.receipts.values())
        rows = count_rows([receipt.rows for receipt in receipts], bool(self._paths.file_names))
        cached: CachedFiles | None = None
        if isinstance(self._plan.output, CachedRows):
            cached = read_cached(self._paths.units_dir, ledger, self._plan.output.empty)
        return MapResult.from_build(self._job.result(receipts, rows), stats, cached=cached)


def open_units(
    folder: Path, plan: ComputePlan, finished: Ledger, settings: JobSettings, was_removed: bool = False
) -> Ledger:
    """Open the receipts of the units of a job. `finished` is the ledger of the destination.

    `was_removed`: all files of the destination are gone, so that another job may use it.
    """
    fresh = settings.fresh
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)
    units = Ledger(folder)
    if units.job is None:
        is_other = finished.job is not None and finished.job.fingerprint != plan.fingerprint
        if finished.job is not None and is_other and not fresh and not was_removed:
            raise other_job_error("another dataset", finished.job, plan.facts, _OTHER_HINT)
        folder.mkdir(exist_ok=True)
        units.start_job(JobRecord(plan.fingerprint, plan.facts, job_versions()))
    elif units.job.fingerprint != plan.fingerprint:
        _adopt(units, units.job, plan, settings.keep_done)
    return units


def _adopt(units: Ledger, job: JobRecord, plan: ComputePlan, keep_done: bool) -> None:
    """Take over the units of a job that differs only in its function, if the user asked for that."""
    has_same_units = digest_json(without_function(job.facts)) == digest_json(without_function(plan.facts))
    if not keep_done or not has_same_units:
        hint = "--fresh starts over"
        if has_same_units:
            hint += "; --keep-done keeps the finished units and computes the others with the present function"
        raise other_job_error("an unfinished job", job, plan.facts, f"{hint}.")
    receipts = [replace(receipt, job=plan.fingerprint[:16]) for receipt in units.receipts.values()]
    names = ["types", *(f"bad {kind} {receipt.name}" for kind in ("rows", "batches") for receipt in receipts)]
    notes, source = {name: units.recall(name) for name in names}, units.source
    units.start_job(JobRecord(plan.fingerprint, plan.facts, job_versions()))
    if source is not None:
        units.record_source(source)
    for name, note in notes.items():
        if note is not None:
            units.remember(name, note)
    for receipt in receipts:
        units.add(receipt)


class _Watcher:
    """Progress of finishing and of uploads in this thread, which can be stopped, with the peak memory."""

    def __init__(self, progress: Progress, stop: Stop) -> None:
        self._progress, self._stop = progress, stop
        self._measured_at = 0.0
        self.peak_bytes = 0

    def advance(self, size: int) -> None:
        self._stop.check()
        self._progress.advance(size)
        if time.monotonic() - self._measured_at > _MEASURE_S:
            self._measured_at = time.monotonic()
            self.peak_bytes = max(self.peak_bytes, process_bytes(os.getpid()))

    sent = advance

    def hashed(self, size: int) -> None:
        self._stop.check()
