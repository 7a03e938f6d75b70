"""The runner. Every job, whatever its command, its destination and where it is computed, runs in this order:

    lock → reconcile → run units → finish → upload → publish

A build has no units: its shards are packaged while they are uploaded. A part of a saved plan is the same job with
another scope. A file is durable before its receipt, and a receipt before anything depends on it; so a job that is run
again after an interruption does only the missing work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brim.errors import DestinationUnavailableError, StoppedError
from brim.execution.scheduler import Retries, Task, TaskQueue, run_tasks
from brim.execution.thread_backend import ThreadBackend
from brim.formats.card import CardFacts
from brim.jobs.destination import (
    Destination,
    DestinationChanged,
    Existing,
    Publication,
    Run,
    UploadBudget,
    UploadsExpired,
    open_destination,
)
from brim.jobs.destination_paths import DestinationPaths
from brim.jobs.job_lock import lock_destination, share_destination
from brim.jobs.manifest import DatasetCard, make_manifests
from brim.jobs.preflight import (
    ComputePlan,
    JobSettings,
    check_hub_limits,
    check_job,
    computed_limit,
    hub_notes,
    stop_files,
    upload_bytes,
)
from brim.jobs.reconcile import WHOLE_JOB, Reconciliation, Scope, refuse_foreign_in_folder
from brim.jobs.results import BuildResult, next_steps
from brim.jobs.shard_set import PlannedShards, ShardSet
from brim.memory.limit import Limit, usable_cores
from brim.memory.meter import tree_bytes
from brim.options.groups import EngineOptions
from brim.plans.cut_shards import Shard
from brim.plans.describe_plan import BuildForecast
from brim.plans.plan import Plan
from brim.progress import Progress
from brim.state.atomic_files import failures
from brim.state.ledger import LazySequence, Ledger, Receipt, SourceRecord
from brim.state.retry import interrupted_by
from brim.state.stop import stoppable
from brim.storage.storage import PutResult
from brim.storage.upload_content import UploadWatcher

if TYPE_CHECKING:
    from brim.execution.ray_cluster import Cluster, NodeRequirements
    from brim.jobs.append import AppendedShards

_APPEND_ROUNDS = 5  # while other runs append to the same dataset
_UPLOAD_ROUNDS = 3
_MOST_UPLOADS = 4  # of computed shards, which only have to be sent
_RETRIES = Retries(4, alone_text="with a node to itself")  # on a cluster: a thread is never lost


@contextmanager
def connect(engine: EngineOptions) -> Iterator[Cluster | None]:
    """Connect to the cluster of a job; None: this machine."""
    if engine.engine == "local":
        yield None
        return
    from brim.execution.ray_cluster import connected

    with connected(engine.address) as cluster:
        yield cluster


class Job:
    """A plan with a destination, checked as far as that is possible without looking at the destination.

    `forecast` is the memory of a build; a computed job is measured. `label` names the job for people.
    """

    def __init__(
        self,
        plan: Plan | ComputePlan,
        paths: DestinationPaths,
        settings: JobSettings,
        *,
        limit: Limit | None = None,
        forecast: BuildForecast | None = None,
        label: str = "",
    ) -> None:
        self.plan, self.paths, self.settings, self.forecast = plan, paths, settings, forecast
        self.limit = limit or computed_limit(settings)
        self.label = label or ("build" if isinstance(plan, Plan) else plan.command)
        check_job(plan, paths, settings, self.limit)

    def called_with(self, held_bytes: int) -> Job:
        """Return the job for a program that uses so much memory now."""
        return Job(self.plan, self.paths, replace(self.settings, held_bytes=held_bytes), label=self.label)

    @property
    def stop_file(self) -> Path:
        """A file that ends a run cleanly when it appears."""
        return stop_files(self.paths.state_dir, self.settings.stop_file)[-1].absolute()

    def run(
        self, progress: Progress | None = None, scope: Scope = WHOLE_JOB, shards: ShardSet | None = None
    ) -> BuildResult:
        """Do the missing work; a computed job returns a MapResult. `shards` are those of a plan whose source moved."""
        progress = progress or Progress()
        if self.limit.warning and self.settings.engine == "local":
            progress.note(self.limit.warning)
        with connect(self.settings) as cluster:
            if isinstance(self.plan, ComputePlan):
                from brim.jobs.compute import ComputeRun  # builds do not need it

                for note in self.plan.source.notes:
                    progress.note(note)
                with self._lock(progress, scope) as run:
                    destination = open_destination(self.paths, self.settings, run, scope.names)
                    return ComputeRun(self, run, destination, cluster).run(scope)
            if cluster is not None:  # work that does not fit a node is an error before anything is made
                cluster.check_memory(
                    self.task_bytes(0 if self.forecast is None else self.forecast.worker), self.limit.bytes
                )
            with self._lock(progress, scope) as run:
                destination = open_destination(self.paths, self.settings, run, scope.names)
                if self.settings.append:
                    return self._append(self.plan, run, destination, cluster)
                delivery = Delivery(self, run, destination, shards or PlannedShards(self.plan), scope, cluster)
                return delivery.deliver()

    @contextmanager
    def _lock(self, progress: Progress, scope: Scope) -> Iterator[Run]:
        """Lock the destination and open the ledger for this run."""
        paths, settings, state_dir = self.paths, self.settings, scope.ledger_dir or self.paths.state_dir
        if scope.ledger_dir is None:
            claims = bool(settings.state_dir)
            lock = lock_destination(paths, progress, claims=claims, fresh=settings.fresh, stop=settings.stop)
        else:
            lock = share_destination(paths.location)
        with (
            lock,
            stoppable(*stop_files(state_dir, settings.stop_file), requested=settings.stop) as stop,
            interrupted_by(stop.check),
            closing(Ledger(scope.ledger_dir or paths.ledger_dir)) as ledger,
        ):
            is_shared_remote = scope.ledger_dir is not None and not paths.location.is_local
            try:
                with failures(state_dir if is_shared_remote else paths.error_path):
                    yield Run(ledger, stop, progress)
            except StoppedError as stopped:
                if settings.fresh:
                    hint = "Run it again without --fresh to continue."
                    raise StoppedError(stopped.words[0], hint=hint) from stopped
                raise
            finally:
                progress.finish()

    def _append(self, plan: Plan, run: Run, destination: Destination, cluster: Cluster | None) -> BuildResult:
        """Append new rows to the existing dataset, which is read again if another run changes it."""
        from brim.jobs.append import plan_append
        from brim.verification.repair import refuse_append_to_damaged

        refuse_append_to_damaged(run.ledger, str(self.paths.location))
        for _ in range(_APPEND_ROUNDS):
            try:
                shards = plan_append(plan, self.paths, self.settings, run, destination)
                return Delivery(self, run, destination, shards, WHOLE_JOB, cluster).deliver()
            except DestinationChanged:
                run.progress.note("another run has changed the dataset: reading it again")
        raise DestinationUnavailableError(
            "The destination kept changing while brim tried to append, so nothing was appended.",
            hint="Run the same command to continue; uploads that finished are kept.",
        )

    # Memory

    def upload_budget(self) -> UploadBudget:
        """Return how many shards are uploaded at a time, and the memory that is left for that."""
        if self.forecast is not None:
            free = self.limit.bytes - self.forecast.total
            return UploadBudget(free, self.forecast.workers, self.limit.asked_for)
        workers = 1 if self.paths.file_names else min(usable_cores() + 1, _MOST_UPLOADS)
        return UploadBudget(max(self.limit.bytes - tree_bytes(), 0), workers, self.limit.asked_for)

    def task_bytes(self, shard_bytes: int) -> int:
        """Return the memory that a Ray task needs to make and upload a shard, besides that of its interpreter."""
        return shard_bytes + upload_bytes(self.paths.location, self.settings.hub)

    # Results

    def result(self, receipts: Sequence[Receipt], rows: int, written: int = 0, **values: Any) -> BuildResult:
        """Sum up receipts. The file of kept columns, next to a file of vectors, does not count as a shard."""
        paths, count = self.paths, len(receipts)
        if paths.file_names:
            count = sum(receipt.name != paths.file_names[1] for receipt in receipts)
            written = min(written, count)
        steps = next_steps(
            str(paths.location),
            self.settings.hub.config,
            receipts,
            is_file=bool(paths.file_names),
            state_dir=self.settings.state_dir,
            endpoint=self.settings.access.endpoint,
        )
        size = sum(receipt.size for receipt in receipts)
        return BuildResult(
            str(paths.location), rows, bytes=size, shards=count, written=written, kept=count - written, steps=steps,
            shard_noun="file" if any(receipt.name.endswith(".bin") for receipt in receipts) else "shard",
            **{"files": 0, "left_out": (), **values},
        )  # fmt: skip


class Delivery:
    """Make a destination equal to a shard set: reconcile → upload → publish.

    `requirements` are those of the nodes that upload; without them, threads of this process do.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        destination: Destination,
        shards: ShardSet,
        scope: Scope,
        cluster: Cluster | None,
        *,
        requirements: NodeRequirements | None = None,
        shard_bytes: int = 0,
        fresh: bool | None = None,
        source: SourceRecord | None = None,
        published_source: SourceRecord | None = None,
    ) -> None:
        self._job, self._run, self._destination, self._scope = job, run, destination, scope
        self._shards, self._cluster, self._requirements = shards, cluster, requirements
        self._shard_bytes, self._source, self._published_source = shard_bytes, source, published_source
        settings, paths = job.settings, job.paths
        self._fresh = settings.fresh if fresh is None else fresh
        self._base: AppendedShards | None = shards if shards.existing_receipts else None  # type: ignore[assignment]
        self._base_receipts = (
            None if self._base is None else [r for rs in self._base.base.receipts.values() for r in rs]
        )
        # Foreign files stay in a folder or bucket. A repository keeps its history, and a single file was named.
        is_named = bool(paths.file_names) and self._fresh
        self._replaces = is_named or (paths.location.is_repository and (settings.hub.replace_foreign or self._fresh))
        self._written = self._sent_bytes = 0
        self._unpublished: dict[str, Receipt] = {}  # uploads that expire

    def deliver(self) -> BuildResult:
        job, run, destination, shards = self._job, self._run, self._destination, self._shards
        self._budget = job.upload_budget()
        check_hub_limits(shards, job.paths.location)
        with destination.open(shards.fingerprint, self._budget) as existing:
            if isinstance(job.plan, Plan) and self._scope is WHOLE_JOB and not job.settings.append:
                refuse_foreign_in_folder(existing, run.ledger)
            self._rules = Reconciliation(
                run,
                destination,
                shards,
                self._scope,
                fresh=self._fresh,
                updates=job.settings.update or self._base is not None,
                replaces_foreign=self._replaces,
                base=self._base_receipts,
            )
            self._rules.agree(existing, frozenset() if self._base is None else self._base.base.jobs)
            if job.paths.location.is_repository and not self._scope.is_part:
                for note in hub_notes(shards, getattr(destination, "allows_more", False)):
                    run.progress.note(f"the Hub: {note}")
            self._rules.start(existing, self._card(()))
            for _ in range(_UPLOAD_ROUNDS):
                try:
                    self._upload()
                    if self._scope.names is not None:
                        own = self._scope.names
                        receipts = [run.ledger.receipts[s.name] for s in shards.shards if s.name in own]
                        return self._result(receipts, "")
                    return self._publish(existing)
                except UploadsExpired as expired:
                    count = len(expired.names)
                    run.progress.note(f"the destination no longer has {count} shard(s): sending them again")
                    for name in expired.names:
                        run.ledger.forget(name)
        raise DestinationUnavailableError(
            "Uploaded shards disappear from the destination before they can be published.",
            hint="Run the same command to retry.",
        )

    # Upload

    def _upload(self) -> None:
        """Upload the missing shards, several at a time; the first failure cancels the others."""
        run, destination, shards, ledger = self._run, self._destination, self._shards, self._run.ledger
        workers, limit_bytes, progress = self._budget.workers, self._job.limit.bytes, run.progress
        missing = self._rules.missing_shards(workers, limit_bytes)
        if missing:
            self._scope.check_missing(missing)
        if missing or not (ledger.is_finished or self._scope.is_part):
            self._rules.check_space(missing)
            existing = {name for name, receipt in ledger.receipts.items() if destination.has_receipt(receipt)}
            unnamed = len({shard.name for shard in missing} | (shards.names - existing))
            title = f"{shards.rows:,} rows in {len(shards.shards):,} shards"
            destination.start(title, 0 if self._scope.is_part else unnamed, self._card(()))
        progress.start("publish" if destination.is_staged else "build", shards.size(missing), len(missing), limit_bytes)
        unchanged = shards.names - {shard.name for shard in missing}
        staged = (receipt for receipt in ledger.receipts.values() if receipt.staged_at and receipt.name in unchanged)
        self._unpublished = {receipt.name: receipt for receipt in staged if not destination.has_receipt(receipt)}
        if not missing:
            return
        queue = TaskQueue((Task(s.name, s.file_bytes, s) for s in missing), self, progress, _RETRIES)
        with self._backend() as backend, closing(run_tasks(queue, backend, run.stop)) as results:
            for receipt, result in results:
                if receipt.staged_at:
                    self._unpublished[receipt.name] = receipt
                self._written += result.sent
                self._sent_bytes += receipt.size if result.sent else 0
                outcome = "already there" if not result.sent else "sent" if destination.is_staged else "written"
                progress.rows(receipt.rows)
                progress.shard(receipt.name, receipt.size, receipt.sha256, outcome)
                if self._unpublished and not self._scope.is_part:
                    destination.checkpoint(list(self._unpublished.values()))
                    self._unpublished = {n: r for n, r in self._unpublished.items() if not destination.has_receipt(r)}

    def _backend(self) -> Any:
        run, job, shards = self._run, self._job, self._shards
        if self._cluster is None or (self._requirements is None and not isinstance(job.plan, Plan)):
            return ThreadBackend(self._budget.workers, self._upload_shard, run.progress, run.stop)
        from brim.execution.ray_backend import RayBackend
        from brim.execution.ray_cluster import INTERPRETER_BYTES, NodeRequirements, sample_of
        from brim.execution.ray_worker import UploadOrder

        requirements, shard_bytes = self._requirements, self._shard_bytes
        if requirements is None and isinstance(job.plan, Plan):
            requirements = NodeRequirements(files=sample_of(job.plan.table.files))
            shard_bytes = 0 if job.forecast is None else job.forecast.worker
        assert requirements is not None
        uploader = self._destination.uploader()

        def make_order(task: Task) -> UploadOrder:
            return UploadOrder(task.name, shards.content(task.work), uploader, self._known_sha256(task.work))

        return RayBackend(
            self._cluster,
            replace(requirements, uploader=uploader),
            INTERPRETER_BYTES + job.task_bytes(shard_bytes),
            job.limit.bytes,
            self,
            run.progress,
            make_order=make_order,
            workers=job.settings.workers,
        )

    def _known_sha256(self, shard: Shard) -> str | None:
        return self._rules.known_sha256.get(shard.name) or self._shards.known_sha256(shard)

    def _upload_shard(self, task: Task, watcher: UploadWatcher) -> tuple[Receipt, PutResult]:
        shard: Shard = task.work
        with self._shards.content(shard).splice() as splice:
            result = self._destination.upload(shard.name, splice, self._known_sha256(shard), watcher)
            size = splice.size
        return self.record_done(task, (size, result))

    # The receipts, for the scheduler

    def is_done(self, task: Task) -> bool:
        return False  # shards with valid receipts are not in the queue

    def begin(self, task: Task) -> None:
        if task.name in self._run.ledger.receipts:
            self._run.ledger.forget(task.name)  # before its file is replaced

    def record_done(self, task: Task, result: tuple[int, PutResult]) -> tuple[Receipt, PutResult]:
        size, upload = result
        receipt = self._rules.receipt(task.work, size, upload.sha256, etag=upload.etag)
        self._run.ledger.add(receipt)
        return receipt, upload

    # Publish

    def _card(self, receipts: Iterable[Receipt]) -> DatasetCard:
        hub, location, shards = self._job.settings.hub, self._job.paths.location, self._shards
        facts: CardFacts = replace(shards.card(receipts), replace=self._replaces, shards=shards.names)
        if location.is_repository:
            facts = replace(
                facts,
                where=location.repo,
                config=hub.config,
                folder=hub.folder,
                keep_splits=hub.split is not None,
                set_default=hub.set_default,
                bare=hub.bare,
            )
        base = None if self._base is None else self._base.base.receipts
        existing = None if base is None else {split: [r.name for r in receipts] for split, receipts in base.items()}
        split = hub.split if self._destination.is_staged else None
        return DatasetCard(facts, hub.config, split, hub.folder, existing)

    def _publish(self, existing: Existing) -> BuildResult:
        """Make the shards visible: deletions and manifests, the card last. Then the ledger is finished."""
        ledger, shards, destination = self._run.ledger, self._shards, self._destination
        receipts = LazySequence([shard.name for shard in shards.shards], ledger.receipts.__getitem__)
        manifests: dict[str, bytes] = {}
        if destination.manifest_name("train") is not None:
            manifest_name: Callable[[str], Any] = destination.manifest_name
            source = self._published_source
            manifests = make_manifests(shards, ledger, receipts, existing.manifests or (), manifest_name, source)
        removed = frozenset((ledger.names | self._rules.foreign) - shards.names)
        publication = Publication(receipts, removed, self._card(receipts), manifests, self._base_receipts)
        verified = destination.publish(publication)
        for name in sorted(ledger.receipts.keys() - shards.names):
            ledger.forget(name)
        ledger.finish(receipts, self._source)
        return self._result(receipts, verified)

    def _result(self, receipts: Sequence[Receipt], verified: str) -> BuildResult:
        shards, destination, location = self._shards, self._destination, self._job.paths.location
        values: dict[str, Any] = {} if self._job.paths.root.is_local else {"sent_bytes": self._sent_bytes}
        if location.is_repository:
            names = ("commits", "visibility", "pull_request")
            values |= {name: getattr(destination, name) for name in names}
        return self._job.result(
            receipts,
            shards.rows,
            self._written,
            files=shards.source_files,
            left_out=shards.skipped_files,
            proved=verified,
            file_bytes=int(shards.facts.get("bytes", 0)),
            **values,
        )
