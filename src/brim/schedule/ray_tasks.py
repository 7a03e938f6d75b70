"""Units done by Ray's tasks, one each. The driver keeps the books, as it does locally.

`limit_bytes` is the limit on every node. A task asks for so many CPUs that its share of the node's limit is what a
unit takes; one that breaks its share is tried again with a whole node, then in pieces where that gives the same rows.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from brim.buckets.bucket_address import Access
from brim.errors import BrimError, DoesNotFit, SinkFailed
from brim.rows.unit import Unit
from brim.schedule.memory_line import WorkerRoom
from brim.schedule.messages import Done, Order, Probed, Setup
from brim.schedule.ray_cluster import Cluster, Node, Sight, check_nodes, loss_of
from brim.schedule.ray_gauges import Gauges, TaskNews
from brim.schedule.ray_shards import INTERPRETER_BYTES, cpus_for, drop_tasks
from brim.schedule.ray_unit import Answer, Asked, do_unit
from brim.schedule.scheduler import Attempt, Event, TaskAgain, TaskDone, TaskFailed, TaskLost, TaskQueue
from brim.schedule.unit_work import UnitReceipts, UnitWork
from brim.schedule.work_failures import crashed, does_not_start, exit_words, too_small
from brim.steps.step import Settles
from brim.stores.store import Carrier

_LISTEN_S, _FIRST_S = 0.1, 0.01
_WORKER_BYTES, _WORK_BYTES = 80 << 20, 48 << 20  # before any was seen: a worker with some imports, and a batch
_SEEN, _BAD_STARTS = 16, 3
_NODES_S = 2.0


class RayUnits:
    """The units of one job. Every node sees the folder of unit files and receipts."""

    def __init__(self, cluster: Cluster, carrier: Carrier | None, work: UnitWork, receipts: UnitReceipts) -> None:
        self._work, self._receipts, self._progress = work, receipts, work.progress
        self._folder, self._limit = work.folder.absolute(), work.options.limit_bytes
        self.most_workers = self.peak_bytes = 0
        self._cluster, self._carrier, self._gauges = cluster, carrier, Gauges(cluster)
        self._remote = cluster.ray.remote(do_unit)
        self._running: dict[Any, Attempt] = {}
        self._seen: dict[int, int] = {}  # bytes of units that were told of
        self._base = INTERPRETER_BYTES + _WORKER_BYTES
        self._taken: deque[int] = deque(maxlen=_SEEN)  # what units took above what their worker holds at rest
        self._start_bytes = 0  # what a worker needed before its first row, and did not have
        self._bad_starts = 0
        self._nodes_at = 0.0
        self._nodes: list[Node] = []
        self._checked = False
        self._types: str | None = work.ledger.recall("types") if isinstance(work.step, Settles) else ""

    def __enter__(self) -> RayUnits:
        try:
            self._look_at_nodes()
            if self._limit < INTERPRETER_BYTES + _WORK_BYTES:
                raise too_small(self._room(), known=False)
            self._put_setup()
        except BaseException:
            self._gauges.end()
            raise
        self.ahead = self._most
        return self

    def __exit__(self, *_: object) -> None:
        self._gauges.end()

    def finish(self) -> None:
        self._hear(self._gauges.last())
        self.peak_bytes = self._gauges.peak_bytes

    def _put_setup(self) -> None:
        work, self._threads = self._work, int(self._cpus)
        on_error = work.options.on_error
        setup = pickle.dumps(
            Setup(work.step, work.reading, work.writing, str(self._folder), "gate", on_error, self._threads)
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
        self._cpus = cpus_for(self._largest.cpus, need, self._limit)
        self._gpus = 0
        if self._work.options.whole_node and self._work.options.workers is None:
            self._gpus = int(self._wants_gpu() and self._largest.gpus >= 1)
            self._cpus = max(int(self._largest.cpus // max(self._largest.gpus if self._gpus else 1, 1)), 1)
        self._slots = sum(max(int(node.cpus // self._cpus), 1) for node in nodes)
        self._most = self._work.options.workers or self._slots + len(
            nodes
        )  # one waits at each, so that none waits for us

    def _wants_gpu(self) -> bool:
        return bool(getattr(self._work.step, "wants_gpu", False))

    def _check(self, unit: Unit) -> None:
        """Before the first task. The mark shows that the folder of units is the same one everywhere."""
        self._checked = True
        mark = self._folder / f".{self._gauges.run}.tmp"
        mark.touch()
        check_nodes(self._cluster, self._nodes, self._sight(unit))

    def _sight(self, unit: Unit | None) -> Sight:
        root = self._work.source.reading.options.get("root")
        paths = [*([root] if root else []), *(span.path for span in (unit.spans if unit else ())[:3])]
        access = self._work.source.reading.options.get("access")
        return Sight(
            paths=tuple(map(str, paths)),
            carrier=self._carrier,
            mark=str(self._folder / f".{self._gauges.run}.tmp"),
            access=Access(*access) if access else Access(),
        )

    def _room(self) -> WorkerRoom:
        return WorkerRoom(self._limit, INTERPRETER_BYTES, max(self._base - INTERPRETER_BYTES, 0))

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def admit(self, queue: TaskQueue) -> None:
        if time.monotonic() - self._nodes_at > _NODES_S:
            self._look_at_nodes()
        while len(self._running) < self._most and (first := queue.find()) is not None:
            if any(attempt.alone for attempt in self._running.values()):
                return
            if self._running and (first.alone or self._types is None):
                return  # it needs a node to itself; or the first batch is on its way, and all others take its types
            if not self._checked:
                self._check(first.unit)
            self._submit(queue.pop())

    def _submit(self, attempt: Attempt) -> None:
        node, limit = self._largest, self._limit
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
        self.most_workers = max(self.most_workers, min(len(self._running), self._slots))

    def listen(self) -> list[Event]:
        ray, refs = self._cluster.ray, list(self._running)
        events: list[Event] = []
        if not refs:
            time.sleep(_FIRST_S)  # the first units are being made
        elif ray.wait(refs, timeout=_LISTEN_S)[0]:
            events = [self._take(ref) for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]]
        self._hear(self._gauges.poll())
        if (late := self._gauges.late()) is not None:
            self._progress.note(late)
        self._progress.advance(0)
        return events

    def _hear(self, told: list[TaskNews]) -> None:
        attempts = {str(attempt.unit.number): attempt for attempt in self._running.values()}
        for one in told:
            for text in one.notes:
                self._progress.note(text)
            for name in one.sent.keys() & attempts.keys():
                self._advance(attempts[name], one.sent[name])
        if told:
            self._progress.nodes(dict(self._gauges.held))

    def _advance(self, attempt: Attempt, seen_bytes: int) -> None:
        """Batches count as they go by; a unit that is tried again does not count twice."""
        unit = attempt.unit
        seen, before = min(seen_bytes, unit.bytes), self._seen.get(unit.number, 0)
        self._progress.advance(max(seen - before, 0))
        self._seen[unit.number] = max(seen, before)

    def drop(self) -> None:
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

    def _take(self, ref: Any) -> Event:
        ray, attempt = self._cluster.ray, self._running.pop(ref)
        try:
            answer: Answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            if loss_of(ray, error) == "memory":
                return self._out_of_memory(attempt, Answer("memory", whole=attempt.alone))
            return self._lost(attempt)
        self._gauges.begun()
        for text in answer.notes:
            self._progress.note(text)
        if answer.base_bytes:
            self._base = answer.base_bytes
            self._share_out()
        if not answer.ready and answer.kind != "error":
            return self._did_not_start(attempt, answer)
        if isinstance(answer.message, Done):
            return self._is_done(attempt, answer, answer.message)
        if isinstance(answer.message, Probed):
            self._types = answer.message.types.hex()
            self._work.ledger.remember("types", self._types)
            return TaskAgain(attempt, first=True)
        if answer.kind == "memory":
            return self._out_of_memory(attempt, answer)
        if answer.message is not None:
            return TaskFailed(answer.message if answer.ready else self._on(answer.node, answer.message))
        return self._died(attempt, answer)

    def _on(self, node: str, error: BrimError) -> BrimError:
        """The error of a node that cannot load what this machine could: a function, a tokenizer, a model."""
        name = next((each.name for each in self._nodes if each.id == node), node)
        hint = error.words[1] or "Keep it on a disk that every node sees under the same path, or install it everywhere."
        return type(error)(f"On the Ray node {name}: {error.words[0]}", hint=hint, **error.facts)

    def _is_done(self, attempt: Attempt, answer: Answer, done: Done) -> TaskDone:
        self._receipts.done(attempt.task, done)
        self._advance(attempt, attempt.unit.bytes)
        self._seen.pop(attempt.unit.number, None)
        if not attempt.alone:
            self._taken.append(max(answer.peak_bytes - answer.base_bytes, 0))
        return TaskDone(done)

    # What goes wrong

    def _did_not_start(self, attempt: Attempt, answer: Answer) -> Event:
        if answer.kind == "memory":
            return self._did_not_load(attempt, answer)
        self._bad_starts += 1
        if self._bad_starts > _BAD_STARTS or answer.code != -signal.SIGKILL:
            return TaskFailed(does_not_start(answer.code, answer.words))
        return TaskAgain(attempt)

    def _did_not_load(self, attempt: Attempt, answer: Answer) -> Event:
        """Its imports took more than its share. One shows with a node to itself what they take; others wait for it."""
        if attempt.alone or answer.whole:
            room = replace(self._room(), worker_bytes=max(answer.peak_bytes - INTERPRETER_BYTES, 0))
            return TaskFailed(too_small(room, known=False))
        self._start_bytes = max(self._start_bytes, answer.peak_bytes)
        self._share_out()
        return TaskAgain(attempt, alone=True)

    def _out_of_memory(self, attempt: Attempt, answer: Answer) -> TaskLost:
        number, held_bytes = attempt.unit.number, answer.peak_bytes
        end: Callable[[], Exception] = functools.partial(self._work.does_not_fit, attempt, answer.at, held_bytes)
        if not held_bytes:
            end = functools.partial(
                DoesNotFit,
                f"Unit {number} was stopped by Ray for want of memory, with a node to itself.",
                hint=f"Use nodes with more memory. Finished units are kept. {self._work.step.smaller(0)}".strip(),
            )
        was_alone = attempt.alone or answer.whole
        return TaskLost(attempt, "memory", f"unit {number} ran out of memory", end, answer.at, held_bytes, was_alone)

    def _died(self, attempt: Attempt, answer: Answer) -> TaskLost:
        what = f"a worker died ({exit_words(answer.code)}) at unit {attempt.unit.number}"
        reading = self._work.source.reading
        end = functools.partial(crashed, attempt, reading, answer.code, answer.words, answer.at)
        return TaskLost(attempt, "crash", what, end, answer.at)

    def _lost(self, attempt: Attempt) -> TaskLost:
        what = f"the Ray worker or node that did unit {attempt.unit.number} was lost"
        end = functools.partial(
            SinkFailed,
            f"{what[:1].upper()}{what[1:]} {attempt.crashes + 1} times.",
            hint="Look at the cluster with `ray status`, then run the same command to continue.",
        )
        return TaskLost(attempt, "crash", what, end)
