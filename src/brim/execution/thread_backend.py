"""Shards brought by threads of this process. What they take is known, so as many run as were asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from brim.execution.scheduler import Attempt, Event, Receipts, TaskDone, TaskFailed, TaskQueue
from brim.progress import Progress
from brim.state.retry import interrupted_by
from brim.state.stop import Stop
from brim.stores.store import Store

_LISTEN_S = 0.2


class Dropped(Exception):
    """Another shard failed; this one is dropped. Never leaves a job."""


class ThreadBackend:
    """Threads are never killed: once one task has failed, the others drop theirs between two chunks."""

    def __init__(self, workers: int, store: Store, receipts: Receipts, progress: Progress, stop: Stop) -> None:
        self._workers, self._store, self._receipts = workers, store, receipts
        self._progress, self._stop = progress, stop
        self._dropped = threading.Event()
        self._running = 0
        self._ended: SimpleQueue[Future[Any]] = SimpleQueue()

    def __enter__(self) -> ThreadBackend:
        self._pool = ThreadPoolExecutor(self._workers, "shard")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()

    @property
    def busy(self) -> bool:
        return self._running > 0

    def admit(self, queue: TaskQueue) -> None:
        while self._running < self._workers and queue.find() is not None:
            self._pool.submit(self._bring, queue.pop()).add_done_callback(self._ended.put)
            self._running += 1

    def listen(self) -> Iterator[Event]:
        wait_s = _LISTEN_S
        while self._running:
            try:
                ended = self._ended.get(timeout=wait_s)
            except Empty:
                return
            self._running, wait_s = self._running - 1, 0.0
            error = ended.exception()
            yield TaskDone(ended.result()) if error is None else TaskFailed(error)

    def drop(self) -> None:
        self._dropped.set()

    def _bring(self, attempt: Attempt) -> Any:
        """The receipt is written here: whoever listens may be busy with a commit."""
        work = attempt.bring
        with interrupted_by(self._look), work.slice(work.shard).splice() as splice:
            put = self._store.put(work.shard.name, splice, work.sha256, self)
            size = splice.size
        return self._receipts.done(attempt.task, (size, put))

    # What the store tells of a shard that is on its way

    def hashed(self, size: int) -> None:
        self._look()
        self._stop.check()
        self._progress.hashed(size)

    def sent(self, size: int) -> None:
        self._look()
        self._stop.check()
        self._progress.advance(size)

    def _look(self) -> None:
        if self._dropped.is_set():
            raise Dropped
