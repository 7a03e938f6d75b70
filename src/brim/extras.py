"""Optional libraries: which there are, what each is for, and what to type to have it.

Hints name the extra (`pip install 'brim[embed]'`), and the missing libraries with the versions that brim's own metadata
asks for: those can be installed where brim itself did not come from a package index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from brim.errors import MissingDependencyError
from brim.records import dataclass

if TYPE_CHECKING:  # workers import this module, and have no use for those
    from packaging.requirements import Requirement


@dataclass(frozen=True, slots=True)
class Extra:
    """`packages` are the names to install, by the module that each is imported as."""

    name: str
    packages: dict[str, str]
    enables: str


EXTRAS = {
    extra.name: extra
    for extra in (
        Extra("compute", {"cloudpickle": "cloudpickle", "tokenizers": "tokenizers"}, "brim map and brim tokenize"),
        Extra("datasets", {"datasets": "datasets"}, "datasets.Dataset as a source; brim.map, brim.push_to_hub"),
        Extra(
            "embed",
            {
                "torch": "torch",
                "sentence_transformers": "sentence-transformers",
                "transformers": "transformers",
                "safetensors": "safetensors",
                "PIL": "pillow",
            },
            "brim embed",
        ),
        Extra("fast", {"gigatoken": "gigatoken"}, "a faster encoder for brim tokenize"),
        Extra("media", {"torchcodec": "torchcodec", "pdfplumber": "pdfplumber"}, "audio, video and PDF that decode"),
        Extra(
            "neuro",
            {"nibabel": "nibabel", "openpyxl": "openpyxl", "pathspec": "pathspec"},
            "NIfTI files looked into, spreadsheets, .bidsignore",
        ),
        Extra("ray", {"ray": "ray"}, "--engine ray"),
        Extra("s3", {"obstore": "obstore"}, "buckets: s3://, gs://, az://"),
        Extra("sql", {"duckdb": "duckdb"}, "brim select --sql"),
        Extra("watch", {"py_spy": "py-spy"}, "Python stacks in the log of brim run"),
    )
}


def installed_version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def install_command(packages: Iterable[str]) -> str:
    """What to type, with the lowest versions that brim takes."""
    bounds = _bounds()
    asked = [f"{package}{bounds.get(package, '')}" for package in packages]
    return "pip install " + " ".join(f"'{name}'" if re.search("[<>]", name) else name for name in asked)


@cache
def _requirements() -> list[Requirement]:
    """What brim's own metadata asks for; nothing where it runs without being installed."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    try:
        return [Requirement(line) for line in requires("brim") or []]
    except PackageNotFoundError:
        return []


def own_requirements() -> list[Requirement]:
    """What brim cannot do without."""
    return [one for one in _requirements() if one.marker is None]


def _bounds() -> dict[str, str]:
    """The versions that are asked for of optional libraries."""
    return {one.name.lower(): str(one.specifier) for one in _requirements() if one.marker is not None and one.specifier}


def missing(extra: str, why: str, *modules: str, instead: str = "") -> MissingDependencyError:
    """The error to raise where a library is not there. `instead`: what else would do."""
    packages = EXTRAS[extra].packages if extra in EXTRAS else {extra: extra}
    command = install_command(packages[name] for name in modules or packages)
    if extra in EXTRAS:
        command = f"pip install 'brim[{extra}]' (or only what is missing: {command})"
    return MissingDependencyError(why, hint=f"Install it with: {command}{instead}", extra=extra)


def need_extra(extra: str, why: str, *modules: str) -> None:
    """MissingDependencyError unless the libraries are there, which is found out without importing them."""
    lacking = [name for name in modules or EXTRAS[extra].packages if find_spec(name) is None]
    if lacking:
        raise missing(extra, why, *lacking)


def is_missing(extra: str) -> list[str]:
    """The packages of an extra that are not there."""
    return [package for module, package in EXTRAS[extra].packages.items() if find_spec(module) is None]
