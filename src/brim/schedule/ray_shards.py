"""Shards brought by Ray's tasks, one each. The driver keeps the books.

A task whose worker or node was lost is tried again, up to a few times; one that was killed for want of memory is tried
again with a node to itself, and then it does not fit. Ray itself retries nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from brim.errors import BrimError, DoesNotFit, SinkFailed
from brim.plans.cut_shards import Shard
from brim.plans.shard_bytes import Slice
from brim.schedule.ray_cluster import Cluster, Loss, Node, Sight, check_nodes, loss_of
from brim.schedule.ray_gauges import Gauges, Telling
from brim.sizes import format_size
from brim.state.ledger import Receipt
from brim.stores.store import Carrier, Put, Store


class Driver(Protocol):
    """Whoever runs a job, as an executor sees it. Threads may call it at the same time."""

    def slice(self, shard: Shard) -> Slice:
        """What makes a shard's bytes."""

    def known(self, shard: Shard) -> str | None:
        """Its SHA-256, if that is known."""

    def begin(self, shard: Shard) -> None:
        """The shard will be written. Called by the thread that asked for the run, before its bytes move."""

    def done(self, shard: Shard, size: int, put: Put) -> Receipt:
        """The shard is there. As soon as possible, so that a stop loses nothing that is finished."""

    def hashed(self, size: int) -> None:
        """Bytes are hashed; raises to drop the shard."""

    def sent(self, size: int) -> None:
        """Bytes are on their way; raises to drop the shard."""

    def look(self) -> None:
        """Raises if somebody asked to stop."""

    def note(self, text: str) -> None:
        """For whoever watches."""

    def nodes(self, held: dict[str, int]) -> None:
        """What machines hold, by their names."""


class Executor(Protocol):
    """Brings shards, several at a time."""

    def run(self, todo: Sequence[Shard], sink: Store, driver: Driver) -> Generator[tuple[Receipt, Put], None, None]:
        """Each shard as it is done. The first failure drops the others cleanly and is raised; closing does too."""


def carry(run: str, name: str, slice: Slice, carrier: Carrier, sha256: str | None) -> tuple[int, Put] | BrimError:
    """Make the shard's bytes and bring them there. An error of brim's is an answer: it arrives as what it is."""
    telling = Telling(run, name)
    try:
        with slice.splice() as splice:
            return splice.size, carrier.put(name, splice, sha256, telling)
    except BrimError as error:
        return error


# A Ray worker with brim and pyarrow, before any work.
INTERPRETER_BYTES = 130_000_000
_TRIES = 4
_LISTEN_S = 0.1
_NODES_S = 2.0
_CANCEL_S = 5.0


@dataclass(frozen=True, slots=True)
class _Task:
    shard: Shard
    losses: int = 0
    alone: bool = False


@dataclass(slots=True)
class _Seen:
    """How much of each shard was told of: what is tried again does not count twice."""

    sent: dict[str, int] = field(default_factory=dict)
    hashed: dict[str, int] = field(default_factory=dict)

    def forget(self, name: str) -> None:
        self.sent.pop(name, None)
        self.hashed.pop(name, None)


class RayExecutor:
    """`need_bytes` is what one task takes; as many run on a node as its CPUs and the limit allow."""

    def __init__(
        self, cluster: Cluster, sight: Sight, need_bytes: int, limit_bytes: int, workers: int | None = None
    ) -> None:
        if need_bytes > limit_bytes:
            raise DoesNotFit(
                f"A task of Ray takes about {format_size(need_bytes)} of memory with its interpreter, and a node "
                f"may take {format_size(limit_bytes)} (--memory).",
                hint=f"Raise it with --memory={-(-need_bytes // 10**6)}MB, or leave --engine=ray out.",
                need_bytes=need_bytes,
                limit_bytes=limit_bytes,
            )
        self._cluster, self._sight, self._need, self._limit = cluster, sight, need_bytes, limit_bytes
        self._workers = workers

    def run(self, todo: Sequence[Shard], sink: Store, driver: Driver) -> Generator[tuple[Receipt, Put], None, None]:
        if not todo:
            return
        carrier = sink.carrier()
        nodes = self._cluster.need_nodes()
        self._need_room(nodes)
        gauges = Gauges(self._cluster)
        gauges.watch(nodes)  # first: their processes start while the checks' do, which the first tasks take over
        sight = replace(self._sight, carrier=carrier)
        job = _Job(self._cluster, sight, driver, gauges, self._need, self._limit, self._workers)
        try:
            yield from job.run(todo)
        except BaseException:
            job.drop()
            raise
        finally:
            gauges.end()

    def _need_room(self, nodes: Sequence[Node]) -> None:
        most = max(node.memory_bytes for node in nodes)
        if self._need > most:
            raise DoesNotFit(
                f"A shard needs about {format_size(self._need)} of memory, and the largest Ray node offers "
                f"{format_size(most)}.",
                hint="Cut smaller shards, or start nodes with more (ray start --memory).",
                need_bytes=self._need,
                limit_bytes=most,
            )


