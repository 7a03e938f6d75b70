"""The end of a computed job: what its units become at the destination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa

from brim.choices import at_least, one_of
from brim.compute.content import named
from brim.compute.features import features_of, metadata
from brim.compute.made import Made, cut_shards, make_shards, settle
from brim.compute.outfile import EXTENSIONS
from brim.compute.setup import Writing
from brim.engine.ledger import Receipt
from brim.errors import InputError
from brim.formats.card import CardFacts
from brim.progress import Advance
from brim.sources.features import as_yaml

RowFormat = Literal["parquet", "arrow"]
_BATCH_ROWS = {"arrow": 1000, "parquet": 100_000}


@dataclass(frozen=True, slots=True)
class Finished:
    """Shards by name, what the card says of them, and what was counted on the way."""

    made: Mapping[str, Made]
    card: CardFacts
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Units:
    """What there is to finish: the unit files of `folder` in order, and the room there is."""

    folder: Path
    receipts: Sequence[Receipt]
    limit_bytes: int
    schema: pa.Schema  # of the source


class Finisher(Protocol):
    """How units are written, and what is made of them."""

    @property
    def writing(self) -> Writing: ...

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the output, for the fingerprint."""

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        """The shards, to lie in the folder `shards` of the destination. Done again from the start after a crash."""


@dataclass(frozen=True, slots=True)
class RowsFinisher:
    """Rows as they are: Parquet or Arrow shards."""

    format: RowFormat = "parquet"
    rows_per_shard: int | None = None
    split: str = "train"
    writer_batch_rows: int | None = None

    def __post_init__(self) -> None:
        one_of("format", self.format, EXTENSIONS)
        at_least("rows-per-shard", self.rows_per_shard, 1)

    @property
    def _shards(self) -> Writing:
        return Writing(self.format, self.writer_batch_rows or _BATCH_ROWS[self.format])

    @property
    def writing(self) -> Writing:
        return self._shards if self.rows_per_shard is None else Writing("arrow")

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "rows_per_shard": self.rows_per_shard,
            "split": self.split,
            "batch_rows": self._shards.batch_rows,
        }

    def finish(self, units: Units, shards: str, advance: Advance) -> Finished:
        schema = with_features(settle(units.folder, units.receipts, self.writing.format, units.schema))
        if self.rows_per_shard is None:
            made = make_shards(units.folder, units.receipts, schema, self.writing, self.split, advance)
        else:
            made = cut_shards(
                units.folder,
                units.receipts,
                schema,
                self.writing.format,
                self._shards,
                self.rows_per_shard,
                self.split,
                advance,
            )
        return Finished(named(made, shards, EXTENSIONS[self.format]), card_of(schema, EXTENSIONS[self.format]))


def with_features(schema: pa.Schema) -> pa.Schema:
    """The schema with `datasets`' features for all its columns: those it tells, else what its types are."""
    features = _features(schema)
    return schema.remove_metadata() if features is None else schema.with_metadata(metadata(features))


def _features(schema: pa.Schema) -> dict[str, Any] | None:
    """None where `datasets` has no feature for a type."""
    try:
        return features_of(schema)
    except InputError:
        return None


def card_of(schema: pa.Schema, extension: str) -> CardFacts:
    features = _features(schema)
    columns = [(column.name, str(column.type)) for column in schema]
    return CardFacts([], None if features is None else as_yaml(features), extension, columns)
