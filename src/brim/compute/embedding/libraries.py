"""Optional libraries and the devices that torch finds."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from brim.errors import InputError, MissingExtra


def device_for(device: str, torch: Any) -> str:
    """`auto` is the fastest there is."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(name for name, found in there.items() if found)
    if not there[device.partition(":")[0]]:
        raise InputError(f"torch finds no {device} here.", hint="Use --device=auto, or install torch for it.")
    return device


def need(module: str) -> Any:
    """An optional library."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise
        name = {"sentence_transformers": "sentence-transformers", "PIL": "pillow"}.get(package, package)
        raise MissingExtra(f"This model needs {name}.", hint="pip install 'brim[embed]'", extra="embed") from error
