"""A plan with a destination: print it to see what would happen, run it to make it happen."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim.buckets.bucket_address import Access, BucketAddress
from brim.choices import at_least, one_of
from brim.errors import InputError
from brim.formats.parquet_shard import MAX_CELL_BYTES
from brim.jobs.bring import versions
from brim.jobs.content import PlanContent
from brim.jobs.open_store import (
    Built,
    Delivery,
    at_destination,
    check_hub_limits,
    check_hub_options,
    deliver,
    state_of,
    usual_workers,
)
from brim.jobs.parts import job_facts
from brim.jobs.plan_place import receipts_at, save_to
from brim.memory.limit import Limit, effective_limit
from brim.plans.cut_shards import CutOptions
from brim.plans.describe_plan import BuildForecast, forecast_build, plan_facts, plan_lines
from brim.plans.file_checks import (
    CheckOptions,
    check_files,
    check_paths_stay_home,
    raise_refused,
    raise_unfit,
)
from brim.plans.fingerprint import changes_between
from brim.plans.plan import EXTENSIONS, Format, Plan, make_plan
from brim.plans.saved_plan import save_plan
from brim.progress import Progress, Silent
from brim.schedule.ray_cluster import Sight, sample_of
from brim.schedule.scheduler import Scaling
from brim.schedule.workplace import carrying_bytes, opened
from brim.sources.file_table import FileTable
from brim.state.durable import reason
from brim.state.ledger import Ledger
from brim.stores.destination import Destination, new_destination, refuse_holder, refuse_source, taken_by_dataset
from brim.stores.hub_options import HubAddress, HubOptions


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build, apart from what."""

    format: Format = "parquet"
    cut: CutOptions = field(default_factory=CutOptions)
    checks: CheckOptions = field(default_factory=CheckOptions)
    memory: str | int | float | None = None
    workers: int | None = None
    fresh: bool = False
    update: bool = False
    state: str | None = None
    stop_file: str | None = None
    hub: HubOptions = field(default_factory=HubOptions)
    access: Access = field(default_factory=Access)  # to the bucket that is the destination
    scaling: Scaling = field(default_factory=Scaling)

    def __post_init__(self) -> None:
        one_of("format", self.format, EXTENSIONS)
        at_least("workers", self.workers, 1)
        if self.fresh and self.update:
            raise InputError("Choose one of --fresh (start over) and --update (keep what is unchanged).")


