"""An embedding job that ends in one file (or one for each tensor) instead of a dataset.

Its books lie beside the file, in a hidden folder on the same disk: `.NAME.brim`. When it is done, a small ledger stays
there, so that the same command knows that there is nothing to do. For a file in a bucket they lie with the user's
state; the file is made there, sent, and removed.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from brim.buckets.bucket_address import BucketAddress
from brim.buckets.bucket_errors import explained
from brim.buckets.listing import stat_object
from brim.buckets.send_object import delete_objects
from brim.errors import DestinationError
from brim.formats.splice import FileSplice
from brim.jobs.bring import versions
from brim.jobs.computed_job import Computed, JobOptions
from brim.jobs.open_store import Built, reachable
from brim.jobs.units import Wanted, open_units
from brim.memory.limit import Limit, effective_limit
from brim.outputs.rows_file import Writing
from brim.outputs.vector_output import check_target, finish_vectors
from brim.plans.fingerprint import digest_json
from brim.progress import Progress, Silent
from brim.rows.unit import RowSource
from brim.schedule.unit_work import ComputeOptions, Outcome
from brim.schedule.workplace import Workplace, workplace
from brim.state.durable import failures, sha256_of
from brim.state.ledger import JobRecord, Ledger, Receipt
from brim.state.lock import locked
from brim.state.stop import Stop, stoppable
from brim.steps.embed_step import EmbedStep
from brim.stores.bucket_store import BucketCarrier
from brim.stores.destination import parse_destination, state_folder

_VERSION = 1  # raise it when the same job would give other bytes


class VectorFileJob:
    """Rows through the model, and their vectors to `target`."""

    def __init__(
        self, source: RowSource, step: EmbedStep, destination: str | os.PathLike[str], options: JobOptions
    ) -> None:
        where = parse_destination(destination, options.access)
        self.bucket = where if isinstance(where, BucketAddress) else None
        if self.bucket is not None:
            self.state = state_folder(self.bucket, options.state)
            self.target = self.state / "made" / Path(self.bucket.prefix).name
        else:
            self.target = Path(os.path.abspath(destination))
            self.state = Path(options.state or self.target.with_name(f".{self.target.name}.brim"))
        check_target(self.target)
        self.source, self.step, self.options = source, step, options
        self.limit: Limit = effective_limit(options.memory)
        if self.target.is_dir():
            raise DestinationError(f"{str(destination)!r} is a folder.", hint="Give the name of a file.")

    @property
    def _beside(self) -> BucketAddress:
        """The place in the bucket that the file lies in."""
        assert self.bucket is not None
        return replace(self.bucket, prefix=self.bucket.prefix.rpartition("/")[0])

    @cached_property
    def facts(self) -> dict[str, Any]:
        output = {"file": self.target.suffix, "on_error": self.options.on_error}
        return {
            "kind": "embed",
            "version": _VERSION,
            "source": self.source.facts,
            "step": self.step.facts,
            "output": output,
        }

    def run(self, progress: Progress | None = None) -> Computed:
        progress, options = progress or Silent(), self.options
        state = self.state
        with failures(self.target.parent):
            state.mkdir(parents=True, exist_ok=True)
            if self.bucket is not None:
                self.target.parent.mkdir(exist_ok=True)
        stop_files = (state / "stop", *([Path(options.stop_file)] if options.stop_file else []))
        with (
            workplace(options.scaling) as place,
            locked(state),
            stoppable(*stop_files) as stop,
            failures(self.target.parent),
        ):
            ledger = Ledger(state)
            try:
                return self._run(place, ledger, state, progress, stop)
            finally:
                ledger.close()
                progress.finish()

    def _run(self, place: Workplace, ledger: Ledger, state: Path, progress: Progress, stop: Stop) -> Computed:
        fingerprint = digest_json(self.facts)
        known = ledger.job is not None and ledger.job.fingerprint == fingerprint
        if known and ledger.done and not self.options.fresh and self._is_there(ledger):
            return Computed(self._built(list(ledger.receipts.values()), written=0), Outcome())
        if self._exists() and ledger.job is None and not self.options.fresh:
            raise DestinationError(f"{self} exists, and brim did not write it.", hint="--fresh replaces it at the end.")
        if self.bucket is not None:
            reachable(self._beside, self.options.hub, progress, stop)
        folder = state / "units"
        wanted = Wanted(fingerprint, self.facts, self.options.fresh, self.options.keep_done)
        units = open_units(folder, wanted, ledger)
        try:
            workers = self.options.workers or (1 if self.options.scaling.engine == "local" else None)
            batch_rows = self.step.batch_rows or 1
            compute = ComputeOptions(
                self.limit.bytes, workers, self.options.on_error, batch_rows, "embed", whole_node=True
            )
            writing = Writing("arrow", self.step.batch_rows or 1000)
            outcome = place.compute()(self.source, self.step, writing, units, folder, compute, progress, stop).run()
            receipts = [receipt for receipt in outcome.receipts if receipt.rows]
            progress.start("finish", sum(receipt.size for receipt in receipts), 0, self.limit.bytes)
            finished = finish_vectors(
                [folder / receipt.name for receipt in receipts],
                self.target,
                state / "work",
                rows=[receipt.rows for receipt in receipts],
            )
        finally:
            units.close()
        vectors_last = reversed(finished.files)
        made = [self._receipt(path, finished.rows, fingerprint, progress, stop) for path in vectors_last]
        if self.bucket is not None:
            gone = ledger.receipts.keys() - {receipt.name for receipt in made}
            with explained(self.bucket):
                delete_objects(self.bucket, [self._beside.key(name) for name in sorted(gone)])
        ledger.begin(JobRecord(fingerprint, self.facts, versions()))
        ledger.finish(made)
        for left in (folder, state / "work", *([self.target.parent] if self.bucket else [])):
            shutil.rmtree(left, ignore_errors=True)
        return Computed(self._built(made, written=len(made)), outcome, counts={"rows": finished.rows})

    def __str__(self) -> str:
        return str(self.bucket or self.target)

    def _exists(self) -> bool:
        return self.target.exists() if self.bucket is None else stat_object(self.bucket, reading=False) is not None

    def _receipt(self, path: Path, rows: int, fingerprint: str, progress: Progress, stop: Stop) -> Receipt:
        """A file is where it belongs: hashed there, or while it was sent."""
        size, etag = path.stat().st_size, ""
        if self.bucket is None:
            sha256 = sha256_of(path, progress.advance)
        else:
            carrier = BucketCarrier(self._beside)
            carrier.drop(path.name)  # what a killed run began to send
            with FileSplice(path) as splice:
                put = carrier.put(path.name, splice, None, _Sent(progress, stop))
            sha256, etag = put.sha256, put.etag
        return Receipt(path.name, "", rows, size, sha256, fingerprint, "", fingerprint[:16], etag=etag)

    def _is_there(self, ledger: Ledger) -> bool:
        if self.bucket is not None:
            found = [(stat_object(self._beside.below(n), reading=False), r) for n, r in ledger.receipts.items()]
            return bool(found) and all(there and (there.st_size, there.etag) == (r.size, r.etag) for there, r in found)
        paths = [(self.target.parent / name, receipt.size) for name, receipt in ledger.receipts.items()]
        return bool(paths) and all(path.is_file() and path.stat().st_size == size for path, size in paths)

    def _built(self, receipts: list[Receipt], written: int) -> Built:
        return Built(
            destination=str(self),
            rows=max((receipt.rows for receipt in receipts), default=0),
            files=0,
            bytes=sum(receipt.size for receipt in receipts),
            shards=len(receipts),
            written=written,
            kept=len(receipts) - written,
            left_out=(),
        )


class _Sent:
    """What a file on its way tells: it can be stopped."""

    def __init__(self, progress: Progress, stop: Stop) -> None:
        self._progress, self._stop = progress, stop

    def hashed(self, size: int) -> None:
        self._stop.check()

    def sent(self, size: int) -> None:
        self._stop.check()
        self._progress.advance(size)
