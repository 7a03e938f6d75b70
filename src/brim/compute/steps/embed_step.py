"""The step of `brim embed`: it computes the vectors of the rows of a window.

The rows of a window are sorted by the length of their texts and cut into batches of `batch_size`; while one is in the
model, a thread prepares the next. If the device is out of memory, the batch is computed in halves, and the next batch
starts with its full size again: batches, and so the vectors, do not depend on earlier batches or other workers.

The model's output is checked, normalized and converted to Arrow types.
"""

from __future__ import annotations

import errno
import functools
import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.compute.steps.embedding_models import Model, VectorType, load_model, model_facts, need
from brim.compute.steps.step import BadBatch, BadRow, RowBatch
from brim.errors import BrimError, InputError, MemoryLimitError
from brim.memory.limit import usable_cores
from brim.options.compute_options import ModelOptions, VectorOptions
from brim.records import dataclass
from brim.storage.listing import read_file
from brim.storage.location import Access, is_object_address, split_address

TEXT_WINDOW = 32
IMAGE_WINDOW = 4


@dataclass(frozen=True, kw_only=True)
class EmbedStepOptions(VectorOptions):
    """Which columns are embedded, and how rows become batches.

    A window of `window` batches is processed together. Its rows are sorted by the length of their texts, so that little
    of a batch is padding; rows with images are not sorted, and their window is small, because it is kept in memory.
    Relative paths of images start at `image_root`: a folder, or a prefix of a bucket that `image_access` reaches.
    `keep_bfloat16` returns such vectors as their bits in uint16, for a file that has the type; otherwise they become
    float32, which changes no value.
    """

    model: str = field(kw_only=False)
    window: int | None = None
    keep_bfloat16: bool = False
    image_root: str | None = None
    image_access: Access = field(default_factory=Access)
    loading: ModelOptions = field(default_factory=ModelOptions)

    @property
    def batches(self) -> int:
        """The number of batches per window."""
        return self.window or (TEXT_WINDOW if self.image is None else IMAGE_WINDOW)

    @property
    def window_rows(self) -> int:
        return self.batch_size * self.batches

    @property
    def facts(self) -> dict[str, Any]:
        """The fingerprint inputs, under the keys that ledgers have."""
        return {
            "text column": self.column,
            "image column": self.image,
            "kept columns": list(self.keep_columns),
            "batch size": self.batch_size,
            "batches in a window": self.batches,
            "normalize": self.normalize,
            "nan": self.nan,
            "empty": self.empty,
            "bfloat16 as bits": self.keep_bfloat16,
            "names": [list(pair) for pair in (self.name or {}).items()],
            **self.loading.fingerprint_inputs(),
        }


Array = np.ndarray[Any, Any]

