"""The `datasets` features of a table, without importing `datasets`.

Features decide what `load_dataset` returns (an image instead of bytes), so they are stored in every shard and in the
card. The JSON is that of `Features.to_dict()`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import InputError

_EXTENSIONS = {
    "nifti": ".nii .nii.gz",
    "image": ".png .jpg .jpeg .jpe .jfif .jp2 .gif .bmp .dib .webp .tif .tiff .avif .heic .ico .ppm .pgm "
    ".pbm .pnm .tga .pcx .dds .icns .jpx .j2k",
    "audio": ".wav .mp3 .flac .ogg .oga .opus .m4a .aac .aif .aiff .aifc .au .caf .w64 .rf64 .snd .mp2",
    "video": ".mp4 .m4v .mov .mkv .webm .avi .mpg .mpeg .wmv .flv .ogv .3gp .ts .m2ts",
    "pdf": ".pdf",
    "mesh": ".glb .gltf .ply .stl",
}
_KIND_OF = {extension: kind for kind, names in _EXTENSIONS.items() for extension in names.split()}

KINDS = (*_EXTENSIONS, "file")

# Files that usually accompany the data and are not the data.
_COMPANIONS = frozenset(
    ".md .txt .rst .json .jsonl .csv .tsv .yaml .yml .toml .xml .html .htm .log .bval .bvec .cff .bib".split()  # noqa: SIM905
)
_COMPANION_NAMES = frozenset(["license", "licence", "readme", "changes", "changelog", "authors", "copying"])

# `datasets` 5.2 counts these as their path strings when it decides how many shards to write.
SIZED_BY_PATH = frozenset(["nifti", "pdf", "mesh"])


def kind_of(path: str) -> str:
    """Return the type of a file by its extension; "file" if no feature decodes it."""
    return _KIND_OF.get(extension_of(path), "file")


def extension_of(path: str) -> str:
    """Return the lower-case extension, with a dot; two parts for compressed files (".nii.gz")."""
    name = path.rsplit("/", 1)[-1].lower()
    stem, dot, last = name.rpartition(".")
    if not dot or not stem:
        return ""
    if last in ("gz", "bz2", "xz", "zst") and "." in stem.lstrip("."):
        return "." + stem.rpartition(".")[2] + "." + last
    return "." + last


def is_companion(path: str) -> bool:
    """Return whether a file usually accompanies data and is not data."""
    extension = extension_of(path)
    name = path.rsplit("/", 1)[-1].lower()
    return extension in _COMPANIONS or (not extension and name in _COMPANION_NAMES)


def feature_of(kind: str) -> dict[str, object]:
    """Return the `datasets` feature of a file column, as in its JSON."""
    if kind == "file":
        return {
            "bytes": {"dtype": "binary", "_type": "Value"},
            "path": {"dtype": "string", "_type": "Value"},
        }
    return {"_type": kind.capitalize()}


def parse_kind(text: str) -> str:
    kind = text.strip().lower()
    if kind not in KINDS:
        raise InputError(f"{text!r} is not a type of file.", hint=f"Use one of: {', '.join(KINDS)}.")
    return kind


Feature = dict[str, Any]

_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64", "date32[day]": "date32"}
_NAMES |= {"date64[ms]": "date64"}


class NoFeature(ValueError):
    """`datasets` has no feature for an Arrow type."""


def feature_of_type(kind: pa.DataType) -> Feature:
    """Return the feature of an Arrow type; NoFeature if `datasets` has none."""
    if pa.types.is_struct(kind):
        return {field.name: feature_of_type(field.type) for field in kind}
    if pa.types.is_fixed_size_list(kind):
        return {"feature": feature_of_type(kind.value_type), "length": kind.list_size, "_type": "List"}
    if pa.types.is_list(kind):
        return {"feature": feature_of_type(kind.value_type), "_type": "List"}
    if pa.types.is_large_list(kind):
        return {"feature": feature_of_type(kind.value_type), "_type": "LargeList"}
    if pa.types.is_dictionary(kind):
        return feature_of_type(kind.value_type)
    return {"dtype": _dtype(kind), "_type": "Value"}


def _dtype(kind: pa.DataType) -> str:
    plain = (
        pa.types.is_primitive(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
        or pa.types.is_decimal128(kind)
        or pa.types.is_decimal256(kind)
        or pa.types.is_fixed_size_binary(kind)
        or str(kind) in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    )
    if not plain or pa.types.is_interval(kind):
        raise NoFeature(str(kind))
    return _NAMES.get(str(kind), str(kind))


def as_feature_dict(features: Any) -> dict[str, Any]:
    """Return the argument `features=` as a dict: it is a `datasets.Features`, or its dict."""
    if hasattr(features, "to_dict"):
        features = features.to_dict()
    if not isinstance(features, Mapping):
        raise InputError("features= must be a datasets.Features or its to_dict().")
    return dict(features)


def kind_of_feature(feature: Any) -> tuple[str, bool] | None:
    """Return the type of the files of a feature, and whether it has lists of them; None if it has no files."""
    if isinstance(feature, list) and len(feature) == 1:
        inner = kind_of_feature(feature[0])
        return (inner[0], True) if inner else None
    if not isinstance(feature, Mapping):
        return None
    kind = feature.get("_type")
    if kind in ("List", "Sequence", "LargeList"):
        inner = kind_of_feature(feature.get("feature"))
        return (inner[0], True) if inner else None
    name = str(kind).lower()
    return (name, False) if name in KINDS else None


def as_yaml(features: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the features as in the `dataset_info.features` of a card."""
    return [{"name": name, **_yaml(feature)} for name, feature in features.items()]


