"""`brim.Loader`: batches for training from a Parquet dataset, which continue after a stop on any number of ranks.

The order of an epoch: epoch_order.py. Which reader takes what: row_shares.py. Reading: row_group_reader.py and
row_batches.py. Workers of a torch DataLoader: torch_dataset.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from brim.block_pandas import postpone_pandas
from brim.errors import ArgumentError, InputError, MemoryLimitError, PlanMismatchError
from brim.loader.epoch_order import EpochOrder
from brim.loader.parquet_groups import open_row_groups
from brim.loader.reader_process import ReaderProcess
from brim.loader.row_batches import as_arrays, batches_of, stretches_of
from brim.loader.row_group_reader import ReadAhead, RowGroupReader
from brim.loader.row_shares import Last, Layout, Leg, Range, Shares, current_shares, ranges_left
from brim.memory.limit import effective_limit
from brim.memory.meter import process_bytes
from brim.records import dataclass
from brim.sizes import format_size
from brim.storage.location import Access

if TYPE_CHECKING:
    from brim.loader.torch_dataset import TorchDataset

_VERSION = 1
_LEAST_AHEAD_BYTES, _MOST_AHEAD_BYTES = 8 << 20, 48 << 20
_MOST_PROCESS_BYTES = 400_000_000  # of a process before it reads anything: Python, pyarrow, torch
_WINDOW_BYTES, _LEAST_WINDOW_BYTES, _WINDOWS = 32 << 20, 8 << 20, 256
_COPIES_OF_WINDOW = 3  # the one that is read, the one that batches are taken from, and its copy without gaps


class TrainingBatch(dict[str, Any]):
    """A batch: columns by name. `epoch` is its epoch; `steps` is the number for `Loader.state_dict(steps=…)`."""

    epoch = 0
    steps = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Where reading starts: an epoch, what has been taken of it, and the number of files that it has."""

    epoch: int
    legs: tuple[Leg, ...]
    files: int


