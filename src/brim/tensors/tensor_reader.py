"""Open tensor files as memory-mapped arrays: one file, or all files of a sharded tensor.

Nothing is loaded until it is read, and the kernel can drop memory that was read. Parquet files cannot be mapped,
because their values are in pages; pyarrow, DuckDB and Polars read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, overload

import numpy as np

from brim.errors import ArgumentError, InputError, SourceError, VerificationError
from brim.extras import missing
from brim.tensors.tensor_files import RAW_BITS, StoredTensor, Tensor, dtype_name, npy_path, read_header, read_spec

Framework = Literal["numpy", "torch"]
Array = np.ndarray[Any, Any]


class ShardedTensor:
    """The rows of a tensor that is stored in several files. `parts` are its arrays, one per file.

    A row, or a slice inside one file, is a view; rows from several files are copied together. Indexing follows NumPy:
    first rows, then a part of each (`rows[12, :4]`). `np.asarray` and `torch.as_tensor` copy everything.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self._starts = self._ends - [len(part) for part in parts]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, and the shape of a row."""
        return (len(self), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> Any:
        """The type of the numbers."""
        return self.parts[0].dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[Any]:
        for part in self.parts:
            yield from part

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, tuple):
            return self._get_tuple(rows)
        if rows is Ellipsis:
            rows = slice(None)
        if isinstance(rows, int | np.integer):
            row = int(rows) + len(self) * (rows < 0)
            if not 0 <= row < len(self):
                raise IndexError(f"row {rows} of {len(self)}")
            number = int(np.searchsorted(self._ends, row, side="right"))
            return self.parts[number][row - int(self._starts[number])]
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._get_range(start, max(start, stop))
            rows = range(start, stop, step)
        return self._get_rows(np.asarray(rows))

    def _get_tuple(self, index: tuple[Any, ...]) -> Any:
        """Return rows, and a part of each: `rows[5, :4]`, `rows[[3, 1], 0]`, `rows[..., -1]`."""
        if not index or index[0] is Ellipsis:
            missing_axes = len(self.shape) - len(index) + 1 if index else 0
            index = (slice(None),) * max(missing_axes, 1) + index[1:]
        rows, *columns = index
        if rows is None:
            raise IndexError("rows in several files get no new axis before them; index them, then add one")
        result = self[rows]
        if isinstance(rows, int | np.integer):
            return result[tuple(columns)] if columns else result
        has_lists = any(not isinstance(column, slice | int | np.integer) for column in columns)
        if has_lists and not isinstance(rows, slice):
            # NumPy pairs a list of rows with a list of columns, each row with its own column.
            return result[(np.arange(len(result)), *columns)]
        return result[(slice(None), *columns)]

    def _get_range(self, start: int, stop: int) -> Any:
        result = []
        for part, first in zip(self.parts, self._starts.tolist(), strict=True):
            if start < first + len(part) and stop > first:
                result.append(part[max(start - first, 0) : stop - first])
        if len(result) <= 1:
            return result[0] if result else self.parts[0][:0]
        return _concatenate(result)

    def _get_rows(self, rows: np.ndarray[Any, Any]) -> Any:
        """Return rows in any order: read them file by file, then reorder them."""
        if rows.dtype == bool:
            if rows.shape != (len(self),):
                raise IndexError(f"a mask of shape {rows.shape} for {len(self)} rows")
            rows = np.flatnonzero(rows)
        if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
            raise IndexError("rows are chosen by a number, a slice, a list of numbers or a mask")
        rows = np.where(rows < 0, rows + len(self), rows).astype(np.int64)
        if len(rows) and not (rows.min() >= 0 and rows.max() < len(self)):
            raise IndexError(f"a row beyond the {len(self)} there are")
        numbers = np.searchsorted(self._ends, rows, side="right")
        positions = [np.flatnonzero(numbers == number) for number in range(len(self.parts))]
        result = [part[rows[own] - first] for part, own, first in zip(self.parts, positions, self._starts, strict=True)]
        return _concatenate(result)[np.argsort(np.concatenate(positions))]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("rows in several files cannot become one array without a copy")
        array = np.concatenate([np.asarray(part) for part in self.parts])
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        """Return all rows as one array, copied, for `torch.as_tensor`."""
        return _concatenate(self.parts).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.parts[0].__dlpack_device__()

    def __repr__(self) -> str:
        return f"<{self.shape} {self.dtype} in {len(self.parts)} files>"


def _concatenate(arrays: Sequence[Any]) -> Any:
    return np.concatenate(arrays) if isinstance(arrays[0], np.ndarray) else import_module("torch").cat(arrays)


@overload
def open_tensors(path: str | Path, framework: Literal["numpy"] = ...) -> dict[str, Array | ShardedTensor]: ...
@overload
def open_tensors(path: str | Path, framework: Literal["torch"]) -> dict[str, Any]: ...  # torch may not be installed
def open_tensors(path: str | Path, framework: Framework = "numpy") -> dict[str, Any]:
    """Open the tensors of a `.safetensors` or `.npy` file by name, memory-mapped and not loaded.

    Types that NumPy does not have (bfloat16) are returned as their raw bits in NumPy, and unchanged in torch. A file
    that was written in shards is opened by the name that it was written under; its tensors are `ShardedTensor`.

    Args:
        path: A .safetensors or .npy file.
        framework: "numpy" or "torch".

    Returns:
        The tensors by name.

    Raises:
        InputError: There is no such file, or it has another format.
        VerificationError: The file is damaged.

    Examples:
        >>> import numpy
        >>> brim.save_file({"v": numpy.zeros((2, 3), "float32")}, "v.safetensors")
        >>> brim.open_tensors("v.safetensors")["v"].shape
        (2, 3)
    """
    path = Path(path)
    if framework not in get_args(Framework):
        raise ArgumentError(f"framework= takes numpy or torch, not {framework!r}.", option="framework")
    if path.suffix == ".parquet":
        raise InputError("A Parquet file is not mapped.", hint="Read it with pyarrow.parquet, DuckDB or Polars.")
    if path.suffix == ".npy":
        files = {path.stem: path}
        if not path.exists():
            several = sorted(path.parent.glob(f"{escape(path.stem)}.*.npy"))
            if not several:
                raise _no_file(path)
            files = {file.stem[len(path.stem) + 1 :]: file for file in several}
        return {name: _map_tensor(_read_npy(file, name), framework) for name, file in files.items() if name}
    headers = [read_header(file) for file in _safetensors_files(path)]
    if any(header.keys() != headers[0].keys() for header in headers):
        raise VerificationError(f"The shards of {path.name} do not hold the same tensors.", path=str(path))
    arrays = {name: [_map_tensor(header[name], framework) for header in headers] for name in headers[0]}
    return {name: parts[0] if len(parts) == 1 else ShardedTensor(parts) for name, parts in arrays.items()}


def finished_spec(path: Path, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the tensors of a finished file and the number of rows of each."""
    if path.suffix == ".parquet":
        columns, count = read_spec(path)
        return columns, dict.fromkeys(columns, count)
    if path.suffix == ".npy":
        paths = {name: npy_path(path, name, len(names) == 1) for name in names}
        headers = [{name: _read_npy(file, name) for name, file in paths.items() if file.exists()}]
    else:
        headers = [read_header(file) for file in _safetensors_files(path)]
    tensors = {name: stored.tensor for name, stored in headers[0].items()}
    return tensors, {name: sum(header[name].rows for header in headers if name in header) for name in tensors}


