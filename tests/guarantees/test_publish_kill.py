"""Repeated SIGKILL while a dataset is published and read."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import random_bytes, write_files
from tests.forked import Process
from tests.hub import TestHub
from tests.killing import kills
from tests.publishing import REPO, Listing, Machine, built, shards

WORKERS = 2
OPTIONS = ("--rows-per-shard", "1", "--workers", str(WORKERS), "--update")
KILLS = kills(12)
OLD = 20  # shards of the previously published version
# Every fifth file is larger than the socket buffers, so that a kill interrupts its upload.
SIZES = [4_000_000 + i if i % 5 == 4 else 20_000 + i for i in range(130)]
# Kills also happen at the last steps, while the Hub processes these requests.
LAST = {"plain": ["commit"] * 2, "pull request": ["commit", "status", "merge"]}


def write_version(folder: Path, count: int) -> Path:
    return write_files(folder, {f"f{i:03d}.bin": random_bytes(SIZES[i], i) for i in range(count)})


class Readers:
    """The view of readers of main: its files continuously, and its rows by the real client occasionally."""

    def __init__(self, hub: TestHub, folder: Path) -> None:
        self.trees: list[Listing] = []
        self.rows: list[str] = []
        self._hub, self._folder = hub, folder
        self._done = threading.Event()

    def _list(self) -> None:
        while not self._done.is_set():
            files = self._hub.files(REPO)
            if not self.trees or files != self.trees[-1]:
                self.trees.append(files)
            time.sleep(0.002)

    def _load(self) -> None:
        last = False
        while not last:
            last = self._done.is_set()
            machine = Machine(self._hub, self._folder / f"reader{len(self.rows)}")
            result = machine.python("""
                import os
                from datasets import load_dataset
                rows = list(load_dataset("ada/data", split="train", streaming=True))
                assert [row["file"]["path"] for row in rows] == [f"f{i:03d}.bin" for i in range(len(rows))]
                print(len(rows), sum(len(row["file"]["bytes"]) for row in rows), flush=True)
                os._exit(0)  # threads of the libraries sometimes abort a Python that ends
            """)
            self.rows.append(result.stdout.strip())
            self._done.wait(4)

    @contextmanager
    def reading(self) -> Iterator[None]:
        threads = [threading.Thread(target=work) for work in (self._list, self._load)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._done.set()
            for thread in threads:
                thread.join()


def wait_for(condition: Callable[[], bool], process: Process) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "count", "put_s"), [("plain", 90, 0.2), ("pull request", 130, 0.12)])
def test_killed_again_and_again(tmp_path: Path, method: str, count: int, put_s: float) -> None:
    """A publication that is killed many times completes and makes the new version visible once.

    Each byte is uploaded once except for the shards in flight, and readers see either the old or the new version.
    """
    moments = random.Random(f"brim {method}")
    source = write_version(tmp_path / "source", OLD)
    with TestHub(tmp_path / "hub") as hub:
        machine = Machine(hub, tmp_path / "machine")
        machine.publish(source, *OPTIONS)
        old, sent_before = hub.files(REPO), hub.counters.bytes_received
        write_version(source, count)
        expected = built(source, tmp_path / "out", *OPTIONS)
        readers = Readers(hub, tmp_path)
        landed = 0
        with readers.reading():
            for number in range(KILLS):
                hub.faults.clear()
                last = LAST[method][number - KILLS :] if number >= KILLS - len(LAST[method]) else []
                if last:
                    rule = hub.faults.add(last[0], action="stall", seconds=0.3)
                else:
                    hub.faults.add("put", times=None, action="stall", after_bytes=10_000, seconds=put_s)
                puts = hub.counters.puts
                process = machine.start(source, *OPTIONS)
                if last:
                    wait_for(lambda rule=rule: rule.fired > 0, process)
                elif number % 4:
                    wait_for(lambda puts=puts: hub.counters.puts > puts, process)
                time.sleep(moments.uniform(0, 0.5))
                landed += process.poll() is None
                process.kill()
                process.wait()
            hub.faults.clear()
            machine.publish(source, *OPTIONS)
        new = hub.files(REPO)
        largest = max(size for size, _ in expected.values())
        fresh = {sha256: size for size, sha256 in expected.values() if (size, sha256) not in old.values()}
        sent = hub.counters.bytes_received - sent_before
        assert landed >= KILLS * 3 // 4, "too few kills fell into the publishing to prove anything"
        assert shards(hub) == expected
        assert sum(fresh.values()) <= sent <= sum(fresh.values()) + landed * WORKERS * largest
        assert hub.counters.bytes_repeated <= landed * WORKERS * largest
        assert readers.trees == [old, new]
        versions = [f"{OLD} {sum(SIZES[:OLD])}", f"{count} {sum(SIZES[:count])}"]
        assert set(readers.rows) == set(versions)
        assert len(hub.history(REPO)) == 3
        assert len(hub.repos.get("datasets", REPO).discussions) == (method != "plain")
