"""One run of a build: find what is missing, bring it to the sink, remember it, publish.

The order of things is what makes a crash harmless. A shard is where it belongs before its receipt is
written; the receipt is on disk before anything depends on it; the card that makes the dataset loadable
comes last. Running the same build again does what is missing and nothing else.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from brim.errors import DestinationError, DestinationUnavailableError, PlanMismatchError
from brim.execution.scheduler import Retries, Task, TaskQueue, run_tasks
from brim.execution.thread_backend import Cancelled, ThreadBackend
from brim.formats.card import CardFacts, write_card, write_unfinished_card
from brim.formats.shard_listing import LISTING, MOST_LISTING_BYTES
from brim.jobs.content import Content
from brim.plans.cut_shards import Shard
from brim.progress import Progress
from brim.records import dataclass
from brim.sizes import format_size
from brim.state.ledger import (
    JobRecord,
    LazySequence,
    Ledger,
    Piece,
    Receipt,
    SourceRecord,
    finished_ledger,
    job_versions,
    source_line,
)
from brim.state.record_log import records_of
from brim.state.retry import interrupted_by
from brim.state.stop import Stop
from brim.storage.storage import PutResult
from brim.storage.upload_content import UploadWatcher
from brim.stores.store import Announcement, CardMaker, ObjectsGone, Publication, Store


@dataclass(frozen=True, slots=True)
class Share:
    """What a run has to do with others that bring shards of the same content; by itself, nothing.

    A run that has its own `books` shares the destination. Whoever made them holds their lock.
    """

    only: frozenset[str] | None = None  # the shards of this run; the rest, and publishing, is for others
    books: Path | None = None  # the folder of its ledger, beside which a stop file is looked for
    received: Callable[[Ledger], Iterable[Receipt]] = lambda ledger: ()  # for shards that others brought
    lacking: Callable[[Sequence[Shard]], None] = lambda shards: None  # what has to be brought; may refuse to
    units: Callable[[Ledger], None] | None = None  # take over the units that parts of a computed job have done


MakeBackend = Callable[["Run"], Any]
STAGED_S = 12 * 3600  # how long a shard that was sent and not committed counts as there
_ROUNDS = 3
_RETRIES = Retries(4, alone_text="with a node to itself")  # on a cluster: a thread is never lost


@dataclass(frozen=True, slots=True)
class DeliveryOptions:
    """How to run, apart from what. `card` is changed into the card of this destination."""

    workers: int
    limit_bytes: int
    fresh: bool = False
    update: bool = False
    replace: bool = False  # files that brim did not write are replaced too
    split: str | None = None  # the one split that is published; others stay as they are
    card: Callable[[CardFacts], CardFacts] = field(default=lambda facts: facts)
    config: str = "default"
    manifest_name: Callable[[str], str] | None = None  # of a split, where a ledger is published with the shards
    manifests: Sequence[bytes] = ()  # that are there
    share: Share = field(default_factory=Share)
    executor: MakeBackend | None = None  # None: threads of this process
    waiting_card: CardMaker | None = None  # while it goes on, instead of one that says that it is unfinished
    builds_on: Sequence[Piece] | None = None  # what must still be there when it is published
    source: SourceRecord | None = None  # what a computed job has read
    published_source: SourceRecord | None = None  # the same, as it is published


class Run:
    """One run, with the lock of the destination's ledger held."""

    def __init__(
        self, content: Content, sink: Store, ledger: Ledger, options: DeliveryOptions, progress: Progress, stop: Stop
    ) -> None:
        self.content, self.sink, self.ledger, self.options = content, sink, ledger, options
        self.progress, self.stop = progress, stop
        self.job = content.fingerprint[:16]
        self.written = self.sent_bytes = 0
        self.proved = ""
        self._names = {shard.name for shard in content.shards}
        self._known: dict[str, str] = {}  # the hash of shards that have to be sent again
        self._waiting: dict[str, Receipt] = {}  # sent, and not committed
        self._abort = threading.Event()  # for shards that are compared

    def run(self) -> Sequence[Receipt]:
        # A run that was killed between a shard and its receipt has left a file that is brim's own all the same.
        self.ledger.add_names(self.ledger.planned_names(self.sink.shards()))
        received = list(self.options.share.received(self.ledger))
        new = self.ledger.job is None or self.ledger.job.fingerprint != self.content.fingerprint
        strangers = self._check(new, received)
        if self.options.fresh:
            self._discard_previous()
        if new:
            self.ledger.begin(
                JobRecord(self.content.fingerprint, self.content.facts, job_versions(), self.content.left_out),
                self._names,
            )
        self.ledger.add_all(r for r in received if self.ledger.receipts.get(r.name) != r)
        only = self.options.share.only
        for _ in range(_ROUNDS):
            self._abort.clear()
            try:
                self._run_shards(self._begin())
                if only is not None:
                    return [self.ledger.receipts[shard.name] for shard in self.content.shards if shard.name in only]
                return self._publish(strangers)
            except ObjectsGone as gone:
                self.progress.note(f"the destination no longer has {len(gone.names)} shard(s): sending them again")
                for name in gone.names:
                    self.ledger.forget(name)
        raise DestinationUnavailableError(
            "Uploaded shards disappear from the destination before they can be published.",
            hint="Run the same command to retry.",
        )

    def _check(self, new: bool, received: Sequence[Receipt]) -> set[str]:
        """Refuse what can be refused before anything changes at the destination; returns the foreign files there."""
        previous = self.ledger.job
        removed = self.ledger.done and not self.sink.staged and not any(self.sink.shards())
        if previous is not None and not self.options.fresh and not self.options.update and not removed:
            refuse_another(
                self.content,
                previous,
                "Use --update to bring it up to date (unchanged shards are kept), --fresh to start over, or "
                "another destination.",
            )
        strangers = self._strangers()
        if (new or self.options.fresh) and self.options.share.only is None:
            self._need_room_for_all(received)
            facts = self._facts([])
            self.sink.check_card(lambda card, names: write_card(facts, card, names))
        return strangers

    def _need_room_for_all(self, received: Sequence[Receipt]) -> None:
        """Refuse a job whose new shards do not fit, counting what stays and what --fresh makes room for."""
        shards, free = self.content.shards, self.sink.free_bytes()
        if free is None or self.content.linked or self.content.size(shards) <= free:
            return
        if self.options.fresh:
            freed = sum(r.size for r in self.ledger.receipts.values() if self.sink.holds(r.piece))
            self._need_room(shards, freed)
            return
        kept = {receipt.key for receipt in received}
        kept |= {
            key for key, receipt in self.ledger.receipts_by_key().items() if is_kept(receipt, self.sink, self.ledger)
        }
        self._need_room([shard for shard in shards if self.content.key(shard) not in kept])

    def _discard_previous(self) -> None:
        if self.ledger.job is None:
            return
        for name in sorted(self.ledger.receipts):
            self.ledger.forget(name)
        self.ledger.old_receipts.clear()
        self.sink.discard(self.ledger.names)

    def _strangers(self) -> set[str]:
        """Files among the shards that brim did not write. They are replaced only if that was asked for."""
        strangers = [name for name in self.sink.shards() if name not in self.ledger.names]
        named = [name for name in strangers if name in self._names]
        # Without a ledger, files with the names of our shards are ours if a build has begun there, and else somebody's.
        known = self.ledger.job is not None or self.options.share != Share()
        if known or self.options.builds_on is not None or (named and self.sink.begun()):
            strangers = [name for name in strangers if name not in self._names]
        if not self.options.replace:
            refuse_strangers(strangers, self.sink.staged)
        return set(strangers)

    def _begin(self) -> list[Shard]:
        """What has to be brought to the sink; the sink is told if there is anything."""
        todo = self._todo()
        shared = self.options.share.only is not None
        if todo:
            self.options.share.lacking(todo)
        if todo or not (self.ledger.done or shared):
            self._need_room(todo)
            ready = {name for name, receipt in self.ledger.receipts.items() if self.sink.holds(receipt.piece)}
            missing = len({shard.name for shard in todo} | (self._names - ready))
            title = f"{self.content.rows:,} rows in {len(self.content.shards):,} shards"
            config, split = self.options.config, self.options.split
            facts = self._facts([])
            self.sink.begin(
                Announcement(
                    self.content.fingerprint,
                    title,
                    0 if shared else missing,
                    unfinished_card=self.options.waiting_card
                    or (lambda card, names: write_unfinished_card(card, config, split, names)),
                    trial_card=lambda card, names: write_card(facts, card, names),
                )
            )
        self.progress.start(
            "publish" if self.sink.staged else "build",
            self.content.size(todo),
            len(todo),
            self.options.limit_bytes,
        )
        return todo

    def _todo(self) -> list[Shard]:
        """The shards without a receipt that still holds; others are kept, moved or hashed again."""
        if not self.ledger.has_only(self.job):
            reuse(self.content, self.sink, self.ledger, self.job)
        todo = []
        doubtful = []
        only = self.options.share.only
        shards = self.content.shards
        for shard, mtimes in self.content.with_mtimes(s for s in shards if only is None or s.name in only):
            receipt = self.ledger.receipts.get(shard.name)
            same = receipt is not None and receipt.mtimes == mtimes
            if receipt is None or receipt.job != self.job or self._differs(shard, receipt):
                todo.append(shard)
            elif self.ledger.is_damaged(receipt):
                self.progress.note(f"{shard.name}: brim verify found that it is damaged, so it is written again")
                todo.append(shard)
            elif not self._is_there(receipt):
                if receipt.staged_at and same:
                    self._known[shard.name] = receipt.sha256
                todo.append(shard)
            elif not same:
                doubtful.append((shard, receipt))
        if doubtful:
            todo += self._compare(doubtful)
        return sorted(todo, key=lambda shard: shard.start)

    def _differs(self, shard: Shard, receipt: Receipt) -> bool:
        """Whether rows that were computed again are others: a function may give other ones each time."""
        known = self.content.sha256(shard)
        return known is not None and known != receipt.sha256

    def _is_there(self, receipt: Receipt) -> bool:
        if self.sink.holds(receipt.piece) or 0 <= time.time() - receipt.staged_at < STAGED_S:
            return True
        return self.sink.staged and self.sink.holds_aside(receipt.piece)  # publishing gives it the name

    def _compare(self, doubtful: list[tuple[Shard, Receipt]]) -> list[Shard]:
        """Hash shards whose files may have changed; returns those that did."""
        self.progress.note(f"comparing the content of {len(doubtful)} shard(s) with what is there")
        total = self.content.size([shard for shard, _ in doubtful])
        self.progress.start("compare", total, len(doubtful), self.options.limit_bytes)
        changed = []
        with ThreadPoolExecutor(self.options.workers, "compare") as pool:
            try:
                hashes = pool.map(lambda pair: self._hash(pair[0]), doubtful)
                for (shard, receipt), sha256 in zip(doubtful, hashes, strict=True):
                    self.progress.shard(shard.name, receipt.size, sha256, "compared")
                    if sha256 == receipt.sha256:
                        self.ledger.add(
                            replace(
                                self._receipt(shard, receipt.size, sha256),
                                staged_at=receipt.staged_at,
                                etag=receipt.etag,
                            )
                        )
                    else:
                        self.progress.note(f"{shard.name}: the content of its files changed, so it is written again")
                        self._known[shard.name] = sha256
                        changed.append(shard)
            except BaseException:
                self._abort.set()
                raise
        return changed

    def _hash(self, shard: Shard) -> str:
        def look() -> None:
            if self._abort.is_set():
                raise Cancelled
            self.stop.check()

        def sent(size: int) -> None:
            look()
            self.progress.advance(size)

        with interrupted_by(look), self.content.slice(shard).splice() as splice:
            return splice.sha256(sent)

    def _need_room(self, todo: Sequence[Shard], freed: int = 0) -> None:
        need, free = 0 if self.content.linked else self.content.size(todo), self.sink.free_bytes()
        if free is not None and need > free + freed:
            raise DestinationUnavailableError(
                f"The destination has {format_size(free)} of free disk space and the shards to write need "
                f"{format_size(need)}; nothing was written.",
                hint="Free disk space, then run the same command to continue.",
                need_bytes=need,
                free_bytes=free,
            )

    def _run_shards(self, todo: list[Shard]) -> None:
        """Bring shards, several at a time; the first failure drops the others cleanly."""
        kept = self._names - {shard.name for shard in todo}  # what may have got lost waits once it was sent again
        staged = (r for r in self.ledger.receipts.values() if r.staged_at and r.name in kept)
        self._waiting = {r.name: r for r in staged if not self.sink.holds(r.piece)}
        with self._brought(todo) as finished:
            for receipt, put in finished:
                if receipt.staged_at:
                    self._waiting[receipt.name] = receipt
                self.written += put.sent
                self.sent_bytes += receipt.size if put.sent else 0
                how = "already there" if not put.sent else "sent" if self.sink.staged else "written"
                self.progress.rows(receipt.rows)
                self.progress.shard(receipt.name, receipt.size, receipt.sha256, how)
                self._checkpoint()

    @contextmanager
    def _brought(self, todo: Sequence[Shard]) -> Iterator[Iterator[tuple[Receipt, PutResult]]]:
        if not todo:
            yield iter(())
            return
        queue = TaskQueue((Task(s.name, s.file_bytes, s) for s in todo), self, self.progress, _RETRIES)
        if self.options.executor is not None:
            backend: Any = self.options.executor(self)
        else:
            backend = ThreadBackend(self.options.workers, self._upload, self.progress, self.stop)
        with backend, closing(run_tasks(queue, backend, self.stop)) as finished:
            yield finished

    def known_sha256(self, shard: Shard) -> str | None:
        return self._known.get(shard.name) or self.content.sha256(shard)

    def _upload(self, task: Task, watcher: UploadWatcher) -> tuple[Receipt, PutResult]:
        shard: Shard = task.work
        with self.content.slice(shard).splice() as splice:
            put = self.sink.put(shard.name, splice, self.known_sha256(shard), watcher)
            size = splice.size
        return self.record_done(task, (size, put))

    def _checkpoint(self) -> None:
        """Tell the sink what is there only for some hours."""
        if not self._waiting or self.options.share.only is not None:
            return
        waiting = [self._waiting[name] for name in sorted(self._waiting)]
        self.sink.checkpoint([r.piece for r in waiting], min(r.staged_at for r in waiting))
        self._waiting = {r.name: r for r in waiting if not self.sink.holds(r.piece)}

    # The receipts, as a scheduler sees them

    def is_done(self, task: Task) -> bool:
        return False  # what is there was never put on the list

    def begin(self, task: Task) -> None:
        if task.name in self.ledger.receipts:
            self.ledger.forget(task.name)  # before its file becomes another one

    def record_done(self, task: Task, result: tuple[int, PutResult]) -> tuple[Receipt, PutResult]:
        size, put = result
        receipt = replace(self._receipt(task.work, size, put.sha256), etag=put.etag)
        self.ledger.add(receipt)
        return receipt, put

    def _receipt(self, shard: Shard, size: int, sha256: str) -> Receipt:
        key, mtimes = self.content.key(shard), self.content.mtimes(shard)
        staged_at = int(time.time()) if self.sink.staged else 0
        return Receipt(shard.name, shard.split, shard.rows, size, sha256, key, mtimes, self.job, staged_at)

    def _publish(self, strangers: set[str]) -> Sequence[Receipt]:
        names, known = [shard.name for shard in self.content.shards], self.ledger.receipts
        receipts = LazySequence(names, known.__getitem__)
        facts = self._facts(receipts)
        self.proved = self.sink.publish(
            Publication(
                LazySequence(names, lambda name: known[name].piece),
                frozenset((self.ledger.names | strangers) - self._names),
                lambda existing, names: write_card(facts, existing, names),
                self._manifests(receipts),
                self.options.builds_on,
            )
        )
        for name in sorted(self.ledger.receipts.keys() - self._names):
            self.ledger.forget(name)
        self.ledger.finish(receipts, self.options.source)
        return receipts

    def _facts(self, receipts: Iterable[Receipt]) -> CardFacts:
        facts = self.options.card(self.content.card(receipts))
        return replace(facts, replace=self.options.replace, shards=self._names)

    def _manifests(self, receipts: Iterable[Receipt]) -> dict[str, bytes]:
        """The ledger as it is published, split by split. The dates of this machine's files stay here."""
        manifests: dict[str, bytes] = {}
        if self.options.manifest_name is not None and self.ledger.job is not None:
            for split in self.content.splits:

                def of(split: str = split) -> Iterator[Receipt]:
                    return (replace(receipt, mtimes="") for receipt in receipts if receipt.split == split)

                source = self.options.published_source
                data = finished_ledger(self.ledger.job, of(), [] if source is None else [source_line(source)])
                # One that an earlier version published, without listings, is left as it is.
                if data not in self.options.manifests and (listings := self._listings(split)):
                    data = finished_ledger(self.ledger.job, of(), listings)
                manifests[self.options.manifest_name(split)] = data
        return manifests

    def _listings(self, split: str) -> list[dict[str, Any]]:
        """What is told of each shard of a split, for those who choose rows from afar; nothing if it is too much."""
        listings, size, before = [], 0, self._listed_before()
        for shard in self.content.shards:
            if shard.split != split:
                continue
            listing = self.content.listing(shard) or before.get(self.ledger.receipts[shard.name].sha256)
            if listing is not None:
                listing = {**listing, "name": shard.name}
                size += sum(len(str(value)) for value in listing.values())
                if size > MOST_LISTING_BYTES:
                    return []
                listings.append(listing)
        return listings

    def _listed_before(self) -> dict[str, dict[str, Any]]:
        """What the manifests that are there tell of shards, by their content: of those that stay it is kept."""
        found: dict[str, dict[str, Any]] = {}
        for data in self.options.manifests:
            records = list(records_of(io.BytesIO(data)))
            content = {record["name"]: record["sha256"] for record in records if record.get("type") == "shard"}
            for record in records:
                if record.get("type") == LISTING and record.get("name") in content:
                    found[content[record["name"]]] = record
        return found


