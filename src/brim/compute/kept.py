"""A job whose output is a cache: Arrow files, one for each unit, that are read where they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from brim.compute.books import Wanted, open_units
from brim.compute.computation import Computation
from brim.compute.executor import ComputeOptions
from brim.compute.finish import with_features
from brim.compute.made import make_shards, settle
from brim.compute.outfile import read_schema
from brim.compute.setup import Writing
from brim.compute.step import Step
from brim.durable import failures, rename
from brim.engine.ledger import Ledger, Receipt
from brim.engine.lock import locked
from brim.engine.stop import stoppable
from brim.progress import Progress
from brim.sources.rows.unit import RowSource


@dataclass(frozen=True, slots=True)
class Kept:
    """The files of a finished job, in order, all of one schema."""

    files: Sequence[Path]
    schema: pa.Schema
    fingerprint: str


def compute_kept(
    folder: Path, source: RowSource, step: Step, writing: Writing, wanted: Wanted, options: ComputeOptions,
    progress: Progress, empty_schema: Callable[[bool], pa.Schema],
) -> Kept:  # fmt: skip
    """Do what is missing in `folder`, and nothing if it is all there.

    `empty_schema` gives the schema where no row comes out; it is told whether any went in.
    """
    with locked(folder), stoppable(folder / "stop") as stop, failures(folder):
        units = open_units(folder / "units", wanted, Ledger(folder))
        try:
            if not units.done or not _complete(folder / "units", units):
                computation = Computation(source, step, writing, units, folder / "units", options, progress, stop)
                outcome = computation.run()
                empty = empty_schema(bool(outcome.receipts))
                receipts = _settled(folder / "units", outcome.receipts, writing, empty, units, progress)
                units.finish(receipts)
            receipts = [units.receipts[name] for name in sorted(units.receipts)]
            files = [folder / "units" / receipt.name for receipt in receipts if receipt.rows]
            schema = read_schema(files[0], "arrow") if files else empty_schema(bool(receipts))
            return Kept(files, schema, wanted.fingerprint)
        finally:
            units.close()
            progress.finish()


def _complete(folder: Path, units: Ledger) -> bool:
    """Whether every file is there with its size."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    return all(sizes.get(receipt.name) == receipt.size for receipt in units.receipts.values())


def _settled(
    folder: Path, receipts: Sequence[Receipt], writing: Writing, empty: pa.Schema, units: Ledger, progress: Progress
) -> list[Receipt]:
    """All files with one schema: those that differ are written again, and take the place of what they were."""
    schema = with_features(settle(folder, receipts, "arrow", empty))
    made = {one.path.name: one for one in make_shards(folder, receipts, schema, writing, "", progress.advance)}
    settled = []
    for receipt in receipts:
        one = made.get(receipt.name)
        if one is not None and one.path.parent != folder:
            units.forget(receipt.name)  # before its file becomes another one
            rename(one.path, folder / receipt.name)
            receipt = Receipt(
                receipt.name, "", one.rows, one.size, one.sha256, receipt.key, receipt.mtimes, receipt.job
            )
            units.add(receipt)
        settled.append(receipt)
    shutil.rmtree(folder / "made", ignore_errors=True)
    return settled
