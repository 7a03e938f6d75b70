"""Tensors read where they lie: memory-mapped arrays of a file, or of all the files of a sharded one.

Nothing is loaded until it is looked at, and what was looked at can be taken back by the kernel. Parquet is not
read here: its values lie in pages, and pyarrow, DuckDB and Polars read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, overload

import numpy as np

from brim.choices import one_of
from brim.errors import DamageFound, InputError, SourceError
from brim.extras import missing
from brim.tensors.arrangement import index_path
from brim.tensors.tensor_files import RAW_BITS, Tensor, TensorPlace, dtype_name, npy_path, read_header, read_spec

Framework = Literal["numpy", "torch"]
Array = np.ndarray[Any, Any]


class ShardedRows:
    """The rows of a tensor that lies in several files. `parts` are its arrays, one a file.

    A row or a slice inside of one file is a view; what crosses files is copied together. Indexing follows NumPy: rows
    first, then what is taken of them (`rows[12, :4]`). `np.asarray` and `torch.as_tensor` copy everything.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> Any:
        return self.parts[0].dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[Any]:
        for part in self.parts:
            yield from part

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, tuple):
            return self._take(rows)
        if rows is Ellipsis:
            rows = slice(None)
        if isinstance(rows, int | np.integer):
            row = int(rows) + len(self) * (rows < 0)
            if not 0 <= row < len(self):
                raise IndexError(f"row {rows} of {len(self)}")
            part = int(np.searchsorted(self._ends, row, side="right"))
            return self.parts[part][row - self._start(part)]
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._range(start, max(start, stop))
            rows = range(start, stop, step)
        return self._gather(np.asarray(rows))

    def _take(self, index: tuple[Any, ...]) -> Any:
        """Rows, and a part of each: `rows[5, :4]`, `rows[[3, 1], 0]`, `rows[..., -1]`."""
        if not index or index[0] is Ellipsis:
            missing_axes = len(self.shape) - len(index) + 1 if index else 0
            index = (slice(None),) * max(missing_axes, 1) + index[1:]
        rows, *rest = index
        if rows is None:
            raise IndexError("rows in several files get no new axis before them; index them, then add one")
        found = self[rows]
        if isinstance(rows, int | np.integer):
            return found[tuple(rest)] if rest else found
        lists = not isinstance(rows, slice) and any(not isinstance(each, slice | int | np.integer) for each in rest)
        if lists:  # NumPy pairs lists of rows with lists of columns, each row with its own
            return found[(np.arange(len(found)), *rest)]
        return found[(slice(None), *rest)]

    def _gather(self, rows: np.ndarray[Any, Any]) -> Any:
        """Rows in any order: file by file, and then put in order."""
        if rows.dtype == bool:
            if rows.shape != (len(self),):
                raise IndexError(f"a mask of shape {rows.shape} for {len(self)} rows")
            rows = np.flatnonzero(rows)
        if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
            raise IndexError("rows are chosen by a number, a slice, a list of numbers or a mask")
        wanted = np.where(rows < 0, rows + len(self), rows).astype(np.int64)
        if len(wanted) and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"a row beyond the {len(self)} there are")
        owners = np.searchsorted(self._ends, wanted, side="right")
        places = [np.flatnonzero(owners == part) for part in range(len(self.parts))]
        pieces = [self.parts[part][wanted[at] - self._start(part)] for part, at in enumerate(places)]
        return _joined(pieces)[np.argsort(np.concatenate(places))]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("rows in several files become one array by a copy")
        whole = np.concatenate([np.asarray(part) for part in self.parts])
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """All rows as one array, copied: what `torch.as_tensor` asks for."""
        return _joined(self.parts).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.parts[0].__dlpack_device__()

    def _start(self, part: int) -> int:
        return int(self._ends[part - 1]) if part else 0

    def _range(self, start: int, stop: int) -> Any:
        pieces = []
        for number, part in enumerate(self.parts):
            begin = self._start(number)
            if start < begin + len(part) and stop > begin:
                pieces.append(part[max(start - begin, 0) : stop - begin])
        if len(pieces) <= 1:
            return pieces[0] if pieces else self.parts[0][:0]
        return _joined(pieces)

    def __repr__(self) -> str:
        return f"<{self.shape} {self.dtype} in {len(self.parts)} files>"