def _yaml(feature: Any) -> dict[str, Any]:
    if isinstance(feature, list):
        return _yaml({"feature": feature[0], "_type": "List"})
    kind = feature.get("_type")
    parameters = {key: value for key, value in feature.items() if key != "_type"}
    if not isinstance(kind, str):  # a struct, perhaps with a field of that name
        return {"struct": as_yaml(feature)}
    if kind in ("List", "LargeList", "Sequence"):
        inner = _yaml(parameters.pop("feature"))
        short = inner.get("dtype") if set(inner) == {"dtype"} and isinstance(inner["dtype"], str) else None
        name = "large_list" if kind == "LargeList" else "list"
        body = inner["struct"] if set(inner) == {"struct"} else short or inner
        return {name: body, **{key: value for key, value in parameters.items() if value not in (None, -1)}}
    if kind == "Value":
        return {"dtype": parameters["dtype"]}
    if kind == "ClassLabel":
        names = {str(number): name for number, name in enumerate(parameters["names"])}
        return {"dtype": {"class_label": {"names": names}}}
    name = "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(kind))  # snake case
    parameters = {key: value for key, value in parameters.items() if value is not None}
    return {"dtype": {name: parameters} if parameters else name}


def features_in(card: Mapping[str, Any], config: str) -> dict[str, Any] | None:
    """Return the features of a config in the `dataset_info` of a card; None if it has no readable ones."""
    stored = card.get("dataset_info")
    entries = [entry for entry in (stored if isinstance(stored, list) else [stored]) if isinstance(entry, Mapping)]
    matching = [entry for entry in entries if entry.get("config_name", "default") == config]
    for entry in matching or (entries if len(entries) == 1 else []):
        if isinstance(entry.get("features"), list):
            try:
                features = _from_yaml(entry["features"])
            except (KeyError, TypeError, ValueError, AttributeError, StopIteration, RecursionError):
                return None
            return dict(features)
    return None


