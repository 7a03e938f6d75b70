"""A computed job: a source, a step and a destination. Run it again after anything, and it does what is missing."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from brim.buckets.bucket_address import Access, BucketAddress
from brim.choices import at_least, one_of
from brim.errors import DamageFound, InputError
from brim.jobs.bring import refuse_strangers
from brim.jobs.content import ComputedContent
from brim.jobs.open_store import (
    Built,
    Delivery,
    at_destination,
    check_hub_options,
    deliver,
    reachable,
    state_of,
    waited_for,
)
from brim.jobs.units import Wanted, agree_with_bucket, open_units, refuse_both, refuse_rows
from brim.jobs.verify import verify
from brim.memory.limit import Limit, effective_limit, usable_cores
from brim.memory.meter import process_bytes, tree_bytes
from brim.outputs.output import Finisher, Units, write_bad_rows
from brim.plans.fingerprint import digest_json
from brim.progress import Progress, Silent
from brim.rows.unit import RowSource
from brim.schedule.messages import OnError
from brim.schedule.scheduler import Executor, Scaling
from brim.schedule.unit_work import ComputeOptions, Outcome
from brim.schedule.workplace import Workplace, workplace
from brim.state.ledger import Ledger
from brim.state.stop import Stop
from brim.steps.step import Step
from brim.stores.destination import QUARANTINE, UNITS, Destination, new_destination, taken_by_dataset
from brim.stores.folder_store import FolderStore
from brim.stores.hub_options import HubOptions
from brim.stores.store import Carrier

_VERSION = 1  # raise it when the same job would give other rows or bytes
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class JobOptions:
    """How to run, apart from what."""

    memory: str | int | float | None = None
    workers: int | None = None
    on_error: OnError = "stop"
    fresh: bool = False
    keep_done: bool = False  # a changed function continues where the earlier one ended
    state: str | None = None
    stop_file: str | None = None
    hub: HubOptions = field(default_factory=HubOptions)
    access: Access = field(default_factory=Access)  # to the bucket that is the destination
    scaling: Scaling = field(default_factory=Scaling)

    def __post_init__(self) -> None:
        one_of("on-error", self.on_error, get_args(OnError))
        at_least("workers", self.workers, 1)
        refuse_both(self.fresh, self.keep_done)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a job did."""

    built: Built
    outcome: Outcome
    quarantine: Path | str | None = None  # an address, where it is beside a file in a bucket
    counts: Mapping[str, int] = field(default_factory=dict)


def check_applies(what: str, options: JobOptions, destination: Destination) -> None:
    """Options that have no meaning for this verb or destination are an error, not silence."""
    check_hub_options(options.hub, destination)
    if options.keep_done and what != "map":
        raise InputError(f"--keep-done is for a function of yours that has changed, and {what} has none.")


