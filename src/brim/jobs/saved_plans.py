"""Saved plans: done in parts on any number of machines, and published at the end.

A part uploads shards, or computes units into `PLAN.parts/`; it keeps receipts and publishes nothing. Finishing takes
over the receipts of all parts and publishes as a job on one machine does, with the same result byte for byte.

A plan of a build is an Arrow file with all rows. A plan of a computed job is a small JSON file: the options from which
the job is made again, its fingerprint, the number of its units, and the types of its first batch, which all parts use.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from brim.compute.steps.step import HasTypeInference
from brim.errors import InputError, SourceChangedError, UserFunctionError
from brim.execution.unit_receipts import UnitFiles
from brim.execution.unit_storage import bad_rows_name
from brim.jobs.destination import Destination, Run
from brim.jobs.destination_paths import dataset_paths
from brim.jobs.job import Job, connect
from brim.jobs.plan_storage import (
    JOB_PLAN,
    Part,
    PartReceipts,
    PlanPlace,
    check_plan_place,
    divide,
    open_place,
    parse_part,
    save_to,
)
from brim.jobs.preflight import ComputePlan, JobSettings, forecast_for, stop_files
from brim.jobs.publish_options import PublishOptions
from brim.jobs.reconcile import STAGED_S, Scope, is_content_of
from brim.jobs.results import BuildResult, MapResult, PartResult, PlanStatus, number_ranges
from brim.jobs.shard_set import PlannedShards, computed_changes
from brim.memory.limit import Limit, effective_limit
from brim.plans.cut_shards import Shard
from brim.plans.describe_plan import BuildForecast, plan_facts, plan_lines
from brim.plans.plan import Plan
from brim.plans.saved_plan import PLAN_MAGIC, Saved, load_plan, relocate_plan, understood
from brim.progress import Progress, Watch, given_or_silent
from brim.records import dataclass
from brim.state.atomic_files import failures, sha256_of, write_whole
from brim.state.ledger import STATE, Ledger, Receipt, SourceRecord, job_versions
from brim.state.retry import interrupted_by
from brim.state.stop import stoppable
from brim.storage.destination_address import parse_destination
from brim.storage.location import Access, Location
from brim.wording import Described

if TYPE_CHECKING:
    from brim.jobs.compute import ComputeRun

_VERSION = 1  # of plans of computed jobs
_SHOWN_PARTS = 3


R = TypeVar("R", bound=BuildResult)


class SavedPlan(Described, Generic[R]):
    """A plan in a file: do a part of it, finish it, or do everything that is missing. Its tasks are shards or units."""

    label_width = 14
    noun = "shards"

    def __init__(self, path: str | os.PathLike[str], access: Access) -> None:
        self.place: PlanPlace = open_place(path, access)
        self.receipts: PartReceipts = self.place.receipts
        self.watch: Watch = given_or_silent
        self._endpoint = access.endpoint

    # What differs between builds and computed jobs

    @property
    def _fingerprint(self) -> str:
        raise NotImplementedError

    @property
    def _ledger_dir(self) -> Path:
        raise NotImplementedError

    @property
    def _command(self) -> str:
        raise NotImplementedError

    @property
    def _count(self) -> int:
        """The number of tasks."""
        raise NotImplementedError

    def _do_part(self, part: Part, folder: Path, progress: Progress) -> PartResult:
        raise NotImplementedError

    def _do_all(self, progress: Progress, publish_only: bool) -> R:
        raise NotImplementedError

    def _missing(self, receipts: Iterable[str]) -> list[int]:
        """Return the numbers of the tasks without a receipt."""
        raise NotImplementedError

    def _parts_of(self, tasks: Sequence[int], count: int) -> list[int]:
        """Return the parts that these tasks belong to."""
        raise NotImplementedError

    # Common

    def command(self, *options: str) -> str:
        """Return the command that works on this plan with these options."""
        options += ("--endpoint-url", self._endpoint) if self._endpoint else ()
        return shlex.join(["brim", self._command, "--plan", self.place.shown, *options])

    def part(self, part: Part | str, progress: Progress | bool | None = None) -> PartResult:
        """Do the missing work of a part: "3/100" is the third of a hundred."""
        part = parse_part(part) if isinstance(part, str) else part
        watched = self.watch(progress)
        with self.receipts.part(part) as folder:
            self.receipts.check(part, Ledger(folder), self._fingerprint)
            return self._do_part(part, folder, watched)

    def finish(self, progress: Progress | bool | None = None) -> R:
        """Publish the results of all parts. InputError that names missing parts."""
        with self.receipts.locked():
            return self._do_all(self.watch(progress), publish_only=True)

    def run(self, progress: Progress | bool | None = None) -> R:
        """Do the missing work of all parts, and publish."""
        with self.receipts.locked():
            return self._do_all(self.watch(progress), publish_only=False)

    @property
    def status(self) -> PlanStatus:
        """The progress of the plan. For a computed job, its shards are units."""
        count, receipts = self.receipts.count(), self.receipts.all(self._fingerprint)
        ledger = Ledger(self._ledger_dir)
        is_finished = ledger.job is not None and ledger.job.fingerprint == self._fingerprint and ledger.is_finished
        missing_tasks = self._missing(receipts)
        missing = [] if count is None else self._parts_of(missing_tasks, count)
        is_missing = set(missing_tasks)
        started = {part.number for part, ledger in self.receipts.ledgers() if ledger.receipts}
        if count is not None and self.noun == "shards":
            started = set(self._parts_of([n for n in range(self._count) if n not in is_missing], count))
        return PlanStatus(
            path=self.place.shown,
            destination=str(self.destination),
            shards=self._count,
            done=self._count - len(missing_tasks),
            parts=count,
            missing_parts=[number for number in missing if number not in started],
            unfinished_parts=[number for number in missing if number in started],
            finished=is_finished,
        )

    @property
    def destination(self) -> Any:
        raise NotImplementedError

    def _refuse_missing(self, missing: Sequence[int], expired: str = "") -> None:
        """Raise InputError with the commands of the parts that have missing tasks, if there are any."""
        if not missing:
            return
        count = self.receipts.count()
        if count is None:
            raise InputError(
                "No part of this plan has run yet.",
                hint=f"Run {self.command('--part', '1/N')} and so on. To run all here, leave out --part and --finish.",
            )
        parts = self._parts_of(missing, count)
        commands = [self.command("--part", f"{number}/{count}") for number in parts[:_SHOWN_PARTS]]
        if len(parts) > _SHOWN_PARTS:
            commands.append("and so on")
        raise InputError(
            f"{len(missing):,} of {self._count:,} {self.noun} are missing{expired}. Missing or unfinished: "
            f"part{'s' if len(parts) > 1 else ''} {number_ranges(parts)} of {count}.",
            hint=f"Run {'; '.join(commands)}; then {self.command('--finish')}.",
            parts=parts,
            count=count,
        )


@dataclass(frozen=True, kw_only=True)
class SavedSettings(JobSettings):
    """How this machine works on a saved plan. `access` is to the object store of the plan.

    The plan decides the destination, how it is published, and whether it is an update.
    """

    root: str | None = None  # the folder of the source on this machine

    def check_options(self) -> None:
        if self.root is not None and "://" in self.root:
            raise InputError(f"With --plan, --root must be a folder of this machine, not {self.root!r}.")


class SavedBuild(SavedPlan[BuildResult]):
    """A saved plan of a build: do a part of it, finish it, or do all that is missing."""

    def __init__(self, path: str | os.PathLike[str], options: SavedSettings | None = None) -> None:
        self.options = options or SavedSettings()
        super().__init__(path, self.options.access)
        try:
            self.saved: Saved = load_plan(self.place.path)
            with understood(self.place.path, self.saved.versions):
                self.hub = PublishOptions.from_record(self.saved.job["hub"])
        except InputError as error:
            raise InputError(
                error.words[0].replace(str(self.place.path), self.place.shown), hint=error.words[1], **error.facts
            ) from error
        self.plan: Plan = self.saved.plan
        self._access = Access(self.saved.job.get("endpoint"))
        self._location = parse_destination(self.saved.job["destination"], self._access)
        self.limit: Limit = effective_limit(self.options.memory)
        self.forecast: BuildForecast = forecast_for(self._location, self.plan, self.limit, self.options.workers)
        self._paths = dataset_paths(self._location, self.options.state_dir, self.hub)

    @property
    def destination(self) -> Location:
        """The address of the destination."""
        return self._location

    @property
    def _fingerprint(self) -> str:
        return self.plan.fingerprint

    @property
    def _ledger_dir(self) -> Path:
        return self._paths.ledger_dir

    @property
    def _command(self) -> str:
        return "build"

    @property
    def _count(self) -> int:
        return len(self.plan.shards)

    @property
    def takes(self) -> dict[str, int]:
        """The memory that the forecast reports for this machine."""
        return dict.fromkeys(("low_bytes", "high_bytes"), self.forecast.total)

    @property
    def stop_file(self) -> Path:
        """A file that ends a run cleanly when it appears; of a part, only the user's own does in any case."""
        return stop_files(self._paths.state_dir, self.options.stop_file)[-1].absolute()

    def _missing(self, receipts: Iterable[str]) -> list[int]:
        names = set(receipts)
        return [number for number, shard in enumerate(self.plan.shards) if shard.name not in names]

    def _parts_of(self, tasks: Sequence[int], count: int) -> list[int]:
        edges = divide(self.plan.shards, count)
        parts = np.searchsorted(edges, np.array(tasks, np.int64), side="right")
        return [int(number) for number in np.unique(parts)]

    def _do_part(self, part: Part, folder: Path, progress: Progress) -> PartResult:
        edges = divide(self.plan.shards, part.count)
        own = self.plan.shards[edges[part.number - 1] : edges[part.number]]
        counts = (0, 0, 0, 0, 0)
        if own:
            result = self._run(self._shards(own, progress), progress, _PartOfBuild(own, folder, self))
            counts = (result.bytes, result.shards, result.written, result.kept, result.sent_bytes)
        return PartResult(part.number, part.count, str(self.destination), *counts, next=self.command("--finish"))

    def _do_all(self, progress: Progress, publish_only: bool) -> BuildResult:
        receipts = self.receipts.all(self.plan.fingerprint)
        if publish_only:  # before anything is made at the destination
            ledger = Ledger(self._paths.ledger_dir)
            is_same = ledger.job is not None and ledger.job.fingerprint == self.plan.fingerprint
            names = receipts.keys() | (ledger.receipts.keys() if is_same else ())
            self._refuse_missing(self._missing(names))
        shards = PlannedShards(self.plan) if publish_only else self._shards(self.plan.shards, progress)
        return self._run(shards, progress, _AllParts(self, receipts, progress, publish_only))

    def _run(self, shards: PlannedShards, progress: Progress, scope: Scope) -> BuildResult:
        update = self.saved.job["update"]
        settings = replace(self.options, hub=self.hub, update=update, access=self._access)
        job = Job(shards.plan, self._paths, settings, limit=self.limit, forecast=self.forecast)
        try:
            return job.run(progress, scope, shards)
        except SourceChangedError as error:
            raise SourceChangedError(
                error.words[0], hint="Restore it, or plan again: brim plan … --save PLAN.", **error.facts
            ) from error

    def _shards(self, own: Sequence[Shard], progress: Progress) -> PlannedShards:
        """Return the shards as this machine reads them."""
        for name, version in job_versions().items():
            if (earlier := self.saved.versions.get(name)) != version:
                progress.note(f"the plan was made with {name} {earlier}, and this is {version}: bytes may differ")
        if self.options.root is None:
            return PlannedShards(self.plan)
        if self.plan.table.files.bucket is not None:
            raise InputError(
                "--root can only be used with a source in a folder, and the source of this plan is in a bucket.",
                hint="Leave out --root.",
            )
        plan, changed = relocate_plan(self.plan, os.path.abspath(self.options.root), own)
        if changed:
            progress.note(f"{changed:,} file(s) in --root have other dates than planned; paths and sizes are the same")
        return PlannedShards(plan, self.plan)

    def supersedes(self, receipt: Receipt, existing: Receipt | None) -> bool:
        """Return whether the receipt of a part replaces the one that the ledger of the destination has."""
        if existing is None or existing.job != receipt.job:
            return True
        if existing.sha256 == receipt.sha256 or not self._location.is_local:
            return existing != replace(receipt, staged_at=0)
        # The shard's files changed between two builds, but kept their sizes: the content shows which receipt is right.
        return is_content_of(self._location.path / receipt.name, receipt)

    def refuse_missing_shards(self, missing: Sequence[Shard], receipts: dict[str, Receipt]) -> None:
        """Raise InputError for shards that no part has uploaded, or that no longer exist."""
        is_remote = self._location.is_repository
        expired = [shard.name for shard in missing if shard.name in receipts]
        # A part does not upload a shard again while it considers its receipt valid, so that receipt is removed.
        now = time.time()
        self.receipts.forget(name for name in expired if now - receipts[name].staged_at < STAGED_S or not is_remote)
        text = ""
        if expired:
            text = f", {len(expired):,} of them no longer exist"
            if is_remote:
                text += f" (uploads that are not published are kept for {STAGED_S // 3600} hours)"
        numbers = {shard.name: number for number, shard in enumerate(self.plan.shards)}
        self._refuse_missing([numbers[shard.name] for shard in missing], text)

    def check(self) -> None:
        """Do nothing: files were checked before the plan was saved."""

    @property
    def facts(self) -> dict[str, Any]:
        """The plan and its progress, for programs."""
        return {**plan_facts(self.plan, self.forecast, self.limit), "saved": asdict(self.status)}

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The plan and its progress, for people."""
        plan = plan_lines(self.plan, self.forecast, self.limit, not self._location.is_local)
        return [*plan, *self.status.lines(self.command, "shards")]


class _PartOfBuild(Scope):
    """Upload some shards, with a separate ledger."""

    def __init__(self, shards: Sequence[Shard], folder: Path, saved: SavedBuild) -> None:
        self.names, self.ledger_dir = frozenset(shard.name for shard in shards), folder
        self._shards, self._saved = shards, saved

    def receipts_of_parts(self, ledger: Ledger) -> Iterator[Receipt]:
        """Count shards that a build on one machine has written to the same folder before."""
        location, job = self._saved.destination, self._saved.plan.fingerprint[:16]
        if location.is_local:
            built = Ledger(location.path / STATE).receipts
            receipts = (built.get(shard.name) for shard in self._shards if shard.name not in ledger.receipts)
            yield from (receipt for receipt in receipts if receipt is not None and receipt.job == job)


class _AllParts(Scope):
    """Take over the shards of all parts; `publish_only`: upload none."""

    def __init__(self, saved: SavedBuild, receipts: dict[str, Receipt], progress: Progress, publish_only: bool) -> None:
        self._saved, self._receipts, self._progress, self._publish_only = saved, receipts, progress, publish_only

    def receipts_of_parts(self, ledger: Ledger) -> list[Receipt]:
        if ledger.is_finished:
            self._progress.note("this plan was finished before: checking that everything still exists")
        return [r for r in self._receipts.values() if self._saved.supersedes(r, ledger.receipts.get(r.name))]

    def check_missing(self, missing: Sequence[Shard]) -> None:
        if self._publish_only:
            self._saved.refuse_missing_shards(missing, self._receipts)


def job_facts(location: Location, hub: PublishOptions, update: bool) -> dict[str, Any]:
    """Return what a saved plan of a build records of its job: the destination and how to publish. Never the token."""
    endpoint = None if location.is_local else location.access.endpoint
    return {"destination": str(location), "endpoint": endpoint, "hub": hub.to_record(), "update": update}


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The content of a plan file of a computed job. `words` are plain values from which the job is made again."""

    verb: str
    words: dict[str, Any]
    fingerprint: str
    facts: dict[str, Any]
    units: int
    types: str = ""


