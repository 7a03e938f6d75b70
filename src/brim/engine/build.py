"""A plan with a destination: print it to see what would happen, run it to make it happen."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim.durable import failures
from brim.engine.destination import Destination, make_state, new_destination, state_folder
from brim.engine.ledger import Ledger
from brim.engine.lock import locked
from brim.engine.run import Run, RunOptions
from brim.engine.stop import Stop, stoppable
from brim.errors import DestinationError, InputError, Stopped
from brim.formats.card import CardFacts
from brim.formats.parquet import MAX_CELL_BYTES
from brim.memory.cores import usable_cores
from brim.memory.limit import Limit, effective_limit
from brim.plans.changes import changes_between
from brim.plans.checks import CheckOptions, check_files, check_paths_stay_home, raise_refused
from brim.plans.cut import CutOptions
from brim.plans.describe import plan_facts, plan_lines
from brim.plans.forecast import Forecast, forecast_build
from brim.plans.plan import EXTENSIONS, Format, Plan, make_plan
from brim.progress import Progress, Silent
from brim.sinks.folder import FolderSink, make_folder
from brim.sinks.hub.address import Address
from brim.sinks.hub.options import HubOptions, Room
from brim.sinks.hub.sink import HubSink
from brim.sources.filetable import FileTable

_HUB_ONLY = ("config", "message", "public", "direct", "create_pull")


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

    def __post_init__(self) -> None:
        if self.format not in EXTENSIONS:
            raise InputError(f"--format takes {' or '.join(EXTENSIONS)}, not {self.format!r}.")
        if self.workers is not None and self.workers < 1:
            raise InputError("--workers takes a number above zero.")
        if self.fresh and self.update:
            raise InputError("Choose one of --fresh (start over) and --update (keep what is unchanged).")


@dataclass(frozen=True, slots=True)
class Built:
    """What a build did. On the Hub: what was sent, in how many commits, and what the Hub says it holds."""

    destination: str
    rows: int
    files: int
    bytes: int
    shards: int
    written: int
    kept: int
    left_out: tuple[str, ...]
    sent_bytes: int = 0
    commits: int = 0
    visibility: str = ""
    pull_request: int = 0
    proved: str = ""


class Build:
    """A plan with a destination: print it to see what would happen, `run()` it to make it happen."""

    def __init__(self, table: FileTable, destination: str | os.PathLike[str] | None, options: BuildOptions) -> None:
        self.destination: Destination | None = None if destination is None else new_destination(destination)
        self.options = _with_split(options, table)
        self._check_hub_options()
        self.limit: Limit = effective_limit(options.memory)
        cell = MAX_CELL_BYTES if options.format == "parquet" else None
        check_paths_stay_home(table)
        checked = check_files(table, options.checks, cell)
        self.plan: Plan = make_plan(checked, options.format, options.cut, options.hub.folder)
        # One more than cores: while one waits for the disk or the line, the others hash.
        workers = options.workers or min(usable_cores() + 1, 8)
        self.forecast: Forecast = forecast_build(self.plan, self.limit, workers, hub=self._is_remote)

    @property
    def _is_remote(self) -> bool:
        return isinstance(self.destination, Address)

    def _check_hub_options(self) -> None:
        if self._is_remote:
            return
        plain = HubOptions()
        for name in _HUB_ONLY:
            if getattr(self.options.hub, name) != getattr(plain, name) and self.destination is not None:
                option = {"message": "commit-message", "create_pull": "create-pr"}.get(name, name)
                raise InputError(f"--{option} is for the Hub, and the destination is a folder.")

    @property
    def facts(self) -> dict[str, Any]:
        """The plan for programs."""
        return plan_facts(self.plan, self.forecast, self.limit)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The plan for people, as (label, text)."""
        lines = plan_lines(self.plan, self.forecast, self.limit)
        if self._is_remote:
            none = "0 B: shards are sent as they are made"
            lines = [(label, none if label == "temporary disk" else text) for label, text in lines]
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
            raise InputError(f"The recipe cannot be written to {str(path)!r}: {error.strerror}.") from error

    def _destination_text(self, destination: Destination) -> str:
        """What a build would find at the destination, as far as this machine's ledger tells."""
        ledger = Ledger(self._state(destination))
        if ledger.job is None:
            if isinstance(destination, Address):
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

    def check(self) -> None:
        """FilesRefused if a file cannot be packaged."""
        raise_refused(self.plan.table)

    def __str__(self) -> str:
        return "\n".join(f"{label:>14}  {text}" for label, text in self.lines)

    def run(self, progress: Progress | None = None) -> Built:
        """Build what is missing at the destination."""
        self.check()
        if self.destination is None:
            raise InputError("This plan has no destination.", hint="Give one to brim.plan(source, destination).")
        stop_file = Path(self.options.stop_file) if self.options.stop_file else None
        if stop_file is not None and stop_file.is_dir():
            raise InputError(f"--stop-file {str(stop_file)!r} is a folder.", hint="Give the name of a file.")
        if isinstance(self.destination, Path):
            if os.path.realpath(self.destination) == os.path.realpath(self.plan.table.files.root):
                raise DestinationError("The destination is the source itself.", hint="Give another folder.")
            make_folder(self.destination)
        state = self._state(self.destination)
        make_state(self.destination, state)
        stop_files = (state / "stop", *([stop_file] if stop_file else []))
        with locked(state), stoppable(*stop_files) as stop:
            ledger, progress = Ledger(state), progress or Silent()
            root = self.destination if isinstance(self.destination, Path) else state
            try:
                with failures(root):
                    return self._run(self.destination, ledger, progress, stop)
            except Stopped as stopped:
                if self.options.fresh:
                    raise Stopped(stopped.message, hint="Run it again without --fresh to continue.") from stopped
                raise
            finally:
                ledger.close()
                progress.finish()

    def _run(self, destination: Destination, ledger: Ledger, progress: Progress, stop: Stop) -> Built:
        if isinstance(destination, Path):
            folder = FolderSink(destination)
            folder.open(self.plan.fingerprint)
            run = Run(self.plan, folder, ledger, self._run_options(), progress, stop)
            return self._built(run, run.run())
        hub = self.options.hub
        room = Room(self.limit.bytes - self.forecast.total, self.forecast.workers, self.limit.asked_for)
        sink = HubSink(destination, hub, ledger, room, progress, stop.check)
        try:
            sink.open(self.plan.fingerprint)
            ledger.agree_with(b"".join(sink.manifests()))
            options = dataclasses.replace(
                self._run_options(),
                replace=hub.replace or self.options.fresh,
                split=hub.split,
                config=hub.config,
                card=self._hub_card,
                manifest_name=sink.manifest_name,
            )
            run = Run(self.plan, sink, ledger, options, progress, stop)
            built = self._built(run, run.run())
        finally:
            sink.close()
        return dataclasses.replace(
            built, commits=sink.commits, visibility=sink.visibility, pull_request=sink.pull, sent_bytes=run.sent_bytes
        )

    def _run_options(self) -> RunOptions:
        return RunOptions(self.forecast.workers, self.limit.bytes, fresh=self.options.fresh, update=self.options.update)

    def _hub_card(self, facts: CardFacts) -> CardFacts:
        assert isinstance(self.destination, Address)
        hub = self.options.hub
        return dataclasses.replace(
            facts,
            where=self.destination.repo,
            config=hub.config,
            folder=hub.folder,
            keep_splits=hub.split is not None,
            set_default=hub.set_default,
        )

    def _built(self, run: Run, receipts: list[Any]) -> Built:
        return Built(
            destination=str(self.destination),
            rows=len(self.plan.table),
            files=self.plan.table.file_count(),
            bytes=sum(receipt.size for receipt in receipts),
            shards=len(receipts),
            written=run.written,
            kept=len(receipts) - run.written,
            left_out=self.plan.table.left_out,
            proved=run.proved,
        )

    def _state(self, destination: Destination) -> Path:
        hub = self.options.hub
        return state_folder(destination, self.options.state, f"{hub.config}/{hub.split or '*'}")


def _with_split(options: BuildOptions, table: FileTable) -> BuildOptions:
    """A split that the user named is published alone: others stay as they are."""
    split = options.hub.split or table.recipe.get("split")
    return dataclasses.replace(options, hub=dataclasses.replace(options.hub, split=split))
