"""The work of Ray tasks: upload a shard, compute a unit, finish the units of a job. The driver writes the receipts.

A unit is computed by a separate worker process, the same as locally, which is monitored: if it and the Ray worker use
more than their share of the node, it is killed. The process stays from task to task, so that a model is loaded once;
it is a child of the Ray worker, and ends with it.

Units are finished on a node, not by the driver. If the nodes share no disk, unit files are downloaded from a bucket to
a folder of the node, and the results are uploaded there.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from brim.block_pandas import postpone_pandas
from brim.compute.outputs.output import Finished, Output, OutputShard, Units
from brim.errors import BrimError
from brim.execution.failures import is_memory_abort
from brim.execution.ray_monitors import TaskReporter, private_folder
from brim.execution.unit_storage import download_unit, upload_file, upload_unit
from brim.execution.worker_messages import ProbeDone, RowRange, UnitDone, UnitFailed, UnitOrder, WorkerReady
from brim.execution.worker_process import WorkerProcess
from brim.memory.meter import oom_kills, process_bytes
from brim.plans.shard_bytes import Slice
from brim.records import dataclass
from brim.storage.destination_address import Uploader
from brim.storage.location import Location
from brim.storage.storage import PutResult

_POLL_S = 0.02
_LINES_S = 0.2
_EXIT_S = 5.0
_KEPT_BYTES = 64 << 20  # a worker may keep so much from unit to unit
UNITS_FOLDER = "units"  # in the folder of a worker on its node
_SHARDS_FOLDER = "made"


def run_task(run: str, name: str, order: UploadOrder | UnitRequest | FinishOrder, setup: bytes = b"") -> Any:
    """Execute an order: the only remote function. An error of brim is an answer, so that it keeps its type."""
    reporter = TaskReporter(run, name)
    try:
        return order.execute(reporter, setup)
    except BrimError as error:
        return error


@dataclass(frozen=True, slots=True)
class UploadOrder:
    """A shard to upload. `slice` makes its bytes on the node."""

    task_name = "upload_shard"  # in the dashboard of Ray, and the title of the process
    name: str
    slice: Slice
    uploader: Uploader
    sha256: str | None

    def execute(self, reporter: TaskReporter, setup: bytes) -> tuple[int, PutResult]:
        postpone_pandas()
        with self.slice.splice() as splice:
            return splice.size, self.uploader.put(self.name, splice, self.sha256, reporter)


@dataclass(frozen=True, slots=True)
class UnitRequest:
    """A unit to compute, within the share of `limit_bytes` that its CPUs are of the node."""

    task_name = "compute_unit"
    digest: str  # of the setup
    order: UnitOrder
    limit_bytes: int
    cpus: float
    threads: int
    cwd: str
    units: Location | None = None  # where its file is uploaded, if the nodes share no folder

    def execute(self, reporter: TaskReporter, setup: bytes) -> UnitAnswer:
        if _CHILDREN and (_CHILDREN[0].digest != self.digest or _CHILDREN[0].worker.has_exited):
            _CHILDREN.pop().end()
        if not _CHILDREN:
            _CHILDREN.append(_Child(setup, self, reporter.run))
        child = _CHILDREN[0]
        try:
            answer = _UnitRun(child, self, reporter).run()
            if self.units is not None and answer.kind == "done":
                self._upload(child.folder / UNITS_FOLDER)
        except BaseException:  # the task is cancelled
            _CHILDREN.pop().end()
            raise
        held_bytes = 0
        if isinstance(answer.message, UnitDone):
            held_bytes = answer.message.held_bytes + process_bytes(os.getpid())
        does_not_release = held_bytes - answer.base_bytes > max(_KEPT_BYTES, answer.base_bytes)
        if answer.kind not in ("done", "probed") or does_not_release:
            _CHILDREN.pop().end()
        return answer

    def _upload(self, folder: Path) -> None:
        assert self.units is not None
        for file in sorted(folder.glob(f"{self.order.unit.number:08d}.*"), key=lambda file: file.name.count(".")):
            if not file.name.endswith(".bad.arrow"):
                upload_unit(self.units, folder, file.name)
        for file in folder.iterdir():
            file.unlink()


@dataclass(frozen=True, slots=True)
class UnitAnswer:
    """The result of a unit. died: the worker process exited with `code`; unless `is_ready`, before its first row."""

    kind: Literal["done", "probed", "memory", "died", "error"]
    message: UnitDone | ProbeDone | BrimError | None = None
    rows: RowRange | None = None
    is_ready: bool = True
    code: int = 0
    output: str = ""  # the end of its output
    base_bytes: int = 0  # memory before any work, with the Ray worker itself
    peak_bytes: int = 0
    had_whole_node: bool = False
    notes: tuple[str, ...] = ()
    node: str = ""  # its id


class _Child:
    """The worker process of a Ray worker, and its folder."""

    def __init__(self, setup: bytes, request: UnitRequest, run: str) -> None:
        self.digest = request.digest
        self.folder = private_folder(run)
        (self.folder / "setup.pickle").write_bytes(setup)
        (self.folder / "pause").write_bytes(b"\0")
        (self.folder / UNITS_FOLDER).mkdir()
        cwd = request.cwd if os.path.isdir(request.cwd) else None
        self.worker = WorkerProcess(os.getpid(), self.folder / "setup.pickle", request.threads, cwd)
        self.base_bytes = 0

    def end(self) -> None:
        self.worker.kill()
        self.worker.wait(_EXIT_S)
        self.worker.kill_children()
        shutil.rmtree(self.folder, ignore_errors=True)


_CHILDREN: list[_Child] = []  # at most one
_NODE: list[tuple[str, float]] = []  # the id of this node and its CPUs, once they are known


def _node() -> tuple[str, float]:
    if not _NODE:
        import ray

        node_id = str(ray.get_runtime_context().get_node_id())
        cpus = (float(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["NodeID"] == node_id)
        _NODE.extend((node_id, count) for count in cpus)
    return _NODE[0]


class _UnitRun:
    """One unit, from the order to the answer."""

    def __init__(self, child: _Child, request: UnitRequest, reporter: TaskReporter) -> None:
        self._child, self._worker, self._request, self._reporter = child, child.worker, request, reporter
        cpu_share = min(request.cpus / _node()[1], 1.0)
        self._limit, self._has_whole_node = round(request.limit_bytes * cpu_share), cpu_share == 1.0
        self._rows: RowRange | None = None
        self._peak = 0
        self._was_killed = False
        self._kernel_kills = oom_kills()
        self._lines_at = 0.0

    def run(self) -> UnitAnswer:
        if not self._worker.is_ready:
            first = self._receive()
            if not isinstance(first, WorkerReady):
                return self._answer(first)
            self._worker.is_ready = True
            self._child.base_bytes = first.held_bytes + process_bytes(os.getpid())
            (self._child.folder / "setup.pickle").unlink()
        self._worker.send(self._request.order)
        return self._answer(self._receive())

    def _receive(self) -> Any:
        """Return the next message that is not a position; None if the worker is gone."""
        measured_at = 0.0
        connection = self._worker.connection
        while True:
            message = None
            try:
                if connection.poll(_POLL_S):
                    message = connection.recv()
            except (EOFError, OSError):
                return None
            if isinstance(message, RowRange):
                self._rows = message
                self._reporter.set_sent(message.seen_bytes)
            elif message is not None:
                return message
            elif self._worker.has_exited and not connection.poll():
                return None
            now = time.monotonic()
            if now - measured_at >= _POLL_S:
                measured_at = now
                held_bytes = self._worker.held_bytes() + process_bytes(os.getpid())
                self._peak = max(self._peak, held_bytes)
                if held_bytes > self._limit and not self._was_killed:
                    self._was_killed = True
                    self._worker.kill()
                if now - self._lines_at >= _LINES_S:
                    self._lines_at = now
                    self._report_lines()
                    self._reporter.report()

    def _report_lines(self) -> None:
        for text in self._worker.new_lines():
            self._reporter.note(f"worker {self._worker.number}: {text}")

    def _answer(self, message: Any) -> UnitAnswer:
        code, output = 0, ""
        if message is None:
            code, output = self._worker.wait(_EXIT_S), self._worker.last_output()
        self._report_lines()
        values: dict[str, Any] = {
            "rows": self._rows,
            "is_ready": self._worker.is_ready,
            "code": code,
            "output": output,
            "base_bytes": self._child.base_bytes,
            "peak_bytes": self._peak,
            "had_whole_node": self._has_whole_node,
            "notes": self._reporter.take_notes(),
            "node": _node()[0],
        }
        if isinstance(message, UnitDone):
            return UnitAnswer("done", message, **values)
        if isinstance(message, ProbeDone):
            return UnitAnswer("probed", message, **values)
        if isinstance(message, UnitFailed) and message.kind == "error":
            return UnitAnswer("error", message.error, **values)
        was_memory = isinstance(message, UnitFailed) or self._was_killed or oom_kills() != self._kernel_kills
        was_memory = was_memory or is_memory_abort(code, output)
        return UnitAnswer("memory" if was_memory else "died", **values)


@dataclass(frozen=True, slots=True)
class FinishOrder:
    """All units of a job, as the driver names them. `location` is the bucket of their files, if they are in one."""

    task_name = "combine_units"
    output: Output
    units: Units
    shard_folder: str
    location: Location | None = None

    def execute(self, reporter: TaskReporter, setup: bytes) -> Finished:
        if self.location is None:
            return self.output.finish(self.units, self.shard_folder, reporter.sent)
        folder = private_folder(reporter.run)
        try:
            local = replace(self.units, folder=folder, work=folder / _SHARDS_FOLDER)
            local.work.mkdir()
            for receipt in local.receipts:
                download_unit(self.location, receipt.name, folder)
                reporter.sent(0)
            finished = self.output.finish(local, self.shard_folder, reporter.sent)
            shards: dict[str, OutputShard] = {}
            for number, (name, shard) in enumerate(finished.shards.items()):
                file_name = f"{_SHARDS_FOLDER}/{number:08d}{shard.path.suffix}"
                upload_file(self.location, shard.path, file_name)
                shards[name] = replace(shard, path=self.units.folder / file_name)  # where the driver will have it
            return replace(finished, shards=shards)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
