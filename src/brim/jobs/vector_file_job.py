"""An embedding job that ends in one file (or one for each tensor) instead of a dataset.

Its books lie beside the file, in a hidden folder on the same disk: `.NAME.brim`. When it is done, a small ledger stays
there, so that the same command knows that there is nothing to do. For a file in a bucket they lie with the user's
state; the file is made there, sent, and removed. Rows that are left out and shall be kept lie beside the file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from brim.jobs.computed_job import Computed, JobOptions, check_applies
from brim.jobs.open_store import Built, reachable
from brim.jobs.units import Wanted, open_units, refuse_rows
from brim.memory.limit import Limit, effective_limit
from brim.outputs.output import write_bad_rows
from brim.outputs.rows_file import Writing
from brim.outputs.vector_output import check_target, finish_vectors, quarantine_path, rows_path
from brim.plans.fingerprint import digest_json
from brim.progress import Progress, Silent
from brim.rows.unit import RowSource
from brim.schedule.unit_work import ComputeOptions, Outcome
from brim.schedule.workplace import Workplace, workplace
from brim.state.durable import failures, rename, sha256_of
from brim.state.ledger import JobRecord, Ledger, Receipt
from brim.state.lock import locked
from brim.state.stop import Stop, stoppable
from brim.steps.embed_step import EmbedStep
from brim.stores.bucket_store import BucketCarrier
from brim.stores.destination import Destination, Footprints, parse_destination, state_folder
from brim.stores.store import Put

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
            self.state = Path(options.state or self._hidden)
        check_target(self.target)
        check_applies("embed", options, where)
        self.source, self.step, self.options = source, step, options
        self.limit: Limit = effective_limit(options.memory)
        if self.target.is_dir():
            raise DestinationError(f"{str(destination)!r} is a folder.", hint="Give the name of a file.")
        refuse_rows(self.bucket or self.target, source, self._taken())

    @property
    def _hidden(self) -> Path:
        """Beside the file, on its disk."""
        return self.target.with_name(f".{self.target.name}.brim")

    @property
    def _work(self) -> Path:
        """Where the file is made: it gets its name by a rename, so not on the disk that --state may be on."""
        return (self.state if self.bucket is not None else self._hidden) / "work"

    def _taken(self) -> list[Destination]:
        """What the job writes."""
        files = [self.target, rows_path(self.target), quarantine_path(self.target)]
        if self.bucket is not None:
            return [self._beside.below(path.name) for path in files]
        return [*files, self._hidden]

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
        stop_files = (state / "stop", *([Path(options.stop_file)] if options.stop_file else []))
        with (
            workplace(options.scaling) as place,
            self._opened(),
            stoppable(*stop_files) as stop,
            failures(self.target.parent),
        ):
            ledger = Ledger(state)
            try:
                return self._run(place, ledger, state, progress, stop)
            finally:
                ledger.close()
                progress.finish()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """The folder of the books is there, and is this run's alone."""
        footprints = Footprints(None, self.state)
        with failures(self.target.parent):
            self.state.mkdir(parents=True, exist_ok=True)
        with locked(self.state), footprints.removed_if_refused():
            if self.bucket is not None:
                with failures(self.target.parent):
                    self.target.parent.mkdir(exist_ok=True)
            yield

    def _run(self, place: Workplace, ledger: Ledger, state: Path, progress: Progress, stop: Stop) -> Computed:
        fingerprint = digest_json(self.facts)
        known = ledger.job is not None and ledger.job.fingerprint == fingerprint
        if known and ledger.done and not self.options.fresh and self._is_there(ledger):
            self._clear()  # a run that was killed at its very end
            return Computed(self._built(list(ledger.receipts.values()), written=0), Outcome())
        if self._exists() and ledger.job is None and not self.options.fresh:
            raise DestinationError(f"{self} exists, and brim did not write it.", hint="--fresh replaces it at the end.")
        if self.bucket is not None:
            reachable(self._beside, self.options.hub, progress, stop)
        folder, work = state / "units", self._work / fingerprint[:16]
        if self.options.fresh or not work.exists():  # half a file of another job is not gone on with
            shutil.rmtree(self._work, ignore_errors=True)
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
            ledger.begin(
                JobRecord(fingerprint, self.facts, versions())
            )  # from here on, what has the name is this job's
            quarantine = self._quarantine(folder, work, progress, stop)
            finished = finish_vectors(
                [folder / receipt.name for receipt in receipts],
                self.target,
                work,
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
        ledger.finish(made)
        self._clear()
        return Computed(self._built(made, written=len(made)), outcome, quarantine, {"rows": finished.rows})

    def _clear(self) -> None:
        """What a finished job needs no more."""
        for left in (self.state / "units", self._work, *([self.target.parent] if self.bucket else [])):
            shutil.rmtree(left, ignore_errors=True)
        if self.bucket is None and self.state != self._hidden:
            with suppress(OSError):
                self._hidden.rmdir()  # the books are elsewhere

    def _quarantine(self, folder: Path, work: Path, progress: Progress, stop: Stop) -> Path | str | None:
        """Rows that the model could not do, before the vectors: once those are there, nothing is done again."""
        target = quarantine_path(self.target)
        work.mkdir(parents=True, exist_ok=True)
        kept = write_bad_rows(folder, work / "bad.parquet")
        if kept:
            rename(work / "bad.parquet", target)
        elif self.options.fresh:
            target.unlink(missing_ok=True)  # of the rows that were there before
        if self.bucket is None:
            return target if kept else None
        there = self._beside.below(target.name)
        if kept:
            self._send(target, progress, stop)
        elif self.options.fresh:
            with explained(self.bucket):
                delete_objects(self.bucket, [there.prefix])
        return str(there) if kept else None

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
            put = self._send(path, progress, stop)
            sha256, etag = put.sha256, put.etag
        return Receipt(path.name, "", rows, size, sha256, fingerprint, "", fingerprint[:16], etag=etag)

    def _send(self, path: Path, progress: Progress, stop: Stop) -> Put:
        carrier = BucketCarrier(self._beside)
        carrier.drop(path.name)  # what a killed run began to send
        with FileSplice(path) as splice:
            return carrier.put(path.name, splice, None, _Sent(progress, stop))

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
