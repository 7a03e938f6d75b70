"""One run over the units of a source, done by Ray's tasks, one each. The driver keeps the books, as it does locally.

`limit_bytes` is the limit on every node. A task asks for so many CPUs that its share of the node's limit is what a
unit takes; one that breaks its share is tried again with a whole node, then in pieces where that gives the same rows.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from brim.buckets.bucket_address import Access
from brim.errors import BrimError, DoesNotFit, SinkFailed
from brim.outputs.rows_file import Writing
from brim.progress import Progress
from brim.rows.unit import RowSource, Unit
from brim.schedule.attempts import Attempt
from brim.schedule.memory_line import WorkerRoom
from brim.schedule.messages import Done, Order, Probed, Setup
from brim.schedule.processes import Feed
from brim.schedule.ray_cluster import Cluster, Node, Sight, check_nodes, loss_of
from brim.schedule.ray_gauges import Gauges, TaskNews
from brim.schedule.ray_shards import INTERPRETER_BYTES, cpus_for, drop_tasks
from brim.schedule.ray_unit import Answer, Asked, do_unit
from brim.schedule.unit_work import ComputeOptions, DoneUnits, Outcome, clear_scratch
from brim.schedule.work_failures import crashed, does_not_fit, does_not_start, exit_words, too_small
from brim.state.ledger import Ledger
from brim.state.stop import Stop
from brim.steps.step import Settles, Step
from brim.stores.store import Carrier

_LISTEN_S, _FIRST_S = 0.1, 0.01
_WORKER_BYTES, _WORK_BYTES = 80 << 20, 48 << 20  # before any was seen: a worker with some imports, and a batch
_SEEN, _BAD_STARTS = 16, 3
_NODES_S = 2.0


class ClusterComputation:
    """The units of one job. Every node sees `folder`, where unit files and receipts are."""

    def __init__(
        self,
        cluster: Cluster,
        carrier: Carrier | None,
        source: RowSource,
        step: Step,
        writing: Writing,
        ledger: Ledger,
        folder: Path,
        options: ComputeOptions,
        progress: Progress,
        stop: Stop,
    ) -> None:
        self.source, self.step, self.writing, self.options = source, step, writing, options
        self.ledger, self.folder, self.progress, self.stop = ledger, folder.absolute(), progress, stop
        self.outcome = Outcome()
        self.done = DoneUnits(ledger, folder, writing.format)
        self._cluster, self._carrier, self._gauges = cluster, carrier, Gauges(cluster)
        self._remote = cluster.ray.remote(do_unit)
        self._waiting: deque[Attempt] = deque()
        self._running: dict[Any, Attempt] = {}
        self._seen: dict[int, int] = {}  # bytes of units that were told of
        self._base = INTERPRETER_BYTES + _WORKER_BYTES
        self._taken: deque[int] = deque(maxlen=_SEEN)  # what units took above what their worker holds at rest
        self._start_bytes = 0  # what a worker needed before its first row, and did not have
        self._bad_starts = 0
        self._nodes_at = 0.0
        self._nodes: list[Node] = []
        self._checked = False
        self._types: str | None = ledger.recall("types") if isinstance(step, Settles) else ""

    def run(self) -> Outcome:
        clear_scratch(self.folder)
        spool = self.folder / "spool"
        spool.mkdir()
        self._look_at_nodes()
        if self.options.limit_bytes < INTERPRETER_BYTES + _WORK_BYTES:
            raise too_small(self._room(), known=False)
        self._put_setup()
        self.progress.start(self.options.what, self.source.total_bytes or 0, 0, self.options.limit_bytes)
        units = self.source.units(self.options.align, indices=self.step.indices, spool=spool, skip=self.done.has)
        feed = Feed(units, self._most)
        try:
            self._loop(feed)
            self._hear(self._gauges.last())
        finally:
            self._drop()
            feed.close()
            self._gauges.end()
            clear_scratch(self.folder)
        self.outcome.receipts, self.outcome.bad_rows = self.done.receipts, self.done.bad_rows
        self.outcome.peak_bytes = self._gauges.peak_bytes
        return self.outcome

    def _put_setup(self) -> None:
        reading = self.source.reading
        if self.step.columns is not None:
            reading = replace(reading, columns=self.step.columns)
        self._threads = int(self._cpus)
        setup = pickle.dumps(
            Setup(self.step, reading, self.writing, str(self.folder), "gate", self.options.on_error, self._threads)
        )
        self._digest = hashlib.sha256(setup + self._gauges.run.encode()).hexdigest()
        self._setup = self._cluster.ray.put(setup)

    # Nodes

    def _look_at_nodes(self) -> None:
        """What they offer. Nodes may come and go."""
        self._nodes_at = time.monotonic()
        nodes = self._cluster.need_nodes()
        if self._checked and (new := [n for n in nodes if n.id not in {node.id for node in self._nodes}]):
            check_nodes(self._cluster, new, self._sight(None))
        self._nodes = nodes
        self._gauges.watch(nodes)
        self._share_out()

    def _share_out(self) -> None:
        """What a task asks of a node, as far as it is known what units take."""
        nodes = self._nodes
        self._largest = max(nodes, key=lambda node: (node.gpus if self._wants_gpu() else 0, node.cpus))
        usual = sorted(self._taken)[3 * len(self._taken) // 4] if self._taken else _WORK_BYTES
        need = max(self._base + max(round(1.1 * usual), _WORK_BYTES // 2), self._start_bytes)
        self._cpus = cpus_for(self._largest.cpus, need, self.options.limit_bytes)
        self._gpus = 0
        if self.options.whole_node and self.options.workers is None:
            self._gpus = int(self._wants_gpu() and self._largest.gpus >= 1)
            self._cpus = max(int(self._largest.cpus // max(self._largest.gpus if self._gpus else 1, 1)), 1)
        self._slots = sum(max(int(node.cpus // self._cpus), 1) for node in nodes)
        self._most = self.options.workers or self._slots + len(nodes)  # one waits at each, so that none waits for us

    def _wants_gpu(self) -> bool:
        return bool(getattr(self.step, "wants_gpu", False))

    def _check(self, unit: Unit) -> None:
        """Before the first task. The mark shows that the folder of units is the same one everywhere."""
        self._checked = True
        mark = self.folder / f".{self._gauges.run}.tmp"
        mark.touch()
        check_nodes(self._cluster, self._nodes, self._sight(unit))

    def _sight(self, unit: Unit | None) -> Sight:
        root = self.source.reading.options.get("root")
        paths = [*([root] if root else []), *(span.path for span in (unit.spans if unit else ())[:3])]
        access = self.source.reading.options.get("access")
        return Sight(
            paths=tuple(map(str, paths)),
            carrier=self._carrier,
            mark=str(self.folder / f".{self._gauges.run}.tmp"),
            access=Access(*access) if access else Access(),
        )

    def _room(self) -> WorkerRoom:
        return WorkerRoom(self.options.limit_bytes, INTERPRETER_BYTES, max(self._base - INTERPRETER_BYTES, 0))

    # The loop

    def _loop(self, feed: Feed) -> None:
        while True:
            self.stop.check()
            if time.monotonic() - self._nodes_at > _NODES_S:
                self._look_at_nodes()
            self._admit(feed)
            if feed.exhausted and not self._waiting and not self._running:
                return
            self._listen()

    def _find_work(self, feed: Feed) -> bool:
        while not self._waiting and (unit := feed.take()) is not None:
            if self.done.keep(unit):
                self.progress.advance(unit.bytes)
            else:
                self._waiting.append(Attempt(unit))
        return bool(self._waiting)

    def _admit(self, feed: Feed) -> None:
        while len(self._running) < self._most and self._find_work(feed):
            if any(attempt.alone for attempt in self._running.values()):
                return
            if self._running and (self._waiting[0].alone or self._types is None):
                return  # it needs a node to itself; or the first batch is on its way, and all others take its types
            if not self._checked:
                self._check(self._waiting[0].unit)
            self._submit(self._waiting.popleft())

    def _submit(self, attempt: Attempt) -> None:
        node, limit = self._largest, self.options.limit_bytes
        cpus = int(node.cpus) if attempt.alone else self._cpus
        soft = round(0.9 * limit * cpus / node.cpus)
        order = Order(attempt.unit, attempt.pieces, soft, self._types is None, bytes.fromhex(self._types or ""))
        asked = Asked(
            self._gauges.run, str(attempt.unit.number), self._digest, order, limit, cpus, self._threads, os.getcwd()
        )
        options: dict[str, Any] = {"num_cpus": cpus, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        options["memory"] = int(min(limit, node.memory_bytes) * cpus / node.cpus)
        if self._gpus:
            options["num_gpus"] = self._gpus
        self._running[self._remote.options(**options).remote(self._setup, asked)] = attempt
        self._gauges.submitted()
        self.outcome.workers = max(self.outcome.workers, min(len(self._running), self._slots))

    def _listen(self) -> None:
        ray, refs = self._cluster.ray, list(self._running)
        if not refs:
            time.sleep(_FIRST_S)  # the first units are being made
        elif ray.wait(refs, timeout=_LISTEN_S)[0]:
            for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                self._take(ref)
        self._hear(self._gauges.poll())
        if (late := self._gauges.late()) is not None:
            self.progress.note(late)
        self.progress.advance(0)

    def _hear(self, told: list[TaskNews]) -> None:
        attempts = {str(attempt.unit.number): attempt for attempt in self._running.values()}
        for one in told:
            for text in one.notes:
                self.progress.note(text)
            for name in one.sent.keys() & attempts.keys():
                self._advance(attempts[name], one.sent[name])
        if told:
            self.progress.nodes(dict(self._gauges.held))

    def _advance(self, attempt: Attempt, seen_bytes: int) -> None:
        """Batches count as they go by; a unit that is tried again does not count twice."""
        unit = attempt.unit
        seen, before = min(seen_bytes, unit.bytes), self._seen.get(unit.number, 0)
        self.progress.advance(max(seen - before, 0))
        self._seen[unit.number] = max(seen, before)

    def _drop(self) -> None:
        """What is finished is written down, what is on its way is dropped."""
        ray = self._cluster.ray
        if self._cluster.lost:
            return
        refs = list(self._running)
        for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []:
            try:
                self._take(ref)
            except (BrimError, ray.exceptions.RayError):
                continue
        drop_tasks(ray, list(self._running))
        self._running = {}

    # What comes back

    def _take(self, ref: Any) -> None:
        ray, attempt = self._cluster.ray, self._running.pop(ref)
        try:
            answer: Answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            if loss_of(ray, error) == "memory":
                self._out_of_memory(attempt, Answer("memory", whole=attempt.alone))
            else:
                self._lost(attempt)
            return
        self._gauges.begun()
        for text in answer.notes:
            self.progress.note(text)
        if answer.base_bytes:
            self._base = answer.base_bytes
            self._share_out()
        if not answer.ready and answer.kind != "error":
            self._did_not_start(attempt, answer)
        elif isinstance(answer.message, Done):
            self._is_done(attempt, answer, answer.message)
        elif isinstance(answer.message, Probed):
            self._types = answer.message.types.hex()
            self.ledger.remember("types", self._types)
            self._waiting.appendleft(attempt)
        elif answer.kind == "memory":
            self._out_of_memory(attempt, answer)
        elif answer.message is not None:
            raise answer.message if answer.ready else self._on(answer.node, answer.message)
        else:
            self._died(attempt, answer)

    def _on(self, node: str, error: BrimError) -> BrimError:
        """The error of a node that cannot load what this machine could: a function, a tokenizer, a model."""
        name = next((each.name for each in self._nodes if each.id == node), node)
        hint = error.words[1] or "Keep it on a disk that every node sees under the same path, or install it everywhere."
        return type(error)(f"On the Ray node {name}: {error.words[0]}", hint=hint, **error.facts)

    def _is_done(self, attempt: Attempt, answer: Answer, done: Done) -> None:
        unit = attempt.unit
        self.done.add(unit, done)
        self.outcome.computed += 1
        self._advance(attempt, unit.bytes)
        self._seen.pop(unit.number, None)
        self.progress.shard(f"unit {unit.number}", done.size, done.sha256, "computed")
        if unit.spooled:
            for span in unit.spans:
                Path(span.path).unlink(missing_ok=True)
        if not attempt.alone:
            self._taken.append(max(answer.peak_bytes - answer.base_bytes, 0))

    # What goes wrong

    def _did_not_start(self, attempt: Attempt, answer: Answer) -> None:
        if answer.kind == "memory":
            self._did_not_load(attempt, answer)
            return
        self._bad_starts += 1
        if self._bad_starts > _BAD_STARTS or answer.code != -signal.SIGKILL:
            raise does_not_start(answer.code, answer.words)
        self._waiting.append(attempt)

    def _did_not_load(self, attempt: Attempt, answer: Answer) -> None:
        """Its imports took more than its share. One shows with a node to itself what they take; others wait for it."""
        if attempt.alone or answer.whole:
            room = replace(self._room(), worker_bytes=max(answer.peak_bytes - INTERPRETER_BYTES, 0))
            raise too_small(room, known=False)
        self._start_bytes = max(self._start_bytes, answer.peak_bytes)
        self._share_out()
        if any(waiting.alone for waiting in self._waiting):
            self._waiting.append(attempt)
        else:
            self._waiting.appendleft(replace(attempt, alone=True))

    def _out_of_memory(self, attempt: Attempt, answer: Answer) -> None:
        was_alone = attempt.alone or answer.whole
        again = attempt.after_memory(was_alone, self.step.splittable, answer.peak_bytes, answer.at)
        if again is None and not answer.peak_bytes:
            raise DoesNotFit(
                f"Unit {attempt.unit.number} was stopped by Ray for want of memory, with a node to itself.",
                hint=f"Use nodes with more memory. Finished units are kept. {self.step.smaller(0)}".strip(),
            )
        if again is None:
            limit = self.options.limit_bytes
            raise does_not_fit(attempt, answer.at, answer.peak_bytes, self.step, self.source.reading, limit)
        how = "row by row" if again.pieces == 0 else f"in {again.pieces} parts" if again.pieces > 1 else "alone"
        self._try_again(again, f"unit {again.unit.number} ran out of memory: trying it {how}")

    def _died(self, attempt: Attempt, answer: Answer) -> None:
        again = attempt.after_crash(answer.at)
        if again is None:
            raise crashed(attempt, self.source.reading, answer.code, answer.words, answer.at)
        died = f"a worker died ({exit_words(answer.code)}) at unit {again.unit.number}"
        self._try_again(again, f"{died}: trying it again")

    def _lost(self, attempt: Attempt) -> None:
        again = attempt.after_crash(None)
        if again is None:
            raise SinkFailed(
                f"The Ray worker or node that did unit {attempt.unit.number} was lost {attempt.crashes + 1} times.",
                hint="Look at the cluster with `ray status`, then run the same command to continue.",
            )
        self._try_again(again, f"the Ray worker or node that did unit {again.unit.number} was lost: trying it again")

    def _try_again(self, again: Attempt, why: str) -> None:
        self.progress.note(why)
        self.outcome.retries += 1
        self._waiting.appendleft(again)