VECTOR = b"brim.vector"  # key in the metadata of a vector field; the value is the type
_SMALLEST_NORM = 1e-12  # as torch has it
_ARROW = {"float32": pa.float32(), "float16": pa.float16(), "bfloat16": pa.uint16()}
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def plain_vectors(
    name: str, value: Any, rows: int, *, normalize: bool, keep_bfloat16: bool
) -> tuple[Array, VectorType]:
    """Convert a model's output to an array and its type. bfloat16 becomes float32, or uint16 with `keep_bfloat16`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        _check_shape(name, tuple(value.shape), rows)
        value = value.detach()
        if normalize:
            value = torch.nn.functional.normalize(value, p=2, dim=1)
            normalize = False
        value = value.cpu().contiguous()
        if value.dtype == torch.bfloat16:
            if keep_bfloat16:
                return value.view(torch.int16).numpy().view(np.uint16), VectorType(value.shape[1], "bfloat16")
            value = value.float()
        value = value.numpy()
    array = np.asarray(value)
    _check_shape(name, array.shape, rows)
    if array.dtype.kind not in "fiu":
        raise InputError(f"The vectors {name!r} are of type {array.dtype}.", hint="Give back an array of floats.")
    if array.dtype not in (np.float16, np.float32):
        array = array.astype(np.float32)
    if normalize:
        norms = np.linalg.norm(array.astype(np.float32), axis=1, keepdims=True)
        array = (array / np.maximum(norms, _SMALLEST_NORM)).astype(array.dtype)
    return array, VectorType(array.shape[1], array.dtype.name)


def bad_rows(array: Array, dtype: str) -> list[int]:
    """Return the rows with NaN or infinite values."""
    good = (array & 0x7F80) != 0x7F80 if dtype == "bfloat16" else np.isfinite(array)
    return [] if good.all() else np.flatnonzero(~good.all(axis=1)).tolist()


def vector_field(name: str, output: VectorType) -> Any:
    kind = pa.list_(_ARROW[output.dtype], output.dim)
    return pa.field(name, kind, nullable=False, metadata={VECTOR: output.dtype.encode()})


def vector_column(array: Array, output: VectorType) -> Any:
    values = pa.array(array.reshape(-1), _ARROW[output.dtype])
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(_ARROW[output.dtype], output.dim))


def stored(output: VectorType, *, keep_bfloat16: bool) -> VectorType:
    """Return the type of vectors in tables."""
    widen = output.dtype not in _ARROW or (output.dtype == "bfloat16" and not keep_bfloat16)
    return VectorType(output.dim, "float32") if widen else output


def vectors_in(schema: Any) -> Mapping[str, VectorType]:
    """Return the columns of a table that contain vectors."""
    return {
        field.name: VectorType(field.type.list_size, field.metadata[VECTOR].decode())
        for field in schema
        if field.metadata and VECTOR in field.metadata
    }


def _check_shape(name: str, shape: tuple[int, ...], rows: int) -> None:
    if len(shape) != 2 or shape[0] != rows or shape[1] < 1:
        raise InputError(
            f"The model gave {name!r} in the shape {shape} for {rows} rows.", hint=f"It has to be ({rows}, dimensions)."
        )


def check_image_type(name: str, kind: Any) -> None:
    if pa.types.is_struct(kind) and {field.name for field in kind} & {"bytes", "path"}:
        return
    if any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
        return
    if any(test(kind) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)):
        return
    raise InputError(
        f"The column {name!r} holds {kind}, and not images.",
        hint="Images are struct<bytes, path>, the bytes of their files, or paths.",
    )


def in_bucket(cell: Any, root: str | None) -> str | None:
    """Return the address of an image in a bucket whose bytes are not in the row, else None."""
    content, path = _content(cell)
    if content is not None or not path:
        return None
    if is_object_address(path):
        return path
    return f"{root}/{path}" if root is not None and is_object_address(root) else None


def fetch_image(cell: Any, root: str | None, access: Access) -> Any:
    """Download the image of a cell if it is in a bucket; return other cells unchanged."""
    address = in_bucket(cell, root)
    if address is None:
        return cell
    location = split_address(address, access)
    content = read_file(location)
    # A missing object becomes an error of its row in `decoded`.
    return cell if content is None else {"bytes": content, "path": location.prefix}


def decoded(cell: Any, root: str | None) -> Any:
    """Decode an image to RGB and apply its orientation; raise InputError if that fails."""
    pillow = need("PIL.Image")
    from PIL import ImageOps

    content, path = _content(cell)
    if content is None and path is None:
        raise InputError("The image is null.", hint="Leave such rows out of the source.")
    if in_bucket(cell, root):
        raise InputError(f"The image {path!r} is not in the bucket.", hint="Put it there, or use --on-error=skip.")
    if content is None and not path:
        raise InputError("The path of the image is empty.", hint="Leave such rows out of the source.")
    source = io.BytesIO(content) if content is not None else Path(root or "", path or "")
    try:
        with pillow.open(source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, TypeError, pillow.DecompressionBombError) as error:
        # Messages may be published with the failed rows: they name no folder of this machine.
        shown = (Path(path).name if Path(path).is_absolute() else path) if path else ""
        fault = f"The image {shown!r} cannot be decoded" if shown else "The image cannot be decoded"
        hint = "Leave it out of the source, or use --on-error=skip."
        if isinstance(error, OSError):
            why = "it is damaged, or no image" if error.errno is None else error.strerror
            if error.errno == errno.ENOENT and path and not Path(path).is_absolute():
                hint = f"Relative paths begin at the folder of the source. {hint}"
        else:
            why = str(error)
        raise InputError(f"{fault}: {why}.", hint=hint) from error


def _content(cell: Any) -> tuple[bytes | None, str | None]:
    if cell is None or isinstance(cell, bytes):
        return cell, None
    if isinstance(cell, str):
        return None, cell
    return cell.get("bytes"), cell.get("path")


_FACTS_VERSION = 1
_FETCHES = 16


@dataclass(slots=True)
class _Running:
    """The open resources of a worker."""

    model: Model
    preparer: ThreadPoolExecutor
    decoders: ThreadPoolExecutor | None
    fetchers: ThreadPoolExecutor
    outputs: dict[str, VectorType] = field(default_factory=dict)


class _RowLeftOut(Exception):
    """A row of the batch failed: the batch must be computed without it."""


class _Window:
    """The rows of a window, and the errors of those that failed.

    `stops`: raise at the first failed row.
    """

    def __init__(self, texts: list[str] | None, images: Any, *, stops: bool) -> None:
        self.texts, self.images, self._stops = texts, images, stops
        self.bad: dict[int, BaseException] = {}

    def mark(self, row: int, error: BaseException) -> None:
        if self._stops:
            raise BadRow(row, 1) from error
        self.bad[row] = error

    def good(self, rows: Array) -> Array:
        return rows[[row not in self.bad for row in rows.tolist()]] if self.bad else rows


class EmbedStep:
    """See `brim.compute.steps.step.Step`."""

    batch_bytes = 0
    indices = False
    keeps_partial_units = True  # a unit may take an hour
    splittable = False  # parts of a window would be sorted into other batches, and floats would differ

    @property
    def wants_gpu(self) -> bool:
        """Whether to use a GPU if one is available."""
        return self.options.loading.device in ("auto", "cuda")

    def __init__(self, options: EmbedStepOptions) -> None:
        self.options = options
        self.batch_rows: int | None = options.window_rows
        names = [name for name in (options.column, options.image, *options.keep_columns) if name is not None]
        self.columns: tuple[str, ...] | None = tuple(dict.fromkeys(names))
        self._running: _Running | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["options"])  # type: ignore[misc]

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "step": "embed",
            "version": _FACTS_VERSION,
            **model_facts(self.options.model),
            **self.options.facts,
        }

    def check(self, schema: pa.Schema) -> None:
        """Check that the source has the columns in the right types; needs no model."""
        for name in self.columns or ():
            if name not in schema.names:
                raise InputError(
                    f"The source has no column {name!r}.", hint=f"It has {', '.join(schema.names)}.", column=name
                )
        if self.options.column is not None and not _is_text(kind := schema.field(self.options.column).type):
            raise InputError(f"The column {self.options.column!r} holds {kind}, and not texts.", hint="Choose another.")
        if self.options.image is not None:
            check_image_type(self.options.image, schema.field(self.options.image).type)

    def open(self, schema: pa.Schema) -> None:
        self.check(schema)
        if self._running is not None:
            return
        options = self.options
        model = load_model(
            options.model, options.loading, text=options.column is not None, image=options.image is not None
        )
        decoders = None if options.image is None else ThreadPoolExecutor(usable_cores(), "brim-decode")
        fetchers = ThreadPoolExecutor(_FETCHES, "brim-fetch")  # they wait for a bucket: more than there are cores
        self._running = _Running(model, ThreadPoolExecutor(1, "brim-prepare"), decoders, fetchers)
        for name, output in (model.outputs or {}).items():
            self._check_output(name, stored(output, keep_bfloat16=options.keep_bfloat16))

    def output_schema(self, schema: pa.Schema) -> pa.Schema | None:
        """Return the schema of the output; None before the first batch has determined the model's outputs."""
        if self._running is None or not self._running.outputs:
            return None
        names = self._output_names(self._running.outputs)
        fields = [schema.field(name) for name in self.options.keep_columns]
        return pa.schema(fields + [vector_field(names[old], output) for old, output in self._running.outputs.items()])

    def apply(self, batch: RowBatch, small: bool) -> Iterator[pa.Table]:
        """Yield the rows of a window with their vectors; without failed rows if these are skipped.

        Every batch is planned from all rows of the window. Its failed rows are found first, and the others are
        computed as one batch, so the vectors depend only on which rows fail.
        """
        table, running = batch.table, self._open()
        window = _Window(
            None if self.options.column is None else self._texts(table[self.options.column]),
            None if self.options.image is None else table[self.options.image],
            stops=batch.leave_out is None,
        )
        self._mark_empty(table, window)
        results: dict[str, Array] = {}
        finished = 0
        for batch_rows, prepared in self._prepared(window, table.num_rows, small):
            rows, vectors_by_name = self._embed(batch_rows, prepared, window)
            for name, vectors in vectors_by_name.items():
                if name not in results:
                    kind = running.outputs[name]
                    results[name] = np.empty((table.num_rows, kind.dim), _NUMPY[kind.dtype])
                results[name][rows] = vectors
            finished += len(batch_rows)
            batch.advance(finished)
        self._mark_nan(results, window)
        for row in sorted(window.bad):
            assert batch.leave_out is not None
            batch.leave_out(row, window.bad[row])
        if len(window.bad) < table.num_rows:
            if window.bad:
                good = np.array([row not in window.bad for row in range(table.num_rows)])
                table = table.select(list(dict.fromkeys(self.options.keep_columns))).filter(pa.array(good))
                results = {name: array[good] for name, array in results.items()}
            yield self._table(table, results)

    def smaller(self, rows: int) -> str:
        return f"Or try --batch-size={max(self.options.batch_size // 2, 1)}, or a smaller --dtype."

    def close(self) -> None:
        if self._running is not None:
            self._running.preparer.shutdown(cancel_futures=True)
            if self._running.decoders is not None:
                self._running.decoders.shutdown(cancel_futures=True)
            self._running.fetchers.shutdown(cancel_futures=True)
            self._running.model.close()
            self._running = None

    def _open(self) -> _Running:
        assert self._running is not None, "open() comes first"
        return self._running

    def _texts(self, column: Any) -> list[str]:
        """Return the texts, with null as empty text; `_mark_empty` decides whether these are errors."""
        return pc.fill_null(column.cast(pa.large_string()), "").to_pylist()  # type: ignore[no-any-return]

    def _mark_empty(self, table: pa.Table, window: _Window) -> None:
        if self.options.column is None or self.options.empty != "error":
            return
        column = table[self.options.column].cast(pa.large_string())
        for row in np.flatnonzero(pc.fill_null(pc.equal(pc.utf8_length(column), 0), True).to_numpy()).tolist():
            state = "empty" if column[row].is_valid else "null"
            hint = "Leave such rows out of the source, or embed them as empty texts with --empty=keep."
            window.mark(row, InputError(f"The text in {self.options.column!r} is {state}.", hint=hint))

    def _prepared(self, window: _Window, count: int, small: bool) -> Iterator[tuple[Array, Future[Any] | None]]:
        """Yield batches from long to short texts, each prepared while the one before is computed."""
        size, preparer = self.options.batch_size, self._open().preparer
        order = np.arange(count)
        if window.texts is not None and window.images is None:
            order = np.argsort(-preparer.submit(self._lengths, window).result(), kind="stable")
        batches = [order[start : start + size] for start in range(0, count, size)]
        following: Future[Any] | None = None
        try:
            for number, rows in enumerate(batches):
                prepared = following or (None if small else preparer.submit(self._prepare, rows, window))
                following = None
                if not small and number + 1 < len(batches):
                    following = preparer.submit(self._prepare, batches[number + 1], window)
                yield rows, prepared
        finally:
            if following is not None:
                following.cancel()

    def _lengths(self, window: _Window) -> Array:
        """Return the lengths of all texts of a window; 0 for a text whose length cannot be computed."""
        model, texts = self._open().model, window.texts or []
        try:
            return np.asarray(model.lengths(texts))
        except (MemoryError, BrimError):
            raise
        except Exception as error:
            lengths, before = np.zeros(len(texts), np.int64), len(window.bad)
            for row, text in enumerate(texts):
                try:
                    lengths[row] = 0 if row in window.bad else model.lengths([text])[0]
                except (MemoryError, BrimError):
                    raise
                except Exception as fault:  # noqa: BLE001  the user's own code decides what this raises
                    window.mark(row, fault)
            if len(window.bad) == before:
                raise BadBatch(0, len(texts)) from error
            return lengths

    def _prepare(self, rows: Array, window: _Window) -> tuple[Array, Any]:
        """Prepare the model's input; return the good rows and the input."""
        running = self._open()
        rows = window.good(rows)
        images: list[Any] | None = None
        if window.images is not None and len(rows):
            assert running.decoders is not None
            cells: Iterable[Any] = [window.images[row].as_py() for row in rows.tolist()]
            if any(in_bucket(cell, self.options.image_root) for cell in cells):
                options = self.options
                cells = running.fetchers.map(
                    lambda cell: fetch_image(cell, options.image_root, options.image_access), cells
                )
            images = list(running.decoders.map(functools.partial(self._image, window), rows, cells))
            images = [image for row, image in zip(rows.tolist(), images, strict=True) if row not in window.bad]
            rows = window.good(rows)
        if not len(rows):
            return rows, None
        texts = None if window.texts is None else [window.texts[row] for row in rows]
        return rows, running.model.prepare(texts, images)

    def _image(self, window: _Window, row: Any, cell: Any) -> Any:
        try:
            return self._open().model.prepare_image(decoded(cell, self.options.image_root))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  of Pillow, or of the user's own code
            window.mark(int(row), error)
            return None

    def _embed(self, rows: Array, prepared: Future[Any] | None, window: _Window) -> tuple[Array, dict[str, Array]]:
        """Compute a planned batch; return the rows that did not fail, and their vectors."""
        while True:
            try:
                good, ready = self._prepare(rows, window) if prepared is None else prepared.result()
                return good, self._encode(good, ready, window) if len(good) else {}
            except _RowLeftOut:
                pass
            except (BadRow, MemoryError, BrimError):
                raise
            except Exception as error:
                rows = window.good(rows)
                is_any_row_bad = False
                for row, fault in self._failing(rows, window) if len(rows) > 1 else [(int(rows[0]), error)]:
                    window.mark(row, fault)
                    is_any_row_bad = True
                if not is_any_row_bad:
                    raise BadBatch(int(rows.min()), len(rows)) from error
            prepared = None

    def _failing(self, rows: Array, window: _Window) -> Iterator[tuple[int, Exception]]:
        """Find, by halving, the rows of a failed batch on which the model fails alone."""
        middle = (len(rows) + 1) // 2
        for half in (rows[:middle], rows[middle:]):
            try:
                good, ready = self._prepare(half, window)
                if len(good):
                    self._encode(good, ready, window)
            except _RowLeftOut:
                yield from self._failing(half, window) if len(half) > 1 else ()
            except (BadRow, MemoryError, BrimError):
                raise
            except Exception as error:  # noqa: BLE001  the model decides what this raises
                if len(half) == 1:
                    yield int(half[0]), error
                else:
                    yield from self._failing(half, window)

    def _encode(self, rows: Array, prepared: Any, window: _Window) -> dict[str, Array]:
        try:
            output = self._open().model.encode(prepared)
        except Exception as error:  # its class depends on optional libraries
            # torch and CuPy have a class of this name; neither may be installed.
            if not any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
                raise
        else:
            return self._checked(output, len(rows))
        del prepared
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(rows) == 1:
            fault = MemoryLimitError(
                "One row alone does not fit into the memory of the device.",
                hint="Cut it shorter with --max-tokens, or use --device=cpu.",
            )
            window.mark(int(rows[0]), fault)
            raise _RowLeftOut
        middle = (len(rows) + 1) // 2
        halves = [self._encode(*self._prepare(half, window), window) for half in (rows[:middle], rows[middle:])]
        return {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}

    def _checked(self, vectors_by_name: Mapping[str, Any], count: int) -> dict[str, Array]:
        options, arrays = self.options, {}
        for name, value in vectors_by_name.items():
            arrays[name], kind = plain_vectors(
                name, value, count, normalize=options.normalize, keep_bfloat16=options.keep_bfloat16
            )
            self._check_output(name, kind)
        if missing := self._open().outputs.keys() - arrays.keys():
            raise InputError(f"The model gave no {min(missing)!r} this time.", hint="Every batch has the same vectors.")
        return arrays

    def _check_output(self, name: str, output: VectorType) -> None:
        """Record the type of a vector at the first batch, or check that it is the same as before."""
        before = self._open().outputs.setdefault(name, output)
        if before != output:
            raise InputError(
                f"The model gave {name!r} with {output.dim} values of {output.dtype}, and {before.dim} of "
                f"{before.dtype} before.",
                hint="Every batch has the same vectors.",
            )

    def _mark_nan(self, results: Mapping[str, Array], window: _Window) -> None:
        if self.options.nan == "keep":
            return
        for name, array in results.items():
            for row in bad_rows(array, self._open().outputs[name].dtype):
                if row not in window.bad:
                    fault = InputError(
                        f"The vector {name!r} has NaN or infinite values.",
                        hint="Try --dtype=float32, or write it as it is with --nan=keep.",
                    )
                    window.mark(row, fault)

    def _table(self, table: pa.Table, results: Mapping[str, Array]) -> pa.Table:
        outputs = self._open().outputs
        names = self._output_names(outputs)
        fields = [table.schema.field(name) for name in self.options.keep_columns]
        columns = [table[name] for name in self.options.keep_columns]
        for old, array in results.items():
            fields.append(vector_field(names[old], outputs[old]))
            columns.append(vector_column(array, outputs[old]))
        return pa.table(columns, schema=pa.schema(fields))

    def _output_names(self, outputs: Mapping[str, VectorType]) -> dict[str, str]:
        new_names = dict(self.options.name or {})
        if unknown := new_names.keys() - outputs.keys():
            raise InputError(f"The model gives no {min(unknown)!r}.", hint=f"It gives {', '.join(outputs)}.")
        names = {old: new_names.get(old, old) for old in outputs}
        all_names = [*self.options.keep_columns, *names.values()]
        if twice := sorted(name for name in set(all_names) if all_names.count(name) > 1):
            raise InputError(
                f"Two columns of the result are called {twice[0]!r}.",
                hint=f"Give the vectors another name: --name={twice[0]}={twice[0]}_vector.",
            )
        return names


def _is_text(kind: Any) -> bool:
    return any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))
