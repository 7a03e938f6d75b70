"""TensorWriter: write batches into the final file as they arrive, so that written rows survive a crash.

`save_file` replaces safetensors' `save_file` around `torch.cat`: it writes batches without concatenating them.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from brim.errors import ArgumentError, BrimError, DestinationUnavailableError, InputError
from brim.sizes import parse_size
from brim.tensors.partial_file import PartialFile, partial_folder
from brim.tensors.partial_layout import Request
from brim.tensors.tensor_batches import as_batch, batch_for
from brim.tensors.tensor_files import Tensor, tensors_from

CHECKPOINT_BYTES = 256_000_000
CHECKPOINT_SECONDS = 30.0


class TensorWriter:
    """Write tensors batch by batch, with the memory of one batch.

    with brim.TensorWriter("emb.safetensors", rows=n, text=(768, "float32"), vision=(1024, "float32")) as writer:
        writer.append(text=t, vision=v)

    A tensor is described by the shape of a row and the type of its values; "int64" alone means one value per row, and a
    column of a `.parquet` file may be "string". Names that are not Python identifiers go into the dict `tensors`.

    Without `rows` the file is copied together at the end, which temporarily needs twice its size on disk.
    Rows are made durable every `checkpoint_rows` rows (default: 256 MB of them) or `checkpoint_seconds`. With
    `resume=True` an interrupted job continues after `rows_done` rows, or starts if it never did.
    Not safe for use by several threads at once.
    """

    def __init__(
        self,
        path: str | Path,
        rows: int | None = None,
        *,
        tensors: Mapping[str, Any] | None = None,
        resume: bool = False,
        overwrite: bool = False,
        metadata: Mapping[str, str] | None = None,
        shard_size: str | int | None = None,
        checkpoint_rows: int | None = None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        **named: Any,
    ) -> None:
        if twice := (tensors or {}).keys() & named.keys():
            raise InputError(f"The tensor {min(twice)!r} is named twice.")
        parsed = tensors_from({**(tensors or {}), **named})
        shard_bytes = None if shard_size is None else parse_size(shard_size)
        if rows is not None and (isinstance(rows, bool) or not hasattr(rows, "__index__") or rows.__index__() < 0):
            raise InputError(f"{rows!r} is not a number of rows.")
        if metadata is not None and not all(isinstance(text, str) for entry in metadata.items() for text in entry):
            raise InputError("Metadata is made of names and texts.", hint='For example {"model": "clip"}.')
        if checkpoint_rows is not None and (isinstance(checkpoint_rows, bool) or operator.index(checkpoint_rows) < 1):
            raise ArgumentError(
                f"checkpoint_rows= takes a number above zero, not {checkpoint_rows!r}.", option="checkpoint-rows"
            )
        if not checkpoint_seconds >= 0:
            raise InputError(f"--checkpoint-seconds takes a number of seconds, not {checkpoint_seconds!r}.")
        promised = None if rows is None else {tensor.name: rows.__index__() for tensor in parsed}
        copied = None if metadata is None else dict(metadata)
        self._request = Request(Path(path).absolute(), parsed, promised, copied, shard_bytes)
        self._tensors = {tensor.name: tensor for tensor in parsed}
        self._checkpoint_rows = checkpoint_rows or max(1, CHECKPOINT_BYTES // max(self._request.row_bytes, 1))
        self._checkpoint_seconds = checkpoint_seconds
        self._file = PartialFile(self._request, resume=resume, overwrite=overwrite)
        self._closed = self._file.finished
        self._safe_rows = self.rows_done
        self._safe_time = time.monotonic()

    @property
    def path(self) -> Path:
        """The file to write."""
        return self._request.path

    @property
    def rows(self) -> int | None:
        """The number of rows promised to the writer."""
        return None if self._request.rows is None else next(iter(self._request.rows.values()))

    @property
    def rows_done(self) -> int:
        """The number of rows written: where to continue after a resume."""
        return next(iter(self._file.rows.values()))

    @property
    def finished(self) -> bool:
        """Whether the file is complete and has its name."""
        return self._file.finished

    def append(self, batch: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Add rows to every tensor. If one tensor of a batch does not fit, nothing of the batch is written."""
        self._refuse_closed()
        values = {**(batch or {}), **named}
        if values.keys() != self._tensors.keys():
            missing, unknown = (
                sorted(self._tensors.keys() - values.keys()),
                sorted(values.keys() - self._tensors.keys()),
            )
            wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which the file has not"
            raise InputError(f"The batch {wrong}.", hint=f"Append {', '.join(self._tensors)} together.")
        batches = {name: batch_for(self._tensors[name], value) for name, value in values.items()}
        counts = {name: each.rows for name, each in batches.items()}
        if len(set(counts.values())) > 1:
            rows = ", ".join(f"{name} {count:,}" for name, count in counts.items())
            raise InputError(f"The tensors of the batch have different rows: {rows}.", hint="Nothing was written.")
        self._file.add(batches)
        is_due = self.rows_done - self._safe_rows >= self._checkpoint_rows
        if is_due or time.monotonic() - self._safe_time >= self._checkpoint_seconds:
            self._checkpoint(wait=False)

    def checkpoint(self) -> None:
        """Make the written rows durable now."""
        self._refuse_closed()
        self._checkpoint(wait=True)

    def _checkpoint(self, wait: bool) -> None:
        self._file.checkpoint(wait)
        self._safe_rows, self._safe_time = self.rows_done, time.monotonic()

    def close(self) -> None:
        """Finish the file. With fewer rows than promised, keep them in the partial folder and raise InputError."""
        if self._closed:
            return
        is_complete = self.rows is None or self.rows_done == self.rows
        self._stop(finish=is_complete)
        if not is_complete:
            name, partial = self.path.name, partial_folder(self.path).name
            raise InputError(
                f"{name} was promised {self.rows:,} rows and has {self.rows_done:,}, which are safe in {partial}.",
                hint="Open it again with resume=True and append the rest, or finish it as it is with truncate().",
                rows=self.rows,
                rows_done=self.rows_done,
            )

    def truncate(self) -> None:
        """Finish the file with the rows written so far, also after a `close` with too few."""
        if self.finished:
            return
        if self._closed:
            self._file = PartialFile(self._request, resume=True, overwrite=False)
        self._stop(finish=True)

    def _stop(self, finish: bool) -> None:
        """Make all rows durable, finish the file if asked to, and release the lock."""
        try:
            self._file.checkpoint()
            if finish:
                self._file.finish()
        finally:
            self._closed = True
            self._file.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            state = "finished" if self.finished else "closed"
            raise InputError(f"{self.path.name} is {state}.", hint="" if self.finished else "Open it with resume=True.")

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            try:
                self._stop(finish=False)
            except BrimError:
                pass  # the error that is being raised says more

    def __repr__(self) -> str:
        promised = "" if self.rows is None else f" of {self.rows:,}"
        return f"<TensorWriter {self.path.name}: {self.rows_done:,}{promised} rows>"


