"""The plan of a build with its destination: print it to see what would happen, run it to make it happen."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.formats.parquet_writer import MAX_CELL_BYTES
from brim.jobs.destination_paths import DestinationPaths, dataset_paths
from brim.jobs.job import Job
from brim.jobs.preflight import (
    JobSettings,
    check_hub_limits,
    check_settings,
    forecast_for,
    hub_notes,
    stop_files,
)
from brim.jobs.results import BuildResult
from brim.jobs.shard_set import PlannedShards
from brim.memory.limit import Limit, effective_limit
from brim.options.groups import CheckFileOptions, ShardOptions
from brim.plans.describe_plan import BuildForecast, plan_facts, plan_lines
from brim.plans.file_checks import check_files, check_no_local_paths, raise_refused, raise_unfit
from brim.plans.fingerprint import changes_between
from brim.plans.plan import Plan, make_plan
from brim.progress import Progress, Watch, given_or_silent
from brim.records import dataclass
from brim.sources.file_table import FileTable
from brim.state.atomic_files import reason
from brim.state.ledger import Ledger, job_versions
from brim.storage.destination_address import parse_destination
from brim.storage.location import Location
from brim.wording import Described


@dataclass(frozen=True, kw_only=True)
class BuildSettings(JobSettings, ShardOptions, CheckFileOptions):
    """How to build, and how files become shards."""


class BuildPlan(Described):
    """A plan with a destination. Print it to see what would happen, call `run()` to build it.

    `rows`, `bytes` and `shards` are its numbers; `facts` has everything that `--json` prints.
    """

    label_width = 14

    def __init__(self, table: FileTable, destination: str | os.PathLike[str] | None, options: BuildSettings) -> None:
        self.destination: Location | None = (
            None if destination is None else parse_destination(destination, options.access)
        )
        self.watch: Watch = given_or_silent
        # A split that the user named is published alone; other splits stay as they are.
        split = options.hub.split or table.recipe.get("split")
        if options.append and len(table.splits) == 1:
            split = table.splits[0].name
        self.options = options = replace(options, hub=replace(options.hub, split=split))
        check_settings("build", options, self.destination)
        self.limit: Limit = effective_limit(options.memory)
        check_no_local_paths(table)
        checked = check_files(table, options, MAX_CELL_BYTES if options.format == "parquet" else None)
        self.plan: Plan = make_plan(checked, options.format, options.only(ShardOptions), options.hub.folder)
        check_hub_limits(PlannedShards(self.plan), self.destination)
        self.forecast: BuildForecast = forecast_for(self.destination, self.plan, self.limit, options.workers)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.plan.table)

    @property
    def bytes(self) -> int:
        """Size of the files that the rows refer to, in bytes. Shards are a little larger."""
        return int(self.plan.facts["bytes"])

    @property
    def shards(self) -> int:
        """Number of shards over all splits."""
        return len(self.plan.shards)

    @property
    def _is_remote(self) -> bool:
        return self.destination is not None and not self.destination.is_local

    @property
    def facts(self) -> dict[str, Any]:
        """The plan as a dictionary, for programs."""
        return plan_facts(self.plan, self.forecast, self.limit)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The plan for people, as (label, text)."""
        lines = plan_lines(self.plan, self.forecast, self.limit, self._is_remote)
        if self.destination is not None:
            lines.append(("destination", self._destination_text(self.destination)))
            if self.destination.is_repository:
                notes = hub_notes(PlannedShards(self.plan), self.options.hub.public)
                lines += [("Hub limits", text) for text in notes]
        return lines

    @property
    def takes(self) -> dict[str, int]:
        """The memory that the forecast reports for this machine; nothing if a cluster does the work."""
        if self.options.engine != "local":
            return {}
        return dict.fromkeys(("low_bytes", "high_bytes"), self.forecast.total)

    @property
    def stop_file(self) -> Path:
        """A file that ends a run cleanly when it appears."""
        return stop_files(self._paths.state_dir, self.options.stop_file)[-1].absolute()

    def save_recipe(self, path: str | os.PathLike[str]) -> None:
        """Write the columns of a BIDS dataset as a recipe, so that a pilot and the full dataset agree."""
        if self.plan.table.saved is None:
            raise InputError("--save-recipe can only be used with a BIDS dataset read without another recipe.")
        if Path(path).suffix != ".toml":  # it could not be used as one, and may be another kind of file
            raise InputError(f"{os.fspath(path)!r} is not a name for a recipe.", hint="Use a name that ends in .toml.")
        try:
            Path(path).write_text(self.plan.table.saved, encoding="utf-8")
        except OSError as error:
            raise InputError(f"The recipe cannot be written to {str(path)!r}: {reason(error)}.") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, from which `brim build --plan` works on any machine that sees the source."""
        from brim.jobs.plan_storage import check_plan_place, receipts_at, save_to
        from brim.jobs.saved_plans import job_facts  # builds that run at once do not need them
        from brim.plans.saved_plan import save_plan

        check_plan_place(path)
        self.check()
        location, options, access = self._job().paths.location, self.options, self.options.access
        if options.fresh:
            raise InputError("--save cannot be used with --fresh.", hint="Choose an empty destination.")
        if options.append:
            raise InputError(
                "--save cannot be used with --append: the existing dataset may change before the plan runs."
            )
        if options.update and not location.is_repository:
            raise InputError(
                "--save --update can only be used with a destination on the Hub.",
                hint="Build on one machine, or choose another destination.",
            )
        receipts_at(path, access).all(self.plan.fingerprint)  # raises if there are receipts of another plan
        job = job_facts(location, options.hub, options.update)
        save_to(path, lambda file: save_plan(file, self.plan, job, job_versions()), access)

    def _destination_text(self, destination: Location) -> str:
        """Describe what a build would find at the destination, according to the ledger on this machine."""
        ledger = Ledger(dataset_paths(destination, self.options.state_dir, self.options.hub).ledger_dir)
        if ledger.job is None:
            if not destination.is_local:
                return f"{destination} (nothing sent from here yet)"
            return f"{destination} ({'there, and not built by brim' if destination.path.exists() else 'new'})"
        if self.options.append:
            rows = sum(receipt.rows for receipt in ledger.receipts.values())
            return f"{destination} has {rows:,} rows in {len(ledger.receipts):,} shards; these are appended to them"
        if ledger.job.fingerprint != self.plan.fingerprint:
            changes = "; ".join(changes_between(ledger.job.facts, self.plan.facts))
            return f"{destination} has another dataset ({changes}): --update or --fresh"
        count = len(self.plan.shards)
        finished = sum(shard.name in ledger.receipts for shard in self.plan.shards)
        remainder = f"; a build {'sends' if self._is_remote else 'writes'} the others" if finished < count else ""
        return f"{destination} has {finished:,} of {count:,} shards{remainder}"

    def check_plan(self) -> None:
        """As `check`, but for a plan only, which reads no content: files that git-annex keeps elsewhere have a size."""
        raise_refused(self.plan.table, planning=True)
        raise_unfit(self.plan.table, self.options.strict)

    def check(self) -> None:
        """InvalidFilesError if a file cannot be packaged; SourceError if rows are invalid or not as expected."""
        raise_refused(self.plan.table)
        raise_unfit(self.plan.table, self.options.strict)

    def run(self, progress: Progress | bool | None = None) -> BuildResult:
        """Build the missing shards at the destination."""
        self.check()
        return self._job().run(self.watch(progress))

    @property
    def _paths(self) -> DestinationPaths:
        if self.destination is None:
            raise InputError("This plan has no destination.", hint="Pass one: brim.plan(source, destination).")
        return dataset_paths(self.destination, self.options.state_dir, self.options.hub)

    def _job(self) -> Job:
        return Job(self.plan, self._paths, self.options, limit=self.limit, forecast=self.forecast)
