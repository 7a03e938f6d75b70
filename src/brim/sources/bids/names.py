"""File names of BIDS: `sub-01_ses-02_task-rest_run-1_bold.nii.gz` in parts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from brim.sources.kinds import kind_of
from brim.sources.order import natural

_PART = re.compile(r"([A-Za-z0-9]+)-(.+)")
TEXT_EXTENSIONS = frozenset([".tsv", ".json", ".bval", ".bvec"])
LARGE_TABLES = frozenset(
    ["motion", "physio", "stim", "timeseries", "regressors"]
)  # recordings that happen to be tables: files, not texts


@dataclass(frozen=True, slots=True)
class Name:
    """Entities in the order of the name, the suffix, and everything from the first dot on."""

    entities: tuple[tuple[str, str], ...]
    suffix: str
    extension: str

    def get(self, entity: str) -> str | None:
        return dict(self.entities).get(entity)

    def within(self, other: Name) -> bool:
        """Whether all entities of this name are those of the other: it then applies to it."""
        return set(self.entities) <= set(other.entities)

    def sort_key(self) -> tuple[object, ...]:
        return tuple((entity, natural(value)) for entity, value in self.entities)


def is_text(name: Name) -> bool:
    """Whether a file is small text that travels as such."""
    return name.extension in TEXT_EXTENSIONS and not (name.extension == ".tsv" and name.suffix in LARGE_TABLES)


def parse_name(name: str) -> Name | None:
    """The parts of a file or folder name, or None if it is not a BIDS name."""
    stem, dot, rest = name.partition(".")
    *parts, suffix = stem.split("_")
    entities = []
    for part in parts:
        match = _PART.fullmatch(part)
        if match is None:
            return None
        entities.append((match[1], match[2]))
    if not suffix or "-" in suffix:
        return None
    return Name(tuple(entities), suffix, dot + rest)


def file_kind(name: Name) -> str:
    """What decodes a file: "nifti" only for plain images, so that CIFTI and its kin stay files."""
    kind = kind_of("x" + name.extension.lower())
    if kind == "nifti" and name.extension.lower() not in (".nii", ".nii.gz"):
        return "file"
    return kind
