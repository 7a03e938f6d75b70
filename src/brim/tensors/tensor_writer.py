"""TensorWriter: batches go into the final file as they come, and what was written survives a crash.

`save_file` takes the place of the one of safetensors around `torch.cat`: batches are written and not joined.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from brim.choices import at_least
from brim.errors import BrimError, InputError, SinkFailed
from brim.sizes import parse_size
from brim.tensors.arrangement import Request
from brim.tensors.tensor_batches import as_batch, batch_for
from brim.tensors.tensor_files import Tensor, tensors_from
from brim.tensors.unfinished import Unfinished, folder_of

CHECKPOINT_BYTES = 256_000_000
CHECKPOINT_SECONDS = 30.0


class TensorWriter:
    """Write tensors batch by batch, with the memory of one batch.

    with brim.TensorWriter("emb.safetensors", rows=n, text=(768, "float32"), vision=(1024, "float32")) as writer:
        writer.append(text=t, vision=v)

    A tensor is the shape of its rows and the type of its values; "int64" alone is one value a row, and in a
    `.parquet` file a column may be "string". Names that are no Python names go into `tensors`, a dict.

    `rows` may be left out; the file is then put together at the end, which takes its size in disk once more.
    Every `checkpoint_rows` rows (256 MB if not given) or `checkpoint_seconds`, what is written is made safe. With
    `resume=True` a job that was interrupted goes on after `rows_done` rows, and one that never began begins.
    Not for several threads at once.
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
        found = tensors_from({**(tensors or {}), **named})
        shard_bytes = None if shard_size is None else parse_size(shard_size)
        self._request = Request(
            Path(path).absolute(), found, _promised(rows, found), _checked_notes(metadata), shard_bytes
        )
        self._tensors = {tensor.name: tensor for tensor in found}
        self._checkpoint_rows = _pace(checkpoint_rows, self._request.row_bytes)
        if not checkpoint_seconds >= 0:
            raise InputError(f"--checkpoint-seconds takes a number of seconds, not {checkpoint_seconds!r}.")
        self._checkpoint_seconds = checkpoint_seconds
        self._job = Unfinished(self._request, resume=resume, overwrite=overwrite)
        self._closed = self._job.finished
        self._safe_rows = self.rows_done
        self._safe_at = time.monotonic()

    @property
    def path(self) -> Path:
        return self._request.path

    @property
    def rows(self) -> int | None:
        """The rows that were promised."""
        return None if self._request.rows is None else next(iter(self._request.rows.values()))

    @property
    def rows_done(self) -> int:
        """The rows that are written: where to go on after a resume."""
        return next(iter(self._job.rows.values()))

    @property
    def finished(self) -> bool:
        """Whether the file is whole and has its name."""
        return self._job.finished

    def append(self, batch: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Add rows to every tensor. A batch that does not fit is refused as a whole."""
        self._refuse_closed()
        given = {**(batch or {}), **named}
        if given.keys() != self._tensors.keys():
            missing, unknown = sorted(self._tensors.keys() - given.keys()), sorted(given.keys() - self._tensors.keys())
            wrong = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which the file has not"
            raise InputError(f"The batch {wrong}.", hint=f"Append {', '.join(self._tensors)} together.")
        batches = {name: batch_for(self._tensors[name], value) for name, value in given.items()}
        counts = {name: each.rows for name, each in batches.items()}
        if len(set(counts.values())) > 1:
            rows = ", ".join(f"{name} {count:,}" for name, count in counts.items())
            raise InputError(f"The tensors of the batch have different rows: {rows}.", hint="Nothing was written.")
        self._job.add(batches)
        due = self.rows_done - self._safe_rows >= self._checkpoint_rows
        if due or time.monotonic() - self._safe_at >= self._checkpoint_seconds:
            self._checkpoint(wait=False)

    def checkpoint(self) -> None:
        """Make what is written safe now."""
        self._refuse_closed()
        self._checkpoint(wait=True)

    def _checkpoint(self, wait: bool) -> None:
        self._job.checkpoint(wait)
        self._safe_rows, self._safe_at = self.rows_done, time.monotonic()

    def close(self) -> None:
        """Finish the file. With fewer rows than promised, keep them and say so."""
        if self._closed:
            return
        if self.rows is None or self.rows_done == self.rows:
            self._finish()
            return
        self._leave()
        name, partial = self.path.name, folder_of(self.path).name
        raise InputError(
            f"{name} was promised {self.rows:,} rows and has {self.rows_done:,}, which are safe in {partial}.",
            hint="Open it again with resume=True and append the rest, or finish it as it is with truncate().",
            rows=self.rows,
            rows_done=self.rows_done,
        )

    def truncate(self) -> None:
        """Finish the file with the rows there are, also after a `close` that found too few."""
        if self.finished:
            return
        if self._closed:
            self._job = Unfinished(self._request, resume=True, overwrite=False)
        self._finish()

    def _finish(self) -> None:
        try:
            self._job.checkpoint()
            self._job.finish()
        finally:
            self._closed = True
            self._job.close()

    def _leave(self) -> None:
        """Stop here: everything written is safe, and the lock is free."""
        try:
            self._job.checkpoint()
        finally:
            self._closed = True
            self._job.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            state = "finished" if self.finished else "closed"
            raise InputError(f"{self.path.name} is {state}.", hint="" if self.finished else "Open it with resume=True.")

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            try:
                self._leave()
            except BrimError:
                pass  # the error that is on its way says more

    def __repr__(self) -> str:
        of = "" if self.rows is None else f" of {self.rows:,}"
        return f"<TensorWriter {self.path.name}: {self.rows_done:,}{of} rows>"


def _promised(rows: int | None, tensors: tuple[Tensor, ...]) -> dict[str, int] | None:
    if rows is None:
        return None
    if isinstance(rows, bool) or not hasattr(rows, "__index__") or rows.__index__() < 0:
        raise InputError(f"{rows!r} is not a number of rows.")
    return {tensor.name: rows.__index__() for tensor in tensors}


def _checked_notes(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not all(isinstance(text, str) for note in metadata.items() for text in note):
        raise InputError("Metadata is made of names and texts.", hint='For example {"model": "clip"}.')
    return dict(metadata)


def _pace(checkpoint_rows: int | None, row_bytes: int) -> int:
    at_least("checkpoint-rows", checkpoint_rows, 1)
    return checkpoint_rows or max(1, CHECKPOINT_BYTES // max(row_bytes, 1))


SYNC_BYTES = 64_000_000  # batches stay in memory until they are on disk
_AGAIN = "call save_file again with the same lists: it goes on"


class _Batches:
    """The batches of one tensor, first to last. They are let go when they are on disk."""

    def __init__(self, name: str, given: Any) -> None:
        self.name = name
        self.is_list = True
        self._safe = self._next = 0
        self._more: Iterator[Any] = iter(())
        if hasattr(given, "dtype") or hasattr(given, "type"):
            self._held = [given]  # one array is a list of one
        elif isinstance(given, list | tuple):
            self._held = given if isinstance(given, list) else list(given)
        else:
            self._held, self.is_list = [], False
            try:
                self._more = iter(given)
            except TypeError as error:
                raise InputError(f"{name!r} is neither an array nor a list of batches.") from error
        first = self.peek()
        if first is None:
            raise InputError(f"{name!r} has no batches, so its shape is unknown.", hint="Leave it out.")
        batch = as_batch(name, first)
        self.tensor = Tensor(name, batch.dims, batch.dtype)

    def peek(self) -> Any:
        """The next batch, which stays the next until `took` is called; None at the end."""
        if self._next == len(self._held) and not self.is_list:
            self._held += [batch for batch in [next(self._more, None)] if batch is not None]
        return self._held[self._next] if self._next < len(self._held) else None

    def took(self) -> None:
        self._next += 1

    def rows(self) -> int | None:
        """All rows, checked; None if that takes an iterator to its end."""
        return sum(batch_for(self.tensor, each).rows for each in self._held) if self.is_list else None

    def let_go(self) -> None:
        """What was taken is on disk."""
        if self.is_list:  # not shortened each time: that would move the whole rest
            self._held[self._safe : self._next] = [None] * (self._next - self._safe)
            self._safe = self._next
        else:
            del self._held[: self._next]
            self._next = 0

    def go_back(self) -> None:
        """To what is not on disk; a list is as long as what is left of it."""
        del self._held[: self._safe]
        self._next = self._safe = 0


class _Saving:
    """One call, which a second one may go on with."""

    def __init__(self, given: Mapping[str, Any], path: Path, metadata: Mapping[str, str] | None) -> None:
        if not given:
            raise InputError("There is nothing to save.")
        self._given = dict(given)
        self._metadata = metadata
        self._batches = [_Batches(name, each) for name, each in given.items()]
        counts = {each.name: each.rows() for each in self._batches}
        rows = {name: count for name, count in counts.items() if count is not None}
        tensors = tuple(each.tensor for each in self._batches)
        request = Request(path, tensors, rows if len(rows) == len(counts) else None, metadata)
        self._job = Unfinished(request, resume=False, overwrite=True, again=_AGAIN)

    @property
    def only_lists(self) -> bool:
        return all(each.is_list for each in self._batches)

    def run(self) -> None:
        since = 0
        try:
            while (behind := self._behind()) is not None:
                batch = batch_for(behind.tensor, behind.peek())
                self._job.add({behind.name: batch})
                behind.took()
                since += batch.rows * behind.tensor.row_bytes
                del batch
                if since >= SYNC_BYTES:
                    self._sync()
                    since = 0
            self._sync()
            self._job.finish()
        finally:
            for each in self._batches:
                each.go_back()
            self._job.go_back()

    def _behind(self) -> _Batches | None:
        """The tensor with the fewest rows: iterators that share a source advance together."""
        left = [each for each in self._batches if each.peek() is not None]
        return min(left, key=lambda each: self._job.rows[each.name], default=None)

    def _sync(self) -> None:
        self._job.sync()
        for each in self._batches:
            each.let_go()

    def close(self) -> None:
        self._job.close()

    def is_for(self, given: Mapping[str, Any], metadata: Mapping[str, str] | None) -> bool:
        same = given.keys() == self._given.keys() and all(given[name] is self._given[name] for name in given)
        return same and metadata == self._metadata


_INTERRUPTED: dict[Path, _Saving] = {}  # their rows may be nowhere else any more


def save_file(tensors: Mapping[str, Any], path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write each tensor's batches one after another; the bytes are those of `save_file` around `torch.cat`.

    A tensor is a list or an iterator of batches, or one array. A file that is there is replaced at the end. Lists
    are emptied as their batches reach the disk. If the disk is full half-way, make room and call it again with the
    same lists: it goes on.
    """
    target = Path(path).absolute()
    saving = _INTERRUPTED.pop(target, None)
    if saving is None or not saving.is_for(tensors, metadata):
        if saving is not None:
            saving.close()
        saving = _Saving(tensors, target, metadata)
    try:
        saving.run()
    except BaseException as error:
        if isinstance(error, SinkFailed) or saving.only_lists:  # an iterator that raised has come to its end
            _INTERRUPTED[target] = saving
        else:
            saving.close()
        raise
