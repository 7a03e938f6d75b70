"""All uses of private names of `datasets`; `tests/project/test_private_names.py` lists the names.

The library has no public names for the order of a dataset's rows, their fingerprint, and the steps of a stream.
"""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any

import numpy as np
import pyarrow as pa

from brim.file_set import Ints

# The functions of rename_column(s), remove_columns and add_column, which do not read values.
_VALUE_BLIND = frozenset(["_rename_columns_fn", "identity_func", "add_column_fn"])


def is_stream(dataset: Any) -> bool:
    return not hasattr(dataset, "_indices")


def is_reordered(dataset: Any) -> bool:
    """Return whether a Dataset has other rows than its table, or another order."""
    return dataset._indices is not None


def row_order(dataset: Any) -> Ints | None:
    """Return the numbers of a Dataset's rows in its table; None for all of them in order."""
    order = dataset._indices
    return None if order is None else order.column(0).to_numpy().astype(np.int64)


def fingerprint_of(dataset: Any) -> str:
    return str(dataset._fingerprint)


def with_rows(dataset: Any, numbers: Any) -> Any:
    """Return the rows of a Dataset whose numbers are in another Dataset of one column, as `filter` returns them."""
    result = copy(dataset)
    table = numbers.data
    if len(numbers) and (order := dataset._indices) is not None:
        from datasets.table import InMemoryTable

        indices = order.column(0).take(table.column(0).combine_chunks())
        table = InMemoryTable(pa.Table.from_arrays([indices], names=table.column_names))
    result._indices, result._info = table, dataset._info.copy()
    result._fingerprint = numbers._fingerprint
    return result


def format_of_stream(stream: Any) -> str | None:
    """Return the format of the rows of a stream."""
    return None if stream._formatting is None else stream._formatting.format_type


def tokens_of(stream: Any) -> Any:
    """Return the tokens for the files of a stream, by repository."""
    return stream._token_per_repo_id


def resolve_features(stream: Any) -> Any:
    """Return a stream with features, inferred from its first rows if it has none; StopIteration if it has no row."""
    return stream._resolve_features()


def read_undecoded(stream: Any) -> tuple[Any, list[str]]:
    """Return a stream of Arrow tables, not decoded and not cast, and the functions that need decoded media anyway."""
    plain = stream.decode(False).with_format("arrow")
    skipped: list[str] = []
    plain._ex_iterable = _without_decoding(plain._ex_iterable, skipped)
    plain._info.features = None  # or every row would be cast alone
    return plain, skipped


def _without_decoding(step: Any, skipped: list[str]) -> Any:
    """Copy the steps of a stream, with decoding only for functions that read media; `skipped` gets these functions."""
    from datasets.features.features import require_decoding

    step = copy(step)
    if hasattr(step, "ex_iterables"):
        step.ex_iterables = [_without_decoding(each, skipped) for each in step.ex_iterables]
    if not hasattr(step, "ex_iterable"):
        return step
    step.ex_iterable = _without_decoding(step.ex_iterable, skipped)
    function, formatted = getattr(step, "function", None), step.ex_iterable
    if function is None or type(formatted).__name__ != "FormattedExamplesIterable" or not formatted.features:
        return step
    function = getattr(function, "func", function)  # inside of a partial
    if function.__module__ == "datasets.iterable_dataset" and function.__name__ in _VALUE_BLIND:
        formatted._features = _undecoded(formatted.features)
    elif any(require_decoding(feature) for feature in formatted.features.values()):
        skipped.append(str(function))
    return step


def _undecoded(features: Any) -> Any:
    """Return the features with decoding turned off at any depth."""
    plain = deepcopy(features)
    waiting = list(plain.values())
    while waiting:
        feature = waiting.pop()
        if hasattr(feature, "decode"):
            feature.decode = False
        if isinstance(feature, dict):
            waiting += feature.values()
        elif isinstance(feature, list | tuple):
            waiting += feature
        elif hasattr(feature, "feature"):
            waiting.append(feature.feature)
    return plain
