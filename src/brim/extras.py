"""Optional libraries: what each is for, whether it is installed, and the command that installs it.

Hints name the extra (`pip install 'brim[embed]'`), and the missing libraries with the versions that brim's metadata
requires: those can be installed where brim itself did not come from a package index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from brim.errors import MissingDependencyError
from brim.records import dataclass

if TYPE_CHECKING:  # workers import this module, and do not need these
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
        Extra(
            "compute",
            {"cloudpickle": "cloudpickle", "jinja2": "jinja2", "tokenizers": "tokenizers"},
            "brim map and brim tokenize",
        ),
        Extra(
            "datasets",
            {"datasets": "datasets", "PIL": "pillow"},  # without Pillow, images of a dataset do not decode
            "datasets.Dataset as a source; brim.map, brim.push_to_hub; images",
        ),
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
        Extra("media", {"torchcodec": "torchcodec", "pdfplumber": "pdfplumber"}, "decoding of audio, video and PDF"),
        Extra(
            "neuro",
            {"nibabel": "nibabel", "openpyxl": "openpyxl", "pathspec": "pathspec"},
            "checks of NIfTI files, spreadsheets, .bidsignore",
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


@cache
def _requirements() -> list[Requirement]:
    """Return the requirements in brim's metadata, also of the extras; [] if brim runs without being installed."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement

    try:
        return [Requirement(line) for line in requires("brim") or []]
    except PackageNotFoundError:
        return []


def own_requirements() -> list[Requirement]:
    """Return the requirements without which brim does not run."""
    return [requirement for requirement in _requirements() if requirement.marker is None]


def install_command(packages: Iterable[str]) -> str:
    """Return the pip command for some packages, with the lowest versions that brim supports."""
    bounds = {item.name.lower(): str(item.specifier) for item in _requirements() if item.marker is not None}
    names = [f"{package}{bounds.get(package, '')}" for package in packages]
    return "pip install " + " ".join(f"'{name}'" if re.search("[<>]", name) else name for name in names)


def missing(extra: str, why: str, *modules: str, instead: str = "") -> MissingDependencyError:
    """Return the error for missing libraries. `instead` is added to the hint: another way to the same result."""
    packages = EXTRAS[extra].packages if extra in EXTRAS else {extra: extra}
    command = install_command(packages[name] for name in modules or packages)
    if extra in EXTRAS:
        command = f"pip install 'brim[{extra}]' (or only the missing libraries: {command})"
    return MissingDependencyError(why, hint=f"Install it with: {command}{instead}", extra=extra)


def need_extra(extra: str, why: str, *modules: str) -> None:
    """Raise MissingDependencyError unless the libraries are installed. Nothing is imported."""
    absent = [name for name in modules or EXTRAS[extra].packages if find_spec(name) is None]
    if absent:
        raise missing(extra, why, *absent)


def is_missing(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    return [package for module, package in EXTRAS[extra].packages.items() if find_spec(module) is None]
