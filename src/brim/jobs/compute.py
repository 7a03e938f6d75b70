"""Rows through a step: units are made, put together, and brought where they belong. A part of the job (job.py).

The job that the units of a destination belong to is continued, adopted, or not mixed with another.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.compute.outputs.output import CachedRows, Finished, Units, write_bad_rows
from brim.compute.rows.unit import RowSource
from brim.errors import PlanMismatchError, VerificationError
from brim.execution.process_backend import ProcessBackend
from brim.execution.unit_receipts import UnitFiles, UnitJob, UnitStats, compute_units
from brim.jobs.caches import CacheLayout, Kept, check_unsynced, keep_in_place, read_kept
from brim.jobs.content import ComputedContent, computed_changes, rows_of, without_function
from brim.jobs.job import ALONE, BuildResult, Job, MapResult, built_of
from brim.jobs.open_store import Books, published, reachable
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
from brim.jobs.upload_shards import MakeBackend, Share, refuse_strangers
from brim.memory.meter import process_bytes
from brim.options.check_options import VerifyOptions
from brim.plans.describe_plan import WORKER_BYTES, sending_bytes
from brim.plans.fingerprint import digest_json
from brim.progress import Progress
from brim.records import dataclass
from brim.state.ledger import JobRecord, Ledger, Receipt, SourceRecord, job_versions
from brim.state.stop import Stop
from brim.storage.listing import list_files
from brim.storage.location import Location, parse_location
from brim.stores.bucket_store import clear_units, fetch_unit
from brim.stores.store import Carrier, PublishedThere

if TYPE_CHECKING:
    from brim.execution.ray_cluster import Cluster


@dataclass(frozen=True, slots=True)
class Wanted:
    """The job that shall be done. `fresh`: what was there goes; `keep_done`: units stay though the function changed."""

    fingerprint: str
    facts: dict[str, Any]
    fresh: bool = False
    keep_done: bool = False


def agree_with_published(there: PublishedThere, wanted: Wanted, finished: Ledger, *, staged: bool) -> None:
    """What is published counts, and not what this machine remembers. Refused before hours of work.

    `staged`: readers keep what they have, so that --fresh may replace what brim did not write.
    """
    published = b"".join(there.manifests)
    theirs, ours = Ledger.of(published).job, finished.job
    under_way = ours is not None and not finished.done
    if theirs is not None and not wanted.fresh and not under_way:
        known = {wanted.fingerprint, *([] if ours is None else [ours.fingerprint])}
        if theirs.fingerprint not in known:  # somebody else's, since
            raise _another(theirs, wanted)
    finished.agree_with(published)
    if finished.job is None and not there.unfinished and not (staged and wanted.fresh):
        refuse_strangers(there.shards, staged)


def open_units(folder: Path, wanted: Wanted, finished: Ledger, removed: bool = False) -> Ledger:
    """The receipts of the units that are done. `finished` is the ledger of what the destination holds; `removed`: all
    of its files are gone, so that another job may take its place."""
    if wanted.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    units = Ledger(folder)
    if units.job is None:
        another = finished.job is not None and finished.job.fingerprint != wanted.fingerprint
        if finished.job is not None and another and not wanted.fresh and not removed:
            raise _another(finished.job, wanted)
        folder.mkdir(exist_ok=True)
        units.begin(JobRecord(wanted.fingerprint, wanted.facts, job_versions()))
    elif units.job.fingerprint != wanted.fingerprint:
        _adopt(units, units.job, wanted)
    return units


def _adopt(units: Ledger, before: JobRecord, wanted: Wanted) -> None:
    """Take over the units of a job that differs in its function alone, if that was asked for."""
    if not wanted.keep_done or not _same_units(before.facts, wanted.facts):
        hint = "--fresh starts over"
        if _same_units(before.facts, wanted.facts):
            hint += "; --keep-done keeps the units that are done and does the others with the function as it is now"
        raise _changed("an unfinished job", before, wanted, f"{hint}.")
    receipts = [replace(receipt, job=wanted.fingerprint[:16]) for receipt in units.receipts.values()]
    names = ["types", *(f"bad {what} {receipt.name}" for what in ("rows", "batches") for receipt in receipts)]
    notes, source = {name: units.recall(name) for name in names}, units.source
    units.begin(JobRecord(wanted.fingerprint, wanted.facts, job_versions()))
    if source is not None:
        units.record_source(source)
    for name, note in notes.items():
        if note is not None:
            units.remember(name, note)
    for receipt in receipts:
        units.add(receipt)


def _same_units(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether two jobs differ in nothing but the function."""
    return digest_json(without_function(before)) == digest_json(without_function(now))