def _from_yaml(stored: Any) -> Any:
    """Parse what `as_yaml` or `datasets` wrote: a list of named features, or one feature."""
    if isinstance(stored, list):
        return {str(entry["name"]): _from_yaml({k: v for k, v in entry.items() if k != "name"}) for entry in stored}
    if not stored:
        return {}
    kind = next(
        (key for key in ("list", "large_list", "sequence", "struct", "dtype") if key in stored), next(iter(stored))
    )
    parameters = {key: value for key, value in stored.items() if key != kind}
    inner = stored[kind]
    if kind in ("list", "large_list", "sequence"):
        feature = _from_yaml({"dtype": inner} if isinstance(inner, str) else inner)
        if kind == "sequence" and isinstance(inner, list):  # was a struct of lists
            return {name: {"feature": inner, **parameters, "_type": "List"} for name, inner in feature.items()}
        return {"feature": feature, **parameters, "_type": "LargeList" if kind == "large_list" else "List"}
    if kind == "struct":
        return _from_yaml(inner)
    if kind != "dtype":
        names = inner.get("names")
        names_feature = {"names": [names[key] for key in sorted(names, key=int)]} if isinstance(names, Mapping) else {}
        return {"_type": _camel(kind), **inner, **names_feature}
    if not isinstance(inner, str):
        return _from_yaml(inner)
    try:
        _arrow_type(inner)
    except (ValueError, KeyError, IndexError):
        return {"_type": _camel(inner)}
    return {**stored, "_type": "Value"}


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def fits_type(feature: Any, kind: pa.DataType, unknown: bool = False) -> bool:
    """Return whether a column of this type can have a feature, or `unknown` for a feature that brim does not know.

    A card may describe other files, and the features in a file may be older than its columns.
    """
    if isinstance(feature, Mapping) and not isinstance(feature.get("_type"), str):
        parts = {part.name: part.type for part in kind} if pa.types.is_struct(kind) else {}
        return set(parts) == set(feature) and all(fits_type(feature[n], parts[n], unknown) for n in parts)
    if not isinstance(feature, Mapping):
        return unknown and isinstance(feature, list) and len(feature) == 1
    name = feature["_type"]
    if name in ("List", "LargeList"):
        listed = pa.types.is_large_list(kind) if name == "LargeList" else pa.types.is_list(kind)
        listed = listed or (pa.types.is_fixed_size_list(kind) and feature.get("length") == kind.list_size)
        return bool(listed and fits_type(feature.get("feature"), kind.value_type, unknown))
    if name == "Value":
        try:
            return bool(_arrow_type(str(feature.get("dtype"))) == kind)
        except (ValueError, KeyError, IndexError):
            return unknown
    if name == "ClassLabel":
        return bool(pa.types.is_int64(kind) and isinstance(feature.get("names"), list))
    if name.lower() not in _EXTENSIONS:
        return unknown
    return pa.types.is_struct(kind) and {part.name for part in kind} == {"bytes", "path"}


def cast_to_feature(column: Any, feature: Any, name: str) -> Any:
    """Cast a column to a feature of the user, if brim knows the feature."""
    kind = feature.get("_type") if isinstance(feature, Mapping) else None
    try:
        if kind == "Value":
            return column.cast(_arrow_type(str(feature.get("dtype"))))
        if kind == "ClassLabel":
            if pa.types.is_integer(column.type):
                return column.cast(pa.int64())
            names = pa.array(list(feature["names"]), pa.string())
            numbers = pc.index_in(column.cast(pa.string()), names)
            if numbers.null_count > column.null_count:
                raise InputError(f"The column {name!r} has values that are not class names of its ClassLabel.")
            return numbers.cast(pa.int64())
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise InputError(f"The column {name!r} cannot be converted to the type in features=: {error}.") from error
    return column


def _arrow_type(dtype: str) -> pa.DataType:
    """Return the Arrow type of the dtype of a Value."""
    match = re.fullmatch(r"(decimal128|decimal256|timestamp|fixed_size_binary)[(\[](.*)[)\]]", dtype)
    if match is None:
        return pa.type_for_alias(dtype)
    kind, inside = match[1], [part.strip() for part in match[2].split(",")]
    if kind.startswith("decimal"):
        return getattr(pa, kind)(int(inside[0]), int(inside[1]))
    if kind == "fixed_size_binary":
        return pa.binary(int(inside[0]))
    return pa.timestamp(inside[0], tz=inside[1].removeprefix("tz=") if len(inside) > 1 else None)