class Build:
    """A plan with a destination: print it to see what would happen, `run()` it to make it happen."""

    def __init__(self, table: FileTable, destination: str | os.PathLike[str] | None, options: BuildOptions) -> None:
        self.destination: Destination | None = (
            None if destination is None else new_destination(destination, options.access)
        )
        self.options = _with_split(options, table)
        check_hub_options(options.hub, self.destination)
        self.limit: Limit = effective_limit(options.memory)
        cell = MAX_CELL_BYTES if options.format == "parquet" else None
        check_paths_stay_home(table)
        checked = check_files(table, options.checks, cell)
        self.plan: Plan = make_plan(checked, options.format, options.cut, options.hub.folder)
        check_hub_limits(PlanContent(self.plan), self.destination)
        workers = options.workers or usual_workers(self.destination)
        to = None if self.destination is None else self.destination
        self.forecast: BuildForecast = forecast_build(
            self.plan, self.limit, workers, hub=isinstance(to, HubAddress), bucket=isinstance(to, BucketAddress)
        )

    @property
    def _is_remote(self) -> bool:
        return isinstance(self.destination, HubAddress | BucketAddress)

    @property
    def facts(self) -> dict[str, Any]:
        """The plan for programs."""
        return plan_facts(self.plan, self.forecast, self.limit)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The plan for people, as (label, text)."""
        lines = plan_lines(self.plan, self.forecast, self.limit, self._is_remote)
        if self.destination is not None:
            lines.append(("destination", self._destination_text(self.destination)))
        return lines

    def save_recipe(self, path: str | os.PathLike[str]) -> None:
        """Write the columns of a BIDS dataset as a recipe, so that a pilot and the whole dataset agree."""
        if self.plan.table.saved is None:
            raise InputError("--save-recipe is for BIDS datasets read without another recipe.")
        try:
            Path(path).write_text(self.plan.table.saved, encoding="utf-8")
        except OSError as error:
            raise InputError(f"The recipe cannot be written to {str(path)!r}: {reason(error)}.") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, from which `brim build --plan` works on any machine that sees the source."""
        self.check()
        destination = self._need_destination()
        if self.options.fresh:
            raise InputError("A plan that is saved cannot start over.", hint="Choose an empty destination.")
        if self.options.update and not isinstance(destination, HubAddress):
            raise InputError(
                "Parts cannot bring a folder up to date: only the Hub.", hint="Build on one machine, or choose another."
            )
        access = self.options.access
        receipts_at(path, access).all(self.plan.fingerprint)  # nobody may mix two plans
        job = job_facts(destination, self.options.hub, self.options.update)
        save_to(path, lambda file: save_plan(file, self.plan, job, versions()), access)

    def _destination_text(self, destination: Destination) -> str:
        """What a build would find at the destination, as far as this machine's ledger tells."""
        ledger = Ledger(state_of(destination, self.options.state, self.options.hub))
        if ledger.job is None:
            if not isinstance(destination, Path):
                return f"{destination} (nothing sent from here yet)"
            return f"{destination} ({'there, and not built by brim' if destination.exists() else 'new'})"
        if ledger.job.fingerprint != self.plan.fingerprint:
            changes = "; ".join(changes_between(ledger.job.facts, self.plan.facts))
            return f"{destination} holds another dataset ({changes}): --update or --fresh"
        done = sum(shard.name in ledger.receipts for shard in self.plan.shards)
        rest = (
            f"; a build {'sends' if self._is_remote else 'writes'} the others" if done < len(self.plan.shards) else ""
        )
        return f"{destination} holds {done:,} of {len(self.plan.shards):,} shards{rest}"

    def check_plan(self) -> None:
        """As `check`, but for a plan alone, which needs no content: what git-annex keeps elsewhere has a size."""
        raise_refused(self.plan.table, planning=True)
        raise_unfit(self.plan.table, self.options.checks.strict)

    def check(self) -> None:
        """FilesRefused if a file cannot be packaged; SourceError if rows are out of line or not as expected."""
        raise_refused(self.plan.table)
        raise_unfit(self.plan.table, self.options.checks.strict)

    def __str__(self) -> str:
        return "\n".join(f"{label:>14}  {text}" for label, text in self.lines)

    def run(self, progress: Progress | None = None) -> Built:
        """Build what is missing at the destination."""
        self.check()
        destination = self._need_destination()
        options, progress = self.options, progress or Silent()
        state = state_of(destination, options.state, options.hub)
        delivery = Delivery(
            self.limit,
            self.forecast.workers,
            self.limit.bytes - self.forecast.total,
            fresh=options.fresh,
            update=options.update,
            hub=options.hub,
        )
        sending = carrying_bytes(self.destination, options.hub)
        with (
            opened(
                options.scaling, self._sight, self.forecast.worker + sending, self.limit.bytes, options.workers
            ) as executor,
            at_destination(destination, state, options.stop_file, progress, fresh=options.fresh) as here,
        ):
            delivery = dataclasses.replace(delivery, executor=executor)
            return deliver(PlanContent(self.plan), destination, delivery, here[0], progress, here[1])

    def _need_destination(self) -> Destination:
        if self.destination is None:
            raise InputError("This plan has no destination.", hint="Give DEST: brim.plan(source, destination).")
        files = self.plan.table.files
        taken = taken_by_dataset(self.destination, self.options.hub.folder)
        refuse_source(self.destination, files.root, None, files, taken)
        for number in files.on_disk.remotes:
            refuse_holder(self.destination, files.on_disk.full_path(number))
        return self.destination

    def _sight(self) -> Sight:
        """What every node of a cluster has to see of the source."""
        return Sight(files=sample_of(self.plan.table.files))


def _with_split(options: BuildOptions, table: FileTable) -> BuildOptions:
    """A split that the user named is published alone: others stay as they are."""
    split = options.hub.split or table.recipe.get("split")
    return dataclasses.replace(options, hub=dataclasses.replace(options.hub, split=split))