class _Job:
    """One run over shards."""

    def __init__(
        self, cluster: Cluster, sight: Sight, driver: Driver, gauges: Gauges, need: int, limit: int, workers: int | None
    ) -> None:
        self._cluster, self._sight, self._driver, self._gauges = cluster, sight, driver, gauges
        self._checked: set[str] = set()
        self._need, self._limit, self._workers = need, limit, workers
        self._remote = cluster.ray.remote(carry)
        self._running: dict[Any, _Task] = {}
        self._again: deque[_Task] = deque()
        self._seen = _Seen()

    def run(self, todo: Sequence[Shard]) -> Generator[tuple[Receipt, Put], None, None]:
        queue = iter(todo)
        most, looked = self._most(), time.monotonic()
        while True:
            while self._may_submit(most):
                task = self._again.popleft() if self._again else None
                if task is None:
                    shard = next(queue, None)
                    if shard is None:
                        break
                    self._driver.begin(shard)
                    task = _Task(shard)
                self._submit(task)
            if not self._running:
                return
            for ref in self._finished(_LISTEN_S):
                done = self._take(ref)
                if done is not None:
                    yield done
            self._driver.look()
            if self._listen() or time.monotonic() - looked > _NODES_S:
                most, looked = self._most(), time.monotonic()

    def drop(self) -> None:
        """What is finished is written down, what is on its way is dropped."""
        ray = self._cluster.ray
        if self._cluster.lost:
            return
        for ref in self._finished(0):
            try:
                self._take(ref)
            except (BrimError, ray.exceptions.RayError):
                continue
        drop_tasks(ray, list(self._running))
        self._running = {}

    def _most(self) -> int:
        """Tasks at a time: what the nodes can do, and one more for each, so that none waits for the driver."""
        nodes = self._cluster.need_nodes()
        self._gauges.watch(nodes)
        if new := [node for node in nodes if node.id not in self._checked]:
            check_nodes(self._cluster, new, self._sight)
            self._checked |= {node.id for node in new}
        self._largest = max(nodes, key=lambda node: node.cpus)
        self._cpus = cpus_for(self._largest.cpus, self._need, self._limit)
        return self._workers or sum(max(int(node.cpus // self._cpus), 1) + 1 for node in nodes)

    def _may_submit(self, most: int) -> bool:
        if any(task.alone for task in self._running.values()):
            return False
        if self._again and self._again[0].alone:
            return not self._running
        return len(self._running) < most

    def _submit(self, task: _Task) -> None:
        cpus, memory = (self._largest.cpus, self._largest.memory_bytes) if task.alone else (self._cpus, self._need)
        remote = self._remote.options(num_cpus=cpus, memory=memory, max_retries=0, scheduling_strategy="SPREAD")
        shard, driver = task.shard, self._driver
        ref = remote.remote(self._gauges.run, shard.name, driver.slice(shard), self._sight.carrier, driver.known(shard))
        self._running[ref] = task
        self._gauges.submitted()

    def _finished(self, wait_s: float) -> list[Any]:
        ray, refs = self._cluster.ray, list(self._running)
        if not refs or (wait_s and not ray.wait(refs, timeout=wait_s)[0]):
            return []
        return list(ray.wait(refs, num_returns=len(refs), timeout=0)[0])

    def _take(self, ref: Any) -> tuple[Receipt, Put] | None:
        ray, task = self._cluster.ray, self._running.pop(ref)
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            self._lost(task, loss_of(ray, error))
            return None
        if isinstance(answer, BrimError):
            raise answer
        self._gauges.begun()
        size, put = answer
        receipt = self._driver.done(task.shard, size, put)
        self._advance(task.shard.name, size)
        self._seen.forget(task.shard.name)
        return receipt, put

    def _advance(self, name: str, sent: int, hashed: int = 0) -> None:
        seen = self._seen
        if sent > seen.sent.get(name, 0):
            self._driver.sent(sent - seen.sent.get(name, 0))
            seen.sent[name] = sent
        if hashed > seen.hashed.get(name, 0):
            self._driver.hashed(hashed - seen.hashed.get(name, 0))
            seen.hashed[name] = hashed

    def _listen(self) -> bool:
        told = self._gauges.poll()
        if (late := self._gauges.late()) is not None:
            self._driver.note(late)
        names = {task.shard.name for task in self._running.values()}
        for one in told:
            for name in one.sent.keys() & names:
                self._advance(name, one.sent[name], one.hashed[name])
        if told:
            self._driver.nodes(dict(self._gauges.held))
        return bool(told)

    def _lost(self, task: _Task, loss: Loss) -> None:
        name = task.shard.name
        if loss == "memory":
            if task.alone:
                raise DoesNotFit(
                    f"{name} was stopped by Ray for want of memory, with a node to itself.",
                    hint="Cut smaller shards, or use nodes with more memory. Finished shards are kept.",
                )
            self._driver.note(f"{name} was stopped by Ray for want of memory: trying it with a node to itself")
            self._again.append(replace(task, alone=True))
            return
        if task.losses + 1 >= _TRIES:
            raise SinkFailed(
                f"The worker or node that brought {name} was lost {_TRIES} times.",
                hint="Look at the cluster with `ray status`, then run the same command to continue.",
            )
        self._driver.note(f"the worker or node that brought {name} was lost: trying it again")
        self._again.append(replace(task, losses=task.losses + 1))


def cpus_for(node_cpus: float, need_bytes: int, limit_bytes: int) -> int:
    """CPUs that a task asks for, so that the tasks of a node together stay within the limit."""
    slots = max(limit_bytes // max(need_bytes, 1), 1)
    return max(-(-int(node_cpus) // int(slots)), 1)


def drop_tasks(ray: Any, refs: list[Any]) -> None:
    """End tasks: first so that they clean up after themselves, then in any case."""
    for ref in refs:
        ray.cancel(ref, force=False)
    late = ray.wait(refs, num_returns=len(refs), timeout=_CANCEL_S)[1] if refs else []
    for ref in late:
        try:
            ray.cancel(ref, force=True)
        except ray.exceptions.RayError:
            continue
