"""A plan with a destination: print it to see what would happen, run it to make it happen."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.formats.parquet_writer import MAX_CELL_BYTES
from brim.jobs.content import PlanContent
from brim.jobs.job import BuildResult, Job
from brim.jobs.spec import (
    JobSettings,
    Spec,
    check_hub_limits,
    check_options,
    dataset_at,
    forecast_at,
    limits_of,
    preflight,
    stop_files,
)
from brim.memory.limit import Limit, effective_limit
from brim.options.groups import CheckFileOptions, ShardOptions
from brim.plans.describe_plan import BuildForecast, plan_facts, plan_lines
from brim.plans.file_checks import check_files, check_paths_stay_home, raise_refused, raise_unfit
from brim.plans.fingerprint import changes_between
from brim.plans.plan import Plan, make_plan
from brim.progress import Progress, Watch, given_or_silent
from brim.records import dataclass
from brim.sources.file_table import FileTable
from brim.state.atomic_files import reason
from brim.state.ledger import Ledger, job_versions
from brim.storage.location import Location
from brim.stores.destination import parse_destination
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
        self.options = _with_split(options, table)
        check_options("build", options, self.destination)
        self.limit: Limit = effective_limit(options.memory)
        cell = MAX_CELL_BYTES if options.format == "parquet" else None
        check_paths_stay_home(table)
        checked = check_files(table, options, cell)
        self.plan: Plan = make_plan(checked, options.format, options.only(ShardOptions), options.hub.folder)
        check_hub_limits(PlanContent(self.plan), self.destination)
        self.forecast: BuildForecast = forecast_at(self.destination, self.plan, self.limit, options.workers)

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
        """The plan for programs."""
        return plan_facts(self.plan, self.forecast, self.limit)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The plan for people, as (label, text)."""
        lines = plan_lines(self.plan, self.forecast, self.limit, self._is_remote)
        if self.destination is not None:
            lines.append(("destination", self._destination_text(self.destination)))
        if self.destination is not None and self.destination.is_repository:
            lines += [("Hub limits", text) for text in limits_of(PlanContent(self.plan), self.options.hub)]
        return lines

    @property
    def takes(self) -> dict[str, int]:
        """What the forecast says for this machine: nothing of the nodes of a cluster."""
        if self.options.engine != "local":
            return {}
        return dict.fromkeys(("low_bytes", "high_bytes"), self.forecast.total)

    @property
    def stop_file(self) -> Path:
        """Making this file ends a run cleanly."""
        return stop_files(self._spec().layout.state, self.options)[-1].absolute()

    def save_recipe(self, path: str | os.PathLike[str]) -> None:
        """Write the columns of a BIDS dataset as a recipe, so that a pilot and the whole dataset agree."""
        if self.plan.table.saved is None:
            raise InputError("--save-recipe can only be used with a BIDS dataset read without another recipe.")
        if Path(path).suffix != ".toml":  # it could not be given as one, and may be something else
            raise InputError(f"{os.fspath(path)!r} is not a name for a recipe.", hint="Use a name that ends in .toml.")
        try:
            Path(path).write_text(self.plan.table.saved, encoding="utf-8")
        except OSError as error:
            raise InputError(f"The recipe cannot be written to {str(path)!r}: {reason(error)}.") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, from which `brim build --plan` works on any machine that sees the source."""
        from brim.jobs.plan_storage import check_plan_place, receipts_at, save_to
        from brim.jobs.saved_build import job_facts  # what is built at once has no use for them
        from brim.plans.saved_plan import save_plan

        check_plan_place(path)
        self.check()
        spec = self._spec()
        preflight(spec)
        destination = spec.layout.destination
        if self.options.fresh:
            raise InputError("--save cannot be used with --fresh.", hint="Choose an empty destination.")
        if self.options.append:
            raise InputError(
                "--save cannot be used with --append: the existing dataset may change before the plan runs."
            )
        if self.options.update and not destination.is_repository:
            raise InputError(
                "--save --update can only be used with a destination on the Hub.",
                hint="Build on one machine, or choose another destination.",
            )
        access = self.options.access
        receipts_at(path, access).all(self.plan.fingerprint)  # nobody may mix two plans
        job = job_facts(destination, self.options.hub, self.options.update)
        save_to(path, lambda file: save_plan(file, self.plan, job, job_versions()), access)

    def _destination_text(self, destination: Location) -> str:
        """What a build would find at the destination, as far as this machine's ledger tells."""
        ledger = Ledger(dataset_at(destination, self.options.state_dir, self.options.hub).books)
        if ledger.job is None:
            if not destination.is_local:
                return f"{destination} (nothing sent from here yet)"
            return f"{destination} ({'there, and not built by brim' if destination.path.exists() else 'new'})"
        if self.options.append:
            rows = sum(receipt.rows for receipt in ledger.receipts.values())
            return f"{destination} holds {rows:,} rows in {len(ledger.receipts):,} shards; these come behind them"
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
        raise_unfit(self.plan.table, self.options.strict)

    def check(self) -> None:
        """InvalidFilesError if a file cannot be packaged; SourceError if rows are out of line or not as expected."""
        raise_refused(self.plan.table)
        raise_unfit(self.plan.table, self.options.strict)

    def run(self, progress: Progress | bool | None = None) -> BuildResult:
        """Build what is missing at the destination."""
        self.check()
        return Job(self._spec()).run(self.watch(progress))

    def _spec(self) -> Spec:
        if self.destination is None:
            raise InputError("This plan has no destination.", hint="Pass one: brim.plan(source, destination).")
        layout = dataset_at(self.destination, self.options.state_dir, self.options.hub)
        return Spec("build", PlanContent(self.plan), layout, self.options, self.limit, forecast=self.forecast)


def _with_split(options: BuildSettings, table: FileTable) -> BuildSettings:
    """A split that the user named is published alone: others stay as they are."""
    split = options.hub.split or table.recipe.get("split")
    if options.append and len(table.splits) == 1:
        split = table.splits[0].name
    return dataclasses.replace(options, hub=dataclasses.replace(options.hub, split=split))
