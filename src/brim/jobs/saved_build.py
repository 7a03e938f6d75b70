"""A saved plan, done in parts on any number of machines, and published at the end.

A part brings its shards to the destination and keeps receipts; it publishes nothing. Finishing takes all
receipts together and publishes as a build on one machine does, with the same result byte for byte.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from brim.errors import InputError, SourceChangedError
from brim.jobs.content import PlanContent
from brim.jobs.job import BuildResult, Job
from brim.jobs.plan_storage import Part, divide, listed, open_place, parse_part
from brim.jobs.spec import JobSettings, Spec, dataset_at, forecast_at, stop_files
from brim.jobs.upload_shards import STAGED_S, Share
from brim.memory.limit import Limit, effective_limit
from brim.plans.cut_shards import Shard
from brim.plans.describe_plan import BuildForecast, plan_facts, plan_lines
from brim.plans.plan import Plan
from brim.plans.saved_plan import Saved, load_plan, moved, understood
from brim.progress import Progress, Watch, given_or_silent
from brim.records import dataclass
from brim.sizes import format_size
from brim.state.ledger import STATE, Ledger, Receipt, job_versions
from brim.storage.location import Access, Location
from brim.stores.destination import PublishOptions, parse_destination
from brim.wording import Described, Result

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class SavedSettings(JobSettings):
    """How this machine works on a saved plan. `access` is to the object store of the plan.

    The plan decides the destination, how it is published, and whether it is an update.
    """

    root: str | None = None  # where the source is on this machine

    def check_options(self) -> None:
        if self.root is not None and "://" in self.root:
            raise InputError(f"With --plan, --root must be a folder of this machine, not {self.root!r}.")


@dataclass(frozen=True, slots=True, repr=False)
class PartResult(Result):
    """What a run of a part did. `next` is the command that publishes when all parts are done."""

    part: int
    parts: int
    destination: str
    bytes: int
    shards: int
    written: int
    kept: int
    sent_bytes: int
    next: str
    of_units: bool = False  # of a computed job; otherwise shards were brought

    def next_steps(self) -> list[tuple[str, str]]:
        """Return the command that publishes when all parts are done."""
        last = f"  (when all {self.parts:,} parts are done)" if self.parts > 1 else ""
        return [("next step", f"{self.next}{last}")]

    def summary(self) -> list[tuple[str, str]]:
        """Return what was done, and the next command, for people."""
        noun, did, at = ("units", "computed", "for") if self.of_units else ("shards", "written", "at")
        kept = f", {self.kept:,} kept" if self.kept else ""
        return [
            ("part", f"{self.part} of {self.parts}, {at} {self.destination}"),
            (noun, f"{self.shards:,} ({self.written:,} {did}{kept}), {format_size(self.bytes)}"),
            *self.next_steps(),
        ]


@dataclass(frozen=True, slots=True)
class PlanStatus:
    """How far a saved plan is. `parts` is how many it is done in, None before the first was begun; those that lack a
    shard are listed by their numbers."""

    path: str
    destination: str
    shards: int
    done: int
    parts: int | None
    missing_parts: list[int]
    unfinished_parts: list[int]
    finished: bool

    def lacking(self, count: int) -> list[int]:
        """Those of `count` parts that have something to do. InputError if the plan is done in another number."""
        if self.finished:
            return []
        if self.parts is None:
            return list(range(1, count + 1))
        if self.parts != count:
            raise InputError(
                f"This plan is divided into {self.parts} parts, not into {count}.", hint=f"Use {self.parts} for N."
            )
        return sorted([*self.missing_parts, *self.unfinished_parts])

    def lines(self, command: Callable[..., str], noun: str) -> list[tuple[str, str]]:
        """How far it is, and the next command, for people."""
        lines = [("destination", self.destination)]
        if self.finished:
            return [*lines, ("parts", "all finished and published")]
        if self.parts is None:
            return [*lines, ("parts", "none started"), ("next step", command("--part", "1/N"))]
        missing, unfinished = self.missing_parts, self.unfinished_parts
        whole = self.parts - len(missing) - len(unfinished)
        lines.append(("parts", f"{whole:,} of {self.parts:,} done, {self.done:,} of {self.shards:,} {noun}"))
        lines += [("unfinished", f"part {listed(unfinished)}")] if unfinished else []
        lines += [("not started", f"part {listed(missing)}")] if missing else []
        next_part = f"{[*unfinished, *missing][0]}/{self.parts}" if missing or unfinished else None
        return [*lines, ("next step", command(*(["--part", next_part] if next_part else ["--finish"])))]


@dataclass(frozen=True)
class _Moved(PlanContent):
    """A plan whose source is elsewhere on this machine. Receipts tell the dates that were planned."""

    planned: Plan

    def mtimes(self, shard: Shard) -> str:
        return self.planned.shard_mtimes(shard)

    def with_mtimes(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, str]]:
        return self.planned.with_mtimes(shards)


class SavedBuild(Described):
    """A plan in a file, with its destination: do a part of it, finish it, or do all that is missing."""

    label_width = 14

    def __init__(self, path: str | os.PathLike[str], options: SavedSettings | None = None) -> None:
        self.options = options or SavedSettings()
        self.watch: Watch = given_or_silent
        self.place = open_place(path, self.options.access)
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
        self.destination: Location = parse_destination(self.saved.job["destination"], self._access)
        self.receipts = self.place.receipts
        self.limit: Limit = effective_limit(self.options.memory)
        self.forecast: BuildForecast = forecast_at(self.destination, self.plan, self.limit, self.options.workers)
        self.layout = dataset_at(self.destination, self.options.state_dir, self.hub)

    @property
    def _job(self) -> str:
        return self.plan.fingerprint[:16]

    def command(self, *words: str) -> str:
        endpoint = self.options.access.endpoint
        words += ("--endpoint-url", endpoint) if endpoint else ()
        return shlex.join(["brim", "build", "--plan", self.place.shown, *words])

    @property
    def takes(self) -> dict[str, int]:
        """What the forecast says for this machine."""
        return dict.fromkeys(("low_bytes", "high_bytes"), self.forecast.total)

    @property
    def stop_file(self) -> Path:
        """Making this file ends a run cleanly; of a part, only the user's own does for all."""
        return stop_files(self.layout.state, self.options)[-1].absolute()

    def part(self, part: Part | str, progress: Progress | bool | None = None) -> PartResult:
        """Bring what is missing of a part: "3/100" is the third of a hundred."""
        part = parse_part(part) if isinstance(part, str) else part
        watched = self.watch(progress)
        edges = divide(self.plan.shards, part.count)
        mine = self.plan.shards[edges[part.number - 1] : edges[part.number]]
        with self.receipts.part(part) as folder:
            self.receipts.check(part, Ledger(folder), self.plan.fingerprint)
            share = Share(
                frozenset(shard.name for shard in mine), folder, lambda ledger: self._built_here(mine, ledger)
            )
            done = self._run(self._content(mine, watched), watched, share) if mine else None
        counts = (done.bytes, done.shards, done.written, done.kept, done.sent_bytes) if done else (0, 0, 0, 0, 0)
        return PartResult(part.number, part.count, str(self.destination), *counts, next=self.command("--finish"))

    def _built_here(self, mine: Iterable[Shard], ledger: Ledger) -> Iterator[Receipt]:
        """What a build on one machine did in the same folder before counts as well."""
        if self.destination.is_local:
            built = Ledger(self.destination.path / STATE).receipts
            found = (built.get(shard.name) for shard in mine if shard.name not in ledger.receipts)
            yield from (receipt for receipt in found if receipt is not None and receipt.job == self._job)

    def finish(self, progress: Progress | bool | None = None) -> BuildResult:
        """Publish what all parts brought. InputError that names the parts which are missing."""
        return self._whole(self.watch(progress), only_publish=True)

    def run(self, progress: Progress | bool | None = None) -> BuildResult:
        """Bring whatever is missing, of all parts, and publish."""
        return self._whole(self.watch(progress), only_publish=False)

    def _whole(self, progress: Progress, only_publish: bool) -> BuildResult:
        with self.receipts.alone():
            received = self.receipts.all(self.plan.fingerprint)
            if only_publish:  # before anything is made at the destination
                here = Ledger(self.layout.books)
                known = here.receipts if here.job and here.job.fingerprint == self.plan.fingerprint else {}
                self._refuse([s for s in self.plan.shards if s.name not in received and s.name not in known], received)
            content = PlanContent(self.plan) if only_publish else self._content(self.plan.shards, progress)

            def of_parts(ledger: Ledger) -> Iterable[Receipt]:
                if ledger.done:
                    progress.note("this plan was finished before: looking whether everything is still there")
                return [r for r in received.values() if self._counts(r, ledger.receipts.get(r.name))]

            def refuse(lacking: Sequence[Shard]) -> None:
                if only_publish:
                    self._refuse(lacking, received)

            return self._run(content, progress, Share(received=of_parts, lacking=refuse))

    def _counts(self, receipt: Receipt, known: Receipt | None) -> bool:
        """Whether a part's receipt takes the place of the one that the destination's ledger has for the same name."""
        if known is None or known.job != receipt.job:
            return True
        if known.sha256 == receipt.sha256 or not self.destination.is_local:
            return known != replace(receipt, staged_at=0)
        try:  # files of the same size were changed between two builds: the shard itself says which one is in it
            with open(self.destination.path / receipt.name, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == receipt.sha256
        except OSError:
            return False

    def _run(self, content: PlanContent, progress: Progress, share: Share) -> BuildResult:
        how = replace(self.options, hub=self.hub, update=self.saved.job["update"], access=self._access)
        spec = Spec("build", content, self.layout, how, self.limit, forecast=self.forecast)
        try:
            return Job(spec).run(progress, share)
        except SourceChangedError as error:
            raise SourceChangedError(
                error.words[0], hint="Restore it, or plan again: brim plan … --save PLAN.", **error.facts
            ) from error

    def _content(self, shards: Sequence[Shard], progress: Progress) -> PlanContent:
        """What is read on this machine."""
        for name, version in job_versions().items():
            if (planned := self.saved.versions.get(name)) != version:
                progress.note(f"the plan was made with {name} {planned}, and this is {version}: bytes may differ")
        if self.options.root is None:
            return PlanContent(self.plan)
        if self.plan.table.files.bucket is not None:
            raise InputError(
                "--root can only be used with a source in a folder, and the source of this plan is in a bucket.",
                hint="Leave out --root.",
            )
        plan, other = moved(self.plan, os.path.abspath(self.options.root), shards)
        if other:
            progress.note(f"{other:,} file(s) in --root have other dates than planned; paths and sizes are the same")
        return _Moved(plan, self.plan)

    def _refuse(self, lacking: Sequence[Shard], received: dict[str, Receipt]) -> None:
        """InputError that says which parts have to be run for these shards; if there are any."""
        if not lacking:
            return
        count = self.receipts.count()
        if count is None:
            raise InputError(
                "No part of this plan has run yet.",
                hint=f"Run {self.command('--part', '1/N')} and so on; without --part or --finish, all runs here.",
            )
        remote = self.destination.is_repository
        expired = [shard.name for shard in lacking if shard.name in received]
        # A receipt that looks good to its part and is not must not keep the part from doing it again.
        self.receipts.forget(n for n in expired if time.time() - received[n].staged_at < STAGED_S or not remote)
        parts = self._parts_of(lacking, count)
        what = f"{len(lacking):,} of {len(self.plan.shards):,} shards are not there"
        if expired:
            what += f", {len(expired):,} of them no longer"
            if remote:
                what += f" (what is sent and not published lasts {STAGED_S // 3600} hours)"
        commands = [self.command("--part", f"{number}/{count}") for number in parts[:_SHOWN]]
        if len(parts) > _SHOWN:
            commands.append("and so on")
        raise InputError(
            f"{what}. Missing or unfinished: part{'s' if len(parts) > 1 else ''} {listed(parts)} of {count}.",
            hint=f"Run {'; '.join(commands)}; then {self.command('--finish')}.",
            parts=parts,
            count=count,
        )

    def _parts_of(self, shards: Sequence[Shard], count: int) -> list[int]:
        """The parts that these shards belong to."""
        places = {shard.name: place for place, shard in enumerate(self.plan.shards)}
        numbers = np.array([places[shard.name] for shard in shards], np.int64)
        found = np.searchsorted(divide(self.plan.shards, count), numbers, side="right")
        return [int(number) for number in np.unique(found)]

    @property
    def status(self) -> PlanStatus:
        """How far it is."""
        count, done = self.receipts.count(), self.receipts.all(self.plan.fingerprint)
        here = Ledger(self.layout.books)
        same = here.job is not None and here.job.fingerprint == self.plan.fingerprint
        lacking = [shard for shard in self.plan.shards if shard.name not in done]
        missing = [] if count is None else self._parts_of(lacking, count)
        begun = set() if count is None else set(self._parts_of([s for s in self.plan.shards if s.name in done], count))
        return PlanStatus(
            path=self.place.shown,
            destination=str(self.destination),
            shards=len(self.plan.shards),
            done=len(self.plan.shards) - len(lacking),
            parts=count,
            missing_parts=[number for number in missing if number not in begun],
            unfinished_parts=[number for number in missing if number in begun],
            finished=same and here.done,
        )

    def check(self) -> None:
        """Files were checked before the plan was saved."""

    @property
    def facts(self) -> dict[str, Any]:
        """The plan and how far it is, for programs."""
        return {**plan_facts(self.plan, self.forecast, self.limit), "saved": asdict(self.status)}

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The plan and how far it is, for people."""
        remote = not self.destination.is_local
        plan = plan_lines(self.plan, self.forecast, self.limit, remote)
        return [*plan, *self.status.lines(self.command, "shards")]


def job_facts(destination: Location, hub: PublishOptions, update: bool) -> dict[str, Any]:
    """What a saved plan tells beside the plan: where it goes and how it is published. Never the token."""
    return {
        "destination": str(destination),
        "endpoint": destination.access.endpoint,
        "hub": hub.to_record(),
        "update": update,
    }
