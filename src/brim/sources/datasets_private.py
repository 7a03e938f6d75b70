"""The one place that touches what `datasets` keeps private; `tests/unit/test_private_names.py` lists the names.

The library does not say by its public names in which order a dataset's rows stand, what identifies them, or which
steps a stream goes through.
"""

from __future__ import annotations

from copy import copy, deepcopy
from typing import Any

import numpy as np
import pyarrow as pa

from brim.file_set import Ints

# The functions behind rename_column(s), remove_columns and add_column: they do not look at values.
_BLIND = frozenset(["_rename_columns_fn", "identity_func", "add_column_fn"])


def is_stream(dataset: Any) -> bool:
    return not hasattr(dataset, "_indices")


def is_reordered(dataset: Any) -> bool:
    """Whether a Dataset's rows are others, or in another order, than those of its table."""
    return dataset._indices is not None


def row_order(dataset: Any) -> Ints | None:
    """The numbers of a Dataset's rows in its table; None: all, as they stand there."""
    order = dataset._indices
    return None if order is None else order.column(0).to_numpy().astype(np.int64)


def fingerprint_of(dataset: Any) -> str:
    return str(dataset._fingerprint)


def with_rows(dataset: Any, numbers: Any) -> Any:
    """The rows of a Dataset that a Dataset of one column names by their numbers, as `filter` gives them."""
    made = copy(dataset)
    table = numbers.data
    if len(numbers) and (order := dataset._indices) is not None:
        from datasets.table import InMemoryTable

        taken = order.column(0).take(table.column(0).combine_chunks())
        table = InMemoryTable(pa.Table.from_arrays([taken], names=table.column_names))
    made._indices, made._info = table, dataset._info.copy()
    made._fingerprint = numbers._fingerprint
    return made


def format_of_stream(stream: Any) -> str | None:
    """The format that a stream gives its rows in."""
    return None if stream._formatting is None else stream._formatting.format_type


def tokens_of(stream: Any) -> Any:
    """The tokens that its files are read with, by repository."""
    return stream._token_per_repo_id


def resolve_features(stream: Any) -> Any:
    """The stream with features told from its first rows if it has none; StopIteration: there is no row."""
    return stream._resolve_features()


def read_undecoded(stream: Any) -> tuple[Any, list[str]]:
    """A stream of Arrow tables, neither decoded nor cast, and the functions for which media are decoded anyhow."""
    plain = stream.decode(False).with_format("arrow")
    seen: list[str] = []
    plain._ex_iterable = _without_decoding(plain._ex_iterable, seen)
    plain._info.features = None  # or every row would be cast alone
    return plain, seen


def _without_decoding(step: Any, seen: list[str]) -> Any:
    """A copy of the steps of a stream that decodes media only where somebody looks; `seen` gets those places."""
    from datasets.features.features import require_decoding

    step = copy(step)
    if hasattr(step, "ex_iterables"):
        step.ex_iterables = [_without_decoding(each, seen) for each in step.ex_iterables]
    if not hasattr(step, "ex_iterable"):
        return step
    step.ex_iterable = _without_decoding(step.ex_iterable, seen)
    function, formatted = getattr(step, "function", None), step.ex_iterable
    if function is None or type(formatted).__name__ != "FormattedExamplesIterable" or not formatted.features:
        return step
    function = getattr(function, "func", function)  # inside of a partial
    if function.__module__ == "datasets.iterable_dataset" and function.__name__ in _BLIND:
        formatted._features = _undecoded(formatted.features)
    elif any(require_decoding(feature) for feature in formatted.features.values()):
        seen.append(str(function))
    return step


def _undecoded(features: Any) -> Any:
    """The same features with decoding turned off, wherever it is in them."""
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
