"""The `datasets` features of rows on their way through a step, as JSON in the schema's metadata.

`datasets` itself is imported only for columns that plain Arrow types do not describe: images, labels that are
made from names, arrays of a fixed shape, JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from brim.compute.rows.schemas import contains_type, unify
from brim.errors import InputError
from brim.extras import missing
from brim.sources.features import NoFeature, as_feature_dict, feature_of_type

Feature = Any  # what Features.to_dict() has for one column
KEY = b"huggingface"
_PLAIN = ("Value", "List", "LargeList")


def features_of(schema: pa.Schema) -> dict[str, Feature]:
    """Return the features of a schema's columns, from its metadata, else from the Arrow types."""
    stored: Mapping[str, Feature] = {}
    if schema.metadata and KEY in schema.metadata:
        try:
            stored = (json.loads(schema.metadata[KEY]).get("info") or {}).get("features") or {}
        except (ValueError, AttributeError):
            stored = {}
    return {field.name: stored[field.name] if field.name in stored else inferred(field) for field in schema}


def inferred(field: pa.Field) -> Feature:
    """Infer the feature of an Arrow field."""
    if contains_type(field.type, lambda kind: isinstance(kind, pa.BaseExtensionType)):
        datasets = import_datasets("a column of a special type")
        return datasets.Features.from_arrow_schema(pa.schema([field])).to_dict()[field.name]
    try:
        return feature_of_type(field.type)
    except NoFeature as error:
        raise InputError(
            f"The column {field.name!r} is of the type {error}, which `datasets` has no feature for.",
            hint="Cast it to another type in the function.",
        ) from error


def is_plain(feature: Feature, *, labels: bool = True) -> bool:
    """Return whether plain Arrow types describe a feature. `labels`: class labels count as numbers."""
    if isinstance(feature, list):
        return len(feature) == 1 and is_plain(feature[0], labels=labels)
    if not isinstance(feature, Mapping):
        return False
    kind = feature.get("_type")
    if not isinstance(kind, str):  # a struct, perhaps with a field of that name
        return all(is_plain(inner, labels=labels) for inner in feature.values())
    if kind == "ClassLabel":
        return labels
    return kind in _PLAIN and ("feature" not in feature or is_plain(feature["feature"], labels=labels))


def tagged(table: pa.Table, features: Mapping[str, Feature]) -> pa.Table:
    """Tag a table with features, as `datasets` writes them."""
    return table.replace_schema_metadata(metadata(features))


def metadata(features: Mapping[str, Feature]) -> dict[bytes, bytes]:
    """Return the schema metadata for features."""
    return {KEY: json.dumps({"info": {"features": dict(features)}}).encode()}


def merge_features(schemas: Iterable[pa.Schema], final: pa.Schema) -> dict[str, Feature]:
    """Merge the features of tables whose merged schema is `final`.

    A column keeps the feature of the first table that has it with its final type.
    """
    merged: dict[str, Feature] = {}
    for schema in schemas:
        if len(merged) == len(final):
            break
        own = features_of(schema)
        for field in schema:
            position = final.get_field_index(field.name)
            if field.name not in merged and position >= 0 and final.field(position).type == field.type:
                merged[field.name] = own[field.name]
    return {field.name: merged[field.name] if field.name in merged else inferred(field) for field in final}


def unified(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Merge schemas, with their features if any of them has some."""
    final = unify(schemas)
    if not any(schema.metadata and KEY in schema.metadata for schema in schemas):
        return final
    return final.with_metadata(metadata(merge_features(schemas, final)))


def as_schema(features: Any) -> pa.Schema:
    """Convert the argument `features=` (a Features, its dict, or an Arrow schema) to a schema with metadata."""
    if isinstance(features, pa.Schema):
        return features.with_metadata(metadata(features_of(features)))
    if not hasattr(features, "arrow_schema"):
        try:
            features = import_datasets("features=").Features.from_dict(as_feature_dict(features))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"features= is not what Features.to_dict() gives: {error}.") from error
    return features.arrow_schema


def import_datasets(why: str) -> Any:
    """Import `datasets`, which takes 85 MB and a second, so only if it is needed."""
    try:
        import datasets
    except ImportError as error:
        raise missing("datasets", f"The library `datasets` is needed for {why}.") from error
    return datasets
