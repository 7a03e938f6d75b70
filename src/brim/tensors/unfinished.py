"""A file of tensors until it has its name: the folder `NAME.partial` beside it.

The folder holds the values and the receipts. A receipt is written when the values that it counts are on disk, so
after a crash the rows of the last receipt are there, and are proved by their checksums before they count. To
finish, every file is made whole inside the folder; then the renames are written down, and done. From that line on
the job can only be finished.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from brim.errors import DestinationError, InputError, PlanChanged, SinkFailed
from brim.sizes import format_size
from brim.state.durable import failures, free_bytes, rename, sync_folder
from brim.tensors.arrangement import Request, arrangement_for
from brim.tensors.checkpoints import RECEIPTS, Checkpoint, CheckpointLog
from brim.tensors.tensor_batches import TensorBatch
from brim.tensors.tensor_reader import finished_spec, shard_files
from brim.tensors.tensor_stream import Checker, Files, Stream, sync_file

FORMAT = 1
AGAIN = "open it again with resume=True to continue"


class Unfinished:
    """The state of a job on disk. `rows` is how many rows each tensor has; `finished` that there is nothing to do."""

    def __init__(self, request: Request, *, resume: bool, overwrite: bool, again: str = AGAIN) -> None:
        if resume and overwrite:
            raise InputError("resume=True goes on, and overwrite=True starts over.", hint="Choose one of them.")
        self.request = request
        self.folder = folder_of(request.path)
        self.finished = False
        self.rows = {tensor.name: 0 for tensor in request.tensors}
        self._again = again
        self._broken = False
        self._synced_rows = dict(self.rows)
        self._arrangement = arrangement_for(request)
        self._files = Files(self.folder)
        self._checker = Checker()
        self._sync_thread = ThreadPoolExecutor(1, "brim-sync")
        self._syncing: Future[None] | None = None
        self._streams = {
            name: [Stream(self._files, self._checker, place) for place in places]
            for name, places in self._arrangement.places.items()
        }
        self._receipts: CheckpointLog | None = None
        with failures(request.path.parent, again):
            self._open(resume, overwrite)

    def _open(self, resume: bool, overwrite: bool) -> None:
        if not (self.folder / RECEIPTS).exists() and not overwrite:
            self._look_at_finished(resume)
            if self.finished:
                shutil.rmtree(self.folder, ignore_errors=True)  # a crash while it was being removed
                return
        self.folder.mkdir(parents=True, exist_ok=True)
        self._receipts = CheckpointLog(self.folder)
        try:
            if self._receipts.is_empty or overwrite:
                begun = resume and self._receipts.job is not None  # to replace a file that is there, perhaps
                self._start_over(resume, overwrite or begun)
            elif not resume:
                raise DestinationError(
                    f"{self.folder.name} holds {self._receipts.rows:,} rows of an unfinished {self.request.path.name}.",
                    hint="Go on with resume=True, or start over with overwrite=True.",
                    rows_done=self._receipts.rows,
                )
            else:
                self._go_on()
        except BaseException:
            self.close()
            if self._receipts.is_empty:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _look_at_finished(self, resume: bool) -> None:
        path, tensors = self.request.path, {tensor.name: tensor for tensor in self.request.tensors}
        if not (there := [target for target in self._arrangement.targets if target.exists()]):
            return
        if not resume:
            raise DestinationError(
                f"{there[0].name} exists already.", hint="Choose another name, or replace it with overwrite=True."
            )
        found, rows = finished_spec(path, sorted(tensors))
        if found != tensors or (self.request.rows is not None and self.request.rows != rows):
            raise DestinationError(
                f"{there[0].name} exists already, with other tensors or rows than are asked for.",
                hint="Choose another name, or replace it with overwrite=True.",
            )
        self.finished, self.rows = True, rows

    def _start_over(self, resume: bool, overwrite: bool) -> None:
        assert self._receipts is not None
        if not overwrite:
            self._look_at_finished(resume)
            if self.finished:
                self._remove_folder()
                return
        self._receipts.clear()
        for path in self.folder.iterdir():
            if path.name != RECEIPTS:
                path.unlink()
        self._refuse_small_disk()
        self._receipts.begin(self._job())
        sync_folder(self.folder.parent)

    def _go_on(self) -> None:
        assert self._receipts is not None
        assert self._receipts.job is not None
        if changes := _changes(self._receipts.job, self._job()):
            raise PlanChanged(
                f"{self.folder.name} was begun otherwise: {'; '.join(changes)}.",
                hint="Ask for the same as before, or start over with overwrite=True.",
                changes=changes,
            )
        if self._receipts.moves is not None:
            self.rows = dict(self._receipts.moves["rows"])
            self._move()
            return
        self._verify()
        self._refuse_small_disk()

    def _verify(self) -> None:
        """Count the rows whose bytes have the checksums of their receipts."""
        assert self._receipts is not None
        safe, ends = 0, dict.fromkeys(self._keyed(), 0)
        for checkpoint in self._receipts.checkpoints:
            if not all(
                stream.holds(ends[key], *checkpoint.blocks.get(key, (0, -1))) for key, stream in self._keyed().items()
            ):
                warnings.warn(
                    f"Of the {self._receipts.rows:,} rows in {self.folder.name}, those after row {safe:,} are damaged "
                    "and have to be written again.",
                    stacklevel=6,
                )
                self._receipts.take_back(safe)
                break
            safe, ends = checkpoint.rows, {key: end for key, (end, _) in checkpoint.blocks.items()}
        for key, stream in self._keyed().items():
            stream.begin_block(ends[key])
        self.rows = dict.fromkeys(self.rows, safe)
        self._files.close()

    def _keyed(self) -> dict[str, Stream]:
        """Streams by what receipts call them."""
        return {f"{name}/{at}": each for name, streams in self._streams.items() for at, each in enumerate(streams)}

    def _job(self) -> dict[str, Any]:
        return {**self.request.facts(), "format": FORMAT, "header": self._arrangement.checksum}

    def _refuse_small_disk(self) -> None:
        need, free = self._arrangement.need_bytes, free_bytes(self.folder)
        used = sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())
        if need is not None and free is not None and need - used > free:
            raise SinkFailed(
                f"{self.request.path.name} needs {format_size(need - used)} of disk, and {format_size(free)} are left.",
                hint=f"Make room, then {self._again}.",
                need_bytes=need - used,
                free_bytes=free,
            )

    def add(self, batches: Mapping[str, TensorBatch]) -> None:
        """Write batches after the rows there are. All of them count, or none."""
        for name, batch in batches.items():
            there, promised = self.rows[name], None if self.request.rows is None else self.request.rows[name]
            if promised is not None and there + batch.rows > promised:
                raise InputError(
                    f"{batch.rows:,} rows after {there:,} are more than the {promised:,} that were promised.",
                    hint="Nothing of this batch was written. Leave rows out if it is not known.",
                )
        if self._broken or (self._syncing is not None and self._syncing.done()):
            self._settle()
        with failures(self.folder, self._again):
            for name, batch in batches.items():
                for stream, blocks in zip(self._streams[name], batch.streams, strict=True):
                    stream.put(blocks())
        self._broken = True  # a Ctrl-C in here leaves tensors out of step: then the receipts decide
        for name, batch in batches.items():
            for stream in self._streams[name]:
                stream.commit()
            self.rows[name] += batch.rows
        self._broken = False

    def sync(self) -> None:
        """All rows are on disk. If that fails nobody knows which are: the receipts decide, or `go_back`."""
        self._settle()
        self._start_sync(None)
        self._settle()
        self._synced_rows = dict(self.rows)

    def go_back(self) -> None:
        """To the rows of the last sync, for a caller who still has the others and keeps no receipts."""
        self._broken = False
        self.rows = dict(self._synced_rows)
        for tensor in self.request.tensors:
            for stream in self._streams[tensor.name]:
                stream.begin_block(self.rows[tensor.name] * tensor.row_bytes)

    def checkpoint(self, wait: bool = True) -> None:
        """All rows are on disk, and remembered: now, or soon and while the next rows are being written."""
        assert self._receipts is not None
        self._settle()
        rows = max(self.rows.values())
        if rows == self._receipts.rows:
            return
        self._start_sync(Checkpoint(rows, {key: stream.block() for key, stream in self._keyed().items()}))
        for stream in self._keyed().values():
            stream.begin_block(stream.end)
        if wait:
            self._settle()

    def _start_sync(self, checkpoint: Checkpoint | None) -> None:
        self._syncing = self._sync_thread.submit(self._make_safe, self._files.take_changed(), checkpoint)

    def _make_safe(self, changed: set[str], checkpoint: Checkpoint | None) -> None:
        """On the thread, which has the receipts to itself meanwhile."""
        for name in changed:
            sync_file(self.folder / name)
        sync_folder(self.folder)
        if checkpoint is not None and self._receipts is not None:
            self._receipts.add(checkpoint)

    def _settle(self) -> None:
        """Wait for a sync that is under way, and hear how it went."""
        self._refuse_broken()
        if self._syncing is not None:
            syncing, self._syncing = self._syncing, None
            self._broken = True
            with failures(self.folder, self._again):
                syncing.result()
            self._broken = False

    def finish(self) -> None:
        """Give the file its name, with the rows there are."""
        assert self._receipts is not None
        self.sync()
        with failures(self.folder, self._again):
            if self._receipts.moves is not None:  # an earlier try came as far as the renames
                self._move()
                return
            moves = self._arrangement.prepare(self._files, self.rows)
            self._files.close()
            sync_folder(self.folder)
            gone = self._replaced({name for _, name in moves})
            self._receipts.finish({"rows": self.rows, "files": moves, "gone": gone})
            self._move()

    def _replaced(self, new: set[str]) -> list[str]:
        """Files of an earlier result that go before this one comes: what it has not, and an index of other shards."""
        path = self.request.path
        if path.suffix == ".npy":
            return []
        index, *shards = shard_files(path) or [""]
        return [name for name in [index, path.name, *shards] if name and (name not in new or name == index)]

    def _move(self) -> None:
        assert self._receipts is not None
        assert self._receipts.moves is not None
        left = {name: inside for inside, name in self._receipts.moves["files"] if (self.folder / inside).exists()}
        done = {name for _, name in self._receipts.moves["files"]} - left.keys()
        for name in self._receipts.moves["gone"]:
            if name not in done:
                (self.folder.parent / name).unlink(missing_ok=True)
        for name, inside in left.items():
            rename(self.folder / inside, self.folder.parent / name)
        self.finished = True
        self._remove_folder()

    def _remove_folder(self) -> None:
        """While it is locked; network file systems keep what is open, and let it go a moment later."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        sync_folder(self.folder.parent)

    def _refuse_broken(self) -> None:
        if self._broken:
            raise SinkFailed("An earlier write failed or was interrupted.", hint=f"{AGAIN[0].upper()}{AGAIN[1:]}.")

    def close(self) -> None:
        """Let go of the files and the lock; what is there stays."""
        self._sync_thread.shutdown()
        self._checker.close()
        self._files.close()
        if self._receipts is not None:
            self._receipts.close()


def folder_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[str]:
    different = [key for key in now if before.get(key) != now[key]]
    if different == ["header"]:
        return ["the library writes another header now"]
    return [f"{key}: {_short(before.get(key))} before, {_short(now[key])} now" for key in different if key != "header"]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, dict):
        if len(set(map(str, value.values()))) == 1 and all(isinstance(count, int) for count in value.values()):
            return f"{next(iter(value.values())):,}"
        return ", ".join(f"{name}={each}" for name, each in value.items())
    return "nothing" if value is None else str(value)
