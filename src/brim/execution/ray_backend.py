"""Shards and units as tasks of a Ray, one each. The driver keeps the books, as it does locally. Ray retries nothing.

The limit is one for every node. A task asks for so many CPUs that its share of a node's limit is what it takes; one
that was stopped for want of memory is tried again with a whole node.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from brim.compute.outputs.output import Finished
from brim.compute.rows.unit import Unit
from brim.compute.steps.step import Settles
from brim.errors import BrimError, DestinationUnavailableError, MemoryLimitError
from brim.execution.failures import crashed, does_not_start, exit_words, too_small
from brim.execution.memory_limiter import WorkerRoom
from brim.execution.ray_cluster import Cluster, Loss, Node, Sight, check_nodes, loss_of
from brim.execution.ray_monitors import Gauges, TaskNews
from brim.execution.ray_worker import OWN_UNITS, Answer, Asked, Ending, carry, do_unit, finish_there
from brim.execution.run_units import UnitReceipts, UnitWork
from brim.execution.scheduler import (
    Attempt,
    Event,
    Finish,
    Listed,
    Receipts,
    Retries,
    Task,
    TaskAgain,
    TaskDone,
    TaskFailed,
    TaskLost,
    TaskQueue,
    run,
)
from brim.execution.worker_messages import Done, Order, Probed, Setup
from brim.progress import Progress
from brim.records import dataclass
from brim.sizes import format_size
from brim.state.stop import Stop
from brim.storage.location import Access, Location
from brim.storage.storage import PutResult
from brim.stores.store import Carrier, Store

INTERPRETER_BYTES = 130_000_000  # a Ray worker with brim and pyarrow, before any work
_LISTEN_S, _FIRST_S = 0.1, 0.01
_WORKER_BYTES, _WORK_BYTES = 80 << 20, 48 << 20  # before any was seen: a worker with some imports, and a batch
_SEEN, _BAD_STARTS = 16, 3
_NODES_S, _CANCEL_S = 2.0, 1.5
_FINISHING_CPUS = 2  # one that reads and packs, one that compresses
_FINISHING = Retries(crashes=4, alone="with a node to itself")
_LOOK_AT_IT = "Look at the cluster with `ray status`, then run the same command to continue."


class RayBackend:
    """What shards and units share: nodes that come and go, tasks on their way, and what is told of them."""

    def __init__(self, cluster: Cluster, receipts: Receipts, progress: Progress, function: Callable[..., Any]) -> None:
        self._cluster, self._receipts, self._progress = cluster, receipts, progress
        self._remote, self._gauges = cluster.ray.remote(function), Gauges(cluster)
        self._running: dict[Any, Attempt] = {}
        self._where: dict[Any, str] = {}  # the node that each was meant for
        self._cpus_at: dict[str, int] = {}  # what a task asks for on each node
        self._told: dict[str, tuple[int, int]] = {}  # bytes sent and hashed: what is tried again does not count twice
        self._nodes: list[Node] = []
        self._nodes_at = 0.0
        self._sight: Sight | None = None  # what nodes have to see; None while that is not known
        self._checked: set[str] = set()
        self._most = 1

    def __exit__(self, *_: object) -> None:
        self._gauges.end()

    @contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """What cannot begin leaves nothing on the nodes."""
        try:
            yield
        except BaseException:
            self._gauges.end()
            raise

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def admit(self, queue: TaskQueue) -> None:
        if time.monotonic() - self._nodes_at > _NODES_S:
            self._look_at_nodes()
        while len(self._running) < self._most and (first := queue.find()) is not None:
            if any(attempt.alone for attempt in self._running.values()):
                return
            if self._running and (first.alone or self._one_first()):
                return
            self._submit(queue.pop())

    def listen(self) -> list[Event]:
        events = [self._take(ref) for ref in self._finished(_LISTEN_S)]
        self._hear(self._gauges.poll())
        if (late := self._gauges.late()) is not None:
            self._progress.note(late)
        self._progress.advance(0)
        return events

    def drop(self) -> None:
        ray = self._cluster.ray
        if self._cluster.lost:
            return
        for ref in self._finished(0):
            try:
                self._take(ref)
            except (BrimError, ray.exceptions.RayError):
                continue
        _drop_tasks(ray, list(self._running))
        self._running, self._where = {}, {}

    # What differs

    def _share_out(self) -> None:
        """Settle what a task asks of a node, and how many are on their way at a time."""
        raise NotImplementedError

    def _one_first(self) -> bool:
        """Whether others wait for what is on its way."""
        return False

    def _submit(self, attempt: Attempt) -> None:
        raise NotImplementedError

    def _answered(self, attempt: Attempt, answer: Any) -> Event:
        raise NotImplementedError

    def _lost(self, attempt: Attempt, loss: Loss) -> TaskLost:
        raise NotImplementedError

    # Nodes

    def _look_at_nodes(self) -> None:
        """What they offer."""
        self._nodes_at = time.monotonic()
        self._nodes = self._cluster.need_nodes()
        self._gauges.watch(self._nodes)  # first: their processes start while the checks' do, which tasks take over
        self._check_nodes()
        self._share_out()

    def _check_nodes(self) -> None:
        if self._sight is None:
            return
        if new := [node for node in self._nodes if node.id not in self._checked]:
            check_nodes(self._cluster, new, self._sight)
            self._checked |= {node.id for node in new}

    # Tasks

    def _send(self, attempt: Attempt, node: Node, options: dict[str, Any], *words: Any) -> None:
        remote = self._remote.options(max_retries=0, scheduling_strategy=self._strategy(attempt, node), **options)
        ref = remote.remote(*words)
        self._running[ref], self._where[ref] = attempt, node.id
        self._gauges.submitted()

    def _strategy(self, attempt: Attempt, node: Node) -> Any:
        """Ray finds a node by itself, where all are alike; else what a task asks for is of one node's size."""
        if attempt.alone or len({(each.cpus, each.gpus) for each in self._nodes}) == 1:
            return "SPREAD"
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node.id, soft=True)

    def _divide(self, need_bytes: int, limit_bytes: int) -> int:
        """Settle what a task asks of each node, so that those of a node stay within its limit; how many run at once."""
        self._cpus_at = {
            node.id: _cpus_for(node.cpus, need_bytes, min(limit_bytes, node.memory_bytes or limit_bytes))
            for node in self._nodes
        }
        return sum(map(self._slots_of, self._nodes))

    def _slots_of(self, node: Node) -> int:
        return max(int(node.cpus // self._cpus_at[node.id]), 1)

    def _freest(self) -> Node:
        """The node with the most room for one more, for its size."""
        busy = Counter(self._where[ref] for ref in self._running)
        return max(self._nodes, key=lambda node: 1 - busy[node.id] / (self._slots_of(node) + 1))

    def _finished(self, wait_s: float) -> list[Any]:
        ray, refs = self._cluster.ray, list(self._running)
        if not refs:
            time.sleep(min(wait_s, _FIRST_S))  # the first units are being made
            return []
        if wait_s and not ray.wait(refs, timeout=wait_s)[0]:
            return []
        return list(ray.wait(refs, num_returns=len(refs), timeout=0)[0])

    def _take(self, ref: Any) -> Event:
        ray, attempt = self._cluster.ray, self._running.pop(ref)
        self._where.pop(ref)
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            return self._lost(attempt, loss_of(ray, error))
        self._gauges.begun()
        return self._answered(attempt, answer)

    def _done(self, attempt: Attempt, result: Any, size: int) -> TaskDone:
        kept = self._receipts.done(attempt.task, result)
        self._advance(attempt, size)
        self._told.pop(attempt.task.name, None)
        return TaskDone(kept)

    def _hear(self, told: list[TaskNews]) -> None:
        attempts = {attempt.task.name: attempt for attempt in self._running.values()}
        for one in told:
            for text in one.notes:
                self._progress.note(text)
            for name in one.sent.keys() & attempts.keys():
                self._advance(attempts[name], one.sent[name], one.hashed[name])
        if told:
            self._progress.nodes(dict(self._gauges.held))

    def _advance(self, attempt: Attempt, sent: int, hashed: int = 0) -> None:
        name = attempt.task.name
        sent_before, hashed_before = self._told.get(name, (0, 0))
        if sent > sent_before:
            self._progress.advance(sent - sent_before)
        if hashed > hashed_before:
            self._progress.hashed(hashed - hashed_before)
        self._told[name] = max(sent, sent_before), max(hashed, hashed_before)


@dataclass(frozen=True, slots=True)
class RayBringing:
    """A Ray that will bring shards. `need_bytes` is what one task takes; known to fit, before hours of work."""

    cluster: Cluster
    sight: Sight
    need_bytes: int
    limit_bytes: int
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.need_bytes > self.limit_bytes:
            raise MemoryLimitError(
                f"A task of Ray takes about {format_size(self.need_bytes)} of memory with its interpreter, and a node "
                f"may take {format_size(self.limit_bytes)} (--memory).",
                hint=f"Raise it with --memory={-(-self.need_bytes // 10**6)}MB, or leave --engine=ray out.",
                need_bytes=self.need_bytes,
                limit_bytes=self.limit_bytes,
            )

    def __call__(self, store: Store, receipts: Receipts, progress: Progress, stop: Stop) -> RayShards:
        return RayShards(self, store, receipts, progress)


class RayShards(RayBackend):
    """The shards of one job."""

    def __init__(self, bringing: RayBringing, store: Store, receipts: Receipts, progress: Progress) -> None:
        super().__init__(bringing.cluster, receipts, progress, carry)
        self._bringing, self._store = bringing, store

    def __enter__(self) -> RayShards:
        self._carrier = self._store.carrier()
        self._need_room(self._cluster.need_nodes())
        self._sight = replace(self._bringing.sight, carrier=self._carrier)
        with self._leaving_nothing():
            self._look_at_nodes()
        return self

    def _need_room(self, nodes: list[Node]) -> None:
        most, need = max(node.memory_bytes for node in nodes), self._bringing.need_bytes
        if need > most:
            raise MemoryLimitError(
                f"A shard needs about {format_size(need)} of memory, and the largest Ray node offers "
                f"{format_size(most)}.",
                hint="Cut smaller shards, or start nodes with more (ray start --memory).",
                need_bytes=need,
                limit_bytes=most,
            )

    def _share_out(self) -> None:
        self._largest = max(self._nodes, key=lambda node: node.cpus)
        slots = self._divide(self._bringing.need_bytes, self._bringing.limit_bytes)
        self._most = self._bringing.workers or slots + len(self._nodes)  # one waits at each, so that none waits for us

    def _submit(self, attempt: Attempt) -> None:
        node, work = self._largest if attempt.alone else self._freest(), attempt.bring
        cpus, memory = node.cpus, node.memory_bytes
        if not attempt.alone:
            cpus, memory = self._cpus_at[node.id], self._bringing.need_bytes
        slice, name = work.slice(work.shard), attempt.task.name
        options = {"num_cpus": cpus, "memory": memory}
        self._send(attempt, node, options, self._gauges.run, name, slice, self._carrier, work.sha256)

    def _answered(self, attempt: Attempt, answer: tuple[int, PutResult] | BrimError) -> Event:
        return TaskFailed(answer) if isinstance(answer, BrimError) else self._done(attempt, answer, answer[0])

    def _lost(self, attempt: Attempt, loss: Loss) -> TaskLost:
        name = attempt.task.name
        if loss == "memory":
            what = f"{name} was stopped by Ray for want of memory"
            end: Callable[[], Exception] = functools.partial(
                MemoryLimitError,
                f"{what}, with a node to itself.",
                hint="Cut smaller shards, or use nodes with more memory. Finished shards are kept.",
            )
            return TaskLost(attempt, "memory", what, end, was_alone=attempt.alone)
        what = f"the worker or node that brought {name} was lost"
        end = functools.partial(
            DestinationUnavailableError, f"T{what[1:]} {attempt.crashes + 1} times.", hint=_LOOK_AT_IT
        )
        return TaskLost(attempt, "crash", what, end)


class RayUnits(RayBackend):
    """The units of one job. Every node sees the folder of unit files, or puts them to a bucket, `units`."""

    def __init__(
        self,
        cluster: Cluster,
        carrier: Carrier | None,
        units: Location | None,
        work: UnitWork,
        receipts: UnitReceipts,
    ) -> None:
        super().__init__(cluster, receipts, work.progress, do_unit)
        self._work, self._carrier, self._units = work, carrier, units
        self._folder, self._limit = work.folder.absolute(), work.options.limit_bytes
        self.ahead, self.most_workers, self.peak_bytes = 1, 0, 0
        self._base = INTERPRETER_BYTES + _WORKER_BYTES
        self._taken: deque[int] = deque(maxlen=_SEEN)  # what units took above what their worker holds at rest
        self._start_bytes = 0  # what a worker needed before its first row, and did not have
        self._bad_starts = 0
        self._types: str | None = work.ledger.recall("types") if isinstance(work.step, Settles) else ""

    def __enter__(self) -> RayUnits:
        with self._leaving_nothing():
            self._look_at_nodes()
            if self._limit < INTERPRETER_BYTES + _WORK_BYTES:
                raise too_small(self._room())
            self._put_setup()
        self.ahead = self._most
        return self

    def finish(self) -> None:
        self._hear(self._gauges.last())
        self.peak_bytes = self._gauges.peak_bytes

    def _put_setup(self) -> None:
        work, self._threads = self._work, self._cpus_at[self._largest.id]
        on_error = work.options.on_error
        folder = str(self._folder) if self._units is None else OWN_UNITS
        what = (work.step, work.reading, work.writing)
        setup = pickle.dumps(Setup(*what, folder, "gate", on_error, self._threads, seed=work.seed))
        self._digest = hashlib.sha256(setup + self._gauges.run.encode()).hexdigest()
        self._setup = self._cluster.ray.put(setup)

    def _share_out(self) -> None:
        """What a task asks of a node, as far as it is known what units take."""
        nodes = self._nodes
        self._largest = max(nodes, key=lambda node: (node.gpus if self._wants_gpu() else 0, node.cpus))
        usual = sorted(self._taken)[3 * len(self._taken) // 4] if self._taken else _WORK_BYTES
        need = max(self._base + max(round(1.1 * usual), _WORK_BYTES // 2), self._start_bytes)
        self._slots = self._divide(need, self._limit)
        self._gpus = 0
        if self._work.options.whole_node and self._work.options.workers is None:
            self._gpus = int(self._wants_gpu() and self._largest.gpus >= 1)
            for node in nodes:
                self._cpus_at[node.id] = max(int(node.cpus // max(node.gpus if self._gpus else 1, 1)), 1)
            self._slots = sum(map(self._slots_of, nodes))
        # One waits at each, so that none waits for us.
        self._most = self._work.options.workers or self._slots + len(nodes)

    def _wants_gpu(self) -> bool:
        return bool(getattr(self._work.step, "wants_gpu", False))

    def _check_with(self, unit: Unit) -> None:
        """Before the first task. The mark shows that the folder of units is the same one everywhere."""
        (self._folder / f".{self._gauges.run}.tmp").touch()
        self._sight = self._sight_of(unit)
        self._check_nodes()
        self._sight = self._sight_of(None)  # what was made for a unit goes with it

    def _sight_of(self, unit: Unit | None) -> Sight:
        root = self._work.source.reading.options.get("root")
        paths = [*([root] if root else []), *(span.path for span in (unit.spans if unit else ())[:3])]
        access = self._work.source.reading.options.get("access")
        return Sight(
            paths=tuple(map(str, paths)),
            carrier=self._carrier,
            mark=str(self._folder / f".{self._gauges.run}.tmp") if self._units is None else "",
            access=Access(*access) if access else Access(),
        )

    def _room(self) -> WorkerRoom:
        return WorkerRoom(self._limit, INTERPRETER_BYTES, max(self._base - INTERPRETER_BYTES, 0))

    def _one_first(self) -> bool:
        return self._types is None  # the first batch is on its way, and all others take its types

    def _submit(self, attempt: Attempt) -> None:
        if self._sight is None:
            self._check_with(attempt.unit)
        node = self._largest if attempt.alone else self._freest()
        limit = min(self._limit, node.memory_bytes or self._limit)
        cpus = int(node.cpus) if attempt.alone else self._cpus_at[node.id]
        soft = round(0.9 * limit * cpus / node.cpus)
        order = Order(attempt.unit, attempt.pieces, soft, self._types is None, bytes.fromhex(self._types or ""))
        run, name = self._gauges.run, attempt.task.name
        asked = Asked(run, name, self._digest, order, limit, cpus, self._threads, os.getcwd(), self._units)
        options: dict[str, Any] = {"num_cpus": cpus, "memory": int(limit * cpus / node.cpus)}
        if self._gpus:
            options["num_gpus"] = self._gpus
        self._send(attempt, node, options, self._setup, asked)
        self.most_workers = max(self.most_workers, min(len(self._running), self._slots))

    def _advance(self, attempt: Attempt, sent: int, hashed: int = 0) -> None:
        super()._advance(attempt, min(sent, attempt.unit.bytes))

    # What comes back

    def _answered(self, attempt: Attempt, answer: Answer) -> Event:
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
        if not attempt.alone:
            self._taken.append(max(answer.peak_bytes - answer.base_bytes, 0))
        return self._done(attempt, done, attempt.unit.bytes)

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
            return TaskFailed(too_small(room))
        self._start_bytes = max(self._start_bytes, answer.peak_bytes)
        self._share_out()
        return TaskAgain(attempt, alone=True)

    def _out_of_memory(self, attempt: Attempt, answer: Answer) -> TaskLost:
        number, held_bytes = attempt.unit.number, answer.peak_bytes
        end: Callable[[], Exception] = functools.partial(self._work.does_not_fit, attempt, answer.at, held_bytes)
        if not held_bytes:
            end = functools.partial(
                MemoryLimitError,
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

    def _lost(self, attempt: Attempt, loss: Loss) -> TaskLost:
        if loss == "memory":
            return self._out_of_memory(attempt, Answer("memory", whole=attempt.alone))
        what = f"the Ray worker or node that did unit {attempt.unit.number} was lost"
        end = functools.partial(
            DestinationUnavailableError, f"T{what[1:]} {attempt.crashes + 1} times.", hint=_LOOK_AT_IT
        )
        return TaskLost(attempt, "crash", what, end)


class RayFinishing(RayBackend):
    """The end of a computed job, on the largest node. A node that is lost on the way costs doing it again."""

    def __init__(self, cluster: Cluster, ending: Ending, progress: Progress) -> None:
        super().__init__(cluster, _NoReceipts(), progress, finish_there)
        self._ending = ending

    def __enter__(self) -> RayFinishing:
        folder = () if self._ending.at is not None else (str(self._ending.units.folder),)
        self._sight = Sight(paths=folder)
        with self._leaving_nothing():
            self._look_at_nodes()
        return self

    @property
    def peak_bytes(self) -> int:
        self._hear(self._gauges.last())
        return self._gauges.peak_bytes

    def _share_out(self) -> None:
        self._largest = max(self._nodes, key=lambda node: (node.memory_bytes, node.cpus))

    def _submit(self, attempt: Attempt) -> None:
        node, units = self._largest, self._ending.units
        limit = min(units.limit_bytes, node.memory_bytes or units.limit_bytes)
        ending = replace(self._ending, units=replace(units, limit_bytes=limit))
        options = {"num_cpus": min(int(node.cpus), _FINISHING_CPUS), "memory": limit}
        self._send(attempt, node, options, self._gauges.run, attempt.task.name, ending)

    def _answered(self, attempt: Attempt, answer: Finished | BrimError) -> Event:
        return TaskFailed(answer) if isinstance(answer, BrimError) else self._done(attempt, answer, 0)

    def _lost(self, attempt: Attempt, loss: Loss) -> TaskLost:
        what = "the Ray worker or node that put the units together was lost"
        if loss == "memory":
            what = "putting the units together was stopped by Ray for want of memory"
            end: Callable[[], Exception] = functools.partial(
                MemoryLimitError,
                f"P{what[1:]}.",
                hint="Give less --memory, or use nodes with more. Finished units are kept.",
            )
            return TaskLost(attempt, "memory", what, end, was_alone=attempt.alone)
        end = functools.partial(
            DestinationUnavailableError, f"T{what[1:]} {attempt.crashes + 1} times.", hint=_LOOK_AT_IT
        )
        return TaskLost(attempt, "crash", what, end)


class _NoReceipts:
    """What is finished has its receipts when it is delivered."""

    def skip(self, task: Task) -> bool:
        return False

    def begin(self, task: Task) -> None: ...

    def done(self, task: Task, result: Any) -> Any:
        return result


def finish_on_cluster(cluster: Cluster, ending: Ending, progress: Progress, stop: Stop) -> tuple[Finished, int]:
    """What a node made of all units, and the most that a node held meanwhile."""
    size = sum(receipt.size for receipt in ending.units.receipts)
    backend = RayFinishing(cluster, ending, progress)
    queue = TaskQueue(Listed([ending]), lambda _: Task("finish", size, Finish()), _NoReceipts(), progress, _FINISHING)
    with backend, closing(run(queue, backend, stop)) as results:
        finished: Finished = next(results)
        return finished, backend.peak_bytes


def _cpus_for(node_cpus: float, need_bytes: int, limit_bytes: int) -> int:
    """CPUs that a task asks for, so that the tasks of a node together stay within the limit."""
    slots = max(limit_bytes // max(need_bytes, 1), 1)
    return max(-(-int(node_cpus) // int(slots)), 1)


def _drop_tasks(ray: Any, refs: list[Any]) -> None:
    """End tasks: first so that they clean up after themselves, then in any case."""
    for ref in refs:
        ray.cancel(ref, force=False)
    late = ray.wait(refs, num_returns=len(refs), timeout=_CANCEL_S)[1] if refs else []
    for ref in late:
        try:
            ray.cancel(ref, force=True)
        except ray.exceptions.RayError:
            continue