def refuse_another(content: Content, previous: JobRecord, hint: str) -> None:
    """A destination that holds another dataset is not written over."""
    if previous.fingerprint != content.fingerprint:
        changes = content.changes_from(previous.facts)
        raise PlanMismatchError(
            f"The destination has another dataset: {'; '.join(changes)}.", hint=hint, changes=changes
        )


def refuse_strangers(names: Sequence[str], staged: bool) -> None:
    """Files that brim did not write must not become part of a dataset."""
    if names:
        raise DestinationError(
            f"The destination has {len(names)} foreign file(s) that brim did not write, such as "
            f"{names[0]}; they would become part of the dataset.",
            hint="Move them away, or choose another destination."
            + (" --fresh replaces them; the repository's history keeps them." if staged else ""),
        )


def is_kept(receipt: Receipt, sink: Store, ledger: Ledger) -> bool:
    """Whether the content of a shard of an earlier job is at the destination, under its name or set aside."""
    return (ledger.receipts.get(receipt.name) == receipt and sink.holds(receipt.piece)) or sink.holds_aside(
        receipt.piece
    )


def reuse(content: Content, sink: Store, ledger: Ledger, job: str) -> None:
    """Give shards of an earlier job that are part of this one their new names and receipts."""
    wanted: dict[str, list[Shard]] = {}
    for shard in content.shards:
        wanted.setdefault(content.key(shard), []).append(shard)
    kept: list[tuple[Shard, Receipt]] = []
    for receipt in ledger.receipts_by_key().values():
        places = wanted.get(receipt.key)
        if not places or ledger.is_damaged(receipt):
            continue
        if not is_kept(receipt, sink, ledger):
            continue
        here = ledger.receipts.get(receipt.name) == receipt and sink.holds(receipt.piece)
        same = next((shard for shard in places if here and shard.name == receipt.name), None)
        if here and same is None:
            ledger.forget(receipt.name)
            sink.set_aside(receipt.piece)
        shard = same or places[0]
        places.remove(shard)
        kept.append((shard, receipt))
    for shard, receipt in kept:
        if ledger.receipts.get(shard.name) != receipt:
            if shard.name in ledger.receipts:
                ledger.forget(shard.name)  # before its file becomes another one
            receipt = replace(receipt, etag=sink.bring_back(receipt.piece, shard.name))
        # The dates of its files stay as they were: if they changed, content is compared as in any resumed run.
        ledger.add(replace(receipt, name=shard.name, split=shard.split, job=job))