def _another(before: JobRecord, wanted: Wanted) -> PlanMismatchError:
    return _changed("another dataset", before, wanted, "Use --fresh to start over, or choose another destination.")


def _changed(what: str, before: JobRecord, wanted: Wanted, hint: str) -> PlanMismatchError:
    changes = computed_changes(before.facts, wanted.facts)
    return PlanMismatchError(f"The destination has {what}: {'; '.join(changes)}.", hint=hint, changes=changes)


_LOOK_S = 0.1


class Computing:
    """A run of a job with a step: the books are open, and this machine's alone."""

    def __init__(self, job: Job, source: RowSource, cluster: Cluster | None, books: Books) -> None:
        assert job.spec.step is not None
        assert job.spec.output is not None
        self.job, self.spec, self.layout, self.how = job, job.spec, job.spec.layout, job.spec.how
        self.source, self.step, self.output = source, job.spec.step, job.spec.output
        self.cluster, self.books = cluster, books

    @property
    def _wanted(self) -> Wanted:
        return Wanted(self.spec.fingerprint, self.spec.facts, self.how.fresh, self.how.keep_done)

    def part(self, files: UnitFiles, part: int, part_count: int, types: str) -> UnitStats:
        """Compute a part of the units, in a separate folder; nothing is joined and nothing is uploaded."""
        units = open_units(files.folder, self._wanted, self.books.ledger, self._is_removed())
        try:
            if types and units.recall("types") is None:
                units.remember("types", types)
            self._drop_changed(units, everything=False)
            return self._make(units, None, files, part, part_count)
        finally:
            units.close()

    def run(self, share: Share = ALONE) -> MapResult:
        wanted = self._wanted
        if isinstance(self.layout, CacheLayout):
            check_unsynced(self.layout.units, self.books.ledger)
        if self._is_done(wanted):
            self.layout.clear()  # of a run that was killed at its very end
            ledger = self.books.ledger
            return MapResult.from_build(self._as_it_is(ledger), cached=self._kept(ledger))
        self.layout.refuse_strangers(self.books.ledger, self.how.fresh)
        executor, carrier = self._way_there()
        units = open_units(self.layout.units, wanted, self.books.ledger, self._is_removed())
        work = self.layout.work(wanted.fingerprint, wanted.fresh)
        try:
            if share.units is not None:
                share.units(units)
            self._drop_changed(units, everything=share.units is None)
            files = (
                UnitFiles(self.layout.units)
                if self._units_at is None
                else _ObjectUnits(self.layout.units, self._units_at)
            )
            outcome = self._make(units, carrier, files)
            finished = self._finish(outcome, work)
            for note in finished.notes:
                self.books.progress.note(note)
            done = self._deliver(units, outcome, finished, executor)
        finally:
            units.close()
        self.layout.clear()
        if self._units_at is not None:
            clear_units(self._units_at)
        return done

    @cached_property
    def _units_at(self) -> Location | None:
        """Where the nodes of a cluster put units, if that is a bucket: that of the destination, or one for the work."""
        said, place = self.how.workspace, self.layout.place
        if self.cluster is None or (said is None and not place.is_bucket):
            return None
        root = place if said is None else parse_location(said, self.how.access)
        return root.child(f".brim/units/{self.spec.fingerprint[:16]}")

    def _fetch(self, at: Location, names: Iterable[str]) -> None:
        """Files that lie in a bucket, to where they are put together or sent from."""
        for name in names:
            self.books.stop.check()
            if not (self.layout.units / name).exists():
                fetch_unit(at, name, self.layout.units)

    def _is_done(self, wanted: Wanted) -> bool:
        """Whether an earlier run has done all of it, and it is still there. The destination knows better than this
        machine, and another job's dataset there is refused."""
        ledger = self.books.ledger
        found = None if self.layout.apart else published(self.layout.place, self.how.hub, self.books)
        if found is not None:
            staged = self.layout.place.is_repository
            agree_with_published(found, wanted, ledger, staged=staged)
        if self.how.fresh or ledger.job is None or ledger.job.fingerprint != wanted.fingerprint or not ledger.done:
            return False
        if ledger.damaged:
            return False
        there = self.layout.holds(ledger)
        if there is False or not self._reads_the_same(ledger):
            return False
        return self._is_whole() if there is None else there

    def _reads_the_same(self, ledger: Ledger) -> bool:
        """Whether the source still has the content that a finished job has read."""
        recorded, stamp = ledger.source, self.source.stamp
        if not stamp or (recorded is not None and recorded.stamp == stamp):
            return True
        if recorded is None or isinstance(self.layout, CacheLayout):  # `_drop_changed` compares the units of a cache
            return False
        found = self._compare(dict(enumerate(recorded.units)))
        if found.changed or found.units != len(recorded.units):
            self.books.progress.note("the content of the source has changed: everything is computed again")
            return False
        contents = ((number, key, content) for number, (key, _, content) in enumerate(recorded.units))
        units = tuple((key, short_dates(found.dates[number]), content) for number, key, content in contents)
        with suppress(OSError):  # a folder that cannot be written to is compared again the next time
            ledger.record_source(SourceRecord(stamp, units))
        return True

    def _compare(self, known: Mapping[int, UnitRecord]) -> Comparison:
        spool = self.layout.units / "spool"
        return compare_units(self.source, self.step, known, spool, self.books.progress, self.books.stop)

    def _drop_changed(self, units: Ledger, *, everything: bool) -> None:
        """Forget units whose part of the source has other content since.

        `everything`: all units are forgotten then. The types of the first batch, the numbers of rows and the schema of
        the source may be others for all of them. The parts of a plan have these from the plan.
        """
        stamp = self.source.stamp
        if not stamp:
            return
        if units.job is not None and units.receipts and (units.source is None or units.source.stamp != stamp):
            receipts = {unit_number(receipt.name): receipt for receipt in units.receipts.values()}
            found = self._compare({number: unit_record(receipt) for number, receipt in receipts.items()})
            kept = [replace(receipts[n], mtimes=found.dates[n]) for n in sorted(receipts.keys() - found.changed)]
            if found.changed:
                count = len(receipts) if everything else len(found.changed)
                self.books.progress.note(f"the content of the source has changed: units to compute again: {count:,}")
            if found.changed and everything:
                for receipt in receipts.values():
                    units.forget(receipt.name)
                units.begin(units.job)
            else:
                for number in sorted(found.changed):
                    units.forget(receipts[number].name)
                units.add_all(receipt for receipt in kept if units.receipts[receipt.name] != receipt)
        units.record_source(SourceRecord(stamp))

    def _is_removed(self) -> bool:
        """Whether somebody has removed all files of a finished result on this machine."""
        ledger, place = self.books.ledger, self.layout.place
        if not ledger.done or not place.is_local or isinstance(self.layout, CacheLayout):
            return False
        return not any((place.path / name).exists() for name in ledger.receipts)

    def _is_whole(self) -> bool:
        """Whether the destination says that it holds what its own receipts say."""
        from brim.verification.verify import verify  # for what is far away, and done already

        try:
            endpoint = self.how.access.endpoint
            verify(VerifyOptions(str(self.layout.destination), endpoint_url=endpoint), self.books.progress)
        except VerificationError:
            return False
        return True

    def _way_there(self) -> tuple[MakeBackend | None, Carrier | None]:
        """Whether shards can be brought, and within the limit: before hours of work too.

        From here alone, there is nothing for other machines to try.
        """
        to, how = self.layout.destination, self.how
        executor = None
        shared = self.cluster is not None and self._units_at is None
        if shared and self.cluster is not None and not to.is_local and not self.layout.apart:
            shard_bytes = WORKER_BYTES + (sending_bytes(0) if to.is_bucket else 0)
            from brim.execution.ray_cluster import NodeRequirements

            requirements = NodeRequirements(paths=(str(self.layout.units.absolute()),))
            executor = self.job.on_cluster(self.cluster, requirements, shard_bytes)
        carrier = reachable(self.layout.place, how.hub, self.books)
        return executor, None if self.layout.apart else carrier

    def _make(
        self, units: Ledger, carrier: Carrier | None, files: UnitFiles, part: int = 0, part_count: int = 1
    ) -> UnitStats:
        """A model takes all cores of a machine by itself."""
        model = self.spec.verb == "embed"
        job = UnitJob(
            self.spec.label or self.spec.verb,
            self.source,
            self.step,
            self.output.writing,
            units,
            files,
            self.spec.limit.bytes,
            self.books.progress,
            self.books.stop,
            workers=self.how.workers or (1 if model and self.how.engine == "local" else None),
            on_error=self.how.on_error,
            uses_whole_node=model,
            held_bytes=self.how.held_bytes,
            part=part,
            part_count=part_count,
        )
        if self.cluster is None:
            return compute_units(job, ProcessBackend)
        from brim.execution.ray_backend import RayUnits

        return compute_units(job, functools.partial(RayUnits, self.cluster, carrier, self._units_at))

    def _finish(self, outcome: UnitStats, work: Path) -> Finished:
        limit_bytes, receipts, at = self.spec.limit.bytes, outcome.receipts, self._units_at
        if at is not None and outcome.bad_rows and self.how.on_error == "quarantine":
            self._fetch(at, [name for name, _ in list_files(at) if name.endswith(".bad.arrow")])
        units = Units(self.layout.units, receipts, limit_bytes, self.source.schema, work, self.source.name)
        self.books.progress.start("finish", sum(receipt.size for receipt in receipts), 0, limit_bytes)
        if self.cluster is not None and self.output.joins:
            return self._finish_there(self.cluster, outcome, units)
        if at is not None:
            self._fetch(at, [receipt.name for receipt in receipts])
        watched = _Watched(self.books.progress, self.books.stop)
        finished = self.output.finish(units, self.how.hub.folder, watched)
        outcome.peak_bytes = max(outcome.peak_bytes, watched.peak_bytes)
        return finished

    def _finish_there(self, cluster: Cluster, outcome: UnitStats, units: Units) -> Finished:
        """Joined, packed and cut by a task on a node. Without a shared disk, what it made is fetched."""
        from brim.execution.ray_backend import finish_on_cluster
        from brim.execution.ray_worker import FinishOrder

        at, folder = self._units_at, self.layout.units.absolute()
        units = replace(units, folder=folder, work=units.work.absolute())
        order = FinishOrder(self.output, units, self.how.hub.folder, at)
        finished, peak = finish_on_cluster(cluster, order, self.books.progress, self.books.stop)
        if at is not None:
            shutil.rmtree(folder / "made", ignore_errors=True)  # of a run that was killed
            self._fetch(at, [str(one.path.relative_to(folder)) for one in finished.made.values()])
        outcome.peak_bytes = max(outcome.peak_bytes, peak)
        return finished

    def _deliver(
        self, units: Ledger, outcome: UnitStats, finished: Finished, executor: MakeBackend | None
    ) -> MapResult:
        if isinstance(self.layout, CacheLayout):
            keep_in_place(self.layout.units, outcome.receipts, finished.made.values(), units)
            return MapResult.from_build(self._as_it_is(units), outcome, cached=self._kept(units))
        ledger, layout = self.books.ledger, self.layout
        watched = _Watched(self.books.progress, self.books.stop)
        write = functools.partial(write_bad_rows, layout.units)
        quarantine = layout.keep_bad_rows(write, self.how.fresh, watched)
        here = layout.place.is_local
        content = ComputedContent(self.spec.facts, finished.card, finished.made, here, layout.apart)
        # Whether another job's output may go was settled when this one began.
        another = ledger.job is not None and ledger.job.fingerprint != self.spec.fingerprint
        source = source_record(self.source, outcome.receipts)
        built = self.job.bring(
            content,
            self.books,
            ALONE,
            executor,
            fresh=self.how.fresh or another,
            source=source,
            published_source=published_record(self.source, source),
        )
        return MapResult.from_build(built, outcome, quarantine=quarantine, counts=finished.counts)

    def _as_it_is(self, ledger: Ledger) -> BuildResult:
        """What finished receipts say."""
        receipts = list(ledger.receipts.values())
        return built_of(self.spec, receipts, rows_of([receipt.rows for receipt in receipts], self.layout.apart))

    def _kept(self, ledger: Ledger) -> Kept | None:
        if not isinstance(self.output, CachedRows):
            return None
        return read_kept(self.layout.units, ledger, self.output.empty)


class _ObjectUnits(UnitFiles):
    """Unit files that the nodes of a cluster store in a bucket."""

    def __init__(self, folder: Path, location: Location) -> None:
        super().__init__(folder)
        self._sizes = {name: stat.st_size for name, stat in list_files(location, action="write")}

    def has(self, receipt: Receipt) -> bool:
        return self._sizes.get(receipt.name) == receipt.size


class _Watched:
    """Progress that can be stopped, and sees how much memory there was."""

    def __init__(self, progress: Progress, stop: Stop) -> None:
        self._progress, self._stop = progress, stop
        self._looked = 0.0
        self.peak_bytes = 0

    def __call__(self, size: int) -> None:
        self._stop.check()
        self._progress.advance(size)
        if time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            self.peak_bytes = max(self.peak_bytes, process_bytes(os.getpid()))

    def hashed(self, size: int) -> None:
        self._stop.check()

    def sent(self, size: int) -> None:
        self(size)
