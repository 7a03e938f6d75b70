"""What runs in a Ray worker: a shard, a unit, the end of a computed job. Who writes that down is the driver.

A unit is handed to a worker process of its own, which is watched. The process is the same that works locally. It stays
from task to task, so that a model is loaded once; it is a child of the Ray worker, and ends with it. If both together
hold more than their share of the node, it is ended.

Units are joined, packed and cut on a node, not by the driver. Where nodes share no disk, they come from a bucket to a
folder of the node, and what is made of them goes back there.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from brim.block_pandas import postpone_pandas
from brim.compute.outputs.output import Finished, MadeShard, Output, Units
from brim.errors import BrimError
from brim.execution.failures import aborted_for_memory
from brim.execution.ray_monitors import Telling, private_folder
from brim.execution.worker_messages import At, Done, Failed, Order, Probed, Ready
from brim.execution.worker_process import WorkerProcess
from brim.memory.meter import oom_kills, process_bytes
from brim.plans.shard_bytes import Slice
from brim.records import dataclass
from brim.storage.location import Location
from brim.storage.storage import PutResult
from brim.stores.bucket_store import fetch_unit, send_file, send_unit
from brim.stores.store import Carrier


def carry(run: str, name: str, slice: Slice, carrier: Carrier, sha256: str | None) -> tuple[int, PutResult] | BrimError:
    """Make the shard's bytes and bring them there. An error of brim's is an answer: it arrives as what it is."""
    postpone_pandas()
    telling = Telling(run, name)
    try:
        with slice.splice() as splice:
            return splice.size, carrier.put(name, splice, sha256, telling)
    except BrimError as error:
        return error


_LOOK_S = 0.02
_LINES_S = 0.2
_END_S = 5.0
OWN_UNITS = "units"  # in the folder of a worker on its node
_KEPT_BYTES = 64 << 20  # what a worker may keep from unit to unit


@dataclass(frozen=True, slots=True)
class Asked:
    """A unit, and what may be taken for it: `limit_bytes` of the node, and of that as much as of its CPUs."""

    run: str
    name: str
    digest: str  # of the setup
    order: Order
    limit_bytes: int
    cpus: float
    threads: int
    cwd: str
    units: Location | None = None  # where its file is put, if nodes share no folder


@dataclass(frozen=True, slots=True)
class Answer:
    """How it ended. died: the worker process did, with `code` and its last `words`; before its first row: unready."""

    kind: Literal["done", "probed", "memory", "died", "error"]
    message: Done | Probed | BrimError | None = None
    at: At | None = None
    ready: bool = True
    code: int = 0
    words: str = ""
    base_bytes: int = 0  # held before any work, with the Ray worker itself
    peak_bytes: int = 0
    whole: bool = False  # whether it had the whole limit for itself
    notes: tuple[str, ...] = ()
    node: str = ""  # its id


class _Child:
    """The worker process, and its folder on this node."""

    def __init__(self, setup: bytes, asked: Asked) -> None:
        self.digest = asked.digest
        self.folder = private_folder(asked.run)
        (self.folder / "setup.pickle").write_bytes(setup)
        (self.folder / "gate").write_bytes(b"\0")
        (self.folder / OWN_UNITS).mkdir()
        cwd = asked.cwd if os.path.isdir(asked.cwd) else None
        self.worker = WorkerProcess(os.getpid(), self.folder / "setup.pickle", asked.threads, cwd)
        self.base_bytes = 0

    def end(self) -> int:
        self.worker.kill()
        code = self.worker.wait(_END_S)
        self.worker.kill_children()
        shutil.rmtree(self.folder, ignore_errors=True)
        return code


_CHILDREN: list[_Child] = []  # one at most
_NODE: list[tuple[str, float]] = []  # once it was asked for


def do_unit(setup: bytes, asked: Asked) -> Answer:
    """The task."""
    telling = Telling(asked.run, asked.name)
    if _CHILDREN and (_CHILDREN[0].digest != asked.digest or _CHILDREN[0].worker.ended):
        _CHILDREN.pop().end()
    if not _CHILDREN:
        _CHILDREN.append(_Child(setup, asked))
    try:
        answer = _Watch(_CHILDREN[0], asked, telling).run()
        if asked.units is not None and answer.kind == "done":
            _put_away(_CHILDREN[0].folder / OWN_UNITS, asked)
    except BaseException:  # the task is cancelled
        _CHILDREN.pop().end()
        raise
    if answer.kind not in ("done", "probed") or _keeps(answer):
        _CHILDREN.pop().end()
    return answer


def _put_away(folder: Path, asked: Asked) -> None:
    """What was made on this node, to where everybody finds it."""
    assert asked.units is not None
    for file in sorted(folder.glob(f"{asked.order.unit.number:08d}.*"), key=lambda file: file.name.count(".")):
        if not file.name.endswith(".bad.arrow"):
            send_unit(asked.units, folder, file.name)
    for file in folder.iterdir():
        file.unlink()


def _keeps(answer: Answer) -> bool:
    """Whether memory does not come back: a fresh process takes its place."""
    held = answer.message.held_bytes + process_bytes(os.getpid()) if isinstance(answer.message, Done) else 0
    return held - answer.base_bytes > max(_KEPT_BYTES, answer.base_bytes)


class _Watch:
    """One unit, from the order to the answer."""

    def __init__(self, child: _Child, asked: Asked, telling: Telling) -> None:
        self._child, self._worker, self._asked, self._telling = child, child.worker, asked, telling
        share = min(asked.cpus / _node()[1], 1.0)
        self._share, self._whole = round(asked.limit_bytes * share), share == 1.0
        self._at: At | None = None
        self._peak = 0
        self._over = False
        self._kills = oom_kills()
        self._lines_at = 0.0

    def run(self) -> Answer:
        if not self._worker.ready:
            first = self._next()
            if not isinstance(first, Ready):
                return self._ended(first)
            self._worker.ready = True
            self._child.base_bytes = first.held_bytes + process_bytes(os.getpid())
            (self._child.folder / "setup.pickle").unlink()
        self._worker.send(self._asked.order)
        return self._ended(self._next())

    def _next(self) -> Any:
        """What the worker says that is not only where it is; None if it is gone."""
        looked = 0.0
        connection = self._worker.connection
        while True:
            message = None
            try:
                if connection.poll(_LOOK_S):
                    message = connection.recv()
            except (EOFError, OSError):
                return None
            if isinstance(message, At):
                self._at = message
                self._telling.seen(message.seen_bytes)
            elif message is not None:
                return message
            elif self._worker.ended and not connection.poll():
                return None
            now = time.monotonic()
            if now - looked >= _LOOK_S:
                looked = now
                self._look(now)

    def _look(self, now: float) -> None:
        held = self._worker.held_bytes() + process_bytes(os.getpid())
        self._peak = max(self._peak, held)
        if held > self._share and not self._over:
            self._over = True
            self._worker.kill()
        if now - self._lines_at >= _LINES_S:
            self._lines_at = now
            self._tell_lines()
            self._telling.tell()

    def _tell_lines(self) -> None:
        for text in self._worker.new_lines():
            self._telling.note(f"worker {self._worker.number}: {text}")

    def _ended(self, message: Any) -> Answer:
        facts: dict[str, Any] = {"at": self._at, "ready": self._worker.ready, "base_bytes": self._child.base_bytes}
        facts |= {"whole": self._whole, "peak_bytes": self._peak}
        if message is None:
            facts |= {"code": self._worker.wait(_END_S), "words": self._worker.last_words()}
        self._tell_lines()
        facts |= {"notes": self._telling.untold(), "node": _node()[0]}
        if isinstance(message, Done):
            return Answer("done", message, **facts)
        if isinstance(message, Probed):
            return Answer("probed", message, **facts)
        if isinstance(message, Failed) and message.kind == "error":
            return Answer("error", message.error, **facts)
        memory = isinstance(message, Failed) or self._over or oom_kills() != self._kills
        if message is None:
            memory = memory or aborted_for_memory(facts["code"], facts["words"])
        return Answer("memory" if memory else "died", **facts)


def _node() -> tuple[str, float]:
    """The id of this node, and its CPUs."""
    if not _NODE:
        import ray

        here = str(ray.get_runtime_context().get_node_id())
        _NODE.extend((here, float(node["Resources"].get("CPU", 1))) for node in ray.nodes() if node["NodeID"] == here)
    return _NODE[0]


_MADE = "made"


@dataclass(frozen=True, slots=True)
class Ending:
    """All units of a job, as the driver names them; `at` is the bucket that their files are in, if they are in one."""

    output: Output
    units: Units
    shards: str
    at: Location | None = None


def finish_there(run: str, name: str, ending: Ending) -> Finished | BrimError:
    """The task. An error of brim's is an answer: it arrives as what it is."""
    telling = Telling(run, name)
    try:
        if ending.at is None:
            return ending.output.finish(ending.units, ending.shards, telling.sent)
        return _by_way_of(ending.at, ending, run, telling)
    except BrimError as error:
        return error


def _by_way_of(at: Location, ending: Ending, run: str, telling: Telling) -> Finished:
    scratch = private_folder(run)
    try:
        here = replace(ending.units, folder=scratch, work=scratch / _MADE)
        here.work.mkdir()
        for receipt in here.receipts:
            fetch_unit(at, receipt.name, scratch)
            telling.sent(0)
        finished = ending.output.finish(here, ending.shards, telling.sent)
        made = {
            name: _sent(at, one, number, ending.units.folder)
            for number, (name, one) in enumerate(finished.made.items())
        }
        return replace(finished, made=made)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sent(at: Location, one: MadeShard, number: int, folder: Path) -> MadeShard:
    """A file that was made, in the bucket; under the name that it will have in the driver's folder."""
    name = f"{_MADE}/{number:08d}{one.path.suffix}"
    send_file(at, one.path, name)
    return replace(one, path=folder / name)
