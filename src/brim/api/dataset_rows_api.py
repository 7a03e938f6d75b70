"""Rows of a `datasets.Dataset` in another order, written out at flat memory.

The names, arguments, rows and order are those of `datasets`, which decides the order itself; what it keeps as a list of
numbers over the old rows is written here as new rows, a few megabytes at a time, and mapped from disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from brim.api.recorded_run import shown
from brim.errors import InputError, SinkFailed
from brim.jobs.caches import cache_home, open_cache, open_dataset
from brim.memory.limit import effective_limit
from brim.progress import Progress
from brim.rows.open_rows import dataset_tables
from brim.sources.datasets_private import fingerprint_of
from brim.state.durable import reason
from brim.steps.row_features import import_datasets

if TYPE_CHECKING:
    from datasets import DatasetDict

_D = TypeVar("_D")  # a Dataset stays a Dataset, a DatasetDict a DatasetDict
_ROWS = "rows.arrow"
CacheDir = str | os.PathLike[str] | None


def flatten_indices(dataset: _D, *, cache_dir: CacheDir = None, progress: Progress | bool | None = None) -> _D:
    """The rows of a Dataset or DatasetDict in their order, as rows of their own, mapped from `cache_dir`."""
    made: _D = _flattened(dataset, "flatten", cache_dir, progress)
    return made


def _flattened(dataset: Any, what: str, cache_dir: CacheDir, progress: Progress | bool | None) -> Any:
    """What is not there yet is written, under one bar for all splits."""
    datasets, watched = import_datasets("brim.flatten_indices"), shown(progress)
    many = isinstance(dataset, datasets.DatasetDict)
    parts = dict(dataset) if many else {"": dataset}
    for one in parts.values():
        if not isinstance(one, datasets.Dataset):
            raise InputError(f"This is a {type(one).__name__}, not a datasets.Dataset.")
    home, told = cache_home(cache_dir), {"what": "rows", "source": "a dataset"}
    paths = {name: open_cache(home, f"rows-{fingerprint_of(one)}", told) / _ROWS for name, one in parts.items()}
    lacking = {path: parts[name] for name, path in paths.items() if not path.exists()}
    if lacking:
        watched.start(what, sum(map(_size, lacking.values())), 0, effective_limit().bytes)
        try:
            for path, one in lacking.items():
                _write(one, path, watched)
        finally:
            watched.finish()
    made = {name: _opened(one, paths[name]) for name, one in parts.items()}
    return datasets.DatasetDict(made) if many else made[""]


def _opened(dataset: Any, path: Path) -> Any:
    schema = dataset.features.arrow_schema
    made = open_dataset([path], schema, fingerprint_of(dataset), info=dataset.info, split=dataset.split)
    form = dataset.format
    return made.with_format(form["type"], form["columns"], form["output_all_columns"], **form["format_kwargs"])


def _size(dataset: Any) -> int:
    """What its rows take, as `datasets` estimates it: those of the table that are not among them count for none."""
    return int(dataset.data.nbytes) * len(dataset) // max(len(dataset.data), 1)


def _write(dataset: Any, path: Path, watched: Progress) -> None:
    """All rows to a file that appears whole or not at all."""
    schema, size, rows = dataset.features.arrow_schema, _size(dataset), 0
    waiting = path.with_name(f"{_ROWS}.{os.getpid()}.part")
    try:
        with open(waiting, "wb") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                for table in dataset_tables(dataset):
                    writer.write_table(table.cast(schema))
                    before, rows = rows, rows + len(table)
                    watched.advance(size * rows // len(dataset) - size * before // len(dataset))
            file.flush()
            os.fsync(file.fileno())
        os.replace(waiting, path)
    except OSError as error:
        raise SinkFailed(
            f"The cache folder {str(path.parent)!r} cannot take the rows: {reason(error)}.",
            hint="Make room, or choose another one with cache_dir=.",
        ) from error
    finally:
        waiting.unlink(missing_ok=True)


def shuffle(
    dataset: _D,
    seed: int | None = None,
    generator: Any = None,
    *,
    cache_dir: CacheDir = None,
    progress: Progress | bool | None = None,
) -> _D:
    """`Dataset.shuffle`, with the rows written out in their new order."""
    given: Any = dataset
    ordered = given.shuffle(seed=seed, generator=generator, keep_in_memory=True)
    made: _D = _flattened(ordered, "shuffle", cache_dir, progress)
    return made


def sort(
    dataset: _D,
    column_names: str | Sequence[str],
    reverse: bool | Sequence[bool] = False,
    null_placement: str = "at_end",
    *,
    cache_dir: CacheDir = None,
    progress: Progress | bool | None = None,
) -> _D:
    """`Dataset.sort`, with the rows written out in their new order. Only the columns to sort by are held."""
    given: Any = dataset
    ordered = given.sort(column_names, reverse=reverse, null_placement=null_placement, keep_in_memory=True)
    made: _D = _flattened(ordered, "sort", cache_dir, progress)
    return made


def concatenate_datasets(
    dsets: Iterable[_D],
    info: Any = None,
    split: Any = None,
    axis: int = 0,
    *,
    cache_dir: CacheDir = None,
    progress: Progress | bool | None = None,
) -> _D:
    """`datasets.concatenate_datasets`, with the rows written out below (or beside) each other."""
    datasets = import_datasets("brim.concatenate_datasets")
    joined = datasets.concatenate_datasets(list(dsets), info=info, split=split, axis=axis)
    made: _D = _flattened(joined, "concatenate", cache_dir, progress)
    return made


def train_test_split(
    dataset: Any,
    test_size: float | int | None = None,
    train_size: float | int | None = None,
    shuffle: bool = True,
    stratify_by_column: str | None = None,
    seed: int | None = None,
    generator: Any = None,
    *,
    cache_dir: CacheDir = None,
    progress: Progress | bool | None = None,
) -> DatasetDict:
    """`Dataset.train_test_split`, with the rows of both sides written out."""
    parts = dataset.train_test_split(
        test_size=test_size,
        train_size=train_size,
        shuffle=shuffle,
        stratify_by_column=stratify_by_column,
        seed=seed,
        generator=generator,
        keep_in_memory=True,
    )
    made: DatasetDict = _flattened(parts, "split", cache_dir, progress)
    return made
