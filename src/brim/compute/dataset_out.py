"""The files that a job made, as a `datasets.Dataset` that reads them where they are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.compute.features import as_schema, features_of, import_datasets
from brim.errors import DamageFound


def open_dataset(
    files: Sequence[Path],
    schema: Any,
    fingerprint: str | None = None,
    *,
    info: Any = None,
    split: Any = None,
) -> Any:
    """A Dataset over Arrow stream files, in order, mapped from disk: nothing is held but where batches are.

    `schema` is a pa.Schema with features in its metadata, a datasets.Features, or its dict; the files have its
    types. Files without rows are left out. `info` and `split` are those of the dataset that was mapped.
    """
    datasets = import_datasets("reading the result as a Dataset")
    from datasets.table import ConcatenationTable, InMemoryTable, MemoryMappedTable

    schema = as_schema(schema)
    features = datasets.Features.from_dict(features_of(schema))
    blocks = []
    for path in files:
        try:
            block = MemoryMappedTable.from_file(os.fspath(path))
        except (pa.ArrowInvalid, OSError) as error:
            raise DamageFound(f"{path} cannot be read: {error}.", hint="Remove it and run again.") from error
        if block.num_rows:
            blocks.append(block)
    if not blocks:
        table: Any = InMemoryTable(features.arrow_schema.empty_table())
    elif len(blocks) == 1:
        table = blocks[0]
    else:
        table = ConcatenationTable(pa.concat_tables([block.table for block in blocks]), [[one] for one in blocks])
    made = info.copy() if info is not None else datasets.DatasetInfo()
    made.features = features
    name = hashlib.sha256(fingerprint.encode()).hexdigest()[:16] if fingerprint else None
    return datasets.Dataset(table, info=made, split=split, fingerprint=name)
