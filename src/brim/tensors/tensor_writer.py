"""TensorWriter: batches go into the final file as they come, and what was written survives a crash."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from brim.choices import at_least
from brim.errors import BrimError, InputError
from brim.sizes import parse_size
from brim.tensors.arrangement import Request
from brim.tensors.tensor_batches import batch_for
from brim.tensors.tensor_spec import Tensor, tensors_from
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
