"""Keep an unfinished tensor file in the folder `NAME.partial` until it gets its name.

The folder contains the values and the receipts (checkpoints.py). A receipt is written after its values are on disk, so
the rows of the last receipt survive a crash; their checksums are verified before they count. To finish, every file is
completed inside the folder, then the renames are recorded and done. Once they are recorded, the job can only be
finished.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from brim.errors import DestinationError, DestinationUnavailableError, InputError, PlanMismatchError
from brim.sizes import format_size
from brim.state.atomic_files import failures, free_bytes, rename, sync_folder
from brim.tensors.checkpoints import RECEIPTS, Checkpoint, CheckpointLog
from brim.tensors.partial_layout import Files, Request, Stream, layout_for, sync_file
from brim.tensors.tensor_batches import TensorBatch
from brim.tensors.tensor_reader import finished_spec, shard_files

FORMAT = 1
RETRY_HINT = "open it again with resume=True to continue"


class PartialFile:
    """The state of a job on disk. `rows` counts the rows of each tensor; `finished` means the file has its name."""

    def __init__(self, request: Request, *, resume: bool, overwrite: bool, retry_hint: str = RETRY_HINT) -> None:
        if resume and overwrite:
            raise InputError("resume=True continues, and overwrite=True starts over.", hint="Choose one of them.")
        self.request = request
        self.folder = partial_folder(request.path)
        self.finished = False
        self.rows = {tensor.name: 0 for tensor in request.tensors}
        self._retry_hint = retry_hint
        self._is_broken = False
        self._synced_rows = dict(self.rows)
        self._layout = layout_for(request)
        self._job = {**request.facts(), "format": FORMAT, "header": self._layout.checksum}
        self._files = Files(self.folder)
        self._checksum_thread = ThreadPoolExecutor(1, "brim-checksum")
        self._sync_thread = ThreadPoolExecutor(1, "brim-sync")
        self._syncing: Future[None] | None = None
        self._streams = {
            name: [Stream(self._files, self._checksum_thread, find) for find in finders]
            for name, finders in self._layout.find_spans.items()
        }
        self._keyed = {  # streams by their names in receipts
            f"{name}/{number}": stream
            for name, streams in self._streams.items()
            for number, stream in enumerate(streams)
        }
        self._receipts: CheckpointLog | None = None
        with failures(request.path.parent, retry_hint):
            self._open(resume, overwrite)

    def _open(self, resume: bool, overwrite: bool) -> None:
        """Start, resume or refuse the job, depending on what the folder contains."""
        if not (self.folder / RECEIPTS).exists() and not overwrite:
            self._check_finished(resume)
            if self.finished:
                shutil.rmtree(self.folder, ignore_errors=True)  # left by a crash during its removal
                return
        self.folder.mkdir(parents=True, exist_ok=True)
        receipts = self._receipts = CheckpointLog(self.folder)
        try:
            if receipts.is_empty or overwrite:
                # A job without rows starts over. It may have been begun with overwrite=True, so do not refuse a resume.
                self._start_over(receipts, resume, overwrite or (resume and receipts.job is not None))
            elif not resume:
                raise DestinationError(
                    f"{self.folder.name} holds {receipts.rows:,} rows of an unfinished {self.request.path.name}.",
                    hint="Continue with resume=True, or start over with overwrite=True.",
                    rows_done=receipts.rows,
                )
            else:
                self._resume(receipts)
        except BaseException:
            self.close()
            if receipts.is_empty:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _check_finished(self, resume: bool) -> None:
        """Set `finished` if the requested file exists; refuse an existing file that differs or must not be replaced."""
        tensors = {tensor.name: tensor for tensor in self.request.tensors}
        existing = [target for target in self._layout.targets if target.exists()]
        if not existing:
            return
        if not resume:
            raise DestinationError(
                f"{existing[0].name} exists already.", hint="Choose another name, or replace it with overwrite=True."
            )
        stored, rows = finished_spec(self.request.path, sorted(tensors))
        if stored != tensors or (self.request.rows is not None and self.request.rows != rows):
            raise DestinationError(
                f"{existing[0].name} exists already, with other tensors or rows than are asked for.",
                hint="Choose another name, or replace it with overwrite=True.",
            )
        self.finished, self.rows = True, rows

    def _start_over(self, receipts: CheckpointLog, resume: bool, overwrite: bool) -> None:
        if not overwrite:
            self._check_finished(resume)
            if self.finished:
                self._remove_folder()
                return
        receipts.clear()
        for path in self.folder.iterdir():
            if path.name != RECEIPTS:
                path.unlink()
        self._check_disk()
        receipts.begin(self._job)
        sync_folder(self.folder.parent)

    def _resume(self, receipts: CheckpointLog) -> None:
        """Count the rows whose bytes have the checksums of their receipts, or finish the renames."""
        assert receipts.job is not None
        if changes := _changes(receipts.job, self._job):
            raise PlanMismatchError(
                f"{self.folder.name} was begun by a different request: {'; '.join(changes)}.",
                hint="Ask for the same as before, or start over with overwrite=True.",
                changes=changes,
            )
        if receipts.moves is not None:
            self.rows = dict(receipts.moves["rows"])
            self._rename(receipts.moves)
            return
        rows, ends = 0, dict.fromkeys(self._keyed, 0)
        for checkpoint in receipts.checkpoints:
            if not all(
                stream.has_checksum(ends[key], *checkpoint.blocks.get(key, (0, -1)))
                for key, stream in self._keyed.items()
            ):
                warnings.warn(
                    f"Of the {receipts.rows:,} rows in {self.folder.name}, those after row {rows:,} are damaged "
                    "and have to be written again.",
                    stacklevel=5,
                )
                receipts.take_back(rows)
                break
            rows, ends = checkpoint.rows, {key: end for key, (end, _) in checkpoint.blocks.items()}
        for key, stream in self._keyed.items():
            stream.start_block(ends[key])
        self.rows = dict.fromkeys(self.rows, rows)
        self._files.close()
        self._check_disk()

    def _check_disk(self) -> None:
        need, free = self._layout.need_bytes, free_bytes(self.folder)
        used = sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())
        if need is not None and free is not None and need - used > free:
            raise DestinationUnavailableError(
                f"{self.request.path.name} needs {format_size(need - used)} of disk, and {format_size(free)} are left.",
                hint=f"Make room, then {self._retry_hint}.",
                need_bytes=need - used,
                free_bytes=free,
            )

    def add(self, batches: Mapping[str, TensorBatch]) -> None:
        """Write batches after the existing rows. Either all batches are added, or none."""
        for name, batch in batches.items():
            written, promised = self.rows[name], None if self.request.rows is None else self.request.rows[name]
            if promised is not None and written + batch.rows > promised:
                raise InputError(
                    f"{batch.rows:,} rows after {written:,} are more than the {promised:,} that were promised.",
                    hint="Nothing of this batch was written. Leave rows out if it is not known.",
                )
        if self._is_broken or (self._syncing is not None and self._syncing.done()):
            self._wait_for_sync()
        with failures(self.folder, self._retry_hint):
            for name, batch in batches.items():
                for stream, blocks in zip(self._streams[name], batch.streams, strict=True):
                    stream.put(blocks())
        self._is_broken = True  # a Ctrl-C below may leave tensors with different rows: the receipts say which count
        for name, batch in batches.items():
            for stream in self._streams[name]:
                stream.commit()
            self.rows[name] += batch.rows
        self._is_broken = False

    def sync(self) -> None:
        """Wait until all rows are on disk. After a failure the receipts decide which are, or the caller rolls back."""
        self._wait_for_sync()
        self._start_sync(None)
        self._wait_for_sync()
        self._synced_rows = dict(self.rows)

    def roll_back(self) -> None:
        """Return to the rows of the last sync, for a caller that still has the others and writes no receipts."""
        self._is_broken = False
        self.rows = dict(self._synced_rows)
        for tensor in self.request.tensors:
            for stream in self._streams[tensor.name]:
                stream.start_block(self.rows[tensor.name] * tensor.row_bytes)

    def checkpoint(self, wait: bool = True) -> None:
        """Sync all rows and write a receipt for them; without `wait`, do so in the background."""
        assert self._receipts is not None
        self._wait_for_sync()
        rows = max(self.rows.values())
        if rows == self._receipts.rows:
            return
        self._start_sync(Checkpoint(rows, {key: (stream.end, stream.crc) for key, stream in self._keyed.items()}))
        for stream in self._keyed.values():
            stream.start_block(stream.end)
        if wait:
            self._wait_for_sync()

    def _start_sync(self, checkpoint: Checkpoint | None) -> None:
        """Sync the changed files on a thread, which alone uses the receipts until it has ended."""
        changed, self._files.changed = self._files.changed, set()

        def sync() -> None:
            for name in changed:
                sync_file(self.folder / name)
            sync_folder(self.folder)
            if checkpoint is not None and self._receipts is not None:
                self._receipts.add(checkpoint)

        self._syncing = self._sync_thread.submit(sync)

    def _wait_for_sync(self) -> None:
        """Wait for a running sync, and raise its error."""
        if self._is_broken:
            raise DestinationUnavailableError(
                "An earlier write failed or was interrupted.", hint=f"{RETRY_HINT[0].upper()}{RETRY_HINT[1:]}."
            )
        if self._syncing is not None:
            syncing, self._syncing = self._syncing, None
            self._is_broken = True
            with failures(self.folder, self._retry_hint):
                syncing.result()
            self._is_broken = False

    def finish(self) -> None:
        """Finish the file with the rows written so far: give it its final name."""
        assert self._receipts is not None
        self.sync()
        with failures(self.folder, self._retry_hint):
            if self._receipts.moves is None:  # else an earlier attempt was stopped during the renames
                moves = self._layout.prepare(self._files, self.rows)
                self._files.close()
                sync_folder(self.folder)
                # Files of an earlier result must go first: those that have no new version, and an index of shards.
                path, new_names, replaced = self.request.path, {name for _, name in moves}, list[str]()
                if path.suffix != ".npy":
                    index, *shards = shard_files(path) or [""]
                    old_names = [name for name in [index, path.name, *shards] if name]
                    replaced = [name for name in old_names if name not in new_names or name == index]
                self._receipts.finish({"rows": self.rows, "files": moves, "gone": replaced})
            assert self._receipts.moves is not None
            self._rename(self._receipts.moves)

    def _rename(self, moves: Mapping[str, Any]) -> None:
        """Do the recorded removals and renames, as far as they are not done yet."""
        remaining = {name: inside for inside, name in moves["files"] if (self.folder / inside).exists()}
        renamed = {name for _, name in moves["files"]} - remaining.keys()
        for name in moves["gone"]:
            if name not in renamed:
                (self.folder.parent / name).unlink(missing_ok=True)
        for name, inside in remaining.items():
            rename(self.folder / inside, self.folder.parent / name)
        self.finished = True
        self._remove_folder()

    def _remove_folder(self) -> None:
        """Remove the folder while it is locked, and again after: network file systems keep open files until closed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        sync_folder(self.folder.parent)

    def close(self) -> None:
        """Close the files and release the lock. Everything written stays."""
        self._sync_thread.shutdown()
        self._checksum_thread.shutdown()
        self._files.close()
        if self._receipts is not None:
            self._receipts.close()


def partial_folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe how a request differs from the one that started the job."""

    def text(value: Any) -> str:
        if isinstance(value, list):
            return ", ".join(value)
        if isinstance(value, dict):
            if len(set(map(str, value.values()))) == 1 and all(isinstance(count, int) for count in value.values()):
                return f"{next(iter(value.values())):,}"
            return ", ".join(f"{name}={each}" for name, each in value.items())
        return "nothing" if value is None else str(value)

    different = [key for key in now if before.get(key) != now[key]]
    if different == ["header"]:
        return ["the library writes another header now"]
    return [f"{key}: {text(before.get(key))} before, {text(now[key])} now" for key in different if key != "header"]