class ComputedJob:
    """`what` is the verb: map, tokenize, embed."""

    def __init__(
        self,
        what: str,
        source: RowSource,
        step: Step,
        finisher: Finisher,
        destination: str | os.PathLike[str],
        options: JobOptions,
    ) -> None:
        self.what, self.source, self.step, self.finisher, self.options = what, source, step, finisher, options
        self.destination: Destination = new_destination(destination, options.access)
        check_applies(what, options, self.destination)
        refuse_rows(self.destination, source, taken_by_dataset(self.destination, options.hub.folder))
        self.limit: Limit = effective_limit(options.memory)

    @cached_property
    def facts(self) -> dict[str, Any]:
        return {
            "kind": self.what,
            "version": _VERSION,
            "source": self.source.facts,
            "step": self.step.facts,
            "output": self.finisher.facts | {"on_error": self.options.on_error},
        }

    @cached_property
    def fingerprint(self) -> str:
        return digest_json(self.facts)

    def run(self, progress: Progress | None = None) -> Computed:
        progress, options = progress or Silent(), self.options
        state = state_of(self.destination, options.state, options.hub)
        wanted = Wanted(self.fingerprint, self.facts, options.fresh, options.keep_done)
        with (
            workplace(options.scaling) as place,
            at_destination(self.destination, state, options.stop_file, progress, fresh=options.fresh) as (ledger, stop),
        ):
            folder = state / UNITS
            if isinstance(self.destination, BucketAddress):
                with waited_for(self.destination, progress, stop):
                    agree_with_bucket(self.destination, wanted, ledger)
            if not options.fresh and self._is_there(ledger, progress):
                shutil.rmtree(folder, ignore_errors=True)  # a run that was killed at its very end
                return Computed(self._as_it_was(ledger), Outcome())
            if isinstance(self.destination, Path) and ledger.job is None:  # before hours of work, not after
                refuse_strangers(list(FolderStore(self.destination).shards()), staged=False)
            # Whether shards can be brought, and within the limit: before hours of work too.
            executor = None
            if not isinstance(self.destination, Path):
                executor = place.executor(folder, self.destination, options.hub, self.limit.bytes, options.workers)
            carrier = reachable(self.destination, options.hub, progress, stop)
            units = open_units(folder, wanted, ledger)
            try:
                done = self._run(place, carrier, executor, ledger, units, folder, progress, stop)
            finally:
                units.close()
            shutil.rmtree(folder)
            return done

    def _is_there(self, ledger: Ledger, progress: Progress) -> bool:
        """Whether an earlier run has done all of it, and it is still there."""
        if ledger.job is None or ledger.job.fingerprint != self.fingerprint or not ledger.done:
            return False
        if isinstance(self.destination, Path):
            return all(FolderStore(self.destination).holds(receipt.piece) for receipt in ledger.receipts.values())
        try:
            verify(str(self.destination), endpoint_url=self.options.access.endpoint, progress=progress)
        except DamageFound:
            return False
        return True

    def _as_it_was(self, ledger: Ledger) -> Built:
        receipts = ledger.receipts.values()
        return Built(
            destination=str(self.destination),
            rows=sum(receipt.rows for receipt in receipts),
            files=0,
            bytes=sum(receipt.size for receipt in receipts),
            shards=len(receipts),
            written=0,
            kept=len(receipts),
            left_out=(),
        )

    def _run(
        self,
        place: Workplace,
        carrier: Carrier | None,
        executor: Executor | None,
        ledger: Ledger,
        units: Ledger,
        folder: Path,
        progress: Progress,
        stop: Stop,
    ) -> Computed:
        options = ComputeOptions(
            self.limit.bytes, self.options.workers, self.options.on_error, self.step.batch_rows or 1, self.what,
            whole_node=self.what == "embed",
        )  # fmt: skip
        writing = self.finisher.writing
        outcome = place.compute(carrier)(self.source, self.step, writing, units, folder, options, progress, stop).run()
        total = sum(receipt.size for receipt in outcome.receipts)
        progress.start("finish", total, 0, self.limit.bytes)
        what = Units(folder, outcome.receipts, self.limit.bytes, self.source.schema)
        watched = _Watched(progress, stop)
        finished = self.finisher.finish(what, self.options.hub.folder, watched)
        outcome.peak_bytes = max(outcome.peak_bytes, watched.peak_bytes)
        content = ComputedContent(self.facts, finished.card, finished.made, linked=isinstance(self.destination, Path))
        delivery = Delivery(
            self.limit,
            min(usable_cores() + 1, 4),
            max(self.limit.bytes - tree_bytes(), 0),
            # Whether another job's output may go was settled when this one began.
            fresh=self.options.fresh or (ledger.job is not None and ledger.job.fingerprint != self.fingerprint),
            hub=self.options.hub,
            executor=executor,
        )
        quarantine = self._quarantine(folder)  # first: once all is delivered, nothing is done again
        built = deliver(content, self.destination, delivery, ledger, progress, stop)
        return Computed(built, outcome, quarantine, finished.counts)

    def _quarantine(self, folder: Path) -> Path | None:
        """Rows that the step could not do, in one file beside the dataset."""
        home = self.destination if isinstance(self.destination, Path) else folder.parent
        target = home / QUARANTINE
        target.with_name(f".{target.name}.tmp").unlink(missing_ok=True)  # of a run that was killed
        if write_bad_rows(folder, target):
            return target
        if self.options.fresh:
            target.unlink(missing_ok=True)  # of the rows that were there before
        return None


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