def index_path(path: Path) -> Path:
    """Return the index of a file that is written in shards."""
    return path.with_name(f"{path.name}.index.json")


def shard_files(path: Path) -> list[str]:
    """Return the names of the index of a sharded file and of its shards; nothing without an index."""
    index = index_path(path)
    if not index.exists():
        return []
    try:
        return [index.name, *(str(Path(shard["file"]).name) for shard in json.loads(index.read_bytes())["shards"])]
    except (ValueError, KeyError, TypeError) as error:
        raise VerificationError(f"{str(index)!r} is not an index of shards.", path=str(index)) from error


def _safetensors_files(path: Path) -> list[Path]:
    files = [path] if path.exists() else [path.with_name(name) for name in shard_files(path)[1:]]
    if not files:
        raise _no_file(path)
    if absent := [file.name for file in files if not file.exists()]:
        raise VerificationError(f"The shard {absent[0]} of {path.name} is missing.", path=str(path))
    return files


def _no_file(path: Path) -> SourceError:
    return SourceError(f"There is no {str(path)!r}.", hint="An unfinished file ends in .partial.", path=str(path))


def _read_npy(path: Path, name: str) -> StoredTensor:
    try:
        array = np.load(path, mmap_mode="r")
        dtype = dtype_name(array.dtype)
        if dtype is None or not isinstance(array, np.memmap) or not array.flags.c_contiguous:
            raise ValueError("it does not hold rows of numbers")
    except (ValueError, EOFError) as error:
        raise VerificationError(f"{str(path)!r} cannot be mapped: {error}.", path=str(path)) from error
    return StoredTensor(path, Tensor(name, array.shape[1:], dtype), array.shape, int(array.offset))


def _map_tensor(stored: StoredTensor, framework: Framework) -> Any:
    """Map a tensor. For torch, which has no read-only arrays, the map is copy-on-write; the file never changes."""
    tensor = stored.tensor
    if stored.size == 0:
        array: Array = np.zeros(stored.shape, tensor.carrier)
    else:
        mode: Literal["r", "c"] = "r" if framework == "numpy" else "c"
        array = np.memmap(stored.path, tensor.carrier, mode, stored.offset, stored.shape)
    if framework == "numpy":
        return array
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise missing("embed", "torch is not installed.", "torch") from error
    values = torch.from_numpy(array)
    return values.view(getattr(torch, tensor.dtype)) if tensor.dtype in RAW_BITS else values
