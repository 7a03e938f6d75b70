"""A loader as an IterableDataset of torch. The only module of the loader that imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from brim.errors import InputError
from brim.loader.loader import Loader, Start, TrainingBatch
from brim.loader.torch_private import refuse_collation

_STATE_BYTES = 1 << 16
_MOST_WORKERS = 1024
_WORKERS, _LENGTH, _FINISHED = 0, 1, 2  # positions of numbers in shared memory


refuse_collation(TrainingBatch)


class _SharedPosition:
    """Memory that the trainer and all workers see: where reading starts, and which workers finished which epoch.

    Persistent workers were started before the next call of `set_epoch`, and have no other way to learn of it.
    """

    def __init__(self) -> None:
        self._numbers = torch.zeros(_FINISHED + _MOST_WORKERS, dtype=torch.int64).share_memory_()
        self._text = torch.zeros(_STATE_BYTES, dtype=torch.uint8).share_memory_()

    def workers(self) -> int:
        """Return how many workers a DataLoader has started; 0 before it has."""
        return int(self._numbers[_WORKERS])

    def register(self, workers: int) -> None:
        if workers > _MOST_WORKERS:
            raise InputError(f"A loader takes at most {_MOST_WORKERS} workers, not {workers}.")
        self._numbers[_WORKERS] = workers

    def write(self, state: Mapping[str, Any]) -> None:
        """Set where reading starts."""
        data = json.dumps(state).encode()
        if len(data) > _STATE_BYTES:
            raise InputError("The epoch was resumed on too many different numbers of ranks and workers.")
        self._text[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._numbers[_LENGTH] = len(data)
        self._numbers[_FINISHED:] = 0

    def read(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(bytes(self._text[: int(self._numbers[_LENGTH])].tolist()))
        return data

    def epochs_finished(self, workers: int) -> int:
        """Return how many epochs all workers have finished since the position was set."""
        return int(self._numbers[_FINISHED : _FINISHED + workers].min())

    def finish(self, worker: int, epochs: int) -> None:
        self._numbers[_FINISHED + worker] = epochs


class TorchDataset(IterableDataset):  # type: ignore[misc]
    """The batches of a loader: `DataLoader(loader.torch(), batch_size=None, num_workers=W)`.

    Each iteration reads one epoch, the next one if none was set. `state_dict` and `load_state_dict` are for the
    StatefulDataLoader of torchdata, which keeps one state for each worker.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.loader = loader
        self._shared = loader._shared or _SharedPosition()
        loader._shared = self._shared
        loader._share()
        self._resumed: dict[str, Any] | None = None
        self._start: Start | None = None
        self._taken = 0  # batches that this worker yielded since `_start`

    def __iter__(self) -> Iterator[Any]:
        worker, workers = _worker()
        shared, loader = self._shared, self.loader
        if get_worker_info() is None:
            shared.register(0)
            yield from self._in_process()
            return
        shared.register(workers)
        epochs = shared.epochs_finished(workers)
        start = loader.resume_position(shared.read())
        if epochs:
            start = loader.next_epoch(start, epochs)
        self._start, self._taken = start, 0
        if self._resumed is not None:
            self._start = start = loader.resume_position(self._resumed["loader"])
            self._taken, self._resumed = int(self._resumed["taken"]), None
        for batch in loader.read(start, worker, workers, skip=self._taken):
            self._taken += 1
            yield batch
        self._start, self._taken = loader.next_epoch(start, 1), 0
        shared.finish(worker, epochs + 1)

    def _in_process(self) -> Iterator[Any]:
        if self._resumed is not None:
            self.loader.load_state_dict(self._resumed["loader"])
            self._resumed = None
        yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch next: the same as `Loader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker, for StatefulDataLoader."""
        loader, (worker, workers) = self.loader, _worker()
        if get_worker_info() is None:
            state = loader.state_dict(steps=loader._taken)
        else:
            state = loader.state_of(self._start or loader.resume_position(self._shared.read()))
        return {
            "loader": state,
            "rank": loader.rank,
            "world_size": loader.world_size,
            "worker": worker,
            "workers": workers if get_worker_info() is not None else 0,
            "taken": self._taken,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of this worker. It fits the same rank, and the same numbers of ranks and workers."""
        loader, (worker, workers) = self.loader, _worker()
        now = {"rank": loader.rank, "world_size": loader.world_size, "worker": worker}
        now["workers"] = workers if get_worker_info() is not None else 0
        for name, value in now.items():
            if state.get(name) != value:
                raise InputError(
                    f"This state of a DataLoader worker was saved with {name}={state.get(name)}, not {value}.",
                    hint="Save loader.state_dict(steps=n), with n the batches taken: it fits any ranks and workers.",
                )
        loader.start_of(state["loader"])
        self._resumed = dict(state)


def _worker() -> tuple[int, int]:
    """Return the number of this worker, and how many there are."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
