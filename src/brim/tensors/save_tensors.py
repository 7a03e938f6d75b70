"""save_file, in place of the one of safetensors around `torch.cat`: batches are written and not joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from brim.errors import InputError, SinkFailed
from brim.tensors.arrangement import Request
from brim.tensors.tensor_batches import as_batch, batch_for
from brim.tensors.tensor_spec import Tensor
from brim.tensors.unfinished import Unfinished

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
