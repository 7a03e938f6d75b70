"""brim.Loader from a bucket: the bytes read by all ranks and workers, failures, and memory measured from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim
from tests.loader.test_loader import ids_of, write_rows
from tests.s3 import FaultProxy, S3Server

FILES, GROUPS, ROWS = 8, 80, 50


@pytest.fixture(scope="module")
def bucket(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Store random rows under loader/ in the bucket and return their size in bytes."""
    folder, total = tmp_path_factory.mktemp("loader"), 0
    rng = np.random.default_rng(0)
    for number in range(FILES):
        count = GROUPS * ROWS
        ids = np.arange(number * count, (number + 1) * count)
        table = pa.table({"id": ids, "content": [rng.bytes(1200) for _ in range(count)]})
        pq.write_table(table, folder / "part.parquet", row_group_size=ROWS, write_statistics=["id"])
        data = (folder / "part.parquet").read_bytes()
        s3.write("private", f"loader/part-{number}.parquet", data)
        total += len(data)
    return total


@pytest.fixture
def proxy(s3: S3Server, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> FaultProxy:
    for name, value in s3.environment_at(s3_proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    return s3_proxy


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_all_ranks_and_workers_read_each_byte_about_once(
    bucket: int, proxy: FaultProxy, ranks: int, workers: int
) -> None:
    """All ranks and workers read at most 1.2 times the dataset, footers included, by the server's log.

    The memory limit is explicit, because the default from free memory is too small for 32 readers on a busy machine.
    """
    ids = []
    for rank in range(ranks):
        loader = brim.Loader(
            "s3://private/loader",
            batch_size=16,
            shuffle=True,
            shuffle_window=ROWS,
            rank=rank,
            world_size=ranks,
            last="keep",
            memory="16GB",
        )
        for worker in range(max(workers, 1)):
            ids += ids_of(loader.read(loader._start, worker, max(workers, 1)))
    assert sorted(ids) == list(range(FILES * GROUPS * ROWS))
    assert bucket <= sum(request.received_bytes for request in proxy.requests) <= 1.2 * bucket


def test_transient_failures_are_retried(bucket: int, proxy: FaultProxy) -> None:
    loader = brim.Loader("s3://private/loader", batch_size=100, columns=["id"])
    proxy.fail(503, times=3, method="GET")
    assert len(ids_of(loader)) == FILES * GROUPS * ROWS


def test_vanished_object_is_named(s3: S3Server, s3_prefix: str, proxy: FaultProxy, tmp_path: Path) -> None:
    for file in sorted(write_rows(tmp_path / "rows", [50, 60]).iterdir()):
        s3.write("private", s3_prefix + file.name, file.read_bytes())
    loader = brim.Loader(f"s3://private/{s3_prefix}", batch_size=10)
    s3.delete("private", f"{s3_prefix}part-001.parquet")
    with pytest.raises(brim.SourceChangedError, match=r"part-001\.parquet"):
        list(loader)


FORKED = """
import os, sys, brim
loader = brim.Loader(sys.argv[1], batch_size=100, columns=["id"])
if os.fork() == 0:
    count = sum(len(batch["id"]) for batch in loader)
    print(count, flush=True)
    os._exit(0)
os.wait()
"""


def test_forked_process_reads_a_bucket(bucket: int, proxy: FaultProxy) -> None:
    command = [sys.executable, "-c", FORKED, "s3://private/loader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)
    assert result.stdout == f"{FILES * GROUPS * ROWS}\n", result.stderr


MEASURED = """
import sys, brim
loader = brim.Loader(sys.argv[1], batch_size=8, shuffle=True, memory=sys.argv[2], shuffle_window=int(sys.argv[3]))
print(sum(len(batch["id"]) for batch in loader))
"""


def peak_of(command: list[str]) -> tuple[int, str]:
    """Return the peak memory of a process and its children, measured by another process."""
    peak, over = 0, threading.Event()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    own = psutil.Process(process.pid)

    def watch() -> None:
        nonlocal peak
        while not over.is_set():
            try:
                tree = [own, *own.children(recursive=True)]
                peak = max(peak, sum(each.memory_info().rss for each in tree))
            except psutil.Error:
                pass
            time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    out, _ = process.communicate(timeout=120)
    over.set()
    thread.join()
    assert process.returncode == 0, out
    return peak, out


@pytest.mark.parametrize("group", [50, 3000])
def test_memory_stays_below_the_limit(tmp_path: Path, group: int) -> None:
    """Memory stays below the limit for 300 MB of rows of 100 kB, in small row groups and in one."""
    content = np.random.default_rng(0).bytes(100_000)
    table = pa.table({"id": np.arange(3000), "content": [content[n:] + content[:n] for n in range(3000)]})
    pq.write_table(
        table,
        tmp_path / "rows.parquet",
        row_group_size=group,
        use_dictionary=False,
        compression="none",
        write_batch_size=8,
    )
    peak, out = peak_of([sys.executable, "-c", MEASURED, str(tmp_path), "400MB", "200"])
    assert out == "3000\n"
    assert peak < 400_000_000
