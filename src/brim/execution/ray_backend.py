"""Run shards, units and the finish of a job as tasks of a Ray cluster. The driver writes receipts, as it does locally.

The memory limit is per node. A task requests so many CPUs that its share of the node's limit is its need; a task that
ran out of memory is retried with a whole node. Ray itself retries nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, Self

from brim.compute.outputs.output import Finished
from brim.compute.rows.unit import Unit
from brim.compute.steps.step import HasTypeInference
from brim.errors import BrimError, DestinationUnavailableError, MemoryLimitError
from brim.execution.failures import does_not_start, too_small
from brim.execution.memory_limiter import MemoryBudget, WorkMemory, divide_node
from brim.execution.ray_cluster import INTERPRETER_BYTES, Cluster, Loss, Node, NodeRequirements, check_nodes, loss_of
from brim.execution.ray_monitors import NodeMonitors, NodeReport
from brim.execution.ray_worker import UNITS_FOLDER, FinishOrder, UnitAnswer, UnitRequest, run_task
from brim.execution.scheduler import (
    Attempt,
    Event,
    Receipts,
    Retries,
    Task,
    TaskDone,
    TaskFailed,
    TaskLost,
    TaskQueue,
    TaskReturned,
    run_tasks,
)
from brim.execution.unit_receipts import UnitJob, UnitReceipts
from brim.execution.worker_messages import ProbeDone, UnitDone, UnitOrder, WorkerSetup
from brim.progress import Progress
from brim.sizes import format_size
from brim.state.stop import Stop
from brim.storage.destination_address import Uploader
from brim.storage.location import Access, Location

_POLL_S, _FIRST_S = 0.1, 0.01
_WORKER_BYTES, _WORK_BYTES = 80 << 20, 48 << 20  # before any was measured: a worker with imports, and a batch
_MOST_BAD_STARTS = 3
_NODES_S, _CANCEL_S = 2.0, 1.5
_FINISH_CPUS = 2  # one that reads and packs, one that compresses
_STATUS_HINT = "Look at the cluster with `ray status`, then run the same command to continue."
UPLOAD_RETRIES = Retries(crashes=4, alone_text="with a node to itself")


class RayBackend:
    """Tasks of known memory: uploads, and the finish of a job. RayUnits measures what its tasks need.

    `make_order` makes the order of a task. `text` describes the worker of a task, for notes and errors.
    """

    def __init__(
        self,
        cluster: Cluster,
        requirements: NodeRequirements | None,
        need_bytes: int,
        limit_bytes: int,
        receipts: Receipts,
        progress: Progress,
        *,
        make_order: Callable[[Task], Any] = lambda task: None,
        text: Callable[[Task], str] = lambda task: f"the worker or node that uploaded {task.name}",
        memory_hint: str = "Use smaller shards, or nodes with more memory. Finished shards are kept.",
        workers: int | None = None,
        most_cpus: int | None = None,
    ) -> None:
        self._cluster, self._requirements, self._receipts, self._progress = cluster, requirements, receipts, progress
        self._need, self._limit, self._workers, self._most_cpus = need_bytes, limit_bytes, workers, most_cpus
        self._make_order, self._text, self._memory_hint = make_order, text, memory_hint
        self._remote, self.monitors = cluster.ray.remote(run_task), NodeMonitors(cluster)
        self._running: dict[Any, tuple[Attempt, str]] = {}  # each with the id of its node
        self._cpus: dict[str, int] = {}  # requested by a task on each node
        self._counted: dict[str, tuple[int, int]] = {}  # bytes sent and hashed: a retried task does not count twice
        self._nodes: list[Node] = []
        self._nodes_at = 0.0
        self._checked: set[str] = set()
        self._max_tasks = 1

    def __enter__(self) -> Self:
        node_bytes = max(node.memory_bytes for node in self._cluster.need_nodes())
        if 0 < node_bytes < self._need:
            raise MemoryLimitError(
                f"A shard needs about {format_size(self._need)} of memory, and the largest Ray node offers "
                f"{format_size(node_bytes)}.",
                hint="Use smaller shards, or start nodes with more memory (ray start --memory).",
                need_bytes=self._need,
                limit_bytes=node_bytes,
            )
        self._open()
        return self

    def _open(self) -> None:
        try:
            self._update_nodes()
        except BaseException:
            self.monitors.end()
            raise

    def __exit__(self, *_: object) -> None:
        self.monitors.end()

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def start_tasks(self, queue: TaskQueue) -> None:
        if time.monotonic() - self._nodes_at > _NODES_S:
            self._update_nodes()
        while len(self._running) < self._max_tasks and (first := queue.peek()) is not None:
            if any(attempt.is_exclusive for attempt, _ in self._running.values()):
                return
            if self._running and (first.is_exclusive or self._waits_for_first()):
                return
            attempt = queue.pop()
            # The node with the most unused slots, relative to its size.
            busy = Counter(node_id for _, node_id in self._running.values())
            free = max(self._nodes, key=lambda node: 1 - busy[node.id] / (self._slots_of(node) + 1))
            node = self._largest if attempt.is_exclusive else free
            options, *values = self._request(attempt, node)
            options |= {"name": values[0].task_name, "max_retries": 0}
            remote = self._remote.options(scheduling_strategy=self._strategy(attempt, node), **options)
            self._running[remote.remote(self.monitors.run, attempt.task.name, *values)] = attempt, node.id
            self.monitors.task_submitted()

    def poll(self) -> list[Event]:
        events = [self._take(ref) for ref in self._finished(_POLL_S)]
        self._show(self.monitors.poll())
        if (note := self.monitors.late_note()) is not None:
            self._progress.note(note)
        self._progress.advance(0)
        return events

    def cancel(self) -> None:
        ray = self._cluster.ray
        if self._cluster.is_lost:
            return
        for ref in self._finished(0):
            try:
                self._take(ref)
            except (BrimError, ray.exceptions.RayError):
                continue
        # First so that tasks clean up after themselves, then in any case.
        refs, self._running = list(self._running), {}
        for ref in refs:
            ray.cancel(ref, force=False)
        for ref in ray.wait(refs, num_returns=len(refs), timeout=_CANCEL_S)[1] if refs else []:
            try:
                ray.cancel(ref, force=True)
            except ray.exceptions.RayError:
                continue

    # What units do in another way

    def _divide(self) -> None:
        """Decide how many CPUs a task requests on each node, and how many tasks run at a time."""
        # One waits at each node, so that none waits for the driver.
        self._max_tasks = self._workers or self._slots(self._need) + len(self._nodes)

    @property
    def _largest(self) -> Node:
        return max(self._nodes, key=lambda node: node.cpus)

    def _waits_for_first(self) -> bool:
        """Return whether other tasks wait for the running one."""
        return False

    def _request(self, attempt: Attempt, node: Node) -> tuple[Any, ...]:
        """Return the resources of a task, and the arguments of `run_task`."""
        order = self._make_order(attempt.task)
        cpus, memory = node.cpus, node.memory_bytes
        if not attempt.is_exclusive:
            cpus, memory = min(self._cpus[node.id], self._most_cpus or self._cpus[node.id]), self._need
        return {"num_cpus": cpus, "memory": memory}, order

    def _handle_answer(self, attempt: Attempt, answer: Any) -> Event:
        return TaskFailed(answer) if isinstance(answer, BrimError) else self._event(attempt, answer, attempt.task.bytes)

    def _lose(self, attempt: Attempt, loss: Loss) -> TaskLost:
        worker = self._text(attempt.task)
        if loss == "memory":
            text = f"{worker} was stopped by Ray because its memory was full"
            error: Callable[[], Exception] = functools.partial(
                MemoryLimitError, f"T{text[1:]}, with a node to itself.", hint=self._memory_hint
            )
            return TaskLost(attempt, "memory", text, error, was_exclusive=attempt.is_exclusive)
        text = f"{worker} was lost"
        error = functools.partial(
            DestinationUnavailableError, f"T{text[1:]} {attempt.crashes + 1} times.", hint=_STATUS_HINT
        )
        return TaskLost(attempt, "crash", text, error)

    # Nodes

    def _update_nodes(self) -> None:
        self._nodes_at = time.monotonic()
        self._nodes = self._cluster.need_nodes()
        self.monitors.watch(self._nodes)  # first: their processes start during the checks, and tasks reuse them
        self._check_nodes()
        self._divide()

    def _check_nodes(self) -> None:
        new = [node for node in self._nodes if node.id not in self._checked]
        if self._requirements is not None and new:
            check_nodes(self._cluster, new, self._requirements)
            self._checked |= {node.id for node in new}

    def _slots(self, need_bytes: int) -> int:
        """Divide each node among tasks, so that they stay within its limit; return how many run on all nodes."""
        limit = self._limit
        self._cpus = {
            node.id: divide_node(node.cpus, need_bytes, min(limit, node.memory_bytes or limit)) for node in self._nodes
        }
        return sum(map(self._slots_of, self._nodes))

    def _slots_of(self, node: Node) -> int:
        return max(int(node.cpus // self._cpus[node.id]), 1)

    def _strategy(self, attempt: Attempt, node: Node) -> Any:
        """Ray chooses the node where all are alike; otherwise a request fits a node of one size."""
        if attempt.is_exclusive or len({(item.cpus, item.gpus) for item in self._nodes}) == 1:
            return "SPREAD"
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node.id, soft=True)

    # Answers

    def _finished(self, wait_s: float) -> list[Any]:
        ray, refs = self._cluster.ray, list(self._running)
        if not refs:
            time.sleep(min(wait_s, _FIRST_S))  # the first units are being made
            return []
        if wait_s and not ray.wait(refs, timeout=wait_s)[0]:
            return []
        return list(ray.wait(refs, num_returns=len(refs), timeout=0)[0])

    def _take(self, ref: Any) -> Event:
        ray, (attempt, _) = self._cluster.ray, self._running.pop(ref)
        try:
            answer = ray.get(ref)
        except ray.exceptions.RayError as error:
            return self._lose(attempt, loss_of(ray, error))
        self.monitors.task_begun()
        return self._handle_answer(attempt, answer)

    def _event(self, attempt: Attempt, result: Any, size: int) -> TaskDone:
        value = self._receipts.record_done(attempt.task, result)
        self._count(attempt, size)
        self._counted.pop(attempt.task.name, None)
        return TaskDone(value)

    def _show(self, reports: list[NodeReport]) -> None:
        attempts = {attempt.task.name: attempt for attempt, _ in self._running.values()}
        for report in reports:
            for text in report.notes:
                self._progress.note(text)
            for name in report.sent.keys() & attempts.keys():
                self._count(attempts[name], report.sent[name], report.hashed[name])
        if reports:
            self._progress.nodes(dict(self.monitors.held_bytes))

    def _count(self, attempt: Attempt, sent: int, hashed: int = 0) -> None:
        name = attempt.task.name
        sent_before, hashed_before = self._counted.get(name, (0, 0))
        if sent > sent_before:
            self._progress.advance(sent - sent_before)
        if hashed > hashed_before:
            self._progress.hashed(hashed - hashed_before)
        self._counted[name] = max(sent, sent_before), max(hashed, hashed_before)


class RayUnits(RayBackend):
    """The units of a job. Every node sees the folder of unit files, or uploads them to the bucket `location`."""

    def __init__(
        self,
        cluster: Cluster,
        uploader: Uploader | None,
        location: Location | None,
        job: UnitJob,
        receipts: UnitReceipts,
    ) -> None:
        super().__init__(cluster, None, 0, job.limit_bytes, receipts, job.progress, workers=job.workers)
        self._job, self._uploader, self._location = job, uploader, location
        self.prefetch_count, self.most_workers, self.peak_bytes = 1, 0, 0
        self._base = INTERPRETER_BYTES + _WORKER_BYTES
        self._memory = WorkMemory()
        self._start_bytes = 0  # a worker needed so much before its first row, and did not have it
        self._bad_starts = self._gpus = self._all_slots = 0
        self._types: str | None = job.ledger.recall("types") if isinstance(job.step, HasTypeInference) else ""

    def __enter__(self) -> Self:
        self._open()
        self.prefetch_count = self._max_tasks
        return self

    def _open(self) -> None:
        super()._open()
        try:
            if self._limit < INTERPRETER_BYTES + _WORK_BYTES:
                raise too_small(self._budget())
            job, self._threads = self._job, self._cpus[self._largest.id]
            folder = str(job.folder.absolute()) if self._location is None else UNITS_FOLDER
            contents = (job.step, job.reading, job.writing)
            setup = pickle.dumps(WorkerSetup(*contents, folder, "pause", job.on_error, self._threads, seed=job.seed))
            self._digest = hashlib.sha256(setup + self.monitors.run.encode()).hexdigest()
            self._setup = self._cluster.ray.put(setup)
        except BaseException:
            self.monitors.end()
            raise

    def finish(self) -> None:
        self._show(self.monitors.poll_last())
        self.peak_bytes = self.monitors.peak_bytes

    def _budget(self) -> MemoryBudget:
        return MemoryBudget(self._limit, INTERPRETER_BYTES, max(self._base - INTERPRETER_BYTES, 0))

    @property
    def _wants_gpu(self) -> bool:
        return bool(getattr(self._job.step, "wants_gpu", False))

    @property
    def _largest(self) -> Node:
        return max(self._nodes, key=lambda node: (node.gpus if self._wants_gpu else 0, node.cpus))

    def _divide(self) -> None:
        usual = self._memory.usual_bytes(_WORK_BYTES)
        need = max(self._base + max(round(1.1 * usual), _WORK_BYTES // 2), self._start_bytes)
        self._all_slots = self._slots(need)
        if self._job.uses_whole_node and self._workers is None:
            self._gpus = int(self._wants_gpu and self._largest.gpus >= 1)
            for node in self._nodes:
                self._cpus[node.id] = max(int(node.cpus // max(node.gpus if self._gpus else 1, 1)), 1)
            self._all_slots = sum(map(self._slots_of, self._nodes))
        self._max_tasks = self._workers or self._all_slots + len(self._nodes)

    def _waits_for_first(self) -> bool:
        return self._types is None  # all others take the types of the first batch

    def _request(self, attempt: Attempt, node: Node) -> tuple[Any, ...]:
        unit: Unit = attempt.task.work
        if self._requirements is None:
            self._check_with(unit)
        limit = min(self._limit, node.memory_bytes or self._limit)
        cpus = int(node.cpus) if attempt.is_exclusive else self._cpus[node.id]
        release_bytes = round(0.9 * limit * cpus / node.cpus)
        order = UnitOrder(unit, attempt.parts, release_bytes, self._types is None, bytes.fromhex(self._types or ""))
        request = UnitRequest(self._digest, order, limit, cpus, self._threads, os.getcwd(), self._location)
        options: dict[str, Any] = {"num_cpus": cpus, "memory": int(limit * cpus / node.cpus)}
        if self._gpus:
            options["num_gpus"] = self._gpus
        self.most_workers = max(self.most_workers, min(len(self._running) + 1, self._all_slots))
        return options, request, self._setup

    def _check_with(self, unit: Unit) -> None:
        """Check the nodes before the first task. The marker shows that the folder of units is the same everywhere."""
        reading, marker = self._job.source.reading, self._job.folder.absolute() / f".{self.monitors.run}.tmp"
        marker.touch()
        root, access = reading.options.get("root"), reading.options.get("access")
        requirements = NodeRequirements(
            paths=(str(root),) if root else (),
            uploader=self._uploader,
            marker=str(marker) if self._location is None else "",
            access=Access(*access) if access else Access(),
        )
        self._requirements = replace(requirements, paths=(*requirements.paths, *(str(s.path) for s in unit.spans[:3])))
        self._check_nodes()
        self._requirements = requirements  # files made for a unit are removed with it

    def _count(self, attempt: Attempt, sent: int, hashed: int = 0) -> None:
        super()._count(attempt, min(sent, attempt.task.bytes), hashed)

    def _handle_answer(self, attempt: Attempt, answer: UnitAnswer | BrimError) -> Event:
        if isinstance(answer, BrimError):
            return TaskFailed(answer)
        for text in answer.notes:
            self._progress.note(text)
        if answer.base_bytes:
            self._base = answer.base_bytes
            self._divide()
        if not answer.is_ready and answer.kind != "error":
            return self._handle_failed_start(attempt, answer)
        if isinstance(answer.message, UnitDone):
            if not attempt.is_exclusive:
                self._memory.add(answer.peak_bytes, answer.base_bytes)
            return self._event(attempt, answer.message, attempt.task.bytes)
        if isinstance(answer.message, ProbeDone):
            self._types = answer.message.types.hex()
            self._job.ledger.remember("types", self._types)
            return TaskReturned(attempt, first=True)
        if answer.kind == "memory":
            return self._lose_to_memory(attempt, answer)
        if answer.message is None:
            return self._job.crash_lost(attempt, answer.code, answer.output, answer.rows)
        if answer.is_ready:
            return TaskFailed(answer.message)
        # The node cannot load what this machine could: a function, a tokenizer, a model.
        name = next((node.name for node in self._nodes if node.id == answer.node), answer.node)
        message, hint = answer.message.words
        hint = hint or "Keep it on a disk that every node mounts under the same path, or install it everywhere."
        return TaskFailed(type(answer.message)(f"On the Ray node {name}: {message}", hint=hint, **answer.message.facts))

    def _handle_failed_start(self, attempt: Attempt, answer: UnitAnswer) -> Event:
        """Retry a worker whose imports exceed its share on a whole node, to measure them while the others wait."""
        if answer.kind != "memory":
            self._bad_starts += 1
            if self._bad_starts > _MOST_BAD_STARTS or answer.code != -signal.SIGKILL:
                return TaskFailed(does_not_start(answer.code, answer.output))
            return TaskReturned(attempt)
        if attempt.is_exclusive or answer.had_whole_node:
            held_bytes = max(answer.peak_bytes - INTERPRETER_BYTES, 0)
            return TaskFailed(too_small(replace(self._budget(), worker_bytes=held_bytes)))
        self._start_bytes = max(self._start_bytes, answer.peak_bytes)
        self._divide()
        return TaskReturned(attempt, is_exclusive=True)

    def _lose_to_memory(self, attempt: Attempt, answer: UnitAnswer) -> TaskLost:
        number, held_bytes = attempt.task.work.number, answer.peak_bytes
        error: Callable[[], Exception] = functools.partial(self._job.memory_error, attempt, answer.rows, held_bytes)
        if not held_bytes:
            error = functools.partial(
                MemoryLimitError,
                f"Unit {number} was stopped by Ray because its memory was full, with a node to itself.",
                hint=f"Use nodes with more memory. Finished units are kept. {self._job.step.smaller(0)}".strip(),
            )
        was_exclusive, text = attempt.is_exclusive or answer.had_whole_node, f"unit {number} ran out of memory"
        return TaskLost(attempt, "memory", text, error, answer.rows, held_bytes, was_exclusive)

    def _lose(self, attempt: Attempt, loss: Loss) -> TaskLost:
        if loss == "memory":
            return self._lose_to_memory(attempt, UnitAnswer("memory", had_whole_node=attempt.is_exclusive))
        text = f"the Ray worker or node that computed unit {attempt.task.work.number} was lost"
        error = functools.partial(
            DestinationUnavailableError, f"T{text[1:]} {attempt.crashes + 1} times.", hint=_STATUS_HINT
        )
        return TaskLost(attempt, "crash", text, error)


class _NoReceipts:
    """The finish of a job has no receipt: its shards get theirs when they are uploaded."""

    def is_done(self, task: Task) -> bool:
        return False

    def begin(self, task: Task) -> None: ...

    def record_done(self, task: Task, result: Any) -> Any:
        return result


def finish_on_cluster(cluster: Cluster, order: FinishOrder, progress: Progress, stop: Stop) -> tuple[Finished, int]:
    """Finish the units of a job on the largest node; return the shards, and the peak memory of a node."""
    size = sum(receipt.size for receipt in order.units.receipts)
    largest = max(node.memory_bytes for node in cluster.need_nodes())
    need = min(order.units.limit_bytes, largest or order.units.limit_bytes)
    order = replace(order, units=replace(order.units, limit_bytes=need))
    backend = RayBackend(
        cluster,
        NodeRequirements(paths=() if order.location is not None else (str(order.units.folder),)),
        need,
        need,
        _NoReceipts(),
        progress,
        make_order=lambda task: order,
        text=lambda task: "the Ray worker or node that finished the units",
        memory_hint="Give less --memory, or use nodes with more. Finished units are kept.",
        most_cpus=_FINISH_CPUS,
    )
    queue = TaskQueue(iter([Task("finish", size, order)]), _NoReceipts(), progress, UPLOAD_RETRIES)
    with backend, closing(run_tasks(queue, backend, stop)) as results:
        finished: Finished = next(results)
        backend._show(backend.monitors.poll_last())
        return finished, backend.monitors.peak_bytes