class Loader:
    """Read batches for training from a Parquet dataset, in an order that (seed, epoch) decides.

    Reading continues after a stop with exactly the rows that were not consumed, on any number of ranks and workers:
    save `state_dict()` with each checkpoint, and give it to `load_state_dict()`.

    Args:
        source: A folder, file or glob of Parquet files, hf://, s3://, gs://, az:// or https, or a selection
            (`brim.dataset(…)`).
        columns: The columns to read; all by default.
        batch_size: Rows of a batch of one rank.
        shuffle: Put row groups in another order in each epoch, and shuffle rows inside a window.
        seed: Decides the order, together with the epoch.
        shuffle_window: Rows that are shuffled together. The default is the rows of 1/256 of the dataset, but of at
            least 8 MB and at most 32 MB.
        epoch: The first epoch.
        rank: The number of this rank. The default is that of torch.distributed, else $RANK, else 0.
        world_size: The number of ranks; the default is found in the same way.
        lanes: Equal parts of the epoch that no window crosses. Ranks read the fewest bytes if their number divides it.
        memory: Memory limit of the loaders and workers of this machine, such as "2GB".
        transform: A function that is called with each batch; what it returns is the batch.
        last: What becomes of rows at the end that do not fill a batch of each rank: "drop" them, "pad" the batch with
            rows that it has already, or "keep" a smaller batch.
        format: "numpy" for a dict of arrays, or "arrow" for a `pyarrow.Table`.
        from_config: The config of the dataset to read.
        from_split: The split of the dataset to read.
        endpoint_url: Address of an S3-compatible store.
        anonymous: Read a public bucket without credentials.

    Raises:
        InputError: The source is not a Parquet dataset, or an argument is invalid.
        MemoryLimitError: A window does not fit the memory limit.

    Examples:
        >>> loader = brim.Loader("rows", batch_size=2)
        >>> [len(batch["id"]) for batch in loader]
        [2, 2]
    """

    def __init__(
        self,
        source: Any,
        *,
        columns: Sequence[str] | None = None,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        shuffle_window: int | None = None,
        epoch: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        lanes: int = 64,
        memory: str | int | None = None,
        transform: Callable[[Any], Any] | None = None,
        last: Last = "drop",
        format: Literal["numpy", "arrow"] = "numpy",
        from_config: str | None = None,
        from_split: str | None = None,
        endpoint_url: str | None = None,
        anonymous: bool = False,
    ) -> None:
        self.batch_size = _whole("batch_size", batch_size)
        self.lanes = _whole("lanes", lanes)
        self.seed = _whole("seed", seed, least=None)
        self.rank, self.world_size = _find_rank(rank, world_size)
        for name, value, allowed in (("last", last, ("drop", "pad", "keep")), ("format", format, ("numpy", "arrow"))):
            if value not in allowed:
                raise ArgumentError(f"{name}= must be one of {', '.join(allowed)}, not {value!r}.", option=name)
        if transform is not None and not callable(transform):
            raise ArgumentError(f"transform= must be a function, not {transform!r}.", option="transform")
        self.last, self.format, self.shuffle, self._transform = last, format, bool(shuffle), transform
        self._limit_bytes = effective_limit(memory).bytes
        access = Access(endpoint_url, anonymous)
        self._groups = open_row_groups(source, columns, from_config, from_split, access, ordered=not shuffle)
        self.rows = int(self._groups.rows.sum())
        self.window = self._default_window() if shuffle_window is None else _whole("shuffle_window", shuffle_window)
        self._start = Start(_whole("epoch", epoch, least=0), (), len(self._groups.files))
        self._taken = 0  # batches since `_start`, by iterating in this process
        self._opened_by: int | None = os.getpid()  # None in a process that has unpickled this loader
        self._shared: Any = None  # memory that workers of a DataLoader see; torch_dataset.py sets it
        self._window_budget(1)

    @property
    def epoch(self) -> int:
        """The epoch that is read now, or next."""
        return self._now().epoch

    def _now(self) -> Start:
        """Return where reading stands. Of workers, this process knows only the epochs that they have finished."""
        workers = 0 if self._shared is None else self._shared.workers()
        if not workers:
            return self._after(self._taken, 1)
        epochs = self._shared.epochs_finished(workers)
        return self.next_epoch(self._start, epochs) if epochs else self._start

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the columns that are read."""
        return self._groups.schema

    def __len__(self) -> int:
        """Return how many batches this rank has left of the epoch, from where reading started."""
        shares, done = self._shares(self._now(), self._workers_seen())
        return max(shares.batches(self.rank) - done, 0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this rank that are left of the epoch. The next `for` loop reads the next epoch."""
        origin = self._start
        for batch in self.read(self._after(self._taken, 1), 0, 1):
            self._taken += 1
            yield batch
            if self._start is not origin:  # set_epoch or load_state_dict was called in between
                return

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch next, from its start. The epoch that is being read, or was resumed, continues.

        Args:
            epoch: Its number. Workers of a DataLoader see it too, even if they are persistent.
        """
        if _whole("epoch", epoch, least=0) != self._now().epoch:
            self._start, self._taken = Start(epoch, (), len(self._groups.files)), 0
            self._share()

    def state_dict(self, steps: int | None = None) -> dict[str, Any]:
        """Return where reading stands, for `load_state_dict` on any number of ranks and workers.

        Args:
            steps: Batches that each rank has consumed since the loader was made, or since the last call of
                `load_state_dict` or of `set_epoch` with another epoch. It is needed with workers, which read ahead of
                the trainer. Without workers, the loader counts.

        Returns:
            A small dict of numbers and texts, for JSON or torch.save. It is the same on all ranks.

        Raises:
            InputError: `steps` is missing although workers of a DataLoader read.
        """
        if steps is None:
            if self._workers_seen() > 1 or (self._shared is not None and self._shared.workers()):
                raise InputError(
                    "The loader cannot know how many batches of its workers the trainer has consumed.",
                    hint="Call state_dict(steps=n) with the number of batches that the trainer took.",
                )
            steps = self._taken
        start = self._after(_whole("steps", steps, least=0), self._workers_seen())
        return self.state_of(start)

    def state_of(self, start: Start) -> dict[str, Any]:
        """Return the state of a position."""
        groups = self._groups.first_files(start.files)
        rows = int(groups.rows.sum())
        seen = rows - sum(stop - first for first, stop in ranges_left(rows, start.legs))
        return {
            "version": _VERSION,
            "epoch": start.epoch,
            "samples_seen": seen,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "window": self.window,
            "lanes": self.lanes,
            "rows": rows,
            "fingerprint": groups.fingerprint,
            "legs": [
                {
                    "ranks": leg.layout.ranks,
                    "workers": leg.layout.workers,
                    "batch_size": leg.layout.batch_size,
                    "last": leg.layout.last,
                    "batches": leg.batches,
                }
                for leg in start.legs
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_appended: bool = False) -> None:
        """Continue from a state, with exactly the rows that had not been consumed.

        Args:
            state: What `state_dict` returned. Its seed and window replace those of this loader.
            allow_appended: Accept a dataset to which files were added at the end. Their rows join at the next epoch.

        Raises:
            PlanMismatchError: The dataset or the lanes are not those of the state.
            InputError: This is not the state of a loader.
        """
        self._start, self._taken = self.resume_position(state, allow_appended=allow_appended), 0
        self._share()

    def start_of(self, state: Mapping[str, Any], *, allow_appended: bool = False) -> Start:
        """Return the position of a state, after checking that it belongs to this dataset."""
        try:
            version, epoch, rows = int(state["version"]), int(state["epoch"]), int(state["rows"])
            legs = tuple(_leg(entry) for entry in state["legs"])
            fingerprint, changes = str(state["fingerprint"]), dict[str, Any]()
            for name, own in (("lanes", self.lanes), ("shuffle", self.shuffle)):
                if state[name] != own:
                    changes[name] = [state[name], own]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                "This is not the state of a brim.Loader.", hint="Use what state_dict() returned."
            ) from error
        if version > _VERSION:
            raise InputError(f"The state has version {version}, which is newer than this brim.", hint="Update brim.")
        if changes:
            name, (saved, own) = next(iter(changes.items()))
            raise PlanMismatchError(
                f"The state was saved with {name}={saved!r}, and this loader has {name}={own!r}.",
                hint=f"Make the loader with {name}={saved!r}.",
                changes=changes,
            )
        if fingerprint not in self._groups.fingerprints:
            raise PlanMismatchError(
                f"The dataset is not the one that the state was saved with: it had {rows:,} rows, and has "
                f"{self.rows:,}, or other rows, files or selected rows.",
                hint="Use the same dataset, or start anew without the state.",
                changes={"fingerprint": [fingerprint, self._groups.fingerprint], "rows": [rows, self.rows]},
            )
        files = self._groups.fingerprints.index(fingerprint) + 1
        if files < len(self._groups.files) and not allow_appended:
            raise PlanMismatchError(
                f"Rows were appended to the dataset: it had {rows:,}, and has {self.rows:,}.",
                hint="Use load_state_dict(state, allow_appended=True): they join at the next epoch.",
                changes={"rows": [rows, self.rows]},
            )
        return Start(epoch, legs, files if legs else len(self._groups.files))

    def torch(self) -> TorchDataset:
        """Return a `torch.utils.data.IterableDataset` of finished batches: `DataLoader(…, batch_size=None)`.

        Raises:
            MissingDependencyError: torch is not installed.

        Examples:
            >>> loader = brim.Loader("rows", batch_size=2)
            >>> batches = torch.utils.data.DataLoader(loader.torch(), batch_size=None)  # doctest: +SKIP
        """
        from brim.extras import missing

        try:
            from brim.loader.torch_dataset import TorchDataset
        except ImportError as error:
            raise missing("embed", "Loader.torch() needs torch.") from error
        return TorchDataset(self)

    def read(self, start: Start, worker: int, workers: int, skip: int = 0) -> Iterator[Any]:
        """Yield the batches that one worker of this rank makes, from a position to the end of its epoch.

        `skip`: the worker has made some of them before.
        """
        shares, done = self._shares(start, workers)
        own = (worker + done) % workers  # batch `done` is the first that is asked for, of the first worker
        expected = range(done + worker, shares.batches(self.rank), workers)[skip:]
        ranges = shares.ranges(self.rank, own, done + skip * workers)
        tables = self._tables(start, ranges, workers)
        for number in expected:
            if (table := next(tables, None)) is None:  # padding alone: the first row of the epoch
                (table,) = self._tables(start, [(0, 1)], workers)
            if self.last == "pad" and len(table) < self.batch_size:
                table = table.take(pa.array(np.resize(np.arange(len(table)), self.batch_size)))
            yield self._finished(table, start.epoch, number - done + 1)
            del table

    def _finished(self, table: pa.Table, epoch: int, steps: int) -> Any:
        batch: Any = table.combine_chunks() if self.format == "arrow" else TrainingBatch(as_arrays(table))
        if self._transform is not None:
            batch = self._transform(batch)
            if type(batch) is dict:
                batch = TrainingBatch(batch)
        if isinstance(batch, TrainingBatch):
            batch.epoch, batch.steps = epoch, steps
        return batch

    def _tables(self, start: Start, ranges: Sequence[Range], workers: int) -> Iterator[pa.Table]:
        """Yield the rows of ranges in batches."""
        if not ranges:
            return
        postpone_pandas()
        groups, order = self._groups.first_files(start.files), self._order(start)
        ahead_bytes, most_held_bytes = self._window_budget(workers)
        is_remote = any(file.remote is not None for file in groups.files)
        process = None
        if is_remote and self._opened_by not in (None, os.getpid()):
            process = ReaderProcess(groups, order, ranges, ahead_bytes // 2)
            tables = process.tables()
        else:
            reader = RowGroupReader(groups, ahead_bytes // 2, threads=workers == 1)
            tables = reader.tables(stretches_of(order, ranges))
        ahead = ReadAhead(tables, ahead_bytes // 2)
        try:
            yield from batches_of(order, ranges, ahead, self.batch_size, most_held_bytes)
        finally:
            if process is not None:
                process.close()
            ahead.close()

    def _order(self, start: Start) -> EpochOrder:
        return EpochOrder(
            self._groups.first_files(start.files).rows,
            seed=self.seed,
            epoch=start.epoch,
            window=self.window,
            lanes=self.lanes,
            shuffle=self.shuffle,
        )

    def _layout(self, workers: int) -> Layout:
        return Layout(self.world_size, max(workers, 1), self.batch_size, self.last)

    def _shares(self, start: Start, workers: int) -> tuple[Shares, int]:
        rows = int(self._groups.first_files(start.files).rows.sum())
        return current_shares(rows, start.legs, self._layout(workers))

    def _after(self, steps: int, workers: int) -> Start:
        """Return the position after this rank has taken some batches, which may be in a later epoch."""
        start, layout = self._start, self._layout(workers)
        while steps:
            shares, done = self._shares(start, workers)
            available = max(shares.batches(self.rank) - done, 0)
            if steps < available:
                legs = start.legs[:-1] if start.legs and start.legs[-1].layout == layout else start.legs
                return replace(start, legs=(*legs, Leg(layout, done + steps)))
            if not available and not start.legs:
                raise InputError(f"steps={steps} is too large: an epoch of this loader has no batch.")
            steps -= available
            start = Start(start.epoch + 1, (), len(self._groups.files))
        return start

    def resume_position(self, state: Mapping[str, Any], *, allow_appended: bool = True) -> Start:
        """Return the position of a state of this loader, and take its seed and window."""
        start = self.start_of(state, allow_appended=allow_appended)
        self.seed, self.window = int(state["seed"]), int(state["window"])
        return start

    def next_epoch(self, start: Start, epochs: int) -> Start:
        """Return the start of the epoch that follows a position after some epochs."""
        return Start(start.epoch + epochs, (), len(self._groups.files))

    def _workers_seen(self) -> int:
        return 1 if self._shared is None else max(self._shared.workers(), 1)

    def _share(self) -> None:
        """Let the workers of a DataLoader know where reading starts."""
        if self._shared is not None:
            self._shared.write(self.state_of(self._start))

    def _default_window(self) -> int:
        """Return the rows of 1/256 of the dataset, but of at least 8 MB and at most 32 MB: data alone decides."""
        size = int(self._groups.bytes.sum())
        window_bytes = min(max(size // _WINDOWS, _LEAST_WINDOW_BYTES), _WINDOW_BYTES)
        return max(self.rows * window_bytes // max(size, 1), 1)

    def _window_budget(self, workers: int) -> tuple[int, int]:
        """Return how many bytes a reader may read ahead, and how many its process may hold between two windows.

        MemoryLimitError: a window does not fit.
        """
        local = min(_environment_number("LOCAL_WORLD_SIZE", self.world_size), self.world_size)
        readers = max(local, 1) * max(workers, 1)
        reader_limit = self._limit_bytes // readers
        process_held = min(process_bytes(os.getpid()), _MOST_PROCESS_BYTES)
        row_bytes = int(self._groups.bytes.sum()) / max(self.rows, 1)
        window_bytes = int(_COPIES_OF_WINDOW * row_bytes * min(self.window, self.rows)) if self.shuffle else 0
        other_bytes = process_held + 2 * int(row_bytes * self.batch_size)
        needed = other_bytes + window_bytes + _LEAST_AHEAD_BYTES
        if reader_limit < needed:
            of_window = f", {format_size(window_bytes)} for a shuffle window of {self.window:,} rows" * self.shuffle
            rows = int((reader_limit - other_bytes - _LEAST_AHEAD_BYTES) / max(_COPIES_OF_WINDOW * row_bytes, 1))
            readers_take = f"Each of {readers} readers takes" if readers > 1 else "The reader takes"
            raise MemoryLimitError(
                f"{readers_take} {format_size(needed)} ({format_size(process_held)} for its process"
                f"{of_window}), which does not fit the memory limit of {format_size(self._limit_bytes)}.",
                hint="Use a larger memory= or fewer workers"
                + (f", or shuffle_window={rows} or smaller." if rows > 0 and self.shuffle else "."),
                need_bytes=needed * readers,
                limit_bytes=self._limit_bytes,
            )
        ahead_bytes = min(reader_limit - needed + _LEAST_AHEAD_BYTES, _MOST_AHEAD_BYTES)
        return ahead_bytes, reader_limit - ahead_bytes - window_bytes - 2 * int(row_bytes * self.batch_size)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_shared": None, "_opened_by": None}


def _whole(name: str, value: Any, least: int | None = 1) -> int:
    """Return an argument that must be a whole number."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or (least is not None and value < least):
        limit = "" if least is None else f" of at least {least}"
        raise ArgumentError(f"{name}= must be a whole number{limit}, not {value!r}.", option=name)
    return int(value)


def _leg(entry: Mapping[str, Any]) -> Leg:
    layout = Layout(int(entry["ranks"]), int(entry["workers"]), int(entry["batch_size"]), entry["last"])
    if min(layout.ranks, layout.workers, layout.batch_size) < 1 or layout.last not in ("drop", "pad", "keep"):
        raise ValueError("an invalid leg")
    return Leg(layout, int(entry["batches"]))


def _environment_number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise InputError(f"The environment variable {name} must be a whole number, not {text!r}.")
    return int(text)


def _find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this rank and the number of ranks, as given, or as torch.distributed or the environment says."""
    if (rank is None) != (world_size is None):
        raise ArgumentError("rank= and world_size= must be used together.", option="rank")
    if rank is None or world_size is None:
        rank, world_size = _environment_number("RANK", 0), _environment_number("WORLD_SIZE", 1)
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if _whole("rank", rank, least=0) >= _whole("world_size", world_size):
        raise ArgumentError(f"rank={rank} must be below world_size={world_size}.", option="rank")
    return int(rank), int(world_size)
