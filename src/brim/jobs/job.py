"""The one runner. Every verb, whatever its destination and wherever it is computed, goes this way:

    lock → settle with what was there → [make units → finish] → bring → publish

A build has nothing to make; a part of a saved plan is a run with a share. Run again after anything, a job does what is
missing and nothing else: a file is on disk before its receipt, and a receipt before anything depends on it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from brim.file_set import FileSet
from brim.jobs.bring import Run, RunOptions, Share
from brim.jobs.caches import Kept, keep_in_place, read_kept
from brim.jobs.content import ComputedContent, Content, PlanContent, rows_of
from brim.jobs.layout import CacheLayout
from brim.jobs.open_store import Books, open_books, open_store, published, reachable
from brim.jobs.spec import Spec, check_hub_limits, preflight
from brim.jobs.units import Wanted, agree_with_published, open_units
from brim.memory.limit import Limit, usable_cores
from brim.memory.meter import process_bytes, tree_bytes
from brim.outputs.output import CachedRows, Finished, Units, write_bad_rows
from brim.progress import Progress, Silent
from brim.rows.unit import RowSource
from brim.schedule.ray_cluster import Sight, sample_of
from brim.schedule.scheduler import Executor
from brim.schedule.unit_work import ComputeOptions, Outcome
from brim.schedule.workplace import Workplace, carrying_bytes, opened, workplace
from brim.state.ledger import Ledger, Receipt
from brim.state.stop import Stop
from brim.stores.hub_options import HubAddress
from brim.stores.hub_store import HubStore
from brim.stores.store import Carrier, SendingRoom

_LOOK_S = 0.1
_MOST_SENDERS = 4  # of what was computed: it lies there, and only has to be sent
_ALONE = Share()


@dataclass(frozen=True, slots=True)
class Built:
    """What is at the destination. On the Hub: what was sent, in how many commits, and what the Hub says it holds."""

    destination: str
    rows: int
    files: int
    bytes: int
    shards: int
    written: int
    kept: int
    left_out: tuple[str, ...]
    sent_bytes: int = 0
    commits: int = 0
    visibility: str = ""
    pull_request: int = 0
    proved: str = ""


@dataclass(frozen=True, slots=True)
class Computed:
    """What a job did. `outcome` counts units: a build has none, nor has a job that was done before."""

    built: Built
    outcome: Outcome = field(default_factory=Outcome)
    quarantine: Path | str | None = None  # an address, where it is beside a file in a bucket
    counts: Mapping[str, int] = field(default_factory=dict)
    kept: Kept | None = None  # of a cache: what there is to open


class Job:
    """A spec that may run: what can be refused without looking at the destination is refused here."""

    def __init__(self, spec: Spec) -> None:
        preflight(spec)
        self.spec = spec

    @property
    def limit(self) -> Limit:
        return self.spec.limit

    def run(self, progress: Progress | None = None, share: Share = _ALONE) -> Computed:
        """Do what is missing. With a share, bring that and publish nothing."""
        spec, progress = self.spec, progress or Silent()
        with (
            self._hands() as (place, executor),
            open_books(spec.layout, spec.how, progress, share) as books,
        ):
            if isinstance(spec.source, PlanContent):
                if share is _ALONE:  # parts write shards before the destination's own ledger knows of a job
                    spec.layout.refuse_strangers(books.ledger, spec.how.fresh)
                return Computed(self._bring(spec.source, books, share, executor))
            return _Computing(self, spec.source, place, books).run()

    @contextmanager
    def _hands(self) -> Iterator[tuple[Workplace, Executor | None]]:
        """Where units are computed, and what brings shards if that is not this process."""
        spec = self.spec
        if not isinstance(spec.source, PlanContent) or spec.forecast is None:
            with workplace(spec.how.scaling) as place:
                yield place, None
            return
        files = spec.source.plan.table.files
        need = spec.forecast.worker + carrying_bytes(spec.layout.destination, spec.how.hub)
        sight = functools.partial(_sight, files)
        with opened(spec.how.scaling, sight, need, self.limit.bytes, spec.how.workers) as executor:
            yield Workplace(), executor

    def _bring(
        self, content: Content, books: Books, share: Share, executor: Executor | None, *, fresh: bool | None = None
    ) -> Built:
        """Bring what is missing at the destination, and publish it unless others share it."""
        spec, how = self.spec, self.spec.how
        workers, free_bytes = self._room()
        fresh = how.fresh if fresh is None else fresh
        check_hub_limits(content, spec.layout.destination)
        room = SendingRoom(free_bytes, workers, self.limit.asked_for)
        with open_store(spec.layout, how, content, room, books, share) as at:
            options = RunOptions(
                workers,
                self.limit.bytes,
                fresh=fresh,
                update=how.update,
                replace=at.store.staged and (how.hub.replace or fresh),
                split=how.hub.split if at.store.staged else None,
                config=how.hub.config,
                card=at.card,
                manifest_name=at.manifest_name,
                share=share,
                executor=executor,
            )
            run = Run(content, at.store, books.ledger, options, books.progress, books.stop)
            receipts = run.run()
        built = _built(spec, receipts, content.rows, run.written)
        built = replace(built, files=content.files, left_out=content.left_out, proved=run.proved)
        if not isinstance(spec.layout.place, Path):
            built = replace(built, sent_bytes=run.sent_bytes)
        if isinstance(at.store, HubStore):
            hub = at.store
            built = replace(built, commits=hub.commits, visibility=hub.visibility, pull_request=hub.pull)
        return built

    def _room(self) -> tuple[int, int]:
        """How many shards are on their way at a time, and what the limit leaves beside what they take themselves."""
        forecast = self.spec.forecast
        if forecast is not None:
            return forecast.workers, self.limit.bytes - forecast.total
        workers = 1 if self.spec.layout.apart else min(usable_cores() + 1, _MOST_SENDERS)
        return workers, max(self.limit.bytes - tree_bytes(), 0)


class _Computing:
    """A run of a job with a step: the books are open, and this machine's alone."""

    def __init__(self, job: Job, source: RowSource, place: Workplace, books: Books) -> None:
        assert job.spec.step is not None
        assert job.spec.output is not None
        self.job, self.spec, self.layout, self.how = job, job.spec, job.spec.layout, job.spec.how
        self.source, self.step, self.output = source, job.spec.step, job.spec.output
        self.place, self.books = place, books

    def run(self) -> Computed:
        wanted = Wanted(self.spec.fingerprint, self.spec.facts, self.how.fresh, self.how.keep_done)
        if self._is_done(wanted):
            self.layout.clear()  # of a run that was killed at its very end
            return Computed(self._as_it_is(self.books.ledger), kept=self._kept(self.books.ledger))
        self.layout.refuse_strangers(self.books.ledger, self.how.fresh)
        executor, carrier = self._way_there()
        units = open_units(self.layout.units, wanted, self.books.ledger)
        work = self.layout.work(wanted.fingerprint, wanted.fresh)
        try:
            outcome = self._make(units, carrier)
            finished = self._finish(outcome, work)
            done = self._deliver(units, outcome, finished, executor)
        finally:
            units.close()
        self.layout.clear()
        return done

    def _is_done(self, wanted: Wanted) -> bool:
        """Whether an earlier run has done all of it, and it is still there. The destination knows better than this
        machine, and another job's dataset there is refused."""
        ledger = self.books.ledger
        there = None if self.layout.apart else published(self.layout.place, self.how.hub, self.books)
        if there is not None:
            staged = isinstance(self.layout.place, HubAddress)
            agree_with_published(there, wanted, ledger, staged=staged)
        if self.how.fresh or ledger.job is None or ledger.job.fingerprint != wanted.fingerprint or not ledger.done:
            return False
        return self.layout.holds(ledger, self.how.access, self.books.progress)

    def _way_there(self) -> tuple[Executor | None, Carrier | None]:
        """Whether shards can be brought, and within the limit: before hours of work too.

        From here alone, there is nothing for other machines to try.
        """
        to, how = self.layout.destination, self.how
        executor = None
        if not isinstance(to, Path) and not self.layout.apart:
            limit_bytes = self.spec.limit.bytes
            executor = self.place.executor(self.layout.units, to, how.hub, limit_bytes, how.workers)
        carrier = reachable(self.layout.place, how.hub, self.books)
        return executor, None if self.layout.apart else carrier

    def _make(self, units: Ledger, carrier: Carrier | None) -> Outcome:
        """A model takes all cores of a machine by itself."""
        model = self.spec.verb == "embed"
        options = ComputeOptions(
            self.spec.limit.bytes,
            self.how.workers or (1 if model and self.how.scaling.engine == "local" else None),
            self.how.on_error,
            self.step.batch_rows or 1,
            self.spec.label or self.spec.verb,
            whole_node=model,
        )
        make = self.place.compute(carrier)
        folder, books = self.layout.units, self.books
        executor = make(self.source, self.step, self.output.writing, units, folder, options, books.progress, books.stop)
        return executor.run()

    def _finish(self, outcome: Outcome, work: Path) -> Finished:
        limit_bytes, receipts = self.spec.limit.bytes, outcome.receipts
        self.books.progress.start("finish", sum(receipt.size for receipt in receipts), 0, limit_bytes)
        watched = _Watched(self.books.progress, self.books.stop)
        units = Units(self.layout.units, receipts, limit_bytes, self.source.schema, work)
        finished = self.output.finish(units, self.how.hub.folder, watched)
        outcome.peak_bytes = max(outcome.peak_bytes, watched.peak_bytes)
        return finished

    def _deliver(self, units: Ledger, outcome: Outcome, finished: Finished, executor: Executor | None) -> Computed:
        if isinstance(self.layout, CacheLayout):
            keep_in_place(self.layout.units, outcome.receipts, finished.made.values(), units)
            return Computed(self._as_it_is(units), outcome, kept=self._kept(units))
        ledger, layout = self.books.ledger, self.layout
        watched = _Watched(self.books.progress, self.books.stop)
        write = functools.partial(write_bad_rows, layout.units)
        quarantine = layout.keep_bad_rows(write, self.how.fresh, watched)
        here = isinstance(layout.place, Path)
        content = ComputedContent(self.spec.facts, finished.card, finished.made, here, layout.apart)
        # Whether another job's output may go was settled when this one began.
        another = ledger.job is not None and ledger.job.fingerprint != self.spec.fingerprint
        built = self.job._bring(content, self.books, _ALONE, executor, fresh=self.how.fresh or another)
        return Computed(built, outcome, quarantine, finished.counts)

    def _as_it_is(self, ledger: Ledger) -> Built:
        """What finished receipts say."""
        receipts = list(ledger.receipts.values())
        return _built(self.spec, receipts, rows_of([receipt.rows for receipt in receipts], self.layout.apart))

    def _kept(self, ledger: Ledger) -> Kept | None:
        if not isinstance(self.output, CachedRows):
            return None
        return read_kept(self.layout.units, ledger, self.output.empty)


def _built(spec: Spec, receipts: Sequence[Receipt], rows: int, written: int = 0) -> Built:
    return Built(
        destination=str(spec.layout.destination),
        rows=rows,
        files=0,
        bytes=sum(receipt.size for receipt in receipts),
        shards=len(receipts),
        written=written,
        kept=len(receipts) - written,
        left_out=(),
    )


def _sight(files: FileSet) -> Sight:
    """What every node of a cluster has to see of the source."""
    return Sight(files=sample_of(files))


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
