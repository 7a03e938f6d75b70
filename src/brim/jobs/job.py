"""The one runner. Every verb, whatever its destination and wherever it is computed, goes this way:

    lock → settle with what was there → [make units → finish] → bring → publish

A build has nothing to make; a part of a saved plan is a run with a share. Run again after anything, a job does what is
missing and nothing else: a file is on disk before its receipt, and a receipt before anything depends on it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import DestinationUnavailableError
from brim.execution.unit_receipts import UnitStats
from brim.formats.card import write_waiting_card
from brim.jobs.append import AppendBase, AppendedContent, appended_content
from brim.jobs.content import Content, PlanContent
from brim.jobs.next_steps import next_steps
from brim.jobs.open_store import Books, carrying_bytes, dataset_there, open_books, open_store
from brim.jobs.spec import Spec, check_hub_limits, limits_of, preflight, stop_files
from brim.jobs.upload_shards import DeliveryOptions, MakeBackend, Run, Share
from brim.memory.limit import Limit, usable_cores
from brim.memory.meter import tree_bytes
from brim.options.declare import warn_deprecated
from brim.options.groups import EngineOptions
from brim.plans.known_rows import planned_again, without_known_rows
from brim.plans.plan import Plan
from brim.progress import Progress
from brim.records import dataclass
from brim.sizes import format_size, plural
from brim.state.ledger import Receipt, SourceRecord
from brim.stores.destination import PublishOptions
from brim.stores.hub_store import HubStore
from brim.stores.store import CardMaker, Moved, SendingRoom
from brim.verification.repair import refuse_append_to_damaged
from brim.wording import Result

if TYPE_CHECKING:
    from brim.execution.ray_cluster import Cluster, NodeRequirements
    from brim.execution.scheduler import Task
    from brim.jobs.caches import Kept

_LOOKS = 5  # at a destination that others append to
_MOST_SENDERS = 4  # of what was computed: it lies there, and only has to be sent
ALONE = Share()


@dataclass(frozen=True, slots=True, repr=False)
class BuildResult(Result):
    """What a build or a selection has written.

    On the Hub also what was sent, in how many commits, and what the Hub lists.
    """

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
    file_bytes: int = 0  # of the source's files, as the plan reports them; `bytes` is the size of the shards
    steps: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in BuildResult.__dataclass_fields__ if name != "steps"}

    def next_steps(self) -> list[tuple[str, str]]:
        """Return the commands that load and verify the result."""
        return list(self.steps)

    @property
    def place(self) -> str:
        """Where it is, and who sees it."""
        return f"{self.destination} ({self.visibility})" if self.visibility else self.destination

    @property
    def commits_made(self) -> str:
        """How it came to the Hub; of other places nothing."""
        if not self.visibility:
            return ""
        pull = f", by pull request {self.pull_request}" if self.pull_request else ""
        return f" in {plural(self.commits, 'commit')}{pull}"

    def summary(self) -> list[tuple[str, str]]:
        """Return what is at the destination, for people."""
        files = f", {plural(self.files, 'file')}" if self.files else ""
        kept = f", {self.kept:,} kept" if self.kept else ""
        brought = f"sent, {format_size(self.sent_bytes)}" if self.visibility else "written"
        shards = f"{self.shards:,} ({self.written:,} {brought}{kept}){self.commits_made}"
        lines = [("destination", self.place), ("contents", f"{plural(self.rows, 'row')}{files}")]
        if self.file_bytes:
            lines.append(("size of the files", format_size(self.file_bytes)))
        lines += [("shards", shards), ("size", format_size(self.bytes))]
        if self.left_out:
            left = plural(len(self.left_out), "file")
            lines.append(("skipped", f"{left} too large for the format, listed in README.md"))
        return [*lines, ("verified", self.proved)] if self.proved else lines


@dataclass(frozen=True, slots=True, repr=False)
class MapResult(BuildResult):
    """What map, tokenize or embed has written, and what was computed for it.

    A job that was finished before has computed no units.
    """

    stats: UnitStats = field(default_factory=UnitStats)
    quarantine: Path | str | None = None  # an address, if it is next to a file in an object store
    counts: Mapping[str, int] = field(default_factory=dict)
    cached: Kept | None = None  # the files of a result that stays in the cache

    @classmethod
    def from_build(cls, built: BuildResult, stats: UnitStats | None = None, **more: Any) -> MapResult:
        return cls(**built.as_dict(), steps=built.steps, stats=stats or UnitStats(), **more)

    @property
    def units(self) -> int:
        return len(self.stats.receipts)

    @property
    def computed(self) -> int:
        """The number of units that this run has computed."""
        return self.stats.computed

    @property
    def retries(self) -> int:
        return self.stats.retries

    @property
    def bad_rows(self) -> int:
        """The number of rows that were left out because they failed."""
        return self.stats.bad_rows

    @property
    def bad_batches(self) -> int:
        """The number of batches that were left out as a whole."""
        return self.stats.bad_batches

    @property
    def encoders(self) -> Mapping[str, int]:
        """The number of units that each encoder of tokenize has processed."""
        return self.stats.encoders

    @property
    def peak_bytes(self) -> int:
        return self.stats.peak_bytes

    @property
    def built(self) -> BuildResult:
        """Deprecated: the result itself."""
        warn_deprecated("MapResult.built is the result itself: write result.rows.")
        return self

    @property
    def outcome(self) -> UnitStats:
        """Deprecated: the result has these values itself."""
        warn_deprecated("MapResult.outcome is part of the result: write result.retries.")
        return self.stats

    def as_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {**BuildResult.as_dict(self), "units": self.units, "computed": self.computed}
        values |= {"retries": self.retries, "bad_rows": self.bad_rows, "bad_batches": self.bad_batches}
        values |= {"peak_bytes": self.peak_bytes, **({"encoders": self.encoders} if self.encoders else {})}
        return {**values, **self.counts, "quarantine": self.quarantine}

    def summary(self) -> list[tuple[str, str]]:
        """Return what was done, for people."""
        done, units = self.stats, self.units
        contents = f"{plural(self.rows, 'row')}, {format_size(self.bytes)} in {plural(self.shards, 'shard')}"
        lines = [("destination", self.place), ("contents", contents)]
        lines += [(name, f"{number:,}") for name, number in self.counts.items()]
        kept = f", {units - done.computed:,} kept" if units > done.computed else ""
        retried = f", {done.retries:,} retried" if done.retries else ""
        workers = f", {plural(done.workers, 'worker')}" if done.workers else ""
        counted = f"{done.computed:,} done{kept}{retried}{workers}" if units else "nothing to do: all were done before"
        lines.append(("units", counted))
        if self.visibility:
            lines.append(("sent", f"{format_size(self.sent_bytes)}{self.commits_made}"))
        if done.bad_rows:
            where = f", kept in {self.quarantine}" if self.quarantine else ""
            lines.append(("skipped", f"{_left_out(done)}{where}"))
        if self.proved:
            lines.append(("verified", self.proved))
        return [*lines, ("peak memory", format_size(done.peak_bytes))] if done.peak_bytes else lines


def _left_out(done: UnitStats) -> str:
    """The rows that failed. A batch that may not be done in parts is left out as a whole, and is not called rows."""
    batches, rows = done.bad_batches, done.bad_rows - done.bad_batch_rows
    if not batches:
        return f"{plural(rows, 'row')} that failed"
    together = plural(done.bad_batch_rows, "row")
    said = f"1 batch of {together}" if batches == 1 else f"{batches:,} batches, {together} together,"
    also = f" and {plural(rows, 'row')}" if rows else ""
    return f"{said}{also} that failed (--splittable finds the rows)"


@contextmanager
def workplace(engine: EngineOptions) -> Iterator[Cluster | None]:
    """The cluster that a job runs on, connected for as long as it does; None: this machine."""
    if engine.engine == "local":
        yield None
        return
    from brim.execution.ray_cluster import connected  # of use where there is a cluster

    with connected(engine.address) as cluster:
        yield cluster


class Job:
    """A spec that may run: what can be refused without looking at the destination is refused here."""

    def __init__(self, spec: Spec) -> None:
        preflight(spec)
        self.spec = spec

    @property
    def limit(self) -> Limit:
        return self.spec.limit

    @property
    def stop_file(self) -> Path:
        """Making this file ends a run cleanly."""
        return stop_files(self.spec.layout.state, self.spec.how)[-1].absolute()

    def run(self, progress: Progress | None = None, share: Share = ALONE) -> BuildResult:
        """Do what is missing. With a share, bring that and publish nothing. A job with a step returns a MapResult."""
        spec, progress = self.spec, progress or Progress()
        if spec.limit.warning and spec.how.engine == "local":
            progress.note(spec.limit.warning)
        for note in () if isinstance(spec.source, PlanContent) else spec.source.notes:
            progress.note(note)
        with workplace(spec.how) as cluster:
            executor = self._brought_by(cluster)
            with open_books(spec.layout, spec.how, progress, share) as books:
                done = self._run(books, share, cluster, executor)
        return done

    def _run(self, books: Books, share: Share, cluster: Cluster | None, executor: MakeBackend | None) -> BuildResult:
        spec = self.spec
        if isinstance(spec.source, PlanContent) and spec.how.append:
            return self._append(spec.source, books, executor)
        if isinstance(spec.source, PlanContent):
            if share is ALONE:  # parts write shards before the destination's own ledger knows of a job
                spec.layout.refuse_strangers(books.ledger, spec.how.fresh)
            return self.bring(spec.source, books, share, executor)
        from brim.jobs.compute import Computing  # a build has no use for it, and would hold it

        return Computing(self, spec.source, cluster, books).run(share)

    def _append(self, new: PlanContent, books: Books, executor: MakeBackend | None) -> BuildResult:
        """Bring new rows behind those that are there. What changes meanwhile is looked at again."""
        layout, hub = self.spec.layout, self.spec.how.hub
        refuse_append_to_damaged(books.ledger, str(layout.destination))
        folder = layout.destination.is_local
        splits = None if hub.split is None or not layout.destination.is_repository else [hub.split]
        for _ in range(_LOOKS):
            try:
                with dataset_there(layout, self.spec.how, books) as (there, address):
                    ledger = books.ledger if folder and books.ledger.job is not None else None
                    without_known = functools.partial(self._without_known, books, address)
                    content = appended_content(there, new.plan, hub.config, hub.folder, ledger, splits, without_known)
                if isinstance(content, AppendedContent) and content.is_there:
                    books.progress.note("these rows are there already: nothing is appended")
                return self.bring(content, books, ALONE, executor)
            except Moved:
                books.progress.note("somebody else has changed what is there: looking again")
        raise DestinationUnavailableError(
            "The destination kept changing while brim tried to append, so nothing was appended.",
            hint="Run the same command to continue; uploads that finished are kept.",
        )

    def _without_known(self, books: Books, address: str, plan: Plan, base: AppendBase) -> Plan | None:
        """The plan without the rows that the dataset already holds; None if it holds all of them."""
        from brim.sources.dataset_files import named_files  # other builds have no use for it

        if plan.table.files.ranges is not None:
            return plan  # values of another dataset, whose names may be the same for all
        how = self.spec.how
        names = {split: [receipt.name for receipt in of] for split, of in base.receipts.items()}
        try:
            shards = named_files(address, names, how.hub.config, how.access)
        except KeyError as error:  # a shard has another name since
            raise Moved from error
        note, check = books.progress.note, books.stop.check
        table, known = without_known_rows(plan, shards, how.allow_duplicate_paths, note, check)
        if not known:
            return plan
        note(f"{plural(known, 'row')} of {len(plan.table):,} already in the dataset: skipped")
        return planned_again(plan, table) if len(table) else None

    def _brought_by(self, cluster: Cluster | None) -> MakeBackend | None:
        """What brings the shards of a build, if that is not this process."""
        source, forecast = self.spec.source, self.spec.forecast
        if cluster is None or forecast is None or not isinstance(source, PlanContent):
            return None
        from brim.execution.ray_cluster import NodeRequirements, sample_of

        return self.on_cluster(cluster, NodeRequirements(files=sample_of(source.plan.table.files)), forecast.worker)

    def on_cluster(self, cluster: Cluster, requirements: NodeRequirements, shard_bytes: int) -> MakeBackend:
        """Return what uploads shards from the nodes of a cluster. Each needs `shard_bytes`, and memory to send it."""
        from brim.execution.ray_backend import INTERPRETER_BYTES, RayBackend, check_memory
        from brim.execution.ray_worker import UploadOrder

        spec, limit_bytes = self.spec, self.limit.bytes
        need = INTERPRETER_BYTES + shard_bytes + carrying_bytes(spec.layout.destination, spec.how.hub)
        check_memory(need, limit_bytes)

        def make_backend(run: Run) -> Any:
            carrier = run.sink.carrier()

            def order(task: Task) -> UploadOrder:
                slice = run.content.slice(task.work)
                return UploadOrder(task.name, slice, carrier, run.known_sha256(task.work))

            checked = replace(requirements, carrier=carrier)
            return RayBackend(
                cluster, checked, need, limit_bytes, run, run.progress, make_order=order, workers=spec.how.workers
            )

        return make_backend

    def bring(
        self,
        content: Content,
        books: Books,
        share: Share,
        executor: MakeBackend | None,
        *,
        fresh: bool | None = None,
        source: SourceRecord | None = None,
        published_source: SourceRecord | None = None,
    ) -> BuildResult:
        """Bring what is missing at the destination, and publish it unless others share it.

        `source` is what a computed job has read.
        """
        spec, how = self.spec, self.spec.how
        workers, free_bytes = self._room()
        fresh = how.fresh if fresh is None else fresh
        check_hub_limits(content, spec.layout.destination)
        # What brim did not write stays in a folder or bucket; a repository keeps it, and a file was asked for by name.
        replaced = spec.layout.place.is_repository and (how.hub.replace_foreign or fresh)
        replaced = replaced or (spec.layout.apart and fresh)
        room = SendingRoom(free_bytes, workers, self.limit.asked_for)
        base = content.base if isinstance(content, AppendedContent) else None
        if isinstance(content, AppendedContent):
            kept = content.kept
            share = replace(share, received=lambda ledger: kept)
        with open_store(spec.layout, how, content, room, books, share) as at:
            if isinstance(at.store, HubStore) and share.only is None:
                for text in limits_of(content, replace(how.hub, public=at.store.holds_more)):
                    books.progress.note(f"the Hub: {text}")
            options = DeliveryOptions(
                workers,
                self.limit.bytes,
                fresh=fresh,
                update=how.update or base is not None,
                replace=replaced,
                split=how.hub.split if at.store.staged else None,
                config=how.hub.config,
                card=at.card,
                manifest_name=at.manifest_name,
                manifests=at.manifests,
                share=share,
                executor=executor,
                waiting_card=None if base is None else _waiting_card(base, how.hub),
                builds_on=None if base is None else [r.piece for of in base.receipts.values() for r in of],
                source=source,
                published_source=published_source,
            )
            run = Run(content, at.store, books.ledger, options, books.progress, books.stop)
            receipts = run.run()
        built = built_of(spec, receipts, content.rows, run.written)
        built = replace(built, files=content.files, left_out=content.left_out, proved=run.proved)
        built = replace(built, file_bytes=int(content.facts.get("bytes", 0)))
        if not spec.layout.place.is_local:
            built = replace(built, sent_bytes=run.sent_bytes)
        if isinstance(at.store, HubStore):
            hub = at.store
            built = replace(built, commits=hub.commits, visibility=hub.visibility, pull_request=hub.pull)
        return built

    def _room(self) -> tuple[int, int]:
        """How many shards are on their way at a time, and what the limit leaves beside what they take themselves."""
        forecast = self.spec.forecast
        if forecast is not None:
            return forecast.workers, self.limit.bytes - forecast.total
        workers = 1 if self.spec.layout.apart else min(usable_cores() + 1, _MOST_SENDERS)
        return workers, max(self.limit.bytes - tree_bytes(), 0)


def _waiting_card(base: AppendBase, hub: PublishOptions) -> CardMaker:
    there = {split: [receipt.name for receipt in of] for split, of in base.receipts.items()}
    return lambda card, names: write_waiting_card(card, hub.config, hub.folder, there)


def built_of(spec: Spec, receipts: Sequence[Receipt], rows: int, written: int = 0) -> BuildResult:
    """Sum up receipts. The file with the kept columns, next to a file of vectors, is not counted as a shard."""
    shards = len(receipts)
    if spec.layout.apart:
        kept_columns = f"{Path(str(spec.layout.destination)).name}.rows.parquet"
        shards = sum(receipt.name != kept_columns for receipt in receipts)
        written = min(written, shards)
    return BuildResult(
        destination=str(spec.layout.destination),
        rows=rows,
        files=0,
        bytes=sum(receipt.size for receipt in receipts),
        shards=shards,
        written=written,
        kept=shards - written,
        left_out=(),
        steps=next_steps(spec, receipts),
    )