SYNC_BYTES = 64_000_000  # batches stay in memory until they are on disk
_RETRY_HINT = "call save_file again with the same lists: it continues"


class _Batches:
    """The batches of one tensor, in order. They are released when they are on disk."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.is_list = True
        self._synced = self._next = 0
        self._iterator: Iterator[Any] = iter(())
        if hasattr(value, "dtype") or hasattr(value, "type"):
            self._batches = [value]  # a single array is a list of one batch
        elif isinstance(value, list | tuple):
            self._batches = value if isinstance(value, list) else list(value)
        else:
            self._batches, self.is_list = [], False
            try:
                self._iterator = iter(value)
            except TypeError as error:
                raise InputError(f"{name!r} is neither an array nor a list of batches.") from error
        first = self.peek()
        if first is None:
            raise InputError(f"{name!r} has no batches, so its shape is unknown.", hint="Leave it out.")
        batch = as_batch(name, first)
        self.tensor = Tensor(name, batch.dims, batch.dtype)
        # The number of rows, after a check of all batches; None if that would exhaust an iterator.
        self.rows = sum(batch_for(self.tensor, each).rows for each in self._batches) if self.is_list else None

    def peek(self) -> Any:
        """Return the next batch without advancing; None at the end."""
        if self._next == len(self._batches) and not self.is_list:
            self._batches += [batch for batch in [next(self._iterator, None)] if batch is not None]
        return self._batches[self._next] if self._next < len(self._batches) else None

    def advance(self) -> None:
        self._next += 1

    def release_synced(self) -> None:
        """Release the batches before the current one: they are on disk."""
        if self.is_list:  # not shortened each time, which would move all later batches
            self._batches[self._synced : self._next] = [None] * (self._next - self._synced)
            self._synced = self._next
        else:
            del self._batches[: self._next]
            self._next = 0

    def roll_back(self) -> None:
        """Return to the first batch that is not on disk, and remove the released ones from a list."""
        del self._batches[: self._synced]
        self._next = self._synced = 0


class _SaveJob:
    """One call of `save_file`, which a second call may continue."""

    def __init__(self, tensors: Mapping[str, Any], path: Path, metadata: Mapping[str, str] | None) -> None:
        if not tensors:
            raise InputError("There is nothing to save.")
        self._arguments = dict(tensors)
        self._metadata = metadata
        self._batches = [_Batches(name, value) for name, value in tensors.items()]
        self.has_only_lists = all(each.is_list for each in self._batches)
        rows = {each.name: each.rows for each in self._batches if each.rows is not None}
        parsed = tuple(each.tensor for each in self._batches)
        request = Request(path, parsed, rows if self.has_only_lists else None, metadata)
        self.file = PartialFile(request, resume=False, overwrite=True, retry_hint=_RETRY_HINT)

    def run(self) -> None:
        """Write the next batch of the tensor with the fewest rows, so that iterators with one source stay in step."""
        unsynced_bytes = 0
        try:
            while remaining := [each for each in self._batches if each.peek() is not None]:
                current = min(remaining, key=lambda each: self.file.rows[each.name])
                batch = batch_for(current.tensor, current.peek())
                self.file.add({current.name: batch})
                current.advance()
                unsynced_bytes += batch.rows * current.tensor.row_bytes
                del batch
                if unsynced_bytes >= SYNC_BYTES:
                    self._sync()
                    unsynced_bytes = 0
            self._sync()
            self.file.finish()
        finally:
            for each in self._batches:
                each.roll_back()
            self.file.roll_back()

    def _sync(self) -> None:
        self.file.sync()
        for each in self._batches:
            each.release_synced()

    def is_same(self, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None) -> bool:
        """Return whether a call has the same arguments: the very same lists, not equal ones."""
        before = self._arguments
        has_same_lists = tensors.keys() == before.keys() and all(tensors[name] is before[name] for name in tensors)
        return has_same_lists and metadata == self._metadata


_INTERRUPTED: dict[Path, _SaveJob] = {}  # they have the only copy of the rows that were released


def save_file(tensors: Mapping[str, Any], path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the batches of each tensor one after another, with the bytes of `save_file` around `torch.cat`.

    A tensor is a list or an iterator of batches, or one array. An existing file is replaced at the end. Lists are
    emptied as their batches reach the disk. If the disk becomes full, free some space and call `save_file` again with
    the same lists: it continues.

    Args:
        tensors: The batches of each tensor by name.
        path: A .safetensors file.
        metadata: Names and texts for the header of the file.

    Returns:
        None.

    Raises:
        InputError: Batches do not fit together, or the path has another suffix.
        DestinationUnavailableError: The disk is full.

    Examples:
        >>> import numpy
        >>> brim.save_file({"v": [numpy.zeros((2, 3)), numpy.ones((4, 3))]}, "joined.safetensors")
        >>> brim.open_tensors("joined.safetensors")["v"].shape
        (6, 3)
    """
    target = Path(path).absolute()
    job = _INTERRUPTED.pop(target, None)
    if job is not None and not job.is_same(tensors, metadata):
        job.file.close()
        job = None
    if job is None:
        job = _SaveJob(tensors, target, metadata)
    try:
        job.run()
    except BaseException as error:
        # An iterator that raised an error is exhausted, so a second call could not continue.
        if isinstance(error, DestinationUnavailableError) or job.has_only_lists:
            _INTERRUPTED[target] = job
        else:
            job.file.close()
        raise