# A plan identifies its function by its content, so another function is another plan.
_FIX_HINT = "Fix it and save the plan again; or with --on-error=skip or --on-error=quarantine, to skip such rows."


class SavedComputation(SavedPlan[MapResult]):
    """A saved plan of map, tokenize or embed: do a part of it, finish it, or do all that is missing.

    `make_job` makes the job of the plan, as this machine runs it. `held_bytes` returns the memory of the caller, which
    is not part of the limit and may differ at each call.
    """

    noun = "units"

    def __init__(
        self,
        path: str | os.PathLike[str],
        make_job: Callable[[JobPlan], Job],
        access: Access | None,
        held_bytes: Callable[[], int],
    ) -> None:
        super().__init__(path, access or Access())
        self.plan = load_job_plan(self.place)
        self._held_bytes = held_bytes
        self.job = make_job(self.plan)
        if self.job.plan.fingerprint != self.plan.fingerprint:
            changes = computed_changes(self.plan.facts, self.job.plan.facts)
            raise InputError(
                f"This job differs from the planned one: {'; '.join(changes)}.",
                hint="Use the same files, function and versions on every machine, or save the plan again.",
            )

    @property
    def limit(self) -> Limit:
        """The memory limit of the job."""
        return self.job.limit

    @property
    def destination(self) -> str:
        """The address of the destination."""
        return str(self.job.paths.location)

    @property
    def _fingerprint(self) -> str:
        return self.plan.fingerprint

    @property
    def _ledger_dir(self) -> Path:
        return self.job.paths.ledger_dir

    @property
    def _command(self) -> str:
        return self.plan.verb

    @property
    def _count(self) -> int:
        return self.plan.units

    def _missing(self, receipts: Iterable[str]) -> list[int]:
        """Return the units that no part has computed; none if the job was finished before."""
        ledger = Ledger(self._ledger_dir)
        if ledger.is_finished and ledger.job is not None and ledger.job.fingerprint == self.plan.fingerprint:
            return []
        computed = {int(Path(name).stem) for name in receipts if Path(name).stem.isdecimal()}
        return [number for number in range(self.plan.units) if number not in computed]

    def _parts_of(self, tasks: Sequence[int], count: int) -> list[int]:
        return sorted({number % count + 1 for number in tasks})

    def _do_part(self, part: Part, folder: Path, progress: Progress) -> PartResult:
        files = self.receipts.unit_files(part, folder)
        try:
            with _computing(self._called_job(), folder, progress) as run:
                stats = run.run_part(files, part.number - 1, part.count, self.plan.types)
        except UserFunctionError as failed:
            failed.with_hint(_FIX_HINT)
            raise
        size, units = sum(receipt.size for receipt in stats.receipts), len(stats.receipts)
        return PartResult(
            part.number,
            part.count,
            self.destination,
            bytes=size,
            shards=units,
            written=stats.computed,
            kept=units - stats.computed,
            sent_bytes=0,
            next=self.command("--finish"),
            of_units=True,
        )

    def _do_all(self, progress: Progress, publish_only: bool) -> MapResult:
        job = self._called_job()
        if publish_only:
            self._refuse_missing(self._missing(self.receipts.all(self.plan.fingerprint)))
        result = job.run(progress, _AllUnits(self, job))
        assert isinstance(result, MapResult)
        return result

    def _called_job(self) -> Job:
        return self.job.called_with(self._held_bytes())

    @property
    def facts(self) -> dict[str, Any]:
        """The job and its progress, for programs."""
        values = {"verb": self.plan.verb, "units": self.plan.units, "fingerprint": self.plan.fingerprint}
        return {**values, "saved": asdict(self.status)}

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The job and its progress, for people."""
        job = [("job", f"brim {self.plan.verb} {self.plan.words['source']}"), ("units", f"{self.plan.units:,}")]
        return [*job, *self.status.lines(self.command, "units")]


class _AllUnits(Scope):
    """Take over the units of all parts."""

    def __init__(self, saved: SavedComputation, job: Job) -> None:
        self._saved, self._job = saved, job

    def take_over_units(self, units: Ledger) -> bool:
        """Copy the files and receipts of all parts; a file comes before its receipt."""
        folder, types, stamps = self._job.paths.units_dir, self._saved.plan.types, set()
        if types and units.recall("types") is None:
            units.remember("types", types)
        for part, ledger in self._saved.receipts.ledgers():
            stamps.add("" if ledger.source is None else ledger.source.stamp)
            for receipt in ledger.receipts.values():
                path = folder / receipt.name
                is_known = units.receipts.get(receipt.name) == receipt and path.exists()
                if not is_known or sha256_of(path, lambda _: None) != receipt.sha256:
                    self._copy_unit(part, ledger, receipt, units)
        if len(stamps) == 1 and units.source is None:  # if dates differ on this machine, the content is compared
            units.record_source(SourceRecord(stamps.pop()))
        return True

    def _copy_unit(self, part: Part, ledger: Ledger, receipt: Receipt, units: Ledger) -> None:
        folder, receipts = self._job.paths.units_dir, self._saved.receipts
        receipts.download(part, receipt.name, folder, receipt.sha256)
        if ledger.recall(f"bad rows {receipt.name}") and self._job.settings.on_error == "quarantine":
            receipts.download(part, bad_rows_name(receipt.name), folder)
        for note in (f"bad rows {receipt.name}", f"encoder {receipt.name}"):
            if (value := ledger.recall(note)) is not None:
                units.remember(note, value)
        units.add(receipt)


def save_job_plan(
    path: str | os.PathLike[str], job: Job, words: dict[str, Any], progress: Progress | None, access: Access | None
) -> None:
    """Count the units of a job, find its types with the first batch, and save what parts need to know."""
    check_plan_place(path)
    plan = job.plan
    assert isinstance(plan, ComputePlan)
    units = sum(1 for _ in plan.source.units(plan.step.batch_rows or 1, indices=plan.step.indices))
    types = _first_types(job, progress or Progress()) if isinstance(plan.step, HasTypeInference) and units else ""
    saved = JobPlan(plan.command, words, plan.fingerprint, plan.facts, units, types)
    text = json.dumps({"kind": JOB_PLAN, "version": _VERSION, **asdict(saved)}, indent=1)

    def write(file: Path) -> None:
        with failures(file.parent):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text.encode())
            os.chmod(file, 0o600)

    save_to(path, write, access)


def _first_types(job: Job, progress: Progress) -> str:
    """Return the types of the first batch. A first unit that fails shows that before a hundred machines start."""
    with tempfile.TemporaryDirectory(prefix="brim-types-") as folder:
        files = UnitFiles(Path(folder) / "units")
        # Units go to the parts in turn: with so many parts, the first one has one unit.
        with _computing(job, Path(folder), progress) as run:
            run.run_part(files, 0, 1 << 62, "")
        return str(Ledger(files.folder).recall("types") or "")


@contextmanager
def _computing(job: Job, folder: Path, progress: Progress) -> Iterator[ComputeRun]:
    """Open a run that computes units in a folder, without the lock of the destination."""
    from brim.jobs.compute import ComputeRun  # plans of builds do not need it

    files = stop_files(folder, job.settings.stop_file)
    with (
        connect(job.settings) as cluster,
        stoppable(*files, requested=job.settings.stop) as stop,
        interrupted_by(stop.check),
        failures(folder),
    ):
        try:
            destination = Destination()
            destination.paths = job.paths
            yield ComputeRun(job, Run(Ledger(folder / "none"), stop, progress), destination, cluster)
        finally:
            progress.finish()


def load_job_plan(storage: PlanPlace) -> JobPlan:
    """Read a saved plan of map, tokenize or embed."""
    with storage.path.open("rb") as file:
        if file.read(len(PLAN_MAGIC)) == PLAN_MAGIC:
            hint = f"Run `brim build --plan {shlex.quote(storage.shown)}`."
            raise InputError(f"{storage.shown!r} is a plan of brim build.", hint=hint)
    try:
        values = json.loads(storage.path.read_text())
        if values.pop("kind") != JOB_PLAN or values.pop("version") != _VERSION:
            raise ValueError("of another version")
        return JobPlan(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{storage.shown!r} is not a plan that this version of brim can read.",
            hint="Save it again with this version.",
        ) from error
