"""A stream of `datasets` (an IterableDataset), written to disk as it comes and read from there.

Media are not decoded on the way: bytes and paths stay as they are, compressed scans stay compressed. Where a
function of the user's has to see them decoded, `datasets` encodes what comes out of it anew; that is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import pyarrow as pa

from brim.errors import SourceError
from brim.sources.spill import Spill, gathered

# The functions behind rename_column(s), remove_columns and add_column: they do not look at values.
_BLIND = frozenset(["_rename_columns_fn", "identity_func", "add_column_fn"])
_CAST_BYTES, _CAST_ROWS = 1_000_000, 1000


class _DoesNotFit(Exception):
    """Values cannot be cast to what the features say. Never leaves this module."""


def read_stream(stream: Any, split: str, spill: Spill) -> tuple[pa.Table, Any]:
    """The rows as a table that is mapped from disk, and its features."""
    from datasets.table import CastError

    try:
        stream = _with_features(stream, split)
        features = stream.features
        spill.tell(f"the stream of the split {split!r}")
        plain = stream.decode(False).with_format("arrow")
        seen: list[str] = []
        plain._ex_iterable = _without_decoding(plain._ex_iterable, seen)
        if seen:
            spill.note(
                f"the split {split!r} decodes media before a map or filter and encodes them anew after it; "
                "cast_column(NAME, Type(decode=False)) before it, and back after it, keeps their bytes"
            )
        plain._info.features = None  # or every row would be cast alone
        tables = _cast(plain.iter(batch_size=1), features)  # one row may be huge
        return spill.rows(features.arrow_schema.remove_metadata(), tables), features
    except (CastError, _DoesNotFit, pa.ArrowException) as error:
        raise SourceError(
            f"The rows of the split {split!r} do not fit its features: {' '.join(str(error).split())}.",
            hint="Give the dataset features that hold for every row.",
        ) from error


def _cast(tables: Iterable[pa.Table], features: Any) -> Iterator[pa.Table]:
    """Tables of one row as the features say, several at a time where their own types agree."""
    from datasets.table import cast_table_to_features

    for table in gathered(tables, _CAST_BYTES, _CAST_ROWS):
        for name in features:
            if name not in table.column_names:
                table = table.append_column(name, pa.nulls(len(table)))
        try:
            table = cast_table_to_features(table, features)
        except TypeError as error:  # a text where the first rows had nothing
            raise _DoesNotFit(str(error)) from error
        yield table.replace_schema_metadata(None)


def _with_features(stream: Any, split: str) -> Any:
    """The stream with its features, which `datasets` tells from the first rows if it has none."""
    try:
        stream = stream._resolve_features()
    except StopIteration:  # there is no first row
        pass
    if not stream.features:
        raise SourceError(
            f"The split {split!r} has no rows to tell its columns from.", hint="Give the dataset its features."
        )
    return stream


def _without_decoding(step: Any, seen: list[str]) -> Any:
    """A copy of the steps of a stream that decodes media only where somebody looks; `seen` gets those places."""
    from datasets.features.features import require_decoding
    from datasets.iterable_dataset import _features_with_decoding

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
        formatted._features = _features_with_decoding(formatted.features, False)
    elif any(require_decoding(feature) for feature in formatted.features.values()):
        seen.append(str(function))
    return step
