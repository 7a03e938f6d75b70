"""A computed job (map, tokenize, embed) done in parts on any number of machines, and put together at the end.

A plan of such a job is a small file: the words that the job is made of again, what decides its result, how many units
it has, and the types of its first batch, which all parts take. A part computes its units into `PLAN.parts/`; finishing
takes over all of them and goes on as a run on one machine does, with the same result byte for byte.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from brim.compute.steps.step import Settles
from brim.errors import InputError, UserFunctionError
from brim.execution.unit_receipts import UnitFiles, UnitStats
from brim.jobs.compute import Computing
from brim.jobs.content import PlanContent, computed_changes
from brim.jobs.job import Job, MapResult, workplace
from brim.jobs.open_store import Books
from brim.jobs.plan_storage import (
    JOB_PLAN,
    Part,
    PartReceipts,
    PlanPlace,
    check_plan_place,
    listed,
    open_place,
    parse_part,
    save_to,
)
from brim.jobs.saved_build import PartResult, PlanStatus
from brim.jobs.spec import called_with
from brim.jobs.upload_shards import Share
from brim.memory.limit import Limit
from brim.plans.saved_plan import PLAN_MAGIC
from brim.progress import Progress
from brim.records import dataclass
from brim.state.atomic_files import failures, sha256_of, write_whole
from brim.state.ledger import Ledger, Receipt, SourceRecord
from brim.state.retry import interrupted_by
from brim.state.stop import stoppable
from brim.storage.location import Access
from brim.stores.bucket_store import bad_rows_of

_VERSION = 1
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What is in the file. `words` are plain values, from which whoever opens it makes the job again."""

    verb: str
    words: dict[str, Any]
    fingerprint: str
    facts: dict[str, Any]
    units: int
    types: str = ""


def save_job_plan(
    path: str | os.PathLike[str], job: Job, words: dict[str, Any], progress: Progress | None, access: Access | None
) -> None:
    """Cut the units of a job, settle its types with the first batch, and write down what parts need to know."""
    check_plan_place(path)
    spec = job.spec
    assert spec.step is not None
    assert not isinstance(spec.source, PlanContent)
    units = sum(1 for _ in spec.source.units(spec.step.batch_rows or 1, indices=spec.step.indices))
    types = _settled(job, progress or Progress()) if isinstance(spec.step, Settles) and units else ""
    plan = JobPlan(spec.verb, words, spec.fingerprint, spec.facts, units, types)
    text = json.dumps({"kind": JOB_PLAN, "version": _VERSION, **asdict(plan)}, indent=1)
    save_to(path, lambda file: _write(file, text), access)


def _write(path: Path, text: str) -> None:
    with failures(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
        os.chmod(path, 0o600)


def _settled(job: Job, progress: Progress) -> str:
    """The types of the first batch, from the first unit: one that fails shows it before a hundred machines start."""
    with tempfile.TemporaryDirectory(prefix="brim-types-") as folder:
        units = Path(folder) / "units"
        # Units go to the parts in turn: with so many parts, the first has one unit.
        with _computing(job, Path(folder), progress) as computing:
            computing.part(UnitFiles(units), 0, 1 << 62, "")
        return str(Ledger(units).recall("types") or "")


@contextmanager
def _computing(job: Job, folder: Path, progress: Progress) -> Iterator[Computing]:
    spec = job.spec
    assert not isinstance(spec.source, PlanContent)
    stop_files = [folder / "stop", *([Path(spec.how.stop_file)] if spec.how.stop_file else [])]
    with (
        workplace(spec.how) as cluster,
        stoppable(*stop_files, asked=spec.how.stop) as stop,
        interrupted_by(stop.check),
        failures(folder),
    ):
        books = Books(Ledger(folder / "none"), stop, progress)
        try:
            yield Computing(job, spec.source, cluster, books)
        finally:
            progress.finish()


def load_job_plan(place: PlanPlace) -> JobPlan:
    """Read a saved plan of map, tokenize or embed."""
    with place.path.open("rb") as file:
        if file.read(len(PLAN_MAGIC)) == PLAN_MAGIC:
            raise InputError(
                f"{place.shown!r} is a plan of brim build.", hint=f"Run `brim build --plan {shlex.quote(place.shown)}`."
            )
    try:
        said = json.loads(place.path.read_text())
        if said.pop("kind") != JOB_PLAN or said.pop("version") != _VERSION:
            raise ValueError("of another version")
        return JobPlan(**said)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{place.shown!r} is not a plan that this version of brim can read.",
            hint="Save it again with this version.",
        ) from error


