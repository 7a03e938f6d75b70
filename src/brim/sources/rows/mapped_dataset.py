"""A `datasets.Dataset` as rows of the Arrow files that it maps, where it is just that.

Slices, renamed and removed columns are followed into the files. What has an order of its own, lives in memory or was
put together side by side is read through `datasets` and spooled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from brim.errors import InputError
from brim.sources.gather import batches_of
from brim.sources.rows.cut_rows import Layout, of_arrow
from brim.sources.rows.options import RowOptions


def pick_split(dataset: Any, options: RowOptions) -> Any:
    """The dataset itself, or the split of a dict of them."""
    if not isinstance(dataset, dict):
        return dataset
    names = [str(name) for name in dataset]
    listed = f"It has: {', '.join(names)}."
    if options.split is None and len(names) == 1:
        return dataset[names[0]]
    if options.split is None:
        raise InputError("The dict of datasets has several splits.", hint=f"{listed} Name one with split=.")
    if options.split not in names:
        raise InputError(f"The dict of datasets has no split {options.split!r}.", hint=listed)
    return dataset[options.split]


def mapped_layout(dataset: Any) -> tuple[Layout, dict[str, str]] | None:
    """The files that hold the rows in order, and their names of the columns; None if there are no such files."""
    if dataset._indices is not None:
        return None
    lines = getattr(dataset.data, "blocks", [[dataset.data]])
    layout = Layout("arrow", dataset.features.arrow_schema)
    rows, sizes = [], []
    stored: dict[str, str] | None = None
    for line in lines:
        path = getattr(line[0], "path", None) if len(line) == 1 else None
        if path is None or not os.path.exists(path):
            return None
        path = os.path.abspath(path)
        schema, own_rows, own_bytes, _ = of_arrow(path, os.path.basename(path))
        followed = _follow(line[0].replays, schema.names, int(own_rows.sum()))
        if followed is None:
            return None
        start, stop, names = followed
        types = {new: schema.field(old).type for new, old in names.items()}
        wanted = {field.name: field.type for field in layout.schema}
        if types != wanted or (stored is not None and names != stored):
            return None
        stored = names
        found = os.stat(path)
        layout.names.append((path, os.path.basename(path), found.st_size, found.st_mtime_ns))
        layout.starts.append(start)
        layout.file_rows.append(stop - start)
        edges = np.clip(np.concatenate([[0], np.cumsum(own_rows)]), start, stop)
        kept = np.diff(edges)
        rows.append(kept.astype(np.int64))
        sizes.append((own_bytes * kept / np.maximum(own_rows, 1)).astype(np.int64))
    if stored is None:
        return None
    layout.rows, layout.bytes = np.concatenate(rows), np.concatenate(sizes)
    return layout, {field.name: stored[field.name] for field in layout.schema}


def _follow(replays: list[Any], names: list[str], rows: int) -> tuple[int, int, dict[str, str]] | None:
    """The rows and columns of a file that are left after what was done to its table; None for what is not known."""
    start, stop = 0, rows
    columns = {name: name for name in names}
    for action, arguments, options in replays:
        if action == "slice" and not options:
            offset, length = (*arguments, None)[:2] if arguments else (0, None)
            start = min(start + offset, stop)
            stop = stop if length is None else min(start + length, stop)
        elif action == "rename_columns" and len(arguments) == 1 and len(arguments[0]) == len(columns):
            columns = dict(zip(arguments[0], columns.values(), strict=True))
        elif action == "drop" and len(arguments) == 1:
            columns = {new: old for new, old in columns.items() if new not in arguments[0]}
        elif action == "select" and len(arguments) == 1:
            columns = {new: columns[new] for new in arguments[0]}
        elif action != "replace_schema_metadata":
            return None
    return start, stop, columns


def dataset_tables(dataset: Any) -> Iterator[pa.Table]:
    """The rows of a dataset in its order, by way of `datasets`, in small tables."""
    if not hasattr(dataset, "_indices"):  # a stream
        yield from dataset.with_format("arrow").iter(batch_size=100)
        return
    order = dataset._indices
    rows = None if order is None else order.column(0).to_numpy().astype(np.int64)
    if len(dataset):
        yield from batches_of(dataset.data, rows)