@overload
def open_tensors(path: str | Path, framework: Literal["numpy"] = ...) -> dict[str, Array | ShardedRows]: ...
@overload
def open_tensors(path: str | Path, framework: Literal["torch"]) -> dict[str, Any]: ...  # torch may not be there to name
def open_tensors(path: str | Path, framework: Framework = "numpy") -> dict[str, Any]:
    """The tensors of a `.safetensors` or `.npy` file by name, mapped and not loaded.

    Types that NumPy lacks (bfloat16) are their raw bits in NumPy, and themselves in torch. A file that was written
    in shards is opened by the name that it was written under; its tensors are `ShardedRows`.
    """
    path = Path(path)
    one_of("framework", framework, get_args(Framework))
    if path.suffix == ".npy":
        return {name: _view(found, framework) for name, found in _npy_files(path).items()}
    if path.suffix == ".parquet":
        raise InputError("A Parquet file is not mapped.", hint="Read it with pyarrow.parquet, DuckDB or Polars.")
    headers = [read_header(file) for file in _safetensors_files(path)]
    if any(header.keys() != headers[0].keys() for header in headers):
        raise DamageFound(f"The shards of {path.name} do not hold the same tensors.", path=str(path))
    views = {name: [_view(header[name], framework) for header in headers] for name in headers[0]}
    return {name: each[0] if len(each) == 1 else ShardedRows(each) for name, each in views.items()}


def finished_spec(path: Path, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The tensors that a finished file holds, and how many rows each has."""
    if path.suffix == ".parquet":
        columns, count = read_spec(path)
        return columns, dict.fromkeys(columns, count)
    if path.suffix == ".npy":
        paths = {name: npy_path(path, name, len(names) == 1) for name in names}
        headers = [{name: _npy_file(file, name) for name, file in paths.items() if file.exists()}]
    else:
        headers = [read_header(file) for file in _safetensors_files(path)]
    tensors = {name: found.tensor for name, found in headers[0].items()}
    return tensors, {name: sum(header[name].rows for header in headers if name in header) for name in tensors}


def shard_files(path: Path) -> list[str]:
    """The index of a sharded file and what it lists, by name; nothing if there is none."""
    index = index_path(path)
    if not index.exists():
        return []
    try:
        return [index.name, *(str(Path(shard["file"]).name) for shard in json.loads(index.read_bytes())["shards"])]
    except (ValueError, KeyError, TypeError) as error:
        raise DamageFound(f"{str(index)!r} is not an index of shards.", path=str(index)) from error


def _safetensors_files(path: Path) -> list[Path]:
    files = [path] if path.exists() else [path.with_name(name) for name in shard_files(path)[1:]]
    if not files:
        raise SourceError(f"There is no {str(path)!r}.", hint="An unfinished file ends in .partial.", path=str(path))
    if gone := [file.name for file in files if not file.exists()]:
        raise DamageFound(f"The shard {gone[0]} of {path.name} is missing.", path=str(path))
    return files


def _npy_files(path: Path) -> dict[str, TensorPlace]:
    if path.exists():
        return {path.stem: _npy_file(path, path.stem)}
    files = sorted(path.parent.glob(f"{escape(path.stem)}.*.npy"))
    if not files:
        raise SourceError(f"There is no {str(path)!r}.", hint="An unfinished file ends in .partial.", path=str(path))
    return {name: _npy_file(file, name) for file in files if (name := file.stem[len(path.stem) + 1 :])}


def _npy_file(path: Path, name: str) -> TensorPlace:
    try:
        array = np.load(path, mmap_mode="r")
        dtype = dtype_name(array.dtype)
        if dtype is None or not isinstance(array, np.memmap) or not array.flags.c_contiguous:
            raise ValueError("it does not hold rows of numbers")
    except (ValueError, EOFError) as error:
        raise DamageFound(f"{str(path)!r} cannot be mapped: {error}.", path=str(path)) from error
    return TensorPlace(path, Tensor(name, array.shape[1:], dtype), array.shape, int(array.offset))


def _view(found: TensorPlace, framework: Framework) -> Any:
    """Copy on write for torch, which has no arrays that are only read; the file itself is never changed."""
    if found.size == 0:
        array: np.ndarray[Any, Any] = np.zeros(found.shape, found.tensor.carrier)
    else:
        mode: Literal["r", "c"] = "r" if framework == "numpy" else "c"
        array = np.memmap(found.path, found.tensor.carrier, mode, found.offset, found.shape)
    return array if framework == "numpy" else _as_torch(array, found.tensor.dtype)


def _as_torch(array: np.ndarray[Any, Any], dtype: str) -> Any:
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise missing("embed", "torch is not installed.", "torch") from error
    made = torch.from_numpy(array)
    return made.view(getattr(torch, dtype)) if dtype in RAW_BITS else made


def _joined(pieces: Sequence[Any]) -> Any:
    return np.concatenate(pieces) if isinstance(pieces[0], np.ndarray) else import_module("torch").cat(pieces)
