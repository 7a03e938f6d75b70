"""Build a dataset at a destination: plan, run what is missing, remember it, finish.

The order of things is what makes a crash harmless. A shard is on disk under its name before its receipt
is; the receipt is on disk before anything depends on it; the card that makes the dataset loadable comes
last. Running the same build again does what is missing and nothing else.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brim.durable import failures, sync_folder
from brim.engine.keep import forget_others, reuse
from brim.engine.ledger import LEDGER, STATE, Job, Ledger, Receipt, state_folder
from brim.engine.lock import locked
from brim.engine.progress import Progress, Silent
from brim.engine.shard import splice_of
from brim.engine.stop import Stop, stoppable
from brim.errors import DestinationError, InputError, PlanChanged, SinkFailed, Stopped
from brim.formats.card import CARD, CardFacts, SplitFacts, write_card, write_unfinished_card
from brim.formats.parquet import MAX_CELL_BYTES
from brim.memory.cores import usable_cores
from brim.memory.limit import Limit, effective_limit
from brim.plans.changes import changes_between
from brim.plans.checks import CheckOptions, check_files, check_paths_stay_home, raise_refused
from brim.plans.cut import CutOptions, Shard
from brim.plans.describe import plan_facts, plan_lines
from brim.plans.forecast import Forecast, forecast_build
from brim.plans.plan import EXTENSIONS, Format, Plan, make_plan
from brim.sinks.folder import FolderSink
from brim.sizes import format_size
from brim.sources.features import as_yaml
from brim.sources.filetable import FileTable


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

    def __post_init__(self) -> None:
        if self.format not in EXTENSIONS:
            raise InputError(f"--format takes {' or '.join(EXTENSIONS)}, not {self.format!r}.")
        if self.workers is not None and self.workers < 1:
            raise InputError("--workers takes a number above zero.")
        if self.fresh and self.update:
            raise InputError("Choose one of --fresh (start over) and --update (keep what is unchanged).")


@dataclass(frozen=True, slots=True)
class Built:
    """What a build did."""

    destination: str
    rows: int
    files: int
    bytes: int
    shards: int
    written: int
    kept: int
    left_out: tuple[str, ...]


class Build:
    """A plan with a destination: print it to see what would happen, `run()` it to make it happen."""

    def __init__(self, table: FileTable, destination: str | os.PathLike[str] | None, options: BuildOptions) -> None:
        self.destination = None if destination is None else _folder(destination)
        self.options = options
        self.limit: Limit = effective_limit(options.memory)
        cell = MAX_CELL_BYTES if options.format == "parquet" else None
        check_paths_stay_home(table)
        self.plan: Plan = make_plan(check_files(table, options.checks, cell), options.format, options.cut)
        # One more than cores: while one waits for the disk, the others hash.
        workers = options.workers or min(usable_cores() + 1, 8)
        self.forecast: Forecast = forecast_build(self.plan, self.limit, workers)

    @property
    def facts(self) -> dict[str, Any]:
        """The plan for programs."""
        return plan_facts(self.plan, self.forecast, self.limit)

    @property
    def lines(self) -> list[tuple[str, str]]:
        """The plan for people, as (label, text)."""
        lines = plan_lines(self.plan, self.forecast, self.limit)
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

    def _destination_text(self, destination: Path) -> str:
        """What a build would find at the destination."""
        ledger = Ledger(state_folder(destination, self.options.state))
        if ledger.job is None:
            return f"{destination} ({'there, and not built by brim' if destination.exists() else 'new'})"
        if ledger.job.fingerprint != self.plan.fingerprint:
            changes = "; ".join(changes_between(ledger.job.facts, self.plan.facts))
            return f"{destination} holds another dataset ({changes}): --update or --fresh"
        done = sum(shard.name in ledger.receipts for shard in self.plan.shards)
        return f"{destination} holds {done:,} of {len(self.plan.shards):,} shards; a build writes the others"

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
        if os.path.realpath(self.destination) == os.path.realpath(self.plan.table.files.root):
            raise DestinationError("The destination is the source itself.", hint="Give another folder.")
        stop_file = Path(self.options.stop_file) if self.options.stop_file else None
        if stop_file is not None and stop_file.is_dir():
            raise InputError(f"--stop-file {str(stop_file)!r} is a folder.", hint="Give the name of a file.")
        sink = FolderSink(self.destination)
        sink.open()
        state = self._state(self.destination)
        stop_files = (state / "stop", *([stop_file] if stop_file else []))
        with locked(state), stoppable(*stop_files) as stop:
            run = _Run(self, sink, Ledger(state), progress or Silent(), stop)
            try:
                with failures(self.destination):
                    return run.run()
            except Stopped as stopped:
                if self.options.fresh:
                    raise Stopped(stopped.message, hint="Run it again without --fresh to continue.") from stopped
                raise
            finally:
                run.ledger.close()
                run.progress.finish()

    def _state(self, destination: Path) -> Path:
        """Where the ledger lives. The folder .brim is made in any case: it marks what brim built."""
        state = state_folder(destination, self.options.state)
        try:
            (destination / STATE).mkdir(exist_ok=True)
            state.mkdir(parents=True, exist_ok=True)
            for name in ("lock", LEDGER):
                with open(state / name, "ab"):
                    pass
            sync_folder(state)
        except OSError as error:
            raise DestinationError(
                f"The folder of the ledger, {str(state)!r}, cannot be used: {error.strerror}.",
                hint="Choose another one with --state DIR.",
            ) from error
        return state


def _folder(destination: str | os.PathLike[str]) -> Path:
    text = os.fspath(destination)
    if "://" in text:
        scheme = text.partition("://")[0]
        raise InputError(f"brim cannot build to {scheme}:// yet.", hint="Give a folder.")
    return Path(os.path.abspath(text))


class _Run:
    """One run of a build, with its lock held."""

    def __init__(self, build: Build, sink: FolderSink, ledger: Ledger, progress: Progress, stop: Stop) -> None:
        self.plan, self.options, self.forecast = build.plan, build.options, build.forecast
        self.limit, self.destination = build.limit, build.destination
        self.sink, self.ledger, self.progress, self.stop = sink, ledger, progress, stop
        self.job = self.plan.fingerprint[:16]
        self.written = 0
        self._abort = threading.Event()

    def run(self) -> Built:
        self.sink.sweep()
        self._settle_with_previous()
        self._refuse_strangers()
        if self.ledger.job is None or self.ledger.job.fingerprint != self.plan.fingerprint:
            self.ledger.begin(Job(self.plan.fingerprint, self.plan.facts, _versions(), self.plan.table.left_out))
        todo = self._todo()
        if todo or not self.ledger.done:
            self._need_room(todo)
            self.sink.write_text(CARD, write_unfinished_card(self.sink.read_text(CARD)))
        self.progress.start("build", sum(s.file_bytes for s in todo), len(todo), self.limit.bytes)
        self._run_shards(todo)
        receipts = [self.ledger.receipts[shard.name] for shard in self.plan.shards]
        forget_others(self.sink, self.ledger, {shard.name for shard in self.plan.shards})
        self.sink.write_text(CARD, self._card(receipts))
        self.ledger.finish(receipts)
        return Built(
            destination=str(self.destination),
            rows=len(self.plan.table),
            files=self.plan.table.file_count(),
            bytes=sum(receipt.size for receipt in receipts),
            shards=len(receipts),
            written=self.written,
            kept=len(receipts) - self.written,
            left_out=self.plan.table.left_out,
        )

    def _settle_with_previous(self) -> None:
        """Continue the same job; start over or update another one only if asked to."""
        previous = self.ledger.job
        if previous is None:
            return
        if self.options.fresh:
            forget_others(self.sink, self.ledger, set())
        elif previous.fingerprint != self.plan.fingerprint and not self.options.update:
            changes = changes_between(previous.facts, self.plan.facts)
            raise PlanChanged(
                f"The destination holds another dataset: {'; '.join(changes)}.",
                hint="Use --update to bring it up to date (unchanged shards are kept), --fresh to start over, or "
                "another folder.",
                changes=changes,
            )

    def _refuse_strangers(self) -> None:
        ours = {shard.name for shard in self.plan.shards} | self.ledger.names
        strangers = [name for name in self.sink.shards() if name not in ours]
        if strangers:
            raise DestinationError(
                f"The destination holds {len(strangers)} file(s) that brim did not write there, such as "
                f"{strangers[0]}; they would become part of the dataset.",
                hint="Move them away, or choose another folder.",
            )

    def _todo(self) -> list[Shard]:
        """The shards without a receipt that still holds; others are kept, moved or hashed again."""
        if any(receipt.job != self.job for receipt in self.ledger.known.values()):
            reuse(self.plan, self.sink, self.ledger, self.job)
        todo = []
        doubtful = []
        for shard in self.plan.shards:
            receipt = self.ledger.receipts.get(shard.name)
            if receipt is None or receipt.job != self.job or self.sink.size(shard.name) != receipt.size:
                todo.append(shard)
            elif receipt.mtimes != self.plan.shard_mtimes(shard):
                doubtful.append((shard, receipt))
        if doubtful:
            self.progress.note(f"{len(doubtful)} shard(s) have files with a new date: comparing their content")
            self.progress.start("compare", sum(s.file_bytes for s, _ in doubtful), len(doubtful), self.limit.bytes)
        for shard, receipt in doubtful:
            sha256 = splice_of(self.plan, shard).sha256(self._advance)
            self.progress.shard(shard.name, receipt.size, sha256, "compared")
            if sha256 == receipt.sha256:
                self.ledger.add(self._receipt(shard, receipt.size, receipt.sha256))
            else:
                self.progress.note(f"{shard.name}: the content of its files changed, so it is written again")
                todo.append(shard)
        return sorted(todo, key=lambda shard: shard.start)

    def _need_room(self, todo: list[Shard]) -> None:
        need, free = sum(shard.file_bytes for shard in todo), self.sink.free_bytes()
        if free is not None and need > free:
            raise SinkFailed(
                f"The destination has {format_size(free)} of free disk and the shards to write take "
                f"{format_size(need)}; nothing was written.",
                hint="Make room, then run the same command to continue.",
                need_bytes=need,
                free_bytes=free,
            )

    def _run_shards(self, todo: list[Shard]) -> None:
        """Write shards, several at a time; the first failure drops the others cleanly."""
        queue = iter(todo)
        with ThreadPoolExecutor(self.forecast.workers, "shard") as pool:
            running: set[Future[Receipt]] = set()
            try:
                while True:
                    while len(running) < self.forecast.workers and (shard := next(queue, None)) is not None:
                        if shard.name in self.ledger.receipts:
                            self.ledger.forget(shard.name)  # before its file becomes another one
                        running.add(pool.submit(self._write, shard))
                    if not running:
                        return
                    finished, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                    self.stop.check()
                    for future in finished:
                        receipt = future.result()
                        self.written += 1
                        self.progress.shard(receipt.name, receipt.size, receipt.sha256, "written")
            except BaseException:
                self._abort.set()
                raise

    def _write(self, shard: Shard) -> Receipt:
        splice = splice_of(self.plan, shard)
        sha256 = self.sink.put(shard.name, splice, self._advance)
        receipt = self._receipt(shard, splice.size, sha256)
        self.ledger.add(receipt)  # by the worker itself, so that a stop loses nothing that is finished
        return receipt

    def _advance(self, size: int) -> None:
        if self._abort.is_set():
            raise _Dropped
        self.stop.check()
        self.progress.advance(size)

    def _receipt(self, shard: Shard, size: int, sha256: str) -> Receipt:
        key, mtimes = self.plan.shard_key(shard), self.plan.shard_mtimes(shard)
        return Receipt(shard.name, shard.split, shard.rows, size, sha256, key, mtimes, self.job)

    def _card(self, receipts: list[Receipt]) -> str:
        plan = self.plan
        splits = []
        for split in plan.table.splits:
            of = [receipt for receipt in receipts if receipt.split == split.name]
            splits.append(SplitFacts(split.name, split.stop - split.start, sum(r.size for r in of), len(of)))
        columns = []
        for column in plan.schema:
            media = plan.table.columns.get(column.name)
            kind = str(column.type) if media is None else f"{'list of ' if media.is_list else ''}{media.kind}"
            columns.append((column.name, kind))
        features = None if plan.table.features is None else as_yaml(plan.table.features)
        facts = CardFacts(splits, features, EXTENSIONS[plan.format], columns, plan.table.left_out, plan.table.about)
        return write_card(facts, self.sink.read_text(CARD))


class _Dropped(Exception):
    """Another shard failed; this one is dropped. Never leaves the engine."""


def _versions() -> dict[str, str]:
    import pyarrow

    from brim import __version__

    return {"brim": __version__, "pyarrow": pyarrow.__version__}