class _PartFiles(UnitFiles):
    """Unit files of a part, stored where every machine finds them."""

    def __init__(self, receipts: PartReceipts, part: Part, folder: Path) -> None:
        super().__init__(folder)
        self._receipts, self._part = receipts, part
        self._holder = receipts.holder(part, folder)

    def has(self, receipt: Receipt) -> bool:
        return super().has(receipt) if self._holder is None else self._holder(receipt)

    def store(self, name: str) -> None:
        self._receipts.keep(self._part, self.folder, name)


# A plan names its function by what is in it, so another one is another plan.
_MEND = "Mend it and save the plan again; or with --on-error=skip or --on-error=quarantine, to leave such rows out."


class SavedComputation:
    """A plan of a computed job in a file: do a part of it, finish it, or do all that is missing.

    `job_of` makes the job of the plan's words, as this machine works on it; `held` tells what the caller holds, which
    is beside the limit and may be more at each call.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        job_of: Callable[[JobPlan], Job],
        access: Access | None,
        held: Callable[[], int],
    ) -> None:
        self.place = open_place(path, access or Access())
        self.plan = load_job_plan(self.place)
        self.receipts, self._access, self._held = self.place.receipts, access, held
        self.job = job_of(self.plan)
        if self.job.spec.fingerprint != self.plan.fingerprint:
            changes = computed_changes(self.plan.facts, self.job.spec.facts)
            raise InputError(
                f"This job differs from the planned one: {'; '.join(changes)}.",
                hint="Use the same files, function and versions on every machine, or save the plan again.",
            )

    @property
    def limit(self) -> Limit:
        return self.job.limit

    @property
    def destination(self) -> str:
        return str(self.job.spec.layout.destination)

    def command(self, *words: str) -> str:
        endpoint = self._access.endpoint if self._access else None
        words += ("--endpoint-url", endpoint) if endpoint else ()
        return shlex.join(["brim", self.plan.verb, "--plan", self.place.shown, *words])

    def part(self, part: Part | str, progress: Progress | None = None) -> PartResult:
        """Compute what is missing of a part: "3/100" is the third of a hundred."""
        part, job = parse_part(part) if isinstance(part, str) else part, self._called()
        with self.receipts.part(part) as folder:
            self.receipts.check(part, Ledger(folder), self.plan.fingerprint)
            try:
                with _computing(job, folder, progress or Progress()) as computing:
                    files = _PartFiles(self.receipts, part, folder)
                    outcome = computing.part(files, part.number - 1, part.count, self.plan.types)
            except UserFunctionError as failed:
                failed.with_hint(_MEND)
                raise
        return self._done(part, outcome)

    def _done(self, part: Part, outcome: UnitStats) -> PartResult:
        size, units = sum(receipt.size for receipt in outcome.receipts), len(outcome.receipts)
        return PartResult(
            part.number,
            part.count,
            self.destination,
            bytes=size,
            shards=units,
            written=outcome.computed,
            kept=units - outcome.computed,
            sent_bytes=0,
            next=self.command("--finish"),
            of_units=True,
        )

    def finish(self, progress: Progress | None = None) -> MapResult:
        """Put together what all parts computed, and publish it. InputError that names the parts which are missing."""
        return self._whole(progress, only_publish=True)

    def run(self, progress: Progress | None = None) -> MapResult:
        """Compute whatever is missing, of all parts, and publish."""
        return self._whole(progress, only_publish=False)

    def _whole(self, progress: Progress | None, only_publish: bool) -> MapResult:
        job = self._called()
        with self.receipts.alone():
            if only_publish:
                self._refuse(self._lacking())
            result = job.run(progress, Share(units=self._take_over))
        assert isinstance(result, MapResult)
        return result

    def _called(self) -> Job:
        """The job as it is called now."""
        return Job(called_with(self.job.spec, self._held()))

    def _lacking(self) -> list[int]:
        """Units that no part has done; none if the whole was finished before."""
        here = Ledger(self.job.spec.layout.books)
        if here.done and here.job is not None and here.job.fingerprint == self.plan.fingerprint:
            return []
        done = {_number(name) for name in self.receipts.all(self.plan.fingerprint) if Path(name).stem.isdecimal()}
        return [number for number in range(self.plan.units) if number not in done]

    def _take_over(self, units: Ledger) -> None:
        """The files and receipts of all parts: a file is here before its receipt."""
        folder = self.job.spec.layout.units
        if self.plan.types and units.recall("types") is None:
            units.remember("types", self.plan.types)
        stamps = set()
        for part, ledger in self.receipts.ledgers():
            stamps.add("" if ledger.source is None else ledger.source.stamp)
            for receipt in ledger.receipts.values():
                here = folder / receipt.name
                taken = units.receipts.get(receipt.name) == receipt and here.exists()
                if not taken or sha256_of(here, lambda _: None) != receipt.sha256:
                    self._take(part, ledger, receipt, units, folder)
        if len(stamps) == 1 and units.source is None:  # with other dates here, the content is compared
            units.record_source(SourceRecord(stamps.pop()))

    def _take(self, part: Part, ledger: Ledger, receipt: Receipt, units: Ledger, folder: Path) -> None:
        self.receipts.bring(part, receipt.name, folder, receipt.sha256)
        if ledger.recall(f"bad rows {receipt.name}") and self.job.spec.how.on_error == "quarantine":
            self.receipts.bring(part, bad_rows_of(receipt.name), folder)
        for note in (f"bad rows {receipt.name}", f"encoder {receipt.name}"):
            if (said := ledger.recall(note)) is not None:
                units.remember(note, said)
        units.add(receipt)

    def _refuse(self, lacking: list[int]) -> None:
        if not lacking:
            return
        count = self.receipts.count()
        if count is None:
            raise InputError(
                "No part of this plan has run yet.",
                hint=f"Run {self.command('--part', '1/N')} and so on; without --part or --finish, all runs here.",
            )
        parts = sorted({number % count + 1 for number in lacking})
        commands = [self.command("--part", f"{number}/{count}") for number in parts[:_SHOWN]]
        raise InputError(
            f"{len(lacking):,} of {self.plan.units:,} units are missing. Missing or unfinished: "
            f"part{'s' if len(parts) > 1 else ''} {listed(parts)} of {count}.",
            hint=f"Run {'; '.join(commands)}{'; and so on' if len(parts) > _SHOWN else ''}; then "
            f"{self.command('--finish')}.",
            parts=parts,
            count=count,
        )

    @property
    def status(self) -> PlanStatus:
        """How far it is; its shards are units."""
        count, lacking = self.receipts.count(), self._lacking()
        here = Ledger(self.job.spec.layout.books)
        finished = here.job is not None and here.job.fingerprint == self.plan.fingerprint and here.done
        begun = {part.number for part, ledger in self.receipts.ledgers() if ledger.receipts}
        missing = [] if count is None else sorted({number % count + 1 for number in lacking})
        return PlanStatus(
            path=self.place.shown,
            destination=self.destination,
            shards=self.plan.units,
            done=self.plan.units - len(lacking),
            parts=count,
            missing_parts=[number for number in missing if number not in begun],
            unfinished_parts=[number for number in missing if number in begun],
            finished=finished,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """The job and how far it is, for programs."""
        told = {"verb": self.plan.verb, "units": self.plan.units, "fingerprint": self.plan.fingerprint}
        return {**told, "saved": asdict(self.status)}

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The job and how far it is, for people."""
        what = [("job", f"brim {self.plan.verb} {self.plan.words['source']}"), ("units", f"{self.plan.units:,}")]
        return [*what, *self.status.lines(self.command, "units")]


def _number(unit: str) -> int:
    return int(Path(unit).stem)
