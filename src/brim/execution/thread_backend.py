"""Upload shards in threads of this process. Their memory is known, so as many run as were chosen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from brim.execution.scheduler import Attempt, Event, Task, TaskDone, TaskFailed, TaskQueue
from brim.progress import Progress
from brim.state.retry import interrupted_by
from brim.state.stop import Stop

_POLL_S = 0.2


class Cancelled(Exception):
    """Another shard failed, so this one is dropped. Never leaves a job."""


class ThreadBackend:
    """Threads are never killed: after a failure, the others drop their shards between two chunks.

    `upload` uploads the shard of a task and writes its receipt, in the same thread: the thread of the scheduler may be
    busy with a commit. It reports bytes to the watcher that it is passed.
    """

    def __init__(
        self, workers: int, upload: Callable[[Task, ThreadBackend], Any], progress: Progress, stop: Stop
    ) -> None:
        self._workers, self._upload, self._progress, self._stop = workers, upload, progress, stop
        self._cancelled = threading.Event()
        self._running = 0
        self._finished: SimpleQueue[Future[Any]] = SimpleQueue()

    def __enter__(self) -> ThreadBackend:
        self._pool = ThreadPoolExecutor(self._workers, "shard")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    @property
    def is_busy(self) -> bool:
        return self._running > 0

    def start_tasks(self, queue: TaskQueue) -> None:
        while self._running < self._workers and queue.peek() is not None:
            self._pool.submit(self._run, queue.pop()).add_done_callback(self._finished.put)
            self._running += 1

    def _run(self, attempt: Attempt) -> Any:
        with interrupted_by(self._check_cancelled):
            return self._upload(attempt.task, self)

    def poll(self) -> Iterator[Event]:
        wait_s = _POLL_S
        while self._running:
            try:
                future = self._finished.get(timeout=wait_s)
            except Empty:
                return
            self._running, wait_s = self._running - 1, 0.0
            error = future.exception()
            yield TaskDone(future.result()) if error is None else TaskFailed(error)

    def cancel(self) -> None:
        self._cancelled.set()

    # The watcher of an upload

    def hashed(self, size: int) -> None:
        self._check_cancelled()
        self._stop.check()
        self._progress.hashed(size)

    def sent(self, size: int) -> None:
        self._check_cancelled()
        self._stop.check()
        self._progress.advance(size)

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled
