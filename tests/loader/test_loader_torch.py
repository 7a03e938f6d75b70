"""brim.Loader with torch: DataLoader with every start method of workers, StatefulDataLoader, and killed ranks."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import brim
from tests.loader.test_loader import ids_of, write_rows

torch = pytest.importorskip("torch", reason="needs torch: make test-loader")
stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata: make test-loader")
from torch.utils.data import DataLoader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows", [37, 0, 55, 108])


def make(rows: Path, **more: Any) -> brim.Loader:
    return brim.Loader(
        rows, batch_size=7, shuffle=True, shuffle_window=20, columns=["id", "tokens"], last="keep", **more
    )


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_see_epochs_and_states(rows: Path, method: str) -> None:
    """`set_epoch` and `load_state_dict` take effect in persistent workers that have already started."""
    loader = make(rows)
    batches = DataLoader(
        loader.torch(), batch_size=None, num_workers=2, persistent_workers=True, multiprocessing_context=method
    )
    first, second = list(batches), ids_of(batches)
    assert [batch.steps for batch in first] == list(range(1, len(batches) + 1))
    assert isinstance(first[0]["tokens"], torch.Tensor)
    assert first[0]["tokens"].shape == (7, 3)
    assert sorted(ids_of(first)) == sorted(second) == list(range(200))
    assert ids_of(first) != second
    loader.set_epoch(0)
    assert ids_of(batches) == ids_of(first)
    state = make(rows).state_dict()
    subset = ids_of(first[:9])
    loader.load_state_dict(state)
    middle = loader.state_dict(steps=9)
    assert middle["samples_seen"] == 63
    loader.load_state_dict(middle)
    assert subset + ids_of(batches) == ids_of(first)
    with pytest.raises(brim.InputError, match=r"steps=n"):
        loader.state_dict()


@pytest.mark.parametrize("workers", [0, 1, 3, 4])
def test_state_of_steps_continues_with_other_workers(rows: Path, workers: int) -> None:
    loader = make(rows)
    batches = iter(DataLoader(loader.torch(), batch_size=None, num_workers=workers))
    consumed = ids_of(next(batches) for _ in range(11))
    state = loader.state_dict(steps=11)
    assert state["samples_seen"] == 77
    del batches
    second = make(rows)
    second.load_state_dict(json.loads(json.dumps(state)))
    assert sorted(consumed + ids_of(DataLoader(second.torch(), batch_size=None, num_workers=2))) == list(range(200))


def test_batches_cannot_be_batched_again(rows: Path) -> None:
    with pytest.raises(brim.InputError, match="batch_size=None"):
        next(iter(DataLoader(make(rows).torch(), batch_size=4)))


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_continues(rows: Path, workers: int) -> None:
    def batches() -> Any:
        return stateful.StatefulDataLoader(make(rows).torch(), batch_size=None, num_workers=workers)

    whole = ids_of(batches())
    stopped = batches()
    actual = ids_of(itertools.islice(stopped, 9))
    state = stopped.state_dict()
    resumed = batches()
    resumed.load_state_dict(state)
    assert actual + ids_of(resumed) == whole


def test_state_of_a_worker_fits_the_same_ranks_alone(rows: Path) -> None:
    dataset = make(rows, rank=0, world_size=2).torch()
    state = dataset.state_dict()
    with pytest.raises(brim.InputError, match=r"world_size=2.*state_dict\(steps=n\)"):
        make(rows, rank=0, world_size=4).torch().load_state_dict(state)


def test_killed_worker_is_an_error(rows: Path) -> None:
    batches = iter(
        DataLoader(brim.Loader(rows, batch_size=1).torch(), batch_size=None, num_workers=1, prefetch_factor=1)
    )
    next(batches)
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"killed|exited unexpectedly"):
        list(batches)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_vanished_file_is_named_by_the_error_of_a_worker(rows: Path, method: str) -> None:
    batches = DataLoader(make(rows).torch(), batch_size=None, num_workers=2, multiprocessing_context=method)
    (rows / "part-003.parquet").unlink()
    with pytest.raises(brim.SourceChangedError, match=r"part-003\.parquet"):
        list(batches)


TRAINER = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
import brim

dist.init_process_group("gloo")
source, folder, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
loader = brim.Loader(source, batch_size=3, shuffle=True, shuffle_window=20, columns=["id"], last="keep", lanes=8)
path = os.path.join(folder, "state.json")
if os.path.exists(path):
    loader.load_state_dict(json.load(open(path)))
number = len(os.listdir(folder))
for steps, batch in enumerate(DataLoader(loader.torch(), batch_size=None, num_workers=workers), start=1):
    total = torch.tensor([len(batch["id"])])
    dist.all_reduce(total)  # in lockstep
    state = loader.state_dict(steps=steps)
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, [int(row) for row in batch["id"]])
    if dist.get_rank() == 0:  # the checkpoint: rows that were trained on, and the state, in one file
        before = json.load(open(path))["trained"] if os.path.exists(path) else []
        state["trained"] = before + sum(rows, [])
        with open(path + ".new", "w") as file:
            json.dump(state, file)
        os.replace(path + ".new", path)
        print(len(state["trained"]), flush=True)
    time.sleep(0.02)
print("done", flush=True)
"""


def test_two_ranks_killed_five_times_train_on_every_row_once(tmp_path: Path) -> None:
    """SIGKILL ends both processes of a gloo group at random times; the next run resumes from the last checkpoint."""
    source, folder = write_rows(tmp_path / "rows", [60, 180, 120]), tmp_path / "run"
    folder.mkdir()
    rng = random.Random(0)
    for attempt in range(6):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", TRAINER, str(source), str(folder), str(attempt % 2)],
                env=os.environ | shared | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            if attempt < 5:
                assert processes[0].stdout is not None
                for _ in range(rng.randint(1, 8)):
                    assert processes[0].stdout.readline()
                time.sleep(rng.random() / 20)
                for process in processes:
                    process.kill()
            for process in processes:
                process.communicate(timeout=120)
                assert attempt < 5 or process.returncode == 0
        finally:
            for process in processes:
                process.kill()
                process.wait()
    trained = json.loads((folder / "state.json").read_text())["trained"]
    assert sorted(trained) == list(range(360))
