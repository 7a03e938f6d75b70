"""Shards brought by threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from brim.buckets.requests import interrupted_by
from brim.plans.cut_shards import Shard
from brim.schedule.scheduler import Driver
from brim.state.ledger import Receipt
from brim.stores.store import Put, Store

_LISTEN_S = 0.2


class Dropped(Exception):
    """Another shard failed; this one is dropped. Never leaves the engine."""


@dataclass(frozen=True, slots=True)
class LocalExecutor:
    """The default."""

    workers: int

    def run(self, todo: Sequence[Shard], sink: Store, driver: Driver) -> Generator[tuple[Receipt, Put], None, None]:
        queue = iter(todo)
        watcher = _Watcher(driver)

        def bring(shard: Shard) -> tuple[Receipt, Put]:
            with interrupted_by(watcher.look), driver.slice(shard).splice() as splice:
                put = sink.put(shard.name, splice, driver.known(shard), watcher)
                size = splice.size
            return driver.done(shard, size, put), put

        with ThreadPoolExecutor(self.workers, "shard") as pool:
            running: set[Future[tuple[Receipt, Put]]] = set()
            try:
                while True:
                    while len(running) < self.workers and (shard := next(queue, None)) is not None:
                        driver.begin(shard)
                        running.add(pool.submit(bring, shard))
                    if not running:
                        return
                    finished, running = wait(running, timeout=_LISTEN_S, return_when=FIRST_COMPLETED)
                    driver.look()
                    for future in finished:
                        yield future.result()
            except BaseException:
                watcher.abort.set()
                raise


class _Watcher:
    """Drops what is on its way once something has failed."""

    def __init__(self, driver: Driver) -> None:
        self.abort = threading.Event()
        self._driver = driver

    def hashed(self, size: int) -> None:
        self.look()
        self._driver.hashed(size)

    def sent(self, size: int) -> None:
        self.look()
        self._driver.sent(size)

    def look(self) -> None:
        if self.abort.is_set():
            raise Dropped
